//! Tests of patching functions that other threads run, of repeated patching, and of functions that
//! other libraries patch too.

use std::{
    ptr,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    Error, ErrorKind,
    monitor::{InvalidationCause, Monitor},
};
use hmem_iface_system::monitor::MemHooks;

use crate::{ANONYMOUS, RW, monitors::*, observed};

/// Returns the address of a function of the C library.
fn entry(name: &std::ffi::CStr) -> *mut u8 {
    // SAFETY: the calls load nothing, and only look up a symbol in a loaded library.
    unsafe {
        let libc = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        libc::dlsym(libc, name.as_ptr()).cast()
    }
}

fn code(name: &std::ffi::CStr) -> [u8; 32] {
    // SAFETY: the code of the C library is readable.
    unsafe { entry(name).cast::<[u8; 32]>().read_unaligned() }
}

const PATCHED: [&std::ffi::CStr; 7] =
    [c"munmap", c"mmap", c"mremap", c"madvise", c"brk", c"shmat", c"shmdt"];

pub(crate) fn thread_inside_a_call_survives_patch_and_unpatch() {
    let page = page();
    let blocked = |at: usize| {
        thread::spawn(move || {
            let at = ptr::with_exposed_provenance_mut(at);
            // SAFETY: the mapping belongs to the test, and nothing uses it any longer.
            observed(|| unsafe { libc::munmap(at, page) } as usize)
        })
    };
    // The thread is inside the unpatched function while the function is patched.
    let block = map(page);
    let blocker = Blocker::new(block, page);
    let inside = blocked(block.expose_provenance());
    blocker.wait();
    let monitor = MemHooks::start().unwrap();
    blocker.release();
    assert_eq!(inside.join().unwrap(), (0, 77));
    // The thread is inside the hook while the patch is removed.
    let block = map(page);
    let blocker = Blocker::new(block, page);
    let inside = blocked(block.expose_provenance());
    blocker.wait();
    let before = code(c"munmap");
    // The drop removes the patch. There is no subscription, so the drop does not wait for the
    // thread in the hook.
    drop(monitor);
    assert_ne!(code(c"munmap"), before, "the patch was removed");
    blocker.release();
    assert_eq!(inside.join().unwrap(), (0, 77));
}

/// Runs the hooked functions in a loop on several threads, while the calling thread patches and
/// unpatches them `patchings` times.
fn stress(patchings: usize) {
    let page = page();
    let threads = 4;
    let (running, start) = (AtomicBool::new(true), Barrier::new(threads + 1));
    let rounds = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                start.wait();
                while running.load(SeqCst) {
                    let at = map(4 * page);
                    // SAFETY: the calls fail, or change only pages that belong to this thread.
                    unsafe {
                        assert_eq!(
                            observed(|| libc::madvise(at, page, libc::MADV_DONTNEED) as usize),
                            (0, 77)
                        );
                        let fixed = ANONYMOUS | libc::MAP_FIXED;
                        assert_eq!(
                            observed(|| libc::mmap(at, page, RW, fixed, -1, 0).addr()),
                            (at.addr(), 77)
                        );
                        assert_eq!(
                            observed(|| libc::mremap(at, 4 * page, 2 * page, 0).addr()),
                            (at.addr(), 77)
                        );
                        assert_eq!(observed(|| libc::brk(ptr::null_mut()) as usize).0, 0);
                        assert_eq!(
                            observed(|| libc::shmdt(at) as usize),
                            (usize::MAX, libc::EINVAL)
                        );
                        assert_eq!(
                            observed(|| libc::shmat(-1, at, 0).addr()),
                            (usize::MAX, libc::EINVAL)
                        );
                        assert_eq!(observed(|| libc::munmap(at, 2 * page) as usize), (0, 77));
                    }
                    rounds.fetch_add(1, SeqCst);
                }
            });
        }
        start.wait();
        let before: Vec<_> = PATCHED.iter().map(|name| code(name)).collect();
        for _ in 0..patchings {
            let monitor = MemHooks::start().unwrap();
            for (name, before) in PATCHED.iter().zip(&before) {
                assert_ne!(code(name), *before, "{name:?}");
            }
            drop(monitor);
            for (name, before) in PATCHED.iter().zip(&before) {
                assert_eq!(code(name), *before, "{name:?}");
            }
        }
        let until = rounds.load(SeqCst) + 4 * threads as u64;
        while rounds.load(SeqCst) < until {
            thread::yield_now();
        }
        running.store(false, SeqCst);
    });
}

pub(crate) fn threads_run_the_functions_while_they_are_patched() {
    stress(200);
}

pub(crate) fn threads_run_the_functions_while_they_are_patched_many_times() {
    stress(20_000);
}

