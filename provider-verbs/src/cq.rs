//! Completion queues of the driver.

use std::{ffi::c_int, mem::MaybeUninit, ptr, sync::Arc};

use hmem_core::{Error, ErrorKind, Result};

use super::{
    device::OpenDevice,
    errors,
    sys::{Cq, Wc},
};

/// An `ibv_cq`. Dropping the value destroys the queue.
#[derive(Debug)]
pub(super) struct VerbsCq {
    device: Arc<OpenDevice>,
    cq: *mut Cq,
}

// SAFETY: libibverbs objects may be used from any thread, several at once; the owner of this value
// destroys it once.
unsafe impl Send for VerbsCq {}
// SAFETY: libibverbs locks a queue in each call that takes it (ibverbs(7)).
unsafe impl Sync for VerbsCq {}

impl VerbsCq {
    /// Creates a queue for `depth` requests.
    pub(super) fn create(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        let most = usize::try_from(device.attr().max_cqe).unwrap_or(0);
        // A request of several parts completes once, but each part that fails completes.
        let entries = depth.max(1).saturating_mul(2).saturating_add(64).min(most.max(depth));
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context is open as long as `device`; no channel, vector 0 always exists.
        let cq = unsafe {
            (device.library().functions.create_cq)(
                device.context(),
                entries,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        if cq.is_null() {
            return Err(errors::call(device.nic(), "ibv_create_cq", errors::last())
                .context("depth", depth)
                .context("max_cqe", most));
        }
        Ok(Self { device: Arc::clone(device), cq })
    }

    pub(super) fn cq(&self) -> *mut Cq {
        self.cq
    }

    pub(super) fn device(&self) -> &Arc<OpenDevice> {
        &self.device
    }

    /// Reads up to a batch of work completions and returns those that were read.
    #[inline]
    pub(super) fn poll<'a>(&self, batch: &'a mut [MaybeUninit<Wc>]) -> Result<&'a [Wc]> {
        let Some(poll) = self.device.ops().poll_cq else {
            return Err(Error::new(ErrorKind::Unsupported, "ibv_poll_cq")
                .provider(self.device.nic().to_string()));
        };
        let most = c_int::try_from(batch.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue lives as long as `self`; the batch is writable for `most` entries.
        let count = unsafe { poll(self.cq, most, batch.as_mut_ptr().cast()) };
        if let Ok(read) = usize::try_from(count) {
            // SAFETY: the driver has filled so many entries; every bit pattern of its plain fields
            // is a value.
            return Ok(unsafe { batch[..read].assume_init_ref() });
        }
        let why =
            "the queue was overrun or the device is gone: open a deeper queue, read it more often";
        Err(self.device.refuse(ErrorKind::Driver, "ibv_poll_cq", why).context("returned", count))
    }
}

impl Drop for VerbsCq {
    fn drop(&mut self) {
        if self.device.is_inherited() {
            return;
        }
        let destroy = self.device.library().functions.destroy_cq;
        // SAFETY: it was created by `create`. The owner of a queue pair holds its queues, and drops
        // the queue pair first.
        let destroyed = unsafe { destroy(self.cq) };
        if let Err(errno) = errors::status(destroyed) {
            tracing::error!(nic = %self.device.nic(), %errno, "ibv_destroy_cq");
        }
    }
}
