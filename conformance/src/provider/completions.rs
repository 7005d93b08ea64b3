//! Behaviours of completions: waiting, the file descriptor of a queue, and immediate data.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, ErrorKind,
    provider::{EndpointAttr, Provider},
    transfer::CompletionKind,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::link::{DEPTH, LOCAL, Link, LinkSide, REMOTE, contents, eventually, remote};
use crate::{
    bytes::{assert_bytes, pattern},
    trial::{Outcome, assert_kind, skip},
};

/// Timeout of a poll that must succeed.
const LONG: Duration = Duration::from_secs(60);

/// Writes 8 bytes from the initiator to the target. Waits for the completion, and asserts that the
/// completion has the context `context` and reports success.
fn write_and_wait(link: &Link, context: u64) {
    let region = link.target.register(vec![0; 8], REMOTE);
    let source = link.initiator.register(vec![1; 8], LOCAL);
    let (key, slice) = (link.key(&region), source.slice(0, 8).expect("inside"));
    let there = [remote(&key, 0, 8)];
    link.initiator.endpoint.write(&[slice], &there, link.peer, context).expect("post a write");
    // Both regions live until the write has completed.
    let mut done = Vec::new();
    let count = link.initiator.cq.wait(&mut done, 4, Duration::MAX).expect("wait");
    assert_eq!((count, done[0].context), (1, context), "{done:?}");
    done.remove(0).result.expect("write");
}

pub(super) fn queue_of_another_domain_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
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
    Ok(())
}

pub(super) fn wait_ends_with_a_completion_or_its_timeout(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let cq = &link.initiator.cq;
    let mut done = Vec::new();
    assert_eq!(cq.wait(&mut done, 4, Duration::ZERO).expect("wait"), 0, "{done:?}");
    let (short, before) = (Duration::from_millis(5), Instant::now());
    assert_eq!(cq.wait(&mut done, 4, short).expect("wait"), 0, "{done:?}");
    assert!(before.elapsed() >= short, "the wait returned early");
    assert_eq!(
        cq.wait(&mut done, 0, Duration::MAX).expect("wait"),
        0,
        "a wait for no completion returns at once"
    );
    for context in 5..8 {
        write_and_wait(&link, context);
    }
    Ok(())
}

pub(super) fn channel_is_readable_from_the_next_completion_on(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    let cq = &link.initiator.cq;
    let Some(channel) = cq.channel() else {
        return skip("the queues of this provider have no completion channel");
    };
    let readable = |timeout: Duration| {
        let fd = channel.fd().expect("an fd");
        let timeout = Timespec::try_from(timeout).expect("a timeout");
        let ready = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
        ready.expect("poll") == 1
    };
    let region = link.target.register(vec![0; 8], REMOTE);
    let source = link.initiator.register(vec![1; 8], LOCAL);
    let key = link.key(&region);
    for context in 0..3 {
        assert!(channel.arm().expect("arm"), "the queue is empty");
        assert!(!readable(Duration::ZERO), "readable before anything completed");
        let (slice, there) = (source.slice(0, 8).expect("inside"), [remote(&key, 0, 8)]);
        link.initiator.endpoint.write(&[slice], &there, link.peer, context).expect("post a write");
        assert!(readable(LONG), "not readable after a completion");
        assert!(!channel.arm().expect("arm"), "there is a completion to read");
        let mut done = Vec::new();
        assert_eq!(cq.read(&mut done, 4).expect("read"), 1);
        done.remove(0).result.expect("write");
    }
    Ok(())
}

