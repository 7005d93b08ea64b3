//! Memory windows of type 1, bound by a call, and of type 2, bound by posted requests.
//!
//! A type 1 window is bound by `ibv_bind_mw`, which needs a queue pair of the protection domain.
//! The domain opens a queue pair for this purpose at the first bind, and connects that queue pair
//! to itself. A type 2 window is bound by a posted request. The caller posts that request while the
//! table of windows is locked.
//!
//! No lock of a table is held while the provider waits for the completion of a bind. From before a
//! bind until the window is unbound, a [`WindowGuard`] keeps the region registered. The request in
//! flight owns the guard first, and the window owns it once the bind has succeeded.

#![allow(unsafe_code, reason = "calls the library on memory windows")]

use std::{
    collections::{HashMap, HashSet},
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, Addressing, Error, ErrorKind, Result,
    provider::{
        ProviderWindow, WindowBind, WindowEvent, WindowRule, WindowState, WindowStatus, WindowType,
    },
    transfer::CompletionKind,
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    access::remote_changes,
    completion::status_error,
    connection::QueuePair,
    cq::VerbsCq,
    device::ProtectionDomain,
    port::{Port, PortChoice},
    region::{Region, RegionPart, Regions, WindowGuard},
    sys::{
        AccessFlags, BindPart, Mw, MwBind, MwBindInfo, MwType, SendFlags, SendWr, Wc, WcStatus,
        WrOpcode,
    },
};

/// Default timeout of calls that bind or invalidate a window and wait for the result.
pub(super) const BIND_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Window {
    /// Pointer to the `ibv_mw`. It is null if [`Windows::replace`] freed the window and could not
    /// allocate a new window.
    mw: *mut Mw,
    kind: WindowType,
    /// The key that the window will have if all posted requests succeed. While a call binds a type
    /// 1 window, this is the key before that bind.
    key: u32,
    /// State of the window according to the completions that were read.
    state: WindowState,
    /// Number of posted binds and invalidations that have not completed. For a type 1 window, the
    /// number is 1 during a call that binds the window.
    posted: u32,
    /// Number of the queue pair through which the window will be bound if all posted requests
    /// succeed; `None` if the window will be free.
    through: Option<u32>,
    known: Known,
    /// Key that a peer invalidated before the provider read the completion of the key's bind.
    dead: Option<u32>,
}

/// The binding of a window, according to the completions that were read.
#[derive(Debug, Default)]
struct Known {
    /// Key of a type 2 window.
    key: u32,
    /// Number of the queue pair through which a type 2 window is bound; `None` for other windows.
    through: Option<u32>,
    /// Guards of the regions to which the window is bound or may be bound. There are several only
    /// for a type 1 window with binds whose result is unknown.
    regions: SmallVec<[WindowGuard; 1]>,
}

impl Window {
    /// Creates the entry of a window that was allocated just now.
    fn new(mw: *mut Mw, kind: WindowType) -> Self {
        // SAFETY: the driver returned the window, with its key set.
        let key = unsafe { (*mw).rkey };
        let known = Known { key, ..Known::default() };
        Self {
            mw,
            kind,
            key,
            state: WindowState::Free,
            posted: 0,
            through: None,
            known,
            dead: None,
        }
    }

    /// Records that a posted bind or invalidation has ended. If no other bind or invalidation is in
    /// flight, key and queue pair of the window become those in `known`.
    fn ended(&mut self) {
        self.posted -= 1;
        if self.posted > 0 {
            return;
        }
        (self.through, self.dead) = (self.known.through, None);
        self.set_key(self.known.key);
    }

    /// Sets the key of a type 2 window, here and in its `ibv_mw`. A driver does not change the
    /// `ibv_mw` when the provider posts a bind or invalidation by `ibv_post_send(3)`.
    fn set_key(&mut self, key: u32) {
        self.key = key;
        if !self.mw.is_null() {
            // SAFETY: a pointer in the table is null or points to an allocated window, and the
            // table's lock keeps the window allocated.
            unsafe { (*self.mw).rkey = key };
        }
    }

