//! The loaded library: device lists, open devices, and protection over `fork`.

#![allow(unsafe_code, reason = "calls the library on lists of devices")]

use std::{
    ffi::CStr,
    fs::{self, File},
    path::{Path, PathBuf},
};

use hmem_core::{Errno, Error, ErrorKind, Result};

use super::{
    errors,
    sys::{Context, Device, ForkStatus, Functions},
};

/// Setting for the protection of registered pages over `fork` (requirement MON-06).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForkSafety {
    /// Calls `ibv_fork_init`, unless the kernel copies pinned pages at fork. The default of
    /// [`Builder::build`](super::Builder::build).
    #[default]
    Auto,
    /// Never calls `ibv_fork_init`. Choose this for applications that do not fork. This is the
    /// default of [`Builder::with_pd`](super::Builder::with_pd): the call affects the whole
    /// process, so the owner of the protection domain decides about it.
    Off,
}

/// Protection of registered pages when the process forks (requirement MON-06).
///
/// Without protection, the parent's first write after a fork goes to a new copy of the page, and
/// the NIC keeps using the old page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForkSupport {
    /// The kernel copies pinned pages for the child at fork (Linux 5.12 and newer). libibverbs does
    /// nothing.
    KernelCopies,
    /// `ibv_fork_init` is active: a child process does not inherit registered pages. Each
    /// registration costs an `madvise` call.
    Initialized,
    /// Pages are not protected. The text is the reason. The process must not fork while regions are
    /// open.
    Off(String),
}

/// The functions of libibverbs, and the protection of registered pages over `fork`.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) functions: Functions,
    pub(super) fork: ForkSupport,
}

/// Owner of a device list of libibverbs. Dropping the value frees the list.
struct DeviceList<'a> {
    functions: &'a Functions,
    list: *mut *mut Device,
    count: usize,
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list came from ibv_get_device_list and is freed once.
        unsafe { (self.functions.free_device_list)(self.list) }
    }
}

impl DeviceList<'_> {
    /// Returns the devices with their names.
    fn devices(&self) -> impl Iterator<Item = (*mut Device, String)> {
        (0..self.count).map(|index| {
            // SAFETY: the library's list has `count` entries and lives as long as `self`.
            let device = unsafe { *self.list.add(index) };
            (device, device_name(self.functions, device))
        })
    }
}

/// Returns the name of a device. The device must be in a live device list or have an open context.
pub(super) fn device_name(functions: &Functions, device: *mut Device) -> String {
    // SAFETY: the device belongs to a list or context that is alive; its name is NUL-terminated and
    // lives as long as the device.
    let name = unsafe { CStr::from_ptr((functions.get_device_name)(device)) };
    name.to_string_lossy().into_owned()
}

impl Library {
    /// Creates the library from its functions. Protects registered pages over `fork` if `safety`
    /// allows a call of `ibv_fork_init` and the call is needed ([`fork_support`]).
    pub(super) fn new(functions: Functions, safety: ForkSafety) -> Self {
        let fork = fork_support(&functions, safety);
        tracing::debug!(library = functions.library(), ?fork, "libibverbs in use");
        Self { functions, fork }
    }

