//! Profiles of Level Zero drivers.

use hmem_iface_ze::sys::ZeResult;

/// Properties of a Level Zero driver. Tests may change single fields.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name by which `HMEM_FAKE_ZE` selects the profile.
    pub name: &'static str,
    /// Number of drivers that the loader reports.
    pub drivers: usize,
    /// Number of root devices of each driver. Each has one sub-device.
    pub devices: usize,
    /// Type of the first driver's first device, a `ZE_DEVICE_TYPE_*`. All other devices are GPUs.
    pub first: u32,
    /// Functions that the library lacks.
    pub absent: Vec<&'static str>,
    /// True if devices export and import dma-bufs.
    pub exports: bool,
    /// Number that an export returns as its fd if `exports` is false. Intel's driver on a simulated
    /// GPU reports such false successes.
    pub bogus_fd: Option<i32>,
    /// True if each export creates a new fd that the caller owns, as in drivers before Level Zero
    /// 1.6. Otherwise the driver keeps one fd for each allocation and counts its exports.
    pub own_fds: bool,
    /// True if the first `zeMemPutIpcHandle` closes the fd even though other exports still use it.
    pub first_put_closes: bool,
    /// True if the driver uses a pool for small allocations that are not exportable.
    pub pools: bool,
    /// True if each allocation spans two tiles, so that an export contains only half of it.
    pub tiles: bool,
    /// Result of the query for a device's PCI address.
    pub pci: ZeResult,
}

impl Default for Profile {
    /// Returns a current driver with two devices that export dma-bufs.
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
    /// Returns a driver of Level Zero 1.4 (loader 1.8). It has no function that returns an fd to
    /// the driver, and no pools.
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

    /// Returns a driver whose devices export nothing, but whose export call reports success with
    /// the fd 0.
    #[must_use]
    pub fn without_exports() -> Self {
        Self { name: "without-exports", exports: false, bogus_fd: Some(0), ..Self::default() }
    }

    /// Returns the profiles of all supported drivers.
    #[must_use]
    pub fn all() -> Vec<Self> {
        vec![Self::default(), Self::old(), Self::without_exports()]
    }

    /// Sets a field by the name that the environment variable uses. Returns false if no field has
    /// the name.
    pub(crate) fn set(&mut self, name: &str, value: u32) -> bool {
        let known = name == "devices";
        if known {
            self.devices = value as usize;
        }
        known
    }

    /// Returns the profile with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}
