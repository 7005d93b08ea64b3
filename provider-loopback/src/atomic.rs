//! The computation of atomics, and the locks that make them atomic.
//!
//! - On memory that is known to be mapped ([`Span::Direct`]), the NIC uses the CPU's atomic
//!   instructions. Atomics of the NIC and of the application are then atomic with each other.
//! - On other memory the NIC reads, computes and writes. Its atomics are then atomic with each
//!   other, but not with those of the application.
//!
//! In both cases the NIC holds a lock, so that all atomics of the NIC are atomic with each other.
//! The offset of the element in its page selects the lock. All mappings of a page agree on this
//! offset.

#![allow(unsafe_code, reason = "atomics in memory of the application")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hmem_core::{
    Error, ErrorKind, Result,
    transfer::{AtomicOp, AtomicType},
};
use parking_lot::Mutex;

use super::memory::{self, DmaBufAccess, Span};

/// The locks of a NIC's atomics.
#[derive(Debug)]
pub(super) struct AtomicLocks {
    locks: [Mutex<()>; 64],
}

impl Default for AtomicLocks {
    fn default() -> Self {
        Self { locks: std::array::from_fn(|_| Mutex::new(())) }
    }
}

impl AtomicLocks {
    fn of(&self, address: u64) -> &Mutex<()> {
        &self.locks[(address >> 3) as usize % self.locks.len()]
    }
}

/// Returns the new value of the target, or `None` if the operation writes nothing.
///
/// A 32-bit value is in the low half of its argument. Integer sums and products wrap. A conditional
/// swap, such as `CswapLt`, writes `operand` if the comparison in its name holds between `compare`
/// and `target`, in this order.
fn apply(
    op: AtomicOp,
    datatype: AtomicType,
    target: u64,
    operand: u64,
    compare: u64,
) -> Option<u64> {
    match datatype {
        AtomicType::I32 => integer::i32(op, target as i32, operand as i32, compare as i32)
            .map(|v| u64::from(v as u32)),
        AtomicType::U32 => {
            integer::u32(op, target as u32, operand as u32, compare as u32).map(u64::from)
        }
        AtomicType::I64 => {
            integer::i64(op, target as i64, operand as i64, compare as i64).map(|v| v as u64)
        }
        AtomicType::U64 => integer::u64(op, target, operand, compare),
    }
}

mod integer {
    use super::AtomicOp;

    macro_rules! integer {
        ($($type:ident),+) => {$(
            pub(super) fn $type(
                op: AtomicOp,
                target: $type,
                operand: $type,
                compare: $type,
            ) -> Option<$type> {
                let truth = |truth: bool| Some(<$type>::from(truth));
                let swap_if = |condition: bool| condition.then_some(operand);
                match op {
                    AtomicOp::Min => swap_if(operand < target),
                    AtomicOp::Max => swap_if(operand > target),
                    AtomicOp::Sum => Some(target.wrapping_add(operand)),
                    AtomicOp::Prod => Some(target.wrapping_mul(operand)),
                    AtomicOp::Lor => truth(target != 0 || operand != 0),
                    AtomicOp::Land => truth(target != 0 && operand != 0),
                    AtomicOp::Lxor => truth((target != 0) != (operand != 0)),
                    AtomicOp::Bor => Some(target | operand),
                    AtomicOp::Band => Some(target & operand),
                    AtomicOp::Bxor => Some(target ^ operand),
                    AtomicOp::AtomicRead => None,
                    AtomicOp::AtomicWrite => Some(operand),
                    AtomicOp::Cswap => swap_if(compare == target),
                    AtomicOp::CswapNe => swap_if(compare != target),
                    AtomicOp::CswapLe => swap_if(compare <= target),
                    AtomicOp::CswapLt => swap_if(compare < target),
                    AtomicOp::CswapGe => swap_if(compare >= target),
                    AtomicOp::CswapGt => swap_if(compare > target),
                    AtomicOp::Mswap => Some((operand & compare) | (target & !compare)),
                }
            }
        )+};
    }

    integer!(i32, u32, i64, u64);
}

const _: () =
    assert!(cfg!(target_endian = "little"), "elements are kept in the low bytes of a word");

/// Converts the bytes of an element to a number, zero-extended.
pub(super) fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Returns an address that stands for the first byte of a span: with the alignment and the page
/// offset of that byte.
///
/// # Errors
/// Unsupported: the memory has no atomics.
fn address_of(span: &Span<'_>) -> Result<u64> {
    match span {
        Span::Direct { at, .. } | Span::Kernel { at, .. } => Ok(*at),
        Span::Indirect { at, memory, .. } => memory.atomic_address(*at),
    }
}

/// Checks that a span has whole elements of `size` bytes at their natural alignment.
///
/// # Errors
/// - InvalidArgument: the start or the length is not a multiple of `size`.
/// - Unsupported: the memory has no atomics.
pub(super) fn check_alignment(span: &Span<'_>, size: u64) -> Result<()> {
    let address = address_of(span)?;
    if address.is_multiple_of(size) && span.len().is_multiple_of(size) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "atomic")
        .provider("loopback")
        .context("address", format_args!("{address:#x}"))
        .context("element", size)
        .remedy("align the target of an atomic to the size of its elements"))
}

