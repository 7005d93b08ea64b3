//! A mutex that is let go by a plain store.
//!
//! An ordinary mutex takes two locked instructions where nobody else wants it: one to take it, and one to let go of
//! it, which finds out at the same instant whether somebody began to wait. On the NIC's short paths the second is a
//! good part of the work: it holds up all that follows until every store before it has reached the cache. This mutex
//! looks whether somebody waits and then lets go with an ordinary store.
//!
//! # How it works
//!
//! | word | meaning |
//! |---|---|
//! | FREE | nobody has it |
//! | HELD | somebody has it |
//! | AWAITED | somebody has it, and others may sleep until it is let go |
//!
//! Only a compare-and-swap from FREE, or a swap that finds FREE, takes it; while it is taken the word changes from HELD
//! to AWAITED and not otherwise. The holder's store comes after all of that in the word's order of modifications, so that it
//! overwrites nobody else's hold. Who lets go and sees AWAITED wakes a sleeper.
//!
//! What the second locked instruction is good for elsewhere is missing here: a waiter that sets AWAITED after the holder
//! looked and before the holder stored has its mark overwritten, and nobody wakes it. So sleepers look again
//! themselves after [`LOOK_AGAIN`]: a lost mark, for which the waiter has to hit a gap of one instruction, costs the
//! waiter that time and nothing else.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{
    RawThreadId,
    lock_api::{self, GuardSend, RawMutex},
};
use rustix::thread::futex::{self, Timespec};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// How long a waiter sleeps at most before it looks again.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// A mutex for sections of a few dozen instructions.
pub(super) type Lock<T> = lock_api::Mutex<RawLock, T>;

/// The guard of a [`Lock`].
pub(super) type LockGuard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// A [`Lock`] that its holder can take again.
pub(super) type ReentrantLock<T> = lock_api::ReentrantMutex<RawLock, RawThreadId, T>;

/// What the lock does to its word, apart from how, so that a model can try every order of events.
trait Word {
    /// How often a waiter looks before it sleeps.
    const LOOKS: u32;

    fn load(&self) -> u32;
    /// From FREE to HELD; false if it was not free.
    fn take(&self) -> bool;
    /// To AWAITED, whatever it was; that is the answer.
    fn mark(&self) -> u32;
    /// To FREE, whatever it was.
    fn free(&self);
    /// Until it is woken, or the word is not AWAITED, or for [`LOOK_AGAIN`].
    fn sleep(&self);
    fn wake_one(&self);
}

impl Word for AtomicU32 {
    /// Longer than the NIC holds any of these locks when it is not preempted.
    const LOOKS: u32 = 100;

    #[inline]
    fn load(&self) -> u32 {
        Self::load(self, Ordering::Relaxed)
    }

