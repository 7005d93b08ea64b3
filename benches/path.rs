//! Cost of the choice of a path from a NIC to device memory.
//!
//! The benchmark measures the lookup of the path that an earlier registration chose. The reference
//! is a lookup in a `HashMap`. The benchmark also counts the driver calls of the first
//! registrations, which choose the paths.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{collections::HashMap, hint::black_box, sync::Arc};

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Hmem, Iface, Path,
    iface::AllocRequest,
    loopback::{self, Loopback},
    path::P2pPolicy,
    system::{DeviceCall, DmaBufKind, P2pMatrix, Simulated},
};
use report::Target;

/// Number of simulated devices and of NICs, as in a node with eight GPUs. Each NIC reaches only
/// half of the devices by a direct path.
const DEVICES: u32 = 8;
const NICS: u32 = 8;

struct Node {
    device: Arc<Simulated>,
    faults: loopback::Faults,
    hmem: Hmem,
    domains: Vec<Domain>,
}

fn nic(number: u32) -> String {
    format!("loop{number}")
}

impl Node {
    fn new() -> Self {
        let mut matrix = P2pMatrix::all_reachable();
        for device in 0..DEVICES {
            for number in (0..NICS).filter(|number| !(number + device).is_multiple_of(2)) {
                matrix = matrix.block(DeviceId(device), nic(number));
            }
        }
        let device =
            Simulated::builder().devices(DEVICES).p2p(matrix).dma_buf(DmaBufKind::MemFd).build();
        let device = Arc::new(device.expect("the simulated device starts"));
        let faults = loopback::Faults::new();
        let provider =
            (0..NICS).fold(Loopback::builder(), |builder, number| builder.nic(nic(number)));
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device) as Arc<dyn Iface>)
            .provider(provider.faults(&faults).build().expect("a software NIC starts"))
            .build()
            .expect("the ifaces start");
        let attr =
            |number| DomainAttr { nic: Some(nic(number)), hmem: true, ..DomainAttr::default() };
        let domains = (0..NICS)
            .map(|number| hmem.domain("loopback", attr(number)).expect("a domain"))
            .collect();
        Self { device, faults, hmem, domains }
    }

    fn buffer(&self, device: u32) -> DeviceBuffer {
        let iface: Arc<dyn Iface> = Arc::clone(&self.device) as _;
        let request =
            AllocRequest { len: 4096, device: DeviceId(device), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&iface, &request).expect("device memory is left")
    }

    /// Registers memory of each device with each NIC. Returns how often the drivers meanwhile
    /// created memory, exported memory, and registered memory.
    fn register_all(&self) -> [u64; 3] {
        let calls = || {
            let stats = self.device.stats();
            let exports =
                stats.calls(DeviceCall::ExportDmaBuf) + stats.calls(DeviceCall::ExportPeerMemory);
            [
                stats.calls(DeviceCall::CreateMemory),
                exports,
                self.faults.calls(loopback::NicCall::Register),
            ]
        };
        let before = calls();
        for device in 0..DEVICES {
            for (number, domain) in self.domains.iter().enumerate() {
                let region =
                    domain.register(self.buffer(device), Access::REMOTE_READ).expect("register");
                let direct = (number as u32 + device).is_multiple_of(2);
                let expected = if direct { Path::DmaBuf } else { Path::Staged };
                assert_eq!(region.decision().expect("registered").path, expected);
                drop(region.close().expect("close"));
            }
        }
        let after = calls();
        [0, 1, 2].map(|at| after[at] - before[at])
    }
}

fn main() {
    let node = Node::new();
    node.faults.start_counting();
    let pairs = u64::from(DEVICES * NICS);
    println!(
        "driver calls to register a page of each of {DEVICES} devices with each of {NICS} NICs; \
         half of the pairs have no direct path:"
    );
    for round in ["first", "second"] {
        let [memory, exports, registrations] = node.register_all();
        println!(
            "  {round} round: {} pages probed ({} pairs without a direct path), {exports} exports, \
             {registrations} registrations",
            memory - pairs,
            pairs / 2
        );
    }

    let attr = node.domains[3].provider_attr();
    let buffer = node.buffer(5);
    let owner =
        node.hmem.registry().owner_of(buffer.allocation().base()).expect("a lookup succeeds");
    let paths = node.hmem.paths();
    assert!(paths.remembered(&owner, attr, P2pPolicy::Enabled, None, false).is_some());

    let known: HashMap<(u32, u32, String), Arc<u64>> = (0..DEVICES * NICS)
        .map(|pair| ((0x100, pair / NICS, nic(pair % NICS)), Arc::new(u64::from(pair))))
        .collect();
    let key = (0x100, 5, nic(3));
    let policy = P2pPolicy::Enabled;
    report::print(vec![report::compare(
        "path chosen before / std's HashMap by (iface, device, NIC name)",
        Target::Nanoseconds(100.0),
        || {
            black_box(paths.remembered(black_box(&owner), black_box(attr), policy, None, false));
        },
        || {
            black_box(known.get(black_box(&key)).cloned());
        },
    )]);
}
