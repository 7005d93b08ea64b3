//! Arenas: memory files that hold the content of many allocations.
//!
//! An arena is one sealed memory file, mapped once for the copy engine. So a hundred thousand small
//! allocations need only a few fds and mappings. The file begins with a header, so no allocation
//! lies at offset 0 of the file. Code that confuses offsets in an allocation with offsets in the
//! file therefore fails in tests.
//!
//! An exported fd keeps the memory, as the fd of a dma-buf does. While any process has an exported
//! fd of the arena open or mapped, the arena does not reuse the memory of a freed allocation that
//! was exported. The kernel does not report the number of users of a memory file. But every
//! exported fd is a second open of the file, so a file lease shows if there is a user
//! ([`is_open_elsewhere`]).

#![allow(unsafe_code, reason = "atomic words in the device's mapping")]

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{Error, ErrorKind, Mapping, Result};

use super::{
    ranges::FreeRanges,
    sys::{is_open_elsewhere, punch_hole},
};
use crate::sys;

/// Size in bytes of the table of identities at the start of an arena. The table has one word
/// (*stamp*) for each allocation that was exported by an IPC handle.
const STAMP_BYTES: u64 = 32 << 10;

/// Number of extents in [`FileArena::quarantine`] at which the arena checks if their memory can be
/// reused: if no process has an exported fd of the file open or mapped. [`FileArena::probes`]
/// multiplies this number.
const QUARANTINE: usize = 256;

/// An arena's memory file, with the mapping through which the copy engine accesses it. Copies in
/// flight keep the value alive.
#[derive(Debug)]
pub(crate) struct ArenaFile {
    fd: OwnedFd,
    mapping: Mapping,
}

impl ArenaFile {
    /// Maps a whole memory file of `len` bytes.
    pub(crate) fn new(fd: OwnedFd, len: u64) -> Result<Self> {
        let mapping = sys::map_file(fd.as_fd(), len)?;
        Ok(Self { fd, mapping })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns a pointer to the byte at `offset` of the file.
    ///
    /// # Panics
    /// If `offset` is greater than the file's length.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        assert!(offset <= self.mapping.len() as u64, "the caller has checked the offset");
        self.mapping.as_ptr().wrapping_add(offset as usize)
    }

    /// Returns the allocation identity in word `slot` of the file's header, or 0 after the
    /// allocation was freed.
    pub(crate) fn stamp(&self, slot: u16) -> u64 {
        self.stamp_word(slot).map_or(0, |word| word.load(Ordering::Acquire))
    }

    pub(crate) fn set_stamp(&self, slot: u16, id: u64) {
        if let Some(word) = self.stamp_word(slot) {
            word.store(id, Ordering::Release);
        }
    }

    fn stamp_word(&self, slot: u16) -> Option<&AtomicU64> {
        let offset = u64::from(slot) * 8;
        if offset + 8 > STAMP_BYTES.min(self.mapping.len() as u64) {
            return None;
        }
        // SAFETY: the word lies in the mapping, which lives as long as `self`. It is aligned, since
        // mappings are page-aligned and 8 divides the offset. All processes access it atomically.
        Some(unsafe { AtomicU64::from_ptr(self.at(offset).cast()) })
    }
}

/// A range of a memory file that holds bytes of an allocation.
#[derive(Clone, Debug)]
pub(crate) struct FileExtent {
    /// Index of the arena in [`FileArenas`], or `None` for a memory file of another process.
    arena: Option<usize>,
    pub(crate) file: Arc<ArenaFile>,
    /// Offset of the extent in the memory file, in bytes.
    pub(crate) offset: u64,
    /// Length of the extent in bytes.
    pub(crate) len: u64,
}

impl FileExtent {
    /// Creates an extent of another process's file.
    pub(crate) fn foreign(file: Arc<ArenaFile>, offset: u64, len: u64) -> Self {
        Self { arena: None, file, offset, len }
    }

    /// Returns the extent of `len` bytes at `offset` in this extent.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Self {
        Self { offset: self.offset + offset, len, ..self.clone() }
    }
}

