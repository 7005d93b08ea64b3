//! Subjects of the command: the ifaces and NICs of this machine, and the software ones that are
//! always there.

use std::{error::Error as _, fmt, sync::Arc};

use hmem::{
    CacheAttr, Domain, DomainAttr, Error, Hmem, IfaceKind, MrMode, Result,
    cause::Step,
    loopback::{Loopback, Memory},
    p2p::{
        path::{ExplainRequest, Explanation},
        topology::{BusId, Topology},
    },
    path::P2pPolicy,
    provider::{Imports, Provider, ProviderAttr},
    system::{AddressReuse, SIMULATED, Simulated, SimulatedBuilder},
};

use crate::json::Skipped;

/// What hardware usually needs of an application.
pub const HARDWARE_LIKE: MrMode = MrMode::LOCAL
    .union(MrMode::VIRT_ADDR)
    .union(MrMode::ALLOCATED)
    .union(MrMode::PROV_KEY)
    .union(MrMode::HMEM);

/// The loopback NIC that reaches device memory by peer memory instead of by dma-buf.
const PEER_MEMORY: &str = "peer-memory";

/// The loopback NIC that keeps the pages of registration.
const PINNED: &str = "pinned";

/// Ifaces and NICs to look at.
#[derive(Debug)]
pub struct Machine {
    /// The ifaces, and the path decision.
    pub hmem: Hmem,
    /// The NICs.
    pub nics: Vec<Fabric>,
    /// Providers and NICs that are not here.
    pub absent: Vec<Absent>,
    /// Kinds that are software, with their names.
    pub software: Vec<(IfaceKind, String)>,
    /// How it is wired, where that can be read.
    pub topology: Option<Topology>,
    /// Counts that a check must leave as it found them, beside those of the process.
    pub watches: Vec<Watch>,
}

/// One NIC of a provider.
#[derive(Debug)]
pub struct Fabric {
    provider: Arc<dyn Provider>,
    /// What it offers and needs.
    pub attr: ProviderAttr,
    /// Whether it is software.
    pub software: bool,
    /// What it stands for, in a few words.
    pub note: &'static str,
}

/// Something that is not here.
#[derive(Debug)]
pub struct Absent {
    /// Which sort of thing: `iface`, `provider`, `NIC`, `topology`.
    pub sort: &'static str,
    /// Its name, as the command line takes it.
    pub name: String,
    /// Why, in one line.
    pub why: String,
}

impl From<&Absent> for Skipped {
    fn from(absent: &Absent) -> Self {
        Self { what: format!("{} {}", absent.sort, absent.name), why: absent.why.clone() }
    }
}

/// A count that a check must leave as it found it.
pub struct Watch {
    /// What is counted.
    pub what: &'static str,
    /// Counts it.
    pub count: Box<dyn Fn() -> u64>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("what", &self.what).field("count", &(self.count)()).finish()
    }
}

impl Machine {
    /// These ifaces, and no NIC yet.
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

