//! Behaviours of completions: waiting, the file descriptor of a queue, and immediate data.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, ErrorKind, Result,
    provider::{CompletionChannel, CompletionQueue, EndpointAttr},
    transfer::{Completion, CompletionKind, Operation},
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{case::Case, link::CaseLink};
use crate::link::{DEPTH, LOCAL, LinkSide, Local, REMOTE, eventually, remote, segment};
use crate::{
    bytes::{assert_bytes, pattern},
    trial::{Outcome, assert_kind, skip},
};

const NO_CHANNEL: &str = "the queues of this provider have no completion channel";

/// Timeout of a wait that must succeed.
const LONG: Duration = Duration::from_secs(60);

/// Waits for up to `max` completions without a timeout. Panics if the wait does not return, so that
/// the test fails instead of hanging.
pub(super) fn wait_without_timeout(
    cq: &Arc<dyn CompletionQueue>,
    max: usize,
) -> Result<Vec<Completion>> {
    let (cq, (answer, answered)) = (Arc::clone(cq), mpsc::channel());
    thread::spawn(move || {
        let mut done = Vec::new();
        let waited = cq.wait(&mut done, max, Duration::MAX);
        // Fails if the test has stopped waiting.
        let _ = answer.send(waited.map(|count| {
            assert_eq!(count, done.len());
            done
        }));
    });
    answered.recv_timeout(LONG).expect("the wait returns")
}

pub(super) fn queue_of_another_domain_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let (own, other) = (&link.initiator, &link.target);
    let unwrapped = own.domain.provider_domain().transport().expect("the NIC transfers").open_cq(8);
    let unwrapped = unwrapped.expect("open a completion queue");
    for foreign in [&other.cq, &unwrapped] {
        for (tx, rx) in [(foreign, &own.cq), (&own.cq, foreign), (foreign, foreign)] {
            let attr = EndpointAttr { rx_cq: Arc::clone(rx), ..EndpointAttr::new(tx) };
            let error = own.domain.open_endpoint(&attr).expect_err("a foreign queue");
            assert_kind(&error, ErrorKind::InvalidArgument, "an endpoint with a foreign queue");
        }
    }
    assert_eq!(own.domain.live().endpoints, 1, "endpoints of the initiator");
    let region = link.target.register(vec![0; 64], REMOTE);
    link.assert_works(&link.key(&region));
}

pub(super) fn wait_ends_with_a_completion_or_its_timeout(case: &Case) {
    let link = CaseLink::open(case);
    let target = link.bytes(64);
    let region = link.expose(target.range(), REMOTE);
    let (key, local) = (link.key(&region), link.local(64, LOCAL));
    let cq = &link.initiator.cq;
    let wait = |max, timeout| {
        let (before, mut done) = (Instant::now(), Vec::new());
        if timeout == Duration::MAX {
            done = wait_without_timeout(cq, max).expect("wait");
        } else {
            let count = cq.wait(&mut done, max, timeout).expect("wait");
            assert_eq!(count, done.len());
        }
        let ended = done.into_iter().map(|ended| {
            ended.result.expect("write");
            ended.context
        });
        (ended.collect::<Vec<_>>(), before.elapsed())
    };
    assert_eq!(wait(4, Duration::ZERO).0, []);
    let short = Duration::from_millis(5);
    let (none, took) = wait(4, short);
    assert!(none.is_empty() && took >= short, "{none:?} after {took:?}");
    assert_eq!(wait(0, Duration::MAX).0, [], "a wait for no completion returns at once");
    let there = [remote(&key, 0, 8)];
    let post = |context| {
        let write = Operation::Write { remote: &there };
        link.post(write, &[local.segment(0, 8)], context).expect("post a write");
    };
    link.driven(|| {
        for (context, timeout) in (5..).zip([LONG, Duration::MAX, Duration::MAX]) {
            post(context);
            assert_eq!(wait(4, timeout).0, [context], "waited for {timeout:?}");
        }
        (0..3).for_each(post);
        let mut all = Vec::new();
        while all.len() < 3 {
            let (some, _) = wait(2, Duration::MAX);
            assert!(matches!(some.len(), 1 | 2), "{some:?} of at most two");
            all.extend(some);
        }
        assert_eq!(all, [0, 1, 2]);
    });
}

/// Returns whether the channel's fd becomes readable within `timeout`.
fn readable(channel: &dyn CompletionChannel, timeout: Duration) -> bool {
    let fd = channel.fd().expect("an fd");
    let timeout = Timespec::try_from(timeout).expect("a timeout");
    let ready = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
    ready.expect("poll") == 1
}

