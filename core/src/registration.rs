//! The inputs of a registration. The domain creates them once for each registration, and all later
//! steps borrow them.

use std::{any::Any, fmt, os::fd::BorrowedFd, str::FromStr, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    Access, AddressRange, Addressing, Allocation, AuthKey, DeviceId, DmaBufOffset, Error,
    ErrorKind, Iface, MrFlags, Result, SharedExports, dma_buf::DmaBufMapping,
    handle::ProviderRegion, named_enum,
};

/// The inputs of a registration: the memory, the rights, the key and the settings.
#[derive(Clone, Copy, Debug)]
pub struct Registration<'a> {
    /// The address ranges to register, at least one. All are memory of one iface and one device.
    pub ranges: &'a [AddressRange],
    /// The kind of the memory, with its owner.
    pub memory: RegisteredMemory<'a>,
    /// The rights of local and remote accesses.
    pub access: Access,
    /// The registration flags. The domain has checked that the provider supports them
    /// ([`ProviderAttr::flags`](crate::provider::ProviderAttr::flags)).
    pub flags: MrFlags,
    /// The key number that the application requests, or the provider's choice.
    pub key: KeyRequest,
    /// The authorization key of the request, or the domain's if the request has none.
    pub auth_key: &'a AuthKey,
    /// The kind of addresses by which peers reach the region.
    pub addressing: Addressing,
    /// The page size in bytes. 0 lets the provider choose the page size.
    pub page_size: usize,
    /// True to make the region usable at once. If false, the region is unusable until the domain
    /// enables it. A provider without [`Enabling`](crate::provider::Enabling) ignores this field:
    /// its regions are always usable at once.
    pub enabled: bool,
    /// The settings for registering host memory in parts, by parallel driver calls. With `None`,
    /// the provider splits only ranges that are too long for one call. A provider that ignores
    /// these settings reports progress once, at the end. The progress callback never panics here:
    /// the domain catches a panic of the application's callback.
    pub parallel: Option<&'a Parallel<'a>>,
    /// The domain's policy for direct access to device memory.
    pub policy: P2pPolicy,
    /// The direct paths that the domain allows, in the order in which they are tried, each at most
    /// once. `None` means the NIC's own order.
    pub direct_paths: Option<&'a [DirectPath]>,
    /// True to check each direct path of a device and NIC before its first use: the path selector
    /// transfers bytes over the path ([`DomainAttr::reach_check`](crate::DomainAttr::reach_check)).
    pub reach_check: bool,
    /// The order in which the NIC's writes become visible. A provider without relaxed ordering uses
    /// the strict order.
    pub ordering: WriteOrdering,
    /// True if transfers that use the region may call its iface. If false, the path selector
    /// refuses memory that transfers can reach only by calls of its iface.
    pub driver_calls_in_transfers: bool,
    /// Exports of earlier registrations, which the path selector may use and extend
    /// ([`Request::exports`](crate::Request::exports)). `None` to export the memory anew.
    pub exports: Option<&'a SharedExports>,
    /// Settings that only this provider has ([`Request::extension`](crate::Request::extension)).
    /// The provider has accepted them
    /// ([`ProviderDomain::accepts`](crate::provider::ProviderDomain::accepts)).
    pub extension: Option<&'a (dyn Any + Send + Sync)>,
}

impl<'a> Registration<'a> {
    /// Creates the inputs for a registration of host memory that the region does not own.
    ///
    /// - The region has virtual addresses, strict ordering and no flags, and is enabled at once.
    /// - The provider chooses the key and the page size, and splits only ranges that are too long
    ///   for one driver call.
    /// - The policy is [`P2pPolicy::Enabled`], with the NIC's own order of direct paths and without
    ///   reach checks.
    /// - Transfers that use the region may call drivers.
    #[must_use]
    pub fn new(ranges: &'a [AddressRange], access: Access, auth_key: &'a AuthKey) -> Self {
        Self {
            ranges,
            memory: RegisteredMemory::Host { owned: false },
            access,
            flags: MrFlags::empty(),
            key: KeyRequest::Provider,
            auth_key,
            addressing: Addressing::Virtual,
            page_size: 0,
            enabled: true,
            parallel: None,
            policy: P2pPolicy::default(),
            direct_paths: None,
            reach_check: false,
            ordering: WriteOrdering::Strict,
            driver_calls_in_transfers: true,
            exports: None,
            extension: None,
        }
    }
}

