//! What a GPU does, as a report in markdown: exports of every kind and size, identities on reuse, copies beside the
//! driver's own, and what asking costs.
//!
//! With `HMEM_CUDA=real` it runs over the machine's driver and its absence is a failure; otherwise over the fake one,
//! small, to show that the program works. `tests/gpu/run` is the command. It needs nothing but the driver library, so that
//! it can be built on one machine and carried to another.
#![allow(unsafe_code)]

mod driver;
mod exports;
mod figures;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use hmem_core::Iface;

use self::driver::Driver;

/// How far to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) largest_export: u64,
    pub(crate) largest_copy: u64,
    pub(crate) reuse_rounds: u64,
    pub(crate) repetitions: u32,
}

const REAL: Extent =
    Extent { largest_export: 16 << 30, largest_copy: 1 << 30, reuse_rounds: 100_000, repetitions: 21 };
const FAKE: Extent =
    Extent { largest_export: 4 << 20, largest_copy: 1 << 20, reuse_rounds: 100, repetitions: 3 };

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--parts") {
        println!("all");
        return ExitCode::SUCCESS;
    }
    let real =
        std::env::var("HMEM_CUDA").is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"));
    let extent = if real { REAL } else { FAKE };
    let driver = match if real { Driver::real() } else { Ok(Driver::fake()) } {
        Ok(driver) => driver,
        Err(absent) => {
            eprintln!("gpu: {}", absent.error);
            return ExitCode::from(if absent.machine { 3 } else { 1 });
        }
    };
    let mut report = Vec::new();
    write(&driver, extent, &mut report).expect("the report is written");
    driver.close();
    if real || std::env::args().any(|argument| argument == "--print") {
        io::stdout().write_all(&report).expect("print");
    } else {
        println!("the report runs over the fake driver; HMEM_CUDA=real runs it over a GPU (tests/gpu/run)");
    }
    ExitCode::SUCCESS
}

fn write(driver: &Driver, extent: Extent, out: &mut Vec<u8>) -> io::Result<()> {
    let title = if driver.is_real() { "A GPU" } else { "The fake driver: the figures mean nothing" };
    writeln!(out, "## {title}\n")?;
    writeln!(out, "CUDA {} ({})  ", driver.version(), driver.functions.library())?;
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    writeln!(out, "Kernel module: {}  ", module.lines().next().unwrap_or("none"))?;
    for device in driver.cuda.devices().expect("devices") {
        let gib = device.memory >> 30;
        writeln!(
            out,
            "Device {}: {}, {gib} GiB, {}  ",
            device.id.0,
            device.name,
            device.pci_bus_id.unwrap_or_default()
        )?;
    }
    writeln!(out, "Iface: {:?}\n", driver.cuda.capability())?;
    for (attribute, name) in driver::ATTRIBUTES {
        writeln!(out, "- {name}: {}", driver.attribute(attribute))?;
    }
    exports::write(driver, extent, out)?;
    figures::identities(driver, extent, out)?;
    figures::copies(driver, extent, out)?;
    figures::costs(driver, extent, out)
}
