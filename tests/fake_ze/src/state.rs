//! State of the driver: contexts, allocations, command lists, and injected faults.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd},
};

use hmem_fake_common::{Calls, Pages, another};
use hmem_iface_ze::sys::{self, ZeResult};

use crate::profile::Profile;

/// Alignment of the addresses and sizes of allocations, in bytes.
const GRANULARITY: u64 = 64 << 10;
/// Size of a pool in bytes. `POOLED` is the size of the largest allocation from a pool, and `GRAIN`
/// is the alignment of such allocations.
const POOL: u64 = 4 << 20;
const POOLED: u64 = 1 << 20;
const GRAIN: u64 = 512;

/// A live allocation.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) len: u64,
    /// Memory type, a `ZE_MEMORY_TYPE_*`.
    pub(crate) kind: u32,
    pub(crate) id: u64,
    /// Handle of the device.
    pub(crate) device: usize,
    /// First address of the pool that contains the allocation, if any.
    pub(crate) pool: Option<u64>,
    /// The fd of the allocation's exports, which the driver owns, and the number of exports that
    /// use it.
    pub(crate) exported: Option<(OwnedFd, u32)>,
    /// File system and inode of the dma-buf, for an import.
    imported: Option<(u64, u64)>,
}

/// A memory block from which the driver serves small allocations.
#[derive(Debug)]
struct Pool {
    id: u64,
    kind: u32,
    device: usize,
    /// Number of bytes that were ever used, from the start of the pool.
    taken: u64,
    /// Addresses of freed allocations, by their length.
    free: HashMap<u64, Vec<u64>>,
}

/// Parameters of a new allocation.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) len: u64,
    pub(crate) kind: u32,
    pub(crate) device: usize,
    pub(crate) exportable: bool,
    pub(crate) import: Option<OwnedFd>,
}

impl Request {
    pub(crate) fn device(len: u64, device: usize) -> Self {
        let kind = sys::ZE_MEMORY_TYPE_DEVICE;
        Self { len, kind, device, exportable: false, import: None }
    }
}

/// A copy that was submitted and has not run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Event {
    /// The copy that signals the event, and the number of queries for it so far.
    pub(crate) waits_for: Option<(Copy, u32)>,
    pub(crate) signalled: bool,
}

/// The number of live objects of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Number of live contexts.
    pub contexts: usize,
    /// Number of live allocations. Pools are not counted.
    pub allocations: usize,
    /// Number of live command lists.
    pub lists: usize,
    /// Number of live event pools.
    pub pools: usize,
    /// Number of live events.
    pub events: usize,
    /// Number of exports whose fd the caller has not returned to the driver.
    pub exports: u32,
    /// Number of calls whose behaviour the specification leaves undefined.
    pub undefined: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) profile: Profile,
    pub(crate) started: bool,
    pub(crate) pages: Pages,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// Pools by their first address.
    pools: BTreeMap<u64, Pool>,
    /// Live contexts by handle, each with the number of its driver.
    pub(crate) contexts: HashMap<usize, usize>,
    /// Live command lists by handle, each with its device.
    pub(crate) lists: HashMap<usize, usize>,
    /// Live event pools by handle, each with its device.
    pub(crate) event_pools: HashMap<usize, usize>,
    pub(crate) events: HashMap<usize, Event>,
    pub(crate) undefined: u64,
    /// True if the device was lost. No copy ends after that.
    pub(crate) lost: bool,
    pub(crate) calls: Calls<ZeResult>,
    next_handle: usize,
    next_id: u64,
    next_address: u64,
    /// Freed addresses by length, with the most recently freed at the end.
    free: HashMap<u64, Vec<u64>>,
}

const INVALID: ZeResult = ZeResult::ZE_RESULT_ERROR_INVALID_ARGUMENT;
const NO_MEMORY: ZeResult = ZeResult::ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;

impl State {
    pub(crate) fn new(profile: Profile) -> Self {
        let pages = Pages::default();
        let next_address = pages.first().next_multiple_of(2 << 20);
        Self {
            profile,
            started: false,
            pages,
            allocations: BTreeMap::new(),
            pools: BTreeMap::new(),
            contexts: HashMap::new(),
            lists: HashMap::new(),
            event_pools: HashMap::new(),
            events: HashMap::new(),
            undefined: 0,
            lost: false,
            calls: Calls::default(),
            next_handle: 0x10_0000,
            next_id: 0,
            next_address,
            free: HashMap::new(),
        }
    }

