//! Open devices with their attributes, and protection domains on them.

#![allow(unsafe_code, reason = "calls the library on devices and protection domains")]

use std::{
    any::Any,
    borrow::Cow,
    ffi::{CStr, c_int},
    fs,
    mem::{self, offset_of},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU32},
};

use hmem_core::{
    Access, Errno, Error, ErrorKind, MrFlags, MrMode, ProcessMark, Result,
    provider::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr, WindowType},
};

use super::{
    access::{DeviceRights, VerbsOptions},
    errors,
    library::{self, Library, device_name},
    life::DeviceLife,
    raw_key::RAW_KEY,
    sys::{
        self, AtomicCap, Context, DeviceAttr, DeviceAttrEx, DeviceCaps, DeviceExInput, Pd,
        VerbsContext,
    },
};

/// Maximum number of ranges in one region. Each range has a registration of its own.
const RANGES: usize = 32;

/// Vendor id of Mellanox devices, which the drivers of mlx4 and mlx5 report.
const MELLANOX_VENDOR: u32 = 0x2c9;

/// Vendor id of rdma_rxe devices: `RXE_VENDOR_ID` in the kernel's driver.
const RXE_VENDOR: u32 = 0xff_ffff;

/// The message order of a reliable connection, equal to that of libfabric's verbs provider. WAR and
/// SAR are missing: without a fence, a write or message may overtake an earlier read or fetching
/// atomic (InfiniBand, "Send Queue Ordering Rules").
const RC_ORDER: MsgOrder = MsgOrder::RAR
    .union(MsgOrder::RAW)
    .union(MsgOrder::RAS)
    .union(MsgOrder::WAW)
    .union(MsgOrder::WAS)
    .union(MsgOrder::SAW)
    .union(MsgOrder::SAS)
    .union(MsgOrder::RMA_RAR)
    .union(MsgOrder::RMA_RAW)
    .union(MsgOrder::RMA_WAW)
    .union(MsgOrder::ATOMIC_RAR)
    .union(MsgOrder::ATOMIC_RAW)
    .union(MsgOrder::ATOMIC_WAW);

/// The value that the application passes to [`Builder::with_pd`](super::Builder::with_pd). The
/// value keeps the application's protection domain and context alive. Dropping the value may
/// deallocate both.
pub(super) type ForeignOwner = Box<dyn Any + Send + Sync>;

/// An open `ibv_context` and the properties of its device. Every object that is opened in the
/// context holds this value.
#[derive(Debug)]
pub(super) struct OpenDevice {
    pub(super) library: Arc<Library>,
    pub(super) context: *mut Context,
    /// The application's value that keeps the context and a protection domain in it alive. `None`
    /// if the provider opened the context and closes it.
    owner: Option<ForeignOwner>,
    pub(super) nic: Nic,
    pub(super) attr: DeviceAttr,
    /// Properties that the translation of access rights depends on.
    pub(super) rights: DeviceRights,
    /// True if the device supports on-demand paging.
    pub(super) on_demand: bool,
    pub(super) provider_attr: ProviderAttr,
    /// Types of memory windows that the device supports.
    pub(super) window_types: Vec<WindowType>,
    /// The generation that the first request of the next endpoint gets. A generation is a number in
    /// a `wr_id`. It distinguishes the requests that use one index of the request table in turn. A
    /// closing endpoint adds the number of generations that it used.
    pub(super) generations: AtomicU32,
    /// The asynchronous events of the device, and the record of its loss.
    pub(super) life: DeviceLife,
    /// True if sysfs had the device's node when the context was opened. If so, a missing node means
    /// that the kernel is removing the device.
    had_node: bool,
    /// The process that opened the context. A forked child must neither use nor close the context.
    process: ProcessMark,
}

// SAFETY: any thread may use a context of libibverbs (ibverbs(7)). The owner is Send. All other
// fields are plain data.
unsafe impl Send for OpenDevice {}
// SAFETY: several threads may use a context of libibverbs at once (ibverbs(7)). The only other
// interior mutability is an atomic.
unsafe impl Sync for OpenDevice {}

