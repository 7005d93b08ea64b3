//! Flush of inbound writes: makes the writes of NICs visible to work that a device starts next.
//!
//! `cuFlushGPUDirectRDMAWrites` blocks until the writes are visible "to the target context"
//! (`cuda.h`), which is always the current context. So this module calls the function in each
//! context whose memory was exported to a NIC, and in the device's primary context if the process
//! has one.
//!
//! The application may destroy its contexts at any time, and a destroyed context must not be passed
//! to the driver. So this module checks first that the context is alive. For each context, the
//! module records the exported allocations (the *witnesses*) with their identities
//! ([`AllocationId`]). The driver frees the witnesses with the context, and never reuses an
//! identity. So a context is alive while the driver still knows one of its witnesses by the
//! recorded identity.

#![allow(unsafe_code, reason = "calls the driver to flush inbound writes")]

use std::{collections::BTreeMap, sync::Arc};

use hmem_core::{
    Address, AddressRange, AllocationId, DeviceId, Error, ErrorKind, Result, iface::InboundFlush,
};
use parking_lot::Mutex;

use crate::{
    context::with_context,
    error::{CUDA, check, lacks_symbol},
    lookup::{FoundAllocation, Liveness, PointerLookup},
    sys::{self, CuContext},
};

/// First and lowest value of [`ExportedMemory::limit`].
const FIRST_PURGE: usize = 64;

/// Flushes writes of NICs to device memory, so that the device sees them.
#[derive(Debug)]
pub(crate) struct InboundFlusher {
    lookup: Arc<PointerLookup>,
    /// Exported memory of each device, in the order of the driver's devices.
    exported: Vec<Mutex<ExportedMemory>>,
}

/// Memory of one device that was exported to NICs.
#[derive(Debug)]
struct ExportedMemory {
    contexts: Vec<WitnessedContext>,
    /// Number of witnesses that triggers a purge: when there are more, [`Self::purge`] removes the
    /// witnesses whose memory was freed. The purge then sets this limit to twice the number of the
    /// witnesses that remain.
    limit: usize,
}

/// A context and its witnesses: the exported allocations that belong to the context, as a map from
/// the address to the identity. The context exists while one of its witnesses is allocated. If
/// `context` is null, the witnesses are exported allocations that belong to no context.
#[derive(Debug)]
struct WitnessedContext {
    context: CuContext,
    witnesses: BTreeMap<u64, AllocationId>,
}

impl ExportedMemory {
    fn note(&mut self, found: &FoundAllocation, range: AddressRange) {
        let (base, id) = (found.allocation.base(), found.allocation.id);
        // A VMM reservation may have no memory at its first address, so the witness is at the start
        // of the exported range.
        let address = if found.context.is_null() { range.start() } else { base };
        let at = self.contexts.iter().position(|noted| noted.context == found.context);
        let at = at.unwrap_or_else(|| {
            let witnesses = BTreeMap::new();
            self.contexts.push(WitnessedContext { context: found.context, witnesses });
            self.contexts.len() - 1
        });
        self.contexts[at].witnesses.insert(address.0, id);
    }

    fn len(&self) -> usize {
        self.contexts.iter().map(|noted| noted.witnesses.len()).sum()
    }

    /// Removes each witness for which `is_dead` returns true: its memory was freed. Also removes
    /// the contexts that have no witness left.
    fn purge(&mut self, mut is_dead: impl FnMut(Address, AllocationId, CuContext) -> bool) {
        self.contexts.retain_mut(|WitnessedContext { context, witnesses }| {
            witnesses.retain(|address, id| !is_dead(Address(*address), *id, *context));
            !witnesses.is_empty()
        });
        self.limit = FIRST_PURGE.max(2 * self.len());
    }
}

/// Contexts in which exported memory is still allocated.
#[derive(Debug, Default)]
struct Alive {
    contexts: Vec<CuContext>,
    /// True if any exported memory that belongs to no context is still allocated.
    without: bool,
    /// True if the driver cannot tell whether some exported memory is still allocated.
    unknown: bool,
}

impl InboundFlush for InboundFlusher {
    /// Makes inbound writes visible to work that the device starts after this call.
    ///
    /// A device that orders inbound writes itself needs no flush (`cuda.h`: the call "will be a
    /// no-op and can be safely omitted").
    fn flush(&self, device: DeviceId) -> Result<()> {
        const OPERATION: &str = "flush_inbound";
        let abilities = self.lookup.driver().device(OPERATION, device)?.abilities;
        if abilities.orders_writes {
            return Ok(());
        }
        let flush = self.lookup.driver().functions.flush_gpu_direct_rdma_writes;
        let flush = flush
            .ok_or_else(|| lacks_symbol(OPERATION, "cuFlushGPUDirectRDMAWrites").device(device))?;
        if !abilities.flushes {
            return Err(CUDA
                .lacks(
                    OPERATION,
                    "the device neither orders inbound writes nor flushes them on demand",
                )
                .device(device)
                .context("attribute", "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS")
                .remedy(
                    "read a byte of the memory through the NIC after the write, which orders them",
                ));
        }
        let flush = || {
            let (target, scope) = (
                sys::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                sys::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            );
            // SAFETY: the arguments are values of the header's enumerations.
            check(unsafe { flush(target, scope) }, "cuFlushGPUDirectRDMAWrites")
        };
        self.flush_everywhere(device, flush).map_err(|error| error.device(device))
    }
}

