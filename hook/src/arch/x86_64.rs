//! Patches for x86-64. The jump is a 5-byte `jmp rel32`, which replaces one instruction of at least
//! that length.
//!
//! glibc's wrappers begin with `mov $nr,%eax` (5 bytes); `mmap` has a 7-byte `test` before the
//! `mov`. Every entry of NVIDIA's `libcuda` begins with a 10-byte comparison of a word of the
//! library's data with a constant. The jump must lie within 8 aligned bytes, or within 16 aligned
//! bytes if the processor has `cmpxchg16b`. One locked instruction writes these bytes.
//!
//! # Patching while threads run the code
//!
//! Other processors may fetch the entry during the store. The manuals promise less than the patch
//! needs:
//!
//! - Intel (SDM volume 3A, "Handling Self- and Cross-Modifying Code"): a processor runs the new
//!   code once it has executed a serialising instruction after the store. For a processor that
//!   fetches the bytes before that, the behaviour depends on the model. Intel promises no atomic
//!   fetch of instructions, whatever the alignment of the store.
//! - AMD (APM volume 2, "Cross-Modifying Code") also describes modification without
//!   synchronisation, for one store within an aligned quadword: other processors run the old or the
//!   new bytes. A patch of 16 bytes is beyond that.
//!
//! Around the store, the crate does what Intel requires. The kernel makes every processor that runs
//! this process execute a serialising instruction (`membarrier`, SYNC_CORE): after the trampolines
//! are written and before any jump leads to them, after the jumps are written, and after the
//! original bytes are restored. So no processor runs a trampoline that it fetched too early, and
//! when `Hooks::start` returns, every thread runs the jumps.
//!
//! During the store, other processors may fetch the bytes, and the manuals do not promise a result
//! for every processor. The patch relies on the facts below. Other software that patches running
//! code by one aligned store relies on them too: HotSpot patches the entries of Java methods so.
//!
//! - The bytes lie in one cache line, and caches for code are coherent. So a processor gets the
//!   line from before or after the store.
//! - Processors fetch aligned blocks of at least 16 bytes from a line. So a fetch does not mix old
//!   and new bytes of the patch. No processor is known for which this fails.
//! - The jump replaces one whole instruction, and the rest of a longer instruction is never run. So
//!   both versions are valid wherever a thread is stopped.
//! - A thread that still runs the old bytes notifies no subscriber. This does no harm, because
//!   nothing is cached before `Hooks::start` has returned.

#![allow(unsafe_code, reason = "reads and writes machine code")]

use std::{
    arch::asm,
    sync::atomic::{AtomicU64, Ordering},
};

use super::entry::{ENTRY_LEN, PatchObstacle, PatchPoint, Relative};

/// The maximum distance in bytes between a function and its trampoline: the reach of a `jmp rel32`,
/// minus a margin.
pub(super) const REACH: u64 = (1 << 31) - (1 << 20);

const JUMP_LEN: usize = 5;

/// Length of `cmpl $imm32,disp32(%rip)`: a 2-byte opcode, the displacement and the constant.
const COMPARE_LEN: usize = 10;

/// An instruction that the decoder recognises. A trampoline may contain a copy of the instruction.
struct KnownInstruction {
    len: usize,
    /// Code that reverses the effect of this instruction. The trampoline runs the code before the
    /// hook if the instruction precedes the patch point. `None` if no caller can see the effect.
    undo: Option<Vec<u8>>,
}

