//! Keys between peers whose devices have units of memory of other lengths, and keys of a machine
//! with pages of another size (ARM-02).

use std::{fs, path::Path, sync::Arc};

use hmem::{
    Access, AllocationKind, Batch, DeviceBuffer, DeviceId, Domain, DomainAttr, Error, ErrorKind,
    Hmem, Iface, IfaceKind, Iova, MrMode, Promise, RailKeys, Raw, RawKey, RemoteKey, Request,
    Result, iface::AllocRequest, loopback::Loopback, path::P2pPolicy, provider::EndpointAttr,
    system::Simulated, transfer::RemoteSegment,
};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LOCAL: Access = Access::READ.union(Access::WRITE);
const NICS: [&str; 3] = ["loop0", "loop1", "loop2"];
/// Length in bytes of each range whose key is sent.
const LEN: u64 = 211;

/// A peer: a simulated device, and a domain on each NIC.
struct Peer {
    device: Arc<dyn Iface>,
    unit: u64,
    domains: Vec<Domain>,
}

impl Peer {
    fn buffer(&self) -> DeviceBuffer {
        let (device, kind) = (DeviceId(0), AllocationKind::Virtual);
        let request = AllocRequest { len: 3 * self.unit, device, kind };
        DeviceBuffer::allocate(&self.device, &request).expect("device memory")
    }
}

/// Returns two peers on one fabric. The first has a device with 16 units in a page of the host. The
/// units of the second have 2 MiB.
fn peers(mr_mode: MrMode) -> [Peer; 2] {
    let page = rustix::param::page_size() as u64;
    let nics = NICS.into_iter().fold(Loopback::builder(), |nics, nic| nics.nic(nic));
    let fabric = Arc::new(nics.needs(mr_mode).build().expect("software NICs"));
    [(0x121, page / 16), (0x122, 2 << 20)].map(|(kind, unit)| {
        let device = Simulated::builder().kind(IfaceKind(kind)).window(1 << 32).segment_len(unit);
        let device: Arc<dyn Iface> = Arc::new(device.build().expect("a device"));
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device))
            .shared_provider(Arc::clone(&fabric) as _)
            .build()
            .expect("the ifaces start");
        let open = |nic: &str| {
            let (nic, p2p) = (Some(nic.into()), P2pPolicy::Required);
            let attr = DomainAttr { mr_mode, nic, p2p, ..DomainAttr::default() };
            hmem.domain("loopback", attr).expect("a domain")
        };
        Peer { device, unit, domains: NICS.into_iter().map(open).collect() }
    })
}

/// Writes `bytes` to the memory of `far` at an offset from the start of the key's memory.
fn push(near: &Domain, far: &Domain, key: &RemoteKey, at: u64, bytes: &[u8]) -> Result<u64> {
    let cqs = [near.open_cq(8)?, far.open_cq(8)?];
    let from = near.open_endpoint(&EndpointAttr::new(&cqs[0]))?;
    let to = far.open_endpoint(&EndpointAttr::new(&cqs[1]))?;
    let peer = from.resolve(&to.name())?;
    let len = bytes.len() as u64;
    let source = near.register(bytes.to_vec(), LOCAL).map_err(Error::from)?;
    let address = Iova(key.base().0.wrapping_add(at));
    from.write(&[source.slice(0, len)?], &[RemoteSegment { address, len, key }], peer, 0)?;
    let mut done = Vec::new();
    while cqs[0].read(&mut done, 1)? == 0 {
        near.progress()?;
        far.progress()?;
    }
    done.remove(0).result
}

