//! Decisions: the path of a registration with its reasons, kept with the region.

use std::{fmt, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    DeviceId, IfaceKind, Result, dma_buf::DmaBufMapping, handle::ProviderRegion, nic::Nic,
    provider::ProviderDomain, registration::Registration,
};
pub use crate::{
    error::{Attempt, Path, Trace},
    registration::P2pPolicy,
};

fn display<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn display_option<T: fmt::Display, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

/// The path of a registration, with the attempts in order, the last of which succeeded.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// The way taken.
    pub path: Path,
    /// Why that way, in a sentence.
    pub reason: String,
    /// The iface of the memory.
    #[serde(serialize_with = "display")]
    pub iface: IfaceKind,
    /// The device, for device memory.
    #[serde(serialize_with = "display_option")]
    pub device: Option<DeviceId>,
    /// The NIC that it was decided for.
    pub nic: String,
    /// The policy that it was decided under.
    pub policy: P2pPolicy,
    /// The mapping of the dma-buf, where one was made.
    pub mapping: DmaBufMapping,
    /// Set if an earlier registration of the same iface, device, kind of memory, NIC and policy
    /// made the decision. The attempts then begin with that registration's refusals,
    /// whose calls name its range; how ranges of several segments went is this registration's
    /// own and follows.
    pub from_cache: bool,
    /// Everything that was tried.
    pub attempts: Trace,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) for {}", self.path, self.reason, self.iface)?;
        if let Some(device) = self.device {
            write!(f, " device {device}")?;
        }
        write!(f, " on {}, policy {}", self.nic, self.policy)?;
        if self.from_cache {
            f.write_str(", decided earlier")?;
        }
        for attempt in &self.attempts {
            write!(f, "\n  {attempt}")?;
        }
        Ok(())
    }
}

/// A registered region with the reason for its path.
#[derive(Clone, Debug)]
pub struct PathRegistration {
    /// The provider's handle.
    pub region: ProviderRegion,
    /// The decision; `None` for that of [`PathSelector::plain_host`], which every registration of
    /// host memory shares.
    pub decision: Option<Arc<Decision>>,
}

/// One NIC that a registration is for.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The registration.
    pub registration: &'a Registration<'a>,
    /// The NIC's domain.
    pub provider: &'a dyn ProviderDomain,
}

/// Finds the path of device memory and registers over it. Implemented by `hmem-p2p`.
///
/// # Safety
/// The library closes a region by the handle that the selector returned for it, and then frees the
/// memory. So an implementation promises:
///
/// - Each [`PathRegistration`] holds the handle of a registration of the target's own ranges, with
///   its rights, at its provider.
/// - Nothing else is registered for the targets when the call returns, fails or panics.
pub unsafe trait PathSelector: fmt::Debug + Send + Sync {
    /// Returns the decision for host memory on `nic`.
    fn plain_host(&self, nic: &Nic) -> Decision;

    /// Finds a path for each target, exports what it needs and registers.
    ///
    /// The targets name the same device memory or dma-buf, and all NICs register from the same
    /// exports. `done` receives the regions in the order of the targets. On an error it has
    /// received those that came before, which stay registered until the caller closes them.
    /// Nothing stays exported.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of each target.
    ///
    /// # Errors
    /// The error of the last attempt, with the whole trace in its context, if every path was
    /// refused.
    unsafe fn register(
        &self,
        targets: &[Target<'_>],
        done: &mut dyn FnMut(PathRegistration),
    ) -> Result<()>;
}
