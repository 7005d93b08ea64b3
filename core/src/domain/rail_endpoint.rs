//! Endpoints of several NICs that share transfers, and go on without a NIC that fails.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use smallvec::SmallVec;

use super::{
    Domain, endpoint::Endpoint, memory::Memory, region_slice::RegionSlice,
    roaming_region::RoamingRegion,
};
use crate::{
    Error, ErrorKind, Iova, Rejected, Result,
    key_feed::PeerKeys,
    nic::Nic,
    provider::{CompletionQueue, EndpointAttr, MANUAL_WAIT},
    transfer::{
        Completion, CompletionKind, EndpointName, OwnedRemoteSegment, PeerId, RemoteSegment,
    },
};

/// The policy by which a [`RailEndpoint`] divides transfers among its rails.
///
/// A transfer is cut into chunks. The rails take the chunks in turn, each as often as its weight
/// says.
///
/// ```
/// use hmem_core::Stripe;
///
/// // Two of three chunks go over the first NIC, which is twice as fast as the other one.
/// let stripe = Stripe::chunks(1 << 20).weight("mlx5_0", 2).weight("mlx5_1", 1);
/// ```
#[derive(Clone, Debug)]
pub struct Stripe {
    chunk: u64,
    depth: usize,
    weights: Vec<(String, u32)>,
}

impl Stripe {
    /// The shortest chunk, in bytes.
    pub const MIN_CHUNK: u64 = 4096;

    /// Cuts transfers into chunks of `len` bytes. A length below [`Stripe::MIN_CHUNK`] counts as
    /// that length. With [`u64::MAX`], each transfer is one chunk.
    #[must_use]
    pub fn chunks(len: u64) -> Self {
        Self { chunk: len.max(Self::MIN_CHUNK), depth: 16, weights: Vec::new() }
    }

    /// Sets how many chunks a rail has in flight at most. 0 counts as 1. Default: 16.
    ///
    /// When a rail fails, its chunks in flight are transferred again. A smaller number limits this
    /// repetition.
    #[must_use]
    pub fn depth(mut self, chunks: usize) -> Self {
        self.depth = chunks.max(1);
        self
    }

    /// Sets the weight of a NIC, named as in [`RailKeys::of`](crate::RailKeys::of). 0 counts as 1.
    /// Default: 1.
    #[must_use]
    pub fn weight(mut self, nic: impl Into<String>, weight: u32) -> Self {
        self.weights.push((nic.into(), weight.max(1)));
        self
    }

    fn weight_of(&self, nic: &Nic) -> i64 {
        let set = self.weights.iter().rev().find(|(name, _)| nic.is_named(name));
        set.map_or(1, |(_, weight)| i64::from(*weight))
    }
}

/// The state of a rail of a [`RailEndpoint`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RailState {
    /// The rail is open, and waits for [`RailEndpoint::connect`].
    Open,
    /// The rail takes chunks.
    Working,
    /// The rail takes no chunks, because of this error. If the NIC works, call
    /// [`RailEndpoint::connect`] for this rail again. Otherwise open a new rail on a new domain.
    Failed(Error),
}

/// A rail of a [`RailEndpoint`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RailStatus<'a> {
    /// The local NIC.
    pub nic: &'a Nic,
    /// The state of the rail.
    pub state: &'a RailState,
    /// The number of bytes that the rail has moved since it was opened.
    pub bytes: u64,
}

/// The bytes of a striped write or read.
#[derive(Debug)]
pub struct RailTransfer<'a, M: Memory> {
    /// The local memory, registered on the NICs of the rails.
    pub local: &'a RoamingRegion<M>,
    /// The offset of the first byte in the local memory.
    pub local_offset: u64,
    /// The keys of the peer's memory.
    pub remote: &'a PeerKeys,
    /// The offsets of the bytes in the peer's memory.
    pub remote_offsets: Range<u64>,
    /// The generation in which the peer named the bytes, as for [`PeerKeys::segments`].
    pub generation: u64,
}

