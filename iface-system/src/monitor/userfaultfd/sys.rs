//! The system calls of `linux/userfaultfd.h`, and the reasons for their failures.

#![allow(unsafe_code, reason = "the ioctls of userfaultfd")]

use std::{
    fs,
    os::fd::{AsFd, FromRawFd, OwnedFd},
    thread,
    time::Duration,
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    ioctl::{self, Ioctl, IoctlOutput, Opcode, Updater, opcode},
    mm::{Advice, UserfaultfdFlags},
};

const UFFD_USER_MODE_ONLY: u32 = 1;
const UFFD_API: u64 = 0xaa;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;

pub(super) const EVENT_REMAP: u8 = 0x14;
pub(super) const EVENT_REMOVE: u8 = 0x15;
pub(super) const EVENT_UNMAP: u8 = 0x16;

/// The feature bits that the monitor needs, with their names in the kernel header.
const NEEDED: [(u64, &str); 4] = [
    (1 << 0, "UFFD_FEATURE_PAGEFAULT_FLAG_WP"),
    (1 << 2, "UFFD_FEATURE_EVENT_REMAP"),
    (1 << 3, "UFFD_FEATURE_EVENT_REMOVE"),
    (1 << 6, "UFFD_FEATURE_EVENT_UNMAP"),
];

/// Feature bit: shared memory and huge pages can be watched too. Since Linux 5.19.
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

// The structures of the kernel header with the names in lower case.

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xaa, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdioRange>(0xaa, 1);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(0xaa, 6);

/// The ioctl `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`. The field has the flags of the new
/// userfaultfd.
struct NewUserfaultfd(u32);

// SAFETY: the ioctl takes a number as its argument, touches no memory, and returns a new fd.
unsafe impl Ioctl for NewUserfaultfd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(0xaa, 0)
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the ioctl succeeded, so `out` is a new fd that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// One event message, with the layout of `struct uffd_msg`: the event number in the first byte, and
/// up to three words of data.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct UffdMessage {
    head: u64,
    pub(super) words: [u64; 3],
}

impl UffdMessage {
    pub(super) fn event(&self) -> u8 {
        self.head.to_ne_bytes()[0]
    }
}

/// Reads up to 16 messages that have arrived. Fails with `Errno::AGAIN` if there are none.
pub(super) fn read<'a>(
    fd: &OwnedFd,
    into: &'a mut [UffdMessage; 16],
) -> Result<&'a [UffdMessage], Errno> {
    // SAFETY: messages are plain words without padding, and any bytes are valid for them; the slice
    // covers exactly their array.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(
            into.as_mut_ptr().cast::<u8>(),
            size_of::<[UffdMessage; 16]>(),
        )
    };
    let read = rustix::io::read(fd, bytes)?;
    Ok(&into[..read / size_of::<UffdMessage>()])
}

/// Opens a userfaultfd with the events that the monitor needs. Since Linux 5.11 the userfaultfd is
/// restricted to user-mode faults (`UFFD_USER_MODE_ONLY`). Older kernels do not know this flag.
/// There the userfaultfd is opened without the flag.
///
/// # Errors
/// - PermissionDenied: a seccomp filter, a sysctl or a security module refuses the call.
/// - Unsupported: the kernel lacks userfaultfd or one of the events.
/// - OutOfResources: no fd or memory is left.
/// - Another kind: the kernel refuses the call for another reason. The error contains the errno.
pub(super) fn open() -> Result<OwnedFd> {
    let offered = UffdioApi { api: UFFD_API, features: 0, ioctls: 0 };
    // Each userfaultfd allows one handshake. So a first userfaultfd queries the features, and a
    // second one is opened with them.
    let offered = handshake(&new()?, offered)?.features;
    let missing: Vec<_> =
        NEEDED.iter().filter(|(bit, _)| offered & bit == 0).map(|(_, name)| *name).collect();
    if !missing.is_empty() {
        return Err(refused(ErrorKind::Unsupported, "ioctl(UFFDIO_API)")
            .context("missing", missing.join(","))
            .remedy(
                "use Linux 5.7 or newer (x86-64), or 6.10 or newer (aarch64), with \
                 CONFIG_HAVE_ARCH_USERFAULTFD_WP",
            ));
    }
    let features = NEEDED.iter().fold(offered & WP_HUGETLBFS_SHMEM, |all, (bit, _)| all | bit);
    let fd = new()?;
    handshake(&fd, UffdioApi { api: UFFD_API, features, ioctls: 0 })?;
    Ok(fd)
}

