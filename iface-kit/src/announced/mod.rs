//! An iface for drivers that cannot tell which allocation an address belongs to.
//!
//! AWS Neuron and Intel Gaudi have no call like `cuPointerGetAttribute`. [`Announced`] is an iface
//! over such a driver. It finds the allocation of an address in a table, which holds
//!
//! - memory that was allocated through the iface;
//! - memory that the application allocated itself and announced ([`Announced::announce`]).
//!
//! A back end implements [`Driver`]. [`Announced`] adds allocation, blocking copies, dma-buf export
//! and a monitor. [`hmem_core::function_table`] declares the functions of a vendor's library, which
//! is loaded at run time.
//!
//! # Examples
//! ```
//! use hmem_core::{DeviceId, Error, ErrorKind, Iface, IfaceKind, Result, iface::Device};
//! use hmem_core::{Address, AddressRange};
//! use hmem_iface_kit::announced::{Announced, Block, BlockRange, DmaBuf, Driver};
//!
//! /// A driver without devices.
//! #[derive(Debug)]
//! struct Nothing;
//!
//! // SAFETY: the driver returns no memory.
//! unsafe impl Driver for Nothing {
//!     type Handle = ();
//!     const KIND: IfaceKind = IfaceKind::FIRST_PLUG_IN;
//!     const NAME: &'static str = "nothing";
//!
//!     fn device_count(&self) -> u32 {
//!         0
//!     }
//!     fn devices(&self) -> Result<Vec<Device>> {
//!         Ok(Vec::new())
//!     }
//!     fn is_active(&self, _: DeviceId) -> Result<bool> {
//!         Ok(false)
//!     }
//!     fn allocate(&self, _: DeviceId, _: u64) -> Result<(Address, ())> {
//!         Err(Error::new(ErrorKind::Unavailable, "allocate"))
//!     }
//!     unsafe fn free(&self, _: DeviceId, _: Address, _: ()) -> Result<()> {
//!         Ok(())
//!     }
//!     unsafe fn write(&self, _: &BlockRange<()>, _: Address) -> Result<()> {
//!         Ok(())
//!     }
//!     unsafe fn read(&self, _: &BlockRange<()>, _: Address) -> Result<()> {
//!         Ok(())
//!     }
//!     fn export(&self, _: &Block<()>, _: AddressRange) -> Result<DmaBuf> {
//!         Err(Error::new(ErrorKind::Unsupported, "export"))
//!     }
//! }
//!
//! let iface = Announced::new(Nothing)?;
//! let on_the_stack = 0u8;
//! assert_eq!(iface.query(Address::of_ptr(&on_the_stack))?, None);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Limits
//!
//! The iface does not detect a free that bypasses it: the application must withdraw announced
//! memory before the free. The iface has no asynchronous copies, page-locking of host memory,
//! physical segments, IPC or peer memory. The iface refuses to flush inbound writes if the driver
//! has no call for the flush.

mod driver;
mod exports;
mod iface;
mod monitor;
mod table;

pub use driver::{Block, BlockRange, DmaBuf, Driver, Open};
pub use iface::Announced;
