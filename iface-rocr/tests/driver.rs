//! Behaviour over the fake runtime: devices, addresses, allocations, copies, exports, IPC and
//! refusals.

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;

use std::{
    collections::HashSet,
    os::fd::AsFd,
    sync::{Arc, Mutex},
    thread,
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt,
    IfaceKind, Result,
    iface::{AllocRequest, DmaBufMapping, Facet, IpcHandle},
    monitor::{DetectionMethod, InvalidationCause},
    provider::Nic,
};
use hmem_fake_rocr::{FakeRuntime, Live, Profile};
use hmem_iface_rocr::{
    Rocr,
    sys::{Functions, HsaStatus},
};
use subscriber::{NO_SUBSCRIPTION, Recorder};

const LEN: u64 = 256 << 10;

fn open(runtime: &FakeRuntime) -> Result<Rocr> {
    // SAFETY: each function has the signature of its name in AMD's headers, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(|name| runtime.symbol(name)) }?;
    Rocr::builder().functions(functions).open()
}

fn world() -> (FakeRuntime, Rocr) {
    world_of(Profile::default())
}

fn world_of(profile: Profile) -> (FakeRuntime, Rocr) {
    let runtime = FakeRuntime::start(profile);
    let iface = open(&runtime).expect("open");
    (runtime, iface)
}

fn allocate(iface: &Rocr, kind: AllocationKind) -> Allocation {
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind };
    iface.allocate(&request).expect("allocate")
}

fn free(iface: &Rocr, allocation: &Allocation) -> Result<()> {
    // SAFETY: no code uses the memory.
    unsafe { iface.free(allocation) }
}

fn query(iface: &Rocr, address: u64) -> Option<Allocation> {
    iface.query(Address(address)).expect("query")
}

fn nic() -> Nic {
    Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None }
}

/// Closes the iface. Checks that the iface leaked nothing and violated no rule of AMD's headers.
fn end(runtime: &FakeRuntime, iface: Rocr) {
    iface.close().map_err(Error::from).expect("close");
    assert_eq!(runtime.live(), Live::default());
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

/// HM-04
#[test]
fn every_missing_symbol_is_named() {
    let runtime = FakeRuntime::start(Profile::default());
    for missing in Functions::SYMBOLS {
        // SAFETY: each function has the signature of its name in AMD's headers, and functions live
        // forever.
        let error = unsafe {
            Functions::from_lookup(|name| runtime.symbol(name).filter(|_| name != *missing))
        };
        let error = error.expect_err("a symbol is missing");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("symbol"), Some(*missing));
    }
}

/// HM-04
#[test]
fn facet_without_its_symbol_is_unsupported_and_names_it() {
    for (symbol, facet) in [
        ("hsa_amd_memory_async_copy", Facet::CopyEngine),
        ("hsa_amd_memory_lock", Facet::HostRegistrar),
        ("hsa_amd_ipc_memory_create", Facet::Ipc),
        ("hsa_amd_register_deallocation_callback", Facet::Monitor),
    ] {
        let (runtime, iface) = world_of(Profile { absent: vec![symbol], ..Profile::default() });
        let capability = iface.capability();
        let has = match facet {
            Facet::CopyEngine => capability.async_copy,
            Facet::HostRegistrar => capability.host_register,
            Facet::Ipc => capability.ipc,
            _ => capability.free_callback || capability.identity,
        };
        assert!(!has, "{symbol}");
        let error = iface.unavailable(facet);
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.context_value("symbol"), Some(symbol));
        // A facet whose functions the library has still works.
        let allocation = allocate(&iface, AllocationKind::Device);
        free(&iface, &allocation).expect("free");
        free(&iface, &allocation).expect_err("freed already");
        end(&runtime, iface);
    }
}

/// HM-04
#[test]
fn runtime_that_does_not_start_is_unavailable_with_its_own_code() {
    let runtime = FakeRuntime::start(Profile::default());
    runtime.fail_always("hsa_init", HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES);
    let error = open(&runtime).expect_err("no device");
    assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "hsa_init"));
    let code = error.driver().expect("the driver's code");
    assert_eq!((code.name.as_ref(), code.code), ("HSA_STATUS_ERROR_OUT_OF_RESOURCES", 0x1008));
    assert!(error.context_value("library").is_some());
    assert!(error.to_string().contains("0x1008"), "{error}");
    if !std::path::Path::new("/dev/kfd").exists() {
        let remedy = error.remedy_text().expect("a remedy");
        assert!(remedy.contains("there is no /dev/kfd"), "{remedy}");
    }
}

