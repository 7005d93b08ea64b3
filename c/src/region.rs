//! Regions: registered memory with its keys.

#![allow(unsafe_code, reason = "registers memory that C code promises to keep")]

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::BorrowedFd,
    ptr,
    sync::Arc,
};

use hmem::{
    Access, Address, AddressRange, DmaBuf, DmaBufOffset, Errno, Error, KeptRaw, MemoryRegion,
    OwnedCachedRegion, Promise, Raw, Region, Rejected, RemoteKey, Request, Result,
    libfabric::FabricMr, verbs::VerbsMr,
};
use serde_json::to_string_pretty;

use crate::{
    call::{Call, Growing, Handle},
    domain::{OpenDomain, hmem_domain},
    error::hmem_error,
    owner::{Owner, hmem_release},
};

/// Registered memory, or a lease of a cached region. Any number of threads may use it at once.
#[derive(Debug)]
pub struct hmem_region {
    _opaque: (),
}

/// The state behind an [`hmem_region`].
#[derive(Debug)]
pub(crate) enum OpenRegion {
    Addresses(Region<KeptRaw<Arc<Owner>>>),
    DmaBuf(Region<KeptRaw<Arc<Owner>, DmaBuf>>),
    Lease(OwnedCachedRegion),
}

impl Handle for hmem_region {
    type State = OpenRegion;
    const NAME: &'static str = "hmem_region";
}

/// Settings of a registration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_register_attr {
    /// The size of this structure in bytes: `sizeof(hmem_register_attr)`.
    pub size: usize,
    /// The owner of the memory, such as `cuda:0`. The registration fails if another iface or device
    /// owns the memory. If this is null, the library finds the owner. For a dma-buf, null means
    /// host memory.
    pub memory: *const c_char,
    /// The function that the library calls when the memory is no longer registered. If the
    /// registration fails, the library does not call the function.
    pub release: hmem_release,
    /// The argument of `release`.
    pub context: *mut c_void,
}

// SAFETY: a size, a pointer to characters that is checked before use, a function that may be null,
// and an address.
unsafe impl Growing for hmem_register_attr {}

/// The keys of a region in a protection domain.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_verbs_key {
    /// The size of this structure in bytes: `sizeof(hmem_verbs_key)`.
    pub size: usize,
    /// The address of the first registered byte in this process.
    pub address: u64,
    /// The length of the registration in bytes.
    pub length: u64,
    /// The address that work requests use for the first byte.
    pub base: u64,
    /// The key for the local segments of work requests.
    pub lkey: u32,
    /// The key for requests of peers.
    pub rkey: u32,
    /// The `struct ibv_mr`. The program must not deregister it.
    pub mr: *mut c_void,
}

// SAFETY: a size, numbers of 64 bits, two numbers of 32 bits, and an address.
unsafe impl Growing for hmem_verbs_key {}

/// The keys of a region in a libfabric domain.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_fabric_key {
    /// The size of this structure in bytes: `sizeof(hmem_fabric_key)`.
    pub size: usize,
    /// The address of the first registered byte in this process.
    pub address: u64,
    /// The length of the registration in bytes.
    pub length: u64,
    /// The address that peers use for the first byte.
    pub base: u64,
    /// The key for requests of peers, or `FI_KEY_NOTAVAIL` if the region has no remote rights.
    pub key: u64,
    /// The descriptor for the local segments of requests.
    pub descriptor: *mut c_void,
    /// The `struct fid_mr`. The program must not close it.
    pub mr: *mut c_void,
}

// SAFETY: a size, numbers of 64 bits, and addresses.
unsafe impl Growing for hmem_fabric_key {}

impl OpenRegion {
    /// Returns the whole region. A cached region may be larger than the range that the program
    /// asked for.
    pub(crate) fn region(&self) -> &MemoryRegion {
        match self {
            Self::Addresses(region) => region,
            Self::DmaBuf(region) => region,
            Self::Lease(region) => region,
        }
    }

    /// Returns the range that the program asked for.
    pub(crate) fn range(&self) -> AddressRange {
        match self {
            Self::Lease(region) => region.view().range(),
            _ => self.region().range(),
        }
    }

    /// Returns the offset of [`OpenRegion::range`] from the start of the whole region.
    pub(crate) fn offset(&self) -> u64 {
        self.range().start().0 - self.region().range().start().0
    }

    fn key(&self) -> Result<RemoteKey> {
        match self {
            Self::Lease(region) => region.view().key(),
            _ => self.region().key(),
        }
    }

