//! Behaviour over the fake driver: devices, addresses, allocations, copies, exports, IPC and
//! refusals.

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    collections::HashSet,
    io::{BufRead, BufReader, Read},
    os::fd::{AsFd, AsRawFd},
    process::{Child, ChildStdout, Stdio},
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceBuffer, DeviceId, ErrorKind, Iface,
    IfaceExt, IfaceKind, Result,
    iface::{AllocRequest, DmaBufMapping, IpcHandle},
    provider::Nic,
};
use hmem_fake_ze::{FakeDriver, Live, Profile};
use hmem_iface_ze::{
    LevelZero,
    sys::{Functions, ZeResult},
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};
use subscriber::{NO_SUBSCRIPTION, Recorder};
use trials::{Outcome, skip, trials};

const LEN: u64 = 256 << 10;

trials! {
    /// HM-04
    every_missing_symbol_is_named,
    /// HM-04
    driver_that_does_not_start_is_unavailable_with_its_own_code,
    /// HM-04
    driver_without_devices_is_unavailable_and_keeps_no_context,
    /// HM-01
    device_numbers_follow_libfabric,
    /// HM-01
    device_other_than_a_gpu_is_omitted_and_numbers_stay,
    /// HM-01
    device_on_no_pci_bus_is_listed_without_a_bus_id,
    /// HM-05
    device_out_of_range_is_an_invalid_argument,
    /// HM-01
    failed_query_is_an_error_with_the_drivers_code_and_the_address,
    /// HM-01 MON-07
    pooled_memory_of_the_application_is_recognised,
    /// HM-01 MON-07
    pooled_memory_of_the_iface_has_its_own_identities,
    /// HM-06
    exports_are_owned_fds_and_every_fd_is_released,
    /// HM-06
    concurrent_exports_of_one_allocation_are_serialised,
    /// HM-06
    fds_stay_open_if_the_memory_is_replaced_during_its_export,
    /// HM-06
    export_with_a_foreign_fd_is_refused_and_the_fd_stays_open,
    /// HM-06
    dma_buf_of_one_tile_is_refused_and_released,
    /// HM-08
    host_and_shared_memory_are_not_exported_as_device_memory,
    /// HM-09
    pcie_mapping_is_unsupported_and_not_listed,
    /// HM-01
    memory_freed_without_the_iface_is_unknown_and_not_exported,
    /// HM-03
    copies_pass_the_device_accessible_memory_only,
    /// HM-03
    failed_wait_between_devices_is_repeated_once,
    /// HM-03
    started_copy_is_done_only_when_its_bytes_have_arrived,
    /// HM-10
    ipc_handle_of_freed_memory_or_of_another_iface_is_refused,
    /// HM-10
    ipc_handle_opens_in_another_process,
    /// HM-10
    memory_is_opened_once_until_its_close,
    /// HM-04
    close_with_live_memory_is_busy_and_returns_the_iface,
    /// REL-01
    refused_close_keeps_the_contexts_that_were_not_destroyed,
    /// REL-01
    fault_at_every_call_leaves_nothing_and_the_next_call_works,
}

/// Returns a skip if this process cannot duplicate fds of processes, which opening an IPC handle
/// needs.
fn need_pidfd_getfd() -> Outcome {
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
    let own = own.expect("a pidfd of this process");
    let again = rustix::process::pidfd_getfd(&own, own.as_raw_fd(), PidfdGetfdFlags::empty());
    skip(again.err().map(|errno| format!("pidfd_getfd: {errno}")))
}

fn open(driver: &FakeDriver) -> Result<LevelZero> {
    // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(|name| driver.symbol(name)) }?;
    LevelZero::builder().functions(functions).open()
}

fn start(profile: Profile) -> (FakeDriver, Arc<LevelZero>) {
    let driver = FakeDriver::start(profile);
    let iface = Arc::new(open(&driver).expect("open"));
    (driver, iface)
}

fn request(kind: AllocationKind) -> AllocRequest {
    AllocRequest { len: LEN, device: DeviceId(0), kind }
}

fn buffer(iface: &Arc<LevelZero>, kind: AllocationKind) -> DeviceBuffer {
    DeviceBuffer::allocate(&(Arc::clone(iface) as _), &request(kind)).expect("allocate")
}

fn nic() -> Nic {
    Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None }
}

fn query(iface: &LevelZero, address: u64) -> Option<Allocation> {
    iface.query(Address(address)).expect("query")
}

/// Returns the number of open fds of this process, without those that the fake driver holds.
fn open_fds(driver: &FakeDriver) -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the fds").count() - driver.files()
}

fn close(iface: Arc<LevelZero>) {
    Arc::into_inner(iface).expect("the last user").close().expect("close");
}

fn every_missing_symbol_is_named() {
    let driver = FakeDriver::start(Profile::default());
    for missing in Functions::SYMBOLS {
        let lookup = |name: &'static str| driver.symbol(name).filter(|_| name != *missing);
        // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
        // forever.
        let error = unsafe { Functions::from_lookup(lookup) }.expect_err("a symbol is missing");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("symbol"), Some(*missing));
    }
    for missing in Functions::OPTIONAL_SYMBOLS {
        let lookup = |name: &'static str| driver.symbol(name).filter(|_| name != *missing);
        // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
        // forever.
        unsafe { Functions::from_lookup(lookup) }.expect("it works without");
    }
}

