//! Time to grant and revoke remote access to memory: by a memory window, and by registering and
//! closing the same range. Measured on the software NIC.
//!
//! In the first measurement, the NIC pins the pages of a region, as hardware does. In the second,
//! the NIC follows the page tables instead, so a registration does nothing with the pages. The
//! second measurement has no goal.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::sync::Arc;

use hmem::{
    Access, Addressing, Domain, DomainAttr, Hmem, MrFlags, MrMode, Promise, Raw, Region, Type2Bind,
    Type2Kind, fabric,
    loopback::{Loopback, Progress, RemapPolicy},
    provider::{CompletionQueue, EndpointAttr},
};
use report::{Comparison, Target};

const LEN: u64 = 1 << 20;
const BINDABLE: Access = Access::RECV.union(Access::MW_BIND);
const READABLE: Access = Access::REMOTE_READ;

fn domain(memory: RemapPolicy) -> Domain {
    let loopback = Loopback::builder().remap_policy(memory).progress(Progress::ByHand).build();
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback.expect("a software NIC starts"))
        .build()
        .expect("host memory is always available");
    let mr_mode = MrMode::PROV_KEY;
    let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the NIC offers the mode")
}

fn completion(cq: &Arc<dyn CompletionQueue>) {
    let mut out = Vec::with_capacity(1);
    while cq.read(&mut out, 1).expect("read completions") == 0 {}
    out.remove(0).result.expect("the request succeeds");
}

/// Registers the memory of `region` a second time, and closes the second region.
fn register_and_close(domain: &Domain, region: &Region<Vec<u8>>) {
    let range = region.range();
    // SAFETY: the memory belongs to a region that outlives the new one, and nothing transfers to
    // the new region.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let region = fabric::reg(domain, memory, READABLE, 0, MrFlags::empty()).expect("register");
    region.close().expect("the region is not in use");
}

fn rows(
    memory: RemapPolicy,
    target: impl Fn() -> Target,
    names: [&'static str; 3],
) -> Vec<Comparison> {
    let domain = domain(memory);
    let cq = domain.open_cq(16).expect("open a completion queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    let region = domain.register(vec![1; LEN as usize], BINDABLE).expect("register");
    let two = domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let one = domain.alloc_type_1_window().expect("allocate");
    let reference = || register_and_close(&domain, &region);
    let mut tag = 0u8;
    let posted = || {
        tag = tag.wrapping_add(1);
        let addressing = Addressing::ZeroBased;
        let bind =
            Type2Bind { region: &region, offset: 0, len: LEN, access: READABLE, addressing, tag };
        two.post_bind(&endpoint, &bind, 1).expect("post the bind");
        two.post_invalidate(&endpoint, 2).expect("post the invalidation");
        completion(&cq);
        completion(&cq);
    };
    let called = || {
        one.bind(&region, 0, LEN, READABLE).expect("bind");
        one.unbind().expect("unbind");
    };
    let granted = || {
        let grant = region.grant(&endpoint, 0..LEN, READABLE).expect("grant");
        grant.revoke().expect("revoke");
    };
    vec![
        report::compare(names[0], target(), posted, reference),
        report::compare(names[1], target(), called, reference),
        report::compare(names[2], target(), granted, reference),
    ]
}

fn main() {
    let pinned = rows(
        RemapPolicy::Pinned,
        || Target::Ratio(0.2),
        [
            "type 2: bind + invalidate / register + close, 1 MiB pinned",
            "type 1: bind + unbind / register + close, 1 MiB pinned",
            "grant + revoke / register + close, 1 MiB pinned",
        ],
    );
    report::print(pinned);
    let follow = rows(
        RemapPolicy::Follow,
        || Target::Unlimited,
        [
            "type 2: bind + invalidate / register + close, pages not touched",
            "type 1: bind + unbind / register + close, pages not touched",
            "grant + revoke / register + close, pages not touched",
        ],
    );
    report::print(follow);
}
