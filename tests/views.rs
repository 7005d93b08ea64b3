//! Tests of batches, which register many views (parts of a memory, with rights of their own) by one
//! call, and of caches that grow a registration beyond the requested range.
#![allow(unsafe_code)]

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use hmem::{
    Access, Address, AddressRange, AllocationKind, Batch, CacheAttr, DeviceBuffer, DeviceId,
    DmaBuf, Domain, DomainAttr, Endpoint, Errno, ErrorKind, Growth, Hmem, Iface, IfaceExt, Iova,
    Memory, MrMode, Path, Place, Promise, Raw, Regions, Rejected, RemoteKey, Request, Result,
    iface::{AllocRequest, DmaBufMapping},
    loopback::{Faults, Loopback, NicCall},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    system::{SIMULATED, Simulated},
    transfer::{EndpointName, RemoteSegment},
};

const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;
const REMOTE: Access = READ.union(WRITE);

/// Returns the page size of the machine.
fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

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
        let simulated =
            Simulated::builder().segment_len(2 * page_size()).build().expect("a device");
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
        faults.start_counting();
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
        let buffer = self.buffer(pages * page_size(), AllocationKind::Device);
        for page in 0..pages {
            buffer
                .write(page * page_size(), &vec![page as u8 + 1; page_size() as usize])
                .expect("inside");
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

    /// Registers the same views of each of some memories, with the target.
    fn register<M: Memory>(
        &self,
        memories: impl IntoIterator<Item = M>,
        views: &[View],
        growth: Growth,
    ) -> Result<Regions<M>, Rejected<Regions<M>>> {
        let nics = [&self.target];
        let batch = memories
            .into_iter()
            .fold(Batch::on(&nics), |batch, memory| batch.add_views(memory, views.iter().cloned()));
        batch.grow(growth).register()
    }

    /// Registers raw ranges with the target.
    fn register_raw(
        &self,
        ranges: &[Raw],
        access: Access,
        growth: Growth,
    ) -> Result<Regions<Raw>, Rejected<Regions<Raw>>> {
        let nics = [&self.target];
        let batch = ranges
            .iter()
            .fold(Batch::on(&nics), |batch, raw| batch.add(Request::new(*raw, access)));
        batch.grow(growth).register()
    }

    fn regions(&self) -> u64 {
        self.target.live().regions
    }

    fn registrations(&self) -> u64 {
        self.faults.calls(NicCall::Register)
    }
}

/// The bytes and the rights of a view.
type View = (Range<u64>, Access);

/// Returns a view for each page of a memory with `count` pages.
fn pages(count: u64, access: Access) -> Vec<View> {
    (0..count).map(|page| (page * page_size()..(page + 1) * page_size(), access)).collect()
}

/// Returns the keys of all views on the target.
fn keys<M: Memory>(registered: &Regions<M>) -> Vec<RemoteKey> {
    registered.views(0).map(|view| view.key().expect("a key")).collect()
}

/// Returns memory by its addresses.
///
/// # Safety
/// The caller upholds the contract of [`Raw::new`] for the whole allocation.
unsafe fn raw(range: AddressRange) -> Raw {
    // SAFETY: the caller makes the promise.
    unsafe { Raw::new(range, Promise::Allocation) }
}

/// MR-17
#[test]
fn views_of_an_allocation_share_a_registration_but_no_key() {
    let net = Net::open();
    let mut views = pages(8, REMOTE);
    views.reverse();
    let buffers: Vec<_> = (0..3).map(|_| net.filled(8)).collect();
    let registered = net.register(buffers, &views, Growth::Allocation).expect("registered");
    assert_eq!((registered.views(0).len(), registered.regions().len()), (24, 3));
    assert_eq!((net.regions(), net.registrations()), (3, 3));
    let keys = keys(&registered);
    let distinct: BTreeSet<_> =
        keys.iter().map(|key| (key.as_u64().expect("one"), key.base())).collect();
    assert_eq!(distinct.len(), 24, "no two views are the same range of the same key");
    for (index, key) in keys.iter().enumerate() {
        let view = registered.view(0, index / 8, index % 8).expect("there");
        assert_eq!((key.first_len(), view.access()), (page_size(), REMOTE));
        let byte = 8 - index as u8 % 8;
        assert_eq!(net.pull(key, page_size()).expect("read"), vec![byte; page_size() as usize]);
        let outside = key.slice(0, page_size() + 1).unwrap_err();
        assert_eq!(outside.kind(), ErrorKind::OutOfBounds, "{outside}");
    }
    for (nic, memory, view) in [(1, 0, 0), (0, 3, 0), (0, 0, 8), (0, 2, 8), (0, usize::MAX, 0)] {
        let missing = registered.view(nic, memory, view).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::OutOfBounds, "{missing}");
    }
    net.push(&keys[16], b"through the last page of the last").expect("write");
    let mut bytes = [0; 7];
    registered.read(2, 7 * page_size(), &mut bytes).expect("inside");
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
    let registered =
        net.register([net.filled(8)], &pages(8, REMOTE), Growth::None).expect("registered");
    assert_eq!((registered.regions().len(), net.registrations()), (8, 8));
    for (view, region) in registered.views(0).zip(registered.regions()) {
        assert_eq!(view.region().range(), view.range());
        assert_eq!(region.range().len(), page_size());
    }
    let numbers: BTreeSet<_> =
        keys(&registered).iter().map(|key| key.as_u64().expect("one")).collect();
    assert_eq!(numbers.len(), 8);
}

