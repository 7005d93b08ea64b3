//! A program that speaks libfabric: it opens a domain and endpoints, and posts reads and writes
//! itself. It knows nothing of registration. The structs are those of libfabric's headers.

use std::{
    ffi::{CString, c_int, c_void},
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::sys::{self, Functions};

/// Default limit for a transfer. A transfer over a loopback device takes less than a millisecond.
const LIMIT: Duration = Duration::from_secs(20);

/// Error of a libfabric call: the call, and the number that it returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallError(pub(crate) &'static str, pub(crate) i64);

fn check(call: &'static str, returned: impl Into<i64>) -> Result<(), CallError> {
    match returned.into() {
        0 => Ok(()),
        error => Err(CallError(call, error)),
    }
}

/// Properties of the domain to open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) provider: &'static str,
    pub(crate) api_version: u32,
    pub(crate) endpoint_type: c_int,
    pub(crate) caps: u64,
    /// Flags of every transfer (`FI_DELIVERY_COMPLETE`, say).
    pub(crate) op_flags: u64,
    /// The mode bits that the program offers (`FI_MR_...`).
    pub(crate) mr_mode: c_int,
    pub(crate) threading: c_int,
}

impl Wanted {
    /// Returns the properties of a domain for RMA. The program accepts each of the mode bits in
    /// `mr_mode`.
    pub(crate) const fn rma(provider: &'static str) -> Self {
        Self {
            provider,
            api_version: sys::API_VERSION,
            endpoint_type: sys::FI_EP_RDM,
            caps: sys::FI_RMA,
            op_flags: 0,
            mr_mode: sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY
                | sys::FI_MR_ENDPOINT,
            threading: sys::FI_THREAD_SAFE,
        }
    }
}

/// An open domain, with the `fi_info` that describes it.
pub(crate) struct Fabric {
    functions: Functions,
    pub(crate) info: *mut sys::fi_info,
    pub(crate) fabric: *mut sys::fid_fabric,
    pub(crate) domain: *mut sys::fid_domain,
}

// SAFETY: libfabric's objects belong to no thread.
unsafe impl Send for Fabric {}
// SAFETY: the domain has FI_THREAD_SAFE, or the test serialises the calls.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// Opens the first domain with the wanted properties that `fi_getinfo` lists for this machine's
    /// loopback device.
    pub(crate) fn open(functions: &Functions, wanted: Wanted) -> Result<Arc<Self>, CallError> {
        let name = CString::new(wanted.provider).expect("a name without a zero");
        let (node, flags) = match wanted.provider {
            "shm" => (ptr::null(), 0),
            _ => (c"127.0.0.1".as_ptr(), sys::FI_SOURCE),
        };
        let mut this = Self {
            functions: functions.clone(),
            info: ptr::null_mut(),
            fabric: ptr::null_mut(),
            domain: ptr::null_mut(),
        };
        // SAFETY: `fi_dupinfo` allocates the hints with their attributes, and `fi_freeinfo` frees
        // them after the name, which it must not free, is taken out. The objects are opened in the
        // order that libfabric requires, from pointers that it returned.
        unsafe {
            let hints = functions.fi_dupinfo()(ptr::null());
            if hints.is_null() {
                return Err(CallError("fi_allocinfo", 0));
            }
            ((*hints).caps, (*hints).mode) = (wanted.caps, 0);
            (*(*hints).ep_attr).r#type = wanted.endpoint_type;
            (*(*hints).tx_attr).op_flags = wanted.op_flags;
            (*(*hints).domain_attr).mr_mode = wanted.mr_mode;
            (*(*hints).domain_attr).threading = wanted.threading;
            (*(*hints).fabric_attr).prov_name = name.as_ptr().cast_mut();
            let (version, service) = (wanted.api_version, ptr::null());
            let found =
                functions.fi_getinfo()(version, node, service, flags, hints, &mut this.info);
            (*(*hints).fabric_attr).prov_name = ptr::null_mut();
            functions.fi_freeinfo()(hints);
            check("fi_getinfo", found)?;
            let attr = (*this.info).fabric_attr;
            check("fi_fabric", functions.fi_fabric()(attr, &mut this.fabric, ptr::null_mut()))?;
            let open = (*(*this.fabric).ops).domain.expect("every fabric has this call");
            let opened = open(this.fabric, this.info, &mut this.domain, ptr::null_mut());
            check("fi_domain", opened)?;
        }
        Ok(Arc::new(this))
    }
}

