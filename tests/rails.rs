//! Tests of memory that one batch registers with several NICs ("rails"), in recorded topologies
//! with software NICs.

use std::{env, process::Command, sync::Arc};

use hmem::{
    Access, AllocationKind, Batch, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, ErrorKind,
    Growth, Hmem, Memory, Promise, RailKeys, Raw, Regions, Rejected, RemoteKey, Request,
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    p2p::topology::{Distance, Locality, Topology},
    path::P2pPolicy,
    provider::{EndpointAttr, Provider},
    system::{self, SIMULATED, Simulated, numa_node},
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
    device: Arc<Simulated>,
    fabric: Arc<Loopback>,
    faults: Faults,
    domains: Vec<Domain>,
}

impl Machine {
    fn new(machine: &str) -> Self {
        let topology = open(machine);
        let gpus: Vec<_> = topology.accelerators().map(|gpu| gpu.bus_id.to_string()).collect();
        let device = Simulated::builder().devices(gpus.len() as u32).pci_bus_ids(gpus);
        let device = Arc::new(device.build().expect("a simulated device"));
        let faults = Faults::new();
        let mut nics = Loopback::builder().faults(&faults).nic(PEER);
        for rdma in topology.rdma() {
            nics = nics.nic_at(&rdma.name, rdma.bus_id.expect("hardware").to_string());
        }
        let fabric = Arc::new(nics.build().expect("software NICs"));
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device) as _)
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
        Self { hmem, device, fabric, faults, domains }
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

