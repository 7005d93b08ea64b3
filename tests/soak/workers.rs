//! The workers of a process. Each repeats steps of one kind of load.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    ptr,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::Duration,
};

use hmem::{
    Access, Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr,
    DomainBindFlags, Errno, ErrorKind, Hmem, Iface, IfaceExt, Memory, Promise, Raw, Region,
    RemoteKey, Result, Type2Bind, Type2Kind,
    event_queue::EventQueue,
    iface::{AllocRequest, IpcHandle},
    loopback::{Faults, Loopback, NicCall},
    provider::EndpointAttr,
    system::{DeviceCall, Simulated},
};
use rustix::param::page_size;

use crate::{
    Options, Plant,
    accounts::Check,
    link::{Link, SCRATCH, completion},
    load::{Load, Me, PAGES, REMOTE, Registered},
};

/// A worker: its name, and the function that its thread runs. Only the last one of the first
/// process gets the pipes to the second process.
type Worker = (&'static str, fn(&Load, Me<'_>, Option<Pipes>));

pub(crate) const WORKERS: [Worker; 8] = [
    ("replaced pages", replaced_pages),
    ("lookups", lookups),
    ("device memory", device_memory),
    ("registrations", registrations),
    ("windows", windows),
    ("grants", grants),
    ("faults and forks", faults_and_forks),
    ("other process", other_process),
];

/// A generator of pseudo-random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Returns `len` bytes that depend on the seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_ne_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn map_at(at: *mut libc::c_void, pages: usize, flags: i32) -> *mut libc::c_void {
    let (rights, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new pages, or pages in place of the worker's own.
    let mapped = unsafe { libc::mmap(at, pages * page_size(), rights, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped
}

fn pages_at(at: *mut libc::c_void, pages: usize) -> AddressRange {
    AddressRange::new(Address(at.expose_provenance() as u64), (pages * page_size()) as u64)
        .expect("no wrap")
}

/// Maps pages at a free address.
pub(crate) fn map(pages: usize) -> AddressRange {
    pages_at(map_at(ptr::null_mut(), pages, 0), pages)
}

fn pointer(range: AddressRange) -> *mut libc::c_void {
    ptr::with_exposed_provenance_mut(range.start().0 as usize)
}

/// Unmaps pages of [`map`].
pub(crate) fn unmap(pages: AddressRange) {
    // SAFETY: the caller's own pages, which no other thread looks up.
    assert_eq!(unsafe { libc::munmap(pointer(pages), pages.len() as usize) }, 0);
}

/// Returns one of the pages of [`Load::pages`].
fn page_of(load: &Load, at: usize) -> AddressRange {
    load.pages.slice((at * page_size()) as u64, page_size() as u64).expect("inside")
}

/// Reads the number at the start of a page through a lookup.
fn looked_up(load: &Load, link: &Link, page: AddressRange) -> Result<u64> {
    let region = load.get(page)?;
    number(link, &region.view().key()?)
}

fn number(link: &Link, key: &RemoteKey) -> Result<u64> {
    Ok(u64::from_ne_bytes(link.pull(key, 0, 8)?.try_into().expect("8 bytes")))
}

/// Replaces pages, and compares the number in each new page with the number that a lookup reaches.
fn replaced_pages(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.cached);
    let mut own = map(1);
    me.steps(|round| {
        let at = Random(round).below(PAGES);
        let shared = page_of(load, at);
        let at_page = pointer(shared);
        // A region that the planted fault uses after its memory was replaced.
        let stale = load.plants(Plant::Stale).then(|| load.get(shared).expect("registered"));
        me.begin("the replacement of a page");
        let page = match round % 4 {
            0 => {
                map_at(at_page, 1, libc::MAP_FIXED);
                shared
            }
            1 => {
                // SAFETY: the worker's own page.
                let dropped = unsafe { libc::madvise(at_page, page_size(), libc::MADV_DONTNEED) };
                assert_eq!(dropped, 0);
                shared
            }
            2 => {
                let elsewhere = map_at(ptr::null_mut(), 1, 0);
                let (len, how) = (page_size(), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
                // SAFETY: the worker's own pages.
                assert_eq!(unsafe { libc::mremap(elsewhere, len, len, how, at_page) }, at_page);
                shared
            }
            _ => {
                unmap(own);
                own = map(1);
                own
            }
        };
        // SAFETY: the worker's own page, which only the NIC reads meanwhile.
        unsafe { pointer(page).cast::<u64>().write_volatile(round) };
        if page == shared {
            load.written[at].store(round, SeqCst);
        }
        me.begin("a lookup of a replaced page");
        let found = match stale {
            Some(region) if page == shared => number(&link, &region.view().key().expect("a key")),
            _ => looked_up(load, &link, page),
        };
        assert_eq!(found.expect("looked up"), round, "stale hit: the number in a replaced page");
        assert_eq!(looked_up(load, &link, page).expect("looked up"), round, "stale hit");
        me.passed(Check::Stale);
    });
}

/// Looks pages up while [`replaced_pages`] replaces them.
fn lookups(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.cached);
    let mut random = Random(2);
    me.steps(|_| {
        let at = random.below(PAGES);
        let before = load.written[at].load(SeqCst);
        me.begin("a lookup of a page that another thread replaces");
        // A new page is 0 until its number is written.
        let found = looked_up(load, &link, page_of(load, at)).expect("always mapped");
        assert!(found == 0 || found >= before, "stale hit: {found}, after {before} was written");
        me.passed(Check::Stale);
    });
}

fn allocate(load: &Load, len: usize, kind: AllocationKind) -> DeviceBuffer {
    let request = AllocRequest { len: len as u64, device: DeviceId(0), kind };
    DeviceBuffer::allocate(&load.iface, &request).expect("allocated")
}

/// Looks up device memory that is freed, and allocated again at the same addresses.
fn device_memory(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.cached);
    let kinds = [AllocationKind::Device, AllocationKind::Managed, AllocationKind::Virtual];
    let mut random = Random(3);
    me.steps(|round| {
        let len = (1 + random.below(4)) * page_size();
        me.begin("an allocation");
        let buffer = allocate(load, len, kinds[random.below(kinds.len())]);
        let bytes = pattern(round, len);
        buffer.write(0, &bytes).expect("written");
        me.begin("two lookups of device memory");
        for _ in 0..2 {
            let region = load.get(buffer.range()).expect("looked up");
            let key = region.view().key().expect("a key");
            let read = link.pull(&key, 0, len.min(SCRATCH)).expect("read");
            assert_bytes(&read, &bytes[..read.len()], "reused device memory (stale hit)");
        }
        me.passed(Check::Stale);
        me.begin("the end of an allocation");
    });
}

