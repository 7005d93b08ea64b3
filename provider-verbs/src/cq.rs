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
use rustix::{
    event::epoll::EventFlags,
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
};

use super::{
    device::OpenDevice,
    errors,
    sys::{CompChannel, Cq, Wc},
};

const INTERRUPTED: Errno = Errno(4);
const BUSY: Errno = Errno(16);
const WOULD_BLOCK: Errno = Errno(11);

/// Owner of an `ibv_cq`, and of its completion channel if it has one. Dropping the value destroys
/// the queue first, and then the channel.
#[derive(Debug)]
pub(super) struct VerbsCq {
    pub(super) device: Arc<OpenDevice>,
    pub(super) cq: *mut Cq,
    channel: Option<Channel>,
    pub(super) room: Arc<CqRoom>,
}

/// The used room of a completion queue, as two counters ([`Room`]): used entries of the NIC's
/// queue, and completions that the application has not read.
#[derive(Debug)]
pub(super) struct CqRoom {
    /// Maximum value of each counter: the requested length of the NIC's queue, which has at most 31
    /// bits.
    most: u64,
    /// The number of used entries in the low 32 bits, and of unread completions in the high 32
    /// bits.
    used: AtomicU64,
}

/// Room in a completion queue: a number of entries of the NIC's queue, and a number of completions
/// for the application. The poster of a request reserves the room of the request before the post.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room(u64);

impl Room {
    /// No room.
    pub(super) const NONE: Self = Self(0);
    /// Room for one completion that the application reads. A request uses this room until the
    /// application has read the completion, so the memory for unread completions is limited.
    pub(super) const COMPLETION: Self = Self(1 << 32);

    /// Returns room of `count` entries in the NIC's queue. A request needs one entry for each of
    /// its work requests, because all work requests complete if the request fails. The entries stay
    /// reserved until the provider has read the completion of the last work request. So the NIC
    /// never writes more completions than its queue holds.
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

    /// Returns true if neither number is greater than `most`.
    const fn fits(self, most: u64) -> bool {
        self.0 as u32 as u64 <= most && self.0 >> 32 <= most
    }
}

impl CqRoom {
    /// Reserves the room of a request. Returns false, and reserves nothing, if a counter would
    /// exceed its maximum.
    #[inline]
    pub(super) fn reserve(&self, room: Room) -> bool {
        let next = |used| {
            // No counter overflows 32 bits: the maximum has 31 bits, and so does a request's room.
            let next = Room(used).and(room);
            next.fits(self.most).then_some(next.0)
        };
        // The counters protect no other data, so relaxed ordering is enough.
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Returns true if `room` exceeds the maximum of a counter, so that [`Self::reserve`] always
    /// fails.
    pub(super) fn exceeds(&self, room: Room) -> bool {
        !room.fits(self.most)
    }

    /// Releases room that was reserved.
    #[inline]
    pub(super) fn release(&self, room: Room) {
        self.used.fetch_sub(room.0, Ordering::Relaxed);
    }
}

/// Owner of an `ibv_comp_channel` for one queue. Reads of its fd do not block.
#[derive(Debug)]
pub(super) struct Channel {
    device: Arc<OpenDevice>,
    channel: *mut CompChannel,
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and only the drop of this value
// destroys the queue.
unsafe impl Send for VerbsCq {}
// SAFETY: libibverbs locks a completion queue in each call on the queue (ibverbs(7)).
unsafe impl Sync for VerbsCq {}
// SAFETY: libibverbs objects may be used from any thread; the owner of this value destroys the
// channel once.
unsafe impl Send for Channel {}
// SAFETY: the channel's only state is its fd, which any thread may read (ibv_get_cq_event(3)).
unsafe impl Sync for Channel {}

impl Channel {
    /// Creates a channel. Returns `None` if the driver has no completion events.
    pub(super) fn create(device: &Arc<OpenDevice>) -> Result<Option<Self>> {
        if device.ops().req_notify_cq.is_none() {
            return Ok(None);
        }
        // SAFETY: the context is open as long as `device`.
        let channel = unsafe { (device.library.functions.create_comp_channel)(device.context) };
        let channel = device.created("ibv_create_comp_channel", channel).map_err(|error| {
            let why =
                "raise the limit of file descriptors (ulimit -n): each completion queue needs one";
            errors::advise(error, why)
        })?;
        let created = Self { device: Arc::clone(device), channel };
        let fcntl = |errno: rustix::io::Errno| {
            errors::call(&device.nic, "fcntl(O_NONBLOCK)", Errno(errno.raw_os_error()))
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
        let destroy = self.device.library.functions.destroy_comp_channel;
        if self.device.is_inherited() {
            return;
        }
        // SAFETY: `create` made the channel. Its queue holds it, and is already destroyed.
        let destroyed = errors::status(unsafe { destroy(self.channel) });
        let Err(errno) = destroyed else { return };
        if errno == BUSY && self.device.life.record.is_lost() {
            // The library still counts the queue, because the kernel had destroyed it before.
            // SAFETY: the library does not use the channel of the destroyed queue any more, so this
            // is the last use of the fd.
            unsafe { rustix::io::close((*self.channel).fd) };
        } else {
            tracing::error!(nic = %self.device.nic, %errno, "ibv_destroy_comp_channel");
        }
    }
}

impl VerbsCq {
    /// Creates a completion queue for `depth` work requests. Threads can sleep for completions only
    /// if the queue has a channel, which cannot be added later.
    pub(super) fn create(
        device: &Arc<OpenDevice>,
        depth: usize,
        channel: Option<Channel>,
    ) -> Result<Self> {
        let most = usize::try_from(device.attr.max_cqe).unwrap_or(0);
        let entries = c_int::try_from(depth.max(1)).unwrap_or(c_int::MAX);
        let room = CqRoom { most: u64::from(entries.unsigned_abs()), used: AtomicU64::new(0) };
        let events = channel.as_ref().map_or(ptr::null_mut(), |channel| channel.channel);
        let create = device.library.functions.create_cq;
        // SAFETY: the context is open as long as `device`, and a channel is destroyed after its
        // queue; vector 0 always exists.
        let cq = unsafe { create(device.context, entries, ptr::null_mut(), events, 0) };
        let cq = device
            .created("ibv_create_cq", cq)
            .map_err(|error| error.context("depth", depth).context("max_cqe", most))?;
        Ok(Self { device: Arc::clone(device), cq, channel, room: Arc::new(room) })
    }

