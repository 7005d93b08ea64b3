//! libibverbs.so.1: its function table (`functions`), and the layouts (`layout`) and constants
//! (`codes`) of `infiniband/verbs.h`, laid out by hand.
//!
//! Symbols are looked up with their version, since half of them exist as `IBVERBS_1.0` and
//! `IBVERBS_1.1` with different layouts behind. What the header has as inline functions goes
//! through [`Context::ops`], as it does there.
//!
//! Public so that a driver of one's own can be injected with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_provider_verbs::sys::Functions;
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_, _| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some("ibv_get_device_list@IBVERBS_1.1"));
//! ```

mod codes;
mod functions;
mod layout;

pub use self::{
    codes::*,
    functions::{Functions, ReregMr},
    layout::*,
};
