//! Memory windows: rights of peers to a part of a region. The rights can be granted and revoked
//! without a registration (InfiniBand 10.6.7.2).
//!
//! The provider checks that the window's state allows an operation ([`WindowType::after`]), and
//! checks the part of the region and its rights. The provider also tracks the state of each window:
//! posted binds and invalidations, and invalidations by peers, change it. A type 2 window queries
//! its state from the provider before each operation.

#![allow(unsafe_code, reason = "posts the bind of a window of a region")]

use std::{
    fmt,
    sync::{Arc, Weak},
};

use parking_lot::{Mutex, MutexGuard};

use super::{
    Domain, DomainInner, Endpoint, MemoryRegion,
    region_state::{Dependent, RegionInner, Settle},
};
use crate::{
    Access, Addressing, Error, ErrorKind, Iova, MrMode, Rejected, RemoteKey, Result,
    provider::{
        Features, ProviderWindow, WindowBind, WindowRule, WindowState, WindowStatus, WindowType,
        Windows,
    },
    transfer::{Operation, PeerId, WorkRequest},
};

/// A type 1 window, which is bound by a call and gets a new key with each bind.
///
/// A bound window keeps its region registered, and the region cannot be closed. The key becomes
/// invalid when the window is bound again, unbound or dropped. The window cannot be invalidated:
///
/// ```compile_fail,E0599
/// fn invalidate(window: &hmem_core::Type1Window, endpoint: &hmem_core::Endpoint) {
///     window.post_invalidate(endpoint, 1).unwrap();
/// }
/// ```
pub struct Type1Window {
    /// The provider's window. Declared before `state`, so that the window is freed before the
    /// binding in `state` ends.
    window: Allocated,
    state: Mutex<Type1State>,
}

struct Type1State {
    /// The provider's window with its current key, which each bind changes.
    window: ProviderWindow,
    /// The binding. `None` if the window is not bound.
    bound: Option<Bound>,
}

/// A type 2 window, which is bound and invalidated by posted requests, with the caller's tag.
///
/// A bound window keeps its region registered, and the region cannot be closed.
///
/// ```
/// use hmem_core::{
///     Access, Addressing, Domain, Endpoint, MemoryRegion, RemoteKey, Result, Type2Bind, Type2Kind,
/// };
///
/// /// Lets the peer of `endpoint` read a page until `peer_done` returns. The region has the right
/// /// `MW_BIND`, and `next` waits for the next completion of the endpoint.
/// fn lend(
///     domain: &Domain,
///     region: &MemoryRegion,
///     endpoint: &Endpoint,
///     next: impl Fn() -> Result<u64>,
///     peer_done: impl Fn(RemoteKey),
/// ) -> Result<()> {
///     let window = domain.alloc_type_2_window(Type2Kind::B)?;
///     let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
///     let bind = Type2Bind { region, offset: 0, len: 4096, access, addressing, tag: 1 };
///     let key = window.post_bind(endpoint, &bind, 1)?;
///     next()?; // the key is valid now
///     peer_done(key);
///     window.post_invalidate(endpoint, 2)?;
///     next()?; // the key is dead now
///     Ok(())
/// }
/// ```
///
/// The window cannot be bound by a call:
///
/// ```compile_fail,E0599
/// # use hmem_core::{Access, MemoryRegion, Type2Window};
/// fn bind(window: &Type2Window, region: &MemoryRegion) {
///     window.bind(region, 0, 64, Access::REMOTE_READ).unwrap();
/// }
/// ```
pub struct Type2Window {
    inner: Arc<Type2Inner>,
}

/// The state of a type 2 window. Each region to which the window was bound has a weak reference to
/// it.
struct Type2Inner {
    /// The provider's window. Declared before `state`, so that the window is freed before the
    /// bindings in `state` end.
    window: Allocated,
    state: Mutex<Type2State>,
}

#[derive(Default)]
struct Type2State {
    /// The binding of the last posted bind. `None` if an invalidation was posted after the bind, or
    /// if the provider reports that the window is not bound.
    bound: Option<Bound>,
    /// Earlier bindings that may still hold. If all requests that were posted after a bind fail,
    /// the window still has the binding of this bind. The list is empty once the provider has no
    /// pending request for the window.
    ending: Vec<Bound>,
    /// The region to which a bind was last posted, whose list has this window. A further bind to
    /// the same region need not add the window again.
    listed: Weak<RegionInner>,
}

