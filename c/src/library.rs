//! The open library: NICs, and reports about the machine.

#![allow(unsafe_code, reason = "reads and writes through pointers that C code passes")]

use std::{
    ffi::{CString, c_char},
    ptr,
    sync::Arc,
};

use hmem::{DeviceId, Error, ErrorKind, Hmem, IfaceKind, Result};
use hmem_cli::{
    Failure,
    args::{CheckArgs, ExplainArgs},
    check::{Selection, check},
    explain::{self, explain},
    info::inventory,
    machine::Machine,
};
use serde_json::to_string_pretty;

use crate::{
    call::{Call, Growing, Handle},
    error::{c_string, hmem_error},
};

/// The open library: the kinds of memory and the NICs of this machine. Any number of threads may
/// use it at once. A program opens it once.
#[derive(Debug)]
pub struct hmem_library {
    _opaque: (),
}

/// The state behind an [`hmem_library`]. Open domains share the state.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) machine: Machine,
    /// The names of the NICs. The index is that of `machine.nics`.
    names: Vec<CString>,
}

impl Handle for hmem_library {
    type State = Arc<Library>;
    const NAME: &'static str = "hmem_library";
}

/// Adds simulated devices and loopback NICs for tests. These are software in this process. A
/// program gets a loopback NIC only if it names that NIC.
pub const HMEM_OPEN_SOFTWARE: u64 = 1;
/// Ignores the environment variables of hmem and of libfabric (`HMEM_*`, `FI_*`).
pub const HMEM_OPEN_WITHOUT_ENVIRONMENT: u64 = 2;
/// Loads no vendor's library. Only host memory can be registered.
pub const HMEM_OPEN_HOST_MEMORY_ONLY: u64 = 4;
/// Opens no NIC. For programs that call `hmem_domain_open_pd` and `hmem_domain_open_fabric` alone.
/// Without this flag, `hmem_open` calls `ibv_fork_init` on a kernel older than Linux 5.12. That
/// call changes the whole process.
pub const HMEM_OPEN_WITHOUT_NICS: u64 = 8;

/// Settings of `hmem_open`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_open_attr {
    /// The size of this structure in bytes: `sizeof(hmem_open_attr)`.
    pub size: usize,
    /// HMEM_OPEN_ flags.
    pub flags: u64,
}

// SAFETY: a size and a number of 64 bits.
unsafe impl Growing for hmem_open_attr {}

/// Makes `hmem_check` finish sooner, as `hmem check --quick` does.
pub const HMEM_REPORT_QUICK: u64 = 1;

/// The selection of a report. Null strings and zeros select everything.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hmem_selection {
    /// The size of this structure in bytes: `sizeof(hmem_selection)`.
    pub size: usize,
    /// The memory: `system`, `cuda`, or a device such as `cuda:0`.
    pub memory: *const c_char,
    /// The provider or the NIC: `verbs`, or `verbs/mlx5_0`.
    pub nic: *const c_char,
    /// The size of the registration (`hmem_explain`) or the transfer (`hmem_check`) in bytes.
    pub bytes: u64,
    /// HMEM_REPORT_ flags.
    pub flags: u64,
}

// SAFETY: a size, pointers to characters that are checked before use, and numbers of 64 bits.
unsafe impl Growing for hmem_selection {}

/// The fields of an [`hmem_selection`], as Rust types.
#[derive(Default)]
struct Selected {
    iface: Option<String>,
    device: Option<u32>,
    nic: Option<String>,
    bytes: Option<u64>,
    quick: bool,
}

impl Selected {
    /// Converts a selection that C code passes.
    ///
    /// # Safety
    /// The condition of [`Call::attr`]. The strings of the selection are null or end with a zero.
    unsafe fn new(call: Call, selection: *const hmem_selection) -> Result<Self> {
        // SAFETY: the caller promises null or a selection.
        let given = unsafe { call.attr("selection", selection) }?;
        check_flags(call, given.flags, HMEM_REPORT_QUICK)?;
        // SAFETY: the caller promises null or strings.
        let (memory, nic) =
            unsafe { (call.text("memory", given.memory)?, call.text("nic", given.nic)?) };
        let (iface, device) = match memory.map(|memory| split(call, memory)).transpose()? {
            Some((iface, device)) => (Some(iface.to_owned()), device),
            None => (None, None),
        };
        Ok(Self {
            iface,
            device,
            nic: nic.map(str::to_owned),
            bytes: Some(given.bytes).filter(|bytes| *bytes > 0),
            quick: given.flags & HMEM_REPORT_QUICK != 0,
        })
    }
}

/// Splits the name of memory, such as `cuda:0`, into the iface and the device.
fn split(call: Call, memory: &str) -> Result<(&str, Option<u32>)> {
    match memory.split_once(':') {
        None => Ok((memory, None)),
        Some((iface, device)) => match device.parse() {
            Ok(device) => Ok((iface, Some(device))),
            Err(_) => Err(call
                .invalid("memory", "name memory as `system`, `cuda` or `cuda:0`")
                .context("memory", memory)),
        },
    }
}

