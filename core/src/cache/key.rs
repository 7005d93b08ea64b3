//! The key that identifies a registration in a cache.

use crate::{
    Access, Address, AddressRange, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, Result,
};

/// Identity of a registration: range, access rights, iface, device and allocation.
///
/// ```
/// use hmem_core::{Access, Address, AddressRange, AllocationId, DeviceId, IfaceKind, cache::Key};
///
/// let range = AddressRange::new(Address(0x1000), 4096)?;
/// let host = Key::new(range, Access::SEND)?;
/// let device = host.owned_by(IfaceKind::CUDA, Some(DeviceId(1))).in_allocation(AllocationId(7));
/// assert_ne!(host, device);
/// assert_eq!(device.range(), range);
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub(super) start: u64,
    /// The last address of the range.
    pub(super) last: u64,
    pub(super) access: u32,
    /// The iface in the upper 32 bits and the device in the lower 32 bits.
    pub(super) owner: u64,
    pub(super) allocation: u64,
    /// A mask: all ones if iface, device and allocation must match, 0 if the key matches memory of
    /// every iface, device and allocation.
    pub(super) exact: u64,
}

const NO_DEVICE: u32 = u32::MAX;
const NO_ALLOCATION: u64 = u64::MAX;

impl Key {
    /// Creates the key of host memory.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for an empty range.
    /// - [`ErrorKind::BadAccess`] for a bit that [`Access`] does not define.
    #[inline]
    pub fn new(range: AddressRange, access: Access) -> Result<Self> {
        if range.is_empty() || access.bits() & !Access::all().bits() != 0 {
            return Err(invalid(range, access));
        }
        Ok(Self {
            start: range.start().0,
            last: range.start().0 + (range.len() - 1),
            access: access.bits() as u32,
            owner: u64::from(NO_DEVICE),
            allocation: NO_ALLOCATION,
            exact: u64::MAX,
        })
    }

    /// Sets the iface and, for device memory, the device.
    #[must_use]
    pub fn owned_by(self, iface: IfaceKind, device: Option<DeviceId>) -> Self {
        let device = device.map_or(NO_DEVICE, |device| device.0);
        Self { owner: u64::from(iface.0) << 32 | u64::from(device), ..self }
    }

    /// Sets the allocation, by the ID that the iface gave it.
    #[must_use]
    pub fn in_allocation(self, allocation: AllocationId) -> Self {
        Self { allocation: allocation.0, ..self }
    }

    /// Makes the key match memory of every iface, device and allocation. The returned key is for
    /// [`Cache::find`](super::Cache::find). A call that would register memory for the
    /// key fails with [`ErrorKind::InvalidArgument`].
    #[inline]
    #[must_use]
    pub fn of_any_owner(self) -> Self {
        Self { exact: 0, ..self }
    }

    /// Returns the range of the registration.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        AddressRange::new(Address(self.start), self.len()).expect("it was a range before")
    }

    /// Returns the access rights of the registration.
    #[must_use]
    pub fn access(&self) -> Access {
        Access::from_bits_retain(u64::from(self.access))
    }

    /// Returns the iface that owns the memory.
    #[must_use]
    pub fn iface(&self) -> IfaceKind {
        IfaceKind((self.owner >> 32) as u32)
    }

    /// Returns the device that owns the memory, or `None` if the key names no device.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        Some(DeviceId(self.owner as u32)).filter(|device| device.0 != NO_DEVICE)
    }

    /// Returns the allocation that contains the memory, or `None` if the key names no allocation.
    #[must_use]
    pub fn allocation(&self) -> Option<AllocationId> {
        Some(AllocationId(self.allocation)).filter(|allocation| allocation.0 != NO_ALLOCATION)
    }

    /// Returns an error if the key is [of any owner](Key::of_any_owner), because the backend needs
    /// the memory's owner to register it.
    pub(super) fn check_owner(&self) -> Result<()> {
        if self.exact == 0 { Err(ownerless(self)) } else { Ok(()) }
    }

    pub(super) fn len(&self) -> u64 {
        self.last - self.start + 1
    }

    /// Returns whether two registrations can be merged: adjacent or overlapping ranges with the
    /// same rights, iface, device and allocation.
    pub(super) fn is_mergeable_with(&self, other: &Self) -> bool {
        (self.access, self.owner, self.allocation) == (other.access, other.owner, other.allocation)
            && self.start <= other.last.saturating_add(1)
            && other.start <= self.last.saturating_add(1)
    }
}

#[cold]
fn ownerless(key: &Key) -> Error {
    Error::new(ErrorKind::InvalidArgument, "cached registration")
        .context("range", key.range())
        .remedy(
            "pass a key with the owner of the memory: this one, `of_any_owner`, only finds regions",
        )
}

#[cold]
fn invalid(range: AddressRange, access: Access) -> Error {
    let kind = if range.is_empty() { ErrorKind::ZeroLength } else { ErrorKind::BadAccess };
    Error::new(kind, "cached registration").context("range", range).context("access", access)
}
