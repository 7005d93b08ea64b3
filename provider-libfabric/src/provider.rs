//! The provider: the NICs that libfabric lists, or a libfabric domain of the program. Applications
//! open domains in it.

#![allow(unsafe_code, reason = "loads the library, and borrows a domain")]

use std::{env, ffi::c_void, fmt, path::PathBuf, sync::Arc};

use hmem_core::{
    Error, ErrorKind, IfaceKind, ProcessMark, Result,
    provider::{DomainRequest, Provider, ProviderAttr, ProviderDomain},
};
use parking_lot::ReentrantMutex;

use super::{
    attr::DomainAttr,
    domain::FabricDomain,
    library::{check_version, load, names, version_text},
    listing::{Listing, ListingOptions},
    open::{OpenDomain, Owner},
    own_cache,
    settings::{EndpointPointer, Settings},
    sys::{self, Functions, fi_info, fid, fid_domain},
};

/// The API version since which `fi_domain_attr::mr_mode` is a set of bits.
const OLDEST_API: u32 = sys::version(1, 5);

/// Builder of a [`Libfabric`] provider.
#[derive(Debug, Default)]
pub struct Builder {
    library: Option<PathBuf>,
    functions: Option<Functions>,
    endpoint: Option<EndpointPointer>,
    listing: ListingOptions,
}

