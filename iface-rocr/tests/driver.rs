//! Over an injected driver: what a user sees of devices, addresses and the driver's refusals.

use std::{cell::RefCell, ffi::c_void};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt,
    IfaceKind, Result,
    iface::{AllocRequest, DmaBufMapping, IpcHandle},
    provider::Nic,
};
use hmem_iface_rocr::{
    Rocr,
    sys::{
        self, Agent, AgentCallback, Functions, HsaStatus, ListAllocator, MemoryPool, PointerInfo,
        PoolCallback,
    },
};

/// The CPU; GPUs are 11, 12 and so on.
const CPU: Agent = Agent { handle: 10 };

/// What the driver of this test's thread answers.
struct Driver {
    init: HsaStatus,
    shut_down: HsaStatus,
    devices: u64,
    query: HsaStatus,
    /// What the agents' attributes answer.
    attributes: HsaStatus,
    /// Counts of the runtime that are held.
    held: u32,
    allocations: Vec<Fake>,
}

#[derive(Clone, Copy)]
struct Fake {
    agent_base: u64,
    host_base: u64,
    len: usize,
    kind: u32,
    owner: Agent,
}

impl Fake {
    fn device(start: u64, len: usize, ordinal: u64) -> Self {
        let owner = Agent { handle: 11 + ordinal };
        Self {
            agent_base: start,
            host_base: start,
            len,
            kind: sys::HSA_EXT_POINTER_TYPE_HSA,
            owner,
        }
    }
}

thread_local! {
    static DRIVER: RefCell<Driver> = const {
        RefCell::new(Driver {
            init: HsaStatus::HSA_STATUS_SUCCESS,
            shut_down: HsaStatus::HSA_STATUS_SUCCESS,
            devices: 2,
            query: HsaStatus::HSA_STATUS_SUCCESS,
            attributes: HsaStatus::HSA_STATUS_SUCCESS,
            held: 0,
            allocations: Vec::new(),
        })
    };
}

unsafe extern "C" fn init() -> HsaStatus {
    DRIVER.with_borrow_mut(|driver| {
        driver.held += u32::from(driver.init == HsaStatus::HSA_STATUS_SUCCESS);
        driver.init
    })
}

unsafe extern "C" fn shut_down() -> HsaStatus {
    DRIVER.with_borrow_mut(|driver| {
        driver.held -= u32::from(driver.shut_down == HsaStatus::HSA_STATUS_SUCCESS);
        driver.shut_down
    })
}

unsafe extern "C" fn iterate_agents(callback: AgentCallback, data: *mut c_void) -> HsaStatus {
    let devices = DRIVER.with_borrow(|driver| driver.devices);
    for handle in CPU.handle..=CPU.handle + devices {
        // SAFETY: the callback takes the data that came with it.
        assert_eq!(unsafe { callback(Agent { handle }, data) }, HsaStatus::HSA_STATUS_SUCCESS);
    }
    HsaStatus::HSA_STATUS_SUCCESS
}

unsafe extern "C" fn agent_get_info(agent: Agent, attribute: u32, value: *mut c_void) -> HsaStatus {
    const KIND: u32 = sys::HSA_AGENT_INFO_DEVICE.number;
    const PRODUCT: u32 = sys::HSA_AMD_AGENT_INFO_PRODUCT_NAME.number;
    const NAME: u32 = sys::HSA_AGENT_INFO_NAME.number;
    const DOMAIN: u32 = sys::HSA_AMD_AGENT_INFO_DOMAIN.number;
    const BDF: u32 = sys::HSA_AMD_AGENT_INFO_BDFID.number;
    let mut text = [0u8; 64];
    // SAFETY: the iface passes a place of the attribute's type.
    unsafe {
        match attribute {
            KIND => *value.cast() = u32::from(agent != CPU),
            // The second GPU has no product name.
            PRODUCT => {
                text[..4].copy_from_slice(if agent.handle == 11 { b"Test" } else { &[0; 4] });
                *value.cast() = text;
            }
            NAME => {
                text[..6].copy_from_slice(b"gfx942");
                *value.cast() = text;
            }
            DOMAIN => *value.cast() = 0u32,
            BDF => *value.cast() = 0xc1_00u32 | 2 << 3 | 1,
            _ => return HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT,
        }
    }
    DRIVER.with_borrow(|driver| driver.attributes)
}

unsafe extern "C" fn agent_iterate_memory_pools(
    _agent: Agent,
    callback: PoolCallback,
    data: *mut c_void,
) -> HsaStatus {
    for handle in 0..3 {
        // SAFETY: the callback takes the data that came with it.
        assert_eq!(unsafe { callback(MemoryPool { handle }, data) }, HsaStatus::HSA_STATUS_SUCCESS);
    }
    HsaStatus::HSA_STATUS_SUCCESS
}

