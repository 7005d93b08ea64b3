//! Registration in a domain of a fake libfabric, for behaviour that no provider has on a machine
//! without a NIC: endpoint binding, raw keys, device memory, dma-bufs and failing calls.

mod device;

use std::{
    any::Any,
    collections::VecDeque,
    ffi::{c_int, c_void},
    fs::File,
    mem,
    os::fd::{AsFd, BorrowedFd},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use device::Device;
use hmem_core::{
    Access, Address, AddressRange, AllocationKind, AuthKey, DeviceId, DmaBufOffset, Domain,
    DomainAttr, ErrorKind, Iface, IfaceExt, IfaceKind, Iova, MrFlags, MrMode, Promise, Raw, RawKey,
    Registry, Request, Result,
    iface::{AllocRequest, DmaBufMapping},
    provider::{Backing, Piece, Provider, Registration},
    registration::RegisteredMemory,
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::{DefaultPathSelector, ExplainRequest};
use hmem_provider_libfabric::{Builder, FabricDomain, FabricMr, Libfabric, Settings, sys};

/// One call of the fake library.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Register { flags: u64, iface: c_int, device: u64, key: u64, auth_key: Vec<u8>, access: u64 },
    DmaBuf { fd: c_int, offset: u64, len: usize, base: u64 },
    Bind { endpoint: usize },
    Enable,
    Close,
}

/// State of a fake domain. The `context` of its objects points to it.
#[derive(Debug, Default)]
struct State {
    calls: Mutex<Vec<Call>>,
    /// Results of the next calls of `fi_mr_regattr`. Calls without an entry succeed.
    register: Mutex<VecDeque<c_int>>,
    /// Results of the next calls of `fi_close`.
    close: Mutex<VecDeque<c_int>>,
    /// Results of the next calls of `fi_mr_enable`.
    enable: Mutex<VecDeque<c_int>>,
    /// Results of the next calls of `fi_mr_unmap_key`.
    unmap: Mutex<VecDeque<c_int>>,
    live: AtomicUsize,
    inside: AtomicUsize,
    overlapped: AtomicBool,
}

impl State {
    fn take(&self) -> Vec<Call> {
        mem::take(&mut *self.calls.lock().expect("no panic"))
    }

    fn note(&self, call: Call) {
        self.calls.lock().expect("no panic").push(call);
    }
}

fn next(results: &Mutex<VecDeque<c_int>>) -> c_int {
    results.lock().expect("no panic").pop_front().unwrap_or(0)
}

/// Returns the state of an object.
///
/// # Safety
/// `object` is an object of the fake library.
unsafe fn state<'a>(object: *mut sys::fid) -> &'a State {
    // SAFETY: the tests keep the state until all objects are closed.
    unsafe { &*(*object).context.cast::<State>() }
}

unsafe extern "C" fn regattr(
    domain: *mut sys::fid,
    attr: *const sys::fi_mr_attr,
    flags: u64,
    out: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: the provider passes the fake domain and attributes that are valid during the call.
    unsafe {
        let (state, attr) = (state(domain), &*attr);
        if state.inside.fetch_add(1, Ordering::SeqCst) > 0 {
            state.overlapped.store(true, Ordering::SeqCst);
        }
        thread::sleep(Duration::from_micros(200));
        state.inside.fetch_sub(1, Ordering::SeqCst);
        let auth_key = match attr.auth_key_size {
            0 => Vec::new(),
            len => std::slice::from_raw_parts(attr.auth_key, len).to_vec(),
        };
        let sys::fi_mr_attr { iface, device, requested_key: key, access, .. } = *attr;
        assert_eq!(attr.iov_count, 1);
        if flags & sys::FI_MR_DMABUF != 0 {
            let sys::fi_mr_dmabuf { fd, offset, len, base_addr } =
                attr.mr_iov.cast::<sys::fi_mr_dmabuf>().read();
            state.note(Call::DmaBuf { fd, offset, len, base: base_addr.addr() as u64 });
        }
        state.note(Call::Register { flags, iface, device, key, auth_key, access });
        match next(&state.register) {
            0 => {}
            refusal => return refusal,
        }
        state.live.fetch_add(1, Ordering::SeqCst);
        let fid = sys::fid { fclass: 12, context: (*domain).context, ops: &raw const MR_OPS };
        let mem_desc = ptr::without_provenance_mut(0xde5c);
        out.write(Box::into_raw(Box::new(sys::fid_mr { fid, mem_desc, key })));
        0
    }
}

unsafe extern "C" fn close(object: *mut sys::fid) -> c_int {
    // SAFETY: the provider passes a region that `regattr` created and that is open.
    unsafe {
        let state = state(object);
        state.note(Call::Close);
        match next(&state.close) {
            0 => {}
            refusal => return refusal,
        }
        state.live.fetch_sub(1, Ordering::SeqCst);
        drop(Box::from_raw(object.cast::<sys::fid_mr>()));
        0
    }
}

unsafe extern "C" fn bind(object: *mut sys::fid, endpoint: *mut sys::fid, flags: u64) -> c_int {
    assert_eq!(flags, 0);
    // SAFETY: the provider passes an open region.
    unsafe { state(object) }.note(Call::Bind { endpoint: endpoint.addr() });
    0
}

unsafe extern "C" fn control(
    object: *mut sys::fid,
    command: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the provider passes an open object, and the argument of the command.
    unsafe {
        match command {
            sys::FI_ENABLE => {
                state(object).note(Call::Enable);
                next(&state(object).enable)
            }
            sys::FI_GET_RAW_MR => {
                let attr = &*argument.cast::<sys::fi_mr_raw_attr>();
                assert_eq!(*attr.key_size, 12, "the size in the fi_info");
                attr.raw_key.copy_from(b"raw key".as_ptr(), 7);
                *attr.key_size = 7;
                0
            }
            sys::FI_MAP_RAW_MR => {
                let map = &*argument.cast::<sys::fi_mr_map_raw>();
                let raw = std::slice::from_raw_parts(map.raw_key, map.key_size);
                if raw != b"raw key" {
                    return -22;
                }
                *map.key = map.base_addr + 1;
                0
            }
            sys::FI_UNMAP_KEY => next(&state(object).unmap),
            _ => -38,
        }
    }
}

static MR_OPS: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
};

