//! Tests that the suite detects faults. A table names a behaviour for each fault of an iface or
//! provider. With the fault, that behaviour must fail. Without a fault, no behaviour may fail.
#![allow(unsafe_code)]

mod monitor;

use std::{
    fs::File,
    os::fd::IntoRawFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    Access, Address, AddressRange, Allocation, AllocationId, DeviceId, Domain, DomainAttr, Error,
    ErrorKind, GrantKind, Iface, IfaceKind, Iova, Region, Registry, RemoteKey, Result,
    iface::{
        AllocRequest, Allocator, CopyEngine, Device, DmaBufExport, DmaBufExporter, DmaBufMapping,
        Facet, HostRegistrar, InboundFlush, Ipc, MonitorSource, PeerMemoryExporter, SegmentMap,
    },
    monitor::{
        DetectionMethod, FreeSubscriptions, InvalidationCause, Invalidator, Monitor, Subscription,
    },
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, KeyRequest, LiveObjects, MsgOrder, Nic,
        Piece, Provider, ProviderAttr, ProviderDomain, ProviderEndpoint, ProviderRegion,
        ProviderWindow, Registration, SubRegions, Transport, WindowBind, WindowStatus, WindowType,
        Windows,
    },
    transfer::{AtomicOp, EndpointName, Operation, PeerId, RemoteSegment, WorkRequest},
};
use hmem_iface_system::{AddressReuse, FreeDetection, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::Loopback;
use libtest_mimic::{Arguments, Trial};
use monitor::{FaultyMonitor, MonitorFault};

/// A deliberate fault of an iface.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// No fault.
    None,
    /// Fault: an export reports 0 as the offset of the range in the dma-buf.
    ExportOffset,
    /// Fault: an export reports an offset in the allocation that is one page too high.
    AllocationOffset,
    /// Fault: an export reports a length that is one page too long.
    ExportLength,
    /// Fault: a query for the first address after an allocation returns that allocation.
    QueryPastEnd,
    /// Fault: an allocation at a reused address gets the identity of the earlier allocation.
    ReusedIdentity,
    /// Fault: a query for the padding after an allocation of an odd length returns that allocation.
    PaddingClaimed,
    /// Fault: a copy that ends in the padding after an allocation of an odd length succeeds.
    PaddingCopied,
    /// Fault: an export of a range that ends in the padding after an allocation of an odd length
    /// succeeds.
    PaddingExported,
    /// Fault: an export of a freed allocation returns the dma-buf of other memory.
    StaleExported,
    /// Fault: each export leaves a file descriptor open.
    LeakedFd,
    /// Fault: each allocation leaves a file descriptor open.
    LeakedFdOfAllocation,
    /// Fault: every eighth allocation leaves a file descriptor open.
    LeakedFdAtTimes,
    /// No fault: another thread of the process opens files. One of them stays open from the
    /// twentieth allocation on, and one from each export on.
    FilesOfOthers,
    /// Fault: a free does not release the memory, although queries no longer find it.
    LeakedAllocation,
    /// Fault: the monitor does not notify its subscribers of a free.
    MissingCallback,
    /// Fault: queries still find the memory when the callback of its free returns.
    EarlyCallback,
    /// Fault: the callback of a free runs after the device can allocate the addresses again.
    LateCallback,
    /// Fault: the monitor notifies only the subscriptions to whole allocations.
    PartNotWatched,
    /// Fault: only the latest subscription is notified.
    OneSubscription,
    /// Fault: a subscription that has ended is notified.
    EndlessSubscription,
    /// Fault: the monitor refuses every subscription as unsupported.
    MissingSubscription,
    /// Fault: a copy does not copy the last byte.
    ShortCopy,
    /// Fault: the reported address span ends after its first page.
    AddressSpan,
    /// Fault: an inbound flush fails on every device but the first.
    FlushOfOneDevice,
}

/// Opens a file that is never closed.
fn leave_a_file_open() {
    let _open = File::open("/dev/null").expect("a file").into_raw_fd();
}

/// The simulated device, with one deliberate fault.
#[derive(Debug)]
struct Faulty {
    device: Simulated,
    fault: Fault,
    /// Allocations that the caller has freed but the device still has, because of
    /// [`Fault::LeakedAllocation`].
    leaked: Mutex<Vec<Allocation>>,
    /// Number of allocations so far.
    allocations: AtomicU64,
    /// Subscriptions of the monitor with [`Fault::EarlyCallback`] or [`Fault::LateCallback`].
    mistimed: Arc<FreeSubscriptions>,
}

