//! Tests of `docs/rules.md`: each rule is broken once through the public calls and once, where safe
//! code reaches it, through the provider's facet. A refused request registers nothing, and the
//! memory comes back.
#![allow(unsafe_code)]

use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use hmem::{
    Access, Address, AddressRange, Addressing, AllocationKind, Batch, CacheAttr, DeviceBuffer,
    DeviceId, DmaBuf, DmaBufOffset, Domain, DomainAttr, Endpoint, Errno, Error, ErrorKind, Hmem,
    Iface, IfaceExt, Iova, LocalKey, MrFlags, MrMode, Parallel, Promise, Raw, RawKey, Rejected,
    RemoteKey, Request, Result, Type2Bind, Type2Kind,
    event_queue::EventQueue,
    fabric::{self, MrAttr},
    iface::{AllocRequest, DmaBufMapping},
    loopback::{Builder, Faults, Loopback, NicCall},
    provider::{EndpointAttr, Imports, ProviderRegion, WindowBind, WindowRule, WindowType},
    system::{SIMULATED, Simulated},
    transfer::{LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};

const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;
const PAGE: usize = 4096;

/// A library with a simulated device of two GPUs and a software NIC, and a domain of it.
struct World {
    hmem: Hmem,
    domain: Domain,
}

impl World {
    fn new() -> Self {
        Self::with(MrMode::empty(), |nic| nic)
    }

    fn with(mode: MrMode, nic: impl FnOnce(Builder) -> Builder) -> Self {
        let windows = [WindowType::One, WindowType::TwoA, WindowType::TwoB];
        let nic = nic(Loopback::builder().needs(mode).windows(windows).max_mr_size(1 << 20));
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .iface(Simulated::builder().devices(2).build().expect("a simulated device"))
            .provider(nic.build().expect("a software NIC"))
            .build()
            .expect("the ifaces start");
        let domain = Self::open(&hmem, mode);
        Self { hmem, domain }
    }

    fn open(hmem: &Hmem, mr_mode: MrMode) -> Domain {
        let cache = Some(CacheAttr::default());
        let attr = DomainAttr { mr_mode, cache, ..DomainAttr::default() };
        hmem.domain("loopback", attr).expect("a domain")
    }

    fn device(&self) -> &Arc<dyn Iface> {
        self.hmem.iface(SIMULATED).expect("it was added")
    }

    fn device_buffer(&self) -> DeviceBuffer {
        let kind = AllocationKind::Device;
        let request = AllocRequest { len: 2 * PAGE as u64, device: DeviceId(0), kind };
        DeviceBuffer::allocate(self.device(), &request).expect("device memory")
    }

    fn dma_buf(&self, of: &DeviceBuffer) -> DmaBuf {
        let nic = &self.domain.provider_attr().nic;
        let export =
            self.device().export_dma_buf(of.range(), nic, DmaBufMapping::Default).expect("exports");
        let fd: OwnedFd = export.as_fd().try_clone_to_owned().expect("a descriptor");
        DmaBuf { fd, offset: export.offset, len: export.len, base_addr: None }
    }

    /// Asserts that `call` fails with `kind`, and leaves no object behind.
    #[track_caller]
    fn refuses<T>(&self, kind: ErrorKind, call: impl FnOnce() -> Result<T>) -> Error {
        let before = self.domain.live();
        let Err(error) = call() else { panic!("a request that breaks a rule was accepted") };
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(self.domain.live(), before, "{error}");
        error
    }

    /// Asserts that a request for a page of memory is refused, and that the memory comes back.
    #[track_caller]
    fn refuses_page(
        &self,
        kind: ErrorKind,
        access: Access,
        change: impl FnOnce(Request<'_, Vec<u8>>) -> Request<'_, Vec<u8>>,
    ) {
        let request = change(Request::new(vec![7_u8; PAGE], access));
        self.refuses(kind, || match self.domain.submit(request) {
            Ok(region) => Ok(region),
            Err(Rejected { value, error }) => {
                assert_eq!(value, [7; PAGE]);
                Err(error)
            }
        });
    }

    fn endpoint(&self) -> Endpoint {
        let queue = self.domain.open_cq(8).expect("a queue");
        self.domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint")
    }

    fn handle(&self, local: LocalKey) -> ProviderRegion {
        ProviderRegion { token: local.to_provider(), local, key: 0 }
    }
}

/// Returns addresses that are never accessed, because each request with them is refused.
fn raw(range: AddressRange, promise: Promise) -> Raw {
    // SAFETY: the requests of the tests with this value are refused, or the memory is a buffer of
    // the test that only the NIC uses until the region is closed.
    unsafe { Raw::new(range, promise) }
}

fn pages(count: u64) -> AddressRange {
    AddressRange::new(Address(0x10_0000), count * PAGE as u64).expect("a range")
}

// Registrations.

/// MR-04
#[test]
fn flags_are_defined_supported_and_compatible() {
    let world =
        World::with(MrMode::empty(), |nic| nic.flags(MrFlags::all() - MrFlags::MR_SINGLE_USE));
    for flags in [
        MrFlags::from_bits_retain(1 << 63),
        MrFlags::MR_SINGLE_USE,
        MrFlags::HMEM_DEVICE_ONLY | MrFlags::HMEM_HOST_ALLOC,
    ] {
        world.refuses_page(ErrorKind::BadFlags, READ, |request| request.flags(flags));
    }
}

/// MR-04
#[test]
fn rights_are_defined() {
    let world = World::new();
    world.refuses_page(ErrorKind::BadAccess, Access::from_bits_retain(1 << 40), |request| request);
}

#[test]
fn memory_that_is_promised_for_reading_gets_no_right_to_write() {
    let world = World::new();
    let bytes: Arc<[u8]> = Arc::from([1; 64]);
    world.refuses(ErrorKind::AccessDenied, || {
        world.domain.register(Arc::clone(&bytes), WRITE).map_err(|Rejected { value, error }| {
            assert!(Arc::ptr_eq(&value, &bytes));
            error
        })
    });
    let memory = raw(AddressRange::of(&bytes), Promise::ReadOnly);
    world.refuses(ErrorKind::AccessDenied, || {
        fabric::reg(&world.domain, memory, Access::RECV, 1, MrFlags::empty())
    });
    let cache = world.domain.cache().expect("a cache");
    world.refuses(ErrorKind::AccessDenied, || cache.get(memory, WRITE).map(drop));
    let batch = Batch::on(&[&world.domain]).add(Request::new(memory, WRITE)).register();
    assert_eq!(batch.expect_err("too weak").error.kind(), ErrorKind::AccessDenied);
    // A part of the region has the promise of the whole.
    let whole = world.domain.register(memory, READ).expect("it only reads");
    world.refuses(ErrorKind::AccessDenied, || whole.sub(whole.range(), WRITE, None));
}

#[test]
fn parts_of_a_parallel_registration_have_a_page_or_more() {
    let parallel = Parallel { chunk: 100, ..Parallel::default() };
    World::new()
        .refuses_page(ErrorKind::InvalidArgument, READ, |request| request.parallel(parallel));
}

#[test]
fn provider_knows_the_extension() {
    World::new().refuses_page(ErrorKind::Unsupported, READ, |request| request.extension("mine"));
}

#[test]
fn dma_buf_flag_is_set_for_dma_bufs_only() {
    let world = World::new();
    let buffer = world.device_buffer();
    let dma_buf = world.dma_buf(&buffer);
    world.refuses_page(ErrorKind::InvalidArgument, READ, |request| {
        request.flags(MrFlags::MR_DMABUF)
    });
    // SAFETY: the request is refused.
    let memory = unsafe { Raw::new(dma_buf.borrow(), Promise::ReadWrite) };
    world.refuses(ErrorKind::InvalidArgument, || {
        fabric::regattr(&world.domain, &MrAttr::new(memory, READ), MrFlags::empty())
    });
}

#[test]
fn reserved_attributes_are_zero() {
    let world = World::new();
    let memory = raw(pages(1), Promise::ReadWrite);
    let attr = MrAttr::new(memory.as_slice(), READ);
    for (kind, attr) in [
        (ErrorKind::ReservedOffset, MrAttr { offset: 1, ..attr }),
        (ErrorKind::ReservedHmemData, MrAttr { hmem_data: 1, ..attr }),
    ] {
        world.refuses(kind, || fabric::regattr(&world.domain, &attr, MrFlags::empty()));
    }
}

/// Registers addresses by `fabric`, which is refused.
#[track_caller]
fn refuses_ranges(world: &World, kind: ErrorKind, ranges: &[AddressRange]) {
    // SAFETY: the request is refused.
    let memory = unsafe { Raw::new(ranges, Promise::ReadWrite) };
    world.refuses(kind, || fabric::regv(&world.domain, memory, READ, 1, MrFlags::empty()));
}

/// MR-04
#[test]
fn memory_has_a_byte() {
    let world = World::new();
    world.refuses(ErrorKind::ZeroLength, || Ok(world.domain.register(Vec::new(), READ)?));
    let empty = pages(0);
    refuses_ranges(&world, ErrorKind::ZeroLength, &[]);
    refuses_ranges(&world, ErrorKind::ZeroLength, &[pages(1), empty]);
    let cache = world.domain.cache().expect("a cache");
    world.refuses(ErrorKind::ZeroLength, || {
        cache.get(raw(empty, Promise::ReadWrite), READ).map(drop)
    });
    let buffer = world.device_buffer();
    let dma_buf = DmaBuf { len: 0, ..world.dma_buf(&buffer) };
    world.refuses(ErrorKind::ZeroLength, || register_dma_buf(&world, dma_buf));
}

/// MR-03
#[test]
fn region_has_at_most_as_many_ranges_as_the_nic_allows() {
    let world = World::with(MrMode::empty(), |nic| nic.mr_iov_limit(2));
    refuses_ranges(&world, ErrorKind::TooManyRanges, &[pages(1); 3]);
}

#[test]
fn region_is_at_most_as_long_as_the_nic_allows() {
    let world = World::new();
    world.refuses(ErrorKind::TooLong, || {
        Ok(world.domain.register(vec![0_u8; (1 << 20) + 1], READ)?)
    });
    refuses_ranges(&world, ErrorKind::TooLong, &[pages(255), pages(2)]);
    let unlimited = World::with(MrMode::empty(), |nic| nic.max_mr_size(u64::MAX));
    let half = AddressRange::new(Address(0), 1 << 63).expect("half of the address space");
    refuses_ranges(&unlimited, ErrorKind::TooLong, &[half, half]);
}

fn register_dma_buf(world: &World, dma_buf: DmaBuf) -> Result<()> {
    // SAFETY: the request is refused.
    let memory = unsafe { Raw::new(dma_buf, Promise::ReadWrite) };
    let request = Request::new(memory, READ).owner(SIMULATED, None);
    Ok(world.domain.submit(request).map(drop)?)
}

#[test]
fn dma_buf_ends_in_the_address_space() {
    let world = World::new();
    let buffer = world.device_buffer();
    for (base, offset) in [(u64::MAX, 1), (u64::MAX - 1, 0)] {
        let base_addr = Some(Address(base));
        let offset = DmaBufOffset(offset);
        let dma_buf = DmaBuf { offset, base_addr, ..world.dma_buf(&buffer) };
        world.refuses(ErrorKind::AddressWraps, || register_dma_buf(&world, dma_buf));
    }
}

#[test]
fn ranges_of_a_region_have_one_owner() {
    let world = World::new();
    let (host, buffer) = (vec![0_u8; PAGE], world.device_buffer());
    let ranges = [AddressRange::of(&host), buffer.range()];
    refuses_ranges(&world, ErrorKind::InvalidArgument, &ranges);
    let kind = AllocationKind::Device;
    let request = AllocRequest { len: PAGE as u64, device: DeviceId(1), kind };
    let other = DeviceBuffer::allocate(world.device(), &request).expect("device memory");
    refuses_ranges(&world, ErrorKind::InvalidArgument, &[buffer.range(), other.range()]);
}

#[test]
fn nic_imports_the_memory() {
    let world = World::with(MrMode::empty(), |nic| nic.imports(Imports::default()));
    let buffer = world.device_buffer();
    let dma_buf = world.dma_buf(&buffer);
    let error = world.refuses(ErrorKind::Unsupported, || register_dma_buf(&world, dma_buf));
    assert!(error.to_string().contains("imports no dma-bufs"), "{error}");
    world.refuses(ErrorKind::Unsupported, || Ok(world.domain.register(buffer, READ)?));
}

#[test]
fn key_is_unused_and_fits_the_nic() {
    let world = World::with(MrMode::empty(), |nic| nic.key_size(4));
    world.refuses_page(ErrorKind::KeyRejected, READ, |request| request.key(1 << 32));
    let request = Request::new(vec![0_u8; PAGE], READ).key(5);
    let _first = world.domain.submit(request).expect("the key is free");
    world.refuses_page(ErrorKind::NoKey, READ, |request| request.key(5));
    let window = world.domain.alloc_type_1_window().expect("a window");
    let region = world.domain.register(vec![0_u8; 64], READ | Access::MW_BIND).expect("registers");
    let key = window.bind(&region, 0, 64, READ).expect("binds").as_u64().expect("one number");
    world.refuses_page(ErrorKind::NoKey, READ, |request| request.key(key));
}

#[test]
fn nic_has_room_for_the_region() {
    let world = World::with(MrMode::empty(), |nic| nic.max_mr_count(1));
    let _first = world.domain.register(vec![0_u8; 64], READ).expect("registers");
    world.refuses_page(ErrorKind::OutOfResources, READ, |request| request);
}

// Sub-regions.

#[test]
fn base_of_a_part_is_registered() {
    let faults = Faults::new();
    let world = World::with(MrMode::empty(), |nic| nic.faults(&faults));
    let queue = Arc::new(EventQueue::new());
    world.domain.bind(&queue, hmem::DomainBindFlags::REG_MR).expect("binds");
    faults.fail_nth(NicCall::Register, 1, Errno(12));
    let region = world.domain.register(vec![0_u8; PAGE], READ).expect("pending");
    while queue.read().is_none() {
        std::thread::yield_now();
    }
    world.refuses(ErrorKind::BadState, || region.sub(region.range(), READ, None));
}

#[test]
fn part_lets_the_nic_write_only_if_its_region_does() {
    let world = World::new();
    let region = world.domain.register(vec![0_u8; PAGE], READ).expect("registers");
    for access in [WRITE, Access::READ, Access::RECV] {
        let error =
            world.refuses(ErrorKind::AccessDenied, || region.sub(region.range(), access, None));
        assert_eq!(error.operation(), "sub");
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("RECV")), "{error}");
    }
}

