//! Memory windows of type 1, bound by a call, and of type 2, bound by posted requests.
//!
//! A type 1 window is bound through a queue pair that is connected to itself, opened with the first
//! bind: verbs wants one, and any of the protection domain will do.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, Addressing, Error, ErrorKind, Result,
    provider::{ProviderRegion, ProviderWindow, WindowBind, WindowType},
    transfer::CompletionKind,
};
use parking_lot::Mutex;

use super::{
    access::{check_atomics, remote_changes},
    completion::status_error,
    connect::QueuePair,
    domain::DomainState,
    endpoint::{EndpointState, InFlight, Inner},
    errors,
    post::Scratch,
    queue::CqState,
    region::{Part, Region},
    register::has_window,
    sys::{
        AccessFlags, BindPart, Mw, MwBind, MwBindInfo, MwType, SendFlags, SendWr, Wc, WcStatus,
        WrOpcode,
    },
};

/// The default time limit of a type 1 window's bind. Binds are local, so that only a dead device
/// takes this long.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Window {
    /// Null once freed because the queue pair that it was bound through went.
    mw: *mut Mw,
    kind: WindowType,
    /// The number of the queue pair through which it is bound; `None` once an invalidation was
    /// posted.
    through: Option<u32>,
}

// SAFETY: libibverbs objects may be used from any thread; this one is only used under the table's
// lock.
unsafe impl Send for Window {}

/// The windows of a domain.
#[derive(Debug, Default)]
pub(super) struct Windows {
    map: Mutex<HashMap<u64, Window>>,
    next: AtomicU64,
    binder: Mutex<Option<Binder>>,
}

/// The queue pair that binds type 1 windows. After a failed bind it is not used again: the failed
/// bind's completion may still come, and would be taken for that of the next bind.
#[derive(Debug)]
struct Binder {
    pair: QueuePair,
    cq: CqState,
    failed: bool,
}

fn unknown() -> Error {
    Error::new(ErrorKind::InvalidArgument, "window")
        .provider("verbs")
        .remedy("the window is not of this domain")
}

fn gone() -> Error {
    Error::new(ErrorKind::BadState, "window").provider("verbs").remedy(
        "it was bound through an endpoint that is closed, and was freed with it: allocate another",
    )
}

impl Windows {
    pub(super) fn count(&self) -> u64 {
        self.map.lock().len() as u64
    }

    pub(super) fn alloc(&self, domain: &DomainState, kind: WindowType) -> Result<ProviderWindow> {
        let nic = domain.pd.device.nic();
        let refuse = |why: String| {
            Error::new(ErrorKind::Unsupported, "ibv_alloc_mw").provider(nic.to_string()).remedy(why)
        };
        if !has_window(&domain.pd, kind) {
            return Err(refuse(format!("{} has no windows of type {kind:?}", nic.name)));
        }
        let alloc = domain
            .pd
            .device
            .ops()
            .alloc_mw
            .ok_or_else(|| refuse("the driver has no windows".into()))?;
        let of =
            if kind == WindowType::One { MwType::IBV_MW_TYPE_1 } else { MwType::IBV_MW_TYPE_2 };
        // SAFETY: the protection domain is alive as long as `domain`.
        let mw = unsafe { alloc(domain.pd.pd, of) };
        if mw.is_null() {
            return Err(errors::call(nic, "ibv_alloc_mw", errors::last()));
        }
        // SAFETY: the window was allocated just now.
        let key = u64::from(unsafe { (*mw).rkey });
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        self.map.lock().insert(token, Window { mw, kind, through: None });
        Ok(ProviderWindow { token, key })
    }

    pub(super) fn free(&self, domain: &DomainState, window: ProviderWindow) -> Result<()> {
        let taken = self.map.lock().remove(&window.token).ok_or_else(unknown)?;
        if let Err(error) = dealloc(domain, taken.mw) {
            self.map.lock().insert(window.token, taken);
            return Err(error);
        }
        Ok(())
    }

