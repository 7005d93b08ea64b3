//! The ifaces and NICs of this machine, including the software ones that every machine has.

use std::{error::Error as _, fmt, fs, sync::Arc};

use hmem::{
    AllocationKind, Builder, DeviceBuffer, DeviceId, Domain, DomainAttr, Error, Hmem, Iface,
    IfaceKind, MrMode, Result,
    cause::Step,
    iface::AllocRequest,
    loopback::{Loopback, RemapPolicy},
    p2p::{
        path::{ExplainRequest, Explanation},
        topology::{BusId, Topology},
    },
    path::P2pPolicy,
    provider::{Imports, Provider, ProviderAttr},
    system::{AddressReuse, SIMULATED, Simulated},
};

use crate::{
    json::Skipped,
    libfabric,
    problem::{Problem, unknown, unknown_nic},
};

/// The mr_mode bits that hardware usually requires of an application.
const HARDWARE_LIKE: MrMode = MrMode::LOCAL
    .union(MrMode::VIRT_ADDR)
    .union(MrMode::ALLOCATED)
    .union(MrMode::PROV_KEY)
    .union(MrMode::HMEM);

/// Name of the loopback NIC that pins the pages of its registrations, as hardware does.
const PINNED: &str = "pinned";

/// The ifaces and NICs that a command works on.
#[derive(Debug)]
pub struct Machine {
    /// The ifaces and the path selector.
    pub hmem: Hmem,
    /// The NICs that a command works with.
    pub nics: Vec<ProviderNic>,
    /// Unavailable providers and NICs, an unavailable simulated iface, and an unreadable topology.
    /// Other unavailable ifaces are in the registry of `hmem`.
    pub absent: Vec<Absent>,
    /// The kinds and names of simulated ifaces.
    pub software: Vec<(IfaceKind, String)>,
    /// The PCIe topology; `None` if it cannot be read.
    pub topology: Option<Topology>,
    /// Counters of resources that a check must not leak.
    pub watches: Vec<Watch>,
}

/// One NIC of a provider.
#[derive(Clone, Debug)]
pub struct ProviderNic {
    provider: Arc<dyn Provider>,
    /// The attributes that the provider reports for the NIC.
    pub attr: ProviderAttr,
    /// True if the NIC is software in this process.
    pub software: bool,
    /// A short description of the NIC.
    pub note: &'static str,
}

/// An unavailable iface, provider, NIC or topology, with the reason.
#[derive(Debug)]
pub struct Absent {
    /// The kind of item: `iface`, `provider`, `NIC` or `topology`.
    pub sort: &'static str,
    /// The name of the item on the command line, such as `verbs/mlx5_0`.
    pub name: String,
    /// The reason why the item is unavailable.
    pub why: Problem,
}

impl Absent {
    /// Returns whether `name` is the name of this NIC or provider, or of a NIC of this provider.
    /// The NICs of an unavailable provider are unknown, so each name `PROVIDER/...` matches.
    pub(crate) fn answers_to(&self, name: &str) -> bool {
        match self.sort {
            "NIC" => is_named(&self.name, name),
            "provider" => name.split('/').next() == Some(self.name.as_str()),
            _ => false,
        }
    }

    /// Returns whether to report this item to a user who selects `name`. `opened` is true if `name`
    /// selects an available NIC. These items are reported:
    ///
    /// - the item `name`;
    /// - a NIC of the provider `name`;
    /// - the provider of the NIC `name`, if `opened` is false.
    pub(crate) fn is_missed_by(&self, name: &str, opened: bool) -> bool {
        self.name == name
            || self.name.starts_with(&format!("{name}/"))
            || self.answers_to(name) && !opened
    }
}

impl From<&Absent> for Skipped {
    fn from(absent: &Absent) -> Self {
        Self::new(format!("{} {}", absent.sort, absent.name), absent.why.clone())
    }
}

/// A counter of resources that a check must not leak.
pub struct Watch {
    /// The name of the resource that is counted, for error messages.
    pub what: &'static str,
    /// Returns the current count.
    pub count: Box<dyn Fn() -> u64 + Send + Sync>,
}

impl Watch {
    /// Returns a counter of the open fds of the process. Only for programs in which no other thread
    /// opens files during a check.
    #[must_use]
    pub fn open_fds() -> Self {
        // The count includes the fd that reads the folder. It is 0 if the folder cannot be read.
        let count = || fs::read_dir("/proc/self/fd").map_or(0, |fds| fds.count() as u64);
        Self { what: "open fds", count: Box::new(count) }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("what", &self.what).field("count", &(self.count)()).finish()
    }
}

impl Machine {
    /// Returns a machine with these ifaces and without NICs.
    #[must_use]
    pub fn new(hmem: Hmem) -> Self {
        Self {
            hmem,
            nics: Vec::new(),
            absent: Vec::new(),
            software: Vec::new(),
            topology: None,
            watches: Vec::new(),
        }
    }

