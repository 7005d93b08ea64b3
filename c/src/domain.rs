//! Domains: open NICs, and the protection domains and libfabric domains of the program.

#![allow(unsafe_code, reason = "reads and writes through pointers that C code passes")]

use std::{
    ffi::{c_char, c_void},
    ptr,
    sync::Arc,
};

use hmem::{
    Address, AddressRange, CacheAttr, Domain, DomainAttr, Error, ErrorKind, MrMode, Rejected,
    Result, libfabric::Libfabric, path::P2pPolicy, provider::Provider, verbs::Verbs,
};
use hmem_cli::{explain::explain_nic, machine::ProviderNic};

use crate::{
    call::{Call, Growing, Handle},
    error::hmem_error,
    library::{
        Library, check_flags, explain_args, hmem_library, hmem_selection, report_failed,
        set_explanation,
    },
    owner::{Owner, hmem_release},
};

/// An open domain, which registers memory with one NIC. Any number of threads may use it at once.
#[derive(Debug)]
pub struct hmem_domain {
    _opaque: (),
}

/// The state behind an [`hmem_domain`].
#[derive(Debug)]
pub(crate) struct OpenDomain {
    pub(crate) domain: Domain,
    nic: ProviderNic,
    pub(crate) library: Arc<Library>,
}

impl Handle for hmem_domain {
    type State = Box<OpenDomain>;
    const NAME: &'static str = "hmem_domain";
}

/// A protection domain of libibverbs: `struct ibv_pd` of `infiniband/verbs.h`.
#[derive(Debug)]
pub struct ibv_pd {
    _opaque: (),
}

/// A domain of libfabric: `struct fid_domain` of `rdma/fi_domain.h`.
#[derive(Debug)]
pub struct fid_domain {
    _opaque: (),
}

/// The description of a NIC by libfabric: `struct fi_info` of `rdma/fabric.h`.
#[derive(Debug)]
pub struct fi_info {
    _opaque: (),
}

/// Gives the domain a registration cache (`hmem_cache_get`).
pub const HMEM_DOMAIN_CACHE: u64 = 1;
/// Merges cached registrations that overlap or touch.
pub const HMEM_DOMAIN_CACHE_MERGE: u64 = 2;

/// Uses direct access to device memory if possible, and staged copies otherwise.
pub const HMEM_P2P_ENABLED: u64 = 0;
/// Uses direct access to device memory, or fails.
pub const HMEM_P2P_REQUIRED: u64 = 1;
/// Always uses staged copies for device memory.
pub const HMEM_P2P_DISABLED: u64 = 2;

/// Settings of a domain.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_domain_attr {
    /// The size of this structure in bytes: `sizeof(hmem_domain_attr)`.
    pub size: usize,
    /// HMEM_DOMAIN_ flags.
    pub flags: u64,
    /// One of the HMEM_P2P_ policies.
    pub p2p: u64,
    /// The largest number of cached regions. 0 means the setting of the environment.
    pub cache_max_count: u64,
    /// The largest total size of cached regions in bytes. 0 means the setting of the environment.
    pub cache_max_bytes: u64,
    /// The function that the library calls when neither the domain nor a region uses the program's
    /// protection domain or libfabric domain any more. If the domain fails to open, the library
    /// does not call the function. Must be null for `hmem_domain_open`.
    pub release: hmem_release,
    /// The argument of `release`.
    pub context: *mut c_void,
}

// SAFETY: a size, numbers of 64 bits, a function that may be null, and an address.
unsafe impl Growing for hmem_domain_attr {}

/// Counts of a domain's registration cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_cache_counts {
    /// The size of this structure in bytes: `sizeof(hmem_cache_counts)`.
    pub size: usize,
    /// The number of lookups that found a region.
    pub hits: u64,
    /// The number of lookups that registered memory, or failed.
    pub misses: u64,
    /// The number of misses whose region the cache did not keep.
    pub uncached: u64,
    /// The number of regions that were removed to make room.
    pub evictions: u64,
    /// The number of regions in the cache.
    pub entries: u64,
    /// The total size of the regions in the cache, in bytes.
    pub bytes: u64,
    /// The number of cached regions that are in use.
    pub in_use: u64,
}

// SAFETY: a size and numbers of 64 bits.
unsafe impl Growing for hmem_cache_counts {}

