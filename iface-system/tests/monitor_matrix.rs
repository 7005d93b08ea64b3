//! MON-01: the table of `docs/monitors.md` matches the behaviour.
//!
//! Each column of the table is one monitor, which is tested in a process of its own. The process
//! makes the change of each line to subscribed memory, and compares the monitor's notifications
//! with the table.
#![allow(missing_docs)]

#[path = "monitors/mod.rs"]
mod monitors;

use std::{
    fs,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    ptr,
    sync::{Arc, atomic::Ordering::SeqCst},
    thread,
};

use hmem_core::{
    AddressRange, Result,
    monitor::{InvalidationCause, Monitor},
};
use hmem_iface_system::monitor::{ImportCallbacks, ImportMonitor, Layered, MemHooks};
use monitors::*;

cases! {
    /// MON-01
    the_table_has_these_lines_and_columns,
    /// MON-01
    memhooks_match_the_table,
    /// MON-01
    userfaultfd_matches_the_table,
    /// MON-01
    memhooks_and_userfaultfd_match_the_table,
    /// MON-01
    file_mapped_by_raw_calls_is_refused_by_memhooks_and_userfaultfd,
    /// MON-01
    huge_pages_are_watched_whole_by_userfaultfd,
    /// MON-01
    import_matches_the_table;
    slow:
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const COLUMNS: [&str; 4] = ["memhooks", "userfaultfd", "memhooks+userfaultfd", "import"];

/// A line of the table in `docs/monitors.md`: its name, and a function that maps memory. The
/// function returns the address, and an action that later makes the change of this line.
type Row = (&'static str, fn() -> (*mut libc::c_void, Box<dyn FnOnce()>));

/// Maps four pages. Returns their address, and an action that calls `act` with the address.
fn with_map(
    act: impl FnOnce(*mut libc::c_void) + 'static,
) -> (*mut libc::c_void, Box<dyn FnOnce()>) {
    let at = map(4 * page());
    (at, Box::new(move || act(at)))
}

fn with_file(
    shared: bool,
    act: impl FnOnce(&OwnedFd) + 'static,
) -> (*mut libc::c_void, Box<dyn FnOnce()>) {
    let (sharing, len) = (if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }, 4 * page());
    // SAFETY: the calls create a file and a mapping at an address that the kernel chooses.
    let (file, at) = unsafe {
        let file =
            OwnedFd::from_raw_fd(libc::memfd_create(c"hmem-matrix".as_ptr(), libc::MFD_CLOEXEC));
        assert_eq!(libc::ftruncate(file.as_raw_fd(), len as i64), 0);
        let at = libc::mmap(ptr::null_mut(), len, RW, sharing, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        (file, at)
    };
    (at, Box::new(move || act(&file)))
}

fn raw(number: libc::c_long, arguments: [usize; 5]) -> usize {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the calls change only memory that belongs to the test.
    unsafe { libc::syscall(number, a, b, c, d, e) as usize }
}

fn segment() -> (i32, *mut libc::c_void) {
    // SAFETY: the calls create a segment, and map it at an address that the kernel chooses.
    unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, 4 * page(), libc::IPC_CREAT | 0o600);
        let at = libc::shmat(id, ptr::null(), 0);
        assert_ne!(at.addr(), usize::MAX);
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
        (id, at)
    }
}

