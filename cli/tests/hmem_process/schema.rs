//! Checks documents of the command against the schemas in `docs`.

use serde_json::Value;

/// Asserts that a document matches the schema of a subcommand, and that the schema has every field
/// of the document.
pub(crate) fn matches(subcommand: &str, document: &Value) {
    let schema = match subcommand {
        "check" => include_str!("../../../docs/check.schema.json"),
        "compare-paths" => include_str!("../../../docs/compare-paths.schema.json"),
        "explain" => include_str!("../../../docs/explain.schema.json"),
        "info" => include_str!("../../../docs/info.schema.json"),
        "perf" => include_str!("../../../docs/perf.schema.json"),
        "topo" => include_str!("../../../docs/topo.schema.json"),
        other => panic!("no schema of {other}"),
    };
    let schema: Value = serde_json::from_str(schema).expect("JSON");
    if let Err(why) = check(&schema, &schema, document) {
        panic!("hmem {subcommand}: document{why}");
    }
}

/// Checks a value against a part of a schema. Knows the keywords that schemars writes for the types
/// of the command.
///
/// # Errors
/// The place in the value, with the reason why it does not match.
pub(crate) fn check(root: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(definition) = schema["$ref"].as_str() {
        let part = root.pointer(definition.trim_start_matches('#')).expect("a definition");
        return check(root, part, value);
    }
    if let Some(choices) = schema.get("anyOf").or(schema.get("oneOf")) {
        let choices = choices.as_array().expect("schemas").iter();
        let errors: Vec<_> =
            choices.clone().filter_map(|part| check(root, part, value).err()).collect();
        return if errors.len() < choices.len() { Ok(()) } else { Err(errors.join(", or ")) };
    }
    let types = match &schema["type"] {
        Value::Array(types) => types.clone(),
        one => vec![one.clone()],
    };
    let is_of = |name: &Value| match name.as_str().expect("a type") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("unknown type {other}"),
    };
    if !types.iter().any(is_of) {
        return Err(format!(" is no {}: {value}", schema["type"]));
    }
    let listed = schema["enum"].as_array().is_none_or(|known| known.contains(value));
    if !listed || schema.get("const").is_some_and(|constant| constant != value) {
        return Err(format!(" has an unknown value: {value}"));
    }
    for item in value.as_array().into_iter().flatten() {
        check(root, &schema["items"], item).map_err(|why| format!("[]{why}"))?;
    }
    let Some(fields) = value.as_object() else { return Ok(()) };
    for name in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(name.as_str().expect("a name")) {
            return Err(format!(" lacks {name}: {value}"));
        }
    }
    for (name, field) in fields {
        let part = schema["properties"].get(name).or(schema.get("additionalProperties"));
        let part = part.ok_or_else(|| format!(".{name} is not in the schema"))?;
        check(root, part, field).map_err(|why| format!(".{name}{why}"))?;
    }
    Ok(())
}
