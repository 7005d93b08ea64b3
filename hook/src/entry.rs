//! How the first instructions of a function let one of them be replaced.
//!
//! The rules that both architectures follow, so that threads may run the function at any time:
//! - exactly one whole instruction is replaced, by one aligned store: no thread's program counter
//!   is ever inside;
//! - what runs before it is known, leaves the arguments as they are, and can be undone or does no
//!   harm;
//! - what runs in its place, when a hook goes on to the original, is a copy of what was skipped,
//!   and then the rest of the function where it is: return value and `errno` are the library's own
//!   work.
//!
//! Everything is decoded. An entry that does not fit is refused with the bytes that were seen.

/// Bytes of a function that are looked at.
pub(super) const LOOKED_AT: usize = 48;

/// How an entry can be patched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PatchPoint {
    /// The instruction that is replaced, in bytes from the entry.
    pub(super) at: usize,
    /// Code that undoes what the instructions before it have done, for the way to the hook.
    pub(super) undo: Vec<u8>,
    /// Code that does what the function does up to `resume`, for the way from the hook.
    pub(super) skipped: Vec<u8>,
    /// What in `skipped` counts from its own place, and has to be counted anew from another.
    pub(super) relative: Vec<Relative>,
    /// Where the function goes on after that, in bytes from the entry.
    pub(super) resume: usize,
}

/// A displacement of an instruction that reaches memory beside the code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Relative {
    /// Where its 4 bytes are.
    pub(super) at: usize,
    /// The end of its instruction, from which it counts.
    pub(super) from: usize,
    /// The address that it reaches.
    pub(super) target: u64,
}

/// Why an entry cannot be patched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PatchObstacle {
    /// It begins with a jump or call: somebody patched it before us.
    Jump,
    /// The bytes at this offset are no instruction that is known to be safe here.
    Unknown(usize),
    /// It makes another system call than its name says.
    OtherCall(i64),
    /// No instruction can be replaced by one aligned store.
    NoRoom,
}

impl std::fmt::Display for PatchObstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Jump => f.write_str("it begins with a jump: another library has patched it"),
            Self::Unknown(at) => {
                write!(f, "the instruction at +{at} is not one that is known to be safe to move")
            }
            Self::OtherCall(nr) => write!(f, "it makes system call {nr}, not its own"),
            Self::NoRoom => {
                f.write_str("no instruction of it can be replaced by one aligned store")
            }
        }
    }
}
