//! Helpers for tests of monitors: a recorder of notifications, memory to change, and cases. Each
//! case runs in a process of its own, so that a crash is a failure of that case.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    env,
    process::{self, Command, ExitCode},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    Address, AddressRange,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor, TokenIssuer},
};
use hmem_iface_system::monitor::UserFaultFd;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// A test case: its name, its function, and true if only the slow tier of the CI runs it.
pub type Case = (&'static str, fn(), bool);

const CASE: &str = "HMEM_TEST_CASE";

/// The exit status of a case that cannot run on this machine, and that printed the reason.
const SKIPPED: i32 = 77;

/// The main function of a test binary: runs each case as a test in a new process.
pub fn run(cases: &[Case]) -> ExitCode {
    if let Ok(name) = env::var(CASE) {
        let (_, case, _) = cases.iter().find(|(case, ..)| *case == name).expect("a known case");
        // The kernel kills a process that hangs, which counts as a failure. SAFETY: the call only
        // sets a timer of this process.
        unsafe { libc::alarm(300) };
        case();
        return ExitCode::SUCCESS;
    }
    let trials = cases.iter().map(|&(name, _, slow)| {
        Trial::ignorable_test(name, move || {
            let own = env::current_exe().map_err(Failed::from)?;
            let output = Command::new(own).env(CASE, name).output().map_err(Failed::from)?;
            match output.status.code() {
                Some(0) => return Ok(Completion::Completed),
                Some(SKIPPED) => {
                    let reason = String::from_utf8_lossy(&output.stdout).into_owned();
                    return Ok(Completion::ignored_with(reason));
                }
                _ => {}
            }
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{}\n{}{said}", output.status, String::from_utf8_lossy(&output.stdout))
                .into())
        })
        .with_ignored_flag(slow)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// Declares the cases of a test binary, and its main function. The doc comment of a case lists its
/// requirement ids.
#[macro_export]
macro_rules! cases {
    (
        $($(#[$meta:meta])* $name:ident),* $(,)? ;
        slow: $($(#[$slow_meta:meta])* $slow:ident),* $(,)?
    ) => {
        fn main() -> std::process::ExitCode {
            monitors::run(&[
                $((stringify!($name), $name, false),)*
                $((stringify!($slow), $slow, true),)*
            ])
        }
    };
}

/// The method of [`Invalidator`] that a monitor called for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Invalidated,
    Begun,
    Ended,
}

const EVENTS: usize = 1 << 16;

/// An invalidator that records notifications. As for every invalidator, its methods do not
/// allocate, lock or log.
pub struct Recorder {
    issuer: TokenIssuer,
    events: Box<[[AtomicU64; 3]]>,
    count: AtomicUsize,
    pub gates: AtomicI64,
    pub closings: AtomicU64,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.events()).finish()
    }
}

impl Recorder {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            events: (0..EVENTS).map(|_| [const { AtomicU64::new(0) }; 3]).collect(),
            count: AtomicUsize::new(0),
            gates: AtomicI64::new(0),
            closings: AtomicU64::new(0),
            issuer: TokenIssuer::new(),
        })
    }

    fn push(&self, range: AddressRange, cause: InvalidationCause, how: How) -> usize {
        let at = self.count.fetch_add(1, SeqCst) % EVENTS;
        let [start, len, kind] = &self.events[at];
        start.store(range.start().0, SeqCst);
        len.store(range.len(), SeqCst);
        kind.store(1 + (cause as u64) * 3 + how as u64, SeqCst);
        at
    }

    pub fn count(&self) -> usize {
        self.count.load(SeqCst)
    }

    pub fn events(&self) -> Vec<(AddressRange, InvalidationCause, How)> {
        self.events
            .iter()
            .take(self.count().min(EVENTS))
            .filter_map(|event| self.event(event))
            .collect()
    }

    fn event(
        &self,
        [start, len, kind]: &[AtomicU64; 3],
    ) -> Option<(AddressRange, InvalidationCause, How)> {
        let kind = kind.load(SeqCst).checked_sub(1)?;
        let range = AddressRange::new(Address(start.load(SeqCst)), len.load(SeqCst)).unwrap();
        let how = [How::Invalidated, How::Begun, How::Ended][kind as usize % 3];
        Some((range, InvalidationCause::ALL[kind as usize / 3], how))
    }

    pub fn clear(&self) {
        self.count.store(0, SeqCst);
    }

    /// Returns the recorded notifications for memory that overlaps `range`.
    pub fn about(&self, range: AddressRange) -> Vec<(InvalidationCause, How)> {
        let mut about = self.events();
        about.retain(|(told, ..)| told.overlaps(range));
        about.into_iter().map(|(_, cause, how)| (cause, how)).collect()
    }
}

impl Invalidator for Recorder {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        self.push(range, cause, How::Invalidated);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        InvalidationToken::new(&self.issuer, self.push(range, cause, How::Begun) as u64)
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        let at = change.redeem(&self.issuer).expect("a token of this recorder");
        if let Some((range, cause, how)) = self.event(&self.events[at as usize]) {
            assert_eq!(how, How::Begun, "a change ends once");
            self.push(range, cause, How::Ended);
        }
    }

    fn close_gate(&self) -> GateToken {
        self.gates.fetch_add(1, SeqCst);
        self.closings.fetch_add(1, SeqCst);
        GateToken::new(&self.issuer)
    }

    fn open_gate(&self, closed: GateToken) {
        assert!(closed.redeem(&self.issuer), "a token of this recorder");
        self.gates.fetch_sub(1, SeqCst);
    }
}

