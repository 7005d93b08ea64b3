//! Operands of atomics, which verbs takes by value: read by the CPU while posting.

use std::ptr;

use hmem_core::{Access, Address, Error, ErrorKind, Result, transfer::LocalSegment};

use super::{
    endpoint::EndpointState,
    errors,
    region::{CpuAccess, Held},
};

impl EndpointState {
    /// Reads operands with the CPU: verbs takes them by value.
    pub(super) fn read_elements(
        &self,
        held: &Held<'_>,
        local: &[LocalSegment],
        len: u64,
    ) -> Result<Vec<u64>> {
        let total: u64 = local.iter().map(|segment| segment.len).sum();
        if total != len {
            return Err(self
                .refuse(ErrorKind::InvalidArgument, "operands are as many as target elements")
                .context("operands", total)
                .context("target", len));
        }
        let mut bytes = Vec::with_capacity(len as usize);
        for segment in local {
            let mut spans = Vec::new();
            let cpu = held.translate(
                segment.desc,
                segment.address,
                segment.len,
                Access::WRITE,
                &mut spans,
            )?;
            if cpu == CpuAccess::None {
                return Err(self.refuse(
                    ErrorKind::Unsupported,
                    "verbs takes operands by value: keep them in host memory",
                ));
            }
            read_guarded(segment.address, segment.len, &mut bytes)?;
        }
        let (elements, _) = bytes.as_chunks::<8>();
        Ok(elements.iter().map(|element| u64::from_ne_bytes(*element)).collect())
    }
}

/// Copies host bytes through the kernel, so that pages that are gone are an error and not a fault.
fn read_guarded(address: Address, len: u64, into: &mut Vec<u8>) -> Result<()> {
    let len = len as usize;
    into.reserve(len);
    let local =
        libc::iovec { iov_base: into.spare_capacity_mut().as_mut_ptr().cast(), iov_len: len };
    let remote = libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(address.0 as usize),
        iov_len: len,
    };
    // SAFETY: the call writes `len` bytes of spare capacity at most; the other side is checked by
    // the kernel.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    match usize::try_from(copied) {
        Ok(copied) if copied == len => {
            // SAFETY: the kernel wrote that many bytes.
            unsafe { into.set_len(into.len() + len) };
            Ok(())
        }
        Ok(_) => {
            Err(Error::new(ErrorKind::BadAddress, "read operands").context("address", address))
        }
        Err(_) => Err(Error::os(errors::last(), "process_vm_readv").context("address", address)),
    }
}
