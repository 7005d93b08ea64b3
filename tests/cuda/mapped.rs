//! Cached registrations of memory that an application maps by hand (VMM), like PyTorch's expandable
//! segments. A lookup never returns a registration of memory that is not mapped any more.

use hmem::{
    Address, AddressRange,
    cache::UncachedReason,
    cuda::{
        CudaMonitorKind,
        sys::{self, CuMemHandle, CuResult},
    },
    path::P2pPolicy,
    provider::Imports,
};
use hmem_fake_cuda::Profile;

use crate::{
    cache::{App, MONITORS, Reader, bytes_of, with_each_monitor},
    link::{HeldCopies, IMPORTS, Link, REMOTE, check, not_over_a_gpu, profiles, raw, real},
};

/// Length of a part of a reservation, and of the smallest physical memory.
pub(crate) const STEP: u64 = 2 << 20;

/// An application that reserves addresses, creates physical memory and maps it there. Addresses and
/// lengths are given in steps.
pub(crate) struct Mapper<'a> {
    pub(crate) link: &'a Link,
    app: App<'a>,
    reader: Reader<'a>,
    base: u64,
    steps: u64,
}

impl<'a> Mapper<'a> {
    /// Reserves addresses.
    pub(crate) fn new(link: &'a Link, steps: u64) -> Self {
        let mut base = 0;
        let app = App::new(&link.functions);
        // SAFETY: the output is writable.
        app.current(|f| unsafe {
            check(f.mem_address_reserve().expect("VMM")(
                &mut base,
                (steps * STEP) as usize,
                0,
                0,
                0,
            ));
        });
        Self { link, app, reader: Reader::new(link), base, steps }
    }

    pub(crate) fn range(&self, step: u64, steps: u64) -> AddressRange {
        AddressRange::new(Address(self.base + step * STEP), steps * STEP).expect("a range")
    }

    pub(crate) fn create(&self, steps: u64) -> CuMemHandle {
        let location = sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        let properties = sys::CuMemAllocationProp {
            kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            location,
            gpu_direct_rdma_capable: 1,
            ..Default::default()
        };
        let mut handle = 0;
        let size = (steps * STEP) as usize;
        // SAFETY: the output is writable, and the properties are complete.
        self.app.current(|f| unsafe {
            check(f.mem_create().expect("VMM")(&mut handle, size, &properties, 0));
        });
        handle
    }

