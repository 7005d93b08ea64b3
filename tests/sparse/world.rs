//! A simulated device with reserved addresses, software NICs, and peers that follow a key feed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hmem::{
    Access, AddressRange, Allocation, DeviceId, Domain, DomainAttr, Endpoint, Errno, Hmem,
    IfaceExt, Promise, Raw, RegionSlice, RemoteKey, Result, SparseRegion,
    key_feed::{AppliedUpdate, KeySubscription, PeerKeys},
    loopback::{Faults, Loopback, NicCall},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    system::{AddressReuse, FreeDetection, Simulated},
    transfer::{PeerId, RemoteSegment},
};

/// The length of one mapping. Offsets are given in steps.
pub(crate) const STEP: usize = 64 << 10;
/// The NICs of the regions.
pub(crate) const NICS: [&str; 2] = ["nic0", "nic1"];
/// The NIC of the peers.
const PEER: &str = "peer";
/// A limit for waits that must end.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Returns bytes that depend on the seed. Adjacent pages differ.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    hmem_conformance::link::pattern(seed, len as u64)
}

/// Locks a mutex, also after another thread's panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct World {
    pub(crate) domains: Vec<Domain>,
    hmem: Hmem,
    pub(crate) device: Arc<Simulated>,
    pub(crate) faults: Faults,
    addresses: AddressRange,
    mapped: Mutex<BTreeMap<u64, Allocation>>,
}

impl World {
    /// Reserves addresses of some steps. The policy of the domains forbids staged copies.
    pub(crate) fn new(detection: FreeDetection, steps: u64) -> Self {
        let device = Simulated::builder().free_detection(detection);
        let device = device.address_reuse(AddressReuse::JustFreed).build().expect("a device");
        let (device, faults) = (Arc::new(device), Faults::new());
        faults.start_counting();
        let nics = Loopback::builder().faults(&faults).nic(NICS[0]).nic(NICS[1]).nic(PEER);
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device) as _)
            .provider(nics.build().expect("software NICs"))
            .build()
            .expect("build");
        let open = |nic: &str| {
            let p2p = P2pPolicy::Required;
            let attr = DomainAttr { nic: Some(nic.into()), p2p, ..DomainAttr::default() };
            hmem.domain("loopback", attr).expect("a domain")
        };
        let domains = NICS.map(open).into();
        let addresses = device.reserve(steps * STEP as u64).expect("reserve");
        Self { domains, hmem, device, faults, addresses, mapped: Mutex::default() }
    }

    pub(crate) fn addresses(&self) -> AddressRange {
        self.addresses
    }

    pub(crate) fn range(&self, step: u64, steps: u64) -> AddressRange {
        let step_len = STEP as u64;
        self.addresses.slice(step * step_len, steps * step_len).expect("inside")
    }

    /// Creates a region over the reserved addresses.
    pub(crate) fn region(&self, nics: &[&str]) -> SparseRegion {
        let named = |domain: &&Domain| nics.contains(&domain.provider_attr().nic.name.as_str());
        let domains: Vec<_> = self.domains.iter().filter(named).collect();
        // SAFETY: registrations keep the memory of parts allocated, and no reference into it
        // exists.
        let memory = unsafe { Raw::new(self.addresses, Promise::ReadWrite) };
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::WRITE;
        SparseRegion::new(&domains, memory, access).expect("a region")
    }

    /// Maps memory at a step, and fills it with the pattern of a seed.
    pub(crate) fn map(&self, step: u64, seed: u64) {
        let range = self.range(step, 1);
        let allocation = self.device.map(range, DeviceId(0)).expect("map");
        self.fill(step, &pattern(seed, STEP));
        assert!(lock(&self.mapped).insert(step, allocation).is_none());
    }

    fn fill(&self, step: u64, bytes: &[u8]) {
        // SAFETY: the memory is mapped until this thread unmaps it.
        unsafe { self.device.write(self.range(step, 1).start(), bytes) }.expect("write");
    }

    /// Returns the bytes of a step, as the device has them.
    pub(crate) fn content(&self, step: u64) -> Vec<u8> {
        let mut bytes = vec![0; STEP];
        // SAFETY: the memory is mapped until this thread unmaps it.
        unsafe { self.device.read(self.range(step, 1).start(), &mut bytes) }.expect("read");
        bytes
    }

    pub(crate) fn unmap(&self, step: u64) {
        let allocation = lock(&self.mapped).remove(&step).expect("memory");
        // SAFETY: only registrations use the memory, and they keep it.
        unsafe { self.device.free(&allocation) }.expect("unmap");
    }

    pub(crate) fn withdraw_and_unmap(&self, region: &SparseRegion, step: u64) {
        region.withdraw(self.range(step, 1)).expect("withdraw");
        self.unmap(step);
    }

    /// Unmaps everything, and checks that the device and the NICs have nothing left.
    pub(crate) fn unmap_all(&self) {
        let steps: Vec<_> = lock(&self.mapped).keys().copied().collect();
        steps.into_iter().for_each(|step| self.unmap(step));
        assert_eq!(self.live_regions(), 0);
        let stats = self.device.stats();
        assert_eq!((stats.live_allocations, stats.live_exports, stats.subscriptions), (0, 0, 0));
    }

    /// Creates a region whose first step is a part, and maps two more steps. The second NIC refuses
    /// to register the second of these.
    pub(crate) fn region_with_a_refused_part(&self) -> SparseRegion {
        let region = self.region(&NICS);
        self.map(0, 0);
        region.refresh().expect("refresh");
        (1..3).for_each(|step| self.map(step, step));
        self.faults.fail_nth(NicCall::Register, 4, Errno(12));
        region
    }

    /// Returns the number of regions of all NICs but the peers'.
    pub(crate) fn live_regions(&self) -> u64 {
        self.domains.iter().map(|domain| domain.live().regions).sum()
    }

    /// Returns the number of registrations with NICs since the world was made.
    pub(crate) fn registrations(&self) -> u64 {
        self.faults.calls(NicCall::Register)
    }
}

