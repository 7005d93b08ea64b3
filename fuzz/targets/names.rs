//! Names of endpoints, as peers send them: of the software NIC and of verbs.

use std::sync::LazyLock;

use hmem::{
    DomainAttr, Endpoint, Hmem, loopback::Loopback, provider::EndpointAttr, transfer::EndpointName,
};

use super::{Verdict, refusal, verbs_peer_name::PeerName};

static ENDPOINT: LazyLock<Endpoint> = LazyLock::new(|| {
    let provider = Loopback::builder().build().expect("the software NIC");
    let hmem = Hmem::builder().without_environment().without_vendor_ifaces().build();
    let domain = hmem.expect("host memory").domain_on(&provider, DomainAttr::default());
    let domain = domain.expect("a domain");
    let queue = domain.open_cq(1).expect("a queue");
    domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint")
});

/// The first byte selects: 0 resolves the rest as the name of a software NIC's endpoint, 1 resolves
/// the rest combined with the name of a live one, and other numbers decode a name of verbs.
pub(super) fn target(data: &[u8]) -> Verdict {
    let (sort, rest) = data.split_first().unwrap_or((&0, &[]));
    match sort {
        0 => ENDPOINT.resolve(&EndpointName(rest.to_vec())).map(drop).map_err(refusal),
        1 => {
            let mut name = ENDPOINT.name();
            name.0.iter_mut().zip(rest).for_each(|(byte, change)| *byte ^= change);
            ENDPOINT.resolve(&name).map(drop).map_err(refusal)
        }
        _ => {
            let name = PeerName::decode(&EndpointName(rest.to_vec())).map_err(refusal)?;
            assert_eq!(PeerName::decode(&name.encode()).ok(), Some(name));
            assert!(name.same_peer(&name));
            Ok(())
        }
    }
}
