//! MR-01 to MR-04, MR-12, MR-15: registrations that succeed, and those that are refused.

use hmem::{
    Access, Address, AddressRange, DeviceId, Domain, ErrorKind, IfaceKind, MemoryRegion, MrFlags,
    MrMode, Result,
    fabric::{self, MrAttr},
    loopback::RemapPolicy,
    os_page_sizes,
};

use crate::{
    child,
    config::{TestConfig, over_configs},
    machine,
    memory::pattern,
    net::{Net, REMOTE, Setup, bind_if_needed, mr_attr, raw, register},
};

over_configs! {
    /// MR-01
    reg_regv_and_regattr_register_a_range_alike: Every;
    /// MR-02
    every_subset_of_access_bits_registers_at_any_start: Pairwise;
    /// MR-02
    sizes_up_to_64_mib_register_and_are_reached_at_both_ends: DefaultMode;
    /// MR-03
    regv_accepts_the_limit_of_ranges_and_refuses_one_more: Pairwise;
    /// MR-04
    each_mistake_has_its_own_error_and_registers_nothing: Pairwise;
    /// MR-12
    each_flag_alone_is_honoured: Pairwise;
    /// MR-12
    unsupported_flag_is_refused_by_name: Single;
    /// MR-15
    page_sizes_of_the_system_register_and_others_are_refused: Pairwise;
}

/// A call that registers one range: `reg`, `regv` or `regattr`.
type Register<'a> = Box<dyn Fn(AddressRange) -> Result<MemoryRegion> + 'a>;

fn three_ways(domain: &Domain) -> [Register<'_>; 3] {
    const KEY: u64 = 7;
    let none = MrFlags::empty();
    [
        Box::new(move |range| fabric::reg(domain, raw(range), REMOTE, KEY, none)),
        Box::new(move |range| fabric::regv(domain, raw(&[range]), REMOTE, KEY, none)),
        Box::new(move |range| fabric::regattr(domain, &mr_attr(&[range], REMOTE).key(KEY), none)),
    ]
}

fn reg_regv_and_regattr_register_a_range_alike(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8192);
    let before = net.live();
    let mut lives = Vec::new();
    for (seed, register) in three_ways(&net.target.domain).into_iter().enumerate() {
        let region = register(memory.part(100, 5000)).expect("register");
        bind_if_needed(&net.target, &region).expect("bind and enable");
        assert_eq!(region.ranges(), [memory.part(100, 5000)]);
        assert_eq!(
            (region.range(), region.len(), region.access()),
            (memory.part(100, 5000), 5000, REMOTE)
        );
        let key = net.key(&region);
        assert_eq!(key.base(), region.base_addr());
        if !config.has(MrMode::PROV_KEY) && !config.has(MrMode::RAW) {
            assert_eq!(key.as_u64().unwrap(), 7);
        }
        let bytes = pattern(seed as u64, 5000);
        net.push(&key, 0, &bytes).expect("write");
        assert_eq!(memory.get(100, 5000), bytes);
        assert_eq!(net.pull(&key, 0, 5000).expect("read"), bytes);
        lives.push(net.live());
        region.close().expect("close");
        assert_eq!(net.live().regions, before.regions);
    }
    assert!(
        lives.iter().all(|live| live == &lives[0]),
        "the three calls hold different things: {lives:?}"
    );
}

fn every_subset_of_access_bits_registers_at_any_start(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64 << 10);
    let before = net.live();
    for bits in 0..1u64 << Access::all().iter().count() {
        let access: Access = Access::all()
            .iter()
            .enumerate()
            .filter(|(at, _)| bits >> at & 1 == 1)
            .map(|(_, bit)| bit)
            .collect();
        if access.contains(Access::MW_BIND) && !config.binds_windows() {
            continue;
        }
        for (start, len) in [(0, 1), (1, 1), (4095, 2), (63, 4097)] {
            let region = net.expose(memory.part(start, len), access);
            assert_eq!((region.access(), region.range()), (access, memory.part(start, len)));
            assert_eq!(net.live().regions, before.regions + 1);
            region.close().unwrap_or_else(|rejected| panic!("close with {access}: {rejected}"));
        }
    }
    assert_eq!(net.live(), before, "something stayed registered");
}

