//! Wrapper of the libibverbs functions that these tests call, looked up at run time. Offsets are
//! those of `infiniband/verbs.h` on 64-bit machines.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    io,
};

use libloading::Library;

pub(crate) const LOCAL_WRITE: c_int = 1;
#[cfg(feature = "dma-buf")]
pub(crate) const REMOTE_WRITE: c_int = 2;
#[cfg(feature = "dma-buf")]
pub(crate) const REMOTE_READ: c_int = 4;
#[cfg(feature = "dma-buf")]
pub(crate) const REMOTE_ATOMIC: c_int = 8;

type Object = *mut c_void;

/// The libibverbs library, which stays loaded.
pub(crate) struct Verbs(&'static Library);

impl Verbs {
    pub(crate) fn load() -> Self {
        // SAFETY: libibverbs' initialisers have no preconditions.
        let library = unsafe { Library::new("libibverbs.so.1") }.expect("libibverbs loads");
        Self(Box::leak(Box::new(library)))
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: every caller names a function type that matches the C declaration of that symbol.
        // The library stays loaded.
        *unsafe { self.0.get::<F>(name) }.unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn device_names(&self) -> Vec<String> {
        self.with_devices(|devices| devices.iter().map(|(name, _)| name.clone()).collect())
    }

    fn with_devices<R>(&self, look: impl FnOnce(&[(String, Object)]) -> R) -> R {
        let list: unsafe extern "C" fn(*mut c_int) -> *mut Object =
            self.function("ibv_get_device_list");
        let free: unsafe extern "C" fn(*mut Object) = self.function("ibv_free_device_list");
        let name: unsafe extern "C" fn(Object) -> *const c_char =
            self.function("ibv_get_device_name");
        let mut count = 0;
        // SAFETY: `count` entries of the list are devices, which live until the list is freed.
        unsafe {
            let devices = list(&mut count);
            assert!(!devices.is_null(), "ibv_get_device_list: {}", io::Error::last_os_error());
            let found: Vec<_> = (0..usize::try_from(count).unwrap())
                .map(|index| *devices.add(index))
                .map(|device| (CStr::from_ptr(name(device)).to_str().unwrap().to_owned(), device))
                .collect();
            let result = look(&found);
            free(devices);
            result
        }
    }

    /// Opens a device by name and makes a protection domain on it.
    pub(crate) fn open(&self, wanted: &str) -> Domain<'_> {
        let open: unsafe extern "C" fn(Object) -> Object = self.function("ibv_open_device");
        let alloc: unsafe extern "C" fn(Object) -> Object = self.function("ibv_alloc_pd");
        // SAFETY: the device lives as long as the list. The context is checked before its use.
        let (context, domain) = self.with_devices(|devices| unsafe {
            let (_, device) =
                devices.iter().find(|(name, _)| name == wanted).expect("the device is there");
            let context = open(*device);
            assert!(!context.is_null(), "ibv_open_device {wanted}: {}", io::Error::last_os_error());
            (context, alloc(context))
        });
        assert!(!domain.is_null(), "ibv_alloc_pd {wanted}: {}", io::Error::last_os_error());
        Domain { verbs: self, context, domain }
    }

    fn release(&self, name: &str, object: Object) -> c_int {
        let release: unsafe extern "C" fn(Object) -> c_int = self.function(name);
        // SAFETY: callers pass an object of the function's kind, and do not use it after a 0.
        unsafe { release(object) }
    }
}

/// An open device with a protection domain.
pub(crate) struct Domain<'v> {
    verbs: &'v Verbs,
    context: Object,
    domain: Object,
}