/// The maximum number of retries of a system call while the kernel returns EAGAIN or EINTR.
const RETRIES: u32 = 10;

/// Runs `call`, and retries while it returns EAGAIN or EINTR, for about 50 ms at most.
pub(super) fn persistent<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for retry in 0..RETRIES {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {
                // The pause doubles each time, starting with 50 µs.
                thread::sleep(Duration::from_micros(50 << retry));
            }
            answer => return answer,
        }
    }
    call()
}

fn handshake(fd: &OwnedFd, mut api: UffdioApi) -> Result<UffdioApi> {
    // SAFETY: the ioctl reads and writes one `UffdioApi`.
    persistent(|| unsafe { ioctl::ioctl(fd.as_fd(), Updater::<UFFDIO_API, _>::new(&mut api)) })
        .map_err(|errno| Error::os(errno, "ioctl(UFFDIO_API)").iface(IfaceKind::SYSTEM))?;
    Ok(api)
}

fn new() -> Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    let user_mode = flags | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
    // SAFETY: the call creates a new userfaultfd and touches no memory. Only functions of this
    // module use the fd.
    let made = |flags| persistent(|| unsafe { rustix::mm::userfaultfd(flags) });
    let mut call = made(user_mode);
    let before_user_mode = call.as_ref().is_err_and(|errno| *errno == Errno::INVAL);
    if before_user_mode {
        call = made(flags);
    }
    call.or_else(|errno| {
        let device =
            rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                // SAFETY: the file is `/dev/userfaultfd`, which implements this ioctl.
                .and_then(|device| unsafe {
                    ioctl::ioctl(device.as_fd(), NewUserfaultfd(user_mode.bits()))
                });
        device.map_err(|device| {
            let (kind, why, remedy) = cause(errno, before_user_mode, filtered());
            refused(kind, "userfaultfd")
                .errno(errno)
                .context("why", why)
                .context("/dev/userfaultfd", device)
                .remedy(remedy)
        })
    })
}

fn refused(kind: ErrorKind, operation: &'static str) -> Error {
    Error::new(kind, operation).iface(IfaceKind::SYSTEM).context("monitor", "userfaultfd")
}

/// Returns true if a seccomp filter is active in this process.
fn filtered() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| {
        line.split_once(':').is_some_and(|(name, mode)| name == "Seccomp" && mode.trim() == "2")
    })
}

/// Returns the error kind, the reason and the remedy if the kernel refuses to open a userfaultfd.
fn cause(
    errno: Errno,
    before_user_mode: bool,
    filtered: bool,
) -> (ErrorKind, &'static str, &'static str) {
    const ALLOW: &str = "allow `userfaultfd` in the container's seccomp profile (`docker run \
                         --security-opt seccomp=profile.json`), or pass --device=/dev/userfaultfd";
    match errno {
        Errno::PERM | Errno::ACCESS | Errno::NOSYS if filtered => {
            (ErrorKind::PermissionDenied, "a seccomp filter is active and refuses the call", ALLOW)
        }
        Errno::NOSYS => (
            ErrorKind::Unsupported,
            "the kernel was built without CONFIG_USERFAULTFD",
            "use a kernel with CONFIG_USERFAULTFD=y",
        ),
        Errno::PERM | Errno::ACCESS if before_user_mode => (
            ErrorKind::PermissionDenied,
            "the kernel is older than 5.11, where only the sysctl vm.unprivileged_userfaultfd or \
             CAP_SYS_PTRACE allows the call",
            "run `sysctl vm.unprivileged_userfaultfd=1`, or use a newer kernel",
        ),
        Errno::PERM | Errno::ACCESS => (
            ErrorKind::PermissionDenied,
            "a security module (SELinux, AppArmor) refuses the call",
            "allow the call in the policy, or give the process /dev/userfaultfd",
        ),
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => (
            ErrorKind::OutOfResources,
            "no file descriptor or memory is left",
            "raise the limit of open files (`ulimit -n`)",
        ),
        _ => (ErrorKind::Driver, "the kernel refuses the call", "use the memhooks monitor"),
    }
}

