//! The command on a machine with plug-ins, run through the library.

use hmem::{
    Error, ErrorKind, Hmem, IfaceKind,
    loopback::Loopback,
    system::{P2pMatrix, Simulated, SimulatedBuilder},
};
use hmem_cli::{
    Failure,
    args::{Command, ExplainArgs, InfoArgs},
    machine::Machine,
    run_on,
    table::Style,
};

const MINE: IfaceKind = IfaceKind(0xf0_0d00);
const ABSENT: IfaceKind = IfaceKind(0xf0_0d01);

fn mine() -> SimulatedBuilder {
    Simulated::builder().kind(MINE).name("mine")
}

fn unavailable<T>(library: &str) -> hmem::Result<T> {
    Err(Error::new(ErrorKind::Unavailable, "load library").context("library", library))
}

/// DIAG-01 HM-04
#[test]
fn info_and_explain_list_available_and_absent_plug_ins() {
    let builder = Hmem::builder()
        .without_vendor_ifaces()
        .iface_or_absent(MINE, "mine", mine().build())
        .iface_or_absent(ABSENT, "gone", unavailable::<Simulated>("libgone.so"))
        .provider_or_absent("gone-nic", unavailable::<Loopback>("libgone-nic.so"));
    let machine = Machine::find(builder).unwrap();
    let run = |command: &Command| {
        let mut out = Vec::new();
        run_on(&machine, command, Style::plain(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let info = run(&Command::Info(InfoArgs { json: true, nic: None }));
    for expected in ["\"mine\"", "\"gone\"", "libgone.so", "gone-nic", "libgone-nic.so"] {
        assert!(info.contains(expected), "{expected} is not in {info}");
    }
    let of_mine = ExplainArgs { iface: Some("mine".into()), ..ExplainArgs::default() };
    let explained = run(&Command::Explain(of_mine));
    assert!(explained.contains("mine:0 to loopback/hardware"), "{explained}");
    assert!(!explained.contains("iface-0x"), "{explained}");
}

/// DIAG-01 P2P-03
#[test]
fn info_has_the_remedy_of_each_refused_path() {
    let unreachable = mine().p2p(P2pMatrix::none_reachable()).build();
    let builder =
        Hmem::builder().without_vendor_ifaces().iface_or_absent(MINE, "mine", unreachable);
    let machine = Machine::find(builder).unwrap();
    let mut out = Vec::new();
    let info = Command::Info(InfoArgs { json: false, nic: None });
    run_on(&machine, &info, Style::plain(), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let staged = text.split("  staged: ").nth(1).expect(&text);
    let staged = staged.split("\n  staged: ").next().unwrap();
    for path in ["dma-buf", "peer-memory"] {
        assert!(staged.contains(&format!("{path} refused")), "{text}");
        assert!(staged.contains(&format!("to use {path}: ")), "{text}");
    }
}

/// The exit status is 2 for a bad value in a variable that a plug-in reads, and the message names
/// the variable.
#[test]
fn bad_value_that_a_plug_in_reads_is_a_usage_error() {
    fn refused<T>() -> hmem::Result<T> {
        Err(Error::new(ErrorKind::InvalidArgument, "environment")
            .context("variable", "MINE_DEPTH")
            .context("value", "many")
            .remedy("use a number"))
    }
    let builder = || Hmem::builder().without_vendor_ifaces();
    for builder in [
        builder().iface_or_absent(MINE, "mine", refused::<Simulated>()),
        builder().provider_or_absent("my-nic", refused::<Loopback>()),
    ] {
        let failure = Failure::from(Machine::find(builder).unwrap_err());
        assert_eq!(failure.status(), 2);
        let text = failure.to_string();
        assert!(text.contains("invalid value \"many\" in MINE_DEPTH; use a number"), "{text}");
    }
}
