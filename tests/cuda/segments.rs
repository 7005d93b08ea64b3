//! Memory that an application maps itself with CUDA's virtual memory management (VMM).

use hmem::{
    Address, AddressRange,
    cuda::sys::{self, Functions},
};

/// Memory like PyTorch's expandable segments: one reserved address range, made of equal parts
/// (`step` bytes) with a VMM handle each.
pub(crate) struct Segments<'a> {
    functions: &'a Functions,
    pub(crate) base: u64,
    pub(crate) step: u64,
    handles: Vec<u64>,
}

impl<'a> Segments<'a> {
    pub(crate) fn new(f: &'a Functions, capable: &[bool]) -> Self {
        Self::of(f, capable, |_| 0)
    }

    /// Like [`Self::new`], but requests for each part the handle types that `handle_types` returns.
    pub(crate) fn of(f: &'a Functions, capable: &[bool], handle_types: fn(usize) -> u32) -> Self {
        let step = 2usize << 20;
        let (mut base, mut handles) = (0, Vec::new());
        // SAFETY: the outputs are writable; the calls above reserved the addresses and created the
        // handles.
        unsafe {
            let reserve = f.mem_address_reserve().expect("VMM");
            assert!(reserve(&mut base, step * capable.len(), 0, 0, 0).is_success());
            for (number, capable) in capable.iter().enumerate() {
                let location = sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
                let properties = sys::CuMemAllocationProp {
                    kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
                    location,
                    requested_handle_types: handle_types(number),
                    gpu_direct_rdma_capable: (*capable).into(),
                    ..Default::default()
                };
                let who = sys::CuMemAccessDesc {
                    location,
                    flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                };
                let (mut handle, at) = (0, base + (number * step) as u64);
                assert!(
                    f.mem_create().expect("VMM")(&mut handle, step, &properties, 0).is_success()
                );
                assert!(f.mem_map().expect("VMM")(at, step, 0, handle, 0).is_success());
                assert!(f.mem_set_access().expect("VMM")(at, step, &who, 1).is_success());
                handles.push(handle);
            }
        }
        Self { functions: f, base, step: step as u64, handles }
    }

    pub(crate) fn range(&self, from: u64, len: u64) -> AddressRange {
        AddressRange::new(Address(self.base + from), len).expect("a range")
    }
}

impl Drop for Segments<'_> {
    fn drop(&mut self) {
        let f = self.functions;
        let whole = self.step as usize * self.handles.len();
        // SAFETY: `new` reserved and mapped the range, and no region over it is left.
        unsafe {
            assert!(f.mem_unmap().expect("VMM")(self.base, whole).is_success());
            assert!(f.mem_address_free().expect("VMM")(self.base, whole).is_success());
            for handle in &self.handles {
                assert!(f.mem_release().expect("VMM")(*handle).is_success());
            }
        }
    }
}
