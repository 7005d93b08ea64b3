//! The link of a test case.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use hmem_core::{
    Access, AddressRange, AuthKey, BindFlags, Domain, DomainAttr, ErrorKind, Iface, MemoryRegion,
    MrFlags, Registry, RemoteKey, Result, counter::Counter, fabric, testing::Gate,
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::DefaultPathSelector;

use super::case::{Case, TestMemory};
use crate::{
    bytes::assert_bytes,
    control::Call,
    link::{Bytes, Link, LinkSide, REMOTE, mr_attr},
    trial::{Outcome, skip},
};

/// Settings of a [`CaseLink`]. A test may change them before it opens the link.
pub(super) struct Setup {
    case: Case,
    pub(super) target: DomainAttr,
    pub(super) initiator: DomainAttr,
    /// True if the target's endpoint has the RMA_EVENT capability.
    pub(super) rma_event: bool,
    /// The authorization key of the initiator's endpoint. `None` means the domain's key.
    pub(super) initiator_key: Option<AuthKey>,
}

impl Setup {
    pub(super) fn of(case: &Case) -> Self {
        let (mr_mode, p2p) = (case.attr.required_mr_mode, case.policy());
        let attr = DomainAttr { mr_mode, p2p, ..DomainAttr::default() };
        let (target, initiator) = (attr.clone(), attr);
        Self { case: case.clone(), target, initiator, rma_event: true, initiator_key: None }
    }

    pub(super) fn open(self) -> CaseLink {
        self.try_open().expect("open two domains with an endpoint each")
    }

    /// Opens both domains on the provider's first NIC.
    ///
    /// # Errors
    /// The errors of a domain or an endpoint that cannot be opened.
    pub(super) fn try_open(self) -> Result<CaseLink> {
        let device = Arc::new(Simulated::builder().build().expect("a simulated device"));
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("add host memory");
        registry.add(Arc::<Simulated>::clone(&device)).expect("add the device");
        let registry = Arc::new(registry);
        let case = self.case;
        let open = |attr, rma_event, key| -> Result<LinkSide> {
            let selector = Arc::new(DefaultPathSelector::new());
            let domain = Domain::open(&*case.provider, Arc::clone(&registry), selector, attr)?;
            let side = LinkSide::open(domain, rma_event, key)?;
            Ok(if case.memory == TestMemory::OwnedHost { side.owning() } else { side })
        };
        let target = open(self.target, self.rma_event, None)?;
        let initiator = open(self.initiator, true, self.initiator_key)?;
        let memory = (!case.is_host()).then(|| Arc::<Simulated>::clone(&device) as Arc<dyn Iface>);
        let link = Link::connect(initiator, target, memory, case.control.is_none());
        Ok(CaseLink { link, device, case })
    }
}

/// A link of a test case.
pub(super) struct CaseLink {
    pub(super) link: Link,
    /// A simulated device whose memory both domains can register.
    pub(super) device: Arc<Simulated>,
    pub(super) case: Case,
}

impl Deref for CaseLink {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl DerefMut for CaseLink {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

/// A guard that sets a flag on drop, so that the thread of [`CaseLink::driven`] ends after a panic
/// of the test too.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl CaseLink {
    pub(super) fn open(case: &Case) -> Self {
        Setup::of(case).open()
    }

    /// Returns the initiator and the target, as [`Link::into_sides`] does.
    pub(super) fn into_sides(self) -> [LinkSide; 2] {
        self.link.into_sides()
    }

    /// Runs `test`. If the NIC makes progress only by calls on both sides, another thread calls the
    /// progress of the target's domain meanwhile.
    pub(super) fn driven(&self, test: impl FnOnce()) {
        let (target, done) = (&self.target.domain, AtomicBool::new(false));
        let by_hand = self.case.by_hand() && self.case.control.is_none();
        thread::scope(|scope| {
            // Ends the thread after a failure too.
            let _end = Ending(&done);
            if by_hand && target.provider_domain().manual_progress().is_some() {
                scope.spawn(|| {
                    while !done.load(Ordering::Acquire) {
                        target.progress().expect("progress");
                        thread::yield_now();
                    }
                });
            }
            test();
        });
    }

