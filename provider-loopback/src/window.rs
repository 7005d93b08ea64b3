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
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{
    Access, Addressing, Error, ErrorKind, Result,
    provider::{ProviderRegion, ProviderWindow, WindowBind, WindowType},
};
use parking_lot::{ArcRwLockReadGuard, Mutex, RawRwLock, RwLock};

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
    freed: bool,
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
}

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
            return Err(Error::new(ErrorKind::Busy, "close endpoint")
                .provider("loopback")
                .context("bound", *bound)
                .remedy("invalidate the type 2A windows that are bound to it first"));
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
}

impl Window {
    /// Kills the key; the window stays.
    pub(super) fn invalidate(&self) {
        let binding = self.state.lock().binding.take();
        if let Some(binding) = binding {
            Binding::end(&binding);
        }
    }

    fn handle(&self, state: &State) -> ProviderWindow {
        ProviderWindow { token: self.token, key: state.key() }
    }
}

impl Binding {
    /// Ends a binding that its window no longer has: waits for the transfers that use it.
    fn end(this: &RwLock<Self>) {
        let binding = this.write();
        binding.nic.regions.remove_dependent(binding.domain, binding.region);
        if let Some(endpoint) = &binding.keeps_open {
            endpoint.unbind();
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
        self.index.read().by_token.get(&window.token).map(Arc::clone).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .provider("loopback")
                .remedy("the window was freed, or is of another domain")
        })
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
        let state = State { prefix, tag: 0, binding: None, freed: false };
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
            return Err(Error::new(ErrorKind::BadAccess, operation)
                .provider("loopback")
                .context("access", bind.access)
                .remedy("a window grants remote rights only"));
        }
        let regions = &self.nic.regions;
        regions.add_dependent(self.domain, region, operation)?;
        let checked = regions.inspect(self.domain, region, operation, |region| {
            let attr = &region.attr;
            if bind.offset > attr.len || bind.len > attr.len - bind.offset {
                return Err(Error::new(ErrorKind::OutOfBounds, operation)
                    .provider("loopback")
                    .context("offset", bind.offset)
                    .context("length", bind.len)
                    .context("region", attr.len)
                    .remedy("a window lies inside its region"));
            }
            if bind.access.peers_write() && !attr.access.nic_writes() {
                return Err(denied("region", Access::REMOTE_WRITE).remedy(
                    "a window with remote write or atomic needs a region that the NIC may \
                     write (InfiniBand 10.6.7.2.2)",
                ));
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
        })
    }

    /// Binds a type 1 window, or unbinds it if the length is 0.
    pub(super) fn bind(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        let window = self.find(window, "bind window")?;
        if window.kind != WindowType::One {
            return Err(refused(
                ErrorKind::BadState,
                "a type 2 window is bound by a posted request",
            ));
        }
        if bind.addressing == Addressing::ZeroBased && bind.len > 0 {
            return Err(refused(
                ErrorKind::InvalidArgument,
                "a type 1 window is addressed by virtual addresses",
            ));
        }
        let new =
            if bind.len > 0 { Some(Arc::new(RwLock::new(self.new_binding(bind)?))) } else { None };
        let mut index = self.index.write();
        let mut state = window.state.lock();
        if state.freed {
            drop((state, index));
            if let Some(new) = new {
                Binding::end(&new);
            }
            return Err(freed("bind window"));
        }
        state.tag = state.tag.wrapping_add(1);
        // A wide key does not come back when the tag has turned once around.
        if state.tag == 0 && !self.keys.narrow() {
            let prefix = self.random_prefix(&mut index);
            index.by_prefix.remove(&state.prefix);
            index.by_prefix.insert(prefix, Arc::clone(&window));
            state.prefix = prefix;
        }
        let old = std::mem::replace(&mut state.binding, new);
        let handle = window.handle(&state);
        drop((state, index));
        if let Some(old) = old {
            Binding::end(&old);
        }
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
        let window = self.find(window, "bind window")?;
        if window.kind == WindowType::One {
            return Err(refused(ErrorKind::BadState, "a type 1 window is bound by a call"));
        }
        if bind.len == 0 {
            return Err(refused(
                ErrorKind::ZeroLength,
                "a type 2 window has at least one byte; invalidate it to unbind",
            ));
        }
        let keeps_open = (window.kind == WindowType::TwoA).then(|| Arc::clone(endpoint));
        if keeps_open.is_some() {
            endpoint.bind()?;
        }
        let new = match self.new_binding(bind) {
            Ok(new) => Binding { endpoint: Some(endpoint.id), keeps_open, ..new },
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
            if state.freed {
                Err(freed("bind window"))
            } else if state.binding.is_some() {
                Err(refused(
                    ErrorKind::BadState,
                    "invalidate the key of a type 2 window before binding it again",
                ))
            } else {
                state.tag = tag;
                state.binding = Some(Arc::clone(&new));
                Ok(())
            }
        };
        bound.inspect_err(|_| Binding::end(&new))
    }

    pub(super) fn free(&self, window: ProviderWindow) -> Result<()> {
        let window = self.find(window, "free window")?;
        let (binding, prefix) = {
            let mut index = self.index.write();
            let mut state = window.state.lock();
            if std::mem::replace(&mut state.freed, true) {
                return Err(freed("free window"));
            }
            index.by_token.remove(&window.token);
            index.by_prefix.remove(&state.prefix);
            (state.binding.take(), state.prefix)
        };
        if let Some(binding) = binding {
            Binding::end(&binding);
        }
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

    /// Invalidates the key of a type 2 window, for a posted request.
    pub(super) fn invalidate(&self, window: ProviderWindow) -> Result<()> {
        let window = self.find(window, "invalidate window")?;
        if window.kind == WindowType::One {
            return Err(not_invalidated());
        }
        window.invalidate();
        Ok(())
    }

    /// Finds the window whose key a message to an endpoint invalidates, if that endpoint may.
    pub(super) fn find_to_invalidate(&self, key: u64, endpoint: u64) -> Result<Arc<Window>> {
        let dead = || Refusal::Dead.of_key();
        let window = self.of_key(key).ok_or_else(dead)?;
        if window.kind == WindowType::One {
            return Err(not_invalidated());
        }
        {
            let state = window.state.lock();
            if state.key() != key || state.freed {
                return Err(dead());
            }
            let tied = state.binding.as_ref().and_then(|binding| binding.read().endpoint);
            if tied.is_some_and(|tied| tied != endpoint) {
                return Err(Error::new(ErrorKind::AccessDenied, "send")
                    .provider("loopback")
                    .context("why", "the window is bound to another endpoint"));
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
            let binding = state.binding.as_ref().filter(|_| state.key() == key);
            // Its write guard is taken only after the binding has left the window.
            binding.and_then(RwLock::try_read_arc).ok_or_else(dead)?
        };
        if binding.endpoint.is_some_and(|tied| tied != endpoint) {
            return Err(Error::new(ErrorKind::AccessDenied, "transfer")
                .provider("loopback")
                .context("why", "the window is bound to another endpoint")
                .remedy("reach a type 2 window through the endpoint that bound it"));
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

fn refused(kind: ErrorKind, remedy: &'static str) -> Error {
    Error::new(kind, "bind window").provider("loopback").remedy(remedy)
}

fn freed(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("loopback")
        .context("why", "the window was freed")
}

fn not_invalidated() -> Error {
    Error::new(ErrorKind::BadState, "invalidate window")
        .provider("loopback")
        .remedy("only type 2 windows are invalidated; bind a type 1 window anew to kill its key")
}
