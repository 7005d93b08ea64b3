//! Registration in domains of an installed libfabric (`HMEM_LIBFABRIC_LIBRARY`). The module
//! `application` is a program that opens domains and endpoints and posts requests itself.

#[path = "../../examples/own_fabric_domain/application.rs"]
mod application;
#[path = "../../tests/trials/mod.rs"]
mod trials;
mod watchdog;

use std::{
    ffi::CStr,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use application::{CallError, Endpoint, Fabric, Local, Remote, Wanted};
use hmem_core::{
    Access, AddressRange, CacheAttr, Domain, DomainAttr, ErrorKind, Growth, IfaceKind, MrMode,
    Promise, Raw, Registry, Request, Result, cache::UncachedReason, provider::Provider,
};
use hmem_iface_system::System;
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{Builder, FabricDomain, FabricMr, Libfabric, sys};
use trials::{Outcome, Skipped, trials};

/// Providers with RDM endpoints on a machine without a NIC, in every release. `tcp` alone has them
/// since 2.0.
const PROVIDERS: [&str; 3] = ["tcp;ofi_rxm", "shm", "tcp"];

/// Mode bits that a program may offer: all, and none.
const OFFERS: [i32; 2] = [Wanted::rma("tcp").mr_mode, 0];

/// Limit for all tests together. A call of libfabric that never returns ends the process.
const LIMIT: Duration = Duration::from_secs(300);

/// Loads libfabric. The first call starts the clock for [`LIMIT`].
fn functions() -> Result<sys::Functions, Skipped> {
    watchdog::start(LIMIT);
    sys::Functions::find().map_err(|error| Skipped(error.to_string()))
}

/// Opens a domain of the program. Skips the test if this release has no such domain.
fn open(wanted: Wanted) -> Result<Arc<Fabric>, Skipped> {
    Fabric::open(&functions()?, wanted)
        .map_err(|CallError(call, code)| Skipped(format!("{}: {call}: {code}", wanted.provider)))
}

/// Returns the domains of the program for each provider that this release has, and each offer of
/// mode bits.
fn domains() -> Result<Vec<(Wanted, Arc<Fabric>)>, Skipped> {
    let mut found = Vec::new();
    for provider in PROVIDERS {
        for mr_mode in OFFERS {
            let wanted = Wanted { mr_mode, ..Wanted::rma(provider) };
            match open(wanted) {
                Ok(fabric) => found.push((wanted, fabric)),
                Err(Skipped(reason)) if provider == "tcp" => println!("left out: {reason}"),
                Err(skipped) => return Err(skipped),
            }
        }
    }
    Ok(found)
}

/// Returns the mode bits and the full name of the provider of a domain.
fn description(fabric: &Fabric) -> (i32, String) {
    // SAFETY: the `fi_info` is not freed before `fabric`, and has its attributes and a name.
    unsafe {
        let name = CStr::from_ptr((*(*fabric.info).fabric_attr).prov_name);
        ((*(*fabric.info).domain_attr).mr_mode, name.to_string_lossy().into_owned())
    }
}

fn provider_of(builder: Builder, fabric: &Arc<Fabric>, version: u32) -> Result<Libfabric> {
    let (domain, info) = (fabric.domain.cast(), fabric.info.cast());
    // SAFETY: the `Arc` keeps the domain open. The tests close regions after their transfers, and
    // hold the lock of the domain where it has another model than FI_THREAD_SAFE.
    unsafe { builder.with_domain(domain, info, version, Arc::clone(fabric)) }
}

fn domain_of(provider: &Libfabric, cache: Option<CacheAttr>) -> Domain {
    let mut registry = Registry::new();
    registry.add(Arc::new(System::default())).expect("host memory");
    let attr = DomainAttr { cache, ..DomainAttr::default() };
    let paths = Arc::new(DefaultPathSelector::new());
    Domain::open(provider, Arc::new(registry), paths, attr).expect("open a domain")
}

fn borrow(fabric: &Arc<Fabric>, wanted: Wanted) -> Domain {
    let provider = provider_of(Libfabric::builder(), fabric, wanted.api_version);
    domain_of(&provider.expect("borrow the domain"), None)
}

fn local(mr: &FabricMr<'_>) -> Local {
    let (address, len) = (mr.range.start().0, mr.range.len() as usize);
    Local { address, len, descriptor: mr.descriptor() }
}

/// Opens two endpoints that know each other. Returns the target's address at the initiator.
fn pair(fabric: &Arc<Fabric>) -> (Endpoint, Endpoint, sys::fi_addr_t) {
    let open = || Endpoint::open(fabric).expect("open an endpoint");
    let (initiator, target) = (open(), open());
    let peer = initiator.insert(&target.name().expect("a name")).expect("insert");
    target.insert(&initiator.name().expect("a name")).expect("insert");
    (initiator, target, peer)
}

fn absent_library_and_unrelated_library_are_refused() -> Outcome {
    for (library, part) in
        [("/nonexistent/libfabric.so", "nonexistent"), ("libc.so.6", "fi_version")]
    {
        // SAFETY: there is no such file, or it is the C library, which has no side effects. Null
        // pointers are refused.
        let refused = unsafe {
            let builder = Libfabric::builder().library(library);
            builder.with_domain(ptr::null_mut(), ptr::null(), sys::API_VERSION, ())
        };
        let error = refused.expect_err("no libfabric");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(format!("{}", error.full()).contains(part), "{}", error.full());
        assert!(error.remedy_text().is_some(), "{error}");
    }
    Ok(())
}

fn bytes_move_with_descriptors_and_keys_in_the_programs_requests() -> Outcome {
    for (wanted, fabric) in domains()? {
        let (initiator, target, peer) = pair(&fabric);
        let domain = borrow(&fabric, wanted);
        let bytes: Vec<u8> = (0..70_000_u32).map(|at| (at * 7 % 251) as u8).collect();
        let register = |buffer, access| domain.register(buffer, access).expect("register");
        let source = register(bytes.clone(), Access::WRITE);
        let remote = register(vec![0; bytes.len()], Access::REMOTE_WRITE | Access::REMOTE_READ);
        let copy = register(vec![0; bytes.len()], Access::READ);
        let (from, to) =
            (FabricMr::of(&source).expect("keys"), FabricMr::of(&remote).expect("keys"));
        let key = to.key().expect("a remote key");
        assert_eq!(remote.key().expect("a key").as_u64().expect("one number"), key);
        assert_eq!(remote.key().expect("a key").base().0, to.base);
        let place = Remote { peer, address: to.base, key };
        // SAFETY: the regions own the memory, and nothing else accesses it during the calls.
        unsafe {
            initiator.write(&target, local(&from), place).expect("write");
            let into = local(&FabricMr::of(&copy).expect("keys"));
            initiator.read(&target, into, place).expect("read");
        }
        assert_eq!(remote.close().expect("close"), bytes, "{wanted:?}");
        assert_eq!(copy.close().expect("close"), bytes, "{wanted:?}");
        drop(source);
        assert_eq!(domain.live(), Default::default());
    }
    Ok(())
}

fn closed_region_refuses_peers() -> Outcome {
    let wanted = Wanted::rma("tcp;ofi_rxm");
    let fabric = open(wanted)?;
    let (initiator, target, peer) = pair(&fabric);
    let domain = borrow(&fabric, wanted);
    let copy = domain.register(vec![7_u8; 64], Access::READ).expect("register");
    let remote = domain.register(vec![0_u8; 64], Access::REMOTE_READ).expect("register");
    let mr = FabricMr::of(&remote).expect("keys");
    let place = Remote { peer, address: mr.base, key: mr.key().expect("a key") };
    let into = local(&FabricMr::of(&copy).expect("keys"));
    let read = || {
        // SAFETY: the copy is registered, and nothing else accesses it during the call. A closed
        // target refuses its key, and so reads nothing.
        unsafe { initiator.read(&target, into, place) }
    };
    read().expect("read");
    remote.close().expect("close");
    read().expect_err("the key of a closed region works");
    assert_eq!(copy.close().expect("close"), [0_u8; 64], "the first read alone");
    Ok(())
}

fn api_version_of_the_program_decides() -> Outcome {
    let functions = functions()?;
    // SAFETY: the call has no precondition.
    let newest = unsafe { functions.fi_version()() };
    for api_version in [sys::version(1, 9), sys::version(1, 17), sys::version(1, 20), newest] {
        if api_version > newest {
            continue;
        }
        let wanted = Wanted { api_version, ..Wanted::rma("tcp;ofi_rxm") };
        let fabric = open(wanted)?;
        let domain = borrow(&fabric, wanted);
        let region = domain.register(vec![1_u8; 64], Access::REMOTE_READ).expect("register");
        assert_eq!(FabricMr::of(&region).expect("keys").range, region.range());
        drop(region);
        for (version, kind) in
            [(newest + 1, ErrorKind::InvalidArgument), (sys::version(1, 4), ErrorKind::Unsupported)]
        {
            let refused = provider_of(Libfabric::builder(), &fabric, version);
            assert_eq!(refused.expect_err("no such version").kind(), kind);
        }
    }
    Ok(())
}

fn null_pointers_and_other_objects_are_refused() -> Outcome {
    let wanted = Wanted::rma("tcp;ofi_rxm");
    let fabric = open(wanted)?;
    let version = wanted.api_version;
    let (domain, info) = (fabric.domain.cast(), fabric.info.cast_const().cast());
    let null = ptr::null_mut();
    for (domain, info, what) in [
        (null, info, "null"),
        (domain, ptr::null(), "null"),
        (fabric.fabric.cast(), info, "another object"),
    ] {
        let keep = Arc::clone(&fabric);
        // SAFETY: the pointers are null or of live objects, and the refused call uses none later.
        let refused = unsafe { Libfabric::builder().with_domain(domain, info, version, keep) };
        let error = refused.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.remedy_text().is_some_and(|text| text.contains(what)), "{error}");
    }
    assert_eq!(Arc::strong_count(&fabric), 1, "a refused call drops the owner");
    Ok(())
}