fn driver_that_does_not_start_is_unavailable_with_its_own_code() {
    let driver = FakeDriver::start(Profile::default());
    for (code, word) in [
        (ZeResult::ZE_RESULT_ERROR_UNINITIALIZED, "/dev/dri"),
        (ZeResult::ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE, "ZE_ENABLE_LOADER_DEBUG_TRACE"),
    ] {
        driver.fail_nth("zeInit", 1, code);
        let error = open(&driver).expect_err("no driver");
        assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "zeInit"));
        let said = error.driver().expect("the driver's code");
        assert_eq!((Some(said.name.as_ref()), said.code), (code.name(), i64::from(code.0)));
        assert!(error.context_value("library").is_some());
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains(word)), "{error}");
    }
}

fn driver_without_devices_is_unavailable_and_keeps_no_context() {
    let driver = FakeDriver::start(Profile { devices: 0, ..Profile::default() });
    let error = open(&driver).expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("devices"), Some("0"));
    assert_eq!(driver.live(), Live::default());
}

fn device_numbers_follow_libfabric() {
    let (driver, iface) = start(Profile { drivers: 2, ..Profile::default() });
    let devices = iface.devices().expect("devices");
    let ids: Vec<_> = devices.iter().map(|device| device.id.0).collect();
    assert_eq!(ids, [0, 1, 1 << 16, 1 << 16 | 1], "driver index << 16 | device index");
    let second = &devices[1];
    assert_eq!((second.name.as_str(), second.memory), ("Intel Test", 16 << 30));
    assert_eq!(second.pci_bus_id.as_deref(), Some("0000:3b:02.1"));
    let request = AllocRequest { device: DeviceId(1 << 16 | 1), ..request(AllocationKind::Device) };
    let allocation = iface.allocate(&request).expect("allocate");
    assert_eq!(allocation.device, Some(request.device));
    assert_eq!(query(&iface, allocation.base().0), Some(allocation));
    // Each driver numbers its own allocations from 1, but their identities in the iface differ.
    let other = iface.allocate(&self::request(AllocationKind::Device)).expect("allocate");
    assert_ne!(other.id, allocation.id);
    for allocation in [allocation, other] {
        // SAFETY: no code uses the memory.
        unsafe { iface.free(&allocation) }.expect("free");
    }
    close(iface);
    assert_eq!(driver.live(), Live::default());
}

fn device_other_than_a_gpu_is_omitted_and_numbers_stay() {
    let (_driver, iface) = start(Profile { first: 5, ..Profile::default() });
    let devices = iface.devices().expect("devices");
    assert_eq!(devices.iter().map(|device| device.id.0).collect::<Vec<_>>(), [1]);
}

fn device_on_no_pci_bus_is_listed_without_a_bus_id() {
    let pci = ZeResult::ZE_RESULT_ERROR_UNINITIALIZED;
    let (_driver, iface) = start(Profile { pci, ..Profile::default() });
    let devices = iface.devices().expect("devices");
    assert_eq!((devices.len(), devices[0].pci_bus_id.as_deref()), (2, None));
}

fn device_out_of_range_is_an_invalid_argument() {
    let (_driver, iface) = start(Profile::default());
    for device in [DeviceId(2), DeviceId(1 << 16), DeviceId(u32::MAX)] {
        let request = AllocRequest { device, ..request(AllocationKind::Device) };
        let error = iface.allocate(&request).expect_err("two devices");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("devices"), Some("2"));
    }
}

fn failed_query_is_an_error_with_the_drivers_code_and_the_address() {
    let (driver, iface) = start(Profile::default());
    for (code, kind) in [
        (ZeResult::ZE_RESULT_ERROR_DEVICE_LOST, ErrorKind::Unavailable),
        (ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE, ErrorKind::Unsupported),
        (ZeResult::ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS, ErrorKind::PermissionDenied),
        (ZeResult(12_345), ErrorKind::Driver),
    ] {
        driver.fail_nth("zeMemGetAllocProperties", 1, code);
        let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
        assert_eq!((error.kind(), error.operation()), (kind, "zeMemGetAllocProperties"));
        assert_eq!(error.driver().expect("code").code, i64::from(code.0));
        assert_eq!(error.context_value("address"), Some("0x70000000"));
    }
}

