//! Bindings of libibverbs.so.1: its function table (`functions`), and the layouts (`layout`) and
//! constants (`codes`) of `infiniband/verbs.h`, written by hand.
//!
//! Symbols are looked up with their version. Half of them exist as `IBVERBS_1.0` and as
//! `IBVERBS_1.1`, with different layouts. The inline functions of the header call the driver
//! through [`Context::ops`], and this crate does the same.
//!
//! The module is public so that a caller can inject another driver with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_provider_verbs::sys::Functions;
//!
//! // SAFETY: the lookup returns no address, so the safety rules for addresses hold.
//! let error = unsafe { Functions::from_lookup(|_, _| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some("ibv_get_device_list@IBVERBS_1.1"));
//! ```

mod codes;
mod functions;
mod layout;

pub use self::{codes::*, functions::Functions, layout::*};
