//! Collective operations over regions: a broadcast (`fi_broadcast`) made of messages.

use super::{Endpoint, RegionSlice};
use crate::{Access, Error, ErrorKind, MrMode, Result, transfer::PeerId};

impl Endpoint {
    /// This endpoint's part of a broadcast among its `members`, which all call it with the same
    /// tag: the root sends the bytes of `buffer` to every other member (one completion each,
    /// with `context`), the others receive them.
    ///
    /// `members` holds the other members as this endpoint resolved them; `root` is one of them, or
    /// `None` if this endpoint is the root. The buffer's region needs SEND at the root and RECV
    /// elsewhere, and in COLLECTIVE mode the COLLECTIVE right (`fi_mr(3)`).
    ///
    /// # Errors
    /// [`ErrorKind::AccessDenied`] for a region without COLLECTIVE in that mode;
    /// [`ErrorKind::InvalidArgument`] for a root that is no member; as [`Endpoint::post`]
    /// otherwise.
    pub fn broadcast(
        &self,
        buffer: RegionSlice,
        members: &[PeerId],
        root: Option<PeerId>,
        tag: u64,
        context: u64,
    ) -> Result<()> {
        let needs_right = self.domain().effective().contains(MrMode::COLLECTIVE);
        if needs_right && !buffer.access().contains(Access::COLLECTIVE) {
            return Err(Error::new(ErrorKind::AccessDenied, "broadcast")
                .context("access", buffer.access())
                .remedy("in COLLECTIVE mode register the buffer with the COLLECTIVE right"));
        }
        match root {
            Some(root) if members.contains(&root) => {
                self.receive(&[buffer], Some((tag, 0)), context)
            }
            Some(root) => Err(Error::new(ErrorKind::InvalidArgument, "broadcast")
                .context("root", root.0)
                .remedy("the root is one of the members")),
            None => members
                .iter()
                .try_for_each(|member| self.send(&[buffer], Some(tag), *member, context)),
        }
    }
}
