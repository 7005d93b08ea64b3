//! Text for people: tables, headings and wrapped lines that fit the terminal.

use std::io::{self, IsTerminal, Write};

use rustix::termios::tcgetwinsize;
use tabled::{
    builder::Builder,
    settings::{
        Alignment, Color as Paint, Padding, Settings, Style as Lines,
        formatting::AlignmentStrategy,
        object::{Cell as At, Columns, Rows},
        style::HorizontalLine,
    },
};
use textwrap::{
    WordSeparator,
    core::{Word, display_width},
    wrap_algorithms::wrap_first_fit,
};

use crate::args::Color;

/// Width of the output, in columns, if stdout is not a terminal.
const WIDTH: usize = 108;
/// Minimum and maximum width of the output, in columns.
const LIMITS: (usize, usize) = (20, 140);
/// Spaces between two columns of a table. The second value applies if the table is too wide with
/// the first.
const GAPS: [usize; 2] = [2, 1];
/// Maximum number of fields that a list prints on one line each. A list of more fields joins the
/// fields by `;`.
const FEW_FIELDS: usize = 4;
/// The escape sequence for bold text.
const BOLD: &str = "\x1b[1m";
/// The escape sequence that ends bold and coloured text.
const RESET: &str = "\x1b[0m";
/// The no-break space that joins a number and its unit while lines are wrapped.
const NO_BREAK: char = '\u{a0}';
/// Units that stay on the line of their number, separated by spaces.
const UNITS: &str =
    "B KiB MiB GiB TiB PiB EiB GiB/s GT/s bytes entries pages us ms s seconds transfers/s";

/// The meaning of a text, which selects its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// A success.
    Good,
    /// Neutral text.
    Plain,
    /// An unavailable, refused or less important item.
    Dim,
    /// A failure.
    Bad,
}

impl Tone {
    /// Returns the escape sequence for the tone's colour; `None` for no colour.
    const fn code(self) -> Option<&'static str> {
        match self {
            Self::Good => Some("\x1b[32m"),
            Self::Plain => None,
            Self::Dim => Some("\x1b[2m"),
            Self::Bad => Some("\x1b[1;31m"),
        }
    }
}

/// The colours and the width of the output.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    color: bool,
    /// Width of the output, in columns.
    pub(crate) width: usize,
}

impl Style {
    /// Returns a style without colours, of a fixed width.
    #[must_use]
    pub const fn plain() -> Self {
        Self { color: false, width: WIDTH }
    }

    /// Returns a style without colours, `width` columns wide.
    pub(crate) const fn of_width(width: usize) -> Self {
        Self { color: false, width }
    }

    /// Returns the style of stdout.
    ///
    /// The width is that of [`columns`], else 108 columns. With [`Color::Auto`], a terminal has
    /// colours unless `NO_COLOR` is set or `TERM` is `dumb`.
    pub(crate) fn for_stdout(color: Color) -> Self {
        let terminal = io::stdout().is_terminal();
        let color = match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                terminal && !refused && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
        };
        Self { color, width: columns().unwrap_or(WIDTH) }
    }

    /// Prints a heading, wrapped.
    pub(crate) fn heading(self, out: &mut dyn Write, text: &str) -> io::Result<()> {
        wrap(text, self.width).iter().try_for_each(|line| writeln!(out, "{}", self.bold(line)))
    }

    /// Returns a text in bold.
    pub(crate) fn bold(self, text: &str) -> String {
        if self.color { format!("{BOLD}{text}{RESET}") } else { text.to_owned() }
    }

    /// Returns a text in the colour of a tone.
    pub(crate) fn word(self, text: &str, tone: Tone) -> String {
        match tone.code().filter(|_| self.color) {
            Some(code) => format!("{code}{text}{RESET}"),
            None => text.to_owned(),
        }
    }

    /// Prints a line that is indented by two columns. Continuation lines are indented by four.
    pub(crate) fn item(self, out: &mut dyn Write, head: &str, text: &str) -> io::Result<()> {
        self.indented(out, ["  ", "    "], &format!("{head} {text}"))
    }

    /// Prints a detail beneath an item: a line that is indented by four columns.
    pub(crate) fn detail(self, out: &mut dyn Write, head: &str, text: &str) -> io::Result<()> {
        self.indented(out, ["    ", "      "], &format!("{head} {text}"))
    }

    /// Prints a wrapped text: `indents[0]` precedes the first line, and `indents[1]` every later
    /// line.
    pub(crate) fn indented(
        self,
        out: &mut dyn Write,
        indents: [&str; 2],
        text: &str,
    ) -> io::Result<()> {
        let used = indents.map(display_width).into_iter().max().unwrap_or_default();
        for (at, line) in wrap(text, self.width.saturating_sub(used)).iter().enumerate() {
            writeln!(out, "{}{line}", indents[at.min(1)])?;
        }
        Ok(())
    }

    /// Prints a table, or its rows as lists if the columns do not fit. An empty line follows.
    pub(crate) fn print(self, out: &mut dyn Write, table: &Table) -> io::Result<()> {
        match table.grid(self) {
            Some(grid) => writeln!(out, "{grid}")?,
            None => table.print_as_lists(out, self)?,
        }
        writeln!(out)
    }
}

