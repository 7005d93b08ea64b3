//! Identities on reuse, copies beside the driver's own, and what asking costs.

use std::{io, io::Write};

use hmem_core::{Address, Allocation, AllocationKind, Iface};

use crate::{
    Extent,
    driver::{Driver, median, size},
};

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::StreamOrdered,
    AllocationKind::Managed,
    AllocationKind::Host,
    AllocationKind::Virtual,
];

pub(crate) fn identities(driver: &Driver, extent: Extent, out: &mut Vec<u8>) -> io::Result<()> {
    writeln!(out, "\n### Identities of reused addresses\n")?;
    writeln!(out, "| kind | rounds | same address | same identity |")?;
    writeln!(out, "|---|---|---|---|")?;
    let monitor = driver.cuda.monitor().expect("monitor");
    for kind in KINDS.into_iter().filter(|kind| *kind != AllocationKind::Virtual) {
        let (mut address, mut identity) = (0u64, 0u64);
        let mut last: Option<Allocation> = None;
        for _ in 0..extent.reuse_rounds {
            let memory = driver.allocate(1 << 20, kind).unwrap_or_else(|error| panic!("{error}"));
            if let Some(last) = &last {
                address += u64::from(last.base() == memory.base());
                identity += u64::from(last.id == memory.id);
                assert!(!monitor.valid(last).expect("ask"), "freed memory is taken for live");
            }
            driver.free(&memory);
            last = Some(memory);
        }
        assert_eq!(identity, 0, "an identity came twice");
        writeln!(out, "| {} | {} | {address} | {identity} |", kind.name(), extent.reuse_rounds)?;
    }
    Ok(())
}

/// Each size both ways, by the iface and by `cuMemcpy`, in turns; the ratio is ours over the driver's.
pub(crate) fn copies(driver: &Driver, extent: Extent, out: &mut Vec<u8>) -> io::Result<()> {
    writeln!(out, "\n### Copies beside cuMemcpy, page-locked host memory\n")?;
    writeln!(out, "| size | direction | iface GiB/s | cuMemcpy GiB/s | ratio |")?;
    writeln!(out, "|---|---|---|---|---|")?;
    let device = driver.allocate(extent.largest_copy, AllocationKind::Device).expect("allocate");
    let host = driver.allocate(extent.largest_copy, AllocationKind::Host).expect("allocate");
    let mut len = 4096;
    while len <= extent.largest_copy {
        for (direction, to, from) in
            [("to device", device.base(), host.base()), ("to host", host.base(), device.base())]
        {
            let ours = median(extent.repetitions, || {
                // SAFETY: both sides were allocated for at least `len` bytes, and nobody else uses them.
                unsafe { driver.cuda.copy(to, from, len) }.expect("copy");
            });
            let theirs = driver.current(|| median(extent.repetitions, || driver.memcpy(to.0, from.0, len)));
            let rate = |time: std::time::Duration| len as f64 / time.as_secs_f64() / f64::from(1 << 30);
            writeln!(
                out,
                "| {} | {direction} | {:.2} | {:.2} | {:.2} |",
                size(len),
                rate(ours),
                rate(theirs),
                theirs.as_secs_f64() / ours.as_secs_f64()
            )?;
        }
        len *= 4;
    }
    driver.free(&device);
    driver.free(&host);
    Ok(())
}

pub(crate) fn costs(driver: &Driver, extent: Extent, out: &mut Vec<u8>) -> io::Result<()> {
    const EACH: u32 = 1000;
    let nanos = |run: &mut dyn FnMut()| {
        let whole = median(extent.repetitions, || (0..EACH).for_each(|_| run()));
        whole.as_nanos() / u128::from(EACH)
    };
    writeln!(out, "\n### What asking costs\n\n| what | of | ns |\n|---|---|---|")?;
    let on_the_stack = 0u8;
    let host = Address::of_ptr(&on_the_stack);
    writeln!(
        out,
        "| whose is it | memory of the system | {} |",
        nanos(&mut || drop(driver.cuda.query(host)))
    )?;
    let monitor = driver.cuda.monitor().expect("monitor");
    for kind in KINDS {
        let memory = driver.allocate(64 << 10, kind).expect("allocate");
        let query = nanos(&mut || drop(driver.cuda.query(memory.base())));
        let valid = nanos(&mut || drop(monitor.valid(&memory)));
        let segments = nanos(&mut || drop(driver.cuda.segments(memory.range)));
        let name = kind.name();
        writeln!(out, "| whose is it | {name} | {query} |")?;
        writeln!(out, "| is it still there | {name} | {valid} |")?;
        writeln!(out, "| segments | {name} | {segments} |")?;
        driver.free(&memory);
    }
    Ok(())
}
