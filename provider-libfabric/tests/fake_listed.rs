//! NICs of a fake libfabric that need PROV_KEY, VIRT_ADDR and ALLOCATED, which no provider needs on
//! a machine without such hardware. The first, `fake0`, needs LOCAL and ENDPOINT too. The second,
//! `fake1`, needs LOCAL, orders nothing, moves bytes when the test says so, and refuses device
//! memory. The third, `fake2`, reaches this machine only, as its provider's name `shm` says.

mod device;

use std::{
    collections::VecDeque,
    ffi::{c_char, c_int, c_void},
    mem, ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use device::Device;
use hmem_core::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint, ErrorKind, Iface,
    IfaceKind, MemoryRegion, MrMode, Path, Region, RegionState, Registry,
    iface::AllocRequest,
    provider::{CompletionQueue, EndpointAttr, MsgOrder, Provider, StagingAttr},
    transfer::{Completion, CompletionKind, LocalSegment, Operation, PeerId, WorkRequest},
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{Libfabric, sys};

const MODE: MrMode = MrMode::LOCAL
    .union(MrMode::ENDPOINT)
    .union(MrMode::PROV_KEY)
    .union(MrMode::VIRT_ADDR)
    .union(MrMode::ALLOCATED);

/// The mode of the second NIC.
const UNBOUND: MrMode = MODE.difference(MrMode::ENDPOINT);

/// The mode of the third NIC.
const UNDESCRIBED: MrMode = UNBOUND.difference(MrMode::LOCAL);

/// A write that the fake has taken.
#[derive(Clone, Copy, Debug)]
struct Posted {
    context: usize,
    len: usize,
    desc: usize,
    key: u64,
    /// The first local range: its address and length.
    from: (usize, usize),
    to: u64,
    data: Option<u64>,
}

/// An entry of the completion queue. `error` is 0 for success.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    context: usize,
    error: c_int,
    flags: u64,
    data: u64,
}

impl From<(usize, c_int)> for Entry {
    fn from((context, error): (usize, c_int)) -> Self {
        Self { context, error, ..Self::default() }
    }
}

/// The state of the fake library.
#[derive(Debug)]
struct State {
    /// Pairs of a bound region and its endpoint.
    bound: Vec<(usize, usize)>,
    enabled: Vec<usize>,
    regions: usize,
    posted: Vec<Posted>,
    /// Results of the next posts. Posts without an entry succeed.
    results: VecDeque<isize>,
    /// Entries of the completion queue.
    entries: VecDeque<Entry>,
    /// The result of reads of the completion queue; 0 if they return entries.
    queue_error: isize,
    /// The contexts of the receives that the fake has taken, and of those that were canceled.
    receives: Vec<usize>,
    canceled: Vec<usize>,
    /// True if the NIC imports dma-bufs.
    imports: bool,
    /// The rights of the last registration.
    access: u64,
    next_key: u64,
    open: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    bound: Vec::new(),
    enabled: Vec::new(),
    regions: 0,
    posted: Vec::new(),
    results: VecDeque::new(),
    entries: VecDeque::new(),
    queue_error: 0,
    receives: Vec::new(),
    canceled: Vec::new(),
    imports: false,
    access: 0,
    next_key: 1000,
    open: 0,
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no other test runs: the fake has one state.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a value that is never freed. The fake has few of them.
fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn zeroed<T>() -> T {
    // SAFETY: the structures of libfabric are plain data, for which zeros are valid.
    unsafe { mem::zeroed() }
}

unsafe extern "C" fn close(object: *mut sys::fid) -> c_int {
    // SAFETY: the provider passes an open object of the fake.
    let class = unsafe { (*object).fclass };
    let mut state = state();
    state.open -= 1;
    state.regions -= usize::from(class == REGION);
    0
}

unsafe extern "C" fn bind(object: *mut sys::fid, other: *mut sys::fid, _: u64) -> c_int {
    // SAFETY: the provider passes an open object of the fake.
    if unsafe { (*object).fclass } == REGION {
        state().bound.push((object.addr(), other.addr()));
    }
    0
}

unsafe extern "C" fn control(object: *mut sys::fid, command: c_int, _: *mut c_void) -> c_int {
    assert_eq!(command, sys::FI_ENABLE);
    // SAFETY: the provider passes an open object of the fake.
    if unsafe { (*object).fclass } == REGION {
        state().enabled.push(object.addr());
    }
    0
}

/// The classes of the objects, which the provider does not read.
const REGION: usize = 12;
const OTHER: usize = 99;

fn object(class: usize) -> sys::fid {
    state().open += 1;
    let ops = sys::fi_ops { size: 0, close: Some(close), bind: Some(bind), control: Some(control) };
    sys::fid { fclass: class, context: ptr::null_mut(), ops: leak(ops) }
}

unsafe extern "C" fn regattr(
    _: *mut sys::fid,
    attr: *const sys::fi_mr_attr,
    flags: u64,
    out: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: the provider passes valid attributes.
    let attr = unsafe { &*attr };
    assert_eq!(attr.requested_key, 0, "the NIC chooses the key");
    state().access = attr.access;
    if flags & sys::FI_MR_DMABUF != 0 && !state().imports {
        return -95;
    }
    if attr.iface != 0 {
        return -38;
    }
    let key = {
        let mut state = state();
        (state.next_key, state.regions) = (state.next_key + 1, state.regions + 1);
        state.next_key
    };
    let mem_desc = ptr::without_provenance_mut(key as usize * 2);
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(sys::fid_mr { fid: object(REGION), mem_desc, key })) };
    0
}

