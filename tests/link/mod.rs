//! A link between two domains of one software NIC, over host memory or a simulated device.
#![allow(dead_code)] // Each test binary uses a part.

use std::sync::Arc;

use hmem::{
    DomainAttr, Hmem, Iface, MrMode,
    loopback::{Builder, Loopback},
    path::P2pPolicy,
    system::Simulated,
};
use hmem_conformance::link::{Link, LinkSide};

/// The memory that the peers of a link use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    /// Memory of a simulated device that NICs reach by dma-buf.
    Device,
    /// Memory of a simulated device that NICs reach by staged copies.
    Staged,
}

impl Memory {
    pub(crate) const ALL: [Self; 3] = [Self::Host, Self::Device, Self::Staged];
}

/// A link, and the simulated device of its library.
pub(crate) struct Opened {
    pub(crate) link: Link,
    pub(crate) device: Arc<Simulated>,
}

/// Opens a link whose NIC needs the mode bits `mode`.
pub(crate) fn open(nic: Builder, mode: MrMode, memory: Memory) -> Opened {
    let device = Arc::new(Simulated::builder().build().expect("a simulated device"));
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(&device) as Arc<dyn Iface>)
        .provider(nic.needs(mode).build().expect("a software NIC"))
        .build()
        .expect("the ifaces start");
    let p2p = if memory == Memory::Staged { P2pPolicy::Disabled } else { P2pPolicy::Enabled };
    let [initiator, target] = [(); 2].map(|()| {
        let attr = DomainAttr { mr_mode: mode, hmem: true, p2p, ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("a domain");
        LinkSide::open(domain, true, None).expect("an endpoint")
    });
    let iface = (memory != Memory::Host).then(|| Arc::clone(&device) as Arc<dyn Iface>);
    Opened { link: Link::connect(initiator, target, iface, false), device }
}

/// Opens a link over host memory, without mode bits.
pub(crate) fn plain() -> Link {
    open(Loopback::builder(), MrMode::empty(), Memory::Host).link
}
