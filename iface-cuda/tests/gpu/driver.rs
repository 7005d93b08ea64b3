//! The measured driver, and driver calls as an application makes them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Allocation, AllocationKind, DeviceId, ErrorKind, IfaceExt,
    iface::AllocRequest,
    monitor::{Monitor, Subscription},
    provider::Nic,
};
use hmem_fake_cuda::{FakeDriver, Profile};
use hmem_iface_cuda::{
    Cuda, CudaMonitorKind,
    sys::{self, CuContext, CuDeviceAttribute, CuDevicePtr, CuResult, Functions},
};

use crate::{
    report::{Failure, Outcome, and, attempt},
    subscriber::Recorder,
};

/// Length in bytes that every device must be able to allocate.
const OWED: u64 = 64 << 20;

/// Device attributes that determine how a NIC can reach the device's memory.
pub(crate) const ATTRIBUTES: [(CuDeviceAttribute, &str); 8] = [
    (sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, "DMA_BUF_SUPPORTED"),
    (sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, "GPU_DIRECT_RDMA_SUPPORTED"),
    (
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    ),
    (
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
        "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    ),
    (sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "GPU_DIRECT_RDMA_WRITES_ORDERING"),
    (sys::CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED, "HOST_ALLOC_DMA_BUF_SUPPORTED"),
    (sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED, "DMA_BUF_MMAP_SUPPORTED"),
    (sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "MEMORY_POOLS_SUPPORTED"),
];

type Memcpy = unsafe extern "C" fn(CuDevicePtr, CuDevicePtr, usize) -> CuResult;

/// The reason why the program has no driver to measure.
#[derive(Debug)]
pub(crate) struct Absent {
    /// True if the machine has no driver or no GPU; false if the driver is there and fails.
    pub(crate) machine: bool,
    pub(crate) error: hmem_core::Error,
}

/// Calls `run` with a subscription to the memory.
pub(crate) fn watched<T>(
    monitor: &dyn Monitor,
    memory: &Allocation,
    run: impl FnOnce(&Subscription) -> Outcome<T>,
) -> Outcome<T> {
    let subscription = monitor.subscribe(memory.range, Arc::new(Recorder::default()))?;
    let result = run(&subscription);
    monitor.unsubscribe(subscription);
    result
}

/// A driver, an iface over it, and a context of the application.
pub(crate) struct Driver {
    pub(crate) cuda: Cuda,
    pub(crate) functions: Functions,
    memcpy: Memcpy,
    real: bool,
    fake: Option<FakeDriver>,
}

impl Driver {
    /// Loads the driver of the machine, and opens an iface over it.
    ///
    /// # Errors
    /// [`Absent`] if the driver does not exist, has no GPU or does not start.
    pub(crate) fn real() -> Result<Self, Absent> {
        let path = std::env::var(Cuda::LIBRARY_VARIABLE).ok().filter(|path| !path.is_empty());
        let path = path.unwrap_or_else(|| Functions::LIBRARY.into());
        let functions = Functions::find()
            .map_err(|error| Absent { machine: error.context_value("symbol").is_none(), error })?;
        // SAFETY: the library is loaded already, so that no initialiser runs.
        let library = unsafe { libloading::Library::new(&path) }.expect("loaded just now");
        // SAFETY: the signature is that of `cuMemcpy` in `cuda.h`; the library stays loaded.
        let memcpy = *unsafe { library.get::<Memcpy>("cuMemcpy") }.expect("cuMemcpy");
        // SAFETY: the symbol is only looked up.
        let real = unsafe { library.get::<*const ()>("hmem_fake_cuda_calls") }.is_err();
        std::mem::forget(library);
        let cuda = Cuda::builder()
            .functions(functions.clone())
            .monitor(CudaMonitorKind::Identity)
            .open()
            .map_err(|error| {
                let code = error.driver().map(|driver| driver.code);
                let none = [CuResult::CUDA_ERROR_NO_DEVICE, CuResult::CUDA_ERROR_STUB_LIBRARY]
                    .map(|code| code.0.into());
                let machine = code.map_or(error.context_value("devices") == Some("0"), |code| {
                    none.contains(&code)
                });
                Absent { machine, error }
            })?;
        Ok(Self { cuda, functions, memcpy, real, fake: None })
    }

    pub(crate) fn fake() -> Self {
        let fake = FakeDriver::start(Profile::default());
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
        // forever.
        let functions =
            unsafe { Functions::from_lookup(|name| fake.symbol(name)) }.expect("the table");
        let cuda = Cuda::builder()
            .functions(functions.clone())
            .monitor(CudaMonitorKind::Identity)
            .open()
            .expect("open");
        Self { cuda, functions, memcpy: hmem_fake_cuda::cuMemcpy, real: false, fake: Some(fake) }
    }

    /// Starts the default monitor, and returns a description of it. The monitor hooks the driver's
    /// frees if possible. No other part of this program hooks them.
    pub(crate) fn monitor(&self) -> Outcome<String> {
        let cuda = Cuda::builder()
            .functions(self.functions.clone())
            .monitor(CudaMonitorKind::Auto)
            .open()?;
        let monitor = cuda.start_monitor()?;
        let text = format!("{}, as {}", monitor.name(), monitor.rationale());
        drop(monitor);
        cuda.close().map_err(|refused| refused.error)?;
        Ok(text)
    }

    /// Returns true if the driver is the fake driver that is linked into this program.
    pub(crate) fn is_in_this_program(&self) -> bool {
        self.fake.is_some()
    }

    /// Returns true if the driver is not the fake. Only then the report compares times with the
    /// requirements.
    pub(crate) fn is_real(&self) -> bool {
        self.real
    }

    pub(crate) fn close(self) -> Outcome<()> {
        self.cuda.close().map_err(|refused| refused.error)?;
        drop(self.fake);
        Ok(())
    }

    pub(crate) fn version(&self) -> Outcome<String> {
        let mut version = 0;
        // SAFETY: the output is writable.
        let code = unsafe { (self.functions.driver_get_version())(&mut version) };
        check(code, "cuDriverGetVersion")?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    pub(crate) fn attribute(&self, attribute: CuDeviceAttribute) -> String {
        let mut value = 0;
        // SAFETY: the output is writable, and device 0 exists.
        let code = unsafe { (self.functions.device_get_attribute())(&mut value, attribute, 0) };
        if code.is_success() {
            value.to_string()
        } else {
            format!("{} ({})", code.name().unwrap_or("?"), code.0)
        }
    }

    /// Allocates memory for a measurement, and frees it afterwards even if the measurement fails.
    ///
    /// The measurement is skipped, and does not fail, in two cases:
    /// - The device does not support the kind of memory.
    /// - The device is out of memory, and `len` is greater than [`OWED`].
    pub(crate) fn with<T>(
        &self,
        len: u64,
        kind: AllocationKind,
        run: impl FnOnce(&Allocation) -> Outcome<T>,
    ) -> Outcome<T> {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        let memory = match self.cuda.allocate(&request) {
            Ok(memory) => memory,
            Err(error)
                if error.is_unsupported()
                    || (error.kind() == ErrorKind::OutOfResources && len > OWED) =>
            {
                return Err(Failure::lacking(format_args!("not to be had: {error}")));
            }
            Err(error) => return Err(error.into()),
        };
        let outcome = attempt(|| run(&memory));
        // SAFETY: nothing uses the memory any longer.
        let freed = unsafe { self.cuda.free(&memory) };
        and(outcome, freed.map_err(Failure::from))
    }

    /// Returns the time of the driver's own blocking copy in the primary context, as an application
    /// makes it.
    pub(crate) fn memcpy(&self, to: u64, from: u64, len: u64) -> Outcome<Duration> {
        self.in_context(|| {
            let start = Instant::now();
            // SAFETY: both sides were allocated for at least `len` bytes.
            let copied = unsafe { (self.memcpy)(to, from, len as usize) };
            let took = start.elapsed();
            check(copied, "cuMemcpy").map(|()| took)
        })
    }

    /// Calls `run` with the primary context of device 0 current.
    pub(crate) fn in_context<T>(&self, run: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let (mut context, mut popped) = (CuContext::NULL, CuContext::NULL);
        check(
            // SAFETY: the output is writable, and device 0 exists.
            unsafe { (self.functions.primary_ctx_retain())(&mut context, 0) },
            "cuDevicePrimaryCtxRetain",
        )?;
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (self.functions.ctx_push_current())(context) }, "cuCtxPushCurrent")?;
        let outcome = attempt(run);
        // SAFETY: `ctx_push_current` above pushed the context, and the output is writable.
        let undone =
            check(unsafe { (self.functions.ctx_pop_current())(&mut popped) }, "cuCtxPopCurrent");
        // SAFETY: `primary_ctx_retain` above retained the context.
        let released = unsafe { (self.functions.primary_ctx_release())(0) };
        let undone = and(undone, check(released, "cuDevicePrimaryCtxRelease"));
        and(outcome, undone)
    }
}

fn check(code: CuResult, operation: &str) -> Outcome<()> {
    if code.is_success() {
        return Ok(());
    }
    Err(format!("{operation}: {} ({})", code.name().unwrap_or("?"), code.0).into())
}

pub(crate) fn nic() -> Nic {
    Nic { provider: "report".into(), name: "none".into(), pci_bus_id: None }
}

/// Returns the median of the times. Ignores the first one, which includes the warm-up.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.remove(0);
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns the number of open fds of this process.
pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// Formats a length with a binary unit.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
