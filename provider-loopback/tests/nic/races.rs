//! Tests of races between transfers and registrations, deregistrations, binds and closes on the
//! loopback NIC.
//!
//! Gates hold calls in flight, so that the tests need no delays.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::support::*;
use hmem_core::{
    Access, Addressing, ErrorKind, Iova, MrMode, RemoteKey,
    provider::{DomainRequest, Provider, WindowBind, WindowState, WindowType},
    transfer::{Operation, PeerId},
};
use hmem_provider_loopback::{Faults, Loopback, NicCall, Progress};

#[test]
fn closing_an_endpoint_waits_for_its_executing_request() {
    for message in [false, true] {
        let faults = Faults::new();
        let provider = Loopback::builder().faults(&faults).build().unwrap();
        let pair = Pair::new(provider, MrMode::empty());
        let (target, source) = (Buffer::new(64), Buffer::filled(64, 1));
        let region =
            RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
        let key = remote(region, 64);
        // The test closes the endpoint that is busy: the initiator's endpoint during a write, and
        // the receiver's endpoint during a message.
        let closed = if message { &pair.there } else { &pair.here };
        let receive = Operation::Receive { tag: None, from: None };
        if message {
            pair.there.post(receive, &[target.whole()], PeerId(0), 1).unwrap();
        }
        std::thread::scope(|scope| {
            let gate = faults.hold(NicCall::Transfer);
            let moving = scope.spawn(|| {
                if message {
                    let send = Operation::Send { tag: None, invalidate: None };
                    pair.here.run(send, &[source.whole()], pair.to)
                } else {
                    pair.here.write(pair.to, &[source.whole()], &key, 0)
                }
            });
            gate.wait_held();
            let closing = scope.spawn(|| {
                closed.endpoint.close().unwrap();
                target.bytes()
            });
            while closed.domain.live().endpoints > 0 {
                std::thread::yield_now();
            }
            // A close that does not wait would return during this loop.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            assert!(!closing.is_finished(), "closed in the middle of a transfer");
            assert_eq!(target.bytes(), [0; 64]);
            gate.release();
            let (moved, at_close) = (moving.join().unwrap(), closing.join().unwrap());
            assert_eq!(target.bytes(), at_close, "memory was touched after close returned");
            if message {
                // The receiver was closed before a byte of the message had moved.
                refused(moved, ErrorKind::Unreachable);
                refused(pair.there.next().result, ErrorKind::Canceled);
                assert_eq!(at_close, [0; 64]);
            } else {
                assert_eq!((moved.unwrap(), at_close), (64, vec![1; 64]));
            }
        });
    }
}

/// A request that is posted while its endpoint closes is refused or canceled. The post finds the
/// endpoint open, waits at a gate, and continues after the close.
#[test]
fn request_posted_while_its_endpoint_closes_is_refused_or_canceled() {
    let receive = Operation::Receive { tag: None, from: None };
    let send = Operation::Send { tag: None, invalidate: None };
    for (operation, ends_as_canceled) in [(receive, true), (send, false)] {
        let faults = Faults::new();
        let provider = Loopback::builder().faults(&faults).build().unwrap();
        let end = End::open(&domain(&provider, MrMode::empty()));
        let to = end.peer(&end);
        let buffer = Buffer::new(8);
        let posted = std::thread::scope(|scope| {
            let gate = faults.hold(NicCall::Post);
            let posting = scope.spawn(|| end.post(operation, &[buffer.whole()], to, 5));
            gate.wait_held();
            end.endpoint.close().unwrap();
            gate.release();
            posting.join().unwrap()
        });
        if ends_as_canceled {
            posted.unwrap();
            let ended = end.try_next().expect("the receive did not complete");
            assert_eq!(ended.context, 5);
            refused(ended.result, ErrorKind::Canceled);
        } else {
            refused(posted, ErrorKind::BadState);
        }
        assert!(end.try_next().is_none());
    }
}

