//! Fault injection for drivers and NICs in software: a test makes a call fail, or wait in flight.
//!
//! The module needs the cargo feature `testing`, which the simulated device and the software NIC
//! enable. Each of them declares its calls with [`named_enum!`](crate::named_enum!), and passes
//! them to [`Faults::enter`].

use std::{
    fmt::{self, Debug},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use parking_lot::{Condvar, Mutex};

use crate::{Errno, Error, Result};

/// Kinds of calls that a test can make fail or wait. Implementations are enums.
pub trait CallKind: Copy + Debug + Eq + Send + Sync + 'static {
    /// The number of kinds.
    const COUNT: usize;

    /// Returns the number of the kind, which is below [`CallKind::COUNT`].
    fn index(self) -> usize;

    /// Returns true if calls of the kind are counted from the start. Other calls are counted only
    /// after [`Faults::start_counting`], because counting costs a locked instruction.
    fn is_always_counted(self) -> bool;

    /// Creates the error of a call that fails with `errno`. `number` is the number of the call
    /// among the counted calls of its kind, from 1.
    fn failure(self, errno: Errno, number: u64) -> Error;
}

/// The faults that a test injects: calls that fail, and calls that wait at a [`Gate`]. A value of
/// this type also counts the calls. Clones share the faults and the counts.
#[derive(Clone)]
pub struct Faults<C> {
    state: Arc<State<C>>,
}

#[derive(Debug)]
struct State<C> {
    /// True once [`Faults::start_counting`] was called. From then on calls of all kinds are
    /// counted, and each call locks `plan` to look for faults.
    counting: AtomicBool,
    /// The number of calls so far, by [`CallKind::index`].
    counts: Box<[AtomicU64]>,
    plan: Mutex<Plan<C>>,
    /// Notified after each counted call.
    counted: Condvar,
}

#[derive(Debug)]
struct Plan<C> {
    failures: Vec<Failure<C>>,
    /// The gates that no call has reached.
    gates: Vec<(C, Arc<GateState>)>,
    /// The gates that a call has reached and not left.
    holding: Vec<Arc<GateState>>,
}

#[derive(Clone, Copy, Debug)]
struct Failure<C> {
    call: C,
    /// The first call that fails, by its number among the counted calls of its kind, from 1.
    first: u64,
    last: u64,
    errno: Errno,
}

impl<C> fmt::Debug for Faults<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

impl<C: CallKind> Default for Faults<C> {
    fn default() -> Self {
        Self::new()
    }
}

impl<C: CallKind> Faults<C> {
    /// Creates a value that injects no faults yet.
    #[must_use]
    pub fn new() -> Self {
        let plan = Plan { failures: Vec::new(), gates: Vec::new(), holding: Vec::new() };
        Self {
            state: Arc::new(State {
                counting: AtomicBool::new(false),
                counts: (0..C::COUNT).map(|_| AtomicU64::new(0)).collect(),
                plan: Mutex::new(plan),
                counted: Condvar::new(),
            }),
        }
    }

    /// Makes one call of this kind fail with `errno`: the `nth` from now on. 1 is the next call,
    /// and 0 counts as 1. The kind of the error is [`Errno::kind`].
    pub fn fail_nth(&self, call: C, nth: u64, errno: Errno) {
        let nth = nth.max(1);
        self.fail(call, nth, nth, errno);
    }

    /// Makes the next call of this kind fail with `errno`.
    pub fn fail_next(&self, call: C, errno: Errno) {
        self.fail_nth(call, 1, errno);
    }

    /// Makes every call of this kind from now on fail with `errno`.
    pub fn fail_always(&self, call: C, errno: Errno) {
        self.fail(call, 1, u64::MAX, errno);
    }

    fn fail(&self, call: C, from: u64, to: u64, errno: Errno) {
        self.start_counting();
        let mut plan = self.state.plan.lock();
        let now = self.calls(call);
        let (first, last) = (now.saturating_add(from), now.saturating_add(to));
        plan.failures.push(Failure { call, first, last, errno });
    }

    /// Makes the next call of this kind wait until the returned [`Gate`] is released or dropped.
    ///
    /// Each call waits at one gate at most: with several gates for a kind, the next calls reach
    /// them in the order of their creation.
    pub fn hold(&self, call: C) -> Gate {
        let state = Arc::new(GateState::default());
        self.state.plan.lock().gates.push((call, Arc::clone(&state)));
        self.start_counting();
        Gate { state }
    }

    /// Starts to count the calls of all kinds. The methods that inject a fault and
    /// [`Faults::wait_for_calls`] do so too. Starting again does not reset the counts.
    pub fn start_counting(&self) {
        self.state.counting.store(true, SeqCst);
    }

    /// Returns the number of calls of this kind since counting began, failed calls included.
    #[must_use]
    pub fn calls(&self, call: C) -> u64 {
        self.state.counts[call.index()].load(SeqCst)
    }

    /// Blocks until [`Faults::calls`] returns at least `count` for this kind. A call counts before
    /// it waits at a gate.
    pub fn wait_for_calls(&self, call: C, count: u64) {
        self.start_counting();
        let mut plan = self.state.plan.lock();
        self.state.counted.wait_while(&mut plan, |_| self.calls(call) < count);
    }

    /// Removes all pending failures, and releases all gates. Waiting calls continue.
    pub fn clear(&self) {
        let mut plan = self.state.plan.lock();
        plan.failures.clear();
        let holding = std::mem::take(&mut plan.holding);
        let gates = plan.gates.drain(..).map(|(_, gate)| gate).chain(holding);
        gates.for_each(|gate| gate.release());
    }

