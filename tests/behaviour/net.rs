//! Two domains on one NIC: a target that exposes memory, and an initiator that accesses it.

use std::{ops::Deref, sync::Arc};

use hmem::{
    Access, AddressRange, AuthKey, DomainAttr, ErrorKind, Hmem, Iface, MemoryRegion, MrFlags,
    MrMode, RemoteKey, Result,
    fabric::{self, MrAttr},
    loopback::{self, Faults, Loopback, NicCall},
    provider::Provider,
    system::{FreeDetection, Simulated},
};
pub(crate) use hmem_conformance::link::{
    LOCAL, Local, REMOTE, eventually, mr_attr, open_endpoint, raw, remote, segment, wait_held,
};
use hmem_conformance::link::{Link, LinkSide};

use crate::{
    config::{Memory, Nic, TestConfig},
    hold::Hold,
};

/// Name of the software NIC's provider.
pub(crate) const LOOPBACK: &str = "loopback";

/// Settings of the fixture [`Net`]. A test may change them before it opens the fixture.
pub(crate) struct Setup {
    pub(crate) config: TestConfig,
    pub(crate) provider: loopback::Builder,
    pub(crate) target: DomainAttr,
    pub(crate) initiator: DomainAttr,
    /// True if the target's endpoint has the RMA_EVENT capability.
    pub(crate) rma_event: bool,
    pub(crate) initiator_key: Option<AuthKey>,
    pub(crate) faults: Faults,
}

impl Setup {
    pub(crate) fn of(config: &TestConfig) -> Self {
        let faults = Faults::new();
        let attr = DomainAttr {
            mr_mode: config.mode.offered,
            hmem: true,
            p2p: config.policy,
            nic: nic_name(config),
            ..DomainAttr::default()
        };
        Self {
            config: *config,
            provider: Loopback::builder()
                .needs(config.mode.needed)
                .key_size(config.key_size)
                .remap_policy(config.pages)
                .progress(config.progress)
                .faults(&faults),
            target: attr.clone(),
            initiator: attr,
            rma_event: true,
            initiator_key: None,
            faults,
        }
    }

    pub(crate) fn open(self) -> Net {
        let mut builder = Hmem::builder().without_vendor_ifaces();
        builder = match self.config.nic {
            Nic::Loopback => {
                builder.provider(self.provider.build().expect("build the software NIC"))
            }
            Nic::Verbs { .. } => builder.shared_provider(verbs()),
        };
        let device = match self.config.memory {
            Memory::System => None,
            Memory::Device(style) => Some(device(style)),
        };
        let iface = device.as_ref().map(|device| Arc::clone(device) as Arc<dyn Iface>);
        if let Some(iface) = &iface {
            builder = builder.shared_iface(Arc::clone(iface));
        }
        let hmem = builder.build().expect("start the ifaces");
        let open = |attr, rma_event, key| open_side(&hmem, &self.config, attr, rma_event, key);
        let target = open(self.target, self.rma_event, None);
        let initiator = open(self.initiator, true, self.initiator_key);
        // A verbs request carries the operands of atomics, which the CPU reads.
        let link = Link::connect(initiator, target, iface, !self.config.is_loopback());
        Net { config: self.config, link, hmem, device, faults: self.faults }
    }
}

/// Opens a domain with an endpoint.
pub(crate) fn open_side(
    hmem: &Hmem,
    config: &TestConfig,
    attr: DomainAttr,
    rma_event: bool,
    key: Option<AuthKey>,
) -> LinkSide {
    let domain = hmem.domain(provider_name(config), attr).expect("open a domain");
    LinkSide::open(domain, rma_event, key).expect("open an endpoint")
}

/// Returns the name of the provider of a test configuration.
pub(crate) fn provider_name(config: &TestConfig) -> &'static str {
    if config.is_loopback() { LOOPBACK } else { "verbs" }
}

