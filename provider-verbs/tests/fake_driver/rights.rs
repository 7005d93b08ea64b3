//! Translation of write and atomic rights to verbs, over a fake library.

use crate::fake;
use crate::fake::{calls, functions, with};
use hmem_core::{Access, Address, AddressRange, Domain, ErrorKind, MrFlags, Promise, Raw, Request};
use hmem_provider_verbs::{
    DeviceRights, Verbs, VerbsDomain, access_flags,
    sys::{AccessFlags, Functions},
};

fn open(functions: Functions) -> Domain {
    fake::open(&Verbs::builder().functions(functions).build().expect("start"))
}

/// Resets the fake library to one device without atomics, and returns its function table.
fn without_atomics() -> Functions {
    let functions = functions();
    with(|script| script.no_atomics = true);
    functions
}

fn range() -> AddressRange {
    AddressRange::new(Address(0x1000), 4096).expect("range")
}

fn memory() -> Raw {
    // SAFETY: the fake library accesses no memory.
    unsafe { Raw::new(range(), Promise::ReadWrite) }
}

/// VRB-03
#[test]
fn write_and_atomic_rights_reach_verbs_separately() {
    let plain = DeviceRights::default();
    let atomics = DeviceRights { atomics: true, iwarp: false };
    let (write, atomic, local) =
        (AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC, AccessFlags::LOCAL_WRITE);
    for (access, device, expected) in [
        (Access::REMOTE_RMA_WRITE, atomics, write | local),
        (Access::REMOTE_ATOMIC, atomics, atomic | local),
        (Access::REMOTE_RMA_WRITE | Access::REMOTE_ATOMIC, atomics, write | atomic | local),
        (Access::REMOTE_WRITE, atomics, write | atomic | local),
        (Access::REMOTE_WRITE, plain, write | local),
        (Access::REMOTE_RMA_WRITE, plain, write | local),
    ] {
        assert_eq!(access_flags(access, device), expected, "{access} on {device:?}");
    }
}

/// VRB-03
#[test]
fn driver_gets_no_wider_rights_than_the_region() {
    let domain = open(functions());
    calls();
    for (access, bits) in [
        (Access::REMOTE_RMA_WRITE, "0x3"),
        (Access::REMOTE_ATOMIC, "0x9"),
        (Access::REMOTE_WRITE, "0xb"),
    ] {
        let region = domain.register(memory(), access).expect("register");
        let asked = calls();
        assert!(asked.len() == 1 && asked[0].ends_with(&format!(" {bits}")), "{access}: {asked:?}");
        region.close().expect("close");
        calls();
    }
}

/// VRB-02
#[test]
fn atomic_right_is_refused_without_atomics() {
    let domain = open(without_atomics());
    calls();
    let flags = AccessFlags::REMOTE_ATOMIC | AccessFlags::LOCAL_WRITE;
    let in_verbs_words = Access::try_from(flags).expect("rights");
    for access in [Access::REMOTE_ATOMIC, in_verbs_words] {
        let error = domain.register(memory(), access).unwrap_err().error;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(format!("{error:#}").contains("fake0"), "{error}");
    }
    assert!(calls().is_empty(), "the driver was called");
    // On a device without atomics, REMOTE_WRITE grants RMA writes only.
    domain.register(memory(), Access::REMOTE_WRITE).expect("register");
}

/// VRB-02
#[test]
fn change_to_the_atomic_right_is_refused_without_atomics() {
    let domain = open(without_atomics());
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = domain.register(memory(), Access::REMOTE_READ).expect("register");
    let handle = region.provider_region().expect("handle");
    calls();
    for access in [Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        // SAFETY: the fake library accesses no memory.
        let error = unsafe { verbs.rereg(handle, access) }.expect_err("no atomics");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context_value("access"), Some("REMOTE_ATOMIC"), "{error}");
        assert!(format!("{error:#}").contains("fake0"), "{error}");
        assert!(calls().is_empty(), "the driver was called");
        assert_eq!(verbs.flags(handle).expect("flags"), AccessFlags::REMOTE_READ);
    }
    // On a device without atomics, REMOTE_WRITE grants RMA writes only.
    // SAFETY: the fake library accesses no memory.
    unsafe { verbs.rereg(handle, Access::REMOTE_WRITE) }.expect("change the rights");
    assert_eq!(calls(), ["rereg_mr 0x4 0x3"]);
}

/// MR-12
#[test]
fn verbs_refuses_persistent_memory_with_bad_flags() {
    let domain = open(functions());
    calls();
    let request = Request::new(memory(), Access::REMOTE_WRITE).flags(MrFlags::RMA_PMEM);
    let error = domain.submit(request).unwrap_err().error;
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::BadFlags, 260));
    assert_eq!(error.context_value("flags"), Some("RMA_PMEM"));
    assert!(format!("{error:#}").contains("fake0"), "{error}");
    assert!(calls().is_empty(), "the driver was called");
}
