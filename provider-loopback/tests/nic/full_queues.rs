//! Tests of completion queues that are full of unread completions, on the loopback NIC.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::support::*;
use hmem_core::{
    Errno, ErrorKind, MrMode, Result,
    provider::{CompletionQueue, WindowType},
    transfer::{Completion, CompletionKind, Operation, RemoteSegment},
};
use hmem_provider_loopback::{Faults, Loopback, NicCall, Progress};

const SEND: Operation<'static> = Operation::Send { tag: None, invalidate: None };
const RECEIVE: Operation<'static> = Operation::Receive { tag: None, from: None };

/// Returns two endpoints that share one completion queue of this depth for sends and receives.
fn shared(provider: &Loopback, depth: usize) -> (End, End) {
    let domain = domain(provider, MrMode::empty());
    let cq = domain.transport().unwrap().open_cq(depth).unwrap();
    let open = || End {
        cq: Arc::clone(&cq),
        ..End::with(&domain, |attr| {
            (attr.tx_cq, attr.rx_cq) = (Arc::clone(&cq), Arc::clone(&cq));
        })
    };
    (open(), open())
}

/// Posts `operation` with an empty buffer: a send from `end` to itself, or a receive.
fn post(end: &End, operation: Operation<'_>, context: u64) -> Result<()> {
    end.post(operation, &[], end.peer(end), context)
}

fn progress(end: &End) {
    end.domain.manual_progress().unwrap().progress().unwrap();
}

/// Reads every completion. Returns the contexts of the completions, sorted.
fn contexts(cq: &dyn CompletionQueue) -> Vec<u64> {
    let mut out = Vec::new();
    while cq.read(&mut out, 10).unwrap() > 0 {}
    let mut contexts: Vec<_> =
        out.iter().map(|completion: &Completion| completion.context).collect();
    contexts.sort_unstable();
    contexts
}

#[test]
fn posts_are_refused_until_completions_are_read() {
    let (end, _) = shared(&Loopback::builder().build().unwrap(), 2);
    post(&end, SEND, 0).unwrap();
    post(&end, SEND, 1).unwrap();
    let error = post(&end, SEND, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Again, "{error}");
    let why = error.context_value("why").unwrap_or_default();
    assert!(why.contains("full of unread completions"), "{error}");
    assert!(error.remedy_text().unwrap_or_default().contains("read completions first"), "{error}");
    // A request that has ended occupies its queue entry until its completion is read.
    progress(&end);
    for refused_post in [post(&end, SEND, 2), post(&end, RECEIVE, 2)] {
        refused(refused_post, ErrorKind::Again);
    }
    assert!(end.try_next().is_some());
    post(&end, SEND, 2).unwrap();
    refused(post(&end, SEND, 3), ErrorKind::Again);
    assert_eq!(contexts(&*end.cq), [1, 2]);
}

#[test]
fn endpoints_with_one_queue_share_its_entries() {
    let (one, other) = shared(&Loopback::builder().build().unwrap(), 4);
    post(&one, RECEIVE, 0).unwrap();
    post(&other, RECEIVE, 1).unwrap();
    post(&one, SEND, 2).unwrap();
    post(&other, SEND, 3).unwrap();
    for end in [&one, &other] {
        refused(post(end, SEND, 4), ErrorKind::Again);
        refused(post(end, RECEIVE, 4), ErrorKind::Again);
    }
    assert_eq!(contexts(&*one.cq), [0, 1, 2, 3]);
}

#[test]
fn refused_posts_take_no_entry() {
    let provider = Loopback::builder().build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let cq = domain.transport().unwrap().open_cq(4).unwrap();
    let end = End::with(&domain, |attr| {
        (attr.tx_cq, attr.rx_cq) = (Arc::clone(&cq), Arc::clone(&cq));
        attr.depth = 1;
    });
    let window = domain.windows().unwrap().alloc_window(WindowType::One).unwrap();
    for _ in 0..10 {
        // Windows of type 1 are not invalidated.
        refused(post(&end, Operation::InvalidateWindow { window }, 0), ErrorKind::BadState);
    }
    post(&end, SEND, 0).unwrap();
    post(&end, RECEIVE, 1).unwrap();
    for _ in 0..10 {
        // The endpoint has depth 1, so it refuses further posts while one send and one receive are
        // in flight.
        refused(post(&end, SEND, 2), ErrorKind::Again);
        refused(post(&end, RECEIVE, 2), ErrorKind::Again);
    }
    progress(&end);
    post(&end, SEND, 2).unwrap();
    post(&end, RECEIVE, 3).unwrap();
    assert_eq!(contexts(&*cq), [0, 1, 2, 3]);
}

