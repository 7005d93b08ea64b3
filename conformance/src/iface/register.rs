//! Behaviours of the iface's memory when it is registered with the software NIC.

#![allow(unsafe_code, reason = "registers by address, and implements a counting iface")]

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    Access, Address, AddressRange, Allocation, CacheAttr, DeviceBuffer, Domain, DomainAttr, Error,
    ErrorKind, Iface, IfaceKind, MrMode, Path, Promise, Raw, Registry, RemoteKey, Result,
    iface::{
        Allocator, CopyEngine, Device, DmaBufExporter, Facet, HostRegistrar, InboundFlush, Ipc,
        MonitorSource, PeerMemoryExporter, SegmentMap,
    },
    path::P2pPolicy,
    provider::LiveObjects,
};
use hmem_iface_system::System;
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, RemapPolicy};

use super::{
    LEN, PARTS, assert_bytes, at, buffer, buffers, contents, is_missing, memory::part, need,
    pattern,
};
use crate::{
    stale::{DeviceMemory, Link, StaleCounts},
    trial::{Outcome, Skipped, assert_kind, skip},
};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

pub(super) fn part_of_an_allocation_is_reached_by_the_default_path(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    registered_by(iface, P2pPolicy::Enabled)
}

pub(super) fn part_of_an_allocation_is_reached_by_a_direct_path(iface: &Arc<dyn Iface>) -> Outcome {
    registered_by(iface, P2pPolicy::Required)
}

pub(super) fn part_of_an_allocation_is_reached_by_staged_copies(iface: &Arc<dyn Iface>) -> Outcome {
    registered_by(iface, P2pPolicy::Disabled)
}

/// Opens a domain of the software NIC, with host memory and the iface's memory.
fn open(iface: &Arc<dyn Iface>, p2p: P2pPolicy) -> Domain {
    let nic = Loopback::builder().needs(MrMode::VIRT_ADDR | MrMode::PROV_KEY).build();
    let attr = DomainAttr { p2p, ..DomainAttr::default() };
    Domain::open(&nic.expect("a software NIC"), registry(iface), selector(), attr)
        .expect("open a domain")
}

/// Returns a registry with the iface under test and the iface of host memory.
fn registry(iface: &Arc<dyn Iface>) -> Arc<Registry> {
    let mut registry = Registry::new();
    if iface.kind() != IfaceKind::SYSTEM {
        registry.add(Arc::new(System::new())).expect("add host memory");
    }
    registry.add(Arc::clone(iface)).expect("add the iface");
    Arc::new(registry)
}

fn selector() -> Arc<DefaultPathSelector> {
    Arc::new(DefaultPathSelector::new())
}

/// Tests writes and reads by peers on memory of each kind, in a domain with the policy `policy`.
fn registered_by(iface: &Arc<dyn Iface>, policy: P2pPolicy) -> Outcome {
    if iface.kind() == IfaceKind::SYSTEM && policy != P2pPolicy::Enabled {
        return skip("host memory has one path, whatever the policy for devices");
    }
    let domain = open(iface, policy);
    let (mut reached, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        // A kind of memory without a direct path has none for its first part.
        for (number, extent) in PARTS.into_iter().enumerate() {
            match moves_bytes(&domain, &buffer, extent, policy) {
                Ok(()) => reached = true,
                Err(why)
                    if why.kind() == ErrorKind::Unsupported
                        && policy == P2pPolicy::Required
                        && number == 0 =>
                {
                    refusals.push(format!("{}: {why}", buffer.allocation().kind.name()));
                    break;
                }
                Err(why) => panic!("register {extent:?} of {:?}: {why}", buffer.allocation()),
            }
        }
    }
    if !reached {
        refusals.dedup();
        return skip(format!("no direct path: {}", refusals.join("; ")));
    }
    assert_eq!(domain.live(), LiveObjects::default(), "a registration is left");
    Ok(())
}

