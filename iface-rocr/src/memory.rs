//! Lookup of addresses: the allocation that an address lies in.

use std::{ffi::c_void, ptr};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    IfaceKind, Result,
};

use crate::{
    error::{check, lacks},
    sys::{self, Agent, Functions, PointerInfo},
};

/// Allocations of ROCr have no identity: the runtime keeps none.
const NO_IDENTITY: AllocationId = AllocationId(0);

/// Returns the allocation around an address, or `None` if the runtime does not know the address.
pub(crate) fn query(
    functions: &Functions,
    agents: &[(Agent, Option<DeviceId>)],
    address: Address,
) -> Result<Option<Allocation>> {
    const CALL: &str = "hsa_amd_pointer_info";
    // The runtime calls the null pointer an invalid argument.
    if address.0 == 0 {
        return Ok(None);
    }
    let mut info = PointerInfo {
        size: size_of::<PointerInfo>() as u32,
        kind: sys::HSA_EXT_POINTER_TYPE_UNKNOWN,
        agent_base: ptr::null_mut(),
        host_base: ptr::null_mut(),
        len: 0,
        user_data: ptr::null_mut(),
        owner: Agent::default(),
        global_flags: 0,
    };
    // SAFETY: `info` is writable and says its size; without an allocator no list of agents is
    // written. The address is only looked up, never dereferenced.
    let code = unsafe {
        (functions.pointer_info)(
            ptr::without_provenance::<c_void>(address.0 as usize),
            &mut info,
            None,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check(code, CALL).map_err(|error| error.context("address", address))?;

    // Of an unknown address nothing but the type is written: read it first.
    let owner = agents.iter().find(|(agent, _)| *agent == info.owner).map(|(_, device)| *device);
    let (kind, device) = match info.kind {
        sys::HSA_EXT_POINTER_TYPE_UNKNOWN => return Ok(None),
        sys::HSA_EXT_POINTER_TYPE_LOCKED => (AllocationKind::Host, None),
        sys::HSA_EXT_POINTER_TYPE_HSA
        | sys::HSA_EXT_POINTER_TYPE_GRAPHICS
        | sys::HSA_EXT_POINTER_TYPE_IPC => {
            match owner {
                Some(None) => (AllocationKind::Host, None),
                Some(device) => (AllocationKind::Device, device),
                // Shared memory may come from a device that this process does not see.
                None => (AllocationKind::Device, None),
            }
        }
        // The runtime gives the queried address itself as the base of mapped memory, and no agent
        // address for memory that is only reserved: where the allocation begins is not to
        // be had.
        other => {
            let name = match other {
                sys::HSA_EXT_POINTER_TYPE_RESERVED_ADDR => "HSA_EXT_POINTER_TYPE_RESERVED_ADDR",
                sys::HSA_EXT_POINTER_TYPE_HSA_VMEM => "HSA_EXT_POINTER_TYPE_HSA_VMEM",
                _ => "unknown",
            };
            return Err(lacks(
                "query",
                "hmem-iface-rocr does not find where memory of this type begins yet",
            )
            .context("address", address)
            .context("type", format_args!("{name} ({other})")));
        }
    };
    // Locked memory has one address for the CPU and may have another for agents.
    for base in [info.agent_base, info.host_base] {
        let range = AddressRange::new(Address::of_ptr(base), info.len as u64)?;
        if !base.is_null() && range.contains(address) {
            return Ok(Some(Allocation {
                iface: IfaceKind::ROCR,
                range,
                device,
                kind,
                id: NO_IDENTITY,
            }));
        }
    }
    Err(Error::new(ErrorKind::Driver, "query")
        .iface(IfaceKind::ROCR)
        .context(
            "reason",
            "the driver's answer does not describe an allocation that holds the address",
        )
        .context("address", address)
        .context("type", info.kind)
        .context("length", info.len))
}