fn nic_is_described_by_the_fi_info() -> Outcome {
    for (wanted, fabric) in domains()? {
        let provider = provider_of(Libfabric::builder(), &fabric, wanted.api_version);
        let nics = provider.expect("borrow").nics().expect("the NIC of the domain");
        let [nic] = &nics[..] else { panic!("{nics:?}") };
        let name = nic.nic.to_string();
        let (mr_mode, provider) = description(&fabric);
        let prefix = format!("libfabric/{provider}:");
        assert!(name.starts_with(&prefix) && name.len() > prefix.len(), "{name}");
        let offered = MrMode::from_bits_truncate(mr_mode.unsigned_abs());
        assert_eq!(nic.required_mr_mode, offered.difference(MrMode::ENDPOINT));
        assert!((1..=8).contains(&nic.key_size), "{nic:?}");
        assert!(!nic.imports.dma_buf && !nic.imports.staged, "{nic:?}");
        assert_eq!(nic.driver_cache, None, "software providers cache nothing");
    }
    Ok(())
}

fn domain_is_usable_and_closable_after_closing_in_any_order() -> Outcome {
    for (wanted, fabric) in domains()? {
        for order in 0..4 {
            let provider = provider_of(Libfabric::builder(), &fabric, wanted.api_version);
            let provider = provider.expect("borrow");
            let domain = domain_of(&provider, Some(CacheAttr::default()));
            let cached = domain.cache().expect("a cache").own(vec![0_u8; 8192]).expect("own");
            drop(cached.get(0, 100, Access::REMOTE_READ).expect("register"));
            drop(cached);
            let region = domain.register(vec![0_u8; 64], Access::REMOTE_READ).expect("register");
            let mut left: Vec<Box<dyn std::any::Any>> =
                vec![Box::new(provider), Box::new(domain), Box::new(region)];
            left.rotate_left(order % 3);
            if order == 3 {
                left.reverse();
            }
            drop(left);
            assert_eq!(Arc::strong_count(&fabric), 1, "order {order}");
        }
        // The program's own objects are untouched: an endpoint opens, and dropping `fabric` panics
        // if a region is left.
        drop(Endpoint::open(&fabric).expect("open an endpoint"));
    }
    Ok(())
}

