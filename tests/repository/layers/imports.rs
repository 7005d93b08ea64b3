//! Imports between the files of a crate, found in its source text.

use std::collections::BTreeMap;

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Expr, ExprLit, Ident, ImplItem, Item, ItemMod, ItemUse, Lit, Macro, Meta, MetaList,
    Token, UseTree,
    ext::IdentExt,
    punctuated::Punctuated,
    visit::{self, Visit},
};

/// Source text of each file of a crate, by the file's path.
pub(crate) type Sources = BTreeMap<String, String>;

/// For each file of a crate, the files that it imports, each with one `use` path as an example.
/// Imports of a file's own submodules are left out.
pub(crate) type Imports = BTreeMap<String, BTreeMap<String, String>>;

/// Returns the imports between the files of a crate: of its library and of its program.
pub(crate) fn of(sources: &Sources) -> Imports {
    let mut imports: Imports = sources.keys().map(|file| (file.clone(), BTreeMap::new())).collect();
    for root in ["src/lib.rs", "src/main.rs"] {
        if sources.contains_key(root) {
            let mut tree = Tree { sources, modules: Vec::new() };
            tree.add_file(root, "src", None);
            tree.collect(&mut imports);
        }
    }
    imports
}

/// Meaning of a name that a module defines or imports.
#[derive(Clone)]
enum Name {
    Item,
    Module(usize),
    Import(Vec<String>),
}

/// A module of the crate. Its index in `Tree::modules` is its number.
struct Module {
    file: String,
    parent: Option<usize>,
    names: BTreeMap<String, Vec<Name>>,
    globs: Vec<Vec<String>>,
    /// Paths that the module's code uses.
    paths: Vec<Vec<String>>,
}

/// The definition to which a path resolves.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    /// An item, given as the number of the module that defines it.
    Item(usize),
    Module(usize),
}

struct Tree<'a> {
    sources: &'a Sources,
    modules: Vec<Module>,
}

impl Tree<'_> {
    /// Adds the module of a file and its submodules, whose files are in `folder`. Returns the
    /// module's number.
    fn add_file(&mut self, file: &str, folder: &str, parent: Option<usize>) -> usize {
        let parsed =
            syn::parse_file(&self.sources[file]).unwrap_or_else(|error| panic!("{file}: {error}"));
        let items = if is_test(&parsed.attrs) { Vec::new() } else { parsed.items };
        self.add(file, folder, &items, parent)
    }

    fn add(&mut self, file: &str, folder: &str, items: &[Item], parent: Option<usize>) -> usize {
        let number = self.modules.len();
        self.modules.push(Module {
            file: file.to_owned(),
            parent,
            names: BTreeMap::new(),
            globs: Vec::new(),
            paths: Vec::new(),
        });
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            if let Item::Mod(module) = item {
                self.add_submodule(number, folder, module);
                continue;
            }
            if let Some(name) = name_of(item) {
                self.name(number, name, Name::Item);
            }
            Paths { module: &mut self.modules[number] }.visit_item(item);
        }
        number
    }

    fn add_submodule(&mut self, parent: usize, folder: &str, module: &ItemMod) {
        let name = module.ident.unraw().to_string();
        let inner = format!("{folder}/{name}");
        let file = self.modules[parent].file.clone();
        if let Some((_, items)) = &module.content {
            let number = self.add(&file, &inner, items, Some(parent));
            return self.name(parent, name, Name::Module(number));
        }
        let (above, _) = file.rsplit_once('/').expect("a file lies in a folder");
        let mut files: Vec<_> =
            path_attributes(module).map(|path| format!("{above}/{path}")).collect();
        // A file of another crate is checked with that crate.
        if !files.is_empty() && files.iter().all(|file| file.contains("/../../")) {
            return self.name(parent, name, Name::Item);
        }
        if files.is_empty() {
            files = vec![format!("{inner}.rs"), format!("{inner}/mod.rs")];
        }
        files.retain(|file| self.sources.contains_key(file));
        assert!(!files.is_empty(), "{file}: no file of mod {name}");
        for file in files {
            let number = self.add_file(&file, &inner, Some(parent));
            self.name(parent, name.clone(), Name::Module(number));
        }
    }

    fn name(&mut self, module: usize, name: String, named: Name) {
        self.modules[module].names.entry(name).or_default().push(named);
    }

    /// Adds an import for each path that leads to another file.
    fn collect(&self, imports: &mut Imports) {
        for (number, module) in self.modules.iter().enumerate() {
            for path in &module.paths {
                for target in self.resolve(number, path, 0) {
                    let Target::Item(of) = target else { continue };
                    let file = &self.modules[of].file;
                    if *file != module.file && !self.is_below(of, &module.file) {
                        let of_file = imports.get_mut(&module.file).expect("every file is there");
                        of_file.entry(file.clone()).or_insert_with(|| path.join("::"));
                    }
                }
            }
        }
    }

    /// Returns true if a module is a descendant of the module that `file` defines.
    fn is_below(&self, module: usize, file: &str) -> bool {
        let mut above = self.modules[module].parent;
        while let Some(number) = above {
            if self.modules[number].file == file {
                return true;
            }
            above = self.modules[number].parent;
        }
        false
    }

    /// Resolves a path from a module to definitions. Paths into other crates resolve to none.
    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Vec<Target> {
        let mut targets: Option<Vec<Target>> = None;
        for (at, name) in path.iter().enumerate() {
            let next = match (name.as_str(), &targets) {
                ("crate", _) if at == 0 => vec![Target::Module(0)],
                ("self", None) => vec![Target::Module(from)],
                ("self", Some(targets)) => targets.clone(),
                ("super", _) => {
                    let start = targets.unwrap_or_else(|| vec![Target::Module(from)]);
                    let parent = |target| match target {
                        Target::Module(module) => self.modules[module].parent.map(Target::Module),
                        Target::Item(_) => None,
                    };
                    start.into_iter().filter_map(parent).collect()
                }
                (name, None) => self.lookup(from, name, depth),
                (name, Some(targets)) => {
                    let inside = |target: &Target| match *target {
                        // The rest of the path names a variant or an associated item.
                        Target::Item(_) => vec![*target],
                        Target::Module(module) => {
                            let found = self.lookup(module, name, depth);
                            // The item was defined by a macro of that module.
                            if found.is_empty() { vec![Target::Item(module)] } else { found }
                        }
                    };
                    targets.iter().flat_map(inside).collect()
                }
            };
            targets = Some(next);
        }
        targets.unwrap_or_default()
    }

    /// Returns the definitions of a name in a module, found through imports and then globs.
    fn lookup(&self, module: usize, name: &str, depth: usize) -> Vec<Target> {
        // Globs and imports may form cycles.
        if depth > 16 {
            return Vec::new();
        }
        let named = |named: &Name| match named {
            Name::Item => vec![Target::Item(module)],
            Name::Module(number) => vec![Target::Module(*number)],
            Name::Import(path) => self.resolve(module, path, depth + 1),
        };
        let names = self.modules[module].names.get(name);
        let mut found: Vec<_> = names.into_iter().flatten().flat_map(named).collect();
        if found.is_empty() {
            for glob in &self.modules[module].globs {
                for target in self.resolve(module, glob, depth + 1) {
                    if let Target::Module(of) = target
                        && of != module
                    {
                        found.extend(self.lookup(of, name, depth + 1));
                    }
                }
            }
        }
        found
    }
}

