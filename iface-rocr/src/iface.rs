//! The iface: opens the driver, lists its devices and implements the trait.

use std::{
    ffi::{CStr, c_void},
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use hmem_core::{
    Address, Allocation, DeviceId, Error, ErrorKind, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{Device, Facet, InboundFlush},
};

use crate::{
    causes::CAUSES,
    error::{check, coded, lacks, unavailable},
    memory,
    sys::{self, Agent, AgentAttribute, Functions, HsaStatus, MemoryPool, PoolAttribute},
};

/// ROCr memory, over the HSA runtime.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_rocr::Rocr;
///
/// if let Ok(rocr) = Rocr::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(rocr.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Rocr {
    functions: Arc<Functions>,
    devices: Vec<Device>,
    /// Every agent with its device. `None` for a CPU.
    agents: Vec<(Agent, Option<DeviceId>)>,
    /// True while a count of the runtime is held.
    held: bool,
}

/// Opens [`Rocr`] over a driver library of choice.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_rocr::Rocr;
///
/// let error = Rocr::builder().library("/nowhere/libhsa-runtime64.so.1").open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// assert_eq!(error.context_value("library"), Some("/nowhere/libhsa-runtime64.so.1"));
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until it opens"]
pub struct Builder {
    driver: Driver,
}

#[derive(Debug)]
enum Driver {
    Library(PathBuf),
    Functions(Functions),
}

impl Builder {
    /// Loads the library at `path` instead of the one that the dynamic loader finds.
    pub fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.driver = Driver::Library(path.as_ref().to_owned());
        self
    }

    /// Calls these functions instead of loading a library.
    pub fn functions(mut self, functions: Functions) -> Self {
        self.driver = Driver::Functions(functions);
        self
    }

    /// Starts the driver and lists its devices.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] without the library, without a symbol of it, without a device, or
    /// with a driver that does not start. The error names the library, and the driver's code if
    /// there is one. Otherwise the error of a device that was asked for its properties.
    pub fn open(self) -> Result<Rocr> {
        let functions = match self.driver {
            Driver::Library(path) => Functions::load(&path)?,
            Driver::Functions(functions) => functions,
        };
        Rocr::start(functions)
    }
}

impl Rocr {
    /// Opens the runtime library that the dynamic loader finds.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// Returns a builder, which can open another library or injected functions.
    pub fn builder() -> Builder {
        Builder { driver: Driver::Library(PathBuf::from(Functions::LIBRARY)) }
    }

    /// Gives the iface's one count of the runtime back.
    ///
    /// Dropping does the same, and can only log a refusal.
    ///
    /// # Errors
    /// The driver's error. The iface comes back.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.release() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn start(functions: Functions) -> Result<Self> {
        // SAFETY: takes a count of the runtime; any thread may call it any number of times.
        let code = unsafe { (functions.init)() };
        if code != HsaStatus::HSA_STATUS_SUCCESS {
            return Err(coded(unavailable("hsa_init", functions.library()), code).remedy(match code {
                HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES => {
                    "no AMD GPU driver answers: see whether /dev/kfd exists and this user may open it"
                }
                _ => "see `rocminfo` for the state of the driver",
            }));
        }
        // From here on, dropping it gives the count back.
        let mut rocr = Self {
            functions: Arc::new(functions),
            devices: Vec::new(),
            agents: Vec::new(),
            held: true,
        };
        for agent in agents(&rocr.functions)? {
            let kind = agent_info(&rocr.functions, agent, sys::HSA_AGENT_INFO_DEVICE)?;
            let device = if kind == sys::HSA_DEVICE_TYPE_GPU {
                let id = DeviceId(rocr.devices.len() as u32);
                rocr.devices
                    .push(describe(&rocr.functions, agent, id).map_err(|error| error.device(id))?);
                Some(id)
            } else {
                None
            };
            rocr.agents.push((agent, device));
        }
        if rocr.devices.is_empty() {
            return Err(unavailable("hsa_iterate_agents", rocr.functions.library())
                .context("devices", 0)
                .remedy("no AMD GPU is visible: see `rocminfo` and ROCR_VISIBLE_DEVICES"));
        }
        tracing::debug!(
            library = rocr.functions.library(),
            devices = rocr.devices.len(),
            "ROCr opened"
        );
        Ok(rocr)
    }

    fn release(&mut self) -> Result<()> {
        if self.held {
            // SAFETY: gives back the one count that `start` took; `held` says that it is still
            // there.
            check(unsafe { (self.functions.shut_down)() }, "hsa_shut_down")?;
            self.held = false;
        }
        Ok(())
    }
}

impl Drop for Rocr {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "a count of the HSA runtime stays behind");
        }
    }
}

fn describe(functions: &Functions, agent: Agent, id: DeviceId) -> Result<Device> {
    let product = text(agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_PRODUCT_NAME)?);
    let name = if product.is_empty() {
        text(agent_info(functions, agent, sys::HSA_AGENT_INFO_NAME)?)
    } else {
        product
    };
    let domain = agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_DOMAIN)?;
    let bdf = agent_info(functions, agent, sys::HSA_AMD_AGENT_INFO_BDFID)?;
    let (bus, device, function) = (bdf >> 8 & 0xff, bdf >> 3 & 0x1f, bdf & 0x7);
    Ok(Device {
        id,
        name,
        pci_bus_id: Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")),
        memory: memory_of(functions, agent)?,
    })
}