/// Returns the width of stdout, limited to 20 to 140 columns.
///
/// The width is the number in `COLUMNS`, or else that of the terminal. Returns `None` if the width
/// is 0, or if `COLUMNS` has no number and stdout is not a terminal.
pub(crate) fn columns() -> Option<usize> {
    let terminal = || tcgetwinsize(io::stdout()).ok().map(|size| usize::from(size.ws_col));
    limited(columns_variable().unwrap_or(None).or_else(terminal)?)
}

/// Returns the width of stderr like [`columns`], but `None` whenever stderr is not a terminal.
pub(crate) fn stderr_columns() -> Option<usize> {
    let terminal = tcgetwinsize(io::stderr()).ok()?;
    limited(columns_variable().unwrap_or(None).unwrap_or(terminal.ws_col.into()))
}

/// Applies [`LIMITS`] to a number of columns. Returns `None` for 0.
fn limited(columns: usize) -> Option<usize> {
    (columns > 0).then(|| columns.clamp(LIMITS.0, LIMITS.1))
}

/// Returns the number in `COLUMNS`, or `None` if the variable is unset or empty.
///
/// # Errors
/// The value of the variable, if it is not a decimal number.
pub(crate) fn columns_variable() -> Result<Option<usize>, String> {
    let Some(value) = std::env::var_os("COLUMNS") else { return Ok(None) };
    let value = value.to_string_lossy();
    match value.trim() {
        "" => Ok(None),
        number => number.parse().map(Some).map_err(|_| value.into_owned()),
    }
}

/// One value of a table.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// Returns a cell of neutral text.
    pub(crate) fn new(text: impl ToString) -> Self {
        Self::in_tone(text, Tone::Plain)
    }

    /// Returns a cell of text in a tone.
    pub(crate) fn in_tone(text: impl ToString, tone: Tone) -> Self {
        Self { text: text.to_string(), tone }
    }

    /// Returns the cell of a missing value, which prints `-`.
    pub(crate) fn none() -> Self {
        Self::in_tone("-", Tone::Dim)
    }
}

