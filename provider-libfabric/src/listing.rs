//! The NICs that libfabric lists, and the domains that this provider opens on them.

#![allow(unsafe_code, reason = "calls libfabric on lists of `fi_info`, and opens domains")]

use std::{
    env,
    ffi::{CString, OsStr, c_int},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use hmem_core::{
    Error, ErrorKind, MrMode, ProcessMark, Result,
    library::SharedLibrary,
    provider::{ProgressModel, ProviderAttr},
};
use parking_lot::ReentrantMutex;

use super::{
    attr::{DomainAttr, Overrides},
    errors,
    fellows::Fellows,
    library::{Names, names},
    open::OpenDomain,
    own_cache,
    plan::Limits,
    region::LOCAL_RIGHTS,
    sys::{self, Functions, fi_info, fid, fid_domain, fid_fabric},
};

/// The newest API version that the provider asks for. It is the first with dma-bufs.
const API: u32 = sys::version(1, 20);

/// The API version since which `ofi_rxm` reports the length of a peer's write with data.
const REPORTED_LENGTHS: u32 = sys::version(1, 18);

/// The mode bits that this crate offers to libfabric. For ENDPOINT, the provider itself binds and
/// enables the regions. The other bits are up to the application.
const OFFER: c_int = sys::FI_MR_LOCAL
    | sys::FI_MR_RAW
    | sys::FI_MR_VIRT_ADDR
    | sys::FI_MR_ALLOCATED
    | sys::FI_MR_PROV_KEY
    | sys::FI_MR_ENDPOINT
    | sys::FI_MR_HMEM;

/// The capabilities that each NIC must have.
const NEEDED: u64 = sys::FI_MSG | sys::FI_TAGGED | sys::FI_RMA;

/// Core providers that claim to make progress by themselves, but accept connections only while the
/// application reads completions.
const CALLED: [&str; 2] = ["net", "tcp"];

/// The environment variable with the folders of libfabric's plug-ins.
const PLUG_INS: &str = "FI_PROVIDER_PATH";

const LIST: &str = "list NICs";

/// A list that `fi_getinfo` returned. Dropping the value frees it.
struct InfoList {
    functions: Functions,
    first: *mut fi_info,
}

// SAFETY: the list belongs to no thread, and is not changed before it is freed.
unsafe impl Send for InfoList {}
// SAFETY: shared references only read the list.
unsafe impl Sync for InfoList {}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: `fi_getinfo` allocated the list, and it is freed only here.
        unsafe { (self.functions.fi_freeinfo)(self.first) };
    }
}

/// An entry of an [`InfoList`]. The value keeps the whole list allocated.
#[derive(Clone)]
pub(super) struct Entry {
    _list: Arc<InfoList>,
    info: *mut fi_info,
}

// SAFETY: the entry is part of the list, which the value keeps and nothing changes.
unsafe impl Send for Entry {}
// SAFETY: the entry is part of the list, which the value keeps and nothing changes.
unsafe impl Sync for Entry {}

impl Entry {
    pub(super) fn info(&self) -> &fi_info {
        // SAFETY: the list is valid until it is dropped, and nothing changes it.
        unsafe { &*self.info }
    }

    /// Returns the pointer for calls of libfabric, which do not change the entry.
    pub(super) fn as_ptr(&self) -> *mut fi_info {
        self.info
    }

    pub(super) fn limits(&self) -> Limits {
        let info = self.info();
        // SAFETY: `fi_getinfo` returned the entry with all structs.
        unsafe {
            let (longest, data) = ((*info.ep_attr).max_msg_size, (*info.domain_attr).cq_data_size);
            Limits::of(&*info.tx_attr, &*info.rx_attr, longest, data)
        }
    }

    fn names(&self) -> Option<Names> {
        // SAFETY: `fi_getinfo` returned the entry with all structs and strings.
        unsafe { names(self.info()) }
    }
}

