//! Memory windows: additional keys for parts of regions.
//!
//! A window's key is a prefix with an 8-bit tag. A type 1 window is bound by a call, which
//! increments the tag. A type 2 window is bound by a posted request, or by a call that names an
//! endpoint. The caller chooses the tag, and must have invalidated the old key. Binding makes no
//! system call (InfiniBand 10.6.7; MW-08).
//!
//! Each binding has a lock. A transfer through the window takes a read guard of that lock. A
//! binding ends in two steps:
//!
//! 1. The window drops its reference, so that no transfer can take a new guard.
//! 2. A write guard waits for the existing guards.
//!
//! When unbinding or invalidation returns, the key is invalid and no transfer uses it. A copy
//! engine must not unbind or invalidate a window of the transfer that called it: the call would
//! wait for its own transfer.
//!
//! The close of an endpoint ends the bindings of its type 2 windows, but does not wait for
//! transfers. If a transfer uses such a binding, step 2 is done later: by the next call that ends a
//! binding of the window, or by the deregistration of the region.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
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
    NicCall,
    keys::{DomainKeys, Token},
    nic::Nic,
    region::{AccessStart, Refusal, Region, denied},
    regions::RegionGuard,
};

/// The windows of a domain.
pub(super) struct Windows {
    nic: Arc<Nic>,
    /// The number that identifies the domain on its NIC.
    domain: u32,
    keys: Arc<DomainKeys>,
    /// True if the NIC chooses keys of 4 bytes. The prefix of a window's key is then an index that
    /// the window has reserved in the region table.
    prefixes_are_indices: bool,
    index: RwLock<Index>,
    /// The number of windows in the index. While it is 0, a registration needs no lock of the
    /// index.
    count: AtomicU64,
}

#[derive(Debug, Default)]
struct Index {
    last_token: u64,
    by_token: HashMap<u64, Arc<Window>>,
    /// Windows by the prefixes of their keys.
    by_prefix: HashMap<u64, Arc<Window>>,
}

/// A memory window, bound or not.
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
    /// `None` while the window is not bound.
    binding: Option<Arc<RwLock<Binding>>>,
    /// Bindings that were removed from the window, but that transfers may still use. A binding that
    /// has ended stays in the list until the next binding is removed.
    ending: Endings,
    /// True once the window was deallocated.
    freed: bool,
    /// The number of posted binds and invalidations that have not ended.
    posted: u32,
    /// The state that the window will have when all posted binds and invalidations have succeeded.
    /// Valid only while `posted` is not 0.
    expected: WindowState,
}

/// A binding of a window to a part of a region.
#[derive(Debug)]
pub(super) struct Binding {
    nic: Arc<Nic>,
    domain: u32,
    region: Token,
    offset: u64,
    len: u64,
    access: Access,
    addressing: Addressing,
    /// The number of the endpoint that bound a type 2 window. Other endpoints may not use the
    /// window. `None` for a type 1 window.
    endpoint: Option<u64>,
    /// The endpoint that the window keeps open; `None` unless the window has type 2A.
    keeps_open: Option<Arc<EndpointLife>>,
    /// True once the binding has ended: it no longer keeps its region registered or its endpoint
    /// open.
    ended: bool,
}

/// Bindings that were removed from their windows, and that transfers may still use. Usually there
/// is one.
type Endings = SmallVec<[Arc<RwLock<Binding>>; 1]>;

/// A guard of a binding in use by a transfer. The binding does not end until the guard is dropped.
pub(super) type BindingGuard = ArcRwLockReadGuard<RawRwLock, Binding>;

/// The open or closed state of an endpoint. A bound type 2A window keeps the endpoint open.
#[derive(Debug)]
pub(super) struct EndpointLife {
    /// The number of the endpoint on its fabric.
    pub(super) id: u64,
    closed: AtomicBool,
    /// The number of type 2A windows bound through the endpoint. A thread that changes `closed`
    /// holds this mutex, so that no window is bound meanwhile.
    bound: Mutex<usize>,
}

