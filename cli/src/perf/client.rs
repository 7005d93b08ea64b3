//! The client: moves bytes, counts, and takes the time.

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use hmem::{
    Atomic, Error, ErrorKind, Iova, OwnedRegion, RegionSlice, RemoteKey, Result,
    transfer::{AtomicOp, AtomicType, PeerId, RemoteSegment},
};

use super::{
    end::{End, Idle, Place, Role, completed},
    figures::{Bandwidth, Latency, Row},
    layout::{ADDEND, Layout, WORD, same},
    report::Report,
    wire::{Begin, HANDSHAKE, HEARTBEAT, Message, PATIENCE, Peer, Request},
};
use crate::{
    args::{Measure, PerfOp},
    check::heap,
};

/// What the client was asked for.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) op: PerfOp,
    pub(super) sizes: Vec<u64>,
    pub(super) depth: u32,
    pub(super) measure: Measure,
    pub(super) amount: Amount,
    pub(super) seed: u64,
}

/// How much to transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    /// So many times.
    Transfers(u64),
    /// For so long, once at least.
    For(Duration),
}

/// Bytes that a warm-up moves, where that is more than one transfer.
const WARM_UP: u64 = 64 << 20;
/// The longest latency that is told apart, in nanoseconds.
const SLOWEST: u64 = 100_000_000_000;
/// Turns of the loop between looks at the clock.
const CLOCK: u32 = 64;

/// Measures with the server at the other end of `stream`.
pub(super) fn measure(
    place: &Place<'_>,
    wish: &Wish,
    stream: TcpStream,
    address: SocketAddr,
) -> Result<Report> {
    let mut peer = Peer::greet(stream, address)?;
    match converse(place, wish, &mut peer) {
        Ok(report) => Ok(report),
        Err(error) => {
            peer.give_up(&error);
            Err(error)
        }
    }
}

fn converse(place: &Place<'_>, wish: &Wish, peer: &mut Peer) -> Result<Report> {
    let mut request = Request {
        op: wish.op,
        sizes: wish.sizes.clone(),
        depth: wish.depth,
        seed: wish.seed,
        endpoint: Vec::new(),
        side: Default::default(),
    };
    let room =
        request.sizes.iter().map(|size| request.layout(*size).room()).max().unwrap_or_default();
    let end = End::open(place, Role::Client, wish.op, room, wish.depth as usize)?;
    request.endpoint = end.endpoint.name().0;
    request.side = end.side.clone();
    peer.send(&Message::Request(request.clone()))?;
    let ready = match peer.receive("ready", PATIENCE)? {
        Message::Ready(ready) => ready,
        other => return Err(peer.out_of_turn("ready", &other)),
    };
    let key = match (wish.op, ready.key) {
        (PerfOp::Send, _) => None,
        (_, Some(bytes)) => Some(check_key(&bytes, room, peer)?),
        (_, None) => return Err(peer.malformed("ready").context("wrong", "no key")),
    };
    let theirs = ready.side.plain();
    let target = end.connect(ready.endpoint, &theirs)?;
    let operand = (wish.op == PerfOp::Atomic).then(|| end.register_word(ADDEND)).transpose()?;
    let mut client = Client { peer, end, target, key, operand, wish, request, runs: 0 };
    let mut results = Vec::with_capacity(wish.sizes.len());
    for size in &wish.sizes {
        results.push(client.size(*size)?);
    }
    client.peer.send(&Message::Results(results.clone()))?;
    let Client { peer, end, operand, request, .. } = client;
    if let Some(operand) = operand {
        drop(operand.close()?);
    }
    let local = end.side.clone();
    end.close()?;
    Ok(Report::new(super::report::Role::Client, peer.address(), &request, local, theirs, results))
}

/// Reads a key, which must cover what will be written.
fn check_key(bytes: &[u8], room: u64, peer: &Peer) -> Result<RemoteKey> {
    let key = RemoteKey::from_bytes(bytes)?;
    let covers = key
        .pieces()
        .try_fold(0u64, |sum, piece| sum.checked_add(piece.len))
        .is_some_and(|len| len >= room);
    if !covers || key.base().0.checked_add(room).is_none() {
        return Err(peer
            .malformed("ready")
            .context("wrong", "the key does not cover the memory asked for"));
    }
    Ok(key)
}

struct Client<'a> {
    peer: &'a mut Peer,
    end: End,
    target: PeerId,
    key: Option<RemoteKey>,
    /// What an atomic adds.
    operand: Option<OwnedRegion<Vec<u8>>>,
    wish: &'a Wish,
    request: Request,
    runs: u64,
}