/// Each allocation from a pool of the driver has its own range, and free parts of the pool belong
/// to no allocation. The iface neither exports nor watches the application's memory from a pool. It
/// exports and watches the application's larger allocations.
fn pooled_memory_of_the_application_is_recognised() {
    let (driver, iface) = start(Profile::default());
    let monitor = iface.start_monitor().expect("a monitor");
    let small: Vec<_> = (0..3).map(|_| driver.allocate_elsewhere(1000)).collect();
    let mut seen = HashSet::new();
    for address in &small {
        let found = query(&iface, address + 999).expect("known");
        assert_eq!(found.range, AddressRange::new(Address(*address), 1000).expect("a range"));
        assert_eq!(query(&iface, address + 1000), None, "between two allocations");
        assert!(seen.insert(found.id), "two allocations have one identity");
        let error = iface
            .export_dma_buf(found.range, &nic(), DmaBufMapping::Default)
            .expect_err("its offset in the pool is unknown");
        assert!(error.is_unsupported() && error.to_string().contains("pool"), "{error}");
        let error =
            monitor.subscribe(found.range, Arc::new(Recorder::default())).expect_err("not watched");
        assert!(error.is_unsupported(), "{error}");
        assert!(
            !monitor.valid(&NO_SUBSCRIPTION, &found).expect("query"),
            "nothing shows that it was freed"
        );
    }
    let large = driver.allocate_elsewhere(3 << 20);
    let found = query(&iface, large).expect("known");
    let export = iface.export_dma_buf(found.range, &nic(), DmaBufMapping::Default).expect("export");
    iface.release_dma_buf(export).expect("release");
    monitor.subscribe(found.range, Arc::new(Recorder::default())).expect("watched");
    assert!(monitor.valid(&NO_SUBSCRIPTION, &found).expect("query"));
    driver.free_elsewhere(large);
    assert_eq!(driver.allocate_elsewhere(3 << 20), large, "the address is reused");
    assert!(!monitor.valid(&NO_SUBSCRIPTION, &found).expect("query"));
}

/// The driver takes small host allocations of the iface from a pool too. The iface's table of its
/// own allocations shows when one is freed.
fn pooled_memory_of_the_iface_has_its_own_identities() {
    let (_driver, iface) = start(Profile::default());
    let monitor = iface.start_monitor().expect("a monitor");
    let mut last: Option<Allocation> = None;
    let mut reused = 0;
    for _ in 0..50 {
        let allocation = iface.allocate(&request(AllocationKind::Host)).expect("allocate");
        assert_eq!(query(&iface, allocation.base().0 + 7), Some(allocation));
        assert!(monitor.valid(&NO_SUBSCRIPTION, &allocation).expect("query"));
        if let Some(last) = last.replace(allocation) {
            assert_ne!(last.id, allocation.id);
            assert!(!monitor.valid(&NO_SUBSCRIPTION, &last).expect("query"), "it was freed");
            reused += u32::from(last.base() == allocation.base());
        }
        // SAFETY: no code uses the memory.
        unsafe { iface.free(&allocation) }.expect("free");
    }
    assert!(reused > 40, "the address was reused {reused} times");
}

/// The driver exports whole allocations, so that the offset in the dma-buf is the offset in the
/// allocation. Every fd is released, both with new drivers, which have a call to return an fd, and
/// with old drivers, which lack that call.
fn exports_are_owned_fds_and_every_fd_is_released() {
    // The last profile is an old driver behind a new loader.
    let behind_new_loader = Profile { absent: Vec::new(), ..Profile::old() };
    for profile in [Profile::default(), Profile::old(), behind_new_loader] {
        let (driver, iface) = start(profile);
        let buffer = buffer(&iface, AllocationKind::Device);
        let range = buffer.allocation().range;
        let part = range.slice(70_001, 10_007).expect("a part");
        let before = open_fds(&driver);
        for _ in 0..10_000 {
            let export =
                iface.export_dma_buf(part, &nic(), DmaBufMapping::Default).expect("export");
            assert_eq!(
                (export.offset.0, export.alloc_offset.0, export.len),
                (70_001, 70_001, 10_007)
            );
            iface.release_dma_buf(export).expect("release");
        }
        assert_eq!(open_fds(&driver), before);
        assert_eq!(driver.live().exports, 0, "the driver has every fd back");
        let kept = iface.export_dma_buf(part, &nic(), DmaBufMapping::Default).expect("export");
        let again = iface.export_dma_buf(part, &nic(), DmaBufMapping::Default).expect("export");
        assert_ne!(kept.as_fd().as_raw_fd(), again.as_fd().as_raw_fd());
        drop(buffer);
        let stat = rustix::fs::fstat(&kept).expect("the fd outlives the memory");
        assert_eq!(stat.st_size as u64, LEN);
        drop((kept, again));
        assert_eq!(open_fds(&driver), before);
        close(iface);
        assert_eq!(driver.live(), Live::default());
    }
}

/// A driver may share one fd among the exports of an allocation, and close it when one of these
/// exports returns it. So a second export waits until the first one has returned the fd.
fn concurrent_exports_of_one_allocation_are_serialised() {
    let (driver, iface) = start(Profile { first_put_closes: true, ..Profile::default() });
    let buffer = buffer(&iface, AllocationKind::Device);
    let range = buffer.allocation().range;
    let before = open_fds(&driver);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let export = iface.export_dma_buf(range, &nic(), DmaBufMapping::Default);
                    iface.release_dma_buf(export.expect("export")).expect("release");
                }
            });
        }
    });
    assert_eq!(open_fds(&driver), before);
    assert_eq!(driver.live().exports, 0, "the driver has every fd back");
}

/// Replacement for a function of the driver, which simulates a race with a free. Before the second
/// export, the replacement frees the memory, opens a file with the number of the memory's fd, and
/// allocates other memory at the address.
mod replaced {
    use std::{
        ffi::c_void,
        fs::File,
        os::fd::{AsRawFd, OwnedFd},
        ptr,
        sync::Mutex,
    };