impl Drop for Fabric {
    /// Panics if an object in the domain is still open.
    fn drop(&mut self) {
        let mut refused = Vec::new();
        for object in [self.domain.cast::<sys::fid>(), self.fabric.cast()] {
            if !object.is_null() {
                // SAFETY: the object was opened by `open`, and is closed only here.
                let closed = unsafe { (*(*object).ops).close.expect("every object")(object) };
                if closed != 0 {
                    refused.push(closed);
                }
            }
        }
        // SAFETY: `fi_getinfo` allocated the list, or it is null. It is freed only here.
        unsafe { self.functions.fi_freeinfo()(self.info) };
        assert!(refused.is_empty() || thread::panicking(), "objects are still open: {refused:?}");
    }
}

/// Local memory of a transfer, with its descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) descriptor: *mut c_void,
}

/// Memory of a peer, with its key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) peer: sys::fi_addr_t,
    pub(crate) address: u64,
    pub(crate) key: u64,
}

/// An endpoint with a completion queue and an address vector of its own.
pub(crate) struct Endpoint {
    pub(crate) endpoint: *mut sys::fid_ep,
    /// Time after which a transfer counts as failed.
    pub(crate) limit: Duration,
    pub(crate) queue: *mut sys::fid_cq,
    addresses: *mut sys::fid_av,
    _fabric: Arc<Fabric>,
}

