//! The requests of a peer to the software NIC: writes, reads, atomics, messages and invalidations,
//! with valid, forged and stale keys, inside and outside of the regions.

use std::sync::{Arc, LazyLock};

use hmem::{
    Access, Addressing, Atomic, Domain, DomainAttr, Endpoint, Hmem, Iova, MrMode, Region,
    RegionSlice, RemoteKey, Request, Type1Window, Type2Bind, Type2Kind,
    loopback::Loopback,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{AtomicOp, AtomicType, PeerId, RemoteSegment},
};

use super::{Input, Verdict, refusal};

const LEN: u64 = 64;
/// Largest number of requests in an input.
const REQUESTS: usize = 16;
/// Number of rounds of progress after which a request without a completion is pending: a message
/// for which no receive is posted.
const ROUNDS: usize = 8;

static HMEM: LazyLock<Hmem> = LazyLock::new(|| {
    let builder = Hmem::builder().without_environment().without_vendor_ifaces();
    builder.build().expect("host memory")
});

/// One end of the transfers.
struct Side {
    domain: Domain,
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
}

impl Side {
    fn open(provider: &Loopback, mr_mode: MrMode) -> Self {
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        let domain = HMEM.domain_on(provider, attr).expect("a domain");
        let queue = domain.open_cq(64).expect("a queue");
        let attr = EndpointAttr { depth: 32, ..EndpointAttr::new(&queue) };
        let endpoint = domain.open_endpoint(&attr).expect("an endpoint");
        Self { domain, queue, endpoint }
    }

    fn register(&self, access: Access, key: u64) -> Region<Vec<u8>> {
        let memory = vec![key as u8; LEN as usize];
        self.domain.submit(Request::new(memory, access).key(key)).expect("a region")
    }
}

/// A key that the target gave to the peer.
struct Granted {
    key: RemoteKey,
    access: Access,
    /// Number of the region, and the range of the key in it.
    region: usize,
    start: u64,
}

impl Granted {
    /// Returns the offset of an access in the region, or `None` if the key does not cover it.
    fn covers(&self, number: u64, address: u64, len: u64) -> Option<u64> {
        let offset = address.wrapping_sub(self.key.base().0);
        let inside = offset <= self.key.first_len() && len <= self.key.first_len() - offset;
        (inside && self.key.as_u64().ok() == Some(number)).then(|| self.start + offset)
    }
}

/// The target of the requests: regions, windows and posted receives.
struct Target {
    side: Side,
    regions: Vec<Region<Vec<u8>>>,
    granted: Vec<Granted>,
    _window: Option<Type1Window>,
}

impl Target {
    fn new(side: Side) -> Self {
        let both = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let rights = [
            both | Access::MW_BIND,
            Access::REMOTE_READ,
            Access::REMOTE_WRITE,
            Access::REMOTE_ATOMIC,
            // Receives go to this region, and no key of it is given to peers.
            Access::RECV,
        ];
        let regions: Vec<_> =
            rights.iter().zip(1..).map(|(access, key)| side.register(*access, key)).collect();
        let mut granted: Vec<_> = (regions.iter().zip(rights).enumerate())
            .map(|(region, (memory, access))| {
                let key = memory.key().expect("a key");
                Granted { key, access, region, start: 0 }
            })
            .collect();
        let window = side.domain.alloc_type_1_window().ok();
        if let Some(window) = &window {
            let key = window.bind(&regions[0], 16, 8, Access::REMOTE_WRITE).expect("a binding");
            granted.push(Granted { key, access: Access::REMOTE_WRITE, region: 0, start: 16 });
        }
        if let Ok(window) = side.domain.alloc_type_2_window(Type2Kind::B) {
            let bind = Type2Bind {
                region: &regions[0],
                offset: 32,
                len: 16,
                access: Access::REMOTE_READ,
                addressing: Addressing::ZeroBased,
                tag: 5,
            };
            let key = window.post_bind(&side.endpoint, &bind, 0).expect("a binding");
            while side.queue.read(&mut Vec::new(), 1).expect("the queue") == 0 {
                side.domain.progress().expect("progress");
            }
            granted.push(Granted { key, access: Access::REMOTE_READ, region: 0, start: 32 });
        }
        for (at, tag) in [(0, None), (20, None), (40, Some((7, 0)))] {
            let slice = regions[4].slice(at, 8).expect("inside");
            side.endpoint.receive(&[slice], tag, at).expect("a receive");
        }
        Self { side, regions, granted, _window: window }
    }

