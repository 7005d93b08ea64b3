//! The text after the options in `--help` and in man pages: variables, exit statuses and examples.

use std::io::{self, Write};

use clap::{Command, CommandFactory};
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::{
    args::Cli,
    table::{columns, wrap},
};

/// Width of the help, in columns, if stdout is not a terminal.
const WIDTH: usize = 100;
/// Minimum width of a description beside its term, in columns.
const DESCRIPTION: usize = 28;

/// A section of the help: a title, terms with their descriptions, and a text.
struct Section {
    title: &'static str,
    terms: &'static [(&'static str, &'static str)],
    text: &'static str,
}

impl Section {
    const fn of_text(title: &'static str, text: &'static str) -> Self {
        Self { title, terms: &[], text }
    }

    const fn exit_status(terms: &'static [(&'static str, &'static str)]) -> Self {
        Self { title: "Exit status", terms, text: "" }
    }
}

const WRONG: (&str, &str) = ("2", "a bad command line, or a bad value in an environment variable");

/// The help sections of `hmem` and of each subcommand, by the name of the command.
const SECTIONS: [(&str, &[Section]); 8] = [
    (
        "hmem",
        &[
            Section {
                title: "Environment",
                terms: &[
                    (
                        "FI_HMEM",
                        "ifaces to start besides host memory, separated by ; or ,; one that is not \
                         compiled in counts as unavailable",
                    ),
                    (
                        "FI_HMEM_DISABLE_P2P",
                        "boolean: forbid NICs to access device memory directly",
                    ),
                    (
                        "FI_MR_CACHE_MAX_COUNT",
                        "most entries of a registration cache; 0 disables it",
                    ),
                    ("FI_MR_CACHE_MAX_SIZE", "most bytes of a registration cache; 0 disables it"),
                    (
                        "FI_MR_CACHE_MERGE_REGIONS",
                        "boolean: merge overlapping and adjacent regions",
                    ),
                    (
                        "FI_MR_CACHE_MONITOR",
                        "how caches detect freed host memory: auto (also kdreg2), memhooks, \
                         userfaultfd or disabled (no caching, of device memory either)",
                    ),
                    (
                        "FI_MR_CUDA_CACHE_MONITOR_ENABLED",
                        "boolean: cache registrations of CUDA memory; also with ROCR or ZE in \
                         place of CUDA",
                    ),
                    (
                        "HMEM_CUDA_LIBRARY",
                        "file to load instead of libcuda.so.1; also with ROCR, ZE, NEURON, \
                         SYNAPSEAI, HLTHUNK or LIBFABRIC in place of CUDA",
                    ),
                    (
                        "HMEM_CUDA_MONITOR",
                        "how caches detect freed CUDA memory: auto, hooks or identity",
                    ),
                    (
                        "HMEM_DIRECT_PATHS",
                        "direct paths to device memory, in the order in which they are tried: \
                         dma-buf, dma-buf-pcie, dma-buf-data-direct and peer-memory, separated by \
                         commas, or none",
                    ),
                    ("HMEM_NEURON_START_RUNTIME", "boolean: start the Neuron runtime"),
                    (
                        "HMEM_REACH_CHECK",
                        "boolean: transfer a page of device memory before the first use of each \
                         direct path",
                    ),
                    ("HMEM_SYNAPSEAI_START_RUNTIME", "boolean: acquire a Gaudi device"),
                    (
                        "HMEM_VERBS_PCIE_MAPPING",
                        "boolean: try the PCIe mapping of device memory before the default one",
                    ),
                    ("COLUMNS", "width of the output, instead of the terminal's"),
                    ("NO_COLOR", "no colours, unless --color is always"),
                ],
                text: "A boolean is 0, no, false, off, 1, yes, true or on.",
            },
            Section::exit_status(&[
                ("0", "success"),
                ("1", "the command failed, or what it needs is unavailable on this machine"),
                WRONG,
            ]),
        ],
    ),
    (
        "info",
        &[Section::exit_status(&[
            ("0", "success, also if hardware or libraries are unavailable"),
            ("1", "the machine cannot be listed"),
            WRONG,
        ])],
    ),
    (
        "check",
        &[Section::exit_status(&[
            ("0", "every combination was verified"),
            (
                "1",
                "a combination failed, nothing could be checked, a NIC cannot be opened, an iface \
                 cannot list its devices, or an iface that FI_HMEM names is unavailable or had no \
                 device memory verified",
            ),
            WRONG,
        ])],
    ),
    (
        "explain",
        &[Section {
            title: "Exit status",
            text: "With --pointer: 0 if each wrong pointer was refused, 1 if one was registered or \
                   could not be tried. The memory is registered for reads and writes by peers, so \
                   a NIC whose staged copies have only local rights (verbs) has no path staged.",
            terms: &[
                ("0", "each pair of memory and NIC has a path"),
                (
                    "1",
                    "a pair has no path or could not be explained, nothing could be explained, or \
                     an iface that FI_HMEM names is unavailable",
                ),
                WRONG,
            ],
        }],
    ),
    (
        "topo",
        &[Section::exit_status(&[
            ("0", "success"),
            ("1", "the topology cannot be read or written"),
            WRONG,
        ])],
    ),
    (
        "perf",
        &[
            Section::of_text(
                "Notes",
                "Both sides print the same report. The client selects the measurements.",
            ),
            Section::exit_status(&[
                ("0", "every transfer was measured and verified"),
                ("1", "a measurement failed, or the iface, NIC or other host is unavailable"),
                WRONG,
            ]),
        ],
    ),
    (
        "completions",
        &[Section::of_text(
            "Example",
            "hmem completions bash > ~/.local/share/bash-completion/completions/hmem",
        )],
    ),
    ("man", &[Section::of_text("Example", "hmem man perf | man -l -")]),
];

