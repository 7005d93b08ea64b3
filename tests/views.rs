//! Tests of `register_many`, which registers many views (ranges with rights) by one call, and of
//! caches that grow a registration beyond the requested range.
#![allow(unsafe_code)]

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use hmem::{
    Access, Address, AddressRange, AllocationKind, BufferView, CacheAttr, DeviceBuffer, DeviceId,
    Domain, DomainAttr, Endpoint, Errno, ErrorKind, Growth, Hmem, Iface, IfaceExt, Iova, MrMode,
    OwnedBuffer, Path, RemoteKey, Result, View,
    iface::AllocRequest,
    loopback::{Call, Faults, Loopback},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    system::{SIMULATED, Simulated},
    transfer::{EndpointName, RemoteSegment},
};

const PAGE: u64 = 4096;
const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;
const REMOTE: Access = READ.union(WRITE);

/// A simulated device, a domain with a cache on a software NIC, and a peer.
struct Net {
    device: Arc<dyn Iface>,
    faults: Faults,
    target: Domain,
    initiator: Domain,
    endpoint: Endpoint,
    cq: Arc<dyn CompletionQueue>,
    name: EndpointName,
    _target_endpoint: Endpoint,
}

impl Net {
    fn open() -> Self {
        Self::cached(CacheAttr::default())
    }

    fn cached(cache: CacheAttr) -> Self {
        Self::with(u64::MAX, MrMode::empty(), cache, P2pPolicy::Required)
    }

    fn with(max_mr_size: u64, mode: MrMode, cache: CacheAttr, p2p: P2pPolicy) -> Self {
        let simulated = Simulated::builder().segment_len(2 * PAGE).build().expect("a device");
        let device: Arc<dyn Iface> = Arc::new(simulated);
        let faults = Faults::new();
        let loopback = Loopback::builder().faults(&faults).needs(mode).max_mr_size(max_mr_size);
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device))
            .provider(loopback.build().expect("a software NIC"))
            .build()
            .expect("the ifaces start");
        let attr = DomainAttr { mr_mode: mode, p2p, ..DomainAttr::default() };
        let caching = DomainAttr { cache: Some(cache), ..attr.clone() };
        let target = hmem.domain("loopback", caching).expect("a domain");
        let initiator = hmem.domain("loopback", attr).expect("a domain");
        let cq = initiator.open_cq(8).expect("a queue");
        let endpoint = initiator.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let target_cq = target.open_cq(8).expect("a queue");
        let target_endpoint =
            target.open_endpoint(&EndpointAttr::new(&target_cq)).expect("an endpoint");
        let name = target_endpoint.name();
        faults.count();
        Self {
            device,
            faults,
            target,
            initiator,
            endpoint,
            cq,
            name,
            _target_endpoint: target_endpoint,
        }
    }

    fn buffer(&self, len: u64, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        DeviceBuffer::allocate(&self.device, &request).expect("memory")
    }

    /// Allocates a device buffer in which each page has its own byte value.
    fn filled(&self, pages: u64) -> DeviceBuffer {
        let buffer = self.buffer(pages * PAGE, AllocationKind::Device);
        for page in 0..pages {
            buffer.write(page * PAGE, &[page as u8 + 1; PAGE as usize]).expect("inside");
        }
        buffer
    }

    fn done(&self) -> Result<u64> {
        let mut done = Vec::new();
        while self.cq.read(&mut done, 1).expect("the queue") == 0 {
            self.target.progress().expect("progress");
        }
        done.remove(0).result
    }

    /// Reads the first `len` bytes of the region with `key`, as the peer does.
    fn pull(&self, key: &RemoteKey, len: u64) -> Result<Vec<u8>> {
        let local = self.initiator.register(vec![0_u8; len as usize], Access::READ)?;
        let peer = self.endpoint.resolve(&self.name)?;
        let remote = [key.slice(0, len)?];
        self.endpoint.read(&[local.slice(0, len)?], &remote, peer, 1)?;
        self.done()?;
        Ok(local.close()?)
    }

    /// Writes `bytes` to the start of the region with `key`, as the peer does.
    fn push(&self, key: &RemoteKey, bytes: &[u8]) -> Result<u64> {
        let local = self.initiator.register(bytes.to_vec(), Access::WRITE)?;
        let len = bytes.len() as u64;
        let peer = self.endpoint.resolve(&self.name)?;
        self.endpoint.write(&[local.slice(0, len)?], &[key.slice(0, len)?], peer, 1)?;
        self.done()
    }

    fn regions(&self) -> u64 {
        self.target.live().regions
    }

    fn registrations(&self) -> u64 {
        self.faults.calls(Call::Register)
    }
}

/// Returns a view for each page of several buffers with `pages` pages each.
fn pages(buffers: usize, pages: u64, access: Access) -> Vec<BufferView> {
    let of =
        |buffer| (0..pages).map(move |page| BufferView::new(buffer, page * PAGE, PAGE, access));
    (0..buffers).flat_map(of).collect()
}

