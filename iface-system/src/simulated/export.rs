//! Exports to NICs: dma-bufs, and device addresses for peer-memory clients.

use hmem_core::{
    AddressRange, AllocOffset, Allocation, AllocationKind, DmaBufOffset, Errno, Error, ErrorKind,
    Result,
    iface::{
        DmaBufExport, DmaBufExporter, DmaBufMapping, PeerMemoryExport, PeerMemoryExporter,
        Revocation,
    },
    provider::Nic,
};

use super::{SimulatedInner, faults::DeviceCall};
use crate::sys::{self, Udmabuf};

/// The kind of fds that a simulated device exports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DmaBufKind {
    /// Genuine dma-bufs if `/dev/udmabuf` can be opened, memory files otherwise.
    #[default]
    Auto,
    /// Genuine dma-bufs. Building the device fails if `/dev/udmabuf` cannot be opened.
    Udmabuf,
    /// Memory files. They can be mapped, read and written like dma-bufs, but no kernel driver
    /// imports them.
    MemFd,
    /// The device exports no fds: every dma-buf export fails with Unsupported.
    None,
}

impl DmaBufKind {
    /// Opens `/dev/udmabuf` if this kind uses it.
    pub(crate) fn open(self) -> Result<Option<Udmabuf>> {
        match self {
            Self::Auto => Ok(Udmabuf::open()
                .inspect_err(|error| {
                    tracing::debug!(%error, "exports are memory files, not dma-bufs");
                })
                .ok()),
            Self::Udmabuf => Udmabuf::open().map(Some),
            Self::MemFd | Self::None => Ok(None),
        }
    }
}

impl DmaBufExporter for SimulatedInner {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        if self.config.dma_buf == DmaBufKind::None {
            &[]
        } else if self.config.pcie_mapping {
            &[DmaBufMapping::Default, DmaBufMapping::Pcie]
        } else {
            &[DmaBufMapping::Default]
        }
    }

    fn serves_every_nic(&self) -> bool {
        self.config.p2p.reaches_all()
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        const OPERATION: &str = "export dma-buf";
        self.call(DeviceCall::ExportDmaBuf)?;
        let mapping = mapping.of_export();
        let refused =
            |kind| Error::new(kind, OPERATION).iface(&self.config).context("range", range);
        if range.is_empty() {
            return Err(refused(ErrorKind::ZeroLength).remedy("export at least one byte"));
        }
        if self.config.dma_buf == DmaBufKind::None {
            return Err(refused(ErrorKind::Unsupported)
                .errno(Errno(libc::EOPNOTSUPP))
                .remedy("this device was built without dma-buf export"));
        }
        if mapping == DmaBufMapping::Pcie && !self.config.pcie_mapping {
            return Err(refused(ErrorKind::Unsupported)
                .errno(Errno(libc::EOPNOTSUPP))
                .context("mapping", "pcie")
                .remedy("export with the default mapping"));
        }
        let mut state = self.state.lock();
        let record = self.record_of_allocation(&mut state, range, of)?;
        let allocation = record.allocation;
        match allocation.kind {
            AllocationKind::Managed => {
                return Err(refused(ErrorKind::Unsupported).remedy(
                    "managed memory migrates and has no dma-buf: register it as host pages, or \
                     stage it",
                ));
            }
            AllocationKind::Host => {
                return Err(refused(ErrorKind::Unsupported)
                    .remedy("host memory needs no dma-buf: register it as host pages"));
            }
            _ => {}
        }
        self.check_reachable(&allocation, nic, range, OPERATION)?;
        let (inside, extent, segment) =
            record.segments_of(range).next().ok_or_else(|| refused(ErrorKind::OutOfBounds))?;
        if !segment.exportable {
            return Err(refused(ErrorKind::Unsupported).context("segment", inside).remedy(
                "this segment is set not to be exportable: stage the copy through host memory",
            ));
        }
        if inside.len() != range.len() {
            return Err(refused(ErrorKind::Unsupported)
                .context("segment", inside)
                .remedy("the range crosses segments: export each one that `segments` lists"));
        }
        let alloc_offset = allocation.offset_of(range.start()).unwrap_or(AllocOffset(0));
        if self.udmabuf.is_none() {
            // A dma-buf keeps its pages alive. A memory file does not, so the arena must not reuse
            // the extent while the file has users.
            record.exported = true;
            state.arenas.mark_exported(&extent);
        }
        drop(state);

        let exported = self.call(DeviceCall::CreateFd).and_then(|()| {
            sys::export(self.udmabuf.as_ref(), extent.file.fd(), extent.offset, extent.len)
        });
        let (fd, offset) =
            exported.map_err(|error| error.iface(&self.config).context("range", range))?;
        let mut state = self.state.lock();
        // The allocation may have been freed before the fd existed. That free found no user of the
        // file, so the extent may belong to another allocation by now.
        let record = self.record_of(&mut state, range).ok();
        let same = record.filter(|record| record.allocation.id == allocation.id);
        let record = same.ok_or_else(|| {
            refused(ErrorKind::BadState).remedy("the allocation was freed while it was exported")
        })?;
        let revocation = record.revocation.get_or_insert_with(Revocation::new).clone();
        state.exports += 1;
        Ok(DmaBufExport {
            fd,
            offset: DmaBufOffset(offset),
            alloc_offset,
            len: range.len(),
            mapping,
            revocation: Some(revocation),
        })
    }

    fn release(&self, export: DmaBufExport) -> Result<()> {
        drop(export);
        let mut state = self.state.lock();
        state.exports = state.exports.saturating_sub(1);
        drop(state);
        self.call(DeviceCall::ReleaseDmaBuf)
    }
}

impl PeerMemoryExporter for SimulatedInner {
    fn export(&self, range: AddressRange, of: &Allocation, nic: &Nic) -> Result<PeerMemoryExport> {
        const OPERATION: &str = "export peer memory";
        self.call(DeviceCall::ExportPeerMemory)?;
        let refused =
            |kind| Error::new(kind, OPERATION).iface(&self.config).context("range", range);
        let mut state = self.state.lock();
        let record = self.record_of_allocation(&mut state, range, of)?;
        let allocation = record.allocation;
        if allocation.kind.cpu_accessible() {
            return Err(refused(ErrorKind::Unsupported)
                .remedy("peer-memory clients access device memory only"));
        }
        self.check_reachable(&allocation, nic, range, OPERATION)?;
        if let Some((inside, ..)) =
            record.segments_of(range).find(|(_, _, segment)| !segment.exportable)
        {
            return Err(refused(ErrorKind::Unsupported).context("segment", inside));
        }
        Ok(PeerMemoryExport { address: range.start(), len: range.len() })
    }
}

impl SimulatedInner {
    /// Fails with Unreachable if `nic` cannot access the memory of the allocation's device.
    fn check_reachable(
        &self,
        allocation: &Allocation,
        nic: &Nic,
        range: AddressRange,
        operation: &'static str,
    ) -> Result<()> {
        let reaches = |device| self.config.p2p.reaches(device, &nic.name);
        if allocation.device.is_none_or(reaches) {
            return Ok(());
        }
        // The kernel's error number for a pair of devices that cannot reach each other.
        const ENOTSUPP: Errno = Errno(524);
        let error = Error::new(ErrorKind::Unreachable, operation)
            .errno(ENOTSUPP)
            .iface(&self.config)
            .context("nic", nic)
            .context("range", range)
            .remedy(
                "use a NIC under the same PCIe switch as the device, or stage through host memory",
            );
        Err(match allocation.device {
            Some(device) => error.device(device),
            None => error,
        })
    }
}
