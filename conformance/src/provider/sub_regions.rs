//! Sub-regions: regions that share the registration of a base region.

use std::sync::Arc;

use hmem_core::{
    Access, AddressRange, AuthKey, ErrorKind, MemoryRegion, MrFlags,
    counter::Counter,
    fabric::{self, MrAttr},
    os_page_sizes,
    provider::Registration,
};
use hmem_iface_system::DeviceCall;

use super::{
    case::Case,
    link::CaseLink,
    regions::{assert_busy, assert_busy_past_the_domain},
};
use crate::link::{Exposed, LOCAL, REMOTE, mr_attr, open_endpoint};
use crate::{bytes::pattern, trial::assert_kind};

/// Tests that the provider itself refuses sub-regions that exceed their base in range or rights.
/// Safe code can call the provider's facet directly, without the checks of a domain.
pub(super) fn sub_region_past_the_domain_gets_no_more_than_its_base(case: &Case) {
    let link = CaseLink::open(case);
    let domain = link.target.domain.provider_domain();
    let subs = domain.sub_regions().expect("the case has them");
    let memory = link.filled(&pattern(1, 4096));
    let reads = Access::REMOTE_READ | Access::SEND | Access::WRITE;
    let halves = [memory.part(0, 2048), memory.part(2048, 2048)];
    let ranges = [memory.range()];
    let one = link.try_expose(&mr_attr(&ranges, reads), MrFlags::empty()).expect("register");
    let owned = link.expose(memory.range(), reads);
    let two = (case.attr.mr_iov_limit > 1)
        .then(|| link.try_expose(&mr_attr(&halves, reads), MrFlags::empty()).expect("register"));
    let auth_key = AuthKey::default();
    for base in [&one, &*owned].into_iter().chain(&two) {
        let middle = base.sub(memory.part(0, 2048), Access::REMOTE_READ, link.fresh_key());
        let middle = middle.expect("sub-region");
        link.target.make_usable(&middle);
        let before = domain.live();
        for (parent, size) in [(base, 4096), (&middle, 2048)] {
            let handle = parent.provider_region().expect("handle");
            for (access, offset, len, kind) in [
                (Access::REMOTE_READ, 0, 0, ErrorKind::ZeroLength),
                (Access::REMOTE_READ, 0, size + 1, ErrorKind::OutOfBounds),
                (Access::REMOTE_READ, size, 1, ErrorKind::OutOfBounds),
                (Access::REMOTE_READ, size - 1, 2, ErrorKind::OutOfBounds),
                (Access::REMOTE_READ, 1, u64::MAX, ErrorKind::OutOfBounds),
                (Access::REMOTE_READ, u64::MAX, 2, ErrorKind::OutOfBounds),
                (Access::REMOTE_WRITE, 0, size, ErrorKind::AccessDenied),
                (Access::REMOTE_ATOMIC, 0, 8, ErrorKind::AccessDenied),
                (Access::READ, 0, 8, ErrorKind::AccessDenied),
                (Access::RECV, 0, 8, ErrorKind::AccessDenied),
                (Access::all() - Access::COLLECTIVE, 0, 1, ErrorKind::AccessDenied),
            ] {
                let request = Registration::new(&ranges, access, &auth_key);
                let what = format!("a sub-region of {len} bytes at {offset} with {access}");
                let refused = subs.register_sub(handle, &request, offset, len);
                assert_kind(&refused.expect_err(&what), kind, &what);
            }
        }
        assert_eq!(domain.live(), before, "a refused sub-region is live");
        let key = link.key(&middle);
        let written = link.push(&key, 0, &[0xFF]);
        case.assert_refused(written, ErrorKind::AccessDenied, "a write by a key for reads");
        assert_eq!(link.pull(&key, 0, 2048).expect("read"), pattern(1, 2048));
        middle.close().expect("close");
    }
    one.close().expect("a refused sub-region does not depend on its base");
}

