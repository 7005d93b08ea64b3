//! Access rights of a region, with libfabric's bit values.
//!
//! ```
//! use hmem_core::Access;
//!
//! let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
//! assert_eq!(access.bits(), (1 << 12) | (1 << 13));
//! assert_eq!(access.to_string(), "REMOTE_READ|REMOTE_WRITE");
//! ```
//!
//! # Separate rights for writes and atomics
//!
//! In `fi_mr(3)` one right covers RMA writes and atomics: a REMOTE_WRITE region is "the target
//! buffer of an RMA write or atomic operation". This library adds two rights. Each of them grants
//! only one of these operations. They have no counterpart in `fi_mr(3)`; their values are bits that
//! `rdma/fabric.h` does not use.
//!
//! | right | RMA write | atomics |
//! |---|---|---|
//! | `REMOTE_WRITE` | yes | yes |
//! | `REMOTE_RMA_WRITE` | yes | no |
//! | `REMOTE_ATOMIC` | no | yes |
//!
//! ```
//! use hmem_core::Access;
//!
//! // Peers may count in this region, but neither read nor overwrite it.
//! let counters = Access::REMOTE_ATOMIC;
//! assert!(!counters.intersects(Access::ANY_REMOTE_WRITE));
//! // REMOTE_WRITE grants both, as fi_mr(3) says.
//! assert!(Access::REMOTE_WRITE.intersects(Access::ANY_REMOTE_WRITE));
//! assert!(Access::REMOTE_WRITE.intersects(Access::ANY_REMOTE_ATOMIC));
//! ```

use std::fmt::{self, LowerHex};

use bitflags::{Bits, Flags};

bitflags::bitflags! {
    /// Operations that the local endpoint and its peers may perform on a region (`fi_mr(3)`,
    /// "access").
    ///
    /// [`Access::empty`] is allowed. The keys of such a region grant nothing: peers can neither
    /// read nor write the memory, and local transfers that need a right are refused. The NIC itself
    /// may read the memory. So sub-regions and windows of the region can grant reads.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Access: u64 {
        /// The region may take part in collective operations. In `MrMode::COLLECTIVE`, collective
        /// operations require this right.
        const COLLECTIVE = 1 << 6;
        /// The local endpoint may use the region as the destination of RMA reads and fetching
        /// atomics.
        const READ = 1 << 8;
        /// The local endpoint may use the region as the source of RMA writes and atomics.
        const WRITE = 1 << 9;
        /// The local endpoint may receive messages in the region.
        const RECV = 1 << 10;
        /// The local endpoint may send messages from the region.
        const SEND = 1 << 11;
        /// A peer may read the region.
        const REMOTE_READ = 1 << 12;
        /// A peer may write the region by RMA and apply atomics to it.
        const REMOTE_WRITE = 1 << 13;
        /// Memory windows may be bound to the region. This right alone grants peers nothing.
        /// `fi_mr(3)` does not have this right.
        const MW_BIND = 1 << 14;
        /// A peer may apply atomics to the region, but not write it by RMA. `fi_mr(3)` does not
        /// have this right.
        const REMOTE_ATOMIC = 1 << 15;
        /// A peer may write the region by RMA, but not apply atomics to it. `fi_mr(3)` does not
        /// have this right.
        const REMOTE_RMA_WRITE = 1 << 23;
    }
}

impl Access {
    /// Rights that each let a peer write by RMA: REMOTE_WRITE and REMOTE_RMA_WRITE.
    pub const ANY_REMOTE_WRITE: Self = Self::REMOTE_WRITE.union(Self::REMOTE_RMA_WRITE);

    /// Rights that each let a peer apply atomics: REMOTE_WRITE and REMOTE_ATOMIC.
    pub const ANY_REMOTE_ATOMIC: Self = Self::REMOTE_WRITE.union(Self::REMOTE_ATOMIC);

    /// All rights of peers. A memory window can grant only these rights.
    pub const ANY_REMOTE: Self =
        Self::REMOTE_READ.union(Self::ANY_REMOTE_WRITE).union(Self::ANY_REMOTE_ATOMIC);

    /// Returns whether a peer may change the memory under these rights.
    #[must_use]
    pub const fn peers_write(self) -> bool {
        self.intersects(Self::ANY_REMOTE_WRITE.union(Self::ANY_REMOTE_ATOMIC))
    }

    /// Returns whether the NIC may change the memory under these rights.
    #[must_use]
    pub const fn nic_writes(self) -> bool {
        self.intersects(Self::READ.union(Self::RECV)) || self.peers_write()
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_names(f, self)
    }
}

/// Writes flag names joined by `|`, then unknown bits in hexadecimal. Writes `none` for no bits.
pub(crate) fn write_names<F: Flags<Bits: LowerHex>>(
    f: &mut fmt::Formatter<'_>,
    flags: &F,
) -> fmt::Result {
    let mut names = flags.iter_names();
    let mut parts: Vec<_> = names.by_ref().map(|(name, _)| name.to_owned()).collect();
    let unknown = names.remaining().bits();
    if unknown != F::Bits::EMPTY {
        parts.push(format!("{unknown:#x}"));
    }
    if parts.is_empty() {
        parts.push("none".to_owned());
    }
    f.write_str(&parts.join("|"))
}
