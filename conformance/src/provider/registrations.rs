//! Behaviours of registrations: calls, rights, sizes, ranges, page sizes and dma-bufs.

#![allow(unsafe_code, reason = "copies by address")]

use std::os::fd::{AsFd, BorrowedFd};

use hmem_core::{
    Access, Address, AddressRange, Allocation, BorrowedDmaBuf, DmaBufOffset, Domain, ErrorKind,
    IfaceExt, IfaceKind, Iova, MemoryRegion, MrFlags, MrMode, Path, Result,
    fabric::{self, MrAttr},
    iface::{DmaBufExport, DmaBufMapping},
    os_page_sizes,
    path::P2pPolicy,
    provider::Features,
};
use hmem_iface_system::System;
use rustix::{
    fs::{SeekFrom, seek},
    param::page_size,
};

use super::{case::Case, link::CaseLink};
use crate::{
    bytes::{assert_bytes, pattern},
    link::{REMOTE, mr_attr, raw},
    trial::assert_kind,
};

/// A call that registers one range: `reg`, `regv` or `regattr`.
type Register<'a> = Box<dyn Fn(AddressRange) -> Result<MemoryRegion> + 'a>;

fn three_ways(domain: &Domain) -> [Register<'_>; 3] {
    const KEY: u64 = 7;
    let none = MrFlags::empty();
    [
        Box::new(move |range| fabric::reg(domain, raw(range), REMOTE, KEY, none)),
        Box::new(move |range| fabric::regv(domain, raw(&[range]), REMOTE, KEY, none)),
        Box::new(move |range| fabric::regattr(domain, &mr_attr(&[range], REMOTE).key(KEY), none)),
    ]
}

pub(super) fn reg_regv_and_regattr_register_a_range_alike(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(8192);
    let (range, before) = (memory.part(100, 5000), link.live());
    let lives = three_ways(&link.target.domain).map(|register| {
        let region = register(range).expect("register");
        link.target.make_usable(&region);
        assert_eq!((region.ranges(), region.range()), (&[range][..], range));
        assert_eq!((region.len(), region.access()), (5000, REMOTE));
        let key = link.key(&region);
        assert_eq!(key.base(), region.base_addr());
        if !case.has(MrMode::PROV_KEY) && !case.has(MrMode::RAW) {
            assert_eq!(key.as_u64().expect("one number"), 7);
        }
        link.assert_works(&key);
        let live = link.live();
        region.close().expect("close");
        assert_eq!(link.live().regions, before.regions);
        live
    });
    assert!(lives.iter().all(|live| *live == lives[0]), "the calls hold other things: {lives:?}");
}

/// A NIC without test control may refuse rights that it cannot grant separately, as unsupported.
pub(super) fn every_set_of_rights_registers_at_any_start(case: &Case) {
    // The number of parts is odd, so that each right meets each part although a set of rights is
    // registered with one part only.
    const PARTS: [(u64, u64); 5] = [(0, 1), (1, 1), (4095, 2), (63, 4097), (4096, 4096)];
    let link = CaseLink::open(case);
    let memory = link.bytes(64 << 10);
    let before = link.live();
    let rights: Vec<_> = Access::all().iter().collect();
    let windows = case.features.contains(Features::WINDOWS) && case.is_host();
    let mut registered = 0;
    for bits in 0..1usize << rights.len() {
        let chosen = rights.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
        let access: Access = chosen.map(|(_, right)| *right).collect();
        if access.contains(Access::MW_BIND) && case.control.is_none() && !windows {
            continue;
        }
        let (start, len) = PARTS[bits % PARTS.len()];
        let range = [memory.part(start, len)];
        match link.try_expose(&mr_attr(&range, access), MrFlags::empty()) {
            Ok(region) => {
                registered += 1;
                assert_eq!((region.access(), region.range()), (access, range[0]));
                assert_eq!(link.live().regions, before.regions + 1);
                region.close().unwrap_or_else(|why| panic!("close with {access}: {why}"));
            }
            Err(why) if case.control.is_none() => {
                assert_kind(&why, ErrorKind::Unsupported, "a set of rights")
            }
            Err(why) => panic!("register with {access}: {why}"),
        }
    }
    assert!(registered > 0, "the NIC refuses every set of rights");
    assert_eq!(link.live(), before, "something stayed registered");
}

