//! The protocol of the two sides over TCP.
//!
//! A connection opens with a greeting in each direction: `hmemperf` and the version of the
//! protocol, 4 bytes, big endian. Messages follow: a length, 4 bytes, big endian, and as many bytes
//! of JSON, at most [`LIMIT`]. Every read has a timeout.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hmem::{Errno, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::figures::{EndDescription, Order, Row, plain};
use crate::args::PerfOp;

/// The version of the protocol. Each incompatible change increases it.
pub(super) const VERSION: u32 = 2;
const MAGIC: [u8; 8] = *b"hmemperf";
/// Maximum length of a message, in bytes.
const LIMIT: usize = 256 << 10;

/// The timeout of the greeting, of the client's request and of each write. If a message begins to
/// arrive while a side polls for completions, the rest of the message has this timeout too.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);
/// The timeout of each message that a side awaits after the request, and of a completion.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// The interval of the messages [`Message::Running`], with which a client that transfers avoids the
/// server's timeout.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// One message of the protocol between client and server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Message {
    /// The first message of the client. A later request asks for the same measurements with another
    /// write ordering, over another endpoint.
    Request(Request),
    /// The server has connected its endpoint to the client's and registered its memory.
    Ready(Ready),
    /// The client asks the server to prepare its memory for transfers.
    Begin(Begin),
    /// The server has prepared its memory, and the client may start.
    Go,
    /// The client is still transferring.
    Running,
    /// The client has completed all transfers; `transfers` is their number.
    End { transfers: u64 },
    /// The memory of the server has the expected content.
    Verified,
    /// The client sends its results. This is the last message of the client.
    Results(Vec<Row>),
    /// A side reports that it failed. This is the last message of that side.
    Failed { why: String },
}

/// The measurements that a client requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    pub(super) op: PerfOp,
    pub(super) ordering: Order,
    pub(super) sizes: Vec<u64>,
    pub(super) depth: u32,
    pub(super) seed: u64,
    /// The name of the sender's endpoint, as `Endpoint::name` returns it.
    pub(super) endpoint: Vec<u8>,
    pub(super) side: EndDescription,
}

/// The endpoint and the memory of the server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ready {
    /// The name of the sender's endpoint, as `Endpoint::name` returns it.
    pub(super) endpoint: Vec<u8>,
    /// The server's remote key; `None` if the operation is `send`, which needs no key.
    pub(super) key: Option<Vec<u8>>,
    pub(super) side: EndDescription,
}

/// The size and the pattern seed of the next series of transfers.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Begin {
    pub(super) size: u64,
    pub(super) seed: u64,
}

impl Message {
    fn name(&self) -> &'static str {
        match self {
            Self::Request(_) => "request",
            Self::Ready(_) => "ready",
            Self::Begin(_) => "begin",
            Self::Go => "go",
            Self::Running => "running",
            Self::End { .. } => "end",
            Self::Verified => "verified",
            Self::Results(_) => "results",
            Self::Failed { .. } => "failed",
        }
    }
}

/// The connection to the other side.
#[derive(Debug)]
pub(super) struct Peer {
    stream: TcpStream,
    pub(super) address: SocketAddr,
}

impl Peer {
    /// Exchanges the greetings that begin a connection.
    pub(super) fn greet(stream: TcpStream, address: SocketAddr) -> Result<Self> {
        let mut peer = Self { stream, address };
        let setup = peer.stream.set_nodelay(true);
        setup
            .and_then(|()| peer.stream.set_write_timeout(Some(HANDSHAKE)))
            .map_err(|error| peer.lost("greeting", &error))?;
        let mut greeting = [0; 12];
        greeting[..8].copy_from_slice(&MAGIC);
        greeting[8..].copy_from_slice(&VERSION.to_be_bytes());
        peer.write(&greeting, "greeting")?;
        let theirs: [u8; 12] = peer.read_array("greeting", Instant::now() + HANDSHAKE)?;
        if theirs[..8] != MAGIC {
            return Err(peer
                .malformed("greeting")
                .context("why", "the other side is not hmem perf")
                .remedy("choose another port (--port): another program uses this one"));
        }
        let version = theirs.last_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        if version != VERSION {
            return Err(peer
                .malformed("greeting")
                .context("protocol", version)
                .context("expected", VERSION)
                .remedy("run the same version of hmem on both sides"));
        }
        Ok(peer)
    }

    pub(super) fn send(&mut self, message: &Message) -> Result<()> {
        let json = serde_json::to_vec(message).map_err(|error| {
            self.malformed("encode").context("message", message.name()).caused_by(error)
        })?;
        if json.len() > LIMIT {
            return Err(self
                .malformed("encode")
                .context("message", message.name())
                .context("bytes", json.len()));
        }
        let mut frame = Vec::with_capacity(4 + json.len());
        frame.extend_from_slice(&(json.len() as u32).to_be_bytes());
        frame.extend_from_slice(&json);
        self.write(&frame, message.name())
    }

