//! The staging buffers of a domain: a fixed number of buffers and a queue of claims (requests for
//! buffers).
//!
//! Claims are served in the order of their arrival. Two rules prevent deadlocks:
//!
//! - A chunk of an RMA transfer takes one buffer and releases it without needing another.
//! - A message that the NIC needs whole takes all its buffers at once and keeps them until the peer
//!   acts. So receives and sends are limited to a share each, and the rest stays available for RMA.

use std::{collections::VecDeque, sync::Arc};

use hmem_core::{Address, AddressRange, Mapping, Result, provider::StagingAttr};
use parking_lot::{Condvar, Mutex};

use super::memory;

/// Purpose for which staging buffers are taken. Each purpose has a limit of buffers
/// ([`Pool::share`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A chunk of a transfer that no peer can delay, such as RMA.
    Rma,
    /// A whole outgoing message.
    Send,
    /// A whole incoming message.
    Receive,
}

/// The staging buffers of one domain.
#[derive(Debug)]
pub struct Pool {
    /// The memory of all buffers.
    memory: Mapping,
    attr: StagingAttr,
    /// Distance in bytes between the starts of two buffers.
    stride: usize,
    state: Mutex<State>,
    /// Signaled when buffers or a place in the queue become free.
    given_back: Condvar,
}

#[derive(Debug)]
struct State {
    /// The indices of the free buffers.
    free: Vec<u32>,
    /// Number of buffers in use, by [`Use`].
    held: [usize; 3],
    /// The queue of claims.
    waiting: VecDeque<Waiting>,
    /// The number of claims that ever joined the queue.
    next: u64,
}

/// A claim in the queue.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Identifies the claim in the queue.
    number: u64,
    want: usize,
    purpose: Use,
}

impl Pool {
    /// Allocates the buffers, on the NUMA node `node` if one is given.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument`: the sizes are invalid.
    /// - The operating system's error if it has too little memory.
    pub fn new(attr: StagingAttr, node: Option<u32>) -> Result<Arc<Self>> {
        attr.check()?;
        // Buffers are aligned to cache lines, or to pages if a buffer is at least a page long.
        let align = if attr.buffer_len >= rustix::param::page_size() {
            rustix::param::page_size()
        } else {
            64
        };
        let stride = attr.buffer_len.next_multiple_of(align);
        let memory = memory::map(stride * attr.buffer_count, node)?;
        let free = (0..u32::try_from(attr.buffer_count).unwrap_or(u32::MAX)).rev().collect();
        let state = Mutex::new(State { free, held: [0; 3], waiting: VecDeque::new(), next: 0 });
        Ok(Arc::new(Self { memory, attr, stride, state, given_back: Condvar::new() }))
    }

    /// Returns the memory of all buffers, which a NIC registers as one range.
    pub fn range(&self) -> AddressRange {
        self.memory.range()
    }

    /// Returns the length of a buffer in bytes.
    pub fn slot_len(&self) -> u64 {
        self.attr.buffer_len as u64
    }

    /// Returns the number of buffers in use.
    pub fn held(&self) -> u64 {
        self.state.lock().held.iter().sum::<usize>() as u64
    }

    /// Returns the maximum number of buffers in use for a purpose.
    pub fn share(&self, purpose: Use) -> usize {
        let all = self.attr.buffer_count;
        match purpose {
            Use::Rma => all,
            Use::Receive => all / 2,
            Use::Send => (all - all / 2) / 2,
        }
    }

    /// Takes `want` buffers for a claim if [`is_turn`](Self::is_turn) allows it. Otherwise adds the
    /// claim to the queue, and sets `number` to the claim's number in the queue.
    fn take(
        self: &Arc<Self>,
        state: &mut State,
        number: &mut Option<u64>,
        want: usize,
        purpose: Use,
    ) -> Option<Slots> {
        if !self.is_turn(state, *number, want, purpose) {
            if number.is_none() {
                state.next += 1;
                *number = Some(state.next);
                state.waiting.push_back(Waiting { number: state.next, want, purpose });
            }
            return None;
        }
        if let Some(number) = number.take() {
            state.waiting.retain(|waiting| waiting.number != number);
        }
        state.held[purpose as usize] += want;
        let rest = state.free.len() - want;
        Some(Slots { pool: Arc::clone(self), purpose, list: state.free.split_off(rest) })
    }