unsafe extern "C" fn getname(_: *mut sys::fid, name: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the provider passes a buffer of `len` bytes, which is longer than four.
    unsafe {
        name.cast::<u8>().copy_from(b"fake".as_ptr(), 4);
        *len = 4;
    }
    0
}

unsafe extern "C" fn insert(
    _: *mut sys::fid_av,
    address: *const c_void,
    count: usize,
    index: *mut sys::fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    assert_eq!(count, 1);
    // SAFETY: the provider passes an address of at least four bytes and room for an index.
    unsafe {
        assert_eq!(std::slice::from_raw_parts(address.cast::<u8>(), 4), b"fake");
        index.write(5);
    }
    1
}

unsafe extern "C" fn writemsg(
    _: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    assert_ne!(flags & sys::FI_DELIVERY_COMPLETE, 0);
    let mut state = state();
    match state.results.pop_front() {
        None | Some(0) => {}
        Some(refusal) => return refusal,
    }
    // SAFETY: the provider passes a message with its lists, and a context of 64 bytes that this
    // library may write.
    let posted = unsafe {
        let message = &*message;
        message.context.cast::<u64>().write_bytes(0xAA, 8);
        Posted {
            context: message.context.addr(),
            len: (*message.rma_iov).len,
            desc: (*message.desc).addr(),
            key: (*message.rma_iov).key,
            from: ((*message.msg_iov).iov_base.expose_provenance(), (*message.msg_iov).iov_len),
            to: (*message.rma_iov).addr,
            data: (flags & sys::FI_REMOTE_CQ_DATA != 0).then_some(message.data),
        }
    };
    state.posted.push(posted);
    0
}

unsafe extern "C" fn recvmsg(_: *mut sys::fid_ep, message: *const sys::fi_msg, _: u64) -> isize {
    // SAFETY: the provider passes a message.
    let context = unsafe { (*message).context };
    state().receives.push(context.expose_provenance());
    0
}

/// Succeeds, like that of `ofi_rxm`, whether the receive is canceled or not.
unsafe extern "C" fn cancel(_: *mut sys::fid, context: *mut c_void) -> isize {
    state().canceled.push(context.addr());
    0
}

/// Moves the bytes of a posted write and completes it. Returns the data of the write.
fn deliver(number: usize) -> Option<u64> {
    let Posted { context, len, from, to, data, .. } = state().posted.remove(number);
    assert_eq!(len, from.1, "one local range");
    let source: *const u8 = ptr::with_exposed_provenance(from.0);
    // SAFETY: the provider posted both ranges, and keeps them until the write completes.
    unsafe { ptr::with_exposed_provenance_mut::<u8>(to as usize).copy_from(source, len) };
    state().entries.push_back((context, 0).into());
    data
}

unsafe extern "C" fn read(_: *mut sys::fid_cq, entries: *mut c_void, count: usize) -> isize {
    assert!(count > 0);
    let mut state = state();
    if state.queue_error != 0 {
        return state.queue_error;
    }
    match state.entries.front() {
        None => -(sys::FI_EAGAIN as isize),
        Some(entry) if entry.error != 0 => -(sys::FI_EAVAIL as isize),
        Some(Entry { context, flags, data, .. }) => {
            let entry = sys::fi_cq_tagged_entry {
                op_context: ptr::with_exposed_provenance_mut(*context),
                flags: *flags,
                data: *data,
                ..zeroed()
            };
            // SAFETY: the provider passes room for entries of this format.
            unsafe { entries.cast::<sys::fi_cq_tagged_entry>().write(entry) };
            state.entries.pop_front();
            1
        }
    }
}

