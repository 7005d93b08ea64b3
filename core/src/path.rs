//! How the NIC gets at memory, and why that way: the decision is a value that is kept with the
//! region.

use std::{fmt, ops::Deref, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    DeviceId, Error, IfaceKind, Result,
    iface::DmaBufMapping,
    provider::{Nic, ProviderDomain},
    registration::{ProviderRegion, Registration},
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
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

impl P2pPolicy {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Enabled, Self::Required, Self::Preferred, Self::Disabled];

    /// The name as it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Required => "required",
            Self::Preferred => "preferred",
            Self::Disabled => "disabled",
        }
    }
}

impl fmt::Display for P2pPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

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

/// One way that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Attempt {
    /// Which way.
    pub path: Path,
    /// The exact call that decided it.
    pub call: String,
    /// Whether a driver was asked; `false` where the NIC does not list the way among its imports.
    pub asked: bool,
    /// The refusal; `None` for the attempt that succeeded.
    #[serde(serialize_with = "display_option")]
    pub error: Option<Error>,
    /// The name of the probable cause, where it is a known one: its heading in `docs/causes.md`.
    pub cause_name: Option<&'static str>,
    /// The probable cause of the refusal, in a sentence.
    pub cause: Option<String>,
    /// What would make it work.
    pub remedy: Option<String>,
}

impl Attempt {
    /// An attempt that worked.
    #[must_use]
    pub fn success(path: Path, call: impl Into<String>) -> Self {
        Self {
            path,
            call: call.into(),
            asked: true,
            error: None,
            cause_name: None,
            cause: None,
            remedy: None,
        }
    }

    /// An attempt that was refused, for no known cause; the remedy is the error's.
    #[must_use]
    pub fn refused(path: Path, call: impl Into<String>, error: Error) -> Self {
        let remedy = error.remedy_text().map(str::to_owned);
        let (cause_name, cause) = (None, None);
        Self { path, call: call.into(), asked: true, error: Some(error), cause_name, cause, remedy }
    }

    /// A way that no driver was asked for, since the NIC does not have it.
    #[must_use]
    pub fn lacking(path: Path, error: Error) -> Self {
        Self { asked: false, ..Self::refused(path, "import", error) }
    }

    /// With a known cause and its remedy.
    #[must_use]
    pub fn because(
        mut self,
        name: &'static str,
        cause: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        self.cause_name = Some(name);
        self.cause = Some(cause.into());
        self.remedy = Some(remedy.into());
        self
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(error) = &self.error else {
            return write!(f, "{}: {} succeeded", self.path, self.call);
        };
        write!(f, "{}: {} refused: {}", self.path, self.call, error.reason())?;
        if let Some(cause) = &self.cause {
            write!(f, "; probable cause: {cause}")?;
        }
        match &self.remedy {
            Some(remedy) => write!(f, "; remedy: {remedy}"),
            None => Ok(()),
        }
    }
}

/// Attempts in the order in which they were made. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<[Attempt]>);

impl Trace {
    /// The refusal that says most: the last by a driver, or else the last.
    #[must_use]
    pub fn refusal(&self) -> Option<&Error> {
        let refused = || self.iter().rev().filter(|attempt| attempt.error.is_some());
        refused().find(|attempt| attempt.asked).or_else(|| refused().next())?.error.as_ref()
    }
}

impl Deref for Trace {
    type Target = [Attempt];

    fn deref(&self) -> &[Attempt] {
        &self.0
    }
}

impl From<Vec<Attempt>> for Trace {
    fn from(attempts: Vec<Attempt>) -> Self {
        Self(attempts.into())
    }
}

impl<'a> IntoIterator for &'a Trace {
    type Item = &'a Attempt;
    type IntoIter = std::slice::Iter<'a, Attempt>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl Serialize for Trace {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl fmt::Display for Trace {
    /// One line: `(1) dma-buf: ... (2) staged: ...`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, attempt) in self.iter().enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}({}) {attempt}", at + 1)?;
        }
        Ok(())
    }
}

/// How a registration reached its memory: the attempts in order, the last of which succeeded.
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
    /// Whether it was decided earlier, by a registration of the same iface, device, kind of
    /// memory, NIC and policy. The attempts then begin with that registration's refusals,
    /// whose calls name its range; how ranges of several segments went is this registration's
    /// own and follows.
    pub remembered: bool,
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
        if self.remembered {
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
    /// What to register.
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
