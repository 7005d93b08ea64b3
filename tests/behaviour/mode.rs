//! MODE-01 to MODE-13: requirements of each mr_mode bit, and the behaviour without it.

use std::sync::Arc;

use hmem::{
    Access, AddressRange, Addressing, DomainAttr, ErrorKind, Hmem, Iova, MrFlags, MrMode,
    RegionState, RemoteKey, fabric,
    loopback::{Loopback, NicCall},
    transfer::Operation,
};

use crate::{
    config::{EVERY_BIT, Need, TestConfig, need, needs, over_configs},
    memory::{Bytes, HostPages, pattern},
    net::{
        LOCAL, LOOPBACK, Local, Net, REMOTE, Side, mr_attr, open_endpoint, provider_name, remote,
        segment, wait_held,
    },
};

over_configs! {
    /// MODE-01
    ///
    /// An offer that lacks a needed bit, or that has an unknown bit, is refused.
    the_mode_in_force_is_the_negotiated_one: Pairwise;
    /// MODE-02
    absent_pages_register_and_fail_only_the_transfer: Pairwise,
        needs::SYSTEM, needs::FOLLOW, DEFAULT_RULES;
    /// MODE-02
    peers_address_from_0_with_the_requested_key: Pairwise, DEFAULT_RULES;
    /// MODE-03
    ///
    /// Without LOCAL the descriptor may be absent, except for device memory in HMEM mode. An
    /// invalid descriptor is refused in every mode.
    local_buffers_need_a_descriptor_of_a_live_region: Pairwise;
    /// MODE-04
    raw_keys_work_only_after_mapping: Pairwise,
        need("modes without RAW", "KEY-04 shows that raw keys work there too",
            |config| config.has(MrMode::RAW));
    /// MODE-05
    peers_use_the_targets_addresses_for_every_range: Pairwise,
        need("modes without VIRT_ADDR", "peers address from 0 there: MODE-02 and MR-03 show it",
            TestConfig::virtual_addresses);
    /// MODE-06
    ///
    /// A range of read-only pages is refused too if peers shall write it.
    a_range_without_pages_is_refused: Pairwise, needs::SYSTEM,
        need("modes without ALLOCATED", "pages may appear later there: MODE-02 shows it", |config| {
            config.has(MrMode::ALLOCATED)
        });
    /// MODE-07
    the_requested_key_is_ignored: Pairwise, needs::KEYS_AT_HAND,
        need("modes without PROV_KEY", "the requested key is the key there: MODE-02 shows it",
            |config| {
            config.has(MrMode::PROV_KEY)
        });
    /// MODE-08
    peers_reach_only_refreshed_pages: Pairwise, needs::SYSTEM, needs::FOLLOW, MMU_NOTIFY;
    /// MODE-08
    peers_fail_during_a_refresh: Pairwise, needs::SYSTEM, MMU_NOTIFY;
    /// MODE-09
    counters_are_bound_before_the_region_is_enabled: Pairwise,
        need("modes without RMA_EVENT", "RMA_EVENT requires this order (EVT-02 shows it in \
            ENDPOINT mode)", |config| {
            config.has(MrMode::RMA_EVENT)
        });
    /// MODE-10
    regions_are_reached_through_their_endpoint_only: Pairwise,
        need("modes without ENDPOINT", "binding to an endpoint is refused there",
            |config| config.has(MrMode::ENDPOINT));
    /// MODE-10
    other_modes_do_not_bind_to_endpoints: EveryMode, needs::NO_ENDPOINT;
    /// MODE-11
    ///
    /// In LOCAL and HMEM mode device buffers need a descriptor. In other modes the library detects
    /// their iface.
    device_buffers_need_a_descriptor_or_are_detected: Pairwise, needs::DEVICE;
    /// MODE-12
    buffers_of_a_broadcast_need_the_collective_right: Pairwise,
        need("verbs", "verbs has no collectives", TestConfig::is_loopback);
}

const DEFAULT_RULES: Need =
    need("other modes", "another mr_mode bit changes the rule", |config| config.bits().is_empty());
const MMU_NOTIFY: Need = need("modes without MMU_NOTIFY", "no refresh is needed", |config| {
    config.has(MrMode::MMU_NOTIFY)
});