    /// Records that the window is no longer bound.
    fn unbound(&mut self) {
        (self.state, self.known.through) = (WindowState::Free, None);
        self.known.regions.clear();
    }
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and the table's lock serializes all
// uses of a window.
unsafe impl Send for Window {}

/// Table of the memory windows of a domain.
#[derive(Debug, Default)]
pub(super) struct Windows {
    map: Mutex<HashMap<u64, Window>>,
    /// Tokens (handles) of the windows. The key of the map is a window's key without its low 8
    /// bits, the tag. Code that needs both locks takes the lock of `map` first.
    by_index: Mutex<HashMap<u32, u64>>,
    /// Token of the next window.
    next: AtomicU64,
    /// The queue pair that binds type 1 windows; `None` before the first bind and after a failed
    /// bind. A call holds this lock until its bind has completed.
    binder: Mutex<Option<Binder>>,
}

/// The queue pair that binds type 1 windows.
///
/// After a failed bind the provider opens a new queue pair. The completion of the failed bind may
/// still arrive in the old one, and the provider would take it for the completion of the next bind.
#[derive(Debug)]
struct Binder {
    pair: QueuePair,
    cq: VerbsCq,
    /// True during a bind, and after a bind that failed.
    failed: bool,
}

/// A posted bind or invalidation of a window.
#[derive(Debug)]
pub(super) struct WindowRequest {
    /// Token (handle) of the window.
    pub(super) token: u64,
    /// The key that the request binds or invalidates.
    pub(super) key: u32,
    /// Guard of the region that the request binds the window to; `None` for an invalidation.
    pub(super) region: Option<WindowGuard>,
}

/// Error of a failed bind of a type 1 window, by the effect on the window.
#[derive(Debug)]
enum BindError {
    /// The window still has its earlier binding.
    Refused(Error),
    /// The window has its earlier or its new binding: the NIC may have executed the bind.
    Unknown(Error),
}

fn refuse(rule: WindowRule, operation: &'static str) -> Error {
    rule.refuse(operation).provider("verbs")
}

fn unknown() -> Error {
    refuse(WindowRule::Allocated, "window")
}

fn gone() -> Error {
    Error::new(ErrorKind::BadState, "window")
        .provider("verbs")
        .remedy("allocate another window: this one was freed with the endpoint that bound it")
}

impl Windows {
    pub(super) fn count(&self) -> u64 {
        self.map.lock().len() as u64
    }

    pub(super) fn alloc(&self, pd: &ProtectionDomain, kind: WindowType) -> Result<ProviderWindow> {
        let mw = allocate(pd, kind)?;
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let window = Window::new(mw, kind);
        let key = window.key;
        let mut map = self.map.lock();
        self.by_index.lock().insert(key >> 8, token);
        map.insert(token, window);
        Ok(ProviderWindow { token, key: u64::from(key) })
    }

    /// Frees a window.
    ///
    /// # Errors
    /// - The error of [`WindowRule::Allocated`]: no window has the token.
    /// - Busy: another thread binds the type 1 window.
    /// - The driver's error. The window stays allocated.
    pub(super) fn free(&self, pd: &ProtectionDomain, window: ProviderWindow) -> Result<()> {
        // The lock is held while the driver frees the window. If the driver refuses, no completion
        // of the window was missed meanwhile.
        let mut map = self.map.lock();
        let held = map.get(&window.token).ok_or_else(unknown)?;
        if held.kind == WindowType::One && held.posted > 0 {
            return Err(Error::new(ErrorKind::Busy, "free window")
                .provider("verbs")
                .remedy("free the window once its bind has returned"));
        }
        dealloc(pd, held.mw)?;
        self.by_index.lock().remove(&(held.key >> 8));
        map.remove(&window.token);
        Ok(())
    }

    /// Returns the tokens (handles) of the windows that are bound through a queue pair now, or once
    /// all posted requests have succeeded.
    pub(super) fn bound_through(&self, number: u32) -> HashSet<u64> {
        let map = self.map.lock();
        let bound = map
            .iter()
            .filter(|(_, window)| [window.through, window.known.through].contains(&Some(number)));
        bound.map(|(token, _)| *token).collect()
    }

    /// Checks that the window `token` permits `event`, which is the reset or the destruction of the
    /// queue pair through which the window is bound. The error is the rule that forbids the event.
    pub(super) fn check_bound(&self, token: u64, event: WindowEvent) -> Result<(), WindowRule> {
        let map = self.map.lock();
        let Some(window) = map.get(&token) else { return Ok(()) };
        // A posted bind may take effect at any time, so the window counts as bound.
        window.kind.after(WindowState::Valid, event).map(|_| ())
    }