/// A syntax visitor that adds the paths and `use` items of a module's code to the module.
struct Paths<'a> {
    module: &'a mut Module,
}

impl Paths<'_> {
    fn import(&mut self, tree: &UseTree, mut path: Vec<String>) {
        let text = |ident: &Ident| ident.unraw().to_string();
        match tree {
            UseTree::Path(inner) => {
                path.push(text(&inner.ident));
                self.import(&inner.tree, path);
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, path.clone()));
            }
            UseTree::Glob(_) => self.module.globs.push(path),
            UseTree::Name(name) => {
                let name = text(&name.ident);
                let known = if name == "self" { path.last().cloned() } else { Some(name.clone()) };
                path.push(name);
                self.add_import(known.unwrap_or_default(), path);
            }
            UseTree::Rename(rename) => {
                path.push(text(&rename.ident));
                self.add_import(text(&rename.rename), path);
            }
        }
    }

    fn add_import(&mut self, name: String, path: Vec<String>) {
        // `use tracing;` imports a crate under its own name.
        if path.first() != Some(&name) {
            self.module.names.entry(name).or_default().push(Name::Import(path.clone()));
        }
        self.module.paths.push(path);
    }

    /// Adds every token sequence of a macro call that looks like a path.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut punctuation = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if punctuation != "::" || path.is_empty() {
                        self.end(&mut path);
                    }
                    if punctuation == "::" && path.is_empty()
                        || punctuation.ends_with('.') && !punctuation.ends_with("..")
                    {
                        // A method, a field, or a path of another crate.
                        punctuation = "-".into();
                        continue;
                    }
                    punctuation.clear();
                    path.push(ident.unraw().to_string());
                }
                TokenTree::Punct(punct) => punctuation.push(punct.as_char()),
                TokenTree::Group(group) => {
                    self.end(&mut path);
                    punctuation.clear();
                    self.scan(group.stream());
                }
                TokenTree::Literal(_) => {
                    self.end(&mut path);
                    punctuation.clear();
                }
            }
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut Vec<String>) {
        if !path.is_empty() {
            self.module.paths.push(std::mem::take(path));
        }
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, Vec::new());
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|segment| segment.ident.unraw().to_string());
            self.module.paths.push(names.collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !matches!(item, ImplItem::Fn(function) if is_test(&function.attrs)) {
            visit::visit_impl_item(self, item);
        }
    }
}

fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.unraw().to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the file names in the `#[path]` attributes of a module.
fn path_attributes(module: &ItemMod) -> impl Iterator<Item = String> {
    let path = |meta: Meta| match meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    };
    let metas = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg_attr") => nested(list),
        meta => vec![meta.clone()],
    };
    module.attrs.iter().flat_map(metas).filter_map(path)
}

fn nested(list: &MetaList) -> Vec<Meta> {
    let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    inner.map(|inner| inner.into_iter().collect()).unwrap_or_default()
}

/// Returns true for code that only tests compile.
fn is_test(attributes: &[Attribute]) -> bool {
    fn needs_test(meta: &Meta) -> bool {
        let Meta::List(list) = meta else { return meta.path().is_ident("test") };
        let inner = nested(list);
        list.path.is_ident("all") && inner.iter().any(needs_test)
            || list.path.is_ident("any") && !inner.is_empty() && inner.iter().all(needs_test)
    }
    let mut cfgs = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    cfgs.any(|attribute| attribute.parse_args::<Meta>().is_ok_and(|meta| needs_test(&meta)))
}
