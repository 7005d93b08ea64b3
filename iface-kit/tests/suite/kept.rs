//! Tests of dma-bufs, and of memory that stays allocated while a dma-buf is in use.

use std::{
    os::fd::{AsFd, BorrowedFd},
    ptr, slice,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind, Result,
    iface::{Device, DmaBufMapping},
};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_kit::announced::{Announced, Block, BlockRange, DmaBuf, Driver};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::world::{
    Over, World, allocate, free, gaudi, neuron, nic, over_both, page, pattern, range,
};

/// Returns bytes of a dma-buf, which can be mapped and not read.
fn mapped(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Vec<u8> {
    let whole = (offset + len) as usize;
    // SAFETY: the kernel chooses the addresses, the mapping has as many bytes as are copied, and
    // nothing writes them meanwhile.
    unsafe {
        let pages = mmap(ptr::null_mut(), whole, ProtFlags::READ, MapFlags::SHARED, fd, 0);
        let pages = pages.expect("map the dma-buf");
        let bytes = slice::from_raw_parts(pages.cast::<u8>(), whole)[offset as usize..].to_vec();
        munmap(pages, whole).expect("unmap");
        bytes
    }
}

/// HM-06
#[test]
fn export_has_the_offset_and_the_bytes_of_its_range() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, _: &Fake, iface: &Announced<D>, _: &World<D>) {
            let own = allocate(iface, 4 * page());
            let bytes = pattern(4 * page() as usize);
            // SAFETY: the test allocated the memory and frees it later.
            unsafe { iface.write(own.base(), &bytes) }.expect("write");
            for (offset, len) in [(0, 4 * page()), (page(), page()), (page() + 77, page())] {
                let part = range(own.base().0 + offset, len);
                let export =
                    iface.export_dma_buf(part, &nic(), DmaBufMapping::Default).expect("export");
                assert_eq!(export.alloc_offset.0, offset);
                assert_eq!(export.offset.0, offset % page());
                assert_eq!(export.len, len);
                let found = mapped(export.fd.as_fd(), export.offset.0, len);
                assert!(found == bytes[offset as usize..][..len as usize], "other bytes");
            }
            let past = range(own.base().0 + 1, 4 * page());
            let error = iface.export_dma_buf(past, &nic(), DmaBufMapping::Default).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfBounds);
            let pcie = iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Pcie).unwrap_err();
            assert_eq!(pcie.kind(), ErrorKind::Unsupported);
            free(iface, &own).expect("free");
            let freed = iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Default);
            assert_eq!(freed.unwrap_err().kind(), ErrorKind::OutOfBounds);
        }
    }
    over_both(&Test);
}

/// HM-06: the iface has no dma-buf facet if the library lacks the export call.
#[test]
fn library_without_the_export_call_has_no_dma_bufs() {
    let profile = Profile::running().without(&["nrt_get_dmabuf_fd", "nrt_get_dmabuf_fd_v2"]);
    let fake = Fake::start(profile);
    let iface = neuron(&fake).expect("NeuronCores");
    assert!(iface.dma_buf().is_none());
    let own = allocate(&iface, page());
    let error = iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Default).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.context_value("symbol"), Some("nrt_get_dmabuf_fd"));
    free(&iface, &own).expect("free");
}

/// HM-06: the iface refuses to allocate on a first-generation Gaudi device.
#[test]
fn first_generation_gaudi_is_refused() {
    let fake = Fake::start(Profile { device_type: 2, ..Profile::running() });
    let iface = gaudi(&fake).expect("a device");
    let error = iface.allocate(&crate::world::request(page())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("first-generation"), "{error}");
}

/// A function that runs once.
type Once = Option<Box<dyn FnOnce() + Send>>;

/// A driver that reports its dma-bufs as in use while the flag `used` is set. Its allocations are
/// addresses without memory of whole pages of the host, and its dma-bufs are files.
#[derive(Default)]
pub(crate) struct Flagged {
    pub(crate) used: Arc<AtomicBool>,
    pub(crate) live: Arc<Mutex<Vec<u64>>>,
    /// Runs once, at the end of the driver's next export.
    after_export: Arc<Mutex<Once>>,
}

impl std::fmt::Debug for Flagged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Flagged")
    }
}

