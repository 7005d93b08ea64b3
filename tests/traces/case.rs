//! A test case of the golden traces, and the entry points through which it registers memory.

use std::{sync::Arc, time::Duration};

use hmem::{
    Access, Address, AddressRange, AllocationKind, Batch, BorrowedDmaBuf, CacheAttr, DeviceBuffer,
    DeviceId, DmaBuf, DmaBufOffset, Domain, DomainAttr, DomainBindFlags, Errno, Error, Iface,
    IfaceKind, MemoryRegion, MrFlags, Promise, Raw, Registry, Request, Result,
    cuda::sys::CuContext,
    event_queue::EventQueue,
    fabric::{self, MrAttr, MrMemory},
    iface::AllocRequest,
    loopback::{self, Faults, Loopback},
    p2p::path::{DefaultPathSelector, ExplainRequest, FactSource, Facts, cause},
    path::{P2pPolicy, Trace},
    provider::{Imports, Nic},
    system::{DeviceCall, DmaBufKind, Simulated, SimulatedBuilder, System},
};
use tracing::{Event, Metadata, Subscriber, span};

use crate::{
    fake::{Driver, Profile},
    listing::{self, Names, Outcome, Section, Twice},
    segments::Segments,
};

pub(crate) const PAGE: u64 = 4096;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// A source of facts about the machine that returns those of the test case.
#[derive(Debug)]
struct FixedFacts(Facts);

impl FactSource for FixedFacts {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        self.0.clone()
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

/// The device whose iface is registered in addition to host memory.
#[derive(Clone)]
pub(crate) enum Device {
    Simulated(fn(SimulatedBuilder) -> SimulatedBuilder),
    Fake(Profile),
}

/// The memory that a test case registers.
#[derive(Clone, Copy)]
pub(crate) enum Memory {
    /// A whole allocation of the device.
    Of(AllocationKind),
    /// An allocation that the simulated device does not export.
    NotExportable(AllocationKind),
    /// Two allocations of the device, registered as one region.
    Two(AllocationKind),
    /// A part of a registered allocation, registered as a sub-region.
    Part(AllocationKind),
    /// An allocation that was freed before the registration.
    Freed,
    /// A range that begins inside an allocation and ends after it.
    PastTheEnd,
    /// Device memory of this length, allocated by the application through the driver itself.
    Application(u64),
    /// A CUDA VMM reservation with several memory handles. Each element is true if the handle was
    /// created for RDMA.
    Handles(&'static [bool]),
    /// CUDA memory in a context of the application, which the driver no longer knows after the
    /// query for its owner. For such memory the iface checks that the context still lives.
    FreedAfterQuery,
    /// A range inside 8 pages of the application's host memory.
    Host { offset: u64, len: u64 },
    /// Two ranges of host memory, registered as one region.
    HostTwice,
    /// A range of host memory and an allocation of the device, registered as one region.
    Mixed,
    /// A memory file that the application passes as a dma-buf.
    File,
}

/// A test case: memory to register, the NIC's abilities, a policy and injected refusals.
#[derive(Clone)]
pub(crate) struct Case {
    /// Text that distinguishes the test case from others with the same memory, imports and policy.
    pub(crate) what: String,
    pub(crate) device: Device,
    pub(crate) memory: Memory,
    pub(crate) len: u64,
    pub(crate) imports: Imports,
    pub(crate) policy: P2pPolicy,
    pub(crate) p2p_off: bool,
    pub(crate) facts: Facts,
    pub(crate) nics: &'static [&'static str],
    /// Iface that the caller names as the owner of the memory, if any.
    pub(crate) claim: Option<IfaceKind>,
    /// Fault of the simulated device: the call that fails, which of its calls fails (1 is the
    /// first), and the errno.
    pub(crate) device_refuses: Option<(DeviceCall, u64, i32)>,
    /// Fault of a fake driver: the function that fails, which of its calls fails (1 is the first, 0
    /// every call), and the error code.
    pub(crate) driver_refuses: Option<(&'static str, u64, u32)>,
    /// Errnos with which the NIC refuses its first registrations, in order.
    pub(crate) nic_refuses: Vec<i32>,
}

/// An entry point of the library that registers memory.
#[derive(Clone, Copy, PartialEq)]
enum EntryPoint {
    Regattr,
    Traced,
    Asynchronous,
    /// One batch for all NICs. Parts of a region cannot be in a batch: they go through `regattr`.
    Batch,
    /// A miss of the registration cache. Host memory is not cached here: its registration ends with
    /// the caller's lease.
    Cached,
}

/// The ifaces, the software NICs and the device of one test case. Fields are dropped in order, the
/// driver last.
struct Fixture {
    simulated: Option<Arc<Simulated>>,
    device: Arc<dyn Iface>,
    registry: Arc<Registry>,
    paths: Arc<DefaultPathSelector>,
    provider: Loopback,
    faults: Faults,
    driver: Option<Driver>,
}

impl Case {
    /// Formats the test case as one line, without its policy.
    pub(crate) fn subject(&self) -> String {
        let kind = |kind: AllocationKind| kind.name();
        let memory = match self.memory {
            Memory::Of(of) => format!("{} memory", kind(of)),
            Memory::NotExportable(of) => format!("{} memory, not exportable", kind(of)),
            Memory::Two(of) => format!("two ranges of {} memory", kind(of)),
            Memory::Part(of) => format!("sub-region of {} memory", kind(of)),
            Memory::Freed => "freed device memory".into(),
            Memory::PastTheEnd => "more than an allocation".into(),
            Memory::Application(len) => format!("{len} bytes of the application's device memory"),
            Memory::Handles(capable) => format!("handles, for RDMA: {capable:?}"),
            Memory::FreedAfterQuery => "device memory, freed after a query".into(),
            Memory::Host { offset, len } => format!("{len} bytes of host memory at {offset}"),
            Memory::HostTwice => "two ranges of host memory".into(),
            Memory::Mixed => "host memory and device memory".into(),
            Memory::File => "dma-buf of the application".into(),
        };
        let imports = [
            (self.imports.dma_buf, "dma-buf"),
            (self.imports.pcie_mapping_first == Some(true), "PCIe first"),
            (self.imports.peer_memory, "peer memory"),
            (self.imports.staged, "staged"),
        ];
        let imports: Vec<_> = imports.iter().filter(|(has, _)| *has).map(|(_, n)| *n).collect();
        let device = match &self.device {
            Device::Simulated(_) => "simulated".into(),
            Device::Fake(profile) => profile.name(),
        };
        let what = if self.what.is_empty() { String::new() } else { format!(" | {}", self.what) };
        let imports = if imports.is_empty() { "nothing".into() } else { imports.join(", ") };
        format!("{device} | {memory} | NIC imports {imports}{what}")
    }