    /// Returns the next message. A message [`Message::Failed`] is an error. `wanted` names the
    /// awaited message in errors.
    pub(super) fn receive(&mut self, wanted: &'static str, patience: Duration) -> Result<Message> {
        let until = Instant::now() + patience;
        let len = u32::from_be_bytes(self.read_array(wanted, until)?) as usize;
        if len > LIMIT {
            return Err(self
                .malformed(wanted)
                .context("bytes", len)
                .context("limit", LIMIT)
                .remedy("check that the other side is hmem perf: no message is that long"));
        }
        let mut json = vec![0; len];
        self.read(&mut json, wanted, until)?;
        match serde_json::from_slice(&json) {
            Ok(Message::Failed { why }) => {
                Err(Error::new(ErrorKind::Canceled, "the other side failed")
                    .context("peer", self.address)
                    .context("why", plain(&why)))
            }
            Ok(message) => Ok(message),
            Err(error) => Err(self
                .malformed(wanted)
                .context("why", plain(&error.to_string()))
                .remedy("run the same version of hmem on both sides")),
        }
    }

    /// Returns whether a message or the end of the connection has arrived.
    pub(super) fn has_spoken(&self) -> Result<bool> {
        let mut byte = [0];
        let peeked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut byte));
        let reset = self.stream.set_nonblocking(false);
        match (peeked, reset) {
            (Err(error), Ok(())) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            (Ok(_), Ok(())) => Ok(true),
            (Err(error), _) | (_, Err(error)) => Err(self.lost("poll the connection", &error)),
        }
    }

    /// Returns the error of an unexpected message.
    pub(super) fn out_of_turn(&self, wanted: &'static str, message: &Message) -> Error {
        self.malformed(wanted)
            .context("message", message.name())
            .remedy("run the same version of hmem on both sides")
    }

    /// Returns the error of a message with invalid content.
    pub(super) fn malformed(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Malformed, "talk to peer")
            .context("peer", self.address)
            .context("in", what)
    }

    /// Sends the failure to the other side and ends the sending direction of the connection. Waits
    /// up to 300 ms for the other side to close the connection.
    pub(super) fn give_up(&mut self, error: &Error) {
        // A close with unread bytes would reset the connection, which discards the sent message.
        // So this function reads and drops the bytes that arrive meanwhile.
        let told = self.send(&Message::Failed { why: format!("{error:#}") }).is_ok();
        if told && self.stream.shutdown(Shutdown::Write).is_ok() {
            let until = Instant::now() + Duration::from_millis(300);
            let mut rest = [0; 4096];
            while self.read_some(&mut rest, until).is_ok_and(|read| read > 0) {}
        }
    }

    fn write(&mut self, bytes: &[u8], what: &'static str) -> Result<()> {
        self.stream.write_all(bytes).map_err(|error| self.lost(what, &error))
    }

    fn read_array<const N: usize>(
        &mut self,
        what: &'static str,
        until: Instant,
    ) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read(&mut bytes, what, until)?;
        Ok(bytes)
    }

    /// Fills `into`. Fails at the deadline `until`, even if bytes still arrive.
    fn read(&mut self, into: &mut [u8], what: &'static str, until: Instant) -> Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            match self.read_some(&mut into[filled..], until) {
                Ok(0) => {
                    return Err(Error::new(ErrorKind::Unreachable, "talk to peer")
                        .context("peer", self.address)
                        .context("in", what)
                        .context("why", "the other side hung up")
                        .remedy("read the error that the other side printed"));
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(what, &error)),
            }
        }
        Ok(())
    }

    /// Reads the bytes that have arrived, or waits for some until the deadline `until`.
    fn read_some(&mut self, into: &mut [u8], until: Instant) -> io::Result<usize> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }

    /// Returns the error of a failed read or write.
    fn lost(&self, what: &'static str, error: &io::Error) -> Error {
        let lost = Error::new(ErrorKind::Unreachable, "talk to peer")
            .context("peer", self.address)
            .context("in", what);
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                lost.context("why", "no answer in time").remedy(
                    "check that the other side runs hmem perf, and is not measuring another client",
                )
            }
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => lost
                .errno(Errno::of(error))
                .context("why", "the other side hung up")
                .remedy("read the error that the other side printed"),
            _ => lost.errno(Errno::of(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    #[test]
    fn client_that_waits_for_a_busy_server_gets_the_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut peer = Peer { stream: TcpStream::connect(address).unwrap(), address };
        let error = peer.receive("ready", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("measuring another client"), "{error}");
    }

    /// The deadline for receiving a message applies to the whole message, not to each byte.
    #[test]
    fn peer_that_sends_too_slowly_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let trickle = thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            // Pauses by reading with a timeout, which ends at once when the other side closes.
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let len = 100_u32;
            for byte in len.to_be_bytes().into_iter().chain([b' '; 100]) {
                if stream.write_all(&[byte]).is_err() || stream.read(&mut [0]).is_ok() {
                    return;
                }
            }
        });
        let (stream, address) = listener.accept().unwrap();
        let mut peer = Peer { stream, address };
        let error = peer.receive("request", Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("no answer in time"), "{error}");
        drop(peer);
        trickle.join().unwrap();
    }
}
