//! A buffer that calls a function when its memory is freed, for example to count.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem::{Memory, Place};

/// Heap buffer that calls a function when its memory is freed after a registration.
pub(crate) struct Counted {
    bytes: Vec<u8>,
    at_end: AtEnd,
}

type AtEnd = Box<dyn Fn() + Send + Sync>;

impl Counted {
    /// Allocates `len` zeroed bytes. Freeing them increments `ends` if they were registered.
    pub(crate) fn new(len: usize, ends: &Arc<AtomicUsize>) -> Self {
        let ends = Arc::clone(ends);
        Self::calling(len, move || {
            ends.fetch_add(1, Ordering::SeqCst);
        })
    }

    /// Allocates `len` zeroed bytes. Freeing them calls `at_end` if they were registered.
    pub(crate) fn calling(len: usize, at_end: impl Fn() + Send + Sync + 'static) -> Self {
        Self { bytes: vec![0; len], at_end: Box::new(at_end) }
    }
}

/// The parts of a [`Counted`] while it is registered. Dropping them frees the memory.
pub(crate) struct CountedParts(<Vec<u8> as Memory>::Parts, AtEnd);

impl Drop for CountedParts {
    fn drop(&mut self) {
        (self.1)();
    }
}

// SAFETY: the memory is a `Vec`'s, whose own implementation keeps the contract.
unsafe impl Memory for Counted {
    type Parts = CountedParts;

    fn into_parts(self) -> CountedParts {
        CountedParts(Memory::into_parts(self.bytes), self.at_end)
    }

    fn from_parts(_: CountedParts) -> Self {
        unreachable!("the tests get no buffer back")
    }

    fn place(parts: &CountedParts) -> Place<'_> {
        <Vec<u8> as Memory>::place(&parts.0)
    }
}
