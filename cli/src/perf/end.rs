//! One end of a measurement: a domain with registered memory and an endpoint.

use std::{
    mem,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hmem::{
    Access, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint, Error, ErrorKind, Hmem, Iface,
    IfaceKind, Memory, Region, Request, Result,
    path::{DirectPath, P2pPolicy},
    provider::{CompletionQueue, EndpointAttr, ProgressModel},
    transfer::{Completion, EndpointName, PeerId},
};

use super::{
    figures::{EndDescription, Role, plain},
    wire::{self, Message, PATIENCE, Peer},
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
    /// The direct paths that the domain may use ([`DomainAttr::direct_paths`]). One of them must
    /// work, unless the list is empty. `None` means the default order and policy.
    pub(super) direct_paths: Option<&'a [DirectPath]>,
    /// True to count and time the registrations, for the report.
    pub(super) metrics: bool,
    /// Number of kept bytes (of [`TransferRegion`]s) from which on a server refuses clients. Each
    /// client may add to them.
    pub(super) most_kept: u64,
}

/// The usual value of [`EndConfig::most_kept`].
pub(super) const MOST_KEPT: u64 = 1 << 30;

impl EndConfig<'_> {
    /// Returns an error if the process keeps too much memory to serve another client.
    fn refuse_if_too_much_is_kept(&self) -> Result<()> {
        let kept = KEPT_BYTES.load(Ordering::Relaxed);
        if kept < self.most_kept {
            return Ok(());
        }
        Err(Error::new(ErrorKind::OutOfResources, "serve client")
            .context("kept", kept)
            .context("why", "transfers of clients that hung up may still use their memory")
            .remedy("restart the server, which frees this memory"))
    }
}

/// Registered memory and an endpoint of one side.
#[derive(Debug)]
pub(super) struct End {
    // The fields are dropped in this order: the endpoint ends the transfers, then the region that
    // they use is closed. The domain is dropped after the fields that use it.
    pub(super) endpoint: Endpoint,
    /// The completion queue of the endpoint.
    pub(super) queue: Arc<dyn CompletionQueue>,
    pub(super) region: TransferRegion<DeviceBuffer>,
    pub(super) domain: Domain,
    /// The description that reports print and the other side receives.
    pub(super) side: EndDescription,
    /// True on a NIC of libfabric: transfers may outlive the endpoint.
    of_libfabric: bool,
    /// True if the NIC moves bytes only while this side polls. Without polls, the requests of the
    /// other side do not move bytes either.
    polls: bool,
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
        if role == Role::Server {
            config.refuse_if_too_much_is_kept()?;
        }
        let buffer = allocate(config.iface, Some(config.device), request.room())?;
        let direct = config.direct_paths.is_some_and(|listed| !listed.is_empty());
        let attr = DomainAttr {
            p2p: if direct { P2pPolicy::Required } else { P2pPolicy::Enabled },
            direct_paths: config.direct_paths.map(<[_]>::to_vec),
            registration_latency: config.metrics,
            ..DomainAttr::default()
        };
        let domain = config.nic.open_with(config.hmem, attr)?;
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
        let region = TransferRegion { region: Some(region), keeps_memory: false };
        let depth = depth as usize;
        let queue = domain.open_cq(depth)?;
        let endpoint =
            domain.open_endpoint(&EndpointAttr { depth, ..EndpointAttr::new(&queue) })?;
        let polls = config.nic.attr.progress == ProgressModel::Manual;
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
        let of_libfabric = config.nic.is_of_libfabric();
        Ok(Self { endpoint, queue, region, domain, side, of_libfabric, polls })
    }

    /// Makes the region keep its memory until [`Self::close`] if transfers may outlive the
    /// endpoint. The caller calls this before the first transfer can use the region.
    pub(super) fn expect_transfers(&mut self) {
        self.region.keeps_memory = self.of_libfabric;
    }

    /// Registers 8 bytes of host memory that contain `word`.
    pub(super) fn register_word(&self, word: u64) -> Result<TransferRegion<Vec<u8>>> {
        let word = word.to_ne_bytes().to_vec();
        let region = self.domain.submit(Request::new(word, Access::READ | Access::WRITE).key(3))?;
        Ok(TransferRegion { region: Some(region), keeps_memory: self.region.keeps_memory })
    }

    /// Returns the next message of the other side, as [`Peer::receive`] does. If the NIC moves
    /// bytes only while this side polls, polls until the message arrives.
    pub(super) fn receive(&self, peer: &mut Peer, wanted: &'static str) -> Result<Message> {
        let until = Instant::now() + PATIENCE;
        while self.polls && Instant::now() < until && !peer.has_spoken()? {
            let look = Instant::now() + LOOK;
            while Instant::now() < look {
                if self.domain.progress()? == 0 {
                    thread::yield_now();
                }
            }
        }
        peer.receive(wanted, until.saturating_duration_since(Instant::now()))
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
        self.region.close()?;
        Ok(self.domain.close()?)
    }
}

/// Number of bytes that dropped [`TransferRegion`]s did not free. They stay allocated until the
/// process ends.
static KEPT_BYTES: AtomicU64 = AtomicU64::new(0);

