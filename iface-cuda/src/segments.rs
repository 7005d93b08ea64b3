//! Division of a range into segments, and the mappings of memory that an application mapped by hand
//! (VMM).
//!
//! Each segment needs an export of its own. In VMM memory each mapping is a segment.
//!
//! An application reserves addresses, creates physical memory, and maps the physical memory at the
//! reserved addresses. Later it may unmap that memory and map other memory at the same addresses.
//! The reservation and its identity do not change then. So [`MappedMemory`] compares three values
//! of each mapping: its first address, its length, and the handle of its physical memory. The
//! driver maps each handle from its first byte on (`cuda.h` on the offset of `cuMemMap`: "currently
//! must be zero"). So two mappings with equal values lead every address to the same physical byte,
//! as long as equal handles are the same memory. A retained handle ensures that
//! ([`RetainedHandle`]).

#![allow(unsafe_code, reason = "calls the driver on the properties of handles")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, Result, Segment,
    iface::SegmentMap,
};

use crate::{
    context::WorkContext,
    driver::DeviceEntry,
    error::{CUDA, check},
    handles::{RetainedHandle, granularity, mapping_at, with_handle},
    lookup::{PointerLookup, inconsistent},
    sys::{self, CuContext},
};

/// Divides a range of memory into segments, each of which needs an export of its own.
#[derive(Debug)]
pub(crate) struct Segments {
    pub(crate) lookup: Arc<PointerLookup>,
}

impl SegmentMap for Segments {
    /// Returns the segments of a range.
    ///
    /// - VMM memory: each mapping is a segment. The segment is exportable if its physical memory
    ///   was created GPUDirect RDMA capable.
    /// - Other device memory: one exportable segment. Only an export shows whether the driver
    ///   refuses it.
    /// - Memory that the CPU can access: one segment that is not exportable.
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        if !of.range.contains_range(range) {
            return Err(CUDA
                .outside("segments")
                .context("range", range)
                .context("allocation", of.range));
        }
        if of.kind.cpu_accessible() {
            return Ok(vec![Segment { range, exportable: false }]);
        }
        if of.kind != AllocationKind::Virtual {
            return Ok(vec![Segment { range, exportable: true }]);
        }
        let device = of.device.unwrap_or(DeviceId(0));
        let work_context = self.lookup.contexts.work_context(CuContext::NULL, device)?;
        let segments = self.mappings(range, &work_context);
        work_context.end(segments)
    }

    /// Returns the mappings in a range. Makes one driver call for each mapping. Searches unmapped
    /// addresses in steps of the smallest possible mapping, with one call for each step.
    fn mapped(&self, range: AddressRange) -> Result<Vec<AddressRange>> {
        let step = self.smallest_mapping()?;
        let functions = &self.lookup.driver().functions;
        let end = u128::from(range.start().0) + u128::from(range.len());
        self.lookup.in_any_context(|| {
            let (mut mapped, mut at) = (Vec::new(), range.start());
            while u128::from(at.0) < end {
                let next = match mapping_at(functions, at) {
                    Ok(mapping) => {
                        let part = mapping.intersection(range).filter(|part| part.contains(at));
                        mapped.push(
                            part.ok_or_else(|| inconsistent(at).context("mapping", mapping))?,
                        );
                        mapping.end()
                    }
                    Err(error) if error.kind() == ErrorKind::OutOfBounds => {
                        (at.0 - at.0 % step).checked_add(step).map(Address)
                    }
                    Err(error) => return Err(error),
                };
                let Some(next) = next else { break };
                at = next;
            }
            Ok(mapped)
        })
    }

    fn not_exportable(&self) -> &'static str {
        "IS_GPU_DIRECT_RDMA_CAPABLE is 0"
    }
}

impl Segments {
    /// Returns the length of the smallest mapping that one of the devices allows.
    fn smallest_mapping(&self) -> Result<u64> {
        let driver = self.lookup.driver();
        let of_device = |entry: &DeviceEntry| {
            let kind = sys::CU_MEM_LOCATION_TYPE_DEVICE;
            let properties = sys::CuMemAllocationProp {
                kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
                location: sys::CuMemLocation { kind, id: entry.handle },
                ..sys::CuMemAllocationProp::default()
            };
            granularity(&driver.functions, &properties).map(|step| step as u64)
        };
        let none = || CUDA.error(ErrorKind::Unsupported, "mapped memory");
        let steps = driver.devices.iter().map(of_device);
        steps.reduce(|a, b| Ok(a?.min(b?))).ok_or_else(none)?
    }