    /// Whether the queue pair that it is bound through has to stay.
    pub(super) fn holds_pair(&self, token: u64) -> bool {
        self.map
            .lock()
            .get(&token)
            .is_some_and(|window| window.kind == WindowType::TwoA && !window.mw.is_null())
    }

    /// Frees a window before the queue pair that it is bound through.
    pub(super) fn release_bound(&self, domain: &DomainState, token: u64) {
        let mut map = self.map.lock();
        if let Some(window) = map.get_mut(&token) {
            if let Err(error) = dealloc(domain, window.mw) {
                tracing::error!(%error, "a bound window could not be freed before its endpoint");
            }
            window.mw = ptr::null_mut();
        }
    }

    /// Runs `with` on an allocated type 2 window, with the table locked.
    fn with_type_2<T>(&self, token: u64, with: impl FnOnce(&mut Window) -> Result<T>) -> Result<T> {
        let mut map = self.map.lock();
        let window = map.get_mut(&token).ok_or_else(unknown)?;
        if window.kind == WindowType::One {
            return Err(Error::new(ErrorKind::BadState, "window")
                .provider("verbs")
                .remedy("type 1 windows are bound by a call, and are never invalidated"));
        }
        if window.mw.is_null() {
            return Err(gone());
        }
        with(window)
    }

    /// Puts the key back that a refused bind did not change.
    pub(super) fn bind_failed(&self, token: u64, old_key: u32) {
        if let Some(window) = self.map.lock().get_mut(&token)
            && !window.mw.is_null()
        {
            window.through = None;
            // SAFETY: the window is allocated, and the lock keeps it so.
            unsafe { (*window.mw).rkey = old_key };
        }
    }

