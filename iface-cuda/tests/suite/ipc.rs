//! Tests of the exchange of memory with another process.

use hmem_core::{AllocationKind, ErrorKind, Iface, IfaceExt, IfaceKind, iface::IpcHandle};
use hmem_fake_cuda::{Live, Profile};
use hmem_iface_cuda::sys::CuResult;

use crate::{
    child,
    world::{HeldCopies, World, over, pattern},
};

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks_exact(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("hex"), 16).expect("hex"))
        .collect()
}

pub(crate) fn handle(text: &str) -> IpcHandle {
    IpcHandle { iface: IfaceKind::CUDA, bytes: unhex(text) }
}

/// Runs in the child process: opens the memory twice, writes to it and closes it twice.
fn open_and_write(world: &World, text: &str) {
    let (text, len) = text.split_once(':').expect("a handle and a length");
    let len = len.parse::<usize>().expect("a length");
    if let Some((driver, _)) = &world.fake {
        // REL-01: a fault at each call of opening leaves nothing open.
        for symbol in [
            "cuDevicePrimaryCtxRetain",
            "cuIpcOpenMemHandle_v2",
            "cuPointerGetAttributes",
            "cuCtxPopCurrent_v2",
        ] {
            driver.fail(symbol, CuResult::CUDA_ERROR_UNKNOWN);
            let error = world.cuda.ipc_open(&handle(text)).expect_err("the driver refused");
            assert!(error.to_string().contains("(999)"), "{symbol}: {error}");
            assert_eq!(driver.live(), Live::default(), "{symbol}: no context is left either");
        }
    }
    let memory = world.cuda.ipc_open(&handle(text)).expect("open");
    let again = world.cuda.ipc_open(&handle(text)).expect("open again");
    assert_eq!((memory.base(), memory.kind), (again.base(), AllocationKind::Imported));
    assert_eq!(
        world.cuda.query(memory.base()).expect("query").expect("known").kind,
        AllocationKind::Imported
    );
    // A driver may map more than the memory; `cuda.h` does not say how much.
    let extent = memory.range.len() as usize;
    assert!(extent == len || world.is_real() && extent > len, "{extent}");
    let mut bytes = vec![0; len];
    world.cuda.read_bytes(memory.base(), &mut bytes).expect("read");
    assert!(bytes == pattern(1, bytes.len()), "the owner's bytes");
    world.cuda.write_bytes(memory.base(), &pattern(2, bytes.len())).expect("write");
    // SAFETY: no code uses the memory; the call is refused.
    let error = unsafe { world.cuda.free(&memory) }.expect_err("opened, not allocated");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("ipc_close")), "{error}");
    world.cuda.ipc_export(&memory).expect_err("memory of another process");
    for _ in 0..2 {
        if let Some((driver, _)) = &world.fake {
            driver.fail("cuIpcCloseMemHandle", CuResult::CUDA_ERROR_UNKNOWN);
            // SAFETY: no code uses the memory any longer.
            unsafe { world.cuda.ipc_close(&memory) }.expect_err("the driver refused");
        }
        // SAFETY: no code uses the memory any longer.
        unsafe { world.cuda.ipc_close(&memory) }.expect("close");
    }
    // SAFETY: no code uses the memory; the call is refused.
    unsafe { world.cuda.ipc_close(&memory) }.expect_err("it was closed as often as opened");
}

fn show(name: &str, world: &mut World) {
    if let Some(text) = child::passed() {
        return open_and_write(world, &text);
    }
    for len in [40_000u64, 5 << 20] {
        let memory = world.allocate(len, AllocationKind::Device);
        world.cuda.write_bytes(memory.base(), &pattern(1, len as usize)).expect("write");
        let handle = world.cuda.ipc_export(&memory).expect("export");
        child::run(name, &format!("{}:{len}", hex(&handle.bytes)));
        let mut bytes = vec![0; len as usize];
        world.cuda.read_bytes(memory.base(), &mut bytes).expect("read");
        assert!(bytes == pattern(2, bytes.len()), "the other process wrote");
        world.free(&memory);
    }
}

/// HM-10
#[test]
fn other_process_opens_reads_writes_and_closes() {
    over(Profile::default(), |world| {
        show("ipc::other_process_opens_reads_writes_and_closes", world)
    });
}

/// HM-10
///
/// A child process opens, reads and writes memory of a real device. The test runs only with
/// `HMEM_CUDA=real`.
#[test]
fn other_process_reaches_memory_of_a_real_device() {
    if crate::vendor_files::is_required("cuda", "real") {
        let mut world = World::real(hmem_iface_cuda::CudaMonitorKind::Identity);
        show("ipc::other_process_reaches_memory_of_a_real_device", &mut world);
        world.end();
    }
}

/// Runs a test again in a child process, which gets a handle of memory of this process.
fn run_child_with_handle(name: &str) {
    over(Profile::default(), |world| {
        let memory = world.allocate(3 << 20, AllocationKind::Device);
        let handle = world.cuda.ipc_export(&memory).expect("export");
        child::run(name, &hex(&handle.bytes));
        world.free(&memory);
    });
}

