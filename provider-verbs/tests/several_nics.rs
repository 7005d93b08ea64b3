//! One dma-buf registered on two RDMA devices (VRB-08), if their driver imports dma-bufs.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::sync::Arc;

use hmem_core::{
    AllocationKind, Batch, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Error, ErrorKind,
    Iface, MrMode, Path, Regions, Registry, Rejected, Request, iface::AllocRequest,
    path::P2pPolicy, provider::Provider,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, Simulated, System};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Faults, Loopback, NicCall};
use hmem_provider_verbs::Verbs;
use support::{LOCAL, Pages, REMOTE, Side, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    /// VRB-08
    shared_dma_buf_is_registered_and_rolled_back_on_two_devices,
}

const LEN: u64 = 64 << 10;

/// A simulated device with memory that it exports as real dma-bufs, and two RDMA devices.
struct Machine {
    memory: Arc<Simulated>,
    registry: Arc<Registry>,
    paths: Arc<DefaultPathSelector>,
    verbs: Verbs,
    names: [String; 2],
}

impl Machine {
    fn new() -> Result<Self, Skipped> {
        let first = device()?;
        let second = std::env::var("HMEM_VERBS_SECOND_DEVICE")
            .expect("a second device is named beside the first");
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let imports = verbs.nics().expect("devices").into_iter().all(|nic| nic.imports.dma_buf);
        if !imports {
            assert!(
                std::env::var_os("HMEM_VERBS_DMA_BUF").is_none(),
                "HMEM_VERBS_DMA_BUF is set, but the driver imports no dma-bufs"
            );
            return Err(Skipped(format!("{first} and {second} import no dma-bufs")));
        }
        let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::Udmabuf).build();
        let memory = Arc::new(memory.expect("/dev/udmabuf"));
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        registry.add(Arc::clone(&memory) as Arc<dyn Iface>).expect("its kind is free");
        let paths = Arc::new(DefaultPathSelector::new());
        Ok(Self { memory, registry: Arc::new(registry), paths, verbs, names: [first, second] })
    }

    fn open(&self, provider: &dyn Provider, nic: Option<&str>) -> Domain {
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let (nic, p2p) = (nic.map(str::to_owned), P2pPolicy::Required);
        let attr = DomainAttr { nic, mr_mode, hmem: true, p2p, ..DomainAttr::default() };
        Domain::open(provider, Arc::clone(&self.registry), self.paths.clone(), attr)
            .expect("open a domain")
    }

    fn sides(&self) -> [(Side, Side); 2] {
        [0, 1].map(|nic| {
            let side = || Side::new(self.open(&self.verbs, Some(&self.names[nic])));
            let (near, far) = (side(), side());
            near.connect(&far.endpoint.name()).expect("connect the near side");
            far.connect(&near.endpoint.name()).expect("connect the far side");
            (near, far)
        })
    }

    fn buffer(&self) -> DeviceBuffer {
        let iface: Arc<dyn Iface> = Arc::clone(&self.memory) as _;
        let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&iface, &request).expect("device memory")
    }

    fn exports(&self) -> u64 {
        self.memory.stats().calls(DeviceCall::ExportDmaBuf)
    }
}

fn register_on(
    nics: &[&Domain],
    buffer: DeviceBuffer,
) -> Result<Regions<DeviceBuffer>, Rejected<Regions<DeviceBuffer>>> {
    Batch::on(nics).add(Request::new(buffer, REMOTE)).register()
}

fn close(registered: Regions<DeviceBuffer>) -> DeviceBuffer {
    registered.close().map_err(Error::from).expect("close").remove(0)
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Two devices register one dma-buf, and a refusal by a third NIC undoes both registrations. One
/// test covers both cases, since parallel tests would disturb the count of file descriptors.
fn shared_dma_buf_is_registered_and_rolled_back_on_two_devices() -> Outcome {
    let machine = Machine::new()?;
    let sides = machine.sides();
    let targets: Vec<_> = sides.iter().map(|(_, far)| &far.domain).collect();
    // The first registration on each device also probes the device with a page, so it is not
    // counted.
    close(register_on(&targets, machine.buffer()).expect("register"));
    let (exports, fds) = (machine.exports(), open_fds());

    let shared = register_on(&targets, machine.buffer()).expect("register");
    assert_eq!(machine.exports() - exports, 1, "one export for both devices");
    assert_eq!(open_fds(), fds, "the dma-buf is closed, the registrations live on");
    for region in shared.regions() {
        assert_eq!(region.decision().expect("registered").path, Path::DmaBuf);
    }
    let keys = shared.rail_keys(0, 0).expect("keys");
    let local = Pages::new(LEN as usize);
    let mut model = vec![0; LEN as usize];
    for (nic, (near, _)) in sides.iter().enumerate() {
        let bytes = local.fill(nic as u8 + 1);
        let from = near.register(local.range(), LOCAL).expect("register");
        let desc = from.desc().expect("desc");
        let at = 1000 * (nic + 1);
        let key = keys.of(&machine.names[nic]).expect("a key of each NIC");
        near.write(segment(local.part(0, 5000), desc), remote(key, at as u64, 5000))
            .expect("write");
        model[at..at + 5000].copy_from_slice(&bytes[..5000]);
        near.read(segment(local.range(), desc), remote(key, 0, LEN)).expect("read");
        assert!(
            local.get(0, LEN as usize) == model,
            "{} reads what both wrote",
            machine.names[nic]
        );
    }
    let buffer = close(shared);
    let mut bytes = vec![0; LEN as usize];
    buffer.read(0, &mut bytes).expect("read");
    assert!(bytes == model);

    // A third NIC refuses: no registration stays on the first two, and the call returns the buffer.
    let faults = Faults::new();
    let software = Loopback::builder().faults(&faults).build().expect("a software NIC");
    let third = machine.open(&software, None);
    let three = [targets[0], targets[1], &third];
    let buffer = close(register_on(&three, buffer).expect("register on all three"));
    let (exports, fds) = (machine.exports(), open_fds());
    let live = || targets.iter().map(|domain| domain.live().regions).sum::<u64>();
    let regions = live();
    faults.fail_nth(NicCall::Register, 1, Errno(12));
    let rejected = register_on(&three, buffer).expect_err("the third refuses");
    assert_eq!(rejected.error.kind(), ErrorKind::OutOfResources, "{}", rejected.error);
    assert_eq!(rejected.error.context_value("registered before"), Some("2"));
    assert!(rejected.value.regions().is_empty());
    assert_eq!((machine.exports() - exports, open_fds(), live()), (1, fds, regions));
    register_on(&three, close(rejected.value)).expect("the next one works");
    Ok(())
}
