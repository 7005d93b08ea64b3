//! Tests of one buffer registered with several NICs ("rails"): the nearest ones, in recorded
//! topologies with software NICs.

use std::{env, process::Command, sync::Arc};

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, ErrorKind, Hmem, MrAttr,
    MrFlags, RailKeys, RemoteKey,
    iface::AllocRequest,
    loopback::Loopback,
    p2p::topology::{Distance, Locality, Topology},
    provider::{EndpointAttr, Provider},
    regattr_on,
    system::{SIMULATED, Simulated, numa_node},
    transfer::RemoteSegment,
};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LOCAL: Access = Access::READ.union(Access::WRITE);
/// Name of a NIC that only the initiator uses.
const PEER: &str = "peer";

fn open(machine: &str) -> Topology {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/p2p/tests/fixtures/topology");
    Topology::open(format!("{folder}/{machine}.tar.gz")).expect("a recording")
}

/// A recorded machine topology, with a simulated device at the PCI address of each GPU and a
/// software NIC at that of each NIC.
struct Machine {
    hmem: Hmem,
    fabric: Arc<Loopback>,
    domains: Vec<Domain>,
}

impl Machine {
    fn new(machine: &str) -> Self {
        let topology = open(machine);
        let gpus: Vec<_> = topology.accelerators().map(|gpu| gpu.bus_id.to_string()).collect();
        let device = Simulated::builder().devices(gpus.len() as u32).pci_bus_ids(gpus);
        let mut nics = Loopback::builder().nic(PEER);
        for rdma in topology.rdma() {
            nics = nics.nic_at(&rdma.name, rdma.bus_id.expect("hardware").to_string());
        }
        let fabric = Arc::new(nics.build().expect("software NICs"));
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .iface(device.build().expect("a simulated device"))
            .shared_provider(Arc::clone(&fabric) as _)
            .topology(topology)
            .build()
            .expect("build");
        let mut domains = Vec::new();
        for attr in fabric.nics().expect("NICs") {
            if attr.nic.name != PEER {
                domains.push(open_domain(&hmem, &attr.nic.name));
            }
        }
        Self { hmem, fabric, domains }
    }

    fn rails(&self) -> Vec<&Domain> {
        self.domains.iter().collect()
    }

    fn buffer(&self, device: u32, len: u64) -> DeviceBuffer {
        let iface = self.hmem.iface(SIMULATED).expect("the simulated device");
        DeviceBuffer::allocate(iface, &request(device, len)).expect("allocate")
    }

    fn regions(&self) -> u64 {
        self.domains.iter().map(|domain| domain.live().regions).sum()
    }

    fn domain(&self, nic: &str) -> &Domain {
        let named = self.domains.iter().find(|domain| domain.provider_attr().nic.name == nic);
        named.unwrap_or_else(|| panic!("no domain of {nic}"))
    }

    /// Writes bytes with a remote key to the domain on `nic`, from the initiator's NIC.
    fn push(&self, nic: &str, key: &RemoteKey, bytes: &[u8]) {
        let near = open_domain(&self.hmem, PEER);
        let far = self.domain(nic);
        let cqs = [&near, far].map(|domain| domain.open_cq(8).expect("a completion queue"));
        let endpoint = |domain: &Domain, cq| {
            domain.open_endpoint(&EndpointAttr::new(cq)).expect("an endpoint")
        };
        let (from, to) = (endpoint(&near, &cqs[0]), endpoint(far, &cqs[1]));
        let peer = from.resolve(&to.name()).expect("resolve");
        let source = near.register(bytes.to_vec(), LOCAL).expect("register the source");
        let local = [source.slice(0, bytes.len() as u64).expect("slice")];
        let remote = [RemoteSegment { address: key.base(), len: bytes.len() as u64, key }];
        from.write(&local, &remote, peer, 0).expect("post");
        let mut done = Vec::new();
        while cqs[0].read(&mut done, 1).expect("read") == 0 {
            near.progress().expect("progress");
            far.progress().expect("progress");
        }
        done.remove(0).result.expect("the write");
    }
}

fn request(device: u32, len: u64) -> AllocRequest {
    AllocRequest { len, device: DeviceId(device), kind: AllocationKind::Device }
}

