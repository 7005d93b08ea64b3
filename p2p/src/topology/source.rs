//! Sources of files: the machine itself, a folder with a copy of its sysfs and procfs, or an
//! archive of such a folder.
//!
//! Paths are relative to the root. [`Source::link`] computes the target of a link from the link's
//! text, and does not let the kernel follow the link. In a recording, a link in place of a file or
//! folder to be read is an error, so that the kernel follows no symbolic link below the root. A
//! recording thus cannot refer to files outside it, and a loop of links cannot block the reader.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use hmem_core::{Errno, Error, ErrorKind, Result};

/// Maximum size of a file in bytes. The largest real file, a kernel configuration, has a quarter of
/// this size.
pub(super) const LARGEST_FILE: u64 = 1 << 20;
/// Maximum number of names in a folder. No real PCI domain has this many functions.
const MOST_NAMES: usize = 1 << 16;

/// Entry of an archive: a file with its contents, or a symbolic link with its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SourceEntry {
    File(Vec<u8>),
    Link(String),
}

/// Source of the files of a machine: the running machine or a recording.
#[derive(Debug)]
pub(super) enum Source {
    /// A root folder. `live` is true for the running machine.
    Folder { root: PathBuf, live: bool },
    /// The entries of an unpacked archive, by path.
    Archive { name: String, entries: BTreeMap<String, SourceEntry> },
}

/// A file whose words are read one by one.
pub(super) enum Words<'a> {
    File(File),
    Bytes(&'a [u8]),
}

impl Words<'_> {
    /// Returns the little-endian 32-bit word at an offset; `None` past the end of the file, or if
    /// it cannot be read.
    pub(super) fn at(&self, offset: usize) -> Option<u32> {
        let mut word = [0; 4];
        match self {
            Self::File(file) => file.read_exact_at(&mut word, offset as u64).ok()?,
            Self::Bytes(bytes) => word.copy_from_slice(bytes.get(offset..offset + 4)?),
        }
        Some(u32::from_le_bytes(word))
    }
}

impl Source {
    /// Creates the source of the machine at `root`, which is live if `root` is `/`.
    pub(super) fn of_machine(root: &Path) -> Self {
        Self::Folder { root: root.to_owned(), live: root == Path::new("/") }
    }

    /// Returns the error for a malformed file at `path`. `problem` describes the defect.
    pub(super) fn malformed(&self, path: &str, problem: impl std::fmt::Display) -> Error {
        let error = Error::new(ErrorKind::Malformed, "read topology")
            .context("file", self.name(path))
            .context("why", format_args!("{}: {problem}", self.name(path)));
        match self {
            Self::Folder { live: true, .. } => error.remedy(
                "report this file with its content: the kernel's format is new to this version",
            ),
            _ => error
                .remedy("the recording is damaged: create it again with `hmem topo --record FILE`"),
        }
    }

    /// Reads and parses an optional file. Returns `None` if the file does not exist or is not
    /// readable, and the result of [`parsed_or_skipped`](Self::parsed_or_skipped) otherwise.
    pub(super) fn parsed<T>(
        &self,
        path: &str,
        parse: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        match self.text(path)? {
            Some(text) => self.parsed_or_skipped(path, parse(&text)),
            None => Ok(None),
        }
    }

    /// Returns the value `read`, parsed from the file at `path`. If the file is malformed:
    ///
    /// - A recording gives an error.
    /// - A live machine gives `None` and a log entry, as one malformed device must not hide all
    ///   others.
    pub(super) fn parsed_or_skipped<T>(
        &self,
        path: &str,
        read: std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        match read {
            Ok(read) => Ok(Some(read)),
            Err(problem) if self.is_live() => {
                tracing::warn!(file = self.name(path), problem, "a malformed value is left out");
                Ok(None)
            }
            Err(problem) => Err(self.malformed(path, problem)),
        }
    }

    /// Returns the error for a required file that does not exist.
    pub(super) fn vanished(&self, path: &str) -> Error {
        let error =
            Error::new(ErrorKind::Unavailable, "read topology").context("file", self.name(path));
        match self {
            Self::Folder { live: true, .. } => error
                .context(
                    "why",
                    format_args!("{} vanished while the tree was read", self.name(path)),
                )
                .remedy("run the command again: a device was being removed"),
            _ => error.context("why", format_args!("{} is missing", self.name(path))).remedy(
                "the recording is incomplete: create it again with `hmem topo --record FILE`",
            ),
        }
    }

