//! A simulated device that behaves like hardware.
//!
//! - Content lives in memory files ([`arena`]).
//! - Device addresses lie in a reserved window without access rights, so that the CPU cannot access
//!   device memory.
//! - Bytes move through a copy engine or through exported fds.
//!
//! The simulation is as strict as hardware, so that it does not hide bugs:
//!
//! - Addresses can be reused at once, identities never.
//! - With [`FreeDetection::Callback`], subscribers are notified before a free. With
//!   [`FreeDetection::Identity`], they are not notified at all.
//! - Tests can make any call fail.

mod address_space;
mod arena;
mod builder;
mod copy;
mod engine;
mod export;
mod faults;
mod iface;
mod ipc;
mod lazy;
mod memory;
mod monitor;
mod p2p_matrix;
mod ranges;
mod reservations;
mod stats;
mod sys;
mod table;

use std::sync::{Arc, atomic::AtomicU64};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, Mapping, Result,
    iface::Revocation, monitor::FreeSubscriptions,
};
use parking_lot::Mutex;

pub use self::{
    address_space::AddressReuse,
    builder::SimulatedBuilder,
    engine::Stepping,
    export::DmaBufKind,
    faults::{DeviceCall, Faults},
    monitor::FreeDetection,
    p2p_matrix::P2pMatrix,
    stats::SimulatedStats,
};
use self::{builder::SimulatedConfig, engine::Engine, memory::SimulatedState, table::PageTable};
use crate::sys::Udmabuf;

/// The default iface kind of simulated devices: the first of the kinds that are free for plug-ins.
pub const SIMULATED: IfaceKind = IfaceKind::FIRST_PLUG_IN;

/// An iface with simulated devices. Needs the feature `testing` of `hmem`, or `simulated` of this
/// crate.
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
    inner: Arc<SimulatedInner>,
}

#[derive(Debug)]
struct SimulatedInner {
    config: SimulatedConfig,
    page: u64,
    table: PageTable,
    faults: Faults,
    /// Number of copies that have succeeded.
    copies: AtomicU64,
    subscriptions: FreeSubscriptions,
    engine: Engine,
    udmabuf: Option<Udmabuf>,
    state: Mutex<SimulatedState>,
    /// The reserved addresses. The memory that the CPU may access is mapped there.
    window: Mapping,
}

impl Simulated {
    /// Returns a builder with the default configuration.
    #[must_use]
    pub fn builder() -> SimulatedBuilder {
        SimulatedBuilder::default()
    }

    /// Returns the reserved address range, which contains all device addresses of this iface.
    #[must_use]
    pub fn window(&self) -> AddressRange {
        self.inner.table.window()
    }

    /// Returns the object that counts driver calls and makes chosen calls fail.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.inner.faults
    }

    /// Returns counts of live objects and completed operations at this moment.
    #[must_use]
    pub fn stats(&self) -> SimulatedStats {
        SimulatedStats::of(&self.inner)
    }

    /// Sets the policy by which later allocations reuse freed addresses.
    pub fn set_address_reuse(&self, reuse: AddressReuse) {
        self.inner.state.lock().addresses.reuse = reuse;
    }

    /// Sets whether the segment at `address` can be exported to NICs. Only virtual allocations have
    /// more than one segment.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]: no live allocation contains the address.
    pub fn set_exportable(&self, address: Address, exportable: bool) -> Result<()> {
        let range = AddressRange::new(address, 1)?;
        let mut state = self.inner.state.lock();
        self.inner.record_of(&mut state, range)?.set_exportable(address, exportable);
        Ok(())
    }

    /// Revokes all dma-bufs that were exported from the allocation at `address`, as the driver of a
    /// device does when the device is reset. When a call returns true, the software NIC accesses
    /// them no more. Later exports are not revoked. Returns false if no dma-buf was exported since
    /// the last revocation began.
    ///
    /// Kernel drivers that imported a genuine dma-buf do not learn of the revocation.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]: no live allocation contains the address.
    pub fn revoke_exports(&self, address: Address) -> Result<bool> {
        let range = AddressRange::new(address, 1)?;
        let revocation = {
            let mut state = self.inner.state.lock();
            self.inner.record_of(&mut state, range)?.revocation.take()
        };
        // The lock is not held here, because importers wait for transfers in flight.
        Ok(revocation.inspect(Revocation::revoke).is_some())
    }

    /// Runs the oldest asynchronous copy that has not begun. Returns false if there is none.
    ///
    /// The method is meant for [`Stepping::ByHand`]. With [`Stepping::Thread`] it runs the copy too
    /// early: before the time that latency and bandwidth give.
    pub fn step(&self) -> bool {
        self.inner.engine.step()
    }

    /// Returns the number of asynchronous copies that have not begun.
    #[must_use]
    pub fn pending_copies(&self) -> usize {
        self.inner.engine.pending()
    }
}

impl SimulatedInner {
    fn window_start(&self) -> u64 {
        self.table.window().start().0
    }

    /// Counts a driver call. Fails with the injected error if a fault is set for this call.
    fn call(&self, call: DeviceCall) -> Result<()> {
        self.faults.enter(call).map_err(|error| error.iface(&self.config))
    }

    #[inline]
    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        if self.faults.is_counting() {
            return self.query_counted(address);
        }
        Ok(self.table.lookup(address))
    }

    /// Looks up an address, and counts the driver call. This is a function of its own, so that
    /// lookups that are not counted need no stack frame.
    #[cold]
    #[inline(never)]
    fn query_counted(&self, address: Address) -> Result<Option<Allocation>> {
        if self.table.is_mine(address) {
            self.call(DeviceCall::Query)?;
        }
        Ok(self.table.lookup(address))
    }

    fn device(&self, device: DeviceId) -> Result<DeviceId> {
        if device.0 < self.config.devices {
            return Ok(device);
        }
        Err(Error::new(ErrorKind::InvalidArgument, "device")
            .iface(&self.config)
            .device(device)
            .context("why", format_args!("device {} of {}", device.0, self.config.devices))
            .context("devices", self.config.devices)
            .remedy("devices count from 0"))
    }
}