    use hmem_iface_ze::sys::{
        ContextHandle, DeviceHandle, DeviceMemoryDescription, ExportFd, MemoryAllocationProperties,
        ZeResult,
    };

    /// Another file that got the fd number of the first export.
    pub(super) static FILE: Mutex<Option<OwnedFd>> = Mutex::new(None);
    static FIRST: Mutex<Option<i32>> = Mutex::new(None);

    pub(super) unsafe extern "C" fn properties(
        context: ContextHandle,
        address: *const c_void,
        into: *mut MemoryAllocationProperties,
        device: *mut DeviceHandle,
    ) -> ZeResult {
        // SAFETY: the iface passes properties that can be read and written, and chains nothing to
        // them but an `ExportFd`.
        let export = unsafe { (*into).next }.cast::<ExportFd>();
        let first = FIRST.lock().unwrap().take().filter(|_| !export.is_null());
        if let Some(fd) = first {
            replace(context, address.cast_mut(), fd);
        }
        // SAFETY: the arguments are the caller's, unchanged.
        let code = unsafe { hmem_fake_ze::zeMemGetAllocProperties(context, address, into, device) };
        if !export.is_null() && first.is_none() {
            // SAFETY: `export` points to the caller's `ExportFd`, to which the driver wrote the fd.
            *FIRST.lock().unwrap() = Some(unsafe { (*export).fd });
        }
        code
    }

    fn replace(context: ContextHandle, address: *mut c_void, fd: i32) {
        let description = DeviceMemoryDescription::default();
        let (mut found, mut again) = (MemoryAllocationProperties::default(), ptr::null_mut());
        let (mut on, len) = (DeviceHandle::NULL, super::LEN as usize);
        // SAFETY: the driver is started, and the structures have their types. The allocation at the
        // address is live, and nothing uses its bytes.
        unsafe {
            hmem_fake_ze::zeMemGetAllocProperties(context, address, &mut found, &mut on);
            hmem_fake_ze::zeMemFree(context, address);
            let file = File::open("/dev/null").expect("a file");
            let file = rustix::io::fcntl_dupfd_cloexec(&file, fd).expect("a number");
            assert_eq!(file.as_raw_fd(), fd, "the driver closed the fd of freed memory");
            *FILE.lock().unwrap() = Some(file);
            hmem_fake_ze::zeMemAllocDevice(context, &description, len, 0, on, &mut again);
        }
        assert_eq!(again, address, "the address is reused");
    }
}

/// If the driver has no call to return an fd, the iface exports the memory a second time, to find
/// out if the driver opens an fd for each export. If other memory has replaced the first at the
/// address, the two exports are of different allocations. The iface then closes neither fd.
fn fds_stay_open_if_the_memory_is_replaced_during_its_export() {
    let absent = vec!["zeMemGetIpcHandleFromFileDescriptorExp", "zeMemPutIpcHandle"];
    let profile = Profile { absent, pools: false, ..Profile::default() };
    let driver = FakeDriver::start(profile);
    let lookup = |name: &str| match name {
        "zeMemGetAllocProperties" => Some(replaced::properties as *const ()),
        _ => driver.symbol(name),
    };
    // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(lookup) }.expect("the table");
    let iface = LevelZero::builder().functions(functions).open().expect("open");
    let allocation = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    let before = open_fds(&driver);
    let export = iface.export_dma_buf(allocation.range, &nic(), DmaBufMapping::Default);
    assert_eq!(export.expect_err("freed meanwhile").kind(), ErrorKind::OutOfBounds);
    let file = replaced::FILE.lock().unwrap().take().expect("the memory was replaced");
    rustix::fs::fstat(&file).expect("the other file is still open");
    assert_eq!(open_fds(&driver), before + 1, "the driver has its fd, and the test its file");
    driver.free_elsewhere(allocation.base().0);
}

/// The device exports nothing, but its driver reports success and the fd of another file. The fd is
/// neither used nor closed.
fn export_with_a_foreign_fd_is_refused_and_the_fd_stays_open() {
    let (driver, iface) = start(Profile::without_exports());
    assert!(!iface.capability().dma_buf);
    let error_of = |range| {
        let export = iface.export_dma_buf(range, &nic(), DmaBufMapping::Default);
        export.expect_err("no dma-buf")
    };
    let buffer = buffer(&iface, AllocationKind::Device);
    let range = buffer.allocation().range;
    let error = error_of(range);
    assert!(error.is_unsupported(), "{error}");
    assert_eq!(error.context_value("memoryAllocationExportTypes"), Some("0"));
    assert_eq!(driver.calls("zeMemPutIpcHandle"), 0);

    // The device reports exports, but the fd is a pipe, /dev/null, a named file or closed.
    let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
    let null = std::fs::File::open("/dev/null").expect("a file");
    let named = std::fs::File::open("/proc/self/exe").expect("a file");
    let fds = [pipe.as_raw_fd(), null.as_raw_fd(), named.as_raw_fd(), -1, 100_000];
    for fd in fds {
        driver.change(|profile| (profile.bogus_fd, profile.exports) = (Some(fd), true));
        let promising = Arc::new(open(&driver).expect("open"));
        let buffer = self::buffer(&promising, AllocationKind::Device);
        driver.change(|profile| profile.exports = false);
        let before = open_fds(&driver);
        let export =
            promising.export_dma_buf(buffer.allocation().range, &nic(), DmaBufMapping::Default);
        let error = export.expect_err("no dma-buf");
        assert!(error.is_unsupported() && error.to_string().contains("no dma-buf"), "{error}");
        assert_eq!(open_fds(&driver), before, "nothing was closed or left open");
    }
}

