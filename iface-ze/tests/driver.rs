//! Over an injected driver: what a user sees of devices, addresses and the driver's refusals.

use std::{cell::RefCell, ffi::c_void, ptr};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, ErrorKind, Iface,
    IfaceExt, IfaceKind, Result,
    iface::{AllocRequest, DmaBufMapping, IpcHandle},
    provider::Nic,
};
use hmem_iface_ze::{
    LevelZero,
    sys::{
        self, ContextDescription, ContextHandle, DeviceHandle, DeviceMemoryProperties,
        DeviceProperties, DriverHandle, Functions, MemoryAllocationProperties, PciProperties,
        ZeResult,
    },
};

/// The first driver; the next is one above. Its root devices are 0x100, 0x101 and so on, the next
/// driver's 0x110 and so on, with one sub-device 0x1000 above each.
const FIRST_DRIVER: usize = 0x10;
/// The first driver's context; the next driver's is one above.
const FIRST_CONTEXT: usize = 0x20;

/// What the driver of this test's thread answers.
struct Driver {
    init: ZeResult,
    drivers: usize,
    /// Of each driver.
    devices: usize,
    /// Of the first device: no GPU if not [`sys::ZE_DEVICE_TYPE_GPU`].
    first: u32,
    pci: ZeResult,
    create: ZeResult,
    destroy: ZeResult,
    query: ZeResult,
    /// Contexts that are alive.
    contexts: u32,
    allocations: Vec<Fake>,
}

#[derive(Clone, Copy)]
struct Fake {
    start: u64,
    len: usize,
    kind: u32,
    id: u64,
    owner: usize,
}

impl Fake {
    fn device(start: u64, len: usize, ordinal: usize) -> Self {
        Self { start, len, kind: sys::ZE_MEMORY_TYPE_DEVICE, id: 77, owner: 0x100 + ordinal }
    }
}

thread_local! {
    static DRIVER: RefCell<Driver> = const {
        RefCell::new(Driver {
            init: ZeResult::ZE_RESULT_SUCCESS,
            drivers: 1,
            devices: 2,
            first: sys::ZE_DEVICE_TYPE_GPU,
            pci: ZeResult::ZE_RESULT_SUCCESS,
            create: ZeResult::ZE_RESULT_SUCCESS,
            destroy: ZeResult::ZE_RESULT_SUCCESS,
            query: ZeResult::ZE_RESULT_SUCCESS,
            contexts: 0,
            allocations: Vec::new(),
        })
    };
}

fn handle(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}

/// Writes `elements` as Level Zero does: the count alone, or no more than were asked for.
unsafe fn list<T: Copy>(elements: &[T], count: *mut u32, into: *mut T) -> ZeResult {
    // SAFETY: the iface passes a writable count, and null or that many writable elements.
    unsafe {
        if !into.is_null() {
            assert_eq!(*count as usize, elements.len());
            into.copy_from_nonoverlapping(elements.as_ptr(), elements.len());
        }
        *count = elements.len() as u32;
    }
    ZeResult::ZE_RESULT_SUCCESS
}

unsafe extern "C" fn init(_flags: u32) -> ZeResult {
    DRIVER.with_borrow(|driver| driver.init)
}

unsafe extern "C" fn driver_get(count: *mut u32, into: *mut DriverHandle) -> ZeResult {
    let drivers = DRIVER.with_borrow(|driver| driver.drivers);
    let drivers: Vec<_> =
        (0..drivers).map(|number| DriverHandle(handle(FIRST_DRIVER + number))).collect();
    // SAFETY: the iface's pointers are passed on.
    unsafe { list(&drivers, count, into) }
}

unsafe extern "C" fn device_get(
    driver: DriverHandle,
    count: *mut u32,
    into: *mut DeviceHandle,
) -> ZeResult {
    let devices = DRIVER.with_borrow(|driver| driver.devices);
    let first = 0x100 + 0x10 * (driver.0.addr() - FIRST_DRIVER);
    let devices: Vec<_> =
        (first..first + devices).map(|device| DeviceHandle(handle(device))).collect();
    // SAFETY: the iface's pointers are passed on.
    unsafe { list(&devices, count, into) }
}

unsafe extern "C" fn device_get_sub_devices(
    device: DeviceHandle,
    count: *mut u32,
    into: *mut DeviceHandle,
) -> ZeResult {
    // SAFETY: the iface's pointers are passed on.
    unsafe { list(&[DeviceHandle(handle(device.0.addr() + 0x1000))], count, into) }
}