    /// Returns true if a claim may take `want` buffers now: at least `want` buffers are free, and
    /// the share of `purpose` allows `want` more. The buffers that earlier claims in the queue want
    /// count as taken.
    ///
    /// An earlier claim may have to wait because it exceeds what is left of the share of its
    /// purpose. Such a claim reserves no free buffers, and only claims for the same purpose wait
    /// behind it. `number` is the claim's number in the queue; `None` before the claim joins the
    /// queue.
    fn is_turn(&self, state: &State, number: Option<u64>, want: usize, purpose: Use) -> bool {
        let (mut free, mut held) = (state.free.len(), state.held);
        for waiting in &state.waiting {
            if Some(waiting.number) == number {
                break;
            }
            let kind = waiting.purpose as usize;
            if held[kind] + waiting.want > self.share(waiting.purpose) {
                // The share of its purpose does not allow the claim `waiting` now. Claims for other
                // purposes may overtake `waiting`. Claims for the same purpose may not.
                held[kind] = self.share(waiting.purpose);
                continue;
            }
            held[kind] += waiting.want;
            free = free.saturating_sub(waiting.want);
        }
        held[purpose as usize] + want <= self.share(purpose) && want <= free
    }
}

/// Request for staging buffers. Dropping the value removes the request from the queue.
#[derive(Debug)]
pub struct Claim {
    pool: Arc<Pool>,
    /// The number of the claim in the queue; `None` while the claim is not in the queue.
    number: Option<u64>,
}

impl Claim {
    /// Creates a claim that is not yet in the queue.
    pub fn new(pool: &Arc<Pool>) -> Self {
        Self { pool: Arc::clone(pool), number: None }
    }

    /// Returns the pool that the claim takes buffers from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Takes `want` buffers. Returns `None` and joins the queue if earlier claims are served first,
    /// too few buffers are free, or the share of `purpose` is in use.
    ///
    /// `want` must not exceed the share of `purpose`.
    pub fn take(&mut self, want: usize, purpose: Use) -> Option<Slots> {
        self.pool.take(&mut self.pool.state.lock(), &mut self.number, want, purpose)
    }

    /// Waits for `want` buffers and takes them.
    ///
    /// `want` must not exceed the share of `purpose`; otherwise the call never returns.
    pub fn wait(&mut self, want: usize, purpose: Use) -> Slots {
        let mut state = self.pool.state.lock();
        loop {
            if let Some(slots) = self.pool.take(&mut state, &mut self.number, want, purpose) {
                return slots;
            }
            self.pool.given_back.wait(&mut state);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.pool.state.lock().waiting.retain(|waiting| waiting.number != number);
            self.pool.given_back.notify_all();
        }
    }
}

/// Staging buffers in use. Dropping the value returns the buffers to the pool. Offsets count the
/// bytes as if the buffers were adjacent.
#[derive(Debug)]
pub struct Slots {
    pool: Arc<Pool>,
    purpose: Use,
    /// The indices of the buffers.
    list: Vec<u32>,
}

