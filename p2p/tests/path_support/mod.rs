//! Shared parts of the path suites: a simulated device, software NICs with a record, and domains.

#![allow(dead_code, reason = "each suite uses a part of it")]

pub(crate) mod recording;
pub(crate) mod vendor;
pub(crate) mod wire;

use std::{
    fs, io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Error, Iface,
    MrMode, Promise, Raw, Region, Registry, Rejected, Result,
    iface::AllocRequest,
    path::P2pPolicy,
    provider::{Imports, Nic},
};
use hmem_iface_system::{DeviceCall, Simulated, SimulatedBuilder, System};
use hmem_p2p::path::{DefaultPathSelector, FactSource, Facts};
use hmem_provider_loopback::{self as loopback, Faults, Loopback};
use parking_lot::{Mutex, MutexGuard};
use recording::{Record, Recording};

pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Returns the page size of the machine.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// The imports of a NIC that supports every path.
pub(crate) const ALL_IMPORTS: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: Some(true),
    data_direct: None,
    peer_memory: true,
    staged: true,
};

/// A fact source without facts. The traces then do not depend on the machine that runs the tests.
#[derive(Debug)]
struct Unknown;

impl FactSource for Unknown {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        Facts::default()
    }
}

/// A test setup: a simulated device and a fabric of software NICs `loop0`, `loop1` and so on.
pub(crate) struct Bench {
    pub(crate) device: Arc<Simulated>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) provider: Recording<Loopback>,
    pub(crate) record: Record,
    pub(crate) faults: Faults,
    pub(crate) paths: Arc<DefaultPathSelector>,
}

impl Bench {
    /// Creates a bench with two NICs that support `imports`.
    pub(crate) fn new(device: SimulatedBuilder, imports: Imports) -> Self {
        Self::with(
            device,
            Loopback::builder().nic("loop0").nic("loop1").imports(imports),
            DefaultPathSelector::new(),
        )
    }

    pub(crate) fn with(
        device: SimulatedBuilder,
        provider: loopback::Builder,
        paths: DefaultPathSelector,
    ) -> Self {
        let device = Arc::new(device.window(1 << 32).build().expect("a simulated device"));
        let iface = Arc::clone(&device) as Arc<dyn Iface>;
        Self::over(device, iface, provider, paths)
    }

    /// Creates a bench in which another iface owns the device's memory.
    pub(crate) fn over(
        device: Arc<Simulated>,
        iface: Arc<dyn Iface>,
        provider: loopback::Builder,
        paths: DefaultPathSelector,
    ) -> Self {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        registry.add(iface).expect("its kind is free");
        let (faults, record) = (Faults::new(), Record::default());
        let inner = provider.faults(&faults).build().expect("a fabric");
        Self {
            device,
            registry: Arc::new(registry),
            provider: Recording { inner, record: record.clone() },
            record,
            faults,
            paths: Arc::new(paths.facts(Arc::new(Unknown))),
        }
    }

    pub(crate) fn domain(&self, nic: &str, p2p: P2pPolicy) -> Domain {
        self.try_domain(nic, p2p).expect("open a domain")
    }

    pub(crate) fn try_domain(&self, nic: &str, p2p: P2pPolicy) -> Result<Domain> {
        self.domain_with(DomainAttr { nic: Some(nic.to_owned()), p2p, ..DomainAttr::default() })
    }

    /// Opens a domain that offers every mr_mode bit but BASIC and SCALABLE, and otherwise has the
    /// attributes `attr`.
    pub(crate) fn domain_with(&self, attr: DomainAttr) -> Result<Domain> {
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let attr = DomainAttr { mr_mode, ..attr };
        Domain::open(&self.provider, Arc::clone(&self.registry), Arc::clone(&self.paths) as _, attr)
    }

    pub(crate) fn buffer(&self, len: u64) -> DeviceBuffer {
        self.buffer_of(AllocationKind::Device, DeviceId(0), len)
    }

    pub(crate) fn buffer_of(
        &self,
        kind: AllocationKind,
        device: DeviceId,
        len: u64,
    ) -> DeviceBuffer {
        let iface: Arc<dyn Iface> = Arc::clone(&self.device) as _;
        DeviceBuffer::allocate(&iface, &AllocRequest { len, device, kind }).expect("device memory")
    }

    /// Allocates a buffer that the iface reports as not exportable.
    pub(crate) fn odd(&self, len: u64) -> DeviceBuffer {
        let buffer = self.buffer(len);
        self.device.set_exportable(buffer.allocation().base(), false).expect("a live allocation");
        buffer
    }

    pub(crate) fn calls(&self, call: DeviceCall) -> u64 {
        self.device.stats().calls(call)
    }

    /// Returns the current counts of objects that may leak.
    pub(crate) fn residue(&self) -> Residue {
        let stats = self.device.stats();
        Residue {
            allocations: stats.live_allocations,
            exports: stats.live_exports,
            fds: open_fds(),
            threads: threads(),
        }
    }

    /// Returns the counts once no more threads run than in `before`, or after a minute. The wait is
    /// needed because a joined thread remains listed for a short time. If fewer threads run, the
    /// result has the number in `before`.
    pub(crate) fn residue_after(&self, before: &Residue) -> Residue {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let residue = self.residue();
            if residue.threads <= before.threads {
                return Residue { threads: before.threads, ..residue };
            }
            if Instant::now() > deadline {
                return residue;
            }
            thread::yield_now();
        }
    }
}

/// Counts of live objects. A leak increases them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Residue {
    pub(crate) allocations: u64,
    pub(crate) exports: u64,
    pub(crate) fds: usize,
    pub(crate) threads: usize,
}

/// Locks out other tests until the returned guard is dropped. A test holds the guard while it
/// counts objects of the whole process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// Returns the number of open file descriptors of this process.
pub(crate) fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Returns the number of threads that the library started. Not counted are the threads of the test
/// harness, which have names of tests, and that of a device's copy engine: the first long copy
/// starts it, and it lives as long as the device.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("procfs");
    let name =
        |task: io::Result<fs::DirEntry>| fs::read_to_string(task.ok()?.path().join("comm")).ok();
    let counts = |name: &String| name.starts_with("hmem-") && !name.starts_with("hmem-copy");
    tasks.filter_map(name).filter(counts).count()
}

pub(crate) fn register(
    domain: &Domain,
    buffer: DeviceBuffer,
) -> Result<Region<DeviceBuffer>, Rejected<DeviceBuffer>> {
    domain.register(buffer, REMOTE)
}

pub(crate) fn close<B: hmem_core::Memory>(registered: Region<B>) -> B {
    registered.close().map_err(Error::from).expect("close")
}

/// Registers part of a device's memory by its addresses.
pub(crate) fn register_range(domain: &Domain, range: AddressRange) -> Result<Region<Raw>> {
    // SAFETY: the tests' buffers outlive their regions, and no reference to them exists.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    Ok(domain.register(memory, REMOTE)?)
}
