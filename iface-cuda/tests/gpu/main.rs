//! Measures a GPU and writes a Markdown report: exports of every kind and size, identities of
//! reused addresses, copies compared with the driver's own, and the cost of queries.
//!
//! With `HMEM_CUDA=real` it runs over the driver of the machine. Otherwise it makes a few
//! measurements over the fake driver, which tests the program itself. Arguments name the parts to
//! run; `--parts` lists them. Without arguments all parts run. Exit status: 0 passed, 1 something
//! failed, 2 usage, 3 no driver or no GPU. `tests/gpu/run` is the command. The program needs only
//! the driver library, so it can be built on one machine and copied to another.
#![allow(unsafe_code)]

mod calls;
mod driver;
mod exports;
mod figures;
mod others;
mod report;
#[path = "../../../tests/subscriber/mod.rs"]
mod subscriber;
mod trial;

use std::{fs, io, process::ExitCode};

use hmem_core::{AllocationKind, Iface, IfaceExt};

use self::{driver::Driver, report::Report};

/// Extent of the measurements: sizes and repetitions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) largest_export: u64,
    pub(crate) largest_copy: u64,
    pub(crate) cost_sizes: &'static [u64],
    pub(crate) reuse_rounds: u64,
    pub(crate) repetitions: u32,
}

const REAL: Extent = Extent {
    largest_export: 16 << 30,
    largest_copy: 1 << 30,
    cost_sizes: &[64 << 10, 2 << 20, 64 << 20, 1 << 30],
    reuse_rounds: 100_000,
    repetitions: 21,
};

const FAKE: Extent = Extent {
    largest_export: 4 << 20,
    largest_copy: 1 << 20,
    cost_sizes: &[64 << 10, 2 << 20],
    reuse_rounds: 100,
    repetitions: 3,
};

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Virtual,
    AllocationKind::StreamOrdered,
    AllocationKind::Managed,
    AllocationKind::Host,
];

/// The parts of the report, each of which can run alone.
#[derive(Clone, Copy, Debug)]
enum Part {
    Machine,
    Monitor,
    Export(AllocationKind),
    PageLocked,
    Imported,
    Gdrcopy,
    Identities(AllocationKind),
    Copies { locked: bool },
    Calls,
    CostOfTheSystem,
    Costs(AllocationKind),
}

impl Part {
    fn all() -> Vec<Self> {
        let reused = KINDS.into_iter().filter(|kind| *kind != AllocationKind::Virtual);
        let mut parts = vec![Self::Machine, Self::Monitor];
        parts.extend(KINDS.map(Self::Export));
        parts.extend([Self::PageLocked, Self::Imported, Self::Gdrcopy]);
        parts.extend([
            Self::Copies { locked: true },
            Self::Copies { locked: false },
            Self::Calls,
            Self::CostOfTheSystem,
        ]);
        parts.extend(KINDS.map(Self::Costs));
        parts.extend(reused.map(Self::Identities));
        parts
    }

    fn name(self) -> String {
        match self {
            Self::Machine => "machine".to_owned(),
            Self::Monitor => "monitor".to_owned(),
            Self::Export(kind) => format!("export-{}", kind.name()),
            Self::PageLocked => "export-page-locked".to_owned(),
            Self::Imported => "export-imported".to_owned(),
            Self::Gdrcopy => "gdrcopy".to_owned(),
            Self::Identities(kind) => format!("identities-{}", kind.name()),
            Self::Copies { locked: true } => "copies-page-locked".to_owned(),
            Self::Copies { locked: false } => "copies-pageable".to_owned(),
            Self::Calls => "calls".to_owned(),
            Self::CostOfTheSystem => "cost-system".to_owned(),
            Self::Costs(kind) => format!("cost-{}", kind.name()),
        }
    }

