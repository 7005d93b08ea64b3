//! The server: registers memory for a client, and verifies the bytes in that memory after the
//! client's transfers.

use std::{
    net::{SocketAddr, TcpStream},
    ops::ControlFlow,
};

use hmem::{Error, ErrorKind, Result};

use super::{
    end::{End, EndConfig, Idle, completed},
    figures::{Role, Row},
    layout::{Layout, WORD, same},
    metrics::Metrics,
    report::Report,
    wire::{Begin, HANDSHAKE, Message, Peer, Ready, Request},
};
use crate::{
    args::{LARGEST, MOST_SIZES, PerfOp},
    check::heap,
};

/// Maximum number of transfers in flight that a client may request.
const MOST_DEPTH: u32 = 4096;
/// Number of receives that the server posts in addition to the depth, so that each message finds a
/// posted receive.
const SPARE_RECEIVES: u32 = 256;

/// A connected client that has sent a request and waits for the answer.
#[derive(Debug)]
pub(super) struct Client {
    peer: Peer,
    request: Request,
}

impl Client {
    /// Exchanges greetings and reads the client's request.
    pub(super) fn accept(stream: TcpStream, address: SocketAddr) -> Result<Self> {
        let mut peer = Peer::greet(stream, address)?;
        let request = receive_request(&mut peer).inspect_err(|error| peer.give_up(error))?;
        Ok(Self { peer, request })
    }

    /// Serves this client until the client sends its results.
    pub(super) fn serve(mut self, config: &EndConfig<'_>) -> Result<Report> {
        let served = converse(config, &mut self.peer, self.request);
        served.inspect_err(|error| self.peer.give_up(error))
    }
}

fn receive_request(peer: &mut Peer) -> Result<Request> {
    match peer.receive("request", HANDSHAKE)? {
        Message::Request(request) => check(&request, peer).map(|()| request),
        other => Err(peer.out_of_turn("request", &other)),
    }
}

fn converse(config: &EndConfig<'_>, peer: &mut Peer, mut request: Request) -> Result<Report> {
    let mut metrics = Vec::new();
    loop {
        match serve_request(config, peer, request, &mut metrics)? {
            ControlFlow::Break(report) => {
                return Ok(Report { metrics: config.metrics.then_some(metrics), ..report });
            }
            ControlFlow::Continue(next) => {
                check(&next, peer)?;
                request = next;
            }
        }
    }
}

/// Serves the measurements of one request, and adds the counts of the domain to `metrics`. Returns
/// the report if the client then sends its results. Returns the next request if the client asks for
/// another write ordering.
fn serve_request(
    config: &EndConfig<'_>,
    peer: &mut Peer,
    request: Request,
    metrics: &mut Vec<Metrics>,
) -> Result<ControlFlow<Report, Request>> {
    let receives = request.depth + SPARE_RECEIVES;
    let depth = if request.op == PerfOp::Send { receives } else { request.depth };
    let mut end = End::open(config, Role::Server, &request, depth)?;
    let theirs = request.side.clone().plain();
    end.connect(request.endpoint.clone(), &theirs)?;
    end.expect_transfers();

    let mut server = Server { peer, end, request, posted: 0, received: 0 };
    if server.request.op == PerfOp::Send {
        server.post_receives(receives)?;
    }
    let key = match server.request.op {
        PerfOp::Send => None,
        _ => Some(server.end.region.key()?.to_bytes()),
    };
    let ready =
        Ready { endpoint: server.end.endpoint.name().0, key, side: server.end.side.clone() };
    server.peer.send(&Message::Ready(ready))?;
    let mut runs = 0;
    let last = loop {
        match server.end.receive(server.peer, "begin")? {
            Message::Begin(begin) => {
                server.run(begin)?;
                runs += 1;
            }
            Message::Results(results) => {
                check_results(&results, runs, &server.request, server.peer)?;
                break ControlFlow::Break(results);
            }
            Message::Request(next) => break ControlFlow::Continue(next),
            other => return Err(server.peer.out_of_turn("begin", &other)),
        }
    };
    let Server { peer, end, request, .. } = server;
    let local = end.side.clone();
    metrics.push(Metrics::of(&end.domain, request.ordering));
    end.close()?;
    Ok(last.map_break(|results| Report {
        results,
        ..Report::new(Role::Server, peer.address, &request, local, theirs)
    }))
}

