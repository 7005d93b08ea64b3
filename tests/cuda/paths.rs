//! Tests of the path that each kind of CUDA memory takes, and of the text of the decision.

use hmem::{
    Address, AddressRange, AllocationKind, Decision, ErrorKind, IfaceExt, Path, path::P2pPolicy,
    provider::Imports,
};
use hmem_fake_cuda::Profile;

use crate::{
    link::{HeldCopies, IMPORTS, Link, close, direct, not_over_a_gpu, pattern, profiles, real},
    segments::Segments,
};

/// Allocates and registers memory of a kind, moves bytes both ways through the NIC, and returns the
/// decision.
fn moved(link: &Link, kind: AllocationKind, len: u64) -> std::sync::Arc<Decision> {
    let region = link
        .domain
        .register(link.buffer(len, kind), crate::link::REMOTE)
        .map_err(hmem::Error::from)
        .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    let key = region.key().expect("key");
    let bytes = pattern(len, len as usize);
    link.put(&key, 0, &bytes).expect("write");
    link.cuda.flush_inbound(hmem::DeviceId(0)).expect("flush");
    let mut found = vec![0; bytes.len()];
    region.read(0, &mut found).expect("the device's own copy");
    assert!(found == bytes, "{kind:?}: bytes that the NIC wrote");
    region.write(7, &[9; 100]).expect("write on the device");
    let seen = link.get(&key, 7, 100).expect("read");
    assert_eq!(seen, [9; 100], "{kind:?}: bytes that the device wrote");
    let decision = std::sync::Arc::clone(region.decision().expect("decision"));
    drop(close(region));
    decision
}

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Virtual,
    AllocationKind::StreamOrdered,
    AllocationKind::Host,
    AllocationKind::Managed,
];

/// P2P-01
#[test]
fn each_kind_of_memory_moves_its_bytes_by_its_own_path() {
    for profile in profiles() {
        let open = profile.dma_buf;
        let link = Link::open(profile);
        for kind in KINDS.into_iter().filter(|kind| !link.lacks(*kind)) {
            for len in [1000, 100_001, (4 << 20) + 17] {
                let decision = moved(&link, kind, len);
                let expected = match kind {
                    AllocationKind::Host | AllocationKind::Managed => {
                        decision.path == Path::PlainHost
                    }
                    // The header does not list stream-ordered memory as exportable.
                    AllocationKind::StreamOrdered => {
                        decision.path == Path::Staged || real() && decision.path == Path::DmaBuf
                    }
                    _ if real() => link.is_direct(decision.path, kind),
                    _ if open => decision.path == Path::DmaBuf,
                    _ => decision.path == Path::Staged,
                };
                assert!(expected, "{kind:?}: {decision}");
            }
        }
    }
}

/// LIFE-11
///
/// The check copies by the driver and flushes the NIC's writes, as the transfers of the test do.
#[test]
fn reach_check_transfers_a_page_of_device_memory() {
    let link = Link::with_reach_checks(Profile::default());
    if link.no_rdma() {
        return;
    }
    let decision = moved(&link, AllocationKind::Device, 5000);
    if decision.path != Path::DmaBuf && not_over_a_gpu("the device has no direct path") {
        return;
    }
    let check = &decision.attempts[0];
    assert_eq!(check.call, "check_reach(dma-buf, Default mapping)", "{decision}");
    assert!(check.error.is_none(), "{decision}");
}

/// P2P-01
///
/// The software NIC accesses device addresses through copies by the iface. Hardware needs a
/// peer-memory client instead.
#[test]
fn nic_with_peer_memory_alone_gets_device_addresses() {
    let imports = Imports { dma_buf: false, peer_memory: true, ..IMPORTS };
    let link =
        Link::with(Profile::named("550-closed").expect("a profile"), imports, P2pPolicy::Required);
    if link.no_rdma() {
        return;
    }
    let buffer = link.buffer(5000, AllocationKind::Device);
    let base = buffer.allocation().base().0;
    // Over a GPU the initial value of the attribute is unknown.
    assert!(real() || !link.driver.sync_memops(base));
    let region = link
        .domain
        .register(buffer, crate::link::REMOTE)
        .map_err(hmem::Error::from)
        .expect("register");
    assert_eq!(region.decision().expect("decision").path, Path::PeerMemory);
    assert!(real() || link.driver.sync_memops(base), "SYNC_MEMOPS is set first");
    let key = region.key().expect("key");
    link.put(&key, 10, &pattern(1, 4000)).expect("write");
    assert!(link.get(&key, 10, 4000).expect("read") == pattern(1, 4000));
    drop(close(region));
}

