//! Behaviours of asynchronous registration, in a domain that is bound to an event queue.

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use hmem_core::{
    Addressing, DomainBindFlags, Errno, ErrorKind, Iova, MemoryRegion, MrFlags, MrMode,
    RegionState, RemoteKey,
    event_queue::{Event, EventQueue},
    fabric::{self, MrAttr},
};

use super::{case::Case, link::CaseLink};
use crate::{
    control::Call,
    link::{HostPages, REMOTE, eventually, mr_attr, wait_held},
    trial::{Outcome, skip},
};

/// Opens a link, and binds an event queue to the target's domain.
fn open(case: &Case) -> (CaseLink, Arc<EventQueue>) {
    let link = CaseLink::open(case);
    let queue = Arc::new(EventQueue::new());
    link.target.domain.bind(&queue, DomainBindFlags::REG_MR).expect("bind the event queue");
    (link, queue)
}

fn event(queue: &EventQueue) -> Event {
    queue.wait(Duration::from_secs(60)).expect("an event")
}

fn submit(link: &CaseLink, attr: &MrAttr<'_>) -> MemoryRegion {
    let attr = attr.key(link.fresh_key());
    fabric::regattr(&link.target.domain, &attr, MrFlags::empty()).expect("submit")
}

pub(super) fn each_asynchronous_registration_ends_in_one_event(case: &Case) {
    let (link, queue) = open(case);
    let again = link.target.domain.bind(&Arc::default(), DomainBindFlags::REG_MR);
    assert_eq!(again.expect_err("a queue is bound").kind(), ErrorKind::BadState);
    let memory = link.bytes(4096);
    let ranges = [memory.part(0, 64)];
    let regions: Vec<_> = (0..20)
        .map(|context| submit(&link, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
        .collect();
    for _ in &regions {
        let event = event(&queue);
        event.result.expect("registered");
        let region = regions.iter().position(|region| region.id() == Some(event.region));
        assert_eq!(region.map(|at| at as u64), Some(event.context));
    }
    assert!(queue.read().is_none(), "an event too many");
    link.target.make_usable(&regions[3]);
    link.assert_works(&link.key(&regions[3]));
    assert_eq!(link.live().regions, 20);
    drop(regions);
    assert_eq!(link.live().regions, 0, "a closed region is live");
}

pub(super) fn region_is_stored_before_its_event_can_be_read(case: &Case) {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let bound = link.has(MrMode::ENDPOINT);
    let usable = if bound { RegionState::Disabled } else { RegionState::Enabled };
    for context in 0..50 {
        let out = OnceLock::new();
        let attr = MrAttr { context, ..mr_attr(&ranges, REMOTE).key(link.fresh_key()) };
        let register = || fabric::regattr_into(&link.target.domain, &attr, MrFlags::empty(), &out);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let event = event(&queue);
                event.result.expect("registered");
                let region: &MemoryRegion = out.get().expect("the event came before the region");
                assert_eq!((region.id(), region.state()), (Some(event.region), usable));
            });
            register().expect("submit");
            reader.join().expect("the reader");
        });
        let taken = register().expect_err("the output is set already");
        assert_eq!(taken.kind(), ErrorKind::BadState);
        assert!(queue.read().is_none(), "the call failed, and yet there is an event");
    }
}

