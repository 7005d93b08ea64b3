//! Properties of drivers.

use hmem_iface_ze::sys::ZeResult;

/// Properties of a driver. The fields can be changed one by one.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name of the profile.
    pub name: &'static str,
    /// Drivers behind the loader.
    pub drivers: usize,
    /// Root devices of each driver, with a sub-device each.
    pub devices: usize,
    /// Type of the first device.
    pub first: u32,
    /// Symbols that the library lacks.
    pub absent: Vec<&'static str>,
    /// True if devices export and import dma-bufs.
    pub exports: bool,
    /// Fd of the exports that "succeed" on a device without any, as in Intel's driver on a
    /// simulated GPU.
    pub bogus_fd: Option<i32>,
    /// True if each export makes an fd for the caller, as in drivers before Level Zero 1.6.
    /// Otherwise the driver owns one fd for each allocation, and counts its exports.
    pub own_fds: bool,
    /// True if the first `zeMemPutIpcHandle` closes the fd, with exports left.
    pub first_put_closes: bool,
    /// True if small allocations that are not exportable come from a pool.
    pub pools: bool,
    /// True if an allocation spans two tiles: an export is half of the memory.
    pub tiles: bool,
    /// Result of the query for a device's PCI address.
    pub pci: ZeResult,
}

impl Default for Profile {
    /// Returns a current driver with two devices that export.
    fn default() -> Self {
        Self {
            name: "current",
            drivers: 1,
            devices: 2,
            first: hmem_iface_ze::sys::ZE_DEVICE_TYPE_GPU,
            absent: Vec::new(),
            exports: true,
            bogus_fd: None,
            own_fds: false,
            first_put_closes: false,
            pools: true,
            tiles: false,
            pci: ZeResult::ZE_RESULT_SUCCESS,
        }
    }
}

impl Profile {
    /// Returns Level Zero 1.4 (loader 1.8): no call that returns an fd to the driver, and no pools.
    #[must_use]
    pub fn old() -> Self {
        Self {
            name: "1.4",
            absent: vec!["zeMemGetIpcHandleFromFileDescriptorExp", "zeMemPutIpcHandle"],
            own_fds: true,
            pools: false,
            ..Self::default()
        }
    }

    /// Returns devices without exports, on which an export "succeeds" with the fd 0.
    #[must_use]
    pub fn without_exports() -> Self {
        Self { name: "without-exports", exports: false, bogus_fd: Some(0), ..Self::default() }
    }

    /// Returns all profiles.
    #[must_use]
    pub fn all() -> Vec<Self> {
        vec![Self::default(), Self::old(), Self::without_exports()]
    }

    /// Sets a field by its name in the environment. Returns false if it has no such name.
    pub(crate) fn set(&mut self, name: &str, value: u32) -> bool {
        let known = name == "devices";
        if known {
            self.devices = value as usize;
        }
        known
    }

    /// Returns the profile of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}
