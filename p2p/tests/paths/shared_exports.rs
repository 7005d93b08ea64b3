//! Exports that several registrations share (VRB-08): memory that is registered with one NIC after
//! the other is exported once.

#![allow(unsafe_code, reason = "registers memory by address")]

use std::{sync::Arc, time::Duration};

use hmem_core::{
    Access, Address, AddressRange, Allocation, AllocationKind, DeviceId, Domain, DomainAttr, Errno,
    Iface, IfaceExt, IfaceKind, MemoryRegion, MrMode, Path, Promise, Raw, Region, RegionState,
    Registry, Request, Result, SharedExports,
    iface::{AllocRequest, Device, DmaBufExporter, DmaBufMapping},
    path::P2pPolicy,
    provider::{EndpointAttr, Imports},
};
use hmem_iface_system::{
    AddressReuse, DeviceCall, DmaBufKind, P2pMatrix, Simulated, SimulatedBuilder, System,
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Faults, Loopback, NicCall};

const ACCESS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// A simulated device and two NICs that import dma-bufs.
struct Bench {
    device: Arc<Simulated>,
    iface: Arc<dyn Iface>,
    nics: [Domain; 2],
    faults: Faults,
}

impl Bench {
    fn new() -> Self {
        Self::with(Simulated::builder(), P2pPolicy::Required)
    }

    fn with(device: SimulatedBuilder, p2p: P2pPolicy) -> Self {
        let device =
            device.address_reuse(AddressReuse::JustFreed).dma_buf(DmaBufKind::MemFd).build();
        let device = Arc::new(device.expect("a simulated device"));
        let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        registry.add(Arc::clone(&iface)).expect("its kind is free");
        let registry = Arc::new(registry);
        let faults = Faults::new();
        let imports = Imports {
            dma_buf: true,
            pcie_mapping_first: Some(false),
            data_direct: None,
            peer_memory: false,
            staged: true,
        };
        let fabric = Loopback::builder().nic("loop0").nic("loop1").imports(imports);
        let fabric = fabric.faults(&faults).build().expect("a fabric");
        let paths = Arc::new(DefaultPathSelector::new());
        let nics = ["loop0", "loop1"].map(|nic| {
            let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
            let attr =
                DomainAttr { nic: Some(nic.to_owned()), p2p, mr_mode, ..DomainAttr::default() };
            Domain::open(&fabric, Arc::clone(&registry), Arc::clone(&paths) as _, attr)
                .expect("a domain")
        });
        Self { device, iface, nics, faults }
    }

    fn allocate(&self, kind: AllocationKind, len: u64) -> Allocation {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        self.iface.allocate(&request).expect("device memory")
    }

    fn free(&self, allocation: &Allocation) {
        // SAFETY: the tests close every region of the memory before, and make no reference to it.
        unsafe { self.iface.free(allocation) }.expect("live");
    }

    fn copy_in(&self, allocation: &Allocation, byte: u8) {
        let bytes = vec![byte; allocation.range.len() as usize];
        let from = Address(bytes.as_ptr().expose_provenance() as u64);
        // SAFETY: the bytes and the allocation have this length and live during the call.
        unsafe { self.iface.copy(allocation.base(), from, bytes.len() as u64) }.expect("copied");
    }

    fn exports(&self) -> u64 {
        self.device.stats().calls(DeviceCall::ExportDmaBuf)
    }

    fn live_exports(&self) -> u64 {
        self.device.stats().live_exports
    }
}

/// The device of a [`Bench`], whose allocations have no identities here.
#[derive(Debug)]
struct WithoutIdentities(Arc<Simulated>);

// SAFETY: each answer and facet comes from the simulated device.
unsafe impl Iface for WithoutIdentities {
    fn kind(&self) -> IfaceKind {
        self.0.kind()
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.0.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.0.query(address)
    }

    fn has_identities(&self) -> bool {
        false
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.copy(to, from, len) }
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        self.0.dma_buf()
    }
}

fn register(nic: &Domain, range: AddressRange, exports: &SharedExports) -> Result<Region<Raw>> {
    // SAFETY: the tests keep the memory until its regions are closed, and make no reference to it.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    Ok(nic.submit(Request::new(memory, ACCESS).exports(exports))?)
}

/// Reads the first bytes of a region through its NIC.
fn pull(nic: &Domain, region: &MemoryRegion) -> Vec<u8> {
    let queue = nic.open_cq(16).expect("a queue");
    let endpoint = nic.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let into = nic.register(vec![0; 64], Access::READ).expect("registered");
    let key = region.key().expect("a key");
    let from = key.slice(0, 64).expect("inside");
    endpoint.read(&[into.slice(0, 64).expect("inside")], &[from], peer, 1).expect("posted");
    let mut done = Vec::new();
    queue.wait(&mut done, 1, Duration::MAX).expect("a completion");
    done.remove(0).result.expect("the bytes");
    let mut bytes = vec![0; 64];
    into.read(0, &mut bytes).expect("host bytes");
    bytes
}

