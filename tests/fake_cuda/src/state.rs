//! State of the driver: contexts, allocations, mappings, streams, and injected faults.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, VecDeque},
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_fake_common::{Calls, PAGE, Pages};
use hmem_iface_cuda::sys::{CuMemAllocationProp, CuResult};

use crate::profile::Profile;

/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM` of devices with 2 MiB pages.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// Alignment of addresses of `cuMemAlloc`. The CUDA programming guide says "at least 256 bytes".
const ALIGNMENT: u64 = 512;

/// Returns the size of a small allocation. Decided here: allocations of a page and more are whole
/// pages, so that only smaller ones share a page and their dma-bufs overlap.
fn small_size(len: u64) -> u64 {
    if len < PAGE { len.next_multiple_of(ALIGNMENT) } else { len.next_multiple_of(PAGE) }
}
/// Smaller allocations share blocks of [`GRANULARITY`], so that their pages have neighbours.
const SMALL: u64 = 1 << 20;

thread_local! {
    /// Generation of the driver, and the thread's contexts in it, the current one last.
    pub(crate) static CONTEXTS: RefCell<(u64, Vec<usize>)> =
        const { RefCell::new((0, Vec::new())) };
}

/// Kind of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Pool,
    Managed,
    Host,
    Registered,
    Reservation,
    /// Memory of another process, by the inode of its file.
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
    /// The context of the allocation. It is null for VMM and stream-ordered memory.
    pub(crate) context: usize,
    pub(crate) id: u64,
    pub(crate) sync_memops: bool,
}

/// Physical memory of `cuMemCreate`.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) len: u64,
    pub(crate) properties: CuMemAllocationProp,
    /// `cuMemCreate`'s reference and those of `cuMemRetainAllocationHandle`.
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
    /// References to a primary context; 1 for another.
    pub(crate) references: u32,
    pub(crate) primary: bool,
}

/// A copy that was submitted to a stream.
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

/// Effect of an injected fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) code: CuResult,
    /// True if the fault also loses the device.
    pub(crate) loses: bool,
}

impl From<CuResult> for Fault {
    fn from(code: CuResult) -> Self {
        Self { code, loses: false }
    }
}

/// A function whose calls are held, and the number of held calls.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) symbol: &'static str,
    pub(crate) held: usize,
}

/// The number of live objects of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Allocations of all kinds that have no field of their own here.
    pub allocations: usize,
    /// Reserved address ranges.
    pub reservations: usize,
    /// Handles of physical memory.
    pub handles: usize,
    /// Mappings of physical memory.
    pub mappings: usize,
    /// Host ranges that are page-locked.
    pub registered: usize,
    /// Allocations of other processes that are open.
    pub imported: usize,
    /// References to primary contexts.
    pub primary_references: u32,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Copies in flight.
    pub copies: usize,
}

#[derive(Debug)]
pub(crate) struct State {
    /// Differs from the generations of earlier drivers in this process.
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
    /// Contexts in which inbound writes were flushed since the last request for them.
    pub(crate) flushed: Vec<usize>,
    /// Number of attempts to make an unknown context current.
    pub(crate) strangers: u64,
    pub(crate) hold: Option<Hold>,
    /// Base of the allocation that the driver forgets, and the number of queries until it does.
    pub(crate) forgotten: Option<(u64, u64)>,
    next_handle: usize,
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
            strangers: 0,
            hold: None,
            forgotten: None,
            next_handle: 0x1000,
            // Identities are unique in a process, across its successive drivers too.
            next_id: generation << 32 | 1,
            next_address: pages.first().next_multiple_of(GRANULARITY),
            block: (0, 0),
            free: HashMap::new(),
            calls: Calls::default(),
            pages,
            profile,
        }
    }

    /// Counts a call, and fails if a fault is injected into it.
    pub(crate) fn call(&mut self, symbol: &'static str) -> Result<(), CuResult> {
        if let Some(Fault { code, loses }) = self.calls.enter(symbol) {
            if loses {
                self.sticky = Some(code);
            }
            return Err(code);
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

    pub(crate) fn identity(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Returns the thread's current context.
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

    /// Returns the allocation that contains an address, with its first address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.len).then_some((*start, allocation))
    }

    /// Returns the mapping that contains an address of a reservation, with its first address.
    pub(crate) fn mapping_around(&self, address: u64) -> Option<(u64, Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.len).then_some((*start, *mapping))
    }

    /// Allocates addresses in whole blocks.
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

    /// Allocates memory of a device. Decided here: freed addresses are reused at once, so that
    /// tests see reused addresses.
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
                    .back(address, len.next_multiple_of(PAGE), mapped)
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
        if len >= PAGE {
            let (at, rest) = self.block;
            let skipped = (at.next_multiple_of(PAGE) - at).min(rest);
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
                // The block keeps its pages: a stale registration reaches the next allocation.
                self.free.entry(small_size(len)).or_default().push(address);
            }
            _ => {
                self.pages.clear(address, len.next_multiple_of(PAGE));
                self.give_addresses(address, len);
            }
        }
        Ok(())
    }

    /// Closes memory of another process, with all its references.
    pub(crate) fn forget_imported(&mut self, pointer: u64) {
        let Some(Allocation { len, .. }) = self.allocations.remove(&pointer) else { return };
        let start = pointer - pointer % PAGE;
        let whole = (pointer + len).next_multiple_of(PAGE) - start;
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

    /// Runs the oldest copy of a stream. Returns false if there is none.
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

    /// Returns the driver's pointer to a side of a copy. Unknown addresses are host memory.
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
            // SAFETY: `side` found both in live memory of the driver, or outside its window. The
            // caller of the copy promised that host memory is valid until the copy has ended.
            unsafe { libc::memmove(to.cast(), from.cast_const().cast(), len) };
        }
    }
}
