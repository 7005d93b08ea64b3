//! Tests of the text of errors, as an application prints them.

#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

use std::{error::Error as _, io, sync::Arc};

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Error, ErrorKind,
    ErrorSummary, Hmem, Iface, IfaceKind,
    cuda::{
        Cuda, CudaMonitorKind,
        sys::{CuResult, Functions},
    },
    iface::AllocRequest,
    loopback::Loopback,
    p2p::path::ExplainRequest,
    path::P2pPolicy,
    provider::EndpointAttr,
    system::{P2pMatrix, SIMULATED, Simulated},
};

fn hmem(simulated: Simulated) -> Hmem {
    let loopback = Loopback::builder().build().expect("a software NIC");
    let builder = Hmem::builder().without_vendor_ifaces().iface(simulated).provider(loopback);
    builder.build().expect("started")
}

fn domain(hmem: &Hmem, p2p: P2pPolicy) -> Domain {
    hmem.domain("loopback", DomainAttr { p2p, ..DomainAttr::default() }).expect("a domain")
}

fn device_buffer(hmem: &Hmem) -> DeviceBuffer {
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(hmem.iface(SIMULATED).expect("added"), &request).expect("memory")
}

/// Errors as applications meet them: a refused registration of device memory, a missing library,
/// iface and provider, and a bad request.
fn frequent_errors() -> Vec<Error> {
    let blocked = P2pMatrix::all_reachable().block(DeviceId(0), "loop0");
    let hmem = hmem(Simulated::builder().p2p(blocked).build().expect("a device"));
    let required = domain(&hmem, P2pPolicy::Required);
    let refused = required.register(device_buffer(&hmem), Access::REMOTE_READ);
    let too_long = Loopback::builder().max_mr_size(4096).build().expect("a software NIC");
    let too_long = Hmem::builder().without_vendor_ifaces().provider(too_long).build();
    let too_long = domain(&too_long.expect("started"), P2pPolicy::Enabled);
    let region = required.register(vec![0; 64], Access::RECV).expect("registered");
    vec![
        refused.expect_err("the direct path is blocked").error,
        refused_cuda_export(),
        // SAFETY: the file does not exist.
        unsafe { Cuda::builder().library("/none/libcuda.so.1") }.open().expect_err("no library"),
        hmem.iface(IfaceKind::CUDA).expect_err("left out"),
        hmem.domain("nonsense", DomainAttr::default()).expect_err("no such provider"),
        too_long.register(vec![0; 10_000], Access::RECV).expect_err("too long").error,
        required.register(Vec::new(), Access::RECV).expect_err("empty").error,
        region.slice(60, 8).expect_err("outside"),
        "cudda".parse::<IfaceKind>().expect_err("unknown"),
    ]
}

/// Returns the error of a registration of CUDA memory that the driver does not export.
fn refused_cuda_export() -> Error {
    let fake = hmem_fake_cuda::FakeDriver::start(hmem_fake_cuda::Profile::default());
    // SAFETY: the fake driver has functions with the signatures that the vendor's header declares
    // for their names. Functions live forever.
    let functions = unsafe { Functions::from_lookup(|name| fake.symbol(name)) };
    let cuda = Cuda::builder().functions(functions.expect("every function"));
    let cuda: Arc<dyn Iface> =
        Arc::new(cuda.monitor(CudaMonitorKind::Identity).open().expect("a GPU"));
    let nic = Loopback::builder().build().expect("a software NIC");
    let builder = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&cuda));
    let hmem = builder.provider(nic).build().expect("started");
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&cuda, &request).expect("memory");
    fake.fail_nth("cuMemGetHandleForAddressRange", 1, CuResult(801));
    let refused = domain(&hmem, P2pPolicy::Required).register(buffer, Access::REMOTE_READ);
    refused.expect_err("the driver exports nothing").error
}

#[test]
fn short_text_has_reason_root_cause_and_remedy_and_the_alternate_text_all_values() {
    for error in frequent_errors() {
        let (short, long) = (error.to_string(), format!("{error:#}"));
        assert!(short.len() <= 230 && !short.contains('\n'), "{} bytes: {short}", short.len());
        assert!(short.starts_with(&error.message().to_string()), "{short}");
        let remedy = error.remedy_text().expect("a remedy");
        assert!(short.ends_with(&format!("; {remedy}")) && long.contains(remedy), "{short}");
        assert!(long.ends_with(&format!(" ({})", error.values())), "{long}");
        for attempt in error.trace().iter() {
            assert!(long.contains(&attempt.to_string()), "{long}");
        }
        let rejected = hmem::Rejected::new((), error);
        assert_eq!((rejected.to_string(), format!("{rejected:#}")), (short, long));
    }
    assert_eq!(
        refused_cuda_export().to_string(),
        "path: not supported: direct access is required, and no direct path works: \
         cuMemGetHandleForAddressRange: not supported, CUDA_ERROR_NOT_SUPPORTED (801); make a \
         path in the trace work, or set the policy to Enabled (staged copies)"
    );
}

