//! MR-13: memory that the application passes as a dma-buf.

use std::os::fd::AsFd;

use hmem::{
    Address, BorrowedDmaBuf, DeviceId, DmaBufOffset, ErrorKind, Iface, IfaceExt, IfaceKind, Iova,
    MrFlags, Path, Result, fabric::MrAttr, iface::DmaBufExport, iface::DmaBufMapping,
    path::P2pPolicy, system::System,
};
use rustix::{
    fs::{SeekFrom, seek},
    param::page_size,
};

use crate::{
    config::{TestConfig, need, needs, over_configs},
    memory::{HeldCopies, pattern},
    net::{Net, REMOTE, bind_if_needed, mr_attr, raw},
};

over_configs! {
    /// MR-13
    a_dma_buf_registers_with_and_without_a_base_address: Pairwise, needs::DMA_BUFS;
    /// ARM-02, MR-13
    a_range_may_end_with_its_dma_buf_but_not_after_it: Pairwise, needs::DMA_BUFS;
    /// MR-13
    a_dma_buf_and_a_base_region_exclude_each_other: Pairwise, needs::DMA_BUFS;
    /// MR-13
    a_part_of_a_dma_buf_region_registers_as_a_sub_region: Pairwise, needs::SUB_REGIONS;
    /// MR-13
    wrong_dma_buf_requests_are_refused: Pairwise, needs::DMA_BUFS;
    /// MR-13
    disabled_p2p_refuses_dma_bufs_of_devices: Pairwise,
        need("direct path", "device memory may be reached directly", TestConfig::staged);
}

const LEN: u64 = 20_000;

/// Allocates a memory file with a pattern in it, and exports it as a dma-buf.
fn exported(net: &Net) -> (System, hmem::Allocation, DmaBufExport) {
    let system = System::new();
    let memory = system.memfd(LEN).expect("memory file");
    system.write_bytes(memory.base(), &pattern(13, LEN as usize)).expect("write");
    let nic = &net.target.domain.provider_attr().nic;
    let export = system.export_dma_buf(memory.range, nic, DmaBufMapping::Default).expect("export");
    (system, memory, export)
}

/// Registers a dma-buf of host memory. While the policy disables direct access to device memory,
/// the request names the system iface. Otherwise the dma-buf is refused, unless the kernel names an
/// exporter of host memory.
fn register(net: &Net, dma_buf: BorrowedDmaBuf<'_>) -> Result<hmem::MemoryRegion> {
    let iface = (net.config.policy == P2pPolicy::Disabled).then_some(IfaceKind::SYSTEM);
    let attr = MrAttr { iface, ..MrAttr::new(raw(dma_buf), REMOTE) };
    net.try_expose(&attr, MrFlags::MR_DMABUF)
}

fn a_dma_buf_registers_with_and_without_a_base_address(config: &TestConfig) {
    let net = Net::open(config);
    let (system, memory, export) = exported(&net);
    let before = net.live();
    for base_addr in [None, Some(memory.base()), Some(Address(0x7000_0000_1000))] {
        for (offset, len) in [(0, LEN), (4096, 100), (4097, 9000), (LEN - 1, 1)] {
            let offset_in = DmaBufOffset(export.offset.0 + offset);
            let attr = BorrowedDmaBuf { fd: export.fd.as_fd(), offset: offset_in, len, base_addr };
            let region = register(&net, attr).expect("register");
            let address = base_addr.unwrap_or_default().0 + offset_in.0;
            assert_eq!((region.range().start(), region.len()), (Address(address), len));
            let expected = if config.virtual_addresses() { Iova(address) } else { Iova(0) };
            let key = net.key(&region);
            assert_eq!((region.base_addr(), key.base()), (expected, expected));
            assert_eq!(region.decision().unwrap().path, Path::DmaBuf);
            let bytes =
                pattern(13, LEN as usize)[offset as usize..(offset + len) as usize].to_vec();
            assert_eq!(net.pull(&key, 0, len as usize).expect("read"), bytes);
            net.push(&key, len - 1, &[0xFE]).expect("write");
            let mut last = [0];
            let at = Address(memory.base().0 + offset + len - 1);
            system.read_bytes(at, &mut last).expect("read");
            assert_eq!(last, [0xFE]);
            system.write_bytes(at, &bytes[len as usize - 1..]).expect("write");
            assert_eq!(
                net.push(&key, len, &[1]).unwrap_err().kind(),
                net.seen(ErrorKind::OutOfBounds)
            );
            region.close().expect("close");
        }
    }
    assert_eq!(net.live(), before);
    // The registration outlives the fd.
    let attr =
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset: export.offset, len: LEN, base_addr: None };
    let region = register(&net, attr).expect("register");
    drop(export);
    assert_eq!(net.pull(&net.key(&region), 0, 8).expect("read"), pattern(13, 8));
}