/// A region that transfers use. On a NIC of libfabric, dropping the value closes the region but
/// does not free the memory: libfabric's software providers do not end transfers, so a transfer may
/// still use the memory. On these NICs only [`Self::close`] frees the memory, from
/// [`End::expect_transfers`] on.
#[derive(Debug)]
pub(super) struct TransferRegion<M: Memory> {
    /// The region; `None` once it is closed.
    region: Option<Region<M>>,
    /// True if dropping this value does not free the memory.
    keeps_memory: bool,
}

impl<M: Memory> TransferRegion<M> {
    /// Closes the region and frees its memory. The caller has ended all transfers that use the
    /// region.
    pub(super) fn close(mut self) -> Result<()> {
        if let Some(region) = self.region.take() {
            drop(region.close()?);
        }
        Ok(())
    }
}

impl<M: Memory> Deref for TransferRegion<M> {
    type Target = Region<M>;

    fn deref(&self) -> &Region<M> {
        self.region.as_ref().expect("the region is open until this value is closed or dropped")
    }
}

impl<M: Memory> Drop for TransferRegion<M> {
    fn drop(&mut self) {
        let Some(region) = self.region.take().filter(|_| self.keeps_memory) else { return };
        KEPT_BYTES.fetch_add(region.range().len(), Ordering::Relaxed);
        match region.close() {
            Ok(memory) => mem::forget(memory),
            // Dropping the region keeps its memory if it cannot be closed.
            Err(rejected) => drop(rejected),
        }
    }
}

/// The state of a side that waits for completions. The side spins first, then yields the processor,
/// and regularly checks that the other side is connected.
#[derive(Debug)]
pub(super) struct Idle {
    /// Number of waits since the last call of [`Self::busy`].
    turns: u32,
    /// Time of the first of these waits.
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

    /// Restarts the count of waits. The side calls this when it has read a completion or received
    /// a message.
    pub(super) fn busy(&mut self) {
        self.turns = 0;
    }

    /// Waits briefly. Returns true if the other side has sent a message or closed the connection.
    /// Fails if the side has waited for longer than [`PATIENCE`] since the last call of
    /// [`Self::busy`].
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

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        thread,
    };

    use hmem::{Hmem, loopback::Loopback, provider::Provider as _};

    use super::{super::server::Client, *};
    use crate::{libfabric, perf::figures::Order};

    /// Connects a client to a server on a NIC that the command takes for one of libfabric. The
    /// client sends `request` and hangs up after the server's answer. Returns the answer, and the
    /// number of bytes that the server kept.
    fn hang_up(config: &EndConfig<'_>, request: wire::Request) -> (Result<Message>, u64) {
        let before = KEPT_BYTES.load(Ordering::Relaxed);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = thread::scope(|scope| {
            let server = scope.spawn(move || {
                let (stream, address) = listener.accept().unwrap();
                Client::accept(stream, address).unwrap().serve(config).unwrap_err()
            });
            let mut peer = Peer::greet(TcpStream::connect(address).unwrap(), address).unwrap();
            peer.send(&Message::Request(request)).unwrap();
            let answer = peer.receive("ready", PATIENCE);
            drop(peer);
            server.join().unwrap();
            answer
        });
        (answer, KEPT_BYTES.load(Ordering::Relaxed) - before)
    }

    /// A client cannot use up the memory of a server by hanging up: the server frees the memory of
    /// a client that it has not answered, and refuses clients once too much memory is kept.
    #[test]
    fn server_keeps_only_memory_that_a_transfer_may_use() {
        let hmem = Hmem::builder().without_vendor_ifaces().build().unwrap();
        let loopback = Loopback::builder().build().unwrap();
        let mut attr = loopback.nics().unwrap().remove(0);
        attr.nic.provider = libfabric::NAME.into();
        let nic = ProviderNic::new(Arc::new(loopback), attr, true, "");
        let config = EndConfig {
            hmem: &hmem,
            nic: &nic,
            iface: hmem.registry().iter().next().unwrap(),
            device: DeviceId(0),
            direct_paths: None,
            metrics: false,
            most_kept: MOST_KEPT,
        };
        let mut request = wire::Request {
            op: PerfOp::Write,
            ordering: Order::Strict,
            sizes: vec![1 << 16],
            depth: 1,
            seed: 1,
            endpoint: Vec::new(),
            side: EndDescription::default(),
        };
        let (answer, kept) = hang_up(&config, request.clone());
        assert!(answer.is_err(), "the provider of the client is another: {answer:?}");
        assert_eq!(kept, 0);

        let client = End::open(&config, Role::Client, &request, 1).unwrap();
        (request.endpoint, request.side) = (client.endpoint.name().0, client.side.clone());
        let (answer, kept) = hang_up(&config, request.clone());
        assert!(matches!(answer, Ok(Message::Ready(_))), "{answer:?}");
        assert!(kept >= 1 << 16, "a transfer may still use the memory: {kept} bytes kept");
        client.close().unwrap();

        let (answer, more) = hang_up(&EndConfig { most_kept: kept, ..config }, request);
        let refused = answer.unwrap_err().to_string();
        assert!(refused.contains("restart the server"), "{refused}");
        assert_eq!(more, 0);
    }
}