/// Converts the attributes of a domain. The returned owner calls `release` on drop, once it was
/// accepted.
///
/// # Safety
/// `attr` is null, or a structure as large as its field `size` says. Any thread may call `release`.
unsafe fn domain_attr(
    call: Call,
    attr: *const hmem_domain_attr,
) -> Result<(DomainAttr, Arc<Owner>)> {
    // SAFETY: the caller promises null or a structure.
    let given = unsafe { call.attr("attr", attr) }?;
    check_flags(call, given.flags, HMEM_DOMAIN_CACHE | HMEM_DOMAIN_CACHE_MERGE)?;
    let mut cache = CacheAttr::default();
    if given.cache_max_count > 0 {
        cache = cache.max_count(usize::try_from(given.cache_max_count).unwrap_or(usize::MAX));
    }
    if given.cache_max_bytes > 0 {
        cache = cache.max_bytes(given.cache_max_bytes);
    }
    if given.flags & HMEM_DOMAIN_CACHE_MERGE != 0 {
        cache = cache.merge(true);
    }
    let p2p = match given.p2p {
        HMEM_P2P_ENABLED => P2pPolicy::Enabled,
        HMEM_P2P_REQUIRED => P2pPolicy::Required,
        HMEM_P2P_DISABLED => P2pPolicy::Disabled,
        unknown => {
            let error = call.invalid("p2p", "use one of the HMEM_P2P_ policies of hmem.h");
            return Err(error.context("policy", unknown));
        }
    };
    let attr = DomainAttr::default();
    let attr = DomainAttr {
        // `hmem_region_raw_key` returns raw keys.
        mr_mode: attr.mr_mode | MrMode::RAW,
        cache: (given.flags & HMEM_DOMAIN_CACHE != 0).then_some(cache),
        p2p,
        ..attr
    };
    // SAFETY: the caller promises that any thread may call the function.
    Ok((attr, Arc::new(unsafe { Owner::new(given.release, given.context) })))
}

impl OpenDomain {
    fn open(library: &Arc<Library>, nic: ProviderNic, attr: DomainAttr) -> Result<Self> {
        let attr = DomainAttr { nic: Some(nic.attr.nic.name.clone()), ..attr };
        let domain = library.machine.hmem.domain_on(&**nic.provider(), attr)?;
        Ok(Self { domain, nic, library: Arc::clone(library) })
    }

    /// Opens a domain in a protection domain or libfabric domain of the program. `provider` has one
    /// NIC: that of the program's domain.
    fn open_brought(
        library: &Arc<Library>,
        provider: impl Provider + 'static,
        attr: DomainAttr,
        note: &'static str,
    ) -> Result<Self> {
        let nic = provider.nics()?.into_iter().next().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "open domain")
                .provider(provider.name().to_owned())
                .remedy("pass an object of a NIC that is present")
        })?;
        let nic = ProviderNic::new(Arc::new(provider), nic, false, note);
        Self::open(library, nic, attr)
    }
}

/// Returns the NIC of this name, or the first hardware NIC for `None`.
fn nic_of(call: Call, library: &Library, name: Option<&str>) -> Result<ProviderNic> {
    let machine = &library.machine;
    let found = machine.nics.iter().find(|nic| match name {
        Some(name) => nic.attr.nic.to_string() == name,
        None => !nic.software,
    });
    if let Some(nic) = found {
        return Ok(nic.clone());
    }
    let Some(name) = name else {
        let reasons = machine.absent.iter().filter(|absent| absent.sort != "topology");
        let reasons = reasons.map(|absent| format!("{}: {}", absent.name, absent.why));
        return Err(Error::new(ErrorKind::Unavailable, "hmem_domain_open")
            .context("why", reasons.collect::<Vec<_>>().join("; "))
            .remedy(
                "attach an RDMA device, and open the library without HMEM_OPEN_WITHOUT_NICS; or \
                 name a software NIC for tests",
            ));
    };
    let provider = name.split('/').next().unwrap_or(name);
    if let Some((_, why)) =
        machine.hmem.absent_providers().find(|(absent, _)| *absent == name || *absent == provider)
    {
        return Err(why.clone());
    }
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.attr.nic.to_string()).collect();
    Err(call
        .invalid("nic", "pass a name of hmem_nic_name")
        .context("nic", name)
        .context("nics", names.join(",")))
}