    /// Returns the ifaces and NICs of this machine, the plug-ins of `builder`, two simulated
    /// devices, and four loopback NICs.
    ///
    /// An unavailable iface or provider is not an error: the machine lists it with its reason.
    ///
    /// # Errors
    /// The errors of [`Builder::build`], such as an invalid value in the environment.
    pub fn find(builder: Builder) -> Result<Self> {
        let mut absent = Vec::new();
        let mut watches = Vec::new();
        let mut builder = builder.verbs();
        // The devices reuse freed addresses at once, which reveals stale registrations.
        let devices = Simulated::builder()
            .devices(2)
            .peer_memory(true)
            .address_reuse(AddressReuse::JustFreed);
        match devices.build() {
            Ok(simulated) => {
                let simulated = Arc::new(simulated);
                watches.extend(watch_simulated(&simulated));
                builder = builder.shared_iface(simulated);
            }
            Err(error) => {
                absent.push(Absent { sort: "iface", name: "simulated".into(), why: error.into() })
            }
        }
        let software = vec![(SIMULATED, "simulated".into())];
        let mut machine = Self { absent, software, watches, ..Self::new(builder.build()?) };
        machine.add_loopback();
        machine.find_hardware();
        Ok(machine)
    }

    /// Returns the ifaces of this machine, and the plug-ins and providers of `builder`, without
    /// simulated devices and loopback NICs.
    ///
    /// # Errors
    /// The errors of [`Machine::find`].
    pub fn without_software(builder: Builder) -> Result<Self> {
        let mut machine = Self::new(builder.build()?);
        machine.find_hardware();
        Ok(machine)
    }

    /// Adds the loopback NICs that are available, and the reasons why others are not.
    fn add_loopback(&mut self) {
        for (name, note) in [
            ("scalable", "mr_mode 0: zero-based addresses, requested keys"),
            ("hardware", "like hardware: its mr_mode"),
            ("peer-memory", "like hardware with peer memory and without dma-buf"),
            (PINNED, "like hardware, with pages kept from registration on"),
        ] {
            let nic = Loopback::builder().nic(name);
            let peer_memory = Imports { peer_memory: true, staged: true, ..Imports::default() };
            let nic = match name {
                "scalable" => nic,
                "peer-memory" => nic.needs(HARDWARE_LIKE).imports(peer_memory),
                PINNED => nic.needs(HARDWARE_LIKE).remap_policy(RemapPolicy::Pinned),
                _ => nic.needs(HARDWARE_LIKE),
            };
            let added = nic.build().and_then(|nic| self.add(Arc::new(nic), true, note));
            if let Err(error) = added.and_then(|()| self.drop_last_nic_if_unavailable()) {
                self.absent.push(Absent {
                    sort: "NIC",
                    name: format!("loopback/{name}"),
                    why: self.explained(Step::SystemCall, &error),
                });
            }
        }
    }

    /// Reads the topology. Adds the NICs of available providers, and the reasons why other
    /// providers are unavailable.
    fn find_hardware(&mut self) {
        let absent = |machine: &Self, name: &str, why: &hmem::Error| Absent {
            sort: if name.contains('/') { "NIC" } else { "provider" },
            name: name.into(),
            why: machine.explained(Step::OpenNic, why),
        };
        let missing: Vec<_> =
            self.hmem.absent_providers().map(|(name, why)| absent(self, name, why)).collect();
        self.absent.extend(missing);
        for provider in self.hmem.providers().to_vec() {
            let name = provider.name().to_owned();
            let note = match name.as_str() {
                "verbs" => "RDMA hardware",
                libfabric::NAME => "a provider of libfabric",
                _ => "plug-in",
            };
            if let Err(error) = self.add(provider, false, note) {
                self.absent.push(absent(self, &name, &error));
            }
        }
        let left_out: Vec<_> = self.nics.extract_if(.., |nic| nic.is_left_out()).collect();
        self.absent.extend(left_out.iter().map(|nic| Absent {
            sort: "NIC",
            name: nic.attr.nic.to_string(),
            why: libfabric::why_left_out(),
        }));
        match Topology::read() {
            Ok(topology) => self.topology = Some(topology),
            Err(error) => self.absent.push(Absent {
                sort: "topology",
                name: "of this machine".into(),
                why: error.into(),
            }),
        }
    }

    /// Adds the NICs of a provider.
    ///
    /// # Errors
    /// The errors of [`Provider::nics`].
    pub fn add(
        &mut self,
        provider: Arc<dyn Provider>,
        software: bool,
        note: &'static str,
    ) -> Result<()> {
        for attr in provider.nics()? {
            self.nics.push(ProviderNic::new(Arc::clone(&provider), attr, software, note));
        }
        Ok(())
    }

