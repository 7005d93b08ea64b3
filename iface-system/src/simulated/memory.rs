//! Allocation, free, and the table of live allocations.

#![allow(unsafe_code, reason = "implements the trait, with an unsafe free")]

use std::collections::BTreeMap;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    Result, Segment,
    iface::{AllocRequest, Allocator, Revocation, SegmentMap},
};

use super::{
    FreeDetection, SimulatedInner,
    address_space::AddressSpace,
    arena::{FileArenas, FileExtent},
    faults::DeviceCall,
    reservations::Reservations,
    sys::{place_nothing, place_shared, punch_hole},
    table::{MAX_ENTRIES, TableWriter},
};

/// One physical segment of an allocation.
#[derive(Debug)]
pub(crate) struct PhysicalSegment {
    pub(crate) extent: FileExtent,
    pub(crate) exportable: bool,
}

/// The state of a live allocation.
#[derive(Debug)]
pub(crate) struct SimulatedAllocation {
    pub(crate) allocation: Allocation,
    /// The segments in address order. Together they are as long as the allocation, rounded up to
    /// pages.
    pub(crate) segments: Vec<PhysicalSegment>,
    /// True once an fd of the memory file or an IPC handle was exported. The export of a genuine
    /// dma-buf does not count, because the dma-buf keeps its pages alive itself.
    pub(crate) exported: bool,
    /// Index of the word in the memory file's header that holds the allocation's identity for other
    /// processes. `None` until the allocation is exported by an IPC handle.
    pub(crate) stamp: Option<u16>,
    /// The revocation of all dma-bufs that were exported since the last one. `None` without such an
    /// export.
    pub(crate) revocation: Option<Revocation>,
    /// True while a thread frees the allocation.
    being_freed: bool,
}

/// The state that allocations and frees of a simulated iface change. A single lock protects it.
#[derive(Debug)]
pub(crate) struct SimulatedState {
    pub(crate) arenas: FileArenas,
    pub(crate) addresses: AddressSpace,
    pub(crate) reservations: Reservations,
    writer: TableWriter,
    /// The live allocations, each at the index that its entry has in the page table.
    pub(crate) records: Vec<Option<SimulatedAllocation>>,
    /// The free indices of `records`, which new allocations use first.
    free_numbers: Vec<u32>,
    /// Identity of the next allocation.
    next_id: u64,
    /// Bytes in use on each device.
    used: Vec<u64>,
    /// Number of the live allocations that this iface allocated.
    pub(crate) live: u64,
    /// Total length in bytes of the live allocations that this iface allocated.
    pub(crate) live_bytes: u64,
    /// Number of open allocations of other processes.
    pub(crate) opened: u64,
    /// Number of dma-buf exports that were not released.
    pub(crate) exports: u64,
    /// Start address and length of each page-locked host range.
    pub(crate) host_registered: BTreeMap<u64, u64>,
}

impl SimulatedState {
    pub(crate) fn new(
        arenas: FileArenas,
        addresses: AddressSpace,
        writer: TableWriter,
        devices: u32,
    ) -> Self {
        Self {
            arenas,
            addresses,
            reservations: Reservations::default(),
            writer,
            records: Vec::new(),
            free_numbers: Vec::new(),
            next_id: 1,
            used: vec![0; devices as usize],
            live: 0,
            live_bytes: 0,
            opened: 0,
            exports: 0,
            host_registered: BTreeMap::new(),
        }
    }

    /// Frees addresses. Addresses inside a reservation return to that reservation. Other addresses
    /// can be used by any new allocation.
    pub(crate) fn give_addresses(&mut self, at: u64, len: u64) {
        if !self.reservations.give(at, len) {
            self.addresses.give(at, len);
        }
    }

    fn take_number(&mut self) -> Option<u32> {
        self.free_numbers.pop().or_else(|| {
            (self.records.len() < MAX_ENTRIES).then(|| {
                self.records.push(None);
                self.records.len() as u32 - 1
            })
        })
    }
}