    fn close(self) -> Result<(), (Self, Error)> {
        match self {
            Self::Addresses(region) => match region.close() {
                Ok(memory) => drop(memory),
                Err(Rejected { value, error }) => return Err((Self::Addresses(value), error)),
            },
            Self::DmaBuf(region) => match region.close() {
                Ok(memory) => drop(memory),
                Err(Rejected { value, error }) => return Err((Self::DmaBuf(value), error)),
            },
            Self::Lease(lease) => drop(lease),
        }
        Ok(())
    }
}

/// The errno of the operating system for a descriptor that is not open.
const EBADF: Errno = Errno(9);

/// Returns the rights that C code asks for. Unknown bits are kept: the registration refuses them.
const fn rights(access: u64) -> Access {
    Access::from_bits_retain(access)
}

/// Returns the promise about memory that C code makes by these rights. NICs and peers may write the
/// memory only if one of the rights is a right to write.
fn promise(access: Access) -> Promise {
    if access.nic_writes() { Promise::ReadWrite } else { Promise::ReadOnly }
}

/// A request for memory that the program owns. The region releases the memory through an [`Owner`].
type OwnedRequest<'a, A> = Request<'a, KeptRaw<Arc<Owner>, A>>;

/// Returns a request for memory with the settings in `attr`. The returned owner calls `release` on
/// drop, once it was accepted.
///
/// # Safety
/// The condition of [`Call::attr`]. Any thread may call `release`. `memory` is null or a string.
unsafe fn request<'a, A>(
    call: Call,
    domain: &OpenDomain,
    raw: Raw<A>,
    access: Access,
    attr: *const hmem_register_attr,
) -> Result<(OwnedRequest<'a, A>, Arc<Owner>)>
where
    KeptRaw<Arc<Owner>, A>: hmem::Memory,
{
    // SAFETY: the caller promises null or a structure, a string, and a function.
    let (memory, owner) = unsafe {
        let given = call.attr("attr", attr)?;
        (call.text("memory", given.memory)?, Owner::new(given.release, given.context))
    };
    let owner = Arc::new(owner);
    let request = Request::new(raw.keep(Arc::clone(&owner)), access);
    Ok(match memory {
        Some(memory) => {
            let (iface, device) = domain.library.owner(call, memory)?;
            (request.owner(iface, device), owner)
        }
        None => (request, owner),
    })
}

/// Registers `length` bytes of host or device memory at `address`.
///
/// `access` has HMEM_ rights. Null for `attr` means the default settings. The call returns when the
/// NIC may use the memory.
///
/// # Safety
/// - `domain` is null, or a domain that is not closed during the call. `attr` is null, or a
///   structure as large as its field `size` says. `region` is null or writable.
/// - The memory stays allocated until the region is closed. With `attr->release`, the memory stays
///   allocated until that function is called.
/// - If `access` has a right to write, the memory is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_register(
    domain: *const hmem_domain,
    address: u64,
    length: u64,
    access: u64,
    attr: *const hmem_register_attr,
    region: *mut *mut hmem_region,
) -> *mut hmem_error {
    Call::run("hmem_register", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (region, domain) =
            unsafe { (call.out("region", region, ptr::null_mut())?, call.state(domain)?) };
        let access = rights(access);
        let range = AddressRange::new(Address(address), length)?;
        // SAFETY: the caller promises that the memory stays allocated while it is registered.
        let raw = unsafe { Raw::new(range, promise(access)) };
        // SAFETY: the caller promises null or a structure.
        let (request, owner) = unsafe { request(call, domain, raw, access, attr) }?;
        let registered = domain.domain.submit(request)?;
        owner.accept();
        Call::set_handle(region, OpenRegion::Addresses(registered));
        Ok(())
    })
}