impl Domain<'_> {
    /// Calls `ibv_reg_mr` for a slice, which must outlive the region.
    pub(crate) fn register(&self, memory: &mut [u8], access: c_int) -> io::Result<Region<'_>> {
        let register: unsafe extern "C" fn(Object, Object, usize, c_int) -> Object =
            self.verbs.function("ibv_reg_mr");
        // SAFETY: the slice is mapped and writable.
        self.region(unsafe {
            register(self.domain, memory.as_mut_ptr().cast(), memory.len(), access)
        })
    }

    /// Calls `ibv_reg_dmabuf_mr`.
    #[cfg(feature = "dma-buf")]
    pub(crate) fn register_dma_buf(
        &self,
        fd: c_int,
        offset: u64,
        length: usize,
        iova: u64,
        access: c_int,
    ) -> io::Result<Region<'_>> {
        type Register = unsafe extern "C" fn(Object, u64, usize, u64, c_int, c_int) -> Object;
        let register: Register = self.verbs.function("ibv_reg_dmabuf_mr");
        // SAFETY: the call checks its arguments.
        self.region(unsafe { register(self.domain, offset, length, iova, fd, access) })
    }

    fn region(&self, region: Object) -> io::Result<Region<'_>> {
        if region.is_null() {
            Err(io::Error::last_os_error())
        } else {
            Ok(Region { verbs: self.verbs, region })
        }
    }

    /// Calls `ibv_dealloc_pd` and returns its result. If the result is not 0, the domain stays
    /// usable.
    pub(crate) fn try_close(&self) -> c_int {
        self.verbs.release("ibv_dealloc_pd", self.domain)
    }

    /// Closes the device. The caller has closed the protection domain by [`Domain::try_close`].
    pub(crate) fn close_device(self) {
        assert_eq!(self.verbs.release("ibv_close_device", self.context), 0, "ibv_close_device");
    }
}

/// A registered memory region (`struct ibv_mr`).
pub(crate) struct Region<'d> {
    verbs: &'d Verbs,
    region: Object,
}

impl Region<'_> {
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: `lkey` of a live `struct ibv_mr`.
        unsafe { self.region.byte_add(36).cast::<u32>().read() }
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        let status = self.verbs.release("ibv_dereg_mr", self.region);
        assert_eq!(status, 0, "ibv_dereg_mr");
    }
}

/// Two connected queue pairs for one-sided operations from a domain to itself. A single queue pair
/// connected to itself would report a refused request as flushed instead of with its error.
#[cfg(feature = "dma-buf")]
pub(crate) struct Loopback<'d> {
    domain: &'d Domain<'d>,
    asking: Object,
    answering: Object,
    completions: Object,
}

#[cfg(feature = "dma-buf")]
#[derive(Clone, Copy)]
pub(crate) enum Operation {
    Write = 0,
    Read = 4,
    FetchAdd = 6,
}

#[cfg(feature = "dma-buf")]
impl<'d> Loopback<'d> {
    pub(crate) fn new(domain: &'d Domain<'d>) -> Self {
        let verbs = domain.verbs;
        let create_cq: unsafe extern "C" fn(Object, c_int, Object, Object, c_int) -> Object =
            verbs.function("ibv_create_cq");
        let create_qp: unsafe extern "C" fn(Object, *mut [u64; 8]) -> Object =
            verbs.function("ibv_create_qp");
        let modify_qp: unsafe extern "C" fn(Object, *mut [u64; 18], c_int) -> c_int =
            verbs.function("ibv_modify_qp");
        let query_gid: unsafe extern "C" fn(Object, u8, c_int, *mut [u8; 16]) -> c_int =
            verbs.function("ibv_query_gid");
        // SAFETY: the arrays have the size and alignment of `struct ibv_qp_init_attr` (64 bytes)
        // and `struct ibv_qp_attr` (144 bytes), and zero is valid in every field of them.
        unsafe {
            let completions =
                create_cq(domain.context, 16, std::ptr::null_mut(), std::ptr::null_mut(), 0);
            assert!(!completions.is_null(), "ibv_create_cq");
            let new_queue_pair = || {
                let mut initial = [0_u64; 8];
                initial[1] = completions as u64;
                initial[2] = completions as u64;
                let at = initial.as_mut_ptr();
                // max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, qp_type RC
                for (offset, value) in [(32, 16_u32), (36, 1), (40, 1), (44, 1), (52, 2)] {
                    at.byte_add(offset).cast::<u32>().write(value);
                }
                let queue_pair = create_qp(domain.domain, &mut initial);
                assert!(!queue_pair.is_null(), "ibv_create_qp: {}", io::Error::last_os_error());
                queue_pair
            };
            let (asking, answering) = (new_queue_pair(), new_queue_pair());
            let number = |queue_pair: Object| queue_pair.byte_add(52).cast::<u32>().read();
            let mut gid = [0_u8; 16];
            // Entry 0 of the table is the link-local address, entry 1 the IPv4 address.
            assert_eq!(query_gid(domain.context, 1, 1, &mut gid), 0, "ibv_query_gid");

            let mut attributes = [0_u64; 18];
            let at = attributes.as_mut_ptr();
            let put = |offset: usize, value: u32| at.byte_add(offset).cast::<u32>().write(value);
            let put_byte = |offset: usize, value: u8| at.byte_add(offset).cast::<u8>().write(value);
            put(8, 3); // path_mtu 1024
            let rights = LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC;
            put(32, rights as u32); // qp_access_flags
            at.byte_add(56).cast::<[u8; 16]>().write(gid); // ah_attr.grh.dgid
            put_byte(76, 1); // sgid_index
            put_byte(77, 1); // hop_limit
            put_byte(85, 1); // is_global
            put_byte(86, 1); // ah_attr.port_num
            put_byte(126, 1); // max_rd_atomic
            put_byte(127, 1); // max_dest_rd_atomic
            put_byte(128, 12); // min_rnr_timer
            put_byte(129, 1); // port_num
            put_byte(130, 14); // timeout
            put_byte(131, 7); // retry_cnt
            put_byte(132, 7); // rnr_retry
            let masks = [
                (1, 1 | 1 << 3 | 1 << 4 | 1 << 5),
                (2, 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20),
                (3, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16),
            ];
            for (queue_pair, other) in [(asking, answering), (answering, asking)] {
                put(28, number(other)); // dest_qp_num
                for (state, mask) in masks {
                    put(0, state);
                    assert_eq!(
                        modify_qp(queue_pair, at.cast(), mask),
                        0,
                        "ibv_modify_qp to state {state}"
                    );
                }
            }
            Self { domain, asking, answering, completions }
        }
    }

