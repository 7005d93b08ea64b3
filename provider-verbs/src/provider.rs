//! The provider: a loaded library and its open devices, on which applications open domains.

#![allow(unsafe_code, reason = "loads the library, and borrows a protection domain")]

use std::{collections::HashMap, ffi::c_void, fmt, path::PathBuf, sync::Arc, time::Duration};

use hmem_core::{
    Error, ErrorKind, ProcessMark, Result, environment,
    provider::{DomainRequest, Provider, ProviderAttr, ProviderDomain},
};
use parking_lot::Mutex;

use super::{
    access::VerbsOptions,
    device::{ForeignOwner, OpenDevice, ProtectionDomain},
    domain::VerbsDomain,
    domain_state::DomainOptions,
    endpoint::Fabric,
    library::{ForkSafety, ForkSupport, Library},
    staged::ActiveLanes,
    sys::{Functions, Pd},
};

/// Builder of a [`Verbs`] provider.
#[derive(Debug, Default)]
pub struct Builder {
    library: Option<PathBuf>,
    functions: Option<Functions>,
    /// The protection over `fork` that the application chose; `None` for the default of
    /// [`Builder::build`] or of [`Builder::with_pd`].
    fork: Option<ForkSafety>,
    pcie_mapping_first: Option<bool>,
    without_environment: bool,
    domain: DomainOptions,
}