fn register<M: Memory>(load: &Load, memory: M, access: Access) -> Region<M> {
    let region = load.plain.register(memory, access).expect("registered");
    load.registered.opened.fetch_add(1, Relaxed);
    region
}

fn close<M: Memory>(load: &Load, region: Region<M>) -> M {
    let memory = region.close().map_err(|refused| refused.error).expect("closed");
    load.registered.closed.fetch_add(1, Relaxed);
    memory
}

/// Registers buffers of the heap and of the device, and moves bytes by writes, reads and messages.
fn registrations(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.plain);
    let mut random = Random(4);
    me.steps(|round| {
        let len = 1 + random.below(SCRATCH);
        let bytes = pattern(round, len);
        if load.plants(Plant::Leak) {
            std::mem::forget(File::open("/dev/null").expect("opened"));
        }
        if load.plants(Plant::Memory) {
            vec![1_u8; 512 << 10].leak();
        }
        if load.plants(Plant::Region) {
            std::mem::forget(register(load, vec![0_u8; len], REMOTE));
        }
        if load.plants(Plant::Hang) {
            me.begin("a wait for nothing");
            link.completion().expect("never");
        }
        let lost = load.plants(Plant::Lost);
        if round % 4 == 0 {
            let region = register(load, allocate(load, len, AllocationKind::Device), REMOTE);
            let key = region.key().expect("a key");
            me.begin("a transfer into device memory");
            link.push(&key, 0, &bytes).expect("written");
            assert_bytes(&link.pull(&key, 0, len).expect("read"), &bytes, "a device region");
            let buffer = close(load, region);
            let mut found = vec![0; len];
            buffer.read(0, &mut found).expect("read");
            assert_bytes(&found, &bytes, "a device buffer");
        } else {
            let region = register(load, vec![0_u8; len], REMOTE | Access::RECV);
            let key = region.key().expect("a key");
            if round % 4 == 1 {
                me.begin("a message");
                let into = region.slice(0, len as u64).expect("inside");
                link.target.receive(&[into], None, round).expect("posted");
                assert_eq!(link.send(&bytes).expect("sent"), len as u64);
            } else if !lost {
                me.begin("a write");
                link.push(&key, 0, &bytes).expect("written");
            }
            me.begin("a read");
            assert_bytes(&link.pull(&key, 0, len).expect("read"), &bytes, "a region");
            assert_bytes(&close(load, region), &bytes, "a closed region");
        }
        me.passed(Check::Bytes);
    });
}