// Windows.

/// The rights of a region to which windows with every right can be bound.
const WINDOWED: Access = READ.union(WRITE).union(Access::MW_BIND);

#[track_caller]
fn assert_rule(error: &Error, rule: WindowRule) {
    assert_eq!(error.context_value("rule"), Some(rule.name()), "{error}");
}

#[test]
fn window_is_bound_within_the_rights_and_bytes_of_its_region() {
    let world = World::new();
    let window = world.domain.alloc_type_1_window().expect("a window");
    let type_2 = world.domain.alloc_type_2_window(Type2Kind::B).expect("a window");
    let endpoint = world.endpoint();
    let facet = world.domain.provider_domain().windows().expect("the facet");
    let free = facet.alloc_window(WindowType::One).expect("a window");
    let other = World::open(&world.hmem, MrMode::empty());
    let region = |domain: &Domain, access| domain.register(vec![0_u8; 64], access).expect("fits");
    let all = region(&world.domain, WINDOWED);
    let reads = region(&world.domain, READ | Access::MW_BIND);
    let plain = region(&world.domain, READ);
    let foreign = region(&other, WINDOWED);
    for (kind, rule, region, part, access, in_facet) in [
        (ErrorKind::OutOfBounds, WindowRule::InsideRegion, &all, (60, 5), READ, true),
        (ErrorKind::AccessDenied, WindowRule::RegionAllowsWindows, &plain, (0, 8), READ, true),
        (ErrorKind::AccessDenied, WindowRule::WritesNeedLocalWrite, &reads, (0, 8), WRITE, true),
        (ErrorKind::BadAccess, WindowRule::RemoteRightsOnly, &all, (0, 8), Access::SEND, false),
        (ErrorKind::InvalidArgument, WindowRule::SameDomain, &foreign, (0, 8), READ, false),
    ] {
        let (offset, len) = part;
        assert_rule(&world.refuses(kind, || window.bind(region, offset, len, access)), rule);
        let addressing = Addressing::Virtual;
        let bind = Type2Bind { region, offset, len, access, addressing, tag: 1 };
        assert_rule(&world.refuses(kind, || type_2.post_bind(&endpoint, &bind, 1)), rule);
        if in_facet {
            let handle = world.handle(region.desc().expect("a descriptor"));
            let bind = WindowBind { region: handle, offset, len, access, addressing };
            assert_rule(&world.refuses(kind, || facet.bind_window(free, &bind)), rule);
        }
    }
    facet.free_window(free).expect("frees");
}

