//! Staged copies over an installed libfabric (`HMEM_LIBFABRIC_LIBRARY`): device memory of the
//! simulated device, which the software providers do not reach.

#[path = "../../p2p/tests/staging_cases/mod.rs"]
mod staging_cases;
mod target;
#[path = "../../tests/trials/mod.rs"]
mod trials;
mod watchdog;

use std::{env, process::ExitCode, sync::Arc, sync::mpsc, thread};

use hmem_core::{
    AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, ErrorKind, Iface, Path,
    Region, Registry,
    iface::AllocRequest,
    provider::{CompletionQueue, EndpointAttr, Provider, StagingAttr},
    transfer::{AtomicOp, AtomicType, Completion, CompletionKind, EndpointName, RemoteSegment},
};
use hmem_iface_system::{DeviceCall, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use staging_cases::*;
use target::{CHILD, Target, build, commands, hex, providers, sum, turn, unhex};
use trials::{Outcome, trials};

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 8 };
/// Maximum length of a message in bytes: a quarter of the staging buffers.
const LONGEST: u64 = CHUNK * 2;
/// Maximum number of local segments in a message over each of the providers.
const SEGMENTS: usize = 4;

fn device() -> Simulated {
    Simulated::builder().window(1 << 32).build().expect("build the device")
}

fn net_with(provider: &str, thread: bool, staging: StagingAttr, device: Simulated) -> Net {
    Net::new(Arc::new(build(provider, thread).expect("build")), None, staging, device)
}

/// Runs a test over each provider, without a progress thread and with one.
fn over_each(
    staging: StagingAttr,
    device: fn() -> Simulated,
    test: impl Fn(&str, &Net),
) -> Outcome {
    let _turn = turn();
    for name in providers()? {
        for thread in [false, true] {
            test(name, &net_with(name, thread, staging, device()));
        }
    }
    Ok(())
}

fn transfers_of_every_size_arrive_whole() -> Outcome {
    let sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * 2, CHUNK * 20 + 1];
    over_each(STAGING, device, |_, net| every_size_arrives(net, &sizes, &STARTS, LONGEST))
}

fn megabytes_arrive_whole() -> Outcome {
    let staging = StagingAttr::default();
    let chunk = staging.buffer_len as u64;
    over_each(staging, device, |_, net| {
        every_size_arrives(net, &[chunk * 2, chunk * 9 + 1], &STARTS[2..], chunk * 2);
    })
}

fn slow_a_gigabyte_arrives_whole() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let net = net_with(name, false, StagingAttr::default(), device());
        let near = net.near.device(&net.device, 1 << 30, LOCAL).expect("stage device memory");
        let far = net.far.host((1 << 30) + 1, LOCAL | REMOTE);
        for kind in [CompletionKind::Write, CompletionKind::Read] {
            moves(&net, kind, &[(&near, 0, 1 << 30)], (&far, 0, 1 << 30));
        }
    }
    Ok(())
}

fn lists_of_staged_and_host_memory_arrive_whole() -> Outcome {
    // Some lists have more segments than a message.
    over_each(STAGING, device, |_, net| lists_arrive(net, CHUNK, 0))
}

fn any_transfer_moves_the_bytes_of_a_plain_copy() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        anything_arrives(6, SEGMENTS, || {
            (Arc::new(build(name, false).expect("build")) as Arc<dyn Provider>, None)
        });
    }
    Ok(())
}