impl Allocator for SimulatedInner {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        self.allocate_at(request, None)
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.call(DeviceCall::Free)?;
        self.end(allocation, false, "free")
    }

    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        self.device(device).map(|_| true)
    }
}

impl SimulatedInner {
    /// Allocates memory at the reserved address `place`, or at an address of the iface's choice if
    /// `place` is `None`.
    pub(crate) fn allocate_at(
        &self,
        request: &AllocRequest,
        place: Option<Address>,
    ) -> Result<Allocation> {
        let refused = |kind| {
            Error::new(kind, "allocate")
                .iface(&self.config)
                .context("length", request.len)
                .context("kind", request.kind.name())
        };
        if request.len == 0 {
            return Err(refused(ErrorKind::ZeroLength).remedy("allocate at least one byte"));
        }
        let device = match request.kind {
            AllocationKind::Host => None,
            AllocationKind::Device
            | AllocationKind::Managed
            | AllocationKind::StreamOrdered
            | AllocationKind::Virtual => Some(self.device(request.device)?),
            _ => {
                return Err(
                    refused(ErrorKind::Unsupported).remedy("the system iface allocates this kind")
                );
            }
        };
        let len = self.whole_pages(request.len);
        let out_of_memory = || refused(ErrorKind::OutOfResources).errno(hmem_core::Errno(12));
        let used_up = || {
            out_of_memory()
                .remedy("the window of addresses is used up: build the device with a larger one")
        };

        let mut state = self.state.lock();
        if let Some(DeviceId(device)) = device {
            let used = state.used[device as usize];
            let total = len.and_then(|len| used.checked_add(len));
            if total.is_none_or(|total| total > self.config.memory_per_device) {
                return Err(out_of_memory()
                    .device(DeviceId(device))
                    .context("used", used)
                    .context("memory", self.config.memory_per_device)
                    .remedy("free memory, or build the devices with more memory"));
            }
        }
        let len = len.ok_or_else(used_up)?;
        self.call(DeviceCall::ReserveAddress)?;
        let at = match place {
            None => state.addresses.take(len).ok_or_else(used_up)?,
            Some(place) => {
                let at = place.0.wrapping_sub(self.window_start());
                let free = state.reservations.take(at, len);
                free.then_some(at).ok_or_else(|| {
                    refused(ErrorKind::InvalidArgument)
                        .context("address", place)
                        .remedy("map inside one reservation, where no memory is mapped")
                })?
            }
        };
        let backed = self.back_memory(&mut state, request.kind, at, len);
        let segments = match backed {
            Ok(segments) => segments,
            Err(error) => {
                state.give_addresses(at, len);
                return Err(error.iface(&self.config));
            }
        };
        let range = AddressRange::new(Address(self.window_start() + at), request.len)?;
        let shape = (range, request.kind, device);
        let allocation = match self.enter(&mut state, shape, segments) {
            Ok(allocation) => allocation,
            Err((error, segments)) => {
                self.unback_memory(&mut state, request.kind, at, segments);
                state.give_addresses(at, len);
                return Err(error);
            }
        };
        if let Some(DeviceId(device)) = device {
            state.used[device as usize] += len;
        }
        Ok(allocation)
    }

    /// Rounds a length up to whole pages. Returns `None` if the result is longer than the window of
    /// addresses.
    pub(crate) fn whole_pages(&self, len: u64) -> Option<u64> {
        let window = self.table.window().len();
        len.checked_next_multiple_of(self.page).filter(|len| *len <= window)
    }

