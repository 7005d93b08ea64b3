//! Queries the kernel for the mapping at an address, and checks that a monitor can see every change
//! of a range by this process.
//!
//! Hooks call these functions, so queries neither allocate nor lock. Since Linux 6.11, the kernel
//! has an ioctl that looks up one address (`PROCMAP_QUERY` of `linux/fs.h`). On older kernels, the
//! text of `/proc/self/maps` is read up to the address.

#![allow(unsafe_code, reason = "system calls on mappings and System V segments")]

use std::{
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use hmem_core::{Address, AddressRange, Error, ErrorKind, IfaceKind, Result};
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    ioctl::{Opcode, Updater, opcode},
};

const MAPS: &CStr = c"/proc/self/maps";

/// Maximum length of a mapping's name in bytes. Longer names are cut.
const NAME: usize = 256;

/// The kind of memory behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MappingKind {
    /// Anonymous memory: private or shared pages, heap, stack, huge pages.
    Anonymous,
    /// A System V shared-memory segment, by its identifier (`shmid`).
    SysV(i32),
    /// A file, a memory file or a device. Any process that has the file open can change its
    /// content.
    File,
}

/// One mapping of this process.
#[derive(Clone, Copy)]
pub(crate) struct Area {
    pub(crate) start: u64,
    /// Address one past the last byte of the mapping.
    pub(crate) end: u64,
    pub(crate) kind: MappingKind,
    /// Page size of the mapping in bytes, a power of two. If the kernel does not report the size,
    /// this is an assumption:
    ///
    /// - For anonymous huge pages, the largest power of two that divides both `start` and `end`.
    /// - For all other mappings, the base page size.
    pub(crate) page_size: u64,
    /// False for anonymous huge pages whose size the kernel does not report. These pages may be
    /// smaller than `page_size`.
    pub(crate) is_page_size_known: bool,
    name: [u8; NAME],
    name_len: usize,
}

/// The name of mappings with MAP_ANONYMOUS and MAP_HUGETLB.
const ANONYMOUS_HUGE: &[u8] = b"/anon_hugepage (deleted)";

impl Area {
    fn new(start: u64, end: u64, inode: u64, page_size: Option<u64>, full_name: &[u8]) -> Self {
        let kind = match full_name {
            b"" | b"/dev/zero" | b"/dev/zero (deleted)" | ANONYMOUS_HUGE => MappingKind::Anonymous,
            [b'[', ..] => MappingKind::Anonymous,
            name if name.starts_with(b"/SYSV") && name.ends_with(b" (deleted)") => {
                MappingKind::SysV(inode as i32)
            }
            _ => MappingKind::File,
        };
        let name_len = full_name.len().min(NAME);
        let mut name = [0; NAME];
        name[..name_len].copy_from_slice(&full_name[..name_len]);
        let reported = page_size.filter(|size| size.is_power_of_two());
        let is_page_size_known = reported.is_some() || full_name != ANONYMOUS_HUGE;
        let page_size = match reported {
            Some(size) => size,
            None if is_page_size_known => crate::sys::page_size(),
            None => 1 << (start | end).trailing_zeros(),
        };
        Self { start, end, kind, page_size, is_page_size_known, name, name_len }
    }

    pub(crate) fn addresses(&self) -> AddressRange {
        hmem_hook::clamped(self.start, self.end - self.start)
    }

    /// Returns the mapping's name as in `/proc/self/maps`. The name of anonymous memory may be
    /// empty.
    pub(crate) fn name(&self) -> &str {
        let name = &self.name[..self.name_len];
        std::str::from_utf8(name).unwrap_or("(a name that is not UTF-8)")
    }
}

/// The argument of the ioctl `PROCMAP_QUERY`: `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const PROCMAP_QUERY: Opcode = opcode::read_write::<ProcmapQuery>(b'f', 17);
const COVERING_OR_NEXT_VMA: u64 = 0x10;

/// Returns true if `errno` means that the kernel, or qemu-user, does not implement `PROCMAP_QUERY`.
pub(super) fn has_no_query(errno: Errno) -> bool {
    matches!(errno, Errno::NOTTY | Errno::NOSYS)
}