/// MR-17
#[test]
fn views_with_different_rights_never_share_a_registration() {
    let net = Net::open();
    let access = [READ, WRITE, REMOTE, READ, WRITE, REMOTE, Access::SEND, Access::empty()];
    let starts = (0..).step_by(page_size() as usize / 2);
    let views: Vec<_> =
        starts.zip(access).map(|(start, access)| (start..start + page_size(), access)).collect();
    let registered = net.register([net.filled(8)], &views, Growth::Allocation).expect("registered");
    assert_eq!(registered.regions().len(), 5, "one for each set of rights");
    for (view, access) in registered.views(0).zip(access) {
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
    for (max, growth) in
        [(u64::MAX, Growth::UpTo(3 * page_size())), (3 * page_size(), Growth::Allocation)]
    {
        let net = Net::with(max, MrMode::empty(), CacheAttr::default(), P2pPolicy::Required);
        let registered =
            net.register([net.filled(8)], &pages(8, REMOTE), growth).expect("registered");
        let lens: Vec<_> = registered.regions().iter().map(|region| region.range().len()).collect();
        assert_eq!(lens, [3 * page_size(), 3 * page_size(), 2 * page_size()]);
        for (index, key) in keys(&registered).iter().enumerate() {
            assert_eq!(net.pull(key, 1).expect("read"), [index as u8 + 1]);
        }
    }
}

/// MR-17
#[test]
fn a_registration_covers_the_smallest_range_of_its_views() {
    let net = Net::open();
    let views = [5 * page_size()..5 * page_size() + 10, 2 * page_size()..2 * page_size() + 100]
        .map(|part| (part, READ));
    let registered = net.register([net.filled(8)], &views, Growth::Allocation).expect("registered");
    let [region] = registered.regions() else { panic!("one registration") };
    assert_eq!(region.range().len(), 3 * page_size() + 10, "it reaches beyond its views");
}

/// MR-17
#[test]
fn overlapping_and_repeated_views_have_their_own_bytes() {
    let net = Net::open();
    let views = [(0, 3), (1, 1), (1, 4), (1, 1), (0, 8)]
        .map(|(page, pages)| (page * page_size()..(page + pages) * page_size(), READ));
    for (growth, regions) in [(Growth::Allocation, 1), (Growth::None, 5)] {
        let registered = net.register([net.filled(8)], &views, growth).expect("registered");
        assert_eq!(registered.regions().len(), regions);
        for (key, (part, _)) in keys(&registered).iter().zip(&views) {
            assert_eq!(key.first_len(), part.end - part.start);
            assert_eq!(net.pull(key, 1).expect("read"), [(part.start / page_size()) as u8 + 1]);
        }
    }
}

/// MR-17
#[test]
fn raw_memory_that_cannot_grow_is_registered_as_requested() {
    let net = Net::open();
    let host = vec![7_u8; 8 * page_size() as usize];
    let segments = net.buffer(8 * page_size(), AllocationKind::Virtual);
    let one_segment = net.buffer(2 * page_size(), AllocationKind::Virtual);
    let plain = net.buffer(8 * page_size(), AllocationKind::Device);
    let of = |range: AddressRange, count: u64| -> Vec<Raw> {
        let len = range.len() / count;
        // SAFETY: the memory outlives the regions, and nothing refers into it meanwhile.
        (0..count).map(|at| unsafe { raw(range.slice(at * len, len).expect("in")) }).collect()
    };
    for (name, range, regions) in [
        ("host memory", AddressRange::of(&host), 8),
        ("several segments", segments.allocation().range, 8),
        ("one segment", one_segment.allocation().range, 1),
        ("an allocation", plain.allocation().range, 1),
    ] {
        let views = net.register_raw(&of(range, 8), REMOTE, Growth::Allocation);
        let views = views.expect("registered");
        assert_eq!(views.regions().len(), regions, "{name}");
        assert_eq!(keys(&views).len(), 8);
        views.close().expect("nothing is bound to them");
    }
    drop(host);
}

/// MR-17
///
/// Raw ranges share a registration if the promise covers their allocation, and they keep no owner.
#[test]
fn raw_ranges_share_a_registration_only_by_promise() {
    let net = Net::open();
    let (buffer, other) = (net.filled(8), net.filled(1));
    let part = |page: u64| buffer.range().slice(page * page_size(), page_size()).expect("inside");
    let ranges = [part(6), other.range(), part(1)];
    // SAFETY: the buffers outlive the regions, and nothing refers into device memory.
    let shared = ranges.map(|range| unsafe { raw(range) });
    let registered = net.register_raw(&shared, READ, Growth::Allocation).expect("registered");
    let mut lens: Vec<_> = registered.regions().iter().map(|region| region.len()).collect();
    lens.sort_unstable();
    assert_eq!(
        (lens, net.regions()),
        (vec![page_size(), 6 * page_size()], 2),
        "pages 1 to 6 are one region"
    );
    for (key, byte) in keys(&registered).iter().zip([7, 1, 2]) {
        assert_eq!(net.pull(key, page_size()).expect("read"), vec![byte; page_size() as usize]);
    }
    let back = registered.close().expect("nothing is bound to them");
    assert_eq!(back.iter().map(|raw| *raw.at()).collect::<Vec<_>>(), ranges);
    // A region keeps the owner of one memory only.
    let nics = [&net.target];
    let kept = shared
        .iter()
        .fold(Batch::on(&nics), |batch, raw| batch.add(Request::new(raw.keep(Arc::new(())), READ)))
        .grow(Growth::Allocation)
        .register();
    assert_eq!(kept.expect("registered").regions().len(), 3);
}

/// MR-17
#[test]
fn request_with_a_setting_of_its_own_shares_no_registration() {
    let net = Net::open();
    let buffer = net.filled(2);
    let halves = [0, 1].map(|page| buffer.range().slice(page * page_size(), page_size()));
    // SAFETY: the buffer outlives the regions, and nothing refers into device memory.
    let [first, second] = halves.map(|half| unsafe { raw(half.expect("inside")) });
    let registered = Batch::on(&[&net.target])
        .add(Request::new(first, READ).key(7))
        .add(Request::new(second, READ))
        .grow(Growth::Allocation)
        .register()
        .expect("registered");
    assert_eq!(registered.regions().len(), 2);
    assert_eq!(keys(&registered)[0].as_u64().expect("one number"), 7);
}

/// MR-17
#[test]
fn growth_around_memory_that_is_promised_alone_is_refused() {
    for promise in [Promise::ReadWrite, Promise::ReadOnly] {
        let net = Net::open();
        let buffer = net.filled(8);
        let page =
            |page: u64| buffer.range().slice(page * page_size(), page_size()).expect("inside");
        // SAFETY: the buffer outlives the regions, and nothing refers into device memory.
        let pages = [1, 3].map(|at| unsafe { Raw::new(page(at), promise) });
        for growth in [Growth::Allocation, Growth::UpTo(2 * page_size())] {
            let Rejected { value, error } = net.register_raw(&pages, READ, growth).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_eq!((error.context_value("view"), net.registrations()), (Some("0"), 0));
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("Allocation")));
            assert_eq!(value.close().expect("nothing is registered").len(), 2);
        }
        let alone = net.register_raw(&pages, READ, Growth::None).expect("registered");
        assert_eq!(alone.regions().len(), 2);
        drop(alone);
        // Views of one memory may share a registration inside it.
        // SAFETY: the buffer outlives the regions, and nothing refers into device memory.
        let half = buffer
            .range()
            .slice(0, 4 * page_size())
            .map(|range| unsafe { Raw::new(range, promise) });
        let views =
            [(page_size()..page_size() + 8, READ), (3 * page_size()..3 * page_size() + 8, READ)];
        let registered = net.register(half, &views, Growth::Allocation).expect("registered");
        let [region] = registered.regions() else { panic!("one registration") };
        assert_eq!(region.len(), 2 * page_size() + 8);
        drop(registered);
    }
}

