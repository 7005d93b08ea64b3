//! What an iface knows about an address: the allocation around it.

use crate::{Address, AddressRange, AllocOffset, DeviceId, IfaceKind};

/// How memory was allocated; each kind has its own registration rules.
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

    /// Whether the CPU can load and store there.
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
    /// How it was allocated.
    pub kind: AllocationKind,
    /// Which allocation it is, among all that ever had this address.
    pub id: AllocationId,
}

impl Allocation {
    /// The first address.
    #[must_use]
    pub const fn base(&self) -> Address {
        self.range.start()
    }

    /// How far into the allocation `address` lies; `None` if it is outside.
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
    /// Whether it can be exported to a NIC.
    pub exportable: bool,
}
