//! A KV cache that sleeps and wakes while a peer reads it.
//!
//! The engine reserves addresses for its cache and maps memory for each block, as PyTorch's
//! expandable segments and the sleep mode of inference engines do. To sleep, it withdraws the
//! blocks and unmaps their memory. To wake, it maps new memory at the old addresses. One
//! [`SparseRegion`] lasts through all of this, and its key feed hands the peer each new version of
//! the keys.
//!
//! The peer reads blocks all the time. Each read returns the bytes of a block that the engine has
//! named, or fails with a typed error because the memory of the block has gone. Engine and peer are
//! threads of one process, since the software NIC connects only domains of one process. Between
//! processes, the application sends the updates of the feed and the names of the blocks over a
//! channel of its own. The device is the simulated device.
//!
//! ```text
//! cargo run --example kv_cache_sleep
//! ```

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use hmem::{
    Access, AddressRange, Allocation, DeviceId, Domain, DomainAttr, Endpoint, ErrorKind, Hmem,
    IfaceExt, Promise, Raw, SparseRegion,
    key_feed::{KeySubscription, PeerKeys},
    loopback::Loopback,
    provider::{CompletionQueue, EndpointAttr},
    system::Simulated,
    transfer::{EndpointName, PeerId},
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The length of a block in bytes.
const BLOCK: u64 = 64 << 10;
/// The number of blocks for which the engine has addresses.
const BLOCKS: u64 = 8;
/// The number of times that the engine sleeps and wakes.
const CYCLES: u64 = 12;
/// The NIC of the engine, and that of the peer.
const NICS: [&str; 2] = ["nic0", "nic1"];

/// Blocks that the engine has named to its peer.
#[derive(Clone, Copy)]
struct Named {
    /// The generation of the key feed that has keys for all of the named blocks.
    generation: u64,
    /// The number of the engine's cycle. The bytes of a block differ from cycle to cycle.
    cycle: u64,
    /// The number of named blocks. They are the first blocks of the cache.
    count: u64,
}

/// The messages from the engine to the peer.
#[derive(Default)]
struct Messages {
    named: Mutex<Option<Named>>,
    ended: AtomicBool,
}

/// Counts of the peer's reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reads {
    /// Reads that returned the named bytes.
    pub(crate) verified: u64,
    /// Reads that were refused because the memory of the block had gone.
    pub(crate) refused: u64,
}

/// Returns the bytes of a block in one cycle.
fn content(cycle: u64, block: u64) -> Vec<u8> {
    (0..BLOCK).map(|at| (at * 31 + cycle * 97 + block * 59 + (at >> 8) * 7) as u8).collect()
}

/// The engine's cache: reserved addresses, of which the first blocks have memory.
struct Cache<'a> {
    device: &'a Simulated,
    reserved: AddressRange,
    region: SparseRegion,
    mapped: Vec<Allocation>,
}

impl<'a> Cache<'a> {
    fn new(device: &'a Simulated, domain: &Domain) -> Result<Self, Failure> {
        let reserved = device.reserve(BLOCKS * BLOCK)?;
        // SAFETY: the cache withdraws memory in this range before it unmaps the memory, and has no
        // reference into it.
        let memory = unsafe { Raw::new(reserved, Promise::ReadWrite) };
        let region = SparseRegion::new(&[domain], memory, Access::REMOTE_READ)?;
        Ok(Self { device, reserved, region, mapped: Vec::new() })
    }

    /// Maps memory for the next block, and fills it.
    fn grow(&mut self, cycle: u64) -> Result<(), Failure> {
        let number = self.mapped.len() as u64;
        let block = self.reserved.slice(number * BLOCK, BLOCK).ok_or("the cache is full")?;
        self.mapped.push(self.device.map(block, DeviceId(0))?);
        // SAFETY: the block has memory until this cache unmaps it.
        unsafe { self.device.write(block.start(), &content(cycle, number)) }?;
        Ok(())
    }

    /// Withdraws all blocks from the region, and unmaps them. No peer can reach the blocks once
    /// `withdraw` has returned.
    fn sleep(&mut self) -> Result<(), Failure> {
        self.region.withdraw(self.reserved)?;
        for block in self.mapped.drain(..) {
            // SAFETY: the block was mapped by `grow`, and its registration is closed.
            unsafe { self.device.free(&block) }?;
        }
        Ok(())
    }
}

