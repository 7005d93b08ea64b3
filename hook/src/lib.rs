//! Functions of loaded libraries, hooked where they begin, and the caches that hooks tell.
//!
//! The monitors of several ifaces share this crate: it patches the C library's `munmap` and a
//! driver's free by the same rules, and their hooks notify
//! [`Invalidator`](hmem_core::monitor::Invalidator)s from the same kind of table. Each monitor
//! itself knows which memory a function takes away, and when.
//!
//! | file | what it holds |
//! |---|---|
//! | `hooks` | [`Hooks`]: what a monitor starts, with an example: patches while it lives, and its subscriptions |
//! | `process` | [`HookRegistry`]: subscribers and patches of one kind of hooks in a process |
//! | `patch` | [`Patches`]: a set of functions patched and taken back, and who overwrote which |
//! | `entry`, `arch` | which entries can be patched, by one store, under running threads |
//! | `trampoline` | the code between an entry and its hook |
//! | `table` | [`Subscribers`]: who is told, read without a lock |
//! | `wiped` | [`WipedOnFork`]: memory that a forked child finds zeroed |
//! | `name` | [`MonitorName`]: who speaks in errors |
//!
//! Patching is there for glibc on x86-64 and aarch64; the rest for every Linux.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `entry`, `name`
//! - `arch`, `wiped`
//! - `table`, `trampoline`
//! - `patch`
//! - `process`
//! - `hooks`
//!
//! # Things this crate does not do
//!
//! It knows no library and no system call, decides nothing about caching, and hooks nothing by
//! being linked.

#![deny(unsafe_code)]

#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[cfg_attr(target_arch = "aarch64", path = "arch/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "arch/x86_64.rs")]
#[allow(unsafe_code)]
mod arch;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod entry;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod hooks;
mod name;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[allow(unsafe_code)]
mod patch;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[allow(unsafe_code)]
mod process;
#[allow(unsafe_code)]
mod table;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[allow(unsafe_code)]
mod trampoline;
#[allow(unsafe_code)]
mod wiped;

#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use self::{
    hooks::Hooks,
    patch::{PatchTarget, Patches},
    process::HookRegistry,
};
pub use self::{
    name::MonitorName,
    table::{HasTable, SLOTS, SubscriberTable, Subscribers, TableReadGuard, clamped},
    wiped::{Wipeable, WipedOnFork},
};
