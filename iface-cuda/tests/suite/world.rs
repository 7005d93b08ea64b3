//! Drivers over which the suite runs: the fake in every profile, or a real GPU with
//! `HMEM_CUDA=real`. With that setting, a missing GPU is a failure.

use std::sync::{Mutex, MutexGuard};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Iface, IfaceExt, Result,
    iface::AllocRequest, provider::Nic,
};
use hmem_fake_cuda::{FakeDriver, Live, Profile};
use hmem_iface_cuda::{
    Cuda, CudaMonitorKind,
    sys::{
        self, CuContext, CuDeviceAttribute, CuDevicePtr, CuMemAllocationProp, CuMemHandle,
        CuResult, Functions,
    },
};

use crate::vendor_files;

/// A driver, an iface over it, and an application that calls the driver directly.
pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) cuda: Cuda,
    pub(crate) app: App,
    /// The fake driver and its profile; `None` for real hardware.
    pub(crate) fake: Option<(FakeDriver, Profile)>,
    _turn: Option<MutexGuard<'static, ()>>,
}

/// An application that calls the driver directly, without the iface.
pub(crate) struct App {
    pub(crate) functions: Functions,
    lookup: Box<dyn Fn(&str) -> *const ()>,
    primary: CuContext,
}

static REAL: Mutex<()> = Mutex::new(());

/// Returns the size of the machine's pages in bytes.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns host memory with two whole pages in it, and the range of the pages.
pub(crate) fn pages() -> (Vec<u8>, AddressRange) {
    let memory = vec![0u8; 3 * page() as usize];
    let start = Address(Address::of_ptr(memory.as_ptr()).0.next_multiple_of(page()));
    (memory, AddressRange::new(start, 2 * page()).expect("a range"))
}

/// Runs a test over every profile of the fake, or over real hardware alone if that is selected.
pub(crate) fn each(show: impl Fn(&mut World)) {
    if vendor_files::is_required("cuda", "real") {
        // A process can hook only one library, and the tests in `hooks.rs` need the hooks. So this
        // iface detects frees by identity.
        let mut world = World::real(CudaMonitorKind::Identity);
        show(&mut world);
        world.end();
        return;
    }
    for profile in Profile::all() {
        over(profile, &show);
    }
}

/// Runs a test over the default profile of the fake, or over real hardware alone if that is
/// selected.
pub(crate) fn once(show: impl FnOnce(&mut World)) {
    if vendor_files::is_required("cuda", "real") {
        let mut world = World::real(CudaMonitorKind::Identity);
        show(&mut world);
        return world.end();
    }
    over(Profile::default(), show);
}

/// Returns true if a GPU is selected, and then prints the reason why a test, or a part of it,
/// cannot run over a GPU. `tests/gpu/run` writes the reason into its report.
pub(crate) fn not_over_a_gpu(why: &str) -> bool {
    if vendor_files::is_required("cuda", "real") {
        println!("{NOT_OVER_A_GPU}{why}");
    }
    vendor_files::is_required("cuda", "real")
}

/// Beginning of a line with the reason why a test cannot run over a GPU. `tests/gpu/run` searches
/// for it.
pub(crate) const NOT_OVER_A_GPU: &str = "not over a GPU: ";

/// Starts the fake driver with a profile. Tests that call this function do not run over a GPU.
pub(crate) fn start(profile: Profile) -> FakeDriver {
    not_over_a_gpu("the driver must have a profile, or refuse selected calls");
    FakeDriver::start(profile)
}

/// Runs a test over one profile of the fake, and checks that nothing is leaked.
pub(crate) fn over(profile: Profile, show: impl FnOnce(&mut World)) {
    let mut world = World::fake(profile);
    show(&mut world);
    world.end();
}

/// All kinds that the iface allocates.
pub(crate) const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
    AllocationKind::Virtual,
];

pub(crate) fn check(code: CuResult) {
    assert_eq!(code, CuResult::CUDA_SUCCESS);
}

impl World {
    pub(crate) fn fake(profile: Profile) -> Self {
        Self::with(profile, CudaMonitorKind::Auto)
    }

    pub(crate) fn with(profile: Profile, monitor: CudaMonitorKind) -> Self {
        let fake = start(profile.clone());
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
        // forever.
        let functions =
            unsafe { Functions::from_lookup(|name| fake.symbol(name)) }.expect("the table");
        let lookup = Box::new(|name: &str| hmem_fake_cuda_symbol(name));
        let cuda =
            Cuda::builder().functions(functions.clone()).monitor(monitor).open().expect("open");
        let app = App { functions, lookup, primary: CuContext::NULL };
        Self { name: profile.name.into(), cuda, app, fake: Some((fake, profile)), _turn: None }
    }