impl EndpointLife {
    pub(super) fn new(id: u64) -> Self {
        Self { id, closed: AtomicBool::new(false), bound: Mutex::new(0) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Marks the endpoint closed. Returns false if it was closed before.
    ///
    /// # Errors
    /// Busy: a type 2A window is bound through the endpoint, and `force` is not set.
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
            return Err(endpoint_closed());
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

    /// Removes the binding from the window, so that no new transfer uses it. Returns the bindings
    /// that the caller must then end: the removed one, and those removed earlier that have not
    /// ended.
    fn take_binding(&mut self) -> Endings {
        let has_ended = |binding: &RwLock<Binding>| binding.try_read().is_some_and(|it| it.ended);
        self.ending.retain(|binding| !has_ended(binding));
        self.ending.extend(self.binding.take());
        self.ending.clone()
    }

    /// Returns the number of the endpoint that bound a type 2 window.
    fn endpoint(&self) -> Option<u64> {
        // The lock has no writer: a write guard is taken only after the binding was removed from
        // the window.
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
    /// Invalidates `key`, and waits for the transfers that use the key. Does nothing if the window
    /// has another key by now.
    pub(super) fn invalidate_key(&self, key: u64) {
        let endings = {
            let mut state = self.state.lock();
            if state.key() == key { state.take_binding() } else { Endings::new() }
        };
        Binding::end_all(&endings);
    }

    /// Checks that the rules of the window's type allow an event in the window's current state.
    fn check(&self, state: &State, event: WindowEvent, operation: &'static str) -> Result<()> {
        let after = self.kind.after(state.window_state(), event);
        after.map(|_| ()).map_err(|rule| refuse(rule, operation))
    }

    fn handle(&self, state: &State) -> ProviderWindow {
        ProviderWindow { token: self.token, key: state.key() }
    }
}

impl Binding {
    /// Ends bindings that were removed from their windows. Waits for the transfers that use these
    /// bindings.
    fn end_all(endings: &Endings) {
        endings.iter().for_each(|binding| binding.write().release());
    }

    /// Releases the region and the endpoint: the binding no longer keeps them open. Does nothing if
    /// the binding has released them already.
    fn release(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.nic.regions.remove_dependent(self.domain, self.region);
            if let Some(endpoint) = &self.keeps_open {
                endpoint.unbind();
            }
        }
    }

    /// Converts the address of an access through the window to the start of the access in the
    /// region.
    ///
    /// # Errors
    /// OutOfBounds: the access is not inside the window.
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
                .remedy("access only bytes of the window that the key names")
        })
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.release();
    }
}

