//! Tests of the import monitor, to which the application reports changes: MON-06, MON-08.

#[path = "monitors/mod.rs"]
mod monitors;

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    thread,
};

use hmem_core::{
    Address, AddressRange, Error, ErrorKind, Result,
    monitor::{InvalidationCause, Monitor},
};
use hmem_iface_system::monitor::{HostMonitorKind, ImportCallbacks, ImportMonitor, SystemMonitor};
use monitors::*;
use parking_lot::Mutex;

/// Import callbacks that record their calls, and refuse ranges that start below address 4096.
#[derive(Debug, Default)]
struct CallRecorder(Mutex<Vec<(bool, AddressRange)>>);

impl ImportCallbacks for CallRecorder {
    fn subscribe(&self, range: AddressRange) -> Result<()> {
        if range.start().0 < 4096 {
            return Err(Error::new(ErrorKind::Unsupported, "subscribe").remedy("not here"));
        }
        self.0.lock().push((true, range));
        Ok(())
    }

    fn unsubscribe(&self, range: AddressRange) {
        self.0.lock().push((false, range));
    }
}

fn at(start: u64) -> AddressRange {
    AddressRange::new(Address(start), 4096).unwrap()
}

/// MON-08
#[test]
fn import_gets_subscribe_and_unsubscribe_in_pairs() {
    let calls = Arc::new(CallRecorder::default());
    let monitor = ImportMonitor::new(Arc::<CallRecorder>::clone(&calls)).unwrap();
    let recorder = Recorder::new();
    let subscribe = |range| monitor.subscribe(range, Arc::<Recorder>::clone(&recorder));
    let (first, second) = (subscribe(at(0x10000)).unwrap(), subscribe(at(0x10000)).unwrap());
    assert!(subscribe(at(0)).unwrap_err().is_unsupported(), "the application's own refusal");
    // A subscription of another monitor ends none of this one.
    let other = ImportMonitor::new(Arc::new(CallRecorder::default())).unwrap();
    monitor.unsubscribe(other.subscribe(at(0x10000), Recorder::new()).unwrap());
    assert_eq!(calls.0.lock().len(), 2);
    monitor.unsubscribe(first);
    assert_eq!(*calls.0.lock(), [(true, at(0x10000)), (true, at(0x10000)), (false, at(0x10000))]);
    monitor.unsubscribe(second);
    let _left = subscribe(at(0x20000)).unwrap();
    drop(monitor);
    let calls = calls.0.lock();
    for range in [at(0x10000), at(0x20000)] {
        let of = |kind| calls.iter().filter(|entry| **entry == (kind, range)).count();
        assert_eq!(of(true), of(false), "{calls:?}");
    }
    assert_eq!(Arc::strong_count(&recorder), 1);
}

/// MON-08
#[test]
fn an_import_may_invalidate_from_any_thread() {
    let monitor = ImportMonitor::new(Arc::new(CallRecorder::default())).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(at(0x10000), Arc::<Recorder>::clone(&recorder)).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..100).for_each(|_| monitor.invalidate(at(0x10000))));
        }
    });
    assert_eq!(
        recorder.about(at(0x10000)),
        [(InvalidationCause::Application, How::Invalidated); 400]
    );
    recorder.clear();
    let result = monitor.while_changing(at(0x10000), || {
        assert_eq!(recorder.about(at(0x10000)), [(InvalidationCause::Application, How::Begun)]);
        7
    });
    assert_eq!(result, 7);
    assert_eq!(recorder.events().last().unwrap().2, How::Ended);
    monitor.unsubscribe(subscription);
    recorder.clear();
    monitor.invalidate(at(0x10000));
    assert_eq!(recorder.count(), 0, "no notification after unsubscribing");
}

/// MON-08
#[test]
fn panic_during_a_change_ends_the_change() {
    let monitor = ImportMonitor::new(Arc::new(CallRecorder::default())).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(at(0x10000), Arc::<Recorder>::clone(&recorder)).unwrap();
    let change = || monitor.while_changing(at(0x10000), || resume_unwind(Box::new("free failed")));
    catch_unwind(AssertUnwindSafe(change)).unwrap_err();
    assert_eq!(
        recorder.about(at(0x10000)),
        [
            (InvalidationCause::Application, How::Begun),
            (InvalidationCause::Application, How::Ended)
        ]
    );
    monitor.unsubscribe(subscription);
}

/// MON-06
#[test]
fn import_notifies_no_subscriber_in_a_forked_child() {
    let calls = Arc::new(CallRecorder::default());
    let monitor = ImportMonitor::new(Arc::<CallRecorder>::clone(&calls)).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(at(0x10000), Arc::<Recorder>::clone(&recorder)).unwrap();
    // The child has a copy of the subscription.
    let subscription = Cell::new(Some(subscription));
    let status = forked(|| {
        monitor.invalidate(at(0x10000));
        let notified = recorder.count() != 0;
        let refused = monitor.subscribe(at(0x10000), Recorder::new()).is_err();
        monitor.unsubscribe(subscription.take().unwrap());
        // SAFETY: the call ends the child without destructors. After a panic, the child would
        // continue the parent's test harness.
        unsafe { libc::_exit(i32::from(notified || !refused)) };
    });
    assert_eq!(status, 0);
    monitor.unsubscribe(subscription.take().unwrap());
}

/// MON-06
#[test]
fn child_forked_during_a_change_survives() {
    let monitor = ImportMonitor::new(Arc::new(CallRecorder::default())).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(at(0x10000), Arc::<Recorder>::clone(&recorder)).unwrap();
    let mut child = -1;
    monitor.while_changing(at(0x10000), || {
        // SAFETY: the child only returns from `while_changing` and exits.
        child = unsafe { libc::fork() };
    });
    if child == 0 {
        // SAFETY: the call ends the child without destructors. After a return, the child would
        // continue the parent's test harness.
        unsafe { libc::_exit(7) };
    }
    let mut status = 0;
    // SAFETY: the call waits for the test's own child, and writes only `status`.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    monitor.unsubscribe(subscription);
}

#[test]
fn imported_monitor_is_reported_as_the_choice() {
    let imported =
        SystemMonitor::imported(ImportMonitor::new(Arc::new(CallRecorder::default())).unwrap());
    assert_eq!(imported.choice().requested, HostMonitorKind::Import);
    assert_eq!(imported.monitor().unwrap().name(), "import");
    let json = serde_json::to_value(imported.choice()).unwrap();
    assert_eq!(json["name"], "import");
    assert_eq!(json["candidates"], serde_json::json!([{ "name": "import", "refused": null }]));
}