    /// Returns the mappings of VMM memory in a range of reserved addresses.
    fn mappings(
        &self,
        range: AddressRange,
        work_context: &WorkContext<'_>,
    ) -> Result<Vec<Segment>> {
        let functions = &self.lookup.driver().functions;
        let mut segments = Vec::new();
        let mut done = 0;
        while let Some(rest) = range.slice(done, range.len() - done).filter(|rest| !rest.is_empty())
        {
            let mapping = work_context.with_context(|| mapping_at(functions, rest.start()))?;
            let offset = rest.start().0.wrapping_sub(mapping.start().0);
            let len = mapping.len().saturating_sub(offset).min(rest.len());
            let part = rest.slice(0, len).filter(|part| !part.is_empty());
            let part =
                part.ok_or_else(|| inconsistent(rest.start()).context("mapping", mapping))?;
            segments.push(Segment { range: part, exportable: self.is_rdma_capable(part.start())? });
            done += len;
        }
        Ok(segments)
    }

    /// Returns true if GPUDirect RDMA may reach the memory at an address. The pointer attribute
    /// decides, or on older drivers the property of the physical memory. If the driver has neither,
    /// returns true, since only an export can show the ability.
    pub(crate) fn is_rdma_capable(&self, address: Address) -> Result<bool> {
        let attribute = sys::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
        if let Some(capable) = self.lookup.attribute(address, attribute)? {
            return Ok(capable != 0);
        }
        let functions = &self.lookup.driver().functions;
        let Some(properties) = functions.mem_get_allocation_properties else { return Ok(true) };
        let capable = with_handle(functions, address, |handle| {
            let mut of_memory = sys::CuMemAllocationProp::default();
            // SAFETY: `of_memory` is writable, and the handle stays retained during the call.
            let code = unsafe { properties(&mut of_memory, handle) };
            check(code, "cuMemGetAllocationPropertiesFromHandle")
                .map(|()| of_memory.gpu_direct_rdma_capable != 0)
        })?;
        // Only VMM memory has a handle. For other memory, only an export shows whether NICs can
        // reach it.
        Ok(capable.unwrap_or(true))
    }
}

/// The mappings of a range, with their physical memory. Dropping the value releases the handles.
#[derive(Debug)]
pub(crate) struct MappedMemory(Vec<Mapping>);

#[derive(Debug)]
struct Mapping {
    /// The addresses that one call of `cuMemMap` mapped. They may reach beyond the watched range.
    range: AddressRange,
    memory: RetainedHandle,
}

impl MappedMemory {
    /// Retains the memory that is mapped in a range. Returns `None` if a part of the range is not
    /// mapped, or its memory has no handle. The range must not be empty.
    pub(crate) fn retain(lookup: &PointerLookup, range: AddressRange) -> Result<Option<Self>> {
        lookup.in_any_context(|| Self::retain_here(lookup, range))
    }

    /// Like [`Self::retain`], but makes the driver calls only in the context that is current on the
    /// calling thread.
    fn retain_here(lookup: &PointerLookup, range: AddressRange) -> Result<Option<Self>> {
        let functions = &lookup.driver().functions;
        let mut mappings = Vec::new();
        let mut rest = range;
        loop {
            let mapped = match mapping_at(functions, rest.start()) {
                Err(error) if error.kind() == ErrorKind::OutOfBounds => return Ok(None),
                mapped => mapped?,
            };
            if !mapped.contains(rest.start()) {
                return Err(inconsistent(rest.start()).context("mapping", mapped));
            }
            let Some(memory) = RetainedHandle::of(functions, rest.start())? else {
                return Ok(None);
            };
            mappings.push(Mapping { range: mapped, memory });
            let done = mapped.len() - (rest.start().0 - mapped.start().0);
            rest = match rest.slice(done, rest.len().saturating_sub(done)) {
                Some(rest) if !rest.is_empty() => rest,
                _ => return Ok(Some(Self(mappings))),
            };
        }
    }

    /// Returns true if every mapping is still there, with the same physical memory. Costs three
    /// driver calls for each mapping.
    pub(crate) fn is_unchanged(&self, lookup: &PointerLookup) -> Result<bool> {
        lookup.in_any_context(|| {
            for mapping in &self.0 {
                if !mapping.is_unchanged(lookup)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }
}

impl Mapping {
    fn is_unchanged(&self, lookup: &PointerLookup) -> Result<bool> {
        let (functions, start) = (&lookup.driver().functions, self.range.start());
        match mapping_at(functions, start) {
            Ok(mapped) if mapped == self.range => {}
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::OutOfBounds => return Ok(false),
            Err(error) => return Err(error),
        }
        let same = |handle| Ok(handle == self.memory.handle());
        Ok(with_handle(functions, start, same)? == Some(true))
    }
}