/// P2P-04, P2P-03
///
/// The export of stream-ordered memory is tried, and the driver's error code is in the trace.
#[test]
fn export_is_tried_for_memory_other_than_vmm() {
    let link = Link::open(Profile::default());
    if link.no_dma_bufs() || link.lacks(AllocationKind::StreamOrdered) {
        return;
    }
    let decision = moved(&link, AllocationKind::StreamOrdered, 5000);
    let refused = &decision.attempts[0];
    assert!(
        refused.path == Path::DmaBuf && refused.call.starts_with("export_dma_buf("),
        "{decision}"
    );
    let Some(error) = refused.error.as_ref() else {
        assert!(real(), "{decision}");
        return;
    };
    let code = error.driver().expect("the driver's own code").code;
    assert!(code == 801 || real(), "{error}");
    assert_eq!(refused.cause_name, Some("stream-ordered-pool"), "{decision}");
}

/// P2P-03
///
/// The trace contains no refused export, since no export was tried.
#[test]
fn handle_without_rdma_is_refused_at_the_segments_step() {
    let link = Link::open(Profile::default());
    if link.lacks(AllocationKind::Virtual) {
        return;
    }
    let segments = Segments::new(&link.functions, &[false]);
    if link.reaches_anything(segments.base) {
        return;
    }
    let range = segments.range(0, segments.step);
    let region = link.expose(range).expect("staged instead");
    let decision = region.decision().expect("decision");
    let skipped = &decision.attempts[0];
    assert_eq!(skipped.call, format!("segments({range})"), "{decision}");
    let error = skipped.error.as_ref().expect("skipped");
    let attribute = error.context_value("attribute").expect("the reason");
    assert!(attribute.contains("IS_GPU_DIRECT_RDMA_CAPABLE"), "{error}");
    let cause = skipped.cause.as_deref().expect("a cause");
    assert!(cause.contains("not created for RDMA"), "{decision}");
    region.close().expect("close");
}

/// Registers a range over four memory handles, writes bytes over each boundary, reads bytes over
/// the first one, and returns the decision. With the fake driver, asserts the number of exports and
/// that no object stays open.
fn moved_over_seams(link: &Link, segments: &Segments<'_>, exports: u64) -> Decision {
    let once = || {
        let range = segments.range(12_345, 3 * segments.step);
        let region = link.expose(range).unwrap_or_else(|error| panic!("{error}"));
        over_seams(link, segments, &region);
        let decision = Decision::clone(region.decision().expect("decision"));
        region.close().expect("close");
        decision
    };
    // The fake keeps one file for each exported part.
    let decision = once();
    if real() {
        return decision;
    }
    let counts = || (link.driver.live(), open_fds());
    let (before, asked) = (counts(), link.driver.calls(EXPORT));
    let decision = once();
    assert_eq!(link.driver.calls(EXPORT) - asked, exports, "{decision}");
    assert_eq!(counts(), before);
    decision
}

const EXPORT: &str = "cuMemGetHandleForAddressRange";

/// Returns the number of open fds of this process. Pipes and `/dev/null` are not counted, since
/// other tests open them for their children.
fn open_fds() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    targets
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| !target.starts_with("pipe:") && target != "/dev/null")
        .count()
}

fn over_seams(link: &Link, segments: &Segments<'_>, region: &hmem::MemoryRegion) {
    let range = region.range();
    assert!(link.is_direct(region.decision().expect("decision").path, AllocationKind::Virtual));
    let (key, bytes) = (region.key().expect("key"), pattern(7, range.len() as usize));
    link.put(&key, 0, &bytes).expect("write over every seam");
    let mut found = vec![0; bytes.len()];
    link.cuda.read_bytes(range.start(), &mut found).expect("read");
    assert!(found == bytes);
    assert!(
        link.get(&key, segments.step - 20_000, 40_000).expect("read")
            == bytes[segments.step as usize - 20_000..][..40_000]
    );
}