impl Faulty {
    fn new(fault: Fault) -> Result<Self> {
        let builder = Simulated::builder().devices(2).free_detection(FreeDetection::Callback);
        let device = builder.address_reuse(AddressReuse::JustFreed).build()?;
        let (leaked, mistimed) = (Mutex::default(), Arc::default());
        Ok(Self { device, fault, leaked, allocations: AtomicU64::new(0), mistimed })
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// Returns an allocation as the faulty iface reports it.
    fn reported(&self, allocation: Allocation) -> Allocation {
        let id = if self.has(Fault::ReusedIdentity) {
            AllocationId(allocation.base().0)
        } else {
            allocation.id
        };
        Allocation { id, ..allocation }
    }

    /// Returns how many of the `len` bytes from `address` on are in the device's allocation, if the
    /// others are in the padding after it. Returns `None` for other ranges.
    fn len_without_padding(&self, address: Address, len: u64) -> Option<u64> {
        const ALIGNMENT: u64 = 64;
        let own = self.device.query(address).ok().flatten()?.range;
        let offset = address.0 - own.start().0;
        let padded = own.len().next_multiple_of(ALIGNMENT);
        (own.len()..=padded).contains(&(offset + len)).then(|| own.len() - offset)
    }

    /// Returns the device's allocation with padding at `address`.
    fn allocation_with_padding_at(&self, address: Address) -> Option<Allocation> {
        (1..64).find_map(|back| {
            let inside = Address(address.0.checked_sub(back)?);
            let own = self.device.query(inside).ok()??;
            self.len_without_padding(inside, back + 1).is_some().then_some(own)
        })
    }

    fn allocator_of_device(&self) -> &dyn Allocator {
        self.device.allocator().expect("the device allocates")
    }

    fn exporter_of_device(&self) -> &dyn DmaBufExporter {
        self.device.dma_buf().expect("the device exports")
    }
}

// SAFETY: without a fault, each answer is the simulated device's. A fault breaks the contract on
// purpose, and affects only memory of the device and of the test.
unsafe impl Iface for Faulty {
    fn kind(&self) -> IfaceKind {
        self.device.kind()
    }

    fn name(&self) -> &str {
        "faulty"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.device.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        let mut found = self.device.query(address)?;
        if found.is_none() && self.has(Fault::QueryPastEnd) {
            found = self.device.query(Address(address.0.saturating_sub(1)))?;
        }
        if found.is_none() && self.has(Fault::PaddingClaimed) {
            found = self.allocation_with_padding_at(address);
        }
        let leaked = self.leaked.lock().expect("no panic");
        Ok(found.filter(|found| !leaked.contains(found)).map(|found| self.reported(found)))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        let mut len = len - u64::from(self.has(Fault::ShortCopy) && len > 0);
        if self.has(Fault::PaddingCopied) {
            let side = |address| self.len_without_padding(address, len);
            len = side(to).or_else(|| side(from)).unwrap_or(len);
        }
        // SAFETY: the caller upholds the contract of `copy` for `len` bytes. The device copies as
        // many bytes or less.
        unsafe { self.device.copy(to, from, len) }
    }

    fn address_span(&self) -> Option<AddressRange> {
        let span = self.device.address_span()?;
        if self.has(Fault::AddressSpan) { span.slice(0, 4096) } else { Some(span) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.device.copy_engine()
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(self)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        self.device.peer_memory()
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        self.device.host_registrar()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        // The simulated device's IPC handles contain its own identities, which differ from the
        // faulty ones.
        if self.has(Fault::ReusedIdentity) { None } else { self.device.ipc() }
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        self.device.segments()
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(self)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }

    fn unavailable(&self, facet: Facet) -> Error {
        self.device.unavailable(facet).iface(self)
    }
}

impl Allocator for Faulty {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let earlier = self.allocations.fetch_add(1, Ordering::Relaxed);
        if self.has(Fault::LeakedFdOfAllocation)
            || (self.has(Fault::LeakedFdAtTimes) && earlier % 8 == 7)
            || (self.has(Fault::FilesOfOthers) && earlier == 19)
        {
            leave_a_file_open();
        }
        self.allocator_of_device().allocate(request).map(|allocation| self.reported(allocation))
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        if self.has(Fault::EarlyCallback) {
            self.mistimed.while_freeing(allocation.range, || ());
        }
        let own = self.device.query(allocation.base())?;
        let own = own.filter(|own| self.reported(*own) == *allocation).unwrap_or(*allocation);
        let mut leaked = self.leaked.lock().expect("no panic");
        if self.has(Fault::LeakedAllocation) && !leaked.contains(&own) {
            leaked.push(own);
            return Ok(());
        }
        // SAFETY: the caller upholds the contract of `free`, which is the device's.
        unsafe { self.allocator_of_device().free(&own) }?;
        if self.has(Fault::LateCallback) {
            self.mistimed.while_freeing(allocation.range, || ());
        }
        Ok(())
    }
}

impl DmaBufExporter for Faulty {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        self.exporter_of_device().mappings()
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let mut own = range;
        if self.has(Fault::PaddingExported)
            && let Some(len) = self.len_without_padding(range.start(), range.len())
        {
            own = range.slice(0, len).expect("a shorter range");
        }
        let mut of = Allocation { id: self.device.query(of.base())?.unwrap_or(*of).id, ..*of };
        if self.has(Fault::StaleExported) && self.device.query(of.base())?.is_none() {
            let (len, device) = (of.range.len(), of.device.unwrap_or_default());
            let request = AllocRequest { len, device, kind: of.kind };
            of = self.allocator_of_device().allocate(&request)?;
            own = of.range;
        }
        let mut export = self.exporter_of_device().export(own, &of, nic, mapping)?;
        export.len = range.len();
        match self.fault {
            Fault::ExportOffset => export.offset.0 = 0,
            Fault::AllocationOffset => export.alloc_offset.0 += 4096,
            Fault::ExportLength => export.len += 4096,
            Fault::FilesOfOthers => leave_a_file_open(),
            Fault::LeakedFd => {
                let _leaked = export.fd.try_clone().expect("dup").into_raw_fd();
            }
            _ => {}
        }
        Ok(export)
    }

