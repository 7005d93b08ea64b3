//! Reports of users of other libraries, told as tests: the user's steps over hmem's public
//! interfaces, and hmem's answer. `docs/field-reports.md` has the threads. A test is named after
//! its thread.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
mod cuda;
mod document;
mod host;
#[cfg(feature = "cuda")]
mod machine;
#[cfg(feature = "cuda")]
mod mapped;
mod nics;
#[cfg(feature = "cuda")]
#[allow(dead_code, reason = "the CUDA tests use the rest")]
#[path = "../cuda/segments.rs"]
mod segments;
mod tensors;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the CUDA tests use the rest"))]
#[path = "../wire/mod.rs"]
mod wire;