impl Endpoint {
    pub(crate) fn open(fabric: &Arc<Fabric>) -> Result<Self, CallError> {
        let mut this = Self {
            endpoint: ptr::null_mut(),
            limit: LIMIT,
            queue: ptr::null_mut(),
            addresses: ptr::null_mut(),
            _fabric: Arc::clone(fabric),
        };
        let mut queue = sys::fi_cq_attr {
            size: 64,
            flags: 0,
            format: sys::FI_CQ_FORMAT_CONTEXT,
            wait_obj: sys::FI_WAIT_NONE,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        let mut addresses = sys::fi_av_attr {
            r#type: sys::FI_AV_TABLE,
            rx_ctx_bits: 0,
            count: 2,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        // SAFETY: the domain is open, so its tables are valid. The attributes outlive the calls.
        unsafe {
            let (domain, none) = (fabric.domain, ptr::null_mut());
            let ops = &*(*domain).ops;
            let open = ops.endpoint.expect("every domain");
            check("fi_endpoint", open(domain, fabric.info, &mut this.endpoint, none))?;
            let open = ops.cq_open.expect("every domain");
            check("fi_cq_open", open(domain, &mut queue, &mut this.queue, none))?;
            let open = ops.av_open.expect("every domain");
            check("fi_av_open", open(domain, &mut addresses, &mut this.addresses, none))?;
            let endpoint: *mut sys::fid = this.endpoint.cast();
            let bind = (*(*endpoint).ops).bind.expect("every endpoint");
            let flags = sys::FI_TRANSMIT | sys::FI_RECV;
            check("fi_ep_bind", bind(endpoint, this.queue.cast(), flags))?;
            check("fi_ep_bind", bind(endpoint, this.addresses.cast(), 0))?;
            let control = (*(*endpoint).ops).control.expect("every endpoint");
            check("fi_enable", control(endpoint, sys::FI_ENABLE, none))?;
        }
        Ok(this)
    }

    /// Returns the endpoint's address, which a peer passes to [`Self::insert`].
    pub(crate) fn name(&self) -> Result<Vec<u8>, CallError> {
        let mut name = vec![0_u8; 256];
        let mut len = name.len();
        // SAFETY: the endpoint is open, and `len` is the size of the buffer.
        unsafe {
            let getname = (*(*self.endpoint).cm).getname.expect("every endpoint");
            check("fi_getname", getname(self.endpoint.cast(), name.as_mut_ptr().cast(), &mut len))?;
        }
        name.truncate(len);
        Ok(name)
    }

    /// Adds a peer's address, and returns its number.
    pub(crate) fn insert(&self, name: &[u8]) -> Result<sys::fi_addr_t, CallError> {
        let (mut address, vector) = (u64::MAX, self.addresses);
        // SAFETY: the address vector is open, and the name is that of an endpoint of its provider.
        let inserted = unsafe {
            let insert = (*(*vector).ops).insert.expect("every address vector");
            insert(vector, name.as_ptr().cast(), 1, &mut address, 0, ptr::null_mut())
        };
        check("fi_av_insert", inserted - 1).map(|()| address)
    }

    /// Writes local memory to a peer, and waits for the completion. `target` is the peer's
    /// endpoint, which makes progress only when its queue is read.
    ///
    /// # Safety
    /// Local and remote memory are valid for `local.len` bytes, and no reference to them is used
    /// during the call.
    pub(crate) unsafe fn write(
        &self,
        target: &Self,
        local: Local,
        remote: Remote,
    ) -> Result<(), CallError> {
        self.transfer("fi_write", target, || {
            let (endpoint, none) = (self.endpoint, ptr::null_mut());
            let (Local { address, len, descriptor }, Remote { peer, .. }) = (local, remote);
            let buffer = ptr::with_exposed_provenance(address as usize);
            // SAFETY: the caller promises valid memory until the completion.
            unsafe {
                let write = (*(*endpoint).rma).write.expect("an endpoint with RMA");
                write(endpoint, buffer, len, descriptor, peer, remote.address, remote.key, none)
            }
        })
    }

    /// Reads a peer's memory into local memory, like [`Self::write`].
    ///
    /// # Safety
    /// The promises of [`Self::write`].
    pub(crate) unsafe fn read(
        &self,
        target: &Self,
        local: Local,
        remote: Remote,
    ) -> Result<(), CallError> {
        self.transfer("fi_read", target, || {
            let (endpoint, none) = (self.endpoint, ptr::null_mut());
            let (Local { address, len, descriptor }, Remote { peer, .. }) = (local, remote);
            let buffer = ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: the caller promises valid memory until the completion.
            unsafe {
                let read = (*(*endpoint).rma).read.expect("an endpoint with RMA");
                read(endpoint, buffer, len, descriptor, peer, remote.address, remote.key, none)
            }
        })
    }

    fn transfer(
        &self,
        call: &'static str,
        target: &Self,
        post: impl Fn() -> isize,
    ) -> Result<(), CallError> {
        let end = Instant::now() + self.limit;
        let again = -(sys::FI_EAGAIN as isize);
        let mut posted = false;
        while Instant::now() < end {
            if !posted {
                match post() {
                    0 => posted = true,
                    returned if returned == again => {}
                    returned => return Err(CallError(call, returned as i64)),
                }
            }
            target.completions()?;
            if self.completions()? > 0 {
                return Ok(());
            }
            thread::yield_now();
        }
        Err(CallError("the completion did not come in time", 0))
    }

    /// Makes progress, and returns the number of completions read: 0 or 1.
    fn completions(&self) -> Result<isize, CallError> {
        let (mut entry, queue) = (sys::fi_cq_entry { op_context: ptr::null_mut() }, self.queue);
        // SAFETY: the queue is open, and has entries of this format.
        let read = unsafe {
            let read = (*(*queue).ops).read.expect("every queue");
            read(queue, (&raw mut entry).cast(), 1)
        };
        match read {
            1 => Ok(1),
            read if read == -(sys::FI_EAGAIN as isize) || read == 0 => Ok(0),
            read if read == -(sys::FI_EAVAIL as isize) => Err(self.failure()),
            read => Err(CallError("fi_cq_read", read as i64)),
        }
    }

    /// Returns the error of a transfer that failed.
    fn failure(&self) -> CallError {
        let mut entry: [u64; 32] = [0; 32];
        let head: *mut sys::fi_cq_err_entry = entry.as_mut_ptr().cast();
        // SAFETY: the queue is open. The buffer has room for the entry of any API version.
        unsafe {
            let readerr = (*(*self.queue).ops).readerr.expect("every queue");
            readerr(self.queue, head, 0);
            CallError("the transfer failed", (*head).err.into())
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        for object in [self.endpoint.cast::<sys::fid>(), self.queue.cast(), self.addresses.cast()] {
            if !object.is_null() {
                // SAFETY: `open` opened the object, and it is closed only here.
                let closed = unsafe { (*(*object).ops).close.expect("every object")(object) };
                assert!(closed == 0 || thread::panicking(), "fi_close: {closed}");
            }
        }
    }
}
