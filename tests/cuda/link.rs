//! A CUDA driver, the iface over it, and two endpoints of a software NIC. The driver is the fake,
//! or the machine's own with `HMEM_CUDA=real`.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hmem::{
    Address, AddressRange, AllocationKind, CacheAttr, CachedRegion, DeviceBuffer, DeviceId,
    DomainAttr, Hmem, Iface, IfaceExt, MrMode, Region, Result,
    cuda::{
        Cuda, CudaMonitorKind,
        sys::{self, CuContext, CuDeviceAttribute, CuResult, Functions},
    },
    iface::AllocRequest,
    loopback::{Loopback, RemapPolicy},
    path::{P2pPolicy, Path},
    provider::Imports,
};
use hmem_fake_cuda::{FakeDriver, Profile};

pub(crate) use crate::wire::{REMOTE, Wire, pattern, raw};

pub(crate) fn check(code: CuResult) {
    assert_eq!(code, CuResult::CUDA_SUCCESS);
}

/// Import abilities of a NIC that supports dma-bufs and staged copies, but not peer memory.
pub(crate) const IMPORTS: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: Some(false),
    data_direct: None,
    peer_memory: false,
    staged: true,
};

/// Returns true if the tests run over a GPU (`HMEM_CUDA=real`).
pub(crate) fn real() -> bool {
    std::env::var("HMEM_CUDA").is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"))
}

/// Returns true if the tests run over a GPU, and then prints why a test is skipped there.
/// `tests/gpu/run` puts the reason into its report.
pub(crate) fn not_over_a_gpu(why: &str) -> bool {
    if real() {
        println!("not over a GPU: {why}");
    }
    real()
}

/// Returns the profiles of the fake driver to test. Over a GPU, returns a single one, which is not
/// used.
pub(crate) fn profiles() -> Vec<Profile> {
    if real() { vec![Profile::default()] } else { Profile::all() }
}

/// Returns the policy for tests of dma-bufs: `Required`, or `Enabled` over a GPU. The software NIC
/// maps the dma-buf, which not every GPU driver supports; staged copies may then replace it.
pub(crate) fn direct() -> P2pPolicy {
    if real() { P2pPolicy::Enabled } else { P2pPolicy::Required }
}

/// Asserts that enough addresses were reused. Over a GPU only prints a reason if they were not,
/// since its driver need not reuse addresses.
pub(crate) fn assert_reused(enough: bool) {
    assert!(
        enough || not_over_a_gpu("too few addresses were reused"),
        "too few addresses were reused, so the test is void"
    );
}

/// The fake driver, or `None` if the tests run over a GPU. Dereferencing `None` panics.
pub(crate) struct Fake(Option<FakeDriver>);

impl Deref for Fake {
    type Target = FakeDriver;

    fn deref(&self) -> &FakeDriver {
        self.0.as_ref().expect("the fake driver")
    }
}

static TURN: Mutex<()> = Mutex::new(());

/// The driver, iface, domain and endpoints of one test. Fields are dropped in order, the driver
/// last.
pub(crate) struct Link {
    wire: Wire,
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) functions: Functions,
    pub(crate) driver: Fake,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Deref for Link {
    type Target = Wire;

    fn deref(&self) -> &Wire {
        &self.wire
    }
}

impl Link {
    pub(crate) fn open(profile: Profile) -> Self {
        Self::with(profile, IMPORTS, P2pPolicy::Enabled)
    }

    pub(crate) fn with(profile: Profile, imports: Imports, p2p: P2pPolicy) -> Self {
        let attr = DomainAttr { p2p, ..DomainAttr::default() };
        Self::new(profile, imports, CudaMonitorKind::Auto, attr)
    }

    /// Opens a link whose domain checks direct paths by transfers.
    pub(crate) fn with_reach_checks(profile: Profile) -> Self {
        let attr = DomainAttr { reach_check: Some(true), ..DomainAttr::default() };
        Self::new(profile, IMPORTS, CudaMonitorKind::Auto, attr)
    }

    /// Opens a link with a registration cache that uses this monitor.
    pub(crate) fn cached(
        profile: Profile,
        imports: Imports,
        p2p: P2pPolicy,
        monitor: CudaMonitorKind,
    ) -> Self {
        let cache = Some(CacheAttr::default());
        Self::new(profile, imports, monitor, DomainAttr { p2p, cache, ..DomainAttr::default() })
    }

