//! The commands of `docs/operators.md` run as written.

use std::{env, fs, path::Path, process};

use crate::hmem_process::{hmem, text};

#[test]
fn commands_for_operators_run_as_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operators.md");
    let page = fs::read_to_string(page).expect("the page");
    let (_, rest) = page.split_once("<!-- A test runs this block").expect("the mark of the block");
    let (_, rest) = rest.split_once("```sh\n").expect("the block");
    let (block, _) = rest.split_once("```").expect("the end of the block");
    let folder = env::temp_dir().join(format!("hmem-operators-{}", process::id()));
    fs::create_dir(&folder).expect("a folder");
    let mut ran = 0;
    for line in block.lines() {
        let (command, _) = line.split_once('#').unwrap_or((line, ""));
        let command = command.replace("$IFACE", "simulated").replace("$DEVICE", "0");
        let command = command.replace("$NIC", "loopback/hardware");
        let words: Vec<_> = command.split_whitespace().collect();
        let ["hmem", subcommand, arguments @ ..] = &words[..] else { panic!("{line}") };
        let output = hmem(subcommand, arguments).current_dir(&folder).output().expect("it runs");
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        assert!(!output.stdout.is_empty() || line.contains("--record"), "{line}");
        ran += 1;
    }
    assert_eq!(ran, 7, "the commands of the page");
    fs::remove_dir_all(&folder).expect("the folder exists");
}