extern "C" fn version() -> u32 {
    sys::version(2, 1)
}

extern "C" fn unused() {}

fn functions() -> sys::Functions {
    // SAFETY: the functions have the signatures of their names. `unused` is never called.
    let functions = unsafe {
        sys::Functions::from_lookup(|name| {
            Some(match name {
                "fi_version" => version as *const (),
                _ => unused as *const (),
            })
        })
    };
    functions.expect("all functions")
}

/// A fake domain with its `fi_info`.
struct Fake {
    state: Box<State>,
    domain: Box<sys::fid_domain>,
    tables: Box<(sys::fi_ops_mr, sys::fi_domain_attr, sys::fi_fabric_attr)>,
    info: Box<sys::fi_info>,
    api_version: u32,
}

impl Fake {
    /// Creates a domain with `FI_THREAD_SAFE` and no mode bits. `adjust` changes its description.
    fn new(adjust: impl FnOnce(&mut sys::fi_info, &mut sys::fi_domain_attr)) -> Self {
        let state = Box::<State>::default();
        let context = (&raw const *state).cast_mut().cast();
        // SAFETY: all zeros is a valid value of these plain structures.
        let (mut info, mut attr, mut fabric): (
            sys::fi_info,
            sys::fi_domain_attr,
            sys::fi_fabric_attr,
        ) = unsafe { (mem::zeroed(), mem::zeroed(), mem::zeroed()) };
        fabric.prov_name = c"cxi".as_ptr().cast_mut();
        attr.name = c"cxi0".as_ptr().cast_mut();
        attr.threading = sys::FI_THREAD_SAFE;
        attr.mr_key_size = 8;
        adjust(&mut info, &mut attr);
        let none = ptr::null();
        let mr = sys::fi_ops_mr { size: 0, reg: none, regv: none, regattr: Some(regattr) };
        let mut tables = Box::new((mr, attr, fabric));
        (info.domain_attr, info.fabric_attr) = (&raw mut tables.1, &raw mut tables.2);
        let fid = sys::fid { fclass: sys::FI_CLASS_DOMAIN, context, ops: &raw const MR_OPS };
        let domain = Box::new(sys::fid_domain { fid, ops: ptr::null(), mr: &raw const tables.0 });
        let (info, api_version) = (Box::new(info), sys::version(1, 20));
        Self { state, domain, tables, info, api_version }
    }