    fn list(&self) -> Result<DeviceList<'_>> {
        let mut count = 0;
        // SAFETY: `count` is writable for the call.
        let list = unsafe { (self.functions.get_device_list)(&mut count) };
        if list.is_null() {
            let errno = errors::last();
            let remedy = if errno == Errno(38) {
                "load the NIC's driver and ib_uverbs (modprobe): the kernel has no RDMA devices"
            } else {
                "check that ib_uverbs is loaded and that /dev/infiniband can be read"
            };
            return Err(self.no_device("ibv_get_device_list").errno(errno).remedy(remedy));
        }
        let list = DeviceList {
            functions: &self.functions,
            list,
            count: usize::try_from(count).unwrap_or(0),
        };
        if list.count == 0 {
            return Err(self.no_device("ibv_get_device_list").remedy(
                "load the NIC's driver and ib_uverbs (modprobe): there is no RDMA device",
            ));
        }
        Ok(list)
    }

    fn no_device(&self, operation: &'static str) -> Error {
        Error::new(ErrorKind::Unavailable, operation)
            .provider("verbs")
            .context("library", self.functions.library())
            .context("devices", 0)
    }

    /// Returns the names of all devices.
    pub(super) fn device_names(&self) -> Result<Vec<String>> {
        let list = self.list()?;
        Ok(list.devices().map(|(_, name)| name).collect())
    }

    /// Opens a device by its name.
    pub(super) fn open_device(&self, name: &str) -> Result<*mut Context> {
        let list = self.list()?;
        let device = list.devices().find(|(_, other)| other == name);
        let (device, _) = device.ok_or_else(|| {
            let names: Vec<_> = list.devices().map(|(_, name)| name).collect();
            Error::new(ErrorKind::Unavailable, "ibv_open_device")
                .provider("verbs")
                .context("device", name)
                .context("devices", names.join(","))
                .remedy("use one of the listed devices (ibv_devices)")
        })?;
        // SAFETY: the device belongs to `list`, which is not freed yet.
        let context = unsafe { (self.functions.open_device)(device) };
        if context.is_null() { Err(not_opened(name, errors::last())) } else { Ok(context) }
    }
}

/// Returns the error for a device that could not be opened. libibverbs reports ENOENT for every
/// cause, so this function tries to open the device's node. If this fails, the error has the errno
/// of the attempt. Otherwise the error has `errno`.
fn not_opened(name: &str, errno: Errno) -> Error {
    let node = node(name);
    let opened = node.as_ref().map(|node| File::options().read(true).write(true).open(node));
    let errno = match opened {
        Some(Err(error)) => Errno::of(&error),
        _ => errno,
    };
    let mut error = Error::os(errno, "ibv_open_device").provider(format!("verbs/{name}"));
    if let Some(node) = &node {
        error = error.context("node", node.display());
    }
    match errno {
        Errno(1 | 13) => error.remedy(
            "give the user or group read and write permission on the device's node under \
             /dev/infiniband",
        ),
        Errno(2) => error.remedy(
            "load ib_uverbs (modprobe ib_uverbs), or pass the device's node under /dev/infiniband \
             into the container",
        ),
        _ => {
            error.remedy("check that the process can open the device's node under /dev/infiniband")
        }
    }
}

/// Returns the path in `/dev` of a device's node, or `None` if sysfs does not list the device.
pub(super) fn node(name: &str) -> Option<PathBuf> {
    let is_it = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("ibdev")).is_ok_and(|device| device.trim() == name)
    };
    let entries = fs::read_dir("/sys/class/infiniband_verbs").ok()?;
    let entry = entries.filter_map(|entry| entry.ok().filter(is_it)).next()?;
    Some(Path::new("/dev/infiniband").join(entry.file_name()))
}

/// Returns the protection of registered pages over `fork`, after a call of `ibv_fork_init` if
/// `safety` allows the call and the pages are not yet protected.
fn fork_support(functions: &Functions, safety: ForkSafety) -> ForkSupport {
    // SAFETY: the call has no precondition.
    let status = functions.is_fork_initialized.map(|ask| unsafe { ask() });
    match status {
        Some(ForkStatus::IBV_FORK_UNNEEDED) => return ForkSupport::KernelCopies,
        Some(ForkStatus::IBV_FORK_ENABLED) => return ForkSupport::Initialized,
        _ => {}
    }
    if safety == ForkSafety::Off {
        let why = "not requested: Builder::fork_safety(ForkSafety::Auto) calls ibv_fork_init";
        return ForkSupport::Off(why.to_owned());
    }
    // SAFETY: the call has no precondition. It fails if regions already exist.
    match errors::status(unsafe { (functions.fork_init)() }) {
        Ok(()) => ForkSupport::Initialized,
        Err(errno) => {
            tracing::warn!(%errno, "ibv_fork_init failed: do not fork while regions are open");
            ForkSupport::Off(format!("ibv_fork_init: {errno}"))
        }
    }
}