    /// Returns the path of the root folder or archive, as the caller gave it.
    pub(super) fn root(&self) -> String {
        match self {
            Self::Folder { root, .. } => root.display().to_string(),
            Self::Archive { name, .. } => name.clone(),
        }
    }

    /// Returns the name of the file at `path` for errors.
    fn name(&self, path: &str) -> String {
        match self {
            Self::Folder { root, .. } => root.join(path).display().to_string(),
            Self::Archive { name, .. } => format!("{name}:{path}"),
        }
    }

    /// Reads the file at `path`. Returns `None` if the file does not exist or is not readable.
    pub(super) fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Folder { root, live } => {
                let found = below(root, path, *live).and_then(|path| read(&path, *live));
                found.map_err(|error| self.failed(path, &error))
            }
            Self::Archive { .. } => Ok(self.entry(path)?.map(<[u8]>::to_vec)),
        }
    }

    /// Opens the file at `path` for reads of single words. Returns `None` if the file does not
    /// exist or is not readable.
    pub(super) fn words(&self, path: &str) -> Result<Option<Words<'_>>> {
        match self {
            Self::Folder { root, live } => {
                let found = below(root, path, *live)
                    .and_then(|path| if_readable(open(&path, *live), *live));
                let file = found.map_err(|error| self.failed(path, &error))?;
                Ok(file.map(Words::File))
            }
            Self::Archive { .. } => Ok(self.entry(path)?.map(Words::Bytes)),
        }
    }

    /// Returns the contents of an archive's file; `None` if there is no such file, as in a folder.
    fn entry(&self, path: &str) -> Result<Option<&[u8]>> {
        let Self::Archive { entries, .. } = self else { return Ok(None) };
        match entries.get(path) {
            Some(SourceEntry::File(bytes)) => Ok(Some(bytes)),
            Some(SourceEntry::Link(_)) => Err(self.malformed(path, "a link in place of a file")),
            None => Ok(None),
        }
    }

    /// Returns the text of the file at `path` without white space at its end. Returns `None` if the
    /// file does not exist or is not readable.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text.trim_end().to_owned())),
            Err(_) => Err(self.malformed(path, "not text")),
        }
    }

    /// Returns the text of a required file. A missing or unreadable file is an error.
    pub(super) fn needed(&self, path: &str) -> Result<String> {
        self.text(path)?.ok_or_else(|| self.vanished(path))
    }

    /// Returns the target of the link at `path`, as a path from the root folder; `None` if there is
    /// no link.
    pub(super) fn link(&self, path: &str) -> Result<Option<String>> {
        let target = match self {
            Self::Folder { root, live } => match below(root, path, *live).and_then(fs::read_link) {
                Ok(target) => target
                    .into_os_string()
                    .into_string()
                    .map_err(|_| self.malformed(path, "a link whose target is not text"))?,
                // The kernel returns EINVAL if the file is not a link.
                Err(error) if gone(&error) || error.raw_os_error() == Some(libc::EINVAL) => {
                    return Ok(None);
                }
                Err(error) => return Err(self.failed(path, &error)),
            },
            Self::Archive { entries, .. } => match entries.get(path) {
                Some(SourceEntry::Link(target)) => target.clone(),
                _ => return Ok(None),
            },
        };
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        match resolve(folder, &target) {
            Some(resolved) => Ok(Some(resolved)),
            None => Err(self
                .malformed(path, format_args!("a link that leads out of the tree: {target:.200}"))),
        }
    }

    /// Returns the sorted names in the folder at `path`; `None` if the folder does not exist.
    pub(super) fn names(&self, path: &str) -> Result<Option<Vec<String>>> {
        let mut names = Vec::new();
        match self {
            Self::Folder { root, live } => {
                let folder = root.join(path);
                let read = check_folder(root, &folder, *live).and_then(|()| fs::read_dir(&folder));
                let folder = match read {
                    Ok(folder) => folder,
                    Err(error) if gone(&error) => return Ok(None),
                    Err(error) => return Err(self.failed(path, &error)),
                };
                for entry in folder {
                    let entry = entry.map_err(|error| self.failed(path, &error))?;
                    // Names that are not UTF-8 are left out. sysfs has none.
                    names.extend(entry.file_name().into_string());
                    if names.len() > MOST_NAMES {
                        return Err(
                            self.malformed(path, format_args!("more than {MOST_NAMES} names"))
                        );
                    }
                }
                names.sort();
            }
            Self::Archive { entries, .. } => {
                let prefix = format!("{path}/");
                for (name, _) in entries.range(prefix.clone()..) {
                    let Some(rest) = name.strip_prefix(&prefix) else { break };
                    let first = rest.split('/').next().unwrap_or(rest);
                    if names.last().is_none_or(|last| last != first) {
                        names.push(first.to_owned());
                    }
                }
                names.dedup();
                if names.is_empty() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(names))
    }

    /// Returns whether the source is the running machine.
    pub(super) fn is_live(&self) -> bool {
        matches!(self, Self::Folder { live: true, .. })
    }

    /// Returns the error for a failed read of the file at `path`. Its kind follows from the errno
    /// of `error`. An `error` without an errno comes from this module, and means that the file is
    /// malformed.
    fn failed(&self, path: &str, error: &io::Error) -> Error {
        if let Some(problem) = error.get_ref() {
            return self.malformed(path, problem);
        }
        Error::os(Errno::of(error), "read topology")
            .context("why", self.name(path))
            .context("file", self.name(path))
            .remedy("run the command as a user who may read the file")
    }
}

