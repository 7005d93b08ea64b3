//! The entry point: the ifaces, the providers and the path selector of an application.

use std::{
    collections::BTreeSet,
    sync::{Arc, OnceLock},
};

use hmem_core::{
    CacheAttr, Domain, DomainAttr, Error, ErrorKind, Iface, IfaceKind, IfaceName, ProcessMark,
    Registry, Result, environment,
    monitor::Monitor,
    path::{DirectPath, PathSelector},
    provider::{Provider, ProviderAttr},
};
use hmem_iface_system::{
    System,
    monitor::{HostMonitorKind, SystemMonitor},
};
use hmem_p2p::{
    path::{DefaultPathSelector, ExplainRequest, Explanation},
    topology::Topology,
};

use crate::{
    cache_defaults::{CacheDefaults, CacheSettings},
    env,
};

/// The entry point: the ifaces, the providers and the path selector of an application. Build one
/// for each process.
///
/// ```
/// use hmem::{Access, DomainAttr, Hmem, loopback::Loopback};
///
/// # fn main() -> hmem::Result<()> {
/// let hmem = Hmem::builder().provider(Loopback::builder().build()?).build()?;
/// let domain = hmem.domain("loopback", DomainAttr::default())?;
/// let region = domain.register(vec![0; 4096], Access::REMOTE_READ)?;
/// # drop(region);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Hmem {
    registry: Arc<Registry>,
    providers: Vec<Arc<dyn Provider>>,
    absent_providers: Vec<(String, Error)>,
    paths: Arc<DefaultPathSelector>,
    p2p_disabled: bool,
    direct_paths: Option<Vec<DirectPath>>,
    reach_check: Option<bool>,
    /// The iface of host memory, with its cache monitor.
    system: Arc<System>,
    cache: Arc<CacheSettings>,
    /// The process that built this value. A forked child cannot open domains.
    process: ProcessMark,
    /// The topology of the builder, or that of this machine once it was read.
    topology: OnceLock<Topology>,
    /// The ifaces that the builder or `FI_HMEM` names. `None` means all.
    filter: Option<Filter>,
}

/// Builds an [`Hmem`].
///
/// A setting of the builder takes precedence over its environment variable. The variables of
/// registration caches (`FI_MR_*`) are read when the first domain with a cache is opened.
/// [`Builder::build`] reads the others. [`Builder::without_environment`] ignores them all.
///
/// ```
/// use hmem::{CacheAttr, Hmem, loopback::Loopback, system::{Simulated, monitor::HostMonitorKind}};
///
/// # fn main() -> hmem::Result<()> {
/// let hmem = Hmem::builder()
///     .without_vendor_ifaces()
///     .iface(Simulated::builder().build()?)
///     .provider(Loopback::builder().build()?)
///     .cache(CacheAttr::default().max_count(1000))
///     .cache_monitor(HostMonitorKind::MemHooks)
///     .build()?;
/// assert_eq!(hmem.cache_defaults()?.limits().max_count, 1000);
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct Builder {
    /// The plug-ins. Each has its opened iface, or the reason why the application could not open
    /// the iface.
    plug_ins: Vec<(IfaceName, Result<Arc<dyn Iface>>)>,
    providers: Vec<Arc<dyn Provider>>,
    absent_providers: Vec<(String, Error)>,
    /// The error for the first iface or provider whose number or name differs from the arguments
    /// of [`Builder::iface_or_absent`] or [`Builder::provider_or_absent`].
    mismatch: Option<Error>,
    /// The value of [`Builder::ifaces`].
    filter: Option<String>,
    disable_p2p: Option<bool>,
    direct_paths: Option<Vec<DirectPath>>,
    reach_check: Option<bool>,
    skip_vendors: bool,
    /// The position of verbs among the providers. `None` means that verbs is not started.
    verbs_at: Option<usize>,
    without_environment: bool,
    cache_monitor: Option<HostMonitorKind>,
    /// The monitor of [`Builder::imported_cache_monitor`], if `cache_monitor` is `Import`.
    imported_monitor: Option<Arc<dyn Monitor>>,
    cache: CacheAttr,
    topology: Option<Topology>,
}

