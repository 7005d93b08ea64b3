//! The environment variables of the library. An input is lines `NAME=value`.

#![allow(unsafe_code, reason = "sets environment variables")]

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
};

use hmem::Hmem;

use super::{Verdict, refusal};

/// Every variable that the library reads.
const VARIABLES: [&str; 19] = [
    "FI_HMEM",
    "FI_HMEM_DISABLE_P2P",
    "FI_MR_CACHE_MAX_COUNT",
    "FI_MR_CACHE_MAX_SIZE",
    "FI_MR_CACHE_MERGE_REGIONS",
    "FI_MR_CACHE_MONITOR",
    "FI_MR_CUDA_CACHE_MONITOR_ENABLED",
    "FI_MR_ROCR_CACHE_MONITOR_ENABLED",
    "FI_MR_ZE_CACHE_MONITOR_ENABLED",
    "HMEM_CUDA_LIBRARY",
    "HMEM_CUDA_MONITOR",
    "HMEM_DIRECT_PATHS",
    "HMEM_REACH_CHECK",
    "HMEM_NEURON_LIBRARY",
    "HMEM_NEURON_START_RUNTIME",
    "HMEM_SYNAPSEAI_LIBRARY",
    "HMEM_SYNAPSEAI_START_RUNTIME",
    "HMEM_VERBS_PCIE_MAPPING",
    "HMEM_ZE_LIBRARY",
];

/// The path of a library is given to the dynamic loader as it is. In this folder, which does not
/// exist, the loader finds no library to run.
const NO_FOLDER: &[u8] = b"/hmem-fuzz/none/";

pub(super) fn target(data: &[u8]) -> Verdict {
    for name in VARIABLES {
        // No vendor's library is loaded, whichever is installed.
        let value = name.ends_with("_LIBRARY").then(|| OsStr::from_bytes(NO_FOLDER).to_owned());
        set(name, value);
    }
    for line in data.split(|byte| *byte == b'\n') {
        let Some(at) = line.iter().position(|byte| *byte == b'=') else { continue };
        let (name, value) = (&line[..at], &line[at + 1..]);
        let Some(name) = VARIABLES.iter().find(|known| known.as_bytes() == name) else { continue };
        let folder = if name.ends_with("_LIBRARY") { NO_FOLDER } else { b"" };
        if !value.contains(&0) {
            set(name, Some(OsStr::from_bytes(&[folder, value].concat()).to_owned()));
        }
    }
    let hmem = Hmem::builder().verbs().build().map_err(refusal);
    let verdict = hmem.and_then(|hmem| hmem.cache_defaults().map(drop).map_err(refusal));
    VARIABLES.iter().for_each(|name| set(name, None));
    verdict
}

fn set(name: &str, value: Option<OsString>) {
    // SAFETY: the standard library's lock orders this with each read by Rust code, and no C code
    // reads the environment meanwhile: this target starts no thread, and runs before those that do.
    unsafe {
        match value {
            Some(value) => env::set_var(name, value),
            None => env::remove_var(name),
        }
    }
}