/// An endpoint on each of several NICs (rails), which stripes writes and reads over them.
///
/// A [`Stripe`] cuts each transfer into chunks and says which rail takes which. A transfer ends
/// with one [`Completion`], when all its chunks have ended.
///
/// # Failure and return of a NIC
///
/// A rail fails if a request on it ends with [`ErrorKind::Unavailable`] (the device is lost),
/// [`ErrorKind::Unreachable`] (the peer's NIC or a port is gone), [`ErrorKind::Canceled`] (the
/// connection has ended) or [`ErrorKind::Driver`]. Its chunks that have not succeeded are posted
/// again on the other rails. So the failure of a rail loses no bytes, but has these effects:
///
/// - A write may write the same bytes twice. A packet of the failed rail may still be in the
///   network, and arrive after the transfer has completed. Before you write other bytes to the same
///   place, exchange messages with the peer: send one, and wait for the answer.
/// - If no rail is left for a chunk, its transfer fails with the error of the last rail.
///
/// Every other error is that of the request, for example [`ErrorKind::InvalidKey`]. It ends the
/// transfer, and is not tried again. On verbs such an error also ends the connection of its rail.
///
/// To take a rail back, call [`RailEndpoint::open`] and [`RailEndpoint::connect`] again, after both
/// sides have registered the memory on the NIC ([`RoamingRegion::add`]). The rail serves transfers
/// that start after that.
///
/// # Order
///
/// Chunks have no order among each other. The peer must not poll the memory to learn of the end of
/// a transfer: send a message after the completion instead.
///
/// Atomics and messages are not striped, because a repetition would apply or deliver them twice.
/// Post them to an [`Endpoint`].
///
/// # Examples
///
/// ```no_run
/// use std::time::Duration;
///
/// use hmem_core::{
///     Domain, RailEndpoint, RailTransfer, Result, RoamingRegion, Stripe, key_feed::PeerKeys,
///     transfer::EndpointName,
/// };
///
/// /// Writes the first MiB of `memory` to a peer over all NICs of `domains`. `exchange` sends the
/// /// name of an endpoint to the peer, and returns the peer's NIC with the name of its endpoint.
/// fn push(
///     domains: &[Domain],
///     memory: Vec<u8>,
///     peer: &PeerKeys,
///     exchange: impl Fn(EndpointName) -> (String, EndpointName),
/// ) -> Result<()> {
///     let access = hmem_core::Access::WRITE;
///     let mut memory = RoamingRegion::new(domains[0].register(memory, access)?)?;
///     let mut rails = RailEndpoint::new(Stripe::chunks(256 << 10));
///     for domain in domains {
///         memory.add(domain)?;
///         let (peer_nic, name) = exchange(rails.open(domain)?);
///         rails.connect(&domain.provider_attr().nic.name, &peer_nic, &name)?;
///     }
///     let transfer = RailTransfer {
///         local: &memory,
///         local_offset: 0,
///         remote: peer,
///         remote_offsets: 0..1 << 20,
///         generation: peer.generation(),
///     };
///     rails.write(&transfer, 7)?;
///     let mut done = Vec::new();
///     rails.wait(&mut done, Duration::MAX);
///     done.remove(0).result.map(|_bytes| ())
/// }
/// ```
pub struct RailEndpoint {
    stripe: Stripe,
    rails: Vec<Rail>,
    transfers: HashMap<u64, Transfer>,
    /// The completions of transfers that [`RailEndpoint::poll`] has not returned.
    done: Vec<Completion>,
    /// The last identifier that was assigned. Transfers, requests and connections share one
    /// sequence of identifiers.
    last: u64,
    /// The position of the rail for which [`RailEndpoint::wait`] waits next.
    turn: usize,
}

