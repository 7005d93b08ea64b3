//! Patches for aarch64. The jump is a `b` instruction, which reaches 128 MiB and replaces one
//! 4-byte instruction. Tested in emulated machines, not yet on hardware.
//!
//! glibc's wrappers are a few register moves and then `svc #0`. The patch replaces the `svc`: the
//! architecture allows replacing `SVC` by `B` while other processors run the instruction (Arm ARM
//! B2.2.5), and does not allow replacing a `mov`. `mremap` is compiled C with a stack frame. There
//! the patch replaces the instruction that makes the frame: `stp x29, x30, [sp, #-n]!`, or
//! `sub sp, sp, #n`. The architecture does not define the result for a processor that runs this
//! instruction at the moment of the patch. Implementations run either the old or the new
//! instruction.
//!
//! A library with branch protection begins its functions with `bti c` or `paciasp`. Indirect calls
//! may only arrive at such an instruction, so the patch never replaces it. `paciasp` signs the
//! return address, and the hook must find the address unsigned: the trampoline removes the
//! signature with `autiasp` before it jumps to the hook. The copy in the trampoline signs again.

#![allow(unsafe_code, reason = "reads and writes machine code")]

use std::{
    arch::asm,
    sync::atomic::{AtomicU32, Ordering},
};

use super::entry::{ENTRY_LEN, PatchObstacle, PatchPoint, Relative};

/// The maximum distance in bytes between a function and its trampoline: the reach of a `b`, minus a
/// margin.
pub(super) const REACH: u64 = (1 << 27) - (1 << 20);

const SVC_0: u32 = 0xd400_0001;
const PACIASP: u32 = 0xd503_233f;
const AUTIASP: u32 = 0xd503_23bf;

fn word(code: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([code[at], code[at + 1], code[at + 2], code[at + 3]])
}

enum KnownInstruction {
    /// An instruction that may run twice: before the hook, and again in the trampoline's copy. The
    /// instruction does not change the value of an argument.
    Copied,
    /// A branch that the function takes only to refuse its arguments. The branch precedes the patch
    /// point. A call that takes the branch fails without the system call, and never reaches the
    /// hook. So the trampoline's copy of the instructions omits the branch.
    Branch,
    MovX8(i64),
}

fn known(instruction: u32) -> Option<KnownInstruction> {
    match instruction {
        // nop; bti c; paciasp, which `decode` undoes before the hook
        0xd503_201f | 0xd503_245f | PACIASP => Some(KnownInstruction::Copied),
        // mov x8, #imm16
        _ if instruction & 0xffe0_001f == 0xd280_0008 => {
            Some(KnownInstruction::MovX8(i64::from(instruction >> 5 & 0xffff)))
        }
        // sxtw xN, wN
        _ if instruction & 0xffff_fc00 == 0x9340_7c00
            && instruction & 0x1f == instruction >> 5 & 0x1f =>
        {
            Some(KnownInstruction::Copied)
        }
        // mov x1, x0: in `brk`, which has one argument, so that x1 holds none
        0xaa00_03e1 => Some(KnownInstruction::Copied),
        // tst x5, #imm
        _ if instruction & 0xff80_03ff == 0xf200_00bf => Some(KnownInstruction::Copied),
        // b.ne to a later instruction
        _ if instruction & 0xff80_001f == 0x5400_0001 => Some(KnownInstruction::Branch),
        _ => None,
    }
}

/// Returns true for an instruction by which other libraries patch functions: `b`, `bl`, or an `ldr`
/// of a literal into x16 or x17. The `ldr` is the first part of an absolute jump.
fn is_jump(instruction: u32) -> bool {
    instruction & 0x7c00_0000 == 0x1400_0000 || instruction & 0xff00_001e == 0x5800_0010
}

/// Returns true for the instructions that make a stack frame: `stp x29, x30, [sp, #-n]!` and
/// `sub sp, sp, #n`.
fn makes_frame(instruction: u32) -> bool {
    instruction & 0xffe0_7fff == 0xa9a0_7bfd || instruction & 0xff80_03ff == 0xd100_03ff
}

/// Finds the instruction that a patch can replace in `code`, the first bytes of a function.
///
/// If `nr` is set, the function must make the system call with this number. The decoder fails if an
/// instruction before the patch point loads another number.
pub(super) fn decode(
    _: u64,
    code: &[u8; ENTRY_LEN],
    nr: Option<i64>,
) -> Result<PatchPoint, PatchObstacle> {
    let (mut undo, mut skipped) = (Vec::new(), Vec::new());
    for at in (0..ENTRY_LEN).step_by(4) {
        let instruction = word(code, at);
        if is_jump(instruction) {
            return Err(PatchObstacle::Jump);
        }
        let copied = &code[at..at + 4];
        if instruction == SVC_0 || makes_frame(instruction) {
            skipped.extend_from_slice(copied);
            let resume = at + 4;
            return Ok(PatchPoint { at, undo, skipped, relative: Vec::new(), resume });
        }
        match known(instruction).ok_or(PatchObstacle::Unknown(at))? {
            KnownInstruction::MovX8(called) if nr.is_some_and(|nr| called != nr) => {
                return Err(PatchObstacle::OtherCall(called));
            }
            KnownInstruction::MovX8(_) | KnownInstruction::Copied => {
                skipped.extend_from_slice(copied)
            }
            KnownInstruction::Branch => {}
        }
        if instruction == PACIASP {
            undo.extend_from_slice(&AUTIASP.to_le_bytes());
        }
    }
    Err(PatchObstacle::NoRoom)
}

