//! The driver's functions. Names and answers follow `ze_api.h` (1.4 and 1.32). If the header does
//! not define an answer, it follows Intel's driver 26.27 on its simulated GPU.

use std::{
    ffi::{c_char, c_void},
    ptr,
};

use hmem_iface_ze::sys::{
    self, CommandListHandle, ContextDescription, ContextHandle, DeviceExternalMemoryProperties,
    DeviceHandle, DeviceMemoryDescription, DeviceMemoryProperties, DeviceProperties, DriverHandle,
    EventDescription, EventHandle, EventPoolDescription, EventPoolHandle, ExportDescription,
    ExportFd, HostMemoryDescription, ImportFd, IpcMemoryHandle, MemoryAllocationProperties,
    PciProperties, QueueDescription, QueueGroupProperties, ZeResult,
};

use crate::state::{Copy, Event, Request, State};

type Answer = Result<(), ZeResult>;

const INVALID: ZeResult = ZeResult::ZE_RESULT_ERROR_INVALID_ARGUMENT;
const NULL_HANDLE: ZeResult = ZeResult::ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
const DMA_BUF: u32 = sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF;

/// Defines functions of the driver. Each counts its calls, returns injected faults, and otherwise
/// runs its body.
macro_rules! driver {
    ($(fn $name:ident($state:ident $(, $argument:ident: $type:ty)*) $body:block)+) => {
        $(
            /// # Safety
            /// The caller must follow the rules that `ze_api.h` states for this function.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> ZeResult {
                crate::enter(stringify!($name), |$state: &mut State| -> Answer { $body })
            }
        )+

        const SYMBOLS: &[&str] = &[$(stringify!($name)),+];

        /// Returns the address of a function of the driver by its name.
        pub(crate) fn symbol(name: &str) -> Option<*const ()> {
            Some(match name {
                $(stringify!($name) => $name as *const (),)+
                _ => return None,
            })
        }
    };
}

/// Returns a function's name as a static string; `None` if the driver has no such function.
pub(crate) fn known(name: &str) -> Option<&'static str> {
    SYMBOLS.iter().copied().find(|known| *known == name)
}

fn handle(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}

/// Writes a value to the caller's out parameter. Counts a call with a null pointer as undefined,
/// since real drivers crash.
fn put<T>(state: &mut State, place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return state.undefined();
    }
    // SAFETY: the caller's pointer is writable, as the function's documentation demands.
    unsafe { place.write(value) };
    Ok(())
}

/// Reads a descriptor structure of the caller. Counts a call with a null pointer or another
/// structure type as undefined.
fn description<T: std::marker::Copy>(
    state: &mut State,
    place: *const T,
    stype: u32,
) -> Result<T, ZeResult> {
    // SAFETY: the caller's description is readable, and begins with its type.
    if place.is_null() || unsafe { place.cast::<u32>().read() } != stype {
        return state.undefined();
    }
    // SAFETY: the caller's description has this type, as compared above.
    Ok(unsafe { place.read() })
}

/// Writes as many of the `elements` as the caller has requested, and their total number.
fn list<T: std::marker::Copy>(
    state: &mut State,
    elements: &[T],
    count: *mut u32,
    into: *mut T,
) -> Answer {
    if count.is_null() {
        return state.undefined();
    }
    // SAFETY: the caller passes a writable count, and null or that many writable elements.
    unsafe {
        if !into.is_null() {
            let most = elements.len().min(count.read() as usize);
            into.copy_from_nonoverlapping(elements.as_ptr(), most);
        }
        count.write(elements.len() as u32);
    }
    Ok(())
}

/// Returns the first structure of a type in a chain of descriptor structures (`pNext`).
fn chained<T: std::marker::Copy>(mut next: *const c_void, stype: u32) -> Option<*const T> {
    while !next.is_null() {
        // SAFETY: each structure of a chain begins with its type and the next one.
        let (kind, after) =
            unsafe { (next.cast::<u32>().read(), next.cast::<*const c_void>().add(1).read()) };
        if kind == stype {
            return Some(next.cast());
        }
        next = after;
    }
    None
}