/// HM-04
#[test]
fn failed_opening_releases_its_runtime_reference() {
    let runtime = FakeRuntime::start(Profile { devices: 0, ..Profile::default() });
    let error = open(&runtime).expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("devices"), Some("0"));
    assert_eq!(runtime.live().counts, 0);
    let runtime = {
        drop(runtime);
        FakeRuntime::start(Profile::default())
    };
    for nth in 1.. {
        runtime.fail_nth("hsa_agent_get_info", nth, HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT);
        match open(&runtime) {
            Ok(iface) => return drop(iface),
            Err(error) => {
                assert_eq!(error.driver().expect("code").name, "HSA_STATUS_ERROR_INVALID_AGENT");
            }
        }
        assert_eq!(runtime.live().counts, 0);
    }
}

/// HM-04
#[test]
fn refused_close_returns_the_iface() {
    let (runtime, iface) = world();
    let allocation = allocate(&iface, AllocationKind::Device);
    let busy = iface.close().expect_err("memory is not freed");
    assert_eq!(busy.error.kind(), ErrorKind::Busy);
    let iface = busy.value;
    free(&iface, &allocation).expect("free");
    runtime.fail_nth("hsa_shut_down", 1, HsaStatus::HSA_STATUS_ERROR);
    let rejected = iface.close().expect_err("refused");
    assert_eq!(rejected.error.operation(), "hsa_shut_down");
    assert_eq!(rejected.value.devices().expect("devices").len(), 2);
    end(&runtime, rejected.value);
    drop(open(&runtime).expect("open"));
    assert_eq!(runtime.live().counts, 0);
}

/// HM-01
#[test]
fn devices_are_listed_with_name_memory_and_pci_bus_id() {
    let (_runtime, iface) = world();
    let devices = iface.devices().expect("devices");
    assert_eq!(devices.len(), 2);
    assert_eq!((devices[0].id, devices[0].name.as_str()), (DeviceId(0), "Test"));
    assert_eq!((devices[1].id, devices[1].name.as_str()), (DeviceId(1), "gfx942"));
    assert_eq!(
        (devices[1].pci_bus_id.as_deref(), devices[1].memory),
        (Some("0000:c2:02.1"), 64 << 30)
    );
}

/// HM-05
#[test]
fn device_out_of_range_is_an_invalid_argument() {
    let (_runtime, iface) = world();
    for device in [DeviceId(2), DeviceId(u32::MAX)] {
        let request = AllocRequest { len: 1, device, kind: AllocationKind::Device };
        for error in [iface.flush_inbound(device).err(), iface.allocate(&request).err()] {
            let error = error.expect("two devices");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(error.context_value("devices"), Some("2"));
        }
    }
}

/// HM-01 HM-02
///
/// A query of any byte, from the first to the last, finds an allocation that the application made.
#[test]
fn every_byte_of_an_application_allocation_is_recognised() {
    let (runtime, iface) = world();
    let base = runtime.allocate(1, 100_000);
    for offset in [0, 1, 4097, 99_999] {
        let allocation = query(&iface, base + offset).expect("known");
        assert_eq!(allocation.range, AddressRange::new(Address(base), 100_000).expect("range"));
        assert_eq!(
            (allocation.kind, allocation.device),
            (AllocationKind::Device, Some(DeviceId(1)))
        );
        assert_eq!(allocation.iface, IfaceKind::ROCR);
    }
    assert_eq!(query(&iface, base - 1), None);
    assert_eq!(query(&iface, base + 100_000), None);
    free(&iface, &query(&iface, base).expect("known")).expect_err("the application frees it");
    runtime.free(base);
    assert_eq!(query(&iface, base), None);
    end(&runtime, iface);
}

/// HM-01
///
/// A free finds the allocation by its requested length, although the runtime reports a rounded one.
#[test]
fn memory_keeps_its_requested_length_if_the_runtime_rounds() {
    let (runtime, iface) = world_of(Profile { rounds_lengths: true, ..Profile::default() });
    let request = AllocRequest { len: 5000, device: DeviceId(0), kind: AllocationKind::Device };
    let allocation = iface.allocate(&request).expect("allocate");
    let base = allocation.base().0;
    for _ in 0..2 {
        assert_eq!(query(&iface, base + 4999), Some(allocation));
        assert_eq!(query(&iface, base + 5000), None);
    }
    iface.ipc_export(&allocation).expect("export");
    let monitor = iface.start_monitor().expect("start");
    let told = Arc::new(Recorder::default());
    monitor.subscribe(allocation.range, told.clone()).expect("watch");
    assert_eq!(query(&iface, base), Some(allocation));
    assert_eq!(told.changes(), []);
    free(&iface, &allocation).expect("free");
    assert_eq!(told.changes(), [(allocation.range, InvalidationCause::Free)]);
    end(&runtime, iface);
}