    /// Makes the next call of this kind wait at the returned gate.
    pub(super) fn hold(&self, call: Call) -> Gate {
        let control = self.case.control.as_ref().expect("the behaviour needs control");
        control.hold(call).expect("the back end holds calls")
    }

    /// Returns the number of calls of this kind.
    pub(super) fn calls(&self, call: Call) -> u64 {
        let control = self.case.control.as_ref().expect("the behaviour needs control");
        control.calls(call).expect("the back end counts calls")
    }

    /// Binds a new counter of remote writes to a region of this domain that was registered with
    /// RMA_EVENT. Binds and enables the region if the mode requires it.
    pub(super) fn count(&self, region: &MemoryRegion) -> Arc<Counter> {
        let counter = Arc::new(Counter::new());
        region.bind_counter(&counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
        self.target.make_usable(region);
        counter
    }

    /// Registers a range with a counter of remote writes in the target's domain.
    pub(super) fn counted(
        &self,
        range: AddressRange,
        access: Access,
    ) -> (MemoryRegion, Arc<Counter>) {
        let ranges = [range];
        let attr = mr_attr(&ranges, access).key(self.fresh_key());
        let region = fabric::regattr(&self.target.domain, &attr, MrFlags::RMA_EVENT);
        let region = region.expect("register");
        let counter = self.count(&region);
        (region, counter)
    }

    /// Returns the outcome that skips a behaviour if the NIC has no atomics.
    pub(super) fn need_atomics(&self) -> Outcome {
        let memory = self.bytes(8);
        let region = self.expose(memory.range(), REMOTE);
        match self.fetch_add(&self.key(&region), 0, 1) {
            Err(why) if why.kind() == ErrorKind::Unsupported => skip(why.to_string()),
            added => {
                added.expect("atomic");
                Ok(())
            }
        }
    }

    /// Asserts that a revoked key gives no access, and that refused accesses leave the memory as it
    /// is.
    #[track_caller]
    pub(super) fn assert_revoked(&self, key: &RemoteKey, memory: &Bytes) {
        let before = memory.all();
        self.assert_dead(key, 0, ErrorKind::InvalidKey, "an access with a revoked key");
        assert_bytes(&memory.all(), &before, "memory after refused accesses");
    }

    /// Opens a link of domains with the authorization key `ours`. The endpoint of the initiator has
    /// the key `initiators`.
    pub(super) fn with_auth_keys(case: &Case, ours: &AuthKey, initiators: &AuthKey) -> Self {
        let mut setup = Setup::of(case);
        (setup.target.auth_key, setup.initiator.auth_key) = (ours.clone(), ours.clone());
        setup.initiator_key = Some(initiators.clone());
        setup.open()
    }

    /// Opens a link whose target has an endpoint without the capability RMA_EVENT.
    pub(super) fn without_rma_event(case: &Case) -> Self {
        let mut setup = Setup::of(case);
        setup.rma_event = false;
        setup.open()
    }

    /// Asserts that a write with the key of a counted region or window is refused, changes no byte
    /// and is not counted, because the target's endpoint lacks RMA_EVENT.
    #[track_caller]
    pub(super) fn assert_needs_rma_event(&self, key: &RemoteKey, memory: &Bytes, of: &Counter) {
        let before = memory.all();
        let written = self.push(key, 0, &[1]);
        self.case.assert_refused(written, ErrorKind::AccessDenied, "a write without RMA_EVENT");
        assert_bytes(&memory.all(), &before, "memory after a write without RMA_EVENT");
        assert_eq!(of.value(), 0, "a refused write was counted");
    }

    /// Asserts that the key gives no access: a write and a read of the byte at `offset` are
    /// refused. `what` names the access in failures.
    #[track_caller]
    pub(super) fn assert_dead(&self, key: &RemoteKey, offset: u64, why: ErrorKind, what: &str) {
        self.case.assert_refused(self.push(key, offset, &[0xFF]), why, what);
        self.case.assert_refused(self.pull(key, offset, 1), why, what);
    }
}