/// Asserts that bytes are those expected, and otherwise names the first one that differs.
fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let at = differs.or((found.len() != expected.len()).then_some(found.len().min(expected.len())));
    assert!(at.is_none(), "wrong bytes of {what}, first at {at:?} of {}", expected.len());
}

/// Asserts that a key reaches nothing.
fn assert_ended(load: &Load, link: &Link, key: &RemoteKey, me: Me<'_>) {
    let refused = [link.pull(key, 0, 1).map(drop), link.push(key, 0, &[0xFF])];
    for error in refused.map(|moved| moved.expect_err("an ended key moved bytes")) {
        assert_eq!(error.kind(), load.seen(ErrorKind::InvalidKey), "{error}");
    }
    me.passed(Check::EndedKey);
}

/// Binds windows of types 1 and 2 to parts of a region.
fn windows(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.plain);
    let bytes = pattern(5, SCRATCH);
    let region = register(load, bytes.clone(), Access::MW_BIND | Access::READ | Access::WRITE);
    let mut random = Random(5);
    me.steps(|round| {
        let at = random.below(SCRATCH);
        let len = 1 + random.below(SCRATCH - at);
        let (offset, size) = (at as u64, len as u64);
        if round % 2 == 0 {
            me.begin("a bind of a type 1 window");
            let window = load.plain.alloc_type_1_window().expect("a window");
            let key = window.bind(&region, offset, size, REMOTE).expect("bound");
            assert_bytes(&link.pull(&key, 0, len).expect("read"), &bytes[at..at + len], "a window");
            window.unbind().expect("unbound");
            assert_ended(load, &link, &key, me);
        } else {
            me.begin("a bind of a type 2 window");
            let window = load.plain.alloc_type_2_window(Type2Kind::B).expect("a window");
            let bind = Type2Bind {
                region: &region,
                offset,
                len: size,
                access: REMOTE,
                addressing: load.addressing(),
                tag: round as u8,
            };
            let key = window.post_bind(&link.target, &bind, round).expect("posted");
            completion(&*link.target_cq).expect("bound");
            assert_bytes(&link.pull(&key, 0, len).expect("read"), &bytes[at..at + len], "a window");
            window.post_invalidate(&link.target, round).expect("posted");
            completion(&*link.target_cq).expect("invalidated");
            assert_ended(load, &link, &key, me);
        }
        me.passed(Check::Bytes);
    });
    close(load, region);
}

/// Grants parts of a region to a peer, and revokes them.
fn grants(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let link = load.link(&load.plain);
    let access = Access::MW_BIND | Access::READ | Access::WRITE;
    let region = register(load, vec![0_u8; SCRATCH], access);
    let mut random = Random(6);
    me.steps(|round| {
        let at = random.below(SCRATCH);
        let len = 1 + random.below(SCRATCH - at);
        let part = at as u64..(at + len) as u64;
        me.begin("a grant");
        let grant = region.grant(&link.target, part, REMOTE).expect("granted");
        let (key, bytes) = (grant.key().expect("a key"), pattern(round, len));
        link.push(&key, 0, &bytes).expect("written");
        let mut found = vec![0; len];
        region.read(at as u64, &mut found).expect("inside");
        assert_bytes(&found, &bytes, "a granted part");
        let outside = link.pull(&key, len as u64, 1).expect_err("outside the grant").kind();
        assert_eq!(outside, ErrorKind::OutOfBounds);
        me.begin("a revocation");
        grant.revoke().map_err(|refused| refused.error).expect("revoked");
        assert_ended(load, &link, &key, me);
        me.passed(Check::Bytes);
    });
    close(load, region);
}

/// A NIC and a device whose calls fail, apart from those of the other workers.
struct Faulty {
    nic: Faults,
    device: Arc<Simulated>,
    iface: Arc<dyn Iface>,
    hmem: Hmem,
    plain: Domain,
    /// A domain with asynchronous registrations.
    asynchronous: Domain,
    events: Arc<EventQueue>,
}

impl Faulty {
    fn open() -> Self {
        let nic = Faults::new();
        let loopback = Loopback::builder().faults(&nic).build().expect("a software NIC");
        let device = Arc::new(Simulated::builder().build().expect("a device"));
        let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .without_environment()
            .shared_iface(Arc::clone(&iface))
            .provider(loopback)
            .build()
            .expect("the ifaces start");
        let open = || hmem.domain("loopback", DomainAttr::default()).expect("a domain");
        let (plain, asynchronous, events) = (open(), open(), Arc::new(EventQueue::new()));
        asynchronous.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
        Self { nic, device, iface, hmem, plain, asynchronous, events }
    }

