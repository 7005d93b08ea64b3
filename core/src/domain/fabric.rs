//! The registration calls of `fi_mr(3)`, with all its attributes.
//!
//! These functions are for programs that follow libfabric's calls. They return regions that hold no
//! memory ([`MemoryRegion`]). Other programs use [`Domain::register`], [`Domain::submit`] and
//! [`Batch`](crate::Batch).
//!
//! ```no_run
//! use hmem_core::{
//!     Access, AddressRange, Domain, MemoryRegion, MrFlags, Promise, Raw, Result,
//!     fabric::{self, MrAttr},
//! };
//!
//! /// # Safety
//! /// The memory must stay mapped and otherwise unused until the region is closed.
//! unsafe fn expose(domain: &Domain, ranges: &[AddressRange]) -> Result<MemoryRegion> {
//!     // SAFETY: the caller keeps the memory.
//!     let memory = unsafe { Raw::new(ranges, Promise::ReadWrite) };
//!     let attr = MrAttr { requested_key: Some(42), ..MrAttr::new(memory, Access::REMOTE_READ) };
//!     fabric::regattr(domain, &attr, MrFlags::empty())
//! }
//! ```

use std::{borrow::Cow, sync::OnceLock};

use super::{
    Domain,
    memory::{BorrowedDmaBuf, Raw},
    prefault::Prefault,
    region::MemoryRegion,
    region_state::KeepAlive,
    request::{RegionRequest, Source},
    terms::Terms,
};
use crate::{
    Access, AddressRange, AuthKey, DeviceId, Error, ErrorKind, IfaceKind, MrFlags, Result,
    registration::{Parallel, WriteOrdering},
};

/// The memory of a request.
#[derive(Clone, Copy, Debug)]
pub enum MrMemory<'a> {
    /// Memory by its addresses: 1 to `mr_iov_limit` ranges, which become one region.
    Ranges(Raw<&'a [AddressRange]>),
    /// A dma-buf. The request needs [`MrFlags::MR_DMABUF`].
    DmaBuf(Raw<BorrowedDmaBuf<'a>>),
    /// A part of a registered region, to be registered as a sub-region.
    Part {
        /// The registered region that contains the part (`base_mr`).
        base: &'a MemoryRegion,
        /// The addresses of the part. They must lie inside one range of `base`.
        range: AddressRange,
    },
}

impl<'a> From<Raw<&'a [AddressRange]>> for MrMemory<'a> {
    fn from(ranges: Raw<&'a [AddressRange]>) -> Self {
        Self::Ranges(ranges)
    }
}

impl<'a> From<Raw<BorrowedDmaBuf<'a>>> for MrMemory<'a> {
    fn from(buffer: Raw<BorrowedDmaBuf<'a>>) -> Self {
        Self::DmaBuf(buffer)
    }
}

impl<'a> From<(&'a MemoryRegion, AddressRange)> for MrMemory<'a> {
    fn from((base, range): (&'a MemoryRegion, AddressRange)) -> Self {
        Self::Part { base, range }
    }
}

/// A request to register memory (`struct fi_mr_attr`).
#[derive(Clone, Copy, Debug)]
pub struct MrAttr<'a> {
    /// The memory to register.
    pub memory: MrMemory<'a>,
    /// The rights of local and remote accesses.
    pub access: Access,
    /// Reserved: must be 0.
    pub offset: u64,
    /// The requested key. Ignored in PROV_KEY mode. With `None` the provider chooses the key.
    pub requested_key: Option<u64>,
    /// A number that the application chooses, for the event of an asynchronous registration.
    pub context: u64,
    /// The authorization key. `None` or an empty key means the domain's key.
    pub auth_key: Option<&'a AuthKey>,
    /// The iface that owns the memory, under the rules of
    /// [`Request::owner`](super::Request::owner). With `None` the domain queries its ifaces. A
    /// sub-region has the iface of its base.
    pub iface: Option<IfaceKind>,
    /// The device that owns the memory, under the rules of
    /// [`Request::owner`](super::Request::owner). With `None` the domain queries its ifaces. A
    /// dma-buf cannot be queried. With `None` a dma-buf counts as memory of no device, and
    /// completion queues flush no device for it ([`Domain::open_cq`]).
    ///
    /// The domain ignores the device if [`MrAttr::iface`] is `None` or the system iface, if
    /// [`DomainAttr::hmem`](crate::DomainAttr::hmem) is false, and with
    /// [`MrFlags::HMEM_HOST_ALLOC`].
    pub device: Option<DeviceId>,
    /// Reserved: must be 0.
    pub hmem_data: u64,
    /// The page size that the provider should use, in bytes. With 0 the provider chooses. Must be 0
    /// for a sub-region.
    pub page_size: usize,
    /// The expected number of sub-regions. This library ignores the hint.
    pub sub_mr_count: usize,
    /// The settings for populating host pages on several CPUs before the registration. With `None`,
    /// the registration itself populates them.
    pub prefault: Option<Prefault<'a>>,
    /// The settings for dividing host memory into parts that several threads register at once. With
    /// `None`, the provider divides only ranges that the NIC cannot register by one call.
    pub parallel: Option<Parallel<'a>>,
    /// The order in which the NIC's writes become visible. `None` means the order of
    /// [`DomainAttr::ordering`](crate::DomainAttr::ordering). Memory that software polls needs the
    /// strict order.
    pub ordering: Option<WriteOrdering>,
}

