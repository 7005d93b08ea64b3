//! Allocations, which an iface reports for the addresses in them.

use crate::{Address, AddressRange, AllocOffset, DeviceId, IfaceKind};

/// The way in which memory was allocated. Each kind has its own registration rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllocationKind {
    /// Memory of one device, not accessible to the CPU.
    Device,
    /// Page-locked host memory from the device API's host allocator.
    Host,
    /// The application's own host memory, page-locked by the device API. It is registered, watched
    /// and cached as the system memory that it is.
    HostRegistered,
    /// Memory that migrates between host and devices.
    Managed,
    /// Device memory from a stream-ordered pool.
    StreamOrdered,
    /// A reserved address range with separately mapped physical segments (VMM).
    Virtual,
    /// Device memory of another process, opened here.
    Imported,
    /// Ordinary memory of the operating system.
    System,
}

impl AllocationKind {
    /// The kind in lower case, as `info` and the JSON output print it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::HostRegistered => "host-registered",
            Self::Managed => "managed",
            Self::StreamOrdered => "stream-ordered",
            Self::Virtual => "virtual",
            Self::Imported => "imported",
            Self::System => "system",
        }
    }

    /// Returns true if the CPU can load and store there.
    #[must_use]
    pub const fn cpu_accessible(self) -> bool {
        matches!(self, Self::Host | Self::HostRegistered | Self::Managed | Self::System)
    }
}

/// A number that an iface never gives to two allocations, so that a reused address is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocationId(pub u64);

/// One allocation of an iface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The iface that made it.
    pub iface: IfaceKind,
    /// First address and length in bytes.
    pub range: AddressRange,
    /// The device that holds it; `None` for memory of no particular device.
    pub device: Option<DeviceId>,
    /// The kind of memory.
    pub kind: AllocationKind,
    /// The identity, which differs from that of every other allocation at this address.
    pub id: AllocationId,
}

impl Allocation {
    /// The first address.
    #[must_use]
    pub const fn base(&self) -> Address {
        self.range.start()
    }

    /// Returns the offset of `address` in the allocation, or `None` if it is outside.
    #[must_use]
    pub const fn offset_of(&self, address: Address) -> Option<AllocOffset> {
        if self.range.contains(address) {
            Some(AllocOffset(address.0 - self.range.start().0))
        } else {
            None
        }
    }
}

/// One physically contiguous part of a range. An export never covers less than one; whether it
/// covers several that lie side by side is found out by asking for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The addresses that it backs.
    pub range: AddressRange,
    /// Set if the segment can be exported to a NIC.
    pub exportable: bool,
}
