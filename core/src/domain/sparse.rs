//! Regions over reserved addresses whose memory comes and goes.

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;

use super::{
    Domain, DomainInner,
    batch::domains_of,
    changed::ChangedAddresses,
    memory::Raw,
    monitors::{Monitors, Watch},
    region::{MemoryRegion, close_each, rail_keys},
    region_slice::RegionSlice,
    region_state::KeepAlive,
    register::register_regions,
    request::{RegionRequest, Source, check_promise},
    terms::{Promise, Terms},
};
use crate::{
    Access, AddressRange, Decision, Error, ErrorKind, MrMode, Path, Rejected, Result,
    key_feed::{KeyFeed, KeyPart, KeySubscription},
    monitor::Invalidator,
    registry::AddressOwner,
};

/// A region over reserved addresses, in which memory comes and goes while peers use it.
///
/// An expandable segment of PyTorch, or the KV cache of an engine that sleeps, is a range of
/// reserved addresses. Physical memory is mapped there, unmapped, and replaced. A NIC registers
/// only memory that exists. So this region has *parts*: the ranges that have memory now. Each part
/// is registered with every NIC of the region, and has keys of its own. A part that does not change
/// keeps its registration and keys.
///
/// Peers name the memory by offsets from the start of the addresses. They follow its keys with a
/// [`PeerKeys`](crate::key_feed::PeerKeys), to which the application sends the updates of
/// [`SparseRegion::subscribe`].
///
/// # Changes
///
/// The region learns which parts exist in one of two ways:
///
/// - [`SparseRegion::refresh`] asks the drivers (CUDA).
/// - [`SparseRegion::set_parts`] takes a list from the application, such as the segments in
///   `torch.cuda.memory_snapshot()`.
///
/// Call [`SparseRegion::withdraw`] before memory is unmapped. When the call returns, peers cannot
/// reach that memory any more: its keys are no longer published, and its registrations are closed,
/// so that the NIC refuses the keys. A transfer in flight through such a key has ended, or ends
/// with an error at the peer.
///
/// If the application does not announce a change, the region detects it later:
///
/// - If the iface's monitor has callbacks or hooks (`HMEM_CUDA_MONITOR=hooks` or `auto`), a thread
///   of the region withdraws the part soon after the driver's call.
/// - Otherwise the next `refresh` or `set_parts` compares the identity of the memory.
///
/// Until then a key of a registration by dma-buf reaches the old memory, which the registration
/// keeps allocated. A key of a staged registration may reach other memory that is mapped at the
/// address by then. The driver ends a registration by peer memory when it unmaps the memory. For
/// memory that nothing watches ([`SparsePart::watched`]), only the application can announce a
/// change.
///
/// # Keys that a NIC reuses
///
/// A verbs NIC may give the number of a closed key to a later registration. The NIC then accepts
/// the number again, for other memory. `PeerKeys` gives out only keys of the newest generation that
/// it has received. It refuses offsets that the application sent with an older generation if their
/// part has changed since. So peers should ask `PeerKeys` for the keys of each transfer, and not
/// store keys. The software NIC chooses its keys at random.
///
/// # Examples
///
/// ```no_run
/// use hmem_core::{
///     Access, AddressRange, Domain, Promise, Raw, Result, SparseRegion, key_feed::KeySubscription,
/// };
///
/// fn serve(
///     domain: &Domain,
///     reserved: AddressRange,
///     publish_to_peer: impl Fn(KeySubscription),
///     unmap: impl Fn(AddressRange),
/// ) -> Result<()> {
///     // SAFETY: the program withdraws memory in this range before it unmaps the memory.
///     let memory = unsafe { Raw::new(reserved, Promise::ReadWrite) };
///     let region = SparseRegion::new(&[domain], memory, Access::REMOTE_READ)?;
///     publish_to_peer(region.subscribe());
///     // After the program has mapped memory:
///     let generation = region.refresh()?;
///     println!("generation {generation} has {} parts", region.parts().len());
///     // Before the program goes to sleep:
///     region.withdraw(reserved)?;
///     unmap(reserved);
///     Ok(())
/// }
/// ```
pub struct SparseRegion {
    shared: Arc<Shared>,
    /// The thread that withdraws parts after a monitor's notification. `None` only while the region
    /// is dropped.
    worker: Option<JoinHandle<()>>,
}

