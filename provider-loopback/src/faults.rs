//! Fault injection: a test can make a call of the NIC fail, or make it wait in flight.
//!
//! ```
//! use hmem_core::Errno;
//! use hmem_provider_loopback::{Call, Faults, Loopback};
//!
//! let faults = Faults::new();
//! let provider = Loopback::builder().faults(&faults).build()?;
//! faults.fail(Call::Register, 2, Errno(12)); // the registration after the next one
//! # Ok::<(), hmem_core::Error>(())
//! ```

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{Errno, Error, Result};
use parking_lot::{Condvar, Mutex};

/// A kind of call that a test can make fail or wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
#[non_exhaustive]
pub enum Call {
    /// A call of `Provider::open_domain`.
    OpenDomain,
    /// A call of `ProviderDomain::register`. [`Faults::hold`] stops the call after the pages were
    /// prepared and before the key of the region is valid.
    Register,
    /// A call of `SubRegions::register_sub`.
    RegisterSub,
    /// A call of `ProviderDomain::deregister`. [`Faults::hold`] stops the call before it changes
    /// anything.
    Deregister,
    /// The wait of a deregistration for transfers through windows of the region that were unbound
    /// when their endpoint closed.
    EndBinding,
    /// A call of `Enabling::enable`.
    Enable,
    /// A call of `RegionCounters::bind_counter`.
    BindCounter,
    /// A call of `EndpointBinding::bind_endpoint`.
    BindEndpoint,
    /// A call of `Refresh::refresh_pages`. While [`Faults::hold`] stops the call, transfers through
    /// the region fail.
    Refresh,
    /// A call of `RawKeys::raw_key`.
    RawKey,
    /// A call of `RawKeys::map_raw`.
    MapRaw,
    /// A call of `RawKeys::unmap_key`.
    UnmapKey,
    /// A call of `Windows::alloc_window`.
    AllocWindow,
    /// A call of `Windows::bind_window`, `bind_window_now` or `invalidate_window_now`. The
    /// execution of a posted bind or invalidation is not such a call.
    BindWindow,
    /// A call of `Windows::free_window`.
    FreeWindow,
    /// A call of `Transport::open_cq`.
    OpenCq,
    /// A call of `Transport::open_endpoint`.
    OpenEndpoint,
    /// A call of `ManualProgress::progress`.
    Progress,
    /// A call of `CompletionQueue::read` or `CompletionQueue::wait`.
    ReadCq,
    /// A call of `ProviderEndpoint::resolve`.
    Resolve,
    /// A call of `ProviderEndpoint::post`. A call on a closed endpoint does not count.
    Post,
    /// A call of `ProviderEndpoint::close`.
    CloseEndpoint,
    /// The execution of a write, read, atomic or send. [`Faults::hold`] stops the request after the
    /// checks of its keys and descriptors, and before it changes any memory. An injected error
    /// becomes the result of the request.
    Transfer,
    /// The NIC's copy of one chunk of a staged transfer. [`Faults::hold`] stops the NIC before it
    /// copies the chunk. An injected error ends the transfer.
    Chunk,
}

impl Call {
    /// All kinds of calls, in the order of the variants.
    pub const ALL: [Self; 24] = [
        Self::OpenDomain,
        Self::Register,
        Self::RegisterSub,
        Self::Deregister,
        Self::EndBinding,
        Self::Enable,
        Self::BindCounter,
        Self::BindEndpoint,
        Self::Refresh,
        Self::RawKey,
        Self::MapRaw,
        Self::UnmapKey,
        Self::AllocWindow,
        Self::BindWindow,
        Self::FreeWindow,
        Self::OpenCq,
        Self::OpenEndpoint,
        Self::Progress,
        Self::ReadCq,
        Self::Resolve,
        Self::Post,
        Self::CloseEndpoint,
        Self::Transfer,
        Self::Chunk,
    ];