    fn release(&self, export: DmaBufExport) -> Result<()> {
        self.exporter_of_device().release(export)
    }
}

impl InboundFlush for Faulty {
    fn flush(&self, device: DeviceId) -> Result<()> {
        if self.has(Fault::FlushOfOneDevice) && device != DeviceId(0) {
            return Err(Error::new(ErrorKind::Driver, "flush_inbound"));
        }
        self.device.inbound_flush().expect("the device flushes").flush(device)
    }
}

impl MonitorSource for Faulty {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        let monitor = self.device.monitor().expect("the device has a monitor").start()?;
        let fault = match self.fault {
            Fault::MissingCallback => MonitorFault::NoNotification,
            Fault::EarlyCallback | Fault::LateCallback => {
                return Ok(Arc::new(MistimedMonitor(Arc::clone(&self.mistimed))));
            }
            Fault::PartNotWatched => MonitorFault::PartNotWatched,
            Fault::OneSubscription => MonitorFault::OneSubscription,
            Fault::EndlessSubscription => MonitorFault::EndlessSubscription,
            Fault::MissingSubscription => MonitorFault::RefusedSubscription,
            _ => return Ok(monitor),
        };
        Ok(Arc::new(FaultyMonitor::new(monitor, fault)))
    }
}

/// A monitor that notifies before the device frees the memory, or afterwards.
#[derive(Debug)]
struct MistimedMonitor(Arc<FreeSubscriptions>);

impl Monitor for MistimedMonitor {
    fn name(&self) -> &str {
        "mistimed"
    }