/// Opens a domain on the NIC with the name `nic` (see `hmem_nic_name`). Null means the first
/// hardware NIC, and never a software NIC.
///
/// # Safety
/// `library` is null, or a library that is not closed during the call. `nic` is null or a string.
/// `attr` is null, or a structure as large as its field `size` says. `domain` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_domain_open(
    library: *const hmem_library,
    nic: *const c_char,
    attr: *const hmem_domain_attr,
    domain: *mut *mut hmem_domain,
) -> *mut hmem_error {
    Call::run("hmem_domain_open", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle, a string and a
        // structure.
        let (domain, library, nic, attr) = unsafe {
            let domain = call.out("domain", domain, ptr::null_mut())?;
            let (library, nic) = (call.state(library)?, call.text("nic", nic)?);
            (domain, library, nic, domain_attr(call, attr)?)
        };
        let (attr, owner) = attr;
        if owner.has_release() {
            return Err(call.invalid("release", "leave it null: the library opens the NIC itself"));
        }
        let nic = nic_of(call, library, nic)?;
        Call::set_handle(domain, Box::new(OpenDomain::open(library, nic, attr)?));
        Ok(())
    })
}

/// Opens a domain in a protection domain of the program. The keys of its regions
/// (`hmem_region_verbs_key`) work in the program's own work requests.
///
/// This function does not call `ibv_fork_init`. `hmem_open` may call it, unless the flag
/// HMEM_OPEN_WITHOUT_NICS is set.
///
/// # Safety
/// - `library` is null, or a library that is not closed during the call.
/// - `pd` is null, or a protection domain of the `libibverbs.so.1` of this process. The protection
///   domain stays allocated until `attr->release` is called. Without this function, it stays
///   allocated until the process ends.
/// - `attr` is null, or a structure as large as its field `size` says. `domain` is null or
///   writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_domain_open_pd(
    library: *const hmem_library,
    pd: *mut ibv_pd,
    attr: *const hmem_domain_attr,
    domain: *mut *mut hmem_domain,
) -> *mut hmem_error {
    Call::run("hmem_domain_open_pd", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a structure, and
        // that any thread may call `release`.
        let (domain, library, (attr, owner)) = unsafe {
            let domain = call.out("domain", domain, ptr::null_mut())?;
            (domain, call.state(library)?, domain_attr(call, attr)?)
        };
        // SAFETY: the caller promises null or a protection domain that lives until the release.
        let verbs = unsafe { Verbs::builder().with_pd(pd.cast(), Arc::clone(&owner)) }?;
        let opened = OpenDomain::open_brought(library, verbs, attr, "protection domain")?;
        owner.accept();
        Call::set_handle(domain, Box::new(opened));
        Ok(())
    })
}

/// Opens a domain in a libfabric domain of the program. The keys of its regions
/// (`hmem_region_fabric_key`) work in the program's own requests.
///
/// `info` is the `fi_info` with which the program opened the domain, and `api_version` the version
/// that the program passed to `fi_getinfo`.
///
/// # Safety
/// - `library` is null, or a library that is not closed during the call.
/// - `fabric` is null, or a domain of the `libfabric.so.1` of this process. The domain stays open
///   until `attr->release` is called. Without this function, it stays open until the process ends.
/// - `info` is null, or the `fi_info` of the domain, and valid during the call.
/// - The domain was opened with FI_THREAD_SAFE, or no call of the program for the domain runs at
///   the same time as a call of this library.
/// - No transfer uses a region when the region is closed.
/// - `attr` is null, or a structure as large as its field `size` says. `domain` is null or
///   writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_domain_open_fabric(
    library: *const hmem_library,
    fabric: *mut fid_domain,
    info: *const fi_info,
    api_version: u32,
    attr: *const hmem_domain_attr,
    domain: *mut *mut hmem_domain,
) -> *mut hmem_error {
    Call::run("hmem_domain_open_fabric", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a structure, and
        // that any thread may call `release`.
        let (domain, library, (attr, owner)) = unsafe {
            let domain = call.out("domain", domain, ptr::null_mut())?;
            (domain, call.state(library)?, domain_attr(call, attr)?)
        };
        let (builder, keep) = (Libfabric::builder(), Arc::clone(&owner));
        // SAFETY: the caller makes the promises of `with_domain` in the section Safety.
        let provider =
            unsafe { builder.with_domain(fabric.cast(), info.cast(), api_version, keep) }?;
        let opened = OpenDomain::open_brought(library, provider, attr, "libfabric domain")?;
        owner.accept();
        Call::set_handle(domain, Box::new(opened));
        Ok(())
    })
}

