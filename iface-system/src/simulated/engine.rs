//! The copy engine: runs queued copies in order, one at a time, on a thread or step by step.
//!
//! Latency and bandwidth determine the time at which a copy ends. The engine moves the bytes at
//! that time, so that a reader sees the old bytes until then. [`Stepping::ByHand`] ignores the
//! clock.

use std::{
    collections::VecDeque,
    fmt, mem,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use hmem_core::{Error, ErrorKind, ProcessMark, Result, iface::CopyEvent};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// The agent that runs asynchronous copies: a thread of the copy engine, or the application.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stepping {
    /// A thread of the copy engine runs the copies. The thread is started by the first asynchronous
    /// copy.
    #[default]
    Thread,
    /// The application runs the copies: each call of [`Simulated::step`](crate::Simulated::step)
    /// runs one. Waiting for a copy runs the queue until that copy is done.
    ByHand,
}

/// The simulated latency and bandwidth of copies.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    pub(crate) latency: Duration,
    /// Bandwidth in bytes per second. 0 means no limit.
    pub(crate) bandwidth: u64,
}

impl Pace {
    fn duration(self, len: u64) -> Duration {
        let nanos = match self.bandwidth {
            0 => 0,
            bandwidth => u128::from(len) * 1_000_000_000 / u128::from(bandwidth),
        };
        self.latency + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn is_instant(self) -> bool {
        self.latency.is_zero() && self.bandwidth == 0
    }
}

struct QueuedCopy {
    /// The function that moves the bytes.
    work: Box<dyn FnOnce() -> Result<()> + Send>,
    /// The time before which an engine thread does not run the copy: the simulated end of the copy.
    /// `None` if the copy takes no simulated time.
    not_before: Option<Instant>,
    done: Arc<CopyOutcome>,
}

/// The outcome of a queued copy, which the engine shares with the copy's event.
#[derive(Debug, Default)]
struct CopyOutcome {
    /// `None` until the copy has ended.
    result: Mutex<Option<Result<()>>>,
    changed: Condvar,
}

impl QueuedCopy {
    fn run(self) {
        self.done.finish((self.work)());
    }
}

impl CopyOutcome {
    fn finish(&self, result: Result<()>) {
        *self.result.lock() = Some(result);
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct CopyQueue {
    copies: VecDeque<QueuedCopy>,
    /// The simulated end of the last copy so far, blocking or queued. The next copy begins no
    /// earlier.
    busy_until: Option<Instant>,
    stop: bool,
}

#[derive(Default)]
struct EngineState {
    queue: Mutex<CopyQueue>,
    /// Notified when a copy is queued, and when the engine is dropped.
    changed: Condvar,
    /// Lock that a thread holds during [`EngineState::step`], so that copies run in order if
    /// several threads make steps.
    stepping: Mutex<()>,
}

/// The copy engine of one simulated iface.
pub(crate) struct Engine {
    shared: Arc<EngineState>,
    /// The engine's thread, and the process that started it. `None` until the first asynchronous
    /// copy, and with [`Stepping::ByHand`].
    thread: Mutex<Option<(ProcessMark, JoinHandle<()>)>>,
    stepping: Stepping,
    pace: Pace,
}

impl Engine {
    pub(crate) fn new(stepping: Stepping, pace: Pace) -> Self {
        Self { shared: Arc::default(), thread: Mutex::new(None), stepping, pace }
    }

    /// Sleeps until a blocking copy of `len` bytes would have ended. Returns at once with
    /// [`Stepping::ByHand`].
    pub(crate) fn pass_time(&self, len: u64) {
        if self.pace.is_instant() || self.stepping == Stepping::ByHand {
            return;
        }
        let end = self.reserve(&mut self.shared.queue.lock(), len);
        while let Some(rest) =
            end.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
        {
            thread::sleep(rest);
        }
    }

    fn reserve(&self, queue: &mut CopyQueue, len: u64) -> Instant {
        let now = Instant::now();
        let start = queue.busy_until.map_or(now, |busy| busy.max(now));
        let end = start.checked_add(self.pace.duration(len)).unwrap_or(start);
        queue.busy_until = Some(end);
        end
    }

    /// Queues a copy of `len` bytes. The engine later calls `work`, which moves the bytes. Returns
    /// the completion event of the copy.
    pub(crate) fn submit(
        &self,
        len: u64,
        work: Box<dyn FnOnce() -> Result<()> + Send>,
    ) -> Result<Box<dyn CopyEvent>> {
        let by_hand = self.stepping == Stepping::ByHand;
        if !by_hand {
            self.start_thread()?;
        }
        let done = Arc::<CopyOutcome>::default();
        let mut queue = self.shared.queue.lock();
        let timed = !by_hand && !self.pace.is_instant();
        let not_before = timed.then(|| self.reserve(&mut queue, len));
        queue.copies.push_back(QueuedCopy { work, not_before, done: Arc::clone(&done) });
        drop(queue);
        self.shared.changed.notify_one();
        let engine = by_hand.then(|| Arc::clone(&self.shared));
        Ok(Box::new(QueuedCopyEvent { done, engine }))
    }

    fn start_thread(&self) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let process = ProcessMark::current()?;
            let shared = Arc::clone(&self.shared);
            let run = move || shared.run();
            let spawned = thread::Builder::new().name("hmem-copy-engine".into()).spawn(run);
            let spawned = spawned.map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "start copy engine").caused_by(error)
            })?;
            *thread = Some((process, spawned));
        }
        Ok(())
    }

    /// Runs the oldest queued copy. Returns false if no copy is queued.
    pub(crate) fn step(&self) -> bool {
        self.shared.step()
    }

    /// Returns the number of queued copies that have not begun.
    pub(crate) fn pending(&self) -> usize {
        self.shared.queue.lock().copies.len()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().take();
        if thread.as_ref().is_some_and(|(process, _)| !process.is_current()) {
            // A forked child does not have the thread, which may have held the queue's lock at the
            // fork.
            mem::forget(thread);
            return;
        }
        self.shared.queue.lock().stop = true;
        self.shared.changed.notify_all();
        // A copy that runs on the engine's thread may drop the last reference to the iface. The
        // thread cannot join itself.
        if let Some((_, thread)) = thread
            && thread.thread().id() != thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the copy engine's thread panicked");
        }
        self.shared.cancel();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("stepping", &self.stepping)
            .field("pace", &self.pace)
            .finish()
    }
}

