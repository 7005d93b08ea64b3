//! The vendors' ifaces, each over its fake driver.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hmem::{
    Iface, IfaceKind,
    cuda::{
        Cuda,
        sys::{CuResult, Functions as CudaFunctions},
    },
    neuron::{self, Neuron},
    rocr::{
        Rocr,
        sys::{Functions as RocrFunctions, HsaStatus},
    },
    synapseai::{
        SynapseAi,
        sys::{hlthunk, synapse},
    },
    ze::{
        LevelZero,
        sys::{Functions as ZeFunctions, ZeResult},
    },
};
use hmem_fake_accelerators as accelerators;

/// Locked by the test that uses a fake driver or counts open files, so that one test runs at a
/// time.
static TURN: Mutex<()> = Mutex::new(());

enum Fake {
    Cuda(hmem_fake_cuda::FakeDriver),
    Rocr(hmem_fake_rocr::FakeRuntime),
    Ze(hmem_fake_ze::FakeDriver),
    Accelerators(accelerators::Fake),
}

/// A vendor's iface and its fake driver. Fields drop in order, the driver last.
pub(crate) struct Vendor {
    pub(crate) iface: Arc<dyn Iface>,
    fake: Fake,
    _turn: MutexGuard<'static, ()>,
}

impl Vendor {
    pub(crate) fn open(kind: IfaceKind) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (iface, fake): (Arc<dyn Iface>, _) = match kind {
            IfaceKind::CUDA => {
                let fake = hmem_fake_cuda::FakeDriver::start(Default::default());
                // SAFETY: the fake's functions have the signatures of their names, and live
                // forever.
                let functions = unsafe { CudaFunctions::from_lookup(|name| fake.symbol(name)) };
                let iface = Cuda::builder().functions(functions.expect("the table")).open();
                (Arc::new(iface.expect("a GPU")), Fake::Cuda(fake))
            }
            IfaceKind::ROCR => {
                let fake = hmem_fake_rocr::FakeRuntime::start(Default::default());
                // SAFETY: the fake's functions have the signatures of their names, and live
                // forever.
                let functions = unsafe { RocrFunctions::from_lookup(|name| fake.symbol(name)) };
                let iface = Rocr::builder().functions(functions.expect("the table")).open();
                (Arc::new(iface.expect("a GPU")), Fake::Rocr(fake))
            }
            IfaceKind::ZE => {
                let fake = hmem_fake_ze::FakeDriver::start(Default::default());
                // SAFETY: the fake's functions have the signatures of their names, and live
                // forever.
                let functions = unsafe { ZeFunctions::from_lookup(|name| fake.symbol(name)) };
                let iface = LevelZero::builder().functions(functions.expect("the table")).open();
                (Arc::new(iface.expect("a GPU")), Fake::Ze(fake))
            }
            IfaceKind::NEURON => {
                let fake = accelerators::Fake::start(accelerators::Profile::running());
                // SAFETY: the fake's functions have the signatures of their names, and live
                // forever.
                let functions =
                    unsafe { neuron::sys::Functions::from_lookup(|name| fake.symbol(name)) };
                let iface = Neuron::builder().functions(functions.expect("the table")).open();
                (Arc::new(iface.expect("cores")), Fake::Accelerators(fake))
            }
            IfaceKind::SYNAPSEAI => {
                let fake = accelerators::Fake::start(accelerators::Profile::running());
                let lookup = |name: &str| fake.symbol(name);
                // SAFETY: the fake's functions have the signatures of their names, and live
                // forever.
                let (synapse, hlthunk) = unsafe {
                    let synapse = synapse::Functions::from_lookup(lookup);
                    (synapse, hlthunk::Functions::from_lookup(lookup))
                };
                let (synapse, hlthunk) = (synapse.expect("the table"), hlthunk.expect("the table"));
                let iface =
                    SynapseAi::builder().functions(synapse).hlthunk_functions(hlthunk).open();
                (Arc::new(iface.expect("a device")), Fake::Accelerators(fake))
            }
            other => panic!("no fake driver of {other}"),
        };
        Self { iface, fake, _turn: turn }
    }
}

/// Fault injection and counters, the same for each fake driver.
#[allow(dead_code, reason = "not every test binary injects faults")]
impl Vendor {
    /// Returns the names of the driver functions that the iface uses.
    pub(crate) fn symbols(&self) -> Vec<&'static str> {
        let (required, optional): (&[&[&str]], &[&[&str]]) = match (&self.fake, self.iface.kind()) {
            (Fake::Cuda(_), _) => (&[CudaFunctions::SYMBOLS], &[CudaFunctions::OPTIONAL_SYMBOLS]),
            (Fake::Rocr(_), _) => (&[RocrFunctions::SYMBOLS], &[RocrFunctions::OPTIONAL_SYMBOLS]),
            (Fake::Ze(_), _) => (&[ZeFunctions::SYMBOLS], &[ZeFunctions::OPTIONAL_SYMBOLS]),
            (_, IfaceKind::NEURON) => {
                (&[neuron::sys::Functions::SYMBOLS], &[neuron::sys::Functions::OPTIONAL_SYMBOLS])
            }
            _ => (&[synapse::Functions::SYMBOLS, hlthunk::Functions::SYMBOLS], &[]),
        };
        required.iter().chain(optional).flat_map(|names| names.iter().copied()).collect()
    }

    /// Makes the `nth` next call of a function fail: 1 is the next call.
    pub(crate) fn fail_nth(&self, symbol: &'static str, nth: u64) {
        match &self.fake {
            Fake::Cuda(fake) => fake.fail_nth(symbol, nth, CuResult::CUDA_ERROR_UNKNOWN),
            Fake::Rocr(fake) => fake.fail_nth(symbol, nth, HsaStatus::HSA_STATUS_ERROR),
            Fake::Ze(fake) => fake.fail_nth(symbol, nth, ZeResult::ZE_RESULT_ERROR_UNKNOWN),
            Fake::Accelerators(fake) => {
                // libhl-thunk returns negative error codes.
                fake.fail_nth(symbol, nth, if symbol.starts_with("hlthunk") { -22 } else { 1 });
            }
        }
    }

    /// Removes all injected faults.
    pub(crate) fn heal(&self) {
        match &self.fake {
            Fake::Cuda(fake) => fake.heal(),
            Fake::Rocr(fake) => fake.heal(),
            Fake::Ze(fake) => fake.heal(),
            Fake::Accelerators(fake) => fake.heal(),
        }
    }

    /// Returns the number of calls of a driver function so far.
    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        match &self.fake {
            Fake::Cuda(fake) => fake.calls(symbol),
            Fake::Rocr(fake) => fake.calls(symbol),
            Fake::Ze(fake) => fake.calls(symbol),
            Fake::Accelerators(fake) => fake.calls(symbol),
        }
    }

    /// Returns the number of live allocations in the fake driver.
    pub(crate) fn allocations(&self) -> usize {
        match &self.fake {
            Fake::Cuda(fake) => fake.live().allocations,
            Fake::Rocr(fake) => fake.live().allocations,
            Fake::Ze(fake) => fake.live().allocations,
            Fake::Accelerators(fake) => fake.live().allocations,
        }
    }
}