/// Returns an error if the client's request has values that the server does not accept.
fn check(request: &Request, peer: &Peer) -> Result<()> {
    let refuse = |what: &'static str, value: u64| {
        Err(peer
            .malformed("request")
            .context(what, value)
            .remedy("run the same version of hmem on both sides"))
    };
    if request.sizes.is_empty() || request.sizes.len() > MOST_SIZES {
        return refuse("sizes", request.sizes.len() as u64);
    }
    if !(1..=MOST_DEPTH).contains(&request.depth) {
        return refuse("depth", u64::from(request.depth));
    }
    let possible = if request.op == PerfOp::Atomic { WORD..=WORD } else { 1..=LARGEST };
    if let Some(size) = request.sizes.iter().find(|size| !possible.contains(size)) {
        return refuse("size", *size);
    }
    Ok(())
}

/// Returns an error if the results are not those of measurements that the server verified. `runs`
/// is the number of verified runs.
fn check_results(results: &[Row], runs: u64, request: &Request, peer: &Peer) -> Result<()> {
    let served = |row: &Row| row.verified && request.sizes.contains(&row.bytes);
    if runs > 0 && results.iter().all(served) {
        return Ok(());
    }
    Err(peer
        .malformed("results")
        .context("why", "they are not those of the measurements")
        .remedy("run the same version of hmem on both sides"))
}

/// A server that is connected to a client for one request.
struct Server<'a> {
    /// The TCP connection to the client.
    peer: &'a mut Peer,
    end: End,
    request: Request,
    /// Number of receives posted for this request.
    posted: u64,
    /// Number of messages received for this request, over all runs.
    received: u64,
}

impl Server<'_> {
    /// Serves one series of transfers: prepares the memory, waits for the transfers, and verifies
    /// the memory.
    fn run(&mut self, begin: Begin) -> Result<()> {
        if !self.request.sizes.contains(&begin.size) {
            return Err(self.peer.malformed("begin").context("size", begin.size));
        }
        let layout = self.request.layout(begin.size);
        let op = self.request.op;
        let mut content = heap(layout.room())?;
        match op {
            PerfOp::Write | PerfOp::Send => layout.fill(&mut content, begin.seed, 0, 0),
            PerfOp::Read => layout.fill(&mut content, begin.seed, layout.slots, 0),
            PerfOp::Atomic => layout.fill_words(&mut content, begin.seed, 0),
        }
        self.end.region.write(0, &content)?;
        self.peer.send(&Message::Go)?;
        let first = self.received;
        let transfers = if op == PerfOp::Send { self.receive(layout)? } else { self.wait()? };
        match op {
            PerfOp::Write | PerfOp::Send => layout.fill(&mut content, begin.seed, transfers, first),
            PerfOp::Read => {}
            PerfOp::Atomic => layout.fill_words(&mut content, begin.seed, transfers),
        }
        self.end.domain.progress()?;
        same(&content, &self.end.content(content.len())?, "server")?;
        self.peer.send(&Message::Verified)
    }

    /// Waits until the client ends a run of one-sided transfers. Returns the number of transfers.
    fn wait(&mut self) -> Result<u64> {
        loop {
            match self.end.receive(self.peer, "end")? {
                Message::Running => {}
                Message::End { transfers } => return Ok(transfers),
                other => return Err(self.peer.out_of_turn("end", &other)),
            }
        }
    }

    /// Receives messages until all that the client sent have arrived. Returns the number of
    /// messages.
    fn receive(&mut self, layout: Layout) -> Result<u64> {
        let mut sent = None;
        let mut received = 0;
        let mut idle = Idle::new();
        let mut completions = Vec::with_capacity(64);
        while sent.is_none_or(|sent| received < sent) {
            if self.end.queue.read(&mut completions, 64)? > 0 {
                idle.busy();
                for completion in completions.drain(..) {
                    completed(completion, layout.size)?;
                    received += 1;
                    self.received += 1;
                    self.post_receives(1)?;
                }
            } else if idle.wait(&self.end.domain, self.peer)? {
                idle.busy();
                match self.peer.receive("end", HANDSHAKE)? {
                    Message::Running if sent.is_none() => {}
                    Message::End { transfers } if sent.is_none() => sent = Some(transfers),
                    other => return Err(self.peer.out_of_turn("end", &other)),
                }
            }
        }
        match sent {
            Some(sent) if received > sent => Err(Error::new(ErrorKind::Driver, "receive")
                .context("messages", received)
                .context("sent", sent)
                .remedy("update the NIC's driver: it delivered messages that were never sent")),
            _ => Ok(received),
        }
    }

    /// Posts up to `count` receives, fewer if the receive queue is full.
    fn post_receives(&mut self, count: u32) -> Result<()> {
        let largest = self.request.largest();
        let layout = self.request.layout(largest);
        for _ in 0..count {
            let slice = self.end.region.slice(layout.offset(self.posted), largest)?;
            match self.end.endpoint.receive(&[slice], None, self.posted) {
                Ok(()) => self.posted += 1,
                // The receive queue is full. The rest is posted after the next completion.
                Err(error) if error.kind() == ErrorKind::Again && self.posted > self.received => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
