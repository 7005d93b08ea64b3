//! Time to register and close many views (ranges with access rights) of a few allocations of device
//! memory.
//!
//! Both measured methods use one registration for all views of an allocation: one `Batch`, or a
//! cache whose regions grow to the whole allocation. The references use one registration per view.
//! The memory is that of a simulated device, which can pretend to have more memory than the
//! machine.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::sync::Arc;

use hmem::{
    Access, AllocationKind, Batch, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr, Growth,
    Hmem, Iface, Promise, Raw, Request, iface::AllocRequest, loopback::Loopback, system::Simulated,
};
use report::{Comparison, Target};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const MILLISECOND: f64 = 1e6;

/// Number and total length of the views of a measurement, and number of allocations. All views are
/// equally long, and so are all allocations.
struct ViewLayout {
    views: u64,
    bytes: u64,
    allocations: u64,
}

/// The views of the tensors of a 51 GB model.
const MODEL: ViewLayout = ViewLayout { views: 1_265, bytes: 51_000_000_000, allocations: 16 };
/// Views of 200 KB each.
const BLOCKS: ViewLayout = ViewLayout { views: 10_000, bytes: 10_000 * 200_000, allocations: 4 };

struct Memory {
    _allocations: Vec<DeviceBuffer>,
    views: Vec<Raw>,
}

impl Memory {
    fn new(device: &Arc<dyn Iface>, shape: &ViewLayout) -> Self {
        let len = shape.bytes / shape.views;
        let each = shape.views.div_ceil(shape.allocations);
        let request =
            AllocRequest { len: len * each, device: DeviceId(0), kind: AllocationKind::Device };
        let allocations: Vec<_> = (0..shape.allocations)
            .map(|_| DeviceBuffer::allocate(device, &request).expect("device memory"))
            .collect();
        let view = |index: u64| {
            let whole = allocations[(index / each) as usize].allocation().range;
            let range =
                whole.slice(index % each * len, len).expect("the view is inside its allocation");
            // SAFETY: nothing transfers to the regions of the memory. They are closed, and evicted
            // from the cache, before the memory is freed.
            unsafe { Raw::new(range, Promise::Allocation) }
        };
        Self { views: (0..shape.views).map(view).collect(), _allocations: allocations }
    }
}

fn one_by_one(domain: &Domain, views: &[Raw]) {
    let register = |view: &Raw| domain.register(*view, REMOTE).expect("registered");
    let regions: Vec<_> = views.iter().map(register).collect();
    for region in regions {
        region.close().expect("the region is not in use");
    }
}

fn by_one_call(domain: &Domain, views: &[Raw], registrations: u64) {
    let nics = [domain];
    let batch =
        views.iter().fold(Batch::on(&nics), |batch, view| batch.add(Request::new(*view, REMOTE)));
    let registered = batch.grow(Growth::Allocation).register().expect("registered");
    assert_eq!(registered.regions().len() as u64, registrations, "one registration per allocation");
    registered.close().expect("the regions are not in use");
}

fn through_cache(domain: &Domain, views: &[Raw]) {
    let cache = domain.cache().expect("the domain has a cache");
    for view in views {
        drop(cache.get(*view, REMOTE).expect("registered"));
    }
    cache.evict_idle();
}

fn main() {
    let device = Simulated::builder().memory_per_device(64 << 30).build().expect("a device");
    let device: Arc<dyn Iface> = Arc::new(device);
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(&device))
        .provider(Loopback::builder().build().expect("a software NIC"))
        .build()
        .expect("the ifaces start");
    let domain = |growth| {
        let cache = CacheAttr::default().growth(growth);
        let attr = DomainAttr { cache: Some(cache), ..DomainAttr::default() };
        hmem.domain("loopback", attr).expect("a domain")
    };
    let (plain, growing) = (domain(Growth::None), domain(Growth::Allocation));
    let mut lines: Vec<Comparison> = Vec::new();
    println!("memory: 1,265 views of 51 GB in 16 allocations, 10,000 views of 200 KB in 4");
    println!("reference: one registration per view, or the cache without growth");
    let names = [
        ["1,265 views: one batch", "1,265 views: a cache that grows"],
        ["10,000 views: one batch", "10,000 views: a cache that grows"],
    ];
    for ((shape, most), [many, cache]) in [(MODEL, 5.0), (BLOCKS, 20.0)].into_iter().zip(names) {
        let memory = Memory::new(&device, &shape);
        let views = &memory.views;
        let goal = || Target::Nanoseconds(most * MILLISECOND);
        let (ours, other) =
            (|| by_one_call(&plain, views, shape.allocations), || one_by_one(&plain, views));
        lines.push(report::compare(many, goal(), ours, other));
        let (ours, other) = (|| through_cache(&growing, views), || through_cache(&plain, views));
        lines.push(report::compare(cache, goal(), ours, other));
    }
    report::print(lines);
}