/// HM-14
#[test]
fn inbound_flush_writes_the_register_of_the_device() {
    let (runtime, iface) = world();
    iface.flush_inbound(DeviceId(1)).expect("flush");
    assert_eq!([0, 1].map(|device| runtime.flush_register(device)), [0, 1]);
    end(&runtime, iface);
}

/// HM-01
#[test]
fn failed_query_is_an_error_with_code_and_address() {
    let (runtime, iface) = world();
    let fails = |code| {
        runtime.fail_nth("hsa_amd_pointer_info", 1, code);
        iface.query(Address(0x7000_0000)).expect_err("the runtime refused")
    };
    let error = fails(HsaStatus::HSA_STATUS_ERROR_NOT_INITIALIZED);
    assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "hsa_amd_pointer_info"));
    assert_eq!(error.driver().expect("code").name, "HSA_STATUS_ERROR_NOT_INITIALIZED");
    assert_eq!(error.context_value("address"), Some("0x70000000"));
    assert!(fails(HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED).is_unsupported());
    let unnamed = fails(HsaStatus(12_345));
    assert_eq!(unnamed.kind(), ErrorKind::Driver);
    assert!(unnamed.to_string().contains("code 0x3039"), "{unnamed}");
}

/// HM-01
#[test]
fn query_returns_the_kind_of_memory() {
    let (runtime, iface) = world();
    let mut live = Vec::new();
    for kind in [AllocationKind::Device, AllocationKind::Host, AllocationKind::Virtual] {
        let allocation = allocate(&iface, kind);
        let found = query(&iface, allocation.base().0 + 4097).expect("known");
        assert_eq!(found, allocation);
        live.push(allocation);
    }
    let page = vec![0u8; 8192];
    let locked = AddressRange::new(Address::of_ptr(page.as_ptr()), 8192).expect("range");
    // SAFETY: the vector outlives the registration.
    unsafe { iface.host_register(locked) }.expect("lock");
    let found = query(&iface, locked.start().0 + 1).expect("known");
    assert_eq!((found.kind, found.range), (AllocationKind::HostRegistered, locked));
    iface.host_unregister(locked).expect("unlock");
    assert_eq!(query(&iface, locked.start().0), None);
    for kind in [AllocationKind::Managed, AllocationKind::StreamOrdered, AllocationKind::System] {
        let request = AllocRequest { len: LEN, device: DeviceId(0), kind };
        assert!(iface.allocate(&request).expect_err("the runtime has none").is_unsupported());
    }
    for allocation in live {
        free(&iface, &allocation).expect("free");
    }
    end(&runtime, iface);
}

/// HM-01
///
/// For VMM memory of the application, the runtime does not report the first address. So the iface
/// refuses that memory: it must be registered neither from a guessed address nor as host memory.
#[test]
fn vmm_memory_of_the_application_is_refused() {
    let (runtime, iface) = world();
    let other = open(&runtime).expect("open");
    let allocation = allocate(&other, AllocationKind::Virtual);
    let error = iface.query(allocation.base()).expect_err("no base");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.context_value("type"), Some("HSA_EXT_POINTER_TYPE_HSA_VMEM (6)"));
    free(&other, &allocation).expect("free");
}

/// MON-07
///
/// The iface registers one callback for an allocation, even if many threads look it up. A new
/// allocation at the same address has a new identity.
#[test]
fn reused_address_has_a_new_identity_and_one_callback() {
    const REGISTER: &str = "hsa_amd_register_deallocation_callback";
    let (runtime, iface) = world();
    let mut seen = HashSet::new();
    let mut reused = 0;
    let mut last = 0;
    for round in 1..=1000 {
        let base = runtime.allocate(0, 4096);
        reused += u32::from(base == last);
        last = base;
        let ids: HashSet<_> =
            (0..4).map(|at| query(&iface, base + at * 1000).expect("known").id).collect();
        assert_eq!(ids.len(), 1, "an allocation has one identity");
        seen.extend(ids);
        assert_eq!(seen.len(), round, "an identity was reused");
        assert_eq!(runtime.calls(REGISTER), round as u64);
        runtime.free(base);
    }
    assert_eq!(reused, 999, "the runtime reused the address each time");
    let base = runtime.allocate(0, 4096);
    let ids = Mutex::new(HashSet::new());
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| ids.lock().unwrap().insert(query(&iface, base).expect("known").id));
        }
    });
    assert_eq!((ids.lock().unwrap().len(), runtime.calls(REGISTER)), (1, 1001));
    runtime.free(base);
    end(&runtime, iface);
}

