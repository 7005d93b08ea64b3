//! The verbs provider over a fake library: loading, capabilities, checks before driver calls, and
//! errors.

#[path = "../../tests/child/mod.rs"]
mod child;
mod fake;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
};

use fake::{calls, functions, memory, open, range, symbol, with};
use hmem_core::{
    Access, Address, Addressing, AllocationKind, AuthKey, BindFlags, Decision, DeviceBuffer,
    DeviceId, DmaBufOffset, Domain, DomainAttr, Errno, Error, ErrorKind, Iface, MrFlags, MrMode,
    Path as HmemPath, Registry, RemoteKey, Request, Result, WriteOrdering,
    iface::{AllocRequest, DmaBufMapping},
    provider::{
        Backing, CompositeKeys, DomainRequest, Features, Piece, Provider, ProviderDomain,
        ProviderRegion, Registration, StagingAttr,
    },
};
use hmem_iface_system::{DeviceCall, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{
    DeviceRights, ForkSafety, ForkSupport, Settings, Verbs, VerbsDomain, VerbsOptions,
    access_flags,
    sys::{AccessFlags, Functions},
};

fn domain() -> Domain {
    open(&Verbs::builder().functions(functions()).build().expect("start"))
}

fn register(
    domain: &Domain,
    pieces: &[Piece<'_>],
    access: Access,
    options: VerbsOptions,
) -> Result<ProviderRegion> {
    let auth_key = AuthKey::default();
    let ranges: Vec<_> = pieces.iter().map(|piece| piece.range).collect();
    let settings = Settings { options, iova: None };
    let request = Registration::new(&ranges, access, &auth_key);
    let request = Registration { extension: Some(&settings), ..request };
    // SAFETY: the fake library accesses no memory.
    unsafe { VerbsDomain::of(domain).expect("verbs").register(&request, pieces) }
}

fn host(start: u64, len: u64) -> Piece<'static> {
    Piece { range: range(start, len), backing: Backing::Host { owned: false } }
}

/// VRB-06
#[test]
fn missing_library_is_named_with_the_loaders_reason() {
    // SAFETY: there is no such file.
    let builder = unsafe { Verbs::builder().library("/nowhere/libibverbs.so.1") };
    let error = builder.build().expect_err("not there");
    assert!(error.is_unavailable());
    assert_eq!(error.context_value("library"), Some("/nowhere/libibverbs.so.1"));
    assert!(format!("{error:#}").contains("cannot open shared object file"), "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("libibverbs")), "{error}");
}

/// VRB-06
#[test]
fn missing_symbol_is_named_with_its_version() {
    for (missing, version) in Functions::SYMBOLS {
        // SAFETY: the fake library's functions have the signatures of the header.
        let error = unsafe {
            Functions::from_lookup(|name, _| if name == *missing { None } else { symbol(name) })
        }
        .expect_err("a symbol is missing");
        assert_eq!(error.context_value("symbol"), Some(format!("{missing}@{version}").as_str()));
        assert!(error.is_unavailable());
    }
    for (missing, _) in Functions::OPTIONAL {
        // SAFETY: the fake library's functions have the signatures of the header.
        unsafe {
            Functions::from_lookup(|name, _| if name == *missing { None } else { symbol(name) })
        }
        .expect("the library is usable without it");
    }
}

/// VRB-06
#[test]
fn absent_device_is_unavailable_and_names_the_library() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    with(|script| script.devices = None);
    let error = verbs.nics().expect_err("errno 38");
    assert!(error.is_unavailable());
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(38));
    assert_eq!(error.context_value("library"), Some("(injected)"));
    let loads_driver = |error: &Error| {
        let remedy = error.remedy_text().unwrap_or_default();
        remedy.starts_with("load the NIC's driver and ib_uverbs (modprobe): ")
    };
    assert!(loads_driver(&error), "{error}");
    with(|script| script.devices = Some(0));
    let error = verbs.nics().expect_err("an empty list");
    assert!(error.is_unavailable() && loads_driver(&error), "{error}");
    assert!(calls().contains(&"free_device_list".to_owned()));
}

/// VRB-03
#[test]
fn rights_are_translated_exactly() {
    let plain = DeviceRights::default();
    let atomics = DeviceRights { atomics: true, iwarp: false };
    let iwarp = DeviceRights { atomics: false, iwarp: true };
    let (write, read, local) =
        (AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_READ, AccessFlags::LOCAL_WRITE);
    for (access, device, expected) in [
        (Access::empty(), atomics, AccessFlags::empty()),
        (Access::SEND | Access::WRITE | Access::COLLECTIVE, atomics, AccessFlags::empty()),
        (Access::READ, atomics, local),
        (Access::RECV, iwarp, local),
        (Access::READ, iwarp, local | write),
        (Access::REMOTE_READ, atomics, read),
        (Access::REMOTE_WRITE, plain, write | local),
        (Access::REMOTE_WRITE, atomics, write | local | AccessFlags::REMOTE_ATOMIC),
        (Access::all(), plain, write | local | read),
    ] {
        assert_eq!(access_flags(access, device), expected, "{access} on {device:?}");
    }
}

