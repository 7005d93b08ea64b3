//! Behaviours that every iface must have.

mod copy;
mod export;
mod facets;
mod memory;
mod monitor;
mod register;

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Error, ErrorKind, Iface, Result,
    iface::{AllocRequest, Capability, Facet},
};

use crate::{
    bytes::{assert_bytes, assert_no_fd_leaks, assert_no_fd_leaks_of_exports, pattern},
    trial::{Skipped, behaviours, skip},
};
use copy::*;
use export::*;
use facets::*;
use memory::*;
use monitor::*;
use register::*;

behaviours! {
    Arc<dyn Iface>:
    /// Requirements HM-01 and HM-02: a query returns an allocation for its first, middle and last
    /// byte, and not for the byte before or after it.
    query_claims_exactly_the_allocation,
    /// Requirements HM-01 and HM-02: a query of the byte after a buffer of odd length does not
    /// return the buffer's allocation.
    padding_after_an_odd_length_is_not_claimed,
    /// Requirement HM-02: a query of heap, stack or code, or of the first or last address, returns
    /// no allocation.
    address_of_no_allocation_is_not_claimed,
    /// Requirement HM-01: an allocation has exactly the requested length and kind. Memory other
    /// than host and managed memory lies on the requested device.
    allocation_has_the_length_kind_and_device_asked_for,
    /// Requirement HM-01: two live allocations share no address.
    live_allocations_do_not_overlap,
    /// Requirement HM-05: an allocation on a device that the iface does not have fails with
    /// InvalidArgument.
    allocation_on_an_unknown_device_is_refused,
    /// Requirement HM-01: each allocation has an identity that no earlier allocation had.
    identities_are_never_reused,
    /// Requirement HM-02: each allocation lies in the address span that the iface reports.
    address_span_holds_every_allocation,
    /// Requirement HM-01: a query of freed memory does not return the freed allocation.
    freed_memory_is_no_longer_claimed,
    /// Requirement MR-18: a second free of one allocation fails with InvalidArgument, even if the
    /// address was allocated again.
    second_free_is_refused,
    /// Requirement HM-15: a free releases the memory and its addresses, so that more memory than
    /// the device has can be allocated and freed in turn.
    freed_memory_can_be_allocated_again,
    /// Requirement HM-15: a freed allocation leaves no file descriptor open.
    allocating_and_freeing_leaks_no_fd,
    /// Requirement HM-03: a copy to, from or within a buffer writes its destination and no other
    /// byte.
    copy_moves_exactly_the_named_bytes,
    /// Requirement HM-03: copies by several threads at once, each in its own buffer, do not mix
    /// their bytes.
    copies_on_several_threads_are_kept_apart,
    /// Requirement HM-03: a copy to or from a range that ends past its allocation fails with
    /// OutOfBounds and moves no byte.
    copy_past_an_allocation_is_refused,
    /// Requirement HM-03: a copy to or from a buffer of odd length and the byte after it fails with
    /// OutOfBounds.
    copy_into_the_padding_after_an_odd_length_is_refused,
    /// Requirements HM-03 and MR-18: a copy between two addresses outside the iface's allocations
    /// fails with OutOfBounds.
    copy_of_unknown_memory_is_refused,
    /// Requirement HM-03: an asynchronous copy has written its destination, and no other byte, when
    /// its wait returns.
    started_copy_moves_exactly_the_named_bytes,
    /// Requirement HM-06: an export has the length of its range and the offset of the range in the
    /// allocation, and the range lies inside the dma-buf.
    dma_buf_has_the_offsets_and_the_length_of_its_range,
    /// Requirement HM-06: a CPU mapping of the dma-buf shows the bytes of the exported range.
    dma_buf_holds_the_bytes_of_its_range,
    /// Requirement HM-06: the export of a range that ends past its allocation fails.
    dma_buf_past_an_allocation_is_refused,
    /// Requirement HM-06: the export of a buffer of odd length and the byte after it fails. The
    /// export of the buffer's last byte succeeds.
    dma_buf_of_the_padding_after_an_odd_length_is_refused,
    /// Requirement MR-18: the dma-buf of a freed allocation does not show the bytes of later
    /// allocations.
    dma_buf_of_freed_memory_shows_no_other_memory,
    /// Requirement MR-18: the export of an allocation fails after the allocation was freed.
    dma_buf_of_an_allocation_that_was_freed_is_refused,
    /// Requirement HM-06: a released export leaves no file descriptor open.
    exporting_dma_bufs_leaks_no_fd,
    /// Requirement HM-07: the segments of a range cover it in address order, without gaps.
    segments_cover_the_range,
    /// Requirement HM-10: an IPC handle opens memory with the bytes of the exported allocation. A
    /// query returns the opened memory until it is closed.
    ipc_handle_opens_the_allocation,
    /// Requirement HM-10: bytes that are no IPC handle fail to open with Malformed.
    malformed_ipc_handle_is_refused,
    /// Requirement HM-15: a page of host memory can be registered with the device API and
    /// unregistered. A second unregistration fails with InvalidArgument.
    host_memory_is_registered_and_unregistered_once,
    /// Requirement HM-14: the flush of inbound writes succeeds on each device of the iface.
    inbound_flush_succeeds_on_every_device,
    /// Requirement HM-15: the error for a facet that the iface lacks is Unsupported or Unavailable,
    /// and names the iface.
    missing_facet_is_an_unsupported_error,
    /// Requirement MON-07: a monitor with callbacks notifies its subscriber of a free. A monitor
    /// with identities reports the freed allocation as no longer valid.
    monitor_detects_a_free,
    /// Requirement MON-07: a subscription to part of an allocation is notified when the allocation
    /// is freed.
    subscription_to_a_part_detects_the_free_of_its_allocation,
    /// Requirement MON-07: the free of an allocation notifies each of its subscriptions, except
    /// those that have ended.
    each_subscription_to_an_allocation_is_notified,
    /// Requirement MON-07: a query of a freed address returns no allocation once the notification
    /// of the free ends.
    freed_memory_is_not_claimed_after_its_notification,
    /// Requirement MON-07: freed addresses are not allocated again before the subscribers were
    /// notified of the free.
    freed_addresses_are_not_allocated_before_the_notification,
    /// Requirement MON-08: a free does not notify a subscription that has ended.
    monitor_is_silent_after_unsubscribing,
    /// Requirement CACHE-11: a transfer through a cached registration moves no bytes of freed
    /// memory.
    cached_registration_never_moves_bytes_of_freed_memory,
    /// Requirement P2P-06: peers write and read exactly the registered part of an allocation, under
    /// the policy `Enabled`.
    part_of_an_allocation_is_reached_by_the_default_path,
    /// Requirement P2P-06: peers write and read exactly the registered part of an allocation, over
    /// a direct path (policy `Required`).
    part_of_an_allocation_is_reached_by_a_direct_path,
    /// Requirements P2P-06 and BNC-03: peers write and read exactly the registered part of an
    /// allocation, by staged copies for device memory (policy `Disabled`).
    part_of_an_allocation_is_reached_by_staged_copies,
    /// Requirements ARM-02 and P2P-06: the key of a range inside a page reaches the first and the
    /// last byte of the range, and no byte around it.
    part_inside_a_page_is_reached_to_its_exact_ends,
    /// Requirement HM-01: a registration queries the iface at most twice, once for each end of the
    /// range.
    registration_queries_the_iface_once_per_end,
}

