//! Ranges of several physical segments (HM-07): one dma-buf and one registration for all of them,
//! or one per segment if the driver or the NIC refuses that. The decision names the form that was
//! used, and the reason.

mod path_support;
#[path = "../../provider-verbs/tests/fake/mod.rs"]
mod verbs_fake;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{
    AllocationKind, Batch, Decision, DeviceBuffer, DeviceId, Domain, Errno, Error, ErrorKind,
    Iface, IfaceKind, Path, Region, Request,
    iface::{AllocRequest, DmaBufMapping},
    path::{Attempt, P2pPolicy},
    provider::Imports,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, Simulated};
use hmem_p2p::path::{DefaultPathSelector, ExplainRequest};
use hmem_provider_loopback::{Loopback, NicCall};
use path_support::{
    ALL_IMPORTS, Bench, REMOTE, alone, close, page_size,
    recording::RegisteredAs,
    vendor::{Refuse, Vendor},
    wire::{LOCAL, Wire},
};

/// Returns the length of a segment in bytes.
fn step() -> u64 {
    4 * page_size()
}

const IMPORTS: Imports =
    Imports { pcie_mapping_first: Some(false), peer_memory: false, ..ALL_IMPORTS };

/// Device memory with physical segments of four pages.
struct Segmented {
    bench: Bench,
    vendor: Arc<dyn Iface>,
    domain: Domain,
}

fn segmented(breaks: impl FnOnce(&mut Vendor)) -> Segmented {
    segmented_for(IMPORTS, breaks)
}

/// Creates memory like [`segmented`], for NICs that try the PCIe mapping first.
fn segmented_pcie_first(breaks: impl FnOnce(&mut Vendor)) -> Segmented {
    segmented_for(Imports { pcie_mapping_first: Some(true), ..IMPORTS }, breaks)
}

fn segmented_for(imports: Imports, breaks: impl FnOnce(&mut Vendor)) -> Segmented {
    let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd);
    let memory = Arc::new(memory.build().expect("simulated memory"));
    let mut vendor = Vendor::new(IfaceKind::CUDA, Arc::clone(&memory));
    vendor.segment_len = Some(step());
    breaks(&mut vendor);
    let vendor: Arc<dyn Iface> = Arc::new(vendor);
    let nics = Loopback::builder().nic("loop0").nic("loop1").nic("loop2").imports(imports);
    let bench = Bench::over(memory, Arc::clone(&vendor), nics, DefaultPathSelector::new());
    let domain = bench.domain("loop0", P2pPolicy::Required);
    Segmented { bench, vendor, domain }
}

fn not_alike() -> Option<Error> {
    Some(
        Error::new(ErrorKind::InvalidArgument, "cuMemGetHandleForAddressRange")
            .iface(IfaceKind::CUDA)
            .driver_code("CUDA_ERROR_INVALID_VALUE", 1),
    )
}

fn not_supported() -> Option<Error> {
    Some(
        Error::new(ErrorKind::Unsupported, "cuMemGetHandleForAddressRange")
            .iface(IfaceKind::CUDA)
            .driver_code("CUDA_ERROR_NOT_SUPPORTED", 801),
    )
}

impl Segmented {
    fn buffer(&self, segments: u64) -> DeviceBuffer {
        let request = AllocRequest {
            len: segments * step(),
            device: DeviceId(0),
            kind: AllocationKind::Device,
        };
        DeviceBuffer::allocate(&self.vendor, &request).expect("memory")
    }

    fn register(&self, segments: u64) -> Region<DeviceBuffer> {
        let registered = self.domain.register(self.buffer(segments), REMOTE | LOCAL);
        registered.map_err(Error::from).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Checks that bytes move in both directions through the region's key, across each border of
    /// two segments.
    fn moves(&self, region: &Region<DeviceBuffer>) {
        let len = region.range().len() as usize;
        let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + (at >> 8) * 7) as u8).collect();
        let initiator = self.bench.domain("loop1", P2pPolicy::Enabled);
        let wire = Wire::new(&initiator, &self.domain, len);
        let key = region.key().expect("a key");
        wire.push(&key, 0, &bytes).expect("write");
        let mut found = vec![0; len];
        region.read(0, &mut found).expect("the device's own copy");
        assert!(found == bytes, "the device has other bytes than the NIC wrote");
        let seam = step() as usize - 5;
        assert!(wire.pull(&key, seam as u64, 10).expect("read") == bytes[seam..seam + 10]);
    }
}

