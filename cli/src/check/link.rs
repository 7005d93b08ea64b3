//! Two connected endpoints of one domain, and blocking transfers between them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem::{
    Atomic, Domain, Endpoint, Error, ErrorKind, RegionSlice, RemoteKey, Result,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{AtomicOp, AtomicType, Completion, PeerId, RemoteSegment},
};

/// The timeout after which the check reports a transfer as lost.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two connected endpoints: an initiator and its target.
#[derive(Debug)]
pub(super) struct Link {
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    target: Endpoint,
    peer: PeerId,
    posted: u64,
}

impl Link {
    pub(super) fn open(domain: &Domain) -> Result<Self> {
        let queue = domain.open_cq(64)?;
        let attr = EndpointAttr {
            tx_cq: Arc::clone(&queue),
            rx_cq: Arc::clone(&queue),
            rma_event: false,
            auth_key: None,
            tx_counter: None,
            rx_counter: None,
            depth: 16,
        };
        let (initiator, target) = (domain.open_endpoint(&attr)?, domain.open_endpoint(&attr)?);
        let peer = initiator.resolve(&target.name())?;
        // A connected transport needs the peer's name on both endpoints.
        target.resolve(&initiator.name())?;
        Ok(Self { queue, initiator, target, peer, posted: 0 })
    }

    pub(super) fn write(
        &mut self,
        domain: &Domain,
        from: RegionSlice,
        to: LinkTarget<'_>,
    ) -> Result<()> {
        let context = self.next();
        self.initiator.write(&[from], &[to.segment()], self.peer, context)?;
        self.wait(domain, context, Some(to.len))
    }

    pub(super) fn read(
        &mut self,
        domain: &Domain,
        into: RegionSlice,
        from: LinkTarget<'_>,
    ) -> Result<()> {
        let context = self.next();
        self.initiator.read(&[into], &[from.segment()], self.peer, context)?;
        self.wait(domain, context, Some(from.len))
    }

    /// Adds the u64 in `operand` to the target and stores the previous value in `old`.
    pub(super) fn fetch_add(
        &mut self,
        domain: &Domain,
        operand: RegionSlice,
        old: RegionSlice,
        target: LinkTarget<'_>,
    ) -> Result<()> {
        let context = self.next();
        let atomic = Atomic {
            op: AtomicOp::Sum,
            datatype: AtomicType::U64,
            remote: target.segment(),
            operand,
            result: Some(old),
            compare: None,
        };
        self.initiator.atomic(&atomic, self.peer, context)?;
        self.wait(domain, context, None)
    }

    pub(super) fn close(self) -> Result<()> {
        self.initiator.close()?;
        self.target.close()?;
        Ok(())
    }

    fn next(&mut self) -> u64 {
        self.posted += 1;
        self.posted
    }

    fn wait(&self, domain: &Domain, context: u64, len: Option<u64>) -> Result<()> {
        let started = Instant::now();
        let mut completions: Vec<Completion> = Vec::with_capacity(1);
        let mut idle = 0u32;
        while self.queue.read(&mut completions, 1)? == 0 {
            idle += 1;
            if domain.progress()? == 0 && idle > 64 {
                std::thread::yield_now();
            }
            if idle.is_multiple_of(1024) && started.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::Driver, "wait for completion")
                    .context("seconds", PATIENCE.as_secs())
                    .remedy(
                        "look at the log of the NIC's driver (`dmesg`): the NIC lost a transfer",
                    ));
            }
        }
        let completion = completions.remove(0);
        let moved = completion.result?;
        if completion.context != context || len.is_some_and(|len| len != moved) {
            return Err(Error::new(ErrorKind::Driver, "completion")
                .context("context", completion.context)
                .context("expected", context)
                .context("bytes", moved)
                .remedy("update the NIC's driver: it reported a transfer that was never posted"));
        }
        Ok(())
    }
}

/// A byte range of a registered region, with the remote key that a peer uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkTarget<'a> {
    pub(super) key: &'a RemoteKey,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl<'a> LinkTarget<'a> {
    fn segment(self) -> RemoteSegment<'a> {
        RemoteSegment {
            address: hmem::Iova(self.key.base().0 + self.offset),
            len: self.len,
            key: self.key,
        }
    }
}
