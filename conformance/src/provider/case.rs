//! Test cases of a behaviour: a provider, and the memory that its peers reach.

use std::{fmt, sync::Arc};

use hmem_core::{
    Domain, DomainAttr, Error, ErrorKind, MrMode, Result,
    path::P2pPolicy,
    provider::{Features, ProgressModel, Provider, ProviderAttr, WindowType},
};
use hmem_p2p::path::DefaultPathSelector;

use crate::{
    control::TestControl,
    link::REMOTE,
    trial::{IntoOutcome, Outcome, Skipped, labeled, skip},
};

/// A provider under test.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) control: Option<Arc<dyn TestControl>>,
}

/// The memory of a test, and the way in which NICs reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TestMemory {
    /// Host memory that its region owns.
    OwnedHost,
    /// Host memory that is registered by its addresses.
    Host,
    /// Memory of the simulated device, reached by dma-buf.
    Device,
    /// Memory of the simulated device, reached by staged copies.
    StagedDevice,
}

impl TestMemory {
    const ALL: [Self; 4] = [Self::OwnedHost, Self::Host, Self::Device, Self::StagedDevice];
}

impl fmt::Display for TestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OwnedHost => "owned host memory",
            Self::Host => "host memory",
            Self::Device => "device memory by dma-buf",
            Self::StagedDevice => "device memory by staged copies",
        })
    }
}

/// A property that a case must have for a behaviour to be tested in it, and the reason for skipping
/// other cases.
pub(super) struct Need {
    pub(super) reason: &'static str,
    pub(super) met: fn(&Case) -> bool,
}

/// A case in which behaviours are tested: a provider, and memory that its peers reach.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) provider: Arc<dyn Provider>,
    /// Attributes of the first NIC.
    pub(super) attr: ProviderAttr,
    /// Optional facets of the provider's domains.
    pub(super) features: Features,
    /// Types of the NIC's windows. Empty if the NIC has no windows.
    pub(super) window_types: Vec<WindowType>,
    pub(super) memory: TestMemory,
    pub(super) control: Option<Arc<dyn TestControl>>,
}

impl Case {
    /// Tests a behaviour in each case that has the properties `needs`. The result is a success if a
    /// case succeeded, and otherwise the reason why the first case was skipped. If some cases
    /// succeeded and the test skipped others, writes the reasons to the standard error.
    pub(super) fn each<O: IntoOutcome>(
        behaviour: &str,
        subject: &Subject,
        needs: &[Need],
        test: fn(&Self) -> O,
    ) -> Outcome {
        let nics = subject.provider.nics().expect("list the NICs");
        let attr = nics.into_iter().next().expect("the provider has a NIC");
        let (registry, selector) = (Arc::default(), Arc::new(DefaultPathSelector::new()));
        let open = DomainAttr { mr_mode: attr.required_mr_mode, ..DomainAttr::default() };
        let domain = Domain::open(&*subject.provider, registry, selector, open);
        let domain = domain.expect("open a domain");
        let features = Features::of(domain.provider_domain());
        let windows = domain.provider_domain().windows();
        let window_types = windows.map_or_else(Vec::new, |windows| windows.window_types().to_vec());
        drop(domain);
        let (mut outcome, mut skipped) = (None, Vec::new());
        for memory in TestMemory::ALL {
            let (provider, control) = (Arc::clone(&subject.provider), subject.control.clone());
            let (attr, window_types) = (attr.clone(), window_types.clone());
            let case = Self { provider, attr, features, window_types, memory, control };
            let own = [case.unreachable()].into_iter().flatten();
            let unmet = needs.iter().filter(|need| !(need.met)(&case)).map(|need| need.reason);
            let shown = match own.chain(unmet).next() {
                Some(reason) => skip(reason),
                None => {
                    let shown = labeled(&memory, || test(&case).into_outcome());
                    if let Err(Skipped(reason)) = &shown {
                        skipped.push(format!("{behaviour}: not tested with {memory}: {reason}"));
                    }
                    shown
                }
            };
            if !matches!(outcome, Some(Ok(()))) && (shown.is_ok() || outcome.is_none()) {
                outcome = Some(shown);
            }
        }
        let outcome = outcome.expect("a case");
        if outcome.is_ok() {
            skipped.iter().for_each(|skipped| eprintln!("{skipped}"));
        }
        outcome
    }

