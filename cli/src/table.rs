//! Tables and headings as a person reads them.

use std::io::{self, IsTerminal, Write};

use comfy_table::{
    Attribute, Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle,
};

use crate::args::Color;

/// Columns of output that does not go to a terminal.
const WIDTH: u16 = 108;
const WIDEST: u16 = 140;

/// No lines but one under the header.
const RULED: TableStyle = TableStyle::new()
    .header_separator(LineStyle::new('\u{2500}', '\u{2500}', '\u{2500}', '\u{2500}'));

/// Colours of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be.
    Good,
    /// Neither.
    Plain,
    /// Not there, or refused.
    Dim,
    /// Wrong.
    Bad,
}

/// How to print.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    color: bool,
    width: u16,
}

impl Style {
    /// Without colours, for a fixed width.
    #[must_use]
    pub const fn plain() -> Self {
        Self { color: false, width: WIDTH }
    }

    /// For stdout: colours as asked, or on a terminal unless `NO_COLOR` is set.
    #[must_use]
    pub fn for_stdout(color: Color) -> Self {
        let terminal = io::stdout().is_terminal();
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                terminal && !refused && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
        };
        let width =
            if terminal { Table::new().width().unwrap_or(WIDTH).clamp(60, WIDEST) } else { WIDTH };
        Self { color, width }
    }

    /// Columns of a line.
    #[must_use]
    pub fn width(self) -> usize {
        usize::from(self.width)
    }

    /// An empty table with this header.
    #[must_use]
    pub fn table(self, header: &[&str]) -> Table {
        let mut table = Table::new();
        table
            .load_style(RULED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(self.width);
        if self.color {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(header.iter().map(|name| {
            let cell = Cell::new(name);
            if self.color { cell.add_attribute(Attribute::Bold) } else { cell }
        }));
        table
    }

    /// A cell in a tone.
    #[must_use]
    pub fn cell(self, text: impl ToString, tone: Tone) -> Cell {
        let cell = Cell::new(text);
        if !self.color {
            return cell;
        }
        match tone {
            Tone::Good => cell.fg(comfy_table::Color::Green),
            Tone::Plain => cell,
            Tone::Dim => cell.add_attribute(Attribute::Dim),
            Tone::Bad => cell.fg(comfy_table::Color::Red).add_attribute(Attribute::Bold),
        }
    }

    /// A number, to the right.
    #[must_use]
    pub fn number(self, number: impl ToString) -> Cell {
        Cell::new(number).set_alignment(CellAlignment::Right)
    }

    /// A line of its own above a table.
    ///
    /// # Errors
    /// What the writer reported.
    pub fn heading(self, out: &mut dyn Write, text: &str) -> io::Result<()> {
        if self.color { writeln!(out, "\x1b[1m{text}\x1b[0m") } else { writeln!(out, "{text}") }
    }

    /// A word in a tone, outside tables.
    #[must_use]
    pub fn word(self, text: &str, tone: Tone) -> String {
        let code = match tone {
            _ if !self.color || tone == Tone::Plain => return text.to_owned(),
            Tone::Good | Tone::Plain => "32",
            Tone::Dim => "2",
            Tone::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// A table without blanks at line ends.
    ///
    /// # Errors
    /// What the writer reported.
    pub fn print(self, out: &mut dyn Write, table: &Table) -> io::Result<()> {
        for line in table.lines() {
            writeln!(out, "{}", line.trim_end())?;
        }
        writeln!(out)
    }

    /// A bulleted line, wrapped with its own indentation.
    ///
    /// # Errors
    /// What the writer reported.
    pub fn item(self, out: &mut dyn Write, head: &str, text: &str) -> io::Result<()> {
        let width = usize::from(self.width);
        let mut line = " ".to_owned();
        let mut column = 1;
        for word in head.split_whitespace().chain(text.split_whitespace()) {
            let len = word.chars().count();
            if column + 1 + len > width && column > 6 {
                writeln!(out, "{line}")?;
                line = " ".repeat(3);
                column = 3;
            }
            line.push(' ');
            line.push_str(word);
            column += 1 + len;
        }
        writeln!(out, "{line}")
    }
}

/// Bytes as a person says them: exact below 10 KiB, otherwise with one decimal at most.
#[must_use]
pub fn bytes(count: u64) -> String {
    if count == u64::MAX {
        return "no limit".into();
    }
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 || (count < 10 << 10 && !count.is_multiple_of(1024)) {
        return format!("{count} B");
    }
    let power = (count.ilog2() / 10).min(6);
    let unit = units[power as usize - 1];
    let value = count as f64 / (1u64 << (10 * power)) as f64;
    if value.fract() == 0.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// A few of many names.
#[must_use]
pub fn some(names: &[String]) -> String {
    const FEW: usize = 3;
    match names.len().checked_sub(FEW) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{}, and {more} more", names[..FEW].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_a_person_says_them() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4099, "4099 B"),
            (4096, "4 KiB"),
            (65537, "64.0 KiB"),
            (8 << 20, "8 MiB"),
            (u64::MAX, "no limit"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn long_items_are_wrapped_inside_the_width() {
        let mut out = Vec::new();
        Style::plain().item(&mut out, "what:", &"word ".repeat(100)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.lines().count() > 3 && text.lines().all(|line| line.len() <= usize::from(WIDTH)),
            "{text}"
        );
    }
}
