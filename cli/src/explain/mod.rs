//! `hmem explain`: which path a registration takes, why, and what would make it better.

mod report;

use std::sync::Arc;

use hmem::{
    DeviceId, Error, ErrorKind, Iface, IfaceKind, Result,
    cause::Step,
    p2p::path::{ExplainRequest, Explanation},
};

pub use self::report::{Entry, FindingEntry, Report, Wiring, text};
use crate::{
    args::ExplainArgs,
    check::unknown,
    json::Skipped,
    machine::{Fabric, Machine, reason_and_remedy, root},
};

/// A pair of memory and NIC.
struct Pair<'a> {
    iface: &'a Arc<dyn Iface>,
    device: Option<DeviceId>,
    /// The device's memory in bytes, and its PCI address.
    memory: Option<u64>,
    nic: &'a Fabric,
}

/// Explains every pair that was asked for.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for an iface, device or NIC that this machine does not know,
/// naming those that it does.
pub fn explain(machine: &Machine, args: &ExplainArgs) -> Result<Report> {
    if let Some(name) = args.iface.as_deref().filter(|name| !machine.knows_iface(name)) {
        return Err(unknown("explain --iface", name, &machine.iface_names()));
    }
    let nics = machine.provider_names();
    if let Some(name) = args.nic.as_ref().filter(|name| !nics.contains(name)) {
        return Err(unknown("explain --nic", name, &nics));
    }
    let mut skipped = Vec::new();
    let mut explanations = Vec::new();
    for pair in pairs(machine, args, &mut skipped)? {
        let request = ExplainRequest::new(pair.iface.kind())
            .device(pair.device)
            .nic(pair.nic.attr.nic.name.clone())
            .size(args.size.unwrap_or_else(|| ExplainRequest::new(pair.iface.kind()).size))
            .policy(args.policy);
        match found(machine, &pair, &request) {
            Ok(explanation) => {
                explanations.push(Entry::new(machine, &pair.into_names(machine), &explanation))
            }
            Err(error) => {
                let (why, remedy) = reason_and_remedy(root(&error));
                let why = remedy.map_or_else(|| why.clone(), |remedy| format!("{why} -> {remedy}"));
                skipped.push(Skipped { what: pair.name(machine), why });
            }
        }
    }
    Ok(Report::new(explanations, skipped))
}

fn found(machine: &Machine, pair: &Pair<'_>, request: &ExplainRequest) -> Result<Explanation> {
    if pair.device.is_some() && pair.iface.allocator().is_none() {
        return Err(Error::new(ErrorKind::Unsupported, "allocate")
            .iface(pair.iface.kind())
            .remedy("this iface does not allocate yet, so that nothing can be tried"));
    }
    pair.nic.explain(&machine.hmem, request)
}

fn pairs<'a>(
    machine: &'a Machine,
    args: &ExplainArgs,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<Pair<'a>>> {
    let wanted = |iface: &str| args.iface.as_deref().is_none_or(|wanted| wanted == iface);
    let nics: Vec<_> = machine
        .nics
        .iter()
        .filter(|nic| args.nic.as_deref().is_none_or(|name| nic.answers_to(name)))
        .collect();
    let absent = machine.absent.iter().filter(|absent| match &args.nic {
        // A NIC that exists and cannot be opened concerns everybody who asks for all.
        None => absent.sort == "NIC",
        Some(name) => nics.is_empty() && *name == absent.name,
    });
    skipped.extend(absent.map(Skipped::from));
    for (kind, why) in machine.hmem.registry().absent() {
        let name = machine.iface_name(kind);
        // All are absent on most machines; who asks for one by name wants to know.
        if args.iface.as_ref() == Some(&name) {
            let why = machine.explained(Step::OpenDevice, why);
            skipped.push(Skipped { what: format!("iface {name}"), why });
        }
    }
    let mut pairs = Vec::new();
    for iface in machine.hmem.registry().iter().filter(|iface| wanted(iface.name())) {
        let mut devices = Vec::new();
        if iface.kind() == IfaceKind::SYSTEM {
            devices.push((None, None));
        } else {
            match iface.devices() {
                Ok(found) => devices
                    .extend(found.iter().map(|device| (Some(device.id), Some(device.memory)))),
                Err(error) => skipped.push(Skipped {
                    what: format!("devices of {}", iface.name()),
                    why: error.to_string(),
                }),
            }
        }
        if let Some(number) = args.device {
            let known: Vec<_> = devices
                .iter()
                .filter_map(|(device, _)| Some(device.as_ref()?.0.to_string()))
                .collect();
            devices.retain(|(device, _)| *device == Some(DeviceId(number)));
            if devices.is_empty() {
                return Err(unknown("explain --device", &number.to_string(), &known));
            }
        }
        for (device, memory) in devices {
            pairs.extend(nics.iter().map(|nic| Pair { iface, device, memory, nic }));
        }
    }
    Ok(pairs)
}

/// A pair by its names.
pub(crate) struct Names {
    iface: String,
    provider: String,
    nic: String,
    memory: Option<u64>,
}

impl Pair<'_> {
    fn name(&self, machine: &Machine) -> String {
        let iface = machine.iface_name(self.iface.kind());
        let device = self.device.map(|device| format!(":{device}")).unwrap_or_default();
        format!("{iface}{device} to {}", self.nic.attr.nic)
    }

    fn into_names(self, machine: &Machine) -> Names {
        Names {
            iface: machine.iface_name(self.iface.kind()),
            provider: self.nic.attr.nic.provider.clone(),
            nic: self.nic.attr.nic.name.clone(),
            memory: self.memory,
        }
    }
}
