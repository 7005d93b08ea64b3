//! Tests of asynchronous registrations whose objects are dropped on the domain's own thread.

#![allow(unsafe_code)]

use std::{
    any::Any,
    sync::{Arc, Barrier, Mutex, OnceLock},
    thread,
    time::Duration,
};

use hmem::{
    Access, AddressRange, Domain, DomainAttr, DomainBindFlags, ErrorKind, Hmem, MrFlags, MrMode,
    Promise, Raw, Region, Request, Result,
    event_queue::EventQueue,
    fabric::{self, MrAttr},
    loopback::Loopback,
    provider::{
        DomainRequest, LiveObjects, Piece, Provider, ProviderAttr, ProviderDomain, ProviderRegion,
        Registration,
    },
};

/// Regions that the provider drops when it registers memory.
type Dropped = Arc<Mutex<Vec<Region<Vec<u8>>>>>;

/// A software NIC that drops the listed regions at the start of each registration.
#[derive(Debug)]
struct Dropping(Loopback, Dropped);

impl Provider for Dropping {
    fn name(&self) -> &str {
        "dropping"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.0.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(DroppingDomain(self.0.open_domain(request)?, Arc::clone(&self.1))))
    }
}

#[derive(Debug)]
struct DroppingDomain(Arc<dyn ProviderDomain>, Dropped);

// SAFETY: every call goes to the software NIC's domain, which upholds the contract.
unsafe impl ProviderDomain for DroppingDomain {
    fn attr(&self) -> &ProviderAttr {
        self.0.attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        drop(std::mem::take(&mut *self.1.lock().expect("not poisoned")));
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.register(&Registration { extension: None, ..*request }, pieces) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.0.deregister(region)
    }

    fn live(&self) -> LiveObjects {
        self.0.live()
    }

    fn accepts(&self, _extension: &(dyn Any + Send + Sync)) -> bool {
        true
    }
}

/// Opens a domain that is bound to an event queue.
fn open() -> (Domain, Arc<EventQueue>, Dropped) {
    let dropped = Dropped::default();
    let nic = Loopback::builder().build().expect("a software NIC");
    let provider = Dropping(nic, Arc::clone(&dropped));
    let hmem = Hmem::builder().without_vendor_ifaces().provider(provider).build().expect("start");
    let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
    let domain = hmem.domain("dropping", attr).expect("open a domain");
    let events = Arc::new(EventQueue::new());
    domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
    (domain, events, dropped)
}

fn request(context: u64) -> Request<'static, Vec<u8>> {
    Request::new(vec![0; 64], Access::REMOTE_READ).context(context)
}

fn next(events: &EventQueue) -> (u64, Result<(), ErrorKind>) {
    let event = events.wait(Duration::from_secs(60)).expect("an event");
    (event.context, event.result.map_err(|error| error.kind()))
}

/// EVT-03
#[test]
fn regions_may_be_dropped_inside_a_registration() {
    let (domain, events, dropped) = open();
    let mut list = dropped.lock().expect("not poisoned");
    // The first registration drops its own region, and one that is still pending.
    list.extend([1, 2].map(|context| domain.submit(request(context)).expect("submit")));
    drop(list);
    assert_eq!(next(&events), (2, Err(ErrorKind::Canceled)));
    assert_eq!(next(&events), (1, Ok(())));
    assert_eq!(domain.live().regions, 0, "the region ends with its registration");
    domain.close().expect("no region is left");
}

/// Settings whose drop panics.
struct PanicsInDrop;

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("by the test");
    }
}

/// EVT-03
#[test]
fn panic_at_the_end_of_a_registration_loses_no_event() {
    let (domain, events, dropped) = open();
    let submit = |request| domain.submit(request).expect("submit");
    // While the test holds the list, the worker waits in the registration.
    let list = dropped.lock().expect("not poisoned");
    let registered = submit(request(1).extension(PanicsInDrop));
    drop(list);
    assert_eq!(next(&events), (1, Ok(())));
    registered.close().expect("close");
    let list = dropped.lock().expect("not poisoned");
    let (first, second) = (submit(request(2)), submit(request(3).extension(PanicsInDrop)));
    second.close().expect("the registration has not begun");
    drop(list);
    assert_eq!(next(&events), (3, Err(ErrorKind::Canceled)));
    assert_eq!(next(&events), (2, Ok(())));
    first.close().expect("close");
}

#[test]
fn registrations_racing_for_one_output_end_without_an_event_of_the_loser() {
    let (domain, events, _) = open();
    let memory = [0_u8; 64];
    let ranges = [AddressRange::of(&memory)];
    // SAFETY: the regions are dropped before the memory, and the NIC only reads it.
    let memory = unsafe { Raw::new(&ranges[..], Promise::ReadOnly) };
    let attr = MrAttr::new(memory, Access::REMOTE_READ);
    for _ in 0..200 {
        let (out, barrier) = (OnceLock::new(), Barrier::new(2));
        let register = || {
            barrier.wait();
            fabric::regattr_into(&domain, &attr, MrFlags::empty(), &out).is_ok()
        };
        let won = thread::scope(|scope| {
            let other = scope.spawn(register);
            u8::from(register()) + u8::from(other.join().expect("the thread"))
        });
        assert_eq!(won, 1);
        assert_eq!(next(&events), (0, Ok(())));
        assert!(events.read().is_none(), "an event of the call that failed");
    }
}
