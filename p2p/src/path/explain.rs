//! Explanations (`hmem explain`): the search for the path that a registration would take. The
//! search leaves nothing registered.

use std::{fmt, sync::Arc};

use hmem_core::{
    Access, AllocationKind, Decision, DeviceBuffer, DeviceId, Domain, DomainAttr, Error, ErrorKind,
    Iface, IfaceKind, MrMode, Path, ProbableCause, Registry, Result,
    cause::Step,
    iface::{AllocRequest, DmaBufMapping},
    path::{Attempt, DirectPath, ExportUnit, P2pPolicy, Trace},
    provider::{Nic, Provider},
};
use serde::{Serialize, Serializer};

use super::{DefaultPathSelector, cause::host_causes};

/// The memory, NIC and policy that [`DefaultPathSelector::explain`] finds a path for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExplainRequest {
    /// Iface that owns the memory.
    pub iface: IfaceKind,
    /// Device that owns the memory; `None` for the iface's first device. Ignored for host memory.
    pub device: Option<DeviceId>,
    /// The kind of memory. The default is [`AllocationKind::System`] for host memory and
    /// [`AllocationKind::Device`] otherwise.
    pub kind: Option<AllocationKind>,
    /// Name of the NIC; `None` for the provider's first NIC.
    pub nic: Option<String>,
    /// Length of the memory in bytes, more than 0. The default is one page.
    pub size: u64,
    /// The policy of the domain that would register the memory.
    pub policy: P2pPolicy,
    /// The direct paths of that domain ([`DomainAttr::direct_paths`]).
    pub direct_paths: Option<Vec<DirectPath>>,
    /// The setting [`DomainAttr::reach_check`] of that domain.
    pub reach_check: Option<bool>,
}

impl ExplainRequest {
    /// Creates a request with these defaults: one page of memory on the iface's first device, the
    /// first NIC, and the default policy.
    #[must_use]
    pub fn new(iface: IfaceKind) -> Self {
        let size = rustix::param::page_size() as u64;
        let (policy, direct_paths, reach_check) = (P2pPolicy::default(), None, None);
        Self { iface, device: None, kind: None, nic: None, size, policy, direct_paths, reach_check }
    }

    /// Sets the device that owns the memory.
    #[must_use]
    pub fn device(self, device: impl Into<Option<DeviceId>>) -> Self {
        Self { device: device.into(), ..self }
    }

    /// Sets the kind of memory.
    #[must_use]
    pub fn kind(self, kind: impl Into<Option<AllocationKind>>) -> Self {
        Self { kind: kind.into(), ..self }
    }

    /// Sets the NIC by its name.
    #[must_use]
    pub fn nic(self, nic: impl Into<Option<String>>) -> Self {
        Self { nic: nic.into(), ..self }
    }

    /// Sets the length of the memory in bytes.
    #[must_use]
    pub fn size(self, size: u64) -> Self {
        Self { size, ..self }
    }

    /// Sets the policy of the domain that would register the memory.
    #[must_use]
    pub fn policy(self, policy: P2pPolicy) -> Self {
        Self { policy, ..self }
    }

    /// Sets the direct paths of the domain that would register the memory.
    #[must_use]
    pub fn direct_paths(self, paths: impl Into<Option<Vec<DirectPath>>>) -> Self {
        Self { direct_paths: paths.into(), ..self }
    }

    /// Sets whether the domain that would register the memory checks direct paths by transfers.
    #[must_use]
    pub fn reach_check(self, check: impl Into<Option<bool>>) -> Self {
        Self { reach_check: check.into(), ..self }
    }
}