/// A tracing subscriber that records the events of this crate as text.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<String>>);

impl tracing::field::Visit for Events {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let mut text = self.0.lock().expect("not poisoned");
        *text += &format!("{field}={value:?} ");
    }
}

impl tracing::Subscriber for Events {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("hmem_provider_verbs")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// VRB-03: a tracing event names each verbs right that the provider adds to the requested rights.
#[test]
fn added_right_is_in_the_trace() {
    let domain = domain();
    // With a single subscriber, tracing caches the interest of the thread that first reaches an
    // event. That thread may belong to another test.
    let _second = tracing::Dispatch::new(Events::default());
    let said = |access| {
        let events = Events::default();
        tracing::subscriber::with_default(events.clone(), || {
            register(&domain, &[host(0x1000, 64)], access, VerbsOptions::empty())
                .expect("register");
        });
        events.0.lock().expect("not poisoned").clone()
    };
    let added = said(Access::REMOTE_WRITE);
    assert!(added.contains("added=LOCAL_WRITE"), "{added:?}");
    for as_asked in [Access::REMOTE_WRITE | Access::RECV, Access::REMOTE_READ, Access::SEND] {
        let text = said(as_asked);
        assert!(!text.contains("added="), "{as_asked}: {text:?}");
    }
}

#[test]
fn driver_refusals_have_kinds_and_remedies() {
    let domain = domain();
    for (errno, kind, word) in [
        (12, ErrorKind::OutOfResources, ""),
        (14, ErrorKind::BadAddress, "map the whole range"),
        (22, ErrorKind::InvalidArgument, "check the range"),
        (95, ErrorKind::Unsupported, ""),
        (524, ErrorKind::Unsupported, ""),
        (5, ErrorKind::Driver, ""),
    ] {
        with(|script| script.register = vec![errno]);
        let error = register(&domain, &[host(0x10000, 4096)], Access::SEND, VerbsOptions::empty())
            .expect_err("refused");
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.os_errno().map(|errno| errno.0), Some(errno));
        assert_eq!(error.provider_name(), Some("verbs/fake0"));
        assert!(format!("{error:#}").contains(word), "{error}");
    }
    let address = Address(0x7000_0000);
    let iface: Arc<dyn Iface> = Arc::new(hmem_iface_system::System::new());
    let peer = Piece {
        range: range(0x7000_0000, 4096),
        backing: Backing::PeerMemory { iface: &iface, address },
    };
    with(|script| script.register = vec![14]);
    let error =
        register(&domain, &[peer], Access::SEND, VerbsOptions::empty()).expect_err("refused");
    assert!(format!("{error:#}").contains("peer-memory client"), "{error}");
    assert_eq!(domain.live().regions, 0);
}

/// P2P-04
///
/// No file reports whether a peer-memory module supports a device. The provider finds out by
/// registering a device address.
#[test]
fn peer_memory_is_tried_by_registering_a_device_address() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    let simulated =
        Simulated::builder().window(1 << 30).peer_memory(true).build().expect("a device");
    let device: Arc<dyn Iface> = Arc::new(simulated);
    let mut registry = Registry::new();
    registry.add(Arc::clone(&device)).expect("add the device");
    let registry = Arc::new(registry);
    // `answers` holds the driver's errno values for three registrations: of the buffer, of the
    // staging buffers, and of a probe page.
    for (answers, expected) in [(vec![], HmemPath::PeerMemory), (vec![14, 0, 14], HmemPath::Staged)]
    {
        let selector = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(&verbs, Arc::clone(&registry), selector, DomainAttr::default());
        let domain = domain.expect("open");
        with(|script| script.register = answers);
        let wanted = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
        let buffer = DeviceBuffer::allocate(&device, &wanted).expect("device memory");
        calls();
        let region = domain.register(buffer, Access::READ | Access::WRITE).expect("register");
        let address = region.range().start();
        let asked = calls();
        assert!(asked[0].starts_with(&format!("reg_mr {:#x}+0x2000", address.0)), "{asked:?}");
        let decision = region.decision().expect("decided");
        assert_eq!(decision.path, expected, "{decision}");
        let tried = decision.attempts.iter().find(|attempt| attempt.path == HmemPath::PeerMemory);
        let tried = tried.expect("it is in the trace");
        let errno = tried.error.as_ref().and_then(|error| error.os_errno()).map(|errno| errno.0);
        assert_eq!(errno, (expected == HmemPath::Staged).then_some(14));
        assert!(tried.driver_called, "the driver was called");
        region.close().expect("close");
    }
}

