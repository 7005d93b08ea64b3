//! The patch point of a function: an instruction near the function's entry that a patch replaces.
//!
//! Both architectures follow these rules, so that threads may run the function at any time:
//! - One aligned store replaces exactly one whole instruction, so that no thread's program counter
//!   is ever in the middle of the new code.
//! - The decoder knows each instruction before the patch point. These instructions do not change
//!   the arguments. Each of them can be undone, or has no effect that a caller can see.
//! - To call the original function, a hook runs a copy of the skipped instructions, and then the
//!   rest of the function at its original address. The library's own code produces the return value
//!   and `errno`.
//!
//! The decoder refuses an entry with an unknown instruction. The error contains the bytes of the
//! entry.

/// The number of bytes that the decoder reads at the entry of a function.
pub(super) const ENTRY_LEN: usize = 48;

/// The instruction that a patch replaces, and the code that the trampoline needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PatchPoint {
    /// The offset of the instruction that the patch replaces, in bytes from the function's entry.
    pub(super) at: usize,
    /// Code that undoes the instructions before the patch point. The trampoline runs this code
    /// before the hook.
    pub(super) undo: Vec<u8>,
    /// A copy of the function's instructions before the offset `resume`. The hook runs the copy to
    /// call the original function. Branches that the function takes only to refuse its arguments
    /// are left out.
    pub(super) skipped: Vec<u8>,
    /// The displacements in `skipped` that must change, because the trampoline's copy of these
    /// instructions lies at another address than the original.
    pub(super) relative: Vec<Relative>,
    /// The offset of the first instruction that is not copied, in bytes from the function's entry.
    /// The copy ends with a jump to this instruction.
    pub(super) resume: usize,
}

/// The displacement in an instruction that reads memory relative to its own address.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Relative {
    /// The offset of the displacement's 4 bytes in `skipped`.
    pub(super) at: usize,
    /// The offset in `skipped` of the end of the instruction. The displacement counts from there.
    pub(super) from: usize,
    /// The address that the instruction reads.
    pub(super) target: u64,
}

/// The reason why the entry of a function cannot be patched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PatchObstacle {
    /// The decoder found a jump or call. Another library has probably patched the function.
    Jump,
    /// The decoder does not know the instruction at this offset from the entry.
    Unknown(usize),
    /// The function makes the system call with this number, which is not the expected one.
    OtherCall(i64),
    /// The decoder knows each instruction that it read, but a patch can replace none of them.
    NoRoom,
}

impl std::fmt::Display for PatchObstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Jump => f.write_str("it begins with a jump: another library has patched it"),
            Self::Unknown(at) => {
                write!(f, "the instruction at +{at} is not known to be safe to move")
            }
            Self::OtherCall(nr) => write!(f, "it makes system call {nr}, not the expected one"),
            Self::NoRoom => {
                f.write_str("none of its instructions can be replaced by one aligned store")
            }
        }
    }
}