struct Rail {
    nic: Nic,
    /// The identifier of the rail's current or last connection. 0 means that the rail was never
    /// connected.
    connection: u64,
    /// The endpoint on the rail's NIC. `None` once the endpoint is closed: the NIC then executes no
    /// request of the rail, but `in_flight` has the requests whose completions have not been read.
    endpoint: Option<Endpoint>,
    /// The completion queue of `endpoint`. No other endpoint uses the queue.
    queue: Arc<dyn CompletionQueue>,
    /// The peer, and the name of the peer's NIC. `None` until the rail is connected for the first
    /// time.
    peer: Option<(PeerId, String)>,
    state: RailState,
    /// True once the application has removed or replaced the rail.
    removed: bool,
    /// The number of bytes of the chunks that have succeeded.
    bytes: u64,
    weight: i64,
    /// The credit by which [`choose`] compares the rails. The rail with the largest credit gets the
    /// next chunk.
    credit: i64,
    /// The chunks to post. Empty unless the state is Working.
    waiting: VecDeque<Chunk>,
    /// The posted chunks whose completions have not been read, by the contexts of their requests.
    in_flight: HashMap<u64, Chunk>,
}

/// A part of a transfer, which one request of a rail moves.
#[derive(Clone, Copy)]
struct Chunk {
    transfer: u64,
    /// The identifier of the connection to which the chunk was assigned last.
    connection: u64,
    offset: u64,
    len: u64,
}

struct Transfer {
    context: u64,
    kind: CompletionKind,
    len: u64,
    /// The number of chunks that have not ended.
    left: u64,
    /// The error of the first chunk that failed. No further chunk is posted then.
    error: Option<Error>,
    /// The local and remote memory of the transfer, once for each connection that can carry it.
    routes: Vec<Route>,
}

/// The local and remote memory of a transfer, with the descriptor and keys for one connection.
struct Route {
    connection: u64,
    local: RegionSlice,
    remote: Vec<OwnedRemoteSegment>,
}

impl RailEndpoint {
    /// Creates an endpoint without rails.
    #[must_use]
    pub fn new(stripe: Stripe) -> Self {
        let (rails, transfers, done) = (Vec::new(), HashMap::new(), Vec::new());
        Self { stripe, rails, transfers, done, last: 0, turn: 0 }
    }

    /// Opens a rail on the domain's NIC, and returns the name of its endpoint, to send to the peer.
    ///
    /// A rail that is already on this NIC is removed, as by [`RailEndpoint::remove`].
    ///
    /// # Errors
    /// The errors of [`Domain::open_cq`], [`Domain::open_endpoint`] and [`Endpoint::close`].
    pub fn open(&mut self, domain: &Domain) -> Result<EndpointName> {
        let default_depth = 128;
        let depth = self.stripe.depth.max(default_depth);
        let queue = domain.open_cq(depth)?;
        let endpoint =
            domain.open_endpoint(&EndpointAttr { depth, ..EndpointAttr::new(&queue) })?;
        let (nic, name) = (domain.provider_attr().nic.clone(), endpoint.name());
        if let Some(old) = self.rails.iter().position(|rail| rail.is_current(&nic)) {
            self.close_rail(old)?;
        }
        self.rails.push(Rail {
            connection: 0,
            endpoint: Some(endpoint),
            queue,
            peer: None,
            state: RailState::Open,
            removed: false,
            bytes: 0,
            weight: self.stripe.weight_of(&nic),
            credit: 0,
            waiting: VecDeque::new(),
            in_flight: HashMap::new(),
            nic,
        });
        Ok(name)
    }

    /// Connects the rail on `nic` to an endpoint of the peer on `peer_nic`, so that the rail takes
    /// chunks. Both names are as in [`RailKeys::of`](crate::RailKeys::of).
    ///
    /// Call this function again after the rail has failed, or if the peer has a new endpoint.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if no rail is open on `nic`.
    /// - The errors of [`Endpoint::resolve`]. The state of the rail stays.
    pub fn connect(&mut self, nic: &str, peer_nic: &str, name: &EndpointName) -> Result<()> {
        let at = self.find(nic, "connect rail")?;
        let rail = &mut self.rails[at];
        let endpoint = rail.endpoint.as_ref().ok_or_else(|| unknown("connect rail", nic))?;
        let peer = endpoint.resolve(name)?;
        self.last += 1;
        rail.connection = self.last;
        rail.peer = Some((peer, peer_nic.to_owned()));
        rail.state = RailState::Working;
        // The routes of transfers in progress are those of the old connection.
        let ended = canceled("the rail was connected again");
        for chunk in std::mem::take(&mut rail.waiting) {
            self.give(chunk, &ended);
        }
        Ok(())
    }

