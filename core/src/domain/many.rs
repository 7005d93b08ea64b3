//! Many views of few allocations, registered by one call: all of them or none.
//!
//! A *view* is a range with rights of its own: a tensor in the memory of a model, say. Views of the
//! same allocation and the same rights share one registration where the caller permits [`Growth`].
//! It is of the smallest range that holds them. Views whose rights differ never share.
//!
//! ```no_run
//! use hmem_core::{Access, BufferView, DeviceBuffer, Domain, Growth, Result};
//!
//! fn expose(domain: &Domain, model: DeviceBuffer, tensors: &[(u64, u64)]) -> Result<()> {
//!     let view = |&(offset, len)| BufferView::new(0, offset, len, Access::REMOTE_READ);
//!     let views: Vec<_> = tensors.iter().map(view).collect();
//!     let registered = domain.register_many(vec![model], &views, Growth::Allocation)?;
//!     for view in registered.iter() {
//!         println!("{}: {:?}", view.range(), view.key()?);
//!     }
//!     registered.close()?;
//!     Ok(())
//! }
//! ```

use std::{fmt, ops::Deref, sync::Arc};

use super::{
    Domain, DomainInner, MemoryRegion, MrAttr,
    buffer::{OwnedBuffer, RegionSlice, keep_alive, take_back},
    growth::Growth,
    region_state::KeepAlive,
};
use crate::{
    Access, AddressRange, Error, ErrorKind, LocalKey, MrFlags, Rejected, RemoteKey, Result,
    registry::AddressOwner,
};

/// A range of raw addresses to register, and its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The range.
    pub range: AddressRange,
    /// The rights that its key grants.
    pub access: Access,
}

impl View {
    /// Creates a view.
    #[must_use]
    pub const fn new(range: AddressRange, access: Access) -> Self {
        Self { range, access }
    }
}

/// A part of a buffer to register, and its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferView {
    /// The place of the buffer in the list of buffers.
    pub buffer: usize,
    /// The first byte, from the start of the buffer.
    pub offset: u64,
    /// Bytes, more than 0.
    pub len: u64,
    /// The rights that its key grants.
    pub access: Access,
}

impl BufferView {
    /// Creates a view.
    #[must_use]
    pub const fn new(buffer: usize, offset: u64, len: u64, access: Access) -> Self {
        Self { buffer, offset, len, access }
    }
}

/// The range of a buffer, and what keeps its memory allocated.
type Held = (AddressRange, KeepAlive);

/// Views that are registered as one.
struct Group {
    /// The smallest range that holds the views.
    range: AddressRange,
    access: Access,
    owner: Option<AddressOwner>,
    /// The range that the registration must not leave; `None` if it cannot grow.
    bound: Option<AddressRange>,
    /// The views, by their places in the order of the plan.
    first: usize,
    count: usize,
}

/// Input of one call. `views` are those of the caller, each with its buffer if it is of one.
struct Request<'a> {
    domain: &'a Arc<DomainInner>,
    views: &'a [View],
    /// The buffer of each view. Empty for raw addresses.
    buffer_of: Vec<u32>,
    buffers: &'a [Held],
    growth: Growth,
}

