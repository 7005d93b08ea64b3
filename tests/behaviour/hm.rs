//! HM-01 to HM-04, HM-06, HM-11 to HM-13: queries, copies and exports of ifaces, and plug-in
//! ifaces.

use std::{os::unix::process::ExitStatusExt, process::Output, sync::Arc};

use hmem::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DeviceId, ErrorKind, Hmem,
    Iface, IfaceExt, IfaceKind, Mapping, Registry,
    iface::{AllocRequest, DmaBufMapping},
    provider::Nic,
    registry::AddressOwner,
    system::{FreeDetection, Simulated, System},
};
use rustix::mm::ProtFlags;

use crate::{
    child,
    config::{TestConfig, needs, over_configs},
    memory::{HeldCopies, pattern},
    net::{Net, REMOTE, device},
    plug_in_iface::FileMemory,
};

over_configs! {
    /// HM-06
    unaligned_device_ranges_reach_exactly_their_bytes: Pairwise, needs::DEVICE;
    /// HM-06
    registrations_through_a_nic_leave_no_fd: HardwareMode;
}

fn request(len: u64, device: u32, kind: AllocationKind) -> AllocRequest {
    AllocRequest { len, device: DeviceId(device), kind }
}

fn allocate(iface: &dyn Iface, len: u64, kind: AllocationKind) -> Allocation {
    iface.allocate(&request(len, 0, kind)).expect("allocate")
}

fn free(iface: &dyn Iface, allocation: &Allocation) {
    // SAFETY: the test no longer uses the memory.
    unsafe { iface.free(allocation) }.expect("free");
}

/// Returns ifaces that work on every machine, each with a kind of memory that it allocates.
fn ifaces() -> Vec<(Arc<dyn Iface>, AllocationKind)> {
    vec![
        (Arc::new(System::new()), AllocationKind::System),
        (device(FreeDetection::Identity), AllocationKind::Device),
        (device(FreeDetection::Callback), AllocationKind::Device),
        (Arc::new(FileMemory::default()), AllocationKind::Device),
    ]
}

/// HM-01
#[test]
fn query_returns_range_kind_device_and_identity() {
    for (iface, kind) in ifaces() {
        let name = iface.name().to_owned();
        let memory = allocate(&*iface, 10_000, kind);
        assert_eq!(
            (memory.iface, memory.kind, memory.range.len()),
            (iface.kind(), kind, 10_000),
            "{name}"
        );
        assert_eq!(
            memory.device,
            (kind == AllocationKind::Device).then_some(DeviceId(0)),
            "{name}"
        );
        for offset in [0, 1, 4096, 9_999] {
            let address = Address(memory.base().0 + offset);
            assert_eq!(iface.query(address).unwrap(), Some(memory), "{name}: byte {offset}");
            assert_eq!(memory.offset_of(address), Some(AllocOffset(offset)));
        }
        let stack = 0u8;
        for foreign in [
            Address(0),
            Address::of_ptr(&stack),
            Address(u64::MAX),
            Address(memory.base().0 + 10_000),
        ] {
            assert_eq!(iface.query(foreign).unwrap(), None, "{name}: {foreign} is foreign");
        }
        let second = allocate(&*iface, 64, kind);
        assert_ne!(memory.id, second.id, "{name}: two allocations with one identity");
        free(&*iface, &memory);
        assert_eq!(iface.query(memory.base()).unwrap(), None, "{name}: freed");
        // SAFETY: freeing freed memory must be refused.
        let twice = unsafe { iface.free(&memory) }.expect_err("freed twice");
        assert_eq!(twice.kind(), ErrorKind::InvalidArgument, "{name}");
        free(&*iface, &second);
    }
}

/// HM-01
#[test]
fn simulated_device_allocates_every_kind_of_memory() {
    let simulated = device(FreeDetection::Identity);
    for (kind, on_device) in [
        (AllocationKind::Device, true),
        (AllocationKind::Managed, true),
        (AllocationKind::StreamOrdered, true),
        (AllocationKind::Virtual, true),
        (AllocationKind::Host, false),
    ] {
        let memory = simulated.allocate(&request(5000, 1, kind)).expect("allocate");
        let expected = (simulated.kind(), kind, on_device.then_some(DeviceId(1)));
        assert_eq!((memory.iface, memory.kind, memory.device), expected);
        free(&*simulated, &memory);
    }
    let error = simulated.allocate(&request(64, 2, AllocationKind::Device)).unwrap_err();
    assert_eq!(
        (error.kind(), error.iface_kind()),
        (ErrorKind::InvalidArgument, Some(simulated.kind()))
    );
}