pub(super) fn channel_is_readable_from_the_next_completion_on(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let cq = &link.initiator.cq;
    let Some(channel) = cq.channel() else { return skip(NO_CHANNEL) };
    let target = link.bytes(64);
    let region = link.expose(target.range(), REMOTE);
    let (key, local) = (link.key(&region), link.local(64, LOCAL));
    for context in 0..3 {
        assert!(channel.arm().expect("arm"), "the queue is empty");
        assert!(!readable(channel, Duration::ZERO), "readable before anything completed");
        let write = [remote(&key, 0, 8)];
        let write = Operation::Write { remote: &write };
        link.post(write, &[local.segment(0, 8)], context).expect("post a write");
        assert!(readable(channel, LONG), "not readable after a completion");
        assert!(!channel.arm().expect("arm"), "there is a completion to read");
        let mut done = Vec::new();
        assert_eq!(cq.read(&mut done, 4).expect("read"), 1);
        done.remove(0).result.expect("write");
    }
    let fd = |channel: &dyn CompletionChannel| format!("{:?}", channel.fd().expect("an fd"));
    assert_eq!(fd(channel), fd(cq.channel().expect("a channel")), "a queue has one fd");
    Ok(())
}

/// Sends messages of 8 bytes from `local`, and waits for the end of each.
fn send_messages(link: &CaseLink, local: &Local, messages: u64) {
    for context in 0..messages {
        let message = Operation::Send { tag: None, invalidate: None };
        link.post(message, &[local.segment(0, 8)], context).expect("post a message");
        let mut done = Vec::new();
        assert_eq!(link.initiator.cq.wait(&mut done, 1, LONG).expect("wait"), 1);
        done.remove(0).result.expect("send");
    }
}

pub(super) fn sleeping_thread_wakes_for_each_message(case: &Case) {
    const MESSAGES: u64 = 50;
    let link = CaseLink::open(case);
    let (memory, local) = (link.bytes(64), link.local(64, LOCAL));
    let region = link.expose(memory.range(), LOCAL);
    let into = segment(memory.part(0, 8), Some(region.desc().expect("descriptor")));
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            for context in 0..MESSAGES {
                link.target.receive(into, context).expect("post a receive");
                let mut done = Vec::new();
                let count = link.target.cq.wait(&mut done, 1, LONG).expect("wait");
                assert_eq!((count, done[0].context), (1, context));
                assert_eq!(done[0].kind, CompletionKind::Receive);
                done.remove(0).result.expect("receive");
            }
        });
        send_messages(&link, &local, MESSAGES);
        sleeper.join().expect("the sleeper");
    });
}

pub(super) fn channel_loses_no_wakeup(case: &Case) -> Outcome {
    const MESSAGES: u64 = 300;
    let link = CaseLink::open(case);
    let cq = &link.target.cq;
    let Some(channel) = cq.channel() else { return skip(NO_CHANNEL) };
    let (memory, local) = (link.bytes(64), link.local(64, LOCAL));
    let region = link.expose(memory.range(), LOCAL);
    let into = segment(memory.part(0, 8), Some(region.desc().expect("descriptor")));
    let post = || link.target.receive(into, 0).expect("post a receive");
    (0..100).for_each(|_| post());
    thread::scope(|scope| {
        let sender = scope.spawn(|| send_messages(&link, &local, MESSAGES));
        let (mut received, mut done) = (0, Vec::new());
        while received < MESSAGES {
            let count = cq.read(&mut done, 2).expect("read") as u64;
            for ended in done.drain(..) {
                ended.result.expect("receive");
                post();
            }
            received += count;
            if count == 0 && channel.arm().expect("arm") {
                assert!(readable(channel, LONG), "not woken after {received} messages");
            }
        }
        sender.join().expect("the sender");
    });
    Ok(())
}

/// Closes the endpoint and the domain of a side.
fn close(side: LinkSide) -> Arc<dyn CompletionQueue> {
    let LinkSide { endpoint, cq, domain, .. } = side;
    endpoint.close().map_err(|rejected| rejected.error).expect("close the endpoint");
    domain.close().map_err(|rejected| rejected.error).expect("close the domain");
    cq
}

pub(super) fn wait_ends_when_the_domain_closes(case: &Case) -> Outcome {
    let wait = |cq: &Arc<dyn CompletionQueue>, timeout| match timeout {
        Duration::MAX => wait_without_timeout(cq, 1).map(|done| done.len()),
        timeout => cq.wait(&mut Vec::new(), 1, timeout),
    };
    let refused = |result: Result<usize>| {
        let error = result.expect_err("the domain is closed");
        assert_kind(&error, ErrorKind::BadState, "a wait for a queue of a closed domain");
        assert!(error.remedy_text().is_some(), "{error}");
    };
    let [_initiator, target] = CaseLink::open(case).into_sides();
    let cq = close(target);
    if case.control.is_none() && wait(&cq, Duration::ZERO).is_ok() {
        return skip("the queues of this provider do not detect that their domain is closed");
    }
    for timeout in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
        refused(wait(&cq, timeout));
    }
    let [_initiator, target] = CaseLink::open(case).into_sides();
    let cq = Arc::clone(&target.cq);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| wait(&cq, LONG));
        close(target);
        refused(sleeper.join().expect("the sleeper"));
    });
    Ok(())
}

