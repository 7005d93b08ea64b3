//! The three ways to libfabric's semantics: the C API, a borrowed domain, and the software NIC.

#![allow(unsafe_code, reason = "calls libfabric, and registers memory by address")]

use std::{
    ffi::{c_int, c_void},
    fmt,
    os::fd::{AsFd, AsRawFd},
    ptr,
    sync::Arc,
    time::Duration,
};

use hmem_core::{
    Access, Address, AddressRange, AuthKey, BindFlags, BorrowedDmaBuf, DmaBufOffset, Domain,
    DomainAttr, Error, IfaceKind, Iova, LocalKey, MemoryRegion, MrFlags, MrMode, Promise, Raw,
    Registry, RemoteKey,
    counter::Counter,
    fabric::{self, MrAttr, MrMemory},
    provider::{CompletionQueue, EndpointAttr, Provider},
    transfer::{LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};
use hmem_iface_system::System;
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{FabricMr, Libfabric, sys};
use hmem_provider_loopback::Loopback;

use super::{
    application::{CallError, Endpoint, Fabric, Local, Remote, Wanted},
    memory::Memory,
    program::{Detail, Request, SCRATCH_KEY, SLOTS, Transfer},
};

/// Failure of a step.
#[derive(Clone)]
pub(crate) struct Failure {
    /// libfabric's positive error number.
    pub(crate) code: i32,
    pub(crate) text: String,
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.code, self.text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { code: error.kind().fi_errno(), text: format!("{error:#}") }
    }
}

impl From<CallError> for Failure {
    fn from(CallError(call, returned): CallError) -> Self {
        Self { code: returned.unsigned_abs() as i32, text: format!("{call}: {returned}") }
    }
}

/// Result of a step.
pub(crate) type Done<T = ()> = Result<T, Failure>;

/// One of the three ways. A slot holds at most one region.
pub(crate) trait Side {
    fn memory(&self) -> &Memory;

    /// Registers memory into an empty slot, and returns the keys: one, or one for each range.
    fn register(&mut self, slot: usize, request: &Request) -> Done<Vec<u64>>;

    fn close(&mut self, slot: usize) -> Done;
    fn enable(&mut self, slot: usize) -> Done;
    fn refresh(&mut self, slot: usize) -> Done;

    /// Reads the raw key, and returns its length.
    fn raw_key(&mut self, slot: usize) -> Done<usize>;

    /// Binds a new counter. After a success the region is only closed, before its counters: the
    /// provider `sockets` writes to a counter that was closed first.
    fn bind_counter(&mut self, slot: usize) -> Done;

    /// Transfers with the key of a region. The key of a closed region is that of the last region in
    /// the slot. Does nothing if the slot never had a region.
    fn transfer(&mut self, slot: usize, transfer: Transfer, limit: Duration) -> Done;

    /// Closes the region of a slot, if there is one, with its counters.
    fn close_if_open(&mut self, slot: usize);

    /// Empties a slot, as if it never had a region.
    fn forget(&mut self, slot: usize);

    fn close_endpoints(&mut self);

    /// Tries to close the domain, which has regions.
    fn close_domain(&mut self) -> Done;
}

/// Key and addresses of the last region in a slot.
#[derive(Clone, Debug, Default)]
struct Exposed {
    /// Key and address of the first byte, for each range.
    ranges: Vec<(u64, u64)>,
}

impl Exposed {
    fn of(&self, transfer: Transfer) -> Option<(u64, u64)> {
        let (key, base) = *self.ranges.get(transfer.range)?;
        let key = if transfer.wrong_key { key ^ 0x5a5a } else { key };
        Some((key, base.wrapping_add_signed(transfer.offset)))
    }
}

/// Two endpoints of the program, which know each other.
struct Link {
    fabric: Arc<Fabric>,
    ends: Option<(Endpoint, Endpoint, sys::fi_addr_t)>,
}