unsafe extern "C" fn readerr(
    _: *mut sys::fid_cq,
    entry: *mut sys::fi_cq_err_entry,
    _: u64,
) -> isize {
    let Entry { context, error: err, flags, .. } = state().entries.pop_front().expect("an error");
    let op_context = ptr::with_exposed_provenance_mut(context);
    // SAFETY: the provider passes room for an entry.
    unsafe {
        entry.write(sys::fi_cq_err_entry { op_context, err, flags, prov_errno: 77, ..zeroed() });
    }
    1
}

unsafe extern "C" fn open_av(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_av_attr,
    out: *mut *mut sys::fid_av,
    _: *mut c_void,
) -> c_int {
    let ops = sys::fi_ops_av { size: 0, insert: Some(insert) };
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(sys::fid_av { fid: object(OTHER), ops: leak(ops) })) };
    0
}

unsafe extern "C" fn open_cq(
    _: *mut sys::fid_domain,
    attr: *mut sys::fi_cq_attr,
    out: *mut *mut sys::fid_cq,
    _: *mut c_void,
) -> c_int {
    // SAFETY: the provider passes attributes.
    assert_eq!(unsafe { (*attr).format }, sys::FI_CQ_FORMAT_TAGGED);
    let ops =
        sys::fi_ops_cq { size: 0, read: Some(read), readfrom: ptr::null(), readerr: Some(readerr) };
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(sys::fid_cq { fid: object(OTHER), ops: leak(ops) })) };
    0
}

unsafe extern "C" fn open_ep(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_info,
    out: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    let cm = sys::fi_ops_cm { size: 0, setname: ptr::null(), getname: Some(getname) };
    let rma = sys::fi_ops_rma { writemsg: Some(writemsg), ..zeroed() };
    let msg = sys::fi_ops_msg { recvmsg: Some(recvmsg), ..zeroed() };
    let ops = leak(sys::fi_ops_ep { size: 0, cancel: Some(cancel) });
    let (cm, rma, msg, fid) = (leak(cm), leak(rma), leak(msg), object(sys::FI_CLASS_EP));
    let endpoint = sys::fid_ep { fid, ops, cm, rma, msg, ..zeroed_ep() };
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(endpoint)) };
    0
}

fn zeroed_ep() -> sys::fid_ep {
    zeroed()
}

unsafe extern "C" fn open_domain(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    out: *mut *mut sys::fid_domain,
    _: *mut c_void,
) -> c_int {
    let ops = sys::fi_ops_domain {
        size: 0,
        av_open: Some(open_av),
        cq_open: Some(open_cq),
        endpoint: Some(open_ep),
    };
    let none = ptr::null();
    let mr = sys::fi_ops_mr { size: 0, reg: none, regv: none, regattr: Some(regattr) };
    let fid = object(sys::FI_CLASS_DOMAIN);
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(sys::fid_domain { fid, ops: leak(ops), mr: leak(mr) })) };
    0
}

unsafe extern "C" fn fabric(
    _: *mut sys::fi_fabric_attr,
    out: *mut *mut sys::fid_fabric,
    _: *mut c_void,
) -> c_int {
    let ops = leak(sys::fi_ops_fabric { size: 0, domain: Some(open_domain) });
    // SAFETY: the provider passes room for the pointer.
    unsafe { out.write(leak(sys::fid_fabric { fid: object(OTHER), ops, api_version: 0 })) };
    0
}

extern "C" fn version() -> u32 {
    sys::version(2, 1)
}

extern "C" fn strerror(_: c_int) -> *const c_char {
    c"fake".as_ptr()
}

/// Returns an `fi_info` with its structs.
unsafe extern "C" fn dupinfo(_: *const sys::fi_info) -> *mut sys::fi_info {
    let mut info: sys::fi_info = zeroed();
    info.tx_attr = leak(sys::fi_tx_attr { size: 64, iov_limit: 2, ..zeroed() });
    info.rx_attr = leak(sys::fi_rx_attr { size: 64, iov_limit: 2, ..zeroed() });
    info.ep_attr = leak(sys::fi_ep_attr { max_msg_size: 1 << 20, ..zeroed() });
    info.domain_attr = leak(zeroed());
    info.fabric_attr = leak(zeroed());
    leak(info)
}

/// The infos of the fake are never freed.
unsafe extern "C" fn freeinfo(_: *mut sys::fi_info) {}