pub(crate) fn patches_are_installed_once_and_removed_with_the_last_monitor() {
    let page = page();
    let original: Vec<_> = PATCHED.iter().map(|name| code(name)).collect();
    let (first, second) = (MemHooks::start().unwrap(), MemHooks::start().unwrap());
    assert!(first.functions().contains(&"munmap"));
    let recorder = Recorder::new();
    let block = map(page);
    let here = range(block, page);
    let kept = second.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    // The test does not unsubscribe, because dropping the monitor must do it.
    first.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    drop(first);
    second.check().unwrap();
    unmap(block, page);
    // The check of `second` attaches a segment to an address of its own. The page size of the
    // segment is not known, so pages behind that address count as replaced.
    let mut seen = recorder.about(here);
    seen.retain(|(cause, _)| *cause != InvalidationCause::Replace);
    assert_eq!(
        seen,
        [(InvalidationCause::Unmap, How::Begun), (InvalidationCause::Unmap, How::Ended)],
        "notified once"
    );
    second.unsubscribe(kept);
    assert_eq!(Arc::strong_count(&recorder), 1, "the dropped monitor has ended its subscriptions");
    drop(second);
    for (name, original) in PATCHED.iter().zip(original) {
        assert_eq!(code(name), original, "{name:?} is unpatched");
    }
    let block = map(page);
    recorder.clear();
    unmap(block, page);
    assert_eq!(recorder.count(), 0);
    // The hooks can be started again.
    MemHooks::start().unwrap().check().unwrap();
}

/// Monitors that several threads start at once share the patches. The first start of a process
/// prepares the patches, and the other threads use them only when they are complete.
pub(crate) fn threads_that_start_at_once_share_the_patches() {
    const THREADS: usize = 8;
    let (page, together) = (page(), Barrier::new(THREADS));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                together.wait();
                for _ in 0..20 {
                    let hooks = MemHooks::start().unwrap();
                    unmap(map(page), page);
                    drop(hooks);
                }
            });
        }
    });
}

/// The `munmap` hook of another library, which makes a raw system call.
unsafe extern "C" fn their_munmap(at: *mut libc::c_void, len: usize) -> i32 {
    // SAFETY: the caller of munmap is responsible for its range.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) as i32 }
}

/// Patches `munmap` as other libraries do: writes an absolute jump over its first bytes, without
/// care for threads that run the function.
fn patch_as_others_do() {
    let at = entry(c"munmap");
    let target = (their_munmap as *const ()).addr() as u64;
    #[cfg(target_arch = "x86_64")]
    let jump = {
        // The code is `movabs $target,%r11; jmp *%r11`.
        let mut jump = vec![0x49, 0xbb];
        jump.extend(target.to_le_bytes());
        jump.extend([0x41, 0xff, 0xe3]);
        jump
    };
    #[cfg(target_arch = "aarch64")]
    let jump = {
        // The code is `ldr x16, #8; br x16`, followed by the target address.
        let mut jump = vec![0x50, 0x00, 0x00, 0x58, 0x00, 0x02, 0x1f, 0xd6];
        jump.extend(target.to_le_bytes());
        jump
    };
    let page = page();
    let start = at.map_addr(|at| at & !(page - 1)).cast();
    // SAFETY: the page stays readable and executable, and no thread runs `munmap` at this moment.
    unsafe {
        assert_eq!(libc::mprotect(start, page, RW | libc::PROT_EXEC), 0);
        ptr::copy_nonoverlapping(jump.as_ptr(), at, jump.len());
        assert_eq!(libc::mprotect(start, page, libc::PROT_READ | libc::PROT_EXEC), 0);
    }
}

pub(crate) fn later_patch_of_another_library_is_detected() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    monitor.check().unwrap();
    let recorder = Recorder::new();
    monitor.subscribe(range(block, page), Arc::<Recorder>::clone(&recorder)).unwrap();
    patch_as_others_do();
    let theirs = code(c"munmap");
    let own = std::env::current_exe().unwrap().display().to_string();
    let noticed: [&dyn Fn() -> Error; 3] =
        [&|| monitor.check().unwrap_err(), &|| MemHooks::start().unwrap_err(), &|| {
            monitor.subscribe(range(block, page), Recorder::new()).unwrap_err()
        }];
    for (number, notice) in noticed.iter().enumerate() {
        recorder.clear();
        let error = notice();
        let text = format!("{error:#}");
        assert!(error.is_busy() && text.contains("munmap") && text.contains(&own), "{text}");
        // The monitor may have missed changes since the patch. So it invalidates all memory once,
        // and watches nothing from then on.
        let told: &[_] =
            if number == 0 { &[(InvalidationCause::Unmap, How::Invalidated)] } else { &[] };
        assert_eq!(recorder.about(range(block, page)), told);
    }
    drop(monitor);
    assert_eq!(code(c"munmap"), theirs, "the other library's patch remains");
    unmap(block, page);
    let error = MemHooks::start().unwrap_err();
    assert!(error.is_busy() && error.to_string().contains("munmap"), "{error}");
}

pub(crate) fn earlier_patch_of_another_library_is_refused_by_name() {
    patch_as_others_do();
    let others = code(c"mmap");
    let error = MemHooks::start().unwrap_err();
    let own = std::env::current_exe().unwrap().display().to_string();
    let text = format!("{error:#}");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        text.contains("munmap") && text.contains("another library") && text.contains(&own),
        "{text}"
    );
    assert_eq!(code(c"mmap"), others, "no other function was patched");
}
