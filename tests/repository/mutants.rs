//! Tests of the list of mutants, and of the program that compiles them into a copy of the sources.

use std::{fs, path::Path};

use crate::program::{instrumented, parse};

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path)
}

/// Returns a source text with the mutants of a list compiled in.
fn applied(list: &str, source: &str) -> Result<String, String> {
    let mutants = parse(list)?;
    instrumented(source, &mutants.iter().collect::<Vec<_>>())
}

/// A change of the sources must keep the list.
#[test]
fn original_texts_of_the_list_occur_once() {
    let mutants = parse(&read("tests/mutants/list.txt")).expect("a list");
    for of_file in mutants.chunk_by(|one, other| one.file == other.file) {
        let source = read(&of_file[0].file);
        if let Err(why) = instrumented(&source, &of_file.iter().collect::<Vec<_>>()) {
            panic!("{why}");
        }
    }
}

#[test]
fn list_without_a_mutant_or_with_a_wrong_one_is_refused() {
    let code = "fn one() {\n    two(a < b);\n    two(a < b);\n}\n";
    assert!(applied("1 one.rs\n- fn one()\n+ fn two()\n", code).is_ok());
    for (list, why) in [
        ("", "0 mutants"),
        ("# 1 one.rs\n", "0 mutants"),
        ("- a < b\n", "no mutant before it"),
        ("1 one.rs\n* a < b\n", "begins with neither"),
        ("1 one.rs\n- fn\n1 one.rs\n- one\n", "another mutant has"),
        ("1 one.rs\n- a < c\n+ true\n", "occurs 0 times"),
        ("1 one.rs\n- a < b\n+ true\n", "occurs 2 times"),
        ("1 one.rs\n+ true\n", "occurs 0 times"),
        ("1 one.rs\n- two(a\n2 one.rs\n- one() {two\n", "times"),
    ] {
        let error = applied(list, code).expect_err(list);
        assert!(error.contains(why), "{list}: {error}");
    }
    let many: String = (1..=201).map(|id| format!("{id} one.rs\n")).collect();
    assert!(parse(&many).is_err_and(|error| error.contains("201 mutants")));
}

#[test]
fn mutants_are_chosen_by_their_numbers() {
    let code = "fn f() {\n    if a && b\n        < c {\n        g();\n    }\n}\n";
    let list = "1 x.rs\n- a && b < c\n+ a\n2 x.rs\n- b < c\n+ b <= c\n3 x.rs @ fn f\n- g();\n";
    let expected = "fn f() {\n    if (if hmem_core::mutants::chosen(1) { a } else { a && \
                    (if hmem_core::mutants::chosen(2) { b <= c } else { b\n        < c }) }) \
                    {\n        if hmem_core::mutants::chosen(3) {  } else { g(); }\n    }\n}\n";
    assert_eq!(applied(list, code).as_deref(), Ok(expected));
}