/// Lists the NICs whose mode bits are offered, and the second one with `FI_HMEM` too.
unsafe extern "C" fn getinfo(
    _: u32,
    _: *const c_char,
    _: *const c_char,
    _: u64,
    hints: *const sys::fi_info,
    out: *mut *mut sys::fi_info,
) -> c_int {
    // SAFETY: the provider passes hints of `dupinfo`, and room for the list.
    unsafe {
        let offered = (*(*hints).domain_attr).mr_mode;
        let caps = (*hints).caps;
        let plain = sys::FI_MSG | sys::FI_TAGGED | sys::FI_RMA;
        assert_eq!((*hints).mode, sys::FI_CONTEXT | sys::FI_CONTEXT2);
        let mut first = ptr::null_mut();
        for (name, provider, mode, all) in [
            (c"fake2", c"shm", UNDESCRIBED, plain),
            (c"fake1", c"fake", UNBOUND, plain | sys::FI_HMEM),
            (c"fake0", c"fake", MODE, plain),
        ] {
            let mode = mode.bits() as c_int;
            if offered & mode != mode || caps & !all != 0 {
                continue;
            }
            let info = dupinfo(ptr::null());
            ((*info).caps, (*info).next) = (caps, first);
            let domain = &mut *(*info).domain_attr;
            (domain.mr_mode, domain.mr_key_size) = (mode, 8);
            (domain.threading, domain.cq_data_size) = (sys::FI_THREAD_DOMAIN, 8);
            domain.name = name.as_ptr().cast_mut();
            (*(*info).fabric_attr).prov_name = provider.as_ptr().cast_mut();
            first = info;
        }
        if first.is_null() {
            return -sys::FI_ENODATA;
        }
        out.write(first);
    }
    0
}

fn provider() -> Libfabric {
    // SAFETY: the functions have the signatures of their names.
    let functions = unsafe {
        sys::Functions::from_lookup(|name| {
            Some(match name {
                "fi_version" => version as *const (),
                "fi_getinfo" => getinfo as *const (),
                "fi_dupinfo" => dupinfo as *const (),
                "fi_freeinfo" => freeinfo as *const (),
                "fi_fabric" => fabric as *const (),
                "fi_strerror" => strerror as *const (),
                other => panic!("{other}"),
            })
        })
    };
    let builder = Libfabric::builder().functions(functions.expect("all functions")).dma_buf(true);
    // SAFETY: the caller has its turn, so that no other test uses the environment. The fake moves
    // no bytes.
    unsafe { builder.build() }.expect("build")
}

/// A domain with two endpoints, and a region of each right.
struct Side {
    endpoint: Endpoint,
    queue: Arc<dyn CompletionQueue>,
    domain: Domain,
    peer: PeerId,
}

impl Side {
    fn open() -> Self {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("host memory");
        let paths = Arc::new(DefaultPathSelector::new());
        let provider = provider();
        assert_eq!(provider.nics().expect("list")[0].required_mr_mode, MODE);
        let refused = DomainAttr { mr_mode: MODE - MrMode::ENDPOINT, ..DomainAttr::default() };
        let shared = Arc::new(registry);
        let refused = Domain::open(&provider, Arc::clone(&shared), paths, refused);
        assert_eq!(refused.expect_err("a bit is missing").kind(), ErrorKind::ModeMismatch);
        Self::over(shared, DomainAttr { mr_mode: MODE, ..DomainAttr::default() })
    }