    pub(crate) fn real(monitor: CudaMonitorKind) -> Self {
        let turn = REAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let path =
            std::env::var(Cuda::LIBRARY_VARIABLE).unwrap_or_else(|_| Functions::LIBRARY.into());
        let functions = Functions::find().expect("HMEM_CUDA=real requires a driver");
        // SAFETY: the library is loaded already, so that no initialiser runs.
        let library = unsafe { libloading::Library::new(&path) }.expect("loaded just now");
        let lookup = Box::new(move |name: &str| {
            // SAFETY: the address is only passed to `from_lookup` with its symbol name.
            let symbol = unsafe { library.get::<*const ()>(name) };
            *symbol.unwrap_or_else(|error| panic!("{name}: {error}"))
        });
        let cuda = Cuda::builder().functions(functions.clone()).monitor(monitor).open();
        let cuda = cuda.expect("HMEM_CUDA=real requires a GPU");
        let app = App { functions, lookup, primary: CuContext::NULL };
        Self { name: "real".into(), cuda, app, fake: None, _turn: Some(turn) }
    }

    pub(crate) fn is_real(&self) -> bool {
        self.fake.is_none()
    }

    pub(crate) fn driver(&self) -> &FakeDriver {
        &self.fake.as_ref().expect("a behaviour of the fake").0
    }

    /// Closes the iface and ends the application, and checks that nothing is leaked.
    pub(crate) fn end(self) {
        let Self { name, cuda, mut app, fake, _turn } = self;
        cuda.close().unwrap_or_else(|refused| panic!("{name}: {}", refused.error));
        app.release_primary_context();
        if let Some((fake, _)) = fake {
            fake.heal();
            assert_eq!(fake.live(), Live::default(), "{name}: something is left");
            assert_eq!(fake.contexts_of_this_thread(), Vec::<usize>::new(), "{name}");
            assert_eq!(fake.capture_mode_of_this_thread(), 0, "{name}: not restored");
            assert_eq!(fake.undefined_calls(), 0, "{name}: calls that cuda.h leaves undefined");
        }
    }

