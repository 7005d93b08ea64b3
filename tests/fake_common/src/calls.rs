//! Call counts and injected faults of a fake driver.

use std::collections::HashMap;

#[derive(Clone, Copy, Debug)]
struct Fault<C> {
    symbol: &'static str,
    /// Number of calls of the function that still succeed before the fault.
    after: u64,
    always: bool,
    code: C,
}

/// Counts the calls of a driver's functions, and makes chosen calls fail with a code.
#[derive(Debug)]
pub struct Calls<C> {
    counts: HashMap<&'static str, u64>,
    faults: Vec<Fault<C>>,
}

impl<C> Default for Calls<C> {
    fn default() -> Self {
        Self { counts: HashMap::new(), faults: Vec::new() }
    }
}

impl<C: Copy> Calls<C> {
    /// Counts a call of a function. Returns the error code if a fault is injected into this call.
    pub fn enter(&mut self, symbol: &'static str) -> Option<C> {
        *self.counts.entry(symbol).or_default() += 1;
        let at = self.faults.iter().position(|fault| fault.symbol == symbol)?;
        let fault = &mut self.faults[at];
        if fault.after > 0 {
            fault.after -= 1;
            return None;
        }
        let fault = *fault;
        if !fault.always {
            self.faults.remove(at);
        }
        Some(fault.code)
    }

    /// Makes the `nth` next call of a function fail: 1 is the next call. If the function has an
    /// earlier fault, counting starts after the call that fails because of it.
    pub fn fail_nth(&mut self, symbol: &'static str, nth: u64, code: C) {
        self.faults.push(Fault { symbol, after: nth.saturating_sub(1), always: false, code });
    }

    /// Makes every later call of a function fail.
    pub fn fail_always(&mut self, symbol: &'static str, code: C) {
        self.faults.push(Fault { symbol, after: 0, always: true, code });
    }

    /// Removes all injected faults.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// Returns the number of calls of a function, failed calls included.
    #[must_use]
    pub fn of(&self, symbol: &str) -> u64 {
        self.counts.get(symbol).copied().unwrap_or(0)
    }

    /// Returns the number of calls of all functions.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }
}