    fn mode(mr_mode: c_int) -> Self {
        Self::new(|_, attr| attr.mr_mode = mr_mode)
    }

    fn provider(&mut self, builder: Builder) -> Libfabric {
        let (domain, info) = (&raw mut *self.domain, &raw const *self.info);
        // SAFETY: each test keeps the fake domain until everything is closed.
        let provider = unsafe {
            let builder = builder.functions(functions());
            builder.with_domain(domain.cast(), info.cast(), self.api_version, ())
        };
        provider.expect("borrow the domain")
    }

    fn open(&mut self, builder: Builder) -> Domain {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("host memory");
        let mr_mode = DomainAttr::default().mr_mode | MrMode::RAW | MrMode::RMA_EVENT;
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        let paths = Arc::new(DefaultPathSelector::new());
        Domain::open(&self.provider(builder), Arc::new(registry), paths, attr).expect("open")
    }

    fn domain(&mut self) -> Domain {
        self.open(Libfabric::builder())
    }

    fn live(&self) -> usize {
        self.state.live.load(Ordering::SeqCst)
    }
}

fn buffer() -> Vec<u8> {
    vec![0; 64]
}

/// FAB-11
#[test]
fn region_is_bound_and_enabled_in_endpoint_mode() {
    let mut fake = Fake::mode(sys::FI_MR_ENDPOINT | sys::FI_MR_PROV_KEY);
    let refused = fake.domain().register(buffer(), Access::REMOTE_READ).expect_err("no endpoint");
    assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument, "{}", refused.error);
    assert_eq!(fake.state.take(), [], "nothing was registered");

    let pointer = ptr::without_provenance_mut::<c_void>;
    // SAFETY: the fake does not use the endpoints.
    let (builder, settings) =
        unsafe { (Libfabric::builder().endpoint(pointer(16)), Settings::endpoint(pointer(32))) };
    let domain = fake.open(builder);
    assert!(!domain.mr_mode().contains(MrMode::ENDPOINT), "the application does not see the mode");
    drop(domain.register(buffer(), Access::REMOTE_READ).expect("register"));
    let calls = fake.state.take();
    assert_eq!(calls[1..], [Call::Bind { endpoint: 16 }, Call::Enable, Call::Close]);
    let request = Request::new(buffer(), Access::REMOTE_READ).extension(settings);
    drop(domain.submit(request).expect("register"));
    assert_eq!(fake.state.take()[1], Call::Bind { endpoint: 32 });

    // A region that cannot be enabled is closed again.
    fake.state.enable.lock().expect("no panic").push_back(-12);
    let refused = domain.register(buffer(), Access::REMOTE_READ).expect_err("not enabled");
    assert_eq!(refused.error.kind(), ErrorKind::OutOfResources, "{}", refused.error);
    assert_eq!((fake.live(), domain.live().regions), (0, 0));
}

/// FAB-11
#[test]
fn region_with_counter_is_enabled_by_the_application() {
    let mut fake = Fake::new(|info, attr| {
        (info.caps, attr.mr_mode) = (sys::FI_RMA_EVENT, sys::FI_MR_RMA_EVENT);
    });
    let domain = fake.domain();
    let request = Request::new(buffer(), Access::REMOTE_WRITE).flags(MrFlags::RMA_EVENT);
    let region = domain.submit(request).expect("register");
    let calls = fake.state.take();
    assert!(matches!(&calls[..], [Call::Register { flags: sys::FI_RMA_EVENT, .. }]), "{calls:?}");
    region.enable().expect("enable");
    assert_eq!(fake.state.take(), [Call::Enable]);
    let region = domain.register(buffer(), Access::REMOTE_WRITE).expect("register");
    drop(region);
    assert!(!fake.state.take().contains(&Call::Enable), "usable at once");
}

