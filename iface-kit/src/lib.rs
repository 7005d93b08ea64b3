//! Parts of which ifaces for device memory are made.
//!
//! An iface of a vendor loads the vendor's library at run time, allocates and frees memory, copies
//! it, and exports it. Much of this is the same for all vendors:
//!
//! - [`builder!`] and [`open!`] declare the builder of an iface and the functions that open it;
//!   [`check_idle`] refuses to close an iface that is in use.
//! - [`IfaceErrors`] makes the errors that are the same for all vendors. [`log_failure!`] logs an
//!   error that the caller cannot return.
//! - [`handles!`] and [`text`] are for handles and C strings of the library.
//! - [`Owned`](table::Owned) is the table of memory that the iface must release.
//! - [`InFlight`] is the event of an asynchronous copy, made from a [`DeviceCopy`].
//! - `announced` (cargo feature of that name) is a whole iface, for drivers that cannot tell which
//!   allocation an address belongs to.
//!
//! `hmem-core` has two further parts: [`function_table!`](hmem_core::function_table) declares the
//! functions of the library, and [`IpcHandle`](hmem_core::iface::IpcHandle) has the binary form of
//! IPC handles.
//!
//! # Examples
//! ```
//! use hmem_core::{Address, AddressRange, Allocation, AllocationId, AllocationKind, IfaceKind};
//! use hmem_iface_kit::table::Owned;
//!
//! let table = Owned::new(IfaceKind::FIRST_PLUG_IN);
//! let allocation = Allocation {
//!     iface: IfaceKind::FIRST_PLUG_IN,
//!     range: AddressRange::new(Address(0x1000), 4096)?,
//!     device: None,
//!     kind: AllocationKind::Device,
//!     id: AllocationId(1),
//!     token: 0,
//! };
//! let imported = false;
//! table.insert(&allocation, imported, "the handle of the driver");
//! assert!(table.take("ipc_close", &allocation, true).is_err());
//! assert!(table.take("free", &allocation, false).is_ok());
//! // The driver frees the memory here. A second free is refused.
//! assert!(table.take("free", &allocation, false).is_err());
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `errors`, `in_flight`, `library`, `open`, `table`: errors, copies, values of a library,
//!   opening and closing, memory to release
//! - `announced/exports`: dma-bufs in use
//! - `announced/driver`: the driver calls that an announced iface needs
//! - `announced/table`: allocations by address
//! - `announced/monitor`: detection of frees
//! - `announced/iface`: the iface over a driver and a table
//! - `announced`: its public items
//!
//! # Things this crate does not do
//!
//! The crate calls no driver, and knows no vendor. Drivers that look up allocations by address
//! differ in the lookup and in exports, so the crate of each vendor has its own code for these two.

#![deny(unsafe_code)]

#[cfg(feature = "announced")]
pub mod announced;
mod errors;
mod in_flight;
mod library;
mod open;
pub mod table;

pub use errors::IfaceErrors;
#[doc(hidden)]
pub use hmem_core::Result;
pub use in_flight::{DeviceCopy, InFlight};
pub use library::text;
pub use open::check_idle;
