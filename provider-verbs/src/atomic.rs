//! Atomics: verbs has 64-bit fetch-and-add and compare-and-swap.

use hmem_core::{
    Access, Error, ErrorKind, Result,
    provider::Nic,
    transfer::{AtomicOp, AtomicType, LocalSegment, RemoteSegment},
};

use super::{
    endpoint::{EndpointState, InFlight, Inner},
    post::Scratch,
    region::Held,
    split::plan,
    sys::{AtomicPart, SendWr, WrOpcode, WrPart},
};

/// Bytes of an element.
pub(super) const ELEMENT: u64 = 8;

/// The work request for an atomic operation.
fn opcode(nic: &Nic, op: AtomicOp, datatype: AtomicType) -> Result<WrOpcode> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider(nic.to_string())
            .context("operation", format_args!("{op:?}"))
            .context("datatype", format_args!("{datatype:?}"))
            .remedy(why))
    };
    if datatype.size() != ELEMENT {
        return refuse("verbs has atomics on 64-bit elements only");
    }
    match op {
        AtomicOp::Sum => Ok(WrOpcode::IBV_WR_ATOMIC_FETCH_AND_ADD),
        AtomicOp::Cswap => Ok(WrOpcode::IBV_WR_ATOMIC_CMP_AND_SWP),
        _ => refuse("verbs has fetch-and-add (Sum) and compare-and-swap (Cswap) only"),
    }
}

impl EndpointState {
    pub(super) fn post_atomic(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        scratch: &mut Scratch,
        (op, datatype, remote): (AtomicOp, AtomicType, RemoteSegment<'_>),
        (local, result, compare): (&[LocalSegment], Option<LocalSegment>, Option<LocalSegment>),
        mut entry: InFlight,
    ) -> Result<()> {
        let device = &self.domain.pd.device;
        let opcode = opcode(device.nic(), op, datatype)?;
        if !device.rights().atomics {
            return Err(self.refuse(ErrorKind::Unsupported, "this device has no atomics"));
        }
        let whole = remote.len > 0 && remote.len.is_multiple_of(ELEMENT);
        if !whole || !remote.address.0.is_multiple_of(ELEMENT) {
            return Err(self
                .refuse(ErrorKind::InvalidArgument, "atomics take whole, aligned 64-bit elements")
                .context("address", remote.address)
                .context("length", remote.len));
        }
        let operands = self.read_elements(held, local, remote.len)?;
        let compares = match (op, compare) {
            (AtomicOp::Cswap, Some(segment)) => self.read_elements(held, &[segment], remote.len)?,
            (AtomicOp::Cswap, None) => {
                return Err(self.refuse(
                    ErrorKind::InvalidArgument,
                    "a comparing atomic takes a compare operand",
                ));
            }
            _ => Vec::new(),
        };
        match result {
            Some(segment) if segment.len == remote.len => {
                self.local(held, &mut scratch.spans, &[segment], Access::READ)?;
            }
            Some(_) => {
                return Err(
                    self.refuse(ErrorKind::InvalidArgument, "the result is as long as the target")
                );
            }
            // Verbs always returns the old value: to a place where nobody looks.
            None => {
                let nowhere = self.domain.nowhere()?;
                scratch.spans.extend(std::iter::repeat_n(nowhere, operands.len()));
            }
        }
        self.remote(&mut scratch.targets, &remote)?;
        let limits = (usize::MAX, ELEMENT);
        plan(&scratch.spans, &scratch.targets, limits, &mut scratch.segments, &mut scratch.planned);
        for (index, planned) in scratch.planned.iter().enumerate() {
            if planned.len != ELEMENT || planned.count != 1 {
                return Err(self.refuse(
                    ErrorKind::Unsupported,
                    "an element lies across a seam of its region",
                ));
            }
            let mut wr = SendWr::new(opcode, 0);
            let operand = operands[index];
            let (compare_add, swap) = match compares.get(index) {
                Some(compare) => (*compare, operand),
                None => (operand, 0),
            };
            let (remote_addr, rkey) = (planned.address, planned.rkey);
            wr.wr = WrPart { atomic: AtomicPart { remote_addr, compare_add, swap, rkey } };
            wr.num_sge = 1;
            wr.sg_list = scratch.segments[planned.first..].as_mut_ptr();
            scratch.requests.push(wr);
        }
        entry.bytes = remote.len;
        self.submit(inner, &mut scratch.requests, entry)
    }
}