/// MR-17
#[test]
fn views_of_an_allocation_share_a_registration_but_no_key() {
    let net = Net::open();
    let buffers: Vec<_> = (0..3).map(|_| net.filled(8)).collect();
    let mut views = pages(3, 8, REMOTE);
    views.reverse();
    let registered =
        net.target.register_many(buffers, &views, Growth::Allocation).expect("registered");
    assert_eq!((registered.len(), registered.regions().len()), (24, 3));
    assert_eq!((net.regions(), net.registrations()), (3, 3));
    let keys = registered.keys().expect("keys");
    let distinct: BTreeSet<_> =
        keys.iter().map(|key| (key.as_u64().expect("one"), key.base())).collect();
    assert_eq!(distinct.len(), 24, "no two views are the same range of the same key");
    for (index, (key, view)) in keys.iter().zip(&views).enumerate() {
        assert_eq!(
            (key.first_len(), registered.get(index).expect("there").access()),
            (PAGE, REMOTE)
        );
        let byte = (view.offset / PAGE) as u8 + 1;
        assert_eq!(net.pull(key, PAGE).expect("read"), [byte; PAGE as usize]);
        let outside = key.slice(0, PAGE + 1).unwrap_err();
        assert_eq!(outside.kind(), ErrorKind::OutOfBounds, "{outside}");
    }
    net.push(&keys[0], b"through the last page of the last").expect("write");
    let mut bytes = [0; 7];
    registered.read(2, 7 * PAGE, &mut bytes).expect("inside");
    assert_eq!(&bytes, b"through");
    let dead = keys[5].clone();
    let buffers = registered.close().expect("nothing is bound to them");
    assert_eq!((buffers.len(), net.regions()), (3, 0));
    assert!(net.pull(&dead, 1).is_err(), "the key works after the close");
}

/// MR-17
#[test]
fn without_growth_each_view_is_a_registration_of_its_own() {
    let net = Net::open();
    let registered = net
        .target
        .register_many(vec![net.filled(8)], &pages(1, 8, REMOTE), Growth::None)
        .expect("registered");
    assert_eq!((registered.regions().len(), net.registrations()), (8, 8));
    for (view, region) in registered.iter().zip(registered.regions()) {
        assert_eq!(view.region().range(), view.range());
        assert_eq!(region.range().len(), PAGE);
    }
    let numbers: BTreeSet<_> =
        registered.keys().expect("keys").iter().map(|key| key.as_u64().expect("one")).collect();
    assert_eq!(numbers.len(), 8);
}

/// MR-17
#[test]
fn views_with_different_rights_never_share_a_registration() {
    let net = Net::open();
    let access = [READ, WRITE, REMOTE, READ, WRITE, REMOTE, Access::SEND, Access::empty()];
    let views: Vec<_> = access
        .iter()
        .enumerate()
        .map(|(page, access)| BufferView::new(0, page as u64 * PAGE / 2, PAGE, *access))
        .collect();
    let registered = net
        .target
        .register_many(vec![net.filled(8)], &views, Growth::Allocation)
        .expect("registered");
    assert_eq!(registered.regions().len(), 5, "one for each set of rights");
    for (view, access) in registered.iter().zip(access) {
        assert_eq!(view.access(), access);
        let key = view.key().expect("a key");
        let reads = net.pull(&key, 16).map(|_| ()).map_err(|error| error.kind());
        let writes = net.push(&key, &[9; 16]).map(|_| ()).map_err(|error| error.kind());
        let granted = |right| match access.contains(right) {
            true => Ok(()),
            false => Err(ErrorKind::AccessDenied),
        };
        assert_eq!((reads, writes), (granted(READ), granted(WRITE)), "{access}");
    }
}

/// MR-17
#[test]
fn registrations_stay_within_both_limits() {
    for (max, growth) in [(u64::MAX, Growth::UpTo(3 * PAGE)), (3 * PAGE, Growth::Allocation)] {
        let net = Net::with(max, MrMode::empty(), CacheAttr::default(), P2pPolicy::Required);
        let registered = net
            .target
            .register_many(vec![net.filled(8)], &pages(1, 8, REMOTE), growth)
            .expect("registered");
        let lens: Vec<_> = registered.regions().iter().map(|region| region.range().len()).collect();
        assert_eq!(lens, [3 * PAGE, 3 * PAGE, 2 * PAGE]);
        for (index, key) in registered.keys().expect("keys").iter().enumerate() {
            assert_eq!(net.pull(key, 1).expect("read"), [index as u8 + 1]);
        }
    }
}

