//! Tests of asynchronous registrations whose objects are dropped or closed on the domain's own
//! thread.

#![allow(unsafe_code)]

use std::{
    any::Any,
    fmt,
    sync::{Arc, Barrier, Mutex, MutexGuard, OnceLock},
    thread,
    time::Duration,
};

use hmem::{
    Access, AddressRange, Domain, DomainAttr, DomainBindFlags, ErrorKind, Hmem, MrFlags, MrMode,
    Promise, Raw, Request, Result,
    event_queue::EventQueue,
    fabric::{self, MrAttr},
    loopback::Loopback,
    provider::{
        DomainRequest, LiveObjects, Piece, Provider, ProviderAttr, ProviderDomain, ProviderRegion,
        Registration,
    },
};

/// The calls that the provider makes when it registers memory.
#[derive(Default)]
struct Calls(Mutex<Vec<Box<dyn FnOnce() + Send>>>);

impl Calls {
    fn lock(&self) -> MutexGuard<'_, Vec<Box<dyn FnOnce() + Send>>> {
        self.0.lock().expect("not poisoned")
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

/// A software NIC that makes the listed calls once, at the start of the next registration.
#[derive(Debug)]
struct Calling(Loopback, Arc<Calls>);

impl Provider for Calling {
    fn name(&self) -> &str {
        "calling"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.0.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(CallingDomain(self.0.open_domain(request)?, Arc::clone(&self.1))))
    }
}

#[derive(Debug)]
struct CallingDomain(Arc<dyn ProviderDomain>, Arc<Calls>);

// SAFETY: every call goes to the software NIC's domain, which upholds the contract.
unsafe impl ProviderDomain for CallingDomain {
    fn attr(&self) -> &ProviderAttr {
        self.0.attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let calls = std::mem::take(&mut *self.1.lock());
        calls.into_iter().for_each(|call| call());
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
fn open() -> (Domain, Arc<EventQueue>, Arc<Calls>) {
    let calls = Arc::<Calls>::default();
    let nic = Loopback::builder().build().expect("a software NIC");
    let provider = Calling(nic, Arc::clone(&calls));
    let hmem = Hmem::builder().without_vendor_ifaces().provider(provider).build().expect("start");
    let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
    let domain = hmem.domain("calling", attr).expect("open a domain");
    let events = Arc::new(EventQueue::new());
    domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
    (domain, events, calls)
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
    let (domain, events, calls) = open();
    let mut list = calls.lock();
    // The first registration drops its own region, and one that is still pending.
    for context in [1, 2] {
        let region = domain.submit(request(context)).expect("submit");
        list.push(Box::new(|| drop(region)));
    }
    drop(list);
    assert_eq!(next(&events), (2, Err(ErrorKind::Canceled)));
    assert_eq!(next(&events), (1, Ok(())));
    assert_eq!(domain.live().regions, 0, "the region ends with its registration");
    domain.close().expect("no region is left");
}

/// EVT-03
#[test]
fn close_of_a_region_inside_its_registration_is_refused() {
    let (domain, events, calls) = open();
    let kept = Arc::new(Mutex::new(None));
    let mut list = calls.lock();
    let own = domain.submit(request(1)).expect("submit");
    let pending = domain.submit(request(2)).expect("submit");
    let keep = Arc::clone(&kept);
    list.push(Box::new(move || {
        let refused = own.close().expect_err("its registration has not ended");
        *keep.lock().expect("not poisoned") = Some((refused.value, refused.error.kind()));
        pending.close().expect("its registration has not begun");
    }));
    drop(list);
    assert_eq!(next(&events), (2, Err(ErrorKind::Canceled)));
    assert_eq!(next(&events), (1, Ok(())));
    let (region, refused) = kept.lock().expect("not poisoned").take().expect("it was refused");
    assert_eq!(refused, ErrorKind::Busy);
    // On the worker too, a region whose registration has ended can be closed.
    calls.lock().push(Box::new(|| drop(region.close().expect("nothing uses it"))));
    let last = domain.submit(request(3)).expect("submit");
    assert_eq!(next(&events), (3, Ok(())));
    assert_eq!(domain.live().regions, 1);
    last.close().expect("nothing uses it");
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
    let (domain, events, calls) = open();
    let submit = |request| domain.submit(request).expect("submit");
    // While the test holds the list, the worker waits in the registration.
    let list = calls.lock();
    let registered = submit(request(1).extension(PanicsInDrop));
    drop(list);
    assert_eq!(next(&events), (1, Ok(())));
    registered.close().expect("close");
    let list = calls.lock();
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