    /// Returns true if calls of all kinds are counted.
    #[inline]
    #[must_use]
    pub fn is_counting(&self) -> bool {
        self.state.counting.load(SeqCst)
    }

    /// Counts a call of this kind. Waits if a test holds the call at a gate, and then fails if a
    /// test has injected an error for the call.
    ///
    /// # Errors
    /// The error of [`CallKind::failure`], for a call that a test makes fail.
    #[inline]
    pub fn enter(&self, call: C) -> Result<()> {
        // The call is counted before `counting` is read, so that either `enter_counting` notifies a
        // thread that waits for this count, or the thread finds the count before it waits.
        let number = call.is_always_counted().then(|| self.count(call));
        if self.is_counting() { self.enter_counting(call, number) } else { Ok(()) }
    }

    fn count(&self, call: C) -> u64 {
        self.state.counts[call.index()].fetch_add(1, SeqCst) + 1
    }

    #[cold]
    fn enter_counting(&self, call: C, number: Option<u64>) -> Result<()> {
        let mut plan = self.state.plan.lock();
        let number = number.unwrap_or_else(|| self.count(call));
        self.state.counted.notify_all();
        let gate = plan.gates.iter().position(|(kind, _)| *kind == call);
        let gate = gate.map(|at| plan.gates.remove(at).1);
        plan.holding.extend(gate.clone());
        let failure = plan.failures.iter().position(|failure| {
            failure.call == call && (failure.first..=failure.last).contains(&number)
        });
        let failure = failure.map(|at| match plan.failures[at] {
            failure if failure.last == number => plan.failures.remove(at),
            failure => failure,
        });
        drop(plan);
        if let Some(gate) = gate {
            gate.hold();
            self.state.plan.lock().holding.retain(|other| !Arc::ptr_eq(other, &gate));
        }
        failure.map_or(Ok(()), |failure| Err(call.failure(failure.errno, number)))
    }
}

/// The progress of a call that a test holds by a [`Gate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// No call has reached the gate.
    #[default]
    Unreached,
    /// A call waits at the gate.
    Holding,
    Released,
}

#[derive(Debug, Default)]
struct GateState {
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl GateState {
    fn hold(&self) {
        let mut stage = self.stage.lock();
        if *stage == Stage::Unreached {
            *stage = Stage::Holding;
            self.changed.notify_all();
        }
        self.changed.wait_while(&mut stage, |stage| *stage == Stage::Holding);
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
        self.state.changed.wait_while(&mut stage, |stage| *stage == Stage::Unreached);
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
    use super::*;
    use crate::ErrorKind;

    crate::named_enum! {
        /// A kind of call of the tests.
        enum TestCall {
            /// A call that is counted from the start.
            Open = "open",
            /// A call that is counted on request.
            Send = "send",
        }
    }
    use TestCall::{Open, Send};

    impl CallKind for TestCall {
        const COUNT: usize = Self::ALL.len();

        fn index(self) -> usize {
            self as usize
        }

        fn is_always_counted(self) -> bool {
            self == Open
        }

        fn failure(self, errno: Errno, number: u64) -> Error {
            Error::os(errno, self.name()).context("call", number)
        }
    }

    #[test]
    fn only_the_nth_call_of_its_kind_fails() {
        for call in [Open, Send] {
            let other = if call == Open { Send } else { Open };
            let faults = Faults::new();
            faults.fail_nth(call, 2, Errno(12));
            faults.enter(call).unwrap();
            faults.enter(other).unwrap();
            let error = faults.enter(call).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfResources, call.name()));
            faults.enter(call).unwrap();
            assert_eq!(faults.calls(call), 3);
        }
    }

    #[test]
    fn every_call_fails_until_the_faults_are_cleared() {
        let faults = Faults::new();
        faults.fail_always(Send, Errno(5));
        (0..3).for_each(|_| assert!(faults.enter(Send).is_err()));
        faults.clear();
        faults.enter(Send).unwrap();
    }

    #[test]
    fn calls_are_counted_from_the_start_only_if_their_kind_says_so() {
        let faults = Faults::new();
        TestCall::ALL.iter().for_each(|call| faults.enter(*call).unwrap());
        assert_eq!([Open, Send].map(|call| faults.calls(call)), [1, 0]);
        faults.start_counting();
        TestCall::ALL.iter().for_each(|call| faults.enter(*call).unwrap());
        assert_eq!([Open, Send].map(|call| faults.calls(call)), [2, 1]);
    }

    #[test]
    fn gate_holds_a_call_until_it_is_released() {
        let faults = Faults::new();
        let gate = faults.hold(Send);
        std::thread::scope(|scope| {
            let held = scope.spawn(|| faults.enter(Send));
            gate.wait_held();
            assert!(gate.is_holding() && !held.is_finished());
            gate.release();
            held.join().unwrap().unwrap();
        });
        faults.enter(Send).unwrap();
    }

    #[test]
    fn clear_lets_waiting_calls_continue_and_removes_failures() {
        let faults = Faults::new();
        let reached = faults.hold(Send);
        let unreached = faults.hold(Send);
        faults.fail_next(Open, Errno(12));
        std::thread::scope(|scope| {
            let held = scope.spawn(|| faults.enter(Send));
            reached.wait_held();
            assert!(!unreached.is_holding());
            faults.clear();
            held.join().unwrap().unwrap();
        });
        faults.enter(Send).unwrap();
        faults.enter(Open).unwrap();
        assert!(faults.state.plan.lock().holding.is_empty());
    }
}
