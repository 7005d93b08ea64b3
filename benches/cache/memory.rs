//! Memory that the cache uses for each cached region.

use std::fs;

use hmem::{
    Access, Address, AddressRange, Error, ErrorKind, Result,
    cache::{Cache, Key, Limits},
};

use super::{noop::NoopBackend, report::MemoryRow};

struct Layout {
    figure: &'static str,
    regions: u64,
    start: u64,
    len: u64,
    stride: u64,
    target: Option<f64>,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const fn layout(figure: &'static str, regions: u64, start: u64, len: u64, stride: u64) -> Layout {
    Layout { figure, regions, start, len, stride, target: None }
}

const LAYOUTS: [Layout; 5] = [
    Layout {
        target: Some(256.0),
        ..layout("4 KiB, one after the other", 100_000, 0x3000_0000_0000, 4 * KIB, 4 * KIB)
    },
    Layout {
        target: Some(256.0),
        ..layout("64 KiB, one after the other", 50_000, 0x3100_0000_0000, 64 * KIB, 64 * KIB)
    },
    layout("4 KiB, one in each 2 MiB", 50_000, 0x3200_0000_0000, 4 * KIB, 2 * MIB),
    layout("1 MiB, not aligned", 10_000, 0x3400_0000_0123, MIB, 2 * MIB),
    layout("1 GiB, not aligned", 1_000, 0x3600_0000_0123, GIB, 2 * GIB),
];

/// Returns the size of the process's anonymous resident memory in bytes. Memory that files back,
/// such as code, does not count.
pub(super) fn resident() -> Result<u64> {
    let path = "/proc/self/smaps_rollup";
    let unreadable = |why: &dyn std::fmt::Display| {
        Error::new(ErrorKind::Unavailable, "bench cache").context("file", path).context("why", why)
    };
    let text = fs::read_to_string(path).map_err(|error| unreadable(&error))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    let kilobytes =
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes
        .map(|kilobytes| kilobytes * KIB)
        .ok_or_else(|| unreadable(&"the file has no line `Anonymous: N kB`"))
}

/// Measures the memory of a cached region for each of [`LAYOUTS`], which differ in the length and
/// distance of the regions: fills a cache, and measures the growth of the process. All caches stay
/// open until the end, so that no cache reuses the memory of an earlier one.
pub(super) fn of_layouts() -> Result<Vec<MemoryRow>> {
    let mut kept = Vec::new();
    LAYOUTS
        .iter()
        .map(|layout| {
            let limits = Limits { max_count: 2 * layout.regions as usize, ..Limits::default() };
            let before = resident()?;
            let cache = Cache::new(NoopBackend::default(), limits)?;
            for number in 0..layout.regions {
                let start = Address(layout.start + number * layout.stride);
                cache.get_or_register(&Key::new(
                    AddressRange::new(start, layout.len)?,
                    Access::SEND,
                )?)?;
            }
            let grown = resident()?.saturating_sub(before);
            assert_eq!(cache.statistics().entries as u64, layout.regions);
            kept.push(cache);
            Ok(MemoryRow {
                figure: layout.figure.into(),
                regions: layout.regions,
                bytes_each: grown as f64 / layout.regions as f64,
                target: layout.target,
            })
        })
        .collect()
}
