//! The transfer of one message through staging buffers, chunk by chunk.
//!
//! A chunk passes up to three stages:
//!
//! 1. A copy from the device fills its buffers, if the source is staged memory.
//! 2. The NIC transfers the chunk.
//! 3. A copy into the device drains its buffers, if the target is staged memory.
//!
//! The NIC gets the chunks in the order of the message. Several chunks are in flight, each in its
//! own stage. After a failure no chunk begins, and those in flight end. So no copy or request uses
//! a released buffer.

#![allow(unsafe_code, reason = "copies between device memory and chunks of the pool")]

use std::{collections::VecDeque, ops::Deref};

use hmem_core::{
    Address, Error, Result,
    iface::{CopyEvent, FinishedCopy},
};

use super::{
    chunk_plan::ChunkPlan,
    pool::{Claim, Slots, Use},
    range::StagedRange,
};

/// Maximum number of chunks in flight. The limit matters for chunks that need no buffer, since the
/// staging pool limits only chunks with buffers.
const MOST: usize = 64;

/// Consecutive bytes of a message that lie in one range of staged memory.
#[derive(Debug)]
pub struct Run<M> {
    /// Offset of the run's first byte in the message.
    pub at: u64,
    /// Length in bytes, more than 0.
    pub len: u64,
    /// The staged memory that the bytes are copied from or to.
    pub memory: M,
    /// Offset of the run's first byte in `memory`.
    pub offset: u64,
}

/// Step at which a staged transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedStep {
    /// The copy from the source memory into a staging buffer.
    SourceCopy,
    /// The transfer by the NIC. A canceled transfer counts as failed at this step.
    NicTransfer,
    /// The copy from a staging buffer into the target memory.
    TargetCopy,
}

/// Result of posting a chunk to the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The NIC has moved the bytes during the call.
    Done,
    /// The NIC has accepted the chunk. The caller must call [`Pipeline::landed`] when the NIC has
    /// finished the chunk.
    Sent,
    /// The NIC's queue is full. The pipeline posts the chunk again at a later step.
    Full,
}

/// Chunk that the pipeline posts to the NIC.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Number of the chunk. The caller passes it to [`Pipeline::landed`].
    pub number: u64,
    /// Offset of the chunk in the message.
    pub at: u64,
    /// Length of the chunk in bytes.
    pub len: u64,
    slots: Option<&'a Slots>,
}

impl View<'_> {
    /// Returns the parts of staging buffers that hold `len` bytes of the message from offset `at`.
    /// All these bytes must belong to this chunk.
    ///
    /// Each item is the address of a part, its offset in the message, and its length. There are no
    /// items if no byte of the chunk is staged.
    pub fn parts(&self, at: u64, len: u64) -> impl Iterator<Item = (Address, u64, u64)> {
        let start = self.at;
        self.slots
            .into_iter()
            .flat_map(move |slots| slots.parts(at - start, len))
            .map(move |(address, offset, len)| (address, start + offset, len))
    }
}

/// Stage of a chunk, in the order in which a chunk passes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Copies from the source memory fill the staging buffers.
    Filling,
    /// The chunk can be posted to the NIC.
    Ready,
    /// The NIC has accepted the chunk and not finished it.
    AtNic,
    /// The NIC has moved the bytes. The copies into the target memory have not started.
    Landed,
    /// Copies into the target memory drain the staging buffers.
    Draining,
    /// Nothing is left to do.
    Ended,
}

/// A chunk in flight.
#[derive(Debug)]
struct Chunk {
    number: u64,
    /// Offset of the chunk in the message.
    at: u64,
    /// Length in bytes. Reduced if the NIC received fewer bytes.
    len: u64,
    stage: Stage,
    /// The copies in flight.
    copies: Vec<Box<dyn CopyEvent>>,
    /// The staging buffers; `None` if no byte of the chunk is staged.
    slots: Option<Slots>,
}

impl Chunk {
    /// Returns the step at which a failed copy of the chunk makes the transfer fail.
    fn copy_step(&self) -> FailedStep {
        match self.stage {
            Stage::Filling => FailedStep::SourceCopy,
            _ => FailedStep::TargetCopy,
        }
    }

