//! Heap blocks and constants as memory that regions hold.

#![allow(unsafe_code, reason = "heap blocks by their addresses")]

use std::{fmt, mem::ManuallyDrop, ptr::NonNull, sync::Arc};

use super::memory::{Memory, Place, own_parts};
use crate::{Address, AddressRange};

/// A type without padding and without invalid bit patterns, so that peers may write its values.
///
/// Implemented for Rust's integers and floats.
///
/// ```compile_fail,E0277
/// # use hmem_core::Items;
/// // Refused: a peer could write a byte that is neither true nor false.
/// fn flags(items: Items<bool>) {}
/// ```
///
/// # Safety
/// The type must have no padding and no invalid bit pattern.
pub unsafe trait AnyBits: Copy + Send + Sync + 'static {}

macro_rules! any_bits {
    ($($number:ty)+) => {$(
        // SAFETY: every bit pattern is a valid number, and numbers have no padding.
        unsafe impl AnyBits for $number {}
    )+};
}

any_bits! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 }

/// The heap block of a `Vec<T>`, without a Rust reference to it. Dropping the value frees the
/// block.
pub struct VecParts<T: AnyBits> {
    pointer: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts own their heap block exclusively and hand out no references into it.
unsafe impl<T: AnyBits> Send for VecParts<T> {}
// SAFETY: through a shared reference the parts only return the address of the block.
unsafe impl<T: AnyBits> Sync for VecParts<T> {}

impl<T: AnyBits> VecParts<T> {
    fn new(vec: Vec<T>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let (len, capacity) = (vec.len(), vec.capacity());
        // SAFETY: a Vec's pointer is never null.
        let pointer = unsafe { NonNull::new_unchecked(vec.as_mut_ptr()) };
        Self { pointer, len, capacity }
    }

    fn into_vec(self) -> Vec<T> {
        let parts = ManuallyDrop::new(self);
        // SAFETY: the three fields came from one Vec in `new`, and `ManuallyDrop` keeps the block
        // from being freed twice.
        unsafe { Vec::from_raw_parts(parts.pointer.as_ptr(), parts.len, parts.capacity) }
    }

    fn place(&self) -> Place<'_> {
        let len = (self.len * size_of::<T>()) as u64;
        let range = AddressRange::checked(Address::of_ptr(self.pointer.as_ptr()), len)
            .expect("a heap block ends inside the address space");
        Place::Host { range, writable: true }
    }
}

impl<T: AnyBits> Drop for VecParts<T> {
    fn drop(&mut self) {
        // SAFETY: the three fields came from one Vec in `new`, and `into_vec` does not run this
        // drop.
        drop(unsafe { Vec::from_raw_parts(self.pointer.as_ptr(), self.len, self.capacity) });
    }
}

impl<T: AnyBits> fmt::Debug for VecParts<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VecParts").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Numbers on the heap as memory for a region, such as a `Vec<f32>`.
///
/// Offsets and lengths of the region count bytes. `Vec<u8>` and `Box<[u8]>` need no `Items`. Other
/// vectors need it. Otherwise `register(vec![0; 4096], ..)` would register 4096 numbers of type
/// `i32`, and so 16 KiB.
///
/// ```
/// use hmem_core::Items;
///
/// let items = Items::from(vec![1.0_f32; 1024]);
/// assert_eq!(items.as_slice()[0], 1.0);
/// let numbers: Vec<f32> = items.into_vec();
/// # assert_eq!(numbers.len(), 1024);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Items<T: AnyBits>(Vec<T>);

impl<T: AnyBits> Items<T> {
    /// Returns the items.
    #[must_use]
    pub fn into_vec(self) -> Vec<T> {
        self.0
    }

    /// Returns the items by reference.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        &self.0
    }
}

impl<T: AnyBits> From<Vec<T>> for Items<T> {
    fn from(items: Vec<T>) -> Self {
        Self(items)
    }
}

impl<T: AnyBits> From<Box<[T]>> for Items<T> {
    fn from(items: Box<[T]>) -> Self {
        Self(items.into_vec())
    }
}

macro_rules! heap_memory {
    ($($memory:ty, $number:ty: $into:expr, $from:expr, [$($item:ident)?];)+) => {$(
        // SAFETY: the heap block stays where it is until the parts are dropped, and `VecParts`
        // holds it as a raw pointer. Any bytes are valid numbers.
        unsafe impl $(<$item: AnyBits>)? Memory for $memory {
            type Parts = VecParts<$number>;

            fn into_parts(self) -> Self::Parts {
                VecParts::new($into(self))
            }

            fn from_parts(parts: Self::Parts) -> Self {
                $from(parts.into_vec())
            }

            fn place(parts: &Self::Parts) -> Place<'_> {
                parts.place()
            }
        }
    )+};
}

heap_memory! {
    Vec<u8>, u8: std::convert::identity, std::convert::identity, [];
    Box<[u8]>, u8: <[u8]>::into_vec, Vec::into_boxed_slice, [];
    Items<T>, T: Items::into_vec, Items, [T];
}

macro_rules! constant_memory {
    ($($memory:ty)+) => {$(
        // SAFETY: the bytes stay where they are while the value lives, and nobody writes to them:
        // the type gives out shared references only.
        unsafe impl Memory for $memory {
            own_parts!();

            fn place(parts: &Self) -> Place<'_> {
                Place::Host { range: AddressRange::of(parts), writable: false }
            }
        }
    )+};
}

constant_memory! { Arc<[u8]> &'static [u8] }
