//! The settings of a request, and the promise about its memory.

use std::{any::Any, borrow::Cow, fmt, sync::Arc};

use super::prefault::Prefault;
use crate::{
    Access, AuthKey, DeviceId, IfaceKind, MrFlags, SharedExports,
    registration::{Parallel, WriteOrdering},
};

/// A promise of the application about memory ([`Raw::new`](super::Raw::new)).
///
/// The memory is not freed, unmapped or used for another purpose while it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Promise {
    /// NICs and peers may read the memory. No Rust reference allows writes to it.
    ReadOnly,
    /// NICs and peers may read and write the memory. No Rust reference to it exists.
    ReadWrite,
    /// Like [`Promise::ReadWrite`], for the whole allocation that contains the memory. Permits
    /// registrations that cover more of the allocation ([`Growth`](super::Growth)).
    Allocation,
}

/// The settings of a request, without its memory.
#[derive(Clone)]
pub(super) struct Terms<'a> {
    pub(super) access: Access,
    pub(super) flags: MrFlags,
    /// The requested key. `None` if the provider chooses it.
    pub(super) key: Option<u64>,
    pub(super) context: u64,
    /// The authorization key. `None` or an empty key means the domain's key.
    pub(super) auth_key: Option<Cow<'a, AuthKey>>,
    /// The iface that the caller names as the owner. With `None` the domain queries its ifaces.
    pub(super) iface: Option<IfaceKind>,
    /// The device that the caller names as the owner. With `None` the domain queries its ifaces.
    pub(super) device: Option<DeviceId>,
    pub(super) page_size: usize,
    /// The write ordering. `None` means the domain's.
    pub(super) ordering: Option<WriteOrdering>,
    pub(super) prefault: Option<Prefault<'a>>,
    pub(super) parallel: Option<Parallel<'a>>,
    /// The dma-buf exports that requests share. This registration reuses exports of earlier
    /// requests, and adds its own.
    pub(super) exports: Option<SharedExports>,
    /// Settings that only one provider knows.
    pub(super) extension: Option<Arc<dyn Any + Send + Sync>>,
}

impl Terms<'_> {
    /// Creates settings with these rights, and with the default for everything else.
    pub(super) fn new(access: Access) -> Self {
        Self {
            access,
            flags: MrFlags::empty(),
            key: None,
            context: 0,
            auth_key: None,
            iface: None,
            device: None,
            page_size: 0,
            ordering: None,
            prefault: None,
            parallel: None,
            exports: None,
            extension: None,
        }
    }

    /// Returns true if all settings except the rights are the defaults.
    pub(super) fn is_plain(&self) -> bool {
        let Self {
            access: _,
            flags,
            key: None,
            context: 0,
            auth_key: None,
            iface: None,
            device: None,
            page_size: 0,
            ordering: None,
            prefault: None,
            parallel: None,
            exports: None,
            extension: None,
        } = self
        else {
            return false;
        };
        flags.is_empty()
    }

    /// Returns a copy that borrows nothing. The copy has no progress callbacks, because these must
    /// not outlive the call that passes them.
    pub(super) fn to_owned(&self) -> Terms<'static> {
        let Self {
            access,
            flags,
            key,
            context,
            auth_key,
            iface,
            device,
            page_size,
            ordering,
            prefault,
            parallel,
            exports,
            extension,
        } = self.clone();
        Terms {
            access,
            flags,
            key,
            context,
            auth_key: auth_key.map(|key| Cow::Owned(key.into_owned())),
            iface,
            device,
            page_size,
            ordering,
            prefault: prefault.map(|Prefault { threads, .. }| Prefault { threads, progress: None }),
            parallel: parallel.map(|Parallel { threads, chunk, .. }| Parallel {
                threads,
                chunk,
                progress: None,
            }),
            exports,
            extension,
        }
    }
}

impl fmt::Debug for Terms<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terms")
            .field("access", &self.access)
            .field("flags", &self.flags)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}
