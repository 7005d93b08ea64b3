//! A plug-in iface. Its memory is in anonymous files, which the CPU can access only by system
//! calls.
//!
//! `docs/adding-an-iface.md` uses this iface as a skeleton. The iface passes the conformance suite.
//! A real plug-in calls its vendor's library in the same places. The iface needs only the public
//! traits. In a crate of its own, the iface needs `hmem-core`, and `rustix` for this kind of
//! memory.
//!
//! ```text
//! cargo run --example plug_in_iface
//! ```

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    ptr::null_mut,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use hmem::{
    Address, AddressRange, AllocOffset, Allocation, AllocationId, AllocationKind, DeviceId,
    DmaBufOffset, Errno, Error, ErrorKind, Iface, IfaceKind, Result,
    iface::{
        AllocRequest, Allocator, Device, DmaBufExport, DmaBufExporter, DmaBufMapping, MonitorSource,
    },
    monitor::{
        DetectionMethod, FreeSubscriptions, InvalidationCause, Invalidator, Monitor, Subscription,
    },
    provider::Nic,
};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
};

/// The kind of the iface. Plug-ins use 0x100 and up.
pub(crate) const FILE_MEMORY: IfaceKind = IfaceKind(0x200);

#[derive(Debug)]
struct Block {
    allocation: Allocation,
    file: OwnedFd,
}

#[derive(Debug, Default)]
struct Blocks {
    by_base: BTreeMap<u64, Block>,
    next_id: u64,
}

/// An iface whose memory is in anonymous files. For each file, a mapping without access rights
/// reserves addresses. So no other memory gets these addresses, and the CPU cannot use them.
#[derive(Debug, Default)]
pub(crate) struct FileMemory {
    blocks: Mutex<Blocks>,
    frees: Arc<FreeSubscriptions>,
}

impl FileMemory {
    fn blocks(&self) -> std::sync::MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file behind `range`, and the offset at which the range starts in it.
    fn locate(&self, range: AddressRange) -> Result<(OwnedFd, u64)> {
        let blocks = self.blocks();
        let around = blocks.by_base.range(..=range.start().0).next_back().map(|(_, block)| block);
        match around {
            Some(block) if block.allocation.range.contains_range(range) => {
                let file =
                    block.file.try_clone().map_err(|error| Error::os(Errno::of(&error), "dup"))?;
                Ok((file, range.start().0 - block.allocation.base().0))
            }
            _ => Err(self.outside(range)),
        }
    }

    fn outside(&self, range: AddressRange) -> Error {
        Error::new(ErrorKind::OutOfBounds, "file memory")
            .iface(self)
            .context("range", range)
            .remedy("the range must lie in one live allocation")
    }

    fn owns(&self, address: Address) -> bool {
        self.query(address).is_ok_and(|found| found.is_some())
    }
}

// SAFETY: `query` returns live blocks only, and each new block gets the next identity. A block has
// its own mapping, which reserves its addresses, and its own file with its bytes. An export keeps
// the file open. `locate` keeps every copy in the bounds of its block.
unsafe impl Iface for FileMemory {
    fn kind(&self) -> IfaceKind {
        FILE_MEMORY
    }

    fn name(&self) -> &str {
        "file-memory"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(vec![Device {
            id: DeviceId(0),
            name: "files".into(),
            pci_bus_id: None,
            memory: 1 << 30,
        }])
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        let blocks = self.blocks();
        let around =
            blocks.by_base.range(..=address.0).next_back().map(|(_, block)| block.allocation);
        Ok(around.filter(|allocation| allocation.range.contains(address)))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        match (self.owns(to), self.owns(from)) {
            (true, false) => {
                let (file, offset) = self.locate(AddressRange::new(to, len)?)?;
                // SAFETY: the caller of `copy` promises that the host side is valid for `len`
                // bytes.
                let bytes = unsafe { slice::from_raw_parts(from.0 as *const u8, len as usize) };
                write_all(&file, bytes, offset)
            }
            (false, true) => {
                let (file, offset) = self.locate(AddressRange::new(from, len)?)?;
                // SAFETY: the caller of `copy` promises that the host side is valid for `len` bytes
                // and not referenced elsewhere.
                let bytes = unsafe { slice::from_raw_parts_mut(to.0 as *mut u8, len as usize) };
                read_all(&file, bytes, offset)
            }
            (true, true) => {
                let (source, source_offset) = self.locate(AddressRange::new(from, len)?)?;
                let (target, target_offset) = self.locate(AddressRange::new(to, len)?)?;
                let mut bytes = vec![0; len as usize];
                read_all(&source, &mut bytes, source_offset)?;
                write_all(&target, &bytes, target_offset)
            }
            (false, false) => Err(Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(self)
                .remedy("one side must be memory of this iface")),
        }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(self)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }
}

