//! Overhead of this crate over direct verbs calls. The benchmark compares registering and closing a
//! region with `ibv_reg_mr` and `ibv_dereg_mr`, and posting and polling with the driver's own
//! calls. Calls of both sides alternate in one run. The benchmark runs over a fake library that
//! does nothing, and over the device that `HMEM_VERBS_DEVICE` names.
//!
//! The following command counts the instructions of registering and closing a region over the fake
//! library. Divide the count by the number of rounds that the benchmark prints.
//!
//! `valgrind --tool=callgrind --toggle-collect='*register_and_close*'
//! TARGET/release/deps/verbs-HASH count`
//!
//! The pattern `*post_and_read*` counts those of a transfer. The patterns `*register_and_release*`
//! and `*post_and_poll*` count those of the direct calls.

#![allow(missing_docs, reason = "a bench is a program")]

mod bare;
#[path = "../../tests/fake/mod.rs"]
mod fake;
mod raw;

use std::{
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, AddressRange, Domain, DomainAttr, Endpoint, Iova, LocalKey, Promise, Raw,
    Registry, RemoteKey,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{
        Completion, EndpointName, LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest,
    },
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{
    Verbs, VerbsDomain,
    sys::{AccessFlags, RdmaPart, Sge},
};
use raw::{RawPair, RawRegistration, RawWrite};

/// A page-aligned buffer with a fixed address.
struct Pages {
    start: u64,
    _bytes: Vec<u8>,
}

impl Pages {
    fn new(len: usize) -> Self {
        let bytes = vec![1_u8; len + 4096];
        let start = (bytes.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
        Self { start, _bytes: bytes }
    }

    /// Returns `len` bytes from `offset` as memory to register.
    ///
    /// # Safety
    /// The pages must outlive the regions of the memory.
    unsafe fn memory(&self, offset: u64, len: u64) -> Raw {
        let range = AddressRange::new(Address(self.start + offset), len).expect("inside the pages");
        // SAFETY: the caller keeps the pages alive, and no reference to their bytes is used.
        unsafe { Raw::new(range, Promise::ReadWrite) }
    }
}

/// Objects of hmem's API on which the benchmark measures its operations.
struct Ours {
    domain: Domain,
    cq: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    /// The peer, once [`Ours::connect`] has connected the endpoint.
    peer: PeerId,
}

const RIGHTS: Access = Access::READ.union(Access::WRITE).union(Access::REMOTE_WRITE);
/// The verbs flags for [`RIGHTS`]. They include REMOTE_ATOMIC, since REMOTE_WRITE of fi_mr(3) also
/// grants atomics.
const FLAGS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_ATOMIC);

impl Ours {
    fn open(verbs: &Verbs, nic: &str) -> Self {
        let attr = DomainAttr { nic: Some(nic.to_owned()), ..DomainAttr::default() };
        let domain = Domain::open(
            verbs,
            Arc::new(Registry::new()),
            Arc::new(DefaultPathSelector::new()),
            attr,
        );
        let domain = domain.expect("open a domain");
        let cq = domain.open_cq(64).expect("open a completion queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
        Self { domain, cq, endpoint, peer: PeerId(0) }
    }

    fn connect(&mut self, name: &EndpointName) {
        self.peer = self.endpoint.resolve(name).expect("connect");
    }

    #[inline(never)]
    fn register_and_close(&self, memory: Raw) {
        let region = self.domain.register(memory, RIGHTS).expect("register");
        region.close().map_err(|rejected| rejected.error).expect("close");
    }

    #[inline(never)]
    fn post_and_read(
        &self,
        local: LocalSegment,
        remote: RemoteSegment<'_>,
        out: &mut Vec<Completion>,
    ) {
        let (local, remote) = ([local], [remote]);
        let request = WorkRequest {
            operation: Operation::Write { remote: &remote },
            local: &local,
            peer: self.peer,
            context: 7,
        };
        // SAFETY: both regions stay registered and their pages stay.
        unsafe { self.endpoint.post(&request) }.expect("post");
        while self.cq.read(out, 1).expect("read") == 0 {
            thread::yield_now();
        }
        out.pop().expect("a completion").result.expect("a write");
    }
}

/// Runs both closures alternately for `rounds` rounds. Returns the mean time in nanoseconds of one
/// call of `raw` and of `ours`, for each round.
fn in_turns(
    rounds: usize,
    times: u32,
    mut raw: impl FnMut(),
    mut ours: impl FnMut(),
) -> Vec<(f64, f64)> {
    let timed = |body: &mut dyn FnMut()| {
        let started = Instant::now();
        for _ in 0..times {
            body();
        }
        started.elapsed().as_secs_f64() * 1e9 / f64::from(times)
    };
    timed(&mut raw);
    timed(&mut ours);
    (0..rounds)
        .map(|round| {
            if round % 2 == 0 {
                let raw = timed(&mut raw);
                (raw, timed(&mut ours))
            } else {
                let ours = timed(&mut ours);
                (timed(&mut raw), ours)
            }
        })
        .collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Maximum overhead of hmem over the raw verbs call.
enum Goal {
    /// Limit in nanoseconds, and limit as a fraction of the raw call's time. The larger limit
    /// applies.
    Adds(f64, f64),
    /// No limit: the report prints the times only for information.
    None,
}

fn report(what: &str, pairs: &[(f64, f64)], goal: &Goal) {
    let raw = median(pairs.iter().map(|(raw, _)| *raw).collect());
    let adds = median(pairs.iter().map(|(raw, ours)| ours - raw).collect());
    let ratio = median(pairs.iter().map(|(raw, ours)| ours / raw).collect());
    let (goal, over) = match goal {
        Goal::Adds(ns, share) => {
            let most = ns.max(raw * share);
            (format!("{most:.0}"), if adds <= most { "" } else { "  over" })
        }
        Goal::None => ("-".to_owned(), ""),
    };
    println!("{what:<52} {raw:>11.0} {adds:>9.0} {ratio:>7.3} {goal:>9}{over}");
}

fn head(title: &str) {
    println!(
        "\n{title}\n{:<52} {:>11} {:>9} {:>7} {:>9}",
        "medians of pairs, ns", "raw", "adds", "ratio", "may add"
    );
}

fn over_nothing(count: bool) {
    let verbs = Verbs::builder().functions(bare::functions()).build().expect("start");
    let mut ours = Ours::open(&verbs, "fake0");
    ours.connect(&ours.endpoint.name());
    let pages = Pages::new(1 << 16);
    // This address differs from that of the region below: the fake library derives keys from
    // addresses.
    // SAFETY: the pages outlive all regions.
    let (memory, first) = unsafe { (pages.memory(8192, 4096), pages.memory(0, 8192)) };
    let raw =
        RawRegistration { reg_mr: bare::reg_mr, dereg_mr: bare::dereg_mr, pd: ptr::null_mut() };
    let region = ours.domain.register(first, RIGHTS).expect("register");
    let (desc, key) = (region.desc().expect("desc"), region.key().expect("key"));
    let write = RawWrite {
        qp: Box::into_raw(Box::new(zeroed_pair())),
        cq: ptr::null_mut(),
        context: bare::open_device(ptr::without_provenance_mut(1)),
        from: Sge { addr: pages.start, length: 8, lkey: 1 },
        to: RdmaPart { remote_addr: pages.start, rkey: 1 },
    };
    let mut out = Vec::with_capacity(1);
    let mut ours_write = || ours.post_and_read(local(&pages, 8, desc), remote(&key, 8), &mut out);
    if count {
        let rounds = 1000;
        for _ in 0..rounds {
            raw.register_and_release(pages.start, 4096, FLAGS);
            ours.register_and_close(memory);
            write.post_and_poll();
            ours_write();
        }
        println!("{rounds} rounds of each");
        return;
    }
    head("over a libibverbs that does nothing");
    let pairs = in_turns(
        31,
        20_000,
        || raw.register_and_release(pages.start, 4096, FLAGS),
        || ours.register_and_close(memory),
    );
    report("register and close", &pairs, &Goal::Adds(1000.0, 0.0));
    report(
        "post and poll",
        &in_turns(31, 20_000, || write.post_and_poll(), &mut ours_write),
        &Goal::None,
    );
}

fn zeroed_pair() -> hmem_provider_verbs::sys::Qp {
    // SAFETY: all zeros is a valid value of this plain structure.
    unsafe { std::mem::zeroed() }
}

fn local(pages: &Pages, len: u64, desc: LocalKey) -> LocalSegment {
    LocalSegment { address: Address(pages.start), len, desc: Some(desc) }
}

fn remote(key: &RemoteKey, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0), len, key }
}

fn over_device(device: &str) {
    let verbs = Verbs::open().expect("load libibverbs");
    let (mut near, mut far) = (Ours::open(&verbs, device), Ours::open(&verbs, device));
    near.connect(&far.endpoint.name());
    far.connect(&near.endpoint.name());
    let (from, to) = (Pages::new(1 << 20), Pages::new(1 << 20));
    // SAFETY: the pages outlive all regions.
    let memory = |pages: &Pages, len| unsafe { pages.memory(0, len) };
    let near_verbs = VerbsDomain::of(&near.domain).expect("verbs");
    let raw = RawRegistration::of(near_verbs);

    head(&format!("over {device}"));
    for (what, len, times) in
        [("register and close, 4 KiB", 4096, 200), ("register and close, 1 MiB", 1 << 20, 40)]
    {
        let pairs = in_turns(
            31,
            times,
            || raw.register_and_release(from.start, len, FLAGS),
            || near.register_and_close(memory(&from, len)),
        );
        report(what, &pairs, &Goal::Adds(1000.0, 0.02));
    }

    let store = near.domain.register(memory(&from, 1 << 20), RIGHTS | Access::MW_BIND);
    let store = store.expect("register");
    let pairs = in_turns(
        31,
        40,
        || raw.register_and_release(from.start, 1 << 20, FLAGS),
        || {
            let grant = store.grant(&near.endpoint, 0..1 << 20, Access::REMOTE_READ);
            let revoked = grant.expect("grant").revoke();
            revoked.map_err(|rejected| rejected.error).expect("revoke");
        },
    );
    report("grant and revoke (raw: ibv_reg_mr, ibv_dereg_mr), 1 MiB", &pairs, &Goal::None);
    let window = near.domain.alloc_type_1_window().expect("allocate a window");
    let pairs = in_turns(
        31,
        40,
        || raw.register_and_release(from.start, 1 << 20, FLAGS),
        || {
            window.bind(&store, 0, 1 << 20, Access::REMOTE_READ).expect("bind");
            window.unbind().expect("unbind");
        },
    );
    report("type 1: bind and unbind (raw as above), 1 MiB", &pairs, &Goal::None);

    let register = |side: &Ours, pages: &Pages| {
        side.domain.register(memory(pages, 1 << 20), RIGHTS).expect("register")
    };
    let (source, target) = (register(&near, &from), register(&far, &to));
    let (desc, key) = (source.desc().expect("desc"), target.key().expect("key"));
    let pair = RawPair::connect(device, near_verbs);
    let (from_mr, to_mr) =
        (raw.register(from.start, 1 << 20, FLAGS), raw.register(to.start, 1 << 20, FLAGS));
    let mut out = Vec::with_capacity(1);
    for (what, len, times) in
        [("write 8 B: post and poll", 8_u32, 200), ("write 4 KiB: post and poll", 4096, 100)]
    {
        // SAFETY: both regions were registered just now.
        let (lkey, rkey) = unsafe { ((*from_mr).lkey, (*to_mr).rkey) };
        let write = RawWrite {
            qp: pair.near.0,
            cq: pair.near.1,
            context: pair.context,
            from: Sge { addr: from.start, length: len, lkey },
            to: RdmaPart { remote_addr: to.start, rkey },
        };
        let pairs = in_turns(
            31,
            times,
            || write.post_and_poll(),
            || {
                near.post_and_read(
                    local(&from, u64::from(len), desc),
                    remote(&key, u64::from(len)),
                    &mut out,
                )
            },
        );
        report(what, &pairs, &Goal::Adds(0.0, 0.05));
    }
    raw.release(from_mr);
    raw.release(to_mr);
}

fn main() {
    let count = std::env::args().any(|argument| argument == "count");
    let started = Instant::now();
    over_nothing(count);
    match std::env::var("HMEM_VERBS_DEVICE") {
        _ if count => return,
        Ok(device) if !device.is_empty() => over_device(&device),
        _ => println!(
            "\nnot measured: HMEM_VERBS_DEVICE names no device (`tests/vm/run --bench` has one)"
        ),
    }
    println!("\n{} s", Duration::as_secs(&started.elapsed()));
}