fn known(code: &[u8]) -> Option<KnownInstruction> {
    let plain = |len| Some(KnownInstruction { len, undo: None });
    match *code {
        // endbr64
        [0xf3, 0x0f, 0x1e, 0xfa, ..] => plain(4),
        // mov $imm32,%eax
        [0xb8, _, _, _, _, ..] => plain(5),
        // mov %ecx,%r10d; mov %rcx,%r10
        [0x41 | 0x49, 0x89, 0xca, ..] => plain(3),
        // test $imm32,%r9d
        [0x41, 0xf7, 0xc1, _, _, _, _, ..] => plain(7),
        // cmpl $imm32,disp32(%rip)
        [0x81, 0x3d, ..] => plain(COMPARE_LEN),
        // mov %r8,disp8(%rsp): stores to the function's own frame
        [0x4c, 0x89, 0x44, 0x24, disp, ..] if disp < 0x80 => plain(5),
        // sub $imm8,%rsp: lea imm8(%rsp),%rsp undoes it
        [0x48, 0x83, 0xec, bytes, ..] if bytes < 0x80 => {
            Some(KnownInstruction { len: 4, undo: Some(vec![0x48, 0x8d, 0x64, 0x24, bytes]) })
        }
        _ => None,
    }
}

fn is_jump(code: &[u8]) -> bool {
    // jmp rel32, call rel32, jmp rel8, jmp *m, movabs into r11 or rax (the start of an absolute
    // jump), push imm32
    matches!(
        *code,
        [0xe9 | 0xe8 | 0xeb | 0x68, ..] | [0xff, 0x25, ..] | [0x49, 0xbb, ..] | [0x48, 0xb8, ..]
    )
}

/// Finds the instruction that a patch can replace in `code`, the first bytes of the function at
/// `address`.
///
/// If `nr` is set, the function must make the system call with this number. The decoder fails if
/// the found instruction, or one before it, loads another number.
pub(super) fn decode(
    address: u64,
    code: &[u8; ENTRY_LEN],
    nr: Option<i64>,
) -> Result<PatchPoint, PatchObstacle> {
    let mut at = 0;
    let (mut undo, mut relative) = (Vec::new(), Vec::new());
    while at + 16 <= ENTRY_LEN {
        if is_jump(&code[at..]) {
            return Err(PatchObstacle::Jump);
        }
        let instruction = known(&code[at..]).ok_or(PatchObstacle::Unknown(at))?;
        if let [0xb8, a, b, c, d, ..] = code[at..] {
            let called = i64::from(i32::from_le_bytes([a, b, c, d]));
            if nr.is_some_and(|nr| called != nr) {
                return Err(PatchObstacle::OtherCall(called));
            }
        }
        if let [0x81, 0x3d, a, b, c, d, ..] = code[at..] {
            let end = at + COMPARE_LEN;
            let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
            let target = (address + end as u64).wrapping_add_signed(distance);
            relative.push(Relative { at: at + 2, from: end, target });
        }
        if instruction.len >= JUMP_LEN && aligned_store(address + at as u64).is_some() {
            let resume = at + instruction.len;
            return Ok(PatchPoint { at, undo, skipped: code[..resume].to_vec(), relative, resume });
        }
        // The instruction after this `mov` makes the system call. A patch behind that instruction
        // would run too late.
        if code[at] == 0xb8 {
            return Err(PatchObstacle::NoRoom);
        }
        // The last instruction is undone first.
        undo.splice(..0, instruction.undo.into_iter().flatten());
        at += instruction.len;
    }
    Err(PatchObstacle::NoRoom)
}

/// Returns the address and length of an aligned store that can write a jump at `address`, or `None`
/// if no store can.
fn aligned_store(address: u64) -> Option<(u64, usize)> {
    let within =
        |bytes: u64| (address % bytes + JUMP_LEN as u64 <= bytes).then_some(address & !(bytes - 1));
    let wide = || std::arch::is_x86_feature_detected!("cmpxchg16b").then(|| within(16)).flatten();
    within(8).map(|start| (start, 8)).or_else(|| wide().map(|start| (start, 16)))
}

/// A patch of 8 or 16 aligned bytes of code: their address, their original values, and their values
/// with the jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patch {
    start: u64,
    bytes: usize,
    before: u128,
    after: u128,
}

