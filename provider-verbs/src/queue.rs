//! Completion queues. A queue passes each work completion to the [`Poster`] of the completion's
//! queue pair.

use std::{
    cell::Cell,
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    ptr,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use hmem_core::{
    Error, ErrorKind, Result,
    transfer::{Completion, CompletionKind},
};
use parking_lot::{Mutex, MutexGuard, ReentrantMutex, RwLock};
use rustc_hash::FxHashMap;

use super::{
    cq::{Channel, Room, VerbsCq},
    device::OpenDevice,
    post::Poster,
    ready::Ready,
    sys::Wc,
};

/// A completion queue, with the [`Poster`] of each endpoint that uses the queue.
pub(super) struct CqState {
    pub(super) cq: VerbsCq,
    /// Posters by the numbers of their queue pairs.
    posters: RwLock<FxHashMap<u32, Weak<Poster>>>,
    /// Completions that the application has not read yet. They were read from the NIC, or come from
    /// staged transfers or canceled requests.
    pub(super) ready: Arc<Ready>,
    /// Lock that a thread holds while it sleeps for a completion. Other waiting threads block on
    /// this lock.
    turn: Mutex<()>,
    /// Lock that a thread holds while it reads completions from the NIC, so that completions stay
    /// in order. The readers of the queue, staged transfers, window calls and reconnections all
    /// read from the NIC.
    ///
    /// The lock's value counts the reads that found the queue empty, modulo 256.
    asking: ReentrantMutex<Cell<u8>>,
}

/// Maximum number of completions that one driver call reads.
const BATCH: usize = 16;

impl CqState {
    pub(super) fn create(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        Ok(Self {
            cq: VerbsCq::create(device, depth, Channel::create(device)?)?,
            posters: RwLock::default(),
            ready: Arc::default(),
            turn: Mutex::default(),
            asking: ReentrantMutex::default(),
        })
    }

    /// Reads completions from the NIC, until `deliver` has received `max` completions or the NIC
    /// has no more. `deliver` does not receive the completions of lanes (queues of staged
    /// transfers) and of waiting calls. After an error, `deliver` may have received completions.
    fn poll(&self, max: usize, mut deliver: impl FnMut(Completion)) -> Result<()> {
        let mut delivered = 0;
        // Zeroing the batch would be most of the cost of a poll that finds no completion.
        let mut batch = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        while delivered < max {
            let wanted = (max - delivered).min(BATCH);
            let read = self.cq.poll(&mut batch[..wanted])?;
            for wc in read {
                let poster = self.posters.read().get(&wc.qp_num).and_then(Weak::upgrade);
                if let Some(completion) = poster.and_then(|poster| poster.complete(wc)) {
                    deliver(completion);
                    delivered += 1;
                }
            }
            if read.len() < wanted {
                break;
            }
        }
        Ok(())
    }

    /// Moves up to `max` completions to `out`: first the stored completions, then completions from
    /// the NIC. Returns the number of completions. After an error, `out` may have new completions.
    ///
    /// Releases the room of the completions, so that more requests can be posted.
    #[inline]
    pub(super) fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let asking = self.asking.lock();
        let mut count = 0;
        {
            let mut ready = self.ready.lock();
            while count < max
                && let Some(completion) = ready.completions.pop_front()
            {
                out.push(completion);
                count += 1;
            }
        }
        let polled = self.poll(max - count, |completion| {
            out.push(completion);
            count += 1;
        });
        if count > 0 {
            self.cq.room.release(Room::COMPLETION.times(count));
        } else {
            // A thread that polls without waiting must see a loss, too.
            asking.set(asking.get().wrapping_add(1));
            if asking.get() == 0 {
                self.cq.device.read_events();
            }
        }
        polled.map(|()| count)
    }

    /// Reads all completions from the NIC and stores them for the application. Does not wake the
    /// threads that sleep for this queue.
    pub(super) fn drain(&self) -> Result<()> {
        let _asking = self.asking.lock();
        let keep = |completion| self.ready.lock().completions.push_back(completion);
        self.poll(usize::MAX, keep)
    }

    /// Returns true if the queue has an event channel. Without a channel, threads cannot sleep
    /// until a completion.
    pub(super) fn has_channel(&self) -> bool {
        self.cq.has_channel()
    }

    /// Returns the fd that becomes readable when a request completes after [`Self::arm`]. Creates
    /// the fd at the first call.
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.ready.fd(&self.cq)
    }

    /// Waits until no other thread sleeps for this queue. Returns the guard that a thread holds
    /// while it sleeps, or `None` if the deadline passes first. `None` as `deadline` means no
    /// limit.
    pub(super) fn turn(&self, deadline: Option<Instant>) -> Option<MutexGuard<'_, ()>> {
        match deadline {
            None => Some(self.turn.lock()),
            Some(deadline) => self.turn.try_lock_until(deadline),
        }
    }

    /// Makes the fd unreadable until the next completion. Returns false if completions are stored
    /// for the application. The caller must not sleep then.
    ///
    /// The call first arms the NIC, and then reads and stores the completions that the NIC already
    /// has. So each request that completes is either stored, or makes the fd readable.
    ///
    /// # Errors
    /// - The errors of [`CqState::check_open`].
    /// - The driver's error if the device was removed.
    /// - The error of creating the fd at the first call.
    pub(super) fn arm(&self) -> Result<bool> {
        self.ready.hush(&self.cq)?;
        self.cq.arm()?;
        self.drain()?;
        let is_empty = !self.check_open()?;
        // An event that has not been read keeps the fd readable.
        self.cq.device.read_events();
        Ok(is_empty && !self.cq.device.life.record.is_lost())
    }

    /// Moves up to `max` stored completions of a lost device to `out`. Returns their number. The
    /// caller has ended the requests of the device.
    ///
    /// # Errors
    /// Unavailable: no completion is stored.
    #[cold]
    pub(super) fn read_rest(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let mut ready = self.ready.lock();
        let count = max.min(ready.completions.len());
        out.extend(ready.completions.drain(..count));
        drop(ready);
        self.cq.room.release(Room::COMPLETION.times(count));
        if count > 0 || max == 0 {
            return Ok(count);
        }
        let device = &self.cq.device;
        Err(device.life.record.loss(&device.nic, "read completions"))
    }

    /// Returns true if completions are stored for the application.
    ///
    /// # Errors
    /// BadState: no completion is stored, and the domain is closed. A closed domain has no
    /// endpoints, so no request completes to the queue any more.
    pub(super) fn check_open(&self) -> Result<bool> {
        let ready = self.ready.lock();
        if !ready.completions.is_empty() {
            return Ok(true);
        }
        if !ready.closed {
            return Ok(false);
        }
        Err(Error::new(ErrorKind::BadState, "wait for completions")
            .provider(self.cq.device.nic.to_string())
            .context("why", "the domain of the queue is closed")
            .remedy("drop the queue: nothing completes to it any more"))
    }

    /// Sleeps until the fd is readable, at most for `time`. `None` stands for no limit.
    pub(super) fn sleep(&self, time: Option<Duration>) -> Result<()> {
        self.ready.sleep(&self.cq, time)
    }
}