/// MW-03
///
/// A window is not bound after its endpoint has closed during the bind. The bind finds the endpoint
/// open, and then waits for a refresh of the region.
#[test]
fn window_bound_while_its_endpoint_closes_is_free_afterwards() {
    let faults = Faults::new();
    let domain = domain(&Loopback::builder().faults(&faults).build().unwrap(), MrMode::empty());
    let target = Buffer::new(64);
    let attr = RegAttr::key(1).access(Access::RECV | Access::MW_BIND);
    let region = attr.register(&*domain, &[host(target.range(), false)]).unwrap();
    let windows = domain.windows().unwrap();
    let window = windows.alloc_window(WindowType::TwoB).unwrap();
    let end = End::open(&domain);
    let (access, addressing) = (Access::REMOTE_WRITE, Addressing::ZeroBased);
    let bind = WindowBind { region, offset: 0, len: 64, access, addressing };
    let bound = std::thread::scope(|scope| {
        let gate = faults.hold(NicCall::Refresh);
        let refreshing =
            scope.spawn(|| domain.refresh().unwrap().refresh_pages(region, &[target.range()]));
        gate.wait_held();
        let binding = scope.spawn(|| {
            let windows = domain.windows().unwrap();
            windows.bind_window_now(&*end.endpoint, window, &bind, 1)
        });
        faults.wait_for_calls(NicCall::BindWindow, 1);
        // The bind reaches the lock of the region during this loop.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        end.endpoint.close().unwrap();
        gate.release();
        refreshing.join().unwrap().unwrap();
        binding.join().unwrap()
    });
    assert_eq!(windows.window_status(window).unwrap().state, WindowState::Free);
    refused(bound, ErrorKind::BadState);
    domain.deregister(region).expect("no window is bound");
}

/// MR-11: a region closes right after the endpoint of its window, although a transfer through the
/// window is in flight. The deregistration waits for that transfer.
#[test]
fn region_closes_after_the_endpoint_of_its_window_during_a_transfer() {
    for close_twice in [false, true] {
        let faults = Faults::new();
        let provider = Loopback::builder().faults(&faults).build().unwrap();
        let pair = Pair::new(provider, MrMode::empty());
        let domain = &pair.there.domain;
        let (target, source) = (Buffer::new(64), Buffer::filled(64, 1));
        let attr = RegAttr::key(1).access(Access::RECV | Access::MW_BIND);
        let region = attr.register(&**domain, &[host(target.range(), true)]).unwrap();
        let windows = domain.windows().unwrap();
        let window = windows.alloc_window(WindowType::TwoB).unwrap();
        let (access, addressing) = (Access::REMOTE_WRITE, Addressing::ZeroBased);
        let bind = WindowBind { region, offset: 0, len: 64, access, addressing };
        windows.bind_window_now(&*pair.there.endpoint, window, &bind, 1).unwrap();
        let number = windows.window_status(window).unwrap().key;
        let key = RemoteKey::new(addressing, Iova(0), 64, number);
        std::thread::scope(|scope| {
            let gate = faults.hold(NicCall::Transfer);
            let writing = scope.spawn(|| pair.here.write(pair.to, &[source.whole()], &key, 0));
            gate.wait_held();
            pair.there.endpoint.close().unwrap();
            if close_twice {
                // The window is bound through another endpoint, and that endpoint closes too.
                let other = End::open(domain);
                windows.bind_window_now(&*other.endpoint, window, &bind, 2).unwrap();
                other.endpoint.close().unwrap();
            }
            let closing = scope.spawn(|| (domain.deregister(region), target.bytes()));
            while faults.calls(NicCall::EndBinding) == 0 && !closing.is_finished() {
                std::thread::yield_now();
            }
            assert!(!closing.is_finished(), "refused, or closed in the middle of a transfer");
            gate.release();
            assert_eq!(writing.join().unwrap().unwrap(), 64);
            let (closed, seen) = closing.join().unwrap();
            closed.expect("the transfer has ended");
            assert_eq!(seen, [1; 64], "the transfer ended before the deregistration returned");
        });
        assert_eq!(domain.live().regions, 0);
        windows.free_window(window).unwrap();
    }
}

