//! Behaviours of allocations and queries.

#![allow(unsafe_code, reason = "frees an allocation twice, which must be refused")]

use std::{collections::HashSet, fs, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceBuffer, DeviceId, ErrorKind, Iface,
    IfaceExt,
    iface::{AllocRequest, Facet},
};

use super::{LEN, assert_no_fd_leaks, at, buffer, buffers, need, odd_buffers, request, whole};
use crate::trial::{Outcome, assert_kind, skip};

pub(super) fn query_claims_exactly_the_allocation(iface: &Arc<dyn Iface>) -> Outcome {
    for buffer in buffers(iface)? {
        let own = *buffer.allocation();
        let range = whole(&**iface, &buffer);
        let expected = Allocation { range, ..own };
        let claims = |address| iface.query(address).expect("query") == Some(expected);
        for (what, offset) in [("first", 0), ("middle", LEN / 2 + 1), ("last", range.len() - 1)] {
            assert!(claims(at(&buffer, offset)), "the {what} byte of {own:?} is not claimed as it");
        }
        assert!(!claims(at(&buffer, range.len())), "one past the end of {own:?} is claimed");
        assert!(!claims(Address(own.base().0 - 1)), "one before the start of {own:?} is claimed");
    }
    Ok(())
}

pub(super) fn padding_after_an_odd_length_is_not_claimed(iface: &Arc<dyn Iface>) -> Outcome {
    for buffer in odd_buffers(iface)? {
        let own = *buffer.allocation();
        let len = whole(&**iface, &buffer).len();
        let claims = |offset| iface.query(at(&buffer, offset)).expect("query") == Some(own);
        assert!(claims(len - 1), "the last byte of {own:?} is not claimed as it");
        assert!(!claims(len), "the first byte after {own:?} is claimed as it");
    }
    Ok(())
}

pub(super) fn address_of_no_allocation_is_not_claimed(iface: &Arc<dyn Iface>) -> Outcome {
    let (heap, stack) = (vec![1u8; 64], 1u8);
    let code: fn(&Arc<dyn Iface>) -> Outcome = address_of_no_allocation_is_not_claimed;
    let addresses = [
        Address::of_ptr(heap.as_ptr()),
        Address::of_ptr(&raw const stack),
        Address(code as usize as u64),
        Address(0),
        Address(u64::MAX),
    ];
    for address in addresses {
        let found = iface.query(address).expect("query an address of no allocation");
        assert_eq!(found, None, "{address} is claimed");
    }
    Ok(())
}

pub(super) fn allocation_has_the_length_kind_and_device_asked_for(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    for whole in buffers(iface)? {
        let kind = whole.allocation().kind;
        for device in iface.devices().expect("list the devices") {
            for len in [1, 4096, 10_007] {
                let request = AllocRequest { len, device: device.id, kind };
                let buffer = DeviceBuffer::allocate(iface, &request).expect("allocate");
                let found = buffer.allocation();
                assert_eq!(found.iface, iface.kind(), "{found:?}");
                assert_eq!((found.range.len(), found.kind), (len, kind), "{found:?}");
                if !matches!(kind, AllocationKind::Host | AllocationKind::Managed) {
                    assert_eq!(found.device, Some(device.id), "{found:?}");
                }
            }
        }
        assert_eq!(whole.allocation().range.len(), LEN);
    }
    Ok(())
}

pub(super) fn live_allocations_do_not_overlap(iface: &Arc<dyn Iface>) -> Outcome {
    let mut live = buffers(iface)?;
    live.extend(buffers(iface)?);
    for (number, one) in live.iter().enumerate() {
        for other in &live[..number] {
            let (one, other) = (one.allocation(), other.allocation());
            assert!(!one.range.overlaps(other.range), "{one:?} overlaps {other:?}");
        }
    }
    Ok(())
}

pub(super) fn allocation_on_an_unknown_device_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    let Some(last) = iface.devices().expect("list the devices").iter().map(|d| d.id.0).max() else {
        return skip("the iface has no devices");
    };
    let request = AllocRequest { device: DeviceId(last + 1), ..request(iface, LEN)? };
    let error = iface.allocate(&request).expect_err("there is no such device");
    assert_kind(&error, ErrorKind::InvalidArgument, "an allocation on an unknown device");
    Ok(())
}

