//! Finds the path of a registration: allocates a page, registers it, and undoes both.

use std::sync::Arc;

use hmem::{
    Access, AllocationKind, Decision, DeviceBuffer, DeviceId, Error, ErrorKind, Iface, Region,
    Result, iface::AllocRequest, path::P2pPolicy,
};

use crate::machine::{Machine, ProviderNic};

/// Bytes to register: the smallest page size.
const PAGE: u64 = 4096;

/// Registers a page of host memory and returns the path decision.
///
/// # Errors
/// The error of the NIC if a domain cannot be opened or closed, or the registration fails.
pub(crate) fn host(machine: &Machine, nic: &ProviderNic) -> Result<Arc<Decision>> {
    let domain = machine.open(nic, P2pPolicy::Enabled)?;
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let registered = domain.register(vec![0u8; PAGE as usize], access)?;
    let decision = Arc::clone(registered.decision()?);
    close(registered)?;
    domain.close()?;
    Ok(decision)
}

/// Registers a page of device memory and returns the path decision.
///
/// # Errors
/// - [`ErrorKind::Unsupported`] if the iface cannot allocate memory.
/// - The error of the iface if the allocation fails.
/// - The error of the NIC if a domain cannot be opened or closed, or the registration fails.
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
    let request = AllocRequest { len: PAGE, device, kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(iface, &request)?;
    let domain = machine.open(nic, P2pPolicy::Enabled)?;
    let registered = domain.register(buffer, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    let decision = Arc::clone(registered.decision()?);
    drop(close(registered)?);
    domain.close()?;
    Ok(decision)
}

fn close<M: hmem::Memory>(registered: Region<M>) -> Result<M> {
    registered.close().map_err(Error::from)
}