    fn over(registry: Arc<Registry>, attr: DomainAttr) -> Self {
        let paths = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(&provider(), registry, paths, attr).expect("open");
        let queue = domain.open_cq(64).expect("open a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("open");
        let peer = endpoint.resolve(&endpoint.name()).expect("resolve");
        Self { endpoint, queue, domain, peer }
    }

    fn read(&self) -> Vec<Completion> {
        let mut done = Vec::new();
        self.queue.read(&mut done, 64).expect("read");
        done
    }

    fn usable(&self, region: &MemoryRegion) {
        region.bind_endpoint(&self.endpoint).expect("bind");
        region.enable().expect("enable");
    }
}

/// FAB-03
#[test]
fn regions_are_bound_and_enabled_by_the_application_in_endpoint_mode() {
    let _turn = turn();
    let before = state().open;
    let side = Side::open();
    let region = side.domain.register(vec![0_u8; 64], Access::REMOTE_READ).expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    assert_eq!(region.enable().expect_err("not bound").kind(), ErrorKind::BadState);
    side.usable(&region);
    let (mr, endpoint) = *state().bound.last().expect("bound");
    assert_eq!(state().enabled.last(), Some(&mr));
    assert_ne!(mr, endpoint);
    let number = region.key().expect("a key").as_u64().expect("one number");
    assert_eq!(number, state().next_key, "the key that the NIC chose");
    region.close().expect("close");
    assert_eq!(state().regions, 0);
    drop(side);
    assert_eq!(state().open, before, "objects stay open");
}

/// FAB-03: LOCAL
#[test]
fn requests_carry_descriptors_and_storage_of_their_own() {
    let _turn = turn();
    let side = Side::open();
    let access = Access::WRITE | Access::REMOTE_WRITE;
    let region = side.domain.register(vec![1_u8; 64], access).expect("register");
    side.usable(&region);
    let (key, from) = (region.key().expect("a key"), region.slice(0, 64).expect("inside"));
    let to = [key.slice(0, 64).expect("inside")];
    let bare = LocalSegment { address: region.range().start(), len: 64, desc: None };
    let request = WorkRequest {
        operation: Operation::Write { remote: &to },
        local: &[bare],
        peer: side.peer,
        context: 1,
    };
    // SAFETY: the region's memory outlives the call, which is refused.
    let refused = unsafe { side.endpoint.post(&request) }.expect_err("no descriptor");
    assert_eq!(refused.kind(), ErrorKind::NoRegion, "{refused}");
    let read = side.endpoint.read(&[from], &to, side.peer, 1).expect_err("no right to read");
    assert_eq!(read.kind(), ErrorKind::AccessDenied, "{read}");
    state().posted.clear();
    for context in 0..3 {
        side.endpoint.write(&[from], &to, side.peer, context).expect("post");
    }
    let posted = mem::take(&mut state().posted);
    let number = key.as_u64().expect("one number");
    for post in &posted {
        assert_eq!((post.len, post.key, post.desc as u64), (64, number, 2 * number));
    }
    let contexts: Vec<_> = posted.iter().map(|post| post.context).collect();
    assert!(contexts[0].abs_diff(contexts[1]) >= 64 && contexts[1].abs_diff(contexts[2]) >= 64);
    // Completions in another order, one without a request, and an error with a negated number.
    let ended = [(contexts[2], 0), (0, 0), (contexts[0], -sys::FI_ETRUNC)];
    state().entries.extend(ended.map(Entry::from));
    let mut done = side.read();
    let failed = done.pop().expect("two completions");
    assert_eq!((done[0].context, done[0].kind), (2, CompletionKind::Write));
    assert_eq!(done[0].result.as_ref().ok(), Some(&64));
    let error = failed.result.expect_err("failed");
    assert_eq!((failed.context, error.kind()), (0, ErrorKind::Truncated), "{error}");
    assert_eq!(error.context_value("prov_errno"), Some("77"));
    // A close of the region waits for the request that uses it, and then says so.
    let rejected = region.close().expect_err("a request uses the region");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy, "{}", rejected.error);
    state().entries.push_back((contexts[1], 0).into());
    rejected.value.close().expect("close");
    assert_eq!(side.read()[0].context, 1);
}

/// FAB-07
#[test]
fn parts_that_the_nic_does_not_take_wait_in_order() {
    let _turn = turn();
    let side = Side::open();
    let access = Access::WRITE | Access::REMOTE_WRITE;
    let region = side.domain.register(vec![1_u8; 64], access).expect("register");
    side.usable(&region);
    let key = region.key().expect("a key");
    let write = |len, context| {
        let from = region.slice(0, len).expect("inside");
        let to = [key.slice(0, len).expect("inside")];
        side.endpoint.write(&[from], &to, side.peer, context)
    };
    let again = -(sys::FI_EAGAIN as isize);
    state().posted.clear();
    state().results = [again, again, again, 0, again].into();
    for len in 1..4 {
        write(len, len).expect("post");
    }
    assert_eq!(state().posted.len(), 0, "nothing was taken yet");
    assert_eq!(side.read().len(), 0);
    assert_eq!(side.read().len(), 0);
    let posted: Vec<_> = state().posted.drain(..).collect();
    assert_eq!(posted.iter().map(|post| post.len).collect::<Vec<_>>(), [1, 2, 3]);
    // A post that fails ends its request, and no other one.
    state().results = [-22].into();
    write(8, 8).expect("post");
    let done = side.read();
    assert_eq!((done.len(), done[0].context), (1, 8));
    assert_eq!(done[0].result.as_ref().expect_err("refused").kind(), ErrorKind::InvalidArgument);
    // The close cancels what is in flight.
    let Side { endpoint, queue, .. } = side;
    endpoint.close().expect("close");
    let mut done = Vec::new();
    queue.read(&mut done, 64).expect("read");
    assert_eq!(done.iter().map(|done| done.context).collect::<Vec<_>>(), [1, 2, 3]);
    for done in done {
        assert_eq!(done.result.expect_err("canceled").kind(), ErrorKind::Canceled);
    }
    region.close().expect("close");
}