impl Link {
    fn open(fabric: &Arc<Fabric>) -> Result<(Endpoint, Endpoint, sys::fi_addr_t), CallError> {
        let (initiator, target) = (Endpoint::open(fabric)?, Endpoint::open(fabric)?);
        let peer = initiator.insert(&target.name()?)?;
        target.insert(&initiator.name()?)?;
        Ok((initiator, target, peer))
    }

    /// Executes a transfer. A failure ends the connections of some providers, so the next transfer
    /// opens new endpoints after it.
    fn transfer(
        &mut self,
        write: bool,
        local: Local,
        (key, address): (u64, u64),
        limit: Duration,
    ) -> Done {
        let mut ends = match self.ends.take() {
            Some(ends) => ends,
            None => Self::open(&self.fabric).expect("open endpoints"),
        };
        ends.0.limit = limit;
        let (initiator, target, peer) = &ends;
        let remote = Remote { peer: *peer, address, key };
        // SAFETY: the memory of a side is mapped while the side exists, but for the hole, to which
        // no step transfers. No reference to the memory is used during the call.
        let result = unsafe {
            match write {
                true => initiator.write(target, local, remote),
                false => initiator.read(target, local, remote),
            }
        };
        if result.is_ok() {
            self.ends = Some(ends);
        }
        Ok(result?)
    }
}

/// libfabric's C API.
pub(crate) struct Direct {
    memory: Memory,
    link: Link,
    virtual_addresses: bool,
    /// True if the domain reads dma-bufs (since API version 1.20).
    dma_bufs: bool,
    regions: [Option<Registered>; SLOTS],
    exposed: [Exposed; SLOTS],
    scratch: *mut sys::fid_mr,
    /// True if `fi_close` of a domain with regions changes nothing. In the other providers, in one
    /// release at least, it frees parts of the domain before it fails, and the process crashes
    /// later.
    refuses_close: bool,
    fabric: Arc<Fabric>,
}

/// A region with what was bound to it.
struct Registered {
    mr: *mut sys::fid_mr,
    range: (u64, u64),
    counters: Vec<*mut sys::fid>,
}

/// Table of a domain up to `cntr_open`.
#[repr(C)]
struct DomainOperations {
    known: sys::fi_ops_domain,
    scalable_ep: sys::UnusedOperation,
    cntr_open: Option<
        unsafe extern "C" fn(
            *mut sys::fid_domain,
            *mut CounterAttr,
            *mut *mut sys::fid,
            *mut c_void,
        ) -> c_int,
    >,
}

/// `struct fi_cntr_attr`.
#[repr(C)]
struct CounterAttr {
    events: c_int,
    wait_obj: c_int,
    wait_set: *mut c_void,
    flags: u64,
}

/// `struct fi_mr_modify`.
#[repr(C)]
struct Modify {
    flags: u64,
    attr: sys::fi_mr_attr,
}

/// `FI_REFRESH`, the command of `fi_mr_refresh`.
const REFRESH: c_int = 14;

fn returned(call: &'static str, code: c_int) -> Result<(), CallError> {
    match code {
        0 => Ok(()),
        code => Err(CallError(call, code.into())),
    }
}

/// Closes an object of libfabric.
///
/// # Safety
/// The object is open. If the call succeeds, nothing uses it afterwards.
unsafe fn close(object: *mut sys::fid) -> Result<(), CallError> {
    // SAFETY: the caller promises an open object.
    returned("fi_close", unsafe { (*(*object).ops).close.expect("every object")(object) })
}

/// Calls `fi_control` of an object.
///
/// # Safety
/// The object is open, and `argument` is that of `command`.
unsafe fn control(
    call: &'static str,
    object: *mut sys::fid,
    command: c_int,
    argument: *mut c_void,
) -> Result<(), CallError> {
    // SAFETY: the caller promises an open object and the argument of the command.
    returned(call, unsafe {
        (*(*object).ops).control.expect("every object")(object, command, argument)
    })
}

