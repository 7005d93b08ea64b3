//! Behaviours of dma-buf exports.

#![allow(unsafe_code, reason = "maps an exported dma-buf")]

use std::{slice, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, DeviceBuffer, Iface, Mapping, Result,
    iface::{AllocRequest, DmaBufExport, DmaBufExporter, DmaBufMapping, Facet},
    provider::Nic,
};
use rustix::{
    fs::{SeekFrom, seek},
    mm::ProtFlags,
};

use super::{
    Buffers, LEN, PARTS, assert_bytes, assert_no_fd_leaks_of_exports, buffers, first_device,
    is_missing, memory::part, need, odd_buffers, pattern, whole,
};
use crate::trial::{Outcome, Skipped, skip};

/// Exports a range of an allocation for the software NIC, with the default mapping.
fn export_default(
    exporter: &dyn DmaBufExporter,
    range: AddressRange,
    of: &Allocation,
) -> Result<DmaBufExport> {
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    exporter.export(range, of, &nic, DmaBufMapping::Default)
}

/// Returns the dma-buf exporter of an iface, and those buffers of `allocate` that the exporter
/// supports. Skips the behaviour if there is no exporter or no such buffer.
fn exportable(
    iface: &Arc<dyn Iface>,
    allocate: fn(&Arc<dyn Iface>) -> Buffers,
) -> Result<(&dyn DmaBufExporter, Vec<DeviceBuffer>), Skipped> {
    let exporter = need(&**iface, iface.dma_buf(), Facet::DmaBuf)?;
    let mut exported = Vec::new();
    let mut refusals = Vec::new();
    for buffer in allocate(iface)? {
        match export_default(exporter, buffer.allocation().range, buffer.allocation()) {
            Ok(export) => {
                exporter.release(export).expect("release a dma-buf");
                exported.push(buffer);
            }
            Err(why) if is_missing(&why) => refusals.push(why.to_string()),
            Err(why) => panic!("export {:?}: {why}", buffer.allocation()),
        }
    }
    if exported.is_empty() {
        return skip(format!("no kind of memory is exported: {}", refusals.join("; ")));
    }
    Ok((exporter, exported))
}

pub(super) fn dma_buf_has_the_offsets_and_the_length_of_its_range(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let (exporter, buffers) = exportable(iface, buffers)?;
    for buffer in buffers {
        for extent in PARTS {
            let range = part(&buffer, extent);
            let export = export_default(exporter, range, buffer.allocation()).expect("export");
            assert_eq!(export.alloc_offset.0, extent.0, "the offset in the allocation of {range}");
            assert_eq!(export.len, extent.1, "the length of {range}");
            assert_in_bounds(&export);
            exporter.release(export).expect("release");
        }
    }
    Ok(())
}

pub(super) fn dma_buf_holds_the_bytes_of_its_range(iface: &Arc<dyn Iface>) -> Outcome {
    let (exporter, buffers) = exportable(iface, buffers)?;
    for (seed, buffer) in buffers.iter().enumerate() {
        let bytes = pattern(seed as u64, LEN);
        buffer.write(0, &bytes).expect("copy in");
        for extent in PARTS {
            let range = part(buffer, extent);
            let export = export_default(exporter, range, buffer.allocation()).expect("export");
            let found = mapped_bytes(&export);
            exporter.release(export).expect("release");
            let (start, end) = (extent.0 as usize, (extent.0 + extent.1) as usize);
            assert_bytes(&found?, &bytes[start..end], &format!("the dma-buf of {extent:?}"));
        }
    }
    Ok(())
}

pub(super) fn dma_buf_past_an_allocation_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    let (exporter, buffers) = exportable(iface, buffers)?;
    for buffer in buffers {
        let own = whole(&**iface, &buffer);
        let past = AddressRange::new(own.start(), own.len() + 1).expect("a range");
        let export = export_default(exporter, past, buffer.allocation());
        export.expect_err("the range leaves the allocation");
    }
    Ok(())
}

pub(super) fn dma_buf_of_the_padding_after_an_odd_length_is_refused(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let (exporter, buffers) = exportable(iface, odd_buffers)?;
    for buffer in buffers {
        let own = whole(&**iface, &buffer);
        let past = AddressRange::new(own.start(), own.len() + 1).expect("a range");
        let export = export_default(exporter, past, buffer.allocation());
        export.expect_err("the range has a byte after the allocation");
        let last = own.slice(own.len() - 1, 1).expect("inside the allocation");
        let export = export_default(exporter, last, buffer.allocation()).expect("export");
        assert_eq!(export.len, 1, "the length of the last byte of {own}");
        exporter.release(export).expect("release");
    }
    Ok(())
}