/// MON-07 MON-09
///
/// If two ifaces watch one allocation and one of them unsubscribes, the free still notifies the
/// other one.
#[test]
fn free_notifies_each_monitor_on_its_own() {
    let (runtime, iface) = world();
    let other = open(&runtime).expect("open");
    let (first, second) = (iface.start_monitor().unwrap(), other.start_monitor().unwrap());
    assert_eq!(first.detection(), DetectionMethod::Callback);
    assert!(first.detects(InvalidationCause::Free) && !first.detects(InvalidationCause::Unmap));
    let base = runtime.allocate(0, 4096);
    let range = AddressRange::new(Address(base), 4096).expect("range");
    let told = [Arc::new(Recorder::default()), Arc::new(Recorder::default())];
    let subscription = first.subscribe(range, told[0].clone()).expect("watch");
    second.subscribe(range, told[1].clone()).expect("watch");
    let allocation = query(&iface, base).expect("known");
    assert!(first.valid(&NO_SUBSCRIPTION, &allocation).expect("ask"));
    first.unsubscribe(subscription);
    iface.close().map_err(Error::from).expect("close");
    let error = first.subscribe(range, told[0].clone()).expect_err("the iface is closed");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    runtime.free(base);
    assert_eq!(told.map(|told| told.changes()), [vec![], vec![(range, InvalidationCause::Free)]]);
    assert!(!first.valid(&NO_SUBSCRIPTION, &allocation).expect("ask"));
    let freed = second.subscribe(range, Arc::new(Recorder::default()));
    freed.expect_err("no memory is at the address");
    end(&runtime, other);
}

/// REL-01
#[test]
fn virtual_allocation_whose_clean_up_fails_too_returns_the_first_error() {
    let (runtime, iface) = world();
    runtime.fail_nth("hsa_amd_vmem_map", 1, HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES);
    runtime.fail_nth("hsa_amd_vmem_handle_release", 1, HsaStatus::HSA_STATUS_ERROR);
    let kind = AllocationKind::Virtual;
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind };
    let error = iface.allocate(&request).expect_err("it cannot be mapped");
    assert_eq!(error.operation(), "hsa_amd_vmem_map", "{error}");
}

/// MON-07
///
/// A subscription to memory without a callback fails, so that the memory is registered uncached.
#[test]
fn memory_without_a_callback_is_not_watched() {
    let (runtime, iface) = world();
    let monitor = iface.start_monitor().expect("start");
    let reserved = allocate(&iface, AllocationKind::Virtual);
    let watched = monitor.subscribe(reserved.range, Arc::new(Recorder::default()));
    assert!(watched.expect_err("other memory can be mapped at its address").is_unsupported());
    free(&iface, &reserved).expect("free");
    let plain = allocate(&iface, AllocationKind::Device);
    let handle = iface.ipc_export(&plain).expect("export");
    let other = open(&runtime).expect("open");
    let opened = other.ipc_open(&handle).expect("open");
    let seen = [query(&iface, opened.base().0), query(&iface, opened.base().0)];
    let seen = seen.map(|seen| seen.expect("known"));
    assert_eq!(seen.map(|seen| seen.kind), [AllocationKind::Imported; 2]);
    assert_ne!(seen[0].id, seen[1].id, "nothing shows whether it is the same memory");
    let watched = monitor.subscribe(opened.range, Arc::new(Recorder::default()));
    assert!(watched.expect_err("no callback").is_unsupported());
    // SAFETY: no code uses the memory.
    unsafe { other.ipc_close(&opened) }.expect("close");
    free(&iface, &plain).expect("free");
    drop(other);
    end(&runtime, iface);
}

/// MON-07 HM-10
///
/// Lookups of memory that the iface opened return the opened allocation, whichever type the runtime
/// reports. A subscription succeeds, and closing the memory notifies the subscriber.
#[test]
fn memory_that_the_iface_opened_is_known_and_watched_until_its_close() {
    for attaches_dma_bufs in [false, true] {
        let (runtime, iface) = world_of(Profile { attaches_dma_bufs, ..Profile::default() });
        let plain = allocate(&iface, AllocationKind::Device);
        let handle = iface.ipc_export(&plain).expect("export");
        let other = open(&runtime).expect("open");
        let monitor = other.start_monitor().expect("start");
        let opened = other.ipc_open(&handle).expect("open");
        assert_eq!(opened.kind, AllocationKind::Imported);
        assert_eq!(query(&other, opened.base().0 + LEN - 1), Some(opened));
        assert!(other.ipc_export(&opened).expect_err("another process's").is_unsupported());
        let told = Arc::new(Recorder::default());
        monitor.subscribe(opened.range, told.clone()).expect("watch");
        assert!(monitor.valid(&NO_SUBSCRIPTION, &opened).expect("ask"));
        let error = free(&other, &opened).expect_err("another call releases the memory");
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("ipc_close")), "{error}");
        // SAFETY: no code uses the memory.
        unsafe { other.ipc_close(&opened) }.expect("close");
        assert_eq!(told.changes(), [(opened.range, InvalidationCause::Free)]);
        assert!(!monitor.valid(&NO_SUBSCRIPTION, &opened).expect("ask"));
        free(&iface, &plain).expect("free");
        drop(monitor);
        other.close().map_err(Error::from).expect("close");
        end(&runtime, iface);
    }
}