unsafe extern "C" fn device_get_properties(
    device: DeviceHandle,
    into: *mut DeviceProperties,
) -> ZeResult {
    // SAFETY: the iface passes a writable structure.
    let into = unsafe { &mut *into };
    assert_eq!(into.stype, sys::ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES);
    let first = DRIVER.with_borrow(|driver| driver.first);
    into.kind = if device.0.addr() == 0x100 { first } else { sys::ZE_DEVICE_TYPE_GPU };
    for (to, from) in into.name.iter_mut().zip(b"Intel Test\0") {
        *to = from.cast_signed();
    }
    ZeResult::ZE_RESULT_SUCCESS
}

unsafe extern "C" fn device_get_memory_properties(
    _device: DeviceHandle,
    count: *mut u32,
    into: *mut DeviceMemoryProperties,
) -> ZeResult {
    let memory = DeviceMemoryProperties {
        stype: sys::ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES,
        next: ptr::null_mut(),
        flags: 0,
        max_clock_rate: 0,
        max_bus_width: 0,
        total_size: 8 << 30,
        name: [0; sys::ZE_MAX_DEVICE_NAME],
    };
    // SAFETY: the iface's pointers are passed on.
    unsafe { list(&[memory, memory], count, into) }
}

unsafe extern "C" fn device_pci_get_properties(
    device: DeviceHandle,
    into: *mut PciProperties,
) -> ZeResult {
    // SAFETY: the iface passes a writable structure.
    let into = unsafe { &mut *into };
    (into.bus, into.device, into.function) = (0x3a + (device.0.addr() as u32 & 0xf), 2, 1);
    DRIVER.with_borrow(|driver| driver.pci)
}

unsafe extern "C" fn context_create(
    driver: DriverHandle,
    description: *const ContextDescription,
    into: *mut ContextHandle,
) -> ZeResult {
    // SAFETY: the iface passes a description and a writable place.
    unsafe {
        assert_eq!((*description).stype, sys::ZE_STRUCTURE_TYPE_CONTEXT_DESC);
        *into = ContextHandle(handle(driver.0.addr() - FIRST_DRIVER + FIRST_CONTEXT));
    }
    DRIVER.with_borrow_mut(|driver| {
        driver.contexts += u32::from(driver.create == ZeResult::ZE_RESULT_SUCCESS);
        driver.create
    })
}

unsafe extern "C" fn context_destroy(context: ContextHandle) -> ZeResult {
    assert!(context.0.addr() >= FIRST_CONTEXT);
    DRIVER.with_borrow_mut(|driver| {
        driver.contexts -= u32::from(driver.destroy == ZeResult::ZE_RESULT_SUCCESS);
        driver.destroy
    })
}

/// What the context's driver knows at the address: memory of its own devices.
fn find(driver: &Driver, context: ContextHandle, pointer: *const c_void) -> Option<&Fake> {
    let number = context.0.addr() - FIRST_CONTEXT;
    driver.allocations.iter().find(|fake| {
        fake.owner >> 4 & 0xf == number
            && (pointer as u64).checked_sub(fake.start).is_some_and(|at| at < fake.len as u64)
    })
}

unsafe extern "C" fn mem_get_alloc_properties(
    context: ContextHandle,
    pointer: *const c_void,
    into: *mut MemoryAllocationProperties,
    owner: *mut DeviceHandle,
) -> ZeResult {
    DRIVER.with_borrow(|driver| {
        if driver.query != ZeResult::ZE_RESULT_SUCCESS {
            return driver.query;
        }
        // SAFETY: the iface passes a writable structure and place.
        unsafe {
            assert_eq!((*into).stype, sys::ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES);
            match find(driver, context, pointer) {
                Some(fake) => {
                    ((*into).kind, (*into).id) = (fake.kind, fake.id);
                    *owner = DeviceHandle(handle(fake.owner));
                }
                None => (*into).kind = sys::ZE_MEMORY_TYPE_UNKNOWN,
            }
        }
        ZeResult::ZE_RESULT_SUCCESS
    })
}

unsafe extern "C" fn mem_get_address_range(
    context: ContextHandle,
    pointer: *const c_void,
    base: *mut *mut c_void,
    len: *mut usize,
) -> ZeResult {
    DRIVER.with_borrow(|driver| {
        let Some(fake) = find(driver, context, pointer) else {
            return ZeResult::ZE_RESULT_ERROR_UNKNOWN;
        };
        // SAFETY: the iface passes writable places.
        unsafe { (*base, *len) = (handle(fake.start as usize), fake.len) };
        ZeResult::ZE_RESULT_SUCCESS
    })
}

fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "zeInit" => init as *const (),
        "zeDriverGet" => driver_get as *const (),
        "zeDeviceGet" => device_get as *const (),
        "zeDeviceGetSubDevices" => device_get_sub_devices as *const (),
        "zeDeviceGetProperties" => device_get_properties as *const (),
        "zeDeviceGetMemoryProperties" => device_get_memory_properties as *const (),
        "zeDevicePciGetPropertiesExt" => device_pci_get_properties as *const (),
        "zeContextCreate" => context_create as *const (),
        "zeContextDestroy" => context_destroy as *const (),
        "zeMemGetAllocProperties" => mem_get_alloc_properties as *const (),
        "zeMemGetAddressRange" => mem_get_address_range as *const (),
        _ => return None,
    })
}

fn open() -> Result<LevelZero> {
    // SAFETY: each function above has the signature of its name in `ze_api.h`, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(symbol) }?;
    LevelZero::builder().functions(functions).open()
}

fn allocate(fake: Fake) {
    DRIVER.with_borrow_mut(|driver| driver.allocations.push(fake));
}

fn query(iface: &LevelZero, address: u64) -> Option<Allocation> {
    iface.query(Address(address)).expect("query")
}

fn contexts() -> u32 {
    DRIVER.with_borrow(|driver| driver.contexts)
}

/// HM-04
#[test]
fn a_missing_symbol_is_named_whichever_it_is() {
    for missing in Functions::SYMBOLS {
        // SAFETY: as in `fake`; one symbol fewer.
        let error =
            unsafe { Functions::from_lookup(|name| symbol(name).filter(|_| name != *missing)) }
                .expect_err("a symbol is missing");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("symbol"), Some(*missing));
    }
}

/// HM-04
#[test]
fn a_driver_without_devices_is_unavailable_with_its_own_code() {
    DRIVER.with_borrow_mut(|driver| driver.init = ZeResult::ZE_RESULT_ERROR_UNINITIALIZED);
    let error = open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "zeInit");
    let code = error.driver().expect("the driver's code");
    assert_eq!((code.name.as_ref(), code.code), ("ZE_RESULT_ERROR_UNINITIALIZED", 0x7800_0001));
    assert!(error.context_value("library").is_some());
    assert!(error.to_string().contains("0x78000001"), "{error}");
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
        assert_eq!(
            allocation.range,
            AddressRange::new(Address(0x7000_0000), 100_000).expect("range")
        );
        assert_eq!(
            (allocation.kind, allocation.device),
            (AllocationKind::Device, Some(DeviceId(1)))
        );
        assert_eq!(allocation.iface, IfaceKind::ZE);
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
    DRIVER.with_borrow_mut(|driver| driver.query = ZeResult::ZE_RESULT_ERROR_DEVICE_LOST);
    let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "zeMemGetAllocProperties");
    assert_eq!(error.driver().expect("code").name, "ZE_RESULT_ERROR_DEVICE_LOST");
    assert_eq!(error.context_value("address"), Some("0x70000000"));
}

/// HM-01
#[test]
fn not_supported_in_the_drivers_dialect_is_unsupported() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE);
    assert!(iface.query(Address(0x7000_0000)).expect_err("not supported").is_unsupported());
}

/// HM-01
#[test]
fn a_code_that_no_header_names_keeps_its_number() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = ZeResult(12_345));
    let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
    assert_eq!(error.kind(), ErrorKind::Driver);
    assert!(error.to_string().contains("code 0x3039"), "{error}");
}

/// HM-05
#[test]
fn a_device_out_of_range_is_an_invalid_argument() {
    let iface = open().expect("open");
    for device in [DeviceId(2), DeviceId(u32::MAX)] {
        let error = iface.flush_inbound(device).expect_err("two devices");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("devices"), Some("2"));
    }
}

/// HM-04
///
/// A function that is not there yet is refused as such, and the capability agrees.
#[test]
fn what_is_lacking_is_unsupported_with_its_reason() {
    let iface = open().expect("open");
    let range = AddressRange::new(Address(0x7000_0000), 4096).expect("range");
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let capability = iface.capability();
    // SAFETY: the addresses are never reached: the copy is refused.
    let copy = unsafe { iface.start_copy(Address(1), Address(2), 1) };
    // SAFETY: the range is never locked: the call is refused.
    let lock = unsafe { iface.host_register(range) };
    for (has, refused) in [
        (capability.allocate, iface.allocate(&request).err()),
        (capability.dma_buf, iface.export_dma_buf(range, &nic, DmaBufMapping::Default).err()),
        (capability.peer_memory, iface.export_peer_memory(range, &nic).err()),
        (capability.async_copy, copy.err()),
        (capability.host_register, lock.err()),
        (capability.ipc, iface.ipc_open(&IpcHandle { iface: IfaceKind::ZE, bytes: vec![] }).err()),
        (capability.free_callback, iface.start_monitor().err()),
    ] {
        assert!(!has);
        let error = refused.expect("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.context_value("reason").expect("reason").starts_with("hmem-iface-ze does not"),
            "{error}"
        );
    }
}

