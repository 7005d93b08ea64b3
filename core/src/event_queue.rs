//! Event queues (`fi_eq`), which report that asynchronous registrations have ended.

use std::{collections::VecDeque, time::Duration};

use parking_lot::{Condvar, Mutex};

use crate::Result;

/// The identifier of a region in events, unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

/// The report that an asynchronous registration has ended (`FI_MR_COMPLETE`).
#[derive(Debug)]
pub struct Event {
    /// The identifier of the region ([`MemoryRegion::id`](crate::MemoryRegion::id)).
    pub region: RegionId,
    /// The context value of the registration request.
    pub context: u64,
    /// The result of the registration.
    pub result: Result<()>,
}

/// An unbounded queue of [`Event`]s. Each asynchronous registration adds one event.
#[derive(Debug, Default)]
pub struct EventQueue {
    events: Mutex<VecDeque<Event>>,
    arrived: Condvar,
}

impl EventQueue {
    /// Creates an empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn push(&self, event: Event) {
        self.events.lock().push_back(event);
        self.arrived.notify_one();
    }

    /// Removes and returns the oldest event, or returns `None` if the queue is empty.
    pub fn read(&self) -> Option<Event> {
        self.events.lock().pop_front()
    }

    /// Waits up to `timeout` for an event, and removes and returns the oldest event. Returns `None`
    /// if the queue is still empty after `timeout`.
    ///
    /// With [`Duration::MAX`] the call waits until an event arrives.
    pub fn wait(&self, timeout: Duration) -> Option<Event> {
        let mut events = self.events.lock();
        self.arrived.wait_while_for(&mut events, |events| events.is_empty(), timeout);
        events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event { region: RegionId(1), context: 5, result: Ok(()) }
    }

    #[test]
    fn wait_of_any_timeout_returns_the_event() {
        let queue = EventQueue::new();
        assert!(queue.wait(Duration::ZERO).is_none());
        for timeout in [Duration::ZERO, Duration::from_secs(60), Duration::MAX] {
            queue.push(event());
            assert_eq!(queue.wait(timeout).expect("an event").context, 5, "{timeout:?}");
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.wait(Duration::MAX));
            queue.push(event());
            assert!(waiting.join().expect("no panic").is_some());
        });
    }

    #[test]
    fn waiter_whose_event_another_thread_took_waits_for_the_next_event() {
        let queue = EventQueue::new();
        for timeout in [Duration::from_secs(3600), Duration::MAX] {
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| queue.wait(timeout));
                // Wakes the waiter, and takes its event before the waiter gets the lock.
                let mut woken = false;
                while !woken {
                    let mut events = queue.events.lock();
                    events.push_back(event());
                    woken = queue.arrived.notify_one();
                    assert_eq!(events.pop_back().expect("just pushed").context, 5);
                }
                queue.push(Event { context: 6, ..event() });
                let received = waiting.join().expect("no panic").expect("the next event");
                assert_eq!(received.context, 6, "{timeout:?}");
            });
        }
    }
}
