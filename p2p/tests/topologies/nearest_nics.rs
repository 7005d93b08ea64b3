//! The choice of the NICs nearest to memory, over recorded machines.

use crate::topology_machines::{MACHINES, recording};
use hmem_core::{ErrorKind, provider::Nic};
use hmem_p2p::topology::{BusId, Distance, Locality, NearestNics, Topology};
use proptest::{prelude::*, sample};

fn open(name: &str) -> Topology {
    Topology::open(recording(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn named(name: &str, pci_bus_id: Option<String>) -> Nic {
    Nic { provider: "verbs".into(), name: name.into(), pci_bus_id }
}

/// Returns the RDMA devices of a machine as NICs, in the order in which a provider lists them.
fn nics(topology: &Topology) -> Vec<Nic> {
    let nic = |rdma: &hmem_p2p::topology::RdmaDevice| {
        named(&rdma.name, rdma.bus_id.map(|id| id.to_string()))
    };
    topology.rdma().iter().map(nic).collect()
}

/// Returns the accelerators of a machine, ordered by address.
fn gpus(topology: &Topology) -> Vec<Locality> {
    topology.accelerators().map(|gpu| Locality::Device(gpu.bus_id)).collect()
}

fn choose(topology: &Topology, memory: Locality, nics: &[Nic], count: usize) -> NearestNics {
    let nics: Vec<_> = nics.iter().collect();
    topology.choose_nics(memory, &nics, count).unwrap_or_else(|error| panic!("{memory}: {error}"))
}

fn names(choice: &NearestNics) -> Vec<String> {
    choice.chosen().iter().map(|nic| nic.nic.name.clone()).collect()
}

/// Returns the first chosen NIC for each GPU, with its distance.
fn first_of_each(topology: &Topology) -> Vec<String> {
    let nics = nics(topology);
    let first = |memory| {
        let choice = choose(topology, memory, &nics, 1);
        let nic = &choice.chosen()[0];
        format!("{} {}", nic.nic.name, nic.distance.unwrap())
    };
    gpus(topology).into_iter().map(first).collect()
}

/// P2P-05
///
/// In a DGX A100, two GPUs share two NICs. One of the NICs is nearer to one GPU, so the other GPU
/// starts with the other NIC.
#[test]
fn every_gpu_starts_with_its_own_near_nic() {
    let dgx = first_of_each(&open("dgx-a100"));
    assert_eq!(
        dgx.concat(),
        "mlx5_1 PXBmlx5_0 PXBmlx5_3 PXBmlx5_2 PXBmlx5_7 PXBmlx5_6 PXBmlx5_9 PXBmlx5_8 PXB"
    );
    let hgx = first_of_each(&open("hgx-h100"));
    assert_eq!(
        hgx.concat(),
        "mlx5_8 PIXmlx5_7 PIXmlx5_6 PIXmlx5_5 PIXmlx5_4 PIXmlx5_3 PIXmlx5_2 PIXmlx5_1 PIX"
    );
}

/// P2P-05
///
/// Two GPUs with two equally near ports of one card start with different ports.
#[test]
fn devices_that_share_nics_start_with_different_nics() {
    let server = open("switch-acs");
    let expected = [
        "mlx5_0 NODE",
        "mlx5_1 NODE",
        "mlx5_0 PIX",
        "mlx5_1 PIX",
        "mlx5_0 SYS",
        "mlx5_1 SYS",
        "mlx5_0 SYS",
        "mlx5_1 SYS",
    ];
    let spread = first_of_each(&server);
    assert_eq!(spread.iter().filter(|first| first.starts_with("mlx5_0")).count(), 4, "{spread:?}");
    for (first, expected) in spread.iter().zip(expected) {
        assert_eq!(first.split(' ').next_back(), expected.split(' ').next_back());
    }
    for pair in spread.chunks(2) {
        assert_ne!(pair[0], pair[1], "{spread:?}");
    }
}

/// P2P-05
#[test]
fn host_memory_prefers_nics_of_its_node_in_the_given_order() {
    let hgx = open("hgx-h100");
    let mut listed = nics(&hgx);
    let of_node = |nics: &[Nic], node| names(&choose(&hgx, Locality::Node(node), nics, 4));
    assert_eq!(of_node(&listed, 0), ["mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8"]);
    assert_eq!(of_node(&listed, 1), ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"]);
    let choice = choose(&hgx, Locality::Node(1), &listed, 9);
    let distances: Vec<_> = choice.chosen().iter().map(|nic| nic.distance.unwrap()).collect();
    assert_eq!(distances[..4], [Distance::Node; 4]);
    assert_eq!(distances[4..], [Distance::Sys; 5]);
    // The NUMA node of mlx5_0 is not known.
    let unknown = choice.chosen().iter().find(|nic| nic.nic.name == "mlx5_0").unwrap();
    assert_eq!(unknown.note, Some("a guess, because a NUMA node is not known"));
    listed.reverse();
    assert_eq!(of_node(&listed, 0), ["mlx5_8", "mlx5_7", "mlx5_6", "mlx5_5"]);
    // A machine that reports no nodes has one node.
    let vm = open("cloud-vm");
    let nics_of_vm = nics(&vm);
    assert_eq!(names(&choose(&vm, Locality::Node(0), &nics_of_vm, 1)), ["mlx5_0"]);
}

/// P2P-05
///
/// NICs with an unknown distance come last, in the order of the list, each with the reason.
#[test]
fn nics_at_an_unknown_distance_come_last() {
    let dgx = open("dgx-a100");
    let mut nics = nics(&dgx);
    nics.insert(0, named("rxe0", None));
    nics.insert(1, named("mlx5_99", Some("0000:ff:00.0".into())));
    nics.insert(2, named("odd", Some("not an address".into())));
    let choice = choose(&dgx, gpus(&dgx)[0], &nics, nics.len());
    let last: Vec<_> = choice.chosen()[12..].iter().map(ToString::to_string).collect();
    assert_eq!(
        last,
        [
            "verbs/rxe0 at an unknown distance: the NIC has no PCI address",
            "verbs/mlx5_99 at an unknown distance: the NIC is not in the PCIe tree",
            "verbs/odd at an unknown distance: the NIC is not in the PCIe tree",
        ]
    );
}

/// P2P-05
#[test]
fn choice_displays_chosen_nics_and_all_distances() {
    let dgx = open("dgx-a100");
    let (nics, gpu) = (nics(&dgx), gpus(&dgx)[2]);
    let choice = choose(&dgx, gpu, &nics, 2);
    assert_eq!((choice.memory(), choice.chosen().len(), choice.others().len()), (gpu, 2, 10));
    assert!(choice.chosen().iter().all(|nic| nic.path.as_ref().unwrap().hops.len() > 2));
    let text = choice.to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 13);
    assert_eq!(lines[0], "nearest to device 0000:47:00.0:");
    assert_eq!(lines[1], "  verbs/mlx5_3 at PXB (several PCIe switches, no host bridge)");
    assert!(lines[3].starts_with("  not chosen: verbs/mlx5_"), "{text}");
    let numbers: Vec<_> = (0..nics.len()).collect();
    assert_eq!(choice.pick(&numbers), [3, 2], "items in the order of the NICs that were given");
}

/// P2P-05
#[test]
fn invalid_choices_are_typed_errors() {
    let dgx = open("dgx-a100");
    let (all, gpu) = (nics(&dgx), gpus(&dgx)[0]);
    let mut twice = all.clone();
    twice.push(all[3].clone());
    let absent = Locality::Device("0000:ff:00.0".parse::<BusId>().unwrap());
    let cases = [
        (gpu, &all, 0, ErrorKind::InvalidArgument, "the number of NICs is 0"),
        (gpu, &all, 13, ErrorKind::InvalidArgument, "more NICs are requested than exist"),
        (gpu, &twice, 2, ErrorKind::InvalidArgument, "a NIC is listed twice"),
        (absent, &all, 2, ErrorKind::Unavailable, "the device is not in the PCIe tree"),
        (
            Locality::Node(8),
            &all,
            2,
            ErrorKind::InvalidArgument,
            "the machine does not have the NUMA node",
        ),
    ];
    for (memory, nics, count, kind, why) in cases {
        let nics: Vec<_> = nics.iter().collect();
        let error = dgx.choose_nics(memory, &nics, count).expect_err(why);
        assert_eq!((error.kind(), error.context_value("why")), (kind, Some(why)), "{error}");
        assert!(error.remedy_text().is_some());
    }
    let laptop = open("laptop");
    let error = laptop.choose_nics(gpus(&laptop)[0], &[], 1).expect_err("no NIC");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

proptest! {
    /// P2P-05
    ///
    /// Compares the choice with a naive oracle, for random subsets of NICs in random order:
    ///
    /// - No NIC outside the choice is nearer than a chosen one.
    /// - The order is by distance and hops.
    /// - A larger choice starts with the smaller one.
    #[test]
    fn no_nic_outside_the_choice_is_nearer(
        machine in sample::select(&MACHINES[..5]),
        order in any::<u64>(),
        subset in any::<u16>(),
        device in any::<sample::Index>(),
        count in any::<sample::Index>(),
    ) {
        let topology = open(machine);
        let mut nics: Vec<_> = nics(&topology);
        let weight = |name: &str| {
            let bytes = name.bytes().map(u64::from);
            bytes.fold(order, |weight, byte| weight.wrapping_mul(0x100_0000_01b3) ^ byte)
        };
        nics.sort_by_key(|nic| weight(&nic.name));
        let mut at = 0;
        let keep_all = subset & ((1 << nics.len()) - 1) == 0;
        nics.retain(|_| {
            at += 1;
            keep_all || subset >> (at - 1) & 1 == 1
        });
        let gpus = gpus(&topology);
        let memory = gpus[device.index(gpus.len())];
        let Locality::Device(gpu) = memory else { unreachable!() };
        let count = 1 + count.index(nics.len());
        let choice = choose(&topology, memory, &nics, count);
        let near = |nic: &Nic| {
            let id = nic.pci_bus_id.as_ref().unwrap().parse().unwrap();
            let path = topology.path(gpu, id).unwrap();
            (path.distance, path.hops.len())
        };
        let mut oracle: Vec<_> = nics.iter().map(near).collect();
        oracle.sort();
        let all = choice.chosen().iter().chain(choice.others());
        prop_assert_eq!(all.map(|nic| near(&nic.nic)).collect::<Vec<_>>(), oracle);
        for nic in choice.chosen() {
            prop_assert_eq!(&nics[nic.index], &nic.nic);
        }
        let larger = choose(&topology, memory, &nics, nics.len());
        prop_assert_eq!(&larger.chosen()[..count], choice.chosen());
    }
}