    /// Creates the segments of an allocation at offset `at` of the iface's address range. Maps them
    /// if the CPU may access this kind of memory. Undoes everything if a step fails.
    fn back_memory(
        &self,
        state: &mut SimulatedState,
        kind: AllocationKind,
        at: u64,
        len: u64,
    ) -> Result<Vec<PhysicalSegment>> {
        let segmented = kind == AllocationKind::Virtual;
        let step = if segmented { self.config.segment_len } else { len };
        let mut segments = Vec::new();
        let mut done = 0;
        while done < len {
            let this = step.min(len - done);
            let taken = self
                .call(DeviceCall::CreateMemory)
                .and_then(|()| state.arenas.take(this.next_multiple_of(self.page), segmented));
            match taken {
                Ok(extent) => {
                    // A segment may end inside its last page, which holds nothing else.
                    let extent = extent.part(0, this);
                    segments.push(PhysicalSegment { extent, exportable: true });
                }
                Err(error) => {
                    self.unback_memory(state, AllocationKind::Device, at, segments);
                    return Err(error);
                }
            }
            done += this;
        }
        if kind.cpu_accessible()
            && let Err(error) = self.map_for_cpu(at, &segments)
        {
            self.unback_memory(state, kind, at, segments);
            return Err(error);
        }
        Ok(segments)
    }

    fn map_for_cpu(&self, mut at: u64, segments: &[PhysicalSegment]) -> Result<()> {
        for PhysicalSegment { extent, .. } in segments {
            self.call(DeviceCall::MapMemory)?;
            place_shared(&self.window, at, extent.len as usize, extent.file.fd(), extent.offset)
                .map_err(|errno| Error::os(errno, "mmap").context("length", extent.len))?;
            at += extent.len;
        }
        Ok(())
    }

    /// Undoes [`SimulatedInner::back_memory`], for an allocation that no lookup can find yet.
    fn unback_memory(
        &self,
        state: &mut SimulatedState,
        kind: AllocationKind,
        at: u64,
        segments: Vec<PhysicalSegment>,
    ) {
        if kind.cpu_accessible() {
            let len: u64 = segments.iter().map(|segment| segment.extent.len).sum();
            if let Err(errno) = place_nothing(&self.window, at, len as usize) {
                tracing::error!(%errno, "the memory of a failed allocation stays mapped");
            }
        }
        for segment in segments {
            state.arenas.give(segment.extent, false);
        }
    }

    /// Assigns an identity to a new allocation, and makes the allocation visible to lookups. On an
    /// error, hands the segments back to the caller.
    pub(crate) fn enter(
        &self,
        state: &mut SimulatedState,
        (range, kind, device): (AddressRange, AllocationKind, Option<DeviceId>),
        segments: Vec<PhysicalSegment>,
    ) -> Result<Allocation, (Error, Vec<PhysicalSegment>)> {
        let Some(number) = state.take_number() else {
            let error = Error::new(ErrorKind::OutOfResources, "allocate")
                .iface(&self.config)
                .context("limit", MAX_ENTRIES);
            return Err((error, segments));
        };
        let id = AllocationId(state.next_id);
        state.next_id += 1;
        let iface = self.config.kind;
        let allocation = Allocation { iface, range, device, kind, id, token: 0 };
        let record = SimulatedAllocation {
            allocation,
            segments,
            exported: false,
            stamp: None,
            revocation: None,
            being_freed: false,
        };
        if record.is_opened() {
            state.opened += 1;
        } else {
            state.live += 1;
            state.live_bytes += range.len();
        }
        state.records[number as usize] = Some(record);
        self.table.publish(&mut state.writer, number, &allocation);
        Ok(allocation)
    }