#[test]
fn debug_has_one_line_for_each_attempt_cause_and_remedy() {
    let blocked = P2pMatrix::all_reachable().block(DeviceId(0), "loop0");
    let hmem = hmem(Simulated::builder().p2p(blocked).build().expect("a device"));
    let rejected = domain(&hmem, P2pPolicy::Required)
        .register(device_buffer(&hmem), Access::REMOTE_READ)
        .expect_err("the direct path is blocked");
    let error = &rejected.error;
    let text = format!("{error:?}");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("path: ") && !lines[0].contains('='), "{text}");
    for (at, attempt) in error.trace().iter().enumerate() {
        assert_eq!(lines[at + 1], format!("  ({}) {attempt}", at + 1));
    }
    let remedy = format!("  remedy: {}", error.remedy_text().expect("a remedy"));
    let details = format!("  details: {}", error.values());
    assert!(details.starts_with("  details: iface=simulated, device=0, "), "{text}");
    assert_eq!(lines[error.trace().len() + 1..], [remedy, details]);
    assert_eq!(format!("{rejected:?}"), text, "main prints the error of a `?`");
    assert!(format!("{error:#?}").contains("operation: \"path\""));
}

#[test]
fn summary_has_every_fact_of_a_refusal_and_survives_json() {
    let blocked = P2pMatrix::all_reachable().block(DeviceId(0), "loop0");
    let hmem = hmem(Simulated::builder().p2p(blocked).build().expect("a device"));
    let domain = domain(&hmem, P2pPolicy::Required);
    let refuse = || {
        let rejected = domain.register(device_buffer(&hmem), Access::REMOTE_READ);
        rejected.expect_err("the direct path is blocked").error
    };
    let error = refuse();
    let summary = error.summary();
    assert_eq!(
        (summary.kind, summary.operation.as_str()),
        (error.kind(), error.operation()),
        "{error}"
    );
    assert_eq!(summary.message, error.message().to_string());
    assert_eq!((summary.iface.as_deref(), summary.device), (Some("simulated"), Some(0)));
    assert_eq!(summary.remedy.as_deref(), error.remedy_text());
    assert_eq!(summary.attempts.len(), error.trace().len());
    for (copy, attempt) in summary.attempts.iter().zip(error.trace()) {
        assert_eq!((copy.path, &copy.call), (attempt.path, &attempt.call));
        let refusal = attempt.error.as_ref().expect("every attempt was refused");
        assert_eq!(copy.error.as_deref(), Some(&refusal.summary()));
        assert_eq!((copy.cause.as_ref(), copy.remedy.as_ref()), {
            (attempt.cause.as_ref(), attempt.remedy.as_ref())
        });
    }
    let json = serde_json::to_string(&summary).expect("JSON");
    assert!(json.contains("\"path\":\"dma-buf\""), "{json}");
    assert_eq!(serde_json::from_str::<ErrorSummary>(&json).expect("a summary"), summary);

    // Two refusals for the same reason differ at most in addresses.
    let mut again = refuse().summary();
    again.values.clone_from(&summary.values);
    again.attempts.clone_from(&summary.attempts);
    assert_eq!(again, summary);
}

#[test]
fn summary_lists_sources_and_the_first_of_several_values() {
    let loader = io::Error::other("no such file");
    let load = Error::new(ErrorKind::Unavailable, "load library").caused_by(loader);
    let error = Error::os(Errno(14), "ibv_reg_mr")
        .context("part", 1)
        .context("part", 2)
        .driver_code("CUDA_ERROR_INVALID_VALUE", 1)
        .caused_by(load);
    let summary = error.summary();
    assert_eq!(summary.sources, ["load library: unavailable", "no such file"]);
    assert_eq!(summary.values.get("part").map(String::as_str), Some("1"));
    assert_eq!(summary.errno, Some(14));
    assert_eq!(summary.driver_code.as_deref(), Some("CUDA_ERROR_INVALID_VALUE (1)"));
    assert_ne!(summary, error.context("other", 3).summary());
}

#[test]
fn debug_prints_each_cause_once() {
    let loader = io::Error::other("no such file");
    let load = Error::new(ErrorKind::Unavailable, "load library").caused_by(loader);
    let error = Error::new(ErrorKind::Unavailable, "start iface").caused_by(load);
    assert_eq!(
        format!("{error:?}"),
        "start iface: unavailable\n  caused by: load library: unavailable\n  \
         caused by: no such file"
    );
    let rejected = hmem::Rejected::new((), error.clone());
    let source = rejected.source().expect("a cause").to_string();
    assert_eq!(source, error.source().expect("a cause").to_string());
}

