//! The hooked functions of the C library, and the memory that each unmaps or discards.

#![allow(unsafe_code, reason = "system calls on the memory that a hooked call changes")]

use hmem_core::{AddressRange, monitor::InvalidationCause};
use hmem_hook::clamped;

use super::cancellation::without_cancellation;
use crate::{monitor::area, sys};

/// The six argument registers of a call.
pub(super) type Args = [usize; 6];

/// The memory that one call unmaps, replaces or discards: up to two ranges, each with the cause of
/// its invalidation.
pub(super) type AffectedRanges = [Option<(AddressRange, InvalidationCause)>; 2];

/// Returns `len` bytes from `start` as one affected range, or no range if `len` is 0.
#[inline(always)]
fn one_range(start: u64, len: u64, cause: InvalidationCause) -> AffectedRanges {
    [(len > 0).then(|| (clamped(start, len), cause)), None]
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $variant:ident = ($name:literal, $nr:expr),)+) => {
        /// A hooked function of the C library.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(super) enum Function { $($(#[doc = $doc])+ $variant,)+ }

        impl Function {
            /// All functions, in the order of the enum's discriminants.
            pub(super) const ALL: [Self; [$($nr),+].len()] = [$(Self::$variant),+];

            /// Returns the function's symbol in the C library.
            pub(super) const fn symbol(self) -> &'static std::ffi::CStr {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Returns the number of the system call that the function makes.
            pub(super) const fn nr(self) -> i64 {
                match self { $(Self::$variant => $nr as i64,)+ }
            }
        }
    };
}

functions! {
    /// The function `munmap(address, length)`, which unmaps memory.
    Munmap = (c"munmap", libc::SYS_munmap),
    /// The function `mmap(address, length, protection, flags, fd, offset)`, which may replace
    /// mappings.
    Mmap = (c"mmap", libc::SYS_mmap),
    /// The function `mremap(old, old length, new length, flags, new)`, which may move or shrink a
    /// mapping.
    Mremap = (c"mremap", libc::SYS_mremap),
    /// The function `madvise(address, length, advice)`, which may discard pages.
    Madvise = (c"madvise", libc::SYS_madvise),
    /// The function `process_madvise(pidfd, ranges, count, advice, flags)`, which may discard
    /// pages.
    ProcessMadvise = (c"process_madvise", libc::SYS_process_madvise),
    /// The function `brk(address)`, which may shrink the heap. `sbrk` calls it.
    Brk = (c"brk", libc::SYS_brk),
    /// The function `shmat(id, address, flags)`, which may replace mappings by a System V segment.
    Shmat = (c"shmat", libc::SYS_shmat),
    /// The function `shmdt(address)`, which unmaps a System V segment.
    Shmdt = (c"shmdt", libc::SYS_shmdt),
    /// The function `remap_file_pages(address, size, protection, page offset, flags)`, which
    /// replaces pages of a mapping.
    RemapFilePages = (c"remap_file_pages", libc::SYS_remap_file_pages),
}

/// The advice `MADV_GUARD_INSTALL` of `asm-generic/mman-common.h`, since Linux 6.13. It discards
/// the pages, and later accesses to them fault.
const MADV_GUARD_INSTALL: i32 = 102;

const fn discards(advice: usize) -> bool {
    matches!(
        advice as i32,
        libc::MADV_DONTNEED
            | libc::MADV_FREE
            | libc::MADV_REMOVE
            | libc::MADV_DONTNEED_LOCKED
            | MADV_GUARD_INSTALL
    )
}

/// Returns true if the kernel sends a userfaultfd event (UFFD_EVENT_REMOVE) for this advice. These
/// are all advices that discard pages, except MADV_GUARD_INSTALL.
const fn raises_event(advice: usize) -> bool {
    discards(advice) && advice as i32 != MADV_GUARD_INSTALL
}

const fn has(flags: usize, bits: i32) -> bool {
    flags as i32 & bits == bits
}

