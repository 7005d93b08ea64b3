//! The error type of the whole library: the failed operation, the reason, and a remedy.
//!
//! ```
//! use hmem_core::{Error, ErrorKind};
//!
//! let error = Error::new(ErrorKind::ZeroLength, "regattr")
//!     .context("range", "0x1000+0")
//!     .remedy("register at least one byte");
//! assert_eq!(error.kind(), ErrorKind::ZeroLength);
//! assert_eq!(error.fi_errno(), 22);
//! assert_eq!(error.to_string(), "regattr: the range is empty; register at least one byte");
//! assert_eq!(
//!     format!("{error:#}"),
//!     "regattr: the range is empty; register at least one byte (range=0x1000+0)"
//! );
//! ```

mod cause;
mod summary;
mod trace;

use std::{borrow::Cow, error::Error as StdError, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

pub use self::{
    cause::{CauseSummary, ProbableCause},
    summary::{AttemptSummary, ErrorSummary},
    trace::{Attempt, ExportUnit, Path, Trace},
};
use crate::{DeviceId, IfaceKind, IfaceName};

/// The result of every fallible operation of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = ($fi:literal, $text:literal),)+) => {
        /// The kind of an error. The serialised form is the name in kebab case: `zero-length`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[non_exhaustive]
        pub enum ErrorKind { $($(#[doc = $doc])+ $name,)+ }

        impl ErrorKind {
            /// Returns libfabric's errno for this kind (`rdma/fi_errno.h`), as a positive number.
            #[must_use]
            pub const fn fi_errno(self) -> i32 {
                match self { $(Self::$name => $fi,)+ }
            }

            /// Returns the kind's text in error messages.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

kinds! {
    /// An argument is wrong, and no other kind describes the mistake.
    InvalidArgument = (22, "invalid argument"),
    /// A range has no bytes (`fi_mr(3)`: "Must be > 0").
    ZeroLength = (22, "the range is empty"),
    /// Start plus length passes the end of the 64-bit address space.
    AddressWraps = (22, "the range wraps the address space"),
    /// The request sets the attribute `offset`, which is reserved and must be 0 (`fi_mr(3)`).
    ReservedOffset = (22, "the reserved offset is not zero"),
    /// The request sets the attribute `hmem_data`, which is reserved (`fi_mr(3)`).
    ReservedHmemData = (22, "the reserved hmem_data was given"),
    /// An access bit that [`Access`](crate::Access) does not define, or that the operation does not
    /// allow.
    BadAccess = (22, "unknown or disallowed access bit"),
    /// A flag that libfabric does not define, or that this provider cannot honour (`FI_EBADFLAGS`).
    BadFlags = (260, "unknown or unsupported flag"),
    /// The request has more ranges than the provider's `mr_iov_limit`.
    TooManyRanges = (22, "too many ranges"),
    /// The request has more bytes than the provider's `max_mr_size`.
    TooLong = (22, "longer than the provider can register"),
    /// A page size that the operating system does not have.
    BadPageSize = (22, "page size not available"),
    /// A range that reaches outside its region or allocation.
    OutOfBounds = (22, "outside the bounds"),
    /// mr_mode bits that the provider needs and the application did not offer, or bits that cannot
    /// be combined.
    ModeMismatch = (61, "mr_mode not acceptable"),
    /// Addresses that cannot be reached: unmapped, protected, or past the end of a file
    /// (`FI_EFAULT`).
    BadAddress = (14, "address not reachable"),
    /// The operation needs a right that the key or region does not grant, or the operating system
    /// denies access to a file (`FI_EACCES`).
    AccessDenied = (13, "access not granted"),
    /// The requested key is in use (`FI_ENOKEY`).
    NoKey = (266, "requested key is in use"),
    /// The provider cannot use the requested key (`FI_EKEYREJECTED`).
    KeyRejected = (129, "requested key rejected"),
    /// The region has only a raw key, or its registration has not completed (`FI_KEY_NOTAVAIL`).
    KeyNotAvailable = (126, "key not available"),
    /// A key that belongs to no region: it is forged, stale or of another domain.
    InvalidKey = (129, "key does not name a region"),
    /// A local segment has no descriptor, or one of another domain (`FI_ENOMR`).
    NoRegion = (270, "no valid local descriptor"),
    /// Serialised bytes (a key, a handle) that are truncated, altered, or of an unknown version.
    Malformed = (22, "malformed bytes"),
    /// A buffer is too small. The context value `needed` is the necessary size (`FI_ETOOSMALL`).
    TooSmall = (257, "buffer too small"),
    /// The object is still in use (`FI_EBUSY`).
    Busy = (16, "still in use"),
    /// The object is in a state that does not allow the operation (`FI_EOPBADSTATE`).
    BadState = (258, "wrong state"),
    /// The operation was cancelled before it ran (`FI_ECANCELED`).
    Canceled = (125, "canceled"),
    /// The operation cannot run now but may succeed later, for example when a queue is no longer
    /// full (`FI_EAGAIN`).
    Again = (11, "try again"),
    /// A received message was longer than the posted buffer (`FI_ETRUNC`).
    Truncated = (265, "message truncated"),
    /// A message is longer than the provider's limit (`FI_EMSGSIZE`).
    MessageTooLong = (90, "message too long"),
    /// Memory, lockable memory, regions or another limited resource is used up (`FI_ENOMEM`).
    OutOfResources = (12, "out of resources"),
    /// The driver, the device or this build does not support the operation (`FI_EOPNOTSUPP`).
    Unsupported = (95, "not supported"),
    /// The provider does not implement the operation (`FI_ENOSYS`).
    NoSys = (38, "not implemented by this provider"),
    /// A library, driver or device is missing (`FI_ENODEV`).
    Unavailable = (19, "unavailable"),
    /// The process lacks a privilege (`FI_EPERM`).
    PermissionDenied = (1, "permission denied"),
    /// The peer does not answer, or the NIC cannot reach the device (`FI_ECONNREFUSED`).
    Unreachable = (111, "peer not reachable"),
    /// A call to a driver or the operating system failed, and no other kind describes the failure
    /// (`FI_EOTHER`).
    Driver = (256, "driver call failed"),
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// An error number of the operating system, printed with its name: `EFAULT (14)`.
///
/// ```
/// use hmem_core::{Errno, ErrorKind};
///
/// assert_eq!(Errno(14).to_string(), "EFAULT (14)");
/// assert_eq!(Errno(524).to_string(), "ENOTSUPP (524)");
/// assert_eq!(Errno(95).kind(), ErrorKind::Unsupported);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(pub i32);

impl Errno {
    /// Returns the errno of a standard library error, or 0 if the error has none.
    #[must_use]
    pub fn of(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(0))
    }

    /// Returns the symbolic name of the number (such as `EFAULT`), if this library knows it.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "EPERM",
            2 => "ENOENT",
            4 => "EINTR",
            5 => "EIO",
            9 => "EBADF",
            11 => "EAGAIN",
            12 => "ENOMEM",
            13 => "EACCES",
            14 => "EFAULT",
            16 => "EBUSY",
            17 => "EEXIST",
            19 => "ENODEV",
            22 => "EINVAL",
            24 => "EMFILE",
            25 => "ENOTTY",
            28 => "ENOSPC",
            38 => "ENOSYS",
            75 => "EOVERFLOW",
            90 => "EMSGSIZE",
            95 => "EOPNOTSUPP",
            110 => "ETIMEDOUT",
            111 => "ECONNREFUSED",
            524 => "ENOTSUPP",
            _ => return None,
        })
    }

    /// Returns the kind of error for this number. [`Error::os`] uses this kind. Numbers without a
    /// kind of their own, for example 5 (EIO), have the kind [`ErrorKind::Driver`].
    ///
    /// 95 (EOPNOTSUPP) and the kernel-internal 524 (ENOTSUPP) have the same kind.
    #[must_use]
    pub const fn kind(self) -> ErrorKind {
        match self.0 {
            1 => ErrorKind::PermissionDenied,
            2 | 19 => ErrorKind::Unavailable,
            11 => ErrorKind::Again,
            12 | 24 | 28 => ErrorKind::OutOfResources,
            13 => ErrorKind::AccessDenied,
            14 => ErrorKind::BadAddress,
            16 => ErrorKind::Busy,
            22 => ErrorKind::InvalidArgument,
            38 => ErrorKind::NoSys,
            90 => ErrorKind::MessageTooLong,
            95 | 524 => ErrorKind::Unsupported,
            111 => ErrorKind::Unreachable,
            125 => ErrorKind::Canceled,
            _ => ErrorKind::Driver,
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// A driver's own error code, with its name in the vendor's header: `CUDA_ERROR_NOT_SUPPORTED
/// (801)`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct DriverCode {
    /// The name in the vendor's header, or an empty string for an unknown code.
    pub name: Cow<'static, str>,
    /// The number as the driver returned it.
    pub code: i64,
}

impl fmt::Debug for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The codes of HSA and Level Zero are from 0x1000 up, and their headers write them in
        // hexadecimal. CUDA's codes are smaller and decimal.
        let hexadecimal = self.code >= 0x1000;
        let code = if hexadecimal { format!("{:#x}", self.code) } else { self.code.to_string() };
        if self.name.is_empty() {
            write!(f, "code {code}")
        } else {
            write!(f, "{} ({code})", self.name)
        }
    }
}

/// Internal operations that several public calls use. [`Error::of_call`] replaces them by the name
/// of the public call.
const SHARED_STEPS: [&str; 6] = [
    "regattr",
    "register sub-region",
    "owner of range",
    "cached registration",
    "bind window",
    "invalidate window",
];

/// The error of a failed operation.
///
/// An error has a kind and the name of the operation. It may also have the iface, device or
/// provider that refused the operation, the driver's error code, context values, a remedy, a
/// source, and a trace of the paths that were tried.
///
/// An error has four texts:
///
/// - `{}`: a short line with the failure, its reason, the root cause and the remedy;
/// - `{:#}`: a line with all sources, attempts and probable causes, and last the values in
///   parentheses;
/// - `{:?}`: each attempt, source and probable cause, the remedy and the values on a line of its
///   own. Rust prints an error that `main` returns in this form;
/// - `{:#?}`: all fields.
///
/// [`Error::summary`] is a copy that can be compared and serialised.
///
/// ```
/// use hmem_core::{Error, ErrorKind, IfaceKind};
///
/// let load = Error::new(ErrorKind::Unavailable, "load library")
///     .context("library", "libcuda.so.1")
///     .caused_by("libcuda.so.1: no such file")
///     .remedy("install NVIDIA's driver");
/// let error = Error::new(ErrorKind::Unavailable, "iface").iface(IfaceKind::CUDA).caused_by(load);
/// assert_eq!(
///     error.to_string(),
///     "iface: unavailable: libcuda.so.1: no such file; install NVIDIA's driver"
/// );
/// assert_eq!(
///     format!("{error:#}"),
///     "iface: unavailable: load library: unavailable: libcuda.so.1: no such file; install \
///      NVIDIA's driver (iface=cuda, library=libcuda.so.1)"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Record>);

#[derive(Clone)]
struct Record {
    kind: ErrorKind,
    operation: &'static str,
    iface: Option<IfaceName>,
    device: Option<DeviceId>,
    provider: Option<Cow<'static, str>>,
    errno: Option<Errno>,
    driver: Option<DriverCode>,
    context: Vec<(&'static str, String)>,
    remedy: Option<Cow<'static, str>>,
    /// The probable causes, the most probable first. Empty for most errors.
    causes: Vec<ProbableCause>,
    trace: Trace,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Creates an error. `operation` is the public call or the driver's function that failed.
    #[must_use]
    #[cold]
    pub fn new(kind: ErrorKind, operation: &'static str) -> Self {
        Self(Box::new(Record {
            kind,
            operation,
            iface: None,
            device: None,
            provider: None,
            errno: None,
            driver: None,
            context: Vec::new(),
            remedy: None,
            causes: Vec::new(),
            trace: Trace::default(),
            source: None,
        }))
    }

    /// Creates the error of a failed system call. The number determines the kind.
    #[must_use]
    #[cold]
    pub fn os(errno: impl Into<Errno>, operation: &'static str) -> Self {
        let errno = errno.into();
        let mut error = Self::new(errno.kind(), operation);
        error.0.errno = Some(errno);
        error
    }

    /// Replaces the operation by the name of the public call, if the operation is one of
    /// [`SHARED_STEPS`]. The name of a driver's function is kept.
    #[must_use]
    #[cold]
    pub(crate) fn of_call(mut self, call: &'static str) -> Self {
        if SHARED_STEPS.contains(&self.0.operation) {
            self.0.operation = call;
        }
        self
    }

    /// Adds a named value that helps to find the cause. The text `{:#}` ends with the values, and
    /// the text `{}` leaves them out.
    ///
    /// The value `why` is the reason of the failure, in words. All texts have it directly after the
    /// kind. The text of `why` contains the values without which a reader cannot understand the
    /// failure.
    #[must_use]
    pub fn context(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.0.context.push((name, value.to_string()));
        self
    }

    /// Sets the remedy: an instruction for the caller.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Sets the iface that refused the operation.
    ///
    /// The argument decides how texts name a plug-in. They contain the plug-in's registered name if
    /// the argument is the iface itself or an [`IfaceName`] with a name. They contain the plug-in's
    /// number if the argument is an [`IfaceKind`].
    #[must_use]
    pub fn iface(mut self, iface: impl Into<IfaceName>) -> Self {
        self.0.iface = Some(iface.into());
        self
    }

    /// Sets the device that refused the operation.
    #[must_use]
    pub fn device(mut self, device: DeviceId) -> Self {
        self.0.device = Some(device);
        self
    }

    /// Sets the provider that refused the operation.
    #[must_use]
    pub fn provider(mut self, provider: impl Into<Cow<'static, str>>) -> Self {
        self.0.provider = Some(provider.into());
        self
    }

    /// Sets the operating system's error number, and keeps the kind.
    #[must_use]
    pub fn errno(mut self, errno: impl Into<Errno>) -> Self {
        self.0.errno = Some(errno.into());
        self
    }

    /// Sets the driver's own error code, and keeps the kind.
    #[must_use]
    pub fn driver_code(mut self, name: impl Into<Cow<'static, str>>, code: i64) -> Self {
        self.0.driver = Some(DriverCode { name: name.into(), code });
        self
    }

    /// Sets the source: another error, which caused this error.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Sets the trace of the paths that were tried. [`Trace::refusal`] becomes the source, unless
    /// the error already has a source.
    #[must_use]
    pub fn with_trace(mut self, trace: Trace) -> Self {
        self.0.trace = trace;
        self
    }

    /// Replaces the probable causes. The list begins with the most probable cause, and its remedy
    /// becomes that of the error. With an empty list, the error has its own remedy again.
    #[must_use]
    pub fn with_causes(mut self, causes: Vec<ProbableCause>) -> Self {
        self.0.causes = causes;
        self
    }

    /// Returns the kind of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the operation that failed.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// Returns the operating system's error number, if it was set.
    #[must_use]
    pub fn os_errno(&self) -> Option<Errno> {
        self.0.errno
    }

    /// Returns the driver's own error code, if it was set.
    #[must_use]
    pub fn driver(&self) -> Option<&DriverCode> {
        self.0.driver.as_ref()
    }

    /// Returns the iface that refused the operation, if it was set.
    #[must_use]
    pub fn iface_kind(&self) -> Option<IfaceKind> {
        self.iface_name().map(IfaceName::kind)
    }

    /// Returns the iface that refused the operation, with its name, if it was set.
    #[must_use]
    pub fn iface_name(&self) -> Option<&IfaceName> {
        self.0.iface.as_ref()
    }

    /// Returns the provider that refused the operation, if it was set.
    #[must_use]
    pub fn provider_name(&self) -> Option<&str> {
        self.0.provider.as_deref()
    }

    /// Returns the remedy of this error, or else of the nearest source of type [`Error`] that has a
    /// remedy. The remedy of the most probable cause precedes that of [`Error::remedy`]. Remedies
    /// of attempts are not searched.
    #[must_use]
    pub fn remedy_text(&self) -> Option<&str> {
        self.chain().find_map(|error| {
            let of_cause = error.0.causes.first().map(|cause| cause.remedy);
            of_cause.or(error.0.remedy.as_deref())
        })
    }

    /// Returns the probable causes, the most probable first. Several are listed only if the error
    /// and the machine do not show which of them applies.
    ///
    /// The causes are those of this error, or else of the nearest source that has causes. For a
    /// failed path search, they are the causes of the most informative refusal; each attempt of
    /// [`Error::trace`] has its own.
    #[must_use]
    pub fn causes(&self) -> &[ProbableCause] {
        let refused = || self.chain().find_map(|error| error.0.trace.refusal());
        match self.own_causes() {
            [] => refused().map_or(&[], Self::own_causes),
            causes => causes,
        }
    }

    /// Returns the causes of this error, or else of the nearest source that has causes. Does not
    /// search the attempts of a trace.
    fn own_causes(&self) -> &[ProbableCause] {
        let causes = self.chain().map(|error| &error.0.causes[..]);
        causes.into_iter().find(|causes| !causes.is_empty()).unwrap_or_default()
    }

    /// Returns the first context value of this error with the name `name`. Sources are not
    /// searched.
    #[must_use]
    pub fn context_value(&self, name: &str) -> Option<&str> {
        self.0.context.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    /// Returns the attempts of the path search that failed. Empty for other errors.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        &self.0.trace
    }

    /// Returns a copy of the error's facts that can be compared and serialised.
    #[must_use]
    pub fn summary(&self) -> ErrorSummary {
        self.into()
    }

    /// Returns the text of `{:#}`, for log events that have no fields for the range and the device.
    #[must_use]
    pub fn full(&self) -> impl fmt::Display + '_ {
        Text(self, |error, f| write!(f, "{error:#}"))
    }

    /// Returns the text of `{:#}` without the error's remedy. Attempts keep their remedies.
    #[must_use]
    pub fn reason(&self) -> impl fmt::Display + '_ {
        Text(self, |error, f| {
            error.write_messages(f)?;
            error.write_values(f)
        })
    }

    /// Returns the operation that failed and the reason, without attempts, source, remedy and
    /// context values.
    #[must_use]
    pub fn message(&self) -> impl fmt::Display + '_ {
        Text(self, |error, f| error.0.write_message(f))
    }

    /// Returns the values of this error and of its sources of type [`Error`], each once:
    /// `iface=cuda, device=0`. The context value `why` is left out.
    #[must_use]
    pub fn values(&self) -> impl fmt::Display + '_ {
        let mut values = Vec::new();
        for (name, value) in self.chain().flat_map(|error| error.0.values()) {
            let text = format!("{name}={value}");
            if !values.contains(&text) {
                values.push(text);
            }
        }
        values.join(", ")
    }

    /// Returns this error and its chain of sources, up to the first source that is not an
    /// [`Error`].
    fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |error| error.0.source.as_deref()?.downcast_ref())
    }

    /// Returns the messages of all sources, the nearest first.
    fn source_messages(&self) -> impl Iterator<Item = String> {
        let first = self.0.source.as_deref().map(|source| source as &dyn StdError);
        std::iter::successors(first, |&source| source.source()).map(|source| {
            match source.downcast_ref::<Self>() {
                Some(error) => error.message().to_string(),
                None => source.to_string(),
            }
        })
    }

    /// Returns the last error in the chain of sources. The chain ends at a source that is no
    /// [`Error`], because the sources of such a source are not followed. For a failed path search,
    /// the chain continues with the most informative refusal.
    fn root_cause(&self) -> Option<&(dyn StdError + 'static)> {
        let mut cause = self.source()?;
        while let Some(source) = cause.downcast_ref::<Self>().and_then(Self::source) {
            cause = source;
        }
        Some(cause)
    }

    /// Writes the messages of this error and of the sources of type `Error`, and then the attempts
    /// of the last of them. If the last one has no attempts, writes its source instead.
    fn write_messages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = self;
        for (at, error) in self.chain().enumerate() {
            write!(f, "{}{}", if at == 0 { "" } else { ": " }, error.message())?;
            last = error;
        }
        match &last.0.source {
            _ if !last.0.trace.is_empty() => write!(f, ": {}", last.0.trace),
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }

    /// Writes the causes after the first, each with its remedy.
    fn write_other_causes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.own_causes().iter().skip(1).try_for_each(|cause| {
            write!(f, "; less probable cause: {cause}; remedy: {}", cause.remedy)
        })
    }

    /// Writes the context values in parentheses, if the error or a source has any.
    fn write_values(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values().to_string();
        if values.is_empty() { Ok(()) } else { write!(f, " ({values})") }
    }

    /// Returns libfabric's errno for the kind, as a positive number.
    #[must_use]
    pub fn fi_errno(&self) -> i32 {
        self.0.kind.fi_errno()
    }

    /// Returns true if the kind means that the operation is not supported.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unsupported | ErrorKind::NoSys)
    }

    /// Returns true if the kind means that a library, driver or device is unavailable.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.0.kind == ErrorKind::Unavailable
    }

    /// Returns true if the kind means that the object is still in use.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.0.kind == ErrorKind::Busy
    }
}

