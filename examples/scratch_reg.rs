//! scratch
use hmem::{
    p2p::loopback::{Loopback, Progress},
    *,
};
fn main() {
    let n: u64 = std::env::args().nth(1).unwrap().parse().unwrap();
    let loopback = Loopback::builder().progress(Progress::ByHand).build().unwrap();
    let hmem = Hmem::builder().without_vendor_ifaces().provider(loopback).build().unwrap();
    let domain =
        hmem.domain("loopback", DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() }).unwrap();
    let buffer = vec![0u8; 4096];
    let range = AddressRange::of(&buffer);
    for i in 0..n {
        let r = unsafe { domain.reg(range, Access::REMOTE_READ | Access::REMOTE_WRITE, i, MrFlags::empty()) }
            .unwrap();
        r.close().unwrap();
    }
}