/// A patch of one instruction: its address, the original instruction, and the jump that replaces
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patch {
    start: u64,
    before: u32,
    after: u32,
}

impl Patch {
    /// Prepares a jump to `target` in place of the instruction at `address`. Returns `None` if
    /// `target` is out of reach.
    ///
    /// # Safety
    /// The instruction at `address` must be readable.
    pub(super) unsafe fn jump(address: u64, target: u64) -> Option<Self> {
        let mut patch =
            Self { start: address, before: 0, after: u32::from_le_bytes(jump(address, target)?) };
        patch.before = patch.word().load(Ordering::Acquire);
        Some(patch)
    }

    /// Returns the address of the first byte that the patch writes. All bytes that the patch writes
    /// lie in one page.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    fn word(&self) -> &AtomicU32 {
        let at = std::ptr::with_exposed_provenance_mut::<u32>(self.start as usize);
        // SAFETY: the word is code of a library that stays loaded, as the caller of `Patches::plan`
        // promised. Instructions are aligned words.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// Returns true if the patch is applied: the code contains the jump.
    pub(super) fn is_in_place(&self) -> bool {
        self.word().load(Ordering::Acquire) == self.after
    }

    /// Returns true if the patch is not applied: the code contains the original instruction.
    pub(super) fn is_undone(&self) -> bool {
        self.word().load(Ordering::Acquire) == self.before
    }

    /// Writes the jump if the code contains the original instruction. Returns false otherwise.
    ///
    /// # Safety
    /// - The instruction in memory must be writable.
    /// - It must be safe to run the code at the jump's target in place of the instruction that the
    ///   jump replaces.
    pub(super) unsafe fn apply(&self) -> bool {
        self.exchange(self.before, self.after)
    }

    /// Restores the original instruction if the code contains the jump. Returns false otherwise.
    ///
    /// # Safety
    /// The instruction in memory must be writable.
    pub(super) unsafe fn undo(&self) -> bool {
        self.exchange(self.after, self.before)
    }

    fn exchange(&self, from: u32, to: u32) -> bool {
        let done =
            self.word().compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        // SAFETY: the exchange above accessed these 4 bytes, so they are mapped.
        unsafe { flush(self.start, 4) };
        done
    }
}

/// Encodes `b` from `address` to `target`. Returns `None` if `target` is out of reach.
pub(super) fn jump(address: u64, target: u64) -> Option<[u8; 4]> {
    let distance = target.wrapping_sub(address) as i64;
    let words = (-(1 << 27)..1 << 27).contains(&distance).then_some(distance >> 2)?;
    Some((0x1400_0000 | words as u32 & 0x03ff_ffff).to_le_bytes())
}

/// Returns `None`. On aarch64 the decoder copies no instruction with a displacement, so there is
/// none to encode.
pub(super) fn displacement(_: u64, _: &Relative) -> Option<[u8; 4]> {
    None
}

/// Encodes `ldr x16, #8; br x16`, followed by the address `target`.
pub(super) fn absolute_jump(target: u64) -> Vec<u8> {
    let mut code = Vec::new();
    code.extend(0x5800_0050_u32.to_le_bytes());
    code.extend(0xd61f_0200_u32.to_le_bytes());
    code.extend(target.to_le_bytes());
    code
}

/// Returns the target of the first jump in `code`, which lies at `address`. Returns `None` if there
/// is no jump, or if the jump's address literal lies behind `code`. Callers use the target to name
/// the library that patched a function.
pub(super) fn jump_target(address: u64, code: &[u8; ENTRY_LEN]) -> Option<u64> {
    let at = (0..ENTRY_LEN).step_by(4).find(|at| is_jump(word(code, *at)))?;
    let instruction = word(code, at);
    let from = address + at as u64;
    if instruction & 0x7c00_0000 == 0x1400_0000 {
        let words = ((instruction << 6) as i32 >> 6) as i64;
        return Some(from.wrapping_add_signed(words << 2));
    }
    let literal = at + ((instruction >> 5 & 0x7ffff) << 2) as usize;
    code.get(literal..literal + 8)?.try_into().map(u64::from_le_bytes).ok()
}