    /// Closes the rail on `nic`. Its chunks are posted again on the other rails. The domain can be
    /// closed afterwards. Staged transfers in flight keep the rail's queue open until
    /// [`RailEndpoint::poll`] has read their completions.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if no rail is open on `nic`.
    /// - The errors of [`Endpoint::close`]. The rail stays.
    pub fn remove(&mut self, nic: &str) -> Result<()> {
        let at = self.find(nic, "remove rail")?;
        self.close_rail(at)
    }

    /// Returns the rails, in the order in which they were opened.
    pub fn rails(&self) -> impl Iterator<Item = RailStatus<'_>> {
        let current = self.rails.iter().filter(|rail| !rail.removed);
        current.map(|Rail { nic, state, bytes, .. }| RailStatus { nic, state, bytes: *bytes })
    }

    /// Starts a write of local bytes to the peer's memory. Its completion has `context`.
    ///
    /// The transfer uses every rail that works now, if the local memory is registered on its NIC
    /// and the peer's keys include one for the NIC that the rail is connected to. Later changes of
    /// keys affect later transfers.
    ///
    /// # Errors
    /// - [`ErrorKind::Unreachable`] if no rail can carry the transfer. The context value `rails`
    ///   has the reason for each rail.
    /// - The errors of [`PeerKeys::segments`] and [`Region::slice`](super::Region::slice).
    ///
    /// Other errors, such as a refused post, are reported by the completion.
    pub fn write<M: Memory>(&mut self, transfer: &RailTransfer<'_, M>, context: u64) -> Result<()> {
        self.start(CompletionKind::Write, transfer, context)
    }

    /// Starts a read of bytes of the peer's memory into local memory, like [`RailEndpoint::write`].
    ///
    /// # Errors
    /// The errors of [`RailEndpoint::write`].
    pub fn read<M: Memory>(&mut self, transfer: &RailTransfer<'_, M>, context: u64) -> Result<()> {
        self.start(CompletionKind::Read, transfer, context)
    }

    /// Posts chunks, reads the completions of chunks, and appends the completions of transfers to
    /// `out`. Returns their number. Does not wait.
    ///
    /// Chunks proceed only if the application calls this function or [`RailEndpoint::wait`].
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        for at in 0..self.rails.len() {
            if !self.rails[at].in_flight.is_empty() {
                self.read_queue(at, Duration::ZERO);
            }
        }
        self.drop_removed();
        self.post_waiting();
        let count = self.done.len();
        out.append(&mut self.done);
        count
    }

    /// Polls like [`RailEndpoint::poll`], and waits up to `timeout` for the first completion.
    /// Returns 0 after the timeout, and at once if no transfer is in progress.
    ///
    /// A timeout cancels no transfer. [`Duration::MAX`] waits forever.
    pub fn wait(&mut self, out: &mut Vec<Completion>, timeout: Duration) -> usize {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let count = self.poll(out);
            let left = deadline.map_or(MANUAL_WAIT, |deadline| {
                deadline.saturating_duration_since(Instant::now()).min(MANUAL_WAIT)
            });
            if count > 0 || left.is_zero() || self.transfers.is_empty() {
                return count;
            }
            self.turn = self.turn.wrapping_add(1);
            let rails = self.rails.len();
            let mut turns = (0..rails).map(|step| (self.turn % rails + step) % rails);
            match turns.find(|at| !self.rails[*at].in_flight.is_empty()) {
                Some(at) => self.read_queue(at, left),
                // Every post was refused for now.
                None => thread::sleep(left),
            }
        }
    }

    fn find(&self, nic: &str, operation: &'static str) -> Result<usize> {
        let named = |rail: &Rail| !rail.removed && rail.nic.is_named(nic);
        self.rails.iter().position(named).ok_or_else(|| unknown(operation, nic))
    }

    fn start<M: Memory>(
        &mut self,
        kind: CompletionKind,
        transfer: &RailTransfer<'_, M>,
        context: u64,
    ) -> Result<()> {
        let routes = self.rails.iter().map(|rail| rail.route(transfer));
        let routes: Vec<_> = routes.filter_map(Result::transpose).collect::<Result<_>>()?;
        if routes.is_empty() {
            return Err(self.no_route(transfer));
        }
        let Range { start, end } = transfer.remote_offsets;
        let len = end - start;
        let left = len.div_ceil(self.stripe.chunk);
        self.last += 1;
        let id = self.last;
        self.transfers.insert(id, Transfer { context, kind, len, left, error: None, routes });
        for index in 0..left {
            let offset = index * self.stripe.chunk;
            let len = self.stripe.chunk.min(len - offset);
            let chunk = Chunk { transfer: id, connection: 0, offset, len };
            self.give(chunk, &canceled("no rail works"));
        }
        if left == 0 {
            self.finish(id);
        }
        self.post_waiting();
        Ok(())
    }

    /// Returns the error for a transfer that no rail can carry, with the reason for each rail.
    fn no_route<M: Memory>(&self, transfer: &RailTransfer<'_, M>) -> Error {
        let reasons = self.rails.iter().filter(|rail| !rail.removed).map(|rail| {
            let reason = match (&rail.state, &rail.peer) {
                (RailState::Failed(error), _) => error.to_string(),
                (RailState::Working, Some((_, peer_nic))) if rail.has_local(transfer) => {
                    format!("the peer has no key for {peer_nic}")
                }
                (RailState::Working, _) => "the local memory is not on this NIC".to_owned(),
                (RailState::Open, _) => "not connected".to_owned(),
            };
            format!("{}: {reason}", rail.nic)
        });
        Error::new(ErrorKind::Unreachable, "striped transfer")
            .context("why", "no rail can carry the transfer")
            .context("rails", reasons.collect::<Vec<_>>().join("; "))
            .remedy(
                "open and connect a rail, and register both memories on its NICs \
                 (RoamingRegion::add)",
            )
    }

    /// Gives a chunk to the next rail. If no rail is left for it, the transfer ends with `error`.
    fn give(&mut self, mut chunk: Chunk, error: &Error) {
        let Some(transfer) = self.transfers.get(&chunk.transfer) else { return };
        match choose(&mut self.rails, transfer) {
            Some(rail) if transfer.error.is_none() => {
                chunk.connection = rail.connection;
                rail.waiting.push_back(chunk);
            }
            _ => self.end(chunk, Err(error.clone())),
        }
    }

    /// Records the end of a chunk.
    fn end(&mut self, chunk: Chunk, result: Result<()>) {
        let Some(transfer) = self.transfers.get_mut(&chunk.transfer) else { return };
        if let Err(error) = result {
            transfer.error.get_or_insert(error);
        }
        transfer.left -= 1;
        if transfer.left == 0 {
            self.finish(chunk.transfer);
        }
    }

    /// Records the end of a transfer, all of whose chunks have ended.
    fn finish(&mut self, id: u64) {
        let Some(Transfer { context, kind, len, error, .. }) = self.transfers.remove(&id) else {
            return;
        };
        self.done.push(Completion::new(context, kind, error.map_or(Ok(len), Err)));
    }

    /// Posts the waiting chunks, as far as the rails have room.
    fn post_waiting(&mut self) {
        // A rail that fails gives its chunks to rails before and after it.
        let mut again = true;
        while std::mem::take(&mut again) {
            for at in 0..self.rails.len() {
                again |= self.post_waiting_of(at);
            }
        }
    }

    /// Posts the waiting chunks of one rail. Returns true if the rail failed.
    fn post_waiting_of(&mut self, at: usize) -> bool {
        while let rail = &mut self.rails[at]
            && rail.in_flight.len() < self.stripe.depth
            && let Some(chunk) = rail.waiting.pop_front()
        {
            let Some(transfer) = self.transfers.get(&chunk.transfer) else { continue };
            if transfer.error.is_some() {
                self.end(chunk, Ok(()));
                continue;
            }
            self.last += 1;
            let context = self.last;
            match rail.post(chunk, transfer, context) {
                Ok(()) => drop(rail.in_flight.insert(context, chunk)),
                Err(error) if error.kind() == ErrorKind::Again => {
                    rail.waiting.push_front(chunk);
                    return false;
                }
                Err(error) if ends_rail(&error) => {
                    rail.waiting.push_front(chunk);
                    self.fail(at, error);
                    return true;
                }
                Err(error) => self.end(chunk, Err(error)),
            }
        }
        false
    }

    /// Reads completions of one rail, and waits up to `timeout` for the first one.
    fn read_queue(&mut self, at: usize, timeout: Duration) {
        let rail = &mut self.rails[at];
        let (mut batch, max) = (Vec::new(), rail.in_flight.len());
        let read = if timeout.is_zero() {
            rail.queue.read(&mut batch, max)
        } else {
            rail.queue.wait(&mut batch, max, timeout)
        };
        for completion in batch {
            self.chunk_completed(at, completion);
        }
        if let Err(error) = read {
            // Closing the endpoint ends the requests whose completions cannot be read any more.
            drop(self.rails[at].endpoint.take());
            let lost = std::mem::take(&mut self.rails[at].in_flight);
            self.fail(at, error.clone());
            for chunk in lost.into_values() {
                self.give(chunk, &error);
            }
        }
    }

    fn chunk_completed(&mut self, at: usize, completion: Completion) {
        let rail = &mut self.rails[at];
        let Some(chunk) = rail.in_flight.remove(&completion.context) else { return };
        match completion.result {
            Ok(_) => {
                rail.bytes += chunk.len;
                self.end(chunk, Ok(()));
            }
            Err(error) if ends_rail(&error) => {
                if chunk.connection == rail.connection {
                    self.fail(at, error.clone());
                }
                self.give(chunk, &error);
            }
            Err(error) => self.end(chunk, Err(error)),
        }
    }

    /// Takes a rail out of use, and gives its waiting chunks to the other rails.
    fn fail(&mut self, at: usize, error: Error) {
        let rail = &mut self.rails[at];
        let waiting = std::mem::take(&mut rail.waiting);
        if !matches!(rail.state, RailState::Failed(_)) {
            tracing::warn!(nic = %rail.nic, %error, chunks = waiting.len(), "a rail failed");
            rail.state = RailState::Failed(error.clone());
        }
        for chunk in waiting {
            self.give(chunk, &error);
        }
    }

    fn close_rail(&mut self, at: usize) -> Result<()> {
        let rail = &mut self.rails[at];
        if let Some(endpoint) = rail.endpoint.take()
            && let Err(Rejected { value, error }) = endpoint.close()
        {
            rail.endpoint = Some(value);
            return Err(error);
        }
        rail.removed = true;
        let waiting = std::mem::take(&mut rail.waiting);
        rail.state = RailState::Failed(canceled("the rail was removed"));
        for chunk in waiting {
            self.give(chunk, &canceled("the rail was removed"));
        }
        if !self.rails[at].in_flight.is_empty() {
            self.read_queue(at, Duration::ZERO);
        }
        self.drop_removed();
        Ok(())
    }

    /// Drops the removed rails all of whose completions have been read, with their queues.
    fn drop_removed(&mut self) {
        self.rails.retain(|rail| !rail.removed || !rail.in_flight.is_empty());
    }
}

