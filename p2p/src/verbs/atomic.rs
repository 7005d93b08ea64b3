//! Which atomics verbs has: 64-bit fetch-and-add and compare-and-swap.

use hmem_core::{
    Error, ErrorKind, Result,
    provider::Nic,
    transfer::{AtomicOp, AtomicType},
};

use super::sys::WrOpcode;

/// Bytes of an element.
pub(super) const ELEMENT: u64 = 8;

/// The work request for an atomic operation.
pub(super) fn opcode(nic: &Nic, op: AtomicOp, datatype: AtomicType) -> Result<WrOpcode> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider(nic.to_string())
            .context("operation", format_args!("{op:?}"))
            .context("datatype", format_args!("{datatype:?}"))
            .remedy(why))
    };
    if datatype.size() != ELEMENT {
        return refuse("verbs has atomics on 64-bit elements only");
    }
    match op {
        AtomicOp::Sum => Ok(WrOpcode::IBV_WR_ATOMIC_FETCH_AND_ADD),
        AtomicOp::Cswap => Ok(WrOpcode::IBV_WR_ATOMIC_CMP_AND_SWP),
        _ => refuse("verbs has fetch-and-add (Sum) and compare-and-swap (Cswap) only"),
    }
}
