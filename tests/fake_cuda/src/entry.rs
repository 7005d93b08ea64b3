//! The driver's functions, by the names and with the answers of `cuda.h` (12.9 and 13.5), and of recorded runs where
//! it says so: the real library without a device (`tests/cuda/fetch` downloads it) showed those.

use std::ffi::{c_char, c_int, c_uint, c_void};

use hmem_iface_cuda::sys::{
    self, CuContext, CuDevice, CuDeviceAttribute, CuDevicePtr, CuEvent, CuIpcMemHandle, CuMemAccessDesc,
    CuMemAllocationProp, CuMemHandle, CuPointerAttribute, CuResult, CuStream,
};

use crate::{
    answers::{attribute_of_device, pointer_attribute},
    enter, ipc,
    pages::PAGE,
    state::{Allocation, Context, Copy, Event, GRANULARITY, Kind, Mapping, Physical, State, Stream},
};

type Answer = Result<(), CuResult>;

const INVALID_VALUE: CuResult = CuResult::CUDA_ERROR_INVALID_VALUE;
const NOT_SUPPORTED: CuResult = CuResult::CUDA_ERROR_NOT_SUPPORTED;
const INVALID_HANDLE: CuResult = CuResult::CUDA_ERROR_INVALID_HANDLE;

/// Writes an answer; a null place is an invalid value, as in most calls.
pub(crate) fn put<T>(place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver passes writable places, as the header demands.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

fn device(state: &State, device: CuDevice) -> Result<u32, CuResult> {
    u32::try_from(device)
        .ok()
        .filter(|device| *device < state.profile.devices)
        .ok_or(CuResult::CUDA_ERROR_INVALID_DEVICE)
}

/// Writes text with its NUL into `len` bytes.
fn text(place: *mut c_char, len: c_int, text: &str) -> Answer {
    if text.len() >= len.max(0) as usize {
        return Err(INVALID_VALUE);
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        put(place.wrapping_add(at), byte as c_char)?;
    }
    Ok(())
}

macro_rules! driver {
    ($($(#[doc = $doc:literal])* fn $name:ident($state:ident $(, $argument:ident: $type:ty)*) $body:block)+) => {
        $(
            $(#[doc = $doc])*
            ///
            /// # Safety
            /// As `cuda.h` says of the function.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CuResult {
                enter(stringify!($name), |$state: &mut State| -> Answer { $body })
            }
        )+

        /// The address of a function.
        pub(crate) fn symbol(name: &str) -> Option<*const ()> {
            Some(match name {
                $(stringify!($name) => $name as *const (),)+
                _ => return None,
            })
        }

        /// Every function of the driver.
        pub const SYMBOLS: &[&str] = &[$(stringify!($name)),+];
    };
}

driver! {
    fn cuInit(state, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // Recorded run: the real library without a device answers 100.
        if state.profile.devices == 0 {
            return Err(CuResult::CUDA_ERROR_NO_DEVICE);
        }
        state.started = true;
        Ok(())
    }

    fn cuDriverGetVersion(state, version: *mut c_int) { put(version, state.profile.version) }

    fn cuGetErrorName(_state, error: CuResult, name: *mut *const c_char) {
        let Some(known) = error.name() else {
            put(name, std::ptr::null())?;
            return Err(INVALID_VALUE);
        };
        // Names live as long as the process.
        let leaked = std::ffi::CString::new(known).map_err(|_| INVALID_VALUE)?.into_raw();
        put(name, leaked.cast_const())
    }

    fn cuGetErrorString(_state, error: CuResult, text: *mut *const c_char) {
        if error.name().is_none() {
            put(text, std::ptr::null())?;
            return Err(INVALID_VALUE);
        }
        put(text, c"(no text)".as_ptr())
    }

    fn cuDeviceGetCount(state, count: *mut c_int) { put(count, state.profile.devices as c_int) }

    fn cuDeviceGet(state, place: *mut CuDevice, ordinal: c_int) {
        device(state, ordinal)?;
        put(place, ordinal)
    }

    fn cuDeviceGetName(state, name: *mut c_char, len: c_int, dev: CuDevice) {
        let number = device(state, dev)?;
        text(name, len, &format!("NVIDIA Fake {} {number}", state.profile.name))
    }

    fn cuDeviceTotalMem_v2(state, bytes: *mut usize, dev: CuDevice) {
        device(state, dev)?;
        put(bytes, state.profile.memory as usize)
    }

    fn cuDeviceGetPCIBusId(state, id: *mut c_char, len: c_int, dev: CuDevice) {
        // Capital letters, as the real call writes them (see the example of `cuDeviceGetByPCIBusId`).
        text(id, len, &format!("0000:{:02X}:00.0", 0x3A + device(state, dev)?))
    }

    fn cuDeviceGetAttribute(state, value: *mut c_int, attribute: CuDeviceAttribute, dev: CuDevice) {
        device(state, dev)?;
        put(value, attribute_of_device(&state.profile, attribute)?)
    }

    fn cuDevicePrimaryCtxRetain(state, context: *mut CuContext, dev: CuDevice) {
        let number = device(state, dev)?;
        let known = state.contexts.iter().find(|(_, one)| one.primary && one.device == number);
        let id = match known {
            Some((id, _)) => *id,
            None => {
                let id = state.handle();
                state.contexts.insert(id, Context { device: number, primary: true, ..Context::default() });
                id
            }
        };
        put(context, CuContext(id))?;
        state.contexts.entry(id).or_default().references += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(state, dev: CuDevice) {
        let number = device(state, dev)?;
        let known = state.contexts.iter_mut().find(|(_, one)| one.primary && one.device == number);
        let Some((id, context)) = known else { return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT) };
        context.references -= 1;
        if context.references == 0 {
            // "Once released the primary context is destroyed if it is the last reference."
            let id = *id;
            state.destroy_context(id);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(state, dev: CuDevice, flags: *mut c_uint, active: *mut c_int) {
        let number = device(state, dev)?;
        let known = state.contexts.values().find(|one| one.primary && one.device == number);
        put(flags, known.map_or(0, |one| one.flags))?;
        put(active, known.is_some().into())
    }

    fn cuCtxCreate_v2(state, context: *mut CuContext, flags: c_uint, dev: CuDevice) {
        let number = device(state, dev)?;
        let id = state.handle();
        state.contexts.insert(id, Context { device: number, flags, references: 1, primary: false });
        // "The created context is made current."
        state.stack(|stack| stack.push(id));
        put(context, CuContext(id))
    }

    fn cuCtxDestroy_v2(state, context: CuContext) {
        if state.contexts.get(&context.0).is_none_or(|one| one.primary) {
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        // "If ctx is current to the calling thread then ctx will also be popped."
        state.stack(|stack| {
            stack.pop_if(|top| *top == context.0);
        });
        state.destroy_context(context.0);
        Ok(())
    }

    fn cuCtxGetCurrent(state, context: *mut CuContext) {
        put(context, CuContext(state.stack(|stack| stack.last().copied()).unwrap_or(0)))
    }

    fn cuCtxPushCurrent_v2(state, context: CuContext) {
        if !state.contexts.contains_key(&context.0) {
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        state.stack(|stack| stack.push(context.0));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(state, context: *mut CuContext) {
        let popped = state.stack(Vec::pop).ok_or(CuResult::CUDA_ERROR_INVALID_CONTEXT)?;
        // "If pctx is not NULL".
        if context.is_null() { Ok(()) } else { put(context, CuContext(popped)) }
    }

    fn cuCtxGetFlags(state, flags: *mut c_uint) {
        let current = state.current()?;
        put(flags, state.contexts[&current].flags)
    }

    fn cuCtxSetFlags(state, flags: c_uint) {
        let current = state.current()?;
        state.contexts.entry(current).or_default().flags = flags;
        Ok(())
    }

    fn cuPointerGetAttributes(
        state,
        count: c_uint,
        attributes: *mut CuPointerAttribute,
        data: *mut *mut c_void,
        pointer: CuDevicePtr
    ) {
        if state.profile.queries_need_context && state.current().is_err() {
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        for at in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and as many places.
            let (attribute, place) = unsafe { (*attributes.add(at), *data.add(at)) };
            pointer_attribute(state, attribute, place, pointer)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(
        state,
        value: *const c_void,
        attribute: CuPointerAttribute,
        pointer: CuDevicePtr
    ) {
        // "The supported attributes are": SYNC_MEMOPS.
        if attribute != sys::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || value.is_null() {
            return Err(INVALID_VALUE);
        }
        let (start, allocation) = state.around(pointer).ok_or(INVALID_VALUE)?;
        // VMM and stream-ordered memory have it as a flag of their context (`CU_CTX_SYNC_MEMOPS`) only.
        if !matches!(allocation.kind, Kind::Memory | Kind::Managed | Kind::Host | Kind::Registered) {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the header: "a pointer to an unsigned integer".
        let on = unsafe { value.cast::<c_uint>().read_unaligned() } != 0;
        if let Some(allocation) = state.allocations.get_mut(&start) {
            allocation.sync_memops = on;
        }
        Ok(())
    }

    fn cuMemGetAddressRange_v2(state, base: *mut CuDevicePtr, size: *mut usize, pointer: CuDevicePtr) {
        // Recorded run: the outputs are zeroed on failure.
        let known = match state.around(pointer) {
            Some((_, allocation)) if allocation.kind == Kind::Reservation => {
                state.mapping_around(pointer).map(|(start, mapping)| (start, mapping.len))
            }
            known => known.map(|(start, allocation)| (start, allocation.len)),
        };
        let (start, len) = known.unwrap_or((0, 0));
        if !base.is_null() {
            put(base, start)?;
        }
        if !size.is_null() {
            put(size, len as usize)?;
        }
        known.map(drop).ok_or(CuResult::CUDA_ERROR_NOT_FOUND)
    }

    fn cuMemAlloc_v2(state, pointer: *mut CuDevicePtr, size: usize) {
        let address = state.take_memory(size as u64, Kind::Memory)?;
        put(pointer, address)
    }

    fn cuMemAllocManaged(state, pointer: *mut CuDevicePtr, size: usize, flags: c_uint) {
        if !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        let address = state.take_memory(size as u64, Kind::Managed)?;
        put(pointer, address)
    }

    fn cuMemAllocAsync(state, pointer: *mut CuDevicePtr, size: usize, stream: CuStream) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        let address = state.take_memory(size as u64, Kind::Pool)?;
        put(pointer, address)
    }

    fn cuMemFree_v2(state, pointer: CuDevicePtr) {
        state.current()?;
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        if !matches!(known.kind, Kind::Memory | Kind::Managed | Kind::Pool) {
            return Err(INVALID_VALUE);
        }
        state.free_memory(pointer)
    }

    fn cuMemFreeAsync(state, pointer: CuDevicePtr, stream: CuStream) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        if known.kind != Kind::Pool {
            return Err(INVALID_VALUE);
        }
        state.finish(stream.0);
        state.free_memory(pointer)
    }

    fn cuMemHostAlloc(state, pointer: *mut *mut c_void, size: usize, _flags: c_uint) {
        let address = state.take_memory(size as u64, Kind::Host)?;
        put(pointer, std::ptr::with_exposed_provenance_mut(address as usize))
    }

    fn cuMemFreeHost(state, pointer: *mut c_void) {
        state.current()?;
        let address = pointer.expose_provenance() as u64;
        match state.allocations.get(&address) {
            Some(known) if known.kind == Kind::Host => state.free_memory(address),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostGetFlags(state, flags: *mut c_uint, pointer: *mut c_void) {
        state.current()?;
        // "will fail if the pointer does not reside in an allocation performed by cuMemAllocHost() or cuMemHostAlloc()"
        match state.around(pointer.expose_provenance() as u64) {
            Some((_, known)) if known.kind == Kind::Host => put(flags, 1),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostRegister_v2(state, pointer: *mut c_void, size: usize, _flags: c_uint) {
        let context = state.current()?;
        let (start, len) = (pointer.expose_provenance() as u64, size as u64);
        if len == 0 || start.checked_add(len).is_none() {
            return Err(INVALID_VALUE);
        }
        let before = state.allocations.range(..start + len).next_back();
        if before.is_some_and(|(at, known)| at + known.len > start) {
            return Err(CuResult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let id = state.identity();
        let device = state.device_of(context);
        let kind = Kind::Registered;
        state.allocations.insert(start, Allocation { len, kind, device, context, id, sync_memops: false });
        Ok(())
    }

    fn cuMemHostUnregister(state, pointer: *mut c_void) {
        state.current()?;
        let start = pointer.expose_provenance() as u64;
        match state.allocations.get(&start) {
            Some(known) if known.kind == Kind::Registered => {
                state.allocations.remove(&start);
                Ok(())
            }
            _ => Err(CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        }
    }

    fn cuMemcpyAsync(state, to: CuDevicePtr, from: CuDevicePtr, len: usize, stream: CuStream) {
        state.current()?;
        state.side(to, len)?;
        state.side(from, len)?;
        let slow = state.profile.slow_copies;
        let known = state.streams.get_mut(&stream.0).ok_or(INVALID_HANDLE)?;
        known.waiting.push_back(Copy { to, from, len });
        known.handed_in += 1;
        if !slow {
            state.finish(stream.0);
        }
        Ok(())
    }

    fn cuMemcpy(state, to: CuDevicePtr, from: CuDevicePtr, len: usize) {
        state.current()?;
        state.side(to, len)?;
        state.side(from, len)?;
        state.move_bytes(Copy { to, from, len });
        Ok(())
    }

    fn cuStreamCreate(state, stream: *mut CuStream, _flags: c_uint) {
        let context = state.current()?;
        let id = state.handle();
        let made = Stream { context, waiting: Default::default(), handed_in: 0, done: 0 };
        state.streams.insert(id, made);
        put(stream, CuStream(id))
    }

    fn cuStreamSynchronize(state, stream: CuStream) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        state.finish(stream.0);
        Ok(())
    }

    fn cuStreamDestroy_v2(state, stream: CuStream) {
        state.finish(stream.0);
        state.streams.remove(&stream.0).map(drop).ok_or(INVALID_HANDLE)
    }

    fn cuEventCreate(state, event: *mut CuEvent, _flags: c_uint) {
        let context = state.current()?;
        let id = state.handle();
        state.events.insert(id, Event { context, recorded: None });
        put(event, CuEvent(id))
    }

    fn cuEventRecord(state, event: CuEvent, stream: CuStream) {
        let known = state.streams.get(&stream.0).ok_or(INVALID_HANDLE)?;
        let (context, before) = (known.context, known.handed_in);
        let event = state.events.get_mut(&event.0).ok_or(INVALID_HANDLE)?;
        // "hEvent and hStream must be from the same context".
        if event.context != context {
            return Err(INVALID_HANDLE);
        }
        event.recorded = Some((stream.0, before));
        Ok(())
    }

    fn cuEventQuery(state, event: CuEvent) {
        let event = state.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        let Some((stream, before)) = event.recorded else { return Ok(()) };
        if state.streams.get(&stream).is_none_or(|stream| stream.done >= before) {
            return Ok(());
        }
        // A copy ends a while after somebody saw it under way.
        state.step(stream);
        Err(CuResult::CUDA_ERROR_NOT_READY)
    }

    fn cuEventSynchronize(state, event: CuEvent) {
        let event = state.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        let Some((stream, before)) = event.recorded else { return Ok(()) };
        while state.streams.get(&stream).is_some_and(|stream| stream.done < before) && state.step(stream) {}
        Ok(())
    }

    fn cuEventDestroy_v2(state, event: CuEvent) {
        state.events.remove(&event.0).map(drop).ok_or(INVALID_HANDLE)
    }

    fn cuIpcGetMemHandle(state, handle: *mut CuIpcMemHandle, pointer: CuDevicePtr) {
        state.current()?;
        put(handle, ipc::export(state, pointer)?)
    }

    fn cuIpcOpenMemHandle_v2(
        state,
        pointer: *mut CuDevicePtr,
        handle: CuIpcMemHandle,
        flags: c_uint
    ) {
        // "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
        if flags != sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        let address = ipc::open(state, &handle)?;
        put(pointer, address)
    }

    fn cuIpcCloseMemHandle(state, pointer: CuDevicePtr) {
        state.current()?;
        ipc::close(state, pointer)
    }

    fn cuMemGetHandleForAddressRange(
        state,
        handle: *mut c_void,
        pointer: CuDevicePtr,
        size: usize,
        kind: c_uint,
        flags: u64
    ) {
        // Recorded run: 801 before `cuInit` succeeded, where the other calls answer 3.
        if !state.started || !state.profile.dma_buf {
            return Err(NOT_SUPPORTED);
        }
        let len = size as u64;
        // "Users must ensure the dptr and size are aligned to the host page size."
        if kind != sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            || !pointer.is_multiple_of(PAGE)
            || !len.is_multiple_of(PAGE)
            || len == 0
        {
            return Err(INVALID_VALUE);
        }
        match flags {
            0 => {}
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE if !state.profile.pcie_flag => {
                return Err(INVALID_VALUE);
            }
            // "will give a DMA_BUF handle mapped via PCIE BAR1 or will return an error otherwise"
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE if !state.profile.pcie_mapping => {
                return Err(NOT_SUPPORTED);
            }
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE => {}
            _ => return Err(INVALID_VALUE),
        }
        can_be_exported(state, pointer, len)?;
        let exported = state.pages.export(pointer, len).map_err(|_| CuResult::CUDA_ERROR_OPERATING_SYSTEM)?;
        let fd = exported.ok_or(NOT_SUPPORTED)?;
        put(handle.cast::<c_int>(), std::os::fd::IntoRawFd::into_raw_fd(fd))
    }

    fn cuFlushGPUDirectRDMAWrites(state, target: c_uint, scope: c_uint) {
        state.current()?;
        let known = target == 0 && matches!(scope, 100 | 200);
        if known { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuMemGetAllocationGranularity(
        _state,
        granularity: *mut usize,
        _properties: *const CuMemAllocationProp,
        _option: c_uint
    ) { put(granularity, GRANULARITY as usize) }

    fn cuMemAddressReserve(
        state,
        pointer: *mut CuDevicePtr,
        size: usize,
        _alignment: usize,
        _wanted: CuDevicePtr,
        flags: u64
    ) {
        let len = size as u64;
        if flags != 0 || len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let address = state.take_addresses(len);
        let id = state.identity();
        let reservation =
            Allocation { len, kind: Kind::Reservation, device: 0, context: 0, id, sync_memops: false };
        state.allocations.insert(address, reservation);
        put(pointer, address)
    }

    fn cuMemAddressFree(state, pointer: CuDevicePtr, size: usize) {
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        let mapped = state.mappings.range(pointer..pointer + size as u64).next().is_some();
        if known.kind != Kind::Reservation || known.len != size as u64 || mapped {
            return Err(INVALID_VALUE);
        }
        state.allocations.remove(&pointer);
        state.give_addresses(pointer, size as u64);
        Ok(())
    }

    fn cuMemCreate(
        state,
        handle: *mut CuMemHandle,
        size: usize,
        properties: *const CuMemAllocationProp,
        flags: u64
    ) {
        let len = size as u64;
        if flags != 0 || len == 0 || !len.is_multiple_of(GRANULARITY) || properties.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a whole structure.
        let properties = unsafe { *properties };
        let number = device(state, properties.location.id)?;
        if properties.location.kind != sys::CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(INVALID_VALUE);
        }
        if properties.gpu_direct_rdma_capable != 0 && !state.profile.rdma_with_vmm {
            return Err(NOT_SUPPORTED);
        }
        let used = state.used[number as usize] + len;
        if used > state.profile.memory {
            return Err(CuResult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let file = crate::pages::memory_file(len).map_err(|_| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        state.used[number as usize] = used;
        let id = state.handle() as u64;
        let made = Physical { file, len, properties, references: 1, mappings: 0 };
        state.physical.insert(id, made);
        put(handle, id)
    }

    fn cuMemRelease(state, handle: CuMemHandle) {
        let known = state.physical.get_mut(&handle).filter(|known| known.references > 0);
        known.ok_or(INVALID_VALUE)?.references -= 1;
        forget_physical(state, handle);
        Ok(())
    }

    fn cuMemMap(state, pointer: CuDevicePtr, size: usize, offset: usize, handle: CuMemHandle, flags: u64) {
        let len = size as u64;
        let physical = state.physical.get(&handle).filter(|known| known.references > 0).ok_or(INVALID_VALUE)?;
        // "Note: currently must be zero", of the offset; part of a handle is not mapped here.
        if flags != 0 || offset != 0 || len != physical.len || !pointer.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let (start, reservation) = state.around(pointer).ok_or(INVALID_VALUE)?;
        let taken = state.mappings.range(..pointer + len).next_back();
        if reservation.kind != Kind::Reservation
            || pointer + len > start + reservation.len
            || taken.is_some_and(|(at, mapping)| at + mapping.len > pointer)
        {
            return Err(INVALID_VALUE);
        }
        let placed = physical.file.try_clone().map_err(drop);
        let placed = placed.and_then(|file| state.pages.place(pointer, len, file).map_err(drop));
        placed.map_err(|()| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        state.mappings.insert(pointer, Mapping { len, handle, accessible: false });
        if let Some(physical) = state.physical.get_mut(&handle) {
            physical.mappings += 1;
        }
        Ok(())
    }

    fn cuMemUnmap(state, pointer: CuDevicePtr, size: usize) {
        let end = pointer + size as u64;
        let inside: Vec<_> = state.mappings.range(pointer..end).map(|(at, one)| (*at, *one)).collect();
        let covered: u64 = inside.iter().map(|(_, mapping)| mapping.len).sum();
        // "the address range must be the whole of the mappings in it"
        if covered != size as u64 {
            return Err(INVALID_VALUE);
        }
        for (at, mapping) in inside {
            state.mappings.remove(&at);
            state.pages.clear(at, mapping.len);
            if let Some(physical) = state.physical.get_mut(&mapping.handle) {
                physical.mappings -= 1;
            }
            forget_physical(state, mapping.handle);
        }
        Ok(())
    }

    fn cuMemSetAccess(
        state,
        pointer: CuDevicePtr,
        size: usize,
        who: *const CuMemAccessDesc,
        count: usize
    ) {
        let end = pointer + size as u64;
        let covered: u64 = state.mappings.range(pointer..end).map(|(_, one)| one.len).sum();
        // "The range must be a fully mapped address range".
        if covered != size as u64 || count != 1 || who.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes `count` descriptions.
        let who = unsafe { *who };
        for (_, mapping) in state.mappings.range_mut(pointer..end) {
            mapping.accessible = who.flags == sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        }
        Ok(())
    }

    fn cuMemRetainAllocationHandle(state, handle: *mut CuMemHandle, address: *mut c_void) {
        let mapped = state.mapping_around(address.expose_provenance() as u64);
        let (_, mapping) = mapped.ok_or(INVALID_VALUE)?;
        let physical = state.physical.get_mut(&mapping.handle).ok_or(INVALID_VALUE)?;
        physical.references += 1;
        put(handle, mapping.handle)
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        state,
        properties: *mut CuMemAllocationProp,
        handle: CuMemHandle
    ) {
        let known = state.physical.get(&handle).filter(|known| known.references > 0).ok_or(INVALID_VALUE)?;
        put(properties, known.properties)
    }
}

/// Memory goes with its last reference and its last mapping.
fn forget_physical(state: &mut State, handle: CuMemHandle) {
    let Some(known) = state.physical.get(&handle) else { return };
    if known.references == 0 && known.mappings == 0 {
        state.used[known.properties.location.id as usize] -= known.len;
        state.physical.remove(&handle);
    }
}

/// "address range obtained by a prior call to either cuMemAlloc or cuMemAddressReserve is supported"; the latter "must
/// also be fully mapped", by memory "resident on the same device" with "identical allocation properties".
fn can_be_exported(state: &State, start: u64, len: u64) -> Answer {
    let end = start + len;
    // The range is rounded to pages, and so may begin before and end after its allocation.
    let first = state.allocations.range(..end).rev().find(|(at, one)| **at + one.len > start);
    let (_, around) = first.ok_or(INVALID_VALUE)?;
    match around.kind {
        Kind::Memory => {
            let whole = |(at, one): (&u64, &Allocation)| {
                one.kind == Kind::Memory
                    && at - at % PAGE <= start
                    && (at + one.len).next_multiple_of(PAGE) >= end
            };
            if state.allocations.range(..end).rev().take(4096).any(whole) {
                Ok(())
            } else {
                Err(INVALID_VALUE)
            }
        }
        Kind::Reservation => {
            let mut at = start;
            let mut of_first: Option<CuMemAllocationProp> = None;
            while at < end {
                let (base, mapping) = state.mapping_around(at).ok_or(INVALID_VALUE)?;
                let properties = state.physical[&mapping.handle].properties;
                if *of_first.get_or_insert(properties) != properties {
                    return Err(INVALID_VALUE);
                }
                if properties.gpu_direct_rdma_capable == 0 {
                    return Err(NOT_SUPPORTED);
                }
                at = base + mapping.len;
            }
            Ok(())
        }
        _ => Err(NOT_SUPPORTED),
    }
}
