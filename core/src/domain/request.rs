//! Requests to register memory, and the checks that need no call of an iface or provider.
//!
//! Each public function that registers memory creates a [`RegionRequest`]. All later steps borrow
//! this request. [`DomainInner::check`] checks it for one domain, and returns a [`Checked`]
//! request.

use std::{
    any::Any,
    borrow::Cow,
    fmt,
    ops::Deref,
    sync::{Arc, OnceLock},
};

use super::{
    DomainInner,
    memory::{BorrowedDmaBuf, Memory, Place},
    prefault::Prefault,
    region::MemoryRegion,
    region_state::KeepAlive,
    terms::{Promise, Terms},
};
use crate::{
    Access, AddressRange, AuthKey, DeviceId, DmaBufOffset, Error, ErrorKind, IfaceKind, MrFlags,
    MrMode, Result, SharedExports,
    provider::{ProviderAttr, ProviderRegion},
    registration::{Parallel, WriteOrdering},
};

/// The key value that means "no key" (`FI_KEY_NOTAVAIL`).
pub(super) const KEY_NOT_AVAILABLE: u64 = u64::MAX;

/// A request to register memory: the memory, the rights, and the settings.
///
/// [`Domain::submit`](super::Domain::submit) registers the memory with one NIC.
/// [`Batch::add`](super::Batch::add) adds the request to a batch, which registers several requests
/// together, with one or more NICs.
///
/// ```no_run
/// use hmem_core::{Access, Domain, Region, Request, Result, WriteOrdering};
///
/// fn mailbox(domain: &Domain) -> Result<Region<Vec<u8>>> {
///     let request = Request::new(vec![0_u8; 4096], Access::REMOTE_WRITE)
///         .key(42)
///         .ordering(WriteOrdering::Strict);
///     Ok(domain.submit(request)?)
/// }
/// ```
pub struct Request<'a, M> {
    pub(super) memory: M,
    pub(super) terms: Terms<'a>,
}

impl<'a, M: Memory> Request<'a, M> {
    /// Creates a request with defaults for all settings.
    pub fn new(memory: M, access: Access) -> Self {
        Self { memory, terms: Terms::new(access) }
    }

    /// Requests a key number (`requested_key`). Ignored in PROV_KEY mode. By default the provider
    /// chooses the key.
    #[must_use]
    pub fn key(mut self, requested_key: u64) -> Self {
        self.terms.key = Some(requested_key);
        self
    }

    /// Sets a number that the event of an asynchronous registration contains. Default: 0.
    #[must_use]
    pub fn context(mut self, context: u64) -> Self {
        self.terms.context = context;
        self
    }

    /// Sets the authorization key. By default, and with an empty key, the domain's key applies.
    #[must_use]
    pub fn auth_key(mut self, key: &'a AuthKey) -> Self {
        self.terms.auth_key = Some(Cow::Borrowed(key));
        self
    }

    /// Sets registration flags. Default: none. A [`DmaBuf`](super::DmaBuf) needs no flag.
    #[must_use]
    pub fn flags(mut self, flags: MrFlags) -> Self {
        self.terms.flags = flags;
        self
    }

    /// Sets the page size that the provider should use, in bytes. With 0, the default, the provider
    /// chooses.
    #[must_use]
    pub fn page_size(mut self, page_size: usize) -> Self {
        self.terms.page_size = page_size;
        self
    }

    /// Sets the order in which the NIC's writes become visible. The default is the order of
    /// [`DomainAttr::ordering`](super::DomainAttr::ordering). Memory that software polls needs the
    /// strict order.
    #[must_use]
    pub fn ordering(mut self, ordering: WriteOrdering) -> Self {
        self.terms.ordering = Some(ordering);
        self
    }

    /// Populates host pages on several CPUs before the registration. By default, the registration
    /// itself populates them.
    #[must_use]
    pub fn prefault(mut self, prefault: Prefault<'a>) -> Self {
        self.terms.prefault = Some(prefault);
        self
    }

    /// Divides host memory into parts that several threads register at once. By default, the
    /// provider divides only ranges that the NIC cannot register by one call.
    #[must_use]
    pub fn parallel(mut self, parallel: Parallel<'a>) -> Self {
        self.terms.parallel = Some(parallel);
        self
    }