impl Hmem {
    /// Returns a builder with host memory and the vendor ifaces that were compiled in.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Returns the ifaces that started, and the reasons why others did not start.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Returns the ifaces that [`Builder::ifaces`] or `FI_HMEM` names and that did not start, with
    /// the reasons.
    pub fn missing_ifaces(&self) -> impl Iterator<Item = (IfaceKind, &Error)> {
        self.registry.absent().filter(|(kind, _)| self.names_iface(*kind))
    }

    /// Returns true if [`Builder::ifaces`] or `FI_HMEM` names the iface. Without either, no iface
    /// is named.
    #[must_use]
    pub fn names_iface(&self, kind: IfaceKind) -> bool {
        let name = self.registry.name_of(kind).to_string();
        self.filter.as_ref().is_some_and(|filter| filter.admits(&name))
    }

    /// Returns the iface of the given kind.
    ///
    /// # Errors
    /// - If the iface did not start: an error of the same kind as the reason, for example
    ///   [`ErrorKind::Unavailable`] for an absent library, with the reason as the source.
    /// - [`ErrorKind::Unsupported`], with the name of the cargo feature, for an iface that was not
    ///   compiled in.
    /// - [`ErrorKind::InvalidArgument`] for a plug-in that was not added.
    pub fn iface(&self, kind: IfaceKind) -> Result<&Arc<dyn Iface>> {
        self.registry.get(kind)
    }

    /// Returns true if [`Builder::disable_p2p`] or `FI_HMEM_DISABLE_P2P` disabled direct access to
    /// device memory.
    #[must_use]
    pub fn p2p_disabled(&self) -> bool {
        self.p2p_disabled
    }

    /// Returns the list of [`Builder::direct_paths`] or `HMEM_DIRECT_PATHS`, if there is one.
    #[must_use]
    pub fn direct_paths(&self) -> Option<&[DirectPath]> {
        self.direct_paths.as_deref()
    }

    /// Returns the monitor that detects changes of cached host memory, with the reason for the
    /// choice. Starts the monitor, unless a cache has done so.
    ///
    /// # Errors
    /// - The errors of [`Hmem::cache_defaults`].
    /// - The error of a monitor that was requested by name and cannot start. The next call retries.
    pub fn cache_monitor(&self) -> Result<&SystemMonitor> {
        self.system.cache_monitor()
    }

    /// Returns the default cache settings of domains: those of the builder and the environment. The
    /// first call, or the first domain with a cache, reads the environment.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a malformed environment variable that the builder does
    /// not override. The error names the variable. The next call reads the environment again.
    pub fn cache_defaults(&self) -> Result<&CacheDefaults> {
        self.cache.defaults()
    }

    /// Returns the providers that were added.
    #[must_use]
    pub fn providers(&self) -> &[Arc<dyn Provider>] {
        &self.providers
    }

    /// Returns the provider with the given name.
    ///
    /// # Errors
    /// - If the provider did not start: an error of the same kind as the reason, for example
    ///   [`ErrorKind::Unavailable`] or [`ErrorKind::Unsupported`], with the reason as the source.
    /// - [`ErrorKind::InvalidArgument`], with the names of the added providers, for another name.
    pub fn provider(&self, name: &str) -> Result<&Arc<dyn Provider>> {
        self.providers.iter().find(|provider| provider.name() == name).ok_or_else(|| {
            if let Some((_, why)) = self.absent_providers.iter().find(|(absent, _)| absent == name)
            {
                return Error::new(why.kind(), "provider")
                    .provider(name.to_owned())
                    .caused_by(why.clone());
            }
            let known: Vec<_> = self.providers.iter().map(|provider| provider.name()).collect();
            Error::new(ErrorKind::InvalidArgument, "provider")
                .context("why", format_args!("no provider is named {name}"))
                .context("name", name)
                .context("added", known.join(","))
                .remedy("add the provider to the builder: `.verbs()`, or `.provider(..)`")
        })
    }

    /// Returns the requested providers that did not start, each with the reason. Also returns the
    /// NICs that cannot be opened although their provider started, with names such as
    /// `verbs/mlx5_0`.
    pub fn absent_providers(&self) -> impl Iterator<Item = (&str, &Error)> {
        self.absent_providers.iter().map(|(name, why)| (name.as_str(), why))
    }

