//! Checks the import layers: the files of a crate do not import each other in cycles.
//! `tests/layers.txt` lists the remaining cycles, each with its reason. A cycle that is not
//! listed fails, and so does a listed cycle that no longer exists. `HMEM_BLESS=1` rewrites the
//! list.
//!
//! Imports are `use` items and paths, also inside macros, followed through re-exports to the file
//! that defines the item. A file may import those of its own submodules: such an import is no part
//! of a cycle. Code under `cfg(test)` does not count.
//!
//! The section "Layers" of a crate's `lib.rs` lists its modules, lower ones first: a line for each
//! layer, with the names before a colon. A module imports only from the lines before its own.

mod imports;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write as _,
    fs,
    path::Path,
    sync::LazyLock,
    thread,
};

use self::imports::{Imports, Sources};
use serde_json::Value;

/// The files of an import cycle, as paths relative to the crate's folder.
type Cycle = BTreeSet<String>;

/// Returns the import cycles of a crate: its strongly connected components of two files or more.
fn cycles(imports: &Imports) -> BTreeSet<Cycle> {
    let reached = |from: &String| {
        let (mut found, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            let next = imports.get(file).into_iter().flat_map(BTreeMap::keys);
            open.extend(next.filter(|file| found.insert((*file).clone())));
        }
        found
    };
    let reached: BTreeMap<_, _> = imports.keys().map(|file| (file, reached(file))).collect();
    let mutual = |file: &String| -> Cycle {
        let back = |other: &&String| reached.get(other).is_some_and(|from| from.contains(file));
        reached[file].iter().filter(back).cloned().collect()
    };
    imports.keys().map(mutual).filter(|cycle| cycle.len() > 1).collect()
}

/// Reads the source files below a folder into `sources`. `name` is the folder's path inside the
/// crate.
fn read(folder: &Path, name: &str, sources: &mut Sources) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("an entry").path();
        let file = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let name = format!("{name}/{file}");
        if path.is_dir() {
            read(&path, &name, sources);
        } else if name.ends_with(".rs") {
            sources.insert(name, fs::read_to_string(&path).expect("a source file"));
        }
    }
}

/// The text of the root file and the imports of each crate of the workspace, by the crate's name.
static WORKSPACE: LazyLock<BTreeMap<String, (String, Imports)>> = LazyLock::new(|| {
    let packages = crate::workspace::packages();
    let of_package = |package: &Value| {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let mut sources = Sources::new();
        read(&Path::new(manifest).with_file_name("src"), "src", &mut sources);
        let name = package["name"].as_str().expect("a name").to_owned();
        let root = ["src/lib.rs", "src/main.rs"].iter().find_map(|file| sources.get(*file));
        let root = root.cloned().unwrap_or_default();
        (name, (root, imports::of(&sources)))
    };
    // The first test that needs the value keeps the others waiting, so it uses all processors.
    thread::scope(|scope| {
        let found: Vec<_> =
            packages.iter().map(|package| scope.spawn(|| of_package(package))).collect();
        found.into_iter().map(|reading| reading.join().expect("the crate is read")).collect()
    })
});

/// Parses the list of import cycles, each with its reason.
fn listed(text: &str) -> BTreeMap<(String, Cycle), String> {
    let mut cycles = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        match (line.strip_prefix("  reason: "), line.strip_prefix("  ")) {
            (None, None) => cycles.push((line.to_owned(), Cycle::new(), String::new())),
            (Some(reason), _) => cycles.last_mut().expect("a crate").2 = reason.to_owned(),
            (None, Some(file)) => {
                cycles.last_mut().expect("a crate").1.insert(file.to_owned());
            }
        }
    }
    cycles.into_iter().map(|(name, files, reason)| ((name, files), reason)).collect()
}

/// Placeholder for a reason that nobody has written yet. The test fails on it.
const NO_REASON: &str = "not known";

/// Formats the list of cycles. Reasons are taken from the old list.
fn list(cycles: &BTreeSet<(String, Cycle)>, old: &BTreeMap<(String, Cycle), String>) -> String {
    let mut text =
        "# Import cycles, see tests/repository/layers/mod.rs. Each should be removed.\n".to_owned();
    for (name, files) in cycles {
        let is_like =
            |(key, _): &(&(String, Cycle), &String)| key.0 == *name && !key.1.is_disjoint(files);
        let reason = old.iter().find(is_like).map_or(NO_REASON, |(_, reason)| reason);
        writeln!(text, "\n{name}\n  reason: {reason}").expect("a String takes everything");
        for file in files {
            writeln!(text, "  {file}").expect("a String takes everything");
        }
    }
    text
}