/// The name of the context value that all texts have directly after the kind.
const WHY: &str = "why";

impl Record {
    /// Writes the failure and its reason, without the attempts, the source and the context values.
    fn write_message(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.kind)?;
        if let Some(errno) = &self.errno {
            write!(f, ", {errno}")?;
        }
        if let Some(code) = &self.driver {
            write!(f, ", {code}")?;
        }
        self.context
            .iter()
            .filter(|(name, _)| *name == WHY)
            .try_for_each(|(_, why)| write!(f, ": {why}"))
    }

    /// Returns the iface, the device, the provider and the context values without `why`, each with
    /// its name.
    fn values(&self) -> impl Iterator<Item = (&'static str, String)> {
        let parties = [
            ("iface", self.iface.as_ref().map(ToString::to_string)),
            ("device", self.device.as_ref().map(ToString::to_string)),
            ("provider", self.provider.as_ref().map(ToString::to_string)),
        ];
        let parties = parties.into_iter().filter_map(|(name, value)| Some((name, value?)));
        parties.chain(self.context.iter().filter(|(name, _)| *name != WHY).cloned())
    }
}

/// An error, and the function that writes one of its texts.
struct Text<'a>(&'a Error, fn(&Error, &mut fmt::Formatter<'_>) -> fmt::Result);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1(self.0, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            self.write_messages(f)?;
            if let Some(cause) = self.own_causes().first() {
                write!(f, "; probable cause: {cause}")?;
            }
        } else {
            write!(f, "{}", self.message())?;
            match self.root_cause().map(|cause| (cause, cause.downcast_ref::<Self>())) {
                Some((_, Some(cause))) => write!(f, ": {}", cause.message())?,
                Some((cause, None)) => write!(f, ": {cause}")?,
                None => {}
            }
        }
        if let Some(remedy) = self.remedy_text() {
            write!(f, "; {remedy}")?;
        }
        if !f.alternate() {
            return Ok(());
        }
        self.write_other_causes(f)?;
        self.write_values(f)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = &*self.0;
        if !f.alternate() {
            record.write_message(f)?;
            for (at, attempt) in record.trace.iter().enumerate() {
                write!(f, "\n  ({}) {attempt}", at + 1)?;
            }
            for message in self.source_messages() {
                write!(f, "\n  caused by: {message}")?;
            }
            if let Some(cause) = self.own_causes().first() {
                write!(f, "\n  probable cause: {cause}")?;
            }
            if let Some(remedy) = self.remedy_text() {
                write!(f, "\n  remedy: {remedy}")?;
            }
            for cause in self.own_causes().iter().skip(1) {
                write!(f, "\n  less probable cause: {cause}; remedy: {}", cause.remedy)?;
            }
            let values = self.values().to_string();
            return if values.is_empty() { Ok(()) } else { write!(f, "\n  details: {values}") };
        }
        let mut s = f.debug_struct("Error");
        s.field("kind", &record.kind).field("operation", &record.operation);
        s.field("iface", &record.iface).field("device", &record.device);
        s.field("provider", &record.provider).field("errno", &record.errno);
        s.field("driver", &record.driver).field("context", &record.context);
        s.field("remedy", &record.remedy)
            .field("causes", &record.causes)
            .field("trace", &record.trace);
        s.field("source", &record.source).finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let tried = || self.0.trace.refusal().map(|error| error as _);
        self.0.source.as_deref().map(|source| source as _).or_else(tried)
    }
}