/// The two kinds of type 2 windows, which differ in how a window depends on its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type2Kind {
    /// Type 2A depends on the queue pair's number. While the window is bound, the queue pair can be
    /// neither reset nor destroyed.
    A,
    /// Type 2B depends on the queue pair's number and protection domain. The queue pair may be
    /// destroyed at any time.
    B,
}

impl From<Type2Kind> for WindowType {
    fn from(kind: Type2Kind) -> Self {
        match kind {
            Type2Kind::A => Self::TwoA,
            Type2Kind::B => Self::TwoB,
        }
    }
}

/// A request to bind a type 2 window.
#[derive(Clone, Copy, Debug)]
pub struct Type2Bind<'a> {
    /// The region, registered with [`Access::MW_BIND`].
    pub region: &'a MemoryRegion,
    /// The offset of the first byte in the region.
    pub offset: u64,
    /// The length in bytes, at least 1.
    pub len: u64,
    /// The rights that the window grants to peers.
    pub access: Access,
    /// The kind of addresses that peers use.
    pub addressing: Addressing,
    /// The low 8 bits of the new key. Use a tag that differs from the tag of the last bind, so that
    /// the old key stays invalid.
    pub tag: u8,
}

/// A window that the provider allocated. Dropping the value frees the window.
struct Allocated {
    domain: Arc<DomainInner>,
    kind: WindowType,
    /// The provider's window with its first key. The state of the window has the current key.
    window: ProviderWindow,
    freed: bool,
}

/// The binding of a window to a part of a region. It keeps the region from being closed.
struct Bound {
    region: Dependent,
    /// The address at which peers access the first byte.
    base: Iova,
    len: u64,
    addressing: Addressing,
    /// The caller's tag of a type 2 window, which is part of the key. 0 for type 1.
    tag: u8,
}

impl Bound {
    fn new(region: &MemoryRegion, bind: &WindowBind, tag: u8) -> Self {
        let WindowBind { offset, len, addressing, .. } = *bind;
        let base = base(region, offset, addressing);
        Self { region: Dependent::of(&region.inner), base, len, addressing, tag }
    }

    fn key(&self, key: u64) -> RemoteKey {
        RemoteKey::new(self.addressing, self.base, self.len, key)
    }
}

const KEY_TAG: u64 = 0xff;

/// Returns `key` with its low 8 bits, the tag, replaced by `tag`.
pub(super) const fn with_tag(key: u64, tag: u8) -> u64 {
    (key & !KEY_TAG) | tag as u64
}

/// Returns the provider's request to bind a window of `domain` to a part of `region`.
///
/// Checks the rules of domains and rights. The provider checks the other rules of [`WindowRule`].
pub(super) fn bind_request(
    domain: &Arc<DomainInner>,
    operation: &'static str,
    region: &MemoryRegion,
    (offset, len): (u64, u64),
    access: Access,
    addressing: Addressing,
) -> Result<WindowBind> {
    let rule = if !Arc::ptr_eq(&region.inner.domain, domain) {
        WindowRule::SameDomain
    } else if !Access::ANY_REMOTE.contains(access) {
        WindowRule::RemoteRightsOnly
    } else {
        let handle = region.inner.registration(operation)?.region;
        return Ok(WindowBind { region: handle, offset, len, access, addressing });
    };
    Err(with_values(rule.refuse(operation), region, (offset, len), access))
}

/// Returns the provider's error about a bind, with `operation` as the call that failed. If the bind
/// breaks a rule, also adds the values of the bind.
pub(super) fn bind_refused(
    error: Error,
    operation: &'static str,
    region: &MemoryRegion,
    bind: &WindowBind,
) -> Error {
    let error = error.of_call(operation);
    if error.context_value("rule").is_none() {
        return error;
    }
    with_values(error, region, (bind.offset, bind.len), bind.access)
}

fn with_values(
    error: Error,
    region: &MemoryRegion,
    (offset, len): (u64, u64),
    access: Access,
) -> Error {
    error
        .context("offset", offset)
        .context("length", len)
        .context("access", access)
        .context("region", region.range())
}

