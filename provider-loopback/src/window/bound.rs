//! One binding of a window, and those who use it.

use std::sync::{Arc, Weak};

use hmem_core::{Access, Addressing, Error, ErrorKind, Result, provider::WindowBind};
use parking_lot::{Condvar, Mutex};

use super::super::{
    domain::DomainState,
    endpoint::EndpointState,
    keys::Token,
    region::{AccessStart, Region},
};

/// One binding of a window.
#[derive(Debug)]
pub(super) struct Bound {
    domain: Weak<DomainState>,
    pub(super) region: Token,
    offset: u64,
    len: u64,
    pub(super) access: Access,
    addressing: Addressing,
    /// The endpoint to which a type 2 window is tied.
    pub(super) endpoint: Option<Tie>,
    standing: Mutex<Standing>,
    unused: Condvar,
}

#[derive(Debug)]
pub(super) struct Tie {
    pub(super) id: u64,
    /// Of a 2A window: the endpoint that cannot close meanwhile.
    pub(super) holds: Option<Weak<EndpointState>>,
}

#[derive(Debug, Default)]
struct Standing {
    dead: bool,
    users: usize,
}

impl Bound {
    pub(super) fn new(
        domain: Weak<DomainState>,
        region: Token,
        bind: &WindowBind,
        endpoint: Option<Tie>,
    ) -> Self {
        Self {
            domain,
            region,
            offset: bind.offset,
            len: bind.len,
            access: bind.access,
            addressing: bind.addressing,
            endpoint,
            standing: Mutex::default(),
            unused: Condvar::new(),
        }
    }

    /// Uses the binding, unless it has ended.
    pub(super) fn begin(self: &Arc<Self>) -> Option<BoundUse> {
        let mut standing = self.standing.lock();
        if standing.dead {
            return None;
        }
        standing.users += 1;
        Some(BoundUse { bound: Arc::clone(self) })
    }

    /// Ends the binding: no new users, and none left when this returns.
    pub(super) fn end(&self) {
        {
            let mut standing = self.standing.lock();
            standing.dead = true;
            while standing.users > 0 {
                self.unused.wait(&mut standing);
            }
        }
        if let Some(domain) = self.domain.upgrade() {
            domain.nic.regions.remove_dependent(domain.id, self.region);
        }
        if let Some(endpoint) =
            self.endpoint.as_ref().and_then(|tie| tie.holds.as_ref()).and_then(Weak::upgrade)
        {
            endpoint.unbind();
        }
    }
}

/// A binding in use by a transfer.
#[derive(Debug)]
pub(in super::super) struct BoundUse {
    bound: Arc<Bound>,
}

impl BoundUse {
    pub(super) fn bound(&self) -> &Bound {
        &self.bound
    }

    /// Where in the region an access through the window begins.
    pub(in super::super) fn access_start(
        &self,
        region: &Region,
        address: u64,
        len: u64,
    ) -> Result<AccessStart> {
        let bound = &self.bound;
        let offset = match bound.addressing {
            Addressing::ZeroBased => bound.offset.checked_add(address),
            Addressing::Virtual => region.offset_of(address, len),
        };
        offset
            .filter(|offset| {
                offset
                    .checked_sub(bound.offset)
                    .is_some_and(|skip| skip <= bound.len && len <= bound.len - skip)
            })
            .map(AccessStart::Offset)
            .ok_or_else(|| {
                Error::new(ErrorKind::OutOfBounds, "transfer")
                    .provider("loopback")
                    .context("address", format_args!("{address:#x}"))
                    .context("length", len)
                    .context("window", format_args!("{} bytes", bound.len))
                    .remedy("every byte of an access lies in the window that its key names")
            })
    }
}

impl Drop for BoundUse {
    fn drop(&mut self) {
        let mut standing = self.bound.standing.lock();
        standing.users -= 1;
        if standing.dead && standing.users == 0 {
            self.bound.unused.notify_all();
        }
    }
}
