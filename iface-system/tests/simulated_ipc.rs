//! Tests of opening allocations of other processes: HM-10.

mod support;

use std::io::{BufRead, BufReader, Write};

use hmem_core::{AllocationKind, ErrorKind, Iface, IfaceExt, IfaceKind, iface::IpcHandle};
use hmem_iface_system::{AddressReuse, SIMULATED, Simulated, System};
use support::*;

fn iface_of(kind: IfaceKind) -> Box<dyn Iface> {
    if kind == IfaceKind::SYSTEM { Box::new(System::new()) } else { Box::new(simulated()) }
}

fn close(iface: &dyn Iface, allocation: &hmem_core::Allocation) -> hmem_core::Result<()> {
    // SAFETY: the tests hold no reference to memory that they close.
    unsafe { iface.ipc_close(allocation) }
}

const LEN: usize = 100_000;

/// Runs as a child process of another test. Opens an IPC handle, checks the content, writes to it
/// and closes it, and checks that this leaks no fd.
#[test]
fn child_that_opens_a_handle() {
    let Some(input) = child_input() else { return };
    let (kind, bytes) = input.split_once(' ').unwrap();
    let kind = IfaceKind(kind.parse().unwrap());
    let handle = IpcHandle { iface: kind, bytes: unhex(bytes) };
    let iface = iface_of(kind);
    let warm_up = iface.ipc_open(&handle).unwrap();
    close(&*iface, &warm_up).unwrap();
    let (fds, maps) = (open_fds(), mappings());
    for round in 0..200 {
        let opened = iface.ipc_open(&handle).unwrap();
        assert_eq!(opened.range.len(), LEN as u64);
        assert_eq!(iface.query(opened.base()).unwrap(), Some(opened));
        let mut content = vec![0; LEN];
        iface.read_bytes(opened.base(), &mut content).unwrap();
        assert!(content == pattern(LEN, if round == 0 { 1 } else { 2 }));
        iface.write_bytes(opened.base(), &pattern(LEN, 2)).unwrap();
        assert_eq!(free(&*iface, &opened).unwrap_err().kind(), ErrorKind::InvalidArgument);
        close(&*iface, &opened).unwrap();
        assert_eq!(close(&*iface, &opened).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(iface.query(opened.base()).unwrap(), None);
    }
    assert_eq!(open_fds(), fds);
    assert!(mappings() < maps + 50, "a mapping leaks with each round");
    println!("child has finished");
}

/// HM-10
#[test]
fn another_process_opens_and_closes_without_leaks() {
    let _turn = turn();
    let simulated = simulated();
    let system = System::new();
    let on_device = device(&simulated, LEN as u64);
    let pooled = allocate(&simulated, LEN as u64, AllocationKind::StreamOrdered);
    let in_a_file = system.memfd(LEN as u64).unwrap();
    let cases: [(&dyn Iface, _); 3] =
        [(&simulated, on_device), (&simulated, pooled), (&system, in_a_file)];
    let fds = open_fds();
    for (iface, allocation) in cases {
        iface.write_bytes(allocation.base(), &pattern(LEN, 1)).unwrap();
        let handle = iface.ipc_export(&allocation).unwrap();
        let input = format!("{} {}", handle.iface.0, hex(&handle.bytes));
        let output = spawn_child("child_that_opens_a_handle", &input).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("child has finished"), "{said}");
        let mut content = vec![0; LEN];
        iface.read_bytes(allocation.base(), &mut content).unwrap();
        assert!(content == pattern(LEN, 2), "the owner reads what the child wrote");
        free(iface, &allocation).unwrap();
    }
    assert!(open_fds() <= fds, "the owner leaks an fd");
}

