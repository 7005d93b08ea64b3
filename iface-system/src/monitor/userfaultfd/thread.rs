//! The thread that reads events. It is process-wide state because the kernel's file is: whoever unmaps watched
//! memory waits until this thread has read the event.
//!
//! For the same reason it must never wait for such a thread: while it runs it allocates nothing, frees nothing,
//! takes no lock and handles no signal. It says what went wrong when it has ended.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use hmem_core::{Error, IfaceKind, Result, monitor::Cause};
use hmem_hook::{HasTable, Subscribers, Table, Wipeable, clamped};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use super::sys::{self, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP, Message};

/// Moved mappings that are remembered until somebody can stop watching them.
const MOVED: usize = 64;

/// What the thread shares with the rest of the process.
#[repr(C)]
pub(super) struct Shared {
    pub(super) table: Table,
    /// The errno that ended the thread.
    failed: AtomicU32,
    /// Where mremap moved watched memory to: start and length. The kernel goes on watching it there.
    moved: [[AtomicU64; 2]; MOVED],
    moved_count: AtomicU32,
    taken_count: AtomicU32,
}

// SAFETY: zeroes are an empty table, no failure and nothing moved; all is shared by atomics alone.
unsafe impl Wipeable for Shared {}

impl HasTable for Shared {
    #[inline]
    fn table(&self) -> &Table {
        &self.table
    }
}

impl Shared {
    pub(super) fn failure(&self) -> Option<Errno> {
        match self.failed.load(Ordering::Acquire) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno as i32)),
        }
    }

    /// Remembers a move; one too many is forgotten, and its events cost time and no more.
    fn moved(&self, start: u64, len: u64) {
        let count = self.moved_count.load(Ordering::Relaxed);
        if count.wrapping_sub(self.taken_count.load(Ordering::Acquire)) < MOVED as u32 {
            let [at, bytes] = &self.moved[count as usize % MOVED];
            at.store(start, Ordering::Relaxed);
            bytes.store(len, Ordering::Relaxed);
            self.moved_count.store(count.wrapping_add(1), Ordering::Release);
        }
    }

    /// One move that was remembered. Callers hold a lock.
    pub(super) fn take_moved(&self) -> Option<(u64, u64)> {
        let taken = self.taken_count.load(Ordering::Relaxed);
        if taken == self.moved_count.load(Ordering::Acquire) {
            return None;
        }
        let [at, bytes] = &self.moved[taken as usize % MOVED];
        let moved = (at.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
        self.taken_count.store(taken.wrapping_add(1), Ordering::Release);
        Some(moved)
    }
}

/// What the thread needs.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) events: OwnedFd,
    pub(super) stop: OwnedFd,
    pub(super) subscribers: Subscribers<Shared>,
}

/// Starts the thread, with every signal blocked: a handler of the application that unmapped watched memory here
/// would wait for itself.
pub(super) fn start(watched: &Arc<Watched>) -> Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set, and changes the mask of this thread only, which the new one inherits.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let watched = Arc::clone(watched);
    let thread = std::thread::Builder::new().name("hmem-userfaultfd".into()).spawn(move || {
        if let Err(errno) = run(&watched) {
            tracing::error!(%errno, "the userfaultfd monitor cannot go on: nothing it watches is found in a cache any more");
        }
    });
    // SAFETY: the mask was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    thread.map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
        Error::os(errno, "start thread").iface(IfaceKind::SYSTEM).context("monitor", "userfaultfd")
    })
}

fn run(watched: &Watched) -> Result<(), Errno> {
    let shared = watched.subscribers.shared();
    let mut messages = [Message::default(); 16];
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(watched.events.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(watched.stop.as_fd(), PollFlags::IN),
        ];
        let polled = match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            Err(errno) => Err(errno),
            Ok(_) => Ok(()),
        };
        let [events, stop] = fds.map(|fd| fd.revents());
        if !stop.is_empty() {
            return Ok(());
        }
        // From here until everybody is told, no lookup hits: who unmapped goes on as soon as the event is read.
        let pass = shared.table.pass();
        pass.each(|_, invalidator| invalidator.close_gate());
        let told = polled.and_then(|()| {
            if events.intersects(PollFlags::IN) {
                tell(watched, &pass, &mut messages)
            } else {
                Err(Errno::BADF)
            }
        });
        if let Err(errno) = told {
            // The gates stay closed: what is cached can no longer be trusted.
            shared.failed.store(errno.raw_os_error() as u32, Ordering::Release);
            return Err(errno);
        }
        pass.each(|_, invalidator| invalidator.open_gate());
    }
}

fn tell(
    watched: &Watched,
    pass: &hmem_hook::Pass<'_>,
    messages: &mut [Message; 16],
) -> Result<(), Errno> {
    let messages = match sys::read(&watched.events, messages) {
        Ok(messages) => messages,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    for message in messages {
        let [first, second, third] = message.words;
        let (range, cause) = match message.event() {
            EVENT_UNMAP => (clamped(first, second.saturating_sub(first)), Cause::Unmap),
            EVENT_REMOVE => (clamped(first, second.saturating_sub(first)), Cause::Discard),
            EVENT_REMAP => {
                watched.subscribers.shared().moved(second, third);
                (clamped(first, third), Cause::Remap)
            }
            // No other event was asked for.
            _ => continue,
        };
        pass.each(|_, invalidator| invalidator.invalidate(range, cause));
    }
    Ok(())
}
