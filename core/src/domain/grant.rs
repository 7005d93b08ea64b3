//! Grants: temporary rights of a peer to a part of a region.
//!
//! A grant uses the best mechanism that the NIC has: a memory window of type 2B, 2A or 1, or a
//! sub-region. Windows of revoked grants are reused, so that a grant costs one bind, and its
//! revocation one invalidation.

use std::{collections::VecDeque, fmt, ops::Range, sync::Arc};

use parking_lot::Mutex;

use super::{
    DomainInner, Endpoint, MemoryRegion,
    region_state::Dependent,
    request::RegionRequest,
    terms::Terms,
    window::{base, bind_refused, bind_request, with_tag},
};
use crate::{
    Access, Addressing, Error, ErrorKind, MrMode, RawKey, Rejected, RemoteKey, Result,
    provider::{
        ProviderEndpoint, ProviderWindow, WindowBind, WindowRule, WindowState, WindowType, Windows,
    },
};

/// The mechanism behind a [`Grant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrantKind {
    /// The grant uses a memory window of this type.
    Window(WindowType),
    /// The grant uses a sub-region, for one of two reasons. Either no type of window works with the
    /// NIC, the region and the domain's mode, or the NIC does not enforce the bounds of windows.
    SubRegion,
}

/// A peer's rights to a part of a region, until the grant is revoked or dropped.
///
/// The region cannot be closed while the grant exists. If [`Grant::kind`] is a type 2 window, the
/// peer can end the grant with a message ([`Endpoint::send_invalidate`]).
///
/// ```
/// # use hmem_core::{Access, Endpoint, ErrorKind, MemoryRegion, Result};
/// # fn serve(region: &MemoryRegion, client: &Endpoint, send: impl Fn(Vec<u8>)) -> Result<()> {
/// let grant = region.grant(client, 4096..8192, Access::REMOTE_READ)?;
/// send(grant.key()?.to_bytes());
/// // ... the client reads, and sends a message when it has finished
/// grant.revoke()?;
/// # Ok(()) }
/// ```
pub struct Grant {
    held: Held,
    /// True once the grant was revoked. The drop then does not free the window, which is kept for
    /// later grants.
    revoked: bool,
    domain: Arc<DomainInner>,
    fallback_reasons: Vec<Error>,
    enforces_bounds: bool,
}

/// The window or sub-region behind a grant.
enum Held {
    Window(Box<BoundWindow>),
    SubRegion(MemoryRegion),
}

struct BoundWindow {
    kind: WindowType,
    window: ProviderWindow,
    bind: WindowBind,
    /// The endpoint through which a type 2 window was bound.
    endpoint: Arc<dyn ProviderEndpoint>,
    key: RemoteKey,
    /// The number of tags of the window's key that earlier grants used up.
    used_tags: u8,
    /// A guard that keeps the region from being closed until the window is unbound or freed.
    region: Dependent,
}

/// Unbound windows of revoked grants, for later grants. When the domain is closed, the provider
/// frees these windows.
#[derive(Debug, Default)]
pub(super) struct SpareWindows {
    windows: Mutex<VecDeque<Spare>>,
}

#[derive(Debug)]
struct Spare {
    kind: WindowType,
    window: ProviderWindow,
    /// The number of tags of the window's key that grants used up.
    used_tags: u8,
}

/// The order in which a grant tries the window types.
///
/// Type 2 comes first, because its key works only through the connection to one peer. Type 2B comes
/// before 2A, because a bound 2A window keeps the endpoint from being closed.
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
        Ok(Spare { kind, window: domain.windows()?.alloc_window(kind)?, used_tags: 0 })
    }

    /// Keeps an unbound window for reuse. A grant gives the window's key one new tag, which is the
    /// lowest 8 bits of the key, or two if the window has type 1: its unbind is a bind too. Once
    /// all tags have been used, this method frees the window instead, because the next bind would
    /// make the key of an earlier grant valid again.
    fn put(&self, domain: &DomainInner, mut spare: Spare) {
        let tags = if spare.kind == WindowType::One { 2 } else { 1 };
        spare.used_tags = spare.used_tags.saturating_add(tags);
        if spare.used_tags < u8::MAX {
            self.windows.lock().push_back(spare);
        } else {
            free(domain, spare.window);
        }
    }
}