#[test]
fn files_import_each_other_in_the_listed_cycles_only() {
    let imports = &*WORKSPACE;
    let of_crate = |(name, (_, imports)): (&String, &(String, Imports))| {
        let name = name.clone();
        cycles(imports).into_iter().map(move |files| (name.clone(), files)).collect::<Vec<_>>()
    };
    let now: BTreeSet<_> = imports.iter().flat_map(of_crate).collect();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layers.txt");
    let known = listed(&fs::read_to_string(&file).unwrap_or_default());
    if env::var_os("HMEM_BLESS").is_some() {
        fs::write(&file, list(&now, &known)).expect("the list can be written");
        return;
    }
    let mut wrong = String::new();
    for (name, files) in now.iter().filter(|cycle| !known.contains_key(cycle)) {
        writeln!(wrong, "not listed: {name}, {} files", files.len()).expect("a String");
        for from in files {
            let into_cycle = imports[name].1[from].iter().filter(|(to, _)| files.contains(*to));
            for (to, path) in into_cycle {
                writeln!(wrong, "  {from} -> {to} ({path})").expect("a String");
            }
        }
    }
    for (name, files) in known.keys().filter(|cycle| !now.contains(cycle)) {
        writeln!(wrong, "listed, but gone: {name}, {files:?}").expect("a String");
    }
    for ((name, files), _) in known.iter().filter(|(_, reason)| *reason == NO_REASON) {
        writeln!(wrong, "write the reason in tests/layers.txt: {name}, {files:?}")
            .expect("a String");
    }
    assert!(wrong.is_empty(), "cycles of imports changed; HMEM_BLESS=1 lists them anew\n{wrong}");
}

/// Returns the layer of each module from the section "Layers" of a `lib.rs`; `None` without the
/// section.
fn layers_listed(lib: &str) -> Option<BTreeMap<String, usize>> {
    let docs = lib.lines().filter_map(|line| line.strip_prefix("//!")).map(str::trim);
    let section = docs.skip_while(|line| *line != "# Layers").skip(1);
    let lines = section.take_while(|line| !line.starts_with('#'));
    let items: Vec<_> = lines.filter(|line| line.starts_with("- ")).collect();
    let modules = |(layer, line): (usize, &&str)| -> Vec<_> {
        let names = line.split_once(": ").map_or(*line, |(names, _)| names);
        let quoted = names.split('`').skip(1).step_by(2);
        quoted.map(|module| (module.to_owned(), layer)).collect()
    };
    let listed: BTreeMap<_, _> = items.iter().enumerate().flat_map(modules).collect();
    (!listed.is_empty()).then_some(listed)
}

/// Returns the path of a file's module as the section "Layers" writes it; `None` for the crate's
/// root.
fn module(file: &str) -> Option<&str> {
    let module = file.strip_prefix("src/")?.trim_end_matches(".rs").trim_end_matches("/mod");
    (!["lib", "main"].contains(&module)).then_some(module)
}

/// Returns the listed module that contains `module`, or `module` itself if it is listed, with its
/// layer.
fn layer<'l>(layers: &'l BTreeMap<String, usize>, module: &str) -> Option<(&'l str, usize)> {
    let around = std::iter::successors(Some(module), |path| Some(path.rsplit_once('/')?.0));
    let listed = around.filter_map(|path| layers.get_key_value(path)).next();
    listed.map(|(name, layer)| (name.as_str(), *layer))
}

/// Returns a message for each import from the same or a higher layer, each module that is not
/// listed, and each listed module that does not exist.
fn against_layers(layers: &BTreeMap<String, usize>, imports: &Imports) -> Vec<String> {
    let mut wrong = Vec::new();
    let of_file = |file: &str| module(file).map(|module| layer(layers, module));
    for (file, all) in imports {
        let Some(importer) = of_file(file) else { continue };
        let Some((name, at)) = importer else {
            wrong.push(format!("{file} is not listed"));
            continue;
        };
        for (to, (imported, below)) in
            all.keys().filter_map(|to| Some((to, of_file(to).flatten()?)))
        {
            if name != imported && at <= below {
                wrong.push(format!("{file} imports {to}"));
            }
        }
    }
    let is_used = |name: &str| {
        let of_name = |file: &String| of_file(file).flatten().is_some_and(|(own, _)| own == name);
        imports.keys().any(of_name)
    };
    let gone = layers.keys().filter(|name| !is_used(name));
    wrong.extend(gone.map(|name| format!("{name} is listed, and is no module")));
    wrong
}

