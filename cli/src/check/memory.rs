//! The memory to check: host memory of several sorts, and allocations of ifaces.

#![allow(unsafe_code, reason = "owned buffers of the memory to check")]

use std::{fmt, sync::Arc};

use hmem::{
    Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt, IfaceKind, Place,
    Result, os_page_sizes,
    system::{MemFd, System},
};

use crate::json::memory_name;

/// A sort of memory to check, such as a heap buffer or device memory.
#[derive(Clone, Debug)]
pub(super) enum MemorySort {
    /// A `Vec` on the heap.
    Heap,
    /// Pages that the system iface maps, and that the region owns.
    Mapped(Arc<dyn Iface>),
    /// Pages that the system iface maps, and that the region does not own. They are registered by
    /// address.
    Borrowed(Arc<dyn Iface>),
    /// A mapped memory file (memfd).
    MemFd,
    /// Huge pages that the system iface maps.
    HugePages(Arc<System>),
    /// Memory that a device iface allocates.
    Allocated {
        /// The iface that allocates the memory.
        iface: Arc<dyn Iface>,
        /// The device that holds the memory; `None` for host memory.
        device: Option<DeviceId>,
        /// The allocation kind, such as device or managed memory.
        kind: AllocationKind,
    },
}

impl MemorySort {
    /// Returns the name of the iface that owns the memory.
    pub(super) fn iface(&self) -> &str {
        match self {
            Self::Allocated { iface, .. } => iface.name(),
            _ => "system",
        }
    }

    /// Returns the kind of the iface that owns the memory.
    pub(super) fn iface_kind(&self) -> IfaceKind {
        match self {
            Self::Allocated { iface, .. } => iface.kind(),
            _ => IfaceKind::SYSTEM,
        }
    }

    /// Returns the device that holds the memory, or `None` for host memory.
    pub(super) fn device(&self) -> Option<DeviceId> {
        match self {
            Self::Allocated { device, .. } => *device,
            _ => None,
        }
    }

    /// Returns the name of the sort: `heap`, `mmap`, `borrowed`, `memfd`, `huge-pages`, or the name
    /// of the allocation kind.
    pub(super) fn sort(&self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Mapped(_) => "mmap",
            Self::Borrowed(_) => "borrowed",
            Self::MemFd => "memfd",
            Self::HugePages(_) => "huge-pages",
            Self::Allocated { kind, .. } => kind.name(),
        }
    }

    /// Returns whether the CPU can access this memory, so that NICs reach it as host pages.
    pub(super) fn is_host(&self) -> bool {
        match self {
            Self::Allocated { kind, .. } => kind.cpu_accessible(),
            _ => true,
        }
    }
}

impl fmt::Display for MemorySort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device().map(|device| device.0);
        write!(f, "{} {}", memory_name(self.iface(), device), self.sort())
    }
}

/// Allocates zeroed heap memory. Returns an error, unlike `vec!`, if the process cannot have that
/// much memory.
pub(crate) fn heap(len: u64) -> Result<Vec<u8>> {
    const ZEROS: [u8; 1024] = [0; 1024];
    let refused = || {
        Error::new(ErrorKind::OutOfResources, "allocate")
            .context("length", len)
            .remedy("ask for fewer bytes: this process cannot have that much memory")
    };
    let len = usize::try_from(len).map_err(|_| refused())?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(len).map_err(|_| refused())?;
    // Without optimisation, `Vec::resize` writes byte by byte.
    while memory.len() < len {
        memory.extend_from_slice(&ZEROS[..ZEROS.len().min(len - memory.len())]);
    }
    Ok(memory)
}

/// A memory file (memfd) that a region can own.
#[derive(Debug)]
pub(super) struct FileBuffer(pub(super) MemFd);

// SAFETY: `MemFd` keeps the file mapped at its address until it is dropped, seals it against
// shrinking, and makes no reference into the mapping.
unsafe impl hmem::Memory for FileBuffer {
    type Parts = MemFd;

    fn into_parts(self) -> MemFd {
        self.0
    }

    fn from_parts(parts: MemFd) -> Self {
        Self(parts)
    }

    fn place(parts: &MemFd) -> Place<'_> {
        Place::Host { range: parts.range(), writable: true }
    }
}

/// An allocation of huge pages that a region can own.
#[derive(Debug)]
pub(super) struct HugeBuffer {
    system: Arc<System>,
    allocation: Allocation,
}

impl HugeBuffer {
    /// Allocates `len` bytes in huge pages. Uses the smallest size of huge pages of which enough
    /// are free.
    ///
    /// # Errors
    /// If no size of huge pages has enough free pages, the error for the smallest size.
    pub(super) fn allocate(system: &Arc<System>, len: u64) -> Result<Self> {
        let mut tried = os_page_sizes()[1..].iter().map(|size| system.huge_pages(len, *size));
        let first = tried.next().unwrap_or_else(|| system.huge_pages(len, 0));
        let allocation = first.or_else(|why| tried.find_map(Result::ok).ok_or(why))?;
        Ok(Self { system: Arc::clone(system), allocation })
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        // SAFETY: this buffer owns the allocation, makes no reference into it, and frees it once.
        if let Err(error) = unsafe { self.system.free(&self.allocation) } {
            tracing::error!(%error, "cannot free huge pages");
        }
    }
}

// SAFETY: only `drop` frees the pages, which keep their address until then, and no code makes a
// reference into them.
unsafe impl hmem::Memory for HugeBuffer {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn place(parts: &Self) -> Place<'_> {
        Place::Host { range: parts.allocation.range, writable: true }
    }
}