fn dma_bufs(handed: &[RegisteredAs]) -> usize {
    assert!(handed.iter().all(|one| matches!(one, RegisteredAs::DmaBuf(_))), "{handed:?}");
    handed.iter().copied().map(|one| format!("{one:?}")).collect::<BTreeSet<_>>().len()
}

fn calls(decision: &Decision) -> Vec<(&str, bool)> {
    let said = |attempt: &'_ Attempt| attempt.error.is_none();
    decision.attempts.iter().map(|attempt| (attempt.call.as_str(), said(attempt))).collect()
}

/// HM-07
#[test]
fn range_of_several_segments_is_one_registration() {
    let _alone = alone();
    let world = segmented(|_| {});
    close(world.register(4));
    let before = world.bench.residue();
    world.bench.record.take();
    let asked = world.bench.calls(DeviceCall::ExportDmaBuf);
    let region = world.register(4);
    assert_eq!(dma_bufs(&world.bench.record.handed()), 1);
    assert_eq!(world.bench.calls(DeviceCall::ExportDmaBuf) - asked, 1);
    assert_eq!(
        world.bench.device.stats().live_exports,
        0,
        "the exports are released after the registration"
    );
    let decision = Arc::clone(region.decision().expect("decided"));
    assert_eq!(decision.path, Path::DmaBuf);
    assert_eq!(
        calls(&decision),
        [("register(dma-buf, Default mapping, 4 segments in 1 dma-buf)", true)]
    );
    world.moves(&region);
    drop(close(region));
    assert_eq!(world.bench.residue_after(&before), before);
}

/// HM-07
#[test]
fn segments_are_exported_if_the_driver_refuses_the_whole_range() {
    let _alone = alone();
    let world = segmented(|vendor| vendor.whole = not_alike);
    close(world.register(4));
    let before = world.bench.residue();
    world.bench.record.take();
    let region = world.register(4);
    assert_eq!(dma_bufs(&world.bench.record.handed()), 4);
    let decision = Arc::clone(region.decision().expect("decided"));
    let export = format!("export_dma_buf({}, Default)", region.range());
    let registered = "register(dma-buf, Default mapping, 4 segments in 4 dma-bufs)";
    assert_eq!(calls(&decision), [(export.as_str(), false), (registered, true)], "{decision}");
    let refused = &decision.attempts[0];
    assert_eq!(refused.cause_name, Some("segments-not-in-one"), "{decision}");
    assert_eq!(refused.error.as_ref().expect("refused").driver().expect("its code").code, 1);
    world.moves(&region);
    drop(close(region));
    assert_eq!(world.bench.residue_after(&before), before);
}

/// HM-07
#[test]
fn segments_are_registered_if_the_nic_refuses_the_whole_range() {
    let _alone = alone();
    let world = segmented(|_| {});
    close(world.register(4));
    let before = world.bench.residue();
    world.bench.record.take();
    world.bench.faults.fail_nth(NicCall::Register, 1, Errno(22));
    let region = world.register(4);
    let handed = world.bench.record.handed();
    assert_eq!((handed.len(), dma_bufs(&handed[1..])), (5, 4), "the whole, then each: {handed:?}");
    let decision = Arc::clone(region.decision().expect("decided"));
    assert_eq!(
        calls(&decision),
        [
            ("register(dma-buf, Default mapping, 4 segments in 1 dma-buf)", false),
            ("register(dma-buf, Default mapping, 4 segments in 4 dma-bufs)", true)
        ]
    );
    assert_eq!(decision.attempts[0].cause_name, Some("beyond-the-export"), "{decision}");
    world.moves(&region);
    drop(close(region));
    assert_eq!(world.bench.residue_after(&before), before);
}

/// P2P-01
///
/// The NIC refuses the whole-range export of one range. The next range is still tried as a whole,
/// and gets a single key.
#[test]
fn refused_whole_range_does_not_affect_other_buffers() {
    let _alone = alone();
    let world = segmented(|_| {});
    for refused in [true, true, true, true, true, false, true, false] {
        if refused {
            world.bench.faults.fail_nth(NicCall::Register, 1, Errno(22));
        }
        let region = world.register(4);
        let decision = Arc::clone(region.decision().expect("decided"));
        let (attempts, spread) =
            if refused { (2, "4 segments in 4 dma-bufs") } else { (1, "4 segments in 1 dma-buf") };
        assert_eq!(decision.attempts.len(), attempts, "{decision}");
        assert!(decision.attempts[attempts - 1].call.contains(spread), "{decision}");
        close(region);
    }
}

