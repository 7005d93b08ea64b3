//! The started runtime: its functions, agents and devices, which never change.

#![allow(unsafe_code, reason = "calls the runtime on agents and pools")]

use std::{ffi::c_void, fs::File, io, ptr};

use hmem_core::{DeviceId, ErrorKind, IfaceKind, ProcessMark, Result, iface};
use hmem_iface_kit::{log_failure, text};
use parking_lot::Mutex;

use crate::{
    error::{ROCR, check, coded},
    sys::{self, Agent, Attribute, Functions, HsaStatus, MemoryPool},
};

/// A counted reference to the runtime (`hsa_init`), with its functions, agents and devices.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) functions: Functions,
    /// The process that started the runtime. A forked child releases nothing, and takes no lock of
    /// the iface to release or to watch memory: a thread of the parent may have held the lock
    /// during the fork, and no thread of the child releases it.
    pub(crate) process: ProcessMark,
    /// Devices in the order of their ordinals.
    pub(crate) devices: Vec<DeviceEntry>,
    /// CPUs that the runtime listed.
    cpus: Vec<Agent>,
    /// The first CPU and its memory pool. Every agent can get access to memory of the pool. `None`
    /// if the runtime lists no CPU, or no pool of that CPU allows allocations.
    pub(crate) host: Option<(Agent, MemoryPool)>,
    /// False if the runtime reports that it exports no dma-bufs. True also for a runtime that is
    /// too old to report this.
    pub(crate) dma_buf: bool,
    /// True if the runtime reports that it supports virtual memory.
    pub(crate) vmm: bool,
    /// True until the reference to the runtime is released.
    held: Mutex<bool>,
}

/// A GPU, with the properties that copies and allocations need.
#[derive(Debug)]
pub(crate) struct DeviceEntry {
    pub(crate) agent: Agent,
    pub(crate) description: iface::Device,
    /// The pool for allocations, and the granularity of its allocations in bytes. `None` if no pool
    /// of the device allows allocations.
    pub(crate) pool: Option<(MemoryPool, usize)>,
    /// Address of the register that flushes inbound writes, or 0 if the device has none.
    pub(crate) flush_register: usize,
}

impl Runtime {
    /// Starts the runtime and lists its devices.
    ///
    /// # Errors
    /// The errors of [`Builder::open`](crate::Builder::open).
    pub(crate) fn start(functions: Functions) -> Result<Self> {
        let process = ProcessMark::current().map_err(|error| error.iface(IfaceKind::ROCR))?;
        // SAFETY: the call adds a reference to the runtime. Any thread may make it any number of
        // times.
        let code = unsafe { (functions.init)() };
        if code != HsaStatus::HSA_STATUS_SUCCESS {
            return Err(coded(ROCR.unavailable("hsa_init", functions.library()), code).remedy(
                match code {
                    HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES => {
                        let opened = File::options().read(true).write(true).open("/dev/kfd");
                        no_driver(opened.err().map(|error| error.kind()))
                    }
                    _ => no_driver(None),
                },
            ));
        }
        // From here on, dropping `runtime` releases the reference to the runtime.
        let mut runtime = Self {
            functions,
            process,
            devices: Vec::new(),
            cpus: Vec::new(),
            host: None,
            dma_buf: false,
            vmm: false,
            held: Mutex::new(true),
        };
        let functions = &runtime.functions;
        for agent in agents(functions)? {
            match agent_info(functions, agent, sys::HSA_AGENT_INFO_DEVICE)? {
                sys::HSA_DEVICE_TYPE_GPU => {
                    let id = DeviceId(runtime.devices.len() as u32);
                    let device = describe(functions, agent, id);
                    runtime.devices.push(device.map_err(|error| error.device(id))?);
                }
                sys::HSA_DEVICE_TYPE_CPU => runtime.cpus.push(agent),
                _ => {}
            }
        }
        if runtime.devices.is_empty() {
            return Err(ROCR
                .unavailable("hsa_iterate_agents", functions.library())
                .context("devices", 0)
                .remedy("no AMD GPU is visible: see `rocminfo` and ROCR_VISIBLE_DEVICES"));
        }
        if let Some(&cpu) = runtime.cpus.first() {
            let rank = |flags| match flags {
                sys::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED => 0,
                flags if flags & sys::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED != 0 => 1,
                _ => 2,
            };
            runtime.host = pool(functions, cpu, rank)?.map(|found| (cpu, found.pool));
        }
        // A runtime that does not know the attribute for dma-bufs may still export them.
        runtime.dma_buf =
            supports(functions, sys::HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED)?.unwrap_or(true);
        runtime.vmm = supports(functions, sys::HSA_AMD_SYSTEM_INFO_VIRTUAL_MEM_API_SUPPORTED)?
            .unwrap_or(false);
        tracing::debug!(
            library = functions.library(),
            devices = runtime.devices.len(),
            "ROCr opened"
        );
        Ok(runtime)
    }