    /// Removes an allocation and releases its memory: notifies the subscribers, removes the
    /// allocation from lookups, and then frees the memory. `opened` is false for an allocation of
    /// this iface, and true for one of another process that this iface has opened.
    pub(crate) fn end(
        &self,
        allocation: &Allocation,
        opened: bool,
        operation: &'static str,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let number = self.live_number(&state, allocation, opened, operation)?;
        if let Some(record) = &mut state.records[number as usize] {
            record.being_freed = true;
        }
        drop(state);

        let record = match self.config.free_detection {
            FreeDetection::Identity => self.remove(number, allocation),
            FreeDetection::Callback => self
                .subscriptions
                .while_freeing(allocation.range, || self.remove(number, allocation)),
        }?;
        for PhysicalSegment { extent, .. } in
            record.segments.iter().filter(|_| !record.exported && !opened)
        {
            // The lock is not held here, since releasing the pages of a large allocation takes
            // long.
            if let Err(errno) = punch_hole(extent.file.fd(), extent.offset, extent.len) {
                tracing::warn!(%errno, len = extent.len, "freed pages stay in memory");
            }
        }
        let mut state = self.state.lock();
        let range = allocation.range;
        let len = range.len().next_multiple_of(self.page);
        state.give_addresses(range.start().0 - self.window_start(), len);
        if !opened && let Some(DeviceId(device)) = allocation.device {
            state.used[device as usize] -= len;
        }
        for segment in record.segments {
            state.arenas.give(segment.extent, record.exported);
        }
        Ok(())
    }

    fn remove(&self, number: u32, allocation: &Allocation) -> Result<SimulatedAllocation> {
        let mut state = self.state.lock();
        let range = allocation.range;
        if allocation.kind.cpu_accessible() {
            let at = range.start().0 - self.window_start();
            let len = range.len().next_multiple_of(self.page) as usize;
            if let Err(errno) = place_nothing(&self.window, at, len) {
                if let Some(record) = &mut state.records[number as usize] {
                    record.being_freed = false;
                }
                return Err(Error::os(errno, "mmap")
                    .iface(&self.config)
                    .context("allocation", range));
            }
        }
        self.table.withdraw(&mut state.writer, number, range);
        let record = state.records[number as usize]
            .take()
            .ok_or_else(|| self.not_live(allocation, "free"))?;
        state.free_numbers.push(number);
        if record.is_opened() {
            state.opened -= 1;
        } else {
            state.live -= 1;
            state.live_bytes -= range.len();
        }
        if let (Some(slot), Some(segment)) = (record.stamp, record.segments.first()) {
            state.arenas.give_stamp(&segment.extent, slot);
        }
        Ok(record)
    }

    /// Returns the number of an allocation's entry in the page table. `opened` must be true for an
    /// allocation of another process that this iface has opened, and false for one of this iface.
    ///
    /// # Errors
    /// InvalidArgument: the allocation is not live, a thread is freeing it, or `opened` is wrong.
    pub(crate) fn live_number(
        &self,
        state: &SimulatedState,
        allocation: &Allocation,
        opened: bool,
        operation: &'static str,
    ) -> Result<u32> {
        let number = self.table.entry_of(allocation.base());
        let record = number.and_then(|number| state.records[number as usize].as_ref());
        match (number, record) {
            (Some(number), Some(record))
                if record.allocation == *allocation
                    && record.is_opened() == opened
                    && !record.being_freed =>
            {
                Ok(number)
            }
            _ => Err(self.not_live(allocation, operation)),
        }
    }

    fn not_live(&self, allocation: &Allocation, operation: &'static str) -> Error {
        Error::new(ErrorKind::InvalidArgument, operation)
            .iface(&self.config)
            .context("allocation", allocation.range)
            .context("identity", allocation.id.0)
            .remedy(
                "pass a live allocation of this iface, once: to `free` if the iface allocated it, \
                 to `ipc_close` if the iface opened it",
            )
    }

