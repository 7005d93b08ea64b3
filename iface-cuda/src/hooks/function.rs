//! Functions of the driver that free memory, with the memory that a call frees.

/// The first six integer arguments of a call. No hooked function has more arguments.
pub(super) type Args = [usize; 6];

/// The memory that a call of a driver function frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// The allocation that the first argument points to.
    Pointed,
    /// The allocation that the first argument points to. The argument is a pointer of 32 bits.
    PointedLow,
    /// Possibly all memory of the driver, since the arguments do not tell which part is freed.
    Anything,
}

macro_rules! functions {
    ($($name:ident: $freed:expr;)+) => {
        /// A function of the driver that frees memory.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        #[allow(non_camel_case_types)] // The driver's own spelling.
        pub(super) enum Function { $($name,)+ }

        impl Function {
            /// All functions, in the order of their declaration.
            pub(super) const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$name),+];

            /// Returns the name of the exported function.
            pub(super) const fn symbol(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }

            /// Returns the memory that a call frees.
            pub(super) const fn freed(self) -> Freed {
                match self { $(Self::$name => $freed,)+ }
            }
        }
    };
}

functions! {
    cuMemFree: Freed::PointedLow;
    cuMemFree_v2: Freed::Pointed;
    cuMemFreeHost: Freed::Pointed;
    cuMemFreeAsync: Freed::Pointed;
    cuMemFreeAsync_ptsz: Freed::Pointed;
    cuIpcCloseMemHandle: Freed::Pointed;
    cuCtxDestroy: Freed::Anything;
    cuCtxDestroy_v2: Freed::Anything;
    cuCtxDetach: Freed::Anything;
    cuDevicePrimaryCtxRelease: Freed::Anything;
    cuDevicePrimaryCtxRelease_v2: Freed::Anything;
    cuDevicePrimaryCtxReset: Freed::Anything;
    cuDevicePrimaryCtxReset_v2: Freed::Anything;
    cuGreenCtxDestroy: Freed::Anything;
    cuModuleUnload: Freed::Anything;
    cuLibraryUnload: Freed::Anything;
    cuGraphicsUnmapResources: Freed::Anything;
    cuGraphicsUnmapResources_ptsz: Freed::Anything;
    cuGraphicsUnregisterResource: Freed::Anything;
    cuGLUnmapBufferObject: Freed::Anything;
    cuGLUnmapBufferObjectAsync: Freed::Anything;
    cuGLUnregisterBufferObject: Freed::Anything;
}

impl Function {
    /// Returns the function with this name, or `None` for a name that is not in [`Self::ALL`].
    pub(super) fn named(symbol: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|function| function.symbol() == symbol)
    }

    /// Returns the pointer that a call frees, or `None` if the call may free any memory. The driver
    /// ignores a null pointer.
    pub(super) const fn pointer(self, args: &Args) -> Option<u64> {
        match self.freed() {
            Freed::Pointed => Some(args[0] as u64),
            Freed::PointedLow => Some(args[0] as u32 as u64),
            Freed::Anything => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Functions;

    #[test]
    fn functions_looked_up_and_functions_hooked_are_the_same() {
        let hooked: Vec<_> = Function::ALL.map(Function::symbol).to_vec();
        assert_eq!(hooked, Functions::FREES);
        assert!(hooked.iter().all(|symbol| Function::named(symbol).is_some()));
        assert_eq!(Function::named("cuMemAlloc_v2"), None);
    }

    #[test]
    fn pointer_has_the_width_of_its_function_version() {
        let args = [0x7f_0000_1000_usize, 0, 0, 0, 0, 0];
        assert_eq!(Function::cuMemFree_v2.pointer(&args), Some(0x7f_0000_1000));
        assert_eq!(Function::cuMemFree.pointer(&args), Some(0x1000));
        assert_eq!(Function::cuCtxDestroy_v2.pointer(&args), None);
    }
}
