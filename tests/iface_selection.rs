//! Tests of the selection of ifaces, by the builder and by the variable `FI_HMEM`, and of the
//! reasons for absent ifaces.

use std::{env, sync::Arc};

use hmem::{
    ErrorKind, Hmem, Iface, IfaceKind,
    system::{SIMULATED, Simulated},
};

mod child;

fn device() -> Arc<dyn Iface> {
    Arc::new(Simulated::builder().build().expect("a simulated device"))
}

/// HM-04
#[test]
fn absent_vendors_give_a_reason_and_other_ifaces_work() {
    let hmem = Hmem::builder().shared_iface(device()).build().expect("start");
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
    hmem.iface(SIMULATED).expect("the others go on");
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
    const NAME: &str = "variable_may_name_an_iface_that_was_compiled_out";
    // If the iface is compiled in, it is absent all the same: its library does not exist.
    let variables = [("FI_HMEM", "cuda;simulated"), ("HMEM_CUDA_LIBRARY", "/nonexistent.so")];
    if !child::alone(NAME, &variables) {
        return;
    }
    let build = || Hmem::builder().shared_iface(device());
    let hmem = build().build().expect("the others go on");
    hmem.iface(SIMULATED).expect("named, and there");
    let missing: Vec<_> = hmem.missing_ifaces().map(|(kind, why)| (kind, why.kind())).collect();
    let compiled = cfg!(feature = "cuda");
    let kind = if compiled { ErrorKind::Unavailable } else { ErrorKind::Unsupported };
    assert_eq!(missing, [(IfaceKind::CUDA, kind)]);
    assert!(hmem.names_iface(SIMULATED) && hmem.names_iface(IfaceKind::CUDA));
    assert!(!hmem.names_iface(IfaceKind::ROCR));
    let error = hmem.iface(IfaceKind::CUDA).unwrap_err();
    assert_eq!(error.to_string().contains("cargo feature `cuda`"), !compiled, "{error}");
    // Without the environment there is no filter, and the variable of the library is not read.
    let hmem = build().without_environment().build().expect("built");
    assert_eq!(hmem.missing_ifaces().count(), 0);
    assert!(!hmem.names_iface(SIMULATED));
    let why = hmem.registry().absent().find(|(kind, _)| *kind == IfaceKind::CUDA);
    assert!(why.is_none_or(|(_, why)| !why.to_string().contains("nonexistent")), "{why:?}");
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
        Hmem::builder().shared_iface(device()).iface(simulated).ifaces(names).build()
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
        SIMULATED,
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
    const NAME: &str = "the_builder_overrides_the_filter_of_the_environment";
    for value in ["system", "nonesuch"] {
        if !child::alone(NAME, &[("FI_HMEM", value)]) {
            continue;
        }
        let build = || Hmem::builder().shared_iface(device());
        let count = |hmem: &Hmem| hmem.registry().iter().count();
        if env::var("FI_HMEM").as_deref() == Ok("nonesuch") {
            assert_eq!(build().build().unwrap_err().kind(), ErrorKind::InvalidArgument);
        } else {
            assert_eq!(count(&build().build().unwrap()), 1, "host memory alone");
        }
        let both = build().ifaces("system;simulated").build().unwrap();
        return assert_eq!(count(&both), 2, "the builder wins");
    }
}