/// Runs as a child process of another test. Prints the IPC handle of a new allocation, and exits
/// when the parent writes to its input or closes it.
#[test]
fn child_that_exports() {
    let Some(kind) = child_input() else { return };
    let kind = IfaceKind(kind.parse().unwrap());
    let iface = iface_of(kind);
    let allocation = match kind {
        IfaceKind::SYSTEM => {
            let system = System::new();
            let allocation = system.memfd(4096).unwrap();
            println!("handle {}", hex(&system.ipc_export(&allocation).unwrap().bytes));
            std::io::stdin().read_line(&mut String::new()).unwrap();
            return;
        }
        _ => device(&*iface, 4096),
    };
    println!("handle {}", hex(&iface.ipc_export(&allocation).unwrap().bytes));
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// HM-10
#[test]
fn opened_memory_outlives_the_owner_process() {
    let _turn = turn();
    for kind in [SIMULATED, IfaceKind::SYSTEM] {
        let mut child = spawn_child("child_that_exports", &kind.0.to_string());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let handle =
            lines.find_map(|line| Some(unhex(line.unwrap().split_once("handle ")?.1))).unwrap();
        let handle = IpcHandle { iface: kind, bytes: handle };
        let iface = iface_of(kind);
        let opened = iface.ipc_open(&handle).unwrap();
        iface.write_bytes(opened.base(), b"still here").unwrap();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        lines.for_each(drop);
        child.wait().unwrap();

        let error = iface.ipc_open(&handle).unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        let mut content = [0; 10];
        iface.read_bytes(opened.base(), &mut content).unwrap();
        assert_eq!(&content, b"still here");
        close(&*iface, &opened).unwrap();
    }
}

/// HM-10
///
/// The IPC handle of a freed allocation does not open a new allocation at the same place in the
/// memory file.
#[test]
fn freed_allocation_cannot_be_opened_after_reuse() {
    let _turn = turn();
    let simulated = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    let keeps_the_file = device(&simulated, 64);
    let stale = device(&simulated, 64);
    let handle = simulated.ipc_export(&stale).unwrap();
    free(&simulated, &stale).unwrap();
    assert!(simulated.ipc_open(&handle).unwrap_err().is_unavailable(), "not used again yet");
    let next = device(&simulated, 64);
    simulated.ipc_export(&next).unwrap();
    let error = simulated.ipc_open(&handle).unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert_eq!(error.context_value("identity"), Some(stale.id.0.to_string().as_str()));
    assert_eq!(simulated.ipc_export(&stale).unwrap_err().kind(), ErrorKind::InvalidArgument);
    free(&simulated, &keeps_the_file).unwrap();
}

/// HM-10
///
/// Opening a handle fails if the owner has closed the fd that the handle names, and the fd number
/// belongs to another file.
#[test]
fn handle_with_a_reused_fd_number_is_unavailable() {
    let _turn = turn();
    let system = System::new();
    let stale = system.memfd(4096).unwrap();
    let handle = system.ipc_export(&stale).unwrap();
    free(&system, &stale).unwrap();
    // The kernel uses the lowest free number, which is that of the closed fd.
    let next = system.memfd(4096).unwrap();
    let error = system.ipc_open(&handle).unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("another file"), "{error}");
    free(&system, &next).unwrap();
    assert!(system.ipc_open(&handle).unwrap_err().is_unavailable());
}

/// HM-10
///
/// An allocation stays readable in a process that has opened it, even after the owner has freed it.
/// New allocations of the owner do not overlap it.
#[test]
fn opened_allocation_outlives_its_owners_free() {
    let _turn = turn();
    let owner = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    let opener = simulated();
    let keeps_the_file = device(&owner, 64);
    let allocation = device(&owner, 4096);
    owner.write_bytes(allocation.base(), &[3; 4096]).unwrap();
    let opened = opener.ipc_open(&owner.ipc_export(&allocation).unwrap()).unwrap();
    free(&owner, &allocation).unwrap();
    for _ in 0..1000 {
        let next = device(&owner, 4096);
        owner.write_bytes(next.base(), &[9; 4096]).unwrap();
        free(&owner, &next).unwrap();
    }
    let mut content = [0; 4096];
    opener.read_bytes(opened.base(), &mut content).unwrap();
    assert_eq!(content, [3; 4096]);
    close(&opener, &opened).unwrap();
    free(&owner, &keeps_the_file).unwrap();
    assert_eq!(opener.stats().opened_allocations, 0);
}

/// HM-10
#[test]
fn truncated_and_altered_handles_are_malformed() {
    let _turn = turn();
    let simulated = simulated();
    let allocation = device(&simulated, 64);
    let good = simulated.ipc_export(&allocation).unwrap();
    let malformed = |handle: &IpcHandle| {
        let error = simulated.ipc_open(handle).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    };
    for byte in 0..good.bytes.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad.bytes[byte] ^= 1 << bit;
            malformed(&bad);
        }
        malformed(&IpcHandle { bytes: good.bytes[..byte].to_vec(), ..good.clone() });
    }
    malformed(&IpcHandle { bytes: [&good.bytes[..], &[0]].concat(), ..good.clone() });
    malformed(&IpcHandle { iface: IfaceKind(0x101), ..good.clone() });
    let opened = simulated.ipc_open(&good).unwrap();
    close(&simulated, &opened).unwrap();
}

#[test]
fn only_allocations_that_can_be_opened_are_exported() {
    let _turn = turn();
    let simulated = simulated();
    for kind in [AllocationKind::Host, AllocationKind::Managed, AllocationKind::Virtual] {
        let allocation = allocate(&simulated, 64, kind);
        assert!(simulated.ipc_export(&allocation).unwrap_err().is_unsupported());
    }
    let system = System::new();
    let anonymous = system.mmap(64).unwrap();
    assert!(system.ipc_export(&anonymous).unwrap_err().is_unsupported());
}
