//! Tests of memory of the vendors' fake drivers, registered as dma-bufs and moved by a NIC: the
//! RDMA device that `HMEM_VERBS_DEVICE` names, or the software NIC.
//!
//! An RDMA device needs genuine dma-bufs. The fakes export those where `/dev/udmabuf` can be
//! opened, which the VM tier has (`tests/vm/run --dma-buf`).
#![allow(unsafe_code)]

#[path = "trials/mod.rs"]
mod trials;
#[path = "vendors/mod.rs"]
mod vendors;
#[path = "wire/mod.rs"]
mod wire;

use std::sync::Arc;

use hmem::{
    Address, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr, Hmem, Iface,
    IfaceKind, MrMode, Path, iface::AllocRequest, loopback::Loopback, path::P2pPolicy,
    verbs::Verbs,
};
use trials::{Outcome, Skipped, trials};
use vendors::Vendor;
use wire::{REMOTE, Wire, pattern, raw};

trials! {
    /// HM-06, P2P-06
    cuda_memory_moves_its_bytes_by_dma_buf,
    /// HM-06, P2P-06
    rocr_memory_moves_its_bytes_by_dma_buf,
    /// HM-06, P2P-06
    level_zero_memory_moves_its_bytes_by_dma_buf,
    /// HM-06, P2P-06
    neuron_memory_moves_its_bytes_by_dma_buf,
    /// HM-06, P2P-06
    synapseai_memory_moves_its_bytes_by_dma_buf,
    /// MON-07, CACHE-02
    reused_cuda_addresses_are_never_a_hit,
    /// MON-07, CACHE-02
    reused_rocr_addresses_are_never_a_hit,
    /// MON-07, CACHE-02
    reused_level_zero_addresses_are_never_a_hit,
    /// MON-07, CACHE-02
    reused_neuron_addresses_are_never_a_hit,
    /// MON-07, CACHE-02
    reused_synapseai_addresses_are_never_a_hit,
}

const LEN: u64 = 300_000;

/// Opens a domain on the NIC under test. Its policy forbids staged copies of device memory.
fn domain(iface: &Arc<dyn Iface>) -> Result<Domain, Skipped> {
    let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(iface));
    let cache = Some(CacheAttr::default());
    let attr = DomainAttr { p2p: P2pPolicy::Required, cache, ..DomainAttr::default() };
    let device = std::env::var("HMEM_VERBS_DEVICE").ok().filter(|name| !name.is_empty());
    let Some(device) = device else {
        let nic = Loopback::builder().build().expect("the software NIC");
        let hmem = hmem.provider(nic).build().expect("start");
        return Ok(hmem.domain("loopback", attr).expect("a domain"));
    };
    let verbs = Verbs::builder().connect_in_process(true).build().expect("libibverbs");
    let hmem = hmem.provider(verbs).build().expect("start");
    let mr_mode = MrMode::LOCAL | MrMode::ALLOCATED | MrMode::HMEM | MrMode::BASIC_MEANS;
    let attr = DomainAttr { nic: Some(device.clone()), mr_mode, ..attr };
    let domain = hmem.domain("verbs", attr).expect("a domain");
    match domain.provider_attr().imports.dma_buf {
        true => Ok(domain),
        false => Err(Skipped(format!("{device} imports no dma-bufs"))),
    }
}

fn allocate(iface: &Arc<dyn Iface>, len: u64) -> DeviceBuffer {
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(iface, &request).expect("allocate")
}

