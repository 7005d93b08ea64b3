//! GIDs of a port, and the choice of the GID for a connection.

#![allow(unsafe_code, reason = "calls the library to query GIDs")]

use std::fs;

use hmem_core::{Errno, Result, provider::Nic};

use super::{
    device::OpenDevice,
    errors,
    sys::{Gid, PortAttr},
};

/// Type of a GID, from `/sys/class/infiniband/*/ports/*/gid_attrs/types/*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GidType {
    /// InfiniBand or RoCE version 1. The kernel uses one name for both.
    IbOrRoceV1,
    /// RoCE version 2: UDP over IP.
    RoceV2,
    /// Unknown: the kernel does not report the type.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GidEntry {
    /// Index of the entry in the table.
    pub(super) index: u8,
    /// The GID, in network byte order.
    pub(super) gid: [u8; 16],
    pub(super) kind: GidType,
}

impl GidEntry {
    /// Returns the rank of the entry in the order of preference of
    /// [`Builder::gid_index`](super::Builder::gid_index): 0 for the class that is preferred most.
    fn rank(&self) -> u8 {
        let [first, second, ..] = self.gid;
        let link_local = first == 0xfe && second & 0xc0 == 0x80;
        let ipv4 = self.gid[..10] == [0; 10] && self.gid[10..12] == [0xff, 0xff];
        match self.kind {
            GidType::RoceV2 if ipv4 => 0,
            GidType::RoceV2 if !link_local => 1,
            GidType::RoceV2 => 2,
            GidType::Unknown => 3,
            GidType::IbOrRoceV1 if !link_local => 4,
            GidType::IbOrRoceV1 => 5,
        }
    }
}

/// Returns the GID that an Ethernet port prefers: of the entries with the lowest
/// [`GidEntry::rank`], the one with the lowest index. `entries` are the port's nonzero GIDs.
/// Returns `None` if there are none.
pub(super) fn choose_gid(entries: &[GidEntry]) -> Option<GidEntry> {
    entries.iter().min_by_key(|entry| (entry.rank(), entry.index)).copied()
}

/// Returns the nonzero entries of a port's GID table. Reads at most 255 entries, because the index
/// in the attributes of a queue pair has 8 bits.
pub(super) fn table(device: &OpenDevice, port: u8, attr: &PortAttr) -> Result<Vec<GidEntry>> {
    let mut entries = Vec::new();
    for index in 0..u8::try_from(attr.gid_tbl_len.max(0)).unwrap_or(u8::MAX) {
        let mut gid = Gid::default();
        let query = device.library.functions.query_gid;
        // SAFETY: the context is open as long as `device`; `gid` is writable for the call.
        let done = unsafe { query(device.context, port, i32::from(index), &mut gid) };
        match errors::status(done) {
            Ok(()) => {}
            // Kernels return these errno values for empty entries.
            Err(Errno(2 | 22 | 61 | 11)) => continue,
            Err(errno) => {
                return Err(errors::call(&device.nic, "ibv_query_gid", errno).context("port", port));
            }
        }
        if gid.raw != [0; 16] {
            entries.push(GidEntry { index, gid: gid.raw, kind: kind(&device.nic, port, index) });
        }
    }
    Ok(entries)
}

/// Returns the type of a GID, as sysfs reports it.
fn kind(nic: &Nic, port: u8, index: u8) -> GidType {
    let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", nic.name);
    match fs::read_to_string(path) {
        Ok(text) if text.trim() == "RoCE v2" => GidType::RoceV2,
        Ok(text) if text.trim() == "IB/RoCE v1" => GidType::IbOrRoceV1,
        _ => GidType::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_routable_gid_is_chosen() {
        let gid = |bytes: [u8; 4], ipv4: bool| {
            let mut gid = [0; 16];
            if ipv4 {
                gid[10..12].fill(0xff);
                gid[12..].copy_from_slice(&bytes);
            } else {
                gid[..4].copy_from_slice(&bytes);
                gid[15] = 1;
            }
            gid
        };
        let entry = |index, gid, kind| GidEntry { index, gid, kind };
        let link = gid([0xfe, 0x80, 0, 0], false);
        let table = [
            entry(0, link, GidType::IbOrRoceV1),
            entry(1, link, GidType::RoceV2),
            entry(2, gid([10, 1, 0, 1], true), GidType::IbOrRoceV1),
            entry(3, gid([10, 1, 0, 1], true), GidType::RoceV2),
            entry(4, gid([0x20, 1, 0, 0], false), GidType::RoceV2),
            entry(5, gid([10, 2, 0, 1], true), GidType::RoceV2),
        ];
        assert_eq!(choose_gid(&table).map(|entry| entry.index), Some(3));
        assert_eq!(choose_gid(&table[..3]).map(|entry| entry.index), Some(1));
        assert_eq!(choose_gid(&table[..1]).map(|entry| entry.index), Some(0));
    }
}
