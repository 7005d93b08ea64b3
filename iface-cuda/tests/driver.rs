//! Over an injected driver: what a user sees of devices, addresses and the driver's refusals.

use std::{
    cell::RefCell,
    ffi::{c_char, c_int, c_uint, c_void},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, ErrorKind, Iface, IfaceKind,
    Result,
    iface::{AllocRequest, DmaBufMapping, IpcHandle},
    provider::Nic,
};
use hmem_iface_cuda::{
    Cuda,
    sys::{self, CuDevice, CuPointerAttribute, CuResult, Functions},
};

/// What the driver of this test's thread answers.
struct Driver {
    init: CuResult,
    version: c_int,
    devices: c_int,
    query: CuResult,
    /// How many attributes a query asked for.
    asked: c_uint,
    allocations: Vec<Fake>,
}

#[derive(Clone, Copy)]
struct Fake {
    start: u64,
    len: usize,
    memory_type: c_uint,
    ordinal: c_int,
    buffer: u64,
    managed: bool,
    context: usize,
    pool: usize,
}

impl Fake {
    fn device(start: u64, len: usize, ordinal: c_int) -> Self {
        let memory_type = sys::CU_MEMORYTYPE_DEVICE;
        Self { start, len, memory_type, ordinal, buffer: 77, managed: false, context: 0x10, pool: 0 }
    }
}

thread_local! {
    static DRIVER: RefCell<Driver> = const {
        RefCell::new(Driver {
            init: CuResult::CUDA_SUCCESS,
            version: 12_090,
            devices: 2,
            query: CuResult::CUDA_SUCCESS,
            asked: 0,
            allocations: Vec::new(),
        })
    };
}

unsafe extern "C" fn init(flags: c_uint) -> CuResult {
    assert_eq!(flags, 0);
    DRIVER.with_borrow(|driver| driver.init)
}

unsafe extern "C" fn driver_get_version(version: *mut c_int) -> CuResult {
    // SAFETY: the iface passes a writable place.
    unsafe { *version = DRIVER.with_borrow(|driver| driver.version) };
    CuResult::CUDA_SUCCESS
}

unsafe extern "C" fn device_get_count(count: *mut c_int) -> CuResult {
    // SAFETY: the iface passes a writable place.
    unsafe { *count = DRIVER.with_borrow(|driver| driver.devices) };
    CuResult::CUDA_SUCCESS
}

unsafe extern "C" fn device_get(device: *mut CuDevice, ordinal: c_int) -> CuResult {
    // SAFETY: the iface passes a writable place.
    unsafe { *device = ordinal + 100 };
    CuResult::CUDA_SUCCESS
}

/// Writes `text` and its NUL.
unsafe fn write(text: &str, to: *mut c_char, len: c_int) {
    assert!(text.len() < len as usize);
    // SAFETY: the iface passes `len` writable bytes, more than the text has.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        *to.add(text.len()) = 0;
    }
}

unsafe extern "C" fn device_get_name(name: *mut c_char, len: c_int, device: CuDevice) -> CuResult {
    // SAFETY: the iface passes `len` writable bytes.
    unsafe { write(&format!("NVIDIA Test {device}"), name, len) };
    CuResult::CUDA_SUCCESS
}

unsafe extern "C" fn device_total_mem(bytes: *mut usize, _device: CuDevice) -> CuResult {
    // SAFETY: the iface passes a writable place.
    unsafe { *bytes = 80 << 30 };
    CuResult::CUDA_SUCCESS
}

unsafe extern "C" fn device_get_pci_bus_id(id: *mut c_char, len: c_int, device: CuDevice) -> CuResult {
    // SAFETY: the iface passes `len` writable bytes.
    unsafe { write(&format!("0000:3{}:00.0", ["A", "B"][device as usize - 100]), id, len) };
    CuResult::CUDA_SUCCESS
}

unsafe extern "C" fn pointer_get_attributes(
    count: c_uint,
    attributes: *mut CuPointerAttribute,
    data: *mut *mut c_void,
    pointer: u64,
) -> CuResult {
    DRIVER.with_borrow_mut(|driver| {
        driver.asked = count;
        if driver.query != CuResult::CUDA_SUCCESS {
            return driver.query;
        }
        let known = |fake: &&Fake| pointer.checked_sub(fake.start).is_some_and(|at| at < fake.len as u64);
        let Some(fake) = driver.allocations.iter().find(known) else {
            return CuResult::CUDA_SUCCESS;
        };
        for index in 0..count as usize {
            // SAFETY: the iface passes `count` attributes and as many places for values of their types.
            unsafe {
                let place = *data.add(index);
                match *attributes.add(index) {
                    sys::CU_POINTER_ATTRIBUTE_CONTEXT => *place.cast() = fake.context,
                    sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => *place.cast() = fake.memory_type,
                    sys::CU_POINTER_ATTRIBUTE_BUFFER_ID => *place.cast() = fake.buffer,
                    sys::CU_POINTER_ATTRIBUTE_IS_MANAGED => *place.cast() = fake.managed,
                    sys::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => *place.cast() = fake.ordinal,
                    sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => *place.cast() = fake.start,
                    sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE => *place.cast() = fake.len,
                    sys::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => *place.cast() = fake.pool,
                    _ => return CuResult::CUDA_ERROR_INVALID_VALUE,
                }
            }
        }
        CuResult::CUDA_SUCCESS
    })
}

fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "cuInit" => init as *const (),
        "cuDriverGetVersion" => driver_get_version as *const (),
        "cuDeviceGetCount" => device_get_count as *const (),
        "cuDeviceGet" => device_get as *const (),
        "cuDeviceGetName" => device_get_name as *const (),
        "cuDeviceTotalMem_v2" => device_total_mem as *const (),
        "cuDeviceGetPCIBusId" => device_get_pci_bus_id as *const (),
        "cuPointerGetAttributes" => pointer_get_attributes as *const (),
        _ => return None,
    })
}

fn open() -> Result<Cuda> {
    // SAFETY: each function above has the signature of its name in `cuda.h`, and functions live forever.
    let functions = unsafe { Functions::from_lookup(symbol) }?;
    Cuda::builder().functions(functions).open()
}

fn allocate(fake: Fake) {
    DRIVER.with_borrow_mut(|driver| driver.allocations.push(fake));
}

fn query(iface: &Cuda, address: u64) -> Option<Allocation> {
    iface.query(Address(address)).expect("query")
}

/// HM-04
#[test]
fn a_missing_symbol_is_named_whichever_it_is() {
    for missing in Functions::SYMBOLS {
        // SAFETY: as in `fake`; one symbol fewer.
        let error = unsafe { Functions::from_lookup(|name| symbol(name).filter(|_| name != *missing)) }
            .expect_err("a symbol is missing");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("symbol"), Some(*missing));
    }
}

/// HM-04
#[test]
fn a_driver_without_devices_is_unavailable_with_its_own_code() {
    DRIVER.with_borrow_mut(|driver| driver.init = CuResult::CUDA_ERROR_NO_DEVICE);
    let error = open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "cuInit");
    let code = error.driver().expect("the driver's code");
    assert_eq!((code.name.as_ref(), code.code), ("CUDA_ERROR_NO_DEVICE", 100));
    assert!(error.context_value("library").is_some());
    assert!(error.to_string().contains("CUDA_ERROR_NO_DEVICE (100)"), "{error}");
}

/// HM-04
#[test]
fn a_driver_that_counts_no_devices_is_unavailable() {
    DRIVER.with_borrow_mut(|driver| driver.devices = 0);
    let error = open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("devices"), Some("0"));
}

/// HM-01
#[test]
fn an_address_at_either_end_of_an_allocation_is_found_and_one_past_it_is_not() {
    let iface = open().expect("open");
    allocate(Fake::device(0x7000_0000, 100_000, 1));
    for offset in [0, 1, 4097, 99_999] {
        let allocation = query(&iface, 0x7000_0000 + offset).expect("known");
        assert_eq!(allocation.range, AddressRange::new(Address(0x7000_0000), 100_000).expect("range"));
        assert_eq!((allocation.kind, allocation.device), (AllocationKind::Device, Some(DeviceId(1))));
        assert_eq!(allocation.iface, IfaceKind::CUDA);
    }
    assert_eq!(query(&iface, 0x7000_0000 - 1), None);
    assert_eq!(query(&iface, 0x7000_0000 + 100_000), None);
}

/// HM-01
#[test]
fn a_foreign_address_is_nobodys() {
    let iface = open().expect("open");
    let on_the_stack = 0u8;
    for address in [Address(0), Address::of_ptr(&on_the_stack), Address(u64::MAX)] {
        assert_eq!(iface.query(address).expect("query"), None);
    }
}

/// HM-01
#[test]
fn a_failed_query_is_an_error_with_the_drivers_code_and_the_address() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = CuResult::CUDA_ERROR_DEINITIALIZED);
    let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "cuPointerGetAttributes");
    assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_DEINITIALIZED");
    assert_eq!(error.context_value("address"), Some("0x70000000"));
}

/// HM-01
#[test]
fn not_supported_in_the_drivers_dialect_is_unsupported() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = CuResult::CUDA_ERROR_NOT_SUPPORTED);
    assert!(iface.query(Address(0x7000_0000)).expect_err("not supported").is_unsupported());
}

/// HM-01
#[test]
fn a_code_that_no_header_names_keeps_its_number() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = CuResult(2_345));
    let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
    assert_eq!(error.kind(), ErrorKind::Driver);
    assert!(error.to_string().contains("code 2345"), "{error}");
}

