//! Tests of queries: the iface recognises memory by its address.

use hmem_core::{Address, AddressRange, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt};
use hmem_fake_accelerators::Fake;
use hmem_iface_kit::announced::{Announced, Driver};

use crate::world::{Over, World, allocate, check_round_trip, free, over_both, page, request};

/// HM-01 HM-02 HM-03: a query for an address returns announced memory until the memory is
/// withdrawn.
#[test]
fn announced_memory_is_recognised_until_it_is_withdrawn() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, world: &World<D>) {
            let (range, handle) = (world.allocate)(iface, fake, 2 * page());
            assert_eq!(iface.query(range.start()).expect("query"), None);
            // SAFETY: the memory stays allocated until the fake is dropped.
            let announced =
                unsafe { iface.announce(range, DeviceId(0), handle) }.expect("announce");
            assert_eq!(announced.range, range);
            for inside in [range.start().0, range.start().0 + 2 * page() - 1] {
                assert_eq!(iface.query(Address(inside)).expect("query"), Some(announced));
            }
            assert_eq!(iface.query(Address(range.start().0 + 2 * page())).expect("query"), None);
            check_round_trip(iface, Address(range.start().0 + 100), 5000).expect("copy");

            // SAFETY: the call must fail, so the memory is not announced.
            let twice = unsafe { iface.announce(range, DeviceId(0), handle) }.unwrap_err();
            assert_eq!(twice.kind(), ErrorKind::InvalidArgument);
            let error = free(iface, &announced).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.remedy_text().is_some_and(|text| text.contains("withdraw")), "{error}");
            assert_eq!(fake.live().allocations, 1, "the application frees it");

            iface.withdraw(&announced).expect("withdraw");
            assert_eq!(iface.query(range.start()).expect("query"), None);
            let again = iface.withdraw(&announced).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::InvalidArgument);
            let own = allocate(iface, page());
            assert_eq!(iface.withdraw(&own).unwrap_err().kind(), ErrorKind::InvalidArgument);
            free(iface, &own).expect("free");
        }
    }
    over_both(&Test);
}

/// HM-05: each kind of invalid request fails with its own error kind.
#[test]
fn invalid_requests_are_refused_with_their_own_kinds() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, world: &World<D>) {
            let refused = |change: &dyn Fn(&mut hmem_core::iface::AllocRequest)| {
                let mut request = request(64);
                change(&mut request);
                iface.allocate(&request).unwrap_err().kind()
            };
            assert_eq!(
                refused(&|request| request.device = DeviceId(99)),
                ErrorKind::InvalidArgument
            );
            assert_eq!(refused(&|request| request.len = 0), ErrorKind::ZeroLength);
            assert_eq!(
                refused(&|request| request.kind = AllocationKind::Managed),
                ErrorKind::Unsupported
            );
            assert_eq!(refused(&|request| request.len = 1 << 60), ErrorKind::OutOfResources);
            assert_eq!(refused(&|request| request.len = u64::MAX), ErrorKind::OutOfResources);
            let (range, handle) = (world.allocate)(iface, fake, page());
            // SAFETY: the call must fail, so the memory is not announced.
            let error = unsafe { iface.announce(range, DeviceId(99), handle) }.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let empty = AddressRange::new(range.start(), 0).expect("a range");
            // SAFETY: the call must fail, so the memory is not announced.
            let error = unsafe { iface.announce(empty, DeviceId(0), handle) }.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ZeroLength);
            assert_eq!(iface.query(range.start()).expect("query"), None);
        }
    }
    over_both(&Test);
}

/// HM-03
#[test]
fn copies_between_two_allocations_go_through_host_memory() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, _: &Fake, iface: &Announced<D>, _: &World<D>) {
            // The copy is longer than the host buffer.
            let len = (3 << 20) + 77;
            let (from, to) = (allocate(iface, len), allocate(iface, len));
            let bytes = crate::world::pattern(len as usize);
            let mut back = vec![0; len as usize];
            // SAFETY: the test allocated the memory and frees it below.
            unsafe {
                iface.write(from.base(), &bytes).expect("write");
                iface.copy(to.base(), from.base(), len).expect("copy");
                iface.read(to.base(), &mut back).expect("read");
            }
            assert!(back == bytes, "the copy has other bytes");
            // Overlapping copies behave like memmove.
            let (shift, rest) = (1_000_001, len - 1_000_001);
            for (target, source) in [(shift, 0), (0, shift)] {
                // SAFETY: the test allocated the memory and frees it below.
                unsafe {
                    iface.write(from.base(), &bytes).expect("write");
                    let (to, from) =
                        (Address(from.base().0 + target), Address(from.base().0 + source));
                    iface.copy(to, from, rest).expect("copy");
                    iface.read(to, &mut back[..rest as usize]).expect("read");
                }
                let source = source as usize;
                assert!(back[..rest as usize] == bytes[source..source + rest as usize]);
            }
            free(iface, &from).expect("free");
            free(iface, &to).expect("free");
        }
    }
    over_both(&Test);
}

/// HM-14
#[test]
fn flush_without_a_driver_call_is_refused() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, _: &Fake, iface: &Announced<D>, _: &World<D>) {
            let error = iface.flush_inbound(DeviceId(0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.remedy_text().is_some_and(|text| text.contains("read")), "{error}");
            let error = iface.flush_inbound(DeviceId(99)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
    over_both(&Test);
}

/// HM-15: the error for a facet that the iface lacks names the reason.
#[test]
fn missing_facet_has_a_reason() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, _: &Fake, iface: &Announced<D>, _: &World<D>) {
            use hmem_core::iface::Facet;
            for facet in [Facet::CopyEngine, Facet::PeerMemory, Facet::HostRegistrar, Facet::Ipc] {
                let error = iface.unavailable(facet);
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(error.context_value("why").is_some(), "{error}");
            }
        }
    }
    over_both(&Test);
}
