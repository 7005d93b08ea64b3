//! Starts a program under a seccomp filter: `hmem-deny-calls SET PROGRAM [ARGUMENT...]`.
//!
//! `SET` is `container`, for calls that Docker's default filter refuses, or `old-kernel`, for calls
//! that a kernel lacks that is old or was built without options.

use std::{collections::BTreeMap, env, os::unix::process::CommandExt, process::Command};

use libc::c_long;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

/// Calls that Docker's default filter refuses with EPERM to a process without capabilities, as its
/// documentation lists them, without those that this library and its tests never make.
const CONTAINER: &[c_long] = &[
    libc::SYS_bpf,
    libc::SYS_get_mempolicy,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_keyctl,
    libc::SYS_mbind,
    libc::SYS_mount,
    libc::SYS_move_pages,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_set_mempolicy,
    libc::SYS_setns,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// Calls that a kernel may have been built without, or may be too old for.
const OLD_KERNEL: &[c_long] = &[
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_process_madvise,
    libc::SYS_userfaultfd,
];

fn refuse(calls: &[c_long], errno: i32) -> BpfProgram {
    let rules: BTreeMap<i64, _> = calls.iter().map(|call| (*call, Vec::new())).collect();
    let arch = TargetArch::try_from(env::consts::ARCH).expect("an architecture with seccomp");
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno as u32), arch)
        .and_then(BpfProgram::try_from)
        .expect("a filter of fixed calls")
}

fn main() {
    let mut arguments = env::args_os().skip(1);
    let set = arguments.next().expect("a set of calls");
    let filter = match set.to_str() {
        Some("container") => refuse(CONTAINER, libc::EPERM),
        Some("old-kernel") => refuse(OLD_KERNEL, libc::ENOSYS),
        _ => panic!("{} is neither container nor old-kernel", set.display()),
    };
    let program = arguments.next().expect("a program");
    apply_filter(&filter).expect("seccomp");
    let error = Command::new(&program).args(arguments).exec();
    panic!("cannot start {}: {error}", program.display());
}