    fn domain(&self) -> Domain {
        self.hmem.domain("loopback", DomainAttr::default()).expect("a domain")
    }

    /// Makes a registration fail on the NIC and in the device's driver.
    fn failed_registrations(&self, me: Me<'_>) {
        let vector = || vec![1_u8; 64];
        self.nic.fail_next(NicCall::Register, Errno(12));
        let refused = self.plain.register(vector(), REMOTE).expect_err("an injected failure");
        assert_eq!(refused.error.kind(), Errno(12).kind(), "{refused}");
        assert_eq!(refused.value, vector(), "the buffer comes back");
        let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
        self.device.faults().fail_next(DeviceCall::CreateMemory, Errno(12));
        let refused = DeviceBuffer::allocate(&self.iface, &request).expect_err("injected");
        assert_eq!(refused.kind(), Errno(12).kind(), "{refused}");
        self.nic.fail_next(NicCall::Deregister, Errno(16));
        let region = self.plain.register(vector(), REMOTE).expect("registered");
        let refused = region.close().expect_err("an injected failure");
        assert_eq!(refused.error.kind(), Errno(16).kind(), "{refused}");
        assert_eq!(
            refused.value.close().map_err(|refused| refused.error).expect("closed"),
            vector()
        );
        me.passed(Check::Fault);
    }

    /// Makes a transfer fail, which then moves nothing.
    fn failed_transfer(&self, link: &Link, me: Me<'_>) {
        let region = self.plain.register(vec![7_u8; 64], REMOTE).expect("registered");
        let key = region.key().expect("a key");
        self.nic.fail_next(NicCall::Transfer, Errno(5));
        let error = link.push(&key, 0, &[9; 64]).expect_err("an injected failure");
        assert_eq!(error.kind(), Errno(5).kind(), "{error}");
        assert_eq!(link.pull(&key, 0, 64).expect("read"), [7; 64], "a failed write moved bytes");
        assert_eq!(region.close().map_err(|refused| refused.error).expect("closed"), [7; 64]);
        me.passed(Check::Fault);
    }

    /// Cancels an asynchronous registration that waits behind one that is held, and a receive.
    fn cancellations(&self, me: Me<'_>) {
        let gate = self.nic.hold(NicCall::Register);
        let held = self.asynchronous.register(vec![1_u8; 64], REMOTE).expect("submitted");
        gate.wait_held();
        let waiting = self.asynchronous.register(vec![2_u8; 64], REMOTE).expect("submitted");
        let ids = [held.id(), waiting.id()];
        assert_eq!(waiting.close().map_err(|refused| refused.error).expect("closed"), [2; 64]);
        drop(gate);
        for _ in 0..2 {
            let event = self.events.wait(Duration::MAX).expect("an event for each");
            let cancelled = Some(event.region) == ids[1];
            assert!(cancelled || Some(event.region) == ids[0], "an event of another region");
            let kind = event.result.err().map(|error| error.kind());
            assert_eq!(kind, cancelled.then_some(ErrorKind::Canceled));
        }
        assert_eq!(held.close().map_err(|refused| refused.error).expect("closed"), [1; 64]);

        let cq = self.plain.open_cq(8).expect("a queue");
        let endpoint = self.plain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let into = self.plain.register(vec![3_u8; 64], Access::RECV).expect("registered");
        endpoint.receive(&[into.slice(0, 64).expect("inside")], None, 1).expect("posted");
        endpoint.close().map_err(|refused| refused.error).expect("closed");
        let error = completion(&*cq).expect_err("a receive of a closed endpoint");
        assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
        assert_eq!(into.close().map_err(|refused| refused.error).expect("closed"), [3; 64]);
        me.passed(Check::Canceled);
    }
}

/// Injects faults, cancels requests, and forks children, which must not use the parent's NIC.
fn faults_and_forks(load: &Load, me: Me<'_>, _: Option<Pipes>) {
    let faulty = Faulty::open();
    let link = Link::open(faulty.domain(), &faulty.plain, &Registered::default());
    me.steps(|round| {
        me.begin("failed registrations");
        faulty.failed_registrations(me);
        me.begin("a failed transfer");
        faulty.failed_transfer(&link, me);
        me.begin("cancellations");
        faulty.cancellations(me);
        if round % 16 == 1 && !load.plants(Plant::Unchecked) {
            me.begin("a fork");
            fork(load);
            me.passed(Check::Fork);
        }
        let (live, device) = (faulty.plain.live(), faulty.device.stats());
        let regions = live.regions + faulty.asynchronous.live().regions;
        assert_eq!((regions, live.endpoints, device.live_allocations), (0, 1, 0), "left over");
    });
}