impl Request<'_> {
    fn held(&self, view: usize) -> Option<&Held> {
        self.buffers.get(*self.buffer_of.get(view)? as usize)
    }

    /// Sorts the views so that those which may share a registration are neighbours.
    fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.views.len() as u32).collect();
        order.sort_unstable_by_key(|index| {
            let view = &self.views[*index as usize];
            let buffer = self.buffer_of.get(*index as usize);
            (buffer, view.access.bits(), view.range.start(), *index)
        });
        order
    }

    /// Checks every view, and groups those that share a registration. Queries the owner of the
    /// memory once for each allocation and set of rights.
    fn plan(&self, order: &[u32]) -> Result<Vec<Group>> {
        let limit = self.domain.growth_limit(self.growth);
        let mut groups: Vec<Group> = Vec::new();
        let mut buffer = None;
        for (place, index) in order.iter().map(|index| *index as usize).enumerate() {
            let View { range, access } = self.views[index];
            let of_view = |error: Error| error.context("view", index);
            self.domain.check(&MrAttr::new(&[range], access), MrFlags::empty()).map_err(of_view)?;
            let same_buffer = buffer == self.buffer_of.get(index);
            if let Some(group) = groups.last_mut().filter(|group| group.access == access)
                && same_buffer
                && let Some(joined) = group.joined(range, limit)
            {
                group.range = joined;
                group.count += 1;
                continue;
            }
            buffer = self.buffer_of.get(index);
            let known = groups.last().filter(|group| same_buffer && group.holds_owner_of(range));
            let (owner, bound) = match known {
                Some(group) => (group.owner, group.bound),
                None if limit == 0 => (None, None),
                None => {
                    let owner = self.domain.registry.owner_of_range(range).map_err(of_view)?;
                    let held = self.held(index).map(|(range, _)| *range);
                    (Some(owner), self.domain.growth_bound(&owner, held))
                }
            };
            groups.push(Group { range, access, owner, bound, first: place, count: 1 });
        }
        Ok(groups)
    }

    /// Registers the groups one by one. On an error `regions` holds what was registered before.
    fn register(&self, regions: &mut Vec<MemoryRegion>) -> Result<Vec<Placed>> {
        if u32::try_from(self.views.len()).is_err() {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .context("views", self.views.len())
                .remedy("register at most 4,294,967,295 views at once"));
        }
        let order = self.order();
        let groups = self.plan(&order)?;
        let nowhere = |view: &View| Placed { region: 0, range: view.range };
        let mut placed: Vec<Placed> = self.views.iter().map(nowhere).collect();
        regions.reserve(groups.len());
        for group in &groups {
            let views = &order[group.first..group.first + group.count];
            let held = self.held(views[0] as usize);
            let keep = || held.map_or(KeepAlive::Caller, |(_, keep)| keep.clone());
            let register = |range: AddressRange, owner| {
                let ranges = [range];
                let attr = MrAttr::new(&ranges, group.access);
                self.domain.register_now(&attr, MrFlags::empty(), keep(), owner)
            };
            let of_view = |view: u32| move |error: Error| error.context("view", view);
            if let [view] = *views {
                placed[view as usize].region = regions.len() as u32;
                regions.push(register(group.range, group.owner).map_err(of_view(view))?);
                continue;
            }
            let shared = register(group.range, group.owner)
                .and_then(|region| self.domain.without_staging(region, regions));
            match shared {
                Ok(region) => {
                    for view in views {
                        placed[*view as usize].region = regions.len() as u32;
                    }
                    regions.push(region);
                }
                Err(error) => {
                    tracing::debug!(%error, range = %group.range, views = views.len(), "views are registered one by one");
                    for view in views.iter().copied() {
                        let range = self.views[view as usize].range;
                        placed[view as usize].region = regions.len() as u32;
                        regions.push(register(range, group.owner).map_err(of_view(view))?);
                    }
                }
            }
        }
        Ok(placed)
    }

    /// Registers all views, or closes what was registered.
    fn run(&self, call: &'static str) -> Result<RegionViews, Rejected<RegionViews>> {
        let mut regions = Vec::new();
        match self.register(&mut regions) {
            Ok(views) => Ok(RegionViews { regions, views }),
            Err(error) => {
                let mut error = error.of_call(call).context("registered before", regions.len());
                let mut left = RegionViews { regions, views: Vec::new() };
                if let Err(why) = left.close_each() {
                    tracing::error!(left = left.regions.len(), %why, "regions could not be closed again");
                    error = error
                        .context("left registered", left.regions.len())
                        .context("why left", why);
                }
                Err(Rejected::new(left, error))
            }
        }
    }
}

impl Group {
    /// Returns the range with another view in it, if one registration may serve both.
    fn joined(&self, range: AddressRange, limit: u64) -> Option<AddressRange> {
        if !self.bound?.contains_range(range) {
            return None;
        }
        let joined = self.range.hull(range);
        (joined.len() <= limit).then_some(joined)
    }

    /// Returns true if the owner of this group's memory is known, and owns the range too.
    fn holds_owner_of(&self, range: AddressRange) -> bool {
        let allocation = self.owner.and_then(|owner| owner.allocation);
        allocation.is_some_and(|allocation| allocation.range.contains_range(range))
    }
}

/// Registers raw addresses.
///
/// # Safety
/// As [`Domain::reg_many`].
pub(super) unsafe fn reg_many(
    domain: &Arc<DomainInner>,
    views: &[View],
    growth: Growth,
) -> Result<RegionViews, Rejected<RegionViews>> {
    Request { domain, views, buffer_of: Vec::new(), buffers: &[], growth }.run("reg_many")
}

/// Registers parts of buffers.
pub(super) fn register_many<B: OwnedBuffer>(
    domain: &Arc<DomainInner>,
    buffers: Vec<B>,
    views: &[BufferView],
    growth: Growth,
) -> Result<RegisteredViews<B>, Rejected<RegisteredViews<B>>> {
    let parts: Vec<_> = buffers.into_iter().map(|buffer| Arc::new(buffer.into_parts())).collect();
    let held: Vec<Held> =
        parts.iter().map(|parts| (B::range(parts), keep_alive::<B>(parts))).collect();
    let registered = match ranges_of(&held, views) {
        Ok((views, buffer_of)) => {
            Request { domain, views: &views, buffer_of, buffers: &held, growth }
                .run("register_many")
        }
        Err(error) => {
            Err(Rejected::new(RegionViews { regions: Vec::new(), views: Vec::new() }, error))
        }
    };
    match registered {
        Ok(regions) => Ok(RegisteredViews { regions, parts }),
        Err(Rejected { value: regions, error }) => {
            Err(Rejected::new(RegisteredViews { regions, parts }, error))
        }
    }
}