    /// Counts a call of a function. Fails if a fault is injected into it.
    pub(crate) fn call(&mut self, symbol: &'static str) -> Result<(), ZeResult> {
        let Some(code) = self.calls.enter(symbol) else { return Ok(()) };
        if code == ZeResult::ZE_RESULT_ERROR_DEVICE_LOST {
            // A lost device runs no pending copy.
            self.events.values_mut().for_each(|event| event.waits_for = None);
            self.lost = true;
        }
        Err(code)
    }

    /// Removes all faults, a lost device included.
    pub(crate) fn heal(&mut self) {
        self.calls.heal();
        self.lost = false;
    }

    /// Counts a call whose behaviour the specification leaves undefined, and returns an error.
    pub(crate) fn undefined<T>(&mut self) -> Result<T, ZeResult> {
        self.undefined += 1;
        Err(INVALID)
    }

    pub(crate) fn live(&self) -> Live {
        let exported = self.allocations.values().filter_map(|one| one.exported.as_ref());
        Live {
            contexts: self.contexts.len(),
            allocations: self.allocations.len(),
            lists: self.lists.len(),
            pools: self.event_pools.len(),
            events: self.events.len(),
            exports: exported.map(|(_, count)| count).sum(),
            undefined: self.undefined,
        }
    }

