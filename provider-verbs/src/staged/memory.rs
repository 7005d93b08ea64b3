//! The memory of staged regions.

#![allow(unsafe_code, reason = "copies staged memory by address")]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use hmem_core::{
    Address, AddressRange, Error, ErrorKind, Result, iface::CopyEvent, provider::StagedMemory,
};

/// A piece of a staged region's memory. New copies fail once the region is closed.
#[derive(Debug)]
pub(crate) struct StagedPiece {
    memory: Arc<dyn StagedMemory>,
    closed: AtomicBool,
}

impl StagedPiece {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn check(&self) -> Result<()> {
        if self.is_closed() { Err(region_closed()) } else { Ok(()) }
    }
}

pub(super) fn region_closed() -> Error {
    Error::new(ErrorKind::NoRegion, "staged copy")
        .provider("verbs")
        .remedy("keep the region of a descriptor open until the transfer completes")
}

impl StagedMemory for StagedPiece {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.check()?;
        self.memory.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.check()?;
        self.memory.write(offset, from)
    }

    unsafe fn start_read(
        &self,
        offset: u64,
        into: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        self.check()?;
        // SAFETY: this function has the contract of the call, and the caller follows it.
        unsafe { self.memory.start_read(offset, into, len) }
    }

    unsafe fn start_write(
        &self,
        offset: u64,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        self.check()?;
        // SAFETY: this function has the contract of the call, and the caller follows it.
        unsafe { self.memory.start_write(offset, from, len) }
    }
}

/// The memory of a staged region, in pieces.
#[derive(Debug)]
pub(crate) struct StagedRegion {
    pieces: Vec<(AddressRange, Arc<StagedPiece>)>,
}

impl StagedRegion {
    pub(super) fn new(pieces: impl Iterator<Item = (AddressRange, Arc<dyn StagedMemory>)>) -> Self {
        let piece = |(range, memory)| {
            (range, Arc::new(StagedPiece { memory, closed: AtomicBool::new(false) }))
        };
        Self { pieces: pieces.map(piece).collect() }
    }

    /// Splits `left` bytes from `address` on where a piece ends. Each run is a piece, an offset in
    /// the piece, and a length. Returns `None` if the region does not contain all of the bytes.
    pub(super) fn runs(
        &self,
        mut address: Address,
        mut left: u64,
    ) -> Option<Vec<(Arc<StagedPiece>, u64, u64)>> {
        let mut runs = Vec::new();
        while left > 0 {
            let (range, piece) = self.pieces.iter().find(|(range, _)| range.contains(address))?;
            let into = address.0 - range.start().0;
            let len = left.min(range.len() - into);
            runs.push((Arc::clone(piece), into, len));
            left -= len;
            address = Address(address.0.wrapping_add(len));
        }
        Some(runs)
    }

    /// Closes the region, so that no new copy starts.
    pub(crate) fn close(&self) {
        for (_, piece) in &self.pieces {
            piece.closed.store(true, Ordering::Release);
        }
    }
}