pub(super) fn sizes_up_to_64_mib_are_reached_at_both_ends(case: &Case) {
    const LARGEST: u64 = 64 << 20;
    let link = CaseLink::open(case);
    let memory = link.bytes(LARGEST as usize + 4096);
    let before = link.live();
    for size in
        [1, 2, 63, 64, 4095, 4096, 4097, 65_535, (1 << 20) + 1, (2 << 20) - 1, 2 << 20, LARGEST]
    {
        for start in [0, 1, 511] {
            let region = link.expose(memory.part(start, size), REMOTE);
            let key = link.key(&region);
            for at in [0, size - 1] {
                link.push(&key, at, &[0xA5]).expect("write");
                let found = memory.get(start + at, 1);
                assert_eq!(found, [0xA5], "{size} bytes from {start}: byte {at}");
                memory.put(start + at, &[0]);
            }
            let what = format!("a write after {size} bytes");
            case.assert_refused(link.push(&key, size, &[0xA5]), ErrorKind::OutOfBounds, &what);
            region.close().expect("close");
        }
    }
    assert_eq!(link.live(), before, "something stayed registered");
}

pub(super) fn region_may_have_as_many_ranges_as_the_nic_allows(case: &Case) {
    let link = CaseLink::open(case);
    let limit = case.attr.mr_iov_limit.min(64) as u64;
    let memory = link.bytes((limit as usize + 1) * 4096);
    let before = link.live();
    let ranges: Vec<_> = (0..limit).map(|at| memory.part(at * 4096 + at, 16)).collect();
    for count in 1..=limit {
        let attr = mr_attr(&ranges[..count as usize], REMOTE);
        let region = link.try_expose(&attr, MrFlags::empty()).expect("register");
        assert_eq!(region.len(), 16 * count);
        region.close().expect("close");
    }
    assert_eq!(link.live(), before, "something stayed registered");
}

pub(super) fn page_sizes_of_the_system_and_nic_register(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(8192);
    let ranges = [memory.part(5, 5000)];
    let attr = mr_attr(&ranges, REMOTE);
    let of_nic = &case.attr.page_sizes;
    let sizes = os_page_sizes().iter().copied().filter(|size| of_nic.contains(size));
    for page_size in std::iter::once(0).chain(sizes) {
        let region = link.try_expose(&MrAttr { page_size, ..attr }, MrFlags::empty());
        let region = region.expect("a page size of the system and the NIC");
        assert_eq!(region.page_size(), page_size);
        link.assert_works(&link.key(&region));
    }
    let before = link.live();
    for page_size in [1, 4095, 4097, 3 << 20, usize::MAX] {
        let error = link.try_expose(&MrAttr { page_size, ..attr }, MrFlags::empty()).unwrap_err();
        assert_kind(&error, ErrorKind::BadPageSize, "a page size that no system has");
        assert_eq!(error.context_value("page_size"), Some(&*page_size.to_string()));
    }
    assert_eq!(link.live(), before);
}

/// Length of the memory that a test exports as a dma-buf.
const LEN: u64 = 20_000;

/// A memory file, exported as a dma-buf.
struct Exported {
    system: System,
    memory: Allocation,
    export: DmaBufExport,
}

impl Exported {
    fn new(link: &CaseLink) -> Self {
        let system = System::new();
        let memory = system.memfd(LEN).expect("memory file");
        let nic = &link.target.domain.provider_attr().nic;
        let export = system.export_dma_buf(memory.range, nic, DmaBufMapping::Default);
        let exported = Self { system, memory, export: export.expect("export") };
        exported.put(0, &pattern(13, LEN));
        exported
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        let to = Address(self.memory.base().0 + offset);
        // SAFETY: the allocation lives as long as this value, and no reference to it exists.
        unsafe { self.system.write(to, bytes) }.expect("write");
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.export.fd.as_fd()
    }

    /// Returns the part of the dma-buf with `len` bytes, `offset` bytes after its start.
    fn part(&self, offset: u64, len: u64, base_addr: Option<Address>) -> BorrowedDmaBuf<'_> {
        BorrowedDmaBuf { fd: self.fd(), offset: DmaBufOffset(offset), len, base_addr }
    }
}

/// Registers a dma-buf of host memory. While the policy disables direct access to device memory,
/// the request names the system iface. Otherwise the dma-buf is refused, unless the kernel names an
/// exporter of host memory.
fn register(link: &CaseLink, dma_buf: BorrowedDmaBuf<'_>) -> Result<MemoryRegion> {
    let iface = (link.case.policy() == P2pPolicy::Disabled).then_some(IfaceKind::SYSTEM);
    let attr = MrAttr { iface, ..MrAttr::new(raw(dma_buf), REMOTE) };
    link.try_expose(&attr, MrFlags::MR_DMABUF)
}

