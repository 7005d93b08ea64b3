//! Memory windows: remote rights on part of a region, changed without registering again.
//!
//! A type 1 window is bound by a call and gets a new key each time; type 2 windows are bound and
//! invalidated by requests posted to an endpoint, with the caller's 8-bit tag (InfiniBand
//! 10.6.7.2).

use std::{fmt, sync::Arc};

use parking_lot::Mutex;

use super::{
    DomainInner, Endpoint, MemoryRegion,
    region_state::{Dependent, RegionInner},
};
use crate::{
    Access, Addressing, Error, ErrorKind, Iova, RemoteKey, Result,
    provider::{Features, ProviderWindow, WindowBind, WindowType, Windows},
    transfer::{Operation, PeerId, WorkRequest},
};

/// A memory window. While it is bound it keeps its region registered, and the region cannot be
/// closed.
pub struct MemoryWindow {
    domain: Arc<DomainInner>,
    kind: WindowType,
    state: Mutex<State>,
}

struct State {
    window: ProviderWindow,
    bound: Option<Bound>,
}

struct Bound {
    region: Dependent,
    base: Iova,
    len: u64,
    addressing: Addressing,
}

impl Bound {
    fn new(region: &Arc<RegionInner>, base: Iova, len: u64, addressing: Addressing) -> Self {
        Self { region: Dependent::of(region), base, len, addressing }
    }
}

const KEY_TAG: u64 = 0xff;