/// HM-07: the error of a refused registration names the refusals of the whole range and of its
/// segments, and nothing leaks.
#[test]
fn error_has_both_refusals_and_nothing_leaks() {
    let _alone = alone();
    for nic in [false, true] {
        let world = segmented(|vendor| {
            if !nic {
                vendor.whole = not_alike;
                vendor.dma_buf = || Some(Error::os(Errno(28), "export"));
            }
        });
        drop(world.buffer(4));
        let before = world.bench.residue();
        for nth in [1, 2] {
            world.bench.faults.fail_nth(NicCall::Register, nth, Errno(22));
        }
        let rejected =
            world.domain.register(world.buffer(4), REMOTE | LOCAL).expect_err("refused twice");
        let trace = rejected.error.trace().clone();
        let whole = rejected.value.allocation().range.to_string();
        let first = rejected.value.allocation().range.slice(0, step()).expect("a part").to_string();
        let calls: Vec<_> = trace.iter().take(2).map(|attempt| attempt.call.clone()).collect();
        let expected = if nic {
            ["4 segments in 1 dma-buf", "4 segments in 4 dma-bufs"]
                .map(|spread| format!("register(dma-buf, Default mapping, {spread})"))
        } else {
            [whole, first].map(|range| format!("export_dma_buf({range}, Default)"))
        };
        assert_eq!(calls, expected, "{trace}");
        drop(rejected);
        world.bench.faults.clear();
        assert_eq!(world.bench.residue_after(&before), before);
        assert_eq!(world.domain.live().regions, 0);
    }
}

/// HM-07: the selector does not register the segments of a range after the request itself was
/// refused as invalid.
#[test]
fn invalid_request_is_not_retried_by_segment() {
    let _alone = alone();
    let world = segmented(|_| {});
    let memory = close(world.register(4));
    world.bench.record.take();
    world.bench.faults.fail_nth(NicCall::Register, 1, Errno(125));
    let refused = world.domain.register(memory, REMOTE | LOCAL).expect_err("cancelled").error;
    assert_eq!(refused.kind(), ErrorKind::Canceled, "{refused}");
    assert_eq!((world.bench.record.handed().len(), refused.trace().len()), (1, 1), "{refused}");
}

/// P2P-03: a remembered decision does not report the segments of an earlier range.
#[test]
fn remembered_decision_has_no_layout_of_another_range() {
    let _alone = alone();
    let world = segmented(|vendor| vendor.whole = not_alike);
    close(world.register(4));
    let single = world.register(1);
    let decision = single.decision().expect("decided");
    assert!(decision.from_cache, "{decision}");
    assert_eq!(calls(decision), [("register(dma-buf, Default mapping)", true)]);
    let several = world.register(2);
    let decision = several.decision().expect("decided");
    assert_eq!(decision.attempts.len(), 2, "{decision}");
    assert!(
        decision.attempts[0].call.contains(&several.range().to_string()),
        "the layout is that of this range: {decision}"
    );
    assert!(decision.attempts[1].call.ends_with("2 segments in 2 dma-bufs)"), "{decision}");
    close(single);
    close(several);
}

/// P2P-03
///
/// Each registration over the remembered path records why the PCIe mapping was not used.
#[test]
fn remembered_path_keeps_the_refusal_of_the_first_mapping() {
    let _alone = alone();
    for whole in [None, Some(not_alike as Refuse)] {
        let world = segmented_pcie_first(|vendor| {
            vendor.pcie = not_supported;
            vendor.whole = whole.unwrap_or(vendor.whole);
        });
        close(world.register(1));
        for _ in 0..2 {
            let region = world.register(4);
            let decision = region.decision().expect("decided");
            assert!(decision.from_cache, "{decision}");
            assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
            let asked = 1 + usize::from(whole.is_some());
            assert_eq!(decision.attempts.len(), asked + 1, "{decision}");
            let (refused, worked) = decision.attempts.split_at(asked);
            assert!(refused[0].call.ends_with(", Pcie)"), "{decision}");
            assert_eq!(refused[0].cause_name, Some("no-pcie-mapping"), "{decision}");
            if whole.is_some() {
                assert_eq!(refused[1].call, format!("export_dma_buf({}, Default)", region.range()));
            }
            assert!(
                worked[0].error.is_none() && worked[0].call.contains("4 segments in"),
                "{decision}"
            );
            close(region);
        }
    }
}

