//! The state of one endpoint: its peers, its limits, and its requests that wait to be posted.

use std::{
    collections::VecDeque,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Error, ErrorKind, Result,
    counter::Counter,
    provider::EndpointAttr,
    random::random_u64,
    transfer::{CompletionKind, PeerId},
};
use rustc_hash::FxHashMap;

use super::{
    hub::Hub,
    objects::Objects,
    peer_name::{Alive, PeerName, Process},
    plan::refuse,
    queue::Queue,
};

/// Minimum time between two searches for lost peers, and between two checks of a peer's process.
///
/// A post up to this long after the end of a peer's process may be accepted. Progress then ends the
/// request. A peer may also die while it holds a lock in the memory that libfabric's `shm` shares.
/// The next call of libfabric can then block. A check before each post would not exclude this
/// either, because the peer may die after the check.
pub(super) const LOOK: Duration = Duration::from_millis(10);

/// The transmit side or the receive side of an endpoint.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) queue: Arc<Queue>,
    counter: Option<Arc<Counter>>,
    /// The number of parts that are posted or wait for their post.
    pub(super) in_flight: usize,
    pub(super) depth: usize,
}

impl Side {
    pub(super) fn count(&self, succeeded: bool) {
        match &self.counter {
            Some(counter) if succeeded => counter.add(1),
            Some(counter) => counter.add_error(1),
            None => {}
        }
    }
}

/// A peer of an endpoint.
#[derive(Debug)]
pub(super) struct Peer {
    name: PeerName,
    /// The index in the address vector.
    pub(super) address: u64,
    pub(super) alive: Option<Alive>,
    /// The number of parts to this peer that are posted and have not ended.
    pub(super) posted: usize,
    /// The time at which libfabric began to refuse parts to this peer with `FI_EAGAIN`. `None`
    /// while libfabric takes parts.
    pub(super) blocked: Option<Instant>,
    /// True while a liveness check of the peer is in flight (`InFlight::ask`).
    pub(super) asked: bool,
    /// The numbers of the failed requests that wait for the result of the liveness check.
    pub(super) held: Vec<u64>,
    /// True if the peer's process ran on this machine when the peer was resolved. The end of such a
    /// process is detected.
    watched: bool,
    /// The time of the last check of the peer's process, or `None` before the first. Only a peer in
    /// another process that is `watched` is checked.
    seen: Option<Instant>,
    /// True once the peer was found closed. It never becomes false again.
    gone: bool,
}

impl Peer {
    pub(super) fn new(name: PeerName) -> Self {
        let watched = name.process.runs();
        let (alive, address, held) = (name.alive, u64::MAX, Vec::new());
        Self {
            name,
            address,
            alive,
            posted: 0,
            blocked: None,
            asked: false,
            held,
            watched,
            seen: None,
            gone: false,
        }
    }

    /// Refuses a peer that is closed (see [`Self::is_gone`]).
    ///
    /// # Errors
    /// Unreachable: this process has closed the peer's endpoint, or the peer's process has ended.
    pub(super) fn check_open(&mut self, hub: &Hub) -> Result<()> {
        if self.is_gone(hub) {
            let why = "resolve the name of an open endpoint: the peer is closed";
            return Err(refuse(ErrorKind::Unreachable, why));
        }
        Ok(())
    }

    /// Returns true if the peer is known to be closed. This is known only of an endpoint of this
    /// process, and of a process of this machine that has ended since the peer was resolved.
    ///
    /// Another process is checked at most once per interval [`LOOK`], because the check reads a
    /// file. If the process has ended, this removes the shared-memory file that it left behind.
    pub(super) fn is_gone(&mut self, hub: &Hub) -> bool {
        if self.gone {
            return true;
        }
        if self.name.family == hub.fellows.family {
            self.gone = !hub.fellows.is_open(self.name.number);
        } else if self.watched && self.seen.is_none_or(|at| at.elapsed() >= LOOK) {
            self.gone = !self.name.process.runs();
            self.seen = Some(Instant::now());
            if self.gone {
                self.remove_files();
            }
        }
        self.gone
    }

    /// Removes the shared-memory file that the peer's process, which has ended, left behind.
    fn remove_files(&self) {
        let (id, address) = (self.name.process.id, &self.name.address);
        let name = address.strip_prefix(b"fi_shm://".as_slice()).unwrap_or(address);
        let name = String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or(name));
        // The peer sent the name, which must not lead out of the folder.
        if name.starts_with(&format!("{id}:")) && !name.contains('/') {
            // The process may have removed the file itself, as another peer may.
            let _absent = fs::remove_file(format!("/dev/shm/{name}")).is_err();
        }
    }
}

/// An entry of [`EndpointState::waiting`], which has the order of the posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// The index of the slot of a part that libfabric has not taken yet.
    Part(usize),
    /// The number of a request that names staged memory. The entry stays in the list until the
    /// request ends.
    Staged(u64),
}