fn messages_arrive_between_staged_memory_of_both_sides() -> Outcome {
    over_each(STAGING, device, |_, net| {
        let near = net.near.device(&net.device, CHUNK * 4, LOCAL).expect("stage device memory");
        let far = net.far.device(&net.device, CHUNK * 4, LOCAL).expect("stage device memory");
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, LONGEST] {
            moves(net, CompletionKind::Send, &[(&near, 1, len)], (&far, 2, len));
        }
        // A receive may be longer than the message. The rest of its buffer is unchanged.
        far.put(0, &[0x55; 4096]);
        near.put(0, &[0x66; 4096]);
        net.far.endpoint.receive(&[far.slice(0, CHUNK * 3)], Some((7, 0)), 6).expect("post");
        net.near
            .endpoint
            .send_immediate(&[near.slice(0, 100)], Some(7), 9, net.peer, 5)
            .expect("post");
        let (_, mut there) = net.complete(1, 1);
        let received = there.remove(0);
        assert_eq!((received.tag, received.data), (Some(7), Some(9)));
        assert_eq!(received.result.expect("a message"), 100);
        assert_eq!(far.get(0, 101), [&[0x66; 100][..], &[0x55]].concat());
        // A message that is longer than its receive, and one that needs too many buffers.
        net.far.endpoint.receive(&[far.slice(0, 10)], None, 6).expect("post");
        net.near.endpoint.send(&[near.slice(0, 100)], None, net.peer, 5).expect("post");
        let truncated = net.complete(1, 1).1.remove(0).result.expect_err("too long");
        assert_eq!(truncated.kind(), ErrorKind::Truncated, "{truncated}");
        let long = net.near.endpoint.send(&[near.slice(0, LONGEST + 1)], None, net.peer, 5);
        assert_eq!(long.expect_err("too long").kind(), ErrorKind::MessageTooLong);
        net.assert_idle();
    })
}

fn copies_and_wire_overlap_over_libfabric() -> Outcome {
    over_each(STAGING, by_hand, |_, net| copies_and_wire_overlap(net))
}

fn requests_posted_after_a_staged_write_arrive_after_it() -> Outcome {
    over_each(STAGING, device, |_, net| message_arrives_after_a_staged_write(net, CHUNK * 20, drop))
}

/// The completion of a write with data means that all its bytes are there, also those of earlier
/// chunks. A staged receive that the write consumes keeps its memory.
fn data_of_a_staged_write_arrives_after_its_bytes() -> Outcome {
    over_each(STAGING, device, |name, net| {
        let len = CHUNK * 20 + 1;
        let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
        let inbox = net.far.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
        let far = net.far.host(len, LOCAL | REMOTE);
        inbox.put(0, &[0x55; 64]);
        let key = far.region().key().expect("a key");
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        for round in 0..10 {
            let bytes = pattern(len, round);
            near.put(0, &bytes);
            net.far.endpoint.receive(&[inbox.slice(0, 64)], None, 6).expect("post");
            let from = [near.slice(0, len)];
            net.near.endpoint.write_immediate(&from, &remote, round, net.peer, 5).expect("post");
            let (mut here, mut there) = (Vec::new(), Vec::new());
            while there.is_empty() {
                net.near.cq.read(&mut here, 1).expect("read completions");
                net.far.cq.read(&mut there, 1).expect("read completions");
            }
            assert!(far.get(0, len) == bytes, "{name}: the data arrived before the bytes");
            let written = there.remove(0);
            assert_eq!((written.kind, written.data), (CompletionKind::RemoteWrite, Some(round)));
            assert_eq!(written.result.expect("the write"), len, "{name}");
            here.extend(net.complete(1 - here.len(), 0).0);
            assert_eq!(here.remove(0).result.expect("the write"), len);
        }
        assert_eq!(inbox.get(0, 64), [0x55; 64]);
        net.assert_idle();
    })
}

fn failed_copy_leaks_nothing() -> Outcome {
    over_each(STAGING, device, |_, net| {
        let kinds = [CompletionKind::Write, CompletionKind::Read];
        faults_drain_the_pipeline(net, CHUNK * 3 + 1, &kinds);
    })
}