/// A NIC: the entry with which domains are opened, and its attributes.
struct ListedNic {
    names: Names,
    plain: (Entry, DomainAttr),
    /// The entry for applications with device memory (`FI_HMEM`), if the NIC has one.
    hmem: Option<(Entry, DomainAttr)>,
}

impl ListedNic {
    /// Sets the entry for device memory (`FI_HMEM`). Ignores a second entry for device memory, and
    /// one whose support of atomics differs from that of the plain entry. A domain has one mode
    /// with and without device memory, so both entries get the mode bits of both.
    fn add(&mut self, entry: Entry, mut attr: DomainAttr, hmem: u64) {
        let plain = &mut self.plain.1;
        let atomics = |attr: &DomainAttr| attr.caps & sys::FI_ATOMIC;
        if hmem == 0 || self.hmem.is_some() || atomics(plain) != atomics(&attr) {
            return;
        }
        let (own, other) = (&mut plain.provider_attr, &mut attr.provider_attr);
        own.required_mr_mode |= other.required_mr_mode;
        own.basic_mr_mode |= other.basic_mr_mode;
        (other.required_mr_mode, other.basic_mr_mode) = (own.required_mr_mode, own.basic_mr_mode);
        self.hmem = Some((entry, attr));
    }

    /// Returns the attributes of the NIC without device memory. Only the imports and the
    /// registration flags are those with device memory.
    fn attr(&self) -> ProviderAttr {
        let mut attr = self.plain.1.provider_attr.clone();
        if let Some((_, hmem)) = &self.hmem {
            attr.imports = hmem.provider_attr.imports;
            attr.flags |= hmem.provider_attr.flags;
        }
        attr
    }
}

/// The loaded library, and the choice of NICs.
pub(super) struct Listing {
    pub(super) functions: Functions,
    /// The API version for which domains are opened.
    api: u32,
    /// The name of the only provider to list; `None` for all.
    pub(super) filter: Option<String>,
    overrides: Overrides,
    /// True if each domain has a thread that makes progress.
    pub(super) progress_thread: bool,
    pub(super) fellows: Arc<Fellows>,
    pub(super) process: ProcessMark,
}

/// Options of [`Builder`](super::Builder) for listed NICs.
#[derive(Debug, Default)]
pub(super) struct ListingOptions {
    pub(super) filter: Option<String>,
    pub(super) overrides: Overrides,
    pub(super) progress_thread: bool,
}

impl Listing {
    /// Lists the NICs for the first time, with libfabric's registration cache switched off.
    ///
    /// # Errors
    /// The errors of [`Self::nics`].
    ///
    /// # Safety
    /// No other thread accesses the environment of the process during the call.
    pub(super) unsafe fn open(
        functions: Functions,
        newest: u32,
        options: ListingOptions,
        process: ProcessMark,
    ) -> Result<Self> {
        let ListingOptions { filter, overrides, progress_thread } = options;
        let (api, fellows) = (API.min(newest), Fellows::of_process(process)?);
        let this = Self { functions, api, filter, overrides, progress_thread, fellows, process };
        let before = env::var_os(own_cache::MONITOR);
        // SAFETY: the caller promises that no other thread accesses the environment.
        unsafe { env::set_var(own_cache::MONITOR, "disabled") };
        let listed = this.list();
        // The library has read the variable, which programs set for other caches too.
        // SAFETY: the caller promises that no other thread accesses the environment.
        unsafe {
            match before {
                Some(value) => env::set_var(own_cache::MONITOR, value),
                None => env::remove_var(own_cache::MONITOR),
            }
        }
        listed.map(|_| this)
    }