impl Rail {
    fn is_current(&self, nic: &Nic) -> bool {
        !self.removed && self.nic.is_same(nic)
    }

    fn has_local<M: Memory>(&self, transfer: &RailTransfer<'_, M>) -> bool {
        let endpoint = self.endpoint.as_ref();
        endpoint.is_some_and(|it| transfer.local.region_in(&it.domain).is_some())
    }

    /// Returns the memory of a transfer with the descriptor and keys for this rail. Returns `None`
    /// if the rail cannot carry the transfer.
    fn route<M: Memory>(&self, transfer: &RailTransfer<'_, M>) -> Result<Option<Route>> {
        let (RailState::Working, Some((_, peer_nic)), Some(endpoint)) =
            (&self.state, &self.peer, &self.endpoint)
        else {
            return Ok(None);
        };
        let Some(region) = transfer.local.region_in(&endpoint.domain) else { return Ok(None) };
        let offsets = transfer.remote_offsets.clone();
        let remote = match transfer.remote.segments(peer_nic, offsets, transfer.generation) {
            Ok(segments) => segments.iter().map(OwnedRemoteSegment::new).collect(),
            // The peer's NIC has no key.
            Err(error) if error.kind() == ErrorKind::InvalidArgument => return Ok(None),
            Err(error) => return Err(error),
        };
        let Range { start, end } = transfer.remote_offsets;
        let local = region.slice(transfer.local_offset, end - start)?;
        Ok(Some(Route { connection: self.connection, local, remote }))
    }