impl Windows {
    pub(super) fn new(
        nic: &Arc<Nic>,
        domain: u32,
        keys: &Arc<DomainKeys>,
        requested_keys: bool,
    ) -> Self {
        Self {
            nic: Arc::clone(nic),
            domain,
            keys: Arc::clone(keys),
            prefixes_are_indices: keys.narrow() && !requested_keys,
            index: RwLock::default(),
            count: AtomicU64::new(0),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns true if a window of the domain has keys with the prefix of `key`.
    pub(super) fn has_key(&self, key: u64) -> bool {
        self.len() > 0 && self.of_key(key).is_some()
    }

    fn of_key(&self, key: u64) -> Option<Arc<Window>> {
        self.index.read().by_prefix.get(&(key >> 8)).map(Arc::clone)
    }

    fn find(&self, window: ProviderWindow, operation: &'static str) -> Result<Arc<Window>> {
        let found = self.index.read().by_token.get(&window.token).map(Arc::clone);
        found.ok_or_else(|| refuse(WindowRule::Allocated, operation))
    }

    /// Returns a random prefix (a key without its 8-bit tag) that no key of a region or window of
    /// the domain has. Makes no system call.
    fn random_prefix(&self, index: &Index) -> u64 {
        loop {
            let prefix = self.keys.draw() >> 8;
            let keys = prefix << 8..=prefix << 8 | 0xff;
            if !index.by_prefix.contains_key(&prefix)
                && !self.nic.regions.has_key(self.domain, keys)
            {
                return prefix;
            }
        }
    }

    pub(super) fn alloc(&self, kind: WindowType) -> Result<ProviderWindow> {
        if !self.nic.config.windows.contains(&kind) {
            return Err(Error::new(ErrorKind::Unsupported, "allocate window")
                .provider("loopback")
                .context("type", format_args!("{kind:?}"))
                .remedy("allocate a window of a type in `window_types`"));
        }
        let mut index = self.index.write();
        let (prefix, tag) = if self.prefixes_are_indices {
            let token = self.nic.regions.reserve_index()?;
            (u64::from(token.index), token.generation as u8)
        } else {
            (self.random_prefix(&index), 0)
        };
        index.last_token += 1;
        let state = State {
            prefix,
            tag,
            binding: None,
            ending: Endings::new(),
            freed: false,
            posted: 0,
            expected: WindowState::Free,
        };
        let window = Arc::new(Window { token: index.last_token, kind, state: Mutex::new(state) });
        index.by_token.insert(window.token, Arc::clone(&window));
        self.count.fetch_add(1, Ordering::Release);
        index.by_prefix.insert(prefix, Arc::clone(&window));
        let handle = window.handle(&window.state.lock());
        Ok(handle)
    }

    /// Checks that a bind request names a part of its region, and that the region has MW_BIND. If
    /// the request lets peers write, also checks that the region lets the NIC write.
    pub(super) fn check_part(&self, bind: &WindowBind) -> Result<()> {
        let operation = "bind window";
        self.nic.regions.inspect(self.domain, token_of(bind.region), operation, |region| {
            let attr = &region.attr;
            let rule = if bind.offset > attr.len || bind.len > attr.len - bind.offset {
                WindowRule::InsideRegion
            } else if !attr.access.contains(Access::MW_BIND) {
                WindowRule::RegionAllowsWindows
            } else if bind.access.peers_write() && !attr.access.nic_writes() {
                WindowRule::WritesNeedLocalWrite
            } else {
                return Ok(());
            };
            Err(refuse(rule, operation))
        })
    }

    /// Checks a bind request by [`Windows::check_part`]. Returns the new binding, which keeps the
    /// region registered until the binding ends or is dropped.
    fn new_binding(&self, bind: &WindowBind) -> Result<Binding> {
        let (regions, region) = (&self.nic.regions, token_of(bind.region));
        regions.add_dependent(self.domain, region, "bind window")?;
        let binding = Binding {
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
        };
        self.check_part(bind)?;
        Ok(binding)
    }

    /// Binds a type 1 window, or unbinds it if the length is 0. Returns a handle with the new key.
    pub(super) fn bind(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        let operation = "bind window";
        let window = self.find(window, operation)?;
        if window.kind != WindowType::One {
            return Err(refuse(WindowRule::BoundByItsVerb, operation));
        }
        if bind.addressing == Addressing::ZeroBased && bind.len > 0 {
            return Err(refuse(WindowRule::Type1IsVirtual, operation));
        }
        let (event, new) = if bind.len > 0 {
            (WindowEvent::Bind, Some(Arc::new(RwLock::new(self.new_binding(bind)?))))
        } else {
            (WindowEvent::BindNothing, None)
        };
        let mut index = self.index.write();
        let mut state = window.state.lock();
        // An error drops `new` after the locks. The drop releases the region.
        window.check(&state, event, operation)?;
        state.tag = state.tag.wrapping_add(1);
        // After 256 binds and unbinds the tags repeat. With 8-byte keys, the window then gets a new
        // prefix, so that its old keys stay invalid. With 4-byte keys, an old key is used again.
        if state.tag == 0 && !self.keys.narrow() {
            let prefix = self.random_prefix(&index);
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

    /// Binds a type 2 window through `endpoint`.
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
        let unbind = |_: &Error| keeps_open.iter().for_each(|endpoint| endpoint.unbind());
        let mut new = self.new_binding(bind).inspect_err(unbind)?;
        (new.endpoint, new.keeps_open) = (Some(endpoint.id), keeps_open);
        let new = Arc::new(RwLock::new(new));
        let key = {
            let mut state = window.state.lock();
            window.check(&state, WindowEvent::Bind, operation)?;
            state.tag = tag;
            state.binding = Some(new);
            state.key()
        };
        // An endpoint that closes first marks itself closed, and then ends the bindings that it
        // finds. This binding may have been added after that search.
        if endpoint.is_closed() {
            window.invalidate_key(key);
            return Err(endpoint_closed());
        }
        Ok(())
    }

    pub(super) fn free(&self, window: ProviderWindow) -> Result<()> {
        let window = self.find(window, "free window")?;
        let (endings, prefix, tag) = {
            let mut index = self.index.write();
            let mut state = window.state.lock();
            window.check(&state, WindowEvent::Deallocate, "free window")?;
            state.freed = true;
            index.by_token.remove(&window.token);
            self.count.fetch_sub(1, Ordering::Release);
            index.by_prefix.remove(&state.prefix);
            (state.take_binding(), state.prefix, state.tag)
        };
        Binding::end_all(&endings);
        if self.prefixes_are_indices {
            self.nic.regions.free_index(prefix as u32, tag);
        }
        Ok(())
    }

    /// Frees all windows when the domain closes.
    pub(super) fn free_all(&self) {
        let windows: Vec<_> = self.index.read().by_token.values().map(Arc::clone).collect();
        for window in windows {
            let handle = window.handle(&window.state.lock());
            if let Err(error) = self.free(handle) {
                tracing::error!(
                    error = %error.full(),
                    "cannot free a window of a dropped loopback domain"
                );
            }
        }
    }

    /// Invalidates the key of a type 2 window through an endpoint. Waits for the transfers that use
    /// the window.
    ///
    /// # Errors
    /// The error of the [`WindowRule`] that forbids the invalidation: the window is not allocated
    /// in this domain, has type 1, or is bound through another endpoint.
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

    /// Returns the status of a window: its current key, its state, and whether a posted bind or
    /// invalidation is pending.
    pub(super) fn status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        let window = self.find(window, "window status")?;
        let state = window.state.lock();
        let pending = state.posted > 0;
        Ok(WindowStatus { key: state.key(), state: state.window_state(), pending })
    }

    /// Counts a bind or invalidation of a window that is about to be posted.
    ///
    /// # Errors
    /// The error of the [`WindowRule`] that forbids `event` in the state that the earlier posted
    /// requests will leave.
    pub(super) fn note_posted(&self, window: ProviderWindow, event: WindowEvent) -> Result<()> {
        let operation = match event {
            WindowEvent::Invalidate => "invalidate window",
            _ => "bind window",
        };
        let window = self.find(window, operation)?;
        if window.kind == WindowType::One && event != WindowEvent::Invalidate {
            return Err(refuse(WindowRule::BoundByItsVerb, operation));
        }
        let mut state = window.state.lock();
        let before = if state.posted > 0 { state.expected } else { state.window_state() };
        let after = window.kind.after(before, event);
        state.expected = after.map_err(|rule| refuse(rule, operation))?;
        state.posted += 1;
        Ok(())
    }

    /// Records the end of a bind or invalidation that [`Windows::note_posted`] has counted.
    pub(super) fn note_ended(&self, window: ProviderWindow) {
        if let Some(window) = self.index.read().by_token.get(&window.token) {
            window.state.lock().posted -= 1;
        }
    }

    /// Removes the bindings that were made through a closed endpoint, so that their keys are
    /// invalid.
    ///
    /// Does not wait for transfers, because this call may come from a copy engine inside one. A
    /// binding that no transfer uses ends at once. Other bindings end later
    /// ([`Windows::end_bindings_to`]).
    pub(super) fn end_of_endpoint(&self, endpoint: u64) {
        let windows: Vec<_> = self.index.read().by_token.values().map(Arc::clone).collect();
        for window in windows {
            let tied = {
                let mut state = window.state.lock();
                let is_tied = state.endpoint() == Some(endpoint);
                is_tied.then(|| state.take_binding())
            };
            for mut unused in tied.iter().flatten().filter_map(|binding| binding.try_write()) {
                unused.release();
            }
        }
    }

    /// Ends the bindings to a region that were removed from their windows and have not ended. The
    /// close of an endpoint leaves such bindings. Waits for the transfers that use them. Returns
    /// false if there are none.
    pub(super) fn end_bindings_to(&self, region: Token) -> Result<bool> {
        let windows: Vec<_> = self.index.read().by_token.values().map(Arc::clone).collect();
        let is_to = |binding: &Arc<RwLock<Binding>>| {
            // The lock is not free only while another thread ends the binding. The caller waits for
            // that binding too.
            binding.try_read_recursive().is_none_or(|it| it.region == region && !it.ended)
        };
        let of = |window: Arc<Window>| {
            let endings = window.state.lock().ending.clone();
            endings.into_iter().filter(is_to)
        };
        let endings: Endings = windows.into_iter().flat_map(of).collect();
        if endings.is_empty() {
            return Ok(false);
        }
        self.nic.config.faults.enter(NicCall::EndBinding)?;
        Binding::end_all(&endings);
        Ok(true)
    }

    /// Finds the window that a message to `endpoint` invalidates by its key.
    ///
    /// # Errors
    /// - InvalidKey: no live window has the key.
    /// - The error of the rule that refuses the invalidation.
    pub(super) fn find_to_invalidate(&self, key: u64, endpoint: u64) -> Result<Arc<Window>> {
        let invalid = || Refusal::NoRegion.of_key();
        let window = self.of_key(key).ok_or_else(invalid)?;
        {
            let state = window.state.lock();
            if state.key() != key || state.freed {
                return Err(invalid());
            }
            window.check(&state, WindowEvent::InvalidateByPeer, "send")?;
            if state.endpoint().is_some_and(|tied| tied != endpoint) {
                return Err(refuse(WindowRule::OwnQueuePair, "send"));
            }
        }
        Ok(window)
    }

    /// Takes guards of the region and the binding that a window's key names, for a transfer.
    ///
    /// # Errors
    /// - InvalidKey: no window has the key, or its region is closed.
    /// - AccessDenied: the key grants no right in `any_of`, or no access through `endpoint`.
    /// - BadState: the region is disabled, or is being refreshed or revoked.
    pub(super) fn hold(
        &self,
        key: u64,
        endpoint: u64,
        any_of: Access,
    ) -> Result<(RegionGuard, BindingGuard)> {
        let invalid = || Refusal::NoRegion.of_key();
        let window = self.of_key(key).ok_or_else(invalid)?;
        let binding = {
            let state = window.state.lock();
            if state.key() != key {
                return Err(invalid());
            }
            window.check(&state, WindowEvent::Access, "transfer")?;
            let binding = state.binding.as_ref();
            // The lock has no writer: a write guard is taken only after the binding was removed
            // from the window.
            binding.and_then(RwLock::try_read_arc).ok_or_else(invalid)?
        };
        if binding.endpoint.is_some_and(|tied| tied != endpoint) {
            return Err(refuse(WindowRule::OwnQueuePair, "transfer"));
        }
        if !binding.access.intersects(any_of) {
            return Err(denied("window", any_of));
        }
        let region = self.nic.regions.lock().hold(self.domain, binding.region);
        Ok((region.map_err(Refusal::of_key)?, binding))
    }
}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Windows").field("count", &self.len()).finish_non_exhaustive()
    }
}

/// Returns the token in a region's handle.
pub(super) fn token_of(region: ProviderRegion) -> Token {
    Token::from_u64(region.token)
}

fn refuse(rule: WindowRule, operation: &'static str) -> Error {
    rule.refuse(operation).provider("loopback")
}

fn endpoint_closed() -> Error {
    Error::new(ErrorKind::BadState, "bind window")
        .provider("loopback")
        .context("why", "the endpoint is closed")
}