fn sizes_up_to_64_mib_register_and_are_reached_at_both_ends(config: &TestConfig) {
    // tests/this_machine.rs reports that a user may lock less.
    let largest = match config.pages {
        RemapPolicy::Pinned => (machine::lockable_memory() / 2).min(64 << 20),
        RemapPolicy::Follow => 64 << 20,
    };
    let net = Net::open(config);
    let memory = net.bytes(largest as usize + 4096);
    let before = net.live();
    for size in
        [1, 2, 63, 64, 4095, 4096, 4097, 65_535, (1 << 20) + 1, (2 << 20) - 1, 2 << 20, largest]
    {
        for start in [0, 1, 511] {
            let region = net.expose(memory.part(start, size), REMOTE);
            let key = net.key(&region);
            for at in [0, size - 1] {
                net.push(&key, at, &[0xA5]).expect("write");
                assert_eq!(
                    memory.get(start + at, 1),
                    [0xA5],
                    "{size} bytes from {start}: byte {at}"
                );
                memory.put(start + at, &[0]);
            }
            assert_eq!(
                net.push(&key, size, &[0xA5]).unwrap_err().kind(),
                net.seen(ErrorKind::OutOfBounds)
            );
            region.close().expect("close");
        }
    }
    assert_eq!(net.live(), before, "something stayed registered");
}

fn regv_accepts_the_limit_of_ranges_and_refuses_one_more(config: &TestConfig) {
    let net = Net::open(config);
    let limit = net.target.domain.provider_attr().mr_iov_limit;
    let memory = net.bytes((limit + 1) * 4096);
    let before = net.live();
    let ranges: Vec<_> = (0..=limit as u64).map(|at| memory.part(at * 4096 + at, 16)).collect();
    for count in 1..=limit {
        let region = net.expose_all(&ranges[..count], REMOTE);
        assert_eq!(region.len(), 16 * count as u64);
        region.close().expect("close");
    }
    let error = net.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooManyRanges);
    assert_eq!(error.context_value("mr_iov_limit"), Some(limit.to_string().as_str()));
    assert_eq!(net.live(), before);
}

fn each_mistake_has_its_own_error_and_registers_nothing(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8192);
    let good = [memory.part(0, 4096)];
    let empty = [memory.part(0, 4096), memory.part(4096, 0)];
    let before = net.live();
    let kind = |attr: &MrAttr<'_>, flags: MrFlags| {
        let error = net.try_expose(attr, flags).expect_err("a mistake was registered");
        assert_eq!(net.live(), before, "{error} left something");
        assert_eq!(error.operation(), "regattr");
        error.kind()
    };
    let plain = mr_attr(&good, REMOTE);
    let none = MrFlags::empty();
    assert_eq!(kind(&mr_attr(&empty[1..], REMOTE), none), ErrorKind::ZeroLength);
    assert_eq!(kind(&mr_attr(&empty, REMOTE), none), ErrorKind::ZeroLength);
    assert_eq!(kind(&mr_attr(&[], REMOTE), none), ErrorKind::ZeroLength);
    assert_eq!(kind(&MrAttr { offset: 1, ..plain }, none), ErrorKind::ReservedOffset);
    assert_eq!(kind(&MrAttr { hmem_data: 1, ..plain }, none), ErrorKind::ReservedHmemData);
    assert_eq!(kind(&plain, MrFlags::from_bits_retain(1)), ErrorKind::BadFlags);
    assert_eq!(kind(&plain, MrFlags::from_bits_retain(1 << 63)), ErrorKind::BadFlags);
    assert_eq!(kind(&mr_attr(&good, Access::from_bits_retain(1)), none), ErrorKind::BadAccess);
    assert_eq!(
        kind(&mr_attr(&good, REMOTE | Access::from_bits_retain(1 << 7)), none),
        ErrorKind::BadAccess
    );
    assert_eq!(
        kind(&plain, MrFlags::HMEM_DEVICE_ONLY | MrFlags::HMEM_HOST_ALLOC),
        ErrorKind::BadFlags
    );
    let flagged =
        if config.imports_dma_bufs() { ErrorKind::InvalidArgument } else { ErrorKind::BadFlags };
    assert_eq!(kind(&plain, MrFlags::MR_DMABUF), flagged);
    let wraps = AddressRange::new(Address(u64::MAX - 4), 6).unwrap_err();
    assert_eq!(wraps.kind(), ErrorKind::AddressWraps);
    assert!(
        AddressRange::new(Address(u64::MAX - 4), 5).is_ok(),
        "a range may end with the last byte of the address space"
    );
    net.expose(memory.part(0, 4096), REMOTE).close().expect("the next registration works");
}