    /// Posts one operation, waits for its completion and returns the completion's status (`enum
    /// ibv_wc_status`).
    pub(crate) fn run(
        &self,
        operation: Operation,
        (local, length, lkey): (u64, u32, u32),
        (remote, rkey): (u64, u32),
        add: u64,
    ) -> u32 {
        type PostSend = unsafe extern "C" fn(Object, *mut [u64; 16], *mut Object) -> c_int;
        type PollCq = unsafe extern "C" fn(Object, c_int, *mut [u64; 6]) -> c_int;
        let mut entry = [local, u64::from(length) | u64::from(lkey) << 32];
        let mut request = [0_u64; 16];
        request[2] = entry.as_mut_ptr() as u64;
        request[3] = 1 | (operation as u64) << 32;
        request[4] = 2; // IBV_SEND_SIGNALED
        request[5] = remote;
        if matches!(operation, Operation::FetchAdd) {
            request[6] = add;
            request[8] = u64::from(rkey);
        } else {
            request[6] = u64::from(rkey);
        }
        // SAFETY: the operations are at these offsets of `struct ibv_context`. The arrays have the
        // sizes of `struct ibv_send_wr` (128 bytes) and `struct ibv_wc` (48 bytes).
        unsafe {
            let post_send: PostSend =
                std::mem::transmute(self.domain.context.byte_add(208).cast::<usize>().read());
            let poll_cq: PollCq =
                std::mem::transmute(self.domain.context.byte_add(96).cast::<usize>().read());
            let mut refused = std::ptr::null_mut();
            assert_eq!(post_send(self.asking, &mut request, &mut refused), 0, "ibv_post_send");
            let mut completion = [0_u64; 6];
            loop {
                match poll_cq(self.completions, 1, &mut completion) {
                    0 => std::thread::yield_now(),
                    1 => return completion[1] as u32,
                    error => panic!("ibv_poll_cq: {error}"),
                }
            }
        }
    }
}

#[cfg(feature = "dma-buf")]
impl Drop for Loopback<'_> {
    fn drop(&mut self) {
        for queue_pair in [self.asking, self.answering] {
            assert_eq!(
                self.domain.verbs.release("ibv_destroy_qp", queue_pair),
                0,
                "ibv_destroy_qp"
            );
        }
        assert_eq!(
            self.domain.verbs.release("ibv_destroy_cq", self.completions),
            0,
            "ibv_destroy_cq"
        );
    }
}