impl OpenDevice {
    /// Opens a device by name. `pcie_mapping_first` sets
    /// [`Imports::pcie_mapping_first`](hmem_core::provider::Imports::pcie_mapping_first).
    pub(super) fn open(
        library: &Arc<Library>,
        name: &str,
        pcie_mapping_first: Option<bool>,
    ) -> Result<Self> {
        let process = ProcessMark::current()?;
        let context = library.open_device(name)?;
        // SAFETY: this function opened the context, and only the result closes it.
        unsafe { Self::new(library, context, None, pcie_mapping_first, process) }
    }

    /// Borrows the context of a protection domain that the application created.
    ///
    /// # Safety
    /// `pd` is a live protection domain of the libibverbs in `library`, and stays alive until
    /// `owner` is dropped.
    pub(super) unsafe fn borrowed(
        library: &Arc<Library>,
        pd: *mut Pd,
        owner: ForeignOwner,
        pcie_mapping_first: Option<bool>,
    ) -> Result<Self> {
        let process = ProcessMark::current()?;
        // SAFETY: the caller promises a live protection domain. The first field is its context.
        unsafe { Self::new(library, (*pd).context, Some(owner), pcie_mapping_first, process) }
    }

    /// Creates the owner of an open context and queries the device.
    ///
    /// # Safety
    /// - `context` is an open context.
    /// - If `owner` is `None`, only the returned value closes the context.
    /// - If `owner` is not `None`, the context stays open until `owner` is dropped.
    unsafe fn new(
        library: &Arc<Library>,
        context: *mut Context,
        owner: Option<ForeignOwner>,
        pcie_mapping_first: Option<bool>,
        process: ProcessMark,
    ) -> Result<Self> {
        // SAFETY: an open context names its device.
        let name = device_name(&library.functions, unsafe { (*context).device });
        let pci_bus_id = sysfs_folder(&name).and_then(|folder| bus_id_of(&folder));
        let nic = Nic { provider: "verbs".into(), pci_bus_id, name };
        // SAFETY: all zeros is a valid value of this plain structure.
        let attr: DeviceAttr = unsafe { mem::zeroed() };
        let mut device = Self {
            library: Arc::clone(library),
            context,
            // SAFETY: the context stays open as long as the device, which owns the life.
            life: unsafe { DeviceLife::new(context, owner.is_none()) },
            had_node: library::node(&nic.name).is_some(),
            owner,
            provider_attr: describe(&nic, &attr, false, None),
            window_types: Vec::new(),
            nic,
            attr,
            rights: DeviceRights::default(),
            on_demand: false,
            generations: AtomicU32::new(0),
            process,
        };
        // From here on, an error closes the context by dropping `device`.
        device.life.set_nonblocking().map_err(|errno| {
            errors::call(&device.nic, "fcntl(O_NONBLOCK)", Errno(errno.raw_os_error()))
        })?;
        // SAFETY: the context is open; the attributes are writable for the call.
        let queried = unsafe { (library.functions.query_device)(context, &mut device.attr) };
        device.check("ibv_query_device", queried)?;
        device.rights = DeviceRights {
            atomics: device.attr.atomic_cap != AtomicCap::IBV_ATOMIC_NONE,
            iwarp: device.is_iwarp(),
        };
        device.on_demand = device.query_on_demand()?;
        let dma_buf = device.probe_dma_buf()?;
        device.provider_attr = describe(&device.nic, &device.attr, dma_buf, pcie_mapping_first);
        if dma_buf && device.attr.vendor_id == MELLANOX_VENDOR {
            device.provider_attr.imports.data_direct = device.query_data_direct();
        }
        device.window_types = device.describe_windows();
        Ok(device)
    }