/// Two views of the device's memory, and a larger pool that is none of it.
unsafe extern "C" fn memory_pool_get_info(
    pool: MemoryPool,
    attribute: u32,
    value: *mut c_void,
) -> HsaStatus {
    // SAFETY: the iface passes a place of the attribute's type.
    unsafe {
        if attribute == sys::HSA_AMD_MEMORY_POOL_INFO_SEGMENT.number {
            *value.cast() = if pool.handle == 2 { 3u32 } else { sys::HSA_AMD_SEGMENT_GLOBAL };
        } else {
            *value.cast() = [192usize << 30, 192 << 30, 1 << 50][pool.handle as usize];
        }
    }
    HsaStatus::HSA_STATUS_SUCCESS
}

unsafe extern "C" fn pointer_info(
    pointer: *const c_void,
    info: *mut PointerInfo,
    allocator: ListAllocator,
    _count: *mut u32,
    _agents: *mut *mut Agent,
) -> HsaStatus {
    assert!(allocator.is_none());
    // SAFETY: the iface passes a writable structure.
    let info = unsafe { &mut *info };
    assert_eq!(info.size as usize, size_of::<PointerInfo>());
    DRIVER.with_borrow(|driver| {
        if driver.query != HsaStatus::HSA_STATUS_SUCCESS || pointer.is_null() {
            return if pointer.is_null() {
                HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT
            } else {
                driver.query
            };
        }
        let address = pointer as u64;
        let known = |fake: &&Fake| {
            [fake.agent_base, fake.host_base]
                .iter()
                .any(|base| address.checked_sub(*base).is_some_and(|at| at < fake.len as u64))
        };
        let Some(fake) = driver.allocations.iter().find(known) else {
            // What the real runtime leaves there for an unknown address: stale values.
            info.kind = sys::HSA_EXT_POINTER_TYPE_UNKNOWN;
            info.len = usize::MAX;
            info.agent_base = pointer.cast_mut();
            return HsaStatus::HSA_STATUS_SUCCESS;
        };
        info.kind = fake.kind;
        info.agent_base = fake.agent_base as *mut c_void;
        info.host_base = fake.host_base as *mut c_void;
        info.len = fake.len;
        info.owner = fake.owner;
        HsaStatus::HSA_STATUS_SUCCESS
    })
}

fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "hsa_init" => init as *const (),
        "hsa_shut_down" => shut_down as *const (),
        "hsa_iterate_agents" => iterate_agents as *const (),
        "hsa_agent_get_info" => agent_get_info as *const (),
        "hsa_amd_agent_iterate_memory_pools" => agent_iterate_memory_pools as *const (),
        "hsa_amd_memory_pool_get_info" => memory_pool_get_info as *const (),
        "hsa_amd_pointer_info" => pointer_info as *const (),
        _ => return None,
    })
}

fn open() -> Result<Rocr> {
    // SAFETY: each function above has the signature of its name in the headers, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(symbol) }?;
    Rocr::builder().functions(functions).open()
}

fn allocate(fake: Fake) {
    DRIVER.with_borrow_mut(|driver| driver.allocations.push(fake));
}

fn query(iface: &Rocr, address: u64) -> Option<Allocation> {
    iface.query(Address(address)).expect("query")
}

fn held() -> u32 {
    DRIVER.with_borrow(|driver| driver.held)
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
    DRIVER.with_borrow_mut(|driver| driver.init = HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES);
    let error = open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "hsa_init");
    let code = error.driver().expect("the driver's code");
    assert_eq!((code.name.as_ref(), code.code), ("HSA_STATUS_ERROR_OUT_OF_RESOURCES", 0x1008));
    assert!(error.context_value("library").is_some());
    assert!(error.to_string().contains("0x1008"), "{error}");
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
        assert_eq!(allocation.iface, IfaceKind::ROCR);
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
    DRIVER.with_borrow_mut(|driver| driver.query = HsaStatus::HSA_STATUS_ERROR_NOT_INITIALIZED);
    let error = iface.query(Address(0x7000_0000)).expect_err("the driver refused");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), "hsa_amd_pointer_info");
    assert_eq!(error.driver().expect("code").name, "HSA_STATUS_ERROR_NOT_INITIALIZED");
    assert_eq!(error.context_value("address"), Some("0x70000000"));
}

/// HM-01
#[test]
fn not_supported_in_the_drivers_dialect_is_unsupported() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED);
    assert!(iface.query(Address(0x7000_0000)).expect_err("not supported").is_unsupported());
}

/// HM-01
#[test]
fn a_code_that_no_header_names_keeps_its_number() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.query = HsaStatus(12_345));
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
        (
            capability.ipc,
            iface.ipc_open(&IpcHandle { iface: IfaceKind::ROCR, bytes: vec![] }).err(),
        ),
        (capability.free_callback, iface.start_monitor().err()),
    ] {
        assert!(!has);
        let error = refused.expect("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.context_value("reason").expect("reason").starts_with("hmem-iface-rocr does not"),
            "{error}"
        );
    }
}