    /// Opens a domain on the last NIC, to find out whether the NIC is available. The kernel may
    /// lack a feature that the NIC needs, such as io_uring. If the NIC is unavailable, removes the
    /// NIC and returns the error.
    fn drop_last_nic_if_unavailable(&mut self) -> Result<()> {
        let Some(nic) = self.nics.last() else { return Ok(()) };
        match nic.open(&self.hmem, P2pPolicy::Enabled) {
            Err(error) if error.is_unavailable() => {
                self.nics.pop();
                Err(error)
            }
            // `hmem check` reports every other error.
            _ => Ok(()),
        }
    }

    /// Returns the PCI function at an address that an iface or provider reports. `what` names the
    /// device or NIC in errors.
    ///
    /// # Errors
    /// The reason in a few words: the topology cannot be read, or the address is missing, malformed
    /// or not in the PCIe tree.
    pub(crate) fn function(
        &self,
        what: &str,
        address: Option<&str>,
    ) -> std::result::Result<(&Topology, BusId), String> {
        let Some(topology) = &self.topology else {
            return Err("the topology cannot be read".to_owned());
        };
        let Some(address) = address else { return Err(format!("{what} has no PCI address")) };
        let id: BusId = address.parse().map_err(|error: Error| format!("{error:#}"))?;
        match topology.device(id) {
            Some(_) => Ok((topology, id)),
            None => Err(format!("{what}: {id} is not in the PCIe tree")),
        }
    }

    /// Returns the name of an available or unavailable iface.
    pub(crate) fn iface_name(&self, kind: IfaceKind) -> String {
        let software = self.software.iter().find(|(software, _)| *software == kind);
        match software {
            Some((_, name)) => name.clone(),
            None => self.hmem.registry().name_of(kind).to_string(),
        }
    }

    /// Converts an error of `step` to a problem. If a limit of this process or container explains
    /// the error, the problem has the probable cause and a remedy.
    pub(crate) fn explained(&self, step: Step, error: &Error) -> Problem {
        let problem = Problem::from(error);
        match self.hmem.paths().explain_unavailable(step, error) {
            Some(found) => problem.explained(&found),
            None => problem,
        }
    }

    /// Returns the available ifaces, or only the one that is named `name`.
    pub(crate) fn ifaces(&self, name: Option<&str>) -> impl Iterator<Item = &Arc<dyn Iface>> {
        let registry = self.hmem.registry();
        registry.iter().filter(move |iface| name.is_none_or(|name| iface.name() == name))
    }

    /// Returns the available NICs, or only those of a provider or NIC name.
    pub(crate) fn nics(&self, name: Option<&str>) -> impl Iterator<Item = &ProviderNic> {
        self.nics.iter().filter(move |nic| name.is_none_or(|name| nic.answers_to(name)))
    }

    /// Returns whether this is a NIC that cannot be opened although its provider started. Software
    /// NICs are absent from a kernel without io_uring, and are not such NICs.
    pub(crate) fn failed_to_open(&self, absent: &Absent) -> bool {
        let mut providers = self.hmem.absent_providers();
        absent.sort == "NIC" && providers.any(|(name, _)| name == absent.name)
    }

    /// Returns whether an iface simulates its devices.
    pub(crate) fn is_software(&self, kind: IfaceKind) -> bool {
        self.software.iter().any(|(software, _)| *software == kind)
    }

    /// Checks the names of an iface and of a NIC or provider on the command line.
    ///
    /// # Errors
    /// The problem to report, if no available or unavailable item of the machine has such a name.
    pub(crate) fn check_names(
        &self,
        iface: Option<&str>,
        nic: Option<&str>,
    ) -> std::result::Result<(), Problem> {
        if let Some(name) = iface {
            let ifaces = self.iface_names();
            let simulated = self.software.iter().any(|(_, simulated)| simulated == name);
            if !simulated && ifaces.iter().all(|known| known != name) {
                return Err(unknown("iface", name, "--iface", &ifaces));
            }
        }
        if let Some(name) = nic {
            let known = self.nics(Some(name)).next().is_some()
                || self.absent.iter().any(|absent| absent.answers_to(name));
            if !known {
                return Err(unknown_nic(name, &self.provider_names()));
            }
        }
        Ok(())
    }

