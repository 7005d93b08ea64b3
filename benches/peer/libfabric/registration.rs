//! Registration with libfabric: `fi_mr_regattr` followed by `fi_close` on a software provider.
//!
//! The software providers do not pin memory, so the benchmark measures libfabric's own work: two
//! allocations, two acquisitions of the domain's lock, and an insertion, a search and a removal in
//! a red-black tree of keys.

use std::ffi::{CStr, c_int};

use super::error::FabricError;
use super::info::{Hints, Info};
use super::objects::Object;
use super::{Libfabric, sys};

/// Length of each region that [`RegistrationPeer::populate`] registers, in bytes.
const POPULATED_LEN: usize = 4096;

/// Local address for the `tcp` provider. The benchmark transfers nothing over it.
const LOOPBACK: &CStr = c"127.0.0.1";

/// A software provider of libfabric. The benchmark registers memory with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationProvider {
    /// The `tcp` provider without a layer over it, which executes the least code of libfabric. In
    /// libfabric 1.17 it has connected endpoints only, but registration needs no endpoint.
    Tcp,
    /// The `ofi_rxm` provider layered over `tcp`, which adds unconnected endpoints. Each of its
    /// regions contains a region of `tcp`.
    TcpRxm,
    /// The `shm` provider, for shared memory.
    Shm,
}

impl RegistrationProvider {
    fn hints(self) -> Hints {
        let (provider, endpoint_type, source) = match self {
            Self::Tcp => ("tcp", sys::FI_EP_MSG, Some(LOOPBACK)),
            Self::TcpRxm => ("tcp;ofi_rxm", sys::FI_EP_RDM, Some(LOOPBACK)),
            Self::Shm => ("shm", sys::FI_EP_RDM, None),
        };
        Hints {
            provider,
            endpoint_type,
            caps: sys::FI_RMA
                | sys::FI_READ
                | sys::FI_WRITE
                | sys::FI_REMOTE_READ
                | sys::FI_REMOTE_WRITE,
            mr_mode: 0,
            message_order: 0,
            source,
        }
    }
}

/// The order in which [`RegistrationPeer::populate`] inserts its keys. The order determines the
/// shape and memory layout of libfabric's key tree, and so the cost of later registrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOrder {
    /// A fixed pseudo-random order. The tree becomes well balanced, so this order suits libfabric
    /// better.
    Shuffled,
    /// Ascending order. The branch of the highest keys becomes about twice as deep as in a balanced
    /// tree, and further ascending keys are always inserted there.
    Ascending,
}

impl KeyOrder {
    fn indices(self, count: usize) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..count).collect();
        if self == Self::Shuffled {
            // Fisher-Yates shuffle with xorshift64. The order is the same in every run.
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            for last in (1..count).rev() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                indices.swap(last, (state % (last as u64 + 1)) as usize);
            }
        }
        indices
    }
}

/// A libfabric domain that registers memory, and its live regions.
///
/// The first three fields are declared in the order in which libfabric requires them to be closed.
#[derive(Debug)]
pub(crate) struct RegistrationPeer {
    populated: Vec<Object<sys::fid_mr>>,
    domain: Object<sys::fid_domain>,
    fabric: Object<sys::fid_fabric>,
    /// Address range of the live regions. The memory is never accessed, so the kernel allocates no
    /// pages for it.
    backing: Vec<u8>,
    provider: String,
    mr_mode: c_int,
}

// SAFETY: libfabric objects are not tied to the thread that opened them.
unsafe impl Send for RegistrationPeer {}
// SAFETY: `Info` requests `FI_THREAD_SAFE`. So several threads may at once call `fi_mr_regattr` on
// the domain and `fi_close` on regions, which are the only libfabric calls through `&self`.
unsafe impl Sync for RegistrationPeer {}

impl RegistrationPeer {
    /// Access rights of a region for remote reads and writes.
    pub(crate) const REMOTE_ACCESS: u64 = sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE;

