//! Archives of recordings: tar files, uncompressed or compressed with gzip.

use std::{
    collections::BTreeMap,
    io::{self, Cursor, Read, Write},
    path::{Component, Path},
};

use flate2::{Compression, GzBuilder, read::GzDecoder};
use hmem_core::{Errno, Error, ErrorKind, Result};
use tar::{EntryType, Header};

use super::source::{LARGEST_FILE, SourceEntry};

/// Decompresses a gzip file. Returns the first `limit` bytes if there are more. The result is never
/// `None`: builds without the feature `recordings` replace this function by one that returns
/// `None`.
pub(super) fn gunzip(packed: &[u8], limit: u64) -> Option<io::Result<Vec<u8>>> {
    let mut bytes = Vec::new();
    Some(GzDecoder::new(packed).take(limit).read_to_end(&mut bytes).map(|_| bytes))
}

/// Maximum size of an unpacked archive in bytes. A recording of a large server has less than one
/// hundredth of this.
const LARGEST_ARCHIVE: u64 = 64 << 20;
const MOST_ENTRIES: usize = 1 << 17;
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The two blocks of zeros at the end of a tar file. An archive without them was cut off.
const END: [u8; 1024] = [0; 1024];

fn damaged(name: &str, problem: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, "read topology")
        .context("file", name)
        .context("why", format_args!("{name}: {problem}"))
        .remedy("give a tar or tar.gz that hmem topo --record FILE made")
}

/// Unpacks the bytes of an archive and returns its entries by path. Errors contain `name`, the name
/// of the archive.
pub(super) fn unpack(name: &str, mut bytes: impl Read) -> Result<BTreeMap<String, SourceEntry>> {
    let mut start = Vec::new();
    let read = |start: &mut Vec<u8>, from: &mut dyn Read| {
        from.take(LARGEST_ARCHIVE + 1).read_to_end(start).map_err(|error| damaged(name, error))
    };
    read(&mut start, &mut bytes)?;
    let tar = if start.starts_with(&GZIP) {
        let mut tar = Vec::new();
        read(&mut tar, &mut GzDecoder::new(&start[..]))?;
        tar
    } else {
        start
    };
    if tar.len() as u64 > LARGEST_ARCHIVE {
        return Err(damaged(name, format_args!("more than {LARGEST_ARCHIVE} bytes")));
    }
    if !tar.ends_with(&END) {
        return Err(damaged(name, "not a tar archive, or cut off before its end"));
    }
    let mut entries = BTreeMap::new();
    // `entries_with_seek` skips the contents of entries by seeking. The method `entries` would skip
    // by reading, and zero a large buffer for each entry.
    let mut archive = tar::Archive::new(Cursor::new(&tar));
    for entry in archive.entries_with_seek().map_err(|error| damaged(name, error))? {
        let mut entry = entry.map_err(|error| damaged(name, error))?;
        let path = entry.path().map_err(|error| damaged(name, error))?;
        let path = relative(&path)
            .ok_or_else(|| damaged(name, format_args!("a path outside the archive: {path:?}")))?;
        let broken =
            |problem: &dyn std::fmt::Display| damaged(name, format_args!("{path}: {problem}"));
        let made = match entry.header().entry_type() {
            EntryType::Directory => continue,
            EntryType::Regular => {
                if entry.size() > LARGEST_FILE {
                    return Err(broken(&format_args!("larger than {LARGEST_FILE} bytes")));
                }
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).map_err(|error| broken(&error))?;
                SourceEntry::File(bytes)
            }
            EntryType::Symlink => {
                let target = entry.link_name().map_err(|error| broken(&error))?;
                let target = target.and_then(|target| target.to_str().map(str::to_owned));
                SourceEntry::Link(target.ok_or_else(|| broken(&"a link without a target"))?)
            }
            other => return Err(broken(&format_args!("not a file, folder or link: {other:?}"))),
        };
        entries.insert(path, made);
        if entries.len() > MOST_ENTRIES {
            return Err(damaged(name, format_args!("more than {MOST_ENTRIES} files")));
        }
    }
    Ok(below_top_folder(entries))
}

/// Returns a path as text, without a leading `/` and without `.`. Returns `None` if the path
/// contains `..` or is not UTF-8.
fn relative(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.join("/"))
}

/// Removes the top folder from all paths if it contains every entry and a folder `sys`.
fn below_top_folder(entries: BTreeMap<String, SourceEntry>) -> BTreeMap<String, SourceEntry> {
    let top = entries
        .keys()
        .next()
        .and_then(|path| path.split_once('/'))
        .map(|(top, _)| format!("{top}/"));
    let Some(top) = top else { return entries };
    let inner = format!("{top}sys/");
    let is_top = entries.keys().all(|path| path.starts_with(&top))
        && entries.keys().any(|path| path.starts_with(&inner));
    if top == "sys/" || !is_top {
        return entries;
    }
    entries.into_iter().map(|(path, entry)| (path[top.len()..].to_owned(), entry)).collect()
}