    fn write(self, driver: &Driver, extent: Extent, report: &mut Report<'_>) {
        match self {
            Self::Machine => machine(driver, report),
            Self::Monitor => report.say("Cache monitor", || driver.monitor()),
            Self::Export(kind) => exports::write(driver, extent, kind, report),
            Self::PageLocked => others::page_locked(driver, report),
            Self::Imported => others::imported(driver, report),
            Self::Gdrcopy => others::gdrcopy(driver, report),
            Self::Identities(kind) => figures::identities(driver, extent, kind, report),
            Self::Copies { locked } => figures::copies(driver, extent, locked, report),
            Self::Calls => calls::write(driver, report),
            Self::CostOfTheSystem => figures::cost_of_the_system(driver, extent, report),
            Self::Costs(kind) => figures::costs(driver, extent, kind, report),
        }
    }
}

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--parts") {
        Part::all().into_iter().for_each(|part| println!("{}", part.name()));
        return ExitCode::SUCCESS;
    }
    if let Some(at) = arguments.iter().position(|argument| argument == others::IMPORT) {
        return import(arguments.get(at + 1).map_or("", String::as_str));
    }
    let print = arguments.iter().any(|argument| argument == "--print");
    arguments.retain(|argument| !argument.starts_with("--"));
    let all = Part::all();
    if let Some(unknown) =
        arguments.iter().find(|name| all.iter().all(|part| part.name() != **name))
    {
        eprintln!("gpu: no part is called {unknown}: --parts lists them");
        return ExitCode::from(2);
    }
    let mut parts = all;
    parts.retain(|part| arguments.is_empty() || arguments.contains(&part.name()));
    if !real() {
        trial::show(&parts, print);
        return ExitCode::SUCCESS;
    }
    match Driver::real() {
        Ok(driver) => {
            let failures = write(driver, &parts, &mut Report::new(&mut io::stdout()));
            ExitCode::from(u8::from(failures > 0))
        }
        Err(absent) => {
            eprintln!("gpu: {}", absent.error);
            if absent.machine {
                return ExitCode::from(3);
            }
            println!("\nFAILED: {}", absent.error);
            ExitCode::FAILURE
        }
    }
}

fn real() -> bool {
    std::env::var("HMEM_CUDA").is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"))
}

/// Runs in the child process: opens memory of the parent process.
fn import(handle: &str) -> ExitCode {
    let driver = if real() {
        Driver::real().map_err(|absent| absent.error.into())
    } else {
        Ok(Driver::fake())
    };
    let cells = driver.and_then(|driver| {
        let cells = others::import(&driver, handle);
        report::and(cells, driver.close())
    });
    match &cells {
        Ok(cells) => println!("{cells}"),
        Err(failure) => eprintln!("gpu: {}", failure.text()),
    }
    ExitCode::from(u8::from(cells.is_err()))
}

/// Writes the selected parts of the report, and counts failures.
fn write(driver: Driver, parts: &[Part], report: &mut Report<'_>) -> u32 {
    let extent = if driver.is_real() { REAL } else { FAKE };
    for part in parts {
        part.write(&driver, extent, report);
    }
    if let Err(failure) = driver.close() {
        report.say("The end", || Err(failure));
    }
    report.failures()
}

fn machine(driver: &Driver, report: &mut Report<'_>) {
    let title =
        if driver.is_real() { "A GPU" } else { "The fake driver: the figures mean nothing" };
    report.line(format_args!("## {title}\n"));
    report.say("CUDA", || Ok(format!("{} ({})", driver.version()?, driver.functions.library())));
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let first = |text: String| text.lines().next().unwrap_or("none").to_owned();
    report.say("Kernel module", || Ok(first(read("/proc/driver/nvidia/version"))));
    report.say("Kernel", || Ok(first(read("/proc/sys/kernel/osrelease"))));
    report.say("Modules", || {
        let modules = read("/proc/modules");
        let names = modules.lines().filter_map(|line| line.split(' ').next());
        let ours = ["nvidia", "gdrdrv", "ib_", "mlx"];
        let found: Vec<_> =
            names.filter(|name| ours.iter().any(|start| name.starts_with(start))).collect();
        Ok(if found.is_empty() { "none".to_owned() } else { found.join(" ") })
    });
    report.say("Devices", || {
        let devices = driver.cuda.devices()?.into_iter().map(|device| {
            let (gib, at) = (device.memory >> 30, device.pci_bus_id.unwrap_or_default());
            format!("{}: {}, {gib} GiB, {at}", device.id.0, device.name)
        });
        Ok(devices.collect::<Vec<_>>().join("; "))
    });
    report.say("Iface", || Ok(format!("{:?}", driver.cuda.capability())));
    for (attribute, name) in driver::ATTRIBUTES {
        report.say(name, || Ok(driver.attribute(attribute)));
    }
}