// SAFETY: addresses of allocations differ, and the test copies no bytes.
unsafe impl Driver for Flagged {
    type Handle = ();

    const KIND: IfaceKind = IfaceKind::FIRST_PLUG_IN;
    const NAME: &'static str = "flagged";

    fn device_count(&self) -> u32 {
        1
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let name = "flagged".to_owned();
        Ok(vec![Device { id: DeviceId(0), name, pci_bus_id: None, memory: 0 }])
    }

    fn is_active(&self, _: DeviceId) -> Result<bool> {
        Ok(true)
    }

    fn allocate(&self, _: DeviceId, len: u64) -> Result<(Address, ())> {
        assert!(len.is_multiple_of(rustix::param::page_size() as u64), "{len} bytes");
        let mut live = self.live.lock().expect("no panic");
        let address = live.last().copied().unwrap_or(0) + (1 << 20);
        live.push(address);
        Ok((Address(address), ()))
    }

    unsafe fn free(&self, _: DeviceId, address: Address, (): ()) -> Result<()> {
        self.live.lock().expect("no panic").retain(|live| *live != address.0);
        Ok(())
    }

    unsafe fn write(&self, _: &BlockRange<()>, _: Address) -> Result<()> {
        Ok(())
    }

    unsafe fn read(&self, _: &BlockRange<()>, _: Address) -> Result<()> {
        Ok(())
    }

    fn export(&self, _: &Block<()>, _: AddressRange) -> Result<DmaBuf> {
        let fd = std::fs::File::open("/dev/null").expect("a file").into();
        let after = self.after_export.lock().expect("no panic").take();
        after.into_iter().for_each(|run| run());
        Ok(DmaBuf { fd, offset: 0 })
    }

    fn others_use(&self, _: BorrowedFd<'_>) -> bool {
        self.used.load(Ordering::Relaxed)
    }
}

/// ARM-02, HM-06
///
/// The kernel drivers of Neuron and Gaudi export whole pages of the host only.
#[test]
fn driver_allocates_whole_pages_for_memory_of_any_length() {
    let iface = Announced::new(Flagged::default()).expect("open");
    for len in [1, 4096, 4097, 100_000] {
        let own = allocate(&iface, len);
        assert_eq!(own.range.len(), len);
        free(&iface, &own).expect("free");
    }
    let error = iface.allocate(&crate::world::request(u64::MAX)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
}

/// HM-06
///
/// The kernel drivers of Neuron and Gaudi free memory even while a NIC has it registered, so the
/// iface delays the free.
#[test]
fn freed_memory_is_kept_while_one_of_its_dma_bufs_is_in_use() {
    let driver = Flagged::default();
    let (used, live) = (Arc::clone(&driver.used), Arc::clone(&driver.live));
    let live = || live.lock().expect("no panic").clone();
    let iface = Announced::new(driver).expect("open");
    let (exported, plain) = (allocate(&iface, page()), allocate(&iface, page()));
    used.store(true, Ordering::Relaxed);
    drop(iface.export_dma_buf(exported.range, &nic(), DmaBufMapping::Default).expect("export"));
    free(&iface, &exported).expect("free");
    assert_eq!(iface.query(exported.base()).expect("query"), None, "it is freed for callers");
    assert_eq!(live(), [exported.base().0, plain.base().0], "a NIC still has it");
    free(&iface, &plain).expect("free");
    assert_eq!(live(), [exported.base().0], "no dma-buf was exported of the other");
    used.store(false, Ordering::Relaxed);
    let next = allocate(&iface, page());
    assert_eq!(live(), [next.base().0], "the NIC has released it");
    free(&iface, &next).expect("free");
}

/// HM-06
#[test]
fn memory_kept_for_a_dma_buf_is_freed_with_the_iface() {
    let driver = Flagged::default();
    let (used, live) = (Arc::clone(&driver.used), Arc::clone(&driver.live));
    let iface = Announced::new(driver).expect("open");
    let exported = allocate(&iface, page());
    used.store(true, Ordering::Relaxed);
    drop(iface.export_dma_buf(exported.range, &nic(), DmaBufMapping::Default).expect("export"));
    free(&iface, &exported).expect("free");
    used.store(false, Ordering::Relaxed);
    drop(iface);
    assert!(live.lock().expect("no panic").is_empty());
}

/// HM-06 REL-01
#[test]
fn closing_is_refused_while_a_dma_buf_of_freed_memory_is_in_use() {
    let driver = Flagged::default();
    let (used, live) = (Arc::clone(&driver.used), Arc::clone(&driver.live));
    let iface = Announced::new(driver).expect("open");
    let exported = allocate(&iface, page());
    used.store(true, Ordering::Relaxed);
    drop(iface.export_dma_buf(exported.range, &nic(), DmaBufMapping::Default).expect("export"));
    free(&iface, &exported).expect("free");
    let rejected = iface.close().expect_err("a NIC still has the dma-buf");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    assert_eq!(rejected.error.context_value("exported"), Some("1"), "{}", rejected.error);
    used.store(false, Ordering::Relaxed);
    rejected.value.close().map_err(hmem_core::Error::from).expect("close");
    assert!(live.lock().expect("no panic").is_empty());
}

/// HM-06
///
/// The iface refuses an export if another thread frees the memory after the driver has exported it
/// and before the iface returns.
#[test]
fn export_that_races_with_a_free_is_refused() {
    let driver = Flagged::default();
    let (after, live) = (Arc::clone(&driver.after_export), Arc::clone(&driver.live));
    driver.used.store(true, Ordering::Relaxed);
    let iface = Arc::new(Announced::new(driver).expect("open"));
    let own = allocate(&*iface, page());
    let (other, base) = (Arc::clone(&iface), own.base().0);
    let overtake = move || free(&*other, &own).expect("free");
    *after.lock().expect("no panic") = Some(Box::new(overtake));
    let error = iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Default).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert!(!live.lock().expect("no panic").contains(&base), "no dma-buf of it was returned");
}

