//! The command-line arguments of `hmem` and of its subcommands.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum, error::ErrorKind};
use clap_complete::Shell;
use hmem::{Path, path::P2pPolicy};
use serde::{Deserialize, Serialize};

/// Inspect and test memory registration for RDMA on this machine
///
/// The simulated device and the loopback NICs are software and exist on every machine. They
/// show the library at work without a GPU and without RDMA hardware.
#[derive(Debug, Parser)]
#[command(name = "hmem", version, arg_required_else_help = true)]
#[command(subcommand_value_name = "COMMAND")]
pub struct Cli {
    /// Subcommand to run, with its arguments.
    #[command(subcommand)]
    pub command: Command,

    /// Use colours: auto (on a terminal, unless NO_COLOR is set), always or never
    #[arg(long, global = true, value_name = "WHEN", default_value_t, value_enum)]
    #[arg(hide_possible_values = true, hide_default_value = true, display_order = 90)]
    pub color: Color,

    /// Print the library's log on stderr: -v for decisions and refusals, -vv for every step
    #[arg(short, long, global = true, action = clap::ArgAction::Count, display_order = 91)]
    pub verbose: u8,
}

/// The subcommands of `hmem`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the ifaces, devices and NICs of this machine, and the path of each pair
    Info(InfoArgs),
    /// Move bytes between each kind of memory and each NIC, verify them, and test the caches
    Check(CheckArgs),
    /// Show how each NIC reaches each memory, which paths were refused, why, and what to do
    Explain(ExplainArgs),
    /// Draw how devices and NICs are connected: PCIe tree, distances, ACS, IOMMU
    Topo(TopoArgs),
    /// Measure and verify transfers: run --server on one host, and name that host on the other
    Perf(PerfArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Print the man page of hmem or of one of its commands
    Man(ManArgs),
}

impl Command {
    /// Returns the value of `--nic`.
    pub(crate) fn nic(&self) -> Option<&str> {
        match self {
            Self::Info(args) => args.nic.as_deref(),
            Self::Check(args) => args.provider.as_deref(),
            Self::Explain(args) => args.nic.as_deref(),
            Self::Perf(args) => args.nic.as_deref(),
            Self::Topo(_) | Self::Completions(_) | Self::Man(_) => None,
        }
    }
}

/// Arguments of `hmem completions`.
#[derive(Clone, Debug, Args)]
#[command(override_usage = "hmem completions [OPTIONS] SHELL")]
pub struct CompletionsArgs {
    /// Shell that will run the script
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// Arguments of `hmem man`.
#[derive(Clone, Debug, Args)]
pub struct ManArgs {
    /// Command to describe instead of hmem itself
    #[arg(value_name = "COMMAND")]
    pub command: Option<String>,
}

/// Values of `--color`: when the output has colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// Colours only if stdout is a terminal, `TERM` is not `dumb`, and `NO_COLOR` is unset or
    /// empty.
    #[default]
    Auto,
    /// Colours in every output, including files and pipes.
    Always,
    /// No colours.
    Never,
}

/// Arguments of `hmem info`.
#[derive(Clone, Debug, Default, Args)]
pub struct InfoArgs {
    /// Print JSON (docs/check-schema.md) instead of tables
    #[arg(long)]
    pub json: bool,

    /// List only the NICs of this provider (verbs, libfabric, libfabric/tcp;ofi_rxm) or this NIC
    /// (verbs/mlx5_0)
    #[arg(long, value_name = "NAME", visible_alias = "provider")]
    pub nic: Option<String>,
}

/// Arguments of `hmem check`.
#[derive(Clone, Debug, Default, Args)]
pub struct CheckArgs {
    /// Print JSON (docs/check-schema.md) instead of a table
    #[arg(long)]
    pub json: bool,

    /// Check only memory of this iface (`hmem info` lists the ifaces)
    #[arg(long, value_name = "NAME")]
    pub iface: Option<String>,