    /// Starts the copies between the staging buffers and `runs`, the staged memory of the chunk. In
    /// the stage [`Stage::Filling`], copies from `runs` into the buffers. In later stages, copies
    /// from the buffers into `runs`. If `blocking` is true, the copies have ended when the function
    /// returns.
    fn start_copies(
        &mut self,
        runs: &[Run<impl Deref<Target = StagedRange>>],
        blocking: bool,
    ) -> Result<()> {
        for (run, start, len) in overlaps(runs, self.at, self.len) {
            let slots = self.slots.as_ref().expect("a chunk with staged bytes has buffers");
            for (address, offset, len) in slots.parts(start - self.at, len) {
                let at = run.offset + (self.at + offset - run.at);
                let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(address.0 as usize);
                let copy: Box<dyn CopyEvent> = match (self.stage == Stage::Filling, blocking) {
                    // SAFETY: `slots` owns the buffer until the chunk is removed, which is after
                    // its copies ended, and keeps the pool mapped.
                    (true, false) => unsafe { run.memory.start_read(at, address, len) }?,
                    // SAFETY: `slots` owns the buffer until its copies ended and keeps the pool
                    // mapped. Nothing writes to it: its request to the NIC has ended.
                    (false, false) => unsafe { run.memory.start_write(at, address, len) }?,
                    (true, true) => {
                        // SAFETY: `slots` owns the buffer, keeps the pool mapped and is not used
                        // elsewhere during this call. The pool zeroed the bytes when it mapped
                        // them.
                        let buffer =
                            unsafe { std::slice::from_raw_parts_mut(pointer, len as usize) };
                        run.memory.read(at, buffer)?;
                        Box::new(FinishedCopy(Ok(())))
                    }
                    (false, true) => {
                        // SAFETY: `slots` owns the buffer and keeps the pool mapped. The pool
                        // zeroed the bytes when it mapped them, and nothing writes to them during
                        // this call.
                        let buffer = unsafe { std::slice::from_raw_parts(pointer, len as usize) };
                        run.memory.write(at, buffer)?;
                        Box::new(FinishedCopy(Ok(())))
                    }
                };
                self.copies.push(copy);
            }
        }
        Ok(())
    }
}

/// Staged transfer of one message.
///
/// The owner must not drop the value before the NIC has finished all chunks. The drop waits for
/// copies in flight.
#[derive(Debug)]
pub struct Pipeline<M> {
    sources: Vec<Run<M>>,
    targets: Vec<Run<M>>,
    plan: ChunkPlan,
    purpose: Use,
    /// The number of bytes of the message in chunks that have begun.
    begun: u64,
    /// The number of the next chunk.
    next: u64,
    /// The chunks in flight, in the order of the message.
    chunks: VecDeque<Chunk>,
    /// The request for the buffers of the next chunk.
    claim: Claim,
    /// The buffers of the next chunk, if [`Pipeline::block`] had to wait for them.
    granted: Option<Slots>,
    /// The number of bytes in chunks that were removed from `chunks`.
    moved: u64,
    /// The first failure.
    failure: Option<(FailedStep, Error)>,
    /// True if each copy blocks until it has finished, because a message of one chunk has nothing
    /// to overlap with.
    blocking: bool,
}

impl<M> Pipeline<M> {
    /// Creates the transfer of a message of at least one byte, in the chunks of `plan`.
    ///
    /// `sources` lists the parts of the message that are copied from device memory into staging
    /// buffers. `targets` lists the parts that are copied from staging buffers to device memory.
    /// Both are in the order of the message.
    pub fn new(
        claim: Claim,
        purpose: Use,
        plan: ChunkPlan,
        sources: Vec<Run<M>>,
        targets: Vec<Run<M>>,
    ) -> Self {
        Self {
            sources,
            targets,
            plan,
            purpose,
            begun: 0,
            next: 0,
            chunks: VecDeque::new(),
            claim,
            granted: None,
            moved: 0,
            failure: None,
            blocking: false,
        }
    }

    /// Returns true once no chunk is in flight and none will follow.
    pub fn is_over(&self) -> bool {
        self.chunks.is_empty() && self.has_begun()
    }