    /// Runs the test case through every entry point, and returns the lines of its trace.
    pub(crate) fn play(&self) -> Vec<String> {
        let plain = self.through(EntryPoint::Regattr);
        let mut section = Section::default();
        section.add_twice(&plain);
        for (name, entry) in [
            ("traced", EntryPoint::Traced),
            ("asynchronous", EntryPoint::Asynchronous),
            ("batch", EntryPoint::Batch),
            ("cached", EntryPoint::Cached),
        ] {
            let other = self.through(entry);
            if other != plain {
                section.lines.push(format!("- {name}"));
                section.add_twice(&other);
            }
        }
        if let (Memory::Of(kind), None, [nic]) = (self.memory, self.claim, self.nics) {
            let (explained, first) = (self.explained(kind, nic), &plain.0[0]);
            let of_path = |head: &str| head.split(' ').next().map(str::to_owned);
            if of_path(&explained.head) != of_path(&first.head)
                || explained.attempts != first.attempts
            {
                section.lines.push("- explain".into());
                section.add(&explained);
            }
        }
        section.lines
    }

    fn fixture(&self) -> Fixture {
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        let (mut simulated, mut driver) = (None, None);
        let device: Arc<dyn Iface> = match &self.device {
            Device::Simulated(build) => {
                let builder =
                    Simulated::builder().window(64 << 20).arena(1 << 20).dma_buf(DmaBufKind::MemFd);
                let device = Arc::new(build(builder).build().expect("a simulated device"));
                simulated = Some(Arc::clone(&device));
                device
            }
            Device::Fake(profile) => {
                let (device, started) = profile.start();
                driver = Some(started);
                device
            }
        };
        registry.add(Arc::clone(&device)).expect("its kind is free");
        let paths = DefaultPathSelector::new().disable_p2p(self.p2p_off);
        let faults = Faults::new();
        let builder = self.nics.iter().fold(Loopback::builder(), |all, name| all.nic(*name));
        Fixture {
            simulated,
            device,
            registry: Arc::new(registry),
            paths: Arc::new(paths.facts(Arc::new(FixedFacts(self.facts.clone())))),
            provider: builder.imports(self.imports).faults(&faults).build().expect("a fabric"),
            faults,
            driver,
        }
    }