/// The order in which a NIC's writes to a region become visible.
///
/// The default is [`Strict`](Self::Strict), the order of `ibv_reg_mr`.
/// [`DomainAttr::ordering`](crate::DomainAttr::ordering) changes it for all regions of a domain,
/// and [`Request::ordering`](crate::Request::ordering) for one region.
///
/// **Use [`Relaxed`](Self::Relaxed) only for memory that software does not poll.** With relaxed
/// ordering a flag in memory may become visible before the data that was written ahead of it. The
/// last byte of a transfer may also become visible early. A GPU kernel that polls memory sees the
/// same effects. Memory that is read after a completion is safe with both orders.
///
/// ```no_run
/// use hmem_core::{Access, Domain, DomainAttr, Region, Request, Result, WriteOrdering};
///
/// /// The regions of a domain with these attributes are read after completions.
/// fn bulk() -> DomainAttr {
///     DomainAttr { ordering: WriteOrdering::Relaxed, ..DomainAttr::default() }
/// }
///
/// /// Software polls this region.
/// fn flags(domain: &Domain) -> Result<Region<Vec<u8>>> {
///     let request = Request::new(vec![0_u8; 64], Access::REMOTE_WRITE);
///     Ok(domain.submit(request.ordering(WriteOrdering::Strict))?)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WriteOrdering {
    /// Writes may overtake each other (relaxed ordering of PCI Express), which is faster on many
    /// machines. A completion still becomes visible after the bytes of its request. The NIC, the
    /// driver and the machine may ignore this setting.
    Relaxed,
    /// Writes become visible in the order in which the NIC issues them.
    #[default]
    Strict,
}

/// The kind of memory that is registered, with its owner.
#[derive(Clone, Copy, Debug)]
pub enum RegisteredMemory<'a> {
    /// Host memory. The provider reaches it by the addresses of the ranges.
    Host {
        /// True if the pages are guaranteed to stay mapped until the region is closed: the region
        /// owns them, or [`Domain::scope`](crate::Domain::scope) borrows them.
        owned: bool,
    },
    /// Memory of a device iface.
    Device {
        /// The iface.
        iface: &'a Arc<dyn Iface>,
        /// The allocation of each range, in the order of the ranges. All have the same iface and
        /// device. The domain queried them for this registration.
        allocations: &'a [Allocation],
        /// True if the region owns the memory, which then stays allocated until the region is
        /// closed.
        owned: bool,
    },
    /// A dma-buf that the application supplied. The registration has exactly one range.
    DmaBuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// The offset of the range in the dma-buf.
        offset: DmaBufOffset,
        /// The iface of the memory. `None` if the application named none, which means host memory.
        iface: Option<&'a Arc<dyn Iface>>,
        /// The device that the application named.
        device: Option<DeviceId>,
    },
    /// A part of a region that is already registered (a sub-region).
    Part {
        /// The registered region.
        base: ProviderRegion,
        /// The offset of the part in the region, in bytes.
        offset: u64,
    },
}

/// The choice of a region's key number, by the application or by the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRequest {
    /// The application chose this number (`requested_key`).
    Application(u64),
    /// The provider chooses the number.
    Provider,
}

named_enum! {
    /// A policy for direct access of NICs to device memory (`FI_OPT_FI_HMEM_P2P`), with libfabric's
    /// values 0 to 3.
    #[derive(Default, Serialize)]
    #[serde(rename_all = "kebab-case")]
    #[repr(u32)]
    pub enum P2pPolicy {
        /// Use direct access if possible, and staged copies otherwise.
        #[default]
        Enabled = "enabled",
        /// Use direct access, or fail.
        Required = "required",
        /// Use direct access if possible. Otherwise log a warning and use staged copies.
        Preferred = "preferred",
        /// Always use staged copies.
        Disabled = "disabled",
    }
}

/// A path by which a NIC accesses device memory itself, for
/// [`DomainAttr::direct_paths`](crate::DomainAttr::direct_paths).
///
/// The names are `dma-buf`, `dma-buf-pcie`, `dma-buf-data-direct` and `peer-memory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirectPath {
    /// A dma-buf with this mapping.
    DmaBuf(DmaBufMapping),
    /// A device address, which a peer-memory client resolves.
    PeerMemory,
}

