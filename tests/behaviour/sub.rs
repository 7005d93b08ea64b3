//! Sub-regions: regions that share the registration of a base region.

use std::sync::Arc;

use hmem::{
    Access, AuthKey, BindFlags, ErrorKind, MemoryRegion, MrFlags, MrMode, RegionState,
    counter::Counter,
    fabric::{self, MrAttr},
    os_page_sizes,
};

use crate::{
    config::{TestConfig, need, needs, over_configs},
    memory::pattern,
    net::{LOCAL, Net, REMOTE, Setup, mr_attr, open_endpoint},
};

over_configs! {
    /// SUB-01
    a_sub_region_has_its_own_key_rights_and_bounds: Every, needs::SUB_REGIONS;
    /// SUB-01
    sub_region_that_exceeds_its_base_is_refused: Pairwise, needs::SUB_REGIONS;
    /// SUB-02
    a_base_closes_after_its_sub_regions_three_levels_deep: Pairwise, needs::SUB_REGIONS;
    /// SUB-02
    a_dropped_base_lives_as_long_as_its_sub_regions: Pairwise, needs::SUB_REGIONS;
    /// SUB-03
    sub_regions_pin_and_register_no_pages: Pairwise, needs::SUB_REGIONS;
    /// KEY-08
    a_sub_region_is_reached_with_its_own_auth_key_only: Pairwise, needs::SUB_REGIONS;
    /// KEY-08
    a_sub_region_is_reached_through_its_own_endpoint_only: Pairwise, needs::SUB_REGIONS,
        need("modes without ENDPOINT", "binding to an endpoint is refused there",
            |config| config.has(MrMode::ENDPOINT));
    /// KEY-08
    a_counted_sub_region_needs_rma_event: Pairwise, needs::SUB_REGIONS, needs::COUNTERS;
    /// EVT-02
    a_sub_region_counts_its_own_writes: Pairwise, needs::SUB_REGIONS, needs::COUNTERS;
}

fn a_sub_region_has_its_own_key_rights_and_bounds(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 8192));
    let ranges = [memory.part(100, 8000)];
    let page_size = os_page_sizes()[0];
    let attr = MrAttr { page_size, ..mr_attr(&ranges, REMOTE | LOCAL) };
    let base = net.try_expose(&attr, MrFlags::empty()).expect("register");
    let sub =
        base.sub(memory.part(1000, 50), Access::REMOTE_READ, net.fresh_key()).expect("sub-region");
    net.target.make_usable(&sub).expect("bind and enable");
    assert_eq!(
        (sub.range(), sub.len(), sub.access()),
        (memory.part(1000, 50), 50, Access::REMOTE_READ)
    );
    assert_eq!((sub.iface().unwrap(), sub.page_size()), (base.iface().unwrap(), page_size));
    let (base_key, key) = (net.key(&base), net.key(&sub));
    assert_ne!(base_key.as_u64().unwrap(), key.as_u64().unwrap());
    let expected = if config.virtual_addresses() { memory.part(1000, 50).start().0 } else { 0 };
    assert_eq!(key.base().0, expected, "a sub-region is addressed from its own start");
    assert_eq!(net.pull(&key, 0, 50).expect("read"), pattern(1, 8192)[1000..1050]);
    assert_eq!(
        net.push(&key, 0, &[0]).unwrap_err().kind(),
        ErrorKind::AccessDenied,
        "a right of the base applied to the sub-region"
    );
    assert_eq!(net.pull(&key, 49, 2).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(net.pull(&key, u64::MAX, 1).unwrap_err().kind(), ErrorKind::OutOfBounds);
    // A sub-region may grant writes that its base does not.
    let writes =
        base.sub(memory.part(5000, 8), Access::REMOTE_WRITE, net.fresh_key()).expect("sub-region");
    net.target.make_usable(&writes).expect("bind and enable");
    net.push(&net.key(&writes), 0, b"sub wrot").expect("write");
    assert_eq!(memory.get(5000, 8), b"sub wrot");
    assert_eq!(net.pull(&base_key, 4900, 8).expect("read"), b"sub wrot");
}

