//! Prints the inventory of the machine as text.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use super::{
    CacheEntry, CacheMonitorEntry, DeviceMonitorEntry, GdrcopyEntry, IfaceEntry, Inventory,
    NicEntry, P2pEntry,
};
use crate::{
    json::{Attempt, memory_name},
    libfabric,
    problem::Problem,
    table::{Cell, Style, Table, Tone, abbreviated, bytes, grouped, list_or},
};

/// Prints the inventory as readable text instead of JSON.
///
/// # Errors
/// Fails if writing to `out` fails.
pub fn text(out: &mut dyn Write, inventory: &Inventory, style: Style) -> io::Result<()> {
    ifaces(out, &inventory.ifaces, style)?;
    devices(out, inventory, style)?;
    nics(out, &inventory.providers, style)?;
    p2p(out, &inventory.p2p, style)?;
    cache(out, &inventory.cache, style)?;
    cache_monitor(out, &inventory.cache_monitor, style)?;
    device_monitors(out, &inventory.device_monitors, style)?;
    gdrcopy(out, &inventory.gdrcopy, style)?;
    let ifaces = inventory.ifaces.iter();
    let unavailable: Vec<_> =
        ifaces.filter_map(|iface| Some((&iface.name, iface.problem.as_ref()?))).collect();
    if !inventory.absent.is_empty() || !unavailable.is_empty() {
        style.heading(out, "Unavailable")?;
        for (name, problem) in unavailable {
            problem.item(out, &format!("iface {name}:"), style)?;
        }
        for absent in &inventory.absent {
            absent.problem.item(out, &format!("{}:", absent.what), style)?;
        }
    }
    Ok(())
}

fn ifaces(out: &mut dyn Write, ifaces: &[IfaceEntry], style: Style) -> io::Result<()> {
    style.heading(out, "Ifaces")?;
    let mut table = Table::new(&["Name", "Kind", "State", "Features"]).numbers([1]);
    for iface in ifaces {
        let state = match (iface.available, iface.software) {
            (true, false) => Cell::in_tone("available", Tone::Good),
            (true, true) => Cell::in_tone("simulation", Tone::Good),
            (false, _) => Cell::in_tone("unavailable", Tone::Dim),
        };
        let kind =
            if iface.kind < 0x100 { iface.kind.to_string() } else { format!("{:#x}", iface.kind) };
        let features = match &iface.problem {
            Some(_) => Cell::none(),
            None => Cell::new(iface.capability.join(", ")),
        };
        table.row([Cell::new(&iface.name), Cell::new(kind), state, features]);
    }
    style.print(out, &table)
}

fn cache(out: &mut dyn Write, cache: &CacheEntry, style: Style) -> io::Result<()> {
    style.heading(out, "Registration caches")?;
    if let Some(setting) = cache.disabled_by {
        let text = format!("{setting} disables them: each registration is a new one");
        style.item(out, "off:", &text)?;
    }
    let bytes = match cache.max_bytes {
        u64::MAX => "any number of bytes".to_owned(),
        max => format!("{} of memory", bytes(max)),
    };
    style.item(out, "limits:", &format!("{} entries, {bytes}", cache.max_count))?;
    let merging = if cache.merge { "on" } else { "off" };
    style.item(out, "merging:", merging)?;
    match &cache.problem {
        None => style.item(out, "lookups:", "fast, with membarrier")?,
        Some(problem) => problem.item(out, "lookups are correct but slower:", style)?,
    }
    writeln!(out)
}

fn cache_monitor(out: &mut dyn Write, monitor: &CacheMonitorEntry, style: Style) -> io::Result<()> {
    style.heading(out, "Cache monitor of host memory")?;
    let chosen = if monitor.requested == monitor.name { "" } else { ", chosen" };
    style.item(out, &format!("{}{chosen}:", monitor.name), &monitor.why)?;
    style.item(out, "limits:", &monitor.limits)?;
    for tried in &monitor.candidates {
        let head = format!("tried {}:", tried.name);
        match &tried.problem {
            None => style.item(out, &head, "passed its test")?,
            Some(problem) => problem.item(out, &format!("{head} rejected:"), style)?,
        }
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
        style.item(out, &format!("{}: {name}:", monitor.iface), &monitor.why)?;
        if let Some(remedy) = &monitor.remedy {
            style.detail(out, "remedy:", remedy)?;
        }
    }
    writeln!(out)
}