/// Returns a device that has the number of CUDA at libfabric.
fn cuda_device() -> Arc<dyn Iface> {
    let simulated = Simulated::builder().peer_memory(true).build().expect("build the device");
    Arc::new(Device(IfaceKind::CUDA, simulated))
}

/// Opens the second NIC, with a device.
fn unordered() -> (Side, Arc<dyn Iface>) {
    let device = cuda_device();
    let mut registry = Registry::new();
    registry.add(Arc::clone(&device)).expect("add the device");
    registry.add(Arc::new(System::new())).expect("host memory");
    let attr = DomainAttr {
        nic: Some("fake:fake1".to_owned()),
        mr_mode: UNBOUND,
        staging: StagingAttr { buffer_len: 64, buffer_count: 8 },
        ..DomainAttr::default()
    };
    let side = Side::over(Arc::new(registry), attr);
    assert_eq!(side.domain.provider_attr().order, MsgOrder::empty());
    (side, device)
}

/// Opens the third NIC.
fn local_only(registry: Registry) -> Side {
    let nic = Some("shm:fake2".to_owned());
    let attr = DomainAttr { nic, mr_mode: UNDESCRIBED, ..DomainAttr::default() };
    Side::over(Arc::new(registry), attr)
}

fn device_memory(device: &Arc<dyn Iface>, len: u64) -> DeviceBuffer {
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(device, &request).expect("allocate")
}

/// FAB-07: the NIC finishes writes in any order. The data of a write with immediate data still
/// follows all its bytes, which lie in several chunks or in several remote ranges.
#[test]
fn immediate_data_follows_the_bytes_on_a_nic_without_order() {
    const LEN: u64 = 64 * 12 + 5;
    let _turn = turn();
    let (side, device) = unordered();
    let staged = device_memory(&device, LEN);
    let staged = side.domain.register(staged, Access::WRITE).expect("register");
    let host = side.domain.register(vec![0_u8; LEN as usize], Access::WRITE).expect("register");
    let far = vec![0_u8; LEN as usize];
    let far = side.domain.register(far, Access::REMOTE_WRITE).expect("register");
    let key = far.key().expect("a key");
    let slice = |at, len| key.slice(at, len).expect("inside");
    state().posted.clear();
    for round in 0..40_u64 {
        let bytes: Vec<_> = (0..LEN).map(|at| (at * 7 + round * 3 + 1) as u8).collect();
        far.write(0, &vec![0; LEN as usize]).expect("clear");
        let (from, to) = if round % 2 == 0 {
            staged.write(0, &bytes).expect("write");
            (staged.slice(0, LEN).expect("inside"), vec![slice(0, LEN)])
        } else {
            host.write(0, &bytes).expect("write");
            let ranges = (0..4).map(|at| slice(at * 100, 100)).chain([slice(400, LEN - 400)]);
            (host.slice(0, LEN).expect("inside"), ranges.collect())
        };
        side.endpoint.write_immediate(&[from], &to, round, side.peer, round).expect("post");
        let (mut random, mut told, mut done) = (round, None, Vec::new());
        while done.is_empty() {
            done = side.read();
            let posted = state().posted.len();
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(11);
            if posted > 0
                && let Some(data) = deliver((random >> 33) as usize % posted)
            {
                assert_eq!(told.replace(data), None, "the data arrives once");
                let mut found = vec![0; LEN as usize];
                far.read(0, &mut found).expect("read");
                assert!(found == bytes, "round {round}: the data arrived before the bytes");
            }
        }
        assert_eq!(done[0].result.as_ref().ok(), Some(&LEN));
        assert_eq!(told, Some(round | LEN << 32), "the data and the length");
        assert_eq!(side.domain.live().staging_buffers, 0);
    }
}

/// FAB-07: after a failure of one part, the NIC never gets the part with the
/// immediate data.
#[test]
fn immediate_data_of_a_failed_write_is_not_sent() {
    let _turn = turn();
    let (side, device) = unordered();
    let staged =
        side.domain.register(device_memory(&device, 256), Access::WRITE).expect("register");
    let far = side.domain.register(vec![0_u8; 256], Access::REMOTE_WRITE).expect("register");
    let key = far.key().expect("a key");
    let (from, to) = (staged.slice(0, 256).expect("inside"), key.slice(0, 256).expect("inside"));
    state().posted.clear();
    side.endpoint.write_immediate(&[from], &[to], 1, side.peer, 1).expect("post");
    // The chunk with the data waits for the three others.
    while state().posted.len() < 3 {
        assert!(side.read().is_empty());
    }
    let first = state().posted.remove(0).context;
    state().entries.push_back((first, 5).into());
    let mut done = side.read();
    while done.is_empty() {
        while !state().posted.is_empty() {
            assert_eq!(deliver(0), None, "the data was sent");
        }
        done = side.read();
    }
    assert_eq!(done[0].result.as_ref().expect_err("failed").os_errno().map(|code| code.0), Some(5));
    assert_eq!(side.domain.live().staging_buffers, 0);
}

