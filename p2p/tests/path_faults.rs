//! A fault at every driver and provider call of every path, one at a time (REL-01). The fault is
//! reported, nothing leaks, and the next run from opening the NIC to closing the region works.

mod path_support;

use std::sync::{Arc, LazyLock};

use hmem_core::{
    AllocationKind, Decision, DeviceId, Domain, Errno, Error, IfaceExt, MemoryRegion, Path,
    Promise, Raw, Region, Rejected, Result,
    iface::AllocRequest,
    path::P2pPolicy,
    provider::{Imports, LiveObjects},
};
use hmem_iface_system::{DeviceCall, DmaBufKind, P2pMatrix, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, NicCall};
use path_support::{
    ALL_IMPORTS, Bench, REMOTE, alone, page_size,
    wire::{LOCAL, Wire},
};

/// Bytes that each transfer moves. They lie in two physical segments.
static BYTES: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..segment_len() + 617).map(|at| (at * 13) as u8).collect());

fn segment_len() -> u64 {
    4 * page_size()
}

/// A path and the setup that selects it.
#[derive(Clone, Copy, Debug)]
struct PathSetup {
    path: Path,
    kind: AllocationKind,
    imports: Imports,
    policy: P2pPolicy,
    reachable: bool,
}

const DMA_BUF: PathSetup = PathSetup {
    path: Path::DmaBuf,
    kind: AllocationKind::Device,
    imports: ALL_IMPORTS,
    policy: P2pPolicy::Enabled,
    reachable: true,
};

const PEER_MEMORY: PathSetup = PathSetup {
    path: Path::PeerMemory,
    imports: Imports { dma_buf: false, ..ALL_IMPORTS },
    policy: P2pPolicy::Preferred,
    ..DMA_BUF
};

const SETUPS: [PathSetup; 7] = [
    PathSetup { path: Path::PlainHost, kind: AllocationKind::Managed, ..DMA_BUF },
    DMA_BUF,
    PathSetup {
        kind: AllocationKind::Virtual,
        imports: Imports { peer_memory: false, staged: false, ..ALL_IMPORTS },
        policy: P2pPolicy::Required,
        ..DMA_BUF
    },
    PEER_MEMORY,
    PathSetup {
        imports: Imports { staged: false, ..PEER_MEMORY.imports },
        policy: P2pPolicy::Required,
        ..PEER_MEMORY
    },
    PathSetup { path: Path::Staged, policy: P2pPolicy::Disabled, ..DMA_BUF },
    // Every direct path is refused, and a probe runs.
    PathSetup { path: Path::Staged, reachable: false, ..DMA_BUF },
];

impl PathSetup {
    fn bench(&self) -> Bench {
        let matrix =
            if self.reachable { P2pMatrix::all_reachable() } else { P2pMatrix::none_reachable() };
        let device = Simulated::builder()
            .dma_buf(DmaBufKind::MemFd)
            .peer_memory(true)
            .segment_len(segment_len())
            .p2p(matrix);
        Bench::with(device, Loopback::builder().imports(self.imports), DefaultPathSelector::new())
    }
}

/// Errors and decisions of one run, from opening the NIC to closing the region.
#[derive(Debug, Default)]
struct RunReport {
    /// Texts of the errors that the calls returned.
    errors: Vec<String>,
    /// The decisions of the registrations, with the refused paths.
    decisions: Vec<Arc<Decision>>,
}

impl RunReport {
    /// Returns whether the injected failure appears in an error or in a decision.
    fn mentions_the_fault(&self) -> bool {
        let injected = |text: &str| text.contains("EIO (5)");
        let traced = |decision: &Arc<Decision>| {
            decision
                .attempts
                .iter()
                .filter_map(|attempt| attempt.error.as_ref())
                .any(|e| injected(&e.to_string()))
        };
        self.errors.iter().any(|error| injected(error)) || self.decisions.iter().any(traced)
    }
}

/// Closes a value, and tries again after a failure, as its owner must.
fn close_with_retry<T, R>(
    report: &mut RunReport,
    value: T,
    close: impl Fn(T) -> Result<R, Rejected<T>>,
) {
    if let Err(Rejected { value, error }) = close(value) {
        report.errors.push(format!("{error:#}"));
        close(value).map_err(Error::from).expect("the second close works");
    }
}