/// A part of a [`SparseRegion`]: a range with memory, registered with every NIC.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparsePart {
    /// The addresses of the part.
    pub range: AddressRange,
    /// True if a monitor watches the memory. If false, only the application can announce a change.
    pub watched: bool,
    /// The path by which each NIC reaches the memory, in the order of the domains.
    pub decisions: Vec<Arc<Decision>>,
}

/// The state that a region and its worker share.
struct Shared {
    domains: Box<[Arc<DomainInner>]>,
    addresses: AddressRange,
    promise: Promise,
    access: Access,
    /// The feed of the region's keys. Declared before `parts`: dropping the feed tells peers that
    /// the keys end, and then the drop of `parts` ends them.
    feed: KeyFeed,
    monitors: Monitors,
    /// The addresses that monitors have reported as changed and no thread has handled yet. Monitors
    /// write to it without a lock.
    changed: Arc<ChangedAddresses>,
    parts: Mutex<Parts>,
    /// True once the worker must end. The drop of the region sets it.
    stop: AtomicBool,
}

#[derive(Default)]
struct Parts {
    /// The current parts, in the order of addresses.
    live: Vec<Part>,
    /// Withdrawn parts that are still registered, because a driver refused to close a region. Every
    /// change of the parts tries again to close them.
    closing: Vec<Part>,
    /// True if `live` may differ from the parts that the feed publishes. Every change of the parts
    /// then publishes `live`.
    unpublished: bool,
}

struct Part {
    range: AddressRange,
    /// One region for each domain.
    regions: Vec<MemoryRegion>,
    /// The subscription to changes of the memory. `None` if no monitor can watch the memory, and
    /// during the drop.
    watch: Option<Watch>,
}

impl Drop for Part {
    /// Deregisters the regions that are left, and then ends the subscription.
    fn drop(&mut self) {
        self.regions.clear();
        self.watch.take().into_iter().for_each(Watch::end);
    }
}

impl Part {
    /// Returns true if the part still has the memory that was registered, as far as this call must
    /// find out. If a monitor notifies of changes, or if no monitor can watch the memory, the call
    /// compares nothing and returns true. Otherwise it compares the identity of the memory, and
    /// returns false if that has changed or cannot be read.
    fn is_current(&self) -> bool {
        let Some(watch) = self.watch.as_ref().filter(|watch| watch.needs_validation()) else {
            return true;
        };
        watch.is_current().unwrap_or_else(|error| {
            tracing::warn!(range = %self.range, %error, "cannot compare the identity of memory");
            false
        })
    }

    fn has_path(&self, path: Path) -> bool {
        let decision = |region: &MemoryRegion| region.decision().is_ok_and(|it| it.path == path);
        self.regions.iter().any(decision)
    }
}

