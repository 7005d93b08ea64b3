//! The checks of a request that need no call of an iface or provider.

use std::{ops::Deref, sync::OnceLock};

use super::{DmaBufAttr, MemoryRegion, MrAttr};
use crate::{
    Access, AddressRange, DmaBufOffset, Error, ErrorKind, MrFlags, MrMode, Result,
    provider::ProviderAttr,
};

/// The key value that means "no key" (`FI_KEY_NOTAVAIL`).
pub(super) const KEY_NOT_AVAILABLE: u64 = u64::MAX;

/// The ranges of a request: a list of addresses, or a dma-buf's range.
pub(super) enum Ranges<'a> {
    Given(&'a [AddressRange]),
    /// The range that a request for a dma-buf names.
    DmaBuf(AddressRange),
}

impl Deref for Ranges<'_> {
    type Target = [AddressRange];

    #[inline]
    fn deref(&self) -> &[AddressRange] {
        match self {
            Self::Given(ranges) => ranges,
            Self::DmaBuf(range) => std::slice::from_ref(range),
        }
    }
}

/// Checks a request against the domain's mode and the provider's limits.
#[inline]
pub(super) fn check<'a>(
    attr: &MrAttr<'a>,
    flags: MrFlags,
    mode: MrMode,
    provider: &ProviderAttr,
) -> Result<Ranges<'a>> {
    check_bits(attr, flags, provider)?;
    if attr.offset != 0 {
        return Err(Error::new(ErrorKind::ReservedOffset, "regattr")
            .context("offset", attr.offset)
            .remedy("set offset to 0: fi_mr(3) reserves it"));
    }
    if attr.hmem_data != 0 {
        return Err(Error::new(ErrorKind::ReservedHmemData, "regattr")
            .context("hmem_data", attr.hmem_data)
            .remedy("leave hmem_data at 0: fi_mr(3) reserves it"));
    }
    if attr.page_size != 0 {
        check_page_size(attr.page_size, provider)?;
    }
    if let Some(parallel) = &attr.parallel {
        check_chunk(parallel.chunk)?;
    }
    if !mode.contains(MrMode::PROV_KEY) && attr.requested_key == Some(KEY_NOT_AVAILABLE) {
        return Err(Error::new(ErrorKind::KeyRejected, "regattr")
            .context("requested_key", format_args!("{KEY_NOT_AVAILABLE:#x}"))
            .remedy("request another key: this number means \"no key\" (FI_KEY_NOTAVAIL)"));
    }
    match (attr.dma_buf, flags.contains(MrFlags::MR_DMABUF)) {
        (None, false) => {
            check_ranges(attr.ranges, provider)?;
            Ok(Ranges::Given(attr.ranges))
        }
        (Some(buffer), true) => Ok(Ranges::DmaBuf(check_dma_buf(attr, &buffer, provider)?)),
        (given, _) => Err(Error::new(ErrorKind::InvalidArgument, "regattr")
            .context("dma_buf", if given.is_some() { "given" } else { "missing" })
            .context("flags", flags)
            .remedy("set both MR_DMABUF and the dma_buf attribute, or neither")),
    }
}

#[inline]
fn check_bits(attr: &MrAttr<'_>, flags: MrFlags, provider: &ProviderAttr) -> Result<()> {
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
            .context("flags", bad_flags)
            .remedy(remedy));
    }
    let bad_access = attr.access.difference(Access::all());
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
    if ranges.len() > provider.mr_iov_limit || ranges.is_empty() {
        let kind = if ranges.is_empty() { ErrorKind::ZeroLength } else { ErrorKind::TooManyRanges };
        return Err(Error::new(kind, "regattr")
            .provider(provider.nic.to_string())
            .context("ranges", ranges.len())
            .context("mr_iov_limit", provider.mr_iov_limit)
            .remedy("pass between 1 and mr_iov_limit ranges"));
    }
    let mut total = 0u64;
    for (index, range) in ranges.iter().enumerate() {
        if range.is_empty() {
            // The error names no address, because an empty `Vec` has none.
            return Err(Error::new(ErrorKind::ZeroLength, "regattr")
                .context("index", index)
                .context("length", 0)
                .remedy("register at least one byte"));
        }
        total = total.saturating_add(range.len());
    }
    check_length(total, provider)
}

#[inline]
fn check_length(total: u64, provider: &ProviderAttr) -> Result<()> {
    if total > provider.max_mr_size {
        return Err(Error::new(ErrorKind::TooLong, "regattr")
            .provider(provider.nic.to_string())
            .context("length", total)
            .context("max_mr_size", provider.max_mr_size)
            .remedy("register the range in parts of at most max_mr_size bytes"));
    }
    Ok(())
}

fn check_dma_buf(
    attr: &MrAttr<'_>,
    buffer: &DmaBufAttr<'_>,
    provider: &ProviderAttr,
) -> Result<AddressRange> {
    if attr.base.is_some() {
        return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
            .context("base", "given")
            .remedy("leave out MR_DMABUF or the base: a sub-region uses the memory of its base"));
    }
    if !attr.ranges.is_empty() {
        return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
            .context("ranges", attr.ranges.len())
            .remedy("pass no ranges: the dma_buf attribute has the range"));
    }
    if buffer.len == 0 {
        return Err(Error::new(ErrorKind::ZeroLength, "regattr")
            .context("dma_buf", "length 0")
            .remedy("register at least one byte"));
    }
    check_length(buffer.len, provider)?;
    let DmaBufOffset(offset) = buffer.offset;
    let start = buffer.base_addr.unwrap_or_default().checked_add(offset).ok_or_else(|| {
        Error::new(ErrorKind::AddressWraps, "regattr")
            .context("base_addr", buffer.base_addr.unwrap_or_default())
            .context("offset", buffer.offset)
    })?;
    AddressRange::new(start, buffer.len)
}

/// Checks a sub-region against its base, which is a region of the same domain.
pub(super) fn check_base(base: &MemoryRegion, attr: &MrAttr<'_>) -> Result<()> {
    let refuse = |kind, remedy: &'static str| {
        Err(Error::new(kind, "regattr").context("base", base.range()).remedy(remedy))
    };
    if base.inner().registered().is_none() {
        return refuse(ErrorKind::BadState, "wait until the base is registered");
    }
    let [range] = attr.ranges else {
        return refuse(ErrorKind::TooManyRanges, "pass one range: a sub-region has only one");
    };
    if base.inner().offset_of(*range).is_none() {
        return Err(Error::new(ErrorKind::OutOfBounds, "regattr")
            .context("range", range)
            .context("base", base.range())
            .remedy("pass a range inside one range of the base"));
    }
    if attr.access.nic_writes() && !base.access().nic_writes() {
        return Err(Error::new(ErrorKind::AccessDenied, "regattr")
            .context("access", attr.access)
            .context("base_access", base.access())
            .remedy("register the base with a right to write, for example RECV or REMOTE_WRITE"));
    }
    if attr.page_size != 0 {
        return refuse(ErrorKind::BadPageSize, "use 0: a sub-region has the page size of its base");
    }
    Ok(())
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