/// Length of the test allocations, in bytes. It is several pages for every page size of Linux.
const LEN: u64 = 256 << 10;

/// Parts of an allocation that the behaviours use, as (offset, length): all of it, some whole
/// pages, and a range that starts and ends inside pages. With pages of 64 KiB this last range is
/// inside one page.
const PARTS: [(u64, u64); 3] = [(0, LEN), (64 << 10, 64 << 10), (70_001, 10_007)];

/// Kinds of memory that the behaviours try to allocate.
const KINDS: [AllocationKind; 6] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
    AllocationKind::Virtual,
    AllocationKind::System,
];

/// Returns the value of an optional facet. If the facet is `None`, returns the outcome that skips
/// the behaviour.
fn need<T>(iface: &dyn Iface, facet: Option<T>, which: Facet) -> Result<T, Skipped> {
    facet.map_or_else(|| skip(format!("the iface lacks it: {:#}", iface.unavailable(which))), Ok)
}

/// Returns the id of the iface's first device, or 0 if the iface has no devices.
fn first_device(iface: &dyn Iface) -> DeviceId {
    iface.devices().expect("list the devices").first().map_or(DeviceId(0), |device| device.id)
}

/// Allocated buffers, or the reason why the iface has none.
type Buffers = Result<Vec<DeviceBuffer>, Skipped>;