/// HM-04
#[test]
fn no_context_stays_behind_an_opening_that_failed() {
    DRIVER.with_borrow_mut(|driver| driver.create = ZeResult::ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY);
    let error = open().expect_err("no context");
    assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfResources, "zeContextCreate"));
    assert_eq!(contexts(), 0);
    DRIVER.with_borrow_mut(|driver| driver.devices = 0);
    open().expect_err("no device");
    assert_eq!(contexts(), 0);
}

/// HM-04
#[test]
fn closing_and_dropping_destroy_the_context_once() {
    let iface = open().expect("open");
    assert_eq!(contexts(), 1);
    iface.close().expect("close");
    assert_eq!(contexts(), 0);
    drop(open().expect("open"));
    assert_eq!(contexts(), 0);
}

/// HM-04
#[test]
fn a_refused_close_hands_the_iface_back() {
    let iface = open().expect("open");
    DRIVER
        .with_borrow_mut(|driver| driver.destroy = ZeResult::ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE);
    let rejected = iface.close().expect_err("refused");
    assert!(rejected.error.is_busy());
    assert_eq!(rejected.error.operation(), "zeContextDestroy");
    DRIVER.with_borrow_mut(|driver| driver.destroy = ZeResult::ZE_RESULT_SUCCESS);
    rejected.value.close().expect("close");
    assert_eq!(contexts(), 0);
}

/// HM-01
#[test]
fn devices_are_listed_with_name_memory_and_pci_bus_id() {
    let devices = open().expect("open").devices().expect("devices");
    assert_eq!(devices.len(), 2);
    assert_eq!((devices[1].id, devices[1].name.as_str()), (DeviceId(1), "Intel Test"));
    assert_eq!(
        (devices[1].pci_bus_id.as_deref(), devices[1].memory),
        (Some("0000:3b:02.1"), 16 << 30)
    );
}

/// HM-01
///
/// A simulated device of Intel's driver answers so.
#[test]
fn a_device_on_no_pci_bus_is_listed_without_a_bus_id() {
    DRIVER.with_borrow_mut(|driver| driver.pci = ZeResult::ZE_RESULT_ERROR_UNINITIALIZED);
    let devices = open().expect("open").devices().expect("devices");
    assert_eq!((devices.len(), devices[0].pci_bus_id.as_deref()), (2, None));
}

/// HM-01
#[test]
fn a_device_that_is_no_gpu_is_left_out_and_the_others_count_from_0() {
    DRIVER.with_borrow_mut(|driver| driver.first = 5);
    let iface = open().expect("open");
    let devices = iface.devices().expect("devices");
    assert_eq!((devices.len(), devices[0].id), (1, DeviceId(0)));
    allocate(Fake::device(0x7000_0000, 4096, 1));
    assert_eq!(query(&iface, 0x7000_0000).expect("known").device, Some(DeviceId(0)));
}

/// HM-01
#[test]
fn each_kind_of_memory_is_told_apart() {
    let iface = open().expect("open");
    let device = Fake::device(0x7000_0000, 4096, 1);
    for (fake, kind, owner) in [
        (device, AllocationKind::Device, Some(DeviceId(1))),
        (Fake { owner: 0x1101, ..device }, AllocationKind::Device, Some(DeviceId(1))),
        (Fake { kind: sys::ZE_MEMORY_TYPE_HOST, ..device }, AllocationKind::Host, None),
        (Fake { kind: sys::ZE_MEMORY_TYPE_SHARED, ..device }, AllocationKind::Managed, None),
    ] {
        DRIVER.with_borrow_mut(|driver| driver.allocations = vec![fake]);
        let allocation = query(&iface, 0x7000_0800).expect("known");
        assert_eq!(
            (allocation.kind, allocation.device, allocation.id),
            (kind, owner, AllocationId(77))
        );
    }
}

/// HM-01
///
/// Each driver counts its own allocations from 1.
#[test]
fn two_drivers_answer_for_their_own_memory_under_different_identities() {
    DRIVER.with_borrow_mut(|driver| driver.drivers = 2);
    let iface = open().expect("open");
    assert_eq!((iface.devices().expect("devices").len(), contexts()), (4, 2));
    allocate(Fake::device(0x7000_0000, 4096, 1));
    allocate(Fake::device(0x8000_0000, 4096, 0x11));
    let (first, second) = (query(&iface, 0x7000_0000), query(&iface, 0x8000_0000));
    let (first, second) = (first.expect("known"), second.expect("known"));
    assert_eq!((first.device, second.device), (Some(DeviceId(1)), Some(DeviceId(3))));
    assert_ne!(first.id, second.id);
    iface.close().expect("close");
    assert_eq!(contexts(), 0);
}