/// Refuses flags that are not in `known`.
pub(crate) fn check_flags(call: Call, flags: u64, known: u64) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(call
            .invalid("flags", "use the flags of hmem.h")
            .context("unknown", format_args!("{unknown:#x}"))),
    }
}

/// Converts the failure of a report to an error.
pub(crate) fn report_failed(failure: Failure) -> Error {
    let kind = match failure {
        Failure::Error(error) => return *error,
        Failure::Usage(_) => ErrorKind::InvalidArgument,
        Failure::Failed(_) | Failure::Output(_) => ErrorKind::Driver,
    };
    let mut problem = failure.problem();
    let remedy = problem.remedy.take();
    let error = Error::new(kind, "report").context("why", problem);
    match remedy {
        Some(remedy) => error.remedy(remedy),
        None => error,
    }
}

impl Library {
    /// Returns the iface and the device with this name, such as `cuda:0`.
    pub(crate) fn owner(&self, call: Call, memory: &str) -> Result<(IfaceKind, Option<DeviceId>)> {
        let (name, device) = split(call, memory)?;
        let registry = self.machine.hmem.registry();
        let absent = registry.absent().map(|(kind, _)| kind);
        let mut kinds = registry.iter().map(|iface| iface.kind()).chain(absent);
        let kind = kinds.find(|kind| registry.name_of(*kind).to_string() == name);
        let kind = kind.ok_or_else(|| {
            call.invalid("memory", "`hmem info` lists the ifaces").context("memory", memory)
        })?;
        Ok((kind, device.map(DeviceId)))
    }
}

/// Returns the version of the library, such as `0.1.0`. The text is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn hmem_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Opens the library: starts libibverbs, and the ifaces of all vendors whose libraries are
/// installed. An absent vendor library or device is no error: `hmem_info` has the reason.
///
/// Environment variables give the settings that are not in `attr`. A null `attr` means no flags.
///
/// # Safety
/// `attr` is null, or a structure as large as its field `size` says. `library` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_open(
    attr: *const hmem_open_attr,
    library: *mut *mut hmem_library,
) -> *mut hmem_error {
    Call::run("hmem_open", |call| {
        // SAFETY: the caller promises null or a place for the result.
        let library = unsafe { call.out("library", library, ptr::null_mut()) }?;
        // SAFETY: the caller promises null or a structure.
        let flags = unsafe { call.attr("attr", attr) }?.flags;
        let nics = HMEM_OPEN_SOFTWARE | HMEM_OPEN_WITHOUT_NICS;
        let known = nics | HMEM_OPEN_WITHOUT_ENVIRONMENT | HMEM_OPEN_HOST_MEMORY_ONLY;
        check_flags(call, flags, known)?;
        let mut builder = Hmem::builder();
        if flags & HMEM_OPEN_WITHOUT_ENVIRONMENT != 0 {
            builder = builder.without_environment();
        }
        if flags & HMEM_OPEN_HOST_MEMORY_ONLY != 0 {
            builder = builder.without_vendor_ifaces();
        }
        let machine = match flags & nics {
            0 => Machine::without_software(builder.verbs())?,
            HMEM_OPEN_SOFTWARE => Machine::find(builder)?,
            HMEM_OPEN_WITHOUT_NICS => Machine::without_software(builder)?,
            _ => {
                let remedy = "pass HMEM_OPEN_SOFTWARE or HMEM_OPEN_WITHOUT_NICS: software is a NIC";
                return Err(call.invalid("flags", remedy));
            }
        };
        let names = machine.nics.iter().map(|nic| c_string(nic.attr.nic.to_string())).collect();
        Call::set_handle(library, Arc::new(Library { machine, names }));
        Ok(())
    })
}

/// Closes the library. Open domains stay usable. Does nothing for null. Fails only if `library` is
/// not an open library.
///
/// # Safety
/// `library` is null, or a library that no other call uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_close(library: *mut hmem_library) -> *mut hmem_error {
    Call::run("hmem_close", |call| {
        // SAFETY: the caller promises null or a handle that no other call uses.
        unsafe {
            call.close(library, |library| {
                drop(library);
                Ok(())
            })
        }
    })
}

/// Returns the name of a NIC, such as `verbs/mlx5_0`, or null if `index` is not less than the
/// number of NICs. Hardware comes after software. The text lives as long as the library is open.
///
/// # Safety
/// `library` is null, or a library that is not closed during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_nic_name(
    library: *const hmem_library,
    index: usize,
) -> *const c_char {
    let mut name = ptr::null();
    let error = Call::run("hmem_nic_name", |call| {
        // SAFETY: the caller promises null or a handle.
        let library = unsafe { call.state(library) }?;
        name = library.names.get(index).map_or(ptr::null(), |name| name.as_ptr());
        Ok(())
    });
    // SAFETY: null, or the error of the call above.
    unsafe { crate::error::hmem_error_free(error) };
    name
}