/// Huge page sizes of the architecture in bytes, largest first. On aarch64 these depend on the base
/// page size, so the list has those of every base page size.
const HUGE: &[u64] = if cfg!(target_arch = "aarch64") {
    &[16 << 30, 1 << 30, 512 << 20, 32 << 20, 2 << 20, 64 << 10]
} else {
    &[1 << 30, 2 << 20]
};

/// Returns the size of the largest huge page that `address` is aligned to, if any.
fn largest(address: usize) -> Option<u64> {
    HUGE.iter().copied().find(|size| (address as u64).is_multiple_of(*size))
}

/// Returns the size of the largest huge page that `address` is aligned to. Returns `None` if there
/// is no such size, or if every length in `lens` is a multiple of it, so that rounding the lengths
/// up would change nothing.
fn matters(address: usize, lens: [usize; 2]) -> Option<u64> {
    largest(address).filter(|huge| lens.iter().any(|len| !(*len as u64).is_multiple_of(*huge)))
}

/// Returns the size of the huge pages that a call of `mmap` with these arguments maps, to which the
/// kernel rounds `len` up. Returns `None` if the call maps no huge pages, or if rounding does not
/// change `len`.
///
/// If the arguments do not tell the size, returns the largest one that `address` is aligned to. If
/// the call makes an anonymous mapping, `flags` must include MAP_HUGETLB.
#[cold]
fn huge_of_new(address: usize, len: usize, flags: usize, fd: usize) -> Option<u64> {
    let fitting = matters(address, [len; 2])?;
    // For a mapping of a file, the file decides the page size. The flags decide for anonymous
    // memory.
    if has(flags, libc::MAP_ANONYMOUS) {
        let bits = flags >> libc::MAP_HUGE_SHIFT & libc::MAP_HUGE_MASK as usize;
        return Some(if bits == 0 { fitting } else { 1 << bits });
    }
    let mut status = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: fstatfs writes one `statfs`. It is a thin wrapper that allocates nothing, and the
    // hooks restore errno.
    if unsafe { libc::fstatfs(fd as i32, status.as_mut_ptr()) } != 0 {
        return Some(fitting);
    }
    // SAFETY: zeroes are a valid `statfs`, and the call has succeeded.
    let status = unsafe { status.assume_init() };
    (status.f_type == libc::HUGETLBFS_MAGIC).then_some(status.f_bsize as u64)
}

/// Returns the size of the huge pages that are mapped at `address`, and whether that size is known.
/// If it is not known, the pages may be smaller than the returned size.
///
/// Returns `None` if no huge pages are mapped there, or if rounding `lens` up to their size changes
/// nothing.
#[cold]
fn huge_of_mapped(address: usize, lens: [usize; 2]) -> Option<(u64, bool)> {
    let fitting = matters(address, lens)?;
    match without_cancellation(|| area::at_or_after(address as u64)) {
        Ok(Some(area)) if area.start <= address as u64 => {
            (area.page_size > sys::page_size()).then_some((area.page_size, area.is_page_size_known))
        }
        Ok(_) => None,
        Err(_) => Some((fitting, false)),
    }
}

/// Rounds `bytes` up to pages of `size` bytes, a power of two. A mask is used, since a division
/// would dominate the cost of a hook.
#[inline(always)]
fn round_up(bytes: u64, size: u64) -> u64 {
    bytes.checked_add(size - 1).map_or(u64::MAX, |end| end & !(size - 1))
}

/// Returns `address` without its tag: the bits that the processor ignores. These are the top byte
/// on aarch64, and a part of that byte on x86-64 with Linear Address Masking.
///
/// The kernel removes the tag of the first argument of `munmap`, `madvise` and `mremap`. A call
/// with a tag fails if the kernel does not remove it. Addresses with bit 55 set are those of the
/// kernel, and are returned unchanged.
#[inline(always)]
const fn untagged(address: usize) -> usize {
    address & (((address << 8) as isize) >> 8) as usize
}

