//! The check of one combination of memory, NIC and path ([`Case`]).
//!
//! The check allocates and registers the memory, transfers bytes and compares them. Then it closes
//! and frees everything, and looks for leaks.

use std::{mem, time::Instant};

use hmem::{
    Access, DeviceBuffer, Domain, Error, ErrorKind, Memory, MemoryRegion, Path, Region, RemoteKey,
    Request, cause::Step, iface::AllocRequest, provider::LiveObjects, system::MemFd,
};

use super::{
    Case, Extent, MemorySort, Selection,
    link::{Link, LinkTarget},
    memory::{FileBuffer, HugeBuffer, heap},
    pattern,
    report::{Atomic, Report, Row},
    residue::Residue,
    target::Target,
};
use crate::{
    json::{Attempt, Skipped},
    machine::{Machine, allocate, root},
    problem::Problem,
};

/// Length of the guard bytes after each transfer. A transfer must not change them.
const TAIL: u64 = 16;
/// Seed of the pattern with which the region is filled before the transfers.
const BACKGROUND: u64 = 1 << 40;
/// Seed of the pattern of the transferred bytes.
const PAYLOAD: u64 = 2 << 40;
/// Addend of the fetch-add.
const ADDEND: u64 = 0x0101_0101_0101_0101;

/// The reason why the check of a combination ended early.
enum Ended {
    /// The machine does not support the combination, or lacks the resources for the transfer size.
    Unsupported(Error),
    /// The combination failed although the machine supports it.
    Failed(String),
    /// The library or a driver reported an error.
    Error(Error),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl<T> From<hmem::Rejected<T>> for Ended {
    fn from(rejected: hmem::Rejected<T>) -> Self {
        rejected.error.into()
    }
}

/// The values that the check of a combination has found so far. [`Row`] explains the fields.
#[derive(Default)]
struct ProbeResult {
    sizes: Vec<u64>,
    gib_per_s: Option<f64>,
    atomic: Atomic,
    trace: Vec<Attempt>,
}

/// Checks one combination and adds the result to the report.
///
/// After a leak the combination is checked again. Only a second leak is a failure, since drivers
/// keep resources that they opened at the first use.
pub(super) fn case(machine: &Machine, case: &Case<'_>, selection: &Selection, report: &mut Report) {
    // A failure is reported without its leaks.
    let sound = |ended: &_| matches!(ended, Ok(()) | Err(Ended::Unsupported(_)));
    let (mut shown, mut ended, left) = attempt(machine, case, selection, report);
    if sound(&ended) && left.is_some() {
        let left;
        (shown, ended, left) = attempt(machine, case, selection, report);
        if let Some(left) = left.filter(|_| sound(&ended)) {
            ended = Err(Ended::Failed(format!("left behind after the check: {left}")));
        }
    }
    let error = match ended {
        Ok(()) => None,
        Err(Ended::Failed(error)) => Some(error),
        Err(Ended::Error(error)) => Some(explained(machine, case, &error).to_string()),
        Err(Ended::Unsupported(why)) => {
            report.skipped.push(Skipped::new(case.to_string(), explained(machine, case, &why)));
            return;
        }
    };
    report.rows.push(Row {
        iface: case.memory.iface().to_owned(),
        device: case.memory.device().map(|device| device.0),
        memory: case.memory.sort(),
        provider: case.nic.attr.nic.provider.clone(),
        nic: case.nic.attr.nic.name.clone(),
        path: case.variant.path().name(),
        bytes: shown.sizes.iter().copied().max().unwrap_or(0),
        sizes: shown.sizes,
        verified: error.is_none(),
        gib_per_s: shown.gib_per_s.filter(|_| error.is_none()),
        atomic: shown.atomic,
        error,
        trace: shown.trace,
    });
}

/// Converts an error to a problem. If a limit of the process or container explains the error, the
/// limit becomes the cause of the problem.
fn explained(machine: &Machine, case: &Case<'_>, error: &Error) -> Problem {
    let step = match error.kind() {
        // A refused registration has its causes already.
        _ if !error.causes().is_empty() => return error.into(),
        // Queues and endpoints count for the limits of registrations.
        ErrorKind::OutOfResources if error.trace().is_empty() => Step::Register,
        // A software NIC makes system calls, which a container may forbid.
        _ if case.nic.software => Step::SystemCall,
        _ => return error.into(),
    };
    machine.explained(step, error)
}

/// Checks one combination of memory, NIC and path once. Returns three values:
///
/// - the values that the check has found, for the row of the report
/// - `Ok` for a success, or the reason why the check ended early
/// - a description of the leaked resources, or `None` without a leak
fn attempt(
    machine: &Machine,
    case: &Case<'_>,
    selection: &Selection,
    report: &mut Report,
) -> (ProbeResult, Result<(), Ended>, Option<String>) {
    let before = Residue::count(machine);
    let mut shown = ProbeResult::default();
    let ended = match case.nic.open(&machine.hmem, case.variant.policy()) {
        Ok(domain) => {
            let ended = on_domain(machine, case, selection, &domain, &mut shown, report);
            // The regions are closed or dropped by now, so the domain must be empty.
            let closed = closed(domain);
            ended.and(closed)
        }
        Err(error) => Err(error.into()),
    };
    let left = Residue::count(machine).left_since(&before);
    (shown, ended, left)
}

fn on_domain(
    machine: &Machine,
    case: &Case<'_>,
    selection: &Selection,
    domain: &Domain,
    shown: &mut ProbeResult,
    report: &mut Report,
) -> Result<(), Ended> {
    let link = Link::open(domain)?;
    for (at, extent) in selection.extents.iter().enumerate() {
        let mut size = SizeCheck {
            case,
            link: &link,
            extent: *extent,
            // The second-to-last size is measured briefly too, since a memory limit may refuse the
            // last.
            measure_ns: match selection.extents.len() - at {
                1 => Some(selection.measure_ns),
                2 => Some(selection.measure_ns / 8),
                _ => None,
            },
            shown: &mut *shown,
        };
        match size.allocate_and_run() {
            Ok(()) => shown.sizes.push(extent.len),
            Err(Ended::Unsupported(why)) => {
                let limited = why.kind() == ErrorKind::OutOfResources;
                match (limited, shown.sizes.is_empty()) {
                    (false, true) => return Err(Ended::Unsupported(why)),
                    // A limit on locked memory bounds the size of registrations. It is not a
                    // failure.
                    (true, false) => {
                        let what = format!("{case}, {} bytes", extent.len);
                        report.skipped.push(Skipped::new(what, explained(machine, case, &why)));
                    }
                    // A feature that another size has shown is not missing, and no limit may refuse
                    // every size.
                    _ => return Err(why.into()),
                }
            }
            Err(ended) => return Err(ended),
        }
    }
    link.close()?;
    Ok(())
}

fn closed(domain: Domain) -> Result<(), Ended> {
    let live = domain.live();
    if live != LiveObjects::default() {
        return Err(Ended::Failed(format!("left registered: {live:?}")));
    }
    Ok(domain.close()?)
}

/// The check of one transfer size of one combination.
struct SizeCheck<'a> {
    case: &'a Case<'a>,
    link: &'a Link<'a>,
    extent: Extent,
    /// Minimum duration of this size's throughput measurement, in nanoseconds; `None` for no
    /// measurement.
    measure_ns: Option<u64>,
    /// The values found so far, to which the check of this size adds its own.
    shown: &'a mut ProbeResult,
}