impl SparseRegion {
    /// Creates a region without parts over `addresses`, for the NICs of these domains. All domains
    /// must come from one `Hmem`.
    ///
    /// The promise of `addresses` covers the memory of parts only: from the call that adds a part
    /// until the part is withdrawn. Reserved addresses without memory need no promise.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] without a domain, and for domains of different `Hmem`s.
    /// - [`ErrorKind::ZeroLength`] for an empty range.
    /// - [`ErrorKind::AccessDenied`] for a right that goes beyond the promise.
    /// - [`ErrorKind::Unsupported`] for a domain in RAW or ENDPOINT mode, whose regions have no key
    ///   to publish. Also for a domain whose driver library caches registrations
    ///   ([`ProviderAttr::driver_cache`](crate::provider::ProviderAttr::driver_cache)), because a
    ///   key could then stay valid after its region is closed.
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - [`ErrorKind::OutOfResources`] if the region's thread cannot start.
    /// - The errors of [`KeyFeed::new`].
    pub fn new(domains: &[&Domain], addresses: Raw, access: Access) -> Result<Self> {
        let domains: Box<[_]> = domains_of(domains)?.into_iter().map(Arc::clone).collect();
        let (range, promise) = (*addresses.at(), addresses.promise());
        let refuse = |kind| Error::new(kind, "sparse region").context("addresses", range);
        if range.is_empty() {
            return Err(refuse(ErrorKind::ZeroLength).remedy("pass the reserved addresses"));
        }
        check_promise(promise, access)?;
        for domain in &domains {
            domain.process.check("sparse region")?;
            let attr = &domain.provider_attr;
            let unsupported = refuse(ErrorKind::Unsupported).provider(attr.nic.to_string());
            if domain.effective.intersects(MrMode::RAW | MrMode::ENDPOINT) {
                return Err(unsupported
                    .context("mr_mode", domain.mode)
                    .remedy("open the domain without the modes RAW and ENDPOINT"));
            }
            if let Some(cache) = &attr.driver_cache {
                return Err(unsupported
                    .context("why", format_args!("{cache} may keep closed regions registered"))
                    .remedy(
                        "disable the library's cache (libfabric: FI_MR_CACHE_MONITOR=disabled)",
                    ));
            }
        }
        let shared = Arc::new(Shared {
            domains,
            addresses: range,
            promise,
            access,
            feed: KeyFeed::new()?,
            monitors: Monitors::default(),
            changed: Arc::new(ChangedAddresses::new(range)),
            parts: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let for_worker = Arc::clone(&shared);
        let worker = thread::Builder::new()
            .name("hmem-sparse".to_owned())
            .spawn(move || for_worker.work())
            .map_err(|error| refuse(ErrorKind::OutOfResources).caused_by(error))?;
        shared.changed.set_worker(worker.thread().clone());
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Returns the addresses of the region.
    #[must_use]
    pub fn addresses(&self) -> AddressRange {
        self.shared.addresses
    }

    /// Creates a subscription to the region's keys, which one peer follows.
    #[must_use]
    pub fn subscribe(&self) -> KeySubscription {
        self.shared.feed.subscribe()
    }

    /// Returns the number of the current generation of keys. Send this number to a peer together
    /// with the offsets of bytes that the peer may access.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.shared.feed.generation()
    }

    /// Returns the current parts, in the order of addresses. Waits for a change in progress.
    #[must_use]
    pub fn parts(&self) -> Vec<SparsePart> {
        let decision = |region: &MemoryRegion| region.decision().ok().cloned();
        let describe = |part: &Part| SparsePart {
            range: part.range,
            watched: part.watch.is_some(),
            decisions: part.regions.iter().filter_map(decision).collect(),
        };
        self.shared.parts.lock().live.iter().map(describe).collect()
    }

    /// Asks the drivers which memory is mapped, and makes each mapping a part. Returns the number
    /// of the current generation.
    ///
    /// Mappings that have not changed keep their keys. Parts whose memory changed or went are
    /// withdrawn before new parts are registered.
    ///
    /// The caller must not call this between [`SparseRegion::withdraw`] and the unmapping of the
    /// withdrawn memory. Otherwise the memory becomes a part again.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`] if no iface of the domains lists mappings
    ///   ([`SegmentMap::mapped`](crate::iface::SegmentMap::mapped)), or if a mapping cannot be
    ///   watched. Use [`SparseRegion::set_parts`] instead.
    /// - The errors of [`SparseRegion::set_parts`].
    pub fn refresh(&self) -> Result<u64> {
        self.shared.process_check("refresh sparse region")?;
        let shared = &self.shared;
        let mapped = shared.mapped().or_else(|error| {
            // The driver may have failed because the memory is gone.
            shared.withdraw_changed(Part::is_current)?;
            Err(error)
        });
        mapped
            .and_then(|mapped| shared.update(mapped, true))
            .map_err(|error| error.of_call("refresh"))
    }

    /// Makes exactly these ranges the parts of the region. Returns the number of the current
    /// generation.
    ///
    /// Each range becomes one registration. All of the range must have memory, which may consist of
    /// several mappings. A part with the same range keeps its keys unless its memory is known to
    /// have changed. If nothing watches the memory ([`SparsePart::watched`]), the application must
    /// withdraw a part that changes.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] for a range outside the region's addresses, and
    ///   [`ErrorKind::InvalidArgument`] for ranges that overlap. Nothing changes.
    /// - The errors of [`Domain::register`] for a new part. The parts before it are published. The
    ///   next call tries the others again.
    /// - [`ErrorKind::Again`] if memory changed while it was registered. Such memory is no part.
    ///   Retry when the application has ended its change.
    /// - [`ErrorKind::Unsupported`] for VMM memory of CUDA that is registered by peer memory, if
    ///   the driver's functions are not hooked.
    /// - The errors of [`SparseRegion::withdraw`]. No new part is registered then.
    pub fn set_parts(&self, ranges: &[AddressRange]) -> Result<u64> {
        self.shared.process_check("set parts")?;
        self.shared.update(ranges.to_vec(), false).map_err(|error| error.of_call("set parts"))
    }

    /// Withdraws each part that has a byte of `range`, as a whole: publishes a generation without
    /// these parts, and deregisters them. Returns the number of the current generation.
    ///
    /// When the call returns, the memory may be unmapped. The call waits for a change in progress
    /// on another thread. So do not call this function in a callback of a driver.
    ///
    /// # Errors
    /// - The driver's error if it refuses to close a registration. The keys are no longer
    ///   published, but the NIC may accept them. Do not unmap the memory, and retry.
    /// - [`ErrorKind::BadState`] in a forked child.
    pub fn withdraw(&self, range: AddressRange) -> Result<u64> {
        self.shared.process_check("withdraw")?;
        let mut parts = self.shared.parts.lock();
        self.shared
            .remove(&mut parts, |part| part.range.overlaps(range))
            .map_err(|error| error.of_call("withdraw"))?;
        Ok(self.generation())
    }

    /// Returns bytes of a part for the safe transfers of an endpoint. `nic` is the position of the
    /// endpoint's domain in the list of [`SparseRegion::new`].
    ///
    /// Transfers with the slice fail after the part is withdrawn.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if there is no such NIC, or if no part has all of the bytes.
    pub fn slice(&self, nic: usize, offset: u64, len: u64) -> Result<RegionSlice> {
        let parts = self.shared.parts.lock();
        let wanted = self.addresses().slice(offset, len);
        let found = wanted.and_then(|wanted| {
            let at = parts.live.partition_point(|part| part.range.start() <= wanted.start());
            let part = parts.live[..at].last()?;
            let region = part.regions.get(nic)?;
            part.range.contains_range(wanted).then_some((region, wanted))
        });
        let Some((region, wanted)) = found else {
            return Err(Error::new(ErrorKind::OutOfBounds, "slice")
                .context("nic", nic)
                .context("offset", offset)
                .context("length", len)
                .remedy("name a NIC by its position, and bytes of one current part"));
        };
        RegionSlice::within(region, wanted, 0, len)
    }

    /// Withdraws all parts, and ends the feed. Dropping the region does so too, but cannot report
    /// an error.
    ///
    /// # Errors
    /// The errors of [`SparseRegion::withdraw`], with the region.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        match self.withdraw(self.addresses()) {
            Ok(_) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }
}

impl Shared {
    fn process_check(&self, operation: &'static str) -> Result<()> {
        self.domains[0].process.check(operation)
    }