    /// Returns true in a forked child. The driver's objects then belong to the parent process.
    pub(super) fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }

    /// Returns an error in a forked child. The error names `operation`.
    ///
    /// # Errors
    /// BadState: this process is a forked child of the process that opened the context.
    #[inline]
    pub(super) fn check_process(&self, operation: &'static str) -> Result<()> {
        self.process.check(operation)
    }

    /// Returns an error in a forked child, and if the device is lost. The error names `operation`.
    ///
    /// # Errors
    /// - BadState: this process is a forked child of the process that opened the context.
    /// - Unavailable: the device is lost.
    #[inline]
    pub(super) fn check_usable(&self, operation: &'static str) -> Result<()> {
        self.check_process(operation)?;
        self.life.record.check(&self.nic, operation)
    }

    /// Reads the events that the kernel has reported. Does nothing in a forked child, which would
    /// take the events from the parent process.
    pub(super) fn read_events(&self) {
        if !self.is_inherited() {
            self.life.read_events(&self.library);
        }
    }

    /// Reads the events, and checks that the device's node is still in sysfs. A driver that cannot
    /// take a device from its users reports no event when the device is removed.
    pub(super) fn examine(&self) {
        self.read_events();
        let is_lost = self.life.record.is_lost();
        if !is_lost && self.had_node && library::node(&self.nic.name).is_none() {
            self.life.lose("the kernel is removing the device, and waits for its users");
        }
    }

    /// Returns the error of a failed driver call or request. Reads the events first: if the device
    /// is lost, the result is the error of the loss, with `error` as its source.
    #[cold]
    pub(super) fn failed(&self, error: Error) -> Error {
        self.read_events();
        if !self.life.record.is_lost() || error.is_unavailable() {
            return error;
        }
        self.life.record.loss(&self.nic, error.operation()).caused_by(error)
    }

    /// Converts the return value of the library call `symbol` to a result.
    pub(super) fn check(&self, symbol: &'static str, returned: c_int) -> Result<()> {
        errors::status(returned)
            .map_err(|errno| self.failed(errors::call(&self.nic, symbol, errno)))
    }

    /// Returns the result of a library call that destroys an object of the device. `symbol` is the
    /// name of the called function, and `returned` is its return value. The call counts as
    /// successful if the kernel had already destroyed the object together with the context.
    pub(super) fn check_destroyed(&self, symbol: &'static str, returned: c_int) -> Result<()> {
        errors::status(returned).or_else(|errno| {
            self.read_events();
            if self.life.is_gone(errno) {
                return Ok(());
            }
            Err(errors::call(&self.nic, symbol, errno))
        })
    }

    /// Returns `object`, which the library call `symbol` has just created. If the pointer is null,
    /// returns the error of that call.
    pub(super) fn created<T>(&self, symbol: &'static str, object: *mut T) -> Result<*mut T> {
        if object.is_null() {
            return Err(self.failed(errors::call(&self.nic, symbol, errors::last())));
        }
        Ok(object)
    }

    /// Destroys an object of the device by a library call. The closure `destroy` makes the call,
    /// and `symbol` is the name of the called function. If the call fails, logs an error.
    ///
    /// Does nothing in a forked child, because the object belongs to the parent process.
    pub(super) fn destroy(&self, symbol: &'static str, destroy: impl FnOnce() -> c_int) {
        if self.is_inherited() {
            return;
        }
        if let Err(error) = self.check_destroyed(symbol, destroy()) {
            tracing::error!(error = %error.full(), "cannot destroy an object");
        }
    }

    /// Returns true if the vendor id is that of the driver rdma_rxe. That driver dereferences a
    /// null pointer when a free window is invalidated, and does not enforce the bounds of windows.
    /// Its flag for invalidated keys in work completions also differs from that of other drivers.
    /// It reports a refused local key as a flushed request.
    pub(super) fn is_rxe(&self) -> bool {
        self.attr.vendor_id == RXE_VENDOR
    }

    /// Returns the driver's function table. The inline functions of `infiniband/verbs.h` call the
    /// driver through this table.
    pub(super) fn ops(&self) -> &sys::ContextOps {
        // SAFETY: the context is open as long as `self`; libibverbs sets its operations when it
        // opens the device.
        unsafe { &(*self.context).ops }
    }

    /// Returns an error that names the device, with the remedy `why`.
    pub(super) fn refuse(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        why: impl Into<Cow<'static, str>>,
    ) -> Error {
        Error::new(kind, operation).provider(self.nic.to_string()).remedy(why)
    }

    /// Returns RELAXED_ORDERING, or an empty set if libibverbs lacks `ibv_reg_mr_iova2`.
    ///
    /// RELAXED_ORDERING never makes a registration fail. `ibv_reg_mr_iova2` drops optional flags
    /// for a kernel without them, and drivers ignore optional flags that they do not support.
    pub(super) fn relaxed_ordering(&self) -> VerbsOptions {
        if self.library.functions.reg_mr_iova2.is_some() {
            VerbsOptions::RELAXED_ORDERING
        } else {
            VerbsOptions::empty()
        }
    }

    /// Returns an error if `access` has the right REMOTE_ATOMIC and the device has no atomics. The
    /// right REMOTE_WRITE is no error: on a device without atomics it grants only RMA writes.
    pub(super) fn check_atomics(&self, access: Access, operation: &'static str) -> Result<()> {
        if self.rights.atomics || !access.contains(Access::REMOTE_ATOMIC) {
            return Ok(());
        }
        let why = format!("register without REMOTE_ATOMIC: {} has no atomics", self.nic.name);
        Err(self.refuse(ErrorKind::Unsupported, operation, why).context("access", "REMOTE_ATOMIC"))
    }

    /// Returns true for an iWARP device. Its `node_type` in sysfs is "4: RNIC".
    fn is_iwarp(&self) -> bool {
        let node_type = format!("/sys/class/infiniband/{}/node_type", self.nic.name);
        fs::read_to_string(node_type).is_ok_and(|text| text.starts_with('4'))
    }

    /// Queries the driver for support of on-demand paging, if libibverbs and the driver have the
    /// extended query (`ibv_query_device_ex(3)`).
    fn query_on_demand(&self) -> Result<bool> {
        // SAFETY: the context is open; `abi_compat` says whether a `verbs_context` surrounds it, as
        // the header's `verbs_get_ctx` reads it.
        let extended = unsafe { (*self.context).abi_compat }.addr() == sys::VERBS_ABI_IS_EXTENDED;
        if !extended {
            return Ok(false);
        }
        // SAFETY: `abi_compat` said that the context is the last field of a `verbs_context`.
        let surrounding = unsafe { self.context.byte_sub(offset_of!(VerbsContext, context)) };
        let surrounding: *mut VerbsContext = surrounding.cast();
        let needed = size_of::<VerbsContext>() - offset_of!(VerbsContext, query_device_ex);
        // SAFETY: `sz` lies right before the context in every version.
        if unsafe { (*surrounding).sz } < needed {
            return Ok(false);
        }
        // SAFETY: `sz` says that the structure includes this field.
        let Some(query) = (unsafe { (*surrounding).query_device_ex }) else { return Ok(false) };
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut attr: DeviceAttrEx = unsafe { mem::zeroed() };
        let input = DeviceExInput::default();
        // SAFETY: the context is open; the size tells the driver how much of the attributes is
        // there.
        let done = unsafe { query(self.context, &input, &mut attr, size_of::<DeviceAttrEx>()) };
        match errors::status(done) {
            Ok(()) => Ok(attr.odp_caps.general_caps & sys::IBV_ODP_SUPPORT != 0),
            Err(Errno(38 | 95)) => Ok(false),
            Err(errno) => Err(errors::call(&self.nic, "ibv_query_device_ex", errno)),
        }
    }

    /// Returns true if the driver can import dma-bufs. Tries to import the invalid fd -1: a driver
    /// that can import dma-bufs returns EBADF, and other drivers return EOPNOTSUPP.
    fn probe_dma_buf(&self) -> Result<bool> {
        let functions = &self.library.functions;
        let Some(register) = functions.reg_dmabuf_mr else {
            tracing::debug!(nic = %self.nic, "this libibverbs has no ibv_reg_dmabuf_mr");
            return Ok(false);
        };
        // SAFETY: the context is open.
        let pd = self.created("ibv_alloc_pd", unsafe { (functions.alloc_pd)(self.context) })?;
        // SAFETY: the protection domain was allocated just now; fd -1 is no file, so nothing is
        // registered.
        let region = unsafe { register(pd, 0, 4096, 0, -1, 0) };
        let refusal = errors::last();
        if !region.is_null() {
            // SAFETY: this function registered the region, and no other code has it.
            self.check("ibv_dereg_mr", unsafe { (functions.dereg_mr)(region) })?;
        }
        // SAFETY: this function allocated the protection domain, and nothing is registered in it.
        self.check("ibv_dealloc_pd", unsafe { (functions.dealloc_pd)(pd) })?;
        let imports = region.is_null() && refusal == Errno(9);
        tracing::debug!(nic = %self.nic, imports, errno = %refusal, "ibv_reg_dmabuf_mr(fd -1)");
        Ok(imports)
    }

    /// Returns the PCI domain of the device's Data Direct function. Returns `None` if the device
    /// has none, or if libmlx5 or the kernel is too old to tell.
    fn query_data_direct(&self) -> Option<u32> {
        let path_of = self.library.functions.mlx5_data_direct_path?;
        let mut buffer = [0_u8; libc::PATH_MAX as usize];
        // SAFETY: the context is open and the buffer is writable for the call. The library returns
        // EOPNOTSUPP for the context of another driver.
        let returned = unsafe { path_of(self.context, buffer.as_mut_ptr().cast(), buffer.len()) };
        if let Err(error) = self.check("mlx5dv_get_data_direct_sysfs_path", returned) {
            tracing::debug!(nic = %self.nic, %error, "no Data Direct");
            return None;
        }
        let path = Path::new(CStr::from_bytes_until_nul(&buffer).ok()?.to_str().ok()?);
        let domain =
            bus_id_of(path).and_then(|id| u32::from_str_radix(id.split_once(':')?.0, 16).ok());
        tracing::debug!(nic = %self.nic, path = %path.display(), ?domain, "Data Direct function");
        domain
    }

    fn describe_windows(&self) -> Vec<WindowType> {
        if self.attr.max_mw <= 0 || self.ops().alloc_mw.is_none() {
            return Vec::new();
        }
        let caps = DeviceCaps::from_bits_truncate(self.attr.device_cap_flags);
        let windows = [
            (DeviceCaps::MEM_WINDOW, WindowType::One),
            (DeviceCaps::MEM_WINDOW_TYPE_2A, WindowType::TwoA),
            (DeviceCaps::MEM_WINDOW_TYPE_2B, WindowType::TwoB),
        ];
        let found = windows.into_iter().filter(|(cap, _)| caps.contains(*cap));
        found.map(|(_, kind)| kind).collect()
    }
}