pub(super) fn channel_reports_that_its_domain_is_closed(case: &Case) -> Outcome {
    let [_initiator, target] = CaseLink::open(case).into_sides();
    let Some(channel) = target.cq.channel() else { return skip(NO_CHANNEL) };
    assert!(channel.arm().expect("arm"), "the queue is empty");
    let cq = close(target);
    let channel = cq.channel().expect("a completion channel");
    assert!(readable(channel, LONG), "a task sleeps on");
    assert_eq!(cq.read(&mut Vec::new(), 1).expect("read"), 0);
    let error = channel.arm().expect_err("the domain is closed");
    assert_kind(&error, ErrorKind::BadState, "arming a channel of a closed domain");
    Ok(())
}

/// Tests that a nearly full completion queue loses no completion. Posts until the NIC refuses with
/// `Again`, and reads only one completion after each refusal.
pub(super) fn posting_until_again_loses_no_completion(case: &Case) {
    const RECEIVES: u64 = DEPTH / 2;
    const COUNT: u64 = 4 * DEPTH;
    let link = CaseLink::open(case);
    let region = link.target.register(vec![0; 8], REMOTE);
    let source = link.initiator.register(vec![1; 8], LOCAL);
    let (key, slice) = (link.key(&region), source.slice(0, 8).expect("inside"));
    let there = [remote(&key, 0, 8)];
    let (peer, [initiator, target]) = (link.peer, link.into_sides());
    let LinkSide { endpoint, cq, domain: _domain, .. } = initiator;
    for context in 0..RECEIVES {
        endpoint.receive(&[slice], None, context).expect("post a receive");
    }
    let (mut done, mut posted) = (Vec::new(), RECEIVES);
    while posted < COUNT {
        match endpoint.write(&[slice], &there, peer, posted) {
            Ok(()) => posted += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Again, "{error}");
                eventually("the end of a write", || {
                    target.domain.progress().expect("progress");
                    cq.read(&mut done, 1).expect("read a completion") == 1
                });
            }
        }
    }
    // The close cancels the receives, and the writes that the NIC has not executed. All requests
    // have ended when it returns.
    endpoint.close().expect("close the endpoint");
    while cq.read(&mut done, DEPTH as usize).expect("read") > 0 {}
    for completion in &done {
        match &completion.result {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Canceled, "{completion:?}"),
        }
    }
    let mut contexts: Vec<_> = done.iter().map(|completion| completion.context).collect();
    contexts.sort_unstable();
    assert!(contexts.iter().copied().eq(0..COUNT), "completions of {COUNT} posts: {contexts:?}");
}

/// Returns the largest value of immediate data that the NIC carries.
fn widest(case: &Case) -> u64 {
    let bytes = case.attr.cq_data_size;
    assert!((1..=8).contains(&bytes), "{bytes} bytes of immediate data");
    u64::MAX >> (64 - 8 * bytes)
}

pub(super) fn immediate_data_is_refused_if_the_nic_carries_none(case: &Case) {
    let link = CaseLink::open(case);
    let target = link.bytes(64);
    let region = link.expose(target.range(), REMOTE);
    let (key, local) = (link.key(&region), link.local(64, LOCAL));
    let there = [remote(&key, 0, 8)];
    for operation in [
        Operation::WriteImmediate { remote: &there, data: 0 },
        Operation::SendImmediate { tag: None, data: 0 },
    ] {
        let error = link.transfer(operation, &[local.segment(0, 8)]).expect_err("no such data");
        assert_kind(&error, ErrorKind::Unsupported, "immediate data");
    }
    assert_eq!(target.all(), [0; 64]);
    link.assert_works(&key);
}

