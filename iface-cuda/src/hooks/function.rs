//! Functions of the driver that free memory, with the memory that a call frees.

/// Arguments of a call, each in one register.
pub(super) type Args = [usize; 6];

/// The memory that a call of a driver function frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// The allocation that the first argument points to.
    Pointed,
    /// The allocation that the first argument points to. The argument is a pointer of 32 bits.
    PointedLow,
    /// Possibly all memory of the driver, since the arguments do not tell which part is freed.
    Anything,
}

macro_rules! functions {
    ($($name:ident: $takes:expr;)+) => {
        /// A function of the driver that frees memory.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        #[allow(non_camel_case_types)] // The driver's own spelling.
        pub(super) enum Function { $($name,)+ }

        impl Function {
            /// All functions, in the order of their numbers.
            pub(super) const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$name),+];

            /// Returns the name of the exported function.
            pub(super) const fn symbol(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }

            /// Returns the memory that a call frees.
            pub(super) const fn takes(self) -> Takes {
                match self { $(Self::$name => $takes,)+ }
            }
        }
    };
}

functions! {
    cuMemFree: Takes::PointedLow;
    cuMemFree_v2: Takes::Pointed;
    cuMemFreeHost: Takes::Pointed;
    cuMemFreeAsync: Takes::Pointed;
    cuMemFreeAsync_ptsz: Takes::Pointed;
    cuIpcCloseMemHandle: Takes::Pointed;
    cuCtxDestroy: Takes::Anything;
    cuCtxDestroy_v2: Takes::Anything;
    cuCtxDetach: Takes::Anything;
    cuDevicePrimaryCtxRelease: Takes::Anything;
    cuDevicePrimaryCtxRelease_v2: Takes::Anything;
    cuDevicePrimaryCtxReset: Takes::Anything;
    cuDevicePrimaryCtxReset_v2: Takes::Anything;
    cuGreenCtxDestroy: Takes::Anything;
    cuModuleUnload: Takes::Anything;
    cuLibraryUnload: Takes::Anything;
    cuGraphicsUnmapResources: Takes::Anything;
    cuGraphicsUnmapResources_ptsz: Takes::Anything;
    cuGraphicsUnregisterResource: Takes::Anything;
    cuGLUnmapBufferObject: Takes::Anything;
    cuGLUnmapBufferObjectAsync: Takes::Anything;
    cuGLUnregisterBufferObject: Takes::Anything;
}

impl Function {
    /// Returns the function with this name.
    pub(super) fn named(symbol: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|function| function.symbol() == symbol)
    }

    /// Returns the pointer that a call frees. The driver ignores a null pointer.
    pub(super) const fn pointer(self, args: &Args) -> Option<u64> {
        match self.takes() {
            Takes::Pointed => Some(args[0] as u64),
            Takes::PointedLow => Some(args[0] as u32 as u64),
            Takes::Anything => None,
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