/// P2P-03
///
/// A refusal with the PCIe mapping may be caused by the mapping, the whole range or the memory. The
/// other refusals of the search show the cause.
#[test]
fn pcie_mapping_is_the_cause_only_if_the_default_works() {
    type Breaks = fn(&mut Vendor);
    const MAPPING: &str = "no-pcie-mapping";
    const WHOLE: &str = "segments-not-in-one";
    const DEVICE: &str = "device-without-dma-buf";
    let _alone = alone();
    let scenes: [(Breaks, &[&str], Option<&str>); 5] = [
        (|vendor| vendor.whole = not_alike, &[WHOLE], Some("Pcie mapping, 4 segments in 4")),
        (
            |vendor| vendor.pcie = not_supported,
            &[MAPPING; 2],
            Some("Default mapping, 4 segments in 1"),
        ),
        (|vendor| vendor.pcie = not_alike, &[MAPPING; 2], Some("Default mapping, 4 segments in 1")),
        (
            |vendor| (vendor.pcie, vendor.whole) = (not_supported, not_alike),
            &[MAPPING, MAPPING, WHOLE],
            Some("Default mapping, 4 segments in 4"),
        ),
        (
            |vendor| (vendor.pcie, vendor.dma_buf) = (not_supported, not_supported),
            &[DEVICE; 4],
            None,
        ),
    ];
    for (number, (breaks, causes, registered)) in scenes.into_iter().enumerate() {
        let world = segmented_pcie_first(breaks);
        let trace = match world.domain.register(world.buffer(4), REMOTE | LOCAL) {
            Ok(region) => {
                let trace = region.decision().expect("decided").attempts.clone();
                close(region);
                trace
            }
            Err(rejected) => rejected.error.trace().clone(),
        };
        let exports = trace.iter().filter(|attempt| attempt.call.starts_with("export_dma_buf"));
        let named: Vec<_> = exports.map(|attempt| attempt.cause_name.unwrap_or("none")).collect();
        assert_eq!(named, causes, "scene {number}: {trace}");
        let last = trace.last().filter(|attempt| attempt.error.is_none());
        match (last, registered) {
            (Some(last), Some(registered)) => assert!(last.call.contains(registered), "{trace}"),
            (last, registered) => assert_eq!((last.is_none(), registered), (true, None), "{trace}"),
        }
    }
}

/// P2P-03
///
/// A refused PCIe mapping is not the cause of a refusal if the default mapping was refused before.
/// Here the search tries the default mapping first, because the remembered decision has that
/// mapping.
#[test]
fn pcie_mapping_is_not_the_cause_after_the_default_failed() {
    static NONE_ANY_LONGER: AtomicBool = AtomicBool::new(false);
    let _alone = alone();
    let world = segmented_pcie_first(|vendor| {
        vendor.pcie = not_supported;
        vendor.dma_buf = || NONE_ANY_LONGER.load(Ordering::Relaxed).then(not_supported).flatten();
    });
    close(world.register(1));
    NONE_ANY_LONGER.store(true, Ordering::Relaxed);
    let rejected = world.domain.register(world.buffer(1), REMOTE | LOCAL).expect_err("refused");
    let trace = rejected.error.trace();
    let refused = |at: usize, mapping: &str| {
        assert!(trace[at].call.ends_with(mapping), "{trace}");
        assert_eq!(trace[at].cause_name, Some("device-without-dma-buf"), "{trace}");
    };
    refused(0, ", Default)");
    refused(1, ", Pcie)");
}

/// P2P-03
#[test]
fn explanation_has_the_layout_of_segments() {
    let _alone = alone();
    for (whole, spread) in
        [(None, "2 segments in 1 dma-buf"), (Some(not_alike as Refuse), "2 segments in 2")]
    {
        let world = segmented(|vendor| vendor.whole = whole.unwrap_or(vendor.whole));
        let request = ExplainRequest::new(IfaceKind::CUDA).size(2 * step());
        let explained =
            world.bench.paths.explain(&world.bench.registry, &world.bench.provider, &request);
        let explained = explained.expect("an explanation");
        let text = explained.to_string();
        assert!(text.contains(spread), "{text}");
        assert_eq!(explained.attempts.len(), 1 + usize::from(whole.is_some()), "{text}");
    }
}

