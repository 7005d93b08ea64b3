//! Behaviours of optional facets (sub-regions, windows, counters, refresh) and of asynchronous
//! registration.

use std::{sync::Arc, time::Duration};

use hmem_core::{
    Access, Addressing, AuthKey, BindFlags, DomainBindFlags, ErrorKind, MrFlags, MrMode, Region,
    RemoteKey, Request, Type1Window, Type2Bind, Type2Kind, Type2Window,
    counter::Counter,
    event_queue::EventQueue,
    provider::{EndpointAttr, Provider, Registration, WindowBind, WindowType},
};

use super::{
    link::{LOCAL, Link, REMOTE, assert_refused, contents},
    regions::assert_busy,
};
use crate::{
    bytes::{assert_bytes, pattern},
    trial::{Outcome, Skipped, assert_kind, skip},
};

pub(super) fn sub_region_reaches_its_part_only(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_domain().sub_regions().is_none() {
        return skip("the provider has no sub-regions");
    }
    let mut expected = pattern(1, 4096);
    let base = link.target.register(expected.clone(), REMOTE | LOCAL);
    let pinned = link.target.domain.live().page_registrations;
    let part = base.range().slice(1000, 50).expect("inside");
    let sub = base.sub(part, REMOTE, link.target.fresh_key()).expect("sub-region");
    link.target.make_usable(&sub);
    assert_eq!(
        link.target.domain.live().page_registrations,
        pinned,
        "the sub-region registered pages"
    );
    let key = link.key(&sub);
    link.push(&key, 0, &[0xAA; 50]).expect("write");
    expected[1000..1050].fill(0xAA);
    assert_bytes(&contents(&base), &expected, "the base");
    link.assert_dead(&key, 50, "an access past the sub-region");
    link.assert_dead(&key, u64::MAX, "an access before the sub-region");
    sub.close().expect("close");
    link.assert_dead(&key, 0, "an access to a closed sub-region");
    link.assert_works(&link.key(&base));
    Ok(())
}

pub(super) fn region_with_a_sub_region_is_busy(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_domain().sub_regions().is_none() {
        return skip("the provider has no sub-regions");
    }
    let base = link.target.register(pattern(1, 4096), REMOTE | LOCAL);
    let part = base.range().slice(8, 8).expect("inside");
    let sub = base.sub(part, Access::REMOTE_READ, link.target.fresh_key()).expect("sub-region");
    let base = assert_busy(&link, base);
    assert_busy_past_the_domain(&link, &base);
    sub.close().expect("close the sub-region");
    base.close().expect("close the base");
    Ok(())
}

/// Tests that the provider itself refuses sub-regions that exceed their base in range or rights.
/// Safe code can call the provider's facet directly, without the checks of a domain.
pub(super) fn sub_region_past_the_domain_gets_no_more_than_its_base(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    let domain = link.target.domain.provider_domain();
    let Some(subs) = domain.sub_regions() else {
        return skip("the provider has no sub-regions");
    };
    let read_only = Access::REMOTE_READ | Access::SEND | Access::WRITE;
    let base = link.target.register(pattern(1, 4096), read_only);
    let handle = base.provider_region().expect("handle");
    let (auth_key, ranges) = (AuthKey::default(), [base.range()]);
    let before = domain.live();
    for (access, offset, len, kind) in [
        (Access::REMOTE_READ, 0, 0, ErrorKind::ZeroLength),
        (Access::REMOTE_READ, 4096, 1, ErrorKind::OutOfBounds),
        (Access::REMOTE_READ, 4095, 2, ErrorKind::OutOfBounds),
        (Access::REMOTE_READ, 1, u64::MAX, ErrorKind::OutOfBounds),
        (Access::REMOTE_READ, u64::MAX, 2, ErrorKind::OutOfBounds),
        (Access::REMOTE_WRITE, 0, 4096, ErrorKind::AccessDenied),
        (Access::REMOTE_ATOMIC, 0, 8, ErrorKind::AccessDenied),
        (Access::READ, 0, 8, ErrorKind::AccessDenied),
        (Access::RECV, 0, 8, ErrorKind::AccessDenied),
    ] {
        let request = Registration::new(&ranges, access, &auth_key);
        let what = format!("a sub-region of {len} bytes at {offset} with {access}");
        let refused = subs.register_sub(handle, &request, offset, len);
        assert_kind(&refused.expect_err(&what), kind, &what);
    }
    assert_eq!(domain.live(), before, "a refused sub-region is live");
    base.close().expect("close the base");
    Ok(())
}