impl Allocator for FileMemory {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let refused = |kind| Error::new(kind, "allocate").iface(self);
        if request.kind != AllocationKind::Device {
            return Err(refused(ErrorKind::Unsupported).context("kind", request.kind.name()));
        }
        if request.device != DeviceId(0) {
            return Err(refused(ErrorKind::InvalidArgument).device(request.device));
        }
        let file = memfd_create(c"file-memory", MemfdFlags::CLOEXEC)
            .map_err(|errno| Error::os(errno, "memfd_create"))?;
        ftruncate(&file, request.len).map_err(|errno| Error::os(errno, "ftruncate"))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping without access, at an address that the kernel picks, replaces
        // nothing.
        let base =
            unsafe { mmap_anonymous(null_mut(), request.len as usize, ProtFlags::empty(), flags) }
                .map_err(|errno| Error::os(errno, "mmap"))?;
        let mut blocks = self.blocks();
        blocks.next_id += 1;
        let allocation = Allocation {
            iface: FILE_MEMORY,
            range: AddressRange::new(Address::of_ptr(base), request.len)?,
            device: Some(DeviceId(0)),
            kind: AllocationKind::Device,
            id: AllocationId(blocks.next_id),
            token: 0,
        };
        blocks.by_base.insert(allocation.base().0, Block { allocation, file });
        Ok(allocation)
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        let mut blocks = self.blocks();
        let base = allocation.base().0;
        if blocks.by_base.get(&base).map(|block| block.allocation.id) != Some(allocation.id) {
            return Err(Error::new(ErrorKind::InvalidArgument, "free")
                .iface(self)
                .context("identity", allocation.id.0)
                .remedy("not a live allocation"));
        }
        // Caches drop their registrations of the memory before it is gone.
        self.frees.while_freeing(allocation.range, || {
            // SAFETY: `allocate` mapped this range. No reference into it exists, since it has no
            // access rights.
            unsafe { munmap(base as *mut _, allocation.range.len() as usize) }
                .map_err(|errno| Error::os(errno, "munmap"))?;
            blocks.by_base.remove(&base);
            Ok(())
        })
    }
}

impl MonitorSource for FileMemory {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(FreeMonitor(Arc::clone(&self.frees))))
    }
}

/// The monitor that tells registration caches about frees of the iface's memory. The monitor misses
/// no free, because all frees go through the iface.
#[derive(Debug)]
struct FreeMonitor(Arc<FreeSubscriptions>);

impl Monitor for FreeMonitor {
    fn name(&self) -> &str {
        "file-memory-frees"
    }

    fn rationale(&self) -> String {
        "every free goes through the iface; none is missed".to_owned()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Free
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        Ok(self.0.add(range, invalidator))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.0.remove(subscription);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl DmaBufExporter for FileMemory {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        &[DmaBufMapping::Default]
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        _nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        // The caller queried `of` before. Another block may have its addresses by now.
        if self.query(range.start())? != Some(*of) {
            return Err(self.outside(range));
        }
        let (fd, offset) = self.locate(range)?;
        let (offset, alloc_offset) = (DmaBufOffset(offset), AllocOffset(offset));
        let (len, revocation) = (range.len(), None);
        Ok(DmaBufExport { fd, offset, alloc_offset, len, mapping, revocation })
    }
}

fn write_all(file: impl AsFd, mut bytes: &[u8], mut offset: u64) -> Result<()> {
    while !bytes.is_empty() {
        let done =
            rustix::io::pwrite(&file, bytes, offset).map_err(|errno| Error::os(errno, "pwrite"))?;
        (bytes, offset) = (&bytes[done..], offset + done as u64);
    }
    Ok(())
}

fn read_all(file: impl AsFd, mut bytes: &mut [u8], mut offset: u64) -> Result<()> {
    while !bytes.is_empty() {
        let done = rustix::io::pread(&file, &mut *bytes, offset)
            .map_err(|errno| Error::os(errno, "pread"))?;
        if done == 0 {
            return Err(Error::new(ErrorKind::OutOfBounds, "pread").context("offset", offset));
        }
        (bytes, offset) = (&mut bytes[done..], offset + done as u64);
    }
    Ok(())
}

pub(crate) fn run() -> Result<()> {
    use hmem::{
        Access, DeviceBuffer, DomainAttr, Hmem, Iova, MrMode, loopback::Loopback,
        provider::EndpointAttr, transfer::RemoteSegment,
    };

    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(FileMemory::default())
        .provider(Loopback::builder().needs(MrMode::PROV_KEY).build()?)
        .build()?;
    let domain = hmem.domain("loopback", DomainAttr::default())?;
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(hmem.iface(FILE_MEMORY)?, &request)?;
    let target = domain.register(buffer, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    let source = domain.register(b"by way of a plug-in".to_vec(), Access::WRITE)?;
    println!("registered: {}", target.decision()?);

    let cq = domain.open_cq(256)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq))?;
    let peer = endpoint.resolve(&endpoint.name())?;
    let key = target.key()?;
    let remote =
        [RemoteSegment { address: Iova(key.base().0 + 100), len: source.len(), key: &key }];
    endpoint.write(&[source.slice(0, source.len())?], &remote, peer, 1)?;
    let mut completions = Vec::new();
    while cq.read(&mut completions, 1)? == 0 {}
    for completion in completions {
        println!("moved: {} bytes", completion.result?);
    }

    let mut bytes = [0; 19];
    target.read(100, &mut bytes)?;
    println!("arrived: {}", String::from_utf8_lossy(&bytes));
    assert_eq!(&bytes, b"by way of a plug-in");
    Ok(())
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<()> {
    run()
}