fn with_dma_bufs(profile: Profile) -> Link {
    Link::with(profile, IMPORTS, direct())
}

/// HM-07
#[test]
fn range_over_several_handles_is_one_region() {
    let link = with_dma_bufs(Profile::default());
    if link.no_rdma_with_vmm() {
        return;
    }
    let segments = Segments::new(&link.functions, &[true; 4]);
    let decision = moved_over_seams(&link, &segments, 1);
    if real() {
        return;
    }
    assert_eq!(decision.attempts.len(), 1, "{decision}");
    assert!(decision.attempts[0].call.contains("4 segments in 1 dma-buf"), "{decision}");
}

/// HM-07
#[test]
fn handles_refused_as_one_dma_buf_are_exported_one_by_one() {
    if not_over_a_gpu("the driver must refuse one export of several handles") {
        return;
    }
    let apart = |number: usize| u32::from(number == 2);
    for (profile, handle_types, code) in [
        (
            Profile { spanning_exports: false, ..Profile::default() },
            (|_| 0) as fn(usize) -> u32,
            801,
        ),
        (Profile::default(), apart, 1),
    ] {
        let link = with_dma_bufs(profile);
        let segments = Segments::of(&link.functions, &[true; 4], handle_types);
        let decision = moved_over_seams(&link, &segments, 1 + 4);
        let [refused, made] = &decision.attempts[..] else { panic!("{decision}") };
        assert!(refused.call.starts_with("export_dma_buf("), "{decision}");
        let error = refused.error.as_ref().expect("refused");
        assert_eq!(error.driver().expect("the driver's own code").code, code, "{error}");
        assert_eq!(refused.cause_name, Some("segments-not-in-one"), "{decision}");
        assert!(made.call.contains("4 segments in 4 dma-bufs"), "{decision}");
    }
}

/// HM-07
#[test]
fn range_with_an_unexportable_segment_names_it() {
    let link = Link::with(Profile::default(), IMPORTS, P2pPolicy::Required);
    if link.no_dma_bufs() || link.no_rdma_with_vmm() {
        return;
    }
    let segments = Segments::new(&link.functions, &[true, false, false]);
    if link.reaches_anything(segments.base + segments.step) {
        return;
    }
    let error =
        link.expose(segments.range(100, 3 * segments.step - 100)).expect_err("the second cannot");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let first = segments.range(segments.step, segments.step).to_string();
    assert!(format!("{error:#}").contains(&first), "{error}");
    assert!(format!("{error:#}").contains("gpuDirectRDMACapable"), "{error}");
}

/// HM-01
#[test]
fn partly_page_locked_host_memory_is_registered_as_host_pages() {
    let link = Link::open(Profile::default());
    let memory = vec![5u8; 1 << 20];
    let page = rustix::param::page_size() as u64;
    let start = Address::of_ptr(memory.as_ptr()).0.next_multiple_of(page);
    let locked = AddressRange::new(Address(start), 64 << 10).expect("a range");
    // SAFETY: `memory` outlives the registration.
    unsafe { link.cuda.host_register(locked) }.expect("page-lock");
    // The range begins before the page-locked part and ends after it.
    let region = link.expose(AddressRange::of(&memory)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(region.decision().expect("decision").path, Path::PlainHost);
    assert_eq!(link.get(&region.key().expect("key"), 0, 100).expect("read"), [5; 100]);
    region.close().expect("close");
    link.cuda.host_unregister(locked).expect("unregister");
}

/// HM-06
#[test]
fn registrations_of_device_memory_leave_nothing_open() {
    let link = Link::open(Profile::default());
    let memory = link.buffer(300_000, AllocationKind::Device);
    let count = || if real() { Err(open_fds()) } else { Ok(link.driver.live()) };
    // The driver keeps its own files open after the first export.
    link.expose(memory.allocation().range).expect("register").close().expect("close");
    let before = count();
    for round in 0..500u64 {
        let range =
            memory.allocation().range.slice(round * 131 % 100_000, 1 + round * 17).expect("a part");
        let region = link.expose(range).unwrap_or_else(|error| panic!("{round}: {error}"));
        assert!(link.is_direct(region.decision().expect("decision").path, AllocationKind::Device));
        region.close().expect("close");
    }
    assert_eq!(count(), before);
}