/// Registers device memory and returns the decision. The dma-buf exports with the numbers in
/// `refused` fail. `answers` holds the errno values of the registrations, in order.
fn decided(verbs: &Verbs, refused: &[u64], answers: Vec<i32>) -> Arc<Decision> {
    let simulated = Arc::new(Simulated::builder().window(1 << 30).build().expect("a device"));
    let device: Arc<dyn Iface> = Arc::clone(&simulated) as _;
    let mut registry = Registry::new();
    registry.add(Arc::clone(&device)).expect("add the device");
    let attr = DomainAttr::default();
    let domain =
        Domain::open(verbs, Arc::new(registry), Arc::new(DefaultPathSelector::new()), attr)
            .expect("open");
    let wanted = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&device, &wanted).expect("device memory");
    refused
        .iter()
        .for_each(|nth| simulated.faults().fail_nth(DeviceCall::ExportDmaBuf, *nth, Errno(95)));
    with(|script| script.register = answers);
    let region = domain.register(buffer, Access::REMOTE_WRITE).expect("register");
    let decision = Arc::clone(region.decision().expect("decided"));
    region.close().expect("close");
    with(|script| script.register = Vec::new());
    decision
}

/// HM-09
#[test]
fn pcie_mapping_is_tried_first_where_the_device_needs_it() {
    let functions = functions();
    with(|script| script.dma_buf = 0);
    let verbs = |first| {
        let verbs = Verbs::builder().functions(functions.clone()).pcie_mapping_first(first).build();
        let verbs = verbs.expect("start");
        let nics = verbs.nics().expect("one device");
        assert!(nics.iter().all(|nic| nic.imports.pcie_mapping_first == Some(first)));
        verbs
    };
    let tried = |decision: &Decision| {
        let attempts = decision.attempts.iter();
        let tried =
            attempts.map(|tried| (tried.call.clone(), tried.error.is_some())).collect::<Vec<_>>();
        (decision.mapping, tried)
    };
    let with_mapping = ("register(dma-buf, Pcie mapping)".to_owned(), false);
    let without = ("register(dma-buf, Default mapping)".to_owned(), false);
    assert_eq!(
        tried(&decided(&verbs(true), &[], vec![])),
        (DmaBufMapping::Pcie, vec![with_mapping.clone()])
    );
    assert_eq!(
        tried(&decided(&verbs(false), &[], vec![])),
        (DmaBufMapping::Default, vec![without.clone()])
    );
    // The device refuses the mapping, for the buffer and for a page of the same kind.
    let (mapping, attempts) = tried(&decided(&verbs(true), &[1, 3], vec![]));
    assert_eq!((mapping, attempts.len()), (DmaBufMapping::Default, 2), "{attempts:?}");
    let (call, failed) = &attempts[0];
    assert!(
        call.starts_with("export_dma_buf(") && call.ends_with(", Pcie)") && *failed,
        "{attempts:?}"
    );
    assert_eq!(attempts[1], without);
    // The NIC's driver refuses the mapping.
    let (mapping, attempts) = tried(&decided(&verbs(true), &[], vec![524, 0, 524]));
    assert_eq!(mapping, DmaBufMapping::Default);
    assert_eq!(attempts, [(with_mapping.0, true), without]);
}

/// HM-09
///
/// The environment variable decides whether the provider tries the PCIe mapping first. Without it,
/// the path search decides. Each value is tested in its own process.
#[test]
fn environment_sets_the_pcie_mapping() {
    const VARIABLE: &str = Verbs::PCIE_MAPPING_VARIABLE;
    const IN_CHILD: &str = "HMEM_TEST_EXPECTED";
    let Ok(expected) = std::env::var(IN_CHILD) else {
        for (value, expected) in [
            ("1", "Some(true)"),
            ("YES", "Some(true)"),
            ("off", "Some(false)"),
            ("", "None"),
            ("5", ""),
        ] {
            let mut command = child::command("environment_sets_the_pcie_mapping");
            child::passes(command.env(VARIABLE, value).env(IN_CHILD, expected));
        }
        return;
    };
    let functions = functions();
    with(|script| script.dma_buf = 0);
    let first = |verbs: Verbs| verbs.nics().expect("one device")[0].imports.pcie_mapping_first;
    let builder = || Verbs::builder().functions(functions.clone());
    match expected.as_str() {
        "" => {
            let error = builder().build().expect_err("the value is no boolean");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(error.context_value("variable"), Some(VARIABLE));
            assert_eq!(error.context_value("value"), Some("5"));
            assert!(error.remedy_text().is_some());
        }
        said => assert_eq!(format!("{:?}", first(builder().build().expect("start"))), said),
    }
    assert_eq!(first(builder().without_environment().build().expect("start")), None);
    // The builder overrides the environment.
    for says in [false, true] {
        assert_eq!(first(builder().pcie_mapping_first(says).build().expect("start")), Some(says));
    }
    let pd = fake::foreign_pd();
    // SAFETY: the fake's protection domain is never freed.
    let brought = unsafe { builder().pcie_mapping_first(true).with_pd(pd, ()) }.expect("start");
    assert_eq!(first(brought), Some(true));
}