impl Builder {
    /// Loads libibverbs from `path`. The default is `libibverbs.so.1` in the loader's search path.
    ///
    /// # Safety
    /// The safety rules of [`Functions::load`].
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let builder = hmem_provider_verbs::Verbs::builder().library("/tmp/any.so");
    /// ```
    #[must_use]
    pub unsafe fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }

    /// Uses these functions instead of loading libibverbs.
    #[must_use]
    pub fn functions(mut self, functions: Functions) -> Self {
        self.functions = Some(functions);
        self
    }

    /// Sets the protection of registered pages over `fork`. The default is [`ForkSafety::Auto`] for
    /// [`Builder::build`], and [`ForkSafety::Off`] for [`Builder::with_pd`].
    #[must_use]
    pub fn fork_safety(mut self, fork: ForkSafety) -> Self {
        self.fork = Some(fork);
        self
    }

    /// Sets whether the devices need the PCIe mapping of device memory
    /// (`CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` of CUDA). If true, the path search first
    /// exports a dma-buf for the PCIe mapping, and if that is refused, another one for the default
    /// mapping. The region's decision lists both attempts. If false, only the default mapping is
    /// tried.
    ///
    /// Overrides the environment variable [`Verbs::PCIE_MAPPING_VARIABLE`]. Without both, the path
    /// search chooses for each NIC and device: on a machine with NVLink-C2C, a NIC below the
    /// device's PCIe switch gets the PCIe mapping first, and any other NIC the default mapping
    /// (`hmem_p2p::design`).
    #[must_use]
    pub fn pcie_mapping_first(mut self, first: bool) -> Self {
        self.pcie_mapping_first = Some(first);
        self
    }

    /// Adds options to every registration. [`Settings`](super::Settings) adds options to one.
    /// Staged memory cannot be registered with options. The methods that start the provider refuse
    /// RELAXED_ORDERING, which [`DomainAttr::ordering`](hmem_core::DomainAttr::ordering) sets.
    #[must_use]
    pub fn options(mut self, options: VerbsOptions) -> Self {
        self.domain.options = options;
        self
    }

    /// Selects the port of each device, by its number from 1 on. The default is the device's first
    /// active port.
    #[must_use]
    pub fn port(mut self, port: u8) -> Self {
        self.domain.port.number = Some(port);
        self
    }

    /// Selects the entry of the port's GID table, by its index. The default for an Ethernet port is
    /// the entry with the lowest index in the first of these classes that has entries:
    ///
    /// 1. RoCE version 2 with an IPv4 address
    /// 2. RoCE version 2 with an IPv6 address that is not link-local
    /// 3. RoCE version 2 with a link-local IPv6 address
    /// 4. a GID of unknown type
    /// 5. InfiniBand or RoCE version 1, not link-local
    /// 6. InfiniBand or RoCE version 1, link-local
    ///
    /// An InfiniBand port uses no GID by default: the LID addresses the peer. If the port's packets
    /// must have a global route header (`IBV_QPF_GRH_REQUIRED`), the default is the entry 0.
    #[must_use]
    pub fn gid_index(mut self, index: u8) -> Self {
        self.domain.port.gid_index = Some(index);
        self
    }

    /// Splits registrations that are longer than this many bytes (requirement VRB-07). A smaller
    /// limit of the device still applies. The default, 0, stands for the device's limit.
    #[must_use]
    pub fn max_registration(mut self, bytes: u64) -> Self {
        self.domain.max_registration = bytes;
        self
    }

    /// Sets whether `resolve` connects both sides if the peer is an endpoint of this provider in
    /// this process. If set, a failed completion also makes the provider reconnect both sides.
    /// Tests and single-process tools then need no coordination of the two sides.
    #[must_use]
    pub fn connect_in_process(mut self, connect: bool) -> Self {
        self.domain.connect_in_process = connect;
        self
    }

    /// Sets the timeout of calls that bind or invalidate a window and wait for the result: binds of
    /// type 1 windows, and grants and revocations through type 2 windows. The default is 30
    /// seconds.
    ///
    /// A bind of a type 1 window involves no peer. It times out only if the device was removed or
    /// hangs. A request for a type 2 window runs after the earlier requests of its endpoint. So it
    /// also times out if an earlier message waits too long for a receive of the peer.
    #[must_use]
    pub fn bind_timeout(mut self, timeout: Duration) -> Self {
        self.domain.bind_timeout = Some(timeout);
        self
    }

    /// Makes the provider ignore [`Verbs::PCIE_MAPPING_VARIABLE`], the only environment variable
    /// that it reads.
    #[must_use]
    pub fn without_environment(mut self) -> Self {
        self.without_environment = true;
        self
    }

    /// Builds the provider: loads libibverbs and reads the environment variable.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`]: the library or one of its symbols cannot be loaded. The error
    ///   names the library, with the loader's reason or the symbol.
    /// - [`ErrorKind::InvalidArgument`]: the environment variable
    ///   [`Verbs::PCIE_MAPPING_VARIABLE`] has an unknown value. The error names the variable.
    /// - [`ErrorKind::InvalidArgument`]: [`Builder::options`] has RELAXED_ORDERING.
    /// - The errors of [`ProcessMark::current`].
    pub fn build(self) -> Result<Verbs> {
        let (library, pcie_mapping_first) = self.start(ForkSafety::Auto)?;
        Verbs::new(library, pcie_mapping_first, self.domain, None)
    }

    /// Uses another crate's protection domain (requirement VRB-04). The provider has one NIC, that
    /// of this protection domain, and every domain of the provider registers in it.
    ///
    /// The lkey and rkey of these regions ([`VerbsMr`](super::VerbsMr)) work in the other crate's
    /// work requests on the protection domain. The provider neither deallocates the protection
    /// domain nor closes its context.
    ///
    /// The provider and all objects that are opened from it hold `keep`, and the last of them drops
    /// `keep`. Pass the value that owns the protection domain, such as an `Arc` of the other
    /// crate's type. Regions then cannot outlive the protection domain. Pass `()` if the protection
    /// domain is never deallocated. A forked child never drops `keep`. If this call fails, it drops
    /// `keep`.
    ///
    /// Unlike [`Builder::build`], this method does not call `ibv_fork_init` by default
    /// ([`Builder::fork_safety`]).
    ///
    /// # Errors
    /// - The errors of [`Builder::build`].
    /// - InvalidArgument: the pointer is null.
    /// - The driver's error from querying the device.
    ///
    /// # Safety
    /// `pd` is null, or a live `ibv_pd` of the same copy of libibverbs that this provider loads (or
    /// was given). A live `ibv_pd` and its context stay alive at least until `keep` is dropped.
    ///
    /// Crates that link libibverbs or load `libibverbs.so.1` use the copy that this provider loads
    /// by default. A statically linked libibverbs is another copy: pass its functions to
    /// [`Builder::functions`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::{ffi::c_void, sync::Arc};
    ///
    /// use hmem_core::{Domain, DomainAttr, Registry, Result};
    /// use hmem_p2p::path::DefaultPathSelector;
    /// use hmem_provider_verbs::Verbs;
    ///
    /// /// A type of another crate that owns a protection domain and deallocates it on drop.
    /// struct ProtectionDomain {
    ///     pd: *mut c_void,
    /// }
    /// # // SAFETY: libibverbs objects may be used from any thread.
    /// # unsafe impl Send for ProtectionDomain {}
    /// # // SAFETY: libibverbs objects may be used from any thread.
    /// # unsafe impl Sync for ProtectionDomain {}
    ///
    /// /// Opens a domain of hmem in the protection domain of the other crate.
    /// fn open_in(owner: &Arc<ProtectionDomain>, registry: Arc<Registry>) -> Result<Domain> {
    ///     // SAFETY: the `Arc` keeps the protection domain alive. Both crates use libibverbs.so.1.
    ///     let verbs = unsafe { Verbs::builder().with_pd(owner.pd, Arc::clone(owner)) }?;
    ///     let paths = Arc::new(DefaultPathSelector::new());
    ///     Domain::open(&verbs, registry, paths, DomainAttr::default())
    /// }
    /// ```
    pub unsafe fn with_pd(
        self,
        pd: *mut c_void,
        keep: impl Send + Sync + 'static,
    ) -> Result<Verbs> {
        let owner: ForeignOwner = Box::new(keep);
        let pd: *mut Pd = pd.cast();
        if pd.is_null() {
            return Err(Error::new(ErrorKind::InvalidArgument, "with_pd")
                .provider("verbs")
                .remedy("pass a protection domain of ibv_alloc_pd"));
        }
        let (library, pcie_mapping_first) = self.start(ForkSafety::Off)?;
        // SAFETY: the caller promises that the protection domain is of this library, and alive
        // until its owner is dropped.
        let device = unsafe { OpenDevice::borrowed(&library, pd, owner, pcie_mapping_first) }?;
        let device = Arc::new(device);
        // SAFETY: the device holds the owner of the protection domain.
        let pd = unsafe { ProtectionDomain::borrowed(&device, pd) };
        Verbs::new(library, pcie_mapping_first, self.domain, Some((pd, Arc::default())))
    }

    /// Loads the library. Also returns whether the devices need the PCIe mapping: the builder's
    /// setting, or else the value of the environment variable, or `None` if neither is set.
    /// `default` is the protection over `fork` if the application has chosen none.
    fn start(&self, default: ForkSafety) -> Result<(Arc<Library>, Option<bool>)> {
        let pcie_mapping_first = match self.pcie_mapping_first {
            None if !self.without_environment => {
                environment::boolean(Verbs::PCIE_MAPPING_VARIABLE)?
            }
            set => set,
        };
        if self.domain.options.contains(VerbsOptions::RELAXED_ORDERING) {
            return Err(Error::new(ErrorKind::InvalidArgument, "start verbs")
                .context("option", "RELAXED_ORDERING")
                .remedy("set the write ordering of the domain instead (DomainAttr::ordering)"));
        }
        let functions = match (&self.functions, &self.library) {
            (Some(functions), _) => functions.clone(),
            // SAFETY: the caller of `Builder::library` promises that the file is libibverbs or a
            // replacement of it.
            (None, Some(path)) => unsafe { Functions::load(path) }?,
            (None, None) => Functions::find()?,
        };
        let library = Library::new(functions, self.fork.unwrap_or(default));
        Ok((Arc::new(library), pcie_mapping_first))
    }
}