    /// Returns the record of the allocation that contains all of `range`. Fails with OutOfBounds if
    /// there is none.
    pub(crate) fn record_of<'a>(
        &self,
        state: &'a mut SimulatedState,
        range: AddressRange,
    ) -> Result<&'a mut SimulatedAllocation> {
        let number = self.table.entry_of(range.start());
        let record = number.and_then(|number| state.records[number as usize].as_mut());
        match record {
            Some(record) if record.allocation.range.contains_range(range) => Ok(record),
            other => {
                let error = Error::new(ErrorKind::OutOfBounds, "resolve range")
                    .iface(&self.config)
                    .context("range", range)
                    .remedy("the range must lie in one live allocation");
                Err(match other {
                    Some(record) => error.context("allocation", record.allocation.range),
                    None => error,
                })
            }
        }
    }

    /// Returns the record of the allocation `of`, which must contain `range`.
    ///
    /// # Errors
    /// OutOfBounds: no live allocation contains the range, or one other than `of` contains it.
    pub(crate) fn record_of_allocation<'a>(
        &self,
        state: &'a mut SimulatedState,
        range: AddressRange,
        of: &Allocation,
    ) -> Result<&'a mut SimulatedAllocation> {
        let record = self.record_of(state, range)?;
        if record.allocation.id == of.id {
            return Ok(record);
        }
        Err(Error::new(ErrorKind::OutOfBounds, "resolve range")
            .iface(&self.config)
            .context("range", range)
            .context("why", "the allocation was freed, and another one has its addresses")
            .remedy("the range must lie in one live allocation"))
    }

    /// Returns the allocation that contains `range`, and the extents with the bytes of `range`.
    pub(crate) fn extents(&self, range: AddressRange) -> Result<(Allocation, Vec<FileExtent>)> {
        let mut state = self.state.lock();
        let record = self.record_of(&mut state, range)?;
        let extents = record.segments_of(range).map(|(_, extent, _)| extent).collect();
        Ok((record.allocation, extents))
    }
}

impl SegmentMap for SimulatedInner {
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        self.call(DeviceCall::Segments)?;
        let mut state = self.state.lock();
        let segments = self.record_of_allocation(&mut state, range, of)?.segments_of(range);
        let segments =
            segments.map(|(range, _, segment)| Segment { range, exportable: segment.exportable });
        Ok(segments.collect())
    }

    /// Returns the parts of `range` that belong to a live allocation. Each mapping in a reservation
    /// is an allocation of its own.
    fn mapped(&self, range: AddressRange) -> Result<Vec<AddressRange>> {
        self.call(DeviceCall::Segments)?;
        let state = self.state.lock();
        let live = state.records.iter().flatten().filter(|record| !record.being_freed);
        let mut mapped: Vec<_> =
            live.filter_map(|record| record.allocation.range.intersection(range)).collect();
        mapped.sort_unstable();
        Ok(mapped)
    }
}

impl SimulatedAllocation {
    /// Returns true if another process allocated the memory, and this iface has opened it through
    /// an IPC handle.
    fn is_opened(&self) -> bool {
        self.allocation.kind == AllocationKind::Imported
    }

    /// Returns the segments that contain bytes of `range`. Each comes with the part of `range` that
    /// lies in the segment, and with the extent of a memory file that holds exactly this part.
    /// `range` must lie in the allocation.
    pub(crate) fn segments_of(
        &self,
        range: AddressRange,
    ) -> impl Iterator<Item = (AddressRange, FileExtent, &PhysicalSegment)> {
        let mut start = self.allocation.base().0;
        self.segments.iter().filter_map(move |segment| {
            let base = start;
            start += segment.extent.len;
            let from = range.start().0.max(base);
            let to = (range.start().0 + range.len()).min(start);
            if from >= to {
                return None;
            }
            let range = AddressRange::checked(Address(from), to - from)?;
            Some((range, segment.extent.part(from - base, to - from), segment))
        })
    }

    /// Sets whether the segment that contains `address` can be exported to NICs.
    pub(crate) fn set_exportable(&mut self, address: Address, exportable: bool) {
        let mut offset = address.0 - self.allocation.base().0;
        for segment in &mut self.segments {
            if offset < segment.extent.len {
                segment.exportable = exportable;
                return;
            }
            offset -= segment.extent.len;
        }
    }
}