fn failed_copy_of_a_message_fails_only_its_own_side() -> Outcome {
    over_each(STAGING, device, |name, net| {
        let near = net.near.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
        let far = net.far.device(&net.device, CHUNK + 1, LOCAL).expect("stage device memory");
        let bytes = pattern(CHUNK, 1);
        near.put(0, &bytes);
        net.far.endpoint.receive(&[far.slice(0, CHUNK)], None, 6).expect("post");
        for side in 0..2 {
            // The sender's copy is the first, and the receiver's the second.
            net.device.faults().fail_nth(DeviceCall::CopyAsync, side + 1, Errno(5));
            net.near.endpoint.send(&[near.slice(0, CHUNK)], None, net.peer, 5).expect("post");
            let (mut here, there) = net.complete(1, side as usize);
            net.device.faults().clear();
            let failed = match side {
                0 => here.remove(0).result,
                _ => there.into_iter().next().expect("a receive").result,
            };
            assert_eq!(failed.expect_err("a fault").os_errno(), Some(Errno(5)), "{name}");
        }
        moves(net, CompletionKind::Send, &[(&near, 0, CHUNK)], (&far, 0, CHUNK));
    })
}

/// A message behind a failed write does not announce bytes that were not written.
fn failed_copy_cancels_the_requests_behind_it() -> Outcome {
    over_each(STAGING, by_hand, |name, net| {
        let near = net.near.device(&net.device, CHUNK * 4, LOCAL).expect("stage device memory");
        let host = net.near.host(8, LOCAL);
        let far = net.far.host(CHUNK * 4, LOCAL | REMOTE);
        let key = far.region().key().expect("a key");
        let remote = [RemoteSegment { address: key.base(), len: CHUNK * 4, key: &key }];
        net.device.faults().fail_nth(DeviceCall::EngineCopy, 3, Errno(5));
        net.far.endpoint.receive(&[far.slice(0, 8)], None, 6).expect("post");
        let from = [near.slice(0, CHUNK * 4)];
        net.near.endpoint.write(&from, &remote, net.peer, 1).expect("post");
        net.near.endpoint.send(&[host.slice(0, 8)], None, net.peer, 2).expect("post");
        net.near.endpoint.send(&[near.slice(0, 8)], None, net.peer, 3).expect("post");
        let mut ended = Vec::new();
        while net.device.step() {
            net.near.cq.read(&mut ended, 8).expect("read completions");
        }
        let (rest, there) = net.complete(3 - ended.len(), 0);
        ended.extend(rest);
        net.device.faults().clear();
        assert!(there.is_empty(), "{name}: a message arrived");
        for completion in ended {
            let error = completion.result.expect_err("all fail");
            match completion.context {
                1 => assert_eq!(error.os_errno(), Some(Errno(5)), "{name}: {error}"),
                _ => assert_eq!(error.kind(), ErrorKind::Canceled, "{name}: {error}"),
            }
        }
        net.assert_idle();
        // Requests that are posted after the failure work.
        net.near.endpoint.send(&[host.slice(0, 8)], None, net.peer, 4).expect("post");
        let (mut here, mut there) = net.complete(1, 1);
        here.remove(0).result.expect("send");
        assert_eq!(there.remove(0).result.expect("receive"), 8);
    })
}

fn transfers_wait_for_staging_buffers() -> Outcome {
    for slots in [1, 2, 5] {
        over_each(StagingAttr { buffer_count: slots, ..STAGING }, device, |_, net| {
            an_exhausted_pool_makes_transfers_wait(net, 20);
        })?;
    }
    Ok(())
}

fn refused_chunk_fails_the_transfer_and_leaks_nothing() -> Outcome {
    over_each(STAGING, device, |name, net| {
        if name == "shm" {
            // A refusal is not reported.
            return;
        }
        let len = CHUNK * 12;
        let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
        let far = net.far.host(len + 1, LOCAL | REMOTE);
        let closed = net.far.host(len, LOCAL | REMOTE);
        let key = closed.region().key().expect("a key");
        drop(closed);
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        net.near.endpoint.write(&[near.slice(0, len)], &remote, net.peer, 1).expect("post");
        let refused = net.complete(1, 0).0.remove(0).result.expect_err("a closed region");
        assert!(
            matches!(refused.kind(), ErrorKind::AccessDenied | ErrorKind::InvalidKey),
            "{name}: {}",
            refused.full()
        );
        net.assert_idle();
        moves(net, CompletionKind::Write, &[(&near, 0, len)], (&far, 0, len));
    })
}