/// Returns the ranges of parts of buffers, and the buffer of each.
fn ranges_of(held: &[Held], views: &[BufferView]) -> Result<(Vec<View>, Vec<u32>)> {
    let range_of = |(index, view): (usize, &BufferView)| {
        let BufferView { buffer, offset, len, access } = *view;
        let error = || Error::new(ErrorKind::OutOfBounds, "register_many").context("view", index);
        let Some((range, _)) = held.get(buffer) else {
            return Err(error()
                .context("buffer", buffer)
                .context("buffers", held.len())
                .remedy("buffers count from 0"));
        };
        match range.slice(offset, len) {
            Some(range) => Ok((View { range, access }, buffer as u32)),
            None => Err(error()
                .context("offset", offset)
                .context("length", len)
                .context("buffer", range)
                .remedy("a view lies inside its buffer")),
        }
    };
    views.iter().enumerate().map(range_of).collect()
}

/// The place of a view.
#[derive(Clone, Copy, Debug)]
struct Placed {
    region: u32,
    range: AddressRange,
}

/// Views that were registered together, in the order given.
///
/// The registrations live as long as this value. Dropping it deregisters as dropping the regions
/// does.
pub struct RegionViews {
    regions: Vec<MemoryRegion>,
    views: Vec<Placed>,
}

impl RegionViews {
    /// Returns the view at a place in the order given.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<RegionView<'_>> {
        let Placed { region, range } = *self.views.get(index)?;
        Some(RegionView { region: &self.regions[region as usize], range })
    }

    /// Returns the views in the order given.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RegionView<'_>> {
        self.views.iter().map(|Placed { region, range }| RegionView {
            region: &self.regions[*region as usize],
            range: *range,
        })
    }

    /// Returns the number of views.
    #[must_use]
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Returns true if there are no views.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// Returns the registrations, each of one or more views. In the value of an error they are
    /// those that could not be closed again.
    #[must_use]
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Returns the remote key of each view, in the order given.
    ///
    /// # Errors
    /// As [`RegionView::key`].
    pub fn keys(&self) -> Result<Vec<RemoteKey>> {
        self.iter().map(|view| view.key()).collect()
    }

    /// Closes all registrations.
    ///
    /// # Errors
    /// As [`MemoryRegion::close`], the first of them. Every registration is tried. Those that were
    /// refused come back, still working; the views are gone.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.close_each() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn close_each(&mut self) -> Result<()> {
        let mut first = Ok(());
        let mut left = Vec::new();
        self.views.clear();
        for region in std::mem::take(&mut self.regions) {
            match region.inner().close() {
                // Not left to the drop of the region: a sub-region that another thread is dropping
                // may hold it a little longer.
                Ok(()) => drop(region.inner().release()),
                Err(error) => {
                    left.push(region);
                    first = first.and(Err(error));
                }
            }
        }
        self.regions = left;
        let left = self.regions.len();
        first.map_err(|error: Error| error.context("left registered", left))
    }
}

impl fmt::Debug for RegionViews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionViews")
            .field("views", &self.views.len())
            .field("regions", &self.regions.len())
            .finish()
    }
}

/// One view of a registration that others may share.
#[derive(Clone, Copy, Debug)]
pub struct RegionView<'r> {
    region: &'r MemoryRegion,
    range: AddressRange,
}

impl<'r> RegionView<'r> {
    /// Returns the range that was asked for.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Returns the rights of the region. They are those asked for by `register_many`; a cached
    /// region may have more.
    #[must_use]
    pub fn access(&self) -> Access {
        self.region.access()
    }

    /// Returns the registration. It may be of more memory than the view.
    #[must_use]
    pub fn region(&self) -> &'r MemoryRegion {
        self.region
    }

    /// Creates a view of part of a region.
    pub(super) fn new(region: &'r MemoryRegion, range: AddressRange) -> Self {
        Self { region, range }
    }

    fn offset(&self) -> u64 {
        self.range.start().0 - self.region.range().start().0
    }

    /// Returns the remote key of this view, for its range alone.
    ///
    /// The NIC does not enforce these bounds where the registration is of more: see [`Growth`].
    ///
    /// # Errors
    /// As [`MemoryRegion::key`] and [`RemoteKey::narrow`].
    pub fn key(&self) -> Result<RemoteKey> {
        let key = self.region.key()?;
        if self.range == self.region.range() {
            return Ok(key);
        }
        key.narrow(self.offset(), self.range.len())
    }

    /// Returns the local descriptor.
    ///
    /// # Errors
    /// As [`MemoryRegion::desc`].
    pub fn desc(&self) -> Result<LocalKey> {
        self.region.desc()
    }

    /// Returns a piece of this view for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if it reaches outside the view.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::within(self.region, self.range, offset, len)
    }
}