/// Removes the old code from the instruction caches of all processors, and lets the processor of
/// the calling thread fetch the new code.
///
/// # Safety
/// The bytes must be mapped.
pub(super) unsafe fn flush(start: u64, len: usize) {
    let cache_type: u64;
    // SAFETY: user space may read this register.
    unsafe { asm!("mrs {}, ctr_el0", out(reg) cache_type, options(nomem, nostack)) };
    let line = |shift: u64| 4_u64 << (cache_type >> shift & 0xf);
    let lines = |size: u64| (start & !(size - 1)..start + len as u64).step_by(size as usize);
    for at in lines(line(16)) {
        // SAFETY: the instruction cleans the cache line of mapped memory.
        unsafe { asm!("dc cvau, {}", in(reg) at, options(nostack)) };
    }
    // SAFETY: `dsb` is a barrier, which accesses no memory.
    unsafe { asm!("dsb ish", options(nostack)) };
    for at in lines(line(0)) {
        // SAFETY: the instruction invalidates a line of the instruction cache, which changes no
        // data.
        unsafe { asm!("ic ivau, {}", in(reg) at, options(nostack)) };
    }
    // SAFETY: barriers access no memory.
    unsafe { asm!("dsb ish", "isb", options(nostack)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(words: &[u32]) -> [u8; ENTRY_LEN] {
        let mut code = [0; ENTRY_LEN];
        for (into, word) in code.chunks_exact_mut(4).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        code
    }

    #[test]
    fn wrappers_are_patched_at_the_svc_and_frames_at_the_start() {
        // The entry of `munmap`: nop; mov x8, #215; svc #0.
        let point = decode(0, &entry(&[0xd503_201f, 0xd280_1ae8, SVC_0]), Some(215)).unwrap();
        assert_eq!((point.at, point.resume, point.skipped.len()), (8, 12, 12));
        // The entry of `mmap`. The decoder leaves the branch out of the copy.
        let mmap =
            [0xf240_2cbf, 0x5400_0121, 0x9340_7c42, 0x9340_7c63, 0x9340_7c84, 0xd280_1bc8, SVC_0];
        let point = decode(0, &entry(&mmap), Some(222)).unwrap();
        assert_eq!((point.at, point.resume, point.skipped.len()), (24, 28, 24));
        // The entry of `brk`.
        let point = decode(0, &entry(&[0xaa00_03e1, 0xd280_1ac8, SVC_0]), Some(214)).unwrap();
        assert_eq!((point.at, point.resume), (8, 12));
        // The entry of `mremap` in cross libraries, and in Debian 12.
        for frame in [0xa9bb_7bfd, 0xd101_43ff] {
            let point = decode(0, &entry(&[frame, 0xf000_05a5]), Some(216)).unwrap();
            assert_eq!((point.at, point.resume, point.skipped.len()), (0, 4, 4));
        }
    }

    /// ARM-03: the patch replaces an instruction after `bti c` or `paciasp`, and the trampoline
    /// undoes `paciasp` before the hook.
    #[test]
    fn instruction_at_which_indirect_calls_arrive_stays() {
        let bti = decode(0, &entry(&[0xd503_245f, 0xd280_1ae8, SVC_0]), Some(215)).unwrap();
        assert_eq!((bti.at, bti.undo.len(), bti.skipped.len()), (8, 0, 12));
        // The entry of `mremap` in Debian 13: paciasp; sub sp, sp, #0x50.
        let signed = decode(0, &entry(&[PACIASP, 0xd101_43ff, 0xf000_0585]), Some(216)).unwrap();
        assert_eq!((signed.at, signed.resume, signed.skipped.len()), (4, 8, 8));
        assert_eq!(signed.undo, AUTIASP.to_le_bytes());
    }

    #[test]
    fn entries_without_a_patch_point_are_refused_with_the_reason() {
        assert_eq!(
            decode(0, &entry(&[0xd280_1ae8, SVC_0]), Some(216)),
            Err(PatchObstacle::OtherCall(215))
        );
        // str x19, [sp, #-32]!
        assert_eq!(
            decode(0, &entry(&[0xf81e_0ff3, 0xa9bb_7bfd]), Some(216)),
            Err(PatchObstacle::Unknown(0))
        );
        assert_eq!(decode(0, &entry(&[0x1400_0010]), Some(215)), Err(PatchObstacle::Jump));
        assert_eq!(
            decode(0, &entry(&[0x5800_0050, 0xd61f_0200]), Some(215)),
            Err(PatchObstacle::Jump)
        );
    }

    #[test]
    fn decoded_jumps_lead_to_their_targets() {
        for (from, to) in [(0x10_0000, 0x20_0000), (0x20_0000, 0x10_0000)] {
            let code = entry(&[u32::from_le_bytes(jump(from, to).unwrap())]);
            assert_eq!(jump_target(from, &code), Some(to));
        }
        assert_eq!(jump(0, 1 << 27), None);
        let mut code = entry(&[]);
        code[..16].copy_from_slice(&absolute_jump(0x7f00_1234_5678));
        assert_eq!(jump_target(0, &code), Some(0x7f00_1234_5678));
    }
}
