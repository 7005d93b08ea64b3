//! The state of a NIC, and the events that its driver reports.

use std::{
    borrow::Cow,
    collections::{BTreeSet, VecDeque},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use parking_lot::Mutex;

use crate::{Error, ErrorKind, Result, nic::Nic};

/// The state of the NIC of an open domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NicState {
    /// No failure of the NIC is known.
    Working,
    /// A port has gone down and has not come up again. Regions and keys stay valid. Transfers
    /// through the port fail, or wait until it is up.
    PortDown,
    /// The device was reset, unplugged, or failed. The state is final for this domain. Close the
    /// domain, open another one, and register again.
    Lost,
}

/// An event that a NIC's driver reported.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NicEvent {
    /// The device is lost. The state is [`NicState::Lost`] from now on.
    DeviceLost,
    /// The port with this number has gone down.
    PortDown(u8),
    /// The port with this number has come up.
    PortUp(u8),
    /// A completion queue failed. Requests of the queue would never complete, so the device counts
    /// as lost.
    QueueFailed,
    /// The connection of an endpoint failed. The number is that of the endpoint's queue pair.
    EndpointFailed(u32),
    /// A failed queue pair with this number takes no further request from its shared receive queue.
    LastRequestReached(u32),
    /// Another event, by the driver's name or number for it.
    Other(Cow<'static, str>),
}

/// The facet of a domain that knows the state of its NIC.
///
/// Once the state is [`NicState::Lost`], the domain behaves like this:
///
/// - Calls that register memory, open objects, connect, post requests or bind windows fail at once.
///   They need the device, and return the error of [`NicRecord::check`].
/// - Each pending request completes with the same error when a thread next reads its completion
///   queue or waits for a completion. A read of an empty queue fails with this error.
/// - Deregistrations, closes and frees succeed, and leave nothing behind.
pub trait NicLife {
    /// Reads the events that the driver has reported, and returns the state.
    fn nic_state(&self) -> NicState;

    /// Reads the events that the driver has reported. Returns those that this domain's earlier
    /// calls have not returned, oldest first.
    ///
    /// A domain keeps the latest [`NicRecord::KEPT`] events. Older ones are dropped.
    fn nic_events(&self) -> Vec<NicEvent>;
}

/// The state and the latest events of a NIC, for providers. Several domains of one NIC may share a
/// record.
#[derive(Debug, Default)]
pub struct NicRecord {
    lost: AtomicBool,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    /// The reason of the loss; `None` until the device is lost.
    cause: Option<Cow<'static, str>>,
    ports_down: BTreeSet<u8>,
    events: VecDeque<NicEvent>,
    /// The number of events that were ever added, including those that are no longer in `events`.
    count: u64,
}

impl NicRecord {
    /// The number of events that a record keeps.
    pub const KEPT: usize = 64;

    /// Adds an event. [`NicRecord::lose`] adds [`NicEvent::DeviceLost`].
    pub fn note(&self, event: NicEvent) {
        self.log.lock().note(event);
    }

    /// Records that the device is lost, with the reason. Returns false if the device was lost
    /// before.
    pub fn lose(&self, cause: impl Into<Cow<'static, str>>) -> bool {
        let mut log = self.log.lock();
        if log.cause.is_some() {
            return false;
        }
        log.cause = Some(cause.into());
        log.note(NicEvent::DeviceLost);
        self.lost.store(true, Ordering::Release);
        true
    }

    /// Returns true if the device is lost.
    #[inline]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> NicState {
        let log = self.log.lock();
        match log.cause {
            Some(_) => NicState::Lost,
            None if !log.ports_down.is_empty() => NicState::PortDown,
            None => NicState::Working,
        }
    }

    /// Returns the events after the first `read` ones, oldest first, and sets `read` to the number
    /// of all events. `read` belongs to one reader, and starts with 0.
    pub fn events_after(&self, read: &AtomicU64) -> Vec<NicEvent> {
        let log = self.log.lock();
        let unread = log.count - read.swap(log.count, Ordering::Relaxed).min(log.count);
        let unread = usize::try_from(unread).unwrap_or(usize::MAX).min(log.events.len());
        log.events.iter().skip(log.events.len() - unread).cloned().collect()
    }

    /// Checks that the device is not lost, for a call that needs the device.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the device is lost, with the reason as the context value
    /// `cause`.
    #[inline]
    pub fn check(&self, nic: &Nic, operation: &'static str) -> Result<()> {
        if self.is_lost() { Err(self.loss(nic, operation)) } else { Ok(()) }
    }

    /// Returns the error that [`NicRecord::check`] returns once the device is lost.
    #[cold]
    #[must_use]
    pub fn loss(&self, nic: &Nic, operation: &'static str) -> Error {
        let cause = self.log.lock().cause.clone().unwrap_or_default();
        Error::new(ErrorKind::Unavailable, operation)
            .provider(nic.to_string())
            .context("cause", cause)
            .remedy(
                "close the domain, open one on this or another NIC, and register again \
                 (RoamingRegion::reopen): the device is lost",
            )
    }
}

impl Log {
    fn note(&mut self, event: NicEvent) {
        match event {
            NicEvent::PortDown(port) => drop(self.ports_down.insert(port)),
            NicEvent::PortUp(port) => drop(self.ports_down.remove(&port)),
            _ => {}
        }
        if self.events.len() == NicRecord::KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// LIFE-08: each reader of a NIC's record gets each event once.
    #[test]
    fn each_reader_gets_each_event_once() {
        let (record, early, late) = (NicRecord::default(), AtomicU64::new(0), AtomicU64::new(0));
        record.note(NicEvent::PortDown(1));
        assert_eq!(record.events_after(&early), [NicEvent::PortDown(1)]);
        record.note(NicEvent::PortUp(1));
        assert_eq!(record.events_after(&early), [NicEvent::PortUp(1)]);
        assert_eq!(record.events_after(&early), []);
        assert_eq!(record.events_after(&late), [NicEvent::PortDown(1), NicEvent::PortUp(1)]);
    }

    /// LIFE-08: a record discards the oldest event if it has [`NicRecord::KEPT`] events.
    #[test]
    fn record_keeps_the_latest_events_only() {
        let (record, read) = (NicRecord::default(), AtomicU64::new(0));
        (0..100).for_each(|number| record.note(NicEvent::EndpointFailed(number)));
        let events = record.events_after(&read);
        assert_eq!(events.len(), NicRecord::KEPT);
        assert_eq!(events.last(), Some(&NicEvent::EndpointFailed(99)));
    }

    /// LIFE-08: a NIC works again once all its ports are up, but a lost NIC stays lost.
    #[test]
    fn port_is_down_until_all_ports_are_up_and_a_loss_is_final() {
        let record = NicRecord::default();
        assert_eq!(record.state(), NicState::Working);
        [1, 2].into_iter().for_each(|port| record.note(NicEvent::PortDown(port)));
        record.note(NicEvent::PortUp(2));
        assert_eq!(record.state(), NicState::PortDown);
        record.note(NicEvent::PortUp(1));
        assert_eq!(record.state(), NicState::Working);
        assert!(record.lose("unplugged") && !record.lose("again"));
        record.note(NicEvent::PortUp(1));
        assert_eq!(record.state(), NicState::Lost);
        let nic = Nic { provider: "verbs".into(), name: "a".into(), pci_bus_id: None };
        let error = record.check(&nic, "register").expect_err("lost");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("cause"), Some("unplugged"));
    }
}