fn gdrcopy(out: &mut dyn Write, gdrcopy: &GdrcopyEntry, style: Style) -> io::Result<()> {
    style.heading(out, "GDRCopy (CPU access to CUDA memory)")?;
    let head = format!("{}:", gdrcopy.library);
    match &gdrcopy.problem {
        None => style.item(out, &head, "available, and its kernel module opens")?,
        Some(problem) => problem.item(out, &format!("{head} unavailable:"), style)?,
    }
    writeln!(out)
}

fn devices(out: &mut dyn Write, inventory: &Inventory, style: Style) -> io::Result<()> {
    if inventory.devices.is_empty() {
        return Ok(());
    }
    style.heading(out, "Devices")?;
    let mut table = Table::new(&["Device", "Name", "PCI address", "Memory"]).numbers([3]);
    for device in &inventory.devices {
        table.row([
            Cell::new(memory_name(&device.iface, Some(device.device))),
            Cell::new(&device.name),
            device.pci_bus_id.as_ref().map_or_else(Cell::none, Cell::new),
            Cell::new(bytes(device.memory)),
        ]);
    }
    style.print(out, &table)
}

fn list<T: AsRef<str>>(names: &[T]) -> String {
    list_or("none", names)
}

/// Lists the pairs of [`NicEntry::order`] whose names have three letters, or returns `all` if all
/// nine such pairs are there. Pairs of only RMA or only atomics have longer names and are left out.
fn order(nic: &NicEntry) -> String {
    let pairs: Vec<_> = nic.order.iter().filter(|name| name.len() == 3).cloned().collect();
    if pairs.len() == 9 { "all".to_owned() } else { list(&pairs) }
}

/// Returns `hardware` or `software`. A NIC of libfabric is hardware if it has a PCI address.
fn kind(nic: &NicEntry) -> String {
    let of_libfabric = nic.provider == libfabric::NAME && nic.pci_bus_id.is_none();
    if nic.software || of_libfabric { "software" } else { "hardware" }.to_owned()
}

/// A function that formats one attribute of a NIC.
type Attribute = fn(&NicEntry) -> String;

