//! The ifaces of a process, and the owner of each address.
//!
//! Ifaces that could not start are kept with their reasons, so that asking for one names the
//! library or the cargo feature instead of failing later with a bare errno.

use std::{fmt, sync::Arc};

use crate::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface,
    IfaceKind, Result,
};

/// The owner of a range: iface, device if it has one, and allocation if the iface keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressOwner {
    /// The iface.
    pub iface: IfaceKind,
    /// The device, for device memory.
    pub device: Option<DeviceId>,
    /// The allocation; `None` for system memory.
    pub allocation: Option<Allocation>,
}

impl AddressOwner {
    /// Host memory of the operating system.
    pub const SYSTEM: Self = Self { iface: IfaceKind::SYSTEM, device: None, allocation: None };

    /// Returns the owner of an allocation.
    #[must_use]
    pub const fn of(allocation: &Allocation) -> Self {
        let Allocation { iface, device, .. } = *allocation;
        Self { iface, device, allocation: Some(*allocation) }
    }
}

/// An iface of devices, and the addresses that it is asked about.
struct Asked {
    first: Address,
    /// Bytes from the first address to the last.
    span: u64,
    iface: Arc<dyn Iface>,
}

impl Asked {
    fn new(iface: Arc<dyn Iface>) -> Self {
        let (first, span) = match iface.address_span() {
            Some(span) => (span.start(), span.len().saturating_sub(1)),
            None => (Address(0), u64::MAX),
        };
        Self { first, span, iface }
    }

    /// Returns false if the iface's address span excludes an address.
    #[inline]
    fn may_hold(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.first.0) <= self.span
    }
}

/// The ifaces of this process: those that started, and why the others did not.
///
/// Built once and then read by every thread without a lock.
#[derive(Default)]
pub struct Registry {
    system: Option<Arc<dyn Iface>>,
    devices: Vec<Asked>,
    absent: Vec<(IfaceKind, Error)>,
}

impl Registry {
    /// A registry without ifaces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an iface.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if its kind is taken.
    pub fn add(&mut self, iface: Arc<dyn Iface>) -> Result<()> {
        let kind = iface.kind();
        if self.iter().any(|known| known.kind() == kind) {
            return Err(Error::new(ErrorKind::InvalidArgument, "add iface")
                .iface(kind)
                .context("name", iface.name())
                .remedy(
                    "each iface kind can be added once; plug-ins take a number from 0x100 up",
                ));
        }
        if kind == IfaceKind::SYSTEM {
            self.system = Some(iface);
        } else {
            self.devices.push(Asked::new(iface));
        }
        Ok(())
    }

    /// Records why an iface is not here.
    pub fn add_absent(&mut self, kind: IfaceKind, why: Error) {
        self.absent.push((kind, why));
    }

    /// Every iface that started, system first.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Iface>> {
        self.system.iter().chain(self.devices.iter().map(|device| &device.iface))
    }

    /// The ifaces that did not start, with the reason.
    pub fn absent(&self) -> impl Iterator<Item = (IfaceKind, &Error)> {
        self.absent.iter().map(|(kind, error)| (*kind, error))
    }

    /// The iface of a kind.
    ///
    /// # Errors
    /// Unavailable or Unsupported with the reason that the iface gave when it did not start;
    /// InvalidArgument for a kind that nobody added.
    pub fn get(&self, kind: IfaceKind) -> Result<&Arc<dyn Iface>> {
        self.iter().find(|iface| iface.kind() == kind).ok_or_else(|| {
            match self.absent.iter().find(|(absent, _)| *absent == kind) {
                Some((_, why)) => {
                    let mut error = Error::new(why.kind(), "iface").iface(kind).context("why", why);
                    if let Some(remedy) = why.remedy_text() {
                        error = error.remedy(remedy.to_owned());
                    }
                    error
                }
                None => Error::new(ErrorKind::InvalidArgument, "iface")
                    .iface(kind)
                    .remedy("add the iface to the builder before using its memory"),
            }
        })
    }

    /// The owner of one address: the device iface that knows it, or the system. Host memory of the
    /// application that a device API page-locked stays the system's: the device knows a part of
    /// it, and may cease to at any time.
    ///
    /// # Errors
    /// A failed driver call.
    #[inline]
    pub fn owner_of(&self, address: Address) -> Result<AddressOwner> {
        for device in self.devices.iter().filter(|device| device.may_hold(address)) {
            let answer = device.iface.query(address);
            // By reference: moving the answer would be a wide load right behind the narrow stores
            // that made it.
            match &answer {
                Ok(Some(allocation)) if is_claimed(allocation) => {
                    return Ok(AddressOwner::of(allocation));
                }
                Ok(_) => {}
                Err(_) => {
                    answer?;
                }
            }
        }
        Ok(AddressOwner::SYSTEM)
    }

    /// Returns the error for memory that is not of the iface which a caller claims: another iface
    /// has it, or none knows it.
    #[cold]
    pub(crate) fn refuse_claim(
        &self,
        operation: &'static str,
        range: AddressRange,
        owner: &AddressOwner,
        claimed: IfaceKind,
    ) -> Error {
        let known = match self.get(claimed).and_then(|iface| iface.query(range.start())) {
            Ok(known) => known,
            Err(error) => return error,
        };
        let error = Error::new(ErrorKind::InvalidArgument, operation)
            .iface(claimed)
            .context("range", range);
        if owner.iface == IfaceKind::SYSTEM && known.is_none() {
            return error
                .context("why", "the iface does not know the address: it was freed, belongs to another process, or is host memory")
                .remedy(
                    "register memory that this process allocated and has not freed, or opened by an IPC handle; for host \
                     memory name the system iface, or none",
                );
        }
        error.context("owner", owner.iface).remedy(
            "the memory belongs to another iface: name that one, or none to have it found out",
        )
    }

    /// Returns the owner of a whole range.
    ///
    /// Each iface is queried once if the range lies in one page: host memory and device memory
    /// share no page. Otherwise host memory is queried at both ends, since devices' memory may
    /// begin at the next page.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the range leaves the allocation that its first byte lies in
    /// (several adjacent allocations are not one), or ends in one that it does not begin in. A
    /// device allocation in the middle of a range of host memory is not looked for.
    pub fn owner_of_range(&self, range: AddressRange) -> Result<AddressOwner> {
        let owner = self.owner_of(range.start())?;
        let crossed = match owner.allocation {
            Some(allocation) => Some(allocation).filter(|whole| !whole.range.contains_range(range)),
            None => match ends(range).1 {
                Some(last) => self.owner_of(last)?.allocation,
                None => None,
            },
        };
        match crossed {
            None => Ok(owner),
            Some(allocation) => Err(Error::new(ErrorKind::OutOfBounds, "owner of range")
                .iface(allocation.iface)
                .context("range", range)
                .context("allocation", allocation.range)
                .remedy("the range must lie in one allocation")),
        }
    }
}

/// Bytes of the smallest page that there is. Devices' memory and host memory share none.
const PAGE: u64 = 4096;

/// The first byte of a range, and the last one if it lies in another page.
fn ends(range: AddressRange) -> (Address, Option<Address>) {
    let (first, last) = (range.start().0, range.start().0 + range.len().saturating_sub(1));
    (Address(first), (first / PAGE != last / PAGE).then_some(Address(last)))
}

fn is_claimed(allocation: &Allocation) -> bool {
    allocation.kind != AllocationKind::HostRegistered
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("ifaces", &self.iter().map(|iface| iface.name()).collect::<Vec<_>>())
            .field("absent", &self.absent().map(|(kind, _)| kind).collect::<Vec<_>>())
            .finish()
    }
}