fn sections(command: &str) -> &'static [Section] {
    SECTIONS.iter().find(|(name, _)| *name == command).map_or(&[], |(_, sections)| sections)
}

/// Returns the parser of the command line, with help that fits the width of the terminal.
pub(crate) fn command() -> Command {
    let width = columns().unwrap_or(WIDTH);
    let command = Cli::command().term_width(width).after_help(after_help("hmem", width));
    SECTIONS.iter().skip(1).fold(command, |command, (name, _)| {
        command.mut_subcommand(name, |subcommand| subcommand.after_help(after_help(name, width)))
    })
}

/// Returns the sections of a command as text of at most `width` columns.
fn after_help(command: &str, width: usize) -> String {
    let mut lines = Vec::new();
    for section in sections(command) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(format!("{}:", section.title));
        let longest = section.terms.iter().map(|(term, _)| term.len()).max().unwrap_or(0);
        let beside = longest + 4 + DESCRIPTION <= width;
        let indent = if beside { longest + 4 } else { 6 };
        for (term, description) in section.terms {
            let described = wrap(description, width.saturating_sub(indent));
            let (head, rest) = match described.split_first() {
                Some((first, rest)) if beside => (format!("  {term:longest$}  {first}"), rest),
                _ => (format!("  {term}"), described.as_slice()),
            };
            lines.push(head);
            lines.extend(rest.iter().map(|line| format!("{}{line}", " ".repeat(indent))));
        }
        let text = wrap(section.text, width.saturating_sub(2));
        lines.extend(text.iter().filter(|line| !line.is_empty()).map(|line| format!("  {line}")));
    }
    lines.join("\n")
}

/// Prints the man page of a command. The caller must call [`Command::build`] first.
pub(crate) fn man(page: Command, out: &mut dyn Write) -> io::Result<()> {
    let name = page.get_name().to_owned();
    // The version is printed in the title of the page instead.
    let page = page.version(None::<&'static str>);
    let version = concat!("hmem ", env!("CARGO_PKG_VERSION"));
    let mut rendered = Vec::new();
    Man::new(page).source(version).manual("User Commands").render(&mut rendered)?;
    // The title `.TH` turns hyphenation on. Hyphens would split variables, options and paths, and
    // justified lines would contain wide gaps.
    for line in String::from_utf8_lossy(&rendered).split_inclusive('\n') {
        out.write_all(line.as_bytes())?;
        if line.starts_with(".TH ") {
            out.write_all(b".nh\n.ad l\n")?;
        }
    }
    let mut roff = Roff::new();
    for section in sections(&name) {
        roff.control("SH", [section.title.to_uppercase().as_str()]);
        for (term, description) in section.terms {
            roff.control("TP", []).text([bold(*term)]).text([roman(*description)]);
        }
        if !section.text.is_empty() {
            roff.control("PP", []).text([roman(section.text)]);
        }
    }
    out.write_all(roff.to_roff().as_bytes())
}