    /// Returns the attributes of each NIC of a provider.
    ///
    /// # Errors
    /// The errors of [`Hmem::provider`] and [`Provider::nics`].
    pub fn nics(&self, provider: &str) -> Result<Vec<ProviderAttr>> {
        self.provider(provider)?.nics()
    }

    /// Opens a domain of a provider.
    ///
    /// # Errors
    /// The errors of [`Hmem::provider`] and [`Hmem::domain_on`].
    pub fn domain(&self, provider: &str, attr: DomainAttr) -> Result<Domain> {
        self.domain_on(&**self.provider(provider)?, attr)
    }

    /// Opens a domain of a provider that was not added to the builder.
    ///
    /// # Errors
    /// - The errors of [`Domain::open`].
    /// - With a cache, the errors of [`Hmem::cache_defaults`], and the error of a monitor of host
    ///   memory that was requested by name and cannot start.
    /// - [`ErrorKind::BadState`] in a forked child of the process that built this `Hmem`. The child
    ///   must build an `Hmem` of its own.
    pub fn domain_on(&self, provider: &dyn Provider, mut attr: DomainAttr) -> Result<Domain> {
        self.process.check("open domain")?;
        if let Some(cache) = attr.cache.take() {
            let defaults = self.cache_defaults()?;
            attr.cache = Some(defaults.applied_to(cache));
            // `Auto` never fails, and starts with the first registration of host memory.
            if defaults.monitor() != HostMonitorKind::Auto {
                self.cache_monitor()?;
            }
        }
        attr.direct_paths = attr.direct_paths.or_else(|| self.direct_paths.clone());
        attr.reach_check = attr.reach_check.or(self.reach_check);
        let selector: Arc<dyn PathSelector> = Arc::clone(&self.paths) as _;
        Domain::open(provider, Arc::clone(&self.registry), selector, attr)
    }

    /// Returns the topology in which [`Hmem::nearest_nics`] measures distances. This is the
    /// topology of [`Builder::topology`], or else that of this machine. The first call reads the
    /// machine's topology. Devices that are plugged in later are not in it.
    ///
    /// # Errors
    /// The errors of [`Topology::read`]. The next call retries.
    pub fn topology(&self) -> Result<&Topology> {
        if let Some(topology) = self.topology.get() {
            return Ok(topology);
        }
        let topology = Topology::read()?;
        Ok(self.topology.get_or_init(|| topology))
    }

    /// Returns the path selector of the domains, which caches decisions and can forget them.
    #[must_use]
    pub fn paths(&self) -> &DefaultPathSelector {
        &self.paths
    }

    /// Returns the path that a registration would take, with the reasons, as `hmem explain` prints
    /// them. The call registers memory and deregisters it again.
    ///
    /// # Errors
    /// The errors of [`Hmem::provider`] and [`DefaultPathSelector::explain`]. If no path works, the
    /// call succeeds, and the explanation has the reasons.
    pub fn explain(&self, provider: &str, request: &ExplainRequest) -> Result<Explanation> {
        self.explain_on(&**self.provider(provider)?, request)
    }

    /// Returns an explanation like [`Hmem::explain`], for a provider that was not added to the
    /// builder.
    ///
    /// # Errors
    /// The errors of [`DefaultPathSelector::explain`].
    pub fn explain_on(
        &self,
        provider: &dyn Provider,
        request: &ExplainRequest,
    ) -> Result<Explanation> {
        let listed = request.direct_paths.as_ref().or(self.direct_paths.as_ref());
        let check = request.reach_check.or(self.reach_check);
        let request = request.clone().direct_paths(listed.cloned()).reach_check(check);
        self.paths.explain(&self.registry, provider, &request)
    }
}

impl Builder {
    /// Adds an iface: the simulated device, or a plug-in.
    #[must_use]
    pub fn iface(self, iface: impl Iface + 'static) -> Self {
        self.shared_iface(Arc::new(iface))
    }

