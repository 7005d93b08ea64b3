//! The ifaces of a process, and the owner of each address.
//!
//! The registry also keeps the reason why an iface could not start. An application that asks for
//! such an iface gets that reason, which names the library or the cargo feature.

use std::{fmt, sync::Arc};

use crate::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface,
    IfaceKind, IfaceName, Result,
};

/// The owner of a memory range: the iface, the device and the allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressOwner {
    /// The iface that owns the memory.
    pub iface: IfaceKind,
    /// The device. `None` if the memory belongs to no device.
    pub device: Option<DeviceId>,
    /// The allocation. `None` for system memory.
    pub allocation: Option<Allocation>,
}

impl AddressOwner {
    /// The owner of ordinary host memory.
    pub const SYSTEM: Self = Self { iface: IfaceKind::SYSTEM, device: None, allocation: None };

    /// Returns the owner of an allocation.
    #[must_use]
    pub const fn of(allocation: &Allocation) -> Self {
        let Allocation { iface, device, .. } = *allocation;
        Self { iface, device, allocation: Some(*allocation) }
    }
}

/// A device iface, and the addresses for which it is queried.
struct DeviceIface {
    /// The first address of [`Iface::address_span`].
    first: Address,
    /// The length of the address span in bytes, minus 1 so that the whole address space fits.
    span: u64,
    iface: Arc<dyn Iface>,
}

impl DeviceIface {
    fn new(iface: Arc<dyn Iface>) -> Self {
        let (first, span) = match iface.address_span() {
            Some(span) => (span.start(), span.len().saturating_sub(1)),
            None => (Address(0), u64::MAX),
        };
        Self { first, span, iface }
    }

    /// Returns false if `address` is outside the iface's address span.
    #[inline]
    fn may_hold(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.first.0) <= self.span
    }
}

/// The ifaces of a process: those that started, and the reasons why the others did not.
///
/// A registry does not change after it was built, so all threads read it without a lock.
#[derive(Default)]
pub struct Registry {
    system: Option<Arc<dyn Iface>>,
    devices: Vec<DeviceIface>,
    absent: Vec<(IfaceKind, Error)>,
}

impl Registry {
    /// Creates a registry without ifaces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an iface.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the registry has an iface of the same kind, or if the kind
    /// is neither libfabric's nor a plug-in's.
    pub fn add(&mut self, iface: Arc<dyn Iface>) -> Result<()> {
        let kind = iface.kind();
        if kind.name().is_none() && !kind.is_plug_in() {
            return Err(Error::new(ErrorKind::InvalidArgument, "add iface")
                .iface(kind)
                .context("name", iface.name())
                .remedy("return a number from 0x100 up from Iface::kind"));
        }
        if self.iter().any(|known| known.kind() == kind) {
            return Err(Error::new(ErrorKind::InvalidArgument, "add iface").iface(&iface).remedy(
                "add each iface once, and give each plug-in a number of its own, from 0x100 up",
            ));
        }
        if kind == IfaceKind::SYSTEM {
            self.system = Some(iface);
        } else {
            self.devices.push(DeviceIface::new(iface));
        }
        Ok(())
    }

    /// Records the reason why an iface did not start.
    pub fn add_absent(&mut self, kind: IfaceKind, why: Error) {
        self.absent.push((kind, why));
    }