/// HM-02
#[test]
fn the_owner_of_any_address_is_found_among_ten_thousand() {
    let simulated = device(FreeDetection::Identity);
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new())).unwrap();
    registry.add(Arc::new(FileMemory::default())).unwrap();
    registry.add(Arc::clone(&simulated) as Arc<dyn Iface>).unwrap();
    let lengths = [1, 4095, 4096, 4097, 12_288, 100];
    let memories: Vec<_> = (0..10_000)
        .map(|n| allocate(&*simulated, lengths[n % lengths.len()], AllocationKind::Device))
        .collect();
    let identity =
        |address| registry.owner_of(address).unwrap().allocation.map(|allocation| allocation.id);
    for memory in &memories {
        let (base, len) = (memory.base().0, memory.range.len());
        for offset in [0, len / 2, len - 1] {
            assert_eq!(identity(Address(base + offset)), Some(memory.id), "byte {offset} of {len}");
        }
        assert_ne!(identity(Address(base + len)), Some(memory.id), "one past the end");
        assert_ne!(identity(Address(base - 1)), Some(memory.id), "one before the start");
        assert_eq!(registry.owner_of_range(memory.range).unwrap().device, Some(DeviceId(0)));
    }
    let heap = vec![0u8; 100];
    assert_eq!(registry.owner_of_range(AddressRange::of(&heap)).unwrap(), AddressOwner::SYSTEM);
    let across = AddressRange::new(memories[0].base(), memories[0].range.len() + 1).unwrap();
    assert_eq!(registry.owner_of_range(across).unwrap_err().kind(), ErrorKind::OutOfBounds);
    for memory in &memories[..5000] {
        free(&*simulated, memory);
        assert_eq!(
            registry.owner_of(memory.base()).unwrap(),
            AddressOwner::SYSTEM,
            "freed memory has no owner"
        );
    }
    assert_eq!(identity(memories[7500].base()), Some(memories[7500].id));
}