fn sub_region_that_exceeds_its_base_is_refused(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8192);
    let base = net.expose(memory.part(1000, 1000), Access::REMOTE_READ | Access::SEND);
    let before = net.live();
    let sub = |offset, len, access| {
        base.sub(memory.part(offset, len), access, net.fresh_key()).map(|_| ())
    };
    for (offset, len) in [(999, 1), (999, 10), (2000, 1), (1999, 2), (0, 8192), (5000, 10)] {
        let error = sub(offset, len, Access::REMOTE_READ).expect_err("outside the base");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{len} bytes at {offset}");
    }
    assert_eq!(sub(1000, 0, Access::REMOTE_READ).unwrap_err().kind(), ErrorKind::ZeroLength);
    for writes in [Access::REMOTE_WRITE, Access::READ, Access::RECV] {
        let error = sub(1000, 8, writes).expect_err("the base's pages are read only to the NIC");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{writes}");
    }
    let attr = MrAttr::new((&base, memory.part(1000, 8)), Access::REMOTE_READ);
    let page_size =
        net.try_expose(&MrAttr { page_size: os_page_sizes()[0], ..attr }, MrFlags::empty());
    assert_eq!(page_size.unwrap_err().kind(), ErrorKind::BadPageSize, "page size is inherited");
    let foreign = net.initiator.register(&attr.key(net.fresh_key()), MrFlags::empty());
    assert_eq!(foreign.unwrap_err().kind(), ErrorKind::InvalidArgument, "a base of another domain");
    assert_eq!(net.live(), before, "something stayed registered");
    sub(1000, 1000, Access::REMOTE_READ).expect("all of the base");
    base.close().expect("nothing depends on it");
}

fn a_base_closes_after_its_sub_regions_three_levels_deep(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(2, 4096));
    let base = net.expose(memory.range(), REMOTE);
    let middle = base.sub(memory.part(1000, 2000), REMOTE, net.fresh_key()).expect("second level");
    let leaf = middle.sub(memory.part(1500, 100), REMOTE, net.fresh_key()).expect("third level");
    for region in [&middle, &leaf] {
        net.target.make_usable(region).expect("bind and enable");
    }
    assert_eq!(
        middle.sub(memory.part(999, 2), REMOTE, 9).unwrap_err().kind(),
        ErrorKind::OutOfBounds
    );
    assert_eq!(net.pull(&net.key(&leaf), 0, 100).expect("read"), pattern(2, 4096)[1500..1600]);
    let busy = |region: hmem::MemoryRegion| {
        let rejected = region.close().expect_err("closed under a sub-region");
        assert_eq!(rejected.error.kind(), ErrorKind::Busy);
        net.assert_works(&net.key(&rejected.value));
        rejected.value
    };
    let base = busy(base);
    let middle = busy(middle);
    leaf.close().expect("the leaf first");
    let base = busy(base);
    middle.close().expect("then the middle");
    net.assert_works(&net.key(&base));
    base.close().expect("then the base");
    assert_eq!((net.live().regions, net.live().bytes), (0, 0));
}

fn a_dropped_base_lives_as_long_as_its_sub_regions(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(3, 4096));
    let base = net.expose(memory.range(), REMOTE);
    let sub = base.sub(memory.part(100, 100), REMOTE, net.fresh_key()).expect("sub-region");
    net.target.make_usable(&sub).expect("bind and enable");
    drop(base);
    assert_eq!(net.pull(&net.key(&sub), 0, 100).expect("read"), pattern(3, 4096)[100..200]);
    drop(sub);
    assert_eq!((net.live().regions, net.live().page_registrations, net.live().bytes), (0, 0, 0));
}

fn sub_regions_pin_and_register_no_pages(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64 << 10);
    let base = net.expose(memory.range(), REMOTE);
    let before = net.live();
    let subs: Vec<_> = (0..64)
        .map(|at| {
            base.sub(memory.part(at * 1024, 1024), REMOTE, net.fresh_key()).expect("sub-region")
        })
        .collect();
    let after = net.live();
    assert_eq!(after.regions, before.regions + 64);
    assert_eq!((after.page_registrations, after.bytes), (before.page_registrations, before.bytes));
    if let Some(device) = &net.device {
        let exports = device.stats().calls(hmem::system::DeviceCall::ExportDmaBuf);
        assert!(exports <= 1, "{exports} exports for one registration of pages");
    }
    drop(subs);
    assert_eq!(net.live(), before);
}