    /// Withdraws changed parts whenever a monitor has reported a change, until the region is
    /// dropped.
    fn work(&self) {
        while !self.stop.load(Ordering::Acquire) {
            // The parts stay consistent if the provider panics: the next change closes those that
            // are left.
            match catch_unwind(AssertUnwindSafe(|| self.withdraw_changed(|_| true))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(error = %error.full(), "cannot withdraw changed memory");
                }
                Err(_) => {
                    tracing::error!("the provider panicked while changed memory was withdrawn");
                }
            }
            thread::park();
        }
    }

    /// Withdraws the parts in which monitors have reported a change, and those for which `stays`
    /// returns false.
    fn withdraw_changed(&self, stays: impl Fn(&Part) -> bool) -> Result<()> {
        let mut parts = self.parts.lock();
        self.take_changes(&mut parts);
        self.remove(&mut parts, |part| !stays(part))
    }

    /// Moves the parts in which monitors have reported a change to the withdrawn parts. The caller
    /// then calls [`Shared::remove`]. These are separate calls because `remove` may call an iface:
    /// if the iface panics, no reported change is lost.
    fn take_changes(&self, parts: &mut Parts) {
        let changed = self.changed.take();
        parts.withdraw(|part| changed.touches(part.range));
    }

    /// Publishes the live parts.
    fn publish(&self, live: &[Part]) -> Result<()> {
        let start = self.addresses.start().0;
        let part = |part: &Part| {
            Ok(KeyPart { offset: part.range.start().0 - start, keys: rail_keys(&part.regions)? })
        };
        self.feed.publish(live.iter().map(part).collect::<Result<_>>()?)?;
        Ok(())
    }

