//! Tests of registrations over every path, and of the reasons for refused ones.

use hmem::{Address, AddressRange, AllocationKind, DomainAttr, Iface, Path, path::P2pPolicy};
use hmem_fake_ze::Profile;

use crate::link::{Link, pattern, profiles};

const LEN: u64 = 300_000;

/// Returns the path that memory of a kind is expected to take under a policy.
fn expected(kind: AllocationKind, policy: P2pPolicy, exports: bool) -> Path {
    match kind {
        AllocationKind::Device if policy == P2pPolicy::Enabled && exports => Path::DmaBuf,
        AllocationKind::Device => Path::Staged,
        _ => Path::PlainHost,
    }
}

/// HM-06, HM-08, P2P-03
///
/// Covers every kind of memory on every device, in the middle of an allocation. Host and shared
/// memory is registered as host pages.
#[test]
fn memory_of_every_kind_moves_its_bytes_by_its_path() {
    for profile in profiles() {
        for policy in [P2pPolicy::Enabled, P2pPolicy::Disabled] {
            let exports = profile.exports;
            let attr = DomainAttr { p2p: policy, ..DomainAttr::default() };
            let link = Link::open(profile.clone(), attr);
            let kinds = [AllocationKind::Device, AllocationKind::Host, AllocationKind::Managed];
            for device in link.ze.devices().expect("devices") {
                for (kind, (offset, len)) in kinds
                    .into_iter()
                    .flat_map(|kind| [(0, LEN), (70_001, 10_007)].map(|part| (kind, part)))
                {
                    let buffer = link.buffer(LEN, kind, device.id);
                    let mut whole = pattern(1, LEN as usize);
                    buffer.write(0, &whole).expect("write");
                    let range = buffer.allocation().range.slice(offset, len).expect("a part");
                    let region = link.expose(range).expect("register");
                    let decision = region.decision().expect("a decision");
                    let path = expected(kind, policy, exports);
                    assert_eq!(decision.path, path, "{kind:?}: {:?}", decision.attempts);
                    let key = region.key().expect("a key");
                    let bytes = pattern(2, len as usize);
                    link.put(&key, 0, &bytes).expect("write");
                    whole[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                    let mut found = vec![0; LEN as usize];
                    buffer.read(0, &mut found).expect("read");
                    assert!(found == whole, "{kind:?} by {path:?}: written bytes differ");
                    let found = link.get(&key, 0, len as usize).expect("read");
                    assert!(found == bytes, "{kind:?} by {path:?}: read bytes differ");
                    region.close().expect("close");
                }
            }
            if let Some(driver) = &link.driver {
                assert_eq!((driver.live().exports, driver.live().undefined), (0, 0));
            }
        }
    }
}

/// DIAG-03
///
/// Memory that the application allocated from a driver's pool is staged, with the reason.
#[test]
fn pooled_memory_of_the_application_is_staged_with_the_reason() {
    let link = Link::open(Profile::default(), DomainAttr::default());
    let driver = link.driver.as_ref().expect("the fake driver");
    let base = driver.allocate_elsewhere(1000);
    let range = AddressRange::new(Address(base), 1000).expect("a range");
    let region = link.expose(range).expect("register");
    let decision = region.decision().expect("a decision");
    assert_eq!(decision.path, Path::Staged);
    let said = decision.attempts.iter().filter_map(|attempt| attempt.error.as_ref());
    assert!(said.into_iter().any(|error| error.to_string().contains("pool")), "{decision:?}");
    let (key, bytes) = (region.key().expect("a key"), pattern(3, 1000));
    link.put(&key, 0, &bytes).expect("write");
    assert!(link.get(&key, 0, 1000).expect("read") == bytes);
    region.close().expect("close");
}