/// MR-13, MR-17
#[test]
fn views_of_a_dma_buf_reach_their_part_of_it() {
    let net = Net::open();
    let buffer = net.filled(8);
    let nic = &net.target.provider_attr().nic;
    // Not the start of the exported memory.
    let exported = buffer.range().slice(2 * page_size(), 4 * page_size()).expect("inside");
    let export = net.device.export_dma_buf(exported, nic, DmaBufMapping::Default).expect("export");
    let base_addr = Some(Address(0x7000_0000_0000));
    let fd = export.fd.try_clone().expect("a descriptor");
    let memory = DmaBuf { fd, offset: export.offset, len: export.len, base_addr };
    // SAFETY: the buffer outlives the regions, and nothing refers into device memory.
    let memory = unsafe { Raw::new(memory, Promise::ReadWrite) };
    let parts = [
        page_size() + 100..2 * page_size(),
        0..4 * page_size(),
        4 * page_size() - 1..4 * page_size(),
    ];
    let views = parts.clone().map(|part| (part, REMOTE));
    let registered = net.register([memory], &views, Growth::Allocation).expect("registered");
    assert_eq!((registered.regions().len(), net.regions()), (3, 3), "a dma-buf has no addresses");
    for (index, part) in parts.iter().enumerate() {
        let view = registered.view(0, 0, index).expect("there");
        let start = Address(0x7000_0000_0000 + export.offset.0 + part.start);
        assert_eq!(view.range(), AddressRange::new(start, part.end - part.start).expect("a range"));
        let key = view.key().expect("a key");
        let mut expected = vec![0; view.range().len() as usize];
        buffer.read(2 * page_size() + part.start, &mut expected).expect("inside");
        assert_eq!(net.pull(&key, view.range().len()).expect("read"), expected, "{part:?}");
        net.push(&key, &[0xF0 + index as u8]).expect("write");
        let mut first = [0];
        buffer.read(2 * page_size() + part.start, &mut first).expect("inside");
        assert_eq!(first, [0xF0 + index as u8], "{part:?}");
        assert!(net.pull(&key, view.range().len() + 1).is_err(), "{part:?}");
    }
    let [memory] = registered.close().expect("nothing is bound").try_into().expect("one");
    assert_eq!((memory.at().offset, memory.at().len), (export.offset, 4 * page_size()));
    let refused =
        net.register([memory], &[(page_size()..4 * page_size() + 1, REMOTE)], Growth::None);
    let Rejected { value, error } = refused.unwrap_err();
    assert_eq!((error.kind(), net.regions()), (ErrorKind::OutOfBounds, 0), "{error}");
    assert_eq!(value.close().expect("nothing is registered").len(), 1);
    net.device.release_dma_buf(export).expect("release");
}

