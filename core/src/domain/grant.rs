//! Grants: a part of a region lent to a peer, by the best means that the NIC has.
//!
//! Windows of revoked grants are kept for the next ones, so that a grant costs a bind and its
//! revocation an invalidation.

use std::{collections::VecDeque, fmt, ops::Range, sync::Arc};

use parking_lot::Mutex;

use super::{
    DomainInner, Endpoint, MemoryRegion,
    attr::MrAttr,
    region_state::{Dependent, KeepAlive},
    window::{Part, with_tag},
};
use crate::{
    Access, Addressing, Error, ErrorKind, MrFlags, MrMode, RawKey, Rejected, RemoteKey, Result,
    provider::{ProviderEndpoint, ProviderWindow, WindowBind, WindowRule, WindowState, WindowType},
};

/// The means by which a [`Grant`] lends memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrantKind {
    /// A memory window.
    Window(WindowType),
    /// A sub-region, where the NIC has no windows.
    SubRegion,
}

/// A part of a region that is lent to a peer, until it is revoked or dropped.
///
/// The region cannot be closed before the grant is gone. A peer may revoke a grant by a type 2
/// window itself, by a message ([`Endpoint::send_invalidate`]).
///
/// ```
/// # use hmem_core::{Access, Endpoint, ErrorKind, MemoryRegion, Result};
/// # fn serve(region: &MemoryRegion, client: &Endpoint, send: impl Fn(Vec<u8>)) -> Result<()> {
/// let grant = region.grant(client, 4096..8192, Access::REMOTE_READ)?;
/// send(grant.key()?.to_bytes());
/// // ... the client reads, and says that it is done
/// grant.revoke().map_err(|rejected| rejected.error)?;
/// # Ok(()) }
/// ```
pub struct Grant {
    /// `None` once revoked.
    held: Option<Held>,
    domain: Arc<DomainInner>,
}

enum Held {
    Window(Box<LentWindow>),
    SubRegion(MemoryRegion),
}

struct LentWindow {
    kind: WindowType,
    window: ProviderWindow,
    bind: WindowBind,
    /// The endpoint of a type 2 window.
    endpoint: Arc<dyn ProviderEndpoint>,
    key: RemoteKey,
    uses: u8,
    /// Let go after the window.
    region: Dependent,
}

/// Windows of revoked grants, bound to nothing. The provider's domain frees them when it goes.
#[derive(Debug, Default)]
pub(super) struct SpareWindows {
    windows: Mutex<VecDeque<Spare>>,
}

#[derive(Debug)]
struct Spare {
    kind: WindowType,
    window: ProviderWindow,
    /// The number of grants that the window served.
    uses: u8,
}

/// The order in which types are tried. A type 2 window is tied to the peer's connection; 2B, unlike
/// 2A, lets the connection close.
const BEST_FIRST: [WindowType; 3] = [WindowType::TwoB, WindowType::TwoA, WindowType::One];

impl SpareWindows {
    fn take(&self, domain: &DomainInner, kind: WindowType) -> Result<Spare> {
        {
            let mut windows = self.windows.lock();
            let at = windows.iter().position(|spare| spare.kind == kind);
            if let Some(spare) = at.and_then(|at| windows.remove(at)) {
                return Ok(spare);
            }
        }
        Ok(Spare { kind, window: domain.windows()?.alloc_window(kind)?, uses: 0 })
    }

    /// Keeps a free window, unless all tags of its key were used: keys do not come back soon
    /// (KEY-02).
    fn put(&self, domain: &DomainInner, mut spare: Spare) {
        spare.uses = spare.uses.saturating_add(1);
        if spare.uses < u8::MAX {
            self.windows.lock().push_back(spare);
        } else {
            free(domain, spare.window);
        }
    }
}

fn free(domain: &DomainInner, window: ProviderWindow) {
    if let Err(error) = domain.windows().and_then(|windows| windows.free_window(window)) {
        tracing::error!(%error, "the window of a grant could not be freed");
    }
}