/// Returns the JSON document of `hmem explain --json` for the NIC of the domain. The call registers
/// memory and deregisters it. If the domain was opened in a protection domain or libfabric domain
/// of the program, the memory is registered there. The field `nic` of the selection is ignored.
///
/// # Safety
/// `domain` is null, or a domain that is not closed during the call. `selection` is null, or a
/// structure as large as its field `size` says. `json` and `passed` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_domain_explain(
    domain: *const hmem_domain,
    selection: *const hmem_selection,
    json: *mut *mut c_char,
    passed: *mut bool,
) -> *mut hmem_error {
    Call::run("hmem_domain_explain", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a selection.
        let (json, domain, args) = unsafe {
            let json = call.out("json", json, ptr::null_mut())?;
            (json, call.state(domain)?, explain_args(call, selection)?)
        };
        let report = explain_nic(&domain.library.machine, &domain.nic, &args);
        // SAFETY: the caller promises null or a place for the result.
        unsafe { set_explanation(&report.map_err(report_failed)?, json, passed) };
        Ok(())
    })
}

/// Closes a domain. Does nothing for null. Fails with HMEM_KIND_BUSY while the domain has regions
/// or windows, and the domain then stays open.
///
/// # Safety
/// `domain` is null, or a domain that no other call uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_domain_close(domain: *mut hmem_domain) -> *mut hmem_error {
    Call::run("hmem_domain_close", |call| {
        // SAFETY: the caller promises null or a handle that no other call uses.
        unsafe {
            call.close(domain, |open| {
                let OpenDomain { domain, nic, library } = *open;
                domain.close().map_err(|Rejected { value: domain, error }| {
                    (Box::new(OpenDomain { domain, nic, library }), error)
                })
            })
        }
    })
}

/// Stores the counts of the domain's registration cache in `*counts`, whose field `size` the
/// program has set.
///
/// # Safety
/// `domain` is null, or a domain that is not closed during the call. `counts` is null, or a
/// structure as large as its field `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_cache_statistics(
    domain: *const hmem_domain,
    counts: *mut hmem_cache_counts,
) -> *mut hmem_error {
    Call::run("hmem_cache_statistics", |call| {
        // SAFETY: the caller promises null or a handle.
        let statistics = unsafe { call.state(domain) }?.domain.cache()?.statistics();
        let value = hmem_cache_counts {
            size: size_of::<hmem_cache_counts>(),
            hits: statistics.hits,
            misses: statistics.misses,
            uncached: statistics.uncached,
            evictions: statistics.evictions,
            entries: statistics.entries as u64,
            bytes: statistics.bytes,
            in_use: statistics.in_use as u64,
        };
        // SAFETY: the caller promises null or a structure.
        unsafe { call.fill("counts", counts, value) }
    })
}

/// Removes the cached regions that overlap the memory. Call it after a change of the memory that no
/// monitor detects. Regions in use are deregistered when their last use ends.
///
/// # Safety
/// `domain` is null, or a domain that is not closed during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_cache_invalidate(
    domain: *const hmem_domain,
    address: u64,
    length: u64,
) -> *mut hmem_error {
    Call::run("hmem_cache_invalidate", |call| {
        // SAFETY: the caller promises null or a handle.
        let cache = unsafe { call.state(domain) }?.domain.cache()?;
        cache.invalidate(AddressRange::new(Address(address), length)?);
        Ok(())
    })
}

/// Deregisters all cached regions that are not in use.
///
/// # Safety
/// `domain` is null, or a domain that is not closed during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_cache_evict_idle(domain: *const hmem_domain) -> *mut hmem_error {
    Call::run("hmem_cache_evict_idle", |call| {
        // SAFETY: the caller promises null or a handle.
        unsafe { call.state(domain) }?.domain.cache()?.evict_idle();
        Ok(())
    })
}
