//! Tests of sends and receives on the loopback NIC: matching, order, bounds, cancellation, queues
//! and counters.

use std::sync::Arc;

use crate::copied_device::{CopiedDevice, Copies};
use crate::support::*;
use hmem_core::{
    Address, AddressRange, ErrorKind, Iface, MrMode, Result,
    counter::Counter,
    provider::{Backing, Piece, ProviderEndpoint},
    transfer::{Completion, CompletionKind, LocalSegment, Operation, PeerId},
};
use hmem_provider_loopback::{Faults, Loopback, NicCall, Progress};

fn pair() -> Pair {
    Pair::new(Loopback::builder().build().unwrap(), MrMode::empty())
}

const fn send(tag: Option<u64>) -> Operation<'static> {
    Operation::Send { tag, invalidate: None }
}

fn receive(
    end: &End,
    tag: Option<(u64, u64)>,
    from: Option<PeerId>,
    buffer: LocalSegment,
    context: u64,
) -> Result<()> {
    end.post(Operation::Receive { tag, from }, &[buffer], PeerId(0), context)
}

/// Returns the context, length and tag of a successful receive.
fn received(completion: Completion) -> (u64, u64, Option<u64>) {
    assert_eq!(completion.kind, CompletionKind::Receive);
    (completion.context, completion.result.unwrap(), completion.tag)
}

#[test]
fn message_arrives_before_or_after_its_receive_is_posted() {
    let pair = pair();
    let (source, sink) = (Buffer::counting(100), Buffer::new(200));
    receive(&pair.there, None, None, sink.segment(0, 100, None), 1).unwrap();
    pair.here
        .run(send(None), &[source.segment(0, 40, None), source.segment(40, 60, None)], pair.to)
        .unwrap();
    assert_eq!(received(pair.there.next()), (1, 100, None));
    pair.here.run(send(None), &[source.segment(0, 50, None)], pair.to).unwrap();
    assert!(pair.there.try_next().is_none());
    receive(&pair.there, None, None, sink.segment(100, 100, None), 2).unwrap();
    assert_eq!(received(pair.there.next()), (2, 50, None));
    assert_eq!(sink.bytes()[..100], source.bytes());
    assert_eq!(sink.bytes()[100..150], source.bytes()[..50]);
}

#[test]
fn tags_match_under_the_ignore_mask_and_in_order() {
    let pair = pair();
    let sink = Buffer::new(64);
    let byte = |n| Buffer::filled(1, n);
    for (n, tag) in [(1, 0x10), (2, 0x11), (3, 0x20), (4, 0x12)] {
        pair.here.run(send(Some(tag)), &[byte(n).whole()], pair.to).unwrap();
    }
    receive(&pair.there, Some((0x20, 0)), None, sink.segment(0, 1, None), 1).unwrap();
    receive(&pair.there, Some((0x1f, 0x0f)), None, sink.segment(1, 1, None), 2).unwrap();
    receive(&pair.there, Some((0x1f, 0x0f)), None, sink.segment(2, 1, None), 3).unwrap();
    receive(&pair.there, None, None, sink.segment(3, 1, None), 4).unwrap();
    assert_eq!(received(pair.there.next()), (1, 1, Some(0x20)));
    assert_eq!(received(pair.there.next()), (2, 1, Some(0x10)));
    assert_eq!(received(pair.there.next()), (3, 1, Some(0x11)));
    // An untagged receive does not match a tagged message.
    assert!(pair.there.try_next().is_none());
    pair.here.run(send(None), &[byte(9).whole()], pair.to).unwrap();
    assert_eq!(received(pair.there.next()), (4, 1, None));
    assert_eq!(sink.bytes()[..4], [3, 1, 2, 9]);
}

#[test]
fn receive_can_accept_messages_of_one_peer_only() {
    let pair = pair();
    let other = End::open(&pair.here.domain);
    let (sink, source) = (Buffer::new(2), Buffer::filled(1, 1));
    let from = pair.there.peer(&other);
    receive(&pair.there, None, Some(from), sink.segment(0, 1, None), 1).unwrap();
    pair.here.run(send(None), &[source.whole()], pair.to).unwrap();
    assert!(pair.there.try_next().is_none());
    let to = other.peer(&pair.there);
    other.run(send(None), &[Buffer::filled(1, 7).whole()], to).unwrap();
    assert_eq!(received(pair.there.next()), (1, 1, None));
    assert_eq!(sink.get(0), 7);
}