    /// Adds a plug-in iface with the given number and name, or the reason why it could not be
    /// opened. With a reason, [`Registry::absent`] lists the plug-in, and [`Hmem::iface`] returns
    /// the reason.
    ///
    /// [`Builder::build`] fails if the opened iface has another number or name. It also fails if
    /// the reason is a bad value in an environment variable ([`ErrorKind::InvalidArgument`] with
    /// the context value `variable`), unless [`Builder::ifaces`] or `FI_HMEM` excludes the plug-in.
    ///
    /// ```
    /// use hmem::{Error, ErrorKind, Hmem, IfaceKind, system::Simulated};
    ///
    /// const MINE: IfaceKind = IfaceKind(0x5155);
    /// fn open() -> hmem::Result<Simulated> {
    ///     Err(Error::new(ErrorKind::Unavailable, "load library").remedy("install the driver"))
    /// }
    ///
    /// # fn main() -> hmem::Result<()> {
    /// let hmem = Hmem::builder().iface_or_absent(MINE, "mine", open()).build()?;
    /// let error = hmem.iface(MINE).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Unavailable);
    /// assert_eq!(error.remedy_text(), Some("install the driver"));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn iface_or_absent(
        mut self,
        kind: IfaceKind,
        name: &str,
        opened: Result<impl Iface + 'static>,
    ) -> Self {
        match opened {
            Ok(iface) => {
                if (iface.kind(), iface.name()) != (kind, name) {
                    let error = Error::new(ErrorKind::InvalidArgument, "add iface")
                        .iface(&iface)
                        .context("number", format!("{:#x}", iface.kind().0))
                        .context("given", format!("{name} ({:#x})", kind.0))
                        .remedy("pass the number and the name of the iface to `iface_or_absent`");
                    self.mismatch.get_or_insert(error);
                }
                self.iface(iface)
            }
            Err(why) => {
                let name = IfaceName::new(kind, name);
                tracing::debug!(iface = %name, %why, "iface not started");
                self.plug_ins.push((name, Err(why)));
                self
            }
        }
    }

    /// Adds an iface in an `Arc`, which the caller can continue to use.
    #[must_use]
    pub fn shared_iface(mut self, iface: Arc<dyn Iface>) -> Self {
        self.plug_ins.push((IfaceName::from(&iface), Ok(iface)));
        self
    }

    /// Adds a provider. No provider is added by default, not even the software NIC.
    #[must_use]
    pub fn provider(self, provider: impl Provider + 'static) -> Self {
        self.shared_provider(Arc::new(provider))
    }

    /// Adds a provider with the given name, or the reason why it could not be opened. With a
    /// reason, [`Hmem::absent_providers`] lists the provider, and [`Hmem::domain`] returns the
    /// reason.
    ///
    /// [`Builder::build`] fails if the opened provider has another name. It also fails if the
    /// reason is a bad value in an environment variable ([`ErrorKind::InvalidArgument`] with the
    /// context value `variable`).
    #[must_use]
    pub fn provider_or_absent(
        mut self,
        name: &str,
        opened: Result<impl Provider + 'static>,
    ) -> Self {
        match opened {
            Ok(provider) => {
                if provider.name() != name {
                    let error = Error::new(ErrorKind::InvalidArgument, "add provider")
                        .provider(provider.name().to_owned())
                        .context("given", name)
                        .remedy("pass the name of the provider to `provider_or_absent`");
                    self.mismatch.get_or_insert(error);
                }
                self.provider(provider)
            }
            Err(why) => {
                tracing::debug!(%why, provider = name, "provider not started");
                self.absent_providers.push((name.to_owned(), why));
                self
            }
        }
    }

    /// Adds a provider in an `Arc`, which the caller can continue to use.
    #[must_use]
    pub fn shared_provider(mut self, provider: Arc<dyn Provider>) -> Self {
        self.providers.push(provider);
        self
    }

    /// Adds the provider `verbs`, which uses RDMA hardware through libibverbs. [`Builder::build`]
    /// starts it. If this machine has no libibverbs or no device, or a device cannot be opened,
    /// [`Hmem::absent_providers`] has the reason.
    #[must_use]
    pub fn verbs(mut self) -> Self {
        self.verbs_at.get_or_insert(self.providers.len());
        self
    }

    /// Starts only the named ifaces and that of host memory. Names are separated by `;` or `,`.
    /// This setting overrides `FI_HMEM`.
    #[must_use]
    pub fn ifaces(mut self, names: impl Into<String>) -> Self {
        self.filter = Some(names.into());
        self
    }

    /// If `disable` is true, disables direct access to device memory for all domains, whatever
    /// their policy. This setting overrides `FI_HMEM_DISABLE_P2P`.
    #[must_use]
    pub fn disable_p2p(mut self, disable: bool) -> Self {
        self.disable_p2p = Some(disable);
        self
    }

    /// Sets the direct paths for each domain whose own list, [`DomainAttr::direct_paths`], is
    /// `None`. This setting overrides `HMEM_DIRECT_PATHS`.
    #[must_use]
    pub fn direct_paths(mut self, paths: impl Into<Vec<DirectPath>>) -> Self {
        self.direct_paths = Some(paths.into());
        self
    }

    /// Sets whether domains check direct paths by transfers, for each domain whose own setting,
    /// [`DomainAttr::reach_check`], is `None`. This setting overrides `HMEM_REACH_CHECK`.
    #[must_use]
    pub fn reach_check(mut self, check: bool) -> Self {
        self.reach_check = Some(check);
        self
    }

    /// Sets the default cache settings of domains, which [`DomainAttr::cache`] overrides. This call
    /// gives no domain a cache: a domain has one only if its [`DomainAttr::cache`] is `Some`.
    ///
    /// Each setting that is not `None` overrides its variables: `FI_MR_CACHE_MAX_SIZE`,
    /// `FI_MR_CACHE_MAX_COUNT`, `FI_MR_CACHE_MERGE_REGIONS` or
    /// `FI_MR_{CUDA,ROCR,ZE}_CACHE_MONITOR_ENABLED`.
    #[must_use]
    pub fn cache(mut self, cache: CacheAttr) -> Self {
        self.cache = cache;
        self
    }

    /// Sets the monitor of host memory. This setting overrides `FI_MR_CACHE_MONITOR`. The default
    /// is [`HostMonitorKind::Auto`], which chooses a monitor.
    ///
    /// [`HostMonitorKind::Disabled`] turns the caches of all domains off, for device memory too. To
    /// cache device memory alone, name [`IfaceKind::SYSTEM`] in [`CacheAttr::without_monitors`].
    #[must_use]
    pub fn cache_monitor(mut self, kind: HostMonitorKind) -> Self {
        (self.cache_monitor, self.imported_monitor) = (Some(kind), None);
        self
    }

    /// Sets a monitor that the application supplies for host memory, such as
    /// [`ImportMonitor`](hmem_iface_system::monitor::ImportMonitor). Replaces the monitor of
    /// [`Builder::cache_monitor`].
    #[must_use]
    pub fn imported_cache_monitor(mut self, monitor: Arc<dyn Monitor>) -> Self {
        self.cache_monitor = Some(HostMonitorKind::Import);
        self.imported_monitor = Some(monitor);
        self
    }

    /// Sets the topology of [`Hmem::topology`], for example a recorded one.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Makes the builder read no environment variable. A setting that the builder lacks then has
    /// its default.
    ///
    /// This call applies to the variables of libfabric (`FI_HMEM`, `FI_HMEM_DISABLE_P2P`,
    /// `FI_MR_*`) and of this library (`HMEM_*`). It does not apply to an iface or provider that
    /// the application opened itself, to the dynamic loader (`LD_LIBRARY_PATH`), or to the vendors'
    /// libraries.
    ///
    /// ```
    /// use hmem::Hmem;
    ///
    /// # fn main() -> hmem::Result<()> {
    /// let hmem = Hmem::builder().without_environment().without_vendor_ifaces().build()?;
    /// assert_eq!(hmem.cache_defaults()?.off_by(), None);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn without_environment(mut self) -> Self {
        self.without_environment = true;
        self
    }

    /// Starts no vendor iface, so that no vendor library is loaded.
    #[must_use]
    pub fn without_vendor_ifaces(mut self) -> Self {
        self.skip_vendors = true;
        self
    }

    /// Starts the ifaces and the providers, and returns the [`Hmem`].
    ///
    /// If an iface cannot start, the others start anyway, and [`Registry::absent`] has the reason.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`]:
    ///   - for an unknown name in [`Builder::ifaces`] or `FI_HMEM`
    ///   - for another malformed environment variable that the builder does not override, except
    ///     those of registration caches ([`Hmem::cache_defaults`])
    ///   - for an iface number, iface name or provider name that was added twice
    ///   - for a plug-in with the name of a built-in iface, or with a number from 6 to 0xff
    ///   - in the cases of [`Builder::iface_or_absent`]
    /// - [`ErrorKind::Unsupported`] for an iface that [`Builder::ifaces`] names and that was not
    ///   compiled in. If only `FI_HMEM` names it, the iface is absent, and a warning is logged.
    /// - The errors of [`ProcessMark::current`].
    pub fn build(mut self) -> Result<Hmem> {
        let process = ProcessMark::current()?;
        if let Some(error) = self.mismatch.take() {
            return Err(error);
        }
        let by_builder = self.filter.is_some();
        let plug_ins: Vec<_> = self.plug_ins.iter().map(|(name, _)| name.clone()).collect();
        check_plug_ins(&plug_ins)?;
        let environment = !self.without_environment;
        if let Some(at) = self.verbs_at {
            self.add_verbs(at, environment);
        }
        self.check_providers()?;
        let filter = match self.filter {
            Some(names) => Some(Filter::parse(&names, &plug_ins)?),
            None if !environment => None,
            None => env::parsed_by(env::HMEM, |names| Filter::parse(names, &plug_ins))?,
        };
        let admitted = |name: &str| filter.as_ref().is_none_or(|filter| filter.admits(name));
        if let Some((_, error)) =
            self.absent_providers.iter().find(|(_, why)| environment::is_bad_value(why))
        {
            return Err(error.clone());
        }
        for (name, opened) in &self.plug_ins {
            if let Err(why) = opened
                && environment::is_bad_value(why)
                && admitted(&name.to_string())
            {
                return Err(why.clone().iface(name.clone()));
            }
        }
        let disable_p2p = match self.disable_p2p {
            Some(disable) => disable,
            None if !environment => false,
            None => environment::boolean(env::DISABLE_P2P)?.unwrap_or(false),
        };
        let direct_paths = match self.direct_paths {
            Some(paths) => Some(paths),
            None if !environment => None,
            None => env::parsed_by(env::DIRECT_PATHS, DirectPath::parse_list)?,
        };
        let reach_check = match self.reach_check {
            None if environment => environment::boolean(env::REACH_CHECK)?,
            set => set,
        };
        let cache = Arc::new(CacheSettings::new(self.cache, self.cache_monitor, environment));
        let mut registry = Registry::new();
        let system = Arc::new(match self.imported_monitor {
            Some(monitor) => System::new().with_monitor(SystemMonitor::imported(monitor)),
            None => {
                let cache = Arc::clone(&cache);
                System::new().with_monitor_from(move || cache.defaults()?.start_monitor())
            }
        });
        registry.add(Arc::<System>::clone(&system))?;
        // A plug-in with the number of an absent vendor iface replaces it.
        let replaced = |kind| plug_ins.iter().any(|plug_in| plug_in.kind() == kind);
        for (kind, start) in VENDORS {
            let why = if self.skip_vendors {
                left_out(kind, "the builder starts no vendor ifaces")
                    .remedy("do not call Builder::without_vendor_ifaces")
            } else if !admitted(&kind.to_string()) {
                filtered_out(kind, &kind.to_string(), by_builder)
            } else {
                match start(environment) {
                    Ok(iface) => {
                        registry.add(iface)?;
                        continue;
                    }
                    Err(error) if environment::is_bad_value(&error) => return Err(error),
                    Err(why) => {
                        tracing::debug!(iface = %kind, %why, "iface not started");
                        why
                    }
                }
            };
            if replaced(kind) {
                continue;
            }
            // An iface that is not compiled in fails the build only if the program itself names it:
            // `FI_HMEM` applies to other programs of the machine too.
            let why = match filter.is_some() && why.context_value("feature").is_some() {
                true if by_builder => return Err(why),
                true => {
                    tracing::warn!(
                        iface = %kind,
                        %why,
                        "FI_HMEM names an iface that is not compiled in"
                    );
                    why.context("named by", env::HMEM)
                }
                false => why,
            };
            registry.add_absent(kind, why);
        }
        for (name, opened) in self.plug_ins {
            let kind = name.kind();
            match opened {
                // A plug-in may have the number of a vendor iface, but not if that iface has
                // started.
                Err(_) if registry.iter().any(|iface| iface.kind() == kind) => {
                    return Err(added_twice(&name));
                }
                _ if !admitted(&name.to_string()) => {
                    let why = filtered_out(kind, &name.to_string(), by_builder);
                    registry.add_absent(kind, why);
                }
                Ok(iface) => registry.add(iface)?,
                Err(why) => registry.add_absent(kind, why.iface(name)),
            }
        }
        Ok(Hmem {
            registry: Arc::new(registry),
            providers: self.providers,
            absent_providers: self.absent_providers,
            paths: Arc::new(DefaultPathSelector::new().disable_p2p(disable_p2p)),
            p2p_disabled: disable_p2p,
            direct_paths,
            reach_check,
            system,
            cache,
            process,
            topology: self.topology.map(OnceLock::from).unwrap_or_default(),
            filter,
        })
    }

    /// Starts verbs, and inserts its provider at `at`.
    fn add_verbs(&mut self, at: usize, environment: bool) {
        match start_verbs(environment) {
            Ok((verbs, left_out)) => {
                self.providers.insert(at, verbs);
                self.absent_providers.extend(left_out);
            }
            Err(why) => {
                tracing::debug!(%why, "verbs not started");
                self.absent_providers.push(("verbs".to_owned(), why));
            }
        }
    }

    /// Refuses a provider, available or absent, whose name was added twice.
    fn check_providers(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        let absent = self.absent_providers.iter().map(|(name, _)| name.as_str());
        for name in self.providers.iter().map(|provider| provider.name()).chain(absent) {
            if !names.insert(name) {
                return Err(Error::new(ErrorKind::InvalidArgument, "add provider")
                    .provider(name.to_owned())
                    .remedy("add each provider only once"));
            }
        }
        Ok(())
    }
}

