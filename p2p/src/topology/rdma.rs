//! RDMA devices of `/sys/class/infiniband`, with their PCI functions and ports.

use hmem_core::Result;

use super::{
    bus_id::BusId,
    device::{is_word, place},
    source::Source,
};

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaDevice {
    /// Name of the device in libibverbs, such as `mlx5_0`.
    pub name: String,
    /// The address of the device's PCI function; `None` for software devices (rxe, siw).
    pub bus_id: Option<BusId>,
    /// The ports, ordered by number.
    pub ports: Vec<RdmaPort>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaPort {
    /// Number of the port. The first port is 1.
    pub number: u32,
    /// Link layer: `InfiniBand` or `Ethernet`; `None` if the kernel does not report it.
    pub link_layer: Option<String>,
    /// True if the port is active; `None` if the kernel does not report it.
    pub active: Option<bool>,
    /// Data rate in gigabits per second, rounded down; `None` if the kernel does not report it.
    pub rate: Option<u32>,
}

pub(super) const FOLDER: &str = "sys/class/infiniband";

pub(super) fn read_all(source: &Source) -> Result<Vec<RdmaDevice>> {
    let mut devices = Vec::new();
    for name in source.names(FOLDER)?.unwrap_or_default() {
        let entry = format!("{FOLDER}/{name}");
        if !is_word(&name) {
            return Err(source.malformed(&entry, "not the name of an RDMA device"));
        }
        // The entry is a link into the device's folder, or a folder if the tree was copied with its
        // links followed.
        let folder = source.link(&entry)?;
        let device = match &folder {
            Some(folder) => Some(folder.clone()),
            None => source.link(&format!("{entry}/device"))?,
        };
        let bus_id =
            device.as_deref().and_then(place).and_then(|place| place.functions.last().copied());
        let ports = ports(source, folder.as_deref().unwrap_or(&entry))?;
        devices.push(RdmaDevice { name, bus_id, ports });
    }
    devices.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
    Ok(devices)
}

/// Returns a sort key for names that end in a number: `mlx5_2` comes before `mlx5_10`.
fn natural(name: &str) -> (&str, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(u64::MAX), name)
}

fn ports(source: &Source, folder: &str) -> Result<Vec<RdmaPort>> {
    let folder = format!("{folder}/ports");
    let mut ports = Vec::new();
    for name in source.names(&folder)?.unwrap_or_default() {
        let at = |file: &str| format!("{folder}/{name}/{file}");
        let Some(number) = name.parse().ok().filter(|number| (1..=255).contains(number)) else {
            return Err(source.malformed(&format!("{folder}/{name}"), "not a port number"));
        };
        let link_layer = source.text(&at("link_layer"))?.filter(|layer| is_word(layer));
        // The text is, for example, "4: ACTIVE".
        let active = source.text(&at("state"))?.map(|state| state.starts_with("4:"));
        // The text is, for example, "200 Gb/sec (4X HDR)" or "2.5 Gb/sec (1X SDR)".
        let rate = source.text(&at("rate"))?;
        let rate =
            rate.as_deref().and_then(|rate| rate.split_once(" Gb/sec")).and_then(|(rate, _)| {
                rate.parse::<f32>()
                    .ok()
                    .filter(|rate| (0.0..1e6).contains(rate))
                    .map(|rate| rate as u32)
            });
        ports.push(RdmaPort { number, link_layer, active, rate });
    }
    ports.sort_by_key(|port| port.number);
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_ordered_by_number() {
        let mut names = ["mlx5_10", "mlx5_2", "efa_0", "mlx5_1", "rxe"];
        names.sort_by(|a, b| natural(a).cmp(&natural(b)));
        assert_eq!(names, ["efa_0", "mlx5_1", "mlx5_2", "mlx5_10", "rxe"]);
    }
}
