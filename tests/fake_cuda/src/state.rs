//! State of the driver: contexts, allocations, mappings, streams, and injected faults.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap, VecDeque},
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_fake_common::{Calls, Pages, page};
use hmem_iface_cuda::sys::{self, CuMemAllocationProp, CuResult, CuStreamCaptureMode};

use crate::profile::Profile;

/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM` of devices with 2 MiB pages.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// Alignment of addresses of `cuMemAlloc`. The CUDA programming guide says "at least 256 bytes".
const ALIGNMENT: u64 = 512;

/// Allocations below this size share pages.
const SHARES_PAGES: u64 = 4096;

/// Returns the bytes that a small allocation occupies. Unspecified, so the fake decides:
/// allocations of [`SHARES_PAGES`] bytes and more occupy whole pages. Only smaller ones share a
/// page, so that their dma-bufs overlap.
fn small_size(len: u64) -> u64 {
    if len < SHARES_PAGES { len.next_multiple_of(ALIGNMENT) } else { len.next_multiple_of(page()) }
}
/// Allocations below this size are small: they share blocks of [`GRANULARITY`] bytes.
const SMALL: u64 = 1 << 20;

thread_local! {
    /// The calling thread's stack of contexts, and the generation of the driver that they belong
    /// to. The current context is the last one.
    pub(crate) static CONTEXTS: RefCell<(u64, Vec<usize>)> =
        const { RefCell::new((0, Vec::new())) };
    /// The calling thread's capture mode. 0 is GLOBAL, the default.
    pub(crate) static CAPTURE_MODE: Cell<CuStreamCaptureMode> = const { Cell::new(0) };
    /// True while the calling thread is in a callback of a stream.
    pub(crate) static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Functions that a stream capture in the mode GLOBAL forbids to other threads. `cuda.h` names
/// `cudaMalloc`, and users of PyTorch report `cudaEventQuery`. Unspecified, so the fake decides:
/// the others.
const NOT_DURING_CAPTURE: [&str; 9] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuStreamCreate",
    "cuStreamSynchronize",
];

/// Kind of an allocation, by the call that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Pool,
    Managed,
    Host,
    Registered,
    Reservation,
    /// Memory opened from an IPC handle of another process: number of opens, and the inode of its
    /// file.
    Imported {
        opened: u32,
        inode: u64,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    pub(crate) device: u32,
    /// Context that the allocation belongs to. Null for VMM and stream-ordered memory.
    pub(crate) context: usize,
    pub(crate) id: u64,
    pub(crate) sync_memops: bool,
}

/// Physical memory created by `cuMemCreate`.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) len: u64,
    pub(crate) properties: CuMemAllocationProp,
    /// Number of references: one of `cuMemCreate`, and those of `cuMemRetainAllocationHandle`.
    pub(crate) references: u32,
    pub(crate) mappings: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    pub(crate) len: u64,
    pub(crate) handle: u64,
    pub(crate) accessible: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Context {
    pub(crate) device: u32,
    pub(crate) flags: u32,
    /// Number of references to a primary context; 1 for any other context.
    pub(crate) references: u32,
    pub(crate) primary: bool,
}

/// A copy that was enqueued on a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: usize,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) waiting: VecDeque<Copy>,
    pub(crate) submitted: u64,
    pub(crate) done: u64,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    /// The stream in which the event was recorded, and the number of copies before the event.
    pub(crate) recorded: Option<(usize, u64)>,
}

/// An injected fault: the error code, and its effect on later calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) code: CuResult,
    /// True if the device is lost, so that all later calls return `code` too.
    pub(crate) loses: bool,
}

impl From<CuResult> for Fault {
    fn from(code: CuResult) -> Self {
        Self { code, loses: false }
    }
}

/// A function whose calls a test blocks, and the number of calls that wait.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) symbol: &'static str,
    pub(crate) held: usize,
}

/// The number of live objects of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Number of live allocations that no other field counts.
    pub allocations: usize,
    /// Number of reserved address ranges.
    pub reservations: usize,
    /// Number of live handles of physical memory.
    pub handles: usize,
    /// Number of live VMM mappings, of all handles together.
    pub mappings: usize,
    /// Number of page-locked host ranges.
    pub registered: usize,
    /// Number of open allocations of other processes.
    pub imported: usize,
    /// Number of references to the primary contexts of all devices together.
    pub primary_references: u32,
    /// Number of live streams.
    pub streams: usize,
    /// Number of live events.
    pub events: usize,
    /// Number of copies in flight.
    pub copies: usize,
}

#[derive(Debug)]
pub(crate) struct State {
    /// Number of this driver among those that the process has started.
    pub(crate) generation: u64,
    pub(crate) profile: Profile,
    pub(crate) started: bool,
    pub(crate) sticky: Option<CuResult>,
    pub(crate) pages: Pages,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) contexts: HashMap<usize, Context>,
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashMap<usize, Event>,
    pub(crate) used: Vec<u64>,
    /// Contexts in which inbound writes were flushed since
    /// [`FakeDriver::flushed`](crate::FakeDriver::flushed) was last called.
    pub(crate) flushed: Vec<usize>,
    /// Number of calls that `cuda.h` leaves undefined.
    pub(crate) undefined_calls: u64,
    /// Number of queries of an address for more than two attributes.
    pub(crate) lookups: u64,
    pub(crate) hold: Option<Hold>,
    /// True if the capture of a stream by another thread is still valid. `None` if no thread
    /// captures.
    pub(crate) capture: Option<bool>,
    /// Allocation that queries shall report as unknown: its base, and the number of queries before
    /// that.
    pub(crate) forgotten: Option<(u64, u64)>,
    next_handle: usize,
    /// Numbers of freed handles of physical memory, with the most recently freed at the end.
    pub(crate) free_physical_handles: Vec<u64>,
    next_id: u64,
    next_address: u64,
    /// Start and length of the free part of the block for small allocations.
    block: (u64, u64),
    /// Freed addresses by length, with the most recently freed at the end.
    free: HashMap<u64, Vec<u64>>,
    pub(crate) calls: Calls<Fault>,
}

impl State {
    pub(crate) fn new(profile: Profile) -> Self {
        static GENERATION: AtomicU64 = AtomicU64::new(1);
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        let pages = Pages::default();
        Self {
            generation,
            started: false,
            sticky: None,
            allocations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            physical: HashMap::new(),
            contexts: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            used: vec![0; profile.devices as usize],
            flushed: Vec::new(),
            undefined_calls: 0,
            lookups: 0,
            hold: None,
            capture: None,
            forgotten: None,
            next_handle: 0x1000,
            free_physical_handles: Vec::new(),
            // Identities are unique in the process, even across drivers that run one after the
            // other.
            next_id: generation << 32 | 1,
            next_address: pages.first().next_multiple_of(GRANULARITY),
            block: (0, 0),
            free: HashMap::new(),
            calls: Calls::default(),
            pages,
            profile,
        }
    }

    /// Counts a call of a function. Fails if a fault is injected into it or the device is lost.
    pub(crate) fn call(&mut self, symbol: &'static str) -> Result<(), CuResult> {
        if let Some(Fault { code, loses }) = self.calls.enter(symbol) {
            if loses {
                self.sticky = Some(code);
            }
            return Err(code);
        }
        if IN_CALLBACK.get() {
            return Err(CuResult::CUDA_ERROR_NOT_PERMITTED);
        }
        if let Some(valid) = &mut self.capture
            && NOT_DURING_CAPTURE.contains(&symbol)
            && CAPTURE_MODE.get() != sys::CU_STREAM_CAPTURE_MODE_RELAXED
        {
            *valid = false;
            return Err(CuResult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        match self.sticky {
            // `cuda.h`: "any further CUDA work will return the same error".
            Some(code) => Err(code),
            None => Ok(()),
        }
    }

    /// Returns the number of open files that back the driver's memory.
    pub(crate) fn files(&self) -> usize {
        self.pages.files() + self.physical.len()
    }

    pub(crate) fn heal(&mut self) {
        self.calls.heal();
        self.forgotten = None;
        self.sticky = None;
    }

    pub(crate) fn live(&self) -> Live {
        let count =
            |of: fn(&Kind) -> bool| self.allocations.values().filter(|one| of(&one.kind)).count();
        Live {
            allocations: count(|kind| {
                matches!(kind, Kind::Memory | Kind::Pool | Kind::Managed | Kind::Host)
            }),
            reservations: count(|kind| *kind == Kind::Reservation),
            handles: self.physical.values().filter(|one| one.references > 0).count(),
            mappings: self.mappings.len(),
            registered: count(|kind| *kind == Kind::Registered),
            imported: count(|kind| matches!(kind, Kind::Imported { .. })),
            primary_references: self
                .contexts
                .values()
                .filter(|one| one.primary)
                .map(|one| one.references)
                .sum(),
            streams: self.streams.len(),
            events: self.events.len(),
            copies: self.streams.values().map(|stream| stream.waiting.len()).sum(),
        }
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Returns a number for a handle of physical memory. Reuses the numbers of freed handles at
    /// once.
    pub(crate) fn take_physical_handle(&mut self) -> u64 {
        self.free_physical_handles.pop().unwrap_or_else(|| self.handle() as u64)
    }

    pub(crate) fn identity(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Returns the calling thread's current context. Fails if it has none, or if it was destroyed.
    pub(crate) fn current(&self) -> Result<usize, CuResult> {
        CONTEXTS.with_borrow_mut(|(generation, stack)| {
            if *generation != self.generation {
                (*generation, *stack) = (self.generation, Vec::new());
            }
            match stack.last() {
                None => Err(CuResult::CUDA_ERROR_INVALID_CONTEXT),
                Some(context) if self.contexts.contains_key(context) => Ok(*context),
                Some(_) => Err(CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
            }
        })
    }

    pub(crate) fn stack<T>(&self, with: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        CONTEXTS.with_borrow_mut(|(generation, stack)| {
            if *generation != self.generation {
                (*generation, *stack) = (self.generation, Vec::new());
            }
            with(stack)
        })
    }

    pub(crate) fn device_of(&self, context: usize) -> u32 {
        self.contexts[&context].device
    }

    /// Returns the allocation that contains an address, with the allocation's first address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.len).then_some((*start, allocation))
    }

    /// Returns the VMM mapping that contains an address, with the mapping's first address.
    pub(crate) fn mapping_around(&self, address: u64) -> Option<(u64, Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.len).then_some((*start, *mapping))
    }

    /// Reserves a range of addresses, in multiples of [`GRANULARITY`] bytes.
    pub(crate) fn take_addresses(&mut self, len: u64) -> Result<u64, CuResult> {
        let rounded = len.checked_next_multiple_of(GRANULARITY);
        let len = rounded.ok_or(CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        if let Some(address) = self.free.get_mut(&len).and_then(Vec::pop) {
            return Ok(address);
        }
        let address = self.next_address;
        let end = address.checked_add(len).filter(|end| self.pages.holds(end - 1));
        self.next_address = end.ok_or(CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(address)
    }

    pub(crate) fn give_addresses(&mut self, address: u64, len: u64) {
        self.free.entry(len.next_multiple_of(GRANULARITY)).or_default().push(address);
    }

    /// Allocates memory of a kind on the current context's device. The fake reuses freed addresses
    /// at once, so that tests see reused addresses.
    pub(crate) fn take_memory(&mut self, len: u64, kind: Kind) -> Result<u64, CuResult> {
        let context = self.current()?;
        let device = self.device_of(context);
        if len == 0 {
            return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
        }
        let host = kind == Kind::Host;
        let used = self.used[device as usize].checked_add(len);
        if !host && used.is_none_or(|used| used > self.profile.memory) {
            return Err(CuResult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let address = match kind {
            Kind::Memory | Kind::Pool if len < SMALL => self.take_small(len)?,
            _ => {
                let address = self.take_addresses(len)?;
                let mapped = matches!(kind, Kind::Managed | Kind::Host);
                self.pages
                    .back(address, len.next_multiple_of(page()), mapped)
                    .map_err(|_| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
                address
            }
        };
        if !host {
            self.used[device as usize] += len;
        }
        let context = if kind == Kind::Pool { 0 } else { context };
        let id = self.identity();
        let sync_memops = false;
        self.allocations
            .insert(address, Allocation { len, kind, device, context, id, sync_memops });
        Ok(address)
    }

    fn take_small(&mut self, len: u64) -> Result<u64, CuResult> {
        let len = small_size(len);
        if let Some(address) = self.free.get_mut(&len).and_then(Vec::pop) {
            return Ok(address);
        }
        if len >= SHARES_PAGES {
            let (at, rest) = self.block;
            let skipped = (at.next_multiple_of(page()) - at).min(rest);
            self.block = (at + skipped, rest - skipped);
        }
        if self.block.1 < len {
            let block = self.take_addresses(GRANULARITY)?;
            self.pages
                .back(block, GRANULARITY, false)
                .map_err(|_| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
            self.block = (block, GRANULARITY);
        }
        let address = self.block.0;
        self.block = (address + len, self.block.1 - len);
        Ok(address)
    }

    pub(crate) fn free_memory(&mut self, address: u64) -> Result<(), CuResult> {
        let allocation =
            self.allocations.remove(&address).ok_or(CuResult::CUDA_ERROR_INVALID_VALUE)?;
        let len = allocation.len;
        if allocation.kind != Kind::Host {
            self.used[allocation.device as usize] -= len;
        }
        match allocation.kind {
            Kind::Memory | Kind::Pool if len < SMALL => {
                // The pages stay in the block, so a stale registration reaches the next allocation
                // at the address.
                self.free.entry(small_size(len)).or_default().push(address);
            }
            _ => {
                self.pages.clear(address, len.next_multiple_of(page()));
                self.give_addresses(address, len);
            }
        }
        Ok(())
    }

    /// Unmaps memory that was opened from another process, however often it was opened.
    pub(crate) fn forget_imported(&mut self, pointer: u64) {
        let Some(Allocation { len, .. }) = self.allocations.remove(&pointer) else { return };
        let start = pointer - pointer % page();
        let whole = (pointer + len).next_multiple_of(page()) - start;
        self.pages.clear(start, whole);
        self.give_addresses(start, whole);
    }

    /// Destroys a context with the memory, streams and events that belong to it.
    pub(crate) fn destroy_context(&mut self, context: usize) {
        let ours = |allocation: &Allocation| allocation.context == context;
        let memory: Vec<_> =
            self.allocations.iter().filter(|(_, one)| ours(one)).map(|(at, _)| *at).collect();
        for address in memory {
            match self.allocations[&address].kind {
                Kind::Registered => drop(self.allocations.remove(&address)),
                Kind::Imported { .. } => self.forget_imported(address),
                _ => self.free_memory(address).expect("listed just now"),
            }
        }
        self.streams.retain(|_, stream| stream.context != context);
        self.events.retain(|_, event| event.context != context);
        self.contexts.remove(&context);
    }

    /// Runs the oldest pending copy of a stream. Returns false if there is none.
    pub(crate) fn step(&mut self, stream: usize) -> bool {
        let Some(copy) =
            self.streams.get_mut(&stream).and_then(|stream| stream.waiting.pop_front())
        else {
            return false;
        };
        self.move_bytes(copy);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.done += 1;
        }
        true
    }

    pub(crate) fn finish(&mut self, stream: usize) {
        while self.step(stream) {}
    }

    /// Returns a pointer to the source or destination of a copy. Addresses outside the driver's
    /// window are host memory.
    pub(crate) fn side(&self, address: u64, len: usize) -> Result<*mut u8, CuResult> {
        let end = address.checked_add(len as u64).ok_or(CuResult::CUDA_ERROR_INVALID_VALUE)?;
        if !self.pages.holds(address) {
            return Ok(std::ptr::with_exposed_provenance_mut(address as usize));
        }
        let (start, allocation) = self.around(address).ok_or(CuResult::CUDA_ERROR_INVALID_VALUE)?;
        if end > start + allocation.len {
            return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
        }
        if allocation.kind == Kind::Reservation {
            let mut at = address;
            while at < end {
                let mapped = self.mapping_around(at).filter(|(_, mapping)| mapping.accessible);
                let (start, mapping) = mapped.ok_or(CuResult::CUDA_ERROR_INVALID_VALUE)?;
                at = start + mapping.len;
            }
        }
        Ok(self.pages.at(address))
    }

    pub(crate) fn move_bytes(&self, copy: Copy) {
        let Copy { to, from, len } = copy;
        if let (Ok(to), Ok(from)) = (self.side(to, len), self.side(from, len)) {
            // SAFETY: `side` checked that each range lies in live memory of the driver, or is host
            // memory. The caller of the copy keeps host memory valid until the copy has ended.
            unsafe { libc::memmove(to.cast(), from.cast_const().cast(), len) };
        }
    }
}
