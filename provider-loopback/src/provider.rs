//! The provider, a fabric of software NICs, and its builder.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    Error, ErrorKind, MrFlags, MrMode, Result,
    provider::{
        DomainRequest, Imports, NicState, ProgressModel, Provider, ProviderAttr, ProviderDomain,
        WindowType,
    },
};

use parking_lot::Mutex;

use super::{
    Faults, NicCall, Progress, RemapPolicy,
    config::{Config, MAX_REGIONS},
    endpoint::Fabric,
    handles::Domain,
    nic::Nic,
};

/// A fabric of software NICs. Needs the feature `testing` of `hmem`.
///
/// Endpoints of all its domains can reach each other by name. Clones are the same fabric. Every
/// call of [`Builder::build`] creates a new fabric, and endpoints of different fabrics cannot reach
/// each other.
#[derive(Clone, Debug)]
pub struct Loopback {
    fabric: Arc<Fabric>,
    nics: Vec<Arc<Nic>>,
    /// The open domains of the fabric.
    domains: Arc<Mutex<Vec<Weak<Domain>>>>,
}

impl Loopback {
    /// Creates a builder of a fabric.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Sets the state of a NIC, as the failure or repair of a device or cable does.
    ///
    /// - [`NicState::Lost`]: ends all requests of the NIC's open domains
    ///   ([`NicLife`](hmem_core::provider::NicLife)). These domains stay lost. No domain can be
    ///   opened on the NIC until its state is set again.
    /// - [`NicState::PortDown`]: requests from and to the NIC end with
    ///   [`ErrorKind::Unreachable`] meanwhile.
    /// - [`NicState::Working`]: the port is up, and domains can be opened.
    ///
    /// ```
    /// use hmem_core::provider::NicState;
    /// use hmem_provider_loopback::Loopback;
    ///
    /// let provider = Loopback::builder().nic("nic0").build()?;
    /// provider.set_nic_state("nic0", NicState::Lost)?;
    /// # Ok::<(), hmem_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a NIC that the fabric does not have.
    pub fn set_nic_state(&self, nic: &str, state: NicState) -> Result<()> {
        let nic = self.find(Some(nic), "set the state of a NIC")?;
        nic.set_state(state);
        let open: Vec<_> = self.domains.lock().iter().filter_map(Weak::upgrade).collect();
        open.iter().filter(|domain| domain.is_on(nic)).for_each(|it| it.set_nic_state(state));
        Ok(())
    }

    /// Returns a NIC by its name, or the first NIC.
    fn find(&self, name: Option<&str>, operation: &'static str) -> Result<&Arc<Nic>> {
        let nics = &self.nics;
        let nic = match name {
            None => nics.first(),
            Some(name) => nics.iter().find(|nic| nic.attr.nic.name == name),
        };
        nic.ok_or_else(|| {
            let names: Vec<_> = nics.iter().map(|nic| nic.attr.nic.name.as_str()).collect();
            Error::new(ErrorKind::InvalidArgument, operation)
                .provider("loopback")
                .context("nic", name.unwrap_or_default())
                .context("nics", names.join(", "))
                .remedy("name a NIC of this fabric")
        })
    }
}

impl Provider for Loopback {
    fn name(&self) -> &str {
        "loopback"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(self.nics.iter().map(|nic| nic.attr.clone()).collect())
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        self.fabric.process.check("open domain")?;
        let nic = self.find(request.nic.as_deref(), "open domain")?;
        nic.config.faults.enter(NicCall::OpenDomain)?;
        let domain = Domain::open(&self.fabric, nic, request)?;
        let mut domains = self.domains.lock();
        domains.retain(|domain| domain.strong_count() > 0);
        domains.push(Arc::downgrade(&domain));
        drop(domains);
        if nic.is_lost() {
            return Err(Error::new(ErrorKind::Unavailable, "open domain")
                .provider(nic.attr.nic.to_string())
                .context("cause", "a test removed the device")
                .remedy("open a domain on another NIC, or on this one once it is back"));
        }
        Ok(domain)
    }
}

/// The name of a NIC, and its PCI address if [`Builder::nic_at`] has set one.
type NicName = (String, Option<String>);

/// Builds a [`Loopback`].
///
/// ```
/// use hmem_provider_loopback::{Faults, Loopback, RemapPolicy, Progress};
///
/// let faults = Faults::new();
/// let provider = Loopback::builder()
///     .nic("nic0")
///     .nic("nic1")
///     .remap_policy(RemapPolicy::Follow)
///     .progress(Progress::Thread)
///     .max_mr_count(1000)
///     .faults(&faults)
///     .build()?;
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct Builder {
    names: Vec<NicName>,
    config: Config,
}

