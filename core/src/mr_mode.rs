//! The `mr_mode` bits and their negotiation.
//!
//! ```
//! use hmem_core::MrMode;
//!
//! // The application offers four; the provider needs two of them and clears the rest.
//! let offered = MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY;
//! let needed = MrMode::VIRT_ADDR | MrMode::PROV_KEY;
//! assert_eq!(offered.negotiate(needed).unwrap(), needed);
//!
//! // What the provider needs and the application does not offer is an error that names it.
//! let error = MrMode::LOCAL.negotiate(needed).unwrap_err();
//! assert!(error.to_string().contains("VIRT_ADDR|PROV_KEY"));
//! ```

use std::fmt;

use crate::{Error, ErrorKind, Result, access::write_names};

bitflags::bitflags! {
    /// Duties that an application agrees to, or that a provider requires (`fi_mr(3)`, "MR MODE
    /// BITS").
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MrMode: u32 {
        /// Deprecated: exactly VIRT_ADDR, ALLOCATED and PROV_KEY. Stands alone, or beside LOCAL for
        /// a provider that needs LOCAL.
        const BASIC = 1 << 0;
        /// Deprecated: no bit at all; stands alone.
        const SCALABLE = 1 << 1;
        /// Local buffers need a descriptor.
        const LOCAL = 1 << 2;
        /// Keys are exchanged raw and mapped at the peer.
        const RAW = 1 << 3;
        /// Peers address by the target's virtual address.
        const VIRT_ADDR = 1 << 4;
        /// Pages must back a range when it is registered.
        const ALLOCATED = 1 << 5;
        /// The provider chooses keys.
        const PROV_KEY = 1 << 6;
        /// The application refreshes a region after its pages changed.
        const MMU_NOTIFY = 1 << 7;
        /// Regions with counters are created disabled.
        const RMA_EVENT = 1 << 8;
        /// Regions are bound to an endpoint before use.
        const ENDPOINT = 1 << 9;
        /// Device buffers need a descriptor.
        const HMEM = 1 << 10;
        /// Regions of collective operations need the COLLECTIVE access bit.
        const COLLECTIVE = 1 << 11;
    }
}

impl MrMode {
    /// The bits that BASIC stands for.
    pub const BASIC_MEANS: Self = Self::VIRT_ADDR.union(Self::ALLOCATED).union(Self::PROV_KEY);

    /// The mode a domain runs in when the application offers `self` and the provider needs
    /// `needed`.
    ///
    /// Bits that the provider does not need are cleared. BASIC is kept and implies
    /// [`Self::BASIC_MEANS`]; SCALABLE is kept and implies nothing (see [`Self::effective`]).
    ///
    /// # Errors
    /// [`ErrorKind::ModeMismatch`] that names the bits: a needed bit that is not offered, BASIC or
    /// SCALABLE beside another bit, or an unknown bit.
    ///
    /// LOCAL may stand beside BASIC if the provider needs it. The man pages of libfabric 1.6 and
    /// 1.8 allow the pair. That of 1.17 has BASIC alone, and FI_LOCAL_MR among the `fi_info` modes.
    ///
    /// ```
    /// use hmem_core::MrMode;
    ///
    /// let needed = MrMode::BASIC_MEANS | MrMode::LOCAL;
    /// let basic = MrMode::BASIC | MrMode::LOCAL;
    /// assert_eq!(basic.negotiate(needed).unwrap(), basic);
    /// assert_eq!(basic.effective(), needed);
    /// assert!(MrMode::BASIC.negotiate(needed).unwrap_err().to_string().contains("LOCAL"));
    /// ```
    pub fn negotiate(self, needed: Self) -> Result<Self> {
        let refuse = |why: &'static str, bits: Self| {
            Error::new(ErrorKind::ModeMismatch, "mr_mode")
                .context("bits", bits)
                .context("offered", self)
                .context("needed", needed)
                .remedy(why)
        };
        let unknown = self.difference(Self::all());
        if !unknown.is_empty() {
            return Err(refuse("these bits are not defined by fi_mr(3)", unknown));
        }
        let local = needed.intersection(Self::LOCAL);
        for (alone, beside) in [(Self::BASIC, local), (Self::SCALABLE, Self::empty())] {
            let others = self.difference(alone.union(beside));
            if self.contains(alone) && !others.is_empty() {
                return Err(refuse(
                    "BASIC and SCALABLE stand alone; LOCAL may stand beside BASIC if it is needed",
                    others,
                ));
            }
        }
        let missing = needed.difference(self.effective());
        if !missing.is_empty() {
            return Err(refuse("the provider needs these bits: offer them", missing));
        }
        if self.intersects(Self::BASIC.union(Self::SCALABLE)) {
            return Ok(self);
        }
        Ok(self.intersection(needed))
    }

    /// The behaviour that the bits ask for: BASIC replaced by what it means, SCALABLE removed.
    #[must_use]
    pub const fn effective(self) -> Self {
        let plain = self.difference(Self::BASIC.union(Self::SCALABLE));
        if self.contains(Self::BASIC) { plain.union(Self::BASIC_MEANS) } else { plain }
    }
}

impl fmt::Display for MrMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_names(
            f,
            self.iter_names().map(|(name, _)| name),
            u64::from(self.bits() & !Self::all().bits()),
        )
    }
}
