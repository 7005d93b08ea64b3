//! Bytes that a NIC brought into a device's memory, made visible to what the device does next
//! (HM-14).
//!
//! A completion says that the NIC is done, not that work which the device starts next finds the
//! bytes: a device may need a flush
//! for that ([`InboundFlush`](crate::iface::InboundFlush), a facet that an iface lacks where it
//! does not). Whoever reads a completion that may stand for bytes in device memory of the domain
//! has them flushed before it is theirs. Such are receives, remote writes with immediate data, reads
//! and atomics. A receive also stands for the writes of its sender before it, of which the target
//! has no completion.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::RwLock;

use crate::{
    Access, DeviceId, IfaceExt, IfaceKind, Registry, Result,
    provider::{CompletionChannel, CompletionQueue},
    registry::AddressOwner,
    transfer::{Completion, CompletionKind},
};

/// The devices into whose memory the NIC of a domain may write.
#[derive(Debug)]
pub(super) struct Inbound {
    registry: Arc<Registry>,
    /// The number of devices, which never falls.
    count: AtomicUsize,
    devices: RwLock<Vec<(IfaceKind, DeviceId)>>,
    warned: AtomicBool,
}

impl Inbound {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self {
            registry,
            count: AtomicUsize::new(0),
            devices: RwLock::default(),
            warned: AtomicBool::new(false),
        }
    }

    /// Returns true if the registry has ifaces of devices.
    pub(super) fn may_have_any(&self) -> bool {
        self.registry.iter().any(|iface| iface.kind() != IfaceKind::SYSTEM)
    }

    /// Memory of this owner is about to be registered for these rights.
    pub(super) fn note(&self, owner: &AddressOwner, access: Access) {
        let Some(device) = owner.device.filter(|_| access.nic_writes()) else { return };
        let device = (owner.iface, device);
        if self.devices.read().contains(&device) {
            return;
        }
        let mut devices = self.devices.write();
        if !devices.contains(&device) {
            devices.push(device);
            self.count.store(devices.len(), Ordering::Release);
        }
    }

    /// Flushes every one; the error is the first one's that failed, and the others are flushed all
    /// the same.
    pub(super) fn flush(&self) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let devices = self.devices.read();
        let flush = |&(iface, device): &(IfaceKind, DeviceId)| {
            self.registry.get(iface)?.flush_inbound(device)
        };
        devices.iter().map(flush).fold(Ok(()), Result::and)
    }

    fn flush_for(&self, completions: &[Completion]) {
        if self.count.load(Ordering::Acquire) == 0 || !completions.iter().any(brings_bytes) {
            return;
        }
        if let Err(error) = self.flush()
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "what NICs wrote into a device's memory may not be what its next work finds");
        }
    }
}

fn brings_bytes(completion: &Completion) -> bool {
    use CompletionKind::{Atomic, Read, Receive, RemoteWrite};
    let kinds = [Receive, RemoteWrite, Read, Atomic];
    completion.result.is_ok() && kinds.contains(&completion.kind)
}

/// A provider's queue whose completions are read after a flush.
#[derive(Debug)]
pub(super) struct FlushingQueue {
    queue: Arc<dyn CompletionQueue>,
    inbound: Arc<Inbound>,
}

impl FlushingQueue {
    pub(super) fn new(queue: Arc<dyn CompletionQueue>, inbound: Arc<Inbound>) -> Self {
        Self { queue, inbound }
    }

    /// The provider's own queue.
    pub(super) fn unwrapped(queue: &Arc<dyn CompletionQueue>) -> &Arc<dyn CompletionQueue> {
        let any: &dyn Any = &**queue;
        any.downcast_ref().map_or(queue, |flushing: &Self| &flushing.queue)
    }
}

impl CompletionQueue for FlushingQueue {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let before = out.len();
        let read = self.queue.read(out, max);
        self.inbound.flush_for(&out[before..]);
        read
    }

    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        let before = out.len();
        let read = self.queue.wait(out, max, timeout);
        self.inbound.flush_for(&out[before..]);
        read
    }

    fn channel(&self) -> Option<&dyn CompletionChannel> {
        self.queue.channel()
    }
}
