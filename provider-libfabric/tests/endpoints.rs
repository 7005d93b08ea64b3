//! Transfers between two processes over an installed libfabric (`HMEM_LIBFABRIC_LIBRARY`).

mod target;
#[path = "../../tests/trials/mod.rs"]
mod trials;
mod watchdog;

use std::{
    collections::VecDeque,
    env, fs,
    process::{Child, ExitCode},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use hmem_conformance::{
    link::{Bytes, LinkSide},
    stale::{ReusableMemory, StaleCounts},
};
use hmem_core::{
    Access, AddressRange, Atomic, CacheAttr, Domain, DomainAttr, Endpoint, ErrorKind, Iface,
    MrMode, Promise, Raw, Region, Registry, Result,
    counter::Counter,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, ProgressModel, Provider},
    transfer::{AtomicOp, AtomicType, Completion, CompletionKind, EndpointName, PeerId},
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::Libfabric;
use target::{CHILD, SOON, Target, build, commands, hex, pattern, providers, sum, turn, unhex};
use trials::{Outcome, Skipped, trials};

/// The length of the exposed memory.
const LEN: usize = 256 << 10;

/// The length of the buffer of a receive. The child posts `RECEIVES` of them.
const INBOX: usize = 4096;
const RECEIVES: u64 = 8;

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LOCAL: Access = Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);

/// One side of a connection.
struct Side {
    endpoint: Endpoint,
    queue: Arc<dyn CompletionQueue>,
    domain: Domain,
    counters: [Arc<Counter>; 2],
}

impl Side {
    fn open(provider: &Libfabric, cache: Option<CacheAttr>) -> Self {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::default())).expect("host memory");
        let paths = Arc::new(DefaultPathSelector::new());
        let mr_mode = provider.nics().expect("list")[0].required_mr_mode;
        let attr = DomainAttr { mr_mode, cache, ..DomainAttr::default() };
        let domain = Domain::open(provider, Arc::new(registry), paths, attr).expect("open");
        let queue = domain.open_cq(256).expect("open a queue");
        let counters = [(); 2].map(|()| Arc::new(Counter::new()));
        let [tx, rx] = counters.each_ref().map(|counter| Some(Arc::clone(counter)));
        let attr = EndpointAttr { tx_counter: tx, rx_counter: rx, ..EndpointAttr::new(&queue) };
        let endpoint = domain.open_endpoint(&attr).expect("open an endpoint");
        Self { endpoint, queue, domain, counters }
    }

    fn region(&self, bytes: Vec<u8>, access: Access) -> Region<Vec<u8>> {
        self.domain.register(bytes, access).expect("register")
    }

    /// Returns true if the provider carries immediate data. libfabric 1.17 over verbs does not.
    fn carries_data(&self) -> bool {
        self.domain.provider_attr().cq_data_size > 0
    }

    /// Waits for the next completion.
    fn next(&self) -> Completion {
        let mut done = Vec::new();
        self.queue.wait(&mut done, 1, SOON).expect("wait");
        let nic = &self.domain.provider_attr().nic;
        assert!(!done.is_empty(), "{nic}: nothing completed within {SOON:?}");
        done.remove(0)
    }
}

