//! Probes: the selector allocates, exports and registers one page, and undoes all of it. The result
//! shows which paths work for a device and a NIC.
//!
//! A registration with one NIC that succeeds on its first path needs no probe. If a path is
//! refused, either the buffer is unusual or the path does not work at all. An ordinary page of the
//! same kind shows which. A registration with several NICs probes first, because they share one
//! export.

#![allow(unsafe_code, reason = "registers and frees the page of a probe")]

use std::sync::Arc;

use hmem_core::{
    Access, Allocation, AllocationKind, Decision, DeviceId, Error, ErrorKind, Iface, IfaceExt,
    MrFlags, Result, WriteOrdering,
    iface::AllocRequest,
    path::{Attempt, Target},
    provider::ProviderRegion,
    registration::{KeyRequest, RegisteredMemory, Registration},
    registry::AddressOwner,
};

use super::{exports::ExportSet, search::PathSearch, variant::PathVariant};

/// The result of a probe.
#[derive(Debug)]
pub(super) enum ProbeResult {
    /// The direct path in the first field works. The decision contains the attempts of the probe.
    Direct(PathVariant, Box<Decision>),
    /// No direct path works, and a later attempt would fail too. The attempts show why.
    NoDirect(Vec<Attempt>),
    /// The result says nothing about other buffers, for one of these reasons:
    ///
    /// - The process does not use the device, or the driver does not tell whether it does.
    /// - No page could be allocated.
    /// - The page is of another kind than the memory, and a direct path works for the page.
    /// - A refusal may be temporary.
    /// - The page could not be deregistered.
    /// - A reach check could not run.
    Unknown,
}

/// Runs `undo`, and once more if it fails, because no later code releases the probe's page.
pub(super) fn retry_once(what: &'static str, undo: impl Fn() -> Result<()>) -> Result<()> {
    undo().or_else(|error| {
        tracing::warn!(
            what,
            error = %error.full(),
            "the page of a probe was not released; trying again"
        );
        undo()
    })
}

/// Tries the direct paths with one page of the same iface, device and kind of memory as `search`.
/// If the iface cannot allocate that kind by itself, tries them with a page of plain device memory.
/// Errors of the probe itself are only logged.
///
/// A device that the process does not use is not probed. The first allocation would make the
/// device's driver create state that remains (CUDA's primary context). Without a probe, each
/// registration of that device's memory searches for its own path.
pub(super) fn probe(search: &PathSearch<'_>) -> ProbeResult {
    let span =
        tracing::debug_span!("probe", iface = %search.iface_name(), nic = %search.attr().nic);
    let _entered = span.enter();
    let RegisteredMemory::Device { iface, .. } = &search.registration.memory else {
        return ProbeResult::Unknown;
    };
    let active = iface.is_device_active(device_of(search)).inspect_err(note_failure);
    if !active.unwrap_or(false) {
        return ProbeResult::Unknown;
    }
    match Page::allocate(search, iface, search.kind).map_err(|error| error.kind()) {
        Ok(page) => page.try_out(),
        // Some kinds cannot be allocated by themselves (a mapping of several allocations). The
        // probe then uses plain device memory. If no direct path works for plain device memory,
        // none works for the other kind. A path that works may still refuse the other kind.
        Err(ErrorKind::Unsupported) if search.kind != AllocationKind::Device => {
            match Page::allocate(search, iface, AllocationKind::Device).map(Page::try_out) {
                Ok(ProbeResult::NoDirect(attempts)) => ProbeResult::NoDirect(attempts),
                Ok(_) | Err(_) => ProbeResult::Unknown,
            }
        }
        Err(_) => ProbeResult::Unknown,
    }
}

fn note_failure(error: &Error) {
    tracing::debug!(%error, "cannot allocate a page for a probe");
}

pub(super) fn device_of(search: &PathSearch<'_>) -> DeviceId {
    search.owner.device.unwrap_or(DeviceId(0))
}

/// A page of device memory. Dropping the value frees it.
pub(super) struct Page<'a> {
    search: &'a PathSearch<'a>,
    iface: &'a Arc<dyn Iface>,
    pub(super) allocation: Allocation,
    /// True if a NIC may still access the page. Dropping the value then leaks the page.
    may_be_registered: bool,
}