impl InboundFlusher {
    pub(crate) fn new(lookup: Arc<PointerLookup>) -> Self {
        let none = || Mutex::new(ExportedMemory { contexts: Vec::new(), limit: FIRST_PURGE });
        let exported = lookup.driver().devices.iter().map(|_| none()).collect();
        Self { lookup, exported }
    }

    /// Records that a NIC may write this range of an allocation from now on. Records nothing for a
    /// device that orders inbound writes, since the device needs no flush.
    pub(crate) fn note_exported(&self, found: &FoundAllocation, range: AddressRange) -> Result<()> {
        let device = found.device();
        if self.lookup.driver().device("flush_inbound", device)?.abilities.orders_writes {
            return Ok(());
        }
        let mut exported = self.exported[device.0 as usize].lock();
        exported.note(found, range);
        if exported.len() > exported.limit {
            // An allocation whose query fails stays in the record, and the next flush queries it
            // again.
            let is_dead = |address, id, context| {
                let liveness = self.lookup.liveness(address, id, context);
                liveness.is_ok_and(|liveness| liveness == Liveness::Dead)
            };
            exported.purge(is_dead);
        }
        Ok(())
    }

    /// Calls `flush` in the contexts that the crate's documentation lists for flushes. If a flush
    /// fails, continues with the other contexts, and returns the first error.
    fn flush_everywhere(&self, device: DeviceId, flush: impl Fn() -> Result<()>) -> Result<()> {
        let functions = &self.lookup.driver().functions;
        let active = self.lookup.contexts.retain_if_active(device)?;
        let primary = active.as_ref().map(|active| active.context);
        let alive = self.alive(device, primary)?;
        // The primary context stays retained for the next flush, since the application flushes
        // after each completion.
        let mut result = active.map_or(Ok(()), |active| active.run_and_keep(&flush));
        for context in &alive.contexts {
            result = result.and(with_context(functions, *context, &flush));
        }
        if alive.unknown {
            result = result.and(Err(unknown_context()));
        }
        let none = primary.is_none() && alive.contexts.is_empty();
        if !none && !alive.without {
            return result;
        }
        // Memory without a context may be used in any context of the application. The driver lists
        // no contexts, so the flush covers only the thread's current one besides those above.
        match self.lookup.contexts.current_of(device)? {
            Some(current) if Some(current) != primary && !alive.contexts.contains(&current) => {
                result.and(with_context(functions, current, &flush))
            }
            None if none && alive.without => {
                result.and(self.lookup.contexts.retain(device)?.run_and_keep(&flush))
            }
            _ => result,
        }
    }

    /// Returns the contexts, except `primary`, in which exported memory is still allocated. Queries
    /// the witnesses of a context in turn until one is not known to be freed. Removes the freed
    /// ones before it from the record.
    fn alive(&self, device: DeviceId, primary: Option<CuContext>) -> Result<Alive> {
        let mut exported = self.exported[device.0 as usize].lock();
        let mut alive = Alive::default();
        let mut failed = Ok(());
        exported.contexts.retain_mut(|WitnessedContext { context, witnesses }| {
            if Some(*context) == primary {
                return true;
            }
            while let Some((address, id)) = witnesses.first_key_value() {
                match self.lookup.liveness(Address(*address), *id, *context) {
                    Ok(Liveness::Dead) => {
                        witnesses.pop_first();
                    }
                    Ok(Liveness::Alive) if context.is_null() => {
                        alive.without = true;
                        return true;
                    }
                    Ok(Liveness::Alive) => {
                        alive.contexts.push(*context);
                        return true;
                    }
                    Ok(Liveness::Unknown) => {
                        alive.unknown = true;
                        return true;
                    }
                    Err(error) => {
                        failed = Err(error);
                        return true;
                    }
                }
            }
            false
        });
        failed.map(|()| alive)
    }
}

fn unknown_context() -> Error {
    CUDA.error(ErrorKind::BadState, "flush_inbound")
        .context("why", "the driver does not say on this thread whether the memory's context lives")
        .remedy(
            "flush on a thread that has a current context (cuCtxSetCurrent), or read completions \
             there",
        )
}