    /// Returns the ifaces that started, the system iface first.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Iface>> {
        self.system.iter().chain(self.devices.iter().map(|device| &device.iface))
    }

    /// Returns the ifaces that did not start, each with the reason.
    pub fn absent(&self) -> impl Iterator<Item = (IfaceKind, &Error)> {
        self.absent.iter().map(|(kind, error)| (*kind, error))
    }

    /// Returns the iface of the given kind.
    ///
    /// # Errors
    /// - For an iface that did not start, an error whose source is the reason that
    ///   [`Registry::add_absent`] recorded. The error has the kind of that reason, such as
    ///   [`ErrorKind::Unavailable`].
    /// - [`ErrorKind::InvalidArgument`] for a kind that was never added.
    pub fn get(&self, kind: IfaceKind) -> Result<&Arc<dyn Iface>> {
        self.iter().find(|iface| iface.kind() == kind).ok_or_else(|| {
            match self.absent.iter().find(|(absent, _)| *absent == kind) {
                Some((_, why)) => {
                    Error::new(why.kind(), "iface").iface(self.name_of(kind)).caused_by(why.clone())
                }
                None => Error::new(ErrorKind::InvalidArgument, "iface")
                    .iface(kind)
                    .remedy("add the iface to the builder before using its memory"),
            }
        })
    }

    /// Returns the registered name of an iface, for messages. For a kind that the registry does not
    /// have, the result has only the number.
    #[must_use]
    pub fn name_of(&self, kind: IfaceKind) -> IfaceName {
        let started = self.iter().find(|iface| iface.kind() == kind);
        let absent = || self.absent().find(|(absent, _)| *absent == kind);
        (started.map(IfaceName::from))
            .or_else(|| absent()?.1.iface_name().cloned())
            .unwrap_or_else(|| kind.into())
    }

    /// Returns the owner of an address: the first device iface that claims the address, or else the
    /// system iface.
    ///
    /// Host memory of the application belongs to the system iface even if a device API has
    /// page-locked it. The reason is that only part of the memory may be page-locked, and that the
    /// page-lock may end at any time.
    ///
    /// # Errors
    /// The error of a failed driver call.
    #[inline]
    pub fn owner_of(&self, address: Address) -> Result<AddressOwner> {
        for device in self.devices.iter().filter(|device| device.may_hold(address)) {
            let answer = device.iface.query(address);
            // The match borrows `answer` for speed. A move would be a wide load right after narrow
            // stores, which stalls the processor.
            match &answer {
                Ok(Some(allocation)) if allocation.kind != AllocationKind::HostRegistered => {
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

    /// Returns the error for memory that does not belong to the iface `claimed`. If the lookup or
    /// the query of that iface fails, returns the error of the failed call instead.
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
            .iface(self.name_of(claimed))
            .context("range", range);
        if owner.iface != IfaceKind::SYSTEM || known.is_some() {
            return error
                .context("owner", self.name_of(owner.iface))
                .remedy("name the iface that owns the memory, or none to detect it");
        }
        let Some(before) = range.start().0.checked_sub(1) else {
            return error
                .context("why", "the iface does not know the address, which is null")
                .remedy("check that the allocation succeeded: a null pointer has no memory");
        };
        match self.owner_of(Address(before)).map(|owner| owner.allocation) {
            Ok(Some(ended)) if ended.iface == claimed => error
                .context("allocation", ended.range)
                .context(
                    "why",
                    "the iface does not know the address, which is one past the end of an \
                     allocation: the range is outside, or its memory was freed",
                )
                .remedy("register a range inside an allocation that has not been freed"),
            _ => error
                .context(
                    "why",
                    "the iface does not know the address: it was freed, belongs to another \
                     process, or is host memory",
                )
                .remedy(
                    "register memory that this process allocated and has not freed, or opened by \
                     an IPC handle; for host memory name the system iface, or none",
                ),
        }
    }

    /// Returns the owner of a whole range.
    ///
    /// If the range lies in one page, each iface is queried at most once, because no page has both
    /// host memory and device memory. Otherwise, if the first address is host memory, the last
    /// address is queried too.
    ///
    /// # Errors
    /// The errors of [`Registry::owner_of`], and [`ErrorKind::OutOfBounds`] in two cases:
    ///
    /// - The range extends past the allocation of its first byte. Adjacent allocations do not count
    ///   as one allocation.
    /// - The range begins in host memory and ends in a device allocation.
    ///
    /// The call does not detect a device allocation in the middle of a range of host memory.
    pub fn owner_of_range(&self, range: AddressRange) -> Result<AddressOwner> {
        let owner = self.owner_of(range.start())?;
        let crossed = match owner.allocation {
            Some(allocation) => Some(allocation).filter(|whole| !whole.range.contains_range(range)),
            None => match last_in_another_page(range) {
                Some(last) => self.owner_of(last)?.allocation,
                None => None,
            },
        };
        match crossed {
            None => Ok(owner),
            Some(allocation) => Err(Error::new(ErrorKind::OutOfBounds, "owner of range")
                .iface(self.name_of(allocation.iface))
                .context("range", range)
                .context("allocation", allocation.range)
                .remedy("register a range inside one allocation")),
        }
    }
}

/// Returns the last address of a range, or `None` if the last address lies in the page of the
/// first. No page has both host memory and device memory.
fn last_in_another_page(range: AddressRange) -> Option<Address> {
    let page = rustix::param::page_size() as u64;
    let (first, last) = (range.start().0, range.start().0 + range.len().saturating_sub(1));
    (first / page != last / page).then_some(Address(last))
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("ifaces", &self.iter().map(|iface| iface.name()).collect::<Vec<_>>())
            .field("absent", &self.absent().map(|(kind, _)| self.name_of(kind)).collect::<Vec<_>>())
            .finish()
    }
}
