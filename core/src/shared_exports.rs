//! Dma-buf exports that several registrations share.

use std::{fmt, os::fd::AsFd, sync::Arc};

use parking_lot::Mutex;

use crate::{
    AddressRange, Allocation, AllocationKind, Iface, IfaceExt,
    iface::{DmaBufExport, DmaBufMapping, Revocation},
};

/// A handle for dma-buf exports that several registrations share.
///
/// A program may register the same device memory with one NIC after the other, for example behind
/// an interface that takes one NIC per call. Each registration then exports the memory anew, unless
/// all requests have the same handle ([`Request::exports`](crate::Request::exports)). A
/// [`Batch`](crate::Batch) over all NICs needs no handle.
///
/// The handle keeps the dma-bufs of successful registrations open until its last clone is dropped.
/// Until then, drivers may keep the memory of a freed allocation. Regions stay valid without the
/// handle.
///
/// A registration uses a stored export only for the same range of the same live allocation. Some
/// memory is always exported anew:
///
/// - memory that an application maps by hand ([`AllocationKind::Virtual`]), because its allocation
///   does not tell what is mapped;
/// - memory of an iface without identities ([`Iface::has_identities`]);
/// - memory of an iface whose exports depend on the NIC
///   ([`DmaBufExporter::serves_every_nic`](crate::iface::DmaBufExporter::serves_every_nic)).
///
/// If a driver in the kernel revokes a stored dma-buf ([`RegionState::Revoked`]), the handle does
/// not learn of it, and NICs refuse the dma-buf. Register the memory again with a new handle then.
///
/// [`RegionState::Revoked`]: crate::RegionState::Revoked
///
/// ```no_run
/// use hmem_core::{Access, Domain, Raw, Region, Request, Result, SharedExports};
///
/// /// Registers memory of a GPU with each NIC, and exports it once.
/// fn one_by_one(memory: Raw, nics: &[Domain]) -> Result<Vec<Region<Raw>>> {
///     let exports = SharedExports::new();
///     let request = || Request::new(memory, Access::REMOTE_READ).exports(&exports);
///     nics.iter().map(|nic| Ok(nic.submit(request())?)).collect()
/// }
/// ```
#[derive(Clone, Default)]
pub struct SharedExports(Arc<Mutex<Vec<Arc<SharedExport>>>>);

/// An export of a [`SharedExports`]. Dropping the last reference releases the export.
pub struct SharedExport {
    iface: Arc<dyn Iface>,
    /// The allocation, as it was queried for the export.
    of: Allocation,
    /// The exported range, a part of the allocation.
    exported: AddressRange,
    /// The export. `None` only during the drop.
    export: Option<DmaBufExport>,
}

impl SharedExports {
    /// Creates a handle without exports.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of stored exports.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Returns true if no export is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if the iface's exports of this allocation can be shared.
    fn may_share(iface: &Arc<dyn Iface>, of: &Allocation) -> bool {
        iface.has_identities()
            && of.kind != AllocationKind::Virtual
            && iface.dma_buf().is_some_and(|exporter| exporter.serves_every_nic())
    }

    /// Returns the stored export of `exported`, a range of the allocation `of`, with this dma-buf
    /// mapping. The caller must have just queried the allocation. Drops revoked exports, and those
    /// of earlier allocations at the same addresses, which were freed.
    ///
    /// Path selectors call this method before they export memory.
    #[must_use]
    pub fn find(
        &self,
        iface: &Arc<dyn Iface>,
        of: &Allocation,
        exported: AddressRange,
        mapping: DmaBufMapping,
    ) -> Option<Arc<SharedExport>> {
        let is_stale = |old: &mut Arc<SharedExport>| {
            old.is_of(iface)
                && old.of.range.overlaps(of.range)
                && (!old.is_part_of(of) || old.is_revoked())
        };
        let is_wanted = |old: &&Arc<SharedExport>| {
            old.is_of(iface)
                && old.is_part_of(of)
                && old.exported == exported
                && old.export().mapping == mapping
        };
        let mut stored = self.0.lock();
        let stale: Vec<_> = stored.extract_if(.., is_stale).collect();
        let found = stored.iter().find(is_wanted).cloned();
        // The lock is released first, because the release of an export calls the driver.
        drop(stored);
        drop(stale);
        found
    }

    /// Stores an export of `exported`, a range of the allocation `of`, for later registrations.
    ///
    /// Path selectors call this method after a NIC has registered the export.
    ///
    /// # Errors
    /// If exports of this memory cannot be shared, the call stores nothing and returns `export` to
    /// the caller.
    pub fn store(
        &self,
        iface: &Arc<dyn Iface>,
        of: &Allocation,
        exported: AddressRange,
        export: DmaBufExport,
    ) -> Result<Arc<SharedExport>, DmaBufExport> {
        if !Self::may_share(iface, of) {
            return Err(export);
        }
        let iface = Arc::clone(iface);
        let shared = Arc::new(SharedExport { iface, of: *of, exported, export: Some(export) });
        self.0.lock().push(Arc::clone(&shared));
        Ok(shared)
    }
}

impl SharedExport {
    /// Returns the export.
    ///
    /// # Panics
    /// Never: only the drop takes the export.
    #[must_use]
    pub fn export(&self) -> &DmaBufExport {
        self.export.as_ref().expect("only the drop takes it")
    }

    fn is_of(&self, iface: &Arc<dyn Iface>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.iface), Arc::as_ptr(iface))
    }

    fn is_revoked(&self) -> bool {
        self.export().revocation.as_ref().is_some_and(Revocation::is_revoked)
    }

    fn is_part_of(&self, of: &Allocation) -> bool {
        (self.of.id, self.of.range) == (of.id, of.range)
    }
}

impl Drop for SharedExport {
    fn drop(&mut self) {
        let Some(export) = self.export.take() else { return };
        if let Err(error) = self.iface.release_dma_buf(export) {
            tracing::warn!(
                range = %self.exported,
                error = %error.full(),
                "cannot release a dma-buf export"
            );
        }
    }
}

impl fmt::Debug for SharedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedExport")
            .field("exported", &self.exported)
            .field("fd", &self.export().as_fd())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SharedExports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&*self.0.lock()).finish()
    }
}