/// An atomic operation on one element.
pub(super) struct Element {
    pub(super) op: AtomicOp,
    pub(super) datatype: AtomicType,
    pub(super) operand: u64,
    pub(super) compare: u64,
}

impl Element {
    fn new_value(&self, target: u64) -> Option<u64> {
        apply(self.op, self.datatype, target, self.operand, self.compare)
    }

    /// Executes the operation on a span that has the size and alignment of the element. Returns the
    /// old value.
    pub(super) fn execute(&self, locks: &AtomicLocks, span: Span<'_>) -> Result<u64> {
        let _lock = locks.of(address_of(&span)?).lock();
        if let Span::Direct { at, mapping, .. } = span {
            let _access = DmaBufAccess::begin(mapping, true)?;
            return Ok(self.execute_mapped(at));
        }
        let size = self.datatype.size() as usize;
        let mut bytes = [0; 8];
        span.load(&mut bytes[..size])?;
        let before = u64::from_le_bytes(bytes);
        if let Some(after) = self.new_value(before) {
            span.store(&after.to_le_bytes()[..size])?;
        }
        Ok(before)
    }

    /// Executes the operation on the mapped element at address `at`. Returns the old value.
    fn execute_mapped(&self, at: u64) -> u64 {
        let pointer = memory::direct_pointer(at);
        if self.datatype.size() == 4 {
            // SAFETY: the span is mapped while it is in use (`Span::Direct`), and `check_alignment`
            // found it aligned. The caller of `register` permits the NIC's concurrent accesses.
            let target = unsafe { AtomicU32::from_ptr(pointer.cast()) };
            let new = |before| self.new_value(u64::from(before)).map(|after| after as u32);
            match target.fetch_update(Ordering::SeqCst, Ordering::SeqCst, new) {
                Ok(before) | Err(before) => u64::from(before),
            }
        } else {
            // SAFETY: the span is mapped while it is in use (`Span::Direct`), and `check_alignment`
            // found it aligned. The caller of `register` permits the NIC's concurrent accesses.
            let target = unsafe { AtomicU64::from_ptr(pointer.cast()) };
            match target
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |before| self.new_value(before))
            {
                Ok(before) | Err(before) => before,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A second implementation of `apply` with wide integers. The test compares the results of
    /// both.
    fn naive(op: AtomicOp, datatype: AtomicType, target: u64, operand: u64, compare: u64) -> u64 {
        let bits = 8 * datatype.size() as u32;
        let signed = matches!(datatype, AtomicType::I32 | AtomicType::I64);
        let mask = u128::MAX >> (128 - bits);
        let value = |raw: u64| -> i128 {
            let raw = i128::from(raw) & mask as i128;
            if signed && raw >> (bits - 1) & 1 == 1 { raw - (1 << bits) } else { raw }
        };
        let (t, o, c) = (value(target), value(operand), value(compare));
        let swap = |yes: bool| if yes { o } else { t };
        let after = match op {
            AtomicOp::Min => t.min(o),
            AtomicOp::Max => t.max(o),
            AtomicOp::Sum => t + o,
            AtomicOp::Prod => t.wrapping_mul(o),
            AtomicOp::Lor => i128::from(t != 0 || o != 0),
            AtomicOp::Land => i128::from(t != 0 && o != 0),
            AtomicOp::Lxor => i128::from((t != 0) ^ (o != 0)),
            AtomicOp::Bor => t | o,
            AtomicOp::Band => t & o,
            AtomicOp::Bxor => t ^ o,
            AtomicOp::AtomicRead => t,
            AtomicOp::AtomicWrite => o,
            AtomicOp::Cswap => swap(c == t),
            AtomicOp::CswapNe => swap(c != t),
            AtomicOp::CswapLe => swap(c <= t),
            AtomicOp::CswapLt => swap(c < t),
            AtomicOp::CswapGe => swap(c >= t),
            AtomicOp::CswapGt => swap(c > t),
            AtomicOp::Mswap => (o & c) | (t & !c),
        };
        (after as u128 & mask) as u64
    }

    fn operand() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(1 << 31), Just(1 << 63), any::<u64>()]
    }

    proptest! {
        #[test]
        fn every_operation_agrees_with_the_naive_model(
            op in prop::sample::select(AtomicOp::ALL.to_vec()),
            datatype in prop::sample::select(AtomicType::ALL.to_vec()),
            target in operand(), operand in operand(), compare in operand(),
        ) {
            let mask = if datatype.size() == 4 { u64::from(u32::MAX) } else { u64::MAX };
            let after = apply(op, datatype, target, operand, compare).unwrap_or(target & mask);
            prop_assert_eq!(after, naive(op, datatype, target, operand, compare));
        }
    }
}