    /// Removes and returns the result: the number of bytes moved, or the first failure.
    pub fn result(&mut self) -> Result<u64, (FailedStep, Error)> {
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(self.moved),
        }
    }

    /// Fails the transfer. No further chunk begins. If the transfer has failed before, the first
    /// failure is kept.
    pub fn fail(&mut self, step: FailedStep, error: Error) {
        self.failure.get_or_insert((step, error));
        // Dropping the old claim gives up its place in the queue, so that claims behind it need not
        // wait.
        self.claim = Claim::new(self.claim.pool());
        self.granted = None;
    }

    /// Returns whether the transfer failed. Chunks may still be in flight.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Returns whether copies are in flight. A copy engine does not report the end of a copy, so
    /// the caller must call [`step`](Self::step) to detect the end.
    pub fn is_copying(&self) -> bool {
        self.chunks.iter().any(|chunk| !chunk.copies.is_empty())
    }

    /// Returns true once every chunk has begun, or the transfer failed. The transfer then takes no
    /// further buffer from the pool.
    pub fn has_begun(&self) -> bool {
        self.failure.is_some() || self.begun == self.plan.len
    }

    /// Sets the purpose for which later buffers are taken from the pool. If the purpose changes
    /// while the transfer waits for buffers, the transfer loses its place in the queue.
    pub fn set_purpose(&mut self, purpose: Use) {
        if self.purpose != purpose {
            self.purpose = purpose;
            self.claim = Claim::new(self.claim.pool());
        }
    }

    /// Returns true once every chunk has been posted to the NIC, or the transfer failed.
    pub fn is_posted(&self) -> bool {
        let waits = |chunk: &Chunk| matches!(chunk.stage, Stage::Filling | Stage::Ready);
        self.failure.is_some() || (self.begun == self.plan.len && !self.chunks.iter().any(waits))
    }

    /// Records that the NIC has finished chunk `number`. `result` is the number of bytes moved.
    /// Does nothing if the NIC is not transferring a chunk with this number.
    ///
    /// A received message may be shorter than its chunk.
    pub fn landed(&mut self, number: u64, result: Result<u64>) {
        let is_it = |chunk: &&mut Chunk| chunk.number == number && chunk.stage == Stage::AtNic;
        let Some(chunk) = self.chunks.iter_mut().find(is_it) else { return };
        match result {
            Ok(bytes) => {
                chunk.len = chunk.len.min(bytes);
                chunk.stage = Stage::Landed;
            }
            Err(error) => {
                chunk.stage = Stage::Ended;
                self.fail(FailedStep::NicTransfer, error);
            }
        }
    }

    /// Waits for the copies of a failed transfer. Releases the buffers of all chunks that the
    /// NIC is not transferring.
    pub fn stop(&mut self) {
        self.wait_for_copies();
        self.remove_ended();
    }

    /// Waits for all copies in flight.
    fn wait_for_copies(&mut self) {
        let copies: Vec<_> =
            self.chunks.iter_mut().flat_map(|chunk| chunk.copies.drain(..)).collect();
        for copy in copies {
            if let Err(error) = copy.wait() {
                tracing::debug!(%error, "a copy of a failed transfer failed too");
            }
        }
    }

    /// Returns the number of staging buffers that a chunk of `len` bytes needs.
    fn wanted(&self, len: u64) -> usize {
        len.div_ceil(self.claim.pool().slot_len()) as usize
    }

    /// Collects the results of finished copies. Moves chunks without copies in flight to their next
    /// stage. Returns whether anything changed.
    fn settle(&mut self) -> bool {
        let mut progressed = false;
        let mut failed = None;
        for chunk in &mut self.chunks {
            if !matches!(chunk.stage, Stage::Filling | Stage::Draining) {
                continue;
            }
            let step = chunk.copy_step();
            let (done, left) =
                std::mem::take(&mut chunk.copies).into_iter().partition(|copy| copy.is_done());
            chunk.copies = left;
            for copy in done {
                progressed = true;
                if let Err(error) = copy.wait() {
                    failed.get_or_insert((step, error));
                }
            }
            if chunk.copies.is_empty() {
                progressed = true;
                chunk.stage =
                    if chunk.stage == Stage::Filling { Stage::Ready } else { Stage::Ended };
            }
        }
        if let Some((step, error)) = failed {
            self.fail(step, error);
        }
        progressed
    }

    /// Posts filled chunks to the NIC, in order. If the NIC moves a chunk during the call, stops
    /// after that chunk so that the copy engine gets more work first. Returns whether anything
    /// changed.
    fn post(&mut self, post_chunk: &mut impl FnMut(View<'_>) -> Result<Posted>) -> bool {
        let mut progressed = false;
        let mut failed = None;
        for chunk in &mut self.chunks {
            match chunk.stage {
                Stage::Filling => break,
                Stage::Ready if self.failure.is_some() || failed.is_some() => {
                    chunk.stage = Stage::Ended
                }
                Stage::Ready => {
                    let view = View {
                        number: chunk.number,
                        at: chunk.at,
                        len: chunk.len,
                        slots: chunk.slots.as_ref(),
                    };
                    chunk.stage = match post_chunk(view) {
                        Ok(Posted::Done) => {
                            chunk.stage = Stage::Landed;
                            return true;
                        }
                        Ok(Posted::Sent) => Stage::AtNic,
                        Ok(Posted::Full) => break,
                        Err(error) => {
                            failed = Some(error);
                            Stage::Ended
                        }
                    };
                }
                _ => continue,
            }
            progressed = true;
        }
        if let Some(error) = failed {
            self.fail(FailedStep::NicTransfer, error);
        }
        progressed
    }

    /// Removes ended chunks. After a failure, also removes each chunk that is neither at the NIC
    /// nor being copied. Returns whether any was removed.
    fn remove_ended(&mut self) -> bool {
        let before = self.chunks.len();
        let failed = self.failure.is_some();
        let mut moved = 0;
        self.chunks.retain(|chunk| {
            let stays = chunk.stage == Stage::AtNic || !chunk.copies.is_empty();
            let over = chunk.stage == Stage::Ended || (failed && !stays);
            if over {
                moved += chunk.len;
            }
            !over
        });
        self.moved += moved;
        self.chunks.len() < before
    }
}

