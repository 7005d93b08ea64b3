//! Waiting for completions, over a fake library that moves bytes: requests for completion events,
//! events that wake a sleeping thread, and devices without channels. The conformance suite
//! tests these over a real driver.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::looped::Looped;
use crate::wire::{Misbehaviour, misbehave};
use crate::{fake, wire};
use hmem_core::{
    Access, Domain, ErrorKind, Region,
    provider::{CompletionChannel, CompletionQueue, EndpointAttr},
    transfer::RemoteSegment,
};
use hmem_provider_verbs::{Verbs, sys::WcStatus};
use rustix::event::{PollFd, PollFlags, Timespec};

fn fine() -> Misbehaviour {
    Misbehaviour { bind: Some(WcStatus::IBV_WC_SUCCESS), ..Misbehaviour::default() }
}

/// An endpoint that is connected to itself, with one region that is source and target of writes.
struct Alone {
    region: Region<Vec<u8>>,
    endpoint: Looped,
    cq: Arc<dyn CompletionQueue>,
    domain: Domain,
}

fn open(misbehaviour: Misbehaviour) -> Domain {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    misbehave(misbehaviour);
    fake::open(&verbs)
}

fn readable_now(channel: &dyn CompletionChannel) -> bool {
    let fd = channel.fd().expect("fd");
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).expect("poll") == 1
}

impl Alone {
    fn with(misbehaviour: Misbehaviour) -> Self {
        let domain = open(misbehaviour);
        let cq = domain.open_cq(8).expect("open a queue");
        let endpoint = Looped::open(&domain, &EndpointAttr::new(&cq));
        let region = domain.register(vec![3; 64], Access::all()).expect("register");
        fake::calls();
        Self { region, endpoint, cq, domain }
    }

    fn new() -> Self {
        Self::with(fine())
    }

    fn write(&self, context: u64) {
        let key = self.region.key().expect("key");
        let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
        let from = [self.region.slice(8, 8).expect("inside")];
        self.endpoint.write(&from, &remote, self.endpoint.peer, context).expect("post");
    }

    fn channel(&self) -> &dyn CompletionChannel {
        self.cq.channel().expect("a completion channel")
    }

    fn wait(&self, timeout: Duration) -> hmem_core::Result<Vec<u64>> {
        let mut done = Vec::new();
        self.cq.wait(&mut done, 8, timeout)?;
        Ok(done.into_iter().map(|ended| ended.context).collect())
    }
}

/// Returns the number of requests for completion events since the last call of a function that
/// empties the record of calls.
fn requests() -> usize {
    fake::calls().iter().filter(|call| *call == "req_notify_cq").count()
}

/// EVT-05: the provider requests completion events from the NIC only before a thread sleeps.
#[test]
fn nic_is_armed_only_before_a_sleep() {
    let alone = Alone::new();
    alone.write(1);
    assert_eq!(alone.wait(Duration::MAX).expect("wait"), [1]);
    assert_eq!(alone.wait(Duration::ZERO).expect("wait"), []);
    alone.write(2);
    assert_eq!(alone.cq.read(&mut Vec::new(), 8).expect("read"), 1);
    assert_eq!(requests(), 0, "no thread slept");
    // Long enough that a slow machine sleeps before the deadline.
    const SLEEP: Duration = Duration::from_millis(200);
    let before = Instant::now();
    assert_eq!(alone.wait(SLEEP).expect("wait"), []);
    assert!(before.elapsed() >= SLEEP);
    assert_eq!(requests(), 1);
}

/// EVT-05: the provider finds a completion that arrived before it requested events, since it polls
/// once more.
#[test]
fn completion_before_arming_is_found_after_arming() {
    let alone = Alone::new();
    for context in 0..3 {
        // The device runs the request only when the queue is polled, after the provider has armed
        // it.
        alone.write(context);
        assert!(!alone.channel().arm().expect("arm"), "a completion can be read");
        assert_eq!(alone.wait(Duration::ZERO).expect("wait"), [context]);
        assert!(alone.channel().arm().expect("arm"), "the earlier event is gone");
        assert!(!readable_now(alone.channel()));
    }
    drop(alone);
}

/// EVT-05: requests that a closing endpoint cancels wake the threads that wait for the queue.
#[test]
fn canceled_requests_wake_sleepers() {
    let Alone { region, endpoint, cq, domain } = Alone::new();
    let slice = region.slice(0, 8).expect("inside");
    endpoint.receive(&[slice], None, 5).expect("post a receive");
    let channel = cq.channel().expect("a channel");
    assert!(channel.arm().expect("arm"));
    endpoint.close().map_err(|rejected| rejected.error).expect("close");
    assert!(readable_now(channel), "the canceled receive does not wake the sleeper");
    assert!(!channel.arm().expect("arm"));
    let mut done = Vec::new();
    assert_eq!(cq.wait(&mut done, 8, Duration::MAX).expect("wait"), 1);
    assert_eq!(done.remove(0).result.unwrap_err().kind(), ErrorKind::Canceled);
    drop((region, domain));
    assert_eq!(channel.arm().unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(cq.wait(&mut done, 8, Duration::MAX).unwrap_err().kind(), ErrorKind::BadState);
}

/// EVT-05: a wait for completions fails if the device is removed.
#[test]
fn removed_device_ends_the_wait() {
    let alone = Alone::new();
    misbehave(Misbehaviour { channels_fail: 5, ..fine() });
    for error in
        [alone.wait(Duration::MAX).expect_err("gone"), alone.channel().arm().expect_err("gone")]
    {
        assert_eq!(error.os_errno().map(|errno| errno.0), Some(5), "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
    }
    misbehave(fine());
}

/// EVT-05: a wait for completions polls if the device has no completion channels.
#[test]
fn wait_polls_without_a_channel() {
    let alone = Alone::with(Misbehaviour { has_no_channels: true, ..fine() });
    assert!(alone.cq.channel().is_none());
    assert_eq!(alone.wait(Duration::from_millis(2)).expect("wait"), []);
    alone.write(1);
    assert_eq!(alone.wait(Duration::MAX).expect("wait"), [1]);
}

/// EVT-05
#[test]
fn failed_channel_creation_leaks_nothing() {
    let domain = open(Misbehaviour { refuses_channels: 24, ..fine() });
    let error = domain.open_cq(8).expect_err("no file descriptor left");
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(24), "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("ulimit -n")), "{error}");
    misbehave(fine());
    domain.open_cq(8).expect("the next one");
}
