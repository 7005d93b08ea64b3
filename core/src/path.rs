//! Decisions about paths: the path of a registration, the reason for the path, and the trait of the
//! path search that decides. Each region keeps its decision.

#![allow(unsafe_code, reason = "the trait of path selectors, which registers memory by address")]

use std::{fmt, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    DeviceId, Error, IfaceKind, IfaceName, Result, dma_buf::DmaBufMapping, handle::ProviderRegion,
    nic::Nic, provider::ProviderDomain, registration::Registration,
};
pub use crate::{
    error::{Attempt, ExportUnit, Path, Trace},
    registration::{DirectPath, P2pPolicy},
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

/// The path of a registration, with all attempts in order. The last attempt succeeded.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// The path that the registration uses.
    pub path: Path,
    /// The reason for the path, in one sentence.
    pub reason: String,
    /// The iface of the memory.
    #[serde(skip)]
    pub iface: IfaceKind,
    /// The registered name of the iface, for messages and documents.
    #[serde(rename = "iface", serialize_with = "display")]
    pub iface_name: IfaceName,
    /// The device of the memory. `None` if the memory belongs to no device.
    #[serde(serialize_with = "display_option")]
    pub device: Option<DeviceId>,
    /// The name of the NIC.
    pub nic: String,
    /// The domain's policy for direct access.
    pub policy: P2pPolicy,
    /// The list [`DomainAttr::direct_paths`](crate::DomainAttr::direct_paths) of the domain. `None`
    /// for the NIC's own order.
    pub direct_paths: Option<Vec<DirectPath>>,
    /// The dma-buf mapping of the export. Only meaningful for [`Path::DmaBuf`].
    pub mapping: DmaBufMapping,
    /// The memory that was exported. Only meaningful for [`Path::DmaBuf`].
    pub unit: ExportUnit,
    /// True if the path comes from an earlier registration with the same iface, device, kind of
    /// memory, NIC, policy and list of direct paths. The list of attempts then begins with the
    /// refusals of the earlier registration, with the memory range of that registration. The
    /// attempts of this registration follow.
    pub from_cache: bool,
    /// All attempts to register, in order.
    pub attempts: Trace,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) for {}", self.path, self.reason, self.iface_name)?;
        if let Some(device) = self.device {
            write!(f, " device {device}")?;
        }
        write!(f, " on {}, policy {}", self.nic, self.policy)?;
        if let Some(paths) = &self.direct_paths {
            write!(f, ", direct_paths {}", DirectPath::list(paths))?;
        }
        if self.unit != ExportUnit::Range {
            write!(f, ", exported by whole {}", self.unit)?;
        }
        if self.from_cache {
            f.write_str(", decided earlier")?;
        }
        for attempt in &self.attempts {
            write!(f, "\n  {attempt}")?;
        }
        Ok(())
    }
}

/// A registered region and the decision about its path.
#[derive(Clone, Debug)]
pub struct PathRegistration {
    /// The provider's handle of the region.
    pub region: ProviderRegion,
    /// The decision. `None` means the decision of [`PathSelector::plain_host`], which all
    /// registrations of host memory share.
    pub decision: Option<Arc<Decision>>,
}

/// A NIC to register memory with, and the inputs of that registration.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The inputs of the registration.
    pub registration: &'a Registration<'a>,
    /// The provider's domain, which registers the memory with its NIC.
    pub provider: &'a dyn ProviderDomain,
}

/// Finds the path of device memory and registers the memory. The crate `hmem-p2p` implements this
/// trait.
///
/// # Safety
/// To close a region, the library deregisters the handle that the selector returned, and then frees
/// the memory. So an implementation must guarantee:
///
/// - The handle in each [`PathRegistration`] belongs to a registration of the target's ranges, with
///   the target's provider and rights.
/// - When the call returns, fails or panics, nothing else is registered for the targets.
pub unsafe trait PathSelector: fmt::Debug + Send + Sync {
    /// Returns the decision for host memory on `nic`.
    fn plain_host(&self, nic: &Nic) -> Decision;

    /// Adds the probable causes to an error ([`Error::with_causes`]). `error` is the refusal of the
    /// NIC of `target` to register host memory. The default returns `error` as it is.
    fn explain_host(&self, target: Target<'_>, error: Error) -> Error {
        let _ = target;
        error
    }

    /// Finds a path for the memory and registers it with the NIC of each target.
    ///
    /// The call exports the memory if the path needs an export, and closes the export again.
    ///
    /// All targets name the same device memory or dma-buf, and all NICs register the same exports.
    /// `done` receives the regions in the order of the targets. If a target fails, `done` has
    /// received the regions of the targets before it. They stay registered until the caller closes
    /// them.
    ///
    /// # Safety
    /// The conditions of [`ProviderDomain::register`], for the ranges of each target.
    ///
    /// # Errors
    /// - For a target with no path that works, an error with the trace of all attempts.
    /// - [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if a target names host
    ///   memory, or a part of a region.
    unsafe fn register(
        &self,
        targets: &[Target<'_>],
        done: &mut dyn FnMut(PathRegistration),
    ) -> Result<()>;
}
