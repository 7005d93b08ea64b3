//! Division of a range into segments. Each segment needs an export of its own.

#![allow(unsafe_code, reason = "calls the driver on the properties of handles")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind,
    Result, Segment, iface::SegmentMap,
};

use crate::{
    context::WorkContext,
    error::check,
    handles::{mapping_at, with_handle},
    lookup::{PointerLookup, inconsistent},
    sys::{self, CuContext},
};

/// Divides a range of memory into segments, each of which needs an export of its own.
#[derive(Debug)]
pub(crate) struct Segments {
    pub(crate) lookup: Arc<PointerLookup>,
}

impl SegmentMap for Segments {
    /// Returns the segments of a range, each with a flag that is true if a NIC may reach it.
    ///
    /// - VMM memory: each mapping is a segment, with the flag of its physical memory.
    /// - Other device memory: one segment with a true flag, since only an export shows the ability.
    /// - Memory that the CPU can access: one segment with a false flag.
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        if !of.range.contains_range(range) {
            return Err(Error::new(ErrorKind::OutOfBounds, "segments")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy("the range must lie in one live allocation")
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

    fn not_exportable(&self) -> &'static str {
        "IS_GPU_DIRECT_RDMA_CAPABLE is 0"
    }
}

impl Segments {
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
    /// only an export can show the ability, and the result is true.
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