/// Closes the context, or drops the application's value that keeps the context open. A forked child
/// leaks that value instead, because the drop could deallocate the parent's protection domain.
impl Drop for OpenDevice {
    fn drop(&mut self) {
        match self.owner.take() {
            Some(owner) if self.is_inherited() => mem::forget(owner),
            Some(owner) => drop(owner),
            // SAFETY: `open` opened the context, and every object made from it holds this value.
            None => self.destroy("ibv_close_device", || unsafe {
                (self.library.functions.close_device)(self.context)
            }),
        }
    }
}

/// Returns the attributes of a device with the limits in `attr`.
fn describe(
    nic: &Nic,
    attr: &DeviceAttr,
    dma_buf: bool,
    pcie_mapping_first: Option<bool>,
) -> ProviderAttr {
    let required_mr_mode = MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY;
    let max_mr_count = u64::try_from(attr.max_mr).unwrap_or(0).max(1);
    let mut flags = MrFlags::HMEM_HOST_ALLOC | MrFlags::HMEM_DEVICE_ONLY;
    flags.set(MrFlags::MR_DMABUF, dma_buf);
    ProviderAttr {
        nic: nic.clone(),
        required_mr_mode,
        basic_mr_mode: required_mr_mode,
        key_size: 4,
        raw_key_size: RAW_KEY,
        mr_iov_limit: RANGES,
        max_mr_size: max_registration(attr).saturating_mul(max_mr_count),
        max_mr_count,
        page_sizes: vec![rustix::param::page_size()],
        imports: Imports {
            dma_buf,
            // Only a registration shows whether a peer-memory client of the kernel handles a GPU's
            // memory, so the provider always reports true.
            peer_memory: true,
            staged: true,
            // No driver call reports whether the device needs the PCIe mapping. The builder or the
            // environment sets it, or the path search decides by the topology.
            pcie_mapping_first,
            // Only libmlx5 reports a Data Direct function (`OpenDevice::query_data_direct`).
            data_direct: None,
        },
        staged_access: Access::READ | Access::WRITE | Access::SEND | Access::RECV,
        flags,
        progress: ProgressModel::Nic,
        order: RC_ORDER,
        cq_data_size: 4,
        driver_cache: None,
    }
}

