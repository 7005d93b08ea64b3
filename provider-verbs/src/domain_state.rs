//! The state of a domain that its endpoints share: its regions, windows and keys.

#![allow(unsafe_code, reason = "registers the buffer of discarded reads")]

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock, Weak, atomic::AtomicU64},
    time::Duration,
};

use hmem_core::{
    Error, ErrorKind, RemoteKey, RemotePiece, Result,
    provider::{RevocationListeners, StagingAttr},
};
use parking_lot::{Mutex, RwLock};

use super::{
    access::VerbsOptions,
    device::{ProtectionDomain, max_registration},
    port::PortChoice,
    ready::Ready,
    region::Regions,
    register::Registrar,
    split::Span,
    staged::Staging,
    sys::{AccessFlags, Mr},
    window::Windows,
};

/// Options of [`Builder`](super::Builder) that apply to each domain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DomainOptions {
    pub(super) options: VerbsOptions,
    pub(super) port: PortChoice,
    /// Maximum length of one registration in bytes; 0 for the device's limit.
    pub(super) max_registration: u64,
    pub(super) connect_in_process: bool,
    /// Timeout of calls that bind or invalidate a window and wait for the result; `None` for
    /// [`BIND_TIMEOUT`](super::window::BIND_TIMEOUT).
    pub(super) bind_timeout: Option<Duration>,
}

/// State that the domain, its endpoints and its queues share.
pub(super) struct DomainState {
    pub(super) options: DomainOptions,
    pub(super) regions: Regions,
    pub(super) windows: Windows,
    pub(super) staging: Staging,
    /// For each key that the application made with `map_raw`: the ranges of a peer's memory to
    /// which the key gives access. Each entry is found by the number in the [`RemoteKey`].
    pub(super) mapped: RwLock<HashMap<u64, Arc<[RemotePiece]>>>,
    /// The listeners for revoked memory.
    pub(super) listeners: RevocationListeners,
    /// Number of open endpoints.
    pub(super) endpoints: AtomicU64,
    /// The completion queues that are closed together with the domain.
    queues: Mutex<Vec<Weak<Ready>>>,
    /// The buffer that [`Self::discard_buffer`] registers at its first call.
    discard_buffer: OnceLock<DiscardBuffer>,
    /// The protection domain. This field comes last, so that it is dropped after all objects in the
    /// protection domain.
    pub(super) pd: ProtectionDomain,
}

impl DomainState {
    pub(super) fn new(pd: ProtectionDomain, options: DomainOptions, staging: StagingAttr) -> Self {
        Self {
            options,
            regions: Regions::default(),
            windows: Windows::default(),
            staging: Staging::new(staging),
            mapped: RwLock::default(),
            listeners: RevocationListeners::default(),
            endpoints: AtomicU64::new(0),
            queues: Mutex::default(),
            discard_buffer: OnceLock::new(),
            pd,
        }
    }

    /// Adds a completion queue that is closed together with the domain.
    pub(super) fn add_queue(&self, queue: &Arc<Ready>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    pub(super) fn registrar(&self) -> Registrar<'_> {
        let device = max_registration(&self.pd.device.attr);
        let max = match self.options.max_registration {
            0 => device,
            asked => asked.min(device),
        };
        Registrar { pd: &self.pd, regions: &self.regions, max }
    }

    /// Returns the error for a request that the provider does not post, with the remedy `why`.
    pub(super) fn refuse_post(&self, kind: ErrorKind, why: &'static str) -> Error {
        self.pd.device.refuse(kind, "post", why)
    }

    /// Returns the pieces of a peer's memory that a mapped key grants access to.
    pub(super) fn mapped_key(&self, key: &RemoteKey) -> Result<Arc<[RemotePiece]>> {
        let number = key.as_u64()?;
        self.mapped.read().get(&number).cloned().ok_or_else(|| {
            let why = "map the raw key in this domain, and use it before it is unmapped";
            self.refuse_post(ErrorKind::InvalidKey, why)
        })
    }

    /// Returns eight bytes of registered memory for results of atomics that the application
    /// discards.
    pub(super) fn discard_buffer(&self) -> Result<Span> {
        // The driver's call holds no lock of this value. If two threads register at once, one of
        // them releases its registration.
        if self.discard_buffer.get().is_none()
            && let Err(late) = self.discard_buffer.set(DiscardBuffer::register(&self.pd)?)
        {
            late.release(&self.pd);
        }
        let buffer = self.discard_buffer.wait();
        let address = buffer.memory.expose_provenance() as u64;
        Ok(Span { address, len: size_of::<u64>() as u64, lkey: buffer.lkey })
    }
}

/// Registered memory for results of atomics that the application discards. Every verbs atomic
/// writes the old value to local memory.
struct DiscardBuffer {
    mr: *mut Mr,
    lkey: u32,
    /// Eight bytes that only the NIC writes.
    memory: *mut u64,
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and no thread reads the memory.
unsafe impl Send for DiscardBuffer {}
// SAFETY: no thread reads the memory, and the region is only used through its key.
unsafe impl Sync for DiscardBuffer {}

impl DiscardBuffer {
    fn register(pd: &ProtectionDomain) -> Result<Self> {
        let memory: *mut u64 = Box::into_raw(Box::new(0));
        let access = AccessFlags::LOCAL_WRITE.bits() as i32;
        let register = pd.device.library.functions.reg_mr;
        // SAFETY: the memory is freed only after the region is deregistered.
        let mr = unsafe { register(pd.pd, memory.cast(), size_of::<u64>(), access) };
        let mr = pd.device.created("ibv_reg_mr", mr).inspect_err(|_| {
            // SAFETY: `memory` came from `Box::into_raw` above, and its registration failed.
            drop(unsafe { Box::from_raw(memory) });
        })?;
        // SAFETY: the driver returned the region, so it is valid.
        let lkey = unsafe { (*mr).lkey };
        Ok(Self { mr, lkey, memory })
    }

    fn release(self, pd: &ProtectionDomain) {
        let deregister = pd.device.library.functions.dereg_mr;
        // SAFETY: no transfer uses the memory: this value was never returned, or every endpoint is
        // closed.
        match pd.device.check_destroyed("ibv_dereg_mr", unsafe { deregister(self.mr) }) {
            // SAFETY: `memory` came from `Box::into_raw`, and the call above deregistered it.
            Ok(()) => drop(unsafe { Box::from_raw(self.memory) }),
            Err(error) => {
                tracing::error!(error = %error.full(), "eight bytes are leaked");
            }
        }
    }
}

impl Drop for DomainState {
    fn drop(&mut self) {
        if self.pd.device.is_inherited() {
            return;
        }
        self.queues.get_mut().iter().filter_map(Weak::upgrade).for_each(|queue| queue.close());
        self.windows.clear(&self.pd);
        self.regions.clear(&self.pd);
        if let Some(discard_buffer) = self.discard_buffer.take() {
            discard_buffer.release(&self.pd);
        }
    }
}
