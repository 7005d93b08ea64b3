//! Tests that processors fetch changed code again when a monitor starts or ends.

mod supervised;

use std::{
    mem::transmute,
    ptr::with_exposed_provenance,
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem_core::{IfaceKind, Result};
use hmem_hook::{HookRegistry, Hooks, MonitorName, PatchTarget, Patches, SubscriberTable};

type GetPpid = unsafe extern "C" fn() -> libc::pid_t;

const NAME: MonitorName =
    MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "do without" };
static REGISTRY: HookRegistry<SubscriberTable> = HookRegistry::new();
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);

/// The hook of `getppid`, which only calls the original.
unsafe extern "C" fn hook() -> libc::pid_t {
    let original = with_exposed_provenance::<()>(ORIGINAL.load(Ordering::Relaxed));
    // SAFETY: `plan` has written the original, which has no arguments and no precondition.
    unsafe { transmute::<*const (), GetPpid>(original)() }
}

fn entry() -> usize {
    (libc::getppid as *const ()).expose_provenance()
}

fn plan() -> Result<Patches> {
    let hook = (hook as *const ()).expose_provenance();
    let call = Some(libc::SYS_getppid);
    let getppid = PatchTarget { name: "getppid", entry: entry(), hook, call, original: &ORIGINAL };
    // SAFETY: the C library stays loaded; the hook has the function's type and its own
    // `original`.
    unsafe { Patches::plan(NAME, &[getppid]) }
}

/// Returns the code at the entry of `getppid`.
fn code() -> [u8; 32] {
    // SAFETY: code of the C library is readable, and only whole valid instructions replace it.
    unsafe { with_exposed_provenance::<[u8; 32]>(entry()).read_volatile() }
}

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE` of `linux/membarrier.h`.
const SYNC_CORE: u64 = 1 << 5;
const REGISTER_SYNC_CORE: u64 = 1 << 6;

/// MON-03: All processors serialise after the trampolines are written and before a jump leads to
/// them, after the jumps are written, and after they are removed.
#[test]
fn processors_refetch_code_after_patch_and_unpatch() {
    let unpatched = code();
    let mut calls = Vec::new();
    let seen = |command| {
        calls.push((command, code() != unpatched));
        None
    };
    supervised::run(libc::SYS_membarrier, seen, || {
        drop(Hooks::start(&REGISTRY, NAME, plan).unwrap());
    });
    assert_eq!(code(), unpatched);
    assert_eq!(
        calls,
        [
            (REGISTER_SYNC_CORE, false),
            (SYNC_CORE, false),
            (REGISTER_SYNC_CORE, true),
            (SYNC_CORE, true),
            (REGISTER_SYNC_CORE, false),
            (SYNC_CORE, false),
        ],
        "commands, and whether the code was patched at the time"
    );
}