/// The length of an allocation that shares no page with others.
const OWN_PAGES: u64 = 2 << 20;

/// Tests that the dma-buf of a freed allocation does not show a later allocation. The allocations
/// are [`OWN_PAGES`] long, because drivers place several small allocations in one page, and keep
/// the page as long as one of them is allocated.
pub(super) fn dma_buf_of_freed_memory_shows_no_other_memory(iface: &Arc<dyn Iface>) -> Outcome {
    let (exporter, exported) = exportable(iface, buffers)?;
    let secret = pattern(7, OWN_PAGES);
    for kind in exported.iter().map(|buffer| buffer.allocation().kind) {
        let request = AllocRequest { len: OWN_PAGES, device: first_device(&**iface), kind };
        let allocate = || DeviceBuffer::allocate(iface, &request).expect("allocate");
        let freed = allocate();
        let export =
            export_default(exporter, freed.allocation().range, freed.allocation()).expect("export");
        drop(freed);
        let live = [allocate(), allocate()];
        for other in &live {
            other.write(0, &secret).expect("copy in");
        }
        let (shown, page) = (mapped_bytes(&export)?, rustix::param::page_size());
        let same = shown.chunks(page).zip(secret.chunks(page)).filter(|(shown, of)| shown == of);
        let (same, kind) = (same.count(), kind.name());
        assert_eq!(same, 0, "pages of the dma-buf of freed {kind} memory that show later memory");
        exporter.release(export).expect("release");
    }
    Ok(())
}

/// Tests that an export is refused if the caller's description of the allocation is from before the
/// memory was freed. The allocations are [`OWN_PAGES`] long for the same reason as in
/// [`dma_buf_of_freed_memory_shows_no_other_memory`].
pub(super) fn dma_buf_of_an_allocation_that_was_freed_is_refused(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let (exporter, exported) = exportable(iface, buffers)?;
    for kind in exported.iter().map(|buffer| buffer.allocation().kind) {
        let request = AllocRequest { len: OWN_PAGES, device: first_device(&**iface), kind };
        let freed = DeviceBuffer::allocate(iface, &request).expect("allocate");
        let of = *freed.allocation();
        drop(freed);
        let export = export_default(exporter, of.range, &of);
        export.expect_err("the allocation was freed");
    }
    Ok(())
}

pub(super) fn exporting_dma_bufs_leaks_no_fd(iface: &Arc<dyn Iface>) -> Outcome {
    let (exporter, buffers) = exportable(iface, buffers)?;
    for buffer in buffers {
        for extent in PARTS {
            let range = part(&buffer, extent);
            assert_no_fd_leaks_of_exports(
                || export_default(exporter, range, buffer.allocation()).expect("export"),
                |export| exporter.release(export).expect("release"),
            );
        }
    }
    Ok(())
}

/// Reads the bytes of an exported range by mapping the dma-buf's fd. Skips the behaviour if the
/// driver's dma-bufs cannot be mapped.
fn mapped_bytes(export: &DmaBufExport) -> Result<Vec<u8>, Skipped> {
    assert_in_bounds(export);
    let page = rustix::param::page_size() as u64;
    let in_page = export.offset.0 % page;
    let len = (in_page + export.len).next_multiple_of(page) as usize;
    let (access, offset) = (ProtFlags::READ, export.offset.0 - in_page);
    let mapping = match Mapping::shared(export, offset, len, access) {
        Ok(mapping) => mapping,
        Err(errno) => return skip(format!("the dma-buf cannot be mapped by the CPU: {errno}")),
    };
    // SAFETY: the mapping above is readable and `len` bytes long. The iface exported these bytes,
    // and a dma-buf ends with a whole page. Nothing writes the memory while the slice lives.
    let bytes = unsafe { slice::from_raw_parts(mapping.as_ptr(), len) };
    Ok(bytes[in_page as usize..][..export.len as usize].to_vec())
}

/// Asserts that the exported range is inside the dma-buf. Does nothing if the size of the dma-buf
/// cannot be read.
fn assert_in_bounds(export: &DmaBufExport) {
    if let Ok(size) = seek(&export.fd, SeekFrom::End(0)) {
        let end = export.offset.0 + export.len;
        assert!(end <= size, "the range ends at {end} in a dma-buf of {size} bytes");
    }
}
