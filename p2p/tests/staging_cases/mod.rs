//! Cases of transfers through staging buffers that hold on every provider, with their setup.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint, Errno, ErrorKind,
    Iface, Iova, Path, Region, RegionSlice, Registry, Result,
    iface::AllocRequest,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, Provider, StagingAttr},
    transfer::{Completion, CompletionKind, PeerId, RemoteSegment},
};
use hmem_iface_system::{DeviceCall, Simulated, Stepping};
use hmem_p2p::path::DefaultPathSelector;
use proptest::{prelude::*, test_runner::TestRunner};

/// All access rights for the local side.
pub(crate) const LOCAL: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
/// All access rights for peers that the tests use.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Registered memory that a test transfers.
pub(crate) enum Mem {
    Host(Region<Vec<u8>>),
    Device(Region<DeviceBuffer>),
}

impl Mem {
    pub(crate) fn slice(&self, offset: u64, len: u64) -> RegionSlice {
        match self {
            Self::Host(region) => region.slice(offset, len),
            Self::Device(region) => region.slice(offset, len),
        }
        .expect("inside")
    }

    pub(crate) fn get(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        match self {
            Self::Host(region) => region.read(offset, &mut bytes),
            Self::Device(region) => region.read(offset, &mut bytes),
        }
        .expect("read memory");
        bytes
    }

    pub(crate) fn put(&self, offset: u64, bytes: &[u8]) {
        match self {
            Self::Host(region) => region.write(offset, bytes),
            Self::Device(region) => region.write(offset, bytes),
        }
        .expect("write memory");
    }

    pub(crate) fn region(&self) -> &hmem_core::MemoryRegion {
        match self {
            Self::Host(region) => region,
            Self::Device(region) => region,
        }
    }
}

/// A domain with one endpoint and its completion queue.
pub(crate) struct Side {
    pub(crate) endpoint: Endpoint,
    pub(crate) cq: Arc<dyn CompletionQueue>,
    pub(crate) domain: Domain,
}

impl Side {
    pub(crate) fn host(&self, len: u64, access: Access) -> Mem {
        Mem::Host(
            self.domain.register(vec![0; len as usize], access).expect("register host memory"),
        )
    }

    pub(crate) fn device(&self, device: &Arc<Simulated>, len: u64, access: Access) -> Result<Mem> {
        let iface = Arc::clone(device) as Arc<dyn Iface>;
        let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
        let buffer = DeviceBuffer::allocate(&iface, &request)?;
        let region = self.domain.register(buffer, access).map_err(|rejected| rejected.error)?;
        assert_eq!(region.decision()?.path, Path::Staged);
        Ok(Mem::Device(region))
    }

    pub(crate) fn slots(&self) -> u64 {
        self.domain.live().staging_buffers
    }
}

/// Two connected domains with one simulated device. No NIC can access the device's memory.
pub(crate) struct Net {
    pub(crate) near: Side,
    pub(crate) far: Side,
    /// The far side, for requests of the near side.
    pub(crate) peer: PeerId,
    /// The near side, for requests of the far side.
    pub(crate) back: PeerId,
    pub(crate) device: Arc<Simulated>,
    pub(crate) staging: StagingAttr,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) nic: Option<String>,
}

impl Net {
    pub(crate) fn new(
        provider: Arc<dyn Provider>,
        nic: Option<String>,
        staging: StagingAttr,
        device: Simulated,
    ) -> Self {
        let device = Arc::new(device);
        let mut registry = Registry::new();
        registry.add(Arc::clone(&device) as Arc<dyn Iface>).expect("add the device");
        let registry = Arc::new(registry);
        let side = || {
            let p2p = P2pPolicy::Disabled;
            let attr = DomainAttr { nic: nic.clone(), p2p, staging, ..DomainAttr::default() };
            let domain = Domain::open(
                &*provider,
                Arc::clone(&registry),
                Arc::new(DefaultPathSelector::new()),
                attr,
            )
            .expect("open a domain");
            let cq = domain.open_cq(64).expect("open a queue");
            let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
            Side { endpoint, cq, domain }
        };
        let (near, far) = (side(), side());
        let peer = near.endpoint.resolve(&far.endpoint.name()).expect("connect");
        let back = far.endpoint.resolve(&near.endpoint.name()).expect("connect");
        Self { near, far, peer, back, device, staging, provider, nic }
    }