/// MR-17
#[test]
fn host_buffers_grow_only_to_the_whole_buffer() {
    let net = Net::open();
    let buffers = vec![vec![1_u8; 8 * page_size() as usize], vec![2; 8 * page_size() as usize]];
    let registered =
        net.register(buffers, &pages(8, READ), Growth::Allocation).expect("registered");
    assert_eq!(registered.regions().len(), 2);
    let keys = keys(&registered);
    assert_eq!(net.pull(&keys[3], 4).expect("read"), [1; 4]);
    assert_eq!(net.pull(&keys[12], 4).expect("read"), [2; 4]);
    assert_eq!(registered.close().expect("closed")[1], vec![2; 8 * page_size() as usize]);
}

/// MR-17
#[test]
fn views_register_alone_if_their_joint_registration_fails() {
    for policy in [P2pPolicy::Required, P2pPolicy::Enabled] {
        let net = Net::with(u64::MAX, MrMode::empty(), CacheAttr::default(), policy);
        // The NIC refuses the dma-buf of the grown range. Staged copies may replace it.
        net.faults.fail_nth(NicCall::Register, 1, Errno(12));
        let registered = net
            .register([net.filled(4)], &pages(4, READ), Growth::Allocation)
            .expect("each view can be registered");
        assert_eq!((registered.regions().len(), net.regions()), (4, 4), "{policy}");
        for (index, view) in registered.views(0).enumerate() {
            let path = view.region().decision().expect("registered").path;
            assert_eq!(path, Path::DmaBuf, "growth made it worse");
            let bytes = net.pull(&view.key().expect("a key"), page_size()).expect("read");
            assert_eq!(bytes, vec![index as u8 + 1; page_size() as usize]);
        }
    }
}

/// MR-17
///
/// Host memory has no known allocation, so the views of such a memory that share a registration may
/// have different owners.
#[test]
fn views_of_one_memory_may_have_different_owners() {
    let device = Arc::new(Simulated::builder().build().expect("a device"));
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(&device) as _)
        .provider(Loopback::builder().build().expect("a software NIC"))
        .build()
        .expect("the ifaces start");
    let domain = hmem.domain("loopback", DomainAttr::default()).expect("a domain");
    let addresses = device.reserve(2 * page_size()).expect("reserve");
    let last = addresses.slice(page_size(), page_size()).expect("inside");
    // The first page counts as host memory, because the device has mapped nothing there.
    let allocation = device.map(last, DeviceId(0)).expect("map");
    // SAFETY: nothing accesses the memory, which is unmapped after the regions are closed.
    let memory = unsafe { Raw::new(addresses, Promise::ReadWrite) };
    let registered =
        Batch::on(&[&domain]).add_views(memory, pages(2, READ)).grow(Growth::Allocation).register();
    let registered = registered.expect("each view can be registered");
    let paths: Vec<_> = registered
        .views(0)
        .map(|view| view.region().decision().expect("registered").path)
        .collect();
    assert_eq!(paths, [Path::PlainHost, Path::DmaBuf]);
    registered.close().expect("nothing is bound to them");
    // SAFETY: nothing uses the memory any more.
    unsafe { device.free(&allocation) }.expect("unmap");
}