/// Refuses a plug-in, available or absent, whose number or name is invalid or belongs to another
/// iface. Names are compared without regard to case, as [`Filter`] does.
fn check_plug_ins(plug_ins: &[IfaceName]) -> Result<()> {
    for (at, plug_in) in plug_ins.iter().enumerate() {
        let (kind, name) = (plug_in.kind(), plug_in.to_string());
        if kind.name().is_none() && !kind.is_plug_in() {
            return Err(Error::new(ErrorKind::InvalidArgument, "add iface")
                .iface(plug_in.clone())
                .context("number", format!("{:#x}", kind.0))
                .remedy("give the plug-in a number from 0x100 up"));
        }
        let before = &plug_ins[..at];
        if kind == IfaceKind::SYSTEM || before.iter().any(|other| other.kind() == kind) {
            return Err(added_twice(plug_in));
        }
        let reserved = name.to_ascii_lowercase().parse().is_ok_and(|of: IfaceKind| of != kind);
        if reserved || before.iter().any(|other| other.to_string().eq_ignore_ascii_case(&name)) {
            return Err(Error::new(ErrorKind::InvalidArgument, "add iface")
                .iface(plug_in.clone())
                .context("number", format!("{:#x}", kind.0))
                .remedy("give each iface a name of its own"));
        }
    }
    Ok(())
}