    /// Posts the request that moves a chunk.
    fn post(&self, chunk: Chunk, transfer: &Transfer, context: u64) -> Result<()> {
        let route = transfer.routes.iter().find(|route| route.connection == self.connection);
        let (Some(route), Some((peer, _)), Some(endpoint)) = (route, &self.peer, &self.endpoint)
        else {
            return Err(canceled("the connection has ended"));
        };
        let local = [route.local.part(chunk.offset, chunk.len)];
        let remote = part(&route.remote, chunk.offset, chunk.len);
        match transfer.kind {
            CompletionKind::Read => endpoint.read(&local, &remote, *peer, context),
            _ => endpoint.write(&local, &remote, *peer, context),
        }
    }
}

/// Chooses the rail for the next chunk of a transfer, or `None` if no rail can carry it.
///
/// Each call adds a rail's weight to its credit, and takes the sum of all weights from the chosen
/// rail, which has the largest credit. So the rails alternate, each as often as its weight says.
fn choose<'a>(rails: &'a mut [Rail], transfer: &Transfer) -> Option<&'a mut Rail> {
    let carries = |rail: &&mut Rail| {
        matches!(rail.state, RailState::Working)
            && transfer.routes.iter().any(|route| route.connection == rail.connection)
    };
    let mut sum = 0;
    let mut chosen: Option<&mut Rail> = None;
    for rail in rails.iter_mut().filter(carries) {
        rail.credit += rail.weight;
        sum += rail.weight;
        if chosen.as_ref().is_none_or(|chosen| rail.credit > chosen.credit) {
            chosen = Some(rail);
        }
    }
    let chosen = chosen?;
    chosen.credit -= sum;
    Some(chosen)
}