    /// Check only the NICs of this provider (verbs, libfabric, libfabric/tcp;ofi_rxm) or this NIC
    /// (verbs/mlx5_0)
    #[arg(long = "nic", value_name = "NAME", visible_alias = "provider")]
    pub provider: Option<String>,

    /// Check only this path from memory to NIC: plain-host, dma-buf, peer-memory or staged
    #[arg(long, value_name = "NAME", value_parser = path)]
    pub path: Option<Path>,

    /// Transfer this many bytes (4096, 64KiB, 8MiB) instead of several sizes up to 8 MiB
    #[arg(long, value_name = "N", value_parser = bytes, allow_negative_numbers = true)]
    pub bytes: Option<u64>,

    /// Finish sooner: skip transfers of 8 MiB, free and reallocate memory 500 times under each
    /// cache monitor instead of 10000 times, and estimate the throughput from one transfer
    #[arg(long, conflicts_with = "bytes")]
    pub quick: bool,
}

/// Arguments of `hmem explain`.
#[derive(Clone, Debug, Default, Args)]
pub struct ExplainArgs {
    /// Print JSON (docs/explain-schema.md) instead of text
    #[arg(long)]
    pub json: bool,

    /// Explain only memory of this iface (`hmem info` lists the ifaces)
    #[arg(long, value_name = "NAME")]
    pub iface: Option<String>,

    /// Explain only memory of this device of the iface, by its number
    #[arg(long, value_name = "N", requires = "iface", value_parser = number::<u32>)]
    #[arg(allow_negative_numbers = true)]
    pub device: Option<u32>,

    /// Explain only the NICs of this provider (verbs, libfabric, libfabric/tcp;ofi_rxm) or this
    /// NIC (verbs/mlx5_0)
    #[arg(long, value_name = "NAME", visible_alias = "provider")]
    pub nic: Option<String>,

    /// Register this many bytes (4096, 64KiB, 8MiB) instead of one page
    #[arg(long, value_name = "N", value_parser = bytes, allow_negative_numbers = true)]
    pub size: Option<u64>,

    /// Policy for direct access of NICs to device memory: enabled, preferred, required or disabled
    #[arg(long, value_name = "NAME", value_parser = policy, default_value = "enabled")]
    pub policy: P2pPolicy,

    /// Register pointers of these sorts, to test that wrong ones are refused: interior (correct),
    /// past-end, freed, foreign (memory of another iface), null, or all
    #[arg(long, value_name = "SORT", value_enum, value_delimiter = ',')]
    #[arg(hide_possible_values = true)]
    pub pointer: Vec<PointerSort>,
}

/// A sort of pointer that `hmem explain --pointer` registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PointerSort {
    /// A range from the middle of an allocation to its end.
    Interior,
    /// A range that begins directly after an allocation.
    PastEnd,
    /// The range of an allocation that was freed.
    Freed,
    /// An allocation that belongs to another iface than the registration names.
    Foreign,
    /// A range that begins at address 0.
    Null,
    /// All sorts of pointers, one after another.
    All,
}

impl PointerSort {
    /// All sorts but `All`, in the order of the output.
    const EACH: [Self; 5] = [Self::Interior, Self::PastEnd, Self::Freed, Self::Foreign, Self::Null];

    /// Returns the sorts in `given` without duplicates. `All` selects every sort.
    pub(crate) fn selected(given: &[Self]) -> impl Iterator<Item = Self> {
        let is_given = |sort: &Self| given.contains(sort) || given.contains(&Self::All);
        Self::EACH.into_iter().filter(is_given)
    }

    /// Returns the name of this sort of pointer on the command line, such as `past-end`.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no sort is hidden from the command line");
        value.get_name().to_owned()
    }
}