/// MR-17
#[test]
fn a_registration_covers_the_smallest_range_of_its_views() {
    let net = Net::open();
    let views = [BufferView::new(0, 5 * PAGE, 10, READ), BufferView::new(0, 2 * PAGE, 100, READ)];
    let registered = net
        .target
        .register_many(vec![net.filled(8)], &views, Growth::Allocation)
        .expect("registered");
    let [region] = registered.regions() else { panic!("one registration") };
    assert_eq!(region.range().len(), 3 * PAGE + 10, "it reaches beyond its views");
}

/// MR-17
#[test]
fn overlapping_and_repeated_views_have_their_own_bytes() {
    let net = Net::open();
    let views = [(0, 3), (1, 1), (1, 4), (1, 1), (0, 8)]
        .map(|(page, pages)| BufferView::new(0, page * PAGE, pages * PAGE, READ));
    for (growth, regions) in [(Growth::Allocation, 1), (Growth::None, 5)] {
        let registered =
            net.target.register_many(vec![net.filled(8)], &views, growth).expect("registered");
        assert_eq!(registered.regions().len(), regions);
        for (key, view) in registered.keys().expect("keys").iter().zip(&views) {
            assert_eq!(key.first_len(), view.len);
            assert_eq!(net.pull(key, 1).expect("read"), [(view.offset / PAGE) as u8 + 1]);
        }
    }
}

/// MR-17
#[test]
fn raw_memory_that_cannot_grow_is_registered_as_requested() {
    let net = Net::open();
    let host = vec![7_u8; 8 * PAGE as usize];
    let segments = net.buffer(8 * PAGE, AllocationKind::Virtual);
    let one_segment = net.buffer(2 * PAGE, AllocationKind::Virtual);
    let plain = net.buffer(8 * PAGE, AllocationKind::Device);
    let of = |range: AddressRange, count: u64| -> Vec<View> {
        let len = range.len() / count;
        (0..count).map(|at| View::new(range.slice(at * len, len).expect("in"), REMOTE)).collect()
    };
    for (name, range, regions) in [
        ("host memory", AddressRange::of(&host), 8),
        ("several segments", segments.allocation().range, 8),
        ("one segment", one_segment.allocation().range, 1),
        ("an allocation", plain.allocation().range, 1),
    ] {
        // SAFETY: no reference to the memory is used while it is registered.
        let views = unsafe { net.target.reg_many(&of(range, 8), Growth::Allocation) };
        let views = views.expect("registered");
        assert_eq!(views.regions().len(), regions, "{name}");
        assert_eq!(views.keys().expect("keys").len(), 8);
        views.close().expect("nothing is bound to them");
    }
    drop(host);
}

/// MR-17
#[test]
fn host_buffers_grow_only_to_the_whole_buffer() {
    let net = Net::open();
    let buffers = vec![vec![1_u8; 8 * PAGE as usize], vec![2; 8 * PAGE as usize]];
    let registered = net
        .target
        .register_many(buffers, &pages(2, 8, READ), Growth::Allocation)
        .expect("registered");
    assert_eq!(registered.regions().len(), 2);
    let keys = registered.keys().expect("keys");
    assert_eq!(net.pull(&keys[3], 4).expect("read"), [1; 4]);
    assert_eq!(net.pull(&keys[12], 4).expect("read"), [2; 4]);
    assert_eq!(registered.close().expect("closed")[1], vec![2; 8 * PAGE as usize]);
}

/// MR-17
#[test]
fn views_register_alone_if_their_joint_registration_fails() {
    for policy in [P2pPolicy::Required, P2pPolicy::Enabled] {
        let net = Net::with(u64::MAX, MrMode::empty(), CacheAttr::default(), policy);
        // The NIC refuses the dma-buf of the grown range. Staged copies may replace it.
        net.faults.fail(Call::Register, 1, Errno(12));
        let registered = net
            .target
            .register_many(vec![net.filled(4)], &pages(1, 4, READ), Growth::Allocation)
            .expect("each view can be registered");
        assert_eq!((registered.regions().len(), net.regions()), (4, 4), "{policy}");
        for (index, view) in registered.iter().enumerate() {
            let path = view.region().decision().expect("registered").path;
            assert_eq!(path, Path::DmaBuf, "growth made it worse");
            let bytes = net.pull(&view.key().expect("a key"), PAGE).expect("read");
            assert_eq!(bytes, [index as u8 + 1; PAGE as usize]);
        }
    }
}

