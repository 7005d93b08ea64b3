//! The one function that copies bytes by the CPU while a NIC, a device or another thread may change
//! them.
//!
//! # The argument
//!
//! Two kinds of accesses may race with a copy. Accesses of NICs and devices are not accesses of the
//! Rust program. Accesses of other threads are: they are copies of the same bytes, or atomics of
//! the application.
//!
//! In Rust, a race of plain accesses is undefined behaviour. Therefore this function cannot use
//! `ptr::copy`, `ptr::copy_nonoverlapping` or volatile accesses. It cannot call the C library's
//! `memmove` directly either. LLVM knows `memmove` by its name, and turns the call into the same
//! plain copy as `ptr::copy` (`llvm.memmove`), or for 8 bytes into a plain load and store.
//!
//! [`racing_copy`] uses two means instead:
//!
//! - A copy of 1, 2, 4 or 8 aligned bytes is a relaxed atomic load and a relaxed atomic store of
//!   that length. Such bytes move as a whole, as a flag or a counter does when a NIC writes it.
//! - Any other copy calls `memmove` through a pointer that has passed through an empty `asm!`
//!   block. The compiler cannot know which function the pointer names. So it must assume that the
//!   function may be a loop of relaxed `AtomicU8` loads and stores, in any order, which may copy a
//!   byte again. The machine code of `memmove` has the same effect as such a loop: processors
//!   perform a wide access as accesses to its bytes, and never tear a byte. This satisfies Rust's
//!   rule for foreign code and `asm!` blocks: for each execution there must be Rust operations with
//!   the same effect.
//!
//! So a race has only one consequence: the copy is a mixture of old and new bytes.
//!
//! # Atomics of different sizes
//!
//! Rust does not define races between atomics of different sizes over the same bytes. Two such
//! races can occur here, both with an 8-byte atomic of the application or of the software NIC: that
//! of a long copy, and that of an aligned copy of 4 bytes. For these races, this library relies on
//! more than Rust promises: LLVM defines an atomic load byte by byte, and so do the memory models
//! of x86-64 and aarch64. The 8-byte atomic stays whole for all accesses of its own size. The copy
//! has for each byte the old or the new value.
//!
//! # Order
//!
//! The copy orders nothing. A caller that polls memory and then reads other memory adds a fence.
//!
//! # Speed
//!
//! Long copies run at the speed of the C library's `memmove`.

#![allow(unsafe_code, reason = "copies memory that a NIC or another thread may change")]

use std::{
    arch::asm,
    ffi::c_void,
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
};

type Memmove = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;

/// Copies `len` bytes that a NIC, a device or another thread may read or write at the same time.
/// The two ranges may overlap.
///
/// Racing accesses leave a mixture of old and new bytes. A copy of 1, 2, 4 or 8 bytes moves as a
/// whole if both addresses are multiples of its length. The copy orders no other access.
///
/// ```
/// use hmem_core::racing_copy;
///
/// let (from, mut to) = ([1_u8, 2, 3], [0_u8; 3]);
/// // SAFETY: both arrays are 3 bytes long, and `to` is borrowed by nothing else.
/// unsafe { racing_copy(from.as_ptr(), to.as_mut_ptr(), 3) };
/// assert_eq!(to, from);
/// ```
///
/// # Safety
/// - `from` must be readable, and `to` writable, for `len` bytes. If `len` is 1, 2, 4 or 8, `from`
///   must come from a pointer that allows writes, because it is loaded as an atomic.
/// - During the copy, no mutable reference to the source bytes and no reference to the destination
///   bytes may be live elsewhere. References to atomics are allowed.
/// - All racing accesses by the program must be atomic, or copies by this function.
#[inline]
pub unsafe fn racing_copy(from: *const u8, to: *mut u8, len: usize) {
    macro_rules! word {
        ($atomic:ty) => {
            if (from.addr() | to.addr()) & (size_of::<$atomic>() - 1) == 0 {
                // SAFETY: the caller promises `len` valid bytes at both pointers. `len` is the size
                // of this type, and the line above checked that both pointers are aligned for it.
                unsafe {
                    let value = (*from.cast::<$atomic>()).load(Ordering::Relaxed);
                    (*to.cast::<$atomic>()).store(value, Ordering::Relaxed);
                }
                return;
            }
        };
    }
    match len {
        0 => return,
        8 => word!(AtomicU64),
        4 => word!(AtomicU32),
        2 => word!(AtomicU16),
        1 => word!(AtomicU8),
        _ => {}
    }
    // SAFETY: the caller promises that both ranges are valid for `len` bytes. `memmove` allows them
    // to overlap.
    unsafe { opaque_memmove()(to.cast(), from.cast(), len) };
}

/// Returns the C library's `memmove` as a function that the compiler does not recognise.
#[inline]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "the block reads and writes no memory")]
fn opaque_memmove() -> Memmove {
    let mut memmove: Memmove = libc::memmove;
    // SAFETY: the block has no instruction, only a comment. It leaves the register as it is.
    unsafe {
        asm!("/* {0} */", inout(reg) memmove, options(pure, nomem, nostack, preserves_flags));
    }
    memmove
}

#[cfg(test)]
mod tests {
    use std::{cell::UnsafeCell, sync::atomic::AtomicBool, thread};

    use super::*;

    /// Compares each copy within one buffer with `slice::copy_within`.
    #[test]
    fn copies_of_every_alignment_and_overlap_move_the_right_bytes() {
        let original: Vec<u8> = (0..160_u8).collect();
        for len in 0..=40 {
            for from in 0..24 {
                for to in 0..24 {
                    let (mut copied, mut expected) = (original.clone(), original.clone());
                    let start = copied.as_mut_ptr();
                    // SAFETY: both ranges lie in `copied`, which has 160 bytes.
                    unsafe { racing_copy(start.add(from), start.add(to), len) };
                    expected.copy_within(from..from + len, to);
                    assert_eq!(copied, expected, "{len} bytes from {from} to {to}");
                }
            }
        }
    }

    #[repr(align(64))]
    struct Shared(UnsafeCell<[u8; 64]>);

    // SAFETY: the test accesses the bytes by `racing_copy` only.
    unsafe impl Sync for Shared {}

    /// One thread fills memory with equal bytes by aligned copies of one length, while another
    /// reads it by copies of that length. A torn word has different bytes.
    #[test]
    fn aligned_words_move_as_a_whole() {
        for len in [2, 4, 8] {
            let (shared, done) = (Shared(UnsafeCell::new([0; 64])), AtomicBool::new(false));
            let shared = &shared;
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        for value in [[0_u64; 8], [u64::MAX; 8]] {
                            // SAFETY: both are 64 bytes long and valid, `len` is at most 8, and
                            // racing accesses are copies by the same function.
                            unsafe {
                                racing_copy(value.as_ptr().cast(), shared.0.get().cast(), len)
                            };
                        }
                    }
                });
                for _ in 0..200_000 {
                    let mut seen = [0_u64; 1];
                    // SAFETY: as for the writer: 8 bytes at most of valid memory on both sides.
                    unsafe { racing_copy(shared.0.get().cast(), seen.as_mut_ptr().cast(), len) };
                    let bytes = &seen[0].to_ne_bytes()[..len];
                    if bytes.iter().any(|byte| *byte != bytes[0]) {
                        done.store(true, Ordering::Relaxed);
                        panic!("a copy of {len} bytes was torn: {bytes:?}");
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
        }
    }
}