fn free(domain: &DomainInner, window: ProviderWindow) {
    if let Err(error) = domain.windows().and_then(|windows| windows.free_window(window)) {
        tracing::error!(error = %error.full(), "cannot free the window of a grant");
    }
}

impl MemoryRegion {
    /// Grants the peer of `endpoint` the rights `access` to `part`, a byte range relative to the
    /// start of the region.
    ///
    /// The key is valid when this returns. The grant uses the first of these mechanisms that works
    /// ([`Grant::kind`], [`Grant::fallback_reasons`]):
    ///
    /// 1. a type 2 window, whose key works through this endpoint only
    /// 2. a type 1 window, whose key works through every endpoint of the domain
    /// 3. a sub-region
    ///
    /// A window needs a region with [`Access::MW_BIND`]. The call tries no window in these cases:
    ///
    /// - in RAW mode, because windows have no raw keys
    /// - on a NIC without windows
    /// - if the NIC does not enforce the bounds of windows, and the sub-region was registered
    ///
    /// **Some NICs do not enforce the bounds of windows** ([`Windows::enforces_bounds`]). On these
    /// NICs, a sub-region is the first choice for a part of a region. A window is used only if the
    /// NIC has no sub-regions: the peer then reaches the whole region, with the granted rights, and
    /// [`Grant::enforces_bounds`] is false.
    ///
    /// A type 2 window is bound after the requests that were posted to the endpoint earlier, and
    /// this call waits for them. It blocks if one of them is a send for which the peer has posted
    /// no receive.
    ///
    /// # Errors
    /// - ZeroLength, OutOfBounds and BadAccess for a wrong range or right.
    /// - AccessDenied for a right to write, if the region has no right that lets the NIC write, and
    ///   for a region without MW_BIND, if the call tries a window.
    /// - BadState before the registration of the region completed, and in a forked child.
    /// - InvalidArgument for an endpoint of another domain.
    /// - Unsupported if the NIC has neither windows nor sub-regions.
    /// - The driver's own errors. The error of a sub-region has the reasons against windows as its
    ///   context value `windows`.
    pub fn grant(&self, endpoint: &Endpoint, part: Range<u64>, access: Access) -> Result<Grant> {
        let operation = "grant";
        let domain = &self.inner.domain;
        domain.process.check(operation)?;
        if !Arc::ptr_eq(&endpoint.domain, domain) {
            return Err(WindowRule::SameDomain.refuse(operation));
        }
        let len = part.end.saturating_sub(part.start);
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, operation)
                .context("start", part.start)
                .context("end", part.end)
                .remedy("grant at least one byte"));
        }
        let part = (part.start, len);
        let bind = bind_request(domain, operation, self, part, access, Addressing::Virtual)?;
        let windows = domain.windows();
        // The NIC enforces the bounds of the whole region.
        let is_part = len < self.len();
        let unbounded = is_part && windows.as_ref().is_ok_and(|windows| !windows.enforces_bounds());
        let grant = |held, fallback_reasons| {
            let enforces_bounds = !unbounded || matches!(held, Held::SubRegion(_));
            let domain = Arc::clone(domain);
            Grant { held, revoked: false, domain, fallback_reasons, enforces_bounds }
        };
        let mut reasons = Vec::new();
        if unbounded {
            reasons.push(WindowRule::NicEnforcesBounds.refuse(operation));
            match register_sub_region(domain, endpoint, self, &bind) {
                Ok(sub_region) => return Ok(grant(Held::SubRegion(sub_region), reasons)),
                Err(error) if error.is_unsupported() => {
                    tracing::debug!(%error, "the grant does not confine its peer to its part");
                    reasons.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        match windows {
            Ok(windows) => {
                let has = |kind: &WindowType| windows.window_types().contains(kind);
                for kind in BEST_FIRST.into_iter().filter(has) {
                    match bind_window(domain, windows, endpoint, self, bind, kind) {
                        Ok(window) => return Ok(grant(Held::Window(Box::new(window)), reasons)),
                        Err(error) if error.is_unsupported() => {
                            tracing::debug!(%error, kind = kind.name(), "window type unsupported");
                            reasons.push(error.context("window", kind.name()));
                        }
                        Err(error) => {
                            return Err(bind_refused(error, operation, self, &bind));
                        }
                    }
                }
            }
            Err(error) => reasons.push(error),
        }
        match register_sub_region(domain, endpoint, self, &bind) {
            Ok(sub_region) => Ok(grant(Held::SubRegion(sub_region), reasons)),
            Err(error) if reasons.is_empty() => Err(error),
            Err(error) => {
                let reasons: Vec<_> = reasons.iter().map(|e| e.reason().to_string()).collect();
                Err(error.context("windows", reasons.join("; ")))
            }
        }
    }
}

fn bind_window(
    domain: &DomainInner,
    windows: &dyn Windows,
    endpoint: &Endpoint,
    region: &MemoryRegion,
    mut bind: WindowBind,
    kind: WindowType,
) -> Result<BoundWindow> {
    if kind != WindowType::One {
        // The key has zero-based addresses, so that peers do not learn the address of the memory.
        bind.addressing = Addressing::ZeroBased;
    }
    // Created before the bind, so that the region cannot be closed meanwhile.
    let dependent = Dependent::of(&region.inner);
    let mut spare = domain.spare_windows.take(domain, kind)?;
    let bound = if kind == WindowType::One {
        windows.bind_window(spare.window, &bind)
    } else {
        windows.window_status(spare.window).and_then(|status| {
            let tag = (status.key as u8).wrapping_add(1);
            windows.bind_window_now(&*endpoint.provider, spare.window, &bind, tag)?;
            Ok(ProviderWindow { key: with_tag(status.key, tag), ..spare.window })
        })
    };
    spare.window = match bound {
        Ok(window) => window,
        Err(error) => {
            // The window is not reused, because the NIC may have bound it in spite of the error.
            free(domain, spare.window);
            return Err(error);
        }
    };
    let Spare { window, used_tags, .. } = spare;
    let base = base(region, bind.offset, bind.addressing);
    let key = RemoteKey::new(bind.addressing, base, bind.len, window.key);
    let endpoint = Arc::clone(&endpoint.provider);
    Ok(BoundWindow { kind, window, bind, endpoint, key, used_tags, region: dependent })
}

fn register_sub_region(
    domain: &Arc<DomainInner>,
    endpoint: &Endpoint,
    region: &MemoryRegion,
    bind: &WindowBind,
) -> Result<MemoryRegion> {
    let rest = region.inner.rest_at(bind.offset);
    let range = rest.and_then(|rest| rest.slice(0, bind.len)).ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, "grant")
            .context("offset", bind.offset)
            .context("length", bind.len)
            .remedy("a sub-region lies inside one range of its region: grant each part separately")
    })?;
    let terms = Terms::new(bind.access);
    let sub_region = domain.register_now(&RegionRequest::part(region, range, &terms), None)?;
    if domain.effective.contains(MrMode::ENDPOINT) {
        sub_region.bind_endpoint(endpoint)?;
        sub_region.enable()?;
    }
    Ok(sub_region)
}