impl EngineState {
    /// Runs copies at their simulated ends, until the engine is dropped.
    fn run(&self) {
        let mut queue = self.queue.lock();
        while !queue.stop {
            match queue.copies.front().map(|copy| copy.not_before) {
                None => self.changed.wait(&mut queue),
                Some(Some(at)) if at > Instant::now() => {
                    self.changed.wait_until(&mut queue, at);
                }
                Some(_) => {
                    let copy = queue.copies.pop_front();
                    MutexGuard::unlocked(&mut queue, || copy.map(QueuedCopy::run));
                }
            }
        }
    }

    fn step(&self) -> bool {
        let _in_order = self.stepping.lock();
        let copy = self.queue.lock().copies.pop_front();
        copy.map(QueuedCopy::run).is_some()
    }

    fn cancel(&self) {
        let copies = mem::take(&mut self.queue.lock().copies);
        for copy in copies {
            copy.done.finish(Err(Error::new(ErrorKind::Canceled, "copy")
                .remedy("wait for copies before the iface is dropped")));
        }
    }
}

struct QueuedCopyEvent {
    done: Arc<CopyOutcome>,
    /// The engine of the copy if [`Stepping::ByHand`] is set. Waiting for the copy then runs the
    /// engine's queued copies. `None` if an engine thread runs the copies.
    engine: Option<Arc<EngineState>>,
}

impl CopyEvent for QueuedCopyEvent {
    fn is_done(&self) -> bool {
        self.done.result.lock().is_some()
    }

    fn wait(self: Box<Self>) -> Result<()> {
        if let Some(engine) = &self.engine {
            while !self.is_done() && engine.step() {}
        }
        let mut result = self.done.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            self.done.changed.wait(&mut result);
        }
    }
}

impl fmt::Debug for QueuedCopyEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyEvent").field("is_done", &self.is_done()).finish()
    }
}