/// Returns the address at which peers access the first byte of a window at `offset` of a region.
pub(super) fn base(region: &MemoryRegion, offset: u64, addressing: Addressing) -> Iova {
    match addressing {
        Addressing::ZeroBased => Iova(0),
        Addressing::Virtual => {
            Iova(region.inner.rest_at(offset).unwrap_or(region.range()).start().0)
        }
    }
}

impl Domain {
    /// Allocates a type 1 memory window, which is not bound yet.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`] if the NIC has no such windows, and in RAW mode, because
    ///   windows have no raw keys.
    /// - [`ErrorKind::OutOfResources`] if the NIC can have no more windows.
    /// - [`ErrorKind::BadState`] in a forked child.
    pub fn alloc_type_1_window(&self) -> Result<Type1Window> {
        let window = Allocated::new(&self.inner, WindowType::One)?;
        let state = Type1State { window: window.window, bound: None };
        Ok(Type1Window { state: Mutex::new(state), window })
    }

    /// Allocates a type 2 memory window, which is not bound yet.
    ///
    /// # Errors
    /// The errors of [`Domain::alloc_type_1_window`].
    pub fn alloc_type_2_window(&self, kind: Type2Kind) -> Result<Type2Window> {
        let window = Allocated::new(&self.inner, kind.into())?;
        Ok(Type2Window { inner: Arc::new(Type2Inner { state: Mutex::default(), window }) })
    }
}

impl DomainInner {
    pub(super) fn windows(&self) -> Result<&dyn Windows> {
        if self.effective.contains(MrMode::RAW) {
            return Err(WindowRule::NoRawKeys.refuse("alloc window"));
        }
        self.provider.windows().ok_or_else(|| {
            self.missing(
                Features::WINDOWS,
                "alloc window",
                ErrorKind::Unsupported,
                "this NIC has no memory windows",
            )
        })
    }
}

impl Allocated {
    fn new(domain: &Arc<DomainInner>, kind: WindowType) -> Result<Self> {
        domain.process.check("alloc window")?;
        let window = domain.windows()?.alloc_window(kind)?;
        Ok(Self { domain: Arc::clone(domain), kind, window, freed: false })
    }

    /// Locks the window's state.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] in a forked child: a thread of the parent may have held the lock.
    fn lock<'a, T>(
        &self,
        state: &'a Mutex<T>,
        operation: &'static str,
    ) -> Result<MutexGuard<'a, T>> {
        self.domain.process.check(operation)?;
        Ok(state.lock())
    }

    /// Frees the window. Does nothing if it was freed before, and in a forked child, where freeing
    /// the window would free a window of the parent.
    fn free(&mut self) -> Result<()> {
        if !self.freed && self.domain.process.is_current() {
            self.domain.windows()?.free_window(self.window)?;
            self.freed = true;
        }
        Ok(())
    }

    fn check_endpoint(&self, endpoint: &Endpoint, operation: &'static str) -> Result<()> {
        if Arc::ptr_eq(&endpoint.domain, &self.domain) {
            return Ok(());
        }
        Err(WindowRule::SameDomain.refuse(operation))
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if let Err(error) = self.free() {
            tracing::error!(error = %error.full(), "cannot free a memory window");
        }
    }
}