    fn rationale(&self) -> String {
        "a fault for tests".to_owned()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Free
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        Ok(self.0.add(range, invalidator))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.0.remove(subscription);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

/// Runs trials one by one. Returns the names of the failed trials, and the names of the ignored
/// trials.
fn run(trials: Vec<Trial>) -> [Vec<String>; 2] {
    let arguments = Arguments {
        test_threads: Some(1),
        logfile: Some("/dev/null".to_owned()),
        ..Arguments::default()
    };
    let [mut failed, mut ignored] = [Vec::new(), Vec::new()];
    for trial in trials {
        let name = trial.name().to_owned();
        let conclusion = libtest_mimic::run(&arguments, vec![trial]);
        match (conclusion.num_failed, conclusion.num_ignored) {
            (0, 0) => assert_eq!(conclusion.num_passed, 1, "{name}"),
            (0, _) => ignored.push(name),
            _ => failed.push(name),
        }
    }
    [failed, ignored]
}

/// Returns the trial with this name.
fn named(mut trials: Vec<Trial>, name: &str) -> Vec<Trial> {
    trials.retain(|trial| trial.name() == name);
    assert_eq!(trials.len(), 1, "there is no behaviour {name}");
    trials
}

/// Returns the suite's trials of an iface with this fault.
fn trials_of_iface(fault: Fault) -> Vec<Trial> {
    hmem_conformance::iface(move || Ok(Arc::new(Faulty::new(fault)?)))
}

/// HM-15
#[test]
fn iface_without_a_fault_fails_no_behaviour() {
    let [failed, ignored] = run(trials_of_iface(Fault::None));
    assert_eq!(failed, [""; 0]);
    assert_eq!(ignored, [""; 0], "the simulated device has every facet but peer memory");
}

/// HM-15
#[test]
fn each_fault_of_an_iface_fails_its_behaviour() {
    for (fault, behaviour) in [
        (Fault::ExportOffset, "dma_buf_holds_the_bytes_of_its_range"),
        (Fault::ExportOffset, "part_inside_a_page_is_reached_to_its_exact_ends"),
        (Fault::AllocationOffset, "dma_buf_has_the_offsets_and_the_length_of_its_range"),
        (Fault::ExportLength, "dma_buf_has_the_offsets_and_the_length_of_its_range"),
        (Fault::QueryPastEnd, "query_claims_exactly_the_allocation"),
        (Fault::ReusedIdentity, "identities_are_never_reused"),
        (Fault::PaddingClaimed, "padding_after_an_odd_length_is_not_claimed"),
        (Fault::PaddingCopied, "copy_into_the_padding_after_an_odd_length_is_refused"),
        (Fault::PaddingExported, "dma_buf_of_the_padding_after_an_odd_length_is_refused"),
        (Fault::StaleExported, "dma_buf_of_an_allocation_that_was_freed_is_refused"),
        (Fault::LeakedFd, "exporting_dma_bufs_leaks_no_fd"),
        (Fault::LeakedFdOfAllocation, "allocating_and_freeing_leaks_no_fd"),
        (Fault::LeakedFdAtTimes, "allocating_and_freeing_leaks_no_fd"),
        (Fault::LeakedAllocation, "freed_memory_can_be_allocated_again"),
        (Fault::MissingCallback, "monitor_detects_a_free"),
        (Fault::MissingCallback, "freed_memory_is_not_claimed_after_its_notification"),
        (Fault::EndlessSubscription, "monitor_is_silent_after_unsubscribing"),
        (Fault::MissingCallback, "cached_registration_never_moves_bytes_of_freed_memory"),
        (Fault::EarlyCallback, "freed_memory_is_not_claimed_after_its_notification"),
        (Fault::LateCallback, "freed_addresses_are_not_allocated_before_the_notification"),
        (Fault::PartNotWatched, "subscription_to_a_part_detects_the_free_of_its_allocation"),
        (Fault::OneSubscription, "each_subscription_to_an_allocation_is_notified"),
        (Fault::ShortCopy, "copy_moves_exactly_the_named_bytes"),
        (Fault::AddressSpan, "address_span_holds_every_allocation"),
        (Fault::FlushOfOneDevice, "inbound_flush_succeeds_on_every_device"),
    ] {
        let [failed, _] = run(named(trials_of_iface(fault), behaviour));
        assert_eq!(failed, [behaviour], "with the fault {fault:?}");
    }
}

/// HM-15
#[test]
fn files_that_other_threads_open_are_no_leaks() {
    for behaviour in ["allocating_and_freeing_leaks_no_fd", "exporting_dma_bufs_leaks_no_fd"] {
        let results = run(named(trials_of_iface(Fault::FilesOfOthers), behaviour));
        assert_eq!(results, [[""; 0]; 2], "{behaviour}");
    }
}

/// HM-15
#[test]
fn behaviours_of_a_monitor_that_watches_nothing_are_ignored() {
    let [failed, ignored] = run(trials_of_iface(Fault::MissingSubscription));
    assert_eq!(failed, [""; 0]);
    let of_monitors = [
        "monitor_detects_a_free",
        "subscription_to_a_part_detects_the_free_of_its_allocation",
        "each_subscription_to_an_allocation_is_notified",
        "freed_memory_is_not_claimed_after_its_notification",
        "freed_addresses_are_not_allocated_before_the_notification",
        "monitor_is_silent_after_unsubscribing",
        "cached_registration_never_moves_bytes_of_freed_memory",
    ];
    assert_eq!(ignored, of_monitors);
}

/// A deliberate fault of a provider.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ProviderFault {
    /// No fault.
    None,
    /// Fault: a window gives access to the start of its region instead of its own offset.
    WindowOffset,
    /// Fault: a window also gives access to the first byte after its end.
    WindowLength,
    /// Fault: a bind outside its region or beyond its rights reports success.
    PermissiveWindow,
    /// No fault: the provider says that windows also give access to the bytes before them.
    DeclaredWindowOffset,
    /// Fault: a region with a bound window is deregistered.
    UncountedWindow,
    /// Fault: a sub-region may lie outside its base, and may be written although its base may not.
    PermissiveSubRegion,
    /// Fault: every key grants all access rights.
    WiderRights,
    /// Fault: a deregistration reports success, but the region stays registered.
    LeakedRegion,
    /// Fault: a post to a full queue reports success, and its completion is lost.
    Overrun,
    /// Fault: a post to a peer that the endpoint did not resolve reports success.
    AnyPeer,
    /// Fault: the authorization key of an endpoint is ignored.
    IgnoredAuthKey,
    /// Fault: the NIC chooses the key of a region whose request names one.
    IgnoredRequestedKey,
    /// Fault: a sub-region starts where its base starts.
    SubRegionOffset,
    /// Fault: a write does not move its last byte.
    ShortWrite,
    /// Fault: an atomic sum stores its operand.
    StoredSum,
    /// Fault: the descriptor of a local buffer is not checked.
    UncheckedDescriptor,
    /// Fault: a write delivers immediate data that is too high by one.
    AlteredData,
    /// Fault: a message loses its immediate data.
    LostData,
    /// Fault: every registration is refused as unsupported.
    RefusedRegistration,
    /// Fault: every post of a write is refused.
    RefusedWrite,
    /// No fault: the provider declares no order of requests.
    DeclaredNoOrder,
}

/// The software NIC, with one deliberate fault.
#[derive(Debug)]
struct FaultyProvider {
    nic: Loopback,
    fault: ProviderFault,
}

impl Provider for FaultyProvider {
    fn name(&self) -> &str {
        "faulty"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        let mut nics = self.nic.nics()?;
        if self.fault == ProviderFault::DeclaredNoOrder {
            nics.iter_mut().for_each(|nic| nic.order = MsgOrder::empty());
        }
        Ok(nics)
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        let domain = self.nic.open_domain(request)?;
        Ok(Arc::new(FaultyDomain { domain, fault: self.fault, windows: Mutex::default() }))
    }
}

#[derive(Debug)]
struct FaultyDomain {
    domain: Arc<dyn ProviderDomain>,
    fault: ProviderFault,
    /// The allocated windows.
    windows: Mutex<Vec<ProviderWindow>>,
}

impl FaultyDomain {
    fn transport_of_nic(&self) -> &dyn Transport {
        self.domain.transport().expect("the software NIC transfers")
    }

