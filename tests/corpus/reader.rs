//! Checks the committed corpus of serialised values (`tests/corpus`) against the code.

use std::{collections::BTreeSet, fs, ops::RangeInclusive, path::Path};

/// Decodes each committed value of the serialised form `form` and compares the result with the
/// committed text. Fails if one of `versions` has no value, or another version has one.
pub(crate) fn check(form: &str, versions: RangeInclusive<u32>, decode: impl Fn(&[u8]) -> String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/corpus").join(form);
    let mut found = BTreeSet::new();
    for file in
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
    {
        let path = file.expect("an entry of the folder").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name of text");
        let version = name.strip_prefix('v').and_then(|name| name.split_once('-'));
        let version: u32 = version.and_then(|(version, _)| version.parse().ok()).expect(name);
        let text = fs::read_to_string(&path).expect(name);
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let [bytes, value] = lines[..] else { panic!("{name}: not two lines") };
        assert_eq!(decode(&unhex(name, bytes)), value, "{form}/{name}");
        found.insert(version);
    }
    assert_eq!(
        found,
        versions.collect(),
        "{form}: each version needs a file in {}",
        folder.display()
    );
}

fn unhex(name: &str, text: &str) -> Vec<u8> {
    assert!(text.is_ascii() && text.len().is_multiple_of(2), "{name}: not hexadecimal");
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).expect(name);
    (0..text.len()).step_by(2).map(byte).collect()
}