impl Patch {
    /// Prepares a jump to `target` in place of the instruction at `address`. Returns `None` if no
    /// aligned store can write the jump, or if `target` is out of reach.
    ///
    /// # Safety
    /// The 16 aligned bytes around `address` must be readable.
    pub(super) unsafe fn jump(address: u64, target: u64) -> Option<Self> {
        let (start, bytes) = aligned_store(address)?;
        let mut patch = Self { start, bytes, before: 0, after: 0 };
        // SAFETY: the bytes of the patch are among those that the caller promises to be readable.
        patch.before = unsafe { patch.read() };
        let mut code = patch.before.to_le_bytes();
        let at = (address - start) as usize;
        code[at..at + JUMP_LEN].copy_from_slice(&jump(address, target)?);
        patch.after = u128::from_le_bytes(code);
        Some(patch)
    }

    /// Returns the address of the first byte that the patch writes. All bytes that the patch writes
    /// lie in one page.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Reads the bytes of the code that the patch replaces.
    ///
    /// # Safety
    /// These bytes must be readable.
    unsafe fn read(&self) -> u128 {
        let at = std::ptr::with_exposed_provenance_mut::<u64>(self.start as usize);
        let word = |index: usize| {
            // SAFETY: the caller promises that the bytes are readable, and `aligned_store` aligned
            // their address. Other code patchers change these bytes only in whole aligned words.
            let word = unsafe { AtomicU64::from_ptr(at.add(index)) };
            u128::from(word.load(Ordering::Acquire))
        };
        if self.bytes == 8 { word(0) } else { word(0) | word(1) << 64 }
    }

    /// Returns true if the patch is applied: the code contains the jump.
    pub(super) fn is_in_place(&self) -> bool {
        // SAFETY: the bytes are code of a library that stays loaded, as the caller of
        // `Patches::plan` promised.
        unsafe { self.read() == self.after }
    }

    /// Returns true if the patch is not applied: the code contains the original bytes.
    pub(super) fn is_undone(&self) -> bool {
        // SAFETY: the bytes are code of a library that stays loaded, as the caller of
        // `Patches::plan` promised.
        unsafe { self.read() == self.before }
    }

    /// Writes the jump if the code contains the original bytes. Returns false otherwise.
    ///
    /// # Safety
    /// - The bytes that the patch replaces must be writable.
    /// - It must be safe to run the code at the jump's target in place of the instruction that the
    ///   jump replaces.
    pub(super) unsafe fn apply(&self) -> bool {
        // SAFETY: the caller promises that the bytes are writable and that the jump is safe to run.
        unsafe { self.exchange(self.before, self.after) }
    }

    /// Restores the original bytes if the code contains the jump. Returns false otherwise.
    ///
    /// # Safety
    /// The bytes that the patch replaces must be writable.
    pub(super) unsafe fn undo(&self) -> bool {
        // SAFETY: the caller promises that the bytes are writable, and the original code is safe to
        // run.
        unsafe { self.exchange(self.after, self.before) }
    }

