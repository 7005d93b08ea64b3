//! One range on several NICs: one export for all, all or nothing (VRB-08).

mod path_support;

use std::{os::fd::AsFd, sync::Arc};

use hmem_core::{
    Allocation, AllocationKind, Batch, DeviceBuffer, DeviceId, DmaBuf, Domain, DomainAttr, Errno,
    Error, ErrorKind, IfaceExt, MrFlags, Path, Promise, Raw, Regions, Rejected, Request,
    iface::DmaBufMapping,
    path::P2pPolicy,
    provider::{Imports, Nic},
};
use hmem_iface_system::{DeviceCall, DmaBufKind, P2pMatrix, Simulated, SimulatedBuilder};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, NicCall};
use path_support::{
    ALL_IMPORTS, Bench, REMOTE, alone, page_size,
    recording::RegisteredAs,
    wire::{LOCAL, Wire},
};

const NICS: [&str; 4] = ["loop0", "loop1", "loop2", "loop3"];
const DIRECT: Imports = Imports { peer_memory: false, ..ALL_IMPORTS };

fn bench_of(device: SimulatedBuilder, imports: Imports) -> Bench {
    let provider =
        NICS.iter().fold(Loopback::builder(), |builder, nic| builder.nic(*nic)).imports(imports);
    Bench::with(device.dma_buf(DmaBufKind::MemFd), provider, DefaultPathSelector::new())
}

fn bench(imports: Imports) -> Bench {
    bench_of(Simulated::builder(), imports)
}

fn domains(bench: &Bench, policy: P2pPolicy) -> Vec<Domain> {
    NICS.iter().map(|nic| bench.domain(nic, policy)).collect()
}

fn regions(domains: &[Domain]) -> u64 {
    domains.iter().map(|domain| domain.live().regions).sum()
}

fn register(
    domains: &[Domain],
    buffer: DeviceBuffer,
) -> Result<Regions<DeviceBuffer>, Rejected<Regions<DeviceBuffer>>> {
    let nics: Vec<_> = domains.iter().collect();
    Batch::on(&nics).add(Request::new(buffer, REMOTE | LOCAL)).register()
}

fn close(registered: Regions<DeviceBuffer>) -> DeviceBuffer {
    let [buffer] = registered.close().map_err(Error::from).expect("close").try_into().unwrap();
    buffer
}

/// VRB-08
#[test]
fn one_export_of_each_segment_serves_every_nic() {
    let _alone = alone();
    for (kind, segments) in [(AllocationKind::Device, 1), (AllocationKind::Virtual, 3)] {
        let bench = bench_of(Simulated::builder().segment_len(page_size()), DIRECT);
        let domains = domains(&bench, P2pPolicy::Required);
        for round in 0..3 {
            let before = bench.calls(DeviceCall::ExportDmaBuf);
            let buffer = bench.buffer_of(kind, DeviceId(0), segments * page_size());
            bench.record.take();
            let shared = register(&domains, buffer).unwrap();
            // In the first round each NIC is probed with a page, which is another buffer.
            let probes = if round == 0 { NICS.len() as u64 } else { 0 };
            // The simulated device does not export several segments in one dma-buf. It is called
            // once for that.
            let whole = u64::from(segments > 1);
            assert_eq!(
                bench.calls(DeviceCall::ExportDmaBuf) - before,
                whole + segments + probes,
                "{kind:?}, round {round}"
            );
            let handed = bench.record.take();
            let last = &handed[handed.len() - NICS.len() * segments as usize..];
            if round > 0 {
                let of = |nic: &str| {
                    last.iter().filter(|(name, _)| name == nic).map(|(_, fd)| *fd).collect()
                };
                let fds: Vec<Vec<RegisteredAs>> = NICS.iter().map(|nic| of(nic)).collect();
                assert!(
                    fds.iter().all(|fd| *fd == fds[0] && fd.len() == segments as usize),
                    "{fds:?}"
                );
            }
            assert_eq!(
                (shared.regions().len(), regions(&domains)),
                (NICS.len(), NICS.len() as u64)
            );
            for region in shared.regions() {
                let decision = region.decision().unwrap();
                assert_eq!((decision.path, decision.mapping), (Path::DmaBuf, DmaBufMapping::Pcie));
            }
            drop(close(shared));
            assert_eq!(regions(&domains), 0);
        }
        assert_eq!(bench.device.stats().live_exports, 0);
    }
}