    /// Returns the attributes of the NICs that libfabric lists now.
    ///
    /// # Errors
    /// - InvalidArgument: libfabric has no provider of the name in the filter.
    /// - Unavailable: libfabric lists no NIC, or the plug-in of the provider cannot be loaded.
    /// - The error of `fi_getinfo`.
    pub(super) fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(self.list()?.iter().map(ListedNic::attr).collect())
    }

    fn list(&self) -> Result<Vec<ListedNic>> {
        let mut nics = self.find(self.filter.as_deref())?;
        if let Some(filter) = &self.filter {
            nics.retain(|nic| nic.names.provider == *filter);
        }
        if !nics.is_empty() {
            return Ok(nics);
        }
        let refuse = |kind| Error::new(kind, LIST).provider("libfabric");
        let Some(filter) = &self.filter else {
            return Err(refuse(ErrorKind::Unavailable)
                .context("library", self.functions.library())
                .remedy("bring a network interface up, or install a provider of libfabric"));
        };
        if let Some(error) = self.refused_plug_in(filter) {
            return Err(error);
        }
        let mut known: Vec<_> =
            self.find(None)?.into_iter().map(|nic| nic.names.provider).collect();
        known.sort();
        known.dedup();
        Err(refuse(ErrorKind::InvalidArgument)
            .context("asked", filter)
            .context("library", self.functions.library())
            .context("known", known.join(" "))
            .remedy(format!("name a provider that libfabric lists here: {}", known.join(", "))))
    }

    /// Returns the NICs with RDM endpoints, each once, in libfabric's order.
    ///
    /// Some providers list a NIC only if more mode bits are offered, or fewer capabilities are
    /// asked for. So this function asks several times. It prefers entries with fewer mode bits and
    /// with atomics.
    fn find(&self, provider: Option<&str>) -> Result<Vec<ListedNic>> {
        let mut nics: Vec<ListedNic> = Vec::new();
        for hmem in [0, sys::FI_HMEM] {
            for (offer, atomics) in
                [(0, sys::FI_ATOMIC), (0, 0), (OFFER, sys::FI_ATOMIC), (OFFER, 0)]
            {
                for entry in self.ask(NEEDED | atomics | hmem, offer, provider)? {
                    let (Some(names), Some(attr)) = (entry.names(), self.attr(&entry)) else {
                        continue;
                    };
                    let nic = nics.iter_mut().find(|nic| nic.names == names);
                    match nic {
                        Some(nic) => nic.add(entry, attr, hmem),
                        None => nics.push(ListedNic { names, plain: (entry, attr), hmem: None }),
                    }
                }
            }
        }
        Ok(nics)
    }

    /// Calls `fi_getinfo`. Returns no entries if no provider meets the hints.
    fn ask(&self, caps: u64, mr_mode: c_int, provider: Option<&str>) -> Result<Vec<Entry>> {
        let name = provider.map(CString::new).transpose().map_err(|_| {
            Error::new(ErrorKind::InvalidArgument, LIST)
                .provider("libfabric")
                .remedy("name a provider without zero bytes")
        })?;
        let functions = &self.functions;
        let mut first = ptr::null_mut();
        // SAFETY: `fi_dupinfo` allocates the hints with their structs. They get the name for the
        // duration of the call, and `fi_freeinfo` frees them without it.
        let returned = unsafe {
            let hints = (functions.fi_dupinfo)(ptr::null());
            if hints.is_null() {
                return Err(errors::call("libfabric", "fi_dupinfo", -sys::FI_ENOMEM));
            }
            ((*hints).caps, (*hints).mode) = (caps, sys::FI_CONTEXT | sys::FI_CONTEXT2);
            (*(*hints).ep_attr).r#type = sys::FI_EP_RDM;
            (*(*hints).domain_attr).mr_mode = mr_mode;
            let asked = name.as_ref().map_or(ptr::null(), |name| name.as_ptr());
            (*(*hints).fabric_attr).prov_name = asked.cast_mut();
            let none = ptr::null();
            let getinfo = functions.fi_getinfo;
            let returned = getinfo(self.api, none, none, 0, hints, &raw mut first);
            (*(*hints).fabric_attr).prov_name = ptr::null_mut();
            (functions.fi_freeinfo)(hints);
            returned
        };
        match returned {
            0 => {}
            none if none == -sys::FI_ENODATA => return Ok(Vec::new()),
            returned => return Err(errors::call("libfabric", "fi_getinfo", returned)),
        }
        let list = Arc::new(InfoList { functions: functions.clone(), first });
        // SAFETY: each entry of the list is null or valid.
        let next = |info: &*mut fi_info| unsafe { info.as_ref() }.map(|info| info.next);
        let infos = std::iter::successors(Some(first), next).filter(|info| !info.is_null());
        Ok(infos.map(|info| Entry { _list: Arc::clone(&list), info }).collect())
    }

    /// Returns the attributes of an entry, or `None` if the entry lacks a part.
    fn attr(&self, entry: &Entry) -> Option<DomainAttr> {
        let info = entry.info();
        // SAFETY: `fi_getinfo` returned the entry, whose pointers are null or valid.
        let domain = unsafe { info.domain_attr.as_ref() }?;
        let own_cache =
            own_cache::in_force(&entry.names()?.provider, domain.mr_mode, |name| match name {
                own_cache::MONITOR => Some("disabled".to_owned()),
                _ => env::var(name).ok(),
            });
        // SAFETY: `fi_getinfo` returned the entry with its structs.
        let mut attr = unsafe {
            let names = entry.names()?;
            DomainAttr::of(info, domain, &names, self.api, self.overrides, own_cache)
        };
        let endpoint = MrMode::from_bits_truncate(domain.mr_mode.unsigned_abs()) & MrMode::ENDPOINT;
        attr.provider_attr.required_mr_mode |= endpoint;
        attr.provider_attr.basic_mr_mode |= endpoint;
        // The upper half of the data carries the length of a write, unless libfabric reports it.
        let reported = if self.api >= REPORTED_LENGTHS { 4 } else { 8 };
        attr.provider_attr.cq_data_size = if domain.cq_data_size >= reported { 4 } else { 0 };
        // The staging buffers serve all endpoints, and are bound to none. So in both modes together
        // their descriptor would not be valid.
        let bound = sys::FI_MR_ENDPOINT | sys::FI_MR_LOCAL;
        if domain.mr_mode & bound != bound {
            attr.provider_attr.imports.staged = true;
            attr.provider_attr.staged_access = LOCAL_RIGHTS;
        }
        let provider = self.provider_of(entry);
        if self.progress_thread {
            attr.provider_attr.progress = ProgressModel::Thread;
        } else if provider.split(';').any(|layer| CALLED.contains(&layer)) {
            attr.provider_attr.progress = ProgressModel::Manual;
        }
        Some(attr)
    }

    /// Returns the name of an entry's provider.
    pub(super) fn provider_of(&self, entry: &Entry) -> String {
        entry.names().map(|names| names.provider).unwrap_or_default()
    }

    /// Loads libfabric's plug-in with the name of a provider, and returns the error if that fails.
    /// libfabric only logs this error, and only if logging is on.
    fn refused_plug_in(&self, provider: &str) -> Option<Error> {
        let folders = match env::var_os(PLUG_INS) {
            Some(path) => path.as_bytes().split(|byte| *byte == b':').map(folder).collect(),
            None => vec![Path::new(self.functions.library()).parent()?.join("libfabric")],
        };
        let files = provider
            .split(';')
            .flat_map(|layer| [format!("{layer}-fi.so"), format!("lib{layer}-fi.so")]);
        let files: Vec<_> = files.collect();
        let paths = folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file)));
        paths.filter(|path| path.is_file()).find_map(|path| {
            let refused = Error::new(ErrorKind::Unavailable, "load plug-in")
                .provider("libfabric")
                .remedy("repair the plug-in of libfabric, or install the libraries it needs");
            // SAFETY: the owner of the process named the folder, from which libfabric has loaded
            // or tried to load the same plug-in.
            match unsafe { SharedLibrary::open(&path, refused) } {
                Ok(plug_in) => {
                    plug_in.keep_loaded();
                    None
                }
                Err(error) => Some(error),
            }
        })
    }

    /// Opens a domain on the NIC of this name, or on the first NIC. `hmem` is true if the
    /// application uses device memory. Also returns the entry with which the domain was opened.
    ///
    /// # Errors
    /// - InvalidArgument: libfabric lists no NIC of this name now.
    /// - The errors of [`Self::nics`], `fi_fabric` and `fi_domain`.
    pub(super) fn open_domain(
        &self,
        name: Option<&str>,
        hmem: bool,
    ) -> Result<(Arc<OpenDomain>, Entry)> {
        let nics = self.list()?;
        let own_name = |nic: &ListedNic| nic.plain.1.provider_attr.nic.name.clone();
        let found = match name {
            None => nics.first(),
            Some(name) => nics.iter().find(|nic| own_name(nic) == name),
        };
        let nic = found.ok_or_else(|| {
            let known: Vec<_> = nics.iter().map(own_name).collect();
            Error::new(ErrorKind::InvalidArgument, "open domain")
                .provider("libfabric")
                .context("nic", name.unwrap_or_default())
                .context("known", known.join(" "))
                .remedy("name a NIC of Provider::nics")
        })?;
        let (entry, attr) = match &nic.hmem {
            Some(with) if hmem => with.clone(),
            _ => nic.plain.clone(),
        };
        let owner = OwnDomain::open(&self.functions, &entry, &attr)?;
        let open = OpenDomain {
            domain: owner.domain,
            attr,
            own: true,
            endpoint: None,
            lock: ReentrantMutex::default(),
            owner: Some(Box::new(owner)),
            process: self.process,
        };
        Ok((Arc::new(open), entry))
    }
}