#[test]
fn windows_facet_keeps_the_states_of_a_window() {
    let world = World::new();
    let region = world.domain.register(vec![0_u8; 64], WINDOWED).expect("registers");
    let facet = world.domain.provider_domain().windows().expect("the facet");
    let endpoint = world.endpoint();
    let one = facet.alloc_window(WindowType::One).expect("a window");
    let two = facet.alloc_window(WindowType::TwoB).expect("a window");
    let bind = WindowBind {
        region: world.handle(region.desc().expect("a descriptor")),
        offset: 0,
        len: 8,
        access: READ,
        addressing: Addressing::Virtual,
    };
    let nothing = WindowBind { len: 0, ..bind };
    let zero_based = WindowBind { addressing: Addressing::ZeroBased, ..bind };
    for (rule, window, bind) in [
        (WindowRule::UnbindsWhenBound, one, nothing),
        (WindowRule::Type1IsVirtual, one, zero_based),
        (WindowRule::BoundByItsVerb, two, bind),
    ] {
        let before = world.domain.live();
        assert_rule(&facet.bind_window(window, &bind).expect_err("a rule is broken"), rule);
        assert_eq!(world.domain.live(), before);
    }
    for window in [one, two] {
        facet.free_window(window).expect("frees");
        assert_rule(&facet.free_window(window).expect_err("freed twice"), WindowRule::Allocated);
        assert_rule(&facet.bind_window(window, &bind).expect_err("freed"), WindowRule::Allocated);
    }
    drop(endpoint);
}