    pub(crate) fn allocate(&self, len: u64, kind: AllocationKind) -> Allocation {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        self.cuda.allocate(&request).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    pub(crate) fn free(&self, allocation: &Allocation) {
        // SAFETY: tests hold no reference to the memory, and have waited for every copy.
        unsafe { self.cuda.free(allocation) }
            .unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Returns the devices with an active primary context.
    pub(crate) fn active(&self) -> Vec<u32> {
        let devices = self.cuda.devices().expect("devices").into_iter().map(|device| device.id.0);
        let is_active = |device: &u32| {
            let (mut flags, mut active) = (0, 0);
            let ask = self.app.functions.primary_ctx_get_state();
            // SAFETY: the outputs are writable, and the device exists.
            check(unsafe { ask(device.cast_signed(), &mut flags, &mut active) });
            active != 0
        };
        devices.filter(is_active).collect()
    }

    /// Destroys a context on another thread, so that the destroyed context stays current on the
    /// calling thread.
    pub(crate) fn elsewhere_destroy_context(&self, context: CuContext) {
        // SAFETY: `App::create_context` made the context.
        let destroy = move || check(unsafe { hmem_fake_cuda::cuCtxDestroy_v2(context) });
        std::thread::scope(|scope| scope.spawn(destroy).join().expect("no panic"));
    }

    /// Returns true if the device reports that the CPU can map exports; always true for the fake.
    pub(crate) fn maps_dma_bufs(&self) -> bool {
        self.has(sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED)
    }

    pub(crate) fn exports_dma_bufs(&self) -> bool {
        self.cuda.capability().dma_buf
    }

    /// Returns true if the GPU has an attribute; always true for the fake.
    fn has(&self, attribute: CuDeviceAttribute) -> bool {
        let mut says = 0;
        // SAFETY: the output is writable, and device 0 exists.
        let code = unsafe { (self.app.functions.device_get_attribute())(&mut says, attribute, 0) };
        !self.is_real() || (code.is_success() && says != 0)
    }

    /// Returns the kinds in `kinds` that the GPU supports, or all of them for the fake. Prints the
    /// kinds that the GPU does not support, which are not tested.
    pub(crate) fn kinds(&self, kinds: &[AllocationKind]) -> Vec<AllocationKind> {
        let has = |kind: &AllocationKind| {
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
            there || !not_over_a_gpu(&format!("the device has no {} memory", kind.name()))
        };
        kinds.iter().copied().filter(has).collect()
    }

    /// Returns true if NICs cannot reach the VMM memory of the GPU, and then prints that exports of
    /// VMM memory are not tested.
    pub(crate) fn no_rdma_to_vmm(&self) -> bool {
        let there = [
            sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
            sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        ];
        !there.into_iter().all(|attribute| self.has(attribute))
            && not_over_a_gpu("the device has no GPUDirect RDMA to VMM memory")
    }

    /// Returns true if the GPU's driver reports that NICs reach memory that was not created for
    /// RDMA, and then prints that refusals of such memory are not tested. `cuda.h`:
    /// gpuDirectRDMACapable is a hint.
    pub(crate) fn reaches_anything(&self, address: u64) -> bool {
        let (mut attribute, mut capable) =
            (sys::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, 0u64);
        let mut place = std::ptr::from_mut(&mut capable).cast();
        let ask = self.app.functions.pointer_get_attributes();
        // SAFETY: the call passes one attribute, and an output that is wide enough for its value.
        let code = unsafe { ask(1, &mut attribute, &mut place, address) };
        self.is_real()
            && code.is_success()
            && capable != 0
            && not_over_a_gpu(
                "the driver reports that NICs reach memory that was not created for RDMA",
            )
    }
}

/// Returns a function of the fake by its name, even if the profile lacks it.
fn hmem_fake_cuda_symbol(name: &str) -> *const () {
    match name {
        "cuCtxCreate_v2" => hmem_fake_cuda::cuCtxCreate_v2 as *const (),
        "cuCtxDestroy_v2" => hmem_fake_cuda::cuCtxDestroy_v2 as *const (),
        other => panic!("{other}"),
    }
}

impl App {
    /// Calls `run` with the primary context of device 0 current. The application retains the
    /// context from the first call on.
    pub(crate) fn current<T>(&mut self, run: impl FnOnce(&Functions) -> T) -> T {
        if self.primary.is_null() {
            // SAFETY: the output is writable, and device 0 exists.
            check(unsafe { (self.functions.primary_ctx_retain())(&mut self.primary, 0) });
        }
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (self.functions.ctx_push_current())(self.primary) });
        let result = run(&self.functions);
        let mut popped = CuContext::NULL;
        // SAFETY: the output is writable.
        check(unsafe { (self.functions.ctx_pop_current())(&mut popped) });
        assert_eq!(popped, self.primary, "the iface left another context current");
        result
    }

    /// Releases the primary context if the application has it.
    pub(crate) fn release_primary_context(&mut self) {
        if !std::mem::take(&mut self.primary).is_null() {
            // SAFETY: `current` retained the primary context once.
            check(unsafe { (self.functions.primary_ctx_release())(0) });
        }
    }

    /// Pops the current context of this thread.
    pub(crate) fn pop(&self) -> CuContext {
        let mut popped = CuContext::NULL;
        // SAFETY: the output is writable.
        check(unsafe { (self.functions.ctx_pop_current())(&mut popped) });
        popped
    }

    /// Creates a context of the application on device 0, which is current on this thread.
    pub(crate) fn create_context(&self) -> CuContext {
        // SAFETY: the symbol is the function of that name in `cuda.h`.
        let create: unsafe extern "C" fn(*mut CuContext, u32, i32) -> CuResult =
            unsafe { std::mem::transmute((self.lookup)("cuCtxCreate_v2")) };
        let mut context = CuContext::NULL;
        // SAFETY: the output is writable, and device 0 exists.
        check(unsafe { create(&mut context, 0, 0) });
        context
    }

    pub(crate) fn destroy_context(&self, context: CuContext) {
        // SAFETY: the symbol is the function of that name in `cuda.h`.
        let destroy: unsafe extern "C" fn(CuContext) -> CuResult =
            unsafe { std::mem::transmute((self.lookup)("cuCtxDestroy_v2")) };
        // SAFETY: `create_context` made the context.
        check(unsafe { destroy(context) });
    }
}

/// A reservation of the application with several handles mapped into it, like PyTorch's expandable
/// segments.
pub(crate) struct Expandable {
    pub(crate) base: u64,
    pub(crate) step: u64,
    handles: Vec<CuMemHandle>,
}