impl MemoryRegion {
    /// Lends the bytes of `part`, counted from the start of the region, to the peer of `endpoint`,
    /// with these rights and no others.
    ///
    /// The best means that the NIC has are taken, and [`Grant::kind`] says which: a type 2 window,
    /// which only this endpoint serves; a type 1 window, which every endpoint of the domain serves;
    /// a sub-region. When this returns, the key works. Windows need a region with
    /// [`Access::MW_BIND`].
    ///
    /// A type 2 window is bound behind the requests that were posted to the endpoint before. If one
    /// of them cannot go on, a message whose receiver has posted no receive, say, this waits for
    /// it.
    ///
    /// # Errors
    /// ZeroLength; OutOfBounds; BadAccess; AccessDenied for rights that the region rules out, and
    /// for a region without MW_BIND; InvalidArgument for another domain's endpoint; Unsupported
    /// where the NIC has neither windows nor sub-regions; the driver's own.
    pub fn grant(&self, endpoint: &Endpoint, part: Range<u64>, access: Access) -> Result<Grant> {
        let operation = "grant";
        let domain = self.inner().domain();
        domain.process.check(operation)?;
        if !Arc::ptr_eq(endpoint.domain(), domain) {
            return Err(WindowRule::SameDomain.refuse(operation));
        }
        let len = part.end.saturating_sub(part.start);
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, operation)
                .context("start", part.start)
                .context("end", part.end)
                .remedy("grant at least one byte"));
        }
        let part = Part { region: self, offset: part.start, len, access };
        let bind = part.bind(domain, operation, Addressing::Virtual)?;
        if let Ok(windows) = domain.windows() {
            for kind in BEST_FIRST {
                if !windows.window_types().contains(&kind) {
                    continue;
                }
                match grant_window(domain, endpoint, &part, bind, kind) {
                    Err(error) if error.is_unsupported() => {
                        tracing::debug!(%error, kind = kind.name(), "no grant by this window type");
                    }
                    granted => return granted,
                }
            }
        }
        grant_sub_region(domain, endpoint, &part)
    }
}

fn grant_window(
    domain: &Arc<DomainInner>,
    endpoint: &Endpoint,
    part: &Part<'_>,
    mut bind: WindowBind,
    kind: WindowType,
) -> Result<Grant> {
    let windows = domain.windows()?;
    if kind != WindowType::One {
        // Peers need not learn where the memory lies.
        bind.addressing = Addressing::ZeroBased;
    }
    // Before the bind, so that the region is not closed between.
    let region = Dependent::of(part.region.inner());
    let mut spare = domain.spare_windows.take(domain, kind)?;
    let bound = if kind == WindowType::One {
        windows.bind_window(spare.window, &bind)
    } else {
        windows.window_status(spare.window).and_then(|status| {
            let tag = (status.key as u8).wrapping_add(1);
            windows.bind_window_now(endpoint.provider(), spare.window, &bind, tag)?;
            Ok(ProviderWindow { key: with_tag(status.key, tag), ..spare.window })
        })
    };
    spare.window = match bound {
        Ok(window) => window,
        Err(error) => {
            // It may be bound all the same, if the end of the bind was not seen.
            free(domain, spare.window);
            return Err(error);
        }
    };
    let Spare { window, uses, .. } = spare;
    let key = RemoteKey::new(bind.addressing, part.base(bind.addressing), part.len, window.key);
    let endpoint = endpoint.shared_provider();
    let lent = Box::new(LentWindow { kind, window, bind, endpoint, key, uses, region });
    Ok(Grant { held: Some(Held::Window(lent)), domain: Arc::clone(domain) })
}

fn grant_sub_region(
    domain: &Arc<DomainInner>,
    endpoint: &Endpoint,
    part: &Part<'_>,
) -> Result<Grant> {
    let range = part.range().ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, "grant")
            .context("offset", part.offset)
            .context("length", part.len)
            .remedy("a sub-region lies inside one range of its region: grant each part by itself")
    })?;
    let ranges = [range];
    let attr = MrAttr { base: Some(part.region), ..MrAttr::new(&ranges, part.access) };
    let sub = domain.register_now(&attr, MrFlags::empty(), KeepAlive::Caller, None)?;
    if domain.effective().contains(MrMode::ENDPOINT) {
        sub.bind_endpoint(endpoint)?;
        sub.enable()?;
    }
    Ok(Grant { held: Some(Held::SubRegion(sub)), domain: Arc::clone(domain) })
}

