//! Compares `docs/unsafe.md` with the code and the tests. Checks that each file with unsafe code
//! lifts `deny(unsafe_code)` for itself alone.
//!
//! `HMEM_BLESS=1` rewrites the lists of files and functions in the document.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    thread,
};

use crate::workspace;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{
    Attribute, ImplItemFn, ItemFn, ItemImpl, ItemMod, ItemTrait, Meta, TraitItemFn, Type,
    Visibility,
    visit::{self, Visit},
};

const DOCUMENT: &str = "docs/unsafe.md";
/// The line in a section of the document below which the test writes the lists.
const MARK: &str = "<!-- The test `unsafe_code` writes this list (HMEM_BLESS=1). -->\n";
const COLUMNS: usize = 100;

/// An attribute that lifts the lint.
struct Lift {
    /// True for `#![allow(unsafe_code)]`, which lifts the lint for the file and its children.
    is_inner: bool,
    /// True if the attribute is that of a `mod name;`.
    is_of_child: bool,
    reason: Option<String>,
}

/// The unsafe code of one source file. The counts do not include `#[cfg(test)]` items.
#[derive(Default)]
struct SourceFile {
    path: String,
    blocks: usize,
    functions: usize,
    impls: usize,
    traits: usize,
    /// True if the file has unsafe code, that of tests included.
    has_unsafe: bool,
    has_children: bool,
    lifts: Vec<Lift>,
    public_functions: Vec<String>,
}

impl SourceFile {
    fn read(folder: &Path, path: &Path) -> Self {
        let text = fs::read_to_string(path).expect("a source file");
        let relative = path.strip_prefix(folder).expect("below the folder");
        let mut file = Self { path: relative.display().to_string(), ..Self::default() };
        let tokens: TokenStream =
            text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        file.count(tokens.clone(), false);
        let mut public = PublicFunctions { names: Vec::new(), of: None };
        public.visit_file(&syn::parse2(tokens).expect("the file compiles"));
        file.public_functions = public.names;
        file
    }

