//! The texts after the options in `--help` and in man pages: variables, exit statuses and examples.

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

/// Columns of help that does not go to a terminal.
const WIDTH: usize = 100;
/// The fewest columns of a description beside its term.
const DESCRIPTION: usize = 28;

/// Terms with their descriptions, and a text, under a title.
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

const WRONG: (&str, &str) = ("2", "wrong arguments, or an invalid value in the environment");

/// The sections of the command and of each subcommand.
const SECTIONS: [(&str, &[Section]); 8] = [
    (
        "hmem",
        &[
            Section {
                title: "Environment",
                terms: &[
                    ("FI_HMEM", "ifaces to start: names separated by ; or ,"),
                    ("FI_HMEM_DISABLE_P2P", "boolean: no NIC accesses device memory directly"),
                    ("FI_MR_CACHE_MAX_COUNT", "number: entries of a registration cache"),
                    ("FI_MR_CACHE_MAX_SIZE", "number: bytes of a registration cache"),
                    ("FI_MR_CACHE_MERGE_REGIONS", "boolean: merge cached regions"),
                    ("FI_MR_CACHE_MONITOR", "auto, memhooks, userfaultfd, import or disabled"),
                    ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", "boolean; also for ROCR and ZE"),
                    (
                        "HMEM_CUDA_LIBRARY",
                        "file to load instead of libcuda.so.1; also for ROCR, ZE, NEURON, \
                         SYNAPSEAI and HLTHUNK",
                    ),
                    ("HMEM_CUDA_MONITOR", "auto, hooks or identity"),
                    ("HMEM_NEURON_START_RUNTIME", "boolean: start the Neuron runtime"),
                    ("HMEM_SYNAPSEAI_START_RUNTIME", "boolean: acquire a Gaudi device"),
                    (
                        "HMEM_VERBS_PCIE_MAPPING",
                        "boolean: NICs need the PCIe mapping of device memory",
                    ),
                    ("COLUMNS", "width of the output"),
                    ("NO_COLOR", "no colours, unless --color asks for them"),
                ],
                text: "A boolean is 0, no, false, off, 1, yes, true or on.",
            },
            Section::exit_status(&[
                ("0", "success"),
                ("1", "a check, measurement or path failed, or hardware is missing"),
                WRONG,
            ]),
        ],
    ),
    ("info", &[Section::exit_status(&[("0", "listed"), WRONG])]),
    (
        "check",
        &[Section::exit_status(&[
            ("0", "all verified"),
            (
                "1",
                "a combination failed, nothing could be checked, or an iface that FI_HMEM names \
                 is unavailable",
            ),
            WRONG,
        ])],
    ),
    (
        "explain",
        &[Section {
            title: "Exit status",
            text: "With --pointer: 0 if each wrong pointer was refused, 1 if one was not or could \
                   not be tried.",
            terms: &[
                ("0", "each pair has a path"),
                (
                    "1",
                    "a pair has none, nothing could be explained, or an iface that FI_HMEM names \
                     is unavailable",
                ),
                WRONG,
            ],
        }],
    ),
    (
        "topo",
        &[Section::exit_status(&[
            ("0", "done"),
            ("1", "the topology cannot be read or written"),
            ("2", "wrong arguments"),
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
                ("0", "measured and verified"),
                ("1", "a measurement failed, or the NIC is unavailable"),
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

/// Returns the command line with its help, which fits the terminal.
#[must_use]
pub fn command() -> Command {
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

/// Prints the man page of a command. The caller has called [`Command::build`].
///
/// # Errors
/// The error of the writer.
pub fn man(page: Command, out: &mut dyn Write) -> io::Result<()> {
    let name = page.get_name().to_owned();
    // The title has the version.
    let page = page.version(None::<&'static str>);
    let version = concat!("hmem ", env!("CARGO_PKG_VERSION"));
    Man::new(page).source(version).manual("User Commands").render(out)?;
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
