//! Regions in use: how a transfer holds one, and how the last user is waited for.

#![allow(unsafe_code)]

use std::{
    fmt,
    ops::Deref,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{Error, ErrorKind, Result};

use super::{
    super::{
        keys::{KnownGeneration, Token},
        region::Body,
    },
    Refusal, Table,
    entry::{ENABLED, Entry, GENERATION_SHIFT, LIVE, REFRESHING, SINGLE_USE, SPENT, USERS},
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
        // SAFETY: this is a user of the entry (`hold_entry` or `refresh` added it, `drop` takes it
        // away), and bodies are written only where there are no users.
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

impl Table {
    /// Holds an entry for use.
    #[inline]
    pub(in super::super) fn hold(
        &self,
        index: u32,
        known: KnownGeneration,
        remote: bool,
    ) -> Result<Held<'_>, Refusal> {
        let entry = self.entry(index).ok_or(Refusal::Dead)?;
        self.hold_entry(entry, index, known, remote)
    }

    #[inline]
    fn hold_entry<'t>(
        &'t self,
        entry: &'t Entry,
        index: u32,
        known: KnownGeneration,
        remote: bool,
    ) -> Result<Held<'t>, Refusal> {
        let mut word = entry.life.load(Ordering::Relaxed);
        loop {
            let generation = (word >> GENERATION_SHIFT) as u32;
            if !known.matches(generation) || word & LIVE == 0 || (remote && word & SPENT != 0) {
                return Err(Refusal::Dead);
            }
            if word & ENABLED == 0 {
                return Err(Refusal::Disabled);
            }
            if word & REFRESHING != 0 {
                return Err(Refusal::Refreshing);
            }
            match entry.life.compare_exchange_weak(
                word,
                word + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    return Ok(Held { table: self, entry, token: Token { index, generation } });
                }
                Err(now) => word = now,
            }
        }
    }

    /// Holds the region of a requested key.
    pub(in super::super) fn hold_requested(
        &self,
        domain: u32,
        key: u64,
        remote: bool,
    ) -> Result<Held<'_>, Refusal> {
        let hash = self.hash(domain, key);
        let state = self.shards[Self::shard_of_hash(hash)].state.lock();
        let index = *state
            .requested
            .find(hash, |&i| self.requested_key(i) == (domain, key))
            .ok_or(Refusal::Dead)?;
        let entry = self.known(index);
        self.hold_entry(entry, index, KnownGeneration::Whole(entry.generation()), remote)
    }

    /// Turns new users away and waits for the present ones, until the returned guard is dropped.
    /// The guard is a user itself, so that the region stays.
    pub(in super::super) fn refresh(&self, domain: u32, token: Token) -> Result<Refreshing<'_>> {
        let entry =
            self.with_live(domain, token, "refresh", |_| ()).map(|()| self.known(token.index))?;
        let mut word = entry.life.load(Ordering::Relaxed);
        loop {
            if word >> GENERATION_SHIFT != u64::from(token.generation) || word & LIVE == 0 {
                return Err(Error::new(ErrorKind::NoRegion, "refresh").provider("loopback"));
            }
            if word & REFRESHING != 0 {
                return Err(Error::new(ErrorKind::Busy, "refresh")
                    .provider("loopback")
                    .remedy("another refresh of the region is under way"));
            }
            match entry.life.compare_exchange_weak(
                word,
                (word | REFRESHING) + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        let held = Held { table: self, entry, token };
        if entry.life.load(Ordering::Acquire) & USERS > 1 {
            let mut idle = self.idle.lock();
            while entry.life.load(Ordering::Acquire) & USERS > 1 {
                self.became_idle.wait(&mut idle);
            }
        }
        Ok(Refreshing { held })
    }

    /// Waits until an entry that admits no new users has none.
    pub(super) fn wait_unused(&self, life: &AtomicU64) {
        for _ in 0..200 {
            if life.load(Ordering::Acquire) & USERS == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut idle = self.idle.lock();
        while life.load(Ordering::Acquire) & USERS != 0 {
            self.became_idle.wait(&mut idle);
        }
    }

    #[cold]
    fn wake_waiters(&self) {
        let _idle = self.idle.lock();
        self.became_idle.notify_all();
    }
}