impl Builder {
    /// Adds a NIC. If the application adds no NIC, the fabric has one NIC named `loop0`.
    pub fn nic(mut self, name: impl Into<String>) -> Self {
        self.names.push((name.into(), None));
        self
    }

    /// Adds a NIC that reports this PCI address. With the address a test can place the NIC in a
    /// recorded topology.
    pub fn nic_at(mut self, name: impl Into<String>, pci_bus_id: impl Into<String>) -> Self {
        self.names.push((name.into(), Some(pci_bus_id.into())));
        self
    }

    /// Sets the PCI address of all NICs except those that [`Builder::nic_at`] added. Default: none.
    pub fn pci_bus_id(mut self, id: impl Into<String>) -> Self {
        self.config.attr.nic.pci_bus_id = Some(id.into());
        self
    }

    /// Sets the mr_mode bits that the application must offer. Default: none.
    pub fn needs(mut self, modes: MrMode) -> Self {
        self.config.attr.required_mr_mode = modes;
        self
    }

    /// Sets the optional mr_mode bits: those that the NICs use if the application offers them by
    /// BASIC, in addition to the required bits of [`Builder::needs`].
    ///
    /// BASIC stands for several bits. The default is all of these. If one of these bits is neither
    /// optional nor required, the NICs refuse BASIC.
    pub fn can(mut self, modes: MrMode) -> Self {
        self.config.attr.basic_mr_mode = modes;
        self
    }

    /// Sets the size of keys: 4 or 8 bytes. Default: 8.
    ///
    /// A key of 4 bytes that the NIC chooses is a 24-bit index with an 8-bit tag. A key of 8 bytes
    /// that the NIC chooses is a random number.
    pub fn key_size(mut self, bytes: usize) -> Self {
        self.config.attr.key_size = bytes;
        self
    }

    /// Sets the size of raw keys, at least 8 bytes. Default: 32.
    pub fn raw_key_size(mut self, bytes: usize) -> Self {
        self.config.attr.raw_key_size = bytes;
        self
    }

    /// Sets the size of immediate data, at most 8 bytes; 0 disables immediate data. Default: 8.
    pub fn cq_data_size(mut self, bytes: usize) -> Self {
        self.config.attr.cq_data_size = bytes;
        self
    }

    /// Sets the maximum number of ranges in a region, at least 1. Default: 16.
    pub fn mr_iov_limit(mut self, ranges: usize) -> Self {
        self.config.attr.mr_iov_limit = ranges;
        self
    }

    /// Sets the maximum number of bytes in a region. Default: no limit.
    pub fn max_mr_size(mut self, bytes: u64) -> Self {
        self.config.attr.max_mr_size = bytes;
        self
    }

    /// Sets the maximum number of live regions of a NIC, including sub-regions. Default: 2^24.
    /// Larger values mean 2^24 too.
    pub fn max_mr_count(mut self, regions: u64) -> Self {
        self.config.attr.max_mr_count = regions.min(MAX_REGIONS);
        self.config.limit_regions = true;
        self
    }

    /// Sets the maximum number of bytes in all live regions of a NIC. Default: no limit.
    ///
    /// As with `RLIMIT_MEMLOCK`, bytes that are in several regions count once for each. Sub-regions
    /// do not count.
    pub fn max_pinned_bytes(mut self, bytes: u64) -> Self {
        self.config.max_pinned_bytes = Some(bytes);
        self
    }

    /// Sets the paths that the NICs support in addition to plain host memory. Default: dma-bufs and
    /// staged copies.
    pub fn imports(mut self, imports: Imports) -> Self {
        self.config.attr.imports = imports;
        self
    }

    /// Sets the page sizes that a registration may request, in ascending order. Default: those of
    /// this machine.
    pub fn page_sizes(mut self, sizes: impl Into<Vec<usize>>) -> Self {
        self.config.attr.page_sizes = sizes.into();
        self
    }

    /// Sets the registration flags that the NICs support. Default: all.
    pub fn flags(mut self, flags: MrFlags) -> Self {
        self.config.attr.flags = flags;
        self
    }

    /// Sets the types of memory windows that the NICs have. With an empty list, the NICs have no
    /// windows. Default: all.
    pub fn windows(mut self, types: impl Into<Vec<WindowType>>) -> Self {
        self.config.windows = types.into();
        self
    }

