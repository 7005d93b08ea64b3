//! Allocations, faults and counters.

use std::collections::{BTreeMap, HashMap};

use hmem_fake_common::{Calls, Pages, page};
use parking_lot::Mutex;

/// Total bytes of device memory.
pub(crate) const MEMORY: u64 = 1 << 34;

/// State of the runtimes of this process. If no test has set it, the first call sets it with the
/// default profile.
static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Configurable properties of the fake runtimes.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Number of NeuronCores, which is also the number of Gaudi devices.
    pub devices: u32,
    /// True if the runtimes start as if the application had called `nrt_init` and acquired a Gaudi
    /// device.
    pub running: bool,
    /// The device type that SynapseAI reports, as `synDeviceType`.
    pub device_type: i32,
    /// Functions that the libraries do not export.
    pub absent: Vec<&'static str>,
}

impl Default for Profile {
    fn default() -> Self {
        Self { devices: 2, running: false, device_type: 4, absent: Vec::new() }
    }
}

impl Profile {
    /// Returns the default profile, with runtimes that the application has started.
    #[must_use]
    pub fn running() -> Self {
        Self { running: true, ..Self::default() }
    }

    /// Removes functions from the libraries of this profile.
    #[must_use]
    pub fn without(mut self, symbols: &[&'static str]) -> Self {
        self.absent.extend(symbols);
        self
    }
}

/// The number of live objects of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Number of live allocations of device memory.
    pub allocations: usize,
    /// Number of live host buffers of `synHostMalloc`.
    pub host_buffers: usize,
    /// Number of live streams.
    pub streams: usize,
}

/// A copy that was enqueued on a stream and has not run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) from: *const u8,
    pub(crate) to: *mut u8,
    pub(crate) len: usize,
}

/// An allocation of device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) base: u64,
    /// Requested length in bytes.
    pub(crate) len: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) profile: Profile,
    pub(crate) pages: Pages,
    pub(crate) running: bool,
    /// Live allocations by first address.
    blocks: BTreeMap<u64, Block>,
    /// First address of each live Neuron tensor, by the tensor's handle.
    pub(crate) tensors: HashMap<usize, u64>,
    pub(crate) next_handle: usize,
    /// Lengths of the live host buffers of `synHostMalloc`, by address.
    pub(crate) host: BTreeMap<usize, usize>,
    /// Live streams, each with its enqueued copies.
    pub(crate) streams: BTreeMap<usize, Vec<Copy>>,
    pub(crate) calls: Calls<i32>,
}

// SAFETY: the pointers of waiting copies are only used under the lock of `STATE`.
unsafe impl Send for State {}

impl State {
    fn new(profile: Profile) -> Self {
        Self {
            running: profile.running,
            profile,
            pages: Pages::default(),
            blocks: BTreeMap::new(),
            tensors: HashMap::new(),
            next_handle: 1,
            host: BTreeMap::new(),
            streams: BTreeMap::new(),
            calls: Calls::default(),
        }
    }

    pub(crate) fn live(&self) -> Live {
        Live {
            allocations: self.blocks.len(),
            host_buffers: self.host.len(),
            streams: self.streams.len(),
        }
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle * 16
    }

    /// Allocates device memory at the lowest free address at which the length fits. Returns `None`
    /// if the length does not fit, or if the pages cannot be mapped.
    pub(crate) fn allocate(&mut self, len: u64) -> Option<Block> {
        let whole = len.checked_next_multiple_of(page())?;
        let used: u64 = self.blocks.values().map(|block| block.len).sum();
        if used + whole > MEMORY {
            return None;
        }
        let mut base = self.pages.first();
        for (start, block) in &self.blocks {
            if base + whole <= *start {
                break;
            }
            base = start + block.len.next_multiple_of(page());
        }
        self.pages.back(base, whole, false).ok()?;
        let block = Block { base, len };
        self.blocks.insert(base, block);
        Some(block)
    }

    pub(crate) fn free(&mut self, base: u64) -> bool {
        let Some(block) = self.blocks.remove(&base) else { return false };
        self.pages.clear(base, block.len.next_multiple_of(page()));
        true
    }

    /// Returns the allocation whose pages contain the whole range.
    pub(crate) fn holder(&self, address: u64, len: u64) -> Option<Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        let end = block.base + block.len.next_multiple_of(page());
        (address.checked_add(len)? <= end).then_some(*block)
    }
}

pub(crate) fn restart(profile: Profile) {
    *STATE.lock() = Some(State::new(profile));
}

pub(crate) fn with<T>(act: impl FnOnce(&mut State) -> T) -> T {
    act(STATE.lock().get_or_insert_with(|| State::new(Profile::default())))
}