/// Returns true if a chain of descriptor structures requests exportable memory.
fn is_exportable(state: &State, next: *const c_void) -> Result<bool, ZeResult> {
    let stype = sys::ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_DESC;
    // SAFETY: the structure was found in the chain by its type, and the caller keeps it readable.
    match chained::<ExportDescription>(next, stype).map(|place| unsafe { place.read() }) {
        Some(export) if export.flags != DMA_BUF => Err(INVALID),
        Some(_) if !state.profile.exports => Err(ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_ENUMERATION),
        found => Ok(found.is_some()),
    }
}

fn context(state: &State, context: ContextHandle) -> Result<usize, ZeResult> {
    state.contexts.get(&context.0).copied().ok_or(NULL_HANDLE)
}

/// Returns the number of a device. Fails if the device does not belong to the context's driver.
fn device(state: &State, of: ContextHandle, device: DeviceHandle) -> Result<usize, ZeResult> {
    let (driver, device) = (context(state, of)?, device.0);
    if state.devices(driver).contains(&(device & !0xf)) { Ok(device) } else { Err(NULL_HANDLE) }
}

fn text(text: &str) -> [c_char; sys::ZE_MAX_DEVICE_NAME] {
    let mut name = [0; sys::ZE_MAX_DEVICE_NAME];
    for (to, from) in name.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    name
}

/// Queries an event. The event's copy runs at the second query, or at once if `wait` is set.
fn progress(state: &mut State, event: usize, wait: bool) -> Answer {
    let Some(known) = state.events.get_mut(&event) else { return state.undefined() };
    if state.lost {
        return Err(ZeResult::ZE_RESULT_ERROR_DEVICE_LOST);
    }
    if let Some((copy, asked)) = &mut known.waits_for {
        *asked += 1;
        if !wait && *asked == 1 {
            return Err(ZeResult::ZE_RESULT_NOT_READY);
        }
        let copy = *copy;
        *known = Event { waits_for: None, signalled: true };
        state.copy(copy);
    }
    match state.events[&event].signalled {
        true => Ok(()),
        // No copy is left that could signal the event.
        false if wait => state.undefined(),
        false => Err(ZeResult::ZE_RESULT_NOT_READY),
    }
}