    /// Returns the bytes of all regions.
    fn content(&self) -> Vec<[u8; LEN as usize]> {
        let bytes = |region: &Region<Vec<u8>>| {
            let mut bytes = [0; LEN as usize];
            region.read(0, &mut bytes).expect("a read");
            bytes
        };
        self.regions.iter().map(bytes).collect()
    }

    /// Returns the region and the offset that an access may reach, or `None` if no key grants it.
    fn allows(&self, access: Access, segment: (u64, u64), len: u64) -> Option<(usize, usize)> {
        let (number, address) = segment;
        self.granted.iter().filter(|granted| granted.access.intersects(access)).find_map(
            |granted| {
                let offset = granted.covers(number, address, len)?;
                Some((granted.region, offset as usize))
            },
        )
    }
}

/// A request with one remote segment.
#[derive(Debug)]
struct Asked {
    operation: u8,
    /// Number of the key, and the address.
    segment: (u64, u64),
    len: u64,
    offset: u64,
    atomic: (u8, u8),
}

impl Asked {
    /// Reads a request. Its key is one of the target's, or any number; its address is close to the
    /// start of the target's region, or any number.
    fn read(input: &mut Input<'_>, target: &Target) -> Self {
        let [operation, key, how, len, offset, op, datatype] = input.take();
        let granted = &target.granted[usize::from(key) % target.granted.len()];
        let number = if how & 1 == 0 {
            granted.key.as_u64().expect("a key of one piece")
        } else {
            input.u64()
        };
        let address = if how & 2 == 0 {
            granted.key.base().0.wrapping_add(i64::from(input.byte() as i8) as u64)
        } else {
            input.u64()
        };
        let len = u64::from(len) % (LEN + 1);
        let offset = u64::from(offset) % (LEN + 1 - len);
        Self { operation, segment: (number, address), len, offset, atomic: (op, datatype) }
    }
}

/// The side that sends the requests.
struct Peer {
    side: Side,
    to: PeerId,
    memory: Region<Vec<u8>>,
}

impl Peer {
    fn slice(&self, offset: u64, len: u64) -> RegionSlice {
        self.memory.slice(offset, len).expect("inside")
    }

    /// Posts the request.
    fn post(&self, asked: &Asked, data: u64) -> hmem::Result<()> {
        let (number, address) = asked.segment;
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), u64::MAX, number);
        let remote = RemoteSegment { address: Iova(address), len: asked.len, key: &key };
        let (endpoint, local) = (&self.side.endpoint, [self.slice(asked.offset, asked.len)]);
        let tag = (data & 1 == 1).then_some(7);
        match asked.operation % 8 {
            0 | 1 => endpoint.write(&local, &[remote], self.to, 0),
            2 => endpoint.read(&local, &[remote], self.to, 0),
            3 => endpoint.write_immediate(&local, &[remote], data, self.to, 0),
            4 => endpoint.send(&local, tag, self.to, 0),
            5 => endpoint.send_immediate(&local, tag, data, self.to, 0),
            6 => endpoint.send_invalidate(&local, &key, self.to, 0),
            _ => {
                let (op, datatype) = asked.atomic;
                let op = AtomicOp::ALL[usize::from(op) % AtomicOp::ALL.len()];
                let datatype = AtomicType::ALL[usize::from(datatype) % AtomicType::ALL.len()];
                let compare = op.compares().then(|| self.slice(asked.offset, asked.len));
                // The old values replace the operands, so that all slices are inside the region.
                let result = (data & 2 == 2 || compare.is_some()).then(|| local[0]);
                let atomic = Atomic { op, datatype, remote, operand: local[0], result, compare };
                endpoint.atomic(&atomic, self.to, 0)
            }
        }
    }

    /// Returns the result of the posted request, or `None` if it is pending.
    fn result(&self, target: &Target) -> Option<hmem::Result<u64>> {
        let mut done = Vec::new();
        for _ in 0..ROUNDS {
            self.side.domain.progress().expect("progress");
            target.side.domain.progress().expect("progress");
            if self.side.queue.read(&mut done, 1).expect("the queue") > 0 {
                return Some(done.remove(0).result);
            }
        }
        None
    }
}

