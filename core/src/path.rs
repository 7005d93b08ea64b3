//! How the NIC gets at memory, and why that way: the decision is a value that is kept with the region.

use std::{fmt, os::fd::BorrowedFd, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    AddressRange, DeviceId, DmaBufOffset, Error, IfaceKind, Result,
    iface::DmaBufMapping,
    provider::{Nic, ProviderDomain, ProviderRegion, RegistrationRequest},
    registry::{Owner, Registry},
};

/// The ways from memory to a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// Host pages, registered as they are.
    PlainHost,
    /// A dma-buf fd.
    DmaBuf,
    /// A device address that a peer-memory kernel client resolves.
    PeerMemory,
    /// Copies through registered host memory.
    Staged,
}

impl Path {
    /// The name as it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PlainHost => "plain-host",
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "peer-memory",
            Self::Staged => "staged",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether device memory may, should or must be reached directly (`FI_OPT_FI_HMEM_P2P`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum P2pPolicy {
    /// Direct where possible, staged otherwise.
    #[default]
    Enabled = 0,
    /// Direct, or an error.
    Required = 1,
    /// Direct where possible, with a warning when it is not.
    Preferred = 2,
    /// Never: always staged.
    Disabled = 3,
}

fn display<T: fmt::Display, S: Serializer>(value: &T, serializer: S) -> std::result::Result<S::Ok, S::Error> {
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

/// One way that was tried.
#[derive(Debug, Serialize)]
pub struct Attempt {
    /// Which way.
    pub path: Path,
    /// The exact call that decided it.
    pub call: String,
    /// The refusal; `None` for the attempt that succeeded.
    #[serde(serialize_with = "display_option")]
    pub error: Option<Error>,
    /// The probable cause of the refusal.
    pub cause: Option<String>,
    /// What would make it work.
    pub remedy: Option<String>,
}

impl Attempt {
    /// An attempt that worked.
    #[must_use]
    pub fn success(path: Path, call: impl Into<String>) -> Self {
        Self { path, call: call.into(), error: None, cause: None, remedy: None }
    }

    /// An attempt that was refused; the remedy is the error's.
    #[must_use]
    pub fn refused(path: Path, call: impl Into<String>, error: Error) -> Self {
        let remedy = error.remedy_text().map(str::to_owned);
        Self {
            path,
            call: call.into(),
            cause: Some(error.kind().text().to_owned()),
            error: Some(error),
            remedy,
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            None => write!(f, "{}: {} succeeded", self.path, self.call),
            Some(error) => write!(f, "{}: {} refused: {error}", self.path, self.call),
        }
    }
}

/// How one registration reached its memory: the attempts in order, the last of which succeeded.
#[derive(Debug, Serialize)]
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
    /// The mapping of the dma-buf, where one was made.
    #[serde(skip)]
    pub mapping: DmaBufMapping,
    /// Everything that was tried.
    pub attempts: Vec<Attempt>,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) for {}", self.path, self.reason, self.iface)?;
        if let Some(device) = self.device {
            write!(f, " device {device}")?;
        }
        write!(f, " on {}", self.nic)?;
        for attempt in &self.attempts {
            write!(f, "\n  {attempt}")?;
        }
        Ok(())
    }
}

/// A request to find a path and register over it.
#[derive(Debug)]
pub struct PathRequest<'a> {
    /// What to register; the decider adds the pieces.
    pub registration: RegistrationRequest<'a>,
    /// The ranges, at least one.
    pub ranges: &'a [AddressRange],
    /// A dma-buf that the application brought along (MR_DMABUF), for the one range.
    pub dma_buf: Option<(BorrowedFd<'a>, DmaBufOffset)>,
    /// Who owns the ranges (all the same).
    pub owner: Owner,
    /// Whether the region owns the memory, so that it cannot go while registered.
    pub owned: bool,
    /// The policy of the domain.
    pub policy: P2pPolicy,
}

/// What came of it.
#[derive(Debug)]
pub struct PathOutcome {
    /// The provider's handle.
    pub region: ProviderRegion,
    /// Why it is reached in this way; `None` for [`PathDecider::plain_host`]'s decision, which every
    /// registration of ordinary host memory shares.
    pub decision: Option<Arc<Decision>>,
}

/// Finds the path for each registration and registers over it. Implemented by `hmem-p2p`.
pub trait PathDecider: fmt::Debug + Send + Sync {
    /// The decision for ordinary host memory on `nic`.
    fn plain_host(&self, nic: &Nic) -> Decision;

    /// Decides, exports, registers.
    ///
    /// On an error nothing is registered and nothing exported.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    ///
    /// # Errors
    /// The error of the last attempt, with the whole trace in its context, if every way was refused.
    unsafe fn register(
        &self,
        request: &PathRequest<'_>,
        registry: &Registry,
        provider: &dyn ProviderDomain,
    ) -> Result<PathOutcome>;
}