impl DomainInner {
    fn windows(&self) -> Result<&dyn Windows> {
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

impl MemoryWindow {
    pub(super) fn alloc(domain: &Arc<DomainInner>, kind: WindowType) -> Result<Self> {
        domain.process.check("alloc window")?;
        let window = domain.windows()?.alloc_window(kind)?;
        Ok(Self {
            domain: Arc::clone(domain),
            kind,
            state: Mutex::new(State { window, bound: None }),
        })
    }

    /// Its type.
    #[must_use]
    pub fn window_type(&self) -> WindowType {
        self.kind
    }

    fn check(&self, region: &MemoryRegion, offset: u64, len: u64, access: Access) -> Result<()> {
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "bind window")
                .context("offset", offset)
                .context("length", len)
                .context("region", region.range())
                .remedy(remedy))
        };
        if !Arc::ptr_eq(region.inner().domain(), &self.domain) {
            return refuse(
                ErrorKind::InvalidArgument,
                "bind to a region of the window's own domain",
            );
        }
        if offset > region.len() || len > region.len() - offset {
            return refuse(ErrorKind::OutOfBounds, "a window lies inside its region");
        }
        if !Access::ANY_REMOTE.contains(access) {
            return refuse(
                ErrorKind::BadAccess,
                "a window grants remote rights only: REMOTE_READ, REMOTE_WRITE, REMOTE_RMA_WRITE \
                 and REMOTE_ATOMIC",
            );
        }
        if access.peers_write() && !region.access().nic_writes() {
            return refuse(
                ErrorKind::AccessDenied,
                "remote write or atomic through a window needs a region that the NIC may write \
                 (IBA 10.6.7.2.2)",
            );
        }
        Ok(())
    }

    /// Binds a type 1 window to `len` bytes from `offset` of `region` and returns its new key; the
    /// old key is dead. Addresses are virtual.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] for type 2; OutOfBounds, AccessDenied, BadAccess; InvalidArgument
    /// for another domain's region.
    pub fn bind(
        &self,
        region: &MemoryRegion,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<RemoteKey> {
        self.expect_type_1("bind window")?;
        self.check(region, offset, len, access)?;
        let target = registered(region)?;
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "bind window")
                .remedy("use unbind to bind to nothing"));
        }
        let mut state = self.state.lock();
        let bind =
            WindowBind { region: target, offset, len, access, addressing: Addressing::Virtual };
        state.window = self.domain.windows()?.bind_window(state.window, &bind)?;
        let base = virtual_address(region, offset);
        state.bound = Some(Bound::new(region.inner(), base, len, Addressing::Virtual));
        Ok(RemoteKey::new(Addressing::Virtual, base, len, state.window.key))
    }

    /// Unbinds a type 1 window (a bind of length 0): its key is dead, the window stays.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] for type 2, or if it is not bound.
    pub fn unbind(&self) -> Result<()> {
        self.expect_type_1("unbind window")?;
        let mut state = self.state.lock();
        let region =
            state.bound.as_ref().and_then(|bound| bound.region.registered()).ok_or_else(|| {
                Error::new(ErrorKind::BadState, "unbind window").remedy("the window is not bound")
            })?;
        let addressing = Addressing::Virtual;
        let bind = WindowBind { region, offset: 0, len: 0, access: Access::empty(), addressing };
        state.window = self.domain.windows()?.bind_window(state.window, &bind)?;
        state.bound = None;
        Ok(())
    }

    /// Posts the bind of a type 2 window with the low 8 bits of its key, and returns the key; it
    /// works once the request has completed. The window counts as bound from now on: after a
    /// bind that completed in error, post an invalidation, or say
    /// [`MemoryWindow::bind_failed`].
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] for type 1, or when bound already (invalidate first);
    /// [`ErrorKind::ZeroLength`]; OutOfBounds, AccessDenied, BadAccess; InvalidArgument for
    /// another domain's region.
    #[allow(clippy::too_many_arguments, reason = "the fields of a bind work request")]
    pub fn post_bind(
        &self,
        endpoint: &Endpoint,
        region: &MemoryRegion,
        (offset, len): (u64, u64),
        access: Access,
        addressing: Addressing,
        tag: u8,
        context: u64,
    ) -> Result<RemoteKey> {
        self.expect_type_2("post bind window")?;
        self.check_endpoint(endpoint)?;
        self.check(region, offset, len, access)?;
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "post bind window")
                .remedy("a type 2 window is unbound by invalidating its key"));
        }
        let target = registered(region)?;
        let mut state = self.state.lock();
        if state.bound.is_some() {
            return Err(Error::new(ErrorKind::BadState, "post bind window")
                .remedy("invalidate the window's key before binding it again"));
        }
        let operation = Operation::BindWindow {
            window: state.window,
            region: target,
            offset,
            len,
            access,
            addressing,
            tag,
        };
        post(endpoint, operation, context)?;
        state.window.key = (state.window.key & !KEY_TAG) | u64::from(tag);
        let base = match addressing {
            Addressing::Virtual => virtual_address(region, offset),
            Addressing::ZeroBased => Iova(0),
        };
        state.bound = Some(Bound::new(region.inner(), base, len, addressing));
        Ok(RemoteKey::new(addressing, base, len, state.window.key))
    }

    /// Posts the invalidation of a type 2 window's key; the window can be bound again after the
    /// request completed.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] for type 1, whose keys die by binding again.
    pub fn post_invalidate(&self, endpoint: &Endpoint, context: u64) -> Result<()> {
        self.expect_type_2("post invalidate window")?;
        self.check_endpoint(endpoint)?;
        let mut state = self.state.lock();
        post(endpoint, Operation::InvalidateWindow { window: state.window }, context)?;
        state.bound = None;
        Ok(())
    }

    /// Notes that a posted bind completed in error: the window is unbound, and its region free of
    /// it.
    pub fn bind_failed(&self) {
        self.state.lock().bound = None;
    }

    /// Notes that a peer's send-with-invalidate killed the key, as the receive's completion said.
    pub fn invalidated_by_peer(&self) {
        self.state.lock().bound = None;
    }

    /// The current key, if the window is bound.
    #[must_use]
    pub fn key(&self) -> Option<RemoteKey> {
        let state = self.state.lock();
        let bound = state.bound.as_ref()?;
        Some(RemoteKey::new(bound.addressing, bound.base, bound.len, state.window.key))
    }

    fn check_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        if Arc::ptr_eq(endpoint.domain(), &self.domain) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, "window request")
            .remedy("post it to an endpoint of the window's own domain"))
    }

    fn expect_type_1(&self, operation: &'static str) -> Result<()> {
        if self.kind == WindowType::One {
            return Ok(());
        }
        Err(Error::new(ErrorKind::BadState, operation)
            .remedy("type 2 windows are bound by a posted request"))
    }

    fn expect_type_2(&self, operation: &'static str) -> Result<()> {
        if self.kind != WindowType::One {
            return Ok(());
        }
        Err(Error::new(ErrorKind::BadState, operation).remedy(
            "type 1 windows are bound by a call, and their keys die when they are bound again",
        ))
    }
}

fn registered(region: &MemoryRegion) -> Result<crate::provider::ProviderRegion> {
    region.inner().registered().ok_or_else(|| {
        Error::new(ErrorKind::BadState, "bind window").remedy("wait until the region is registered")
    })
}

fn virtual_address(region: &MemoryRegion, offset: u64) -> Iova {
    let mut left = offset;
    for range in region.ranges() {
        if left < range.len() {
            return Iova(range.start().0 + left);
        }
        left -= range.len();
    }
    Iova(region.range().start().0)
}

fn post(endpoint: &Endpoint, operation: Operation<'_>, context: u64) -> Result<()> {
    let request = WorkRequest { operation, local: &[], peer: PeerId(0), context };
    // SAFETY: window operations name no local memory.
    unsafe { endpoint.post(&request) }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        if !self.domain.process.is_current() {
            // In a forked child, freeing it would free what the parent uses.
            return;
        }
        let window = self.state.get_mut().window;
        if let Err(error) = self.domain.windows().and_then(|windows| windows.free_window(window)) {
            tracing::error!(%error, "a memory window could not be freed");
        }
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("type", &self.kind)
            .field("key", &self.key())
            .finish_non_exhaustive()
    }
}
