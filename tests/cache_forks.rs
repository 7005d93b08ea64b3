//! Tests of forked children. The parent's domain caches regions on a software NIC with pinned
//! pages.
#![allow(unsafe_code)]

mod machine;
mod trials;

use std::{
    io::{PipeReader, PipeWriter, Read, Write},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hmem::{
    Access, AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr,
    Endpoint, ErrorKind, Hmem, Iface, IfaceKind, MemoryRegion, MrMode, Promise, Raw, Result,
    iface::AllocRequest,
    loopback::{Loopback, Progress},
    provider::{CompletionQueue, EndpointAttr, WindowState},
    system::Simulated,
    transfer::{EndpointName, RemoteSegment},
};
use rustix::param::page_size;
use trials::{Outcome, skip, trials};

trials! {
    /// CACHE-13
    a_childs_lookup_changes_no_page_pinned_by_its_parent,
    /// CACHE-13
    drops_in_a_child_keep_the_parents_registrations,
    /// CACHE-13
    forked_child_of_a_registering_parent_does_not_hang,
    progress_in_a_forked_child_is_refused,
    /// CACHE-13
    a_child_opens_a_domain_of_its_own,
    /// MON-06
    windows_of_the_parent_are_refused_in_a_child,
    /// MON-06
    device_buffer_dropped_in_a_child_is_not_freed,
}

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LONG: Duration = Duration::from_secs(60);

/// Returns memory by its addresses.
///
/// # Safety
/// The caller makes the promise [`Promise::ReadWrite`], as [`Raw::new`] describes.
unsafe fn raw(range: AddressRange) -> Raw {
    // SAFETY: the caller makes the promise.
    unsafe { Raw::new(range, Promise::ReadWrite) }
}

/// Returns a page filled with `byte`, which stays mapped until the process ends.
fn pages(byte: u8) -> AddressRange {
    let bytes: &'static mut [u8] = vec![byte; 3 * page_size()].leak();
    let range = AddressRange::of(bytes);
    let skip = range.start().0.next_multiple_of(page_size() as u64) - range.start().0;
    range.slice(skip, page_size() as u64).expect("inside")
}

/// A domain with a cache, and a peer on the same NIC that reads the domain's memory by RMA.
struct Net {
    hmem: Hmem,
    target: Domain,
    initiator: Domain,
    endpoint: Endpoint,
    cq: Arc<dyn CompletionQueue>,
    name: EndpointName,
    _target_endpoint: Endpoint,
}

impl Net {
    fn open() -> Self {
        let nic = Loopback::builder().remap_policy(machine::pages()).build();
        let nic = nic.expect("a software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces().provider(nic).build().expect("started");
        let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
        let cached = DomainAttr { cache: Some(CacheAttr::default()), ..attr.clone() };
        let target = hmem.domain("loopback", cached).expect("a domain");
        let initiator = hmem.domain("loopback", attr).expect("a domain");
        let cq = initiator.open_cq(8).expect("a queue");
        let endpoint = initiator.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let target_cq = target.open_cq(8).expect("a queue");
        let target_endpoint =
            target.open_endpoint(&EndpointAttr::new(&target_cq)).expect("an endpoint");
        let name = target_endpoint.name();
        Self { hmem, target, initiator, endpoint, cq, name, _target_endpoint: target_endpoint }
    }

    /// Returns the first bytes of a region, as a peer reads them.
    fn pulled(&self, region: &MemoryRegion) -> Result<[u8; 16]> {
        let buffer = self.initiator.register(vec![0_u8; 16], Access::READ)?;
        let key = region.key()?;
        let remote = [RemoteSegment { address: region.base_addr(), len: 16, key: &key }];
        let peer = self.endpoint.resolve(&self.name)?;
        self.endpoint.read(&[buffer.slice(0, 16)?], &remote, peer, 1)?;
        let mut done = Vec::new();
        while self.cq.read(&mut done, 1)? == 0 {
            self.target.progress()?;
        }
        done.remove(0).result?;
        let mut bytes = [0; 16];
        buffer.read(0, &mut bytes)?;
        Ok(bytes)
    }

    fn cached_get(&self, range: AddressRange) -> Result<()> {
        // SAFETY: the pages stay mapped, and nothing else writes them.
        self.target.cache()?.get(unsafe { raw(range) }, REMOTE).map(drop)
    }
}

/// A child process. Dropping the value kills the process.
struct Child(libc::pid_t);

impl Child {
    /// Forks. The child runs `body` and exits with its result as status, without running
    /// destructors.
    fn fork(body: impl FnOnce() -> u8) -> Self {
        // SAFETY: the child runs the closure and leaves by `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let body = std::panic::AssertUnwindSafe(body);
            let status = std::panic::catch_unwind(body).unwrap_or(255);
            // SAFETY: `_exit` only ends the process.
            unsafe { libc::_exit(status.into()) };
        }
        assert!(pid > 0, "fork failed");
        Self(pid)
    }

    /// Waits for the child and returns its exit status. Panics if the child hangs or is killed.
    fn status(self) -> i32 {
        let end = Instant::now() + LONG;
        let mut status = 0;
        // SAFETY: asks for the status of this child without blocking.
        while unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } != self.0 {
            assert!(Instant::now() < end, "the child hangs");
            thread::yield_now();
        }
        std::mem::forget(self);
        assert!(libc::WIFEXITED(status), "the child died: {status:#x}");
        libc::WEXITSTATUS(status)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child was not waited for, so its number is still its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

fn signal(mut pipe: &PipeWriter) {
    pipe.write_all(&[1]).expect("the other side waits");
}

fn await_signal(mut pipe: &PipeReader) {
    pipe.read_exact(&mut [0]).expect("the other side says so");
}

fn a_childs_lookup_changes_no_page_pinned_by_its_parent() -> Outcome {
    skip(machine::without_pinned_pages())?;
    let net = Net::open();
    let cache = net.target.cache().expect("a cache");
    let (old, new, childs) = (pages(1), pages(2), pages(3));
    // SAFETY: the pages stay mapped, and nothing else writes them.
    let get = |range| cache.get(unsafe { raw(range) }, REMOTE).expect("registered");
    let held = get(old);
    let (ready, begin) = std::io::pipe().expect("a pipe");
    let child = Child::fork(|| {
        // After the fork the parent pinned another buffer, which the child's copy of the cache does
        // not know.
        await_signal(&ready);
        let kinds = [net.cached_get(childs), net.cached_get(old), net.cached_get(new)]
            .map(|got| got.expect_err("a copy of the parent's domain").kind());
        u8::from(kinds != [ErrorKind::BadState; 3])
    });
    let later = get(new);
    signal(&begin);
    assert_eq!(child.status(), 0);
    assert_eq!(net.pulled(&held).expect("read"), [1; 16]);
    assert_eq!(net.pulled(&later).expect("read"), [2; 16]);
    drop((held, later));
    cache.evict_idle();
    assert_eq!(net.target.live().regions, 0);
    Ok(())
}

fn drops_in_a_child_keep_the_parents_registrations() {
    let net = Net::open();
    let cache = net.target.cache().expect("a cache");
    // SAFETY: the pages stay mapped, and nothing else writes them.
    let [cached, plain, closed] = [4, 5, 6].map(|at| unsafe { raw(pages(at)) });
    let cached = cache.get(cached, REMOTE).expect("registered");
    let plain = net.target.register(plain, REMOTE).expect("registered");
    let closed = net.target.register(closed, REMOTE).expect("registered");
    let child = Child::fork(|| {
        // A transfer by the child would use the parent's queue and memory file.
        let moved = net.pulled(&cached).is_ok() || net.pulled(&plain).is_ok();
        // SAFETY: the child exits without using these values again, and the parent has its own
        // copies.
        unsafe {
            drop(ptr::read(&raw const cached));
            drop(ptr::read(&raw const plain));
            let closes = ptr::read(&raw const closed).close().is_ok();
            drop(ptr::read(&raw const net.target));
            u8::from(moved || !closes)
        }
    });
    assert_eq!(child.status(), 0);
    for (region, byte) in [(&*cached, 4), (&plain, 5), (&closed, 6)] {
        assert_eq!(net.pulled(region).expect("read"), [byte; 16]);
    }
    drop((cached, plain, closed));
    cache.evict_idle();
    assert_eq!(net.target.live().regions, 0);
}

fn forked_child_of_a_registering_parent_does_not_hang() {
    let net = Net::open();
    net.target.cache().expect("a cache");
    let stop = AtomicBool::new(false);
    let ranges: Vec<_> = (0..4).map(pages).collect();
    thread::scope(|scope| {
        for range in &ranges[..2] {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    net.cached_get(*range).expect("registered");
                    net.target.cache().expect("a cache").invalidate(*range);
                    // SAFETY: the pages stay mapped, and nothing else writes them.
                    let region = net.target.register(unsafe { raw(*range) }, REMOTE);
                    region.expect("registered").close().expect("closed");
                }
            });
        }
        // Ends the threads even if a child hangs.
        let _ends = Ends(&stop);
        for _ in 0..100 {
            let child = Child::fork(|| {
                let cached = net.cached_get(ranges[2]).is_err();
                // SAFETY: the pages stay mapped, and nothing else writes them.
                let plain = net.target.register(unsafe { raw(ranges[3]) }, REMOTE);
                let opened = net.hmem.domain("loopback", DomainAttr::default());
                let inspected = net.target.live().regions == 0
                    && net.target.cache().expect("a cache").monitor(IfaceKind::SYSTEM).is_err();
                u8::from(!cached || plain.is_ok() || opened.is_ok() || !inspected)
            });
            assert_eq!(child.status(), 0);
        }
    });
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Covers domains with and without a progress thread. A forked child has no progress thread.
fn progress_in_a_forked_child_is_refused() {
    for progress in [Progress::ByHand, Progress::Thread] {
        let nic = Loopback::builder().progress(progress).build().expect("a software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces().provider(nic).build().expect("started");
        let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("a domain");
        let child = Child::fork(|| {
            let refused = domain.progress().is_err_and(|error| error.kind() == ErrorKind::BadState);
            u8::from(!refused)
        });
        assert_eq!(child.status(), 0, "{progress:?}");
        assert_eq!(domain.progress().expect("nothing is posted"), 0);
    }
}

fn a_child_opens_a_domain_of_its_own() {
    let net = Net::open();
    net.cached_get(pages(7)).expect("registered");
    let child = Child::fork(|| {
        let own = Net::open();
        let range = pages(8);
        // SAFETY: the pages stay mapped, and nothing else writes them.
        let memory = unsafe { raw(range) };
        let region = own.target.cache().expect("a cache").get(memory, REMOTE).expect("registered");
        let fine =
            region.lease().uncached_reason().is_none() && own.pulled(&region).unwrap() == [8; 16];
        drop(region);
        own.target.cache().expect("a cache").evict_idle();
        u8::from(!fine || own.target.live().regions != 0)
    });
    assert_eq!(child.status(), 0);
}

fn windows_of_the_parent_are_refused_in_a_child() {
    let net = Net::open();
    let window = net.target.alloc_type_1_window().expect("a window");
    let access = Access::MW_BIND | REMOTE;
    // SAFETY: the pages stay mapped, and nothing else writes them.
    let region = net.target.register(unsafe { raw(pages(8)) }, access).expect("registered");
    let key = window.bind(&region, 0, 16, Access::REMOTE_READ).expect("bound");
    let child = Child::fork(|| {
        let kinds = [window.bind(&region, 0, 16, Access::REMOTE_READ).map(drop), window.unbind()]
            .map(|done| done.expect_err("a window of the parent").kind());
        let shown = (window.state(), window.key());
        u8::from(kinds != [ErrorKind::BadState; 2] || shown != (WindowState::Invalid, None))
    });
    assert_eq!(child.status(), 0);
    assert_eq!((window.state(), window.key()), (WindowState::Valid, Some(key)));
}

fn device_buffer_dropped_in_a_child_is_not_freed() {
    let iface: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("allocated");
    let start = buffer.range().start();
    let is_live = || iface.query(start).expect("query").is_some();
    let child = Child::fork(|| {
        // SAFETY: the child exits without using this value again, and the parent has its own copy.
        drop(unsafe { ptr::read(&raw const buffer) });
        u8::from(!is_live())
    });
    assert_eq!(child.status(), 0);
    assert!(is_live());
    drop(buffer);
    assert!(!is_live());
}