    /// Checks what drivers answer with a dead connection or a crash, and finds the registration to
    /// bind to.
    pub(super) fn target<'a>(
        &self,
        domain: &DomainState,
        region: &'a Region,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<(&'a Part, Address)> {
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "bind window").provider(domain.pd.device.nic().to_string()).remedy(why)
        };
        if !region.flags.contains(AccessFlags::MW_BIND) {
            return Err(refuse(
                ErrorKind::AccessDenied,
                "the region was registered without VerbsOptions::MW_BIND: ask for it",
            ));
        }
        if access.peers_write() && !region.flags.contains(AccessFlags::LOCAL_WRITE) {
            return Err(refuse(
                ErrorKind::AccessDenied,
                "remote write or atomic through a window needs a region that the NIC may write \
                 (IBA 10.6.7.2.2)",
            ));
        }
        let device = &domain.pd.device;
        check_atomics(access.contains(Access::REMOTE_ATOMIC), device, "bind window")?;
        if region.flags.contains(AccessFlags::ZERO_BASED) {
            return Err(refuse(
                ErrorKind::Unsupported,
                "windows bind to regions with virtual addresses",
            ));
        }
        let whole = region.parts.iter().map(|part| part.key.range.len()).sum::<u64>();
        region.slice(offset, len).ok_or_else(|| {
            if offset <= whole && len <= whole - offset {
                refuse(
                    ErrorKind::Unsupported,
                    "the range crosses a seam of the region, which is split",
                )
            } else {
                refuse(ErrorKind::OutOfBounds, "a window lies inside its region")
            }
        })
    }

    /// A window's rights in verbs' words.
    pub(super) fn flags(
        &self,
        domain: &DomainState,
        access: Access,
        addressing: Addressing,
    ) -> AccessFlags {
        let mut flags = AccessFlags::empty();
        flags.set(AccessFlags::REMOTE_READ, access.contains(Access::REMOTE_READ));
        flags |= remote_changes(access, domain.pd.device.rights());
        flags.set(AccessFlags::ZERO_BASED, addressing == Addressing::ZeroBased);
        flags
    }

    /// Binds a type 1 window, or unbinds it with length 0.
    pub(super) fn bind_type_1(
        &self,
        domain: &DomainState,
        window: ProviderWindow,
        bind: &WindowBind,
    ) -> Result<ProviderWindow> {
        let mut kept = self.binder.lock();
        let mut binder = match kept.take() {
            Some(binder) => binder,
            None => Binder::open(domain)?,
        };
        let bound = domain.regions.with(bind.region, "bind window", |region| {
            let (mr, address) = if bind.len == 0 {
                // A null region crashes librxe: with length 0 it only names the domain.
                region.parts.first().map(|part| (part.mr, 0)).ok_or_else(unknown)?
            } else {
                let (part, address) =
                    self.target(domain, region, (bind.offset, bind.len), bind.access)?;
                (part.mr, address.0)
            };
            if bind.addressing == Addressing::ZeroBased {
                return Err(Error::new(ErrorKind::Unsupported, "bind window")
                    .provider("verbs")
                    .remedy("type 1 windows have virtual addresses"));
            }
            let flags = self.flags(domain, bind.access, bind.addressing);
            let info =
                MwBindInfo { mr, addr: address, length: bind.len, mw_access_flags: flags.bits() };
            let map = self.map.lock();
            let held = map.get(&window.token).ok_or_else(unknown)?;
            if held.kind != WindowType::One {
                return Err(Error::new(ErrorKind::BadState, "bind window")
                    .provider("verbs")
                    .remedy("type 2 windows are bound by a posted request"));
            }
            // SAFETY: window and region are alive under their locks.
            let key = unsafe { binder.bind(domain, held.mw, info) }?;
            Ok(ProviderWindow { key: u64::from(key), ..window })
        });
        *kept = Some(binder).filter(|binder| !binder.failed);
        bound
    }

    /// Frees what is left when the domain goes.
    pub(super) fn clear(&self, domain: &DomainState) {
        for window in self.map.lock().drain() {
            if let Err(error) = dealloc(domain, window.1.mw) {
                tracing::error!(%error, "a window is left to the process's end");
            }
        }
        *self.binder.lock() = None;
    }
}

impl Binder {
    fn open(domain: &DomainState) -> Result<Self> {
        let cq = CqState::create(&domain.pd.device, 16)?;
        let pair = QueuePair::create(&domain.pd, (&cq, &cq), domain.port()?, 16)?;
        pair.connect(&pair.name(0))?;
        Ok(Self { pair, cq, failed: false })
    }

    /// # Safety
    /// `mw` and `info.mr` are alive.
    unsafe fn bind(&mut self, domain: &DomainState, mw: *mut Mw, info: MwBindInfo) -> Result<u32> {
        let nic = domain.pd.device.nic();
        let bind = domain.pd.device.ops().bind_mw.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "ibv_bind_mw").provider(nic.to_string())
        })?;
        let mut request =
            MwBind { wr_id: 1, send_flags: SendFlags::SIGNALED.bits(), bind_info: info };
        // SAFETY: the caller vouches for the window.
        let old_key = unsafe { (*mw).rkey };
        self.failed = true;
        // SAFETY: the queue pair is this value's own; window and region are alive; the region is
        // not null, which is what the header's inline function and librxe go wrong about.
        errors::status(unsafe { bind(self.pair.qp, mw, &mut request) })
            .map_err(|errno| errors::call(nic, "ibv_bind_mw", errno))?;
        let wc = self.wait(domain.options.bind_timeout.unwrap_or(PATIENCE))?;
        if wc.status == WcStatus::IBV_WC_SUCCESS {
            self.failed = false;
            // SAFETY: the caller vouches for the window, where the driver has put the new key.
            return Ok(unsafe { (*mw).rkey });
        }
        // SAFETY: the caller vouches for the window; the NIC still has the old key.
        unsafe { (*mw).rkey = old_key };
        Err(status_error(wc.status, wc.vendor_err, CompletionKind::BindWindow))
    }

    fn wait(&self, patience: Duration) -> Result<Wc> {
        let until = Instant::now() + patience;
        let mut wc = [MaybeUninit::uninit()];
        loop {
            if let [wc] = self.cq.poll_raw(&mut wc)? {
                return Ok(*wc);
            }
            if Instant::now() >= until {
                return Err(Error::new(ErrorKind::Driver, "ibv_bind_mw")
                    .provider("verbs")
                    .remedy("the bind never completed: the device is gone or stuck"));
            }
            std::thread::yield_now();
        }
    }
}

