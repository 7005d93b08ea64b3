//! Memory windows: keys of their own, bound to a part of a region without touching its pages.
//!
//! A window's key is its index with an 8-bit tag. Type 1 windows are bound by a call, which turns
//! the tag; type 2 windows by a posted request with the caller's tag, after the key before was
//! invalidated. A binding counts those who use it, so that a key is dead and unused once its
//! unbinding or invalidation has ended. Binding costs no system call (InfiniBand 10.6.7; MW-08).

mod bound;
mod posted;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Access, Addressing, Error, ErrorKind, Result,
    provider::{ProviderWindow, WindowBind, WindowType},
};
use parking_lot::{Mutex, RwLock};

pub(super) use self::bound::BoundUse;
use self::{
    bound::{Bound, Tie},
    posted::not_invalidated,
};
use super::{
    domain::{DomainState, token_of},
    endpoint::EndpointState,
    keys::KnownGeneration,
    region::{Refusal, denied},
    regions::RegionGuard,
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
    bound: Option<Arc<Bound>>,
    freed: bool,
}

impl State {
    const fn key(&self) -> u64 {
        self.prefix << 8 | self.tag as u64
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

    /// Makes a key without a tag that names no region and no window yet.
    fn unused_prefix(&self, index: &mut Index) -> Result<u64> {
        if self.keys.narrow() && !self.requested_keys() {
            return self.nic.regions.reserve_index().map(u64::from);
        }
        Ok(self.random_prefix(index))
    }

    /// Makes a key without tag that cannot be guessed, without a system call.
    fn random_prefix(&self, index: &mut Index) -> u64 {
        loop {
            index.prefixes += 1;
            let prefix = self.keys.window_prefix(index.prefixes);
            let taken = index.by_prefix.contains_key(&prefix)
                || (self.requested_keys()
                    && (0..=0xff)
                        .any(|tag| self.nic.regions.is_requested(self.id, prefix << 8 | tag)));
            if !taken {
                return prefix;
            }
        }
    }

    fn give_prefix(&self, prefix: u64) {
        if self.keys.narrow() && !self.requested_keys() {
            self.nic.regions.free_index(prefix as u32);
        }
    }

    pub(super) fn alloc_window(&self, kind: WindowType) -> Result<ProviderWindow> {
        if !self.nic.config.windows.contains(&kind) {
            return Err(Error::new(ErrorKind::Unsupported, "allocate window")
                .provider("loopback")
                .context("type", format_args!("{kind:?}"))
                .remedy("use a window type that the NIC lists"));
        }
        let mut index = self.windows.index.write();
        let prefix = self.unused_prefix(&mut index)?;
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
        let regions = &self.nic.regions;
        if !Access::ANY_REMOTE.contains(bind.access) {
            return Err(Error::new(ErrorKind::BadAccess, operation)
                .provider("loopback")
                .context("access", bind.access)
                .remedy("a window grants remote rights only"));
        }
        regions.add_dependent(self.id, region, operation)?;
        let checked = regions.inspect(self.id, region, operation, |region| {
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
            regions.remove_dependent(self.id, region);
            return Err(error);
        }
        Ok(Arc::new(Bound::new(Arc::downgrade(self), region, bind, endpoint)))
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
        let new =
            if bind.len > 0 { Some(self.new_bound(bind, "bind window", None)?) } else { None };
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
            let prefix = self.random_prefix(&mut index);
            index.by_prefix.remove(&state.prefix);
            index.by_prefix.insert(prefix, Arc::clone(&window));
            state.prefix = prefix;
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

    /// Holds the region behind a window's key, which must grant one of the rights in `any_of`.
    pub(super) fn hold_window(
        &self,
        key: u64,
        through: &EndpointState,
        any_of: Access,
    ) -> Result<(RegionGuard, BoundUse)> {
        let dead = || Refusal::Dead.of_key();
        let window = self
            .windows
            .index
            .read()
            .by_prefix
            .get(&(key >> 8))
            .map(Arc::clone)
            .ok_or_else(dead)?;
        let used = {
            let state = window.state.lock();
            let bound = state.bound.as_ref().filter(|_| state.key() == key).ok_or_else(dead)?;
            bound.begin().ok_or_else(dead)?
        };
        let bound = used.bound();
        if bound.endpoint.as_ref().is_some_and(|tie| tie.id != through.id) {
            return Err(Error::new(ErrorKind::AccessDenied, "transfer")
                .provider("loopback")
                .context("why", "the window is bound to another endpoint")
                .remedy("reach a type 2 window through the endpoint that bound it"));
        }
        if !bound.access.intersects(any_of) {
            return Err(denied("window", any_of));
        }
        let known = KnownGeneration::Whole(bound.region.generation);
        let regions = &self.nic.regions;
        let held =
            regions.hold(self.id, bound.region.index, known, false).map_err(Refusal::of_key)?;
        Ok((held, used))
    }
}

#[cold]
fn freed(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("loopback")
        .context("why", "the window was freed")
}