/// Packs entries into a gzip-compressed tar file. Equal entries give equal bytes: the archive holds
/// no times, owners or host names.
pub(super) fn pack(entries: &BTreeMap<String, SourceEntry>, out: impl Write) -> Result<()> {
    write(entries, out).map_err(|error| {
        Error::os(Errno::of(&error), "write recording")
            .caused_by(error)
            .remedy("write it to a file system with free space")
    })
}

fn write(entries: &BTreeMap<String, SourceEntry>, out: impl Write) -> io::Result<()> {
    let gzip = GzBuilder::new().mtime(0).write(out, Compression::best());
    let mut tar = tar::Builder::new(gzip);
    for (path, entry) in entries {
        let mut header = Header::new_ustar();
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        match entry {
            SourceEntry::File(bytes) => {
                header.set_entry_type(EntryType::Regular);
                header.set_mode(0o644);
                header.set_size(bytes.len() as u64);
                tar.append_data(&mut header, path, &bytes[..])?;
            }
            SourceEntry::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                header.set_size(0);
                tar.append_link(&mut header, path, target)?;
            }
        }
    }
    tar.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> BTreeMap<String, SourceEntry> {
        BTreeMap::from([
            ("proc/modules".into(), SourceEntry::File(b"nvidia 1 0 - Live 0x0\n".to_vec())),
            ("sys/a".into(), SourceEntry::Link("../proc/modules".into())),
            // This path is longer than the 100 bytes of the name field of a tar header.
            (format!("sys/{}x", "long/".repeat(60)), SourceEntry::File(vec![1, 2, 3])),
            ("sys/link".into(), SourceEntry::Link("long/".repeat(60))),
        ])
    }

    fn packed(entries: &BTreeMap<String, SourceEntry>) -> Vec<u8> {
        let mut bytes = Vec::new();
        pack(entries, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn archive_reads_back_and_is_reproducible() {
        let bytes = packed(&sample());
        assert_eq!(unpack("x", &bytes[..]).unwrap(), sample());
        assert_eq!(bytes, packed(&sample()));
    }

    #[test]
    fn single_top_folder_is_ignored() {
        let inside: BTreeMap<_, _> =
            sample().into_iter().map(|(path, entry)| (format!("machine/{path}"), entry)).collect();
        assert_eq!(unpack("x", &packed(&inside)[..]).unwrap(), sample());
    }

    #[test]
    fn archive_cut_off_anywhere_is_refused() {
        let whole = packed(&sample());
        let mut tar = Vec::new();
        GzDecoder::new(&whole[..]).read_to_end(&mut tar).unwrap();
        for len in 0..whole.len() {
            assert!(unpack("x", &whole[..len]).is_err(), "gzip cut at {len}");
        }
        for len in (0..tar.len() - END.len()).step_by(256) {
            let error = unpack("recording.tar", &tar[..len]).unwrap_err().to_string();
            assert!(error.contains("recording.tar") && error.contains("--record"), "{error}");
        }
    }

    #[test]
    fn archive_of_absurd_size_is_refused() {
        let mut gzip = GzBuilder::new().write(Vec::new(), Compression::fast());
        let zeros = vec![0; 1 << 20];
        for _ in 0..=LARGEST_ARCHIVE >> 20 {
            gzip.write_all(&zeros).unwrap();
        }
        let bomb = gzip.finish().unwrap();
        assert!(unpack("bomb", &bomb[..]).unwrap_err().to_string().contains("more than"));
        let large = BTreeMap::from([(
            "sys/x".into(),
            SourceEntry::File(vec![0; LARGEST_FILE as usize + 1]),
        )]);
        assert!(
            unpack("x", &packed(&large)[..]).unwrap_err().to_string().contains("sys/x: larger")
        );
    }

    proptest! {
        /// REL-03: unpacking an archive with altered bytes does not panic.
        #[test]
        fn archive_with_altered_bytes_does_not_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut tar = Vec::new();
            GzDecoder::new(&packed(&sample())[..]).read_to_end(&mut tar).unwrap();
            for (at, byte) in changes {
                let at = at.index(tar.len());
                tar[at] = byte;
            }
            let _ = unpack("x", &tar[..]);
        }

        /// REL-03: unpacking arbitrary bytes does not panic.
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let _ = unpack("x", &bytes[..]);
            let gzipped = [&GZIP[..], &bytes].concat();
            let _ = unpack("x", &gzipped[..]);
        }
    }
}