fn dma_buf_of_one_tile_is_refused_and_released() {
    let (driver, iface) = start(Profile { tiles: true, ..Profile::default() });
    let buffer = buffer(&iface, AllocationKind::Device);
    let range = buffer.allocation().range;
    let export = iface.export_dma_buf(range, &nic(), DmaBufMapping::Default);
    let error = export.expect_err("the dma-buf is one of two");
    assert!(error.to_string().contains("tiles"), "{error}");
    assert_eq!(driver.live().exports, 0);
}

fn host_and_shared_memory_are_not_exported_as_device_memory() {
    let (_driver, iface) = start(Profile::default());
    for (kind, word) in
        [(AllocationKind::Managed, "migrates"), (AllocationKind::Host, "host pages")]
    {
        let buffer = buffer(&iface, kind);
        let range = buffer.allocation().range;
        let export = iface.export_dma_buf(range, &nic(), DmaBufMapping::Default);
        let error = export.expect_err("no device memory");
        assert!(error.is_unsupported() && error.to_string().contains(word), "{error}");
    }
}

/// Level Zero has only the default mapping. The PCIe mapping is not listed. An export with it is
/// refused, and the error names the mapping.
fn pcie_mapping_is_unsupported_and_not_listed() {
    let (driver, iface) = start(Profile::default());
    assert!(!iface.capability().pcie_mapping);
    let buffer = buffer(&iface, AllocationKind::Device);
    let export = iface.export_dma_buf(buffer.allocation().range, &nic(), DmaBufMapping::Pcie);
    assert!(export.expect_err("no such mapping").is_unsupported());
    assert_eq!(driver.live().exports, 0);
}

fn memory_freed_without_the_iface_is_unknown_and_not_exported() {
    let (driver, iface) = start(Profile::default());
    let allocation = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    driver.free_elsewhere(allocation.base().0);
    assert_eq!(query(&iface, allocation.base().0), None);
    let export = iface.export_dma_buf(allocation.range, &nic(), DmaBufMapping::Default);
    assert_eq!(export.expect_err("freed").kind(), ErrorKind::OutOfBounds);
    let again = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    assert_eq!(again.base(), allocation.base(), "the address is reused");
    assert_ne!(again.id, allocation.id);
    // SAFETY: no code uses either allocation.
    unsafe {
        let error = iface.free(&allocation).expect_err("another allocation is there");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        iface.free(&again).expect("free");
    }
    assert_eq!(driver.live().undefined, 0);
}

/// The iface passes the driver no copy of memory that the device cannot access, and no copy between
/// overlapping ranges. The fake counts these copies.
fn copies_pass_the_device_accessible_memory_only() {
    let (driver, iface) = start(Profile { drivers: 2, ..Profile::default() });
    let on = |device| AllocRequest { device: DeviceId(device), ..request(AllocationKind::Device) };
    let shared = iface.allocate(&request(AllocationKind::Managed)).expect("allocate");
    let host = iface.allocate(&request(AllocationKind::Host)).expect("allocate");
    let devices: Vec<_> = [0, 0, 1, 1 << 16]
        .into_iter()
        .map(|device| iface.allocate(&on(device)).expect("allocate"))
        .collect();
    let mut chain = vec![shared, host];
    chain.extend(&devices);
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 256) as u8).collect();
    let mut found = vec![0u8; LEN as usize];
    let (first, last) = (Address::of_ptr(bytes.as_ptr()), Address::of_ptr(found.as_mut_ptr()));
    for asynchronous in [false, true] {
        found.fill(0);
        // The bytes go from a vector through all allocations in turn, and back to a vector.
        let mut from = first;
        for to in chain.iter().map(Allocation::base).chain([last]) {
            // SAFETY: the allocations are live, and nothing refers to `found` meanwhile.
            unsafe {
                if asynchronous {
                    let event = iface.start_copy(to, from, LEN).expect("start");
                    event.wait().expect("wait");
                } else {
                    iface.copy(to, from, LEN).expect("copy");
                }
            }
            from = to;
        }
        assert!(found == bytes, "the bytes differ from those that went in");
    }
    let base = devices[0].base();
    // SAFETY: the allocation is live.
    let error = unsafe { iface.copy(Address(base.0 + 100), base, 1000) }.expect_err("overlap");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    for allocation in chain {
        // SAFETY: no code uses the memory.
        unsafe { iface.free(&allocation) }.expect("free");
    }
    close(iface);
    assert_eq!(driver.live(), Live::default());
}

