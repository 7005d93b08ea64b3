//! The staging buffers of a domain, and the registration of staged regions.

#![allow(unsafe_code, reason = "registers staged memory by address")]

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hmem_core::{
    ErrorKind, LocalKey, Result,
    provider::{Piece, ProviderRegion, Registration, StagingAttr},
};
use hmem_p2p::staging::{Pool, StagedRegion};
use parking_lot::Mutex;

use crate::{
    access::Settings,
    device::sysfs_folder,
    region::{Kind, Region},
    register::Registrar,
};

/// The staging buffers of a domain, and the number of its staged regions.
#[derive(Debug)]
pub(crate) struct Staging {
    attr: StagingAttr,
    /// The staging buffers with their local key; `None` until the registration of the first staged
    /// region allocates and registers them.
    buffers: Mutex<Option<(Arc<Pool>, LocalKey)>>,
    /// Number of open staged regions.
    regions: AtomicUsize,
}

impl Staging {
    pub(crate) fn new(attr: StagingAttr) -> Self {
        Self { attr, buffers: Mutex::default(), regions: AtomicUsize::new(0) }
    }

    /// Returns a copy of `self.buffers`.
    pub(super) fn buffers(&self) -> Option<(Arc<Pool>, LocalKey)> {
        self.buffers.lock().clone()
    }

    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        self.buffers().map(|(pool, _)| pool)
    }

    pub(super) fn has_regions(&self) -> bool {
        self.regions.load(Ordering::Acquire) > 0
    }

    /// Adds a staged region to the table of regions. Registers the staging buffers if this is the
    /// domain's first staged region.
    ///
    /// # Safety
    /// The caller must follow the safety rules of
    /// [`ProviderDomain::register`](hmem_core::provider::ProviderDomain::register).
    pub(crate) unsafe fn register(
        &self,
        registrar: &Registrar<'_>,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        settings: Settings,
    ) -> Result<ProviderRegion> {
        let device = &registrar.pd.device;
        if settings != Settings::default() {
            let why =
                "register without verbs options and iova: the NIC does not register staged memory";
            return Err(device
                .refuse(ErrorKind::Unsupported, "register", why)
                .context("path", "staged")
                .context("settings", format_args!("{settings:?}")));
        }
        // SAFETY: the caller follows the rules of `ProviderDomain::register`. The close of the
        // region ends the copies (`ActiveLanes::abandon_closed`).
        let memory =
            unsafe { StagedRegion::new(request, pieces, device.provider_attr.staged_access) }
                .map_err(|error| error.provider(device.nic.to_string()))?;
        self.prepare_buffers(registrar)?;
        self.regions.fetch_add(1, Ordering::AcqRel);
        let kind = Kind::Staged(Arc::new(memory));
        Ok(registrar.regions.insert(Region::without_parts(request.access, kind)))
    }

    /// Allocates and registers the staging buffers, unless an earlier call has done so.
    fn prepare_buffers(&self, registrar: &Registrar<'_>) -> Result<()> {
        let mut buffers = self.buffers.lock();
        if buffers.is_some() {
            return Ok(());
        }
        let nic = &registrar.pd.device.nic;
        let pool =
            Pool::new(self.attr, sysfs_folder(&nic.name).and_then(|folder| numa_node(&folder)))?;
        let region = registrar.register_buffers(pool.range()).map_err(|error| {
            error.context("for", "staging buffers").context("length", pool.range().len())
        })?;
        tracing::debug!(%nic, bytes = pool.range().len(), "staging buffers registered");
        *buffers = Some((pool, region.local));
        Ok(())
    }

    /// Closes a staged region, so that no new copy of its memory starts. Copies in flight continue
    /// until [`ActiveLanes::abandon_closed`](super::lane::ActiveLanes::abandon_closed).
    pub(crate) fn close(&self, region: &StagedRegion) {
        self.regions.fetch_sub(1, Ordering::AcqRel);
        region.close();
    }
}

/// Returns the NUMA node of the device with this folder in sysfs; `None` if the kernel does not
/// report it. A sub-function's node is that of its PCI function, in whose folder it lies.
fn numa_node(folder: &Path) -> Option<u32> {
    let text =
        folder.ancestors().find_map(|folder| fs::read_to_string(folder.join("numa_node")).ok())?;
    // The kernel writes -1 for a device without a node, which does not parse as `u32`.
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_function_has_the_numa_node_of_its_pci_function() {
        let root = std::env::temp_dir().join(format!("hmem-numa-node-{}", std::process::id()));
        let function = root.join("0000:08:00.0");
        let sub_function = function.join("mlx5_core.sf.4");
        fs::create_dir_all(&sub_function).expect("create the folders");
        let nodes = ["3\n", "-1\n"].map(|node| {
            fs::write(function.join("numa_node"), node).expect("write the node");
            [&function, &sub_function].map(|folder| numa_node(folder))
        });
        let without = numa_node(&root);
        fs::remove_dir_all(&root).expect("remove the folders");
        assert_eq!((nodes, without), ([[Some(3); 2], [None; 2]], None));
    }
}
