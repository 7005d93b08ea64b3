//! The memory that is checked: host memory of four sorts, and what ifaces allocate.

use std::{fmt, sync::Arc};

use hmem::{
    AddressRange, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceKind, OwnedBuffer, Result,
    system::MemFd,
};

/// A sort of memory.
#[derive(Clone, Debug)]
pub enum Memory {
    /// A `Vec`.
    Heap,
    /// Pages of their own, from the system iface.
    Mapped(Arc<dyn Iface>),
    /// The same, registered by its address: the region does not own it.
    Borrowed(Arc<dyn Iface>),
    /// A mapped memory file.
    MemFd,
    /// Memory of a device iface.
    Allocated {
        /// Whose.
        iface: Arc<dyn Iface>,
        /// On which device; `None` for memory of no particular one.
        device: Option<DeviceId>,
        /// Which kind.
        kind: AllocationKind,
    },
}

impl Memory {
    /// The iface's name.
    #[must_use]
    pub fn iface(&self) -> &str {
        match self {
            Self::Heap | Self::Mapped(_) | Self::Borrowed(_) | Self::MemFd => "system",
            Self::Allocated { iface, .. } => iface.name(),
        }
    }

    /// The iface's kind.
    #[must_use]
    pub fn iface_kind(&self) -> IfaceKind {
        match self {
            Self::Heap | Self::Mapped(_) | Self::Borrowed(_) | Self::MemFd => IfaceKind::SYSTEM,
            Self::Allocated { iface, .. } => iface.kind(),
        }
    }

    /// The device, where it has one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        match self {
            Self::Allocated { device, .. } => *device,
            _ => None,
        }
    }

    /// The sort within the iface: `heap`, `mmap`, `borrowed`, `memfd`, or the allocation kind.
    #[must_use]
    pub fn sort(&self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Mapped(_) => "mmap",
            Self::Borrowed(_) => "borrowed",
            Self::MemFd => "memfd",
            Self::Allocated { kind, .. } => kind.name(),
        }
    }

    /// Whether a NIC reaches it as host pages.
    #[must_use]
    pub fn is_host(&self) -> bool {
        match self {
            Self::Allocated { kind, .. } => kind.cpu_accessible(),
            _ => true,
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device() {
            Some(device) => write!(f, "{}:{device} {}", self.iface(), self.sort()),
            None => write!(f, "{} {}", self.iface(), self.sort()),
        }
    }
}

/// Zeroed heap memory, or an error where `vec!` would end the process.
///
/// # Errors
/// OutOfResources.
pub(crate) fn heap(len: u64) -> Result<Vec<u8>> {
    let refused = || {
        Error::new(ErrorKind::OutOfResources, "allocate")
            .context("length", len)
            .remedy("this process cannot have that much memory: ask for fewer bytes")
    };
    let len = usize::try_from(len).map_err(|_| refused())?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(len).map_err(|_| refused())?;
    memory.resize(len, 0);
    Ok(memory)
}

/// A memory file that a region can own.
#[derive(Debug)]
pub(super) struct FileBuffer(pub(super) MemFd);

// SAFETY: the file stays mapped where it is until it is dropped, sealed against shrinking, and `MemFd` makes no
// reference into the mapping.
#[allow(unsafe_code, reason = "the trait states what a buffer promises")]
unsafe impl OwnedBuffer for FileBuffer {
    type Parts = MemFd;

    fn into_parts(self) -> MemFd {
        self.0
    }

    fn from_parts(parts: MemFd) -> Self {
        Self(parts)
    }

    fn range(parts: &MemFd) -> AddressRange {
        parts.range()
    }

    fn read(parts: &MemFd, offset: u64, into: &mut [u8]) -> Result<()> {
        parts.read(offset, into)
    }

    fn write(parts: &MemFd, offset: u64, from: &[u8]) -> Result<()> {
        parts.write(offset, from)
    }
}