fn the_mode_in_force_is_the_negotiated_one(config: &TestConfig) {
    let net = Net::open(config);
    let (offered, provider) = (config.mode.offered, provider_name(config));
    let kept =
        if offered.intersects(MrMode::BASIC | MrMode::SCALABLE) { offered } else { config.bits() };
    assert_eq!(net.target.domain.mr_mode(), kept);
    for bit in config.bits().iter() {
        let attr = DomainAttr { mr_mode: EVERY_BIT - bit, ..DomainAttr::default() };
        let error = net.hmem.domain(provider, attr).expect_err("a needed bit was not offered");
        assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::ModeMismatch, 61));
        assert_eq!(error.context_value("bits"), Some(bit.to_string().as_str()), "{error}");
    }
    let unknown = DomainAttr {
        mr_mode: EVERY_BIT | MrMode::from_bits_retain(1 << 30),
        ..DomainAttr::default()
    };
    assert_eq!(net.hmem.domain(provider, unknown).unwrap_err().kind(), ErrorKind::ModeMismatch);
}

fn absent_pages_register_and_fail_only_the_transfer(config: &TestConfig) {
    let net = Net::open(config);
    let pages = HostPages::reserved(16384);
    let region = net.expose(pages.range(), REMOTE);
    let key = net.key(&region);
    for offset in [0, 4095, 16383] {
        assert_eq!(net.push(&key, offset, &[1]).unwrap_err().kind(), ErrorKind::BadAddress);
        assert_eq!(net.pull(&key, offset, 1).unwrap_err().kind(), ErrorKind::BadAddress);
    }
    // After the addresses get pages, the region reaches them.
    pages.replace_pages();
    net.push(&key, 4000, &pattern(1, 500)).expect("write");
    let memory = Bytes::Host(pages);
    assert_eq!(memory.get(4000, 500), pattern(1, 500));
    memory.pages().make_read_only();
    assert_eq!(net.push(&key, 0, &[1]).unwrap_err().kind(), ErrorKind::BadAddress);
    assert_eq!(net.pull(&key, 4000, 500).expect("read"), pattern(1, 500));
    memory.pages().remove_pages();
    assert_eq!(net.pull(&key, 4000, 1).unwrap_err().kind(), ErrorKind::BadAddress);
    // Addresses without pages can be registered too, even those that never have pages: the upper
    // half of the address space.
    let wild = AddressRange::new(hmem::Address(u64::MAX - 4095), 4096).expect("range");
    let region = net.expose(wild, REMOTE);
    assert_eq!(net.pull(&net.key(&region), 0, 16).unwrap_err().kind(), ErrorKind::BadAddress);
}

fn peers_address_from_0_with_the_requested_key(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(4096);
    for requested in [1, 0, 0xFFFF_FFFE, 42] {
        let ranges = [memory.part(100, 50)];
        let attr = mr_attr(&ranges, REMOTE).key(requested);
        let region = net.target.register(&attr, MrFlags::empty()).expect("register");
        let key = region.key().expect("key");
        assert_eq!(
            (key.as_u64().unwrap(), key.base(), key.addressing()),
            (requested, Iova(0), Addressing::ZeroBased)
        );
        // A peer needs only a key number that both sides agreed on.
        let agreed = RemoteKey::new(Addressing::ZeroBased, Iova(0), 50, requested);
        net.push(&agreed, 7, b"well known").expect("write");
        assert_eq!(memory.get(107, 10), b"well known");
        region.close().expect("close");
    }
}

fn local_buffers_need_a_descriptor_of_a_live_region(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE | LOCAL);
    let key = net.key(&region);
    let to = [remote(&key, 0, 64)];
    let local = net.local(64, LOCAL);
    local.bytes.put(0, &pattern(3, 64));
    let write = |desc| {
        let moved =
            net.transfer(Operation::Write { remote: &to }, &[segment(local.bytes.range(), desc)]);
        moved.map_err(|error| error.kind())
    };
    assert_eq!(write(Some(local.region.desc().unwrap())), Ok(64), "a valid descriptor");
    let needed = config.has(MrMode::LOCAL) || (config.has(MrMode::HMEM) && !config.is_system());
    assert_eq!(
        write(None),
        if needed { Err(ErrorKind::NoRegion) } else { Ok(64) },
        "no descriptor"
    );
    let before = memory.all();
    local.bytes.put(0, &[0xEE; 64]);
    assert_eq!(
        write(Some(region.desc().unwrap())),
        Err(ErrorKind::NoRegion),
        "the other domain's descriptor"
    );
    assert_eq!(
        write(Some(hmem::LocalKey::from_provider(0x1234_5678_9ABC))),
        Err(ErrorKind::NoRegion),
        "a forged descriptor"
    );
    let Local { region: stale, bytes } = net.local(64, LOCAL);
    let desc = stale.desc().unwrap();
    stale.close().expect("close");
    let with_stale = || {
        let moved =
            net.transfer(Operation::Write { remote: &to }, &[segment(bytes.range(), Some(desc))]);
        assert_eq!(
            moved.unwrap_err().kind(),
            ErrorKind::NoRegion,
            "the descriptor of a closed region"
        );
    };
    with_stale();
    // Later regions reuse the provider's lkey. The closed region's descriptor is still refused,
    // although its memory is registered again.
    let ranges = [bytes.range()];
    let again =
        |_| net.initiator.register(&mr_attr(&ranges, LOCAL), MrFlags::empty()).expect("register");
    let _registered: Vec<_> = (0..100).map(again).collect();
    with_stale();
    assert_eq!(memory.all(), before, "a refused transfer moved bytes");
}