impl<M> Drop for Pipeline<M> {
    fn drop(&mut self) {
        self.wait_for_copies();
    }
}

impl<M: Deref<Target = StagedRange>> Pipeline<M> {
    /// Begins, posts and completes chunks as far as possible without waiting. Returns whether
    /// anything changed. Begins chunks, which may take buffers, only if `may_begin` is true.
    pub fn step(
        &mut self,
        may_begin: bool,
        post_chunk: &mut impl FnMut(View<'_>) -> Result<Posted>,
    ) -> bool {
        // The NIC comes last: its call may block, and the copy engine then already has all of its
        // work.
        let mut progressed = self.settle();
        progressed |= self.drain();
        progressed |= self.settle();
        progressed |= self.remove_ended();
        if may_begin {
            progressed |= self.begin();
        }
        progressed |= self.post(post_chunk);
        progressed
    }

    /// Runs the whole transfer on the calling thread. Returns the number of bytes moved.
    ///
    /// `post_chunk` must move each chunk before it returns: it must not return [`Posted::Sent`] or
    /// [`Posted::Full`]. If `canceled` returns an error, the transfer fails with that error at
    /// [`FailedStep::NicTransfer`].
    ///
    /// # Errors
    ///
    /// The first failure, and the step at which it happened.
    pub fn run(
        mut self,
        canceled: impl Fn() -> Option<Error>,
        mut post_chunk: impl FnMut(View<'_>) -> Result<Posted>,
    ) -> Result<u64, (FailedStep, Error)> {
        self.blocking = self.plan.next(0) == self.plan.len;
        // A copy may have canceled the transfer on this thread.
        let mut post_chunk = |view: View<'_>| canceled().map_or_else(|| post_chunk(view), Err);
        while !self.is_over() {
            if self.failure.is_none()
                && let Some(error) = canceled()
            {
                self.fail(FailedStep::NicTransfer, error);
            }
            if !self.step(true, &mut post_chunk) && !self.is_over() {
                self.block();
            }
        }
        self.result()
    }

    /// Waits for the oldest copy in flight. If no copy is in flight, waits for the buffers of the
    /// next chunk.
    fn block(&mut self) {
        let oldest = self.chunks.iter_mut().find(|chunk| !chunk.copies.is_empty());
        if let Some(chunk) = oldest {
            let step = chunk.copy_step();
            if let Err(error) = chunk.copies.remove(0).wait() {
                self.fail(step, error);
            }
        } else if self.granted.is_none() {
            let len = self.plan.next(self.begun);
            self.granted = Some(self.claim.wait(self.wanted(len), self.purpose));
        }
    }

    /// Begins chunks while there are buffers for them, and starts their copies. Returns whether
    /// anything changed.
    fn begin(&mut self) -> bool {
        let mut progressed = false;
        while self.failure.is_none() && self.begun < self.plan.len && self.chunks.len() < MOST {
            let (at, len) = (self.begun, self.plan.next(self.begun));
            let staged = overlaps(&self.sources, at, len)
                .chain(overlaps(&self.targets, at, len))
                .next()
                .is_some();
            let slots = if staged {
                let want = self.wanted(len);
                let Some(slots) =
                    self.granted.take().or_else(|| self.claim.take(want, self.purpose))
                else {
                    break;
                };
                Some(slots)
            } else {
                None
            };
            let (number, stage, copies) = (self.next, Stage::Filling, Vec::new());
            self.chunks.push_back(Chunk { number, at, len, stage, copies, slots });
            self.next += 1;
            self.begun += len;
            progressed = true;
            // The chunk is in the list already: if a copy panics, the drop of the pipeline waits
            // for those before it.
            let chunk = self.chunks.back_mut().expect("a chunk was added");
            if let Err(error) = chunk.start_copies(&self.sources, self.blocking) {
                self.fail(FailedStep::SourceCopy, error);
            }
        }
        // Chunks that need no copy from a device are ready at once.
        progressed | self.settle()
    }

    /// Starts the copies into the target memory for chunks that the NIC has moved. Returns whether
    /// anything changed.
    fn drain(&mut self) -> bool {
        let mut progressed = false;
        let mut failed = None;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.stage == Stage::Landed) {
            progressed = true;
            chunk.stage = Stage::Draining;
            if self.failure.is_none() && failed.is_none() {
                failed = chunk.start_copies(&self.targets, self.blocking).err();
            }
        }
        if let Some(error) = failed {
            self.fail(FailedStep::TargetCopy, error);
        }
        progressed
    }
}

/// Returns the parts of `runs` that lie within `len` bytes of the message from offset `at`. Each
/// item is the run, the part's offset in the message, and the part's length.
fn overlaps<M>(runs: &[Run<M>], at: u64, len: u64) -> impl Iterator<Item = (&Run<M>, u64, u64)> {
    let end = at + len;
    let first = runs.partition_point(|run| run.at + run.len <= at);
    runs[first..].iter().take_while(move |run| run.at < end).map(move |run| {
        let start = run.at.max(at);
        (run, start, (run.at + run.len).min(end) - start)
    })
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
    };

