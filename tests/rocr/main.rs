//! ROCr memory registered with a software NIC, over the fake runtime, or with `HMEM_ROCR=model`
//! over AMD's own runtime with a model GPU (`tests/rocr/run`).

mod fixture;
#[path = "model.rs"]
mod model;
#[path = "../trials/mod.rs"]
mod trials;
#[allow(dead_code, reason = "other test binaries use the rest")]
#[path = "../wire/mod.rs"]
mod wire;

mod cases {
    use std::{
        collections::HashSet,
        ffi::c_void,
        sync::{
            Mutex,
            atomic::{AtomicU64, Ordering},
        },
        thread,
    };

    use hmem::{
        Address, AddressRange, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind,
        Path, Request, iface::AllocRequest, monitor::InvalidationCause, path::P2pPolicy,
    };
    use hmem_fake_rocr::Profile;

    use crate::{
        fixture::{Fixture, REMOTE, is_model, open, pattern},
        trials::{Outcome, Skipped},
        wire::raw,
    };

    fn profiles() -> Vec<Profile> {
        if is_model() { vec![Profile::default()] } else { Profile::all() }
    }

    pub(crate) fn each_kind_of_memory_moves_its_bytes_by_its_own_path() -> Outcome {
        for profile in profiles() {
            let exports = profile.dma_buf && !is_model();
            let fixture = Fixture::new(profile, P2pPolicy::Enabled, false);
            for kind in [AllocationKind::Device, AllocationKind::Host, AllocationKind::Virtual] {
                let has =
                    fixture.rocr.allocate(&AllocRequest { len: 1, device: DeviceId(0), kind });
                let expected = match (has, kind) {
                    (Err(error), _) => {
                        assert!(error.is_unsupported(), "{error}");
                        continue;
                    }
                    (Ok(one), kind) => {
                        // SAFETY: no code uses the memory.
                        unsafe { fixture.rocr.free(&one) }.expect("free");
                        match kind {
                            AllocationKind::Host => Path::PlainHost,
                            _ if exports => Path::DmaBuf,
                            _ => Path::Staged,
                        }
                    }
                };
                for len in [1000, 100_001, (4 << 20) + 17] {
                    let region = fixture.domain.register(fixture.buffer(len, kind), REMOTE);
                    let region = region.map_err(hmem::Error::from).expect("register");
                    let decision = region.decision().expect("decision");
                    assert_eq!(decision.path, expected, "{kind:?}: {decision}");
                    let (key, bytes) = (region.key().expect("key"), pattern(len, len as usize));
                    fixture.put(&key, 0, &bytes).expect("write");
                    let mut found = vec![0; bytes.len()];
                    region.read(0, &mut found).expect("the device's own copy");
                    assert!(found == bytes, "{kind:?}: bytes that the NIC wrote");
                    region.write(7, &[9; 100]).expect("write on the device");
                    assert_eq!(fixture.get(&key, 7, 100).expect("read"), [9; 100]);
                    region.close().map_err(hmem::Error::from).expect("close");
                }
            }
            fixture.end();
        }
        Ok(())
    }

    /// Frees and allocates through a second iface, which stands for the application. Only the
    /// runtime's callback notifies the iface under test.
    pub(crate) fn address_reuse_is_never_a_hit() -> Outcome {
        let fixture = Fixture::new(Profile::default(), P2pPolicy::Enabled, true);
        // The fake reuses the address in every round, so that a stale hit would show at once.
        let rounds = if fixture.fake.is_some() { 1_000 } else { 10_000 };
        let application = open(fixture.fake.as_ref());
        let cache = fixture.domain.cache().expect("a cache");
        assert_eq!(cache.monitor(IfaceKind::ROCR).expect("a monitor").name, "rocr-callback");
        let (mut ids, mut reused, mut last) = (HashSet::new(), 0, Address(0));
        for round in 0..rounds {
            let request =
                AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
            let memory = application.allocate(&request).expect("allocate");
            reused += u64::from(memory.base() == last);
            last = memory.base();
            let seen = fixture.rocr.query(memory.base()).expect("query").expect("known");
            assert!(ids.insert(seen.id), "round {round}: an identity was reused");
            let bytes = pattern(round, 64);
            // SAFETY: the memory is this test's own, and freed after its leases are gone.
            unsafe {
                application.write(memory.base(), &bytes).expect("write");
                let first = cache.get(raw(memory.range), REMOTE).expect("register");
                let key = first.key().expect("key");
                assert_eq!(fixture.get(&key, 0, 64).expect("read"), bytes, "round {round}: stale");
                let again = cache.get(raw(memory.range), REMOTE).expect("hit");
                assert_eq!(again.key().expect("key"), key, "the second is a hit");
                drop((first, again));
                application.free(&memory).expect("free");
            }
        }
        let statistics = cache.statistics();
        assert_eq!((statistics.misses, statistics.hits), (rounds, rounds));
        assert_eq!(statistics.invalidations(InvalidationCause::Free), rounds);
        assert!(reused > rounds / 2, "only {reused} addresses were reused, so the test is void");
        application.close().map_err(hmem::Error::from).expect("close");
        fixture.end();
        Ok(())
    }

