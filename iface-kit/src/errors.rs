//! Errors that are the same for every vendor, and checks that return them.

#![allow(unsafe_code, reason = "owns the descriptors that drivers return")]

use std::{
    ffi::c_int,
    os::fd::{FromRawFd, OwnedFd},
};

use hmem_core::{
    AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind, Result,
    iface::AllocRequest,
};
use rustix::io::{FdFlags, fcntl_setfd};

/// Maker of the errors of one iface. Each error names the iface.
///
/// # Examples
/// ```
/// use hmem_core::{ErrorKind, IfaceKind};
/// use hmem_iface_kit::IfaceErrors;
///
/// const QUOKKA: IfaceErrors = IfaceErrors(IfaceKind::FIRST_PLUG_IN);
/// assert_eq!(QUOKKA.lacks("export", "the device has no dma-bufs").kind(), ErrorKind::Unsupported);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct IfaceErrors(pub IfaceKind);

impl IfaceErrors {
    /// Returns an error of this kind.
    pub fn error(self, kind: ErrorKind, operation: &'static str) -> Error {
        Error::new(kind, operation).iface(self.0)
    }

    /// Returns the error for an operation that the driver, the device or the iface does not
    /// support.
    pub fn lacks(self, operation: &'static str, reason: &'static str) -> Error {
        self.error(ErrorKind::Unsupported, operation).context("why", reason)
    }

    /// Returns the error for a driver that does not start or has no device.
    pub fn unavailable(self, operation: &'static str, library: &str) -> Error {
        self.error(ErrorKind::Unavailable, operation).context("library", library)
    }

    /// Returns the error for a range that is not in one live allocation.
    pub fn outside(self, operation: &'static str) -> Error {
        self.error(ErrorKind::OutOfBounds, operation)
            .remedy("the range must lie in one live allocation")
    }

    /// Returns the error for a copy of a range that begins in an allocation and reaches beyond its
    /// end.
    pub fn copy_outside(self, range: AddressRange, allocation: AddressRange) -> Error {
        self.error(ErrorKind::OutOfBounds, "copy")
            .context("range", range)
            .context("allocation", allocation)
            .remedy("the range must lie in one allocation of this iface")
    }

    /// Returns the error for an ordinal that none of `count` devices has.
    pub fn unknown_device(self, operation: &'static str, device: DeviceId, count: usize) -> Error {
        self.error(ErrorKind::InvalidArgument, operation)
            .device(device)
            .context("why", format_args!("device {} of {count}", device.0))
            .context("devices", count)
            .remedy("devices count from 0")
    }

    /// Returns the error for a call of a monitor whose iface was dropped.
    pub fn not_watched(self) -> Error {
        self.error(ErrorKind::Unavailable, "monitor")
            .remedy("the iface was closed: its memory is no longer watched")
    }

    /// Returns the error for memory that the driver does not export under the PCIe mapping.
    pub fn no_pcie_mapping(self, call: &'static str) -> Error {
        self.lacks(call, "refused under the PCIe mapping").context("mapping", "pcie").remedy(
            "export with the default mapping; if that is refused too, the memory is at fault and \
             not the mapping",
        )
    }

    /// Checks a request for memory, and calls `allocate`. `unsupported` is the reason why the
    /// driver has no memory of the requested kind, or `None` if the driver has such memory.
    ///
    /// # Errors
    /// - ZeroLength for a length of 0.
    /// - Unsupported for [`AllocationKind::Imported`], and if `unsupported` is not `None`.
    /// - Otherwise the error of `allocate`.
    ///
    /// Each error names the device, kind and length of the request.
    pub fn allocate(
        self,
        request: &AllocRequest,
        unsupported: Option<&'static str>,
        allocate: impl FnOnce() -> Result<Allocation>,
    ) -> Result<Allocation> {
        const OPERATION: &str = "allocate";
        let &AllocRequest { len, device, kind } = request;
        let imported = (kind == AllocationKind::Imported)
            .then_some("memory of another process is opened with ipc_open, not allocated");
        let allocated = match imported.or(unsupported) {
            _ if len == 0 => Err(self.error(ErrorKind::ZeroLength, OPERATION)),
            Some(reason) => Err(self.lacks(OPERATION, reason)),
            None => allocate(),
        };
        allocated.map_err(|error| {
            error.device(device).context("kind", kind.name()).context("length", len)
        })
    }

    /// Takes ownership of the fd that a successful driver call returned, and sets `FD_CLOEXEC`.
    ///
    /// # Errors
    /// - [`ErrorKind::Driver`](hmem_core::ErrorKind::Driver) if the fd is negative.
    /// - Otherwise the error of `fcntl`.
    ///
    /// # Safety
    /// The driver must have opened the fd for this call, and nothing else may own it.
    pub unsafe fn take_fd(self, fd: c_int, call: &'static str) -> Result<OwnedFd> {
        if fd < 0 {
            return Err(self
                .error(ErrorKind::Driver, call)
                .context("why", "the call succeeded and returned no fd"));
        }
        // SAFETY: the caller promises that nothing else owns the fd.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|errno| Error::os(errno, "fcntl(F_SETFD)").iface(self.0))?;
        Ok(fd)
    }
}

/// Logs the error of a result, for a caller that cannot return the error. The arguments are a level
/// of `tracing`, the result, and the fields and message of the log record.
#[macro_export]
macro_rules! log_failure {
    ($level:ident, $result:expr, $($message:tt)+) => {
        if let Err(error) = $result {
            tracing::$level!(error = %error.full(), $($message)+);
        }
    };
}