    /// Counts in tokens, so that macros are covered. A comment is no token.
    fn count(&mut self, tokens: TokenStream, in_tests: bool) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut is_test = in_tests;
        for (at, token) in tokens.iter().enumerate() {
            let rest = &tokens[at + 1..];
            match token {
                TokenTree::Punct(mark) if mark.as_char() == '#' => {
                    is_test |= attribute(rest).is_some_and(|(_, text)| text == "cfg (test)");
                    self.lifts.extend(lift(rest));
                }
                TokenTree::Punct(mark) if mark.as_char() == ';' => is_test = in_tests,
                TokenTree::Ident(word) if word == "unsafe" => self.add(rest, is_test),
                TokenTree::Ident(word) if word == "mod" => {
                    self.has_children |= is_child(&tokens[at..]) && !is_test;
                }
                TokenTree::Group(group) => {
                    self.count(group.stream(), is_test);
                    if group.delimiter() == Delimiter::Brace {
                        is_test = in_tests;
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds the code whose keyword `unsafe` stands before `rest`. A pointer type is no code.
    fn add(&mut self, rest: &[TokenTree], in_tests: bool) {
        let rest = match rest {
            [TokenTree::Ident(word), TokenTree::Literal(_), rest @ ..] if word == "extern" => rest,
            _ => rest,
        };
        let count = match rest {
            [TokenTree::Group(group), ..] if group.delimiter() == Delimiter::Brace => {
                &mut self.blocks
            }
            [TokenTree::Ident(word), TokenTree::Group(_), ..] if word == "fn" => return,
            [TokenTree::Ident(word), ..] if word == "fn" => &mut self.functions,
            [TokenTree::Ident(word), ..] if word == "impl" => &mut self.impls,
            [TokenTree::Ident(word), ..] if word == "trait" => &mut self.traits,
            _ => return,
        };
        *count += usize::from(!in_tests);
        self.has_unsafe = true;
    }

    /// Returns the reasons why the file has unsafe code outside tests, as one text.
    fn purpose(&self) -> String {
        let mut reasons: Vec<_> =
            self.lifts.iter().filter_map(|lift| lift.reason.as_deref()).collect();
        reasons.retain(|reason| !reason.starts_with("tests "));
        reasons.dedup();
        reasons.join("; ")
    }

    fn counts(&self) -> [(usize, &'static str); 4] {
        [
            (self.blocks, "block"),
            (self.functions, "function"),
            (self.impls, "impl"),
            (self.traits, "trait"),
        ]
    }

    fn is_in_document(&self) -> bool {
        self.counts().iter().any(|(count, _)| *count > 0)
    }

    /// Returns the rules that the file breaks.
    fn violations(&self) -> Vec<&'static str> {
        let inner = self.lifts.iter().any(|lift| lift.is_inner);
        let rules = [
            (self.has_unsafe && self.lifts.is_empty(), "has unsafe code and does not allow it"),
            (!self.has_unsafe && !self.lifts.is_empty(), "allows unsafe code and has none"),
            (self.lifts.iter().any(|lift| lift.is_of_child), "allows unsafe code on a `mod`"),
            (inner && self.has_children, "allows unsafe code in its child modules"),
            (inner && self.lifts.len() > 1, "allows unsafe code of the file and of an item"),
            (self.lifts.iter().any(|lift| lift.reason.is_none()), "allows without a reason"),
        ];
        rules.into_iter().filter(|(is_broken, _)| *is_broken).map(|(_, rule)| rule).collect()
    }
}

/// Returns true if the tokens begin with `mod name;`.
fn is_child(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [TokenTree::Ident(word), TokenTree::Ident(_), TokenTree::Punct(end), ..]
        if word == "mod" && end.as_char() == ';')
}

/// Returns the tokens between the brackets of an attribute whose `#` stands before `rest`, and
/// true if the attribute is an inner one.
fn attribute(rest: &[TokenTree]) -> Option<(bool, String)> {
    match rest {
        [TokenTree::Punct(mark), TokenTree::Group(group), ..] if mark.as_char() == '!' => {
            Some((true, group.stream().to_string()))
        }
        [TokenTree::Group(group), ..] => Some((false, group.stream().to_string())),
        _ => None,
    }
}

/// Returns the attribute whose `#` stands before `rest`, if it allows unsafe code.
fn lift(mut rest: &[TokenTree]) -> Option<Lift> {
    let (is_inner, text) = attribute(rest)?;
    if !text.starts_with("allow (unsafe_code") {
        return None;
    }
    let reason = text.split_once("reason = \"").and_then(|(_, after)| after.rsplit_once('"'));
    let reason = reason.map(|(reason, _)| reason.to_owned());
    // The item comes after other attributes and its visibility.
    let is_of_child = !is_inner
        && loop {
            match rest {
                [TokenTree::Punct(_) | TokenTree::Group(_), after @ ..] => rest = after,
                [TokenTree::Ident(word), after @ ..] if word == "pub" => rest = after,
                _ => break is_child(rest),
            }
        };
    Some(Lift { is_inner, is_of_child, reason })
}

/// A visitor that collects the public unsafe functions of a file. The lint `unreachable_pub`
/// ensures that each of them can be reached from outside the crate.
struct PublicFunctions {
    names: Vec<String>,
    /// The type or the trait of the functions in the visited item.
    of: Option<String>,
}

impl PublicFunctions {
    fn add(&mut self, name: &syn::Ident) {
        let of = self.of.as_ref().map_or_else(String::new, |of| format!("{of}::"));
        self.names.push(format!("{of}{name}"));
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        matches!(&attribute.meta, Meta::List(list)
            if list.path.is_ident("cfg") && list.tokens.to_string() == "test")
    })
}

impl<'ast> Visit<'ast> for PublicFunctions {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if matches!(item.vis, Visibility::Public(_)) && is_unsafe(&item.sig) {
            self.add(&item.sig.ident);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if item.trait_.is_none() && !is_test(&item.attrs) {
            if let Type::Path(path) = &*item.self_ty {
                self.of = path.path.segments.last().map(|segment| segment.ident.to_string());
            }
            visit::visit_item_impl(self, item);
            self.of = None;
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if matches!(item.vis, Visibility::Public(_)) && is_unsafe(&item.sig) {
            self.add(&item.sig.ident);
        }
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        if matches!(item.vis, Visibility::Public(_)) {
            self.of = Some(item.ident.to_string());
            visit::visit_item_trait(self, item);
            self.of = None;
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if is_unsafe(&item.sig) {
            self.add(&item.sig.ident);
        }
    }
}

fn is_unsafe(signature: &syn::Signature) -> bool {
    matches!(signature.safety, syn::Safety::Unsafe(_))
}

/// A crate that denies unsafe code, with its source files.
struct Crate {
    name: String,
    files: Vec<SourceFile>,
}

/// The crates of the workspace, without the fake drivers, which only tests load, and that of the
/// Python package.
static CRATES: LazyLock<Vec<Crate>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_workspace = workspace::packages().into_iter().map(|package| {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        let folder = manifest.parent().expect("a folder").to_owned();
        (package["name"].as_str().expect("a name").to_owned(), folder)
    });
    let mut found = Vec::new();
    for (name, folder) in of_workspace.chain([("hmem-python".to_owned(), root.join("python"))]) {
        if folder.starts_with(root.join("tests")) {
            continue;
        }
        let folder = folder.join("src");
        let roots = ["lib.rs", "main.rs"].map(|name| folder.join(name));
        for file in roots.iter().filter(|file| file.exists()) {
            let text = fs::read_to_string(file).expect("a source file");
            let denies = ["#![deny(unsafe_code)]", "#![forbid(unsafe_code)]"];
            assert!(denies.iter().any(|deny| text.contains(deny)), "{}", file.display());
        }
        let mut paths = Vec::new();
        source_files(&folder, &mut paths);
        paths.sort();
        found.push((name, folder, paths));
    }
    // The first test that needs the value keeps the others waiting, so it uses all processors.
    let mut found: Vec<_> = thread::scope(|scope| {
        let read = |(name, folder, paths): (String, PathBuf, Vec<PathBuf>)| {
            scope.spawn(move || {
                let files = paths.iter().map(|path| SourceFile::read(&folder, path)).collect();
                Crate { name, files }
            })
        };
        let reading: Vec<_> = found.into_iter().map(read).collect();
        reading.into_iter().map(|reading| reading.join().expect("the crate is read")).collect()
    });
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
});

fn source_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            source_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Adds a text, wrapped before column 100. Later lines are indented by two spaces if the text is an
/// item of a list.
fn wrap(into: &mut String, text: &str) {
    let mut column = 0;
    for word in text.split(' ') {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > COLUMNS {
            let indent = if text.starts_with("- ") { "\n  " } else { "\n" };
            into.push_str(indent);
            column = indent.len() - 1;
        } else if column > 0 {
            into.push(' ');
            column += 1;
        }
        into.push_str(word);
        column += len;
    }
    into.push('\n');
}

fn counted(counts: impl IntoIterator<Item = (usize, &'static str)>) -> String {
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    let counts =
        counts.map(|(count, what)| format!("{count} {what}{}", if count > 1 { "s" } else { "" }));
    counts.collect::<Vec<_>>().join(", ")
}

impl Crate {
    /// Returns the lists of the crate as they stand in the document.
    fn lists(&self) -> String {
        let files: Vec<_> = self.files.iter().filter(|file| file.is_in_document()).collect();
        let mut total = SourceFile::default().counts();
        for (sum, at) in total.iter_mut().zip(0..) {
            sum.0 = files.iter().map(|file| file.counts()[at].0).sum();
        }
        let mut text = format!("\n{} of {} files: ", files.len(), self.files.len());
        writeln!(text, "{}.\n", counted(total)).expect("a string");
        for file in &files {
            let (path, purpose, counts) = (&file.path, file.purpose(), counted(file.counts()));
            wrap(&mut text, &format!("- `{path}`: {purpose}. {counts}."));
        }
        let public: Vec<_> = files
            .iter()
            .flat_map(|file| &file.public_functions)
            .map(|it| format!("`{it}`"))
            .collect();
        if !public.is_empty() {
            text.push('\n');
            wrap(&mut text, &format!("Public unsafe functions: {}.", public.join(", ")));
        }
        text
    }
}

#[test]
fn each_file_with_unsafe_code_allows_it_for_itself_alone() {
    let mut found = Vec::new();
    for package in &*CRATES {
        for file in &package.files {
            let rules = file.violations().into_iter();
            found.extend(rules.map(|rule| format!("{}: {} {rule}", package.name, file.path)));
        }
    }
    assert!(found.is_empty(), "{} files:\n{}", found.len(), found.join("\n"));
}

#[test]
fn document_lists_the_unsafe_code_of_each_crate() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCUMENT);
    let old = fs::read_to_string(&path).expect("the document");
    let mut new = old.clone();
    for package in &*CRATES {
        if package.files.iter().all(|file| !file.is_in_document()) {
            continue;
        }
        let heading = format!("## {}\n", package.name);
        let section = new.find(&heading).unwrap_or_else(|| panic!("no {heading:?} in {DOCUMENT}"));
        let mark = new[section..].find(MARK).unwrap_or_else(|| panic!("no mark in {heading:?}"));
        let start = section + mark + MARK.len();
        let end = new[start..].find("\n## ").map_or(new.len(), |at| start + at);
        new.replace_range(start..end, &package.lists());
    }
    if std::env::var_os("HMEM_BLESS").is_some() {
        fs::write(path, new).expect("the document is writable");
    } else {
        let differing = old.lines().zip(new.lines()).find(|(old, new)| old != new);
        assert!(
            old == new,
            "{DOCUMENT} differs from the code (HMEM_BLESS=1 rewrites it), first in {differing:?}"
        );
    }
}

#[test]
fn tests_that_the_document_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(root.join(DOCUMENT)).expect("the document");
    let sections = document.split("\n## ").skip(1);
    let tests = sections.map(|section| section.split_once(MARK).expect("a mark").0);
    let words = tests.flat_map(|text| text.split('`').skip(1).step_by(2));
    let paths: Vec<_> = words.filter(|word| word.contains('/')).collect();
    let absent: Vec<_> = paths.iter().filter(|path| !root.join(path).exists()).collect();
    assert!(!paths.is_empty() && absent.is_empty(), "absent: {absent:?}");
}