/// Tests that an allocation at a reused address gets a new identity. Frees and allocates
/// repeatedly, so that the driver may reuse addresses.
pub(super) fn identities_are_never_reused(iface: &Arc<dyn Iface>) -> Outcome {
    if !iface.has_identities() {
        return skip("the iface has no identities");
    }
    let mut seen = HashSet::new();
    for _ in 0..16 {
        for buffer in buffers(iface)? {
            let allocation = buffer.allocation();
            assert!(seen.insert(allocation.id), "{allocation:?} has the identity of another one");
            let found = iface.query(allocation.base()).expect("query");
            assert_eq!(found.map(|found| found.id), Some(allocation.id), "the query disagrees");
        }
    }
    Ok(())
}

pub(super) fn address_span_holds_every_allocation(iface: &Arc<dyn Iface>) -> Outcome {
    let Some(span) = iface.address_span() else {
        return skip("the iface has no span, and is asked about every address");
    };
    let mut live = Vec::new();
    for _ in 0..4 {
        live.extend(buffers(iface)?);
    }
    for buffer in &live {
        let range = buffer.allocation().range;
        assert!(span.contains_range(range), "{range} is outside {span}");
    }
    Ok(())
}

pub(super) fn freed_memory_is_no_longer_claimed(iface: &Arc<dyn Iface>) -> Outcome {
    for buffer in buffers(iface)? {
        let freed = *buffer.allocation();
        drop(buffer);
        for address in [freed.base(), Address(freed.base().0 + LEN - 1)] {
            let found = iface.query(address).expect("query freed memory");
            assert_ne!(found, Some(freed), "freed memory is claimed");
        }
    }
    Ok(())
}

pub(super) fn second_free_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    for buffer in buffers(iface)? {
        let freed = *buffer.allocation();
        drop(buffer);
        let free_again = || {
            // SAFETY: nothing uses the memory, which is no longer allocated.
            let error =
                unsafe { iface.free(&freed) }.expect_err("the allocation was freed already");
            assert_kind(&error, ErrorKind::InvalidArgument, "a second free");
        };
        free_again();
        // New allocations may reuse the address.
        let _others = buffers(iface)?;
        free_again();
    }
    Ok(())
}

/// Tests that a free releases the memory. Allocates more bytes in total than the device has, so
/// that an allocation fails if freed memory is not released. Also checks that the address
/// space of the process does not grow with each round.
pub(super) fn freed_memory_can_be_allocated_again(iface: &Arc<dyn Iface>) -> Outcome {
    const PARTS: u64 = 16;
    need(&**iface, iface.allocator(), Facet::Allocator)?;
    let memory = iface.devices().expect("list the devices").first().map(|device| device.memory);
    let len = (memory.unwrap_or(16 << 30) / PARTS).max(LEN).next_multiple_of(2 << 20);
    let request = request(iface, len)?;
    let before = address_space();
    for round in 0..2 * PARTS {
        match DeviceBuffer::allocate(iface, &request) {
            Ok(buffer) => drop(buffer),
            Err(why) if round == 0 => {
                return skip(format!("a sixteenth of the memory is not free: {why}"));
            }
            Err(why) => panic!("{len} bytes cannot be allocated after {round} rounds: {why}"),
        }
    }
    let grown = address_space().saturating_sub(before);
    assert!(grown < PARTS * len, "{grown} bytes of address space were not released");
    Ok(())
}

/// Returns the size of the process's mapped address space in bytes.
fn address_space() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("read /proc/self/statm");
    let pages = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("a number of pages") * rustix::param::page_size() as u64
}

pub(super) fn allocating_and_freeing_leaks_no_fd(iface: &Arc<dyn Iface>) -> Outcome {
    drop(buffer(iface)?);
    assert_no_fd_leaks("allocate and free", || {
        drop(buffers(iface).expect("the iface has an allocator"));
    });
    Ok(())
}

/// Returns the range of `len` bytes that starts `offset` bytes after the start of a buffer.
pub(super) fn part(buffer: &DeviceBuffer, (offset, len): (u64, u64)) -> AddressRange {
    buffer.allocation().range.slice(offset, len).expect("inside the allocation")
}
