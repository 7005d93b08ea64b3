//! Behaviours of counters and refreshes.

use std::sync::Arc;

use hmem_core::{
    BindFlags, ErrorKind, MrFlags, MrMode, fabric,
    transfer::{AtomicOp, AtomicType, Operation, RemoteSegment},
};

use super::{case::Case, link::CaseLink};
use crate::{
    bytes::assert_bytes,
    link::{LOCAL, REMOTE, mr_attr, remote},
};

pub(super) fn counter_counts_each_remote_write_and_atomic_once(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(4096);
    let (region, counter) = link.counted(memory.part(0, 2048), REMOTE);
    let other = link.expose(memory.range(), REMOTE);
    let (key, uncounted) = (link.key(&region), link.key(&other));
    for count in 1..=10 {
        link.push(&key, 0, &[1; 700]).expect("write");
        assert_eq!((counter.value(), counter.errors()), (count, 0), "writes counted");
    }
    let mut expected = 10;
    if !case.staged() && link.fetch_add(&key, 8, 1).is_ok() {
        expected += 1;
    }
    link.pull(&key, 0, 100).expect("reads are not counted");
    if case.control.is_some() {
        let local = link.local(64, LOCAL);
        let write = |list: &[RemoteSegment<'_>], len| {
            let write = Operation::Write { remote: list };
            link.transfer(write, &[local.segment(0, len)]).expect("write");
        };
        write(&[remote(&key, 0, 32), remote(&key, 64, 32)], 64);
        expected += 1;
        assert_eq!(counter.value(), expected, "a write of two segments counts once");
        link.transfer(Operation::Write { remote: &[remote(&key, 0, 0)] }, &[]).expect("no bytes");
        write(&[remote(&key, 0, 0), remote(&uncounted, 8, 8)], 8);
        if !case.staged() {
            let operation = Operation::Atomic {
                op: AtomicOp::AtomicRead,
                datatype: AtomicType::U64,
                remote: remote(&key, 8, 8),
                result: Some(local.segment(0, 8)),
                compare: None,
            };
            link.transfer(operation, &[]).expect("an atomic read is not counted");
        }
    }
    link.push(&uncounted, 0, &[1]).expect("another region over the same bytes is not counted");
    link.push(&key, 2048, &[1]).expect_err("outside");
    assert_eq!((counter.value(), counter.errors()), (expected, 0));
    let error = other.bind_counter(&counter, BindFlags::empty()).expect_err("no flag");
    assert_eq!(error.kind(), ErrorKind::BadFlags);
    counter.close();
    link.push(&key, 0, &[1]).expect("write");
    assert_eq!(counter.value(), expected, "a closed counter counted");
}

pub(super) fn every_counter_of_a_region_counts_each_write_and_atomic_once(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(4096);
    let counters = [(); 3].map(|()| Arc::default());
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(link.fresh_key());
    let region = fabric::regattr(&link.target.domain, &attr, MrFlags::RMA_EVENT).expect("register");
    let bind = |counter| region.bind_counter(counter, BindFlags::REMOTE_WRITE);
    for counter in &counters {
        bind(counter).expect("bind another counter");
        let twice = bind(counter).expect_err("a counter that is bound already");
        assert_eq!(twice.kind(), ErrorKind::BadState);
    }
    link.target.make_usable(&region);
    if link.has(MrMode::RMA_EVENT) || link.has(MrMode::ENDPOINT) {
        let late = bind(&Arc::default()).expect_err("bound after enable");
        assert_eq!(late.kind(), ErrorKind::BadState);
    }
    let key = link.key(&region);
    let mut expected = 0;
    for _ in 0..5 {
        link.push(&key, 0, &[1; 700]).expect("write");
        expected += 1;
        if !case.staged() && link.fetch_add(&key, 8, 1).is_ok() {
            expected += 1;
        }
        assert_eq!(counters.each_ref().map(|counter| counter.value()), [expected; 3]);
    }
    link.pull(&key, 0, 100).expect("reads are not counted");
    counters[1].close();
    link.push(&key, 0, &[1]).expect("write");
    let values = counters.each_ref().map(|counter| counter.value());
    assert_eq!(values, [expected + 1, expected, expected + 1], "a closed counter counts no more");
}

pub(super) fn endpoint_without_rma_event_is_refused(case: &Case) {
    let link = CaseLink::without_rma_event(case);
    let memory = link.filled(&[3; 64]);
    let (region, counter) = link.counted(memory.range(), REMOTE);
    link.assert_needs_rma_event(&link.key(&region), &memory, &counter);
    let plain = link.expose(memory.range(), REMOTE);
    link.assert_works(&link.key(&plain));
}

pub(super) fn refreshed_region_still_works(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(8192);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    for part in [&[][..], &[memory.part(0, 4096)]] {
        // A test cannot replace the pages of device memory.
        if case.is_host() {
            memory.pages().replace_pages();
            memory.put(0, &[0; 8192]);
        }
        region.refresh(part).expect("refresh");
        link.assert_works(&key);
        let what = format!("the first page after a refresh of {part:?}");
        assert_bytes(&memory.get(0, 19), &link.pull(&key, 0, 19).expect("read"), &what);
    }
}