    /// This machine, with a simulated device of two devices and a loopback NIC in three modes.
    ///
    /// # Errors
    /// An invalid value in the environment (`FI_HMEM`, `FI_HMEM_DISABLE_P2P`). An unavailable iface
    /// or provider is no error: it is listed with its reason.
    pub fn find() -> Result<Self> {
        let mut absent = Vec::new();
        let mut watches = Vec::new();
        let mut builder = Hmem::builder().verbs();
        match simulated_devices().build() {
            Ok(simulated) => {
                let simulated = Arc::new(simulated);
                watches.extend(watch_simulated(&simulated));
                builder = builder.shared_iface(simulated);
            }
            Err(error) => absent.push(Absent {
                sort: "iface",
                name: "simulated".into(),
                why: error.to_string(),
            }),
        }
        let software = vec![(SIMULATED, "simulated".into())];
        let mut machine = Self { absent, software, watches, ..Self::new(builder.build()?) };
        let modes = [
            (
                "scalable",
                MrMode::empty(),
                Memory::Follow,
                "mr_mode 0: zero-based addresses, requested keys",
            ),
            ("hardware", HARDWARE_LIKE, Memory::Follow, "the mr_mode that hardware needs"),
            (
                PEER_MEMORY,
                HARDWARE_LIKE,
                Memory::Follow,
                "hardware that has peer memory and no dma-buf",
            ),
            (
                PINNED,
                HARDWARE_LIKE,
                Memory::Pinned,
                "as hardware, and keeps the pages of registration",
            ),
        ];
        for (nic, needs, memory, note) in modes {
            let mut loopback = Loopback::builder().nic(nic).needs(needs).memory(memory);
            if nic == PEER_MEMORY {
                let imports = Imports { peer_memory: true, staged: true, ..Imports::default() };
                loopback = loopback.imports(imports);
            }
            let loopback = loopback.build();
            let added = loopback.and_then(|loopback| machine.add(Arc::new(loopback), true, note));
            if let Err(error) = added.and_then(|()| machine.drop_last_nic_if_unavailable()) {
                machine.absent.push(Absent {
                    sort: "NIC",
                    name: format!("loopback/{nic}"),
                    why: machine.explained(Step::SystemCall, &error),
                });
            }
        }
        machine.find_hardware();
        match Topology::read() {
            Ok(topology) => machine.topology = Some(topology),
            Err(error) => machine.absent.push(Absent {
                sort: "topology",
                name: "of this machine".into(),
                why: error.to_string(),
            }),
        }
        Ok(machine)
    }

    /// Adds the NICs of the providers that the library found, and the reasons for those that it did
    /// not.
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
            if let Err(error) = self.add(provider, false, "RDMA hardware") {
                self.absent.push(absent(self, &name, &error));
            }
        }
    }

    /// Returns an error as one line, with its probable cause and remedy if a limit of this process
    /// or container explains it.
    #[must_use]
    pub fn explained(&self, step: Step, error: &Error) -> String {
        match self.hmem.paths().explain_unavailable(step, error) {
            Some(found) => {
                let (reason, _) = reason_and_remedy(error);
                format!("{reason}; probable cause: {} -> {}", found.cause, found.remedy)
            }
            None => error.to_string(),
        }
    }

    /// Adds the NICs of a provider.
    ///
    /// # Errors
    /// As [`Provider::nics`].
    pub fn add(
        &mut self,
        provider: Arc<dyn Provider>,
        software: bool,
        note: &'static str,
    ) -> Result<()> {
        for attr in provider.nics()? {
            self.nics.push(Fabric { provider: Arc::clone(&provider), attr, software, note });
        }
        Ok(())
    }

    /// A NIC can be listed and still need what this machine lacks (io_uring, for one): only a
    /// domain tells.
    fn drop_last_nic_if_unavailable(&mut self) -> Result<()> {
        let Some(nic) = self.nics.last() else { return Ok(()) };
        match self.open(nic, P2pPolicy::Enabled) {
            Err(error) if error.is_unavailable() => {
                self.nics.pop();
                Err(error)
            }
            // Any other trouble is for the check to find.
            _ => Ok(()),
        }
    }

    /// Opens a domain on a NIC.
    ///
    /// # Errors
    /// As [`Domain::open`].
    pub fn open(&self, nic: &Fabric, p2p: P2pPolicy) -> Result<Domain> {
        nic.open(&self.hmem, p2p)
    }

    /// The PCI function at an address that an iface or provider gave, in whichever form.
    ///
    /// # Errors
    /// The reason in a few words: `what` has no address, or one that is not in the PCIe tree.
    pub fn function(
        &self,
        what: &str,
        address: Option<&str>,
    ) -> std::result::Result<(&Topology, BusId), String> {
        let Some(topology) = &self.topology else {
            return Err("the topology cannot be read".to_owned());
        };
        let Some(address) = address else { return Err(format!("{what} has no PCI address")) };
        let id: BusId = address.parse().map_err(|error: Error| error.to_string())?;
        match topology.device(id) {
            Some(_) => Ok((topology, id)),
            None => Err(format!("{what}: {id} is not in the PCIe tree")),
        }
    }

    /// The name of an iface, absent or not.
    #[must_use]
    pub fn iface_name(&self, kind: IfaceKind) -> String {
        let software = self.software.iter().find(|(software, _)| *software == kind);
        software.map_or_else(|| kind.to_string(), |(_, name)| name.clone())
    }

    /// Whether an iface is software and not hardware of this machine.
    #[must_use]
    pub fn is_software(&self, kind: IfaceKind) -> bool {
        self.software.iter().any(|(software, _)| *software == kind)
    }

    /// Whether an iface of this name is known, absent or not.
    #[must_use]
    pub fn knows_iface(&self, name: &str) -> bool {
        let registry = self.hmem.registry();
        registry.iter().any(|iface| iface.name() == name)
            || registry.absent().any(|(kind, _)| self.iface_name(kind) == name)
            || self.software.iter().any(|(_, software)| software == name)
    }

    /// The names of providers and NICs, absent or not.
    #[must_use]
    pub fn provider_names(&self) -> Vec<String> {
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

    /// The names that [`Machine::knows_iface`] knows.
    #[must_use]
    pub fn iface_names(&self) -> Vec<String> {
        let registry = self.hmem.registry();
        let mut names: Vec<_> = registry.iter().map(|iface| iface.name().to_owned()).collect();
        names.extend(registry.absent().map(|(kind, _)| self.iface_name(kind)));
        names.sort();
        names
    }
}