/// A copy between devices uses the command lists of two lanes. After a failed wait, the iface waits
/// again only for the lane with a copy in flight.
fn failed_wait_between_devices_is_repeated_once() {
    let (driver, iface) = start(Profile::default());
    let on = |device| AllocRequest { device: DeviceId(device), ..request(AllocationKind::Device) };
    let [from, to] = [0, 1].map(|device| iface.allocate(&on(device)).expect("allocate"));
    let waits = driver.calls("zeEventHostSynchronize");
    driver.fail_nth("zeEventHostSynchronize", 2, ZeResult::ZE_RESULT_ERROR_UNKNOWN);
    // SAFETY: the allocations are live.
    let error = unsafe { iface.copy(to.base(), from.base(), LEN) }.expect_err("the second wait");
    assert_eq!(error.operation(), "zeEventHostSynchronize");
    let waits = driver.calls("zeEventHostSynchronize") - waits;
    assert_eq!(waits, 3, "the first device's, the second's, and the second's once more");
    for allocation in [from, to] {
        // SAFETY: no code uses the memory.
        unsafe { iface.free(&allocation) }.expect("free");
    }
    close(iface);
    assert_eq!(driver.live(), Live::default());
}

fn started_copy_is_done_only_when_its_bytes_have_arrived() {
    let (driver, iface) = start(Profile::default());
    let allocation = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    let bytes = vec![0xA5u8; LEN as usize];
    let mut found = vec![0u8; LEN as usize];
    let (from, to) = (Address::of_ptr(bytes.as_ptr()), Address::of_ptr(found.as_mut_ptr()));
    // SAFETY: the allocation is live, and `found` is not referred to before the copy is done.
    unsafe {
        iface.copy(allocation.base(), from, LEN).expect("copy in");
        let event = iface.start_copy(to, allocation.base(), LEN).expect("start");
        assert!(!event.is_done(), "the driver has not copied yet");
        while !event.is_done() {}
    }
    assert!(found == bytes);
    // Dropping an event waits for its copy. The iface is busy until then.
    // SAFETY: the allocation is live.
    let event = unsafe { iface.start_copy(allocation.base(), from, LEN) }.expect("start");
    let rejected =
        Arc::into_inner(iface).expect("one user").close().expect_err("a copy is in flight");
    assert!(rejected.error.is_busy());
    drop(event);
    // SAFETY: no code uses the memory.
    unsafe { rejected.value.free(&allocation) }.expect("free");
    rejected.value.close().expect("close");
    assert_eq!(driver.live(), Live::default());
}

/// A process that exports device memory, until the value is dropped. A test starts and drops the
/// value while it owns the fake driver, because other tests count the fds of this process.
struct Exporter {
    process: Child,
    output: BufReader<ChildStdout>,
    handle: IpcHandle,
}

impl Exporter {
    /// Variable that is set in the process that exports.
    const VARIABLE: &str = "HMEM_ZE_TEST_EXPORTS";

    /// Returns true in the process that exports, once the value was dropped. Each test with an
    /// exporter calls this first.
    fn has_run() -> bool {
        if std::env::var(Self::VARIABLE).is_err() {
            return false;
        }
        let (_driver, iface) = start(Profile::default());
        let buffer = buffer(&iface, AllocationKind::Device);
        let handle = iface.ipc_export(buffer.allocation()).expect("export");
        println!("\nhandle {:?}", handle.bytes);
        std::io::stdin().read_line(&mut String::new()).expect("the end of the input");
        true
    }

