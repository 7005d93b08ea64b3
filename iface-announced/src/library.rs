//! Loading of a vendor's library.

use std::{
    env,
    path::{Path, PathBuf},
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Returns the path of the library to load: `named`, or else the value of the environment variable,
/// or else `default`, which the dynamic loader finds.
#[must_use]
pub fn library_path(named: Option<PathBuf>, variable: &str, default: &str) -> PathBuf {
    let of_environment = || env::var_os(variable).filter(|path| !path.is_empty());
    named.or_else(|| of_environment().map(PathBuf::from)).unwrap_or_else(|| default.into())
}

/// A shared library that is loaded.
#[derive(Debug)]
pub struct SharedLibrary {
    library: Library,
}

impl SharedLibrary {
    /// Loads the library at `path`.
    ///
    /// # Errors
    /// Unavailable with the loader's reason and `remedy`.
    pub fn open(iface: IfaceKind, path: &Path, remedy: &'static str) -> Result<Self> {
        // SAFETY: loading runs the library's initialisers. The caller names a vendor's runtime, and
        // those have initialisers without preconditions.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|reason| {
            let error = Error::new(ErrorKind::Unavailable, "load library")
                .iface(iface)
                .context("library", path.display())
                .remedy(remedy);
            match reason {
                libloading::Error::DlOpen { source } => error.caused_by(source),
                other => error.caused_by(other),
            }
        })?;
        Ok(Self { library })
    }

    /// Returns the address of a symbol.
    #[must_use]
    pub fn symbol(&self, name: &'static str) -> Option<*const ()> {
        // SAFETY: only the address is taken.
        let symbol = unsafe { self.library.get::<*const ()>(name) }.ok()?;
        Some(symbol.as_raw_ptr().cast_const().cast())
    }

    /// Keeps the library loaded for the rest of the process. The threads and exit handlers of the
    /// library need its code.
    pub fn keep_loaded(self) {
        std::mem::forget(self.library);
    }
}

/// Declares `Functions`, a table of the functions of a vendor's library.
///
/// The table has a field for each function. Fields under `optional` are `None` if the library lacks
/// the function.
///
/// ```
/// use std::ffi::{c_char, c_int};
///
/// hmem_iface_announced::function_table! {
///     /// Functions of the C library.
///     library "libc.so.6" of hmem_core::IfaceKind::FIRST_PLUG_IN, "install a C library";
///     required {
///         /// `atoi(text)`
///         atoi: atoi = fn(*const c_char) -> c_int;
///     }
///     optional {
///         /// A function that no C library has.
///         nonesuch: hmem_nonesuch = fn() -> c_int;
///     }
/// }
///
/// let functions = Functions::load(Functions::LIBRARY.as_ref())?;
/// assert!(functions.nonesuch.is_none());
/// // SAFETY: a C string.
/// assert_eq!(unsafe { (functions.atoi)(c"42".as_ptr()) }, 42);
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[macro_export]
macro_rules! function_table {
    (
        $(#[doc = $table_doc:literal])+
        library $library:literal of $kind:expr, $remedy:literal;
        required { $(
            $(#[doc = $doc:literal])+
            $field:ident: $symbol:ident = fn($($argument:ty),*) -> $result:ty;
        )+ }
        optional { $(
            $(#[doc = $odoc:literal])+
            $ofield:ident: $osymbol:ident = fn($($oargument:ty),*) -> $oresult:ty;
        )* }
    ) => {
        $(#[doc = $table_doc])+
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: std::sync::Arc<str>,
            $(
                $(#[doc = $doc])+
                pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,
            )+
            $(
                $(#[doc = $odoc])+
                pub(crate) $ofield: Option<unsafe extern "C" fn($($oargument),*) -> $oresult>,
            )*
        }

        impl Functions {
            /// Name by which the dynamic loader finds the library.
            pub const LIBRARY: &str = $library;

            /// Symbols that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];

            /// Symbols that older releases of the library may lack.
            pub const OPTIONAL_SYMBOLS: &[&str] = &[$(stringify!($osymbol)),*];

            /// Loads the library at `path`, which stays loaded for the rest of the process.
            ///
            /// # Errors
            /// Unavailable if the loader refuses the library, or if the library lacks a required
            /// symbol. The error names the library, and the loader's reason or the first missing
            /// symbol.
            pub fn load(path: &std::path::Path) -> $crate::hmem_core::Result<Self> {
                let library = $crate::SharedLibrary::open($kind, path, $remedy)?;
                // SAFETY: the addresses come from the library under the names of its own header,
                // and the library is not unloaded once the table is filled.
                let functions = unsafe {
                    Self::fill(&path.display().to_string(), |name| library.symbol(name))
                }?;
                library.keep_loaded();
                Ok(functions)
            }

            /// Fills the table with the functions that a closure returns, such as those of a fake
            /// library.
            ///
            /// # Errors
            /// Unavailable, naming the first of [`Functions::SYMBOLS`] for which `lookup` returns
            /// `None`.
            ///
            /// # Safety
            /// Each address that `lookup` returns is a function with the signature that the
            /// vendor's header declares for that name, and stays callable from any thread for as
            /// long as a copy of the table exists.
            pub unsafe fn from_lookup(
                lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> $crate::hmem_core::Result<Self> {
                // SAFETY: the caller upholds the contract of this function, which is that of
                // `fill`.
                unsafe { Self::fill("(injected)", lookup) }
            }

            /// Returns the name of the library that the functions came from.
            #[must_use]
            pub fn library(&self) -> &str {
                &self.library
            }

            /// Fills the table with the functions that `lookup` returns.
            ///
            /// # Safety
            /// The caller upholds the safety contract of [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> $crate::hmem_core::Result<Self> {
                let mut find = |symbol| lookup(symbol).filter(|address| !address.is_null());
                let missing = |symbol: &'static str| {
                    use $crate::hmem_core::{Error, ErrorKind};
                    Error::new(ErrorKind::Unavailable, "load library")
                        .iface($kind)
                        .context("library", library)
                        .context("symbol", symbol)
                        .remedy(concat!(
                            "the library has no such symbol: it is not ", $library, ", or too old"
                        ))
                };
                Ok(Self {
                    library: library.into(),
                    $($field: {
                        let address = find(stringify!($symbol));
                        let address = address.ok_or_else(|| missing(stringify!($symbol)))?;
                        // SAFETY: the caller promises a function of the signature that the header
                        // declares for this name, which is the one in this table.
                        unsafe {
                            std::mem::transmute::<
                                *const (),
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(address)
                        }
                    },)+
                    $($ofield: find(stringify!($osymbol)).map(|address| {
                        // SAFETY: the caller promises a function of the signature that the header
                        // declares for this name, which is the one in this table.
                        unsafe {
                            std::mem::transmute::<
                                *const (),
                                unsafe extern "C" fn($($oargument),*) -> $oresult,
                            >(address)
                        }
                    }),)*
                })
            }
        }
    };
}
