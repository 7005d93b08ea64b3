//! Staged RMA transfers of the software NIC between device memory and host memory.
//!
//! A long transfer pipelines its copies with its sends, so its reference is the slower of the copy
//! engine and the NIC. A short transfer is one chunk, so its reference is one copy followed by one
//! transfer.
//!
//! The simulated device limits its copy engine to a bandwidth, and adds a latency to every copy.
//! The references are measured in the same run, alternating with hmem. The time of the NIC is that
//! of a transfer between host buffers. The time of the copy engine is computed from its bandwidth
//! and latency, or measured with one copy by an unlimited engine if that takes longer.

#![allow(missing_docs, reason = "a bench is a program")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem::{
    Access, Address, AllocationKind, DeviceBuffer, DeviceId, DomainAttr, Endpoint, Hmem, Iface,
    IfaceExt, MrMode, Region, RegionSlice, RemoteKey,
    iface::AllocRequest,
    loopback::{Loopback, Progress},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    system::Simulated,
    transfer::{PeerId, RemoteSegment},
};

const LONGEST: usize = 64 << 20;
/// Bandwidth in bytes per second, and latency, of each simulated copy engine that is measured.
const ENGINES: [(u64, Duration); 4] = [
    (250_000_000, Duration::from_micros(20)),
    (500_000_000, Duration::from_micros(20)),
    (1_000_000_000, Duration::from_micros(10)),
    (2_000_000_000, Duration::from_micros(5)),
];
const LONG: [u64; 3] = [4 << 20, 16 << 20, LONGEST as u64];
const SHORT: u64 = 64 << 10;

/// Two endpoints of one software NIC, with the memory that is transferred between them.
struct Connection {
    endpoint: Endpoint,
    _target: Endpoint,
    cq: Arc<dyn CompletionQueue>,
    peer: PeerId,
    key: RemoteKey,
    _remote: Region<Vec<u8>>,
    staged: Region<DeviceBuffer>,
    host: Region<Vec<u8>>,
    device: Arc<Simulated>,
    /// A device with an unlimited copy engine, and memory of that device.
    unlimited: (Arc<Simulated>, DeviceBuffer),
    /// Host side of the copies that the benchmark makes without the NIC.
    buffer: Vec<u8>,
}

impl Connection {
    fn new(bandwidth: u64, latency: Duration) -> Self {
        let builder =
            Simulated::builder().window(1 << 32).copy_bandwidth(bandwidth).copy_latency(latency);
        let device = Arc::new(builder.build().expect("a simulated device"));
        let loopback =
            Loopback::builder().progress(Progress::ByHand).build().expect("a software NIC starts");
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .provider(loopback)
            .shared_iface(Arc::clone(&device) as Arc<dyn Iface>)
            .build()
            .expect("host memory is always available");
        let (mr_mode, p2p) = (MrMode::empty(), P2pPolicy::Disabled);
        let domain = hmem
            .domain("loopback", DomainAttr { mr_mode, p2p, ..DomainAttr::default() })
            .expect("a domain");
        let cq = domain.open_cq(64).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let (endpoint, target) = (open(), open());
        let peer = endpoint.resolve(&target.name()).expect("the target endpoint exists");
        let local = Access::READ | Access::WRITE;
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let remote = domain.register(vec![1u8; LONGEST], remote).expect("register");
        let host = domain.register(vec![2u8; LONGEST], local).expect("register");
        let staged = domain.register(device_memory(&device), local).expect("register");
        let free = Simulated::builder().window(1 << 32).build().expect("another simulated device");
        let free = Arc::new(free);
        let unlimited = (Arc::clone(&free), device_memory(&free));
        let key = remote.key().expect("registered");
        let buffer = vec![4; LONGEST];
        Self {
            endpoint,
            _target: target,
            cq,
            peer,
            key,
            _remote: remote,
            staged,
            host,
            device,
            unlimited,
            buffer,
        }
    }

    fn transfer(&self, local: RegionSlice, len: u64, read: bool) {
        let remote = [RemoteSegment { address: self.key.base(), len, key: &self.key }];
        if read {
            self.endpoint.read(&[local], &remote, self.peer, 1).expect("the queue has room");
        } else {
            self.endpoint.write(&[local], &remote, self.peer, 1).expect("the queue has room");
        }
        let mut completions = Vec::with_capacity(1);
        while completions.is_empty() {
            self.cq.read(&mut completions, 1).expect("the queue can be read");
        }
        let completion = completions.pop().expect("the queue returned a completion");
        assert_eq!(completion.result.expect("the transfer succeeds"), len);
    }

