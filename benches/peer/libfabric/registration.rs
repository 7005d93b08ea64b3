//! Registration: `fi_mr_regattr` followed by `fi_close` on a software provider.
//!
//! The software providers pin nothing. The bench measures libfabric's own work: two allocations,
//! the domain's lock taken twice, and a red-black tree over keys into which the region is inserted,
//! in which it is searched for, and from which it is removed.

use std::ffi::{CStr, c_int};

use super::error::FabricError;
use super::info::{Hints, Info};
use super::objects::Object;
use super::{Libfabric, sys};

/// Length of each region that [`RegistrationPeer::populate`] keeps alive, in bytes.
const POPULATED_LEN: usize = 4096;

/// Address of the `tcp` family. Nothing is ever sent.
const LOOPBACK: &CStr = c"127.0.0.1";

/// The software provider whose domain registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationProvider {
    /// `tcp` itself: the shortest path through libfabric. In 1.17 it offers connected endpoints
    /// only, which makes no difference to its domain.
    Tcp,
    /// `tcp` under `ofi_rxm`, which is how 1.17 offers unconnected endpoints over `tcp`: each
    /// region is one of `tcp`'s wrapped in one of `ofi_rxm`'s.
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

/// The order in which [`RegistrationPeer::populate`] registers its keys. It decides the shape of
/// libfabric's tree and how it lies in memory, and so what each later registration costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOrder {
    /// A fixed pseudo-random order: the tree is as level as a red-black tree gets. Of the two this
    /// is the one that suits libfabric better.
    Shuffled,
    /// Ascending, as from a caller that counts: the branch of the highest keys is twice as deep as
    /// a level tree, and a caller that goes on counting always ends there.
    Ascending,
}

impl KeyOrder {
    fn indices(self, count: usize) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..count).collect();
        if self == Self::Shuffled {
            // Fisher-Yates over xorshift64, the same sequence in every run.
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

/// A domain that registers memory, and the regions kept alive in it.
///
/// The fields are in the order in which libfabric lets go of them.
#[derive(Debug)]
pub(crate) struct RegistrationPeer {
    populated: Vec<Object<sys::fid_mr>>,
    domain: Object<sys::fid_domain>,
    fabric: Object<sys::fid_fabric>,
    /// Addresses for the populated regions. Never read or written, so never backed by pages.
    backing: Vec<u8>,
    provider: String,
    mr_mode: c_int,
}

// SAFETY: libfabric objects are not tied to the thread that opened them.
unsafe impl Send for RegistrationPeer {}
// SAFETY: `Info` asks for `FI_THREAD_SAFE`, under which the calls made through `&self`,
// `fi_mr_regattr` and `fi_close` of a region, may be made from several threads at once.
unsafe impl Sync for RegistrationPeer {}

impl RegistrationPeer {
    /// Access rights of a region that a remote peer may read and write.
    pub(crate) const REMOTE_ACCESS: u64 = sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE;

    /// Opens a fabric and a domain of `provider`.
    ///
    /// Registration modes are asked for as 0: regions addressed from zero, keys chosen by the
    /// caller. A provider that refuses is asked again with the modes that hardware has.
    ///
    /// # Errors
    ///
    /// [`FabricError::ProviderMissing`] when the library was built without the provider,
    /// [`FabricError::Call`] when the fabric or the domain does not open.
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

    /// The provider's name as libfabric gives it.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// The registration modes that the provider demands; bits as in `fi_mr(3)`.
    pub(crate) fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    /// Registers `len` bytes at `buf` under `requested_key` and closes the region: the measured
    /// operation. The bytes are not touched.
    ///
    /// # Errors
    ///
    /// [`FabricError::Call`] with `FI_ENOKEY` (266) if the key is in use; see [`Self::vacant_key`].
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

    /// Closes the regions kept alive so far and registers `count` others, 4 KiB each, under the
    /// even keys from 2 on.
    ///
    /// # Errors
    ///
    /// [`FabricError::OutOfMemory`] when there is no address space for the regions,
    /// [`FabricError::Call`] when one is refused; those before it stay.
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

    /// Returns the number of regions that [`Self::populate`] keeps registered.
    pub(crate) fn populated(&self) -> usize {
        self.populated.len()
    }

    /// The `pick`-th key, counted from 0 and modulo their number, that no populated region has:
    /// below the lowest of theirs for 0, above the highest for `populated()`, between two
    /// otherwise. Two threads must not have the same one in use at once.
    ///
    /// With many regions alive the cost depends on the choice: one key over and over keeps its
    /// branch of the tree in the processor's cache, picks all over the range do not.
    #[inline]
    pub(crate) fn vacant_key(&self, pick: u64) -> u64 {
        2 * (pick % (self.populated.len() as u64 + 1)) + 1
    }

    /// Closes everything.
    ///
    /// # Errors
    ///
    /// The first refusal; what comes after it is still closed.
    pub(crate) fn close(self) -> Result<(), FabricError> {
        let mut result = Ok(());
        for region in self.populated {
            result = result.and(region.close());
        }
        result.and(self.domain.close()).and(self.fabric.close())
    }
}
