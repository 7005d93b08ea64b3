//! Sparse regions over memory that an application maps by hand (VMM). The driver lists the
//! mappings.

use std::time::Duration;

use hmem::{
    AddressRange, ErrorKind, Iova, Path, RemoteKey, Result, SparseRegion,
    cuda::CudaMonitorKind,
    key_feed::{KeySubscription, PeerKeys},
    path::P2pPolicy,
    provider::{Imports, Nic},
};
use hmem_fake_cuda::Profile;

use crate::{
    cache::{MONITORS, bytes_of},
    link::{IMPORTS, Link, REMOTE, not_over_a_gpu, raw},
    mapped::{Mapper, STEP, each},
};

/// A limit for waits that must end.
const LONG: Duration = Duration::from_secs(60);

/// A region over the addresses of a mapper, and a peer that follows its keys.
struct Followed<'a> {
    mapper: &'a Mapper<'a>,
    region: SparseRegion,
    updates: KeySubscription,
    keys: PeerKeys,
    nic: Nic,
}

impl<'a> Followed<'a> {
    fn new(mapper: &'a Mapper<'a>, steps: u64) -> Self {
        let domain = &mapper.link.domain;
        // SAFETY: registrations keep the memory of parts allocated, and no reference into it
        // exists.
        let memory = unsafe { raw(mapper.range(0, steps)) };
        let region = SparseRegion::new(&[domain], memory, REMOTE).expect("a region");
        let (updates, keys) = (region.subscribe(), PeerKeys::default());
        let nic = domain.provider_attr().nic.clone();
        Self { mapper, region, updates, keys, nic }
    }

    /// Registers what is mapped, and lets the peer apply the update.
    fn refresh(&mut self) -> u64 {
        let generation = self.region.refresh().expect("refresh");
        self.update();
        generation
    }

    fn update(&mut self) {
        if let Some(update) = self.updates.next() {
            self.keys.apply(&update).expect("an update");
        }
    }

    fn ranges(&self) -> Vec<AddressRange> {
        self.region.parts().into_iter().map(|part| part.range).collect()
    }

    /// Returns the key of the part that begins at a step.
    fn key(&self, step: u64) -> RemoteKey {
        let part = self.keys.parts().find(|(at, _)| at.start == step * STEP);
        part.and_then(|(_, keys)| keys.of(&self.nic.name)).expect("a part").clone()
    }

    /// Reads the first bytes of a step that was named in a generation.
    fn read(&self, step: u64, generation: u64) -> Result<[u8; 16]> {
        let offsets = step * STEP..step * STEP + 16;
        let segments = self.keys.segments(&self.nic.name, offsets, generation)?;
        let Iova(address) = segments[0].address;
        let offset = address - segments[0].key.base().0;
        self.read_by(segments[0].key, offset)
    }

    fn read_by(&self, key: &RemoteKey, offset: u64) -> Result<[u8; 16]> {
        Ok(self.mapper.link.get(key, offset, 16)?.try_into().expect("16 bytes"))
    }
}

/// LIFE-02
#[test]
fn mappings_become_parts_and_unchanged_ones_keep_their_keys() {
    each(8, |mapper, monitor| {
        let mut peer = Followed::new(mapper, 8);
        assert!(peer.region.parts().is_empty());
        // A hole is before, between and after the mappings. The second mapping has two steps.
        mapper.map_new(1, 1);
        mapper.mark(1, 1);
        let handle = mapper.create(2);
        mapper.map(3, 2, handle);
        mapper.release(handle);
        mapper.mark(3, 3);
        mapper.mark(4, 4);
        let first = peer.refresh();
        assert_eq!(peer.ranges(), [mapper.range(1, 1), mapper.range(3, 2)], "{monitor}");
        assert!(peer.region.parts().iter().all(|part| part.watched), "{monitor}");
        for (step, mark) in [(1, 1), (3, 3), (4, 4)] {
            assert_eq!(peer.read(step, first).expect("mapped"), bytes_of(mark), "{monitor}");
        }
        let keys = [1, 3].map(|step| peer.key(step));
        mapper.map_new(2, 1);
        mapper.mark(2, 2);
        let second = peer.refresh();
        assert_eq!([1, 3].map(|step| peer.key(step)), keys, "{monitor}");
        assert_eq!(peer.read(2, second).expect("added"), bytes_of(2), "{monitor}");
        for hole in [0, 5, 7] {
            let none = peer.read(hole, second).expect_err("a hole");
            assert_eq!(none.kind(), ErrorKind::OutOfBounds, "{monitor}, step {hole}");
        }
        peer.region.close().map_err(hmem::Error::from).expect("close");
        mapper.unmap(1, 1);
        mapper.unmap(2, 1);
        mapper.unmap(3, 2);
    });
}