impl DirectPath {
    /// All direct paths.
    pub const ALL: [Self; 4] = [
        Self::DmaBuf(DmaBufMapping::Default),
        Self::DmaBuf(DmaBufMapping::Pcie),
        Self::DmaBuf(DmaBufMapping::DataDirect),
        Self::PeerMemory,
    ];

    /// Returns the path's name in messages and lists.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DmaBuf(DmaBufMapping::Default) => "dma-buf",
            Self::DmaBuf(DmaBufMapping::Pcie) => "dma-buf-pcie",
            Self::DmaBuf(DmaBufMapping::DataDirect) => "dma-buf-data-direct",
            Self::PeerMemory => "peer-memory",
        }
    }

    /// Returns the text of a list, such as `dma-buf,peer-memory`, or `none` for an empty list.
    #[must_use]
    pub fn list(paths: &[Self]) -> String {
        match paths {
            [] => "none".to_owned(),
            paths => paths.iter().map(|path| path.name()).collect::<Vec<_>>().join(","),
        }
    }

    /// Parses a list: names separated by commas, or `none` for an empty list.
    ///
    /// ```
    /// use hmem_core::{iface::DmaBufMapping, path::DirectPath};
    ///
    /// let paths = DirectPath::parse_list("peer-memory,dma-buf")?;
    /// assert_eq!(paths, [DirectPath::PeerMemory, DirectPath::DmaBuf(DmaBufMapping::Default)]);
    /// assert!(DirectPath::parse_list("none")?.is_empty());
    /// # Ok::<(), hmem_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an unknown name, and for a path that is listed twice.
    pub fn parse_list(text: &str) -> Result<Vec<Self>> {
        if text.trim() == "none" {
            return Ok(Vec::new());
        }
        let paths: Vec<_> = text.split(',').map(str::parse).collect::<Result<_>>()?;
        Self::check(&paths)?;
        Ok(paths)
    }

    /// Checks that no path is listed twice.
    pub(crate) fn check(paths: &[Self]) -> Result<()> {
        let twice = |(at, path): (usize, &Self)| paths[..at].contains(path).then_some(*path);
        let Some(path) = paths.iter().enumerate().find_map(twice) else { return Ok(()) };
        Err(Error::new(ErrorKind::InvalidArgument, "direct paths")
            .context("list", Self::list(paths))
            .context("twice", path)
            .remedy("list each direct path at most once"))
    }
}

impl fmt::Display for DirectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DirectPath {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name.trim()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "direct paths").context("name", name).remedy(
                "list dma-buf, dma-buf-pcie, dma-buf-data-direct and peer-memory, separated by \
                     commas, or none",
            )
        })
    }
}

impl Serialize for DirectPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A callback that reports the progress of a long registration. Its arguments are the number of
/// bytes done so far and the total number.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// The settings for registering a long range of host memory in parts, by parallel driver calls.
///
/// A driver pins memory on one CPU per call, at 0.06 ns per byte or more. Several calls at once use
/// several CPUs. The result is one region with a key for each part. The region's
/// [`RemoteKey`](crate::RemoteKey) lists these keys, and transfers are split at the boundaries.
/// [`RemoteKey::as_u64`](crate::RemoteKey::as_u64) fails with Unsupported if there are several
/// parts. Some providers ignore these settings.
#[derive(Clone, Copy, Default)]
pub struct Parallel<'a> {
    /// The number of driver calls that run at once, each for one part. 0 means one per CPU.
    pub threads: usize,
    /// The length of a part in bytes, at least a page. With 0 the provider chooses the length, and
    /// splits only ranges that become faster to register.
    pub chunk: u64,
    /// A callback that reports progress after each part. Any of the registering threads calls it.
    /// If it panics, the remaining parts are registered without further calls. Then all parts are
    /// deregistered, and the call that registers panics. Asynchronous registrations
    /// ([`Domain::bind`](crate::Domain::bind)) do not call it.
    pub progress: Option<Progress<'a>>,
}

impl fmt::Debug for Parallel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parallel")
            .field("threads", &self.threads)
            .field("chunk", &self.chunk)
            .finish_non_exhaustive()
    }
}
