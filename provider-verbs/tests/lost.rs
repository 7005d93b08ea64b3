//! Events of devices, and devices that are lost, over a fake library that moves bytes.

mod fake;
mod wire;

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Domain, Error, ErrorKind, RegionSlice, Result, RoamingRegion,
    key_feed::PeerKeys,
    provider::{CompletionChannel, CompletionQueue, EndpointAttr, NicEvent, NicState},
    transfer::{Completion, EndpointName, RemoteSegment},
};
use hmem_provider_verbs::{
    Verbs,
    sys::{EventType, WcStatus},
};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};
use wire::{Call, Gate, Misbehaviour, hold, life, misbehave};

/// Tests of this file count the process's file descriptors, so only one runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Longer than any call may take after a loss.
const LONG: Duration = Duration::from_secs(20);

fn fine() -> Misbehaviour {
    Misbehaviour { bind: Some(WcStatus::IBV_WC_SUCCESS), ..Misbehaviour::default() }
}

/// A provider over the fake library, and the number of open fds before it was created.
struct Lab {
    verbs: Verbs,
    fds: usize,
    _alone: MutexGuard<'static, ()>,
}

fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("list the fds").count()
}

impl Lab {
    fn new() -> Self {
        let alone = ONE_AT_A_TIME.lock();
        let fds = open_fds();
        let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
        Self { verbs, fds, _alone: alone }
    }

    fn setup(&self) -> Setup {
        self.try_setup().expect("set up")
    }

    fn try_setup(&self) -> Result<Setup> {
        let domain = fake::open(&self.verbs);
        let cq = domain.open_cq(16)?;
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq))?;
        let peer = endpoint.resolve(&endpoint.name())?;
        let region = domain.register(vec![3; 64], Access::all())?;
        Ok(Setup { region, endpoint, peer, cq, domain })
    }

    /// Drops the provider, and asserts that no fd is left.
    fn assert_no_fd_is_left(self) {
        drop(self.verbs);
        assert_eq!(open_fds(), self.fds, "file descriptors are left");
    }
}

/// An endpoint that is connected to itself, with one region.
struct Setup {
    region: hmem_core::Region<Vec<u8>>,
    endpoint: hmem_core::Endpoint,
    peer: hmem_core::transfer::PeerId,
    cq: Arc<dyn CompletionQueue>,
    domain: Domain,
}

impl Setup {
    fn slice(&self) -> RegionSlice {
        self.region.slice(8, 8).expect("inside")
    }

    fn write(&self, context: u64) -> Result<()> {
        let key = self.region.key()?;
        let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
        self.endpoint.write(&[self.slice()], &remote, self.peer, context)
    }

    fn receive(&self, context: u64) -> Result<()> {
        self.endpoint.receive(&[self.slice()], None, context)
    }

    fn channel(&self) -> &dyn CompletionChannel {
        self.cq.channel().expect("a completion channel")
    }

    /// Asserts that the domain behaves as that of a lost device. Its queue is empty.
    fn assert_is_lost(&self, cause: &str) {
        assert_eq!(self.domain.nic_state(), NicState::Lost);
        let no_completion = self.cq.wait(&mut Vec::new(), 8, Duration::MAX).map(drop);
        for (call, result) in [
            (
                "register",
                self.domain.register(vec![0; 8], Access::all()).map(drop).map_err(Error::from),
            ),
            ("open a queue", self.domain.open_cq(1).map(drop)),
            ("open an endpoint", self.domain.open_endpoint(&EndpointAttr::new(&self.cq)).map(drop)),
            ("resolve", self.endpoint.resolve(&EndpointName(Vec::new())).map(drop)),
            ("reconnect", self.endpoint.reconnect()),
            ("write", self.write(9)),
            ("receive", self.receive(9)),
            ("wait", no_completion),
        ] {
            assert_lost(&result.expect_err(call), cause);
        }
    }

    /// Closes everything in an order that an application uses.
    fn close(self) {
        self.endpoint.close().map_err(|rejected| rejected.error).expect("close the endpoint");
        assert_eq!(self.region.close().expect("close the region").len(), 64);
        drop(self.cq);
        self.domain.close().expect("close the domain");
    }
}