fn raw_keys_work_only_after_mapping(config: &TestConfig) {
    const REQUESTED: u64 = 77;
    let net = Net::open(config);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(REQUESTED);
    let region = net.target.register(&attr, MrFlags::empty()).expect("register");
    let error = region.key().unwrap_err();
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::KeyNotAvailable, 126));
    let mut raw = vec![0; net.target.domain.provider_attr().raw_key_size];
    let (base, size) = region.raw_attr(&mut raw).expect("raw_attr");
    assert_eq!((base, size), (region.base_addr(), raw.len()));
    let mapped = net.initiator.domain.map_raw(base, 64, &hmem::RawKey(raw)).expect("map");
    assert!(mapped.is_mapped());
    net.assert_works(&mapped);
    // Neither the mapped number nor the target's own number is a key by itself.
    for number in [mapped.as_u64().unwrap(), REQUESTED] {
        let unmapped = RemoteKey::new(mapped.addressing(), base, 64, number);
        let used = net.push(&unmapped, 0, &[1]);
        assert_eq!(used.unwrap_err().kind(), ErrorKind::InvalidKey, "used without mapping it");
    }
    net.initiator.domain.unmap_key(&mapped).expect("unmap");
    assert_eq!(
        net.push(&mapped, 0, &[1]).unwrap_err().kind(),
        ErrorKind::InvalidKey,
        "used after unmapping it"
    );
}

fn peers_use_the_targets_addresses_for_every_range(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(16 << 10);
    let ranges = [memory.part(8192, 100), memory.part(3, 77), memory.part(4096, 500)];
    let region = net.expose_all(&ranges, REMOTE);
    let key = net.key(&region);
    assert_eq!((key.addressing(), key.base()), (Addressing::Virtual, Iova(ranges[0].start().0)));
    for (seed, range) in ranges.iter().enumerate() {
        let offset = range.start().0.wrapping_sub(key.base().0);
        let bytes = pattern(seed as u64, range.len() as usize);
        net.push(&key, offset, &bytes).expect("write to the range's own address");
        assert_eq!(memory.get(range.start().0 - memory.range().start().0, bytes.len()), bytes);
        assert_eq!(net.pull(&key, offset, bytes.len()).expect("read"), bytes);
        // The gaps between the ranges are not part of the region.
        let past =
            net.push(&key, offset, &vec![0; bytes.len() + 1]).expect_err("wrote past a range");
        assert_eq!(past.kind(), net.seen(ErrorKind::OutOfBounds));
    }
    let number = key.pieces().next().expect("a piece").key;
    let zero_based = RemoteKey::new(Addressing::ZeroBased, Iova(0), 677, number);
    assert_eq!(
        net.pull(&zero_based, 0, 1).unwrap_err().kind(),
        net.seen(ErrorKind::OutOfBounds),
        "offsets are no addresses"
    );
}

fn a_range_without_pages_is_refused(config: &TestConfig) {
    let net = Net::open(config);
    let before = net.live();
    let (pages, hole) = (HostPages::new(8192), HostPages::reserved(4096));
    let refused = |range: AddressRange, access: Access| {
        let ranges = [range];
        let error = net
            .try_expose(&mr_attr(&ranges, access), MrFlags::empty())
            .expect_err("no pages there");
        assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::BadAddress, 14), "{error}");
        assert_eq!(net.live(), before);
    };
    refused(hole.range(), REMOTE);
    refused(hole.range(), Access::REMOTE_READ);
    let mixed = [pages.range(), hole.range()];
    assert_eq!(
        net.try_expose(&mr_attr(&mixed, REMOTE), MrFlags::empty()).unwrap_err().kind(),
        ErrorKind::BadAddress
    );
    pages.make_read_only();
    refused(pages.range(), REMOTE);
    assert_eq!(net.live(), before);
}

