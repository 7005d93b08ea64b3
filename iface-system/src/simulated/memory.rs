//! Allocation, free, and the table of live allocations.

use std::collections::BTreeMap;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    Result, Segment,
    iface::{AllocRequest, SegmentMap},
};

use super::{
    Inner,
    address_space::AddressSpace,
    arena::{Arenas, Extent},
    copy::Piece,
    faults::DeviceCall,
    sys::punch_hole,
    table::{MAX_ENTRIES, TableWriter},
};

/// The process that allocated the memory: this process or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This iface allocated the memory.
    Allocated,
    /// Another process allocated the memory, and this iface has opened it through an IPC handle.
    Opened,
}

/// One physical segment of an allocation.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) extent: Extent,
    pub(crate) exportable: bool,
}

/// The state of a live allocation.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) allocation: Allocation,
    pub(crate) origin: Origin,
    /// The segments in address order. Together they are as long as the allocation, rounded up to
    /// pages.
    pub(crate) parts: Vec<Part>,
    /// True once an fd of the memory file was exported, or an IPC handle. A genuine dma-buf does
    /// not count, because it keeps its pages alive itself.
    pub(crate) exported: bool,
    /// Index of the word in the memory file's header that holds the allocation's identity for other
    /// processes. `None` until the allocation is exported by an IPC handle.
    pub(crate) stamp: Option<u16>,
    /// True while a thread frees the allocation.
    being_freed: bool,
}

/// The part of a simulated iface's state that allocations and frees change. A single lock protects
/// it.
#[derive(Debug)]
pub(crate) struct SimulatedState {
    pub(crate) arenas: Arenas,
    addresses: AddressSpace,
    writer: TableWriter,
    records: Vec<Option<Record>>,
    free_numbers: Vec<u32>,
    next_id: u64,
    /// Bytes in use on each device.
    used: Vec<u64>,
    pub(crate) live: u64,
    pub(crate) live_bytes: u64,
    pub(crate) opened: u64,
    /// Number of dma-buf exports that were not released.
    pub(crate) exports: u64,
    pub(crate) host_registered: BTreeMap<u64, u64>,
}

