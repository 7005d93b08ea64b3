//! Reports about memory that an application maps by hand (CUDA VMM), as PyTorch does for
//! `expandable_segments`.

use hmem::{
    Address, Batch, DomainAttr, ErrorKind, IfaceExt, Path, path::P2pPolicy, provider::Imports,
};
use hmem_fake_cuda::Profile;

use crate::{
    machine::{DMA_BUF, Machine},
    segments::Segments,
    wire::{REMOTE, pattern, raw},
};

fn required() -> DomainAttr {
    DomainAttr { p2p: P2pPolicy::Required, ..DomainAttr::default() }
}

/// REL-06, HM-07
///
/// The driver refuses SYNC_MEMOPS for such memory with 801.
#[test]
fn libfabric_12853_mapped_memory_moves_its_bytes_although_sync_memops_is_refused() {
    let machine = Machine::new(Profile::default());
    let wire = machine.wire(DMA_BUF, required());
    let memory = Segments::new(&machine.functions, &[true]);
    let region = wire.expose(memory.range(0, memory.step)).expect("registered");
    assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
    assert!(!machine.driver.sync_memops(memory.base), "the driver refuses the attribute");
    let key = region.key().expect("a key");
    wire.put(&key, 100, &pattern(1, 50_000)).expect("fi_write");
    assert_eq!(wire.get(&key, 100, 50_000).expect("fi_read"), pattern(1, 50_000));
    region.close().expect("close");
}

/// REL-06, HM-07
///
/// The tensors lie in one reservation of many handles, and some span two handles.
#[test]
fn mooncake_2511_tensors_in_expandable_segments_are_registered_over_every_seam() {
    const TENSORS: u64 = 486;
    const STEP: u64 = 2 << 20;
    let machine = Machine::new(Profile::default());
    let wire = machine.wire(DMA_BUF, required());
    // Tensors begin and end inside pages, and no two tensors share a page: without genuine
    // dma-bufs, the fake driver exports each page once.
    let stride = 3 * rustix::param::page_size() as u64;
    let handles = (TENSORS * stride).div_ceil(STEP) as usize;
    let pool = Segments::new(&machine.functions, &vec![true; handles]);
    let range = pool.range(0, TENSORS * stride);
    let parts = || (0..TENSORS).map(|tensor| tensor * stride + 512..(tensor + 1) * stride - 100);
    let spanning = parts().filter(|part| part.start / STEP < (part.end - 1) / STEP);
    assert!(spanning.count() > handles / 2 - 1, "tensors over the seams");
    let nics = [&wire.domain];
    // SAFETY: the batch is closed before the memory is unmapped, and no reference into it exists.
    let memory = unsafe { raw(range) };
    let batch = Batch::on(&nics).add_views(memory, parts().map(|part| (part, REMOTE)));
    let registered = batch.register().map_err(hmem::Error::from).expect("all of them");
    for (number, view) in registered.views(0).enumerate() {
        assert_eq!(view.region().decision().expect("a decision").path, Path::DmaBuf);
        let (key, len) = (view.key().expect("a key"), view.range().len());
        wire.put(&key, 0, &pattern(number as u64, len as usize)).expect("write");
        wire.get(&key, len, 1).expect_err("the next tensor");
    }
    for (number, part) in parts().enumerate() {
        let mut found = vec![0; (part.end - part.start) as usize];
        let start = Address(range.start().0 + part.start);
        // SAFETY: the memory is mapped during the call.
        unsafe { machine.cuda.read(start, &mut found) }.expect("read");
        assert!(found == pattern(number as u64, found.len()), "tensor {number}");
    }
    registered.close().map_err(hmem::Error::from).expect("close");
}

/// REL-06, P2P-03
///
/// The allocator did not create the memory for RDMA, so that the NIC gets it by copies.
#[test]
fn nixl_1754_slow_path_of_mapped_memory_is_reported_and_can_be_forbidden() {
    let machine = Machine::new(Profile::default());
    let memory = Segments::new(&machine.functions, &[false; 2]);
    let range = memory.range(0, 2 * memory.step);
    let imports = Imports { staged: true, ..DMA_BUF };
    let wire = machine.wire(imports, DomainAttr::default());
    let region = wire.expose(range).expect("copies");
    let decision = region.decision().expect("a decision");
    assert_eq!(decision.path, Path::Staged, "{decision}");
    let refused = &decision.attempts[0];
    assert_eq!(refused.cause_name, Some("vmm-range"), "{decision}");
    let remedy = refused.remedy.as_deref().expect("a remedy");
    assert!(remedy.contains("gpuDirectRDMACapable"), "{remedy}");
    assert!(remedy.contains("expandable_segments"), "{remedy}");
    region.close().expect("close");

    let strict = machine.wire(imports, required());
    let error = strict.expose(range).expect_err("no copies");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(format!("{error:#}").contains("gpuDirectRDMACapable"), "{error:#}");
}