impl Grant {
    /// Returns the mechanism of the grant.
    #[must_use]
    pub fn kind(&self) -> GrantKind {
        match &self.held {
            Held::Window(bound) => GrantKind::Window(bound.kind),
            Held::SubRegion(_) => GrantKind::SubRegion,
        }
    }

    /// Returns true if the NIC confines the peer to the granted bytes.
    ///
    /// If the result is false, a peer that ignores the bounds of its key reaches the whole region,
    /// with the granted rights. If the peer is not trusted, register the part as a region of its
    /// own instead.
    #[must_use]
    pub fn enforces_bounds(&self) -> bool {
        self.enforces_bounds
    }

    /// Returns the errors of the mechanisms that failed before the grant's own mechanism worked, in
    /// the order of the attempts.
    ///
    /// An error has the broken rule as its context value `rule`, or the driver's code. The error of
    /// a window has the type of the window as its context value `window`.
    ///
    /// ```
    /// # use hmem_core::{Grant, GrantKind};
    /// # fn log(grant: &Grant) {
    /// if grant.kind() == GrantKind::SubRegion {
    ///     for error in grant.fallback_reasons() {
    ///         eprintln!("no memory window: {error}");
    ///     }
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn fallback_reasons(&self) -> &[Error] {
        &self.fallback_reasons
    }

