//! Finds the path of a registration: allocates a page, registers it, and undoes both.

use std::sync::Arc;

use hmem::{Access, Decision, DeviceId, Error, ErrorKind, Iface, Memory, Result, path::P2pPolicy};

use crate::machine::{Machine, ProviderNic, allocate};

/// Registers a page of host memory and returns the path decision.
pub(crate) fn host(machine: &Machine, nic: &ProviderNic) -> Result<Arc<Decision>> {
    register(machine, nic, vec![0u8; rustix::param::page_size()])
}

/// Registers a page of device memory and returns the path decision.
pub(crate) fn device(
    machine: &Machine,
    nic: &ProviderNic,
    iface: &Arc<dyn Iface>,
    device: DeviceId,
) -> Result<Arc<Decision>> {
    if iface.allocator().is_none() {
        return Err(Error::new(ErrorKind::Unsupported, "allocate")
            .iface(iface)
            .device(device)
            .remedy("choose another iface: this one cannot allocate memory to test with"));
    }
    register(machine, nic, allocate(iface, Some(device), rustix::param::page_size() as u64)?)
}

/// Registers memory, returns the path decision, and frees the memory.
fn register(machine: &Machine, nic: &ProviderNic, memory: impl Memory) -> Result<Arc<Decision>> {
    let domain = nic.open(&machine.hmem, P2pPolicy::Enabled)?;
    let region = domain.register(memory, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    let decision = Arc::clone(region.decision()?);
    drop(region.close()?);
    domain.close()?;
    Ok(decision)
}
