//! Formats traces as text, and compares two such texts.

use std::{collections::BTreeMap, fmt::Write as _};

use hmem::{
    AddressRange, Decision, Error,
    path::{Attempt, P2pPolicy, Trace},
};

use crate::case::Case;

/// Names that replace memory addresses in the text, so that it is equal in each run.
pub(crate) type Names = Vec<(&'static str, AddressRange)>;

/// Test cases with equal traces, each with its policies.
type Headings = Vec<(String, Vec<&'static str>)>;

/// Runs the test cases and formats their traces. Test cases with equal traces are grouped. Test
/// cases that differ in their policy only share a line.
pub(crate) fn of(cases: &[Case]) -> String {
    let mut sections: Vec<(Headings, String)> = Vec::new();
    for case in cases {
        let (subject, policy, lines) = (case.subject(), case.policy.name(), case.play().join("\n"));
        let at = sections.iter().position(|(_, known)| *known == lines).unwrap_or_else(|| {
            sections.push((Vec::new(), lines));
            sections.len() - 1
        });
        let subjects = &mut sections[at].0;
        match subjects.iter_mut().find(|(known, _)| *known == subject) {
            Some((_, policies)) => policies.push(policy),
            None => subjects.push((subject, vec![policy])),
        }
    }
    let mut text = String::new();
    for (subjects, lines) in sections {
        for (subject, policies) in subjects {
            writeln!(text, "== {subject}{SEPARATOR}{} ==", policies.join(", ")).expect("a String");
        }
        writeln!(text, "{lines}\n").expect("a String takes everything");
    }
    text
}

/// Separates a test case from its policies in a heading.
const SEPARATOR: &str = " | policy ";

/// The outcome of a registration as text.
#[derive(Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) head: String,
    pub(crate) remembered: bool,
    pub(crate) attempts: Vec<String>,
}

impl Outcome {
    /// Formats the decision of a successful registration. The text names the decision's policy if
    /// it differs from the domain's.
    pub(crate) fn decided(decision: &Decision, policy: P2pPolicy, names: &Names) -> Self {
        let mut head = format!("{} of {}", decision.path, decision.iface_name);
        if let Some(device) = decision.device {
            write!(head, " device {device}").expect("a String takes everything");
        }
        if decision.policy != policy {
            write!(head, " under {}", decision.policy).expect("a String takes everything");
        }
        write!(head, " on {}, {:?} mapping: {}", decision.nic, decision.mapping, decision.reason)
            .expect("a String takes everything");
        let attempts = attempts(&decision.attempts, names);
        Self { head: with_named_addresses(&head, names), remembered: decision.from_cache, attempts }
    }

    /// Formats a failed registration.
    pub(crate) fn failed(error: &Error, names: &Names) -> Self {
        let remedy = error.remedy_text().map_or(String::new(), |text| format!("; remedy: {text}"));
        let head = with_named_addresses(&format!("refused: {}{remedy}", refusal(error)), names);
        Self { head, remembered: false, attempts: attempts(error.trace(), names) }
    }
}

/// Outcomes of the first and of the second registration, one for each NIC.
pub(crate) type Twice = (Vec<Outcome>, Vec<Outcome>);

/// The lines of one test case.
#[derive(Default)]
pub(crate) struct Section {
    pub(crate) lines: Vec<String>,
    /// Attempts of the outcome that was added last.
    attempts: Vec<String>,
}

impl Section {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        let mark = if outcome.remembered { " [remembered]" } else { "" };
        self.lines.push(format!("{}{mark}", outcome.head));
        if outcome.attempts.len() > 1 && outcome.attempts == self.attempts {
            self.lines.push("  (attempts as before)".into());
        } else {
            self.lines.extend(outcome.attempts.iter().cloned());
            self.attempts.clone_from(&outcome.attempts);
        }
    }

    /// Adds the outcomes of the first registration, and those of the second if they differ.
    pub(crate) fn add_twice(&mut self, (first, again): &Twice) {
        first.iter().for_each(|outcome| self.add(outcome));
        let remembered = |outcome: &Outcome| Outcome { remembered: true, ..outcome.clone() };
        if again == first {
            return;
        }
        if again.iter().cloned().eq(first.iter().map(remembered)) {
            self.lines.push("- again: the same, remembered".into());
        } else {
            self.lines.push("- again".into());
            again.iter().for_each(|outcome| self.add(outcome));
        }
    }
}

