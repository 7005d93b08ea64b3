//! The runtime's functions, with the names and answers of `hsa.h` and `hsa_ext_amd.h`. Text in
//! quotation marks is from these headers.

use std::{
    ffi::c_void,
    os::fd::{AsFd, AsRawFd, IntoRawFd},
};

use hmem_fake_common::{memory_file, page, reopen, share};
use hmem_iface_rocr::sys::{
    self, AccessDesc, Agent, AgentCallback, DeallocationCallback, HdpFlush, HsaStatus, IpcMemory,
    ListAllocator, MemoryPool, PointerInfo, PoolCallback, Signal, VmemHandle,
};

use crate::{
    STATE, enter,
    state::{CPU, Copy, Reservation, SignalState, gpu},
};

const SUCCESS: HsaStatus = HsaStatus::HSA_STATUS_SUCCESS;
const INVALID_ARGUMENT: HsaStatus = HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT;
const INVALID_ALLOCATION: HsaStatus = HsaStatus::HSA_STATUS_ERROR_INVALID_ALLOCATION;
const INVALID_AGENT: HsaStatus = HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT;
const OUT_OF_RESOURCES: HsaStatus = HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES;

/// Defines functions of the runtime. Each counts its calls, returns injected faults, and otherwise
/// runs its body.
macro_rules! runtime {
    ($(fn $name:ident($state:ident $(, $argument:ident: $type:ty)*) $body:block)+) => {
        $(
            /// # Safety
            /// The caller must follow the rules that AMD's headers state for this function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> HsaStatus {
                let answer = enter(stringify!($name), |$state| -> Result<(), HsaStatus> { $body });
                answer.err().unwrap_or(SUCCESS)
            }
        )+

        /// Returns the address of a function of the runtime by its name.
        pub(crate) fn symbol(name: &str) -> Option<*const ()> {
            Some(match name {
                $(stringify!($name) => $name as *const (),)+
                "hsa_iterate_agents" => hsa_iterate_agents as *const (),
                "hsa_amd_agent_iterate_memory_pools" => {
                    hsa_amd_agent_iterate_memory_pools as *const ()
                }
                "hsa_amd_memory_pool_free" => hsa_amd_memory_pool_free as *const (),
                "hsa_signal_load_scacquire" => hsa_signal_load_scacquire as *const (),
                "hsa_signal_wait_scacquire" => hsa_signal_wait_scacquire as *const (),
                _ => return None,
            })
        }

        const NAMES: &[&str] = &[
            $(stringify!($name),)+
            "hsa_iterate_agents",
            "hsa_amd_agent_iterate_memory_pools",
            "hsa_amd_memory_pool_free",
            "hsa_signal_load_scacquire",
            "hsa_signal_wait_scacquire",
        ];
    };
}

/// Returns a function's name as a static string; `None` if the runtime has no such function.
pub(crate) fn known(name: &str) -> Option<&'static str> {
    NAMES.iter().copied().find(|known| *known == name)
}