impl Builder {
    /// Loads libfabric from `path`. The default is the path in the environment variable
    /// [`Functions::LIBRARY_VARIABLE`], or else [`Functions::LIBRARY`] in the loader's search path.
    ///
    /// # Safety
    /// The safety rules of [`Functions::load`].
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let builder = hmem_provider_libfabric::Libfabric::builder().library("/tmp/any.so");
    /// ```
    #[must_use]
    pub unsafe fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }

    /// Uses these functions instead of loading libfabric.
    #[must_use]
    pub fn functions(mut self, functions: Functions) -> Self {
        self.functions = Some(functions);
        self
    }

    /// Lists only the NICs of this provider of libfabric, by its full name: `tcp;ofi_rxm`, say.
    /// [`Builder::with_domain`] ignores the name.
    #[must_use]
    pub fn provider(mut self, name: impl Into<String>) -> Self {
        self.listing.filter = Some(name.into());
        self
    }

    /// Sets whether each domain has a thread that makes progress (requirement FAB-06). The
    /// default is no thread.
    ///
    /// The providers `tcp;ofi_rxm`, `shm` and others move bytes only while the application calls
    /// [`CompletionQueue`](hmem_core::provider::CompletionQueue) or
    /// [`Domain::progress`](hmem_core::Domain::progress), on the side of the target too. With the
    /// thread, the application need not call them. [`Builder::with_domain`] ignores the setting.
    #[must_use]
    pub fn progress_thread(mut self, thread: bool) -> Self {
        self.listing.progress_thread = thread;
        self
    }

    /// Sets the endpoint to which regions are bound, unless their request names another
    /// ([`Settings::endpoint`]). The setting matters only in a domain with the mode bit
    /// `FI_MR_ENDPOINT`, where a region without an endpoint is refused.
    ///
    /// # Safety
    /// `endpoint` is null, or an open `fid_ep` of the domain that is passed to
    /// [`Builder::with_domain`]. It stays open until all regions are closed.
    #[must_use]
    pub unsafe fn endpoint(mut self, endpoint: *mut c_void) -> Self {
        // SAFETY: the caller promises an endpoint that outlives all regions.
        self.endpoint = unsafe { Settings::endpoint(endpoint) }.endpoint;
        self
    }

    /// Sets whether the domain imports dma-bufs. By default a domain with `FI_HMEM` of the
    /// providers `verbs`, `efa` and `cxi` imports them. A domain that was opened for an API version
    /// before 1.20 imports none in any case. For true, [`Builder::build`] and
    /// [`Builder::with_domain`] have a safety rule.
    #[must_use]
    pub fn dma_buf(mut self, imports: bool) -> Self {
        self.listing.overrides.dma_buf = Some(imports);
        self
    }

    /// Sets whether libfabric has a registration cache of its own in the domain. By default the
    /// provider, the mode and these variables decide: `FI_MR_CACHE_MONITOR`,
    /// `FI_MR_CACHE_MAX_COUNT` and `FI_EFA_MR_CACHE_ENABLE`. Use this method if the program changed
    /// the variables after it called libfabric for the first time, or configures libfabric in
    /// another way.
    #[must_use]
    pub fn libfabric_cache(mut self, on: bool) -> Self {
        self.listing.overrides.own_cache = Some(on);
        self
    }

    /// Builds the provider for the NICs that libfabric lists (requirement FAB-01). Each NIC is a
    /// domain of one of libfabric's providers, with the name `PROVIDER:DOMAIN`, and has RDM
    /// endpoints. A NIC that libfabric lists for several networks is listed once.
    ///
    /// libfabric's own registration cache is switched off: the call sets the environment variable
    /// `FI_MR_CACHE_MONITOR` to `disabled` for the time in which libfabric reads it. The
    /// variable has no effect if libfabric was in use in this process before. In that case, pass
    /// true to [`Builder::libfabric_cache`] if libfabric's cache is on.
    ///
    /// # Errors
    /// - Unavailable: the library or one of its symbols cannot be loaded, the library is older than
    ///   1.17, it lists no NIC, or the plug-in of the provider cannot be loaded.
    /// - InvalidArgument: libfabric has no provider of the name of [`Builder::provider`]. The
    ///   error lists those that it has.
    /// - The error that `fi_getinfo` reported.
    /// - The errors of [`ProcessMark::current`].
    ///
    /// # Safety
    /// - No other thread reads or writes the environment of the process during the call.
    /// - No transfer uses a region when it is closed, when its last lease ends, or when the
    ///   endpoint of the transfer is closed. libfabric's software providers (`tcp`, `shm`, `udp`,
    ///   and others in part) finish a peer's transfer that has begun, after the region was closed.
    ///   Over `shm` of 2.5, a peer also finishes this side's reads after their endpoint was closed:
    ///   the peer writes to the local memory of reads that were reported as canceled. NICs that end
    ///   the transfers in hardware need no such promise.
    /// - If [`Builder::dma_buf`] was set to true, libfabric's provider imports dma-bufs. The
    ///   providers that do not know `FI_MR_DMABUF` access the memory by its address instead.
    ///
    /// # Examples
    /// ```no_run
    /// use hmem_core::{Result, provider::Provider};
    /// use hmem_provider_libfabric::Libfabric;
    ///
    /// # fn main() -> Result<()> {
    /// // SAFETY: the program has one thread so far, and exchanges messages with its peers before
    /// // it closes regions.
    /// let fabric = unsafe { Libfabric::builder().provider("tcp;ofi_rxm").build() }?;
    /// for nic in fabric.nics()? {
    ///     println!("{}: needs {}, {:?}", nic.nic, nic.required_mr_mode, nic.progress);
    /// }
    /// # Ok(()) }
    /// ```
    pub unsafe fn build(self) -> Result<Libfabric> {
        let process = ProcessMark::current()?;
        // SAFETY: the caller of `Builder::library` promised that the file is libfabric.
        let (functions, version) = unsafe { start(self.functions, self.library) }?;
        let library = functions.library().to_owned();
        // SAFETY: the caller promises that no other thread accesses the environment.
        let listing = unsafe { Listing::open(functions, version, self.listing, process) }?;
        Ok(Libfabric { library, version, source: Source::Listed(Arc::new(listing)) })
    }

    /// Uses a libfabric domain of the program (requirement FAB-11). The provider has one NIC, that
    /// of this domain, and every domain of the provider registers in it.
    ///
    /// `domain` is the `fid_domain`, and `info` the `fi_info` with which the program opened it.
    /// `api_version` is the version that the program passed to `fi_getinfo`, as the C macro
    /// `FI_VERSION` encodes it ([`sys::version`]). The mode, the size of keys and the limits come
    /// from `info`, which the provider does not keep.
    ///
    /// The keys and descriptors of the regions ([`FabricMr`](super::FabricMr)) work in the
    /// program's own requests. The provider closes nothing but its own regions.
    ///
    /// The provider and all objects that are opened from it hold `keep`, and the last of them drops
    /// `keep`. Pass the value that owns the domain, such as an `Arc` of the program's type. Regions
    /// then cannot outlive the domain. Pass `()` if the domain is never closed. A forked child
    /// never drops `keep`. If this call fails, it drops `keep`.
    ///
    /// If libfabric has a registration cache of its own in the domain
    /// ([`ProviderAttr::driver_cache`]), the cache of this library keeps no region there, and its
    /// monitors are not started.
    ///
    /// # Errors
    /// - Unavailable: the library or one of its symbols cannot be loaded, or the library is older
    ///   than 1.17. The error names the library, with the loader's reason or the symbol.
    /// - InvalidArgument: a pointer is null, `domain` is another object of libfabric, `info` lacks
    ///   a name, or `api_version` is newer than the library.
    /// - Unsupported: `api_version` is older than 1.5.
    /// - The errors of [`ProcessMark::current`].
    ///
    /// # Safety
    /// - `domain` is null, or an open `fid_domain` of the same copy of libfabric that this provider
    ///   loads (or was given). It stays open at least until `keep` is dropped.
    /// - `info` is null, or the `fi_info` with which the domain was opened, and valid during the
    ///   call. The provider cannot detect the `fi_info` of another domain, because a `fid_domain`
    ///   has no name.
    /// - Unless the domain was opened with `FI_THREAD_SAFE`, the program holds
    ///   [`FabricDomain::lock`] around each of its own calls of the domain and its objects that may
    ///   run at the same time as a call of this library.
    /// - No transfer uses a region when it is closed, or when its last lease ends. libfabric's
    ///   software providers finish a peer's transfer that has begun, after the region was closed.
    /// - If [`Builder::dma_buf`] was set to true, libfabric's provider imports dma-bufs. The
    ///   providers that do not know `FI_MR_DMABUF` access the memory by its address instead.
    ///
    /// Crates that link libfabric or load `libfabric.so.1` use the copy that this provider loads by
    /// default. A statically linked libfabric is another copy: pass its functions to
    /// [`Builder::functions`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::{ffi::c_void, sync::Arc};
    ///
    /// use hmem_core::{Domain, DomainAttr, Registry, Result};
    /// use hmem_p2p::path::DefaultPathSelector;
    /// use hmem_provider_libfabric::{Libfabric, sys};
    ///
    /// /// A type of another crate that owns a libfabric domain and closes it on drop.
    /// struct Fabric {
    ///     domain: *mut c_void,
    ///     info: *mut c_void,
    /// }
    /// # // SAFETY: libfabric's objects belong to no thread.
    /// # unsafe impl Send for Fabric {}
    /// # // SAFETY: the domain is opened with FI_THREAD_SAFE.
    /// # unsafe impl Sync for Fabric {}
    ///
    /// /// Opens a domain of hmem in the domain of the other crate.
    /// fn open_in(owner: &Arc<Fabric>, registry: Arc<Registry>) -> Result<Domain> {
    ///     let (version, keep) = (sys::version(1, 17), Arc::clone(owner));
    ///     let builder = Libfabric::builder();
    ///     // SAFETY: the `Arc` keeps the domain open. The crate opened it for this version, with
    ///     // FI_THREAD_SAFE, and closes regions when no transfer uses them.
    ///     let fabric = unsafe { builder.with_domain(owner.domain, owner.info, version, keep) }?;
    ///     let paths = Arc::new(DefaultPathSelector::new());
    ///     Domain::open(&fabric, registry, paths, DomainAttr::default())
    /// }
    /// ```
    pub unsafe fn with_domain(
        self,
        domain: *mut c_void,
        info: *const c_void,
        api_version: u32,
        keep: impl Send + Sync + 'static,
    ) -> Result<Libfabric> {
        let owner: Owner = Box::new(keep);
        let (domain, info): (*mut fid_domain, *const fi_info) = (domain.cast(), info.cast());
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "with_domain").provider("libfabric").remedy(why)
        };
        let invalid = |why| refuse(ErrorKind::InvalidArgument, why);
        let process = ProcessMark::current()?;
        // SAFETY: the caller of `Builder::library` promised that the file is libfabric.
        let (functions, newest) = unsafe { start(self.functions, self.library) }?;
        // SAFETY: the caller promises null or a valid `fi_info`.
        let info = unsafe { info.as_ref() };
        let info = info.ok_or_else(|| invalid("pass the fi_info of the domain: it is null"))?;
        // SAFETY: the caller promises null or an open domain.
        let class = unsafe { domain.cast::<fid>().as_ref() }.map(|fid| fid.fclass);
        match class {
            Some(sys::FI_CLASS_DOMAIN) => {}
            None => return Err(invalid("pass a domain of fi_domain: it is null")),
            Some(class) => {
                let why = "pass a domain of fi_domain: this is another object, or a closed domain";
                return Err(invalid(why).context("class", class));
            }
        }
        let version = version_text(api_version);
        if api_version > newest {
            return Err(invalid("pass the API version of the program's fi_getinfo")
                .context("version", version)
                .context("library", functions.library())
                .context("newest", version_text(newest)));
        }
        if api_version < OLDEST_API {
            let why = "open the domain for API version 1.5 or newer";
            return Err(refuse(ErrorKind::Unsupported, why).context("version", version));
        }
        // SAFETY: the caller promises a valid `fi_info`.
        let (named, attr) = unsafe { (names(info), info.domain_attr.as_ref()) };
        let (Some(named), Some(attr)) = (named, attr) else {
            return Err(invalid("pass an fi_info of fi_getinfo: it names no provider or domain"));
        };
        let variable = |name: &str| env::var(name).ok();
        let own_cache = own_cache::in_force(&named.provider, attr.mr_mode, variable);
        // SAFETY: the caller promises a valid `fi_info`.
        let attr = unsafe {
            DomainAttr::of(info, attr, &named, api_version, self.listing.overrides, own_cache)
        };
        Ok(Libfabric {
            library: functions.library().to_owned(),
            version: newest,
            source: Source::Borrowed(Arc::new(OpenDomain {
                domain,
                attr,
                own: false,
                endpoint: self.endpoint,
                lock: ReentrantMutex::default(),
                owner: Some(owner),
                process,
            })),
        })
    }
}

