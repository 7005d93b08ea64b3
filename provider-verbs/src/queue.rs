//! Completion queues.

use std::{
    collections::VecDeque,
    ffi::c_int,
    mem::MaybeUninit,
    ptr,
    sync::{Arc, Weak},
};

use hmem_core::{Error, ErrorKind, Result, provider::CompletionQueue, transfer::Completion};
use parking_lot::{Mutex, ReentrantMutex, RwLock};
use rustc_hash::FxHashMap;

use super::{
    device::OpenDevice,
    endpoint::EndpointState,
    errors,
    sys::{Cq, Wc},
};

/// An `ibv_cq`, destroyed with it, and the endpoints that complete to it.
#[derive(Debug)]
pub(super) struct CqState {
    device: Arc<OpenDevice>,
    cq: *mut Cq,
    endpoints: RwLock<FxHashMap<u32, Weak<EndpointState>>>,
    /// Completions read from the NIC before the application asked for them.
    ready: Mutex<VecDeque<Completion>>,
    /// Held from asking the NIC until what it said is handed on: a staged transfer's progress asks
    /// too, and completions keep their order.
    asking: ReentrantMutex<()>,
}

// SAFETY: libibverbs objects may be used from any thread, several at once; the owner of this value
// destroys it once.
unsafe impl Send for CqState {}
// SAFETY: libibverbs locks a queue in each call that takes it (ibverbs(7)).
unsafe impl Sync for CqState {}

const BATCH: usize = 16;

impl CqState {
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
        Ok(Self {
            device: Arc::clone(device),
            cq,
            endpoints: RwLock::default(),
            ready: Mutex::default(),
            asking: ReentrantMutex::default(),
        })
    }

    pub(super) fn cq(&self) -> *mut Cq {
        self.cq
    }

    pub(super) fn device(&self) -> &Arc<OpenDevice> {
        &self.device
    }

    pub(super) fn attach(&self, number: u32, endpoint: &Arc<EndpointState>) {
        self.endpoints.write().insert(number, Arc::downgrade(endpoint));
    }

    pub(super) fn detach(&self, number: u32) {
        self.endpoints.write().remove(&number);
    }

    pub(super) fn push(&self, completion: Completion) {
        self.ready.lock().push_back(completion);
    }

    /// Reads up to a batch of work completions, and gives those that there were.
    pub(super) fn poll_raw<'a>(&self, batch: &'a mut [MaybeUninit<Wc>]) -> Result<&'a [Wc]> {
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
        Err(Error::new(ErrorKind::Driver, "ibv_poll_cq")
            .provider(self.device.nic().to_string())
            .context("returned", count)
            .remedy("the queue was overrun or the device is gone: open a deeper queue, read it more often"))
    }

    /// Hands on what the NIC has completed, up to `max`.
    pub(super) fn poll(&self, max: usize, mut deliver: impl FnMut(Completion)) -> Result<usize> {
        let mut delivered = 0;
        // Not zeroed: it would be most of the work of an empty poll.
        let mut batch = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        while delivered < max {
            let wanted = (max - delivered).min(BATCH);
            let read = self.poll_raw(&mut batch[..wanted])?;
            for wc in read {
                let endpoint = self.endpoints.read().get(&wc.qp_num).and_then(Weak::upgrade);
                if let Some(completion) = endpoint.and_then(|endpoint| endpoint.complete(wc)) {
                    deliver(completion);
                    delivered += 1;
                }
            }
            if read.len() < wanted {
                break;
            }
        }
        Ok(delivered)
    }

    /// Takes everything that the NIC has completed into memory.
    pub(super) fn drain(&self) -> Result<()> {
        let _asking = self.asking.lock();
        self.poll(usize::MAX, |completion| self.push(completion)).map(|_| ())
    }
}

impl Drop for CqState {
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

/// The application's handle of a queue.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) state: Arc<CqState>,
}

impl CompletionQueue for Queue {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.state.device.active().progress();
        let _asking = self.state.asking.lock();
        let mut count = 0;
        {
            let mut ready = self.state.ready.lock();
            while count < max
                && let Some(completion) = ready.pop_front()
            {
                out.push(completion);
                count += 1;
            }
        }
        if count < max {
            count += self.state.poll(max - count, |completion| out.push(completion))?;
        }
        Ok(count)
    }
}
