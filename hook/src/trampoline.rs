//! The code between a patched function and its hook.
//!
//! The code is in a mapping near the function, because the jump at the function's entry has a
//! limited reach.

#![allow(unsafe_code, reason = "maps and writes trampolines")]

use std::fs;

use hmem_core::{Address, Error, ErrorKind, Mapping, Result};
use rustix::{
    io::Errno,
    mm::{MapFlags, MprotectFlags, ProtFlags},
    param::page_size,
};

use crate::{MonitorName, arch, entry::PatchPoint};

/// The size in bytes of a slot of the mapping. A slot holds the trampoline of one function.
const SLOT: u64 = 128;

/// The maximum number of times that free addresses are looked up. Another thread can map an address
/// between the lookup and the `mmap`.
const ATTEMPTS: usize = 16;

/// The mapping that contains the trampolines. [`Patches::plan`](crate::Patches::plan) never drops
/// the value after success, because dropping it unmaps the memory.
#[derive(Debug)]
pub(super) struct Trampolines {
    monitor: MonitorName,
    mapping: Mapping,
}

impl Trampolines {
    /// Maps memory for the trampolines of `functions` functions, near enough to the address `near`
    /// for a jump. The memory is writable until [`Trampolines::seal`].
    ///
    /// # Errors
    /// - OutOfResources: no free address is near enough, other threads mapped those that were, or
    ///   the process has too many mappings.
    /// - The error of the kernel if it refuses the mapping, or if `/proc/self/maps` cannot be read.
    pub(super) fn new(monitor: MonitorName, near: u64, functions: usize) -> Result<Self> {
        let len = (functions as u64 * SLOT).next_multiple_of(page_size() as u64);
        let failed = |call: &'static str, errno: Errno| Error::os(errno, call).iface(monitor.iface);
        let distance = |start: u64| start.abs_diff(near).max((start + len).abs_diff(near));
        let mut why = "other threads map every free address near the library";
        for _ in 0..ATTEMPTS {
            let maps = fs::read_to_string("/proc/self/maps").map_err(|error| {
                failed("read /proc/self/maps", Errno::from_io_error(&error).unwrap_or(Errno::IO))
                    .remedy("mount /proc: hooks must find free addresses near the library")
            })?;
            let mut free: Vec<_> =
                gaps(&maps, len).filter(|start| distance(*start) < arch::REACH).collect();
            free.sort_by_key(|start| distance(*start));
            if free.is_empty() {
                why = "no free address lies within a jump of the library";
                break;
            }
            for start in free {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
                match Mapping::anonymous_near(Address(start), len as usize, prot, flags) {
                    Ok(mapping) if mapping.address().0 == start => {
                        return Ok(Self { monitor, mapping });
                    }
                    // Another thread mapped the address meanwhile. A kernel that does not know
                    // `FIXED_NOREPLACE` uses the address as a hint, and then maps elsewhere.
                    Ok(_) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(failed("mmap", errno)),
                }
            }
        }
        Err(Error::new(ErrorKind::OutOfResources, "map trampolines")
            .iface(monitor.iface)
            .context("near", Address(near))
            .context("why", why)
            .remedy(monitor.fallback_hint))
    }

    /// Writes the trampoline of the function at `entry` into the slot with number `slot`.
    ///
    /// Returns the addresses of the trampoline's two parts. The first part jumps to the hook. The
    /// second part runs the copied instructions and continues the original function. Returns `None`
    /// if a target of the second part is out of reach.
    pub(super) fn write(
        &self,
        slot: usize,
        hook: u64,
        entry: u64,
        point: &PatchPoint,
    ) -> Option<(u64, u64)> {
        let to_hook = self.mapping.address().0 + slot as u64 * SLOT;
        assert!((slot as u64 + 1) * SLOT <= self.mapping.len() as u64, "each function has a slot");
        let mut code = point.undo.clone();
        code.extend(arch::absolute_jump(hook));
        code.resize(code.len().next_multiple_of(16), 0);
        let past = to_hook + code.len() as u64;
        let mut skipped = point.skipped.clone();
        for relative in &point.relative {
            skipped[relative.at..][..4].copy_from_slice(&arch::displacement(past, relative)?);
        }
        code.extend(skipped);
        code.extend(arch::jump(to_hook + code.len() as u64, entry + point.resume as u64)?);
        assert!(code.len() as u64 <= SLOT, "the trampoline is {} bytes long", code.len());
        let at = std::ptr::with_exposed_provenance_mut::<u8>(to_hook as usize);
        // SAFETY: the slot lies in the mapping, which no thread runs or reads before it is sealed.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), at, code.len()) };
        Some((to_hook, past))
    }

    /// Makes the mapping executable and no longer writable.
    pub(super) fn seal(&self) -> Result<()> {
        let (at, len) = (self.mapping.as_ptr().cast(), self.mapping.len());
        // SAFETY: `new` made the mapping, and this value owns it.
        unsafe { rustix::mm::mprotect(at, len, MprotectFlags::READ | MprotectFlags::EXEC) }
            .map_err(|errno| code_change_refused(self.monitor, errno, "mprotect of trampolines"))?;
        // SAFETY: `new` mapped the bytes, and this value owns them.
        unsafe { arch::flush(self.mapping.address().0, len) };
        Ok(())
    }
}

