//! What posted requests do to windows: the bind of type 2, and the invalidation that comes with a
//! message.

use std::sync::Arc;

use hmem_core::{
    Error, ErrorKind, Result,
    provider::{WindowBind, WindowType},
};

use super::{
    super::{
        endpoint::EndpointState,
        post::{BindTask, KeyUse},
        region::Refusal,
    },
    Window,
    bound::Tie,
    freed,
};

impl EndpointState {
    /// Binds a type 2 window.
    pub(in super::super) fn bind_posted(self: &Arc<Self>, task: &BindTask) -> Result<()> {
        let domain = &self.domain;
        let window = domain.windows.find(task.window, "bind window")?;
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "bind window").provider("loopback").remedy(remedy))
        };
        if window.kind == WindowType::One {
            return refuse(ErrorKind::BadState, "a type 1 window is bound by a call");
        }
        if task.len == 0 {
            return refuse(
                ErrorKind::ZeroLength,
                "a type 2 window has at least one byte; invalidate it to unbind",
            );
        }
        let holds = (window.kind == WindowType::TwoA).then(|| Arc::downgrade(self));
        if holds.is_some() {
            self.bind()?;
        }
        let bind = WindowBind {
            region: task.region,
            offset: task.offset,
            len: task.len,
            access: task.access,
            addressing: task.addressing,
        };
        let holding = holds.is_some();
        let new = match domain.new_bound(&bind, "bind window", Some(Tie { id: self.id, holds })) {
            Ok(new) => new,
            Err(error) => {
                if holding {
                    self.unbind();
                }
                return Err(error);
            }
        };
        let refused = {
            let mut state = window.state.lock();
            if state.freed {
                Some(freed("bind window"))
            } else if state.bound.is_some() {
                Some(
                    Error::new(ErrorKind::BadState, "bind window")
                        .provider("loopback")
                        .remedy("invalidate the key of a type 2 window before binding it again"),
                )
            } else {
                state.tag = task.tag;
                state.bound = Some(Arc::clone(&new));
                None
            }
        };
        match refused {
            None => Ok(()),
            Some(error) => {
                new.end();
                Err(error)
            }
        }
    }

    /// The window whose key a message with invalidate names, if this endpoint may invalidate it.
    pub(in super::super) fn window_to_invalidate(&self, key: KeyUse) -> Result<Arc<Window>> {
        let dead = || Refusal::Dead.of_key();
        // A mapped key is a number of the sender's domain: no window has one.
        if key.mapped {
            return Err(dead());
        }
        let number = key.number;
        let window = self
            .domain
            .windows
            .index
            .read()
            .by_prefix
            .get(&(number >> 8))
            .map(Arc::clone)
            .ok_or_else(dead)?;
        if window.kind == WindowType::One {
            return Err(not_invalidated());
        }
        {
            let state = window.state.lock();
            if state.key() != number || state.freed {
                return Err(dead());
            }
            let tie = state.bound.as_ref().and_then(|bound| bound.endpoint.as_ref());
            if tie.is_some_and(|tie| tie.id != self.id) {
                return Err(Error::new(ErrorKind::AccessDenied, "send")
                    .provider("loopback")
                    .context("why", "the window is bound to another endpoint"));
            }
        }
        Ok(window)
    }
}

#[cold]
pub(super) fn not_invalidated() -> Error {
    Error::new(ErrorKind::BadState, "invalidate window")
        .provider("loopback")
        .remedy("only type 2 windows are invalidated; bind a type 1 window anew to kill its key")
}