#[derive(Debug)]
struct FileArena {
    file: Arc<ArenaFile>,
    free: FreeRanges,
    /// The length for which the last unsuccessful search looked. Allocations of this length or more
    /// fail without a search. The value is `u64::MAX` if no search has failed since space was last
    /// freed.
    full_for: u64,
    /// Number of extents of this arena that are in use.
    live: usize,
    /// True if the arena was created for one extent and gets no others.
    dedicated: bool,
    /// Extents (offset, length) of freed allocations that another process may still access through
    /// an exported fd. They are not reused yet.
    quarantine: Vec<(u64, u64)>,
    /// True once an fd of the file was exported.
    exported: bool,
    /// A factor that makes checks of the quarantine rarer while they free nothing. Each check that
    /// finds an exported fd in use adds 1, and a successful check resets the factor to 1.
    ///
    /// A check is made when the quarantine has `QUARANTINE * probes` extents, when no extent of the
    /// arena is in use, or when the arena is full.
    probes: usize,
    /// Indices of words in the file's header that were in use and are free again.
    free_stamps: Vec<u16>,
    /// Number of words that were ever in use. These are the first words of the header.
    stamps_used: u16,
}

/// All arenas of one simulated iface.
#[derive(Debug)]
pub(crate) struct FileArenas {
    arenas: Vec<Option<FileArena>>,
    /// Index of the arena that the last allocation used. The search for free space begins there.
    current: usize,
    /// Number of arenas that were created so far.
    created: u64,
    page: u64,
    arena_len: u64,
}

impl FileArenas {
    pub(crate) fn new(page: u64, arena_len: u64) -> Self {
        Self { arenas: Vec::new(), current: 0, created: 0, page, arena_len }
    }

    /// Returns the number of arenas, each of which is one memory file.
    pub(crate) fn count(&self) -> usize {
        self.arenas.iter().flatten().count()
    }

    /// Allocates an extent of `len` bytes in an arena with enough space, or in a new arena. `len`
    /// is a multiple of the page size. If `dedicated` is set, or `len` is more than a quarter of
    /// the usual length of an arena, the extent gets an arena of its own.
    ///
    /// # Errors
    /// - The errors of creating a memory file for a new arena.
    /// - OutOfResources: the new arena has no room for the extent.
    pub(crate) fn take(&mut self, len: u64, dedicated: bool) -> Result<FileExtent> {
        let own = dedicated || len > self.arena_len / 4;
        if !own {
            let (first, count) = (self.current, self.arenas.len());
            let found = (0..count).find_map(|i| self.take_in((first + i) % count, len));
            if let Some(extent) = found {
                return Ok(extent);
            }
        }
        let number = self.create(if own { len } else { self.arena_len }, own)?;
        self.take_in(number, len)
            .ok_or_else(|| Error::new(ErrorKind::OutOfResources, "allocate").context("length", len))
    }

    /// Allocates an extent of `len` bytes in the arena with index `number`, or returns `None` if
    /// the arena has no free range of that length. A dedicated arena is full after its first
    /// extent.
    fn take_in(&mut self, number: usize, len: u64) -> Option<FileExtent> {
        let arena = self.arenas[number].as_mut()?;
        if len >= arena.full_for {
            arena.release_quarantine();
        }
        if len >= arena.full_for {
            return None;
        }
        let Some(offset) = arena.free.take_from(0, len) else {
            arena.full_for = len;
            return None;
        };
        if !arena.dedicated {
            self.current = number;
        }
        arena.live += 1;
        Some(FileExtent { arena: Some(number), file: Arc::clone(&arena.file), offset, len })
    }

    fn create(&mut self, room: u64, dedicated: bool) -> Result<usize> {
        // Headers of successive arenas differ in length, so that code that uses an offset with the
        // wrong arena fails.
        let stamps = STAMP_BYTES.next_multiple_of(self.page);
        let header = stamps + self.page * (1 + self.created % 3);
        let too_long = || {
            Error::new(ErrorKind::OutOfResources, "allocate")
                .context("length", room)
                .remedy("allocate less: a memory file cannot be that long")
        };
        let len =
            header.checked_add(room).filter(|len| *len < i64::MAX as u64).ok_or_else(too_long)?;
        let fd = sys::sealed_memfd("hmem-simulated", len)?;
        let arena = FileArena {
            file: Arc::new(ArenaFile::new(fd, len)?),
            free: FreeRanges::new(header, room),
            full_for: u64::MAX,
            live: 0,
            dedicated,
            quarantine: Vec::new(),
            exported: false,
            probes: 1,
            free_stamps: Vec::new(),
            stamps_used: 0,
        };
        self.created += 1;
        let vacant = self.arenas.iter().position(Option::is_none);
        let number = vacant.unwrap_or_else(|| {
            self.arenas.push(None);
            self.arenas.len() - 1
        });
        self.arenas[number] = Some(arena);
        Ok(number)
    }

