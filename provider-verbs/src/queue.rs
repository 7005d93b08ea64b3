//! Completion queues that pass each work completion to its queue pair's poster.

use std::{
    collections::VecDeque,
    mem::MaybeUninit,
    sync::{Arc, Weak},
};

use hmem_core::{
    Result,
    transfer::{Completion, CompletionKind},
};
use parking_lot::{Mutex, ReentrantMutex, RwLock};
use rustc_hash::FxHashMap;

use super::{cq::VerbsCq, device::OpenDevice, post::Poster, sys::Wc};

/// A completion queue, and the posters whose requests complete to it.
pub(super) struct CqState {
    cq: VerbsCq,
    posters: RwLock<FxHashMap<u32, Weak<Poster>>>,
    /// Completions read from the NIC before the application asked for them.
    ready: Mutex<VecDeque<Completion>>,
    /// Held while completions go from the NIC to a reader. A staged transfer's progress reads the
    /// NIC too, and completions keep their order.
    asking: ReentrantMutex<()>,
}

const BATCH: usize = 16;

impl CqState {
    pub(super) fn create(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        Ok(Self {
            cq: VerbsCq::create(device, depth)?,
            posters: RwLock::default(),
            ready: Mutex::default(),
            asking: ReentrantMutex::default(),
        })
    }

    pub(super) fn cq(&self) -> &VerbsCq {
        &self.cq
    }

    /// Adds a completion that does not come from the NIC.
    pub(super) fn push(&self, completion: Completion) {
        self.ready.lock().push_back(completion);
    }

    /// Passes on what the NIC has completed, up to `max`.
    fn poll(&self, max: usize, mut deliver: impl FnMut(Completion)) -> Result<usize> {
        let mut delivered = 0;
        // Not zeroed: it would be most of the work of an empty poll.
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

    /// Moves up to `max` completions to `out` and returns their number.
    #[inline]
    pub(super) fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let _asking = self.asking.lock();
        let mut count = 0;
        {
            let mut ready = self.ready.lock();
            while count < max
                && let Some(completion) = ready.pop_front()
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

    /// Takes everything that the NIC has completed into memory.
    fn drain(&self) -> Result<()> {
        let _asking = self.asking.lock();
        self.poll(usize::MAX, |completion| self.push(completion)).map(|_| ())
    }
}

/// The two completion queues of an endpoint, which may be one.
#[derive(Clone)]
pub(super) struct Queues {
    pub(super) tx: Arc<CqState>,
    pub(super) rx: Arc<CqState>,
}

impl Queues {
    /// Returns the queue for a kind of request.
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
        }
    }

    /// Takes everything that the NIC has completed into memory.
    pub(super) fn drain(&self) -> Result<()> {
        self.tx.drain()?;
        if Arc::ptr_eq(&self.tx, &self.rx) { Ok(()) } else { self.rx.drain() }
    }
}