    /// Registers the memory twice through an entry point. Returns the outcomes of both.
    fn through(&self, entry: EntryPoint) -> Twice {
        let fixture = self.fixture();
        let events = Arc::new(EventQueue::new());
        let open = |nic: &&str| {
            let attr = DomainAttr {
                nic: Some((*nic).to_owned()),
                p2p: self.policy,
                cache: (entry == EntryPoint::Cached)
                    .then(|| CacheAttr::default().without_monitors(vec![IfaceKind::SYSTEM])),
                ..DomainAttr::default()
            };
            let domain = Domain::open(
                &fixture.provider,
                Arc::clone(&fixture.registry),
                Arc::clone(&fixture.paths) as _,
                attr,
            )
            .expect("a domain");
            if entry == EntryPoint::Asynchronous {
                domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
            }
            domain
        };
        let domains: Vec<_> = self.nics.iter().map(open).collect();
        let play =
            Play { case: self, fixture: &fixture, domains: &domains, entry, events: &events };
        let outcomes = if entry == EntryPoint::Traced {
            tracing::subscriber::with_default(Listening, || play.of_memory())
        } else {
            play.of_memory()
        };
        assert!(domains.iter().all(|domain| domain.live().regions == 0), "{}", self.subject());
        outcomes
    }

    fn explained(&self, kind: AllocationKind, nic: &str) -> Outcome {
        let fixture = self.fixture();
        let request = ExplainRequest::new(fixture.device.kind())
            .kind(kind)
            .size(self.len)
            .nic(nic.to_owned())
            .policy(self.policy);
        self.refuse(&fixture);
        // `explain` allocates memory itself, so the address of that memory has no name here.
        let names = Names::new();
        match fixture.paths.explain(&fixture.registry, &fixture.provider, &request) {
            Ok(explanation) => {
                let attempts = listing::attempts(&explanation.attempts, &names);
                let attempts = attempts.iter().map(|line| line.replace("elsewhere", "memory"));
                let path = explanation.path.map_or("refused:", |path| path.name());
                Outcome {
                    head: format!("{path} {}", explanation.reason),
                    remembered: false,
                    attempts: attempts.collect(),
                }
            }
            Err(error) => Outcome::failed(&error, &names),
        }
    }

    /// Injects the faults of the test case.
    fn refuse(&self, fixture: &Fixture) {
        if let (Some((call, nth, code)), Some(device)) = (self.device_refuses, &fixture.simulated) {
            device.faults().fail_nth(call, nth, Errno(code));
        }
        if let (Some((symbol, nth, code)), Some(driver)) = (self.driver_refuses, &fixture.driver) {
            driver.fail_nth(symbol, nth, code);
        }
        for (at, code) in self.nic_refuses.iter().enumerate() {
            fixture.faults.fail_nth(loopback::NicCall::Register, at as u64 + 1, Errno(*code));
        }
    }
}

/// State of one run of a test case through one entry point.
struct Play<'a> {
    case: &'a Case,
    fixture: &'a Fixture,
    domains: &'a [Domain],
    entry: EntryPoint,
    events: &'a Arc<EventQueue>,
}

impl Play<'_> {
    fn allocate(&self, kind: AllocationKind) -> (AddressRange, DeviceBuffer) {
        let request = AllocRequest { len: self.case.len, device: DeviceId(0), kind };
        let buffer = DeviceBuffer::allocate(&self.fixture.device, &request).expect("memory");
        (buffer.allocation().range, buffer)
    }

