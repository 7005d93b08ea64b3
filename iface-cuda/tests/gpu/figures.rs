//! Measures identities of reused addresses, copies compared with the driver's own copies, and the
//! time of queries.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use hmem_core::{Address, Allocation, AllocationKind, Iface, IfaceExt, monitor::Subscription};

use crate::{
    Extent,
    driver::{Driver, median, size, watched},
    exports,
    report::{Failure, Outcome, Report, Row},
};

/// Share of the bandwidth of `cuMemcpy` that a copy of the iface must reach.
const OWED: f64 = 0.95;

/// Length in bytes from which a copy must reach the required share of the bandwidth.
const OWED_FROM: u64 = 1 << 20;

pub(crate) fn identities(
    driver: &Driver,
    extent: Extent,
    kind: AllocationKind,
    report: &mut Report<'_>,
) {
    let columns = [
        "kind",
        "rounds",
        "same address",
        "same identity",
        "freed and taken for live",
        "us a round",
    ];
    report.table(format_args!("Identities of reused addresses: {}", kind.name()), &columns);
    report.row(&[kind.name(), &extent.reuse_rounds.to_string()], || {
        let monitor = driver.cuda.start_monitor()?;
        let (mut address, mut identity, mut live) = (0u64, 0u64, 0u64);
        let mut last: Option<Allocation> = None;
        let start = Instant::now();
        for round in 0..extent.reuse_rounds {
            let memory = driver.with(1 << 20, kind, |memory| {
                if let Some(last) = &last {
                    address += u64::from(last.base() == memory.base());
                    identity += u64::from(last.id == memory.id);
                    // The subscription has ended: the monitor compares the identity only.
                    live += u64::from(monitor.valid(&Subscription::unnumbered(), last)?);
                }
                Ok(*memory)
            });
            last = Some(memory.map_err(|failure| failure.after(format_args!("round {round}")))?);
        }
        let each = start.elapsed().as_secs_f64() * 1e6 / extent.reuse_rounds as f64;
        let cells = [reused(address), identity.to_string(), live.to_string(), format!("{each:.1}")];
        Ok(Row::new(cells).met(identity == 0 && live == 0))
    });
}

/// Returns the table cell with the number of reused addresses. If it is 0, the other cells of the
/// row prove nothing.
pub(crate) fn reused(times: u64) -> String {
    if times == 0 { "0: nothing is shown".to_owned() } else { times.to_string() }
}

/// Measures copies of each size in both directions, alternately by the iface and by `cuMemcpy`.
/// Reports the iface's bandwidth divided by that of `cuMemcpy`.
pub(crate) fn copies(driver: &Driver, extent: Extent, locked: bool, report: &mut Report<'_>) {
    let host = if locked { "page-locked" } else { "pageable" };
    report.table(
        format_args!("Copies beside cuMemcpy, {host} host memory"),
        &[
            "host memory",
            "size",
            "direction",
            "iface GiB/s",
            "cuMemcpy GiB/s",
            "ratio",
            "goal of 0.95",
        ],
    );
    let mut len = 4096;
    while len <= extent.largest_copy {
        for to_device in [true, false] {
            let direction = if to_device { "to device" } else { "to host" };
            report.row(&[host, &size(len), direction], || {
                driver.with(len, AllocationKind::Device, |device| {
                    let between = |host: Address| {
                        let (to, from) =
                            if to_device { (device.base(), host) } else { (host, device.base()) };
                        copy(driver, extent, to, from, len)
                    };
                    if locked {
                        return driver.with(len, AllocationKind::Host, |host| between(host.base()));
                    }
                    let mut host = vec![1u8; len as usize];
                    between(Address::of_ptr(host.as_mut_ptr()))
                })
            });
        }
        len *= 4;
    }
}