#[test]
fn window_and_endpoint_are_of_one_domain() {
    let world = World::new();
    let other = World::open(&world.hmem, MrMode::empty());
    let queue = other.open_cq(8).expect("a queue");
    let endpoint = other.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let region = world.domain.register(vec![0_u8; 64], WINDOWED).expect("registers");
    let window = world.domain.alloc_type_2_window(Type2Kind::A).expect("a window");
    let (access, addressing) = (READ, Addressing::Virtual);
    let bind = Type2Bind { region: &region, offset: 0, len: 8, access, addressing, tag: 1 };
    for error in [
        world.refuses(ErrorKind::InvalidArgument, || window.post_bind(&endpoint, &bind, 1)),
        world.refuses(ErrorKind::InvalidArgument, || window.post_invalidate(&endpoint, 1)),
        world.refuses(ErrorKind::InvalidArgument, || region.grant(&endpoint, 0..8, READ)),
    ] {
        assert_rule(&error, WindowRule::SameDomain);
    }
    assert!(window.key().is_none());
}

// Keys and transfers.

#[test]
fn raw_key_is_whole_and_mapped_once() {
    let world = World::with(MrMode::RAW, |nic| nic);
    let region = world.domain.register(vec![0_u8; 64], READ).expect("registers");
    let key = region.raw_key().expect("a raw key");
    let cut = RawKey(key.0[1..].to_vec());
    world.refuses(ErrorKind::Malformed, || world.domain.map_raw(Iova(0), 64, &cut));
    let facet = world.domain.provider_domain().raw_keys().expect("the facet");
    let virtual_addresses = Addressing::Virtual;
    world.refuses(ErrorKind::Malformed, || facet.map_raw(Iova(0), 64, virtual_addresses, &cut));
    let mapped = world.domain.map_raw(Iova(0), 64, &key).expect("maps");
    // A peer's key that was not mapped may have the same number.
    let number = mapped.as_u64().expect("one number");
    let other = RemoteKey::new(virtual_addresses, Iova(0), 64, number);
    world.refuses(ErrorKind::InvalidKey, || world.domain.unmap_key(&other));
    world.domain.unmap_key(&mapped).expect("unmaps");
    world.refuses(ErrorKind::InvalidKey, || world.domain.unmap_key(&mapped));
    world.refuses(ErrorKind::InvalidKey, || facet.unmap_key(&mapped));
    let none = ProviderRegion { token: 7, ..world.handle(region.desc().expect("a descriptor")) };
    world.refuses(ErrorKind::NoRegion, || facet.raw_key(none));
}