/// Returns the error for an iface whose number another iface has.
fn added_twice(name: &IfaceName) -> Error {
    Error::new(ErrorKind::InvalidArgument, "add iface")
        .iface(name.clone())
        .context("number", format!("{:#x}", name.kind().0))
        .remedy("add each iface once, and give each plug-in a number of its own, from 0x100 up")
}

/// The names of the vendor and plug-in ifaces to start, in lower case.
#[derive(Debug)]
struct Filter(BTreeSet<String>);

impl Filter {
    fn parse(names: &str, plug_ins: &[IfaceName]) -> Result<Self> {
        let mut admitted = BTreeSet::new();
        for name in names.split([';', ',']).map(str::trim).filter(|name| !name.is_empty()) {
            let name = name.to_ascii_lowercase();
            let plugged_in =
                plug_ins.iter().any(|known| known.to_string().eq_ignore_ascii_case(&name));
            if !plugged_in {
                name.parse::<IfaceKind>().map_err(|_| {
                    let vendors = VENDORS.map(|(kind, _)| kind.to_string());
                    let added = plug_ins.iter().map(IfaceName::to_string);
                    let accepted: Vec<_> =
                        ["system".to_owned()].into_iter().chain(vendors).chain(added).collect();
                    Error::new(ErrorKind::InvalidArgument, "iface filter")
                        .context("name", &name)
                        .context("filter", names)
                        .remedy(format!("{name} is no iface: use {}", accepted.join(", ")))
                })?;
            }
            admitted.insert(name);
        }
        Ok(Self(admitted))
    }

