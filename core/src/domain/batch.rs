//! Registration of many requests with one call, with one or more NICs: all of them, or none
//! (VRB-08).
//!
//! If the caller permits [`Growth`], views of the same allocation with the same rights share one
//! registration of the smallest range that contains them. Views with different rights never share a
//! registration.

#![allow(unsafe_code, reason = "copies bytes of memory that the regions hold")]

use std::{fmt, ops::Range, sync::Arc};

use super::{
    Domain, DomainInner,
    growth::Growth,
    memory::{Memory, Place, keep_alive, take_back},
    region::{MemoryRegion, close_each},
    region_state::KeepAlive,
    region_view::RegionView,
    register::register_regions,
    request::{RegionRequest, Request, Source},
    terms::{Promise, Terms},
};
use crate::{
    Access, AddressRange, DmaBufOffset, Error, ErrorKind, MrFlags, RailKey, RailKeys, Rejected,
    Result, provider::Nic, registry::AddressOwner,
};

/// Requests that are registered together with one or more NICs: all, or none.
///
/// A *view* is a part of a memory with rights of its own, for example a tensor in the memory of a
/// model. Device memory is exported once for all NICs. A NIC that cannot import the dma-buf uses
/// its next path under the policy of its domain.
///
/// ```no_run
/// use hmem_core::{Access, Batch, DeviceBuffer, Domain, Growth, Result};
///
/// fn expose(domain: &Domain, model: DeviceBuffer, tensors: &[(u64, u64)]) -> Result<()> {
///     let views = tensors.iter().map(|&(at, len)| (at..at + len, Access::REMOTE_READ));
///     let all = Batch::on(&[domain])
///         .add_views(model, views)
///         .grow(Growth::Allocation)
///         .register()?;
///     for view in all.views(0) {
///         println!("{}: {:?}", view.range(), view.key()?);
///     }
///     let _model = all.close()?;
///     Ok(())
/// }
/// ```
///
pub struct Batch<'d, M> {
    nics: &'d [&'d Domain],
    memories: Vec<M>,
    views: Vec<ViewRequest<'d>>,
    growth: Growth,
}

/// A view to register.
struct ViewRequest<'d> {
    /// The position of the memory in the batch.
    memory: usize,
    /// The offsets of the view's bytes in the memory. `None` means the whole memory.
    part: Option<Range<u64>>,
    terms: Terms<'d>,
}