/// HM-03
#[test]
fn copies_reach_exactly_their_bytes_in_every_size_class() {
    const LEN: u64 = (4 << 20) + 100;
    for (iface, kind) in ifaces() {
        let name = iface.name().to_owned();
        let memory = allocate(&*iface, LEN, kind);
        let mut size = 1u64;
        while size <= 4 << 20 {
            for (offset, len) in [(0, size), (1, size), (63, (size - 1).max(1)), (LEN - size, size)]
            {
                let bytes = pattern(size + offset, len as usize);
                let at = Address(memory.base().0 + offset);
                iface.write_bytes(at, &bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
                let mut back = vec![0; len as usize];
                iface.read_bytes(at, &mut back).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(back == bytes, "{name}: {len} bytes at {offset}");
            }
            size *= 4;
        }
        // Copies of adjacent ranges with odd lengths leave all other bytes unchanged.
        iface.write_bytes(memory.base(), &[0xEE; 64]).unwrap();
        for (offset, len) in [(1u64, 3usize), (4, 7), (11, 1), (20, 13)] {
            iface.write_bytes(Address(memory.base().0 + offset), &vec![len as u8; len]).unwrap();
        }
        let mut bytes = [0; 34];
        iface.read_bytes(memory.base(), &mut bytes).unwrap();
        let expected: Vec<u8> =
            [vec![0xEE], vec![3; 3], vec![7; 7], vec![1], vec![0xEE; 8], vec![13; 13], vec![0xEE]]
                .concat();
        assert_eq!(bytes.to_vec(), expected, "{name}");
        let last = Address(memory.base().0 + LEN - 1);
        for error in [iface.write_bytes(last, &[1, 2]), iface.read_bytes(last, &mut [0; 2])] {
            assert_eq!(
                error.unwrap_err().kind(),
                ErrorKind::OutOfBounds,
                "{name}: past the allocation"
            );
        }
        free(&*iface, &memory);
        let dead = iface.write_bytes(memory.base(), &[1]).expect_err("a copy to freed memory");
        assert_eq!(dead.kind(), ErrorKind::OutOfBounds, "{name}");
    }
}

/// HM-03
#[test]
fn asynchronous_copies_end_with_their_event() {
    use hmem::system::Stepping;
    let simulated =
        Simulated::builder().window(1 << 30).stepping(Stepping::ByHand).build().unwrap();
    let memory = allocate(&simulated, 8192, AllocationKind::Device);
    let (source, sink) = (pattern(1, 5000), crate::memory::HostPages::new(8192));
    let to = Address(memory.base().0 + 3);
    // SAFETY: the host memory outlives the copies, and no reference to the pages of `sink` exists.
    let (up, down) = unsafe {
        let up = simulated.start_copy(to, Address::of_ptr(source.as_ptr()), 5000).expect("start");
        (up, simulated.start_copy(sink.range().start(), to, 5000).expect("start"))
    };
    assert!(!up.is_done() && !down.is_done() && simulated.pending_copies() == 2);
    assert!(simulated.step() && up.is_done() && !down.is_done());
    up.wait().expect("the first copy");
    down.wait().expect("waiting steps");
    assert!(!simulated.step());
    assert_eq!(crate::memory::Bytes::Host(sink).get(0, 5000), source);
    // SAFETY: the copy is refused, and the host memory outlives it.
    let past = unsafe { simulated.start_copy(to, Address::of_ptr(source.as_ptr()), 8192) };
    assert_eq!(past.unwrap_err().kind(), ErrorKind::OutOfBounds);
}

/// HM-04
#[test]
fn absent_vendors_give_a_reason_and_other_ifaces_work() {
    let hmem =
        Hmem::builder().shared_iface(device(FreeDetection::Identity)).build().expect("start");
    let vendors = [
        (IfaceKind::CUDA, cfg!(feature = "cuda"), "cuda", "libcuda"),
        (IfaceKind::ROCR, cfg!(feature = "rocr"), "rocr", "libhsa-runtime64"),
        (IfaceKind::ZE, cfg!(feature = "ze"), "ze", "libze_loader"),
        (IfaceKind::NEURON, cfg!(feature = "neuron"), "neuron", "libnrt"),
        (IfaceKind::SYNAPSEAI, cfg!(feature = "synapseai"), "synapseai", "libSynapse"),
    ];
    for (kind, compiled, feature, library) in vendors {
        match hmem.iface(kind) {
            Ok(iface) => {
                assert!(compiled && iface.devices().is_ok_and(|devices| !devices.is_empty()))
            }
            Err(error) if compiled => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                // Details name a library that is installed but finds no device.
                let text = format!("{error:#}");
                assert!(text.contains(library), "{text} does not name {library}");
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert!(
                    error.to_string().contains(&format!("`{feature}`")),
                    "{error} does not name the feature"
                );
            }
        }
    }
    let simulated = hmem.iface(hmem::system::SIMULATED).expect("the others go on");
    allocate(&**simulated, 64, AllocationKind::Device);
    let unknown = IfaceKind(IfaceKind::FIRST_PLUG_IN.0 + 99);
    assert_eq!(hmem.iface(unknown).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// HM-04, HM-12
#[test]
fn naming_an_iface_that_was_compiled_out_is_refused() {
    for (feature, compiled) in [
        ("cuda", cfg!(feature = "cuda")),
        ("neuron", cfg!(feature = "neuron")),
        ("rocr", cfg!(feature = "rocr")),
        ("synapseai", cfg!(feature = "synapseai")),
        ("ze", cfg!(feature = "ze")),
    ] {
        match Hmem::builder().ifaces(feature).build() {
            Ok(_) => assert!(compiled, "{feature} was accepted silently"),
            Err(error) => {
                assert!(!compiled, "{error}");
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert_eq!(error.context_value("feature"), Some(feature));
            }
        }
    }
}

/// HM-04, HM-12
///
/// The variable belongs to the machine, so it does not stop a program without the iface.
#[test]
fn variable_may_name_an_iface_that_was_compiled_out() {
    const NAME: &str = "hm::variable_may_name_an_iface_that_was_compiled_out";
    const LIBRARY: &str = "HMEM_CUDA_LIBRARY";
    if !child::is_alone(NAME) {
        // If the iface is compiled in, it is absent all the same: its library does not exist.
        let Output { status, stdout, stderr } =
            child::output(NAME, &[("FI_HMEM", "cuda;simulated"), (LIBRARY, "/nonexistent.so")]);
        let text =
            [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let build = || Hmem::builder().shared_iface(device(FreeDetection::Identity));
    let hmem = build().build().expect("the others go on");
    hmem.iface(hmem::system::SIMULATED).expect("named, and there");
    let missing: Vec<_> = hmem.missing_ifaces().map(|(kind, why)| (kind, why.kind())).collect();
    let compiled = cfg!(feature = "cuda");
    let kind = if compiled { ErrorKind::Unavailable } else { ErrorKind::Unsupported };
    assert_eq!(missing, [(IfaceKind::CUDA, kind)]);
    let error = hmem.iface(IfaceKind::CUDA).unwrap_err();
    assert_eq!(error.to_string().contains("cargo feature `cuda`"), !compiled, "{error}");
    // Without the environment there is no filter, and the variable of the library is not read.
    let hmem = build().without_environment().build().expect("built");
    assert_eq!(hmem.missing_ifaces().count(), 0);
    let why = hmem.registry().absent().find(|(kind, _)| *kind == IfaceKind::CUDA);
    assert!(why.is_none_or(|(_, why)| !why.to_string().contains("nonexistent")), "{why:?}");
}

/// Maps an exported fd, as a NIC does. Returns `len` bytes from `offset` of it.
fn mapped(fd: &impl std::os::fd::AsFd, offset: u64, len: usize) -> Vec<u8> {
    let inside = (offset % rustix::param::page_size() as u64) as usize;
    let start = offset - inside as u64;
    let mapping = Mapping::shared(fd, start, inside + len, ProtFlags::READ).expect("mmap");
    // SAFETY: the bytes lie in the mapping, and nothing writes them while the slice lives.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr().add(inside), len) }.to_vec()
}

/// HM-06
#[test]
fn exports_reach_exactly_their_bytes() {
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    for (iface, kind) in &ifaces()[1..] {
        // An earlier allocation makes the offset in the export differ from the offset in the
        // allocation.
        let _in_front = allocate(&**iface, 50_000, *kind);
        let memory = allocate(&**iface, 100_000, *kind);
        let bytes = pattern(6, 100_000);
        iface.write_bytes(memory.base(), &bytes).unwrap();
        for (offset, len) in
            [(0, 1), (1, 4096), (4095, 2), (12_345, 777), (99_999, 1), (0, 100_000)]
        {
            let range = memory.range.slice(offset, len).unwrap();
            let export = iface.export_dma_buf(range, &nic, DmaBufMapping::Default).expect("export");
            assert_eq!((export.alloc_offset, export.len), (AllocOffset(offset), len));
            let found = mapped(&export.fd, export.offset.0, len as usize);
            assert!(
                found == bytes[offset as usize..(offset + len) as usize],
                "{}: {len} bytes at {offset}",
                iface.name()
            );
            iface.release_dma_buf(export).expect("release");
        }
        let outside = AddressRange::new(memory.base(), 100_001).unwrap();
        let error = iface
            .export_dma_buf(outside, &nic, DmaBufMapping::Default)
            .expect_err("past the allocation");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{}", iface.name());
    }
}

fn unaligned_device_ranges_reach_exactly_their_bytes(config: &TestConfig) {
    const LEN: usize = 100_000;
    let net = Net::open(config);
    let memory = net.filled(&pattern(6, LEN));
    let mut model = pattern(6, LEN);
    for (seed, (offset, len)) in
        [(0, 1), (1, 4096), (4095, 2), (12_345, 777), (99_999, 1), (50_001, 40_000)]
            .into_iter()
            .enumerate()
    {
        let region = net.expose(memory.part(offset, len), REMOTE);
        let key = net.key(&region);
        let (at, len) = (offset as usize, len as usize);
        assert!(
            net.pull(&key, 0, len).expect("read") == model[at..at + len],
            "{len} bytes at {offset}"
        );
        let bytes = pattern(70 + seed as u64, len);
        net.push(&key, 0, &bytes).expect("write");
        model[at..at + len].copy_from_slice(&bytes);
        assert!(
            memory.all() == model,
            "{len} bytes at {offset}: the neighbours changed, or not all arrived"
        );
        for outside in [u64::MAX, len as u64] {
            let error = net.push(&key, outside, &[0]).expect_err("outside the part");
            assert_eq!(error.kind(), net.seen(hmem::ErrorKind::OutOfBounds));
        }
        region.close().expect("close");
    }
    let exports = net.device.as_ref().expect("a device").stats().live_exports;
    assert_eq!(exports, 0, "an export was not returned");
}

fn registrations_through_a_nic_leave_no_fd(config: &TestConfig) {
    child::alone_in(config, "hm::over_configs::registrations_through_a_nic_leave_no_fd", || {
        let net = Net::open(config);
        let memory = net.bytes(65_536);
        let fds = child::open_fds();
        for n in 0..200 {
            let region = net.expose(memory.part(n * 131, 1 + n * 17), REMOTE);
            region.close().expect("close");
        }
        assert_eq!(child::open_fds(), fds, "after 200 registrations");
    });
}

fn exports(count: usize) {
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let simulated = device(FreeDetection::Identity);
    let memory = allocate(&*simulated, 65_536, AllocationKind::Device);
    let fds = child::open_fds();
    for n in 0..count as u64 {
        let range = memory.range.slice(n % 60_000, 1 + n % 5000).unwrap();
        let export = simulated.export_dma_buf(range, &nic, DmaBufMapping::Default).expect("export");
        simulated.release_dma_buf(export).expect("release");
    }
    assert_eq!(child::open_fds(), fds, "after {count} exports");
    assert_eq!(simulated.stats().live_exports, 0);
}

/// HM-06
#[test]
fn a_million_exports_leave_no_fd() {
    child::alone("hm::a_million_exports_leave_no_fd", || exports(1_000_000));
}

/// HM-11
#[test]
fn an_iface_from_outside_the_workspace_works() {
    crate::plug_in_iface::run().expect("the example");
}

/// HM-12
#[test]
fn the_filter_selects_ifaces_by_name() {
    let build = |names: &str| {
        let simulated = Simulated::builder()
            .kind(IfaceKind(0x111))
            .name("sim-b")
            .window(1 << 28)
            .build()
            .unwrap();
        Hmem::builder()
            .shared_iface(device(FreeDetection::Identity))
            .iface(simulated)
            .ifaces(names)
            .build()
    };
    let names = |hmem: &Hmem| {
        hmem.registry().iter().map(|iface| iface.name().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&build("simulated").unwrap()), ["system", "simulated"]);
    assert_eq!(names(&build("SIM-B; simulated").unwrap()), ["system", "simulated", "sim-b"]);
    assert_eq!(names(&build("system").unwrap()), ["system"]);
    assert_eq!(names(&build("").unwrap()), ["system"]);
    let only = build("sim-b").unwrap();
    for left_out in [
        hmem::system::SIMULATED,
        IfaceKind::CUDA,
        IfaceKind::ROCR,
        IfaceKind::ZE,
        IfaceKind::NEURON,
        IfaceKind::SYNAPSEAI,
    ] {
        let error = only.iface(left_out).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("Builder::ifaces"), "{error}");
    }
    for unknown in ["simulatd", "system;gpu", "cuda,nonesuch"] {
        let error = build(unknown).expect_err("an unknown name was accepted");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.context_value("name").is_some_and(|name| unknown.contains(name)), "{error}");
    }
}

/// HM-12
#[test]
fn the_builder_overrides_the_filter_of_the_environment() {
    const NAME: &str = "hm::the_builder_overrides_the_filter_of_the_environment";
    if child::is_alone(NAME) {
        let build = || Hmem::builder().shared_iface(device(FreeDetection::Identity));
        let count = |hmem: &Hmem| hmem.registry().iter().count();
        match std::env::var("FI_HMEM").as_deref() {
            Ok("nonesuch") => {
                assert_eq!(build().build().unwrap_err().kind(), ErrorKind::InvalidArgument)
            }
            _ => assert_eq!(
                count(&build().build().unwrap()),
                1,
                "FI_HMEM=system leaves host memory alone"
            ),
        }
        assert_eq!(
            count(&build().ifaces("system;simulated").build().unwrap()),
            2,
            "the builder wins"
        );
        return;
    }
    for value in ["system", "nonesuch"] {
        let Output { status, stdout, stderr } = child::output(NAME, &[("FI_HMEM", value)]);
        let text =
            [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(status.success() && text.contains("1 passed"), "FI_HMEM={value}: {text}");
    }
}

/// HM-13
#[test]
fn a_stray_dereference_of_device_memory_faults() {
    const NAME: &str = "hm::a_stray_dereference_of_device_memory_faults";
    if child::is_alone(NAME) {
        let simulated = device(FreeDetection::Identity);
        let memory = allocate(&*simulated, 4096, AllocationKind::Device);
        simulated.write_bytes(memory.base(), &[1; 4096]).unwrap();
        let pointer = std::ptr::with_exposed_provenance::<u8>(memory.base().0 as usize);
        // SAFETY: none. The test shows that this bug faults.
        let byte = unsafe { pointer.read_volatile() };
        println!("read {byte} from device memory");
        return;
    }
    let output = child::output(NAME, &[]);
    assert_eq!(output.status.signal(), Some(11), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!String::from_utf8_lossy(&output.stdout).contains("from device memory"));
}
