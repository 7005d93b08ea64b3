//! Tests of the negotiation of mr_mode bits.

use hmem::{DomainAttr, ErrorKind, Hmem, MrMode, loopback::Loopback};

/// All mr_mode bits but BASIC and SCALABLE, which cannot be combined with others.
const EVERY_BIT: MrMode = MrMode::all().difference(MrMode::BASIC.union(MrMode::SCALABLE));

/// MODE-01
///
/// An offer that lacks a needed bit, or that has an unknown bit, is refused.
#[test]
fn mode_in_force_has_the_needed_bits_and_no_others() {
    let hardware = MrMode::LOCAL | MrMode::ALLOCATED | MrMode::HMEM | MrMode::BASIC_MEANS;
    for needed in EVERY_BIT.iter().chain([MrMode::empty(), MrMode::BASIC_MEANS, hardware]) {
        let provider = Loopback::builder().needs(needed).build().expect("build");
        let hmem =
            Hmem::builder().without_vendor_ifaces().provider(provider).build().expect("start");
        let open = |mr_mode| {
            let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
            hmem.domain("loopback", attr).map(|domain| domain.mr_mode())
        };
        assert_eq!(open(EVERY_BIT).expect("open"), needed);
        for bit in needed.iter() {
            let error = open(EVERY_BIT - bit).expect_err("a needed bit was not offered");
            assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::ModeMismatch, 61));
            assert_eq!(error.context_value("bits"), Some(bit.to_string().as_str()), "{error}");
        }
        let unknown = open(EVERY_BIT | MrMode::from_bits_retain(1 << 30));
        assert_eq!(unknown.expect_err("an unknown bit").kind(), ErrorKind::ModeMismatch);
    }
}

/// MODE-13
#[test]
fn basic_combines_only_with_a_needed_local_and_scalable_with_no_bit() {
    let hmem = |needs: MrMode, can: MrMode| {
        let provider = Loopback::builder().needs(needs).can(can).build().expect("build");
        Hmem::builder().without_vendor_ifaces().provider(provider).build().expect("start")
    };
    let open = |hmem: &Hmem, mr_mode: MrMode| {
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        hmem.domain("loopback", attr).map(|domain| domain.mr_mode()).map_err(|error| error.kind())
    };
    let free = hmem(MrMode::empty(), MrMode::BASIC_MEANS);
    assert_eq!(
        open(&free, MrMode::BASIC),
        Ok(MrMode::BASIC),
        "BASIC is forced on a provider that needs nothing"
    );
    assert_eq!(open(&free, MrMode::SCALABLE), Ok(MrMode::SCALABLE));
    for bit in MrMode::all().iter() {
        for alone in [MrMode::BASIC, MrMode::SCALABLE] {
            if bit != alone {
                assert_eq!(
                    open(&free, alone | bit),
                    Err(ErrorKind::ModeMismatch),
                    "{alone} with {bit}"
                );
            }
        }
    }
    let needy = hmem(MrMode::VIRT_ADDR | MrMode::PROV_KEY, MrMode::BASIC_MEANS);
    assert_eq!(open(&needy, MrMode::BASIC), Ok(MrMode::BASIC));
    assert_eq!(
        open(&needy, MrMode::SCALABLE),
        Err(ErrorKind::ModeMismatch),
        "SCALABLE offers nothing"
    );
    let local = hmem(MrMode::LOCAL, MrMode::BASIC_MEANS);
    assert_eq!(open(&local, MrMode::BASIC), Err(ErrorKind::ModeMismatch));
    let basic = MrMode::BASIC | MrMode::LOCAL;
    assert_eq!(open(&local, basic), Ok(basic), "LOCAL is required, and combines with BASIC");
    for bit in MrMode::all().difference(basic).iter() {
        assert_eq!(open(&local, basic | bit), Err(ErrorKind::ModeMismatch), "{basic} with {bit}");
    }
    assert_eq!(open(&local, MrMode::SCALABLE | MrMode::LOCAL), Err(ErrorKind::ModeMismatch));
    assert_eq!(
        open(&hmem(MrMode::empty(), MrMode::VIRT_ADDR), MrMode::BASIC),
        Err(ErrorKind::ModeMismatch)
    );
    assert_eq!(MrMode::BASIC.effective(), MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY);
    assert_eq!(MrMode::SCALABLE.effective(), MrMode::empty());
}