#[test]
fn message_too_long_for_its_receive_is_truncated() {
    let pair = pair();
    let sink = Buffer::new(8);
    receive(&pair.there, None, None, sink.whole(), 1).unwrap();
    pair.here.run(send(None), &[Buffer::filled(9, 1).whole()], pair.to).unwrap();
    refused(pair.there.next().result, ErrorKind::Truncated);
    assert_eq!(sink.bytes(), [0; 8]);
}

/// Staged memory that contains bytes of value 9.
#[derive(Debug)]
struct Nines;

impl Copies for Nines {
    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<()> {
        into.fill(9);
        Ok(())
    }

    fn write(&self, _offset: u64, _from: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// REL-01
///
/// The memory of the message is unregistered, owned by its region, or staged.
#[test]
fn absent_page_of_a_receive_buffer_fails_only_the_receive() {
    let pair = pair();
    let source = Buffer::filled(64, 1);
    let owned =
        RegAttr::key(1).register(&*pair.here.domain, &[host(source.range(), true)]).unwrap();
    let range = AddressRange::new(Address(4096), 64).unwrap();
    let device: Arc<dyn Iface> = Arc::new(CopiedDevice { range, copies: Nines });
    let piece = Piece { range, backing: Backing::Staged { iface: &device } };
    let staged = RegAttr::key(2).register(&*pair.here.domain, &[piece]).unwrap();
    let nothing = LocalSegment { address: Address(0x1000), len: 64, desc: None };
    for message in [
        source.whole(),
        source.segment(0, 64, Some(owned.local)),
        LocalSegment { address: range.start(), len: 64, desc: Some(staged.local) },
    ] {
        receive(&pair.there, None, None, nothing, 1).unwrap();
        assert_eq!(pair.here.run(send(None), &[message], pair.to).unwrap(), 64, "{message:?}");
        refused(pair.there.next().result, ErrorKind::BadAddress);
    }
}

#[test]
fn messages_wait_in_order_for_room_at_the_receiver() {
    let provider = Loopback::builder().unexpected_bytes(10).build().unwrap();
    let pair = Pair::new(provider, MrMode::empty());
    let target = Buffer::new(8);
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 8);
    let messages = [Buffer::filled(8, 1), Buffer::filled(8, 2)];
    for (n, message) in messages.iter().enumerate() {
        pair.here.post(send(None), &[message.whole()], pair.to, n as u64).unwrap();
    }
    let write =
        [hmem_core::transfer::RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    pair.here
        .post(Operation::Write { remote: &write }, &[messages[0].whole()], pair.to, 2)
        .unwrap();
    assert_eq!(pair.here.next().context, 0);
    assert!(pair.here.try_next().is_none());
    assert_eq!(target.bytes(), [0; 8], "a request overtook a waiting message");
    let sink = Buffer::new(16);
    receive(&pair.there, None, None, sink.segment(0, 8, None), 5).unwrap();
    assert_eq!(received(pair.there.next()), (5, 8, None));
    assert_eq!(pair.here.next().context, 1);
    assert_eq!(pair.here.next().context, 2);
    receive(&pair.there, None, None, sink.segment(8, 8, None), 6).unwrap();
    assert_eq!(received(pair.there.next()), (6, 8, None));
    assert_eq!(sink.bytes(), [[1; 8], [2; 8]].concat());
}

#[test]
fn failed_send_leaves_the_receive_posted() {
    let faults = Faults::new();
    let pair = Pair::new(Loopback::builder().faults(&faults).build().unwrap(), MrMode::empty());
    let sink = Buffer::new(8);
    receive(&pair.there, None, None, sink.whole(), 1).unwrap();
    faults.fail_nth(NicCall::Transfer, 1, hmem_core::Errno(5));
    refused(pair.here.run(send(None), &[Buffer::filled(8, 1).whole()], pair.to), ErrorKind::Driver);
    pair.here.run(send(None), &[Buffer::filled(8, 2).whole()], pair.to).unwrap();
    assert_eq!(received(pair.there.next()), (1, 8, None));
    assert_eq!(sink.bytes(), [2; 8]);
}

#[test]
fn failed_send_keeps_the_order_of_receives() {
    let faults = Faults::new();
    let pair = Pair::new(Loopback::builder().faults(&faults).build().unwrap(), MrMode::empty());
    let sink = Buffer::new(2);
    receive(&pair.there, Some((1, 0)), None, sink.segment(0, 1, None), 1).unwrap();
    // This receive matches every tag, even the tag that the first receive waits for.
    receive(&pair.there, Some((0, u64::MAX)), None, sink.segment(1, 1, None), 2).unwrap();
    faults.fail_nth(NicCall::Transfer, 1, hmem_core::Errno(5));
    refused(
        pair.here.run(send(Some(2)), &[Buffer::filled(1, 1).whole()], pair.to),
        ErrorKind::Driver,
    );
    pair.here.run(send(Some(1)), &[Buffer::filled(1, 2).whole()], pair.to).unwrap();
    assert_eq!(received(pair.there.next()), (1, 1, Some(1)));
    pair.here.run(send(Some(1)), &[Buffer::filled(1, 3).whole()], pair.to).unwrap();
    assert_eq!(received(pair.there.next()), (2, 1, Some(1)));
    assert_eq!(sink.bytes(), [2, 3]);
}

/// Staged memory. Each read of it closes `endpoint`.
#[derive(Debug)]
struct Closing {
    endpoint: Arc<dyn ProviderEndpoint>,
    fails: bool,
}

impl Copies for Closing {
    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<()> {
        self.endpoint.close()?;
        into.fill(9);
        if self.fails { Err(hmem_core::Error::new(ErrorKind::Driver, "staged")) } else { Ok(()) }
    }

    fn write(&self, _offset: u64, _from: &[u8]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn closing_an_endpoint_during_a_message_cancels_its_receive() {
    for fails in [true, false] {
        let pair = pair();
        let sink = Buffer::new(8);
        for context in 0..2 {
            receive(&pair.there, None, None, sink.whole(), context).unwrap();
        }
        let range = AddressRange::new(Address(4096), 8).unwrap();
        let copies = Closing { endpoint: Arc::clone(&pair.there.endpoint), fails };
        let device: Arc<dyn Iface> = Arc::new(CopiedDevice { range, copies });
        let piece = Piece { range, backing: Backing::Staged { iface: &device } };
        let region = RegAttr::key(1).register(&*pair.here.domain, &[piece]).unwrap();
        let message = LocalSegment { address: range.start(), len: 8, desc: Some(region.local) };
        let expected = if fails { ErrorKind::Driver } else { ErrorKind::Unreachable };
        refused(pair.here.run(send(None), &[message], pair.to), expected);
        let mut ended = [pair.there.next(), pair.there.next()];
        ended.sort_by_key(|completion| completion.context);
        for (completion, context) in ended.into_iter().zip(0..) {
            assert_eq!(completion.context, context);
            refused(completion.result, ErrorKind::Canceled);
        }
        assert!(pair.there.try_next().is_none());
        assert_eq!(sink.bytes(), [0; 8]);
    }
}

#[test]
fn closing_an_endpoint_cancels_its_pending_requests() {
    let pair = pair();
    let buffer = Buffer::new(8);
    receive(&pair.there, None, None, buffer.whole(), 1).unwrap();
    receive(&pair.there, Some((1, 0)), None, buffer.whole(), 2).unwrap();
    let back = pair.there.peer(&pair.here);
    pair.there.post(send(None), &[buffer.whole()], back, 3).unwrap();
    pair.there.endpoint.close().unwrap();
    pair.there.endpoint.close().unwrap();
    let mut ended: Vec<_> = (0..3).map(|_| pair.there.next()).collect();
    ended.sort_by_key(|completion| completion.context);
    for (completion, context) in ended.into_iter().zip(1..) {
        assert_eq!(completion.context, context);
        refused(completion.result, ErrorKind::Canceled);
    }
    refused(receive(&pair.there, None, None, buffer.whole(), 4), ErrorKind::BadState);
    refused(pair.here.run(send(None), &[buffer.whole()], pair.to), ErrorKind::Unreachable);
    refused(pair.here.endpoint.resolve(&pair.there.endpoint.name()), ErrorKind::Unreachable);
    assert_eq!(pair.there.domain.live().endpoints, 0);
}

#[test]
fn altered_endpoint_name_is_refused() {
    let pair = pair();
    let name = pair.there.endpoint.name();
    for at in 0..5 {
        let mut altered = name.clone();
        altered.0[at] ^= 1;
        refused(pair.here.endpoint.resolve(&altered), ErrorKind::Malformed);
    }
    for len in 0..name.0.len() {
        let cut = hmem_core::transfer::EndpointName(name.0[..len].to_vec());
        refused(pair.here.endpoint.resolve(&cut), ErrorKind::Malformed);
    }
    let elsewhere = self::pair();
    refused(pair.here.endpoint.resolve(&elsewhere.here.endpoint.name()), ErrorKind::Unreachable);
    assert_eq!(pair.here.peer(&pair.there), pair.to, "resolving a peer again changed its number");
}

#[test]
fn counters_count_successes_and_errors() {
    let provider = Loopback::builder().build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let (tx, rx) = (Arc::new(Counter::new()), Arc::new(Counter::new()));
    let end = End::with(&domain, |attr| {
        attr.tx_counter = Some(Arc::clone(&tx));
        attr.rx_counter = Some(Arc::clone(&rx));
    });
    let to = end.peer(&end);
    let sink = Buffer::new(1);
    receive(&end, None, None, sink.whole(), 1).unwrap();
    receive(&end, None, None, sink.whole(), 2).unwrap();
    end.post(send(None), &[Buffer::new(1).whole()], to, 3).unwrap();
    let big = Buffer::new(2);
    end.post(send(None), &[big.whole()], to, 4).unwrap();
    let gone = End::with(&domain, |_| ());
    let closed = end.peer(&gone);
    gone.endpoint.close().unwrap();
    end.post(send(None), &[big.whole()], closed, 5).unwrap();
    assert_eq!(domain.manual_progress().unwrap().progress().unwrap(), 3);
    assert_eq!((tx.value(), tx.errors(), rx.value(), rx.errors()), (2, 1, 1, 1));
}

#[test]
fn progress_thread_delivers_messages() {
    let provider =
        Loopback::builder().progress(Progress::Thread).unexpected_bytes(16).build().unwrap();
    let pair = Pair::new(provider, MrMode::empty());
    let rounds = 500u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..rounds {
                let message = Buffer::filled(8, n as u8);
                pair.here.run(send(Some(n)), &[message.whole()], pair.to).unwrap();
            }
        });
        for n in 0..rounds {
            let sink = Buffer::new(8);
            receive(&pair.there, Some((n, 0)), None, sink.whole(), n).unwrap();
            assert_eq!(received(pair.there.next()), (n, 8, Some(n)));
            assert_eq!(sink.bytes(), [n as u8; 8]);
        }
    });
    assert!(pair.here.domain.manual_progress().is_none(), "the progress thread makes all progress");
}