    /// Returns the reason why peers cannot reach the memory, if they cannot.
    fn unreachable(&self) -> Option<&'static str> {
        let (imports, reached) = (&self.attr.imports, REMOTE);
        match self.memory {
            TestMemory::Device if !imports.dma_buf => Some("the NIC imports no dma-bufs"),
            TestMemory::StagedDevice
                if !imports.staged || !self.attr.staged_access.contains(reached) =>
            {
                Some("peers of this NIC do not reach staged memory")
            }
            _ => None,
        }
    }

    /// Returns true if the NIC needs these mr_mode bits.
    pub(super) fn has(&self, bits: MrMode) -> bool {
        self.attr.required_mr_mode.contains(bits)
    }

    pub(super) fn virtual_addresses(&self) -> bool {
        self.has(MrMode::VIRT_ADDR)
    }

    pub(super) fn is_host(&self) -> bool {
        matches!(self.memory, TestMemory::OwnedHost | TestMemory::Host)
    }

    pub(super) fn staged(&self) -> bool {
        self.memory == TestMemory::StagedDevice
    }

    pub(super) fn by_hand(&self) -> bool {
        self.attr.progress == ProgressModel::Manual
    }

    /// Returns the policy by which domains register the memory.
    pub(super) fn policy(&self) -> P2pPolicy {
        match self.memory {
            TestMemory::Device => P2pPolicy::Required,
            TestMemory::StagedDevice => P2pPolicy::Disabled,
            _ => P2pPolicy::Enabled,
        }
    }

    pub(super) fn tells_reasons(&self) -> bool {
        self.control.as_ref().is_some_and(|control| control.tells_reasons())
    }

    /// Asserts that an access failed with an error of kind `expected`. Also accepts every kind of
    /// access error if the NIC does not tell reasons.
    #[track_caller]
    pub(super) fn assert_refused<T>(&self, result: Result<T>, expected: ErrorKind, what: &str) {
        let error = result.err().unwrap_or_else(|| panic!("{what} succeeded"));
        let accepted =
            error.kind() == expected || (!self.tells_reasons() && is_access_error(&error));
        assert!(accepted, "{what}: the kind must be {expected:?}: {error}");
    }
}

fn is_access_error(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::AccessDenied
            | ErrorKind::InvalidKey
            | ErrorKind::OutOfBounds
            | ErrorKind::BadAddress
    )
}

/// Properties of cases, which the lists of behaviours name. A behaviour is tested only in cases
/// that have all of its properties.
pub(super) mod needs {
    use super::{Case, Features, MrMode, Need, TestMemory, WindowType};

    fn has(case: &Case, feature: Features) -> bool {
        case.features.contains(feature)
    }

    const fn need(reason: &'static str, met: fn(&Case) -> bool) -> Need {
        Need { reason, met }
    }

