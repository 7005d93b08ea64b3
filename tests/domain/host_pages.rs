//! Entries of a cache that grow to whole pages of the host (`Growth::HostPages`).

use std::sync::Arc;

use hmem::{
    Access, AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr,
    Growth, Hmem, Iface, MrMode, Promise, Raw,
    iface::AllocRequest,
    loopback::Loopback,
    system::{SIMULATED, Simulated},
};

const READ: Access = Access::REMOTE_READ;

struct World {
    device: Arc<dyn Iface>,
    domain: Domain,
    page: u64,
}

fn world() -> World {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(Simulated::builder().build().expect("a device"))
        .provider(Loopback::builder().build().expect("a software NIC"))
        .build()
        .expect("the ifaces start");
    let cache = Some(CacheAttr::default().growth(Growth::HostPages));
    let attr = DomainAttr { mr_mode: MrMode::empty(), cache, ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let device = Arc::clone(hmem.iface(SIMULATED).expect("it was added"));
    World { device, domain, page: rustix::param::page_size() as u64 }
}

impl World {
    fn buffer(&self, len: u64) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&self.device, &request).expect("device memory")
    }

    /// Looks a range up in the cache. Returns the range of the registered region.
    fn registered(&self, range: AddressRange) -> AddressRange {
        let cache = self.domain.cache().expect("a cache");
        // SAFETY: nothing refers into the memory, and it outlives its registration.
        let memory = unsafe { Raw::new(range, Promise::Allocation) };
        let region = cache.get(memory, READ).expect("registered");
        assert_eq!(region.view().range(), range);
        assert!(region.slice(0, range.len() + 1).is_err(), "the key is of what was looked up");
        region.range()
    }
}

/// LIFE-05, MR-17
#[test]
fn entry_grows_to_whole_pages_and_no_further() {
    let world = world();
    let page = world.page;
    let buffer = world.buffer(4 * page);
    let part = |start, len| buffer.range().slice(start, len).expect("a part");
    assert_eq!(world.registered(part(page + 8, 100)), part(page, page));
    assert_eq!(world.registered(part(2 * page - 1, 2)), part(page, 2 * page), "over two pages");
    assert_eq!(world.registered(part(page, page)), part(page, page), "a hit");
    let cache = world.domain.cache().expect("a cache");
    assert_eq!(cache.statistics().registrations, 2);
    cache.evict_idle();
}

/// LIFE-05, MR-17
#[test]
fn last_page_ends_with_the_allocation() {
    let world = world();
    let buffer = world.buffer(world.page + 100);
    let part = |start, len| buffer.range().slice(start, len).expect("a part");
    let last = part(world.page, buffer.range().len() - world.page);
    assert_eq!(world.registered(part(world.page + 8, 8)), last);
    world.domain.cache().expect("a cache").evict_idle();
}