    /// Checks that the calling process started the runtime.
    ///
    /// # Errors
    /// BadState in a forked child.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<()> {
        self.process.check(operation).map_err(|error| error.iface(IfaceKind::ROCR))
    }

    /// Releases the reference to the runtime.
    ///
    /// # Errors
    /// The runtime's error. The reference is then still held.
    pub(crate) fn release(&self) -> Result<()> {
        let mut held = self.held.lock();
        if *held {
            // SAFETY: `start` added the reference, and `held` shows that it is not released yet.
            check(unsafe { (self.functions.shut_down)() }, "hsa_shut_down")?;
            *held = false;
        }
        Ok(())
    }

    /// Returns the device with this ordinal. For an unknown ordinal, returns an error that names
    /// `operation`.
    pub(crate) fn device(&self, operation: &'static str, device: DeviceId) -> Result<&DeviceEntry> {
        let unknown = || ROCR.unknown_device(operation, device, self.devices.len());
        self.devices.get(device.0 as usize).ok_or_else(unknown)
    }

    /// Returns the device for an agent. Returns `None` for a CPU, and for a GPU that this process
    /// does not see.
    pub(crate) fn device_of(&self, agent: Agent) -> Option<&DeviceEntry> {
        self.devices.iter().find(|device| device.agent == agent)
    }

    /// Returns true if the agent is one of the CPUs that the runtime listed.
    pub(crate) fn is_cpu(&self, agent: Agent) -> bool {
        self.cpus.contains(&agent)
    }

    /// Allocates from a pool. Only the agent of the pool can access the memory.
    pub(crate) fn allocate(&self, pool: MemoryPool, len: usize) -> Result<*mut c_void> {
        let mut base = ptr::null_mut();
        // SAFETY: the pool belongs to this runtime and allows allocations, and `base` is writable.
        let code = unsafe { (self.functions.memory_pool_allocate)(pool, len, 0, &mut base) };
        check(code, "hsa_amd_memory_pool_allocate").map(|()| base)
    }

    /// Allocates host memory that every device can access.
    ///
    /// # Errors
    /// - Unsupported if the runtime has no pool of host memory.
    /// - Otherwise the runtime's error. The memory is then freed again.
    pub(crate) fn allocate_host(&self, len: usize) -> Result<*mut c_void> {
        let (_, pool) = self.host.ok_or_else(|| {
            ROCR.error(ErrorKind::Unsupported, "allocate")
                .context("why", "the runtime has no pool of host memory")
        })?;
        let base = self.allocate(pool, len)?;
        let agents: Vec<Agent> = self.devices.iter().map(|device| device.agent).collect();
        // SAFETY: the list has as many agents as it says, and the call above allocated the memory.
        let code = unsafe {
            (self.functions.agents_allow_access)(
                agents.len() as u32,
                agents.as_ptr(),
                ptr::null(),
                base,
            )
        };
        check(code, "hsa_amd_agents_allow_access").map(|()| base).inspect_err(|_| {
            // SAFETY: the call above allocated the memory, and no caller has seen it.
            let freed = unsafe { self.free(base) };
            log_failure!(error, freed, "cannot free host memory that no device can access");
        })
    }

    /// Frees memory that [`allocate`](Self::allocate) or [`allocate_host`](Self::allocate_host)
    /// returned.
    ///
    /// # Safety
    /// The caller must free the memory only once, and nothing may use it any longer.
    pub(crate) unsafe fn free(&self, base: *mut c_void) -> Result<()> {
        // SAFETY: the runtime returned the address, and the caller promises that the memory is
        // freed once and unused.
        check(unsafe { (self.functions.memory_pool_free)(base) }, "hsa_amd_memory_pool_free")
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.process.is_current() {
            log_failure!(warn, self.release(), "cannot release the reference to the HSA runtime");
        }
    }
}

/// Returns the remedy for a runtime that does not start. `opened` is the error of opening the
/// driver's device file, or `None` if that succeeded or was not tried.
fn no_driver(opened: Option<io::ErrorKind>) -> &'static str {
    match opened {
        Some(io::ErrorKind::PermissionDenied) => {
            "this user may not open /dev/kfd: add the user to the group `render` (or `video`), or \
             pass the device to the container with --device=/dev/kfd --device=/dev/dri"
        }
        Some(io::ErrorKind::NotFound) => {
            "there is no /dev/kfd: load the kernel module amdgpu, or pass the device to the \
             container with --device=/dev/kfd --device=/dev/dri"
        }
        _ => "see `rocminfo` for the state of the driver",
    }
}

fn describe(functions: &Functions, agent: Agent, id: DeviceId) -> Result<DeviceEntry> {
    let mut name = text(&agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_PRODUCT_NAME)?);
    if name.is_empty() {
        name = text(&agent_info(functions, agent, sys::HSA_AGENT_INFO_NAME)?);
    }
    let domain = agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_DOMAIN)?;
    let bdf = agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_BDFID)?;
    let (bus, device, function) = (bdf >> 8 & 0xff, bdf >> 3 & 0x1f, bdf & 0x7);
    let rank = |flags| u32::from(flags & sys::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED == 0);
    let found = pool(functions, agent, rank)?;
    let description = iface::Device {
        id,
        name,
        pci_bus_id: Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")),
        memory: found.map_or(0, |found| found.size as u64),
    };
    let pool = match found {
        Some(Pool { pool, .. }) => {
            let granule = sys::HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE;
            Some((pool, pool_info(functions, pool, granule)?))
        }
        None => None,
    };
    let flush = agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_HDP_FLUSH)?;
    Ok(DeviceEntry { agent, description, pool, flush_register: flush.memory.expose_provenance() })
}

