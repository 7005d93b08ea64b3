//! Memory windows: keys of their own, bound to a part of a region without touching its pages.
//!
//! A window's key is its index with an 8-bit tag. Type 1 windows are bound by a call, which turns the tag; type 2
//! windows by a posted request with the caller's tag, after the key before was invalidated. A binding counts those
//! who use it, so that a key is dead and unused once its unbinding or invalidation has ended. Binding costs no system
//! call (InfiniBand 10.6.7; MW-08).

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Access, Addressing, Error, ErrorKind, MrMode, Result,
    provider::{ProviderWindow, WindowBind, WindowType},
};
use parking_lot::{Condvar, Mutex, RwLock};

use super::{
    domain::{DomainState, token_of},
    endpoint::EndpointState,
    execute::{denied, refused_remote},
    keys::{self, KnownGeneration, Token},
    post::{BindTask, KeyUse},
    region::{Body, Place},
    table::{Held, Refusal},
};

/// The windows of a domain.
#[derive(Debug, Default)]
pub(super) struct Windows {
    count: AtomicUsize,
    index: RwLock<Index>,
}

#[derive(Debug, Default)]
struct Index {
    last_token: u64,
    by_token: HashMap<u64, Arc<Window>>,
    /// By the key without its tag.
    by_prefix: HashMap<u64, Arc<Window>>,
}

/// A window.
#[derive(Debug)]
pub(super) struct Window {
    token: u64,
    kind: WindowType,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    prefix: u64,
    tag: u8,
    bound: Option<Arc<Bound>>,
    freed: bool,
}

impl State {
    const fn key(&self) -> u64 {
        self.prefix << 8 | self.tag as u64
    }
}

/// One binding of a window.
#[derive(Debug)]
pub(super) struct Bound {
    domain: Weak<DomainState>,
    region: Token,
    offset: u64,
    len: u64,
    access: Access,
    addressing: Addressing,
    /// The endpoint to which a type 2 window is tied.
    endpoint: Option<Tie>,
    standing: Mutex<Standing>,
    unused: Condvar,
}

#[derive(Debug)]
struct Tie {
    id: u64,
    /// Of a 2A window: the endpoint that cannot close meanwhile.
    holds: Option<Weak<EndpointState>>,
}

#[derive(Debug, Default)]
struct Standing {
    dead: bool,
    users: usize,
}

impl Bound {
    fn begin(self: &Arc<Self>) -> Option<BoundUse> {
        let mut standing = self.standing.lock();
        if standing.dead {
            return None;
        }
        standing.users += 1;
        Some(BoundUse { bound: Arc::clone(self) })
    }

    /// Ends the binding: no new users, and none left when this returns.
    fn end(&self) {
        {
            let mut standing = self.standing.lock();
            standing.dead = true;
            while standing.users > 0 {
                self.unused.wait(&mut standing);
            }
        }
        if let Some(domain) = self.domain.upgrade() {
            domain.nic.table.remove_dependent(self.region);
        }
        if let Some(endpoint) =
            self.endpoint.as_ref().and_then(|tie| tie.holds.as_ref()).and_then(Weak::upgrade)
        {
            endpoint.unbind();
        }
    }
}

/// A binding in use by a transfer.
#[derive(Debug)]
pub(super) struct BoundUse {
    bound: Arc<Bound>,
}

impl BoundUse {
    /// Where in the region an access through the window begins.
    pub(super) fn place(&self, region: &Body, address: u64, len: u64) -> Result<Place> {
        let bound = &self.bound;
        let offset = match bound.addressing {
            Addressing::ZeroBased => bound.offset.checked_add(address),
            Addressing::Virtual => region.offset_of(address, len),
        };
        offset
            .filter(|offset| {
                offset
                    .checked_sub(bound.offset)
                    .is_some_and(|skip| skip <= bound.len && len <= bound.len - skip)
            })
            .map(Place::Offset)
            .ok_or_else(|| {
                Error::new(ErrorKind::OutOfBounds, "transfer")
                    .provider("loopback")
                    .context("address", format_args!("{address:#x}"))
                    .context("length", len)
                    .context("window", format_args!("{} bytes", bound.len))
                    .remedy("every byte of an access lies in the window that its key names")
            })
    }
}