    /// Records that an fd of the extent's memory file was exported.
    pub(crate) fn mark_exported(&mut self, extent: &FileExtent) {
        if let Some(arena) = self.arena_of(extent) {
            arena.exported = true;
        }
    }

    /// Allocates a word in the header of the extent's file, and returns its index. The caller
    /// stores the allocation's identity there, and processes that open the allocation verify the
    /// identity.
    pub(crate) fn take_stamp(&mut self, extent: &FileExtent) -> Result<u16> {
        let stamps = (STAMP_BYTES / 8) as u16;
        let full = || {
            Error::new(ErrorKind::OutOfResources, "ipc_export")
                .context("limit", stamps)
                .remedy("free allocations that other processes no longer need")
        };
        let arena = self.arena_of(extent).ok_or_else(full)?;
        if let Some(slot) = arena.free_stamps.pop() {
            return Ok(slot);
        }
        if arena.stamps_used == stamps {
            return Err(full());
        }
        arena.stamps_used += 1;
        Ok(arena.stamps_used - 1)
    }

    pub(crate) fn give_stamp(&mut self, extent: &FileExtent, slot: u16) {
        extent.file.set_stamp(slot, 0);
        if let Some(arena) = self.arena_of(extent) {
            arena.free_stamps.push(slot);
        }
    }

    /// Frees an extent. If `exported` is true, the space is reused only once no process has an
    /// exported fd of the arena open or mapped. If it is false, the space can be reused at once,
    /// and the caller has already freed the extent's pages.
    pub(crate) fn give(&mut self, extent: FileExtent, exported: bool) {
        let Some(number) = extent.arena else { return };
        let Some(arena) = self.arenas[number].as_mut() else { return };
        arena.live -= 1;
        if exported {
            arena.quarantine.push((extent.offset, extent.len));
        } else {
            arena.free.give(extent.offset, extent.len);
            arena.full_for = u64::MAX;
        }
        if arena.live == 0 || arena.quarantine.len() >= QUARANTINE * arena.probes {
            arena.release_quarantine();
        }
        // An empty arena is dropped. A process that still has its file open or mapped keeps the
        // memory, which no other allocation shares. The current arena stays, so that repeatedly
        // allocating and freeing creates no files.
        if arena.live == 0
            && (arena.dedicated || number != self.current || !arena.quarantine.is_empty())
        {
            self.arenas[number] = None;
        }
    }

    /// Returns true if any process, this one included, has an exported fd of one of these arenas
    /// open, or has a mapping made with such an fd.
    pub(crate) fn any_open_elsewhere(&self) -> bool {
        self.arenas
            .iter()
            .flatten()
            .any(|arena| arena.exported && is_open_elsewhere(arena.file.fd()))
    }

    fn arena_of(&mut self, extent: &FileExtent) -> Option<&mut FileArena> {
        self.arenas.get_mut(extent.arena?)?.as_mut()
    }
}

impl FileArena {
    /// Frees all extents in quarantine, unless a process still has an exported fd of the arena open
    /// or mapped.
    fn release_quarantine(&mut self) {
        if self.quarantine.is_empty() {
            return;
        }
        if is_open_elsewhere(self.file.fd()) {
            self.probes += 1;
            return;
        }
        self.probes = 1;
        for (offset, len) in self.quarantine.drain(..) {
            if let Err(errno) = punch_hole(self.file.fd(), offset, len) {
                tracing::warn!(%errno, offset, len, "freed pages stay in memory");
            }
            self.free.give(offset, len);
        }
        self.full_for = u64::MAX;
    }
}