    fn admits(&self, name: &str) -> bool {
        self.0.contains(&name.to_ascii_lowercase())
    }
}

/// Returns the error for an iface that the builder or the environment excludes.
fn left_out(kind: impl Into<IfaceName>, why: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "start iface").iface(kind).context("why", why)
}

/// Returns the error for an iface that the [`Filter`] does not name. `by_builder` is true if the
/// filter is that of [`Builder::ifaces`], and false if it is that of `FI_HMEM`.
fn filtered_out(kind: IfaceKind, name: &str, by_builder: bool) -> Error {
    let (why, setting) = match by_builder {
        true => ("Builder::ifaces names only other ifaces", "Builder::ifaces"),
        false => ("FI_HMEM names only other ifaces", env::HMEM),
    };
    left_out(IfaceName::new(kind, name), why).remedy(format!("add {name} to {setting}"))
}

/// A function that starts a vendor's iface. The argument is false if the function must not read the
/// environment.
type Start = fn(bool) -> Result<Arc<dyn Iface>>;

const VENDORS: [(IfaceKind, Start); 5] = [
    (IfaceKind::CUDA, start_cuda),
    (IfaceKind::ROCR, start_rocr),
    (IfaceKind::ZE, start_ze),
    (IfaceKind::NEURON, start_neuron),
    (IfaceKind::SYNAPSEAI, start_synapseai),
];