/// MR-17
#[test]
fn failed_batch_closes_regions_and_returns_buffers() {
    let net = Net::open();
    for failing in 1..=6 {
        let buffers = vec![net.filled(2), net.filled(2), net.filled(2)];
        net.faults.fail_nth(NicCall::Register, failing, Errno(12));
        let refused = net.register(buffers, &pages(2, READ), Growth::None).unwrap_err();
        let error = &refused.error;
        assert_eq!((error.kind(), net.regions()), (ErrorKind::OutOfResources, 0), "{error}");
        assert_eq!(error.context_value("registered before"), Some(&*(failing - 1).to_string()));
        assert!(refused.value.views(0).len() == 0 && refused.value.regions().is_empty());
        let buffers = refused.value.close().expect("nothing is registered");
        let mut byte = [0];
        buffers[2].read(page_size(), &mut byte).expect("the buffer is whole");
        assert_eq!((buffers.len(), byte), (3, [2]));
    }
    // The grown registration fails. Each view then registers alone, and one of these registrations
    // fails too.
    net.faults.clear();
    for failing in [1, 3] {
        net.faults.fail_nth(NicCall::Register, failing, Errno(12));
    }
    let refused = net.register([net.filled(4)], &pages(4, READ), Growth::Allocation).unwrap_err();
    assert_eq!((refused.error.context_value("view"), net.regions()), (Some("1"), 0));
}

/// MR-17
#[test]
fn failed_close_returns_the_region_with_the_error() {
    let net = Net::open();
    net.faults.fail_nth(NicCall::Register, 3, Errno(12));
    net.faults.fail_nth(NicCall::Deregister, 1, Errno(5));
    let refused = net.register([net.filled(3)], &pages(3, READ), Growth::None).unwrap_err();
    assert_eq!(refused.error.context_value("left registered"), Some("1"), "{refused}");
    assert_eq!((refused.value.regions().len(), net.regions()), (1, 1));
    assert_eq!(refused.value.close().expect("the fault is over").len(), 1);
    assert_eq!(net.regions(), 0);
}

/// MR-17
#[test]
fn wrong_views_are_refused_by_name_before_registration() {
    let net = Net::open();
    let unknown = Access::from_bits_retain(1 << 40);
    for (part, access, kind) in [
        (page_size()..2 * page_size() + 1, READ, ErrorKind::OutOfBounds),
        (u64::MAX..u64::MAX, READ, ErrorKind::OutOfBounds),
        (1..u64::MAX, READ, ErrorKind::OutOfBounds),
        (Range { start: 2, end: 1 }, READ, ErrorKind::OutOfBounds),
        (5..5, READ, ErrorKind::ZeroLength),
        (0..page_size(), unknown, ErrorKind::BadAccess),
    ] {
        for growth in [Growth::None, Growth::Allocation] {
            let views = [(0..page_size(), READ), (part.clone(), access)];
            let refused = net.register([net.filled(2)], &views, growth).unwrap_err();
            let error = &refused.error;
            assert_eq!((error.kind(), error.operation()), (kind, "register batch"), "{error}");
            assert_eq!(error.context_value("view"), Some("1"), "{error}");
            assert_eq!((net.regions(), net.registrations()), (0, 0), "{part:?}");
        }
    }
    let wraps = AddressRange::new(Address(u64::MAX - 10), 100).unwrap_err();
    assert_eq!(wraps.kind(), ErrorKind::AddressWraps);
    // A view that exceeds its allocation.
    let buffer = net.filled(2);
    let range = buffer.allocation().range;
    let beyond = AddressRange::new(range.start(), 3 * page_size()).expect("no wrap");
    // SAFETY: the registration is refused.
    let views = [range, beyond].map(|range| unsafe { raw(range) });
    let refused = net.register_raw(&views, READ, Growth::Allocation).unwrap_err();
    assert_eq!((refused.error.kind(), net.regions()), (ErrorKind::OutOfBounds, 0), "{refused}");
}

/// MR-17
#[test]
fn an_empty_list_of_views_registers_nothing() {
    let net = Net::open();
    let registered = net.register([net.filled(1)], &[], Growth::Allocation).expect("nothing");
    assert!(registered.views(0).len() == 0 && registered.regions().is_empty());
    assert_eq!((registered.close().expect("nothing to close").len(), net.regions()), (1, 0));
    let empty = net.register_raw(&[], READ, Growth::None).expect("nothing");
    assert_eq!(empty.views(0).len(), 0);
}