/// VRB-08
#[test]
fn every_nic_reaches_the_same_bytes_with_its_own_key() {
    let _alone = alone();
    let matrix = P2pMatrix::all_reachable().block(DeviceId(0), "loop2");
    let bench = bench_of(Simulated::builder().p2p(matrix), DIRECT);
    let domains = domains(&bench, P2pPolicy::Enabled);
    let initiator = bench.domain("loop0", P2pPolicy::Enabled);
    let shared = register(&domains, bench.buffer(3 * page_size())).unwrap();
    let paths: Vec<_> =
        shared.regions().iter().map(|region| region.decision().unwrap().path).collect();
    assert_eq!(paths, [Path::DmaBuf, Path::DmaBuf, Path::Staged, Path::DmaBuf]);
    let keys = shared.rail_keys(0, 0).unwrap();
    let mut model = vec![0u8; 3 * page_size() as usize];
    for (at, (domain, nic)) in domains.iter().zip(NICS).enumerate() {
        let key = keys.of(nic).unwrap();
        let wire = Wire::new(&initiator, domain, 3 * page_size() as usize);
        let bytes: Vec<u8> = (0..5000).map(|byte| (byte * 7 + at) as u8).collect();
        wire.push(key, 100 + at as u64, &bytes).unwrap();
        model[100 + at..5100 + at].copy_from_slice(&bytes);
        assert!(
            wire.pull(key, 0, model.len()).unwrap() == model,
            "NIC {at} reads the bytes of all NICs"
        );
        // The NIC's own descriptor receives a message.
        let slice = shared.view(at, 0, 0).unwrap().slice(9000, 3).unwrap();
        wire.send(slice, &[at as u8; 3]).unwrap();
        model[9000..9003].fill(at as u8);
    }
    let mut bytes = vec![0; model.len()];
    shared.read(0, 0, &mut bytes).unwrap();
    assert!(bytes == model);
    assert_eq!(shared.view(4, 0, 0).unwrap_err().kind(), ErrorKind::OutOfBounds);
    close(shared);
}

/// VRB-08
#[test]
fn a_fault_at_any_call_of_any_nic_leaves_nothing_registered() {
    let _alone = alone();
    let device_calls = [
        DeviceCall::Query,
        DeviceCall::Segments,
        DeviceCall::ExportDmaBuf,
        DeviceCall::CreateFd,
        DeviceCall::ExportPeerMemory,
        DeviceCall::ReserveAddress,
        DeviceCall::CreateMemory,
        DeviceCall::Free,
        DeviceCall::ReleaseDmaBuf,
    ];
    for warm in [false, true] {
        for peer_memory in [false, true] {
            let imports = Imports { dma_buf: !peer_memory, peer_memory, ..DIRECT };
            let mut faults = 0;
            for call in device_calls {
                for nth in 1.. {
                    let fault = |bench: &Bench| bench.device.faults().fail_nth(call, nth, Errno(5));
                    if !breaks(imports, warm, &fault, &|bench| bench.calls(call), nth) {
                        break;
                    }
                    faults += 1;
                }
            }
            for nth in 1.. {
                let fault = |bench: &Bench| bench.faults.fail_nth(NicCall::Register, nth, Errno(5));
                if !breaks(
                    imports,
                    warm,
                    &fault,
                    &|bench| bench.faults.calls(NicCall::Register),
                    nth,
                ) {
                    break;
                }
                faults += 1;
            }
            assert!(faults >= 6, "{faults} faults");
        }
    }
}

/// Registers memory with several NICs while one call fails. Returns `false` if the call that was to
/// fail did not occur.
fn breaks(
    imports: Imports,
    warm: bool,
    fault: &dyn Fn(&Bench),
    calls: &dyn Fn(&Bench) -> u64,
    nth: u64,
) -> bool {
    let bench = bench_of(Simulated::builder().peer_memory(true), imports);
    bench.faults.start_counting();
    let domains = domains(&bench, P2pPolicy::Required);
    let mut buffer = bench.buffer(page_size());
    if warm {
        buffer = close(register(&domains, buffer).unwrap());
    }
    let (before, made) = (bench.residue(), calls(&bench));
    fault(&bench);
    let outcome = register(&domains, buffer);
    let fired = calls(&bench) >= made + nth;
    bench.device.faults().clear();
    bench.faults.clear();
    let buffer = match outcome {
        Err(rejected) => {
            assert!(rejected.value.regions().is_empty(), "{:?}", rejected.error);
            assert_eq!(regions(&domains), 0, "{}", rejected.error);
            close(rejected.value)
        }
        // The fault hit a probe, a mapping that has a replacement, or the release of an export.
        Ok(shared) => close(shared),
    };
    assert_eq!(regions(&domains), 0);
    let leaked_page = bench.residue().allocations - before.allocations;
    assert!(leaked_page <= 1, "only a page that cannot be freed is leaked");
    assert_eq!(bench.residue().fds, before.fds);
    close(register(&domains, buffer).expect("the next call works"));
    fired
}