impl Slots {
    /// Returns the parts of `len` bytes from `offset`, split where a buffer ends. Each item is the
    /// address of a part, its offset and its length in bytes.
    pub fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = (Address, u64, u64)> {
        let slot_len = self.pool.slot_len();
        let (mut at, end) = (offset, offset + len);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (slot, into) = (at / slot_len, at % slot_len);
            let part = (slot_len - into).min(end - at);
            let index = u64::from(*self.list.get(slot as usize)?);
            let address =
                Address(self.pool.memory.address().0 + index * self.pool.stride as u64 + into);
            let found = (address, at, part);
            at += part;
            Some(found)
        })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.held[self.purpose as usize] -= self.list.len();
        state.free.append(&mut self.list);
        drop(state);
        self.pool.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pool(chunk: usize, slots: usize) -> Arc<Pool> {
        Pool::new(StagingAttr { buffer_len: chunk, buffer_count: slots }, Some(0)).unwrap()
    }

    #[test]
    fn buffers_do_not_overlap_and_lie_in_the_pool() {
        for (chunk, slots) in [(1, 3), (4095, 5), (4096, 2), (3 << 20, 2)] {
            let pool = pool(chunk, slots);
            let mut claim = Claim::new(&pool);
            let all = claim.take(slots, Use::Rma).unwrap();
            let mut parts: Vec<_> = all.parts(0, (chunk * slots) as u64).collect();
            assert_eq!(parts.len(), slots);
            parts.sort_by_key(|(address, ..)| address.0);
            for pair in parts.windows(2) {
                assert!(pair[0].0.0 + pair[0].2 <= pair[1].0.0);
            }
            for (address, _, len) in parts {
                assert!(pool.range().contains_range(AddressRange::new(address, len).unwrap()));
            }
        }
    }

    /// BNC-02: the pool serves claims for buffers in the order of their arrival, and a dropped
    /// claim leaves the queue.
    #[test]
    fn claims_are_served_in_order_and_can_be_withdrawn() {
        let pool = pool(8, 2);
        let (mut a, mut b, mut c) = (Claim::new(&pool), Claim::new(&pool), Claim::new(&pool));
        let held = a.take(2, Use::Rma).unwrap();
        assert!(b.take(2, Use::Rma).is_none());
        assert!(c.take(1, Use::Rma).is_none());
        drop(held);
        assert!(c.take(1, Use::Rma).is_none(), "the claim before it wants both");
        drop(b);
        let first = c.take(1, Use::Rma).unwrap();
        assert_eq!(pool.held(), 1);
        drop(first);
        assert_eq!(pool.held(), 0);
    }

    /// BNC-02: a claim for the whole share of its purpose reserves the free buffers, so that later
    /// claims for another purpose do not keep it waiting for ever.
    #[test]
    fn claim_for_a_whole_share_is_not_overtaken() {
        let pool = pool(8, 4);
        let held = Claim::new(&pool).take(3, Use::Rma).unwrap();
        let mut message = Claim::new(&pool);
        assert_eq!(pool.share(Use::Receive), 2);
        assert!(message.take(2, Use::Receive).is_none(), "one buffer is free");
        assert!(Claim::new(&pool).take(1, Use::Rma).is_none());
        drop(held);
        assert!(message.take(2, Use::Receive).is_some());
    }

    /// BNC-02: messages that wait for their peers leave buffers of the pool for RMA.
    #[test]
    fn messages_that_wait_for_peers_leave_buffers_for_rma() {
        for slots in 1..20 {
            let pool = pool(8, slots);
            let mut held = Vec::new();
            for purpose in [Use::Receive, Use::Send, Use::Receive, Use::Send] {
                while let Some(taken) = Claim::new(&pool).take(1, purpose) {
                    held.push(taken);
                }
            }
            assert_eq!(held.len(), pool.share(Use::Receive) + pool.share(Use::Send));
            let mut waiting = [Claim::new(&pool), Claim::new(&pool)];
            assert!(waiting[0].take(1, Use::Receive).is_none());
            assert!(waiting[1].take(1, Use::Send).is_none());
            assert!(Claim::new(&pool).take(1, Use::Rma).is_some(), "{slots} slots");
        }
    }

    proptest! {
        #[test]
        fn every_claim_is_served_and_no_buffer_leaks(
            wants in prop::collection::vec((1usize..4, 0usize..3), 1..60),
        ) {
            let pool = pool(8, 12);
            let purposes = [Use::Rma, Use::Send, Use::Receive];
            let mut claims: Vec<_> =
                wants
                    .iter()
                    .map(|(want, purpose)| (Claim::new(&pool), *want, purposes[*purpose]))
                    .collect();
            let mut rounds = 0;
            while !claims.is_empty() {
                let mut held = Vec::new();
                claims.retain_mut(|(claim, want, purpose)| match claim.take(*want, *purpose) {
                    Some(slots) => {
                        held.push(slots);
                        false
                    }
                    None => true,
                });
                prop_assert!(!held.is_empty(), "no claim was served");
                let in_use: usize = held.iter().map(|slots| slots.list.len()).sum();
                prop_assert_eq!(in_use as u64, pool.held());
                prop_assert!(in_use <= 12);
                rounds += 1;
                prop_assert!(rounds <= wants.len());
            }
            prop_assert_eq!(pool.held(), 0);
            prop_assert!(pool.state.lock().waiting.is_empty());
        }
    }
}