fn assert_lost(error: &Error, cause: &str) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
    assert!(error.context_value("cause").is_some_and(|text| text.contains(cause)), "{error:#}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("register again")), "{error:#}");
}

/// Returns the contexts of the next completions, which must all have the error of a loss.
fn lost_completions(cq: &dyn CompletionQueue, count: usize) -> Vec<u64> {
    let mut done: Vec<Completion> = Vec::new();
    while done.len() < count {
        assert!(cq.wait(&mut done, 8, LONG).expect("completions of the loss") > 0, "none in time");
    }
    done.iter().for_each(|it| assert_lost(it.result.as_ref().expect_err("lost"), ""));
    let mut contexts: Vec<_> = done.iter().map(|it| it.context).collect();
    contexts.sort_unstable();
    contexts
}

fn readable(channel: &dyn CompletionChannel) -> bool {
    let fd = channel.fd().expect("fd");
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).expect("poll") == 1
}

/// LIFE-08
#[test]
fn port_that_goes_down_and_comes_up_is_a_state_and_two_events() {
    let lab = Lab::new();
    let setup = lab.setup();
    assert_eq!(setup.domain.nic_state(), NicState::Working);
    life::report_port(EventType::IBV_EVENT_PORT_ERR, 1);
    assert_eq!(setup.domain.nic_state(), NicState::PortDown);
    life::report_port(EventType::IBV_EVENT_PORT_ACTIVE, 1);
    assert_eq!(setup.domain.nic_state(), NicState::Working);
    assert_eq!(setup.domain.nic_events(), [NicEvent::PortDown(1), NicEvent::PortUp(1)]);
    assert_eq!(setup.domain.nic_events(), []);
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08
#[test]
fn events_of_objects_are_recorded_and_acknowledged() {
    let lab = Lab::new();
    let setup = lab.setup();
    let number = life::report_pair(EventType::IBV_EVENT_QP_FATAL);
    life::report_pair(EventType::IBV_EVENT_QP_ACCESS_ERR);
    life::report_pair(EventType::IBV_EVENT_QP_LAST_WQE_REACHED);
    life::report_device(EventType::IBV_EVENT_SRQ_ERR);
    life::report_device(EventType(77));
    let expected = [
        NicEvent::EndpointFailed(number),
        NicEvent::EndpointFailed(number),
        NicEvent::LastRequestReached(number),
        NicEvent::Other("IBV_EVENT_SRQ_ERR".into()),
        NicEvent::Other("event 77".into()),
    ];
    assert_eq!(setup.domain.nic_events(), expected);
    assert_eq!(setup.domain.nic_state(), NicState::Working);
    // The fake library asserts at the close of the device that all events are acknowledged.
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08
#[test]
fn fatal_event_ends_requests_and_refuses_calls() {
    let lab = Lab::new();
    let setup = lab.setup();
    setup.receive(1).expect("receive");
    setup.receive(2).expect("receive");
    life::report_device(EventType::IBV_EVENT_DEVICE_FATAL);
    assert_eq!(setup.domain.nic_state(), NicState::Lost);
    assert_eq!(setup.domain.nic_events(), [NicEvent::DeviceLost]);
    assert_eq!(lost_completions(&*setup.cq, 2), [1, 2]);
    setup.assert_is_lost("fatal event");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08
#[test]
fn failed_completion_queue_counts_as_a_lost_device() {
    let lab = Lab::new();
    let setup = lab.setup();
    setup.receive(1).expect("receive");
    life::report_queue(EventType::IBV_EVENT_CQ_ERR);
    assert_eq!(lost_completions(&*setup.cq, 1), [1]);
    assert_eq!(setup.domain.nic_events(), [NicEvent::QueueFailed, NicEvent::DeviceLost]);
    setup.assert_is_lost("completion queue");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: the requests that completed before the loss keep their results.
#[test]
fn removal_keeps_earlier_completions() {
    let lab = Lab::new();
    let setup = lab.setup();
    setup.write(1).expect("write");
    let mut done = Vec::new();
    while done.is_empty() {
        setup.cq.read(&mut done, 1).expect("read");
    }
    setup.receive(2).expect("receive");
    life::remove_devices();
    assert_eq!(lost_completions(&*setup.cq, 1), [2]);
    setup.assert_is_lost("");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: threads that sleep wake up, whichever of them reads the event.
#[test]
fn removal_wakes_all_sleeping_threads() {
    let lab = Lab::new();
    let (first, second) = (lab.setup(), lab.setup());
    first.receive(1).expect("receive");
    let library = wire::Shared::of_this_thread();
    thread::scope(|scope| {
        let waits = [&first.cq, &second.cq].map(|cq| {
            let library = library.clone();
            scope.spawn(move || {
                library.enter();
                let mut done = Vec::new();
                cq.wait(&mut done, 8, Duration::MAX).map(|_| done.len())
            })
        });
        thread::sleep(Duration::from_millis(100));
        let before = Instant::now();
        life::remove_devices();
        let [first, second] = waits.map(|wait| wait.join().expect("no panic"));
        assert_eq!(first.expect("the completion of the receive"), 1);
        assert_lost(&second.expect_err("nothing completes"), "");
        assert!(before.elapsed() < LONG);
    });
    first.assert_is_lost("");
    second.assert_is_lost("");
    first.close();
    second.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: a queue reports the loss only after all of its completions, also if another thread is
/// still ending the requests.
#[test]
fn reader_of_a_lost_device_waits_until_another_thread_has_ended_the_requests() {
    let lab = Lab::new();
    let (first, second) = (lab.setup(), lab.setup());
    first.receive(1).expect("receive");
    life::remove_devices();
    // Unlike `nic_state`, this ends no request.
    assert_eq!(first.domain.nic_events(), [NicEvent::DeviceLost]);
    let (library, gate) = (wire::Shared::of_this_thread(), Arc::new(Gate::default()));
    let read = |cq: &dyn CompletionQueue| {
        library.enter();
        let mut done = Vec::new();
        cq.read(&mut done, 8).map(|_| done.len())
    };
    let wait_until = |done: &dyn Fn() -> bool, limit| {
        let start = Instant::now();
        while !done() && start.elapsed() < limit {
            thread::yield_now();
        }
        done()
    };
    thread::scope(|scope| {
        let ending = scope.spawn(|| {
            // The second poll follows the end of the connection.
            hold(Call::PollQueue, 2, &gate);
            read(&*second.cq)
        });
        assert!(wait_until(&|| gate.reached.load(Ordering::Acquire), LONG), "no second poll");
        let reading = scope.spawn(|| read(&*first.cq));
        // A reader that does not wait for the other thread ends in this time.
        wait_until(&|| reading.is_finished(), Duration::from_millis(100));
        gate.open.store(true, Ordering::Release);
        let read = reading.join().expect("no panic");
        assert_eq!(read.expect("the completion of the receive"), 1);
        assert_lost(&ending.join().expect("no panic").expect_err("nothing completes"), "");
    });
    first.close();
    second.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08
#[test]
fn removal_makes_the_channel_readable() {
    let lab = Lab::new();
    let setup = lab.setup();
    assert!(setup.channel().arm().expect("arm"));
    assert!(!readable(setup.channel()));
    life::remove_devices();
    assert!(readable(setup.channel()), "the loss does not wake an event loop");
    let mut arms = (0..2).map(|_| setup.channel().arm());
    assert!(arms.any(|armed| !matches!(armed, Ok(true))), "an event loop would sleep again");
    assert_lost(&setup.cq.read(&mut Vec::new(), 8).expect_err("lost"), "");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: a thread that sleeps wakes up even if another thread has read the event.
#[test]
fn loss_that_another_thread_has_seen_wakes_sleepers() {
    let lab = Lab::new();
    let setup = lab.setup();
    assert!(setup.channel().arm().expect("arm"));
    life::report_device(EventType::IBV_EVENT_DEVICE_FATAL);
    assert_eq!(setup.domain.nic_state(), NicState::Lost);
    assert!(readable(setup.channel()), "the loss does not wake an event loop");
    assert_lost(&setup.cq.read(&mut Vec::new(), 8).expect_err("lost"), "fatal");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: a thread that reads the queue without waiting sees the loss, too.
#[test]
fn polling_thread_sees_the_removal() {
    let lab = Lab::new();
    let setup = lab.setup();
    setup.receive(1).expect("receive");
    life::remove_devices();
    let mut done = Vec::new();
    let reads = (0..1000).find(|_| setup.cq.read(&mut done, 1).expect("the receive") == 1);
    assert!(reads.is_some(), "not seen in 1000 reads");
    assert_lost(done[0].result.as_ref().expect_err("lost"), "");
    setup.close();
    lab.assert_no_fd_is_left();
}

/// LIFE-08: requests stay in flight while the driver still has the queue pair, because the NIC may
/// use their memory.
#[test]
fn requests_end_only_once_their_queue_pair_is_destroyed() {
    let lab = Lab::new();
    let setup = lab.setup();
    setup.receive(1).expect("receive");
    misbehave(Misbehaviour { refuses_destruction: 16, ..fine() });
    life::report_device(EventType::IBV_EVENT_DEVICE_FATAL);
    for _ in 0..3 {
        assert_eq!(setup.domain.nic_state(), NicState::Lost);
        assert_lost(&setup.cq.read(&mut Vec::new(), 8).expect_err("no completion"), "fatal");
    }
    let rejected = setup.endpoint.close().expect_err("the driver still has the queue pair");
    assert_eq!(rejected.error.os_errno().map(|errno| errno.0), Some(16), "{}", rejected.error);
    misbehave(fine());
    let setup = Setup { endpoint: rejected.value, ..setup };
    assert_eq!(lost_completions(&*setup.cq, 1), [1]);
    setup.close();
    lab.assert_no_fd_is_left();
}

/// One life of a domain. Each step is a call that an application makes, also on a lost device.
fn whole_life(lab: &Lab) -> Result<()> {
    let setup = lab.try_setup()?;
    let run = |setup: &Setup| -> Result<()> {
        setup.region.raw_key()?;
        setup.write(1)?;
        let mut done = Vec::new();
        assert_eq!(setup.cq.wait(&mut done, 1, LONG)?, 1, "no completion in time");
        done.remove(0).result?;
        let window = setup.domain.alloc_type_1_window()?;
        window.bind(&setup.region, 0, 8, Access::REMOTE_WRITE)?;
        window.unbind()?;
        window.bind(&setup.region, 8, 8, Access::REMOTE_READ)?;
        drop(window);
        let part = setup.domain.register(vec![0; 4096], Access::all())?;
        part.close().map(drop).map_err(|rejected| rejected.error)
    };
    let ran = run(&setup);
    setup.close();
    ran
}

/// LIFE-08: at whichever call of the library the device is removed.
#[test]
fn removal_at_any_call_is_a_typed_error_and_leaks_nothing() {
    let mut refused = 0;
    for nth in 1.. {
        let lab = Lab::new();
        // Opens the device.
        drop(fake::open(&lab.verbs));
        life::remove_devices_at(nth);
        match whole_life(&lab) {
            Ok(()) => {}
            Err(error) => {
                assert_lost(&error, "");
                refused += 1;
            }
        }
        let reached = life::has_removed_devices();
        lab.assert_no_fd_is_left();
        if !reached {
            assert!(nth > 15 && refused > 10, "{nth} calls, {refused} failures");
            return;
        }
    }
}

/// LIFE-09
#[test]
fn region_of_a_removed_device_is_registered_again_with_a_new_key() {
    let lab = Lab::new();
    let lost = lab.setup();
    let buffer = lost.domain.register(vec![7; 64], Access::all()).expect("register");
    let mut region = RoamingRegion::new(buffer).map_err(|it| it.error).expect("publish");
    let mut subscription = region.feed().subscribe();
    let mut peer = PeerKeys::default();
    peer.apply(&subscription.next().expect("generation 1")).expect("apply");
    life::remove_devices();
    assert_eq!(lost.domain.nic_state(), NicState::Lost);
    assert_lost(&region.reopen(&lost.domain).expect_err("the same domain"), "");
    let next = lab.setup();
    assert_eq!(region.reopen(&next.domain).expect("reopen"), 2);
    lost.close();
    let applied = peer.apply(&subscription.next().expect("generation 2")).expect("apply");
    assert_eq!((applied.generation, applied.missed), (2, 0));
    assert_eq!(peer.segments("fake0", 0..64, 1).expect_err("old").kind(), ErrorKind::InvalidKey);
    let segments = peer.segments("fake0", 0..8, 2).expect("the new key");
    next.endpoint.write(&[next.slice()], &segments, next.peer, 1).expect("write");
    let mut done = Vec::new();
    next.cq.wait(&mut done, 1, LONG).expect("wait");
    assert_eq!(done.remove(0).result.expect("written"), 8);
    let bytes = region.close().expect("close");
    assert_eq!((&bytes[..8], &bytes[8..]), (&[3; 8][..], &[7; 56][..]));
    next.close();
    lab.assert_no_fd_is_left();
}