/// The first byte sets the modes of the NIC. Requests follow ([`Asked::read`]). A request that
/// succeeds must have been allowed by a key, and no request may change a byte that it was not
/// allowed to change.
pub(super) fn target(data: &[u8]) -> Verdict {
    let mut input = Input(data);
    let modes = input.byte();
    let mut mode = MrMode::LOCAL;
    mode.set(MrMode::PROV_KEY, modes & 1 != 0);
    mode.set(MrMode::VIRT_ADDR, modes & 2 != 0);
    mode.set(MrMode::ALLOCATED, modes & 2 != 0);
    let key_size = if modes & 4 == 0 { 8 } else { 4 };
    let provider = Loopback::builder().needs(mode).key_size(key_size).build();
    let provider = provider.expect("the software NIC");
    let mut target = Target::new(Side::open(&provider, mode));
    let side = Side::open(&provider, mode);
    let to = side.endpoint.resolve(&target.side.endpoint.name()).expect("an open endpoint");
    let memory = side.register(Access::all().difference(Access::COLLECTIVE), 100);
    let peer = Peer { side, to, memory };
    let mut verdict = Err("no request".to_owned());
    for _ in 0..REQUESTS {
        if input.is_empty() {
            break;
        }
        let asked = Asked::read(&mut input, &target);
        let data = input.u64();
        let before = target.content();
        let mut local = [0; LEN as usize];
        peer.memory.read(0, &mut local).expect("a read");
        let posted = peer.post(&asked, data);
        let result = match posted {
            Ok(()) => peer.result(&target),
            Err(error) => Some(Err(error)),
        };
        check(&target, &asked, result.as_ref(), &before, &local);
        let mut received = Vec::new();
        target.side.queue.read(&mut received, 64).expect("the queue");
        for number in received.iter().filter_map(|completion| completion.invalidated) {
            target.granted.retain(|granted| granted.key.as_u64().ok() != Some(number));
        }
        match result {
            Some(Ok(_)) => verdict = Ok(()),
            Some(Err(error)) => verdict = verdict.or(Err(refusal(error))),
            // Later requests wait for this one.
            None => break,
        }
    }
    verdict
}

/// Checks a request's effect on the target's memory. `before` and `local` are the bytes of the
/// target and of the peer before the request.
fn check(
    target: &Target,
    asked: &Asked,
    result: Option<&hmem::Result<u64>>,
    before: &[[u8; LEN as usize]],
    local: &[u8],
) {
    let after = target.content();
    let rights = match asked.operation % 8 {
        0 | 1 | 3 => Access::REMOTE_WRITE,
        2 => Access::REMOTE_READ,
        7 => Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::REMOTE_READ,
        _ => Access::empty(),
    };
    let allowed = target.allows(rights, asked.segment, asked.len);
    let succeeded = matches!(result, Some(Ok(_)));
    // A transfer of no byte needs a key and no address.
    if succeeded && !rights.is_empty() && asked.len > 0 {
        assert!(allowed.is_some(), "{asked:?} was not allowed");
    }
    let (source, len) = (asked.offset as usize, asked.len as usize);
    for (region, (old, new)) in before.iter().zip(&after).enumerate() {
        let changed = allowed.filter(|(reached, _)| *reached == region && succeeded);
        for (at, (old, new)) in old.iter().zip(new).enumerate() {
            let inside = changed.filter(|(_, start)| (*start..start + len).contains(&at));
            match (asked.operation % 8, inside) {
                (0 | 1 | 3, Some((_, start))) => {
                    assert_eq!(*new, local[source + at - start], "{asked:?} at {at}");
                }
                (7, Some(_)) => {}
                // Messages go to the receives of the last region: 8 bytes at 0, 20 and 40.
                (4..=6, _) if region == 4 && at % 20 < 8 && at < 48 => {}
                _ => assert_eq!(old, new, "{asked:?} changed byte {at} of region {region}"),
            }
        }
    }
}
