//! Checks that AWS's own headers contain the declarations from which the function table was
//! written, and the values of the status codes.

#[path = "../../tests/accelerators/mod.rs"]
mod accelerators;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use accelerators::{enumerates, has, header};
use hmem_iface_accelerators::neuron::sys::NrtStatus;
use trials::{Outcome, trials};

trials! {
    /// HM-01
    functions_are_declared_as_in_nrt_h,
    /// HM-01
    statuses_have_the_values_of_nrt_status_h,
}

fn functions_are_declared_as_in_nrt_h() -> Outcome {
    let header = header("neuron/nrt.h")?;
    has(
        &header,
        &[
            "NRT_STATUS nrt_get_visible_nc_count(uint32_t *vnc_count);",
            "NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t tensor_placement, int vnc, \
             size_t size, const char *name, nrt_tensor_t **tensor);",
            "void nrt_tensor_free(nrt_tensor_t **tensor);",
            "void *nrt_tensor_get_va(const nrt_tensor_t *tensor);",
            "size_t nrt_tensor_get_size(const nrt_tensor_t *tensor);",
            "NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, \
             size_t size);",
            "NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, \
             size_t size);",
            "NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, \
             const char *fal_version);",
            "NRT_STATUS nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int* fd);",
            "NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, \
             size_t stats_size_in, size_t *stats_size_out);",
            "typedef struct nrt_vnc_memory_stats { size_t bytes_used; size_t bytes_limit;",
            "typedef enum { NRT_TENSOR_PLACEMENT_DEVICE,",
            "NRT_FRAMEWORK_TYPE_NO_FW = 1,",
        ],
    );
    Ok(())
}

fn statuses_have_the_values_of_nrt_status_h() -> Outcome {
    let header = header("neuron/nrt_status.h")?;
    let named = (0..2000).filter_map(|code| Some((NrtStatus(code).name()?, code)));
    let named: Vec<_> = named.collect();
    assert!(named.len() >= 15, "{named:?}");
    enumerates(&header, named);
    Ok(())
}