fn requested_keys_are_used_and_taken_keys_are_refused() -> Outcome {
    for (wanted, fabric) in domains()? {
        if description(&fabric).0 & sys::FI_MR_PROV_KEY != 0 {
            continue;
        }
        let domain = borrow(&fabric, wanted);
        let request = |key| {
            let request = Request::new(vec![0_u8; 64], Access::REMOTE_READ);
            domain.submit(request.key(key))
        };
        let region = request(77).expect("register");
        assert_eq!(FabricMr::of(&region).expect("keys").key(), Some(77));
        let refused = request(77).expect_err("the key is taken").error;
        assert_eq!(refused.kind(), ErrorKind::NoKey, "{refused}");
        assert!(refused.remedy_text().is_some(), "{refused}");
        region.close().expect("close");
        request(77).expect("the key is free again");
    }
    Ok(())
}

fn region_of_several_ranges_has_a_key_for_each() -> Outcome {
    for (wanted, fabric) in domains()? {
        let (initiator, target, peer) = pair(&fabric);
        let domain = borrow(&fabric, wanted);
        let buffer = vec![0_u8; 3 * 4096];
        let range = |at: usize| AddressRange::of(&buffer[at * 4096..][..1000]);
        // SAFETY: the buffer outlives the region, and nothing uses it before the region is closed.
        let memory = unsafe { Raw::new(Box::from([range(2), range(0)]), Promise::ReadWrite) };
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::READ;
        let region = domain.register(memory, access).expect("register");
        let parts = FabricMr::all_of(&region).expect("keys");
        let key = region.key().expect("a key");
        let pieces: Vec<_> = key.pieces().collect();
        assert_eq!((parts.len(), pieces.len()), (2, 2));
        assert_eq!(FabricMr::of(&region).expect_err("two keys").kind(), ErrorKind::Unsupported);
        let source = domain.register(vec![9_u8; 1000], Access::WRITE).expect("register");
        let from = local(&FabricMr::of(&source).expect("keys"));
        for (part, piece) in parts.iter().zip(pieces) {
            assert_eq!((part.key(), part.base), (Some(piece.key), piece.base.0));
            let place = Remote { peer, address: part.base, key: piece.key };
            // SAFETY: both ranges are registered, and nothing else accesses them.
            unsafe {
                initiator.write(&target, from, place).expect("write");
                initiator.read(&target, local(part), place).expect("read");
            }
        }
        drop(region);
        let nines = |at: usize| buffer[at * 4096..][..1000].iter().all(|byte| *byte == 9);
        assert!(nines(0) && nines(2) && !nines(1), "{wanted:?}");
    }
    Ok(())
}

