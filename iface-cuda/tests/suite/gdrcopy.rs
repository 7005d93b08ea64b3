//! Tests of CPU access to device memory, over substitutes for the functions of GDRCopy.

use std::{
    ffi::{c_int, c_ulong, c_void},
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use hmem_core::{AllocationKind, ErrorKind};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::gdrcopy::{GPU_PAGE, GdrFunctions, GdrHandle, Gdrcopy};

use crate::{
    fork::{drop_in_the_child, in_a_child},
    world::{HeldCopies, over, pattern},
};

/// Number of buffers and mappings that are not released yet.
static ALIVE: AtomicI32 = AtomicI32::new(0);
/// First address of the buffer that was pinned last.
static PINNED: AtomicU64 = AtomicU64::new(0);
/// Code that `gdr_map` returns.
static MAP: AtomicI32 = AtomicI32::new(0);
/// Code that `gdr_unpin_buffer` returns.
static UNPIN: AtomicI32 = AtomicI32::new(0);
/// Number of calls in progress that the library does not permit at once.
static CALLS: AtomicI32 = AtomicI32::new(0);
/// Number of calls that began during another one.
static OVERLAPS: AtomicI32 = AtomicI32::new(0);

/// Counts a call that must not overlap with another one, and takes long enough for an overlap.
fn enter() {
    OVERLAPS.fetch_add(CALLS.fetch_add(1, Ordering::AcqRel), Ordering::AcqRel);
    thread::sleep(Duration::from_micros(100));
    CALLS.fetch_sub(1, Ordering::AcqRel);
}

unsafe extern "C" fn open() -> usize {
    enter();
    1
}

unsafe extern "C" fn close(_: usize) -> c_int {
    enter();
    0
}

unsafe extern "C" fn pin(
    _: usize,
    address: c_ulong,
    size: usize,
    _: u64,
    _: u32,
    handle: *mut GdrHandle,
) -> c_int {
    enter();
    // `gdrapi.h` requires this alignment.
    assert!(address.is_multiple_of(GPU_PAGE) && (size as u64).is_multiple_of(GPU_PAGE));
    PINNED.store(address, Ordering::Release);
    ALIVE.fetch_add(1, Ordering::AcqRel);
    // SAFETY: the caller passes a writable output.
    unsafe { *handle = GdrHandle { h: address } };
    0
}

unsafe extern "C" fn unpin(_: usize, _: GdrHandle) -> c_int {
    enter();
    ALIVE.fetch_sub(1, Ordering::AcqRel);
    UNPIN.load(Ordering::Acquire)
}

unsafe extern "C" fn map(
    _: usize,
    handle: GdrHandle,
    address: *mut *mut c_void,
    _: usize,
) -> c_int {
    enter();
    let refused = MAP.load(Ordering::Acquire);
    if refused != 0 {
        return refused;
    }
    ALIVE.fetch_add(1, Ordering::AcqRel);
    // SAFETY: the caller passes a writable output.
    unsafe { *address = hmem_fake_cuda::reach(handle.h).cast() };
    0
}

unsafe extern "C" fn unmap(_: usize, _: GdrHandle, _: *mut c_void, _: usize) -> c_int {
    enter();
    ALIVE.fetch_sub(1, Ordering::AcqRel);
    0
}

unsafe extern "C" fn to_mapping(
    _: GdrHandle,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: the caller passes a source and a destination of `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len) };
    0
}

unsafe extern "C" fn from_mapping(
    _: GdrHandle,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: the caller passes a source and a destination of `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len) };
    0
}

fn functions(open: unsafe extern "C" fn() -> usize) -> GdrFunctions {
    let lookup = |symbol| {
        Some(match symbol {
            "gdr_open" => open as *const (),
            "gdr_close" => close as *const (),
            "gdr_pin_buffer" => pin as *const (),
            "gdr_unpin_buffer" => unpin as *const (),
            "gdr_map" => map as *const (),
            "gdr_unmap" => unmap as *const (),
            "gdr_copy_to_mapping" => to_mapping as *const (),
            "gdr_copy_from_mapping" => from_mapping as *const (),
            _ => return None,
        })
    };
    // SAFETY: the functions above have the signatures of `gdrapi.h`.
    unsafe { GdrFunctions::from_lookup(lookup) }.expect("every function")
}