/// Arguments of `hmem topo`.
#[derive(Clone, Debug, Default, Args)]
pub struct TopoArgs {
    /// Print JSON (docs/topo-schema.md) instead of text
    #[arg(long)]
    pub json: bool,

    /// Show all PCI functions, not only accelerators, network controllers and their bridges
    #[arg(long, conflicts_with = "json")]
    pub all: bool,

    /// Draw a recording of another machine (a folder, tar or tar.gz) instead of this machine
    #[arg(long, value_name = "PATH")]
    pub from: Option<PathBuf>,

    /// Record this machine in a tar.gz file, without serial numbers, network addresses and host
    /// name
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,

    /// Write an SVG picture of devices and NICs, with the distance of each pair
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `hmem perf`.
#[derive(Clone, Debug, Args)]
#[command(
    override_usage = "hmem perf [OPTIONS] HOST\n       hmem perf [OPTIONS] --server\n       \
    hmem perf [OPTIONS] --loopback"
)]
#[command(group = ArgGroup::new("role").required(true).args(["host", "server", "loopback"]))]
pub struct PerfArgs {
    /// Host that runs `hmem perf --server`: measure transfers with it
    #[arg(value_name = "HOST")]
    pub host: Option<String>,

    /// Wait for a client, measure transfers with it, and exit
    #[arg(long)]
    pub server: bool,

    /// Run client and server in this process, over the software NIC unless --nic names another
    #[arg(long)]
    pub loopback: bool,

    /// Measure each path between a device's memory and the NIC, with writes and reads of host
    /// memory of the largest size, and print the variable that lists the direct paths, fastest
    /// first
    #[arg(long, requires = "loopback")]
    #[arg(conflicts_with_all = ["host", "server", "op", "measure", "ordering", "metrics"])]
    pub compare_paths: bool,

    /// TCP port on which the server listens; 0 for any free port
    #[arg(long, value_name = "N", default_value_t = 18600, conflicts_with = "loopback")]
    #[arg(allow_negative_numbers = true)]
    pub port: u16,

    /// IP address on which the server listens
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0", value_parser = ip_address)]
    #[arg(conflicts_with_all = ["host", "loopback"])]
    pub bind: IpAddr,

    /// Serve clients one after another until the server is killed
    #[arg(long, conflicts_with_all = ["host", "loopback"])]
    pub persistent: bool,

    /// Transfer memory of this iface on this side (`hmem info` lists the ifaces)
    #[arg(long, value_name = "NAME", default_value = "system")]
    pub iface: String,