/// Rows of cells under a header.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    /// Columns of numbers, which are aligned to the right.
    numbers: Vec<usize>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// Returns an empty table with a header.
    pub(crate) fn new(header: &[&str]) -> Self {
        let header = header.iter().map(|name| (*name).to_owned()).collect();
        Self { header, numbers: Vec::new(), rows: Vec::new() }
    }

    /// Marks columns as numbers, which are aligned to the right.
    pub(crate) fn numbers(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.numbers.extend(columns);
        self
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Prints the table, or its columns as lists if the table does not fit. An empty line follows.
    ///
    /// A list has the header of its column as its title. The cells of the first column name the
    /// values in each list.
    pub(crate) fn print_columns(&self, out: &mut dyn Write, style: Style) -> io::Result<()> {
        if let Some(grid) = self.grid(style) {
            return writeln!(out, "{grid}\n");
        }
        for (column, name) in self.header.iter().enumerate().skip(1) {
            style.indented(out, ["  ", "    "], name)?;
            for row in &self.rows {
                let text = format!("{}: {}", row[0].text, row[column].text);
                style.indented(out, ["    ", "      "], &text)?;
            }
        }
        writeln!(out)
    }

    /// Returns the table as lines of text. Returns `None` if its columns do not fit without
    /// splitting a word.
    fn grid(&self, style: Style) -> Option<String> {
        let (gap, widths) =
            GAPS.into_iter().find_map(|gap| Some((gap, self.widths(style.width, gap)?)))?;
        let wrapped = |(text, width): (&str, &usize)| wrap(text, *width).join("\n");
        let mut builder = Builder::new();
        builder.push_record(self.header.iter().map(String::as_str).zip(&widths).map(wrapped));
        for row in &self.rows {
            builder
                .push_record(row.iter().map(|cell| cell.text.as_str()).zip(&widths).map(wrapped));
        }
        let mut table = builder.build();
        let rule = HorizontalLine::new('\u{2500}');
        table.with(Lines::empty().horizontals([(1, rule)]));
        table.with(Padding::new(gap, 0, 0, 0)).modify(Columns::first(), Padding::new(2, 0, 0, 0));
        let right = Settings::new(Alignment::right(), AlignmentStrategy::PerLine);
        for column in &self.numbers {
            table.modify(Columns::one(*column), right);
        }
        if style.color {
            table.modify(Rows::first(), Paint::new(BOLD, RESET));
            for (at, row) in self.rows.iter().enumerate() {
                for (column, cell) in row.iter().enumerate() {
                    if let Some(code) = cell.tone.code() {
                        table.modify(At::new(at + 1, column), Paint::new(code, RESET));
                    }
                }
            }
        }
        let lines: Vec<_> =
            table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
        Some(lines.join("\n"))
    }

    /// Returns the widths of the columns for a line of `line` characters, with `gap` spaces between
    /// two columns.
    ///
    /// The widest columns are narrowed until the table fits, but none below the width of its
    /// longest word. Returns `None` if the table does not fit even so.
    fn widths(&self, line: usize, gap: usize) -> Option<Vec<usize>> {
        let longest = |part: fn(&str) -> usize| {
            let mut longest: Vec<_> = self.header.iter().map(|name| part(name)).collect();
            for row in &self.rows {
                for (longest, cell) in longest.iter_mut().zip(row) {
                    *longest = part(&cell.text).max(*longest);
                }
            }
            longest
        };
        let (least, mut widths) = (longest(longest_word), longest(display_width));
        let room = line.checked_sub(2 + gap * widths.len().saturating_sub(1))?;
        while widths.iter().sum::<usize>() > room {
            let wide = widths.iter_mut().zip(&least).filter(|(width, least)| **width > **least);
            *wide.map(|(width, _)| width).max()? -= 1;
        }
        Some(widths)
    }

    /// Prints each row as a list: the first cell, and beneath it the other cells with the headers
    /// of their columns. Cells of missing values are left out.
    fn print_as_lists(&self, out: &mut dyn Write, style: Style) -> io::Result<()> {
        for row in &self.rows {
            let mut cells = self.header.iter().zip(row).filter(|(_, cell)| cell.text != "-");
            let Some((_, first)) = cells.next() else { continue };
            style.indented(out, ["  ", "    "], &style.word(&first.text, first.tone))?;
            let room = style.width.saturating_sub(4);
            let fields = cells.map(|(name, cell)| {
                // Keeps a field that fits one line on one line.
                let short = display_width(name) + display_width(&cell.text) + 2 <= room;
                let blank = if short { NO_BREAK } else { ' ' };
                format!("{name}:{blank}{}", style.word(&cell.text, cell.tone))
            });
            let fields: Vec<_> = fields.collect();
            if fields.len() > FEW_FIELDS {
                style.indented(out, ["    ", "    "], &fields.join("; "))?;
            } else {
                for field in fields {
                    style.indented(out, ["    ", "      "], &field)?;
                }
            }
        }
        Ok(())
    }
}

fn longest_word(text: &str) -> usize {
    joined(text).split(' ').map(display_width).max().unwrap_or(0)
}

/// Replaces spaces by [`NO_BREAK`] between a number and its unit, and between `GT/s` and a number
/// of lanes, such as `x16`.
fn joined(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    let mut number = false;
    for word in text.split(' ') {
        if !all.is_empty() {
            let unit = word.trim_end_matches([',', ';', '.', ':', ')']);
            let lanes = unit.strip_prefix('x').is_some_and(|lanes| lanes.parse::<u32>().is_ok());
            let is_unit = number && UNITS.split(' ').any(|known| known == unit);
            let stays = is_unit || lanes && all.ends_with("GT/s");
            all.push(if stays { NO_BREAK } else { ' ' });
        }
        all.push_str(word);
        let digits = word.trim_start_matches(['(', '[']);
        number = digits.starts_with(|c: char| c.is_ascii_digit())
            && digits.chars().all(|c| c.is_ascii_digit() || c == '.');
    }
    all
}

/// Wraps a text into lines of at most `width` columns, between words.
///
/// A number stays with its unit if a line has room for both. A word that is longer than a line is
/// broken after `/`, `,`, `=` or `:`, and is otherwise left whole.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for part in joined(text).split('\n') {
        let words = WordSeparator::AsciiSpace.find_words(part);
        let pieces: Vec<_> = words.flat_map(|word| pieces(word, width)).collect();
        for line in wrap_first_fit(&pieces, &[width as f64]) {
            let line: String =
                line.iter().flat_map(|piece| [piece.word, piece.whitespace]).collect();
            lines.push(line.trim_end().replace(NO_BREAK, " "));
        }
    }
    lines
}