    /// Names the owner of the memory: an iface and, if given, a device. By default the domain
    /// queries its ifaces. Ignored if [`DomainAttr::hmem`](super::DomainAttr::hmem) is false.
    ///
    /// The domain refuses the request if the named iface or device is not the owner. These claims
    /// are accepted too:
    ///
    /// - the system iface, for memory of a device API's host allocator (CUDA: `cuMemHostAlloc`),
    ///   but not for managed memory
    /// - any device of the iface, for memory that belongs to no particular device
    /// - any iface, for a dma-buf, whose owner cannot be queried. A dma-buf without a named iface
    ///   counts as host memory.
    #[must_use]
    pub fn owner(mut self, iface: IfaceKind, device: impl Into<Option<DeviceId>>) -> Self {
        self.terms.iface = Some(iface);
        self.terms.device = device.into();
        self
    }

    /// Reuses dma-bufs of device memory that earlier requests with the same `exports` created. By
    /// default, each registration exports the memory itself. Ignored for host memory.
    #[must_use]
    pub fn exports(mut self, exports: &SharedExports) -> Self {
        self.terms.exports = Some(exports.clone());
        self
    }

    /// Adds settings that only one provider has. The domain refuses settings that its provider does
    /// not know.
    #[must_use]
    pub fn extension(mut self, settings: impl Any + Send + Sync) -> Self {
        self.terms.extension = Some(Arc::new(settings));
        self
    }
}

impl<M> fmt::Debug for Request<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// A request that the domain has not checked, from any call that registers memory.
pub(super) struct RegionRequest<'a> {
    pub(super) source: Source<'a>,
    pub(super) promise: Promise,
    pub(super) keep: KeepAlive,
    pub(super) terms: &'a Terms<'a>,
}

/// The memory that a request names.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Ranges(&'a [AddressRange]),
    DmaBuf(BorrowedDmaBuf<'a>),
    /// A part of a region that is registered already.
    Part {
        base: &'a MemoryRegion,
        range: AddressRange,
    },
}

impl<'a> Source<'a> {
    pub(super) fn of(place: &'a Place<'a>) -> Self {
        match place {
            Place::Host { range, .. } | Place::Device { range, .. } => {
                Self::Ranges(std::slice::from_ref(range))
            }
            Place::Addresses { ranges, .. } => Self::Ranges(ranges),
            Place::DmaBuf { buffer, .. } => Self::DmaBuf(buffer.borrow()),
        }
    }
}

impl<'a> RegionRequest<'a> {
    /// Creates a request for part of a region. The promise for the region covers the part.
    pub(super) fn part(base: &'a MemoryRegion, range: AddressRange, terms: &'a Terms<'a>) -> Self {
        let promise = if base.inner.read_only { Promise::ReadOnly } else { Promise::ReadWrite };
        Self { source: Source::Part { base, range }, promise, keep: KeepAlive::Caller, terms }
    }

    /// Returns the region of which the request registers a part, or `None` for new memory.
    pub(super) fn base(&self) -> Option<&'a MemoryRegion> {
        match self.source {
            Source::Part { base, .. } => Some(base),
            Source::Ranges(_) | Source::DmaBuf(_) => None,
        }
    }
}

/// A request that passed the checks of a domain. Only [`DomainInner::check`] creates one.
pub(super) struct Checked<'a> {
    pub(super) request: &'a RegionRequest<'a>,
    pub(super) ranges: Ranges<'a>,
    /// The provider's handle of the base of a sub-region, and the offset in the base. `None` for
    /// other requests.
    pub(super) part: Option<(ProviderRegion, u64)>,
}

/// The ranges of a checked request.
pub(super) enum Ranges<'a> {
    Given(&'a [AddressRange]),
    /// The range of a dma-buf or of a sub-region.
    One(AddressRange),
}

impl Deref for Ranges<'_> {
    type Target = [AddressRange];

    #[inline]
    fn deref(&self) -> &[AddressRange] {
        match self {
            Self::Given(ranges) => ranges,
            Self::One(range) => std::slice::from_ref(range),
        }
    }
}

impl DomainInner {
    /// Checks a request against the promise for its memory, the domain's mode and the provider's
    /// limits.
    #[inline]
    pub(super) fn check<'a>(&self, request: &'a RegionRequest<'a>) -> Result<Checked<'a>> {
        self.process.check("regattr")?;
        self.check_request(request)
            .map(|(ranges, part)| Checked { request, ranges, part })
            .inspect_err(|error| {
                self.metrics.count_refusal(error);
                tracing::debug!(%error, "registration refused");
            })
    }

