//! Tests of plug-ins that an application adds by the builder: the reasons for absent ones, and
//! their names in error messages and explanations.

use hmem::{
    DomainAttr, Error, ErrorKind, Hmem, IfaceKind, Result,
    loopback::Loopback,
    p2p::path::ExplainRequest,
    system::{Simulated, SimulatedBuilder},
};

const MINE: IfaceKind = IfaceKind(0x5155);

fn mine() -> SimulatedBuilder {
    Simulated::builder().kind(MINE).name("mine")
}

fn without_library<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unavailable, "load library")
        .context("library", "libmine.so")
        .remedy("install the driver"))
}

fn absent() -> hmem::Builder {
    Hmem::builder().without_vendor_ifaces().iface_or_absent(
        MINE,
        "mine",
        without_library::<Simulated>(),
    )
}

/// HM-04
#[test]
fn absent_plug_in_is_listed_with_its_reason() {
    let hmem = absent().build().unwrap();
    let error = hmem.iface(MINE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.remedy_text(), Some("install the driver"));
    let text = format!("{error:#}");
    assert!(text.contains("iface=mine") && text.contains("libmine.so"), "{text}");
    assert!(hmem.registry().absent().any(|(kind, _)| kind == MINE));
    assert_eq!(hmem.missing_ifaces().count(), 0, "nothing named it");
}

/// HM-04
#[test]
fn named_absent_plug_in_is_missing() {
    let hmem = absent().ifaces("mine").build().unwrap();
    let missing: Vec<_> = hmem.missing_ifaces().collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert_eq!((missing[0].0, missing[0].1.kind()), (MINE, ErrorKind::Unavailable));

    let hmem = absent().ifaces("system").build().unwrap();
    assert_eq!(hmem.missing_ifaces().count(), 0);
    let error = hmem.iface(MINE).unwrap_err();
    assert!(format!("{error:#}").contains("Builder::ifaces"), "{error}");

    let error = absent().ifaces("mien").build().unwrap_err();
    assert!(error.remedy_text().unwrap().contains("mine"), "{error}");
}

#[test]
fn opened_plug_in_is_added() {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface_or_absent(MINE, "mine", mine().build())
        .provider_or_absent("loopback", Loopback::builder().build())
        .build()
        .unwrap();
    assert_eq!(hmem.iface(MINE).unwrap().name(), "mine");
    hmem.domain("loopback", DomainAttr::default()).unwrap();
}

/// HM-04
#[test]
fn absent_provider_is_listed_with_its_reason() {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider_or_absent("my-nic", without_library::<Loopback>())
        .build()
        .unwrap();
    let error = hmem.domain("my-nic", DomainAttr::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.remedy_text(), Some("install the driver"));
    assert_eq!(hmem.absent_providers().map(|(name, _)| name).collect::<Vec<_>>(), ["my-nic"]);
}