    /// Connects both sides again if a failure ended the connection.
    pub(crate) fn connect(&self) {
        let (near, far) = (self.near.endpoint.name(), self.far.endpoint.name());
        assert_eq!(self.near.endpoint.resolve(&far).expect("connect"), self.peer);
        assert_eq!(self.far.endpoint.resolve(&near).expect("connect"), self.back);
    }

    /// Reads the completion queues of both sides until `near` and `far` completions have arrived.
    pub(crate) fn complete(&self, near: usize, far: usize) -> (Vec<Completion>, Vec<Completion>) {
        let until = Instant::now() + Duration::from_secs(120);
        let (mut here, mut there) = (Vec::new(), Vec::new());
        while here.len() < near || there.len() < far {
            assert!(Instant::now() < until, "a transfer never completed: {here:?} {there:?}");
            self.near.cq.read(&mut here, 64).expect("read completions");
            self.far.cq.read(&mut there, 64).expect("read completions");
            std::thread::yield_now();
        }
        (here, there)
    }

    /// Asserts that no transfer is in flight and no buffer in use.
    pub(crate) fn assert_idle(&self) {
        assert_eq!((self.near.slots(), self.far.slots()), (0, 0), "staging buffers are in use");
        assert_eq!(self.device.pending_copies(), 0, "copies are in flight");
    }

    /// Runs one transfer to completion. `near` lists the pieces of local memory. The remote memory
    /// is one piece.
    pub(crate) fn transfer(
        &self,
        kind: CompletionKind,
        near: &[RegionSlice],
        far: (&Mem, u64, u64),
    ) -> Result<u64> {
        let (mem, offset, len) = far;
        let remote = |key: &hmem_core::RemoteKey| Iova(key.base().0 + offset);
        let received = match kind {
            CompletionKind::Write => {
                let key = mem.region().key()?;
                let remote = [RemoteSegment { address: remote(&key), len, key: &key }];
                self.near.endpoint.write(near, &remote, self.peer, 5)?;
                0
            }
            CompletionKind::Read => {
                let key = mem.region().key()?;
                let remote = [RemoteSegment { address: remote(&key), len, key: &key }];
                self.near.endpoint.read(near, &remote, self.peer, 5)?;
                0
            }
            CompletionKind::Send => {
                self.far.endpoint.receive(&[mem.slice(offset, len)], None, 6)?;
                self.near.endpoint.send(near, None, self.peer, 5)?;
                1
            }
            other => unreachable!("{other:?} is no case"),
        };
        let (mut here, mut there) = self.complete(1, 0);
        assert_eq!(here.len(), 1, "one request, one completion");
        let ended = here.remove(0);
        assert_eq!((ended.context, ended.kind), (5, kind));
        if ended.result.is_err() {
            // The peer's receive stays posted.
            return ended.result;
        }
        there.extend(self.complete(0, received - there.len()).1);
        for message in there {
            assert_eq!(message.context, 6);
            message.result?;
        }
        ended.result
    }
}

/// Returns bytes that depend on their position and on the seed.
pub(crate) fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ (at >> 16) ^ seed.wrapping_mul(0x9d)) as u8)
        .collect()
}

/// Fills both sides with new patterns and runs one transfer. Checks each byte, also those around
/// the target.
pub(crate) fn moves(
    net: &Net,
    kind: CompletionKind,
    near: &[(&Mem, u64, u64)],
    far: (&Mem, u64, u64),
) {
    let total: u64 = near.iter().map(|(_, _, len)| len).sum();
    let (mem, offset, len) = far;
    assert_eq!(total, len);
    let bytes = pattern(total, total ^ offset);
    let blank = vec![0xee; total as usize];
    let fill = |here: &[u8], there: &[u8]| {
        let mut at = 0;
        for (mem, offset, len) in near {
            mem.put(*offset, &here[at..at + *len as usize]);
            at += *len as usize;
        }
        mem.put(offset, there);
    };
    let outward = kind != CompletionKind::Read;
    if outward {
        fill(&bytes, &blank)
    } else {
        fill(&blank, &bytes)
    }
    mem.put(offset + len, &[0x77]);
    let list: Vec<_> = near.iter().map(|(mem, offset, len)| mem.slice(*offset, *len)).collect();
    let moved = net.transfer(kind, &list, far).expect("the transfer works");
    assert_eq!(moved, total, "{kind:?} of {total} bytes");
    let arrived = if outward {
        mem.get(offset, len)
    } else {
        near.iter().flat_map(|(mem, offset, len)| mem.get(*offset, *len)).collect()
    };
    assert!(arrived == bytes, "{kind:?} of {total} bytes: other bytes arrived");
    assert_eq!(mem.get(offset + len, 1), [0x77], "a byte past the end was touched");
    net.assert_idle();
}