/// Asserts that the provider itself refuses to deregister a region with a sub-region or window.
fn assert_busy_past_the_domain(link: &Link, region: &Region<Vec<u8>>) {
    let handle = region.provider_region().expect("handle");
    let refused = link.target.domain.provider_domain().deregister(handle);
    let error = refused.expect_err("something depends on the region");
    assert_kind(&error, ErrorKind::Busy, "deregistering a region that is in use");
}

/// Returns the window types that the NIC supports. If the NIC has no windows, or the domains use
/// RAW mode, returns the outcome that skips the behaviour.
fn window_types(link: &Link) -> Result<Vec<WindowType>, Skipped> {
    if link.has(MrMode::RAW) {
        return skip("windows have no raw keys, and this mode has no other keys");
    }
    match link.target.domain.provider_domain().windows() {
        Some(windows) => Ok(windows.window_types().to_vec()),
        None => skip("the NIC has no windows"),
    }
}

/// A memory window of type 1 or type 2.
enum Window {
    One(Type1Window),
    Two(Type2Window),
}

impl Window {
    fn alloc(link: &Link, kind: WindowType) -> Self {
        let domain = &link.target.domain;
        match kind {
            WindowType::One => domain.alloc_type_1_window().map(Self::One),
            WindowType::TwoA => domain.alloc_type_2_window(Type2Kind::A).map(Self::Two),
            WindowType::TwoB => domain.alloc_type_2_window(Type2Kind::B).map(Self::Two),
        }
        .expect("allocate a window")
    }

    fn bind(&self, link: &Link, region: &Region<Vec<u8>>, (offset, len): (u64, u64)) -> RemoteKey {
        match self {
            Self::One(window) => window.bind(region, offset, len, REMOTE).expect("bind"),
            Self::Two(window) => {
                let addressing = Addressing::Virtual;
                let bind = Type2Bind { region, offset, len, access: REMOTE, addressing, tag: 7 };
                let key = window.post_bind(&link.target.endpoint, &bind, 5);
                link.target.wait(&link.initiator).result.expect("bind");
                key.expect("post a bind")
            }
        }
    }

    fn unbind(&self, link: &Link) {
        match self {
            Self::One(window) => window.unbind().expect("unbind"),
            Self::Two(window) => {
                let posted = window.post_invalidate(&link.target.endpoint, 6);
                posted.expect("post an invalidation");
                link.target.wait(&link.initiator).result.expect("invalidate");
            }
        }
    }
}