fn the_requested_key_is_ignored(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let register = |requested| {
        net.target
            .register(&mr_attr(&ranges, REMOTE).key(requested), MrFlags::empty())
            .expect("register")
    };
    // Requests one number twice, a number wider than the key, and the number that requests no key.
    let regions = [5, 5, u64::MAX - 1, u64::MAX].map(register);
    let keys: std::collections::BTreeSet<_> =
        regions.iter().map(|region| region.key().unwrap().as_u64().unwrap()).collect();
    assert_eq!(keys.len(), 4, "the provider gave a key twice");
    for region in &regions {
        net.assert_works(&net.key(region));
    }
}

fn peers_reach_only_refreshed_pages(config: &TestConfig) {
    let net = Net::open(config);
    let len = rustix::param::page_size();
    let memory = Bytes::Host(HostPages::new(4 * len));
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    let page = |at: u64| memory.part(at * len as u64, len as u64);
    memory.put(0, &pattern(8, 4 * len));
    let reached = || {
        [0, 1, 2, 3]
            .map(|at| net.pull(&key, at * len as u64, 64).map(|_| ()).map_err(|error| error.kind()))
    };
    let missing = Err(ErrorKind::BadAddress);
    assert_eq!(reached(), [missing; 4], "the pages were written after the registration");
    region.refresh(&[page(1), page(3)]).expect("refresh two pages");
    assert_eq!(reached(), [missing, Ok(()), missing, Ok(())]);
    assert_eq!(
        net.pull(&key, len as u64 - 1, 2).unwrap_err().kind(),
        ErrorKind::BadAddress,
        "a read of a refreshed page and of one before it"
    );
    let outside = AddressRange::new(page(3).start(), len as u64 + 1).expect("range");
    assert_eq!(region.refresh(&[outside]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(
        reached(),
        [missing, Ok(()), missing, Ok(())],
        "a refused refresh changed something"
    );
    region.refresh(&[]).expect("refresh the whole region");
    assert_eq!(net.pull(&key, 0, 4 * len).expect("read"), pattern(8, 4 * len));
    memory.pages().remove_pages();
    assert_eq!(
        region.refresh(&[]).unwrap_err().kind(),
        ErrorKind::BadAddress,
        "refreshed without pages"
    );
}

fn peers_fail_during_a_refresh(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[4; 4096]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    net.assert_works(&key);
    memory.put(0, &[4; 4096]);
    std::thread::scope(|scope| {
        // `gate` is declared inside the scope. If an assertion fails, dropping it releases the call
        // that it holds, so that the scope does not wait forever.
        let gate = net.faults.hold(NicCall::Refresh);
        let refreshing = scope.spawn(|| region.refresh(&[]));
        wait_held(&gate);
        net.push(&key, 0, &[1]).expect_err("written during a refresh");
        net.pull(&key, 0, 1).expect_err("read during a refresh");
        assert_eq!(memory.all(), [4; 4096]);
        gate.release();
        refreshing.join().expect("the refreshing thread").expect("refresh");
    });
    net.assert_works(&key);
}

fn counters_are_bound_before_the_region_is_enabled(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[6; 64]);
    let counter = Arc::new(hmem::counter::Counter::new());
    let bind =
        |region: &hmem::MemoryRegion| region.bind_counter(&counter, hmem::BindFlags::REMOTE_WRITE);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL);
    let region = net.try_expose(&attr, MrFlags::RMA_EVENT).expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    let key = net.key(&region);
    net.push(&key, 0, &[1]).expect_err("used before it was enabled");
    net.pull(&key, 0, 1).expect_err("used before it was enabled");
    assert_eq!((memory.all(), counter.value()), (vec![6; 64], 0));
    bind(&region).expect("bind");
    region.enable().expect("enable");
    net.assert_works(&key);
    assert_eq!(counter.value(), 1);
    assert_eq!(region.enable().unwrap_err().kind(), ErrorKind::BadState, "enabled twice");
    let late = net.try_expose(&attr, MrFlags::RMA_EVENT).expect("register");
    late.enable().expect("a counter is not compulsory");
    assert_eq!(bind(&late).unwrap_err().kind(), ErrorKind::BadState, "bound after enable");
    let plain = net.try_expose(&attr, MrFlags::empty()).expect("register");
    assert_eq!(plain.state(), RegionState::Enabled);
    assert_eq!(
        bind(&plain).unwrap_err().kind(),
        ErrorKind::BadState,
        "registered without RMA_EVENT"
    );
    net.assert_works(&net.key(&plain));
}