/// Returns the maximum length of a registration in bytes.
pub(super) fn max_registration(attr: &DeviceAttr) -> u64 {
    if attr.max_mr_size == 0 { u64::MAX } else { attr.max_mr_size }
}

/// Returns the folder of the device in sysfs, from the link `/sys/class/infiniband/<name>/device`.
/// A software device has no such link.
pub(super) fn sysfs_folder(name: &str) -> Option<PathBuf> {
    fs::canonicalize(format!("/sys/class/infiniband/{name}/device")).ok()
}

/// Returns the PCI bus id of the function to which a folder in sysfs belongs. The folder of a
/// sub-function (`mlx5_core.sf.4`) lies in the folder of its PCI function.
fn bus_id_of(path: &Path) -> Option<String> {
    let hex = |text: &str| text.chars().all(|digit| digit.is_ascii_hexdigit());
    let is_bus_id = |name: &&str| {
        name.split_once(':').is_some_and(|(domain, rest)| {
            hex(domain) && rest.len() == 7 && rest.contains(':') && rest.contains('.')
        })
    };
    let mut names = path.ancestors().filter_map(|folder| folder.file_name()?.to_str());
    names.find(is_bus_id).map(str::to_owned)
}

/// An `ibv_pd`. Dropping the value deallocates the protection domain, unless the application owns
/// the device's context and so the protection domain.
#[derive(Debug)]
pub(super) struct ProtectionDomain {
    pub(super) device: Arc<OpenDevice>,
    pub(super) pd: *mut Pd,
}

