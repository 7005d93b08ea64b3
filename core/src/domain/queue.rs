//! Completion queues of a domain.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use super::{DomainInner, inbound::Inbound, local::InFlight};
use crate::{
    Error, ErrorKind, Result,
    provider::{CompletionChannel, CompletionQueue},
    transfer::Completion,
};

/// A completion queue of a domain: the provider's queue, which also flushes the domain's devices
/// and ends the leases of completed requests. It serves endpoints of its own domain only.
pub(super) struct DomainQueue {
    /// The provider's own queue.
    pub(super) queue: Arc<dyn CompletionQueue>,
    /// The domain that opened the queue. Used only to refuse endpoints of other domains.
    domain: Weak<DomainInner>,
    /// The devices to flush before completions are returned. `None` if the domain has no device
    /// iface, or forbids driver calls in transfers.
    inbound: Option<Arc<Inbound>>,
    /// The requests that hold leases. `None` if the domain's endpoints lease no local memory.
    pub(super) in_flight: Option<Arc<InFlight>>,
}

impl DomainQueue {
    /// Wraps a queue that the domain's provider has opened. `leases` is true if the domain's
    /// endpoints lease local memory.
    pub(super) fn new(
        domain: &Arc<DomainInner>,
        queue: Arc<dyn CompletionQueue>,
        leases: bool,
    ) -> Self {
        let flushes = domain.attr.driver_calls_in_transfers && domain.inbound.may_have_any();
        Self {
            queue,
            domain: Arc::downgrade(domain),
            inbound: flushes.then(|| Arc::clone(&domain.inbound)),
            in_flight: leases.then(Arc::default),
        }
    }

    /// Returns the `DomainQueue` behind a trait object. Fails if the queue is of another type, or
    /// if another domain opened it.
    pub(super) fn of<'a>(
        domain: &Arc<DomainInner>,
        queue: &'a Arc<dyn CompletionQueue>,
    ) -> Result<&'a Self> {
        let any: &dyn Any = &**queue;
        let own = any.downcast_ref::<Self>();
        own.filter(|own| Weak::as_ptr(&own.domain) == Arc::as_ptr(domain)).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "open endpoint")
                .provider(domain.provider_attr.nic.to_string())
                .context("why", "a completion queue was not opened by the endpoint's domain")
                .remedy("open both queues with `Domain::open_cq` of the endpoint's domain")
        })
    }

    /// Flushes devices and ends leases for completions that the application gets now.
    #[inline]
    fn prepare(&self, completions: &mut [Completion]) {
        if let Some(inbound) = &self.inbound {
            inbound.flush_for(completions);
        }
        if let Some(in_flight) = &self.in_flight {
            in_flight.translate(completions);
        }
    }
}

impl CompletionQueue for DomainQueue {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let before = out.len();
        let read = self.queue.read(out, max);
        // The application gets these completions even if the read ended with an error.
        self.prepare(&mut out[before..]);
        read
    }

    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        let before = out.len();
        let read = self.queue.wait(out, max, timeout);
        self.prepare(&mut out[before..]);
        read
    }

    fn channel(&self) -> Option<&dyn CompletionChannel> {
        self.queue.channel()
    }
}

impl fmt::Debug for DomainQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainQueue").field("queue", &self.queue).finish_non_exhaustive()
    }
}