/// FAB-10: libfabric is asked for the dma-buf and for peer memory first. The decision has both
/// refusals.
#[test]
fn device_memory_is_staged_after_libfabric_has_refused_direct_paths() {
    let _turn = turn();
    let (side, device) = unordered();
    let region = side.domain.register(device_memory(&device, 64), Access::READ).expect("register");
    let decision = region.decision().expect("a decision");
    assert_eq!(decision.path, Path::Staged);
    for (path, number) in [(Path::DmaBuf, 95), (Path::PeerMemory, 38)] {
        let attempt = decision.attempts.iter().find(|attempt| {
            let error = attempt.error.as_ref();
            attempt.path == path && error.is_some_and(|error| error.os_errno().is_some())
        });
        let attempt = attempt.unwrap_or_else(|| panic!("{path:?}: {decision:?}"));
        assert!(attempt.driver_called && attempt.call.contains("regi"), "{attempt:?}");
        assert_eq!(
            attempt.error.as_ref().and_then(|error| error.os_errno()).map(|e| e.0),
            Some(number)
        );
    }
    assert_eq!(decision.attempts.last().map(|attempt| attempt.path), Some(Path::Staged));
}

/// FAB-07: the registry need not have host memory.
#[test]
fn device_memory_without_a_descriptor_is_refused_if_the_registry_has_only_a_device() {
    let _turn = turn();
    let device = cuda_device();
    let mut registry = Registry::new();
    registry.add(Arc::clone(&device)).expect("add the device");
    let side = local_only(registry);
    let memory = device_memory(&device, 64);
    let far = side.domain.register(vec![0_u8; 64], Access::REMOTE_WRITE).expect("register");
    let key = far.key().expect("a key");
    let request = WorkRequest {
        operation: Operation::Write { remote: &[key.slice(0, 64).expect("inside")] },
        local: &[LocalSegment { address: memory.range().start(), len: 64, desc: None }],
        peer: side.peer,
        context: 1,
    };
    // SAFETY: the memory outlives the call, which is refused.
    let refused = unsafe { side.endpoint.post(&request) }.expect_err("no descriptor");
    assert_eq!(refused.kind(), ErrorKind::NoRegion, "{refused}");
}

/// Posts 40 writes to a second endpoint of the domain, which is then closed, and completes all of
/// them. One read of the fake's queue returns one completion.
fn completed_writes_to_a_closed_peer() -> (Side, Region<Vec<u8>>) {
    let side = local_only(Registry::new());
    let access = Access::WRITE | Access::REMOTE_WRITE;
    let region = side.domain.register(vec![1_u8; 8], access).expect("register");
    let key = region.key().expect("a key");
    let (from, to) = (region.slice(0, 8).expect("inside"), [key.slice(0, 8).expect("inside")]);
    let other = side.domain.open_endpoint(&EndpointAttr::new(&side.queue)).expect("open");
    let peer = side.endpoint.resolve(&other.name()).expect("resolve");
    state().posted.clear();
    for context in 0..40 {
        side.endpoint.write(&[from], &to, peer, context).expect("post");
    }
    other.close().expect("close");
    let mut state = state();
    let contexts: Vec<_> =
        state.posted.drain(..).map(|posted| Entry::from((posted.context, 0))).collect();
    state.entries.extend(contexts);
    drop(state);
    (side, region)
}

/// FAB-08: a peer is gone only after the reads of what it has completed.
#[test]
fn requests_that_a_closed_peer_has_completed_succeed() {
    let _turn = turn();
    let (side, _region) = completed_writes_to_a_closed_peer();
    for context in 0..40 {
        let mut done = Vec::new();
        side.queue.read(&mut done, 1).expect("read");
        assert_eq!(done[0].context, context);
        assert_eq!(done[0].result.as_ref().ok(), Some(&8), "{done:?}");
    }
}

#[test]
fn requests_that_have_completed_succeed_at_the_close_of_their_endpoint() {
    let _turn = turn();
    let (side, _region) = completed_writes_to_a_closed_peer();
    side.endpoint.close().expect("close");
    let mut done = Vec::new();
    side.queue.read(&mut done, 64).expect("read");
    assert_eq!(done.len(), 40);
    assert!(done.iter().all(|done| done.result.as_ref().ok() == Some(&8)), "{done:?}");
}