/// FAB-11
#[test]
fn region_stays_registered_if_libfabric_refuses_to_close_it() {
    let mut fake = Fake::mode(0);
    let domain = fake.domain();
    let region = domain.register(buffer(), Access::REMOTE_READ).expect("register");
    fake.state.close.lock().expect("no panic").push_back(-16);
    let rejected = region.close().expect_err("in use");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy, "{}", rejected.error);
    assert_eq!((fake.live(), domain.live().regions), (1, 1));
    rejected.value.close().expect("close");
    assert_eq!((fake.live(), domain.live().regions), (0, 0));
}

/// FAB-11
#[test]
fn failed_range_closes_the_ranges_before_it() {
    let mut fake = Fake::mode(0);
    let domain = fake.domain();
    let memory = vec![0_u8; 4096];
    let ranges = [AddressRange::of(&memory[..8]), AddressRange::of(&memory[64..72])];
    // SAFETY: the memory outlives the region, and nothing accesses it.
    let raw = unsafe { Raw::new(Box::from(ranges), Promise::ReadOnly) };
    *fake.state.register.lock().expect("no panic") = [0, -14].into();
    let refused = domain.register(raw.clone(), Access::REMOTE_READ).expect_err("the second range");
    assert_eq!(refused.error.kind(), ErrorKind::BadAddress, "{}", refused.error);
    assert_eq!(fake.live(), 0);
    let refused = domain.submit(Request::new(raw, Access::REMOTE_READ).key(5));
    let error = refused.expect_err("one key for two ranges").error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// FAB-11: the provider's numbers stay below the size of keys, and avoid those of the program.
#[test]
fn taken_key_of_the_providers_choice_is_replaced() {
    let mut fake = Fake::new(|_, attr| attr.mr_key_size = 4);
    let domain = fake.domain();
    *fake.state.register.lock().expect("no panic") = [-sys::FI_ENOKEY, -sys::FI_ENOKEY].into();
    let region = domain.register(buffer(), Access::REMOTE_READ).expect("the third key");
    let mut keys: Vec<u64> = (fake.state.take().iter())
        .map(|call| match call {
            Call::Register { key, .. } => *key,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(FabricMr::of(&region).expect("keys").key(), keys.last().copied());
    assert!(keys.iter().all(|key| *key <= u64::from(u32::MAX)), "{keys:x?}");
    keys.dedup();
    assert_eq!(keys.len(), 3, "each attempt has another key: {keys:x?}");
    *fake.state.register.lock().expect("no panic") = [-sys::FI_ENOKEY; 100].into();
    let refused = domain.register(buffer(), Access::REMOTE_READ).expect_err("no key is free").error;
    assert_eq!(refused.kind(), ErrorKind::NoKey, "{refused}");
}

/// FAB-11
#[test]
fn rights_and_settings_that_libfabric_ignores_are_refused() {
    let mut plain = Fake::mode(0);
    let mut atomics = Fake::new(|info, _| info.caps = sys::FI_ATOMIC);
    let mut keyed = Fake::new(|_, attr| attr.auth_key_size = 2);
    let refused = |fake: &mut Fake, request: Request<'_, Vec<u8>>| {
        let error = fake.domain().submit(request).expect_err("refused").error;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.remedy_text().is_some() && fake.state.take().is_empty(), "{error}");
    };
    let auth_key = AuthKey(vec![7, 7]);
    refused(&mut atomics, Request::new(buffer(), Access::REMOTE_RMA_WRITE));
    refused(&mut atomics, Request::new(buffer(), Access::REMOTE_ATOMIC));
    refused(&mut plain, Request::new(buffer(), Access::REMOTE_ATOMIC));
    refused(&mut plain, Request::new(buffer(), Access::MW_BIND));
    refused(&mut plain, Request::new(buffer(), Access::READ).auth_key(&auth_key));

    let registered = |fake: &mut Fake, request: Request<'_, Vec<u8>>| {
        drop(fake.domain().submit(request).expect("register"));
        fake.state.take().remove(0)
    };
    let call = registered(&mut plain, Request::new(buffer(), Access::REMOTE_RMA_WRITE));
    assert!(matches!(call, Call::Register { access: sys::FI_REMOTE_WRITE, .. }), "{call:?}");
    let both = Access::REMOTE_RMA_WRITE | Access::REMOTE_ATOMIC;
    let call = registered(&mut atomics, Request::new(buffer(), both));
    assert!(matches!(call, Call::Register { access: sys::FI_REMOTE_WRITE, .. }), "{call:?}");
    let call = registered(&mut keyed, Request::new(buffer(), Access::READ).auth_key(&auth_key));
    assert!(matches!(&call, Call::Register { auth_key, .. } if auth_key == &[7, 7]), "{call:?}");
}

