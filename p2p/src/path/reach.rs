//! Reach checks: a NIC reads and writes a page of device memory, to show that it reaches the device
//! over a path.
//!
//! Some machines register device memory for a NIC that cannot reach it, and only transfers fail. A
//! check first moves bytes between two pages of the host, and does so again if the transfers with
//! the device failed. So a NIC that cannot transfer at all is not taken for a device out of reach.
//! All transfers are between two endpoints of the domain.

#![allow(unsafe_code, reason = "registers a page of the host, and copies and transfers pages")]

use std::{mem::ManuallyDrop, sync::Arc, time::Duration};

use hmem_core::{
    Access, Address, AddressRange, Allocation, AllocationKind, AuthKey, DeviceId, Error, ErrorKind,
    Iface, IfaceExt, IfaceKind, Mapping, RemoteKey, Result,
    provider::{
        Backing, CompletionQueue, EndpointAttr, Nic, Piece, ProviderEndpoint, ProviderRegion,
        Registration, Transport, remote_key,
    },
    racing_copy,
    registration::RegisteredMemory,
    transfer::{LocalSegment, Operation, PeerId, WorkRequest},
};
use parking_lot::RwLock;
use rustix::mm::{MapFlags, ProtFlags};

use super::{
    probe::{Page, device_of, retry_once},
    search::{PathSearch, Reach},
    variant::PathVariant,
};

/// The longest wait for a transfer of one page. A reliable connection of verbs reports a peer that
/// does not answer after about four seconds.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The key of a stored result: a device, a NIC and a direct path.
#[derive(Debug)]
struct Place {
    iface: IfaceKind,
    device: Option<DeviceId>,
    nic: Nic,
    variant: PathVariant,
}

impl Place {
    fn is_of(&self, search: &PathSearch<'_>, variant: PathVariant) -> bool {
        let nic = &search.attr().nic;
        (self.iface, self.device, self.variant)
            == (search.owner.iface, search.owner.device, variant)
            && self.nic.name == nic.name
            && self.nic.provider == nic.provider
    }
}

/// The results of reach checks.
#[derive(Debug, Default)]
pub(super) struct ReachTable(RwLock<Vec<(Place, Reach)>>);

impl ReachTable {
    /// Returns the stored result for the device and NIC of `search` and the path `variant`.
    pub(super) fn get(&self, search: &PathSearch<'_>, variant: PathVariant) -> Option<Reach> {
        let results = self.0.read();
        let found = results.iter().find(|(place, _)| place.is_of(search, variant));
        found.map(|(_, reach)| reach.clone())
    }

    /// Stores a result, unless the check could not run.
    pub(super) fn store(&self, search: &PathSearch<'_>, variant: PathVariant, reach: &Reach) {
        if matches!(reach, Reach::Unchecked(_)) {
            return;
        }
        let nic = search.attr().nic.clone();
        let (iface, device) = (search.owner.iface, search.owner.device);
        let mut results = self.0.write();
        results.retain(|(place, _)| !place.is_of(search, variant));
        results.push((Place { iface, device, nic, variant }, reach.clone()));
    }

    pub(super) fn clear(&self) {
        self.0.write().clear();
    }
}

/// Checks that the NIC of `search` reads and writes a page of the device's memory over the direct
/// path `variant`.
///
/// The page is plain device memory: reach depends on the device, and not on the kind of its memory.
/// A device that the process does not use is not checked, because the first allocation would make
/// its driver create state that remains.
pub(super) fn check_reach(search: &PathSearch<'_>, variant: PathVariant) -> Reach {
    let span =
        tracing::debug_span!("check_reach", iface = %search.iface_name(), nic = %search.attr().nic);
    let _entered = span.enter();
    let reach = run(search, variant).unwrap_or_else(Reach::Unchecked);
    match &reach {
        Reach::Works => tracing::debug!(?variant, "the NIC reaches the device"),
        Reach::Fails(error) => tracing::warn!(error = %error.full(), "out of the NIC's reach"),
        Reach::Unchecked(error) => tracing::warn!(error = %error.full(), "no reach check"),
    }
    reach
}