/// Returns the mapping that contains `address`, or else the next mapping above it, if any.
pub(crate) fn at_or_after(address: u64) -> Result<Option<Area>, Errno> {
    let maps = open(OFlags::empty())?;
    match queried(maps.as_fd(), address) {
        Err(errno) if has_no_query(errno) => read(maps.as_fd(), address),
        answer => answer,
    }
}

/// Opens `/proc/self/maps` with the additional flags `more`.
pub(super) fn open(more: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, MAPS, OFlags::RDONLY | OFlags::CLOEXEC | more, Mode::empty())
}

/// Like [`at_or_after`], but only asks the kernel by `PROCMAP_QUERY`. `maps` is an open
/// `/proc/PID/maps`, which selects the process.
pub(super) fn queried(maps: BorrowedFd<'_>, address: u64) -> Result<Option<Area>, Errno> {
    let mut name = [0_u8; NAME];
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: COVERING_OR_NEXT_VMA,
        query_addr: address,
        vma_name_size: NAME as u32,
        vma_name_addr: name.as_mut_ptr().expose_provenance() as u64,
        ..ProcmapQuery::default()
    };
    let full_name = match ioctl(maps, &mut query) {
        Ok(()) => &name[..(query.vma_name_size as usize).saturating_sub(1)],
        Err(Errno::NOENT) => return Ok(None),
        // The kernel returns this error only if the name exceeds the buffer. Such a name is a path.
        Err(Errno::NAMETOOLONG) => {
            (query.vma_name_size, query.vma_name_addr) = (0, 0);
            ioctl(maps, &mut query)?;
            b"(a long path)"
        }
        Err(errno) => return Err(errno),
    };
    Ok(Some(Area::new(
        query.vma_start,
        query.vma_end,
        query.inode,
        Some(query.vma_page_size),
        full_name,
    )))
}

fn ioctl(maps: BorrowedFd<'_>, query: &mut ProcmapQuery) -> Result<(), Errno> {
    // SAFETY: the ioctl reads and writes one `ProcmapQuery`, and writes up to `vma_name_size` bytes
    // at `vma_name_addr`, which `queried` points at a buffer of that size, or sets to 0 together
    // with the size.
    unsafe { rustix::ioctl::ioctl(maps, Updater::<PROCMAP_QUERY, _>::new(query)) }
}

/// Like [`queried`], but for kernels without `PROCMAP_QUERY`. Reads the text of `maps` up to the
/// first mapping that ends above `address`.
pub(super) fn read(maps: BorrowedFd<'_>, address: u64) -> Result<Option<Area>, Errno> {
    // A line of the file has at most 73 bytes before the name. Longer names are cut.
    let mut line = [0_u8; 73 + NAME];
    let mut len = 0;
    let mut chunk = [0_u8; 512];
    loop {
        let filled = match rustix::io::read(maps, &mut chunk) {
            Ok(0) => return Ok(None),
            Ok(filled) => filled,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        };
        for &byte in &chunk[..filled] {
            if byte != b'\n' {
                if len < line.len() {
                    line[len] = byte;
                    len += 1;
                }
                continue;
            }
            let area = parsed(&line[..len]).ok_or(Errno::INVAL)?;
            if area.end > address {
                return Ok(Some(area));
            }
            len = 0;
        }
    }
}

/// Parses a line of `/proc/PID/maps`, for example
/// `7f0000000000-7f0000001000 rw-p 00000000 00:01 1234    /SYSV00000000 (deleted)`.
fn parsed(line: &[u8]) -> Option<Area> {
    let mut rest = line;
    let mut word = || {
        let len = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
        let (word, after) = rest.split_at(len);
        rest = after.get(1..).unwrap_or(b"");
        std::str::from_utf8(word).ok()
    };
    let (start, end) = word()?.split_once('-')?;
    let (_perms, _offset, _device) = (word()?, word()?, word()?);
    let inode = word()?.parse().ok()?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    Some(Area::new(start, end, inode, None, rest.trim_ascii_start()))
}

