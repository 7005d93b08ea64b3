//! What a driver release is like, as far as registering memory can tell.

use std::ffi::c_int;

/// A driver to pretend to be. The fields can be changed one by one.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Its name: release and kernel module.
    pub name: &'static str,
    /// What `cuDriverGetVersion` says: 1000 * major + 10 * minor of the CUDA release that came
    /// with the driver (535: 12.2, 550: 12.4, 580: 13.0).
    pub version: c_int,
    /// How many devices there are.
    pub devices: u32,
    /// Bytes of memory on each.
    pub memory: u64,
    /// DMA_BUF_SUPPORTED: the open kernel modules have dma-bufs, the closed ones do not.
    pub dma_buf: bool,
    /// Whether `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` is known: `cuda.h` has it from 12.8
    /// on.
    pub pcie_flag: bool,
    /// Whether the platform honours it: `cuda.h` has it "return an error otherwise".
    pub pcie_mapping: bool,
    /// Whether one dma-buf may hold several mappings of a reservation, as `cuda.h` has it.
    pub spanning_exports: bool,
    /// GPU_DIRECT_RDMA_SUPPORTED.
    pub rdma: bool,
    /// GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
    pub rdma_with_vmm: bool,
    /// GPU_DIRECT_RDMA_WRITES_ORDERING.
    pub writes_ordering: c_int,
    /// GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS.
    pub flush_options: c_int,
    /// The highest pointer attribute that the driver knows; it refuses a query for any above.
    pub last_pointer_attribute: u32,
    /// The highest device attribute that it knows.
    pub last_device_attribute: u32,
    /// Whether a thread without a current context gets INVALID_CONTEXT for its queries, and one
    /// whose context was destroyed CONTEXT_IS_DESTROYED.
    pub queries_need_context: bool,
    /// Whether page-locked host memory has no identity: `cuda.h` promises one only of "every
    /// memory allocation", which page-locking is not.
    pub registered_without_identity: bool,
    /// Whether `cuMemAlloc` is that of a layer in front of the driver which makes the memory of
    /// VMM memory: SYNC_MEMOPS is then refused for it with 801, as such a layer's authors
    /// (lupine) and users of UCX over VMM memory report.
    pub allocates_by_vmm: bool,
    /// Whether CONTEXT names a primary context for VMM memory. No header says that it names none.
    pub vmm_names_context: bool,
    /// Symbols that the library lacks.
    pub absent: Vec<&'static str>,
    /// Whether copies end only when somebody looks, so that a test sees them under way.
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
            // Decided here, as a discrete GPU on PCIe: the owner sees writes in order (`cuda.h`:
            // 100), and the host can flush (bit 1).
            writes_ordering: 100,
            flush_options: 1,
            // Both decided here: no header says which release of the driver came to know which
            // attribute.
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

    /// The profiles of the supported releases, each with either kernel module.
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

    /// The profile of a name, `550-open` for one.
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