/// Returns the folder that one element of [`PLUG_INS`] names, without the prefix `@` or `+` of
/// libfabric.
fn folder(element: &[u8]) -> PathBuf {
    let path = element.strip_prefix(b"@").or(element.strip_prefix(b"+")).unwrap_or(element);
    PathBuf::from(OsStr::from_bytes(path))
}

/// A fabric and a domain that this provider opened. Dropping the value closes both.
struct OwnDomain {
    domain: *mut fid_domain,
    fabric: *mut fid_fabric,
    name: String,
    /// The entry with which the domain was opened. Some providers keep pointers to it.
    _entry: Entry,
}

// SAFETY: libfabric's objects belong to no thread, and the value only closes them.
unsafe impl Send for OwnDomain {}
// SAFETY: shared references only read the pointers.
unsafe impl Sync for OwnDomain {}

impl OwnDomain {
    fn open(functions: &Functions, entry: &Entry, attr: &DomainAttr) -> Result<Self> {
        let (domain, fabric, none) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let name = attr.provider_attr.nic.to_string();
        let mut this = Self { domain, fabric, name, _entry: entry.clone() };
        let check = |call, returned| match returned {
            0 => Ok(()),
            returned => Err(errors::call(&attr.provider_attr.nic, call, returned)),
        };
        let attr = entry.info().fabric_attr;
        // SAFETY: `fi_getinfo` returned the attributes, which the entry keeps.
        check("fi_fabric", unsafe { (functions.fi_fabric)(attr, &raw mut this.fabric, none) })?;
        // SAFETY: the fabric was opened just now, so its table is valid.
        let open = unsafe { (*(*this.fabric).ops).domain };
        let open = open.ok_or_else(|| errors::call(&this.name, "fi_domain", -sys::FI_ENOSYS))?;
        // SAFETY: the fabric is open, and belongs to the entry.
        check("fi_domain", unsafe {
            open(this.fabric, entry.as_ptr(), &raw mut this.domain, none)
        })?;
        Ok(this)
    }
}

impl Drop for OwnDomain {
    fn drop(&mut self) {
        for (call, object) in [
            ("fi_close(domain)", self.domain.cast::<fid>()),
            ("fi_close(fabric)", self.fabric.cast()),
        ] {
            if object.is_null() {
                continue;
            }
            // SAFETY: the object is open, and nothing else closes it.
            let returned = unsafe { (*(*object).ops).close.map_or(0, |close| close(object)) };
            if returned != 0 {
                let error = errors::call(&self.name, call, returned);
                tracing::error!(error = %error.full(), "a libfabric object stays open");
                return;
            }
        }
    }
}
