//! Moves blocks of a KV cache from the device of one node to that of another.
//!
//! The prefill node registers its cache in device memory and sends one key over a TCP connection.
//! The decode node then reads the blocks that it needs, in any order, without the prefill node's
//! help. Both nodes are threads of one process, since the software NIC connects only domains of one
//! process. The device is the simulated device.
//!
//! ```text
//! cargo run --example kv_cache_transfer
//! ```

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint, Error, Hmem,
    RemoteKey,
    iface::AllocRequest,
    loopback::Loopback,
    provider::{CompletionQueue, EndpointAttr},
    system::{SIMULATED, Simulated},
    transfer::{EndpointName, PeerId},
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The length of a block in bytes, for example 16 tokens of one layer.
const BLOCK: u64 = 16 << 10;
/// The number of blocks in the prefill node's cache.
const BLOCKS: u64 = 256;
/// The number of blocks that the decode node reads.
const WANTED: u64 = 100;
/// The number of reads in flight at once.
const IN_FLIGHT: u64 = 16;

/// A node's connection to its peer: TCP for control, an endpoint for the blocks.
struct Link {
    control: TcpStream,
    domain: Domain,
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    peer: PeerId,
}

impl Link {
    fn open(hmem: &Hmem, mut control: TcpStream) -> Result<Self, Failure> {
        let domain = hmem.domain("loopback", DomainAttr::default())?;
        // The queue has room for the requests of both directions.
        let depth = IN_FLIGHT as usize;
        let queue = domain.open_cq(2 * depth)?;
        let endpoint =
            domain.open_endpoint(&EndpointAttr { depth, ..EndpointAttr::new(&queue) })?;
        send(&mut control, &endpoint.name().0)?;
        let peer = endpoint.resolve(&EndpointName(receive(&mut control)?))?;
        Ok(Self { control, domain, queue, endpoint, peer })
    }
}

/// Sends the length of some bytes, and then the bytes.
fn send(control: &mut TcpStream, bytes: &[u8]) -> Result<(), Failure> {
    control.write_all(&u32::try_from(bytes.len())?.to_le_bytes())?;
    Ok(control.write_all(bytes)?)
}

fn receive(control: &mut TcpStream) -> Result<Vec<u8>, Failure> {
    let mut len = [0; 4];
    control.read_exact(&mut len)?;
    let mut bytes = vec![0; u32::from_le_bytes(len).min(1 << 20) as usize];
    control.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Allocates memory of a device for a number of blocks.
fn allocate(hmem: &Hmem, device: u32, blocks: u64) -> Result<DeviceBuffer, Error> {
    let request = AllocRequest {
        len: blocks * BLOCK,
        device: DeviceId(device),
        kind: AllocationKind::Device,
    };
    DeviceBuffer::allocate(hmem.iface(SIMULATED)?, &request)
}

/// Returns the bytes of a block, which differ from those of every other block.
fn content(block: u64) -> Vec<u8> {
    (0..BLOCK)
        .map(|at| (at.wrapping_mul(31) ^ (block.wrapping_mul(0x9E37) + (at >> 8))) as u8)
        .collect()
}

/// Fills a cache, registers it for reads by the peer, and closes it when the peer is done.
fn prefill(hmem: &Hmem, control: TcpStream) -> Result<(), Failure> {
    let mut link = Link::open(hmem, control)?;
    let buffer = allocate(hmem, 0, BLOCKS)?;
    for block in 0..BLOCKS {
        buffer.write(block * BLOCK, &content(block))?;
    }
    let cache = link.domain.register(buffer, Access::REMOTE_READ).map_err(Error::from)?;
    println!("prefill: {} bytes registered, {}", cache.len(), cache.decision()?);
    send(&mut link.control, &cache.key()?.to_bytes())?;

    let done = receive(&mut link.control)?;
    println!("prefill: the peer says {:?}", String::from_utf8_lossy(&done));
    // Once `close` returns, the key is invalid and the memory can be used again.
    cache.close().map_err(Error::from)?;
    Ok(())
}

/// Reads random blocks into device memory, and checks each of them. Returns the number of blocks.
fn decode(hmem: &Hmem, control: TcpStream) -> Result<u64, Failure> {
    let mut link = Link::open(hmem, control)?;
    let buffer = allocate(hmem, 1, WANTED)?;
    let local = link.domain.register(buffer, Access::READ).map_err(Error::from)?;
    let key = RemoteKey::from_bytes(&receive(&mut link.control)?)?;
    let wanted: Vec<u64> = random_blocks().take(WANTED as usize).collect();

    let (mut posted, mut done) = (0, 0);
    let mut completions = Vec::new();
    while done < WANTED {
        while posted < WANTED && posted - done < IN_FLIGHT {
            let into = local.slice(posted * BLOCK, BLOCK)?;
            let from = key.slice(wanted[posted as usize] * BLOCK, BLOCK)?;
            link.endpoint.read(&[into], &[from], link.peer, posted)?;
            posted += 1;
        }
        link.queue.wait(&mut completions, IN_FLIGHT as usize, Duration::MAX)?;
        for completion in completions.drain(..) {
            assert_eq!(completion.result?, BLOCK);
            done += 1;
        }
    }
    send(&mut link.control, b"done")?;

    let mut found = vec![0; BLOCK as usize];
    for (slot, block) in wanted.into_iter().enumerate() {
        local.read(slot as u64 * BLOCK, &mut found)?;
        if found != content(block) {
            return Err(format!("block {block} has other bytes than it should").into());
        }
    }
    println!("decode: {WANTED} blocks of {BLOCK} bytes read and verified");
    Ok(WANTED)
}

/// Returns pseudo-random block numbers, with repetitions. They are the same in every run.
fn random_blocks() -> impl Iterator<Item = u64> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % BLOCKS
    })
}

pub(crate) fn run() -> Result<u64, Failure> {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(Simulated::builder().devices(2).build()?)
        .provider(Loopback::builder().build()?)
        .build()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::scope(|scope| {
        let serving = scope.spawn(|| prefill(&hmem, listener.accept()?.0));
        let blocks = decode(&hmem, TcpStream::connect(address)?)?;
        serving.join().expect("the prefill node does not panic")?;
        Ok(blocks)
    })
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<(), Failure> {
    run().map(|_| ())
}
