//! Functions of the driver that free memory, with the memory that a call frees.

#![allow(dead_code, reason = "targets without hooks use the names only")]

use super::Functions;

/// The first six integer arguments of a call. No hooked function has more arguments.
pub(crate) type Args = [usize; 6];

/// The way in which a function's arguments tell which memory a call frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frees {
    /// The allocation that the first argument points to. The driver ignores a null pointer.
    Pointed,
    /// Like [`Self::Pointed`], for a pointer of 32 bits.
    PointedLow,
    /// The range that begins at the first argument. The second argument is its length.
    Range,
    /// Possibly all memory of the driver, since the arguments do not tell which part is freed.
    Anything,
}

/// The memory that one call of a driver function frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Nothing,
    /// The allocation at this address.
    Allocation(u64),
    /// The range that begins at this address and has this length.
    Range(u64, u64),
    /// Possibly all memory of the driver.
    Anything,
}

macro_rules! functions {
    ($($name:ident: $frees:expr;)+) => {
        /// A function of the driver that frees memory.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        #[allow(non_camel_case_types)] // The driver's own spelling.
        pub(crate) enum Function { $($name,)+ }

        impl Function {
            /// All functions, in the order of their declaration.
            pub(crate) const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$name),+];

            const fn frees(self) -> Frees {
                match self { $(Self::$name => $frees,)+ }
            }
        }

        impl Functions {
            /// Symbols of functions that free memory. A monitor can hook all of them that the
            /// library has. This crate itself calls only a few.
            pub const FREES: &[&str] = &[$(stringify!($name)),+];
        }
    };
}

functions! {
    cuMemFree: Frees::PointedLow;
    cuMemFree_v2: Frees::Pointed;
    cuMemFreeHost: Frees::Pointed;
    cuMemFreeAsync: Frees::Pointed;
    cuMemFreeAsync_ptsz: Frees::Pointed;
    cuIpcCloseMemHandle: Frees::Pointed;
    cuMemUnmap: Frees::Range;
    cuMemAddressFree: Frees::Range;
    cuCtxDestroy: Frees::Anything;
    cuCtxDestroy_v2: Frees::Anything;
    cuCtxDetach: Frees::Anything;
    cuDevicePrimaryCtxRelease: Frees::Anything;
    cuDevicePrimaryCtxRelease_v2: Frees::Anything;
    cuDevicePrimaryCtxReset: Frees::Anything;
    cuDevicePrimaryCtxReset_v2: Frees::Anything;
    cuGreenCtxDestroy: Frees::Anything;
    cuModuleUnload: Frees::Anything;
    cuLibraryUnload: Frees::Anything;
    cuGraphicsUnmapResources: Frees::Anything;
    cuGraphicsUnmapResources_ptsz: Frees::Anything;
    cuGraphicsUnregisterResource: Frees::Anything;
    cuGLUnmapBufferObject: Frees::Anything;
    cuGLUnmapBufferObjectAsync: Frees::Anything;
    cuGLUnregisterBufferObject: Frees::Anything;
}

impl Function {
    /// Returns the name of the exported function.
    pub(crate) fn symbol(self) -> &'static str {
        Functions::FREES[self as usize]
    }

    /// Returns the function with this name, or `None` for a name that is not in [`Self::ALL`].
    pub(crate) fn named(symbol: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|function| function.symbol() == symbol)
    }

    /// Returns the memory that a call with these arguments frees.
    pub(crate) fn freed(self, args: &Args) -> Freed {
        let (pointer, len) = (args[0] as u64, args[1] as u64);
        let allocation =
            |pointer| if pointer == 0 { Freed::Nothing } else { Freed::Allocation(pointer) };
        match self.frees() {
            Frees::Pointed => allocation(pointer),
            Frees::PointedLow => allocation(pointer as u32 as u64),
            Frees::Range if len == 0 => Freed::Nothing,
            Frees::Range => Freed::Range(pointer, len),
            Frees::Anything => Freed::Anything,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_in_the_width_of_the_function_version() {
        let args = [0x7f_0000_1000_usize, 0x2000, 0, 0, 0, 0];
        assert_eq!(Function::cuMemFree_v2.freed(&args), Freed::Allocation(0x7f_0000_1000));
        assert_eq!(Function::cuMemFree.freed(&args), Freed::Allocation(0x1000));
        assert_eq!(Function::cuMemUnmap.freed(&args), Freed::Range(0x7f_0000_1000, 0x2000));
        assert_eq!(Function::cuCtxDestroy_v2.freed(&args), Freed::Anything);
        assert_eq!(Function::cuMemFree_v2.freed(&[0; 6]), Freed::Nothing);
        assert_eq!(Function::cuMemUnmap.freed(&[0x1000, 0, 0, 0, 0, 0]), Freed::Nothing);
    }
}