/// Runs the life cycle of a NIC and device memory: opens, allocates, registers twice, transfers,
/// closes and frees.
fn live(bench: &Bench, setup: &PathSetup) -> RunReport {
    let mut report = RunReport::default();
    // A closure, so that an early return drops everything.
    let result = (|| -> Result<()> {
        let near = bench.try_domain("loop0", P2pPolicy::Enabled)?;
        let far = bench.try_domain("loop0", setup.policy)?;
        let request =
            AllocRequest { len: 4 * segment_len() + 4464, device: DeviceId(0), kind: setup.kind };
        let memory = bench.device.allocate(&request)?;
        let used = use_memory(bench, [&near, &far], memory.range, &mut report);
        // SAFETY: every region of the memory is closed, and no reference to it exists.
        if let Err(error) = unsafe { bench.device.free(&memory) } {
            report.errors.push(format!("{error:#}"));
            // SAFETY: the first free failed, so the memory is still allocated, without regions or
            // references.
            unsafe { bench.device.free(&memory) }.expect("the second free works");
        }
        close_with_retry(&mut report, near, Domain::close);
        close_with_retry(&mut report, far, Domain::close);
        used
    })();
    if let Err(error) = result {
        report.errors.push(format!("{error:#}"));
    }
    report
}

fn use_memory(
    bench: &Bench,
    [near, far]: [&Domain; 2],
    range: hmem_core::AddressRange,
    report: &mut RunReport,
) -> Result<()> {
    // SAFETY: the memory is freed after its regions are closed, and no reference to it exists.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    for _ in 0..2 {
        let region = far.register(memory, REMOTE | LOCAL)?;
        report.decisions.push(Arc::clone(region.decision()?));
        let moved = transfer(bench, [near, far], &region);
        close_with_retry(report, region, Region::close);
        moved?;
    }
    Ok(())
}

fn transfer(bench: &Bench, [near, far]: [&Domain; 2], region: &MemoryRegion) -> Result<()> {
    let wire = Wire::open(near, far, BYTES.len())?;
    let key = region.key()?;
    wire.push(&key, 77, &BYTES)?;
    let back = wire.pull(&key, 77, BYTES.len())?;
    assert!(back == *BYTES, "bytes of a transfer that succeeded");
    let (mut last, last_at) = ([0], BYTES.len() as u64 - 1);
    let last_byte = region.range().slice(77 + last_at, 1).expect("inside").start();
    // SAFETY: the region is open, and its memory is freed after it.
    unsafe { hmem_core::IfaceExt::read(&*bench.device, last_byte, &mut last) }?;
    assert_eq!(last[0], BYTES[last_at as usize]);
    wire.close()
}

/// Returns the object counts of a NIC and a device when nothing is open.
fn nothing() -> LiveObjects {
    LiveObjects::default()
}

fn held(bench: &Bench) -> LiveObjects {
    // Limits and counts hold for all domains of a NIC, so a new domain shows leaks of the others.
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let live = domain.live();
    domain.close().map_err(Error::from).expect("a new domain holds nothing");
    live
}

/// Runs [`live`] with one injected failure. Returns `false` if the call that was to fail did not
/// occur.
fn survive(
    bench: &Bench,
    setup: &PathSetup,
    what: &str,
    arm: &dyn Fn(&Bench),
    calls: &dyn Fn(&Bench) -> u64,
    nth: u64,
) -> bool {
    bench.paths.forget();
    assert_eq!(held(bench), nothing());
    let (before, made) = (bench.residue(), calls(bench));
    arm(bench);
    let report = live(bench, setup);
    let fired = calls(bench) >= made + nth;
    bench.device.faults().clear();
    bench.faults.clear();
    let context = format!("{setup:?}, fault at call {nth} of {what}: {report:?}");
    if fired {
        // The page of a probe is optional: a failure to allocate it is not reported.
        assert!(
            report.mentions_the_fault() || !setup.reachable,
            "the fault was not reported: {context}"
        );
    } else {
        assert!(report.errors.is_empty(), "{context}");
    }
    let after = (held(bench), bench.residue_after(&before));
    assert_eq!((after.0, &after.1), (nothing(), &before), "leaked: {context}");
    let next = live(bench, setup);
    assert!(next.errors.is_empty(), "errors of the next run: {:?} after {context}", next.errors);
    if setup.reachable {
        let back = next.decisions.iter().all(|decision| decision.path == setup.path);
        assert!(back, "demoted: {next:?} after {context}");
    }
    let after = (held(bench), bench.residue_after(&before));
    assert_eq!(after, (nothing(), before), "leaked by the next run: {context}");
    fired
}

