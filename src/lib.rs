//! hmem

pub use hmem_core::*;
