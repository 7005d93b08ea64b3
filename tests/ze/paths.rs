//! Tests of registrations over every path, and of the reasons for refused ones.

use std::sync::Arc;

use hmem::{
    Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, DomainAttr, ErrorKind, Iface,
    IfaceKind, Path, Request, iface::AllocRequest, p2p::path::ExplainRequest, path::P2pPolicy,
    system::Simulated,
};
use hmem_fake_ze::Profile;

use crate::{
    link::{Link, REMOTE, pattern, profiles},
    wire::raw,
};

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

/// DIAG-03, P2P-03
///
/// If the device exports nothing, the trace of the registration contains the failed call, the cause
/// and the remedy. `explain` reports them too.
#[test]
fn refused_export_names_cause_and_remedy() {
    let link = Link::open(Profile::without_exports(), DomainAttr::default());
    let buffer = link.buffer(LEN, AllocationKind::Device, DeviceId(0));
    let region = link.expose(buffer.allocation().range).expect("register");
    let decision = region.decision().expect("a decision").clone();
    region.close().expect("close");
    assert_eq!(decision.path, Path::Staged);
    let refused = decision.attempts.iter().find(|attempt| attempt.path == Path::DmaBuf);
    let refused = refused.expect("a dma-buf was tried");
    let error = refused.error.as_ref().expect("it was refused");
    assert_eq!(error.context_value("memoryAllocationExportTypes"), Some("0"), "{error}");
    let cause = refused.cause.as_ref().expect("a cause");
    assert!(cause.to_string().contains("allocated to be exported"), "{cause}");
    let remedy = refused.remedy.as_ref().expect("a remedy");
    assert!(remedy.contains("ze_external_memory_export_desc_t"), "{remedy}");

    let request = ExplainRequest::new(IfaceKind::ZE);
    let text = link.hmem.explain("loopback", &request).expect("explained").to_string();
    for word in ["ze_external_memory_export_desc_t", "memoryAllocationExportTypes"] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
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

/// HM-02, DIAG-03
///
/// The caller names Level Zero as the owner of freed memory, host memory, another vendor's memory
/// and the byte after an allocation.
#[test]
fn pointer_unknown_to_level_zero_is_refused_with_the_reason() {
    let link = Link::open(Profile::default(), DomainAttr::default());
    let freed = link.buffer(LEN, AllocationKind::Device, DeviceId(0)).allocation().range;
    let live = link.buffer(8 << 20, AllocationKind::Device, DeviceId(0));
    let host = vec![0u8; 4096];
    let other: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let others = DeviceBuffer::allocate(&other, &request).expect("allocate");
    let whole = live.allocation().range;
    let one_past = Address(whole.start().0 + whole.len());
    for (what, start) in [
        ("freed", freed.start()),
        ("foreign", Address::of_ptr(host.as_ptr())),
        ("another vendor's", others.allocation().base()),
        ("one past the end", one_past),
    ] {
        let range = AddressRange::new(start, 64).expect("a range");
        // SAFETY: the registration is refused.
        let claim = Request::new(unsafe { raw(range) }, REMOTE).owner(IfaceKind::ZE, None);
        let error = link.domain.submit(claim).expect_err(what).error;
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{what}: {error}");
        let text = format!("{error:#}");
        assert!(text.contains("ze") && text.contains("does not know the address"), "{text}");
    }
    // A range that exceeds its allocation.
    let over = AddressRange::new(Address(one_past.0 - 32), 64).expect("a range");
    let error = link.expose(over).expect_err("half of the range is not allocated");
    assert!(!error.is_unsupported(), "{error}");
}
