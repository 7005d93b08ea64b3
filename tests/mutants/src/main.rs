//! Copies the tracked files of the repository, and compiles the mutants of a list into the copy.
//!
//! Usage: `hmem-mutants LIST ROOT COPY`, with the paths of the tracked files on standard input.
//! Prints a line `ID FILE KIND` for each mutant. The kind is `must-die` or `equivalent`.
//!
//! An original expression becomes `(if chosen(ID) { REPLACEMENT } else { ORIGINAL })`. Files of the
//! copy that have not changed keep their times, so that Cargo compiles only what has changed.

#![forbid(unsafe_code)]

use std::{collections::BTreeMap, env, fs, io, ops::Range, path::Path, process::ExitCode};

/// The most mutants that a list may have.
const MOST: usize = 200;

/// The crate that all others with mutants depend on. It has the function `chosen`.
const CORE: &str = "core/src/";

const CHOSEN: &str = r#"//! The mutant that the environment variable `HMEM_MUTANT` chooses.

#![allow(unsafe_code, reason = "reads the variable before `main`")]

use std::sync::atomic::{AtomicU32, Ordering};

static CHOSEN: AtomicU32 = AtomicU32::new(0);

// Patched functions may ask for the mutant, and must not read the environment themselves.
#[used]
#[unsafe(link_section = ".init_array")]
static READ: extern "C" fn() = read;

extern "C" fn read() {
    let number = std::env::var("HMEM_MUTANT").ok().and_then(|number| number.parse().ok());
    CHOSEN.store(number.unwrap_or(0), Ordering::Relaxed);
}

/// Returns true if the mutant with this number is chosen.
#[inline]
pub fn chosen(number: u32) -> bool {
    CHOSEN.load(Ordering::Relaxed) == number
}
"#;

/// A mutant of the list.
#[derive(Default)]
pub(crate) struct Mutant {
    id: u32,
    pub(crate) file: String,
    /// The beginning of the only item in which the original text is searched for.
    anchor: Option<String>,
    original: String,
    replacement: String,
    /// The reason why no test can notice the mutant. Empty if a test must notice it.
    equivalence: String,
}

