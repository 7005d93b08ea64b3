//! Lookup of addresses: the allocation that an address lies in, its kind and its identity.

#![allow(unsafe_code, reason = "calls the runtime to look up addresses")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, ErrorKind, IfaceKind, Result,
};

use crate::{
    driver::Runtime,
    error::{ROCR, check},
    sys::{self, Agent, PointerInfo},
    table::{AllocationTable, RocrOrigin, on_free},
};

/// Identity of an allocation that this iface did not make, until the table assigns one. If the
/// runtime has no deallocation callbacks, all memory has this identity.
const NO_IDENTITY: AllocationId = AllocationId(0);

/// Looks up allocations by address.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) table: Arc<AllocationTable>,
}

impl Lookup {
    /// Returns the allocation that contains an address. Returns `None` if the runtime does not know
    /// the address, or if the address lies in an allocation of this iface, but past the length that
    /// was requested.
    ///
    /// # Errors
    /// - Unsupported for VMM memory of the application, and for the address at which devices access
    ///   page-locked host memory, if the CPU has another address for it.
    /// - Driver if the runtime's answer does not describe an allocation at the address.
    /// - Otherwise the error of the runtime.
    pub(crate) fn find(&self, address: Address) -> Result<Option<Allocation>> {
        // The runtime would refuse the null pointer as an invalid argument, so it is not queried.
        if address.0 == 0 {
            return Ok(None);
        }
        let Some((kind, allocation)) = self.describe(address)? else { return Ok(None) };
        match kind {
            sys::HSA_EXT_POINTER_TYPE_HSA => self.identify(address, allocation).map(Some),
            // The runtime calls no callback for memory of this type, so its free is not detected.
            // Each lookup returns a new identity, so that no cached registration matches.
            _ if allocation.id == NO_IDENTITY && self.has_identities() => {
                Ok(Some(Allocation { id: self.table.next_id(), ..allocation }))
            }
            _ => Ok(Some(allocation)),
        }
    }

    /// Returns true if the runtime has deallocation callbacks.
    pub(crate) fn has_identities(&self) -> bool {
        self.runtime.functions.register_deallocation.is_some()
    }

    /// Returns the runtime's type of an address (`HSA_EXT_POINTER_TYPE_*`), and the allocation that
    /// contains the address. An allocation that this iface did not make has the identity
    /// [`NO_IDENTITY`]. Returns `None` in the same cases as [`find`](Self::find).
    fn describe(&self, address: Address) -> Result<Option<(u32, Allocation)>> {
        let info = self.pointer_info(address)?;
        // For an unknown address the runtime writes the type only, so the type is read first.
        let (kind, device) = match info.kind {
            sys::HSA_EXT_POINTER_TYPE_UNKNOWN => return Ok(None),
            sys::HSA_EXT_POINTER_TYPE_LOCKED => (AllocationKind::HostRegistered, None),
            sys::HSA_EXT_POINTER_TYPE_HSA
            | sys::HSA_EXT_POINTER_TYPE_GRAPHICS
            | sys::HSA_EXT_POINTER_TYPE_IPC => {
                // Imported memory may belong to a device that is not visible in this process.
                let device = self.runtime.device_of(info.owner);
                let device = device.map(|device| device.description.id);
                let on_host = self.runtime.is_cpu(info.owner);
                match info.kind {
                    sys::HSA_EXT_POINTER_TYPE_IPC => (AllocationKind::Imported, device),
                    _ if on_host => (AllocationKind::Host, None),
                    sys::HSA_EXT_POINTER_TYPE_HSA => (AllocationKind::Device, device),
                    // Since ROCm 7.2 the runtime opens memory of other processes as dma-bufs, and
                    // reports the type of memory that a graphics API shares.
                    _ => (AllocationKind::Imported, device),
                }
            }
            other => return self.own_virtual(address, other).map(|own| Some((other, own))),
        };
        let within = |base: *mut c_void| {
            let range = AddressRange::new(Address::of_ptr(base), info.len as u64).ok()?;
            (!base.is_null() && range.contains(address)).then_some(range)
        };
        // Page-locked memory may have different addresses for the CPU and for agents.
        let locked = kind == AllocationKind::HostRegistered;
        let base = if locked { info.host_base } else { info.agent_base };
        let Some(range) = within(base) else {
            if locked && within(info.agent_base).is_some() {
                return Err(ROCR
                    .lacks("query", "this is the devices' address of page-locked host memory")
                    .context("address", address)
                    .context("host address", Address::of_ptr(info.host_base))
                    .remedy("use the host address of the memory"));
            }
            return Err(ROCR
                .error(ErrorKind::Driver, "query")
                .context(
                    "why",
                    "the driver's answer does not describe an allocation that holds the address",
                )
                .context("address", address)
                .context("type", info.kind)
                .context("length", info.len));
        };
        let id = NO_IDENTITY;
        let found = Allocation { iface: IfaceKind::ROCR, range, device, kind, id, token: 0 };
        // The runtime may round the length up. The rest of the last page belongs to no allocation.
        let own = self.table.own_around(range.start()).map(|(own, _)| own);
        let own = own.filter(|own| own.kind == kind && range.contains_range(own.range));
        Ok(match own {
            Some(own) if !own.range.contains(address) => None,
            own => Some((info.kind, own.unwrap_or(found))),
        })
    }