fn endpoint_closed_amid_a_transfer_leaks_nothing() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        for steps in 0..6 {
            let staging = StagingAttr { buffer_count: 3, ..STAGING };
            let net = net_with(name, false, staging, by_hand());
            let len = CHUNK * 6;
            let staged = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
            let far = net.far.host(len + 1, LOCAL | REMOTE);
            let key = far.region().key().expect("a key");
            let remote = [RemoteSegment { address: key.base(), len, key: &key }];
            let list = [staged.slice(0, len)];
            net.near.endpoint.write(&list, &remote, net.peer, 1).expect("post");
            net.near.endpoint.read(&list, &remote, net.peer, 2).expect("post");
            net.near.endpoint.receive(&[staged.slice(0, CHUNK)], None, 3).expect("post");
            let mut out = Vec::new();
            for _ in 0..steps {
                net.device.step();
                net.near.cq.read(&mut out, 8).expect("read completions");
            }
            let Net { near, far: other, device, .. } = net;
            near.endpoint.close().map_err(|rejected| rejected.error).expect("close");
            while out.len() < 3 {
                let count = near.cq.read(&mut out, 8).expect("read completions");
                assert!(count > 0, "{name}: a request has no completion");
            }
            for completion in out {
                let error = completion.result.expect_err("canceled");
                assert_eq!(error.kind(), ErrorKind::Canceled, "{name}: {error}");
            }
            assert_eq!(device.pending_copies(), 0, "{name}");
            // Over shm, peers may use the buffers until their endpoints are closed.
            other.endpoint.close().map_err(|rejected| rejected.error).expect("close");
            assert_eq!(near.domain.live().staging_buffers, 0, "{name}");
        }
    }
    Ok(())
}

fn staged_region_closed_amid_a_transfer_is_not_accessed() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        for steps in 0..4 {
            let staging = StagingAttr { buffer_count: 3, ..STAGING };
            let net = net_with(name, false, staging, by_hand());
            let len = CHUNK * 6;
            let staged = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
            let far = net.far.host(len, LOCAL | REMOTE);
            let key = far.region().key().expect("a key");
            let remote = [RemoteSegment { address: key.base(), len, key: &key }];
            let slice = staged.slice(0, len);
            net.near.endpoint.receive(&[staged.slice(0, CHUNK)], None, 2).expect("post");
            net.near.endpoint.write(&[slice], &remote, net.peer, 1).expect("post");
            let mut out = Vec::new();
            for _ in 0..steps {
                net.device.step();
                net.near.cq.read(&mut out, 8).expect("read completions");
            }
            let begun = net.device.faults().calls(DeviceCall::CopyAsync);
            drop(staged);
            assert_eq!(net.device.pending_copies(), 0, "{name}: a copy is in flight");
            out.extend(net.complete(2 - out.len(), 0).0);
            for completion in out {
                let error = completion.result.expect_err("the region is closed");
                let kinds = [ErrorKind::NoRegion, ErrorKind::Canceled];
                assert!(kinds.contains(&error.kind()), "{name}: {error}");
            }
            assert_eq!(net.device.faults().calls(DeviceCall::CopyAsync), begun, "{name}");
            let stale = net.near.endpoint.write(&[slice], &remote, net.peer, 1);
            assert_eq!(stale.expect_err("closed").kind(), ErrorKind::NoRegion);
            net.assert_idle();
        }
    }
    Ok(())
}