impl<'a> MrAttr<'a> {
    /// Creates a request for `memory` with `access`, and defaults for everything else.
    #[must_use]
    pub fn new(memory: impl Into<MrMemory<'a>>, access: Access) -> Self {
        Self {
            memory: memory.into(),
            access,
            offset: 0,
            requested_key: None,
            context: 0,
            auth_key: None,
            iface: None,
            device: None,
            hmem_data: 0,
            page_size: 0,
            sub_mr_count: 0,
            prefault: None,
            parallel: None,
            ordering: None,
        }
    }

    /// Sets [`MrAttr::requested_key`].
    #[must_use]
    pub const fn key(mut self, requested_key: u64) -> Self {
        self.requested_key = Some(requested_key);
        self
    }

    fn check_reserved(&self) -> Result<()> {
        let refused = if self.offset != 0 {
            Error::new(ErrorKind::ReservedOffset, "regattr")
                .context("offset", self.offset)
                .remedy("set offset to 0: fi_mr(3) reserves it")
        } else if self.hmem_data != 0 {
            Error::new(ErrorKind::ReservedHmemData, "regattr")
                .context("hmem_data", self.hmem_data)
                .remedy("leave hmem_data at 0: fi_mr(3) reserves it")
        } else {
            return Ok(());
        };
        tracing::debug!(error = %refused, "registration refused");
        Err(refused)
    }

    fn terms(&self, flags: MrFlags) -> Terms<'a> {
        Terms {
            flags,
            key: self.requested_key,
            context: self.context,
            auth_key: self.auth_key.map(Cow::Borrowed),
            iface: self.iface,
            device: self.device,
            page_size: self.page_size,
            ordering: self.ordering,
            prefault: self.prefault,
            parallel: self.parallel,
            ..Terms::new(self.access)
        }
    }

    fn request<'r>(&'r self, terms: &'r Terms<'r>) -> RegionRequest<'r> {
        let (source, promise) = match self.memory {
            MrMemory::Ranges(raw) => (Source::Ranges(raw.at()), raw.promise()),
            MrMemory::DmaBuf(raw) => (Source::DmaBuf(*raw.at()), raw.promise()),
            MrMemory::Part { base, range } => return RegionRequest::part(base, range, terms),
        };
        RegionRequest { source, promise, keep: KeepAlive::Caller, terms }
    }
}

/// Registers one range (`fi_mr_reg`).
///
/// # Errors
/// The errors of [`regattr`].
pub fn reg(
    on: &Domain,
    memory: Raw,
    access: Access,
    requested_key: u64,
    flags: MrFlags,
) -> Result<MemoryRegion> {
    regattr(on, &MrAttr::new(memory.as_slice(), access).key(requested_key), flags)
        .map_err(|error| error.of_call("reg"))
}

/// Registers several ranges as one region (`fi_mr_regv`).
///
/// # Errors
/// The errors of [`regattr`].
pub fn regv(
    on: &Domain,
    memory: Raw<&[AddressRange]>,
    access: Access,
    requested_key: u64,
    flags: MrFlags,
) -> Result<MemoryRegion> {
    regattr(on, &MrAttr::new(memory, access).key(requested_key), flags)
        .map_err(|error| error.of_call("regv"))
}

/// Registers memory with the attributes `attr` (`fi_mr_regattr`).
///
/// If an event queue is bound ([`Domain::bind`]), the call returns a pending region. A request that
/// breaks a rule of the domain's mode or a limit of the NIC is still an error of this call and
/// causes no event. A later failure is reported by an event.
///
/// # Errors
/// - The errors of [`Domain::register`].
/// - [`ErrorKind::ReservedOffset`] and [`ErrorKind::ReservedHmemData`] if [`MrAttr::offset`] or
///   [`MrAttr::hmem_data`] is not 0.
/// - [`ErrorKind::InvalidArgument`] for a dma-buf without [`MrFlags::MR_DMABUF`], and for other
///   memory with this flag.
/// - For a part of a region: the errors of [`MemoryRegion::sub`], and
///   [`ErrorKind::InvalidArgument`] for a base of another domain.
#[inline]
pub fn regattr(on: &Domain, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
    attr.check_reserved()?;
    let terms = attr.terms(flags);
    on.inner.register(&attr.request(&terms))
}

/// Registers like [`regattr`], and stores the region in `out` before the registration's event can
/// be read.
///
/// # Errors
/// The errors of [`regattr`], and [`ErrorKind::BadState`] if `out` already has a region. After an
/// error nothing is registered.
pub fn regattr_into(
    on: &Domain,
    attr: &MrAttr<'_>,
    flags: MrFlags,
    out: &OnceLock<MemoryRegion>,
) -> Result<()> {
    let taken = || {
        Error::new(ErrorKind::BadState, "regattr")
            .context("out", "has a region")
            .remedy("pass an empty OnceLock for the region")
    };
    if out.get().is_some() {
        return Err(taken());
    }
    attr.check_reserved()?;
    let terms = attr.terms(flags);
    let request = attr.request(&terms);
    match on.inner.worker.get() {
        None => out.set(on.inner.register_now(&request, None)?).map_err(|_| taken()),
        Some(worker) => {
            let (region, job) = worker.job(&on.inner, &request)?;
            // The region is dropped last, because its drop waits for the end of the job.
            if let Err(_region) = out.set(region) {
                job.discard();
                return Err(taken());
            }
            worker.submit(job);
            Ok(())
        }
    }
}
