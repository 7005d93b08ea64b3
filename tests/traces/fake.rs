//! The fake drivers of the vendors, which provide device memory.

use std::sync::Arc;

use hmem::{
    Iface,
    cuda::{self, Cuda, CudaMonitorKind, sys::CuResult},
    neuron::{self, Neuron},
    rocr::{self, Rocr, sys::HsaStatus},
    synapseai::{self, SynapseAi},
    ze::{self, LevelZero, sys::ZeResult},
};

/// A fake driver to start, with its profile.
#[derive(Clone)]
pub(crate) enum Profile {
    Cuda(hmem_fake_cuda::Profile),
    Rocr(hmem_fake_rocr::Profile),
    LevelZero(hmem_fake_ze::Profile),
    Neuron(hmem_fake_accelerators::Profile),
    SynapseAi(hmem_fake_accelerators::Profile),
}

/// A running fake driver.
pub(crate) enum Driver {
    Cuda(Box<cuda::sys::Functions>, hmem_fake_cuda::FakeDriver),
    Rocr(hmem_fake_rocr::FakeRuntime),
    LevelZero(hmem_fake_ze::FakeDriver),
    Accelerators(hmem_fake_accelerators::Fake),
}

impl Profile {
    /// Returns the name that the listing of traces uses for the driver and its profile.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Cuda(profile) => profile.name.to_owned(),
            Self::Rocr(profile) => format!("ROCr {}", profile.name),
            Self::LevelZero(profile) => format!("Level Zero {}", profile.name),
            Self::Neuron(_) => "Neuron".to_owned(),
            Self::SynapseAi(_) => "SynapseAI".to_owned(),
        }
    }

    /// Starts the fake driver and opens an iface over it.
    pub(crate) fn start(&self) -> (Arc<dyn Iface>, Driver) {
        const TABLE: &str = "every required function";
        const DEVICE: &str = "a device";
        match self.clone() {
            Self::Cuda(profile) => {
                let fake = hmem_fake_cuda::FakeDriver::start(profile);
                // SAFETY: the fake CUDA driver has functions with the signatures that the
                // vendor's header declares for their names. Functions live forever.
                let table = unsafe { cuda::sys::Functions::from_lookup(|name| fake.symbol(name)) };
                let table = table.expect(TABLE);
                let iface = Cuda::builder().functions(table.clone());
                let iface = iface.monitor(CudaMonitorKind::Identity).open().expect(DEVICE);
                (Arc::new(iface), Driver::Cuda(Box::new(table), fake))
            }
            Self::Rocr(profile) => {
                let fake = hmem_fake_rocr::FakeRuntime::start(profile);
                // SAFETY: the fake HSA runtime has functions with the signatures that the
                // vendor's header declares for their names. Functions live forever.
                let table = unsafe { rocr::sys::Functions::from_lookup(|name| fake.symbol(name)) };
                let iface = Rocr::builder().functions(table.expect(TABLE)).open().expect(DEVICE);
                (Arc::new(iface), Driver::Rocr(fake))
            }
            Self::LevelZero(profile) => {
                let fake = hmem_fake_ze::FakeDriver::start(profile);
                // SAFETY: the fake Level Zero driver has functions with the signatures that the
                // vendor's header declares for their names. Functions live forever.
                let table = unsafe { ze::sys::Functions::from_lookup(|name| fake.symbol(name)) };
                let iface = LevelZero::builder().functions(table.expect(TABLE));
                (Arc::new(iface.open().expect(DEVICE)), Driver::LevelZero(fake))
            }
            Self::Neuron(profile) => {
                let fake = hmem_fake_accelerators::Fake::start(profile);
                // SAFETY: the fake Neuron runtime has functions with the signatures that the
                // vendor's header declares for their names. Functions live forever.
                let table =
                    unsafe { neuron::sys::Functions::from_lookup(|name| fake.symbol(name)) };
                let iface = Neuron::builder().functions(table.expect(TABLE)).open().expect(DEVICE);
                (Arc::new(iface), Driver::Accelerators(fake))
            }
            Self::SynapseAi(profile) => {
                use synapseai::sys::{hlthunk, synapse};
                let fake = hmem_fake_accelerators::Fake::start(profile);
                // SAFETY: the fake SynapseAI libraries have functions with the signatures that the
                // vendor's headers declare for their names. Functions live forever.
                let (table, thunk) = unsafe {
                    (
                        synapse::Functions::from_lookup(|name| fake.symbol(name)),
                        hlthunk::Functions::from_lookup(|name| fake.symbol(name)),
                    )
                };
                let builder = SynapseAi::builder().functions(table.expect(TABLE));
                let iface = match thunk {
                    Ok(thunk) => builder.hlthunk_functions(thunk),
                    Err(_) => builder,
                };
                (Arc::new(iface.open().expect(DEVICE)), Driver::Accelerators(fake))
            }
        }
    }
}

impl Driver {
    /// Makes the `nth` next call of a function (1 is the next call) fail with a driver's error
    /// code. With 0, every later call of CUDA's function fails.
    pub(crate) fn fail_nth(&self, symbol: &'static str, nth: u64, code: u32) {
        match self {
            Self::Cuda(_, fake) if nth == 0 => fake.fail_always(symbol, CuResult(code)),
            Self::Cuda(_, fake) => fake.fail_nth(symbol, nth, CuResult(code)),
            Self::Rocr(fake) => fake.fail_nth(symbol, nth, HsaStatus(code)),
            Self::LevelZero(fake) => fake.fail_nth(symbol, nth, ZeResult(code)),
            Self::Accelerators(fake) => fake.fail_nth(symbol, nth, code as i32),
        }
    }

    /// Allocates device memory like an application that calls the driver directly. The memory lives
    /// as long as the driver.
    pub(crate) fn allocate(&self, len: usize) -> u64 {
        match self {
            Self::Rocr(fake) => fake.allocate(0, len),
            Self::LevelZero(fake) => fake.allocate_elsewhere(len),
            Self::Cuda(..) | Self::Accelerators(_) => unreachable!("no test case asks for it"),
        }
    }
}