// SAFETY: libibverbs objects may be used from any thread (ibverbs(7)).
unsafe impl Send for ProtectionDomain {}
// SAFETY: libibverbs calls may share a protection domain between threads (ibverbs(7)).
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn alloc(device: &Arc<OpenDevice>) -> Result<Self> {
        // SAFETY: the context is open.
        let pd = unsafe { (device.library.functions.alloc_pd)(device.context) };
        let pd = device.created("ibv_alloc_pd", pd)?;
        Ok(Self { device: Arc::clone(device), pd })
    }

    /// Borrows a protection domain that the application created.
    ///
    /// # Safety
    /// - `pd` is a protection domain of `device`, and stays alive as long as `device`.
    /// - `device` was created by [`OpenDevice::borrowed`].
    pub(super) unsafe fn borrowed(device: &Arc<OpenDevice>, pd: *mut Pd) -> Self {
        Self { device: Arc::clone(device), pd }
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if self.device.owner.is_some() {
            return;
        }
        let deallocate = self.device.library.functions.dealloc_pd;
        // SAFETY: the application owns no context, so `alloc` allocated the protection domain.
        // Regions, windows and queue pairs in it hold the domain that owns this value. So they are
        // gone, or they were leaked, and the driver then refuses with EBUSY.
        self.device.destroy("ibv_dealloc_pd", || unsafe { deallocate(self.pd) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_function_has_the_bus_id_of_its_pci_function() {
        let bus_id = |path: &str| bus_id_of(Path::new(path));
        let function = "/sys/devices/pci0000:00/0000:00:01.0/0000:08:00.0";
        assert_eq!(bus_id(function).as_deref(), Some("0000:08:00.0"));
        assert_eq!(bus_id(&format!("{function}/mlx5_core.sf.4")).as_deref(), Some("0000:08:00.0"));
        assert_eq!(bus_id("/sys/devices/pci0000:00"), None);
        assert_eq!(bus_id("/sys/devices/platform/HISI00D1:00"), None);
    }
}
