//! Revocation of dma-bufs by exporters in this process.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use crate::{Errno, Error, ErrorKind, Result};

/// An importer of a dma-buf in this process, such as a software NIC.
pub trait DmaBufImporter: fmt::Debug + Send + Sync {
    /// Ends all accesses to the dma-buf. When the call returns, the importer accesses it no more.
    ///
    /// The exporter calls this once, on any thread and without a lock of its own.
    fn revoke(&self);
}

/// The means by which an exporter in this process revokes a dma-buf, and by which importers in this
/// process learn of it. Clones belong to the same dma-buf.
///
/// An exporter in the kernel notifies importers in the kernel
/// (`dma_buf_invalidate_mappings`, called `dma_buf_move_notify` before 2026), so its exports have
/// no such value. A revocation is final: later exports of the same memory are other dma-bufs.
///
/// ```
/// use hmem_core::iface::Revocation;
///
/// let (exporter, copy) = (Revocation::new(), Revocation::new());
/// let importer = exporter.clone();
/// exporter.revoke();
/// assert!(importer.is_revoked() && !copy.is_revoked());
/// ```
#[derive(Clone, Default)]
pub struct Revocation(Arc<Mutex<Importers>>);

#[derive(Default)]
struct Importers {
    revoked: bool,
    attached: Vec<Weak<dyn DmaBufImporter>>,
}

impl Revocation {
    /// Creates the value for a new dma-buf.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if the dma-buf is revoked.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.0.lock().revoked
    }

    /// Adds an importer, which a revocation notifies until the importer is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with ENODEV if the dma-buf is revoked, as the kernel refuses the
    /// import of such a dma-buf.
    pub fn attach(&self, importer: Weak<dyn DmaBufImporter>) -> Result<()> {
        let mut importers = self.0.lock();
        if importers.revoked {
            return Err(Error::new(ErrorKind::Unavailable, "import dma-buf")
                .errno(Errno(19))
                .context("cause", "the exporter revoked the dma-buf")
                .remedy("export the memory again, once its device is usable"));
        }
        importers.attached.retain(|importer| importer.strong_count() > 0);
        importers.attached.push(importer);
        Ok(())
    }

    /// Revokes the dma-buf. When the first call returns, no importer accesses the dma-buf any more.
    /// Later calls do nothing.
    pub fn revoke(&self) {
        let attached = {
            let mut importers = self.0.lock();
            importers.revoked = true;
            std::mem::take(&mut importers.attached)
        };
        attached.iter().filter_map(Weak::upgrade).for_each(|importer| importer.revoke());
    }
}

impl fmt::Debug for Revocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Revocation").field(&self.is_revoked()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Counting(AtomicU32);

    impl DmaBufImporter for Counting {
        fn revoke(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// LIFE-07
    #[test]
    fn each_live_importer_is_notified_once_and_later_imports_are_refused() {
        let (revocation, importer) = (Revocation::new(), Arc::<Counting>::default());
        let weak = || -> Weak<dyn DmaBufImporter> { Arc::<Counting>::downgrade(&importer) };
        revocation.attach(weak()).expect("not revoked");
        let dropped: Arc<dyn DmaBufImporter> = Arc::<Counting>::default();
        revocation.attach(Arc::downgrade(&dropped)).expect("not revoked");
        drop(dropped);
        revocation.revoke();
        revocation.clone().revoke();
        assert_eq!(importer.0.load(Ordering::Relaxed), 1);
        let error = revocation.attach(weak()).expect_err("revoked");
        assert_eq!((error.kind(), error.os_errno()), (ErrorKind::Unavailable, Some(Errno(19))));
    }
}
