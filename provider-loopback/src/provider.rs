//! The fabric as a provider.

use std::sync::Arc;

use hmem_core::{
    Error, ErrorKind, Result,
    provider::{DomainRequest, Provider, ProviderAttr, ProviderDomain},
};

use super::{Builder, Call, config::Config, domain::Domain, nic::Fabric};

/// A fabric of software NICs. Endpoints of all its domains find one another by name.
#[derive(Clone, Debug)]
pub struct Loopback {
    fabric: Arc<Fabric>,
}

impl Loopback {
    /// Starts building a fabric.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(super) fn new(names: &[String], config: &Config) -> Result<Self> {
        Ok(Self { fabric: Arc::new(Fabric::new(names, config)?) })
    }
}

impl Provider for Loopback {
    fn name(&self) -> &str {
        "loopback"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(self.fabric.nics.iter().map(|nic| nic.attr.clone()).collect())
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        self.fabric.process.check("open domain")?;
        let nics = &self.fabric.nics;
        let nic = match &request.nic {
            None => nics.first(),
            Some(name) => nics.iter().find(|nic| nic.attr.nic.name == *name),
        };
        let nic = nic.ok_or_else(|| {
            let names: Vec<_> = nics.iter().map(|nic| nic.attr.nic.name.as_str()).collect();
            Error::new(ErrorKind::InvalidArgument, "open domain")
                .provider("loopback")
                .context("nic", request.nic.as_deref().unwrap_or_default())
                .context("nics", names.join(", "))
                .remedy("name a NIC of this fabric")
        })?;
        nic.config.faults.enter(Call::OpenDomain)?;
        let domain: Arc<dyn ProviderDomain> = Domain::open(&self.fabric, nic, request)?;
        Ok(domain)
    }
}
