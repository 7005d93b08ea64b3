//! Reading a machine's wiring: the recording of a DGX A100, from its archive and from a folder.
//!
//! The limits that it is held against are unpacking the archive, and reading each of the folder's
//! files, without understanding them.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{
    fs,
    hint::black_box,
    io::{Cursor, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use criterion::Criterion;
use flate2::read::GzDecoder;
use hmem::p2p::topology::Topology;
use report::{Row, Target};

const GROUP: &str = "topology";
const ARCHIVE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/p2p/tests/fixtures/topology/dgx-a100.tar.gz");
/// Goal for reading such a machine, in nanoseconds.
const GOAL: f64 = 20e6;

fn archive() -> tar::Archive<Cursor<Vec<u8>>> {
    let packed = fs::File::open(ARCHIVE).expect("the repository has the recording");
    let mut tar = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut tar).expect("a gzip");
    tar::Archive::new(Cursor::new(tar))
}

/// Every file of a folder, by path; links are no files.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder that was just made") {
        let entry = entry.expect("an entry");
        let kind = entry.file_type().expect("a type");
        if kind.is_dir() {
            files(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

fn main() {
    report::forget(GROUP);
    let shared = Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let folder = parent.join(format!("hmem-bench-topology-{}", std::process::id()));
    archive().unpack(&folder).expect("there is room for a few small files");
    let mut all = Vec::new();
    files(&folder, &mut all);

    let mut criterion =
        Criterion::default().measurement_time(Duration::from_secs(3)).without_plots();
    let mut group = criterion.benchmark_group(GROUP);
    group.bench_function("archive", |bencher| {
        bencher.iter(|| Topology::open(ARCHIVE).expect("the recording reads"));
    });
    group.bench_function("limit_unpack", |bencher| {
        bencher.iter(|| {
            let mut archive = archive();
            let mut bytes = Vec::new();
            for entry in archive.entries_with_seek().expect("an archive") {
                let mut entry = entry.expect("an entry");
                bytes.clear();
                entry.read_to_end(&mut bytes).expect("its bytes");
                black_box(&bytes);
            }
        });
    });
    group.bench_function("folder", |bencher| {
        bencher.iter(|| Topology::open(&folder).expect("the folder reads"));
    });
    group.bench_function("limit_read_files", |bencher| {
        bencher
            .iter(|| all.iter().map(|file| fs::read(file).expect("a file").len()).sum::<usize>());
    });
    group.finish();
    report::print(&[
        Row {
            what: "a DGX A100 from its archive / unpacking the archive",
            ours: "topology/archive",
            other: "topology/limit_unpack",
            target: Target::Nanoseconds(GOAL),
        },
        Row {
            what: "a DGX A100 from a folder / reading the folder's files",
            ours: "topology/folder",
            other: "topology/limit_read_files",
            target: Target::Nanoseconds(GOAL),
        },
    ]);
    fs::remove_dir_all(&folder).expect("the folder is ours");
}