#[test]
fn modules_import_only_from_lower_layers() {
    let mut wrong = String::new();
    for (name, (lib, imports)) in &*WORKSPACE {
        let modules: BTreeSet<_> = imports.keys().filter_map(|file| module(file)).collect();
        if modules.len() < 2 {
            continue;
        }
        match layers_listed(lib) {
            Some(layers) => {
                for line in against_layers(&layers, imports) {
                    writeln!(wrong, "{name}: {line}").expect("a String");
                }
            }
            None => writeln!(wrong, "{name}: src/lib.rs has no list of layers").expect("a String"),
        }
    }
    assert!(
        wrong.is_empty(),
        "the lists of layers (src/lib.rs, section Layers) are wrong\n{wrong}"
    );
}

#[test]
fn import_of_a_higher_layer_and_a_missing_module_are_found() {
    let files = [
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use crate::b::B; pub struct A(B);"),
        ("src/b.rs", "pub struct B;"),
        ("src/c.rs", "pub struct C;"),
    ];
    let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
    let imports = imports::of(&files.into_iter().map(own).collect());
    let list = |text: &str| layers_listed(text).expect("a list");
    let sound =
        list("//! # Layers\n//!\n//! - `b`, `c`: low\n//! - `a`\n//!\n//! # More\n//! - `d`");
    assert_eq!(against_layers(&sound, &imports), [""; 0]);
    let upward = list("//! # Layers\n//! - `a`\n//! - `b`\n");
    assert_eq!(
        against_layers(&upward, &imports),
        ["src/a.rs imports src/b.rs", "src/c.rs is not listed"]
    );
    assert_eq!(layers_listed("//! No list.\n"), None);
}

/// Returns the import cycles of a crate with these files, each given by path and text.
fn cycles_of<const N: usize>(files: [(&str, &str); N]) -> Vec<Vec<String>> {
    let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
    let imports = imports::of(&files.into_iter().map(own).collect());
    cycles(&imports).into_iter().map(|cycle| cycle.into_iter().collect()).collect()
}

#[test]
fn cycle_by_qualified_paths_is_found() {
    let files = [
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use crate::b::B; pub struct A(B);"),
        ("src/b.rs", "pub struct B; impl B { fn c(&self) -> super::c::C { todo!() } }"),
        ("src/c.rs", "pub struct C; fn f() { println!(\"{:?}\", crate::a::A::new()); }"),
    ];
    assert_eq!(cycles_of(files), [["src/a.rs", "src/b.rs", "src/c.rs"]]);
}

#[test]
fn cycle_by_a_reexport_is_found() {
    let files = [
        ("src/lib.rs", "mod a; mod b; pub use a::A as Renamed;"),
        ("src/a/mod.rs", "mod inner; mod other; pub use self::inner::*; use self::other::Other;"),
        ("src/a/inner.rs", "use crate::b; pub struct A; fn f() { b::g() }"),
        ("src/a/other.rs", "pub struct Other;"),
        ("src/b.rs", "use crate::Renamed; pub fn g() -> Renamed { Renamed }"),
    ];
    assert_eq!(cycles_of(files), [["src/a/inner.rs", "src/b.rs"]]);
}

#[test]
fn item_of_a_parent_is_an_import_and_a_submodule_is_none() {
    let parent = "mod a; mod b; pub struct P(a::A); use b::B;";
    let files = |of_b| {
        [
            ("src/lib.rs", "mod p;"),
            ("src/p/mod.rs", parent),
            (
                "src/p/a.rs",
                "pub struct A; use super::P; #[cfg(test)] mod tests { use super::super::B; }",
            ),
            ("src/p/b.rs", of_b),
        ]
    };
    assert_eq!(cycles_of(files("pub struct B; use super::{P, a}; fn f() { a::A; }")), [[""; 0]; 0]);
    let (a, b) = ("src/p/a.rs", "pub struct A; use super::B;");
    let closed =
        files("pub struct B; use super::a::A;").map(|file| if file.0 == a { (a, b) } else { file });
    assert_eq!(cycles_of(closed), [["src/p/a.rs", "src/p/b.rs"]]);
}

#[test]
fn list_is_read_as_it_was_written_and_keeps_reasons() {
    let cycle = |files: &[&str]| -> (String, Cycle) {
        ("a".into(), files.iter().map(|file| (*file).to_owned()).collect())
    };
    let old = BTreeMap::from([(cycle(&["x.rs", "y.rs"]), "because".to_owned())]);
    let text = list(&BTreeSet::from([cycle(&["w.rs", "x.rs"]), cycle(&["z.rs"])]), &old);
    let expected =
        [(cycle(&["w.rs", "x.rs"]), "because".to_owned()), (cycle(&["z.rs"]), NO_REASON.into())];
    assert_eq!(listed(&text), BTreeMap::from(expected));
}
