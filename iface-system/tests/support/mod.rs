//! Helpers of the tests: memory, patterns, fds and child processes.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

use hmem_core::{
    Address, Allocation, AllocationKind, DeviceId, Iface, IfaceExt, Mapping, Result,
    iface::{AllocRequest, DmaBufExport},
    provider::Nic,
};
use hmem_iface_system::Simulated;

pub const DEVICE_KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
    AllocationKind::Virtual,
];

/// Returns a lock that makes the tests of a file run one at a time, because they count the fds, the
/// mappings or the memory of the process.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn nic(name: &str) -> Nic {
    Nic { provider: "test".into(), name: name.into(), pci_bus_id: None }
}

pub fn simulated() -> Simulated {
    Simulated::builder().build().expect("a simulated device needs no hardware")
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
    // SAFETY: the tests hold no reference to memory that they free.
    unsafe { iface.free(allocation) }
}

pub fn at(allocation: &Allocation, offset: u64) -> Address {
    Address(allocation.base().0 + offset)
}

/// Returns `len` pseudo-random bytes for `seed`. Different seeds give different bytes.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes = vec![0; len];
    // Whole words: unoptimised code is slow at single bytes.
    for word in bytes.chunks_mut(8) {
        word.copy_from_slice(&next()[..word.len()]);
    }
    bytes
}

/// Returns the page size of the machine.
pub fn page() -> u64 {
    rustix::param::page_size() as u64
}

pub fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc").count()
}

pub fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").expect("/proc").lines().count()
}

/// Returns the resident memory of this process in bytes, including shared memory.
pub fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("/proc");
    let pages: u64 = statm.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("statm");
    pages * page()
}

/// Maps an exported fd as an importer does, and calls `read` with the address of the exported
/// bytes.
pub fn through_fd(export: &DmaBufExport, read: impl FnOnce(*mut u8)) {
    use rustix::mm::ProtFlags;
    let page = page();
    let first = export.offset.0 / page * page;
    let len = (export.offset.0 - first + export.len) as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let mapping = Mapping::shared(export, first, len, access).expect("mmap of an exported fd");
    read(mapping.as_ptr().wrapping_add((export.offset.0 - first) as usize));
}

pub fn read_through_fd(export: &DmaBufExport) -> Vec<u8> {
    let mut bytes = vec![0; export.len as usize];
    through_fd(export, |from| {
        // SAFETY: `through_fd` has mapped `export.len` bytes at this address.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    });
    bytes
}

pub fn write_through_fd(export: &DmaBufExport, bytes: &[u8]) {
    assert!(bytes.len() as u64 <= export.len);
    through_fd(export, |to| {
        // SAFETY: `through_fd` has mapped `export.len` bytes at this address.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    });
}

/// The environment variable by which a test gives its input to a child process. It makes a test
/// function run as that child.
const CHILD: &str = "HMEM_TEST_CHILD";

/// Returns the input from the parent in a child process, or `None` in an ordinary run of the test.
pub fn child_input() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Starts a child process that runs the function `test` of this binary. The function gets `input`
/// from [`child_input`].
pub fn spawn_child(test: &str, input: &str) -> Child {
    Command::new(std::env::current_exe().expect("own path"))
        .arg0("hmem-test-child")
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, input)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn")
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex"))
        .collect()
}

/// Safe methods for copies to and from addresses. Tests that call them must not free the memory
/// during the copy.
pub trait HeldCopies: Iface {
    fn read_bytes(&self, from: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the test does not free the memory during the call.
        unsafe { IfaceExt::read(self, from, into) }
    }

    fn write_bytes(&self, to: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the test does not free the memory during the call, and holds no reference to it.
        unsafe { IfaceExt::write(self, to, from) }
    }
}

impl<I: Iface + ?Sized> HeldCopies for I {}
