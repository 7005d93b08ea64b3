//! Registration, bind and domain flags, with libfabric's bit values.
//!
//! ```
//! use hmem_core::MrFlags;
//!
//! assert_eq!(MrFlags::MR_SINGLE_USE.bits(), 1 << 41);
//! ```

use std::fmt;

use crate::access::write_names;

bitflags::bitflags! {
    /// Flags of a registration call (`fi_mr(3)`, "FLAGS").
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MrFlags: u64 {
        /// The request names the memory by a dma-buf fd instead of by addresses.
        const MR_DMABUF = 1 << 40;
        /// The key becomes invalid with the first remote access that uses it.
        const MR_SINGLE_USE = 1 << 41;
        /// The memory comes from a device API's host allocator. The domain ignores the request's
        /// `device`, and refuses other memory. For a dma-buf, the request must name the iface.
        const HMEM_HOST_ALLOC = 1 << 45;
        /// Only the device that the request names can access the memory. The domain refuses memory
        /// that the CPU can access. For a dma-buf, the request must name the iface.
        const HMEM_DEVICE_ONLY = 1 << 46;
        /// The memory is persistent and is a target of RMA. A remote write or atomic completes
        /// after its bytes are persistent, and fails if they cannot be made persistent.
        const RMA_PMEM = 1 << 49;
        /// The region will be bound to a completion counter.
        const RMA_EVENT = 1 << 56;
    }
}

bitflags::bitflags! {
    /// The accesses that a counter counts when it is bound to a region (`fi_mr_bind`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct BindFlags: u64 {
        /// The counter counts each remote write or atomic that changes the region.
        const REMOTE_WRITE = 1 << 13;
    }
}

bitflags::bitflags! {
    /// The operations that a domain reports through a bound event queue (`fi_domain_bind`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DomainBindFlags: u64 {
        /// Registrations complete asynchronously, each with an event.
        const REG_MR = 1 << 59;
    }
}

impl fmt::Display for MrFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_names(f, self)
    }
}
