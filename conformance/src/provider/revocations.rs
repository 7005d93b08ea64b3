//! Behaviours of regions whose dma-buf is revoked.

use std::{sync::Arc, thread};

use hmem_core::{
    AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, ErrorKind, Iface,
    MemoryRegion, RegionState, RoamingRegion, iface::AllocRequest, key_feed::PeerKeys,
    monitor::InvalidationCause, provider::Features,
};
use hmem_iface_system::Simulated;

use super::{
    case::Case,
    link::{CaseLink, Setup},
};
use crate::{
    control::Call,
    link::{LOCAL, REMOTE, raw, segment, wait_held},
    memory::Bytes,
    trial::{Outcome, skip},
};

/// Revokes the dma-bufs that were exported from `memory`. Returns the outcome that skips the
/// behaviour if the back end does not honour revocations.
pub(super) fn revoke(link: &CaseLink, memory: AddressRange) -> Outcome {
    let control = link.case.control.as_ref().expect("the behaviour needs control");
    match control.revoke(&link.device, memory.start()) {
        true => Ok(()),
        false => skip("the back end honours no revocations"),
    }
}

fn assert_revoked(region: &MemoryRegion) {
    assert_eq!(region.state(), RegionState::Revoked);
    let error = region.check().expect_err("a revoked region");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
    assert_eq!(error.context_value("cause"), Some("the exporter revoked the dma-buf"));
    assert!(error.remedy_text().is_some(), "{error:#}");
}

pub(super) fn revoked_region_refuses_all_accesses_and_closes(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let (memory, other) = (link.filled(&[7; 4096]), link.bytes(4096));
    let (region, kept) =
        (link.expose(memory.range(), REMOTE), link.expose(other.range(), REMOTE | LOCAL));
    let (key, kept_key) = (link.key(&region), link.key(&kept));
    link.assert_works(&key);
    region.check().expect("not revoked");
    let own = link.local(4096, LOCAL);
    let part = case.features.contains(Features::SUB_REGIONS).then(|| {
        let part = region.sub(memory.part(1024, 1024), REMOTE, link.fresh_key());
        let part = part.expect("a part of the region");
        link.target.make_usable(&part);
        let key = link.key(&part);
        (part, key)
    });
    revoke(&link, memory.range())?;
    let before = memory.all();
    link.assert_dead(&key, 0, ErrorKind::InvalidKey, "an access to revoked memory");
    if let Some((part, key)) = &part {
        link.assert_dead(key, 0, ErrorKind::InvalidKey, "an access to a part of revoked memory");
        assert_eq!(part.state(), RegionState::Revoked);
    }
    assert_revoked(&region);
    assert_eq!(memory.all(), before, "revoked memory changed");
    revoke(&link, own.bytes.range())?;
    let message = segment(own.bytes.range(), own.region.desc().ok());
    let (sent, _) = link.send(message, segment(other.range(), kept.desc().ok()));
    case.assert_refused(sent, ErrorKind::NoRegion, "a message from revoked memory");
    assert_eq!(kept.state(), RegionState::Enabled);
    link.assert_works(&kept_key);
    if let Some((part, _)) = part {
        part.close().expect("close a part of a revoked region");
    }
    region.close().expect("close a revoked region");
    let again = link.expose(memory.range(), REMOTE);
    link.assert_works(&link.key(&again));
    drop((again, kept));
    assert_eq!(link.live().regions, 0, "a revoked region leaves nothing");
    Ok(())
}

pub(super) fn revocation_waits_for_transfers_in_flight(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 4096]);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.push(&key, 0, &[0x11]).expect("the local buffer is registered before the gate");
    let other = link.bytes(4096);
    drop(link.expose(other.range(), REMOTE));
    revoke(&link, other.range())?;
    thread::scope(|scope| {
        // Dropped before the scope ends, so that a failure releases the held call.
        let gate = link.hold(Call::Transfer);
        let transfer = scope.spawn(|| link.push(&key, 0, &[0x22; 4096]));
        wait_held(&gate);
        let revocation = scope.spawn(|| {
            let outcome = revoke(&link, memory.range());
            (outcome, memory.all())
        });
        // Leaves time in which a revocation that does not wait for the transfer would return.
        for _ in 0..200 {
            thread::yield_now();
        }
        assert!(!revocation.is_finished(), "revoked in the middle of a transfer");
        gate.release();
        transfer.join().expect("the transfer's thread").expect("the transfer had begun");
        let (outcome, bytes) = revocation.join().expect("the revoking thread");
        assert_eq!(bytes, [0x22; 4096], "bytes at the end of the revocation");
        outcome
    })
}

pub(super) fn cache_drops_revoked_memory(case: &Case) -> Outcome {
    let mut setup = Setup::of(case);
    setup.target.cache = Some(CacheAttr::default());
    let link = setup.open();
    let cache = link.target.domain.cache().expect("a cache");
    let (memory, other) = (link.bytes(4096), link.bytes(4096));
    let get = |memory: &Bytes| cache.get(raw(memory.range()), REMOTE).expect("register");
    let (old, kept) = (get(&memory), get(&other));
    let key = link.key(&old);
    link.assert_works(&key);
    revoke(&link, memory.range())?;
    assert_revoked(&old);
    link.assert_dead(&key, 0, ErrorKind::InvalidKey, "an access to revoked memory");
    let new = get(&memory);
    assert_eq!(new.state(), RegionState::Enabled, "a hit of revoked memory");
    link.assert_works(&link.key(&new));
    drop((get(&other), get(&memory)));
    let counts = cache.statistics();
    assert_eq!((counts.registrations, counts.hits), (3, 2), "{counts:?}");
    assert_eq!(counts.invalidations(InvalidationCause::Revoke), 1, "{counts:?}");
    drop((old, new, kept));
    cache.reclaim();
    assert_eq!(link.live().regions, 2, "the revoked region is deregistered");
    Ok(())
}

pub(super) fn revoked_memory_is_registered_again_with_a_new_key(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let iface: Arc<dyn Iface> = Arc::<Simulated>::clone(&link.device);
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("allocate");
    let at = buffer.allocation().range;
    let region = link.target.register(buffer, REMOTE);
    let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
    let (mut subscription, mut peer) = (region.feed().subscribe(), PeerKeys::default());
    peer.apply(&subscription.next().expect("generation 1")).expect("apply");
    revoke(&link, at)?;
    assert_revoked(region.region().expect("registered"));
    assert_eq!(region.reopen(&link.target.domain).expect("register again"), 2);
    link.target.make_usable(region.region().expect("registered"));
    peer.apply(&subscription.next().expect("generation 2")).expect("apply");
    let segments = peer.segments(&case.attr.nic.name, 0..4096, 2).expect("the new key");
    link.push(segments[0].key, 0, &[6; 64]).expect("write");
    assert_eq!(link.live().regions, 1, "the revoked region is closed");
    Ok(())
}