/// HM-04
#[test]
fn nothing_is_held_after_an_opening_that_failed_half_way() {
    DRIVER.with_borrow_mut(|driver| driver.attributes = HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT);
    let error = open().expect_err("a device refuses");
    assert_eq!(error.driver().expect("code").name, "HSA_STATUS_ERROR_INVALID_AGENT");
    assert_eq!(held(), 0);
    DRIVER.with_borrow_mut(|driver| driver.devices = 0);
    open().expect_err("no device");
    assert_eq!(held(), 0);
}

/// HM-04
#[test]
fn closing_and_dropping_give_the_runtime_back_once() {
    let iface = open().expect("open");
    assert_eq!(held(), 1);
    iface.close().expect("close");
    assert_eq!(held(), 0);
    drop(open().expect("open"));
    assert_eq!(held(), 0);
}

/// HM-04
#[test]
fn a_refused_close_hands_the_iface_back() {
    let iface = open().expect("open");
    DRIVER.with_borrow_mut(|driver| driver.shut_down = HsaStatus::HSA_STATUS_ERROR);
    let rejected = iface.close().expect_err("refused");
    assert_eq!(rejected.error.operation(), "hsa_shut_down");
    assert_eq!(rejected.value.devices().expect("devices").len(), 2);
    DRIVER.with_borrow_mut(|driver| driver.shut_down = HsaStatus::HSA_STATUS_SUCCESS);
    rejected.value.close().expect("close");
    assert_eq!(held(), 0);
}

/// HM-01
#[test]
fn devices_are_listed_with_name_memory_and_pci_bus_id() {
    let devices = open().expect("open").devices().expect("devices");
    assert_eq!(devices.len(), 2);
    assert_eq!((devices[0].id, devices[0].name.as_str()), (DeviceId(0), "Test"));
    assert_eq!((devices[1].id, devices[1].name.as_str()), (DeviceId(1), "gfx942"));
    assert_eq!(
        (devices[1].pci_bus_id.as_deref(), devices[1].memory),
        (Some("0000:c1:02.1"), 192 << 30)
    );
}

/// HM-01
#[test]
fn each_kind_of_memory_is_told_apart() {
    let iface = open().expect("open");
    let device = Fake::device(0x7000_0000, 4096, 1);
    let unseen = Agent { handle: 0 };
    for (fake, kind, owner) in [
        (device, AllocationKind::Device, Some(DeviceId(1))),
        (Fake { owner: CPU, ..device }, AllocationKind::Host, None),
        (
            Fake { kind: sys::HSA_EXT_POINTER_TYPE_LOCKED, owner: CPU, ..device },
            AllocationKind::Host,
            None,
        ),
        (
            Fake { kind: sys::HSA_EXT_POINTER_TYPE_IPC, owner: unseen, ..device },
            AllocationKind::Device,
            None,
        ),
        (
            Fake { kind: sys::HSA_EXT_POINTER_TYPE_GRAPHICS, host_base: 0, ..device },
            AllocationKind::Device,
            Some(DeviceId(1)),
        ),
    ] {
        DRIVER.with_borrow_mut(|driver| driver.allocations = vec![fake]);
        let allocation = query(&iface, 0x7000_0800).expect("known");
        assert_eq!((allocation.kind, allocation.device), (kind, owner));
    }
}

/// HM-01
#[test]
fn locked_memory_is_found_by_the_cpus_and_by_the_agents_address() {
    let iface = open().expect("open");
    let locked = Fake::device(0x7000_0000, 4096, 0);
    allocate(Fake {
        host_base: 0x1000_0000,
        kind: sys::HSA_EXT_POINTER_TYPE_LOCKED,
        owner: CPU,
        ..locked
    });
    assert_eq!(query(&iface, 0x7000_0010).expect("known").base(), Address(0x7000_0000));
    assert_eq!(query(&iface, 0x1000_0010).expect("known").base(), Address(0x1000_0000));
}

/// HM-01
///
/// The runtime gives no base for it, so it must neither be registered from a made-up one nor
/// as host memory.
#[test]
fn memory_mapped_into_a_reserved_range_is_refused_by_name() {
    let iface = open().expect("open");
    let kind = sys::HSA_EXT_POINTER_TYPE_HSA_VMEM;
    allocate(Fake { kind, ..Fake::device(0x7000_0000, 4096, 0) });
    let error = iface.query(Address(0x7000_0010)).expect_err("no base");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.context_value("type"), Some("HSA_EXT_POINTER_TYPE_HSA_VMEM (6)"));
}