fn a_sub_region_is_reached_with_its_own_auth_key_only(config: &TestConfig) {
    let (ours, theirs) = (AuthKey(b"ours".to_vec()), AuthKey(b"theirs".to_vec()));
    for initiators in [&ours, &theirs] {
        let mut setup = Setup::of(config);
        setup.target.auth_key = ours.clone();
        setup.initiator.auth_key = ours.clone();
        setup.initiator_key = Some(initiators.clone());
        let net = setup.open();
        let memory = net.filled(&[3; 64]);
        let all = [memory.range()];
        let expose = |attr: MrAttr<'_>| net.try_expose(&attr, MrFlags::empty()).expect("register");
        let open = expose(mr_attr(&all, REMOTE));
        let guarded = expose(MrAttr { auth_key: Some(&theirs), ..mr_attr(&all, REMOTE) });
        for (base, auth_key, reached) in [
            (&open, Some(&theirs), initiators == &theirs),
            (&open, None, initiators == &ours),
            (&guarded, Some(&theirs), initiators == &theirs),
            (&guarded, None, initiators == &ours),
        ] {
            let part = MrAttr::new((base, memory.part(8, 32)), REMOTE);
            let sub = expose(MrAttr { auth_key, ..part });
            let key = net.key(&sub);
            if reached {
                net.assert_works(&key);
                memory.put(0, &[3; 64]);
            } else {
                for error in [net.push(&key, 0, &[1]).map(|_| ()), net.pull(&key, 0, 1).map(|_| ())]
                {
                    let error = error.expect_err("reached with the wrong authorization key");
                    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
                }
                assert_eq!(memory.all(), [3; 64]);
            }
        }
    }
}

fn a_sub_region_is_reached_through_its_own_endpoint_only(config: &TestConfig) {
    let mut net = Net::open(config);
    let memory = net.filled(&[3; 64]);
    let base = net.expose(memory.range(), REMOTE);
    let sub = base.sub(memory.part(8, 32), REMOTE, net.fresh_key()).expect("sub-region");
    let (base_key, key) = (net.key(&base), net.key(&sub));
    let refused = |net: &Net, key: &_| {
        let error = net.push(key, 0, &[1]).expect_err("reached through another endpoint");
        assert!(matches!(error.kind(), ErrorKind::AccessDenied | ErrorKind::BadState), "{error}");
        assert_eq!(memory.all(), [3; 64]);
    };
    refused(&net, &key);
    let (other, _cq) = open_endpoint(&net.target.domain, true, None);
    sub.bind_endpoint(&other).expect("bind to an endpoint that is not the base's");
    sub.enable().expect("enable");
    refused(&net, &key);
    net.peer = net.initiator.endpoint.resolve(&other.name()).expect("resolve");
    refused(&net, &base_key);
    net.assert_works(&key);
    sub.close().expect("close before the endpoint that it is bound to");
}

/// Registers a region and a sub-region with a counter of its own. Returns both and the counter.
fn counted_sub(net: &Net, range: hmem::AddressRange) -> (MemoryRegion, MemoryRegion, Arc<Counter>) {
    let base = net.expose(range, REMOTE);
    let part = range.slice(8, 32).expect("a part");
    let attr = MrAttr::new((&base, part), REMOTE).key(net.fresh_key());
    let sub = fabric::regattr(&net.target.domain, &attr, MrFlags::RMA_EVENT).expect("sub-region");
    let counter = Arc::new(Counter::new());
    sub.bind_counter(&counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
    if net.config.has(MrMode::ENDPOINT) {
        sub.bind_endpoint(&net.target.endpoint).expect("bind the endpoint");
    }
    if sub.state() == RegionState::Disabled {
        sub.enable().expect("enable");
    }
    (base, sub, counter)
}

fn a_counted_sub_region_needs_rma_event(config: &TestConfig) {
    let mut setup = Setup::of(config);
    setup.rma_event = false;
    let net = setup.open();
    let memory = net.filled(&[3; 64]);
    let (base, sub, counter) = counted_sub(&net, memory.range());
    let error = net.push(&net.key(&sub), 0, &[1]).expect_err("an access that cannot be counted");
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    assert_eq!((memory.all(), counter.value()), (vec![3; 64], 0));
    net.assert_works(&net.key(&base));
}

fn a_sub_region_counts_its_own_writes(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let (base, sub, counter) = counted_sub(&net, memory.range());
    let (base_key, key) = (net.key(&base), net.key(&sub));
    for count in 1..=3 {
        net.push(&key, 0, &[1; 32]).expect("write");
        net.push(&base_key, 8, &[2; 32]).expect("write by the base's key, which has no counter");
        assert_eq!(counter.value(), count);
    }
    if (needs::ATOMICS.met)(config) {
        net.fetch_add(&key, 0, 1).expect("atomic");
        assert_eq!(counter.value(), 4);
    }
}