/// The path that a registration would take now, with the reasons.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// Iface that owns the memory.
    #[serde(serialize_with = "display")]
    pub iface: IfaceKind,
    /// Name under which the iface is registered.
    #[serde(skip)]
    pub iface_name: Arc<str>,
    /// Ordinal of the device that owns the memory; `None` for host memory.
    pub device: Option<u32>,
    /// The PCI bus id of the device that owns the memory; `None` for host memory, or if the device
    /// has none.
    pub device_pci_bus_id: Option<String>,
    /// The kind of memory.
    pub kind: &'static str,
    /// Length of the memory in bytes.
    pub size: u64,
    /// The NIC, as `provider/name`.
    pub nic: String,
    /// The PCI bus id of the NIC; `None` if the NIC is not a PCI device.
    pub nic_pci_bus_id: Option<String>,
    /// The requested policy.
    pub policy: P2pPolicy,
    /// The direct paths of the domain, in order; `None` for the NIC's own order.
    pub direct_paths: Option<Vec<DirectPath>>,
    /// True if direct access is forbidden for every NIC, by `FI_HMEM_DISABLE_P2P` or the builder.
    /// The policy then has no effect.
    pub p2p_disabled: bool,
    /// The chosen path; `None` if every path was refused.
    pub path: Option<Path>,
    /// The mapping of the dma-buf; `None` for any other path.
    pub mapping: Option<DmaBufMapping>,
    /// The memory that is exported as a dma-buf; `None` for any other path.
    pub unit: Option<ExportUnit>,
    /// The reason why the path was chosen, or why every path was refused.
    pub reason: String,
    /// Changes to the machine or the settings that may allow a better path than the chosen one, or
    /// a path at all if every path was refused. Each change is listed once, in the order of the
    /// attempts.
    pub remedies: Vec<String>,
    /// Every attempt, in order.
    pub attempts: Trace,
}

fn display<T: fmt::Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

impl DefaultPathSelector {
    /// Returns the path that a registration would take. Allocates and registers `request.size`
    /// bytes, then deregisters and frees them. Neither reads nor stores remembered decisions.
    ///
    /// Refused paths are part of the result, even if all are refused. An error means that the path
    /// could not be determined.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`]: the device or NIC does not exist.
    /// - [`ErrorKind::ZeroLength`]: `request.size` is 0.
    /// - The errors of [`Registry::get`] for the iface.
    /// - The errors of the allocation, and of opening and closing the NIC.
    pub fn explain(
        &self,
        registry: &Arc<Registry>,
        provider: &dyn Provider,
        request: &ExplainRequest,
    ) -> Result<Explanation> {
        let iface = registry.get(request.iface)?;
        let (device, device_pci_bus_id) = device(iface, request)?;
        let system = request.iface == IfaceKind::SYSTEM;
        let usual = if system { AllocationKind::System } else { AllocationKind::Device };
        let kind = request.kind.unwrap_or(usual);
        let attr = DomainAttr {
            nic: request.nic.clone(),
            mr_mode: MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE),
            hmem: true,
            p2p: request.policy,
            direct_paths: request.direct_paths.clone(),
            reach_check: request.reach_check,
            ..DomainAttr::default()
        };
        let selector = Self::new().disable_p2p(self.disable_p2p).facts(Arc::clone(&self.facts));
        let domain = Domain::open(provider, Arc::clone(registry), Arc::new(selector), attr)?;
        let wanted =
            AllocRequest { len: request.size, device: device.unwrap_or(DeviceId(0)), kind };
        let buffer = DeviceBuffer::allocate(iface, &wanted)?;
        let outcome = match domain.register(buffer, Access::REMOTE_READ | Access::REMOTE_WRITE) {
            Ok(registered) => {
                let decision = Arc::clone(registered.decision()?);
                drop(registered.close()?);
                Ok(decision)
            }
            Err(rejected) => Err(rejected.error),
        };
        let nic = &domain.provider_attr().nic;
        let mut explanation = Explanation {
            iface: request.iface,
            iface_name: iface.name().into(),
            device: device.map(|device| device.0),
            device_pci_bus_id,
            kind: kind.name(),
            size: request.size,
            nic: nic.to_string(),
            nic_pci_bus_id: nic.pci_bus_id.clone(),
            policy: request.policy,
            direct_paths: request.direct_paths.clone(),
            p2p_disabled: self.disable_p2p,
            path: None,
            mapping: None,
            unit: None,
            reason: String::new(),
            remedies: Vec::new(),
            attempts: Trace::default(),
        };
        match outcome {
            Ok(decision) => explanation.take(&decision),
            Err(error) => explanation.refused(error),
        }
        domain.close()?;
        Ok(explanation)
    }

    /// Returns the probable cause of an error that made a NIC or device unusable, or with which the
    /// kernel refused a system call ([`Step::OpenNic`], [`Step::OpenDevice`],
    /// [`Step::SystemCall`]). Limits of containers are among these causes. Returns `None` for an
    /// unknown cause, and for a library that could not be loaded.
    ///
    /// ```
    /// use hmem_core::{Errno, Error, cause::Step};
    /// use hmem_p2p::path::DefaultPathSelector;
    ///
    /// let error = Error::os(Errno(13), "ibv_open_device");
    /// let found = DefaultPathSelector::new().explain_unavailable(Step::OpenNic, &error);
    /// assert_eq!(found.expect("a known cause").name, "nic-node-forbidden");
    /// ```
    #[must_use]
    pub fn explain_unavailable(&self, step: Step, error: &Error) -> Option<ProbableCause> {
        // The library was not loaded, so no device was opened.
        if error.operation() == "load library" {
            return None;
        }
        let nic = Nic { provider: String::new(), name: String::new(), pci_bus_id: None };
        host_causes(step, error, || self.facts.facts(None, &nic)).into_iter().next()
    }
}