/// Registers a part of a buffer. Asserts that the policy allows the path of the registration, and
/// that a write and a read by a peer move the right bytes.
fn moves_bytes(
    domain: &Domain,
    buffer: &DeviceBuffer,
    extent: (u64, u64),
    policy: P2pPolicy,
) -> Result<()> {
    let len = extent.1;
    let mut expected = pattern(1, LEN);
    buffer.write(0, &expected)?;
    // SAFETY: the buffer outlives the region, and nothing refers to its bytes.
    let memory = unsafe { Raw::new(part(buffer, extent), Promise::ReadWrite) };
    let region = domain.register(memory, REMOTE)?;
    let path = region.decision()?.path;
    let is_device = !buffer.allocation().kind.cpu_accessible();
    match policy {
        P2pPolicy::Required => assert_ne!(path, Path::Staged, "a staged path is not direct"),
        P2pPolicy::Disabled if is_device => assert_eq!(path, Path::Staged, "a direct path"),
        _ => {}
    }

    let link = Link::open(domain, len)?;
    let key = region.key()?;
    let bytes = pattern(2, len);
    assert_eq!(link.write(&key, 0, &bytes)?, len, "bytes written");
    let start = extent.0 as usize;
    expected[start..start + bytes.len()].copy_from_slice(&bytes);
    let what = format!("{len} bytes written to {start} over the {} path", path.name());
    assert_bytes(&contents(buffer), &expected, &what);

    link.local.write(0, &vec![0; len as usize])?;
    assert_eq!(link.read(&key, 0, len)?, len, "bytes read");
    let mut found = vec![0; len as usize];
    link.local.read(0, &mut found)?;
    assert_bytes(&found, &bytes, &format!("read by {}", path.name()));
    region.close()?;
    link.close()
}

/// Tests that the key of a part, as a peer receives it, reaches the first and the last byte of the
/// part and no byte around it.
pub(super) fn part_inside_a_page_is_reached_to_its_exact_ends(iface: &Arc<dyn Iface>) -> Outcome {
    let domain = open(iface, P2pPolicy::Enabled);
    let (offset, len) = PARTS[2];
    let link = Link::open(&domain, len + 1).expect("open an endpoint");
    for buffer in buffers(iface)? {
        let mut expected = pattern(3, LEN);
        buffer.write(0, &expected).expect("copy in");
        // SAFETY: the buffer outlives the region, and nothing refers to its bytes.
        let memory = unsafe { Raw::new(part(&buffer, (offset, len)), Promise::ReadWrite) };
        let region = domain.register(memory, REMOTE).map_err(Error::from).expect("register");
        let sent = region.key().expect("key").to_bytes();
        let key = RemoteKey::from_bytes(&sent).expect("the bytes of a key");
        for at in [0, len - 1] {
            link.write(&key, at, &[0xEE]).expect("write a byte at one end");
            expected[(offset + at) as usize] = 0xEE;
        }
        for (at, count) in [(len, 1), (len - 1, 2), (u64::MAX, 1), (u64::MAX, 2), (0, len + 1)] {
            let refused = link.write(&key, at, &vec![0xDD; count as usize]);
            let what = format!("{count} bytes at {at:#x} of a part of {len} bytes");
            assert_kind(&refused.expect_err(&what), ErrorKind::OutOfBounds, &what);
        }
        assert_bytes(&contents(&buffer), &expected, "writes to the ends of a part");
        region.close().map_err(Error::from).expect("close");
    }
    link.close().expect("close the endpoint");
    assert_eq!(domain.live(), LiveObjects::default(), "a registration is left");
    Ok(())
}

