//! Topology of recorded machines whose GPU has a coherent link to the CPU: GH200, GB200 and GB10.

use crate::topology_machines::{make, recording};
use hmem_core::{cause::CoherentLink, provider::Nic};
use hmem_p2p::{
    path::{FactSource, LocalMachine},
    topology::{BusId, Distance, Hop, Locality, Topology},
};

fn open(name: &str) -> Topology {
    Topology::open(recording(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn id(text: &str) -> BusId {
    text.parse().unwrap()
}

fn bus_id(topology: &Topology, name: &str) -> BusId {
    topology.rdma().iter().find(|nic| nic.name == name).and_then(|nic| nic.bus_id).expect(name)
}

/// Returns the RDMA devices with a PCI address, in the order of their names.
fn nics(topology: &Topology) -> Vec<Nic> {
    let nic = |device: &hmem_p2p::topology::RdmaDevice| Nic {
        provider: "verbs".into(),
        name: device.name.clone(),
        pci_bus_id: device.bus_id.map(|id| id.to_string()),
    };
    topology.rdma().iter().map(nic).collect()
}

fn names(topology: &Topology, gpu: BusId) -> Vec<String> {
    let nearest = topology.nearest_nics(gpu);
    nearest.iter().flat_map(|(nic, _)| topology.rdma_at(*nic)).map(|nic| nic.name.clone()).collect()
}

fn findings(topology: &Topology, gpu: BusId, nic: &str) -> Vec<(&'static str, String)> {
    let found = topology.findings(gpu, bus_id(topology, nic), None);
    found.into_iter().map(|finding| (finding.name, finding.what)).collect()
}

/// P2P-05, ARM-05: the ids are those of the kernel's vfio driver for GPUs with NVLink-C2C.
#[test]
fn devices_with_a_coherent_link_are_known_by_their_ids() {
    let links = |name: &str| {
        let topology = open(name);
        let gpus = topology.accelerators();
        gpus.map(|gpu| (gpu.has_c2c(), gpu.is_integrated())).collect::<Vec<_>>()
    };
    assert_eq!(links("gh200"), [(true, false)]);
    assert_eq!(links("gb200"), [(true, false); 4]);
    assert_eq!(links("gb10"), [(false, true)]);
    assert_eq!(links("hgx-h100"), [(false, false); 8]);
}

/// P2P-05, ARM-05: a path over NVLink-C2C passes one host bridge, that of the NIC.
#[test]
fn nics_of_the_cpu_are_near_a_gpu_over_c2c() {
    let gh200 = open("gh200");
    let (gpu, nic) = (id("0009:01:00.0"), bus_id(&gh200, "mlx5_1"));
    let path = gh200.path(gpu, nic).unwrap();
    assert_eq!((path.distance, path.numa_unknown), (Distance::Phb, false));
    let hops: Vec<_> = path.hops.iter().map(ToString::to_string).collect();
    let expected = [
        "0009:01:00.0",
        "NVLink-C2C",
        "pci0002:00 (host-bridge)",
        "0002:00:00.0 (root-port)",
        "0002:01:00.0",
    ];
    assert_eq!(hops, expected);
    let back: Vec<_> = gh200.path(nic, gpu).unwrap().hops.iter().rev().copied().collect();
    assert_eq!(back, path.hops);
    assert_eq!(names(&gh200, gpu), ["mlx5_0", "mlx5_1"]);
    assert_eq!(findings(&gh200, gpu, "mlx5_1"), [], "the NIC needs no shorter PCIe path");
}

/// P2P-05
#[test]
fn nics_of_another_cpu_are_far_from_a_gpu_over_c2c() {
    let gb200 = open("gb200");
    let gpu = id("0008:04:00.0");
    let path = gb200.path(gpu, bus_id(&gb200, "mlx5_5")).unwrap();
    assert_eq!((path.distance, path.hops.len()), (Distance::Sys, 6));
    assert_eq!(path.hops[1..3], [Hop::C2c, Hop::Interconnect]);
    assert_eq!(names(&gb200, gpu), ["mlx5_0", "mlx5_1", "mlx5_4"]);
    assert_eq!(names(&gb200, id("0019:04:00.0")), ["mlx5_2", "mlx5_3", "mlx5_5"]);
    let between = gb200.path(gpu, id("0009:04:00.0")).unwrap();
    assert_eq!(between.distance, Distance::Node, "two GPUs have no NIC's path between them");
    assert!(!between.hops.contains(&Hop::C2c));
}

/// P2P-05
#[test]
fn nic_at_the_gpus_switch_is_nearer_than_nics_over_c2c() {
    let efa = open("gb200-efa");
    let gpu = id("0008:03:00.0");
    assert_eq!(names(&efa, gpu), ["efa_0"]);
    let distances: Vec<_> =
        efa.nics_by_distance(gpu).iter().map(|(_, path)| path.distance).collect();
    assert_eq!(distances, [Distance::Pix, Distance::Phb, Distance::Phb, Distance::Phb]);
}

/// P2P-05, HM-09
#[test]
fn facts_tell_if_a_nic_shares_the_switch_of_a_gpu_with_c2c() {
    let links = |machine: &str, gpu: &str| {
        let folder = make(machine);
        let topology = Topology::open(folder.path()).unwrap();
        let source = LocalMachine::below(folder.path());
        let link = |nic: Nic| {
            let link = source.coherent_link(gpu, &nic);
            assert_eq!(source.facts(Some(gpu), &nic).coherent_link, link);
            link
        };
        nics(&topology).into_iter().map(link).collect::<Vec<_>>()
    };
    let c2c = |shares_switch| Some(CoherentLink::C2c { shares_switch });
    let efa = links("gb200-efa", "0009:03:00.0");
    assert_eq!(efa, [c2c(false), c2c(true), c2c(false), c2c(false)]);
    assert_eq!(links("gb200", "0008:04:00.0"), [c2c(false); 6]);
    assert_eq!(links("gb10", "000f:01:00.0"), [Some(CoherentLink::Integrated); 4]);
    assert_eq!(links("hgx-h100", "0000:1c:00.0"), [None; 9]);
}

/// P2P-05: nodes without CPUs are memory of the GPU, or empty places for parts of it (MIG).
#[test]
fn nodes_with_memory_and_without_cpus_are_known() {
    let memory_only = |name: &str| {
        let topology = open(name);
        let nodes = topology.numa().iter().filter(|node| node.is_memory_only());
        nodes.map(|node| (node.id, topology.nearest_cpu_node(node.id).unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(memory_only("gh200"), [(1, 0)]);
    assert_eq!(memory_only("gb200"), [(2, 0), (10, 0), (18, 1), (26, 1)]);
    assert_eq!(memory_only("gb10"), []);
    assert_eq!(memory_only("dgx-a100"), [], "unknown memory is no memory-only node");
    let folder = make("gb200");
    let facts = LocalMachine::below(folder.path()).facts(None, &nics(&open("gb10"))[0]);
    assert_eq!(facts.memory_only_nodes, [2, 10, 18, 26].into());
}

/// P2P-05
#[test]
fn memory_of_a_node_without_cpus_has_the_nics_of_the_nearest_cpus() {
    let gb200 = open("gb200");
    let all = nics(&gb200);
    let all: Vec<_> = all.iter().collect();
    let choice = gb200.choose_nics(Locality::Node(18), &all, 3).unwrap();
    let chosen: Vec<_> = choice.chosen().iter().map(|nic| nic.nic.name.as_str()).collect();
    assert_eq!(chosen, ["mlx5_2", "mlx5_3", "mlx5_5"]);
    let note = choice.chosen()[0].note.unwrap();
    assert!(choice.to_string().contains(note) && note.contains("node with CPUs"), "{choice}");
    let ordinary = gb200.choose_nics(Locality::Node(1), &all, 1).unwrap();
    assert_eq!(ordinary.chosen()[0].note, None);
}

/// P2P-05: NICs have no NUMA node here, and only one node has CPUs.
#[test]
fn empty_nodes_do_not_make_a_distance_unknown() {
    let folder = make("gh200");
    for nic in ["0000:00/0000:00:00.0/0000:01:00.0", "0002:00/0002:00:00.0/0002:01:00.0"] {
        folder.write(&format!("sys/devices/pci{nic}/numa_node"), "-1\n");
    }
    let gh200 = Topology::open(folder.path()).unwrap();
    let path = gh200.path(id("0009:01:00.0"), bus_id(&gh200, "mlx5_0")).unwrap();
    assert_eq!((path.distance, path.numa_unknown), (Distance::Phb, false));
}

/// P2P-05: openucx/ucx#11571 and ai-dynamo/nixl#1768 had ports that were down.
#[test]
fn a_port_that_is_down_is_found() {
    let gb200 = open("gb200");
    let gpu = id("0008:04:00.0");
    let of = |nic: &str| findings(&gb200, gpu, nic);
    let port = |found: &[(&str, String)]| {
        found.iter().find(|(name, _)| *name == "port").map(|(_, what)| what.clone())
    };
    assert_eq!(port(&of("mlx5_0")).unwrap(), "no port of mlx5_0 (0000:01:00.0) is active");
    assert_eq!(port(&of("mlx5_4")), None);
}

/// P2P-05
#[test]
fn a_data_direct_function_beside_the_gpu_is_found() {
    let of = |machine: &str, gpu: &str, nic: &str| {
        let found = findings(&open(machine), id(gpu), nic);
        found.into_iter().find(|(name, _)| *name == "data-direct").map(|(_, what)| what)
    };
    let found = of("gb200", "0019:04:00.0", "mlx5_5").unwrap();
    assert!(found.contains("function 0019:03:00.0 is below the PCIe switch"), "{found}");
    assert_eq!(of("gb200-efa", "0008:03:00.0", "efa_0"), None);
    assert_eq!(of("gh200", "0009:01:00.0", "mlx5_0"), None);
}

/// P2P-05
#[test]
fn integrated_gpu_has_the_remedy_of_host_memory() {
    let gb10 = open("gb10");
    let (gpu, nic) = (id("000f:01:00.0"), bus_id(&gb10, "rocep1s0f0"));
    assert_eq!(gb10.path(gpu, nic).unwrap().distance, Distance::Phb);
    let found = gb10.findings(gpu, nic, None);
    let names: Vec<_> = found.iter().map(|finding| finding.name).collect();
    assert_eq!(names, ["iommu", "integrated"]);
    assert!(found[0].remedy.contains("iommu.passthrough=1"), "{found:?}");
    let found = found.iter().find(|finding| finding.name == "integrated").unwrap();
    assert!(found.what.contains("no GPUDirect RDMA"), "{found:?}");
    assert!(found.remedy.contains("cuMemHostAlloc"), "{found:?}");
    let gh200 = open("gh200");
    let others = findings(&gh200, id("0009:01:00.0"), "mlx5_0");
    assert!(others.iter().all(|(name, _)| *name != "integrated"), "{others:?}");
}