pub(crate) const KINDS: [CompletionKind; 3] =
    [CompletionKind::Write, CompletionKind::Read, CompletionKind::Send];

/// Start offsets of transfers on the near and the far side, aligned and unaligned.
pub(crate) const STARTS: [(u64, u64); 3] = [(0, 0), (1, 0), (3, 13)];

/// BNC-01: transfers of these sizes arrive whole, aligned or not: 0 bytes, 1 byte, about one chunk,
/// and several chunks. `longest` is the maximum length of a message.
pub(crate) fn every_size_arrives(net: &Net, sizes: &[u64], starts: &[(u64, u64)], longest: u64) {
    let room = sizes.iter().max().copied().unwrap_or(0) + 64;
    let near = net.near.device(&net.device, room, LOCAL).expect("stage device memory");
    let far = net.far.host(room, LOCAL | REMOTE);
    for kind in KINDS {
        for len in sizes.iter().filter(|len| kind != CompletionKind::Send || **len <= longest) {
            for (here, there) in starts {
                moves(net, kind, &[(&near, *here, *len)], (&far, *there, *len));
            }
        }
    }
}

/// Checks transfers with local lists that mix staged and host memory, divided at any offset.
pub(crate) fn lists_arrive(net: &Net, chunk: u64, longest: u64) {
    let a = net.near.device(&net.device, chunk * 4, LOCAL).expect("stage device memory");
    let b = net.near.device(&net.device, chunk * 4, LOCAL).expect("stage device memory");
    let host = net.near.host(chunk * 4, LOCAL);
    let far = net.far.host(chunk * 20, LOCAL | REMOTE);
    let lists: [&[(&Mem, u64, u64)]; 5] = [
        &[(&a, 1, chunk - 1), (&b, 0, 1)],
        &[(&a, 0, 7), (&host, 3, 5), (&b, 9, chunk + 3), (&host, 100, chunk)],
        &[(&host, 0, chunk * 2), (&a, 5, 1), (&host, chunk * 2, chunk)],
        &[(&a, 0, 0), (&b, 1, chunk * 3), (&a, 0, 0), (&a, 8, chunk * 2 + 1)],
        &[(&a, 2, 1), (&b, 3, 1), (&a, 4, 1), (&b, 5, 1), (&host, 1, 1), (&a, 6, 1)],
    ];
    for list in lists {
        let total = list.iter().map(|(_, _, len)| len).sum();
        for kind in KINDS {
            if kind != CompletionKind::Send || total <= longest {
                moves(net, kind, list, (&far, 11, total));
            }
        }
    }
}

/// Returns a device that copies only when the test lets it.
pub(crate) fn by_hand() -> Simulated {
    Simulated::builder().stepping(Stepping::ByHand).build().expect("build the device")
}