/// A pool that allows allocations.
#[derive(Clone, Copy)]
struct Pool {
    pool: MemoryPool,
    size: usize,
}

/// Returns the best global pool of an agent for allocations: `rank` maps the flags of a pool to a
/// number, and the lowest number wins. All pools of one agent are views of the same memory.
fn pool(functions: &Functions, agent: Agent, rank: impl Fn(u32) -> u32) -> Result<Option<Pool>> {
    let mut pools: Vec<MemoryPool> = Vec::new();
    let into = ptr::from_mut(&mut pools).cast();
    // SAFETY: `into` points to a vector of the callback's type, and the runtime does not call the
    // callback after it returns.
    let code =
        unsafe { (functions.agent_iterate_memory_pools)(agent, collect::<MemoryPool>, into) };
    check(code, "hsa_amd_agent_iterate_memory_pools")?;
    let mut best: Option<(u32, Pool)> = None;
    for pool in pools {
        if pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_SEGMENT)?
            != sys::HSA_AMD_SEGMENT_GLOBAL
            || pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED)? == 0
        {
            continue;
        }
        let rank = rank(pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS)?);
        if best.is_none_or(|(lowest, _)| rank < lowest) {
            let size = pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_SIZE)?;
            best = Some((rank, Pool { pool, size }));
        }
    }
    Ok(best.map(|(_, pool)| pool))
}

/// Adds an item to a vector. The runtime calls this function for each agent or pool that it lists.
/// The result makes the runtime continue.
///
/// # Safety
/// `into` must point to a `Vec<T>` that nothing else accesses during the call.
unsafe extern "C" fn collect<T>(item: T, into: *mut c_void) -> HsaStatus {
    // SAFETY: the caller promises a `Vec<T>` that nothing else accesses meanwhile.
    unsafe { &mut *into.cast::<Vec<T>>() }.push(item);
    HsaStatus::HSA_STATUS_SUCCESS
}

fn agents(functions: &Functions) -> Result<Vec<Agent>> {
    let mut agents: Vec<Agent> = Vec::new();
    let into = ptr::from_mut(&mut agents).cast();
    // SAFETY: `into` points to a vector of the callback's type, and the runtime does not call the
    // callback after it returns.
    check(unsafe { (functions.iterate_agents)(collect::<Agent>, into) }, "hsa_iterate_agents")?;
    Ok(agents)
}

/// Returns the value of an attribute. `get` calls the runtime with the number of the attribute, and
/// with a pointer to a writable value of the attribute's type.
fn info<T: Copy>(
    attribute: Attribute<T>,
    call: &'static str,
    get: impl FnOnce(u32, *mut c_void) -> HsaStatus,
) -> Result<T> {
    let mut value = attribute.empty;
    let code = get(attribute.number, ptr::from_mut(&mut value).cast());
    check(code, call)
        .map(|()| value)
        .map_err(|error| error.context("attribute", format_args!("{:#x}", attribute.number)))
}

fn agent_info<T: Copy>(functions: &Functions, agent: Agent, attribute: Attribute<T>) -> Result<T> {
    info(attribute, "hsa_agent_get_info", |number, value| {
        // SAFETY: `info` passes a writable value of the attribute's type.
        unsafe { (functions.agent_get_info)(agent, number, value) }
    })
}

fn pool_info<T: Copy>(
    functions: &Functions,
    pool: MemoryPool,
    attribute: Attribute<T>,
) -> Result<T> {
    info(attribute, "hsa_amd_memory_pool_get_info", |number, value| {
        // SAFETY: `info` passes a writable value of the attribute's type.
        unsafe { (functions.memory_pool_get_info)(pool, number, value) }
    })
}

/// Returns a boolean attribute of the system, or `None` if the runtime does not know the attribute.
fn supports(functions: &Functions, attribute: Attribute<u8>) -> Result<Option<bool>> {
    let mut known = true;
    let value = info(attribute, "hsa_system_get_info", |number, value| {
        // SAFETY: `info` passes a writable value of the attribute's type.
        let code = unsafe { (functions.system_get_info)(number, value) };
        known = code != HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT;
        if known { code } else { HsaStatus::HSA_STATUS_SUCCESS }
    })?;
    Ok(known.then_some(value != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DIAG-03: the remedy for a runtime that does not start depends on the error of opening
    /// `/dev/kfd`.
    #[test]
    fn absent_and_forbidden_drivers_have_their_own_remedies() {
        assert!(no_driver(Some(io::ErrorKind::PermissionDenied)).contains("group `render`"));
        assert!(no_driver(Some(io::ErrorKind::NotFound)).contains("kernel module amdgpu"));
        assert!(no_driver(None).contains("rocminfo"));
    }
}