pub(super) fn sub_region_has_its_own_key_rights_and_bounds(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(1, 8192));
    let ranges = [memory.part(100, 8000)];
    let page_size = os_page_sizes()[0];
    let attr = MrAttr { page_size, ..mr_attr(&ranges, REMOTE | LOCAL) };
    let base = link.try_expose(&attr, MrFlags::empty()).expect("register");
    let pinned = link.live().page_registrations;
    let sub =
        base.sub(memory.part(1000, 50), Access::REMOTE_READ, link.fresh_key()).expect("sub-region");
    link.target.make_usable(&sub);
    assert_eq!(link.live().page_registrations, pinned, "the sub-region registered pages");
    assert_eq!(
        (sub.range(), sub.len(), sub.access()),
        (memory.part(1000, 50), 50, Access::REMOTE_READ)
    );
    assert_eq!((sub.iface().unwrap(), sub.page_size()), (base.iface().unwrap(), page_size));
    let (base_key, key) = (link.key(&base), link.key(&sub));
    assert_ne!(base_key.as_u64().unwrap(), key.as_u64().unwrap());
    let expected = if case.virtual_addresses() { memory.part(1000, 50).start().0 } else { 0 };
    assert_eq!(key.base().0, expected, "a sub-region is addressed from its own start");
    assert_eq!(link.pull(&key, 0, 50).expect("read"), pattern(1, 8192)[1000..1050]);
    let denied = link.push(&key, 0, &[0]);
    case.assert_refused(denied, ErrorKind::AccessDenied, "a write by the right of the base");
    for (offset, len) in [(49, 2), (50, 1), (u64::MAX, 1), (u64::MAX, 2)] {
        let what = format!("a read of {len} bytes at {offset:#x}");
        case.assert_refused(link.pull(&key, offset, len), ErrorKind::OutOfBounds, &what);
    }
    // A sub-region may grant writes that its base does not.
    let writes =
        base.sub(memory.part(5000, 8), Access::REMOTE_WRITE, link.fresh_key()).expect("sub-region");
    link.target.make_usable(&writes);
    link.push(&link.key(&writes), 0, b"sub wrot").expect("write");
    assert_eq!(memory.get(5000, 8), b"sub wrot");
    assert_eq!(link.pull(&base_key, 4900, 8).expect("read"), b"sub wrot");
    sub.close().expect("close");
    link.assert_dead(&key, 0, ErrorKind::InvalidKey, "an access to a closed sub-region");
    link.assert_works(&base_key);
}

pub(super) fn sub_region_that_exceeds_its_base_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(8192);
    let base = link.expose(memory.part(1000, 1000), Access::REMOTE_READ | Access::SEND);
    let before = link.live();
    let sub = |offset, len, access| {
        base.sub(memory.part(offset, len), access, link.fresh_key()).map(|_| ())
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
    let attr = MrAttr::new((&*base, memory.part(1000, 8)), Access::REMOTE_READ);
    let page_size =
        link.try_expose(&MrAttr { page_size: os_page_sizes()[0], ..attr }, MrFlags::empty());
    assert_eq!(page_size.unwrap_err().kind(), ErrorKind::BadPageSize, "page size is inherited");
    let foreign = link.initiator.regattr(&attr.key(link.fresh_key()), MrFlags::empty());
    assert_eq!(foreign.unwrap_err().kind(), ErrorKind::InvalidArgument, "a base of another domain");
    assert_eq!(link.live(), before, "something stayed registered");
    sub(1000, 1000, Access::REMOTE_READ).expect("all of the base");
    base.close().expect("nothing depends on it");
}

pub(super) fn base_closes_after_its_sub_regions_three_levels_deep(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(2, 4096));
    let base = link.expose(memory.range(), REMOTE);
    let middle = base.sub(memory.part(1000, 2000), REMOTE, link.fresh_key()).expect("second level");
    let leaf = middle.sub(memory.part(1500, 100), REMOTE, link.fresh_key()).expect("third level");
    for region in [&middle, &leaf] {
        link.target.make_usable(region);
    }
    assert_eq!(
        middle.sub(memory.part(999, 2), REMOTE, 9).unwrap_err().kind(),
        ErrorKind::OutOfBounds
    );
    assert_eq!(link.pull(&link.key(&leaf), 0, 100).expect("read"), pattern(2, 4096)[1500..1600]);
    let base = assert_busy(&link, base);
    assert_busy_past_the_domain(&link, &base);
    let middle = middle.close().expect_err("closed under a sub-region");
    assert_kind(&middle.error, ErrorKind::Busy, "closing a sub-region that is in use");
    assert_busy_past_the_domain(&link, &middle.value);
    link.assert_works(&link.key(&middle.value));
    leaf.close().expect("the leaf first");
    let base = assert_busy(&link, base);
    middle.value.close().expect("then the middle");
    link.assert_works(&link.key(&base));
    base.close().expect("then the base");
    assert_eq!((link.live().regions, link.live().bytes), (0, 0));
}

pub(super) fn dropped_base_lives_as_long_as_its_sub_regions(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(3, 4096));
    let base = link.expose(memory.range(), REMOTE);
    let sub = base.sub(memory.part(100, 100), REMOTE, link.fresh_key()).expect("sub-region");
    link.target.make_usable(&sub);
    drop(base);
    assert_eq!(link.pull(&link.key(&sub), 0, 100).expect("read"), pattern(3, 4096)[100..200]);
    drop(sub);
    assert_eq!((link.live().regions, link.live().page_registrations, link.live().bytes), (0, 0, 0));
}