#[test]
fn slice_lies_in_its_region() {
    let world = World::new();
    let region = world.domain.register(vec![0_u8; 64], Access::SEND).expect("registers");
    world.refuses(ErrorKind::OutOfBounds, || region.slice(60, 5));
    world.refuses(ErrorKind::OutOfBounds, || region.slice(u64::MAX, 2));
}

#[test]
fn transfer_names_live_descriptors_and_equal_lengths() {
    let world = World::new();
    let (endpoint, region) =
        (world.endpoint(), world.domain.register(vec![0_u8; 64], Access::all()).expect("fits"));
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let key = region.key().expect("a key");
    let remote = |len, key| RemoteSegment { address: Iova(0), len, key };
    let slice = region.slice(0, 8).expect("inside");
    for remote in [&[][..], &[remote(9, &key)]] {
        world.refuses(ErrorKind::InvalidArgument, || endpoint.write(&[slice], remote, peer, 1));
    }
    world.refuses(ErrorKind::InvalidArgument, || {
        endpoint.write(&[slice], &[remote(8, &key)], PeerId(!peer.0), 1)
    });
    let desc = region.desc().ok();
    let closed = LocalSegment { address: region.range().start(), len: 8, desc };
    let remote_key: RemoteKey = key.clone();
    region.close().expect("closes");
    let there = [remote(8, &remote_key)];
    let operation = Operation::Write { remote: &there };
    let request = WorkRequest { operation, local: &[closed], peer, context: 1 };
    // SAFETY: the segment has a descriptor, which the provider refuses.
    world.refuses(ErrorKind::NoRegion, || unsafe { endpoint.post(&request) });
}