    /// Transfer memory of this device of the iface, by its number
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u32>)]
    #[arg(allow_negative_numbers = true)]
    pub device: u32,

    /// Use this NIC (verbs/mlx5_0) or the first NIC of this provider (verbs, libfabric,
    /// libfabric/tcp;ofi_rxm) on this side, instead of the first RDMA NIC
    #[arg(long, value_name = "NAME", visible_alias = "provider")]
    pub nic: Option<String>,

    /// Operation to measure: write, read, send or atomic (a 64-bit fetch-add)
    #[arg(long, value_name = "OP", default_value_t, value_enum, hide_possible_values = true)]
    #[arg(conflicts_with = "server")]
    pub op: PerfOp,

    /// Bytes of each transfer: sizes (64, 4KiB), and ranges that double (8..1M), separated by
    /// commas
    #[arg(long, value_name = "SIZES", value_parser = sizes, conflicts_with = "server")]
    #[arg(default_value = "8,4KiB,64KiB,1MiB", allow_negative_numbers = true)]
    pub size: Sizes,

    /// Transfers in flight at once while bandwidth is measured; latency is measured one at a time
    #[arg(long, value_name = "N", default_value_t = 64, conflicts_with = "server")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096), allow_negative_numbers = true)]
    pub depth: u32,

    /// Figures to measure: bandwidth, latency or both
    #[arg(long, value_name = "WHAT", default_value_t, value_enum, hide_possible_values = true)]
    #[arg(conflicts_with = "server")]
    pub measure: Measure,

    /// Number of transfers in each measurement
    #[arg(long, value_name = "N", default_value_t = 1000)]
    #[arg(conflicts_with_all = ["server", "duration"], value_parser = iterations)]
    #[arg(allow_negative_numbers = true)]
    pub iterations: u64,

    /// Seconds that each measurement takes, instead of a number of transfers
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "server")]
    #[arg(allow_negative_numbers = true)]
    pub duration: Option<Duration>,

    /// Write ordering of the registrations on both sides: strict, relaxed (as PCI Express defines
    /// it), or both, one after the other, with the gain of relaxed over strict; by default both on
    /// an RDMA NIC, and strict on the software NIC and on NICs of libfabric, which ignore the
    /// ordering
    #[arg(long, value_name = "ORDER", value_enum, hide_possible_values = true)]
    #[arg(conflicts_with = "server")]
    pub ordering: Option<PerfOrdering>,

    /// Seed of the bytes that are transferred and verified, instead of a random seed
    #[arg(long, value_name = "N", conflicts_with = "server", value_parser = number::<u64>)]
    #[arg(allow_negative_numbers = true)]
    pub seed: Option<u64>,

    /// Add the counts of this side's domains to the report: registrations with their latency and
    /// bytes by path, refusals by cause, lookups of the cache
    #[arg(long)]
    pub metrics: bool,

    /// Print JSON (docs/perf-schema.md) instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Operation that `hmem perf` measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PerfOp {
    /// RMA writes into the server's memory.
    #[default]
    Write,
    /// RMA reads of the server's memory.
    Read,
    /// Messages to the server.
    Send,
    /// 64-bit fetch-adds on the server's memory.
    Atomic,
}

/// Write orderings with which `hmem perf` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PerfOrdering {
    /// Writes become visible in the order in which the NIC issues them.
    Strict,
    /// Writes may overtake each other.
    Relaxed,
    /// Both orderings, one after the other: first strict, then relaxed.
    Both,
}

/// Figures that `hmem perf` measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Measure {
    /// Both figures, one after the other: first the bandwidth, then the latency.
    #[default]
    Both,
    /// Bandwidth, with many transfers in flight.
    Bandwidth,
    /// Latency, with one transfer in flight.
    Latency,
}

/// Transfer sizes in bytes, in the order of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// Maximum size of a transfer of `hmem perf`, in bytes.
pub(crate) const LARGEST: u64 = 1 << 30;
/// Maximum number of transfer sizes in one run of `hmem perf`.
pub(crate) const MOST_SIZES: usize = 64;

fn sizes(text: &str) -> Result<Sizes, String> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (mut size, last) = match part.split_once("..") {
            Some((first, last)) if first.trim().is_empty() || last.trim().is_empty() => {
                return Err("a range has two ends, for example 8..1M".to_owned());
            }
            Some((first, last)) => (bytes(first.trim())?, bytes(last.trim())?),
            None => (bytes(part.trim())?, bytes(part.trim())?),
        };
        if size > last {
            return Err("a range goes upwards, for example 8..1M".to_owned());
        }
        if last > LARGEST {
            return Err("a transfer has at most 1 GiB".to_owned());
        }
        while size < last {
            all.push(size);
            size *= 2;
        }
        all.push(last);
    }
    if all.len() > MOST_SIZES {
        return Err(format!("at most {MOST_SIZES} sizes"));
    }
    Ok(Sizes(all))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "use 0.001 to 86400 seconds".to_owned())
}

/// Parses a decimal number that fits into the type `T`.
fn number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let fitting = text.parse::<u64>().ok().and_then(|number| T::try_from(number).ok());
    fitting.ok_or_else(|| {
        let largest = u64::MAX >> (u64::BITS - 8 * size_of::<T>() as u32);
        format!("use a decimal number from 0 to {largest}")
    })
}

