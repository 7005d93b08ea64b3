//! Staged regions: device memory that the NIC cannot reach, copied through the domain's staging
//! buffers.
//!
//! The NIC knows the buffers only, registered once when the domain's first staged region is. A
//! request that names a staged region goes into a [`lane`] of its endpoint, which cuts it into
//! requests over buffers; its one completion comes when the last of them and the last copy ended.
//! Peers have no part in this: what their NICs do to memory, no one here is asked about, so that a
//! staged region gives no remote right and no remote key.

mod lane;
mod request;

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Address, AddressRange, Error, ErrorKind, LocalKey, Result,
    iface::CopyEvent,
    provider::{Backing, Piece, ProviderRegion, Registration, StagedMemory, StagingAttr},
};
use hmem_p2p::staging::Pool;
use parking_lot::Mutex;

pub(super) use self::lane::{Active, Lanes, Token};
use super::{
    VerbsOptions,
    domain::DomainState,
    region::{CpuAccess, Kind, Parts, Region},
    sys::AccessFlags,
};

/// A piece of a staged region, until it is closed.
#[derive(Debug)]
pub(super) struct StagedPiece {
    memory: Arc<dyn StagedMemory>,
    closed: AtomicBool,
}

impl StagedPiece {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn check(&self) -> Result<()> {
        if self.is_closed() { Err(region_closed()) } else { Ok(()) }
    }
}

fn region_closed() -> Error {
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
        // SAFETY: passed on to the caller.
        unsafe { self.memory.start_read(offset, into, len) }
    }

    unsafe fn start_write(
        &self,
        offset: u64,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        self.check()?;
        // SAFETY: passed on to the caller.
        unsafe { self.memory.start_write(offset, from, len) }
    }
}

/// The memory of a staged region.
#[derive(Debug)]
pub(super) struct StagedRegion {
    pieces: Vec<(AddressRange, Arc<StagedPiece>)>,
}

impl StagedRegion {
    /// Cuts a local segment into runs of one piece: the piece, where in it, bytes. `None` if it
    /// reaches outside.
    fn runs(
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

    /// Lets no copy begin any more.
    fn close(&self) {
        for (_, piece) in &self.pieces {
            piece.closed.store(true, Ordering::Release);
        }
    }
}

/// The staging of a domain.
#[derive(Debug)]
pub(super) struct Staging {
    attr: StagingAttr,
    buffers: Mutex<Option<(Arc<Pool>, LocalKey)>>,
    /// How many staged regions there are.
    regions: AtomicUsize,
}

impl Staging {
    pub(super) fn new(attr: StagingAttr) -> Self {
        Self { attr, buffers: Mutex::default(), regions: AtomicUsize::new(0) }
    }

    /// The buffers and their descriptor, once there are any.
    fn buffers(&self) -> Option<(Arc<Pool>, LocalKey)> {
        self.buffers.lock().clone()
    }

    pub(super) fn pool(&self) -> Option<Arc<Pool>> {
        self.buffers().map(|(pool, _)| pool)
    }

    fn has_regions(&self) -> bool {
        self.regions.load(Ordering::Acquire) > 0
    }
}

impl DomainState {
    fn refuse_staged(&self, why: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, "register")
            .provider(self.pd.device.nic().to_string())
            .context("path", "staged")
            .remedy(why)
    }

    /// Registers memory that is reached through copies.
    pub(super) fn register_staged(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
    ) -> Result<ProviderRegion> {
        let local = self.pd.device.provider_attr().staged_access;
        if !local.contains(request.access) {
            return Err(self
                .refuse_staged(
                    "a peer's NIC cannot reach memory through copies: ask for SEND, RECV, READ and WRITE only, and let \
                     this side write to the peer, read from it or exchange messages; or make a direct path work",
                )
                .context("access", request.access - local));
        }
        if !options.is_empty() {
            return Err(self
                .refuse_staged(
                    "staged memory is not registered with the NIC: ask for none of verbs' options",
                )
                .context("options", format_args!("{options:?}")));
        }
        let staged = |piece: &Piece<'_>| match &piece.backing {
            Backing::Staged(memory) => {
                let piece_memory =
                    StagedPiece { memory: Arc::clone(memory), closed: AtomicBool::new(false) };
                Ok((piece.range, Arc::new(piece_memory)))
            }
            _ => Err(self.refuse_staged("a region is staged as a whole or not at all")),
        };
        let pieces = pieces.iter().map(staged).collect::<Result<Vec<_>>>()?;
        self.prepare_buffers()?;
        self.staging.regions.fetch_add(1, Ordering::AcqRel);
        Ok(self.regions.insert(Region {
            access: request.access,
            flags: AccessFlags::empty(),
            options,
            cpu: CpuAccess::None,
            parts: Parts::new(),
            kind: Kind::Staged(Arc::new(StagedRegion { pieces })),
        }))
    }

    /// Allocates and registers the staging buffers, if they are not yet.
    fn prepare_buffers(&self) -> Result<()> {
        let mut buffers = self.staging.buffers.lock();
        if buffers.is_some() {
            return Ok(());
        }
        let pool = Pool::new(self.staging.attr, numa_node(&self.pd.device.nic().name))?;
        let region = self.registrar().register_buffers(pool.range()).map_err(|error| {
            error.context("for", "staging buffers").context("length", pool.range().len())
        })?;
        tracing::debug!(nic = %self.pd.device.nic(), bytes = pool.range().len(), "staging buffers registered");
        *buffers = Some((pool, region.local));
        Ok(())
    }

    /// Closes a staged region that was taken out: when this returns, no copy touches its memory and
    /// none will.
    pub(super) fn close_staged(&self, staged: &StagedRegion) {
        self.staging.regions.fetch_sub(1, Ordering::AcqRel);
        staged.close();
        self.pd.device.active().abandon_closed();
    }
}

/// The NUMA node that a device is on, where the kernel knows it.
fn numa_node(device: &str) -> Option<u32> {
    let text =
        fs::read_to_string(format!("/sys/class/infiniband/{device}/device/numa_node")).ok()?;
    // -1 is a machine that has none.
    text.trim().parse().ok()
}
