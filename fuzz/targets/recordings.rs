//! Recorded topologies and the files in them, PCI configuration spaces among them.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    os::fd::AsRawFd,
    sync::LazyLock,
};

use flate2::read::GzDecoder;
use hmem::p2p::topology::{PciPath, Topology};
use rustix::fs::MemfdFlags;
use tar::{Archive, Builder, EntryType, Header};

use super::{Verdict, refusal};

/// The entries of an archive by path: the contents of a file, or the target of a link.
type Tree = BTreeMap<Vec<u8>, (EntryType, Vec<u8>)>;

/// Largest number of devices whose paths are computed, so that a large tree does not slow down the
/// fuzzer.
const DEVICES: usize = 6;

static LAPTOP: LazyLock<Tree> = LazyLock::new(|| {
    let packed = include_bytes!("../../p2p/tests/fixtures/topology/laptop.tar.gz");
    let mut archive = Archive::new(GzDecoder::new(&packed[..]));
    let entries = archive.entries().expect("an archive").map(|entry| {
        let mut entry = entry.expect("an entry");
        let (path, kind) = (entry.path_bytes().into_owned(), entry.header().entry_type());
        let mut content = entry.link_name_bytes().map(Cow::into_owned).unwrap_or_default();
        entry.read_to_end(&mut content).expect("its content");
        (path, (kind, content))
    });
    entries.collect()
});

/// Opens the bytes of an archive as a recording.
fn open(bytes: &[u8]) -> hmem::Result<Topology> {
    let fd = rustix::fs::memfd_create("recording", MemfdFlags::CLOEXEC).expect("a memory file");
    let mut file = File::from(fd);
    file.write_all(bytes).expect("a write");
    Topology::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Opens a tree as a recording.
fn open_tree(tree: &Tree) -> Verdict {
    let mut archive = Builder::new(Vec::new());
    for (path, (kind, content)) in tree {
        let mut header = Header::new_ustar();
        // Paths and links that no header can hold are left out.
        let name = &mut header.as_old_mut().name;
        let Some(place) = name.get_mut(..path.len()).filter(|_| !path.is_empty()) else { continue };
        place.copy_from_slice(path);
        header.set_entry_type(*kind);
        let content: &[u8] = if *kind == EntryType::Symlink {
            let Some(place) = header.as_old_mut().linkname.get_mut(..content.len()) else {
                continue;
            };
            place.copy_from_slice(content);
            &[]
        } else {
            content
        };
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, content).expect("a vector grows");
    }
    explore(&archive.into_inner().expect("a vector grows"))
}

/// Opens an archive, and uses what it holds.
fn explore(archive: &[u8]) -> Verdict {
    let topology = open(archive).map_err(refusal)?;
    let ids: Vec<_> = topology.devices().map(|device| device.bus_id).take(DEVICES).collect();
    for one in &ids {
        for other in &ids {
            let (there, back) = (topology.path(*one, *other), topology.path(*other, *one));
            let distance = |path: Option<PciPath>| path.map(|path| path.distance);
            assert_eq!(distance(there), distance(back), "{one} and {other}");
            let _findings = topology.findings(*one, *other, Some(1 << 30));
        }
        let _nics = topology.nearest_nics(*one);
        let _accelerators = topology.nearest_accelerators(*one);
    }
    let again = replay(&topology);
    // A tree that names its host is recorded without the name.
    if !names_host(archive) {
        assert_eq!(again, topology, "the recording of a recording");
    }
    assert_eq!(replay(&again), again, "the recording of a recording without a host name");
    Ok(())
}

/// Records a topology, and opens the recording.
fn replay(topology: &Topology) -> Topology {
    let mut recorded = Vec::new();
    topology.record(&mut recorded).expect("a vector grows");
    open(&recorded).expect("the recording of a recording")
}

/// Returns true if the archive may have a file with the host name of a machine.
fn names_host(archive: &[u8]) -> bool {
    let mut unpacked = Vec::new();
    // The contents of an archive that is not compressed are those of the archive itself.
    let contents = match GzDecoder::new(archive).read_to_end(&mut unpacked) {
        Ok(_) => &unpacked[..],
        Err(_) => archive,
    };
    const NAME: &[u8] = b"hostname";
    contents.windows(NAME.len()).any(|window| window == NAME)
}

/// The first byte selects: 0 opens the rest as an archive. Another number builds an archive from
/// the rest, on top of that of a laptop for an odd number. The rest then is entries that end with
/// two line feeds. The first line of an entry is its path, behind `@` for a link, and the other
/// lines are its content; a path behind `-` removes an entry.
pub(super) fn archives(data: &[u8]) -> Verdict {
    let (sort, rest) = data.split_first().unwrap_or((&0, &[]));
    if *sort == 0 {
        return explore(rest);
    }
    let mut tree = if sort % 2 == 1 { LAPTOP.clone() } else { Tree::new() };
    for entry in parts(rest, b"\n\n") {
        let (path, content) = parts(entry, b"\n").next().map_or((entry, &[][..]), |path| {
            (path, entry.get(path.len() + 1..).unwrap_or_default())
        });
        match path {
            [b'-', path @ ..] => drop(tree.remove(path)),
            [b'@', path @ ..] => {
                tree.insert(path.to_vec(), (EntryType::Symlink, content.to_vec()));
            }
            path => drop(tree.insert(path.to_vec(), (EntryType::Regular, content.to_vec()))),
        }
    }
    open_tree(&tree)
}

/// Splits bytes at each `end`.
fn parts<'a>(bytes: &'a [u8], end: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = Some(bytes);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let at = bytes.windows(end.len()).position(|window| window == end);
        rest = at.map(|at| &bytes[at + end.len()..]);
        Some(&bytes[..at.unwrap_or(bytes.len())])
    })
}

/// Reads the input as the configuration space of a bridge and of the device below it.
pub(super) fn config_spaces(data: &[u8]) -> Verdict {
    let mut tree = Tree::new();
    let mut add = |path: String, kind, content: &[u8]| {
        tree.insert(path.into_bytes(), (kind, content.to_vec()));
    };
    let root = "devices/pci0000:00/0000:00:01.0";
    for (id, folder, class) in [
        ("0000:00:01.0", root.to_owned(), "0x060400\n"),
        ("0000:01:00.0", format!("{root}/0000:01:00.0"), "0x030200\n"),
    ] {
        let target = format!("../../../{folder}");
        add(format!("sys/bus/pci/devices/{id}"), EntryType::Symlink, target.as_bytes());
        let files = [("class", class.as_bytes()), ("vendor", b"0x10de\n"), ("device", b"0x20b0\n")];
        for (name, content) in files.into_iter().chain([("config", data)]) {
            add(format!("sys/{folder}/{name}"), EntryType::Regular, content);
        }
    }
    open_tree(&tree)
}
