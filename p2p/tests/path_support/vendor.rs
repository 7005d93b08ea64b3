//! An iface of any kind over simulated memory. Tests make it refuse calls with the errors of that
//! kind's driver.

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, Error, Iface, IfaceExt, IfaceKind, Result,
    Segment,
    cause::RefusalCause,
    iface::{
        AllocRequest, Allocator, CopyEngine, Device, DmaBufExport, DmaBufExporter, DmaBufMapping,
        InboundFlush, MonitorSource, PeerMemoryExport, PeerMemoryExporter, SegmentMap,
    },
    provider::Nic,
};
use hmem_iface_system::Simulated;

/// A function that returns the error of a refused call, or `None` if the call succeeds.
pub(crate) type Refuse = fn() -> Option<Error>;

#[derive(Debug)]
pub(crate) struct Vendor {
    pub(crate) kind: IfaceKind,
    pub(crate) memory: Arc<Simulated>,
    pub(crate) segments: Refuse,
    /// Length in bytes of the physical segments that the driver reports. If the simulated memory
    /// really has one segment, it can still be exported whole. With length 0 the driver reports an
    /// empty segment before the others.
    pub(crate) segment_len: Option<u64>,
    pub(crate) dma_buf: Refuse,
    /// The refusal of exports of several segments as one dma-buf.
    pub(crate) whole: Refuse,
    /// The refusal of exports that begin or end inside a physical segment.
    pub(crate) part: Refuse,
    /// The refusal of exports that are not the whole allocation.
    pub(crate) less: Refuse,
    pub(crate) pcie: Refuse,
    pub(crate) peer_memory: Refuse,
    /// True if the offset of an export is that of the page behind the exported range.
    pub(crate) other_page: bool,
    /// The error of a release of a dma-buf. The export is released even if an error is reported.
    pub(crate) release: Refuse,
}

impl Vendor {
    pub(crate) fn new(kind: IfaceKind, memory: Arc<Simulated>) -> Self {
        let nothing: Refuse = || None;
        Self {
            kind,
            memory,
            segments: nothing,
            segment_len: None,
            dma_buf: nothing,
            whole: nothing,
            part: nothing,
            less: nothing,
            pcie: nothing,
            peer_memory: nothing,
            other_page: false,
            release: nothing,
        }
    }

    fn own(&self, allocation: Allocation) -> Allocation {
        Allocation { iface: self.kind, ..allocation }
    }

    fn theirs(&self, allocation: &Allocation) -> Allocation {
        Allocation { iface: self.memory.kind(), ..*allocation }
    }
}

/// Returns the causes that the iface of kind `kind` defines.
pub(crate) fn causes_of(kind: IfaceKind) -> &'static [RefusalCause] {
    match kind {
        IfaceKind::CUDA => hmem_iface_cuda::CAUSES,
        IfaceKind::NEURON => hmem_iface_accelerators::neuron::CAUSES,
        IfaceKind::ROCR => hmem_iface_rocr::CAUSES,
        IfaceKind::SYNAPSEAI => hmem_iface_accelerators::synapseai::CAUSES,
        IfaceKind::ZE => hmem_iface_ze::CAUSES,
        _ => &[],
    }
}

fn check(refuse: Refuse) -> Result<()> {
    refuse().map_or(Ok(()), Err)
}

// SAFETY: the simulated device, an iface itself, answers every call. This type only changes the
// kind, reports shorter segments, or refuses.
unsafe impl Iface for Vendor {
    fn kind(&self) -> IfaceKind {
        self.kind
    }

    fn name(&self) -> &str {
        self.kind.name().unwrap_or("vendor")
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.memory.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.memory.query(address)?.map(|allocation| self.own(allocation)))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method, which is the same for `memory`.
        unsafe { self.memory.copy(to, from, len) }
    }

    fn address_span(&self) -> Option<AddressRange> {
        self.memory.address_span()
    }

    fn causes(&self) -> &'static [RefusalCause] {
        causes_of(self.kind)
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.memory.copy_engine()
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(self)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        Some(self)
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Some(self)
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        self.memory.inbound_flush()
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        self.memory.monitor()
    }
}

impl Allocator for Vendor {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        Ok(self.own(IfaceExt::allocate(&*self.memory, request)?))
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method, which is the same for `memory`.
        unsafe { IfaceExt::free(&*self.memory, &self.theirs(allocation)) }
    }

    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        IfaceExt::is_device_active(&*self.memory, device)
    }
}

impl DmaBufExporter for Vendor {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        self.memory.dma_buf().map_or(&[DmaBufMapping::Default], DmaBufExporter::mappings)
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        check(if mapping == DmaBufMapping::Pcie { self.pcie } else { self.dma_buf })?;
        if range != of.range {
            check(self.less)?;
        }
        let segment = self.segment_len.unwrap_or(of.range.len());
        let start = range.start().0 - of.range.start().0;
        let end = start + range.len();
        let ends_inside = !end.is_multiple_of(segment) && end != of.range.len();
        if !start.is_multiple_of(segment) || ends_inside {
            check(self.part)?;
        }
        if self.segment_len.is_some_and(|step| range.len() > step) {
            check(self.whole)?;
        }
        let mut export = self.memory.export_dma_buf(range, nic, mapping)?;
        if self.other_page {
            export.offset.0 += rustix::param::page_size() as u64;
        }
        Ok(export)
    }

    fn release(&self, export: DmaBufExport) -> Result<()> {
        self.memory.release_dma_buf(export)?;
        check(self.release)
    }
}

impl PeerMemoryExporter for Vendor {
    fn export(&self, range: AddressRange, _: &Allocation, nic: &Nic) -> Result<PeerMemoryExport> {
        check(self.peer_memory)?;
        self.memory.export_peer_memory(range, nic)
    }
}

impl SegmentMap for Vendor {
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        check(self.segments)?;
        let physical = self.memory.physical_segments(range)?;
        let Some(step) = self.segment_len else { return Ok(physical) };
        if step == 0 {
            let empty = Segment { range: range.slice(0, 0).expect("inside"), exportable: true };
            return Ok([vec![empty], physical].concat());
        }
        let mut segments = Vec::new();
        for Segment { range, exportable } in physical {
            let mut at = 0;
            while at < range.len() {
                let in_segment = (range.start().0 + at - of.range.start().0) % step;
                let len = (step - in_segment).min(range.len() - at);
                let range = range.slice(at, len).expect("inside");
                segments.push(Segment { range, exportable });
                at += len;
            }
        }
        Ok(segments)
    }
}