impl Direct {
    pub(crate) fn open(fabric: Arc<Fabric>, wanted: Wanted, mode: MrMode) -> Self {
        let mut this = Self {
            memory: Memory::new(),
            link: Link { fabric: Arc::clone(&fabric), ends: None },
            virtual_addresses: mode.contains(MrMode::VIRT_ADDR),
            dma_bufs: wanted.api_version >= sys::version(1, 20),
            regions: [const { None }; SLOTS],
            exposed: [const { Exposed { ranges: Vec::new() } }; SLOTS],
            scratch: ptr::null_mut(),
            refuses_close: ["shm", "sockets"].contains(&wanted.provider),
            fabric,
        };
        let iov = iovec_of(this.memory.scratch_range());
        let mut attr = sys::fi_mr_attr::EMPTY;
        (attr.mr_iov, attr.iov_count) = (&raw const iov, 1);
        (attr.access, attr.requested_key) = (LOCAL.bits(), SCRATCH_KEY);
        this.scratch = this.regattr(&attr, 0).expect("register the local buffer");
        this
    }

    fn regattr(&self, attr: &sys::fi_mr_attr, flags: u64) -> Result<*mut sys::fid_mr, CallError> {
        let (domain, mut mr) = (self.fabric.domain, ptr::null_mut());
        // SAFETY: the domain is open, and the attributes with their ranges outlive the call. The
        // memory outlives the region.
        let code = unsafe {
            let regattr = (*(*domain).mr).regattr.expect("every domain");
            regattr(domain.cast(), attr, flags, &raw mut mr)
        };
        returned("fi_mr_regattr", code).map(|()| mr)
    }

    fn region(&self, slot: usize) -> &Registered {
        self.regions[slot].as_ref().expect("a slot with a region")
    }
}

/// Rights of the local buffer.
const LOCAL: Access = Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);

fn iovec_of(range: AddressRange) -> sys::iovec {
    let iov_base = ptr::with_exposed_provenance(range.start().0 as usize);
    sys::iovec { iov_base, iov_len: range.len() as usize }
}

impl Side for Direct {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn register(&mut self, slot: usize, request: &Request) -> Done<Vec<u64>> {
        let Request { ranges, access, key, flags, detail } = request;
        let iov: Vec<_> = ranges.iter().map(|range| iovec_of(self.memory.range(*range))).collect();
        let dma_bufs: Vec<_> = ranges
            .iter()
            .map(|(offset, len)| sys::fi_mr_dmabuf {
                fd: self.memory.file.as_raw_fd(),
                offset: *offset,
                len: *len as usize,
                base_addr: ptr::with_exposed_provenance_mut(self.memory.address(0) as usize),
            })
            .collect();
        let mut attr = sys::fi_mr_attr::EMPTY;
        attr.mr_iov = match self.dma_bufs && flags & sys::FI_MR_DMABUF != 0 {
            true => dma_bufs.as_ptr().cast(),
            false => iov.as_ptr(),
        };
        attr.iov_count = iov.len();
        (attr.access, attr.requested_key) = (*access, *key);
        let mut auth_key = *b"a secret";
        match *detail {
            Detail::None => {}
            Detail::AuthKey => {
                (attr.auth_key_size, attr.auth_key) = (auth_key.len(), auth_key.as_mut_ptr());
            }
            Detail::Offset => attr.offset = 64,
            Detail::PageSize(bytes) => attr.page_size = bytes,
            Detail::HmemData => attr.hmem_data = ptr::dangling_mut(),
            Detail::Iface(number) => attr.iface = number,
            Detail::Base(base) => {
                attr.base_mr = self.regions[base].as_ref().map_or(ptr::null(), |base| base.mr);
            }
        }
        let mr = self.regattr(&attr, *flags)?;
        // SAFETY: the call returned the region just now.
        let key = unsafe { (*mr).key };
        let first = ranges.first().copied().unwrap_or_default();
        let base = if self.virtual_addresses { 0 } else { self.memory.address(first.0) };
        let address = |(offset, _): &(u64, u64)| self.memory.address(*offset).wrapping_sub(base);
        let exposed = ranges.iter().map(|range| (key, address(range))).collect();
        self.exposed[slot] = Exposed { ranges: exposed };
        self.regions[slot] = Some(Registered { mr, range: first, counters: Vec::new() });
        Ok(vec![key])
    }