/// Maps four shared pages. Returns their address, and an action that replaces the first page by the
/// third with `remap`, and checks the result.
fn with_remapped_pages(remap: fn([usize; 5]) -> usize) -> (*mut libc::c_void, Box<dyn FnOnce()>) {
    let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let at = unsafe { libc::mmap(ptr::null_mut(), 4 * page(), RW, shared, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let word = move |index: usize| at.wrapping_byte_add(index * page()).cast::<u64>();
    // SAFETY: the memory belongs to the test, and no reference to it exists.
    unsafe { word(2).write_volatile(7) };
    let act = move || {
        assert_eq!(remap([at.addr(), page(), 0, 2, 0]), 0);
        // SAFETY: the memory belongs to the test, and no reference to it exists.
        assert_eq!(unsafe { word(0).read_volatile() }, 7, "the first page shows the third");
    };
    (at, Box::new(act))
}

/// Calls `madvise` for the first page of the mapping at `at`.
fn advise(at: *mut libc::c_void, advice: i32) {
    // SAFETY: the memory belongs to the test, and no reference to it exists.
    assert_eq!(unsafe { libc::madvise(at, page(), advice) }, 0);
}

const ROWS: [Row; 21] = [
    ("munmap", || with_map(|at| unmap(at, 4 * page()))),
    ("munmap of a part", || with_map(|at| unmap(at.wrapping_byte_add(page()), page()))),
    ("mremap to another place", || {
        with_map(|at| {
            let (len, onto) = (4 * page(), map(4 * page()));
            // SAFETY: the memory belongs to the test, and no reference to it exists.
            let moved = unsafe {
                libc::mremap(at, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, onto)
            };
            assert_eq!(moved, onto);
        })
    }),
    ("mremap to a smaller size", || {
        // SAFETY: the memory belongs to the test, and no reference to it exists.
        with_map(|at| assert_eq!(unsafe { libc::mremap(at, 4 * page(), page(), 0) }, at))
    }),
    ("madvise DONTNEED", || with_map(|at| advise(at, libc::MADV_DONTNEED))),
    ("madvise FREE", || with_map(|at| advise(at, libc::MADV_FREE))),
    ("madvise REMOVE", || {
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4 * page(),
                RW,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        (at, Box::new(move || advise(at, libc::MADV_REMOVE)))
    }),
    ("MAP_FIXED over it", || {
        with_map(|at| {
            // SAFETY: the memory belongs to the test, and no reference to it exists.
            let onto = unsafe { libc::mmap(at, page(), RW, ANONYMOUS | libc::MAP_FIXED, -1, 0) };
            assert_eq!(onto, at);
        })
    }),
    ("mremap onto it", || {
        with_map(|at| {
            let other = map(page());
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: the memory belongs to the test, and no reference to it exists.
            assert_eq!(unsafe { libc::mremap(other, page(), page(), fixed, at) }, at);
        })
    }),
    ("brk or sbrk to a lower address", || {
        // No other thread of this process moves the break.
        // SAFETY: the memory between the old break and the new one belongs to this function.
        let top = unsafe { libc::sbrk((8 * page()) as isize) };
        let at = top.wrapping_byte_add(top.align_offset(page()));
        let act = || {
            // SAFETY: the call returns the memory that the test got from `sbrk`, and nothing uses
            // it.
            let before = unsafe { libc::sbrk(-((8 * page()) as isize)) };
            assert_ne!(before.addr(), usize::MAX);
        };
        (at, Box::new(act))
    }),
    ("shmdt", || {
        let (_, at) = segment();
        // SAFETY: the segment belongs to the test, and nothing uses it any longer.
        (at, Box::new(move || assert_eq!(unsafe { libc::shmdt(at) }, 0)))
    }),
    ("shmat SHM_REMAP over it", || {
        with_map(|at| {
            let (id, _) = segment();
            // SAFETY: the memory belongs to the test, and no reference to it exists.
            assert_eq!(unsafe { libc::shmat(id, at, libc::SHM_REMAP) }, at);
        })
    }),
    ("remap_file_pages", || {
        with_remapped_pages(|[at, size, protection, offset, flags]| {
            let at = ptr::with_exposed_provenance_mut(at);
            let (protection, flags) = (protection as i32, flags as i32);
            // SAFETY: the memory belongs to the test, and no reference to it exists.
            let done = unsafe { libc::remap_file_pages(at, size, protection, offset, flags) };
            done as usize
        })
    }),
    ("free of a large block", || {
        // SAFETY: the test owns the block and frees it once. malloc maps blocks of this size
        // separately.
        let block = unsafe { libc::malloc(64 << 20) };
        // SAFETY: the test owns the block, and nothing uses it any longer.
        (block, Box::new(move || unsafe { libc::free(block) }))
    }),
    ("raw system call munmap", || with_map(|at| raw_unmap(at, 4 * page()))),
    ("raw system call madvise", || {
        with_map(|at| {
            assert_eq!(
                raw(libc::SYS_madvise, [at.addr(), page(), libc::MADV_DONTNEED as usize, 0, 0]),
                0
            )
        })
    }),
    ("raw system call mremap", || {
        with_map(|at| {
            assert_eq!(raw(libc::SYS_mremap, [at.addr(), 4 * page(), page(), 0, 0]), at.addr())
        })
    }),
    ("raw system call remap_file_pages", || {
        with_remapped_pages(|arguments| raw(libc::SYS_remap_file_pages, arguments))
    }),
    ("truncating the memory file behind", || {
        // SAFETY: the file belongs to the test, and nothing accesses its pages.
        with_file(true, |file| assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, 0))
    }),
    ("punching a hole into the memory file behind", || {
        with_file(true, |file| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: the file belongs to the test, and nothing accesses its pages.
            assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, page() as i64) }, 0);
        })
    }),
    ("truncating the file behind a private mapping", || {
        // SAFETY: the file belongs to the test, and nothing accesses its pages.
        with_file(false, |file| assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, 0))
    }),
];