/// Writes a result to the caller's out parameter. Fails with INVALID_ARGUMENT for a null pointer.
fn put<T>(place: *mut T, value: T) -> Result<(), HsaStatus> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller of the runtime passes a writable place, as the header demands.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// # Safety
/// The caller must follow the rules that AMD's headers state for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsa_iterate_agents(
    callback: AgentCallback,
    data: *mut c_void,
) -> HsaStatus {
    let devices = match enter("hsa_iterate_agents", |state| Ok(state.profile.devices)) {
        Ok(devices) => devices,
        Err(code) => return code,
    };
    for agent in [CPU].into_iter().chain((0..devices).map(gpu)) {
        // SAFETY: the callback takes the data that came with it.
        let code = unsafe { callback(agent, data) };
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// Splits a pool's handle into its agent and its kind: 2 (fine-grained), 4 (coarse-grained) or 9
/// (group).
fn pool_of(pool: MemoryPool) -> (Agent, u32) {
    (Agent { handle: pool.handle / 16 }, (pool.handle % 16) as u32)
}

/// # Safety
/// The caller must follow the rules that AMD's headers state for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsa_amd_agent_iterate_memory_pools(
    agent: Agent,
    callback: PoolCallback,
    data: *mut c_void,
) -> HsaStatus {
    if let Err(code) = enter("hsa_amd_agent_iterate_memory_pools", |_| Ok(())) {
        return code;
    }
    for kind in [9, 2, 4] {
        // SAFETY: the callback takes the data that came with it.
        let code = unsafe { callback(MemoryPool { handle: agent.handle * 16 + kind }, data) };
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// # Safety
/// The caller must follow the rules that AMD's headers state for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsa_amd_memory_pool_free(pointer: *mut c_void) -> HsaStatus {
    let base = pointer as u64;
    let taken = enter("hsa_amd_memory_pool_free", |state| match state.allocations.get(&base) {
        Some(one) if !one.imported => Ok(state.allocations.remove(&base).expect("found")),
        _ => Err(state.violation("free of what was not allocated")),
    });
    let mut allocation = match taken {
        Ok(allocation) => allocation,
        Err(code) => return code,
    };
    // As in release 7.2, callbacks run when queries no longer find the memory and before its
    // address is free.
    for (pointer, callback, data) in std::mem::take(&mut allocation.callbacks) {
        // SAFETY: the callback takes the data that came with it.
        unsafe { callback(pointer as *mut c_void, data as *mut c_void) };
    }
    if let Some(state) = &mut *STATE.lock() {
        state.release(base, &allocation);
    }
    SUCCESS
}

fn look(symbol: &'static str, signal: Signal, patient: bool) -> i64 {
    // The call returns no status, so an injected fault fails the copy instead.
    enter(symbol, |state| Ok(state.look(signal.handle, patient))).unwrap_or_else(|_| {
        let mut state = STATE.lock();
        let known = state.as_mut().and_then(|state| state.signals.get_mut(&signal.handle));
        if let Some(known) = known {
            (known.copy, known.value) = (None, -1);
        }
        -1
    })
}

/// # Safety
/// The caller must follow the rules that AMD's headers state for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsa_signal_load_scacquire(signal: Signal) -> i64 {
    look("hsa_signal_load_scacquire", signal, false)
}

/// # Safety
/// The caller must follow the rules that AMD's headers state for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsa_signal_wait_scacquire(
    signal: Signal,
    _condition: u32,
    _value: i64,
    _timeout: u64,
    _state: u32,
) -> i64 {
    look("hsa_signal_wait_scacquire", signal, true)
}