    /// Frees a window whose queue pair will be destroyed or was reset, and allocates a new window
    /// under the same token (handle). Does nothing if the token names no window.
    ///
    /// Logs failures of the driver. If the driver allocates no new window, the state becomes
    /// [`WindowState::Invalid`].
    ///
    /// Without this call, rdma_rxe would wait 50 seconds for a bound window when the queue pair is
    /// destroyed.
    pub(super) fn replace(&self, pd: &ProtectionDomain, token: u64) {
        if let Some(window) = self.map.lock().get_mut(&token) {
            self.replace_locked(pd, token, window);
        }
    }

    /// Replaces a window like [`Self::replace`]. The caller holds the lock of the table.
    fn replace_locked(&self, pd: &ProtectionDomain, token: u64, window: &mut Window) {
        let mut by_index = self.by_index.lock();
        by_index.remove(&(window.key >> 8));
        if let Err(error) = dealloc(pd, window.mw) {
            tracing::error!(
                error = %error.full(),
                "cannot free a bound window before its endpoint"
            );
            // The driver still has the window, so the region stays registered until the domain
            // closes.
            std::mem::forget(std::mem::take(&mut window.known.regions));
        }
        match allocate(pd, window.kind) {
            Ok(mw) => {
                *window = Window { posted: window.posted, ..Window::new(mw, window.kind) };
                by_index.insert(window.key >> 8, token);
            }
            Err(error) => {
                tracing::error!(
                    error = %error.full(),
                    "cannot allocate a window again after its endpoint closed"
                );
                (window.mw, window.key, window.through) = (ptr::null_mut(), 0, None);
                (window.state, window.dead) = (WindowState::Invalid, None);
                window.known = Known::default();
            }
        }
    }

    /// Records that the reset or the destruction of a queue pair has dropped a posted bind or
    /// invalidation, and replaces the window ([`Windows::replace`]). The NIC may have executed the
    /// request or not, so the state of the old window is unknown. Leaves a window that replaced the
    /// old one alone, because another queue pair may have bound it.
    pub(super) fn forgotten(&self, pd: &ProtectionDomain, request: &WindowRequest) {
        let mut map = self.map.lock();
        let Some(window) = map.get_mut(&request.token) else { return };
        window.ended();
        if window.key >> 8 == request.key >> 8 {
            self.replace_locked(pd, request.token, window);
        }
    }

    pub(super) fn status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        let map = self.map.lock();
        let window = map.get(&window.token).ok_or_else(unknown)?;
        let (key, pending) = (u64::from(window.key), window.posted > 0);
        Ok(WindowStatus { key, state: window.state, pending })
    }

    /// Records the completion of a bind or invalidation. `through` is the number of the queue pair
    /// that executed the request.
    pub(super) fn completed(
        &self,
        request: WindowRequest,
        kind: CompletionKind,
        worked: bool,
        through: u32,
    ) {
        let WindowRequest { token, key, region } = request;
        let mut map = self.map.lock();
        let Some(window) = map.get_mut(&token) else { return };
        // If the window was replaced meanwhile, the new window has another key.
        let current = !window.mw.is_null() && window.key >> 8 == key >> 8;
        if worked && current {
            if kind == CompletionKind::InvalidateWindow {
                window.unbound();
            } else {
                let regions = region.into_iter().collect();
                window.known = Known { key, through: Some(through), regions };
                window.state = WindowState::Valid;
                if window.dead.take_if(|dead| *dead == key).is_some() {
                    window.unbound();
                }
            }
        }
        window.ended();
    }

    /// Records that a peer's message has invalidated a key. Does nothing if no window has the key.
    pub(super) fn invalidated_by_peer(&self, key: u32) {
        let mut map = self.map.lock();
        let token = self.by_index.lock().get(&(key >> 8)).copied();
        let Some(window) = token.and_then(|token| map.get_mut(&token)) else { return };
        if window.state == WindowState::Valid && window.known.key == key {
            window.unbound();
            if window.posted == 0 {
                window.through = None;
            }
        } else if window.posted > 0 {
            // The completion of the bind is not read yet.
            window.dead = Some(key);
            if window.key == key {
                window.through = None;
            }
        }
    }

