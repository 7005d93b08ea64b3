//! Checks the state tables and rules in `docs/memory-windows.md` against the code.

use hmem::provider::{WindowEvent, WindowRule, WindowState, WindowType};

const BEGIN: &str =
    "<!-- states: begin. HMEM_BLESS=1 cargo test --test repository rewrites this part. -->\n";
const END: &str = "<!-- states: end -->\n";

fn tables() -> String {
    let mut out = String::new();
    for kind in WindowType::ALL {
        out += &format!(
            "\nType {}:\n\n| event | Invalid | Free | Valid |\n|---|---|---|---|\n",
            kind.name()
        );
        for event in WindowEvent::ALL {
            let cell = |state| match kind.after(state, event) {
                Ok(after) => after.to_string(),
                Err(rule) => format!("`{rule}`"),
            };
            let cells: Vec<_> = WindowState::ALL.map(cell).into();
            out += &format!("| {event} | {} |\n", cells.join(" | "));
        }
    }
    out + "\n"
}

/// MW-04
#[test]
fn the_document_contains_the_state_tables_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/memory-windows.md");
    let text = std::fs::read_to_string(path).expect("read the document");
    let (before, rest) = text.split_once(BEGIN).expect("the part begins");
    let (shown, after) = rest.split_once(END).expect("the part ends");
    if std::env::var_os("HMEM_BLESS").is_some() {
        let text = [before, BEGIN, &tables(), END, after].concat();
        std::fs::write(path, text).expect("write the document");
        return;
    }
    assert_eq!(shown, tables(), "HMEM_BLESS=1 rewrites the document");
}

/// MW-04
#[test]
fn the_document_lists_every_rule() {
    let text = include_str!("../../docs/memory-windows.md");
    for rule in WindowRule::ALL {
        assert!(text.contains(&format!("\n- `{rule}`")), "{rule} is missing");
    }
}