    fn new(profile: Profile, imports: Imports, monitor: CudaMonitorKind, attr: DomainAttr) -> Self {
        let turn = real().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        let driver = Fake((!real()).then(|| FakeDriver::start(profile)));
        let functions = match &driver.0 {
            Some(fake) => {
                // SAFETY: each function has the signature of its name in `cuda.h`, and functions
                // live forever.
                unsafe { Functions::from_lookup(|name| fake.symbol(name)) }.expect("the table")
            }
            None => Functions::find().expect("HMEM_CUDA=real requires a driver"),
        };
        let cuda = Arc::new(
            Cuda::builder().functions(functions.clone()).monitor(monitor).open().expect("a GPU"),
        );
        // A stale hit of a registration with pinned pages reaches bytes of freed host memory. With
        // ALLOCATED, the NIC refuses addresses without pages.
        let cached = attr.cache.is_some();
        let memory = if cached { crate::machine::pages() } else { RemapPolicy::Follow };
        let nic = Loopback::builder()
            .imports(imports)
            .remap_policy(memory)
            .needs(MrMode::ALLOCATED)
            .build()
            .expect("the software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces();
        let hmem = hmem.shared_iface(Arc::clone(&cuda) as _).provider(nic).build().expect("start");
        let wire = Wire::open(hmem.domain("loopback", attr).expect("a domain"));
        Self { wire, cuda, functions, driver, _turn: turn }
    }

    /// Returns true if the value of the GPU's device attribute is not 0; always true for the fake
    /// driver.
    fn has(&self, attribute: CuDeviceAttribute) -> bool {
        let mut says = 0;
        // SAFETY: the output is writable, and device 0 exists.
        let code = unsafe { (self.functions.device_get_attribute())(&mut says, attribute, 0) };
        !real() || (code.is_success() && says != 0)
    }

    /// Returns true if memory of this kind took the expected path, a dma-buf. Over a GPU whose
    /// dma-bufs the software NIC cannot map, also accepts staged copies, and prints the reason as
    /// [`not_over_a_gpu`] does.
    pub(crate) fn is_direct(&self, path: Path, kind: AllocationKind) -> bool {
        if path == Path::DmaBuf {
            return true;
        }
        let reached = kind != AllocationKind::Virtual
            || self.has(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let owed = self.cuda.capability().dma_buf
            && reached
            && self.has(sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED);
        let why = "the dma-buf cannot be mapped: staged copies replaced it";
        path == Path::Staged && !owed && not_over_a_gpu(why)
    }

    /// Returns true if the tests run over a GPU without this kind of memory. Then prints the
    /// reason, as [`not_over_a_gpu`] does.
    pub(crate) fn lacks(&self, kind: AllocationKind) -> bool {
        let there = match kind {
            AllocationKind::Managed => self.has(sys::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
            AllocationKind::StreamOrdered => {
                self.has(sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
            }
            AllocationKind::Virtual => {
                self.has(sys::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            }
            _ => true,
        };
        !there && not_over_a_gpu(&format!("the device has no {} memory", kind.name()))
    }

    /// Returns true if the tests run over a GPU whose driver reports memory not created for RDMA as
    /// accessible to NICs. (`cuda.h` calls gpuDirectRDMACapable a hint.) Then prints the reason, as
    /// [`not_over_a_gpu`] does.
    pub(crate) fn reaches_anything(&self, address: u64) -> bool {
        let (mut attribute, mut capable) =
            (sys::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, 0u64);
        let mut place = std::ptr::from_mut(&mut capable).cast();
        // SAFETY: one attribute with an output that is wide enough for it.
        let code = unsafe {
            (self.functions.pointer_get_attributes())(1, &mut attribute, &mut place, address)
        };
        real()
            && code.is_success()
            && capable != 0
            && not_over_a_gpu(
                "the driver reports that NICs reach memory that was not created for RDMA",
            )
    }

    /// Returns true if the tests run over a GPU without GPUDirect RDMA. Then prints the reason, as
    /// [`not_over_a_gpu`] does.
    pub(crate) fn no_rdma(&self) -> bool {
        !self.has(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
            && not_over_a_gpu("the device has no GPUDirect RDMA")
    }

    /// Returns true if the tests run over a GPU without GPUDirect RDMA to VMM memory. Then prints
    /// the reason, as [`not_over_a_gpu`] does.
    pub(crate) fn no_rdma_with_vmm(&self) -> bool {
        !self.has(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
            && not_over_a_gpu("the device has no GPUDirect RDMA to VMM memory")
    }

    /// Returns true if the tests run over a GPU that exports no dma-bufs. Then prints the reason,
    /// as [`not_over_a_gpu`] does.
    pub(crate) fn no_dma_bufs(&self) -> bool {
        !self.cuda.capability().dma_buf && not_over_a_gpu("the device has no dma-bufs")
    }

    /// Returns the number of calls of the fake driver so far; 0 over a GPU.
    pub(crate) fn calls(&self) -> u64 {
        self.driver.0.as_ref().map_or(0, FakeDriver::all_calls)
    }

    pub(crate) fn iface(&self) -> Arc<dyn Iface> {
        Arc::clone(&self.cuda) as _
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        DeviceBuffer::allocate(&self.iface(), &request).expect("allocate")
    }

    /// Looks up a range in the domain's cache, which registers the range if needed. Panics on
    /// failure.
    ///
    /// # Safety
    /// The caller makes the promise [`Promise::ReadWrite`](hmem::Promise::ReadWrite).
    pub(crate) unsafe fn cache_get(&self, range: AddressRange) -> CachedRegion<'_> {
        let cache = self.domain.cache().expect("a cache");
        // SAFETY: the caller of this function makes the same promise.
        cache.get(unsafe { raw(range) }, REMOTE).expect("registered")
    }

    /// Creates a CUDA context of the application with 8 KiB of memory. The context is current on no
    /// thread. The caller destroys it by `cuCtxDestroy_v2` of the fake driver.
    pub(crate) fn own_context(&self) -> (CuContext, AddressRange) {
        let (mut context, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
        // SAFETY: the outputs are writable, and device 0 exists.
        unsafe {
            check(hmem_fake_cuda::cuCtxCreate_v2(&mut context, 0, 0));
            check((self.functions.mem_alloc())(&mut pointer, 8192));
            check((self.functions.ctx_pop_current())(&mut popped));
        }
        (context, AddressRange::new(Address(pointer), 8192).expect("a range"))
    }
}

/// Closes a region and returns its buffer.
pub(crate) fn close(region: Region<DeviceBuffer>) -> DeviceBuffer {
    region.close().map_err(hmem::Error::from).expect("close")
}

/// Safe wrappers of the unsafe copies by address. No test frees memory during a copy of it.
pub(crate) trait HeldCopies: Iface {
    fn read_bytes(&self, from: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call.
        unsafe { IfaceExt::read(self, from, into) }
    }

    fn write_bytes(&self, to: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call, and no reference to it
        // exists.
        unsafe { IfaceExt::write(self, to, from) }
    }
}

impl<I: Iface + ?Sized> HeldCopies for I {}
