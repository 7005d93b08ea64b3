//! The thread of the userfaultfd monitor that reads events. The kernel makes a thread that unmaps
//! watched memory wait until this thread has read the event.
//!
//! So this thread must never wait for another thread. While it reads events, it allocates nothing,
//! frees nothing, takes no lock and handles no signal. It logs a failure only after its last read.

#![allow(unsafe_code, reason = "the state of the monitor's thread, and its signal mask")]

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
};

use hmem_core::{
    AddressRange, Error, IfaceKind, Result, Wipeable,
    monitor::{GateToken, InvalidationCause},
};
use hmem_hook::{HasTable, SLOTS, SubscriberTable, Subscribers, clamped};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use super::{
    super::memhooks,
    range_queue::RangeQueue,
    sys::{self, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP, UffdMessage},
};

/// Capacity of the queue [`UffdState::moved`]. The threads that subscribe and unsubscribe take
/// ranges from the queue, and stop watching them.
const MOVED: usize = 64;

/// Capacity of the queue [`UffdState::discarded`]. The threads that subscribe take ranges from the
/// queue.
const DISCARDED: usize = 256;

/// The state that the thread that reads events shares with the monitor's other threads. The kernel
/// zeroes it in a forked child.
#[repr(C)]
pub(super) struct UffdState {
    pub(super) table: SubscriberTable,
    /// The errno that ended the thread that reads events, or 0 while it works.
    failed: AtomicU32,
    /// True if a discard ([`EVENT_REMOVE`]) was lost because the queue `discarded` was full. The
    /// monitor resets the flag when it empties the queue.
    lost_discards: AtomicBool,
    /// The queue of ranges to which `mremap` has moved watched memory. The kernel continues to
    /// watch moved memory until a thread takes the range from the queue and stops watching it.
    /// Ranges that do not fit into the queue are watched for as long as they are mapped.
    pub(super) moved: RangeQueue<MOVED>,
    /// The queue of the ranges of reported discards ([`EVENT_REMOVE`]), whose `madvise` calls may
    /// still be in progress. Discards of announced calls are not in the queue, since the hooks
    /// report these.
    pub(super) discarded: RangeQueue<DISCARDED>,
}

// SAFETY: zeroes are a valid state (an empty table, no failure, no moves, no discards), and threads
// share atomics only.
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

    /// Returns true if the queue `discarded` is empty, and has lost no discard since it was last
    /// emptied.
    pub(super) fn no_discards(&self) -> bool {
        self.discarded.is_empty() && !self.lost_discards.load(Ordering::Acquire)
    }

    /// Returns true if discards were lost because the queue `discarded` was full. Resets
    /// `lost_discards`.
    pub(super) fn take_lost_discards(&self) -> bool {
        self.lost_discards.swap(false, Ordering::AcqRel)
    }

    fn discarded(&self, range: AddressRange) {
        if !self.discarded.push(range.start().0, range.len()) {
            self.lost_discards.store(true, Ordering::Release);
        }
    }
}

/// The fds and subscribers that are shared by the monitor and its thread that reads events.
#[derive(Debug)]
pub(super) struct Watched {
    /// The userfaultfd, whose events the thread reads.
    pub(super) events: OwnedFd,
    /// An eventfd. A write to it stops the thread that reads events.
    pub(super) stop: OwnedFd,
    pub(super) subscribers: Subscribers<UffdState>,
    /// True if memhooks also notify the subscribers of this monitor, before and after each hooked
    /// call of the C library.
    pub(super) beneath_hooks: AtomicBool,
}

/// Starts the thread that reads events. The thread blocks every signal. If a signal handler on this
/// thread unmapped watched memory, the handler would wait for the event to be read, which only this
/// thread can do.
pub(super) fn start(watched: &Arc<Watched>) -> Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the calls fill the signal set, and change the mask of the calling thread only. The
    // new thread inherits the mask.
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
                    "the userfaultfd monitor has failed: caches that use it return no more hits"
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
    let mut messages = [UffdMessage::default(); 16];
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
        // A hooked `madvise` waits until this guard is dropped. So the hooked call that caused an
        // event below returns only after the subscribers' lookups can hit again.
        let beneath_hooks = watched.beneath_hooks.load(Ordering::Relaxed);
        let _reading = beneath_hooks.then(memhooks::reading_discards);
        // From here until every subscriber is notified, no lookup hits: the thread that unmapped
        // continues as soon as the event is read.
        let pass = shared.table.pass();
        let mut closed = [const { None::<GateToken> }; SLOTS];
        pass.each(|slot, invalidator| closed[slot] = Some(invalidator.close_gate()));
        let notified = polled.and_then(|()| {
            if events.intersects(PollFlags::IN) {
                notify(watched, beneath_hooks, &pass, &mut messages)
            } else {
                Err(Errno::BADF)
            }
        });
        if let Err(errno) = notified {
            // Lookups stay disabled by the closed gates, because cached registrations can no longer
            // be trusted.
            shared.failed.store(errno.raw_os_error() as u32, Ordering::Release);
            return Err(errno);
        }
        pass.each(|slot, invalidator| {
            if let Some(closed) = closed[slot].take() {
                invalidator.open_gate(closed);
            }
        });
    }
}

fn notify(
    watched: &Watched,
    beneath_hooks: bool,
    pass: &hmem_hook::TableReadGuard<'_>,
    messages: &mut [UffdMessage; 16],
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
                // The discard is queued before subscribers are notified, so that later
                // registrations find it.
                let hooked = beneath_hooks && memhooks::is_hooked_discard(first, second);
                if !hooked {
                    watched.subscribers.shared().discarded(range);
                }
                (range, InvalidationCause::Discard)
            }
            EVENT_REMAP => {
                // If the queue is full, the kernel still watches the range, and its events only
                // cost time.
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
