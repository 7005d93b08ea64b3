//! A NIC: its attributes, its regions and its limits.

use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Error, ErrorKind, Result,
    provider::{NicState, ProviderAttr},
};
use parking_lot::Mutex;

use super::{atomic::AtomicLocks, config::Config, regions::Regions};

/// The size of a burst, as a time: after an idle period, a NIC with a bandwidth sends at once the
/// bytes that the bandwidth allows in this time.
const BURST: Duration = Duration::from_millis(10);

/// A software NIC, shared by its domains.
pub(super) struct Nic {
    pub(super) attr: ProviderAttr,
    pub(super) config: Config,
    pub(super) regions: Regions,
    pub(super) atomics: AtomicLocks,
    /// True while the device is lost. No domain can be opened meanwhile.
    lost: AtomicBool,
    /// True while the port is down. Requests from and to the NIC fail meanwhile.
    port_down: AtomicBool,
    /// The number of the domain that was opened last; 0 before the first.
    last_domain: AtomicU32,
    /// The number of live registrations that count toward `max_mr_count`. Always 0 if there is no
    /// such limit.
    registered: AtomicU64,
    /// The number of bytes in live registrations that count toward `max_pinned_bytes`. Always 0 if
    /// there is no such limit.
    pinned: AtomicU64,
    /// The simulated time at which the NIC has sent all bytes of the requests so far. Used only if
    /// the NIC has a bandwidth.
    sent_at: Mutex<Option<Instant>>,
}

impl Nic {
    pub(super) fn new(name: &str, pci_bus_id: Option<&str>, config: &Config) -> Self {
        let mut attr = config.attr.clone();
        attr.nic.name = name.to_owned();
        if let Some(id) = pci_bus_id {
            attr.nic.pci_bus_id = Some(id.to_owned());
        }
        let narrow = attr.key_size == 4;
        Self {
            attr,
            config: config.clone(),
            regions: Regions::new(narrow),
            atomics: AtomicLocks::default(),
            lost: AtomicBool::new(false),
            port_down: AtomicBool::new(false),
            last_domain: AtomicU32::new(0),
            registered: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            sent_at: Mutex::default(),
        }
    }

    /// Sets whether the device is lost and the port is down.
    pub(super) fn set_state(&self, state: NicState) {
        self.lost.store(state == NicState::Lost, Ordering::SeqCst);
        self.port_down.store(state == NicState::PortDown, Ordering::SeqCst);
    }

    /// Returns true while the device is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Returns true while the port is down.
    #[inline]
    pub(super) fn port_is_down(&self) -> bool {
        self.port_down.load(Ordering::Relaxed)
    }

    /// Sleeps until the NIC has sent `bytes` more bytes at its bandwidth, if it has one.
    #[inline]
    pub(super) fn pace(&self, bytes: u64) {
        if self.config.bandwidth > 0 {
            self.send_for(bytes);
        }
    }

    #[cold]
    fn send_for(&self, bytes: u64) {
        let takes = Duration::from_secs_f64(bytes as f64 / self.config.bandwidth as f64);
        let now = Instant::now();
        let mut sent_at = self.sent_at.lock();
        // A thread that sleeps too long sends its next bytes that much faster.
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let free = sent_at.map_or(now, |sent_at| sent_at.max(earliest));
        let end = free + takes;
        *sent_at = Some(end);
        drop(sent_at);
        thread::sleep(end.saturating_duration_since(now));
    }

    /// Returns the number of a new domain. Numbers are not reused.
    pub(super) fn number_domain(&self) -> u32 {
        self.last_domain.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts a registration of `bytes` bytes toward the NIC's limits.
    ///
    /// # Errors
    /// OutOfResources: the registration exceeds a limit.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Reservation<'_>> {
        if self.config.limit_regions {
            take(&self.registered, 1, self.attr.max_mr_count, "max_mr_count")?;
        }
        if let Some(limit) = self.config.max_pinned_bytes
            && let Err(error) = take(&self.pinned, bytes, limit, "max_pinned_bytes")
        {
            if self.config.limit_regions {
                self.registered.fetch_sub(1, Ordering::Relaxed);
            }
            return Err(error);
        }
        Ok(Reservation { nic: self, bytes })
    }

    /// Subtracts a registration of `bytes` bytes from the counts of [`Nic::reserve`].
    pub(super) fn release(&self, bytes: u64) {
        if self.config.limit_regions {
            self.registered.fetch_sub(1, Ordering::Relaxed);
        }
        if self.config.max_pinned_bytes.is_some() {
            self.pinned.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

/// A registration that counts toward the limits of its NIC. The drop of the value subtracts the
/// registration from the counts again, for example after the registration has failed.
pub(super) struct Reservation<'a> {
    nic: &'a Nic,
    bytes: u64,
}

impl Reservation<'_> {
    /// Consumes the value, so that the registration counts until [`Nic::release`].
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.nic.release(self.bytes);
    }
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic").field("attr", &self.attr).finish_non_exhaustive()
    }
}

fn take(used: &AtomicU64, more: u64, limit: u64, name: &'static str) -> Result<()> {
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
        now.checked_add(more).filter(|sum| *sum <= limit)
    })
    .map(|_| ())
    .map_err(|now| {
        Error::new(ErrorKind::OutOfResources, "register")
            .provider("loopback")
            .context("limit", name)
            .context("value", limit)
            .context("in use", now)
            .context("requested", more)
            .remedy("close regions, or raise the limit")
    })
}