impl<'d, M: Memory> Batch<'d, M> {
    /// Creates an empty batch for the NICs of these domains. All domains must come from one `Hmem`,
    /// so that they have the same ifaces and path selector.
    #[must_use]
    pub fn on(nics: &'d [&'d Domain]) -> Self {
        Self { nics, memories: Vec::new(), views: Vec::new(), growth: Growth::None }
    }

    /// Adds a request. Its memory has one view, of the whole memory. A requested key is requested
    /// from every NIC.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "the batch is no number")]
    pub fn add(mut self, request: Request<'d, M>) -> Self {
        let Request { memory, terms } = request;
        self.views.push(ViewRequest { memory: self.memories.len(), part: None, terms });
        self.memories.push(memory);
        self
    }

    /// Adds memory with several views. A view is given by its offsets in the memory, and has rights
    /// of its own. The provider chooses the keys.
    #[must_use]
    pub fn add_views(
        mut self,
        memory: M,
        views: impl IntoIterator<Item = (Range<u64>, Access)>,
    ) -> Self {
        let index = self.memories.len();
        self.views.extend(views.into_iter().map(|(part, access)| ViewRequest {
            memory: index,
            part: Some(part),
            terms: Terms::new(access),
        }));
        self.memories.push(memory);
        self
    }

    /// Lets views with the same rights share a registration, as far as `growth` permits. Default:
    /// [`Growth::None`], with which each view has a registration of its own.
    ///
    /// A shared registration stays inside the memory of its views, with one exception: several
    /// memories by addresses with [`Promise::Allocation`] may share one registration, which then
    /// also covers the bytes of the allocation between them. If a shared registration fails or
    /// would be staged, each of its views is registered alone.
    #[must_use]
    pub fn grow(mut self, growth: Growth) -> Self {
        self.growth = growth;
        self
    }

    /// Registers all views with all NICs. Waits for the registrations, even if an event queue is
    /// bound, and causes no event.
    ///
    /// # Errors
    /// - The errors of [`Domain::register`](super::Domain::register). The context value `view` is
    ///   the position of the view among all views of the batch.
    /// - [`ErrorKind::InvalidArgument`] without a NIC, and for domains of different `Hmem`s.
    /// - [`ErrorKind::InvalidArgument`] if [`Batch::grow`] permits growth and [`Batch::add`] added
    ///   a [`Raw`](super::Raw) whose promise is not [`Promise::Allocation`].
    /// - [`ErrorKind::OutOfBounds`] for a view outside its memory.
    ///
    /// After an error, all regions of the call are closed. [`Rejected::value`] has the memories,
    /// and its method [`Regions::close`] returns them. If a driver refused to close a region, the
    /// value still has that region, and `close` tries again to close it.
    pub fn register(self) -> Result<Regions<M>, Rejected<Regions<M>>> {
        let Self { nics, memories, mut views, growth } = self;
        let parts: Vec<Arc<M::Parts>> =
            memories.into_iter().map(|memory| Arc::new(memory.into_parts())).collect();
        let memories = parts.len();
        let held: Vec<HeldMemory<'_>> = parts
            .iter()
            .map(|parts| HeldMemory { place: M::place(parts), keep: keep_alive::<M>(parts) })
            .collect();
        for view in &mut views {
            if let Place::DmaBuf { .. } = held[view.memory].place {
                view.terms.flags |= MrFlags::MR_DMABUF;
            }
        }
        let mut set = RegionSet::empty(nics, memories, &views);
        let registered = register_all(nics, &held, &views, growth, &mut set);
        drop(held);
        let regions = Regions { set, parts };
        match registered {
            Ok(()) => Ok(regions),
            Err(error) => Err(Rejected::new(regions, error)),
        }
    }
}

impl<M> fmt::Debug for Batch<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("nics", &self.nics.len())
            .field("memories", &self.memories.len())
            .field("views", &self.views.len())
            .finish_non_exhaustive()
    }
}

/// A memory of the batch: its location, and the guarantee that the memory stays allocated.
struct HeldMemory<'a> {
    place: Place<'a>,
    keep: KeepAlive,
}

/// The bytes of a view.
enum ViewBytes<'a> {
    /// A range of addresses.
    Range(AddressRange),
    /// Several ranges, or a dma-buf.
    Other(Source<'a>),
}

/// A registration to make: for a group of views that share it, or for a single view.
struct ViewGroup {
    /// The smallest range that contains the views. `None` for a view that must not share a
    /// registration.
    range: Option<AddressRange>,
    access: Access,
    /// The owner of the first view's memory. If it has an allocation, that contains all views.
    /// `None` if `range` is `None`.
    owner: Option<AddressOwner>,
    /// The range that the registration must not exceed. `None` if the registration must not grow.
    bound: Option<AddressRange>,
    /// The positions of the group's views in the order that [`BatchPlan::order`] returns.
    views: Range<usize>,
}

impl ViewGroup {
    /// Returns the smallest range that contains the group's range and `range`. Returns `None` if
    /// this range is longer than `limit`, or if `range` leaves the group's bound.
    fn joined(&self, range: AddressRange, limit: u64) -> Option<AddressRange> {
        if !self.bound?.contains_range(range) {
            return None;
        }
        let joined = self.range?.hull(range);
        (joined.len() <= limit).then_some(joined)
    }

    /// Returns true if the allocation that contains this group also contains `range`.
    fn holds_owner_of(&self, range: AddressRange) -> bool {
        let allocation = self.owner.and_then(|owner| owner.allocation);
        allocation.is_some_and(|allocation| allocation.range.contains_range(range))
    }
}