/// Returns the requested device and its PCI bus id.
fn device(
    iface: &Arc<dyn Iface>,
    request: &ExplainRequest,
) -> Result<(Option<DeviceId>, Option<String>)> {
    if request.iface == IfaceKind::SYSTEM {
        return Ok((None, None));
    }
    let devices = iface.devices()?;
    let is_wanted = |id| request.device.is_none_or(|wanted| wanted == id);
    let found = devices.iter().find(|device| is_wanted(device.id)).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidArgument, "explain")
            .iface(iface)
            .context("devices", devices.len())
            .remedy("name a device that the iface lists");
        match request.device {
            Some(device) => error.device(device),
            None => error,
        }
    })?;
    Ok((Some(found.id), found.pci_bus_id.clone()))
}

impl Explanation {
    fn take(&mut self, decision: &Decision) {
        self.path = Some(decision.path);
        self.mapping = (decision.path == Path::DmaBuf).then_some(decision.mapping);
        self.unit = (decision.path == Path::DmaBuf).then_some(decision.unit);
        self.reason.clone_from(&decision.reason);
        self.attempts = decision.attempts.clone();
        if decision.path == Path::Staged && decision.policy == P2pPolicy::Disabled {
            self.advise(super::allow(self.p2p_disabled).to_owned());
        }
        self.advise_by_attempts();
    }

    fn refused(&mut self, error: Error) {
        self.reason = error.context_value("why").unwrap_or(error.kind().text()).to_owned();
        let remedy = error.remedy_text().map(str::to_owned);
        self.attempts = match error.trace().is_empty() {
            false => error.trace().clone(),
            true => self.host_attempt(error).into(),
        };
        self.advise_by_attempts();
        if let Some(remedy) = remedy {
            self.advise(remedy);
        }
    }

    /// Returns the attempts of a registration that failed with an `error` without attempts of its
    /// own. Host memory has only one path, so `error` is the single attempt. For other memory, no
    /// path was tried, and the list is empty.
    fn host_attempt(&self, error: Error) -> Vec<Attempt> {
        if self.iface != IfaceKind::SYSTEM {
            return Vec::new();
        }
        vec![Attempt::refused(Path::PlainHost, "register(host pages)", error)]
    }

    fn advise_by_attempts(&mut self) {
        let attempts = self.attempts.clone();
        for attempt in &attempts {
            attempt.remedy.iter().for_each(|remedy| self.advise(remedy.clone()));
            let causes = attempt.error.as_ref().map_or(&[][..], Error::causes);
            causes.iter().for_each(|cause| self.advise(cause.remedy.to_owned()));
        }
    }

    fn advise(&mut self, remedy: String) {
        if !self.remedies.contains(&remedy) {
            self.remedies.push(remedy);
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path {
            Some(path) => write!(f, "{path}")?,
            None => f.write_str("no path")?,
        }
        write!(
            f,
            " ({}) for {} bytes of {} memory of {}",
            self.reason, self.size, self.kind, self.iface_name
        )?;
        if let Some(device) = self.device {
            write!(f, " device {device}")?;
        }
        write!(f, " on {}, policy {}", self.nic, self.policy)?;
        if let Some(paths) = &self.direct_paths {
            write!(f, ", direct_paths {}", DirectPath::list(paths))?;
        }
        if let Some(unit) = self.unit.filter(|unit| *unit != ExportUnit::Range) {
            write!(f, ", exported by whole {unit}")?;
        }
        for attempt in &self.attempts {
            write!(f, "\n  {attempt}")?;
        }
        for remedy in &self.remedies {
            write!(f, "\n  remedy: {remedy}")?;
        }
        Ok(())
    }
}