fn local_rights_of_a_staged_region_are_enforced() -> Outcome {
    over_each(STAGING, device, |_, net| {
        let far = net.far.host(64, LOCAL | REMOTE);
        let key = far.region().key().expect("a key");
        let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
        let near = |access| net.near.device(&net.device, 64, access).expect("stage device memory");
        let denied = |posted: hmem_core::Result<()>| {
            assert_eq!(posted.expect_err("no right").kind(), ErrorKind::AccessDenied);
        };
        use hmem_core::Access;
        let region = near(LOCAL - Access::WRITE);
        denied(net.near.endpoint.write(&[region.slice(0, 8)], &remote, net.peer, 1));
        let region = near(LOCAL - Access::READ);
        denied(net.near.endpoint.read(&[region.slice(0, 8)], &remote, net.peer, 1));
        let region = near(LOCAL - Access::SEND);
        denied(net.near.endpoint.send(&[region.slice(0, 8)], None, net.peer, 1));
        let region = near(LOCAL - Access::RECV);
        denied(net.near.endpoint.receive(&[region.slice(0, 8)], None, 1));
        for (kind, right) in KINDS.into_iter().zip([Access::WRITE, Access::READ, Access::SEND]) {
            let only = near(right);
            assert_eq!(net.transfer(kind, &[only.slice(1, 9)], (&far, 3, 9)).expect("it moves"), 9);
        }
        net.assert_idle();
    })
}

/// Requests that copies cannot serve are refused with the reason, and the decision has it too.
fn refusals_and_decisions_name_the_reason() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let mut net = net_with(name, false, STAGING, device());
        let staged = net.near.device(&net.device, 64, LOCAL).expect("stage device memory");
        let host = net.near.host(64, LOCAL);
        let far = net.far.host(64, LOCAL | REMOTE);
        let key = far.region().key().expect("a key");
        assert_eq!(staged.region().key().expect_err("no key").kind(), ErrorKind::KeyNotAvailable);
        let (operand, remote) = (host.slice(0, 8), key.slice(0, 8).expect("inside"));
        let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
        for (operand, result) in [(staged.slice(0, 8), None), (operand, Some(staged.slice(0, 8)))] {
            let atomic = hmem_core::Atomic { op, datatype, remote, operand, result, compare: None };
            let refused = net.near.endpoint.atomic(&atomic, net.peer, 1).expect_err("an atomic");
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{name}: {refused}");
            if name != "tcp" {
                let why = refused.remedy_text().unwrap_or_default();
                assert!(why.contains("cannot be atomic"), "{name}: {why}");
            }
        }
        let refused = net.near.device(&net.device, 64, LOCAL | REMOTE).map(drop);
        let refused = refused.expect_err("peers do not reach staged memory");
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(refused.full().to_string().contains("cannot reach"), "{}", refused.full());
        // Without a policy against direct paths, both are refused first, each with a cause.
        let registry = Arc::clone(net.near.domain.registry());
        let paths = Arc::new(DefaultPathSelector::new());
        let attr = DomainAttr { staging: STAGING, ..DomainAttr::default() };
        net.near.domain = Domain::open(&*net.provider, registry, paths, attr).expect("open");
        let iface = Arc::clone(&net.device) as Arc<dyn Iface>;
        let region = net.near.domain.register(buffer(&iface, 64), LOCAL).expect("register");
        let decision = region.decision().expect("a decision");
        assert_eq!(decision.path, Path::Staged);
        for path in [Path::DmaBuf, Path::PeerMemory] {
            let attempt = decision.attempts.iter().find(|attempt| attempt.path == path);
            let attempt = attempt.unwrap_or_else(|| panic!("{name}: {decision:?}"));
            assert!(attempt.error.is_some() && attempt.cause.is_some(), "{name}: {attempt:?}");
        }
    }
    Ok(())
}

fn buffer(iface: &Arc<dyn Iface>, len: u64) -> DeviceBuffer {
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(iface, &request).expect("allocate")
}