    /// Starts the process, which runs the test `name`.
    fn start(name: &str) -> Self {
        let mut command = child::command(name);
        command.env(Self::VARIABLE, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the test starts");
        let mut output = BufReader::new(process.stdout.take().expect("its output"));
        let bytes = output.by_ref().lines().find_map(|line| {
            let line = line.expect("text");
            let bytes = line.strip_prefix("handle [")?.strip_suffix(']')?;
            Some(bytes.split(", ").map(|byte| byte.parse().expect("a byte")).collect())
        });
        let bytes = bytes.expect("the process prints its handle");
        Self { process, output, handle: IpcHandle { iface: IfaceKind::ZE, bytes } }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.output.read_to_end(&mut Vec::new()).expect("its output");
        self.process.wait().expect("the process ends");
    }
}

/// Intel's driver imports a buffer once: a second import returns the first address, and the first
/// free ends both. So the memory opens once for all ifaces of a process.
fn memory_is_opened_once_until_its_close() -> Outcome {
    need_pidfd_getfd()?;
    if Exporter::has_run() {
        return Ok(());
    }
    let (driver, iface) = start(Profile::default());
    let exporter = Exporter::start("memory_is_opened_once_until_its_close");
    let other = open(&driver).expect("open");
    for _ in 0..2 {
        let opened = iface.ipc_open(&exporter.handle).expect("open");
        assert_eq!(opened.kind, AllocationKind::Imported);
        for user in [&iface, &other] {
            let error = user.ipc_open(&exporter.handle).expect_err("it is open");
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
        assert_eq!(query(&iface, opened.base().0), Some(opened));
        // SAFETY: no code uses the memory.
        unsafe {
            let error = iface.free(&opened).expect_err("it is closed, not freed");
            assert!(error.remedy_text().is_some_and(|text| text.contains("ipc_close")), "{error}");
            iface.ipc_close(&opened).expect("close");
            assert!(iface.ipc_close(&opened).is_err(), "it is closed already");
        }
    }
    other.close().expect("close");
    close(iface);
    assert_eq!(driver.live(), Live::default());
    Ok(())
}

fn ipc_handle_of_freed_memory_or_of_another_iface_is_refused() -> Outcome {
    need_pidfd_getfd()?;
    let (driver, iface) = start(Profile::default());
    let allocation = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    let before = open_fds(&driver);
    let handle = iface.ipc_export(&allocation).expect("export");
    assert_eq!(iface.ipc_export(&allocation).expect("export"), handle, "one fd for all handles");
    assert_eq!(open_fds(&driver), before + 1);
    let foreign = IpcHandle { iface: IfaceKind::CUDA, ..handle.clone() };
    assert_eq!(
        iface.ipc_open(&foreign).expect_err("a handle of CUDA").kind(),
        ErrorKind::Malformed
    );
    let error = iface.ipc_open(&handle).expect_err("a handle of this process");
    assert!(error.is_unavailable() && error.to_string().contains("its address"), "{error}");
    // SAFETY: no code uses the memory.
    unsafe { iface.free(&allocation) }.expect("free");
    let error = iface.ipc_open(&handle).expect_err("freed");
    assert!(error.is_unavailable() && error.to_string().contains("was freed"), "{error}");
    let error = iface.ipc_export(&allocation).expect_err("freed");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let host = iface.allocate(&request(AllocationKind::Host)).expect("allocate");
    assert!(iface.ipc_export(&host).expect_err("host memory").is_unsupported());
    // SAFETY: no code uses the memory.
    unsafe { iface.free(&host) }.expect("free");
    close(iface);
    assert_eq!(driver.live(), Live::default());
    Ok(())
}

/// A child process opens the handle. The test allows the child to trace its parent.
fn ipc_handle_opens_in_another_process() -> Outcome {
    need_pidfd_getfd()?;
    const NAME: &str = "ipc_handle_opens_in_another_process";
    const HANDLE: &str = "HMEM_ZE_TEST_HANDLE";
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 3) as u8).collect();
    if let Ok(text) = std::env::var(HANDLE) {
        let handle: Vec<u8> = text.split(',').map(|byte| byte.parse().expect("a byte")).collect();
        let (driver, iface) = start(Profile::default());
        let before = open_fds(&driver);
        let handle = IpcHandle { iface: IfaceKind::ZE, bytes: handle };
        let opened = iface.ipc_open(&handle).expect("open");
        assert_eq!(opened.range.len(), LEN);
        let mut found = vec![0; LEN as usize];
        // SAFETY: the memory is open until it is closed below, and nothing refers to it.
        unsafe {
            iface.read(opened.base(), &mut found).expect("read");
            iface.write(opened.base(), &[0xEE; 16]).expect("write");
            iface.ipc_close(&opened).expect("close");
        }
        assert!(found == bytes);
        assert_eq!(open_fds(&driver), before, "no fd is left");
        close(iface);
        assert_eq!(driver.live(), Live::default());
        return Ok(());
    }
    // Under Yama the child may duplicate fds only if its parent allows it.
    rustix::process::set_ptracer(rustix::process::PTracer::Any).unwrap_or_default();
    let (_driver, iface) = start(Profile::default());
    let buffer = buffer(&iface, AllocationKind::Device);
    buffer.write(0, &bytes).expect("write");
    let handle = iface.ipc_export(buffer.allocation()).expect("export");
    let text: Vec<_> = handle.bytes.iter().map(u8::to_string).collect();
    child::passes(child::command(NAME).env(HANDLE, text.join(",")));
    let mut found = [0; 16];
    buffer.read(0, &mut found).expect("read");
    assert_eq!(found, [0xEE; 16], "bytes of the other process");
    Ok(())
}

fn close_with_live_memory_is_busy_and_returns_the_iface() {
    let (driver, iface) = start(Profile::default());
    let allocation = iface.allocate(&request(AllocationKind::Device)).expect("allocate");
    let rejected = Arc::into_inner(iface).expect("one user").close().expect_err("live memory");
    assert!(rejected.error.is_busy());
    assert_eq!(rejected.error.context_value("allocations"), Some("1"));
    let iface = rejected.value;
    // SAFETY: no code uses the memory.
    unsafe { iface.free(&allocation) }.expect("free");
    driver.fail_nth("zeContextDestroy", 1, ZeResult::ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE);
    let rejected = iface.close().expect_err("refused");
    assert_eq!(rejected.error.operation(), "zeContextDestroy");
    rejected.value.close().expect("close");
    assert_eq!(driver.live(), Live::default());
}

/// After a refused close, devices whose context was not destroyed still work, and the iface can be
/// closed again.
fn refused_close_keeps_the_contexts_that_were_not_destroyed() {
    let (driver, iface) = start(Profile { drivers: 2, ..Profile::default() });
    driver.fail_nth("zeContextDestroy", 2, ZeResult::ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE);
    let rejected = Arc::into_inner(iface).expect("one user").close().expect_err("refused");
    let iface = rejected.value;
    let on = |device| AllocRequest { device: DeviceId(device), ..request(AllocationKind::Device) };
    let error = iface.allocate(&on(1 << 16)).expect_err("its context was destroyed");
    assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
    let allocation = iface.allocate(&on(0)).expect("its context was not destroyed");
    // SAFETY: no code uses the memory.
    unsafe { iface.free(&allocation) }.expect("free");
    iface.close().expect("close");
    assert_eq!(driver.live(), Live::default());
}

