//! The fixture: a ROCr runtime, the iface over it, and two endpoints of a software NIC.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hmem::{
    AllocationKind, CacheAttr, DeviceBuffer, DeviceId, DomainAttr, Hmem, Iface,
    iface::AllocRequest,
    loopback::Loopback,
    path::P2pPolicy,
    rocr::{Rocr, sys::Functions},
};
use hmem_fake_rocr::{FakeRuntime, Live, Profile};

use crate::model;
pub(crate) use crate::wire::{REMOTE, Wire, pattern};

/// Returns true if the tests run over AMD's runtime with a model GPU, not over the fake runtime.
pub(crate) fn is_model() -> bool {
    std::env::var("HMEM_ROCR").is_ok_and(|name| name == "model")
}

/// Opens an iface over the fake runtime, or over the model GPU.
pub(crate) fn open(fake: Option<&FakeRuntime>) -> Rocr {
    let functions = match fake {
        // SAFETY: each function has the signature of its name in AMD's headers, and functions live
        // forever.
        Some(fake) => unsafe { Functions::from_lookup(|name| fake.symbol(name)) },
        None => Ok(model::functions()),
    };
    Rocr::builder().functions(functions.expect("the table")).open().expect("a GPU")
}

static TURN: Mutex<()> = Mutex::new(());

/// The runtime, iface, domain and endpoints of one test. Fields are dropped in order, the runtime
/// last.
pub(crate) struct Fixture {
    wire: Wire,
    pub(crate) hmem: Hmem,
    pub(crate) rocr: Arc<Rocr>,
    pub(crate) fake: Option<FakeRuntime>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Fixture {
    type Target = Wire;

    fn deref(&self) -> &Wire {
        &self.wire
    }
}

impl Fixture {
    pub(crate) fn new(profile: Profile, p2p: P2pPolicy, cached: bool) -> Self {
        let attr =
            DomainAttr { p2p, cache: cached.then(CacheAttr::default), ..DomainAttr::default() };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = (!is_model()).then(|| FakeRuntime::start(profile));
        let rocr = Arc::new(open(fake.as_ref()));
        let nic = Loopback::builder().build().expect("a NIC");
        let hmem = Hmem::builder().without_vendor_ifaces();
        let hmem = hmem.shared_iface(Arc::clone(&rocr) as _).provider(nic).build().expect("start");
        let wire = Wire::open(hmem.domain("loopback", attr).expect("a domain"));
        Self { wire, hmem, rocr, fake, _turn: turn }
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        let iface: Arc<dyn Iface> = Arc::clone(&self.rocr) as _;
        DeviceBuffer::allocate(&iface, &request).expect("allocate")
    }

    /// Closes everything. Asserts that no object is left in the fake runtime and that no call broke
    /// its rules.
    pub(crate) fn end(self) {
        let Self { wire, hmem, rocr, fake, .. } = self;
        drop((wire, hmem));
        let rocr = Arc::into_inner(rocr).expect("the only reference");
        rocr.close().map_err(hmem::Error::from).expect("close");
        if let Some(fake) = fake {
            assert_eq!(fake.live(), Live::default());
            assert_eq!(fake.violations(), Vec::<String>::new());
        }
    }
}
