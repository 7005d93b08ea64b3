//! The inventory as tables.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use comfy_table::Cell;

use super::{
    CacheEntry, CacheMonitorEntry, DeviceMonitorEntry, GdrcopyEntry, IfaceEntry, Inventory,
    NicEntry, P2pEntry,
};
use crate::table::{Style, Tone, bytes, some};

/// Prints the inventory for a person.
///
/// # Errors
/// What the writer reported.
pub fn text(out: &mut dyn Write, inventory: &Inventory, style: Style) -> io::Result<()> {
    ifaces(out, &inventory.ifaces, style)?;
    devices(out, inventory, style)?;
    nics(out, &inventory.providers, style)?;
    p2p(out, &inventory.p2p, style)?;
    cache(out, &inventory.cache, style)?;
    cache_monitor(out, &inventory.cache_monitor, style)?;
    device_monitors(out, &inventory.device_monitors, style)?;
    gdrcopy(out, &inventory.gdrcopy, style)?;
    if !inventory.absent.is_empty() {
        style.heading(out, "Not here")?;
        for absent in &inventory.absent {
            style.item(out, &format!("{}:", absent.what), &absent.why)?;
        }
    }
    Ok(())
}

fn ifaces(out: &mut dyn Write, ifaces: &[IfaceEntry], style: Style) -> io::Result<()> {
    style.heading(out, "Ifaces")?;
    let mut table = style.table(&["Name", "Kind", "State", "Can do"]);
    for iface in ifaces {
        let state = match (iface.available, iface.software) {
            (true, false) => style.cell("available", Tone::Good),
            (true, true) => style.cell("simulation", Tone::Good),
            (false, _) => style.cell("absent", Tone::Dim),
        };
        let kind =
            if iface.kind < 0x100 { iface.kind.to_string() } else { format!("{:#x}", iface.kind) };
        let can = match (&iface.reason, &iface.remedy) {
            (Some(reason), Some(remedy)) => format!("{reason}\n-> {remedy}"),
            (Some(reason), None) => reason.clone(),
            (None, _) => iface.capability.join(", "),
        };
        let tone = if iface.available { Cell::new(can) } else { style.cell(can, Tone::Dim) };
        table.add_row([Cell::new(&iface.name), style.number(kind), state, tone]);
    }
    style.print(out, &table)
}

fn cache(out: &mut dyn Write, cache: &CacheEntry, style: Style) -> io::Result<()> {
    style.heading(out, "Registration cache of domains that have one")?;
    if let Some(setting) = cache.disabled_by {
        style.item(out, "off:", &format!("{setting} is 0: memory is registered anew each time"))?;
    }
    let bytes = match cache.max_bytes {
        u64::MAX => "any number of bytes".to_owned(),
        max => format!("{} of memory", bytes(max)),
    };
    style.item(out, "limits:", &format!("{} entries, {bytes}", cache.max_count))?;
    let merging = if cache.merge { "on" } else { "off" };
    style.item(out, "merging:", merging)?;
    writeln!(out)
}

fn cache_monitor(out: &mut dyn Write, monitor: &CacheMonitorEntry, style: Style) -> io::Result<()> {
    style.heading(out, "Cache monitor of host memory")?;
    let asked = if monitor.requested == monitor.name { "" } else { ", picked" };
    style.item(out, &format!("{}{asked}:", monitor.name), &monitor.why)?;
    style.item(out, "limits:", &monitor.limits)?;
    for tried in &monitor.candidates {
        let verdict = match (&tried.refused, &tried.remedy) {
            (None, _) => "passed its test".to_owned(),
            (Some(refused), Some(remedy)) => format!("refused: {refused} -> {remedy}"),
            (Some(refused), None) => format!("refused: {refused}"),
        };
        style.item(out, &format!("tried {}:", tried.name), &verdict)?;
    }
    writeln!(out)
}

fn device_monitors(
    out: &mut dyn Write,
    monitors: &[DeviceMonitorEntry],
    style: Style,
) -> io::Result<()> {
    if monitors.is_empty() {
        return Ok(());
    }
    style.heading(out, "Cache monitors of devices")?;
    for monitor in monitors {
        let name = monitor.name.as_deref().unwrap_or("none");
        let remedy =
            monitor.remedy.as_ref().map(|remedy| format!(" -> {remedy}")).unwrap_or_default();
        style.item(
            out,
            &format!("{}:", monitor.iface),
            &format!("{name}: {}{remedy}", monitor.why),
        )?;
    }
    writeln!(out)
}

fn gdrcopy(out: &mut dyn Write, gdrcopy: &GdrcopyEntry, style: Style) -> io::Result<()> {
    style.heading(out, "GDRCopy (the CPU's own access to CUDA memory)")?;
    let head = format!("{}:", gdrcopy.library);
    let remedy = gdrcopy.remedy.as_ref().map(|remedy| format!(" -> {remedy}")).unwrap_or_default();
    match &gdrcopy.reason {
        None => style.item(out, &head, "there, and its kernel module opens")?,
        Some(reason) => style.item(out, &head, &format!("absent: {reason}{remedy}"))?,
    }
    writeln!(out)
}

fn devices(out: &mut dyn Write, inventory: &Inventory, style: Style) -> io::Result<()> {
    if inventory.devices.is_empty() {
        return Ok(());
    }
    style.heading(out, "Devices")?;
    let mut table = style.table(&["Device", "Name", "PCI bus id", "Memory"]);
    for device in &inventory.devices {
        table.add_row([
            Cell::new(format!("{}:{}", device.iface, device.device)),
            Cell::new(&device.name),
            Cell::new(device.pci_bus_id.as_deref().unwrap_or("-")),
            style.number(bytes(device.memory)),
        ]);
    }
    style.print(out, &table)
}