/// FAB-11
#[test]
fn raw_keys_are_those_of_libfabric() {
    let mut fake = Fake::new(|_, attr| (attr.mr_mode, attr.mr_key_size) = (sys::FI_MR_RAW, 12));
    let domain = fake.domain();
    let region = domain.register(buffer(), Access::REMOTE_READ).expect("register");
    let raw = FabricMr::of(&region).expect("keys").raw_key().expect("a raw key");
    assert_eq!(raw, RawKey(b"raw key".to_vec()));
    let key = domain.map_raw(Iova(40), 64, &raw).expect("map");
    assert_eq!((key.as_u64().expect("one number"), domain.live().mapped_keys), (41, 1));
    let again = domain.map_raw(Iova(40), 64, &raw).expect("map to the same key");
    assert_eq!(domain.live().mapped_keys, 2);
    domain.unmap_key(&again).expect("unmap one of them");
    fake.state.unmap.lock().expect("no panic").push_back(-sys::FI_ENOMEM);
    let refused = domain.unmap_key(&key).expect_err("refused");
    assert_eq!(refused.os_errno().map(|code| code.0), Some(sys::FI_ENOMEM), "{refused}");
    assert_eq!(domain.live().mapped_keys, 1, "a refused key stays mapped");
    domain.unmap_key(&key).expect("unmap");
    assert_eq!(domain.unmap_key(&key).expect_err("twice").kind(), ErrorKind::InvalidKey);
    let malformed = RawKey(b"nothing".to_vec());
    assert!(domain.map_raw(Iova(0), 64, &malformed).is_err());
    assert_eq!(domain.live().mapped_keys, 0);

    let mut fake = Fake::mode(0);
    let region = fake.domain().register(buffer(), Access::REMOTE_READ).expect("register");
    let error = FabricMr::of(&region).expect("keys").raw_key().expect_err("no raw keys");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Registers a page of the second device as `backing` of the iface says, with the provider's own
/// call. Returns the calls of libfabric, and the address of the page.
fn register_device(
    fake: &mut Fake,
    kind: IfaceKind,
    backing: for<'a> fn(&'a Arc<dyn Iface>, Address, BorrowedFd<'a>) -> Backing<'a>,
) -> (Result<Vec<Call>>, u64) {
    let simulated = Simulated::builder().devices(2).build().expect("a simulated device");
    let request = AllocRequest { len: 4096, device: DeviceId(1), kind: AllocationKind::Device };
    let memory = simulated.allocate(&request).expect("allocate");
    let range = memory.range;
    let iface: Arc<dyn Iface> = Arc::new(Device(kind, simulated));
    let allocations = [iface.query(range.start()).expect("query").expect("allocated")];
    let file = File::open("/dev/null").expect("a file");
    let (ranges, no_key) = ([range], AuthKey::default());
    let memory = RegisteredMemory::Device { iface: &iface, allocations: &allocations, owned: true };
    let request = Registration::new(&ranges, Access::REMOTE_READ, &no_key);
    let request = Registration { memory, ..request };
    let piece = Piece { range, backing: backing(&iface, range.start(), file.as_fd()) };
    let domain = fake.domain();
    let provider = domain.provider_domain();
    // SAFETY: the fake library does not access the memory.
    let registered = unsafe { provider.register(&request, &[piece]) };
    let calls = registered.map(|region| {
        provider.deregister(region).expect("deregister");
        fake.state.take()
    });
    (calls, range.start().0)
}

fn peer_memory<'a>(iface: &'a Arc<dyn Iface>, address: Address, _: BorrowedFd<'a>) -> Backing<'a> {
    Backing::PeerMemory { iface, address }
}

fn dma_buf<'a>(_: &'a Arc<dyn Iface>, _: Address, fd: BorrowedFd<'a>) -> Backing<'a> {
    Backing::DmaBuf {
        fd,
        offset: DmaBufOffset(8192),
        mapping: DmaBufMapping::Default,
        revocation: None,
    }
}

/// FAB-11
#[test]
fn device_memory_is_registered_as_dma_buf_or_by_iface_and_device() {
    let mut fake = Fake::new(|info, _| info.caps = sys::FI_HMEM);
    let (calls, start) = register_device(&mut fake, IfaceKind::CUDA, dma_buf);
    let calls = calls.expect("register");
    let [
        Call::DmaBuf { fd, offset: 8192, len: 4096, base },
        Call::Register { flags: sys::FI_MR_DMABUF, iface: 1, device: 1, .. },
        Call::Close,
    ] = calls[..]
    else {
        panic!("{calls:?}")
    };
    assert!(fd >= 0 && base + 8192 == start, "{calls:?}");
    let (calls, _) = register_device(&mut fake, IfaceKind::CUDA, peer_memory);
    let calls = calls.expect("register");
    assert!(
        matches!(calls[..], [Call::Register { flags: 0, iface: 1, device: 1, .. }, Call::Close]),
        "{calls:?}"
    );
    *fake.state.register.lock().expect("no panic") = [-38].into();
    let error = register_device(&mut fake, IfaceKind::CUDA, peer_memory).0.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::NoSys, "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("built for")), "{error}");
}

/// FAB-11: libfabric uses the number of an iface as an index, without a check.
#[test]
fn iface_that_libfabric_does_not_know_is_registered_as_dma_buf_only() {
    let mut fake = Fake::new(|info, _| info.caps = sys::FI_HMEM);
    let plug_in = IfaceKind(0x123);
    let calls = register_device(&mut fake, plug_in, dma_buf).0.expect("register");
    assert!(matches!(calls[1], Call::Register { iface: 0, device: 0, .. }), "{calls:?}");
    let error = register_device(&mut fake, plug_in, peer_memory).0.expect_err("no number");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(fake.state.take(), []);
}

/// FAB-11
#[test]
fn paths_to_device_memory_follow_capabilities_api_version_and_provider() {
    let imports = |fake: &mut Fake, builder| {
        let nics = fake.provider(builder).nics().expect("one NIC");
        let flags = nics[0].flags.contains(MrFlags::MR_DMABUF);
        assert_eq!(flags, nics[0].imports.dma_buf);
        (nics[0].imports.dma_buf, nics[0].imports.peer_memory)
    };
    let hmem = || Fake::new(|info, _| info.caps = sys::FI_HMEM);
    assert_eq!(imports(&mut hmem(), Libfabric::builder()), (true, true));
    assert_eq!(imports(&mut hmem(), Libfabric::builder().dma_buf(false)), (false, true));
    assert_eq!(imports(&mut Fake::mode(0), Libfabric::builder()), (false, false));
    let mut old = Fake { api_version: sys::version(1, 19), ..hmem() };
    assert_eq!(imports(&mut old, Libfabric::builder().dma_buf(true)), (false, true));
    let mut software = hmem();
    software.tables.2.prov_name = c"shm".as_ptr().cast_mut();
    assert_eq!(imports(&mut software, Libfabric::builder()), (false, true));
}

/// FAB-11
#[test]
fn calls_overlap_only_in_a_domain_with_locks_of_its_own() {
    for (threading, overlaps) in [(sys::FI_THREAD_DOMAIN, false), (sys::FI_THREAD_SAFE, true)] {
        let mut fake = Fake::new(|_, attr| attr.threading = threading);
        let domain = fake.domain();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        drop(domain.register(buffer(), Access::REMOTE_READ).expect("register"));
                    }
                });
            }
        });
        assert_eq!(fake.state.overlapped.load(Ordering::SeqCst), overlaps);
        assert_eq!(fake.live(), 0);
    }
}

