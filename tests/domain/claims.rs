//! Tests of the iface, the device and the HMEM flags that requests name: one set of rules for
//! registrations by address, of dma-bufs and of sub-regions, and for cached lookups.

use std::{os::fd::AsFd, sync::Arc};

use hmem::{
    Access, AddressRange, AllocationKind, BorrowedDmaBuf, CacheAttr, DeviceBuffer, DeviceId,
    Domain, DomainAttr, Error, ErrorKind, Hmem, Iface, IfaceExt, IfaceKind, MemoryRegion, MrFlags,
    MrMode, Promise, Raw, Request, Result,
    fabric::{self, MrAttr},
    iface::{AllocRequest, DmaBufExport, DmaBufMapping},
    loopback::Loopback,
    system::{SIMULATED, Simulated},
};

const ACCESS: Access = Access::REMOTE_READ;
const NONE: MrFlags = MrFlags::empty();
const DEVICE_ONLY: MrFlags = MrFlags::HMEM_DEVICE_ONLY;
const HOST_ALLOC: MrFlags = MrFlags::HMEM_HOST_ALLOC;

struct World {
    domain: Domain,
    device: Arc<dyn Iface>,
}

impl World {
    fn new() -> Self {
        Self::open(true)
    }

    /// Opens a domain with or without the FI_HMEM capability.
    fn open(hmem_capability: bool) -> Self {
        let simulated = Simulated::builder().devices(2).build().expect("a simulated device");
        let loopback = Loopback::builder().build().expect("a software NIC");
        let builder = Hmem::builder().without_vendor_ifaces();
        let hmem = builder.iface(simulated).provider(loopback).build().expect("builds");
        let cache = Some(CacheAttr::default());
        let attr = DomainAttr {
            mr_mode: MrMode::empty(),
            cache,
            hmem: hmem_capability,
            ..DomainAttr::default()
        };
        let domain = hmem.domain("loopback", attr).expect("opens");
        Self { domain, device: Arc::clone(hmem.iface(SIMULATED).expect("it was added")) }
    }

    fn buffer(&self, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len: 8192, device: DeviceId(0), kind };
        DeviceBuffer::allocate(&self.device, &request).expect("memory")
    }

    fn export(&self, buffer: &DeviceBuffer) -> DmaBufExport {
        let nic = &self.domain.provider_attr().nic;
        self.device.export_dma_buf(buffer.range(), nic, DmaBufMapping::Default).expect("exports")
    }

    fn regattr(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        fabric::regattr(&self.domain, attr, flags)
    }

    /// Asserts that a request is refused as a contradiction, and that nothing is registered.
    fn refuse(&self, attr: &MrAttr<'_>, flags: MrFlags) -> String {
        let before = self.domain.live();
        let error = self.regattr(attr, flags).expect_err("a contradiction was registered");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
        assert_eq!(self.domain.live(), before);
        error.to_string()
    }
}

fn dma_buf(export: &DmaBufExport) -> MrAttr<'_> {
    let fd = export.as_fd();
    let given = BorrowedDmaBuf { fd, offset: export.offset, len: export.len, base_addr: None };
    MrAttr::new(raw(given), ACCESS)
}

fn raw<A>(at: A) -> Raw<A> {
    // SAFETY: the tests keep all memory longer than its regions, and make no references to it.
    unsafe { Raw::new(at, Promise::ReadOnly) }
}

/// MR-12
#[test]
fn hmem_flags_of_a_dma_buf_need_an_iface_that_they_fit() {
    let world = World::new();
    let buffer = world.buffer(AllocationKind::Device);
    let export = world.export(&buffer);
    let unnamed = dma_buf(&export);
    for iface in [None, Some(IfaceKind::SYSTEM)] {
        let attr = MrAttr { iface, ..unnamed };
        for flag in [DEVICE_ONLY, HOST_ALLOC] {
            let text = world.refuse(&attr, MrFlags::MR_DMABUF | flag);
            assert!(text.contains("name the iface"), "{text}");
        }
        world.regattr(&attr, MrFlags::MR_DMABUF).expect("host memory without flags");
    }
    let named = MrAttr { iface: Some(SIMULATED), device: Some(DeviceId(0)), ..unnamed };
    let region = world.regattr(&named, MrFlags::MR_DMABUF | DEVICE_ONLY).expect("device memory");
    assert_eq!(region.iface().expect("registered"), (SIMULATED, Some(DeviceId(0))));
    let absent = MrAttr { device: Some(DeviceId(77)), ..named };
    world.refuse(&absent, MrFlags::MR_DMABUF | DEVICE_ONLY);
    let region = world.regattr(&absent, MrFlags::MR_DMABUF | HOST_ALLOC);
    let region = region.expect("HMEM_HOST_ALLOC ignores the device");
    assert_eq!(region.iface().expect("registered"), (SIMULATED, None));
}