/// A peer that follows the keys of a region on one NIC.
pub(crate) struct Peer {
    keys: PeerKeys,
    updates: KeySubscription,
    nic: &'static str,
    queue: Arc<dyn CompletionQueue>,
    from: Endpoint,
    _to: Endpoint,
    peer: PeerId,
    back: (Endpoint, Arc<dyn CompletionQueue>, PeerId),
    near: Domain,
}

impl Peer {
    pub(crate) fn of(world: &World, region: &SparseRegion, nic: &'static str) -> Self {
        let attr = DomainAttr { nic: Some(PEER.into()), ..DomainAttr::default() };
        let near = world.hmem.domain("loopback", attr).expect("a domain");
        let far = world.domains.iter().find(|domain| domain.provider_attr().nic.name == nic);
        let far = far.expect("a NIC of the region");
        let open = |domain: &Domain| {
            let queue = domain.open_cq(8).expect("a queue");
            (domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint"), queue)
        };
        let ((from, queue), (to, far_queue)) = (open(&near), open(far));
        let peer = from.resolve(&to.name()).expect("resolve");
        let (sender, sender_queue) = open(far);
        let back = sender.resolve(&from.name()).expect("resolve");
        drop(far_queue);
        Self {
            keys: PeerKeys::default(),
            updates: region.subscribe(),
            nic,
            queue,
            from,
            _to: to,
            peer,
            back: (sender, sender_queue, back),
            near,
        }
    }

    /// Applies the next update, if there is one.
    pub(crate) fn update(&mut self) -> Option<AppliedUpdate> {
        let update = self.updates.next()?;
        Some(self.keys.apply(&update).expect("an update"))
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.updates.is_ended()
    }

    /// Returns the key of the part that begins at a step.
    pub(crate) fn key(&self, step: u64) -> RemoteKey {
        let part = self.keys.parts().find(|(at, _)| at.start == step * STEP as u64);
        part.and_then(|(_, keys)| keys.of(self.nic)).expect("a part").clone()
    }

    /// Reads a step that the owner named in a generation.
    pub(crate) fn read(&self, step: u64, generation: u64) -> Result<Vec<u8>> {
        let (from, to) = (step * STEP as u64, (step + 1) * STEP as u64);
        let remote = self.keys.segments(self.nic, from..to, generation)?;
        self.read_into(vec![0; STEP], &remote)
    }

    /// Writes to the end of a step that the owner named in a generation.
    pub(crate) fn write_end(&self, step: u64, generation: u64, bytes: &[u8]) -> Result<()> {
        let end = (step + 1) * STEP as u64;
        let range = end - bytes.len() as u64..end;
        let remote = self.keys.segments(self.nic, range, generation)?;
        self.write(bytes, &remote)
    }

    pub(crate) fn read_by(&self, key: &RemoteKey, len: usize) -> Result<Vec<u8>> {
        self.read_into(vec![0; len], &[key.slice(0, len as u64)?])
    }

    pub(crate) fn write_by(&self, key: &RemoteKey, bytes: &[u8]) -> Result<()> {
        self.write(bytes, &[key.slice(0, bytes.len() as u64)?])
    }

    fn read_into(&self, bytes: Vec<u8>, remote: &[RemoteSegment<'_>]) -> Result<Vec<u8>> {
        let len = bytes.len() as u64;
        let into = self.near.register(bytes, Access::READ)?;
        self.from.read(&[into.slice(0, len)?], remote, self.peer, 1)?;
        wait(&self.queue)?;
        Ok(into.close()?)
    }

    fn write(&self, bytes: &[u8], remote: &[RemoteSegment<'_>]) -> Result<()> {
        let from = self.near.register(bytes.to_vec(), Access::WRITE)?;
        self.from.write(&[from.slice(0, bytes.len() as u64)?], remote, self.peer, 2)?;
        wait(&self.queue)
    }

    /// Receives bytes that the region's NIC writes from a slice of the region.
    pub(crate) fn receive_from(&self, slice: RegionSlice) -> Result<Vec<u8>> {
        let into = self.near.register(vec![0; 28], Access::REMOTE_WRITE)?;
        let key = into.key()?;
        let (sender, queue, peer) = &self.back;
        sender.write(&[slice], &[key.slice(0, 28)?], *peer, 3)?;
        wait(queue)?;
        Ok(into.close()?)
    }
}

fn wait(queue: &Arc<dyn CompletionQueue>) -> Result<()> {
    let mut done = Vec::new();
    let count = queue.wait(&mut done, 1, LONG)?;
    assert_eq!(count, 1, "a transfer that does not end");
    done.remove(0).result.map(drop)
}
