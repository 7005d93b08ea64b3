//! What the tests of this crate share.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::fs;

use hmem_core::{Allocation, AllocationKind, DeviceId, Iface, Result, iface::AllocRequest, provider::Nic};
use hmem_iface_system::Simulated;

pub fn nic(name: &str) -> Nic {
    Nic { provider: "test".into(), name: name.into(), pci_bus_id: None }
}

pub fn simulated() -> Simulated {
    Simulated::builder().build().expect("a simulated device needs nothing of the machine")
}

pub fn allocate(iface: &dyn Iface, len: u64, kind: AllocationKind) -> Allocation {
    try_allocate(iface, len, kind).expect("allocate")
}

pub fn device(iface: &dyn Iface, len: u64) -> Allocation {
    allocate(iface, len, AllocationKind::Device)
}

pub fn try_allocate(iface: &dyn Iface, len: u64, kind: AllocationKind) -> Result<Allocation> {
    iface.allocate(&AllocRequest { len, device: DeviceId(0), kind })
}

pub fn free(iface: &dyn Iface, allocation: &Allocation) -> Result<()> {
    // SAFETY: the tests keep no reference into memory that they free.
    unsafe { iface.free(allocation) }
}

/// Bytes that differ from their neighbours and from run to run of a test.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

pub fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc").count()
}

pub fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("/proc");
    let pages: u64 = statm.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("statm");
    pages * 4096
}
