//! Memory windows: keys of their own, bound to a part of a region without touching its pages.
//!
//! A window's key is its index with an 8-bit tag. Type 1 windows are bound by a call, which turns
//! the tag; type 2 windows by a posted request with the caller's tag, after the key before was
//! invalidated. Binding costs no system call (InfiniBand 10.6.7; MW-08).
//!
//! Each binding has a lock, of which a transfer through the window takes the read guard. A binding
//! ends as a region does: it leaves its window, so that no new guard can be taken, and then the
//! write guard waits for those that exist. When unbinding or invalidation returns, the key is dead
//! and unused.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{
    Access, Addressing, Error, ErrorKind, Result,
    provider::{
        ProviderRegion, ProviderWindow, WindowBind, WindowEvent, WindowRule, WindowState,
        WindowStatus, WindowType,
    },
};
use parking_lot::{ArcRwLockReadGuard, Mutex, RawRwLock, RwLock};
use smallvec::SmallVec;

use super::{
    keys::{DomainKeys, KnownGeneration, Token},
    nic::Nic,
    region::{AccessStart, Refusal, Region, denied},
    regions::RegionGuard,
};

/// The windows of a domain.
pub(super) struct Windows {
    nic: Arc<Nic>,
    /// The number of the domain.
    domain: u32,
    keys: DomainKeys,
    /// Set if keys of regions are the application's.
    requested_keys: bool,
    index: RwLock<Index>,
}

#[derive(Debug, Default)]
struct Index {
    last_token: u64,
    /// The number of prefixes that were ever made.
    prefixes: u64,
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
    binding: Option<Arc<RwLock<Binding>>>,
    /// Bindings that have left the window, and that transfers may still use.
    ending: Vec<Weak<RwLock<Binding>>>,
    freed: bool,
    /// Binds and invalidations that were posted and have not ended.
    posted: u32,
}

/// One binding of a window.
#[derive(Debug)]
pub(super) struct Binding {
    nic: Arc<Nic>,
    domain: u32,
    region: Token,
    offset: u64,
    len: u64,
    access: Access,
    addressing: Addressing,
    /// The endpoint to which a type 2 window is tied.
    endpoint: Option<u64>,
    /// The endpoint that a type 2A window keeps open.
    keeps_open: Option<Arc<EndpointLife>>,
    /// Set once the region and the endpoint are let go.
    ended: bool,
}

/// Bindings to end: nearly always one.
type Endings = SmallVec<[Arc<RwLock<Binding>>; 1]>;

/// A binding in use by a transfer: it does not end until the guard is dropped.
pub(super) type BindingGuard = ArcRwLockReadGuard<RawRwLock, Binding>;

/// The life of an endpoint: it is not closed while a type 2A window is bound to it.
#[derive(Debug)]
pub(super) struct EndpointLife {
    /// The endpoint's number on the fabric.
    pub(super) id: u64,
    closed: AtomicBool,
    /// The number of type 2A windows that are bound to the endpoint. Guards changes of `closed`.
    bound: Mutex<usize>,
}

