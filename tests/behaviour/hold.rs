//! Holds a registration in flight: in the software NIC by an injected fault, over an RDMA device by
//! a replaced `ibv_reg_mr`.

use hmem::loopback::Gate;

use crate::net::eventually;

/// Guard that blocks the next registration until it is released or dropped: that of any domain on
/// the software NIC, and of one domain on an RDMA device.
pub(crate) enum Hold {
    SoftwareNic(Gate),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Gate),
}

impl Hold {
    /// Returns whether a registration is held now.
    pub(crate) fn is_holding(&self) -> bool {
        match self {
            Self::SoftwareNic(gate) => gate.is_holding(),
            #[cfg(feature = "verbs")]
            Self::Verbs(gate) => gate.is_holding(),
        }
    }

    /// Waits until a registration is held.
    pub(crate) fn wait(&self) {
        eventually("the held registration", || self.is_holding());
    }

    /// Lets the held registration continue.
    pub(crate) fn release(&self) {
        match self {
            Self::SoftwareNic(gate) => gate.release(),
            #[cfg(feature = "verbs")]
            Self::Verbs(gate) => gate.release(),
        }
    }
}

/// The machine's libibverbs with replaced registration functions, which block while a test holds
/// them.
#[cfg(feature = "verbs")]
pub(crate) mod verbs {
    use std::{
        collections::BTreeMap,
        ffi::{CString, c_int, c_uint, c_void},
        mem,
        sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    };

    use hmem::{
        Domain,
        verbs::{
            VerbsDomain,
            sys::{Functions, Mr, Pd},
        },
    };

    type RegMr = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    type RegMrIova2 = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    type RegDmaBufMr = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

    /// The original registration functions of libibverbs. The replacements are C functions without
    /// a context argument, so they read the originals from statics.
    static REG_MR: OnceLock<RegMr> = OnceLock::new();
    static REG_MR_IOVA2: OnceLock<RegMrIova2> = OnceLock::new();
    static REG_DMA_BUF_MR: OnceLock<RegDmaBufMr> = OnceLock::new();
    /// State of each active [`Gate`], by the address of its protection domain.
    static HELD: Mutex<BTreeMap<usize, Arc<State>>> = Mutex::new(BTreeMap::new());

    #[derive(Clone, Copy, Default, PartialEq, Eq)]
    enum Stage {
        #[default]
        Open,
        Holding,
        Released,
    }

    #[derive(Default)]
    struct State {
        stage: Mutex<Stage>,
        changed: Condvar,
    }

    /// Locks a mutex. Ignores poison, since the test that panicked reports its own failure.
    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Guard that blocks the next registration in one protection domain until it is released or
    /// dropped.
    pub(crate) struct Gate {
        pd: usize,
        state: Arc<State>,
    }

    impl Gate {
        pub(crate) fn hold(domain: &Domain) -> Self {
            let pd = VerbsDomain::of(domain).expect("a verbs domain").pd().addr();
            let state = Arc::<State>::default();
            lock(&HELD).insert(pd, Arc::clone(&state));
            Self { pd, state }
        }

        pub(crate) fn is_holding(&self) -> bool {
            *lock(&self.state.stage) == Stage::Holding
        }

        pub(crate) fn release(&self) {
            *lock(&self.state.stage) = Stage::Released;
            self.state.changed.notify_all();
        }
    }

    impl Drop for Gate {
        fn drop(&mut self) {
            let mut held = lock(&HELD);
            // A later protection domain at this address may have a gate of its own.
            if held.get(&self.pd).is_some_and(|state| Arc::ptr_eq(state, &self.state)) {
                held.remove(&self.pd);
            }
            drop(held);
            self.release();
        }
    }

    /// Blocks the calling registration if a [`Gate`] is active for its protection domain.
    fn pass(pd: *mut Pd) {
        let Some(state) = lock(&HELD).remove(&pd.addr()) else { return };
        let mut stage = lock(&state.stage);
        if *stage == Stage::Open {
            *stage = Stage::Holding;
        }
        while *stage == Stage::Holding {
            stage = state.changed.wait(stage).unwrap_or_else(PoisonError::into_inner);
        }
    }

    unsafe extern "C" fn reg_mr(
        pd: *mut Pd,
        addr: *mut c_void,
        len: usize,
        access: c_int,
    ) -> *mut Mr {
        pass(pd);
        let register = REG_MR.get().expect("set before this function was handed out");
        // SAFETY: the caller keeps the contract of `ibv_reg_mr`, which this function replaces.
        unsafe { register(pd, addr, len, access) }
    }

    unsafe extern "C" fn reg_mr_iova2(
        pd: *mut Pd,
        addr: *mut c_void,
        len: usize,
        iova: u64,
        access: c_uint,
    ) -> *mut Mr {
        pass(pd);
        let register = REG_MR_IOVA2.get().expect("set before this function was handed out");
        // SAFETY: the caller keeps the contract of `ibv_reg_mr_iova2`, which this function
        // replaces.
        unsafe { register(pd, addr, len, iova, access) }
    }

    unsafe extern "C" fn reg_dmabuf_mr(
        pd: *mut Pd,
        offset: u64,
        len: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> *mut Mr {
        pass(pd);
        let register = REG_DMA_BUF_MR.get().expect("set before this function was handed out");
        // SAFETY: the caller keeps the contract of `ibv_reg_dmabuf_mr`, which this function
        // replaces.
        unsafe { register(pd, offset, len, iova, fd, access) }
    }

    /// Returns the functions of libibverbs, with replacements for the registration functions.
    pub(crate) fn functions() -> Functions {
        // SAFETY: libibverbs' initialisers have no precondition. It is never closed.
        let library =
            unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "load libibverbs");
        let own = |symbol: &'static str, version: &'static str| -> Option<*const ()> {
            let name = CString::new(symbol).expect("a symbol's name");
            let version = CString::new(version).expect("a version's name");
            // SAFETY: the library is open, and both names end with a NUL.
            let found = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
            if found.is_null() {
                return None;
            }
            Some(match symbol {
                "ibv_reg_mr" => {
                    // SAFETY: the header declares the function of this name with this signature.
                    REG_MR.get_or_init(|| unsafe { mem::transmute::<*mut c_void, RegMr>(found) });
                    reg_mr as *const ()
                }
                "ibv_reg_mr_iova2" => {
                    // SAFETY: the header declares the function of this name with this signature.
                    REG_MR_IOVA2.get_or_init(|| unsafe {
                        mem::transmute::<*mut c_void, RegMrIova2>(found)
                    });
                    reg_mr_iova2 as *const ()
                }
                "ibv_reg_dmabuf_mr" => {
                    // SAFETY: the header declares the function of this name with this signature.
                    REG_DMA_BUF_MR.get_or_init(|| unsafe {
                        mem::transmute::<*mut c_void, RegDmaBufMr>(found)
                    });
                    reg_dmabuf_mr as *const ()
                }
                _ => found.cast_const().cast(),
            })
        };
        // SAFETY: each function has the signature that the header declares for its name. The three
        // replacements have the signatures of the functions that they call.
        unsafe { Functions::from_lookup(own) }.expect("libibverbs is complete")
    }
}