/// The domains, memories and views of a batch, with the bytes of each view. The methods identify a
/// view by its position in `views`.
struct BatchPlan<'a> {
    domains: Vec<&'a Arc<DomainInner>>,
    memories: &'a [HeldMemory<'a>],
    views: &'a [ViewRequest<'a>],
    /// The bytes of each view.
    targets: Vec<ViewBytes<'a>>,
    /// The largest length in bytes of a registration that views share. 0 if no views may share one.
    limit: u64,
}

/// Registers all views with all NICs, and adds the regions and views to `set`. After an error,
/// `set` has only the regions that could not be closed.
fn register_all<'a>(
    nics: &'a [&'a Domain],
    memories: &'a [HeldMemory<'a>],
    views: &'a [ViewRequest<'a>],
    growth: Growth,
    set: &mut RegionSet,
) -> Result<()> {
    let plan = BatchPlan::new(nics, memories, views, growth);
    let Err(error) = plan.and_then(|plan| plan.register(set)) else { return Ok(()) };
    let mut error = error.of_call("register batch").context("registered before", set.regions.len());
    if let Err(why) = close_each(&mut set.regions) {
        tracing::error!(left = set.regions.len(), %why, "cannot close regions");
        error = error.context("left registered", set.regions.len()).context("why left", why);
    }
    Err(error)
}

