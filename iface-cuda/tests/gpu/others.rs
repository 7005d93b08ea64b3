//! Measures other memory: page-locked host memory of the application, memory of another process,
//! and CPU access to device memory by GDRCopy.

use std::process::Command;

use hmem_core::{
    Address, AddressRange, AllocationKind, IfaceExt, IfaceKind,
    iface::{DmaBufMapping, IpcHandle},
};
use hmem_iface_cuda::gdrcopy::Gdrcopy;

use crate::{
    driver::{Driver, nic, open_fds},
    report::{Failure, Outcome, Report, Row, and, attempt},
};

const COLUMNS: [&str; 5] = ["memory", "expected", "dma-buf", "peer memory", "fds left"];

/// Exports a range under both mappings. Returns the results and the number of fds that stay open.
fn exports(driver: &Driver, range: AddressRange) -> Outcome<[String; 3]> {
    let said = |result: hmem_core::Result<()>| match result {
        Ok(()) => Ok("exported".to_owned()),
        Err(error) if error.is_unsupported() || error.driver().is_some() => {
            let code = error.driver().map(ToString::to_string);
            Ok(format!("refused: {}", code.unwrap_or_else(|| error.kind().text().to_owned())))
        }
        Err(error) => Err(Failure::from(error)),
    };
    let cuda = &driver.cuda;
    let dma_buf = || {
        let export = cuda.export_dma_buf(range, &nic(), DmaBufMapping::Default)?;
        cuda.release_dma_buf(export)
    };
    // The first export makes the driver open files of its own, so the fds are counted after it.
    said(dma_buf())?;
    let before = open_fds();
    let dma_buf = said(dma_buf())?;
    let left = open_fds() as i64 - before as i64;
    let peer = said(cuda.export_peer_memory(range, &nic()).map(drop))?;
    Ok([dma_buf, peer, left.to_string()])
}

/// Checks that page-locked memory of the application, which is host memory, is not exported as
/// device memory.
pub(crate) fn page_locked(driver: &Driver, report: &mut Report<'_>) {
    report.table("Exports of page-locked host memory of the application", &COLUMNS);
    let page = rustix::param::page_size() as u64;
    let memory = vec![0u8; 3 * page as usize];
    let start = Address(Address::of_ptr(memory.as_ptr()).0.next_multiple_of(page));
    report.row(&["page-locked", "refused: unsupported"], || {
        let range = AddressRange::new(start, 2 * page).expect("no wrap");
        // SAFETY: the memory stays mapped until its page-locking ends below.
        unsafe { driver.cuda.host_register(range) }?;
        let cells = attempt(|| exports(driver, range));
        let cells = and(cells, driver.cuda.host_unregister(range).map_err(Failure::from))?;
        let (cells, met) = judge_refusals(cells);
        Ok(Row::new(cells).met(met))
    });
}

/// Returns the table cells of exports that must be refused. Also returns true if both exports were
/// refused and `left`, the number of fds that stayed open, is 0.
pub(crate) fn judge_refusals([dma_buf, peer, left]: [String; 3]) -> ([String; 3], bool) {
    let judge = |cell: String| match cell.starts_with("refused") {
        true => (cell, true),
        false => (format!("NOT MET: {cell}"), false),
    };
    let ((dma_buf, first), (peer, second)) = (judge(dma_buf), judge(peer));
    let none = left == "0";
    ([dma_buf, peer, left], first && second && none)
}

/// Exports memory that another process allocated. `cuda.h` does not specify the result, so both
/// success and a refusal are accepted.
pub(crate) fn imported(driver: &Driver, report: &mut Report<'_>) {
    report.table("Exports of another process's memory", &COLUMNS);
    report.row(&["imported", "any answer of the driver: success or a code"], || {
        driver.with(4 << 20, AllocationKind::Device, |memory| {
            let handle = match driver.cuda.ipc_export(memory) {
                Err(error) if error.is_unsupported() => return Err(Failure::lacking(error)),
                handle => handle?,
            };
            let text: String = handle.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let output = Command::new(program)
                .args([IMPORT, &text])
                .output()
                .map_err(|error| error.to_string())?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let cells = said.trim().split('|').map(str::to_owned).collect::<Vec<_>>();
            let cells: Result<[String; 3], _> = cells.try_into();
            match cells {
                Ok(cells) if output.status.success() => {
                    let met = cells[2] == "0";
                    Ok(Row::new(cells).met(met))
                }
                _ => Err(format!(
                    "{}: {said}{}",
                    output.status,
                    String::from_utf8_lossy(&output.stderr)
                )
                .into()),
            }
        })
    });
}

/// First argument of the importing process. The second argument is the handle.
pub(crate) const IMPORT: &str = "--import";

/// Runs in the importing process: returns the table cells, which that process prints.
pub(crate) fn import(driver: &Driver, text: &str) -> Outcome<String> {
    let digit = |at: usize| {
        text.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())
    };
    let bytes: Option<Vec<u8>> = (0..text.len() / 2).map(digit).collect();
    let bytes = bytes.ok_or_else(|| "no handle".to_owned())?;
    let memory = driver.cuda.ipc_open(&IpcHandle { iface: IfaceKind::CUDA, bytes })?;
    let range = memory.range.slice(0, 4096).ok_or_else(|| "less than a page".to_owned())?;
    let cells = attempt(|| exports(driver, range));
    // SAFETY: no code uses the memory.
    let closed = unsafe { driver.cuda.ipc_close(&memory) };
    Ok(and(cells, closed.map_err(Failure::from))?.join("|"))
}

/// Checks that a GDRCopy window copies bytes in both directions, if GDRCopy and its kernel module
/// are present.
pub(crate) fn gdrcopy(driver: &Driver, report: &mut Report<'_>) {
    report.say("GDRCopy", || {
        if driver.is_in_this_program() {
            return Err(Failure::lacking("not tried over memory that no GPU has"));
        }
        let gdr = match Gdrcopy::open() {
            Err(error) if error.is_unavailable() => {
                return Err(Failure::lacking(format_args!("absent: {error}")));
            }
            gdr => gdr?,
        };
        driver.with(1 << 20, AllocationKind::Device, |memory| {
            let range = memory.range.slice(70_001, 5000).expect("a part");
            // SAFETY: the window is closed before the memory is freed.
            let window = match unsafe { gdr.map(&driver.cuda, range) } {
                Err(error) if error.is_unsupported() => return Err(Failure::lacking(error)),
                window => window?,
            };
            let bytes: Vec<u8> = (0..5000u32).map(|at| (at * 31 % 251) as u8).collect();
            let (mut by_copy, mut by_window) = (vec![0; 5000], vec![0; 5000]);
            window.write(0, &bytes)?;
            // SAFETY: `with` frees the memory when this closure has returned.
            unsafe { driver.cuda.read(range.start(), &mut by_copy) }?;
            window.read(0, &mut by_window)?;
            if by_copy != bytes || by_window != bytes {
                return Err("read bytes differ from the written ones".to_owned().into());
            }
            Ok("works: bytes move in both directions".to_owned())
        })
    });
}
