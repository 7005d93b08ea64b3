//! Allocations of memory, which ifaces report for an address.

use crate::{Address, AddressRange, AllocOffset, DeviceId, IfaceKind, named_enum};

named_enum! {
    /// The kind of an allocation. Each kind has its own registration rules.
    #[non_exhaustive]
    pub enum AllocationKind {
        /// Memory of one device, not accessible to the CPU.
        Device = "device",
        /// Page-locked host memory from the device API's host allocator.
        Host = "host",
        /// The application's own host memory that a device API page-locked. The library treats it
        /// like any other system memory.
        HostRegistered = "host-registered",
        /// Memory that migrates between host and devices.
        Managed = "managed",
        /// Device memory from a stream-ordered pool.
        StreamOrdered = "stream-ordered",
        /// A reserved address range with separately mapped physical segments (VMM).
        Virtual = "virtual",
        /// Device memory of another process, opened in this process.
        Imported = "imported",
        /// Ordinary memory of the operating system.
        System = "system",
    }
}

impl AllocationKind {
    /// Returns true if the CPU can access memory of this kind.
    #[must_use]
    pub const fn cpu_accessible(self) -> bool {
        matches!(self, Self::Host | Self::HostRegistered | Self::Managed | Self::System)
    }
}

/// The identity of an allocation. A changed identity shows that an address now belongs to a new
/// allocation.
///
/// An iface never gives two allocations the same number, unless
/// [`Iface::has_identities`](crate::Iface::has_identities) returns false.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocationId(pub u64);

/// One allocation of an iface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The iface that owns the allocation.
    pub iface: IfaceKind,
    /// The first address and the length in bytes.
    pub range: AddressRange,
    /// The device of the memory. `None` if the memory belongs to no particular device.
    pub device: Option<DeviceId>,
    /// The kind of memory.
    pub kind: AllocationKind,
    /// The identity of the allocation.
    pub id: AllocationId,
    /// A value that only the iface interprets. An iface that needs none sets 0.
    ///
    /// The library passes the value back to the iface in later calls for the memory, so that the
    /// iface need not ask its driver again. Any caller can change the value. So a value that is
    /// wrong or out of date may make the iface return an error, but not make an unsound call.
    pub token: u64,
}

impl Allocation {
    /// Returns the first address of the allocation.
    #[must_use]
    pub const fn base(&self) -> Address {
        self.range.start()
    }

    /// Returns the offset of `address` in the allocation, or `None` if the address is
    /// outside.
    #[must_use]
    pub const fn offset_of(&self, address: Address) -> Option<AllocOffset> {
        if self.range.contains(address) {
            Some(AllocOffset(address.0 - self.range.start().0))
        } else {
            None
        }
    }
}

/// A physically contiguous part of a range.
///
/// A driver can export a whole segment as one dma-buf. Some drivers can also export several
/// adjacent segments as one dma-buf. Only an attempt shows whether a driver can export several
/// segments together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The addresses of the segment.
    pub range: AddressRange,
    /// True if the segment can be exported to a NIC.
    pub exportable: bool,
}
