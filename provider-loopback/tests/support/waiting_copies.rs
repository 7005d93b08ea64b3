//! A macro for test copy engines that complete each copy before they return.

/// Implements the asynchronous copy methods of a copy engine. Each copy has completed when its
/// method returns.
macro_rules! waiting_copies {
    () => {
        unsafe fn start_read(
            &self,
            offset: u64,
            into: hmem_core::Address,
            len: u64,
        ) -> hmem_core::Result<Box<dyn hmem_core::iface::CopyEvent>> {
            let mut bytes = vec![0; len as usize];
            self.read(offset, &mut bytes)?;
            // SAFETY: the caller vouches for `len` writable bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    std::ptr::with_exposed_provenance_mut(into.0 as usize),
                    bytes.len(),
                )
            };
            Ok(Box::new(hmem_core::iface::FinishedCopy(Ok(()))))
        }

        unsafe fn start_write(
            &self,
            offset: u64,
            from: hmem_core::Address,
            len: u64,
        ) -> hmem_core::Result<Box<dyn hmem_core::iface::CopyEvent>> {
            let from = std::ptr::with_exposed_provenance::<u8>(from.0 as usize);
            // SAFETY: the caller vouches for `len` readable bytes that no thread writes meanwhile.
            self.write(offset, unsafe { std::slice::from_raw_parts(from, len as usize) })?;
            Ok(Box::new(hmem_core::iface::FinishedCopy(Ok(()))))
        }
    };
}
pub(crate) use waiting_copies;