macro_rules! vendor {
    ($start:ident, $feature:literal, $kind:expr, $iface:ty) => {
        #[cfg(feature = $feature)]
        fn $start(environment: bool) -> Result<Arc<dyn Iface>> {
            let builder = <$iface>::builder();
            let opened = match environment {
                true => builder
                    .open()
                    .map_err(|error| env::of_library(<$iface>::LIBRARY_VARIABLE, error)),
                false => builder.without_environment().open(),
            };
            Ok(Arc::new(opened?))
        }

        #[cfg(not(feature = $feature))]
        fn $start(_: bool) -> Result<Arc<dyn Iface>> {
            Err(Error::new(ErrorKind::Unsupported, "start iface")
                .iface($kind)
                .context("feature", $feature)
                .remedy(concat!("build hmem with the cargo feature `", $feature, "`")))
        }
    };
}

vendor!(start_cuda, "cuda", IfaceKind::CUDA, hmem_iface_cuda::Cuda);
vendor!(start_rocr, "rocr", IfaceKind::ROCR, hmem_iface_rocr::Rocr);
vendor!(start_ze, "ze", IfaceKind::ZE, hmem_iface_ze::LevelZero);
vendor!(start_neuron, "neuron", IfaceKind::NEURON, hmem_iface_accelerators::neuron::Neuron);
vendor!(
    start_synapseai,
    "synapseai",
    IfaceKind::SYNAPSEAI,
    hmem_iface_accelerators::synapseai::SynapseAi
);

/// A provider, and the names of its NICs that cannot be opened, with the errors.
type Started = (Arc<dyn Provider>, Vec<(String, Error)>);

#[cfg(feature = "verbs")]
fn start_verbs(environment: bool) -> Result<Started> {
    use hmem_provider_verbs::Verbs;

    let builder = Verbs::builder();
    let builder = if environment { builder } else { builder.without_environment() };
    let verbs = builder.build()?;
    // Fails if libibverbs finds no device. The provider then counts as absent.
    verbs.nics()?;
    let left_out = verbs.left_out()?.into_iter();
    let left_out = left_out.map(|(device, why)| (format!("verbs/{device}"), why)).collect();
    Ok((Arc::new(verbs), left_out))
}

#[cfg(not(feature = "verbs"))]
fn start_verbs(_: bool) -> Result<Started> {
    Err(Error::new(ErrorKind::Unsupported, "start provider")
        .provider("verbs")
        .context("feature", "verbs")
        .remedy("build hmem with the cargo feature `verbs`"))
}
