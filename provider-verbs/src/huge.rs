//! Detection of memory in huge pages (`/proc/self/smaps`), for the option HUGETLB.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
};

use hmem_core::AddressRange;

/// Returns true if huge pages of hugetlbfs or MAP_HUGETLB back every byte of `range`.
///
/// # Errors
/// The error of reading `/proc/self/smaps`.
pub(super) fn lies_in_huge_pages(range: AddressRange) -> io::Result<bool> {
    let smaps = BufReader::new(File::open("/proc/self/smaps")?);
    covered(smaps.lines(), range.start().0, range.len(), rustix::param::page_size() as u64)
}

/// Returns true if `len` bytes from `start` on are mapped, and all of their mappings have pages of
/// more than `page` bytes. `lines` are the lines of `smaps`.
fn covered(
    lines: impl Iterator<Item = io::Result<String>>,
    start: u64,
    len: u64,
    page: u64,
) -> io::Result<bool> {
    let end = start.saturating_add(len);
    let (mut mapping, mut huge) = (0..0, 0);
    for line in lines {
        let line = line?;
        if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kib: u64 = size.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
            if kib * 1024 > page {
                huge += mapping.end.min(end).saturating_sub(mapping.start.max(start));
            }
        } else if let Some(addresses) = mapping_of(&line) {
            mapping = addresses;
        }
    }
    Ok(huge == len)
}

/// Parses the address range at the start of a mapping's first line in `smaps`.
fn mapping_of(line: &str) -> Option<std::ops::Range<u64>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
10000000-10200000 rw-p 00000000 00:00 0 \n\
KernelPageSize:        4 kB\n\
10200000-10400000 rw-p 00000000 00:0f 21 /anon_hugepage (deleted)\n\
Size:               2048 kB\n\
KernelPageSize:     2048 kB\n\
10400000-10600000 rw-p 00000000 00:0f 22 /anon_hugepage (deleted)\n\
KernelPageSize:     2048 kB\n\
10600000-10800000 rw-p 00000000 00:00 0 \n\
KernelPageSize:        4 kB\n";

    #[test]
    fn range_is_huge_only_if_each_of_its_mappings_is() {
        let covered = |start, len| {
            let lines = SMAPS.lines().map(|line| Ok(line.to_owned()));
            covered(lines, start, len, 4096).expect("no error in the lines")
        };
        assert!(covered(0x1020_0000, 0x20_0000));
        assert!(covered(0x1020_0001, 0x3f_ffff), "two mappings, whole to the end");
        assert!(!covered(0x101f_ffff, 2), "the first byte lies in an ordinary page");
        assert!(!covered(0x105f_ffff, 2), "the last byte lies in an ordinary page");
        assert!(!covered(0x1000_0000, 0x1000), "ordinary pages");
        assert!(!covered(0x2000_0000, 0x1000), "nothing is mapped there");
    }

    /// ARM-02: pages are huge if they are longer than the base page, which need not have 4 KiB.
    #[test]
    fn page_is_huge_if_it_is_longer_than_the_base_page() {
        for (page_kib, size_kib, huge) in [
            (4, 64, true),
            (4, 2048, true),
            (4, 1 << 20, true),
            (16, 16, false),
            (16, 32 << 10, true),
            (64, 64, false),
            (64, 2048, true),
            (64, 512 << 10, true),
        ] {
            let smaps = ["10000000-50000000 rw-p", &format!("KernelPageSize: {size_kib} kB")];
            let lines = smaps.into_iter().map(|line| Ok(line.to_owned()));
            let found = covered(lines, 0x1000_0001, 0x3fff_ffff, page_kib << 10);
            assert_eq!(found.expect("no error in the lines"), huge, "{size_kib} on {page_kib}");
        }
    }
}