/// Registers `length` bytes from `offset` of the dma-buf `fd`.
///
/// The library duplicates the descriptor, so the program may close its own after the call. The call
/// fails if `fd` is not an open descriptor.
///
/// # Safety
/// - `domain` is null, or a domain that is not closed during the call. `attr` is null, or a
///   structure as large as its field `size` says. `region` is null or writable.
/// - The memory of the dma-buf is not used for another purpose until the region is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_register_dmabuf(
    domain: *const hmem_domain,
    fd: c_int,
    offset: u64,
    length: u64,
    access: u64,
    attr: *const hmem_register_attr,
    region: *mut *mut hmem_region,
) -> *mut hmem_error {
    Call::run("hmem_register_dmabuf", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (region, domain) =
            unsafe { (call.out("region", region, ptr::null_mut())?, call.state(domain)?) };
        if fd < 0 {
            return Err(call.invalid("fd", "pass an open file descriptor").context("fd", fd));
        }
        // SAFETY: the number is not -1. The duplication fails if it is no open descriptor.
        let duplicate = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let fd = duplicate.map_err(|error| match Errno::of(&error) {
            EBADF => call.invalid("fd", "pass an open file descriptor").context("fd", fd),
            errno => Error::os(errno, "duplicate the file descriptor")
                .remedy("raise the limit of open files (`ulimit -n`)"),
        })?;
        let access = rights(access);
        let buffer = DmaBuf { fd, offset: DmaBufOffset(offset), len: length, base_addr: None };
        // SAFETY: the caller promises that the memory has this purpose while it is registered.
        let raw = unsafe { Raw::new(buffer, promise(access)) };
        // SAFETY: the caller promises null or a structure.
        let (request, owner) = unsafe { request(call, domain, raw, access, attr) }?;
        let registered = domain.domain.submit(request)?;
        owner.accept();
        Call::set_handle(region, OpenRegion::DmaBuf(registered));
        Ok(())
    })
}

/// Returns a region that covers the memory from the domain's registration cache, and registers the
/// memory if no cached region covers it. The domain was opened with HMEM_DOMAIN_CACHE.
///
/// `hmem_region_close` gives the region back to the cache. Until then the cache does not deregister
/// it.
///
/// # Safety
/// - `domain` is null, or a domain that is not closed during the call. `region` is null or
///   writable.
/// - The memory stays allocated until the region is closed. If the program frees the memory later
///   without unmapping it, peers that have the key can access the memory until the region leaves
///   the cache.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_cache_get(
    domain: *const hmem_domain,
    address: u64,
    length: u64,
    access: u64,
    region: *mut *mut hmem_region,
) -> *mut hmem_error {
    Call::run("hmem_cache_get", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (region, domain) =
            unsafe { (call.out("region", region, ptr::null_mut())?, call.state(domain)?) };
        let access = rights(access);
        let range = AddressRange::new(Address(address), length)?;
        // SAFETY: the caller promises that the memory stays allocated while it is registered.
        let raw = unsafe { Raw::new(range, promise(access)) };
        let lease = domain.domain.cache()?.get_owned(raw, access)?;
        Call::set_handle(region, OpenRegion::Lease(lease));
        Ok(())
    })
}

/// Deregisters a region, or gives a cached region back to the cache. Does nothing for null.
///
/// Fails with HMEM_KIND_BUSY while a window is bound to the region, and the region then stays
/// registered. A cached region is given back all the same, and stays registered until the window is
/// unbound.
///
/// # Safety
/// `region` is null, or a region that no other call uses. No transfer uses its keys.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_close(region: *mut hmem_region) -> *mut hmem_error {
    Call::run("hmem_region_close", |call| {
        // SAFETY: the caller promises null or a handle that no other call uses.
        unsafe { call.close(region, OpenRegion::close) }
    })
}

/// Returns the decision about the path from the NIC to the memory, as a JSON object: `path`,
/// `reason`, and the `attempts` with each refusal, its cause and remedy.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `json` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_decision(
    region: *const hmem_region,
    json: *mut *mut c_char,
) -> *mut hmem_error {
    Call::run("hmem_region_decision", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (json, region) =
            unsafe { (call.out("json", json, ptr::null_mut())?, call.state(region)?) };
        let decision = region.region().decision()?;
        Call::set_text(json, to_string_pretty(&**decision).expect("plain values serialise"));
        Ok(())
    })
}

/// Stores the local key of a region in `*key`: the lkey of verbs, or the descriptor of libfabric
/// as a number.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `key` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_local_key(
    region: *const hmem_region,
    key: *mut u64,
) -> *mut hmem_error {
    Call::run("hmem_region_local_key", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (key, region) = unsafe { (call.out("key", key, 0)?, call.state(region)?) };
        *key = region.region().desc()?.to_provider();
        Ok(())
    })
}

/// Stores the number of the remote key of a region in `*key`: the rkey of verbs, for example.
/// Stores the address that peers use for the first byte in `*base`. `base` may be null.
///
/// Fails with HMEM_KIND_UNSUPPORTED for a region with several keys. `hmem_region_key_bytes` returns
/// all keys.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `key` and `base` are null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_remote_key(
    region: *const hmem_region,
    key: *mut u64,
    base: *mut u64,
) -> *mut hmem_error {
    Call::run("hmem_region_remote_key", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (key, region) = unsafe { (call.out("key", key, 0)?, call.state(region)?) };
        // SAFETY: the caller promises null or a place for the result.
        unsafe { set_remote_key(&region.key()?, key, base) }
    })
}