    #[inline]
    fn check_request<'a>(
        &self,
        request: &RegionRequest<'a>,
    ) -> Result<(Ranges<'a>, Option<(ProviderRegion, u64)>)> {
        let (terms, provider) = (request.terms, &self.provider_attr);
        check_bits(terms, provider)?;
        check_promise(request.promise, terms.access)?;
        if terms.page_size != 0 {
            check_page_size(terms.page_size, provider)?;
        }
        if let Some(parallel) = &terms.parallel {
            check_chunk(parallel.chunk)?;
        }
        if let Some(extension) = &terms.extension {
            self.check_extension(&**extension)?;
        }
        if !self.effective.contains(MrMode::PROV_KEY) && terms.key == Some(KEY_NOT_AVAILABLE) {
            return Err(Error::new(ErrorKind::KeyRejected, "regattr")
                .context("requested_key", format_args!("{KEY_NOT_AVAILABLE:#x}"))
                .remedy("request another key: this number means \"no key\" (FI_KEY_NOTAVAIL)"));
        }
        let is_dma_buf = matches!(request.source, Source::DmaBuf(_));
        if is_dma_buf != terms.flags.contains(MrFlags::MR_DMABUF) {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .context("dma_buf", if is_dma_buf { "given" } else { "missing" })
                .context("flags", terms.flags)
                .remedy("set MR_DMABUF for a dma-buf, and for no other memory"));
        }
        match request.source {
            Source::Ranges(ranges) => {
                check_ranges(ranges, provider)?;
                Ok((Ranges::Given(ranges), None))
            }
            Source::DmaBuf(buffer) => Ok((Ranges::One(check_dma_buf(&buffer, provider)?), None)),
            Source::Part { base, range } => {
                check_ranges(std::slice::from_ref(&range), provider)?;
                let part = self.check_base(base, range, terms)?;
                Ok((Ranges::One(range), Some(part)))
            }
        }
    }

    #[cold]
    fn check_extension(&self, extension: &(dyn Any + Send + Sync)) -> Result<()> {
        if self.provider.accepts(extension) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, "regattr")
            .provider(self.provider_attr.nic.to_string())
            .context("why", "the provider does not know the settings of Request::extension")
            .remedy("pass settings of this provider's crate, or none"))
    }

    /// Checks a sub-region against its base, and returns the provider's handle of the base, and the
    /// offset of the sub-region in the base. The provider checks the rights.
    fn check_base(
        &self,
        base: &MemoryRegion,
        range: AddressRange,
        terms: &Terms<'_>,
    ) -> Result<(ProviderRegion, u64)> {
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "regattr").context("base", base.range()).remedy(remedy))
        };
        if !std::ptr::eq(Arc::as_ptr(&base.inner.domain), self) {
            let remedy = "pass a base that is registered in the same domain";
            return refuse(ErrorKind::InvalidArgument, remedy);
        }
        let Some(region) = base.inner.registered() else {
            return refuse(ErrorKind::BadState, "wait until the base is registered");
        };
        let Some(offset) = base.inner.offset_of(range) else {
            return Err(Error::new(ErrorKind::OutOfBounds, "regattr")
                .context("why", format_args!("{range} is not in {}", base.range()))
                .context("range", range)
                .context("base", base.range())
                .remedy("pass a range inside one range of the base"));
        };
        if terms.page_size != 0 {
            let remedy = "use 0: a sub-region has the page size of its base";
            return refuse(ErrorKind::BadPageSize, remedy);
        }
        Ok((region, offset))
    }
}

/// Fails if the rights let the NIC write memory that was promised for reading only.
#[inline]
pub(super) fn check_promise(promise: Promise, access: Access) -> Result<()> {
    if promise != Promise::ReadOnly || !access.nic_writes() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::AccessDenied, "regattr")
        .context("access", access)
        .context("why", "the memory is promised for reading only")
        .remedy(
            "leave out rights with which the NIC writes (such as READ, RECV, REMOTE_WRITE), or \
             register writable memory (Promise::ReadWrite, Vec<u8>)",
        ))
}

#[inline]
fn check_bits(terms: &Terms<'_>, provider: &ProviderAttr) -> Result<()> {
    let flags = terms.flags;
    let bad_flags = flags.difference(provider.flags.intersection(MrFlags::all()));
    if !bad_flags.is_empty() {
        let unknown = bad_flags.difference(MrFlags::all());
        let remedy = if unknown.is_empty() {
            "register without these flags, which the provider does not support"
        } else {
            "clear these bits: fi_mr(3) does not define them as flags"
        };
        return Err(Error::new(ErrorKind::BadFlags, "regattr")
            .provider(provider.nic.to_string())
            .context("why", bad_flags)
            .context("flags", bad_flags)
            .remedy(remedy));
    }
    let bad_access = terms.access.difference(Access::all());
    if !bad_access.is_empty() {
        return Err(Error::new(ErrorKind::BadAccess, "regattr")
            .context("access", bad_access)
            .remedy("clear these bits: they are not access rights"));
    }
    if flags.contains(MrFlags::HMEM_DEVICE_ONLY | MrFlags::HMEM_HOST_ALLOC) {
        return Err(Error::new(ErrorKind::BadFlags, "regattr")
            .context("flags", flags)
            .remedy("set HMEM_DEVICE_ONLY or HMEM_HOST_ALLOC, not both"));
    }
    Ok(())
}

