//! A cell that is set once and then read by anybody.
//!
//! `OnceLock` does this too, with a queue for writers that compete; every registration would pay
//! for it, and a region has one writer: the call or the job that registers it.

use std::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{AtomicU8, Ordering},
};

const EMPTY: u8 = 0;
const BEING_SET: u8 = 1;
const SET: u8 = 2;

const ONCE: &str = "a region is registered once, by the call or the job that made it";

pub(super) struct SetOnce<T> {
    state: AtomicU8,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: the value is written once, by whoever moved the state from EMPTY to BEING_SET, and only
// shared after the Release of SET; `T: Send` because it is dropped wherever the cell is, `T: Sync`
// because references to it are shared.
unsafe impl<T: Send + Sync> Sync for SetOnce<T> {}
// SAFETY: the cell owns its value.
unsafe impl<T: Send> Send for SetOnce<T> {}

impl<T> SetOnce<T> {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU8::new(EMPTY), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Sets the value of a cell that nobody else sees yet.
    ///
    /// # Panics
    /// As [`SetOnce::set`].
    #[inline]
    pub(super) fn set_unshared(&mut self, value: T) {
        assert!(*self.state.get_mut() == EMPTY, "{ONCE}");
        self.value.get_mut().write(value);
        *self.state.get_mut() = SET;
    }

    /// Sets the value.
    ///
    /// # Panics
    /// If it was set before: a region is registered once.
    #[inline]
    pub(super) fn set(&self, value: T) {
        let claimed =
            self.state.compare_exchange(EMPTY, BEING_SET, Ordering::Relaxed, Ordering::Relaxed);
        assert!(claimed.is_ok(), "{ONCE}");
        // SAFETY: the state was EMPTY and is not any more, so nobody else writes, and nobody reads
        // before SET.
        unsafe { (*self.value.get()).write(value) };
        self.state.store(SET, Ordering::Release);
    }

    #[inline]
    pub(super) fn get(&self) -> Option<&T> {
        if self.state.load(Ordering::Acquire) != SET {
            return None;
        }
        // SAFETY: SET is stored after the value was written, and the value is not written again.
        Some(unsafe { (*self.value.get()).assume_init_ref() })
    }
}

impl<T> Drop for SetOnce<T> {
    fn drop(&mut self) {
        if *self.state.get_mut() == SET {
            // SAFETY: as in `get`; exclusive access, and the cell is gone afterwards.
            unsafe { self.value.get_mut().assume_init_drop() };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_value_is_seen_once_it_is_set_and_dropped_once() {
        let value = Arc::new(());
        let cell = SetOnce::new();
        assert!(cell.get().is_none());
        cell.set(Arc::clone(&value));
        assert!(Arc::ptr_eq(cell.get().unwrap(), &value));
        drop(cell);
        assert_eq!(Arc::strong_count(&value), 1);
        drop(SetOnce::<Arc<()>>::new());
    }
}
