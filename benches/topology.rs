//! Time to read the PCI topology of a DGX A100 from a recording, once from its archive and once
//! from a folder.
//!
//! The references only read the bytes: they unpack the archive, or read each file of the folder,
//! without parsing the contents.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{
    fs,
    hint::black_box,
    io::{Cursor, Read},
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use hmem::p2p::topology::Topology;
use report::Target;

const ARCHIVE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/p2p/tests/fixtures/topology/dgx-a100.tar.gz");
/// Goal for reading the topology, in nanoseconds.
const GOAL: f64 = 20e6;

fn archive() -> tar::Archive<Cursor<Vec<u8>>> {
    let packed = fs::File::open(ARCHIVE).expect("the repository contains the recording");
    let mut tar = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut tar).expect("the recording is a gzip file");
    tar::Archive::new(Cursor::new(tar))
}

/// Adds the path of every regular file below a folder to `found`.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let entry = entry.expect("the entry is readable");
        let kind = entry.file_type().expect("the entry has a type");
        if kind.is_dir() {
            files(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

fn main() {
    let shared = Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let folder = parent.join(format!("hmem-bench-topology-{}", std::process::id()));
    archive().unpack(&folder).expect("unpack the recording");
    let mut all = Vec::new();
    files(&folder, &mut all);

    let read = |from: &Path| {
        black_box(Topology::open(from).expect("the recording is readable"));
    };
    let unpack = || {
        let mut archive = archive();
        let mut bytes = Vec::new();
        for entry in archive.entries_with_seek().expect("the recording is a tar archive") {
            let mut entry = entry.expect("the entry is readable");
            bytes.clear();
            entry.read_to_end(&mut bytes).expect("the entry's contents are readable");
            black_box(&bytes);
        }
    };
    let read_files = || {
        for file in &all {
            black_box(fs::read(file).expect("the file is readable"));
        }
    };
    report::print(vec![
        report::compare(
            "a DGX A100 from its archive / unpacking the archive",
            Target::Nanoseconds(GOAL),
            || read(Path::new(ARCHIVE)),
            unpack,
        ),
        report::compare(
            "a DGX A100 from a folder / reading the folder's files",
            Target::Nanoseconds(GOAL),
            || read(&folder),
            read_files,
        ),
    ]);
    fs::remove_dir_all(&folder).expect("remove the unpacked folder");
}