impl<'a> BatchPlan<'a> {
    fn new(
        nics: &'a [&'a Domain],
        memories: &'a [HeldMemory<'a>],
        views: &'a [ViewRequest<'a>],
        growth: Growth,
    ) -> Result<Self> {
        if u32::try_from(views.len()).is_err() {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .context("views", views.len())
                .remedy("register at most 4,294,967,295 views with one call"));
        }
        let domains = domains_of(nics)?;
        let limits = domains.iter().map(|domain| domain.growth_limit(growth));
        let limit = limits.min().unwrap_or(0);
        let mut targets = Vec::with_capacity(views.len());
        for (index, view) in views.iter().enumerate() {
            let place = &memories[view.memory].place;
            targets.push(target_of(place, view.part.as_ref()).map_err(of_view(index))?);
            check_growth(place, view, growth).map_err(of_view(index))?;
        }
        Ok(Self { domains, memories, views, targets, limit })
    }

    /// Returns the request for the memory `source` with the settings of a view.
    fn request<'r>(&'r self, view: usize, source: Source<'r>) -> RegionRequest<'r> {
        let ViewRequest { memory, terms, .. } = &self.views[view];
        let HeldMemory { place, keep } = &self.memories[*memory];
        RegionRequest { source, promise: place.promise(), keep: keep.clone(), terms }
    }

    /// Returns the position of the view's memory, if the view may share a registration only with
    /// views of the same memory. Returns `None` if the view may share a registration with views of
    /// other memories. This requires that the promise is [`Promise::Allocation`], and that the
    /// application itself keeps the memory allocated.
    fn sharing_memory(&self, view: usize) -> Option<usize> {
        let memory = self.views[view].memory;
        let HeldMemory { place, keep } = &self.memories[memory];
        let is_whole = place.promise() == Promise::Allocation && matches!(keep, KeepAlive::Caller);
        (!is_whole).then_some(memory)
    }

    /// Returns the range that the registration of a view must not exceed, or `None` if the
    /// registration must not grow.
    fn growth_bound(&self, view: usize, owner: &AddressOwner) -> Option<AddressRange> {
        let place = &self.memories[self.views[view].memory].place;
        let within = place.range().filter(|_| place.promise() != Promise::Allocation);
        self.domains[0].growth_bound(owner, within)
    }

    /// Returns true if a view may share a registration with others.
    fn may_share(&self, view: usize) -> bool {
        let is_range = matches!(self.targets[view], ViewBytes::Range(_));
        self.limit > 0 && is_range && self.views[view].terms.is_plain()
    }

    /// Returns the views' positions, sorted so that views that may share a registration are
    /// neighbours.
    fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.views.len() as u32).collect();
        order.sort_unstable_by_key(|index| {
            let view = *index as usize;
            let start = match self.targets[view] {
                ViewBytes::Range(range) => range.start().0,
                ViewBytes::Other(_) => 0,
            };
            let access = self.views[view].terms.access.bits();
            (self.may_share(view), self.sharing_memory(view), access, start, *index)
        });
        order
    }

    /// Checks every view for every NIC, and forms the groups of views that share a registration.
    ///
    /// For each view that may share a registration, queries the owner of the view's memory. No
    /// query is needed if the view lies in the allocation of the previous group.
    fn groups(&self, order: &[u32]) -> Result<Vec<ViewGroup>> {
        let mut groups: Vec<ViewGroup> = Vec::new();
        for (place, index) in order.iter().map(|index| *index as usize).enumerate() {
            let source = self.targets[index].source();
            let request = self.request(index, source);
            for domain in &self.domains {
                domain.check(&request).map_err(of_view(index))?;
            }
            let access = self.views[index].terms.access;
            let views = place..place + 1;
            let alone = ViewGroup { range: None, access, owner: None, bound: None, views };
            let range = match self.targets[index] {
                ViewBytes::Range(range) if self.may_share(index) => range,
                _ => {
                    groups.push(alone);
                    continue;
                }
            };
            let within = self.sharing_memory(index);
            let mut neighbour = groups.last_mut().filter(|group| {
                let first = order[group.views.start] as usize;
                group.range.is_some() && self.sharing_memory(first) == within
            });
            if let Some(group) = &mut neighbour
                && group.access == access
                && let Some(joined) = group.joined(range, self.limit)
            {
                group.range = Some(joined);
                group.views.end += 1;
                continue;
            }
            let (owner, bound) = match neighbour.filter(|group| group.holds_owner_of(range)) {
                Some(group) => (group.owner, group.bound),
                None => {
                    let domain = self.domains[0];
                    let owner = domain.registry.owner_of_range(range).map_err(of_view(index))?;
                    let bound = self.growth_bound(index, &owner);
                    (Some(owner), bound)
                }
            };
            groups.push(ViewGroup { range: Some(range), owner, bound, ..alone });
        }
        Ok(groups)
    }

    /// Registers the groups one by one. After an error, `set` contains the regions that were
    /// registered before.
    fn register(&self, set: &mut RegionSet) -> Result<()> {
        let order = self.order();
        let groups = self.groups(&order)?;
        set.regions.reserve(groups.len() * self.domains.len());
        let mut placed = vec![None; self.views.len()];
        for group in &groups {
            let views = &order[group.views.clone()];
            // Without an allocation, only the memory of the first view was queried. The memory of
            // the others may have another owner.
            let owner = group.owner.filter(|owner| views.len() == 1 || owner.allocation.is_some());
            let shared = match (views, group.range) {
                ([_], _) | (_, None) => None,
                (_, Some(range)) => self.register_shared(views[0] as usize, range, owner, set),
            };
            for view in views.iter().map(|view| *view as usize) {
                let first = match shared {
                    Some(first) => first,
                    None => {
                        let first = set.regions.len();
                        let source = self.targets[view].source();
                        self.register_one(view, source, owner, &mut set.regions)
                            .map_err(of_view(view))?;
                        first
                    }
                };
                let range = match self.targets[view] {
                    ViewBytes::Range(range) => range,
                    ViewBytes::Other(_) => set.regions[first].range(),
                };
                placed[view] = Some(PlacedView { first, range });
            }
        }
        set.views = placed.into_iter().flatten().collect();
        Ok(())
    }

    /// Registers memory with every NIC, with the settings of a view. After an error, `regions`
    /// contains the regions of the NICs before the one that failed.
    fn register_one(
        &self,
        view: usize,
        source: Source<'_>,
        owner: Option<AddressOwner>,
        regions: &mut Vec<MemoryRegion>,
    ) -> Result<()> {
        let request = self.request(view, source);
        let checked = self.domains[0].check(&request)?;
        register_regions(&self.domains, &checked, owner.as_ref(), &mut |region| {
            regions.push(region)
        })
    }

    /// Registers the range of a group for all its views, and adds one region per NIC to
    /// `set.regions`. Returns the position of the first NIC's region in `set.regions`, or `None` if
    /// the views must be registered one by one.
    fn register_shared(
        &self,
        view: usize,
        range: AddressRange,
        owner: Option<AddressOwner>,
        set: &mut RegionSet,
    ) -> Option<usize> {
        let first = set.regions.len();
        let source = Source::Ranges(std::slice::from_ref(&range));
        let registered = self.register_one(view, source, owner, &mut set.regions);
        let mut regions = self.domains.iter().zip(&set.regions[first..]);
        let staged = regions.any(|(domain, region)| domain.is_staged_by_growth(region));
        match &registered {
            Ok(()) if !staged => return Some(first),
            Ok(()) => tracing::debug!(%range, "views that share a registration would be staged"),
            Err(error) => tracing::debug!(%error, %range, "views cannot share a registration"),
        }
        // Regions that the driver refuses to close stay in the set, without views.
        let mut shared = set.regions.split_off(first);
        if let Err(error) = close_each(&mut shared) {
            tracing::error!(error = %error.full(), "cannot close a grown region");
        }
        set.regions.append(&mut shared);
        None
    }
}