    /// One case of each provider, for behaviours that do not depend on the memory.
    pub(in super::super) const ONCE: Need =
        need("the memory makes no difference", |case| case.memory == TestMemory::OwnedHost);
    pub(in super::super) const OWN_KEYS: Need =
        need("the provider picks the keys", |case| !case.has(MrMode::PROV_KEY));
    /// Host memory that no region owns, for tests that replace the pages behind an address.
    pub(in super::super) const HOST_PAGES: Need =
        need("the test replaces host pages that no region owns", |case| {
            case.memory == TestMemory::Host
        });
    pub(in super::super) const DEVICE_MEMORY: Need =
        need("the behaviour concerns device memory", |case| !case.is_host());
    pub(in super::super) const DMA_BUF: Need =
        need("only dma-bufs are revoked", |case| case.memory == TestMemory::Device);
    /// A provider that requires no mr_mode bit, because such a bit changes the rule.
    pub(in super::super) const DEFAULT_MODE: Need =
        need("an mr_mode bit changes the rule", |case| case.attr.required_mr_mode.is_empty());
    pub(in super::super) const VIRTUAL_ADDRESSES: Need =
        need("peers address from 0 in this mode", Case::virtual_addresses);
    pub(in super::super) const ALLOCATED_MODE: Need =
        need("pages may appear later in this mode", |case| case.has(MrMode::ALLOCATED));
    pub(in super::super) const NOTIFY_MODE: Need =
        need("no refresh is needed in this mode", |case| case.has(MrMode::MMU_NOTIFY));
    pub(in super::super) const RMA_EVENT_MODE: Need =
        need("counters may be bound to enabled regions in this mode", |case| {
            case.has(MrMode::RMA_EVENT)
        });
    pub(in super::super) const BY_HAND: Need =
        need("the NIC makes progress of its own", Case::by_hand);
    /// The cases for behaviours that take long. With test control, these are the cases whose NIC
    /// makes progress by calls and requires no mr_mode bit, except the case with memory that a
    /// region owns: the NIC registers it like other host memory. Without test control, these are
    /// the cases with host memory that no region owns.
    pub(in super::super) const LONG: Need =
        need("five rounds show it in this mode and memory", |case| match case.control {
            Some(_) => {
                case.by_hand()
                    && case.attr.required_mr_mode.is_empty()
                    && case.memory != TestMemory::OwnedHost
            }
            None => case.memory == TestMemory::Host,
        });
    pub(in super::super) const PROVIDER_KEYS: Need =
        need("the application picks the keys", |case| case.has(MrMode::PROV_KEY));
    pub(in super::super) const PLAIN_KEYS: Need =
        need("this mode has raw keys only", |case| !case.has(MrMode::RAW));
    pub(in super::super) const RAW_MODE: Need =
        need("regions have plain keys in this mode", |case| case.has(MrMode::RAW));
    pub(in super::super) const ZERO_BASED: Need =
        need("peers address each range by its own virtual address", |case| {
            !case.virtual_addresses()
        });
    pub(in super::super) const ATOMICS: Need =
        need("atomics on staged memory are refused", |case| !case.staged());
    pub(in super::super) const LOCAL_RIGHTS: Need =
        need("the NIC may ignore the descriptor of local memory in this mode", |case| {
            case.has(MrMode::LOCAL) || case.control.is_some()
        });
    pub(in super::super) const ENDPOINT_MODE: Need =
        need("regions are not bound to endpoints in this mode", |case| case.has(MrMode::ENDPOINT));
    pub(in super::super) const UNBOUND: Need =
        need("the region itself is bound to the endpoint in this mode", |case| {
            !case.has(MrMode::ENDPOINT)
        });
    pub(in super::super) const SUB_REGIONS: Need =
        need("the provider has no sub-regions", |case| has(case, Features::SUB_REGIONS));
    pub(in super::super) const CONTROL: Need =
        need("the back end offers no test control", |case| case.control.is_some());
    /// A NIC with windows, in a mode other than RAW, because windows have no raw keys. Without test
    /// control the memory must be host memory, since a driver may bind windows to host memory only.
    pub(in super::super) const WINDOWS: Need =
        need("the NIC has no windows for this memory or mode", |case| {
            has(case, Features::WINDOWS)
                && !case.has(MrMode::RAW)
                && (case.is_host() || case.control.is_some())
        });
    pub(in super::super) const TYPE_1: Need = need("the NIC has no windows of type 1", |case| {
        case.window_types.contains(&WindowType::One)
    });
    pub(in super::super) const TYPE_2: Need =
        need("the NIC lacks windows of type 2A or 2B", |case| {
            [WindowType::TwoA, WindowType::TwoB].iter().all(|kind| case.window_types.contains(kind))
        });
    /// A NIC with every mechanism of grants. In RAW mode the windows are not used.
    pub(in super::super) const EVERY_MECHANISM: Need =
        need("the NIC lacks sub-regions or a type of windows", |case| {
            has(case, Features::SUB_REGIONS) && (TYPE_1.met)(case) && (TYPE_2.met)(case)
        });
    /// A NIC that grants parts of this memory, by windows or by sub-regions.
    pub(in super::super) const GRANTS: Need =
        need("the provider has neither sub-regions nor windows for this memory or mode", |case| {
            has(case, Features::SUB_REGIONS) || (WINDOWS.met)(case)
        });
    pub(in super::super) const DMA_BUFS: Need =
        need("the NIC imports no dma-bufs", |case| case.attr.imports.dma_buf);
    pub(in super::super) const COUNTERS: Need =
        need("the NIC does not count accesses to a region", |case| {
            has(case, Features::REGION_COUNTERS)
        });
    pub(in super::super) const RAW_KEYS: Need =
        need("the provider has no raw keys", |case| has(case, Features::RAW_KEYS));
    pub(in super::super) const REFRESH: Need =
        need("the provider does not refresh pages", |case| has(case, Features::REFRESH));
    pub(in super::super) const NO_IMMEDIATE_DATA: Need =
        need("the NIC carries immediate data", |case| case.attr.cq_data_size == 0);
    pub(in super::super) const IMMEDIATE_DATA: Need =
        need("the NIC carries no immediate data", |case| case.attr.cq_data_size > 0);
}