#[test]
fn memory_registered_with_one_nic_after_the_other_is_exported_once() {
    let bench = Bench::new();
    let memory = bench.allocate(AllocationKind::Device, 2 * page_size());
    bench.copy_in(&memory, 7);
    let exports = SharedExports::new();
    let regions =
        bench.nics.each_ref().map(|nic| register(nic, memory.range, &exports).expect("registered"));
    assert_eq!((bench.exports(), bench.live_exports(), exports.len()), (1, 1, 1));
    for (nic, region) in bench.nics.iter().zip(&regions) {
        assert_eq!(region.decision().expect("device memory").path, Path::DmaBuf);
        assert_eq!(pull(nic, region), [7; 64]);
    }

    let half = memory.range.slice(page_size(), page_size()).expect("inside");
    let part = register(&bench.nics[0], half, &exports).expect("registered");
    assert_eq!((bench.exports(), exports.len()), (2, 2), "another range is another export");

    let clone = exports.clone();
    drop(exports);
    assert_eq!(bench.live_exports(), 2, "a clone keeps the exports");
    drop(clone);
    assert_eq!(bench.live_exports(), 0, "the last clone releases the exports");
    assert_eq!(pull(&bench.nics[1], &regions[1]), [7; 64], "regions stay valid");
    drop((regions, part));
    bench.free(&memory);
}

#[test]
fn memory_that_was_freed_and_allocated_again_is_exported_anew() {
    let bench = Bench::new();
    let exports = SharedExports::new();
    let old = bench.allocate(AllocationKind::Device, page_size());
    bench.copy_in(&old, 1);
    register(&bench.nics[0], old.range, &exports).expect("registered").close().expect("closed");
    bench.free(&old);
    let new = bench.allocate(AllocationKind::Device, page_size());
    assert_eq!(new.range, old.range, "the device reuses the addresses");
    assert_ne!(new.id, old.id);
    bench.copy_in(&new, 2);
    let region = register(&bench.nics[1], new.range, &exports).expect("registered");
    assert_eq!(pull(&bench.nics[1], &region), [2; 64]);
    assert_eq!((bench.exports(), bench.live_exports(), exports.len()), (2, 1, 1));
    drop(region);
    bench.free(&new);
}

/// LIFE-07
#[test]
fn memory_whose_dma_buf_was_revoked_is_exported_anew() {
    let bench = Bench::new();
    let exports = SharedExports::new();
    let memory = bench.allocate(AllocationKind::Device, page_size());
    let old = register(&bench.nics[0], memory.range, &exports).expect("registered");
    assert!(bench.device.revoke_exports(memory.base()).expect("live"));
    assert_eq!(old.state(), RegionState::Revoked);
    bench.copy_in(&memory, 3);
    let new = register(&bench.nics[1], memory.range, &exports).expect("registered");
    assert_eq!(pull(&bench.nics[1], &new), [3; 64]);
    assert_eq!((bench.exports(), bench.live_exports(), exports.len()), (2, 1, 1));
    drop((old, new));
    bench.free(&memory);
}

#[test]
fn exports_that_cannot_be_shared_are_not_stored() {
    // Mapped by hand, so that the allocation does not tell what is mapped.
    let bench = Bench::new();
    let exports = SharedExports::new();
    let memory = bench.allocate(AllocationKind::Virtual, page_size());
    for nic in &bench.nics {
        register(nic, memory.range, &exports).expect("registered").close().expect("closed");
    }
    assert_eq!((bench.exports(), exports.len()), (2, 0));
    bench.free(&memory);

    // The device exports for reachable NICs only.
    let one = P2pMatrix::all_reachable().block(DeviceId(0), "loop1");
    let bench = Bench::with(Simulated::builder().p2p(one), P2pPolicy::Enabled);
    let memory = bench.allocate(AllocationKind::Device, page_size());
    let paths = bench.nics.each_ref().map(|nic| {
        let region = register(nic, memory.range, &exports).expect("registered");
        region.decision().expect("device memory").path
    });
    assert_eq!((paths, exports.len()), ([Path::DmaBuf, Path::Staged], 0));
    bench.free(&memory);
}

#[test]
fn refused_and_staged_registrations_store_nothing() {
    const EIO: Errno = Errno(5);
    let bench = Bench::new();
    let exports = SharedExports::new();
    let memory = bench.allocate(AllocationKind::Device, page_size());
    bench.faults.fail_nth(NicCall::Register, 1, EIO);
    register(&bench.nics[0], memory.range, &exports).expect_err("the NIC refuses the export");
    assert_eq!((bench.live_exports(), exports.is_empty()), (0, true));
    bench.faults.clear();
    bench.free(&memory);

    let bench = Bench::with(Simulated::builder(), P2pPolicy::Disabled);
    let memory = bench.allocate(AllocationKind::Device, page_size());
    let region = register(&bench.nics[0], memory.range, &exports).expect("registered");
    assert_eq!(region.decision().expect("device memory").path, Path::Staged);
    assert_eq!((bench.exports(), exports.is_empty()), (0, true));
    drop(region);
    bench.free(&memory);
}

#[test]
fn export_is_shared_under_its_mapping_if_its_memory_has_an_identity() {
    let bench = Bench::new();
    let memory = bench.allocate(AllocationKind::Device, page_size());
    let nic = &bench.nics[0].provider_attr().nic;
    let without: Arc<dyn Iface> = Arc::new(WithoutIdentities(Arc::clone(&bench.device)));
    for (iface, is_shared) in [(&bench.iface, true), (&without, false)] {
        let export = iface.export_dma_buf(memory.range, nic, DmaBufMapping::Default);
        let exports = SharedExports::new();
        let stored = exports.store(iface, &memory, memory.range, export.expect("an export"));
        assert_eq!(stored.is_ok(), is_shared);
        let found = |mapping| exports.find(iface, &memory, memory.range, mapping).is_some();
        let mappings = [DmaBufMapping::Default, DmaBufMapping::Pcie];
        assert_eq!(mappings.map(found), [is_shared, false]);
        if let Err(export) = stored {
            iface.release_dma_buf(export).expect("released");
        }
    }
    bench.free(&memory);
}
