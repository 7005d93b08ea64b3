//! Two connected endpoints of one domain, and blocking transfers between them.

use std::{
    cell::Cell,
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
pub(super) struct Link<'a> {
    pub(super) domain: &'a Domain,
    /// The completion queue of both endpoints.
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    target: Endpoint,
    /// The address of `target`, for requests of `initiator`.
    peer: PeerId,
    /// Number of posted transfers. Transfers are numbered from 1, and the number of a transfer is
    /// its context.
    posted: Cell<u64>,
    /// Number of transfers whose completion was read.
    ended: Cell<u64>,
}

impl<'a> Link<'a> {
    pub(super) fn open(domain: &'a Domain) -> Result<Self> {
        let queue = domain.open_cq(64)?;
        let attr = EndpointAttr { depth: 16, ..EndpointAttr::new(&queue) };
        let (initiator, target) = (domain.open_endpoint(&attr)?, domain.open_endpoint(&attr)?);
        let peer = initiator.resolve(&target.name())?;
        // A connected transport needs the peer's name on both endpoints.
        target.resolve(&initiator.name())?;
        Ok(Self {
            domain,
            queue,
            initiator,
            target,
            peer,
            posted: Cell::new(0),
            ended: Cell::new(0),
        })
    }

    pub(super) fn write(&self, from: RegionSlice, to: LinkTarget<'_>) -> Result<()> {
        let context = self.next();
        self.initiator.write(&[from], &[to.segment()], self.peer, context)?;
        self.wait(context, Some(to.len))
    }

    pub(super) fn read(&self, into: RegionSlice, from: LinkTarget<'_>) -> Result<()> {
        let context = self.next();
        self.initiator.read(&[into], &[from.segment()], self.peer, context)?;
        self.wait(context, Some(from.len))
    }

    /// Adds the u64 in `operand` to the target and stores the previous value in `old`.
    pub(super) fn fetch_add(
        &self,
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
        self.wait(context, None)
    }

    /// Returns whether the completion of a posted transfer has not been read yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.posted.get() != self.ended.get()
    }

    pub(super) fn close(self) -> Result<()> {
        self.initiator.close()?;
        self.target.close()?;
        Ok(())
    }

    /// Returns the context of the next transfer.
    fn next(&self) -> u64 {
        self.posted.get() + 1
    }

    /// Waits for the completion of the transfer that was posted with this context. Fails if another
    /// transfer completes, or if the number of transferred bytes is not `len`.
    fn wait(&self, context: u64, len: Option<u64>) -> Result<()> {
        self.posted.set(context);
        let started = Instant::now();
        let mut completions: Vec<Completion> = Vec::with_capacity(1);
        let mut idle = 0u32;
        while self.queue.read(&mut completions, 1)? == 0 {
            idle += 1;
            if self.domain.progress()? == 0 && idle > 64 {
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
        if completion.context == context {
            self.ended.set(context);
        }
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
