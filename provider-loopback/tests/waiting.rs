//! Tests of waiting for completions of the loopback NIC, with several threads and with the event
//! fd.

mod support;

use std::{
    collections::BTreeSet,
    fs, thread,
    time::{Duration, Instant},
};

use hmem_core::{
    ErrorKind, MrMode,
    transfer::{Operation, PeerId, WorkRequest},
};
use hmem_provider_loopback::{Loopback, Progress};
// ThreadSanitizer sees the locks of this mutex, and not those inside the standard library.
use parking_lot::Mutex;
use support::*;

const SEND: Operation<'static> = Operation::Send { tag: None, invalidate: None };
const RECEIVE: Operation<'static> = Operation::Receive { tag: None, from: None };

fn pair(progress: Progress) -> Pair {
    Pair::new(Loopback::builder().progress(progress).build().unwrap(), MrMode::empty())
}

/// EVT-05
#[test]
fn waiting_threads_share_completions_until_the_domain_closes() {
    const MESSAGES: u64 = 300;
    for progress in [Progress::Thread, Progress::ByHand] {
        let Pair { here, there, to, .. } = pair(progress);
        let (sink, source) = (Buffer::new(8), Buffer::filled(8, 1));
        let End { domain, cq, endpoint } = there;
        let seen = Mutex::new(BTreeSet::new());
        thread::scope(|scope| {
            let wait = || {
                let mut done = Vec::new();
                loop {
                    match cq.wait(&mut done, 3, Duration::MAX) {
                        Ok(count) => assert!((1..=3).contains(&count)),
                        Err(error) => return error.kind(),
                    }
                    for ended in done.drain(..) {
                        assert!(seen.lock().insert(ended.context), "completed twice");
                    }
                }
            };
            let waiting: Vec<_> = (0..4).map(|_| scope.spawn(wait)).collect();
            let deadline = Instant::now() + Duration::from_secs(60);
            let wait_for = |count: u64| {
                while (seen.lock().len() as u64) < count {
                    assert!(Instant::now() < deadline, "no thread woke for a completion");
                    thread::yield_now();
                }
            };
            for context in 0..MESSAGES {
                // Keeps fewer requests in flight than the queue has entries.
                wait_for(context.saturating_sub(100));
                let (local, peer) = ([sink.whole()], PeerId(0));
                let request = WorkRequest { operation: RECEIVE, local: &local, peer, context };
                // SAFETY: the buffer outlives the transfer.
                unsafe { endpoint.post(&request) }.unwrap();
                here.run(SEND, &[source.whole()], to).unwrap();
            }
            wait_for(MESSAGES);
            drop((endpoint, domain));
            for thread in waiting {
                assert_eq!(thread.join().unwrap(), ErrorKind::BadState);
            }
        });
    }
}

fn event_fds() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = links.filter_map(|link| fs::read_link(link.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("eventfd")).count()
}

/// EVT-05
#[test]
fn event_fd_is_created_at_first_use_and_closed_with_its_queue() {
    let before = event_fds();
    let pair = pair(Progress::Thread);
    let source = Buffer::filled(8, 1);
    pair.here.run(SEND, &[source.whole()], pair.to).unwrap();
    assert_eq!(pair.here.cq.wait(&mut Vec::new(), 1, Duration::ZERO).unwrap(), 0);
    assert_eq!(event_fds(), before, "an fd exists before its first use");
    let channel = pair.here.cq.channel().unwrap();
    assert!(channel.arm().unwrap() && channel.fd().is_ok());
    assert_eq!(event_fds(), before + 1);
    drop(pair);
    assert_eq!(event_fds(), before, "an fd was leaked");
}

/// EVT-05
#[test]
fn wait_makes_progress_by_hand_without_a_channel() {
    let pair = pair(Progress::ByHand);
    assert!(pair.here.cq.channel().is_none());
    let source = Buffer::filled(8, 1);
    pair.here.post(SEND, &[source.whole()], pair.to, 3).unwrap();
    let mut done = Vec::new();
    assert_eq!(pair.here.cq.wait(&mut done, 1, Duration::MAX).unwrap(), 1);
    assert_eq!(done[0].context, 3);
}
