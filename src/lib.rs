//! Registers memory of any kind (host, CUDA, ROCr, Level Zero, Neuron, Gaudi, plug-ins) with RDMA
//! hardware, and keeps the reason for the path of each region.
//!
//! The library chooses the best path from the NIC to the memory that works on the machine. It
//! builds without any vendor's SDK: vendor libraries are loaded at run time, and an absent one is a
//! typed error.
//!
//! ```
//! use std::time::Duration;
//!
//! use hmem::{Access, DomainAttr, Hmem, loopback::Loopback, provider::EndpointAttr};
//!
//! # fn main() -> hmem::Result<()> {
//! // The software NIC. Hardware is added in the same way: `.verbs()`.
//! let hmem = Hmem::builder().provider(Loopback::builder().build()?).build()?;
//! let domain = hmem.domain("loopback", DomainAttr::default())?;
//! let source = domain.register(b"hello".to_vec(), Access::WRITE)?;
//! let target = domain.register(vec![0; 5], Access::REMOTE_WRITE)?;
//! println!("{}", target.decision()?);
//!
//! let queue = domain.open_cq(256)?;
//! let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
//! let (peer, key) = (endpoint.resolve(&endpoint.name())?, target.key()?);
//! endpoint.write(&[source.slice(0, 5)?], &[key.slice(0, 5)?], peer, 1)?;
//! let mut done = Vec::new();
//! queue.wait(&mut done, 1, Duration::MAX)?;
//! done.remove(0).result?;
//! assert_eq!(target.close()?, b"hello");
//! # Ok(()) }
//! ```
//!
//! Each page of the [guide] does one job, with an example that runs without hardware.
//!
//! Examples in the documentation of single items import from the crate that defines the item.
//! Applications depend on `hmem` alone, and write `hmem` for `hmem_core`, `hmem::loopback` for
//! `hmem_provider_loopback`, and so on. Ids such as KEY-02 are entries of `docs/requirements.md`.
//!
//! # Types to know
//!
//! - [`Hmem`]: the ifaces, the providers and the path selector of an application.
//! - [`Domain`]: an open NIC.
//! - [`Memory`]: memory that can be registered, such as a `Vec<u8>`, a [`DeviceBuffer`], or the
//!   addresses of a [`Raw`].
//! - [`Region`]: registered memory with its keys.
//! - [`Endpoint`]: posts transfers.
//! - [`Error`]: a failure, with its kind, its origin, the driver's own code and a remedy.
//!
//! # Features
//!
//! No feature needs anything installed. These are on by default:
//!
//! - `cuda`, `rocr`, `ze`: the memory of one vendor each.
//! - `verbs`: RDMA hardware.
//! - `libfabric`: registration in libfabric domains of the application, or on NICs that libfabric
//!   lists.
//! - `testing`: the software NIC ([`loopback`]) and the simulated device
//!   ([`Simulated`](system::Simulated)). It compiles the crate io-uring.
//! - `recordings`: recorded topologies in archives, and the kernel configuration in
//!   `/proc/config.gz`. It compiles the crates flate2 and tar.
//!
//! These are off by default:
//!
//! - `neuron`, `synapseai`: the memory of AWS Neuron and Intel Gaudi. No device of either has been
//!   tested yet. The command `hmem` has both.
//! - `cudarc`: registers slices of that crate.
//! - `log`: writes the library's events as records of the crate `log`.
//! - `metrics`: publishes the counts of domains through the crate `metrics`.
//!
//! A small build for RDMA hardware and CUDA:
//!
//! ```toml
//! hmem = { git = "URL", default-features = false, features = ["verbs", "cuda"] }
//! ```
//!
//! Without its feature, the use of a vendor's iface, of verbs or of an archive fails with
//! [`Unsupported`](ErrorKind::Unsupported), and the error names the feature. Without `testing`, its
//! items are absent.
//!
//! # Things this library does not do
//!
//! - It chooses no provider by itself. The software NIC never replaces hardware.
//! - It keeps process-wide state only for things that a process has once: functions of the C
//!   library and of the CUDA driver that a cache's monitor patches, the number of ranges that
//!   userfaultfd watches, and a mark that detects forks.
//! - It starts no thread unless the application uses one of these: an event queue, a progress
//!   thread, an asynchronous copy of the simulated device, a registration on several CPUs, a
//!   registration cache or its monitor.
//! - It prints nothing, and logs through `tracing`.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `env`, `guide`, `publisher`
//! - `cache_defaults`
//! - `builder`
//! - `nearest`

#![deny(unsafe_code)]

mod builder;
mod cache_defaults;
mod env;
pub mod guide;
mod nearest;
#[cfg(feature = "metrics")]
mod publisher;

pub use builder::{Builder, Hmem};
pub use cache_defaults::CacheDefaults;
#[doc(inline)]
pub use hmem_core::*;
#[cfg(feature = "neuron")]
#[doc(inline)]
pub use hmem_iface_accelerators::neuron;
#[cfg(feature = "synapseai")]
#[doc(inline)]
pub use hmem_iface_accelerators::synapseai;
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use hmem_iface_cuda as cuda;
#[cfg(feature = "rocr")]
#[doc(inline)]
pub use hmem_iface_rocr as rocr;
#[doc(inline)]
pub use hmem_iface_system as system;
#[cfg(feature = "ze")]
#[doc(inline)]
pub use hmem_iface_ze as ze;
#[doc(inline)]
pub use hmem_p2p as p2p;
#[cfg(feature = "libfabric")]
#[doc(inline)]
pub use hmem_provider_libfabric as libfabric;
#[cfg(feature = "testing")]
#[doc(inline)]
pub use hmem_provider_loopback as loopback;
#[cfg(feature = "verbs")]
#[doc(inline)]
pub use hmem_provider_verbs as verbs;
#[cfg(feature = "metrics")]
pub use publisher::MetricsPublisher;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
#[derive(Debug)]
pub struct Readme;