/// Starts watching a range of whole pages. No page is write-protected, so the kernel sends events
/// of changes but intercepts no page fault.
pub(super) fn register(fd: &OwnedFd, start: u64, len: u64) -> Result<(), Errno> {
    let mut register = UffdioRegister {
        range: UffdioRange { start, len },
        mode: UFFDIO_REGISTER_MODE_WP,
        ioctls: 0,
    };
    // SAFETY: the ioctl reads and writes one `UffdioRegister`, and changes no content of memory.
    persistent(|| unsafe {
        ioctl::ioctl(fd.as_fd(), Updater::<UFFDIO_REGISTER, _>::new(&mut register))
    })
}

/// Asks the kernel to populate a page as a first write does (`MADV_POPULATE_WRITE`, Linux 5.14),
/// without changing its bytes. Called before a part of a private mapping is watched.
///
/// Watching such a part splits the mapping. After the watch ends, the kernel merges the parts again
/// only if a page of the mapping was written before the split. If the kernel refuses the call of
/// `madvise`, the parts stay split and count towards the process's limit of mappings.
pub(super) fn touch(page: u64) {
    let at = std::ptr::with_exposed_provenance_mut(page as usize);
    // SAFETY: the kernel checks the address, and leaves the content as it is.
    if let Err(errno) = unsafe { rustix::mm::madvise(at, 1, Advice::LinuxPopulateWrite) } {
        tracing::trace!(%errno, page, "the page is not written before its range is watched");
    }
}

/// Stops watching a range of whole pages.
pub(super) fn unregister(fd: &OwnedFd, start: u64, len: u64) -> Result<(), Errno> {
    let mut range = UffdioRange { start, len };
    // SAFETY: the ioctl reads one `UffdioRange`.
    persistent(|| unsafe {
        ioctl::ioctl(fd.as_fd(), Updater::<UFFDIO_UNREGISTER, _>::new(&mut range))
    })
}

/// Returns true if a thread has changed watched memory and the event was not read yet.
///
/// While there is such an event, the kernel refuses each request to write-protect a range with
/// EAGAIN. So this function makes such a request. The range is empty, so the request changes
/// nothing.
pub(super) fn changes_under_way(fd: &OwnedFd) -> bool {
    let mut nothing = UffdioWriteprotect { range: UffdioRange { start: 0, len: 0 }, mode: 0 };
    // SAFETY: the ioctl reads one `UffdioWriteprotect`, and refuses its empty range.
    let answer =
        unsafe { ioctl::ioctl(fd.as_fd(), Updater::<UFFDIO_WRITEPROTECT, _>::new(&mut nothing)) };
    answer == Err(Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_layouts_are_those_of_the_kernel_header() {
        assert_eq!(
            [
                UFFDIO_API,
                UFFDIO_REGISTER,
                UFFDIO_UNREGISTER,
                UFFDIO_WRITEPROTECT,
                NewUserfaultfd(0).opcode()
            ],
            [0xc018_aa3f, 0xc020_aa00, 0x8010_aa01, 0xc018_aa06, 0xaa00]
        );
        assert_eq!(size_of::<UffdMessage>(), 32);
        assert_eq!(std::mem::offset_of!(UffdMessage, words), 8);
    }

    /// MON-02: if the kernel refuses to open a userfaultfd, the error names the cause: a seccomp
    /// filter, a sysctl, a security module, or a kernel without userfaultfd.
    #[test]
    fn a_refusal_names_kernel_sysctl_or_seccomp() {
        let (kind, why, remedy) = cause(Errno::PERM, false, true);
        assert_eq!(kind, ErrorKind::PermissionDenied);
        assert!(why.contains("seccomp") && remedy.contains("seccomp"), "{why}; {remedy}");
        let (_, why, _) = cause(Errno::NOSYS, false, true);
        assert!(why.contains("seccomp"), "filters answer ENOSYS too: {why}");
        let (kind, why, _) = cause(Errno::NOSYS, false, false);
        assert!(kind == ErrorKind::Unsupported && why.contains("CONFIG_USERFAULTFD"), "{why}");
        let (_, why, remedy) = cause(Errno::PERM, true, false);
        assert!(
            why.contains("vm.unprivileged_userfaultfd") && remedy.contains("=1"),
            "{why}; {remedy}"
        );
        let (_, why, _) = cause(Errno::PERM, false, false);
        assert!(why.contains("security module"), "{why}");
        assert_eq!(cause(Errno::MFILE, false, false).0, ErrorKind::OutOfResources);
    }
}