/// MR-17
#[test]
fn failed_register_many_closes_regions_and_returns_buffers() {
    let net = Net::open();
    for failing in 1..=6 {
        let buffers = vec![net.filled(2), net.filled(2), net.filled(2)];
        net.faults.fail(Call::Register, failing, Errno(12));
        let refused =
            net.target.register_many(buffers, &pages(3, 2, READ), Growth::None).unwrap_err();
        let error = &refused.error;
        assert_eq!((error.kind(), net.regions()), (ErrorKind::OutOfResources, 0), "{error}");
        assert_eq!(error.context_value("registered before"), Some(&*(failing - 1).to_string()));
        assert!(refused.value.is_empty() && refused.value.regions().is_empty());
        let buffers = refused.value.close().expect("nothing is registered");
        let mut byte = [0];
        buffers[2].read(PAGE, &mut byte).expect("the buffer is whole");
        assert_eq!((buffers.len(), byte), (3, [2]));
    }
    // The grown registration fails. Each view then registers alone, and one of these registrations
    // fails too.
    net.faults.clear();
    for failing in [1, 3] {
        net.faults.fail(Call::Register, failing, Errno(12));
    }
    let refused = net
        .target
        .register_many(vec![net.filled(4)], &pages(1, 4, READ), Growth::Allocation)
        .unwrap_err();
    assert_eq!((refused.error.context_value("view"), net.regions()), (Some("1"), 0));
}

/// MR-17
#[test]
fn failed_close_returns_the_region_with_the_error() {
    let net = Net::open();
    net.faults.fail(Call::Register, 3, Errno(12));
    net.faults.fail(Call::Deregister, 1, Errno(5));
    let refused = net
        .target
        .register_many(vec![net.filled(3)], &pages(1, 3, READ), Growth::None)
        .unwrap_err();
    assert_eq!(refused.error.context_value("left registered"), Some("1"), "{refused}");
    assert_eq!((refused.value.regions().len(), net.regions()), (1, 1));
    assert_eq!(refused.value.close().expect("the fault is over").len(), 1);
    assert_eq!(net.regions(), 0);
}

/// MR-17
#[test]
fn wrong_views_are_refused_by_name_before_registration() {
    let net = Net::open();
    let good = BufferView::new(0, 0, PAGE, READ);
    let unknown = Access::from_bits_retain(1 << 40);
    for (wrong, kind) in [
        (BufferView::new(0, PAGE, PAGE + 1, READ), ErrorKind::OutOfBounds),
        (BufferView::new(0, u64::MAX, 2, READ), ErrorKind::OutOfBounds),
        (BufferView::new(0, 1, u64::MAX, READ), ErrorKind::OutOfBounds),
        (BufferView::new(1, 0, 1, READ), ErrorKind::OutOfBounds),
        (BufferView::new(0, 5, 0, READ), ErrorKind::ZeroLength),
        (BufferView::new(0, 0, PAGE, unknown), ErrorKind::BadAccess),
    ] {
        for growth in [Growth::None, Growth::Allocation] {
            let buffers = vec![net.filled(2)];
            let refused = net.target.register_many(buffers, &[good, wrong], growth).unwrap_err();
            let error = &refused.error;
            assert_eq!((error.kind(), error.operation()), (kind, "register_many"), "{error}");
            assert_eq!(error.context_value("view"), Some("1"), "{error}");
            assert_eq!((net.regions(), net.registrations()), (0, 0), "{wrong:?}");
        }
    }
    let wraps = AddressRange::new(Address(u64::MAX - 10), 100).unwrap_err();
    assert_eq!(wraps.kind(), ErrorKind::AddressWraps);
    // A view that exceeds its allocation.
    let buffer = net.filled(2);
    let range = buffer.allocation().range;
    let beyond = AddressRange::new(range.start(), 3 * PAGE).expect("no wrap");
    let views = [View::new(range, READ), View::new(beyond, READ)];
    // SAFETY: the registration is refused.
    let refused = unsafe { net.target.reg_many(&views, Growth::Allocation) }.unwrap_err();
    assert_eq!((refused.error.kind(), net.regions()), (ErrorKind::OutOfBounds, 0), "{refused}");
    assert_eq!(refused.error.operation(), "reg_many");
}

/// MR-17
#[test]
fn an_empty_list_of_views_registers_nothing() {
    let net = Net::open();
    let registered =
        net.target.register_many(vec![net.filled(1)], &[], Growth::Allocation).expect("nothing");
    assert!(registered.is_empty() && registered.regions().is_empty() && net.regions() == 0);
    assert_eq!(registered.close().expect("nothing to close").len(), 1);
    // SAFETY: the list is empty.
    assert!(unsafe { net.target.reg_many(&[], Growth::None) }.expect("nothing").is_empty());
}

/// MR-17
#[test]
fn views_of_memory_that_was_freed_are_refused() {
    let mode = MrMode::ALLOCATED | MrMode::VIRT_ADDR;
    let net = Net::with(u64::MAX, mode, CacheAttr::default(), P2pPolicy::Required);
    let (live, freed) = (net.filled(2), net.filled(2));
    let views = [live.allocation().range, freed.allocation().range].map(|at| View::new(at, READ));
    drop(freed);
    for growth in [Growth::None, Growth::Allocation] {
        // SAFETY: only the live buffer could be registered, and nothing refers into it.
        let refused = unsafe { net.target.reg_many(&views, growth) }.unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::BadAddress, "{refused}");
        assert_eq!((refused.error.context_value("view"), net.regions()), (Some("1"), 0));
    }
}