fn dealloc(domain: &DomainState, mw: *mut Mw) -> Result<()> {
    if mw.is_null() {
        return Ok(());
    }
    let nic = domain.pd.device.nic();
    let dealloc = domain.pd.device.ops().dealloc_mw.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "ibv_dealloc_mw").provider(nic.to_string())
    })?;
    // SAFETY: the window was allocated here and was taken out of the table, or is nulled there
    // next.
    errors::status(unsafe { dealloc(mw) })
        .map_err(|errno| errors::call(nic, "ibv_dealloc_mw", errno))
}

impl EndpointState {
    pub(super) fn post_bind(
        &self,
        inner: &mut Inner,
        scratch: &mut Scratch,
        window: ProviderWindow,
        (region, offset, len): (ProviderRegion, u64, u64),
        (access, addressing, tag): (Access, Addressing, u8),
        mut entry: InFlight,
    ) -> Result<()> {
        let windows = &self.domain.windows;
        self.domain.regions.with(region, "bind window", |region| {
            let (part, address) = windows.target(&self.domain, region, (offset, len), access)?;
            let flags = windows.flags(&self.domain, access, addressing);
            let mr = part.mr;
            windows.with_type_2(window.token, |held| {
                let mw = held.mw;
                // SAFETY: the window is allocated, and the table's lock keeps it so; its key is
                // only changed here and by failed completions, under the same lock.
                let old_key = unsafe { (*mw).rkey };
                let rkey = (old_key & !0xff) | u32::from(tag);
                let mut wr = SendWr::new(WrOpcode::IBV_WR_BIND_MW, 0);
                let bind_info =
                    MwBindInfo { mr, addr: address.0, length: len, mw_access_flags: flags.bits() };
                wr.bind_mw = BindPart { mw, rkey, bind_info };
                scratch.requests.push(wr);
                entry.window = Some((window.token, old_key));
                self.submit(inner, &mut scratch.requests, entry)?;
                // SAFETY: the table's lock keeps the window. The caller of the verb keeps the key
                // up to date (ibv_post_send(3)).
                unsafe { (*mw).rkey = rkey };
                held.through = Some(self.number());
                inner.note_window(window.token);
                Ok(())
            })
        })
    }

    pub(super) fn post_invalidate(
        &self,
        inner: &mut Inner,
        scratch: &mut Scratch,
        window: ProviderWindow,
        mut entry: InFlight,
    ) -> Result<()> {
        self.domain.windows.with_type_2(window.token, |held| {
            // Not every NIC checks this (rxe does not).
            if held.through.is_some_and(|through| through != self.number()) {
                return Err(self.refuse(
                    ErrorKind::AccessDenied,
                    "invalidate the window through the endpoint that it was bound through",
                ));
            }
            let mut wr = SendWr::new(WrOpcode::IBV_WR_LOCAL_INV, 0);
            // SAFETY: the window is allocated, and the table's lock keeps it so.
            wr.invalidate_rkey = unsafe { (*held.mw).rkey };
            scratch.requests.push(wr);
            entry.window = Some((window.token, wr.invalidate_rkey));
            self.submit(inner, &mut scratch.requests, entry)?;
            held.through = None;
            Ok(())
        })
    }
}