    /// Maps the first `steps` steps of a handle.
    pub(crate) fn map(&self, step: u64, steps: u64, handle: CuMemHandle) {
        let location = sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        let who = sys::CuMemAccessDesc { location, flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        let (at, size) = (self.base + step * STEP, (steps * STEP) as usize);
        // SAFETY: the addresses are reserved and not mapped, and the physical memory of the handle
        // is at least `size` bytes long.
        self.app.current(|f| unsafe {
            check(f.mem_map().expect("VMM")(at, size, 0, handle, 0));
            check(f.mem_set_access().expect("VMM")(at, size, &who, 1));
        });
    }

    pub(crate) fn unmap(&self, step: u64, steps: u64) {
        let (at, size) = (self.base + step * STEP, (steps * STEP) as usize);
        // SAFETY: the steps are whole mappings, and no code uses the memory.
        self.app.current(|f| check(unsafe { f.mem_unmap().expect("VMM")(at, size) }));
    }

    pub(crate) fn release(&self, handle: CuMemHandle) {
        // SAFETY: `create` made the handle, and it is released once.
        self.app.current(|f| check(unsafe { f.mem_release().expect("VMM")(handle) }));
    }

    /// Creates memory of some steps and maps it. The mapping alone keeps the memory.
    pub(crate) fn map_new(&self, step: u64, steps: u64) {
        let handle = self.create(steps);
        self.map(step, steps, handle);
        self.release(handle);
    }

    /// Writes the mark of a step into its memory.
    pub(crate) fn mark(&self, step: u64, mark: u32) {
        let start = self.range(step, 1).start();
        self.link.cuda.write_bytes(start, &bytes_of(mark)).expect("write");
    }

    /// Looks up some steps in the cache, and compares the marks that a peer reads there. Returns
    /// true if the lookup was a hit.
    fn lookup(&self, step: u64, marks: &[u32]) -> bool {
        let cache = self.link.domain.cache().expect("a cache");
        let before = cache.statistics().hits;
        // SAFETY: the region is not used after the memory is unmapped.
        let region = unsafe { self.link.cache_get(self.range(step, marks.len() as u64)) };
        assert!(region.lease().uncached_reason().is_none(), "{:?}", region.lease());
        let key = region.view().key().expect("a key");
        for (number, mark) in marks.iter().enumerate() {
            let read = self.reader.at(&key, number as u64 * STEP);
            assert_eq!(read, bytes_of(*mark), "step {step} + {number}: other memory was read");
        }
        cache.statistics().hits > before
    }

    /// Asserts that steps without memory cannot be looked up.
    fn refuses(&self, step: u64, steps: u64) {
        let cache = self.link.domain.cache().expect("a cache");
        let before = cache.statistics().hits;
        // SAFETY: no region of the memory is used.
        let region = cache.get(unsafe { raw(self.range(step, steps)) }, REMOTE);
        let _refused = region.expect_err("no memory is mapped there");
        assert_eq!(cache.statistics().hits, before);
    }
}

impl Drop for Mapper<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let size = (self.steps * STEP) as usize;
        // SAFETY: `new` reserved the addresses, and the test has unmapped them.
        self.app.current(|f| check(unsafe { f.mem_address_free().expect("VMM")(self.base, size) }));
        if real() {
            return;
        }
        let cache = self.link.domain.cache().expect("a cache");
        cache.evict_idle();
        cache.reclaim();
        let live = self.link.driver.live();
        assert_eq!((live.mappings, live.handles), (0, 0), "physical memory is left");
        assert_eq!(self.link.driver.undefined_calls(), 0);
    }
}

