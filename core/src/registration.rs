//! The inputs of one registration, which the domain builds once and every later step borrows.

use std::{fmt, os::fd::BorrowedFd, sync::Arc};

use serde::Serialize;

use crate::{
    Access, AddressRange, Addressing, AuthKey, DmaBufOffset, Iface, MrFlags,
    handle::ProviderRegion, registry::AddressOwner,
};

/// The memory of one registration and what to register it for.
#[derive(Clone, Copy, Debug)]
pub struct Registration<'a> {
    /// The ranges, at least one. All of them belong to the owner of `memory`.
    pub ranges: &'a [AddressRange],
    /// The memory, whose owner was resolved once.
    pub memory: Memory<'a>,
    /// Rights of local and remote accesses.
    pub access: Access,
    /// Flags; only those in [`ProviderAttr::flags`](crate::provider::ProviderAttr::flags).
    pub flags: MrFlags,
    /// The key.
    pub key: KeyRequest,
    /// The authorization key: the domain's if the application gave none.
    pub auth_key: &'a AuthKey,
    /// The addressing for peers.
    pub addressing: Addressing,
    /// The page size to use, in bytes; 0 leaves it to the provider.
    pub page_size: usize,
    /// Set if the region can be used at once. Otherwise the domain enables it later. A provider
    /// without [`Enabling`](crate::provider::Enabling) ignores this: its regions are usable at
    /// once.
    pub enabled: bool,
    /// Set if host memory may be registered in parts, several at once. A provider that does not
    /// register in parts reports the whole range as done at the end.
    pub parallel: Option<&'a Parallel<'a>>,
    /// The domain's policy for device memory.
    pub policy: P2pPolicy,
    /// The order in which the bytes that the NIC writes become visible. A provider without the
    /// choice keeps the strict order.
    pub ordering: WriteOrdering,
}

impl<'a> Registration<'a> {
    /// Creates the inputs for host memory that the caller keeps allocated: no flags, a key that the
    /// provider picks, virtual addresses, enabled at once, strict ordering.
    #[must_use]
    pub fn new(ranges: &'a [AddressRange], access: Access, auth_key: &'a AuthKey) -> Self {
        Self {
            ranges,
            memory: Memory::Host { owned: false },
            access,
            flags: MrFlags::empty(),
            key: KeyRequest::Provider,
            auth_key,
            addressing: Addressing::Virtual,
            page_size: 0,
            enabled: true,
            parallel: None,
            policy: P2pPolicy::default(),
            ordering: WriteOrdering::Strict,
        }
    }
}

/// The order in which the bytes that a NIC writes into a region become visible.
///
/// A domain registers with [`Relaxed`](Self::Relaxed) unless
/// [`DomainAttr::ordering`](crate::DomainAttr::ordering) or
/// [`MrAttr::ordering`](crate::MrAttr::ordering) says otherwise. That is the right choice for bulk
/// transfers, whose end a completion tells.
///
/// **Register memory that software polls with [`Strict`](Self::Strict).** A program that waits for
/// a flag in memory to change, instead of for a completion, relies on the order: with relaxed
/// ordering the flag may be visible before the data that was written ahead of it. The same holds
/// for the last byte of one transfer, and for a device's kernel that polls.
///
/// ```
/// use hmem_core::{Access, AddressRange, MrAttr, WriteOrdering};
///
/// let flags = [0_u8; 64];
/// let ranges = [AddressRange::of(&flags)];
/// let attr = MrAttr::new(&ranges, Access::REMOTE_WRITE);
/// let polled = MrAttr { ordering: Some(WriteOrdering::Strict), ..attr };
/// # assert_eq!(attr.ordering, None);
/// # assert_eq!(polled.ordering, Some(WriteOrdering::Strict));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WriteOrdering {
    /// Writes may pass each other on their way through the machine (relaxed ordering of PCI
    /// Express), which is faster on many of them. A completion is visible after the bytes that it
    /// stands for. Whether the NIC, the driver and the machine make use of it is not known.
    #[default]
    Relaxed,
    /// Bytes become visible in the order in which the NIC writes them.
    Strict,
}

/// The memory of a registration.
#[derive(Clone, Copy, Debug)]
pub enum Memory<'a> {
    /// Host pages at the ranges' own addresses.
    Host {
        /// Set if the region owns the pages or a scope borrows them: they stay mapped until the
        /// region is closed.
        owned: bool,
    },
    /// Memory of a device iface.
    Device {
        /// The iface.
        iface: &'a Arc<dyn Iface>,
        /// The owner of the first range. The others have the same iface and device.
        owner: AddressOwner,
        /// As for [`Memory::Host`].
        owned: bool,
    },
    /// A dma-buf of the application, for the one range.
    DmaBuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// The offset of the range in it.
        offset: DmaBufOffset,
        /// The owner as the application names it.
        owner: AddressOwner,
    },
    /// Part of a registered region.
    Part {
        /// The region.
        base: ProviderRegion,
        /// The offset of the part in it, in bytes.
        offset: u64,
    },
}

/// The key that a region should get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRequest {
    /// This number (`requested_key`).
    Application(u64),
    /// Any number that the provider picks.
    Provider,
}

/// A policy for direct access to device memory (`FI_OPT_FI_HMEM_P2P`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u32)]
pub enum P2pPolicy {
    /// Direct where possible, staged otherwise.
    #[default]
    Enabled = 0,
    /// Direct, or an error.
    Required = 1,
    /// Direct where possible, with a warning when it is not.
    Preferred = 2,
    /// Never: always staged.
    Disabled = 3,
}

impl P2pPolicy {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Enabled, Self::Required, Self::Preferred, Self::Disabled];

    /// The name as it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Required => "required",
            Self::Preferred => "preferred",
            Self::Disabled => "disabled",
        }
    }
}

impl fmt::Display for P2pPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A callback of a long registration. It takes the bytes done and the bytes in all.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Registering a long range of host memory by several calls of the driver at once, each for a part:
/// pinning takes one CPU per call, 0.06 ns a byte or more.
///
/// The region is one to its owner and has a key for each part: [`RemoteKey`](crate::RemoteKey)
/// lists them, and transfers are cut at the seams. Its single key is Unsupported. A provider that
/// registers in one call whatever the length does so.
#[derive(Clone, Copy, Default)]
pub struct Parallel<'a> {
    /// Calls in flight at once; 0 for one per CPU.
    pub threads: usize,
    /// Bytes of a part, a page at least; 0 leaves it to the provider, which then cuts only what
    /// gains by it.
    pub chunk: u64,
    /// Called after each part, from any of the threads, with the bytes registered and the bytes in
    /// all.
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