/// The child: exposes memory and prints what arrives, until its input ends.
fn child(provider: &str) -> ExitCode {
    let (provider, thread) = match provider.strip_suffix("+thread") {
        Some(provider) => (provider, true),
        None => (provider, false),
    };
    let provider = build(provider, thread).expect("build");
    let side = Side::open(&provider, None);
    let memory = side.region(vec![0; LEN], REMOTE);
    let inbox = side.region(vec![0; INBOX * RECEIVES as usize], LOCAL);
    let slice = |at: u64| inbox.slice(at * INBOX as u64, INBOX as u64).expect("inside");
    for at in 0..RECEIVES {
        // The last receives are for messages with a tag.
        let tag = (at >= 6).then_some((at, 0));
        side.endpoint.receive(&[slice(at)], tag, at).expect("post");
    }
    println!("name {}", hex(&side.endpoint.name().0));
    println!("key {}", hex(&memory.key().expect("a key").to_bytes()));
    let input = commands();
    let (mut peer, mut idle) = (None, false);
    loop {
        match input.try_recv() {
            Ok(line) => {
                let mut words = line.split(' ');
                match (words.next(), words.next()) {
                    (Some("peer"), Some(name)) => {
                        let name = EndpointName(unhex(name));
                        peer = Some(side.endpoint.resolve(&name).expect("resolve"));
                    }
                    (Some("idle"), _) => idle = true,
                    (Some("sum"), Some(len)) => {
                        let mut bytes = vec![0; len.parse().expect("a length")];
                        memory.read(0, &mut bytes).expect("read");
                        println!("sum {}", sum(&bytes));
                    }
                    (Some("send"), Some(data)) => {
                        inbox.write(0, &pattern(9, 100)).expect("write");
                        let from = inbox.slice(0, 100).expect("inside");
                        let data = data.parse().expect("a number");
                        let peer = peer.expect("a peer");
                        let sent = match side.carries_data() {
                            true => side.endpoint.send_immediate(&[from], None, data, peer, 99),
                            false => side.endpoint.send(&[from], None, peer, 99),
                        };
                        sent.expect("post");
                    }
                    other => panic!("{other:?}"),
                }
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return ExitCode::SUCCESS,
        }
        if idle {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        let mut done = Vec::new();
        side.queue.read(&mut done, 8).expect("read completions");
        for completion in done {
            let bytes = completion.result.expect("completion");
            let mut text = vec![0; if completion.context < RECEIVES { INBOX } else { 0 }];
            if !text.is_empty() {
                inbox.read(completion.context * INBOX as u64, &mut text).expect("read");
            }
            let shown = sum(&text[..(bytes as usize).min(text.len())]);
            let (data, tag) = (completion.data.unwrap_or(0), completion.tag.unwrap_or(0));
            println!("{:?} {} {bytes} {data} {tag} {shown}", completion.kind, completion.context);
        }
        thread::yield_now();
    }
}

fn write(
    side: &Side,
    from: &Region<Vec<u8>>,
    target: &Target,
    peer: PeerId,
    len: u64,
) -> Completion {
    let (from, to) = (from.slice(0, len).expect("inside"), target.key.slice(0, len));
    side.endpoint.write(&[from], &[to.expect("inside")], peer, 1).expect("post");
    side.next()
}

fn verified_bytes_move_between_processes() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let mut target = Target::start(name);
        let provider = build(name, false).expect("build");
        let side = Side::open(&provider, None);
        let peer = side.endpoint.resolve(&target.name).expect("resolve");
        assert_eq!(side.endpoint.resolve(&target.name).expect("again"), peer);
        target.tell(&format!("peer {}", hex(&side.endpoint.name().0)));
        let local = side.region(vec![0; LEN], LOCAL);
        let mut posted = 0;
        // Lengths that are copied at the post, buffered, and moved in many pieces.
        for (seed, len) in [1, 8, 100, 4097, 70_001, LEN].into_iter().enumerate() {
            let bytes = pattern(seed as u64, len);
            local.write(0, &bytes).expect("write");
            let done = write(&side, &local, &target, peer, len as u64);
            assert_eq!(
                (done.kind, done.result.expect("write")),
                (CompletionKind::Write, len as u64)
            );
            target.tell(&format!("sum {len}"));
            assert_eq!(
                target.line_while(&side.domain, "sum "),
                sum(&bytes).to_string(),
                "{name}: {len}"
            );
            local.write(0, &vec![0; len]).expect("clear");
            let into = local.slice(0, len as u64).expect("inside");
            let from = target.key.slice(0, len as u64).expect("inside");
            side.endpoint.read(&[into], &[from], peer, 2).expect("post");
            assert_eq!(side.next().result.expect("read"), len as u64);
            let mut found = vec![0; len];
            local.read(0, &mut found).expect("read");
            assert_eq!(sum(&found), sum(&bytes), "{name}: {len} bytes read");
            posted += 2;
        }
        // A write with data consumes the first receive, and messages the next ones.
        let first = u64::from(side.carries_data());
        local.write(0, &pattern(5, 300)).expect("write");
        let (from, to) = (local.slice(0, 300).expect("inside"), target.key.slice(0, 300));
        let to = [to.expect("inside")];
        let posted_data = side.endpoint.write_immediate(&[from], &to, 0xABCD_EF01, peer, 3);
        if side.carries_data() {
            posted_data.expect("post");
            assert_eq!(side.next().result.expect("write with data"), 300);
            let zeros = sum(&[0; 300]);
            let expected = format!("RemoteWrite 0 300 {} 0 {zeros}", 0xABCD_EF01_u32);
            assert_eq!(target.line_while(&side.domain, ""), expected, "{name}");
        } else {
            assert_eq!(posted_data.expect_err("no data").kind(), ErrorKind::Unsupported);
        }
        for (context, len) in [(first, 0), (first + 1, 1), (first + 2, INBOX)] {
            local.write(0, &pattern(context, len)).expect("write");
            let from = local.slice(0, len as u64).expect("inside");
            side.endpoint.send(&[from], None, peer, 4).expect("post");
            assert_eq!(side.next().result.expect("send"), len as u64);
            let expected = format!("Receive {context} {len} 0 0 {}", sum(&pattern(context, len)));
            assert_eq!(target.line_while(&side.domain, ""), expected, "{name}");
        }
        for tag in [7, 6] {
            let from = local.slice(0, 10).expect("inside");
            side.endpoint.send(&[from], Some(tag), peer, 5).expect("post");
            side.next().result.expect("send with a tag");
            let line = target.line_while(&side.domain, "Receive ");
            assert!(line.starts_with(&format!("{tag} 10 0 {tag} ")), "{name}: {line}");
        }
        posted += 5 + first;
        // A message of the child.
        let inbox = side.region(vec![0; 100], LOCAL);
        side.endpoint.receive(&[inbox.slice(0, 100).expect("inside")], None, 6).expect("post");
        target.tell("send 77");
        let done = side.next();
        let data = side.carries_data().then_some(77);
        assert_eq!((done.context, done.data, done.result.expect("message")), (6, data, 100));
        let mut found = [0; 100];
        inbox.read(0, &mut found).expect("read");
        assert_eq!(found.to_vec(), pattern(9, 100));
        let line = target.line_while(&side.domain, "Send 99 ");
        assert!(line.starts_with("100 "), "{line}");
        atomics(&side, &target, &local, peer, name);
        let [tx, rx] = &side.counters;
        assert!(tx.value() >= posted && tx.errors() == 0, "{name}: {tx:?}");
        assert_eq!((rx.value(), rx.errors()), (1, 0));
        target.end();
    }
    Ok(())
}