/// VRB-02, VRB-01
///
/// The provider refuses REMOTE_WRITE and REMOTE_ATOMIC without LOCAL_WRITE, and options that the
/// device lacks, without a driver call.
#[test]
fn unsupported_flags_are_refused_before_the_driver_call() {
    let domain = domain();
    calls();
    for flags in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC] {
        let error = Access::try_from(flags).expect_err("no LOCAL_WRITE");
        let errno = error.os_errno().map(|errno| errno.0);
        assert_eq!((error.kind(), errno), (ErrorKind::BadAccess, Some(22)), "{error}");
    }
    for option in [VerbsOptions::ON_DEMAND, VerbsOptions::MW_BIND, VerbsOptions::HUGETLB] {
        let error = register(&domain, &[host(0x1000, 4096)], Access::SEND, option)
            .expect_err("the fake device lacks the option");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(format!("{error:#}").contains("fake0"), "{error}");
    }
    let page = rustix::param::page_size() as u64;
    let error = register(&domain, &[host(page + 1, page)], Access::SEND, VerbsOptions::ZERO_BASED)
        .expect_err("unaligned");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(calls().is_empty(), "the driver was called");
}

/// VRB-02
#[test]
fn options_use_the_driver_call_that_accepts_them() {
    let domain = domain();
    let page = rustix::param::page_size() as u64;
    let memory = [host(page, page)];
    calls();
    let region =
        register(&domain, &memory, Access::SEND, VerbsOptions::RELAXED_ORDERING).expect("register");
    assert_eq!(calls(), [format!("reg_mr_iova2 {page:#x}+{page:#x} at {page:#x} 0x100000")]);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    verbs.deregister(region).expect("deregister");
    calls();
    let region =
        register(&domain, &memory, Access::READ, VerbsOptions::ZERO_BASED).expect("register");
    assert_eq!(calls(), [format!("reg_mr_iova2 {page:#x}+{page:#x} at 0x0 0x21")]);
    let key = verbs.remote_key(region).expect("a key").expect("not the usual key");
    assert_eq!((key.addressing(), key.base().0), (Addressing::ZeroBased, 0));
}

/// VRB-02
#[test]
fn relaxed_ordering_is_a_setting_of_domains_and_regions() {
    let domain_of = |functions, ordering| {
        let verbs = Verbs::builder().functions(functions).build().expect("start");
        with(|script| script.dma_buf = 0);
        let attr = DomainAttr { ordering, ..DomainAttr::default() };
        let paths = Arc::new(DefaultPathSelector::new());
        Domain::open(&verbs, Arc::new(Registry::new()), paths, attr).expect("open")
    };
    let asked = |domain: &Domain, ordering| {
        let mut request = Request::new(memory(0x1000, 4096), Access::SEND);
        if let Some(ordering) = ordering {
            request = request.ordering(ordering);
        }
        calls();
        let region = domain.submit(request).expect("register");
        let asked = calls();
        drop(region);
        asked
    };
    let (relaxed, strict) = (WriteOrdering::Relaxed, WriteOrdering::Strict);
    let by_iova = ["reg_mr_iova2 0x1000+0x1000 at 0x1000 0x100000"];
    let plain = ["reg_mr 0x1000+0x1000 0x0"];
    let domain = domain_of(functions(), WriteOrdering::default());
    assert_eq!(asked(&domain, None), plain, "the default keeps data before its flag");
    assert_eq!(asked(&domain, Some(relaxed)), by_iova, "one region for bulk transfers");
    let domain = domain_of(functions(), relaxed);
    assert_eq!(asked(&domain, None), by_iova, "a domain for bulk transfers");
    assert_eq!(asked(&domain, Some(strict)), plain, "one region with polled memory");
    // With a library without `ibv_reg_mr_iova2`, the provider registers without relaxed ordering.
    drop(functions());
    let without = |name: &'static str, _: &'static str| {
        if name == "ibv_reg_mr_iova2" { None } else { symbol(name) }
    };
    // SAFETY: the fake library's functions have the signatures of the header.
    let old = unsafe { Functions::from_lookup(without) }.expect("usable without it");
    assert_eq!(asked(&domain_of(old, relaxed), None), plain);
    // The builder refuses RELAXED_ORDERING, because the domain's setting would override it.
    let verbs = Verbs::builder().functions(functions());
    let verbs = verbs.options(VerbsOptions::RELAXED_ORDERING | VerbsOptions::ON_DEMAND);
    let error = verbs.build().expect_err("a setting of domains");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("ordering")), "{error}");
}

/// VRB-02
#[test]
fn options_of_a_registration_are_added_to_those_of_the_builder_and_the_rights() {
    let functions = functions();
    with(|script| script.on_demand = true);
    let verbs = Verbs::builder().functions(functions).options(VerbsOptions::ON_DEMAND);
    let domain = open(&verbs.build().expect("start"));
    let memory = [host(0x1000, 4096)];
    calls();
    register(&domain, &memory, Access::SEND, VerbsOptions::RELAXED_ORDERING).expect("register");
    assert_eq!(calls(), ["reg_mr_iova2 0x1000+0x1000 at 0x1000 0x100040"]);
    let error = register(&domain, &memory, Access::MW_BIND, VerbsOptions::empty())
        .expect_err("the device has no windows");
    assert_eq!(error.context_value("option"), Some("MW_BIND"), "{error}");
}

