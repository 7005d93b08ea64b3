//! A machine with a fake CUDA driver, and software NICs of any abilities.

use std::sync::Arc;

use hmem::{
    AllocationKind, DeviceBuffer, DeviceId, DomainAttr, Hmem, Iface,
    cuda::{Cuda, sys::Functions},
    iface::AllocRequest,
    loopback::{Builder, Loopback},
    provider::Imports,
};
use hmem_fake_cuda::{FakeDriver, Profile};

use crate::wire::Wire;

/// Abilities of a NIC that imports dma-bufs, and has neither peer memory nor staged copies.
pub(crate) const DMA_BUF: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: Some(false),
    data_direct: None,
    peer_memory: false,
    staged: false,
};

/// Abilities of a NIC that reaches device memory by staged copies alone.
pub(crate) const STAGED: Imports = Imports { dma_buf: false, staged: true, ..DMA_BUF };

/// Fields are dropped in order, the driver last.
pub(crate) struct Machine {
    hmem: Hmem,
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) functions: Functions,
    pub(crate) driver: FakeDriver,
}

impl Machine {
    pub(crate) fn new(profile: Profile) -> Self {
        let driver = FakeDriver::start(profile);
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
        // forever.
        let functions =
            unsafe { Functions::from_lookup(|name| driver.symbol(name)) }.expect("the table");
        let cuda = Cuda::builder().functions(functions.clone()).open().expect("a GPU");
        let cuda = Arc::new(cuda);
        let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&cuda) as _);
        Self { hmem: hmem.build().expect("the ifaces start"), cuda, functions, driver }
    }

    /// Opens two endpoints of a domain with a NIC of these abilities.
    pub(crate) fn wire(&self, imports: Imports, attr: DomainAttr) -> Wire {
        self.wire_on(Loopback::builder().imports(imports), attr)
    }

    pub(crate) fn wire_on(&self, nic: Builder, attr: DomainAttr) -> Wire {
        let nic = nic.build().expect("a software NIC");
        Wire::open(self.hmem.domain_on(&nic, attr).expect("a domain"))
    }

    /// Allocates memory of the first GPU.
    pub(crate) fn buffer(&self, len: u64) -> DeviceBuffer {
        let iface: Arc<dyn Iface> = Arc::clone(&self.cuda) as _;
        let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&iface, &request).expect("allocate")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.driver.undefined_calls(), 0);
        }
    }
}