fn regions_are_reached_through_their_endpoint_only(config: &TestConfig) {
    let mut net = Net::open(config);
    let memory = net.filled(&[6; 64]);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL).key(3);
    let region = fabric::regattr(&net.target.domain, &attr, MrFlags::empty()).expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    let key = net.key(&region);
    assert_eq!(
        region.enable().unwrap_err().kind(),
        ErrorKind::BadState,
        "enabled without an endpoint"
    );
    net.push(&key, 0, &[1]).expect_err("used before it was bound");
    let foreign = region.bind_endpoint(&net.initiator.endpoint).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::InvalidArgument, "an endpoint of another domain");
    region.bind_endpoint(&net.target.endpoint).expect("bind");
    net.push(&key, 0, &[1]).expect_err("used before it was enabled");
    region.enable().expect("enable");
    net.assert_works(&key);
    memory.put(0, &[6; 64]);
    assert_eq!(region.bind_endpoint(&net.target.endpoint).unwrap_err().kind(), ErrorKind::BadState);
    let (other, _cq) = open_endpoint(&net.target.domain, true, None);
    let bound = net.peer;
    net.peer = net.initiator.endpoint.resolve(&other.name()).expect("resolve");
    net.push(&key, 0, &[1]).expect_err("reached through another endpoint");
    net.pull(&key, 0, 1).expect_err("reached through another endpoint");
    assert_eq!(memory.all(), [6; 64]);
    net.peer = bound;
    net.assert_works(&key);
}

fn other_modes_do_not_bind_to_endpoints(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    assert_eq!(region.bind_endpoint(&net.target.endpoint).unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(region.enable().unwrap_err().kind(), ErrorKind::BadState);
    net.assert_works(&net.key(&region));
}

fn device_buffers_need_a_descriptor_or_are_detected(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(128);
    let region = net.expose(memory.range(), REMOTE | LOCAL);
    let kind = net.device.as_ref().map(|device| hmem::Iface::kind(&**device)).expect("a device");
    assert_eq!(region.iface().unwrap(), (kind, Some(hmem::DeviceId(0))));
    let key = net.key(&region);
    let (read, write) = ([remote(&key, 0, 64)], [remote(&key, 64, 64)]);
    let device = net.filled(&pattern(5, 64));
    let host = HostPages::new(64);
    let without = |range: AddressRange, operation: Operation<'_>| {
        net.transfer(operation, &[segment(range, None)]).map_err(|error| error.kind())
    };
    let on_device = if config.has(MrMode::LOCAL) || config.has(MrMode::HMEM) {
        Err(ErrorKind::NoRegion)
    } else {
        Ok(64)
    };
    assert_eq!(without(device.range(), Operation::Write { remote: &write }), on_device);
    assert_eq!(
        memory.get(64, 64) == pattern(5, 64),
        on_device.is_ok(),
        "the owning iface was not detected"
    );
    memory.put(0, &pattern(6, 64));
    assert_eq!(without(device.range(), Operation::Read { remote: &read }), on_device);
    assert_eq!(
        device.all() == pattern(6, 64),
        on_device.is_ok(),
        "the owning iface was not detected"
    );
    let on_host = if config.has(MrMode::LOCAL) { Err(ErrorKind::NoRegion) } else { Ok(64) };
    assert_eq!(
        without(host.range(), Operation::Read { remote: &read }),
        on_host,
        "host memory in HMEM mode"
    );
}

fn buffers_of_a_broadcast_need_the_collective_right(config: &TestConfig) {
    let needed = config.has(MrMode::COLLECTIVE);
    let net = Net::open(config);
    assert_eq!(net.target.domain.mr_mode().contains(MrMode::COLLECTIVE), needed);
    match &net.device {
        None => broadcast(&net, needed, || vec![0; 100]),
        Some(device) => broadcast(&net, needed, || {
            let device = Arc::clone(device) as Arc<dyn hmem::Iface>;
            let kind = hmem::AllocationKind::Device;
            let request = hmem::iface::AllocRequest { len: 100, device: hmem::DeviceId(0), kind };
            hmem::DeviceBuffer::allocate(&device, &request).expect("allocate")
        }),
    }
}

