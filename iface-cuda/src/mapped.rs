//! Memory that an application mapped by hand (VMM), and the detection of its changes.
//!
//! An application reserves addresses, creates physical memory, and maps the one into the other.
//! Later it unmaps memory and maps other memory at the same addresses. The reservation and its
//! identity stay the same, so they show none of this.
//!
//! Each mapping is identified by three values: its first address, its length, and the handle of its
//! physical memory. The driver maps each handle from its first byte on (`cuda.h` on `cuMemMap`:
//! "currently must be zero", of the offset). So two mappings with equal values lead every address
//! to the same physical byte, as long as equal handles are the same memory. A retained handle
//! ensures that ([`RetainedHandle`]).

use hmem_core::{AddressRange, ErrorKind, Result};

use crate::{
    handles::{RetainedHandle, mapping_at, with_handle},
    lookup::{PointerLookup, inconsistent},
};

/// The mappings of a range, with their physical memory. Dropping the value releases the handles.
#[derive(Debug)]
pub(crate) struct MappedMemory(Vec<Mapping>);

#[derive(Debug)]
struct Mapping {
    /// The addresses that one call of `cuMemMap` mapped. They may reach beyond the watched range.
    range: AddressRange,
    memory: RetainedHandle,
}

impl MappedMemory {
    /// Retains the memory that is mapped in a range. Returns `None` if a part of the range has no
    /// memory with a handle. The range must not be empty.
    pub(crate) fn retain(lookup: &PointerLookup, range: AddressRange) -> Result<Option<Self>> {
        lookup.in_any_context(|| Self::retain_here(lookup, range))
    }

    /// Like [`Self::retain`], in the calling thread's context.
    fn retain_here(lookup: &PointerLookup, range: AddressRange) -> Result<Option<Self>> {
        let functions = &lookup.driver().functions;
        let mut mappings = Vec::new();
        let mut rest = range;
        loop {
            let mapped = match mapping_at(functions, rest.start()) {
                Err(error) if error.kind() == ErrorKind::OutOfBounds => return Ok(None),
                mapped => mapped?,
            };
            if !mapped.contains(rest.start()) {
                return Err(inconsistent(rest.start()).context("mapping", mapped));
            }
            let Some(memory) = RetainedHandle::of(functions, rest.start())? else {
                return Ok(None);
            };
            mappings.push(Mapping { range: mapped, memory });
            let done = mapped.len() - (rest.start().0 - mapped.start().0);
            rest = match rest.slice(done, rest.len().saturating_sub(done)) {
                Some(rest) if !rest.is_empty() => rest,
                _ => return Ok(Some(Self(mappings))),
            };
        }
    }

    /// Returns true if every mapping is still there, with the same physical memory. Costs three
    /// driver calls for each mapping.
    pub(crate) fn is_unchanged(&self, lookup: &PointerLookup) -> Result<bool> {
        lookup.in_any_context(|| {
            for mapping in &self.0 {
                if !mapping.is_unchanged(lookup)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }
}

impl Mapping {
    fn is_unchanged(&self, lookup: &PointerLookup) -> Result<bool> {
        let (functions, start) = (&lookup.driver().functions, self.range.start());
        match mapping_at(functions, start) {
            Ok(mapped) if mapped == self.range => {}
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::OutOfBounds => return Ok(false),
            Err(error) => return Err(error),
        }
        let same = |handle| Ok(handle == self.memory.handle());
        Ok(with_handle(functions, start, same)? == Some(true))
    }
}
