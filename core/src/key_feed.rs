//! Key feeds: the keys of memory that changes while peers use it.

use std::{
    fmt,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::{
    Error, ErrorKind, RailKeys, Result, frame::Frame, random::random_u64, transfer::RemoteSegment,
};

/// A contiguous part of a published memory: its registered bytes, and the keys by which peers reach
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPart {
    /// The offset of the first byte in the memory.
    pub offset: u64,
    /// The keys of the bytes, one for each NIC. All of them describe the same number of bytes.
    pub keys: RailKeys,
}

/// A part in the list of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PublishedPart {
    part: KeyPart,
    len: u64,
    /// The generation that first had this part with this registration. A part that is registered
    /// again with new keys on all NICs counts as new. A part stays the same while at least one NIC
    /// keeps its key, even if other NICs are added or left out.
    since: u64,
}

impl PublishedPart {
    fn new(part: KeyPart, since: u64) -> Result<Self, &'static str> {
        let lens =
            part.keys.rails().iter().map(|rail| {
                rail.key.pieces().try_fold(0_u64, |sum, piece| sum.checked_add(piece.len))
            });
        let mut lens = lens.map(|len| len.ok_or("a key with more bytes than an address space"));
        let len = lens.next().ok_or("a part without keys")??;
        for other in lens {
            if other? != len {
                return Err("keys of different lengths for one part");
            }
        }
        if len == 0 || part.offset.checked_add(len).is_none() {
            return Err("a part that is empty or ends beyond the 64-bit offsets");
        }
        Ok(Self { part, len, since })
    }

    const fn end(&self) -> u64 {
        self.part.offset + self.len
    }

    /// Returns true if both parts are the same registered memory: they have the same offset and
    /// length, and at least one NIC has the same key in both.
    fn is_memory_of(&self, new: &Self) -> bool {
        let (old, new_rails) = (self.part.keys.rails(), new.part.keys.rails());
        (self.part.offset, self.len) == (new.part.offset, new.len)
            && old.iter().any(|rail| new_rails.contains(rail))
    }
}

/// Checks that the parts do not overlap and are in the order of their offsets. The error is the
/// reason why the list is refused.
fn check_order(parts: &[PublishedPart]) -> Result<(), &'static str> {
    let in_order = parts.is_sorted_by(|a, b| a.end() <= b.part.offset);
    if in_order { Ok(()) } else { Err("parts that overlap, or are not in the order of offsets") }
}

/// Publishes the keys of memory that changes, for peers that hold a [`PeerKeys`].
///
/// The memory has one stable description for peers: offsets from its start. Parts of it may come,
/// go and be registered again with other keys. The owner publishes all current parts as one list.
/// Each list that differs from the one before is a new *generation*, numbered from 1.
///
/// A part stays the same memory while at least one NIC keeps its key for it. So NICs can be added
/// to a part and removed from it, and peers may still access bytes whose offsets they learned with
/// an older generation.
///
/// The feed sends nothing itself. The application sends the bytes that [`KeySubscription::wait`]
/// returns, over any channel. Every update has the complete list, so a peer that misses updates is
/// correct again after the next one. The feed stores only the newest list: a peer that never reads
/// costs no memory.
///
/// Dropping the feed publishes an empty list as the last generation.
///
/// ```
/// use hmem_core::{
///     Addressing, ErrorKind, Iova, RailKey, RailKeys, RemoteKey,
///     key_feed::{KeyFeed, KeyPart, PeerKeys},
///     provider::Nic,
/// };
///
/// let nic = Nic { provider: "verbs".into(), name: "mlx5_0".into(), pci_bus_id: None };
/// let part = |offset, number| {
///     let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 4096, number);
///     let keys = RailKeys::new(vec![RailKey::new(nic.clone(), key)]).unwrap();
///     KeyPart { offset, keys }
/// };
/// let feed = KeyFeed::new()?;
/// let mut subscription = feed.subscribe();
/// let mut peer = PeerKeys::default();
///
/// feed.publish(vec![part(0, 17), part(4096, 18)])?;
/// peer.apply(&subscription.next().unwrap())?;
/// let segments = peer.segments("mlx5_0", 4000..4200, 1)?;
/// assert_eq!(segments.iter().map(|segment| segment.len).collect::<Vec<_>>(), [96, 104]);
///
/// // The second part was mapped again, and has a new key.
/// feed.publish(vec![part(0, 17), part(4096, 19)])?;
/// peer.apply(&subscription.next().unwrap())?;
/// let stale = peer.segments("mlx5_0", 4000..4200, 1).unwrap_err();
/// assert_eq!(stale.kind(), ErrorKind::InvalidKey);
/// assert!(peer.segments("mlx5_0", 0..4096, 1).is_ok(), "the first part is as it was");
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct KeyFeed {
    shared: Arc<Shared>,
}

struct Shared {
    /// A random number, by which peers recognise updates of another feed.
    feed: u64,
    state: Mutex<State>,
    /// Notified after each change of `state`.
    changed: Condvar,
}

struct State {
    /// The number of the current generation, or 0 before the first.
    generation: u64,
    parts: Vec<PublishedPart>,
    /// True once the feed was dropped. No further generation follows.
    closed: bool,
}