/// Tests that the key reaches its memory to both ends, and no byte beyond. The memory is [`LEN`]
/// bytes long, and at `start` of `buffer`.
fn assert_reaches_exactly(
    [near, far]: [&Domain; 2],
    key: &RemoteKey,
    buffer: &DeviceBuffer,
    start: u64,
) {
    let around = |at: u64, len: u64| {
        let mut bytes = vec![0; len as usize];
        buffer.read(at, &mut bytes).expect("the device's own copy");
        bytes
    };
    buffer.write(start - 1, &[7; LEN as usize + 2]).expect("the device's own copy");
    let bytes: Vec<u8> = (0..LEN).map(|at| at as u8).collect();
    assert_eq!(push(near, far, key, 0, &bytes).expect("all bytes"), LEN);
    push(near, far, key, LEN - 1, &[0xa2]).expect("the last byte");
    let expected = [&[7], &bytes[..LEN as usize - 1], &[0xa2, 7]].concat();
    for (at, len) in [(LEN, 1), (LEN - 1, 2), (u64::MAX, 1), (0, LEN + 1)] {
        let error = push(near, far, key, at, &vec![0xee; len as usize]).expect_err("outside");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{len} bytes at {at:#x}: {error}");
    }
    assert_eq!(around(start - 1, LEN + 2), expected);
}

/// ARM-02
#[test]
fn peers_with_units_of_other_lengths_exchange_keys_of_every_form() {
    for mr_mode in [MrMode::empty(), MrMode::VIRT_ADDR | MrMode::PROV_KEY] {
        let peers = peers(mr_mode);
        let mut lengths = Vec::new();
        for [near, far] in [[&peers[0], &peers[1]], [&peers[1], &peers[0]]] {
            let (buffer, start) = (far.buffer(), far.unit - 99);
            let range = buffer.range().slice(start, LEN).expect("over a border of units");
            // SAFETY: the buffer outlives its regions, and no reference to it exists.
            let memory = || unsafe { Raw::new(range, Promise::ReadWrite) };
            let domains = [&near.domains[0], &far.domains[0]];

            let region = far.domains[0].register(memory(), REMOTE).map_err(Error::from);
            let region = region.expect("registered");
            let key = region.key().expect("a key");
            let sent = key.to_bytes();
            let key = RemoteKey::from_bytes(&sent).expect("the bytes of a key");
            assert_reaches_exactly(domains, &key, &buffer, start);

            let raw = region.raw_key().expect("a raw key");
            let sent_raw = RawKey(raw.0.clone());
            let mapped = near.domains[0].map_raw(region.base_addr(), LEN, &sent_raw);
            let mapped = mapped.expect("the peer's raw key");
            assert_reaches_exactly(domains, &mapped, &buffer, start);
            near.domains[0].unmap_key(&mapped).expect("unmap");
            region.close().map_err(Error::from).expect("close");

            let rails = [&far.domains[1], &far.domains[2]];
            let shared = Batch::on(&rails).add(Request::new(memory(), REMOTE)).register();
            let shared = shared.map_err(Error::from).expect("registered");
            let sent_rails = shared.rail_keys(0, 0).expect("keys").to_bytes();
            let received = RailKeys::from_bytes(&sent_rails).expect("the bytes of rail keys");
            for nic in [1, 2] {
                let key = received.of(NICS[nic]).expect("a rail");
                let domains = [&near.domains[nic], &far.domains[nic]];
                assert_reaches_exactly(domains, key, &buffer, start);
            }
            shared.close().map_err(Error::from).expect("close");

            let altered = |bytes: &[u8], at: usize| {
                let mut altered = bytes.to_vec();
                altered[at] ^= 0x10;
                altered
            };
            for at in 0..sent.len() {
                let error = RemoteKey::from_bytes(&altered(&sent, at)).expect_err("altered");
                assert_eq!(error.kind(), ErrorKind::Malformed);
            }
            for at in 0..sent_rails.len() {
                let error = RailKeys::from_bytes(&altered(&sent_rails, at)).expect_err("altered");
                assert_eq!(error.kind(), ErrorKind::Malformed);
            }
            for at in 0..raw.0.len() {
                let altered = RawKey(altered(&raw.0, at));
                let mapped = near.domains[0].map_raw(Iova(0), LEN, &altered);
                assert_eq!(mapped.expect_err("altered").kind(), ErrorKind::Malformed);
            }
            lengths.push(raw.0.len());
        }
        assert_eq!(lengths[0], lengths[1], "a raw key depends on the units of its memory");
    }
}

/// Returns the bytes of a key that was recorded on a machine with pages of 4 KiB.
fn recorded(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let line = text.lines().find(|line| !line.starts_with('#')).expect("a line of bytes");
    let byte = |at| u8::from_str_radix(&line[at..at + 2], 16).expect("hexadecimal");
    (0..line.len()).step_by(2).map(byte).collect()
}

/// ARM-02, KEY-06
///
/// The recorded keys are of 4096 bytes with the requested key 0x1234. The region here has the same
/// length and key, begins inside a page, and is a part of one if pages are longer.
#[test]
fn keys_recorded_on_other_pages_reach_memory_here() {
    let one = RemoteKey::from_bytes(&recorded("remote-key/v1-zero-based.txt")).expect("a key");
    let rails = RailKeys::from_bytes(&recorded("rail-keys/v1-software-nic.txt")).expect("keys");
    let of_rail = rails.of(NICS[0]).expect("a key of the NIC");
    let [near, far] = peers(MrMode::empty());
    let (near, far) = (&near.domains[0], &far.domains[0]);
    let len = one.first_len();
    let region = far.submit(Request::new(vec![0_u8; len as usize], REMOTE).key(0x1234));
    let region = region.map_err(Error::from).expect("the key is free");
    for (key, byte) in [(&one, 1), (of_rail, 2)] {
        assert_eq!((key.base(), key.first_len()), (Iova(0), len));
        push(near, far, key, 0, &vec![byte; len as usize]).expect("all bytes");
        push(near, far, key, len - 1, &[byte + 10]).expect("the last byte");
        let error = push(near, far, key, len, &[0xee]).expect_err("beyond the end");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
        let mut found = vec![0; len as usize];
        region.read(0, &mut found).expect("read");
        assert_eq!(found, [vec![byte; len as usize - 1], vec![byte + 10]].concat());
    }
}