/// Runs [`live`] once for each call of a kind, and makes that call fail.
fn each(
    setup: &PathSetup,
    what: &str,
    arm: impl Fn(&Bench, u64),
    calls: impl Fn(&Bench) -> u64,
) -> u64 {
    let bench = setup.bench();
    bench.faults.start_counting();
    // The first call of [`live`] has no fault, so that threads and pools exist.
    let first = live(&bench, setup);
    assert!(first.errors.is_empty(), "{setup:?}: {:?}", first.errors);
    assert!(
        first.decisions.iter().all(|decision| decision.path == setup.path),
        "{setup:?}: {first:?}"
    );
    let mut faults = 0;
    // [`live`] reads completions in a loop: the first hundred calls are enough.
    for nth in 1..=100 {
        if !survive(&bench, setup, what, &|bench| arm(bench, nth), &calls, nth) {
            break;
        }
        faults += 1;
    }
    faults
}

fn every_fault(setup: &PathSetup) {
    let mut hit = 0;
    for call in &DeviceCall::ALL {
        let arm = |bench: &Bench, nth| bench.device.faults().fail_nth(*call, nth, Errno(5));
        hit += u64::from(each(setup, call.name(), arm, |bench| bench.calls(*call)) > 0);
    }
    for call in &NicCall::ALL {
        let arm = |bench: &Bench, nth| bench.faults.fail_nth(*call, nth, Errno(5));
        hit += u64::from(each(setup, call.name(), arm, |bench| bench.faults.calls(*call)) > 0);
    }
    assert!(hit >= 12, "{setup:?}: only {hit} kinds of call were made");
}

/// Generates one test for each path. The doc comment of an entry, with its acceptance ids, becomes
/// the doc comment of the test.
macro_rules! over_ways {
    ($($(#[$meta:meta])* $name:ident: $at:literal,)+) => {$(
        $(#[$meta])*
        #[test]
        fn $name() {
            let _alone = alone();
            every_fault(&SETUPS[$at]);
        }
    )+};
}

over_ways! {
    /// REL-01: a registration over host pages reports a fault at any of its calls, and leaks
    /// nothing.
    a_fault_at_every_call_of_host_pages: 0,
    /// REL-01: a registration over a dma-buf reports a fault at any of its calls, and leaks
    /// nothing.
    a_fault_at_every_call_of_a_dma_buf: 1,
    /// REL-01: a registration over a dma-buf of several segments that the policy requires reports a
    /// fault at any of its calls, and leaks nothing.
    a_fault_at_every_call_of_a_required_dma_buf_of_several_segments: 2,
    /// REL-01: a registration over peer memory reports a fault at any of its calls, and leaks
    /// nothing.
    a_fault_at_every_call_of_peer_memory: 3,
    /// REL-01: a registration over peer memory that the policy requires reports a fault at any of
    /// its calls, and leaks nothing.
    a_fault_at_every_call_of_required_peer_memory: 4,
    /// REL-01: a registration over staged copies reports a fault at any of its calls, and leaks
    /// nothing.
    a_fault_at_every_call_of_staged_copies: 5,
    /// REL-01: a registration with a device and NIC that have no direct path leaks nothing after a
    /// fault at any of its calls. The error or the decision reports the fault, except a fault of
    /// the page that the selector allocates to probe paths, which a registration does not need.
    a_fault_at_every_call_of_a_pair_without_a_direct_path: 6,
}