impl<'a> ViewBytes<'a> {
    fn source(&self) -> Source<'_> {
        match self {
            Self::Range(range) => Source::Ranges(std::slice::from_ref(range)),
            Self::Other(source) => *source,
        }
    }
}

/// Returns a function that adds the position `view` of a view to an error.
fn of_view(view: usize) -> impl Fn(Error) -> Error {
    move |error| error.context("view", view)
}

/// Returns the inner state of each domain. Fails without a domain, and for domains of different
/// `Hmem`s.
pub(super) fn domains_of<'a>(nics: &'a [&'a Domain]) -> Result<Vec<&'a Arc<DomainInner>>> {
    let refuse = |what: &'static str, remedy: &'static str| {
        Err(Error::new(ErrorKind::InvalidArgument, "regattr").context("why", what).remedy(remedy))
    };
    let Some(first) = nics.first() else {
        return refuse("no domain", "pass at least one domain");
    };
    let is_unrelated = |domain: &&Domain| {
        !Arc::ptr_eq(&domain.inner.registry, &first.inner.registry)
            || !Arc::ptr_eq(&domain.inner.selector, &first.inner.selector)
    };
    if nics.iter().any(is_unrelated) {
        return refuse("domains of different libraries", "open all domains from one `Hmem`");
    }
    Ok(nics.iter().map(|domain| &domain.inner).collect())
}

/// Fails if the view is a whole memory by addresses, `growth` permits growth, and the promise for
/// the memory is weaker than [`Promise::Allocation`].
fn check_growth(place: &Place<'_>, view: &ViewRequest<'_>, growth: Growth) -> Result<()> {
    let is_too_weak =
        matches!(place, Place::Addresses { promise, .. } if *promise != Promise::Allocation);
    if growth == Growth::None || view.part.is_some() || !is_too_weak {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "regattr")
        .context("growth", format_args!("{growth:?}"))
        .context("promise", format_args!("{:?}", place.promise()))
        .remedy(
            "promise the whole allocation (Promise::Allocation), add the views of one memory by \
             Batch::add_views, or leave out Batch::grow",
        ))
}

