//! Opening and closing of ifaces: the builder, and the refusal to close a busy iface.

#![allow(unsafe_code, reason = "the macro of builders, which loads a library by its path")]

use hmem_core::{Error, ErrorKind, IfaceKind, Result};

/// Checks that an iface has no memory to release and no copy in flight, before it closes.
///
/// # Errors
/// Busy, with the number of allocations or copies.
pub fn check_idle(iface: IfaceKind, allocations: usize, copies: usize) -> Result<()> {
    let (counted, count) = match (allocations, copies) {
        (0, 0) => return Ok(()),
        (0, copies) => ("copies", copies),
        (allocations, _) => ("allocations", allocations),
    };
    Err(Error::new(ErrorKind::Busy, "close")
        .iface(iface)
        .context(counted, count)
        .remedy("free its memory and wait for its copies before closing the iface"))
}

/// Declares the builder of an iface over a vendor's library. The builder has the methods
/// `without_environment`, `library` and `functions`.
///
/// - `functions`: the table of the library's functions, declared by
///   [`function_table!`](hmem_core::function_table).
/// - `iface`: the path of the iface's type, for examples.
/// - `library`: a description of the library, its file name, and the environment variable with the
///   path of a library to load instead.
///
/// The fields in braces are settings of this iface only. The crate that uses the macro adds the
/// methods for these settings, and the method `open`. `open` gets the functions from the private
/// method `load`. If the private field `without_environment` is true, `open` must read no variable.
///
/// # Examples
/// ```
/// # hmem_core::function_table! {
/// #     /// Functions of the C library.
/// #     // SAFETY: every process has the C library. The signature is that of `unistd.h`.
/// #     unsafe Functions {
/// #         library: "libc.so.6",
/// #         variable: "HMEM_QUOKKA_LIBRARY",
/// #         iface: hmem_core::IfaceKind::FIRST_PLUG_IN,
/// #         not_loaded: "install a C library",
/// #         lacks_symbol: "install a newer C library",
/// #     }
/// #     required { getpid: getpid() -> std::ffi::c_int; }
/// #     optional {}
/// # }
/// # /// An iface over the C library.
/// # #[derive(Debug)]
/// # pub struct Quokka;
/// hmem_iface_kit::builder! {
///     /// Builder of [`Quokka`].
///     pub struct Builder {
///         /// True if the iface may start the device.
///         start: bool,
///     }
///     functions: Functions,
///     iface: "quokka::Quokka",
///     library: ("the C library", "libc.so.6", "HMEM_QUOKKA_LIBRARY"),
/// }
/// hmem_iface_kit::open!(Quokka, Builder, Functions);
///
/// impl Builder {
///     /// Permits the iface to start the device.
///     pub fn start(mut self) -> Self {
///         self.start = true;
///         self
///     }
///
///     /// Loads the library.
///     pub fn open(mut self) -> hmem_core::Result<Quokka> {
///         let functions = self.load()?;
///         println!("{} is open", functions.library());
///         Ok(Quokka)
///     }
/// }
///
/// Quokka::builder().start().without_environment().open()?;
/// assert_eq!(Quokka::LIBRARY_VARIABLE, "HMEM_QUOKKA_LIBRARY");
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[macro_export]
macro_rules! builder {
    (
        $(#[doc = $doc:literal])+
        pub struct $builder:ident {
            $($(#[doc = $field_doc:literal])+ $field:ident: $type:ty,)*
        }
        functions: $functions:ty,
        iface: $iface:literal,
        library: ($library:literal, $file:literal, $variable:literal),
    ) => {
        $(#[doc = $doc])+
        ///
        /// # Examples
        /// ```
        /// use hmem_core::ErrorKind;
        #[doc = concat!("use ", $iface, " as Iface;")]
        ///
        /// // SAFETY: there is no such file.
        #[doc = concat!(
            "let builder = unsafe { Iface::builder().library(\"/nowhere/", $file, "\") };"
        )]
        /// let error = builder.open().unwrap_err();
        /// assert_eq!(error.kind(), ErrorKind::Unavailable);
        #[doc = concat!(
            "assert_eq!(error.context_value(\"library\"), Some(\"/nowhere/", $file, "\"));"
        )]
        /// ```
        #[derive(Debug, Default)]
        #[must_use = "a builder does nothing until it opens"]
        pub struct $builder {
            library: Option<std::path::PathBuf>,
            functions: Option<$functions>,
            without_environment: bool,
            $($(#[doc = $field_doc])+ $field: $type,)*
        }

        impl $builder {
            /// Reads no variable of the environment. Settings that the builder lacks have their
            /// defaults, and the dynamic loader finds the library by its name.
            pub fn without_environment(mut self) -> Self {
                self.without_environment = true;
                self
            }

            #[doc = concat!(
                "Loads the library at `path` instead of the one that `", $variable, "`"
            )]
            /// names or the dynamic loader finds.
            ///
            /// # Safety
            #[doc = concat!(
                "The file must be ", $library, " or a replacement of it, such as a fake"
            )]
            /// for tests. It is sound to load in this process, and its functions have the
            /// signatures and the behaviour that the vendor's header declares.
            ///
            /// # Examples
            /// Safe code cannot load another library:
            /// ```compile_fail,E0133
            #[doc = concat!("let builder = ", $iface, "::builder().library(\"/tmp/any.so\");")]
            /// ```
            pub unsafe fn library(mut self, path: impl AsRef<std::path::Path>) -> Self {
                self.library = Some(path.as_ref().to_owned());
                self
            }

            /// Uses `functions`, instead of loading a library.
            pub fn functions(mut self, functions: $functions) -> Self {
                self.functions = Some(functions);
                self
            }

            /// Returns the functions that the caller passed, or loads the library.
            fn load(&mut self) -> $crate::Result<$functions> {
                match (self.functions.take(), self.library.take()) {
                    (Some(functions), _) => Ok(functions),
                    // SAFETY: the caller of `library` promises that the file is the library or a
                    // replacement of it.
                    (None, Some(path)) => unsafe { <$functions>::load(&path) },
                    (None, None) if self.without_environment => <$functions>::find_by_name(),
                    (None, None) => <$functions>::find(),
                }
            }
        }
    };
}

/// Adds `LIBRARY_VARIABLE`, `open` and `builder` to the type of an iface with a builder that
/// [`builder!`](crate::builder) declared.
#[macro_export]
macro_rules! open {
    ($iface:ty, $builder:ty, $functions:ty) => {
        impl $iface {
            /// Environment variable that names the library to load. A library that the builder
            /// names takes precedence.
            pub const LIBRARY_VARIABLE: &str = <$functions>::LIBRARY_VARIABLE;

            /// Opens the library that [`LIBRARY_VARIABLE`](Self::LIBRARY_VARIABLE) names, or the
            /// one that the dynamic loader finds.
            ///
            /// # Errors
            /// The errors of the builder's `open`.
            pub fn open() -> $crate::Result<Self> {
                Self::builder().open()
            }

            /// Returns a builder, which can load another library or use functions that the caller
            /// passes.
            pub fn builder() -> $builder {
                <$builder>::default()
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iface_with_memory_or_copies_is_busy() {
        check_idle(IfaceKind::CUDA, 0, 0).expect("nothing is in use");
        for (allocations, copies, counted, count) in
            [(2, 3, "allocations", "2"), (0, 3, "copies", "3")]
        {
            let busy = check_idle(IfaceKind::CUDA, allocations, copies).expect_err("in use");
            assert_eq!(busy.kind(), ErrorKind::Busy);
            assert_eq!(busy.context_value(counted), Some(count));
        }
    }
}