/// Returns the size of the largest global pool: coarse- and fine-grained pools are views of the
/// same memory.
fn memory_of(functions: &Functions, agent: Agent) -> Result<u64> {
    let mut pools: Vec<MemoryPool> = Vec::new();
    let into = ptr::from_mut(&mut pools).cast();
    // SAFETY: the callback gets the vector that it casts to, and is not called after the return.
    let code =
        unsafe { (functions.agent_iterate_memory_pools)(agent, collect::<MemoryPool>, into) };
    check(code, "hsa_amd_agent_iterate_memory_pools")?;
    let mut memory = 0;
    for pool in pools {
        if pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_SEGMENT)?
            == sys::HSA_AMD_SEGMENT_GLOBAL
        {
            memory =
                memory.max(pool_info(functions, pool, sys::HSA_AMD_MEMORY_POOL_INFO_SIZE)? as u64);
        }
    }
    Ok(memory)
}

/// Adds an item to a vector.
///
/// # Safety
/// `into` points to a `Vec<T>`, which nothing else touches meanwhile.
unsafe extern "C" fn collect<T>(item: T, into: *mut c_void) -> HsaStatus {
    // SAFETY: the caller's promise.
    unsafe { &mut *into.cast::<Vec<T>>() }.push(item);
    HsaStatus::HSA_STATUS_SUCCESS
}

fn agents(functions: &Functions) -> Result<Vec<Agent>> {
    let mut agents: Vec<Agent> = Vec::new();
    let into = ptr::from_mut(&mut agents).cast();
    // SAFETY: the callback gets the vector that it casts to, and is not called after the return.
    check(unsafe { (functions.iterate_agents)(collect::<Agent>, into) }, "hsa_iterate_agents")?;
    Ok(agents)
}

fn agent_info<T: Copy>(
    functions: &Functions,
    agent: Agent,
    attribute: AgentAttribute<T>,
) -> Result<T> {
    let mut value = attribute.empty;
    // SAFETY: `value` is writable and of the type that the attribute's constant ties to its number.
    let code = unsafe {
        (functions.agent_get_info)(agent, attribute.number, ptr::from_mut(&mut value).cast())
    };
    check(code, "hsa_agent_get_info")
        .map_err(|error| error.context("attribute", format_args!("{:#x}", attribute.number)))?;
    Ok(value)
}

fn pool_info<T: Copy>(
    functions: &Functions,
    pool: MemoryPool,
    attribute: PoolAttribute<T>,
) -> Result<T> {
    let mut value = attribute.empty;
    // SAFETY: `value` is writable and of the type that the attribute's constant ties to its number.
    let code = unsafe {
        (functions.memory_pool_get_info)(pool, attribute.number, ptr::from_mut(&mut value).cast())
    };
    check(code, "hsa_amd_memory_pool_get_info")
        .map_err(|error| error.context("attribute", format_args!("{:#x}", attribute.number)))?;
    Ok(value)
}

/// Returns the text that a driver wrote, up to its NUL.
fn text(buffer: [u8; 64]) -> String {
    match CStr::from_bytes_until_nul(&buffer) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&buffer).into_owned(),
    }
}

// SAFETY: nothing is allocated, copied or exported yet. `query` repeats what the driver knows of an
// address now.
unsafe impl Iface for Rocr {
    fn kind(&self) -> IfaceKind {
        IfaceKind::ROCR
    }

    fn name(&self) -> &str {
        "rocr"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.devices.clone())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        memory::query(&self.functions, &self.agents, address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        Err(lacks("copy", "hmem-iface-rocr does not copy yet")
            .context("to", to)
            .context("from", from)
            .context("length", len))
    }

    /// The runtime keeps no identities, and only its deallocation callbacks tell a reused address.
    fn has_identities(&self) -> bool {
        false
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(self)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }

    fn unavailable(&self, facet: Facet) -> Error {
        lacks(
            facet.operation(),
            match facet {
                Facet::Allocator => "hmem-iface-rocr does not allocate yet",
                Facet::CopyEngine => "hmem-iface-rocr does not copy asynchronously yet",
                Facet::DmaBuf => "hmem-iface-rocr does not export dma-bufs yet",
                Facet::PeerMemory => "hmem-iface-rocr does not export peer memory yet",
                Facet::HostRegistrar => "hmem-iface-rocr does not page-lock host memory yet",
                Facet::Ipc => "hmem-iface-rocr does not hand allocations to other processes yet",
                Facet::Monitor => "hmem-iface-rocr does not monitor frees yet",
                _ => "hmem-iface-rocr does not have it yet",
            },
        )
    }
}

/// Refuses, so that no caller takes a NIC's writes for visible: the devices may need a flush that
/// this crate does not make yet.
impl InboundFlush for Rocr {
    fn flush(&self, device: DeviceId) -> Result<()> {
        if device.0 as usize >= self.devices.len() {
            return Err(Error::new(ErrorKind::InvalidArgument, "flush_inbound")
                .iface(IfaceKind::ROCR)
                .device(device)
                .context("devices", self.devices.len())
                .remedy("devices count from 0"));
        }
        Err(lacks("flush_inbound", "hmem-iface-rocr does not flush inbound writes yet")
            .device(device))
    }
}