/// MR-17
#[test]
fn views_of_memory_that_is_freed_meanwhile_are_refused() {
    let net = Net::open();
    let (live, freed) = (net.filled(2), net.filled(2));
    let mut views = [live.allocation().range, freed.allocation().range];
    views.sort();
    let kept = views[0];
    let views: Vec<_> = views
        .iter()
        .flat_map(|range| [0, PAGE].map(|at| View::new(range.slice(at, PAGE).expect("in"), READ)))
        .collect();
    let (live, freed) = if live.allocation().range == kept { (live, freed) } else { (freed, live) };
    let gate = net.faults.hold(Call::Register);
    std::thread::scope(|scope| {
        // SAFETY: nothing refers into the memory, and freed memory is not registered then.
        let call =
            scope.spawn(|| unsafe { net.target.reg_many(&views, Growth::Allocation) }.unwrap_err());
        gate.wait_held();
        drop(freed);
        gate.release();
        let refused = call.join().expect("no panic");
        assert!(refused.value.regions().is_empty() && net.regions() == 0, "{refused}");
    });
    drop(live);
}

/// MR-17
#[test]
fn nic_enforces_bounds_of_a_sub_region_of_a_shared_registration() {
    let net = Net::open();
    let registered = net
        .target
        .register_many(vec![net.filled(4)], &pages(1, 4, READ), Growth::Allocation)
        .expect("registered");
    let view = registered.get(2).expect("there");
    let sub = view.region().sub(view.range(), READ, None).expect("part of the region");
    let key = sub.key().expect("a key");
    assert_eq!(net.pull(&key, 3).expect("read"), [3; 3]);
    let local = net.initiator.register(vec![0_u8; 8192], Access::READ).expect("a buffer");
    let peer = net.endpoint.resolve(&net.name).expect("the target");
    for (offset, len) in [(0, PAGE + 1), (PAGE, 1)] {
        // Built by hand, since `RemoteKey::slice` refuses the range before the NIC does.
        let address = Iova(key.base().0 + offset);
        let remote = [RemoteSegment { address, len, key: &key }];
        let into = [local.slice(0, len).expect("inside")];
        net.endpoint.read(&into, &remote, peer, 1).expect("posted");
        assert_eq!(net.done().unwrap_err().kind(), ErrorKind::OutOfBounds, "{len} at {offset}");
    }
    let busy = registered.close().unwrap_err();
    assert_eq!(busy.error.kind(), ErrorKind::Busy);
    drop(sub);
    busy.value.close().expect("nothing depends on it any more");
}

/// MR-17
#[test]
fn slices_of_a_view_stay_inside_the_view() {
    let net = Net::open();
    let registered = net
        .target
        .register_many(vec![net.filled(4)], &pages(1, 4, Access::SEND), Growth::Allocation)
        .expect("registered");
    let view = registered.get(1).expect("there");
    assert!(view.slice(0, PAGE).is_ok() && view.desc().is_ok());
    for (offset, len) in [(0, PAGE + 1), (1, PAGE), (PAGE + 1, 0), (u64::MAX, 2)] {
        let outside = view.slice(offset, len).unwrap_err();
        assert_eq!(outside.kind(), ErrorKind::OutOfBounds, "{offset} {len}");
    }
}

