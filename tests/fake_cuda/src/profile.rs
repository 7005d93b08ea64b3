//! Releases of the driver, with the properties that matter for registering memory.

use std::ffi::c_int;

/// Properties of a driver release. The fields can be changed one by one.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name of the profile: the release and the kernel module.
    pub name: &'static str,
    /// Result of `cuDriverGetVersion`: 1000 * major + 10 * minor of the CUDA release that came with
    /// the driver (535: 12.2, 550: 12.4, 580: 13.0).
    pub version: c_int,
    /// Number of devices.
    pub devices: u32,
    /// Bytes of memory on each device.
    pub memory: u64,
    /// Value of the device attribute DMA_BUF_SUPPORTED, which is set only with the open kernel
    /// modules.
    pub dma_buf: bool,
    /// True if `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` is known, which `cuda.h` has from 12.8
    /// on.
    pub pcie_flag: bool,
    /// True if the platform supports that mapping. `cuda.h`: "return an error otherwise".
    pub pcie_mapping: bool,
    /// True if one dma-buf may hold several mappings of a reservation, as in `cuda.h`.
    pub spanning_exports: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_SUPPORTED.
    pub rdma: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
    pub rdma_with_vmm: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_WRITES_ORDERING.
    pub writes_ordering: c_int,
    /// Value of the device attribute GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS.
    pub flush_options: c_int,
    /// The highest pointer attribute that the driver knows. It refuses queries for higher ones.
    pub last_pointer_attribute: u32,
    /// The highest device attribute that the driver knows.
    pub last_device_attribute: u32,
    /// True if queries need a current context: INVALID_CONTEXT without one, CONTEXT_IS_DESTROYED
    /// after its end.
    pub queries_need_context: bool,
    /// True if page-locked host memory has no identity. `cuda.h` promises one only for "every
    /// memory allocation", which page-locking is not.
    pub registered_without_identity: bool,
    /// True if a layer in front of the driver implements `cuMemAlloc` by VMM memory. SYNC_MEMOPS is
    /// then refused for it with 801, as authors of such a layer (lupine) and users of UCX over VMM
    /// memory report.
    pub allocates_by_vmm: bool,
    /// True if CONTEXT names a primary context for VMM memory, which no header excludes.
    pub vmm_names_context: bool,
    /// Symbols that the library lacks.
    pub absent: Vec<&'static str>,
    /// True if a copy ends only after a query for it, so that a test sees it in flight.
    pub slow_copies: bool,
}

impl Profile {
    fn release(name: &'static str, version: c_int, open: bool) -> Self {
        Self {
            name,
            version,
            devices: 2,
            memory: 80 << 30,
            dma_buf: open,
            pcie_flag: version >= 12_080,
            pcie_mapping: version >= 12_080,
            spanning_exports: true,
            rdma: true,
            rdma_with_vmm: true,
            // Decided here, for a discrete GPU on PCIe: the owner sees writes in order (100 in
            // `cuda.h`), and the host can flush (bit 1).
            writes_ordering: 100,
            flush_options: 1,
            // Decided here: no header says which release of the driver added which attribute.
            last_pointer_attribute: if version >= 12_090 { 21 } else { 20 },
            last_device_attribute: if version >= 13_000 { 150 } else { 140 },
            queries_need_context: false,
            registered_without_identity: false,
            allocates_by_vmm: false,
            vmm_names_context: false,
            absent: Vec::new(),
            slow_copies: false,
        }
    }

    /// Returns the profiles of the supported releases, each with either kernel module.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let releases = [
            ("535-open", "535-closed", 12_020),
            ("550-open", "550-closed", 12_040),
            ("580-open", "580-closed", 13_000),
        ];
        let both = |(open, closed, version)| {
            [Self::release(open, version, true), Self::release(closed, version, false)]
        };
        releases.into_iter().flat_map(both).collect()
    }

    /// Sets a field by its name in the environment. Returns false if it has no such name.
    pub(crate) fn set(&mut self, name: &str, value: u32) -> bool {
        match name {
            "devices" => self.devices = value,
            "attributes" => self.last_device_attribute = value,
            _ => return false,
        }
        true
    }

    /// Returns the profile with a name, such as `550-open`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}

impl Default for Profile {
    /// The newest release with the open kernel modules.
    fn default() -> Self {
        Self::release("580-open", 13_000, true)
    }
}