/// FAB-11: a thread that waits for the lock keeps nothing that the thread with the lock needs.
#[test]
fn holder_of_the_lock_closes_regions_while_another_thread_enables_one() {
    let (ended, end) = mpsc::channel();
    // Not scoped, so that a deadlock fails the test and does not hang it.
    thread::spawn(move || {
        let mut fake = Fake::new(|info, attr| {
            (info.caps, attr.mr_mode) = (sys::FI_RMA_EVENT, sys::FI_MR_RMA_EVENT);
            attr.threading = sys::FI_THREAD_DOMAIN;
        });
        let domain = fake.domain();
        let request = Request::new(buffer(), Access::REMOTE_WRITE).flags(MrFlags::RMA_EVENT);
        let waiting = domain.submit(request).expect("register");
        let closed = domain.register(buffer(), Access::REMOTE_WRITE).expect("register");
        thread::scope(|scope| {
            let guard = FabricDomain::of(&domain).expect("this provider's").lock();
            let enabling = scope.spawn(|| waiting.enable().expect("enable"));
            // Time for the other thread to reach the lock.
            thread::sleep(Duration::from_millis(50));
            assert!(!enabling.is_finished(), "enabled without the lock");
            drop(closed);
            drop(guard);
        });
        ended.send(()).expect("the test waits");
    });
    end.recv_timeout(Duration::from_secs(30)).expect("a deadlock");
}

