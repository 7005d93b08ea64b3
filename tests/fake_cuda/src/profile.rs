//! Profiles of driver releases: the properties that matter for memory registration.

use std::ffi::c_int;

/// Properties of a driver release. Tests may change single fields.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Release and kernel module, such as `550-open`. `HMEM_FAKE_CUDA` selects the profile by it.
    pub name: &'static str,
    /// Result of `cuDriverGetVersion`: 1000 * major + 10 * minor of the CUDA release that came with
    /// the driver (535: 12.2, 550: 12.4, 580: 13.0).
    pub version: c_int,
    /// Number of GPUs.
    pub devices: u32,
    /// Bytes of memory on each device.
    pub memory: u64,
    /// Value of the device attribute DMA_BUF_SUPPORTED, which is set only with the open kernel
    /// modules.
    pub dma_buf: bool,
    /// True if the driver knows `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`, which `cuda.h`
    /// defines since 12.8.
    pub pcie_flag: bool,
    /// True if the platform supports dma-bufs with the PCIe mapping. Their export fails otherwise.
    pub pcie_mapping: bool,
    /// True if one dma-buf may span several VMM mappings of a reservation, as `cuda.h` allows.
    pub spanning_exports: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_SUPPORTED.
    pub rdma: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
    pub rdma_with_vmm: bool,
    /// Value of the device attribute GPU_DIRECT_RDMA_WRITES_ORDERING.
    pub writes_ordering: c_int,
    /// Value of the device attribute GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS.
    pub flush_options: c_int,
    /// Highest pointer attribute that the driver knows. Queries for higher numbers fail.
    pub last_pointer_attribute: u32,
    /// Highest device attribute that the driver knows. Queries for higher numbers fail.
    pub last_device_attribute: u32,
    /// True if pointer queries need a current context. They fail with INVALID_CONTEXT without one,
    /// and with CONTEXT_IS_DESTROYED if it was destroyed.
    pub queries_need_context: bool,
    /// True if page-locked host memory has no buffer ID. `cuda.h` promises an ID for "every memory
    /// allocation", and page-locking allocates nothing.
    pub registered_without_identity: bool,
    /// True if a layer in front of the driver implements `cuMemAlloc` with VMM memory. Setting
    /// SYNC_MEMOPS on the memory then fails with 801, as authors of such a layer (lupine) and users
    /// of UCX report.
    pub allocates_by_vmm: bool,
    /// True if the pointer attribute CONTEXT returns a primary context for VMM memory. No header
    /// excludes that.
    pub vmm_names_context: bool,
    /// Functions that the library of this release lacks.
    pub absent: Vec<&'static str>,
    /// True if an asynchronous copy ends only after one query for it, so that tests see it in
    /// flight.
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
            // As on a discrete GPU on PCIe: the GPU that owns the memory sees inbound writes in
            // order (100 in `cuda.h`), and the host can flush them (bit 1).
            writes_ordering: 100,
            flush_options: 1,
            // No header says which release of the driver added which attribute, so the fake
            // decides.
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

    /// Returns the profiles of the supported releases: each once with the open kernel modules and
    /// once with the closed ones.
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

    /// Sets a field by the name that the environment variable uses. Returns false if no field has
    /// the name.
    pub(crate) fn set(&mut self, name: &str, value: u32) -> bool {
        match name {
            "devices" => self.devices = value,
            "attributes" => self.last_device_attribute = value,
            _ => return false,
        }
        true
    }

    /// Returns the profile with this name, such as `550-open`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}

impl Default for Profile {
    /// Returns the profile of the newest release with the open kernel modules.
    fn default() -> Self {
        Self::release("580-open", 13_000, true)
    }
}
