//! Devices that cannot be opened, and ports that cannot be used.

mod fake;
mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{ptr, sync::Arc};

use fake::{calls, functions, with};
use hmem_core::{
    Access, Address, AddressRange, Domain, DomainAttr, ErrorKind, Promise, Raw, Registry, Request,
    provider::{EndpointAttr, Provider},
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{
    OptionResult, Settings, Verbs, VerbsDomain, VerbsOptions, sys::Functions,
};
use support::{device, open};
use trials::{Outcome, Skipped, trials};

trials! {
    inaccessible_device_is_left_out_with_the_reason,
    missing_port_or_gid_is_named,
    missing_device_error_lists_the_present_devices,
    /// VRB-06
    installed_library_has_every_symbol_version,
    /// VRB-02
    hugetlb_option_reaches_the_driver,
}

fn inaccessible_device_is_left_out_with_the_reason() -> Outcome {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    with(|script| (script.devices, script.closed) = (Some(3), Some((1, 13))));
    let nics: Vec<_> =
        verbs.nics().expect("two devices remain").into_iter().map(|attr| attr.nic.name).collect();
    assert_eq!(nics, ["fake0", "fake2"]);
    let left_out = verbs.left_out().expect("devices are there");
    let [(name, error)] = &left_out[..] else { panic!("{left_out:?}") };
    assert_eq!((name.as_str(), error.kind()), ("fake1", ErrorKind::AccessDenied));
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(13));
    assert!(
        error.remedy_text().is_some_and(|remedy| remedy.contains("/dev/infiniband")),
        "{error}"
    );

    // With only one device, the call fails with that device's permission error.
    with(|script| (script.devices, script.closed) = (Some(1), Some((0, 13))));
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    with(|script| script.closed = Some((0, 13)));
    let error = verbs.nics().expect_err("no other device");
    assert_eq!(
        (error.kind(), error.operation()),
        (ErrorKind::AccessDenied, "ibv_open_device"),
        "{error}"
    );
    Ok(())
}

fn missing_port_or_gid_is_named() -> Outcome {
    let name = device()?;
    for (builder, words) in [
        (Verbs::builder().port(9), &["ibv_query_port", "port=9"][..]),
        (Verbs::builder().gid_index(200), &["ibv_query_gid", "index=200", "address"]),
    ] {
        let verbs = builder.build().expect("load libibverbs");
        let domain = open(&verbs, &name);
        let queue = domain.open_cq(4).expect("open a completion queue");
        let error = domain.open_endpoint(&EndpointAttr::new(&queue)).expect_err("no such port");
        let line = format!("{error:#}");
        for word in words {
            assert!(line.contains(word), "{word} is not in: {line}");
        }
        assert!(error.remedy_text().is_some(), "{line}");
        assert_eq!(domain.live().endpoints, 0);
    }
    Ok(())
}

fn missing_device_error_lists_the_present_devices() -> Outcome {
    let name = device()?;
    let verbs = Verbs::open().expect("load libibverbs");
    let attr = DomainAttr { nic: Some("nonsense".into()), ..DomainAttr::default() };
    let error =
        Domain::open(&verbs, Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()), attr)
            .expect_err("no such device");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("nic"), Some("nonsense"));
    assert!(
        error.context_value("nics").is_some_and(|nics| nics.split(',').any(|nic| nic == name)),
        "{error}"
    );
    Ok(())
}

/// VRB-06
fn installed_library_has_every_symbol_version() -> Outcome {
    match Functions::find() {
        Ok(_) => Ok(()),
        Err(error) if error.context_value("symbol").is_none() => Err(Skipped(error.to_string())),
        Err(error) => panic!("{error}"),
    }
}

/// VRB-02
fn hugetlb_option_reaches_the_driver() -> Outcome {
    const LEN: usize = 2 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: without a fixed address the kernel maps unused addresses.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), LEN, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error();
        return Err(Skipped(format!("huge pages cannot be mapped here: {error}")));
    }
    let start = Address(mapped.expose_provenance() as u64);
    let functions = functions();
    with(|script| script.on_demand = true);
    let verbs = Verbs::builder().functions(functions).build().expect("start");
    let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    let domain = Domain::open(&verbs, registry, paths, DomainAttr::default()).expect("open");
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let register = |options: VerbsOptions| {
        let range = AddressRange::new(start, LEN as u64).expect("range");
        // SAFETY: the fake library accesses no memory.
        let memory = unsafe { Raw::new(range, Promise::ReadOnly) };
        let settings = Settings { options, iova: None };
        calls();
        let region = domain.submit(Request::new(memory, Access::SEND).extension(settings));
        let region = region.expect("register");
        let bits = options.bits();
        assert_eq!(calls(), [format!("reg_mr {:#x}+{LEN:#x} {bits:#x}", start.0)]);
        verbs.options(region.provider_region().expect("handle")).expect("options")
    };
    let (huge, paging) = (VerbsOptions::HUGETLB, VerbsOptions::ON_DEMAND);
    // A driver may ignore the flag without on-demand paging.
    assert_eq!(register(huge), [(huge, OptionResult::RequestedNotConfirmable)]);
    let granted = register(huge | paging);
    assert_eq!(granted, [(paging, OptionResult::Accepted), (huge, OptionResult::Accepted)]);
    // SAFETY: the mapping is this test's own.
    unsafe { libc::munmap(mapped, LEN) };
    Ok(())
}
