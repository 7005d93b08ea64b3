//! Registration of many views of few allocations with one call: all of them, or none.
//!
//! A *view* is a range with rights of its own, for example a tensor in the memory of a model. If
//! the caller permits [`Growth`], views of the same allocation with the same rights share one
//! registration of the smallest range that contains them. Views with different rights never share
//! a registration.
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

#![allow(unsafe_code, reason = "registers memory by address, for many views")]

use std::{fmt, ops::Deref, sync::Arc};

use super::{
    Domain, DomainInner, MemoryRegion, MrAttr,
    buffer::{OwnedBuffer, RegionSlice, keep_alive, take_back},
    growth::Growth,
    region::close_each,
    region_state::KeepAlive,
};
use crate::{
    Access, AddressRange, Error, ErrorKind, LocalKey, MrFlags, Rejected, RemoteKey, Result,
    registry::AddressOwner,
};

/// A range of raw addresses to register, and its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The range of addresses to register.
    pub range: AddressRange,
    /// The rights that the view's key grants.
    pub access: Access,
}

impl View {
    /// Creates a view, to pass to a registration.
    #[must_use]
    pub const fn new(range: AddressRange, access: Access) -> Self {
        Self { range, access }
    }
}

/// A part of a buffer to register, and its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferView {
    /// The position of the buffer in the list of buffers, from 0.
    pub buffer: usize,
    /// The offset of the first byte in the buffer.
    pub offset: u64,
    /// The length in bytes, more than 0.
    pub len: u64,
    /// The rights that the view's key grants.
    pub access: Access,
}

impl BufferView {
    /// Creates a view, to pass to a registration.
    #[must_use]
    pub const fn new(buffer: usize, offset: u64, len: u64, access: Access) -> Self {
        Self { buffer, offset, len, access }
    }
}

/// The range of a buffer, and the reference that keeps its memory allocated.
type Held = (AddressRange, KeepAlive);

/// A group of views that share a registration.
struct Group {
    /// The smallest range that contains the views.
    range: AddressRange,
    access: Access,
    owner: Option<AddressOwner>,
    /// The range that the registration must not exceed. `None` if the registration must not grow.
    bound: Option<AddressRange>,
    /// The index of the group's first view in the sorted order. The group has `count` views from
    /// there on.
    first: usize,
    count: usize,
}

/// The input of one registration of many views.
struct Request<'a> {
    domain: &'a Arc<DomainInner>,
    views: &'a [View],
    /// The position of each view's buffer in the list of buffers. Empty for views of raw addresses.
    buffer_of: Vec<u32>,
    buffers: &'a [Held],
    growth: Growth,
}