pub(super) fn write_with_immediate_data_completes_a_receive(case: &Case) {
    const LEN: u64 = 48 << 10;
    let link = CaseLink::open(case);
    let (target, inbox) = (link.bytes(LEN as usize), link.bytes(64));
    let region = link.expose(target.range(), REMOTE);
    let into = link.expose(inbox.range(), Access::RECV);
    let (key, desc) = (link.key(&region), into.desc().expect("descriptor"));
    let local = link.local(LEN as usize, LOCAL);
    let there = [remote(&key, 0, LEN)];
    for (round, data) in (0..).zip([0, 1, widest(case) / 3, widest(case)]) {
        let message = pattern(round + 3, LEN);
        inbox.put(0, &[0xEE; 64]);
        local.bytes.put(0, &message);
        link.target.receive(segment(inbox.range(), Some(desc)), 10 + round).expect("post");
        let write = Operation::WriteImmediate { remote: &there, data };
        link.post(write, &[local.segment(0, LEN)], 1).expect("post a write");
        let (ended, writes) = link.arrived();
        // Checked first, since the bytes must be there as soon as the receive has completed.
        assert_bytes(&target.all(), &message, "the region when the receive has completed");
        assert_eq!((ended.kind, ended.context), (CompletionKind::RemoteWrite, 10 + round));
        assert_eq!((ended.result.expect("written"), ended.data), (LEN, Some(data)));
        assert_eq!((ended.invalidated, ended.tag), (None, None));
        assert_bytes(&inbox.all(), &[0xEE; 64], "the buffer of the receive");
        let write = writes.into_iter().next().unwrap_or_else(|| link.completion());
        assert_eq!((write.kind, write.context, write.data), (CompletionKind::Write, 1, None));
        assert_eq!(write.result.expect("write"), LEN, "bytes written");
    }
    assert_eq!(link.target.cq.read(&mut Vec::new(), 1).expect("read"), 0, "a completion too many");
}

pub(super) fn write_with_immediate_data_waits_for_a_receive(case: &Case) {
    let link = CaseLink::open(case);
    let (target, inbox) = (link.bytes(64), link.bytes(64));
    let region = link.expose(target.range(), REMOTE);
    let into = link.expose(inbox.range(), LOCAL);
    let (key, desc) = (link.key(&region), into.desc().expect("descriptor"));
    let local = link.local(64, LOCAL);
    local.bytes.put(0, &[9; 64]);
    for data in 0..4_u64 {
        let there = [remote(&key, 8 * data, 8)];
        let write = Operation::WriteImmediate { remote: &there, data };
        link.post(write, &[local.segment(0, 8)], data).expect("post");
    }
    for context in 0..4 {
        link.target.receive(segment(inbox.range(), Some(desc)), context).expect("post");
    }
    let mut writes = Vec::new();
    for data in 0..4 {
        let (ended, more) = link.arrived();
        assert_eq!((ended.context, ended.data), (data, Some(data)), "in the order of the writes");
        ended.result.expect("written");
        writes.extend(more);
    }
    while writes.len() < 4 {
        writes.push(link.completion());
    }
    for (context, write) in (0..).zip(writes) {
        assert_eq!((write.context, write.result.expect("write")), (context, 8));
    }
    assert_eq!(target.get(0, 40), [&[9; 32][..], &[0; 8]].concat());
}

pub(super) fn messages_carry_immediate_data(case: &Case) {
    let link = CaseLink::open(case);
    let inbox = link.bytes(64);
    let into = link.expose(inbox.range(), LOCAL);
    let into = segment(inbox.range(), Some(into.desc().expect("descriptor")));
    let local = link.local(64, LOCAL);
    local.bytes.put(0, &[5; 16]);
    for data in [0, 7, widest(case)] {
        link.target.receive(into, 3).expect("post");
        let message = Operation::SendImmediate { tag: None, data };
        assert_eq!(link.transfer(message, &[local.segment(0, 16)]).expect("send"), 16);
        let ended = link.received();
        assert_eq!((ended.kind, ended.context), (CompletionKind::Receive, 3));
        assert_eq!((ended.result.expect("receive"), ended.data), (16, Some(data)));
        assert_eq!(inbox.get(0, 16), [5; 16]);
    }
    link.target.receive(into, 4).expect("post");
    let message = Operation::Send { tag: None, invalidate: None };
    link.transfer(message, &[local.segment(0, 16)]).expect("send");
    assert_eq!(link.received().data, None, "a message without immediate data");
}

pub(super) fn too_wide_immediate_data_is_refused(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    if case.attr.cq_data_size == 8 {
        return skip("the NIC carries 64 bits of immediate data");
    }
    let target = link.bytes(64);
    let region = link.expose(target.range(), REMOTE);
    let (key, local) = (link.key(&region), link.local(64, LOCAL));
    let there = [remote(&key, 0, 8)];
    let size = case.attr.cq_data_size.to_string();
    for data in [widest(case) + 1, u64::MAX] {
        let write = Operation::WriteImmediate { remote: &there, data };
        for operation in [write, Operation::SendImmediate { tag: None, data }] {
            let error = link.post(operation, &[local.segment(0, 8)], 1).expect_err("too wide");
            assert_kind(&error, ErrorKind::InvalidArgument, "too wide immediate data");
            assert_eq!(error.context_value("cq_data_size"), Some(&*size), "{error}");
        }
    }
    assert_eq!(target.all(), [0; 64]);
    link.assert_works(&key);
    assert_eq!(link.target.cq.read(&mut Vec::new(), 1).expect("read"), 0);
    Ok(())
}