/// Returns the lines of the table in `docs/monitors.md`: the name of a change, and one word for
/// each monitor.
fn documented() -> Vec<(String, Vec<String>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/monitors.md");
    let text = fs::read_to_string(path).expect("docs/monitors.md is there");
    let (_, after) =
        text.split_once("<!-- The test `monitor_matrix`").expect("the table is marked");
    let mut lines = after
        .lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let header = cells(lines.next().expect("a header"));
    assert_eq!(header[1..], COLUMNS);
    lines.skip(1).map(cells).map(|mut cells| (cells.remove(0), cells)).collect()
}

fn the_table_has_these_lines_and_columns() {
    let documented: Vec<_> = documented().into_iter().map(|(name, _)| name).collect();
    assert_eq!(documented, ROWS.map(|(name, _)| name));
}

/// Tests one column of the documented table: makes the change of every line to memory that
/// `monitor` watches, and compares the notifications with column `name`. Before each change, calls
/// `report` with the range.
fn column(name: &str, monitor: &dyn Monitor, report: &dyn Fn(AddressRange)) {
    let index = COLUMNS.iter().position(|column| *column == name).expect("a column");
    assert_eq!(monitor.name(), name);
    let mut wrong = Vec::new();
    for ((row, prepare), (_, expected)) in ROWS.iter().zip(documented()) {
        let recorder = Recorder::new();
        let (at, act) = prepare();
        let here = range(at, 4 * page());
        let seen = match monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)) {
            Err(error) => {
                assert!(
                    error.is_unsupported() && error.context_value("why").is_some(),
                    "{row}: {error}"
                );
                act();
                "refused"
            }
            Ok(subscription) => {
                recorder.clear();
                report(here);
                act();
                // The call has returned, so the monitor has read its event, if any. When no gate is
                // closed any more, the monitor has notified the subscribers too.
                while recorder.gates.load(SeqCst) != 0 {
                    thread::yield_now();
                }
                monitor.unsubscribe(subscription);
                let about = recorder.about(here);
                let how = |sought| about.iter().any(|(_, how)| *how == sought);
                if about.iter().any(|(cause, _)| *cause == InvalidationCause::Application) {
                    "told"
                } else if how(How::Begun) && how(How::Ended) {
                    "before"
                } else if how(How::Invalidated) {
                    "event"
                } else {
                    "unseen"
                }
            }
        };
        if seen != expected[index] {
            wrong.push(format!("{row} under {name}: documented {}, seen {seen}", expected[index]));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn memhooks_match_the_table() {
    column("memhooks", &*MemHooks::start().unwrap(), &|_| {});
}

fn userfaultfd_matches_the_table() {
    column("userfaultfd", &*start_userfaultfd(), &|_| {});
}

fn memhooks_and_userfaultfd_match_the_table() {
    let uffd = start_userfaultfd();
    let monitor = Layered::new(MemHooks::start().unwrap(), Arc::clone(&uffd));
    column("memhooks+userfaultfd", &*monitor, &|_| {});
    assert_eq!(uffd.subscriptions(), 0, "an ended subscription ends in both monitors");
    // The one refusal is for the System V segment, which userfaultfd cannot watch.
    assert_eq!(monitor.uffd_refusals(), 1);
    assert!(monitor.why_uffd_refusals().unwrap().contains("System V"));
}

/// Tests that the monitor refuses a file at addresses that had anonymous memory before, although no
/// hook sees that change. Userfaultfd watches memory files, and refuses other files itself.
fn file_mapped_by_raw_calls_is_refused_by_memhooks_and_userfaultfd() {
    let monitor = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    let memory_file = || {
        // SAFETY: the call creates a file and returns its only fd.
        let fd = unsafe { libc::memfd_create(c"hmem-matrix".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the fd is new, and nothing else owns it.
        fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let file = fs::File::open("/proc/self/exe").unwrap();
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE);
    for file in [memory_file(), file] {
        let at = map(page());
        let here = range(at, page());
        let recorder = Recorder::new();
        // The hooks now remember that the page can be watched, until a hook runs.
        for _ in 0..2 {
            let invalidator = Arc::<Recorder>::clone(&recorder);
            monitor.unsubscribe(monitor.subscribe(here, invalidator).unwrap());
        }
        raw_unmap(at, page());
        let fd = file.as_raw_fd();
        // SAFETY: the test has just unmapped the page, and the call replaces no mapping.
        let mapped =
            unsafe { libc::syscall(libc::SYS_mmap, at, page(), protection, flags, fd, 0_usize) };
        assert_eq!(mapped as usize, at.addr());
        let refusals = monitor.uffd_refusals();
        let error = monitor.subscribe(here, recorder).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("truncated"), "{error}");
        assert_eq!(monitor.uffd_refusals(), refusals, "the hooks alone do not watch the file");
    }
}

/// Tests that a subscription to a part of a huge page watches the whole page. The machine needs no
/// huge pages, because the test only maps one without reserving or touching it.
fn huge_pages_are_watched_whole_by_userfaultfd() {
    const HUGE: usize = 2 << 20;
    let monitor = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    let flags = ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_HUGETLB | 21 << libc::MAP_HUGE_SHIFT;
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let at = unsafe { libc::mmap(ptr::null_mut(), HUGE, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    let recorder = Recorder::new();
    let part = range(at, page());
    let subscription = monitor.subscribe(part, Arc::<Recorder>::clone(&recorder)).unwrap();
    assert_eq!(monitor.uffd_refusals(), 0, "{:?}", monitor.why_uffd_refusals());
    raw(libc::SYS_munmap, [at.addr(), HUGE, 0, 0, 0]);
    // The monitor reads the event before the call returns, but may notify subscribers later.
    while recorder.about(part).is_empty() {
        thread::yield_now();
    }
    monitor.unsubscribe(subscription);
}

/// Import callbacks that accept every range.
#[derive(Debug)]
struct AcceptAll;

impl ImportCallbacks for AcceptAll {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}

fn import_matches_the_table() {
    let monitor = ImportMonitor::new(Arc::new(AcceptAll)).unwrap();
    column("import", &*monitor, &|range| monitor.invalidate(range));
}
