//! Asynchronous registration, by one worker thread for each domain with a bound event queue.
//!
//! A job keeps its region alive, so that the state and the memory of the region are not freed while
//! a driver uses them (EVT-03). If the application closes or drops the region before the job
//! starts, the job is cancelled, and the event has the error `Canceled`. Later, the close or the
//! drop waits for the end of the job.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use parking_lot::{Condvar, Mutex};

use super::{
    DomainInner,
    memory::{BorrowedDmaBuf, DmaBuf},
    region::MemoryRegion,
    region_state::RegionInner,
    register::{new_region, register_on_nics},
    request::{RegionRequest, Source},
    terms::{Promise, Terms},
};
use crate::{
    Errno, Error, ErrorKind, ProcessMark, Result,
    event_queue::{Event, EventQueue, RegionId},
};

impl RegionId {
    pub(super) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A pending registration, with copies of all data that its request borrowed.
pub(super) struct Job {
    region: Arc<RegionInner>,
    terms: Terms<'static>,
    promise: Promise,
    /// The dma-buf of the request, with a duplicate of its file descriptor. `None` for other
    /// memory.
    dma_buf: Option<DmaBuf>,
}

/// The jobs that the worker thread has not taken.
#[derive(Default)]
struct Queue {
    /// The jobs, and a flag that is true once the worker thread must end.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    /// A signal for the worker thread: a job was added, or the thread must end.
    arrived: Condvar,
}

/// The thread that runs the jobs of a domain. Dropping the value ends the thread.
pub(super) struct Worker {
    queue: Arc<Queue>,
    events: Arc<EventQueue>,
    /// The worker thread. `None` only while the value is dropped.
    thread: Option<JoinHandle<()>>,
    /// The process in which the thread runs. A forked child has a copy of this value, but no
    /// thread.
    process: ProcessMark,
}

impl Worker {
    pub(super) fn start(events: Arc<EventQueue>) -> Result<Self> {
        let process = ProcessMark::current()?;
        let queue = Arc::new(Queue::default());
        let (shared, reports) = (Arc::clone(&queue), Arc::clone(&events));
        let thread = std::thread::Builder::new()
            .name("hmem-register".into())
            .spawn(move || shared.run(&reports))
            .map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "domain bind")
                    .caused_by(error)
                    .context("thread", "hmem-register")
            })?;
        Ok(Self { queue, events, thread: Some(thread), process })
    }

    /// Creates a pending region, and the job that registers the region. The job has no progress
    /// callbacks, because those of the request are borrowed for this call only.
    pub(super) fn job(
        &self,
        domain: &Arc<DomainInner>,
        request: &RegionRequest<'_>,
    ) -> Result<(MemoryRegion, Job)> {
        let checked = domain.check(request)?;
        let dma_buf = match request.source {
            Source::DmaBuf(BorrowedDmaBuf { fd, offset, len, base_addr }) => {
                let fd = fd.try_clone_to_owned().map_err(|error| {
                    Error::os(Errno::of(&error), "dup")
                        .context("fd", "the dma-buf of an asynchronous registration")
                })?;
                Some(DmaBuf { fd, offset, len, base_addr })
            }
            Source::Ranges(_) | Source::Part { .. } => None,
        };
        let region = new_region(domain, &checked, Err(RegionId::next()));
        let terms = request.terms.to_owned();
        let job = Job { region: Arc::clone(&region), terms, promise: request.promise, dma_buf };
        Ok((MemoryRegion { inner: region }, job))
    }

    pub(super) fn submit(&self, job: Job) {
        self.queue.jobs.lock().0.push_back(job);
        self.queue.arrived.notify_one();
    }

    /// Returns true if this thread is the worker thread.
    pub(super) fn is_current(&self) -> bool {
        let current = std::thread::current().id();
        self.thread.as_ref().is_some_and(|thread| thread.thread().id() == current)
    }

    /// Cancels the pending job of a closed or dropped region. Returns false if the worker thread
    /// has taken the job from the queue already.
    pub(super) fn withdraw(&self, id: RegionId) -> bool {
        let withdrawn = {
            let jobs = &mut self.queue.jobs.lock().0;
            let at = jobs.iter().position(|job| job.region.id() == Some(id));
            at.and_then(|at| jobs.remove(at))
        };
        // Ended outside the lock, because the job may have the last reference to the memory.
        let Some(job) = withdrawn else { return false };
        job.end(&self.events, Err(canceled()));
        true
    }
}

fn canceled() -> Error {
    Error::new(ErrorKind::Canceled, "regattr").context("why", "closed before it was registered")
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // A forked child must not take the lock: a thread of the parent may have held it at the
            // fork.
            std::mem::forget(self.thread.take());
            return;
        }
        self.queue.jobs.lock().1 = true;
        self.queue.arrived.notify_one();
        // The worker thread itself may drop the last region of a domain. It cannot join itself.
        let is_worker = self.is_current();
        if let Some(thread) = self.thread.take()
            && !is_worker
            && thread.join().is_err()
        {
            tracing::error!("the registration thread panicked");
        }
    }
}

impl Queue {
    fn run(&self, events: &EventQueue) {
        loop {
            let job = {
                let mut jobs = self.jobs.lock();
                loop {
                    if let Some(job) = jobs.0.pop_front() {
                        break job;
                    }
                    if jobs.1 {
                        return;
                    }
                    self.arrived.wait(&mut jobs);
                }
            };
            job.run(events);
        }
    }
}

impl Job {
    fn run(self, events: &EventQueue) {
        let result = if self.region.start_registering() {
            // A panic of an iface or provider must not block a waiting close or later jobs.
            catch_unwind(AssertUnwindSafe(|| self.register())).unwrap_or_else(|_| {
                // The memory is leaked, because the NIC may have registered it.
                std::mem::forget(self.region.release());
                Err(Error::new(ErrorKind::Driver, "regattr")
                    .context("why", "the iface or provider panicked"))
            })
        } else {
            Err(canceled())
        };
        if result.is_err() {
            self.region.fail();
        }
        self.end(events, result);
    }

    /// Ends the job, and reports `result` as its event.
    fn end(self, events: &EventQueue, result: Result<()>) {
        let region = self.region.id().unwrap_or(RegionId(0));
        let context = self.region.context;
        // The order matters. The job is dropped first, so that it does not keep the region or the
        // domain busy. Then a waiting close continues. Last, the event becomes readable.
        let ended = self.region.ended();
        // The job may have the last reference to the region, the memory or an extension.
        if catch_unwind(AssertUnwindSafe(|| drop(self))).is_err() {
            tracing::error!("a provider or an owner of memory panicked at the end of a job");
        }
        if let Some(ended) = ended {
            ended.signal();
        }
        events.push(Event { region, context, result });
    }

    /// Discards a job that was not submitted. It has no event.
    pub(super) fn discard(self) {
        if let Some(ended) = self.region.ended() {
            ended.signal();
        }
    }

    fn register(&self) -> Result<()> {
        let region = &self.region;
        let base = region.parent().map(|parent| MemoryRegion { inner: Arc::clone(parent) });
        let source = match (&self.dma_buf, &base) {
            (Some(dma_buf), _) => Source::DmaBuf(dma_buf.borrow()),
            (None, Some(base)) => Source::Part { base, range: region.range },
            (None, None) => Source::Ranges(region.ranges()),
        };
        let (promise, terms) = (self.promise, &self.terms);
        let request = RegionRequest { source, promise, keep: region.keep(), terms };
        let checked = region.domain.check(&request)?;
        register_on_nics(&[&region.domain], &checked, None, &mut |done| region.complete(done))
    }
}