/// Calls for features that verbs or the device lacks fail with a remedy. The device has no memory
/// windows.
#[test]
fn missing_facets_are_refused_with_a_remedy() {
    let domain = domain();
    let has = Features::COMPOSITE_KEYS
        | Features::RAW_KEYS
        | Features::STAGING
        | Features::MANUAL_PROGRESS
        | Features::TRANSPORT
        | Features::NIC_LIFE
        | Features::REVOCATIONS;
    assert_eq!(domain.features(), has);
    let region = domain.register(memory(0x1000, 4096), Access::READ).expect("register");
    let refused = |error: Error, kind: ErrorKind, advice: &str| {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(format!("{error:#}").contains("verbs/fake0"), "{error}");
        assert!(error.remedy_text().is_some_and(|text| text.contains(advice)), "{error}");
    };
    let sub = region.sub(range(0x1000, 64), Access::READ, None);
    refused(sub.unwrap_err(), ErrorKind::Unsupported, "bind a memory window");
    refused(region.refresh(&[]).unwrap_err(), ErrorKind::NoSys, "ON_DEMAND");
    let counter = region.bind_counter(&Arc::default(), BindFlags::REMOTE_WRITE);
    refused(counter.unwrap_err(), ErrorKind::NoSys, "does not count");
    let window = domain.alloc_type_1_window();
    refused(window.unwrap_err(), ErrorKind::Unsupported, "no memory windows");
}

/// KEY-04
///
/// Two domains map the same raw key eight times each. Neither domain may unmap a key of the other
/// domain.
#[test]
fn mapped_key_of_another_domain_unmaps_nothing() {
    let (mine, theirs) = (domain(), domain());
    let region = mine.register(memory(0x1000, 64), Access::REMOTE_READ).expect("register");
    let raw = region.raw_key().expect("raw key");
    let map = |domain: &Domain| {
        [(); 8].map(|()| domain.map_raw(region.base_addr(), region.len(), &raw).expect("map"))
    };
    let (own, foreign) = (map(&mine), map(&theirs));
    for key in &foreign {
        assert_eq!(
            mine.unmap_key(key).expect_err("another domain's").kind(),
            ErrorKind::InvalidKey
        );
    }
    assert_eq!(mine.live().mapped_keys, 8);
    for key in &own {
        mine.unmap_key(key).expect("it is still there");
    }
    assert_eq!((mine.live().mapped_keys, theirs.live().mapped_keys), (0, 8));
}

/// KEY-08
#[test]
fn authorization_keys_are_refused() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    let key = AuthKey(vec![1, 2, 3]);
    let attr = DomainAttr { auth_key: key.clone(), ..DomainAttr::default() };
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.provider_name(), Some("verbs/fake0"), "{error}");
        assert!(format!("{error:#}").contains("authorization keys"), "{error}");
    };
    refused(Domain::open(&verbs, registry, paths, attr).expect_err("a domain with a key"));

    let domain = open(&verbs);
    calls();
    let request = || Request::new(memory(0x1000, 64), Access::REMOTE_READ);
    refused(domain.submit(request().auth_key(&key)).expect_err("a region with a key").error);
    assert!(calls().is_empty(), "the driver was called");
    assert_eq!(domain.live().regions, 0);
    // An empty key counts as no key.
    domain.submit(request().auth_key(&AuthKey(Vec::new()))).expect("no key");
}

/// VRB-01
///
/// Verbs cannot enable a region later. The provider therefore registers every region enabled.
#[test]
fn region_registered_disabled_is_usable_at_once() {
    let domain = domain();
    let provider = VerbsDomain::of(&domain).expect("verbs");
    assert!(provider.enabling().is_none());
    let (auth_key, ranges) = (AuthKey::default(), [range(0x1000, 64)]);
    let request = Registration {
        enabled: false,
        ..Registration::new(&ranges, Access::REMOTE_READ, &auth_key)
    };
    let pieces = [host(0x1000, 64)];
    // SAFETY: the fake library accesses no memory.
    let region = unsafe { provider.register(&request, &pieces) }.expect("register");
    provider.deregister(region).expect("deregister");
}

/// MODE-13
#[test]
fn basic_mode_works_together_with_local() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    let open = |mr_mode| {
        let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
        Domain::open(&verbs, registry, paths, DomainAttr { mr_mode, ..DomainAttr::default() })
    };
    let error = open(MrMode::BASIC).expect_err("verbs needs LOCAL");
    assert_eq!(error.kind(), ErrorKind::ModeMismatch, "{error}");
    assert_eq!(error.context_value("bits"), Some("LOCAL"), "{error}");
    let domain = open(MrMode::BASIC | MrMode::LOCAL).expect("BASIC with LOCAL");
    assert_eq!(domain.mr_mode(), MrMode::BASIC | MrMode::LOCAL, "both bits stay set");
    // BASIC implies VIRT_ADDR and PROV_KEY.
    let request = Request::new(memory(0x1000, 64), Access::REMOTE_READ).key(7);
    let region = domain.submit(request).expect("register");
    assert_eq!(region.base_addr().0, 0x1000);
    assert_ne!(region.key().expect("key").as_u64().expect("a number"), 7);
    region.desc().expect("the descriptor that LOCAL asks for");
}

