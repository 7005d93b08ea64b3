//! Transfers between regions of this process and of peers.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use hmem::{
    Rejected, RemoteKey,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{Completion, EndpointName, PeerId},
};
use parking_lot::Mutex;
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    error::{self, Raise},
    region::{Held, Region},
    slot::Slot,
};

/// The time after which a wait looks for signals such as Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

pub(crate) struct Open {
    endpoint: hmem::Endpoint,
    queue: Arc<dyn CompletionQueue>,
    /// The transfers of the endpoint. A thread locks this mutex only while it holds the global
    /// interpreter lock, and runs no Python code until it has unlocked the mutex. Python code could
    /// switch to another thread, which would then wait for the mutex forever.
    transfers: Mutex<Transfers>,
}

#[derive(Default)]
struct Transfers {
    /// The number of the last transfer.
    last: u64,
    /// The regions of transfers that have not completed.
    in_flight: HashMap<u64, Arc<Held>>,
    /// Completions that were read from the queue, and that no wait has returned.
    done: VecDeque<Completion>,
}

impl Transfers {
    /// Adds completions that were read from the queue to `done`, and returns the regions of their
    /// transfers. The caller drops the regions after it has released the lock, because dropping a
    /// region can run Python code.
    fn complete(&mut self, completions: Vec<Completion>) -> Vec<Arc<Held>> {
        let contexts = completions.iter().map(|completion| completion.context);
        let completed = contexts.filter_map(|context| self.in_flight.remove(&context)).collect();
        self.done.extend(completions);
        completed
    }

    /// Returns true if a wait for `count` completions has ended: `done` has as many, or has a
    /// failed transfer, behind which `take` takes none.
    fn has_ended(&self, count: usize) -> bool {
        self.done.len() >= count || self.done.iter().any(|completion| completion.result.is_err())
    }

    /// Takes the numbers of up to `count` completed transfers out of `done`. Stops before a failed
    /// transfer. If the first completed transfer failed, returns the number and the error of this
    /// transfer instead.
    fn take(&mut self, count: usize) -> Result<Vec<u64>, (u64, hmem::Error)> {
        let mut numbers = Vec::new();
        while numbers.len() < count
            && let Some(completion) = self.done.pop_front()
        {
            match completion.result {
                Ok(_) => numbers.push(completion.context),
                Err(why) if numbers.is_empty() => return Err((completion.context, why)),
                // The next call returns the error.
                Err(_) => {
                    self.done.push_front(completion);
                    break;
                }
            }
        }
        Ok(numbers)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // A NIC may use the memory of transfers that never completed, so the memory is not freed.
        mem::take(&mut self.in_flight).into_values().for_each(mem::forget);
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

/// An endpoint: `hmem.Endpoint`.
#[pyclass(frozen, module = "hmem")]
pub(crate) struct Endpoint {
    open: Slot<Open>,
}

impl Endpoint {
    pub(crate) fn new(domain: &hmem::Domain, depth: usize) -> hmem::Result<Self> {
        let queue = domain.open_cq(depth.saturating_mul(2))?;
        let attr = EndpointAttr { depth, ..EndpointAttr::new(&queue) };
        let endpoint = domain.open_endpoint(&attr)?;
        let open = Open { endpoint, queue, transfers: Mutex::default() };
        Ok(Self { open: Slot::new(open) })
    }

    fn open(&self, py: Python<'_>) -> PyResult<Arc<Open>> {
        self.open.get("endpoint").or_raise(py)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            Python::attach(|py| py.detach(|| drop(open)));
        }
    }
}

/// The bytes of a transfer, in the local region and in the region of the peer.
struct Span {
    offset: u64,
    remote_offset: u64,
    length: Option<u64>,
}

impl Open {
    fn post(
        &self,
        direction: Direction,
        peer: u64,
        held: Arc<Held>,
        key: &[u8],
        span: &Span,
    ) -> hmem::Result<u64> {
        let length = span.length.unwrap_or_else(|| held.len().saturating_sub(span.offset));
        let local = [held.slice(span.offset, length)?];
        let key = RemoteKey::from_bytes(key)?;
        let remote = [key.slice(span.remote_offset, length)?];
        let mut transfers = self.transfers.lock();
        let transfer = transfers.last + 1;
        match direction {
            Direction::Read => self.endpoint.read(&local, &remote, PeerId(peer), transfer),
            Direction::Write => self.endpoint.write(&local, &remote, PeerId(peer), transfer),
        }?;
        transfers.last = transfer;
        transfers.in_flight.insert(transfer, held);
        Ok(transfer)
    }
}

#[pymethods]
impl Endpoint {
    /// The name of the endpoint as bytes, for a peer.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.open(py)?.endpoint.name().0))
    }