#[inline]
fn check_ranges(ranges: &[AddressRange], provider: &ProviderAttr) -> Result<()> {
    let limit = provider.mr_iov_limit;
    if ranges.len() > limit || ranges.is_empty() {
        let kind = if ranges.is_empty() { ErrorKind::ZeroLength } else { ErrorKind::TooManyRanges };
        return Err(Error::new(kind, "regattr")
            .provider(provider.nic.to_string())
            .context("why", format_args!("{} ranges, and mr_iov_limit is {limit}", ranges.len()))
            .context("ranges", ranges.len())
            .context("mr_iov_limit", limit)
            .remedy("pass between 1 and mr_iov_limit ranges"));
    }
    let mut total = Some(0u64);
    for (index, range) in ranges.iter().enumerate() {
        if range.is_empty() {
            // The error names no address, because an empty `Vec` has none.
            return Err(Error::new(ErrorKind::ZeroLength, "regattr")
                .context("index", index)
                .context("length", 0)
                .remedy("register at least one byte"));
        }
        total = total.and_then(|total| total.checked_add(range.len()));
    }
    check_length(total, provider)
}

/// Fails if the total length of a request exceeds the NIC's limit. `total` is `None` if the length
/// is 2^64 or more.
#[inline]
fn check_length(total: Option<u64>, provider: &ProviderAttr) -> Result<()> {
    let (length, limit) = (total.unwrap_or(u64::MAX), provider.max_mr_size);
    if total.is_none_or(|total| total > limit) {
        return Err(Error::new(ErrorKind::TooLong, "regattr")
            .provider(provider.nic.to_string())
            .context("why", format_args!("{length} bytes, and max_mr_size is {limit}"))
            .context("length", length)
            .context("max_mr_size", limit)
            .remedy("register the range in parts of at most max_mr_size bytes"));
    }
    Ok(())
}

fn check_dma_buf(buffer: &BorrowedDmaBuf<'_>, provider: &ProviderAttr) -> Result<AddressRange> {
    if buffer.len == 0 {
        return Err(Error::new(ErrorKind::ZeroLength, "regattr")
            .context("dma_buf", "length 0")
            .remedy("register at least one byte"));
    }
    check_length(Some(buffer.len), provider)?;
    let DmaBufOffset(offset) = buffer.offset;
    let start = buffer.base_addr.unwrap_or_default().checked_add(offset).ok_or_else(|| {
        Error::new(ErrorKind::AddressWraps, "regattr")
            .context("base_addr", buffer.base_addr.unwrap_or_default())
            .context("offset", buffer.offset)
    })?;
    AddressRange::new(start, buffer.len)
}

#[cold]
fn check_chunk(chunk: u64) -> Result<()> {
    let page = rustix::param::page_size() as u64;
    if chunk == 0 || chunk >= page {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "regattr")
        .context("chunk", chunk)
        .remedy("use a page or more, or 0 to leave the length of a part to the provider"))
}

fn check_page_size(page_size: usize, provider: &ProviderAttr) -> Result<()> {
    let os = os_page_sizes();
    if os.contains(&page_size) && provider.page_sizes.contains(&page_size) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::BadPageSize, "regattr")
        .context("why", format_args!("{page_size} bytes"))
        .context("page_size", page_size)
        .context("os", format_args!("{os:?}"))
        .context("provider", format_args!("{:?}", provider.page_sizes))
        .remedy("use 0, or a size that both the operating system and the provider support"))
}

/// Returns the page sizes of this machine in bytes, ascending: the base size and the sizes in
/// `/sys/kernel/mm/hugepages`.
#[must_use]
pub fn os_page_sizes() -> &'static [usize] {
    static SIZES: OnceLock<Vec<usize>> = OnceLock::new();
    SIZES.get_or_init(|| {
        let mut sizes = vec![rustix::param::page_size()];
        if let Ok(entries) = std::fs::read_dir("/sys/kernel/mm/hugepages") {
            sizes.extend(entries.filter_map(|entry| {
                let name = entry.ok()?.file_name();
                let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
                kib.parse::<usize>().ok()?.checked_mul(1024)
            }));
        }
        sizes.sort_unstable();
        sizes
    })
}