/// Returns the segments for `len` bytes from `offset`, where `segments` are one sequence of bytes.
fn part(
    segments: &[OwnedRemoteSegment],
    offset: u64,
    len: u64,
) -> SmallVec<[RemoteSegment<'_>; 1]> {
    let (mut start, mut found) = (0, SmallVec::new());
    for OwnedRemoteSegment { address, len: whole, key } in segments {
        let (from, to) = (offset.max(start), (offset + len).min(start + whole));
        if from < to {
            let address = Iova(address.0.wrapping_add(from - start));
            found.push(RemoteSegment { address, len: to - from, key });
        }
        start += whole;
    }
    found
}

/// Returns true if a request with this error makes its rail fail, and false if only the request
/// fails.
fn ends_rail(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unavailable | ErrorKind::Unreachable | ErrorKind::Canceled | ErrorKind::Driver
    )
}

fn canceled(why: &'static str) -> Error {
    Error::new(ErrorKind::Canceled, "striped transfer").context("why", why)
}

fn unknown(operation: &'static str, nic: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .context("nic", nic)
        .context("why", "no rail is open on this NIC")
        .remedy("name the NIC of a rail that is open (RailEndpoint::open)")
}

impl fmt::Debug for RailEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RailEndpoint")
            .field("stripe", &self.stripe)
            .field("rails", &self.rails().collect::<Vec<_>>())
            .field("transfers", &self.transfers.len())
            .finish_non_exhaustive()
    }
}