/// VRB-02
#[test]
fn hugetlb_option_needs_memory_in_huge_pages() {
    let functions = functions();
    with(|script| script.on_demand = true);
    let domain = open(&Verbs::builder().functions(functions).build().expect("start"));
    let ordinary = vec![0_u8; 8192];
    let memory = [host(ordinary.as_ptr().expose_provenance() as u64, 8192)];
    calls();
    let huge = VerbsOptions::HUGETLB;
    let error = register(&domain, &memory, Access::SEND, huge).expect_err("ordinary pages");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("option"), Some("HUGETLB"), "{error}");
    assert!(format!("{error:#}").contains("MAP_HUGETLB"), "{error}");
    assert!(calls().is_empty(), "the driver was called");
    register(&domain, &memory, Access::SEND, VerbsOptions::ON_DEMAND)
        .expect("the device supports on-demand paging");
    assert_eq!(calls().len(), 1);
}

/// VRB-07
#[test]
fn long_region_is_split_and_rolled_back_as_a_whole() {
    let functions = functions();
    let page = rustix::param::page_size() as u64;
    let (start, len) = (page + page / 2, 7 * page);
    with(|script| script.max_mr_size = 3 * page);
    let domain = open(&Verbs::builder().functions(functions).build().expect("start"));
    assert_eq!(
        domain.provider_attr().max_mr_size,
        3 * page * 1000,
        "the size of one registration, times their number"
    );
    calls();
    let region = domain.register(memory(start, len), Access::REMOTE_READ).expect("register");
    let half = page / 2;
    let parts = [(start, 5 * half), (4 * page, 3 * page), (7 * page, 3 * half)];
    assert_eq!(calls(), parts.map(|(start, len)| format!("reg_mr {start:#x}+{len:#x} 0x4")));
    let key = region.key().expect("key");
    let pieces: Vec<_> = key.pieces().map(|piece| (piece.base.0, piece.len)).collect();
    assert_eq!(pieces, parts);
    assert_eq!(RemoteKey::from_bytes(&key.to_bytes()).expect("on the wire"), key);
    assert_eq!(key.as_u64().expect_err("three keys").kind(), ErrorKind::Unsupported);
    let mut small = [0; 24];
    let error = region.raw_attr(&mut small).expect_err("three pieces do not fit");
    assert_eq!(error.context_value("needed"), Some("64"));
    with(|script| script.dereg = 16);
    let refused = region.close().expect_err("the driver says Busy");
    assert_eq!(refused.error.kind(), ErrorKind::Busy);
    assert_eq!(domain.live().regions, 1);
    refused.value.close().map_err(|rejected| rejected.error).expect("the second time it works");
    assert_eq!(domain.live().page_registrations, 0);

    calls();
    with(|script| script.register = vec![0, 0, 12]);
    register(&domain, &[host(start, len)], Access::SEND, VerbsOptions::empty())
        .expect_err("no room for the third");
    assert_eq!(calls()[3..], ["dereg_mr", "dereg_mr"]);
    assert_eq!(domain.live().regions, 0);
}