    /// Replaces the bytes `from` of the code by `to` in one store. Returns false if the code has
    /// other bytes.
    ///
    /// # Safety
    /// The bytes that the patch replaces must be writable. Threads must be able to run both the old
    /// and the new bytes safely at any time.
    unsafe fn exchange(&self, from: u128, to: u128) -> bool {
        let at = std::ptr::with_exposed_provenance_mut::<u128>(self.start as usize);
        if self.bytes == 8 {
            // SAFETY: `aligned_store` aligned the address to 8 bytes, and the caller promises that
            // the bytes are writable.
            let word = unsafe { AtomicU64::from_ptr(at.cast()) };
            word.compare_exchange(from as u64, to as u64, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        } else {
            // SAFETY: `aligned_store` aligned the address to 16 bytes and checked that the
            // processor has `cmpxchg16b`. The caller promises that the bytes are writable.
            unsafe { exchange_wide(at, from, to) }
        }
    }
}

/// Replaces the 16 bytes at `at` by `to` with one `cmpxchg16b`. Returns false if the bytes do not
/// equal `from`. The intrinsic of `core::arch` is not used, because a program needs libatomic if
/// the compiler does not inline the intrinsic.
///
/// # Safety
/// `at` must be aligned to 16 bytes and writable, and the processor must have `cmpxchg16b`.
unsafe fn exchange_wide(at: *mut u128, from: u128, to: u128) -> bool {
    let equal: u8;
    // SAFETY: the caller promises alignment, write access and the processor's feature. The code
    // restores rbx, which the compiler reserves.
    unsafe {
        asm!(
            "xchg {low}, rbx",
            "lock cmpxchg16b [{at}]",
            "sete {equal}",
            "mov rbx, {low}",
            at = in(reg) at,
            low = inout(reg) to as u64 => _,
            equal = out(reg_byte) equal,
            in("rcx") (to >> 64) as u64,
            inout("rax") from as u64 => _,
            inout("rdx") (from >> 64) as u64 => _,
            options(nostack),
        );
    }
    equal != 0
}

/// Encodes `jmp rel32` from `address` to `target`. Returns `None` if `target` is out of reach.
pub(super) fn jump(address: u64, target: u64) -> Option<[u8; JUMP_LEN]> {
    let distance = i128::from(target) - i128::from(address + JUMP_LEN as u64);
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, a, b, c, d])
}

/// Encodes the displacement that the copy of an instruction needs to read the same memory as the
/// original. `address` is the address of the copied code. Returns `None` if that memory is out of
/// reach.
pub(super) fn displacement(address: u64, relative: &Relative) -> Option<[u8; 4]> {
    let distance = i128::from(relative.target) - i128::from(address + relative.from as u64);
    i32::try_from(distance).ok().map(i32::to_le_bytes)
}

/// Encodes `jmp *0(%rip)`, followed by the address `target`.
pub(super) fn absolute_jump(target: u64) -> Vec<u8> {
    let mut code = vec![0xff, 0x25, 0, 0, 0, 0];
    code.extend(target.to_le_bytes());
    code
}

