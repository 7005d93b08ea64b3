//! Pending discards: calls of `madvise(2)` that may not have freed their pages yet.
//!
//! The kernel sends the event of MADV_DONTNEED, MADV_FREE or MADV_REMOVE *before* it frees the
//! pages. The calling thread continues as soon as the event is read, and frees the pages some time
//! later. A registration in between would pin the old pages. So the range of such an event is
//! *pending*, and not cached, until the call has certainly returned.
//!
//! The event does not name the calling thread. So this module looks at all threads of the process
//! in `/proc/self/task`. The call has certainly returned once each thread was seen outside such
//! calls after the event was read. Two kinds of threads are seen outside:
//!
//! - a thread that sleeps elsewhere, for example in another system call;
//! - the thread that reads `/proc/self/task`.
//!
//! A running thread may be in the call or not, which `/proc` does not show. While some thread runs
//! without a pause, the range therefore stays uncached.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    ops::Range,
    os::unix::fs::MetadataExt,
    path::Path,
};

use super::thread::UffdState;

/// The maximum number of pending discards in [`Discards`]. One discard more, and a single discard
/// of all memory replaces them.
const PENDING: usize = 4096;

/// Number of times that [`Discards::settled`] examines the threads before it returns false.
const LOOKS: u32 = 16;

/// The kernel's flag for an io_uring worker thread (`linux/sched.h`). A worker makes no system
/// calls itself.
const PF_IO_WORKER: u64 = 0x10;

const TASKS: &str = "/proc/self/task";

/// The pending discards: those for which the `madvise` call may not have returned yet. Also records
/// for each thread when it was last seen outside such calls.
///
/// Discards are numbered in the order in which the thread that reads events reported them.
#[derive(Debug, Default)]
pub(super) struct Discards {
    /// The number of the latest discard that was reported.
    last: u64,
    /// The range and the number of each pending discard, oldest first.
    pending: Vec<(Range<u64>, u64)>,
    /// For each thread id, the number of the latest discard when the thread was last seen outside
    /// calls that discard memory. The thread is in no call of a discard with that number or a lower
    /// one.
    outside: HashMap<u32, u64>,
}

impl Discards {
    /// Moves the discards in the queue of `shared` to the pending discards. The thread that reads
    /// events has put them into the queue.
    pub(super) fn take(&mut self, shared: &UffdState) {
        while let Some((start, len)) = shared.discarded.take() {
            self.add(start..start.saturating_add(len));
        }
        if shared.take_lost_discards() {
            self.add(0..u64::MAX);
        }
    }

    fn add(&mut self, range: Range<u64>) {
        self.last += 1;
        self.pending.retain(|(older, _)| older.start < range.start || range.end < older.end);
        if self.pending.len() >= PENDING {
            self.pending.clear();
            self.pending.push((0..u64::MAX, self.last));
        } else {
            self.pending.push((range, self.last));
        }
    }

    /// Returns true if no discard is pending.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns true if no pending discard contains pages of `range`. As long as one does, examines
    /// the threads of the process, which may show that the call of `madvise` has returned. Returns
    /// false after [`LOOKS`] such attempts, or if `/proc` cannot be read.
    pub(super) fn settled(&mut self, range: &Range<u64>) -> bool {
        for _ in 0..LOOKS {
            let touches = |(pending, _): &(Range<u64>, u64)| {
                pending.start < range.end && range.start < pending.end
            };
            if !self.pending.iter().any(touches) {
                return true;
            }
            // Without `/proc`, any thread may still be in a call of `madvise`.
            if self.look().is_err() {
                return false;
            }
            std::thread::yield_now();
        }
        false
    }

    /// Examines every thread of the process once. Removes each pending discard for which the call
    /// has certainly returned.
    fn look(&mut self) -> io::Result<()> {
        let mut tasks = HashSet::new();
        for task in fs::read_dir(TASKS)? {
            if let Some(task) = task?.file_name().to_str().and_then(|name| name.parse().ok()) {
                tasks.insert(task);
            }
        }
        // If threads ended while the list was read, the list may lack a live thread.
        if !is_complete(&tasks, fs::metadata(TASKS)?.nlink()) {
            return Ok(());
        }
        self.outside.retain(|task, _| tasks.contains(task));
        let mut over = self.last;
        for task in tasks {
            let outside = self.outside.entry(task).or_default();
            if *outside < self.last && is_outside(task) {
                *outside = self.last;
            }
            over = over.min(*outside);
        }
        self.pending.retain(|(_, number)| *number > over);
        Ok(())
    }
}

/// Returns true if `tasks`, a list of threads, certainly contains every thread that existed when
/// the number `links` of links to the folder [`TASKS`] was read. The list must be older than that
/// number.
///
/// The folder has a link for each live thread, and two more. An equal number of threads is not
/// enough: a listed thread that has ended hides a live thread that the list lacks. If all listed
/// threads are still alive, they are as many as the live threads, and so the same.
fn is_complete(tasks: &HashSet<u32>, links: u64) -> bool {
    links == tasks.len() as u64 + 2
        && tasks.iter().all(|task| Path::new(&format!("{TASKS}/{task}")).exists())
}

