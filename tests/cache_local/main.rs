//! Transfers of local memory without a descriptor, on a NIC that needs descriptors. The domain's
//! cache registers the memory and keeps it registered until the transfer ends. With a NIC that pins
//! pages, a stale registration moves stale bytes.

#[path = "../counting/mod.rs"]
mod counting;
#[path = "../machine/mod.rs"]
mod machine;
mod net;
mod pages;
#[path = "../silent/mod.rs"]
mod silent;
#[path = "../trials/mod.rs"]
mod trials;

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU32,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread,
};

use hmem::{
    Access, Address, Addressing, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, DomainAttr,
    Endpoint, Errno, ErrorKind, Hmem, Iface, MrMode, Type2Bind, Type2Kind,
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    provider::EndpointAttr,
    system::{
        AddressReuse, Simulated,
        monitor::{HostMonitorKind, ImportMonitor},
    },
    transfer::{AtomicOp, AtomicType, LocalSegment, Operation, PeerId, WorkRequest},
};
use net::{Net, nic, with_imported_monitor};
use pages::Pages;
use rustix::param::page_size;
use silent::Silent;
use trials::{Outcome, skip, trials};

trials! {
    /// MR-07
    remapped_local_memory_moves_its_new_bytes,
    /// MR-07
    unreported_changes_give_stale_transfers,
    /// EVT-05
    wait_ends_leases_and_returns_the_applications_context,
    transfers_of_the_same_memory_register_it_once,
    /// CACHE-08
    changed_memory_stays_registered_until_its_completion,
    closing_an_endpoint_ends_leases_and_keeps_contexts,
    endpoint_that_cannot_be_closed_keeps_its_leases,
    any_drop_order_of_endpoint_queue_and_domain_leaves_nothing,
    a_refused_request_holds_no_lease,
    a_transfer_whose_memory_is_cached_allocates_nothing,
    completions_carry_the_applications_contexts_unchanged,
    lists_atomics_and_empty_segments_need_no_descriptor,
    /// MODE-03
    missing_descriptor_without_a_usable_cache_is_refused,
    /// MON-07
    device_memory_in_hmem_mode_is_never_a_stale_hit,
    concurrent_posts_and_reads_leave_no_lease,
}

/// First bits of the contexts that a queue uses internally. An application's contexts may begin
/// with them too.
const MARKED: u64 = 0xCAC4 << 48;

/// In each round, writes from, reads into or sends from a new page at a reused address. Returns the
/// number of rounds in which the NIC accessed an earlier page.
fn stale_transfers(hmem: &Hmem, rounds: u32) -> u32 {
    let net = Net::open(hmem, MrMode::LOCAL);
    let mut pages = Pages::new(page_size());
    let into = net.far.slice(0, 16).expect("inside");
    let mut stale = 0;
    for round in 0..rounds {
        let byte = (round % 250) as u8 + 1;
        pages.fill(byte);
        match round % 3 {
            0 => {
                net.write(&[pages.bare(0, 16)], 1).expect("posted");
                assert_eq!(net.done(1), 16);
                stale += u32::from(net.far_bytes(16) != [byte; 16]);
            }
            1 => {
                net.far.write(0, &[!byte; 16]).expect("inside");
                net.read(&[pages.bare(0, 16)], 2).expect("posted");
                assert_eq!(net.done(2), 16);
                stale += u32::from(pages.byte(15) != !byte);
            }
            _ => {
                net.far_endpoint.receive(&[into], None, 3).expect("posted");
                net.post(Operation::Send { tag: None, invalidate: None }, &[pages.bare(0, 16)], 4)
                    .expect("posted");
                assert_eq!(net.done(4), 16);
                net.wait(&net.far_cq).result.expect("received");
                stale += u32::from(net.far_bytes(16) != [byte; 16]);
            }
        }
        pages.replace();
    }
    net.assert_nothing_left();
    stale
}

fn remapped_local_memory_moves_its_new_bytes() -> Outcome {
    skip(machine::without_pinned_pages())?;
    let builder = Hmem::builder().without_vendor_ifaces().cache_monitor(HostMonitorKind::MemHooks);
    let hmem = builder.provider(nic().build().expect("a NIC")).build().expect("memhooks work here");
    assert_eq!(stale_transfers(&hmem, 3_000), 0);
    Ok(())
}