fn of(text: &str) -> SourceFile {
    let mut file = SourceFile::default();
    file.count(text.parse().expect("tokens"), false);
    file
}

#[test]
fn unsafe_code_is_counted_in_macros_and_not_in_tests() {
    let file = of("macro_rules! a { () => { unsafe { b() } } }
         unsafe extern \"C\" fn c(d: unsafe extern \"C\" fn(u8)) {}
         unsafe impl Send for E {} unsafe trait F {}
         #[cfg(test)] mod tests { unsafe impl Send for G {} }
         unsafe fn h() {}");
    assert_eq!((file.blocks, file.functions, file.impls, file.traits), (1, 2, 1, 1));
    assert!(of("#[cfg(test)] mod tests { unsafe fn a() {} }").has_unsafe);
    assert!(!of("// unsafe { a() }\nfn b(c: unsafe fn()) {}").has_unsafe);
}

#[test]
fn unsafe_code_allowed_for_a_folder_of_modules_is_found() {
    let reason = "reason = \"b\"";
    for (text, broken) in [
        (format!("#![allow(unsafe_code, {reason})] unsafe fn a() {{}}"), 0),
        (format!("#[allow(unsafe_code, {reason})] unsafe fn a() {{}} mod c;"), 0),
        ("unsafe fn a() {}".to_owned(), 1),
        ("#![allow(unsafe_code)] unsafe fn a() {}".to_owned(), 1),
        (format!("#![allow(unsafe_code, {reason})]"), 1),
        (format!("#![allow(unsafe_code, {reason})] mod c; unsafe fn a() {{}}"), 1),
        (format!("#[allow(unsafe_code, {reason})] #[cfg(d)] pub mod c; unsafe fn a() {{}}"), 1),
    ] {
        assert_eq!(of(&text).violations().len(), broken, "{text}");
    }
}