    fn windows_of_nic(&self) -> &dyn Windows {
        self.domain.windows().expect("the NIC has windows")
    }

    fn sub_regions_of_nic(&self) -> &dyn SubRegions {
        self.domain.sub_regions().expect("the NIC has sub-regions")
    }
}

// SAFETY: without a fault, every call goes to the software NIC. A fault breaks the contract on
// purpose. The suite keeps the memory that it then reads, and posts no other transfer to it.
unsafe impl ProviderDomain for FaultyDomain {
    fn attr(&self) -> &ProviderAttr {
        self.domain.attr()
    }

    unsafe fn register(
        &self,
        registration: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        if self.fault == ProviderFault::RefusedRegistration {
            return Err(Error::new(ErrorKind::Unsupported, "register"));
        }
        let wider = self.fault == ProviderFault::WiderRights;
        let access = if wider { Access::all() } else { registration.access };
        let ignored = self.fault == ProviderFault::IgnoredRequestedKey;
        let key = if ignored { KeyRequest::Provider } else { registration.key };
        // SAFETY: the caller upholds the contract of this method, which is the software NIC's.
        unsafe {
            let registration = Registration { access, key, enabled: true, ..*registration };
            self.domain.register(&registration, pieces)
        }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        match self.fault {
            ProviderFault::LeakedRegion => Ok(()),
            ProviderFault::UncountedWindow => {
                let windows = std::mem::take(&mut *self.windows.lock().expect("no panic"));
                windows.into_iter().try_for_each(|window| self.free_window(window))?;
                self.domain.deregister(region)
            }
            _ => self.domain.deregister(region),
        }
    }

    fn live(&self) -> LiveObjects {
        self.domain.live()
    }

    fn transport(&self) -> Option<&dyn Transport> {
        Some(self)
    }

    fn windows(&self) -> Option<&dyn Windows> {
        Some(self)
    }

    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        let with = [
            ProviderFault::PermissiveSubRegion,
            ProviderFault::DeclaredWindowOffset,
            ProviderFault::SubRegionOffset,
        ];
        with.contains(&self.fault).then_some(self as _)
    }
}

impl Transport for FaultyDomain {
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.transport_of_nic().open_cq(depth)
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        let ignored = self.fault == ProviderFault::IgnoredAuthKey;
        let auth_key = if ignored { None } else { attr.auth_key.clone() };
        let attr = EndpointAttr { auth_key, ..attr.clone() };
        let endpoint = self.transport_of_nic().open_endpoint(&attr)?;
        Ok(Arc::new(FaultyEndpoint { endpoint, fault: self.fault }))
    }
}

impl SubRegions for FaultyDomain {
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        let subs = self.sub_regions_of_nic();
        let offset = if self.fault == ProviderFault::SubRegionOffset { 0 } else { offset };
        match subs.register_sub(base, request, offset, len) {
            Err(_) if self.fault == ProviderFault::PermissiveSubRegion => {
                let access = Access::REMOTE_READ;
                subs.register_sub(base, &Registration { access, ..*request }, 0, 1)
            }
            registered => registered,
        }
    }
}

impl Windows for FaultyDomain {
    fn window_types(&self) -> &[WindowType] {
        &[WindowType::One]
    }

    fn enforces_bounds(&self) -> bool {
        self.fault != ProviderFault::DeclaredWindowOffset
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        let window = self.windows_of_nic().alloc_window(window)?;
        self.windows.lock().expect("no panic").push(window);
        Ok(window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        let mut bind = *bind;
        match self.fault {
            ProviderFault::WindowOffset => bind.offset = 0,
            ProviderFault::DeclaredWindowOffset => {
                (bind.offset, bind.len) = (0, bind.offset.saturating_add(bind.len));
            }
            ProviderFault::WindowLength if bind.len > 0 => bind.len += 1,
            _ => {}
        }
        let windows = self.windows_of_nic();
        match windows.bind_window(window, &bind) {
            Err(_) if self.fault == ProviderFault::PermissiveWindow => Ok(window),
            bound => bound,
        }
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.windows.lock().expect("no panic").retain(|other| other.token != window.token);
        self.windows_of_nic().free_window(window)
    }

    fn window_status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        self.windows_of_nic().window_status(window)
    }
}

