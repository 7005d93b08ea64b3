//! The execution of posted requests.

use std::sync::Arc;

use hmem_core::{
    Access, Result,
    transfer::{AtomicOp, OwnedAtomic},
};

use super::{
    Few, NicCall,
    access::{self, LocalSide, RemoteSide},
    atomic::{self, Element},
    endpoint::{DomainEndpoints, EndpointState},
    inbox::Header,
    memory, message,
    request::{KeyUse, LocalPart, RemotePart, Task, Work, invalid},
};

/// Executes the posted requests of a domain's endpoints, and delivers the messages in their
/// inboxes. Returns the number of posted requests that ended, plus the number of receives that took
/// a message from an inbox.
///
/// Skips the requests of an endpoint whose requests are being executed: on another thread, or by an
/// outer call on this thread.
pub(super) fn step(endpoints: &DomainEndpoints) -> usize {
    endpoints.snapshot().iter().map(step_endpoint).sum()
}

/// Like [`step`], for one endpoint.
fn step_endpoint(endpoint: &Arc<EndpointState>) -> usize {
    let mut ended = 0;
    if let Some(running) = endpoint.running.try_lock()
        && let Ok(_executing) = running.try_borrow_mut()
    {
        while let Some((work, more)) = endpoint.next_posted() {
            let Some(result) = execute(endpoint, &work).transpose() else {
                endpoint.put_back(work);
                break;
            };
            if let Ok(bytes) = result {
                endpoint.domain.nic.pace(bytes);
            }
            endpoint.complete_transmit(&work, result);
            ended += 1;
            if !more {
                break;
            }
        }
    }
    ended + message::deliver_kept(endpoint)
}

/// Executes a request and returns the number of bytes moved.
///
/// Returns `None` if the receiver has no room. The caller then puts the request back at the front
/// of the posted requests, so that it is tried again before later ones.
fn execute(endpoint: &EndpointState, work: &Work) -> Result<Option<u64>> {
    let windows = &endpoint.domain.windows;
    match &work.operation {
        Task::Write { remote, data: None } => rma(endpoint, work, remote, true).map(Some),
        Task::Write { remote, data: Some(data) } => {
            message::write(endpoint, work, *data, || rma(endpoint, work, remote, true))
        }
        Task::Read { remote } => rma(endpoint, work, remote, false).map(Some),
        Task::Atomic(task) => atomic(endpoint, work, task).map(Some),
        Task::Send { tag, data, invalidate } => {
            let header = Header { tag: *tag, data: *data, invalidated: None };
            let invalidate = invalidate.as_deref().map(KeyUse::of).transpose()?;
            message::send(endpoint, work, header, invalidate)
        }
        Task::BindWindow { window, bind, tag } => {
            windows.bind_posted(*window, bind, *tag, &endpoint.life).map(|()| Some(0))
        }
        Task::InvalidateWindow { window } => {
            windows.invalidate(*window, endpoint.id()).map(|()| Some(0))
        }
        _ => Err(invalid("post receives to the inbox of the endpoint")),
    }
}

/// Executes a write or a read, and returns the number of bytes moved.
fn rma(initiator: &EndpointState, work: &Work, remote: &[RemotePart], write: bool) -> Result<u64> {
    let target = &initiator.peer(work.peer)?;
    let (local_right, remote_right) = if write {
        (Access::WRITE, Access::ANY_REMOTE_WRITE)
    } else {
        (Access::READ, Access::REMOTE_READ)
    };
    let (own, peers) = (&initiator.domain.nic, &target.domain.nic);
    let mut table = own.regions.lock();
    let (mut near, mut far) = (LocalSide::default(), RemoteSide::default());
    near.hold(&table, initiator, &work.local, local_right)?;
    if !Arc::ptr_eq(own, peers) {
        drop(table);
        table = peers.regions.lock();
    }
    far.hold(table, initiator, target, remote, remote_right)?;
    let mut local = Few::new();
    near.spans(&work.local, &mut local)?;
    let mut spans = Few::new();
    far.spans(remote, &mut spans)?;
    far.spend()?;
    let faults = &initiator.domain.nic.config.faults;
    faults.enter(NicCall::Transfer)?;
    let (local, spans) = (local.as_slice(), spans.as_slice());
    if faults.is_counting() && local.iter().chain(spans).any(|span| span.is_imported()) {
        faults.enter(NicCall::ImportedTransfer)?;
    }
    let run = if write { (local, spans) } else { (spans, local) };
    let moved = access::copy(initiator, target, run, local)?;
    if write && moved > 0 {
        far.persist_and_count(target, remote)?;
    }
    Ok(moved)
}

/// Executes an atomic, and returns the number of bytes of its target elements.
fn atomic(
    initiator: &EndpointState,
    work: &Work,
    task: &OwnedAtomic<LocalPart, RemotePart>,
) -> Result<u64> {
    let target = &initiator.peer(work.peer)?;
    let reads_only = task.op == AtomicOp::AtomicRead;
    let (len, size) = (task.remote.len, task.datatype.size());
    let read = |parts: &[LocalPart]| read_operands(initiator, parts, len);
    let operands = (!reads_only).then(|| read(&work.local)).transpose()?;
    let compares = task.compare.map(|part| read(&[part])).transpose()?;
    let result_parts = task.result.as_slice();
    let regions = &initiator.domain.nic.regions;
    let mut result_side = LocalSide::default();
    result_side.hold(&regions.lock(), initiator, result_parts, Access::READ)?;
    let mut result_spans = Few::new();
    result_side.spans(result_parts, &mut result_spans)?;
    let atomics = Access::ANY_REMOTE_ATOMIC;
    let any_of = if reads_only { atomics | Access::REMOTE_READ } else { atomics };
    let remote = [task.remote];
    let table = target.domain.nic.regions.lock();
    let mut far = RemoteSide::default();
    far.hold(table, initiator, target, &remote, any_of)?;
    let mut spans = Few::new();
    far.spans(&remote, &mut spans)?;
    for span in spans.iter() {
        atomic::check_alignment(span, size)?;
    }
    far.spend()?;
    initiator.domain.nic.config.faults.enter(NicCall::Transfer)?;
    let mut old = vec![0; len as usize];
    let mut done = 0;
    for span in spans.iter() {
        for at in (0..span.len()).step_by(size as usize) {
            let here = done..done + size as usize;
            let word = |bytes: &Option<Vec<u8>>| {
                bytes.as_ref().map_or(0, |bytes| atomic::word(&bytes[here.clone()]))
            };
            let element = Element {
                op: task.op,
                datatype: task.datatype,
                operand: word(&operands),
                compare: word(&compares),
            };
            let value = element.execute(&target.domain.nic.atomics, span.part(at, size))?;
            old[here].copy_from_slice(&value.to_le_bytes()[..size as usize]);
            done += size as usize;
        }
    }
    if !reads_only {
        far.persist_and_count(target, &remote)?;
    }
    memory::scatter(&old, result_spans.as_slice())?;
    Ok(len)
}

/// Reads the operands of an atomic from local memory.
fn read_operands(initiator: &EndpointState, parts: &[LocalPart], len: u64) -> Result<Vec<u8>> {
    let regions = &initiator.domain.nic.regions;
    let mut side = LocalSide::default();
    side.hold(&regions.lock(), initiator, parts, Access::WRITE)?;
    let mut spans = Few::new();
    side.spans(parts, &mut spans)?;
    memory::gather(spans.as_slice(), len)
}