    pub(super) const fn operation(self) -> &'static str {
        match self {
            Self::OpenDomain => "open domain",
            Self::Register => "register",
            Self::RegisterSub => "register sub-region",
            Self::Deregister => "deregister",
            Self::Enable => "enable",
            Self::BindCounter => "bind counter",
            Self::BindEndpoint => "bind endpoint",
            Self::EndBinding => "end window binding",
            Self::Refresh => "refresh",
            Self::RawKey => "raw key",
            Self::MapRaw => "map raw key",
            Self::UnmapKey => "unmap key",
            Self::AllocWindow => "allocate window",
            Self::BindWindow => "bind window",
            Self::FreeWindow => "free window",
            Self::OpenCq => "open completion queue",
            Self::OpenEndpoint => "open endpoint",
            Self::Progress => "progress",
            Self::ReadCq => "read completions",
            Self::Resolve => "resolve",
            Self::Post => "post",
            Self::CloseEndpoint => "close endpoint",
            Self::Transfer => "transfer",
            Self::Chunk => "staged chunk",
        }
    }
}

/// The faults that a test injects into a fabric: calls that fail, and calls that wait at a gate.
/// Clones share the faults.
#[derive(Clone, Default)]
pub struct Faults {
    shared: Arc<FaultState>,
}

#[derive(Default)]
struct FaultState {
    armed: AtomicBool,
    plan: Mutex<Plan>,
    changed: Condvar,
}

#[derive(Default)]
struct Plan {
    calls: [u64; Call::ALL.len()],
    failures: Vec<(Call, u64, Errno)>,
    /// The gates that no call has reached.
    gates: Vec<(Call, Arc<GateState>)>,
    /// The gates that a call has reached and not left.
    holding: Vec<Arc<GateState>>,
}

#[derive(Debug, Default)]
struct GateState {
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    Holding,
    Released,
}

impl Faults {
    /// Creates a value that injects no faults yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the `nth` call of this kind fail with `errno`, counted from this call of `fail`: 1 (or
    /// 0) is the next call. The kind of the error is [`Errno::kind`].
    pub fn fail(&self, call: Call, nth: u64, errno: Errno) {
        let mut plan = self.shared.plan.lock();
        let at = plan.calls[call as usize] + nth.max(1);
        plan.failures.push((call, at, errno));
        self.shared.armed.store(true, Ordering::Release);
    }

    /// Makes the next call of this kind wait until the returned [`Gate`] is released or dropped.
    ///
    /// Each call waits at one gate at most: with several gates for a kind, the next calls reach
    /// them in the order of their creation.
    pub fn hold(&self, call: Call) -> Gate {
        let state = Arc::new(GateState::default());
        self.shared.plan.lock().gates.push((call, Arc::clone(&state)));
        self.shared.armed.store(true, Ordering::Release);
        Gate { state }
    }

    /// Starts to count calls, as a call of [`Faults::fail`] or [`Faults::hold`] does too.
    pub fn count(&self) {
        self.shared.armed.store(true, Ordering::Release);
    }

    /// Returns the number of calls of this kind since counting began.
    ///
    /// The first call of [`Faults::fail`], [`Faults::hold`] or [`Faults::count`] starts to count.
    /// Later calls do not reset the numbers.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.shared.plan.lock().calls[call as usize]
    }

    /// Blocks until [`Faults::calls`] returns at least `count` for this kind. A call counts before
    /// it waits at a gate.
    pub fn wait_for_calls(&self, call: Call, count: u64) {
        let mut plan = self.shared.plan.lock();
        while plan.calls[call as usize] < count {
            self.shared.changed.wait(&mut plan);
        }
    }

    /// Removes all pending failures, and releases all gates. Waiting calls continue.
    pub fn clear(&self) {
        let mut plan = self.shared.plan.lock();
        plan.failures.clear();
        let holding = std::mem::take(&mut plan.holding);
        let gates = plan.gates.drain(..).map(|(_, gate)| gate).chain(holding);
        gates.for_each(|gate| gate.release());
    }

    /// Counts a call of this kind. If a test has requested faults for the call, waits at the gate,
    /// and then returns the injected error.
    pub(super) fn enter(&self, call: Call) -> Result<()> {
        if self.shared.armed.load(Ordering::Relaxed) { self.enter_armed(call) } else { Ok(()) }
    }

    fn enter_armed(&self, call: Call) -> Result<()> {
        let (gate, failure) = {
            let mut plan = self.shared.plan.lock();
            plan.calls[call as usize] += 1;
            let now = plan.calls[call as usize];
            let gate = plan
                .gates
                .iter()
                .position(|(kind, _)| *kind == call)
                .map(|at| plan.gates.remove(at).1);
            plan.holding.extend(gate.clone());
            let failure = plan
                .failures
                .iter()
                .position(|(kind, at, _)| *kind == call && *at == now)
                .map(|at| plan.failures.remove(at).2);
            self.shared.changed.notify_all();
            (gate, failure)
        };
        if let Some(gate) = gate {
            gate.hold();
            self.shared.plan.lock().holding.retain(|other| !Arc::ptr_eq(other, &gate));
        }
        match failure {
            Some(errno) => Err(Error::os(errno, call.operation())
                .provider("loopback")
                .remedy("a test injected this failure through Faults")),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.shared.plan.lock();
        f.debug_struct("Faults")
            .field("failures", &plan.failures)
            .field("gates", &plan.gates.len())
            .finish()
    }
}