/// An endpoint of the software NIC, with one deliberate fault.
#[derive(Debug)]
struct FaultyEndpoint {
    endpoint: Arc<dyn ProviderEndpoint>,
    fault: ProviderFault,
}

impl ProviderEndpoint for FaultyEndpoint {
    fn name(&self) -> EndpointName {
        self.endpoint.name()
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.endpoint.resolve(name)
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        let mut local = request.local.to_vec();
        let shorter: Vec<_>;
        let mut operation = request.operation;
        match (self.fault, operation) {
            (ProviderFault::ShortWrite, Operation::Write { remote: [remote] }) => {
                let len = remote.len.saturating_sub(1);
                local.iter_mut().for_each(|segment| segment.len = len);
                shorter = vec![RemoteSegment { len, ..*remote }];
                operation = Operation::Write { remote: &shorter };
            }
            (
                ProviderFault::StoredSum,
                Operation::Atomic { datatype, remote, result, compare, .. },
            ) => {
                let op = AtomicOp::AtomicWrite;
                operation = Operation::Atomic { op, datatype, remote, result, compare };
            }
            (ProviderFault::UncheckedDescriptor, _) => {
                local.iter_mut().for_each(|segment| segment.desc = None);
            }
            (ProviderFault::RefusedWrite, Operation::Write { .. }) => {
                return Err(Error::new(ErrorKind::Again, "post"));
            }
            (ProviderFault::AlteredData, Operation::WriteImmediate { remote, data }) => {
                operation = Operation::WriteImmediate { remote, data: data.wrapping_add(1) };
            }
            (ProviderFault::LostData, Operation::SendImmediate { tag, .. }) => {
                operation = Operation::Send { tag, invalidate: None };
            }
            _ => {}
        }
        // SAFETY: the caller upholds the contract of `post`, which is the inner endpoint's. A fault
        // shortens the request, or leaves its memory as it is.
        let posted =
            unsafe { self.endpoint.post(&WorkRequest { operation, local: &local, ..*request }) };
        let accepted = match self.fault {
            ProviderFault::Overrun => ErrorKind::Again,
            ProviderFault::AnyPeer => ErrorKind::InvalidArgument,
            _ => return posted,
        };
        posted.or_else(|error| if error.kind() == accepted { Ok(()) } else { Err(error) })
    }

    fn close(&self) -> Result<()> {
        self.endpoint.close()
    }
}

/// Returns the suite's trials of a provider with this fault.
fn trials_of_provider(fault: ProviderFault) -> Vec<Trial> {
    hmem_conformance::provider(move || {
        Ok(Arc::new(FaultyProvider { nic: Loopback::builder().build()?, fault }))
    })
}

/// HM-15
#[test]
fn provider_without_a_fault_fails_no_behaviour() {
    let [failed, ignored] = run(trials_of_provider(ProviderFault::None));
    assert_eq!(failed, [""; 0]);
    // The NIC lacks sub-regions, counters, raw keys, refreshes and a test control, and needs no
    // mr_mode bit. It carries 64 bits of immediate data.
    let untestable = "
        peers_use_the_targets_addresses_for_every_range range_without_pages_is_refused
        requested_key_is_ignored peers_reach_only_refreshed_pages peers_fail_during_a_refresh
        counters_are_bound_before_the_region_is_enabled
        regions_are_reached_through_their_endpoint_only
        device_buffers_need_a_descriptor_or_are_detected
        buffers_of_a_broadcast_need_the_collective_right
        channel_is_readable_from_the_next_completion_on channel_loses_no_wakeup
        channel_reports_that_its_domain_is_closed immediate_data_is_refused_if_the_nic_carries_none
        too_wide_immediate_data_is_refused sub_region_of_a_region_without_rights_may_read
        sub_regions_grant_writes_and_atomics_separately
        close_ends_transfers_in_flight_before_it_returns
        close_of_a_local_buffer_ends_transfers_in_flight_too
        posted_transfers_that_have_not_begun_fail_after_close
        region_closes_after_the_last_of_its_counters
        region_closes_before_its_endpoint region_of_a_closed_endpoint_is_unreachable_and_closes
        single_use_key_works_once local_buffers_need_the_right_of_their_operation
        receives_need_the_right_recv_and_stay_in_bounds
        registration_in_the_driver_blocks_no_other_call lost_nic_ends_requests_and_refuses_calls
        requests_fail_while_the_port_is_down memory_of_a_lost_nic_is_registered_again_with_a_new_key
        revoked_region_refuses_all_accesses_and_closes
        window_over_revoked_memory_is_refused_and_unbinds revocation_waits_for_transfers_in_flight
        cache_drops_revoked_memory revoked_memory_is_registered_again_with_a_new_key
        raw_attr_returns_the_needed_size_and_works_on_every_region
        raw_key_is_mapped_used_and_unmapped domain_with_mapped_keys_is_busy_at_close
        sub_region_has_its_own_key_rights_and_bounds sub_region_that_exceeds_its_base_is_refused
        sub_region_past_the_domain_gets_no_more_than_its_base
        base_closes_after_its_sub_regions_three_levels_deep
        dropped_base_lives_as_long_as_its_sub_regions sub_regions_pin_and_register_no_pages
        sub_region_is_reached_with_its_own_auth_key_only
        sub_region_is_reached_through_its_own_endpoint_only counted_sub_region_needs_rma_event
        sub_region_counts_its_own_writes type_1_window_changes_its_key_at_each_bind
        type_1_window_refuses_an_empty_range type_2_window_binds_by_a_request_with_a_tag
        type_2a_window_is_reached_through_its_queue_pair_only
        type_2b_window_does_not_keep_its_queue_pair_open
        invalidation_ends_the_key_but_not_the_window peer_invalidates_a_window_by_a_message
        peer_does_not_invalidate_a_type_1_window
        peer_invalidates_through_the_queue_pair_of_the_window_only windows_have_their_own_rights
        windows_may_overlap_and_keep_their_region_open
        window_outside_its_region_or_domain_is_refused refused_bind_names_its_call_and_its_values
        binding_registers_and_exports_nothing window_is_reached_with_the_auth_key_of_its_region_only
        window_is_reached_through_the_endpoint_of_its_region_only
        window_on_a_counted_region_needs_rma_event writes_and_atomics_through_a_window_count_once
        peer_revokes_its_grant_by_a_message grant_uses_the_best_mechanism_and_says_why
        grant_that_no_mechanism_gives_has_every_reason failed_grant_leaves_no_window
        revoking_waits_for_an_access_in_flight keys_of_grants_are_not_reused_soon
        windows_are_refused_in_raw_mode counter_counts_each_remote_write_and_atomic_once
        every_counter_of_a_region_counts_each_write_and_atomic_once
        endpoint_without_rma_event_is_refused refreshed_region_still_works
        only_a_failure_after_the_call_emits_an_event pending_region_has_neither_descriptor_nor_key
        close_during_registration_loses_no_event drop_during_registration_loses_no_event
        domain_dropped_during_registrations_loses_no_event
    ";
    assert_eq!(ignored, untestable.split_whitespace().collect::<Vec<_>>());
}