pub(super) fn sub_regions_pin_and_register_no_pages(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64 << 10);
    let base = link.expose(memory.range(), REMOTE);
    let before = link.live();
    let subs: Vec<_> = (0..64)
        .map(|at| {
            base.sub(memory.part(at * 1024, 1024), REMOTE, link.fresh_key()).expect("sub-region")
        })
        .collect();
    let after = link.live();
    assert_eq!(after.regions, before.regions + 64);
    assert_eq!((after.page_registrations, after.bytes), (before.page_registrations, before.bytes));
    let exports = link.device.stats().calls(DeviceCall::ExportDmaBuf);
    assert!(exports <= 1, "{exports} exports for one registration of pages");
    drop(subs);
    assert_eq!(link.live(), before);
}

pub(super) fn sub_region_is_reached_with_its_own_auth_key_only(case: &Case) {
    let (ours, theirs) = (AuthKey(b"ours".to_vec()), AuthKey(b"theirs".to_vec()));
    for initiators in [&ours, &theirs] {
        let link = CaseLink::with_auth_keys(case, &ours, initiators);
        let memory = link.filled(&[3; 64]);
        let all = [memory.range()];
        let expose = |attr: MrAttr<'_>| link.try_expose(&attr, MrFlags::empty()).expect("register");
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
            let key = link.key(&sub);
            if reached {
                link.assert_works(&key);
                memory.put(0, &[3; 64]);
            } else {
                let what = "an access with another authorization key";
                link.assert_dead(&key, 0, ErrorKind::AccessDenied, what);
                assert_eq!(memory.all(), [3; 64]);
            }
        }
    }
}

pub(super) fn sub_region_is_reached_through_its_own_endpoint_only(case: &Case) {
    let mut link = CaseLink::open(case);
    let memory = link.filled(&[3; 64]);
    let base = link.expose(memory.range(), REMOTE);
    let sub = base.sub(memory.part(8, 32), REMOTE, link.fresh_key()).expect("sub-region");
    let (base_key, key) = (link.key(&base), link.key(&sub));
    let refused = |link: &CaseLink, key: &_| {
        let error = link.push(key, 0, &[1]).expect_err("reached through another endpoint");
        assert!(matches!(error.kind(), ErrorKind::AccessDenied | ErrorKind::BadState), "{error}");
        assert_eq!(memory.all(), [3; 64]);
    };
    refused(&link, &key);
    let (other, _cq) = open_endpoint(&link.target.domain, true, None).expect("open an endpoint");
    sub.bind_endpoint(&other).expect("bind to an endpoint that is not the base's");
    sub.enable().expect("enable");
    refused(&link, &key);
    link.peer = link.initiator.endpoint.resolve(&other.name()).expect("resolve");
    refused(&link, &base_key);
    link.assert_works(&key);
    sub.close().expect("close before the endpoint that it is bound to");
}

/// Registers a region without a counter, and a sub-region with one. Returns both and the counter.
fn counted_sub(link: &CaseLink, range: AddressRange) -> (Exposed, MemoryRegion, Arc<Counter>) {
    let base = link.expose(range, REMOTE);
    let part = range.slice(8, 32).expect("a part");
    let attr = MrAttr::new((&*base, part), REMOTE).key(link.fresh_key());
    let sub = fabric::regattr(&link.target.domain, &attr, MrFlags::RMA_EVENT).expect("sub-region");
    let counter = link.count(&sub);
    (base, sub, counter)
}

pub(super) fn counted_sub_region_needs_rma_event(case: &Case) {
    let link = CaseLink::without_rma_event(case);
    let memory = link.filled(&[3; 64]);
    let (base, sub, counter) = counted_sub(&link, memory.range());
    link.assert_needs_rma_event(&link.key(&sub), &memory, &counter);
    link.assert_works(&link.key(&base));
}

pub(super) fn sub_region_counts_its_own_writes(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let (base, sub, counter) = counted_sub(&link, memory.range());
    let (base_key, key) = (link.key(&base), link.key(&sub));
    for count in 1..=3 {
        link.push(&key, 0, &[1; 32]).expect("write");
        link.push(&base_key, 8, &[2; 32]).expect("write by the base's key, which has no counter");
        assert_eq!(counter.value(), count);
    }
    if !case.staged() {
        link.fetch_add(&key, 0, 1).expect("atomic");
        assert_eq!(counter.value(), 4);
    }
}