/// Returns the JSON document of `hmem info --json`: the ifaces, devices and NICs, the paths between
/// them, and the reason for each iface or NIC that is unavailable. Without HMEM_OPEN_SOFTWARE, the
/// document has no simulated devices and no loopback NICs. The command prints these too.
///
/// `nic` selects a provider or a NIC. Null means all.
///
/// # Safety
/// `library` is null, or a library that is not closed during the call. `nic` is null or a string.
/// `json` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_info(
    library: *const hmem_library,
    nic: *const c_char,
    json: *mut *mut c_char,
) -> *mut hmem_error {
    Call::run("hmem_info", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a string.
        let (json, library, nic) = unsafe {
            let json = call.out("json", json, ptr::null_mut())?;
            (json, call.state(library)?, call.text("nic", nic)?)
        };
        let inventory = inventory(&library.machine, nic).map_err(report_failed)?;
        Call::set_text(json, to_string_pretty(&inventory).expect("plain values serialise"));
        Ok(())
    })
}

/// Returns the JSON document of `hmem explain --json`: the path of a registration for each pair of
/// memory and NIC, with each refusal and its remedy. The call registers memory and deregisters it.
///
/// `passed` becomes true if each pair has a path. It may be null.
///
/// # Safety
/// `library` is null, or a library that is not closed during the call. `selection` is null, or a
/// structure as large as its field `size` says. `json` and `passed` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_explain(
    library: *const hmem_library,
    selection: *const hmem_selection,
    json: *mut *mut c_char,
    passed: *mut bool,
) -> *mut hmem_error {
    Call::run("hmem_explain", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a selection.
        let (json, library, args) = unsafe {
            let json = call.out("json", json, ptr::null_mut())?;
            (json, call.state(library)?, explain_args(call, selection)?)
        };
        let report = explain(&library.machine, &args).map_err(report_failed)?;
        // SAFETY: the caller promises null or a place for the result.
        unsafe { set_explanation(&report, json, passed) };
        Ok(())
    })
}

/// Stores the JSON document of an explanation in `json`, and its verdict in `passed`.
///
/// # Safety
/// `passed` is null or writable.
pub(crate) unsafe fn set_explanation(
    report: &explain::Report,
    json: &mut *mut c_char,
    passed: *mut bool,
) {
    // SAFETY: the caller promises null or a place for the result.
    if let Some(passed) = unsafe { passed.as_mut() } {
        *passed = report.passed();
    }
    Call::set_text(json, to_string_pretty(report).expect("plain values serialise"));
}

/// Converts a selection that C code passes to the arguments of an explanation.
///
/// # Safety
/// `selection` is null, or a structure as large as its field `size` says, whose strings end with a
/// zero.
pub(crate) unsafe fn explain_args(
    call: Call,
    selection: *const hmem_selection,
) -> Result<ExplainArgs> {
    // SAFETY: the caller promises null or a selection.
    let Selected { iface, device, nic, bytes, .. } = unsafe { Selected::new(call, selection) }?;
    Ok(ExplainArgs { iface, device, nic, size: bytes, ..ExplainArgs::default() })
}

/// Returns the JSON document of `hmem check --json`: moves bytes over every selected pair of memory
/// and NIC, and compares them. The call takes seconds.
///
/// `passed` becomes true if everything was verified. It may be null.
///
/// # Safety
/// `library` is null, or a library that is not closed during the call. `selection` is null, or a
/// structure as large as its field `size` says. `json` and `passed` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_check(
    library: *const hmem_library,
    selection: *const hmem_selection,
    json: *mut *mut c_char,
    passed: *mut bool,
) -> *mut hmem_error {
    Call::run("hmem_check", |call| {
        // SAFETY: the caller promises null or a place for the result, a handle and a selection.
        let (json, library, selected) = unsafe {
            let json = call.out("json", json, ptr::null_mut())?;
            (json, call.state(library)?, Selected::new(call, selection)?)
        };
        if selected.device.is_some() {
            return Err(call.invalid("memory", "name the iface alone: a check has all its devices"));
        }
        let Selected { iface, nic: provider, bytes, quick, .. } = selected;
        let args = CheckArgs { iface, provider, bytes, quick, ..CheckArgs::default() };
        let selection = Selection::new(&args, &library.machine).map_err(report_failed)?;
        let report = check(&library.machine, &selection, |_, _, _| {})?;
        // SAFETY: the caller promises null or a place for the result.
        if let Some(passed) = unsafe { passed.as_mut() } {
            *passed = report.passed();
        }
        Call::set_text(json, to_string_pretty(&report).expect("plain values serialise"));
        Ok(())
    })
}