/// Runs a check. An error means that the check could not run.
fn run(search: &PathSearch<'_>, variant: PathVariant) -> Result<Reach> {
    let refuse = |why: &'static str| {
        let nic = search.attr().nic.to_string();
        Error::new(ErrorKind::Unsupported, "check_reach").provider(nic).context("why", why)
    };
    let RegisteredMemory::Device { iface, .. } = &search.registration.memory else {
        return Err(refuse("the application supplied the dma-buf"));
    };
    if !iface.is_device_active(device_of(search))? {
        return Err(refuse("the process does not use the device by itself"));
    }
    let transport = search.provider.transport();
    let transport = transport.ok_or_else(|| refuse("the domain has no transfers"))?;
    let link = SelfLink::open_working(search, transport)?;
    let page = Page::allocate(search, iface, AllocationKind::Device)?;
    let reach = page.registered(variant, |page, region| link.check(iface, page, region))??;
    drop(link);
    if matches!(reach, Reach::Fails(_)) {
        // The NIC may have gone down in the middle of the check.
        SelfLink::open_working(search, transport)?;
    }
    Ok(reach)
}

/// The offsets of the two pages of host memory, in pages.
const SOURCE: u64 = 0;
const DESTINATION: u64 = 1;

/// Two connected endpoints of one domain, with two registered pages of host memory. Dropping the
/// value closes the endpoints and frees the pages.
struct SelfLink<'a> {
    search: &'a PathSearch<'a>,
    /// The length of a page in bytes.
    page: u64,
    /// The source page and the destination page of the host's transfer. If their region cannot be
    /// deregistered, the pages are leaked, because the NIC might still access them.
    memory: ManuallyDrop<Mapping>,
    region: ProviderRegion,
    ends: Vec<Arc<dyn ProviderEndpoint>>,
    queue: Arc<dyn CompletionQueue>,
    /// The second endpoint, as the first one resolved it.
    peer: PeerId,
}

impl<'a> SelfLink<'a> {
    /// Opens a link, and moves a page of host memory over it.
    ///
    /// # Errors
    /// The NIC cannot transfer at all.
    fn open_working(search: &'a PathSearch<'a>, transport: &dyn Transport) -> Result<Self> {
        let link = Self::open(search, transport)?;
        link.fill(SOURCE, 1);
        link.transfer(SOURCE, &link.key()?, link.page, true)?;
        link.expect(DESTINATION, 1)?;
        Ok(link)
    }

    fn open(search: &'a PathSearch<'a>, transport: &dyn Transport) -> Result<Self> {
        let page = rustix::param::page_size() as u64;
        let queue = transport.open_cq(8)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let memory = Mapping::anonymous(2 * page as usize, access, MapFlags::PRIVATE)
            .map_err(|errno| Error::os(errno, "mmap"))?;
        let range = AddressRange::new(Address(memory.as_ptr() as u64), 2 * page)?;
        let rights = Access::READ | Access::WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let (ranges, auth_key) = ([range], AuthKey::clone(search.registration.auth_key));
        let registration = Registration {
            memory: RegisteredMemory::Host { owned: true },
            addressing: search.registration.addressing,
            ..Registration::new(&ranges, rights, &auth_key)
        };
        let piece = Piece { range, backing: Backing::Host { owned: true } };
        // SAFETY: `memory` owns the pages, no reference to their bytes exists while a transfer is
        // in flight, and they stay mapped until the region is deregistered (`drop`). The mode and
        // the authorization key are those of the search.
        let region = unsafe { search.provider.register(&registration, &[piece]) }?;
        let memory = ManuallyDrop::new(memory);
        let (ends, peer) = (Vec::new(), PeerId(0));
        let mut link = Self { search, page, memory, region, ends, queue, peer };
        // From here on, an error drops `link`.
        let attr = EndpointAttr { depth: 2, ..EndpointAttr::new(&link.queue) };
        for _ in 0..2 {
            link.ends.push(transport.open_endpoint(&attr)?);
        }
        let names = [link.ends[0].name(), link.ends[1].name()];
        link.peer = link.ends[0].resolve(&names[1])?;
        link.ends[1].resolve(&names[0])?;
        Ok(link)
    }

    fn range(&self) -> AddressRange {
        let start = Address(self.memory.as_ptr() as u64);
        AddressRange::new(start, 2 * self.page).expect("a mapping does not wrap")
    }

    fn key(&self) -> Result<RemoteKey> {
        self.key_of(self.region, self.range())
    }

    fn key_of(&self, region: ProviderRegion, range: AddressRange) -> Result<RemoteKey> {
        let addressing = self.search.registration.addressing;
        remote_key(self.search.provider, region, addressing, &[range])
    }

    fn at(&self, page: u64) -> *mut u8 {
        self.memory.as_ptr().wrapping_add((page * self.page) as usize)
    }