/// LIFE-03
///
/// The fake driver gives the next memory the handle of freed memory.
#[test]
fn memory_that_was_withdrawn_and_replaced_has_other_keys() {
    each(2, |mapper, monitor| {
        let mut peer = Followed::new(mapper, 2);
        mapper.map_new(0, 1);
        mapper.mark(0, 100);
        mapper.map_new(1, 1);
        let mut named = peer.refresh();
        for round in 101..120 {
            let old = peer.key(0);
            peer.region.withdraw(mapper.range(0, 1)).expect("withdraw");
            mapper.unmap(0, 1);
            mapper.map_new(0, 1);
            mapper.mark(0, round);
            let closed = peer.read_by(&old, 0).expect_err("the old key");
            assert_eq!(closed.kind(), ErrorKind::InvalidKey, "{monitor}");
            let now = peer.refresh();
            let stale = peer.read(0, named).expect_err("named before the change");
            assert_eq!(stale.kind(), ErrorKind::InvalidKey, "{monitor}");
            assert_eq!(peer.read(0, now).expect("read"), bytes_of(round), "{monitor}");
            named = now;
        }
        drop(peer);
        mapper.unmap(0, 2);
    });
}

/// LIFE-03
#[test]
fn memory_that_was_replaced_without_a_word_is_never_reached_by_an_old_key() {
    each(2, |mapper, monitor| {
        let mut peer = Followed::new(mapper, 2);
        (0..2).for_each(|step| mapper.map_new(step, 1));
        mapper.mark(0, 1);
        mapper.mark(1, 2);
        let first = peer.refresh();
        let old = peer.key(0);
        let decision = &peer.region.parts()[0].decisions[0];
        let is_dma_buf = decision.path == Path::DmaBuf;
        let mut updates = peer.region.subscribe();
        updates.next().expect("the first generation");
        mapper.unmap(0, 1);
        if monitor == CudaMonitorKind::Hooks {
            // The hook tells the region's thread, which withdraws the part.
            updates.wait(LONG).expect("a generation without the part");
            assert_eq!(peer.ranges(), [mapper.range(1, 1)]);
        }
        mapper.map_new(0, 1);
        mapper.mark(0, 3);
        // Only a dma-buf keeps the old memory. Other paths reach it by its address.
        if is_dma_buf && let Ok(read) = peer.read_by(&old, 0) {
            assert_eq!(read, bytes_of(1), "{monitor}: the registration keeps the old memory");
        }
        let second = peer.refresh();
        let closed = peer.read_by(&old, 0).expect_err("the old key");
        assert_eq!(closed.kind(), ErrorKind::InvalidKey, "{monitor}");
        assert_eq!(peer.read(0, first).expect_err("changed").kind(), ErrorKind::InvalidKey);
        assert_eq!(peer.read(0, second).expect("read"), bytes_of(3), "{monitor}");
        assert_eq!(peer.read(1, first).expect("unchanged"), bytes_of(2), "{monitor}");
        drop(peer);
        mapper.unmap(0, 2);
    });
}

/// LIFE-03
#[test]
fn peer_memory_that_no_hook_watches_is_refused() {
    if not_over_a_gpu("the software NIC cannot read a GPU's memory by its address") {
        return;
    }
    for monitor in MONITORS {
        let imports = Imports { dma_buf: false, peer_memory: true, ..IMPORTS };
        let link = Link::cached(Profile::default(), imports, P2pPolicy::Required, *monitor);
        let mapper = Mapper::new(&link, 1);
        mapper.map_new(0, 1);
        mapper.mark(0, 1);
        let mut peer = Followed::new(&mapper, 1);
        if *monitor == CudaMonitorKind::Hooks {
            let generation = peer.refresh();
            assert_eq!(peer.read(0, generation).expect("read"), bytes_of(1));
        } else {
            let error = peer.region.refresh().expect_err("nothing would show the end of the pin");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(peer.ranges().is_empty());
        }
        drop(peer);
        mapper.unmap(0, 1);
    }
}

/// LIFE-02
#[test]
fn announced_part_may_have_several_mappings() {
    each(3, |mapper, monitor| {
        let mut peer = Followed::new(mapper, 3);
        for step in 0..3 {
            mapper.map_new(step, 1);
            mapper.mark(step, 30 + step as u32);
        }
        let generation = peer.region.set_parts(&[mapper.range(0, 3)]).expect("announce");
        peer.update();
        assert_eq!(peer.ranges(), [mapper.range(0, 3)], "{monitor}");
        for step in 0..3 {
            let read = peer.read(step, generation).expect("read");
            assert_eq!(read, bytes_of(30 + step as u32), "{monitor}");
        }
        // A change of one mapping is a change of the part.
        let old = peer.key(0);
        mapper.unmap(1, 1);
        mapper.map_new(1, 1);
        mapper.mark(1, 41);
        let now = peer.region.set_parts(&[mapper.range(0, 3)]).expect("announce");
        peer.update();
        let closed = peer.read_by(&old, 0).expect_err("the old key");
        assert_eq!(closed.kind(), ErrorKind::InvalidKey, "{monitor}");
        for (step, mark) in [(0, 30), (1, 41), (2, 32)] {
            assert_eq!(peer.read(step, now).expect("read"), bytes_of(mark), "{monitor}");
        }
        drop(peer);
        mapper.unmap(0, 3);
    });
}