/// FAB-11
#[test]
fn regions_keep_the_owner_of_the_domain() {
    let mut fake = Fake::mode(0);
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
    let (domain, info) = (&raw mut *fake.domain, &raw const *fake.info);
    // SAFETY: the fake domain outlives the region.
    let provider = unsafe {
        let builder = Libfabric::builder().functions(functions());
        builder.with_domain(domain.cast(), info.cast(), fake.api_version, Arc::clone(&owner))
    };
    let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    let provider = provider.expect("borrow");
    let attr = DomainAttr { nic: Some("cxi:cxi0".to_owned()), ..DomainAttr::default() };
    let domain = Domain::open(&provider, registry, paths, attr).expect("open");
    assert_eq!(provider.nics().expect("one NIC")[0].nic.to_string(), "libfabric/cxi:cxi0");
    let region = domain.register(buffer(), Access::REMOTE_READ).expect("register");
    drop((provider, domain));
    assert_eq!(Arc::strong_count(&owner), 2, "the region holds the owner");
    drop(region);
    assert_eq!(Arc::strong_count(&owner), 1);
}

/// FAB-12: a provider with a cache of its own, found by its name and the environment.
#[test]
fn cache_of_libfabric_is_named_in_the_attributes_and_decisions() -> Result<()> {
    let mut fake = Fake::mode(0);
    let provider = fake.provider(Libfabric::builder());
    let cache = provider.nics()?[0].driver_cache.clone();
    match std::env::var("FI_MR_CACHE_MONITOR").as_deref() {
        Ok("disabled") => assert_eq!(cache, None),
        _ => assert!(cache.is_some_and(|cache| cache.contains("the provider cxi"))),
    }
    let without = fake.provider(Libfabric::builder().libfabric_cache(false));
    assert_eq!(without.nics()?[0].driver_cache, None);
    let domain = fake.open(Libfabric::builder().libfabric_cache(true));
    let region = domain.register(buffer(), Access::REMOTE_READ)?;
    assert!(region.decision()?.reason.contains("is in force"), "{}", region.decision()?);

    // `hmem explain` prints the reason of an explanation.
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new()))?;
    let explain = |provider| {
        let request = ExplainRequest::new(IfaceKind::SYSTEM);
        DefaultPathSelector::new().explain(&Arc::new(registry), provider, &request)
    };
    let with = fake.provider(Libfabric::builder().libfabric_cache(true));
    let reason = explain(&with)?.reason;
    assert!(reason.contains("libfabric's cache of the provider cxi"), "{reason}");
    Ok(())
}