/// VRB-08
#[test]
fn registration_refused_by_the_last_nic_is_undone_at_the_others() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    let buffer = close(register(&domains, bench.buffer(page_size())).unwrap());
    let before = bench.residue();
    // The last NIC refuses both mappings.
    bench.faults.fail_nth(NicCall::Register, 4, Errno(12));
    bench.faults.fail_nth(NicCall::Register, 5, Errno(12));
    let rejected = register(&domains, buffer).unwrap_err();
    assert_eq!(rejected.error.kind(), ErrorKind::OutOfResources);
    assert_eq!(rejected.error.provider_name(), Some("loopback/loop3"), "the error names the NIC");
    assert_eq!(rejected.error.context_value("registered before"), Some("3"));
    assert!(rejected.value.regions().is_empty() && regions(&domains) == 0);
    assert_eq!(bench.residue_after(&before), before);
    close(register(&domains, close(rejected.value)).unwrap());
}

/// VRB-08
#[test]
fn failed_undo_returns_the_region_with_the_error() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    let buffer = close(register(&domains, bench.buffer(page_size())).unwrap());
    bench.faults.fail_nth(NicCall::Register, 3, Errno(12));
    bench.faults.fail_nth(NicCall::Register, 4, Errno(12));
    bench.faults.fail_nth(NicCall::Deregister, 2, Errno(5));
    let rejected = register(&domains, buffer).unwrap_err();
    assert_eq!((rejected.value.regions().len(), regions(&domains)), (1, 1));
    assert_eq!(rejected.error.context_value("left registered"), Some("1"));
    // The region still works, and the buffer stays allocated until it is closed.
    let nic = &domains[1];
    let wire = Wire::new(&domains[0], nic, 16);
    wire.push(&rejected.value.regions()[0].key().unwrap(), 3, b"still").unwrap();
    let buffer = close(rejected.value);
    let mut bytes = [0; 5];
    buffer.read(3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"still");
    drop(wire);
    assert_eq!(regions(&domains), 0);
}

/// VRB-08
#[test]
fn refused_close_returns_the_open_regions() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    let shared = register(&domains, bench.buffer(page_size())).unwrap();
    let part = shared.regions()[2].range().slice(10, 20).unwrap();
    let sub = shared.regions()[2].sub(part, REMOTE, None).unwrap();
    bench.faults.fail_nth(NicCall::Deregister, 1, Errno(5));
    let rejected = shared.close().unwrap_err();
    assert_eq!(
        rejected.value.regions().len(),
        2,
        "the region that the driver refused and the region with a sub-region"
    );
    assert_eq!(rejected.error.context_value("left registered"), Some("2"));
    let rejected = rejected.value.close().unwrap_err();
    assert!(rejected.error.is_busy() && rejected.value.regions().len() == 1);
    sub.close().map_err(Error::from).unwrap();
    drop(close(rejected.value));
    assert_eq!(regions(&domains), 0);
    assert_eq!(bench.device.stats().live_allocations, 0);
}

/// VRB-08
///
/// The exports are released after the last NIC has registered. An error of that release is recorded
/// in the decision of the last NIC, or in the error of its registration.
#[test]
fn refused_release_of_an_export_is_in_the_trace_of_the_last_nic() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    let buffer = close(register(&domains, bench.buffer(page_size())).unwrap());
    let released = |trace: &hmem_core::path::Trace| {
        let calls = trace.iter().filter(|attempt| attempt.call.starts_with("release_dma_buf"));
        let errors = calls.map(|attempt| attempt.error.as_ref().expect("refused"));
        errors.map(|error| error.os_errno()).collect::<Vec<_>>()
    };
    bench.device.faults().fail_next(DeviceCall::ReleaseDmaBuf, Errno(5));
    let shared = register(&domains, buffer).expect("the registrations are good");
    let found: Vec<_> = shared
        .regions()
        .iter()
        .map(|region| released(&region.decision().unwrap().attempts))
        .collect();
    assert_eq!(found, [vec![], vec![], vec![], vec![Some(Errno(5))]]);
    let buffer = close(shared);
    bench.faults.fail_nth(NicCall::Register, 4, Errno(12));
    bench.faults.fail_nth(NicCall::Register, 5, Errno(12));
    bench.device.faults().fail_next(DeviceCall::ReleaseDmaBuf, Errno(5));
    let rejected = register(&domains, buffer).unwrap_err();
    assert_eq!(released(rejected.error.trace()), [Some(Errno(5))]);
    assert!(rejected.value.regions().is_empty());
}