/// Buffers with their views, registered together and owned by their registrations.
///
/// Derefs to the views. The bytes are reached by copies, as those of
/// [`OwnedRegion`](super::OwnedRegion).
pub struct RegisteredViews<B: OwnedBuffer> {
    regions: RegionViews,
    parts: Vec<Arc<B::Parts>>,
}

impl<B: OwnedBuffer> RegisteredViews<B> {
    fn parts(&self, buffer: usize) -> Result<&B::Parts> {
        self.parts.get(buffer).map(|parts| &**parts).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .context("buffer", buffer)
                .context("buffers", self.parts.len())
        })
    }

    /// Copies bytes of a buffer out.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; the error of the device otherwise.
    pub fn read(&self, buffer: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        B::read(self.parts(buffer)?, offset, into)
    }

    /// Copies bytes into a buffer.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; the error of the device otherwise.
    pub fn write(&self, buffer: usize, offset: u64, from: &[u8]) -> Result<()> {
        B::write(self.parts(buffer)?, offset, from)
    }

    /// Closes all registrations and gives the buffers back, in the order given.
    ///
    /// # Errors
    /// As [`RegionViews::close`]. What is left comes back, with the buffers. [`ErrorKind::Driver`]
    /// if a registration panicked: its buffer is not given back, since a NIC may reach it.
    pub fn close(mut self) -> Result<Vec<B>, Rejected<Self>> {
        if let Err(error) = self.regions.close_each() {
            return Err(Rejected::new(self, error));
        }
        let mut buffers = Vec::with_capacity(self.parts.len());
        let mut parts = std::mem::take(&mut self.parts).into_iter();
        while let Some(next) = parts.next() {
            match take_back::<B>(next) {
                Ok(buffer) => buffers.push(buffer),
                Err((kept, error)) => {
                    let taken = buffers.into_iter().map(|buffer: B| Arc::new(buffer.into_parts()));
                    self.parts = taken.chain([kept]).chain(parts).collect();
                    return Err(Rejected::new(self, error));
                }
            }
        }
        Ok(buffers)
    }
}

impl<B: OwnedBuffer> Deref for RegisteredViews<B> {
    type Target = RegionViews;

    fn deref(&self) -> &RegionViews {
        &self.regions
    }
}

impl<B: OwnedBuffer> fmt::Debug for RegisteredViews<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredViews")
            .field("buffers", &self.parts.len())
            .field("views", &self.regions.views.len())
            .field("regions", &self.regions.regions.len())
            .finish()
    }
}

impl Domain {
    /// Registers many views of raw addresses by one call: all of them or none.
    ///
    /// Views of one allocation with the same rights share a registration as far as `growth`
    /// permits. Its rights are those of the views, and its range the smallest that holds them.
    /// Without growth each view is a registration of its own. The registrations are done when this
    /// returns, also where an event queue is bound, and give no event. The provider picks the keys.
    ///
    /// # Safety
    /// As [`Domain::regattr`], for each view; with growth, for every byte between the views of an
    /// allocation too.
    ///
    /// # Errors
    /// As [`Domain::regattr`], with the place of the view as `view`. Every registration of the call
    /// is closed again: the value of the error is empty. If a driver refuses that, the value holds
    /// what is left, to be closed again.
    pub unsafe fn reg_many(
        &self,
        views: &[View],
        growth: Growth,
    ) -> Result<RegionViews, Rejected<RegionViews>> {
        // SAFETY: passed on to the caller.
        unsafe { reg_many(&self.inner, views, growth) }
    }

    /// Registers many views of buffers that the registrations then own: [`Domain::reg_many`]
    /// without `unsafe`.
    ///
    /// No registration leaves its buffer, so that `growth` has the buffer in the place of the
    /// allocation.
    ///
    /// # Errors
    /// As [`Domain::reg_many`], and [`ErrorKind::OutOfBounds`] for a view outside its buffer. The
    /// buffers are in the value of the error, whose [`close`](RegisteredViews::close) gives them
    /// back: at once, unless a driver refused to undo what was registered before.
    pub fn register_many<B: OwnedBuffer>(
        &self,
        buffers: Vec<B>,
        views: &[BufferView],
        growth: Growth,
    ) -> Result<RegisteredViews<B>, Rejected<RegisteredViews<B>>> {
        register_many(&self.inner, buffers, views, growth)
    }
}