/// Names of the devices that could not be opened, each with the error.
type LeftOut = Vec<(String, Error)>;

/// Provider for RDMA hardware, which calls libibverbs.
#[derive(Clone)]
pub struct Verbs {
    inner: Arc<Inner>,
}

struct Inner {
    library: Arc<Library>,
    pcie_mapping_first: Option<bool>,
    options: DomainOptions,
    /// The application's protection domain ([`Builder::with_pd`]), with the nonempty lanes (queues
    /// of staged transfers) of its device. `None` for a provider that opens devices itself.
    brought: Option<(ProtectionDomain, Arc<ActiveLanes>)>,
    /// Open devices by name. They stay open, because opening a device takes milliseconds and all
    /// domains of a device share its context.
    devices: Mutex<HashMap<String, Device>>,
    fabric: Arc<Fabric>,
    /// The process that opened the provider. Another process (a forked child) cannot open domains.
    process: ProcessMark,
}

/// An open device, with the nonempty lanes (queues of staged transfers) of its endpoints.
#[derive(Clone)]
struct Device {
    open: Arc<OpenDevice>,
    active: Arc<ActiveLanes>,
}

impl Verbs {
    /// Name of the environment variable that sets whether devices need the PCIe mapping of device
    /// memory. The values 1, yes, true and on mean that they do, and 0, no, false and off that they
    /// do not. Upper and lower case are equal. An empty variable counts as unset. A call of
    /// [`Builder::pcie_mapping_first`] overrides the variable.
    pub const PCIE_MAPPING_VARIABLE: &str = "HMEM_VERBS_PCIE_MAPPING";