    fn close(&mut self, slot: usize) -> Done {
        // SAFETY: the region is open. The slot is emptied after success, and no transfer is in
        // flight.
        unsafe { close(self.region(slot).mr.cast()) }?;
        let Registered { counters, .. } = self.regions[slot].take().expect("a region");
        for counter in counters {
            // SAFETY: the counter is open, and nothing refers to it since its region was closed.
            unsafe { close(counter) }.expect("close a counter");
        }
        Ok(())
    }

    fn enable(&mut self, slot: usize) -> Done {
        let mr = self.region(slot).mr.cast();
        // SAFETY: the region is open, and this command has no argument.
        Ok(unsafe { control("fi_mr_enable", mr, sys::FI_ENABLE, ptr::null_mut()) }?)
    }

    fn refresh(&mut self, slot: usize) -> Done {
        let mut modify = Modify { flags: 0, attr: sys::fi_mr_attr::EMPTY };
        let (mr, argument) = (self.region(slot).mr.cast(), (&raw mut modify).cast());
        // SAFETY: the region is open. No ranges mean the whole region.
        Ok(unsafe { control("fi_mr_refresh", mr, REFRESH, argument) }?)
    }

    fn raw_key(&mut self, slot: usize) -> Done<usize> {
        let (mut base, mut raw, mut len) = (0, [0_u8; 64], 64);
        let (base_addr, raw_key, key_size) = (&raw mut base, raw.as_mut_ptr(), &raw mut len);
        let mut attr = sys::fi_mr_raw_attr { flags: 0, base_addr, raw_key, key_size };
        let (mr, argument) = (self.region(slot).mr.cast(), (&raw mut attr).cast());
        // SAFETY: the region is open, and the buffers outlive the call.
        unsafe { control("fi_mr_raw_attr", mr, sys::FI_GET_RAW_MR, argument) }?;
        Ok(len)
    }

    fn bind_counter(&mut self, slot: usize) -> Done {
        let mut attr = CounterAttr { events: 0, wait_obj: 0, wait_set: ptr::null_mut(), flags: 0 };
        let (domain, mut counter) = (self.fabric.domain, ptr::null_mut());
        let mr: *mut sys::fid = self.region(slot).mr.cast();
        // SAFETY: the domain and the region are open. The table of a domain has this call in every
        // release, and the attributes outlive it.
        unsafe {
            let operations: *const DomainOperations = (*domain).ops.cast();
            let open = (*operations).cntr_open.expect("every domain");
            returned("fi_cntr_open", open(domain, &mut attr, &mut counter, ptr::null_mut()))?;
            let bind = (*(*mr).ops).bind.expect("every region");
            let bound = returned("fi_mr_bind", bind(mr, counter, sys::FI_REMOTE_WRITE));
            if bound.is_err() {
                close(counter)?;
            }
            bound?;
        }
        self.regions[slot].as_mut().expect("the region").counters.push(counter);
        Ok(())
    }

    fn transfer(&mut self, slot: usize, transfer: Transfer, limit: Duration) -> Done {
        let Some(remote) = self.exposed[slot].of(transfer) else { return Ok(()) };
        let (mr, address_here) = match transfer.local {
            None => (self.scratch, self.memory.scratch()),
            Some(local) => {
                let local = self.region(local);
                (local.mr, self.memory.address(local.range.0))
            }
        };
        // SAFETY: the region is open.
        let descriptor = unsafe { (*mr).mem_desc };
        let local = Local { address: address_here, len: transfer.len as usize, descriptor };
        self.link.transfer(transfer.write, local, remote, limit)
    }

    fn close_if_open(&mut self, slot: usize) {
        if self.regions[slot].is_some() {
            self.close(slot).expect("close");
        }
    }

    fn forget(&mut self, slot: usize) {
        self.close_if_open(slot);
        self.exposed[slot] = Exposed::default();
    }

