//! Asynchronous copies: the event that callers get.

use std::{cell::RefCell, fmt};

use hmem_core::{Result, iface::CopyEvent};

use crate::log_failure;

/// A copy that runs on a device, with the driver's objects that it uses, such as a stream, an event
/// or a buffer.
///
/// The owner must call [`finish`](Self::finish), because dropping the value does not wait for the
/// end of the copy. [`InFlight`] makes this call.
pub trait DeviceCopy: fmt::Debug + Send {
    /// Returns true if the device has ended the copy. A copy that failed counts as ended.
    fn has_ended(&self) -> bool;

    /// Waits for the end of the copy, and destroys or keeps the driver's objects.
    ///
    /// # Errors
    /// The error of the copy, or else of the objects' release.
    fn finish(self) -> Result<()>;
}

/// The event of a [`DeviceCopy`]. Finishes the copy once the caller has observed the end of the
/// copy. Dropping the event waits for the end of the copy, so that the caller can free the memory
/// afterwards.
#[derive(Debug)]
pub struct InFlight<C: DeviceCopy> {
    /// The copy, or `None` once it is finished.
    running: RefCell<Option<C>>,
    /// Result of the finished copy, which `wait` returns.
    result: RefCell<Result<()>>,
}

impl<C: DeviceCopy> InFlight<C> {
    /// Returns the event of a copy that was started.
    pub fn new(copy: C) -> Self {
        Self { running: RefCell::new(Some(copy)), result: RefCell::new(Ok(())) }
    }

    fn finish(&self) {
        if let Some(copy) = self.running.take() {
            *self.result.borrow_mut() = copy.finish();
        }
    }
}

impl<C: DeviceCopy> CopyEvent for InFlight<C> {
    fn is_done(&self) -> bool {
        if self.running.borrow().as_ref().is_some_and(|copy| !copy.has_ended()) {
            return false;
        }
        self.finish();
        true
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.finish();
        self.result.replace(Ok(()))
    }
}

impl<C: DeviceCopy> Drop for InFlight<C> {
    fn drop(&mut self) {
        self.finish();
        log_failure!(
            warn,
            self.result.get_mut(),
            "a copy failed whose event was dropped without a wait"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use hmem_core::{Error, ErrorKind};

    use super::*;

    /// A failed copy: [`DeviceCopy::has_ended`] returns true from the second call on, and
    /// [`DeviceCopy::finish`] returns an error.
    #[derive(Debug, Default)]
    struct Failing {
        asked: AtomicUsize,
        finished: Arc<AtomicUsize>,
    }

    impl DeviceCopy for Failing {
        fn has_ended(&self) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed) > 0
        }

        fn finish(self) -> Result<()> {
            self.finished.fetch_add(1, Ordering::Relaxed);
            Err(Error::new(ErrorKind::Driver, "copy"))
        }
    }

    #[test]
    fn copy_is_finished_once_and_wait_returns_its_error() {
        let copy = Failing::default();
        let finished = Arc::clone(&copy.finished);
        let event = Box::new(InFlight::new(copy));
        let is_done: Vec<_> = (0..3).map(|_| event.is_done()).collect();
        assert_eq!(is_done, [false, true, true]);
        assert_eq!(finished.load(Ordering::Relaxed), 1);
        assert_eq!(event.wait().expect_err("it failed").kind(), ErrorKind::Driver);
        assert_eq!(finished.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn dropping_the_event_finishes_the_copy() {
        let copy = Failing::default();
        let finished = Arc::clone(&copy.finished);
        drop(InFlight::new(copy));
        assert_eq!(finished.load(Ordering::Relaxed), 1);
    }
}