    fn staged(&self, len: u64, read: bool) {
        self.transfer(
            self.staged.slice(0, len).expect("the slice is inside the region"),
            len,
            read,
        );
    }

    fn wire(&self, len: u64, read: bool) {
        self.transfer(self.host.slice(0, len).expect("the slice is inside the region"), len, read);
    }

    /// Returns the destination and the source of a copy between the memory at `device` and the host
    /// buffer. The copy goes to the device if `read` is true, and to the host otherwise.
    fn copy_ends(&mut self, device: Address, read: bool) -> (Address, Address) {
        let host = Address::of_ptr(self.buffer.as_mut_ptr());
        if read { (device, host) } else { (host, device) }
    }

    /// Copies `len` bytes with the unlimited copy engine, and waits for the end of the copy.
    fn unlimited(&mut self, len: u64, read: bool) {
        let (to, from) = self.copy_ends(self.unlimited.1.allocation().base(), read);
        // SAFETY: the host side is `buffer`, which has `LONGEST` bytes, and this function waits for
        // the end of the copy.
        let copy = unsafe { self.unlimited.0.start_copy(to, from, len) }
            .expect("the copy engine accepts the copy");
        copy.wait().expect("the transfer succeeds");
    }

    /// Performs one transfer by the NIC and one device copy of `len` bytes, one after the other.
    /// The transfer comes first if `read` is true.
    fn one_by_one(&mut self, len: u64, read: bool) {
        let copy = |net: &mut Self| {
            let (to, from) = net.copy_ends(net.staged.range().start(), read);
            // SAFETY: the host side is `buffer`, which has `LONGEST` bytes, and the call returns
            // after the copy has ended.
            unsafe { net.device.copy(to, from, len) }.expect("the transfer succeeds");
        };
        if read {
            self.wire(len, read);
            copy(self);
        } else {
            copy(self);
            self.wire(len, read);
        }
    }
}

fn device_memory(device: &Arc<Simulated>) -> DeviceBuffer {
    let iface = Arc::clone(device) as Arc<dyn Iface>;
    let request =
        AllocRequest { len: LONGEST as u64, device: DeviceId(0), kind: AllocationKind::Device };
    let memory = DeviceBuffer::allocate(&iface, &request).expect("device memory");
    memory.write(0, &vec![3; LONGEST]).expect("write device memory");
    memory
}

fn timed(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn direction(read: bool) -> &'static str {
    if read { "read into device" } else { "write from device" }
}

fn long(net: &mut Connection, len: u64, read: bool, (bandwidth, latency): (u64, Duration)) -> bool {
    let rounds = if len > 16 << 20 { 9 } else { 25 };
    let (mut ours, mut unlimited, mut wire) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(timed(|| net.staged(len, read)));
        unlimited.push(timed(|| net.unlimited(len, read)));
        wire.push(timed(|| net.wire(len, read)));
    }
    let set = latency + Duration::from_secs_f64(len as f64 / bandwidth as f64);
    let (ours, engine, wire) = (median(ours), median(unlimited).max(set), median(wire));
    let ratio = engine.max(wire).as_secs_f64() / ours.as_secs_f64();
    let met = ratio >= 0.9;
    println!(
        "{:<18} {:>5} MiB  ours {:>9.0}  engine {:>9.0}  wire {:>9.0}  ratio {ratio:>5.2}  goal \
         0.90{}",
        direction(read),
        len >> 20,
        micros(ours),
        micros(engine),
        micros(wire),
        if met { "" } else { "  under" }
    );
    met
}

fn short(net: &mut Connection, read: bool) -> bool {
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..301 {
        ours.push(timed(|| net.staged(SHORT, read)));
        plain.push(timed(|| net.one_by_one(SHORT, read)));
    }
    let (ours, plain) = (median(ours), median(plain));
    let ratio = ours.as_secs_f64() / plain.as_secs_f64();
    let met = ratio <= 1.2;
    println!(
        "{:<18} {:>5} KiB  ours {:>9.1}  one by one {:>9.1}  ratio {ratio:>5.2}  goal 1.20{}",
        direction(read),
        SHORT >> 10,
        micros(ours),
        micros(plain),
        if met { "" } else { "  over" }
    );
    met
}

fn main() {
    let mut missed = 0;
    for engine @ (bandwidth, latency) in ENGINES {
        println!(
            "\ncopy engine of {} MB/s, {latency:?} latency per copy (medians, microseconds)",
            bandwidth / 1_000_000
        );
        let mut net = Connection::new(bandwidth, latency);
        for read in [false, true] {
            for len in LONG {
                missed += u32::from(!long(&mut net, len, read, engine));
            }
            missed += u32::from(!short(&mut net, read));
        }
    }
    println!("\n{missed} goals not met");
}