/// HM-15
#[test]
fn each_fault_of_a_provider_fails_its_behaviour() {
    for (fault, behaviour) in [
        (ProviderFault::WindowOffset, "window_is_reached_until_it_is_invalidated"),
        (ProviderFault::WindowLength, "nothing_is_reached_outside_a_window"),
        (ProviderFault::WindowOffset, "grant_gives_access_to_its_part_with_its_rights"),
        (ProviderFault::WindowLength, "nothing_is_reached_outside_a_grant"),
        (
            ProviderFault::PermissiveWindow,
            "window_bound_past_the_domain_gets_no_more_than_its_region",
        ),
        (ProviderFault::UncountedWindow, "region_with_a_bound_window_is_busy"),
        (
            ProviderFault::PermissiveSubRegion,
            "sub_region_past_the_domain_gets_no_more_than_its_base",
        ),
        (ProviderFault::WiderRights, "peers_get_the_rights_of_the_key_and_no_others"),
        (ProviderFault::LeakedRegion, "closed_region_is_unreachable"),
        (ProviderFault::LeakedRegion, "reg_regv_and_regattr_register_a_range_alike"),
        (ProviderFault::LeakedRegion, "every_set_of_rights_registers_at_any_start"),
        (ProviderFault::LeakedRegion, "any_order_of_drops_leaves_nothing_live"),
        (ProviderFault::LeakedRegion, "threads_register_transfer_and_close_at_once"),
        (ProviderFault::Overrun, "posting_until_again_loses_no_completion"),
        (ProviderFault::AnyPeer, "peer_of_another_endpoint_is_refused"),
        (ProviderFault::IgnoredAuthKey, "peers_need_the_auth_key_of_the_region"),
        (ProviderFault::IgnoredRequestedKey, "requested_key_in_use_is_refused"),
        (ProviderFault::SubRegionOffset, "sub_region_has_its_own_key_rights_and_bounds"),
        (ProviderFault::ShortWrite, "write_and_read_move_exactly_the_named_bytes"),
        (ProviderFault::ShortWrite, "sizes_up_to_64_mib_are_reached_at_both_ends"),
        (ProviderFault::ShortWrite, "dma_buf_registers_with_and_without_a_base_address"),
        (ProviderFault::ShortWrite, "range_may_end_with_its_dma_buf_but_not_after_it"),
        (ProviderFault::StoredSum, "atomic_returns_the_old_value_and_adds"),
        (ProviderFault::UncheckedDescriptor, "local_buffers_need_a_descriptor_of_a_live_region"),
        (ProviderFault::AlteredData, "write_with_immediate_data_completes_a_receive"),
        (ProviderFault::LostData, "messages_carry_immediate_data"),
        (ProviderFault::RefusedRegistration, "every_set_of_rights_registers_at_any_start"),
        (ProviderFault::RefusedWrite, "transfers_in_flight_leave_a_closed_region_alone"),
    ] {
        let [failed, _] = run(named(trials_of_provider(fault), behaviour));
        assert_eq!(failed, [behaviour], "with the fault {fault:?}");
    }
}

