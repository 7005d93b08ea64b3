//! Checks those language rules of CONTRIBUTING.md that a program can check, in all comments and
//! documents.

use std::{
    fs,
    path::{Path, PathBuf},
};

const COLUMNS: usize = 100;

/// Forbidden beginnings of sentences: clauses as subject, and references to another place.
const CLAUSES: [&str; 8] =
    ["What ", "Who ", "Whom ", "Whose ", "Whether ", "Where ", "The same", "As above"];

/// Returns the source files and documents of the workspace, each with its path relative to the root
/// and its text.
fn files() -> Vec<(PathBuf, String)> {
    fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("read a folder of the workspace") {
            let path = entry.expect("read a folder of the workspace").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    collect(&path, found);
                }
            } else if name.ends_with(".rs") || name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    collect(root, &mut found);
    found.sort();
    let relative = |path: &Path| path.strip_prefix(root).expect("below the root").to_owned();
    found
        .into_iter()
        .map(|path| (relative(&path), fs::read_to_string(&path).expect("a UTF-8 file")))
        .collect()
}

/// Returns true if a line exceeds 100 columns and has no word of 50 columns or more.
fn is_too_long(line: &str) -> bool {
    let words = line.split_whitespace().map(|word| word.chars().count());
    line.chars().count() > COLUMNS && words.max() < Some(COLUMNS / 2)
}

/// Returns the text of a comment line; `None` if the line is no comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    ["///", "//!", "//"].iter().find_map(|mark| line.strip_prefix(mark)).map(str::trim_start)
}

/// Returns the sentences of a text with a forbidden beginning, each with its line number.
fn clauses<'a>(lines: impl Iterator<Item = (usize, Option<&'a str>)>) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    // True if the next line begins a sentence, because the line before it ended one.
    let mut begins = true;
    let mut is_code = false;
    for (number, text) in lines {
        let Some(text) = text else {
            (begins, is_code) = (true, false);
            continue;
        };
        if text.starts_with("```") {
            (begins, is_code) = (true, !is_code);
            continue;
        }
        if is_code || text.starts_with('>') {
            continue;
        }
        let item = text.trim_start_matches(['-', '*', '#', '|', ' ']);
        begins |= item.len() < text.len() || text.is_empty();
        let starts = begins.then_some(0).into_iter();
        let starts = starts.chain(item.match_indices(". ").map(|(at, _)| at + 2));
        for start in starts {
            let sentence = &item[start..];
            if CLAUSES.iter().any(|clause| sentence.starts_with(clause)) {
                found.push((number, sentence.chars().take(60).collect()));
            }
        }
        begins = item.ends_with(['.', ':']) || text.is_empty();
    }
    found
}

fn clauses_of(path: &Path, text: &str) -> Vec<(usize, String)> {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    let of_line = |line| if is_rust { comment(line) } else { Some(line) };
    clauses(text.lines().zip(1..).map(|(line, number)| (number, of_line(line))))
}

#[test]
fn lines_end_at_column_100() {
    let mut long = Vec::new();
    for (path, text) in files() {
        let numbers = text.lines().zip(1..).filter(|(line, _)| is_too_long(line));
        long.extend(numbers.map(|(_, number)| format!("{}:{number}", path.display())));
    }
    assert!(long.is_empty(), "{} lines are too long:\n{}", long.len(), long.join("\n"));
}

#[test]
fn sentences_do_not_begin_with_a_clause() {
    let mut found = Vec::new();
    for (path, text) in files() {
        let sentences = clauses_of(&path, &text).into_iter();
        found.extend(sentences.map(|(line, text)| format!("{}:{line}: {text}", path.display())));
    }
    assert!(found.is_empty(), "{} sentences:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_clause_is_found_wherever_a_sentence_begins() {
    let found = |name: &str, text: &str| clauses_of(Path::new(name), text).len();
    for text in ["/// Who acts.", "// A. Who acts.", "//! - Where it is.", "/// A.\n/// What is."] {
        assert_eq!(found("a.rs", text), 1, "{text}");
    }
    for text in
        ["let a = \"Who\";", "/// Those\n/// Who act.", "/// ```\n/// // Who acts.\n/// ```"]
    {
        assert_eq!(found("a.rs", text), 0, "{text}");
    }
    assert_eq!(found("a.md", "# Whose it is\n\nA. Where\nA where b.\n\n```\nWhat\n```\n"), 1);
}

#[test]
fn line_with_a_long_word_may_exceed_the_limit() {
    assert!(is_too_long(&"word ".repeat(21)) && !is_too_long(&"word".repeat(30)));
}
