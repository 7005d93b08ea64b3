//! Large arrays that use memory only for the elements that were written.

#![allow(unsafe_code, reason = "arrays in a zeroed mapping")]

use std::{marker::PhantomData, ops::Deref, slice};

use hmem_core::{Mapping, Wipeable};
use rustix::{io::Errno, mm::MapFlags};

use super::sys::{discard, prefer_huge_pages};
use crate::sys::map_memory;

/// An array of fixed length that uses memory only for pages that were written. All elements are
/// zero at first.
#[derive(Debug)]
pub(crate) struct LazyArray<T> {
    mapping: Mapping,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Wipeable> LazyArray<T> {
    pub(crate) fn new(len: usize) -> Result<Self, Errno> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Errno::NOMEM)?;
        let mapping = map_memory(bytes.max(1), MapFlags::NORESERVE)?;
        assert!(mapping.as_ptr().cast::<T>().is_aligned(), "mappings are page-aligned");
        Ok(Self { mapping, len, element: PhantomData })
    }

    /// Like [`LazyArray::new`], but asks the kernel for transparent huge pages (`MADV_HUGEPAGE`),
    /// which speed up random access. If the kernel refuses, the array uses small pages.
    pub(crate) fn new_in_huge_pages(len: usize) -> Result<Self, Errno> {
        let array = Self::new(len)?;
        if let Err(errno) = prefer_huge_pages(&array.mapping) {
            tracing::debug!(%errno, "no huge pages for a table: lookups are slower");
        }
        Ok(array)
    }

    /// Zeroes `count` elements, starting with element `first`, and frees their pages. The elements
    /// must be whole pages. A concurrent reader of an element sees the old value or zero.
    pub(crate) fn discard(&self, first: usize, count: usize) -> Result<(), Errno> {
        let (offset, len) = (first * size_of::<T>(), count * size_of::<T>());
        // SAFETY: the mapping is anonymous. `T: Wipeable` accepts zeroes at any time.
        unsafe { discard(&self.mapping, offset as u64, len) }
    }
}

impl<T: Wipeable> Deref for LazyArray<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping is `len` elements long, aligned and zeroed, which `T: Wipeable`
        // accepts. It lives as long as `self`. Elements change only through their own interior
        // mutability, or become zero by `discard`, which is a valid value of `T`.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr().cast::<T>(), self.len) }
    }
}
