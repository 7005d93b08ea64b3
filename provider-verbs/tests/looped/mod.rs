//! An endpoint that is connected to itself.

use std::ops::Deref;

use hmem_core::{Domain, Endpoint, Rejected, provider::EndpointAttr, transfer::PeerId};

/// An endpoint that is connected to itself.
pub(crate) struct Looped {
    endpoint: Endpoint,
    /// The endpoint as its own peer.
    pub(crate) peer: PeerId,
}

impl Looped {
    pub(crate) fn open(domain: &Domain, attr: &EndpointAttr) -> Self {
        let endpoint = domain.open_endpoint(attr).expect("open an endpoint");
        let peer = endpoint.resolve(&endpoint.name()).expect("connect it to itself");
        Self { endpoint, peer }
    }

    /// Closes the endpoint. A failure returns the endpoint without its peer.
    pub(crate) fn close(self) -> Result<(), Rejected<Endpoint>> {
        self.endpoint.close()
    }
}

impl Deref for Looped {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}
