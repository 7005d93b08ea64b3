//! An arena: memory that only ever stores values of one type, so that an outdated index still
//! refers to a valid value of that type.
//!
//! A new arena reserves the addresses for its full capacity. It makes their pages accessible as it
//! grows. So values never move, and one addition turns an index into a reference. The arena unmaps
//! its memory when it is dropped.

#![allow(unsafe_code, reason = "maps entries that lookups share without a lock")]

#[cfg(not(loom))]
pub(super) use self::mapped::Arena;
#[cfg(loom)]
pub(super) use self::modelled::Arena;

/// A type for which zeroed memory is a valid value.
///
/// Under loom, which tests all thread interleavings of a model, the arena creates each value by
/// `Default` instead.
///
/// # Safety
/// All bytes zero must be a valid value, and the type must need no drop.
pub(super) unsafe trait Zeroed {}

#[cfg(not(loom))]
mod mapped {
    use std::{
        fmt,
        ptr::{self, NonNull},
        sync::atomic::{AtomicUsize, Ordering},
    };

    use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mprotect};
    use rustix::param::page_size;

    use super::Zeroed;
    use crate::{Error, Mapping, Result};

    /// The accessible bytes grow by multiples of this number, which is a multiple of every page
    /// size (4, 16 and 64 KiB).
    const GROWTH: usize = 64 << 10;

    /// An arena with a fixed capacity. Users of the arena treat index 0 as "none".
    pub(in crate::cache) struct Arena<T> {
        base: NonNull<T>,
        /// A pointer that lies `tag` values before `base`; `tag` is 0 until [`Arena::tag`] sets it.
        /// Adding a tagged index (index plus tag) to this pointer gives the address of the index's
        /// value.
        tagged: *const T,
        /// The reserved addresses, from `base` on.
        mapping: Mapping,
        /// The number of accessible bytes from `base` on. Only [`Arena::ensure`] increases it, and
        /// nothing decreases it.
        usable: AtomicUsize,
    }

    // SAFETY: the arena only hands out shared references; a `T` that is `Sync` may be shared, and
    // nothing is dropped with it that would need `T: Send`.
    unsafe impl<T: Sync> Sync for Arena<T> {}
    // SAFETY: a moved arena still only hands out shared references to `T`s that are `Sync`, and
    // drops no `T`.
    unsafe impl<T: Sync> Send for Arena<T> {}

    impl<T: Zeroed> Arena<T> {
        /// Reserves addresses for the indices 0 ("none") to `count`.
        pub(in crate::cache) fn reserve(count: usize) -> Result<Self> {
            let reserved = ((count + 1) * size_of::<T>()).next_multiple_of(page_size());
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let mapping =
                Mapping::anonymous(reserved, ProtFlags::empty(), flags).map_err(|errno| {
                    Error::os(errno, "mmap").context("bytes", reserved).remedy(
                        "raise the limit of addresses (`ulimit -v`), or lower \
                         FI_MR_CACHE_MAX_COUNT: the registration cache reserves addresses for its \
                         entries",
                    )
                })?;
            let base =
                NonNull::new(mapping.as_ptr().cast()).expect("a mapping is not at address 0");
            Ok(Self { base, tagged: base.as_ptr(), mapping, usable: AtomicUsize::new(0) })
        }

        /// Sets the tag, a number that has only bits above those of every index. A tagged index is
        /// the sum of an index and the tag.
        pub(in crate::cache) fn tag(mut self, tag: u32) -> Self {
            self.tagged = self.base.as_ptr().wrapping_sub(tag as usize);
            self
        }

        /// Makes the values up to `index` accessible. Returns `false` if `index` exceeds the
        /// capacity or the system is out of memory. Two threads must not call this at the same
        /// time.
        pub(in crate::cache) fn ensure(&self, index: u32) -> bool {
            let needed = (index as usize + 1) * size_of::<T>();
            let usable = self.usable.load(Ordering::Relaxed);
            if needed <= usable {
                return true;
            }
            let wanted =
                needed.max(usable + usable / 4).next_multiple_of(GROWTH).min(self.mapping.len());
            if wanted < needed {
                return false;
            }
            // SAFETY: the range lies in the mapping made by `reserve`, and pages only become
            // accessible.
            let grown = unsafe {
                mprotect(
                    self.base.as_ptr().cast(),
                    wanted,
                    MprotectFlags::READ | MprotectFlags::WRITE,
                )
            };
            if grown.is_ok() {
                self.usable.store(wanted, Ordering::Relaxed);
            }
            grown.is_ok()
        }

        /// Returns the value with this index. An earlier [`Arena::ensure`] must have made it
        /// accessible.
        #[inline(always)]
        pub(in crate::cache) fn at(&self, index: u32) -> &T {
            debug_assert!(
                (index as usize + 1) * size_of::<T>() <= self.usable.load(Ordering::Relaxed)
            );
            // SAFETY: every index in use was passed to `ensure` before, so its memory is
            // accessible. It stays a `T` (zero bytes are one) until the arena is dropped, which the
            // reference cannot outlive.
            unsafe { self.base.add(index as usize).as_ref() }
        }

        /// Returns the value with a tagged index ([`Arena::tag`]).
        #[inline(always)]
        pub(in crate::cache) fn at_tagged(&self, tagged: u32) -> &T {
            // SAFETY: the tag is subtracted and added by wrapping arithmetic only. The sum is the
            // address of an index in use, which `ensure` made accessible.
            unsafe { &*self.tagged.wrapping_add(tagged as usize) }
        }

        /// Returns the index of a value that [`Arena::at`] returned.
        pub(in crate::cache) fn index_of(&self, value: &T) -> u32 {
            ((ptr::from_ref(value).addr() - self.base.addr().get()) / size_of::<T>()) as u32
        }

        /// Lets the kernel reclaim the pages of the value with this index, whose bytes must all be
        /// zero. Does nothing if the value does not fill whole pages, because a page may then hold
        /// other values too.
        pub(in crate::cache) fn release_pages(&self, index: u32) {
            if !size_of::<T>().is_multiple_of(page_size()) {
                return;
            }
            let place = self.base.as_ptr().wrapping_add(index as usize).cast();
            // SAFETY: the pages belong to the arena, and read as zeroes before and after.
            if let Err(errno) = unsafe { madvise(place, size_of::<T>(), Advice::LinuxDontNeed) } {
                tracing::debug!(%errno, "cannot return the memory of an empty node to the system");
            }
        }

        /// Disables huge pages in the arena. Huge pages would allocate memory for values that are
        /// not in use yet.
        pub(in crate::cache) fn small_pages(self) -> Self {
            // SAFETY: the pages belong to the arena, and the advice changes no content.
            let advised = unsafe {
                madvise(self.base.as_ptr().cast(), self.mapping.len(), Advice::LinuxNoHugepage)
            };
            if let Err(errno) = advised {
                tracing::debug!(%errno, "cannot disable transparent huge pages of a cache");
            }
            self
        }
    }

    impl<T> fmt::Debug for Arena<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Arena").field("usable", &self.usable).finish_non_exhaustive()
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A value of 512 bytes, an eighth of the smallest page.
    struct Small([AtomicU64; 64]);

    // SAFETY: atomics of zero bytes are 0 and need no drop.
    unsafe impl Zeroed for Small {}

    #[test]
    fn release_of_a_value_smaller_than_a_page_keeps_its_neighbours() {
        const LAST: u32 = 255;
        let arena = Arena::<Small>::reserve(LAST as usize).expect("addresses");
        assert!(arena.ensure(LAST));
        let first = |index| &arena.at(index).0[0];
        for index in 1..=LAST {
            first(index).store(u64::from(index), Ordering::Relaxed);
        }
        for index in 1..=LAST {
            first(index).store(0, Ordering::Relaxed);
            arena.release_pages(index);
            for live in index + 1..=LAST {
                assert_eq!(first(live).load(Ordering::Relaxed), u64::from(live), "after {index}");
            }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use super::Zeroed;
    use crate::Result;

    /// The arena of loom's models: its values, and the tag of its tagged indices.
    #[derive(Debug)]
    pub(in crate::cache) struct Arena<T>(Vec<T>, u32);

    impl<T: Zeroed + Default> Arena<T> {
        pub(in crate::cache) fn reserve(count: usize) -> Result<Self> {
            Ok(Self((0..=count).map(|_| T::default()).collect(), 0))
        }

        pub(in crate::cache) fn tag(self, tag: u32) -> Self {
            Self(self.0, tag)
        }

        pub(in crate::cache) fn ensure(&self, index: u32) -> bool {
            (index as usize) < self.0.len()
        }

        pub(in crate::cache) fn at(&self, index: u32) -> &T {
            &self.0[index as usize]
        }

        pub(in crate::cache) fn at_tagged(&self, tagged: u32) -> &T {
            self.at(tagged - self.1)
        }

        pub(in crate::cache) fn index_of(&self, value: &T) -> u32 {
            self.0
                .iter()
                .position(|other| std::ptr::eq(other, value))
                .expect("a value of this arena") as u32
        }

        pub(in crate::cache) fn release_pages(&self, _index: u32) {}

        pub(in crate::cache) fn small_pages(self) -> Self {
            self
        }
    }
}