    /// Opens a fabric and a domain of `provider`.
    ///
    /// First requests no registration modes, so that offsets start at zero and the caller chooses
    /// keys. If no such provider exists, requests the modes of RDMA hardware (`FI_MR_VIRT_ADDR`,
    /// `FI_MR_ALLOCATED` and `FI_MR_PROV_KEY`).
    ///
    /// # Errors
    ///
    /// - [`FabricError::ProviderMissing`] if libfabric does not have the provider.
    /// - [`FabricError::Call`] if the fabric or the domain cannot be opened.
    pub(crate) fn open(
        libfabric: Libfabric,
        provider: RegistrationProvider,
    ) -> Result<Self, FabricError> {
        let hints = provider.hints();
        let info = match Info::find(libfabric, hints) {
            Err(FabricError::ProviderMissing { .. }) => Info::find(
                libfabric,
                Hints {
                    mr_mode: sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY,
                    ..hints
                },
            )?,
            found => found?,
        };
        let fabric = info.fabric()?;
        let domain = fabric.domain(&info)?;
        Ok(Self {
            populated: Vec::new(),
            domain,
            fabric,
            backing: Vec::new(),
            provider: info.provider(),
            mr_mode: info.mr_mode(),
        })
    }

    /// Returns the provider's name as libfabric reports it.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// Returns the registration modes that the provider requires, as bits of `fi_mr(3)`.
    pub(crate) fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    /// Registers `len` bytes at `buf` under `requested_key`, and closes the region. This is the
    /// measured operation. It does not access the bytes.
    ///
    /// # Errors
    ///
    /// [`FabricError::Call`] with `FI_ENOKEY` (266) if the key is in use. [`Self::vacant_key`]
    /// returns unused keys.
    #[inline]
    pub(crate) fn reg_close(
        &self,
        buf: *const u8,
        len: usize,
        access: u64,
        requested_key: u64,
    ) -> Result<(), FabricError> {
        self.domain.register(buf, len, access, requested_key, 0)?.close()
    }

    /// Closes the live regions, and registers `count` new ones of 4 KiB. Their keys are the even
    /// numbers from 2 on.
    ///
    /// # Errors
    ///
    /// - [`FabricError::OutOfMemory`] if there is no address space for the regions.
    /// - [`FabricError::Call`] if a region cannot be closed or registered. Regions that this call
    ///   has already registered stay live.
    pub(crate) fn populate(&mut self, count: usize, order: KeyOrder) -> Result<(), FabricError> {
        for region in self.populated.drain(..) {
            region.close()?;
        }
        let bytes = count.saturating_mul(POPULATED_LEN);
        let mut backing = Vec::new();
        backing.try_reserve_exact(bytes).map_err(|_| FabricError::OutOfMemory { bytes })?;
        self.backing = backing;
        self.populated.reserve(count);
        for index in order.indices(count) {
            let region = self.domain.register(
                self.backing.as_ptr().wrapping_add(index * POPULATED_LEN),
                POPULATED_LEN,
                Self::REMOTE_ACCESS,
                2 * (index as u64 + 1),
                0,
            )?;
            self.populated.push(region);
        }
        Ok(())
    }

    /// Returns the number of live regions that [`Self::populate`] registered.
    pub(crate) fn populated(&self) -> usize {
        self.populated.len()
    }

    /// Returns an odd key, which no live region has because their keys are even. Each `pick` from 0
    /// to [`Self::populated`] selects a different key, in ascending order. Larger values wrap
    /// around. Two threads must not use the same key at the same time.
    ///
    /// With many live regions, the time of a registration depends on the key. Repeated use of one
    /// key keeps its branch of libfabric's key tree in the processor's cache. Keys from the whole
    /// range do not.
    #[inline]
    pub(crate) fn vacant_key(&self, pick: u64) -> u64 {
        2 * (pick % (self.populated.len() as u64 + 1)) + 1
    }

    /// Closes the regions, the domain and the fabric.
    ///
    /// # Errors
    ///
    /// Returns the first error. Closes the remaining objects even then.
    pub(crate) fn close(self) -> Result<(), FabricError> {
        let mut result = Ok(());
        for region in self.populated {
            result = result.and(region.close());
        }
        result.and(self.domain.close()).and(self.fabric.close())
    }
}
