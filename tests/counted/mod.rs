//! A buffer whose memory increments a counter when it is freed.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem::{Memory, Place};

/// Heap buffer that increments a counter when its memory is freed after a registration.
pub(crate) struct Counted {
    bytes: Vec<u8>,
    ends: Arc<AtomicUsize>,
}

impl Counted {
    /// Allocates `len` zeroed bytes. Freeing them increments `ends` if they were registered.
    pub(crate) fn new(len: usize, ends: &Arc<AtomicUsize>) -> Self {
        Self { bytes: vec![0; len], ends: Arc::clone(ends) }
    }
}

/// The parts of a [`Counted`] while it is registered. Dropping them frees the memory.
pub(crate) struct CountedParts(<Vec<u8> as Memory>::Parts, Arc<AtomicUsize>);

impl Drop for CountedParts {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: the memory is a `Vec`'s, whose own implementation keeps the contract.
unsafe impl Memory for Counted {
    type Parts = CountedParts;

    fn into_parts(self) -> CountedParts {
        CountedParts(Memory::into_parts(self.bytes), self.ends)
    }

    fn from_parts(_: CountedParts) -> Self {
        unreachable!("the tests get no buffer back")
    }

    fn place(parts: &CountedParts) -> Place<'_> {
        <Vec<u8> as Memory>::place(&parts.0)
    }
}
