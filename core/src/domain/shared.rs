//! Reference counts that cost nothing where there is one reference.
//!
//! Nearly every region has one owner for all of its life. The last reference to go looks whether it
//! is the only one: then nobody else can be adding or dropping any, and the count needs no locked
//! instruction.

#![allow(unsafe_code)]

use std::{
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
};

use triomphe::{Arc, UniqueArc};

/// A shared reference. There are no weak ones, which could make a second reference out of nothing.
pub(super) struct Shared<T>(ManuallyDrop<Arc<ManuallyDrop<T>>>);

/// A value that nobody else knows yet: made where it will stay, filled in, then shared.
pub(super) struct Unique<T>(Shared<T>);

impl<T> Unique<T> {
    /// Makes the value where it will stay: with the memory there first, its fields are written
    /// there and nowhere else.
    #[inline(always)]
    pub(super) fn new_with(make: impl FnOnce() -> T) -> Self {
        let mut place = UniqueArc::new_uninit();
        place.write(ManuallyDrop::new(make()));
        // SAFETY: written in the line above.
        let made = unsafe { UniqueArc::assume_init(place) };
        Self(Shared(ManuallyDrop::new(made.shareable())))
    }

    #[inline]
    pub(super) fn shareable(self) -> Shared<T> {
        self.0
    }
}

impl<T> Deref for Unique<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Unique<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        Arc::get_mut(&mut self.0.0).expect("nobody else knows it yet")
    }
}

impl<T> Clone for Shared<T> {
    #[inline]
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Shared<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `self` is not used again.
        let arc = unsafe { ManuallyDrop::take(&mut self.0) };
        let Some(mut last) =
            Arc::try_unique(arc).or_else(|arc| Arc::into_unique(arc).ok_or(())).ok()
        else {
            return;
        };
        // SAFETY: this was the last reference, so nobody uses the value again, and it is dropped
        // nowhere else.
        unsafe { ManuallyDrop::drop(&mut *last) };
        // Frees the memory; what is left of the value is nothing to drop.
        let _dropped = UniqueArc::into_inner(last);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Counted<'a>(&'a AtomicU32);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_value_is_dropped_once_with_its_last_reference() {
        let drops = AtomicU32::new(0);
        let only = Unique::new_with(|| Counted(&drops)).shareable();
        let second = only.clone();
        drop(only);
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        drop(Unique::new_with(|| Counted(&drops)));
        assert_eq!(drops.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn threads_that_drop_their_references_at_once_drop_the_value_once() {
        const THREADS: usize = 3;
        for _ in 0..500 {
            let drops = AtomicU32::new(0);
            let first = Unique::new_with(|| (Counted(&drops), AtomicU32::new(0))).shareable();
            let start = std::sync::Barrier::new(THREADS);
            std::thread::scope(|scope| {
                for _ in 1..THREADS {
                    let mine = first.clone();
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        mine.1.fetch_add(1, Ordering::Relaxed);
                    });
                }
                start.wait();
                drop(first);
            });
            assert_eq!(drops.load(Ordering::Relaxed), 1);
        }
    }

    #[test]
    fn what_panics_while_it_is_made_leaves_nothing() {
        let made = std::panic::catch_unwind(|| Unique::<u32>::new_with(|| panic!("as asked for")));
        assert!(made.is_err());
    }
}