/// Adds to a number of the target, and swaps it, if the provider has atomics.
fn atomics(side: &Side, target: &Target, local: &Region<Vec<u8>>, peer: PeerId, name: &str) {
    local.write(0, &40_u64.to_le_bytes()).expect("write");
    write(side, local, target, peer, 8).result.expect("write");
    let slice = |at| local.slice(at, 8).expect("inside");
    let (remote, datatype) = (target.key.slice(0, 8).expect("inside"), AtomicType::U64);
    let run = |op, operand: u64, compare: Option<u64>| -> Result<u64> {
        local.write(0, &operand.to_le_bytes()).expect("write");
        local.write(16, &compare.unwrap_or(0).to_le_bytes()).expect("write");
        let (operand, result) = (slice(0), Some(slice(8)));
        let compare = compare.map(|_| slice(16));
        let atomic = Atomic { op, datatype, remote, operand, result, compare };
        side.endpoint.atomic(&atomic, peer, 8)?;
        side.next().result?;
        let mut old = [0; 8];
        local.read(8, &mut old).expect("read");
        Ok(u64::from_le_bytes(old))
    };
    match run(AtomicOp::Sum, 2, None) {
        Err(error) if name == "tcp" => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        old => {
            assert_eq!(old.expect("add"), 40, "{name}");
            assert_eq!(run(AtomicOp::Cswap, 7, Some(1)).expect("swap"), 42, "{name}");
            assert_eq!(run(AtomicOp::Cswap, 7, Some(42)).expect("swap"), 42, "{name}");
            assert_eq!(run(AtomicOp::Bxor, 1, None).expect("xor"), 7, "{name}");
        }
    }
}