/// Returns the target of a jump at the beginning of `code`, which lies at `address`. An `endbr64`
/// may precede the jump. Returns `None` if `code` begins with other instructions. Callers use the
/// target to name the library that patched a function.
pub(super) fn jump_target(address: u64, code: &[u8; ENTRY_LEN]) -> Option<u64> {
    let skip = if code.starts_with(&[0xf3, 0x0f, 0x1e, 0xfa]) { 4 } else { 0 };
    let word = |at: usize| code[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    match code[skip..] {
        [0xe9, a, b, c, d, ..] => {
            let from = address + (skip + JUMP_LEN) as u64;
            Some(from.wrapping_add_signed(i64::from(i32::from_le_bytes([a, b, c, d]))))
        }
        [0xff, 0x25, 0, 0, 0, 0, ..] => word(skip + 6),
        [0x49, 0xbb, ..] | [0x48, 0xb8, ..] => word(skip + 2),
        _ => None,
    }
}

/// Does nothing: on x86-64, caches for code are coherent with those for data.
///
/// # Safety
/// The bytes must be mapped.
pub(super) unsafe fn flush(_: u64, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: &str) -> [u8; ENTRY_LEN] {
        let mut code = [0xcc; ENTRY_LEN];
        for (into, byte) in code.iter_mut().zip(bytes.split_whitespace()) {
            *into = u8::from_str_radix(byte, 16).unwrap();
        }
        code
    }

    #[test]
    fn wrappers_with_and_without_endbr64_are_patched_at_the_mov() {
        let point =
            decode(0x1000, &entry("b8 0b 00 00 00 0f 05 48 3d 01 f0 ff ff"), Some(11)).unwrap();
        assert_eq!(
            point,
            PatchPoint {
                at: 0,
                undo: vec![],
                skipped: vec![0xb8, 11, 0, 0, 0],
                relative: vec![],
                resume: 5
            }
        );
        let point = decode(0x1000, &entry("f3 0f 1e fa b8 0b 00 00 00 0f 05"), Some(11)).unwrap();
        assert_eq!((point.at, point.resume), (4, 9));
        assert_eq!(aligned_store(0x1004), Some((0x1000, 16)));
    }

    #[test]
    fn mmap_is_patched_at_its_test_and_mremap_at_the_next_mov() {
        let mmap = entry("41 89 ca 41 f7 c1 ff 0f 00 00 75 14 b8 09 00 00 00 0f 05");
        let point = decode(0x1000, &mmap, Some(9)).unwrap();
        assert_eq!((point.at, point.resume, point.undo.len()), (3, 10, 0));
        assert_eq!(aligned_store(0x1003), Some((0x1000, 8)));
        let mremap = entry("48 83 ec 58 4c 89 44 24 40 64 48 8b 04 25 28 00 00 00");
        let point = decode(0x1000, &mremap, Some(25)).unwrap();
        assert_eq!((point.at, point.resume), (4, 9));
        assert_eq!(point.undo, [0x48, 0x8d, 0x64, 0x24, 0x58]);
        assert_eq!(point.skipped, mremap[..9]);
    }

    /// The moved copy of a comparison reads the same word as the original. The code is that of
    /// functions in `libcuda.so` 535.261 and 550.163.
    #[test]
    fn moved_comparison_reads_the_same_address() {
        let code = entry("81 3d 04 35 93 01 00 ba 1c 32 74 0c ff 25 46 c0 83 01");
        let point = decode(0x2d_56a0, &code, None).unwrap();
        assert_eq!((point.at, point.resume, point.undo.len()), (0, 10, 0));
        assert_eq!(point.relative, [Relative { at: 2, from: 10, target: 0x2d_56aa + 0x193_3504 }]);
        assert_eq!(displacement(0x2d_56a0, &point.relative[0]), Some([0x04, 0x35, 0x93, 0x01]));
        assert_eq!(displacement(0x1c0_8ba4, &point.relative[0]), Some([0, 0, 0, 0]));
        assert_eq!(displacement(1 << 40, &point.relative[0]), None);
        assert_eq!(decode(0x2d_56a0, &code, Some(9)).unwrap(), point);
    }

    #[test]
    fn entries_without_a_patch_point_are_refused_with_the_reason() {
        let unlike = decode(0x1000, &entry("b8 0b 00 00 00 0f 05"), Some(12));
        assert_eq!(unlike, Err(PatchObstacle::OtherCall(11)));
        assert_eq!(
            decode(0x100c, &entry("b8 0b 00 00 00 0f 05"), Some(11)),
            Err(PatchObstacle::NoRoom)
        );
        assert_eq!(decode(0x1000, &entry("55 48 89 e5"), Some(11)), Err(PatchObstacle::Unknown(0)));
        assert_eq!(
            decode(0x1000, &entry("48 83 ec 08 55"), Some(11)),
            Err(PatchObstacle::Unknown(4))
        );
        for jump in [
            "e9 00 00 00 00",
            "49 bb 0 0 0 0 0 0 0 0 41 ff e3",
            "ff 25 0 0 0 0",
            "f3 0f 1e fa e9 0 0 0 0",
        ] {
            assert_eq!(decode(0x1000, &entry(jump), Some(11)), Err(PatchObstacle::Jump));
        }
    }

    #[test]
    fn decoded_jumps_lead_to_their_targets() {
        let mut code = entry("");
        code[..5].copy_from_slice(&jump(0x10_0000, 0x20_0000).unwrap());
        assert_eq!(jump_target(0x10_0000, &code), Some(0x20_0000));
        code[..5].copy_from_slice(&jump(0x20_0000, 0x10_0000).unwrap());
        assert_eq!(jump_target(0x20_0000, &code), Some(0x10_0000));
        code[..14].copy_from_slice(&absolute_jump(0x7f00_1234_5678));
        assert_eq!(jump_target(0x20_0000, &code), Some(0x7f00_1234_5678));
        assert_eq!(jump(0, 1 << 40), None);
    }
}