    /// Returns true if the queue has a completion channel.
    pub(super) fn has_channel(&self) -> bool {
        self.channel.is_some()
    }

    /// Returns the fds that a thread watches while it sleeps for completions, each with the epoll
    /// events that wake the thread. The channel's fd becomes readable when a request completes
    /// after [`Self::arm`]. The others report the events and the loss of the device.
    pub(super) fn watched(
        &self,
    ) -> rustix::io::Result<impl Iterator<Item = (BorrowedFd<'_>, EventFlags)>> {
        let channel = self.channel.as_ref().map(|channel| (channel.as_fd(), EventFlags::IN));
        Ok([channel].into_iter().chain(self.device.life.watched()?).flatten())
    }

    /// Discards old events and requests an event for the next completion. Does nothing without a
    /// channel. A completion that arrived before this call may cause no event, so the caller must
    /// poll after this call.
    pub(super) fn arm(&self) -> Result<()> {
        let (Some(channel), Some(request)) = (&self.channel, self.device.ops().req_notify_cq)
        else {
            return Ok(());
        };
        let functions = &self.device.library.functions;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives as long as `self`; both places are writable for the call.
        while unsafe { (functions.get_cq_event)(channel.channel, &mut cq, &mut context) } == 0 {
            // SAFETY: the channel has only this queue, so the event is the queue's, and it is
            // acknowledged once. Destroying a queue waits for unacknowledged events.
            unsafe { (functions.ack_cq_events)(self.cq, 1) };
        }
        let errno = errors::last();
        if errno != WOULD_BLOCK && errno != INTERRUPTED {
            let error = errors::call(&self.device.nic, "ibv_get_cq_event", errno);
            let why = "open the device again: it was removed";
            return Err(self.device.failed(error.remedy(why)));
        }
        // SAFETY: the queue lives as long as `self`. Zero requests an event for any completion.
        self.device.check("ibv_req_notify_cq", unsafe { request(self.cq, 0) })
    }

    /// Reads work completions from the NIC into `batch`. Returns the part of `batch` that was
    /// filled.
    #[inline]
    pub(super) fn poll<'a>(&self, batch: &'a mut [MaybeUninit<Wc>]) -> Result<&'a [Wc]> {
        let Some(poll) = self.device.ops().poll_cq else {
            return Err(Error::new(ErrorKind::Unsupported, "ibv_poll_cq")
                .provider(self.device.nic.to_string()));
        };
        let most = c_int::try_from(batch.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue lives as long as `self`; the batch is writable for `most` entries.
        let count = unsafe { poll(self.cq, most, batch.as_mut_ptr().cast()) };
        if let Ok(read) = usize::try_from(count) {
            let filled = &batch[..read];
            // SAFETY: the driver filled `count` entries, and every bit pattern of its plain fields
            // is valid. The result borrows the entries.
            return Ok(unsafe { slice::from_raw_parts(filled.as_ptr().cast(), filled.len()) });
        }
        let why = "open the device again: it was removed or failed";
        let error = self.device.refuse(ErrorKind::Driver, "ibv_poll_cq", why);
        Err(self.device.failed(error.context("returned", count)))
    }
}

impl Drop for VerbsCq {
    fn drop(&mut self) {
        let destroy = self.device.library.functions.destroy_cq;
        // SAFETY: `create` made the queue. The owner of a queue pair holds its queues and drops the
        // queue pair first.
        self.device.destroy("ibv_destroy_cq", || unsafe { destroy(self.cq) });
    }
}
