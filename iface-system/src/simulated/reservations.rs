//! Reserved addresses, in which an application maps memory by hand.

use std::collections::BTreeMap;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Result,
    iface::AllocRequest,
};

use super::{Simulated, SimulatedInner, faults::DeviceCall, ranges::FreeRanges};

/// The reservations of a simulated iface. Addresses are offsets in the iface's window, and lengths
/// are whole pages.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// The reservations by start address. Each has its length, and the set of its addresses that
    /// have no memory.
    by_start: BTreeMap<u64, (u64, FreeRanges)>,
}

impl Reservations {
    /// Finds the reservation that contains the range, and returns the set of its addresses that
    /// have no memory.
    fn around(&mut self, at: u64, len: u64) -> Option<&mut FreeRanges> {
        let (start, (reserved, free)) = self.by_start.range_mut(..=at).next_back()?;
        (at.checked_add(len)? <= start + *reserved).then_some(free)
    }

    /// Marks addresses of a reservation as ones that have memory. Returns false, and changes
    /// nothing, if they are not all in one reservation or if some of them have memory already.
    pub(crate) fn take(&mut self, at: u64, len: u64) -> bool {
        self.around(at, len).is_some_and(|free| free.take_at(at, len))
    }

    /// Returns addresses to their reservation. Returns false if they are in no reservation.
    pub(crate) fn give(&mut self, at: u64, len: u64) -> bool {
        self.around(at, len).map(|free| free.give(at, len)).is_some()
    }
}

impl Simulated {
    /// Reserves addresses without memory, like `cuMemAddressReserve`. [`Simulated::map`] maps
    /// memory there.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for a length of 0.
    /// - [`ErrorKind::OutOfResources`] if the window of addresses is used up.
    pub fn reserve(&self, len: u64) -> Result<AddressRange> {
        let refused =
            |kind| Error::new(kind, "reserve").iface(&self.inner.config).context("length", len);
        if len == 0 {
            return Err(refused(ErrorKind::ZeroLength).remedy("reserve at least one byte"));
        }
        let used_up = || {
            refused(ErrorKind::OutOfResources)
                .remedy("the window of addresses is used up: build the device with a larger one")
        };
        let len = self.inner.whole_pages(len).ok_or_else(used_up)?;
        self.inner.call(DeviceCall::ReserveAddress)?;
        let mut state = self.inner.state.lock();
        let at = state.addresses.take(len).ok_or_else(used_up)?;
        state.reservations.by_start.insert(at, (len, FreeRanges::new(at, len)));
        AddressRange::new(Address(self.inner.window_start() + at), len)
    }

    /// Maps new memory of a device at reserved addresses, and fills it with zeroes. The mapping is
    /// an allocation of the kind [`AllocationKind::Virtual`] with an identity of its own.
    /// [`IfaceExt::free`](hmem_core::IfaceExt::free) unmaps it, and its addresses stay reserved.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] for addresses that do not begin at a page, that are not all
    ///   in one reservation, or that have memory.
    /// - The errors of [`IfaceExt::allocate`](hmem_core::IfaceExt::allocate).
    pub fn map(&self, range: AddressRange, device: DeviceId) -> Result<Allocation> {
        if !range.start().0.is_multiple_of(self.inner.page) {
            return Err(Error::new(ErrorKind::InvalidArgument, "map")
                .iface(&self.inner.config)
                .context("range", range)
                .context("page size", self.inner.page)
                .remedy("map at the start of a page"));
        }
        let request = AllocRequest { len: range.len(), device, kind: AllocationKind::Virtual };
        self.inner.allocate_at(&request, Some(range.start()))
    }

    /// Ends a reservation, like `cuMemAddressFree`.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] for a range that [`Simulated::reserve`] did not return.
    /// - [`ErrorKind::Busy`] while memory is mapped in the reservation.
    pub fn unreserve(&self, reserved: AddressRange) -> Result<()> {
        let inner: &SimulatedInner = &self.inner;
        let refused = |kind, remedy| {
            Err(Error::new(kind, "unreserve")
                .iface(&inner.config)
                .context("range", reserved)
                .remedy(remedy))
        };
        let mut state = inner.state.lock();
        let at = reserved.start().0.wrapping_sub(inner.window_start());
        let Some((len, free)) = state.reservations.by_start.get_mut(&at) else {
            return refused(ErrorKind::InvalidArgument, "pass a range of Simulated::reserve, once");
        };
        let len = *len;
        if len != reserved.len() {
            return refused(ErrorKind::InvalidArgument, "pass the whole reservation");
        }
        if !free.take_at(at, len) {
            return refused(ErrorKind::Busy, "unmap the memory of the reservation first");
        }
        state.reservations.by_start.remove(&at);
        state.addresses.give(at, len);
        Ok(())
    }
}