/// Broadcasts from the initiator to the target, with the COLLECTIVE right and without it. With the
/// right, the broadcast must succeed. Without the right, both sides must refuse it if `needed` is
/// true, and it must succeed otherwise.
fn broadcast<B: hmem::Memory>(net: &Net, needed: bool, buffer: impl Fn() -> B) {
    let register = |side: &Side, access| {
        let registered = side.domain.register(buffer(), access).expect("register");
        side.make_usable(&registered).expect("bind and enable");
        registered
    };
    let root_seen_by_target =
        net.target.endpoint.resolve(&net.initiator.endpoint.name()).expect("resolve");
    for (right, taken) in [(Access::COLLECTIVE, true), (Access::empty(), !needed)] {
        let from = register(&net.initiator, Access::SEND | right);
        let into = register(&net.target, Access::RECV | right);
        from.write(0, &pattern(12, 100)).expect("write");
        let (from_slice, into_slice) =
            (from.slice(0, 100).expect("slice"), into.slice(0, 100).expect("slice"));
        let members = [root_seen_by_target];
        let received = net.target.endpoint.broadcast(into_slice, &members, Some(members[0]), 9, 1);
        let sent = net.initiator.endpoint.broadcast(from_slice, &[net.peer], None, 9, 2);
        if taken {
            received.and(sent).expect("broadcast");
            assert_eq!(net.completion().result.expect("the root's part"), 100);
            assert_eq!(net.target.wait(&[&net.initiator]).result.expect("the member's part"), 100);
        } else {
            let refused = (received.unwrap_err().kind(), sent.unwrap_err().kind());
            assert_eq!(refused, (ErrorKind::AccessDenied, ErrorKind::AccessDenied));
        }
        let mut bytes = vec![0; 100];
        into.read(0, &mut bytes).expect("read");
        assert_eq!(bytes == pattern(12, 100), taken, "broadcast with {right}");
    }
}

/// MODE-13
#[test]
fn basic_combines_only_with_a_needed_local_and_scalable_with_no_bit() {
    let hmem = |needs: MrMode, can: MrMode| {
        let provider = Loopback::builder().needs(needs).can(can).build().expect("build");
        Hmem::builder().without_vendor_ifaces().provider(provider).build().expect("start")
    };
    let open = |hmem: &Hmem, mr_mode: MrMode| {
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        hmem.domain(LOOPBACK, attr).map(|domain| domain.mr_mode()).map_err(|error| error.kind())
    };
    let free = hmem(MrMode::empty(), MrMode::BASIC_MEANS);
    assert_eq!(
        open(&free, MrMode::BASIC),
        Ok(MrMode::BASIC),
        "BASIC is forced on a provider that needs nothing"
    );
    assert_eq!(open(&free, MrMode::SCALABLE), Ok(MrMode::SCALABLE));
    for bit in MrMode::all().iter() {
        for alone in [MrMode::BASIC, MrMode::SCALABLE] {
            if bit != alone {
                assert_eq!(
                    open(&free, alone | bit),
                    Err(ErrorKind::ModeMismatch),
                    "{alone} with {bit}"
                );
            }
        }
    }
    let needy = hmem(MrMode::VIRT_ADDR | MrMode::PROV_KEY, MrMode::BASIC_MEANS);
    assert_eq!(open(&needy, MrMode::BASIC), Ok(MrMode::BASIC));
    assert_eq!(
        open(&needy, MrMode::SCALABLE),
        Err(ErrorKind::ModeMismatch),
        "SCALABLE offers nothing"
    );
    let local = hmem(MrMode::LOCAL, MrMode::BASIC_MEANS);
    assert_eq!(open(&local, MrMode::BASIC), Err(ErrorKind::ModeMismatch));
    let basic = MrMode::BASIC | MrMode::LOCAL;
    assert_eq!(open(&local, basic), Ok(basic), "LOCAL is required, and combines with BASIC");
    for bit in MrMode::all().difference(basic).iter() {
        assert_eq!(open(&local, basic | bit), Err(ErrorKind::ModeMismatch), "{basic} with {bit}");
    }
    assert_eq!(open(&local, MrMode::SCALABLE | MrMode::LOCAL), Err(ErrorKind::ModeMismatch));
    assert_eq!(
        open(&hmem(MrMode::empty(), MrMode::VIRT_ADDR), MrMode::BASIC),
        Err(ErrorKind::ModeMismatch)
    );
    assert_eq!(MrMode::BASIC.effective(), MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY);
    assert_eq!(MrMode::SCALABLE.effective(), MrMode::empty());
}