/// Returns the memory that a call of `mremap` with these arguments affects. The mapping has pages
/// of `size` bytes if `is_known` is true, and otherwise of `size` bytes or fewer.
#[inline(always)]
fn remapped(args: &Args, (size, is_known): (u64, bool)) -> AffectedRanges {
    let [start, old_len, new_len, _, new, _] = args.map(|arg| arg as u64);
    let [old_len, new_len] = [old_len, new_len].map(|len| round_up(len, size));
    let fixed = has(args[3], libc::MREMAP_FIXED);
    // A mapping that shrinks in place loses only its end. The end begins at a page, so the size of
    // the pages must be known.
    let grows = new_len > old_len || !is_known;
    let whole = fixed || has(args[3], libc::MREMAP_DONTUNMAP) || grows;
    let kept = if whole { 0 } else { new_len };
    let from = start.saturating_add(kept);
    let [from, _] = one_range(from, old_len - kept, InvalidationCause::Remap);
    let [onto, _] = one_range(new, new_len, InvalidationCause::Replace);
    [from, onto.filter(|_| fixed)]
}

impl Function {
    /// Returns the function's name, as errors show it.
    pub(super) const fn name(self) -> &'static str {
        match self.symbol().to_str() {
            Ok(name) => name,
            Err(_) => "a function",
        }
    }

    /// Returns true if some versions of the C library lack the function.
    pub(super) const fn optional(self) -> bool {
        matches!(self, Self::ProcessMadvise | Self::RemapFilePages)
    }

    /// Returns true if a call with these arguments can unmap, replace or discard memory. This check
    /// runs on every hooked call, so it is cheap.
    #[inline(always)]
    pub(super) const fn may_affect(self, args: &Args) -> bool {
        match self {
            Self::Munmap | Self::Shmdt | Self::RemapFilePages => true,
            // Linux before 4.17 ignores MAP_FIXED_NOREPLACE beside MAP_FIXED.
            Self::Mmap => has(args[3], libc::MAP_FIXED),
            Self::Mremap => has(args[3], libc::MREMAP_MAYMOVE) || args[2] < args[1],
            Self::Madvise => discards(args[2]),
            Self::ProcessMadvise => discards(args[3]),
            Self::Brk => args[0] != 0,
            Self::Shmat => has(args[2], libc::SHM_REMAP),
        }
    }

    /// Returns the range of a call of `madvise` for which the kernel sends userfaultfd events.
    /// `affected` is the result of [`Function::affected`].
    ///
    /// Returns `None` for calls that raise no such event. Also returns `None` for every call of
    /// `process_madvise`, because its addresses are not known.
    #[inline(always)]
    pub(super) const fn range_of_events(
        self,
        args: &Args,
        affected: &AffectedRanges,
    ) -> Option<AddressRange> {
        match (self, affected) {
            (Self::Madvise, [Some((range, _)), _]) if raises_event(args[2]) => Some(*range),
            _ => None,
        }
    }

    /// Returns the memory that a call with these arguments is about to unmap, replace or discard.
    /// Allocates nothing and takes no lock.
    #[inline(always)]
    pub(super) fn affected(self, args: &Args) -> AffectedRanges {
        // In functions whose first argument is no address, it is an `int` and stays the same.
        let args = &[untagged(args[0]), args[1], args[2], args[3], args[4], args[5]];
        let page = sys::page_size();
        let pages = |bytes: u64| round_up(bytes, page);
        let [start, len, ..] = args.map(|arg| arg as u64);
        match self {
            Self::Munmap => one_range(start, pages(len), InvalidationCause::Unmap),
            Self::Mmap => {
                let (flags, fd) = (args[3], args[4]);
                let base = has(flags, libc::MAP_ANONYMOUS) && !has(flags, libc::MAP_HUGETLB);
                let huge = if base { None } else { huge_of_new(args[0], args[1], flags, fd) };
                one_range(start, round_up(len, huge.unwrap_or(page)), InvalidationCause::Replace)
            }
            Self::Madvise => one_range(start, pages(len), InvalidationCause::Discard),
            // The caller's list of ranges may lie in memory that is not readable, and only the
            // kernel can read it safely. So all memory counts as affected.
            Self::ProcessMadvise => one_range(0, u64::MAX, InvalidationCause::Discard),
            Self::Mremap => {
                let huge = huge_of_mapped(args[0], [args[1], args[2]]);
                remapped(args, huge.unwrap_or((page, true)))
            }
            Self::Brk => {
                // SAFETY: for an address below the heap, the kernel returns the break and changes
                // nothing.
                let now = unsafe { libc::syscall(libc::SYS_brk, 0) } as u64;
                let to = pages(start);
                one_range(to, pages(now).saturating_sub(to), InvalidationCause::Shrink)
            }
            Self::Shmat => {
                let start = args[1] as u64 & !(page - 1);
                let len = area::segment_len(args[0] as i32).unwrap_or(u64::MAX);
                // The page size of the segment is not known here, so the largest possible size is
                // assumed.
                let len = round_up(len, largest(start as usize).unwrap_or(page));
                one_range(start, len, InvalidationCause::Replace)
            }
            Self::Shmdt => {
                let range = without_cancellation(|| area::attached(start));
                one_range(range.start().0, range.len(), InvalidationCause::Detach)
            }
            // For this call, the kernel rounds the address and the length down to whole pages.
            Self::RemapFilePages => {
                one_range(start & !(page - 1), len & !(page - 1), InvalidationCause::Replace)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    fn affected(function: Function, args: &[usize]) -> Vec<(u64, u64, InvalidationCause)> {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        if !function.may_affect(&all) {
            return Vec::new();
        }
        let ranges = function.affected(&all);
        ranges
            .iter()
            .flatten()
            .map(|(range, cause)| (range.start().0, range.len(), *cause))
            .collect()
    }

    #[test]
    fn call_affects_exactly_the_ranges_of_its_arguments() {
        use Function::*;
        let page = sys::page_size() as usize;
        let bytes = page as u64;
        let (may_move, fixed, keep) = (1_usize, 3_usize, 5_usize);
        assert_eq!(affected(Munmap, &[0x10000, 1]), [(0x10000, bytes, InvalidationCause::Unmap)]);
        assert_eq!(affected(Munmap, &[0x10000, 0]), []);
        let fixed_map = libc::MAP_FIXED as usize;
        assert_eq!(
            affected(Mmap, &[0x10000, 2 * page, 3, fixed_map]),
            [(0x10000, 2 * bytes, InvalidationCause::Replace)]
        );
        assert_eq!(affected(Mmap, &[0x10000, 2 * page, 3, 0]), []);
        // Only whole huge pages can be replaced. Their size is in the flags, or else the largest
        // possible size is assumed.
        let anonymous = fixed_map | libc::MAP_ANONYMOUS as usize;
        let (huge, two_mib) = (anonymous | libc::MAP_HUGETLB as usize, 21 << libc::MAP_HUGE_SHIFT);
        for (start, flags, len) in [
            (2 << 20, anonymous, bytes),
            (2 << 20, huge, 2 << 20),
            (1 << 30, huge | two_mib, 2 << 20),
            (1 << 30, huge, 1 << 30),
        ] {
            assert_eq!(
                affected(Mmap, &[start, 1, 3, flags]),
                [(start as u64, len, InvalidationCause::Replace)]
            );
        }
        // Linux before 4.17 ignores the flag MAP_FIXED_NOREPLACE.
        let no_replace = libc::MAP_FIXED_NOREPLACE as usize;
        assert_eq!(affected(Mmap, &[0x10000, 2 * page, 3, no_replace]), []);
        assert_eq!(
            affected(Mmap, &[0x10000, 2 * page, 3, fixed_map | no_replace]),
            [(0x10000, 2 * bytes, InvalidationCause::Replace)]
        );
        // Shrinking unmaps the tail, with or without MREMAP_MAYMOVE. Growing in place unmaps
        // nothing.
        assert_eq!(
            affected(Mremap, &[0x10000, 4 * page, page, 0]),
            [(0x10000 + bytes, 3 * bytes, InvalidationCause::Remap)]
        );
        assert_eq!(
            affected(Mremap, &[0x10000, 4 * page, page, may_move]),
            [(0x10000 + bytes, 3 * bytes, InvalidationCause::Remap)]
        );
        assert_eq!(affected(Mremap, &[0x10000, page, 4 * page, 0]), []);
        assert_eq!(
            affected(Mremap, &[0x10000, page, 4 * page, may_move]),
            [(0x10000, bytes, InvalidationCause::Remap)]
        );
        assert_eq!(
            affected(Mremap, &[0x10000, page, page, fixed, 0x90000]),
            [
                (0x10000, bytes, InvalidationCause::Remap),
                (0x90000, bytes, InvalidationCause::Replace)
            ]
        );
        assert_eq!(
            affected(Mremap, &[0x10000, page, page, keep]),
            [(0x10000, bytes, InvalidationCause::Remap)]
        );
        for advice in [4, 8, 9, 24, 102] {
            assert_eq!(
                affected(Madvise, &[0x10000, page, advice]),
                [(0x10000, bytes, InvalidationCause::Discard)]
            );
            assert_eq!(
                affected(ProcessMadvise, &[9, 9, 9, advice]),
                [(0, u64::MAX, InvalidationCause::Discard)]
            );
        }
        for advice in [0, 1, 2, 3, 10, 14, 20, 21, 22, 23, 103] {
            assert_eq!(affected(Madvise, &[0x10000, page, advice]), []);
            assert_eq!(affected(ProcessMadvise, &[9, 9, 9, advice]), []);
        }
        assert_eq!(affected(Brk, &[0]), []);
        assert_eq!(affected(Brk, &[usize::MAX / 2]), []);
        assert_eq!(affected(Shmat, &[0, 0x10000, 0]), []);
        assert_eq!(
            affected(RemapFilePages, &[0x10001, 2 * page - 1, 0, 7, 0]),
            [(0x10000, bytes, InvalidationCause::Replace)]
        );
        assert_eq!(affected(RemapFilePages, &[0x10000, page - 1, 0, 7, 0]), []);
        // No huge page can begin at this address, so the kernel is not asked for the page size.
        assert_eq!(
            affected(Mmap, &[page, 1, 3, fixed_map, usize::MAX]),
            [(bytes, bytes, InvalidationCause::Replace)]
        );
        // A length that would wrap around is cut at the end of the address space.
        assert_eq!(
            affected(Munmap, &[0x10000, usize::MAX]),
            [(0x10000, u64::MAX - 0xffff, InvalidationCause::Unmap)]
        );
    }

    #[test]
    fn tag_of_the_first_address_is_ignored() {
        use Function::*;
        let page = sys::page_size() as usize;
        let (tag, fixed) = (0xb4 << 56, 3_usize);
        for (function, args) in [
            (Munmap, [0x10000, page, 0, 0, 0]),
            (Madvise, [0x10000, page, libc::MADV_DONTNEED as usize, 0, 0]),
            (Mremap, [0x10000, page, page, fixed, 0x90000]),
        ] {
            let mut tagged = args;
            tagged[0] |= tag;
            assert_eq!(affected(function, &tagged), affected(function, &args), "{function:?}");
        }
        assert_eq!(untagged(usize::MAX - 0xfff), usize::MAX - 0xfff);
        assert_eq!(untagged(1 << 55), 1 << 55);
    }

    /// MON-02: a hooked call is announced only if it is a call of `madvise` whose advice raises a
    /// userfaultfd event. The test `announced_advices_are_those_that_raise_events` checks the same
    /// list of advices against the kernel.
    #[test]
    fn only_calls_that_raise_events_are_announced() {
        let announced = |function: Function, advice: usize| {
            let args = [0x10000, 4096, advice, advice, 0, 0];
            function.range_of_events(&args, &function.affected(&args)).is_some()
        };
        for advice in [4, 8, 9, 24] {
            assert!(announced(Function::Madvise, advice), "advice {advice}");
            assert!(!announced(Function::ProcessMadvise, advice), "advice {advice}");
        }
        for advice in [0, 3, 14, 20, 21, 25, 102, 103] {
            assert!(!announced(Function::Madvise, advice), "advice {advice}");
        }
        let nothing = [0x10000, 0, 4, 0, 0, 0];
        let affected = Function::Madvise.affected(&nothing);
        assert!(Function::Madvise.range_of_events(&nothing, &affected).is_none());
    }

    /// ARM-02: if the size of the huge pages is not known, the pages that a shrinking `mremap`
    /// unmaps are not known either. So the whole old range counts as affected.
    #[test]
    fn shrunk_mapping_of_huge_pages_of_unknown_size_is_affected_whole() {
        const MIB: usize = 1 << 20;
        let shrink = [1 << 30, 512 * MIB, 32 * MIB, libc::MREMAP_MAYMOVE as usize, 0, 0];
        let affected = |size| {
            let [from, onto] = remapped(&shrink, size);
            assert!(onto.is_none());
            from.map(|(range, cause)| (range.start().0, range.len(), cause))
        };
        let range =
            |start: usize, len: usize| Some((start as u64, len as u64, InvalidationCause::Remap));
        assert_eq!(affected((2 << 20, true)), range((1 << 30) + 32 * MIB, 480 * MIB));
        assert_eq!(affected((512 << 20, true)), None, "the kernel rounds up, and nothing shrinks");
        assert_eq!(affected((512 << 20, false)), range(1 << 30, 512 * MIB));
    }

    /// The machine needs no free huge pages: the test maps them without reserving or touching them.
    #[test]
    fn huge_pages_are_affected_whole() {
        use Function::*;
        const HUGE: usize = 2 << 20;
        let flags = libc::MFD_HUGETLB | libc::MFD_HUGE_2MB | libc::MFD_CLOEXEC;
        // SAFETY: the call creates a file and touches no memory but the constant name.
        let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
        assert!(fd >= 0, "{}: a kernel with huge pages is needed", std::io::Error::last_os_error());
        // SAFETY: `memfd_create` returned the fd, and nothing else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let (fixed, number) =
            ((libc::MAP_FIXED | libc::MAP_SHARED) as usize, file.as_raw_fd() as usize);
        assert_eq!(
            affected(Mmap, &[HUGE, 1, 3, fixed, number]),
            [(HUGE as u64, HUGE as u64, InvalidationCause::Replace)]
        );

        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let flags = flags | libc::MAP_HUGETLB | 21 << libc::MAP_HUGE_SHIFT;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), 2 * HUGE, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let (start, whole) = (at.addr() as u64, 2 * HUGE as u64);
        let area = area::at_or_after(start).expect("readable mappings").expect("mapped");
        let is_known = area.is_page_size_known;
        let grown =
            affected(Mremap, &[at.addr(), HUGE + 1, 3 * HUGE, libc::MREMAP_MAYMOVE as usize]);
        let shrunk = affected(Mremap, &[at.addr(), 2 * HUGE, 1, 0]);
        // SAFETY: the test made the mapping, and nothing else uses it.
        assert_eq!(unsafe { libc::munmap(at, 2 * HUGE) }, 0);
        assert_eq!(grown, [(start, whole, InvalidationCause::Remap)]);
        // A kernel without PROCMAP_QUERY does not report the size of the pages.
        let lost = if is_known { start + HUGE as u64 } else { start };
        assert_eq!(shrunk, [(lost, start + whole - lost, InvalidationCause::Remap)]);
    }
}
