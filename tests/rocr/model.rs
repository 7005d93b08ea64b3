//! Loads AMD's own runtime with a model of a GPU (`tests/rocr/run`).

use std::{
    ffi::c_void,
    sync::{Once, OnceLock},
};

use hmem::rocr::sys::{Agent, Functions, HSA_AMD_AGENT_INFO_HDP_FLUSH, HsaStatus};
use libloading::os::unix::Library;

/// Functions that need the kernel driver, and abort the process on the model GPU.
const NOT_MODELLED: [&str; 2] = ["hsa_amd_ipc_memory_create", "hsa_amd_memory_lock"];

type AgentGetInfo = unsafe extern "C" fn(Agent, u32, *mut c_void) -> HsaStatus;

static AGENT_GET_INFO: OnceLock<AgentGetInfo> = OnceLock::new();

/// Replacement of `hsa_agent_get_info` that reports no flush register, since the CPU cannot write
/// the model's.
///
/// # Safety
/// The caller must follow the header's rules for `hsa_agent_get_info`.
unsafe extern "C" fn agent_get_info(agent: Agent, attribute: u32, value: *mut c_void) -> HsaStatus {
    if attribute == HSA_AMD_AGENT_INFO_HDP_FLUSH.number {
        return HsaStatus::HSA_STATUS_SUCCESS;
    }
    // SAFETY: the caller of this function makes the same promise.
    unsafe { AGENT_GET_INFO.get().expect("set with the table")(agent, attribute, value) }
}

/// Returns the functions of the runtime that the loader finds, without those that need the kernel
/// driver.
pub(crate) fn functions() -> Functions {
    // SAFETY: AMD's runtime, whose initialisers have no precondition.
    let library = unsafe { Library::new(Functions::LIBRARY) }.expect("AMD's runtime");
    // The model can start only once in a process, so the reference of this `hsa_init` is never
    // released.
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // SAFETY: the types are those of the functions of these names.
        let (init, info) = unsafe {
            (
                library.get::<unsafe extern "C" fn() -> HsaStatus>("hsa_init").expect("hsa_init"),
                library.get::<AgentGetInfo>("hsa_agent_get_info").expect("hsa_agent_get_info"),
            )
        };
        AGENT_GET_INFO.get_or_init(|| *info);
        // SAFETY: any thread may call `hsa_init` any number of times.
        let code = unsafe { init() };
        assert_eq!(code, HsaStatus::HSA_STATUS_SUCCESS, "the model GPU does not start");
    });
    // SAFETY: the addresses are the library's own under the names of its header, and it is never
    // unloaded.
    let functions = unsafe {
        Functions::from_lookup(|name| match name {
            "hsa_agent_get_info" => Some(agent_get_info as *const ()),
            name if NOT_MODELLED.contains(&name) => None,
            name => {
                let symbol = library.get::<*const ()>(name).ok()?;
                Some(symbol.as_raw_ptr().cast_const().cast())
            }
        })
    };
    std::mem::forget(library);
    functions.expect("the table")
}