/// Loads libfabric from `path`, unless the caller passed its functions. Also returns its version.
///
/// # Safety
/// The file at `path` follows the safety rules of [`Functions::load`].
unsafe fn start(functions: Option<Functions>, path: Option<PathBuf>) -> Result<(Functions, u32)> {
    let functions = match functions {
        Some(functions) => functions,
        // SAFETY: the caller promises that the file is libfabric or a replacement of it.
        None => unsafe { load(path.as_deref()) }?,
    };
    let version = check_version(&functions)?;
    Ok((functions, version))
}

/// Provider for the NICs that libfabric lists ([`Builder::build`]), or for a libfabric domain of
/// the program ([`Builder::with_domain`]).
#[derive(Clone)]
pub struct Libfabric {
    library: String,
    version: u32,
    source: Source,
}

/// The NICs or the domain that the provider offers.
#[derive(Clone)]
enum Source {
    Listed(Arc<Listing>),
    Borrowed(Arc<OpenDomain>),
}

impl Libfabric {
    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Returns the name or path from which libfabric was loaded.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Returns the newest API version of the library, as (major, minor).
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }
}

impl Provider for Libfabric {
    fn name(&self) -> &str {
        "libfabric"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        match &self.source {
            Source::Listed(listing) => {
                listing.process.check("list NICs")?;
                listing.nics()
            }
            Source::Borrowed(open) => Ok(vec![open.attr.provider_attr.clone()]),
        }
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        let open = match &self.source {
            Source::Listed(listing) => {
                listing.process.check("open domain")?;
                // libfabric has numbers for these ifaces alone.
                let known = IfaceKind::CUDA..=IfaceKind::SYNAPSEAI;
                let devices = request.registry.iter().any(|iface| known.contains(&iface.kind()));
                let hmem = request.hmem && devices;
                let (open, entry) = listing.open_domain(request.nic.as_deref(), hmem)?;
                let registry = Arc::clone(&request.registry);
                let domain = FabricDomain::open(Arc::clone(&open))?;
                return Ok(Arc::new(domain.with_endpoints(
                    listing,
                    entry,
                    registry,
                    request.staging,
                )?));
            }
            Source::Borrowed(open) => {
                open.process.check("open domain")?;
                let nic = &open.attr.provider_attr.nic;
                if request.nic.as_ref().is_some_and(|asked| *asked != nic.name) {
                    return Err(Error::new(ErrorKind::InvalidArgument, "open domain")
                        .provider(nic.to_string())
                        .context("nic", request.nic.as_deref().unwrap_or_default())
                        .remedy("name the NIC of the domain that was brought along, or none"));
                }
                Arc::clone(open)
            }
        };
        Ok(Arc::new(FabricDomain::open(open)?))
    }
}

impl fmt::Debug for Libfabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Libfabric")
            .field("library", &self.library)
            .field("version", &version_text(self.version))
            .field("source", &self.source)
            .finish()
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listed(listing) => f.debug_tuple("Listed").field(&listing.filter).finish(),
            Self::Borrowed(open) => {
                f.debug_tuple("Borrowed").field(&open.attr.provider_attr.nic).finish()
            }
        }
    }
}