    /// Returns the VMM allocation of this iface that contains an address. `kind` is the runtime's
    /// type of the address.
    ///
    /// # Errors
    /// Unsupported for any other memory. The runtime does not report the first address of VMM
    /// memory of the application: it returns the queried address, or the start of the reservation.
    fn own_virtual(&self, address: Address, kind: u32) -> Result<Allocation> {
        if let Some((allocation, RocrOrigin::Virtual { .. })) = self.table.own_around(address) {
            return Ok(allocation);
        }
        let name = match kind {
            sys::HSA_EXT_POINTER_TYPE_RESERVED_ADDR => "HSA_EXT_POINTER_TYPE_RESERVED_ADDR",
            sys::HSA_EXT_POINTER_TYPE_HSA_VMEM => "HSA_EXT_POINTER_TYPE_HSA_VMEM",
            _ => "unknown",
        };
        Err(ROCR
            .lacks("query", "the runtime does not say where memory of this type begins")
            .context("address", address)
            .context("type", format_args!("{name} ({kind})"))
            .remedy("allocate it from a pool (hipMalloc), or through this iface as virtual memory"))
    }

    /// Returns the runtime's information about an address.
    pub(crate) fn pointer_info(&self, address: Address) -> Result<PointerInfo> {
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
        // SAFETY: `info` is writable and says its size; without an allocator argument the runtime
        // returns no list of agents. The address is only looked up, never dereferenced.
        let code = unsafe {
            (self.runtime.functions.pointer_info)(
                ptr::without_provenance::<c_void>(address.0 as usize),
                &mut info,
                None,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check(code, "hsa_amd_pointer_info")
            .map(|()| info)
            .map_err(|error| error.context("address", address))
    }

    /// Returns an allocation from a pool with its identity. At the first lookup of the allocation,
    /// assigns the identity and registers a callback for the free.
    ///
    /// If the runtime refuses the callback, or if the memory was freed during the call, returns an
    /// identity that no other lookup returns.
    fn identify(&self, address: Address, seen: Allocation) -> Result<Allocation> {
        let Some(register) = self.runtime.functions.register_deallocation else {
            return Ok(seen);
        };
        if let Some(id) = self.table.id_of(&seen) {
            return Ok(Allocation { id, ..seen });
        }
        let registering = self.table.registering.lock();
        if let Some(id) = self.table.id_of(&seen) {
            return Ok(Allocation { id, ..seen });
        }
        let (id, notice) = self.table.begin(seen.base());
        let base = ptr::with_exposed_provenance_mut::<c_void>(seen.base().0 as usize);
        // SAFETY: the address is only looked up. The runtime owns `notice` until it calls
        // `on_free`. `notice` holds a weak reference only, and this crate never deregisters the
        // callback.
        let code = unsafe { register(base, on_free, notice) };
        if let Err(error) = check(code, "hsa_amd_register_deallocation_callback") {
            // SAFETY: `begin` made `notice`, and the runtime refused the registration and so does
            // not own it.
            unsafe { self.table.cancel(seen.base(), id, notice) };
            tracing::debug!(%error, range = %seen.range, "cannot register a callback for the free \
                                                          of this memory");
            return Ok(Allocation { id, ..seen });
        }
        // The callback belongs to the allocation that is now at the address, which may be a newer
        // one.
        let now = self.describe(address)?;
        let now = now.map_or(seen, |(_, now)| now);
        let known = Allocation { id, ..now };
        if known.base() != seen.base() || !self.table.describe(known) {
            // The memory was freed meanwhile. The allocation gets an identity that no other lookup
            // returns.
            drop(registering);
            return Ok(Allocation { id, ..seen });
        }
        Ok(known)
    }
}