impl GateState {
    fn hold(&self) {
        let mut stage = self.stage.lock();
        if *stage == Stage::Open {
            *stage = Stage::Holding;
            self.changed.notify_all();
        }
        while *stage == Stage::Holding {
            self.changed.wait(&mut stage);
        }
    }

    fn release(&self) {
        *self.stage.lock() = Stage::Released;
        self.changed.notify_all();
    }
}

/// A gate, created by [`Faults::hold`], at which one call waits in flight. Dropping the gate
/// releases the call.
#[derive(Debug)]
pub struct Gate {
    state: Arc<GateState>,
}

impl Gate {
    /// Blocks until a call waits at the gate or the gate is released.
    pub fn wait_held(&self) {
        let mut stage = self.state.stage.lock();
        while *stage == Stage::Open {
            self.state.changed.wait(&mut stage);
        }
    }

    /// Returns true while a call waits at the gate.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        *self.state.stage.lock() == Stage::Holding
    }

    /// Lets the waiting call continue. If no call waits yet, the next call passes the gate without
    /// waiting.
    pub fn release(&self) {
        self.state.release();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use hmem_core::ErrorKind;

    use super::*;

    #[test]
    fn only_the_nth_call_of_its_kind_fails() {
        let faults = Faults::new();
        faults.fail(Call::Register, 2, Errno(12));
        faults.enter(Call::Register).unwrap();
        faults.enter(Call::Deregister).unwrap();
        assert_eq!(faults.enter(Call::Register).unwrap_err().kind(), ErrorKind::OutOfResources);
        faults.enter(Call::Register).unwrap();
        assert_eq!(faults.calls(Call::Register), 3);
    }

    #[test]
    fn gate_holds_a_call_until_it_is_released() {
        let faults = Faults::new();
        let gate = faults.hold(Call::Transfer);
        std::thread::scope(|scope| {
            let held = scope.spawn(|| faults.enter(Call::Transfer));
            gate.wait_held();
            assert!(gate.is_holding() && !held.is_finished());
            gate.release();
            held.join().unwrap().unwrap();
        });
        faults.enter(Call::Transfer).unwrap();
    }

    #[test]
    fn clear_lets_waiting_calls_continue_and_removes_failures() {
        let faults = Faults::new();
        let reached = faults.hold(Call::Transfer);
        let unreached = faults.hold(Call::Transfer);
        faults.fail(Call::Register, 1, Errno(12));
        std::thread::scope(|scope| {
            let held = scope.spawn(|| faults.enter(Call::Transfer));
            reached.wait_held();
            assert!(!unreached.is_holding());
            faults.clear();
            held.join().unwrap().unwrap();
        });
        faults.enter(Call::Transfer).unwrap();
        faults.enter(Call::Register).unwrap();
        assert!(faults.shared.plan.lock().holding.is_empty());
    }
}
