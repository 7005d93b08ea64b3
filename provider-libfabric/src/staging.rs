//! The staging buffers of a domain.

use std::sync::Arc;

use hmem_core::{LocalKey, Result, provider::StagingAttr};
use hmem_p2p::staging::Pool;
use parking_lot::Mutex;

/// The staging buffers of a domain, through which requests move memory of staged regions.
#[derive(Debug)]
pub(super) struct Staging {
    attr: StagingAttr,
    /// The staging buffers with their local key; `None` until the registration of the first staged
    /// region allocates and registers them.
    buffers: Mutex<Option<(Arc<Pool>, LocalKey)>>,
}

impl Staging {
    pub(super) fn new(attr: StagingAttr) -> Self {
        Self { attr, buffers: Mutex::default() }
    }

    /// Returns the staging buffers with their local key.
    pub(super) fn buffers(&self) -> Option<(Arc<Pool>, LocalKey)> {
        self.buffers.lock().clone()
    }

    /// Allocates the staging buffers, and registers them by `register`. Does nothing if an earlier
    /// call has done so.
    pub(super) fn prepare(&self, register: impl FnOnce(&Pool) -> Result<LocalKey>) -> Result<()> {
        let mut buffers = self.buffers.lock();
        if buffers.is_none() {
            let pool = Pool::new(self.attr, None)?;
            let key = register(&pool).map_err(|error| {
                error.context("for", "staging buffers").context("length", pool.range().len())
            })?;
            *buffers = Some((pool, key));
        }
        Ok(())
    }
}