    /// Calls `with` with a type 2 window while the table is locked.
    ///
    /// # Errors
    /// - The error that [`WindowRule::refuse`] creates for `rule`: the window has type 1.
    /// - The error of [`WindowRule::Allocated`]: no window has the token.
    /// - BadState: the window was freed with its endpoint and could not be allocated again.
    fn with_type_2<T>(
        &self,
        token: u64,
        rule: WindowRule,
        with: impl FnOnce(&mut Window) -> Result<T>,
    ) -> Result<T> {
        let mut map = self.map.lock();
        let window = map.get_mut(&token).ok_or_else(unknown)?;
        if window.kind == WindowType::One {
            return Err(refuse(rule, "window"));
        }
        if window.mw.is_null() {
            return Err(gone());
        }
        with(window)
    }

    /// Binds a type 1 window, or unbinds it if the length is 0.
    pub(super) fn bind_type_1(
        &self,
        (pd, regions): (&ProtectionDomain, &Regions),
        (port, timeout): (PortChoice, Duration),
        window: ProviderWindow,
        bind: &WindowBind,
    ) -> Result<ProviderWindow> {
        let mut kept = self.binder.lock();
        let binder = match &mut *kept {
            Some(binder) => binder,
            none => none.insert(Binder::open(pd, port)?),
        };
        let (info, guard, mw, after) = regions.with(bind.region, "bind window", |region| {
            let (mr, address) = if bind.len == 0 {
                // A null region crashes librxe. With length 0 the driver uses only the region's
                // protection domain.
                region.parts.first().map(|part| (part.mr, 0)).ok_or_else(unknown)?
            } else {
                let (part, address) = target(pd, region, bind)?;
                (part.mr, address.0)
            };
            if bind.addressing == Addressing::ZeroBased {
                return Err(refuse(WindowRule::Type1IsVirtual, "bind window"));
            }
            let mw_access_flags = flags(pd, bind).bits();
            let info = MwBindInfo { mr, addr: address, length: bind.len, mw_access_flags };
            let mut map = self.map.lock();
            let held = map.get_mut(&window.token).ok_or_else(unknown)?;
            if held.kind != WindowType::One {
                return Err(refuse(WindowRule::BoundByItsVerb, "bind window"));
            }
            let event = if bind.len == 0 { WindowEvent::BindNothing } else { WindowEvent::Bind };
            let after = held.kind.after(held.state, event);
            let after = after.map_err(|rule| refuse(rule, "bind window"))?;
            held.posted = 1;
            Ok((info, region.windows.guard(), held.mw, after))
        })?;
        // SAFETY: while `posted` is not 0, `Windows::free` refuses to free the window. No other
        // call binds the window, because this call holds the lock of the binder. The guard keeps
        // the region registered (`Regions::take`).
        let bound = unsafe { binder.bind(pd, mw, info, timeout) };
        if binder.failed {
            *kept = None;
        }
        let mut map = self.map.lock();
        let held = map.get_mut(&window.token).ok_or_else(unknown)?;
        held.posted = 0;
        match bound {
            Ok(key) => {
                (held.key, held.state) = (key, after);
                held.known.regions.clear();
                held.known.regions.extend((bind.len > 0).then_some(guard));
                Ok(ProviderWindow { key: u64::from(key), ..window })
            }
            Err(BindError::Refused(error)) => Err(error),
            Err(BindError::Unknown(error)) => {
                // The NIC may have bound the window or not, so the window keeps the earlier region
                // and the new one registered.
                held.known.regions.push(guard);
                Err(error)
            }
        }
    }

    /// Binds a type 2 window.
    ///
    /// `post` receives the work request and the window's new key. `post` must post the work request
    /// to the queue pair with the number `through`.
    pub(super) fn bind_type_2(
        &self,
        pd: &ProtectionDomain,
        region: &Region,
        (window, tag): (ProviderWindow, u8),
        bind: &WindowBind,
        through: u32,
        post: impl FnOnce(SendWr, u32) -> Result<()>,
    ) -> Result<()> {
        let (part, address) = target(pd, region, bind)?;
        let mw_access_flags = flags(pd, bind).bits();
        let bind_info =
            MwBindInfo { mr: part.mr, addr: address.0, length: bind.len, mw_access_flags };
        self.with_type_2(window.token, WindowRule::BoundByItsVerb, |held| {
            // The state that the window has once all earlier requests have completed.
            let state = if held.through.is_some() { WindowState::Valid } else { WindowState::Free };
            let after = held.kind.after(state, WindowEvent::Bind);
            after.map_err(|rule| refuse(rule, "bind window"))?;
            let rkey = (held.key & !0xff) | u32::from(tag);
            let mut wr = SendWr::new(WrOpcode::IBV_WR_BIND_MW, 0);
            wr.bind_mw = BindPart { mw: held.mw, rkey, bind_info };
            post(wr, rkey)?;
            held.set_key(rkey);
            held.through = Some(through);
            held.posted += 1;
            Ok(())
        })
    }