/// Splits a word that is wider than `width` into parts between which a line may end.
fn pieces(word: Word<'_>, width: usize) -> Vec<Word<'_>> {
    if word.width <= width {
        return vec![word];
    }
    let pieces = word.word.split_inclusive(['/', ',', '=', ':', NO_BREAK]).map(Word::from);
    let mut pieces: Vec<_> = pieces.collect();
    if let Some(last) = pieces.last_mut() {
        last.whitespace = word.whitespace;
    }
    pieces
}

/// Formats a byte count for text output: exact below 10 KiB, else with at most one decimal.
/// [`u64::MAX`] is `no limit`.
pub(crate) fn bytes(count: u64) -> String {
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
    let text = format!("{value:.1}");
    format!("{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
}

/// Formats a byte count exactly, in the largest unit of which it is a multiple.
pub(crate) fn exact_bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = if count == 0 { 0 } else { count.trailing_zeros() / 10 };
    format!("{} {}", count >> (10 * power), units[power as usize])
}

/// Groups values with equal keys. The groups are in the order of their first values.
pub(crate) fn grouped<K: PartialEq, T>(all: impl Iterator<Item = (K, T)>) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for (key, value) in all {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// Joins names by commas, or returns `none` if there are no names.
pub(crate) fn list_or<T: AsRef<str>>(none: &str, names: &[T]) -> String {
    let names: Vec<_> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { none.to_owned() } else { names.join(", ") }
}

/// Joins names by commas. After three names, the result says only how many more there are.
pub(crate) fn abbreviated(names: &[String]) -> String {
    const FEW: usize = 3;
    match names.len().checked_sub(FEW) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{}, and {more} more", names[..FEW].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(table: &Table, width: usize) -> String {
        let mut out = Vec::new();
        Style::of_width(width).print(&mut out, table).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn byte_counts_have_the_largest_unit_that_fits() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4099, "4099 B"),
            (4096, "4 KiB"),
            (65537, "64 KiB"),
            (100 << 9, "50 KiB"),
            (3 << 19, "1.5 MiB"),
            (8 << 20, "8 MiB"),
            (u64::MAX, "no limit"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn exact_byte_counts_are_not_rounded() {
        for (count, text) in [
            (0, "0 B"),
            (4096, "4 KiB"),
            (65537, "65537 B"),
            (3 << 19, "1536 KiB"),
            (8 << 20, "8 MiB"),
            (1 << 63, "8 EiB"),
        ] {
            assert_eq!(exact_bytes(count), text);
        }
    }

    #[test]
    fn long_items_are_wrapped_inside_the_width() {
        let mut out = Vec::new();
        Style::plain().item(&mut out, "what:", &"word ".repeat(100)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().count() > 3 && text.lines().all(|line| line.len() <= WIDTH), "{text}");
    }

    #[test]
    fn number_and_unit_stay_on_one_line() {
        let lines = wrap("limited to 64 KiB (4 GT/s x16)", 14);
        assert_eq!(lines, ["limited to", "64 KiB", "(4 GT/s x16)"]);
    }

    #[test]
    fn only_words_longer_than_a_line_are_broken() {
        assert_eq!(wrap("open 0000:07:00.0", 12), ["open", "0000:07:00.0"]);
        assert_eq!(wrap("/sys/kernel/mm/hugepages", 12), ["/sys/kernel/", "mm/hugepages"]);
    }

    #[test]
    fn table_wraps_its_longest_column_first() {
        let mut table = Table::new(&["Name", "Text"]);
        table.row([Cell::new("loopback/hardware"), Cell::new("some words that are long")]);
        let text = printed(&table, 40);
        assert!(text.contains("loopback/hardware  some words that are"), "{text}");
        assert!(text.lines().all(|line| display_width(line) <= 40), "{text}");
    }

    #[test]
    fn wide_characters_of_a_name_take_two_columns() {
        let mut table = Table::new(&["Name", "Count"]).numbers([1]);
        table.row([Cell::new("\u{7f51}\u{5361}0"), Cell::in_tone(7, Tone::Good)]);
        let style = Style { color: true, width: 40 };
        let mut out = Vec::new();
        style.print(&mut out, &table).unwrap();
        let rule = "\u{2500}".repeat(14);
        let row = "  \u{7f51}\u{5361}0      \x1b[32m7\x1b[0m";
        assert_eq!(
            String::from_utf8(out).unwrap(),
            format!("  \x1b[1mName\x1b[0m   \x1b[1mCount\x1b[0m\n{rule}\n{row}\n\n")
        );
    }

    #[test]
    fn table_too_wide_for_the_terminal_becomes_lists() {
        let mut table = Table::new(&["Name", "Kind", "Count"]).numbers([2]);
        table.row([Cell::new("loopback/peer-memory"), Cell::new("stream-ordered"), Cell::new(7)]);
        assert_eq!(
            printed(&table, 40),
            "  loopback/peer-memory\n    Kind: stream-ordered\n    Count: 7\n\n"
        );
    }
}
