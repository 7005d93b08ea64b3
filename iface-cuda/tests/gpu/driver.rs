//! The driver under test, and the calls that an application would make beside the iface.

use std::time::{Duration, Instant};

use hmem_core::{Allocation, AllocationKind, DeviceId, Iface, Result, iface::AllocRequest, provider::Nic};
use hmem_fake_cuda::{FakeDriver, Profile};
use hmem_iface_cuda::{
    Cuda,
    sys::{self, CuContext, CuDeviceAttribute, CuDevicePtr, CuResult, Functions},
};

/// The attributes that decide how memory reaches a NIC.
pub(crate) const ATTRIBUTES: [(CuDeviceAttribute, &str); 7] = [
    (sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, "DMA_BUF_SUPPORTED"),
    (sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, "GPU_DIRECT_RDMA_SUPPORTED"),
    (
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    ),
    (sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"),
    (sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "GPU_DIRECT_RDMA_WRITES_ORDERING"),
    (sys::CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED, "HOST_ALLOC_DMA_BUF_SUPPORTED"),
    (sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "MEMORY_POOLS_SUPPORTED"),
];

type Memcpy = unsafe extern "C" fn(CuDevicePtr, CuDevicePtr, usize) -> CuResult;

/// Why there is no driver to run over.
#[derive(Debug)]
pub(crate) struct Absent {
    /// Whether the machine lacks it, and not that it fails.
    pub(crate) machine: bool,
    pub(crate) error: hmem_core::Error,
}

/// A driver, an iface over it, and a context of the application's.
pub(crate) struct Driver {
    pub(crate) cuda: Cuda,
    pub(crate) functions: Functions,
    memcpy: Memcpy,
    fake: Option<FakeDriver>,
}

impl Driver {
    /// # Errors
    /// [`Absent`] without a driver or without a GPU. What is there and does not start is an error of the driver's.
    pub(crate) fn real() -> std::result::Result<Self, Absent> {
        let path = std::env::var(Cuda::LIBRARY_VARIABLE).ok().filter(|path| !path.is_empty());
        let path = path.unwrap_or_else(|| Functions::LIBRARY.into());
        let functions = Functions::load(path.as_ref())
            .map_err(|error| Absent { machine: error.context_value("symbol").is_none(), error })?;
        // SAFETY: loaded already, so that no initialiser runs.
        let library = unsafe { libloading::Library::new(&path) }.expect("loaded just now");
        // SAFETY: the signature is that of `cuMemcpy` in `cuda.h`; the library stays loaded.
        let memcpy = *unsafe { library.get::<Memcpy>("cuMemcpy") }.expect("cuMemcpy");
        std::mem::forget(library);
        let cuda = Cuda::builder().functions(functions.clone()).open().map_err(|error| {
            let code = error.driver().map(|driver| driver.code);
            let none =
                [CuResult::CUDA_ERROR_NO_DEVICE, CuResult::CUDA_ERROR_STUB_LIBRARY].map(|code| code.0.into());
            let machine =
                code.map_or(error.context_value("devices") == Some("0"), |code| none.contains(&code));
            Absent { machine, error }
        })?;
        Ok(Self { cuda, functions, memcpy, fake: None })
    }

    pub(crate) fn fake() -> Self {
        let fake = FakeDriver::start(Profile::default());
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live forever.
        let functions = unsafe { Functions::from_lookup(|name| fake.symbol(name)) }.expect("the table");
        let cuda = Cuda::builder().functions(functions.clone()).open().expect("open");
        Self { cuda, functions, memcpy: hmem_fake_cuda::cuMemcpy, fake: Some(fake) }
    }

    pub(crate) fn is_real(&self) -> bool {
        self.fake.is_none()
    }

    pub(crate) fn close(self) {
        self.cuda.close().unwrap_or_else(|refused| panic!("{}", refused.error));
        drop(self.fake);
    }

    pub(crate) fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: the place is writable.
        let code = unsafe { (self.functions.driver_get_version)(&mut version) };
        assert!(code.is_success(), "{code:?}");
        format!("{}.{}", version / 1000, version % 1000 / 10)
    }

    pub(crate) fn attribute(&self, attribute: CuDeviceAttribute) -> String {
        let mut value = 0;
        // SAFETY: the place is writable; device 0 is there.
        let code = unsafe { (self.functions.device_get_attribute)(&mut value, attribute, 0) };
        if code.is_success() {
            value.to_string()
        } else {
            format!("{} ({})", code.name().unwrap_or("?"), code.0)
        }
    }

    pub(crate) fn allocate(&self, len: u64, kind: AllocationKind) -> Result<Allocation> {
        self.cuda.allocate(&AllocRequest { len, device: DeviceId(0), kind })
    }

    pub(crate) fn free(&self, allocation: &Allocation) {
        // SAFETY: nothing uses it any longer.
        unsafe { self.cuda.free(allocation) }.unwrap_or_else(|error| panic!("{error}"));
    }

    /// The driver's own blocking copy, in the primary context, as an application makes it.
    pub(crate) fn memcpy(&self, to: u64, from: u64, len: u64) {
        // SAFETY: both sides were allocated for at least `len` bytes.
        let code = unsafe { (self.memcpy)(to, from, len as usize) };
        assert!(code.is_success(), "{code:?}");
    }

    /// Runs with the primary context current.
    pub(crate) fn current<T>(&self, run: impl FnOnce() -> T) -> T {
        let (mut context, mut popped) = (CuContext::NULL, CuContext::NULL);
        // SAFETY: places are writable; device 0 is there.
        unsafe {
            assert!((self.functions.primary_ctx_retain)(&mut context, 0).is_success());
            assert!((self.functions.ctx_push_current)(context).is_success());
        }
        let result = run();
        // SAFETY: as above, undone in the other order.
        unsafe {
            assert!((self.functions.ctx_pop_current)(&mut popped).is_success());
            assert!((self.functions.primary_ctx_release)(0).is_success());
        }
        result
    }
}

pub(crate) fn nic() -> Nic {
    Nic { provider: "report".into(), name: "none".into(), pci_bus_id: None }
}

/// The median time of several runs, after one that is not counted.
pub(crate) fn median(repetitions: u32, mut run: impl FnMut()) -> Duration {
    run();
    let mut times: Vec<_> = (0..repetitions.max(1))
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// The fds that this process has open.
pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// A length as people write it.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