/// Runs a case over every profile and monitor, with a new reservation. Adds two profiles: a driver
/// that reports a context for VMM memory, and a driver that answers queries in a context only.
pub(crate) fn each(steps: u64, show: impl Fn(&Mapper<'_>, CudaMonitorKind)) {
    let mut drivers = profiles();
    if !real() {
        drivers.push(Profile { vmm_names_context: true, ..Profile::default() });
        drivers.push(Profile { queries_need_context: true, ..Profile::default() });
    }
    for profile in drivers {
        for monitor in MONITORS {
            let profile = profile.clone();
            let link = Link::cached(profile, IMPORTS, P2pPolicy::Enabled, *monitor);
            if !link.no_rdma_with_vmm() {
                show(&Mapper::new(&link, steps), *monitor);
            }
        }
    }
}

/// LIFE-01
///
/// A hit costs three driver calls for each mapping of the region, or none if it relies on hooks.
#[test]
fn hit_of_mapped_memory_asks_about_each_mapping() {
    with_each_monitor(3, |link, monitor, steps| {
        if link.no_rdma_with_vmm() {
            return;
        }
        let mapper = Mapper::new(link, steps.into());
        for step in 0..steps {
            mapper.map_new(step.into(), 1);
            mapper.mark(step.into(), 70 + step);
        }
        for steps in 1..=3 {
            let marks: Vec<_> = (0..steps).map(|step| 70 + step as u32).collect();
            assert!(!mapper.lookup(0, &marks));
            mapper.link.domain.cache().expect("a cache").reclaim();
            let range = mapper.range(0, steps);
            let before = mapper.link.calls();
            // SAFETY: the memory stays mapped for longer.
            let region = unsafe { mapper.link.cache_get(range) };
            let calls = mapper.link.calls() - before;
            drop(region);
            let expected = if monitor == CudaMonitorKind::Hooks { 0 } else { 3 * steps };
            assert!(real() || calls == expected, "{monitor}: {calls} calls of {steps} mappings");
        }
        mapper.unmap(0, 3);
    });
}

/// LIFE-01
#[test]
fn growing_a_reservation_keeps_its_registrations() {
    each(3, |mapper, monitor| {
        mapper.map_new(0, 1);
        mapper.mark(0, 1);
        assert!(!mapper.lookup(0, &[1]));
        mapper.map_new(1, 1);
        mapper.mark(1, 2);
        assert!(mapper.lookup(0, &[1]), "{monitor}: nothing was unmapped");
        assert!(!mapper.lookup(0, &[1, 2]), "{monitor}: more memory");
        mapper.map_new(2, 1);
        mapper.mark(2, 3);
        assert!(mapper.lookup(0, &[1, 2]), "{monitor}: nothing was unmapped");
        assert!(!mapper.lookup(1, &[2, 3]), "{monitor}: more memory");
        mapper.unmap(0, 3);
        mapper.refuses(0, 1);
    });
}

/// LIFE-01
#[test]
fn unmapping_a_segment_in_the_middle_ends_only_its_registrations() {
    each(3, |mapper, monitor| {
        for step in 0..3 {
            mapper.map_new(step, 1);
            mapper.mark(step, 10 + step as u32);
            assert!(!mapper.lookup(step, &[10 + step as u32]));
        }
        mapper.unmap(1, 1);
        assert!(mapper.lookup(0, &[10]) && mapper.lookup(2, &[12]), "{monitor}: still mapped");
        mapper.refuses(1, 1);
        mapper.map_new(1, 1);
        mapper.mark(1, 20);
        assert!(!mapper.lookup(1, &[20]), "{monitor}: other memory");
        assert!(!mapper.lookup(0, &[10, 20, 12]), "{monitor}: a new range");
        mapper.unmap(1, 1);
        mapper.map_new(1, 1);
        mapper.mark(1, 21);
        assert!(!mapper.lookup(0, &[10, 21, 12]), "{monitor}: other memory in the middle");
        mapper.unmap(0, 3);
    });
}

/// LIFE-01
///
/// The fake driver gives the next memory the handle of freed memory, so that the number of a handle
/// alone shows no change.
#[test]
fn other_memory_at_the_same_addresses_is_never_a_hit() {
    each(1, |mapper, monitor| {
        for round in 0..100 {
            mapper.map_new(0, 1);
            mapper.mark(0, round);
            assert!(!mapper.lookup(0, &[round]), "{monitor}, round {round}");
            assert!(mapper.lookup(0, &[round]), "{monitor}, round {round}");
            mapper.unmap(0, 1);
        }
    });
}

/// LIFE-01
#[test]
fn releasing_a_handle_while_it_is_mapped_keeps_its_registrations() {
    each(1, |mapper, monitor| {
        let first = mapper.create(1);
        mapper.map(0, 1, first);
        mapper.mark(0, 1);
        assert!(!mapper.lookup(0, &[1]));
        mapper.release(first);
        assert!(mapper.lookup(0, &[1]), "{monitor}: the mapping keeps the memory");
        mapper.unmap(0, 1);
        mapper.refuses(0, 1);
        mapper.map_new(0, 1);
        mapper.mark(0, 2);
        assert!(!mapper.lookup(0, &[2]), "{monitor}: other memory");
        mapper.unmap(0, 1);
    });
}

/// LIFE-01
///
/// If the application maps the same memory again, the registration is still of that memory. Hooks
/// have invalidated it all the same.
#[test]
fn same_handle_at_the_same_addresses_may_be_a_hit() {
    each(1, |mapper, monitor| {
        let (one, other) = (mapper.create(1), mapper.create(1));
        for (round, handle) in [one, one, other, other, one].into_iter().enumerate() {
            mapper.map(0, 1, handle);
            let mark = u32::from(handle == other);
            mapper.mark(0, mark);
            let hit = mapper.lookup(0, &[mark]);
            let same = monitor == CudaMonitorKind::Identity && (round == 1 || round == 3);
            assert_eq!(hit, same, "{monitor}, round {round}");
            mapper.unmap(0, 1);
        }
        mapper.release(one);
        mapper.release(other);
    });
}

/// LIFE-01
#[test]
fn same_handle_at_other_addresses_is_never_a_hit() {
    each(3, |mapper, monitor| {
        let handle = mapper.create(2);
        mapper.map(0, 2, handle);
        mapper.mark(0, 1);
        mapper.mark(1, 2);
        assert!(!mapper.lookup(1, &[2]));
        mapper.unmap(0, 2);
        mapper.map(1, 2, handle);
        assert!(!mapper.lookup(1, &[1]), "{monitor}: the first part is there now");
        assert!(!mapper.lookup(2, &[2]), "{monitor}: never registered there");
        mapper.unmap(1, 2);
        mapper.release(handle);
    });
}

/// LIFE-01
#[test]
fn shorter_mapping_of_the_same_handle_is_never_a_hit() {
    if not_over_a_gpu("no document says that a part of a handle can be mapped") {
        return;
    }
    each(2, |mapper, monitor| {
        let handle = mapper.create(2);
        mapper.map(0, 2, handle);
        mapper.mark(0, 1);
        mapper.mark(1, 2);
        assert!(!mapper.lookup(0, &[1, 2]));
        mapper.unmap(0, 2);
        mapper.map(0, 1, handle);
        mapper.map_new(1, 1);
        mapper.mark(1, 3);
        assert!(!mapper.lookup(0, &[1, 3]), "{monitor}: other memory in the second half");
        mapper.unmap(0, 2);
        mapper.release(handle);
    });
}

/// Physical memory of the random test.
#[derive(Clone, Copy, Debug)]
struct Created {
    handle: CuMemHandle,
    steps: u64,
    /// The mark of the first step. The mark of the next step is greater by 1.
    mark: u32,
    marked: bool,
}

/// LIFE-01, CACHE-11
///
/// Creates, maps, unmaps and releases memory at random. Every lookup must reach the memory that is
/// mapped then.
#[test]
fn random_mappings_are_never_a_stale_hit() {
    const STEPS: u64 = 5;
    each(STEPS, |mapper, monitor| {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 11) as usize % below
        };
        let mut created: Vec<Created> = Vec::new();
        let mut mapped: Vec<(u64, Created)> = Vec::new();
        let (mut hits, mut misses, mut next) = (0, 0, 1);
        for _ in 0..600 {
            match random(8) {
                0 if created.len() < 4 => {
                    let steps = 1 + random(2) as u64;
                    let handle = mapper.create(steps);
                    created.push(Created { handle, steps, mark: next, marked: false });
                    next += 2;
                }
                1 if !created.is_empty() => {
                    mapper.release(created.swap_remove(random(created.len())).handle);
                }
                2 | 3 if !created.is_empty() => {
                    let (at, one) = (random(STEPS as usize) as u64, random(created.len()));
                    let memory = created[one];
                    let end = at + memory.steps;
                    let free = |(start, other): &(u64, Created)| {
                        *start >= end || start + other.steps <= at
                    };
                    if end <= STEPS && mapped.iter().all(free) {
                        mapper.map(at, memory.steps, memory.handle);
                        created[one].marked = true;
                        if !memory.marked {
                            for step in 0..memory.steps {
                                mapper.mark(at + step, memory.mark + step as u32);
                            }
                        }
                        mapped.push((at, memory));
                    }
                }
                4 if !mapped.is_empty() => {
                    let (at, memory) = mapped.swap_remove(random(mapped.len()));
                    mapper.unmap(at, memory.steps);
                }
                _ => {
                    let mut marks = [None; STEPS as usize];
                    for (at, memory) in &mapped {
                        for step in 0..memory.steps {
                            marks[(at + step) as usize] = Some(memory.mark + step as u32);
                        }
                    }
                    let start = random(STEPS as usize);
                    let run: Vec<_> = marks[start..].iter().map_while(|mark| *mark).collect();
                    if run.is_empty() {
                        mapper.refuses(start as u64, 1);
                    } else if mapper.lookup(start as u64, &run[..1 + random(run.len())]) {
                        hits += 1;
                    } else {
                        misses += 1;
                    }
                }
            }
        }
        for (at, memory) in mapped {
            mapper.unmap(at, memory.steps);
        }
        for memory in created {
            mapper.release(memory.handle);
        }
        assert!(hits > 20 && misses > 20, "{monitor}: {hits} hits, {misses} misses");
    });
}

