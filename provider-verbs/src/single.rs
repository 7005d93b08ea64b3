//! The common transfer: one run of bytes on each side, under one key each, which is one work
//! request. Nothing is cut and no list is kept.

use hmem_core::{
    Access, Result,
    transfer::{LocalSegment, RemoteSegment},
};

use super::{
    endpoint::{EndpointState, InFlight, Inner},
    region::{CpuAccess, Held},
    sys::{RdmaPart, SendFlags, SendWr, Sge, WrOpcode, WrPart},
};

impl EndpointState {
    /// Posts an RMA transfer if it is a common one. `None`: it is another, or something is wrong
    /// with it, which the general way says.
    #[inline]
    pub(super) fn post_single(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        (local, remote): (&[LocalSegment], &[RemoteSegment<'_>]),
        (opcode, right): (WrOpcode, Access),
        mut entry: InFlight,
    ) -> Option<Result<()>> {
        let ([local], [remote]) = (local, remote) else { return None };
        let pair = inner.pair.as_ref()?;
        let most = pair.port.max_message.min(u64::from(u32::MAX));
        if local.len != remote.len || local.len == 0 || local.len > most || remote.key.is_mapped() {
            return None;
        }
        let rkey = remote.key.as_u64().ok()? as u32;
        let (part, cpu) = held.single(local, right)?;
        let write = opcode == WrOpcode::IBV_WR_RDMA_WRITE;
        let inline =
            write && cpu == CpuAccess::Owned && local.len <= u64::from(pair.cap.max_inline_data);
        let addr = part.base + (local.address.0 - part.range.start().0);
        let mut segment = Sge { addr, length: local.len as u32, lkey: part.lkey };
        let mut request = SendWr::new(opcode, 0);
        request.wr = WrPart { rdma: RdmaPart { remote_addr: remote.address.0, rkey } };
        request.num_sge = 1;
        request.sg_list = &mut segment;
        if inline {
            request.send_flags = SendFlags::INLINE.bits();
        }
        entry.bytes = local.len;
        Some(self.submit(inner, std::slice::from_mut(&mut request), entry))
    }
}
