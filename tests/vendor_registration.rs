//! Tests of behaviours that registrations of ROCr, Level Zero, Neuron and Gaudi memory share, over
//! the vendors' fake drivers and the software NIC. CUDA shares one of them.
#![cfg(all(
    feature = "cuda",
    feature = "neuron",
    feature = "rocr",
    feature = "synapseai",
    feature = "ze"
))]
#![allow(unsafe_code)]

mod vendors;
mod wire;

use hmem::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, DomainAttr, ErrorKind, Hmem,
    IfaceExt, IfaceKind, Request, Result,
    iface::{AllocRequest, Facet},
    loopback::Loopback,
};
use vendors::Vendor;
use wire::{REMOTE, Wire, pattern, raw};

const LEN: u64 = 64 << 10;
const VENDORS: [IfaceKind; 4] =
    [IfaceKind::ROCR, IfaceKind::ZE, IfaceKind::NEURON, IfaceKind::SYNAPSEAI];

fn open(vendor: &Vendor) -> Wire {
    let nic = Loopback::builder().build().expect("a NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(vendor.iface.clone());
    let hmem = hmem.provider(nic).build().expect("start");
    Wire::open(hmem.domain("loopback", DomainAttr::default()).expect("a domain"))
}

fn request(kind: AllocationKind) -> AllocRequest {
    AllocRequest { len: LEN, device: DeviceId(0), kind }
}

/// Allocates memory, registers it, moves bytes, closes the region and frees the memory. Adds memory
/// that could not be freed to `left`.
fn register_once(vendor: &Vendor, wire: &Wire, left: &mut Vec<Allocation>) -> Result<()> {
    let own = vendor.iface.allocate(&request(AllocationKind::Device))?;
    let moved = wire.expose(own.range).and_then(|region| {
        let moved = move_bytes(vendor, wire, &region, &own);
        region.close().map_err(hmem::Error::from).and(moved)
    });
    // SAFETY: the region is closed, and nothing else uses the memory.
    let freed = unsafe { vendor.iface.free(&own) };
    if freed.is_err() {
        left.push(own);
    }
    moved.and(freed)
}

fn move_bytes(
    vendor: &Vendor,
    wire: &Wire,
    region: &hmem::MemoryRegion,
    own: &Allocation,
) -> Result<()> {
    let (key, bytes) = (region.key()?, pattern(3, 1000));
    wire.put(&key, 5, &bytes)?;
    let mut found = vec![0; bytes.len()];
    // SAFETY: the memory is freed after this call.
    unsafe { vendor.iface.read(Address(own.base().0 + 5), &mut found) }?;
    assert!(found == bytes, "the device has other bytes than the NIC wrote");
    assert!(wire.get(&key, 5, bytes.len())? == bytes, "the NIC read other bytes");
    Ok(())
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// HM-06, REL-01
///
/// Each driver call during a registration fails in turn: the first to eighth call of each function.
/// A refused export leaves no file open.
#[test]
fn fault_at_any_driver_call_leaves_no_region_or_memory() {
    for kind in VENDORS {
        let vendor = Vendor::open(kind);
        let wire = open(&vendor);
        // A first registration creates objects that the iface and the NIC keep.
        register_once(&vendor, &wire, &mut Vec::new()).expect("no fault yet");
        let (regions, allocations) = (wire.domain.live().regions, vendor.allocations());
        let mut met = 0;
        for symbol in vendor.symbols() {
            let files = open_files();
            for nth in 1..=8 {
                let calls = vendor.calls(symbol);
                vendor.fail_nth(symbol, nth);
                let mut left = Vec::new();
                let outcome = register_once(&vendor, &wire, &mut left);
                vendor.heal();
                if vendor.calls(symbol) < calls + nth {
                    break;
                }
                met += 1;
                for own in left {
                    // SAFETY: the memory is unused: only its free failed.
                    unsafe { vendor.iface.free(&own) }.expect("the fault is gone");
                }
                let context = format!("{kind}: call {nth} of {symbol}, which ended in {outcome:?}");
                assert_eq!(wire.domain.live().regions, regions, "{context}");
                // Another registration recreates objects that the iface dropped because of the
                // fault.
                register_once(&vendor, &wire, &mut Vec::new()).expect(&context);
                assert_eq!(vendor.allocations(), allocations, "{context}");
                if is_export(symbol) {
                    assert_eq!(open_files(), files, "{context}");
                }
            }
        }
        assert!(met > 5, "{kind}: only {met} injected faults were reached");
    }
}

fn is_export(symbol: &str) -> bool {
    let name = symbol.to_ascii_lowercase();
    ["export", "get_dmabuf", "allocproperties", "getipchandle"]
        .iter()
        .any(|part| name.contains(part))
}

/// HM-02, DIAG-03
///
/// The caller names the vendor's iface as the owner of host memory, another vendor's memory, the
/// byte after an allocation, and freed memory.
#[test]
fn foreign_pointer_is_refused_with_the_reason() {
    for kind in VENDORS.into_iter().chain([IfaceKind::CUDA]) {
        let vendor = Vendor::open(kind);
        let wire = open(&vendor);
        let host = vec![0u8; 4096];
        let live = vendor.iface.allocate(&request(AllocationKind::Device)).expect("allocate");
        let end = Address(live.base().0 + live.range.len());
        let other = hmem::system::Simulated::builder().build().expect("a device");
        let others = other.allocate(&request(AllocationKind::Device)).expect("allocate");
        let freed = vendor.iface.allocate(&request(AllocationKind::Device)).expect("allocate");
        // SAFETY: nothing uses the memory.
        unsafe { vendor.iface.free(&freed) }.expect("free");
        for (what, start) in [
            ("host memory", Address::of_ptr(host.as_ptr())),
            ("another vendor's memory", others.base()),
            ("the byte after an allocation", end),
            ("freed memory", freed.base()),
        ] {
            let range = AddressRange::new(start, 64).expect("a range");
            // SAFETY: the registration is refused.
            let claim = Request::new(unsafe { raw(range) }, REMOTE).owner(kind, None);
            let error = wire.domain.submit(claim).expect_err(what).error;
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{kind}, {what}: {error}");
            assert!(error.remedy_text().is_some(), "{kind}, {what}: {error}");
            let text = format!("{error:#}");
            assert!(text.contains(vendor.iface.name()), "{kind}, {what}: {text}");
            let unknown = text.contains("does not know the address");
            assert!(unknown || kind == IfaceKind::ROCR, "{kind}, {what}: {text}");
        }
        // SAFETY: nothing uses the memory.
        unsafe { (vendor.iface.free(&live).expect("free"), other.free(&others).expect("free")) };
    }
}

/// HM-07
///
/// In these drivers an allocation is one physical segment. A range over two allocations is refused,
/// and the error names the first allocation.
#[test]
fn range_over_two_allocations_is_refused() {
    for kind in VENDORS {
        let vendor = Vendor::open(kind);
        let wire = open(&vendor);
        let own = vendor.iface.allocate(&request(AllocationKind::Device)).expect("allocate");
        let next = vendor.iface.allocate(&request(AllocationKind::Device)).expect("allocate");
        let (low, high) = if own.base().0 < next.base().0 { (&own, &next) } else { (&next, &own) };
        let len = high.base().0 + 64 - low.base().0;
        let both = AddressRange::new(low.base(), len).expect("a range");
        let error = wire.expose(both).expect_err("two allocations");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{kind}: {error}");
        let named = error.context_value("allocation");
        assert_eq!(named, Some(&*low.range.to_string()), "{kind}: {error}");
        for own in [own, next] {
            // SAFETY: nothing uses the memory.
            unsafe { vendor.iface.free(&own) }.expect("free");
        }
    }
}

/// HM-10
///
/// Neuron and Gaudi have no IPC handles, and report that. `iface-{rocr,ze}/tests` open handles in
/// another process.
#[test]
fn missing_facet_is_unsupported_with_the_reason() {
    for kind in [IfaceKind::NEURON, IfaceKind::SYNAPSEAI] {
        let vendor = Vendor::open(kind);
        assert!(vendor.iface.ipc().is_none());
        for facet in [Facet::Ipc, Facet::PeerMemory, Facet::HostRegistrar, Facet::CopyEngine] {
            let error = vendor.iface.unavailable(facet);
            assert!(error.is_unsupported(), "{kind}: {error}");
            assert!(error.context_value("why").is_some(), "{kind}: {error}");
        }
    }
}
