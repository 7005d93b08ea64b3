//! Why the peer, or one of its operations, is not to be had.

use std::fmt;

use super::sys;

/// An error number of libfabric: `errno` values below 256, its own from 256 on; never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricErrno(pub(crate) i32);

impl FabricErrno {
    /// The provider has no room now; make progress and try again.
    pub(crate) const AGAIN: Self = Self(sys::FI_EAGAIN);
    /// No provider satisfies the hints.
    pub(crate) const NODATA: Self = Self(sys::FI_ENODATA);
    /// A failed operation is waiting in the completion queue.
    pub(crate) const AVAIL: Self = Self(sys::FI_EAVAIL);
    /// The key is taken, or unknown.
    #[cfg(test)]
    pub(crate) const NOKEY: Self = Self(sys::FI_ENOKEY);
}

impl fmt::Display for FabricErrno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "libfabric error {}", self.0)
    }
}

/// Why libfabric, a provider or an operation is not to be had. `Display` is one line that a bench
/// can print in place of a figure.
#[derive(Debug)]
pub(crate) enum FabricError {
    /// The dynamic loader did not find or could not load the library.
    LibraryMissing {
        /// The requested file name.
        library: String,
        /// The loader's reason.
        source: libloading::Error,
    },
    /// The library lacks a function that libfabric has exported since 1.0.
    SymbolMissing {
        /// The library that was searched.
        library: String,
        /// The function's name.
        symbol: String,
        /// The loader's reason.
        source: libloading::Error,
    },
    /// The library is older than the layouts in this module.
    LibraryTooOld {
        /// Version that `fi_version` returned, as (major, minor).
        found: (u32, u32),
        /// The oldest version that is understood.
        needed: (u32, u32),
    },
    /// `fi_getinfo` knows no such provider with what is asked of it.
    ProviderMissing {
        /// The name of the provider that was requested.
        provider: &'static str,
        /// The error number that `fi_getinfo` returned.
        code: FabricErrno,
        /// libfabric's description of `code`.
        text: String,
    },
    /// A call failed.
    Call {
        /// The name of the call, as in the man pages.
        operation: &'static str,
        /// The error number that the call returned.
        code: FabricErrno,
        /// libfabric's description of `code`.
        text: String,
    },
    /// The object's table has no such operation.
    OperationMissing {
        /// The name of the call, as in the man pages.
        operation: &'static str,
    },
    /// A call reported success, or no error, and handed nothing over.
    NothingReturned {
        /// The name of the call, as in the man pages.
        operation: &'static str,
    },
    /// An operation was accepted and failed later.
    Completion {
        /// The name of the call that was accepted.
        operation: &'static str,
        /// The error number in the completion.
        code: FabricErrno,
        /// The provider's own number in the completion.
        provider_code: i32,
        /// libfabric's description of `code`.
        text: String,
    },
    /// An operation was accepted and neither completed nor failed.
    Stalled {
        /// The name of the call that was accepted.
        operation: &'static str,
        /// How often both sides were asked for progress.
        polls: u64,
    },
    /// The operation does not support this length.
    Length {
        /// The requested length, in bytes.
        given: usize,
        /// The largest length, in bytes; lengths are positive multiples of 8.
        largest: usize,
    },
    /// The process has no memory for a buffer.
    OutOfMemory {
        /// The size asked for, in bytes.
        bytes: usize,
    },
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LibraryMissing { library, source } => {
                write!(f, "{library} cannot be loaded: {}", Loader(source))
            }
            Self::SymbolMissing { library, symbol, source } => {
                write!(f, "{library} has no symbol {symbol}: {}", Loader(source))
            }
            Self::LibraryTooOld { found, needed } => {
                write!(
                    f,
                    "libfabric {}.{} is older than {}.{}",
                    found.0, found.1, needed.0, needed.1
                )
            }
            Self::ProviderMissing { provider, code, text } => {
                write!(
                    f,
                    "libfabric offers no provider {provider:?} with what is asked: {code} ({text})"
                )
            }
            Self::Call { operation, code, text } => {
                write!(f, "{operation} failed: {code} ({text})")
            }
            Self::OperationMissing { operation } => {
                write!(f, "the provider does not implement {operation}")
            }
            Self::NothingReturned { operation } => write!(f, "{operation} returned nothing"),
            Self::Completion { operation, code, provider_code, text } => {
                write!(
                    f,
                    "{operation} completed in error: {code} ({text}), provider code {provider_code}"
                )
            }
            Self::Stalled { operation, polls } => {
                write!(f, "{operation} did not finish within {polls} polls")
            }
            Self::Length { given, largest } => {
                write!(f, "length {given} is not a multiple of 8 between 8 and {largest}")
            }
            Self::OutOfMemory { bytes } => write!(f, "no memory for a buffer of {bytes} bytes"),
        }
    }
}

/// Formats the dynamic loader's own message, which `libloading` stores as the error's source.
struct Loader<'a>(&'a libloading::Error);

impl fmt::Display for Loader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::error::Error::source(self.0) {
            Some(source) => write!(f, "{source}"),
            None => write!(f, "{}", self.0),
        }
    }
}

impl std::error::Error for FabricError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::LibraryMissing { source, .. } | Self::SymbolMissing { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}