impl Drop for BoundUse {
    fn drop(&mut self) {
        let mut standing = self.bound.standing.lock();
        standing.users -= 1;
        if standing.dead && standing.users == 0 {
            self.bound.unused.notify_all();
        }
    }
}

impl Window {
    /// Kills the key; the window stays.
    pub(super) fn invalidate(&self) {
        let bound = self.state.lock().bound.take();
        if let Some(bound) = bound {
            bound.end();
        }
    }

    fn handle(&self, state: &State) -> ProviderWindow {
        ProviderWindow { token: self.token, key: state.key() }
    }
}

impl Windows {
    fn find(&self, window: ProviderWindow, operation: &'static str) -> Result<Arc<Window>> {
        self.index.read().by_token.get(&window.token).map(Arc::clone).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .provider("loopback")
                .remedy("the window was freed, or is of another domain")
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.count.load(Ordering::Relaxed) as u64
    }
}

impl DomainState {
    /// Whether a key can be a window's at all.
    #[inline]
    pub(super) fn has_windows(&self) -> bool {
        self.windows.count.load(Ordering::Relaxed) > 0
    }

    /// Whether a requested key would be taken for a window's.
    #[inline]
    pub(super) fn is_window_key(&self, key: u64) -> bool {
        self.has_windows() && self.windows.index.read().by_prefix.contains_key(&(key >> 8))
    }

    /// A key without tag that nothing answers to.
    fn unused_prefix(&self, index: &Index) -> Result<u64> {
        if self.keys.narrow() && !self.requested_keys() {
            return self.nic.table.reserve().map(u64::from);
        }
        let mask = if self.keys.narrow() { (1 << 24) - 1 } else { u64::MAX >> 8 };
        loop {
            let prefix = keys::random()? & mask;
            let taken = index.by_prefix.contains_key(&prefix)
                || (self.requested_keys()
                    && (0..=0xff).any(|tag| self.nic.table.is_requested(self.slot.id, prefix << 8 | tag)));
            if !taken {
                return Ok(prefix);
            }
        }
    }

    fn give_prefix(&self, prefix: u64) {
        if self.keys.narrow() && !self.requested_keys() {
            self.nic.table.unreserve(prefix as u32);
        }
    }

    pub(super) fn alloc_window(&self, kind: WindowType) -> Result<ProviderWindow> {
        if !self.nic.attr.windows.contains(&kind) {
            return Err(Error::new(ErrorKind::Unsupported, "allocate window")
                .provider("loopback")
                .context("type", format_args!("{kind:?}"))
                .remedy("use a window type that the NIC lists"));
        }
        let mut index = self.windows.index.write();
        let prefix = self.unused_prefix(&index)?;
        index.last_token += 1;
        let state = State { prefix, tag: 0, bound: None, freed: false };
        let window = Arc::new(Window { token: index.last_token, kind, state: Mutex::new(state) });
        index.by_token.insert(window.token, Arc::clone(&window));
        index.by_prefix.insert(prefix, Arc::clone(&window));
        self.windows.count.fetch_add(1, Ordering::Relaxed);
        let handle = window.handle(&window.state.lock());
        Ok(handle)
    }

