//! The default order of direct paths (LIFE-06): a setting of the builder, or the variable
//! `HMEM_DIRECT_PATHS`.

mod child;

use hmem::{
    Access, AllocationKind, Builder, DeviceBuffer, DeviceId, DomainAttr, ErrorKind, Hmem, MrMode,
    Path,
    iface::{AllocRequest, DmaBufMapping},
    loopback::Loopback,
    p2p::path::ExplainRequest,
    path::DirectPath,
    provider::Imports,
    system::{SIMULATED, Simulated},
};

fn device_buffer(hmem: &Hmem) -> DeviceBuffer {
    let iface = hmem.iface(SIMULATED).expect("it was added");
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(iface, &request).expect("device memory")
}

/// LIFE-06
///
/// A list of the domain overrides the builder's, which overrides the variable.
#[test]
fn direct_paths_come_from_the_domain_the_builder_or_the_variable() {
    const NAME: &str = "direct_paths_come_from_the_domain_the_builder_or_the_variable";
    if !child::alone(NAME, &[("HMEM_DIRECT_PATHS", "peer-memory,dma-buf")]) {
        return;
    }
    let build = |change: fn(Builder) -> Builder| {
        let simulated = Simulated::builder().peer_memory(true).build().expect("a simulated device");
        let imports =
            Imports { dma_buf: true, peer_memory: true, staged: true, ..Imports::default() };
        let loopback = Loopback::builder().imports(imports).build().expect("a software NIC");
        let builder = Hmem::builder().without_vendor_ifaces().iface(simulated).provider(loopback);
        change(builder).build().expect("builds")
    };
    let path = |hmem: &Hmem, direct_paths| {
        let attr = DomainAttr { mr_mode: MrMode::empty(), direct_paths, ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("opens");
        let region = domain.register(device_buffer(hmem), Access::REMOTE_READ).expect("registers");
        let decision = region.decision().expect("registered");
        (decision.path, decision.direct_paths.as_deref().map(DirectPath::list))
    };
    let text = |text: &str| Some(text.to_owned());
    let hmem = build(|builder| builder);
    assert_eq!(path(&hmem, None), (Path::PeerMemory, text("peer-memory,dma-buf")));
    assert_eq!(path(&hmem, Some(Vec::new())), (Path::Staged, text("none")));
    let explained = hmem.explain("loopback", &ExplainRequest::new(SIMULATED)).expect("explained");
    assert_eq!(explained.path, Some(Path::PeerMemory));
    let dma_buf = DirectPath::DmaBuf(DmaBufMapping::Default);
    let by_builder =
        build(|builder| builder.direct_paths([DirectPath::DmaBuf(DmaBufMapping::Default)]));
    assert_eq!(by_builder.direct_paths(), Some(&[dma_buf][..]));
    assert_eq!(path(&by_builder, None), (Path::DmaBuf, text("dma-buf")));
    let without = build(Builder::without_environment);
    assert_eq!(path(&without, None), (Path::DmaBuf, None));
}

/// LIFE-06
#[test]
fn wrong_variable_of_direct_paths_is_an_error_that_names_it() {
    const NAME: &str = "wrong_variable_of_direct_paths_is_an_error_that_names_it";
    if !child::alone(NAME, &[("HMEM_DIRECT_PATHS", "dma-buf,dma-buf")]) {
        return;
    }
    let error = Hmem::builder().without_vendor_ifaces().build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("variable"), Some("HMEM_DIRECT_PATHS"), "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("at most once")), "{error}");
    let opened = Hmem::builder().without_vendor_ifaces().direct_paths([]).build();
    assert!(opened.is_ok(), "the variable is not read if the builder has a list");
}