/// Returns the bytes of a view. `part` is the view's offsets in the memory, or `None` for the whole
/// memory. Fails for a part that leaves the memory.
fn target_of<'a>(place: &'a Place<'a>, part: Option<&Range<u64>>) -> Result<ViewBytes<'a>> {
    let Some(part) = part else {
        return Ok(match place.range() {
            Some(range) => ViewBytes::Range(range),
            None => ViewBytes::Other(Source::of(place)),
        });
    };
    let outside = |remedy: &'static str| {
        Error::new(ErrorKind::OutOfBounds, "register batch")
            .context("part", format_args!("{part:?}"))
            .context("memory", place.len())
            .remedy(remedy)
    };
    let inside = "the part must begin and end in the memory";
    let len = part.end.checked_sub(part.start).ok_or_else(|| outside(inside))?;
    if let Some(range) = place.range() {
        return range.slice(part.start, len).map(ViewBytes::Range).ok_or_else(|| outside(inside));
    }
    let Source::DmaBuf(mut buffer) = Source::of(place) else {
        return Err(outside("add memory of several ranges as a whole, by Batch::add"));
    };
    if part.end > buffer.len {
        return Err(outside(inside));
    }
    let offset = buffer.offset.0.checked_add(part.start).ok_or_else(|| outside(inside))?;
    (buffer.offset, buffer.len) = (DmaBufOffset(offset), len);
    Ok(ViewBytes::Other(Source::DmaBuf(buffer)))
}

/// A registered view.
#[derive(Clone, Copy, Debug)]
struct PlacedView {
    /// The position of the first NIC's region in [`RegionSet::regions`].
    first: usize,
    range: AddressRange,
}

/// The regions and views of a batch. The memories are in [`Regions::parts`].
struct RegionSet {
    nics: Box<[Nic]>,
    /// The regions: for each registration one per NIC, in the order of `nics`.
    regions: Vec<MemoryRegion>,
    /// The views in the order of the batch. Empty unless all views are registered.
    views: Box<[PlacedView]>,
    /// The position of the first view of each memory. The last element is the number of views.
    first_view: Box<[u32]>,
}

impl RegionSet {
    fn empty(nics: &[&Domain], memories: usize, views: &[ViewRequest<'_>]) -> Self {
        let nics = nics.iter().map(|domain| domain.provider_attr().nic.clone()).collect();
        let first = |memory| views.partition_point(|view| view.memory < memory) as u32;
        let first_view = (0..=memories).map(first).collect();
        Self { nics, regions: Vec::new(), views: Box::default(), first_view }
    }

    fn view(&self, nic: usize, at: &PlacedView) -> RegionView<'_> {
        RegionView::new(&self.regions[at.first + nic], at.range)
    }
}

/// The regions of a batch, in which each view is registered with each NIC.
///
/// The methods take positions, which begin at 0: that of a memory in the batch, that of a view
/// among the views of its memory, and that of a NIC in the list of [`Batch::on`]. Access the bytes
/// of buffers through [`Regions::read`] and [`Regions::write`], which copy.
///
/// Dropping the value deregisters everything.
pub struct Regions<M: Memory> {
    set: RegionSet,
    parts: Vec<Arc<M::Parts>>,
}

