//! Atomic operations. Verbs has 64-bit fetch-and-add and compare-and-swap. Their work requests
//! contain the values of the operands.

#![allow(unsafe_code, reason = "reads operands by address")]

use std::ptr;

use hmem_core::{
    Access, Address, Error, ErrorKind, Result,
    provider::Nic,
    transfer::{AtomicOp, AtomicType, LocalSegment, RemoteSegment},
};

use super::{
    domain_state::DomainState,
    errors,
    region::{CpuAccess, Held},
    sys::WrOpcode,
};

/// Length in bytes of one element of an atomic operation.
pub(super) const ELEMENT: u64 = 8;

/// The verbs opcode and the operands of an atomic operation.
pub(super) struct AtomicOperands {
    pub(super) opcode: WrOpcode,
    /// One operand for each element.
    operands: Vec<u64>,
    /// One value to compare with for each element; empty for fetch-and-add.
    compares: Vec<u64>,
}

impl AtomicOperands {
    /// Checks an atomic operation and copies its operands from the application's memory.
    pub(super) fn read(
        domain: &DomainState,
        held: &Held<'_>,
        (op, datatype, remote): (AtomicOp, AtomicType, &RemoteSegment<'_>),
        (local, compare): (&[LocalSegment], Option<LocalSegment>),
    ) -> Result<Self> {
        let device = &domain.pd.device;
        let opcode = opcode(&device.nic, op, datatype)?;
        if !device.rights.atomics {
            return Err(domain.refuse_post(ErrorKind::Unsupported, "this device has no atomics"));
        }
        let whole = remote.len > 0 && remote.len.is_multiple_of(ELEMENT);
        if !whole || !remote.address.0.is_multiple_of(ELEMENT) {
            return Err(domain
                .refuse_post(
                    ErrorKind::InvalidArgument,
                    "use whole, aligned 64-bit elements for atomics",
                )
                .context("address", remote.address)
                .context("length", remote.len));
        }
        let operands = read_elements(domain, held, local, remote.len)?;
        let compares = match (op, compare) {
            (AtomicOp::Cswap, Some(segment)) => {
                read_elements(domain, held, &[segment], remote.len)?
            }
            (AtomicOp::Cswap, None) => {
                return Err(domain.refuse_post(
                    ErrorKind::InvalidArgument,
                    "pass a compare operand for a comparing atomic",
                ));
            }
            _ => Vec::new(),
        };
        Ok(Self { opcode, operands, compares })
    }

    /// Returns the number of elements of the operation.
    pub(super) fn len(&self) -> usize {
        self.operands.len()
    }

    /// Returns the fields `compare_add` and `swap` of the work request for an element.
    pub(super) fn fields(&self, index: usize) -> (u64, u64) {
        let operand = self.operands[index];
        self.compares.get(index).map_or((operand, 0), |compare| (*compare, operand))
    }
}

/// Returns the work request's opcode for an atomic operation.
fn opcode(nic: &Nic, op: AtomicOp, datatype: AtomicType) -> Result<WrOpcode> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider(nic.to_string())
            .context("operation", format_args!("{op:?}"))
            .context("datatype", format_args!("{datatype:?}"))
            .remedy(why))
    };
    if datatype.size() != ELEMENT {
        return refuse("use 64-bit elements: verbs has no other atomics");
    }
    match op {
        AtomicOp::Sum => Ok(WrOpcode::IBV_WR_ATOMIC_FETCH_AND_ADD),
        AtomicOp::Cswap => Ok(WrOpcode::IBV_WR_ATOMIC_CMP_AND_SWP),
        _ => refuse("use fetch-and-add (Sum) or compare-and-swap (Cswap): verbs has no others"),
    }
}

/// Reads `len` bytes of operands from the local segments with the CPU.
fn read_elements(
    domain: &DomainState,
    held: &Held<'_>,
    local: &[LocalSegment],
    len: u64,
) -> Result<Vec<u64>> {
    let total = local.iter().fold(0_u64, |sum, segment| sum.saturating_add(segment.len));
    if total != len {
        return Err(domain
            .refuse_post(ErrorKind::InvalidArgument, "pass as many operands as target elements")
            .context("operands", total)
            .context("target", len));
    }
    // Each segment's bounds are checked before the vector grows, since `len` may be huge.
    let mut bytes = Vec::new();
    for segment in local {
        let cpu = held.translate(segment, Access::WRITE, &mut Vec::new())?;
        if cpu == CpuAccess::None {
            return Err(domain.refuse_post(
                ErrorKind::Unsupported,
                "keep operands in host memory: verbs work requests contain their values",
            ));
        }
        read_guarded(segment.address, segment.len, &mut bytes)?;
    }
    let (elements, _) = bytes.as_chunks::<8>();
    Ok(elements.iter().map(|element| u64::from_ne_bytes(*element)).collect())
}

/// Appends a copy of host memory to `into`. The kernel makes the copy, so an unmapped page is an
/// error instead of a fault.
fn read_guarded(address: Address, len: u64, into: &mut Vec<u8>) -> Result<()> {
    let len = len as usize;
    into.reserve(len);
    let local =
        libc::iovec { iov_base: into.spare_capacity_mut().as_mut_ptr().cast(), iov_len: len };
    let remote = libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(address.0 as usize),
        iov_len: len,
    };
    // SAFETY: the call writes at most `len` bytes of the vector's spare capacity. The kernel checks
    // the source.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    match usize::try_from(copied) {
        Ok(copied) if copied == len => {
            // SAFETY: the kernel wrote `len` bytes.
            unsafe { into.set_len(into.len() + len) };
            Ok(())
        }
        Ok(_) => {
            Err(Error::new(ErrorKind::BadAddress, "read operands").context("address", address))
        }
        Err(_) => Err(Error::os(errors::last(), "process_vm_readv").context("address", address)),
    }
}