    /// Withdraws the parts for which `goes` returns true: publishes the keys of the other parts,
    /// and closes the withdrawn ones. Also closes parts that an earlier call failed to close.
    fn remove(&self, parts: &mut Parts, goes: impl FnMut(&Part) -> bool) -> Result<()> {
        parts.withdraw(goes);
        if parts.unpublished {
            self.publish(&parts.live)?;
            parts.unpublished = false;
        }
        parts.close_withdrawn()
    }

    /// Returns the mapped parts of the region's addresses, as the ifaces list them.
    fn mapped(&self) -> Result<Vec<AddressRange>> {
        let mut found = None;
        for iface in self.domains[0].registry.iter() {
            let Some(segments) = iface.segments() else { continue };
            match segments.mapped(self.addresses) {
                Ok(mapped) => found.get_or_insert_with(Vec::new).extend(mapped),
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                Err(error) => return Err(error),
            }
        }
        found.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "refresh")
                .context("why", "no iface lists the memory that is mapped in a range")
                .remedy("announce the memory by SparseRegion::set_parts")
        })
    }

    /// Makes `wanted` the parts of the region. If `must_watch` is true, a new part that nothing
    /// watches is an error.
    fn update(&self, mut wanted: Vec<AddressRange>, must_watch: bool) -> Result<u64> {
        wanted.sort_unstable();
        self.check(&wanted)?;
        let mut parts = self.parts.lock();
        self.take_changes(&mut parts);
        self.remove(&mut parts, |part| {
            wanted.binary_search(&part.range).is_err() || !part.is_current()
        })?;
        let mut registered = Ok(());
        let kept: Vec<_> = parts.live.iter().map(|part| part.range).collect();
        for range in wanted.iter().filter(|range| kept.binary_search(range).is_err()) {
            registered = self.register(&mut parts, *range, must_watch);
            if registered.is_err() {
                break;
            }
        }
        // Monitors have reported every change since the subscription of each part.
        let changed = self.changed.take();
        let unwatchable = parts.live.iter().any(|part| {
            let is_new = kept.binary_search(&part.range).is_err();
            is_new && changed.touches(part.range) && part.has_path(Path::PeerMemory)
        });
        // A first generation without parts is published too.
        parts.unpublished = true;
        let closed = self.remove(&mut parts, |part| changed.touches(part.range));
        match (registered, closed) {
            (Ok(()), closed) => closed?,
            (Err(error), Ok(())) => return Err(error),
            (Err(error), Err(why)) => return Err(error.context("why left", why)),
        }
        if parts.live.len() < wanted.len() {
            return Err(if unwatchable { unwatched_peer_memory() } else { changed_meanwhile() });
        }
        Ok(self.feed.generation())
    }

    /// Fails if a range is empty or leaves the region's addresses, or if two ranges overlap. The
    /// ranges are sorted by their start.
    fn check(&self, sorted: &[AddressRange]) -> Result<()> {
        let refuse = |kind, range| {
            Err(Error::new(kind, "set parts")
                .context("range", range)
                .context("addresses", self.addresses)
                .remedy("pass separate ranges inside the addresses of the region"))
        };
        for (at, range) in sorted.iter().enumerate() {
            if range.is_empty() || !self.addresses.contains_range(*range) {
                return refuse(ErrorKind::OutOfBounds, range);
            }
            if sorted[..at].last().is_some_and(|before| before.overlaps(*range)) {
                return refuse(ErrorKind::InvalidArgument, range);
            }
        }
        Ok(())
    }

    /// Watches and registers a new part, and adds it to the live parts. After an error, the caller
    /// closes the withdrawn parts, which include the rest of the new part.
    fn register(&self, parts: &mut Parts, range: AddressRange, must_watch: bool) -> Result<()> {
        let owner = self.domains[0].registry.owner_of_range(range)?;
        let watch = match self.watch(range, &owner) {
            Ok(watch) => Some(watch),
            Err(error) if must_watch => return Err(error),
            Err(error) => {
                tracing::debug!(%range, %error, "nothing watches a part of a sparse region");
                None
            }
        };
        let mut part = Part { range, regions: Vec::with_capacity(self.domains.len()), watch };
        let registered = self.register_part(&mut part, &owner);
        match registered {
            Ok(()) => {
                // The list stays sorted, also if a later part makes the provider panic.
                let at = parts.live.partition_point(|live| live.range < part.range);
                parts.live.insert(at, part);
                parts.unpublished = true;
                Ok(())
            }
            Err(error) => {
                parts.closing.push(part);
                Err(error)
            }
        }
    }

    /// Registers a part with every NIC. After an error, `part` has the regions that were registered
    /// before, and the caller closes them.
    fn register_part(&self, part: &mut Part, owner: &AddressOwner) -> Result<()> {
        let request = RegionRequest {
            source: Source::Ranges(slice::from_ref(&part.range)),
            promise: self.promise,
            keep: KeepAlive::Caller,
            terms: &Terms::new(self.access),
        };
        let domains: Vec<_> = self.domains.iter().collect();
        let mut checked = None;
        for domain in &domains {
            checked = Some(domain.check(&request)?);
        }
        let checked = checked.expect("a sparse region has a domain");
        let owner = match part.watch.as_ref().and_then(Watch::allocation) {
            Some(allocation) => AddressOwner::of(allocation),
            None => *owner,
        };
        register_regions(&domains, &checked, Some(&owner), &mut |region| {
            part.regions.push(region);
        })?;
        // A part without keys must not be published.
        rail_keys(&part.regions)?;
        if part.is_current() {
            Ok(())
        } else {
            Err(changed_meanwhile().context("range", part.range))
        }
    }

    fn watch(&self, range: AddressRange, owner: &AddressOwner) -> Result<Watch> {
        let domain = &self.domains[0];
        let monitor = self.monitors.get(domain, owner.iface)?;
        let invalidator = Arc::clone(&self.changed) as Arc<dyn Invalidator>;
        let subscription = monitor.subscribe(range, invalidator)?;
        let id = owner.allocation.map(|allocation| allocation.id);
        Watch::confirm(domain, (monitor, subscription), (owner.iface, range), id)
    }
}