/// Checks that a monitor can see every change of a range by this process.
///
/// The check passes for anonymous memory and System V segments: this process can unmap or discard
/// them only by calls that name the addresses. Other processes that share the memory can discard
/// pages too, which no monitor detects.
///
/// `at_or_after` looks up the mapping at an address, like the function [`at_or_after`].
///
/// On success, returns one area that covers all mappings of the range, which callers may cache. Its
/// start is that of the first mapping. All its other fields are those of the last mapping.
///
/// # Errors
/// - BadAddress: an address of the range is not mapped.
/// - Unsupported: a file is mapped in the range. Truncating the file, or punching a hole into it,
///   removes pages without a call that names the range.
/// - OutOfResources: no fd is left to open `/proc/self/maps`.
/// - Unsupported: `/proc/self/maps` cannot be read for another reason.
pub(crate) fn check(
    range: AddressRange,
    monitor: &'static str,
    at_or_after: impl Fn(u64) -> Result<Option<Area>, Errno>,
) -> Result<Area> {
    let refused = |kind| {
        Error::new(kind, "subscribe")
            .iface(IfaceKind::SYSTEM)
            .context("monitor", monitor)
            .context("range", range)
    };
    let last = range.start().0.saturating_add(range.len().saturating_sub(1));
    let mut first: Option<u64> = None;
    let mut at = range.start().0;
    loop {
        let mut area = at_or_after(at)
            .map_err(|errno| {
                let (kind, remedy) = match errno {
                    Errno::MFILE | Errno::NFILE => {
                        (ErrorKind::OutOfResources, "raise the limit of open files (ulimit -n)")
                    }
                    _ => (ErrorKind::Unsupported, "the mappings cannot be read: mount /proc"),
                };
                refused(kind).errno(errno).context("file", "/proc/self/maps").remedy(remedy)
            })?
            .filter(|area| area.start <= at)
            .ok_or_else(|| {
                refused(ErrorKind::BadAddress).context("nothing mapped at", Address(at))
            })?;
        if area.kind == MappingKind::File {
            return Err(refused(ErrorKind::Unsupported)
                .context("mapping of", area.name())
                .context(
                    "why",
                    "no monitor detects that the file behind a mapping is truncated or punched",
                )
                .remedy(
                    "use anonymous memory, or an import monitor that knows when the file changes",
                ));
        }
        let start = *first.get_or_insert(area.start);
        if area.end > last {
            area.start = start;
            return Ok(area);
        }
        at = area.end;
    }
}

/// Returns the addresses that `shmdt(address)` unmaps.
///
/// - If the first mapping at or above `address` is a System V segment of known length, these are
///   the addresses from `address` on in that length.
/// - If nothing is mapped at or above `address`, the range is empty.
/// - Otherwise the segment is not known, so the range covers all addresses from `address` on.
pub(crate) fn attached(address: u64) -> AddressRange {
    let everything_above = hmem_hook::clamped(address, u64::MAX);
    match at_or_after(address) {
        Ok(Some(Area { start, end, kind: MappingKind::SysV(id), .. })) if start >= address => {
            segment_len(id)
                .map_or(everything_above, |len| hmem_hook::clamped(address, len.max(end - address)))
        }
        Ok(None) => hmem_hook::clamped(address, 0),
        _ => everything_above,
    }
}