/// MR-17
#[test]
fn misses_of_a_cache_that_grows_register_the_allocation_once() {
    let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
    let cache = net.target.cache().expect("a cache");
    let buffer = net.filled(8);
    let range = buffer.allocation().range;
    for page in 0..8 {
        let part = range.slice(page * PAGE, PAGE).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = unsafe { cache.get_or_register(part, READ) }.expect("registered");
        assert_eq!((region.range(), region.view().range()), (range, part));
        let key = region.view().key().expect("a key");
        assert_eq!(key.first_len(), PAGE, "the key is of what was looked up");
        assert_eq!(net.pull(&key, PAGE).expect("read"), [page as u8 + 1; PAGE as usize]);
        assert_eq!(region.slice(0, PAGE + 1).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    assert_eq!((cache.statistics().registrations, cache.statistics().hits), (1, 7));
    // Other rights need another registration, which has only these rights. SAFETY: nothing refers
    // into the memory, and it outlives its registration.
    let writable = unsafe { cache.get_or_register(range.slice(0, 1).expect("in"), WRITE) };
    let writable = writable.expect("registered");
    assert_eq!((writable.access(), cache.statistics().registrations), (WRITE, 2));
    drop(writable);
    cache.evict_idle();
    assert_eq!(net.regions(), 0);
}

/// MR-17
///
/// The rest of the allocation belongs to another process, which did not give this process's peers
/// access to it.
#[test]
fn registration_of_imported_memory_does_not_grow() {
    for (kind, imported) in [(AllocationKind::Device, false), (AllocationKind::Imported, true)] {
        let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
        let cache = net.target.cache().expect("a cache");
        let owned = net.buffer(8 * PAGE, AllocationKind::Device);
        let opened = imported.then(|| {
            let handle = net.device.ipc_export(owned.allocation()).expect("a handle");
            net.device.ipc_open(&handle).expect("opens")
        });
        let allocation = opened.unwrap_or(*owned.allocation());
        assert_eq!(allocation.kind, kind);
        let part = allocation.range.slice(PAGE, 100).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = unsafe { cache.get_or_register(part, READ) }.expect("registered");
        let expected = if imported { part } else { allocation.range };
        assert_eq!(region.range(), expected, "{kind:?}");
        let views = [1, 5].map(|page| allocation.range.slice(page * PAGE, 100).expect("inside"));
        let views = views.map(|range| View::new(range, READ));
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let registered = unsafe { net.target.reg_many(&views, Growth::Allocation) };
        let regions = registered.expect("registered").regions().len();
        assert_eq!(regions, if imported { 2 } else { 1 }, "{kind:?}");
    }
}

/// MR-17
#[test]
fn a_cache_grows_only_within_its_limits() {
    let grown = |attr: CacheAttr, kind: AllocationKind, offset: u64| -> u64 {
        let net = Net::cached(attr);
        let cache = net.target.cache().expect("a cache");
        let buffer = net.buffer(8 * PAGE, kind);
        let part = buffer.allocation().range.slice(offset, 100).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = unsafe { cache.get_or_register(part, READ) }.expect("registered");
        let len = region.range().len();
        drop(region);
        cache.evict_idle();
        len
    };
    let device = AllocationKind::Device;
    let whole = || CacheAttr::default().growth(Growth::Allocation);
    assert_eq!(grown(CacheAttr::default(), device, 0), 100, "growth is opt-in");
    assert_eq!(grown(whole(), device, 0), 8 * PAGE);
    assert_eq!(grown(whole(), AllocationKind::Virtual, 0), 100, "several segments");
    assert_eq!(grown(whole().max_bytes(4 * PAGE), device, 0), 4 * PAGE, "the cache's bytes");
    assert_eq!(grown(whole().max_count(0), device, 0), 100, "the cache is off");
    let up_to = || CacheAttr::default().growth(Growth::UpTo(3 * PAGE));
    assert_eq!(grown(up_to(), device, 7 * PAGE), 2 * PAGE, "the last block");
    assert_eq!(grown(up_to(), device, 3 * PAGE - 50), 100, "in two blocks");
    let unwatched = whole().without_monitors([SIMULATED]);
    assert_eq!(grown(unwatched, device, 0), 100, "memory that is not cached");
}

/// MR-17
#[test]
fn miss_with_refused_growth_registers_its_own_range() {
    for policy in [P2pPolicy::Required, P2pPolicy::Enabled] {
        let attr = CacheAttr::default().growth(Growth::Allocation);
        let net = Net::with(u64::MAX, MrMode::empty(), attr, policy);
        let cache = net.target.cache().expect("a cache");
        let buffer = net.filled(8);
        // The NIC refuses the dma-buf of the grown range. Staged copies may replace it.
        net.faults.fail(Call::Register, 1, Errno(22));
        for page in 0..3 {
            let part = buffer.allocation().range.slice(page * PAGE, 10).expect("inside");
            // SAFETY: nothing refers into the memory, and it outlives its registration.
            let region = unsafe { cache.get_or_register(part, READ) }.expect("its own range");
            assert_eq!(
                (region.range(), region.decision().expect("one").path),
                (part, Path::DmaBuf)
            );
        }
        cache.evict_idle();
        cache.reclaim();
        assert_eq!(net.regions(), 0, "{policy}");
    }
}

/// Lets the NIC refuse the first registration, which is the grown range of the first miss. Further
/// misses follow, each for another range of 8 bytes. Returns the number of the first miss that
/// registers a grown range (the first miss has number 0), or `None` if none of 1000 does.
fn misses_until_growth<B: OwnedBuffer>(net: &Net, buffer: B, refusal: i32) -> Option<u64> {
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(buffer).expect("a buffer");
    net.faults.fail(Call::Register, 1, Errno(refusal));
    (0..1000).find(|miss| {
        let region = buffer.get_or_register(miss * 16, 8, READ).expect("registered");
        region.range().len() > 8
    })
}

/// MR-17
#[test]
fn a_refused_growth_is_retried_only_after_many_misses() {
    let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
    let host = || vec![0_u8; 8 * PAGE as usize];
    let (no_memory, invalid) = (12, 22);
    for (name, misses) in [
        ("host memory", misses_until_growth(&net, host(), no_memory)),
        ("host memory, which has no identity", misses_until_growth(&net, host(), invalid)),
        ("an allocation", misses_until_growth(&net, net.filled(8), no_memory)),
    ] {
        let misses = misses.unwrap_or_else(|| panic!("{name}: never tried again"));
        assert!(misses > 16, "{name}: tried again at miss {misses}");
    }
    let device = misses_until_growth(&net, net.filled(8), invalid);
    assert_eq!(device, None, "the device refuses the allocation for good");
}

/// A part of a buffer that shares the ownership of its memory with the other parts. Its drop
/// increments `ends`.
struct Part<B: OwnedBuffer> {
    memory: Arc<B::Parts>,
    range: AddressRange,
    ends: Arc<AtomicUsize>,
}

impl<B: OwnedBuffer> Drop for Part<B> {
    fn drop(&mut self) {
        self.ends.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: the whole buffer's own implementation upholds the contract, and each byte belongs to one
// part only.
unsafe impl<B: OwnedBuffer + 'static> OwnedBuffer for Part<B> {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn range(parts: &Self) -> AddressRange {
        parts.range
    }

    fn iface(parts: &Self) -> hmem::IfaceKind {
        B::iface(&parts.memory)
    }

    fn read(parts: &Self, offset: u64, into: &mut [u8]) -> Result<()> {
        let first = parts.range.start().0 - B::range(&parts.memory).start().0;
        B::read(&parts.memory, first + offset, into)
    }

    fn write(parts: &Self, offset: u64, from: &[u8]) -> Result<()> {
        let first = parts.range.start().0 - B::range(&parts.memory).start().0;
        B::write(&parts.memory, first + offset, from)
    }
}

/// Splits a buffer into two halves. Returns them with a counter of dropped halves.
fn halves<B: OwnedBuffer>(buffer: B) -> ([Part<B>; 2], Arc<AtomicUsize>) {
    let (memory, ends) = (Arc::new(buffer.into_parts()), Arc::default());
    let whole = B::range(&memory);
    let half = whole.len() / 2;
    let parts = [0, half].map(|offset| Part {
        memory: Arc::clone(&memory),
        range: whole.slice(offset, half).expect("inside"),
        ends: Arc::clone(&ends),
    });
    (parts, ends)
}

/// MR-17, MR-18, CACHE-01
#[test]
fn parts_of_a_buffer_are_cached_without_unsafe() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(vec![0_u8; 8 * PAGE as usize]).expect("a buffer");
    buffer.write(PAGE, b"by the application").expect("inside");
    for _ in 0..3 {
        let region = buffer.get_or_register(PAGE, PAGE, REMOTE).expect("registered");
        let key = region.view().key().expect("a key");
        assert_eq!(net.pull(&key, 6).expect("read")[2..], *b" the");
        net.push(&key, b"BY").expect("write");
    }
    assert_eq!((cache.statistics().registrations, cache.statistics().hits), (1, 2));
    let mut bytes = [0; 6];
    buffer.read(PAGE, &mut bytes).expect("inside");
    assert_eq!(&bytes, b"BY the");
    let outside = buffer.get_or_register(7 * PAGE, PAGE + 1, READ).unwrap_err();
    assert_eq!(
        (outside.kind(), outside.operation()),
        (ErrorKind::OutOfBounds, "get_or_register"),
        "{outside}"
    );
    assert_eq!(buffer.get_or_register(0, 0, READ).unwrap_err().kind(), ErrorKind::ZeroLength);
    let busy = net.target.close().unwrap_err();
    assert_eq!(busy.error.kind(), ErrorKind::Busy, "the buffer is the domain's");
    let bytes = buffer.close().expect("no lease is left");
    assert_eq!((&bytes[PAGE as usize..][..6], busy.value.live().regions), (&b"BY the"[..], 0));
    let empty = busy.value.cache().expect("a cache").own(Vec::new()).unwrap_err();
    assert_eq!(empty.error.kind(), ErrorKind::ZeroLength);
}

/// MR-18
#[test]
fn a_cached_buffer_with_a_lease_or_sub_region_is_not_returned() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let shared = Arc::new(net.filled(4));
    let buffer = Arc::new(cache.own(Arc::clone(&shared)).expect("a buffer"));
    let region = buffer.get_or_register(0, PAGE, READ).expect("registered");
    let sub = region.sub(region.range(), READ, None).expect("all of it");
    drop(region);
    let key = sub.key().expect("a key");
    let buffer = Arc::into_inner(buffer).expect("the only reference");
    let busy = buffer.close().unwrap_err();
    assert_eq!((busy.error.kind(), busy.error.operation()), (ErrorKind::Busy, "close"));
    assert_eq!(net.pull(&key, 2).expect("the sub-region works"), [1; 2]);
    // The buffer still works after a failed close.
    let buffer = busy.value;
    drop(buffer.get_or_register(PAGE, PAGE, READ).expect("registered"));
    drop(sub);
    let back = buffer.close().expect("nothing depends on it any more");
    assert!(Arc::ptr_eq(&back, &shared) && net.regions() == 0);
}