/// Allocates a buffer of each kind of memory that the iface supports.
fn buffers(iface: &Arc<dyn Iface>) -> Buffers {
    buffers_of(iface, LEN)
}

/// Allocates a buffer of `len` bytes of each kind of memory that the iface supports.
fn buffers_of(iface: &Arc<dyn Iface>, len: u64) -> Buffers {
    need(&**iface, iface.allocator(), Facet::Allocator)?;
    let device = first_device(&**iface);
    let allocate = |kind| match DeviceBuffer::allocate(iface, &AllocRequest { len, device, kind }) {
        Ok(buffer) => Some(buffer),
        Err(why) if is_missing(&why) => None,
        Err(why) => panic!("allocate {} memory: {why}", kind.name()),
    };
    let buffers: Vec<_> = KINDS.into_iter().filter_map(allocate).collect();
    assert!(!buffers.is_empty(), "the iface's allocator allocates no kind of memory");
    Ok(buffers)
}

/// Allocates buffers of odd lengths, of each kind of memory that can have such lengths. The
/// allocator may keep unused bytes (padding) after such a buffer. Virtual memory has no odd
/// lengths, because drivers round its length up to their granularity.
fn odd_buffers(iface: &Arc<dyn Iface>) -> Buffers {
    let mut buffers = Vec::new();
    for len in [1, 4097, 10_007] {
        buffers.extend(buffers_of(iface, len)?);
    }
    buffers.retain(|buffer| buffer.allocation().kind != AllocationKind::Virtual);
    if buffers.is_empty() { skip("no kind of memory has odd lengths") } else { Ok(buffers) }
}

/// Allocates a buffer of the first kind of memory that the iface supports.
fn buffer(iface: &Arc<dyn Iface>) -> Result<DeviceBuffer, Skipped> {
    Ok(buffers(iface)?.swap_remove(0))
}

/// Returns a request for `len` bytes of the first kind of memory that the iface supports.
fn request(iface: &Arc<dyn Iface>, len: u64) -> Result<AllocRequest, Skipped> {
    let kind = buffer(iface)?.allocation().kind;
    Ok(AllocRequest { len, device: first_device(&**iface), kind })
}

/// Returns true if an error means that the iface does not support a kind of memory or a facet.
fn is_missing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Unavailable)
}

/// Returns the contents of a whole buffer.
fn contents(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.allocation().range.len() as usize];
    buffer.read(0, &mut bytes).expect("copy from the memory");
    bytes
}

/// Returns the address `offset` bytes after the start of a buffer.
fn at(buffer: &DeviceBuffer, offset: u64) -> Address {
    Address(buffer.allocation().base().0 + offset)
}

/// Returns the range of a buffer's allocation, as the iface reports it. The range may be longer
/// than the buffer, because drivers round the length of virtual memory up to their granularity.
fn whole(iface: &dyn Iface, buffer: &DeviceBuffer) -> AddressRange {
    let own = buffer.allocation();
    let found = iface.query(own.base()).expect("query").expect("an allocation is claimed");
    if own.kind == AllocationKind::Virtual {
        assert!(found.range.contains_range(own.range), "{found:?} does not hold {own:?}");
    } else {
        assert_eq!(found.range, own.range, "the query names another range than the allocation");
    }
    found.range
}

/// Returns the facets that an iface does not have.
fn lacking(iface: &dyn Iface) -> Vec<Facet> {
    let can = Capability::of(iface);
    [
        (can.allocate, Facet::Allocator),
        (can.async_copy, Facet::CopyEngine),
        (iface.dma_buf().is_some(), Facet::DmaBuf),
        (can.peer_memory, Facet::PeerMemory),
        (can.host_register, Facet::HostRegistrar),
        (can.ipc, Facet::Ipc),
        (iface.monitor().is_some(), Facet::Monitor),
    ]
    .into_iter()
    .filter(|(has, _)| !has)
    .map(|(_, facet)| facet)
    .collect()
}
