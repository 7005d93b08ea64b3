//! Counts how often one registration queries each iface for the owner of the memory, and how often
//! it queries the CUDA driver.
#![allow(unsafe_code)]

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::silent::Silent;
use hmem::{
    Access, Address, AddressRange, Allocation, AllocationId, AllocationKind, Batch, CacheAttr,
    DeviceBuffer, DeviceId, Domain, DomainAttr, DomainBindFlags, Error, ErrorKind, Hmem, Iface,
    IfaceKind, MrFlags, Promise, Raw, Request, Result,
    cache::UncachedReason,
    event_queue::EventQueue,
    fabric::{self, MrAttr},
    iface::{
        AllocRequest, Allocator, CopyEngine, Device, DmaBufExporter, InboundFlush, MonitorSource,
        PeerMemoryExporter, SegmentMap,
    },
    loopback::Loopback,
    path::Path,
    system::{DmaBufKind, Simulated, monitor::ImportMonitor},
};
use tracing::{Event, Metadata, Subscriber, span};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Returns the page size of the machine.
fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// A simulated device that counts queries. It reports no address range of its own, so every lookup
/// of an owner queries it.
#[derive(Debug)]
struct Counting {
    device: Simulated,
    queries: AtomicU64,
    /// The number of the first query that finds other memory at each address.
    replaced_at: AtomicU64,
}

// SAFETY: each answer and facet comes from the simulated device.
unsafe impl Iface for Counting {
    fn kind(&self) -> IfaceKind {
        self.device.kind()
    }

    fn name(&self) -> &str {
        self.device.name()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.device.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        let number = self.queries.fetch_add(1, Ordering::Relaxed);
        let is_replaced = number >= self.replaced_at.load(Ordering::Relaxed);
        let answer = self.device.query(address)?;
        Ok(answer.map(|before| {
            let id = AllocationId(before.id.0 + u64::from(is_replaced));
            Allocation { id, ..before }
        }))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.device.copy(to, from, len) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        self.device.allocator()
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.device.copy_engine()
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        self.device.dma_buf()
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        self.device.peer_memory()
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        self.device.segments()
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        self.device.inbound_flush()
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        self.device.monitor()
    }
}

/// A tracing subscriber that enables all events and discards them.
struct Listening;