impl<'a> Page<'a> {
    pub(super) fn allocate(
        search: &'a PathSearch<'a>,
        iface: &'a Arc<dyn Iface>,
        kind: AllocationKind,
    ) -> Result<Self> {
        let len = rustix::param::page_size() as u64;
        let request = AllocRequest { len, device: device_of(search), kind };
        let allocation = iface.allocate(&request).inspect_err(note_failure)?;
        Ok(Self { search, iface, allocation, may_be_registered: false })
    }

    /// Runs `body` with a path search for the page. The page is registered with the rights and
    /// settings of the original search, unless `changed` replaces them.
    fn with_search<T>(
        &self,
        changed: impl FnOnce(Registration<'_>) -> Registration<'_>,
        body: impl FnOnce(&mut PathSearch<'_>, &mut ExportSet<'_>) -> T,
    ) -> T {
        let ranges = [self.allocation.range];
        let allocations = [self.allocation];
        let owner = AddressOwner {
            iface: self.search.owner.iface,
            device: self.allocation.device,
            allocation: Some(self.allocation),
        };
        let registration = changed(Registration {
            ranges: &ranges,
            memory: RegisteredMemory::Device {
                iface: self.iface,
                allocations: &allocations,
                owned: true,
            },
            key: KeyRequest::Provider,
            flags: MrFlags::empty(),
            page_size: 0,
            exports: None,
            ..*self.search.registration
        });
        let mut exports = ExportSet::new(self.iface, &ranges, &allocations, None);
        let target = Target { registration: &registration, provider: self.search.provider };
        let PathSearch { selector, iface, .. } = *self.search;
        // SAFETY: this value owns the page and no reference to its bytes exists. The page is
        // freed only after it was deregistered. The other conditions are those of the registration
        // from which this one is copied.
        let mut search = unsafe { PathSearch::new(selector, target, &owner, iface) };
        body(&mut search, &mut exports)
    }

    fn try_out(mut self) -> ProbeResult {
        // This flag is cleared once no NIC can reach the page. A panic leaves it set.
        self.may_be_registered = true;
        let (result, region) = self.with_search(
            |registration| registration,
            |search, exports| {
                search.first_unit = self.search.first_unit;
                let direct = search.direct(exports, None);
                search.attempts.extend(exports.close());
                let Some((variant, region)) = direct else {
                    let attempts = std::mem::take(&mut search.attempts);
                    return match search.may_be_temporary {
                        true => (ProbeResult::Unknown, None),
                        false => (ProbeResult::NoDirect(attempts), None),
                    };
                };
                let reason = "a page of the same kind was registered over this path";
                let unchecked = search.unchecked;
                let decision = Box::new(search.decision(variant, reason));
                let result = match unchecked {
                    true => ProbeResult::Unknown,
                    false => ProbeResult::Direct(variant, decision),
                };
                (result, Some(region))
            },
        );
        if region.is_some_and(|region| !self.deregister(region)) {
            return ProbeResult::Unknown;
        }
        self.may_be_registered = false;
        result
    }

    /// Registers the page over the path `variant`, with the rights of local and remote reads and
    /// writes. Runs `body` and deregisters the page. Fails with the last refusal of the path.
    pub(super) fn registered<T>(
        mut self,
        variant: PathVariant,
        body: impl FnOnce(&Allocation, ProviderRegion) -> T,
    ) -> Result<T> {
        self.may_be_registered = true;
        let taken = self.with_search(
            |registration| Registration {
                access: Access::READ | Access::WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
                enabled: true,
                ordering: WriteOrdering::Strict,
                extension: None,
                ..registration
            },
            |search, exports| search.take(variant, exports).map(|taken| taken.region),
        );
        let region = taken.map_err(|refusal| {
            self.may_be_registered = false;
            refusal.error
        })?;
        let result = body(&self.allocation, region);
        self.may_be_registered = !self.deregister(region);
        Ok(result)
    }

    /// Deregisters the page. If that fails, logs the error and returns false.
    fn deregister(&self, region: ProviderRegion) -> bool {
        let done = retry_once("deregister", || self.search.provider.deregister(region));
        let log = |error: &Error| {
            tracing::error!(
                error = %error.full(),
                "cannot deregister the page of a probe; it is leaked"
            );
        };
        done.inspect_err(log).is_ok()
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        if self.may_be_registered {
            return;
        }
        // SAFETY: this type makes no reference to the page, and `may_be_registered` is false: no
        // NIC reaches the page.
        if let Err(error) = retry_once("free", || unsafe { self.iface.free(&self.allocation) }) {
            tracing::error!(error = %error.full(), "the page of a probe could not be freed");
        }
    }
}
