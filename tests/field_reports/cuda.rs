//! Reports about memory of `cudaMalloc`.

use std::thread;

use hmem::{
    Address, AddressRange, CacheAttr, DomainAttr, Errno, ErrorKind, Iface, MrMode, Path, Request,
    iface::DmaBufMapping,
    loopback::{Faults, Loopback, NicCall},
    path::P2pPolicy,
    provider::Imports,
};
use hmem_fake_cuda::Profile;

use crate::{
    machine::{DMA_BUF, Machine, STAGED},
    wire::{REMOTE, pattern, raw},
};

fn required() -> DomainAttr {
    DomainAttr { p2p: P2pPolicy::Required, ..DomainAttr::default() }
}

/// Returns the number of open file descriptors of this process.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// REL-06, HM-09
///
/// The GPU has dma-bufs with the PCIe mapping, and one of two NICs refuses them with 524.
#[test]
fn ucx_11584_nic_that_refuses_the_pcie_mapping_gets_the_default_mapping() {
    let machine = Machine::new(Profile::default());
    let imports = Imports { pcie_mapping_first: Some(true), ..DMA_BUF };
    let faults = Faults::new();
    let direct_nic = machine.wire(imports, required());
    let other_nic =
        machine.wire_on(Loopback::builder().imports(imports).faults(&faults), required());
    let buffer = machine.buffer(1 << 20);
    faults.fail_next(NicCall::Register, Errno(524));
    for (nic, mapping, refusals) in
        [(&other_nic, DmaBufMapping::Default, 1), (&direct_nic, DmaBufMapping::Pcie, 0)]
    {
        let region = nic.expose(buffer.range()).expect("registered");
        let decision = region.decision().expect("a decision");
        assert_eq!((decision.path, decision.mapping), (Path::DmaBuf, mapping), "{decision}");
        let refused = decision.attempts.iter().filter_map(|attempt| attempt.error.as_ref());
        let refused: Vec<_> = refused.map(|error| error.to_string()).collect();
        assert_eq!(refused.len(), refusals, "{decision}");
        assert!(refused.iter().all(|text| text.contains("ENOTSUPP (524)")), "{refused:?}");
        let key = region.key().expect("a key");
        nic.put(&key, 0, &pattern(refusals as u64, 5000)).expect("write");
        assert_eq!(nic.get(&key, 0, 5000).expect("read"), pattern(refusals as u64, 5000));
        region.close().expect("close");
    }
}

/// REL-06, P2P-01
///
/// A second NIC without dma-bufs changes nothing for the first, and says why it copies.
#[test]
fn ucx_10929_each_nic_has_its_own_path_and_the_reason_for_it() {
    let machine = Machine::new(Profile::default());
    let mlx5 = machine.wire(DMA_BUF, required());
    let hfi1 = machine.wire(STAGED, DomainAttr::default());
    let buffer = machine.buffer(1 << 20);
    for _ in 0..2 {
        let (by_dma_buf, by_copies) = (
            mlx5.expose(buffer.range()).expect("registered"),
            hfi1.expose(buffer.range()).expect("registered"),
        );
        let decision = by_dma_buf.decision().expect("a decision");
        assert_eq!((decision.path, decision.attempts.len()), (Path::DmaBuf, 1), "{decision}");
        let decision = by_copies.decision().expect("a decision");
        assert_eq!(decision.path, Path::Staged, "{decision}");
        let refused = decision.attempts.iter().find(|attempt| attempt.path == Path::DmaBuf);
        let refused = refused.expect("the refused path is listed");
        assert!(!refused.driver_called, "{decision}");
        assert_eq!(refused.cause_name, Some("nic-driver-without-dma-buf"), "{decision}");
        assert!(refused.remedy.is_some(), "{decision}");
        for (nic, region) in [(&mlx5, by_dma_buf), (&hfi1, by_copies)] {
            let key = region.key().expect("a key");
            nic.put(&key, 9, &pattern(3, 4000)).expect("write");
            assert_eq!(nic.get(&key, 9, 4000).expect("read"), pattern(3, 4000));
            region.close().expect("close");
        }
    }
}

