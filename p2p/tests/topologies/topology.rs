//! Topology of recorded machines: published distances, and the contents of a recording.

use std::{fs, io::Read};

use crate::topology_machines::{Folder, MACHINES, SECRETS, SERIAL, fixtures, make, recording};
use flate2::read::GzDecoder;
use hmem_core::{ErrorKind, provider::Nic};
use hmem_p2p::{
    path::{FactSource, LocalMachine},
    topology::{
        Acs, BusId, Distance, IommuMode, Port, RdmaDevice, Redirection, Role, Setting, Topology,
    },
};

fn open(name: &str) -> Topology {
    Topology::open(recording(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn id(text: &str) -> BusId {
    text.parse().unwrap()
}

fn rdma_named<'a>(topology: &'a Topology, name: &str) -> &'a RdmaDevice {
    let found = topology.rdma().iter().find(|device| device.name == name);
    found.unwrap_or_else(|| panic!("no {name}"))
}

fn nic(topology: &Topology, name: &str) -> BusId {
    rdma_named(topology, name).bus_id.expect("an RDMA device of hardware")
}

/// Returns the distances from each GPU to the NICs with these names. GPUs are ordered by address.
fn matrix(topology: &Topology, nics: impl Fn(usize) -> String, count: usize) -> Vec<String> {
    let row = |gpu: BusId| {
        let to = |column| topology.path(gpu, nic(topology, &nics(column))).unwrap().distance.name();
        (0..count).map(to).collect::<Vec<_>>().join(" ")
    };
    topology.accelerators().map(|gpu| row(gpu.bus_id)).collect()
}

/// P2P-05
///
/// The distances in a DGX A100 equal the published ones. NVIDIA/nccl#1505 publishes rows 0 to 4.
/// Rows 5 to 7 follow from the symmetry of the machine (fixtures/topology/README.md).
#[test]
fn a_dgx_a100_has_its_published_distances() {
    let published = [
        "PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS",
        "PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS",
        "SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS",
        "SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS",
        "SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS",
        "SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS",
        "SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS",
        "SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS",
    ];
    let dgx = open("dgx-a100");
    assert_eq!(matrix(&dgx, |column| format!("mlx5_{column}"), 12), published);
    let cpus: Vec<_> = ["0000:07:00.0", "0000:47:00.0", "0000:87:00.0"]
        .map(|gpu| {
            let node = dgx.device(id(gpu)).unwrap().numa_node;
            dgx.numa().iter().find(|numa| Some(numa.id) == node).unwrap().cpus.as_str()
        })
        .into();
    assert_eq!(cpus, ["48-63,176-191", "16-31,144-159", "112-127,240-255"]);
}

/// P2P-05
///
/// The distances in an HGX H100 equal the published ones. NVIDIA/nccl#1453 publishes all rows of
/// the matrix.
#[test]
fn an_hgx_h100_has_its_published_distances() {
    let published = [
        "SYS SYS SYS SYS SYS NODE NODE NODE PIX",
        "SYS SYS SYS SYS SYS NODE NODE PIX NODE",
        "SYS SYS SYS SYS SYS NODE PIX NODE NODE",
        "SYS SYS SYS SYS SYS PIX NODE NODE NODE",
        "SYS NODE NODE NODE PIX SYS SYS SYS SYS",
        "SYS NODE NODE PIX NODE SYS SYS SYS SYS",
        "SYS NODE PIX NODE NODE SYS SYS SYS SYS",
        "SYS PIX NODE NODE NODE SYS SYS SYS SYS",
    ];
    let hgx = open("hgx-h100");
    assert_eq!(matrix(&hgx, |column| format!("mlx5_{column}"), 9), published);
    // The NUMA node of mlx5_0 is not known, so the path marks its distance as a guess.
    let gpu = hgx.accelerators().next().unwrap().bus_id;
    assert!(hgx.path(gpu, nic(&hgx, "mlx5_0")).unwrap().numa_unknown);
    assert!(!hgx.path(gpu, nic(&hgx, "mlx5_1")).unwrap().numa_unknown);
}

/// P2P-05
///
/// The distances in a server with two sockets equal the published ones. lattice/quda#669 publishes
/// the whole matrix, including the distances between GPUs.
#[test]
fn a_two_socket_server_has_its_published_distances() {
    let published = [
        "X PIX PXB PXB SYS SYS SYS SYS SYS",
        "PIX X PXB PXB SYS SYS SYS SYS SYS",
        "PXB PXB X PIX SYS SYS SYS SYS SYS",
        "PXB PXB PIX X SYS SYS SYS SYS SYS",
        "SYS SYS SYS SYS X PIX PXB PXB PHB",
        "SYS SYS SYS SYS PIX X PXB PXB PHB",
        "SYS SYS SYS SYS PXB PXB X PIX PHB",
        "SYS SYS SYS SYS PXB PXB PIX X PHB",
        "SYS SYS SYS SYS PHB PHB PHB PHB X",
    ];
    let server = open("two-socket-acs");
    let mut all: Vec<_> = server.accelerators().map(|gpu| gpu.bus_id).collect();
    all.push(nic(&server, "mlx5_0"));
    let row = |from: &BusId| {
        let to = |to: &BusId| server.path(*from, *to).unwrap().distance.name();
        all.iter().map(to).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(all.iter().map(row).collect::<Vec<_>>(), published);
}

/// P2P-05
///
/// The distances in a server with NICs behind a switch equal the published ones.
/// NVIDIA/nccl-tests#29 publishes rows 0 to 6 of the matrix.
#[test]
fn server_with_nics_behind_a_switch_has_published_distances() {
    let server = open("switch-acs");
    let published = [
        "NODE NODE",
        "NODE NODE",
        "PIX PIX",
        "PIX PIX",
        "SYS SYS",
        "SYS SYS",
        "SYS SYS",
        "SYS SYS",
    ];
    assert_eq!(matrix(&server, |column| format!("mlx5_{column}"), 2), published);
    let path = server.path(id("0000:3d:00.0"), nic(&server, "mlx5_0")).unwrap();
    assert_eq!(path.redirection, Redirection::By(vec![id("0000:3c:04.0"), id("0000:3c:0c.0")]));
    let ports = server.path(nic(&server, "mlx5_0"), nic(&server, "mlx5_1")).unwrap();
    assert_eq!((ports.distance, ports.hops.len()), (Distance::Pix, 3), "two functions of a card");
}

/// P2P-05
///
/// A virtual machine shows devices without switches or bridges. Their distance is then that of one
/// host bridge (NVIDIA/nccl#1674).
#[test]
fn flat_virtual_machine_is_one_host_bridge() {
    let vm = open("cloud-vm");
    assert_eq!(matrix(&vm, |_| "mlx5_0".into(), 1), ["PHB"; 8]);
    assert_eq!(vm.iommu(), IommuMode::Off);
    assert!(vm.devices().all(|device| device.numa_node.is_none() && device.bridges.is_empty()));
    assert_eq!(vm.nearest_accelerators(nic(&vm, "mlx5_0")).len(), 8);
}

/// P2P-05
///
/// A machine without NICs is not an error.
#[test]
fn a_laptop_has_gpus_and_no_nic() {
    let laptop = open("laptop");
    let gpus: Vec<_> = laptop.accelerators().map(|gpu| gpu.bus_id).collect();
    assert_eq!(gpus, [id("0000:00:02.0"), id("0000:01:00.0")]);
    assert!(laptop.rdma().is_empty());
    assert!(laptop.nics_by_distance(gpus[1]).is_empty());
    let path = laptop.path(gpus[0], gpus[1]).unwrap();
    assert_eq!(path.distance, Distance::Phb);
    assert_eq!(path.redirection, Redirection::None, "it goes to the root complex anyway");
    // An unprivileged process reads 64 bytes of configuration space, without ACS.
    assert_eq!(laptop.unreadable_ports().count(), 3);
    assert_eq!(laptop.device(id("0000:00:01.0")).unwrap().port, Port::RootPort);
    assert!(laptop.device(gpus[1]).unwrap().link.unwrap().is_degraded());
    assert_eq!(laptop.iommu(), IommuMode::Translating);
    assert_eq!(laptop.device(id("0000:02:00.0")).unwrap().role(), Role::Network);
    let mut trainium = laptop.device(id("0000:02:00.0")).unwrap().clone();
    (trainium.class, trainium.vendor, trainium.device) = (0x088000, 0x1d0f, 0x7164);
    assert_eq!(trainium.role(), Role::Accelerator);
    // These are the class and the device id of Amazon's network adapter.
    (trainium.class, trainium.device) = (0x020000, 0xec20);
    assert_eq!(trainium.role(), Role::Network);
}

/// P2P-05
#[test]
fn the_nearest_nic_and_the_nearest_devices_are_found() {
    let dgx = open("dgx-a100");
    let near = |gpu: &str| -> Vec<String> {
        let nics = dgx.nearest_nics(id(gpu));
        nics.iter().map(|(nic, _)| dgx.rdma_at(*nic).next().unwrap().name.clone()).collect()
    };
    // GPU1 shares the inner switch with mlx5_0.
    assert_eq!(near("0000:0f:00.0"), ["mlx5_0", "mlx5_1"]);
    assert_eq!(near("0000:47:00.0"), ["mlx5_2", "mlx5_3"]);
    let devices = dgx.nearest_accelerators(nic(&dgx, "mlx5_9"));
    assert_eq!(
        devices.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        [id("0000:b7:00.0"), id("0000:bd:00.0")]
    );
    let all = dgx.nics_by_distance(id("0000:07:00.0"));
    assert_eq!(all.len(), 12);
    assert!(all.is_sorted_by_key(|(_, path)| path.distance));
    assert!(dgx.nics_by_distance(id("0000:ff:00.0")).is_empty());
}

/// P2P-05
///
/// A driver's device numbers depend on the environment. PCI addresses do not, in any notation.
#[test]
fn renumbered_devices_have_the_same_nearest_nic() {
    let dgx = open("dgx-a100");
    // The order of the CUDA driver without, and with, CUDA_VISIBLE_DEVICES=7,2,0.
    let all =
        ["07", "0F", "47", "4E", "87", "90", "B7", "BD"].map(|bus| format!("00000000:{bus}:00.0"));
    let visible = [7, 2, 0].map(|ordinal: usize| all[ordinal].clone());
    let nearest = |address: &String| dgx.nearest_nics(address.parse().unwrap());
    let renumbered: Vec<_> = visible.iter().map(nearest).collect();
    assert_eq!(renumbered, [7, 2, 0].map(|ordinal: usize| nearest(&all[ordinal])));
    assert_ne!(nearest(&visible[0]), nearest(&all[0]), "ordinal 0 is another device now");
}

/// P2P-05, DIAG-03
///
/// Paths and findings name the ports that redirect traffic, and the state of the IOMMU.
#[test]
fn ports_that_redirect_are_named() {
    let server = open("two-socket-acs");
    let gpus: Vec<_> = server.accelerators().map(|gpu| gpu.bus_id).collect();
    let path = server.path(gpus[0], gpus[1]).unwrap();
    assert_eq!(path.distance, Distance::Pix);
    assert_eq!(path.redirection, Redirection::By(vec![id("0000:05:08.0"), id("0000:05:10.0")]));
    // Without privilege the ACS of these ports is unknown, and the path says so.
    let machine = make("two-socket-acs");
    for port in ["05:08.0", "05:10.0"] {
        let config = machine.path().join(format!("sys/bus/pci/devices/0000:{port}/config"));
        let bytes = fs::read(&config).unwrap();
        fs::write(config, &bytes[..64]).unwrap();
    }
    let blind = Topology::open(machine.path()).unwrap();
    let unknown = Redirection::Unknown(vec![id("0000:05:08.0"), id("0000:05:10.0")]);
    assert_eq!(blind.path(gpus[0], gpus[1]).unwrap().redirection, unknown);
    assert_eq!(blind.device(id("0000:05:08.0")).unwrap().port, Port::Downstream, "by its place");
    let Acs::Control(control) = server.device(id("0000:05:08.0")).unwrap().acs else {
        panic!("no ACS")
    };
    assert_eq!(
        control.names().collect::<Vec<_>>(),
        ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]
    );
    // Traffic that passes the root complex anyway is not redirected.
    let path = server.path(id("0000:86:00.0"), nic(&server, "mlx5_0")).unwrap();
    assert_eq!((path.distance, path.redirection), (Distance::Phb, Redirection::None));
    assert_eq!(server.iommu(), IommuMode::Translating);
    assert_eq!(server.kernel().command_line, ["intel_iommu=on"]);

    let dgx = open("dgx-a100");
    let path = dgx.path(id("0000:07:00.0"), nic(&dgx, "mlx5_0")).unwrap();
    assert_eq!(path.redirection, Redirection::None);
    assert_eq!(dgx.iommu(), IommuMode::Passthrough);
    let ports: Vec<_> = path.hops.iter().map(ToString::to_string).collect();
    assert_eq!(ports.first().unwrap(), "0000:07:00.0");
    assert_eq!(ports.last().unwrap(), "0000:0c:00.0");
    assert!(ports.contains(&"0000:01:00.0 (switch-upstream)".to_owned()), "{ports:?}");
    assert!(!ports.iter().any(|port| port.contains("host-bridge")), "{ports:?}");
}

/// DIAG-03
///
/// The facts about a refusal include ACS redirection between the device and the NIC.
#[test]
fn facts_of_a_refusal_include_acs() {
    let nic =
        |id: &str| Nic { provider: "verbs".into(), name: "x".into(), pci_bus_id: Some(id.into()) };
    let machine = make("switch-acs");
    let here = LocalMachine::below(machine.path());
    let facts = here.facts(Some("0000:3d:00.0"), &nic("0000:3f:00.0"));
    assert_eq!((facts.acs_redirects, facts.iommu_translates), (Some(true), Some(true)));
    assert_eq!(here.facts(Some("0000:1a:00.0"), &nic("0000:3f:00.0")).acs_redirects, Some(false));
    assert_eq!(here.facts(Some("0000:ee:00.0"), &nic("0000:3f:00.0")).acs_redirects, None);
    assert_eq!(here.facts(None, &nic("nowhere")).acs_redirects, None);
    let config = machine.path().join("sys/bus/pci/devices/0000:3c:0c.0/config");
    fs::write(&config, &fs::read(&config).unwrap()[..64]).unwrap();
    assert_eq!(
        here.facts(Some("0000:3d:00.0"), &nic("0000:3f:00.0")).acs_redirects,
        Some(true),
        "one is enough"
    );
    let config = machine.path().join("sys/bus/pci/devices/0000:3c:04.0/config");
    fs::write(&config, &fs::read(&config).unwrap()[..64]).unwrap();
    assert_eq!(
        here.facts(Some("0000:3d:00.0"), &nic("0000:3f:00.0")).acs_redirects,
        None,
        "not known"
    );
}

/// P2P-05, DIAG-03
///
/// A topology contains the BARs, links, modules and kernel options on which causes of refusals
/// depend.
#[test]
fn facts_that_causes_depend_on_are_read() {
    let dgx = open("dgx-a100");
    let gpu = dgx.device(id("0000:07:00.0")).unwrap();
    assert_eq!(gpu.largest_bar(), 64 << 30);
    assert_eq!((gpu.vendor, gpu.device, gpu.driver.as_deref()), (0x10de, 0x20b0, Some("nvidia")));
    let link = gpu.link.unwrap();
    assert_eq!((link.speed, link.width, link.is_degraded()), (Some(16.0), Some(16), false));
    assert_eq!(dgx.kernel().peer_memory().collect::<Vec<_>>(), ["nvidia_peermem"]);
    assert_eq!(dgx.kernel().option("CONFIG_DMABUF_MOVE_NOTIFY"), Some(Setting::Yes));
    assert_eq!(dgx.kernel().option("CONFIG_MLX5_INFINIBAND"), Some(Setting::Module));
    assert_eq!(dgx.kernel().option("CONFIG_HSA_AMD_P2P"), Some(Setting::No));
    assert!(!dgx.kernel().nvidia.as_ref().unwrap().open);
    assert!(open("hgx-h100").kernel().nvidia.as_ref().unwrap().open);
    assert_eq!(open("hgx-h100").kernel().peer_memory().count(), 0);
    assert_eq!(
        open("cloud-vm").kernel().option("CONFIG_PCI_P2PDMA"),
        None,
        "no configuration to read"
    );
    let port = &rdma_named(&dgx, "mlx5_5").ports[0];
    assert_eq!(
        (port.link_layer.as_deref(), port.rate, port.active),
        (Some("Ethernet"), Some(100), Some(true))
    );
}

/// Each recording equals the recording that is made from its description now. `HMEM_BLESS=1` writes
/// the recordings.
#[test]
fn recordings_match_their_descriptions() {
    for name in MACHINES {
        let machine = make(name);
        let topology =
            Topology::open(machine.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut made = Vec::new();
        topology.record(&mut made).unwrap();
        if std::env::var_os("HMEM_BLESS").is_some() {
            fs::write(recording(name), &made).unwrap();
        }
        let kept = fs::read(recording(name)).expect("HMEM_BLESS=1 makes it");
        assert!(unpacked(&made) == unpacked(&kept), "{name}: the description says otherwise");
        assert!(kept.len() < 32 << 10, "{name} has {} bytes", kept.len());
    }
}

fn unpacked(gzip: &[u8]) -> Vec<u8> {
    let mut tar = Vec::new();
    GzDecoder::new(gzip).read_to_end(&mut tar).unwrap();
    tar
}

fn holds(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window.eq_ignore_ascii_case(needle))
}

/// P2P-05
///
/// A recording holds nothing that identifies the machine, so it can be published.
#[test]
fn a_recording_holds_no_serial_number_address_or_host_name() {
    for name in MACHINES {
        let machine = make(name);
        // A kernel and an RDMA device with the host name in their names.
        if name == "dgx-a100" {
            machine.write("proc/sys/kernel/osrelease", "6.9.0-GPU-NODE-17-rc1\n");
            let folder = "sys/devices/virtual/infiniband/gpu-node-17_rxe";
            machine.write(&format!("{folder}/ports/1/state"), "4: ACTIVE");
            machine.link("sys/class/infiniband/gpu-node-17_rxe", &format!("../../../{folder}"));
        }
        let mut made = Vec::new();
        let topology = Topology::open(machine.path()).unwrap();
        topology.record(&mut made).unwrap();
        let tar = unpacked(&made);
        for secret in SECRETS {
            assert!(!holds(&tar, secret.as_bytes()), "{name}: {secret} is in the recording");
        }
        assert!(!holds(&tar, &SERIAL), "{name}: the serial number is in the recording");
        if name == "dgx-a100" {
            let archive = machine.path().join("recording.tar.gz");
            fs::write(&archive, &made).unwrap();
            let read = Topology::open(&archive).unwrap();
            assert_eq!(read.kernel().release.as_deref(), Some("6.9.0-host-rc1"));
            assert_eq!(rdma_named(&read, "host_rxe").bus_id, None, "software has no PCI address");
        }
    }
}

/// P2P-05
///
/// A recording gives the same topology as the machine, packed or unpacked, recorded once or twice.
#[test]
fn recording_equals_the_machine() {
    for name in MACHINES {
        let machine = make(name);
        fs::remove_file(machine.path().join("proc/sys/kernel/hostname")).unwrap();
        let topology = Topology::open(machine.path()).unwrap();
        assert_eq!(open(name), topology, "{name}");
        let (mut once, mut twice) = (Vec::new(), Vec::new());
        topology.record(&mut once).unwrap();
        open(name).record(&mut twice).unwrap();
        assert_eq!(once, twice, "{name}");
    }
}

/// P2P-05
///
/// A recording of the machine that runs the test gives the same topology as the machine.
#[test]
fn recording_equals_the_running_machine() {
    let here = Topology::read().unwrap();
    let folder = Folder::new();
    let archive = folder.path().join("here.tar.gz");
    here.record(fs::File::create(&archive).unwrap()).unwrap();
    let read = Topology::open(&archive).unwrap();
    assert!(here.devices().eq(read.devices()));
    assert_eq!(here.iommu(), read.iommu());
    assert_eq!(here.numa(), read.numa());
    assert_eq!(here.kernel().options, read.kernel().options);
}

fn refused(folder: &Folder) -> (ErrorKind, String) {
    let error = Topology::open(folder.path()).unwrap_err();
    assert!(error.remedy_text().is_some(), "{error}");
    (error.kind(), error.to_string())
}

/// REL-03
///
/// The error for a malformed file names the file and has a remedy.
#[test]
fn malformed_file_is_named_with_a_remedy() {
    let gpu = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0";
    let cases = [
        (format!("{gpu}/class"), "GPU"),
        (format!("{gpu}/vendor"), "0x123456"),
        (format!("{gpu}/numa_node"), "-7"),
        (format!("{gpu}/numa_node"), "99999999999999999999"),
        (format!("{gpu}/resource"), "0x5 0x2 0x200"),
        (format!("{gpu}/resource"), "0x0 0xffffffffffffffff 0x200"),
        (format!("{gpu}/config"), "short"),
        (format!("{gpu}/current_link_speed"), "fast"),
        (format!("{gpu}/max_link_width"), "4096"),
        ("proc/modules".to_owned(), "nvidia lots"),
        ("sys/devices/system/node/node0/cpulist".to_owned(), "all"),
        ("proc/config.gz".to_owned(), "CONFIG_PCI=y"),
        ("hmem-recording".to_owned(), "version 2"),
    ];
    let machine = make("laptop");
    for (path, contents) in cases {
        let before = fs::read(machine.path().join(&path));
        machine.write(&path, contents);
        let (kind, text) = refused(&machine);
        assert_eq!(kind, ErrorKind::Malformed, "{text}");
        assert!(text.contains(&path), "{path} is not in: {text}");
        match before {
            Ok(bytes) => machine.write(&path, bytes),
            Err(_) => fs::remove_file(machine.path().join(&path)).unwrap(),
        }
    }
    machine.write("proc/modules", vec![b'x'; (1 << 20) + 1]);
    assert!(refused(&machine).1.contains("larger than"));
    machine.write("proc/modules", [0xff, 0xfe]);
    assert!(refused(&machine).1.contains("not text"));
}

/// REL-03
///
/// The error names the path if a file is missing, a link leads outside the tree, or an entry is not
/// an ordinary file.
#[test]
fn vanished_files_and_foreign_links_are_named() {
    let vanished = |path: &str| {
        let machine = make("laptop");
        let path = machine.path().join(path);
        if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.unwrap();
        refused(&machine)
    };
    let (kind, text) = vanished("sys/devices/pci0000:00/0000:00:02.0/vendor");
    assert_eq!(kind, ErrorKind::Unavailable);
    assert!(text.contains("0000:00:02.0/vendor") && text.contains("missing"), "{text}");
    let (kind, text) = vanished("sys/bus/pci/devices/0000:00:01.0");
    assert_eq!(kind, ErrorKind::Unavailable, "the bridge above a device");
    assert!(text.contains("0000:00:01.0"), "{text}");
    assert!(vanished("sys/devices/pci0000:00/0000:00:01.0").1.contains("0000:00:01.0"));

    for target in [
        "../devices",
        "0000:09:00.0",
        "/etc",
        "../../../../../../etc",
        "../../../devices/pci0000:00/0000:00:02.0",
    ] {
        let machine = make("laptop");
        machine.link("sys/bus/pci/devices/0000:09:00.0", target);
        let (kind, text) = refused(&machine);
        assert_eq!(kind, ErrorKind::Malformed);
        assert!(text.contains("sys/bus/pci/devices/0000:09:00.0"), "{text}");
    }
    for folder in ["sys/devices/pci0000:00", "sys/bus/pci/devices", "sys/devices/system"] {
        let (machine, elsewhere) = (make("laptop"), Folder::new());
        let (path, moved) = (machine.path().join(folder), elsewhere.path().join("moved"));
        fs::rename(&path, &moved).unwrap();
        machine.link(folder, moved.to_str().unwrap());
        let (kind, text) = refused(&machine);
        assert_eq!(kind, ErrorKind::Malformed);
        assert!(text.contains("a link in place of a folder"), "{text}");
    }
    let machine = make("laptop");
    let class = "sys/devices/pci0000:00/0000:00:02.0/class";
    fs::remove_file(machine.path().join(class)).unwrap();
    machine.link(class, "class");
    assert!(refused(&machine).1.contains(class));
    fs::remove_file(machine.path().join(class)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, machine.path().join(class), 0o600.into()).unwrap();
    assert!(
        refused(&machine).1.contains("not an ordinary file"),
        "a pipe does not block the reader"
    );

    let empty = Folder::new();
    assert!(refused(&empty).1.contains("sys folder"));
    let error = Topology::open(empty.path().join("nowhere")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(format!("{error:#}").contains("nowhere"), "{error}");
}

/// REL-03
///
/// A recording that was cut off at any byte is an error.
#[test]
fn truncated_recording_is_refused() {
    let whole = fs::read(recording("laptop")).unwrap();
    let folder = Folder::new();
    for len in (0..whole.len()).step_by(97) {
        folder.write("cut.tar.gz", &whole[..len]);
        let error = Topology::open(folder.path().join("cut.tar.gz")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.to_string().contains("cut.tar.gz"), "{error}");
    }
    let error = Topology::open(fixtures().join("laptop.txt")).unwrap_err().to_string();
    assert!(error.contains("laptop.txt") && error.contains("tar"), "{error}");
}

/// P2P-05: the PCIe switch on an AMD card hides the slot's link from the GPU.
#[test]
fn degraded_links_of_the_path_are_found_at_their_lower_ends() {
    let machine = make("switch-acs");
    let bridges = ["0000:17/0000:17:00.0", "0000:17/0000:17:00.0/0000:18:00.0"];
    let shared = ["0000:3a/0000:3a:00.0/0000:3b:00.0"];
    for bridge in bridges.iter().chain(&shared) {
        machine.write(&format!("sys/devices/pci{bridge}/current_link_width"), "4\n");
    }
    let topology = Topology::open(machine.path()).unwrap();
    let links = |gpu| {
        let found = topology.findings(id(gpu), nic(&topology, "mlx5_0"), None);
        let links = found.into_iter().filter(|finding| finding.name == "link");
        links.map(|link| link.what).collect::<Vec<_>>()
    };
    let of = |id| format!("the link of {id} runs at 8 GT/s x4 of 8 GT/s x16");
    assert_eq!(links("0000:1a:00.0"), [of("0000:18:00.0"), of("0000:3b:00.0")]);
    assert_eq!(links("0000:3d:00.0"), [""; 0], "the path stays below the switch");
}
