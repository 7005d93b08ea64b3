//! EVT-01 to EVT-03, EVT-05 and MR-10: asynchronous registration, counting of peers' accesses, and
//! waiting for completions.

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use hmem::{
    BindFlags, DomainBindFlags, Errno, ErrorKind, MemoryRegion, MrFlags, RegionState,
    event_queue::{Event, EventQueue},
    fabric::{self, MrAttr},
    loopback::{NicCall, Progress},
    provider::{CompletionChannel, CompletionQueue},
    transfer::{CompletionKind, Operation, PeerId, WorkRequest},
};
use hmem_conformance::link::LinkSide;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{
    config::{Need, TestConfig, need, over_configs},
    memory::HostPages,
    net::{LOCAL, Net, REMOTE, Setup, bind_if_needed, eventually, mr_attr, segment},
};

over_configs! {
    /// EVT-01
    the_region_is_stored_before_its_event_can_be_read: DefaultMode;
    /// EVT-01
    only_a_failure_after_the_call_emits_an_event: Pairwise;
    /// MR-10
    before_completion_there_is_neither_descriptor_nor_key: Pairwise;
    /// EVT-03
    close_during_registration_neither_leaks_nor_loses_its_event: Pairwise;
    /// EVT-03
    close_at_any_moment_neither_leaks_nor_loses_an_event: Pairwise;
    /// EVT-03
    a_domain_dropped_during_registrations_ends_cleanly: DefaultMode;
    /// EVT-03
    a_domain_dropped_right_after_submitting_ends_cleanly: DefaultMode;
    /// EVT-05
    a_sleeping_thread_wakes_for_each_message: DefaultMode;
    /// EVT-05
    a_wait_ends_when_the_domain_closes: Pairwise;
    /// EVT-05
    a_channel_loses_no_wakeup: DefaultMode, CHANNEL;
    /// EVT-05
    a_channel_reports_that_its_domain_is_closed: DefaultMode, CHANNEL;
}

const CHANNEL: Need =
    need("progress by hand", "nothing completes while the application sleeps", |config| {
        config.progress == Progress::Thread
    });

const LONG: Duration = Duration::from_secs(60);

fn bound(net: &Net) -> Arc<EventQueue> {
    let queue = Arc::new(EventQueue::new());
    net.target.domain.bind(&queue, DomainBindFlags::REG_MR).expect("bind the event queue");
    queue
}

fn event(queue: &EventQueue) -> Event {
    queue.wait(LONG).expect("an event never came")
}

fn submit(net: &Net, attr: &MrAttr<'_>) -> MemoryRegion {
    fabric::regattr(&net.target.domain, &attr.key(net.fresh_key()), MrFlags::empty())
        .expect("submit")
}

fn the_region_is_stored_before_its_event_can_be_read(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    for round in 0..50 {
        let out = OnceLock::new();
        let attr = MrAttr { context: round, ..mr_attr(&ranges, REMOTE).key(net.fresh_key()) };
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let event = event(&queue);
                event.result.expect("registered");
                let region: &MemoryRegion = out.get().expect("the event came before the region");
                assert_eq!(
                    (region.id(), region.state()),
                    (Some(event.region), RegionState::Enabled)
                );
            });
            fabric::regattr_into(&net.target.domain, &attr, MrFlags::empty(), &out)
                .expect("submit");
            reader.join().expect("the reader");
        });
        let taken =
            fabric::regattr_into(&net.target.domain, &attr, MrFlags::empty(), &out).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::BadState, "the output was set already");
        assert!(queue.read().is_none(), "the call failed, and yet there is an event");
    }
}

fn only_a_failure_after_the_call_emits_an_event(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let wrong = MrAttr { offset: 1, ..mr_attr(&ranges, REMOTE) };
    let refused = fabric::regattr(&net.target.domain, &wrong, MrFlags::empty()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReservedOffset);
    // The next request fails after the call has returned: an RDMA device refuses addresses without
    // pages, and the software NIC has an injected fault.
    let hole = HostPages::reserved(4096);
    let refused_later = if config.is_loopback() {
        (memory.range(), ErrorKind::OutOfResources)
    } else {
        (hole.range(), ErrorKind::BadAddress)
    };
    net.faults.fail_nth(NicCall::Register, 1, Errno(12));
    // With several paths to try, the first refusal is not final.
    if !config.is_system() && !config.staged() && config.policy != hmem::path::P2pPolicy::Required {
        net.faults.fail_nth(NicCall::Register, 2, Errno(12));
    }
    let failing = submit(&net, &MrAttr { context: 7, ..mr_attr(&[refused_later.0], REMOTE) });
    let event = event(&queue);
    assert_eq!((event.context, Some(event.region)), (7, failing.id()));
    assert_eq!(event.result.unwrap_err().kind(), refused_later.1);
    assert_eq!(failing.state(), RegionState::Failed);
    assert_eq!(failing.desc().unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(failing.key().unwrap_err().kind(), ErrorKind::KeyNotAvailable);
    failing.close().expect("a failed region closes");
    assert!(queue.read().is_none(), "an event too many");
    assert_eq!(net.live().regions, 0);
    let next = submit(&net, &mr_attr(&ranges, REMOTE));
    self::event(&queue).result.expect("the next registration works");
    drop(next);
}

fn before_completion_there_is_neither_descriptor_nor_key(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let gate = net.hold_registration();
    let region = submit(&net, &mr_attr(&ranges, REMOTE));
    gate.wait();
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
    bind_if_needed(&net.target, &region).expect("bind and enable");
    net.assert_works(&net.key(&region));
}

/// EVT-02
#[test]
fn binding_a_counter_is_nosys_if_the_provider_cannot_count() {
    let mut setup = Setup::of(&TestConfig::PLAIN);
    setup.provider = setup.provider.region_counters(false);
    let net = setup.open();
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    let error = region.bind_counter(&Arc::default(), BindFlags::REMOTE_WRITE).unwrap_err();
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::NoSys, 38));
    assert!(error.is_unsupported() && error.provider_name() == Some("loopback/loop0"));
    region.close().expect("nothing was bound");
}