    /// Fills a page with bytes that depend on `seed`.
    fn fill(&self, page: u64, seed: u8) {
        let bytes: Vec<u8> = (0..self.page).map(|at| pattern(at, seed)).collect();
        // SAFETY: the page lies in the mapping, to whose bytes no reference exists.
        unsafe { racing_copy(bytes.as_ptr(), self.at(page), bytes.len()) };
    }

    /// Returns an error if a page does not have the bytes of [`fill`](Self::fill).
    fn expect(&self, page: u64, seed: u8) -> Result<()> {
        let mut bytes = vec![0; self.page as usize];
        // SAFETY: the page lies in the mapping, to whose bytes no reference exists.
        unsafe { racing_copy(self.at(page), bytes.as_mut_ptr(), bytes.len()) };
        let wrong = bytes.iter().zip(0..).position(|(byte, at)| *byte != pattern(at, seed));
        let Some(at) = wrong else { return Ok(()) };
        Err(Error::new(ErrorKind::Unreachable, "compare").context("first wrong byte", at))
    }

    /// Transfers a page, and waits for the end of the transfer. If `write` is true, writes the host
    /// page `page` to the bytes of `key` from offset `at`. Otherwise reads these bytes into the
    /// host page.
    fn transfer(&self, page: u64, key: &RemoteKey, at: u64, write: bool) -> Result<()> {
        let remote = [key.slice(at, self.page)?];
        let operation = match write {
            true => Operation::Write { remote: &remote },
            false => Operation::Read { remote: &remote },
        };
        let address = Address(self.at(page) as u64);
        let local = [LocalSegment { address, len: self.page, desc: Some(self.region.local) }];
        let request = WorkRequest { operation, local: &local, peer: self.peer, context: 0 };
        // SAFETY: the segment has a descriptor.
        unsafe { self.ends[0].post(&request) }?;
        let mut done = Vec::new();
        if self.queue.wait(&mut done, 1, TIMEOUT)? == 0 {
            return Err(Error::new(ErrorKind::Unreachable, "transfer")
                .context("timeout", format_args!("{} s", TIMEOUT.as_secs())));
        }
        done.remove(0).result.map(drop)
    }

    /// Lets the NIC read and write a registered page of the device. An error means that a call of
    /// the iface failed, so that the check could not run.
    fn check(
        &self,
        iface: &Arc<dyn Iface>,
        page: &Allocation,
        region: ProviderRegion,
    ) -> Result<Reach> {
        let fails = |step: &'static str, error: Error| {
            let of_nic = Error::new(ErrorKind::Unreachable, "check_reach")
                .provider(self.search.attr().nic.to_string())
                .context("step", step)
                .caused_by(error);
            Ok(Reach::Fails(page.device.into_iter().fold(of_nic, Error::device)))
        };
        let key = self.key_of(region, page.range)?;
        let (device, host) = (page.range.start(), |page| Address(self.at(page) as u64));
        self.fill(SOURCE, 2);
        // SAFETY: both pages stay allocated, and no reference or transfer uses them.
        unsafe { iface.copy(device, host(SOURCE), self.page) }?;
        let read = self.transfer(DESTINATION, &key, 0, false);
        if let Err(error) = read.and_then(|()| self.expect(DESTINATION, 2)) {
            return fails("the NIC reads the device's memory", error);
        }
        self.fill(SOURCE, 3);
        if let Err(error) = self.transfer(SOURCE, &key, 0, true) {
            return fails("the NIC writes the device's memory", error);
        }
        if let (Some(flush), Some(device)) = (iface.inbound_flush(), page.device) {
            flush.flush(device)?;
        }
        // SAFETY: both pages stay allocated, and no reference or transfer uses them.
        unsafe { iface.copy(host(DESTINATION), device, self.page) }?;
        match self.expect(DESTINATION, 3) {
            Ok(()) => Ok(Reach::Works),
            Err(error) => fails("the NIC writes the device's memory", error),
        }
    }
}

/// Returns the byte at offset `at` of a page that was filled with `seed`.
const fn pattern(at: u64, seed: u8) -> u8 {
    (at ^ (at >> 8)) as u8 ^ seed.wrapping_mul(0x35)
}

impl Drop for SelfLink<'_> {
    fn drop(&mut self) {
        for end in &self.ends {
            if let Err(error) = end.close() {
                tracing::error!(error = %error.full(), "cannot close an endpoint of a reach check");
            }
        }
        match retry_once("deregister", || self.search.provider.deregister(self.region)) {
            // SAFETY: the value is not used again, and no NIC reaches the pages.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.memory) },
            Err(error) => {
                tracing::error!(error = %error.full(), "host pages of a reach check are leaked");
            }
        }
    }
}