impl KeyFeed {
    /// Creates a feed that has published nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the operating system's random generator fails.
    pub fn new() -> Result<Self> {
        let state = State { generation: 0, parts: Vec::new(), closed: false };
        let feed = random_u64("key feed")?;
        let shared = Shared { feed, state: Mutex::new(state), changed: Condvar::new() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Publishes the current parts of the memory, in the order of their offsets. Returns the number
    /// of the current generation, which is a new one unless the list is unchanged.
    ///
    /// To remove a part, first publish the list without the part. Then close the part's region, so
    /// that the NIC refuses the old keys. Only then unmap the memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for parts that overlap or are not in order, and for keys of
    /// one part with different lengths. The current generation stays.
    pub fn publish(&self, parts: Vec<KeyPart>) -> Result<u64> {
        let refuse = |why| {
            Error::new(ErrorKind::InvalidArgument, "publish keys")
                .context("why", why)
                .remedy("publish each registered part once, in the order of the offsets")
        };
        let mut state = self.shared.state.lock();
        let next = state.generation + 1;
        let mut list = Vec::with_capacity(parts.len());
        for part in parts {
            let mut part = PublishedPart::new(part, next).map_err(refuse)?;
            let at = state.parts.partition_point(|old| old.part.offset < part.part.offset);
            if let Some(old) = state.parts.get(at).filter(|old| old.is_memory_of(&part)) {
                part.since = old.since;
            }
            list.push(part);
        }
        check_order(&list).map_err(refuse)?;
        if next == 1 || list != state.parts {
            state.parts = list;
            state.generation = next;
            self.shared.changed.notify_all();
        }
        Ok(state.generation)
    }

    /// Returns the number of the current generation, or 0 before the first.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.shared.state.lock().generation
    }

    /// Creates the reading end for one peer. Its first update is the current generation.
    #[must_use]
    pub fn subscribe(&self) -> KeySubscription {
        KeySubscription { shared: Arc::clone(&self.shared), returned: 0 }
    }
}

impl Drop for KeyFeed {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        if !state.parts.is_empty() {
            state.parts.clear();
            state.generation += 1;
        }
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for KeyFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("KeyFeed")
            .field("generation", &state.generation)
            .field("parts", &state.parts.len())
            .finish_non_exhaustive()
    }
}

/// Updates of a [`KeyFeed`] for one peer, as bytes to send.
///
/// A subscription that is read slowly skips generations. [`PeerKeys::apply`] tells the peer how
/// many it missed.
pub struct KeySubscription {
    shared: Arc<Shared>,
    /// The generation of the update that was returned last, or 0.
    returned: u64,
}

impl KeySubscription {
    /// Returns the current generation, unless it was returned before. Does not wait.
    #[expect(clippy::should_implement_trait, reason = "an iterator would end at the first `None`")]
    pub fn next(&mut self) -> Option<Vec<u8>> {
        self.wait(Duration::ZERO)
    }

    /// Waits for a generation that was not returned before, and returns it. Returns `None` after
    /// `timeout`, and at once if the feed is closed and its last generation was returned.
    pub fn wait(&mut self, timeout: Duration) -> Option<Vec<u8>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.state.lock();
        while state.generation == self.returned {
            let timed_out = match deadline {
                _ if state.closed => true,
                Some(deadline) => self.shared.changed.wait_until(&mut state, deadline).timed_out(),
                None => {
                    self.shared.changed.wait(&mut state);
                    false
                }
            };
            if timed_out && state.generation == self.returned {
                return None;
            }
        }
        self.returned = state.generation;
        let parts = state.parts.iter().map(|published| WirePart {
            offset: published.part.offset,
            since: published.since,
            keys: published.part.keys.to_bytes(),
        });
        let (feed, generation) = (self.shared.feed, state.generation);
        Some(FRAME.write(&WireUpdate { feed, generation, parts: parts.collect() }))
    }

    /// Returns true if the feed was dropped and its last generation was returned.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        let state = self.shared.state.lock();
        state.closed && state.generation == self.returned
    }
}

impl fmt::Debug for KeySubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySubscription").field("returned", &self.returned).finish_non_exhaustive()
    }
}

const FRAME: Frame = Frame {
    magic: *b"hmKF",
    version: 1,
    operation: "key update",
    remedy: "send the bytes of KeySubscription::wait unchanged and whole",
};

/// A generation in version 1 of the binary form.
#[derive(Serialize, Deserialize)]
struct WireUpdate {
    feed: u64,
    generation: u64,
    parts: Vec<WirePart>,
}

/// A part in version 1 of the binary form. `keys` is the binary form of [`RailKeys`], which has a
/// version of its own.
#[derive(Serialize, Deserialize)]
struct WirePart {
    offset: u64,
    since: u64,
    keys: Vec<u8>,
}

/// A generation that [`PeerKeys::apply`] took over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppliedUpdate {
    /// The number of the generation.
    pub generation: u64,
    /// The number of generations that the peer did not receive: those after the peer's previous
    /// generation and before this one. The peer does not need them, because each update has the
    /// complete list.
    pub missed: u64,
}