/// The attributes of a NIC, each with its name.
const ATTRIBUTES: [(&str, Attribute); 15] = [
    ("kind", kind),
    ("description", |nic| nic.note.clone()),
    ("PCI address", |nic| nic.pci_bus_id.clone().unwrap_or_else(|| "-".into())),
    ("required mr_mode", |nic| list(&nic.required_mr_mode)),
    ("imports", |nic| list(&nic.imports)),
    ("key, raw key", |nic| format!("{} B, {} B", nic.key_size, nic.raw_key_size)),
    ("region: ranges", |nic| nic.mr_iov_limit.to_string()),
    ("region: size", |nic| bytes(nic.max_mr_size)),
    ("regions", |nic| match nic.max_mr_count {
        u64::MAX => "no limit".to_owned(),
        count => count.to_string(),
    }),
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

/// Prints a table of NICs, with a line for each attribute and a column for each NIC. If there are
/// several NICs, attributes that are equal for all are in a list beneath the table instead.
fn nics(out: &mut dyn Write, nics: &[NicEntry], style: Style) -> io::Result<()> {
    if nics.is_empty() {
        return Ok(());
    }
    style.heading(out, "NICs")?;
    let names: Vec<_> = nics.iter().map(|nic| format!("{}/{}", nic.provider, nic.nic)).collect();
    let header: Vec<_> = std::iter::once("").chain(names.iter().map(String::as_str)).collect();
    let mut table = Table::new(&header);
    let mut shared = Vec::new();
    for (name, attribute) in ATTRIBUTES {
        let values: Vec<_> = nics.iter().map(attribute).collect();
        let equal = values.iter().all(|value| *value == values[0]);
        match values[0].as_str() {
            "-" if equal => {}
            _ if equal && nics.len() > 1 => shared.push((name, values[0].clone())),
            _ => table.row([name.to_owned()].into_iter().chain(values).map(Cell::new)),
        }
    }
    table.print_columns(out, style)?;
    if !shared.is_empty() {
        style.item(out, "all", "NICs")?;
        for (name, value) in shared {
            style.detail(out, &format!("{name}:"), &value)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn p2p(out: &mut dyn Write, entries: &[P2pEntry], style: Style) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    style.heading(out, "Paths (a page was registered for each)")?;
    let mut nics: Vec<String> = Vec::new();
    let mut cells = Vec::new();
    let mut reasons: BTreeMap<(Problem, Vec<Advice>), Vec<String>> = BTreeMap::new();
    let mut unknown: Vec<String> = Vec::new();
    for entry in entries {
        let nic = format!("{}/{}", entry.provider, entry.nic);
        let host = if entry.device.is_none() { " (host)" } else { "" };
        let memory = memory_name(&entry.iface, entry.device) + host;
        let direct = entry.path.is_some_and(|path| path != "staged");
        let path = entry.path.unwrap_or("none");
        let distance = entry.distance.map(|distance| format!(" ({distance})")).unwrap_or_default();
        let tone = if direct { Tone::Good } else { Tone::Dim };
        let cell = Cell::in_tone(format!("{path}{distance}"), tone);
        if let Some(why) = entry.distance_unknown.clone().filter(|why| !unknown.contains(why)) {
            unknown.push(why);
        }
        let between = format!("{memory} to {nic}");
        reasons.entry(reason(entry)).or_default().extend((!direct).then_some(between));
        if !nics.contains(&nic) {
            nics.push(nic.clone());
        }
        cells.push((memory, (nic, cell)));
    }
    let header: Vec<_> = std::iter::once("Memory").chain(nics.iter().map(String::as_str)).collect();
    let mut table = Table::new(&header);
    for (memory, cells) in grouped(cells.into_iter()) {
        let mut cells = BTreeMap::from_iter(cells);
        let paths = nics.iter().map(|nic| cells.remove(nic).unwrap_or_else(Cell::none));
        table.row(std::iter::once(Cell::new(memory)).chain(paths));
    }
    style.print(out, &table)?;
    for ((problem, advice), pairs) in &reasons {
        let pairs =
            if pairs.is_empty() { String::new() } else { format!(" ({})", abbreviated(pairs)) };
        style.item(out, "", &format!("{}{pairs}", problem.headline))?;
        problem.details(out, style)?;
        for (aim, remedy) in advice {
            style.detail(out, aim, remedy)?;
        }
    }
    if !unknown.is_empty() {
        style.item(out, "no distance:", &abbreviated(&unknown))?;
    }
    writeln!(out)
}

/// A label such as `to use dma-buf:`, and the remedy that it introduces.
type Advice = (String, String);

/// Returns the reason for a path as a problem, and the advice for each refused path. The refused
/// paths are the causes of the problem. Their errors are only in the JSON output.
fn reason(entry: &P2pEntry) -> (Problem, Vec<Advice>) {
    let headline = format!("{}: {}", entry.path.unwrap_or("none"), entry.reason);
    let refused = entry.trace.iter().filter(|_| entry.path.is_some());
    let refused: Vec<_> = refused.filter(|attempt| attempt.error.is_some()).collect();
    let causes = refused.iter().map(|attempt| {
        let cause = attempt.cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default();
        format!("{} refused{cause}", attempt.path)
    });
    let remedy = entry.remedy.clone();
    let problem = Problem { causes: causes.collect(), remedy, ..Problem::new(headline) };
    let advice = entry.path.map_or_else(Vec::new, |chosen| {
        let of = |attempt: &&Attempt| Some((attempt.remedy_label(chosen), attempt.remedy.clone()?));
        refused.iter().filter_map(of).collect()
    });
    (problem, advice)
}