/// Tests that a cached registration is not used after its memory was freed. The registered pages
/// stay until the deregistration: the dma-buf keeps those of device memory, and the NIC pins those
/// of host memory. So a stale registration would move bytes of the freed memory.
pub(super) fn cached_registration_never_moves_bytes_of_freed_memory(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    need(&**iface, iface.monitor(), Facet::Monitor)?;
    need(&**iface, iface.dma_buf(), Facet::DmaBuf)?;
    let missing = |why: Error| {
        assert!(is_missing(&why), "look for stale registrations: {why}");
        Skipped(why.to_string())
    };
    let is_host = iface.kind() == IfaceKind::SYSTEM;
    let pages = if is_host { RemapPolicy::Pinned } else { RemapPolicy::Follow };
    let nic = Loopback::builder().needs(MrMode::VIRT_ADDR | MrMode::PROV_KEY).remap_policy(pages);
    let cache = CacheAttr::default().max_count(1024).max_bytes(1 << 30).merge(false);
    let attr = DomainAttr {
        p2p: P2pPolicy::Required,
        cache: Some(cache.without_monitors([])),
        ..DomainAttr::default()
    };
    let mut counts = StaleCounts::default();
    let opened = nic.build().and_then(|nic| {
        let domain = Domain::open(&nic, registry(iface), selector(), attr)?;
        Ok((domain, DeviceMemory::allocate(iface)?))
    });
    let (domain, mut memory) = opened.map_err(missing)?;
    // SAFETY: the NIC maps dma-bufs, which keep their pages, and pins host memory. Nothing else
    // accesses the memory.
    let ran = unsafe { counts.run(&domain, &mut memory, 64) };
    ran.map_err(missing)?;
    assert_eq!(counts.stale, 0, "a transfer moved bytes of freed memory: {counts:?}");
    if counts.reused == 0 || counts.hits == 0 {
        return skip(format!("no registration could be stale: {counts:?}"));
    }
    Ok(())
}

/// An iface that forwards to another iface and counts its queries.
#[derive(Debug)]
struct Counting {
    iface: Arc<dyn Iface>,
    queries: AtomicU64,
}

/// Defines methods without arguments that forward to the inner iface.
macro_rules! forward {
    ($($method:ident: $result:ty,)*) => {
        $(fn $method(&self) -> $result {
            self.iface.$method()
        })*
    };
}

// SAFETY: each answer and facet is that of the inner iface, or `None`.
unsafe impl Iface for Counting {
    forward! {
        kind: IfaceKind,
        name: &str,
        devices: Result<Vec<Device>>,
        address_span: Option<AddressRange>,
        has_identities: bool,
        allocator: Option<&dyn Allocator>,
        copy_engine: Option<&dyn CopyEngine>,
        dma_buf: Option<&dyn DmaBufExporter>,
        peer_memory: Option<&dyn PeerMemoryExporter>,
        host_registrar: Option<&dyn HostRegistrar>,
        ipc: Option<&dyn Ipc>,
        segments: Option<&dyn SegmentMap>,
        inbound_flush: Option<&dyn InboundFlush>,
        monitor: Option<&dyn MonitorSource>,
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.queries.fetch_add(1, Ordering::Relaxed);
        self.iface.query(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of `copy`, which is the inner iface's.
        unsafe { self.iface.copy(to, from, len) }
    }

    fn unavailable(&self, facet: Facet) -> Error {
        self.iface.unavailable(facet)
    }
}

pub(super) fn registration_queries_the_iface_once_per_end(iface: &Arc<dyn Iface>) -> Outcome {
    if iface.kind() == IfaceKind::SYSTEM {
        return skip("registrations of host memory need no query");
    }
    let counting = Arc::new(Counting { iface: Arc::clone(iface), queries: AtomicU64::new(0) });
    let domain = open(&(Arc::clone(&counting) as Arc<dyn Iface>), P2pPolicy::Enabled);
    let buffer = buffer(iface)?;
    let before = counting.queries.load(Ordering::Relaxed);
    // SAFETY: the buffer outlives the region, and nothing refers to its bytes.
    let memory = unsafe { Raw::new(part(&buffer, PARTS[2]), Promise::ReadWrite) };
    let region = domain.register(memory, REMOTE);
    let queries = counting.queries.load(Ordering::Relaxed) - before;
    region.expect("register").close().expect("close");
    let what = format!("{queries} queries for the two ends of a range at {}", at(&buffer, 0));
    assert!((1..=2).contains(&queries), "{what}");
    Ok(())
}