/// VRB-07: each part of a split registration starts where the part before it ends, in the dma-buf
/// and in peer memory as well.
#[test]
fn parts_of_imported_memory_keep_their_offsets() {
    let functions = functions();
    let page = rustix::param::page_size() as u64;
    let half = page / 2;
    with(|script| (script.dma_buf, script.max_mr_size) = (0, 3 * page));
    let domain = open(&Verbs::builder().functions(functions).build().expect("start"));
    let fd = rustix::fs::memfd_create("hmem", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    let (fd, offset) = (fd.as_fd(), DmaBufOffset(0x20 * page + half));
    let address = Address(0x9_0000 * page + half);
    let iface: Arc<dyn Iface> = Arc::new(hmem_iface_system::System::new());
    // Each part's distance from the start of the memory, its length, and its address in the region.
    let parts =
        [(0, 5 * half, 3 * half), (5 * half, 3 * page, 4 * page), (11 * half, 3 * half, 7 * page)];
    for (backing, call, start) in [
        (
            Backing::DmaBuf { fd, offset, mapping: DmaBufMapping::Default, revocation: None },
            "reg_dmabuf_mr",
            offset.0,
        ),
        (Backing::PeerMemory { iface: &iface, address }, "reg_mr_iova2", address.0),
    ] {
        calls();
        let piece = Piece { range: range(page + half, 7 * page), backing };
        register(&domain, &[piece], Access::RECV, VerbsOptions::empty()).expect("register");
        let expected = parts.map(|(from, len, iova)| {
            format!("{call} {:#x}+{len:#x} at {iova:#x} 0x1", start + from)
        });
        assert_eq!(calls(), expected);
    }
}

#[test]
fn dma_buf_support_is_probed_and_read_only_fds_are_refused() {
    assert!(!domain().provider_attr().imports.dma_buf, "EOPNOTSUPP to fd -1");
    let functions = functions();
    with(|script| script.dma_buf = 0);
    let domain = open(&Verbs::builder().functions(functions).build().expect("start"));
    assert!(domain.provider_attr().imports.dma_buf, "EBADF to fd -1");
    assert!(domain.provider_attr().flags.contains(MrFlags::MR_DMABUF));
    let path = std::env::temp_dir().join(format!("hmem-verbs-fd-{}", std::process::id()));
    std::fs::write(&path, [0; 16]).expect("write");
    let read_only = OwnedFd::from(std::fs::File::open(&path).expect("open"));
    let writable =
        OwnedFd::from(std::fs::File::options().read(true).write(true).open(&path).expect("open"));
    std::fs::remove_file(&path).expect("remove");
    let piece = |fd| Piece {
        range: range(0x5000, 4096),
        backing: Backing::DmaBuf {
            fd,
            offset: DmaBufOffset(0x2000),
            mapping: DmaBufMapping::Default,
            revocation: None,
        },
    };
    calls();
    let none = VerbsOptions::empty();
    let error = register(&domain, &[piece(read_only.as_fd())], Access::REMOTE_WRITE, none)
        .expect_err("read-only");
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert!(calls().is_empty(), "the driver was called");
    register(&domain, &[piece(read_only.as_fd())], Access::REMOTE_READ, none)
        .expect("reading is granted");
    register(&domain, &[piece(writable.as_fd())], Access::RECV, none).expect("writing is granted");
    assert_eq!(
        calls(),
        ["reg_dmabuf_mr 0x2000+0x1000 at 0x5000 0x4", "reg_dmabuf_mr 0x2000+0x1000 at 0x5000 0x1"]
    );
    for (errno, kind) in [(22, ErrorKind::InvalidArgument), (524, ErrorKind::Unsupported)] {
        with(|script| script.dma_buf = errno);
        let error =
            register(&domain, &[piece(writable.as_fd())], Access::SEND, none).expect_err("refused");
        assert_eq!(error.kind(), kind, "{error}");
    }
}

/// VRB-04
#[test]
fn application_protection_domain_is_used_and_not_freed() {
    let functions = functions();
    let pd = fake::foreign_pd();
    let null = std::ptr::null_mut();
    // SAFETY: the pointer is null, which the call refuses.
    let error = unsafe { Verbs::builder().functions(functions.clone()).with_pd(null, ()) }
        .expect_err("null");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    // SAFETY: the fake's protection domain is never freed.
    let verbs = unsafe { Verbs::builder().functions(functions).with_pd(pd, ()) }.expect("start");
    calls();
    let domain = open(&verbs);
    assert_eq!(VerbsDomain::of(&domain).expect("verbs").pd(), pd);
    let region = domain.register(memory(0x1000, 64), Access::SEND).expect("register");
    region.close().map_err(|rejected| rejected.error).expect("close");
    domain.close().map_err(|rejected| rejected.error).expect("close");
    drop(verbs);
    let asked = ["reg_mr 0x1000+0x40 0x0", "dereg_mr"];
    assert_eq!(calls(), asked, "nothing else was opened or freed");
}

/// Owner of the fake's protection domain. Dropping the value records the driver calls that were
/// made before.
struct Owner(Arc<Mutex<Option<Vec<String>>>>);

impl Drop for Owner {
    fn drop(&mut self) {
        *self.0.lock().expect("lock") = Some(calls());
    }
}

/// Returns a provider in the protection domain of an [`Owner`], and the place in which the owner's
/// drop records the calls.
fn in_owned_pd() -> (Verbs, Arc<Mutex<Option<Vec<String>>>>) {
    let noted = Arc::default();
    let owner = Owner(Arc::clone(&noted));
    let builder = Verbs::builder().functions(functions());
    // SAFETY: the fake's protection domain is never freed.
    (unsafe { builder.with_pd(fake::foreign_pd(), owner) }.expect("start"), noted)
}

/// VRB-04, MR-18
#[test]
fn owner_of_a_protection_domain_is_dropped_after_all_that_was_opened_in_it() {
    let (verbs, noted) = in_owned_pd();
    let domain = open(&verbs);
    let region = domain.register(memory(0x1000, 64), Access::SEND).expect("register");
    calls();
    drop((verbs, domain));
    assert!(noted.lock().expect("lock").is_none(), "the region keeps the owner");
    drop(region);
    assert_eq!(noted.lock().expect("lock").take(), Some(vec!["dereg_mr".to_owned()]));
}

/// CACHE-13
///
/// Dropping the owner may deallocate the protection domain, which the parent process still uses.
#[test]
fn forked_child_never_drops_the_owner_of_a_protection_domain() {
    let (verbs, noted) = in_owned_pd();
    // SAFETY: the child only makes the calls under test and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: `verbs` is valid. The child exits without using or dropping the original, so the
        // value is dropped once.
        drop(unsafe { std::ptr::read(&raw const verbs) });
        let kept = noted.try_lock().is_ok_and(|noted| noted.is_none());
        // SAFETY: `_exit` has no precondition. It ends the child.
        unsafe { libc::_exit(i32::from(!kept)) };
    }
    let mut status = 0;
    // SAFETY: the child was just forked by this test.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    drop(verbs);
    assert!(noted.lock().expect("lock").is_some(), "the parent drops the owner");
}