/// MR-04
#[test]
fn exceeding_a_provider_limit_has_its_own_error() {
    let mut setup = Setup::of(&TestConfig::PLAIN);
    setup.provider = setup.provider.max_mr_size(4096).max_mr_count(2);
    let net = setup.open();
    let memory = net.bytes(8192);
    let error =
        net.try_expose(&mr_attr(&[memory.part(0, 4097)], REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(
        (error.kind(), error.context_value("max_mr_size")),
        (ErrorKind::TooLong, Some("4096"))
    );
    let halves = [memory.part(0, 4096), memory.part(4096, 1)];
    let error = net.try_expose(&mr_attr(&halves, REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLong, "the limit is for all ranges together");
    let regions = [0, 1].map(|at| net.expose(memory.part(at, 16), REMOTE));
    let error =
        net.try_expose(&mr_attr(&[memory.part(0, 1)], REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    assert_eq!(net.live().regions, 2);
    drop(regions);
    net.expose(memory.part(0, 1), REMOTE);
}

/// MR-04
#[test]
fn refused_registrations_leave_no_fd() {
    child::alone("mr::refused_registrations_leave_no_fd", || {
        let config = TestConfig {
            memory: crate::config::Memory::Device(hmem::system::FreeDetection::Identity),
            ..TestConfig::PLAIN
        };
        let net = Net::open(&config);
        let memory = net.bytes(8192);
        let taken = net.expose(memory.part(0, 4096), REMOTE);
        let key = taken.key().unwrap().as_u64().unwrap();
        let fds = child::open_fds();
        for _ in 0..100 {
            let ranges = [memory.part(0, 4096)];
            // The provider fails with NoKey after the memory was exported.
            let refused =
                register(&net.target, &mr_attr(&ranges, REMOTE).key(key), MrFlags::empty());
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoKey);
            net.expose(memory.part(1, 100), REMOTE).close().expect("close");
        }
        assert_eq!(child::open_fds(), fds);
        assert_eq!(
            net.device.as_ref().unwrap().stats().live_exports,
            0,
            "an export was not returned"
        );
    });
}

fn each_flag_alone_is_honoured(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(4096);
    let attr = [memory.range()];
    let attr = mr_attr(&attr, REMOTE);
    let persistent = net.try_expose(&attr, MrFlags::RMA_PMEM);
    if net.target.domain.provider_attr().flags.contains(MrFlags::RMA_PMEM) {
        net.assert_works(&net.key(&persistent.expect("RMA_PMEM")));
    } else {
        assert!(!config.is_loopback(), "the software NIC has the flag");
        let error = persistent.expect_err("a NIC without the flag");
        assert_eq!(error.kind(), ErrorKind::BadFlags, "{error}");
        assert_eq!(error.context_value("flags"), Some("RMA_PMEM"), "{error}");
    }
    let kind = |flags, attr: &MrAttr<'_>| {
        net.try_expose(attr, flags).map(|_| ()).map_err(|error| error.kind())
    };
    let device_only = if config.is_system() { Err(ErrorKind::InvalidArgument) } else { Ok(()) };
    assert_eq!(kind(MrFlags::HMEM_DEVICE_ONLY, &attr), device_only, "HMEM_DEVICE_ONLY");
    // HMEM_HOST_ALLOC requires memory from the host allocator of a device API. This memory comes
    // from elsewhere.
    assert_eq!(
        kind(MrFlags::HMEM_HOST_ALLOC, &attr),
        Err(ErrorKind::InvalidArgument),
        "HMEM_HOST_ALLOC"
    );
    // The access right COLLECTIVE combines with other rights, whether or not the mode COLLECTIVE is
    // in force.
    let collective =
        MrAttr { access: REMOTE | Access::COLLECTIVE | Access::SEND | Access::RECV, ..attr };
    let region = net.try_expose(&collective, MrFlags::empty()).expect("COLLECTIVE");
    assert!(region.access().contains(Access::COLLECTIVE));
    net.assert_works(&net.key(&region));
}

fn unsupported_flag_is_refused_by_name(config: &TestConfig) {
    let mut setup = Setup::of(config);
    setup.provider = setup.provider.flags(MrFlags::all() - MrFlags::RMA_PMEM);
    let net = setup.open();
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let error = net.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::RMA_PMEM).unwrap_err();
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::BadFlags, 260));
    assert_eq!(error.context_value("flags"), Some("RMA_PMEM"));
    assert_eq!(error.provider_name(), Some(&*net.target.domain.provider_attr().nic.to_string()));
}

