//! Access to a vendor's library: [`function_table!`](crate::function_table) declares the functions
//! that an iface calls, and fills the table at run time. [`c_enum!`](crate::c_enum) declares the
//! enumerations of the vendor's header.

#![allow(unsafe_code, reason = "loads a library and gives its symbols their types")]

use std::{
    env,
    ffi::c_void,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Error, Result};

/// Returns the path in the environment variable, or `None` if the variable is unset or empty.
///
/// The variable is set by the owner of the process, who decides which code runs in it, as with
/// `LD_LIBRARY_PATH` and `LD_PRELOAD`. Code inside the process needs `unsafe` to set a variable
/// ([`std::env::set_var`]).
#[must_use]
pub fn path_in_environment(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// A loaded shared library. Dropping the value unloads the library.
#[derive(Debug)]
pub struct SharedLibrary {
    library: Library,
}

impl SharedLibrary {
    /// Loads the library at `path`, which runs its initialisers.
    ///
    /// # Errors
    /// The error `refused`, with the path and the loader's reason added, if the dynamic loader
    /// cannot load the library.
    ///
    /// # Safety
    /// The initialisers of the library at `path`, and of the libraries that it depends on, must be
    /// sound to run in this process. The finalisers must be sound to run when the value is dropped.
    ///
    /// # Examples
    /// Safe code cannot load a library:
    /// ```compile_fail,E0133
    /// use hmem_core::{Error, ErrorKind, library::SharedLibrary};
    ///
    /// let refused = Error::new(ErrorKind::Unavailable, "load library");
    /// let library = SharedLibrary::open("/tmp/any.so".as_ref(), refused);
    /// ```
    pub unsafe fn open(path: &Path, refused: Error) -> Result<Self> {
        // SAFETY: the caller promises that the initialisers and finalisers are sound to run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|reason| {
            let refused = refused.context("library", path.display());
            match reason {
                libloading::Error::DlOpen { source } => refused.caused_by(source),
                other => refused.caused_by(other),
            }
        })?;
        Ok(Self { library })
    }

    /// Returns the address of a symbol, or `None` if the library lacks the symbol. The address may
    /// be null.
    #[must_use]
    pub fn symbol(&self, name: &'static str) -> Option<*const ()> {
        // SAFETY: the symbol is not used as a value of a type. Only its address is returned.
        let symbol = unsafe { self.library.get::<*const ()>(name) }.ok()?;
        Some(symbol.as_raw_ptr().cast_const().cast())
    }

    /// Keeps the library loaded for the rest of the process, because the library's threads,
    /// callbacks and exit handlers need its code. Returns the handle for `dlsym`.
    pub fn keep_loaded(self) -> *mut c_void {
        self.library.into_raw()
    }
}

