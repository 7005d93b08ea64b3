//! Access rights of a region, with libfabric's bit values.
//!
//! ```
//! use hmem_core::Access;
//!
//! let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
//! assert_eq!(access.bits(), (1 << 12) | (1 << 13));
//! assert_eq!(access.to_string(), "REMOTE_READ|REMOTE_WRITE");
//! ```

use std::fmt;

bitflags::bitflags! {
    /// What the local endpoint and its peers may do with a region (`fi_mr(3)`, "access").
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Access: u64 {
        /// May take part in collective operations; needed in `MrMode::COLLECTIVE`.
        const COLLECTIVE = 1 << 6;
        /// Result buffer of an RMA read or fetching atomic on the initiator: the NIC writes it.
        const READ = 1 << 8;
        /// Source buffer of an RMA write or atomic on the initiator: the NIC reads it.
        const WRITE = 1 << 9;
        /// Buffer of a receive: the NIC writes it.
        const RECV = 1 << 10;
        /// Buffer of a send: the NIC reads it.
        const SEND = 1 << 11;
        /// A peer may read it.
        const REMOTE_READ = 1 << 12;
        /// A peer may write it and apply atomics to it.
        const REMOTE_WRITE = 1 << 13;
    }
}

impl Access {
    /// Whether the NIC may change the memory under these rights.
    #[must_use]
    pub const fn nic_writes(self) -> bool {
        self.intersects(Self::READ.union(Self::RECV).union(Self::REMOTE_WRITE))
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_names(f, self.iter_names().map(|(name, _)| name), self.bits() & !Self::all().bits())
    }
}

/// Writes flag names joined by `|`, then unknown bits in hexadecimal; `none` for the empty set.
pub(crate) fn write_names<'a>(
    f: &mut fmt::Formatter<'_>,
    names: impl Iterator<Item = &'a str>,
    unknown: u64,
) -> fmt::Result {
    let mut first = true;
    for name in names {
        if !first {
            f.write_str("|")?;
        }
        f.write_str(name)?;
        first = false;
    }
    if unknown != 0 {
        write!(f, "{}{unknown:#x}", if first { "" } else { "|" })?;
    } else if first {
        f.write_str("none")?;
    }
    Ok(())
}