/// MR-12
#[test]
fn device_of_host_alloc_and_iface_without_hmem_are_ignored() {
    let config = TestConfig {
        memory: crate::config::Memory::Device(hmem::system::FreeDetection::Identity),
        ..TestConfig::PLAIN
    };
    let net = Net::open(&config);
    let device =
        std::sync::Arc::clone(net.device.as_ref().unwrap()) as std::sync::Arc<dyn hmem::Iface>;
    let request = hmem::iface::AllocRequest {
        len: 4096,
        device: DeviceId(0),
        kind: hmem::AllocationKind::Host,
    };
    let host =
        hmem::DeviceBuffer::allocate(&device, &request).expect("host memory of the device API");
    let on_device = net.bytes(4096);
    let none = MrFlags::empty();
    let (host_range, device_range) = ([host.allocation().range], [on_device.range()]);
    let (host, on_device) = (mr_attr(&host_range, REMOTE), mr_attr(&device_range, REMOTE));
    let kind = Some(device.kind());

    let named = MrAttr { iface: kind, device: Some(DeviceId(77)), ..host };
    let region =
        net.try_expose(&named, MrFlags::HMEM_HOST_ALLOC).expect("HOST_ALLOC ignores the device");
    net.assert_works(&net.key(&region));
    assert_eq!(net.try_expose(&named, none).unwrap_err().kind(), ErrorKind::InvalidArgument);

    let right = MrAttr { iface: kind, device: Some(DeviceId(0)), ..on_device };
    let region = net.try_expose(&right, none).expect("the right iface and device");
    assert_eq!(region.iface().unwrap(), (device.kind(), Some(DeviceId(0))));
    for wrong in [
        MrAttr { iface: Some(IfaceKind::SYSTEM), ..on_device },
        MrAttr { iface: kind, device: Some(DeviceId(1)), ..on_device },
        MrAttr { iface: kind, device: Some(DeviceId(2)), ..on_device },
        MrAttr { iface: kind, ..mr_attr(&[AddressRange::of(&[0u8; 8])], REMOTE) },
    ] {
        let error = net.try_expose(&wrong, none).expect_err("a wrong owner was accepted");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert!(net.try_expose(&MrAttr { iface: Some(IfaceKind::CUDA), ..on_device }, none).is_err());

    let mut setup = Setup::of(&TestConfig::PLAIN);
    setup.target.hmem = false;
    let net = setup.open();
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let claimed = MrAttr {
        iface: Some(IfaceKind::CUDA),
        device: Some(DeviceId(9)),
        ..mr_attr(&ranges, REMOTE)
    };
    let region =
        net.try_expose(&claimed, none).expect("iface is ignored without the HMEM capability");
    assert_eq!(region.iface().unwrap().0, IfaceKind::SYSTEM);
}

/// MR-04
#[test]
fn freed_or_foreign_address_is_unknown_to_the_claimed_iface() {
    let config = TestConfig {
        memory: crate::config::Memory::Device(hmem::system::FreeDetection::Identity),
        ..TestConfig::PLAIN
    };
    let net = Net::open(&config);
    let device =
        std::sync::Arc::clone(net.device.as_ref().unwrap()) as std::sync::Arc<dyn hmem::Iface>;
    let request = hmem::iface::AllocRequest {
        len: 4096,
        device: DeviceId(0),
        kind: hmem::AllocationKind::Device,
    };
    let buffer = hmem::DeviceBuffer::allocate(&device, &request).expect("device memory");
    let live = buffer.allocation().range;
    let claimed = |iface, range| {
        let ranges = [range];
        let attr = MrAttr { iface: Some(iface), ..mr_attr(&ranges, REMOTE) };
        let error =
            net.try_expose(&attr, MrFlags::empty()).expect_err("a wrong owner was accepted");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        error.to_string()
    };
    assert!(claimed(IfaceKind::SYSTEM, live).contains("name the iface that owns the memory"));
    drop(buffer);
    for unknown in [live, AddressRange::of(&[0u8; 8])] {
        let text = claimed(device.kind(), unknown);
        assert!(text.contains("does not know the address") && text.contains("freed"), "{text}");
        assert!(!text.contains("name the iface that owns the memory"), "{text}");
    }
}

/// MR-12
#[test]
fn every_flag_is_covered() {
    // MR_DMABUF: MR-13. MR_SINGLE_USE: MR-14. RMA_EVENT: MODE-09 and EVT-02. The others: MR-12.
    let covered = MrFlags::MR_DMABUF
        | MrFlags::MR_SINGLE_USE
        | MrFlags::RMA_EVENT
        | MrFlags::RMA_PMEM
        | MrFlags::HMEM_DEVICE_ONLY
        | MrFlags::HMEM_HOST_ALLOC;
    assert_eq!(covered, MrFlags::all(), "a new flag needs a test");
}

fn page_sizes_of_the_system_register_and_others_are_refused(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8192);
    let ranges = [memory.part(5, 5000)];
    let attr = mr_attr(&ranges, REMOTE);
    let provider = &net.target.domain.provider_attr().page_sizes;
    let taken = os_page_sizes().iter().copied().filter(|size| provider.contains(size));
    for page_size in std::iter::once(0).chain(taken) {
        let region = net
            .try_expose(&MrAttr { page_size, ..attr }, MrFlags::empty())
            .expect("a page size of the system");
        assert_eq!(region.page_size(), page_size);
        net.assert_works(&net.key(&region));
    }
    let before = net.live();
    for page_size in [1, 4095, 4097, 8192, 3 << 20, usize::MAX] {
        let error = net.try_expose(&MrAttr { page_size, ..attr }, MrFlags::empty()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadPageSize);
        assert_eq!(error.context_value("page_size"), Some(page_size.to_string().as_str()));
    }
    assert_eq!(net.live(), before);
}
