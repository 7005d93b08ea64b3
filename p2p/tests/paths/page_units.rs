//! Exports of devices whose unit of memory is shorter or longer than a page of the host, and of
//! ranges that begin and end inside a unit (ARM-02).

use std::sync::Arc;

use crate::path_support::{
    ALL_IMPORTS, Bench, close, page_size, register_range, vendor::Vendor, wire::Wire,
};
use hmem_core::{
    AddressRange, AllocationKind, Decision, DeviceBuffer, DeviceId, Domain, Error, ErrorKind,
    Iface, IfaceKind, Path, RemoteKey,
    iface::AllocRequest,
    path::{Attempt, ExportUnit, P2pPolicy},
    provider::Imports,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::Loopback;

const IMPORTS: Imports =
    Imports { pcie_mapping_first: Some(false), peer_memory: false, ..ALL_IMPORTS };

/// Returns units from a sixteenth of a host page, which is 4 KiB on a kernel with pages of 64 KiB,
/// to 2 MiB. The unit of one and a half pages begins inside every other page.
fn units() -> [u64; 7] {
    let page = page_size();
    [page / 16, page / 2, page, 3 * page / 2, 2 * page, 16 * page, 2 << 20]
}

fn bench(unit: u64) -> Bench {
    let device = Simulated::builder().dma_buf(DmaBufKind::MemFd).segment_len(unit);
    Bench::new(device, IMPORTS)
}

/// Returns bytes that depend on their position and on the seed. The pattern repeats after a prime
/// number of bytes.
fn pattern(seed: usize, len: u64) -> Vec<u8> {
    let block: Vec<_> = (0..257).map(|at| (at * 31 + seed * 97) as u8).collect();
    let mut bytes = block.repeat(len as usize / block.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

/// Registers the range, and hands its key to a peer as bytes. Tests that the peer writes and reads
/// exactly the bytes of the range, and that the bytes around it are out of its reach.
fn assert_key_reaches_exactly(
    range: AddressRange,
    buffer: &DeviceBuffer,
    [near, far]: [&Domain; 2],
) -> Arc<Decision> {
    let whole = buffer.range();
    let mut expected = pattern(1, whole.len());
    buffer.write(0, &expected).expect("the device's own copy");
    let region = register_range(far, range).unwrap_or_else(|error| panic!("{error:#}"));
    let key = region.key().expect("a key");
    let key = RemoteKey::from_bytes(&key.to_bytes()).expect("the key of a peer");

    let (len, start) = (range.len(), (range.start().0 - whole.start().0) as usize);
    let wire = Wire::new(near, far, len as usize + 1);
    let bytes = pattern(2, len);
    wire.push(&key, 0, &bytes).expect("all bytes");
    wire.push(&key, 0, &[0xa1]).expect("the first byte");
    wire.push(&key, len - 1, &[0xa2]).expect("the last byte");
    expected[start..start + bytes.len()].copy_from_slice(&bytes);
    expected[start] = 0xa1;
    expected[start + bytes.len() - 1] = 0xa2;
    for (at, count) in [(len, 1), (len - 1, 2), (u64::MAX, 1), (u64::MAX, 2), (0, len + 1)] {
        for refused in [
            wire.push(&key, at, &vec![0xee; count as usize]).map(drop),
            wire.pull(&key, at, count as usize).map(drop),
        ] {
            let error = refused.expect_err("bytes outside the range");
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{count} bytes at {at:#x}: {error}");
        }
    }
    let mut found = vec![0; expected.len()];
    buffer.read(0, &mut found).expect("the device's own copy");
    assert!(found == expected, "{range} of {whole}");
    assert_eq!(wire.pull(&key, 0, len as usize).expect("read"), expected[start..][..bytes.len()]);
    let decision = Arc::clone(region.decision().expect("a device region has a decision"));
    wire.close().expect("close");
    close(region);
    decision
}

/// ARM-02, HM-07
#[test]
fn range_over_units_of_any_length_is_reached_to_its_exact_ends() {
    for unit in units() {
        let bench = bench(unit);
        for policy in [P2pPolicy::Required, P2pPolicy::Disabled] {
            let domains = ["loop0", "loop1"].map(|nic| bench.domain(nic, policy));
            let domains = [&domains[0], &domains[1]];
            let buffer = bench.buffer_of(AllocationKind::Virtual, DeviceId(0), 3 * unit);
            let part = |start, len| buffer.range().slice(start, len).expect("a part");
            // Inside one unit, over one border, over all units, and whole.
            for range in [
                part(unit + 13, 101),
                part(unit - 77, 210),
                part(5, 3 * unit - 12),
                part(unit, unit),
                buffer.range(),
            ] {
                let decision = assert_key_reaches_exactly(range, &buffer, domains);
                let expected = match policy {
                    P2pPolicy::Required => Path::DmaBuf,
                    _ => Path::Staged,
                };
                assert_eq!(decision.path, expected, "units of {unit}: {decision}");
            }
        }
        assert_eq!(bench.device.stats().live_exports, 0);
    }
}

/// ARM-02, LIFE-05
///
/// A driver that exports whole units only. The decision says that more than the range is exported.
#[test]
fn export_widens_to_whole_units_of_any_length_and_the_decision_says_so() {
    for unit in units() {
        let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd);
        let memory = Arc::new(memory.segment_len(unit).build().expect("simulated memory"));
        let mut vendor = Vendor::new(IfaceKind::CUDA, Arc::clone(&memory));
        vendor.segment_len = Some(unit);
        vendor.part = || {
            let error = Error::new(ErrorKind::InvalidArgument, "cuMemGetHandleForAddressRange");
            Some(error.iface(IfaceKind::CUDA).driver_code("CUDA_ERROR_INVALID_VALUE", 1))
        };
        let vendor: Arc<dyn Iface> = Arc::new(vendor);
        let nics = Loopback::builder().nic("loop0").nic("loop1").imports(IMPORTS);
        let bench = Bench::over(memory, Arc::clone(&vendor), nics, DefaultPathSelector::new());
        let domains = ["loop0", "loop1"].map(|nic| bench.domain(nic, P2pPolicy::Required));
        let kind = AllocationKind::Virtual;
        let request = AllocRequest { len: 3 * unit, device: DeviceId(0), kind };
        let buffer = DeviceBuffer::allocate(&vendor, &request).expect("memory");
        let range = buffer.range().slice(unit - 77, 210).expect("a part");
        let decision = assert_key_reaches_exactly(range, &buffer, [&domains[0], &domains[1]]);
        assert_eq!((decision.path, decision.unit), (Path::DmaBuf, ExportUnit::Segment));
        let refused = &decision.attempts[0];
        assert_eq!(refused.cause_name, Some("other-export-unit"), "{decision}");
        assert!(decision.to_string().contains("exported by whole segment"), "{decision}");
        assert_eq!(bench.device.stats().live_exports, 0);
    }
}

/// ARM-02
///
/// The NIC registers at most 16 dma-bufs together. A page of 64 KiB has 16 units of 4 KiB, so few
/// pages have more units than that.
#[test]
fn range_with_more_units_than_the_nic_registers_is_refused_with_the_reason() {
    let page = page_size();
    let bench = bench(page / 16);
    let buffer = bench.buffer_of(AllocationKind::Virtual, DeviceId(0), 2 * page);
    let range = buffer.range().slice(3, page + 100).expect("a part");
    let domain = bench.domain("loop0", P2pPolicy::Required);
    let error = register_range(&domain, range).expect_err("17 dma-bufs");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let refused = |attempts: &[Attempt]| {
        let mut attempts = attempts.iter();
        attempts.any(|attempt| attempt.cause_name == Some("too-many-segments"))
    };
    assert!(refused(error.trace()), "{error:#}");
    assert_eq!(bench.device.stats().live_exports, 0);

    let domains = ["loop0", "loop1"].map(|nic| bench.domain(nic, P2pPolicy::Enabled));
    let decision = assert_key_reaches_exactly(range, &buffer, [&domains[0], &domains[1]]);
    assert_eq!(decision.path, Path::Staged, "{decision}");
    assert!(refused(&decision.attempts), "{decision}");
}

/// ARM-02
///
/// A driver that reports a segment without bytes would otherwise be asked to export it.
#[test]
fn driver_that_reports_an_empty_segment_is_refused_with_the_reason() {
    let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd);
    let memory = Arc::new(memory.build().expect("simulated memory"));
    let mut vendor = Vendor::new(IfaceKind::CUDA, Arc::clone(&memory));
    vendor.segment_len = Some(0);
    let vendor: Arc<dyn Iface> = Arc::new(vendor);
    let nics = Loopback::builder().nic("loop0").imports(IMPORTS);
    let bench = Bench::over(memory, Arc::clone(&vendor), nics, DefaultPathSelector::new());
    let domain = bench.domain("loop0", P2pPolicy::Required);
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&vendor, &request).expect("memory");
    let error = register_range(&domain, buffer.range()).expect_err("an empty segment");
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert!(error.trace()[0].call.starts_with("segments("), "{error:#}");
    assert_eq!(bench.calls(DeviceCall::ExportDmaBuf), 0);
    assert_eq!(bench.device.stats().live_exports, 0);
}