#[test]
fn bad_value_that_a_plug_in_reads_fails_the_build() {
    fn refused<T>() -> Result<T> {
        Err(Error::new(ErrorKind::InvalidArgument, "parse depth")
            .context("variable", "MINE_DEPTH")
            .context("value", "many")
            .remedy("use a number"))
    }
    let builder = || Hmem::builder().without_vendor_ifaces();
    let iface = || builder().iface_or_absent(MINE, "mine", refused::<Simulated>());
    let nic = builder().provider_or_absent("my-nic", refused::<Loopback>());
    for built in [iface().build(), iface().ifaces("mine").build(), nic.build()] {
        let error = built.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("variable"), Some("MINE_DEPTH"));
    }
    iface().ifaces("system").build().expect("the filter excludes the plug-in");

    // Without the name of a variable, the plug-in counts as absent.
    let unnamed = Err::<Simulated, _>(Error::new(ErrorKind::InvalidArgument, "start driver"));
    let hmem = builder().iface_or_absent(MINE, "mine", unnamed).build().unwrap();
    assert_eq!(hmem.iface(MINE).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// HM-04
///
/// The number and the name of a plug-in are checked in the same way if it is opened and if it is
/// absent.
#[test]
fn number_or_name_of_another_iface_is_refused() {
    let added = |plug_ins: &[(IfaceKind, &str, bool)]| {
        let builder = Hmem::builder().without_vendor_ifaces();
        let add = |builder: hmem::Builder, &(kind, name, opened): &(IfaceKind, &str, bool)| {
            let simulated = Simulated::builder().kind(kind).name(name).build();
            let iface = if opened { simulated } else { without_library() };
            builder.iface_or_absent(kind, name, iface)
        };
        plug_ins.iter().fold(builder, add).build()
    };
    const OTHER: IfaceKind = IfaceKind(0x5156);
    for absent in [[false, false], [false, true], [true, false], [true, true]] {
        let [first, second] = absent.map(|absent| !absent);
        for (plug_ins, remedy) in [
            (&[(MINE, "mine", first), (MINE, "other", second)][..], "a number of its own"),
            (&[(MINE, "mine", first), (OTHER, "Mine", second)], "a name of its own"),
            (&[(MINE, "cuda", first)], "a name of its own"),
            (&[(IfaceKind::SYSTEM, "mine", false)], "a number of its own"),
            (&[(IfaceKind(6), "mine", false)], "from 0x100 up"),
        ] {
            let error = added(plug_ins).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{plug_ins:?}");
            let text = format!("{error:#}");
            assert!(text.contains(remedy) && text.contains("number=0x"), "{text}");
        }
        added(&[(MINE, "mine", first), (OTHER, "other", second)]).expect("two ifaces");
    }
}

/// HM-04
///
/// The given number and name are used only if the plug-in is absent. A wrong one would otherwise
/// show up only on a machine without the library.
#[test]
fn opened_plug_in_with_another_number_or_name_is_refused() {
    let builder = || Hmem::builder().without_vendor_ifaces();
    for (kind, name) in [(MINE, "nime"), (IfaceKind(0x5157), "mine")] {
        let error = builder().iface_or_absent(kind, name, mine().build()).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.context_value("given").is_some_and(|given| given.starts_with(name)));
        assert!(format!("{error:#}").contains("iface=mine"), "{error}");
    }
    let error =
        builder().provider_or_absent("my-nic", Loopback::builder().build()).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.provider_name(), Some("loopback"));
}

/// HM-04
///
/// A plug-in may have the number of a vendor iface that does not start. The registry then lists the
/// number once, with the reason of the plug-in.
#[test]
fn absent_plug_in_replaces_an_absent_vendor_iface() {
    let cuda = IfaceKind::CUDA;
    let absent = Hmem::builder()
        .without_vendor_ifaces()
        .iface_or_absent(cuda, "cuda", without_library::<Simulated>())
        .build()
        .unwrap();
    assert_eq!(absent.registry().absent().filter(|(kind, _)| *kind == cuda).count(), 1);
    assert_eq!(absent.iface(cuda).unwrap_err().remedy_text(), Some("install the driver"));
}

/// HM-04
#[test]
fn provider_name_that_was_added_twice_is_refused() {
    let loopback = || Loopback::builder().build();
    let builder = || Hmem::builder().without_vendor_ifaces();
    let gone = |builder: hmem::Builder| {
        builder.provider_or_absent("loopback", without_library::<Loopback>())
    };
    for builder in [gone(gone(builder())), gone(builder()).provider(loopback().unwrap())] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(format!("{error:#}").contains("loopback"), "{error}");
    }
}

/// P2P-03
#[test]
fn explanation_names_a_plug_in() {
    let nic =
        Loopback::builder().imports(hmem::provider::Imports { staged: true, ..Default::default() });
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(mine().build().unwrap())
        .provider(nic.build().unwrap())
        .build()
        .unwrap();
    let explained = hmem.explain("loopback", &ExplainRequest::new(MINE)).unwrap();
    assert_eq!(&*explained.iface_name, "mine");
    let text = explained.to_string();
    assert!(text.contains("of mine") && !text.contains("iface-0x"), "{text}");
}