impl SimulatedState {
    pub(crate) fn new(
        arenas: Arenas,
        addresses: AddressSpace,
        writer: TableWriter,
        devices: u32,
    ) -> Self {
        Self {
            arenas,
            addresses,
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

    pub(crate) fn set_address_reuse(&mut self, reuse: super::AddressReuse) {
        self.addresses.set_reuse(reuse);
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

impl Inner {
    pub(crate) fn allocate_memory(&self, request: &AllocRequest) -> Result<Allocation> {
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
        let len = request.len.checked_next_multiple_of(self.page).unwrap_or(u64::MAX);
        let out_of_memory = || refused(ErrorKind::OutOfResources).errno(hmem_core::Errno(12));

        let mut state = self.state.lock();
        if let Some(DeviceId(device)) = device {
            let used = state.used[device as usize];
            if used.checked_add(len).is_none_or(|total| total > self.config.memory_per_device) {
                return Err(out_of_memory()
                    .device(DeviceId(device))
                    .context("used", used)
                    .context("memory", self.config.memory_per_device)
                    .remedy("free memory, or build the devices with more memory"));
            }
        }
        self.call(DeviceCall::ReserveAddress)?;
        let pages = len / self.page;
        let first = state.addresses.take(pages).ok_or_else(|| {
            out_of_memory()
                .remedy("the window of addresses is used up: build the device with a larger one")
        })?;
        let backed = self.back_memory(&mut state, request.kind, first * self.page, len);
        let parts = match backed {
            Ok(parts) => parts,
            Err(error) => {
                state.addresses.give(first, pages);
                return Err(error.iface(&self.config));
            }
        };
        let range =
            AddressRange::new(Address(self.window_start() + first * self.page), request.len)?;
        let shape = (range, request.kind, device);
        let allocation = match self.enter(&mut state, shape, Origin::Allocated, parts) {
            Ok(allocation) => allocation,
            Err((error, parts)) => {
                self.unback_memory(&mut state, request.kind, first * self.page, parts);
                state.addresses.give(first, pages);
                return Err(error);
            }
        };
        if let Some(DeviceId(device)) = device {
            state.used[device as usize] += len;
        }
        Ok(allocation)
    }

    /// Creates the segments of an allocation at offset `at` of the iface's address range. Maps them
    /// if the CPU may access this kind of memory. Undoes everything if a step fails.
    fn back_memory(
        &self,
        state: &mut SimulatedState,
        kind: AllocationKind,
        at: u64,
        len: u64,
    ) -> Result<Vec<Part>> {
        let segmented = kind == AllocationKind::Virtual;
        let step = if segmented { self.config.segment_len } else { len };
        let mut parts = Vec::new();
        let mut done = 0;
        while done < len {
            let this = step.min(len - done);
            let taken = self
                .call(DeviceCall::CreateMemory)
                .and_then(|()| state.arenas.take(this, segmented));
            match taken {
                Ok(extent) => parts.push(Part { extent, exportable: true }),
                Err(error) => {
                    self.unback_memory(state, AllocationKind::Device, at, parts);
                    return Err(error);
                }
            }
            done += this;
        }
        if kind.cpu_accessible()
            && let Err(error) = self.map_for_cpu(at, &parts)
        {
            self.unback_memory(state, kind, at, parts);
            return Err(error);
        }
        Ok(parts)
    }

    fn map_for_cpu(&self, at: u64, parts: &[Part]) -> Result<()> {
        let mut at = at;
        for Part { extent, .. } in parts {
            self.call(DeviceCall::MapMemory)?;
            self.window
                .place_shared(at, extent.len as usize, extent.file.fd(), extent.offset)
                .map_err(|errno| Error::os(errno, "mmap").context("length", extent.len))?;
            at += extent.len;
        }
        Ok(())
    }

    /// Undoes [`Inner::back_memory`], for an allocation that no lookup can find yet.
    fn unback_memory(
        &self,
        state: &mut SimulatedState,
        kind: AllocationKind,
        at: u64,
        parts: Vec<Part>,
    ) {
        if kind.cpu_accessible() {
            let len: u64 = parts.iter().map(|part| part.extent.len).sum();
            if let Err(errno) = self.window.place_nothing(at, len as usize) {
                tracing::error!(%errno, "the memory of a failed allocation stays mapped");
            }
        }
        for part in parts {
            state.arenas.give(part.extent, false);
        }
    }

    /// Assigns an identity to a new allocation, and makes the allocation visible to lookups. On an
    /// error, hands the segments back to the caller.
    pub(crate) fn enter(
        &self,
        state: &mut SimulatedState,
        (range, kind, device): (AddressRange, AllocationKind, Option<DeviceId>),
        origin: Origin,
        parts: Vec<Part>,
    ) -> Result<Allocation, (Error, Vec<Part>)> {
        let Some(number) = state.take_number() else {
            let error = Error::new(ErrorKind::OutOfResources, "allocate")
                .iface(&self.config)
                .context("limit", MAX_ENTRIES);
            return Err((error, parts));
        };
        let id = AllocationId(state.next_id);
        state.next_id += 1;
        let iface = self.config.kind;
        let allocation = Allocation { iface, range, device, kind, id, token: 0 };
        match origin {
            Origin::Allocated => {
                state.live += 1;
                state.live_bytes += range.len();
            }
            Origin::Opened => state.opened += 1,
        }
        state.records[number as usize] = Some(Record {
            allocation,
            origin,
            parts,
            exported: false,
            stamp: None,
            being_freed: false,
        });
        self.table.publish(&mut state.writer, number, &allocation);
        Ok(allocation)
    }

    /// Allocates addresses for an allocation of another process. Returns their offset in the
    /// iface's address range, in bytes.
    pub(crate) fn take_addresses(&self, state: &mut SimulatedState, len: u64) -> Option<u64> {
        Some(state.addresses.take(len / self.page)? * self.page)
    }

    pub(crate) fn give_addresses(&self, state: &mut SimulatedState, at: u64, len: u64) {
        state.addresses.give(at / self.page, len / self.page);
    }

    /// Frees an allocation: notifies the subscribers, removes the allocation from lookups, and then
    /// releases the memory.
    pub(crate) fn end(
        &self,
        allocation: &Allocation,
        origin: Origin,
        operation: &'static str,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let number = self.live_number(&state, allocation, origin, operation)?;
        if let Some(record) = &mut state.records[number as usize] {
            record.being_freed = true;
        }
        drop(state);

        let notified = (self.config.free_detection == super::FreeDetection::Callback)
            .then(|| self.subscriptions.notify(allocation.range));
        let removed = self.remove(number, allocation);
        if let Some(started) = notified {
            self.subscriptions.end_notify(allocation.range, started);
        }
        let record = removed?;

        for Part { extent, .. } in
            record.parts.iter().filter(|_| !record.exported && origin == Origin::Allocated)
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
        self.give_addresses(&mut state, range.start().0 - self.window_start(), len);
        if origin == Origin::Allocated
            && let Some(DeviceId(device)) = allocation.device
        {
            state.used[device as usize] -= len;
        }
        for part in record.parts {
            state.arenas.give(part.extent, record.exported);
        }
        Ok(())
    }

    fn remove(&self, number: u32, allocation: &Allocation) -> Result<Record> {
        let mut state = self.state.lock();
        let range = allocation.range;
        if allocation.kind.cpu_accessible() {
            let at = range.start().0 - self.window_start();
            let len = range.len().next_multiple_of(self.page) as usize;
            if let Err(errno) = self.window.place_nothing(at, len) {
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
        match record.origin {
            Origin::Allocated => {
                state.live -= 1;
                state.live_bytes -= range.len();
            }
            Origin::Opened => state.opened -= 1,
        }
        if let (Some(slot), Some(part)) = (record.stamp, record.parts.first()) {
            state.arenas.give_stamp(&part.extent, slot);
        }
        Ok(record)
    }

    /// Returns the number of an allocation's entry in the page table.
    ///
    /// # Errors
    /// InvalidArgument: the allocation is not live, has another origin, or is being freed by a
    /// thread.
    pub(crate) fn live_number(
        &self,
        state: &SimulatedState,
        allocation: &Allocation,
        origin: Origin,
        operation: &'static str,
    ) -> Result<u32> {
        let number = self.table.entry_of(allocation.base());
        let record = number.and_then(|number| state.records[number as usize].as_ref());
        match (number, record) {
            (Some(number), Some(record))
                if record.allocation == *allocation
                    && record.origin == origin
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

    pub(crate) fn record_mut<'a>(
        &self,
        state: &'a mut SimulatedState,
        number: u32,
    ) -> Option<&'a mut Record> {
        state.records[number as usize].as_mut()
    }

    /// Returns the record of the allocation that contains all of `range`. Fails with OutOfBounds if
    /// there is none.
    pub(crate) fn record_of<'a>(
        &self,
        state: &'a mut SimulatedState,
        range: AddressRange,
    ) -> Result<&'a mut Record> {
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

    /// Returns the record of the allocation `of`, which contains `range`.
    ///
    /// # Errors
    /// OutOfBounds if the range is not in one live allocation, or in another one than `of`.
    pub(crate) fn part_of<'a>(
        &self,
        state: &'a mut SimulatedState,
        range: AddressRange,
        of: &Allocation,
    ) -> Result<&'a mut Record> {
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

    /// Returns the allocation that contains `range`, and the ranges of memory files that hold its
    /// bytes.
    pub(crate) fn pieces(&self, range: AddressRange) -> Result<(Allocation, Vec<Piece>)> {
        let mut state = self.state.lock();
        let record = self.record_of(&mut state, range)?;
        let pieces = record
            .parts_of(range)
            .map(|(inside, part)| Piece {
                file: part.extent.file.clone(),
                offset: part.extent.offset + inside.offset,
                len: inside.range.len(),
            })
            .collect();
        Ok((record.allocation, pieces))
    }
}

impl SegmentMap for Inner {
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        self.call(DeviceCall::Segments)?;
        let mut state = self.state.lock();
        let parts = self.part_of(&mut state, range, of)?.parts_of(range);
        let segment = |(inside, part): (Inside, &Part)| Segment {
            range: inside.range,
            exportable: part.exportable,
        };
        Ok(parts.map(segment).collect())
    }
}

/// The part of an address range that lies in one segment of an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inside {
    pub(crate) range: AddressRange,
    /// Offset of `range` from the start of the segment, in bytes.
    pub(crate) offset: u64,
}

impl Record {
    /// Returns the segments that contain bytes of `range`, each with the part of `range` in it.
    /// `range` must lie in the allocation.
    pub(crate) fn parts_of(&self, range: AddressRange) -> impl Iterator<Item = (Inside, &Part)> {
        let mut start = self.allocation.base().0;
        self.parts.iter().filter_map(move |part| {
            let base = start;
            start += part.extent.len;
            let from = range.start().0.max(base);
            let to = (range.start().0 + range.len()).min(start);
            if from >= to {
                return None;
            }
            let range = AddressRange::new(Address(from), to - from).ok()?;
            Some((Inside { range, offset: from - base }, part))
        })
    }

    /// Sets whether the segment that contains the start of `range` can be exported to NICs.
    pub(crate) fn set_exportable(&mut self, range: AddressRange, exportable: bool) {
        let mut offset = range.start().0 - self.allocation.base().0;
        for part in &mut self.parts {
            if offset < part.extent.len {
                part.exportable = exportable;
                return;
            }
            offset -= part.extent.len;
        }
    }
}