/// HM-06
///
/// During the export another thread frees the memory, and allocates or announces new memory at the
/// same address. The dma-buf is that of the old memory, so the iface refuses the export, and keeps
/// no descriptor of it for the new memory.
#[test]
fn export_is_refused_if_new_memory_replaces_its_memory_at_the_same_address() {
    type Replace = fn(&Announced<Flagged>, &Allocation) -> Allocation;
    let announce = |iface: &Announced<Flagged>, at: AddressRange| {
        // SAFETY: the test withdraws the memory, and nothing reads or writes it.
        unsafe { iface.announce(at, DeviceId(0), ()) }.expect("announce")
    };
    let reallocate: Replace = |iface, old| {
        free(iface, old).expect("free");
        allocate(iface, page())
    };
    let announce_anew: Replace = |iface, old| {
        iface.withdraw(old).expect("withdraw");
        // SAFETY: the test withdraws the memory, and nothing reads or writes it.
        unsafe { iface.announce(old.range, DeviceId(0), ()) }.expect("announce")
    };
    for announced in [false, true] {
        let driver = Flagged::default();
        let (used, after) = (Arc::clone(&driver.used), Arc::clone(&driver.after_export));
        used.store(true, Ordering::Relaxed);
        let live = Arc::clone(&driver.live);
        let iface = Arc::new(Announced::new(driver).expect("open"));
        let old = if announced {
            announce(&iface, range(1 << 40, page()))
        } else {
            allocate(&*iface, page())
        };
        let replaced: Arc<Mutex<Option<Allocation>>> = Arc::default();
        let (other, found) = (Arc::clone(&iface), Arc::clone(&replaced));
        let replace = if announced { announce_anew } else { reallocate };
        let overtake = move || *found.lock().expect("no panic") = Some(replace(&other, &old));
        *after.lock().expect("no panic") = Some(Box::new(overtake));
        let exported = iface.export_dma_buf(old.range, &nic(), DmaBufMapping::Default);
        let new = replaced.lock().expect("no panic").take().expect("replaced");
        assert_eq!(new.range, old.range, "the test needs the same address");
        let error = exported.expect_err("the dma-buf is that of the freed memory");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
        if announced {
            iface.withdraw(&new).expect("withdraw");
        } else {
            free(&*iface, &new).expect("free");
            assert!(live.lock().expect("no panic").is_empty(), "no dma-buf of it was exported");
        }
    }
}