/// Returns true if the error means that the file does not exist, or that the device of the file was
/// removed.
fn gone(error: &io::Error) -> bool {
    let gone = [libc::ENOENT, libc::ENOTDIR, libc::ENODEV, libc::ENXIO];
    error.raw_os_error().is_some_and(|number| gone.contains(&number))
}

/// Returns an error for a recording (`live` is false) if `folder` is a link, or if a folder between
/// `root` and `folder` is one.
fn check_folder(root: &Path, folder: &Path, live: bool) -> io::Result<()> {
    let mut folders = folder.ancestors().take_while(|folder| *folder != root);
    if !live && folders.any(Path::is_symlink) {
        return Err(io::Error::other("a link in place of a folder"));
    }
    Ok(())
}

/// Returns the location of the file at `path` below `root`. Calls [`check_folder`] for its folder.
fn below(root: &Path, path: &str, live: bool) -> io::Result<PathBuf> {
    let file = root.join(path);
    check_folder(root, file.parent().unwrap_or(root), live)?;
    Ok(file)
}

fn open(path: &Path, live: bool) -> io::Result<File> {
    // A recording must not contain links to files, and a named pipe must not block the reader.
    let flags = if live { libc::O_NONBLOCK } else { libc::O_NONBLOCK | libc::O_NOFOLLOW };
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not an ordinary file"));
    }
    Ok(file)
}

/// Reads a file. Returns `None` if it does not exist or is not readable.
fn read(path: &Path, live: bool) -> io::Result<Option<Vec<u8>>> {
    let outcome = open(path, live).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(LARGEST_FILE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(io::Error::other(format!("larger than {LARGEST_FILE} bytes")));
        }
        Ok(bytes)
    });
    if_readable(outcome, live)
}

/// Returns `None` in place of the errors of a file that does not exist or is not readable.
fn if_readable<T>(outcome: io::Result<T>, live: bool) -> io::Result<Option<T>> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        Err(error) if gone(&error) => Ok(None),
        Err(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => Ok(None),
            Some(libc::ELOOP) => Err(io::Error::other("a link in place of a file")),
            // sysfs returns these errors for attributes that a device has but cannot report now.
            Some(libc::EIO | libc::EINVAL | libc::EOPNOTSUPP) if live => Ok(None),
            _ => Err(error),
        },
    }
}

/// Resolves a link target relative to `folder`, without reading the file system. Returns `None` if
/// the target is absolute or leads above the root.
pub(super) fn resolve(folder: &str, target: &str) -> Option<String> {
    if target.starts_with('/') || target.len() > 4096 {
        return None;
    }
    let mut parts: Vec<_> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_resolved_from_text_and_never_above_the_root() {
        let folder = "sys/bus/pci/devices";
        assert_eq!(
            resolve(folder, "../../../devices/pci0000:00").as_deref(),
            Some("sys/devices/pci0000:00")
        );
        assert_eq!(resolve(folder, "./x//y").as_deref(), Some("sys/bus/pci/devices/x/y"));
        assert_eq!(resolve(folder, "../../../../../etc"), None);
        assert_eq!(resolve(folder, "/etc/passwd"), None);
    }
}