impl Request<'_> {
    fn held(&self, view: usize) -> Option<&Held> {
        self.buffers.get(*self.buffer_of.get(view)? as usize)
    }

    /// Returns the views' positions, sorted so that views that may share a registration are
    /// neighbours.
    fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.views.len() as u32).collect();
        order.sort_unstable_by_key(|index| {
            let view = &self.views[*index as usize];
            let buffer = self.buffer_of.get(*index as usize);
            (buffer, view.access.bits(), view.range.start(), *index)
        });
        order
    }

    /// Checks every view, and forms the groups that share a registration. If growth is enabled,
    /// queries the owner of the memory once for each allocation and set of rights.
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

    /// Registers the groups one by one. After an error, `regions` contains the regions that were
    /// registered before.
    fn register(&self, regions: &mut Vec<MemoryRegion>) -> Result<Vec<Placed>> {
        if u32::try_from(self.views.len()).is_err() {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .context("views", self.views.len())
                .remedy("register at most 4,294,967,295 views with one call"));
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
            let register = |range: AddressRange, owner: Option<AddressOwner>| {
                let ranges = [range];
                let attr = MrAttr::new(&ranges, group.access);
                self.domain.register_now(&attr, MrFlags::empty(), keep(), owner.as_ref())
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
                    tracing::debug!(
                        %error,
                        range = %group.range,
                        "cannot register views together: registering each alone"
                    );
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

    /// Registers all views. After an error, closes the regions that were already registered.
    fn run(&self, call: &'static str) -> Result<RegionViews, Rejected<RegionViews>> {
        let mut regions = Vec::new();
        match self.register(&mut regions) {
            Ok(views) => Ok(RegionViews { regions, views }),
            Err(error) => {
                let mut error = error.of_call(call).context("registered before", regions.len());
                let mut left = RegionViews { regions, views: Vec::new() };
                if let Err(why) = left.close_each() {
                    tracing::error!(left = left.regions.len(), %why, "cannot close regions");
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
    /// Returns the group's range extended by `range`, if one registration may cover both.
    fn joined(&self, range: AddressRange, limit: u64) -> Option<AddressRange> {
        if !self.bound?.contains_range(range) {
            return None;
        }
        let joined = self.range.hull(range);
        (joined.len() <= limit).then_some(joined)
    }

    /// Returns true if the owner that was found for this group also owns `range`.
    fn holds_owner_of(&self, range: AddressRange) -> bool {
        let allocation = self.owner.and_then(|owner| owner.allocation);
        allocation.is_some_and(|allocation| allocation.range.contains_range(range))
    }
}

/// Registers many views of raw addresses, as [`Domain::reg_many`] does.
///
/// # Safety
/// The conditions of [`Domain::reg_many`].
pub(super) unsafe fn reg_many(
    domain: &Arc<DomainInner>,
    views: &[View],
    growth: Growth,
) -> Result<RegionViews, Rejected<RegionViews>> {
    Request { domain, views, buffer_of: Vec::new(), buffers: &[], growth }.run("reg_many")
}

/// Registers many views of buffers, as [`Domain::register_many`] does.
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

/// Converts views of buffers to views of addresses. Also returns the index of each view's buffer.
fn ranges_of(held: &[Held], views: &[BufferView]) -> Result<(Vec<View>, Vec<u32>)> {
    let range_of = |(index, view): (usize, &BufferView)| {
        let BufferView { buffer, offset, len, access } = *view;
        let error = || Error::new(ErrorKind::OutOfBounds, "register_many").context("view", index);
        let Some((range, _)) = held.get(buffer) else {
            return Err(error()
                .context("buffer", buffer)
                .context("buffers", held.len())
                .remedy("name a buffer of the list by its position, from 0"));
        };
        match range.slice(offset, len) {
            Some(range) => Ok((View { range, access }, buffer as u32)),
            None => Err(error()
                .context("offset", offset)
                .context("length", len)
                .context("buffer", range)
                .remedy("offset + length must lie in the buffer")),
        }
    };
    views.iter().enumerate().map(range_of).collect()
}

/// A registered view: the index of its region in the list of regions, and the view's address range.
#[derive(Clone, Copy, Debug)]
struct Placed {
    region: u32,
    range: AddressRange,
}

/// Views that were registered with one call, in the order of the request.
///
/// Dropping the value drops the regions.
pub struct RegionViews {
    regions: Vec<MemoryRegion>,
    views: Vec<Placed>,
}

impl RegionViews {
    /// Returns the view at a position in the request, or `None` if the position is too large.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<RegionView<'_>> {
        let Placed { region, range } = *self.views.get(index)?;
        Some(RegionView { region: &self.regions[region as usize], range })
    }

    /// Returns the views in the order of the request.
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

    /// Returns the regions, each with one or more views. A grown region that would be staged, and
    /// that the driver refused to close, has no views. In a value that an error returned, these are
    /// the regions that could not be closed.
    #[must_use]
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Returns the remote key of each view, in the order of the request.
    ///
    /// # Errors
    /// The errors of [`RegionView::key`].
    pub fn keys(&self) -> Result<Vec<RemoteKey>> {
        self.iter().map(|view| view.key()).collect()
    }

    /// Closes all regions.
    ///
    /// # Errors
    /// The first error of [`MemoryRegion::close`]. The call tries to close every region. The error
    /// returns the regions that could not be closed. They still work, but their views are gone.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.close_each() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn close_each(&mut self) -> Result<()> {
        self.views.clear();
        close_each(&mut self.regions)
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

/// A part of a region. The region may cover more memory and have other views.
#[derive(Clone, Copy, Debug)]
pub struct RegionView<'r> {
    region: &'r MemoryRegion,
    range: AddressRange,
}

impl<'r> RegionView<'r> {
    /// Returns the range of the view.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Returns the rights of the region. A cached region may have more rights than the lookup asked
    /// for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.region.access()
    }

    /// Returns the region. It may cover more memory than the view.
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

    /// Returns the remote key of the view's range.
    ///
    /// If the region covers more memory, the NIC does not enforce the view's bounds: see
    /// [`Growth`].
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::key`] and [`RemoteKey::narrow`].
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
    /// The errors of [`MemoryRegion::desc`].
    pub fn desc(&self) -> Result<LocalKey> {
        self.region.desc()
    }

    /// Returns a part of the view for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the part reaches outside the view.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::within(self.region, self.range, offset, len)
    }
}

/// Buffers of which parts (views) were registered with one call. The regions own the buffers.
///
/// Derefs to the [`RegionViews`]. Access the bytes through [`RegisteredViews::read`] and
/// [`RegisteredViews::write`], which copy.
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

    /// Fills `into` with the bytes of a buffer from `offset` on. `buffer` is the buffer's position
    /// in the list.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if there is no such buffer, or the bytes are not all in it.
    /// - The error of the device that the memory belongs to.
    pub fn read(&self, buffer: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        B::read(self.parts(buffer)?, offset, into)
    }

    /// Copies `from` to the bytes of a buffer from `offset` on. `buffer` is the buffer's position
    /// in the list.
    ///
    /// # Errors
    /// The errors of [`RegisteredViews::read`].
    pub fn write(&self, buffer: usize, offset: u64, from: &[u8]) -> Result<()> {
        B::write(self.parts(buffer)?, offset, from)
    }

    /// Closes all regions and returns the buffers, in the order of the list.
    ///
    /// # Errors
    /// - The errors of [`RegionViews::close`]. The error returns the regions that are left, with
    ///   the buffers.
    /// - [`ErrorKind::Driver`] if a registration panicked. Its buffer is lost, because the NIC may
    ///   still access it.
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
    /// Registers many views of raw addresses with one call: all of them, or none.
    ///
    /// As far as `growth` permits, views of one allocation with the same rights share a
    /// registration of the smallest range that contains them. If that registration fails or would
    /// be staged, each of its views is registered alone. Without growth each view has a
    /// registration of its own. The provider chooses the keys.
    ///
    /// The call always waits for the registrations, even if an event queue is bound, and causes no
    /// event.
    ///
    /// # Safety
    /// The conditions of [`Domain::regattr`], for each view. With growth, also for every byte
    /// between the views of an allocation.
    ///
    /// # Errors
    /// The errors of [`Domain::regattr`]. The context value `view` is the position of the view.
    ///
    /// After an error all regions of the call are closed, and the value of the error is empty. If a
    /// driver refuses to close a region, the value has the regions that are left. Try again to
    /// close them.
    pub unsafe fn reg_many(
        &self,
        views: &[View],
        growth: Growth,
    ) -> Result<RegionViews, Rejected<RegionViews>> {
        // SAFETY: the caller guarantees the conditions of this function, which are those of the
        // call.
        unsafe { reg_many(&self.inner, views, growth) }
    }

    /// Registers many views of buffers with one call. The regions own the buffers, so this needs no
    /// `unsafe`.
    ///
    /// Works like [`Domain::reg_many`], but `growth` never exceeds the buffer of a view.
    ///
    /// ```no_run
    /// use hmem_core::{Access, BufferView, Domain, Growth, Result};
    ///
    /// /// Registers two parts of a buffer, which share one registration.
    /// fn expose(domain: &Domain) -> Result<()> {
    ///     let view = |offset| BufferView::new(0, offset, 4096, Access::REMOTE_READ);
    ///     let views = [view(0), view(4096)];
    ///     let buffers = vec![vec![0_u8; 8192]];
    ///     let registered = domain.register_many(buffers, &views, Growth::Allocation)?;
    ///     assert_eq!((registered.len(), registered.regions().len()), (2, 1));
    ///     let _buffers = registered.close()?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Domain::reg_many`], and [`ErrorKind::OutOfBounds`] for a view outside its
    /// buffer. [`RegisteredViews::close`] of the error's value returns the buffers, unless a driver
    /// refuses to close a region.
    pub fn register_many<B: OwnedBuffer>(
        &self,
        buffers: Vec<B>,
        views: &[BufferView],
        growth: Growth,
    ) -> Result<RegisteredViews<B>, Rejected<RegisteredViews<B>>> {
        register_many(&self.inner, buffers, views, growth)
    }
}