impl Fabric {
    /// Opens a domain on the NIC.
    ///
    /// # Errors
    /// As [`Domain::open`].
    pub fn open(&self, hmem: &Hmem, p2p: P2pPolicy) -> Result<Domain> {
        self.open_with(hmem, p2p, None)
    }

    /// [`Fabric::open`] of a domain with a registration cache.
    ///
    /// # Errors
    /// As [`Domain::open`].
    pub fn open_with(
        &self,
        hmem: &Hmem,
        p2p: P2pPolicy,
        cache: Option<CacheAttr>,
    ) -> Result<Domain> {
        let attr = DomainAttr {
            nic: Some(self.attr.nic.name.clone()),
            mr_mode: HARDWARE_LIKE | self.attr.required_mr_mode,
            p2p,
            cache,
            ..DomainAttr::default()
        };
        hmem.domain_on(&*self.provider, attr)
    }

    /// Says which way a registration with the NIC would take.
    ///
    /// # Errors
    /// As [`Hmem::explain_on`].
    pub fn explain(&self, hmem: &Hmem, request: &ExplainRequest) -> Result<Explanation> {
        hmem.explain_on(&*self.provider, request)
    }

    /// Whether it is the software NIC that keeps the pages of registration, as hardware does.
    #[must_use]
    pub fn keeps_pages(&self) -> bool {
        self.software && self.attr.nic.name == PINNED
    }

    /// Whether `name` names it: its provider, or provider and NIC with a slash.
    #[must_use]
    pub fn answers_to(&self, name: &str) -> bool {
        self.attr.nic.provider == name || self.attr.nic.to_string() == name
    }
}

/// Addresses that were freed come back at once, which is what finds stale registrations.
fn simulated_devices() -> SimulatedBuilder {
    Simulated::builder().devices(2).peer_memory(true).address_reuse(AddressReuse::JustFreed)
}

fn watch_simulated(simulated: &Arc<Simulated>) -> [Watch; 2] {
    let (allocations, exports) = (Arc::clone(simulated), Arc::clone(simulated));
    [
        Watch {
            what: "allocations of the simulated device",
            count: Box::new(move || allocations.stats().live_allocations),
        },
        Watch {
            what: "dma-buf exports of the simulated device",
            count: Box::new(move || exports.stats().live_exports),
        },
    ]
}

/// The error's own words with its remedy apart, as tables print them.
#[must_use]
pub fn reason_and_remedy(error: &Error) -> (String, Option<String>) {
    let whole = error.to_string();
    match error.remedy_text() {
        Some(remedy) => {
            let reason = whole.strip_suffix(remedy).and_then(|reason| reason.strip_suffix("; "));
            (reason.unwrap_or(&whole).to_owned(), Some(remedy.to_owned()))
        }
        None => (whole, None),
    }
}

/// The error at the bottom: of a path decision, what the last way was refused for.
#[must_use]
pub fn root(error: &Error) -> &Error {
    let mut root = error;
    while let Some(source) = root.source().and_then(|source| source.downcast_ref()) {
        root = source;
    }
    root
}