pub fn page() -> usize {
    rustix::param::page_size()
}

pub fn range(at: *mut libc::c_void, len: usize) -> AddressRange {
    AddressRange::new(Address::of_ptr(at), len as u64).unwrap()
}

/// Maps anonymous memory by the C library, and writes to every page. The caller unmaps the memory.
pub fn map(len: usize) -> *mut libc::c_void {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other. It is `len`
    // bytes long.
    unsafe {
        let at = libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().write_bytes(1, len);
        at
    }
}

/// Unmaps memory of the test by the C library's `munmap`, which memhooks see.
pub fn unmap(at: *mut libc::c_void, len: usize) {
    // SAFETY: tests pass only memory that they have mapped and no longer use.
    assert_eq!(unsafe { libc::munmap(at, len) }, 0);
}

/// Unmaps memory of the test by a raw system call, which memhooks do not see.
pub fn raw_unmap(at: *mut libc::c_void, len: usize) {
    // SAFETY: tests pass only memory that they have mapped and no longer use.
    assert_eq!(unsafe { libc::syscall(libc::SYS_munmap, at, len) }, 0);
}

/// Runs `call` on a new thread while a request to cancel that thread is pending. The request takes
/// effect at the first cancellation point (`pthreads(7)`) in `call`, which ends the process. After
/// `call`, the request has no effect any more.
pub fn with_pending_cancellation(call: impl FnOnce() + Send) {
    const PTHREAD_CANCEL_DISABLE: i32 = 1;
    // SAFETY: the type is that of the C library's function.
    unsafe extern "C" {
        fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
    }
    let run = || {
        // SAFETY: the request takes effect at a cancellation point only. Rust then ends the
        // process instead of unwinding.
        assert_eq!(unsafe { libc::pthread_cancel(libc::pthread_self()) }, 0);
        call();
        // SAFETY: the call only changes the state of this thread, and may get a null pointer.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, ptr::null_mut()) };
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
}

/// Runs `child` in a forked process, and returns the exit status of that process.
pub fn forked(child: impl FnOnce()) -> i32 {
    // SAFETY: the child only runs `child`, which tests the use of monitors after a fork, and exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        // SAFETY: the call only sets a timer, which kills the child in case of a deadlock.
        unsafe { libc::alarm(60) };
        child();
        // SAFETY: the call ends the child without running the parent's destructors.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: the call waits for the new child, and writes only `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// Calls `userfaultfd(2)` for faults of user mode. Ends the case as skipped if the call fails.
fn userfaultfd() -> i32 {
    // SAFETY: the call only returns a new fd.
    let fd =
        unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1) };
    if fd < 0 {
        print!("userfaultfd: {}", std::io::Error::last_os_error());
        process::exit(SKIPPED);
    }
    fd as i32
}

