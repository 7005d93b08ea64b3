//! Making what NICs wrote visible to work that a device starts next (HM-14).
//!
//! `cuda.h`: `cuFlushGPUDirectRDMAWrites` blocks until the writes are visible "to the target
//! context", and the one target is the current context. So it is called in each context whose
//! memory was handed to a NIC, and in the device's primary one where somebody has it.
//!
//! A context of the application's own goes when the application wants, and one that was destroyed
//! must not be given to the driver. Memory goes with its context and its identity never comes back:
//! a context lives as long as the driver knows memory of it by the identity that it had when it was
//! handed out. That memory is the context's witness.

use std::collections::BTreeMap;

use hmem_core::{
    Address, AddressRange, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, Result,
    iface::InboundFlush,
};

use crate::{
    context::{Hold, within},
    device,
    driver::Driver,
    error::{check, lacks, lacks_symbol},
    memory::{Found, Witnessed},
    sys::{self, CuContext},
};

/// How many witnesses there are before the dead are looked for the first time.
const FEW: usize = 64;

/// The memory of one device that was handed to NICs.
#[derive(Debug)]
pub(crate) struct Written {
    contexts: Vec<Noted>,
    /// How many witnesses there may be before the dead are looked for: twice as many as were alive
    /// the last time.
    limit: usize,
}

impl Default for Written {
    fn default() -> Self {
        Self { contexts: Vec::new(), limit: FEW }
    }
}

/// A context with its witnesses: identities by address. Null for memory of no context.
#[derive(Debug)]
struct Noted {
    context: CuContext,
    witnesses: BTreeMap<u64, AllocationId>,
}

impl Written {
    fn note(&mut self, found: &Found, range: AddressRange) {
        let (base, id) = (found.allocation.base(), found.allocation.id);
        // A reservation need not have memory where it begins.
        let address = if found.context.is_null() { range.start() } else { base };
        let at = self.contexts.iter().position(|noted| noted.context == found.context);
        let noted = match at {
            Some(at) => &mut self.contexts[at],
            None => {
                let witnesses = BTreeMap::new();
                self.contexts.push_mut(Noted { context: found.context, witnesses })
            }
        };
        noted.witnesses.insert(address.0, id);
    }

    fn len(&self) -> usize {
        self.contexts.iter().map(|noted| noted.witnesses.len()).sum()
    }

    /// Drops what `is_dead` says is dead.
    fn purge(&mut self, mut is_dead: impl FnMut(Address, AllocationId, CuContext) -> bool) {
        self.contexts.retain_mut(|Noted { context, witnesses }| {
            witnesses.retain(|address, id| !is_dead(Address(*address), *id, *context));
            !witnesses.is_empty()
        });
        self.limit = FEW.max(2 * self.len());
    }
}

/// The contexts in which memory lives that NICs may write.
#[derive(Debug, Default)]
struct Alive {
    contexts: Vec<CuContext>,
    /// Memory of no context is among it.
    without: bool,
    /// The driver could not be asked of some.
    unknown: bool,
}

impl InboundFlush for Driver {
    /// Makes inbound writes visible to work that the device starts after this call.
    ///
    /// A device that orders them natively needs nothing (`cuda.h`: the call "will be a no-op and
    /// can be safely omitted").
    fn flush(&self, device: DeviceId) -> Result<()> {
        const OPERATION: &str = "flush_inbound";
        let abilities = self.abilities(OPERATION, device)?;
        if abilities.orders_writes {
            return Ok(());
        }
        let flush = self.functions.flush_gpu_direct_rdma_writes;
        let flush = flush
            .ok_or_else(|| lacks_symbol(OPERATION, "cuFlushGPUDirectRDMAWrites").device(device))?;
        if !abilities.flushes {
            return Err(lacks(
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
            // SAFETY: the values are those of the header's enumerations.
            check(unsafe { flush(target, scope) }, "cuFlushGPUDirectRDMAWrites")
        };
        self.flush_everywhere(device, flush).map_err(|error| error.device(device))
    }
}

impl Driver {
    /// A NIC may write this range of an allocation from now on.
    pub(crate) fn note_written(&self, found: &Found, range: AddressRange) -> Result<()> {
        let entry = device::get(&self.devices, "flush_inbound", found.device())?;
        if entry.abilities.orders_writes {
            return Ok(());
        }
        let mut written = entry.written.lock();
        written.note(found, range);
        if written.len() > written.limit {
            // What cannot be asked now is asked later.
            let is_dead = |address, id, context| {
                self.witness(address, id, context)
                    .is_ok_and(|witnessed| witnessed == Witnessed::Dead)
            };
            written.purge(is_dead);
        }
        Ok(())
    }

    /// Calls `flush` in every context that it is for. The error is the first; the others are
    /// flushed all the same.
    fn flush_everywhere(&self, device: DeviceId, flush: impl Fn() -> Result<()>) -> Result<()> {
        let primary = self.hold_if_active(device)?;
        let held = primary.as_ref().map(Hold::context);
        let alive = self.alive(device, held)?;
        let mut result = primary.map_or(Ok(()), |hold| flush_and_keep(hold, &flush));
        for context in &alive.contexts {
            result = result.and(within(&self.functions, *context, &flush));
        }
        if alive.unknown {
            result = result.and(Err(unknown_context()));
        }
        let none = held.is_none() && alive.contexts.is_empty();
        if !none && !alive.without {
            return result;
        }
        // Memory of no context is of any: the thread's own stands for those that the application
        // made.
        let entry = device::get(&self.devices, "cuCtxGetDevice", device)?;
        match self.current()?.filter(|(_, of)| *of == entry.handle) {
            Some((current, _)) if Some(current) != held && !alive.contexts.contains(&current) => {
                result.and(within(&self.functions, current, &flush))
            }
            None if none && alive.without => result.and(flush_and_keep(self.hold(device)?, &flush)),
            _ => result,
        }
    }

    /// The contexts that are noted and live, beside the one that is held. Asks one witness of each,
    /// and forgets those that are dead.
    fn alive(&self, device: DeviceId, held: Option<CuContext>) -> Result<Alive> {
        let entry = device::get(&self.devices, "flush_inbound", device)?;
        let mut written = entry.written.lock();
        let mut alive = Alive::default();
        let mut failed = Ok(());
        written.contexts.retain_mut(|Noted { context, witnesses }| {
            if Some(*context) == held {
                return true;
            }
            while let Some((address, id)) = witnesses.first_key_value() {
                match self.witness(Address(*address), *id, *context) {
                    Ok(Witnessed::Dead) => {
                        witnesses.pop_first();
                    }
                    Ok(Witnessed::Alive) if context.is_null() => {
                        alive.without = true;
                        return true;
                    }
                    Ok(Witnessed::Alive) => {
                        alive.contexts.push(*context);
                        return true;
                    }
                    Ok(Witnessed::Unknown) => {
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

/// The context stays retained, so that the next flush finds it: they come with every completion.
fn flush_and_keep(hold: Hold<'_>, flush: impl FnOnce() -> Result<()>) -> Result<()> {
    let flushed = hold.within(flush);
    if flushed.is_ok() {
        hold.keep();
    }
    hold.end(flushed)
}

fn unknown_context() -> Error {
    Error::new(ErrorKind::BadState, "flush_inbound")
        .iface(IfaceKind::CUDA)
        .context("reason", "the driver does not say on this thread whether the memory's context lives")
        .remedy("flush on a thread that has a current context (cuCtxSetCurrent), or read completions there")
}