impl Expandable {
    /// Maps one handle for each element that is `Some`. The memory is RDMA capable for
    /// `Some(true)`. For `None`, a part of the reservation stays unmapped.
    pub(crate) fn new(app: &mut App, parts: &[Option<bool>]) -> Self {
        app.current(|functions| Self::here(functions, parts))
    }

    /// Like [`Self::new`], in the current context.
    pub(crate) fn here(functions: &Functions, parts: &[Option<bool>]) -> Self {
        let properties = |capable: bool| CuMemAllocationProp {
            kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
            gpu_direct_rdma_capable: capable.into(),
            ..CuMemAllocationProp::default()
        };
        let mut step = 0usize;
        let granularity = functions.mem_get_allocation_granularity().expect("VMM");
        // SAFETY: the output is writable, and the properties are complete.
        check(unsafe {
            granularity(&mut step, &properties(false), sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        });
        let mut base: CuDevicePtr = 0;
        let whole = step * parts.len();
        // SAFETY: the output is writable.
        check(unsafe { functions.mem_address_reserve().expect("VMM")(&mut base, whole, 0, 0, 0) });
        let mut handles = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let Some(capable) = part else { continue };
            let (mut handle, at) = (0, base + (number * step) as u64);
            let who = sys::CuMemAccessDesc {
                location: properties(false).location,
                flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            // SAFETY: outputs are writable, and the range is reserved and not mapped yet.
            unsafe {
                check(functions.mem_create().expect("VMM")(
                    &mut handle,
                    step,
                    &properties(*capable),
                    0,
                ));
                check(functions.mem_map().expect("VMM")(at, step, 0, handle, 0));
                check(functions.mem_set_access().expect("VMM")(at, step, &who, 1));
            }
            handles.push(handle);
        }
        Self { base, step: step as u64, handles }
    }

    pub(crate) fn range(&self, from: u64, len: u64) -> AddressRange {
        AddressRange::new(hmem_core::Address(self.base + from), len).expect("a range")
    }

    /// Unmaps one part, and maps new memory there. The mapping alone keeps the new memory.
    pub(crate) fn remap(&self, app: &mut App, part: u64) {
        let (at, size) = (self.base + part * self.step, self.step as usize);
        let location = sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        let properties = CuMemAllocationProp {
            kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            location,
            ..CuMemAllocationProp::default()
        };
        // SAFETY: the part is mapped, no code uses its memory, and the output is writable.
        app.current(|f| unsafe {
            let mut handle = 0;
            check(f.mem_unmap().expect("VMM")(at, size));
            check(f.mem_create().expect("VMM")(&mut handle, size, &properties, 0));
            check(f.mem_map().expect("VMM")(at, size, 0, handle, 0));
            check(f.mem_release().expect("VMM")(handle));
        });
    }

    pub(crate) fn end(self, app: &mut App, parts: &[Option<bool>]) {
        app.current(|functions| self.end_here(functions, parts));
    }

    pub(crate) fn end_here(self, functions: &Functions, parts: &[Option<bool>]) {
        for (number, part) in parts.iter().enumerate() {
            if part.is_some() {
                let at = self.base + number as u64 * self.step;
                // SAFETY: `new` mapped the part.
                check(unsafe { functions.mem_unmap().expect("VMM")(at, self.step as usize) });
            }
        }
        // SAFETY: `new` reserved the range and created the handles, and nothing is mapped any
        // longer.
        unsafe {
            check(functions.mem_address_free().expect("VMM")(
                self.base,
                self.step as usize * parts.len(),
            ));
            for handle in self.handles {
                check(functions.mem_release().expect("VMM")(handle));
            }
        }
    }
}

pub(crate) fn nic() -> Nic {
    Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None }
}

/// Returns bytes that depend on the seed. They repeat after a prime number of bytes, so that
/// adjacent pages differ.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let block: Vec<_> = (0..257).map(|at| ((at * 31 + seed * 97) % 251 + 1) as u8).collect();
    let mut bytes = block.repeat(len / block.len() + 1);
    bytes.truncate(len);
    bytes
}

/// Returns the number of open fds of this process, without the pipes to children of other tests.
pub(crate) fn open_fds() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    targets
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| !target.starts_with("pipe:") && target != "/dev/null")
        .count()
}

/// Safe copies by address, for tests that free no memory during a copy.
pub(crate) trait HeldCopies: Iface {
    fn read_bytes(&self, from: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call.
        unsafe { IfaceExt::read(self, from, into) }
    }

    fn write_bytes(&self, to: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call, and refers to none of it.
        unsafe { IfaceExt::write(self, to, from) }
    }
}

impl<I: Iface + ?Sized> HeldCopies for I {}