/// VRB-08
///
/// The driver refuses the first NIC's export with the PCIe mapping once. The other NICs prefer that
/// mapping too, and register the export with the default mapping that exists by then.
#[test]
fn nics_without_a_remembered_path_register_the_export_that_exists() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    let buffer = bench.buffer(page_size());
    // Without pages for probes, no NIC has a remembered path.
    bench.device.faults().fail_always(DeviceCall::CreateMemory, Errno(12));
    bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(12));
    let before = bench.calls(DeviceCall::ExportDmaBuf);
    bench.record.take();
    let shared = register(&domains, buffer).expect("the default mapping works");
    let handed = bench.record.handed();
    assert_eq!(handed.len(), NICS.len());
    assert!(handed.iter().all(|fd| *fd == handed[0]), "one export serves all: {handed:?}");
    assert_eq!(
        bench.calls(DeviceCall::ExportDmaBuf) - before,
        2,
        "the refused and the existing export"
    );
    for region in shared.regions() {
        assert_eq!(region.decision().unwrap().mapping, DmaBufMapping::Default);
    }
    bench.device.faults().clear();
    drop(close(shared));
    assert_eq!(bench.device.stats().live_exports, 0);
}

/// VRB-08
#[test]
fn drop_deregisters_at_every_nic() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let domains = domains(&bench, P2pPolicy::Required);
    drop(register(&domains, bench.buffer(page_size())).unwrap());
    assert_eq!((regions(&domains), bench.device.stats().live_allocations), (0, 0));
}

/// VRB-08
#[test]
fn host_memory_and_application_dma_bufs_register_on_several_nics() {
    let _alone = alone();
    let bench = bench(DIRECT);
    let owned = domains(&bench, P2pPolicy::Required);
    let domains: Vec<_> = owned.iter().collect();
    let host = Batch::on(&domains).add(Request::new(vec![7u8; 100], REMOTE)).register().unwrap();
    assert!(host.regions().iter().all(|region| region.decision().unwrap().path == Path::PlainHost));
    assert_eq!(host.close().unwrap(), [vec![7u8; 100]]);
    let buffer = bench.buffer(page_size());
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let Allocation { range, .. } = *buffer.allocation();
    let export = bench.device.export_dma_buf(range, &nic, DmaBufMapping::Default).unwrap();
    let fd = export.as_fd().try_clone_to_owned().unwrap();
    let given = DmaBuf { fd, offset: export.offset, len: page_size(), base_addr: None };
    // SAFETY: the buffer is dropped after the regions, and no reference to it exists.
    let memory = unsafe { Raw::new(given, Promise::ReadWrite) };
    let shared = Batch::on(&domains).add(Request::new(memory, REMOTE)).register().unwrap();
    assert_eq!((shared.regions().len(), bench.calls(DeviceCall::ExportDmaBuf)), (4, 1));
    let host = Request::new(vec![7u8; 100], REMOTE).flags(MrFlags::MR_DMABUF);
    let no_dma_buf = Batch::on(&domains).add(host).register();
    assert_eq!(no_dma_buf.unwrap_err().error.kind(), ErrorKind::InvalidArgument);
    shared.close().map_err(Error::from).unwrap();
    bench.device.release_dma_buf(export).unwrap();
}

/// VRB-08
#[test]
fn domains_that_cannot_register_together_are_refused() {
    let _alone = alone();
    let (one, two) = (bench(DIRECT), bench(DIRECT));
    let (near, far) =
        (one.domain("loop0", P2pPolicy::Enabled), two.domain("loop0", P2pPolicy::Enabled));
    for domains in [&[][..], &[&near, &far][..]] {
        let request = Request::new(vec![1u8; 64], REMOTE);
        let rejected = Batch::on(domains).add(request).register().unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(rejected.error.operation(), "register batch");
        assert_eq!(rejected.value.close().unwrap(), [vec![1u8; 64]]);
    }
    // One domain without support refuses the request for all.
    let attr = DomainAttr { nic: Some("loop1".into()), ..DomainAttr::default() };
    let other =
        Domain::open(&one.provider, Arc::clone(&one.registry), Arc::clone(&one.paths) as _, attr)
            .unwrap();
    let request = Request::new(vec![0u8; 64], REMOTE).page_size(3);
    let rejected = Batch::on(&[&near, &other]).add(request).register().unwrap_err();
    assert_eq!(rejected.error.kind(), ErrorKind::BadPageSize);
    assert_eq!((near.live().regions, other.live().regions), (0, 0));
}
