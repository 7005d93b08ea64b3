//! Replays the committed inputs of the fuzz targets (`fuzz/corpus`). `fuzz/run` is the fuzzer.

#[path = "../../fuzz/targets/mod.rs"]
mod targets;

use std::{collections::BTreeSet, fs, panic, path::Path};

/// REL-03
///
/// Each target accepts an input of its corpus and refuses another one with an error, so that a
/// target that does not reach its parser fails.
#[test]
fn every_fuzz_target_accepts_and_refuses_an_input_of_its_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let names = |folder: &Path| -> BTreeSet<_> {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
        entries.map(|entry| entry.expect("an entry").file_name()).collect()
    };
    let listed = targets::TARGETS.iter().map(|(name, _)| (*name).into()).collect();
    assert_eq!(names(&corpus), listed, "each target has a folder, and each folder a target");
    for (target, run) in targets::TARGETS {
        let folder = corpus.join(target);
        let (mut accepted, mut refused) = (0, 0);
        for name in names(&folder) {
            let input = fs::read(folder.join(&name)).expect("an input");
            let verdict = panic::catch_unwind(|| run(&input))
                .unwrap_or_else(|_| panic!("{target}/{name:?} panicked, see above"));
            *if verdict.is_ok() { &mut accepted } else { &mut refused } += 1;
        }
        println!("{target}: {accepted} accepted, {refused} refused");
        assert!(accepted > 0, "{target} accepted no input");
        assert!(refused > 0, "{target} refused no input");
    }
}