/// HM-10
///
/// The content of a handle may have a longer length than the driver's memory.
#[test]
fn handle_that_is_longer_than_its_memory_is_malformed() {
    const NAME: &str = "ipc::handle_that_is_longer_than_its_memory_is_malformed";
    let Some(text) = child::passed() else { return run_child_with_handle(NAME) };
    over(Profile::default(), |world| {
        let (inner, len, device): ([[u8; 32]; 2], u64, String) =
            handle(&text).decode(IfaceKind::CUDA).expect("a handle");
        for longer in [len + 1, 2 * len, u64::from(u32::MAX)] {
            let altered = IpcHandle::encode(IfaceKind::CUDA, &(inner, longer, &device));
            let error = world.cuda.ipc_open(&altered).expect_err("longer than the memory");
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
            assert!(world.active().is_empty(), "HM-05: a refused attempt left a context");
        }
        let opened = world.cuda.ipc_open(&handle(&text)).expect("open");
        // SAFETY: no code uses the memory.
        unsafe { world.cuda.ipc_close(&opened) }.expect("close");
    });
}

/// HM-10
///
/// After two opens of one allocation, two threads that close it at the same time both succeed.
#[test]
fn two_concurrent_closes_end_two_opens() {
    const NAME: &str = "ipc::two_concurrent_closes_end_two_opens";
    let Some(text) = child::passed() else { return run_child_with_handle(NAME) };
    over(Profile::default(), |world| {
        let memory = world.cuda.ipc_open(&handle(&text)).expect("open");
        world.cuda.ipc_open(&handle(&text)).expect("open again");
        let cuda = &world.cuda;
        // SAFETY: no code uses the memory.
        let close = || unsafe { cuda.ipc_close(&memory) };
        std::thread::scope(|scope| {
            let held = world.driver().hold("cuIpcCloseMemHandle");
            let closers = [scope.spawn(close), scope.spawn(close)];
            held.wait_for(2);
            drop(held);
            for closer in closers {
                closer.join().expect("no panic").expect("close");
            }
        });
        assert_eq!(world.driver().live().imported, 0);
        assert_eq!(cuda.query(memory.base()).expect("query"), None);
        // `over` checks that the iface closes.
    });
}

/// HM-10
///
/// The table lists memory as imported until the driver has closed it, even after a refused close.
#[test]
fn memory_is_an_import_until_the_last_close_succeeds() {
    const NAME: &str = "ipc::memory_is_an_import_until_the_last_close_succeeds";
    let Some(text) = child::passed() else { return run_child_with_handle(NAME) };
    over(Profile::default(), |world| {
        let memory = world.cuda.ipc_open(&handle(&text)).expect("open");
        let cuda = &world.cuda;
        let kind = || cuda.query(memory.base()).expect("query").expect("known").kind;
        // SAFETY: no code uses the memory.
        let close = || unsafe { cuda.ipc_close(&memory) };
        std::thread::scope(|scope| {
            world.driver().fail("cuIpcCloseMemHandle", CuResult::CUDA_ERROR_UNKNOWN);
            let held = world.driver().hold("cuIpcCloseMemHandle");
            let closer = scope.spawn(close);
            held.wait_for(1);
            assert_eq!(kind(), AllocationKind::Imported, "in flight");
            // An open while a close is in flight needs a close of its own.
            cuda.ipc_open(&handle(&text)).expect("open");
            drop(held);
            closer.join().expect("no panic").expect_err("the driver refused");
        });
        for _ in 0..2 {
            assert_eq!(kind(), AllocationKind::Imported, "refused");
            close().expect("close");
        }
        close().expect_err("it was closed as often as opened");
        assert_eq!(world.driver().live().imported, 0);
    });
}

/// HM-10
#[test]
fn wrong_handle_is_malformed_and_stale_handle_unavailable() {
    const NAME: &str = "ipc::wrong_handle_is_malformed_and_stale_handle_unavailable";
    if let Some(text) = child::passed() {
        return over(Profile::default(), |world| {
            let error = world.cuda.ipc_open(&handle(&text)).expect_err("freed");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.remedy_text().is_some());
            assert!(world.active().is_empty(), "HM-05: a refused attempt left a context");
        });
    }
    over(Profile::default(), |world| {
        let memory = world.allocate(3 << 20, AllocationKind::Device);
        let good = world.cuda.ipc_export(&memory).expect("export");
        for bytes in [Vec::new(), vec![0; 100], good.bytes[1..].to_vec(), {
            let mut altered = good.bytes.clone();
            altered[30] ^= 4;
            altered
        }] {
            let error = world
                .cuda
                .ipc_open(&IpcHandle { iface: IfaceKind::CUDA, bytes })
                .expect_err("no handle");
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        }
        let error = world.cuda.ipc_open(&good).expect_err("the process's own");
        assert!(error.remedy_text().is_some(), "{error}");
        for kind in
            [AllocationKind::Virtual, AllocationKind::StreamOrdered, AllocationKind::Managed]
        {
            let other = world.allocate(4096, kind);
            assert!(world.cuda.ipc_export(&other).expect_err("refused").is_unsupported());
            world.free(&other);
        }
        world.free(&memory);
        assert_eq!(
            world.cuda.ipc_export(&memory).expect_err("freed").kind(),
            ErrorKind::InvalidArgument
        );
        child::run(NAME, &hex(&good.bytes));
    });
}