impl SizeCheck<'_> {
    /// Returns the length of the target region, in bytes.
    fn region_len(&self) -> u64 {
        self.extent.offset.saturating_add(self.extent.len).saturating_add(TAIL)
    }

    /// Returns the length of the allocation that contains the target region, in bytes.
    fn allocation_len(&self) -> u64 {
        self.region_len().saturating_add(self.extent.margin.saturating_mul(2))
    }

    fn allocate_and_run(&mut self) -> Result<(), Ended> {
        let len = self.region_len();
        match &self.case.memory {
            MemorySort::Heap => self.own(heap(len)?),
            MemorySort::MemFd => self.own(FileBuffer(MemFd::new(len)?)),
            MemorySort::HugePages(system) => match HugeBuffer::allocate(system, len) {
                Ok(buffer) => self.own(buffer),
                // The machine may have fewer huge pages than needed.
                Err(error) => Err(Ended::Unsupported(error)),
            },
            MemorySort::Mapped(iface) => self.own(allocate(iface, None, len)?),
            MemorySort::Borrowed(iface) => {
                let buffer = allocate(iface, None, self.allocation_len())?;
                self.borrow(buffer)
            }
            MemorySort::Allocated { iface, device, kind } => {
                let (len, device) = (self.allocation_len(), device.unwrap_or_default());
                match DeviceBuffer::allocate(iface, &AllocRequest { len, device, kind: *kind }) {
                    Ok(buffer) if self.extent.margin > 0 => self.borrow(buffer),
                    Ok(buffer) => self.own(buffer),
                    // Some ifaces do not allocate every kind of memory.
                    Err(error) if error.is_unsupported() && !self.case.software => {
                        Err(Ended::Unsupported(error))
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Checks memory that the region owns.
    fn own<M: Memory>(&mut self, memory: M) -> Result<(), Ended> {
        let region = self.link.domain.submit(request(memory, 1));
        self.move_bytes(region.map(Target::own).map_err(|rejected| rejected.error))
    }

    /// Checks the part of the buffer between the unregistered margins. The region does not own that
    /// part.
    fn borrow(&mut self, buffer: DeviceBuffer) -> Result<(), Ended> {
        let part = (self.extent.margin, self.region_len());
        let domain = self.link.domain;
        self.move_bytes(Target::borrow(domain, buffer, part, |raw| request(raw, 1)))
    }

    /// Transfers bytes from and to the registered memory `target`, compares them, and closes the
    /// region.
    fn move_bytes<M: Memory>(&mut self, target: Result<Target<M>, Error>) -> Result<(), Ended> {
        let target = target.map_err(|error| self.refused(error))?;
        let moved = self.move_bytes_of(&target);
        if self.link.is_waiting() {
            // The NIC may still execute the transfer, so the memory is never freed.
            mem::forget(target);
            return moved;
        }
        moved?;
        Ok(target.close()?)
    }

    fn move_bytes_of<M: Memory>(&mut self, target: &Target<M>) -> Result<(), Ended> {
        self.look_at_decision(target.region())?;

        let (start, len) = (self.extent.offset as usize, self.extent.len as usize);
        let mut expected = heap(self.region_len())?;
        pattern::fill(&mut expected, BACKGROUND);
        target.write(&expected)?;
        pattern::fill(&mut expected[start..start + len], PAYLOAD);

        let mut payload = heap(self.extent.len)?;
        payload.copy_from_slice(&expected[start..start + len]);
        let source = self.register_local(payload, 2)?;
        let sink = self.register_local(heap(self.extent.len)?, 3)?;

        let key = target.region().key()?;
        let remote = LinkTarget { key: &key, offset: self.extent.offset, len: self.extent.len };
        self.link.write(source.slice(0, remote.len)?, remote)?;
        self.link.read(sink.slice(0, remote.len)?, remote)?;

        let mut found = heap(self.extent.len)?;
        sink.read(0, &mut found)?;
        same(&expected[start..start + len], &found, "read back by RMA")?;
        compare(target, &expected, "read through the iface")?;
        if len >= 16 {
            self.fetch_add(target, &key, &mut expected)?;
        }
        if let Some(measure_ns) = self.measure_ns {
            self.shown.gib_per_s = Some(self.throughput(&source, remote, measure_ns)?);
        }
        source.close()?;
        sink.close()?;
        Ok(())
    }

    /// Converts the error of a refused registration of the checked memory: to `Unsupported` if the
    /// hardware lacks a feature or a resource limit is reached, and otherwise to `Ended::Error`.
    /// Hardware need not support allocations of device ifaces, but must support host memory.
    fn refused(&mut self, error: Error) -> Ended {
        let lacks = matches!(
            error.kind(),
            ErrorKind::Unsupported
                | ErrorKind::NoSys
                | ErrorKind::Unavailable
                | ErrorKind::Unreachable
        );
        // Only a registration shows whether a peer-memory client handles the device.
        let no_client = error
            .trace()
            .iter()
            .any(|attempt| attempt.cause_name == Some("peer-memory-module-missing"));
        let optional = matches!(self.case.memory, MemorySort::Allocated { .. });
        if (lacks || no_client) && optional && !self.case.software {
            return Ended::Unsupported(error);
        }
        if self.shown.sizes.is_empty() {
            self.shown.trace = vec![Attempt::refused(self.case.variant.path(), &error)];
        }
        if error.kind() == ErrorKind::OutOfResources {
            return Ended::Unsupported(error);
        }
        Ended::Error(root(&error).clone())
    }

    fn register_local(&mut self, buffer: Vec<u8>, key: u64) -> Result<Region<Vec<u8>>, Ended> {
        let region = self.link.domain.submit(request(buffer, key));
        region.map_err(|rejected| match rejected.error.kind() {
            ErrorKind::OutOfResources => Ended::Unsupported(rejected.error),
            _ => rejected.error.into(),
        })
    }

    /// Records the attempts of the path decision. Fails if the path is not the expected one.
    fn look_at_decision(&mut self, target: &MemoryRegion) -> Result<(), Ended> {
        let decision = target.decision()?;
        self.shown.trace = decision.attempts.iter().map(Attempt::from).collect();
        let wanted = self.case.variant.path();
        if decision.path == wanted {
            return Ok(());
        }
        Err(Ended::Failed(format!(
            "registered over {} instead of {wanted}: {}",
            decision.path, decision.reason
        )))
    }

    /// Runs a fetch-add on an aligned word of the target. A staged path must refuse it and leave
    /// the word unchanged.
    fn fetch_add<M: Memory>(
        &mut self,
        target: &Target<M>,
        key: &RemoteKey,
        expected: &mut [u8],
    ) -> Result<(), Ended> {
        let address = target.region().range().start().0 + self.extent.offset;
        let at = (self.extent.offset + (address.next_multiple_of(8) - address)) as usize;
        let word = expected[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let mut operands = heap(16)?;
        operands[..8].copy_from_slice(&ADDEND.to_ne_bytes());
        let operands = self.register_local(operands, 4)?;
        let remote = LinkTarget { key, offset: at as u64, len: 8 };
        match self.link.fetch_add(operands.slice(0, 8)?, operands.slice(8, 8)?, remote) {
            Ok(()) if self.case.variant.path() == Path::Staged => {
                return Err(Ended::Failed(
                    "an atomic on staged memory succeeded, which must be refused".into(),
                ));
            }
            Ok(()) => {
                let mut old = [0; 8];
                operands.read(8, &mut old)?;
                if u64::from_ne_bytes(old) != word {
                    return Err(Ended::Failed("fetch-add returned a wrong old value".into()));
                }
                expected[at..at + 8].copy_from_slice(&word.wrapping_add(ADDEND).to_le_bytes());
                self.shown.atomic = Atomic::Verified;
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                // Over `peer-memory` the software NIC copies through the iface, which has no
                // atomics.
                let copies = matches!(self.case.variant.path(), Path::Staged | Path::PeerMemory);
                if self.case.nic.software && !copies {
                    return Err(error.into());
                }
                self.shown.atomic = Atomic::Refused;
            }
            Err(error) => return Err(error.into()),
        }
        operands.close()?;
        compare(target, expected, "read after a fetch-add")
    }

    /// Measures the throughput of RMA writes into the target, in GiB/s.
    fn throughput(
        &mut self,
        source: &Region<Vec<u8>>,
        remote: LinkTarget<'_>,
        measure_ns: u64,
    ) -> Result<f64, Ended> {
        let slice = source.slice(0, remote.len)?;
        let started = Instant::now();
        let mut transfers = 0u64;
        loop {
            self.link.write(slice, remote)?;
            transfers += 1;
            let ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
            if ns >= measure_ns {
                let gib = (transfers * remote.len) as f64 / (1u64 << 30) as f64;
                return Ok(gib * 1e9 / ns as f64);
            }
        }
    }
}

/// Returns a request for memory with all rights. `key` is used only in mr modes in which the
/// application chooses keys.
fn request<M: Memory>(memory: M, key: u64) -> Request<'static, M> {
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::READ | Access::WRITE;
    Request::new(memory, access).key(key)
}

/// Reads the region and compares its bytes. `how` names the read in the failure.
fn compare<M: Memory>(target: &Target<M>, expected: &[u8], how: &str) -> Result<(), Ended> {
    let mut found = heap(expected.len() as u64)?;
    target.read(&mut found)?;
    same(expected, &found, how)
}

fn same(expected: &[u8], found: &[u8], how: &str) -> Result<(), Ended> {
    match pattern::difference(expected, found) {
        None => Ok(()),
        Some((first, count)) => Err(Ended::Failed(format!(
            "{count} of {} bytes are wrong when {how}, the first at {first}",
            expected.len()
        ))),
    }
}