/// LIFE-01
///
/// The monitor retains handles only while a registration is cached, and the hooks need none.
#[test]
fn unmapped_memory_is_freed_when_its_registration_leaves_the_cache() {
    if not_over_a_gpu("a GPU does not count its handles") {
        return;
    }
    each(1, |mapper, monitor| {
        mapper.map_new(0, 1);
        mapper.mark(0, 1);
        assert!(!mapper.lookup(0, &[1]));
        let retained = usize::from(monitor == CudaMonitorKind::Identity);
        assert_eq!(mapper.link.driver.live().handles, retained, "{monitor}");
        mapper.unmap(0, 1);
        let cache = mapper.link.domain.cache().expect("a cache");
        assert_eq!(mapper.link.driver.live().handles, retained, "{monitor}");
        cache.evict_idle();
        cache.reclaim();
        assert_eq!(mapper.link.driver.live().handles, 0, "{monitor}");
    });
}

/// LIFE-01
///
/// A driver without handles shows no change of a mapping, so such memory is registered uncached.
#[test]
fn mapped_memory_without_a_handle_is_uncached_with_the_reason() {
    if not_over_a_gpu("the driver of a GPU has handles") {
        return;
    }
    let absent = Profile { absent: vec!["cuMemRetainAllocationHandle"], ..Profile::default() };
    for (profile, refuses) in [(absent, false), (Profile::default(), true)] {
        for monitor in MONITORS {
            let imports = IMPORTS;
            let link = Link::cached(profile.clone(), imports, P2pPolicy::Enabled, *monitor);
            if refuses {
                let code = CuResult::CUDA_ERROR_NOT_SUPPORTED;
                link.driver.fail_always("cuMemRetainAllocationHandle", code);
            }
            let mapper = Mapper::new(&link, 1);
            mapper.map_new(0, 1);
            mapper.mark(0, 1);
            // SAFETY: the region is dropped before the memory is unmapped.
            let region = unsafe { link.cache_get(mapper.range(0, 1)) };
            let Some(UncachedReason::Unwatched(why)) = region.lease().uncached_reason() else {
                panic!("{monitor}: {:?}", region.lease());
            };
            assert!(why.to_string().contains("cuMemRetainAllocationHandle"), "{monitor}: {why}");
            assert_eq!(mapper.reader.first(&region), bytes_of(1), "{monitor}");
            drop(region);
            mapper.unmap(0, 1);
        }
    }
}

/// LIFE-01
///
/// The driver revokes the pages of a peer-memory client when their addresses are unmapped. Equal
/// mappings do not show that, so only hooks make such a registration a hit.
#[test]
fn peer_memory_of_mapped_memory_is_a_hit_with_hooks_alone() {
    if not_over_a_gpu("the software NIC cannot read a GPU's memory by its address") {
        return;
    }
    for monitor in MONITORS {
        let imports = Imports { dma_buf: false, peer_memory: true, ..IMPORTS };
        let link = Link::cached(Profile::default(), imports, P2pPolicy::Required, *monitor);
        let mapper = Mapper::new(&link, 1);
        mapper.map_new(0, 1);
        mapper.mark(0, 1);
        for round in 0..3 {
            let hit = mapper.lookup(0, &[1]);
            let may_hit = *monitor == CudaMonitorKind::Hooks && round > 0;
            assert_eq!(hit, may_hit, "{monitor}, round {round}");
        }
        mapper.unmap(0, 1);
    }
}