fn cache_hits_and_follows_unmapped_memory() -> Outcome {
    let wanted = Wanted::rma("tcp;ofi_rxm");
    let fabric = open(wanted)?;
    let provider = provider_of(Libfabric::builder(), &fabric, wanted.api_version).expect("borrow");
    let growth = Growth::Allocation;
    let domain = domain_of(&provider, Some(CacheAttr::default().growth(growth)));
    let cache = domain.cache().expect("a cache");
    let address = map(8192);
    let range = AddressRange::new(hmem_core::Address(address as u64), 4096).expect("a range");
    let get = || {
        // SAFETY: the memory is mapped during the call, and the lease ends before it is unmapped.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let region = cache.get(memory, Access::REMOTE_READ).expect("register");
        assert!(region.lease().uncached_reason().is_none(), "cached");
        FabricMr::of(&region).expect("keys").as_ptr()
    };
    let first = get();
    assert_eq!(get(), first, "a hit");
    assert_eq!(cache.statistics().hits, 1);
    unmap(address, 8192);
    assert!(cache.entries().is_empty(), "the region ends with its memory");
    cache.monitor(IfaceKind::SYSTEM).expect("hmem's monitor runs");
    Ok(())
}

fn map(len: usize) -> usize {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: without a fixed address the kernel maps unused addresses.
    let memory = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    memory.expose_provenance()
}

