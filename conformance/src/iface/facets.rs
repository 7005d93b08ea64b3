//! Behaviours of optional facets: segments, IPC, host registration and inbound flush.

#![allow(unsafe_code, reason = "opens and closes memory of another process, and page-locks")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, DeviceBuffer, ErrorKind, Iface, IfaceExt,
    iface::{AllocRequest, Facet, IpcHandle},
};

use super::{
    LEN, PARTS, assert_bytes, buffers, is_missing, lacking, memory::part, need, pattern, request,
};
use crate::trial::{Outcome, assert_kind, skip};

pub(super) fn segments_cover_the_range(iface: &Arc<dyn Iface>) -> Outcome {
    let Some(map) = iface.segments() else {
        return skip("each allocation of the iface is one segment");
    };
    for buffer in buffers(iface)? {
        for extent in PARTS {
            let range = part(&buffer, extent);
            let segments =
                map.segments(range, buffer.allocation()).expect("segments of an allocation");
            let mut next = range.start().0;
            for segment in &segments {
                assert_eq!(segment.range.start().0, next, "a gap before a segment: {segments:?}");
                assert!(!segment.range.is_empty(), "{segments:?}");
                next += segment.range.len();
            }
            assert_eq!(
                next,
                range.start().0 + range.len(),
                "the segments end elsewhere than {range}: {segments:?}"
            );
        }
    }
    Ok(())
}

pub(super) fn ipc_handle_opens_the_allocation(iface: &Arc<dyn Iface>) -> Outcome {
    let ipc = need(&**iface, iface.ipc(), Facet::Ipc)?;
    let (mut tested, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let bytes = pattern(3, LEN);
        buffer.write(0, &bytes).expect("copy in");
        let opened = ipc.export(buffer.allocation()).and_then(|handle| ipc.open(&handle));
        let opened = match opened {
            Ok(opened) => opened,
            // A driver may refuse to open memory in the process that allocated it.
            Err(why) if is_missing(&why) || why.kind() == ErrorKind::BadState => {
                refusals.push(format!("{}: {why}", buffer.allocation().kind.name()));
                continue;
            }
            Err(why) => panic!("export and open {:?}: {why}", buffer.allocation()),
        };
        assert_eq!(opened.range.len(), LEN);
        assert_eq!(
            iface.query(opened.base()).expect("query"),
            Some(opened),
            "opened memory is not claimed"
        );
        let mut found = vec![0; LEN as usize];
        // SAFETY: the allocation is open until `close` below.
        unsafe { iface.read(opened.base(), &mut found) }.expect("copy from opened memory");
        assert_bytes(&found, &bytes, "opened memory");
        // SAFETY: nothing uses the memory any more.
        unsafe { ipc.close(&opened) }.expect("close");
        let left = iface.query(opened.base()).expect("query closed memory");
        assert_ne!(left, Some(opened), "closed memory is claimed");
        tested = true;
    }
    if tested {
        return Ok(());
    }
    skip(format!("no handle opens in the process that made it: {}", refusals.join("; ")))
}

pub(super) fn malformed_ipc_handle_is_refused(iface: &Arc<dyn Iface>) -> Outcome {
    let ipc = need(&**iface, iface.ipc(), Facet::Ipc)?;
    for bytes in [Vec::new(), vec![0xA5; 7], vec![0xA5; 1000]] {
        let error = ipc
            .open(&IpcHandle { iface: iface.kind(), bytes })
            .expect_err("the bytes are no handle");
        assert_kind(&error, ErrorKind::Malformed, "a handle of random bytes");
    }
    Ok(())
}

pub(super) fn host_memory_is_registered_and_unregistered_once(iface: &Arc<dyn Iface>) -> Outcome {
    let registrar = need(&**iface, iface.host_registrar(), Facet::HostRegistrar)?;
    let page = rustix::param::page_size() as u64;
    let host = vec![1u8; 3 * page as usize];
    let start = Address(Address::of_ptr(host.as_ptr()).0.next_multiple_of(page));
    let range = AddressRange::new(start, page).expect("a page");
    for _ in 0..2 {
        // SAFETY: the vector outlives the registration.
        match unsafe { registrar.register(range) } {
            Ok(()) => {}
            Err(why) if why.kind() == ErrorKind::Unsupported => return skip(why.to_string()),
            Err(why) => panic!("register a page: {why}"),
        }
        registrar.unregister(range).expect("unregister");
        let error = registrar.unregister(range).expect_err("the page is not registered");
        assert_kind(&error, ErrorKind::InvalidArgument, "unregistering a page twice");
    }
    Ok(())
}

pub(super) fn inbound_flush_succeeds_on_every_device(iface: &Arc<dyn Iface>) -> Outcome {
    let Some(flush) = iface.inbound_flush() else {
        return skip("inbound writes are visible without a flush on this iface");
    };
    let request = request(iface, LEN)?;
    let devices = iface.devices().expect("list the devices");
    if devices.is_empty() {
        return skip("the iface has no devices");
    }
    for device in devices.iter().map(|device| device.id) {
        // A device without allocations may be inactive, so the test allocates before it flushes.
        let buffer = DeviceBuffer::allocate(iface, &AllocRequest { device, ..request });
        let _buffer = buffer.expect("allocate");
        match flush.flush(device) {
            // A device may need a flush that its driver does not offer.
            Err(why) if why.kind() == ErrorKind::Unsupported => return skip(why.to_string()),
            flushed => flushed.unwrap_or_else(|error| panic!("flush device {device:?}: {error}")),
        }
    }
    Ok(())
}

pub(super) fn missing_facet_is_an_unsupported_error(iface: &Arc<dyn Iface>) -> Outcome {
    let lacking = lacking(&**iface);
    if lacking.is_empty() {
        return skip("the iface has every facet");
    }
    for facet in lacking {
        let error = iface.unavailable(facet);
        assert!(is_missing(&error), "{facet:?}: {error}");
        assert_eq!(error.iface_kind(), Some(iface.kind()), "{facet:?}: {error}");
        if iface.kind().is_plug_in() {
            let name = error.iface_name().map(ToString::to_string);
            assert_eq!(name.as_deref(), Some(iface.name()), "{facet:?}: the name of the iface");
        }
    }
    Ok(())
}
