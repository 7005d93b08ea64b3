//! Tests of the JSON schemas in `docs`, and of the pages that describe the fields of the schemas.
//!
//! The schemas are generated from the types of the JSON documents that the commands print.

use std::{collections::BTreeMap, env, fs};

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::Value;

use crate::{check, explain, info, json::SCHEMA, perf, topo};

/// Returns the schema of each command with `--json`, and the pages that describe the fields. The
/// first page is that of the command. The other pages belong to other commands, and describe
/// objects that this command prints too. The page `NAME` is the file `docs/NAME-schema.md`.
fn schemas() -> [(&'static str, Value, &'static [&'static str]); 6] {
    [
        ("check", schema::<check::Report>("check"), &["check"]),
        ("explain", schema::<explain::Report>("explain"), &["explain", "check", "topo"]),
        ("info", schema::<info::Inventory>("info"), &["check"]),
        ("perf", schema::<perf::Report>("perf"), &["perf", "check"]),
        ("compare-paths", schema::<perf::Comparison>("perf --compare-paths"), &["perf", "check"]),
        ("topo", schema::<topo::Report>("topo"), &["topo"]),
    ]
}

fn schema<T: JsonSchema>(command: &str) -> Value {
    // Messages of `perf` refuse unknown fields. A reader of a document ignores unknown fields.
    let open = RecursiveTransform(|schema: &mut Schema| {
        if schema.get("additionalProperties") == Some(&Value::Bool(false)) {
            schema.remove("additionalProperties");
        }
    });
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(open);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    schema["title"] = format!("hmem {command} --json").into();
    schema["properties"]["schema"]["const"] = SCHEMA.into();
    schema
}

/// Returns the path of a file in `docs`.
fn docs(name: &str) -> String {
    format!("{}/../docs/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Adds the fields of all objects in a schema to `found`, each with its JSON types.
fn fields(schema: &Value, found: &mut BTreeMap<String, Vec<String>>) {
    if let Some(properties) = schema["properties"].as_object() {
        for (name, field) in properties {
            found.entry(name.clone()).or_default().push(words(field));
        }
    }
    match schema {
        Value::Object(parts) => parts.values().for_each(|part| fields(part, found)),
        Value::Array(parts) => parts.iter().for_each(|part| fields(part, found)),
        _ => {}
    }
}

/// Returns the type of a field in the words of the pages, such as `string or null` or `array of
/// strings`; empty for an object.
fn words(field: &Value) -> String {
    let types = match &field["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        name => Vec::from_iter(name.as_str()),
    };
    let words = types.join(" or ").replace("integer", "number");
    match field["items"]["type"].as_str() {
        Some("object") | None => words,
        Some(item) => {
            words.replace("array", &format!("array of {}s", item.replace("integer", "number")))
        }
    }
}

/// Requirement DIAG-01: each schema in `docs` is the one that is generated from the types.
#[test]
fn schemas_in_docs_are_those_of_the_types() {
    for (command, schema, _) in schemas() {
        let path = docs(&format!("{command}.schema.json"));
        if env::var_os("HMEM_BLESS").is_some() {
            let text = serde_json::to_string_pretty(&schema).expect("JSON");
            fs::write(&path, text + "\n").expect("the file can be written");
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        let written: Value = serde_json::from_str(&text).unwrap_or_default();
        assert_eq!(written, schema, "{path} differs: run this test with HMEM_BLESS=1");
    }
}

/// Requirement DIAG-01: each field of a command's schema is described on one of the command's pages
/// ([`schemas`]).
#[test]
fn each_field_of_a_schema_is_on_its_page() {
    for (command, schema, pages) in schemas() {
        let pages = pages.iter().map(|page| docs(&format!("{page}-schema.md")));
        let text: String = pages.map(|page| fs::read_to_string(page).expect("a page")).collect();
        let mut found = BTreeMap::new();
        fields(&schema, &mut found);
        for name in found.keys() {
            assert!(text.contains(&format!("`{name}`")), "{name} of {command} is on no page");
        }
    }
}

/// Requirement DIAG-01: a page describes only fields that exist. For each field that the page
/// `docs/COMMAND-schema.md` describes, the schema of a command with this page has a field of that
/// name and type.
///
/// A description begins with the names of one or more fields. Their type follows in parentheses.
#[test]
fn each_field_of_a_page_is_in_its_schema() {
    for page in ["check", "explain", "perf", "topo"] {
        let mut found = BTreeMap::new();
        for (_, schema, pages) in schemas() {
            if pages[0] == page {
                fields(&schema, &mut found);
            }
        }
        let text = fs::read_to_string(docs(&format!("{page}-schema.md"))).expect("a page");
        let entries = text.lines().filter_map(|line| line.strip_prefix("- `")?.split_once("` ("));
        for (names, rest) in entries {
            let (of, _) = rest.split_once(')').expect("a type in parentheses");
            for name in names.split("`, `") {
                let types = found.get(name).unwrap_or_else(|| panic!("{name} of {page}"));
                // Names of objects begin with a capital letter. A list of types is for several
                // fields.
                let of = of
                    .split(" of ")
                    .next()
                    .filter(|_| of.contains(char::is_uppercase))
                    .unwrap_or(of);
                let known = types.iter().any(|known| known == of || known.is_empty());
                assert!(known || of.contains(','), "{name} of {page} is no {of} but {types:?}");
            }
        }
    }
}