fn unmap(address: usize, len: usize) {
    // SAFETY: `map` returned the mapping, and nothing uses it.
    let unmapped = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(address), len) };
    assert_eq!(unmapped, 0);
}

fn cache_of_libfabric_is_the_only_one_in_force() -> Outcome {
    let wanted = Wanted::rma("tcp;ofi_rxm");
    let fabric = open(wanted)?;
    let builder = Libfabric::builder().libfabric_cache(true);
    let provider = provider_of(builder, &fabric, wanted.api_version).expect("borrow");
    let domain = domain_of(&provider, Some(CacheAttr::default()));
    let cache = domain.cache().expect("a cache");
    let buffer = vec![0_u8; 4096];
    let range = AddressRange::of(&buffer[..]);
    // SAFETY: the buffer outlives the region.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let region = cache.get(memory, Access::REMOTE_READ).expect("register");
    match region.lease().uncached_reason() {
        Some(UncachedReason::Unwatched(why)) => {
            assert!(why.context_value("why").is_some_and(|why| why.contains("libfabric")), "{why}");
        }
        other => panic!("cached besides libfabric's cache: {other:?}"),
    }
    let reason = &region.decision().expect("a decision").reason;
    assert!(reason.contains("libfabric's cache is in force"), "{reason}");
    drop(region);
    assert_eq!(domain.live().regions, 0, "an uncached region ends with its lease");
    let monitor = cache.monitor(IfaceKind::SYSTEM).expect_err("no monitor was started");
    assert_eq!(monitor.kind(), ErrorKind::Unsupported, "{monitor}");
    Ok(())
}

fn calls_of_a_domain_without_locks_are_serialised() -> Outcome {
    let wanted = Wanted { threading: sys::FI_THREAD_DOMAIN, ..Wanted::rma("tcp;ofi_rxm") };
    let fabric = open(wanted)?;
    let (initiator, target, peer) = pair(&fabric);
    let domain = borrow(&fabric, wanted);
    let fabric_domain = FabricDomain::of(&domain).expect("libfabric");
    let source = domain.register(vec![3_u8; 64], Access::WRITE).expect("register");
    let remote = domain.register(vec![0_u8; 64], Access::REMOTE_WRITE).expect("register");
    let mr = FabricMr::of(&remote).expect("keys");
    let place = Remote { peer, address: mr.base, key: mr.key().expect("a key") };
    let (from, done) = (local(&FabricMr::of(&source).expect("keys")), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let region = domain.register(vec![0_u8; 64], Access::REMOTE_READ);
                    drop(region.expect("register"));
                }
            });
        }
        for _ in 0..300 {
            let _guard = fabric_domain.lock();
            // The thread that holds the guard may register.
            drop(domain.register(vec![0_u8; 64], Access::REMOTE_READ).expect("register"));
            // SAFETY: the regions own the memory, and nothing else accesses it.
            unsafe { initiator.write(&target, from, place) }.expect("write");
        }
        done.store(true, Ordering::Relaxed);
    });
    drop((source, remote));
    assert_eq!(domain.live(), Default::default());
    Ok(())
}

trials! {
    /// FAB-02
    absent_library_and_unrelated_library_are_refused,
    /// FAB-02, FAB-11
    bytes_move_with_descriptors_and_keys_in_the_programs_requests,
    /// FAB-11
    closed_region_refuses_peers,
    /// FAB-02, FAB-11
    api_version_of_the_program_decides,
    /// FAB-11
    null_pointers_and_other_objects_are_refused,
    /// FAB-11
    nic_is_described_by_the_fi_info,
    /// FAB-11
    domain_is_usable_and_closable_after_closing_in_any_order,
    /// FAB-11
    requested_keys_are_used_and_taken_keys_are_refused,
    /// FAB-11
    region_of_several_ranges_has_a_key_for_each,
    /// FAB-12
    cache_hits_and_follows_unmapped_memory,
    /// FAB-12
    cache_of_libfabric_is_the_only_one_in_force,
    /// FAB-11
    calls_of_a_domain_without_locks_are_serialised,
}