/// BNC-01: the NIC sends one chunk of a transfer while other chunks are still copied. The device of
/// `net` copies by hand.
pub(crate) fn copies_and_wire_overlap(net: &Net) {
    let chunk = net.staging.buffer_len as u64;
    let len = chunk * 4;
    let staged = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
    let far = net.far.host(len, LOCAL | REMOTE);
    let bytes = pattern(len, 1);
    staged.put(0, &bytes);
    let key = far.region().key().expect("a key");
    let remote = [RemoteSegment { address: key.base(), len, key: &key }];
    net.near.endpoint.write(&[staged.slice(0, len)], &remote, net.peer, 5).expect("post");
    // All four copies are started at once. The first chunk is sent while the others are copied.
    assert_eq!(net.device.pending_copies(), 4);
    let (mut out, mut there) = (Vec::new(), Vec::new());
    for at in 0..4 {
        assert!(net.device.step());
        let from = at * chunk;
        while far.get(from, chunk) != bytes[from as usize..][..chunk as usize] {
            net.near.cq.read(&mut out, 1).expect("read completions");
            net.far.cq.read(&mut there, 1).expect("read completions");
            std::thread::yield_now();
        }
        assert_eq!(net.device.pending_copies() as u64, 3 - at);
    }
    out.extend(net.complete(1 - out.len(), 0).0);
    assert_eq!(out.remove(0).result.expect("the write"), len);
    net.assert_idle();
}

/// BNC-01: a message that is posted after a staged write of `len` bytes arrives after the write.
/// `completed` gets the contexts 1 and 2 in the order of the completions.
pub(crate) fn message_arrives_after_a_staged_write(
    net: &Net,
    len: u64,
    completed: impl Fn(Vec<u64>),
) {
    let staged = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
    let (far, flag, host) =
        (net.far.host(len, LOCAL | REMOTE), net.far.host(8, LOCAL), net.near.host(8, LOCAL));
    let key = far.region().key().expect("a key");
    for round in 0..10 {
        let bytes = pattern(len, round);
        staged.put(0, &bytes);
        host.put(0, &round.to_le_bytes());
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        net.far.endpoint.receive(&[flag.slice(0, 8)], None, 6).expect("post");
        net.near.endpoint.write(&[staged.slice(0, len)], &remote, net.peer, 1).expect("post");
        net.near.endpoint.send(&[host.slice(0, 8)], None, net.peer, 2).expect("post");
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        while received.is_empty() {
            net.near.cq.read(&mut sent, 2).expect("read completions");
            net.far.cq.read(&mut received, 1).expect("read completions");
        }
        assert!(far.get(0, len) == bytes, "the message arrived before the write");
        assert_eq!(flag.get(0, 8), round.to_le_bytes());
        sent.extend(net.complete(2 - sent.len(), 0).0);
        completed(sent.iter().map(|completion| completion.context).collect());
        assert!(sent.into_iter().all(|completion| completion.result.is_ok()));
    }
    net.assert_idle();
}

