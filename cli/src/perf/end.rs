//! One end of a measurement: a domain, registered memory, and an endpoint on it.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, Endpoint, Error, ErrorKind, Hmem,
    Iface, IfaceKind, MrAttr, MrFlags, OwnedRegion, Result, WriteOrdering,
    iface::AllocRequest,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{Completion, EndpointName, PeerId},
};

use super::{
    figures::{Side, plain},
    wire::{PATIENCE, Peer},
};
use crate::{args::PerfOp, check::heap, json::Attempt, machine::Fabric};

/// Which memory and which NIC this side uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) hmem: &'a Hmem,
    pub(super) nic: &'a Fabric,
    pub(super) iface: &'a Arc<dyn Iface>,
    pub(super) device: DeviceId,
    pub(super) ordering: WriteOrdering,
}

/// Which of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

/// Registered memory and an endpoint.
#[derive(Debug)]
pub(super) struct End {
    // In the order in which they are given back.
    pub(super) region: OwnedRegion<DeviceBuffer>,
    pub(super) endpoint: Endpoint,
    pub(super) queue: Arc<dyn CompletionQueue>,
    pub(super) domain: Domain,
    pub(super) side: Side,
}

impl End {
    /// Allocates and registers `room` bytes, and opens an endpoint for `depth` requests.
    pub(super) fn open(
        place: &Place<'_>,
        role: Role,
        op: PerfOp,
        room: u64,
        depth: usize,
    ) -> Result<Self> {
        let kind = if place.iface.kind() == IfaceKind::SYSTEM {
            AllocationKind::System
        } else {
            AllocationKind::Device
        };
        let buffer = DeviceBuffer::allocate(
            place.iface,
            &AllocRequest { len: room, device: place.device, kind },
        )?;
        let domain = place.nic.open(place.hmem, P2pPolicy::Enabled)?;
        let access = match (op, role) {
            (PerfOp::Write, Role::Client) => Access::WRITE,
            (PerfOp::Write, Role::Server) => Access::REMOTE_WRITE,
            (PerfOp::Read, Role::Client) => Access::READ,
            (PerfOp::Read, Role::Server) => Access::REMOTE_READ,
            (PerfOp::Send, Role::Client) => Access::SEND,
            (PerfOp::Send, Role::Server) => Access::RECV,
            (PerfOp::Atomic, Role::Client) => Access::READ | Access::WRITE,
            (PerfOp::Atomic, Role::Server) => Access::REMOTE_READ | Access::REMOTE_WRITE,
        };
        // The key is for modes in which the application chooses it.
        let attr = MrAttr {
            ordering: Some(place.ordering),
            ..MrAttr::new(&[], access).key(if role == Role::Client { 2 } else { 1 })
        };
        let region = domain.register_with(buffer, &attr, MrFlags::empty())?;
        let queue = domain.open_cq(depth)?;
        let endpoint =
            domain.open_endpoint(&EndpointAttr { depth, ..EndpointAttr::new(&queue) })?;
        let decision = region.decision()?;
        let nic = &place.nic.attr.nic;
        let side = Side {
            iface: place.iface.name().to_owned(),
            device: (place.iface.kind() != IfaceKind::SYSTEM).then_some(place.device.0),
            provider: nic.provider.clone(),
            nic: nic.name.clone(),
            path: decision.path.name().to_owned(),
            reason: decision.reason.clone(),
            ordering: match place.ordering {
                WriteOrdering::Relaxed => "relaxed".to_owned(),
                WriteOrdering::Strict => "strict".to_owned(),
            },
            trace: decision.attempts.iter().map(Attempt::from).collect(),
        };
        Ok(Self { region, endpoint, queue, domain, side })
    }

    /// Registers a word of host memory, for what providers take by value.
    pub(super) fn register_word(&self, word: u64) -> Result<OwnedRegion<Vec<u8>>> {
        let attr = MrAttr::new(&[], Access::READ | Access::WRITE).key(3);
        Ok(self.domain.register_with(word.to_ne_bytes().to_vec(), &attr, MrFlags::empty())?)
    }

    /// Connects to the endpoint of this name.
    pub(super) fn connect(&self, name: Vec<u8>, theirs: &Side) -> Result<PeerId> {
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
                    "the software NIC reaches only its own process: use --loopback, or an RDMA NIC",
                );
            }
            error
        })
    }

    /// The first `len` bytes of the memory.
    pub(super) fn content(&self, len: usize) -> Result<Vec<u8>> {
        let mut found = heap(len as u64)?;
        self.region.read(0, &mut found)?;
        Ok(found)
    }

    /// Gives everything back.
    pub(super) fn close(self) -> Result<()> {
        self.endpoint.close()?;
        drop(self.queue);
        drop(self.region.close()?);
        Ok(self.domain.close()?)
    }
}

/// The waiting of a side without work: it first retries, then yields, and at times checks that the
/// other side is still connected.
#[derive(Debug)]
pub(super) struct Idle {
    turns: u32,
    since: Instant,
    looked: Instant,
}

const SPINS: u32 = 64;
const LOOK: Duration = Duration::from_millis(5);

impl Idle {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { turns: 0, since: now, looked: now }
    }

    /// Something happened.
    pub(super) fn busy(&mut self) {
        self.turns = 0;
    }

    /// Nothing happened. `true` if the other side has said something (or hung up).
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
                .context("peer", peer.address())
                .context("seconds", PATIENCE.as_secs())
                .remedy("nothing completes: is the network between the NICs up?"));
        }
        peer.has_spoken()
    }
}

/// The bytes that a completion of a transfer of `size` bytes moved, which are all of them.
pub(super) fn completed(completion: Completion, size: u64) -> Result<()> {
    let moved = completion.result?;
    if moved != size {
        return Err(Error::new(ErrorKind::Driver, "completion")
            .context("bytes", moved)
            .context("expected", size));
    }
    Ok(())
}