    /// Checks a binding against its region and makes it; the region is then kept from closing.
    fn new_bound(
        self: &Arc<Self>,
        bind: &WindowBind,
        operation: &'static str,
        endpoint: Option<Tie>,
    ) -> Result<Arc<Bound>> {
        let region = token_of(bind.region);
        let table = &self.nic.table;
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE;
        if !remote.contains(bind.access) {
            return Err(Error::new(ErrorKind::BadAccess, operation)
                .provider("loopback")
                .context("access", bind.access)
                .remedy("a window grants REMOTE_READ and REMOTE_WRITE only"));
        }
        table.add_dependent(self.slot.id, region, operation)?;
        let checked = table
            .inspect(self.slot.id, region, operation, |body| {
                if bind.offset > body.len || bind.len > body.len - bind.offset {
                    return Err(Error::new(ErrorKind::OutOfBounds, operation)
                        .provider("loopback")
                        .context("offset", bind.offset)
                        .context("length", bind.len)
                        .context("region", body.len)
                        .remedy("a window lies inside its region"));
                }
                if bind.access.contains(Access::REMOTE_WRITE) && !body.access().nic_writes() {
                    return Err(denied("region", Access::REMOTE_WRITE).remedy(
                        "a window with remote write needs a region that the NIC may write (InfiniBand 10.6.7.2.2)",
                    ));
                }
                Ok(())
            })
            .and_then(|checked| checked);
        if let Err(error) = checked {
            table.remove_dependent(region);
            return Err(error);
        }
        Ok(Arc::new(Bound {
            domain: Arc::downgrade(self),
            region,
            offset: bind.offset,
            len: bind.len,
            access: bind.access,
            addressing: bind.addressing,
            endpoint,
            standing: Mutex::default(),
            unused: Condvar::new(),
        }))
    }

    pub(super) fn bind_window(
        self: &Arc<Self>,
        window: ProviderWindow,
        bind: &WindowBind,
    ) -> Result<ProviderWindow> {
        let window = self.windows.find(window, "bind window")?;
        if window.kind != WindowType::One {
            return Err(Error::new(ErrorKind::BadState, "bind window")
                .provider("loopback")
                .remedy("a type 2 window is bound by a posted request"));
        }
        if bind.addressing == Addressing::ZeroBased && bind.len > 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "bind window")
                .provider("loopback")
                .remedy("a type 1 window is addressed by virtual addresses"));
        }
        let new = if bind.len > 0 { Some(self.new_bound(bind, "bind window", None)?) } else { None };
        let mut index = self.windows.index.write();
        let mut state = window.state.lock();
        if state.freed {
            drop((state, index));
            if let Some(new) = new {
                new.end();
            }
            return Err(freed("bind window"));
        }
        state.tag = state.tag.wrapping_add(1);
        // Where keys are wide, the key does not come back when the tag has turned once around.
        if state.tag == 0 && !self.keys.narrow() {
            let fresh = self.unused_prefix(&index);
            if let Ok(prefix) = fresh {
                index.by_prefix.remove(&state.prefix);
                index.by_prefix.insert(prefix, Arc::clone(&window));
                state.prefix = prefix;
            }
        }
        let old = std::mem::replace(&mut state.bound, new);
        let handle = window.handle(&state);
        drop((state, index));
        if let Some(old) = old {
            old.end();
        }
        Ok(handle)
    }

    pub(super) fn free_window(&self, window: ProviderWindow) -> Result<()> {
        let window = self.windows.find(window, "free window")?;
        let (bound, prefix) = {
            let mut index = self.windows.index.write();
            let mut state = window.state.lock();
            if std::mem::replace(&mut state.freed, true) {
                return Err(freed("free window"));
            }
            index.by_token.remove(&window.token);
            index.by_prefix.remove(&state.prefix);
            self.windows.count.fetch_sub(1, Ordering::Relaxed);
            (state.bound.take(), state.prefix)
        };
        if let Some(bound) = bound {
            bound.end();
        }
        self.give_prefix(prefix);
        Ok(())
    }

    /// Frees what a dropped domain left.
    pub(super) fn free_all_windows(&self) {
        let windows: Vec<_> = self.windows.index.read().by_token.values().map(Arc::clone).collect();
        for window in windows {
            let handle = window.handle(&window.state.lock());
            if let Err(error) = self.free_window(handle) {
                tracing::error!(%error, "a window outlives its loopback domain");
            }
        }
    }

    /// Local invalidate.
    pub(super) fn invalidate_window(&self, window: ProviderWindow) -> Result<()> {
        let window = self.windows.find(window, "invalidate window")?;
        if window.kind == WindowType::One {
            return Err(not_invalidated());
        }
        window.invalidate();
        Ok(())
    }

    /// Holds the region behind a window's key.
    pub(super) fn hold_window(
        &self,
        key: u64,
        through: &EndpointState,
        right: Access,
    ) -> Result<(Held<'_>, BoundUse)> {
        let dead = || refused_remote(Refusal::Dead);
        let window = self.windows.index.read().by_prefix.get(&(key >> 8)).map(Arc::clone).ok_or_else(dead)?;
        let used = {
            let state = window.state.lock();
            let bound = state.bound.as_ref().filter(|_| state.key() == key).ok_or_else(dead)?;
            bound.begin().ok_or_else(dead)?
        };
        let bound = &used.bound;
        if bound.endpoint.as_ref().is_some_and(|tie| tie.id != through.id) {
            return Err(Error::new(ErrorKind::AccessDenied, "transfer")
                .provider("loopback")
                .context("why", "the window is bound to another endpoint")
                .remedy("reach a type 2 window through the endpoint that bound it"));
        }
        if !bound.access.contains(right) {
            return Err(denied("window", right));
        }
        let known = KnownGeneration::Whole(bound.region.generation);
        let held = self.nic.table.hold(bound.region.index, known, false).map_err(refused_remote)?;
        Ok((held, used))
    }
}