/// FAB-07: `ofi_rxm` reports no failure of a cancel. A message may still take the receive, and the
/// write then takes the next one, before the writes behind it.
#[test]
fn writes_with_immediate_data_are_reported_in_order() {
    let _turn = turn();
    let side = local_only(Registry::new());
    let inbox = side.domain.register(vec![0_u8; 8], Access::RECV).expect("register");
    let into = [inbox.slice(0, 8).expect("inside")];
    (state().receives, state().canceled) = (Vec::new(), Vec::new());
    for context in 0..3 {
        side.endpoint.receive(&into, None, context).expect("post");
    }
    let flags = sys::FI_REMOTE_WRITE | sys::FI_REMOTE_CQ_DATA;
    state().entries.extend([1, 2].map(|data| Entry { flags, data, ..Entry::default() }));
    assert!(side.read().is_empty());
    let [message, first, second] = state().receives[..] else { panic!("three receives") };
    assert_eq!(state().canceled, [message], "the second write waits for the first");
    state().entries.push_back((message, 0).into());
    let mut done = side.read();
    assert_eq!(state().canceled, [message, first]);
    state().entries.push_back((first, sys::FI_ECANCELED).into());
    done.extend(side.read());
    state().entries.push_back((second, sys::FI_ECANCELED).into());
    done.extend(side.read());
    let done: Vec<_> = done.iter().map(|done| (done.context, done.kind, done.data)).collect();
    let write = CompletionKind::RemoteWrite;
    let message = (0, CompletionKind::Receive, None);
    assert_eq!(done, [message, (1, write, Some(1)), (2, write, Some(2))]);
}

/// FAB-08
#[test]
fn failed_read_of_the_completion_queue_is_reported_once() {
    let _turn = turn();
    let side = local_only(Registry::new());
    state().queue_error = -5;
    let mut done = Vec::new();
    let error = side.queue.read(&mut done, 1).expect_err("the queue fails");
    let again = side.queue.read(&mut done, 1);
    state().queue_error = 0;
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(5), "{error}");
    assert_eq!(again.expect("reported"), 0);
}

/// FAB-08: such an entry may have the context of another program.
#[test]
fn error_of_a_peers_operation_has_no_context_of_this_side() {
    let _turn = turn();
    let side = local_only(Registry::new());
    let (context, flags) = (0x10, sys::FI_REMOTE_WRITE);
    state().entries.push_back(Entry { context, flags, error: 5, data: 0 });
    assert!(side.read().is_empty());
}

/// FAB-08
#[test]
fn objects_of_closed_shared_memory_endpoints_do_not_wait_for_other_providers() {
    let _turn = turn();
    let (other, _device) = unordered();
    let before = state().open;
    drop(local_only(Registry::new()));
    assert_eq!(state().open, before, "objects stay open");
    drop(other);
}

/// FAB-11: `ofi_rxm` gives peers the local rights too.
#[test]
fn peers_cannot_guess_the_key_of_memory_without_remote_rights() {
    let _turn = turn();
    let side = local_only(Registry::new());
    let access = Access::READ | Access::WRITE | Access::SEND | Access::RECV;
    let keys = [(); 2].map(|()| {
        let region = side.domain.register(vec![0_u8; 8], access).expect("register");
        assert_eq!(state().access, sys::FI_SEND);
        region.provider_region().expect("registered").key
    });
    assert!(keys[0].abs_diff(keys[1]) > 1 << 20, "{keys:x?}");
}

/// FAB-07: libfabric would take the memory of a plug-in's device for host memory.
#[test]
fn dma_buf_of_an_iface_that_libfabric_does_not_know_is_for_peers_only() {
    let _turn = turn();
    let device: Arc<dyn Iface> =
        Arc::new(Device(IfaceKind(0x123), Simulated::builder().build().expect("build")));
    let mut registry = Registry::new();
    registry.add(Arc::clone(&device)).expect("add the device");
    let side = local_only(registry);
    state().imports = true;
    let register = |access| {
        let memory = device_memory(&device, 64);
        side.domain.register(memory, access).expect("register")
    };
    let (both, local) = (register(Access::REMOTE_READ | Access::WRITE), register(Access::WRITE));
    state().imports = false;
    assert_eq!(both.decision().expect("a decision").path, Path::DmaBuf);
    assert_eq!(local.decision().expect("a decision").path, Path::Staged);
    let far = side.domain.register(vec![0_u8; 64], Access::REMOTE_WRITE).expect("register");
    let key = far.key().expect("a key");
    let to = [key.slice(0, 64).expect("inside")];
    let from = [both.slice(0, 64).expect("inside")];
    let refused = side.endpoint.write(&from, &to, side.peer, 1).expect_err("no local use");
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
}
