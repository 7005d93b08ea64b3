//! Finding out by doing what a device and a NIC can do: a page is allocated, exported and
//! registered, and all of it undone.
//!
//! A registration is a proof by itself where the first way works. Where one was refused, the buffer
//! may be at fault, and what happened to it says nothing about others: an ordinary page of the same
//! kind tells the two apart.

use hmem_core::{
    Allocation, AllocationKind, Decision, DeviceId, ErrorKind, IfaceExt, MrFlags, Result,
    iface::AllocRequest,
    path::{Attempt, PathRequest},
    provider::{KeyRequest, RegistrationRequest},
    registry::Owner,
};

use super::trial::{Asked, Subject, Trial, Way};

/// What an ordinary page showed.
#[derive(Debug)]
pub(super) enum Shown {
    /// This direct way works.
    Direct(Way, Box<Decision>),
    /// None does, and trying again would not help.
    NoDirect(Vec<Attempt>),
    /// Nothing that holds for others: no page could be had, or a refusal may pass.
    Nothing,
}

/// Undoes something that nobody else will undo: what fails once is tried once more.
fn twice(what: &'static str, undo: impl Fn() -> Result<()>) -> Result<()> {
    undo().or_else(|error| {
        tracing::warn!(what, %error, "the page of a probe was not let go; trying again");
        undo()
    })
}

/// Bytes to try with.
fn page() -> u64 {
    rustix::param::page_size() as u64
}

fn device_of(subject: &Subject<'_>) -> DeviceId {
    subject.request.owner.device.unwrap_or(DeviceId(0))
}

/// Tries the direct ways on a page of the subject's iface, device and kind. A device that is not
/// started is not started for it: what its driver makes for the first allocation (CUDA's primary
/// context) would stay behind, and nobody would use it. Registrations of its memory then find out
/// each for itself.
pub(super) fn probe(subject: &Subject<'_>) -> Shown {
    let span = tracing::debug_span!("probe", iface = %subject.iface.kind(), nic = %subject.provider.attr().nic);
    let _entered = span.enter();
    match subject.iface.is_device_active(device_of(subject)) {
        Ok(true) => {}
        Ok(false) => return Shown::Nothing,
        Err(error) => {
            tracing::debug!(%error, "no page to try with");
            return Shown::Nothing;
        }
    }
    match Page::allocate(subject, subject.kind) {
        Ok(page) => page.try_out(subject),
        // A kind that cannot be allocated by itself (a mapping of several): no better than plain
        // device memory.
        Err(ErrorKind::Unsupported) if subject.kind != AllocationKind::Device => {
            match Page::allocate(subject, AllocationKind::Device).map(|page| page.try_out(subject))
            {
                Ok(Shown::NoDirect(trace)) => Shown::NoDirect(trace),
                Ok(_) | Err(_) => Shown::Nothing,
            }
        }
        Err(_) => Shown::Nothing,
    }
}

/// A page of device memory.
struct Page<'a> {
    subject: &'a Subject<'a>,
    allocation: Allocation,
    /// Whether a NIC may still reach it, so that it must not be used for anything else.
    stuck: bool,
}

impl<'a> Page<'a> {
    fn allocate(subject: &'a Subject<'a>, kind: AllocationKind) -> Result<Self, ErrorKind> {
        let request = AllocRequest { len: page(), device: device_of(subject), kind };
        match subject.iface.allocate(&request) {
            Ok(allocation) => Ok(Self { subject, allocation, stuck: false }),
            Err(error) => {
                tracing::debug!(%error, "no page to try with");
                Err(error.kind())
            }
        }
    }

    fn try_out(mut self, subject: &Subject<'_>) -> Shown {
        let ranges = [self.allocation.range];
        let request = PathRequest {
            registration: RegistrationRequest {
                key: KeyRequest::Provider,
                flags: MrFlags::empty(),
                page_size: 0,
                ..subject.request.registration
            },
            ranges: &ranges,
            dma_buf: None,
            owner: Owner {
                iface: subject.request.owner.iface,
                device: self.allocation.device,
                allocation: Some(self.allocation),
            },
            owned: true,
            policy: subject.request.policy,
        };
        let asked = Asked { request: &request, ..subject.asked };
        let page = Subject { asked, iface: subject.iface };
        let mut exports = page.exports();
        let mut trial = Trial::new(asked);
        // SAFETY: the page is this function's own, nobody refers to its bytes, and it is freed only
        // after it was deregistered.
        let direct = unsafe { trial.direct(&page, &mut exports, None) };
        trial.note(exports.close());
        match direct {
            Some((way, region)) => {
                if let Err(error) = twice("deregister", || subject.provider.deregister(region)) {
                    tracing::error!(%error, "the page of a probe could not be deregistered; it is leaked");
                    self.stuck = true;
                    return Shown::Nothing;
                }
                let decision =
                    trial.decision(way, "a page of the same kind was registered in this way");
                Shown::Direct(way, Box::new(decision))
            }
            None if trial.may_pass => Shown::Nothing,
            None => Shown::NoDirect(trial.into_attempts()),
        }
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        if self.stuck {
            return;
        }
        // SAFETY: the page was never referred to, and no NIC has it any more.
        if let Err(error) = twice("free", || unsafe { self.subject.iface.free(&self.allocation) }) {
            tracing::error!(%error, "the page of a probe could not be freed");
        }
    }
}
