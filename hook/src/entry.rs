//! The patch point of a function: the instruction near its entry that a patch replaces.
//!
//! Both architectures follow these rules, so that threads may run the function at any time:
//! - One aligned store replaces exactly one whole instruction. No thread's program counter is ever
//!   inside it.
//! - The instructions before it are known. They leave the arguments as they are, and can be undone
//!   or have no effect that a caller can see.
//! - To call the original, a hook runs a copy of the skipped instructions, and then the rest of the
//!   function in its place. The library's own code produces the return value and `errno`.
//!
//! Every instruction is decoded. An entry that does not fit is refused, with its bytes in the
//! error.

/// Number of bytes that are decoded at the entry of a function.
pub(super) const LOOKED_AT: usize = 48;

/// The instruction that a patch replaces, and the code around it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PatchPoint {
    /// Offset of the replaced instruction from the entry.
    pub(super) at: usize,
    /// Code that undoes the instructions before the patch point. It runs before the hook.
    pub(super) undo: Vec<u8>,
    /// Copy of the function's code up to `resume`. It runs when the hook calls the original
    /// function.
    pub(super) skipped: Vec<u8>,
    /// Displacements in `skipped` to adjust to the address of the copy.
    pub(super) relative: Vec<Relative>,
    /// Offset from the entry of the first instruction after the copied ones.
    pub(super) resume: usize,
}

/// The displacement in an instruction that reads memory relative to its own address.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Relative {
    /// Offset of the displacement's 4 bytes in `skipped`.
    pub(super) at: usize,
    /// Offset in `skipped` of the instruction's end, to which the displacement is relative.
    pub(super) from: usize,
    /// The address that the instruction reads.
    pub(super) target: u64,
}

/// The reason why an entry cannot be patched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PatchObstacle {
    /// The entry begins with a jump or call: another library patched it.
    Jump,
    /// The bytes at this offset are not an instruction that is known to be safe to skip or replace.
    Unknown(usize),
    /// The function makes this system call instead of the one expected from its name.
    OtherCall(i64),
    /// No aligned store can replace a whole instruction.
    NoRoom,
}

impl std::fmt::Display for PatchObstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Jump => f.write_str("it begins with a jump: another library has patched it"),
            Self::Unknown(at) => {
                write!(f, "the instruction at +{at} is not known to be safe to move")
            }
            Self::OtherCall(nr) => write!(f, "it makes system call {nr}, not its own"),
            Self::NoRoom => {
                f.write_str("no instruction of it can be replaced by one aligned store")
            }
        }
    }
}