fn target_with_a_thread_needs_no_calls() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let provider = build(name, true).expect("build");
        assert_eq!(provider.nics().expect("list")[0].progress, ProgressModel::Thread);
        let mut target = Target::start(&format!("{name}+thread"));
        let side = Side::open(&provider, None);
        assert!(side.domain.provider_domain().manual_progress().is_none());
        let peer = side.endpoint.resolve(&target.name).expect("resolve");
        target.tell("idle");
        let local = side.region(pattern(3, LEN), LOCAL);
        for _ in 0..4 {
            let done = write(&side, &local, &target, peer, LEN as u64);
            assert_eq!(done.result.expect("write"), LEN as u64, "{name}");
        }
        target.tell(&format!("sum {LEN}"));
        assert_eq!(target.line("sum "), sum(&pattern(3, LEN)).to_string(), "{name}");
        target.end();
    }
    Ok(())
}

fn requests_to_a_dead_peer_end_with_errors_and_a_new_peer_works() -> Outcome {
    let _turn = turn();
    let shared_files = |process: &Child| {
        let start = format!("{}:", process.id());
        let files = fs::read_dir("/dev/shm").expect("list").map(|file| file.expect("a file"));
        files.filter(|file| file.file_name().to_string_lossy().starts_with(&start)).count()
    };
    for name in providers()? {
        let provider = build(name, false).expect("build");
        for round in 0..2 {
            let side = Side::open(&provider, None);
            let local = side.region(pattern(3, LEN), LOCAL);
            let mut target = Target::start(name);
            let peer = side.endpoint.resolve(&target.name).expect("resolve");
            write(&side, &local, &target, peer, LEN as u64).result.expect("write");
            // The child makes no progress, so that the requests are in flight when it dies.
            target.tell("idle");
            thread::sleep(Duration::from_millis(50));
            // A NIC writes to the memory of a process that makes no progress.
            let by_nic = name.starts_with("verbs");
            if by_nic {
                target.process.kill().expect("kill");
                target.process.wait().expect("wait");
            }
            for context in 0..3 {
                let (from, to) = (local.slice(0, LEN as u64), target.key.slice(0, LEN as u64));
                let (from, to) = ([from.expect("inside")], [to.expect("inside")]);
                side.endpoint.write(&from, &to, peer, context).expect("post");
                side.endpoint
                    .send(&[local.slice(0, 64).expect("inside")], None, peer, context + 10)
                    .expect("post");
            }
            if !by_nic {
                target.process.kill().expect("kill");
            }
            target.process.wait().expect("wait");
            let mut ended = VecDeque::from_iter((0..6).map(|_| side.next()));
            // A message may have been sent before the peer died. A write is not in its memory.
            ended.retain(|done| done.kind == CompletionKind::Write);
            assert_eq!(ended.len(), 3);
            for done in ended {
                let error = done.result.expect_err("the peer was dead");
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{name}: {}", error.full());
            }
            if round == 0 {
                let (from, to) = (local.slice(0, 8).expect("inside"), target.key.slice(0, 8));
                match side.endpoint.write(&[from], &[to.expect("inside")], peer, 20) {
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
                    Ok(()) => {
                        assert_ne!(name, "shm", "a post to a peer that was reported dead");
                        assert!(side.next().result.is_err(), "written to a dead peer");
                    }
                }
            }
            assert_eq!(shared_files(&target.process), 0, "{name}: files of the dead process");
            let Side { endpoint, queue, domain, .. } = side;
            endpoint.close().expect("close");
            drop((queue, local));
            domain.close().expect("close the domain");
        }
    }
    Ok(())
}

