//! Memory windows of type 1, bound by a call, and of type 2, bound by posted requests.
//!
//! A type 1 window is bound through a queue pair that is connected to itself, opened with the first
//! bind: verbs wants one, and any of the protection domain will do. A type 2 window is bound by a
//! request that the caller posts, under the lock of the table.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, Addressing, Error, ErrorKind, Result,
    provider::{ProviderWindow, WindowBind, WindowType},
    transfer::CompletionKind,
};
use parking_lot::Mutex;

use super::{
    access::remote_changes,
    completion::status_error,
    connection::QueuePair,
    cq::VerbsCq,
    device::ProtectionDomain,
    errors,
    port::{Port, PortChoice},
    region::{Part, Region, Regions},
    sys::{
        AccessFlags, BindPart, Mw, MwBind, MwBindInfo, MwType, SendFlags, SendWr, Wc, WcStatus,
        WrOpcode,
    },
};

/// The default time limit of a type 1 window's bind. Binds are local, so that only a dead device
/// takes this long.
pub(super) const BIND_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Window {
    /// Null once freed because the queue pair that it was bound through went.
    mw: *mut Mw,
    kind: WindowType,
    /// The number of the queue pair through which the window is bound. `None` once an invalidation
    /// was posted.
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
    cq: VerbsCq,
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

    pub(super) fn alloc(&self, pd: &ProtectionDomain, kind: WindowType) -> Result<ProviderWindow> {
        let nic = pd.device.nic();
        let refuse = |why: String| pd.device.refuse(ErrorKind::Unsupported, "ibv_alloc_mw", why);
        if !pd.device.window_types().contains(&kind) {
            return Err(refuse(format!("{} has no windows of type {kind:?}", nic.name)));
        }
        let alloc =
            pd.device.ops().alloc_mw.ok_or_else(|| refuse("the driver has no windows".into()))?;
        let of =
            if kind == WindowType::One { MwType::IBV_MW_TYPE_1 } else { MwType::IBV_MW_TYPE_2 };
        // SAFETY: the protection domain is alive as long as `pd`.
        let mw = unsafe { alloc(pd.pd, of) };
        if mw.is_null() {
            return Err(errors::call(nic, "ibv_alloc_mw", errors::last()));
        }
        // SAFETY: the window was allocated just now.
        let key = u64::from(unsafe { (*mw).rkey });
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        self.map.lock().insert(token, Window { mw, kind, through: None });
        Ok(ProviderWindow { token, key })
    }

    pub(super) fn free(&self, pd: &ProtectionDomain, window: ProviderWindow) -> Result<()> {
        let taken = self.map.lock().remove(&window.token).ok_or_else(unknown)?;
        if let Err(error) = dealloc(pd, taken.mw) {
            self.map.lock().insert(window.token, taken);
            return Err(error);
        }
        Ok(())
    }

    /// Returns true if the queue pair that the window is bound through has to stay.
    pub(super) fn holds_pair(&self, token: u64) -> bool {
        self.map
            .lock()
            .get(&token)
            .is_some_and(|window| window.kind == WindowType::TwoA && !window.mw.is_null())
    }

    /// Frees a window before the queue pair that it is bound through.
    pub(super) fn release_bound(&self, pd: &ProtectionDomain, token: u64) {
        let mut map = self.map.lock();
        if let Some(window) = map.get_mut(&token) {
            if let Err(error) = dealloc(pd, window.mw) {
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

    /// Binds a type 1 window, or unbinds it with length 0.
    pub(super) fn bind_type_1(
        &self,
        (pd, regions): (&ProtectionDomain, &Regions),
        (port, timeout): (PortChoice, Duration),
        window: ProviderWindow,
        bind: &WindowBind,
    ) -> Result<ProviderWindow> {
        let mut kept = self.binder.lock();
        let mut binder = match kept.take() {
            Some(binder) => binder,
            None => Binder::open(pd, port)?,
        };
        let bound = regions.with(bind.region, "bind window", |region| {
            let (mr, address) = if bind.len == 0 {
                // A null region crashes librxe: with length 0 it only names the domain.
                region.parts.first().map(|part| (part.mr, 0)).ok_or_else(unknown)?
            } else {
                let (part, address) = target(pd, region, bind)?;
                (part.mr, address.0)
            };
            if bind.addressing == Addressing::ZeroBased {
                return Err(Error::new(ErrorKind::Unsupported, "bind window")
                    .provider("verbs")
                    .remedy("type 1 windows have virtual addresses"));
            }
            let mw_access_flags = flags(pd, bind).bits();
            let info = MwBindInfo { mr, addr: address, length: bind.len, mw_access_flags };
            let map = self.map.lock();
            let held = map.get(&window.token).ok_or_else(unknown)?;
            if held.kind != WindowType::One {
                return Err(Error::new(ErrorKind::BadState, "bind window")
                    .provider("verbs")
                    .remedy("type 2 windows are bound by a posted request"));
            }
            // SAFETY: window and region are alive under their locks.
            let key = unsafe { binder.bind(pd, held.mw, info, timeout) }?;
            Ok(ProviderWindow { key: u64::from(key), ..window })
        });
        *kept = Some(binder).filter(|binder| !binder.failed);
        bound
    }

    /// Binds a type 2 window by the work request that `post` posts to the queue pair `through`.
    /// `post` gets the window's key before the bind too.
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
        self.with_type_2(window.token, |held| {
            let mw = held.mw;
            // SAFETY: the window is allocated, and the table's lock keeps it so; its key is only
            // changed here and by failed completions, under the same lock.
            let old_key = unsafe { (*mw).rkey };
            let rkey = (old_key & !0xff) | u32::from(tag);
            let mut wr = SendWr::new(WrOpcode::IBV_WR_BIND_MW, 0);
            wr.bind_mw = BindPart { mw, rkey, bind_info };
            post(wr, old_key)?;
            // SAFETY: the table's lock keeps the window. The caller of the verb keeps the key up to
            // date (ibv_post_send(3)).
            unsafe { (*mw).rkey = rkey };
            held.through = Some(through);
            Ok(())
        })
    }

    /// Invalidates a type 2 window by the work request that `post` posts to the queue pair
    /// `through`. `post` gets the window's key too.
    pub(super) fn invalidate(
        &self,
        pd: &ProtectionDomain,
        window: ProviderWindow,
        through: u32,
        post: impl FnOnce(SendWr, u32) -> Result<()>,
    ) -> Result<()> {
        self.with_type_2(window.token, |held| {
            // Not every NIC checks this (rxe does not).
            if held.through.is_some_and(|bound| bound != through) {
                let why = "invalidate the window through the endpoint that it was bound through";
                return Err(pd.device.refuse(ErrorKind::AccessDenied, "post", why));
            }
            let mut wr = SendWr::new(WrOpcode::IBV_WR_LOCAL_INV, 0);
            // SAFETY: the window is allocated, and the table's lock keeps it so.
            let key = unsafe { (*held.mw).rkey };
            wr.invalidate_rkey = key;
            post(wr, key)?;
            held.through = None;
            Ok(())
        })
    }

    /// Frees what is left when the domain goes.
    pub(super) fn clear(&self, pd: &ProtectionDomain) {
        for window in self.map.lock().drain() {
            if let Err(error) = dealloc(pd, window.1.mw) {
                tracing::error!(%error, "a window is left to the process's end");
            }
        }
        *self.binder.lock() = None;
    }
}

/// Finds the registration and address to bind to. Refuses binds that drivers answer with a dead
/// connection or a crash.
fn target<'a>(
    pd: &ProtectionDomain,
    region: &'a Region,
    bind: &WindowBind,
) -> Result<(&'a Part, Address)> {
    let refuse = |kind, why: &'static str| pd.device.refuse(kind, "bind window", why);
    if !region.flags.contains(AccessFlags::MW_BIND) {
        return Err(refuse(
            ErrorKind::AccessDenied,
            "the region was registered without VerbsOptions::MW_BIND: ask for it",
        ));
    }
    if bind.access.peers_write() && !region.flags.contains(AccessFlags::LOCAL_WRITE) {
        return Err(refuse(
            ErrorKind::AccessDenied,
            "remote write or atomic through a window needs a region that the NIC may write \
             (IBA 10.6.7.2.2)",
        ));
    }
    pd.device.check_atomics(bind.access.contains(Access::REMOTE_ATOMIC), "bind window")?;
    if region.flags.contains(AccessFlags::ZERO_BASED) {
        return Err(refuse(
            ErrorKind::Unsupported,
            "windows bind to regions with virtual addresses",
        ));
    }
    let (offset, len) = (bind.offset, bind.len);
    let whole = region.parts.iter().map(|part| part.key.range.len()).sum::<u64>();
    region.slice(offset, len).ok_or_else(|| {
        if offset <= whole && len <= whole - offset {
            refuse(ErrorKind::Unsupported, "the range crosses a seam of the region, which is split")
        } else {
            refuse(ErrorKind::OutOfBounds, "a window lies inside its region")
        }
    })
}

/// Returns a window's rights in verbs' words.
fn flags(pd: &ProtectionDomain, bind: &WindowBind) -> AccessFlags {
    let mut flags = AccessFlags::empty();
    flags.set(AccessFlags::REMOTE_READ, bind.access.contains(Access::REMOTE_READ));
    flags |= remote_changes(bind.access, pd.device.rights());
    flags.set(AccessFlags::ZERO_BASED, bind.addressing == Addressing::ZeroBased);
    flags
}

impl Binder {
    fn open(pd: &ProtectionDomain, port: PortChoice) -> Result<Self> {
        let cq = VerbsCq::create(&pd.device, 16)?;
        let pair = QueuePair::create(pd, (&cq, &cq), Port::find(&pd.device, port)?, 16)?;
        pair.connect(&pair.name(0))?;
        Ok(Self { pair, cq, failed: false })
    }

    /// # Safety
    /// `mw` and `info.mr` are alive.
    unsafe fn bind(
        &mut self,
        pd: &ProtectionDomain,
        mw: *mut Mw,
        info: MwBindInfo,
        timeout: Duration,
    ) -> Result<u32> {
        let nic = pd.device.nic();
        let bind = pd.device.ops().bind_mw.ok_or_else(|| {
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
        let wc = self.wait(timeout)?;
        if wc.status == WcStatus::IBV_WC_SUCCESS {
            self.failed = false;
            // SAFETY: the caller vouches for the window, where the driver has put the new key.
            return Ok(unsafe { (*mw).rkey });
        }
        // SAFETY: the caller vouches for the window; the NIC still has the old key.
        unsafe { (*mw).rkey = old_key };
        Err(status_error(wc.status, wc.vendor_err, CompletionKind::BindWindow))
    }

    fn wait(&self, timeout: Duration) -> Result<Wc> {
        let until = Instant::now() + timeout;
        let mut wc = [MaybeUninit::uninit()];
        loop {
            if let [wc] = self.cq.poll(&mut wc)? {
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

fn dealloc(pd: &ProtectionDomain, mw: *mut Mw) -> Result<()> {
    if mw.is_null() {
        return Ok(());
    }
    let nic = pd.device.nic();
    let dealloc = pd.device.ops().dealloc_mw.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "ibv_dealloc_mw").provider(nic.to_string())
    })?;
    // SAFETY: the window was allocated here and was taken out of the table, or is nulled there
    // next.
    errors::status(unsafe { dealloc(mw) })
        .map_err(|errno| errors::call(nic, "ibv_dealloc_mw", errno))
}
