//! Completion queues of the driver, and their completion channels.

#![allow(unsafe_code, reason = "calls the library on completion queues and channels")]

use std::{
    ffi::c_int,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    ptr, slice,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{Errno, Error, ErrorKind, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{
    device::OpenDevice,
    errors,
    sys::{CompChannel, Cq, Wc},
};

const INTERRUPTED: Errno = Errno(4);
const WOULD_BLOCK: Errno = Errno(11);

/// A completion queue, with its event channel if it has one. Dropping the value destroys both.
#[derive(Debug)]
pub(super) struct VerbsCq {
    /// The completion queue. This field comes first, so that the queue is dropped before its
    /// channel. The channel must outlive the queue.
    cq: QueueOfDriver,
    channel: Option<Channel>,
    room: Arc<CqRoom>,
}

/// Counters of the used room of a completion queue: entries of the NIC's queue, and completions for
/// the application ([`Room`]). `most` limits each of the two counters.
#[derive(Debug)]
pub(super) struct CqRoom {
    most: u64,
    /// The number of used entries in the low 32 bits, and of used completions in the high 32 bits.
    used: AtomicU64,
}

/// Room that a request uses in a completion queue: entries of the NIC's queue, and completions for
/// the application. A request reserves its room before its post.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room(u64);

impl Room {
    /// No room.
    pub(super) const NONE: Self = Self(0);
    /// A completion for the application. The request uses this room until the application has read
    /// the completion. So the memory for stored completions is bounded.
    pub(super) const COMPLETION: Self = Self(1 << 32);

    /// Returns entries of the NIC's queue, one for each work request. Each work request of a failed
    /// request completes. A request uses its entries until the completion of its last work request
    /// is read from the NIC. So the NIC does not overrun its queue.
    pub(super) const fn entries(count: u32) -> Self {
        Self(count as u64)
    }

    /// Returns the sum of both rooms.
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// Returns `count` times this room.
    pub(super) const fn times(self, count: usize) -> Self {
        Self(self.0 * count as u64)
    }
}

impl CqRoom {
    /// Creates counters with a limit. Limits over `i32::MAX` count as `i32::MAX`.
    fn new(most: usize) -> Self {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        Self { most: u64::from(most.unsigned_abs()), used: AtomicU64::new(0) }
    }

    /// Reserves the room of a request. Returns false, and reserves nothing, if a limit is
    /// reached.
    #[inline]
    pub(super) fn reserve(&self, room: Room) -> bool {
        let next = |used| {
            let next = used + room.0;
            // Both sums stay below 2^32: a limit has 31 bits, and so does a request's room.
            let fits = u64::from(next as u32) <= self.most && next >> 32 <= self.most;
            fits.then_some(next)
        };
        // The counters protect no other data, so relaxed ordering is enough.
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Returns true if `room` exceeds a limit even when all other room is free.
    pub(super) fn exceeds(&self, room: Room) -> bool {
        u64::from(room.0 as u32) > self.most || room.0 >> 32 > self.most
    }

    /// Releases room that was reserved.
    #[inline]
    pub(super) fn release(&self, room: Room) {
        self.used.fetch_sub(room.0, Ordering::Relaxed);
    }
}

/// Owner of an `ibv_cq`, without its channel.
#[derive(Debug)]
struct QueueOfDriver {
    device: Arc<OpenDevice>,
    cq: *mut Cq,
}

/// Owner of an `ibv_comp_channel` for one queue. Reads of its fd do not block.
#[derive(Debug)]
struct Channel {
    device: Arc<OpenDevice>,
    channel: *mut CompChannel,
}

// SAFETY: libibverbs objects may be used from any thread, several at once; the owner of this value
// destroys it once.
unsafe impl Send for QueueOfDriver {}
// SAFETY: libibverbs locks a completion queue in each call on the queue (ibverbs(7)).
unsafe impl Sync for QueueOfDriver {}
// SAFETY: libibverbs objects may be used from any thread; the owner of this value destroys the
// channel once.
unsafe impl Send for Channel {}
// SAFETY: the channel's only state is its fd, which any thread may read (ibv_get_cq_event(3)).
unsafe impl Sync for Channel {}

impl Channel {
    /// Creates a channel. Returns `None` if the driver has no completion events.
    fn create(device: &Arc<OpenDevice>) -> Result<Option<Self>> {
        if device.ops().req_notify_cq.is_none() {
            return Ok(None);
        }
        // SAFETY: the context is open as long as `device`.
        let channel = unsafe { (device.library().functions.create_comp_channel)(device.context()) };
        if channel.is_null() {
            let error = errors::call(device.nic(), "ibv_create_comp_channel", errors::last());
            return Err(error.remedy(
                "raise the limit of file descriptors (ulimit -n): each completion queue needs one",
            ));
        }
        let created = Self { device: Arc::clone(device), channel };
        let fcntl = |errno: rustix::io::Errno| {
            errors::call(device.nic(), "fcntl(O_NONBLOCK)", Errno(errno.raw_os_error()))
        };
        let flags = fcntl_getfl(created.as_fd()).map_err(fcntl)?;
        fcntl_setfl(created.as_fd(), flags | OFlags::NONBLOCK).map_err(fcntl)?;
        Ok(Some(created))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`, and its fd with it.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.device.is_inherited() {
            return;
        }
        let destroy = self.device.library().functions.destroy_comp_channel;
        // SAFETY: `create` made the channel, and its queue is already destroyed.
        if let Err(errno) = errors::status(unsafe { destroy(self.channel) }) {
            tracing::error!(nic = %self.device.nic(), %errno, "ibv_destroy_comp_channel");
        }
    }
}

impl VerbsCq {
    /// Creates a completion queue for `depth` work requests, without a channel. The queue can only
    /// be polled.
    pub(super) fn create(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        Self::with_channel(device, depth, None)
    }

    /// Creates a completion queue for `depth` work requests. The queue has a channel if the driver
    /// has completion events, since a channel cannot be added later.
    pub(super) fn create_waitable(device: &Arc<OpenDevice>, depth: usize) -> Result<Self> {
        Self::with_channel(device, depth, Channel::create(device)?)
    }

    fn with_channel(
        device: &Arc<OpenDevice>,
        depth: usize,
        channel: Option<Channel>,
    ) -> Result<Self> {
        let most = usize::try_from(device.attr().max_cqe).unwrap_or(0);
        let entries = depth.max(1);
        let room = CqRoom::new(entries);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let events = channel.as_ref().map_or(ptr::null_mut(), |channel| channel.channel);
        // SAFETY: the context is open as long as `device`, and a channel is destroyed after its
        // queue; vector 0 always exists.
        let cq = unsafe {
            (device.library().functions.create_cq)(
                device.context(),
                entries,
                ptr::null_mut(),
                events,
                0,
            )
        };
        if cq.is_null() {
            return Err(errors::call(device.nic(), "ibv_create_cq", errors::last())
                .context("depth", depth)
                .context("max_cqe", most));
        }
        let cq = QueueOfDriver { device: Arc::clone(device), cq };
        Ok(Self { cq, channel, room: Arc::new(room) })
    }

    pub(super) fn room(&self) -> &Arc<CqRoom> {
        &self.room
    }

    pub(super) fn cq(&self) -> *mut Cq {
        self.cq.cq
    }

    pub(super) fn device(&self) -> &Arc<OpenDevice> {
        &self.cq.device
    }

    /// Returns the fd of the channel; `None` without a channel. The fd becomes readable when a
    /// request completes after [`Self::arm`].
    pub(super) fn channel(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    /// Discards old events and requests an event for the next completion. Does nothing without a
    /// channel. A completion that arrived before this call may cause no event, so the caller must
    /// poll after this call.
    pub(super) fn arm(&self) -> Result<()> {
        let (Some(channel), Some(request)) = (&self.channel, self.device().ops().req_notify_cq)
        else {
            return Ok(());
        };
        let functions = &self.device().library().functions;
        let failed = |symbol, errno| errors::call(self.device().nic(), symbol, errno);
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives as long as `self`; both places are writable for the call.
        while unsafe { (functions.get_cq_event)(channel.channel, &mut cq, &mut context) } == 0 {
            // SAFETY: the channel has only this queue, so the event is the queue's, and it is
            // acknowledged once. Destroying a queue waits for unacknowledged events.
            unsafe { (functions.ack_cq_events)(self.cq(), 1) };
        }
        let errno = errors::last();
        if errno != WOULD_BLOCK && errno != INTERRUPTED {
            return Err(
                failed("ibv_get_cq_event", errno).remedy("open the device again: it was removed")
            );
        }
        // SAFETY: the queue lives as long as `self`. Zero requests an event for any completion.
        errors::status(unsafe { request(self.cq(), 0) })
            .map_err(|errno| failed("ibv_req_notify_cq", errno))
    }

    /// Reads work completions from the NIC into `batch`. Returns the part of `batch` that was
    /// filled.
    #[inline]
    pub(super) fn poll<'a>(&self, batch: &'a mut [MaybeUninit<Wc>]) -> Result<&'a [Wc]> {
        let device = self.device();
        let Some(poll) = device.ops().poll_cq else {
            return Err(Error::new(ErrorKind::Unsupported, "ibv_poll_cq")
                .provider(device.nic().to_string()));
        };
        let most = c_int::try_from(batch.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue lives as long as `self`; the batch is writable for `most` entries.
        let count = unsafe { poll(self.cq(), most, batch.as_mut_ptr().cast()) };
        if let Ok(read) = usize::try_from(count) {
            let filled = &batch[..read];
            // SAFETY: the driver filled `count` entries, and every bit pattern of its plain fields
            // is valid. The result borrows the entries.
            return Ok(unsafe { slice::from_raw_parts(filled.as_ptr().cast(), filled.len()) });
        }
        let why = "open the device again: it was removed or failed";
        Err(device.refuse(ErrorKind::Driver, "ibv_poll_cq", why).context("returned", count))
    }
}

impl Drop for QueueOfDriver {
    fn drop(&mut self) {
        if self.device.is_inherited() {
            return;
        }
        let destroy = self.device.library().functions.destroy_cq;
        // SAFETY: `VerbsCq` created the queue. The owner of a queue pair holds its queues and drops
        // the queue pair first.
        let destroyed = unsafe { destroy(self.cq) };
        if let Err(errno) = errors::status(destroyed) {
            tracing::error!(nic = %self.device.nic(), %errno, "ibv_destroy_cq");
        }
    }
}