/// REL-06, HM-06
///
/// A client without a cache registers each chunk of a long read anew.
#[test]
fn libfabric_12828_chunks_registered_one_after_the_other_leave_no_dma_buf_open() {
    const CHUNK: u64 = 4 << 20;
    let machine = Machine::new(Profile::default());
    let cache = Some(CacheAttr::default().max_count(0));
    let client = machine.wire(DMA_BUF, DomainAttr { cache, ..required() });
    let buffer = machine.buffer(16 * CHUNK);
    let before = open_files();
    for chunk in 0..2048 {
        let range = buffer.range().slice(chunk % 16 * CHUNK, CHUNK).expect("a chunk");
        let cache = client.domain.cache().expect("a cache");
        // SAFETY: the buffer outlives the region, and no reference into it exists.
        let region = cache.get(unsafe { raw(range) }, REMOTE).expect("registered");
        let key = region.key().expect("a key");
        let bytes = chunk.to_ne_bytes();
        client.put(&key, CHUNK - 8, &bytes).expect("write");
        assert_eq!(client.get(&key, CHUNK - 8, 8).expect("read"), bytes);
        drop(region);
    }
    // Tests beside this one have some files open.
    assert!(open_files() < before + 200, "chunks left descriptors open");
    assert_eq!(client.domain.live().regions, 0);
}

/// REL-06, HM-06
///
/// PyTorch packs tensors into one allocation.
#[test]
fn mooncake_2035_key_of_a_tensor_inside_a_block_names_the_bytes_of_the_tensor() {
    const LEN: u64 = 10_000;
    let machine = Machine::new(Profile::default());
    let wire = machine.wire(DMA_BUF, required());
    let block = machine.buffer(2 << 20);
    block.write(0, &vec![0xEE; 2 << 20]).expect("fill");
    for at in [0x1200, 0x0001_0000, (2 << 20) - LEN] {
        let region =
            wire.expose(block.range().slice(at, LEN).expect("inside")).expect("registered");
        assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
        let key = region.key().expect("a key");
        wire.put(&key, 0, &pattern(at, LEN as usize)).expect("write");
        let mut found = vec![0; LEN as usize];
        block.read(at, &mut found).expect("the device's own copy");
        assert!(found == pattern(at, LEN as usize), "the key names other bytes than {at:#x}");
        wire.get(&key, LEN - 1, 2).expect_err("the neighbour's byte");
        region.close().expect("close");
    }
    for neighbour in [0, 0x1200 - 1, 0x1200 + LEN, 0x0001_0000 - 1] {
        let mut byte = [0];
        block.read(neighbour, &mut byte).expect("inside");
        assert_eq!(byte, [0xEE], "{neighbour:#x} was overwritten");
    }
}

/// REL-06, HM-05
///
/// The driver answers queries and exports in a current context only, and the thread that registers
/// has none.
#[test]
fn mooncake_2034_worker_thread_without_a_context_registers_device_memory() {
    let machine = Machine::new(Profile { queries_need_context: true, ..Profile::default() });
    let wire = machine.wire(DMA_BUF, required());
    let buffer = machine.buffer(1 << 20);
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            assert!(machine.driver.contexts_of_this_thread().is_empty());
            let region = wire.expose(buffer.range()).expect("registered");
            assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
            assert!(machine.driver.contexts_of_this_thread().is_empty());
            region
        });
        let region = worker.join().expect("the worker");
        let key = region.key().expect("a key");
        wire.put(&key, 1, b"from a worker").expect("write");
        assert_eq!(wire.get(&key, 1, 13).expect("read"), b"from a worker");
        region.close().expect("close");
    });
}