#[test]
fn failed_and_canceled_requests_complete_in_a_full_queue() {
    let faults = Faults::new();
    let provider = Loopback::builder().faults(&faults).build().unwrap();
    let (one, other) = shared(&provider, 4);
    faults.fail_nth(NicCall::Transfer, 1, Errno(5));
    post(&one, SEND, 0).unwrap();
    progress(&one);
    post(&one, RECEIVE, 1).unwrap();
    post(&one, SEND, 2).unwrap();
    post(&other, RECEIVE, 3).unwrap();
    refused(post(&other, SEND, 4), ErrorKind::Again);
    one.endpoint.close().unwrap();
    other.endpoint.close().unwrap();
    let mut out = Vec::new();
    assert_eq!(one.cq.read(&mut out, 10).unwrap(), 4);
    out.sort_by_key(|completion| completion.context);
    for (context, completion) in (0..).zip(out) {
        assert_eq!(completion.context, context);
        let kind = if context == 0 { ErrorKind::Driver } else { ErrorKind::Canceled };
        refused(completion.result, kind);
    }
}

#[test]
fn immediate_data_waits_for_the_entry_of_a_receive() {
    let provider = Loopback::builder().build().unwrap();
    let here = End::open(&domain(&provider, MrMode::empty()));
    let domain = domain(&provider, MrMode::empty());
    let cq = domain.transport().unwrap().open_cq(1).unwrap();
    let there = End::with(&domain, |attr| attr.rx_cq = Arc::clone(&cq));
    let (to, buffer) = (here.peer(&there), Buffer::new(8));
    let region = RegAttr::key(1).register(&*domain, &[host(buffer.range(), true)]).unwrap();
    let key = remote(region, 8);
    post(&there, RECEIVE, 0).unwrap();
    refused(post(&there, RECEIVE, 1), ErrorKind::Again);
    for data in 0..3 {
        let place = [RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
        let write = Operation::WriteImmediate { remote: &place, data };
        assert_eq!(here.run(write, &[Buffer::new(8).whole()], to).unwrap(), 8);
    }
    for number in 0..3 {
        if number > 0 {
            post(&there, RECEIVE, number).unwrap();
        }
        progress(&there);
        refused(post(&there, RECEIVE, 9), ErrorKind::Again);
        let mut out = Vec::new();
        assert_eq!(cq.read(&mut out, 10).unwrap(), 1);
        assert_eq!((out[0].kind, out[0].context), (CompletionKind::RemoteWrite, number));
        assert_eq!(out[0].data, Some(number));
    }
    domain.deregister(region).unwrap();
}

#[test]
fn threads_that_post_until_again_lose_no_completion() {
    const EACH: u64 = 1998;
    for by in [Progress::Thread, Progress::ByHand] {
        let provider = Loopback::builder().progress(by).build().unwrap();
        let (one, other) = shared(&provider, 5);
        let gone = End::with(&one.domain, |_| ());
        let closed = [&one, &other].map(|end| end.peer(&gone));
        gone.endpoint.close().unwrap();
        let mut seen = vec![0; 2 * EACH as usize];
        thread::scope(|scope| {
            for (end, first, closed) in [(&one, 0, closed[0]), (&other, EACH, closed[1])] {
                scope.spawn(move || {
                    let to = end.peer(end);
                    for context in first..first + EACH {
                        // In turn: a send that fails, a receive, and a send for that receive.
                        let peer = if context % 3 == 0 { closed } else { to };
                        let operation = || if context % 3 == 1 { RECEIVE } else { SEND };
                        while let Err(error) = end.post(operation(), &[], peer, context) {
                            assert_eq!(error.kind(), ErrorKind::Again, "{error}");
                            thread::yield_now();
                        }
                    }
                });
            }
            let (mut out, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
            let mut count = 0;
            while count < seen.len() {
                assert!(
                    Instant::now() < deadline,
                    "completions are lost: {count} of {}",
                    seen.len()
                );
                // Lets the posting threads fill the queue.
                thread::yield_now();
                count += one.cq.read(&mut out, 2).unwrap();
            }
            for completion in out {
                seen[completion.context as usize] += 1;
            }
        });
        assert!(seen.iter().all(|count| *count == 1), "{by:?}");
    }
}