    #[inline]
    fn take(&self) -> bool {
        self.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn mark(&self) -> u32 {
        self.swap(AWAITED, Ordering::Acquire)
    }

    #[inline]
    fn free(&self) {
        self.store(FREE, Ordering::Release);
    }

    fn sleep(&self) {
        // Woken, out of time, interrupted, or no longer AWAITED: in each case there is something to look at.
        let _why = futex::wait(self, futex::Flags::PRIVATE, AWAITED, Some(&LOOK_AGAIN));
    }

    fn wake_one(&self) {
        // It fails for addresses that are no memory, and this one is.
        let _woken = futex::wake(self, futex::Flags::PRIVATE, 1);
    }
}

#[inline]
fn lock(word: &impl Word) {
    if !word.take() {
        lock_contended(word);
    }
}

#[cold]
fn lock_contended<W: Word>(word: &W) {
    for _ in 0..W::LOOKS {
        if word.load() == FREE && word.take() {
            return;
        }
        std::hint::spin_loop();
    }
    // Others may be asleep too, so that it is taken as AWAITED: whoever lets go of it wakes one of them.
    while word.mark() != FREE {
        word.sleep();
    }
}

#[inline]
fn unlock(word: &impl Word) {
    if word.load() == HELD {
        word.free();
    } else {
        unlock_awaited(word);
    }
}

#[cold]
fn unlock_awaited(word: &impl Word) {
    word.free();
    word.wake_one();
}

/// The word of a [`Lock`].
pub(super) struct RawLock(AtomicU32);

// SAFETY: `lock` and `try_lock` return (true) only after a read-modify-write that found FREE and left HELD or AWAITED.
// Until `unlock` stores FREE, which only the holder calls, every other read-modify-write finds the word taken: the
// compare-and-swaps fail, and a swap leaves AWAITED. The Acquire of taking it pairs with the Release of letting go.
unsafe impl RawMutex for RawLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "lock_api makes every mutex from it")]
    const INIT: Self = Self(AtomicU32::new(FREE));

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        lock(&self.0);
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.take()
    }

    #[inline]
    unsafe fn unlock(&self) {
        unlock(&self.0);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        Word::load(&self.0) != FREE
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    impl Word for loom::sync::atomic::AtomicU32 {
        const LOOKS: u32 = 0;

        fn load(&self) -> u32 {
            Self::load(self, Ordering::Relaxed)
        }

        fn take(&self) -> bool {
            self.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
        }

        fn mark(&self) -> u32 {
            self.swap(AWAITED, Ordering::Acquire)
        }

        fn free(&self) {
            // A store, as far as the language goes: it follows the holder's HELD in the order of modifications, and so
            // every mark, since a swap that found HELD comes right after it. The model keeps that order among
            // read-modify-writes only.
            self.swap(FREE, Ordering::Release);
        }

        fn sleep(&self) {
            unreachable!("the model's waiters give up instead");
        }

        fn wake_one(&self) {}
    }

    /// Every order of the steps that threads take with the word. A waiter marks it twice and then gives up, since a model
    /// of one that goes on for ever has no end.
    #[test]
    fn in_no_order_of_events_do_two_have_it() {
        type Shared = (loom::sync::atomic::AtomicU32, loom::cell::UnsafeCell<u32>);

        fn step(shared: &Shared, marks: u32) -> u32 {
            let (word, count) = shared;
            if !word.take() && (0..marks).all(|_| word.mark() != FREE) {
                return 0;
            }
            // SAFETY: the lock was just taken; if somebody else has it too, the model fails here.
            count.with_mut(|count| unsafe { *count += 1 });
            unlock(word);
            1
        }

        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = loom::sync::Arc::new((
                loom::sync::atomic::AtomicU32::new(FREE),
                loom::cell::UnsafeCell::new(0),
            ));
            let threads = [2, 1].map(|marks| {
                let shared = loom::sync::Arc::clone(&shared);
                loom::thread::spawn(move || step(&shared, marks))
            });
            let mut steps = step(&shared, 1) + step(&shared, 0);
            for thread in threads {
                steps += thread.join().unwrap();
            }
            assert_eq!(shared.0.mark(), FREE);
            // SAFETY: the lock was free, and the line above took it.
            assert_eq!(shared.1.with(|count| unsafe { *count }), steps);
        });
    }

    #[test]
    fn no_step_of_many_threads_is_lost() {
        const THREADS: u64 = 8;
        const ROUNDS: u64 = 20_000;
        // Two words that only the lock keeps equal.
        let lock = Lock::new((0u64, 0u64));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        let mut both = lock.lock();
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        if round % 64 == 0 {
                            // Preempted while it is held: the others go to sleep.
                            thread::yield_now();
                        }
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (THREADS * ROUNDS, THREADS * ROUNDS));
    }

    #[test]
    fn a_waiter_that_sleeps_gets_the_lock() {
        let lock = Arc::new(Lock::new(()));
        let held = lock.lock();
        let waiter = thread::spawn({
            let lock = Arc::clone(&lock);
            move || drop(lock.lock())
        });
        // SAFETY: the lock is alive, and its word is only read.
        let word = unsafe { &lock.raw().0 };
        while word.load(Ordering::Relaxed) != AWAITED {
            thread::yield_now();
        }
        drop(held);
        waiter.join().unwrap();
        assert!(!lock.is_locked());
    }

    #[test]
    fn a_sleeper_whose_mark_was_overwritten_gets_the_lock() {
        let lock = Arc::new(Lock::new(()));
        std::mem::forget(lock.lock());
        let waiter = thread::spawn({
            let lock = Arc::clone(&lock);
            move || drop(lock.lock())
        });
        // SAFETY: as above; the lock is let go once, by the store below, and its guard was forgotten.
        let word = unsafe { &lock.raw().0 };
        while word.load(Ordering::Relaxed) != AWAITED {
            thread::yield_now();
        }
        // What a holder does that looked before the mark was set.
        word.store(FREE, Ordering::Release);
        waiter.join().unwrap();
    }

    #[test]
    fn the_holder_alone_may_take_a_reentrant_lock_again() {
        let lock = ReentrantLock::new(());
        let first = lock.lock();
        let second = lock.try_lock();
        assert!(second.is_some());
        thread::scope(|scope| assert!(scope.spawn(|| lock.try_lock().is_none()).join().unwrap()));
        drop((first, second));
        thread::scope(|scope| assert!(scope.spawn(|| lock.try_lock().is_some()).join().unwrap()));
    }
}