/// A piece of source text, with the mutants that replace it.
struct Site<'a> {
    span: Range<usize>,
    mutants: Vec<&'a Mutant>,
}

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [list, root, copy] = arguments.as_slice() else {
        eprintln!("usage: hmem-mutants LIST ROOT COPY <TRACKED_FILES");
        return ExitCode::from(2);
    };
    match run(list, Path::new(root), Path::new(copy)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("mutants: FAILED: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(list: &str, root: &Path, copy: &Path) -> Result<(), String> {
    let text = fs::read_to_string(list).map_err(|error| format!("cannot read {list}: {error}"))?;
    let mutants = parse(&text)?;
    let mut by_file = BTreeMap::<&str, Vec<&Mutant>>::new();
    for mutant in &mutants {
        by_file.entry(&mutant.file).or_default().push(mutant);
    }
    let tracked = io::read_to_string(io::stdin()).map_err(|error| error.to_string())?;
    let tracked: Vec<_> = tracked.lines().collect();
    if let Some(file) = by_file.keys().find(|file| !tracked.contains(file)) {
        return Err(format!("{file} is not a tracked file"));
    }
    for file in tracked {
        let from = root.join(file);
        let mut bytes = match fs::read(&from) {
            Ok(bytes) => bytes,
            // The file is tracked and was removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("cannot read {file}: {error}")),
        };
        if let Some(mutants) = by_file.get(file) {
            let source = String::from_utf8(bytes).map_err(|error| error.to_string())?;
            bytes = instrumented(&source, mutants)?.into_bytes();
        }
        if file == format!("{CORE}lib.rs") {
            bytes.extend_from_slice(b"\n#[doc(hidden)]\npub mod mutants;\n");
        }
        write(&copy.join(file), &bytes, Some(&from))?;
    }
    write(&copy.join(format!("{CORE}mutants.rs")), CHOSEN.as_bytes(), None)?;
    for Mutant { id, file, equivalence, .. } in &mutants {
        let kind = if equivalence.is_empty() { "must-die" } else { "equivalent" };
        println!("{id} {file} {kind}");
    }
    Ok(())
}

/// Writes a file with the permissions of another one, unless it has these bytes already.
fn write(path: &Path, bytes: &[u8], like: Option<&Path>) -> Result<(), String> {
    let written = || {
        if fs::read(path).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        fs::write(path, bytes)?;
        match like {
            Some(like) => fs::set_permissions(path, fs::metadata(like)?.permissions()),
            None => Ok(()),
        }
    };
    written().map_err(|error: io::Error| format!("cannot write {}: {error}", path.display()))
}

/// Parses the list. `README.md` describes its format.
pub(crate) fn parse(text: &str) -> Result<Vec<Mutant>, String> {
    let mut mutants = Vec::<Mutant>::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |why: &str| Err(format!("line {} of the list: {why}: {line}", number + 1));
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (mark, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Ok(id) = mark.parse() {
            if mutants.iter().any(|mutant| mutant.id == id) || id == 0 {
                return wrong("the number 0, or a number that another mutant has");
            }
            let (file, anchor) = match rest.split_once(" @ ") {
                Some((file, anchor)) => (file.to_owned(), Some(anchor.to_owned())),
                None => (rest.to_owned(), None),
            };
            mutants.push(Mutant { id, file, anchor, ..Mutant::default() });
            continue;
        }
        let Some(mutant) = mutants.last_mut() else { return wrong("no mutant before it") };
        let part = match mark {
            "-" => &mut mutant.original,
            "+" => &mut mutant.replacement,
            "=" => &mut mutant.equivalence,
            _ => return wrong("it begins with neither a number nor -, + or ="),
        };
        part.push_str(rest);
        part.push('\n');
    }
    if mutants.is_empty() || mutants.len() > MOST {
        return Err(format!("the list has {} mutants; 1 to {MOST} are allowed", mutants.len()));
    }
    Ok(mutants)
}

/// Returns the source text with the mutants compiled in.
pub(crate) fn instrumented(source: &str, mutants: &[&Mutant]) -> Result<String, String> {
    let code = &source[..tests_at(source)];
    let mut sites = Vec::<Site<'_>>::new();
    for mutant in mutants {
        let found = find(code, mutant);
        let span =
            found.map_err(|why| format!("mutant {} of {}: {why}", mutant.id, mutant.file))?;
        match sites.iter_mut().find(|site| site.span == span) {
            Some(site) => site.mutants.push(mutant),
            None => sites.push(Site { span, mutants: vec![mutant] }),
        }
    }
    // An outer site comes before the sites inside it.
    sites.sort_by_key(|site| (site.span.start, usize::MAX - site.span.end));
    render(source, 0..source.len(), &sites)
}

/// Returns the position of the file's own tests, or the length of the text.
fn tests_at(source: &str) -> usize {
    ["\n#[cfg(test)]", "\n#[cfg(all(test"]
        .iter()
        .filter_map(|start| source.find(start))
        .min()
        .unwrap_or(source.len())
}

fn find(code: &str, mutant: &Mutant) -> Result<Range<usize>, String> {
    let within = match &mutant.anchor {
        None => 0..code.len(),
        Some(anchor) => item(code, once(code, anchor)?.start),
    };
    let found = once(&code[within.clone()], &mutant.original)?;
    Ok(within.start + found.start..within.start + found.end)
}

/// Returns the range of the only occurrence of a text, whose white space does not count.
fn once(code: &str, text: &str) -> Result<Range<usize>, String> {
    let ((letters, places), (wanted, _)) = (dense(code), dense(text));
    let found: Vec<_> = match wanted.as_str() {
        "" => Vec::new(),
        wanted => letters.match_indices(wanted).map(|(at, _)| at).collect(),
    };
    let [at] = found.as_slice() else {
        return Err(format!("it occurs {} times instead of once: {}", found.len(), text.trim()));
    };
    let last = places[at + wanted.len() - 1];
    Ok(places[*at]..last + code[last..].chars().next().map_or(0, char::len_utf8))
}

/// Returns a text without its white space, and the position in the text of each byte's letter.
fn dense(text: &str) -> (String, Vec<usize>) {
    let (mut letters, mut places) = (String::new(), Vec::new());
    for (at, letter) in text.char_indices().filter(|(_, letter)| !letter.is_whitespace()) {
        letters.push(letter);
        places.resize(letters.len(), at);
    }
    (letters, places)
}

/// Returns the range of the item that begins in the line of `start`: up to the first line that has
/// only the closing brace, indented like the first.
fn item(code: &str, start: usize) -> Range<usize> {
    let line = code[..start].rfind('\n').map_or(0, |at| at + 1);
    let indent = code[line..].len() - code[line..].trim_start().len();
    let end = format!("\n{}}}\n", " ".repeat(indent));
    start..code[start..].find(&end).map_or(code.len(), |at| start + at)
}

/// Returns a part of the source text, with the sites that lie in the part.
fn render(source: &str, part: Range<usize>, sites: &[Site<'_>]) -> Result<String, String> {
    let mut text = String::new();
    let (mut at, mut rest) = (part.start, sites);
    while let [site, after @ ..] = rest {
        let Range { start, end } = site.span;
        if start < at || end > part.end {
            let id = site.mutants[0].id;
            return Err(format!("mutant {id}: its text overlaps that of another one in part"));
        }
        let inside = after.iter().take_while(|other| other.span.start < end).count();
        let original = render(source, start..end, &after[..inside])?;
        text.push_str(&source[at..start]);
        text.push_str(&choice(site, &original));
        (at, rest) = (end, &after[inside..]);
    }
    text.push_str(&source[at..part.end]);
    Ok(text)
}

/// Returns the code that chooses between the original text and its replacements.
fn choice(site: &Site<'_>, original: &str) -> String {
    let is_in_core = site.mutants[0].file.starts_with(CORE);
    let root = if is_in_core { "crate" } else { "hmem_core" };
    let mut text = String::new();
    for Mutant { id, replacement, .. } in &site.mutants {
        text.push_str(&format!(
            "if {root}::mutants::chosen({id}) {{ {} }} else ",
            replacement.trim_end()
        ));
    }
    text.push_str(&format!("{{ {original} }}"));
    let is_statement = original.ends_with([';', '}']);
    if is_statement { text } else { format!("({text})") }
}