    /// Loads libibverbs by its usual name.
    ///
    /// # Errors
    /// The errors of [`Builder::build`].
    pub fn open() -> Result<Self> {
        Self::builder().build()
    }

    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(
        library: Arc<Library>,
        pcie_mapping_first: Option<bool>,
        options: DomainOptions,
        brought: Option<(ProtectionDomain, Arc<ActiveLanes>)>,
    ) -> Result<Self> {
        let inner = Inner {
            library,
            pcie_mapping_first,
            options,
            brought,
            devices: Mutex::default(),
            fabric: Arc::default(),
            process: ProcessMark::current()?,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the name or path from which libibverbs was loaded.
    #[must_use]
    pub fn library(&self) -> &str {
        self.inner.library.functions.library()
    }

    /// Returns how registered pages are protected over `fork`.
    #[must_use]
    pub fn fork_support(&self) -> &ForkSupport {
        &self.inner.library.fork
    }

    /// Returns the names of the devices that cannot be opened, each with the error.
    /// [`Provider::nics`] does not list these devices. The list is empty for a provider of
    /// [`Builder::with_pd`].
    ///
    /// # Errors
    /// Unavailable: the library lists no device.
    pub fn left_out(&self) -> Result<Vec<(String, Error)>> {
        if self.inner.brought.is_some() {
            return Ok(Vec::new());
        }
        Ok(self.survey()?.1)
    }

    /// Opens all devices. Returns the attributes of the devices that could be opened, and the
    /// errors of the others.
    fn survey(&self) -> Result<(Vec<ProviderAttr>, LeftOut)> {
        let names = self.inner.library.device_names();
        // If no device is left, the kernel waits for the end of the contexts of those that were.
        let names = names.inspect_err(|_| self.inner.devices.lock().clear())?;
        self.inner
            .devices
            .lock()
            .retain(|name, device| names.contains(name) && !device.open.life.record.is_lost());
        let (mut nics, mut left_out) = (Vec::with_capacity(names.len()), Vec::new());
        for name in names {
            match self.device(&name) {
                Ok(device) => nics.push(device.open.provider_attr.clone()),
                Err(error) => left_out.push((name, error)),
            }
        }
        Ok((nics, left_out))
    }

    /// Returns an open device by its name. Opens the device if no earlier call has done so.
    fn device(&self, name: &str) -> Result<Device> {
        {
            let mut devices = self.inner.devices.lock();
            // The context of a lost device never works again.
            devices.retain(|_, device| !device.open.life.record.is_lost());
            if let Some(device) = devices.get(name) {
                return Ok(device.clone());
            }
        }
        let device = OpenDevice::open(&self.inner.library, name, self.inner.pcie_mapping_first)?;
        let device = Device { open: Arc::new(device), active: Arc::default() };
        Ok(self.inner.devices.lock().entry(name.to_owned()).or_insert(device).clone())
    }
}

impl Provider for Verbs {
    fn name(&self) -> &str {
        "verbs"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        if let Some((pd, _)) = &self.inner.brought {
            return Ok(vec![pd.device.provider_attr.clone()]);
        }
        let (nics, mut left_out) = self.survey()?;
        for (device, error) in &left_out {
            let error = error.full();
            tracing::warn!(device, %error, "skipping a device that cannot be opened");
        }
        match left_out.pop() {
            Some((_, error)) if nics.is_empty() => Err(error),
            _ => Ok(nics),
        }
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        self.inner.process.check("open domain")?;
        let (pd, active) = match &self.inner.brought {
            Some((brought, active)) => {
                let device = &brought.device;
                if request.nic.as_ref().is_some_and(|asked| *asked != device.nic.name) {
                    let why =
                        "the protection domain that was brought along belongs to the named device";
                    return Err(device
                        .refuse(ErrorKind::InvalidArgument, "open domain", why)
                        .context("nic", request.nic.as_deref().unwrap_or_default()));
                }
                // SAFETY: the device holds the owner that the caller of `with_pd` named.
                let pd = unsafe { ProtectionDomain::borrowed(device, brought.pd) };
                (pd, Arc::clone(active))
            }
            None => {
                let name = match &request.nic {
                    Some(name) => name.clone(),
                    None => self.inner.library.device_names()?.swap_remove(0),
                };
                let device = self.device(&name)?;
                (ProtectionDomain::alloc(&device.open)?, device.active)
            }
        };
        let shared = (active, Arc::clone(&self.inner.fabric));
        let domain = VerbsDomain::open(pd, self.inner.options, shared, request)?;
        Ok(Arc::new(domain))
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs")
            .field("library", &self.library())
            .field("fork", self.fork_support())
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}