/// Opens a domain whose policy forbids staged copies.
fn open_domain(hmem: &Hmem, nic: &str) -> Domain {
    let p2p = P2pPolicy::Required;
    let attr = DomainAttr { nic: Some(nic.into()), p2p, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("a domain")
}

/// Registers all of a memory with each NIC.
fn register<M: Memory>(
    nics: &[&Domain],
    memory: M,
    access: Access,
) -> Result<Regions<M>, Rejected<Regions<M>>> {
    Batch::on(nics).add(Request::new(memory, access)).register()
}

/// Deregisters the only memory of a batch, and returns it.
fn close<M: Memory>(shared: Regions<M>) -> M {
    shared.close().map_err(hmem::Error::from).expect("close").remove(0)
}

/// P2P-05, VRB-08
#[test]
fn a_buffer_is_registered_with_the_nics_nearest_to_its_device() {
    let machine = Machine::new("dgx-a100");
    for (device, expected) in [(0, ["mlx5_1", "mlx5_0"]), (5, ["mlx5_6", "mlx5_7"])] {
        let buffer = machine.buffer(device, 4096);
        let nics = machine.rails();
        let choice = machine.hmem.nearest_nics(&nics, buffer.range(), 2).expect("choose");
        let shared = register(&choice.pick(&nics), buffer, REMOTE).expect("register");
        let names: Vec<_> = choice.chosen().iter().map(|nic| nic.nic.name.as_str()).collect();
        assert_eq!(names, expected, "{choice}");
        assert!(choice.chosen().iter().all(|nic| nic.distance == Some(Distance::Pxb)), "{choice}");
        assert_eq!((shared.regions().len(), machine.regions()), (2, 2));
        // The key of each rail moves bytes over the NIC that the key names.
        let keys = shared.rail_keys(0, 0).expect("keys").to_bytes();
        let keys = RailKeys::from_bytes(&keys).expect("the keys as they were sent");
        for (at, rail) in keys.rails().iter().enumerate() {
            assert_eq!(rail.nic, choice.chosen()[at].nic);
            let bytes = [0x40 + at as u8; 64];
            machine.push(&rail.nic.name, &rail.key, &bytes);
            let mut seen = [0; 64];
            shared.read(0, 0, &mut seen).expect("read");
            assert_eq!(seen, bytes);
        }
        drop(close(shared));
        assert_eq!(machine.regions(), 0);
    }
    assert_eq!(machine.fabric.nics().unwrap().len(), 13);
}

/// P2P-05
#[test]
fn chosen_domains_also_register_raw_addresses() {
    let machine = Machine::new("hgx-h100");
    let (domains, buffer) = (machine.rails(), machine.buffer(3, 4096));
    let range = buffer.allocation().range;
    let choice = machine.hmem.nearest_nics(&domains, range, 1).expect("choose");
    // SAFETY: the buffer outlives the regions.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let shared = register(&choice.pick(&domains), memory, REMOTE).expect("register");
    let keys = shared.rail_keys(0, 0).expect("keys");
    assert_eq!(keys.rails().len(), 1);
    assert!(keys.of("loopback/mlx5_5").is_some(), "{keys:?}");
    let view = shared.view(0, 0, 0).expect("the only one");
    assert_eq!(keys.of("mlx5_5"), Some(&view.key().expect("a key")));
    assert_eq!(*close(shared).at(), range);
}

/// P2P-05
#[test]
fn host_memory_uses_the_nics_of_its_numa_node() {
    // On a machine with one NUMA node, the location of the pages is not queried.
    let vm = Machine::new("cloud-vm");
    let (nics, buffer) = (vm.rails(), vec![1_u8; 8192]);
    let range = hmem::AddressRange::of(&buffer);
    let choice = vm.hmem.nearest_nics(&nics, range, 1).expect("choose");
    assert_eq!(choice.memory(), Locality::Node(0));
    assert_eq!(choice.chosen()[0].distance, Some(Distance::Node));
    let shared = register(&choice.pick(&nics), buffer, REMOTE).expect("register");
    assert_eq!(close(shared), [1; 8192]);
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
#[test]
fn failed_choice_has_a_reason_and_a_remedy() {
    let machine = Machine::new("dgx-a100");
    let refused = |hmem: &Hmem, domains: &[&Domain], count, buffer: DeviceBuffer| {
        let error = hmem.nearest_nics(domains, buffer.range(), count).expect_err("refused");
        assert!(error.remedy_text().is_some(), "{error}");
        (error.kind(), error.context_value("why").map(str::to_owned))
    };
    let why = |text: &str| Some(text.to_owned());
    for (count, reason) in
        [(0, "the number of NICs is 0"), (13, "more NICs are requested than exist")]
    {
        assert_eq!(
            refused(&machine.hmem, &machine.rails(), count, machine.buffer(0, 4096)),
            (ErrorKind::InvalidArgument, why(reason))
        );
    }

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
        refused(&bare, &[&rails[0], &rails[1]], 1, buffer),
        (
            ErrorKind::Unsupported,
            why("the device has no PCI address, so its distance is not known")
        )
    );
}

/// VRB-08, MR-17
///
/// Each view is reached by its key on each NIC. Without growth each view is exported once, and with
/// growth the range of all views.
#[test]
fn views_are_exported_once_for_all_nics() {
    const VIEW: u64 = 4096;
    let machine = Machine::new("hgx-h100");
    let nics = [machine.domain("mlx5_0"), machine.domain("mlx5_5")];
    // The first registration with each NIC also probes its path.
    drop(register(&nics, machine.buffer(0, VIEW), REMOTE).expect("register"));
    for (growth, exported) in [(Growth::None, 3), (Growth::Allocation, 1)] {
        let exports = || machine.device.stats().calls(system::DeviceCall::ExportDmaBuf);
        let before = exports();
        let views = [4, 0, 2].map(|page| (page * VIEW..(page + 1) * VIEW, REMOTE));
        let shared = Batch::on(&nics)
            .add_views(machine.buffer(0, 8 * VIEW), views.clone())
            .grow(growth)
            .register()
            .expect("register");
        assert_eq!((exports() - before, shared.regions().len()), (exported, 2 * exported as usize));
        assert_eq!(nics.map(|nic| nic.live().regions), [exported; 2]);
        for (index, (part, _)) in views.into_iter().enumerate() {
            let keys = shared.rail_keys(0, index).expect("keys");
            for (nic, rail) in keys.rails().iter().enumerate() {
                assert_eq!(rail.nic, nics[nic].provider_attr().nic);
                let view = shared.view(nic, 0, index).expect("there");
                assert_eq!(
                    (view.key().expect("a key"), view.range().len()),
                    (rail.key.clone(), VIEW)
                );
                let bytes = [(16 * index + nic) as u8 + 1; 64];
                machine.push(&rail.nic.name, &rail.key, &bytes);
                let mut seen = [0; 64];
                shared.read(0, part.start, &mut seen).expect("read");
                assert_eq!(seen, bytes, "view {index} on NIC {nic}");
            }
        }
        drop(close(shared));
        assert_eq!(machine.regions(), 0);
    }
}

/// VRB-08, MR-17
///
/// After a failure no NIC has a region, and closing the value of the error returns the memories.
#[test]
fn batch_that_fails_on_one_nic_leaves_nothing_on_the_others() {
    let machine = Machine::new("hgx-h100");
    let nics = [machine.domain("mlx5_0"), machine.domain("mlx5_5")];
    for failing in 1..=4_u64 {
        // The first registration, and one after a failure, also probes the path.
        drop(register(&nics, machine.buffer(0, 4096), REMOTE).expect("register"));
        let buffers = [3, 4].map(|byte| {
            let buffer = machine.buffer(0, 4096);
            buffer.write(0, &[byte; 64]).expect("inside");
            buffer
        });
        machine.faults.fail_nth(NicCall::Register, failing, Errno(12));
        let batch = buffers
            .into_iter()
            .fold(Batch::on(&nics), |batch, buffer| batch.add(Request::new(buffer, REMOTE)));
        let Rejected { value, error } = batch.register().expect_err("a NIC refuses");
        assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
        assert_eq!(error.context_value("registered before"), Some(&*(failing - 1).to_string()));
        let view = ((failing - 1) / 2).to_string();
        assert_eq!(error.context_value("view"), Some(&*view), "{error}");
        assert_eq!((nics.map(|nic| nic.live().regions), value.regions().len()), ([0; 2], 0));
        let missing = value.view(0, 0, 0).expect_err("nothing is registered");
        assert_eq!(missing.kind(), ErrorKind::OutOfBounds, "{missing}");
        let buffers = value.close().map_err(hmem::Error::from).expect("nothing is registered");
        let bytes: Vec<_> = buffers
            .iter()
            .map(|buffer| {
                let mut byte = [0];
                buffer.read(63, &mut byte).expect("the memory is whole");
                byte[0]
            })
            .collect();
        assert_eq!(bytes, [3, 4]);
    }
    // A request that a check refuses, before any NIC is asked.
    let unknown = Access::from_bits_retain(1 << 40);
    let Rejected { value, error } =
        register(&nics, machine.buffer(0, 4096), unknown).expect_err("refused");
    assert_eq!((error.kind(), machine.regions()), (ErrorKind::BadAccess, 0), "{error}");
    assert!(error.remedy_text().is_some(), "{error}");
    drop(close(value));
    assert_eq!(machine.device.stats().live_allocations, 0);
}

/// VRB-08
#[test]
fn batch_needs_nics_of_one_library() {
    let (machine, other) = (Machine::new("cloud-vm"), Machine::new("cloud-vm"));
    for nics in [vec![], vec![machine.rails()[0], other.rails()[0]]] {
        let Rejected { value, error } =
            register(&nics, vec![7_u8; 64], REMOTE).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_eq!((error.operation(), machine.regions()), ("register batch", 0), "{error}");
        assert_eq!(close(value), [7; 64]);
    }
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
    let shared = register(&machine.rails(), vec![0_u8; 12345], REMOTE).expect("register");
    let keys = shared.rail_keys(0, 0).expect("keys");
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
        .zip(shared.regions())
        .map(|(domain, region)| {
            let nic = &domain.provider_attr().nic;
            line(&nic.to_string(), &nic.pci_bus_id, &region.key().expect("a key"))
        })
        .collect();
    assert_eq!((seen.len(), seen), (9, expected));
    close(shared);
}

fn line(nic: &str, pci_bus_id: &Option<String>, key: &RemoteKey) -> String {
    let pieces: Vec<_> = key.pieces().map(|piece| (piece.base, piece.len, piece.key)).collect();
    format!("{nic} {pci_bus_id:?} {:?} {pieces:?}", key.addressing())
}
