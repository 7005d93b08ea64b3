//! A provider that records its registrations and passes them to the software NIC.

use std::{fmt, os::fd::AsRawFd, sync::Arc};

use hmem_core::{
    Result,
    provider::{
        Backing, CompositeKeys, DomainRequest, Enabling, EndpointBinding, Features, LiveObjects,
        ManualProgress, Piece, Provider, ProviderAttr, ProviderDomain, ProviderRegion, RawKeys,
        Refresh, RegionCounters, Registration, StagingAccess, SubRegions, Transport, Windows,
    },
};
use parking_lot::Mutex;

/// The form of one piece of memory in a registration with a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisteredAs {
    /// Addresses of host pages.
    HostPages,
    /// A dma-buf, identified by the number of its file descriptor.
    DmaBuf(i32),
    /// A device address, for peer memory.
    DeviceAddress,
    /// A staged range, which the NIC does not access.
    Copies,
}

impl RegisteredAs {
    fn of(backing: &Backing<'_>) -> Self {
        match backing {
            Backing::Host { .. } => Self::HostPages,
            Backing::DmaBuf { fd, .. } => Self::DmaBuf(fd.as_raw_fd()),
            Backing::PeerMemory { .. } => Self::DeviceAddress,
            Backing::Staged { .. } => Self::Copies,
        }
    }

    /// Returns true for the forms in which a NIC itself accesses device memory: a dma-buf and a
    /// device address.
    pub(crate) fn is_device_handle(self) -> bool {
        matches!(self, Self::DmaBuf(_) | Self::DeviceAddress)
    }
}

/// The pieces that NICs registered, in order, each with the NIC's name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record(Arc<Mutex<Vec<(String, RegisteredAs)>>>);

impl Record {
    pub(crate) fn take(&self) -> Vec<(String, RegisteredAs)> {
        std::mem::take(&mut self.0.lock())
    }

    pub(crate) fn handed(&self) -> Vec<RegisteredAs> {
        self.take().into_iter().map(|(_, handed)| handed).collect()
    }
}

/// A provider that records the registered pieces and forwards all calls to another provider.
#[derive(Debug)]
pub(crate) struct Recording<P> {
    pub(crate) inner: P,
    pub(crate) record: Record,
}

impl<P: Provider> Provider for Recording<P> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.inner.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        let inner = self.inner.open_domain(request)?;
        Ok(Arc::new(RecordingDomain { inner, record: self.record.clone() }))
    }
}

struct RecordingDomain {
    inner: Arc<dyn ProviderDomain>,
    record: Record,
}

impl fmt::Debug for RecordingDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

// SAFETY: every call goes to the domain of another provider, which upholds the contract. The facets
// are those of that domain.
unsafe impl ProviderDomain for RecordingDomain {
    fn attr(&self) -> &ProviderAttr {
        self.inner.attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let nic = self.attr().nic.name.clone();
        let handed = pieces.iter().map(|piece| (nic.clone(), RegisteredAs::of(&piece.backing)));
        self.record.0.lock().extend(handed);
        // SAFETY: the caller upholds the contract of this function, which covers this call.
        unsafe { self.inner.register(request, pieces) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.inner.deregister(region)
    }

    fn transport(&self) -> Option<&dyn Transport> {
        self.inner.transport()
    }

    fn live(&self) -> LiveObjects {
        self.inner.live()
    }

    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        self.inner.sub_regions()
    }

    fn enabling(&self) -> Option<&dyn Enabling> {
        self.inner.enabling()
    }

    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        self.inner.composite_keys()
    }

    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        self.inner.raw_keys()
    }

    fn refresh(&self) -> Option<&dyn Refresh> {
        self.inner.refresh()
    }

    fn windows(&self) -> Option<&dyn Windows> {
        self.inner.windows()
    }

    fn region_counters(&self) -> Option<&dyn RegionCounters> {
        self.inner.region_counters()
    }

    fn endpoint_binding(&self) -> Option<&dyn EndpointBinding> {
        self.inner.endpoint_binding()
    }

    fn staging(&self) -> Option<&dyn StagingAccess> {
        self.inner.staging()
    }

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        self.inner.manual_progress()
    }

    fn remedy_without(&self, missing: Features) -> Option<&'static str> {
        self.inner.remedy_without(missing)
    }
}