impl Grant {
    /// Returns the means by which the memory is lent.
    #[must_use]
    pub fn kind(&self) -> GrantKind {
        match &self.held {
            Some(Held::Window(lent)) => GrantKind::Window(lent.kind),
            _ => GrantKind::SubRegion,
        }
    }

    /// Returns the key for the peer. Its address and length are those of the part.
    ///
    /// # Errors
    /// [`ErrorKind::KeyNotAvailable`] in RAW mode (use [`Grant::raw_key`]).
    pub fn key(&self) -> Result<RemoteKey> {
        match &self.held {
            Some(Held::Window(lent)) => Ok(lent.key.clone()),
            Some(Held::SubRegion(region)) => region.key(),
            None => Err(Error::new(ErrorKind::BadState, "key").remedy("the grant was revoked")),
        }
    }

    /// Returns the raw key for the peer, which a sub-region has.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a grant by a window.
    pub fn raw_key(&self) -> Result<RawKey> {
        match &self.held {
            Some(Held::SubRegion(region)) => region.raw_key(),
            _ => Err(WindowRule::NoRawKeys.refuse("raw key")),
        }
    }

    /// Returns the state of the key: [`WindowState::Valid`], or [`WindowState::Free`] once the peer
    /// has revoked the grant and the completion of its message was read.
    #[must_use]
    pub fn state(&self) -> WindowState {
        match &self.held {
            Some(Held::Window(lent)) => self
                .domain
                .windows()
                .and_then(|windows| windows.window_status(lent.window))
                .map_or(WindowState::Invalid, |status| status.state),
            Some(Held::SubRegion(_)) => WindowState::Valid,
            None => WindowState::Invalid,
        }
    }

    /// Revokes the grant. When this returns, the key is dead and no access with it is in flight.
    ///
    /// A type 2 window is invalidated through its endpoint, and so waits for the requests that were
    /// posted there before. Where that cannot be done, because the connection has failed, say, the
    /// window is freed.
    ///
    /// # Errors
    /// The driver's own, with the grant back.
    pub fn revoke(mut self) -> Result<(), Rejected<Self>> {
        let refused = match self.held.take() {
            None => None,
            Some(Held::SubRegion(region)) => region
                .close()
                .err()
                .map(|rejected| (Held::SubRegion(rejected.value), rejected.error)),
            Some(Held::Window(lent)) => {
                self.revoke_window(&lent).err().map(|error| (Held::Window(lent), error))
            }
        };
        match refused {
            None => Ok(()),
            Some((held, error)) => {
                self.held = Some(held);
                Err(Rejected::new(self, error))
            }
        }
    }

    fn revoke_window(&self, lent: &LentWindow) -> Result<()> {
        if !self.domain.process.is_current() {
            return Ok(());
        }
        let LentWindow { kind, window, bind, endpoint, uses, .. } = lent;
        let windows = self.domain.windows()?;
        let unbound = if *kind == WindowType::One {
            let nothing = WindowBind { offset: 0, len: 0, access: Access::empty(), ..*bind };
            windows.bind_window(*window, &nothing)
        } else {
            windows.invalidate_window_now(&**endpoint, *window).map(|()| *window)
        };
        match unbound {
            Ok(window) => {
                let spare = Spare { kind: *kind, window, uses: *uses };
                self.domain.spare_windows.put(&self.domain, spare);
                Ok(())
            }
            Err(reason) => {
                tracing::debug!(%reason, "the window of a grant is freed");
                windows.free_window(*window)
            }
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // Freed rather than invalidated: that waits for no other request. A sub-region closes when
        // it is dropped.
        if let Some(Held::Window(lent)) = &self.held
            && self.domain.process.is_current()
        {
            free(&self.domain, lent.window);
        }
    }
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let region = match &self.held {
            Some(Held::Window(lent)) => Some(lent.region.range),
            Some(Held::SubRegion(region)) => Some(region.range()),
            None => None,
        };
        f.debug_struct("Grant")
            .field("kind", &self.kind())
            .field("region", &region)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
