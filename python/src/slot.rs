//! Values that Python closes by a call.

use std::sync::Arc;

use hmem::{ErrorKind, Rejected};
use parking_lot::Mutex;

/// A value that is open until Python closes it. Each call that uses the value, and each transfer in
/// flight, has a reference to it.
pub(crate) struct Slot<T>(Mutex<State<T>>);

enum State<T> {
    Open(Arc<T>),
    /// A thread is closing the value, which stays open if this fails.
    Closing,
    Closed,
}

impl<T> Slot<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(State::Open(Arc::new(value))))
    }

    /// Returns the value. `what` names it in an error.
    ///
    /// # Errors
    /// - BadState: the value was closed.
    /// - Busy: another thread is closing the value.
    pub(crate) fn get(&self, what: &'static str) -> hmem::Result<Arc<T>> {
        match &*self.0.lock() {
            State::Open(value) => Ok(Arc::clone(value)),
            State::Closing => Err(is_closing("use", what)),
            State::Closed => Err(hmem::Error::new(ErrorKind::BadState, "use")
                .context("why", format_args!("the {what} was closed"))
                .remedy("use it before it is closed")),
        }
    }

    /// Closes the value by `close`. Does nothing if it is closed. `what` names the value in an
    /// error.
    ///
    /// # Errors
    /// - Busy, with the remedy, if there are other references to the value.
    /// - Busy: another thread is closing the value.
    /// - The error of `close`.
    ///
    /// After an error the value is open.
    pub(crate) fn close(
        &self,
        what: &'static str,
        remedy: &'static str,
        close: impl FnOnce(T) -> Result<(), Rejected<T>>,
    ) -> hmem::Result<()> {
        let shared = {
            let mut state = self.0.lock();
            match std::mem::replace(&mut *state, State::Closing) {
                State::Open(shared) => shared,
                State::Closing => return Err(is_closing("close", what)),
                State::Closed => {
                    *state = State::Closed;
                    return Ok(());
                }
            }
        };
        let (shared, error) = match Arc::try_unwrap(shared) {
            Ok(only) => match close(only) {
                Ok(()) => {
                    *self.0.lock() = State::Closed;
                    return Ok(());
                }
                Err(Rejected { value, error }) => (Arc::new(value), error),
            },
            Err(shared) => {
                let error = hmem::Error::new(ErrorKind::Busy, "close")
                    .context("why", format_args!("a call or a transfer in flight uses the {what}"));
                (shared, error.remedy(remedy))
            }
        };
        *self.0.lock() = State::Open(shared);
        Err(error)
    }

    /// Returns the value of a slot that is being dropped; `None` if it is closed.
    pub(crate) fn take(&mut self) -> Option<Arc<T>> {
        match std::mem::replace(self.0.get_mut(), State::Closed) {
            State::Open(value) => Some(value),
            State::Closing | State::Closed => None,
        }
    }
}

fn is_closing(operation: &'static str, what: &'static str) -> hmem::Error {
    hmem::Error::new(ErrorKind::Busy, operation)
        .context("why", format_args!("another thread is closing the {what}"))
        .remedy("wait for the other call")
}
