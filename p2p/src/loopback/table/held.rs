//! Regions in use.

#![allow(unsafe_code)]

use std::{fmt, ops::Deref, sync::atomic::Ordering};

use super::{
    super::{keys::Token, region::Body},
    Table,
    entry::{Entry, LIVE, REFRESHING, SINGLE_USE, SPENT},
};

/// A region that cannot be emptied while this is held.
pub(in super::super) struct Held<'t> {
    pub(super) table: &'t Table,
    pub(super) entry: &'t Entry,
    pub(in super::super) token: Token,
}

impl Held<'_> {
    #[inline]
    pub(in super::super) fn domain(&self) -> u32 {
        self.entry.domain.load(Ordering::Relaxed)
    }

    /// Uses up the key, if it is good for one use only; false if somebody else was first.
    #[inline]
    pub(in super::super) fn spend(&self) -> bool {
        self.entry.life.load(Ordering::Relaxed) & SINGLE_USE == 0
            || self.entry.life.fetch_or(SPENT, Ordering::AcqRel) & SPENT == 0
    }
}

impl Deref for Held<'_> {
    type Target = Body;

    #[inline]
    fn deref(&self) -> &Body {
        // SAFETY: this is a user of the entry (`hold_entry` or `refresh` added it, `drop` takes it away), and bodies
        // are written only where there are no users.
        unsafe { &*self.entry.body.get() }
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        let before = self.entry.life.fetch_sub(1, Ordering::Release);
        if before & (LIVE | REFRESHING) != LIVE {
            self.table.wake_waiters();
        }
    }
}

impl fmt::Debug for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.token).finish()
    }
}

/// A region whose users are gone and that takes no new ones until this is dropped.
pub(in super::super) struct Refreshing<'t> {
    pub(super) held: Held<'t>,
}

impl Deref for Refreshing<'_> {
    type Target = Body;

    fn deref(&self) -> &Body {
        &self.held
    }
}

impl Drop for Refreshing<'_> {
    fn drop(&mut self) {
        self.held.entry.life.fetch_and(!REFRESHING, Ordering::Release);
    }
}