    fn close_endpoints(&mut self) {
        self.link.ends = None;
    }

    fn close_domain(&mut self) -> Done {
        if !self.refuses_close {
            return Err(Failure {
                code: 16,
                text: "not called: see `Direct::refuses_close`".into(),
            });
        }
        // SAFETY: the domain has a region, so the call fails, or the suite panics.
        unsafe { close(self.fabric.domain.cast()) }?;
        panic!("fi_close of a domain with regions succeeded");
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        // SAFETY: the region is open, and no transfer is in flight.
        unsafe { close(self.scratch.cast()) }.expect("close the local buffer");
    }
}

/// A domain of hmem: the borrowed one or that of the software NIC.
pub(crate) struct Hmem {
    memory: Memory,
    route: Route,
    regions: [Option<(MemoryRegion, Vec<Arc<Counter>>)>; SLOTS],
    exposed: [Exposed; SLOTS],
    scratch: Option<MemoryRegion>,
    domain: Option<Domain>,
}

/// The endpoints through which the side transfers.
enum Route {
    /// By the program's own endpoints in the borrowed domain.
    Program(Link),
    /// By two endpoints of the software NIC.
    Software(Option<Software>),
}

struct Software {
    initiator: hmem_core::Endpoint,
    _target: hmem_core::Endpoint,
    peer: PeerId,
    queue: Arc<dyn CompletionQueue>,
}

impl Software {
    fn open(domain: &Domain) -> Self {
        let queue = domain.open_cq(16).expect("open a queue");
        let attr = EndpointAttr { rma_event: true, ..EndpointAttr::new(&queue) };
        let open = || domain.open_endpoint(&attr).expect("open an endpoint");
        let (initiator, target) = (open(), open());
        let peer = initiator.resolve(&target.name()).expect("resolve");
        Self { initiator, _target: target, peer, queue }
    }

    fn transfer(
        &self,
        write: bool,
        local: LocalSegment,
        remote: RemoteSegment<'_>,
        limit: Duration,
    ) -> Done {
        let (local, remote) = ([local], [remote]);
        let operation = match write {
            true => Operation::Write { remote: &remote },
            false => Operation::Read { remote: &remote },
        };
        let request = WorkRequest { operation, local: &local, peer: self.peer, context: 0 };
        // SAFETY: the segment has a descriptor.
        unsafe { self.initiator.post(&request) }?;
        let mut done = Vec::new();
        self.queue.wait(&mut done, 1, limit)?;
        done.pop().expect("a completion").result?;
        Ok(())
    }
}

/// Returns attributes that offer what a domain in `mode` needs.
fn domain_attr(mode: MrMode, basic: bool, hmem: bool) -> DomainAttr {
    let mr_mode = if basic { MrMode::BASIC } else { mode };
    DomainAttr { mr_mode, hmem, ..DomainAttr::default() }
}

impl Hmem {
    /// Opens a domain in a libfabric domain of the program.
    pub(crate) fn borrow(fabric: &Arc<Fabric>, api_version: u32, config: Mode) -> Self {
        let (domain, info) = (fabric.domain.cast(), fabric.info.cast());
        // SAFETY: the `Arc` keeps the domain open. It has FI_THREAD_SAFE, and regions are closed
        // after their transfers.
        let provider = unsafe {
            Libfabric::builder().with_domain(domain, info, api_version, Arc::clone(fabric))
        };
        let link = Link { fabric: Arc::clone(fabric), ends: None };
        Self::open(&provider.expect("borrow the domain"), config, Route::Program(link))
    }

    /// Opens a domain of a software NIC that needs the same mode bits.
    pub(crate) fn software(config: Mode) -> Self {
        let provider = Loopback::builder().needs(config.mode).build().expect("a software NIC");
        Self::open(&provider, config, Route::Software(None))
    }