impl Client<'_> {
    /// Everything for one size: a warm-up, and what was asked for.
    fn size(&mut self, size: u64) -> Result<Row> {
        let depth = u64::from(self.wish.depth);
        let warm_up = (WARM_UP / size).clamp(1, depth.max(16));
        let warm_up = match self.wish.amount {
            Amount::Transfers(most) => warm_up.min(most),
            Amount::For(_) => warm_up,
        };
        self.run(size, depth, Amount::Transfers(warm_up), None)?;
        let mut row = Row { bytes: size, verified: true, bandwidth: None, latency: None };
        if self.wish.measure != Measure::Latency {
            let (transfers, took) = self.run(size, depth, self.wish.amount, None)?;
            row.bandwidth = Some(Bandwidth::new(self.wish.depth, transfers, size, took));
        }
        if self.wish.measure != Measure::Bandwidth {
            let mut histogram = Histogram::new_with_bounds(1, SLOWEST, 3).map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "histogram").caused_by(error)
            })?;
            self.run(size, 1, self.wish.amount, Some(&mut histogram))?;
            row.latency = Some(Latency::new(&histogram));
        }
        Ok(row)
    }

    /// One run of transfers, from preparing the memory to verifying it; how many there were, and
    /// how long they took.
    fn run(
        &mut self,
        size: u64,
        depth: u64,
        amount: Amount,
        latency: Option<&mut Histogram<u64>>,
    ) -> Result<(u64, Duration)> {
        self.runs += 1;
        let seed = self.wish.seed.wrapping_add(self.runs << 56);
        let layout = self.request.layout(size);
        let mut content = heap(layout.room())?;
        let sources =
            if matches!(self.wish.op, PerfOp::Write | PerfOp::Send) { layout.slots } else { 0 };
        layout.fill(&mut content, seed, sources, 0);
        self.end.region.write(0, &content)?;

        self.peer.send(&Message::Begin(Begin { size, seed }))?;
        match self.peer.receive("go", PATIENCE)? {
            Message::Go => {}
            other => return Err(self.peer.out_of_turn("go", &other)),
        }
        let (transfers, took) = self.transfer(layout, depth, amount, latency)?;
        self.peer.send(&Message::End { transfers })?;
        match self.peer.receive("verified", PATIENCE)? {
            Message::Verified => {}
            other => return Err(self.peer.out_of_turn("verified", &other)),
        }
        match self.wish.op {
            PerfOp::Write | PerfOp::Send => {}
            PerfOp::Read => layout.fill(&mut content, seed, transfers, 0),
            PerfOp::Atomic => layout.fill_fetched(&mut content, seed, transfers),
        }
        same(&content, &self.end.content(content.len())?, "client")?;
        Ok((transfers, took))
    }

    /// Keeps `depth` transfers outstanding until there were enough.
    fn transfer(
        &mut self,
        layout: Layout,
        depth: u64,
        amount: Amount,
        mut latency: Option<&mut Histogram<u64>>,
    ) -> Result<(u64, Duration)> {
        let slices: Vec<_> = (0..layout.slots)
            .map(|slot| self.end.region.slice(layout.offset(slot), layout.size))
            .collect::<Result<_>>()?;
        let most = match amount {
            Amount::Transfers(most) => most,
            Amount::For(_) => u64::MAX,
        };
        let mut completions = Vec::with_capacity(depth as usize);
        let (mut posted, mut done, mut turns, mut over) = (0, 0, 0u32, false);
        let mut idle = Idle::new();
        let started = Instant::now();
        let (mut post_began, mut spoke) = (started, started);
        loop {
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(CLOCK) {
                let now = Instant::now();
                over = matches!(amount, Amount::For(time) if now - started >= time);
                if now - spoke >= HEARTBEAT {
                    self.peer.send(&Message::Running)?;
                    spoke = now;
                }
            }
            while !over && posted < most && posted - done < depth {
                if latency.is_some() {
                    post_began = Instant::now();
                }
                let slot = posted % layout.slots;
                match self.post(layout, slot, slices[slot as usize], posted) {
                    Ok(()) => posted += 1,
                    Err(error) if error.kind() == ErrorKind::Again && posted > done => break,
                    Err(error) => return Err(error),
                }
            }
            if posted == done {
                return Ok((done, started.elapsed()));
            }
            if self.end.queue.read(&mut completions, depth as usize)? == 0 {
                if idle.wait(&self.end.domain, self.peer)? {
                    let message = self.peer.receive("transfer", HANDSHAKE)?;
                    return Err(self.peer.out_of_turn("transfer", &message));
                }
                continue;
            }
            idle.busy();
            if let Some(histogram) = &mut latency {
                let ns = u64::try_from(post_began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                histogram.saturating_record(ns);
            }
            for completion in completions.drain(..) {
                match self.wish.op {
                    // Providers count an atomic's bytes in their own ways.
                    PerfOp::Atomic => drop(completion.result?),
                    _ => completed(completion, layout.size)?,
                }
                done += 1;
            }
        }
    }

    fn post(&self, layout: Layout, slot: u64, slice: RegionSlice, context: u64) -> Result<()> {
        let endpoint = &self.end.endpoint;
        let Some(key) = &self.key else {
            return endpoint.send(&[slice], None, self.target, context);
        };
        let remote = RemoteSegment {
            address: Iova(key.base().0 + layout.offset(slot)),
            len: layout.size,
            key,
        };
        match (self.wish.op, &self.operand) {
            (PerfOp::Read, _) => endpoint.read(&[slice], &[remote], self.target, context),
            (PerfOp::Atomic, Some(operand)) => {
                let atomic = Atomic {
                    op: AtomicOp::Sum,
                    datatype: AtomicType::U64,
                    remote,
                    operand: operand.slice(0, WORD)?,
                    result: Some(slice),
                    compare: None,
                };
                endpoint.atomic(&atomic, self.target, context)
            }
            _ => endpoint.write(&[slice], &[remote], self.target, context),
        }
    }
}