/// Returns the length of a System V segment in bytes, rounded up to whole pages. Returns `None` if
/// `shmctl` fails.
pub(crate) fn segment_len(id: i32) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::shmid_ds>::zeroed();
    // SAFETY: IPC_STAT writes one `shmid_ds`. libc's shmctl is a thin wrapper that is not patched
    // and allocates nothing; the hooks restore errno.
    if unsafe { libc::shmctl(id, libc::IPC_STAT, status.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: zeroes are a valid `shmid_ds`, and the call has succeeded.
    let bytes = unsafe { status.assume_init() }.shm_segsz as u64;
    Some(bytes.next_multiple_of(crate::sys::page_size()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::mm::MapFlags;

    use super::*;
    use crate::sys::{map_file, map_memory, page_size, sealed_memfd};

    #[test]
    fn query_layout_and_number_match_the_kernel_header() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(std::mem::offset_of!(ProcmapQuery, vma_name_size), 80);
        assert_eq!(PROCMAP_QUERY, 0xc068_6611);
    }

    #[test]
    fn unreadable_mappings_are_refused_with_the_remedy() {
        let range = AddressRange::of(&[0_u8; 64]);
        for (errno, kind, remedy) in [
            (Errno::MFILE, ErrorKind::OutOfResources, "ulimit -n"),
            (Errno::NOENT, ErrorKind::Unsupported, "mount /proc"),
        ] {
            let error = check(range, "test", |_| Err(errno)).err().expect("refused");
            assert_eq!(error.kind(), kind);
            assert!(error.remedy_text().is_some_and(|text| text.contains(remedy)), "{error}");
        }
    }

    /// ARM-02: the text of `/proc/self/maps` does not state the size of huge pages, so the size is
    /// assumed. Around each address of the mapping, a page of the assumed size contains the real
    /// page and lies inside the mapping.
    #[test]
    fn huge_page_of_unknown_size_is_not_larger_than_its_mapping() {
        let anonymous = "rw-p 00000000 00:0f 21 /anon_hugepage (deleted)";
        for (start, end, page_size) in [
            (0x7f00_0020_0000_u64, 0x7f00_0060_0000_u64, 2 << 20),
            (0x7f00_0400_0000, 0x7f00_0600_0000, 32 << 20),
            (0x7f00_2000_0000, 0x7f00_6000_0000, 512 << 20),
            (0x7f00_4000_0000, 0x7f00_8000_0000, 1 << 30),
        ] {
            let area = parsed(format!("{start:x}-{end:x} {anonymous}").as_bytes()).unwrap();
            assert_eq!((area.page_size, area.is_page_size_known), (page_size, false));
            assert!(area.kind == MappingKind::Anonymous);
        }
        let named = |size| Area::new(0, 1 << 20, 0, size, b"").page_size;
        assert_eq!([named(Some(2 << 20)), named(Some(64 << 10))], [2 << 20, 64 << 10]);
        let base = crate::sys::page_size();
        assert_eq!([named(Some(0)), named(Some(3 << 12)), named(None)], [base; 3]);
    }

    #[test]
    fn query_and_text_return_the_same_mappings() {
        let page = page_size();
        let memfd = sealed_memfd("area", 2 * page).unwrap();
        let shared = map_file(memfd.as_fd(), 2 * page).unwrap();
        let anonymous = map_memory(3 * page as usize, MapFlags::empty()).unwrap();
        let code = (query_and_text_return_the_same_mappings as fn() as *const ()).addr() as u64;
        let text = |address| read(File::open("/proc/self/maps").unwrap().as_fd(), address).unwrap();
        let summary = |area: Option<Area>| {
            area.map(|area| (area.start, area.end, area.kind, area.name().to_owned()))
        };
        let compare = |address| {
            // Other tests may map and unmap adjacent memory at the same time. So the comparison
            // repeats until `/proc/self/maps` has the same text before and after the query.
            loop {
                let (before, by_query, after) =
                    (text(address), at_or_after(address).unwrap(), text(address));
                if summary(before) == summary(after) {
                    assert_eq!(summary(by_query), summary(after), "at {address:#x}");
                    return after;
                }
            }
        };
        for (address, kind) in [
            (shared.address().0, MappingKind::File),
            (anonymous.address().0 + page, MappingKind::Anonymous),
            (code, MappingKind::File),
        ] {
            let area = compare(address).unwrap();
            assert_eq!(area.kind, kind);
            assert!(area.start <= address && address < area.end);
        }
        compare(u64::MAX);
    }

    #[test]
    fn maps_lines_are_classified_by_kind() {
        let kind = |line: &str| parsed(line.as_bytes()).map(|area| area.kind);
        let line = "7f00-8000 rw-s 00000000 00:01 98309                    /SYSV00000000 (deleted)";
        assert_eq!(kind(line), Some(MappingKind::SysV(98309)));
        assert_eq!(kind("7f00-8000 rw-p 00000000 00:00 0 "), Some(MappingKind::Anonymous));
        assert_eq!(kind("7f00-8000 rw-p 00000000 00:00 0  [heap]"), Some(MappingKind::Anonymous));
        assert_eq!(
            kind("7f00-8000 rw-s 00000000 00:01 7 /memfd:x (deleted)"),
            Some(MappingKind::File)
        );
        assert_eq!(
            kind("7f00-8000 rw-s 00000000 00:01 7 /dev/zero (deleted)"),
            Some(MappingKind::Anonymous)
        );
        assert_eq!(kind("7f00"), None);
        assert_eq!(kind(""), None);
    }
}