fn close_during_registration_neither_leaks_nor_loses_its_event(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let attr = |context| MrAttr { context, ..mr_attr(&ranges, REMOTE) };
    let gate = net.hold_registration();
    let running = submit(&net, &attr(1));
    gate.wait();
    let waiting = submit(&net, &attr(2));
    let dropped = submit(&net, &attr(3));
    waiting.close().expect("a registration that has not begun is canceled at once");
    drop(dropped);
    thread::scope(|scope| {
        let closing = scope.spawn(|| running.close());
        // Leaves time in which a close that does not wait for the driver would return.
        for _ in 0..200 {
            thread::yield_now();
        }
        assert!(!closing.is_finished(), "close returned while the driver was registering");
        gate.release();
        closing.join().expect("the closing thread").expect("close");
    });
    let mut results = Vec::new();
    for _ in 0..3 {
        let event = event(&queue);
        results.push((event.context, event.result.map_err(|error| error.kind())));
    }
    // A canceled registration ends at once. The registration in the driver ends when the driver
    // returns.
    assert_eq!(results[..2], [(2, Err(ErrorKind::Canceled)), (1, Ok(()))]);
    assert_eq!(results[2].0, 3);
    assert!(queue.read().is_none());
    assert_eq!((net.live().regions, net.live().bytes), (0, 0), "something stayed registered");
}

fn close_at_any_moment_neither_leaks_nor_loses_an_event(config: &TestConfig) {
    const ROUNDS: u64 = 20;
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(8192);
    let ranges = [memory.range()];
    for round in 0..ROUNDS {
        let regions: Vec<_> = (0..4)
            .map(|at| {
                let context = round * 4 + at;
                submit(&net, &MrAttr { context, ..mr_attr(&ranges, REMOTE) })
            })
            .collect();
        for _ in 0..round {
            thread::yield_now();
        }
        for (at, region) in regions.into_iter().enumerate() {
            if at % 2 == 0 { region.close().expect("close") } else { drop(region) }
        }
        let mut contexts = Vec::new();
        for _ in 0..4 {
            let event = event(&queue);
            contexts.push(event.context);
            if let Err(error) = event.result {
                assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
            }
        }
        contexts.sort_unstable();
        assert_eq!(contexts, (round * 4..round * 4 + 4).collect::<Vec<_>>());
    }
    assert!(queue.read().is_none(), "an event too many");
    eventually("the end of what was dropped", || (net.live().regions, net.live().bytes) == (0, 0));
}

