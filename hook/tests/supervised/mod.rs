//! Runs code on a new thread. The calling thread decides the results of the new thread's system
//! calls of one kind, through a seccomp filter with a listener.

use std::{
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::mpsc,
    thread,
};

/// Runs `act` on a new thread, and lets `answer` decide the result of each system call with number
/// `number` on that thread.
///
/// Each of these calls waits while `answer` runs with the first argument of the call. If `answer`
/// returns an errno, the call fails with it. If `answer` returns `None`, the call continues.
pub(crate) fn run<R: Send>(
    number: libc::c_long,
    mut answer: impl FnMut(u64) -> Option<i32>,
    act: impl FnOnce() -> R + Send,
) -> R {
    let (send, receive) = mpsc::channel();
    thread::scope(|scope| {
        let supervised = scope.spawn(move || {
            send.send(filter(number)).expect("a supervisor");
            act()
        });
        let listener = receive.recv().expect("a filter");
        while !supervised.is_finished() {
            answer_one(&listener, &mut answer);
        }
        supervised.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Installs a filter for this thread and the threads that it starts. Each system call with number
/// `number` then waits for an answer through the returned listener.
fn filter(number: libc::c_long) -> OwnedFd {
    let instruction = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let filter = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            jf: 1,
            ..instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number as u32)
        },
        instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF),
        instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the calls restrict this thread only, and the listener is a new file.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
        let listener = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        assert!(listener >= 0, "seccomp: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(listener as i32)
    }
}

/// Answers the next waiting call. Returns without an answer if no call arrives in 10 ms.
fn answer_one(listener: &OwnedFd, answer: &mut impl FnMut(u64) -> Option<i32>) {
    let file = listener.as_raw_fd();
    let mut poll = libc::pollfd { fd: file, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is that of one `pollfd`, which outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 10) };
    if poll.revents & libc::POLLIN == 0 {
        return;
    }
    // SAFETY: all-zero bytes are a valid value, and the kernel requires them.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills the structure.
    if unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } != 0 {
        return;
    }
    let answer = answer(call.data.args[0]);
    let mut response = libc::seccomp_notif_resp {
        id: call.id,
        val: 0,
        error: -answer.unwrap_or(0),
        flags: if answer.is_none() { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 } else { 0 },
    };
    // SAFETY: the call reads the structure.
    let sent = unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) };
    assert_eq!(sent, 0, "seccomp: {}", std::io::Error::last_os_error());
}