/// The send and the receive completion queue of an endpoint. Both may be the same queue.
#[derive(Clone)]
pub(super) struct Queues {
    pub(super) tx: Arc<CqState>,
    pub(super) rx: Arc<CqState>,
}

impl Queues {
    /// Returns the queue to which requests of this kind complete.
    pub(super) fn of(&self, kind: CompletionKind) -> &CqState {
        if kind == CompletionKind::Receive { &self.rx } else { &self.tx }
    }

    pub(super) fn attach(&self, poster: &Arc<Poster>) {
        for queue in [&self.tx, &self.rx] {
            queue.posters.write().insert(poster.number, Arc::downgrade(poster));
        }
    }

    /// Removes a poster whose queue pair is destroyed. If a new queue pair has got the same number,
    /// the poster of the new queue pair stays.
    pub(super) fn detach(&self, poster: &Poster) {
        for queue in [&self.tx, &self.rx] {
            let mut posters = queue.posters.write();
            let found = posters.get(&poster.number);
            if found.is_some_and(|found| ptr::eq(found.as_ptr(), poster)) {
                posters.remove(&poster.number);
            }
        }
    }

    /// Wakes the threads that sleep for one of the two queues.
    pub(super) fn ring(&self) {
        self.tx.ready.ring();
        self.rx.ready.ring();
    }

    /// Reads all completions of both queues from the NIC, and stores them for the application. Does
    /// not wake the threads that sleep for the queues.
    pub(super) fn drain(&self) -> Result<()> {
        self.tx.drain()?;
        if Arc::ptr_eq(&self.tx, &self.rx) { Ok(()) } else { self.rx.drain() }
    }
}
