//! Regions in a protection domain that belongs to the application.
//!
//! A program that already speaks verbs keeps its queue pairs and work requests. `hmem` registers
//! the memory in that program's protection domain, and the program uses the keys in its own work
//! requests. The module `application` stands for such a program.
//!
//! ```text
//! cargo run --example own_protection_domain
//! ```
//!
//! The example needs an RDMA device, and fails with a message if there is none. A virtual device is
//! enough: `sudo rdma link add rxe0 type rxe netdev eth0`.

use std::sync::Arc;

use hmem::{
    Access, DomainAttr, Hmem, Result,
    verbs::{Verbs, VerbsMr},
};

/// The application: it opens a device with verbs, and allocates a protection domain.
mod application {
    use std::ffi::{c_int, c_void};

    use hmem::{Error, ErrorKind, Result};
    use libloading::{Library, Symbol};

    /// A protection domain of the first RDMA device.
    pub(crate) struct ProtectionDomain {
        library: Library,
        context: *mut c_void,
        pd: *mut c_void,
    }

    // SAFETY: libibverbs objects may be used from any thread (ibverbs(7)).
    unsafe impl Send for ProtectionDomain {}
    // SAFETY: libibverbs calls may share a protection domain between threads (ibverbs(7)).
    unsafe impl Sync for ProtectionDomain {}

    type OneArgument = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    type Closing = unsafe extern "C" fn(*mut c_void) -> c_int;

    fn unavailable(operation: &'static str, remedy: &'static str) -> Error {
        Error::new(ErrorKind::Unavailable, operation).remedy(remedy)
    }

    impl ProtectionDomain {
        pub(crate) fn alloc() -> Result<Self> {
            const INSTALL: &str = "install libibverbs (package libibverbs1 or rdma-core)";
            const DEVICE: &str = "add an RDMA device: sudo rdma link add rxe0 type rxe netdev eth0";
            // SAFETY: the code that libibverbs runs when it is loaded has no precondition.
            let library = unsafe { Library::new("libibverbs.so.1") }
                .map_err(|why| unavailable("libibverbs.so.1", INSTALL).caused_by(why))?;
            // SAFETY: the types are those of `infiniband/verbs.h`. The list is not used after the
            // call that frees it. Nothing uses the context and the domain after `drop` releases
            // them.
            unsafe {
                let devices: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void> =
                    find(&library, "ibv_get_device_list")?;
                let mut count = 0;
                let list = devices(&mut count);
                if list.is_null() || count == 0 {
                    return Err(unavailable("ibv_get_device_list", DEVICE));
                }
                let context = find::<OneArgument>(&library, "ibv_open_device")?(*list);
                find::<unsafe extern "C" fn(*mut *mut c_void)>(&library, "ibv_free_device_list")?(
                    list,
                );
                if context.is_null() {
                    return Err(unavailable(
                        "ibv_open_device",
                        "run as a user who may open the device",
                    ));
                }
                let pd = find::<OneArgument>(&library, "ibv_alloc_pd")?(context);
                if pd.is_null() {
                    return Err(unavailable(
                        "ibv_alloc_pd",
                        "close other programs that use the device",
                    ));
                }
                Ok(Self { library, context, pd })
            }
        }

        pub(crate) fn as_ptr(&self) -> *mut c_void {
            self.pd
        }
    }

    impl Drop for ProtectionDomain {
        fn drop(&mut self) {
            // SAFETY: `alloc` created both objects, and nothing uses them any more.
            unsafe {
                for (name, object) in
                    [("ibv_dealloc_pd", self.pd), ("ibv_close_device", self.context)]
                {
                    match find::<Closing>(&self.library, name) {
                        Ok(close) if close(object) == 0 => {}
                        _ => eprintln!("{name} failed"),
                    }
                }
            }
        }
    }

    /// Finds the function `name` of the library.
    ///
    /// # Safety
    /// `T` must be the type of the function `name`.
    unsafe fn find<'l, T>(library: &'l Library, name: &'static str) -> Result<Symbol<'l, T>> {
        // SAFETY: the caller promises that `T` is the type of the function.
        unsafe { library.get(name) }
            .map_err(|why| unavailable(name, "install a current libibverbs").caused_by(why))
    }
}

/// Registers memory in a protection domain, and returns the keys for work requests: lkey and rkey.
/// The function also deregisters the memory. An application keeps the region while it uses the
/// keys.
fn register_in(pd: &Arc<application::ProtectionDomain>) -> Result<(u32, u32)> {
    // SAFETY: everything that is opened from the provider holds the `Arc`, which keeps the
    // protection domain alive. `application` and the provider load libibverbs by the same name.
    let verbs = unsafe { Verbs::builder().with_pd(pd.as_ptr(), Arc::clone(pd)) }?;
    let hmem = Hmem::builder().without_vendor_ifaces().build()?;
    let domain = hmem.domain_on(&verbs, DomainAttr::default())?;
    let region = domain.register(vec![0; 4096], Access::WRITE | Access::REMOTE_WRITE)?;
    println!("registered with {}: {}", domain.provider_attr().nic, region.decision()?);
    // The region has one registration, unless it is longer than the device can register at once.
    let mr = VerbsMr::of(&region)?;
    Ok((mr.lkey, mr.rkey))
}

pub(crate) fn run() -> Result<(u32, u32)> {
    let pd = Arc::new(application::ProtectionDomain::alloc()?);
    let (lkey, rkey) = register_in(&pd)?;
    println!("for ibv_sge.lkey: {lkey:#x}; for the peer's wr.rdma.rkey: {rkey:#x}");
    Ok((lkey, rkey))
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> std::process::ExitCode {
    match run() {
        Ok(_) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