/// The newest keys that a peer has received from a [`KeyFeed`].
#[derive(Clone, Debug, Default)]
pub struct PeerKeys {
    /// The identifier of the feed, from the first update. `None` before the first update.
    feed: Option<u64>,
    generation: u64,
    parts: Vec<PublishedPart>,
}

impl PeerKeys {
    /// Replaces the current generation by the update that the owner of the memory sent. Keys that
    /// are not in the update are no longer given out.
    ///
    /// # Errors
    /// - [`ErrorKind::Malformed`] for bytes that are not an update.
    /// - [`ErrorKind::InvalidArgument`] for an update of another feed than that of the first
    ///   update. An owner that restarts has a new feed.
    /// - [`ErrorKind::BadState`] for an update that is not newer than the current generation, for
    ///   example one that arrives twice.
    ///
    /// After an error the current generation stays.
    pub fn apply(&mut self, bytes: &[u8]) -> Result<AppliedUpdate> {
        let WireUpdate { feed, generation, parts } = FRAME.read(bytes)?;
        let refuse = |why| FRAME.refuse(bytes, why);
        if generation == 0 {
            return Err(refuse("generation 0"));
        }
        let mut list = Vec::with_capacity(parts.len());
        for WirePart { offset, since, keys } in parts {
            if since == 0 || since > generation {
                return Err(refuse("a part of a generation that does not exist yet"));
            }
            let part = KeyPart { offset, keys: RailKeys::from_bytes(&keys)? };
            list.push(PublishedPart::new(part, since).map_err(refuse)?);
        }
        check_order(&list).map_err(refuse)?;
        if self.feed.is_some_and(|known| known != feed) {
            return Err(Error::new(ErrorKind::InvalidArgument, FRAME.operation)
                .context("why", "an update of another feed")
                .remedy("use a new PeerKeys for each feed, also after the peer restarts"));
        }
        if generation <= self.generation {
            return Err(Error::new(ErrorKind::BadState, FRAME.operation)
                .context("generation", generation)
                .context("current", self.generation)
                .remedy("ignore the update: the current keys are not older"));
        }
        let missed = generation - self.generation - 1;
        *self = Self { feed: Some(feed), generation, parts: list };
        Ok(AppliedUpdate { generation, missed })
    }

    /// Returns the number of the current generation, or 0 before the first update.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the parts of the current generation: the offsets of their bytes, and the keys.
    pub fn parts(&self) -> impl Iterator<Item = (Range<u64>, &RailKeys)> {
        self.parts
            .iter()
            .map(|published| (published.part.offset..published.end(), &published.part.keys))
    }

    /// Returns the segments for a transfer of the bytes at `offsets` through a NIC, one for each
    /// part that has some of the bytes.
    ///
    /// `generation` is the generation in which the owner of the memory named these bytes, for
    /// example in a message. If the memory at any of the offsets has changed since, the call fails.
    /// `nic` is the name of the owner's NIC, as in [`RailKeys::of`].
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidKey`] if one of the bytes is in a part that is newer than
    ///   `generation`: the memory was mapped or registered again with new keys on all NICs, so the
    ///   named bytes may no longer exist.
    /// - [`ErrorKind::OutOfBounds`] if the current generation does not have all of the bytes, and
    ///   if `offsets` ends before it starts.
    /// - [`ErrorKind::Again`] if `generation` is newer than the current one. Apply the next update
    ///   and retry.
    /// - [`ErrorKind::InvalidArgument`] for a NIC that has no key.
    /// - The errors of [`RemoteKey::slice`](crate::RemoteKey::slice).
    pub fn segments(
        &self,
        nic: &str,
        offsets: Range<u64>,
        generation: u64,
    ) -> Result<Vec<RemoteSegment<'_>>> {
        let error = |kind| {
            Error::new(kind, "segments of a generation")
                .context("offsets", format_args!("{}..{}", offsets.start, offsets.end))
                .context("generation", generation)
                .context("current", self.generation)
        };
        if generation > self.generation {
            return Err(error(ErrorKind::Again).remedy("apply the next update, and retry"));
        }
        let first = self.parts.partition_point(|part| part.end() <= offsets.start);
        let (mut segments, mut at) = (Vec::new(), offsets.start);
        for published in &self.parts[first..] {
            if at >= offsets.end || published.part.offset > at {
                break;
            }
            if published.since > generation {
                return Err(error(ErrorKind::InvalidKey)
                    .context("changed in", published.since)
                    .remedy("ask the peer for the bytes again: the memory has changed since"));
            }
            let key = published.part.keys.of(nic).ok_or_else(|| {
                error(ErrorKind::InvalidArgument)
                    .context("nic", nic)
                    .remedy("name a NIC of the peer's keys")
            })?;
            let len = published.end().min(offsets.end) - at;
            segments.push(key.slice(at - published.part.offset, len)?);
            at += len;
        }
        if at != offsets.end {
            return Err(error(ErrorKind::OutOfBounds)
                .context("first missing", at)
                .remedy("use offsets at which the current generation has memory"));
        }
        Ok(segments)
    }
}