fn unreported_changes_give_stale_transfers() -> Outcome {
    skip(machine::without_pinned_pages())?;
    let (hmem, _silent) = with_imported_monitor(nic());
    assert!(stale_transfers(&hmem, 30) >= 20, "the rounds do not notice a stale registration");
    Ok(())
}

fn wait_ends_leases_and_returns_the_applications_context() {
    let (hmem, _import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(page_size());
    net.write(&[pages.bare(0, 16)], 21).expect("posted");
    let mut done = Vec::new();
    assert_eq!(net.cq.wait(&mut done, 1, std::time::Duration::MAX).expect("wait"), 1);
    assert_eq!(done[0].context, 21);
    net.assert_nothing_left();
}

fn transfers_of_the_same_memory_register_it_once() {
    let (hmem, _import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(4 * page_size());
    pages.fill(7);
    net.read(&[pages.bare(0, 4 * page_size())], 0).expect("posted");
    net.done(0);
    for round in 1..100 {
        net.write(&[pages.bare(round, 100)], round as u64).expect("posted");
        assert_eq!(net.done(round as u64), 100);
    }
    let now = net.statistics();
    assert_eq!((now.registrations, now.hits, now.uncached), (1, 99, 0));
    net.assert_nothing_left();
}

fn changed_memory_stays_registered_until_its_completion() {
    let (hmem, import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(page_size());
    pages.fill(9);
    net.write(&[pages.bare(0, 64)], 5).expect("posted");
    let cache = net.domain.cache().expect("a cache");
    assert_eq!((cache.statistics().leases, net.domain.live().regions), (1, 1));
    import.invalidate(pages.range());
    cache.reclaim();
    // The region is invalidated, and stays registered while the NIC uses it.
    let told = Arc::new(AtomicU32::new(0));
    let tell = Arc::clone(&told);
    cache.invalidate_with_callback(pages.range(), move || {
        tell.fetch_add(1, SeqCst);
    });
    assert_eq!((cache.statistics().pending_reclaim, net.domain.live().regions), (1, 1));
    assert_eq!(net.done(5), 64);
    assert_eq!(net.far_bytes(64), [9; 64]);
    cache.reclaim();
    assert_eq!((cache.statistics().leases, net.domain.live().regions), (0, 0));
    assert_eq!(told.load(SeqCst), 1);
}

fn closing_an_endpoint_ends_leases_and_keeps_contexts() {
    let (hmem, _import) = with_imported_monitor(nic());
    let mut net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(9 * page_size());
    pages.fill(1);
    for page in 0..4 {
        let receive = Operation::Receive { tag: None, from: None };
        net.post(receive, &[pages.bare(page * page_size(), 64)], 100 + page as u64)
            .expect("posted");
        net.write(&[pages.bare((4 + page) * page_size(), 64)], 200 + page as u64).expect("posted");
    }
    let receive = Operation::Receive { tag: None, from: None };
    let local = [pages.bare(8 * page_size(), 64)];
    let request = WorkRequest { operation: receive, local: &local, peer: PeerId(0), context: 300 };
    let other = net.domain.open_endpoint(&EndpointAttr::new(&net.cq)).expect("an endpoint");
    // SAFETY: the memory is the test's own, outlives the transfer, and no reference to it exists.
    unsafe { other.post(&request) }.expect("posted");
    assert_eq!(net.statistics().leases, 9);
    net.endpoint.take().expect("open").close().expect("closed");
    assert_eq!(net.statistics().leases, 1, "another endpoint of the queue keeps its lease");
    other.close().expect("closed");
    assert_eq!(net.statistics().leases, 0);
    let mut done = Vec::new();
    while net.cq.read(&mut done, 8).expect("the queue") > 0 {}
    let mut contexts: Vec<_> = done.iter().map(|completion| completion.context).collect();
    contexts.sort_unstable();
    assert_eq!(contexts, [100, 101, 102, 103, 200, 201, 202, 203, 300]);
    assert!(
        done.iter()
            .all(|one| one.result.as_ref().is_err_and(|why| why.kind() == ErrorKind::Canceled))
    );
    net.assert_nothing_left();
}

fn endpoint_that_cannot_be_closed_keeps_its_leases() {
    let (hmem, _import) = with_imported_monitor(nic());
    let mut net = Net::open(&hmem, MrMode::LOCAL);
    let access = Access::MW_BIND | Access::REMOTE_READ;
    let region = net.domain.register(vec![0_u8; 64], access).expect("registered");
    let window = net.domain.alloc_type_2_window(Type2Kind::A).expect("a window");
    let bind = Type2Bind {
        region: &region,
        offset: 0,
        len: 64,
        access: Access::REMOTE_READ,
        addressing: Addressing::ZeroBased,
        tag: 1,
    };
    window.post_bind(net.endpoint.as_ref().expect("open"), &bind, 1).expect("posted");
    net.done(1);
    let pages = Pages::new(page_size());
    let receive = Operation::Receive { tag: None, from: None };
    net.post(receive, &[pages.bare(0, 64)], 2).expect("posted");
    let rejected = net.endpoint.take().expect("open").close().expect_err("a window is bound");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    assert_eq!(net.statistics().leases, 1, "the NIC may still write to the memory");
    drop(window);
    rejected.value.close().expect("closed");
    assert_eq!(net.statistics().leases, 0);
}

fn any_drop_order_of_endpoint_queue_and_domain_leaves_nothing() {
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0], [1, 0, 2], [0, 2, 1], [2, 1, 0]] {
        let faults = Faults::new();
        faults.start_counting();
        let (hmem, _import) = with_imported_monitor(nic().faults(&faults));
        let cache = Some(CacheAttr::default());
        let attr = DomainAttr { mr_mode: MrMode::LOCAL, cache, ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("a domain");
        let cq = domain.open_cq(4).expect("a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let pages = Pages::new(page_size());
        let receive = Operation::Receive { tag: None, from: None };
        let request = WorkRequest {
            operation: receive,
            local: &[pages.bare(0, 64)],
            peer: PeerId(0),
            context: 1,
        };
        // SAFETY: the memory is the test's own and outlives the endpoint.
        unsafe { endpoint.post(&request) }.expect("posted");
        assert_eq!(domain.live().regions, 1);
        let mut parts: [Option<Box<dyn Send>>; 3] =
            [Some(Box::new(endpoint)), Some(Box::new(cq)), Some(Box::new(domain))];
        for part in order {
            drop(parts[part].take());
        }
        assert_eq!(
            (faults.calls(NicCall::Register), faults.calls(NicCall::Deregister)),
            (1, 1),
            "{order:?}"
        );
    }
}

fn a_refused_request_holds_no_lease() {
    let faults = Faults::new();
    // With ALLOCATED, every NIC refuses memory without pages.
    let mr_mode = MrMode::LOCAL | MrMode::ALLOCATED;
    let (hmem, _import) = with_imported_monitor(nic().needs(mr_mode).faults(&faults));
    let net = Net::with(&hmem, DomainAttr { mr_mode, ..DomainAttr::default() }, 2, 64);
    let pages = Pages::new(4 * page_size());
    // The NIC refuses the first registration of a list, or the second.
    for nth in [1, 2] {
        faults.fail_nth(NicCall::Register, nth, Errno(5));
        let error =
            net.write(&[pages.bare(0, 64), pages.bare(2 * page_size(), 64)], 1).unwrap_err();
        assert!(error.to_string().contains("EIO (5)"), "{error}");
        faults.clear();
        assert_eq!(net.statistics().leases, 0);
    }
    faults.fail_nth(NicCall::Post, 1, Errno(5));
    net.write(&[pages.bare(0, 64)], 1).unwrap_err();
    faults.clear();
    assert_eq!(net.statistics().leases, 0);
    // Fills the queue until a post is refused.
    for context in 0..2 {
        net.write(&[pages.bare(0, 64)], context).expect("posted");
    }
    assert_eq!(net.write(&[pages.bare(0, 64)], 2).unwrap_err().kind(), ErrorKind::Again);
    assert_eq!(net.statistics().leases, 2);
    (0..2).for_each(|context| assert_eq!(net.done(context), 64));
    // Transfers that fail after they were posted.
    let outside = net.remote(net.far.range().len(), 64);
    net.post(Operation::Write { remote: &outside }, &[pages.bare(0, 64)], 3).expect("posted");
    let failed = net.wait(&net.cq);
    assert_eq!((failed.context, failed.result.unwrap_err().kind()), (3, ErrorKind::OutOfBounds));
    // Memory without access rights. At unmapped addresses, another test could map memory meanwhile.
    let forbidden = Pages::new(page_size());
    forbidden.forbid();
    assert_eq!(net.write(&[forbidden.bare(0, 64)], 4).unwrap_err().kind(), ErrorKind::BadAddress);
    net.assert_nothing_left();
}

fn a_transfer_whose_memory_is_cached_allocates_nothing() {
    // The pinned mode of the software NIC allocates for each transfer, so this test does not use
    // it.
    let (hmem, _import) = with_imported_monitor(Loopback::builder().needs(MrMode::LOCAL));
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(8 * page_size());
    pages.fill(1);
    let local: Vec<_> = (0..8).map(|page| pages.bare(page * page_size(), 8)).collect();
    let mut done = Vec::with_capacity(4);
    let mut turn = || {
        let (before, _) = counting::calls();
        net.write(&local[..1], 1).expect("posted");
        net.read(&local[1..2], 2).expect("posted");
        while done.len() < 2 {
            net.cq.read(&mut done, 4).expect("the queue");
        }
        done.clear();
        counting::calls().0 - before
    };
    assert!(turn() > 0, "the first ones register, so allocations are counted");
    (0..10).for_each(|_| _ = turn());
    assert_eq!((0..100).map(|_| turn()).sum::<u64>(), 0);
    assert_eq!(net.statistics().registrations, 2);
}

fn completions_carry_the_applications_contexts_unchanged() {
    let (hmem, _import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(page_size());
    let own = net.domain.register(vec![3_u8; 64], Access::WRITE).expect("registered");
    let named = own.slice(0, 64).expect("inside");
    for round in 0..4 {
        // The queue's own context of the second request may be the first one's.
        let (marked, endpoint) = (MARKED | round << 24, net.endpoint.as_ref().expect("open"));
        endpoint.write(&[named], &net.remote(0, 64), net.peer, marked).expect("posted");
        net.write(&[pages.bare(0, 64)], 7).expect("posted");
        assert_eq!((net.done(marked), net.done(7)), (64, 64));
    }
    for context in
        [0, 1, MARKED, MARKED | 1, MARKED | (1 << 24), u64::MAX, MARKED | 0xFFFF_FFFF_FFFF]
    {
        for _ in 0..3 {
            net.write(&[pages.bare(0, 64)], context).expect("posted");
            let endpoint = net.endpoint.as_ref().expect("open");
            endpoint.write(&[named], &net.remote(0, 64), net.peer, context).expect("posted");
            assert_eq!((net.done(context), net.done(context)), (64, 64));
        }
    }
    own.close().expect("closed");
    net.assert_nothing_left();
}

fn lists_atomics_and_empty_segments_need_no_descriptor() {
    let (hmem, _import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(20 * page_size());
    for count in [1_usize, 3, 8, 9, 12] {
        pages.fill(count as u8);
        let mut local: Vec<_> = (0..count).map(|page| pages.bare(page * page_size(), 10)).collect();
        local.insert(count / 2, LocalSegment { address: Address(0x1000), len: 0, desc: None });
        net.write(&local, count as u64).expect("posted");
        assert_eq!(net.done(count as u64), 10 * count as u64);
        assert_eq!(net.far_bytes(10 * count), vec![count as u8; 10 * count]);
    }
    pages.fill(0);
    net.far.write(0, &7_u64.to_ne_bytes()).expect("inside");
    // SAFETY: the pages are mapped, and no reference into them exists.
    unsafe { ptr::with_exposed_provenance_mut::<u64>(pages.at).write(5) };
    let remote = net.remote(0, 8)[0];
    let result = pages.bare(2 * page_size(), 8);
    let sum = Operation::Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote,
        result: Some(result),
        compare: None,
    };
    net.post(sum, &[pages.bare(0, 8)], 50).expect("posted");
    net.done(50);
    assert_eq!((net.far_bytes(8), pages.byte(2 * page_size())), (12_u64.to_ne_bytes().to_vec(), 7));
    let compare = pages.bare(4 * page_size(), 8);
    // SAFETY: the pages are mapped, and nothing refers into them.
    unsafe { ptr::with_exposed_provenance_mut::<u64>(pages.at + 4 * page_size()).write(12) };
    let swap = Operation::Atomic {
        op: AtomicOp::Cswap,
        datatype: AtomicType::U64,
        remote,
        result: Some(result),
        compare: Some(compare),
    };
    net.post(swap, &[pages.bare(0, 8)], 51).expect("posted");
    net.done(51);
    assert_eq!((net.far_bytes(8), pages.byte(2 * page_size())), (5_u64.to_ne_bytes().to_vec(), 12));
    net.assert_nothing_left();
}

fn missing_descriptor_without_a_usable_cache_is_refused() {
    let (hmem, _import) = with_imported_monitor(nic());
    let net = Net::open(&hmem, MrMode::LOCAL);
    let pages = Pages::new(page_size());
    let request = |endpoint: &Endpoint, peer| {
        let remote = net.remote(0, 64);
        let operation = Operation::Write { remote: &remote };
        let request = WorkRequest { operation, local: &[pages.bare(0, 64)], peer, context: 1 };
        // SAFETY: the memory is the test's own and outlives the transfer.
        unsafe { endpoint.post(&request) }
    };
    let peer =
        net.far_endpoint.resolve(&net.endpoint.as_ref().expect("open").name()).expect("a peer");
    assert_eq!(request(&net.far_endpoint, peer).unwrap_err().kind(), ErrorKind::NoRegion);
    assert_eq!(net.statistics().registrations, 0);
}

fn device_memory_in_hmem_mode_is_never_a_stale_hit() {
    let device = Arc::new(
        Simulated::builder().address_reuse(AddressReuse::JustFreed).build().expect("a device"),
    );
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let nic = Loopback::builder().needs(MrMode::HMEM).build().expect("a NIC");
    let import = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(import);
    let hmem =
        builder.shared_iface(Arc::clone(&device) as _).provider(nic).build().expect("started");
    let net = Net::open(&hmem, MrMode::HMEM);
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let mut addresses = Vec::new();
    for round in 1..=50_u8 {
        let buffer = DeviceBuffer::allocate(&iface, &request).expect("device memory");
        buffer.write(0, &[round; 64]).expect("inside");
        let at = buffer.allocation().range.start();
        addresses.push(at);
        for context in 0..2 {
            net.write(&[LocalSegment { address: at, len: 64, desc: None }], context)
                .expect("posted");
            assert_eq!(net.done(context), 64);
            assert_eq!(net.far_bytes(64), [round; 64]);
        }
    }
    assert!(addresses.iter().all(|at| *at == addresses[0]), "the address did not come back");
    let now = net.statistics();
    assert_eq!((now.registrations, now.hits), (50, 50));
    // Host memory needs no descriptor in this mode, and is not registered.
    let pages = Pages::new(page_size());
    pages.fill(77);
    net.write(&[pages.bare(0, 64)], 9).expect("posted");
    assert_eq!((net.done(9), net.far_bytes(64)), (64, vec![77; 64]));
    assert_eq!(net.statistics().registrations, 50);
    net.assert_nothing_left();
}

fn concurrent_posts_and_reads_leave_no_lease() {
    let (hmem, import) = with_imported_monitor(nic());
    const EACH: u64 = 1_000;
    // The queue has room for all completions, since one thread reads them while three threads post.
    let attr = DomainAttr { mr_mode: MrMode::LOCAL, ..DomainAttr::default() };
    let net = Net::with(&hmem, attr, 64, 3 * EACH as usize);
    let panicked = AtomicBool::new(false);
    thread::scope(|scope| {
        let post = |thread: u64| {
            let (net, import, panicked) = (&net, &import, &panicked);
            scope.spawn(move || {
                let _tell = PanicFlag(panicked);
                let pages = Pages::new(8 * page_size());
                for number in 0..EACH {
                    let local = [pages.bare(number as usize % 8 * page_size(), 32)];
                    while net.write(&local, thread << 32 | number).is_err_and(|why| {
                        assert_eq!(why.kind(), ErrorKind::Again, "{why}");
                        true
                    }) {
                        thread::yield_now();
                    }
                    if number % 50 == 0 {
                        import.invalidate(pages.range());
                    }
                }
                pages
            })
        };
        let posting: Vec<_> = (0..3).map(post).collect();
        let mut seen = [0_u64; 3];
        let mut done = Vec::new();
        while seen.iter().sum::<u64>() < 3 * EACH {
            assert!(!panicked.load(Relaxed), "a thread that posts has panicked");
            net.cq.read(&mut done, 16).expect("the queue");
            for completion in done.drain(..) {
                assert_eq!(completion.result.expect("written"), 32);
                seen[(completion.context >> 32) as usize] += 1;
            }
        }
        assert_eq!(seen, [EACH; 3]);
        // The pages stay mapped until all transfers that read them have ended.
        posting.into_iter().for_each(|thread| drop(thread.join().expect("posted")));
    });
    net.assert_nothing_left();
}

/// Sets a flag when its thread panics, so that other threads stop waiting for it.
struct PanicFlag<'a>(&'a AtomicBool);

impl Drop for PanicFlag<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}