impl EndpointLife {
    pub(super) fn new(id: u64) -> Self {
        Self { id, closed: AtomicBool::new(false), bound: Mutex::new(0) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the endpoint. Returns false if it was closed already.
    ///
    /// # Errors
    /// Busy while a window is bound to it, unless `force` is set.
    pub(super) fn close(&self, force: bool) -> Result<bool> {
        let bound = self.bound.lock();
        if self.is_closed() {
            return Ok(false);
        }
        if *bound > 0 && !force {
            let refused = refuse(WindowRule::Type2AHoldsQueuePair, "close endpoint");
            return Err(refused.context("bound", *bound));
        }
        self.closed.store(true, Ordering::Release);
        Ok(true)
    }

    fn bind(&self) -> Result<()> {
        let mut bound = self.bound.lock();
        if self.is_closed() {
            return Err(Error::new(ErrorKind::BadState, "bind endpoint")
                .provider("loopback")
                .context("why", "the endpoint is closed"));
        }
        *bound += 1;
        Ok(())
    }

    fn unbind(&self) {
        *self.bound.lock() -= 1;
    }
}

impl State {
    const fn key(&self) -> u64 {
        self.prefix << 8 | self.tag as u64
    }

    /// Takes the binding out of the window, so that no new transfer uses it. Returns the bindings
    /// whose end the caller waits for: this one, and those that another thread took before.
    fn take_binding(&mut self) -> Endings {
        self.ending.retain(|binding| binding.strong_count() > 0);
        let mut endings: Endings = self.ending.iter().filter_map(Weak::upgrade).collect();
        if let Some(binding) = self.binding.take() {
            self.ending.push(Arc::downgrade(&binding));
            endings.push(binding);
        }
        endings
    }

    /// The endpoint to which a binding is tied.
    fn endpoint(&self) -> Option<u64> {
        // Its write guard is taken only after the binding has left the window.
        self.binding.as_ref()?.try_read()?.endpoint
    }

    const fn window_state(&self) -> WindowState {
        match (self.freed, self.binding.is_some()) {
            (true, _) => WindowState::Invalid,
            (false, true) => WindowState::Valid,
            (false, false) => WindowState::Free,
        }
    }
}

impl Window {
    /// Invalidates `key`. A window that was bound again meanwhile keeps its new key.
    pub(super) fn invalidate_key(&self, key: u64) {
        let endings = {
            let mut state = self.state.lock();
            if state.key() == key { state.take_binding() } else { Endings::new() }
        };
        Binding::end_all(&endings);
    }

    /// Checks an event against the rules of the window's type.
    fn check(&self, state: &State, event: WindowEvent, operation: &'static str) -> Result<()> {
        let after = self.kind.after(state.window_state(), event);
        after.map(|_| ()).map_err(|rule| refuse(rule, operation))
    }

    fn handle(&self, state: &State) -> ProviderWindow {
        ProviderWindow { token: self.token, key: state.key() }
    }
}

impl Binding {
    /// Ends a binding that its window no longer has: waits for the transfers that use it.
    fn end(this: &RwLock<Self>) {
        this.write().let_go();
    }

    fn end_all(endings: &Endings) {
        for binding in endings {
            Self::end(binding);
        }
    }

    fn let_go(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.nic.regions.remove_dependent(self.domain, self.region);
            if let Some(endpoint) = &self.keeps_open {
                endpoint.unbind();
            }
        }
    }

    /// Start of an access through the window, in the region.
    pub(super) fn access_start(
        &self,
        region: &Region,
        address: u64,
        len: u64,
    ) -> Result<AccessStart> {
        let offset = match self.addressing {
            Addressing::ZeroBased => self.offset.checked_add(address),
            Addressing::Virtual => region.offset_of(address, len),
        };
        let inside = |offset: &u64| {
            let skip = offset.checked_sub(self.offset);
            skip.is_some_and(|skip| skip <= self.len && len <= self.len - skip)
        };
        offset.filter(inside).map(AccessStart::Offset).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "transfer")
                .provider("loopback")
                .context("address", format_args!("{address:#x}"))
                .context("length", len)
                .context("window", format_args!("{} bytes", self.len))
                .remedy("every byte of an access lies in the window that its key names")
        })
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Windows {
    pub(super) fn new(
        nic: &Arc<Nic>,
        domain: u32,
        keys: &DomainKeys,
        requested_keys: bool,
    ) -> Self {
        Self {
            nic: Arc::clone(nic),
            domain,
            keys: keys.clone(),
            requested_keys,
            index: RwLock::default(),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.index.read().by_token.len() as u64
    }

    /// Returns whether a requested key would be taken for a window's.
    pub(super) fn has_key(&self, key: u64) -> bool {
        self.of_key(key).is_some()
    }

    fn of_key(&self, key: u64) -> Option<Arc<Window>> {
        self.index.read().by_prefix.get(&(key >> 8)).map(Arc::clone)
    }

    fn find(&self, window: ProviderWindow, operation: &'static str) -> Result<Arc<Window>> {
        let found = self.index.read().by_token.get(&window.token).map(Arc::clone);
        found.ok_or_else(|| refuse(WindowRule::Allocated, operation))
    }

    /// Returns whether prefixes are indices of the NIC's table, which regions then do not have.
    fn prefixes_are_indices(&self) -> bool {
        self.keys.narrow() && !self.requested_keys
    }

    /// Makes a key without tag that cannot be guessed, without a system call.
    fn random_prefix(&self, index: &mut Index) -> u64 {
        loop {
            index.prefixes += 1;
            let prefix = self.keys.window_prefix(index.prefixes);
            let requested =
                |tag| self.nic.regions.is_requested(self.domain, prefix << 8 | u64::from(tag));
            let taken = index.by_prefix.contains_key(&prefix)
                || (self.requested_keys && (0..=u8::MAX).any(requested));
            if !taken {
                return prefix;
            }
        }
    }

    pub(super) fn alloc(&self, kind: WindowType) -> Result<ProviderWindow> {
        if !self.nic.config.windows.contains(&kind) {
            return Err(Error::new(ErrorKind::Unsupported, "allocate window")
                .provider("loopback")
                .context("type", format_args!("{kind:?}"))
                .remedy("use a window type that the NIC lists"));
        }
        let mut index = self.index.write();
        let prefix = if self.prefixes_are_indices() {
            u64::from(self.nic.regions.reserve_index()?)
        } else {
            self.random_prefix(&mut index)
        };
        index.last_token += 1;
        let state =
            State { prefix, tag: 0, binding: None, ending: Vec::new(), freed: false, posted: 0 };
        let window = Arc::new(Window { token: index.last_token, kind, state: Mutex::new(state) });
        index.by_token.insert(window.token, Arc::clone(&window));
        index.by_prefix.insert(prefix, Arc::clone(&window));
        let handle = window.handle(&window.state.lock());
        Ok(handle)
    }

    /// Checks a binding against its region and makes it; the region is then kept from closing.
    fn new_binding(&self, bind: &WindowBind) -> Result<Binding> {
        let operation = "bind window";
        let region = token_of(bind.region);
        if !Access::ANY_REMOTE.contains(bind.access) {
            let refused = refuse(WindowRule::RemoteRightsOnly, operation);
            return Err(refused.context("access", bind.access));
        }
        let regions = &self.nic.regions;
        regions.add_dependent(self.domain, region, operation)?;
        let checked = regions.inspect(self.domain, region, operation, |region| {
            let attr = &region.attr;
            if bind.offset > attr.len || bind.len > attr.len - bind.offset {
                return Err(refuse(WindowRule::InsideRegion, operation)
                    .context("offset", bind.offset)
                    .context("length", bind.len)
                    .context("region", attr.len));
            }
            if !attr.access.contains(Access::MW_BIND) {
                return Err(refuse(WindowRule::RegionAllowsWindows, operation));
            }
            if bind.access.peers_write() && !attr.access.nic_writes() {
                let refused = refuse(WindowRule::WritesNeedLocalWrite, operation);
                return Err(refused.context("access", attr.access));
            }
            Ok(())
        });
        if let Err(error) = checked {
            regions.remove_dependent(self.domain, region);
            return Err(error);
        }
        Ok(Binding {
            nic: Arc::clone(&self.nic),
            domain: self.domain,
            region,
            offset: bind.offset,
            len: bind.len,
            access: bind.access,
            addressing: bind.addressing,
            endpoint: None,
            keeps_open: None,
            ended: false,
        })
    }

    /// Binds a type 1 window, or unbinds it if the length is 0.
    pub(super) fn bind(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        let operation = "bind window";
        let window = self.find(window, operation)?;
        if window.kind != WindowType::One {
            return Err(refuse(WindowRule::BoundByItsVerb, operation));
        }
        if bind.addressing == Addressing::ZeroBased && bind.len > 0 {
            return Err(refuse(WindowRule::Type1IsVirtual, operation));
        }
        let event = if bind.len > 0 { WindowEvent::Bind } else { WindowEvent::BindNothing };
        let new =
            if bind.len > 0 { Some(Arc::new(RwLock::new(self.new_binding(bind)?))) } else { None };
        let mut index = self.index.write();
        let mut state = window.state.lock();
        if let Err(error) = window.check(&state, event, operation) {
            drop((state, index));
            if let Some(new) = new {
                Binding::end(&new);
            }
            return Err(error);
        }
        state.tag = state.tag.wrapping_add(1);
        // A wide key does not come back when the tag has turned once around.
        if state.tag == 0 && !self.keys.narrow() {
            let prefix = self.random_prefix(&mut index);
            index.by_prefix.remove(&state.prefix);
            index.by_prefix.insert(prefix, Arc::clone(&window));
            state.prefix = prefix;
        }
        let endings = state.take_binding();
        state.binding = new;
        let handle = window.handle(&state);
        drop((state, index));
        Binding::end_all(&endings);
        Ok(handle)
    }

    /// Binds a type 2 window, for a request that was posted to `endpoint`.
    pub(super) fn bind_posted(
        &self,
        window: ProviderWindow,
        bind: &WindowBind,
        tag: u8,
        endpoint: &Arc<EndpointLife>,
    ) -> Result<()> {
        let operation = "bind window";
        let window = self.find(window, operation)?;
        if window.kind == WindowType::One {
            return Err(refuse(WindowRule::BoundByItsVerb, operation));
        }
        if bind.len == 0 {
            return Err(refuse(WindowRule::Type2HasLength, operation));
        }
        let keeps_open = (window.kind == WindowType::TwoA).then(|| Arc::clone(endpoint));
        if keeps_open.is_some() {
            endpoint.bind()?;
        }
        let new = match self.new_binding(bind) {
            Ok(mut new) => {
                (new.endpoint, new.keeps_open) = (Some(endpoint.id), keeps_open);
                new
            }
            Err(error) => {
                if keeps_open.is_some() {
                    endpoint.unbind();
                }
                return Err(error);
            }
        };
        let new = Arc::new(RwLock::new(new));
        let bound = {
            let mut state = window.state.lock();
            window.check(&state, WindowEvent::Bind, operation).map(|()| {
                state.tag = tag;
                state.binding = Some(Arc::clone(&new));
                state.key()
            })
        };
        let key = bound.inspect_err(|_| Binding::end(&new))?;
        // An endpoint that closes first marks itself closed, and then ends the bindings that it
        // finds. It may have looked before this one was there.
        if endpoint.is_closed() {
            window.invalidate_key(key);
            return Err(Error::new(ErrorKind::BadState, operation)
                .provider("loopback")
                .context("why", "the endpoint is closed"));
        }
        Ok(())
    }

    pub(super) fn free(&self, window: ProviderWindow) -> Result<()> {
        let window = self.find(window, "free window")?;
        let (endings, prefix) = {
            let mut index = self.index.write();
            let mut state = window.state.lock();
            window.check(&state, WindowEvent::Deallocate, "free window")?;
            state.freed = true;
            index.by_token.remove(&window.token);
            index.by_prefix.remove(&state.prefix);
            (state.take_binding(), state.prefix)
        };
        Binding::end_all(&endings);
        if self.prefixes_are_indices() {
            self.nic.regions.free_index(prefix as u32);
        }
        Ok(())
    }

    /// Frees what a dropped domain left.
    pub(super) fn free_all(&self) {
        let windows: Vec<_> = self.index.read().by_token.values().map(Arc::clone).collect();
        for window in windows {
            let handle = window.handle(&window.state.lock());
            if let Err(error) = self.free(handle) {
                tracing::error!(%error, "a window outlives its loopback domain");
            }
        }
    }

    /// Invalidates the key of a type 2 window through an endpoint.
    pub(super) fn invalidate(&self, window: ProviderWindow, endpoint: u64) -> Result<()> {
        let operation = "invalidate window";
        let window = self.find(window, operation)?;
        let endings = {
            let mut state = window.state.lock();
            window.check(&state, WindowEvent::Invalidate, operation)?;
            if state.endpoint().is_some_and(|tied| tied != endpoint) {
                return Err(refuse(WindowRule::OwnQueuePair, operation));
            }
            state.take_binding()
        };
        Binding::end_all(&endings);
        Ok(())
    }

    /// Returns the state of a window.
    pub(super) fn status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        let window = self.find(window, "window status")?;
        let state = window.state.lock();
        let pending = state.posted > 0;
        Ok(WindowStatus { key: state.key(), state: state.window_state(), pending })
    }

    /// Notes that a bind or invalidation of a window was posted.
    pub(super) fn note_posted(&self, window: ProviderWindow) {
        if let Some(window) = self.index.read().by_token.get(&window.token) {
            window.state.lock().posted += 1;
        }
    }

    /// Notes that a bind or invalidation of a window has ended.
    pub(super) fn note_ended(&self, window: ProviderWindow) {
        if let Some(window) = self.index.read().by_token.get(&window.token) {
            window.state.lock().posted -= 1;
        }
    }

    /// Kills the keys of windows that are bound through an endpoint which is closed. Transfers
    /// through them go on to their end: one may have closed the endpoint on this thread.
    pub(super) fn end_of_endpoint(&self, endpoint: u64) {
        let windows: Vec<_> = self.index.read().by_token.values().map(Arc::clone).collect();
        for window in windows {
            let tied = {
                let mut state = window.state.lock();
                let is_tied = state.endpoint() == Some(endpoint);
                is_tied.then(|| state.take_binding())
            };
            // It lets the region go, which must not happen under the window's lock.
            drop(tied);
        }
    }

    /// Finds the window whose key a message to an endpoint invalidates, if that endpoint may.
    pub(super) fn find_to_invalidate(&self, key: u64, endpoint: u64) -> Result<Arc<Window>> {
        let dead = || Refusal::Dead.of_key();
        let window = self.of_key(key).ok_or_else(dead)?;
        {
            let state = window.state.lock();
            if state.key() != key || state.freed {
                return Err(dead());
            }
            window.check(&state, WindowEvent::InvalidateByPeer, "send")?;
            if state.endpoint().is_some_and(|tied| tied != endpoint) {
                return Err(refuse(WindowRule::OwnQueuePair, "send"));
            }
        }
        Ok(window)
    }

    /// Holds the region behind a window's key, which must grant one of the rights in `any_of`
    /// through the endpoint.
    pub(super) fn hold(
        &self,
        key: u64,
        endpoint: u64,
        any_of: Access,
    ) -> Result<(RegionGuard, BindingGuard)> {
        let dead = || Refusal::Dead.of_key();
        let window = self.of_key(key).ok_or_else(dead)?;
        let binding = {
            let state = window.state.lock();
            if state.key() != key {
                return Err(dead());
            }
            window.check(&state, WindowEvent::Access, "transfer")?;
            let binding = state.binding.as_ref();
            // Its write guard is taken only after the binding has left the window.
            binding.and_then(RwLock::try_read_arc).ok_or_else(dead)?
        };
        if binding.endpoint.is_some_and(|tied| tied != endpoint) {
            return Err(refuse(WindowRule::OwnQueuePair, "transfer"));
        }
        if !binding.access.intersects(any_of) {
            return Err(denied("window", any_of));
        }
        let Token { index, generation } = binding.region;
        let known = KnownGeneration::Whole(generation);
        let region = self.nic.regions.hold(self.domain, index, known, false);
        Ok((region.map_err(Refusal::of_key)?, binding))
    }
}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Windows").field("count", &self.len()).finish_non_exhaustive()
    }
}

/// The token of a region's handle.
pub(super) fn token_of(region: ProviderRegion) -> Token {
    Token::from_u64(region.token)
}

fn refuse(rule: WindowRule, operation: &'static str) -> Error {
    rule.refuse(operation).provider("loopback")
}
