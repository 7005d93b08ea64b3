//! Announcements of discards by the C library's `madvise`, for userfaultfd when it runs together
//! with memhooks.
//!
//! # Purpose
//! The kernel sends an event for each discard before it frees the pages. The event does not name
//! the calling thread, so its reader does not know when the pages are gone. After the event of a
//! raw system call, the range must therefore stay uncached for some time. After the event of a
//! hooked call, it need not: the hook itself notifies subscribers when the call has returned.
//!
//! So the hooks *announce* each call before it starts. An event that fits an announced call belongs
//! to that call. All other events belong to raw calls.
//!
//! # Matching of events
//! A call raises at most one event for each address, in ascending order. So an announced call
//! accounts for one event of each address. Any further event belongs to a raw call. A call whose
//! advice raises no event (MADV_GUARD_INSTALL) is not announced, because it would account for the
//! event of a raw call.
//!
//! # A discard that is missed
//! Suppose that a raw call discards pages of an announced call's range, and its event comes first.
//! The event then counts as that of the announced call. The hook keeps the range uncached until the
//! announced call returns, which is after its own event was read. That second event counts as the
//! event of a raw call, so the range stays uncached as the raw call needs it.
//!
//! The announced call may raise no event: it may fail, or userfaultfd may have stopped watching the
//! range after the event of the raw call. The discard of the raw call is then missed. This needs
//! two threads that discard the same pages at the same moment, one of them by a raw call.
//!
//! # The end of an announcement
//! The kernel lets the calling thread continue once its event is read. The reading thread may not
//! yet have compared the event with the announcements. An announcement that ended before that would
//! make the event look like that of a raw call, and the range would stay uncached needlessly. So a
//! call ends its announcement only when all threads that began to read before its return have
//! finished comparing ([`Announced::reading`]).

#![allow(unsafe_code, reason = "sleeps by a system call, since a hook must not call std")]

use std::{
    sync::atomic::{
        AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    time::Duration,
};

use super::cancellation::without_cancellation;

/// The maximum number of calls of `madvise` that can be announced at the same time. The events of
/// further calls are treated like those of raw system calls.
const CALLS: usize = 32;

/// The factor of the use count in [`AnnouncedCall::word`]. It exceeds every phase: 0 for a free
/// slot, [`WRITING`] and [`ANNOUNCED`].
const PHASES: u64 = 4;
const WRITING: u64 = 1;
const ANNOUNCED: u64 = 2;

/// A slot for one announced call.
#[derive(Debug)]
struct AnnouncedCall {
    /// The number of uses of this slot, and its current phase: `PHASES * uses + phase`.
    word: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    /// End of the part of `start..end` whose events have been read. The kernel reports a call's
    /// range in ascending order, so one address is enough.
    read: AtomicU64,
}

/// Length of one pause in [`Announced::retract`], which waits for the threads that read events.
const PAUSE: Duration = Duration::from_micros(20);

/// Maximum number of pauses in [`Announced::retract`]. If a thread compares the call's event after
/// that, the event may count as that of a raw system call.
const PAUSES: u32 = 5_000;

/// The hooked calls that are announced at the moment. All zeroes mean that no call is announced,
/// and that no thread reads events.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Announced {
    calls: [AnnouncedCall; CALLS],
    /// Number of times that a thread has begun to read userfaultfd events.
    begun: AtomicU64,
    /// Number of times that a thread has finished comparing the events with the announcements.
    compared: AtomicU64,
}