driver! {
    fn zeInit(state, _flags: u32) {
        state.started = true;
        Ok(())
    }

    fn zeDriverGet(state, count: *mut u32, into: *mut DriverHandle) {
        let drivers: Vec<_> =
            (0..state.profile.drivers).map(|number| DriverHandle(number + 1)).collect();
        list(state, &drivers, count, into)
    }

    fn zeDeviceGet(state, driver: DriverHandle, count: *mut u32, into: *mut DeviceHandle) {
        let devices = state.devices(driver.0 - 1);
        let devices: Vec<_> = devices.into_iter().map(DeviceHandle).collect();
        list(state, &devices, count, into)
    }

    fn zeDeviceGetSubDevices(
        state, device: DeviceHandle, count: *mut u32, into: *mut DeviceHandle
    ) {
        list(state, &[DeviceHandle(device.0 + 1)], count, into)
    }

    fn zeDeviceGetProperties(state, device: DeviceHandle, into: *mut DeviceProperties) {
        let kind = match device.0 {
            0x1000 => state.profile.first,
            _ => sys::ZE_DEVICE_TYPE_GPU,
        };
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&(device.0 as u64).to_le_bytes());
        let name = text("Intel Test");
        put(state, into, DeviceProperties { kind, uuid, name, ..DeviceProperties::default() })
    }

    fn zeDeviceGetMemoryProperties(
        state, _device: DeviceHandle, count: *mut u32, into: *mut DeviceMemoryProperties
    ) {
        let memory =
            DeviceMemoryProperties { total_size: 8 << 30, ..DeviceMemoryProperties::default() };
        list(state, &[memory, memory], count, into)
    }

    fn zeDeviceGetExternalMemoryProperties(
        state, _device: DeviceHandle, into: *mut DeviceExternalMemoryProperties
    ) {
        let types = if state.profile.exports { DMA_BUF } else { 0 };
        put(state, into, DeviceExternalMemoryProperties {
            memory_import_types: types,
            memory_export_types: types,
            ..DeviceExternalMemoryProperties::default()
        })
    }

    fn zeDeviceGetCommandQueueGroupProperties(
        state, _device: DeviceHandle, count: *mut u32, into: *mut QueueGroupProperties
    ) {
        let copy = sys::ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
        let groups = [copy | sys::ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE, copy]
            .map(|flags| QueueGroupProperties { flags, ..QueueGroupProperties::default() });
        list(state, &groups, count, into)
    }

    fn zeDevicePciGetPropertiesExt(state, device: DeviceHandle, into: *mut PciProperties) {
        if state.profile.pci != ZeResult::ZE_RESULT_SUCCESS {
            return Err(state.profile.pci);
        }
        let bus = 0x3a + (device.0 as u32 >> 4 & 0xf);
        put(state, into, PciProperties { bus, device: 2, function: 1, ..PciProperties::default() })
    }

    fn zeContextCreate(
        state, driver: DriverHandle, desc: *const ContextDescription, into: *mut ContextHandle
    ) {
        description(state, desc, sys::ZE_STRUCTURE_TYPE_CONTEXT_DESC)?;
        let number = state.handle();
        put(state, into, ContextHandle(number))?;
        state.contexts.insert(number, driver.0 - 1);
        Ok(())
    }

    fn zeContextDestroy(state, context: ContextHandle) {
        let driver = self::context(state, context)?;
        let of_driver = |device: usize| State::driver_of(device) == driver;
        let lists = state.lists.values().chain(state.event_pools.values());
        if lists.into_iter().any(|device| of_driver(*device)) {
            return Err(ZeResult::ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE);
        }
        state.contexts.remove(&context.0);
        Ok(())
    }

    fn zeMemAllocDevice(
        state, of: ContextHandle, desc: *const DeviceMemoryDescription, size: usize,
        _alignment: usize, on: DeviceHandle, into: *mut *mut c_void
    ) {
        let desc = description(state, desc, sys::ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC)?;
        let mut request = Request::device(size as u64, device(state, of, on)?);
        request.exportable = is_exportable(state, desc.next)?;
        let stype = sys::ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_IMPORT_FD;
        if let Some(import) = chained::<ImportFd>(desc.next, stype) {
            // SAFETY: the structure was found in the chain by its type, and the caller keeps it
            // readable.
            let import = unsafe { import.read() };
            if import.flags != DMA_BUF {
                return Err(INVALID);
            }
            request.import = Some(State::import(import.fd)?);
        }
        let address = state.allocate(request)?;
        put(state, into, handle(address as usize))
    }

    fn zeMemAllocHost(
        state, of: ContextHandle, desc: *const HostMemoryDescription, size: usize,
        _alignment: usize, into: *mut *mut c_void
    ) {
        let desc = description(state, desc, sys::ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC)?;
        let device = state.devices(context(state, of)?)[0];
        let exportable = is_exportable(state, desc.next)?;
        let kind = sys::ZE_MEMORY_TYPE_HOST;
        let request = Request { kind, exportable, ..Request::device(size as u64, device) };
        let address = state.allocate(request)?;
        put(state, into, ptr::with_exposed_provenance_mut(address as usize))
    }

    fn zeMemAllocShared(
        state, of: ContextHandle, on_device: *const DeviceMemoryDescription,
        on_host: *const HostMemoryDescription, size: usize, _alignment: usize, on: DeviceHandle,
        into: *mut *mut c_void
    ) {
        description(state, on_device, sys::ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC)?;
        description(state, on_host, sys::ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC)?;
        let kind = sys::ZE_MEMORY_TYPE_SHARED;
        let request = Request { kind, ..Request::device(size as u64, device(state, of, on)?) };
        let address = state.allocate(request)?;
        put(state, into, ptr::with_exposed_provenance_mut(address as usize))
    }

    fn zeMemFree(state, of: ContextHandle, pointer: *mut c_void) {
        context(state, of)?;
        state.free(pointer.addr() as u64)
    }

    fn zeMemGetAllocProperties(
        state, of: ContextHandle, pointer: *const c_void, into: *mut MemoryAllocationProperties,
        on: *mut DeviceHandle
    ) {
        let driver = context(state, of)?;
        let stype = sys::ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES;
        let given = description(state, into.cast_const(), stype)?;
        let found = state.memory_at(pointer.addr() as u64);
        let found = found.filter(|(.., device)| State::driver_of(*device) == driver);
        let Some((kind, id, device)) = found else {
            return put(state, into, MemoryAllocationProperties {
                kind: sys::ZE_MEMORY_TYPE_UNKNOWN, ..given
            });
        };
        let page_size = 64 << 10;
        put(state, into, MemoryAllocationProperties { kind, id, page_size, ..given })?;
        let device = if kind == sys::ZE_MEMORY_TYPE_HOST { 0 } else { device };
        if !on.is_null() {
            put(state, on, DeviceHandle(device))?;
        }
        let stype = sys::ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_FD;
        if let Some(export) = chained::<ExportFd>(given.next, stype) {
            let fd = state.export(pointer.addr() as u64)?;
            // SAFETY: the structure is in the chain, which the caller made writable.
            unsafe { (*export.cast_mut()).fd = fd };
        }
        Ok(())
    }

    fn zeMemGetAddressRange(
        state, of: ContextHandle, pointer: *const c_void, base: *mut *mut c_void, len: *mut usize
    ) {
        context(state, of)?;
        let found = state.around_with_padding(pointer.addr() as u64);
        let Some((start, bytes)) = found.map(|(base, one)| (base, one.len)) else {
            return Err(ZeResult::ZE_RESULT_ERROR_ADDRESS_NOT_FOUND);
        };
        put(state, base, handle(start as usize))?;
        put(state, len, bytes as usize)
    }

    fn zeCommandListCreateImmediate(
        state, of: ContextHandle, on: DeviceHandle, desc: *const QueueDescription,
        into: *mut CommandListHandle
    ) {
        let desc = description(state, desc, sys::ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC)?;
        let device = device(state, of, on)?;
        if desc.ordinal != 1 {
            // The copy engines have the ordinal 1, which the iface must choose.
            return Err(INVALID);
        }
        let number = state.handle();
        put(state, into, CommandListHandle(number))?;
        state.lists.insert(number, device);
        Ok(())
    }

    fn zeCommandListDestroy(state, list: CommandListHandle) {
        match state.lists.remove(&list.0) {
            Some(_) => Ok(()),
            None => state.undefined(),
        }
    }

    fn zeCommandListAppendMemoryCopy(
        state, list: CommandListHandle, to: *mut c_void, from: *const c_void, size: usize,
        signal: EventHandle, _count: u32, _wait_for: *mut EventHandle
    ) {
        let Some(device) = state.lists.get(&list.0).copied() else {
            return state.undefined();
        };
        let copy = Copy { to: to.addr() as u64, from: from.addr() as u64, len: size };
        let reaches = |side: u64| {
            state.around(side).is_some_and(|(base, one)| {
                let own = match one.kind {
                    sys::ZE_MEMORY_TYPE_HOST => {
                        State::driver_of(one.device) == State::driver_of(device)
                    }
                    _ => one.device & !0xf == device & !0xf,
                };
                own && side + size as u64 <= base + one.len
            })
        };
        let apart = copy.to.abs_diff(copy.from) >= size as u64;
        if !reaches(copy.to) || !reaches(copy.from) || !apart {
            return state.undefined();
        }
        let lost = state.lost;
        let Some(event) = state.events.get_mut(&signal.0) else { return state.undefined() };
        if lost {
            return Err(ZeResult::ZE_RESULT_ERROR_DEVICE_LOST);
        }
        if event.signalled || event.waits_for.is_some() {
            // The event was not reset, so its signal would be taken for this copy's.
            return state.undefined();
        }
        event.waits_for = Some((copy, 0));
        Ok(())
    }

    fn zeEventPoolCreate(
        state, of: ContextHandle, desc: *const EventPoolDescription, count: u32,
        devices: *mut DeviceHandle, into: *mut EventPoolHandle
    ) {
        let desc = description(state, desc, sys::ZE_STRUCTURE_TYPE_EVENT_POOL_DESC)?;
        if desc.count != 1 || count != 1 || desc.flags != sys::ZE_EVENT_POOL_FLAG_HOST_VISIBLE {
            return state.undefined();
        }
        // SAFETY: `count` is 1, so the caller passes one device.
        let device = device(state, of, unsafe { devices.read() })?;
        let number = state.handle();
        put(state, into, EventPoolHandle(number))?;
        state.event_pools.insert(number, device);
        Ok(())
    }

    fn zeEventPoolDestroy(state, pool: EventPoolHandle) {
        match state.event_pools.remove(&pool.0) {
            Some(_) => Ok(()),
            None => state.undefined(),
        }
    }

    fn zeEventCreate(
        state, pool: EventPoolHandle, desc: *const EventDescription, into: *mut EventHandle
    ) {
        let desc = description(state, desc, sys::ZE_STRUCTURE_TYPE_EVENT_DESC)?;
        if desc.index != 0 || !state.event_pools.contains_key(&pool.0) {
            return state.undefined();
        }
        let number = state.handle();
        put(state, into, EventHandle(number))?;
        state.events.insert(number, Event::default());
        Ok(())
    }

    fn zeEventDestroy(state, event: EventHandle) {
        match state.events.remove(&event.0) {
            // The event's copy is in flight, or the event is unknown.
            Some(Event { waits_for: Some(_), .. }) | None => state.undefined(),
            Some(_) => Ok(()),
        }
    }

    fn zeEventHostSynchronize(state, event: EventHandle, _nanoseconds: u64) {
        progress(state, event.0, true)
    }

    fn zeEventQueryStatus(state, event: EventHandle) {
        progress(state, event.0, false)
    }

    fn zeEventHostReset(state, event: EventHandle) {
        match state.events.get_mut(&event.0) {
            Some(event) if event.waits_for.is_none() => {
                event.signalled = false;
                Ok(())
            }
            _ => state.undefined(),
        }
    }

    fn zeMemGetIpcHandleFromFileDescriptorExp(
        state, of: ContextHandle, fd: u64, into: *mut IpcMemoryHandle
    ) {
        context(state, of)?;
        if state.profile.own_fds {
            // The loader has the function, and the driver behind it does not.
            return Err(ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE);
        }
        let mut data = [0; sys::ZE_MAX_IPC_HANDLE_SIZE];
        for (to, from) in data.iter_mut().zip(fd.to_le_bytes()) {
            *to = from as c_char;
        }
        put(state, into, IpcMemoryHandle { data })
    }

    fn zeMemPutIpcHandle(state, of: ContextHandle, ipc: IpcMemoryHandle) {
        context(state, of)?;
        let fd = std::array::from_fn(|at| ipc.data[at] as u8);
        state.put(i32::from_le_bytes(fd))
    }
}
