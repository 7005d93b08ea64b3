//! Measures dma-buf exports of each kind of memory at each size: success, time, mapping by the CPU,
//! and fds that stay open.

use std::time::{Duration, Instant};

use hmem_core::{Allocation, AllocationKind, Errno, IfaceExt, iface::DmaBufMapping};
use hmem_iface_cuda::sys;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{
    Extent,
    driver::{Driver, nic, open_fds, size},
    report::{Outcome, Report, Row},
};

const SIZES: [u64; 9] =
    [1, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30, 16 << 30];

pub(crate) fn write(
    driver: &Driver,
    extent: Extent,
    kind: AllocationKind,
    report: &mut Report<'_>,
) {
    let columns = [
        "kind",
        "size",
        "first, us",
        "again, us",
        "PCIe mapping, us",
        "CPU maps the fd",
        "fds left",
    ];
    report.table(format_args!("dma-buf export: {}", kind.name()), &columns);
    let before = open_fds();
    for len in SIZES.into_iter().filter(|len| *len <= extent.largest_export) {
        report.row(&[kind.name(), &size(len)], || {
            driver.with(len, kind, |memory| row(driver, memory))
        });
    }
    report.line(format_args!(
        "\nOpen fds: {before} before the first export, {} at the end.",
        open_fds()
    ));
}

/// Measures the exports of an allocation for one row of the report. Counts open fds only after the
/// first exports, at which the driver opens files of its own.
fn row(driver: &Driver, memory: &Allocation) -> Outcome<Row> {
    let (first, _) = (
        export(driver, memory, DmaBufMapping::Default)?,
        export(driver, memory, DmaBufMapping::Pcie)?,
    );
    let before = open_fds();
    let again = export(driver, memory, DmaBufMapping::Default)?;
    let pcie = export(driver, memory, DmaBufMapping::Pcie)?;
    let left = open_fds() as i64 - before as i64;
    let vmm =
        driver.attribute(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) == "1";
    let owed = driver.cuda.capability().dma_buf && must_export(memory.kind, vmm);
    let says = driver.attribute(sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED) == "1";
    let maps = first.as_ref().map(|(_, maps)| maps.clone()).unwrap_or_default();
    let (maps, mapped) = mappable(maps, owed && says && first.is_ok());
    let met = left == 0 && mapped && exported(owed, &first, &again);
    let cell = |export: Exported| match export {
        Ok((took, _)) => micros(took),
        Err(refused) if owed => format!("NOT MET: {refused}"),
        Err(refused) => refused,
    };
    let pcie = pcie.map_or_else(|refused| refused, |(took, _)| micros(took));
    Ok(Row::new([cell(first), cell(again), pcie, maps, left.to_string()]).met(met))
}

/// Returns true if a device with dma-bufs is required to export a kind of memory. `vmm` states that
/// GPUDirect RDMA can reach VMM memory, which is then required too.
pub(crate) fn must_export(kind: AllocationKind, vmm: bool) -> bool {
    kind == AllocationKind::Device || kind == AllocationKind::Virtual && vmm
}

/// Returns true if both exports succeeded, or if no success is required.
pub(crate) fn exported<T, E>(owed: bool, first: &Result<T, E>, again: &Result<T, E>) -> bool {
    !owed || (first.is_ok() && again.is_ok())
}

/// Returns the table cell for the attempt to map an export for the CPU, and true if the result is
/// as required. `cuda.h`: the fd can be "passed as the file descriptor argument to the mmap()
/// system call" if the device reports DMA_BUF_MMAP_SUPPORTED.
pub(crate) fn mappable(came_to: String, owed: bool) -> (String, bool) {
    if owed && came_to != "yes" { (format!("NOT MET: {came_to}"), false) } else { (came_to, true) }
}

/// Time of an export and result of mapping the fd, or the text of the refusal.
type Exported = Result<(Duration, String), String>;

/// Measures an export, and maps its fd for the CPU. Returns the refusal if the export is
/// unsupported.
fn export(driver: &Driver, memory: &Allocation, mapping: DmaBufMapping) -> Outcome<Exported> {
    let start = Instant::now();
    match driver.cuda.export_dma_buf(memory.range, &nic(), mapping) {
        Ok(export) => {
            let took = start.elapsed();
            // SAFETY: the mapping is new, at an address that the kernel chooses. It is unmapped
            // without an access.
            let mapped = unsafe {
                let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
                mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, &export.fd, 0)
                    .and_then(|at| munmap(at, 4096))
            };
            let maps = mapped.map_or_else(
                |errno| format!("no: {}", Errno(errno.raw_os_error())),
                |()| "yes".to_owned(),
            );
            driver.cuda.release_dma_buf(export)?;
            Ok(Ok((took, maps)))
        }
        Err(error) if error.is_unsupported() => {
            let code = error.driver().map(ToString::to_string);
            Ok(Err(format!("refused: {}", code.unwrap_or_else(|| error.kind().text().to_owned()))))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the median time of an export together with its release, or a text if no export
/// succeeded.
pub(crate) fn cost(driver: &Driver, extent: Extent, memory: &Allocation) -> Outcome<String> {
    let mut times = Vec::new();
    for _ in 0..=extent.repetitions {
        let start = Instant::now();
        match driver.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Default) {
            Ok(export) => driver.cuda.release_dma_buf(export)?,
            Err(error) if error.is_unsupported() => return Ok("refused".to_owned()),
            Err(error) => return Err(error.into()),
        }
        times.push(start.elapsed());
    }
    Ok(micros(crate::driver::median(times)))
}

fn micros(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e6)
}
