//! One end of a measurement: a domain with registered memory and an endpoint.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hmem::{
    Access, DeviceBuffer, DeviceId, Domain, Endpoint, Error, ErrorKind, Hmem, Iface, IfaceKind,
    Region, Request, Result,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{Completion, EndpointName, PeerId},
};

use super::{
    figures::{EndDescription, Role, plain},
    wire::{self, PATIENCE, Peer},
};
use crate::{
    args::PerfOp,
    check::heap,
    json::Attempt,
    machine::{ProviderNic, allocate},
};

/// The memory and the NIC of this side.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndConfig<'a> {
    pub(super) hmem: &'a Hmem,
    pub(super) nic: &'a ProviderNic,
    pub(super) iface: &'a Arc<dyn Iface>,
    pub(super) device: DeviceId,
}

/// Registered memory and an endpoint of one side.
#[derive(Debug)]
pub(super) struct End {
    // The domain is declared, and so dropped, after the fields that use it.
    pub(super) region: Region<DeviceBuffer>,
    pub(super) endpoint: Endpoint,
    /// The completion queue of the endpoint.
    pub(super) queue: Arc<dyn CompletionQueue>,
    pub(super) domain: Domain,
    /// The description that reports print and the other side receives.
    pub(super) side: EndDescription,
}

impl End {
    /// Allocates and registers the memory that `request` needs on this side, and opens an endpoint
    /// for `depth` transfers in flight.
    pub(super) fn open(
        config: &EndConfig<'_>,
        role: Role,
        request: &wire::Request,
        depth: u32,
    ) -> Result<Self> {
        let buffer = allocate(config.iface, Some(config.device), request.room())?;
        let domain = config.nic.open(config.hmem, P2pPolicy::Enabled)?;
        let access = match (request.op, role) {
            (PerfOp::Write, Role::Client) => Access::WRITE,
            (PerfOp::Write, Role::Server) => Access::REMOTE_WRITE,
            (PerfOp::Read, Role::Client) => Access::READ,
            (PerfOp::Read, Role::Server) => Access::REMOTE_READ,
            (PerfOp::Send, Role::Client) => Access::SEND,
            (PerfOp::Send, Role::Server) => Access::RECV,
            (PerfOp::Atomic, Role::Client) => Access::READ | Access::WRITE,
            (PerfOp::Atomic, Role::Server) => Access::REMOTE_READ | Access::REMOTE_WRITE,
        };
        // Only mr modes in which the application chooses the keys use this key.
        let key = if role == Role::Client { 2 } else { 1 };
        let registration = Request::new(buffer, access).key(key);
        let region = domain.submit(registration.ordering(request.ordering.into()))?;
        let depth = depth as usize;
        let queue = domain.open_cq(depth)?;
        let endpoint =
            domain.open_endpoint(&EndpointAttr { depth, ..EndpointAttr::new(&queue) })?;
        let decision = region.decision()?;
        let nic = &config.nic.attr.nic;
        let side = EndDescription {
            iface: config.iface.name().to_owned(),
            device: (config.iface.kind() != IfaceKind::SYSTEM).then_some(config.device.0),
            provider: nic.provider.clone(),
            nic: nic.name.clone(),
            path: decision.path.name().to_owned(),
            reason: decision.reason.clone(),
            trace: decision.attempts.iter().map(Attempt::from).collect(),
        };
        Ok(Self { region, endpoint, queue, domain, side })
    }

    /// Registers a word of host memory.
    pub(super) fn register_word(&self, word: u64) -> Result<Region<Vec<u8>>> {
        let word = word.to_ne_bytes().to_vec();
        Ok(self.domain.submit(Request::new(word, Access::READ | Access::WRITE).key(3))?)
    }

    /// Connects this side's endpoint to the endpoint `name` of the other side.
    pub(super) fn connect(&self, name: Vec<u8>, theirs: &EndDescription) -> Result<PeerId> {
        let mine = &self.side;
        if mine.provider != theirs.provider {
            return Err(Error::new(ErrorKind::InvalidArgument, "connect")
                .provider(mine.provider.clone())
                .context("theirs", plain(&theirs.provider))
                .remedy("use NICs of one provider on both sides (--nic)"));
        }
        self.endpoint.resolve(&EndpointName(name)).map_err(|error| {
            if mine.provider == "loopback" {
                return error.remedy(
                    "use --loopback, or an RDMA NIC: the software NIC reaches only its own process",
                );
            }
            error
        })
    }

    /// Returns a copy of the first `len` bytes of this side's memory.
    pub(super) fn content(&self, len: usize) -> Result<Vec<u8>> {
        let mut found = heap(len as u64)?;
        self.region.read(0, &mut found)?;
        Ok(found)
    }

    /// Closes all resources.
    pub(super) fn close(self) -> Result<()> {
        self.endpoint.close()?;
        drop(self.queue);
        drop(self.region.close()?);
        Ok(self.domain.close()?)
    }
}

/// The state of a side that waits for completions. The side spins first, then yields the processor,
/// and regularly checks that the other side is connected.
#[derive(Debug)]
pub(super) struct Idle {
    /// Number of waits since the last work.
    turns: u32,
    /// Time of the first wait since the last work.
    since: Instant,
    /// Time of the last look for messages on the TCP connection.
    looked: Instant,
}

/// Number of waits that spin. Later waits yield the processor.
const SPINS: u32 = 64;
/// Time between two looks for messages on the TCP connection.
const LOOK: Duration = Duration::from_millis(5);

impl Idle {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { turns: 0, since: now, looked: now }
    }

    /// Records that the side had work. The next wait is the first one again.
    pub(super) fn busy(&mut self) {
        self.turns = 0;
    }

    /// Waits briefly. Returns true if the other side has sent a message or closed the connection.
    /// Fails after [`PATIENCE`] without work.
    pub(super) fn wait(&mut self, domain: &Domain, peer: &Peer) -> Result<bool> {
        if domain.progress()? > 0 {
            return Ok(false);
        }
        self.turns += 1;
        if self.turns == 1 {
            self.since = Instant::now();
        }
        if self.turns <= SPINS {
            std::hint::spin_loop();
            return Ok(false);
        }
        thread::yield_now();
        let now = Instant::now();
        if now - self.looked < LOOK {
            return Ok(false);
        }
        self.looked = now;
        if now - self.since > PATIENCE {
            return Err(Error::new(ErrorKind::Unreachable, "wait for completion")
                .context("peer", peer.address)
                .context("seconds", PATIENCE.as_secs())
                .remedy("check the network between the NICs: no transfer completes"));
        }
        peer.has_spoken()
    }
}

/// Checks that a completion moved all `size` bytes of its transfer.
pub(super) fn completed(completion: Completion, size: u64) -> Result<()> {
    let moved = completion.result?;
    if moved != size {
        return Err(Error::new(ErrorKind::Driver, "completion")
            .context("bytes", moved)
            .context("expected", size));
    }
    Ok(())
}