    fn open(provider: &dyn Provider, Mode { mode, basic, hmem }: Mode, route: Route) -> Self {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::default())).expect("host memory");
        let paths = Arc::new(DefaultPathSelector::new());
        let attr = domain_attr(mode, basic, hmem);
        let domain = Domain::open(provider, Arc::new(registry), paths, attr);
        let domain = domain.expect("open a domain");
        let memory = Memory::new();
        let ranges = [memory.scratch_range()];
        // SAFETY: the memory outlives the region, and no reference to it is used during transfers.
        let raw = unsafe { Raw::new(&ranges[..], Promise::ReadWrite) };
        let attr = MrAttr::new(raw, LOCAL).key(SCRATCH_KEY);
        let scratch = fabric::regattr(&domain, &attr, MrFlags::empty());
        Self {
            memory,
            route,
            regions: [const { None }; SLOTS],
            exposed: [const { Exposed { ranges: Vec::new() } }; SLOTS],
            scratch: Some(scratch.expect("register the local buffer")),
            domain: Some(domain),
        }
    }

    fn domain(&self) -> &Domain {
        self.domain.as_ref().expect("taken only while it is closed")
    }

    /// Returns the number of regions that the provider has.
    pub(crate) fn live(&self) -> u64 {
        self.domain().live().regions
    }

    fn region(&self, slot: usize) -> &MemoryRegion {
        &self.regions[slot].as_ref().expect("a slot with a region").0
    }

    fn regattr(&self, request: &Request) -> hmem_core::Result<MemoryRegion> {
        let Request { ranges, access, key, flags, detail } = request;
        let flags = MrFlags::from_bits_retain(*flags);
        let ranges: Vec<_> = ranges.iter().map(|range| self.memory.range(*range)).collect();
        // SAFETY: the memory outlives the region, and no reference to it is used during transfers.
        let raw = unsafe { Raw::new(&ranges[..], Promise::ReadWrite) };
        let mut memory = MrMemory::Ranges(raw);
        if flags.contains(MrFlags::MR_DMABUF)
            && let [range] = ranges[..]
        {
            let dma_buf = BorrowedDmaBuf {
                fd: self.memory.file.as_fd(),
                offset: DmaBufOffset(range.start().0 - self.memory.address(0)),
                len: range.len(),
                base_addr: Some(Address(self.memory.address(0))),
            };
            // SAFETY: as for the ranges, which the file holds.
            memory = MrMemory::DmaBuf(unsafe { Raw::new(dma_buf, Promise::ReadWrite) });
        }
        let auth_key = AuthKey(b"a secret".to_vec());
        let mut attr = MrAttr::new(memory, Access::from_bits_retain(*access)).key(*key);
        match *detail {
            Detail::None => {}
            Detail::AuthKey => attr.auth_key = Some(&auth_key),
            Detail::Offset => attr.offset = 64,
            Detail::PageSize(bytes) => attr.page_size = bytes,
            Detail::HmemData => attr.hmem_data = 8,
            Detail::Iface(number) => attr.iface = Some(IfaceKind(number as u32)),
            Detail::Base(base) => {
                if let Some((base, _)) = &self.regions[base] {
                    attr.memory = MrMemory::Part { base, range: ranges[0] };
                }
            }
        }
        fabric::regattr(self.domain(), &attr, flags)
    }
}

/// The mode of a domain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mode {
    /// The bits, with those that BASIC stands for.
    pub(crate) mode: MrMode,
    /// True if the domain was opened with BASIC.
    pub(crate) basic: bool,
    /// True if the domain has `FI_HMEM`.
    pub(crate) hmem: bool,
}

impl Side for Hmem {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn register(&mut self, slot: usize, request: &Request) -> Done<Vec<u64>> {
        let region = self.regattr(request)?;
        let ranges: Vec<(u64, u64)> = match &self.route {
            Route::Program(_) => {
                let all = FabricMr::all_of(&region).expect("keys");
                all.iter().map(|mr| (mr.key().unwrap_or(u64::MAX), mr.base)).collect()
            }
            Route::Software(_) => {
                let (number, mut base) =
                    (region.key()?.as_u64().expect("one number"), region.base_addr().0);
                let is_virtual = self.domain().mr_mode().effective().contains(MrMode::VIRT_ADDR);
                let next = |range: &AddressRange| {
                    let address = if is_virtual { range.start().0 } else { base };
                    base += range.len();
                    (number, address)
                };
                region.ranges().iter().map(next).collect()
            }
        };
        let mut keys: Vec<_> = ranges.iter().map(|(key, _)| *key).collect();
        keys.dedup();
        self.exposed[slot] = Exposed { ranges };
        self.regions[slot] = Some((region, Vec::new()));
        Ok(keys)
    }

