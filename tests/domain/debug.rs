//! Tests that `Debug` of every handle is one short line, because it appears in logs and panic
//! messages.
#![allow(unsafe_code)]

use std::{fmt::Debug, sync::Arc};

use crate::silent::Silent;
use hmem::{
    Access, AddressRange, AllocationKind, Batch, Builder, CacheAttr, DeviceBuffer, DeviceId,
    Domain, DomainAttr, Hmem, Iface, IfaceKind, MrMode, Promise, Raw, Request,
    iface::AllocRequest,
    loopback::Loopback,
    provider::EndpointAttr,
    system::{
        FreeDetection, SIMULATED, Simulated,
        monitor::{HostMonitorKind, ImportMonitor},
    },
};

const PAGE: u64 = 4096;
/// Fewer than the files that a process may open by default, since each export is a file.
const COUNT: usize = 300;

/// Maximum length of a handle's `Debug` text, in bytes.
const MAX_LEN: usize = 5_000;

fn check(name: &str, value: &dyn Debug) {
    for text in [format!("{value:?}"), format!("{value:#?}")] {
        let start: String = text.chars().take(300).collect();
        assert!(text.len() <= MAX_LEN, "{name} takes {} bytes: {start}", text.len());
    }
    let line = format!("{value:?}");
    assert!(!line.contains('\n') && !line.is_empty(), "{name} is not one line: {line}");
}

fn buffers(device: &Arc<dyn Iface>) -> Vec<DeviceBuffer> {
    let request = AllocRequest { len: PAGE, device: DeviceId(0), kind: AllocationKind::Device };
    (0..COUNT).map(|_| DeviceBuffer::allocate(device, &request).expect("memory")).collect()
}

/// Registers all ranges. Checks the `Debug` text of the domain, and of one handle of each kind that
/// the domain returns.
fn check_domain(domain: &Domain, ranges: &[AddressRange], kind: IfaceKind) {
    let access = Access::REMOTE_READ;
    // SAFETY: nothing refers into the memory, which outlives the regions.
    let raw = |range: &AddressRange| unsafe { Raw::new(*range, Promise::ReadOnly) };
    let requests = ranges.iter().map(|range| Request::new(raw(range), access));
    let nics = [domain];
    let batch = requests.fold(Batch::on(&nics), Batch::add);
    check("batch", &batch);
    let registered = batch.register().expect("registered");
    let cache = domain.cache().expect("a cache");
    let lease = |range| cache.get(raw(range), access).expect("registered");
    let leases: Vec<_> = ranges.iter().map(lease).collect();
    let uncached = leases[0].lease().uncached_reason();
    assert!(uncached.is_none(), "{uncached:?}");
    let queue = domain.open_cq(8).expect("a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let monitor = cache.monitor(kind).expect("a monitor");
    check("domain", domain);
    check("request", &Request::new(raw(&ranges[7]), access));
    check("regions", &registered);
    check("view", &registered.view(0, 7, 0).expect("there"));
    check("region", &registered.regions()[7]);
    check("cache", cache);
    check("lookup handle", &cache.lookup_handle());
    check("lease", &leases[7]);
    check("monitor", &monitor);
    check("endpoint", &endpoint);
    check("provider's domain", &domain.provider_domain());
    check("registry", domain.registry());
}

fn builder(device: &Arc<dyn Iface>) -> Builder {
    Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(device))
        .provider(Loopback::builder().build().expect("a software NIC"))
}

fn domain(hmem: &Hmem) -> Domain {
    let mr_mode = MrMode::empty();
    let attr = DomainAttr { mr_mode, cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("a domain")
}

#[test]
fn handles_of_device_memory_print_one_short_line() {
    for detection in [FreeDetection::Identity, FreeDetection::Callback] {
        let simulated = Simulated::builder().free_detection(detection).build().expect("a device");
        let device: Arc<dyn Iface> = Arc::new(simulated);
        let buffers = buffers(&device);
        let ranges: Vec<_> = buffers.iter().map(|buffer| buffer.allocation().range).collect();
        let hmem = builder(&device).build().expect("the ifaces start");
        check_domain(&domain(&hmem), &ranges, SIMULATED);
        check("device", &device);
        check("library", &hmem);
        check("buffer", &buffers[0]);
    }
}

#[test]
fn handles_of_host_memory_print_one_short_line() {
    let device: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    let bytes = vec![0_u8; 2 * COUNT * PAGE as usize];
    let whole = AddressRange::of(&bytes);
    let ranges: Vec<_> =
        (0..COUNT as u64).map(|at| whole.slice(2 * at * PAGE, 64).expect("inside")).collect();
    let import = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
    let builders = [
        // Uses memhooks, and userfaultfd as well if the system has it.
        builder(&device).cache_monitor(HostMonitorKind::Auto),
        builder(&device).cache_monitor(HostMonitorKind::MemHooks),
        builder(&device).imported_cache_monitor(import),
    ];
    for builder in builders {
        let hmem = builder.build().expect("the ifaces start");
        check_domain(&domain(&hmem), &ranges, IfaceKind::SYSTEM);
        check("host memory", hmem.iface(IfaceKind::SYSTEM).expect("it is always there"));
        check("library", &hmem);
    }
}