/// MR-17
#[test]
fn views_of_memory_that_was_freed_are_refused() {
    let mode = MrMode::ALLOCATED | MrMode::VIRT_ADDR;
    let net = Net::with(u64::MAX, mode, CacheAttr::default(), P2pPolicy::Required);
    let (live, freed) = (net.filled(2), net.filled(2));
    // SAFETY: only the live buffer could be registered, and nothing refers into it.
    let views = [&live, &freed].map(|buffer| unsafe { raw(buffer.range()) });
    drop(freed);
    for growth in [Growth::None, Growth::Allocation] {
        let refused = net.register_raw(&views, READ, growth).unwrap_err();
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
    let parts = |range: &AddressRange| {
        [0, page_size()].map(|at| range.slice(at, page_size()).expect("inside"))
    };
    // SAFETY: nothing refers into the memory, and freed memory is not registered then.
    let views: Vec<_> = views.iter().flat_map(parts).map(|part| unsafe { raw(part) }).collect();
    let (live, freed) = if live.allocation().range == kept { (live, freed) } else { (freed, live) };
    let gate = net.faults.hold(NicCall::Register);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| net.register_raw(&views, READ, Growth::Allocation).unwrap_err());
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
    let registered =
        net.register([net.filled(4)], &pages(4, READ), Growth::Allocation).expect("registered");
    let view = registered.view(0, 0, 2).expect("there");
    let sub = view.region().sub(view.range(), READ, None).expect("part of the region");
    let key = sub.key().expect("a key");
    assert_eq!(net.pull(&key, 3).expect("read"), [3; 3]);
    let local = net.initiator.register(vec![0_u8; 2 * page_size() as usize], Access::READ);
    let local = local.expect("a buffer");
    let peer = net.endpoint.resolve(&net.name).expect("the target");
    for (offset, len) in [(0, page_size() + 1), (page_size(), 1)] {
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
        .register([net.filled(4)], &pages(4, Access::SEND), Growth::Allocation)
        .expect("registered");
    let view = registered.view(0, 0, 1).expect("there");
    assert!(view.slice(0, page_size()).is_ok() && view.desc().is_ok());
    for (offset, len) in
        [(0, page_size() + 1), (1, page_size()), (page_size() + 1, 0), (u64::MAX, 2)]
    {
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
        let part = range.slice(page * page_size(), page_size()).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = cache.get(unsafe { raw(part) }, READ).expect("registered");
        assert_eq!((region.range(), region.view().range()), (range, part));
        let key = region.view().key().expect("a key");
        assert_eq!(key.first_len(), page_size(), "the key is of what was looked up");
        assert_eq!(
            net.pull(&key, page_size()).expect("read"),
            vec![page as u8 + 1; page_size() as usize]
        );
        assert_eq!(region.slice(0, page_size() + 1).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    assert_eq!((cache.statistics().registrations, cache.statistics().hits), (1, 7));
    // Other rights need another registration, which has only these rights. SAFETY: nothing refers
    // into the memory, and it outlives its registration.
    let writable = cache.get(unsafe { raw(range.slice(0, 1).expect("in")) }, WRITE);
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
        let owned = net.buffer(8 * page_size(), AllocationKind::Device);
        let opened = imported.then(|| {
            let handle = net.device.ipc_export(owned.allocation()).expect("a handle");
            net.device.ipc_open(&handle).expect("opens")
        });
        let allocation = opened.unwrap_or(*owned.allocation());
        assert_eq!(allocation.kind, kind);
        let part = allocation.range.slice(page_size(), 100).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = cache.get(unsafe { raw(part) }, READ).expect("registered");
        let expected = if imported { part } else { allocation.range };
        assert_eq!(region.range(), expected, "{kind:?}");
        let views =
            [1, 5].map(|page| allocation.range.slice(page * page_size(), 100).expect("inside"));
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let views = views.map(|range| unsafe { raw(range) });
        let registered = net.register_raw(&views, READ, Growth::Allocation);
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
        let buffer = net.buffer(8 * page_size(), kind);
        let part = buffer.allocation().range.slice(offset, 100).expect("inside");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let region = cache.get(unsafe { raw(part) }, READ).expect("registered");
        let len = region.range().len();
        drop(region);
        cache.evict_idle();
        len
    };
    let device = AllocationKind::Device;
    let whole = || CacheAttr::default().growth(Growth::Allocation);
    assert_eq!(grown(CacheAttr::default(), device, 0), 100, "growth is opt-in");
    assert_eq!(grown(whole(), device, 0), 8 * page_size());
    assert_eq!(grown(whole(), AllocationKind::Virtual, 0), 100, "several segments");
    assert_eq!(
        grown(whole().max_bytes(4 * page_size()), device, 0),
        4 * page_size(),
        "the cache's bytes"
    );
    assert_eq!(grown(whole().max_count(0), device, 0), 100, "the cache is off");
    let up_to = || CacheAttr::default().growth(Growth::UpTo(3 * page_size()));
    assert_eq!(grown(up_to(), device, 7 * page_size()), 2 * page_size(), "the last block");
    assert_eq!(grown(up_to(), device, 3 * page_size() - 50), 100, "in two blocks");
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
        net.faults.fail_nth(NicCall::Register, 1, Errno(22));
        for page in 0..3 {
            let part = buffer.allocation().range.slice(page * page_size(), 10).expect("inside");
            // SAFETY: nothing refers into the memory, and it outlives its registration.
            let region = cache.get(unsafe { raw(part) }, READ).expect("its own range");
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
fn misses_until_growth<B: Memory>(net: &Net, buffer: B, refusal: i32) -> Option<u64> {
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(buffer).expect("a buffer");
    net.faults.fail_nth(NicCall::Register, 1, Errno(refusal));
    (0..1000).find(|miss| {
        let region = buffer.get(miss * 16, 8, READ).expect("registered");
        region.range().len() > 8
    })
}

/// MR-17
#[test]
fn a_refused_growth_is_retried_only_after_many_misses() {
    let net = Net::cached(CacheAttr::default().growth(Growth::Allocation));
    let host = || vec![0_u8; 8 * page_size() as usize];
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
struct Part<B: Memory> {
    memory: Arc<B::Parts>,
    range: AddressRange,
    ends: Arc<AtomicUsize>,
}

impl<B: Memory> Drop for Part<B> {
    fn drop(&mut self) {
        self.ends.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: the whole buffer's own implementation upholds the contract, and each byte belongs to one
// part only.
unsafe impl<B: Memory + 'static> Memory for Part<B> {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn place(parts: &Self) -> Place<'_> {
        let range = parts.range;
        match B::place(&parts.memory) {
            Place::Host { writable, .. } => Place::Host { range, writable },
            Place::Device { iface, .. } => Place::Device { iface, range },
            other => unreachable!("halves of {other:?}"),
        }
    }
}

/// Splits a buffer into two halves. Returns them with a counter of dropped halves.
fn halves<B: Memory>(buffer: B) -> ([Part<B>; 2], Arc<AtomicUsize>) {
    let (memory, ends) = (Arc::new(buffer.into_parts()), Arc::default());
    let (Place::Host { range: whole, .. } | Place::Device { range: whole, .. }) = B::place(&memory)
    else {
        unreachable!("halves of memory without an owner")
    };
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
    let buffer = cache.own(vec![0_u8; 8 * page_size() as usize]).expect("a buffer");
    buffer.write(page_size(), b"by the application").expect("inside");
    for _ in 0..3 {
        let region = buffer.get(page_size(), page_size(), REMOTE).expect("registered");
        let key = region.view().key().expect("a key");
        assert_eq!(net.pull(&key, 6).expect("read")[2..], *b" the");
        net.push(&key, b"BY").expect("write");
    }
    assert_eq!((cache.statistics().registrations, cache.statistics().hits), (1, 2));
    let mut bytes = [0; 6];
    buffer.read(page_size(), &mut bytes).expect("inside");
    assert_eq!(&bytes, b"BY the");
    let outside = buffer.get(7 * page_size(), page_size() + 1, READ).unwrap_err();
    assert_eq!((outside.kind(), outside.operation()), (ErrorKind::OutOfBounds, "get"), "{outside}");
    assert_eq!(buffer.get(0, 0, READ).unwrap_err().kind(), ErrorKind::ZeroLength);
    let busy = net.target.close().unwrap_err();
    assert_eq!(busy.error.kind(), ErrorKind::Busy, "the buffer is the domain's");
    let bytes = buffer.close().expect("no lease is left");
    assert_eq!(
        (&bytes[page_size() as usize..][..6], busy.value.live().regions),
        (&b"BY the"[..], 0)
    );
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
    let region = buffer.get(0, page_size(), READ).expect("registered");
    let sub = region.sub(region.range(), READ, None).expect("all of it");
    drop(region);
    let key = sub.key().expect("a key");
    let buffer = Arc::into_inner(buffer).expect("the only reference");
    let busy = buffer.close().unwrap_err();
    assert_eq!((busy.error.kind(), busy.error.operation()), (ErrorKind::Busy, "close"));
    assert_eq!(net.pull(&key, 2).expect("the sub-region works"), [1; 2]);
    // The buffer still works after a failed close.
    let buffer = busy.value;
    drop(buffer.get(page_size(), page_size(), READ).expect("registered"));
    drop(sub);
    let back = buffer.close().expect("nothing depends on it any more");
    assert!(Arc::ptr_eq(&back, &shared) && net.regions() == 0);
}

/// MR-18
#[test]
fn close_of_a_cached_buffer_waits_for_a_lease_that_is_ending() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(vec![7_u8; page_size() as usize]).expect("a buffer");
    let range = buffer.range();
    let (sender, leased) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // SAFETY: the buffer keeps its memory until the region is deregistered.
            let lease = cache.get(unsafe { raw(range) }, READ).expect("registered");
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
    let ([first, second], ends) = halves(vec![5_u8; 2 * page_size() as usize]);
    drop(second);
    let buffer = cache.own(first).expect("a buffer");
    let region = buffer.get(0, page_size(), READ).expect("registered");
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

/// SUB-01
#[test]
fn part_of_a_later_range_reaches_its_own_bytes() {
    let net = Net::open();
    let page = page_size();
    let buffer = net.filled(4);
    let ranges = [0, 2].map(|at| buffer.range().slice(at * page, page).expect("inside"));
    let access = READ | Access::MW_BIND;
    // SAFETY: the buffer outlives the region, and nothing refers to its bytes.
    let memory = unsafe { Raw::new(Box::from(ranges), Promise::ReadWrite) };
    let region = net.target.register(memory, access).expect("registered");
    let sub = region.sub(ranges[1], READ, None).expect("a range");
    assert_eq!(net.pull(&sub.key().expect("a key"), 4).expect("read"), [3; 4]);
    let window = net.target.alloc_type_1_window().expect("a window");
    let key = window.bind(&region, page, page, READ).expect("bound");
    assert_eq!(key.base(), Iova(ranges[1].start().0));
    assert_eq!(net.pull(&key, 4).expect("read"), [3; 4]);
    drop(window);
    drop(sub);
}

/// Host memory that the cache gets more memory from when it is freed.
struct Reentrant {
    bytes: Vec<u8>,
    net: Arc<Net>,
    ended: mpsc::Sender<bool>,
}

impl Drop for Reentrant {
    fn drop(&mut self) {
        let owned = self.net.target.cache().expect("a cache").own(vec![1_u8; 64]);
        self.ended.send(owned.is_ok()).expect("the test waits");
    }
}

// SAFETY: the bytes stay allocated, at one address, as long as the value, which gives no access to
// them.
unsafe impl Memory for Reentrant {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn place(parts: &Self) -> Place<'_> {
        Place::Host { range: AddressRange::of(&parts.bytes), writable: false }
    }
}

/// MR-18
#[test]
fn memory_of_a_cached_buffer_may_use_the_cache_when_it_is_freed() {
    let net = Arc::new(Net::cached(CacheAttr::default()));
    let cache = net.target.cache().expect("a cache");
    let (ended, end) = mpsc::channel();
    let bytes = vec![1_u8; page_size() as usize];
    let memory = Reentrant { bytes, net: Arc::clone(&net), ended };
    let range = AddressRange::of(&memory.bytes);
    let buffer = cache.own(memory).expect("a buffer");
    // SAFETY: the region keeps the buffer's memory allocated.
    let lease = cache.get(unsafe { raw(range) }, READ).expect("registered");
    drop(buffer);
    drop(lease);
    let ended = end.recv_timeout(Duration::from_secs(60));
    if ended.is_err() {
        // The thread of the cache holds a lock, so the cache cannot be dropped.
        std::mem::forget(Arc::clone(&net));
    }
    assert_eq!(ended, Ok(true));
}

/// MR-18
#[test]
fn a_region_merged_of_two_buffers_keeps_both_allocated() {
    let net = Net::cached(CacheAttr::default().merge(true));
    let cache = net.target.cache().expect("a cache");
    let ([first, second], ends) = halves(vec![5_u8; 4 * page_size() as usize]);
    let (first, second) = (cache.own(first).expect("one"), cache.own(second).expect("another"));
    drop(first.get(0, 2 * page_size(), READ).expect("registered"));
    let merged = second.get(0, 2 * page_size(), READ).expect("registered");
    assert_eq!(merged.range().len(), 4 * page_size(), "the regions were not merged");
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
    let region = buffer.get(page_size(), 10, READ).expect("registered");
    assert_eq!(region.range(), range, "the buffer is half of its allocation");
    drop((region, second));
}

/// MR-18
#[test]
fn regions_cached_before_the_cache_owned_a_buffer_are_not_hit() {
    let net = Net::cached(CacheAttr::default());
    let cache = net.target.cache().expect("a cache");
    let bytes = vec![1_u8; page_size() as usize];
    // SAFETY: nothing refers into the memory while it is registered.
    drop(cache.get(unsafe { raw(AddressRange::of(&bytes)) }, READ).expect("registered"));
    let buffer = cache.own(bytes).expect("a buffer");
    drop(buffer.get(0, page_size(), READ).expect("registered"));
    assert_eq!(cache.statistics().registrations, 2);
}

/// MR-18
#[test]
fn uncached_regions_keep_their_buffer() {
    let net = Net::cached(CacheAttr::default().max_count(0));
    let cache = net.target.cache().expect("a cache");
    let buffer = cache.own(vec![3_u8; page_size() as usize]).expect("a buffer");
    let region = buffer.get(0, page_size(), READ).expect("registered");
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
                    let offset = (page + thread) % 8 * page_size();
                    let region = buffer.get(offset, page_size(), READ).expect("registered");
                    assert_eq!(region.view().range().len(), page_size());
                }
            });
        }
    });
    assert_eq!((cache.statistics().registrations, net.regions()), (1, 1));
}