/// REL-06, P2P-03
///
/// A GPU without dma-bufs and a NIC without a peer-memory client.
#[test]
fn nixl_177_failed_registration_names_each_path_with_its_remedy() {
    let machine = Machine::new(Profile::named("550-closed").expect("a profile"));
    let wire = machine.wire(Imports { staged: true, ..DMA_BUF }, required());
    let cache_tensor = machine.buffer(1 << 20);
    cache_tensor.write(0, b"kept").expect("write");
    let rejected = wire.domain.register(cache_tensor, REMOTE).expect_err("no direct path");
    let error = &rejected.error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.remedy_text().is_some(), "{error}");
    // A machine with NVIDIA's closed modules has the more special cause of the first.
    for (path, causes) in [
        (Path::DmaBuf, ["device-without-dma-buf", "nvidia-closed-modules"]),
        (Path::PeerMemory, ["peer-memory-module-missing", "nic-without-peer-memory"]),
    ] {
        let attempt = error.trace().iter().find(|attempt| attempt.path == path);
        let attempt = attempt.unwrap_or_else(|| panic!("{path} is missing: {error:?}"));
        assert!(attempt.error.is_some() && attempt.remedy.is_some(), "{error:?}");
        assert!(attempt.cause_name.is_some_and(|cause| causes.contains(&cause)), "{error:?}");
    }
    assert!(format!("{error:?}").contains("nvidia-peermem"), "{error:?}");
    // The process goes on: the tensor comes back, and another domain may copy.
    let cache_tensor = rejected.value;
    let mut kept = [0; 4];
    cache_tensor.read(0, &mut kept).expect("read");
    assert_eq!(&kept, b"kept");
    let copying = machine.wire(STAGED, DomainAttr::default());
    let region = copying.domain.register(cache_tensor, REMOTE).map_err(hmem::Error::from);
    let region = region.expect("copies");
    assert_eq!(copying.get(&region.key().expect("a key"), 0, 4).expect("read"), b"kept");
    drop(region.close().map_err(hmem::Error::from).expect("close"));
}

/// REL-06, HM-05
///
/// A progress thread of the library has no CUDA context, and moves bytes of device memory.
#[test]
fn nixl_2102_progress_thread_without_a_context_copies_device_memory() {
    let machine = Machine::new(Profile { queries_need_context: true, ..Profile::default() });
    let wire = machine.wire(STAGED, DomainAttr::default());
    let buffer = machine.buffer(3 << 20);
    let region = wire.expose(buffer.range()).expect("registered");
    assert_eq!(region.decision().expect("a decision").path, Path::Staged);
    let key = region.key().expect("a key");
    let bytes = pattern(5, 3 << 20);
    thread::scope(|scope| {
        let progress = scope.spawn(|| {
            assert!(machine.driver.contexts_of_this_thread().is_empty());
            wire.put(&key, 0, &bytes).expect("write");
            let seen = wire.get(&key, 0, bytes.len()).expect("read");
            assert!(machine.driver.contexts_of_this_thread().is_empty());
            seen
        });
        assert!(progress.join().expect("the thread") == bytes);
    });
    region.close().expect("close");
}

/// REL-06, DIAG-03
///
/// The NIC cannot reach the GPU over PCIe, although both support dma-bufs.
#[test]
fn torchcomms_160_refusal_of_a_nic_out_of_reach_names_the_topology() {
    let machine = Machine::new(Profile::default());
    let faults = Faults::new();
    let nic = Loopback::builder().imports(DMA_BUF).faults(&faults);
    let wire = machine.wire_on(nic, required());
    let buffer = machine.buffer(1 << 20);
    faults.fail_always(NicCall::Register, Errno(524));
    let error = wire.expose(buffer.range()).expect_err("out of reach");
    faults.clear();
    let attempt = error.trace().iter().find(|attempt| attempt.path == Path::DmaBuf);
    let attempt = attempt.unwrap_or_else(|| panic!("no attempt: {error:?}"));
    let text = attempt.error.as_ref().expect("refused").to_string();
    assert!(text.contains("ENOTSUPP (524)"), "{text}");
    // The machine's ACS and IOMMU are more special causes, if it has them.
    let cause = attempt.cause_name.expect("a cause");
    let topology = ["acs", "iommu", "device-not-reachable-from-nic"];
    assert!(topology.contains(&cause), "{cause}");
    assert!(attempt.cause.is_some() && attempt.remedy.is_some(), "{error:?}");
}