runtime! {
    fn hsa_init(state) {
        state.counts += 1;
        Ok(())
    }

    fn hsa_shut_down(state) {
        state.counts -= 1;
        Ok(())
    }

    fn hsa_system_get_info(state, attribute: u32, value: *mut c_void) {
        const DMA_BUF: u32 = sys::HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED.number;
        const VMM: u32 = sys::HSA_AMD_SYSTEM_INFO_VIRTUAL_MEM_API_SUPPORTED.number;
        match attribute {
            // Release 5.2 knows neither attribute.
            DMA_BUF | VMM if state.profile.name == "5.2" => Err(INVALID_ARGUMENT),
            DMA_BUF => put(value.cast(), u8::from(state.profile.dma_buf)),
            VMM => put(value.cast(), 1u8),
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn hsa_agent_get_info(state, agent: Agent, attribute: u32, value: *mut c_void) {
        const KIND: u32 = sys::HSA_AGENT_INFO_DEVICE.number;
        const PRODUCT: u32 = sys::HSA_AMD_AGENT_INFO_PRODUCT_NAME.number;
        const NAME: u32 = sys::HSA_AGENT_INFO_NAME.number;
        const DOMAIN: u32 = sys::HSA_AMD_AGENT_INFO_DOMAIN.number;
        const BDF: u32 = sys::HSA_AMD_AGENT_INFO_BDFID.number;
        const FLUSH: u32 = sys::HSA_AMD_AGENT_INFO_HDP_FLUSH.number;
        let text = |text: &str| {
            let mut bytes = [0u8; 64];
            bytes[..text.len()].copy_from_slice(text.as_bytes());
            bytes
        };
        match attribute {
            KIND => put(value.cast(), u32::from(agent != CPU)),
            // The second GPU has no product name.
            PRODUCT => put(value.cast(), text(if agent == gpu(0) { "Test" } else { "" })),
            NAME => put(value.cast(), text("gfx942")),
            DOMAIN => put(value.cast(), 0u32),
            BDF => put(value.cast(), (0xc0 + agent.handle as u32 - 10) << 8 | 2 << 3 | 1),
            FLUSH => {
                let register = &mut state.registers[(agent.handle - 11) as usize];
                put(value.cast(), HdpFlush { memory: register, registers: std::ptr::null_mut() })
            }
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn hsa_amd_memory_pool_get_info(state, pool: MemoryPool, attribute: u32, value: *mut c_void) {
        const SEGMENT: u32 = sys::HSA_AMD_MEMORY_POOL_INFO_SEGMENT.number;
        const FLAGS: u32 = sys::HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS.number;
        const SIZE: u32 = sys::HSA_AMD_MEMORY_POOL_INFO_SIZE.number;
        const ALLOWED: u32 = sys::HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED.number;
        const GRANULE: u32 = sys::HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE.number;
        let (_, flags) = pool_of(pool);
        match attribute {
            SEGMENT => put(value.cast(), if flags == 9 { 3u32 } else { 0 }),
            FLAGS => put(value.cast(), flags),
            SIZE => put(value.cast(), if flags == 9 { 1 << 50 } else { state.profile.memory }),
            ALLOWED => put(value.cast(), u8::from(flags != 9)),
            GRANULE => put(value.cast(), page() as usize),
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn hsa_amd_memory_pool_allocate(
        state, pool: MemoryPool, len: usize, flags: u32, base: *mut *mut c_void
    ) {
        if len == 0 || flags != 0 || base.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let (owner, _) = pool_of(pool);
        let address = state.allocate(owner, len, owner == CPU)?;
        put(base, address as *mut c_void)
    }

    fn hsa_amd_agents_allow_access(
        state, count: u32, agents: *const Agent, flags: *const u32, pointer: *const c_void
    ) {
        if count == 0 || agents.is_null() || !flags.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let known = state.allocations.get_mut(&(pointer as u64)).ok_or(INVALID_ARGUMENT)?;
        known.shared = true;
        Ok(())
    }

    fn hsa_amd_pointer_info(
        state, pointer: *const c_void, info: *mut PointerInfo, allocator: ListAllocator,
        count: *mut u32, agents: *mut *mut Agent
    ) {
        assert!(allocator.is_none() && count.is_null() && agents.is_null(), "no list is wanted");
        if pointer.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        put(info, state.pointer_info(pointer as u64))
    }

    fn hsa_amd_register_deallocation_callback(
        state, pointer: *mut c_void, callback: DeallocationCallback, data: *mut c_void
    ) {
        let (base, one) = state.around(pointer as u64).ok_or(INVALID_ALLOCATION)?;
        if one.imported {
            return Err(INVALID_ALLOCATION);
        }
        let one = state.allocations.get_mut(&base).expect("found");
        one.callbacks.push((pointer as usize, callback, data as usize));
        Ok(())
    }

    fn hsa_signal_create(
        state, value: i64, _count: u32, _consumers: *const Agent, signal: *mut Signal
    ) {
        let handle = state.handle();
        state.signals.insert(handle, SignalState { value, copy: None, looks: 0 });
        put(signal, Signal { handle })
    }

    fn hsa_signal_destroy(state, signal: Signal) {
        match state.signals.remove(&signal.handle) {
            Some(one) if one.copy.is_none() => Ok(()),
            Some(_) => Err(state.violation("destroyed the signal of a copy in flight")),
            None => Err(state.violation("destroyed a signal that is not there")),
        }
    }

    fn hsa_amd_memory_async_copy(
        state, to: *mut c_void, to_agent: Agent, from: *const c_void, from_agent: Agent,
        len: usize, _count: u32, _signals: *const Signal, signal: Signal
    ) {
        let (to, from) = (to as u64, from as u64);
        if to.abs_diff(from) < len as u64 {
            return Err(state.violation("the sides of a copy overlap"));
        }
        // The device that executes the copy.
        let agent = if to_agent == CPU { from_agent } else { to_agent };
        let sides = (state.reach(to, len, agent), state.reach(from, len, agent));
        let (Some(to), Some(from)) = sides else {
            return Err(state.violation("a side of a copy is not accessible to its agent"));
        };
        let Some(known) = state.signals.get_mut(&signal.handle) else {
            return Err(HsaStatus::HSA_STATUS_ERROR_INVALID_SIGNAL);
        };
        known.copy = Some(Copy { to, from, len });
        Ok(())
    }

    fn hsa_amd_memory_lock(
        state, host: *mut c_void, len: usize, agents: *mut Agent, count: i32,
        device: *mut *mut c_void
    ) {
        if host.is_null() || len == 0 || agents.is_null() != (count == 0) {
            return Err(INVALID_ARGUMENT);
        }
        if state.locked.contains_key(&(host as u64)) {
            return Err(state.violation("locked twice: unlocking would end either"));
        }
        let address = state.take_addresses((len as u64).next_multiple_of(page()) + page());
        let address = address + host as u64 % page();
        state.locked.insert(host as u64, (len as u64, address));
        put(device, address as *mut c_void)
    }

    fn hsa_amd_memory_unlock(state, host: *mut c_void) {
        match state.locked.remove(&(host as u64)) {
            Some(_) => Ok(()),
            None => Err(state.violation("unlocked what is not locked")),
        }
    }

    fn hsa_amd_portable_export_dmabuf(
        state, pointer: *const c_void, len: usize, fd: *mut i32, offset: *mut u64
    ) {
        export(state, pointer as u64, len, fd, offset, 0)
    }

    fn hsa_amd_portable_export_dmabuf_v2(
        state, pointer: *const c_void, len: usize, fd: *mut i32, offset: *mut u64, flags: u64
    ) {
        export(state, pointer as u64, len, fd, offset, flags)
    }

    fn hsa_amd_portable_close_dmabuf(_state, fd: i32) {
        // SAFETY: the caller gives the fd away.
        drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
        Ok(())
    }

    fn hsa_amd_ipc_memory_create(
        state, pointer: *mut c_void, len: usize, handle: *mut IpcMemory
    ) {
        let base = pointer as u64;
        let known = state.allocations.get(&base).ok_or(INVALID_ARGUMENT)?;
        let unit = if state.profile.rounds_lengths { page() } else { 1 };
        if known.len.next_multiple_of(unit) != len as u64 || known.owner == CPU {
            return Err(INVALID_ARGUMENT);
        }
        let (owner, size) = (known.owner.handle as u32, known.len.next_multiple_of(page()));
        let file = state.pages.file_of(base, size).ok().flatten().ok_or(OUT_OF_RESOURCES)?;
        let inode = rustix::fs::fstat(file).map_err(|_| OUT_OF_RESOURCES)?.st_ino;
        let fd = file.as_raw_fd() as u32;
        let (low, high) = (inode as u32, (inode >> 32) as u32);
        let (len_low, len_high) = (len as u32, (len as u64 >> 32) as u32);
        let process = std::process::id();
        put(handle, IpcMemory { handle: [process, fd, owner, low, high, len_low, len_high, 0] })
    }

    fn hsa_amd_ipc_memory_attach(
        state, handle: *const IpcMemory, len: usize, count: u32, agents: *const Agent,
        base: *mut *mut c_void
    ) {
        if count > 0 && agents.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller passes a handle, as the header demands.
        let handle = unsafe { handle.read() }.handle;
        let [process, fd, owner, low, high, len_low, len_high, _] = handle;
        let file = reopen(process, fd as i32).map_err(|_| INVALID_ARGUMENT)?;
        let stat = rustix::fs::fstat(&file).map_err(|_| INVALID_ARGUMENT)?;
        let inode = u64::from(low) | u64::from(high) << 32;
        // `hsa_ext_amd.h`, about the length: "Must be the full length of the shared allocation".
        let full = u64::from(len_low) | u64::from(len_high) << 32;
        let is_whole = full.checked_next_multiple_of(page()) == Some(stat.st_size as u64);
        let owner = (0..state.profile.devices).map(gpu).find(|gpu| gpu.handle == owner.into());
        let Some(owner) = owner else { return Err(INVALID_ARGUMENT) };
        if stat.st_ino != inode || full != len as u64 || !is_whole {
            return Err(INVALID_ARGUMENT);
        }
        put(base, state.import(owner, len as u64, file)? as *mut c_void)
    }

    fn hsa_amd_ipc_memory_detach(state, base: *mut c_void) {
        let base = base as u64;
        if !state.allocations.get(&base).is_some_and(|one| one.imported) {
            return Err(INVALID_ARGUMENT);
        }
        let one = state.allocations.remove(&base).expect("found");
        state.release(base, &one);
        Ok(())
    }

    fn hsa_amd_vmem_address_reserve(
        state, base: *mut *mut c_void, len: usize, _wanted: u64, flags: u64
    ) {
        if !(len as u64).is_multiple_of(page()) || flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let address = state.take_addresses(len as u64);
        let reservation = Reservation { len: len as u64, mapped: None, accessible: false };
        state.reservations.insert(address, reservation);
        put(base, address as *mut c_void)
    }

    fn hsa_amd_vmem_address_free(state, base: *mut c_void, len: usize) {
        match state.reservations.get(&(base as u64)) {
            Some(one) if one.mapped.is_some() => Err(HsaStatus::HSA_STATUS_ERROR_RESOURCE_FREE),
            Some(one) if one.len == len as u64 => {
                state.reservations.remove(&(base as u64));
                state.leave_addresses(base as u64, len as u64);
                Ok(())
            }
            _ => Err(INVALID_ALLOCATION),
        }
    }

    fn hsa_amd_vmem_handle_create(
        state, pool: MemoryPool, len: usize, _kind: u32, _flags: u64, handle: *mut VmemHandle
    ) {
        if !(len as u64).is_multiple_of(page()) {
            return Err(INVALID_ARGUMENT);
        }
        let file = memory_file(len as u64).map_err(|_| OUT_OF_RESOURCES)?;
        let number = state.handle();
        state.handles.insert(number, (pool_of(pool).0, file, len as u64));
        put(handle, VmemHandle { handle: number })
    }

    fn hsa_amd_vmem_handle_release(state, handle: VmemHandle) {
        state.handles.remove(&handle.handle).map(drop).ok_or(INVALID_ALLOCATION)
    }

    fn hsa_amd_vmem_map(
        state, base: *mut c_void, len: usize, offset: usize, handle: VmemHandle, _flags: u64
    ) {
        let base = base as u64;
        let (_, file, size) = state.handles.get(&handle.handle).ok_or(INVALID_ARGUMENT)?;
        let reservation = state.reservations.get_mut(&base).ok_or(INVALID_ARGUMENT)?;
        if offset != 0 || *size != len as u64 || reservation.len != *size {
            return Err(INVALID_ARGUMENT);
        }
        let file = file.try_clone().map_err(|_| OUT_OF_RESOURCES)?;
        state.pages.place(base, len as u64, file).map_err(|_| OUT_OF_RESOURCES)?;
        reservation.mapped = Some(handle.handle);
        Ok(())
    }

    fn hsa_amd_vmem_unmap(state, base: *mut c_void, len: usize) {
        let reservation = state.reservations.get_mut(&(base as u64)).ok_or(INVALID_ALLOCATION)?;
        if reservation.mapped.take().is_none() || reservation.len != len as u64 {
            return Err(INVALID_ALLOCATION);
        }
        state.pages.clear(base as u64, len as u64);
        Ok(())
    }

    fn hsa_amd_vmem_set_access(
        state, base: *mut c_void, _len: usize, _access: *const AccessDesc, _count: usize
    ) {
        let reservation = state.reservations.get_mut(&(base as u64)).ok_or(INVALID_ALLOCATION)?;
        reservation.accessible = reservation.mapped.is_some();
        Ok(())
    }

    fn hsa_amd_vmem_export_shareable_handle(
        state, fd: *mut i32, handle: VmemHandle, _flags: u64
    ) {
        let (_, file, len) = state.handles.get(&handle.handle).ok_or(INVALID_ALLOCATION)?;
        put(fd, share(file.as_fd(), *len).map_err(|_| OUT_OF_RESOURCES)?.into_raw_fd())
    }
}

fn export(
    state: &mut crate::state::State,
    address: u64,
    len: usize,
    fd: *mut i32,
    offset: *mut u64,
    flags: u64,
) -> Result<(), HsaStatus> {
    let (base, one) = state.around(address).ok_or(INVALID_ALLOCATION)?;
    let at = address - base;
    if at + len as u64 > one.len {
        return Err(INVALID_ALLOCATION);
    }
    if one.owner == CPU {
        return Err(INVALID_AGENT);
    }
    // Attached memory has no region, and the real runtime does not check that.
    assert!(!one.imported, "the real runtime dereferences a null pointer");
    if flags & sys::HSA_AMD_DMABUF_MAPPING_TYPE_PCIE != 0 && !state.profile.large_bar {
        return Err(HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED);
    }
    let size = one.len.next_multiple_of(page());
    let exported = state.pages.export(base, size).ok().flatten().ok_or(OUT_OF_RESOURCES)?;
    put(fd, exported.into_raw_fd())?;
    put(offset, at)
}