    /// Returns the number of open files that back the driver's memory and exports.
    pub(crate) fn files(&self) -> usize {
        let exported = self.allocations.values().filter(|one| one.exported.is_some());
        self.pages.files() + exported.count()
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Returns the handles of a driver's root devices. The handle of a sub-device is that of its
    /// root device plus one.
    pub(crate) fn devices(&self, driver: usize) -> Vec<usize> {
        (0..self.profile.devices).map(|number| (driver + 1) << 12 | number << 4).collect()
    }

    /// Returns the number of the driver that a device belongs to.
    pub(crate) fn driver_of(device: usize) -> usize {
        (device >> 12) - 1
    }

    fn address(&mut self, size: u64) -> u64 {
        if let Some(address) = self.free.get_mut(&size).and_then(Vec::pop) {
            return address;
        }
        let address = self.next_address;
        // A gap, so that the end of one allocation is not the start of another.
        self.next_address += size.next_multiple_of(GRANULARITY) + GRANULARITY;
        address
    }

    fn identity(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn allocate(&mut self, request: Request) -> Result<u64, ZeResult> {
        let Request { len, kind, device, exportable, import } = request;
        let poolable = kind != sys::ZE_MEMORY_TYPE_SHARED && !exportable && import.is_none();
        if self.profile.pools && poolable && len <= POOLED {
            return self.allocate_in_pool(len, kind, device);
        }
        let stat = import.as_ref().map(rustix::fs::fstat).transpose().map_err(|_| INVALID)?;
        let imported = stat.map(|stat| (stat.st_dev, stat.st_ino));
        let again = |one: &Allocation| imported.is_some() && one.imported == imported;
        let found = self.allocations.iter().find(|(_, one)| again(one) && one.device == device);
        if let Some(address) = found.map(|(address, _)| *address) {
            // Intel's driver finds the buffer by its GEM handle, and returns the address of the
            // first import with a new number.
            let id = self.identity();
            self.allocations.get_mut(&address).expect("found").id = id;
            return Ok(address);
        }
        let size = len.next_multiple_of(GRANULARITY);
        let address = self.address(size);
        let on_host = kind != sys::ZE_MEMORY_TYPE_DEVICE;
        match import {
            Some(file) => self.pages.place(address, size, file),
            None => self.pages.back(address, size, on_host),
        }
        .map_err(|_| NO_MEMORY)?;
        let id = self.identity();
        let allocation = Allocation { len, kind, id, device, pool: None, exported: None, imported };
        self.allocations.insert(address, allocation);
        Ok(address)
    }

    /// Allocates from a pool of this memory type and device. Creates a pool if none has room.
    fn allocate_in_pool(&mut self, len: u64, kind: u32, device: usize) -> Result<u64, ZeResult> {
        let size = len.next_multiple_of(GRAIN);
        let fits = |pool: &Pool| {
            (pool.kind, pool.device) == (kind, device)
                && (pool.taken + size <= POOL || pool.free.contains_key(&size))
        };
        let found = self.pools.iter().find(|(_, pool)| fits(pool)).map(|(base, _)| *base);
        let base = match found {
            Some(base) => base,
            None => {
                let base = self.address(POOL);
                let on_host = kind != sys::ZE_MEMORY_TYPE_DEVICE;
                self.pages.back(base, POOL, on_host).map_err(|_| NO_MEMORY)?;
                let id = self.identity();
                let pool = Pool { id, kind, device, taken: GRAIN, free: HashMap::new() };
                self.pools.insert(base, pool);
                base
            }
        };
        let pool = self.pools.get_mut(&base).expect("found or made");
        let freed = pool.free.get_mut(&size).and_then(Vec::pop);
        let address = freed.unwrap_or_else(|| {
            pool.taken += size;
            base + pool.taken - size
        });
        let (id, pool) = (pool.id, Some(base));
        let (exported, imported) = (None, None);
        let allocation = Allocation { len, kind, id, device, pool, exported, imported };
        self.allocations.insert(address, allocation);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), ZeResult> {
        let Some(allocation) = self.allocations.remove(&address) else { return self.undefined() };
        if let Some(pool) = allocation.pool.and_then(|pool| self.pools.get_mut(&pool)) {
            let size = allocation.len.next_multiple_of(GRAIN);
            pool.free.entry(size).or_default().push(address);
            return Ok(());
        }
        let size = allocation.len.next_multiple_of(GRANULARITY);
        self.pages.clear(address, size);
        self.free.entry(size).or_default().push(address);
        Ok(())
    }

    /// Returns the allocation that contains an address, with the allocation's first address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.len).then_some((*base, allocation))
    }

    /// Returns the allocation that contains an address or is followed by it, with the allocation's
    /// first address. Intel's driver also answers for the padding that follows an allocation in a
    /// pool.
    pub(crate) fn around_with_padding(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        let len = match allocation.pool {
            Some(_) => allocation.len.next_multiple_of(GRAIN),
            None => allocation.len,
        };
        (address - base < len).then_some((*base, allocation))
    }

    /// Returns the memory type, identity and device of the allocation or pool that contains an
    /// address.
    pub(crate) fn memory_at(&self, address: u64) -> Option<(u32, u64, usize)> {
        if let Some((_, one)) = self.around(address) {
            return Some((one.kind, one.id, one.device));
        }
        let (base, pool) = self.pools.range(..=address).next_back()?;
        (address - base < POOL).then_some((pool.kind, pool.id, pool.device))
    }

    /// Exports the allocation that contains an address, and returns the fd of the export.
    pub(crate) fn export(&mut self, address: u64) -> Result<i32, ZeResult> {
        let Some((base, allocation)) = self.around(address) else { return Err(INVALID) };
        if allocation.kind == sys::ZE_MEMORY_TYPE_SHARED {
            return Err(ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE);
        }
        if !self.profile.exports {
            return self.profile.bogus_fd.ok_or(ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE);
        }
        let (start, size) = match allocation.pool {
            Some(pool) => (pool, POOL),
            None => (base, allocation.len.next_multiple_of(GRANULARITY)),
        };
        let size = if self.profile.tiles { size / 2 } else { size };
        let kept = allocation.exported.is_some();
        if self.profile.own_fds || !kept {
            let fd = self.pages.export(start, size).map_err(|_| NO_MEMORY)?.ok_or(NO_MEMORY)?;
            if self.profile.own_fds {
                return Ok(fd.into_raw_fd());
            }
            self.allocations.get_mut(&base).expect("around").exported = Some((fd, 0));
        }
        let exported = self.allocations.get_mut(&base).and_then(|one| one.exported.as_mut());
        let (fd, count) = exported.expect("exported");
        *count += 1;
        Ok(fd.as_raw_fd())
    }

    /// Ends one export that uses `fd`. Closes the fd with the last export, as `zeMemPutIpcHandle`
    /// does, or with this one if the profile has `first_put_closes`.
    pub(crate) fn put(&mut self, fd: i32) -> Result<(), ZeResult> {
        let mut all = self.allocations.values_mut();
        let of_fd = |one: &&mut Allocation| {
            one.exported.as_ref().is_some_and(|(own, _)| own.as_raw_fd() == fd)
        };
        let Some(allocation) = all.find(of_fd) else { return Err(INVALID) };
        if let Some((_, count)) = &mut allocation.exported {
            *count -= 1;
            if *count == 0 || self.profile.first_put_closes {
                allocation.exported = None;
            }
        }
        Ok(())
    }

    /// Opens the file behind the fd of a dma-buf again, to import it.
    pub(crate) fn import(fd: i32) -> Result<OwnedFd, ZeResult> {
        if fd < 0 {
            return Err(INVALID);
        }
        // SAFETY: the caller of an import keeps the fd open for the call.
        another(unsafe { BorrowedFd::borrow_raw(fd) }).map_err(|_| INVALID)
    }

    /// Executes a submitted copy.
    pub(crate) fn copy(&self, copy: Copy) {
        let (to, from) = (self.pages.at(copy.to), self.pages.at(copy.from));
        // SAFETY: `zeCommandListAppendMemoryCopy` found both sides in live allocations.
        unsafe { std::ptr::copy(from, to, copy.len) };
    }
}