    /// Connects to the endpoint of a peer, and returns the number of the peer.
    fn connect(&self, py: Python<'_>, name: &[u8]) -> PyResult<u64> {
        let (open, name) = (self.open(py)?, EndpointName(name.to_vec()));
        Ok(py.detach(|| open.endpoint.resolve(&name)).or_raise(py)?.0)
    }

    /// Reads bytes of a peer's region into a region, and returns the number of the transfer.
    #[pyo3(signature = (peer, region, key, *, offset=0, remote_offset=0, length=None))]
    #[expect(clippy::too_many_arguments, reason = "the last three are keywords with defaults")]
    fn read(
        &self,
        py: Python<'_>,
        peer: u64,
        region: &Region,
        key: &[u8],
        offset: u64,
        remote_offset: u64,
        length: Option<u64>,
    ) -> PyResult<u64> {
        let (open, held) = (self.open(py)?, region.held(py)?);
        let span = Span { offset, remote_offset, length };
        open.post(Direction::Read, peer, held, key, &span).or_raise(py)
    }

    /// Writes bytes of a region to a peer's region, and returns the number of the transfer.
    #[pyo3(signature = (peer, region, key, *, offset=0, remote_offset=0, length=None))]
    #[expect(clippy::too_many_arguments, reason = "the last three are keywords with defaults")]
    fn write(
        &self,
        py: Python<'_>,
        peer: u64,
        region: &Region,
        key: &[u8],
        offset: u64,
        remote_offset: u64,
        length: Option<u64>,
    ) -> PyResult<u64> {
        let (open, held) = (self.open(py)?, region.held(py)?);
        let span = Span { offset, remote_offset, length };
        open.post(Direction::Write, peer, held, key, &span).or_raise(py)
    }

    /// Waits until `count` transfers have completed, a transfer has failed, or the timeout in
    /// seconds has passed, and returns their numbers.
    #[pyo3(signature = (count=1, timeout=None))]
    fn wait(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<Vec<u64>> {
        let open = self.open(py)?;
        // A timeout that is too long for a `Duration` never ends.
        let deadline = timeout
            .and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
            .and_then(|timeout| Instant::now().checked_add(timeout));
        while !open.transfers.lock().has_ended(count) {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut done = Vec::new();
            let slice = left.map_or(SIGNALS, |left| left.min(SIGNALS));
            let waited = py.detach(|| open.queue.wait(&mut done, count, slice));
            // The wait may fail after it has read completions.
            let completed = open.transfers.lock().complete(done);
            // A deregistration may wait for transfers of peers.
            py.detach(|| drop(completed));
            waited.or_raise(py)?;
            py.check_signals()?;
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
        }
        let taken = open.transfers.lock().take(count);
        taken.or_else(|(transfer, why)| {
            let exception = error::of(py, &why);
            exception.value(py).setattr("transfer", transfer)?;
            Err(exception)
        })
    }

    /// Closes the endpoint. Fails while a transfer is in flight.
    #[expect(clippy::result_large_err, reason = "the error returns the endpoint")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let close = |open: Open| {
            let Open { endpoint, queue, transfers } = open;
            let (endpoint, error) = if transfers.lock().in_flight.is_empty() {
                match py.detach(|| endpoint.close()) {
                    Ok(()) => return Ok(()),
                    Err(Rejected { value, error }) => (value, error),
                }
            } else {
                let error = hmem::Error::new(hmem::ErrorKind::Busy, "close endpoint")
                    .context("why", "transfers are in flight")
                    .remedy("wait for the transfers first");
                (endpoint, error)
            };
            Err(Rejected::new(Open { endpoint, queue, transfers }, error))
        };
        self.open.close("endpoint", "wait for it first", close).or_raise(py)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}