/// HM-03
#[test]
fn copies_reach_every_pair_of_memories() {
    let (runtime, iface) = world();
    let len = (3 << 20) + 77;
    let host: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
    let request = |device, kind| AllocRequest { len: len as u64, device: DeviceId(device), kind };
    let places: Vec<_> = [
        request(0, AllocationKind::Device),
        request(1, AllocationKind::Device),
        request(0, AllocationKind::Virtual),
        request(0, AllocationKind::Host),
        request(0, AllocationKind::Device),
    ]
    .iter()
    .map(|request| iface.allocate(request).expect("allocate"))
    .collect();
    // SAFETY: the memory is live, and only this test uses it.
    unsafe {
        for (to, from) in [(0, 1), (1, 0), (2, 0), (3, 1), (4, 0), (1, 3), (0, 2)] {
            let (to, from) = (places[to].base(), places[from].base());
            iface.write(from, &host).expect("write");
            let event = iface.start_copy(to, from, len as u64).expect("start");
            event.wait().expect("copy");
            let mut back = vec![0u8; len];
            iface.read(to, &mut back).expect("read");
            assert!(back == host, "{to} from {from}");
            iface.write(to, &vec![0u8; len]).expect("clear");
        }
        let near = Address(places[0].base().0 + 100);
        let error = iface.copy(near, places[0].base(), 1000).expect_err("the sides overlap");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    for place in &places {
        free(&iface, place).expect("free");
    }
    end(&runtime, iface);
}

/// HM-03
#[test]
fn started_copy_ends_with_its_signal() {
    let (runtime, iface) = world_of(Profile { slow_copies: true, ..Profile::default() });
    let device = allocate(&iface, AllocationKind::Device);
    let (bytes, mut back) = (vec![0xA5u8; LEN as usize], vec![0u8; LEN as usize]);
    // SAFETY: only the copies use the two ranges until the copies have ended.
    unsafe {
        iface.write(device.base(), &bytes).expect("write");
        let event = iface
            .start_copy(Address::of_ptr(back.as_mut_ptr()), device.base(), LEN)
            .expect("start");
        assert!(!event.is_done(), "the copy is in flight");
        let busy = iface.close().expect_err("a copy is in flight");
        let iface = busy.value;
        assert!(event.is_done(), "it has ended");
        assert!(back == bytes, "the bytes are there when it is done");
        event.wait().expect("copy");
        runtime.change(|profile| profile.copies_fail = true);
        let error = iface.read(device.base(), &mut back).expect_err("the engine failed");
        assert_eq!(error.kind(), ErrorKind::Driver);
        assert_eq!(error.context_value("signal"), Some("-1"));
        runtime.change(|profile| profile.copies_fail = false);
        drop(iface.start_copy(device.base(), Address::of_ptr(bytes.as_ptr()), LEN).expect("start"));
        free(&iface, &device).expect("free");
        end(&runtime, iface);
    }
}

/// HM-03
///
/// Page-locked memory is copied by its device address, without a buffer.
#[test]
fn page_locked_memory_is_copied_directly() {
    let (runtime, iface) = world();
    let device = allocate(&iface, AllocationKind::Device);
    let host = vec![0x5Au8; LEN as usize];
    let range = AddressRange::new(Address::of_ptr(host.as_ptr()), LEN).expect("range");
    let before = runtime.live().allocations;
    // SAFETY: the vector outlives the registration and the copy.
    unsafe {
        iface.host_register(range).expect("lock");
        let twice = iface.host_register(range).expect_err("locked already");
        assert_eq!(twice.kind(), ErrorKind::Busy);
        iface.copy(device.base(), Address(range.start().0 + 10), LEN - 10).expect("copy");
        iface.host_unregister(range).expect("unlock");
    }
    assert_eq!(runtime.live().allocations, before, "no buffer was needed");
    free(&iface, &device).expect("free");
    end(&runtime, iface);
}

/// HM-06
#[test]
fn export_has_its_offset_and_is_released_by_the_runtimes_call() {
    for name in ["6.4", "7.2"] {
        let (runtime, iface) = world_of(Profile::named(name).expect("a profile"));
        let device = allocate(&iface, AllocationKind::Device);
        let range = device.range.slice(70_001, 10_007).expect("inside");
        let export = iface.export_dma_buf(range, &nic(), DmaBufMapping::Default).expect("export");
        assert_eq!((export.offset.0, export.alloc_offset.0, export.len), (70_001, 70_001, 10_007));
        let flags = rustix::io::fcntl_getfd(export.as_fd()).expect("flags");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        iface.release_dma_buf(export).expect("release");
        assert_eq!(runtime.calls("hsa_amd_portable_close_dmabuf"), 1);
        free(&iface, &device).expect("free");
        end(&runtime, iface);
    }
}

/// HM-09
#[test]
fn pcie_mapping_is_refused_by_older_runtimes_and_small_bars() {
    let small = Profile { large_bar: false, ..Profile::default() };
    for (profile, code) in [
        (Profile::named("6.4").expect("a profile"), None),
        (small, Some("HSA_STATUS_ERROR_NOT_SUPPORTED")),
    ] {
        let (_runtime, iface) = world_of(profile);
        let device = allocate(&iface, AllocationKind::Device);
        let export = |mapping| iface.export_dma_buf(device.range, &nic(), mapping);
        let error = export(DmaBufMapping::Pcie).expect_err("no such mapping");
        assert!(error.is_unsupported(), "{error}");
        assert_eq!(error.context_value("mapping"), Some("pcie"));
        assert_eq!(error.driver().map(|driver| driver.name.to_string()).as_deref(), code);
        export(DmaBufMapping::Default).expect("the other one");
        free(&iface, &device).expect("free");
    }
    let (_runtime, iface) = world();
    assert!(iface.capability().pcie_mapping);
    let device = allocate(&iface, AllocationKind::Device);
    iface.export_dma_buf(device.range, &nic(), DmaBufMapping::Pcie).expect("a large BAR");
    free(&iface, &device).expect("free");
}

/// HM-06 DIAG-03
#[test]
fn unexportable_memory_is_refused_with_its_reason() {
    let (runtime, iface) = world();
    let export = |range| iface.export_dma_buf(range, &nic(), DmaBufMapping::Default);
    let device = allocate(&iface, AllocationKind::Device);
    let past = AddressRange::new(device.base(), LEN + 1).expect("range");
    let error = export(past).expect_err("a range past the end");
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert!(error.context_value("allocation").is_some());
    free(&iface, &device).expect("free");
    let error = export(device.range).expect_err("freed");
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert!(error.context_value("why").expect("why").contains("freed"), "{error}");
    let host = allocate(&iface, AllocationKind::Host);
    let error = export(host.range).expect_err("host memory");
    assert!(error.remedy_text().expect("a remedy").contains("host pages"));
    free(&iface, &host).expect("free");
    end(&runtime, iface);

    let (_runtime, iface) = {
        drop(runtime);
        world_of(Profile { dma_buf: false, ..Profile::default() })
    };
    assert!(!iface.capability().dma_buf);
    let device = allocate(&iface, AllocationKind::Device);
    let error = iface.export_dma_buf(device.range, &nic(), DmaBufMapping::Default);
    let error = error.expect_err("the driver exports none");
    let attribute = error.context_value("attribute").expect("the attribute");
    assert!(error.is_unsupported() && attribute.contains("DMABUF_SUPPORTED"), "{error}");
    free(&iface, &device).expect("free");
}

/// HM-06 HM-10
///
/// The real runtime crashes on an export of memory that it attached, whoever attached it. The
/// export is refused without that call, and peer memory stays possible.
#[test]
fn attached_memory_is_not_exported_as_a_dma_buf() {
    let (runtime, iface) = world();
    let plain = allocate(&iface, AllocationKind::Device);
    let handle = iface.ipc_export(&plain).expect("export");
    let other = open(&runtime).expect("open");
    let opened = other.ipc_open(&handle).expect("open");
    for attached_by_another in [false, true] {
        let user = if attached_by_another { &iface } else { &other };
        let error = user.export_dma_buf(opened.range, &nic(), DmaBufMapping::Default);
        let error = error.expect_err("attached memory");
        assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
        let address = user.export_peer_memory(opened.range, &nic()).expect("export").address;
        assert_eq!(address, opened.base());
    }
    assert_eq!(runtime.calls("hsa_amd_portable_export_dmabuf_v2"), 0);
    // SAFETY: no code uses the memory.
    unsafe { other.ipc_close(&opened) }.expect("close");
    free(&iface, &plain).expect("free");
    other.close().map_err(Error::from).expect("close");
    end(&runtime, iface);
}

/// HM-10
#[test]
fn ipc_handle_opens_in_another_process() {
    const HANDLE: &str = "HMEM_TEST_ROCR_HANDLE";
    const NAME: &str = "ipc_handle_opens_in_another_process";
    let (runtime, iface) = world();
    if let Ok(text) = std::env::var(HANDLE) {
        let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
        let bytes = (0..text.len()).step_by(2).map(byte).collect();
        let opened = iface.ipc_open(&IpcHandle { iface: IfaceKind::ROCR, bytes }).expect("open");
        let mut found = vec![0u8; LEN as usize];
        // SAFETY: the memory is open.
        unsafe {
            iface.read(opened.base(), &mut found).expect("read");
            iface.write(opened.base(), &[0x77; 16]).expect("write");
            free(&iface, &opened).expect_err("it must be closed with ipc_close");
            iface.ipc_close(&opened).expect("close");
            iface.ipc_close(&opened).expect_err("closed already");
        }
        assert!(found.iter().all(|byte| *byte == 0x33));
        return end(&runtime, iface);
    }
    let device = allocate(&iface, AllocationKind::Device);
    // SAFETY: the memory is live, and only this test uses it.
    unsafe { iface.write(device.base(), &vec![0x33; LEN as usize]) }.expect("write");
    let handle = iface.ipc_export(&device).expect("export");
    let text: String = handle.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    child::passes(child::command(NAME).env(HANDLE, text));
    let mut found = [0u8; 16];
    // SAFETY: the memory is live, and only this test uses it.
    unsafe { iface.read(device.base(), &mut found) }.expect("read");
    assert_eq!(found, [0x77; 16], "the child wrote the memory itself");
    free(&iface, &device).expect("free");
    let gone = iface.ipc_open(&handle).expect_err("the memory is gone");
    assert_eq!(gone.kind(), ErrorKind::Unavailable);
    let host = allocate(&iface, AllocationKind::Host);
    assert!(iface.ipc_export(&host).expect_err("host memory").is_unsupported());
    free(&iface, &host).expect("free");
    end(&runtime, iface);
}

/// HM-10
///
/// Exporting and opening a handle pass the full length of the allocation, which a runtime may round
/// up to whole pages. The opened allocation has the requested length.
#[test]
fn ipc_keeps_the_requested_length_whatever_the_runtime_rounds_to() {
    const ODD: u64 = 5000;
    for rounds_lengths in [false, true] {
        let (runtime, iface) = world_of(Profile { rounds_lengths, ..Profile::default() });
        let request = AllocRequest { len: ODD, device: DeviceId(0), kind: AllocationKind::Device };
        let allocation = iface.allocate(&request).expect("allocate");
        // SAFETY: the memory is live, and only this test uses it.
        unsafe { iface.write(allocation.base(), &[0x21; ODD as usize]) }.expect("write");
        let handle = iface.ipc_export(&allocation).expect("export");
        let other = open(&runtime).expect("open");
        let (inner, _, whole, device): ([u32; 8], u64, u64, String) =
            handle.decode(IfaceKind::ROCR).expect("a handle");
        let longer = IpcHandle::encode(IfaceKind::ROCR, &(inner, whole + 1, whole, device));
        let error = other.ipc_open(&longer).expect_err("longer than the memory");
        assert_eq!(error.kind(), ErrorKind::Malformed);
        let opened = other.ipc_open(&handle).expect("open the handle");
        assert_eq!((opened.range.len(), opened.kind), (ODD, AllocationKind::Imported));
        let (base, found) = (opened.base().0, query(&other, opened.base().0 + ODD - 1));
        assert_eq!(found.map(|found| found.range), Some(opened.range));
        assert_eq!(query(&other, base + ODD), None, "the rest of the page is no memory");
        let mut bytes = vec![0; ODD as usize + 1];
        // SAFETY: the memory is open, and nothing refers to `bytes`.
        unsafe {
            other.read(opened.base(), &mut bytes[1..]).expect("read");
            let error = other.read(opened.base(), &mut bytes).expect_err("one byte too many");
            assert_eq!(error.kind(), ErrorKind::OutOfBounds);
            other.ipc_close(&opened).expect("close");
        }
        assert!(bytes[1..].iter().all(|byte| *byte == 0x21));
        free(&iface, &allocation).expect("free");
        other.close().map_err(Error::from).expect("close");
        end(&runtime, iface);
    }
}

/// HM-10
///
/// The memory of a handle that was altered, with a correct checksum, is readable as a whole, or the
/// handle is refused.
#[test]
fn altered_ipc_handle_is_refused_or_opens_whole_memory() {
    let (runtime, iface) = world();
    let memory = allocate(&iface, AllocationKind::Device);
    let handle = iface.ipc_export(&memory).expect("export");
    let other = open(&runtime).expect("open");
    let (sound, len, whole, device): ([u32; 8], u64, u64, String) =
        handle.decode(IfaceKind::ROCR).expect("a handle");
    let tried = |inner, len, whole| {
        let altered = IpcHandle::encode(IfaceKind::ROCR, &(inner, len, whole, &device));
        let Ok(opened) = other.ipc_open(&altered) else { return false };
        let mut bytes = vec![0; opened.range.len() as usize];
        // SAFETY: the memory is open, and nothing refers to `bytes`.
        unsafe {
            other.read(opened.base(), &mut bytes).expect("opened memory is readable");
            other.ipc_close(&opened).expect("close");
        }
        true
    };
    for place in 0..sound.len() {
        for bit in 0..32 {
            let mut inner = sound;
            inner[place] ^= 1 << bit;
            tried(inner, len, whole);
        }
    }
    // The runtime's handle names the memory's agent, and the content names the device.
    for owner in 0..64 {
        let mut inner = sound;
        inner[2] = owner;
        assert_eq!(tried(inner, len, whole), owner == sound[2], "owner {owner} of {}", sound[2]);
    }
    // The runtime's handle and this library's content agree about a wrong length.
    for longer in [whole + 1, whole * 2, u64::from(u32::MAX)] {
        let mut inner = sound;
        (inner[5], inner[6]) = (longer as u32, (longer >> 32) as u32);
        assert!(!tried(inner, longer, longer), "{longer} bytes of {whole}");
    }
    assert!(tried(sound, len, whole));
    free(&iface, &memory).expect("free");
    other.close().map_err(Error::from).expect("close");
    end(&runtime, iface);
}

/// REL-01
///
/// Each call of the runtime fails in turn. The operation then returns an error, or succeeds without
/// that call. Afterwards all operations succeed, and nothing is leaked.
#[test]
fn fault_at_any_call_leaks_nothing() {
    let round = |iface: &Rocr| -> Result<()> {
        let nic = nic();
        let host = vec![1u8; LEN as usize];
        let range = AddressRange::new(Address::of_ptr(host.as_ptr()), LEN)?;
        for kind in [AllocationKind::Device, AllocationKind::Host, AllocationKind::Virtual] {
            let request = AllocRequest { len: LEN, device: DeviceId(0), kind };
            let allocation = iface.allocate(&request)?;
            let used = || -> Result<()> {
                // SAFETY: the memory is live, and only this test uses it.
                unsafe { iface.write(allocation.base(), &host) }?;
                if kind != AllocationKind::Host {
                    let export =
                        iface.export_dma_buf(allocation.range, &nic, DmaBufMapping::Default)?;
                    iface.release_dma_buf(export)?;
                }
                if kind == AllocationKind::Device {
                    let opened = iface.ipc_open(&iface.ipc_export(&allocation)?)?;
                    // SAFETY: no code uses the memory.
                    let close = || unsafe { iface.ipc_close(&opened) };
                    close().or_else(|error| close().and(Err(error)))?;
                }
                Ok(())
            };
            let used = used();
            // A refused free can be repeated.
            let freed =
                free(iface, &allocation).or_else(|error| free(iface, &allocation).and(Err(error)));
            used.and(freed)?;
        }
        // SAFETY: the vector outlives the registration.
        unsafe { iface.host_register(range) }?;
        let unlock = || iface.host_unregister(range);
        unlock().or_else(|error| unlock().and(Err(error)))
    };
    let runtime = FakeRuntime::start(Profile::default());
    let names = Functions::SYMBOLS.iter().chain(Functions::OPTIONAL_SYMBOLS);
    for name in names.filter(|name| !matches!(**name, "hsa_init" | "hsa_shut_down")) {
        let mut shown = 0;
        for nth in 1.. {
            let iface = open(&runtime).expect("open");
            let before = runtime.calls(name);
            runtime.fail_nth(name, nth, HsaStatus::HSA_STATUS_ERROR);
            let failed = round(&iface);
            let reached = runtime.calls(name) >= before + nth;
            runtime.heal();
            round(&iface).unwrap_or_else(|error| panic!("{name} {nth}: the next round: {error}"));
            let closed = iface.close().map_err(Error::from);
            closed.unwrap_or_else(|error| panic!("{name} {nth}: {error}"));
            assert_eq!(runtime.live(), Live::default(), "{name} {nth}: {failed:?}");
            assert_eq!(runtime.violations(), Vec::<String>::new(), "{name} {nth}");
            if !reached {
                break;
            }
            shown += 1;
        }
        let opens_only = name.ends_with("get_info") || name.contains("iterate");
        let older = matches!(*name, "hsa_amd_portable_export_dmabuf" | "hsa_signal_load_scacquire");
        assert!(shown > 0 || opens_only || older, "{name} is never called");
    }
}