/// Declares a table of the functions of a vendor's library, with a field for each function.
///
/// - `library`: the name by which the dynamic loader finds the library.
/// - `variable`: the environment variable with the path of the library to load instead. This
///   section can be omitted.
/// - `iface`: the iface in errors, as [`Error::iface`] takes it. For a plug-in this is an
///   [`IfaceName`](crate::IfaceName), because an [`IfaceKind`](crate::IfaceKind) has no name. A
///   provider's table has `provider` instead: the name of the provider in errors.
/// - `not_loaded`: the remedy of the error for a library that cannot be loaded.
/// - `lacks_symbol`: the remedy of the error for a library without a required function.
///
/// Fields under `optional` are `None` if the library lacks the function. A last section `addresses
/// FIELD of SYMBOLS` adds the field `FIELD`. This field lists those of `SYMBOLS` that the library
/// has, with their addresses.
///
/// Only the declaring crate can use the fields. Code outside it reads a function through the method
/// with the field's name, and cannot replace a function in a table.
///
/// # Safety
/// Safe code can load the declared library (`find`), so the declaration is `unsafe`, like that of
/// an `extern` block. The author promises:
///
/// - The library that `library` names is sound to load in any process that has it.
/// - Each function of the library has the declared signature.
///
/// # Examples
/// ```
/// use std::ffi::{c_char, c_int};
///
/// hmem_core::function_table! {
///     /// Functions of the C library.
///     // SAFETY: every process has the C library. The signature is that of `stdlib.h`.
///     unsafe Functions {
///         library: "libc.so.6",
///         iface: hmem_core::IfaceName::new(hmem_core::IfaceKind::FIRST_PLUG_IN, "libc"),
///         not_loaded: "install a C library",
///         lacks_symbol: "install a newer C library",
///     }
///     required {
///         atoi: atoi(*const c_char) -> c_int;
///     }
///     optional {
///         /// A function that no C library has.
///         nonesuch: hmem_nonesuch() -> c_int;
///     }
/// }
///
/// let functions = Functions::find()?;
/// assert!(functions.nonesuch.is_none());
/// // SAFETY: a C string.
/// assert_eq!(unsafe { (functions.atoi)(c"42".as_ptr()) }, 42);
/// # Ok::<(), hmem_core::Error>(())
/// ```
///
/// Safe code cannot load another file as the library:
/// ```compile_fail,E0133
/// # hmem_core::function_table! {
/// #     /// Functions of the C library.
/// #     unsafe Functions {
/// #         library: "libc.so.6",
/// #         iface: hmem_core::IfaceKind::SYSTEM,
/// #         not_loaded: "install a C library",
/// #         lacks_symbol: "install a newer C library",
/// #     }
/// #     required { getpid: getpid() -> std::ffi::c_int; }
/// #     optional {}
/// # }
/// let functions = Functions::load("/tmp/any.so".as_ref());
/// ```
#[macro_export]
macro_rules! function_table {
    (
        $(#[doc = $table_doc:literal])+
        unsafe $table:ident {
            library: $library:literal,
            $(variable: $variable:literal,)?
            $(iface: $kind:expr,)?
            $(provider: $provider:literal,)?
            not_loaded: $not_loaded:expr,
            lacks_symbol: $lacks_symbol:expr,
        }
        required { $(
            $(#[doc = $doc:literal])*
            $field:ident: $symbol:ident($($argument:ty),*) -> $result:ty;
        )+ }
        optional { $(
            $(#[doc = $odoc:literal])*
            $ofield:ident: $osymbol:ident($($oargument:ty),*) -> $oresult:ty;
        )* }
        $(addresses $addresses:ident of $symbols:expr)?
    ) => {
        $(#[doc = $table_doc])+
        #[derive(Clone, Debug)]
        pub struct $table {
            /// The path of the library, or `None` if the caller passed the functions.
            library: Option<std::sync::Arc<str>>,
            $(
                $(#[doc = $doc])*
                pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,
            )+
            $(
                $(#[doc = $odoc])*
                pub(crate) $ofield: Option<unsafe extern "C" fn($($oargument),*) -> $oresult>,
            )*
            $($addresses: std::sync::Arc<[(&'static str, usize)]>,)?
        }

        impl $table {
            /// Name by which the dynamic loader finds the library.
            pub const LIBRARY: &str = $library;

            $(
                /// Environment variable with the path of the library to load.
                pub const LIBRARY_VARIABLE: &str = $variable;
            )?

            /// Symbols that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];

            /// Symbols that older releases of the library may lack. Operations that need an absent
            /// symbol are unsupported.
            pub const OPTIONAL_SYMBOLS: &[&str] = &[$(stringify!($osymbol)),*];

            /// All symbols with the types of their arguments and result, as Rust spells them.
            pub const SIGNATURES: &[(&str, &[&str], &str)] = &[
                $((stringify!($symbol), &[$(stringify!($argument)),*], stringify!($result)),)+
                $((stringify!($osymbol), &[$(stringify!($oargument)),*], stringify!($oresult)),)*
            ];

            /// Loads the library at `path`, which stays loaded for the rest of the process, and
            /// fills the table from it. After an error the library is unloaded again.
            ///
            /// # Errors
            /// Unavailable if the dynamic loader refuses the library, or if the library lacks a
            /// required symbol. The error names the library, and the loader's reason or the first
            /// missing symbol.
            ///
            /// # Safety
            /// The file must be the vendor's library or a replacement of it, such as a fake for
            /// tests: it is sound to load in this process, and its functions have the signatures
            /// and the behaviour that the vendor's header declares.
            pub unsafe fn load(path: &std::path::Path) -> $crate::Result<Self> {
                let refused = Self::unavailable($not_loaded);
                // SAFETY: the caller promises that the library is sound to load.
                let library = unsafe { $crate::library::SharedLibrary::open(path, refused) }?;
                // SAFETY: the caller promises functions with the declared signatures, and the
                // library is not unloaded once the table is filled.
                let functions = unsafe {
                    Self::fill(Some(&path.display().to_string()), |name| library.symbol(name))
                }?;
                library.keep_loaded();
                Ok(functions)
            }

            /// Loads the library that the owner of the process chose: the library at the path in
            /// the environment variable, if the table declares a variable and the variable is set.
            /// Otherwise loads the library that the dynamic loader finds by [`Self::LIBRARY`].
            ///
            /// # Errors
            /// The errors of [`Self::load`].
            pub fn find() -> $crate::Result<Self> {
                let named: Option<std::path::PathBuf> = None;
                $(let named = named.or_else(|| $crate::library::path_in_environment($variable));)?
                match named {
                    // SAFETY: the owner of the process sets the variable, and so promises that the
                    // file is the vendor's library or a replacement of it.
                    Some(path) => unsafe { Self::load(&path) },
                    None => Self::find_by_name(),
                }
            }

            /// Loads the library that the dynamic loader finds by the name [`Self::LIBRARY`]. Does
            /// not read the environment variable that [`Self::find`] reads.
            ///
            /// # Errors
            /// The errors of [`Self::load`].
            pub fn find_by_name() -> $crate::Result<Self> {
                // SAFETY: the author of the table promises that the library of this name is the
                // vendor's. The owner of the process sets the loader's search path, and so promises
                // the same for the file that it selects.
                unsafe { Self::load(std::path::Path::new(Self::LIBRARY)) }
            }

            $(
                #[doc = concat!("Returns the function `", stringify!($symbol), "`.")]
                #[doc = ""]
                $(#[doc = $doc])*
                #[must_use]
                pub fn $field(&self) -> unsafe extern "C" fn($($argument),*) -> $result {
                    self.$field
                }
            )+

            $(
                #[doc = concat!("Returns the function `", stringify!($osymbol), "`, or `None` if")]
                #[doc = "the library lacks it."]
                #[doc = ""]
                $(#[doc = $odoc])*
                #[must_use]
                pub fn $ofield(
                    &self,
                ) -> Option<unsafe extern "C" fn($($oargument),*) -> $oresult> {
                    self.$ofield
                }
            )*

            /// Fills the table with the functions that `lookup` returns by name, such as those of
            /// a fake library.
            ///
            /// # Errors
            /// Unavailable, naming the first of [`Self::SYMBOLS`] for which `lookup` returns
            /// `None` or a null address.
            ///
            /// # Safety
            /// Each address that `lookup` returns must be that of a function with the signature
            /// that the vendor's header declares for the name. The function must stay callable from
            /// any thread for as long as a copy of the table exists.
            pub unsafe fn from_lookup(
                lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> $crate::Result<Self> {
                // SAFETY: the caller upholds the contract of this function, which is that of
                // `fill`.
                unsafe { Self::fill(None, lookup) }
            }

            /// Returns the path of the library that [`Self::load`] loaded, or `(injected)` if the
            /// caller passed the functions.
            #[must_use]
            pub fn library(&self) -> &str {
                self.library.as_deref().unwrap_or("(injected)")
            }

            /// Returns true if the functions were loaded from a library, and false if the caller
            /// passed them.
            #[must_use]
            pub fn is_loaded(&self) -> bool {
                self.library.is_some()
            }

            fn unavailable(remedy: &'static str) -> $crate::Error {
                let error = $crate::Error::new($crate::ErrorKind::Unavailable, "load library");
                error$(.iface($kind))?$(.provider($provider))?.remedy(remedy)
            }

            /// Fills the table with the functions that `lookup` returns. `library` is the path of
            /// the library, or `None` if the caller passed the functions.
            ///
            /// # Errors
            /// Unavailable if `lookup` returns no address for a required symbol.
            ///
            /// # Safety
            /// The caller must uphold the safety contract of [`Self::from_lookup`].
            unsafe fn fill(
                library: Option<&str>,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> $crate::Result<Self> {
                let mut find = |symbol| lookup(symbol).filter(|address| !address.is_null());
                let missing = |symbol: &'static str| {
                    Self::unavailable($lacks_symbol)
                        .context("library", library.unwrap_or("(injected)"))
                        .context("symbol", symbol)
                        .context("why", format_args!("it has no {symbol}"))
                };
                Ok(Self {
                    library: library.map(Into::into),
                    $($addresses: $symbols
                        .iter()
                        .filter_map(|symbol| Some((*symbol, find(symbol)?.expose_provenance())))
                        .collect(),)?
                    $($field: {
                        type Function = unsafe extern "C" fn($($argument),*) -> $result;
                        let address = find(stringify!($symbol));
                        let address = address.ok_or_else(|| missing(stringify!($symbol)))?;
                        // SAFETY: the caller promises a function of the signature that the header
                        // declares for this name, which is the one in this table.
                        unsafe { std::mem::transmute::<*const (), Function>(address) }
                    },)+
                    $($ofield: find(stringify!($osymbol)).map(|address| {
                        type Function = unsafe extern "C" fn($($oargument),*) -> $oresult;
                        // SAFETY: the caller promises a function of the signature that the header
                        // declares for this name, which is the one in this table.
                        unsafe { std::mem::transmute::<*const (), Function>(address) }
                    }),)*
                })
            }
        }
    };
}

/// Declares types for enumerations of a C header: integers with named constants. A value may have
/// no name, because newer libraries have more values than the header. The types are
/// `#[repr(transparent)]`, for use in structs and [`function_table!`](crate::function_table).
///
/// # Examples
/// ```
/// hmem_core::c_enum! {
///     /// `enum color`
///     Color(i32) {
///         COLOR_RED = 0,
///         COLOR_GREEN = 1,
///     }
/// }
///
/// assert_eq!(Color::COLOR_GREEN.name(), Some("COLOR_GREEN"));
/// assert_eq!(Color(2).name(), None);
/// assert_eq!(Color::ALL, [Color(0), Color(1)]);
/// ```
#[macro_export]
macro_rules! c_enum {
    ($(
        $(#[doc = $doc:literal])+
        $type:ident($integer:ty) { $($name:ident = $value:literal,)+ }
    )+) => {$(
        $(#[doc = $doc])+
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $type(pub $integer);

        impl $type {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($value);
            )+

            /// All values that have a name.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns the name in the C header, or `None` for an unknown value.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    )+};
}
