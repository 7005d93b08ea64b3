//! A device that is not there, and behaves as if it were.
//!
//! Content lives in memory files ([`arena`]); addresses are a reserved window without access, so
//! that the CPU faults on device memory as it does on hardware; bytes move through a copy engine or
//! through exported fds. Nothing here is simpler than hardware where simpler would hide a bug:
//! addresses come back on demand, identities never do, frees are told before they happen or not at
//! all, and any call can be made to fail.

mod address_space;
#[allow(unsafe_code)]
mod arena;
mod builder;
#[allow(unsafe_code)]
mod copy;
mod engine;
mod export;
mod faults;
#[allow(unsafe_code)]
mod iface;
mod ipc;
mod memory;
mod monitor;
mod p2p_matrix;
mod ranges;
mod stats;
#[allow(unsafe_code)]
mod table;

use std::sync::{Arc, atomic::AtomicU64};

use hmem_core::{Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, Result};
use parking_lot::Mutex;

pub use self::{
    address_space::AddressReuse,
    builder::SimulatedBuilder,
    engine::Stepping,
    export::DmaBufKind,
    faults::{Call, Faults},
    monitor::FreeDetection,
    p2p_matrix::P2pMatrix,
    stats::SimulatedStats,
};
use self::{
    builder::Config, engine::Engine, memory::SimulatedState, monitor::Subscriptions,
    table::PageTable,
};
use crate::sys::{Mapping, Udmabuf};

/// The kind that a simulated device has unless it is built with another: the first of the
/// plug-ins'.
pub const SIMULATED: IfaceKind = IfaceKind::FIRST_PLUG_IN;

/// The simulated device iface.
///
/// ```
/// use std::sync::Arc;
///
/// use hmem_core::{AllocationKind, DeviceBuffer, DeviceId, Iface, iface::AllocRequest};
/// use hmem_iface_system::Simulated;
///
/// let simulated = Arc::new(Simulated::builder().devices(2).build()?);
/// let iface: Arc<dyn Iface> = Arc::clone(&simulated) as _;
/// let request = AllocRequest { len: 100, device: DeviceId(1), kind: AllocationKind::Device };
/// let memory = DeviceBuffer::allocate(&iface, &request)?;
///
/// memory.write(0, b"not a pointer")?;
/// let mut bytes = [0; 7];
/// memory.read(6, &mut bytes)?;
/// assert_eq!(&bytes, b"pointer");
///
/// drop(memory);
/// assert_eq!(simulated.stats().live_allocations, 0);
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct Simulated {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Config,
    page: u64,
    table: PageTable,
    faults: Faults,
    copies: AtomicU64,
    subscriptions: Subscriptions,
    engine: Engine,
    udmabuf: Option<Udmabuf>,
    book: Mutex<SimulatedState>,
    window: Mapping,
}

impl Simulated {
    /// Starts to describe a simulated device.
    #[must_use]
    pub fn builder() -> SimulatedBuilder {
        SimulatedBuilder::default()
    }

    /// The addresses that this iface may hand out.
    #[must_use]
    pub fn window(&self) -> AddressRange {
        self.inner.table.window()
    }

    /// The faults to inject, and counts of calls.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.inner.faults
    }

    /// What is alive and what was done.
    #[must_use]
    pub fn stats(&self) -> SimulatedStats {
        SimulatedStats::of(&self.inner)
    }

    /// Changes which addresses the next allocations get.
    pub fn set_address_reuse(&self, reuse: AddressReuse) {
        self.inner.book.lock().set_address_reuse(reuse);
    }

    /// Sets whether the segment around `address` can be exported to NICs. Every allocation is one
    /// segment but for virtual ones.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if no live allocation holds the address.
    pub fn set_exportable(&self, address: Address, exportable: bool) -> Result<()> {
        self.inner.set_exportable(AddressRange::new(address, 1)?, exportable)
    }

    /// Runs the oldest asynchronous copy that has not begun; `false` if there is none. For
    /// [`Stepping::ByHand`]; with an engine thread it takes the copy from under it, deadline or
    /// not.
    pub fn step(&self) -> bool {
        self.inner.engine.step()
    }

    /// How many asynchronous copies have not begun.
    #[must_use]
    pub fn pending_copies(&self) -> usize {
        self.inner.engine.pending()
    }
}

impl Inner {
    fn window_start(&self) -> u64 {
        self.table.window().start().0
    }

    /// Counts a driver call and injects its fault.
    fn call(&self, call: Call) -> Result<()> {
        self.faults.call(call).map_err(|error| error.iface(self.config.kind))
    }

    #[inline]
    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        if self.faults.is_armed(Call::Query) {
            return self.query_counted(address);
        }
        Ok(self.table.lookup(address))
    }

    /// Out of line, so that a lookup that nobody counts needs no frame.
    #[cold]
    #[inline(never)]
    fn query_counted(&self, address: Address) -> Result<Option<Allocation>> {
        if self.table.is_mine(address) {
            self.call(Call::Query)?;
        }
        Ok(self.table.lookup(address))
    }

    fn device(&self, device: DeviceId) -> Result<DeviceId> {
        if device.0 < self.config.devices {
            return Ok(device);
        }
        Err(Error::new(ErrorKind::InvalidArgument, "device")
            .iface(self.config.kind)
            .device(device)
            .context("devices", self.config.devices)
            .remedy("devices count from 0"))
    }
}