/// EVT-04
#[test]
fn immediate_data_arrives_with_tagged_and_early_messages() {
    let pair = pair();
    let (source, sink) = (Buffer::filled(8, 3), Buffer::new(8));
    let message = |tag, data| Operation::SendImmediate { tag, data };
    pair.here.run(message(Some(0x21), u64::MAX), &[source.whole()], pair.to).unwrap();
    pair.here.run(message(None, 5), &[source.whole()], pair.to).unwrap();
    receive(&pair.there, None, None, sink.whole(), 1).unwrap();
    receive(&pair.there, Some((0x20, 0x0f)), None, sink.whole(), 2).unwrap();
    let facts = |ended: Completion| (ended.context, ended.tag, ended.data, ended.result.unwrap());
    assert_eq!(facts(pair.there.next()), (1, None, Some(5), 8));
    assert_eq!(facts(pair.there.next()), (2, Some(0x21), Some(u64::MAX), 8));
}

/// EVT-04
#[test]
fn refused_write_with_immediate_data_keeps_the_receive() {
    let pair = pair();
    let (source, target, sink) = (Buffer::filled(8, 3), Buffer::new(8), Buffer::new(8));
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 8);
    for context in [1, 2] {
        receive(&pair.there, None, None, sink.whole(), context).unwrap();
    }
    let write = |at, data| {
        let there = [hmem_core::transfer::RemoteSegment {
            address: hmem_core::Iova(at),
            len: 8,
            key: &key,
        }];
        let write = Operation::WriteImmediate { remote: &there, data };
        pair.here.run(write, &[source.whole()], pair.to)
    };
    refused(write(1, 10), ErrorKind::OutOfBounds);
    assert!(pair.there.try_next().is_none(), "a refused write completed a receive");
    assert_eq!(target.bytes(), [0; 8]);
    assert_eq!(write(0, 11).unwrap(), 8);
    let ended = pair.there.next();
    assert_eq!((ended.kind, ended.context), (CompletionKind::RemoteWrite, 1));
    assert_eq!((ended.data, ended.result.unwrap()), (Some(11), 8));
    pair.here.run(send(None), &[source.whole()], pair.to).unwrap();
    assert_eq!(received(pair.there.next()), (2, 8, None));
}