pub(super) fn window_is_reached_until_it_is_invalidated(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    for kind in window_types(&link)? {
        let mut expected = pattern(1, 4096);
        let region = link.target.register(expected.clone(), LOCAL | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let key = window.bind(&link, &region, (1000, 50));
        let written = link.push(&key, 0, &[0xAA; 50]);
        written.unwrap_or_else(|error| panic!("write through {kind:?}: {error}"));
        expected[1000..1050].fill(0xAA);
        assert_bytes(&contents(&region), &expected, &format!("written through {kind:?}"));
        window.unbind(&link);
        link.assert_dead(&key, 0, "an access through an unbound window");
        assert_bytes(&contents(&region), &expected, "the region after refused accesses");
    }
    Ok(())
}

pub(super) fn nothing_is_reached_outside_a_window(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let types = window_types(&link)?;
    let windows = link.target.domain.provider_domain().windows();
    if !windows.expect("the NIC has windows").enforces_bounds() {
        return skip("the NIC does not enforce the bounds of windows, and says so");
    }
    for kind in types {
        let region = link.target.register(pattern(1, 4096), LOCAL | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let key = window.bind(&link, &region, (1000, 50));
        assert_refused(link.push(&key, 50, &[0xFF]), "a write past the window");
        assert_refused(link.push(&key, u64::MAX, &[0xFF]), "a write before the window");
        assert_bytes(&contents(&region), &pattern(1, 4096), "the region after refused accesses");
        window.unbind(&link);
    }
    Ok(())
}

pub(super) fn region_with_a_bound_window_is_busy(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    for kind in window_types(&link)? {
        let region = link.target.register(pattern(1, 4096), LOCAL | REMOTE | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let _key = window.bind(&link, &region, (0, 64));
        let region = assert_busy(&link, region);
        assert_busy_past_the_domain(&link, &region);
        window.unbind(&link);
        region.close().expect("close the region");
    }
    Ok(())
}

/// Tests that the provider itself refuses windows that exceed their region in range or rights. Safe
/// code can call the provider's facet directly, without the checks of a domain.
pub(super) fn window_bound_past_the_domain_gets_no_more_than_its_region(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let types = window_types(&link)?;
    let nic = link.target.domain.provider_domain();
    let windows = nic.windows().expect("the NIC has windows");
    let transport = nic.transport().expect("the NIC transfers");
    let cq = transport.open_cq(8).expect("open a completion queue");
    let endpoint = transport.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    endpoint.resolve(&endpoint.name()).expect("connect the endpoint to itself");
    let read_only = link.target.register(pattern(1, 4096), Access::WRITE | Access::MW_BIND);
    let without = link.target.register(pattern(1, 4096), LOCAL);
    for (region, offset, len, access, kind) in [
        (&read_only, 4096, 1, read, ErrorKind::OutOfBounds),
        (&read_only, 4095, 2, read, ErrorKind::OutOfBounds),
        (&read_only, 1, u64::MAX, read, ErrorKind::OutOfBounds),
        (&read_only, u64::MAX, 2, read, ErrorKind::OutOfBounds),
        (&read_only, 0, 8, write, ErrorKind::AccessDenied),
        (&without, 0, 8, read, ErrorKind::AccessDenied),
    ] {
        let region = region.provider_region().expect("handle");
        let what = format!("a window of {len} bytes at {offset} with {access}");
        for window_type in &types {
            let window = windows.alloc_window(*window_type).expect("allocate a window");
            let addressing = Addressing::Virtual;
            let bind = WindowBind { region, offset, len, access, addressing };
            let refused = match window_type {
                WindowType::One => windows.bind_window(window, &bind).map(drop),
                _ => windows.bind_window_now(&*endpoint, window, &bind, 3),
            };
            let error = refused.expect_err(&what);
            if !error.is_unsupported() {
                assert_kind(&error, kind, &what);
            }
            windows.free_window(window).expect("free");
        }
    }
    for region in [read_only, without] {
        region.close().expect("a refused window depends on no region");
    }
    Ok(())
}

pub(super) fn counter_counts_each_remote_write_once(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_domain().region_counters().is_none() {
        return skip("the NIC does not count accesses to a region");
    }
    let request = Request::new(pattern(1, 4096), REMOTE).key(link.target.fresh_key());
    let region = link.target.domain.submit(request.flags(MrFlags::RMA_EVENT));
    let region = region.expect("register");
    let counter = Arc::new(Counter::new());
    region.bind_counter(&counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
    link.target.make_usable(&region);
    let key = link.key(&region);
    for count in 1..=5 {
        link.push(&key, 0, &[1; 64]).expect("write");
        link.pull(&key, 0, 64).expect("read");
        assert_eq!((counter.value(), counter.errors()), (count, 0), "writes counted");
    }
    counter.close();
    region.close().expect("close");
    Ok(())
}

pub(super) fn refreshed_region_still_works(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_domain().refresh().is_none() {
        return skip("the provider does not refresh pages");
    }
    let region = link.target.register(pattern(1, 8192), REMOTE);
    let key = link.key(&region);
    region.refresh(&[]).expect("refresh all");
    link.assert_works(&key);
    region.refresh(&[region.range().slice(0, 4096).expect("inside")]).expect("refresh a part");
    link.assert_works(&key);
    Ok(())
}

pub(super) fn asynchronous_registration_ends_in_one_event(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let queue = Arc::new(EventQueue::new());
    link.target.domain.bind(&queue, DomainBindFlags::REG_MR).expect("bind the event queue");
    let request = Request::new(pattern(1, 4096), REMOTE).key(link.target.fresh_key());
    let region = link.target.domain.submit(request.context(42));
    let region = region.expect("submit");
    let event = queue.wait(Duration::from_secs(60)).expect("an event");
    event.result.expect("registered");
    assert_eq!((event.context, Some(event.region)), (42, region.id()));
    assert!(queue.read().is_none(), "a second event");
    link.target.make_usable(&region);
    link.assert_works(&link.key(&region));
    region.close().expect("close");
    let left = link.target.domain.live().regions;
    assert_eq!(left, 0, "a closed region is live");
    Ok(())
}