    /// Returns the names of all providers and NICs, including those that are unavailable.
    pub(crate) fn provider_names(&self) -> Vec<String> {
        let here = self
            .nics
            .iter()
            .flat_map(|nic| [nic.attr.nic.provider.clone(), nic.attr.nic.to_string()]);
        let absent = self.absent.iter().filter(|absent| ["provider", "NIC"].contains(&absent.sort));
        let mut names: Vec<_> = here.chain(absent.map(|absent| absent.name.clone())).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Returns the names of all ifaces, including those that are unavailable.
    pub(crate) fn iface_names(&self) -> Vec<String> {
        let registry = self.hmem.registry();
        let mut names: Vec<_> = registry.iter().map(|iface| iface.name().to_owned()).collect();
        names.extend(registry.absent().map(|(kind, _)| self.iface_name(kind)));
        names.sort();
        names
    }
}

impl ProviderNic {
    /// Creates the description of a NIC of `provider`. `note` describes the NIC in a few words.
    #[must_use]
    pub fn new(
        provider: Arc<dyn Provider>,
        attr: ProviderAttr,
        software: bool,
        note: &'static str,
    ) -> Self {
        Self { provider, attr, software, note }
    }

    /// Returns the provider of the NIC.
    #[must_use]
    pub fn provider(&self) -> &Arc<dyn Provider> {
        &self.provider
    }

    /// Opens a domain without a registration cache on the NIC.
    pub(crate) fn open(&self, hmem: &Hmem, p2p: P2pPolicy) -> Result<Domain> {
        self.open_with(hmem, DomainAttr { p2p, ..DomainAttr::default() })
    }

    /// Opens a domain on the NIC with the attributes `attr`. The fields `nic` and `mr_mode` of
    /// `attr` are replaced by the values for this NIC.
    pub(crate) fn open_with(&self, hmem: &Hmem, attr: DomainAttr) -> Result<Domain> {
        let attr = DomainAttr {
            nic: Some(self.attr.nic.name.clone()),
            mr_mode: HARDWARE_LIKE | self.attr.required_mr_mode,
            ..attr
        };
        hmem.domain_on(&*self.provider, attr)
    }

    /// Returns the path that a registration with the NIC takes, with the reasons.
    pub(crate) fn explain(&self, hmem: &Hmem, request: &ExplainRequest) -> Result<Explanation> {
        hmem.explain_on(&*self.provider, request)
    }

    /// Returns whether this is the loopback NIC that pins the pages of its registrations.
    pub(crate) fn pins_pages(&self) -> bool {
        self.software && self.attr.nic.name == PINNED
    }

    /// Returns whether this is a NIC of libfabric.
    pub(crate) fn is_of_libfabric(&self) -> bool {
        self.attr.nic.provider == libfabric::NAME
    }

    /// Returns whether the command does not use the NIC, for the reason of
    /// [`libfabric::why_left_out`].
    fn is_left_out(&self) -> bool {
        self.is_of_libfabric() && self.attr.nic.name.contains(libfabric::LEFT_OUT)
    }

    /// Returns whether the NIC ignores the write ordering of registrations.
    pub(crate) fn ignores_ordering(&self) -> bool {
        self.software || self.is_of_libfabric()
    }

    /// Returns whether `name` is the name of the provider (`verbs`), of one of libfabric's
    /// providers (`libfabric/tcp;ofi_rxm`), or of the NIC (`verbs/mlx5_0`).
    pub(crate) fn answers_to(&self, name: &str) -> bool {
        self.attr.nic.provider == name || is_named(&self.attr.nic.to_string(), name)
    }
}

/// Returns whether `name` is the name of the NIC `nic`, or of its provider in libfabric
/// (`libfabric/tcp;ofi_rxm` for `libfabric/tcp;ofi_rxm:eth0`).
fn is_named(nic: &str, name: &str) -> bool {
    nic.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

fn watch_simulated(simulated: &Arc<Simulated>) -> [Watch; 2] {
    let watch = |what, count: fn(&Simulated) -> u64| {
        let simulated = Arc::clone(simulated);
        Watch { what, count: Box::new(move || count(&simulated)) }
    };
    [
        watch("allocations of the simulated device", |device| device.stats().live_allocations),
        watch("dma-buf exports of the simulated device", |device| device.stats().live_exports),
    ]
}

/// Allocates host memory if `iface` is the system iface. Otherwise allocates memory of `device`, or
/// of device 0 for `None`.
pub(crate) fn allocate(
    iface: &Arc<dyn Iface>,
    device: Option<DeviceId>,
    len: u64,
) -> Result<DeviceBuffer> {
    let system = iface.kind() == IfaceKind::SYSTEM;
    let kind = if system { AllocationKind::System } else { AllocationKind::Device };
    let device = device.unwrap_or_default();
    DeviceBuffer::allocate(iface, &AllocRequest { len, device, kind })
}

/// Returns the innermost [`Error`] in the chain of sources. If a registration failed because every
/// path was refused, this is the error of the last refused path.
pub(crate) fn root(error: &Error) -> &Error {
    let mut root = error;
    while let Some(source) = root.source().and_then(|source| source.downcast_ref()) {
        root = source;
    }
    root
}