    /// Invalidates a type 2 window.
    ///
    /// `post` receives the work request and the window's key. `post` must post the work request to
    /// the queue pair with the number `through`.
    pub(super) fn invalidate(
        &self,
        pd: &ProtectionDomain,
        window: ProviderWindow,
        through: u32,
        post: impl FnOnce(SendWr, u32) -> Result<()>,
    ) -> Result<()> {
        self.with_type_2(window.token, WindowRule::Type1IsNotInvalidated, |held| {
            // Not every NIC checks the queue pair (rxe does not).
            if held.through.is_some_and(|bound| bound != through) {
                return Err(refuse(WindowRule::OwnQueuePair, "invalidate window"));
            }
            if held.through.is_none() && pd.device.is_rxe() {
                return Err(refuse(WindowRule::DriverInvalidatesOnce, "invalidate window"));
            }
            let mut wr = SendWr::new(WrOpcode::IBV_WR_LOCAL_INV, 0);
            let key = held.key;
            wr.invalidate_rkey = key;
            post(wr, key)?;
            held.through = None;
            held.posted += 1;
            Ok(())
        })
    }

    /// Frees the remaining windows of a domain that is being closed.
    pub(super) fn clear(&self, pd: &ProtectionDomain) {
        for window in self.map.lock().drain() {
            if let Err(error) = dealloc(pd, window.1.mw) {
                tracing::error!(error = %error.full(), "cannot free a window of a closing domain");
            }
        }
        *self.binder.lock() = None;
    }
}

/// Checks a bind against its region, before the bind waits in a lane (queue of staged transfers).
///
/// # Errors
/// The errors of [`Regions::with`], and those of the rule that the bind violates.
pub(super) fn check_part(
    pd: &ProtectionDomain,
    regions: &Regions,
    bind: &WindowBind,
) -> Result<()> {
    regions.with(bind.region, "bind window", |region| target(pd, region, bind).map(drop))
}

/// Returns the registration in which a bind's range lies, and the range's first address.
///
/// # Errors
/// - The error of the [`WindowRule`] that the bind violates. If such a bind were posted, the driver
///   would end the connection or crash.
/// - Unsupported: the device lacks atomics, or the range lies in two registrations.
fn target<'a>(
    pd: &ProtectionDomain,
    region: &'a Region,
    bind: &WindowBind,
) -> Result<(&'a RegionPart, Address)> {
    let operation = "bind window";
    let broken = |rule: WindowRule| rule.refuse(operation).provider(pd.device.nic.to_string());
    if bind.len == 0 {
        // The caller binds a type 2 window: a type 1 window is unbound without a range.
        return Err(broken(WindowRule::Type2HasLength));
    }
    if !region.flags.contains(AccessFlags::MW_BIND) {
        return Err(broken(WindowRule::RegionAllowsWindows));
    }
    if bind.access.peers_write() && !region.flags.contains(AccessFlags::LOCAL_WRITE) {
        return Err(broken(WindowRule::WritesNeedLocalWrite));
    }
    pd.device.check_atomics(bind.access, operation)?;
    if region.is_shifted() {
        return Err(broken(WindowRule::RegionIsVirtual));
    }
    let (offset, len) = (bind.offset, bind.len);
    let whole = region.parts.iter().map(|part| part.key.range.len()).sum::<u64>();
    region.slice(offset, len).ok_or_else(|| {
        if offset <= whole && len <= whole - offset {
            let why =
                "the region is registered in several parts, and the range crosses their boundary";
            pd.device.refuse(ErrorKind::Unsupported, operation, why)
        } else {
            broken(WindowRule::InsideRegion)
        }
    })
}

/// Returns the verbs flags for the rights and the addressing of a bind.
fn flags(pd: &ProtectionDomain, bind: &WindowBind) -> AccessFlags {
    // Rights of the local side set no flag. A window has no local key.
    let mut flags = AccessFlags::empty();
    flags.set(AccessFlags::REMOTE_READ, bind.access.contains(Access::REMOTE_READ));
    flags |= remote_changes(bind.access, pd.device.rights);
    flags.set(AccessFlags::ZERO_BASED, bind.addressing == Addressing::ZeroBased);
    flags
}