/// The error of an operation that takes an object by value, together with the object.
///
/// ```
/// use hmem_core::{Error, ErrorKind, Rejected};
///
/// let rejected = Rejected::new(vec![1u8, 2], Error::new(ErrorKind::Busy, "close"));
/// assert!(rejected.error.is_busy());
/// assert_eq!(rejected.value, [1, 2]);
/// ```
pub struct Rejected<T> {
    /// The object, which is still usable.
    pub value: T,
    /// The reason why the operation failed.
    pub error: Error,
}

impl<T> Rejected<T> {
    /// Pairs the object with the error.
    pub fn new(value: T, error: Error) -> Self {
        Self { value, error }
    }
}

impl<T> fmt::Debug for Rejected<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<T> fmt::Display for Rejected<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> StdError for Rejected<T> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

impl<T> From<Rejected<T>> for Error {
    fn from(rejected: Rejected<T>) -> Self {
        rejected.error
    }
}

impl FromStr for IfaceKind {
    type Err = Error;

    /// Parses the name of an iface that libfabric defines.
    fn from_str(name: &str) -> Result<Self> {
        let named = Self::NAMED.iter().find(|(_, known)| *known == name);
        named.map(|(kind, _)| *kind).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "iface name")
                .context("why", format_args!("no iface is named {name}"))
                .context("name", name)
                .remedy("use one of system, cuda, rocr, ze, neuron, synapseai")
        })
    }
}
