//! Faults at every call of the runtimes (REL-01). The iface returns an error and leaks nothing, and
//! works again without the fault.

use std::time::{Duration, Instant};

use hmem_core::{Address, Iface, IfaceExt, Result, iface::DmaBufMapping};
use hmem_fake_accelerators::Fake;
use hmem_iface_kit::announced::{Announced, Driver};

use crate::world::{Over, World, allocate, check_round_trip, free, nic, over_both, page, request};

/// Codes that the tests make a vendor's function return:
///
/// - Neuron: 1 failure, 2 invalid argument, 4 lack of resources. The crate has no name for 17.
/// - Gaudi: 1 invalid argument, 4 out of device memory, 17 device reset. The crate has no name
///   for 2.
const CODES: [i32; 4] = [1, 2, 4, 17];

/// Functions of which [`round`] does not report a failure. A comment gives the reason.
const SILENT: [&str; 5] = [
    // `round` does not call these functions. The iface calls them when it is opened.
    "nrt_get_visible_nc_count",
    "synDeviceGetCount",
    "synInitialize",
    // These functions return no code.
    "nrt_tensor_get_size",
    "nrt_tensor_free",
];

/// Allocates memory, copies bytes, exports a dma-buf and frees the memory. Adds memory that could
/// not be freed to `left`.
fn round(iface: &dyn Iface, left: &mut Vec<hmem_core::Allocation>) -> Result<()> {
    let own = iface.allocate(&request(2 * page()))?;
    let worked = check_round_trip(iface, Address(own.base().0 + 5), 100)
        .and_then(|()| iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Default).map(drop));
    let freed = free(iface, &own);
    if freed.is_err() {
        assert_eq!(iface.query(own.base()).expect("query"), Some(own), "it is still allocated");
        left.push(own);
    }
    worked.and(freed)
}

/// Asserts that all memory is freed. The kernel may close a dma-buf late, and the iface frees
/// exported memory at the first free after that.
fn assert_all_freed(iface: &dyn Iface, fake: &Fake, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while fake.live().allocations > 0 {
        assert!(Instant::now() < deadline, "{what} left memory behind");
        let other = allocate(iface, page());
        free(iface, &other).expect("free");
    }
}

/// REL-01
#[test]
fn fault_at_any_call_is_an_error_and_leaks_nothing() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, world: &World<D>) {
            // The first copy creates the buffers that the driver keeps.
            round(iface, &mut Vec::new()).expect("no fault yet");
            let mut met = 0;
            let export = [
                "nrt_get_dmabuf_fd_v2",
                "nrt_get_dmabuf_fd",
                "hlthunk_device_mapped_memory_export_dmabuf_fd",
            ];
            for symbol in world.symbols.iter().chain(&export) {
                for code in CODES {
                    // libhl-thunk returns negative numbers.
                    let code = if symbol.starts_with("hlthunk") { -code } else { code };
                    let calls = fake.calls(symbol);
                    fake.fail(symbol, code);
                    let mut left = Vec::new();
                    let outcome = round(iface, &mut left);
                    let called = fake.calls(symbol) > calls;
                    fake.heal();
                    for own in left {
                        free(iface, &own).expect("the fault is gone");
                    }
                    if called && !SILENT.contains(symbol) {
                        met += 1;
                        outcome.expect_err(&format!("{symbol} returned {code}"));
                    }
                    round(iface, &mut Vec::new()).expect("the fault is gone");
                    assert_all_freed(iface, fake, symbol);
                }
            }
            assert!(met >= 16, "only {met} faults were met");
        }
    }
    over_both(&Test);
}

/// REL-01
#[test]
fn failed_export_leaves_no_descriptor() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, _: &World<D>) {
            let own = allocate(iface, page());
            let open = || std::fs::read_dir("/proc/self/fd").expect("procfs").count();
            let before = open();
            for symbol in ["nrt_get_dmabuf_fd_v2", "nrt_get_dmabuf_fd"] {
                fake.fail(symbol, 4);
            }
            fake.fail("hlthunk_device_mapped_memory_export_dmabuf_fd", -12);
            let error =
                iface.export_dma_buf(own.range, &nic(), DmaBufMapping::Default).unwrap_err();
            assert!(error.driver().is_some() || error.os_errno().is_some(), "{error}");
            assert_eq!(open(), before);
            fake.heal();
            free(iface, &own).expect("free");
        }
    }
    over_both(&Test);
}