/// REL-06
///
/// The NIC has a Data Direct function in the PCI domain of the GPU. The buffers begin at pages of a
/// block, and one of them inside a page.
#[test]
fn torchcomms_3027_small_buffers_use_data_direct_or_the_next_mapping() {
    let machine = Machine::new(Profile::default());
    let gpu = machine.cuda.devices().expect("a GPU").remove(0).pci_bus_id.expect("an address");
    let domain = u32::from_str_radix(gpu.split(':').next().expect("a domain"), 16).expect("hex");
    let imports = Imports { pcie_mapping_first: None, data_direct: Some(domain), ..DMA_BUF };
    let wire = machine.wire(imports, required());
    let block = machine.buffer(4 << 20);
    let page = rustix::param::page_size() as u64;
    for at in [0, page, 3 * page] {
        let range = block.range().slice(at, 1000).expect("inside");
        let region = wire.expose(range).expect("registered");
        let decision = region.decision().expect("a decision");
        assert_eq!(decision.mapping, DmaBufMapping::DataDirect, "{decision}");
        let key = region.key().expect("a key");
        wire.put(&key, 0, &pattern(at, 1000)).expect("write");
        wire.get(&key, 999, 2).expect_err("the key covers the buffer only");
        region.close().expect("close");
    }
    let range = block.range().slice(page + 0x200, 1000).expect("inside");
    let region = wire.expose(range).expect("registered");
    let decision = region.decision().expect("a decision");
    assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("data-direct-unaligned"), "{decision}");
    region.close().expect("close");
    let region = wire.expose(block.range()).expect("registered");
    let decision = region.decision().expect("a decision");
    assert_eq!(decision.mapping, DmaBufMapping::DataDirect, "one unaligned buffer: {decision}");
    region.close().expect("close");
}

/// REL-06, HM-06
///
/// No peer-memory client is loaded, and the pointer is not at the start of a page. Peers use the
/// original address.
#[test]
fn deepep_750_unaligned_pointer_is_registered_by_dma_buf_under_its_own_address() {
    let machine = Machine::new(Profile::default());
    let nic = Loopback::builder().imports(DMA_BUF).needs(MrMode::VIRT_ADDR);
    let wire = machine.wire_on(nic, required());
    let block = machine.buffer(1 << 20);
    let pointer = Address(block.range().start().0 + 0x100);
    let tokens = AddressRange::new(pointer, 70_000).expect("no wrap");
    let region = wire.expose(tokens).expect("registered");
    assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
    let key = region.key().expect("a key");
    assert_eq!(key.base().0, pointer.0);
    wire.put(&key, 0, &pattern(8, 70_000)).expect("write");
    let mut found = vec![0; 70_000];
    block.read(0x100, &mut found).expect("the device's own copy");
    assert!(found == pattern(8, 70_000));
    region.close().expect("close");
}

/// REL-06, P2P-03
///
/// One of a program's 14 buffers cannot be registered.
#[test]
fn deepep_748_failed_buffer_is_named_before_anything_uses_it() {
    let machine = Machine::new(Profile::default());
    let faults = Faults::new();
    let nic = Loopback::builder().imports(DMA_BUF).faults(&faults);
    let wire = machine.wire_on(nic, required());
    drop(wire.domain.register(machine.buffer(8192), REMOTE).map_err(hmem::Error::from).expect("1"));
    let nics = [&wire.domain];
    let buffers = (0..14).map(|_| machine.buffer(8192));
    let mut ninth = None;
    let batch = buffers.enumerate().fold(hmem::Batch::on(&nics), |batch, (index, buffer)| {
        ninth = if index == 8 { Some(buffer.range()) } else { ninth };
        batch.add(Request::new(buffer, REMOTE))
    });
    faults.fail_nth(NicCall::Register, 9, Errno(12));
    let rejected = batch.register().expect_err("the ninth is refused");
    let error = &rejected.error;
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    assert_eq!(error.context_value("view"), Some("8"), "{error:?}");
    let text = format!("{error:#}");
    for fact in [&*ninth.expect("there").to_string(), "ENOMEM (12)", "loop0"] {
        assert!(text.contains(fact), "{fact} is missing: {text}");
    }
    assert!(error.remedy_text().is_some(), "{error}");
    assert_eq!(wire.domain.live().regions, 0);
    let buffers = rejected.value.close().map_err(hmem::Error::from).expect("not registered");
    assert_eq!(buffers.len(), 14);
}
