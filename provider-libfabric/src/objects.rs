//! libfabric's objects of an endpoint.

#![allow(unsafe_code, reason = "opens and closes libfabric's objects")]

use std::{ffi::c_int, ptr};

use hmem_core::{ErrorKind, Result};

use super::{
    open::OpenDomain,
    plan::refuse,
    sys::{self, fi_av_attr, fi_cq_attr, fi_info, fid, fid_av, fid_cq, fid_ep},
};

/// Space for the longest address of an endpoint (`fi_getname`), in bytes.
const ADDRESS: usize = 512;

/// libfabric's objects of an endpoint. A pointer is null if its object is not open.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) endpoint: *mut fid_ep,
    pub(super) queue: *mut fid_cq,
    addresses: *mut fid_av,
}

// SAFETY: libfabric's objects belong to no thread, and the domain's lock serialises the calls.
unsafe impl Send for Objects {}

impl Objects {
    /// Returns a value without objects.
    pub(super) fn none() -> Self {
        let (endpoint, queue, addresses) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        Self { endpoint, queue, addresses }
    }

    /// Opens the objects, binds and enables them. Also returns the address of the endpoint.
    pub(super) fn open(
        open: &OpenDomain,
        info: *mut fi_info,
        depths: usize,
    ) -> Result<(Self, Vec<u8>)> {
        let mut this = Self::none();
        match this.open_all(open, info, depths).and_then(|()| this.name(open)) {
            Ok(address) => Ok((this, address)),
            Err(error) => {
                if let Err(error) = this.close(open) {
                    tracing::error!(error = %error.full(), "an object of an endpoint stays open");
                }
                Err(error)
            }
        }
    }

    fn open_all(&mut self, open: &OpenDomain, info: *mut fi_info, depths: usize) -> Result<()> {
        let _guard = open.lock();
        let (domain, none) = (open.domain, ptr::null_mut());
        let mut queue_attr = fi_cq_attr {
            size: depths,
            flags: 0,
            format: sys::FI_CQ_FORMAT_TAGGED,
            wait_obj: sys::FI_WAIT_NONE,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        let mut address_attr = fi_av_attr {
            r#type: sys::FI_AV_UNSPEC,
            rx_ctx_bits: 0,
            count: 64,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        let call = |name, returned: Option<c_int>| match returned {
            Some(returned) => open.check(name, returned),
            None => Err(open.lacks(name)),
        };
        // SAFETY: the domain is open, and the entry is the one with which it was opened. Each
        // object was opened before it is used, so its tables are valid.
        unsafe {
            let ops = &*(*domain).ops;
            call(
                "fi_cq_open",
                ops.cq_open
                    .map(|open| open(domain, &raw mut queue_attr, &raw mut self.queue, none)),
            )?;
            call(
                "fi_av_open",
                ops.av_open
                    .map(|open| open(domain, &raw mut address_attr, &raw mut self.addresses, none)),
            )?;
            call(
                "fi_endpoint",
                ops.endpoint.map(|open| open(domain, info, &raw mut self.endpoint, none)),
            )?;
            let endpoint: *mut fid = self.endpoint.cast();
            let bind = (*(*endpoint).ops).bind;
            let flags = sys::FI_TRANSMIT | sys::FI_RECV;
            call("fi_ep_bind", bind.map(|bind| bind(endpoint, self.queue.cast(), flags)))?;
            call("fi_ep_bind", bind.map(|bind| bind(endpoint, self.addresses.cast(), 0)))?;
            let enabled = open.control("fi_enable", endpoint, (sys::FI_ENABLE, none));
            enabled.map_err(|error| match error.kind() {
                // `ofi_rxm` opens one queue for the requests of all peers here.
                ErrorKind::InvalidArgument => error.remedy(
                    "lower the number of peers in FI_UNIVERSE_SIZE (256 by default): the NIC may \
                     not have a completion queue that long",
                ),
                _ => error,
            })
        }
    }

    /// Returns the address of the endpoint.
    fn name(&self, open: &OpenDomain) -> Result<Vec<u8>> {
        const NAME: &str = "fi_getname";
        let (mut name, mut len) = (vec![0_u8; ADDRESS], ADDRESS);
        let _guard = open.lock();
        // SAFETY: the endpoint is open, and `len` is the size of the buffer.
        let returned = unsafe {
            let getname = (*(*self.endpoint).cm).getname.ok_or_else(|| open.lacks(NAME))?;
            getname(self.endpoint.cast(), name.as_mut_ptr().cast(), &raw mut len)
        };
        open.check(NAME, returned)?;
        name.truncate(len);
        Ok(name)
    }

    /// Closes the objects that are open. Logs the errors of the queue and the address vector.
    ///
    /// # Errors
    /// The error of `fi_close` for the endpoint. All objects are then still open.
    pub(super) fn close(&mut self, open: &OpenDomain) -> Result<()> {
        let objects: [(&str, *mut fid); 3] = [
            ("fi_close(ep)", self.endpoint.cast()),
            ("fi_close(cq)", self.queue.cast()),
            ("fi_close(av)", self.addresses.cast()),
        ];
        let _guard = open.lock();
        for (name, object) in objects {
            if object.is_null() {
                continue;
            }
            // SAFETY: the object is open, and nothing uses it after success: the endpoint leaves
            // the table of its engine.
            let returned = unsafe { (*(*object).ops).close.map(|close| close(object)) };
            let closed =
                returned.map_or_else(|| Err(open.lacks(name)), |code| open.check(name, code));
            if object == self.endpoint.cast() {
                closed?;
                self.endpoint = ptr::null_mut();
            } else if let Err(error) = closed {
                tracing::error!(error = %error.full(), "an object of an endpoint stays open");
            }
        }
        Ok(())
    }

    /// Adds an address. Returns its index.
    pub(super) fn insert(&self, open: &OpenDomain, address: &[u8]) -> Result<u64> {
        const INSERT: &str = "fi_av_insert";
        // The provider reads as many bytes as its addresses have.
        let mut padded = [0_u8; ADDRESS];
        let unreachable = |why| refuse(ErrorKind::Unreachable, why).context("call", INSERT);
        if address.len() >= ADDRESS {
            return Err(unreachable("pass the name of an endpoint of the same provider"));
        }
        padded[..address.len()].copy_from_slice(address);
        let mut index = u64::MAX;
        let _guard = open.lock();
        // SAFETY: the address vector is open. The buffer is longer than any address, with zeros at
        // its end.
        let returned = unsafe {
            let insert = (*(*self.addresses).ops).insert.ok_or_else(|| open.lacks(INSERT))?;
            insert(self.addresses, padded.as_ptr().cast(), 1, &raw mut index, 0, ptr::null_mut())
        };
        match returned {
            1 => Ok(index),
            _ => Err(unreachable("check the peer's address and the network: libfabric refused it")
                .context("returned", returned)),
        }
    }
}
