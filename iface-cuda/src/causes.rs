//! The causes of refusals that only this driver gives, beside the general ones.

use hmem_core::{
    Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
};

/// The kernel module's statement about itself, if it is loaded.
const KERNEL_MODULE: &str = "proc/driver/nvidia/version";

/// The first line is `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.161.08 ..`; that
/// of the closed variant lacks the word.
fn has_closed_modules(facts: &Facts) -> bool {
    let text = facts.text(KERNEL_MODULE).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    line.contains("Kernel Module") && !line.contains("Open Kernel Module")
}

/// The causes of refusals that only CUDA's driver gives.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "nvidia-closed-modules",
        rank: 40,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Driver(&[801]), Answer::UNSUPPORTED],
        needs: Needs::some("NVIDIA's kernel modules are the closed ones", has_closed_modules),
        cause: "the closed variant of NVIDIA's kernel modules exports no dma-bufs",
        remedy: "install the open kernel modules (Turing or newer, driver 515 or newer), or load nvidia-peermem",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "wrong-context",
        rank: 90,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Driver(&[3, 4, 201, 709])],
        cause: "the driver does not know the calling thread's context: none is current, it was destroyed, or the process is a fork \
                of the one that made it",
        remedy: "use the memory while the context that allocated it lives, and register after a fork, not before it",
        ..RefusalCause::ANY
    },
    // `CUDA_ERROR_INVALID_DEVICE`: the general row knows a lost device by the kind `Unavailable`.
    RefusalCause {
        name: "device-lost",
        rank: 320,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Driver(&[101])],
        cause: "the device fell off the bus, was reset, or was taken from this process",
        remedy: "look at the kernel log (dmesg), and start again once the device answers",
        ..RefusalCause::ANY
    },
];