impl Parts {
    /// Moves the parts for which `goes` returns true to the withdrawn parts.
    fn withdraw(&mut self, mut goes: impl FnMut(&Part) -> bool) {
        for part in self.live.extract_if(.., |part| goes(part)) {
            self.unpublished = true;
            self.closing.push(part);
        }
    }

    /// Closes the withdrawn parts. Those that a driver refuses to close stay in the list.
    fn close_withdrawn(&mut self) -> Result<()> {
        let mut first = Ok(());
        // After a panic of the provider, the part and those after it stay in the list.
        self.closing.retain_mut(|part| match close_each(&mut part.regions) {
            Ok(()) => false,
            Err(error) => {
                let error = error.context("part", part.range);
                if first.is_ok() {
                    first = Err(error);
                }
                true
            }
        });
        first
    }
}

/// Returns the error for memory that changed while it was registered.
fn changed_meanwhile() -> Error {
    Error::new(ErrorKind::Again, "set parts")
        .context("why", "memory was unmapped or replaced while it was registered")
        .remedy("retry when the application has ended its change of the memory")
}

/// Returns the error for memory that is registered by peer memory, but that the monitor cannot
/// watch in this case. The driver may end such a registration, and a comparison of the memory's
/// identity would not show that.
fn unwatched_peer_memory() -> Error {
    Error::new(ErrorKind::Unsupported, "set parts")
        .context("why", "the monitor does not see when a driver ends a registration by peer memory")
        .remedy("choose a monitor with hooks (HMEM_CUDA_MONITOR=hooks), or register by dma-buf")
}

impl Drop for SparseRegion {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let Some(worker) = self.worker.take() else { return };
        // A forked child does not have the thread, and would wait forever for its end.
        if !self.shared.domains[0].process.is_current() {
            mem::forget(worker);
            return;
        }
        worker.thread().unpark();
        if worker.join().is_err() {
            tracing::error!("the thread of a sparse region panicked");
        }
        let mut parts = self.shared.parts.lock();
        if let Err(error) = self.shared.remove(&mut parts, |_| true) {
            tracing::error!(error = %error.full(), "cannot close a part of a sparse region");
        }
    }
}

impl fmt::Debug for SparseRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseRegion")
            .field("addresses", &self.addresses())
            .field("feed", &self.shared.feed)
            .finish_non_exhaustive()
    }
}