/// MR-18
#[test]
fn close_of_a_cached_buffer_waits_for_a_lease_that_is_ending() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(vec![7_u8; PAGE as usize]).expect("a buffer");
    let range = buffer.range();
    let (sender, leased) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // SAFETY: the buffer keeps its memory until the region is deregistered.
            let lease = unsafe { cache.get_or_register(range, READ) }.expect("registered");
            sender.send(()).expect("the test waits");
            // The close invalidates the region before it waits.
            while !lease.lease().is_invalidated() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(5));
            drop(lease);
        });
        leased.recv().expect("a lease");
        assert_eq!(buffer.close().expect("the lease has ended")[0], 7);
    });
    assert_eq!(net.regions(), 0);
}

/// MR-18
#[test]
fn memory_of_a_dropped_cached_buffer_outlives_its_regions() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let ([first, second], ends) = halves(vec![5_u8; 2 * PAGE as usize]);
    drop(second);
    let buffer = cache.own(first).expect("a buffer");
    let region = buffer.get_or_register(0, PAGE, READ).expect("registered");
    let sub = region.sub(region.range(), READ, None).expect("all of it");
    drop(region);
    drop(buffer);
    cache.reclaim();
    assert_eq!(ends.load(Ordering::SeqCst), 1, "it is freed under the sub-region");
    assert_eq!(net.pull(&sub.key().expect("a key"), 4).expect("read"), [5; 4]);
    drop(sub);
    cache.reclaim();
    assert_eq!((ends.load(Ordering::SeqCst), net.regions()), (2, 0));
}

