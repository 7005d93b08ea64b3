//! The client: posts transfers, counts them, and measures their time.

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use hmem::{
    Atomic, Error, ErrorKind, Iova, RegionSlice, RemoteKey, Result,
    transfer::{AtomicOp, AtomicType, PeerId, RemoteSegment},
};

use super::{
    Event,
    end::{End, EndConfig, Idle, TransferRegion, completed},
    figures::{Bandwidth, Gain, Latency, Order, Role, Row},
    layout::{ADDEND, Layout, WORD, same},
    metrics::Metrics,
    report::Report,
    wire::{Begin, HANDSHAKE, HEARTBEAT, Message, Peer, Request},
};
use crate::{
    args::{Measure, PerfOp},
    check::heap,
};

/// The measurements that the command line selects.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) op: PerfOp,
    /// The write orderings, in the order in which they are measured.
    pub(super) orders: &'static [Order],
    pub(super) sizes: Vec<u64>,
    pub(super) depth: u32,
    pub(super) measure: Measure,
    pub(super) amount: Amount,
    pub(super) seed: u64,
}

impl Plan {
    /// Returns the number of measurements.
    pub(super) fn measurements(&self) -> usize {
        self.orders.len() * self.sizes.len() * if self.measure == Measure::Both { 2 } else { 1 }
    }
}

/// The length of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    /// A number of transfers.
    Transfers(u64),
    /// As many transfers as end in this duration, but at least one.
    For(Duration),
}

/// Maximum number of bytes that a warm-up transfers. A single transfer may exceed the maximum.
const WARM_UP: u64 = 64 << 20;
/// The largest latency that the histogram can record, in nanoseconds.
const SLOWEST: u64 = 100_000_000_000;
/// Number of iterations of the transfer loop between two reads of the clock.
const CLOCK: u32 = 64;

/// A callback for the events of a measurement. An error that it returns ends the measurement.
pub(super) type Observer<'a> = dyn FnMut(Event<'_>) -> Result<()> + 'a;

/// Runs the measurements with the server at the other end of `stream`.
pub(super) fn measure(
    config: &EndConfig<'_>,
    plan: &Plan,
    stream: TcpStream,
    address: SocketAddr,
    observer: &mut Observer<'_>,
) -> Result<Report> {
    let mut peer = Peer::greet(stream, address)?;
    converse(config, plan, &mut peer, observer).inspect_err(|error| peer.give_up(error))
}

fn converse(
    config: &EndConfig<'_>,
    plan: &Plan,
    peer: &mut Peer,
    observer: &mut Observer<'_>,
) -> Result<Report> {
    let mut report = None;
    for order in plan.orders {
        measure_in_order(config, plan, *order, peer, &mut report, observer)?;
    }
    let report: Report = report.expect("a plan has a write ordering");
    peer.send(&Message::Results(report.results.clone()))?;
    Ok(report)
}

/// Registers memory with the write ordering `order`, connects to the server, and measures all
/// sizes. The server registers its memory with this ordering too. Adds the rows to the report. The
/// call for the first ordering creates the report.
fn measure_in_order(
    config: &EndConfig<'_>,
    plan: &Plan,
    order: Order,
    peer: &mut Peer,
    report: &mut Option<Report>,
    observer: &mut Observer<'_>,
) -> Result<()> {
    let mut request = Request {
        op: plan.op,
        ordering: order,
        sizes: plan.sizes.clone(),
        depth: plan.depth,
        seed: plan.seed,
        endpoint: Vec::new(),
        side: Default::default(),
    };
    let room = request.room();
    let mut end = End::open(config, Role::Client, &request, plan.depth)?;
    request.endpoint = end.endpoint.name().0;
    request.side = end.side.clone();
    peer.send(&Message::Request(request.clone()))?;
    let ready = match end.receive(peer, "ready")? {
        Message::Ready(ready) => ready,
        other => return Err(peer.out_of_turn("ready", &other)),
    };
    let key = match (plan.op, ready.key) {
        (PerfOp::Send, _) => None,
        (_, Some(bytes)) => Some(check_key(&bytes, room, peer)?),
        (_, None) => return Err(peer.malformed("ready").context("why", "no key")),
    };
    let theirs = ready.side.plain();
    let target = end.connect(ready.endpoint, &theirs)?;
    end.expect_transfers();
    let operand = (plan.op == PerfOp::Atomic).then(|| end.register_word(ADDEND)).transpose()?;
    if report.is_none() {
        let first = Report::new(Role::Client, peer.address, &request, end.side.clone(), theirs);
        let depth = (plan.measure != Measure::Latency).then_some(plan.depth);
        observer(Event::Connected { report: &first, depth })?;
        *report = Some(first);
    }
    let report = report.as_mut().expect("created above");
    let results = &mut report.results;
    let mut client = Client { peer, end, target, key, operand, plan, request, runs: 0 };
    for (at, size) in plan.sizes.iter().enumerate() {
        let mut row = client.size(*size, observer)?;
        if order == Order::Relaxed {
            let strict = results.get(at).filter(|row| row.ordering == Order::Strict);
            row.gain = strict.map(|strict| Gain::of(&row, strict));
        }
        observer(Event::Row(&row))?;
        results.push(row);
    }
    let Client { end, operand, .. } = client;
    if config.metrics {
        report.metrics.get_or_insert_default().push(Metrics::of(&end.domain, order));
    }
    if let Some(operand) = operand {
        operand.close()?;
    }
    end.close()
}