fn list<T: AsRef<str>>(names: &[T]) -> String {
    let names: Vec<_> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// A line of the table of NICs.
type Attribute = fn(&NicEntry) -> String;

/// One column for each NIC: there are few of them, and much to say of each.
/// Names the ordered pairs of requests; those of RMA and atomics alone are parts of them.
fn order(nic: &NicEntry) -> String {
    let pairs: Vec<_> = nic.order.iter().filter(|name| name.len() == 3).cloned().collect();
    if pairs.len() == 9 { "all".to_owned() } else { list(&pairs) }
}

fn nics(out: &mut dyn Write, nics: &[NicEntry], style: Style) -> io::Result<()> {
    if nics.is_empty() {
        return Ok(());
    }
    style.heading(out, "NICs")?;
    let names: Vec<_> = nics.iter().map(|nic| format!("{}/{}", nic.provider, nic.nic)).collect();
    let header: Vec<_> = std::iter::once("").chain(names.iter().map(String::as_str)).collect();
    let mut table = style.table(&header);
    let attributes: [(&str, Attribute); 15] = [
        ("kind", |nic| {
            if nic.software { "software, in this process" } else { "hardware" }.to_owned()
        }),
        ("stands for", |nic| nic.note.clone()),
        ("PCI bus id", |nic| nic.pci_bus_id.clone().unwrap_or_else(|| "-".into())),
        ("needs mr_mode", |nic| list(&nic.required_mr_mode)),
        ("imports", |nic| list(&nic.imports)),
        ("key, raw key", |nic| format!("{} B, {} B", nic.key_size, nic.raw_key_size)),
        ("region: ranges", |nic| nic.mr_iov_limit.to_string()),
        ("region: size", |nic| bytes(nic.max_mr_size)),
        ("regions at once", |nic| nic.max_mr_count.to_string()),
        ("page sizes", |nic| {
            list(&nic.page_sizes.iter().map(|size| bytes(*size as u64)).collect::<Vec<_>>())
        }),
        ("windows", |nic| match &nic.features {
            Some(_) => format!("types {}", list(&nic.windows)),
            None => "unknown".to_owned(),
        }),
        ("progress", |nic| nic.progress.to_owned()),
        ("order", order),
        ("features", |nic| {
            nic.features.as_ref().map_or_else(|| "unknown".to_owned(), |features| list(features))
        }),
        ("flags", |nic| list(&nic.flags)),
    ];
    for (name, value) in attributes {
        let values: Vec<_> = nics.iter().map(value).collect();
        if values.iter().all(|value| value == "-") {
            continue;
        }
        table.add_row(std::iter::once(name.to_owned()).chain(values));
    }
    style.print(out, &table)
}

fn p2p(out: &mut dyn Write, entries: &[P2pEntry], style: Style) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    style.heading(out, "Paths (a page of each was registered just now)")?;
    let mut nics: Vec<String> = Vec::new();
    let mut rows: Vec<(String, BTreeMap<String, Cell>)> = Vec::new();
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unknown: Vec<String> = Vec::new();
    for entry in entries {
        let nic = format!("{}/{}", entry.provider, entry.nic);
        let memory = match entry.device {
            Some(device) => format!("{}:{device}", entry.iface),
            None => format!("{} (host)", entry.iface),
        };
        let direct = entry.path.is_some_and(|path| path != "staged");
        let path = entry.path.unwrap_or("none");
        let shown = entry
            .distance
            .map_or_else(|| path.to_owned(), |distance| format!("{path} ({distance})"));
        let cell = style.cell(shown, if direct { Tone::Good } else { Tone::Dim });
        if let Some(why) = entry.distance_unknown.clone().filter(|why| !unknown.contains(why)) {
            unknown.push(why);
        }
        let mut reason = format!("{}: {}", entry.path.unwrap_or("none"), entry.reason);
        // The whole errors, with their addresses, are in the JSON.
        for attempt in
            entry.trace.iter().filter(|attempt| entry.path.is_some() && attempt.error.is_some())
        {
            let cause =
                attempt.cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default();
            reason.push_str(&format!("; {} refused{cause}", attempt.path));
            if let Some(remedy) = &attempt.remedy {
                reason.push_str(&format!(" -> {remedy}"));
            }
        }
        if let Some(remedy) = &entry.remedy {
            reason.push_str(&format!(" -> {remedy}"));
        }
        let between = format!("{memory} to {nic}");
        reasons.entry(reason).or_default().extend((!direct).then_some(between));
        if !nics.contains(&nic) {
            nics.push(nic.clone());
        }
        match rows.iter_mut().find(|(name, _)| *name == memory) {
            Some((_, cells)) => {
                cells.insert(nic, cell);
            }
            None => rows.push((memory, BTreeMap::from([(nic, cell)]))),
        }
    }
    let header: Vec<_> = std::iter::once("Memory").chain(nics.iter().map(String::as_str)).collect();
    let mut table = style.table(&header);
    for (memory, mut cells) in rows {
        let paths = nics.iter().map(|nic| cells.remove(nic).unwrap_or_else(|| Cell::new("-")));
        table.add_row(std::iter::once(Cell::new(memory)).chain(paths));
    }
    style.print(out, &table)?;
    for (reason, pairs) in &reasons {
        match pairs.as_slice() {
            [] => style.item(out, "", reason)?,
            pairs => style.item(out, "", &format!("{reason} ({})", some(pairs)))?,
        }
    }
    if !unknown.is_empty() {
        style.item(out, "no distance:", &some(&unknown))?;
    }
    writeln!(out)
}