/// Stores the number of a remote key in `key`, and its base address in `base` unless that is null.
///
/// # Safety
/// `base` is null or writable.
pub(crate) unsafe fn set_remote_key(
    remote: &RemoteKey,
    key: &mut u64,
    base: *mut u64,
) -> Result<()> {
    *key = remote.as_u64()?;
    // SAFETY: the caller promises null or a place for the result.
    if let Some(base) = unsafe { base.as_mut() } {
        *base = remote.base().0;
    }
    Ok(())
}

/// Copies the remote key of a region to `buffer`, for a peer that uses hmem. The copy includes the
/// address range and a checksum.
///
/// `*length` is the size of the buffer, and becomes the number of bytes. With a null or short
/// buffer the call fails with HMEM_KIND_TOO_SMALL, and `*length` is the necessary size.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `length` is null or writable.
/// `buffer` is null, or has `*length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_key_bytes(
    region: *const hmem_region,
    buffer: *mut u8,
    length: *mut usize,
) -> *mut hmem_error {
    Call::run("hmem_region_key_bytes", |call| {
        // SAFETY: the caller promises null or a handle, a number, and a buffer.
        unsafe { call.copy(&call.state(region)?.key()?.to_bytes(), buffer, length) }
    })
}

/// Copies the raw key of a region to `buffer`, as `fi_mr_raw_attr` does. `buffer` and `length` have
/// the rules of `hmem_region_key_bytes`. Stores the address that peers use for the first byte in
/// `*base`. `base` may be null.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `length` and `base` are null
/// or writable. `buffer` is null, or has `*length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_raw_key(
    region: *const hmem_region,
    buffer: *mut u8,
    length: *mut usize,
    base: *mut u64,
) -> *mut hmem_error {
    Call::run("hmem_region_raw_key", |call| {
        // SAFETY: the caller promises null or a handle.
        let region = unsafe { call.state(region) }?;
        let key = region.region().raw_key()?;
        // SAFETY: the caller promises null or a place for the result.
        if let Some(base) = unsafe { base.as_mut() } {
            *base = region.region().base_addr().0 + region.offset();
        }
        // SAFETY: the caller promises null or a number, and a buffer.
        unsafe { call.copy(&key.0, buffer, length) }
    })
}

/// Stores the keys for work requests of the program in `*key`, whose field `size` the program has
/// set. The region belongs to a verbs domain. A cached region may be larger than the range that the
/// program asked for.
///
/// Fails with HMEM_KIND_UNSUPPORTED for a region with several registrations, and for a staged
/// region, which has none.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `key` is null, or a structure
/// as large as its field `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_verbs_key(
    region: *const hmem_region,
    key: *mut hmem_verbs_key,
) -> *mut hmem_error {
    Call::run("hmem_region_verbs_key", |call| {
        // SAFETY: the caller promises null or a handle.
        let mr = VerbsMr::of(unsafe { call.state(region) }?.region())?;
        let value = hmem_verbs_key {
            size: size_of::<hmem_verbs_key>(),
            address: mr.range.start().0,
            length: mr.range.len(),
            base: mr.base,
            lkey: mr.lkey,
            rkey: mr.rkey,
            mr: mr.as_ptr(),
        };
        // SAFETY: the caller promises null or a structure.
        unsafe { call.fill("key", key, value) }
    })
}

/// Stores the keys for requests of the program in `*key`, whose field `size` the program has set.
/// The region belongs to a libfabric domain. A cached region may be larger than the range that the
/// program asked for.
///
/// Fails with HMEM_KIND_UNSUPPORTED for a region with several registrations.
///
/// # Safety
/// `region` is null, or a region that is not closed during the call. `key` is null, or a structure
/// as large as its field `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_region_fabric_key(
    region: *const hmem_region,
    key: *mut hmem_fabric_key,
) -> *mut hmem_error {
    Call::run("hmem_region_fabric_key", |call| {
        // SAFETY: the caller promises null or a handle.
        let mr = FabricMr::of(unsafe { call.state(region) }?.region())?;
        let value = hmem_fabric_key {
            size: size_of::<hmem_fabric_key>(),
            address: mr.range.start().0,
            length: mr.range.len(),
            base: mr.base,
            // `FI_KEY_NOTAVAIL` is the largest number.
            key: mr.key().unwrap_or(u64::MAX),
            descriptor: mr.descriptor(),
            mr: mr.as_ptr(),
        };
        // SAFETY: the caller promises null or a structure.
        unsafe { call.fill("key", key, value) }
    })
}