/// Decodes the server's remote key, and fails if it covers fewer than `room` bytes.
fn check_key(bytes: &[u8], room: u64, peer: &Peer) -> Result<RemoteKey> {
    let key = RemoteKey::from_bytes(bytes)?;
    let covers = key
        .pieces()
        .try_fold(0u64, |sum, piece| sum.checked_add(piece.len))
        .is_some_and(|len| len >= room);
    if !covers || key.base().0.checked_add(room).is_none() {
        return Err(peer
            .malformed("ready")
            .context("why", "the key does not cover the requested memory"));
    }
    Ok(key)
}

/// A client that is connected to the server for measurements with one write ordering.
struct Client<'a> {
    /// The TCP connection to the server.
    peer: &'a mut Peer,
    end: End,
    /// The address of the server's endpoint.
    target: PeerId,
    /// The key of the server's memory; `None` for messages.
    key: Option<RemoteKey>,
    /// The registered addend of fetch-adds; `None` for other operations.
    operand: Option<TransferRegion<Vec<u8>>>,
    plan: &'a Plan,
    request: Request,
    /// Number of calls of `run`, including warm-ups. Each of them uses a pattern of its own.
    runs: u64,
}

impl Client<'_> {
    /// Measures transfers of one size, after a warm-up.
    fn size(&mut self, size: u64, observer: &mut Observer<'_>) -> Result<Row> {
        let depth = u64::from(self.plan.depth);
        let warm_up = (WARM_UP / size).clamp(1, depth.max(16));
        let warm_up = match self.plan.amount {
            Amount::Transfers(most) => warm_up.min(most),
            Amount::For(_) => warm_up,
        };
        self.run(size, depth, Amount::Transfers(warm_up), None)?;
        let ordering = self.request.ordering;
        let (bandwidth, latency, gain) = (None, None, None);
        let mut row = Row { bytes: size, ordering, verified: true, bandwidth, latency, gain };
        if self.plan.measure != Measure::Latency {
            observer(Event::Next { size, figure: "bandwidth" })?;
            let (transfers, took) = self.run(size, depth, self.plan.amount, None)?;
            row.bandwidth = Some(Bandwidth::new(self.plan.depth, transfers, size, took));
        }
        if self.plan.measure != Measure::Bandwidth {
            observer(Event::Next { size, figure: "latency" })?;
            let mut histogram = Histogram::new_with_bounds(1, SLOWEST, 3).map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "histogram").caused_by(error)
            })?;
            self.run(size, 1, self.plan.amount, Some(&mut histogram))?;
            row.latency = Some(Latency::new(&histogram));
        }
        Ok(row)
    }

    /// Prepares the memory, runs transfers, and verifies the memory. Returns the number of
    /// transfers and their duration.
    fn run(
        &mut self,
        size: u64,
        depth: u64,
        amount: Amount,
        latency: Option<&mut Histogram<u64>>,
    ) -> Result<(u64, Duration)> {
        self.runs += 1;
        let seed = self.plan.seed.wrapping_add(self.runs << 56);
        let layout = self.request.layout(size);
        let mut content = heap(layout.room())?;
        let sources =
            if matches!(self.plan.op, PerfOp::Write | PerfOp::Send) { layout.slots } else { 0 };
        layout.fill(&mut content, seed, sources, 0);
        self.end.region.write(0, &content)?;

        self.peer.send(&Message::Begin(Begin { size, seed }))?;
        match self.end.receive(self.peer, "go")? {
            Message::Go => {}
            other => return Err(self.peer.out_of_turn("go", &other)),
        }
        let (transfers, took) = self.transfer(layout, depth, amount, latency)?;
        self.peer.send(&Message::End { transfers })?;
        match self.end.receive(self.peer, "verified")? {
            Message::Verified => {}
            other => return Err(self.peer.out_of_turn("verified", &other)),
        }
        match self.plan.op {
            PerfOp::Write | PerfOp::Send => {}
            PerfOp::Read => layout.fill(&mut content, seed, transfers, 0),
            PerfOp::Atomic => layout.fill_fetched(&mut content, seed, transfers),
        }
        same(&content, &self.end.content(content.len())?, "client")?;
        Ok((transfers, took))
    }

    /// Keeps `depth` transfers in flight until the measurement is complete. Records the time of
    /// each transfer in `latency`, which requires a depth of 1. Returns the number of transfers and
    /// their duration.
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
                match self.plan.op {
                    // The byte count of an atomic is not checked, since it differs between
                    // providers.
                    PerfOp::Atomic => drop(completion.result?),
                    _ => completed(completion, layout.size)?,
                }
                done += 1;
            }
        }
    }

    /// Posts one transfer. `slice` is slot number `slot` of the client's memory. A message goes to
    /// the next receive that the server has posted. Other transfers use the slot with this number
    /// in the server's memory.
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
        match (self.plan.op, &self.operand) {
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