/// Every call of the driver fails in turn, at its first use and at later ones. The caller gets the
/// error and nothing is leaked. Then the same work succeeds.
fn fault_at_every_call_leaves_nothing_and_the_next_call_works() -> Outcome {
    need_pidfd_getfd()?;
    if Exporter::has_run() {
        return Ok(());
    }
    let driver = FakeDriver::start(Profile::default());
    let exporter = Exporter::start("fault_at_every_call_leaves_nothing_and_the_next_call_works");
    drop(driver);
    let everything = |driver: &FakeDriver| everything(driver, &exporter.handle);
    let codes = [
        ZeResult::ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY,
        ZeResult::ZE_RESULT_ERROR_DEVICE_LOST,
        ZeResult::ZE_RESULT_ERROR_UNKNOWN,
    ];
    let symbols = Functions::SYMBOLS.iter().chain(Functions::OPTIONAL_SYMBOLS);
    let mut refused = HashSet::new();
    for symbol in symbols {
        for code in codes {
            for nth in 1..=8 {
                let driver = FakeDriver::start(Profile::default());
                let before = open_fds(&driver);
                driver.fail_nth(symbol, nth, code);
                if let Err(error) = everything(&driver) {
                    refused.insert(*symbol);
                    assert_eq!(error.iface_kind(), Some(IfaceKind::ZE), "{error}");
                }
                driver.heal();
                let live = driver.live();
                assert_eq!(live.undefined, 0, "{symbol} {nth}");
                // Objects that the driver refuses to destroy stay alive, and fds that the driver
                // refuses to close stay open.
                let destroys = symbol.contains("Destroy") || symbol.contains("Free");
                let gives_back = symbol.contains("Ipc");
                if !destroys {
                    assert_eq!(
                        Live { exports: 0, ..live },
                        Live::default(),
                        "{symbol} {nth} {code:?}"
                    );
                }
                if !destroys && !gives_back {
                    assert_eq!(live.exports, 0, "{symbol} {nth}");
                    assert_eq!(open_fds(&driver), before, "{symbol} {nth} {code:?}");
                }
                everything(&driver).expect("it works again");
            }
        }
    }
    for symbol in Functions::SYMBOLS {
        let harmless = ["zeDevicePciGetPropertiesExt", "zeEventQueryStatus"];
        assert!(refused.contains(symbol) || harmless.contains(symbol), "{symbol} never failed");
    }
    let _driver = FakeDriver::start(Profile::default());
    drop(exporter);
    Ok(())
}

/// Opens an iface, uses each of its operations, and closes it. `foreign` is a handle of another
/// process. Releases everything even if a call fails.
fn everything(driver: &FakeDriver, foreign: &IpcHandle) -> Result<()> {
    let iface = open(driver)?;
    let done = work(&iface, foreign);
    match iface.close() {
        Ok(()) => done,
        Err(rejected) => {
            let (iface, error) = (rejected.value, rejected.error);
            // Dropping the iface retries the close.
            drop(iface);
            done.and(Err(error))
        }
    }
}

fn work(iface: &LevelZero, foreign: &IpcHandle) -> Result<()> {
    let kinds = [AllocationKind::Device, AllocationKind::Host, AllocationKind::Managed];
    let mut live = Vec::new();
    let mut done = Ok(());
    for kind in kinds {
        match iface.allocate(&request(kind)) {
            Ok(allocation) => live.push(allocation),
            Err(error) => done = Err(error),
        }
    }
    if done.is_ok() {
        done = use_memory(iface, &live, foreign);
    }
    for allocation in live {
        // SAFETY: no code uses the memory.
        let freed = unsafe { iface.free(&allocation) };
        if let Err(error) = freed {
            // A refused free can be repeated.
            // SAFETY: no code uses the memory.
            unsafe { iface.free(&allocation) }?;
            done = done.and(Err(error));
        }
    }
    done
}

fn use_memory(iface: &LevelZero, live: &[Allocation], foreign: &IpcHandle) -> Result<()> {
    let mut bytes = vec![1u8; LEN as usize];
    let own = Address::of_ptr(bytes.as_mut_ptr());
    // SAFETY: the allocations are live, and nothing refers to `bytes` meanwhile.
    unsafe {
        iface.copy(live[0].base(), own, LEN)?;
        iface.copy(live[1].base(), live[0].base(), LEN)?;
        iface.copy(live[2].base(), live[1].base(), LEN)?;
        let event = iface.start_copy(own, live[0].base(), LEN)?;
        event.is_done();
        event.wait()?;
    }
    let export = iface.export_dma_buf(live[0].range, &nic(), DmaBufMapping::Default)?;
    iface.release_dma_buf(export)?;
    iface.ipc_export(&live[0])?;
    let opened = iface.ipc_open(foreign)?;
    // SAFETY: no code uses the memory.
    let closed = unsafe { iface.ipc_close(&opened) };
    if let Err(error) = closed {
        // SAFETY: no code uses the memory.
        unsafe { iface.ipc_close(&opened) }?;
        return Err(error);
    }
    Ok(())
}