impl Subscriber for Listening {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn event(&self, _: &Event<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The public function by which a test registers memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EntryPoint {
    Register,
    /// `submit`, with the owning iface named by the caller.
    Named,
    /// `register` with tracing on.
    Traced,
    /// `register` with an event queue.
    Asynchronous,
    /// `fabric::regattr`.
    Regattr,
    /// `Batch::on` with two NICs.
    Batch,
    SubRegion,
    CachedMiss,
    /// A miss of `get_of`.
    CachedMissOf,
    CachedHit,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    /// Host memory inside one page.
    HostPage,
    /// Host memory across a page boundary.
    HostPages,
    Device,
}

/// Two ifaces that count their queries, and two software NICs.
struct Fixture {
    ifaces: [Arc<Counting>; 2],
    hmem: Hmem,
}

impl Fixture {
    fn new() -> Self {
        let iface = |number| {
            let builder = Simulated::builder().kind(IfaceKind(number)).window(1 << 32);
            let builder = builder.name(format!("simulated-{number:#x}"));
            let device = builder.dma_buf(DmaBufKind::MemFd).build().expect("a simulated device");
            let (queries, replaced_at) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
            Arc::new(Counting { device, queries, replaced_at })
        };
        let ifaces = [iface(0x100), iface(0x101)];
        let nics = Loopback::builder().nic("loop0").nic("loop1").build().expect("a fabric");
        let import = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
        let builder = Hmem::builder().without_vendor_ifaces().provider(nics);
        let builder = builder.imported_cache_monitor(import);
        let add = |builder: hmem::Builder, iface: &Arc<Counting>| {
            builder.shared_iface(Arc::clone(iface) as Arc<dyn Iface>)
        };
        let hmem = ifaces.iter().fold(builder, add).build().expect("the ifaces start");
        Self { ifaces, hmem }
    }

    fn domain(&self, nic: &str) -> Domain {
        let attr = DomainAttr {
            nic: Some(nic.to_owned()),
            cache: Some(CacheAttr::default()),
            ..DomainAttr::default()
        };
        self.hmem.domain("loopback", attr).expect("a domain")
    }

    /// Returns the number of queries of each iface during a call. Its result is dropped later.
    fn counted<R>(&self, call: impl FnOnce() -> R) -> [u64; 2] {
        let counts = || self.ifaces.each_ref().map(|iface| iface.queries.load(Ordering::Relaxed));
        let before = counts();
        let _result = call();
        let after = counts();
        [after[0] - before[0], after[1] - before[1]]
    }
}

/// Registers new memory through a public function, and returns the number of queries of each iface.
/// Device memory belongs to the second iface.
fn queries(fixture: &Fixture, entry: EntryPoint, memory: Memory) -> [u64; 2] {
    let owner: Arc<dyn Iface> = Arc::clone(&fixture.ifaces[1]) as _;
    let request =
        AllocRequest { len: 4 * page_size(), device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&owner, &request).expect("device memory");
    let host = vec![1u8; 4 * page_size() as usize];
    // The domains and their caches are dropped before the memory.
    let domains = [fixture.domain("loop0"), fixture.domain("loop1")];
    let domain = &domains[0];
    let page = Address::of_ptr(host.as_ptr()).0.next_multiple_of(page_size());
    let (range, kind) = match memory {
        Memory::HostPage => (AddressRange::new(Address(page + 64), 128), IfaceKind::SYSTEM),
        Memory::HostPages => {
            (AddressRange::new(Address(page + 64), page_size()), IfaceKind::SYSTEM)
        }
        Memory::Device => (Ok(buffer.allocation().range), owner.kind()),
    };
    // SAFETY: host memory and buffer are dropped after the domains, and thus after every region and
    // cached registration, and nothing refers to their bytes.
    let memory = unsafe { Raw::new(range.expect("a range"), Promise::ReadWrite) };
    let register = || domain.register(memory, REMOTE).expect("registered");
    let cache = domain.cache().expect("a cache");
    let cached = || drop(cache.get(memory, REMOTE).expect("registered"));
    let counts = match entry {
        EntryPoint::Register => fixture.counted(register),
        EntryPoint::Named => fixture.counted(|| {
            domain.submit(Request::new(memory, REMOTE).owner(kind, None)).expect("registered")
        }),
        EntryPoint::Traced => {
            tracing::subscriber::with_default(Listening, || fixture.counted(register))
        }
        EntryPoint::Asynchronous => {
            let events = Arc::new(EventQueue::new());
            domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
            fixture.counted(|| {
                let region = register();
                let event = events.wait(Duration::from_secs(60)).expect("an event");
                event.result.expect("registered");
                region
            })
        }
        EntryPoint::Regattr => {
            let attr = MrAttr::new(memory.as_slice(), REMOTE);
            fixture
                .counted(|| fabric::regattr(domain, &attr, MrFlags::empty()).expect("registered"))
        }
        EntryPoint::Batch => {
            let nics = domains.each_ref();
            let batch = Batch::on(&nics).add(Request::new(memory, REMOTE));
            fixture.counted(|| batch.register().expect("registered"))
        }
        EntryPoint::SubRegion => {
            let base = register();
            let part = base.range().slice(8, 8).expect("inside");
            fixture.counted(|| base.sub(part, REMOTE, None).expect("registered"))
        }
        EntryPoint::CachedMiss => fixture.counted(cached),
        EntryPoint::CachedMissOf => {
            fixture.counted(|| drop(cache.get_of(memory, REMOTE, kind, None).expect("registered")))
        }
        EntryPoint::CachedHit => {
            cached();
            fixture.counted(cached)
        }
    };
    cache.evict_idle();
    assert_eq!(domains.each_ref().map(|domain| domain.live().regions), [0; 2], "{entry:?}");
    counts
}

/// Expected number of queries of each iface. A registration queries once for each page that holds
/// an end of a host range, and once for a device range. A cached miss of device memory queries once
/// more, to detect a concurrent free. A sub-region and a cached hit need no query.
#[rustfmt::skip]
const TABLE: [(EntryPoint, Memory, u64); 30] = [
    (EntryPoint::Register, Memory::HostPage, 1),
    (EntryPoint::Register, Memory::HostPages, 2),
    (EntryPoint::Register, Memory::Device, 1),
    (EntryPoint::Named, Memory::HostPage, 1),
    (EntryPoint::Named, Memory::HostPages, 2),
    (EntryPoint::Named, Memory::Device, 1),
    (EntryPoint::Traced, Memory::HostPage, 1),
    (EntryPoint::Traced, Memory::HostPages, 2),
    (EntryPoint::Traced, Memory::Device, 1),
    (EntryPoint::Asynchronous, Memory::HostPage, 1),
    (EntryPoint::Asynchronous, Memory::HostPages, 2),
    (EntryPoint::Asynchronous, Memory::Device, 1),
    (EntryPoint::Regattr, Memory::HostPage, 1),
    (EntryPoint::Regattr, Memory::HostPages, 2),
    (EntryPoint::Regattr, Memory::Device, 1),
    (EntryPoint::Batch, Memory::HostPage, 1),
    (EntryPoint::Batch, Memory::HostPages, 2),
    (EntryPoint::Batch, Memory::Device, 1),
    (EntryPoint::SubRegion, Memory::HostPage, 0),
    (EntryPoint::SubRegion, Memory::HostPages, 0),
    (EntryPoint::SubRegion, Memory::Device, 0),
    (EntryPoint::CachedMiss, Memory::HostPage, 1),
    (EntryPoint::CachedMiss, Memory::HostPages, 2),
    (EntryPoint::CachedMiss, Memory::Device, 2),
    (EntryPoint::CachedMissOf, Memory::HostPage, 1),
    (EntryPoint::CachedMissOf, Memory::HostPages, 2),
    (EntryPoint::CachedMissOf, Memory::Device, 2),
    (EntryPoint::CachedHit, Memory::HostPage, 0),
    (EntryPoint::CachedHit, Memory::HostPages, 0),
    (EntryPoint::CachedHit, Memory::Device, 0),
];

/// HM-01
///
/// The first registration and a later one with a remembered path make equally many queries.
#[test]
fn each_iface_is_queried_as_often_as_the_table_says() {
    let fixture = Fixture::new();
    let mut wrong = String::new();
    for (entry, memory, expected) in TABLE {
        for round in ["first", "again"] {
            let counts = queries(&fixture, entry, memory);
            if counts != [expected; 2] {
                writeln!(wrong, "{entry:?} {memory:?} {round}: {counts:?} queries, not {expected}")
                    .expect("a String takes everything");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// CACHE-09
#[test]
fn memory_that_is_replaced_during_a_miss_is_not_cached() {
    let fixture = Fixture::new();
    let iface = &fixture.ifaces[1];
    let owner: Arc<dyn Iface> = Arc::clone(iface) as _;
    let request =
        AllocRequest { len: page_size(), device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&owner, &request).expect("device memory");
    let domain = fixture.domain("loop0");
    // SAFETY: the buffer outlives the domain, and nothing refers to its bytes.
    let memory = unsafe { Raw::new(buffer.allocation().range, Promise::ReadWrite) };
    // The first query finds the owner, and the second one follows the subscription.
    iface.replaced_at.store(iface.queries.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let region = domain.cache().expect("a cache").get(memory, REMOTE).expect("registered");
    let reason = region.lease().uncached_reason().expect("uncached");
    assert!(
        matches!(reason, UncachedReason::Unwatched(why) if why.kind() == ErrorKind::BadAddress),
        "{reason:?}"
    );
    assert_eq!(iface.device.stats().subscriptions, 0);
}

/// HM-01 HM-06
///
/// The simulated device refuses a range outside the allocation that it gets with the range.
#[test]
fn each_range_is_exported_with_the_allocation_that_holds_it() {
    let fixture = Fixture::new();
    let owner: Arc<dyn Iface> = Arc::clone(&fixture.ifaces[1]) as _;
    let request =
        AllocRequest { len: page_size(), device: DeviceId(0), kind: AllocationKind::Device };
    let buffers = [(); 3].map(|()| DeviceBuffer::allocate(&owner, &request).expect("memory"));
    let ranges = buffers.each_ref().map(|buffer| buffer.allocation().range);
    let domain = fixture.domain("loop0");
    // SAFETY: the buffers outlive the region, and nothing refers to their bytes.
    let memory = unsafe { Raw::new(Box::from(ranges), Promise::ReadWrite) };
    let counts = fixture.counted(|| {
        let region = domain.register(memory, REMOTE).expect("registered");
        assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
        region.close().map_err(Error::from).expect("closed");
    });
    assert_eq!(counts, [ranges.len() as u64; 2], "one query for each range");
}

/// Queries of the CUDA driver by one registration.
#[cfg(feature = "cuda")]
mod driver_lookups {
    use hmem::{
        cuda::{
            Cuda,
            sys::{CuContext, CuResult, Functions},
        },
        path::P2pPolicy,
        provider::Imports,
    };
    use hmem_fake_cuda::{FakeDriver, Profile};

    use super::*;

    /// The context of the registered memory.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Context {
        /// The primary context, which the iface retains for memory that it allocated.
        Retained,
        /// A context of the application, current on the registering thread.
        Current,
        /// A context of the application, current on no thread.
        Foreign,
    }

    /// Counted calls of the driver.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Queries {
        /// Queries for an allocation, of eight or nine attributes.
        lookups: u64,
        /// Queries of one or two attributes.
        checks: u64,
    }

    fn counted(driver: &FakeDriver, call: impl FnOnce()) -> Queries {
        let counts = || (driver.lookups(), driver.calls("cuPointerGetAttributes"));
        let (lookups, all) = counts();
        call();
        let lookups = driver.lookups() - lookups;
        Queries { lookups, checks: counts().1 - all - lookups }
    }

    fn check(code: CuResult) {
        assert_eq!(code, CuResult::CUDA_SUCCESS);
    }

    /// Registers CUDA memory by a path, and returns the queries of the driver.
    fn queries(path: Path, context: Context, entry: EntryPoint) -> Queries {
        let driver = FakeDriver::start(Profile::default());
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
        // forever.
        let functions = unsafe { Functions::from_lookup(|name| driver.symbol(name)) };
        let functions = functions.expect("the functions");
        let cuda = Cuda::builder().functions(functions.clone()).open().expect("the fake driver");
        let imports = Imports {
            dma_buf: path == Path::DmaBuf,
            peer_memory: path == Path::PeerMemory,
            pcie_mapping_first: Some(false),
            data_direct: None,
            staged: false,
        };
        let nics = Loopback::builder().nic("loop0").imports(imports).build().expect("a fabric");
        let hmem = Hmem::builder().without_vendor_ifaces().iface(cuda).provider(nics);
        let hmem = hmem.build().expect("the iface starts");
        let attr = DomainAttr {
            cache: Some(CacheAttr::default()),
            p2p: P2pPolicy::Required,
            ..DomainAttr::default()
        };
        let iface = hmem.iface(IfaceKind::CUDA).expect("added");
        let (mut own, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
        let buffer = (context == Context::Retained).then(|| {
            let request = AllocRequest {
                len: page_size(),
                device: DeviceId(0),
                kind: AllocationKind::Device,
            };
            DeviceBuffer::allocate(iface, &request).expect("device memory")
        });
        if buffer.is_none() {
            // SAFETY: the outputs are writable, and device 0 exists.
            unsafe {
                check(hmem_fake_cuda::cuCtxCreate_v2(&mut own, 0, 0));
                check((functions.mem_alloc())(&mut pointer, page_size() as usize));
            }
        }
        if context == Context::Foreign {
            // SAFETY: the output is writable.
            check(unsafe { (functions.ctx_pop_current())(&mut popped) });
        }
        let own_range = || AddressRange::new(Address(pointer), page_size()).expect("a range");
        let range = buffer.as_ref().map_or_else(own_range, |buffer| buffer.allocation().range);
        let domain = hmem.domain("loopback", attr).expect("a domain");
        // SAFETY: the memory outlives the domain, and nothing refers to its bytes.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let cache = domain.cache().expect("a cache");
        let cached = || {
            let region = cache.get(memory, REMOTE).expect("registered");
            assert_eq!(region.decision().expect("a decision").path, path);
        };
        let registered = || {
            let region = domain.register(memory, REMOTE).expect("registered");
            assert_eq!(region.decision().expect("a decision").path, path);
            region.close().map_err(Error::from).expect("closed");
        };
        let queries = match entry {
            EntryPoint::Register => counted(&driver, registered),
            EntryPoint::CachedMiss => counted(&driver, cached),
            EntryPoint::CachedHit => {
                cached();
                counted(&driver, cached)
            }
            _ => unreachable!("not in the table"),
        };
        drop((domain, buffer, hmem));
        assert_eq!(driver.undefined_calls(), 0);
        queries
    }

    /// Expected queries of the driver: lookups, then checks. A registration looks the allocation up
    /// once. One check asks if a foreign context still lives, and one if NICs reach memory by
    /// address. A cached miss looks up twice more: the monitor subscribes to live memory only, and
    /// the domain then detects a free before the subscription. A hit checks the identity.
    #[rustfmt::skip]
    const TABLE: [(Path, Context, EntryPoint, u64, u64); 12] = [
        (Path::DmaBuf, Context::Retained, EntryPoint::Register, 1, 0),
        (Path::DmaBuf, Context::Current, EntryPoint::Register, 1, 0),
        (Path::DmaBuf, Context::Foreign, EntryPoint::Register, 1, 1),
        (Path::DmaBuf, Context::Retained, EntryPoint::CachedMiss, 3, 0),
        (Path::DmaBuf, Context::Foreign, EntryPoint::CachedMiss, 3, 1),
        (Path::DmaBuf, Context::Retained, EntryPoint::CachedHit, 0, 1),
        (Path::PeerMemory, Context::Retained, EntryPoint::Register, 1, 1),
        (Path::PeerMemory, Context::Current, EntryPoint::Register, 1, 1),
        (Path::PeerMemory, Context::Foreign, EntryPoint::Register, 1, 2),
        (Path::PeerMemory, Context::Retained, EntryPoint::CachedMiss, 3, 1),
        (Path::PeerMemory, Context::Foreign, EntryPoint::CachedMiss, 3, 2),
        (Path::PeerMemory, Context::Retained, EntryPoint::CachedHit, 0, 1),
    ];

    /// HM-01
    #[test]
    fn the_cuda_driver_is_queried_as_often_as_the_table_says() {
        let mut wrong = String::new();
        for (path, context, entry, lookups, checks) in TABLE {
            let counts = queries(path, context, entry);
            if counts != (Queries { lookups, checks }) {
                writeln!(wrong, "{path:?} {context:?} {entry:?}: {counts:?}")
                    .expect("a String takes everything");
            }
        }
        assert!(wrong.is_empty(), "{wrong}");
    }
}