/// Tests that a nearly full completion queue loses no completion. Posts until the NIC refuses with
/// `Again`, and reads only one completion after each refusal.
pub(super) fn posting_until_again_loses_no_completion(provider: &Arc<dyn Provider>) -> Outcome {
    const RECEIVES: u64 = DEPTH / 2;
    const COUNT: u64 = 16 * DEPTH;
    let link = Link::open(provider);
    let region = link.target.register(vec![0; 8], REMOTE);
    let source = link.initiator.register(vec![1; 8], LOCAL);
    let (key, slice) = (link.key(&region), source.slice(0, 8).expect("inside"));
    let there = [remote(&key, 0, 8)];
    let LinkSide { endpoint, cq, domain: _domain, .. } = link.initiator;
    for context in 0..RECEIVES {
        endpoint.receive(&[slice], None, context).expect("post a receive");
    }
    let (mut done, mut posted) = (Vec::new(), RECEIVES);
    while posted < COUNT {
        match endpoint.write(&[slice], &there, link.peer, posted) {
            Ok(()) => posted += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Again, "{error}");
                eventually("the end of a write", || {
                    link.target.domain.progress().expect("progress");
                    cq.read(&mut done, 1).expect("read a completion") == 1
                });
            }
        }
    }
    // The close cancels the receives, and the writes that the NIC has not executed.
    endpoint.close().expect("close the endpoint");
    while (done.len() as u64) < COUNT
        && cq.wait(&mut done, DEPTH as usize, Duration::from_secs(10)).expect("wait") > 0
    {}
    for completion in &done {
        match &completion.result {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Canceled, "{completion:?}"),
        }
    }
    let mut contexts: Vec<_> = done.iter().map(|completion| completion.context).collect();
    contexts.sort_unstable();
    assert!(contexts.iter().copied().eq(0..COUNT), "completions of {COUNT} posts: {contexts:?}");
    Ok(())
}

pub(super) fn write_with_immediate_data_completes_a_receive(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    const LEN: u64 = 20_000;
    let link = Link::open(provider);
    let bytes = link.initiator.domain.provider_attr().cq_data_size;
    assert!(bytes <= 8, "{bytes} bytes of immediate data");
    let region = link.target.register(vec![0; LEN as usize], REMOTE);
    let inbox = link.target.register(vec![0xEE; 64], Access::RECV);
    let key = link.key(&region);
    let there = [remote(&key, 0, LEN)];
    let data = if bytes == 0 { 0 } else { u64::MAX >> (64 - 8 * bytes) };
    let message = pattern(3, LEN);
    let source = link.initiator.register(message.clone(), LOCAL);
    let slice = source.slice(0, LEN).expect("inside");
    if bytes == 0 {
        let error = link.initiator.endpoint.write_immediate(&[slice], &there, 0, link.peer, 1);
        let error = error.expect_err("a NIC without immediate data accepted some");
        assert_kind(&error, ErrorKind::Unsupported, "immediate data");
        return skip("the NIC carries no immediate data");
    }
    link.target.endpoint.receive(&[inbox.slice(0, 64).expect("inside")], None, 2).expect("post");
    let posted = link.initiator.endpoint.write_immediate(&[slice], &there, data, link.peer, 1);
    posted.expect("post a write");
    let (received, ended) = link.arrived();
    assert_bytes(&contents(&region), &message, "the region when the receive has completed");
    assert_eq!((received.kind, received.context), (CompletionKind::RemoteWrite, 2));
    assert_eq!((received.result.expect("written"), received.data), (LEN, Some(data)));
    assert_bytes(&contents(&inbox), &[0xEE; 64], "the buffer of the receive");
    let write = ended.into_iter().next().unwrap_or_else(|| link.initiator.wait(&link.target));
    assert_eq!((write.context, write.result.expect("write")), (1, LEN), "bytes written");
    Ok(())
}

pub(super) fn too_wide_immediate_data_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let bytes = link.initiator.domain.provider_attr().cq_data_size;
    if !(1..8).contains(&bytes) {
        return skip("the NIC carries no immediate data, or 64 bits of it");
    }
    let source = link.initiator.register(vec![1; 8], LOCAL);
    let region = link.target.register(vec![0; 8], REMOTE);
    let (key, slice) = (link.key(&region), source.slice(0, 8).expect("inside"));
    let there = [remote(&key, 0, 8)];
    let data = 1 << (8 * bytes);
    let endpoint = &link.initiator.endpoint;
    for refused in [
        endpoint.write_immediate(&[slice], &there, data, link.peer, 1),
        endpoint.send_immediate(&[slice], None, data, link.peer, 1),
    ] {
        let error = refused.expect_err("too wide");
        assert_kind(&error, ErrorKind::InvalidArgument, "too wide immediate data");
    }
    assert_bytes(&contents(&region), &[0; 8], "the target");
    Ok(())
}