/// Returns the error for a failed system call that makes memory executable or code writable.
pub(super) fn code_change_refused(
    monitor: MonitorName,
    errno: Errno,
    operation: &'static str,
) -> Error {
    let error = Error::os(errno, operation).iface(monitor.iface).context("monitor", monitor.name);
    let remedy = match errno {
        Errno::NOMEM => "the process has too many mappings: raise vm.max_map_count",
        _ => {
            "a security policy (SELinux execmod or execmem, PR_SET_MDWE, seccomp) forbids changing \
             code: allow it"
        }
    };
    error.remedy(format!("{remedy}, or {}", monitor.fallback_hint))
}

/// Returns free addresses with room for `len` bytes, at the ends of the gaps between the mappings
/// in `maps` (`/proc/self/maps`).
fn gaps(maps: &str, len: u64) -> impl Iterator<Item = u64> {
    // The distance in bytes to keep from guard pages, and from mappings that grow.
    const MARGIN: u64 = 1 << 20;
    let page = page_size() as u64;
    let mut last_end = None::<u64>;
    maps.lines()
        .flat_map(move |line| {
            let bounds = line.split(' ').next().and_then(|bounds| bounds.split_once('-'));
            let bounds = bounds.and_then(|(start, end)| {
                Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
            });
            let Some((start, end)) = bounds else { return [None, None] };
            let gap = last_end.replace(end).filter(|from| start.saturating_sub(*from) >= len);
            let grows = line.ends_with("[stack]") || line.ends_with("[vsyscall]");
            match gap {
                // The gap is too narrow for margins. Such gaps lie only between libraries, where no
                // mapping grows.
                Some(from) if start - from < 3 * MARGIN + len => {
                    [(!grows).then_some(start - len), None]
                }
                Some(from) => {
                    let above = (from + MARGIN).next_multiple_of(page);
                    [Some(above), (!grows).then_some(start - MARGIN - len)]
                }
                None => [None, None],
            }
        })
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::{
        ptr,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;

    #[test]
    fn refused_change_of_code_names_its_cause() {
        let monitor = MonitorName {
            name: "test",
            iface: hmem_core::IfaceKind::SYSTEM,
            fallback_hint: "wait",
        };
        for (errno, remedy) in [
            (Errno::NOMEM, "raise vm.max_map_count, or wait"),
            (Errno::ACCESS, "changing code: allow it, or wait"),
        ] {
            let error = code_change_refused(monitor, errno, "mprotect");
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }

    /// Trampolines are mapped although another thread maps and unmaps the only candidate address.
    #[test]
    fn trampolines_are_mapped_while_other_threads_map_memory() {
        // Narrower than three margins of `gaps`, which then names only the end of the gap.
        const GAP: usize = 1 << 20;
        let (page, prot) = (page_size(), ProtFlags::empty());
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // Addresses outside this reservation are out of reach of a jump from its middle.
        let around = Mapping::anonymous(5 << 30, prot, flags).expect("addresses");
        let gap = around.address().0 + (5 << 29);
        let at = ptr::with_exposed_provenance_mut(gap as usize);
        // SAFETY: nothing uses the mapping. It is forgotten below, and stays until the process
        // ends, because its unmapping would also unmap what others map in the gap.
        unsafe { rustix::mm::munmap(at, GAP) }.expect("a gap");
        std::mem::forget(around);
        let monitor = MonitorName {
            name: "test",
            iface: hmem_core::IfaceKind::SYSTEM,
            fallback_hint: "wait",
        };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let last = Address(gap + (GAP - page) as u64);
                let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
                while !done.load(Ordering::Relaxed) {
                    drop(Mapping::anonymous_near(last, page, prot, flags));
                }
            });
            let refused = (0..1000).find_map(|_| Trampolines::new(monitor, gap, 1).err());
            done.store(true, Ordering::Relaxed);
            assert!(refused.is_none(), "{refused:?}");
        });
    }

    #[test]
    fn gaps_are_free_and_keep_clear_of_the_stack() {
        let page = page_size() as u64;
        let maps = format!(
            "10000-20000 r-xp 0 0:0 0 /a\n\
             {:x}-{:x} r-xp 0 0:0 0 /b\n\
             40000000-{:x} rw-p 0 0:0 0 \n\
             7ff000000000-7ff000021000 rw-p 0 0:0 0   [stack]\n",
            0x2_0000 + page,
            0x2_0000 + 16 * page,
            0x4000_0000 + page,
        );
        let found: Vec<_> = gaps(&maps, page).collect();
        let after_b = 0x12_0000 + 16 * page;
        assert_eq!(found, [0x2_0000, after_b, 0x3ff0_0000 - page, 0x4010_0000 + page]);
    }
}