/// MR-12
#[test]
fn claims_about_a_sub_region_fit_the_memory_of_its_base() {
    let world = World::new();
    let host = vec![0_u8; 8192];
    let kinds = [AllocationKind::Device, AllocationKind::Host, AllocationKind::Managed];
    let buffers = kinds.map(|kind| world.buffer(kind));
    for (range, iface, fits) in [
        (AddressRange::of(&host), IfaceKind::SYSTEM, [false, false]),
        (buffers[0].range(), SIMULATED, [true, false]),
        (buffers[1].range(), SIMULATED, [false, true]),
        (buffers[2].range(), SIMULATED, [false, false]),
    ] {
        let base = world.domain.register(raw(range), ACCESS).expect("the base");
        let part = range.slice(64, 100).expect("a part");
        let sub = MrAttr::new((&*base, part), ACCESS);
        for (flag, fits) in [DEVICE_ONLY, HOST_ALLOC].into_iter().zip(fits) {
            if fits {
                world.regattr(&sub, flag).expect("the flag fits");
            } else {
                world.refuse(&sub, flag);
            }
        }
        world.regattr(&MrAttr { iface: Some(iface), ..sub }, NONE).expect("the right iface");
        let other = if iface == SIMULATED { IfaceKind::CUDA } else { SIMULATED };
        world.regattr(&MrAttr { iface: Some(other), ..sub }, NONE).expect_err("another iface");
    }
}

/// MR-12
///
/// A dma-buf cannot be queried: its parts have the iface and the flags of their bases.
#[test]
fn parts_of_a_dma_buf_inherit_its_claim() {
    let world = World::new();
    let buffer = world.buffer(AllocationKind::Device);
    let export = world.export(&buffer);
    for (iface, flags, fits) in [
        (None, NONE, [false, false]),
        (Some(SIMULATED), NONE, [true, true]),
        (Some(SIMULATED), DEVICE_ONLY, [true, false]),
        (Some(SIMULATED), HOST_ALLOC, [false, true]),
    ] {
        let attr = MrAttr { iface, ..dma_buf(&export) };
        let base = world.regattr(&attr, MrFlags::MR_DMABUF | flags).expect("the base");
        let part = base.range().slice(64, 100).expect("a part");
        let sub = MrAttr::new((&base, part), ACCESS);
        for (flag, fits) in [DEVICE_ONLY, HOST_ALLOC].into_iter().zip(fits) {
            if !fits {
                world.refuse(&sub, flag);
                continue;
            }
            let sub = world.regattr(&sub, flag).expect("the flag fits");
            let part = MrAttr::new((&sub, part), ACCESS);
            let other = (DEVICE_ONLY | HOST_ALLOC) - flag;
            world.regattr(&part, flag).expect("the flag of the base");
            world.refuse(&part, other);
        }
        let other = match (iface, flags) {
            (None, _) => SIMULATED,
            // The system iface may be named for host memory of a device API.
            (Some(_), HOST_ALLOC) => IfaceKind::CUDA,
            (Some(_), _) => IfaceKind::SYSTEM,
        };
        world.regattr(&MrAttr { iface: Some(other), ..sub }, NONE).expect_err("another iface");
    }
}

/// MR-12
///
/// The flags are a claim about all memory of the region, so one range that contradicts them is
/// enough for a refusal.
#[test]
fn hmem_flags_are_checked_for_every_range() {
    let world = World::new();
    let (device, managed) =
        (world.buffer(AllocationKind::Device), world.buffer(AllocationKind::Managed));
    let ranges = [device.range(), managed.range()];
    world.refuse(&MrAttr::new(raw(&ranges[..]), ACCESS), DEVICE_ONLY);
}

/// Registers by `submit` and by a cached lookup with the same claim. Returns both results.
fn both_ways(
    world: &World,
    range: AddressRange,
    iface: IfaceKind,
    device: Option<DeviceId>,
) -> [Result<(), ErrorKind>; 2] {
    let request = Request::new(raw(range), ACCESS).owner(iface, device);
    let registered = world.domain.submit(request).map(drop).map_err(Error::from);
    let cache = world.domain.cache().expect("a cache");
    let found = cache.get_of(raw(range), ACCESS, iface, device).map(drop);
    [registered, found].map(|result| result.map_err(|error| error.kind()))
}

