//! The memory that is checked: host memory of four sorts, and what ifaces allocate.

use std::{fmt, sync::Arc};

use hmem::{
    AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt,
    IfaceKind, OwnedBuffer, Result,
    system::{MemFd, System},
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
    /// Huge pages.
    HugePages(Arc<System>),
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
            Self::Heap | Self::Mapped(_) | Self::Borrowed(_) | Self::MemFd | Self::HugePages(_) => {
                "system"
            }
            Self::Allocated { iface, .. } => iface.name(),
        }
    }

    /// The iface's kind.
    #[must_use]
    pub fn iface_kind(&self) -> IfaceKind {
        match self {
            Self::Heap | Self::Mapped(_) | Self::Borrowed(_) | Self::MemFd | Self::HugePages(_) => {
                IfaceKind::SYSTEM
            }
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

    /// The sort within the iface: `heap`, `mmap`, `borrowed`, `memfd`, `huge-pages`, or the
    /// allocation kind.
    #[must_use]
    pub fn sort(&self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Mapped(_) => "mmap",
            Self::Borrowed(_) => "borrowed",
            Self::MemFd => "memfd",
            Self::HugePages(_) => "huge-pages",
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

// SAFETY: the file stays mapped where it is until it is dropped, sealed against shrinking, and
// `MemFd` makes no reference into the mapping.
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

/// Huge pages that a region can own.
#[derive(Debug)]
pub(super) struct HugeBuffer {
    system: Arc<System>,
    allocation: Allocation,
}

impl HugeBuffer {
    /// Allocates.
    ///
    /// # Errors
    /// Unavailable, naming what the machine lacks.
    pub(super) fn allocate(system: &Arc<System>, len: u64) -> Result<Self> {
        Ok(Self { system: Arc::clone(system), allocation: system.huge_pages(len)? })
    }

    fn part(&self, offset: u64, len: usize) -> Result<hmem::Address> {
        let part = self.allocation.range.slice(offset, len as u64);
        part.map(AddressRange::start).ok_or_else(|| Error::new(ErrorKind::OutOfBounds, "copy"))
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        // SAFETY: the buffer owns the allocation and makes no reference into it.
        #[allow(unsafe_code, reason = "freeing is unsafe")]
        if let Err(error) = unsafe { self.system.free(&self.allocation) } {
            tracing::error!(%error, "huge pages could not be freed");
        }
    }
}

// SAFETY: the pages stay mapped where they are until they are freed on drop, and no reference into
// them is made.
#[allow(unsafe_code, reason = "the trait states what a buffer promises")]
unsafe impl OwnedBuffer for HugeBuffer {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn range(parts: &Self) -> AddressRange {
        parts.allocation.range
    }

    #[allow(unsafe_code, reason = "a copy by address")]
    fn read(parts: &Self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = parts.part(offset, into.len())?;
        // SAFETY: `parts` frees the pages when it is dropped, which the borrow excludes.
        unsafe { parts.system.read(from, into) }
    }

    #[allow(unsafe_code, reason = "a copy by address")]
    fn write(parts: &Self, offset: u64, from: &[u8]) -> Result<()> {
        let to = parts.part(offset, from.len())?;
        // SAFETY: `parts` frees the pages when it is dropped, which the borrow excludes, and makes
        // no reference into them.
        unsafe { parts.system.write(to, from) }
    }
}
