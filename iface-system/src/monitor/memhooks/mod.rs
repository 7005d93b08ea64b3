//! Changes noticed at the entry of the C library's functions, before the memory goes.
//!
//! `munmap`, `mmap`, `mremap`, `madvise`, `process_madvise`, `brk` (and so `sbrk`), `shmat` and `shmdt` of glibc are
//! patched where they begin, so that the library's own calls (of `free`, of ending threads) are seen too. What is not
//! seen: raw system calls, the dynamic loader's own `munmap` (`dlclose`), and what other processes do.
//!
//! The patching is that of `hmem-hook`; `hook.rs` has the rules of the hooks, `process.rs` what is process-wide.

mod function;
mod hook;
mod process;
mod self_test;

use std::sync::Arc;

use hmem_core::{
    AddressRange, Allocation, IfaceKind, Result,
    monitor::{Cause, Invalidator, Monitor, MonitorStyle, Subscription},
};
use hmem_hook::{MonitorName, SLOTS, Table};
use parking_lot::Mutex;

use self::process::Process;
use super::area;

const NAME: MonitorName =
    MonitorName { name: "memhooks", iface: IfaceKind::SYSTEM, otherwise: "use the userfaultfd monitor" };

/// Areas that are remembered as watchable.
const REMEMBERED: usize = 16;

/// The monitor that patches the C library.
///
/// All values of a process share the patches: the first one puts them in, the last one to be dropped takes them out.
#[derive(Debug)]
pub struct MemHooks {
    process: &'static Process,
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    next: u64,
    subscriptions: [u64; SLOTS],
    remembered: Remembered,
}

/// Areas that were found to be memory and nothing else, as long as no hook has run since.
///
/// Asking the kernel costs a microsecond or more, at each registration; a program that registers much and unmaps
/// little asks once for each area.
#[derive(Debug, Default)]
struct Remembered {
    stamp: u64,
    areas: Vec<(u64, u64)>,
    next: usize,
}

impl Remembered {
    fn check(&mut self, table: &Table, range: AddressRange) -> Result<()> {
        let last = range.start().0.saturating_add(range.len().saturating_sub(1));
        // Taken before looking, and none while a change is under way: what is found then may be gone already.
        let stamp = table.quiet_stamp();
        if stamp == Some(self.stamp) {
            if self.areas.iter().any(|(start, end)| *start <= range.start().0 && last < *end) {
                return Ok(());
            }
        } else {
            self.areas.clear();
        }
        let area = area::check(range, NAME.name)?;
        if let Some(stamp) = stamp {
            self.stamp = stamp;
            if self.areas.len() < REMEMBERED {
                self.areas.push((area.start, area.end));
            } else {
                self.areas[self.next % REMEMBERED] = (area.start, area.end);
                self.next += 1;
            }
        }
        Ok(())
    }
}

impl MemHooks {
    /// Patches the C library, and sees through each function that changes arrive.
    ///
    /// # Errors
    /// Unavailable without a dynamically linked glibc. Unsupported naming the function whose entry does not allow
    /// it, and whose code it leads to if another library was there first. PermissionDenied or AccessDenied where a
    /// security policy forbids changing code. Busy if a change did not arrive.
    pub fn start() -> Result<Arc<Self>> {
        let process = process::get()?;
        process.install(process::plan)?;
        let own = Own { next: 0, subscriptions: [0; SLOTS], remembered: Remembered::default() };
        let this = Arc::new(Self { process, own: Mutex::new(own) });
        this.check()?;
        Ok(this)
    }

    /// Sees again that every patch is in place, and that a change arrives through each function.
    ///
    /// # Errors
    /// Busy, naming the function and the library that overwrote its patch or stands before it; Unsupported in a
    /// forked child.
    pub fn check(&self) -> Result<()> {
        if !self.is_ours() {
            return Err(NAME.forked("check"));
        }
        process::plan()?.in_place()?;
        self_test::run(self.process)
    }

    /// Whether this process made it, and not one that it was forked from.
    pub(super) fn is_ours(&self) -> bool {
        self.process.is_ours()
    }

    /// The functions that are patched.
    ///
    /// # Errors
    /// As [`MemHooks::start`].
    pub fn functions(&self) -> Result<Vec<&'static str>> {
        Ok(process::plan()?.functions().collect())
    }
}

impl Monitor for MemHooks {
    fn name(&self) -> &str {
        NAME.name
    }

    fn why(&self) -> String {
        "told by the C library's functions before the memory goes".into()
    }

    fn style(&self) -> MonitorStyle {
        MonitorStyle::Callback
    }

    fn watches(&self, cause: Cause) -> bool {
        matches!(
            cause,
            Cause::Unmap | Cause::Remap | Cause::Discard | Cause::Replace | Cause::Shrink | Cause::Detach
        )
    }

    fn subscribe(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Result<Subscription> {
        // First: in a child no lock may be taken, since another thread may have held it in the parent.
        if !self.is_ours() {
            return Err(NAME.forked("subscribe"));
        }
        process::plan()?.in_place()?;
        let slot = self.process.subscribers().add(invalidator)?;
        let mut own = self.own.lock();
        // Only now: a change from here on is told, and what one before has left is seen here.
        if let Err(error) = own.remembered.check(self.process.subscribers().table(), range) {
            drop(own);
            self.process.subscribers().remove(slot);
            return Err(error);
        }
        own.subscriptions[usize::from(slot)] += 1;
        own.next += 1;
        Ok(Subscription(own.next * SLOTS as u64 + u64::from(slot)))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.is_ours() {
            return;
        }
        let slot = subscription.0 % SLOTS as u64;
        let mut own = self.own.lock();
        let Some(left) = own.subscriptions[slot as usize].checked_sub(1) else { return };
        own.subscriptions[slot as usize] = left;
        drop(own);
        self.process.subscribers().remove(slot as u8);
    }

    fn valid(&self, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for MemHooks {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let own = self.own.get_mut();
        for (slot, count) in own.subscriptions.iter().enumerate() {
            for _ in 0..*count {
                self.process.subscribers().remove(slot as u8);
            }
        }
        if let Ok(patches) = process::plan() {
            self.process.uninstall(patches);
        }
    }
}