fn ip_address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| "use an IP address of this host, for example 10.0.0.1 or ::".to_owned())
}

fn iterations(text: &str) -> Result<u64, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "use a number, 1 or more".to_owned())
}

fn path(name: &str) -> Result<Path, String> {
    [Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged]
        .into_iter()
        .find(|path| path.name() == name)
        .ok_or_else(|| "use plain-host, dma-buf, peer-memory or staged".to_owned())
}

fn policy(name: &str) -> Result<P2pPolicy, String> {
    let found = P2pPolicy::ALL.into_iter().find(|policy| policy.name() == name);
    found.ok_or_else(|| "use enabled, preferred, required or disabled".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        _ if number.is_empty() => None,
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        _ => None,
    };
    let shift = shift.ok_or("use bytes, or a number with KiB, MiB or GiB")?;
    // `number` has only digits here, so parsing fails only if the number is too large.
    match number.parse().ok().and_then(|number: u64| number.checked_mul(1 << shift)) {
        Some(0) => Err("use at least one byte".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("must be below 2^64 bytes".to_owned()),
    }
}

/// Formats an error of clap on one line, with the accepted values and without the usage. If
/// the error has a tip, the tip is on a second line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let complaint = text.split("\n\nUsage:").next().unwrap_or(&text);
    let complaint = complaint.split("\n\nFor more information").next().unwrap_or(complaint);
    let mut text = String::new();
    for part in complaint.split("\n\n") {
        let part = part.split_whitespace().collect::<Vec<_>>().join(" ");
        // A tip begins a new line.
        let before = match text.as_str() {
            "" => "",
            _ if part.starts_with("tip: ") => "\n  ",
            _ => " ",
        };
        text.extend([before, &part]);
    }
    if error.kind() == ErrorKind::MissingRequiredArgument && text.ends_with("<SHELL>") {
        let shells: Vec<_> = Shell::value_variants().iter().map(Shell::to_string).collect();
        text.push_str(&format!("; use {}", shells.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn byte_counts_parse_with_and_without_units() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64KiB"), Ok(65536));
        assert_eq!(bytes("8 MiB"), Ok(8 << 20));
        assert_eq!(bytes("1g"), Ok(1 << 30));
        for wrong in
            ["", "0", "x", "-1", "1.5", "4 parsecs", "99999999999999999999", "99999999999GiB"]
        {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_parse_as_lists_and_ranges() {
        assert_eq!(sizes("64"), Ok(Sizes(vec![64])));
        assert_eq!(sizes("8..64"), Ok(Sizes(vec![8, 16, 32, 64])));
        assert_eq!(sizes("3..10, 1M"), Ok(Sizes(vec![3, 6, 10, 1 << 20])));
        for wrong in ["", ",", "8..", "..8", "64..8", "0..8", "2GiB", "1..1,1..1..2"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
        assert!(sizes(&vec!["1"; MOST_SIZES + 1].join(",")).is_err());
    }

    #[test]
    fn durations_parse_as_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "0", "-1", "NaN", "inf", "1e300", "5s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn usage_errors_are_printed_on_one_line() {
        for wrong in [
            &["hmem", "check", "--path", "teleport"][..],
            &["hmem", "frobnicate"],
            &["hmem", "check", "--bytes", "-1"],
            &["hmem", "perf", "--loopback", "--duration", "-1"],
            &["hmem", "perf", "--loopback", "--seed", "-1"],
            &["hmem", "explain", "--iface", "cuda", "--device", "x"],
            &["hmem", "--color", "purple", "info"],
        ] {
            let line = one_line(&Cli::try_parse_from(wrong).unwrap_err());
            assert!(
                line.starts_with("error: ") && !line.contains('\n') && !line.contains("Usage"),
                "{line}"
            );
            assert!(!line.contains("unexpected") && !line.contains("digit"), "{line}");
        }
    }
}
