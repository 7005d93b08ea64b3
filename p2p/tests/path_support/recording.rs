//! A provider that keeps a record of what it was given, in front of the software NIC.

use std::{any::Any, fmt, os::fd::AsRawFd, sync::Arc};

use hmem_core::{
    AddressRange, Addressing, Iova, RawKey, RemoteKey, Result,
    counter::Counter,
    provider::{
        Backing, CompletionQueue, DomainRequest, EndpointAttr, Live, Piece, Provider, ProviderAttr,
        ProviderDomain, ProviderEndpoint, ProviderRegion, ProviderWindow, RegistrationRequest,
        WindowBind, WindowType,
    },
};
use parking_lot::Mutex;

/// What a NIC was handed for one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handed {
    /// Addresses of host pages.
    HostPages,
    /// A file descriptor, by its number.
    DmaBuf(i32),
    /// A device address.
    DeviceAddress,
    /// Copies: nothing of the device's.
    Copies,
}

impl Handed {
    fn of(backing: &Backing<'_>) -> Self {
        match backing {
            Backing::Host { .. } => Self::HostPages,
            Backing::DmaBuf { fd, .. } => Self::DmaBuf(fd.as_raw_fd()),
            Backing::PeerMemory { .. } => Self::DeviceAddress,
            Backing::Staged(_) => Self::Copies,
        }
    }

    /// Whether the NIC can get at the device with it.
    pub(crate) fn is_device_handle(self) -> bool {
        matches!(self, Self::DmaBuf(_) | Self::DeviceAddress)
    }
}

/// What was handed to which NIC, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record(Arc<Mutex<Vec<(String, Handed)>>>);

impl Record {
    pub(crate) fn take(&self) -> Vec<(String, Handed)> {
        std::mem::take(&mut self.0.lock())
    }

    pub(crate) fn handed(&self) -> Vec<Handed> {
        self.take().into_iter().map(|(_, handed)| handed).collect()
    }
}

/// The provider.
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

// SAFETY: every call is passed on to the domain of another provider.
unsafe impl ProviderDomain for RecordingDomain {
    fn attr(&self) -> &ProviderAttr {
        self.inner.attr()
    }

    unsafe fn register(
        &self,
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let nic = self.attr().nic.name.clone();
        let handed = pieces.iter().map(|piece| (nic.clone(), Handed::of(&piece.backing)));
        self.record.0.lock().extend(handed);
        // SAFETY: passed on to the caller.
        unsafe { self.inner.register(request, pieces) }
    }

    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &RegistrationRequest<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        self.inner.register_sub(base, request, offset, len)
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.inner.deregister(region)
    }

    fn enable(&self, region: ProviderRegion) -> Result<()> {
        self.inner.enable(region)
    }

    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()> {
        self.inner.bind_counter(region, counter)
    }

    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()> {
        self.inner.bind_endpoint(region, endpoint)
    }

    fn refresh(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()> {
        self.inner.refresh(region, ranges)
    }

    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey> {
        self.inner.raw_key(region)
    }

    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>> {
        self.inner.remote_key(region)
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.inner.map_raw(base, len, addressing, raw)
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.inner.unmap_key(key)
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        self.inner.alloc_window(window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.inner.bind_window(window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.inner.free_window(window)
    }

    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.inner.open_cq(depth)
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.inner.open_endpoint(attr)
    }

    fn progress(&self) -> Result<usize> {
        self.inner.progress()
    }

    fn live(&self) -> Live {
        self.inner.live()
    }

    fn staging_bytes(&self) -> u64 {
        self.inner.staging_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}
