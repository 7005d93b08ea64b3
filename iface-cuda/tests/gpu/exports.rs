//! dma-bufs of each kind of memory at each size: whether, how long it takes, whether the CPU can map them, and that no fd
//! stays open.

use std::{io, io::Write, time::Instant};

use hmem_core::{Allocation, AllocationKind, Iface, iface::DmaBufMapping};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{
    Extent,
    driver::{Driver, nic, open_fds, size},
};

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Virtual,
    AllocationKind::StreamOrdered,
    AllocationKind::Managed,
    AllocationKind::Host,
];

const SIZES: [u64; 9] = [1, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30, 16 << 30];

pub(crate) fn write(driver: &Driver, extent: Extent, out: &mut Vec<u8>) -> io::Result<()> {
    writeln!(out, "\n### dma-buf export\n")?;
    writeln!(out, "| kind | size | default mapping | PCIe mapping | CPU maps the fd | fds left |")?;
    writeln!(out, "|---|---|---|---|---|---|")?;
    for kind in KINDS {
        for len in SIZES.into_iter().filter(|len| *len <= extent.largest_export) {
            match driver.allocate(len, kind) {
                Ok(memory) => {
                    row(driver, &memory, out)?;
                    driver.free(&memory);
                }
                Err(error) => {
                    writeln!(out, "| {} | {} | not allocated: {error} | | | |", kind.name(), size(len))?;
                }
            }
        }
    }
    Ok(())
}

fn row(driver: &Driver, memory: &Allocation, out: &mut Vec<u8>) -> io::Result<()> {
    let before = open_fds();
    let (default, maps) = export(driver, memory, DmaBufMapping::Default);
    let (pcie, _) = export(driver, memory, DmaBufMapping::Pcie);
    let left = open_fds() as i64 - before as i64;
    // The fake keeps one file for each part of its memory.
    assert!(left == 0 || !driver.is_real(), "{left} fds are left");
    let (kind, len) = (memory.kind.name(), size(memory.range.len()));
    writeln!(out, "| {kind} | {len} | {default} | {pcie} | {maps} | {left} |")
}

/// What came of it, and whether the CPU can map the fd.
fn export(driver: &Driver, memory: &Allocation, mapping: DmaBufMapping) -> (String, &'static str) {
    let start = Instant::now();
    match driver.cuda.export_dma_buf(memory.range, &nic(), mapping) {
        Ok(export) => {
            let took = start.elapsed();
            // SAFETY: a new mapping at an address that the kernel picks, given back unused.
            let maps = unsafe {
                let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
                mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, &export.fd, 0)
                    .map(|at| munmap(at, 4096).expect("munmap"))
            };
            driver.cuda.release_dma_buf(export).expect("release");
            (format!("{:.1} us", took.as_secs_f64() * 1e6), if maps.is_ok() { "yes" } else { "no" })
        }
        Err(error) => {
            let code = error.driver().map(ToString::to_string);
            (format!("refused: {}", code.unwrap_or_else(|| error.kind().text().to_owned())), "")
        }
    }
}