/// Measures copies in rounds: one by the iface and one by `cuMemcpy`, which alternate in going
/// first. Returns the median times, and ignores the first round.
fn copy(driver: &Driver, extent: Extent, to: Address, from: Address, len: u64) -> Outcome<Row> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=extent.repetitions {
        for mine in [round % 2 == 0, round % 2 != 0] {
            if mine {
                let start = Instant::now();
                // SAFETY: both sides were allocated for at least `len` bytes, and no other code
                // uses them.
                unsafe { driver.cuda.copy(to, from, len) }?;
                ours.push(start.elapsed());
            } else {
                theirs.push(driver.memcpy(to.0, from.0, len)?);
            }
        }
    }
    let (ours, theirs) = (median(ours), median(theirs));
    let rate = |time: Duration| len as f64 / time.as_secs_f64() / f64::from(1 << 30);
    let ratio = theirs.as_secs_f64() / ours.as_secs_f64();
    let (verdict, met) = judged(ratio, len, driver.is_real());
    let figures = [rate(ours), rate(theirs), ratio].map(|figure| format!("{figure:.2}"));
    Ok(Row::new(figures.into_iter().chain([verdict.to_owned()])).met(met))
}

/// Returns the verdict on a ratio as text, and false if the ratio is below the required share. A
/// ratio of the fake driver or of a short copy is not judged.
pub(crate) fn judged(ratio: f64, len: u64, real: bool) -> (&'static str, bool) {
    match ratio {
        _ if !real || len < OWED_FROM => ("not judged", true),
        ratio if ratio >= OWED => ("met", true),
        _ => ("NOT MET", false),
    }
}

/// Measures queries of memory that does not belong to CUDA.
pub(crate) fn cost_of_the_system(driver: &Driver, extent: Extent, report: &mut Report<'_>) {
    report.table("Cost of queries: memory of the system", &["of", "query, ns"]);
    report.row(&["the stack"], || {
        let on_the_stack = 0u8;
        let host = Address::of_ptr(&on_the_stack);
        let cost = nanos(extent, || match driver.cuda.query(host)? {
            None => Ok(()),
            Some(memory) => Err(format!("query returned CUDA memory: {memory:?}").into()),
        })?;
        Ok(Row::new([cost]))
    });
}

pub(crate) fn costs(
    driver: &Driver,
    extent: Extent,
    kind: AllocationKind,
    report: &mut Report<'_>,
) {
    let columns = [
        "kind",
        "size",
        "query, ns",
        "is it still there, ns",
        "segments, ns",
        "export and release, us",
    ];
    report.table(format_args!("What asking costs: {}", kind.name()), &columns);
    for len in extent.cost_sizes {
        report.row(&[kind.name(), &size(*len)], || {
            driver.with(*len, kind, |memory| {
                let monitor = driver.cuda.start_monitor()?;
                let inside = Address(memory.base().0 + len / 2);
                let query = nanos(extent, || {
                    let found = driver.cuda.query(inside)?;
                    found.map(|_| ()).ok_or_else(|| "not taken for CUDA's".to_owned().into())
                })?;
                let valid = watched(&*monitor, memory, |subscription| {
                    nanos(extent, || match monitor.valid(subscription, memory)? {
                        true => Ok(()),
                        false => Err("live memory counts as freed".to_owned().into()),
                    })
                })?;
                let segments = nanos(extent, || {
                    black_box(driver.cuda.physical_segments(memory.range)?);
                    Ok(())
                })?;
                Ok(Row::new([query, valid, segments, exports::cost(driver, extent, memory)?]))
            })
        });
    }
}

/// Measures batches of calls of `run`. Returns the median time of one call, and ignores the first
/// batch.
fn nanos(extent: Extent, mut run: impl FnMut() -> Outcome<()>) -> Result<String, Failure> {
    const EACH: u32 = 1000;
    let mut times = Vec::new();
    for _ in 0..=extent.repetitions {
        let start = Instant::now();
        for _ in 0..EACH {
            run()?;
        }
        times.push(start.elapsed());
    }
    Ok((median(times).as_nanos() / u128::from(EACH)).to_string())
}