    /// The runtime calls back on threads that free memory, while other threads look up memory and
    /// register callbacks. A lock held during both would cause a deadlock.
    pub(crate) fn concurrent_frees_and_lookups_never_share_an_identity() -> Outcome {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 500;
        let fixture = Fixture::new(Profile::default(), P2pPolicy::Enabled, true);
        let application = open(fixture.fake.as_ref());
        let cache = fixture.domain.cache().expect("a cache");
        let ids = Mutex::new(HashSet::new());
        let shared = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let device = DeviceId(0);
                    let request = AllocRequest { len: 4096, device, kind: AllocationKind::Device };
                    for _ in 0..ROUNDS {
                        let memory = application.allocate(&request).expect("allocate");
                        let seen =
                            fixture.rocr.query(memory.base()).expect("query").expect("known");
                        assert!(ids.lock().expect("a thread failed").insert(seen.id), "{seen:?}");
                        // Memory of another thread, which may be freed meanwhile.
                        let other = Address(shared.swap(memory.base().0, Ordering::Relaxed));
                        fixture.rocr.query(other).expect("query");
                        // SAFETY: the memory is freed after its lease is gone.
                        unsafe {
                            let region = cache.get(raw(memory.range), REMOTE);
                            drop(region.expect("register"));
                            application.free(&memory).expect("free");
                        }
                    }
                });
            }
        });
        // A new entry is also invalidated if the cache cannot exclude that an invalidation of
        // another thread, which ended meanwhile, covers it. That one's cause counts.
        let statistics = cache.statistics();
        assert_eq!((statistics.uncached, statistics.evictions), (0, 0), "{statistics:?}");
        let invalidated = statistics.all_invalidations();
        assert_eq!((invalidated, statistics.entries), (THREADS * ROUNDS, 0), "{statistics:?}");
        application.close().map_err(hmem::Error::from).expect("close");
        fixture.end();
        Ok(())
    }

    pub(crate) fn memory_of_hip_is_recognised() -> Outcome {
        type Malloc = unsafe extern "C" fn(*mut *mut c_void, usize) -> i32;
        type HostMalloc = unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> i32;
        type Free = unsafe extern "C" fn(*mut c_void) -> i32;
        if !is_model() {
            return Err(Skipped("HIP runs on AMD's own runtime (tests/rocr/run)".into()));
        }
        let fixture = Fixture::new(Profile::default(), P2pPolicy::Enabled, false);
        // SAFETY: AMD's library, whose initialisers have no precondition; the types are those of
        // HIP's header.
        unsafe {
            let hip = libloading::os::unix::Library::new("libamdhip64.so.7").expect("HIP");
            let malloc = hip.get::<Malloc>("hipMalloc").expect("hipMalloc");
            let host_malloc = hip.get::<HostMalloc>("hipHostMalloc").expect("hipHostMalloc");
            let free = hip.get::<Free>("hipFree").expect("hipFree");
            let host_free = hip.get::<Free>("hipHostFree").expect("hipHostFree");
            let (mut device, mut host) = (std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(malloc(&mut device, 100_000), 0);
            assert_eq!(host_malloc(&mut host, 100_000, 0), 0);
            let of = |pointer: *mut c_void| {
                fixture.rocr.query(Address(Address::of_ptr(pointer).0 + 4097)).expect("query")
            };
            let found = of(device).expect("known");
            assert_eq!((found.kind, found.device), (AllocationKind::Device, Some(DeviceId(0))));
            assert_eq!(found.base(), Address::of_ptr(device));
            assert_eq!(of(host).expect("known").kind, AllocationKind::Host);
            let managed_malloc =
                hip.get::<HostMalloc>("hipMallocManaged").expect("hipMallocManaged");
            let (mut managed, attach_global) = (std::ptr::null_mut(), 1);
            assert_eq!(managed_malloc(&mut managed, 100_000, attach_global), 0);
            let found = of(managed);
            assert_ne!(found.map(|found| found.kind), Some(AllocationKind::Device), "it migrates");
            assert_eq!((free(device), host_free(host), free(managed)), (0, 0, 0));
            assert_eq!(of(device), None);
            // HIP stays loaded, since its threads and exit handlers need it.
            std::mem::forget(hip);
        }
        fixture.end();
        Ok(())
    }

    pub(crate) fn unknown_memory_is_refused_with_the_reason() -> Outcome {
        let fixture = Fixture::new(Profile::default(), P2pPolicy::Enabled, true);
        let live = fixture.buffer(8192, AllocationKind::Device);
        let freed = fixture.buffer(4096, AllocationKind::Device);
        let gone = freed.allocation().range;
        drop(freed);
        let base = live.allocation().base();
        let past = AddressRange::new(base, 8193).expect("a range");
        let host = vec![0u8; 4096];
        let foreign = AddressRange::new(Address::of_ptr(host.as_ptr()), 4096).expect("a range");
        for (range, kind, words) in [
            (gone, ErrorKind::InvalidArgument, "was freed"),
            (foreign, ErrorKind::InvalidArgument, "is host memory"),
            (past, ErrorKind::OutOfBounds, "register a range inside one allocation"),
        ] {
            // SAFETY: the registration is refused.
            let memory = unsafe { raw(range) };
            let claim = Request::new(memory, REMOTE).owner(IfaceKind::ROCR, None);
            let error = fixture.domain.submit(claim).expect_err("it is not there").error;
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
            let cache = fixture.domain.cache().expect("a cache");
            cache.get_of(memory, REMOTE, IfaceKind::ROCR, None).expect_err("it is not there");
        }
        // SAFETY: the registration is refused.
        let claim = Request::new(unsafe { raw(live.range()) }, REMOTE).owner(IfaceKind::CUDA, None);
        fixture.domain.submit(claim).expect_err("it is not CUDA's");
        drop(live);
        fixture.end();
        Ok(())
    }

    pub(crate) fn closing_the_iface_ends_its_monitor_alone() -> Outcome {
        let fixture = Fixture::new(Profile::default(), P2pPolicy::Enabled, false);
        let other = open(fixture.fake.as_ref());
        let (own, others) = (
            fixture.rocr.start_monitor().expect("a monitor"),
            other.start_monitor().expect("a monitor"),
        );
        let buffer = fixture.buffer(4096, AllocationKind::Device);
        drop(other);
        let seen = fixture.rocr.query(buffer.allocation().base()).expect("query").expect("known");
        let unwatched = hmem::monitor::Subscription::unnumbered();
        assert!(own.valid(&unwatched, &seen).expect("ask"));
        assert!(!others.valid(&unwatched, &seen).expect("ask"));
        drop(buffer);
        fixture.end();
        Ok(())
    }
}

use cases::*;
use trials::trials;

trials! {
    /// P2P-01, P2P-06, HM-01
    each_kind_of_memory_moves_its_bytes_by_its_own_path,
    /// MON-07, CACHE-02, MR-07
    address_reuse_is_never_a_hit,
    /// MON-07
    concurrent_frees_and_lookups_never_share_an_identity,
    /// HM-01, HM-02, HM-08
    memory_of_hip_is_recognised,
    /// MR-04, DIAG-03
    unknown_memory_is_refused_with_the_reason,
    /// MON-09
    closing_the_iface_ends_its_monitor_alone,
}