/// VRB-08
#[test]
fn refused_whole_range_is_still_used_by_other_nics() {
    let _alone = alone();
    let world = segmented(|_| {});
    let domains =
        ["loop0", "loop1", "loop2"].map(|nic| world.bench.domain(nic, P2pPolicy::Required));
    let domains: Vec<_> = domains.iter().collect();
    let on = |buffer| {
        let request = Request::new(buffer, REMOTE | LOCAL);
        Batch::on(&domains).add(request).register().expect("registered")
    };
    let mut memory = on(world.buffer(4)).close().map_err(Error::from).expect("close");
    let before = world.bench.residue();
    let asked = world.bench.calls(DeviceCall::ExportDmaBuf);
    // The second NIC refuses the whole range.
    world.bench.faults.fail_nth(NicCall::Register, 2, Errno(22));
    let shared = on(memory.remove(0));
    assert_eq!(
        world.bench.calls(DeviceCall::ExportDmaBuf) - asked,
        1 + 4,
        "each part is exported once"
    );
    let last = |at: usize| {
        let decision = Arc::clone(shared.regions()[at].decision().expect("decided"));
        decision.attempts.last().expect("an attempt").call.clone()
    };
    assert!(last(0).ends_with("4 segments in 1 dma-buf)"), "{}", last(0));
    assert!(last(1).ends_with("4 segments in 4 dma-bufs)"), "{}", last(1));
    assert!(last(2).ends_with("4 segments in 1 dma-buf)"), "{}", last(2));
    let memory = shared.close().map_err(Error::from).expect("close");
    assert_eq!(world.bench.residue_after(&before), before);
    drop(memory);
}

/// VRB-08
#[test]
fn refused_whole_range_export_is_tried_once_for_all_nics() {
    let _alone = alone();
    let world = segmented(|vendor| vendor.whole = not_alike);
    let domains =
        ["loop0", "loop1", "loop2"].map(|nic| world.bench.domain(nic, P2pPolicy::Required));
    let domains: Vec<_> = domains.iter().collect();
    let request = Request::new(world.buffer(4), REMOTE | LOCAL);
    let shared = Batch::on(&domains).add(request).register().expect("registered");
    for region in shared.regions() {
        let decision = region.decision().expect("decided");
        assert_eq!(
            decision.attempts[0].cause_name,
            Some("segments-not-in-one"),
            "each says why: {decision}"
        );
        assert!(
            decision
                .attempts
                .last()
                .expect("an attempt")
                .call
                .ends_with("4 segments in 4 dma-bufs)")
        );
    }
    shared.close().map_err(Error::from).expect("close");
    assert_eq!(world.bench.device.stats().live_exports, 0);
}

/// HM-07
///
/// If the iface marks parts of a range as not exportable, the driver is not called. The error names
/// the first of these parts.
#[test]
fn range_with_an_unexportable_segment_is_not_exported_whole() {
    let _alone = alone();
    let bench =
        Bench::new(Simulated::builder().dma_buf(DmaBufKind::MemFd).segment_len(step()), IMPORTS);
    let domain = bench.domain("loop0", P2pPolicy::Required);
    let buffer = bench.buffer_of(AllocationKind::Virtual, DeviceId(0), 3 * step());
    let second = buffer.allocation().range.slice(step(), step()).expect("a part");
    bench.device.set_exportable(second.start(), false).expect("live");
    let rejected = domain.register(buffer, REMOTE).expect_err("the second cannot");
    let first = &rejected.error.trace()[0];
    assert_eq!(first.call, format!("segments({second})"), "{}", rejected.error);
    assert_eq!(bench.device.stats().live_exports, 0);
}

/// HM-07
///
/// A range that is exported as one dma-buf has a single verbs key.
#[test]
fn range_of_several_segments_has_one_verbs_key() {
    use hmem_core::{DomainAttr, MrMode};
    use hmem_provider_verbs::Verbs;

    let _alone = alone();
    let mut raw = Vec::new();
    for (whole, registrations) in [(None, 1), (Some(not_alike as Refuse), 4)] {
        let world = segmented(|vendor| vendor.whole = whole.unwrap_or(vendor.whole));
        let verbs = Verbs::builder().functions(verbs_fake::functions()).build().expect("start");
        verbs_fake::with(|script| script.dma_buf = 0);
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let attr =
            DomainAttr { mr_mode, hmem: true, p2p: P2pPolicy::Required, ..DomainAttr::default() };
        let registry = Arc::clone(&world.bench.registry);
        let domain = Domain::open(&verbs, registry, Arc::new(DefaultPathSelector::new()), attr)
            .expect("open");
        verbs_fake::calls();
        let region =
            domain.register(world.buffer(4), REMOTE).map_err(Error::from).expect("registered");
        let made =
            verbs_fake::calls().iter().filter(|call| call.starts_with("reg_dmabuf_mr")).count();
        assert_eq!(made, registrations);
        raw.push(region.raw_key().expect("a key").0.len());
        close(region);
    }
    assert!(raw[0] < raw[1], "one key, or one for each segment: {raw:?}");
}