/// Compares transfers with a plain copy. Sizes, chunks, buffers and latencies are random. All
/// buffers are free afterwards. `segments` is the largest number of local segments in a message.
pub(crate) fn anything_arrives(
    cases: u32,
    segments: usize,
    provider: impl Fn() -> (Arc<dyn Provider>, Option<String>),
) {
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    });
    let part = (any::<bool>(), 0u64..40, 0u64..9000);
    let strategy = (
        1usize..3000,
        1usize..9,
        0u64..3,
        prop::collection::vec((0usize..3, prop::collection::vec(part, 1..5)), 1..6),
    );
    runner
        .run(&strategy, |(chunk, slots, latency, transfers)| {
            let (provider, nic) = provider();
            let device = Simulated::builder()
                .window(1 << 30)
                .copy_latency(Duration::from_micros(latency * 20));
            let staging = StagingAttr { buffer_len: chunk, buffer_count: slots };
            let net = Net::new(provider, nic, staging, device.build().expect("build the device"));
            let staged =
                net.near.device(&net.device, 64 << 10, LOCAL).expect("stage device memory");
            let host = net.near.host(64 << 10, LOCAL);
            let far = net.far.host(64 << 10, LOCAL | REMOTE);
            for (kind, parts) in transfers {
                let mut at = 0;
                let mut list = Vec::new();
                for (is_staged, skip, len) in parts {
                    list.push((if is_staged { &staged } else { &host }, at + skip, len));
                    at += skip + len;
                }
                let total: u64 = list.iter().map(|(_, _, len)| len).sum();
                let chunks = total.div_ceil(chunk as u64);
                let fits = chunks <= (slots - slots / 2) as u64 / 2;
                let message = fits && list.len() + chunks as usize <= segments;
                let kind = if message { KINDS[kind] } else { KINDS[kind % 2] };
                moves(&net, kind, &list, (&far, 3, total));
            }
            prop_assert_eq!(net.near.domain.staging_bytes(), staging_bytes(&net));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Returns the size of the near side's staging pool in bytes. The size never changes.
pub(crate) fn staging_bytes(net: &Net) -> u64 {
    let once = net.near.domain.staging_bytes();
    assert!(
        once >= (net.staging.buffer_len * net.staging.buffer_count) as u64,
        "the pool is smaller than requested"
    );
    once
}

/// REL-01: a transfer in which a call of the copy engine fails reports that error and leaks
/// nothing. The next transfer succeeds. Each call fails in turn.
pub(crate) fn faults_drain_the_pipeline(net: &Net, len: u64, kinds: &[CompletionKind]) {
    let staged = net.near.device(&net.device, len + 64, LOCAL).expect("stage device memory");
    let far = net.far.host(len + 64, LOCAL | REMOTE);
    for kind in kinds {
        let mut failed = 0;
        for call in [DeviceCall::CopyAsync, DeviceCall::EngineCopy, DeviceCall::Copy] {
            for nth in 1.. {
                // The buffers are filled before the fault is armed, as that uses the same engine.
                let bytes = pattern(len, nth);
                if *kind == CompletionKind::Read {
                    far.put(0, &bytes)
                } else {
                    staged.put(0, &bytes)
                }
                net.device.faults().fail_nth(call, nth, Errno(5));
                let ended = net.transfer(*kind, &[staged.slice(0, len)], (&far, 0, len));
                let reached = ended.is_err();
                net.device.faults().clear();
                net.assert_idle();
                if let Err(error) = ended {
                    assert_eq!(
                        error.os_errno(),
                        Some(Errno(5)),
                        "{kind:?}, {call:?} {nth}: {error}"
                    );
                    settle(net);
                }
                if !reached {
                    break;
                }
                failed += 1;
            }
        }
        assert!(
            failed >= len / net.staging.buffer_len as u64,
            "only {failed} calls failed in {kind:?}"
        );
        moves(net, *kind, &[(&staged, 1, len)], (&far, 2, len));
    }
}

/// Reads the completions of a failed transfer. Connects again if the failure ended the connection.
pub(crate) fn settle(net: &Net) {
    net.connect();
    let mut left = Vec::new();
    net.far.cq.read(&mut left, 64).expect("read completions");
    net.near.cq.read(&mut left, 64).expect("read completions");
    for completion in left {
        let error = completion.result.expect_err("only canceled requests are left");
        assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
    }
}

/// BNC-02: transfers wait if there are more of them than buffers. All arrive, and the number of
/// buffers never grows.
pub(crate) fn an_exhausted_pool_makes_transfers_wait(net: &Net, count: u64) {
    let chunk = net.staging.buffer_len as u64;
    let len = chunk * 3 + 1;
    let staged = net.near.device(&net.device, len * count, LOCAL).expect("stage device memory");
    let again = net.near.device(&net.device, 8, LOCAL).expect("stage device memory");
    let before = staging_bytes(net);
    let far = net.far.host(len * count, LOCAL | REMOTE);
    let bytes = pattern(len * count, 3);
    staged.put(0, &bytes);
    let key = far.region().key().expect("a key");
    for context in 0..count {
        let remote =
            [RemoteSegment { address: Iova(key.base().0 + context * len), len, key: &key }];
        let local = [staged.slice(context * len, len)];
        net.near.endpoint.write(&local, &remote, net.peer, context).expect("there is room to post");
        assert!(net.near.slots() <= net.staging.buffer_count as u64);
    }
    let (ended, _) = net.complete(count as usize, 0);
    for (completion, context) in ended.into_iter().zip(0..) {
        assert_eq!(
            completion.context, context,
            "requests end in the order in which they were posted"
        );
        assert_eq!(completion.result.expect("it arrives"), len);
    }
    assert!(far.get(0, len * count) == bytes);
    assert_eq!(net.near.domain.staging_bytes(), before, "the pool grew, or was registered twice");
    assert_eq!(net.far.domain.staging_bytes(), 0, "a domain without staged regions has no pool");
    net.assert_idle();
    drop((staged, again));
    assert_eq!(net.near.domain.staging_bytes(), before, "the pool serves regions to come");
}