fn a_range_may_end_with_its_dma_buf_but_not_after_it(config: &TestConfig) {
    let net = Net::open(config);
    let (_system, _memory, export) = exported(&net);
    let before = net.live();
    // A dma-buf has whole pages, so it is longer than the memory.
    let size = seek(&export.fd, SeekFrom::End(0)).expect("a dma-buf has a size");
    assert!(size >= LEN && size.is_multiple_of(page_size() as u64), "{size}");
    let dma_buf = |offset, len| {
        let offset = DmaBufOffset(offset);
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset, len, base_addr: None }
    };
    for (offset, len) in [(size - 1, 1), (size - 333, 333), (4099, size - 4099), (0, size)] {
        let region = register(&net, dma_buf(offset, len)).expect("a range of the dma-buf");
        let key = net.key(&region);
        net.push(&key, len - 1, &[0x5A]).expect("write the last byte");
        assert_eq!(net.pull(&key, len - 1, 1).expect("read the last byte"), [0x5A]);
        let beyond = net.push(&key, len, &[1]).unwrap_err();
        assert_eq!(beyond.kind(), net.seen(ErrorKind::OutOfBounds));
        region.close().expect("close");
    }
    for (offset, len) in [(size - 1, 2), (size - 333, 334), (size, 1), (size + 1, 1), (0, size + 1)]
    {
        let kind = register(&net, dma_buf(offset, len)).expect_err("past the end").kind();
        assert!(
            matches!(
                kind,
                ErrorKind::BadAddress | ErrorKind::OutOfBounds | ErrorKind::InvalidArgument
            ),
            "{len} bytes at {offset}: {kind}"
        );
    }
    assert_eq!(net.live(), before);
}

fn a_dma_buf_and_a_base_region_exclude_each_other(config: &TestConfig) {
    let net = Net::open(config);
    let (_system, _memory, export) = exported(&net);
    let attr =
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset: export.offset, len: LEN, base_addr: None };
    let whole = register(&net, attr).expect("register");
    let before = net.live();
    let part = MrAttr::new((&whole, whole.range()), REMOTE);
    assert_eq!(
        net.try_expose(&part, MrFlags::MR_DMABUF).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(net.live(), before);
}

fn a_part_of_a_dma_buf_region_registers_as_a_sub_region(config: &TestConfig) {
    let net = Net::open(config);
    let (_system, _memory, export) = exported(&net);
    let attr =
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset: export.offset, len: LEN, base_addr: None };
    let whole = register(&net, attr).expect("register");
    let part = whole.range().slice(100, 50).expect("a part");
    let sub = whole.sub(part, REMOTE, net.fresh_key()).expect("sub-region");
    bind_if_needed(&net.target, &sub).expect("bind and enable");
    assert_eq!(net.pull(&net.key(&sub), 0, 50).expect("read"), pattern(13, LEN as usize)[100..150]);
}

fn wrong_dma_buf_requests_are_refused(config: &TestConfig) {
    let net = Net::open(config);
    let (_system, memory, export) = exported(&net);
    let before = net.live();
    let good =
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset: export.offset, len: LEN, base_addr: None };
    let refused = |dma_buf: BorrowedDmaBuf<'_>| {
        let error = register(&net, dma_buf).expect_err("a mistake was registered");
        assert_eq!(net.live(), before);
        error.kind()
    };
    assert_eq!(refused(BorrowedDmaBuf { len: 0, ..good }), ErrorKind::ZeroLength);
    assert_eq!(
        refused(BorrowedDmaBuf {
            base_addr: Some(Address(u64::MAX)),
            offset: DmaBufOffset(2),
            ..good
        }),
        ErrorKind::AddressWraps
    );
    assert_eq!(
        refused(BorrowedDmaBuf { base_addr: Some(Address(u64::MAX - 100)), len: 200, ..good }),
        ErrorKind::AddressWraps
    );
    let outside = [
        BorrowedDmaBuf { len: 1 << 30, ..good },
        BorrowedDmaBuf { offset: DmaBufOffset(1 << 40), ..good },
    ];
    for attr in outside {
        let kind = refused(attr);
        assert!(
            matches!(
                kind,
                ErrorKind::BadAddress | ErrorKind::OutOfBounds | ErrorKind::InvalidArgument
            ),
            "{kind}"
        );
    }
    let ranges = [memory.range];
    assert_eq!(
        net.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::MR_DMABUF).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let plain = MrAttr::new(raw(good), REMOTE);
    assert_eq!(
        net.try_expose(&plain, MrFlags::empty()).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let nobody = Some(IfaceKind(0xffff));
    let nowhere = MrAttr { iface: nobody, ..plain };
    let error =
        net.try_expose(&nowhere, MrFlags::MR_DMABUF).expect_err("an absent iface was accepted");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    if let Some(device) = &net.device {
        let beyond = MrAttr { iface: Some(device.kind()), device: Some(DeviceId(2)), ..plain };
        let error = net
            .try_expose(&beyond, MrFlags::MR_DMABUF)
            .expect_err("a device out of range was accepted");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(net.live(), before);
}

fn disabled_p2p_refuses_dma_bufs_of_devices(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 4096));
    let device = net.device.as_ref().expect("a device");
    let nic = &net.target.domain.provider_attr().nic;
    let export =
        device.export_dma_buf(memory.range(), nic, DmaBufMapping::Default).expect("export");
    let dma_buf =
        BorrowedDmaBuf { fd: export.fd.as_fd(), offset: export.offset, len: 4096, base_addr: None };
    let attr = MrAttr { iface: Some(device.kind()), ..MrAttr::new(raw(dma_buf), REMOTE) };
    let before = net.live();
    let error = net.try_expose(&attr, MrFlags::MR_DMABUF).expect_err("the policy was ignored");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(net.live(), before);
}
