//! Tests of plans that fail.

use std::sync::atomic::AtomicUsize;

use hmem_core::IfaceKind;
use hmem_hook::{MonitorName, PatchTarget, Patches};

const NAME: MonitorName =
    MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "do without" };
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);

/// Data that is no function. The decoder knows no instruction of zeroes.
static NO_FUNCTION: [u64; 8] = [0; 8];

/// Returns the size of the address space that this process uses, in pages.
fn mapped_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse().unwrap()
}

/// A plan that fails unmaps its trampolines. Otherwise each refused patch would leak memory.
#[test]
fn failed_plan_leaves_no_mapping() {
    const PLANS: u64 = 1_000;
    let target = PatchTarget {
        name: "nothing",
        entry: NO_FUNCTION.as_ptr().expose_provenance(),
        hook: (mapped_pages as *const ()).expose_provenance(),
        call: None,
        original: &ORIGINAL,
    };
    let fail = || {
        // SAFETY: the entry is readable, and no patch leads to the hook, because the plan fails.
        let error = unsafe { Patches::plan(NAME, &[target]) }.unwrap_err();
        assert!(error.is_unsupported(), "{error}");
    };
    fail();
    let before = mapped_pages();
    (0..PLANS).for_each(|_| fail());
    let grown = mapped_pages().saturating_sub(before);
    assert!(grown < PLANS / 2, "{grown} pages stay mapped after {PLANS} failed plans");
}
