//! The configuration of a simulated device.

use std::{sync::Arc, sync::atomic::AtomicU64, time::Duration};

use hmem_core::{
    Errno, Error, ErrorKind, IfaceKind, IfaceName, Mapping, Result, monitor::FreeSubscriptions,
};
use parking_lot::Mutex;

use super::{
    AddressReuse, DeviceCall, DmaBufKind, Faults, FreeDetection, P2pMatrix, SIMULATED, Simulated,
    SimulatedInner, Stepping,
    address_space::AddressSpace,
    arena::FileArenas,
    engine::{Engine, Pace},
    memory::SimulatedState,
    sys::reserve,
    table::PageTable,
};
use crate::sys;

const SMALLEST_WINDOW: u64 = 64 << 20;

#[derive(Clone, Debug)]
pub(crate) struct SimulatedConfig {
    pub(crate) kind: IfaceKind,
    pub(crate) name: String,
    pub(crate) devices: u32,
    pub(crate) pci_bus_ids: Vec<String>,
    pub(crate) memory_per_device: u64,
    pub(crate) free_detection: FreeDetection,
    pub(crate) p2p: P2pMatrix,
    pub(crate) pcie_mapping: bool,
    pub(crate) peer_memory: bool,
    pub(crate) dma_buf: DmaBufKind,
    pub(crate) segment_len: u64,
}

impl From<&SimulatedConfig> for IfaceName {
    fn from(config: &SimulatedConfig) -> Self {
        Self::new(config.kind, config.name.as_str())
    }
}

/// Builder of a simulated device iface. [`SimulatedBuilder::build`] creates the iface.
///
/// ```
/// use std::time::Duration;
///
/// use hmem_core::{DeviceId, IfaceKind};
/// use hmem_iface_system::{AddressReuse, P2pMatrix, Simulated, FreeDetection};
///
/// let simulated = Simulated::builder()
///     .kind(IfaceKind(0x101))
///     .name("sim-callback")
///     .devices(4)
///     .free_detection(FreeDetection::Callback)
///     .address_reuse(AddressReuse::JustFreed)
///     .p2p(P2pMatrix::all_reachable().block(DeviceId(3), "loop0"))
///     .copy_latency(Duration::from_micros(5))
///     .build()?;
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SimulatedBuilder {
    config: SimulatedConfig,
    reuse: AddressReuse,
    stepping: Stepping,
    pace: Pace,
    window: u64,
    arena: u64,
    faults: Vec<(DeviceCall, u64, Errno)>,
}

impl Default for SimulatedBuilder {
    fn default() -> Self {
        Self {
            config: SimulatedConfig {
                kind: SIMULATED,
                name: "simulated".into(),
                devices: 1,
                pci_bus_ids: Vec::new(),
                memory_per_device: 16 << 30,
                free_detection: FreeDetection::default(),
                p2p: P2pMatrix::default(),
                pcie_mapping: true,
                peer_memory: false,
                dma_buf: DmaBufKind::default(),
                segment_len: 2 << 20,
            },
            reuse: AddressReuse::default(),
            stepping: Stepping::default(),
            pace: Pace::default(),
            window: 1 << 40,
            arena: 64 << 20,
            faults: Vec::new(),
        }
    }
}

impl SimulatedBuilder {
    /// Sets the iface kind, 0x100 or higher. Simulated ifaces in one process need different kinds.
    /// Default: [`SIMULATED`].
    #[must_use]
    pub fn kind(mut self, kind: IfaceKind) -> Self {
        self.config.kind = kind;
        self
    }