// The page.

/// Returns the words in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns true if the Rust source declares `name` after `keyword`.
fn declares(source: &str, keyword: &str, name: &str) -> bool {
    let declaration = format!("{keyword} {name}");
    source.match_indices(&declaration).any(|(at, _)| {
        let next = source[at + declaration.len()..].chars().next();
        !next.is_some_and(|next| next.is_alphanumeric() || next == '_')
    })
}

/// Checks the names of one item of the page: error kinds, files, and the functions and tests in the
/// file that was named last. Returns the tests.
fn check_item<'a>(root: &Path, kinds: &str, item: &'a str, tests_of: &str) -> Vec<&'a str> {
    let (place, tests) = item.split_once("Tests:").unwrap_or_else(|| panic!("no tests: {item}"));
    let (mut named_kind, mut source, mut found) = (false, None, false);
    for name in quoted(place) {
        if name.ends_with(".rs") {
            let text = fs::read_to_string(root.join(name));
            source = Some(text.unwrap_or_else(|error| panic!("{name}: {error}")));
        } else if name.starts_with(char::is_uppercase) {
            named_kind = true;
            let is_kind = kinds.lines().any(|line| line.trim().starts_with(&format!("{name} = ")));
            assert!(is_kind, "{name} is not an error kind: {item}");
        } else {
            let source = source.as_deref().unwrap_or_else(|| panic!("no file: {item}"));
            assert!(declares(source, "fn", name), "no function {name}: {item}");
            found = true;
        }
    }
    assert!(named_kind && found, "an item names an error kind, a file and a function: {item}");
    let mut file = tests_of.to_owned();
    let mut here = Vec::new();
    for name in quoted(tests) {
        if name.ends_with(".rs") {
            file = fs::read_to_string(root.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            continue;
        }
        assert!(declares(&file, "fn", name), "no test {name}: {item}");
        here.push(name);
    }
    assert!(!here.is_empty(), "no test: {item}");
    here
}

#[test]
fn page_names_existing_places_and_all_tests_of_this_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
    let (page, here, kinds) =
        (read("docs/rules.md"), read("tests/domain/rules.rs"), read("core/src/error.rs"));
    let (_, rules) = page.split_once("\n## ").expect("a section");
    let items = rules.split("\n- ").skip(1).map(|item| item.split("\n\n").next().expect("an item"));
    let mut named = BTreeSet::new();
    for item in items {
        named.extend(check_item(root, &kinds, item, &here));
    }
    let tests = here.split("#[test]\nfn ").skip(1).filter_map(|test| test.split('(').next());
    let unnamed: Vec<_> =
        tests.filter(|test| !named.contains(test) && !test.starts_with("page_")).collect();
    assert!(unnamed.is_empty(), "docs/rules.md does not name {unnamed:?}");
}