/// EVT-04
#[test]
fn write_with_immediate_data_needs_a_matching_receive() {
    let pair = pair();
    let other = End::open(&pair.here.domain);
    let (source, target, sink) = (Buffer::filled(8, 3), Buffer::new(8), Buffer::new(8));
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 8);
    receive(&pair.there, Some((1, 0)), None, sink.whole(), 1).unwrap();
    receive(&pair.there, None, Some(pair.there.peer(&other)), sink.whole(), 2).unwrap();
    let there =
        [hmem_core::transfer::RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    let write = Operation::WriteImmediate { remote: &there, data: 6 };
    pair.here.run(write, &[source.whole()], pair.to).unwrap();
    assert!(pair.there.try_next().is_none());
    receive(&pair.there, None, None, sink.whole(), 3).unwrap();
    let ended = pair.there.next();
    assert_eq!((ended.kind, ended.context, ended.data), (CompletionKind::RemoteWrite, 3, Some(6)));
}

/// EVT-04
#[test]
fn write_with_immediate_data_waits_for_room_and_executes_once() {
    const DEPTH: u64 = 64;
    let counter = Arc::new(Counter::new());
    let pair = pair();
    let there = End::with(&pair.there.domain, |attr| attr.rma_event = true);
    let to = pair.here.peer(&there);
    let (source, target, sink) = (Buffer::filled(8, 3), Buffer::new(8), Buffer::new(8));
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    let counters = pair.there.domain.region_counters().unwrap();
    counters.bind_counter(region, &counter).unwrap();
    let key = remote(region, 8);
    let place =
        [hmem_core::transfer::RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    for data in 0..DEPTH {
        let write = Operation::WriteImmediate { remote: &place, data };
        pair.here.run(write, &[source.whole()], to).unwrap();
    }
    let last = Operation::WriteImmediate { remote: &place, data: DEPTH };
    pair.here.post(last, &[source.whole()], to, 1).unwrap();
    for _ in 0..3 {
        assert!(pair.here.try_next().is_none(), "the receiver has no room for the data");
    }
    for context in 0..DEPTH {
        receive(&there, None, None, sink.whole(), context).unwrap();
        assert_eq!(there.next().data, Some(context));
    }
    pair.here.next().result.unwrap();
    receive(&there, None, None, sink.whole(), 9).unwrap();
    assert_eq!(there.next().data, Some(DEPTH));
    assert_eq!((counter.value(), counter.errors()), (DEPTH + 1, 0), "the write executed twice");
}