/// Returns true if the thread with id `task` is certainly not in a call that discards memory at
/// this moment.
fn is_outside(task: u32) -> bool {
    if rustix::thread::gettid().as_raw_nonzero().get() as u32 == task {
        return true;
    }
    let folder = format!("{TASKS}/{task}");
    let gone = |error: &io::Error| {
        error.raw_os_error() == Some(libc::ESRCH) || !Path::new(&folder).exists()
    };
    let status = match fs::read_to_string(format!("{folder}/stat")) {
        Ok(status) => status,
        Err(error) => return gone(&error),
    };
    match state_and_flags(&status) {
        None => false,
        Some(('Z' | 'X', _)) => true,
        // A worker that discards memory does not sleep interruptibly (`S`) between the event and
        // the end of the discard.
        Some((state, flags)) if flags & PF_IO_WORKER != 0 => state == 'S',
        Some(_) => match fs::read_to_string(format!("{folder}/syscall")) {
            Ok(line) => is_other_call(&line),
            Err(error) => gone(&error),
        },
    }
}

/// Parses a line of `/proc/[pid]/stat`. Returns the letter of the thread's state, and its kernel
/// flags.
fn state_and_flags(line: &str) -> Option<(char, u64)> {
    // The thread's name precedes these fields, and may contain any character.
    let mut words = line.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?.chars().next()?;
    Some((state, words.nth(5)?.parse().ok()?))
}

/// Returns true if a thread's `line` of `/proc/[pid]/syscall` shows that the thread sleeps outside
/// calls that discard memory. A line that begins with -1 stands for a thread that sleeps outside
/// system calls.
fn is_other_call(line: &str) -> bool {
    let number = line.split_whitespace().next().and_then(|number| number.parse().ok());
    number.is_some_and(|number: libc::c_long| {
        !matches!(number, libc::SYS_madvise | libc::SYS_process_madvise)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    };

    use super::*;

    #[test]
    fn thread_in_another_call_is_outside() {
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert!(is_outside(own));
        let (send, receive) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            ended.recv().unwrap_err();
        });
        let task = receive.recv().unwrap();
        while !is_outside(task) {
            std::thread::yield_now();
        }
        drop(end);
        thread.join().unwrap();
        while !is_outside(task) {
            std::thread::yield_now();
        }
        assert!(!is_other_call("running\n"));
        for call in [libc::SYS_madvise, libc::SYS_process_madvise] {
            assert!(!is_other_call(&format!("{call} 0x1000 0x1000 0x4 0x0 0x0 0x0 0x7f 0x7f\n")));
        }
        assert!(is_other_call("202 0x1000 0x1000 0x4 0x0 0x0 0x0 0x7f 0x7f\n"));
        assert!(is_other_call("-1 0x7f 0x7f\n"));
        assert!(!is_other_call(""));
        assert_eq!(state_and_flags("7 (a) b) S 1 2 3 4 5 16 8"), Some(('S', 16)));
    }

    #[test]
    fn list_with_an_ended_thread_may_lack_a_live_one() {
        let id = || rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (own, ended) = (id(), std::thread::spawn(id).join().unwrap());
        // The kernel removes the thread from the folder after `join` has returned.
        while Path::new(&format!("{TASKS}/{ended}")).exists() {
            std::thread::yield_now();
        }
        assert!(is_complete(&HashSet::from([own]), 3));
        assert!(!is_complete(&HashSet::from([own]), 4), "a thread is not listed");
        assert!(!is_complete(&HashSet::from([own, ended]), 4), "the list lacks a live thread");
    }

    #[test]
    fn range_is_pending_until_every_thread_was_outside() {
        let mut discards = Discards::default();
        discards.add(0x1000..0x2000);
        assert!(discards.settled(&(0x2000..0x3000)), "next to it");
        // A thread that runs without a pause, so `/proc` does not show if it is in a system call.
        let (runs, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                runs.store(true, SeqCst);
                while !stop.load(SeqCst) {
                    std::hint::spin_loop();
                }
            });
            while !runs.load(SeqCst) {
                std::thread::yield_now();
            }
            let settled = discards.settled(&(0x1fff..0x3000));
            stop.store(true, SeqCst);
            assert!(!settled);
        });
        // Other tests of this process run at the same time. Each of their threads sleeps at some
        // moment.
        while !discards.settled(&(0x1000..0x1001)) {
            std::thread::yield_now();
        }
        assert!(discards.is_empty());
    }

    #[test]
    fn too_many_pending_ranges_become_all_memory() {
        let mut discards = Discards::default();
        for page in 0..PENDING as u64 {
            discards.add(2 * page..2 * page + 1);
            discards.add(2 * page..2 * page + 1);
        }
        assert_eq!(discards.pending.len(), PENDING, "a repeated discard replaces the earlier one");
        discards.add(u64::MAX - 1..u64::MAX);
        assert_eq!(discards.pending, [(0..u64::MAX, discards.last)]);
    }
}