/// An open endpoint.
#[derive(Debug)]
pub(super) struct EndpointState {
    pub(super) objects: Objects,
    pub(super) name: PeerName,
    pub(super) number: u64,
    sides: [Side; 2],
    pub(super) peers: Vec<Peer>,
    by_name: FxHashMap<Vec<u8>, usize>,
    /// The id of the first peer, a random number. Later peers have the next numbers. So an endpoint
    /// refuses the ids that another endpoint has given to its peers.
    first_peer: u64,
    pub(super) waiting: VecDeque<Waiting>,
    /// The receives without a tag that have not ended, in the order of their posts.
    pub(super) receives: VecDeque<u64>,
    /// The immediate data and the length of each write of a peer that has arrived and waits for a
    /// receive.
    pub(super) written: VecDeque<(u64, u64)>,
    /// True once a read of the endpoint's completion queue has failed.
    pub(super) queue_failed: bool,
}

impl EndpointState {
    /// Opens an endpoint.
    pub(super) fn open(
        hub: &Hub,
        attr: &EndpointAttr,
        queues: [Arc<Queue>; 2],
        provider: &str,
    ) -> Result<Self> {
        let depths = hub.limits.depths.map(|limit| attr.depth.clamp(1, limit));
        // The chunks of a staged request count once, and libfabric limits those in flight.
        let entries = hub.limits.depths[0] + depths[1];
        let [number, first_peer] = [random_u64("libfabric")?, random_u64("libfabric")?];
        let (objects, address) = Objects::open(&hub.open, hub.entry.as_ptr(), entries)?;
        if hub.local_only {
            hub.fellows.add(number);
        }
        Ok(Self {
            objects,
            name: PeerName {
                provider: provider.to_owned(),
                alive: hub.exposed(),
                family: hub.fellows.family,
                number,
                process: Process::own(),
                address,
            },
            number,
            sides: {
                let [tx, rx] = queues;
                let [tx_counter, rx_counter] = [attr.tx_counter.clone(), attr.rx_counter.clone()];
                let side = |queue, counter, depth| Side { queue, counter, in_flight: 0, depth };
                [side(tx, tx_counter, depths[0]), side(rx, rx_counter, depths[1])]
            },
            peers: Vec::new(),
            by_name: FxHashMap::default(),
            first_peer,
            waiting: VecDeque::new(),
            receives: VecDeque::new(),
            written: VecDeque::new(),
            queue_failed: false,
        })
    }

    pub(super) fn side(&mut self, kind: CompletionKind) -> &mut Side {
        &mut self.sides[usize::from(kind == CompletionKind::Receive)]
    }

    /// Returns true if a request of the application is in flight, or waits for its post.
    pub(super) fn has_requests(&self) -> bool {
        self.sides.iter().any(|side| side.in_flight > 0)
    }

    /// Returns the index of a peer.
    ///
    /// # Errors
    /// InvalidArgument: this endpoint did not resolve the peer.
    pub(super) fn peer_index(&self, peer: PeerId) -> Result<usize> {
        let index = usize::try_from(peer.0.wrapping_sub(self.first_peer)).ok();
        index.filter(|index| *index < self.peers.len()).ok_or_else(|| {
            let why = "name a peer that this endpoint has resolved";
            refuse(ErrorKind::InvalidArgument, why).context("peer", peer.0)
        })
    }

    /// Adds a peer and returns its id. A peer that was added before keeps its id.
    ///
    /// # Errors
    /// Unreachable: the name is that of another provider, or libfabric refuses the address.
    pub(super) fn add_peer(&mut self, hub: &Hub, mut peer: Peer) -> Result<PeerId> {
        if peer.name.provider != self.name.provider {
            let why = "resolve the name of an endpoint of the same provider";
            return Err(Error::new(ErrorKind::Unreachable, "resolve")
                .provider(hub.attr().nic.to_string())
                .context("peer", peer.name.provider.escape_debug().take(40).collect::<String>())
                .remedy(why));
        }
        if hub.local_only {
            peer.check_open(hub)?;
        }
        let key = peer.name.encode().0;
        let index = match self.by_name.get(&key) {
            Some(index) => *index,
            None => {
                peer.address = self.objects.insert(&hub.open, &peer.name.address)?;
                self.by_name.insert(key, self.peers.len());
                self.peers.push(peer);
                self.peers.len() - 1
            }
        };
        Ok(PeerId(self.first_peer.wrapping_add(index as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_dead_peer_removes_files_of_shared_memory_only() {
        let id = std::process::id();
        let (folder, inside) = (format!("/dev/shm/{id}:"), format!("/dev/shm/{id}:hmem"));
        let outside = format!("/dev/shm/hmem-{id}");
        fs::create_dir(&folder).expect("create a folder");
        for (file, name) in [(&inside, ":hmem"), (&outside, &format!(":/../hmem-{id}"))] {
            fs::write(file, "").expect("create a file");
            let peer = Peer::new(PeerName {
                provider: "shm".to_owned(),
                alive: None,
                family: 0,
                number: 0,
                process: Process { id: u64::from(id), started: 1 },
                address: format!("fi_shm://{id}{name}").into_bytes(),
            });
            peer.remove_files();
        }
        assert!(!fs::exists(&inside).expect("look"), "the file of the peer is left");
        assert!(fs::exists(&outside).expect("look"), "the name led out of the folder");
        fs::remove_file(&outside).expect("remove the file");
        fs::remove_dir(&folder).expect("remove the folder");
    }
}