/// Returns the name of the NIC of a test configuration; `None` for the software NIC.
pub(crate) fn nic_name(config: &TestConfig) -> Option<String> {
    let verbs = || std::env::var("HMEM_VERBS_DEVICE").expect("set in verbs configurations");
    (!config.is_loopback()).then(verbs)
}

/// Returns the verbs provider. Its endpoints connect automatically, and reconnect after an error.
#[cfg(feature = "verbs")]
pub(crate) fn verbs() -> Arc<dyn Provider> {
    use hmem::verbs::Verbs;

    use crate::hold;

    let builder = Verbs::builder().functions(hold::verbs::functions());
    Arc::new(builder.connect_in_process(true).build().expect("start"))
}

#[cfg(not(feature = "verbs"))]
pub(crate) fn verbs() -> Arc<dyn Provider> {
    panic!("HMEM_VERBS_DEVICE names a device, and this build is without the cargo feature `verbs`")
}

/// Creates a simulated iface with two devices and the given detection of frees.
pub(crate) fn device(style: FreeDetection) -> Arc<Simulated> {
    let builder = Simulated::builder().devices(2).free_detection(style).window(1 << 32);
    Arc::new(builder.build().expect("build the simulated device"))
}

/// The fixture of most tests: a connected initiator and target in one test configuration.
pub(crate) struct Net {
    pub(crate) config: TestConfig,
    pub(crate) link: Link,
    pub(crate) hmem: Hmem,
    pub(crate) device: Option<Arc<Simulated>>,
    pub(crate) faults: Faults,
}

impl Deref for Net {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Net {
    pub(crate) fn open(config: &TestConfig) -> Self {
        Setup::of(config).open()
    }

    /// Returns the error kind that the initiator sees when the target refuses an access with
    /// `refusal`.
    pub(crate) fn seen(&self, refusal: ErrorKind) -> ErrorKind {
        self.config.seen(refusal)
    }

    /// Holds the target's next registration in flight, until the returned guard releases it. The
    /// software NIC also holds a registration of the initiator, if that one comes first.
    pub(crate) fn hold_registration(&self) -> Hold {
        match self.config.nic {
            Nic::Loopback => Hold::SoftwareNic(self.faults.hold(NicCall::Register)),
            #[cfg(feature = "verbs")]
            Nic::Verbs { .. } => Hold::Verbs(crate::hold::verbs::Gate::hold(&self.target.domain)),
            #[cfg(not(feature = "verbs"))]
            Nic::Verbs { .. } => unreachable!("a build without verbs opens no such configuration"),
        }
    }

    /// Registers one range in the target's domain. Binds and enables the region if the mode
    /// requires it.
    pub(crate) fn expose(&self, range: AddressRange, access: Access) -> MemoryRegion {
        self.expose_all(&[range], access)
    }

    pub(crate) fn expose_all(&self, ranges: &[AddressRange], access: Access) -> MemoryRegion {
        self.try_expose(&mr_attr(ranges, access), MrFlags::empty()).expect("register")
    }

    pub(crate) fn try_expose(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        register(&self.target, &attr.key(self.fresh_key()), flags)
    }

    /// Reads bytes at an offset of the region with `key`.
    pub(crate) fn pull(&self, key: &RemoteKey, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.link.pull(key, offset, len as u64)
    }
}

/// Registers memory. In ENDPOINT mode, also binds the region to the endpoint and enables it.
pub(crate) fn register(side: &LinkSide, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
    let region = fabric::regattr(&side.domain, attr, flags)?;
    bind_if_needed(side, &region)?;
    Ok(region)
}

/// In ENDPOINT mode, binds the region to the endpoint of this side and enables it.
pub(crate) fn bind_if_needed(side: &LinkSide, region: &MemoryRegion) -> Result<()> {
    if side.domain.mr_mode().contains(MrMode::ENDPOINT) {
        region.bind_endpoint(&side.endpoint)?;
        region.enable()?;
    }
    Ok(())
}
