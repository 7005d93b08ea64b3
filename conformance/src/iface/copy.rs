//! Behaviours of copies, blocking and asynchronous.

#![allow(unsafe_code, reason = "copies by address")]

use std::{sync::Arc, thread};

use hmem_core::{
    Address, DeviceBuffer, ErrorKind, Iface, IfaceExt, IfaceKind, Result, iface::Facet,
};

use super::{
    LEN, PARTS, assert_bytes, at, buffer, buffers, contents, need, odd_buffers, pattern, whole,
};
use crate::trial::{Outcome, assert_kind, skip};

/// A copy function. Its arguments are the destination, the source and the length in bytes.
type Copy<'a> = &'a dyn Fn(Address, Address, u64) -> Result<()>;

pub(super) fn copy_moves_exactly_the_named_bytes(iface: &Arc<dyn Iface>) -> Outcome {
    // SAFETY: `assert_copies` passes ranges of memory that it owns.
    let copy = |to, from, len| unsafe { iface.copy(to, from, len) };
    for buffer in buffers(iface)? {
        assert_copies(&buffer, &copy);
    }
    Ok(())
}

pub(super) fn started_copy_moves_exactly_the_named_bytes(iface: &Arc<dyn Iface>) -> Outcome {
    need(&**iface, iface.copy_engine(), Facet::CopyEngine)?;
    // SAFETY: `assert_copies` passes ranges of memory that it owns, and `wait` returns after the
    // copy has ended.
    let copy = |to, from, len| unsafe { iface.start_copy(to, from, len) }?.wait();
    for buffer in buffers(iface)? {
        assert_copies(&buffer, &copy);
    }
    Ok(())
}

/// Copies parts of a buffer: from host memory to the buffer, back, and within the buffer. Asserts
/// that each copy writes its destination and no other byte.
fn assert_copies(buffer: &DeviceBuffer, copy: Copy<'_>) {
    let kind = buffer.allocation().kind.name();
    for (seed, (offset, len)) in PARTS.into_iter().enumerate() {
        let mut expected = pattern(seed as u64, LEN);
        copy(at(buffer, 0), Address::of_ptr(expected.as_ptr()), LEN).expect("copy all in");
        let part = pattern(seed as u64 + 50, len);
        copy(at(buffer, offset), Address::of_ptr(part.as_ptr()), len).expect("copy a part in");
        let start = offset as usize;
        expected[start..start + part.len()].copy_from_slice(&part);

        let mut found = vec![0; LEN as usize];
        copy(Address::of_ptr(found.as_mut_ptr()), at(buffer, 0), LEN).expect("copy all out");
        assert_bytes(&found, &expected, &format!("{kind} memory, {len} bytes copied to {offset}"));

        let mut guarded = vec![0xEE; part.len() + 2];
        copy(Address::of_ptr(guarded[1..].as_mut_ptr()), at(buffer, offset), len)
            .expect("copy a part out");
        let framed = [&[0xEE], &part[..], &[0xEE]].concat();
        assert_bytes(&guarded, &framed, &format!("{len} bytes copied from {offset}"));

        let to = LEN - len;
        if to >= offset + len {
            copy(at(buffer, to), at(buffer, offset), len).expect("copy inside the memory");
            expected[to as usize..].copy_from_slice(&part);
            assert_bytes(&contents(buffer), &expected, "copied inside the memory");
        }
    }
}

pub(super) fn copies_on_several_threads_are_kept_apart(iface: &Arc<dyn Iface>) -> Outcome {
    let buffers = buffers(iface)?.into_iter().chain(buffers(iface)?);
    let buffers: Vec<_> = buffers.collect();
    thread::scope(|scope| {
        for (seed, buffer) in buffers.iter().enumerate() {
            scope.spawn(move || {
                for round in 0..8 {
                    let bytes = pattern(seed as u64 * 8 + round, LEN);
                    buffer.write(0, &bytes).expect("copy in");
                    assert_bytes(&contents(buffer), &bytes, "copied by one of several threads");
                }
            });
        }
    });
    Ok(())
}

pub(super) fn copy_past_an_allocation_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    for buffer in buffers(iface)? {
        let near_end = whole(&**iface, &buffer).len() - 8;
        assert_copies_past_the_end_are_refused(iface, &buffer, near_end, 16);
    }
    Ok(())
}

/// Asserts that the iface refuses to copy `len` bytes between host memory and the buffer from
/// `offset` on, in both directions. The caller passes a range that ends past the allocation.
fn assert_copies_past_the_end_are_refused(
    iface: &Arc<dyn Iface>,
    buffer: &DeviceBuffer,
    offset: u64,
    len: u64,
) {
    let before = pattern(1, buffer.allocation().range.len());
    buffer.write(0, &before).expect("copy in");
    let mut host = vec![0xEE; len as usize];
    let (device, own) = (at(buffer, offset), Address::of_ptr(host.as_mut_ptr()));
    // SAFETY: the host side is a vector of `len` bytes that nothing else uses. The device side
    // starts in an owned allocation, and the iface must refuse a copy past its end.
    let refused = unsafe { [iface.copy(device, own, len), iface.copy(own, device, len)] };
    for result in refused {
        let error = result.expect_err("the copy leaves the allocation");
        assert_kind(&error, ErrorKind::OutOfBounds, "a copy past an allocation");
    }
    assert_bytes(&host, &vec![0xEE; host.len()], "a refused copy");
    assert_bytes(&contents(buffer), &before, "a refused copy");
}

pub(super) fn copy_into_the_padding_after_an_odd_length_is_refused(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    for buffer in odd_buffers(iface)? {
        let len = buffer.allocation().range.len();
        assert_copies_past_the_end_are_refused(iface, &buffer, 0, len + 1);
    }
    Ok(())
}

pub(super) fn copy_of_unknown_memory_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    if iface.kind() == IfaceKind::SYSTEM {
        return skip("all host memory belongs to this iface");
    }
    drop(buffer(iface)?);
    let (from, mut to) = (vec![1u8; 64], vec![0xEE; 64]);
    // SAFETY: both are vectors of 64 bytes, and nothing else uses `to`.
    let copied =
        unsafe { iface.copy(Address::of_ptr(to.as_mut_ptr()), Address::of_ptr(from.as_ptr()), 64) };
    let error = copied.expect_err("neither side is memory of the iface");
    assert_kind(&error, ErrorKind::OutOfBounds, "a copy between two unknown addresses");
    assert_bytes(&to, &[0xEE; 64], "a refused copy");
    Ok(())
}