impl Binder {
    fn open(pd: &ProtectionDomain, port: PortChoice) -> Result<Self> {
        let cq = VerbsCq::create(&pd.device, 16, None)?;
        let pair = QueuePair::create(pd, (&cq, &cq), Port::find(&pd.device, port)?, 16)?;
        pair.connect(&pair.name(0))?;
        Ok(Self { pair, cq, failed: false })
    }

    /// Binds a type 1 window and returns its new key.
    ///
    /// # Safety
    /// `mw` and `info.mr` point to live objects, and no other code uses the window during the call.
    unsafe fn bind(
        &mut self,
        pd: &ProtectionDomain,
        mw: *mut Mw,
        info: MwBindInfo,
        timeout: Duration,
    ) -> Result<u32, BindError> {
        let Some(bind) = pd.device.ops().bind_mw else {
            let error = Error::new(ErrorKind::Unsupported, "ibv_bind_mw");
            return Err(BindError::Refused(error.provider(pd.device.nic.to_string())));
        };
        let mut request =
            MwBind { wr_id: 1, send_flags: SendFlags::SIGNALED.bits(), bind_info: info };
        // SAFETY: the caller promises that the window is live.
        let old_key = unsafe { (*mw).rkey };
        self.failed = true;
        // SAFETY: this value owns the queue pair, and the caller promises that window and region
        // are live. A null region would crash librxe and the header's inline function.
        let posted = unsafe { bind(self.pair.qp, mw, &mut request) };
        pd.device.check("ibv_bind_mw", posted).map_err(BindError::Refused)?;
        let wc = self.wait(timeout).map_err(BindError::Unknown)?;
        if wc.status == WcStatus::IBV_WC_SUCCESS {
            self.failed = false;
            // SAFETY: the caller promises that the window is live. The driver has set its new key.
            return Ok(unsafe { (*mw).rkey });
        }
        // SAFETY: the caller promises that the window is live. The NIC still has the old key.
        unsafe { (*mw).rkey = old_key };
        let error = status_error(wc.status, wc.vendor_err, CompletionKind::BindWindow);
        Err(BindError::Refused(error))
    }

    fn wait(&self, timeout: Duration) -> Result<Wc> {
        let until = Instant::now() + timeout;
        let mut wc = [MaybeUninit::uninit()];
        loop {
            if let [wc] = self.cq.poll(&mut wc)? {
                return Ok(*wc);
            }
            self.cq.device.read_events();
            self.cq.device.life.record.check(&self.cq.device.nic, "ibv_bind_mw")?;
            if Instant::now() >= until {
                return Err(Error::new(ErrorKind::Driver, "ibv_bind_mw")
                    .provider("verbs")
                    .remedy("check the device: a bind did not complete within the time limit"));
            }
            std::thread::yield_now();
        }
    }
}

fn allocate(pd: &ProtectionDomain, kind: WindowType) -> Result<*mut Mw> {
    let refuse = |why: String| pd.device.refuse(ErrorKind::Unsupported, "ibv_alloc_mw", why);
    if !pd.device.window_types.contains(&kind) {
        let name = &pd.device.nic.name;
        return Err(refuse(format!("{name} has no windows of type {}", kind.name())));
    }
    let alloc =
        pd.device.ops().alloc_mw.ok_or_else(|| refuse("the driver has no windows".into()))?;
    let of = if kind == WindowType::One { MwType::IBV_MW_TYPE_1 } else { MwType::IBV_MW_TYPE_2 };
    // SAFETY: the protection domain is alive as long as `pd`.
    pd.device.created("ibv_alloc_mw", unsafe { alloc(pd.pd, of) })
}

fn dealloc(pd: &ProtectionDomain, mw: *mut Mw) -> Result<()> {
    if mw.is_null() {
        return Ok(());
    }
    let dealloc = pd.device.ops().dealloc_mw.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "ibv_dealloc_mw").provider(pd.device.nic.to_string())
    })?;
    // SAFETY: `allocate` returned the window. The caller has removed it from the table, or sets it
    // to null there under the same lock.
    pd.device.check_destroyed("ibv_dealloc_mw", unsafe { dealloc(mw) })
}
