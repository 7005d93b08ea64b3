//! The port of a device that endpoints use.

#![allow(unsafe_code, reason = "calls the library to query a port")]

use std::ffi::c_int;

use hmem_core::{ErrorKind, Result};

use super::{
    device::OpenDevice,
    errors,
    gid::{self, GidEntry, choose_gid},
    sys::{IBV_QPF_GRH_REQUIRED, LinkLayer, PortAttr, PortState},
};

/// Port and GID table entry that the application chose.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PortChoice {
    /// Number of the port; `None` for the first active port.
    pub(super) number: Option<u8>,
    /// Index in the port's GID table; `None` for the default ([`Port::describe`]).
    pub(super) gid_index: Option<u8>,
}

/// Properties of a port that are needed to connect a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) lid: u16,
    /// Code of the maximum payload of a packet (`enum ibv_mtu`).
    pub(super) mtu: c_int,
    /// Maximum length of a message or an RMA transfer in bytes.
    pub(super) max_message: u64,
    /// The GID of connections; `None` for an InfiniBand port whose peers are reached by the LID.
    pub(super) gid: Option<GidEntry>,
}

impl Port {
    /// Returns the port that `choice` selects. A port that the application chose may be inactive.
    ///
    /// # Errors
    /// - Unavailable: no port is active, or the port lacks the GID.
    /// - The driver's error, also for a port number that the device does not have.
    pub(super) fn find(device: &OpenDevice, choice: PortChoice) -> Result<Self> {
        let ports = device.attr.phys_port_cnt;
        let mut down = Vec::new();
        for number in choice.number.map_or(1..=ports.max(1), |port| port..=port) {
            let mut attr = PortAttr::default();
            let query = device.library.functions.query_port;
            // SAFETY: the context is open; the attributes are writable and zeroed, as the header's
            // inline fallback passes them.
            let queried = unsafe { query(device.context, number, &mut attr) };
            device.check("ibv_query_port", queried).map_err(|error| {
                let why = format!("the device has {ports} ports, from 1 on");
                errors::advise(error.context("port", number), why)
            })?;
            if choice.number.is_none() && attr.state != PortState::IBV_PORT_ACTIVE {
                down.push(format!("{number}: {}", attr.state.name().unwrap_or("unknown state")));
                continue;
            }
            return Self::describe(device, number, &attr, choice.gid_index);
        }
        let why = "bring the link up, or choose a port: no port is active";
        let refused = device.refuse(ErrorKind::Unavailable, "ibv_query_port", why);
        Err(refused.context("ports", down.join(", ")))
    }

    /// Returns the properties of a port. The GID is the entry with the index `gid_index`. If that
    /// is `None`, the link layer decides:
    ///
    /// - An Ethernet port gets the GID of [`choose_gid`].
    /// - Another port gets the entry 0 if its packets must have a global route header, and else
    ///   none.
    fn describe(
        device: &OpenDevice,
        number: u8,
        attr: &PortAttr,
        gid_index: Option<u8>,
    ) -> Result<Self> {
        let table = || gid::table(device, number, attr);
        let no_gid = || {
            let why = "assign an address to the port's network interface: the port has no such GID";
            device.refuse(ErrorKind::Unavailable, "ibv_query_gid", why).context("port", number)
        };
        let is_ethernet = attr.link_layer == LinkLayer::IBV_LINK_LAYER_ETHERNET;
        let is_routed = !is_ethernet && attr.flags & IBV_QPF_GRH_REQUIRED != 0;
        let gid = match gid_index.or(is_routed.then_some(0)) {
            Some(index) => {
                let entry = table()?.into_iter().find(|entry| entry.index == index);
                Some(entry.ok_or_else(|| no_gid().context("index", index))?)
            }
            None if is_ethernet => Some(choose_gid(&table()?).ok_or_else(no_gid)?),
            None => None,
        };
        tracing::debug!(nic = %device.nic, port = number, ?gid, "port chosen");
        let max_message = if attr.max_msg_sz == 0 { 1 << 30 } else { u64::from(attr.max_msg_sz) };
        Ok(Self { number, lid: attr.lid, mtu: attr.active_mtu, max_message, gid })
    }
}