fn not_requested() -> ForkSupport {
    let why = "not requested: Builder::fork_safety(ForkSafety::Auto) calls ibv_fork_init";
    ForkSupport::Off(why.to_owned())
}

/// MON-06
///
/// `ibv_fork_init` changes the whole process, so its caller is the owner of the protection domain.
#[test]
fn fork_init_is_not_called_for_an_application_protection_domain_by_default() {
    for (safety, support, asked) in
        [(None, not_requested(), false), (Some(ForkSafety::Auto), ForkSupport::Initialized, true)]
    {
        let functions = functions();
        with(|script| script.fork = 0);
        let mut builder = Verbs::builder().functions(functions);
        if let Some(safety) = safety {
            builder = builder.fork_safety(safety);
        }
        // SAFETY: the fake's protection domain is never freed.
        let verbs = unsafe { builder.with_pd(fake::foreign_pd(), ()) }.expect("start");
        assert_eq!(*verbs.fork_support(), support);
        assert_eq!(calls().contains(&"fork_init".to_owned()), asked);
    }
}

#[test]
fn fork_init_is_called_unless_the_kernel_copies_pages() {
    for (status, safety, support, asked) in [
        (2, ForkSafety::Auto, ForkSupport::KernelCopies, false),
        (1, ForkSafety::Auto, ForkSupport::Initialized, false),
        (0, ForkSafety::Auto, ForkSupport::Initialized, true),
        (0, ForkSafety::Off, not_requested(), false),
    ] {
        let functions = functions();
        with(|script| script.fork = status);
        let verbs =
            Verbs::builder().functions(functions).fork_safety(safety).build().expect("start");
        assert_eq!(*verbs.fork_support(), support);
        assert_eq!(calls().contains(&"fork_init".to_owned()), asked);
    }
}

/// CACHE-13
#[test]
fn forked_child_drops_a_domain_without_driver_calls() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    let request = DomainRequest {
        nic: None,
        mode: verbs.nics().expect("a device")[0].required_mr_mode,
        auth_key: AuthKey::default(),
        hmem: false,
        registry: Arc::default(),
        staging: StagingAttr::default(),
    };
    let domain = verbs.open_domain(&request).expect("open");
    let (auth_key, ranges) = (AuthKey::default(), [range(0x1000, 64)]);
    let request = Registration::new(&ranges, Access::SEND, &auth_key);
    let register = || {
        // SAFETY: the fake library accesses no memory.
        unsafe { domain.register(&request, &[host(0x1000, 64)]) }
    };
    let region = register().expect("register");
    calls();
    // SAFETY: the child only makes the calls under test and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let alone = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let refused = [register().map(drop), domain.deregister(region)];
            // SAFETY: this is a copy of the parent's object. The child exits without using the
            // object again.
            drop(unsafe { std::ptr::read(&raw const domain) });
            refused
                .into_iter()
                .all(|result| result.is_err_and(|error| error.kind() == ErrorKind::BadState))
                && calls().is_empty()
        }));
        // SAFETY: `_exit` has no precondition. It ends the child.
        unsafe { libc::_exit(i32::from(!alone.unwrap_or(false))) };
    }
    let mut status = 0;
    // SAFETY: the child was just forked by this test.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    domain.deregister(region).expect("the region belongs to this process");
    drop(domain);
    assert_eq!(calls(), ["dereg_mr", "dealloc_pd"]);
}

/// CACHE-13
#[test]
fn forked_child_makes_no_driver_call_for_its_parents_objects() {
    let domain = domain();
    let reg = || domain.register(memory(0x1000, 64), Access::SEND).map_err(Error::from);
    let (dropped, closed) = (reg().expect("register"), reg().expect("register"));
    calls();
    // SAFETY: the child only makes the calls under test and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let alone = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let refused = reg().is_err_and(|error| error.kind() == ErrorKind::BadState);
            // SAFETY: these are copies of the parent's objects. The child exits without using the
            // objects again.
            unsafe {
                drop(std::ptr::read(&raw const dropped));
                let closes = std::ptr::read(&raw const closed).close().is_ok();
                drop(std::ptr::read(&raw const domain));
                refused && closes && calls().is_empty()
            }
        }));
        // SAFETY: `_exit` has no precondition. It ends the child.
        unsafe { libc::_exit(i32::from(!alone.unwrap_or(false))) };
    }
    let mut status = 0;
    // SAFETY: the child was just forked by this test.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    drop((dropped, closed, domain));
    assert_eq!(calls(), ["dereg_mr", "dereg_mr", "dealloc_pd", "close_device"]);
}

#[test]
fn closed_domain_leaves_nothing_behind() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    let domain = open(&verbs);
    register(&domain, &[host(0x1000, 64)], Access::SEND, VerbsOptions::empty()).expect("register");
    calls();
    drop(domain);
    drop(verbs);
    assert_eq!(calls(), ["dereg_mr", "dealloc_pd", "close_device"]);
}
