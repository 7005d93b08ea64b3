//! Patches functions of loaded libraries, and notifies caches when these functions free memory.
//!
//! The monitors of several ifaces share this crate. The host monitor patches the C library's
//! `munmap`, and the CUDA monitor patches a driver's free function, both by the same rules. The
//! hooks of both monitors notify [`Invalidator`](hmem_core::monitor::Invalidator)s from a
//! [`SubscriberTable`]. Only the monitors know which memory a function frees, and when.
//!
//! | file | content |
//! |---|---|
//! | `hooks` | [`Hooks`]: the entry point, with an example: patches and subscriptions |
//! | `process` | [`HookRegistry`]: subscribers and patches of one set of hooks in a process |
//! | `patch` | [`Patches`]: patches a set of functions, and undoes it |
//! | `entry`, `arch` | the rules for functions that one store can patch while threads run |
//! | `trampoline` | the code between an entry and its hook |
//! | `table` | [`Subscribers`]: the invalidators to notify, read without a lock |
//! | `name` | [`MonitorName`]: the name of a monitor in errors |
//!
//! Patching works with glibc on x86-64 and aarch64. The rest works on every Linux.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `entry`, `name`
//! - `arch`
//! - `table`, `trampoline`
//! - `patch`
//! - `process`
//! - `hooks`
//!
//! # Things this crate does not do
//!
//! The crate contains no hooks, which the monitors define. The crate decides nothing about caching,
//! and patches nothing until a monitor starts.

#![deny(unsafe_code)]

#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[cfg_attr(target_arch = "aarch64", path = "arch/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "arch/x86_64.rs")]
mod arch;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod entry;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod hooks;
mod name;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod patch;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod process;
mod table;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod trampoline;

#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use self::{
    hooks::Hooks,
    patch::{PatchTarget, Patches},
    process::HookRegistry,
};
pub use self::{
    name::MonitorName,
    table::{
        HasTable, SLOTS, SlotSubscription, SubscriberTable, Subscribers, TableReadGuard, clamped,
    },
};