impl Type1Window {
    /// Binds the window to `len` bytes from `offset` of `region`, and returns the new key.
    ///
    /// The region must have the right [`Access::MW_BIND`]. The old key becomes invalid. Peers use
    /// virtual addresses.
    ///
    /// # Errors
    /// If the bind breaks a rule, the context value `rule` names the rule ([`WindowRule`]). After
    /// an error the binding is unchanged.
    ///
    /// - [`ErrorKind::OutOfBounds`] for bytes outside the region.
    /// - [`ErrorKind::ZeroLength`] if `len` is 0. Use [`Type1Window::unbind`] instead.
    /// - [`ErrorKind::BadAccess`] for a right that is not a right of peers.
    /// - [`ErrorKind::AccessDenied`] for a region without MW_BIND, and for a right to write if the
    ///   region has no right that lets the NIC write.
    /// - [`ErrorKind::InvalidArgument`] for a region of another domain.
    /// - [`ErrorKind::BadState`] before the registration of the region completed, and in a forked
    ///   child.
    /// - The error that the driver reported.
    pub fn bind(
        &self,
        region: &MemoryRegion,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<RemoteKey> {
        let (domain, operation) = (&self.window.domain, "bind window");
        let bind =
            bind_request(domain, operation, region, (offset, len), access, Addressing::Virtual)?;
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, operation)
                .remedy("bind at least one byte, or call unbind"));
        }
        let mut state = self.window.lock(&self.state, operation)?;
        let bound = domain.windows()?.bind_window(state.window, &bind);
        state.window = bound.map_err(|error| bind_refused(error, operation, region, &bind))?;
        let bound = Bound::new(region, &bind, 0);
        let key = bound.key(state.window.key);
        let before = state.bound.replace(bound);
        // Ending a binding may end its region, so the lock is released first.
        drop(state);
        drop(before);
        Ok(key)
    }

    /// Unbinds the window (a bind of length 0). Its key becomes invalid, and the window can be
    /// bound again.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the window is not bound, and in a forked child.
    /// - The error that the driver reported.
    pub fn unbind(&self) -> Result<()> {
        let operation = "unbind window";
        let mut state = self.window.lock(&self.state, operation)?;
        // The provider needs a region to unbind from, and an unbound window has none.
        let bound = state.bound.as_ref();
        let bound = bound.ok_or_else(|| WindowRule::UnbindsWhenBound.refuse(operation))?;
        let Some(region) = bound.region.registered() else { return Ok(()) };
        let addressing = Addressing::Virtual;
        let bind = WindowBind { region, offset: 0, len: 0, access: Access::empty(), addressing };
        let unbound = self.window.domain.windows()?.bind_window(state.window, &bind);
        state.window = unbound.map_err(|error| error.of_call(operation))?;
        let before = state.bound.take();
        // Ending a binding may end its region, so the lock is released first.
        drop(state);
        drop(before);
        Ok(())
    }

    /// Frees the window. Its key becomes invalid. Does nothing in a forked child.
    ///
    /// # Errors
    /// The error that the driver reported. The error returns the window.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.window.free() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error.of_call("close window"))),
        }
    }

    /// Returns the state: [`WindowState::Valid`] while the window is bound, otherwise
    /// [`WindowState::Free`]. In a forked child, the state is [`WindowState::Invalid`].
    #[must_use]
    pub fn state(&self) -> WindowState {
        match self.window.lock(&self.state, "window state") {
            Ok(state) if state.bound.is_some() => WindowState::Valid,
            Ok(_) => WindowState::Free,
            Err(_) => WindowState::Invalid,
        }
    }

    /// Returns the current key, if the window is bound. Returns `None` in a forked child.
    #[must_use]
    pub fn key(&self) -> Option<RemoteKey> {
        let state = self.window.lock(&self.state, "window key").ok()?;
        Some(state.bound.as_ref()?.key(state.window.key))
    }
}

impl Type2Window {
    /// Returns the type, 2A or 2B.
    #[must_use]
    pub fn window_type(&self) -> WindowType {
        self.inner.window.kind
    }

    /// Posts a request that binds the window, and returns the new key.
    ///
    /// The key is valid once the request has completed, and only through `endpoint`. A message that
    /// is posted to the endpoint later arrives after the bind.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the window is bound: invalidate the window first. Also in a
    ///   forked child.
    /// - [`ErrorKind::InvalidArgument`] for an endpoint of another domain.
    /// - The errors of [`Type1Window::bind`] and [`Endpoint::post`].
    ///
    /// Some errors are reported by the completion. The bind has no effect then.
    pub fn post_bind(
        &self,
        endpoint: &Endpoint,
        bind: &Type2Bind<'_>,
        context: u64,
    ) -> Result<RemoteKey> {
        let operation = "post bind window";
        let inner = &*self.inner;
        inner.window.check_endpoint(endpoint, operation)?;
        let Type2Bind { region, offset, len, access, addressing, tag } = *bind;
        let domain = &inner.window.domain;
        let bind = bind_request(domain, operation, region, (offset, len), access, addressing)?;
        let mut settled = inner.settled()?;
        let (state, status) = (&mut *settled.state, settled.status);
        let request = Operation::BindWindow { window: inner.window.window, bind, tag };
        let bound = Bound::new(region, &bind, tag);
        if state.listed.as_ptr() != Arc::as_ptr(&region.inner) {
            let settle: Arc<dyn Settle> = Arc::<Type2Inner>::clone(&self.inner);
            region.inner.list_window(&settle);
            state.listed = Arc::downgrade(&region.inner);
        }
        post(endpoint, request, context)
            .map_err(|error| bind_refused(error, operation, region, &bind))?;
        let key = bound.key(with_tag(status.key, tag));
        // If the window was bound, the provider reports the refused bind by its completion, and the
        // earlier binding holds.
        let before = state.bound.replace(bound);
        state.ending.extend(before);
        Ok(key)
    }