#[test]
fn after_deregistration_no_byte_changes() {
    for progress in [Progress::ByHand, Progress::Thread] {
        let provider = Loopback::builder().progress(progress).build().unwrap();
        let there = End::open(&domain(&provider, MrMode::empty()));
        let target = Buffer::new(4096);
        let stop = AtomicBool::new(false);
        let key = remote(
            hmem_core::provider::ProviderRegion {
                token: 0,
                local: hmem_core::LocalKey::from_provider(0),
                key: 1,
            },
            4096,
        );
        let writes = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 1..=3u8 {
                let end = End::open(&domain(&provider, MrMode::empty()));
                let (there, stop, key, writes) = (&there, &stop, &key, &writes);
                scope.spawn(move || {
                    // Two writes of the same byte would be a race that ThreadSanitizer reports.
                    let (source, at) = (Buffer::filled(1024, thread), u64::from(thread) * 1024);
                    let to = end.peer(there);
                    while !stop.load(Ordering::Relaxed) {
                        match end.write(to, &[source.whole()], key, at) {
                            Ok(_) => {
                                writes.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidKey),
                        }
                    }
                });
            }
            for round in 0..300 {
                let region = RegAttr::key(1)
                    .register(&*there.domain, &[host(target.range(), round % 2 == 0)])
                    .unwrap();
                let before = writes.load(Ordering::Relaxed);
                while writes.load(Ordering::Relaxed) == before {
                    std::thread::yield_now();
                }
                there.domain.deregister(region).unwrap();
                target.fill(0xff);
                for _ in 0..3 {
                    assert!(target.bytes() == [0xff; 4096], "written after deregistration");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// Writes between two NICs in both directions, by keys of windows and of regions, while other
/// threads change the tables of regions and windows that the writes look up.
#[test]
fn transfers_do_not_deadlock_with_registrations_and_window_allocations() {
    for (size, mode) in [(8, MrMode::empty()), (8, MrMode::PROV_KEY), (4, MrMode::PROV_KEY)] {
        let provider = Loopback::builder().nic("a").nic("b").key_size(size).build().unwrap();
        let ends = ["a", "b"].map(|nic| {
            let request = DomainRequest { nic: Some(nic.to_owned()), ..request(mode) };
            End::open(&provider.open_domain(&request).unwrap())
        });
        let buffer = Buffer::new(64);
        let pieces = [host(buffer.range(), true)];
        let access = Access::REMOTE_WRITE;
        let attr = |key| RegAttr::key(key).access(access | Access::WRITE | Access::MW_BIND);
        let targets = ends.each_ref().map(|end| {
            let region = attr(1 << 20).register(&*end.domain, &pieces).unwrap();
            let windows = end.domain.windows().unwrap();
            let window = windows.alloc_window(WindowType::One).unwrap();
            let addressing = Addressing::Virtual;
            let bind = WindowBind { region, offset: 0, len: 64, access, addressing };
            (region, windows.bind_window(window, &bind).unwrap().key)
        });
        let writers = AtomicU64::new(2);
        std::thread::scope(|scope| {
            for (here, there) in [(0, 1), (1, 0)] {
                let (ends, targets, writers, buffer) = (&ends, &targets, &writers, &buffer);
                scope.spawn(move || {
                    let (end, base) = (&ends[here], buffer.address().0);
                    let to = end.peer(&ends[there]);
                    let local = [buffer.segment(0, 8, Some(targets[here].0.local))];
                    let (region, window) = targets[there];
                    let window = RemoteKey::new(Addressing::Virtual, Iova(base), 64, window);
                    for _ in 0..1000 {
                        end.write(to, &local, &window, base + 32).unwrap();
                        end.write(to, &local, &remote(region, 64), 32).unwrap();
                    }
                    writers.fetch_sub(1, Ordering::SeqCst);
                });
            }
            for end in &ends {
                let (domain, writers, pieces) = (&end.domain, &writers, &pieces);
                scope.spawn(move || {
                    while writers.load(Ordering::SeqCst) > 0 {
                        let region = attr(1).register(&**domain, pieces).unwrap();
                        domain.deregister(region).unwrap();
                    }
                });
                scope.spawn(move || {
                    let windows = domain.windows().unwrap();
                    while writers.load(Ordering::SeqCst) > 0 {
                        let window = windows.alloc_window(WindowType::TwoB).unwrap();
                        windows.free_window(window).unwrap();
                    }
                });
            }
        });
    }
}

#[test]
fn concurrent_registrations_keep_exact_counts() {
    for mode in [MrMode::empty(), MrMode::PROV_KEY] {
        for size in [4, 8] {
            let domain = domain(&Loopback::builder().key_size(size).build().unwrap(), mode);
            let buffer = Buffer::new(64);
            std::thread::scope(|scope| {
                for thread in 0..4u64 {
                    let (domain, buffer) = (&domain, &buffer);
                    scope.spawn(move || {
                        let mut live = Vec::new();
                        for n in 0..3000u64 {
                            let attr = RegAttr::key(thread << 16 | n);
                            live.push(
                                attr.register(&**domain, &[host(buffer.range(), true)]).unwrap(),
                            );
                            if n % 3 == 2 {
                                domain
                                    .deregister(live.swap_remove((n as usize * 7) % live.len()))
                                    .unwrap();
                            }
                        }
                        for region in live.drain(500..) {
                            domain.deregister(region).unwrap();
                        }
                    });
                }
            });
            let live = domain.live();
            assert_eq!(
                (live.regions, live.page_registrations, live.bytes),
                (2000, 2000, 2000 * 64)
            );
        }
    }
}