/// The lengths of the transfers between two processes, and of the exposed memory.
const LENGTHS: [u64; 5] = [1, CHUNK - 1, CHUNK + 1, CHUNK * 2, CHUNK * 40 + 3];
const LEN: u64 = CHUNK * 41;
/// The length of the child's receive, in staged memory.
const INBOX: u64 = CHUNK * 2;

/// One process, with a simulated device.
struct Side {
    endpoint: hmem_core::Endpoint,
    queue: Arc<dyn CompletionQueue>,
    domain: Domain,
    staged: Region<DeviceBuffer>,
}

impl Side {
    fn open(provider: &str) -> Self {
        let iface: Arc<dyn Iface> = Arc::new(device());
        let mut registry = Registry::new();
        registry.add(Arc::clone(&iface)).expect("add the device");
        let paths = Arc::new(DefaultPathSelector::new());
        let provider = build(provider, false).expect("build");
        let attr = DomainAttr { staging: STAGING, ..DomainAttr::default() };
        let domain = Domain::open(&provider, Arc::new(registry), paths, attr).expect("open");
        let queue = domain.open_cq(256).expect("open a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("open");
        let staged = domain.register(buffer(&iface, LEN), LOCAL).expect("register");
        assert_eq!(staged.decision().expect("a decision").path, Path::Staged);
        Self { endpoint, queue, domain, staged }
    }

    fn sum(&self, len: u64) -> u64 {
        let mut bytes = vec![0; len as usize];
        self.staged.read(0, &mut bytes).expect("read");
        sum(&bytes)
    }

    fn next(&self) -> Completion {
        let mut done = Vec::new();
        self.queue.wait(&mut done, 1, target::SOON).expect("wait");
        done.pop().expect("a completion")
    }
}

/// The child: exposes host memory, receives into staged memory, and sends from it.
fn child(provider: &str) -> ExitCode {
    let side = Side::open(provider);
    let memory = side.domain.register(vec![0; LEN as usize], REMOTE).expect("register");
    let inbox = [side.staged.slice(0, INBOX).expect("inside")];
    side.endpoint.receive(&inbox, None, 0).expect("post");
    println!("name {}", hex(&side.endpoint.name().0));
    println!("key {}", hex(&memory.key().expect("a key").to_bytes()));
    let input = commands();
    loop {
        match input.try_recv() {
            Ok(name) => {
                let peer = side.endpoint.resolve(&EndpointName(unhex(&name))).expect("resolve");
                side.staged.write(0, &pattern(INBOX, 9)).expect("write");
                side.endpoint.send(&inbox, None, peer, 1).expect("post");
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return ExitCode::SUCCESS,
        }
        let mut done = Vec::new();
        side.queue.read(&mut done, 8).expect("read completions");
        for completion in done {
            let bytes = completion.result.expect("completion");
            let mut text = vec![0; bytes as usize];
            memory.read(0, &mut text).expect("read");
            match completion.kind {
                CompletionKind::RemoteWrite => println!("written {bytes} {}", sum(&text)),
                CompletionKind::Receive => println!("received {bytes} {}", side.sum(bytes)),
                _ => continue,
            }
            side.endpoint.receive(&inbox, None, 0).expect("post");
        }
        thread::yield_now();
    }
}

fn staged_bytes_move_between_processes() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let mut target = Target::start(name);
        let side = Side::open(name);
        let peer = side.endpoint.resolve(&target.name).expect("resolve");
        for (seed, len) in (0..).zip(LENGTHS) {
            let bytes = pattern(len, seed);
            side.staged.write(0, &bytes).expect("write");
            let local = [side.staged.slice(0, len).expect("inside")];
            let remote = [target.key.slice(0, len).expect("inside")];
            side.endpoint.write_immediate(&local, &remote, 5, peer, 1).expect("post");
            assert_eq!(side.next().result.expect("write"), len, "{name}");
            let line = target.line_while(&side.domain, "written ");
            assert_eq!(line, format!("{len} {}", sum(&bytes)), "{name}");
            side.staged.write(0, &vec![0; len as usize]).expect("clear");
            side.endpoint.read(&local, &remote, peer, 2).expect("post");
            assert_eq!(side.next().result.expect("read"), len, "{name}");
            assert_eq!(side.sum(len), sum(&bytes), "{name}: {len} bytes read");
            if len <= LONGEST {
                side.endpoint.send(&local, None, peer, 3).expect("post");
                assert_eq!(side.next().result.expect("send"), len, "{name}");
                let line = target.line_while(&side.domain, "received ");
                assert_eq!(line, format!("{len} {}", sum(&bytes)), "{name}");
            }
        }
        let inbox = [side.staged.slice(0, INBOX).expect("inside")];
        side.endpoint.receive(&inbox, None, 6).expect("post");
        target.tell(&hex(&side.endpoint.name().0));
        let done = side.next();
        assert_eq!((done.context, done.result.expect("message")), (6, INBOX), "{name}");
        assert_eq!(side.sum(INBOX), sum(&pattern(INBOX, 9)), "{name}");
        assert_eq!(side.domain.live().staging_buffers, 0, "{name}");
        target.end();
    }
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(provider) = env::var(CHILD) {
        return child(&provider);
    }
    trials! { const TESTS;
        /// BNC-01 and FAB-10: transfers of no bytes up to many chunks arrive whole.
        transfers_of_every_size_arrive_whole,
        /// BNC-01: transfers of several of the default buffers arrive whole.
        megabytes_arrive_whole,
        /// BNC-01: a write and a read of 1 GiB arrive whole.
        slow_a_gigabyte_arrives_whole,
        /// BNC-01: RMA with lists of staged and host memory, cut at any offset, arrives whole.
        lists_of_staged_and_host_memory_arrive_whole,
        /// BNC-01: random transfers over random buffers move the bytes of a plain copy.
        any_transfer_moves_the_bytes_of_a_plain_copy,
        /// BNC-01: messages between staged memory of both sides arrive whole, also with a tag.
        messages_arrive_between_staged_memory_of_both_sides,
        /// BNC-01: libfabric sends one chunk of a transfer while others are still copied.
        copies_and_wire_overlap_over_libfabric,
        /// BNC-01 and FAB-07: a message behind a staged write arrives after the write.
        requests_posted_after_a_staged_write_arrive_after_it,
        /// FAB-07: immediate data arrives after the bytes of every chunk.
        data_of_a_staged_write_arrives_after_its_bytes,
        /// BNC-02 and REL-01: a failure of any copy ends the transfer and leaks nothing.
        failed_copy_leaks_nothing,
        /// BNC-02 and REL-01: a failed copy of a message fails only the side of the copy.
        failed_copy_of_a_message_fails_only_its_own_side,
        /// BNC-02 and FAB-07: a failed copy cancels the requests that wait behind it.
        failed_copy_cancels_the_requests_behind_it,
        /// BNC-02: transfers wait for buffers, and the pool never grows.
        transfers_wait_for_staging_buffers,
        /// BNC-02: the peer's refusal of a chunk ends the transfer and leaks nothing.
        refused_chunk_fails_the_transfer_and_leaks_nothing,
        /// BNC-02: the close of an endpoint cancels its staged requests and leaks nothing.
        endpoint_closed_amid_a_transfer_leaks_nothing,
        /// MR-05: after the close of a staged region no copy of its memory runs or starts.
        staged_region_closed_amid_a_transfer_is_not_accessed,
        /// MR-09: a request without the right on its staged memory is refused.
        local_rights_of_a_staged_region_are_enforced,
        /// BNC-03 and FAB-10: atomics and remote rights are refused, and decisions say why copies
        /// are staged.
        refusals_and_decisions_name_the_reason,
        /// BNC-01 and FAB-10: staged bytes move between two processes.
        staged_bytes_move_between_processes,
    }
    trials::run(TESTS)
}
