//! The fixture: a Level Zero driver, the iface over it, and two endpoints of a software NIC.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hmem::{
    AllocationKind, DeviceBuffer, DeviceId, DomainAttr, Hmem, Iface,
    iface::AllocRequest,
    loopback::Loopback,
    ze::{LevelZero, sys::Functions},
};
use hmem_fake_ze::{FakeDriver, Profile};

pub(crate) use crate::wire::{REMOTE, Wire, pattern};

/// Returns true if the tests run over Intel's driver (`HMEM_ZE=real`) instead of the fake.
pub(crate) fn real() -> bool {
    std::env::var("HMEM_ZE").is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"))
}

/// Returns the profiles of the fake driver to test. Over the real driver, returns a single one,
/// which is not used.
pub(crate) fn profiles() -> Vec<Profile> {
    if real() { vec![Profile::without_exports()] } else { Profile::all() }
}

static TURN: Mutex<()> = Mutex::new(());

/// The driver, iface, domain and endpoints of one test. Fields are dropped in order, the driver
/// last.
pub(crate) struct Link {
    wire: Wire,
    pub(crate) hmem: Hmem,
    pub(crate) ze: Arc<LevelZero>,
    /// The fake driver; `None` if the tests run over the real driver.
    pub(crate) driver: Option<FakeDriver>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Deref for Link {
    type Target = Wire;

    fn deref(&self) -> &Wire {
        &self.wire
    }
}

impl Link {
    pub(crate) fn open(profile: Profile, attr: DomainAttr) -> Self {
        let turn = real().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        let driver = (!real()).then(|| FakeDriver::start(profile));
        let ze = match &driver {
            Some(fake) => {
                // SAFETY: each function has the signature of its name in `ze_api.h`, and functions
                // live forever.
                let functions = unsafe { Functions::from_lookup(|name| fake.symbol(name)) };
                LevelZero::builder().functions(functions.expect("the table")).open()
            }
            None => LevelZero::open(),
        };
        let ze = Arc::new(ze.expect("a device"));
        let nic = Loopback::builder().build().expect("the software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&ze) as _);
        let hmem = hmem.provider(nic).build().expect("start");
        let wire = Wire::open(hmem.domain("loopback", attr).expect("a domain"));
        Self { wire, hmem, ze, driver, _turn: turn }
    }

    pub(crate) fn iface(&self) -> Arc<dyn Iface> {
        Arc::clone(&self.ze) as _
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind, device: DeviceId) -> DeviceBuffer {
        let request = AllocRequest { len, device, kind };
        DeviceBuffer::allocate(&self.iface(), &request).expect("allocate")
    }
}