    /// Returns the key for the peer, with the address and length of the granted part.
    ///
    /// # Errors
    /// [`ErrorKind::KeyNotAvailable`] in RAW mode (use [`Grant::raw_key`]), and for a sub-region of
    /// a staged region that peers cannot reach.
    pub fn key(&self) -> Result<RemoteKey> {
        match &self.held {
            Held::Window(bound) => Ok(bound.key.clone()),
            Held::SubRegion(region) => region.key(),
        }
    }

    /// Returns the raw key for the peer, in RAW mode.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a grant by a window, which has no raw key.
    pub fn raw_key(&self) -> Result<RawKey> {
        match &self.held {
            Held::SubRegion(region) => region.raw_key(),
            Held::Window(_) => Err(WindowRule::NoRawKeys.refuse("raw key")),
        }
    }

    /// Returns the state of the key:
    ///
    /// - [`WindowState::Valid`] while the peer may use the key
    /// - [`WindowState::Free`] if the peer has ended the grant by a message, once the completion of
    ///   this message was read
    /// - [`WindowState::Invalid`] if the provider cannot report the state
    #[must_use]
    pub fn state(&self) -> WindowState {
        match &self.held {
            Held::Window(bound) => self
                .domain
                .windows()
                .and_then(|windows| windows.window_status(bound.window))
                .map_or(WindowState::Invalid, |status| status.state),
            Held::SubRegion(_) => WindowState::Valid,
        }
    }

    /// Revokes the grant. When this returns, the key is invalid and no access with the key is in
    /// flight.
    ///
    /// The call invalidates a type 2 window through its endpoint, after the requests that were
    /// posted to the endpoint earlier. If the invalidation fails, for example because the
    /// connection has failed, the call frees the window instead.
    ///
    /// # Errors
    /// The driver's own error, with the grant.
    pub fn revoke(mut self) -> Result<(), Rejected<Self>> {
        let revoked = match &self.held {
            Held::SubRegion(region) => region.inner.close(),
            Held::Window(bound) => self.revoke_window(bound),
        };
        match revoked {
            Ok(()) => {
                self.revoked = true;
                Ok(())
            }
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn revoke_window(&self, bound: &BoundWindow) -> Result<()> {
        if !self.domain.process.is_current() {
            return Ok(());
        }
        let BoundWindow { kind, window, bind, endpoint, used_tags, .. } = bound;
        let windows = self.domain.windows()?;
        let unbound = if *kind == WindowType::One {
            let nothing = WindowBind { offset: 0, len: 0, access: Access::empty(), ..*bind };
            windows.bind_window(*window, &nothing)
        } else {
            windows.invalidate_window_now(&**endpoint, *window).map(|()| *window)
        };
        match unbound {
            Ok(window) => {
                let spare = Spare { kind: *kind, window, used_tags: *used_tags };
                self.domain.spare_windows.put(&self.domain, spare);
                Ok(())
            }
            Err(reason) => {
                tracing::debug!(%reason, "cannot invalidate the window of a grant: freeing it");
                windows.free_window(*window)
            }
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // Unlike an invalidation, freeing the window does not wait for other requests. A sub-region
        // is closed when it is dropped.
        if let Held::Window(bound) = &self.held
            && !self.revoked
            && self.domain.process.is_current()
        {
            free(&self.domain, bound.window);
        }
    }
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let region = match &self.held {
            Held::Window(bound) => bound.region.range,
            Held::SubRegion(region) => region.range(),
        };
        f.debug_struct("Grant")
            .field("kind", &self.kind())
            .field("region", &region)
            .field("state", &self.state())
            .field("enforces_bounds", &self.enforces_bounds)
            .field("fallback_reasons", &self.fallback_reasons)
            .finish_non_exhaustive()
    }
}
