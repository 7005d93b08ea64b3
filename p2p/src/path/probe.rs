//! Probes: a page is allocated, exported and registered, and all of it is undone, to find out what
//! a device and a NIC can do.
//!
//! A registration whose first path works needs no probe. After a refusal the buffer itself may be
//! at fault, and then its refusal says nothing about others. An ordinary page of the same kind
//! tells the two cases apart.

use std::sync::Arc;

use hmem_core::{
    Allocation, AllocationKind, Decision, DeviceId, ErrorKind, Iface, IfaceExt, MrFlags, Result,
    iface::AllocRequest,
    path::Attempt,
    registration::{KeyRequest, Memory, Registration},
    registry::AddressOwner,
};

use super::{exports::ExportSet, search::PathSearch, variant::PathVariant};

/// The result of a probe.
#[derive(Debug)]
pub(super) enum ProbeResult {
    /// This direct path works.
    Direct(PathVariant, Box<Decision>),
    /// No direct path works, and another attempt would not help.
    NoDirect(Vec<Attempt>),
    /// Nothing that holds for other buffers: no page could be allocated, or a refusal may pass.
    Unknown,
}

/// Retries an undo once: nobody else will do it.
fn twice(what: &'static str, undo: impl Fn() -> Result<()>) -> Result<()> {
    undo().or_else(|error| {
        tracing::warn!(what, %error, "the page of a probe was not released; trying again");
        undo()
    })
}

/// Tries the direct paths with a page of the search's iface, device and kind.
///
/// A device that the process does not use is not probed: the state that its driver makes for the
/// first allocation (CUDA's primary context) would stay behind. Registrations of its memory then
/// each find their own path.
pub(super) fn probe(search: &PathSearch<'_>) -> ProbeResult {
    let span = tracing::debug_span!("probe", iface = %search.owner.iface, nic = %search.attr().nic);
    let _entered = span.enter();
    let Memory::Device { iface, .. } = &search.registration.memory else {
        return ProbeResult::Unknown;
    };
    match iface.is_device_active(device_of(search)) {
        Ok(true) => {}
        Ok(false) => return ProbeResult::Unknown,
        Err(error) => {
            tracing::debug!(%error, "no page to try with");
            return ProbeResult::Unknown;
        }
    }
    match Page::allocate(search, iface, search.kind) {
        Ok(page) => page.try_out(),
        // A kind that cannot be allocated by itself (a mapping of several) fares no better than
        // plain device memory.
        Err(ErrorKind::Unsupported) if search.kind != AllocationKind::Device => {
            match Page::allocate(search, iface, AllocationKind::Device).map(Page::try_out) {
                Ok(ProbeResult::NoDirect(attempts)) => ProbeResult::NoDirect(attempts),
                Ok(_) | Err(_) => ProbeResult::Unknown,
            }
        }
        Err(_) => ProbeResult::Unknown,
    }
}

fn device_of(search: &PathSearch<'_>) -> DeviceId {
    search.owner.device.unwrap_or(DeviceId(0))
}

/// A page of device memory, freed on drop.
struct Page<'a> {
    search: &'a PathSearch<'a>,
    iface: &'a Arc<dyn Iface>,
    allocation: Allocation,
    /// Set if a NIC may still reach the page, which is then leaked.
    stuck: bool,
}

impl<'a> Page<'a> {
    fn allocate(
        search: &'a PathSearch<'a>,
        iface: &'a Arc<dyn Iface>,
        kind: AllocationKind,
    ) -> Result<Self, ErrorKind> {
        let len = rustix::param::page_size() as u64;
        match iface.allocate(&AllocRequest { len, device: device_of(search), kind }) {
            Ok(allocation) => Ok(Self { search, iface, allocation, stuck: false }),
            Err(error) => {
                tracing::debug!(%error, "no page to try with");
                Err(error.kind())
            }
        }
    }

    fn try_out(mut self) -> ProbeResult {
        let ranges = [self.allocation.range];
        let owner = AddressOwner {
            iface: self.search.owner.iface,
            device: self.allocation.device,
            allocation: Some(self.allocation),
        };
        let registration = Registration {
            ranges: &ranges,
            memory: Memory::Device { iface: self.iface, owner, owned: true },
            key: KeyRequest::Provider,
            flags: MrFlags::empty(),
            page_size: 0,
            ..*self.search.registration
        };
        let mut exports = ExportSet::new(self.iface, &ranges);
        let mut search = self.search.restart(&registration, &owner);
        // Until it is known that no NIC has the page, also during a panic.
        self.stuck = true;
        // SAFETY: this function owns the page, nobody refers to its bytes, and it is freed only
        // after it was deregistered.
        let direct = unsafe { search.direct(&mut exports, None) };
        search.note(exports.close());
        match direct {
            Some((variant, region)) => {
                if let Err(error) = twice("deregister", || search.provider.deregister(region)) {
                    tracing::error!(%error, "the page of a probe could not be deregistered; it is leaked");
                    return ProbeResult::Unknown;
                }
                self.stuck = false;
                let reason = "a page of the same kind was registered in this way";
                ProbeResult::Direct(variant, Box::new(search.decision(variant, reason)))
            }
            None => {
                self.stuck = false;
                match search.may_pass {
                    true => ProbeResult::Unknown,
                    false => ProbeResult::NoDirect(search.into_attempts()),
                }
            }
        }
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        if self.stuck {
            return;
        }
        // SAFETY: no reference to the page was made, and no NIC has it any more.
        if let Err(error) = twice("free", || unsafe { self.iface.free(&self.allocation) }) {
            tracing::error!(%error, "the page of a probe could not be freed");
        }
    }
}