    use hmem_core::{
        AllocationKind, DeviceBuffer, DeviceId, Iface, iface::AllocRequest, provider::StagingAttr,
    };
    use hmem_iface_system::{Simulated, Stepping};

    use super::{super::pool::Pool, *};

    /// Staged memory, or `None` for memory whose copies panic.
    struct Memory(Option<StagedRange>);

    impl Deref for Memory {
        type Target = StagedRange;

        fn deref(&self) -> &StagedRange {
            self.0.as_ref().expect("by the test")
        }
    }

    /// REL-01: if the second copy of a chunk panics, the drop of the pipeline waits for the first,
    /// which may still write to the chunk's buffers.
    #[test]
    fn drop_waits_for_the_copies_before_one_that_panicked() {
        let device = Simulated::builder().stepping(Stepping::ByHand).build().expect("a device");
        let device = Arc::new(device);
        let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
        let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
        let memory = DeviceBuffer::allocate(&iface, &request).expect("memory");
        // SAFETY: `memory` is dropped after the pipeline, and nothing refers to device memory.
        let staged = unsafe { StagedRange::new(iface, memory.allocation().range) };
        let pool = Pool::new(StagingAttr { buffer_len: 4096, buffer_count: 1 }, None);
        let pool = pool.expect("a pool");
        let run = |at, staged| Run { at, len: 32, memory: Memory(staged), offset: 0 };
        let sources = vec![run(0, Some(staged)), run(32, None)];
        let plan = ChunkPlan::whole(64);
        let mut pipeline = Pipeline::new(Claim::new(&pool), Use::Rma, plan, sources, Vec::new());
        let mut step = || pipeline.step(true, &mut |_| Ok(Posted::Done));
        assert!(catch_unwind(AssertUnwindSafe(&mut step)).is_err());
        assert_eq!(device.pending_copies(), 1);
        drop(pipeline);
        assert_eq!((device.pending_copies(), pool.held()), (0, 0));
    }
}