    fn close(&mut self, slot: usize) -> Done {
        let (region, counters) = self.regions[slot].take().expect("a slot with a region");
        let closed = match region.close() {
            Ok(()) => Ok(()),
            Err(rejected) => {
                self.regions[slot] = Some((rejected.value, counters));
                Err(rejected.error)
            }
        };
        Ok(closed?)
    }

    fn enable(&mut self, slot: usize) -> Done {
        Ok(self.region(slot).enable()?)
    }

    fn refresh(&mut self, slot: usize) -> Done {
        Ok(self.region(slot).refresh(&[])?)
    }

    fn raw_key(&mut self, slot: usize) -> Done<usize> {
        Ok(self.region(slot).raw_key()?.0.len())
    }

    fn bind_counter(&mut self, slot: usize) -> Done {
        let counter = Arc::new(Counter::new());
        self.region(slot).bind_counter(&counter, BindFlags::REMOTE_WRITE)?;
        self.regions[slot].as_mut().expect("the region").1.push(counter);
        Ok(())
    }

    fn transfer(&mut self, slot: usize, transfer: Transfer, limit: Duration) -> Done {
        let Some(remote) = self.exposed[slot].of(transfer) else { return Ok(()) };
        let local = match transfer.local {
            None => self.scratch.as_ref().expect("open"),
            Some(slot) => &self.regions[slot].as_ref().expect("a slot with a region").0,
        };
        let (start, len) = (local.range().start(), transfer.len);
        match &mut self.route {
            Route::Program(link) => {
                let descriptor = FabricMr::all_of(local).expect("keys")[0].descriptor();
                let local = Local { address: start.0, len: len as usize, descriptor };
                link.transfer(transfer.write, local, remote, limit)
            }
            Route::Software(ends) => {
                let desc: LocalKey = local.desc()?;
                let domain = self.domain.as_ref().expect("open");
                let ends = ends.get_or_insert_with(|| Software::open(domain));
                let addressing = match domain.mr_mode().effective().contains(MrMode::VIRT_ADDR) {
                    true => hmem_core::Addressing::Virtual,
                    false => hmem_core::Addressing::ZeroBased,
                };
                let key = RemoteKey::new(addressing, Iova(0), u64::MAX, remote.0);
                let local = LocalSegment { address: start, len, desc: Some(desc) };
                let remote = RemoteSegment { address: Iova(remote.1), len, key: &key };
                ends.transfer(transfer.write, local, remote, limit)
            }
        }
    }

    fn close_if_open(&mut self, slot: usize) {
        if let Some((_, counters)) = &self.regions[slot] {
            counters.iter().for_each(|counter| counter.close());
            self.close(slot).expect("close");
        }
    }

    fn forget(&mut self, slot: usize) {
        self.close_if_open(slot);
        self.exposed[slot] = Exposed::default();
    }

    fn close_endpoints(&mut self) {
        match &mut self.route {
            Route::Program(link) => link.ends = None,
            Route::Software(ends) => *ends = None,
        }
    }

    fn close_domain(&mut self) -> Done {
        let domain = self.domain.take().expect("open");
        match domain.close() {
            Ok(()) => panic!("a domain with regions was closed"),
            Err(rejected) => {
                self.domain = Some(rejected.value);
                Err(rejected.error.into())
            }
        }
    }
}

impl Drop for Hmem {
    fn drop(&mut self) {
        self.close_endpoints();
        drop(self.scratch.take());
    }
}