/// HM-05
#[test]
fn a_device_out_of_range_is_an_invalid_argument() {
    let iface = open().expect("open");
    let request = AllocRequest { len: 4096, device: DeviceId(2), kind: AllocationKind::Device };
    for error in [
        iface.allocate(&request).expect_err("two devices"),
        iface.flush_inbound(DeviceId(u32::MAX)).expect_err("two devices"),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("devices"), Some("2"));
    }
}

/// HM-04: what is not there yet says so, and the capability says the same.
#[test]
fn what_is_lacking_is_unsupported_with_its_reason() {
    let iface = open().expect("open");
    let range = AddressRange::new(Address(0x7000_0000), 4096).expect("range");
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let capability = iface.capability();
    // SAFETY: the addresses are never reached: the copy is refused.
    let copy = unsafe { iface.copy_async(Address(1), Address(2), 1) };
    // SAFETY: the range is never locked: the call is refused.
    let lock = unsafe { iface.host_register(range) };
    for (has, refused) in [
        (capability.allocate, iface.allocate(&request).err()),
        (capability.dma_buf, iface.export_dma_buf(range, &nic, DmaBufMapping::Default).err()),
        (capability.peer_memory, iface.export_peer_memory(range, &nic).err()),
        (capability.async_copy, copy.err()),
        (capability.host_register, lock.err()),
        (capability.ipc, iface.ipc_open(&IpcHandle { iface: IfaceKind::CUDA, bytes: vec![] }).err()),
        (capability.free_callback, iface.monitor().err()),
    ] {
        assert!(!has);
        let error = refused.expect("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.context_value("reason").expect("reason").starts_with("hmem-iface-cuda does not"),
            "{error}"
        );
    }
}

/// HM-04
#[test]
fn a_stub_library_is_unavailable_and_called_a_stub() {
    DRIVER.with_borrow_mut(|driver| driver.init = CuResult::CUDA_ERROR_STUB_LIBRARY);
    let error = open().expect_err("a stub");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(
        text.contains("CUDA_ERROR_STUB_LIBRARY (34)") && text.contains("stub: take its folder"),
        "{text}"
    );
}

/// HM-04
#[test]
fn a_driver_without_range_attributes_is_unavailable_with_its_version() {
    DRIVER.with_borrow_mut(|driver| driver.version = 10_010);
    let error = open().expect_err("too old");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("version"), Some("10010"));
}

/// HM-01
#[test]
fn devices_are_listed_with_name_memory_and_pci_bus_id() {
    let devices = open().expect("open").devices().expect("devices");
    assert_eq!(devices.len(), 2);
    assert_eq!((devices[1].id, devices[1].name.as_str()), (DeviceId(1), "NVIDIA Test 101"));
    assert_eq!((devices[1].pci_bus_id.as_deref(), devices[1].memory), (Some("0000:3b:00.0"), 80 << 30));
}

/// HM-01
#[test]
fn each_kind_of_memory_is_told_apart() {
    let iface = open().expect("open");
    let device = Fake::device(0x7000_0000, 4096, 1);
    let host = Fake { memory_type: sys::CU_MEMORYTYPE_HOST, ordinal: 0, ..device };
    for (fake, kind, owner) in [
        (device, AllocationKind::Device, Some(DeviceId(1))),
        (host, AllocationKind::Host, None),
        (Fake { managed: true, ..device }, AllocationKind::Managed, None),
        (Fake { context: 0, pool: 0x20, ..device }, AllocationKind::StreamOrdered, Some(DeviceId(1))),
        (Fake { context: 0, ..device }, AllocationKind::Virtual, Some(DeviceId(1))),
        (Fake { ordinal: -2, ..device }, AllocationKind::Device, None),
    ] {
        DRIVER.with_borrow_mut(|driver| driver.allocations = vec![fake]);
        let allocation = query(&iface, 0x7000_0800).expect("known");
        assert_eq!((allocation.kind, allocation.device, allocation.id), (kind, owner, AllocationId(77)));
    }
}

/// HM-01: one call for all attributes, and none that an older driver would refuse the whole call for.
#[test]
fn an_older_driver_is_not_asked_for_pools() {
    for (version, attributes) in [(12_090, 8), (11_030, 8), (11_020, 7)] {
        DRIVER.with_borrow_mut(|driver| driver.version = version);
        let iface = open().expect("open");
        assert_eq!(query(&iface, 0x7000_0000), None);
        assert_eq!(DRIVER.with_borrow(|driver| driver.asked), attributes);
    }
}

/// HM-01: `cuda.h` gives these codes for addresses that no context knows.
#[test]
fn both_codes_for_a_foreign_address_mean_nobodys() {
    let iface = open().expect("open");
    for code in [CuResult::CUDA_ERROR_INVALID_VALUE, CuResult::CUDA_ERROR_INVALID_CONTEXT] {
        DRIVER.with_borrow_mut(|driver| driver.query = code);
        assert_eq!(query(&iface, 0x7000_0000), None);
    }
}
