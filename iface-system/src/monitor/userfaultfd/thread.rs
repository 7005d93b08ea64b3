//! The thread that reads events. The kernel makes a thread that unmaps watched memory wait until
//! this thread has read the event.
//!
//! So this thread must never wait for another thread. While it runs, it allocates nothing, frees
//! nothing, takes no lock and handles no signal. It logs a failure only when it has ended.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
};

use hmem_core::{AddressRange, Error, IfaceKind, Result, monitor::InvalidationCause};
use hmem_hook::{HasTable, SubscriberTable, Subscribers, Wipeable, clamped};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use super::{
    super::memhooks,
    ring::Ring,
    sys::{self, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP, Message},
};

/// The maximum number of moved ranges that are recorded until another thread stops watching them.
const MOVED: usize = 64;

/// The maximum number of discards that are recorded until another thread checks if their calls have
/// returned.
const DISCARDED: usize = 256;

/// The state that the thread shares with the rest of the process.
#[repr(C)]
pub(super) struct UffdState {
    pub(super) table: SubscriberTable,
    /// The errno that ended the thread.
    failed: AtomicU32,
    /// Set if more discards were reported than `discarded` has room for.
    lost_discards: AtomicBool,
    /// The ranges to which mremap moved watched memory. The kernel still watches them.
    pub(super) moved: Ring<MOVED>,
    /// The ranges that `madvise` discards or is about to discard.
    pub(super) discarded: Ring<DISCARDED>,
}

// SAFETY: zeroes are an empty table, no failure, no moves and no discards; threads share atomics
// only.
unsafe impl Wipeable for UffdState {}

impl HasTable for UffdState {
    #[inline]
    fn table(&self) -> &SubscriberTable {
        &self.table
    }
}

impl UffdState {
    pub(super) fn failure(&self) -> Option<Errno> {
        match self.failed.load(Ordering::Acquire) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno as i32)),
        }
    }

    /// Returns true if every reported discard was removed from the queue.
    pub(super) fn no_discards(&self) -> bool {
        self.discarded.is_empty() && !self.lost_discards.load(Ordering::Acquire)
    }

    /// Returns true if discards were lost because `discarded` was full, and resets this flag.
    pub(super) fn take_lost_discards(&self) -> bool {
        self.lost_discards.swap(false, Ordering::AcqRel)
    }

    fn discarded(&self, range: AddressRange) {
        if !self.discarded.push(range.start().0, range.len()) {
            self.lost_discards.store(true, Ordering::Release);
        }
    }
}

/// The inputs of the thread, which it shares with the monitor.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) events: OwnedFd,
    pub(super) stop: OwnedFd,
    pub(super) subscribers: Subscribers<UffdState>,
    /// Set if memhooks notify the same subscribers, before and after each call of the C library.
    pub(super) beneath_hooks: AtomicBool,
}

/// Starts the thread with every signal blocked: a signal handler that unmaps watched memory on this
/// thread would wait for the thread itself.
pub(super) fn start(watched: &Arc<Watched>) -> Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set, and changes the mask of this thread only, which the new one inherits.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let spawn = || {
        let watched = Arc::clone(watched);
        let thread = std::thread::Builder::new().name("hmem-userfaultfd".into());
        let thread = thread.spawn(move || {
            if let Err(errno) = run(&watched) {
                tracing::error!(
                    %errno,
                    "the userfaultfd monitor has failed: no memory that it watches is found in a \
                     cache any more"
                );
            }
        });
        thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
    };
    let thread = sys::persistent(spawn);
    // SAFETY: the first call of pthread_sigmask filled the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    thread.map_err(|errno| {
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
            // EAGAIN: the kernel has no memory for the call at this moment.
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(errno) => Err(errno),
            Ok(_) => Ok(()),
        };
        let [events, stop] = fds.map(|fd| fd.revents());
        if !stop.is_empty() {
            return Ok(());
        }
        // A hooked discard whose event is read here returns after the gates are open again.
        let beneath_hooks = watched.beneath_hooks.load(Ordering::Relaxed);
        let _reading = beneath_hooks.then(memhooks::reading_discards);
        // From here until every subscriber is notified, no lookup hits: the thread that unmapped
        // continues as soon as the event is read.
        let pass = shared.table.pass();
        pass.each(|_, invalidator| invalidator.close_gate());
        let notified = polled.and_then(|()| {
            if events.intersects(PollFlags::IN) {
                notify(watched, beneath_hooks, &pass, &mut messages)
            } else {
                Err(Errno::BADF)
            }
        });
        if let Err(errno) = notified {
            // The gates stay closed, because cached registrations can no longer be trusted.
            shared.failed.store(errno.raw_os_error() as u32, Ordering::Release);
            return Err(errno);
        }
        pass.each(|_, invalidator| invalidator.open_gate());
    }
}

fn notify(
    watched: &Watched,
    beneath_hooks: bool,
    pass: &hmem_hook::TableReadGuard<'_>,
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
            EVENT_UNMAP => (clamped(first, second.saturating_sub(first)), InvalidationCause::Unmap),
            EVENT_REMOVE => {
                let range = clamped(first, second.saturating_sub(first));
                // Recorded before subscribers are notified, so that later registrations find it.
                let hooked = beneath_hooks && memhooks::is_hooked_discard(first, second);
                if !hooked {
                    watched.subscribers.shared().discarded(range);
                }
                (range, InvalidationCause::Discard)
            }
            EVENT_REMAP => {
                // If the queue is full, the range stays watched, and its events only cost time.
                watched.subscribers.shared().moved.push(second, third);
                (clamped(first, third), InvalidationCause::Remap)
            }
            // The monitor asked for no other event.
            _ => continue,
        };
        pass.each(|_, invalidator| invalidator.invalidate(range, cause));
    }
    Ok(())
}