    /// Sets whether counters can be bound to regions. Default: true.
    pub fn region_counters(mut self, possible: bool) -> Self {
        self.config.region_counters = possible;
        self
    }

    /// Sets the number of bytes of messages that an endpoint keeps before their receives are
    /// posted. Default: 1 MiB. The number of kept messages is limited too, by the depth of the
    /// endpoint. Further messages wait at their senders.
    pub fn unexpected_bytes(mut self, bytes: u64) -> Self {
        self.config.unexpected_bytes = bytes;
        self
    }

    /// Sets the bandwidth of each NIC in bytes per second. Default: 0, which means no limit.
    ///
    /// The bytes of a request count for the NIC of the endpoint that posted the request. After an
    /// idle period, a NIC sends the bytes of up to 10 ms at once.
    ///
    /// The thread that executes a request sleeps for the time of its bytes. With
    /// [`Progress::ByHand`], that may be one thread for several NICs, which then wait for each
    /// other. [`Progress::Thread`] avoids this.
    pub fn bandwidth(mut self, bytes_per_second: u64) -> Self {
        self.config.bandwidth = bytes_per_second;
        self
    }

    /// Sets the pages that host regions use after the application mapped their addresses anew.
    /// Default: [`RemapPolicy::Follow`].
    pub fn remap_policy(mut self, policy: RemapPolicy) -> Self {
        self.config.remap_policy = policy;
        self
    }

    /// Sets the thread that executes posted requests. Default: [`Progress::ByHand`].
    pub fn progress(mut self, progress: Progress) -> Self {
        self.config.attr.progress = match progress {
            Progress::ByHand => ProgressModel::Manual,
            Progress::Thread => ProgressModel::Thread,
        };
        self
    }

    /// Sets the value by which a test makes calls of this fabric fail or wait in flight. Default: a
    /// value without faults.
    pub fn faults(mut self, faults: &Faults) -> Self {
        self.config.faults = faults.clone();
        self
    }

    /// Builds the fabric.
    ///
    /// # Errors
    /// - Unavailable: the random generator of the operating system fails.
    /// - The errors of [`ProcessMark::current`](hmem_core::ProcessMark::current).
    /// - InvalidArgument for any of:
    ///   - a key size other than 4 and 8, or a raw key size below 8;
    ///   - immediate data of more than 8 bytes;
    ///   - a limit of 0 ranges;
    ///   - unknown bits, BASIC or SCALABLE in [`Builder::needs`];
    ///   - two NICs with the same name.
    pub fn build(mut self) -> Result<Loopback> {
        let attr = &self.config.attr;
        let refuse = |what: &'static str, value: &dyn fmt::Display, remedy: &'static str| {
            Err(Error::new(ErrorKind::InvalidArgument, "build loopback")
                .provider("loopback")
                .context(what, value)
                .remedy(remedy))
        };
        if !matches!(attr.key_size, 4 | 8) {
            return refuse("key_size", &attr.key_size, "set a key size of 4 or 8 bytes");
        }
        if attr.raw_key_size < 8 {
            return refuse(
                "raw_key_size",
                &attr.raw_key_size,
                "set a raw key size of at least 8 bytes",
            );
        }
        if attr.cq_data_size > 8 {
            return refuse(
                "cq_data_size",
                &attr.cq_data_size,
                "set at most 8 bytes of immediate data",
            );
        }
        if attr.mr_iov_limit == 0 {
            return refuse("mr_iov_limit", &0, "allow at least one range in a region");
        }
        let required = attr.required_mr_mode;
        if required.intersects(MrMode::BASIC | MrMode::SCALABLE)
            || !MrMode::all().contains(required)
        {
            return refuse("needs", &required, "set known mode bits other than BASIC and SCALABLE");
        }
        if self.names.is_empty() {
            self.names.push(("loop0".into(), None));
        }
        for (at, (name, _)) in self.names.iter().enumerate() {
            if self.names[..at].iter().any(|(earlier, _)| earlier == name) {
                return refuse("nic", name, "give each NIC a name of its own");
            }
        }
        let nic = |(name, id): &NicName| Arc::new(Nic::new(name, id.as_deref(), &self.config));
        let nics = self.names.iter().map(nic).collect();
        Ok(Loopback { fabric: Arc::new(Fabric::new()?), nics, domains: Arc::default() })
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("nics", &self.names)
            .field("attr", &self.config.attr)
            .field("remap_policy", &self.config.remap_policy)
            .finish_non_exhaustive()
    }
}