fn names_of_other_providers_and_damaged_names_are_refused() -> Outcome {
    let _turn = turn();
    let sides: Vec<_> = providers()?
        .into_iter()
        .map(|name| Side::open(&build(name, false).expect("build"), None))
        .collect();
    for (at, side) in sides.iter().enumerate() {
        for (other, far) in sides.iter().enumerate() {
            let name = far.endpoint.name();
            let resolved = side.endpoint.resolve(&name).map_err(|error| error.kind());
            let expected = if at == other { Ok(()) } else { Err(ErrorKind::Unreachable) };
            assert_eq!(resolved.map(drop), expected);
            let short = EndpointName(name.0[..name.0.len() - 1].to_vec());
            let error = side.endpoint.resolve(&short).expect_err("truncated");
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        }
        let bytes = vec![1_u8; 8];
        let region = side.region(bytes, LOCAL);
        let from = [region.slice(0, 8).expect("inside")];
        let error = side.endpoint.send(&from, None, PeerId(1), 1).expect_err("no such peer");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    Ok(())
}

fn region_of_several_ranges_is_reached_through_its_composite_key() -> Outcome {
    let _turn = turn();
    for name in providers()? {
        let provider = build(name, true).expect("build");
        let (near, far) = (Side::open(&provider, None), Side::open(&provider, None));
        let peer = near.endpoint.resolve(&far.endpoint.name()).expect("resolve");
        let buffer = vec![0_u8; 3 * 4096];
        let range = |at: usize| AddressRange::of(&buffer[at * 4096..][..1000]);
        // SAFETY: the buffer outlives the region, and nothing uses it before the region is closed.
        let memory = unsafe { Raw::new(Box::from([range(2), range(0)]), Promise::ReadWrite) };
        let region = far.domain.register(memory, REMOTE).expect("register");
        let key = region.key().expect("a key");
        let local = near.region(pattern(4, 2000), LOCAL);
        // Local and remote parts have other boundaries than each other.
        let local_parts = [(0, 300), (300, 900), (1200, 800)];
        let local_parts = local_parts.map(|(at, len)| local.slice(at, len).expect("inside"));
        // Virtual addresses have a gap between the ranges, and zero-based ones have none.
        let first = if near.domain.mr_mode().contains(MrMode::VIRT_ADDR) { 1000 } else { 900 };
        let segments = [(0, first), (first, 2000 - first)];
        let segments = segments.map(|(at, len)| key.slice(at, len).expect("inside"));
        near.endpoint.write(&local_parts, &segments, peer, 1).expect("post");
        assert_eq!(near.next().result.expect("write"), 2000, "{name}");
        drop(region);
        let found = [&buffer[8192..][..1000], &buffer[..1000]].concat();
        assert_eq!(found, pattern(4, 2000), "{name}");
    }
    Ok(())
}

/// A page that is unmapped and mapped again at its address.
struct Page(usize);

impl Page {
    fn map(at: usize) -> Self {
        let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: new pages, or pages at the address of a page that was unmapped just now.
        let page =
            unsafe { libc::mmap(at, 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED);
        Self(page.expose_provenance())
    }
}

impl ReusableMemory for Page {
    fn range(&self) -> Result<AddressRange> {
        AddressRange::new(hmem_core::Address(self.0 as u64), 4096)
    }

    fn renew(&mut self, _round: u64) -> Result<()> {
        let page = std::ptr::with_exposed_provenance_mut(self.0);
        // SAFETY: the page of this value, which nothing else uses.
        assert_eq!(unsafe { libc::munmap(page, 4096) }, 0);
        *self = Self::map(self.0);
        Ok(())
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        // SAFETY: the page is mapped, longer than a transfer, and no transfer is in flight.
        unsafe {
            let page = std::ptr::with_exposed_provenance_mut::<u8>(self.0);
            page.copy_from(from.as_ptr(), from.len());
        }
        Ok(())
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        // SAFETY: the page is mapped, longer than a transfer, and no transfer is in flight.
        unsafe {
            let page = std::ptr::with_exposed_provenance::<u8>(self.0);
            into.as_mut_ptr().copy_from(page, into.len());
        }
        Ok(())
    }
}

fn cache_has_no_stale_hit_and_registers_again_after_each_change() -> Outcome {
    const ROUNDS: u64 = 300;
    let _turn = turn();
    for name in providers()? {
        let provider = build(name, false).expect("build");
        assert_eq!(provider.nics().expect("list")[0].driver_cache, None);
        let side = Side::open(&provider, Some(CacheAttr::default()));
        let (mut page, mut counts) = (Page::map(0), StaleCounts::default());
        // SAFETY: the page belongs to the test alone. A stale registration reaches the pages that
        // the test has mapped, or mapped before.
        let run = unsafe { counts.run(&side.domain, &mut page, ROUNDS) };
        run.expect("rounds");
        assert_eq!((counts.rounds, counts.reused, counts.stale), (ROUNDS, ROUNDS, 0), "{name}");
        let statistics = side.domain.cache().expect("a cache").statistics();
        // The second lookup of a round hits, and the first one of the next round does not.
        assert!(statistics.hits <= ROUNDS, "{name}: a registration outlived its memory");
        assert!(statistics.hits > ROUNDS / 2, "{name}: {statistics:?}");
    }
    Ok(())
}

fn dma_buf_of_device_memory_is_written_and_read_by_a_peer() -> Outcome {
    const LEN: usize = 64 << 10;
    let _turn = turn();
    if env::var_os("HMEM_VERBS_DMA_BUF").is_none() {
        return Err(Skipped("the driver of the NIC imports no dma-bufs".into()));
    }
    let builder = Libfabric::builder().provider("verbs;ofi_rxm").progress_thread(true);
    // SAFETY: the test has its turn, and closes regions without transfers in flight.
    let provider = unsafe { builder.dma_buf(true).build() }.expect("build");
    if !provider.nics().expect("list")[0].imports.dma_buf {
        return Err(Skipped("libfabric before 1.20 imports no dma-bufs".into()));
    }
    let device: Arc<dyn Iface> =
        Arc::new(Simulated::builder().build().expect("a simulated device"));
    let mut registry = Registry::new();
    registry.add(Arc::new(System::default())).expect("host memory");
    registry.add(Arc::clone(&device)).expect("device memory");
    let mr_mode = provider.nics().expect("list")[0].required_mr_mode;
    let attr = DomainAttr { mr_mode, p2p: P2pPolicy::Required, ..DomainAttr::default() };
    let paths = Arc::new(DefaultPathSelector::new());
    let far = Domain::open(&provider, Arc::new(registry), paths, attr).expect("open");
    let far = LinkSide::open(far, false, None).expect("open an endpoint");
    let near = Side::open(&provider, None);
    let peer = near.endpoint.resolve(&far.endpoint.name()).expect("resolve");
    let memory = Bytes::on_device(&device, 0, LEN + 4096);
    // The range begins inside a page.
    let region = far.expose(memory.part(100, LEN as u64), REMOTE);
    let path = format!("{:?}", region.decision());
    let key = region.key().expect("a key");
    let remote = || [key.slice(0, LEN as u64).expect("inside")];
    let local = near.region(pattern(6, LEN), LOCAL);
    let part = || [local.slice(0, LEN as u64).expect("inside")];
    near.endpoint.write(&part(), &remote(), peer, 1).expect("post");
    assert_eq!(near.next().result.expect("write"), LEN as u64, "{path}");
    assert_eq!(sum(&memory.get(100, LEN)), sum(&pattern(6, LEN)), "{path}");
    assert_eq!(memory.get(0, 100), [0; 100], "bytes before the range");
    memory.put(100, &pattern(7, LEN));
    near.endpoint.read(&part(), &remote(), peer, 2).expect("post");
    assert_eq!(near.next().result.expect("read"), LEN as u64);
    let mut found = vec![0; LEN];
    local.read(0, &mut found).expect("read");
    assert_eq!(sum(&found), sum(&pattern(7, LEN)), "{path}");
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(provider) = env::var(CHILD) {
        return child(&provider);
    }
    trials! { const TESTS;
        /// FAB-04
        verified_bytes_move_between_processes,
        /// FAB-06
        target_with_a_thread_needs_no_calls,
        /// FAB-08
        requests_to_a_dead_peer_end_with_errors_and_a_new_peer_works,
        /// FAB-04
        names_of_other_providers_and_damaged_names_are_refused,
        /// FAB-03
        region_of_several_ranges_is_reached_through_its_composite_key,
        /// FAB-05
        cache_has_no_stale_hit_and_registers_again_after_each_change,
    }
    trials! { const DEVICE_TESTS;
        /// FAB-10
        dma_buf_of_device_memory_is_written_and_read_by_a_peer,
    }
    let devices = env::var_os("HMEM_VERBS_DEVICE").is_some();
    trials::run(&if devices { [TESTS, DEVICE_TESTS].concat() } else { TESTS.to_vec() })
}