/// A guard that a thread holds while it reads userfaultfd events and compares them with the
/// announcements.
#[derive(Debug)]
pub(in super::super) struct Reading(&'static AtomicU64);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Announced {
    /// Marks the calling thread as one that reads userfaultfd events, until the thread drops the
    /// returned guard. [`Announced::retract`] waits for such threads.
    pub(super) fn reading(&'static self) -> Reading {
        self.begun.fetch_add(1, SeqCst);
        Reading(&self.compared)
    }

    /// Announces a call of `madvise` that is about to discard `start..end`. Returns the index of
    /// the call's slot, or `None` if all slots are in use. After `madvise` has returned, the hook
    /// passes the index to [`Announced::retract`].
    pub(super) fn announce(&self, start: u64, end: u64) -> Option<usize> {
        let slot = self.calls.iter().position(|call| {
            let word = call.word.load(Relaxed);
            word.is_multiple_of(PHASES)
                && call.word.compare_exchange(word, word + WRITING, SeqCst, Relaxed).is_ok()
        })?;
        let call = &self.calls[slot];
        call.start.store(start, SeqCst);
        call.end.store(end, SeqCst);
        call.read.store(start, SeqCst);
        call.word.fetch_add(ANNOUNCED - WRITING, SeqCst);
        Some(slot)
    }

    /// Ends the announcement of a call that has returned. First waits until the threads that were
    /// reading events have compared these with the announcement, but at most for [`PAUSES`] pauses.
    /// May change `errno`.
    pub(super) fn retract(&self, slot: usize) {
        let begun = self.begun.load(SeqCst);
        // A thread that reads events waits for no other thread, so the loop ends early unless that
        // thread gets no CPU time. In a child that was forked during the call, the kernel has
        // zeroed both counters, so the child does not wait.
        for _ in 0..PAUSES {
            if self.compared.load(SeqCst) >= begun {
                break;
            }
            let pause = libc::timespec { tv_sec: 0, tv_nsec: PAUSE.as_nanos() as libc::c_long };
            // SAFETY: nanosleep reads the time, and writes nothing without a second pointer.
            let sleep = || unsafe { libc::nanosleep(&raw const pause, std::ptr::null_mut()) };
            without_cancellation(sleep);
        }
        let word = &self.calls[slot].word;
        // In a child that was forked during the call, the kernel has zeroed the word.
        if word.load(SeqCst) % PHASES == ANNOUNCED {
            word.fetch_add(PHASES - ANNOUNCED, SeqCst);
        }
    }

    /// Assigns the event of a discard of `start..end` to an announced call. Returns false if no
    /// announced call covers these addresses, or if each call that covers them already had an event
    /// for them. The event then belongs to a raw system call.
    pub(super) fn account_event(&self, start: u64, end: u64) -> bool {
        self.calls.iter().any(|call| {
            let word = call.word.load(SeqCst);
            let within = word % PHASES == ANNOUNCED
                && call.start.load(SeqCst) <= start
                && end <= call.end.load(SeqCst)
                && call.read.load(SeqCst) <= start
                // The word is unchanged, so the values loaded before belong to the same call.
                && call.word.load(SeqCst) == word;
            // If the slot belongs to a newer call by now, this update makes the newer call's event
            // count as that of a raw system call.
            within && call.read.fetch_max(end, SeqCst) <= start
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn announced() -> Announced {
        let zero = || AtomicU64::new(0);
        let call = |_| AnnouncedCall { word: zero(), start: zero(), end: zero(), read: zero() };
        Announced { calls: std::array::from_fn(call), begun: zero(), compared: zero() }
    }

    #[test]
    fn call_stays_announced_until_its_events_are_compared() {
        static ANNOUNCED: LazyLock<Announced> = LazyLock::new(announced);
        let announced = &*ANNOUNCED;
        let call = announced.announce(0x1000, 0x2000).unwrap();
        let reading = announced.reading();
        std::thread::scope(|scope| {
            let returned = scope.spawn(|| announced.retract(call));
            // `retract` returns only after the guard was dropped, so the announcement still exists
            // here.
            for _ in 0..100 {
                std::thread::yield_now();
            }
            assert!(announced.account_event(0x1000, 0x2000));
            assert!(!returned.is_finished());
            drop(reading);
        });
        assert!(!announced.account_event(0x1000, 0x2000));
    }

    #[test]
    fn an_announced_call_has_one_event_for_each_address() {
        let announced = announced();
        assert!(!announced.account_event(0x1000, 0x2000));
        let call = announced.announce(0x1000, 0x4000).unwrap();
        assert!(announced.account_event(0x1000, 0x2000));
        assert!(
            !announced.account_event(0x1000, 0x2000),
            "a second event of the address belongs to a raw call"
        );
        assert!(announced.account_event(0x3000, 0x4000));
        assert!(
            !announced.account_event(0x3000, 0x5000),
            "the event reaches past the end of the call"
        );
        let same = announced.announce(0x1000, 0x2000).unwrap();
        assert!(announced.account_event(0x1000, 0x2000));
        announced.retract(same);
        announced.retract(call);
        assert!(!announced.account_event(0x1000, 0x2000));
        let calls: Vec<_> = (0..CALLS).map(|_| announced.announce(0, 1).unwrap()).collect();
        assert!(announced.announce(0, 1).is_none(), "all slots are in use");
        calls.into_iter().for_each(|call| announced.retract(call));
        assert!(announced.announce(0, 1).is_some());
    }
}