impl<M: Memory> Regions<M> {
    /// Returns a view on one NIC. The arguments are the positions of the NIC, of the memory, and of
    /// the view among the views of that memory, from 0.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if there is no such NIC, memory or view. A value that
    /// [`Batch::register`] or [`Regions::close`] returned with an error has no views.
    pub fn view(&self, nic: usize, memory: usize, view: usize) -> Result<RegionView<'_>> {
        let set = &self.set;
        let found = (|| {
            let first = *set.first_view.get(memory)? as usize;
            let end = *set.first_view.get(memory + 1)? as usize;
            let index = first.checked_add(view).filter(|index| *index < end)?;
            set.views.get(index).filter(|_| nic < set.nics.len())
        })();
        let placed = found.ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "view")
                .context("nic", format_args!("{nic} of {}", set.nics.len()))
                .context("memory", format_args!("{memory} of {}", self.parts.len()))
                .context("view", view)
                .remedy("name a NIC, a memory and a view of the batch by their positions, from 0")
        })?;
        Ok(set.view(nic, placed))
    }

    /// Returns all views on one NIC, in the order of the batch. `nic` is the position of the NIC in
    /// the list of [`Batch::on`], from 0.
    ///
    /// # Panics
    /// The list has no NIC at that position.
    pub fn views(&self, nic: usize) -> impl ExactSizeIterator<Item = RegionView<'_>> {
        assert!(nic < self.set.nics.len(), "{nic} is not a NIC of the batch");
        self.set.views.iter().map(move |placed| self.set.view(nic, placed))
    }

    /// Returns the keys of one view on all NICs as one value, with the name of each NIC, to send to
    /// a peer. The arguments are the positions of the memory, and of the view among the views of
    /// that memory, from 0.
    ///
    /// # Errors
    /// The errors of [`Regions::view`], [`RegionView::key`] and [`RailKeys::new`].
    pub fn rail_keys(&self, memory: usize, view: usize) -> Result<RailKeys> {
        let rail = |(nic, of): (usize, &Nic)| {
            Ok(RailKey::new(of.clone(), self.view(nic, memory, view)?.key()?))
        };
        RailKeys::new(self.set.nics.iter().enumerate().map(rail).collect::<Result<_>>()?)
    }

    /// Returns all regions. Most have one or more views.
    ///
    /// A region has no view if it was registered for several views that then could not share it,
    /// and the driver refused to close it. In a value that [`Batch::register`] or
    /// [`Regions::close`] returned with an error, the list has only the regions that could not be
    /// closed.
    #[must_use]
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.set.regions
    }

    fn place(&self, memory: usize) -> Result<Place<'_>> {
        self.parts.get(memory).map(|parts| M::place(parts)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .context("memory", memory)
                .context("memories", self.parts.len())
        })
    }

    /// Fills `into` with the bytes of one memory from `offset` on. `memory` is the position of that
    /// memory in the batch, from 0.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the batch has no such memory, or some of the bytes lie
    ///   outside the memory.
    /// - The other errors of [`Region::read`](super::Region::read).
    pub fn read(&self, memory: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { self.place(memory)?.read(offset, into) }
    }

    /// Copies `from` to the bytes of one memory from `offset` on. `memory` is the position of that
    /// memory in the batch, from 0.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the batch has no such memory, or some of the bytes lie
    ///   outside the memory.
    /// - The other errors of [`Region::write`](super::Region::write).
    pub fn write(&self, memory: usize, offset: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { self.place(memory)?.write(offset, from) }
    }

    /// Deregisters everything and returns the memories, in the order of the batch.
    ///
    /// # Errors
    /// - The first error of [`MemoryRegion::close`]. The call tries to close every region. The
    ///   error returns the regions that could not be closed, with the memories. These regions still
    ///   work, but have no views any more.
    /// - [`ErrorKind::Driver`] if a registration panicked. Its memory is lost, because the NIC may
    ///   still access it.
    pub fn close(mut self) -> Result<Vec<M>, Rejected<Self>> {
        self.set.views = Box::default();
        if let Err(error) = close_each(&mut self.set.regions) {
            return Err(Rejected::new(self, error));
        }
        let mut memories = Vec::with_capacity(self.parts.len());
        let mut parts = std::mem::take(&mut self.parts).into_iter();
        while let Some(next) = parts.next() {
            match take_back::<M>(next) {
                Ok(memory) => memories.push(memory),
                Err((kept, error)) => {
                    let taken = memories.into_iter().map(|memory: M| Arc::new(memory.into_parts()));
                    self.parts = taken.chain([kept]).chain(parts).collect();
                    return Err(Rejected::new(self, error));
                }
            }
        }
        Ok(memories)
    }
}

impl<M: Memory> fmt::Debug for Regions<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Regions")
            .field("nics", &self.set.nics.len())
            .field("memories", &self.parts.len())
            .field("views", &self.set.views.len())
            .field("regions", &self.set.regions.len())
            .finish()
    }
}
