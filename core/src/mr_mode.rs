//! The `mr_mode` bits and their negotiation.
//!
//! ```
//! use hmem_core::MrMode;
//!
//! // The application offers four bits. The provider needs two of them and clears the rest.
//! let offered = MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY;
//! let needed = MrMode::VIRT_ADDR | MrMode::PROV_KEY;
//! assert_eq!(offered.negotiate(needed).unwrap(), needed);
//!
//! // A bit that the provider needs and the application does not offer is an error.
//! let error = MrMode::LOCAL.negotiate(needed).unwrap_err();
//! assert!(error.to_string().contains("VIRT_ADDR|PROV_KEY"));
//! ```

use std::fmt;

use crate::{Error, ErrorKind, Result, access::write_names};

bitflags::bitflags! {
    /// Requirements of a provider that an application agrees to meet (`fi_mr(3)`, "MR MODE BITS").
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MrMode: u32 {
        /// Deprecated. Stands for VIRT_ADDR, ALLOCATED and PROV_KEY. Cannot be combined with other
        /// bits, except with LOCAL if the provider needs LOCAL.
        const BASIC = 1 << 0;
        /// Deprecated. Stands for no bits. Cannot be combined with other bits.
        const SCALABLE = 1 << 1;
        /// Transfers need a descriptor for each local buffer.
        const LOCAL = 1 << 2;
        /// Peers exchange raw keys and map them before use.
        const RAW = 1 << 3;
        /// Peers use the target's virtual addresses.
        const VIRT_ADDR = 1 << 4;
        /// Memory must have physical pages when it is registered.
        const ALLOCATED = 1 << 5;
        /// The provider chooses the keys.
        const PROV_KEY = 1 << 6;
        /// The application must refresh a region after its pages changed.
        const MMU_NOTIFY = 1 << 7;
        /// Regions with counters start disabled.
        const RMA_EVENT = 1 << 8;
        /// Regions must be bound to an endpoint before use.
        const ENDPOINT = 1 << 9;
        /// Transfers need a descriptor for each buffer in device memory.
        const HMEM = 1 << 10;
        /// Regions of collective operations need the COLLECTIVE access bit.
        const COLLECTIVE = 1 << 11;
    }
}

impl MrMode {
    /// The bits that BASIC stands for.
    pub const BASIC_MEANS: Self = Self::VIRT_ADDR.union(Self::ALLOCATED).union(Self::PROV_KEY);

    /// Returns the mode of a domain if the application offers `self` and the provider needs
    /// `needed`.
    ///
    /// Bits that the provider does not need are cleared. BASIC and SCALABLE are kept;
    /// [`MrMode::effective`] replaces them by the bits that they mean.
    ///
    /// LOCAL may be combined with BASIC if the provider needs LOCAL. The man pages of libfabric 1.6
    /// and 1.8 allow this. The man page of 1.17 does not, and has the mode bit FI_LOCAL_MR instead.
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
    ///
    /// # Errors
    /// [`ErrorKind::ModeMismatch`], which names the bits:
    ///
    /// - a needed bit that is not offered;
    /// - BASIC or SCALABLE combined with another bit;
    /// - an unknown bit.
    pub fn negotiate(self, needed: Self) -> Result<Self> {
        let refuse = |why: &'static str, bits: Self| {
            Error::new(ErrorKind::ModeMismatch, "mr_mode")
                .context("why", bits)
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
                    "offer BASIC or SCALABLE without other bits; only LOCAL may be added to BASIC, \
                     if the provider needs it",
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

    /// Returns the bits without BASIC and SCALABLE. BASIC is replaced by [`MrMode::BASIC_MEANS`].
    #[must_use]
    pub const fn effective(self) -> Self {
        let plain = self.difference(Self::BASIC.union(Self::SCALABLE));
        if self.contains(Self::BASIC) { plain.union(Self::BASIC_MEANS) } else { plain }
    }
}

impl fmt::Display for MrMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_names(f, self)
    }
}