pub(super) fn dma_buf_registers_with_and_without_a_base_address(case: &Case) {
    let link = CaseLink::open(case);
    let exported = Exported::new(&link);
    let (all, first) = (pattern(13, LEN), exported.export.offset.0);
    let before = link.live();
    for base_addr in [None, Some(exported.memory.base()), Some(Address(0x7000_0000_1000))] {
        for (offset, len) in [(0, LEN), (4096, 100), (4097, 9000), (LEN - 1, 1)] {
            let at = first + offset;
            let region = register(&link, exported.part(at, len, base_addr)).expect("register");
            let address = base_addr.unwrap_or_default().0 + at;
            assert_eq!((region.range().start(), region.len()), (Address(address), len));
            let base = if case.virtual_addresses() { Iova(address) } else { Iova(0) };
            let key = link.key(&region);
            assert_eq!((region.base_addr(), key.base()), (base, base));
            assert_eq!(region.decision().expect("decision").path, Path::DmaBuf);
            let bytes = &all[offset as usize..(offset + len) as usize];
            assert_bytes(&link.pull(&key, 0, len).expect("read"), bytes, "bytes of a dma-buf");
            link.push(&key, len - 1, &[0xFE]).expect("write");
            let mut last = [0];
            let at = Address(exported.memory.base().0 + offset + len - 1);
            // SAFETY: the allocation lives as long as `exported`.
            unsafe { exported.system.read(at, &mut last) }.expect("read");
            assert_eq!(last, [0xFE]);
            exported.put(offset, bytes);
            let beyond = link.push(&key, len, &[1]);
            case.assert_refused(beyond, ErrorKind::OutOfBounds, "a write after the part");
            if case.features.contains(Features::SUB_REGIONS) && len > 1 {
                let part = region.range().slice(len / 2, len / 4).expect("a part");
                let sub = region.sub(part, REMOTE, link.fresh_key()).expect("sub-region");
                link.target.make_usable(&sub);
                let found = link.pull(&link.key(&sub), 0, len / 4).expect("read");
                let bytes = &bytes[len as usize / 2..][..len as usize / 4];
                assert_bytes(&found, bytes, "bytes of a sub-region of a dma-buf");
                sub.close().expect("close");
            }
            region.close().expect("close");
        }
    }
    assert_eq!(link.live(), before);
    let region = register(&link, exported.part(first, LEN, None)).expect("register");
    drop(exported.export);
    let found = link.pull(&link.key(&region), 0, 8).expect("the registration outlives the fd");
    assert_bytes(&found, &all[..8], "bytes of a dma-buf whose fd is closed");
}

pub(super) fn range_may_end_with_its_dma_buf_but_not_after_it(case: &Case) {
    let link = CaseLink::open(case);
    let exported = Exported::new(&link);
    let before = link.live();
    // A dma-buf has whole pages, so it is longer than the memory.
    let size = seek(exported.fd(), SeekFrom::End(0)).expect("a dma-buf has a size");
    assert!(size >= LEN && size.is_multiple_of(page_size() as u64), "{size}");
    for (offset, len) in [(size - 1, 1), (size - 333, 333), (4099, size - 4099), (0, size)] {
        let region = register(&link, exported.part(offset, len, None)).expect("a range");
        let key = link.key(&region);
        link.push(&key, len - 1, &[0x5A]).expect("write the last byte");
        assert_eq!(link.pull(&key, len - 1, 1).expect("read the last byte"), [0x5A]);
        let beyond = link.push(&key, len, &[1]);
        case.assert_refused(beyond, ErrorKind::OutOfBounds, "a write after the dma-buf");
        region.close().expect("close");
    }
    let past = [(size - 1, 2), (size - 333, 334), (size, 1), (size + 1, 1), (0, size + 1)];
    for (offset, len) in past.into_iter().chain([(0, 1 << 30), (1 << 40, LEN)]) {
        let kind = register(&link, exported.part(offset, len, None)).expect_err("past it").kind();
        let expected = [ErrorKind::BadAddress, ErrorKind::OutOfBounds, ErrorKind::InvalidArgument];
        assert!(expected.contains(&kind), "{len} bytes at {offset}: {kind}");
    }
    assert_eq!(link.live(), before);
}