/// Formats each attempt as a line.
pub(crate) fn attempts(trace: &Trace, names: &Names) -> Vec<String> {
    let line = |(at, attempt): (usize, &Attempt)| {
        let asked = if attempt.driver_called { "" } else { " (not asked)" };
        let mut line = format!("  {}. {}: {}{asked}", at + 1, attempt.path, attempt.call);
        if let Some(error) = &attempt.error {
            let cause = attempt.cause_name.unwrap_or("no known cause");
            write!(line, " -> {}; {cause}", refusal(error)).expect("a String takes everything");
        }
        if let Some(remedy) = &attempt.remedy {
            write!(line, "; remedy: {remedy}").expect("a String takes everything");
        }
        with_named_addresses(&line, names)
    };
    trace.iter().enumerate().map(line).collect()
}

/// Formats an error: its operation, kind and error codes.
fn refusal(error: &Error) -> String {
    let mut text = format!("{} {:?}", error.operation(), error.kind());
    if let Some(errno) = error.os_errno() {
        write!(text, ", {errno}").expect("a String takes everything");
    }
    if let Some(driver) = error.driver() {
        write!(text, ", {driver}").expect("a String takes everything");
    }
    text
}

/// Replaces the hexadecimal addresses in a text by the names of their ranges, each with the offset
/// in the range. Addresses of 4 GiB or more outside all ranges become `elsewhere`. Smaller numbers
/// stay.
fn with_named_addresses(text: &str, names: &Names) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("0x") {
        let digits = &rest[at + 2..];
        let len = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
        out.push_str(&rest[..at]);
        rest = &digits[len..];
        let address = u64::from_str_radix(&digits[..len], 16).expect("hexadecimal digits");
        let named = names
            .iter()
            .find(|(_, range)| (range.start().0..range.start().0 + range.len()).contains(&address));
        match named {
            Some((name, range)) if range.start().0 == address => out.push_str(name),
            Some((name, range)) => {
                write!(out, "{name}[{}]", address - range.start().0).expect("a String");
            }
            // A length, an offset or a driver's code.
            None if address < 1 << 32 => write!(out, "{address:#x}").expect("a String"),
            None => out.push_str("elsewhere"),
        }
    }
    out + rest
}

/// Parses a text of traces. Returns the lines of each test case under each policy, in the order of
/// the text.
fn sections(text: &str) -> Vec<(String, Vec<&str>)> {
    let mut sections = Vec::new();
    let mut headings = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let heading = line.strip_prefix("== ").and_then(|line| line.strip_suffix(" =="));
        if let Some((subject, policies)) = heading.and_then(|text| text.rsplit_once(SEPARATOR)) {
            let each = policies.split(", ").map(|policy| format!("{subject}{SEPARATOR}{policy}"));
            headings.extend(each);
        }
        if lines.peek().is_some_and(|next| !next.starts_with("== ")) {
            let body: Vec<_> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
            sections.extend(headings.drain(..).map(|heading| (heading, body.clone())));
        }
    }
    sections
}

/// Formats the test cases whose traces differ, with the lines of both texts. Returns an empty text
/// if none does.
pub(crate) fn difference(golden: &str, now: &str) -> String {
    let (before, after) = (sections(golden), sections(now));
    let (old, new): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (before.iter().cloned().collect(), after.iter().cloned().collect());
    let (mut text, mut last, none) = (String::new(), String::new(), Vec::new());
    let gone = before.iter().filter(|(name, _)| !new.contains_key(name.as_str()));
    for (name, _) in after.iter().chain(gone) {
        let changed = changed_lines(old.get(name).unwrap_or(&none), new.get(name).unwrap_or(&none));
        if changed.is_empty() {
            continue;
        }
        if changed == last {
            text.truncate(text.len() - changed.len());
        }
        write!(text, "== {name} ==\n{changed}").expect("a String takes everything");
        last = changed;
    }
    text
}

/// Formats the difference of two lists of lines. Common lines at the start and end appear once.
fn changed_lines(old: &[&str], new: &[&str]) -> String {
    if old == new {
        return String::new();
    }
    let start = old.iter().zip(new).take_while(|(old, new)| old == new).count();
    let ends = old[start..].iter().rev().zip(new[start..].iter().rev());
    let end = ends.take_while(|(old, new)| old == new).count();
    let parts = [
        ("  ", &old[..start]),
        ("- ", &old[start..old.len() - end]),
        ("+ ", &new[start..new.len() - end]),
        ("  ", &new[new.len() - end..]),
    ];
    let marked = |(mark, lines): (&str, &[&str])| -> String {
        lines.iter().map(|line| format!("{mark}{line}\n")).collect()
    };
    parts.into_iter().map(marked).collect::<String>() + "\n"
}