    /// Sets the name of the iface. Default: `simulated`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.config.name = name.into();
        self
    }

    /// Sets the number of devices. Default: 1.
    #[must_use]
    pub fn devices(mut self, devices: u32) -> Self {
        self.config.devices = devices;
        self
    }

    /// Sets the PCI addresses of the devices, beginning with device 0. A test can thereby place the
    /// devices in a recorded PCI topology. By default the devices have no PCI address.
    #[must_use]
    pub fn pci_bus_ids(mut self, ids: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.config.pci_bus_ids = ids.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the memory size of each device in bytes. Default: 16 GiB. Only pages that are written
    /// use memory of the host.
    #[must_use]
    pub fn memory_per_device(mut self, bytes: u64) -> Self {
        self.config.memory_per_device = bytes;
        self
    }

    /// Sets the method by which the iface's monitor detects frees. Default:
    /// [`FreeDetection::Identity`].
    #[must_use]
    pub fn free_detection(mut self, free_detection: FreeDetection) -> Self {
        self.config.free_detection = free_detection;
        self
    }

    /// Sets the policy for reusing freed device addresses. Default: [`AddressReuse::Off`].
    #[must_use]
    pub fn address_reuse(mut self, reuse: AddressReuse) -> Self {
        self.reuse = reuse;
        self
    }

    /// Sets which NICs can access the memory of each device. By default, every NIC can access every
    /// device.
    #[must_use]
    pub fn p2p(mut self, matrix: P2pMatrix) -> Self {
        self.config.p2p = matrix;
        self
    }

    /// Sets the fixed time of each copy, to which the time for its bytes is added. Default: none.
    #[must_use]
    pub fn copy_latency(mut self, latency: Duration) -> Self {
        self.pace.latency = latency;
        self
    }

    /// Sets the bandwidth of the copy engine in bytes per second. Default: 0, which means no limit.
    #[must_use]
    pub fn copy_bandwidth(mut self, bytes_per_second: u64) -> Self {
        self.pace.bandwidth = bytes_per_second;
        self
    }

    /// Sets who runs asynchronous copies: an engine thread or the application. Default:
    /// [`Stepping::Thread`].
    ///
    /// With [`Stepping::ByHand`], latency and bandwidth have no effect. A blocking copy then runs
    /// at once, before asynchronous copies that were queued earlier.
    #[must_use]
    pub fn stepping(mut self, stepping: Stepping) -> Self {
        self.stepping = stepping;
        self
    }

    /// Sets the size in bytes of the address range that is reserved for device addresses, at least
    /// 64 MiB. If the process has less free address space, the range is smaller. Default: 1 TiB.
    #[must_use]
    pub fn window(mut self, bytes: u64) -> Self {
        self.window = bytes;
        self
    }

    /// Sets the size in bytes of a memory file that many small allocations share. Default: 64 MiB.
    #[must_use]
    pub fn arena(mut self, bytes: u64) -> Self {
        self.arena = bytes;
        self
    }

    /// Sets the length in bytes of the segments of an
    /// [`AllocationKind::Virtual`](hmem_core::AllocationKind::Virtual) allocation. Default: 2 MiB.
    ///
    /// The length need not be a multiple of the host's page size, and may be less than a page. The
    /// last segment of an allocation may be shorter.
    #[must_use]
    pub fn segment_len(mut self, bytes: u64) -> Self {
        self.config.segment_len = bytes;
        self
    }

    /// Sets whether the devices support dma-buf exports with
    /// [`DmaBufMapping::Pcie`](hmem_core::iface::DmaBufMapping::Pcie). Default: true.
    #[must_use]
    pub fn pcie_mapping(mut self, honoured: bool) -> Self {
        self.config.pcie_mapping = honoured;
        self
    }

    /// Sets whether the devices export memory to peer-memory clients. Default: false.
    #[must_use]
    pub fn peer_memory(mut self, known: bool) -> Self {
        self.config.peer_memory = known;
        self
    }

    /// Sets the kind of fds that dma-buf exports return. Default: [`DmaBufKind::Auto`].
    #[must_use]
    pub fn dma_buf(mut self, kind: DmaBufKind) -> Self {
        self.config.dma_buf = kind;
        self
    }

    /// Makes the `nth` driver call of kind `call` fail with `errno`. 1 is the first call. To add
    /// faults later, use [`Simulated::faults`].
    #[must_use]
    pub fn fault(mut self, call: DeviceCall, nth: u64, errno: Errno) -> Self {
        self.faults.push((call, nth, errno));
        self
    }

    /// Creates the simulated iface with its devices.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`]: the kind is below 0x100, the arena or segment length is 0,
    ///   or the arena is longer than a file can be.
    /// - [`ErrorKind::OutOfResources`]: no range of addresses can be reserved.
    /// - [`ErrorKind::Unavailable`]: [`DmaBufKind::Udmabuf`] is set and `/dev/udmabuf` cannot be
    ///   opened.
    /// - [`ErrorKind::Unsupported`]: the kernel has pages of a size that the device cannot have.
    pub fn build(self) -> Result<Simulated> {
        let config = self.config;
        let lengths = [self.arena, config.segment_len];
        if !config.kind.is_plug_in() || lengths.contains(&0) || self.arena > i64::MAX as u64 {
            return Err(Error::new(ErrorKind::InvalidArgument, "build simulated device")
                .iface(&config)
                .context("arena", self.arena)
                .context("segment length", config.segment_len)
                .remedy("set a kind of 0x100 or higher, and lengths of 1 to 2^63 - 1 bytes"));
        }
        let page = sys::page_size();
        let window = reserve_window(self.window, page)?;
        let range = window.range();
        let (table, writer) = PageTable::new(config.kind, range, page)?;
        let faults = Faults::new();
        for (call, nth, errno) in self.faults {
            faults.fail_nth(call, nth, errno);
        }
        let addresses = AddressSpace::new(range.len(), self.reuse);
        let arenas = FileArenas::new(page, self.arena.next_multiple_of(page));
        let inner = SimulatedInner {
            udmabuf: config.dma_buf.open()?,
            engine: Engine::new(self.stepping, self.pace),
            state: Mutex::new(SimulatedState::new(arenas, addresses, writer, config.devices)),
            config,
            page,
            table,
            faults,
            copies: AtomicU64::new(0),
            subscriptions: FreeSubscriptions::default(),
            window,
        };
        Ok(Simulated { inner: Arc::new(inner) })
    }
}

/// Reserves `wanted` bytes of address space, or [`SMALLEST_WINDOW`] if that is more. If the kernel
/// refuses, tries half the size, and so on down to [`SMALLEST_WINDOW`].
fn reserve_window(wanted: u64, page: u64) -> Result<Mapping> {
    let mut len = wanted.clamp(SMALLEST_WINDOW, 1 << 63).next_multiple_of(page);
    loop {
        match reserve(usize::try_from(len).unwrap_or(usize::MAX)) {
            Ok(window) => return Ok(window),
            Err(errno) if len / 2 < SMALLEST_WINDOW => {
                return Err(Error::os(errno, "mmap")
                    .context("window", len)
                    .remedy("raise the limit of address space (ulimit -v)"));
            }
            Err(_) => len = (len / 2).next_multiple_of(page),
        }
    }
}