fn open_domain(hmem: &Hmem, nic: &str) -> Domain {
    let attr = DomainAttr { nic: Some(nic.into()), ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("a domain")
}

/// P2P-05, VRB-08
#[test]
fn a_buffer_is_registered_with_the_nics_nearest_to_its_device() {
    let machine = Machine::new("dgx-a100");
    for (device, expected) in [(0, ["mlx5_1", "mlx5_0"]), (5, ["mlx5_6", "mlx5_7"])] {
        let buffer = machine.buffer(device, 4096);
        let (shared, choice) =
            machine.hmem.register_nearest(&machine.rails(), 2, buffer, REMOTE).expect("register");
        let names: Vec<_> = choice.chosen().iter().map(|nic| nic.nic.name.as_str()).collect();
        assert_eq!(names, expected, "{choice}");
        assert!(choice.chosen().iter().all(|nic| nic.distance == Some(Distance::Pxb)), "{choice}");
        assert_eq!((shared.len(), machine.regions()), (2, 2));
        // The key of each rail moves bytes over the NIC that the key names.
        let keys = RailKeys::from_bytes(&shared.rail_keys().expect("keys").to_bytes()).unwrap();
        for (at, rail) in keys.rails().iter().enumerate() {
            assert_eq!(rail.nic, choice.chosen()[at].nic);
            let bytes = [0x40 + at as u8; 64];
            machine.push(&rail.nic.name, &rail.key, &bytes);
            let mut seen = [0; 64];
            shared.read(0, &mut seen).expect("read");
            assert_eq!(seen, bytes);
        }
        drop(shared.close().map_err(hmem::Error::from).expect("close"));
        assert_eq!(machine.regions(), 0);
    }
    assert_eq!(machine.fabric.nics().unwrap().len(), 13);
}

/// P2P-05
///
/// Memory given by addresses is registered by `regattr_on` in the chosen domains.
#[test]
fn chosen_domains_also_register_raw_addresses() {
    let machine = Machine::new("hgx-h100");
    let (domains, buffer) = (machine.rails(), machine.buffer(3, 4096));
    let range = buffer.allocation().range;
    let choice = machine.hmem.nearest_nics(&domains, range, 1).expect("choose");
    // SAFETY: the buffer outlives the regions.
    let shared = unsafe {
        regattr_on(&choice.pick(&domains), &MrAttr::new(&[range], REMOTE), MrFlags::empty())
    };
    let shared = shared.expect("register");
    let keys = shared.rail_keys().expect("keys");
    assert_eq!(keys.rails().len(), 1);
    assert!(keys.of("loopback/mlx5_5").is_some(), "{keys:?}");
    assert_eq!(keys.of("mlx5_5"), shared.keys().unwrap().first());
    shared.close().map_err(hmem::Error::from).expect("close");
}

/// P2P-05
#[test]
fn host_memory_uses_the_nics_of_its_numa_node() {
    // On a machine with one NUMA node, the location of the pages is not queried.
    let vm = Machine::new("cloud-vm");
    let (shared, choice) =
        vm.hmem.register_nearest(&vm.rails(), 1, vec![1_u8; 8192], REMOTE).expect("register");
    assert_eq!(choice.memory(), Locality::Node(0));
    assert_eq!(choice.chosen()[0].distance, Some(Distance::Node));
    assert_eq!(shared.close().map_err(hmem::Error::from).expect("close"), [1; 8192]);
    // On a machine with several NUMA nodes, the kernel reports the node of the pages.
    let hgx = Machine::new("hgx-h100");
    let buffer = vec![1_u8; 1 << 20];
    let range = hmem::AddressRange::of(&buffer);
    let node = numa_node(range);
    match hgx.hmem.nearest_nics(&hgx.rails(), range, 4) {
        Ok(choice) => {
            let node = node.expect("the same query");
            assert_eq!(choice.memory(), Locality::Node(node));
            let numa = |nic: &hmem::p2p::topology::RankedNic| {
                let id = nic.nic.pci_bus_id.as_ref().unwrap().parse().unwrap();
                hgx.hmem.topology().unwrap().device(id).unwrap().numa_node
            };
            assert!(choice.chosen().iter().all(|nic| numa(nic) == Some(node)), "{choice}");
        }
        Err(error) => {
            assert_eq!(node.expect_err("the same query").kind(), error.kind());
            assert!(error.remedy_text().unwrap().contains("seccomp"), "{error}");
        }
    }
}

/// P2P-05
///
/// The buffer is returned, and nothing stays registered.
#[test]
fn failed_choice_or_registration_returns_the_buffer() {
    let machine = Machine::new("dgx-a100");
    let domains = machine.rails();
    let refused = |hmem: &Hmem, domains: &[&Domain], count, buffer, access| {
        let rejected = hmem.register_nearest(domains, count, buffer, access).expect_err("refused");
        assert!(rejected.value.is_empty());
        drop(rejected.value.close().map_err(hmem::Error::from).expect("the buffer"));
        assert!(rejected.error.remedy_text().is_some(), "{}", rejected.error);
        (rejected.error.kind(), rejected.error.context_value("why").map(str::to_owned))
    };
    let why = |text: &str| Some(text.to_owned());
    let buffer = || machine.buffer(0, 4096);
    assert_eq!(
        refused(&machine.hmem, &domains, 0, buffer(), REMOTE),
        (ErrorKind::InvalidArgument, why("the number of NICs is 0"))
    );
    assert_eq!(
        refused(&machine.hmem, &domains, 13, buffer(), REMOTE),
        (ErrorKind::InvalidArgument, why("more NICs are requested than exist"))
    );
    // The registration itself fails.
    let unknown = Access::from_bits_retain(1 << 40);
    let none = refused(&machine.hmem, &domains, 2, buffer(), unknown);
    assert_eq!(none.0, ErrorKind::BadAccess);
    assert_eq!(machine.regions(), 0);

    // A device without a PCI address.
    let bare = Hmem::builder()
        .without_vendor_ifaces()
        .iface(Simulated::builder().build().unwrap())
        .provider(Loopback::builder().nic("a").nic("b").build().unwrap())
        .topology(open("dgx-a100"))
        .build()
        .unwrap();
    let rails = ["a", "b"].map(|nic| open_domain(&bare, nic));
    let iface = bare.iface(SIMULATED).unwrap();
    let buffer = DeviceBuffer::allocate(iface, &request(0, 4096)).unwrap();
    assert_eq!(
        refused(&bare, &[&rails[0], &rails[1]], 1, buffer, REMOTE),
        (
            ErrorKind::Unsupported,
            why("the device has no PCI address, so its distance is not known")
        )
    );
}

const SENT: &str = "HMEM_TEST_RAIL_KEYS";

/// KEY-06
#[test]
fn rail_keys_cross_processes_unchanged() {
    const NAME: &str = "rail_keys_cross_processes_unchanged";
    if let Ok(text) = env::var(SENT) {
        let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
        let bytes: Vec<_> = (0..text.len()).step_by(2).map(byte).collect();
        for rail in RailKeys::from_bytes(&bytes).expect("the keys as they were sent").rails() {
            println!("received {}", line(&rail.nic.to_string(), &rail.nic.pci_bus_id, &rail.key));
        }
        return;
    }
    let machine = Machine::new("hgx-h100");
    let shared = hmem::register_on(&machine.rails(), vec![0_u8; 12345], REMOTE);
    let shared = shared.expect("register");
    let keys = shared.rail_keys().expect("keys");
    let text: String = keys.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut child = Command::new(env::current_exe().expect("the test binary"));
    child.args([NAME, "--exact", "--nocapture"]).env(SENT, text);
    let output = child.output().expect("start a child");
    let seen = String::from_utf8_lossy(&output.stdout);
    let seen: Vec<_> = seen.lines().filter_map(|line| line.split_once("received ")).collect();
    let seen: Vec<_> = seen.into_iter().map(|(_, rail)| rail.to_owned()).collect();
    let expected: Vec<_> = machine
        .domains
        .iter()
        .zip(shared.keys().expect("keys"))
        .map(|(domain, key)| {
            let nic = &domain.provider_attr().nic;
            line(&nic.to_string(), &nic.pci_bus_id, &key)
        })
        .collect();
    assert_eq!((seen.len(), seen), (9, expected));
    shared.close().map_err(hmem::Error::from).expect("close");
}

fn line(nic: &str, pci_bus_id: &Option<String>, key: &RemoteKey) -> String {
    let pieces: Vec<_> = key.pieces().map(|piece| (piece.base, piece.len, piece.key)).collect();
    format!("{nic} {pci_bus_id:?} {:?} {pieces:?}", key.addressing())
}