fn a_domain_dropped_right_after_submitting_ends_cleanly(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let regions: Vec<_> = (0..5)
        .map(|context| submit(&net, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
        .collect();
    let [_initiator, target] = net.link.into_sides();
    drop((target, regions));
    let mut contexts: Vec<_> = (0..5).map(|_| event(&queue).context).collect();
    contexts.sort_unstable();
    assert_eq!(contexts, [0, 1, 2, 3, 4], "each registration has its one event");
    drop(memory);
}

fn a_domain_dropped_during_registrations_ends_cleanly(config: &TestConfig) {
    let net = Net::open(config);
    let queue = bound(&net);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let gate = net.hold_registration();
    let regions: Vec<_> = (0..5)
        .map(|context| submit(&net, &MrAttr { context, ..mr_attr(&ranges, REMOTE) }))
        .collect();
    gate.wait();
    let [_initiator, target] = net.link.into_sides();
    let busy = target.domain.close().expect_err("closed under its registrations");
    assert_eq!(busy.error.kind(), ErrorKind::Busy);
    drop((busy.value, target.endpoint, target.cq, regions));
    gate.release();
    let contexts: Vec<_> = (0..5).map(|_| event(&queue).context).collect();
    assert_eq!(contexts, [0, 1, 2, 3, 4], "each registration has its one event");
    drop(memory);
}

/// Posts a receive of 8 bytes on the target's endpoint.
fn post_receive(net: &Net, region: &MemoryRegion, context: u64) {
    let range = region.ranges()[0].slice(0, 8).expect("inside");
    let request = WorkRequest {
        operation: Operation::Receive { tag: None, from: None },
        local: &[segment(range, Some(region.desc().expect("a descriptor")))],
        peer: PeerId(0),
        context,
    };
    // SAFETY: the memory belongs to the test and outlives the transfer.
    unsafe { net.target.endpoint.post(&request) }.expect("post a receive");
}

fn a_sleeping_thread_wakes_for_each_message(config: &TestConfig) {
    const MESSAGES: u64 = 50;
    let net = Net::open(config);
    let target = net.bytes(64);
    let region = net.expose(target.range(), LOCAL);
    let local = net.local(64, LOCAL);
    thread::scope(|scope| {
        let (net, region) = (&net, &region);
        let sleeper = scope.spawn(move || {
            for context in 0..MESSAGES {
                post_receive(net, region, context);
                let mut done = Vec::new();
                let count = net.target.cq.wait(&mut done, 1, LONG).expect("wait");
                assert_eq!((count, done[0].context), (1, context));
                assert_eq!(done[0].kind, CompletionKind::Receive);
                done.remove(0).result.expect("receive");
            }
        });
        for context in 0..MESSAGES {
            let message = Operation::Send { tag: None, invalidate: None };
            net.post(message, &[local.segment(0, 8)], context).expect("post a message");
            let mut done = Vec::new();
            assert_eq!(net.initiator.cq.wait(&mut done, 1, LONG).expect("wait"), 1);
            done.remove(0).result.expect("send");
        }
        sleeper.join().expect("the sleeper");
    });
}

/// Closes the target's endpoint and domain. Returns the target's completion queue.
fn close_target(target: LinkSide) -> Arc<dyn CompletionQueue> {
    let LinkSide { endpoint, cq, domain, .. } = target;
    endpoint.close().map_err(|rejected| rejected.error).expect("close the endpoint");
    domain.close().map_err(|rejected| rejected.error).expect("close the domain");
    cq
}

fn a_wait_ends_when_the_domain_closes(config: &TestConfig) {
    let net = Net::open(config);
    let cq = Arc::clone(&net.target.cq);
    let [_initiator, target] = net.link.into_sides();
    let refused = |result: hmem::Result<usize>| {
        let error = result.expect_err("the domain is closed");
        assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
    };
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| cq.wait(&mut Vec::new(), 1, Duration::MAX));
        close_target(target);
        refused(sleeper.join().expect("the sleeper"));
    });
    for timeout in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
        refused(cq.wait(&mut Vec::new(), 1, timeout));
    }
}

fn channel(cq: &Arc<dyn CompletionQueue>) -> &dyn CompletionChannel {
    cq.channel().expect("a completion channel")
}

/// Returns whether the channel's fd became readable within `timeout`.
fn readable(channel: &dyn CompletionChannel, timeout: Duration) -> bool {
    let fd = channel.fd().expect("an fd");
    let timeout = Timespec::try_from(timeout).expect("a timeout");
    let ready = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
    ready.expect("poll") == 1
}

fn a_channel_loses_no_wakeup(config: &TestConfig) {
    const MESSAGES: u64 = 300;
    let net = Net::open(config);
    let target = net.bytes(64);
    let region = net.expose(target.range(), LOCAL);
    let local = net.local(64, LOCAL);
    for context in 0..100 {
        post_receive(&net, &region, context);
    }
    thread::scope(|scope| {
        let (net, region) = (&net, &region);
        let sleeper = scope.spawn(move || {
            let (cq, mut done) = (&net.target.cq, Vec::new());
            let mut received = 0;
            while received < MESSAGES {
                let count = cq.read(&mut done, 2).expect("read") as u64;
                for ended in done.drain(..) {
                    ended.result.expect("receive");
                    post_receive(net, region, 0);
                }
                received += count;
                if count == 0 && channel(cq).arm().expect("arm") {
                    assert!(readable(channel(cq), LONG), "not woken after {received} messages");
                }
            }
        });
        for context in 0..MESSAGES {
            let message = Operation::Send { tag: None, invalidate: None };
            net.post(message, &[local.segment(0, 8)], context).expect("post a message");
            let mut done = Vec::new();
            assert_eq!(net.initiator.cq.wait(&mut done, 1, LONG).expect("wait"), 1);
            done.remove(0).result.expect("send");
        }
        sleeper.join().expect("the sleeper");
    });
}

fn a_channel_reports_that_its_domain_is_closed(config: &TestConfig) {
    let net = Net::open(config);
    assert!(channel(&net.target.cq).arm().expect("arm"));
    let [_initiator, target] = net.link.into_sides();
    let cq = close_target(target);
    assert!(readable(channel(&cq), LONG), "a task sleeps on");
    assert_eq!(cq.read(&mut Vec::new(), 1).expect("read"), 0);
    assert_eq!(channel(&cq).arm().expect_err("closed").kind(), ErrorKind::BadState);
}