/// MR-18
#[test]
fn a_region_merged_of_two_buffers_keeps_both_allocated() {
    let net = Net::cached(CacheAttr::default().merge(true));
    let cache = net.target.cache().expect("a cache");
    let ([first, second], ends) = halves(vec![5_u8; 4 * PAGE as usize]);
    let (first, second) = (cache.own(first).expect("one"), cache.own(second).expect("another"));
    drop(first.get_or_register(0, 2 * PAGE, READ).expect("registered"));
    let merged = second.get_or_register(0, 2 * PAGE, READ).expect("registered");
    assert_eq!(merged.range().len(), 4 * PAGE, "the regions were not merged");
    drop(first);
    cache.reclaim();
    assert_eq!(ends.load(Ordering::SeqCst), 0, "half of a region was freed");
    assert_eq!(net.pull(&merged.key().expect("a key"), 4).expect("read"), [5; 4]);
    drop(merged);
    drop(second);
    cache.reclaim();
    assert_eq!((ends.load(Ordering::SeqCst), net.regions()), (2, 0));
}

/// MR-17, MR-18
#[test]
fn a_cached_buffer_never_grows_beyond_itself() {
    let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
    let cache = net.target.cache().expect("a cache");
    let ([first, second], _) = halves(net.filled(8));
    let range = first.range;
    let buffer = cache.own(first).expect("a buffer");
    let region = buffer.get_or_register(PAGE, 10, READ).expect("registered");
    assert_eq!(region.range(), range, "the buffer is half of its allocation");
    drop((region, second));
}

/// MR-18
#[test]
fn regions_cached_before_the_cache_owned_a_buffer_are_not_hit() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let bytes = vec![1_u8; PAGE as usize];
    // SAFETY: nothing refers into the memory while it is registered.
    drop(unsafe { cache.get_or_register(AddressRange::of(&bytes), READ) }.expect("registered"));
    let buffer = cache.own(bytes).expect("a buffer");
    drop(buffer.get_or_register(0, PAGE, READ).expect("registered"));
    assert_eq!(cache.statistics().registrations, 2);
}

/// MR-18
#[test]
fn uncached_regions_keep_their_buffer() {
    let net = Net::cached(CacheAttr::default().max_count(0));
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(vec![3_u8; PAGE as usize]).expect("a buffer");
    let region = buffer.get_or_register(0, PAGE, READ).expect("registered");
    assert!(region.lease().uncached_reason().is_some());
    let sub = region.sub(region.range(), READ, None).expect("all of it");
    drop(region);
    let busy = buffer.close().unwrap_err();
    assert_eq!(busy.error.kind(), ErrorKind::Busy);
    assert_eq!(net.pull(&sub.key().expect("a key"), 1).expect("read"), [3]);
}

/// CACHE-06, MR-17
#[test]
fn concurrent_misses_in_one_allocation_register_it_once() {
    let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(net.filled(8)).expect("a buffer");
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let buffer = &buffer;
            scope.spawn(move || {
                for page in 0..8 {
                    let offset = (page + thread) % 8 * PAGE;
                    let region = buffer.get_or_register(offset, PAGE, READ).expect("registered");
                    assert_eq!(region.view().range().len(), PAGE);
                }
            });
        }
    });
    assert_eq!((cache.statistics().registrations, net.regions()), (1, 1));
}