/// HM-03
#[test]
fn cpu_reaches_device_memory_through_a_window() {
    over(Profile::default(), |world| {
        let gdr = Gdrcopy::with(functions(open)).expect("open");
        let memory = world.allocate(300_000, AllocationKind::Device);
        let part = memory.range.slice(70_001, 5000).expect("a part");
        // SAFETY: the memory is freed after the window is closed.
        let window = unsafe { gdr.map(&world.cuda, part) }.expect("map");
        assert!(
            world.driver().sync_memops(part.start().0),
            "synchronous operations are synchronous for the CPU"
        );
        window.write(3, &pattern(1, 4000)).expect("write");
        let mut found = vec![0; 4000];
        world
            .cuda
            .read_bytes(part.slice(3, 4000).expect("inside").start(), &mut found)
            .expect("read");
        assert!(found == pattern(1, 4000), "the device sees what the CPU wrote");
        world.cuda.write_bytes(part.start(), &[9; 16]).expect("write");
        let mut found = [0; 16];
        window.read(0, &mut found).expect("read");
        assert_eq!(found, [9; 16]);
        for (offset, len) in [(0, 5001), (5000, 1), (u64::MAX, 1)] {
            let error = window.write(offset, &vec![0; len]).expect_err("outside the window");
            assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        }
        drop(window);
        assert_eq!(ALIVE.load(Ordering::Acquire), 0, "unmapped and unpinned");
        MAP.store(12, Ordering::Release);
        // SAFETY: the memory is freed after the window is closed.
        let error = unsafe { gdr.map(&world.cuda, part) }.expect_err("refused");
        assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfResources, "gdr_map"));
        assert_eq!(ALIVE.load(Ordering::Acquire), 0, "unpinned again");
        UNPIN.store(5, Ordering::Release);
        // SAFETY: the memory is freed after the window is closed.
        let error = unsafe { gdr.map(&world.cuda, part) }.expect_err("refused");
        assert_eq!(error.operation(), "gdr_map", "the first error of the two");
        UNPIN.store(0, Ordering::Release);
        MAP.store(0, Ordering::Release);
        world.free(&memory);
        for kind in [AllocationKind::StreamOrdered, AllocationKind::Managed] {
            let other = world.allocate(4096, kind);
            // SAFETY: the memory is freed after the call, which is refused.
            let error = unsafe { gdr.map(&world.cuda, other.range) }.expect_err("cannot be pinned");
            assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
            assert!(
                error.operation() == "gdr_pin_buffer" && error.context_value("range").is_some(),
                "{error}"
            );
            world.free(&other);
        }
        assert_eq!(world.driver().context_flags(0), 0, "refused calls pinned nothing");
        // VMM memory cannot have the attribute SYNC_MEMOPS, and is mapped nevertheless.
        let other = world.allocate(4 << 20, AllocationKind::Virtual);
        // SAFETY: the memory is freed after the window is closed.
        drop(unsafe { gdr.map(&world.cuda, other.range) }.expect("map"));
        assert_eq!(world.driver().context_flags(0), hmem_iface_cuda::sys::CU_CTX_SYNC_MEMOPS);
        world.free(&other);
    });
}

/// HM-03
///
/// The library is not thread safe, even for different handles.
#[test]
fn calls_of_the_library_do_not_overlap() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let use_library = || {
            for _ in 0..20 {
                let gdr = Gdrcopy::with(functions(open)).expect("open");
                // SAFETY: the memory is freed after the windows are closed.
                drop(unsafe { gdr.map(&world.cuda, memory.range) }.expect("map"));
            }
        };
        thread::scope(|scope| {
            scope.spawn(use_library);
            scope.spawn(use_library);
        });
        assert_eq!(OVERLAPS.load(Ordering::Acquire), 0);
        world.free(&memory);
    });
}

/// CACHE-13
#[test]
fn forked_child_neither_uses_nor_closes_a_window_of_its_parent() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let gdr = Gdrcopy::with(functions(open)).expect("open");
        // SAFETY: the memory is freed after the window is closed.
        let window = unsafe { gdr.map(&world.cuda, memory.range) }.expect("map");
        in_a_child(|| {
            let refused = window.read(0, &mut [0; 8]).expect_err("refused");
            drop_in_the_child(&window);
            refused.kind() == ErrorKind::BadState && ALIVE.load(Ordering::Acquire) == 2
        });
        drop(window);
        assert_eq!(ALIVE.load(Ordering::Acquire), 0, "unmapped and unpinned");
        world.free(&memory);
    });
}

/// HM-04
#[test]
fn absent_gdrcopy_is_named() {
    for (path, word) in [("/nowhere/libgdrapi.so.2", "No such file"), ("libm.so.6", "gdr_open")] {
        // SAFETY: the file does not exist, or is `libm.so.6`, which any process may load.
        let error = unsafe { Gdrcopy::load(path) }.expect_err("not GDRCopy");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("library"), Some(path));
        assert!(error.to_string().contains(word) && error.remedy_text().is_some(), "{error}");
    }
    unsafe extern "C" fn no_module() -> usize {
        0
    }
    let error = Gdrcopy::with(functions(no_module)).expect_err("no module");
    assert!(error.is_unavailable() && error.to_string().contains("gdrdrv"), "{error}");
}