/// Forks a child, whose registrations and lookups must fail with BadState.
fn fork(load: &Load) {
    // SAFETY: the child runs the block and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let lookup = load.get(page_of(load, 0)).err().map(|error| error.kind());
        let plain = load.plain.register(vec![0_u8; 64], REMOTE).err();
        let plain = plain.map(|refused| refused.error.kind());
        let refused = [lookup, plain] == [Some(ErrorKind::BadState); 2];
        // SAFETY: `_exit` only ends the child.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    assert!(pid > 0, "fork failed");
    let mut status = 0;
    // SAFETY: waits for the child. The watchdog ends the process if the child hangs.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "child: {status:#x}");
}

/// The pipes to the second process.
pub(crate) struct Pipes {
    to: std::process::ChildStdin,
    from: BufReader<std::process::ChildStderr>,
}

/// Starts the second process. Its standard error carries its answers until it fails.
pub(crate) fn second(options: &Options) -> (Child, Pipes) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--soak", "--second", "--step-limit", &options.step_limit.as_secs().to_string()]);
    command.args(["--seconds", &options.duration.as_secs().to_string()]);
    command.args(options.rdma.then_some("--rdma"));
    let mut child =
        command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the second process");
    let to = child.stdin.take().expect("piped");
    let from = BufReader::new(child.stderr.take().expect("piped"));
    (child, Pipes { to, from })
}

/// Shares device memory between the two processes: each reads what the other one wrote.
fn other_process(load: &Load, me: Me<'_>, pipes: Option<Pipes>) {
    let link = load.link(&load.plain);
    match pipes {
        Some(pipes) => export(load, me, &link, pipes),
        None => import(load, me, &link),
    }
}

/// Moves `written` through the NIC into memory that must contain `expected`.
fn exchange(load: &Load, link: &Link, range: AddressRange, expected: &[u8], written: &[u8]) {
    // SAFETY: no Rust reference points into device memory, and the region is closed before the
    // memory is freed.
    let region = register(load, unsafe { Raw::new(range, Promise::ReadWrite) }, REMOTE);
    let key = region.key().expect("a key");
    let found = link.pull(&key, 0, expected.len()).expect("read");
    assert_bytes(&found, expected, "another process");
    link.push(&key, 0, written).expect("written");
    close(load, region);
}

fn export(load: &Load, me: Me<'_>, link: &Link, Pipes { mut to, mut from }: Pipes) {
    me.steps(|round| {
        let len = page_size();
        let buffer = allocate(load, len, AllocationKind::Device);
        buffer.write(0, &pattern(round, len)).expect("written");
        let handle = load.iface.ipc_export(buffer.allocation()).expect("exported");
        let hex: String = handle.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        me.begin("a wait for the second process");
        writeln!(to, "{round} {hex}").expect("the second process runs");
        let mut answer = String::new();
        from.read_line(&mut answer).expect("the second process runs");
        if answer.trim() != "done" {
            std::io::copy(&mut from, &mut std::io::stderr()).expect("its messages");
            panic!("the second process failed: {answer}");
        }
        me.begin("an exchange with the second process");
        exchange(load, link, buffer.range(), &pattern(!round, len), &[0]);
        me.passed(Check::OtherProcess);
    });
    // The end of the input stops the second process.
    drop(to);
    std::io::copy(&mut from, &mut std::io::stderr()).expect("its messages");
}

fn import(load: &Load, me: Me<'_>, link: &Link) {
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("the first process runs");
        let (round, hex) = line.split_once(' ').expect("two words");
        let round: u64 = round.parse().expect("a number");
        let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("hex"));
        let bytes = digits.map(|pair| u8::from_str_radix(pair, 16).expect("hex")).collect();
        me.step(|| {
            me.begin("an exchange with the first process");
            let handle = IpcHandle { iface: load.iface.kind(), bytes };
            let opened = load.iface.ipc_open(&handle).expect("opened");
            let len = page_size();
            exchange(load, link, opened.range, &pattern(round, len), &pattern(!round, len));
            // SAFETY: the region of the memory is closed.
            unsafe { load.iface.ipc_close(&opened) }.expect("closed");
            me.passed(Check::OtherProcess);
        });
        eprintln!("done");
    }
    load.shared.ended.store(true, Relaxed);
    // The link stays open until the last sample.
    while !load.shared.stops() {
        std::thread::sleep(Duration::from_millis(10));
    }
}