/// Ends the case as skipped if this process cannot use userfaultfd.
pub fn need_userfaultfd() {
    // SAFETY: the fd is new, and nothing else uses it.
    unsafe { libc::close(userfaultfd()) };
}

/// Starts the monitor userfaultfd. Ends the case as skipped if this process cannot use userfaultfd.
pub fn start_userfaultfd() -> Arc<UserFaultFd> {
    need_userfaultfd();
    UserFaultFd::start().unwrap()
}

/// A userfaultfd that watches a mapping of the test. A thread that unmaps the mapping is blocked
/// until the test calls [`Blocker::release`].
pub struct Blocker(i32);

impl Blocker {
    /// Watches `len` bytes at `at` with a new userfaultfd. Ends the case as skipped if the machine
    /// has no userfaultfd.
    pub fn new(at: *mut libc::c_void, len: usize) -> Self {
        const EVENT_UNMAP: u64 = 1 << 6;
        const MODE_MISSING: u64 = 1;
        // SAFETY: the ioctls are those of the new fd, the arrays have the layout of
        // linux/userfaultfd.h, and the mapping belongs to the test.
        unsafe {
            let fd = userfaultfd();
            let mut api = [0xaa_u64, EVENT_UNMAP, 0];
            assert_eq!(libc::ioctl(fd, 0xc018_aa3f, api.as_mut_ptr()), 0);
            let mut register = [at.addr() as u64, len as u64, MODE_MISSING, 0];
            assert_eq!(libc::ioctl(fd, 0xc020_aa00, register.as_mut_ptr()), 0);
            Self(fd)
        }
    }

    /// Waits until a thread is blocked in `munmap` of the mapping. The thread stays blocked.
    pub fn wait(&self) {
        let mut poll = libc::pollfd { fd: self.0, events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is an array of one element.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
    }

    /// Reads the event of the `munmap`, which lets the blocked thread continue. Panics if no thread
    /// is blocked.
    pub fn release(&self) {
        let mut message = [0_u64; 4];
        // SAFETY: `message` has the 32 bytes of one event.
        assert_eq!(unsafe { libc::read(self.0, message.as_mut_ptr().cast(), 32) }, 32);
    }
}

impl Drop for Blocker {
    fn drop(&mut self) {
        // SAFETY: the value owns the fd.
        unsafe { libc::close(self.0) };
    }
}

/// Subscribes one page, and maps and unmaps 80,000 other pages, one after the other. Returns the
/// number of notifications. Panics if the memory use grows during the second 40,000.
pub fn notifications_of_uncached_unmaps(monitor: &dyn Monitor) -> usize {
    let page = page();
    let kept = map(page);
    let recorder = Recorder::new();
    let subscription =
        monitor.subscribe(range(kept, page), Arc::<Recorder>::clone(&recorder)).unwrap();
    let round = || (0..40_000).for_each(|_| unmap(map(page), page));
    round();
    let before = resident();
    round();
    let grown = resident().saturating_sub(before);
    assert!(grown < 512 << 10, "grown by {grown} bytes");
    monitor.unsubscribe(subscription);
    recorder.count()
}

/// Returns the resident anonymous memory of this process in bytes. Pages of files, such as code, do
/// not count.
pub fn resident() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").expect("/proc");
    let anonymous =
        rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("such a line");
    anonymous.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number of kB") << 10
}