    fn attr<'a>(&self, memory: impl Into<MrMemory<'a>>) -> MrAttr<'a> {
        MrAttr { iface: self.case.claim, ..MrAttr::new(memory, REMOTE) }
    }

    /// Allocates the memory of the test case and registers it twice. Returns the outcomes of both.
    fn of_memory(&self) -> Twice {
        let twice =
            |names: Names, ranges: &[AddressRange]| self.twice(&names, &self.attr(raw(ranges)));
        let host = vec![1u8; 9 * PAGE as usize];
        let start = Address::of_ptr(host.as_ptr()).0.next_multiple_of(PAGE);
        let host = AddressRange::new(Address(start), 8 * PAGE).expect("a range");
        match self.case.memory {
            Memory::Of(kind) => {
                let (memory, _buffer) = self.allocate(kind);
                twice(vec![("memory", memory)], &[memory])
            }
            Memory::NotExportable(kind) => {
                let (memory, _buffer) = self.allocate(kind);
                let simulated = self.fixture.simulated.as_ref().expect("the simulated device's");
                let last = Address(memory.start().0 + memory.len() - 1);
                simulated.set_exportable(last, false).expect("a live allocation");
                twice(vec![("memory", memory)], &[memory])
            }
            Memory::Two(kind) => {
                let ((memory, _buffer), (second, _other)) =
                    (self.allocate(kind), self.allocate(kind));
                twice(vec![("memory", memory), ("second", second)], &[memory, second])
            }
            Memory::Part(kind) => {
                let (memory, _buffer) = self.allocate(kind);
                let whole = [memory];
                let names = vec![("memory", memory)];
                let base = match self.register(&self.domains[0], &self.attr(raw(&whole[..]))) {
                    Ok(base) => base,
                    Err(error) => return (vec![Outcome::failed(&error, &names)], Vec::new()),
                };
                let part = memory.slice(64, 64).expect("inside");
                self.twice(&names, &self.attr((&base, part)))
            }
            Memory::Freed => {
                let (memory, buffer) = self.allocate(AllocationKind::Device);
                drop(buffer);
                twice(vec![("memory", memory)], &[memory])
            }
            Memory::PastTheEnd => {
                let (memory, _buffer) = self.allocate(AllocationKind::Device);
                let longer = AddressRange::new(memory.start(), 2 * memory.len()).expect("a range");
                twice(vec![("memory", longer)], &[longer])
            }
            Memory::Application(len) => {
                let driver = self.fixture.driver.as_ref().expect("a fake driver");
                let base = Address(driver.allocate(len as usize));
                let memory = AddressRange::new(base, len).expect("a range");
                twice(vec![("memory", memory)], &[memory])
            }
            Memory::Handles(capable) => {
                let Some(Driver::Cuda(functions, _)) = &self.fixture.driver else {
                    unreachable!("CUDA's memory")
                };
                let segments = Segments::new(functions, capable);
                let whole = segments.range(0, capable.len() as u64 * segments.step);
                twice(vec![("memory", whole)], &[whole])
            }
            Memory::FreedAfterQuery => {
                let Some(Driver::Cuda(functions, fake)) = &self.fixture.driver else {
                    unreachable!("CUDA's memory")
                };
                let (mut own, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
                // SAFETY: the outputs are writable, and device 0 exists.
                let codes = unsafe {
                    [
                        hmem_fake_cuda::cuCtxCreate_v2(&mut own, 0, 0),
                        (functions.mem_alloc())(&mut pointer, self.case.len as usize),
                        (functions.ctx_pop_current())(&mut popped),
                    ]
                };
                assert!(codes.iter().all(|code| code.is_success()), "{codes:?}");
                fake.forget_after(pointer, 1);
                let memory = AddressRange::new(Address(pointer), self.case.len).expect("a range");
                twice(vec![("memory", memory)], &[memory])
            }
            Memory::Host { offset, len } => {
                twice(vec![("host", host)], &[host.slice(offset, len).expect("inside")])
            }
            Memory::HostTwice => {
                let part = |at| host.slice(at, PAGE + 7).expect("inside");
                twice(vec![("host", host)], &[part(0), part(4 * PAGE)])
            }
            Memory::Mixed => {
                let (memory, _buffer) = self.allocate(AllocationKind::Device);
                let part = host.slice(0, PAGE).expect("inside");
                twice(vec![("host", host), ("memory", memory)], &[part, memory])
            }
            Memory::File => {
                let flags = rustix::fs::MemfdFlags::CLOEXEC;
                let file = rustix::fs::memfd_create("traces", flags).expect("a memory file");
                rustix::fs::ftruncate(&file, 4 * PAGE).expect("a length");
                let (offset, len) = (DmaBufOffset(PAGE), 2 * PAGE);
                let file = DmaBuf { fd: file, offset, len, base_addr: None };
                self.twice(&Names::new(), &self.attr(raw(file.borrow())))
            }
        }
    }

    fn twice(&self, names: &Names, attr: &MrAttr<'_>) -> Twice {
        self.case.refuse(self.fixture);
        (self.outcomes(names, attr), self.outcomes(names, attr))
    }

    /// Registers the memory of a request with every NIC. Returns the outcomes, or one outcome if
    /// the entry point is a batch that was refused.
    fn outcomes(&self, names: &Names, attr: &MrAttr<'_>) -> Vec<Outcome> {
        match (self.entry, attr.memory) {
            (EntryPoint::Cached, MrMemory::Ranges(memory))
                if attr.iface.is_none() && memory.at().len() == 1 =>
            {
                let cached = |domain| self.cached(domain, memory.at()[0], names);
                return self.domains.iter().map(cached).collect();
            }
            (EntryPoint::Batch, MrMemory::Ranges(memory)) => {
                return self.batch(raw(Box::from(*memory.at())), names);
            }
            (EntryPoint::Batch, MrMemory::DmaBuf(memory)) => {
                let BorrowedDmaBuf { fd, offset, len, base_addr } = *memory.at();
                let fd = fd.try_clone_to_owned().expect("a descriptor");
                return self.batch(raw(DmaBuf { fd, offset, len, base_addr }), names);
            }
            _ => {}
        }
        let one = |domain| match self.register(domain, attr) {
            Ok(region) => {
                let outcome = self.decided(&region, names);
                region.close().map_err(Error::from).expect("nothing depends on it");
                outcome
            }
            Err(error) => self.failed(&error, names),
        };
        self.domains.iter().map(one).collect()
    }

    fn decided(&self, region: &MemoryRegion, names: &Names) -> Outcome {
        let decision = region.decision().expect("registered");
        self.assert_causes(&decision.attempts);
        Outcome::decided(decision, self.case.policy, names)
    }

    fn failed(&self, error: &Error, names: &Names) -> Outcome {
        self.assert_causes(error.trace());
        Outcome::failed(error, names)
    }

    /// Asserts that each cause in a trace has the text of the iface's own list, or else of the
    /// general list, possibly with figures after it. The listing has only the name of a cause and
    /// its remedy.
    fn assert_causes(&self, trace: &Trace) {
        for attempt in trace.iter() {
            let Some(name) = attempt.cause_name else { continue };
            let rows = self.fixture.device.causes().iter().chain(cause::CAUSES);
            let row = rows.clone().find(|row| row.name == name);
            let row = row.unwrap_or_else(|| panic!("no cause {name}"));
            let cause = attempt.cause.as_deref().expect("a named cause has a text");
            assert!(cause.starts_with(row.cause), "{name}: {cause}");
            let (text, remedy) = (attempt.to_string(), attempt.remedy.as_deref());
            assert!(text.contains(cause) && text.contains(remedy.expect("a remedy")), "{text}");
        }
    }

    fn cached(&self, domain: &Domain, range: AddressRange, names: &Names) -> Outcome {
        let cache = domain.cache().expect("a cache");
        let outcome = match cache.get(raw(range), REMOTE) {
            Ok(lease) => self.decided(&lease, names),
            Err(error) => self.failed(&error, names),
        };
        cache.evict_idle();
        outcome
    }

    fn batch<M: hmem::Memory>(&self, memory: M, names: &Names) -> Vec<Outcome> {
        let domains: Vec<_> = self.domains.iter().collect();
        let request = Request::new(memory, REMOTE);
        let request = match self.case.claim {
            Some(iface) => request.owner(iface, None),
            None => request,
        };
        match Batch::on(&domains).add(request).register() {
            Ok(all) => {
                let outcomes =
                    all.regions().iter().map(|region| self.decided(region, names)).collect();
                all.close().map_err(Error::from).expect("nothing depends on them");
                outcomes
            }
            Err(rejected) => vec![self.failed(&rejected.error, names)],
        }
    }

    fn register(&self, domain: &Domain, attr: &MrAttr<'_>) -> Result<MemoryRegion> {
        let flags = match attr.memory {
            MrMemory::DmaBuf(_) => MrFlags::MR_DMABUF,
            _ => MrFlags::empty(),
        };
        let region = fabric::regattr(domain, attr, flags)?;
        if self.entry == EntryPoint::Asynchronous {
            let event = self.events.wait(Duration::from_secs(60)).expect("an event");
            event.result?;
        }
        Ok(region)
    }
}

/// Returns memory of a test case.
fn raw<A>(at: A) -> Raw<A> {
    // SAFETY: a test case frees no memory after it was registered and before its regions and the
    // cached ones are gone. Nothing refers to the memory.
    unsafe { Raw::new(at, Promise::ReadWrite) }
}

impl Default for Case {
    fn default() -> Self {
        Self {
            what: String::new(),
            device: Device::Simulated(|builder| builder),
            memory: Memory::Of(AllocationKind::Device),
            len: 2 * PAGE,
            imports: Imports {
                dma_buf: true,
                pcie_mapping_first: Some(false),
                data_direct: None,
                peer_memory: false,
                staged: true,
            },
            policy: P2pPolicy::Enabled,
            p2p_off: false,
            facts: Facts::default(),
            nics: &["loop0"],
            claim: None,
            device_refuses: None,
            driver_refuses: None,
            nic_refuses: Vec::new(),
        }
    }
}
