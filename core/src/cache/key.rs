//! What a registration is known by.

use crate::{
    Access, Address, AddressRange, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, Result,
};

/// What a registration is known by: range, rights, iface, device and allocation.
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
    /// The last address.
    pub(super) last: u64,
    pub(super) access: u32,
    /// Iface and device.
    pub(super) owner: u64,
    pub(super) allocation: u64,
    /// All ones if owner and allocation must agree, 0 if any will do.
    pub(super) exact: u64,
}

const NO_DEVICE: u32 = u32::MAX;
const NO_ALLOCATION: u64 = u64::MAX;

impl Key {
    /// Host memory.
    ///
    /// # Errors
    /// [`ErrorKind::ZeroLength`]; [`ErrorKind::BadAccess`] for a right that libfabric does not
    /// define.
    #[inline]
    pub fn new(range: AddressRange, access: Access) -> Result<Self> {
        if range.is_empty() || access.bits() & !Access::all().bits() != 0 {
            return Err(refused(range, access));
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

    /// The same of an iface and, where it is memory of one, a device.
    #[must_use]
    pub fn owned_by(self, iface: IfaceKind, device: Option<DeviceId>) -> Self {
        let device = device.map_or(NO_DEVICE, |device| device.0);
        Self { owner: u64::from(iface.0) << 32 | u64::from(device), ..self }
    }

    /// The same in one allocation of the iface.
    #[must_use]
    pub fn in_allocation(self, allocation: AllocationId) -> Self {
        Self { allocation: allocation.0, ..self }
    }

    /// The same, whoever the memory belongs to: for [`Cache::find`](super::Cache::find) only.
    #[inline]
    #[must_use]
    pub fn of_any_owner(self) -> Self {
        Self { exact: 0, ..self }
    }

    /// The range.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        AddressRange::new(Address(self.start), self.len()).expect("it was a range before")
    }

    /// The rights.
    #[must_use]
    pub fn access(&self) -> Access {
        Access::from_bits_retain(u64::from(self.access))
    }

    /// The iface.
    #[must_use]
    pub fn iface(&self) -> IfaceKind {
        IfaceKind((self.owner >> 32) as u32)
    }

    /// The device, for memory of one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        Some(DeviceId(self.owner as u32)).filter(|device| device.0 != NO_DEVICE)
    }

    /// The allocation, where one was named.
    #[must_use]
    pub fn allocation(&self) -> Option<AllocationId> {
        Some(AllocationId(self.allocation)).filter(|allocation| allocation.0 != NO_ALLOCATION)
    }

    pub(super) fn len(&self) -> u64 {
        self.last - self.start + 1
    }

    /// Whether the two may be merged: the same rights of the same memory.
    pub(super) fn joins(&self, other: &Self) -> bool {
        (self.access, self.owner, self.allocation) == (other.access, other.owner, other.allocation)
            && self.start <= other.last.saturating_add(1)
            && other.start <= self.last.saturating_add(1)
    }
}

#[cold]
fn refused(range: AddressRange, access: Access) -> Error {
    let kind = if range.is_empty() { ErrorKind::ZeroLength } else { ErrorKind::BadAccess };
    Error::new(kind, "cached registration").context("range", range).context("access", access)
}
