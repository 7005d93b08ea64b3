//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use hmem::Path;

/// What memory and NICs this machine has, and whether they work together.
///
/// The simulated device and the loopback NIC are software and are always there: they show
/// what the library does on a machine without GPU or RDMA hardware. FI_HMEM and
/// FI_HMEM_DISABLE_P2P are read as libfabric reads them.
#[derive(Debug, Parser)]
#[command(name = "hmem", version, verbatim_doc_comment)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "Exit status: 0 all is well, 1 a check failed, 2 wrong usage or environment.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// Use colours: auto (on a terminal, unless NO_COLOR is set), always or never
    #[arg(long, global = true, value_name = "WHEN", default_value_t, value_enum)]
    #[arg(hide_possible_values = true, hide_default_value = true, display_order = 90)]
    pub color: Color,

    /// Log what the library does to stderr; twice for more
    #[arg(short, long, global = true, action = clap::ArgAction::Count, display_order = 91)]
    pub verbose: u8,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List ifaces, devices, NICs, and the path from each device to each NIC
    Info(InfoArgs),
    /// Register memory of every kind with every NIC and move verified bytes
    #[command(after_help = "Exit status: 0 all verified, 1 a combination failed or none could be checked, \
        2 wrong usage or environment.")]
    Check(CheckArgs),
}

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Arguments of `hmem info`.
#[derive(Clone, Debug, Default, Args)]
pub struct InfoArgs {
    /// Print JSON (docs/check-schema.md) instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `hmem check`.
#[derive(Clone, Debug, Default, Args)]
pub struct CheckArgs {
    /// Print JSON (docs/check-schema.md) instead of a table
    #[arg(long)]
    pub json: bool,

    /// Only memory of this iface, as `hmem info` names it
    #[arg(long, value_name = "NAME")]
    pub iface: Option<String>,

    /// Only this provider (loopback) or NIC (loopback/pinned)
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,

    /// Only this way from memory to NIC: plain-host, dma-buf, peer-memory or staged
    #[arg(long, value_name = "NAME", value_parser = path)]
    pub path: Option<Path>,

    /// Move this many bytes (4096, 64KiB, 8MiB) instead of the usual sizes
    #[arg(long, value_name = "N", value_parser = bytes)]
    pub bytes: Option<u64>,

    /// Leave out the large transfers: quicker, and throughput says little
    #[arg(long, conflicts_with = "bytes")]
    pub quick: bool,
}

fn path(name: &str) -> Result<Path, String> {
    [Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged]
        .into_iter()
        .find(|path| path.name() == name)
        .ok_or_else(|| "use plain-host, dma-buf, peer-memory or staged".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("use bytes, or a number with KiB, MiB or GiB".to_owned()),
    };
    let number: u64 = number.parse().map_err(|error| format!("{error}"))?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err("at least one byte".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("more than 64 bits can count".to_owned()),
    }
}

/// What clap said, as one line: the complaint and what would be right, without usage and hints.
#[must_use]
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let complaint = text.split("\n\nUsage:").next().unwrap_or(&text);
    let complaint = complaint.split("\n\nFor more information").next().unwrap_or(complaint);
    complaint.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_with_and_without_units() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64KiB"), Ok(65536));
        assert_eq!(bytes("8 MiB"), Ok(8 << 20));
        assert_eq!(bytes("1g"), Ok(1 << 30));
        for wrong in ["", "0", "x", "-1", "1.5", "4 parsecs", "99999999999999999999", "99999999999GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn usage_errors_are_one_line() {
        for wrong in [
            &["hmem", "check", "--path", "teleport"][..],
            &["hmem", "frobnicate"],
            &["hmem", "check", "--bytes", "-1"],
            &["hmem", "--color", "purple", "info"],
        ] {
            let line = one_line(&Cli::try_parse_from(wrong).unwrap_err());
            assert!(line.starts_with("error: ") && !line.contains('\n') && !line.contains("Usage"), "{line}");
        }
    }
}
