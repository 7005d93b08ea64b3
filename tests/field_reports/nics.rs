//! Reports about the owner of memory and about dma-bufs that the application supplies.

use std::sync::Arc;

use hmem::{
    AllocationKind, DeviceBuffer, DeviceId, DmaBuf, DomainAttr, ErrorKind, Hmem, Iface, IfaceExt,
    IfaceKind, MrMode, Promise, Raw, Request,
    iface::{AllocRequest, DmaBufMapping},
    loopback::Loopback,
    path::P2pPolicy,
    system::Simulated,
};

use crate::wire::{REMOTE, Wire, pattern, raw};

/// Opens a domain that knows host memory only.
fn wire_without_devices() -> Wire {
    let nic = Loopback::builder().needs(MrMode::ALLOCATED).build().expect("a NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().build().expect("the ifaces start");
    let attr = DomainAttr { p2p: P2pPolicy::Required, ..DomainAttr::default() };
    Wire::open(hmem.domain_on(&nic, attr).expect("a domain"))
}

fn buffer(device: &Arc<dyn Iface>) -> DeviceBuffer {
    let len = 4 * rustix::param::page_size() as u64;
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(device, &request).expect("allocate")
}

/// REL-06, HM-01
///
/// The library was built or started without the iface of the device.
#[test]
fn nixl_1385_device_memory_is_not_registered_as_host_memory() {
    let wire = wire_without_devices();
    let device: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    let tensor = buffer(&device);
    // SAFETY: the registrations are refused.
    let memory = || unsafe { raw(tensor.range()) };
    let claimed = Request::new(memory(), REMOTE).owner(IfaceKind::CUDA, None);
    let error = wire.domain.submit(claimed).expect_err("no such iface").error;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(format!("{error:#}").contains("cuda"), "{error}");
    assert!(error.remedy_text().is_some(), "{error}");
    let error = wire.domain.register(memory(), REMOTE).expect_err("no host pages").error;
    assert_eq!(error.kind(), ErrorKind::BadAddress, "{error}");
    assert!(error.remedy_text().is_some(), "{error}");
    assert_eq!(wire.domain.live().regions, 0);
}

/// REL-06, MR-13
///
/// The application has a dma-buf of its device, and the library has no iface for the device.
#[test]
fn ucx_11723_dma_buf_of_a_device_without_an_iface_is_registered() {
    let wire = wire_without_devices();
    let device: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    let nic = wire.domain.provider_attr().nic.clone();
    let tensors = [buffer(&device), buffer(&device)];
    let regions = [1, 2].map(|seed| {
        let tensor = &tensors[seed as usize - 1];
        let range = tensor.range();
        let export = device.export_dma_buf(range, &nic, DmaBufMapping::Default).expect("an export");
        let fd = export.fd.try_clone().expect("a descriptor");
        let (offset, len) = (export.offset, export.len);
        // SAFETY: the tensors outlive the regions, and no reference into them exists.
        let memory =
            unsafe { Raw::new(DmaBuf { fd, offset, len, base_addr: None }, Promise::ReadWrite) };
        let region = wire.domain.register(memory, REMOTE).expect("registered");
        // The application's descriptors may go now.
        device.release_dma_buf(export).expect("release");
        let key = region.key().expect("a key");
        wire.put(&key, 10, &pattern(seed, 5000)).expect("write");
        region
    });
    // Both have the length and no address: each key still names its own tensor.
    for (index, region) in regions.into_iter().enumerate() {
        let expected = pattern(index as u64 + 1, 5000);
        let mut found = vec![0; 5000];
        tensors[index].read(10, &mut found).expect("the device's own copy");
        assert!(found == expected, "tensor {index}");
        let key = region.key().expect("a key");
        assert!(wire.get(&key, 10, 5000).expect("read") == expected, "tensor {index}");
        region.close().expect("close");
    }
}