#[test]
fn plug_in_is_called_by_its_registered_name() {
    let simulated = || Simulated::builder().build().expect("a device");
    let started = hmem(simulated());
    let region = domain(&started, P2pPolicy::Enabled)
        .register(device_buffer(&started), Access::REMOTE_READ)
        .expect("registered");
    let decision = region.decision().expect("registered").to_string();
    assert!(decision.contains("for simulated device 0 on loopback/loop0"), "{decision}");

    let filtered = Hmem::builder().ifaces("system").iface(simulated()).build().expect("started");
    let error = filtered.iface(SIMULATED).expect_err("the filter leaves it out");
    let error = format!("{error:#}");
    let remedy = "add simulated to Builder::ifaces";
    assert!(error.contains("iface=simulated") && !error.contains("0x100"), "{error}");
    assert!(error.contains(remedy) && error.matches(remedy).count() == 1, "{error}");

    // Errors of the iface itself, and errors of other parts that concern the iface.
    let iface = started.iface(SIMULATED).expect("added");
    let none = AllocRequest { len: 4096, device: DeviceId(9), kind: AllocationKind::Device };
    let refused = DeviceBuffer::allocate(iface, &none).expect_err("no such device");
    let request = ExplainRequest::new(SIMULATED).device(Some(DeviceId(9)));
    let unexplained = started.explain("loopback", &request).expect_err("no such device");
    for error in [refused, unexplained] {
        for text in [format!("{error:#}"), format!("{error:?}"), format!("{error:#?}")] {
            assert!(text.contains("simulated") && !text.contains("0x100"), "{text}");
        }
    }
}

#[test]
fn values_stand_after_the_remedy_and_the_reason_before_it() {
    let load = Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::CUDA)
        .context("library", "libx.so")
        .context("why", "no such file")
        .remedy("install it");
    let error = Error::new(ErrorKind::Unavailable, "iface").iface(IfaceKind::CUDA).caused_by(load);
    let causes = "iface: unavailable: load library: unavailable: no such file";
    assert_eq!(format!("{error:#}"), format!("{causes}; install it (iface=cuda, library=libx.so)"));
    assert_eq!(error.reason().to_string(), format!("{causes} (iface=cuda, library=libx.so)"));
    assert_eq!(error.message().to_string(), "iface: unavailable");
    assert_eq!(error.remedy_text(), Some("install it"));
    let os = Error::os(hmem::Errno(14), "ibv_reg_mr").to_string();
    assert_eq!(os, "ibv_reg_mr: address not reachable, EFAULT (14)");
}

#[test]
fn missing_right_is_named_with_the_side_that_lacks_it() {
    let hmem = hmem(Simulated::builder().build().expect("a device"));
    let domain = domain(&hmem, P2pPolicy::Enabled);
    let queue = domain.open_cq(256).expect("a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let source = domain.register(vec![1; 8], Access::WRITE).expect("registered");
    let target = domain.register(vec![0; 8], Access::REMOTE_READ).expect("registered");
    let key = target.key().expect("a key");
    let (from, to) = (source.slice(0, 8).expect("inside"), key.slice(0, 8).expect("inside"));
    endpoint.write(&[from], &[to], peer, 1).expect("posted");
    let mut done = Vec::new();
    queue.wait(&mut done, 1, std::time::Duration::MAX).expect("a completion");
    let error = done.remove(0).result.expect_err("the key grants reads only").to_string();
    let remedy = "ask the peer for a key that grants REMOTE_WRITE or REMOTE_RMA_WRITE";
    assert!(error.contains(&format!("; {remedy}")), "{error}");
}

#[test]
fn region_with_a_grant_asks_to_revoke_it() {
    let hmem = hmem(Simulated::builder().build().expect("a device"));
    let domain = domain(&hmem, P2pPolicy::Enabled);
    let queue = domain.open_cq(256).expect("a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let region =
        domain.register(vec![0; 4096], Access::RECV | Access::MW_BIND).expect("registered");
    let outside = region.grant(&endpoint, 4000..5000, Access::REMOTE_READ).expect_err("outside");
    assert!(
        format!("{outside:#}")
            .contains("; grant or bind bytes in the region (InfiniBand C10-75) (")
    );
    let grant = region.grant(&endpoint, 0..64, Access::REMOTE_READ).expect("granted");
    let refused = region.close().expect_err("a grant lives");
    assert!(refused.error.to_string().contains("revoke its grants"), "{refused}");
    grant.revoke().expect("revoked");
    assert_eq!(refused.value.close().expect("closed").len(), 4096);
}

#[test]
fn empty_vector_is_refused_without_an_address() {
    let hmem = hmem(Simulated::builder().build().expect("a device"));
    let refused = domain(&hmem, P2pPolicy::Enabled).register(Vec::new(), Access::WRITE);
    let error = format!("{:#}", refused.expect_err("no bytes"));
    assert!(error.contains("length=0") && !error.contains("0x1"), "{error}");
}
