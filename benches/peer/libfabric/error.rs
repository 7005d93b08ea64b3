//! Errors of libfabric: failures to load the library, to find a provider, and of single calls.

use std::fmt;

use super::sys;

/// A positive libfabric error number. Numbers below 256 are `errno` values, the others are defined
/// by libfabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricErrno(pub(crate) i32);

impl FabricErrno {
    /// The provider has no resources at the moment: read completions, then retry.
    pub(crate) const AGAIN: Self = Self(sys::FI_EAGAIN);
    /// No provider satisfies the hints.
    pub(crate) const NODATA: Self = Self(sys::FI_ENODATA);
    /// The completion queue contains an error entry, which `fi_cq_readerr` returns.
    pub(crate) const AVAIL: Self = Self(sys::FI_EAVAIL);
    /// The requested key is already in use, or no region has the key.
    #[cfg(test)]
    pub(crate) const NOKEY: Self = Self(sys::FI_ENOKEY);
}

impl fmt::Display for FabricErrno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "libfabric error {}", self.0)
    }
}

/// Error of loading or calling libfabric. `Display` prints one line, which a benchmark can print
/// instead of a result.
#[derive(Debug)]
pub(crate) enum FabricError {
    /// The library cannot be loaded.
    NotLoaded(hmem::Error),
    /// The library is older than 1.17.
    TooOld {
        /// Major number of the library's version.
        major: u32,
        /// Minor number of the library's version.
        minor: u32,
    },
    /// `fi_getinfo` found no provider of the requested name with the requested properties.
    ProviderMissing {
        /// Name of the requested provider.
        provider: &'static str,
        /// Error number that `fi_getinfo` returned.
        code: FabricErrno,
        /// libfabric's description of `code`.
        text: String,
    },
    /// A libfabric call returned an error.
    Call {
        /// Name of the call, as in the man pages.
        operation: &'static str,
        /// Error number that the call returned.
        code: FabricErrno,
        /// libfabric's description of `code`.
        text: String,
    },
    /// The provider does not implement a call: its function pointer is null.
    OperationMissing {
        /// Name of the call, as in the man pages.
        operation: &'static str,
    },
    /// A call reported success but returned no object.
    NothingReturned {
        /// Name of the call, as in the man pages.
        operation: &'static str,
    },
    /// The completion of a posted operation reports a failure.
    Completion {
        /// Name of the call that posted the operation.
        operation: &'static str,
        /// Error number in the completion.
        code: FabricErrno,
        /// Provider-specific error number in the completion.
        provider_code: i32,
        /// libfabric's description of `code`.
        text: String,
    },
    /// A posted operation did not complete within a fixed number of polls.
    Stalled {
        /// Name of the call that posted the operation.
        operation: &'static str,
        /// Number of polls after which the caller stopped waiting.
        polls: u64,
    },
    /// The length of a write is not supported.
    Length {
        /// Requested length, in bytes.
        given: usize,
        /// Largest supported length, in bytes. Supported lengths are positive multiples of 8.
        largest: usize,
    },
    /// A buffer could not be allocated.
    OutOfMemory {
        /// Requested size of the buffer, in bytes.
        bytes: usize,
    },
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLoaded(error) => write!(f, "{error}"),
            Self::TooOld { major, minor } => {
                write!(f, "libfabric {major}.{minor} is too old; install 1.17 or later")
            }
            Self::ProviderMissing { provider, code, text } => {
                write!(
                    f,
                    "libfabric has no provider {provider:?} with these properties: {code} ({text})"
                )
            }
            Self::Call { operation, code, text } => {
                write!(f, "{operation} failed: {code} ({text})")
            }
            Self::OperationMissing { operation } => {
                write!(f, "the provider does not implement {operation}")
            }
            Self::NothingReturned { operation } => {
                write!(f, "{operation} succeeded but returned no object")
            }
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
            Self::OutOfMemory { bytes } => write!(f, "cannot allocate a buffer of {bytes} bytes"),
        }
    }
}

impl std::error::Error for FabricError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotLoaded(error) => Some(error),
            _ => None,
        }
    }
}
