//! Completion queues. Each work completion is passed to the poster of its queue pair.

use std::{
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use hmem_core::{
    Error, ErrorKind, Result,
    transfer::{Completion, CompletionKind},
};
use parking_lot::{Mutex, MutexGuard, ReentrantMutex, RwLock};
use rustc_hash::FxHashMap;

use super::{cq::VerbsCq, device::OpenDevice, post::Poster, ready::Ready, sys::Wc};

/// A completion queue and the posters of the endpoints that use it.
pub(super) struct CqState {
    cq: VerbsCq,
    posters: RwLock<FxHashMap<u32, Weak<Poster>>>,
    /// Completions that were read from the NIC, or made by a lane, and that the application has not
    /// read.
    ready: Arc<Ready>,
    /// Lock of the one thread that sleeps until the NIC reports a completion. Other waiting threads
    /// block on this lock.
    turn: Mutex<()>,
    /// Lock that keeps completions in order while a thread reads the NIC. The progress of a staged
    /// transfer reads the NIC too.
    asking: ReentrantMutex<()>,
}

const BATCH: usize = 16;

impl CqState {
    pub(super) fn create(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        Ok(Self {
            cq: VerbsCq::create_waitable(device, depth)?,
            posters: RwLock::default(),
            ready: Arc::default(),
            turn: Mutex::default(),
            asking: ReentrantMutex::default(),
        })
    }

    pub(super) fn cq(&self) -> &VerbsCq {
        &self.cq
    }

    pub(super) fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    /// Adds a completion of a lane, which does not come from the NIC.
    pub(super) fn push(&self, completion: Completion) {
        self.ready.push(completion);
    }

    /// Reads up to `max` completions from the NIC and passes each to `deliver`. Returns their
    /// number.
    fn poll(&self, max: usize, mut deliver: impl FnMut(Completion)) -> Result<usize> {
        let mut delivered = 0;
        // Not zeroed: zeroing would be most of the cost of an empty poll.
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
        Ok(delivered)
    }

    /// Moves up to `max` completions to `out`: first stored ones, then those of the NIC. Returns
    /// their number.
    #[inline]
    pub(super) fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let _asking = self.asking.lock();
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
        if count < max {
            count += self.poll(max - count, |completion| out.push(completion))?;
        }
        Ok(count)
    }

    /// Reads all completions from the NIC and stores them for the application.
    pub(super) fn drain(&self) -> Result<()> {
        let _asking = self.asking.lock();
        let keep = |completion| self.ready.lock().completions.push_back(completion);
        self.poll(usize::MAX, keep).map(|_| ())
    }

    /// Returns true if the queue has an event channel. Threads can then sleep until a completion.
    pub(super) fn has_channel(&self) -> bool {
        self.cq.channel().is_some()
    }

    /// Returns the fd that becomes readable after [`Self::arm`].
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.ready.fd(self.cq.channel())
    }

    /// Waits until no other thread sleeps for this queue, and returns the right to sleep. Returns
    /// `None` if the deadline passes first.
    pub(super) fn turn(&self, deadline: Option<Instant>) -> Option<MutexGuard<'_, ()>> {
        match deadline {
            None => Some(self.turn.lock()),
            Some(deadline) => self.turn.try_lock_until(deadline),
        }
    }

    /// Makes the fd unreadable until the next completion. Returns false if completions are already
    /// available.
    ///
    /// Requests that complete after the NIC was armed make the fd readable. This call then polls
    /// those that completed before.
    ///
    /// # Errors
    /// - BadState: nothing will complete any more.
    /// - The driver's error if the device was removed.
    pub(super) fn arm(&self) -> Result<bool> {
        self.ready.hush(self.cq.channel())?;
        self.cq.arm()?;
        self.drain()?;
        Ok(!self.check_open()?)
    }

    /// Returns true if completions are stored for the application.
    ///
    /// # Errors
    /// BadState: there are none, and nothing will complete any more.
    pub(super) fn check_open(&self) -> Result<bool> {
        let ready = self.ready.lock();
        if !ready.completions.is_empty() {
            return Ok(true);
        }
        // A queue may serve the endpoints of other domains of its device.
        if !ready.closed || !self.posters.read().is_empty() {
            return Ok(false);
        }
        Err(Error::new(ErrorKind::BadState, "wait for completions")
            .provider(self.cq.device().nic().to_string())
            .context("why", "the domain of the queue is closed")
            .remedy("drop the queue: nothing completes to it any more"))
    }

    /// Sleeps until the fd is readable, at most for `time`.
    pub(super) fn sleep(&self, time: Option<Duration>) -> Result<()> {
        self.ready.sleep(self.cq.channel(), time)
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
            queue.posters.write().insert(poster.number(), Arc::downgrade(poster));
        }
    }

    pub(super) fn detach(&self, poster: &Poster) {
        for queue in [&self.tx, &self.rx] {
            queue.posters.write().remove(&poster.number());
            // The queue may have no poster left, so its readers check that.
            queue.ready.ring();
        }
    }

    /// Wakes the threads that sleep for either of the two queues.
    pub(super) fn ring(&self) {
        self.tx.ready.ring();
        self.rx.ready.ring();
    }

    /// Reads all completions of both queues from the NIC and stores them for the application.
    pub(super) fn drain(&self) -> Result<()> {
        self.tx.drain()?;
        if Arc::ptr_eq(&self.tx, &self.rx) { Ok(()) } else { self.rx.drain() }
    }
}