/// MR-04, HM-05
#[test]
fn registrations_and_cached_lookups_have_the_same_rules_for_a_named_device() {
    let world = World::new();
    let no_device = world.buffer(AllocationKind::Host);
    assert_eq!(no_device.allocation().device, None);
    let on_device = world.buffer(AllocationKind::Device);
    let refused = Err(ErrorKind::InvalidArgument);
    for (buffer, device, expected) in [
        (&no_device, None, Ok(())),
        (&no_device, Some(0), Ok(())),
        (&no_device, Some(1), Ok(())),
        (&no_device, Some(77), refused),
        (&on_device, None, Ok(())),
        (&on_device, Some(0), Ok(())),
        (&on_device, Some(1), refused),
        (&on_device, Some(77), refused),
    ] {
        let device = device.map(DeviceId);
        let results = both_ways(&world, buffer.range(), SIMULATED, device);
        assert_eq!(results, [expected; 2], "{device:?} of {:?}", buffer.allocation());
    }
}

/// MR-04, HM-08: the host allocator of a device API returns ordinary host pages. Managed memory
/// migrates.
#[test]
fn system_iface_may_be_named_for_a_device_apis_host_memory_but_not_for_managed_memory() {
    let world = World::new();
    let refused = Err(ErrorKind::InvalidArgument);
    for (kind, expected) in [
        (AllocationKind::Host, Ok(())),
        (AllocationKind::Managed, refused),
        (AllocationKind::Device, refused),
    ] {
        let buffer = world.buffer(kind);
        for device in [None, Some(DeviceId(0))] {
            let results = both_ways(&world, buffer.range(), IfaceKind::SYSTEM, device);
            assert_eq!(results, [expected; 2], "{kind:?}");
        }
    }
    let buffer = world.buffer(AllocationKind::Host);
    let ranges = [buffer.range()];
    let attr = MrAttr { iface: Some(IfaceKind::SYSTEM), ..MrAttr::new(raw(&ranges[..]), ACCESS) };
    let region = world.regattr(&attr, HOST_ALLOC).expect("host memory of a device API");
    assert_eq!(region.iface().expect("registered").0, SIMULATED, "the owner is unchanged");
    let absent = MrAttr { iface: Some(SIMULATED), device: Some(DeviceId(77)), ..attr };
    world.regattr(&absent, HOST_ALLOC).expect("HMEM_HOST_ALLOC ignores the device");
    world.refuse(&absent, NONE);
}

/// MR-04
#[test]
fn freed_or_foreign_address_is_unknown_to_the_named_iface() {
    let world = World::new();
    let buffer = world.buffer(AllocationKind::Device);
    let range = buffer.range();
    let refused = |iface, range| {
        let ranges = [range];
        let attr = MrAttr { iface: Some(iface), ..MrAttr::new(raw(&ranges[..]), ACCESS) };
        world.refuse(&attr, NONE)
    };
    const OTHER_IFACE: &str = "name the iface that owns the memory";
    assert!(refused(IfaceKind::SYSTEM, range).contains(OTHER_IFACE));
    drop(buffer);
    for unknown in [range, AddressRange::of(&[0_u8; 8])] {
        let text = refused(SIMULATED, unknown);
        assert!(text.contains("does not know the address") && text.contains("freed"), "{text}");
        assert!(!text.contains(OTHER_IFACE), "{text}");
    }
}

/// MR-12
///
/// `fi_mr(3)` allows the flags with the capability only. Here the capability decides whether the
/// iface and the device of a request count.
#[test]
fn hmem_flags_work_without_the_capability_and_the_claimed_iface_is_ignored() {
    let world = World::open(false);
    let device = world.buffer(AllocationKind::Device);
    let host = world.buffer(AllocationKind::Host);
    let ranges = [device.range()];
    let wrong = MrAttr {
        iface: Some(IfaceKind::SYSTEM),
        device: Some(DeviceId(77)),
        ..MrAttr::new(raw(&ranges[..]), ACCESS)
    };
    let region = world.regattr(&wrong, DEVICE_ONLY).expect("the owner is detected");
    assert_eq!(region.iface().expect("registered"), (SIMULATED, Some(DeviceId(0))));
    world.refuse(&MrAttr::new(raw(&ranges[..]), ACCESS), HOST_ALLOC);
    let ranges = [host.range()];
    world
        .regattr(&MrAttr::new(raw(&ranges[..]), ACCESS), HOST_ALLOC)
        .expect("host memory of the device API");
    world.refuse(&MrAttr::new(raw(&ranges[..]), ACCESS), DEVICE_ONLY);

    let export = world.export(&device);
    let named = MrAttr { iface: Some(SIMULATED), ..dma_buf(&export) };
    let region = world.regattr(&named, MrFlags::MR_DMABUF).expect("a dma-buf");
    assert_eq!(region.iface().expect("registered"), (IfaceKind::SYSTEM, None));
    world.refuse(&named, MrFlags::MR_DMABUF | DEVICE_ONLY);
}