pub(super) fn only_a_failure_after_the_call_emits_an_event(case: &Case) -> Outcome {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let wrong = MrAttr { offset: 1, ..mr_attr(&ranges, REMOTE) };
    let refused = fabric::regattr(&link.target.domain, &wrong, MrFlags::empty()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReservedOffset);
    // The next request fails after its call has returned.
    let hole = HostPages::reserved(4096);
    let (range, kind) = match &case.control {
        Some(control) => {
            assert!(control.fail_nth(Call::Register, 1, Errno(12)), "the back end fails calls");
            (memory.range(), ErrorKind::OutOfResources)
        }
        None if case.is_host() && case.has(MrMode::ALLOCATED) => {
            (hole.range(), ErrorKind::BadAddress)
        }
        None => return skip("the back end offers no test control"),
    };
    let failing = submit(&link, &MrAttr { context: 7, ..mr_attr(&[range], REMOTE) });
    let failure = event(&queue);
    assert_eq!((failure.context, Some(failure.region)), (7, failing.id()));
    assert_eq!(failure.result.unwrap_err().kind(), kind);
    assert_eq!(failing.state(), RegionState::Failed);
    assert_eq!(failing.desc().unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(failing.key().unwrap_err().kind(), ErrorKind::KeyNotAvailable);
    failing.close().expect("a failed region closes");
    assert!(queue.read().is_none(), "an event too many");
    assert_eq!(link.live().regions, 0);
    let next = submit(&link, &mr_attr(&ranges, REMOTE));
    event(&queue).result.expect("the next registration works");
    drop(next);
    Ok(())
}

pub(super) fn pending_region_has_neither_descriptor_nor_key(case: &Case) {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let number = link.fresh_key();
    let assert_unreachable = || {
        let requested = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, number);
        link.assert_dead(&requested, 0, ErrorKind::InvalidKey, "an access by the requested key");
    };
    // Registers the initiator's buffer before the gate.
    assert_unreachable();
    // Declared before the gate, like the regions below: a failed assertion drops the gate first,
    // which releases the held call. The drop of the region waits for that call.
    let region;
    let gate = link.hold(Call::Register);
    let attr = mr_attr(&ranges, REMOTE).key(number);
    region = fabric::regattr(&link.target.domain, &attr, MrFlags::empty()).expect("submit");
    wait_held(&gate);
    assert_unreachable();
    assert_eq!(region.state(), RegionState::Registering);
    assert_eq!(region.desc().unwrap_err().kind(), ErrorKind::BadState);
    let key = region.key().unwrap_err();
    assert_eq!((key.kind(), key.fi_errno()), (ErrorKind::KeyNotAvailable, 126));
    assert_eq!(region.raw_key().unwrap_err().kind(), ErrorKind::KeyNotAvailable);
    assert_eq!(region.enable().unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(region.sub(memory.part(0, 8), REMOTE, 9).unwrap_err().kind(), ErrorKind::BadState);
    assert!(queue.read().is_none(), "the event came before the end");
    gate.release();
    event(&queue).result.expect("registered");
    region.desc().expect("the local descriptor");
    link.target.make_usable(&region);
    link.assert_works(&link.key(&region));
}

pub(super) fn close_during_registration_loses_no_event(case: &Case) {
    end_during_registration(case, |region| region.close().expect("close"));
}

/// The memory of a dropped region may be freed at once, so the drop waits like a close.
pub(super) fn drop_during_registration_loses_no_event(case: &Case) {
    end_during_registration(case, drop);
}

/// Ends a region by `end` while the driver registers it.
fn end_during_registration(case: &Case, end: fn(MemoryRegion)) {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let attr = |context| MrAttr { context, ..mr_attr(&ranges, REMOTE) };
    // Declared before the gate, so that a failed assertion releases the held call first.
    let (running, waiting, dropped);
    let gate = link.hold(Call::Register);
    running = submit(&link, &attr(1));
    wait_held(&gate);
    waiting = submit(&link, &attr(2));
    dropped = submit(&link, &attr(3));
    waiting.close().expect("a registration that has not begun is canceled at once");
    drop(dropped);
    thread::scope(|scope| {
        // Dropped before the scope ends, so that a failure releases the held call.
        let gate = gate;
        let ending = scope.spawn(|| end(running));
        // Leaves time in which an end that does not wait for the driver would return.
        for _ in 0..200 {
            thread::yield_now();
        }
        assert!(!ending.is_finished(), "the region ended while the driver was registering");
        gate.release();
        ending.join().expect("the thread that ends the region");
    });
    let results = [(); 3].map(|()| {
        let event = event(&queue);
        (event.context, event.result.map_err(|error| error.kind()))
    });
    // A canceled registration ends at once. The registration in the driver ends when the driver
    // returns.
    let canceled = Err(ErrorKind::Canceled);
    assert_eq!(results, [(2, canceled), (3, canceled), (1, Ok(()))]);
    assert!(queue.read().is_none(), "an event too many");
    assert_eq!((link.live().regions, link.live().bytes), (0, 0), "something stayed registered");
}

pub(super) fn close_at_any_moment_loses_no_event(case: &Case) {
    let (link, queue) = open(case);
    let memory = link.bytes(8192);
    let ranges = [memory.range()];
    for round in 0..20 {
        let contexts = round * 4..round * 4 + 4;
        let regions: Vec<_> = contexts
            .clone()
            .map(|context| submit(&link, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
            .collect();
        for _ in 0..round {
            thread::yield_now();
        }
        for (at, region) in regions.into_iter().enumerate() {
            if at % 2 == 0 { region.close().expect("close") } else { drop(region) }
        }
        let mut ended: Vec<_> = contexts.clone().map(|_| event(&queue)).collect();
        ended.sort_unstable_by_key(|event| event.context);
        assert!(ended.iter().map(|event| event.context).eq(contexts), "{ended:?}");
        for error in ended.into_iter().filter_map(|event| event.result.err()) {
            assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
        }
    }
    assert!(queue.read().is_none(), "an event too many");
    eventually("the end of dropped regions", || (link.live().regions, link.live().bytes) == (0, 0));
}

pub(super) fn domain_dropped_right_after_submits_loses_no_event(case: &Case) {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let regions: Vec<_> = (0..5)
        .map(|context| submit(&link, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
        .collect();
    let [_initiator, target] = link.into_sides();
    drop((target, regions));
    let mut contexts = [(); 5].map(|()| event(&queue).context);
    contexts.sort_unstable();
    assert_eq!(contexts, [0, 1, 2, 3, 4], "each registration has its one event");
}

pub(super) fn domain_dropped_during_registrations_loses_no_event(case: &Case) {
    let (link, queue) = open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    // Declared before the gate, so that a failed assertion releases the held call first.
    let (regions, target, busy): (Vec<_>, _, _);
    let gate = link.hold(Call::Register);
    regions = (0..5)
        .map(|context| submit(&link, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
        .collect();
    wait_held(&gate);
    let [_initiator, side] = link.into_sides();
    target = side;
    busy = target.domain.close().expect_err("closed under its registrations");
    assert_eq!(busy.error.kind(), ErrorKind::Busy);
    thread::scope(|scope| {
        // The drop of the first region waits for the driver.
        scope.spawn(|| drop((busy.value, target.endpoint, target.cq, regions)));
        gate.release();
    });
    let mut contexts = [(); 5].map(|()| event(&queue).context);
    contexts.sort_unstable();
    assert_eq!(contexts, [0, 1, 2, 3, 4], "each registration has its one event");
}