/// Registers whole allocations, whole pages and unaligned parts of a vendor's memory, and compares
/// every byte that the NIC moves.
fn move_bytes(vendor: &Vendor) -> Outcome {
    let iface = &vendor.iface;
    let wire = Wire::open(domain(iface)?);
    for (offset, len) in [(0, LEN), (8192, 4096), (70_001, 10_007), (LEN - 1, 1)] {
        let buffer = allocate(iface, LEN);
        let mut whole = pattern(1, LEN as usize);
        buffer.write(0, &whole).expect("write");
        let range = buffer.allocation().range.slice(offset, len).expect("a part");
        let region = wire.expose(range).expect("register");
        let decision = region.decision().expect("a decision");
        assert_eq!(decision.path, Path::DmaBuf, "{decision}");
        let key = region.key().expect("a key");
        let seen = wire.get(&key, 0, len as usize).expect("read");
        assert!(seen == whole[offset as usize..][..len as usize], "{offset}+{len}: read");
        let bytes = pattern(2, len as usize);
        wire.put(&key, 0, &bytes).expect("write");
        whole[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        let mut found = vec![0; LEN as usize];
        buffer.read(0, &mut found).expect("read");
        assert!(found == whole, "{offset}+{len}: written");
        region.close().expect("close");
    }
    Ok(())
}

/// In each round, allocates memory and gets a region of it from the cache twice. In most rounds,
/// the driver gives the address of the round before. A dma-buf keeps its pages, so
/// a stale hit would move bytes of an earlier round.
fn reuse_addresses(vendor: &Vendor) -> Outcome {
    let iface = &vendor.iface;
    const ROUNDS: u64 = 300;
    let wire = Wire::open(domain(iface)?);
    let cache = wire.domain.cache().expect("a cache");
    let (mut last, mut reused) = (Address(0), 0);
    for round in 0..ROUNDS {
        let buffer = allocate(iface, 8192);
        let range = buffer.allocation().range;
        reused += u64::from(std::mem::replace(&mut last, range.start()) == range.start());
        let bytes = pattern(round, 64);
        buffer.write(100, &bytes).expect("write");
        for _ in 0..2 {
            // SAFETY: the buffer outlives the region.
            let region = cache.get(unsafe { raw(range) }, REMOTE).expect("register");
            assert!(region.lease().uncached_reason().is_none(), "{:?}", region.lease());
            let seen = wire.get(&region.key().expect("a key"), 100, 64).expect("read");
            assert!(seen == bytes, "round {round}: the NIC read other memory");
        }
        drop(buffer);
        // Neuron and Gaudi do not free memory while a NIC has a genuine dma-buf of it.
        cache.reclaim();
    }
    let statistics = cache.statistics();
    assert!(reused > ROUNDS / 2, "only {reused} addresses were reused, so the test is void");
    assert_eq!((statistics.misses, statistics.hits), (ROUNDS, ROUNDS), "{statistics:?}");
    Ok(())
}

fn cuda_memory_moves_its_bytes_by_dma_buf() -> Outcome {
    move_bytes(&Vendor::open(IfaceKind::CUDA))
}

fn rocr_memory_moves_its_bytes_by_dma_buf() -> Outcome {
    move_bytes(&Vendor::open(IfaceKind::ROCR))
}

fn level_zero_memory_moves_its_bytes_by_dma_buf() -> Outcome {
    move_bytes(&Vendor::open(IfaceKind::ZE))
}

fn neuron_memory_moves_its_bytes_by_dma_buf() -> Outcome {
    move_bytes(&Vendor::open(IfaceKind::NEURON))
}

fn synapseai_memory_moves_its_bytes_by_dma_buf() -> Outcome {
    move_bytes(&Vendor::open(IfaceKind::SYNAPSEAI))
}

fn reused_cuda_addresses_are_never_a_hit() -> Outcome {
    reuse_addresses(&Vendor::open(IfaceKind::CUDA))
}

fn reused_rocr_addresses_are_never_a_hit() -> Outcome {
    reuse_addresses(&Vendor::open(IfaceKind::ROCR))
}

fn reused_level_zero_addresses_are_never_a_hit() -> Outcome {
    reuse_addresses(&Vendor::open(IfaceKind::ZE))
}

fn reused_neuron_addresses_are_never_a_hit() -> Outcome {
    reuse_addresses(&Vendor::open(IfaceKind::NEURON))
}

fn reused_synapseai_addresses_are_never_a_hit() -> Outcome {
    reuse_addresses(&Vendor::open(IfaceKind::SYNAPSEAI))
}