    /// Posts a request that invalidates the window's key.
    ///
    /// The window may be bound again at once, because an endpoint executes requests in order.
    ///
    /// # Errors
    /// - [`ErrorKind::AccessDenied`] for an endpoint other than the one that posted the bind.
    /// - [`ErrorKind::InvalidArgument`] for an endpoint of another domain.
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - The errors of [`Endpoint::post`].
    ///
    /// If the request fails after it was posted, the window stays bound.
    pub fn post_invalidate(&self, endpoint: &Endpoint, context: u64) -> Result<()> {
        let operation = "post invalidate window";
        let inner = &*self.inner;
        inner.window.check_endpoint(endpoint, operation)?;
        let mut settled = inner.settled()?;
        let state = &mut *settled.state;
        post(endpoint, Operation::InvalidateWindow { window: inner.window.window }, context)
            .map_err(|error| error.of_call(operation))?;
        state.ending.extend(state.bound.take());
        Ok(())
    }

    /// Returns the state, according to the completions that were read. The state is
    /// [`WindowState::Free`] after a failed bind, and after an invalidation by this process or by a
    /// peer. The result is [`WindowState::Invalid`] if the provider cannot report the state, and in
    /// a forked child.
    #[must_use]
    pub fn state(&self) -> WindowState {
        self.inner.settled().map_or(WindowState::Invalid, |settled| settled.status.state)
    }

    /// Returns the key of the last bind. Returns `None` if the window is not bound, if an
    /// invalidation was posted after the bind, and if the provider cannot report the state.
    #[must_use]
    pub fn key(&self) -> Option<RemoteKey> {
        let settled = self.inner.settled().ok()?;
        let bound = settled.state.bound.as_ref()?;
        Some(bound.key(settled.status.key))
    }
}

/// The locked state of a type 2 window, and the state that the provider reports.
struct Settled<'a> {
    state: MutexGuard<'a, Type2State>,
    status: WindowStatus,
    /// The bindings that have ended. Declared after `state`, so that the lock is released before
    /// the drop of a binding may end its region.
    _ended: Vec<Bound>,
}

impl Type2Inner {
    /// Locks the window's state, and updates it with the state that the provider reports.
    fn settled(&self) -> Result<Settled<'_>> {
        let mut state = self.window.lock(&self.state, "window state")?;
        let status = self.window.domain.windows()?.window_status(self.window.window)?;
        let mut ended = Vec::new();
        if !status.pending {
            if status.state != WindowState::Valid {
                ended.extend(state.bound.take());
            } else {
                // The key's tag shows the binding that holds: an earlier one, if the requests that
                // were posted after it have failed.
                let holds = |bound: &Bound| u64::from(bound.tag) == status.key & KEY_TAG;
                if !state.bound.as_ref().is_some_and(holds) {
                    if let Some(at) = state.ending.iter().rposition(holds) {
                        let holding = state.ending.swap_remove(at);
                        ended.extend(state.bound.replace(holding));
                    } else if state.bound.is_none() {
                        state.bound = state.ending.pop();
                    }
                }
            }
            ended.append(&mut state.ending);
        }
        Ok(Settled { state, status, _ended: ended })
    }
}

impl Settle for Type2Inner {
    fn settle(&self) {
        if let Err(error) = self.settled() {
            tracing::debug!(%error, "cannot query the state of a memory window");
        }
    }
}

fn post(endpoint: &Endpoint, operation: Operation<'_>, context: u64) -> Result<()> {
    let request = WorkRequest { operation, local: &[], peer: PeerId(0), context };
    // SAFETY: window operations name no local memory.
    unsafe { endpoint.post(&request) }
}

impl fmt::Debug for Type1Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Type1Window").field("key", &self.key()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Type2Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Type2Window")
            .field("type", &self.window_type())
            .field("state", &self.state())
            .field("key", &self.key())
            .finish_non_exhaustive()
    }
}