/// HM-15
#[test]
fn bounds_of_windows_that_a_provider_declares_unenforced_are_ignored() {
    let [failed, ignored] = run(trials_of_provider(ProviderFault::DeclaredWindowOffset));
    assert_eq!(failed, [""; 0]);
    assert!(ignored.contains(&"nothing_is_reached_outside_a_window".to_owned()), "{ignored:?}");
}

/// HM-15
#[test]
fn order_that_a_provider_does_not_declare_is_not_tested() {
    let orders = ["messages_keep_the_declared_order", "requests_take_effect_in_the_declared_order"];
    for behaviour in orders {
        let trials = named(trials_of_provider(ProviderFault::DeclaredNoOrder), behaviour);
        assert_eq!(run(trials), [vec![], vec![behaviour.to_owned()]]);
    }
}

fn open_domain(fault: ProviderFault) -> Domain {
    let provider = FaultyProvider { nic: Loopback::builder().build().expect("start"), fault };
    let (registry, selector) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    Domain::open(&provider, registry, selector, DomainAttr::default()).expect("open")
}

fn register(domain: &Domain, access: Access) -> Region<Vec<u8>> {
    domain.register(vec![0; 4096], access).map_err(|rejected| rejected.error).expect("register")
}

/// MW-09: a NIC that does not enforce the bounds of windows grants a part of a region by a
/// sub-region.
#[test]
fn grant_over_a_nic_without_bounds_of_windows_is_a_sub_region() {
    let domain = open_domain(ProviderFault::DeclaredWindowOffset);
    let cq = domain.open_cq(8).expect("open a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("connect it to itself");
    let region = register(&domain, Access::RECV | Access::MW_BIND);
    let source = register(&domain, Access::WRITE);
    let write = |key: &RemoteKey, at: u64, len: u64| {
        let remote = [RemoteSegment { address: Iova(at), len, key }];
        let local = [source.slice(0, len).expect("inside")];
        endpoint.write(&local, &remote, peer, 1).expect("post");
        let mut done = Vec::new();
        while cq.read(&mut done, 1).expect("read completions") == 0 {}
        done.remove(0).result.map_err(|error| error.kind())
    };
    let access = Access::REMOTE_WRITE;
    let part = region.grant(&endpoint, 1000..1100, access).expect("grant");
    assert_eq!((part.kind(), part.enforces_bounds()), (GrantKind::SubRegion, true));
    let [reason] = part.fallback_reasons() else { panic!("one reason: {part:?}") };
    assert_eq!(reason.context_value("rule"), Some("nic-enforces-bounds"), "{reason}");
    let key = part.key().expect("key");
    assert_eq!(write(&key, key.base().0, 100), Ok(100));
    assert_eq!(write(&key, key.base().0.wrapping_sub(8), 8), Err(ErrorKind::OutOfBounds));
    part.revoke().map_err(|rejected| rejected.error).expect("revoke");

    // The NIC enforces the bounds of regions, so that a window of the whole region confines peers.
    let whole = region.grant(&endpoint, 0..4096, access).expect("grant");
    let kind = GrantKind::Window(WindowType::One);
    assert_eq!((whole.kind(), whole.enforces_bounds()), (kind, true));
    assert!(whole.fallback_reasons().is_empty(), "{whole:?}");
}

/// MW-05 MW-07 SUB-01: of the rules of windows and sub-regions, a domain checks those that
/// providers need not check (`docs/rules.md`).
#[test]
fn domain_over_a_permissive_provider_keeps_its_own_rules() {
    let read = Access::REMOTE_READ;
    let domain = open_domain(ProviderFault::PermissiveWindow);
    let region = register(&domain, read | Access::MW_BIND);
    let window = domain.alloc_type_1_window().expect("allocate");
    let error = window.bind(&region, 0, 8, Access::READ).expect_err("a right of the local side");
    assert_eq!(error.kind(), ErrorKind::BadAccess, "{error}");
    let other = open_domain(ProviderFault::PermissiveWindow);
    let foreign = register(&other, read | Access::MW_BIND);
    let error = window.bind(&foreign, 0, 8, read).expect_err("a region of another domain");
    assert_eq!(error.context_value("rule"), Some("same-domain"), "{error}");
    let domain = open_domain(ProviderFault::PermissiveSubRegion);
    let base = register(&domain, read);
    let sub = |range, access| base.sub(range, access, 7).map(drop).map_err(|error| error.kind());
    let outside = AddressRange::new(base.range().start(), 4097).expect("range");
    assert_eq!(sub(outside, read), Err(ErrorKind::OutOfBounds));
    assert_eq!(sub(base.range(), read), Ok(()));
}