impl EndpointState {
    /// Binds a type 2 window.
    pub(super) fn bind_posted(self: &Arc<Self>, task: &BindTask) -> Result<()> {
        let domain = &self.domain;
        let window = domain.windows.find(task.window, "bind window")?;
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "bind window").provider("loopback").remedy(remedy))
        };
        if window.kind == WindowType::One {
            return refuse(ErrorKind::BadState, "a type 1 window is bound by a call");
        }
        if task.len == 0 {
            return refuse(
                ErrorKind::ZeroLength,
                "a type 2 window has at least one byte; invalidate it to unbind",
            );
        }
        let holds = (window.kind == WindowType::TwoA).then(|| Arc::downgrade(self));
        if holds.is_some() {
            self.bind()?;
        }
        let bind = WindowBind {
            region: task.region,
            offset: task.offset,
            len: task.len,
            access: task.access,
            addressing: task.addressing,
        };
        let holding = holds.is_some();
        let new = match domain.new_bound(&bind, "bind window", Some(Tie { id: self.id, holds })) {
            Ok(new) => new,
            Err(error) => {
                if holding {
                    self.unbind();
                }
                return Err(error);
            }
        };
        let refused = {
            let mut state = window.state.lock();
            if state.freed {
                Some(freed("bind window"))
            } else if state.bound.is_some() {
                Some(
                    Error::new(ErrorKind::BadState, "bind window")
                        .provider("loopback")
                        .remedy("invalidate the key of a type 2 window before binding it again"),
                )
            } else {
                state.tag = task.tag;
                state.bound = Some(Arc::clone(&new));
                None
            }
        };
        match refused {
            None => Ok(()),
            Some(error) => {
                new.end();
                Err(error)
            }
        }
    }

    /// The window whose key a message with invalidate names, if this endpoint may invalidate it.
    pub(super) fn window_to_invalidate(&self, sender: &Self, key: KeyUse) -> Result<Arc<Window>> {
        let dead = || refused_remote(Refusal::Dead);
        if key.mapped || sender.domain.mode.contains(MrMode::RAW) && !self.domain.has_windows() {
            return Err(dead());
        }
        let number = key.number;
        let window = self
            .domain
            .windows
            .index
            .read()
            .by_prefix
            .get(&(number >> 8))
            .map(Arc::clone)
            .ok_or_else(dead)?;
        if window.kind == WindowType::One {
            return Err(not_invalidated());
        }
        {
            let state = window.state.lock();
            if state.key() != number || state.freed {
                return Err(dead());
            }
            let tie = state.bound.as_ref().and_then(|bound| bound.endpoint.as_ref());
            if tie.is_some_and(|tie| tie.id != self.id) {
                return Err(Error::new(ErrorKind::AccessDenied, "send")
                    .provider("loopback")
                    .context("why", "the window is bound to another endpoint"));
            }
        }
        Ok(window)
    }
}

#[cold]
fn freed(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("loopback")
        .context("why", "the window was freed")
}

#[cold]
fn not_invalidated() -> Error {
    Error::new(ErrorKind::BadState, "invalidate window")
        .provider("loopback")
        .remedy("only type 2 windows are invalidated; bind a type 1 window anew to kill its key")
}
