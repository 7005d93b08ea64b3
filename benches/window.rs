//! Memory windows compared with registering and closing the same range, on the software NIC.
//!
//! The NIC pins pages, as hardware does. If it follows the application's mappings instead,
//! registering does nothing about pages, and the figures are for orientation only.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::sync::Arc;

use hmem::{
    Access, Addressing, Domain, DomainAttr, Hmem, MrMode, OwnedRegion, Type2Bind, Type2Kind,
    loopback::{Loopback, Memory, Progress},
    provider::{CompletionQueue, EndpointAttr},
};
use report::{
    Target,
    turns::{self, Turns},
};

const LEN: u64 = 1 << 20;
const STORE: Access = Access::RECV.union(Access::MW_BIND);
const LENT: Access = Access::REMOTE_READ;

fn domain(memory: Memory) -> Domain {
    let loopback = Loopback::builder().memory(memory).progress(Progress::ByHand).build();
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback.expect("a software NIC starts"))
        .build()
        .expect("host memory is always there");
    let mr_mode = MrMode::PROV_KEY;
    let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the mode is offered")
}

fn completion(cq: &Arc<dyn CompletionQueue>) {
    let mut out = Vec::with_capacity(1);
    while cq.read(&mut out, 1).expect("read completions") == 0 {}
    out.remove(0).result.expect("the request works");
}

/// Registers and closes borrowed pages, which a pinning NIC pins each time.
fn register_and_close(domain: &Domain, pages: &OwnedRegion<Vec<u8>>) {
    let range = pages.range();
    // SAFETY: the memory belongs to a region that outlives this one, and nobody transfers to it.
    let region = unsafe { domain.reg(range, LENT, 0, hmem::MrFlags::empty()) }.expect("register");
    region.close().expect("nothing is bound to it");
}

fn rows(memory: Memory, target: impl Fn() -> Target, names: [&'static str; 3]) -> Vec<Turns> {
    let domain = domain(memory);
    let cq = domain.open_cq(16).expect("open a completion queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    let region = domain.register(vec![1; LEN as usize], STORE).expect("register");
    let two = domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let one = domain.alloc_type_1_window().expect("allocate");
    let other = || register_and_close(&domain, &region);
    let mut tag = 0u8;
    let posted = || {
        tag = tag.wrapping_add(1);
        let addressing = Addressing::ZeroBased;
        let bind =
            Type2Bind { region: &region, offset: 0, len: LEN, access: LENT, addressing, tag };
        two.post_bind(&endpoint, &bind, 1).expect("post the bind");
        two.post_invalidate(&endpoint, 2).expect("post the invalidation");
        completion(&cq);
        completion(&cq);
    };
    let called = || {
        one.bind(&region, 0, LEN, LENT).expect("bind");
        one.unbind().expect("unbind");
    };
    let granted = || {
        let grant = region.grant(&endpoint, 0..LEN, LENT).expect("grant");
        grant.revoke().expect("revoke");
    };
    vec![
        turns::against(names[0], target(), posted, other),
        turns::against(names[1], target(), called, other),
        turns::against(names[2], target(), granted, other),
    ]
}

fn main() {
    let pinned = rows(
        Memory::Pinned,
        || Target::Ratio(0.2),
        [
            "type 2: bind + invalidate / register + close, 1 MiB pinned",
            "type 1: bind + unbind / register + close, 1 MiB pinned",
            "grant + revoke / register + close, 1 MiB pinned",
        ],
    );
    turns::print(pinned);
    let follow = rows(
        Memory::Follow,
        || Target::Orientation,
        [
            "type 2: bind + invalidate / register + close, pages not touched",
            "type 1: bind + unbind / register + close, pages not touched",
            "grant + revoke / register + close, pages not touched",
        ],
    );
    turns::print(follow);
}