/// Runs all cycles of the engine: the cache wakes, grows and sleeps in each cycle.
fn run_engine(mut cache: Cache<'_>, messages: &Messages) -> Result<(), Failure> {
    for cycle in 0..CYCLES {
        for count in 1..=2 + cycle % (BLOCKS - 1) {
            cache.grow(cycle)?;
            let generation = cache.region.refresh()?;
            *messages.named.lock().expect("no panic") = Some(Named { generation, cycle, count });
            thread::sleep(Duration::from_millis(1));
        }
        println!("cycle {cycle}: {} blocks", cache.region.parts().len());
        cache.sleep()?;
    }
    cache.region.close().map_err(hmem::Error::from)?;
    Ok(cache.device.unreserve(cache.reserved)?)
}

/// The peer: an endpoint, and the reading end of the key feed.
struct Peer {
    updates: KeySubscription,
    keys: PeerKeys,
    domain: Domain,
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    engine: PeerId,
}

impl Peer {
    fn open(hmem: &Hmem, updates: KeySubscription, engine: &EndpointName) -> Result<Self, Failure> {
        let domain = open(hmem, NICS[1])?;
        let queue = domain.open_cq(16)?;
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
        let engine = endpoint.resolve(engine)?;
        Ok(Self { updates, keys: PeerKeys::default(), domain, queue, endpoint, engine })
    }

    /// Reads block number `block`. The engine named the block together with `generation`.
    fn read(&self, block: u64, generation: u64) -> hmem::Result<Vec<u8>> {
        let offsets = block * BLOCK..(block + 1) * BLOCK;
        let from = self.keys.segments(NICS[0], offsets, generation)?;
        let into = self.domain.register(vec![0; BLOCK as usize], Access::READ)?;
        self.endpoint.read(&[into.slice(0, BLOCK)?], &from, self.engine, 1)?;
        let mut done = Vec::new();
        self.queue.wait(&mut done, 1, Duration::MAX)?;
        for completion in done {
            completion.result?;
        }
        Ok(into.close()?)
    }

    /// Reads the named blocks again and again until the engine has ended, and checks every byte.
    fn run(mut self, messages: &Messages) -> Result<Reads, Failure> {
        let mut reads = Reads::default();
        while !messages.ended.load(Ordering::Acquire) {
            let Some(named) = *messages.named.lock().expect("no panic") else { continue };
            if let Some(update) = self.updates.next() {
                self.keys.apply(&update)?;
            }
            for block in 0..named.count {
                match self.read(block, named.generation) {
                    Ok(bytes) if bytes == content(named.cycle, block) => reads.verified += 1,
                    Ok(_) => return Err(format!("block {block} has other bytes").into()),
                    // The memory has gone, or other memory has its addresses.
                    Err(error) if is_refusal(error.kind()) => reads.refused += 1,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(reads)
    }
}

/// Returns true if the error of a read means that the memory of the block has gone. If the peer's
/// keys are newer than the generation of the block, the peer's own lookup fails with `InvalidKey`
/// or `OutOfBounds`. If the peer's keys are out of date, the NIC refuses the read with
/// `InvalidKey`.
fn is_refusal(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::InvalidKey | ErrorKind::OutOfBounds)
}

fn open(hmem: &Hmem, nic: &str) -> hmem::Result<Domain> {
    hmem.domain("loopback", DomainAttr { nic: Some(nic.into()), ..DomainAttr::default() })
}

pub(crate) fn run() -> Result<Reads, Failure> {
    let device = Arc::new(Simulated::builder().build()?);
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(&device) as _)
        .provider(Loopback::builder().nic(NICS[0]).nic(NICS[1]).build()?)
        .build()?;
    let domain = open(&hmem, NICS[0])?;
    let queue = domain.open_cq(16)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
    let cache = Cache::new(&device, &domain)?;
    let peer = Peer::open(&hmem, cache.region.subscribe(), &endpoint.name())?;
    let messages = Messages::default();
    let reads = thread::scope(|scope| {
        let reading = scope.spawn(|| peer.run(&messages));
        let result = run_engine(cache, &messages);
        messages.ended.store(true, Ordering::Release);
        let reads = reading.join().expect("the peer does not panic");
        result.and(reads)
    })?;
    println!("{} reads verified, {} refused", reads.verified, reads.refused);
    Ok(reads)
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<(), Failure> {
    run().map(|_| ())
}
