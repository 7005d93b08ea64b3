//! What a driver can be like.

use hmem_iface_ze::sys::ZeResult;

/// Properties of a driver.
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
    /// Devices export and import dma-bufs.
    pub exports: bool,
    /// An export of a device that has none succeeds with this fd, as Intel's driver on a simulated
    /// GPU does.
    pub bogus_fd: Option<i32>,
    /// Each export makes an fd for the caller, as drivers before Level Zero 1.6 do. Else the driver
    /// keeps one for each allocation, and counts.
    pub own_fds: bool,
    /// The first fd that is given back is closed, however often it was exported.
    pub first_put_closes: bool,
    /// Small allocations that are not to be exported come from a pool.
    pub pools: bool,
    /// Allocations of several tiles: an export is half of the memory.
    pub tiles: bool,
    /// Answer about a device's PCI address.
    pub pci: ZeResult,
}

impl Default for Profile {
    /// A current driver with two devices that export.
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
    /// Level Zero 1.4 (loader 1.8): no call that gives an fd back, and no pools.
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

    /// Devices that export nothing, where an export succeeds all the same with the fd 0.
    #[must_use]
    pub fn without_exports() -> Self {
        Self { name: "without-exports", exports: false, bogus_fd: Some(0), ..Self::default() }
    }

    /// All profiles.
    #[must_use]
    pub fn all() -> Vec<Self> {
        vec![Self::default(), Self::old(), Self::without_exports()]
    }

    /// The profile of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}
