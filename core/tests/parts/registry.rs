//! Tests of the addresses for which a registry queries an iface.

#![allow(unsafe_code, reason = "implementing `Iface` takes unsafe functions")]

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    Iface, IfaceKind, Registry, Result, iface::Device,
};

const KIND: IfaceKind = IfaceKind(0x123);

/// An iface with one allocation. The iface counts its queries.
#[derive(Debug)]
struct CountingIface {
    allocation: Allocation,
    span: Option<AddressRange>,
    asked: AtomicUsize,
}

impl CountingIface {
    fn new(start: u64, len: u64, span: Option<(u64, u64)>) -> Arc<Self> {
        let range = |(start, len)| AddressRange::new(Address(start), len).unwrap();
        let allocation = Allocation {
            iface: KIND,
            range: range((start, len)),
            device: Some(DeviceId(0)),
            kind: AllocationKind::Device,
            id: AllocationId(1),
            token: 0,
        };
        Arc::new(Self { allocation, span: span.map(range), asked: AtomicUsize::new(0) })
    }
}

fn lacks<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "test"))
}

// SAFETY: the iface allocates, copies and exports nothing. The addresses that it claims are never
// used, and lie in its address span if it has one.
unsafe impl Iface for CountingIface {
    fn kind(&self) -> IfaceKind {
        self.allocation.iface
    }

    fn name(&self) -> &str {
        "one"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        lacks()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.allocation).filter(|allocation| allocation.range.contains(address)))
    }

    unsafe fn copy(&self, _: Address, _: Address, _: u64) -> Result<()> {
        lacks()
    }

    fn address_span(&self) -> Option<AddressRange> {
        self.span
    }
}

fn registry(iface: &Arc<CountingIface>) -> Registry {
    let mut registry = Registry::new();
    registry.add(Arc::clone(iface) as Arc<dyn Iface>).unwrap();
    registry
}

/// Looks up the owner of an address. Returns the number of queries of the iface, and true if the
/// iface owns the address.
fn seen(iface: &Arc<CountingIface>, registry: &Registry, address: u64) -> (usize, bool) {
    let before = iface.asked.load(Ordering::Relaxed);
    let owner = registry.owner_of(Address(address)).unwrap();
    let asked = iface.asked.load(Ordering::Relaxed) - before;
    (asked, owner.allocation.is_some())
}

#[test]
fn iface_without_a_span_is_queried_for_every_address() {
    let iface = CountingIface::new(0x10000, 0x1000, None);
    let registry = registry(&iface);
    for (address, mine) in
        [(0, false), (0xffff, false), (0x10000, true), (0x10fff, true), (0x11000, false)]
    {
        assert_eq!(seen(&iface, &registry, address), (1, mine), "{address:#x}");
    }
    assert_eq!(seen(&iface, &registry, u64::MAX), (1, false));
}

#[test]
fn iface_with_a_span_is_queried_only_for_addresses_in_it() {
    let iface = CountingIface::new(0x10000, 0x1000, Some((0xf000, 0x3000)));
    let registry = registry(&iface);
    for address in [0, 0xefff, 0x12000, u64::MAX] {
        assert_eq!(seen(&iface, &registry, address), (0, false), "{address:#x}");
    }
    for (address, mine) in [(0xf000, false), (0x10000, true), (0x10fff, true), (0x11fff, false)] {
        assert_eq!(seen(&iface, &registry, address), (1, mine), "{address:#x}");
    }
}

#[test]
fn address_span_may_end_with_the_address_space() {
    let last = u64::MAX;
    let iface = CountingIface::new(last - 0xfff, 0x1000, Some((last - 0xffff, 0x10000)));
    let registry = registry(&iface);
    assert_eq!(seen(&iface, &registry, last), (1, true));
    assert_eq!(seen(&iface, &registry, last - 0x10000), (0, false));
    assert_eq!(seen(&iface, &registry, 0), (0, false));
}

/// HM-01: A device API may page-lock part of the application's memory, and end that at any time.
#[test]
fn page_locked_host_memory_belongs_to_the_system() {
    let mut iface = CountingIface::new(0x10000, 0x1000, None);
    Arc::get_mut(&mut iface).unwrap().allocation.kind = AllocationKind::HostRegistered;
    let owner = registry(&iface).owner_of(Address(0x10000)).unwrap();
    assert_eq!((owner.iface, owner.allocation), (IfaceKind::SYSTEM, None));
}

#[test]
fn reserved_iface_kind_is_refused() {
    for (number, added) in [(0xff, false), (0x100, true), (IfaceKind::CUDA.0, true)] {
        let mut iface = CountingIface::new(0x1000, 0x1000, None);
        Arc::get_mut(&mut iface).unwrap().allocation.iface = IfaceKind(number);
        let result = Registry::new().add(iface);
        assert_eq!(result.is_ok(), added, "{number:#x}: {result:?}");
        if let Err(error) = result {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.remedy_text().unwrap().contains("0x100"), "{error}");
        }
    }
}

/// MR-04: a driver may place memory in any page, also in the page after host memory. With pages of
/// 4 KiB, both lie in the same 64 KiB here.
#[test]
fn range_from_host_into_device_memory_of_the_next_page_is_refused() {
    let page = rustix::param::page_size() as u64;
    let iface = CountingIface::new(0x13 * page, 2 * page, None);
    let registry = registry(&iface);
    let range = |start, len| AddressRange::new(Address(start), len).unwrap();
    for crossing in
        [range(0x13 * page - 1, 2), range(0x12 * page, page + 1), range(0x12 * page - 16, 2 * page)]
    {
        let error = registry.owner_of_range(crossing).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{crossing}: {error}");
        assert_eq!(error.context_value("allocation"), Some(&*iface.allocation.range.to_string()));
    }
    for host in [range(0x12 * page, page), range(0x15 * page, 4 * page)] {
        assert_eq!(registry.owner_of_range(host).unwrap().allocation, None, "{host}");
    }
}
