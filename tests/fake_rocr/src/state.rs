//! State of the runtime: allocations, locked memory, signals, and injected faults.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::c_void,
    os::fd::OwnedFd,
};

use hmem_fake_common::{Calls, Pages, page};
use hmem_iface_rocr::sys::{self, Agent, DeallocationCallback, HsaStatus};

/// Agent of the CPU. The agents of GPUs have the handles 11, 12 and so on.
pub(crate) const CPU: Agent = Agent { handle: 10 };

pub(crate) fn gpu(ordinal: u32) -> Agent {
    Agent { handle: 11 + u64::from(ordinal) }
}

/// Properties of a release of the runtime. Tests may change single fields.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Release of the runtime, such as `6.4`. `HMEM_FAKE_ROCR` selects the profile by it.
    pub name: &'static str,
    /// Number of GPUs.
    pub devices: u32,
    /// Bytes of memory on each device.
    pub memory: usize,
    /// Value of the system attribute HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED.
    pub dma_buf: bool,
    /// True if the PCIe BAR covers all device memory. Exports with the PCIe mapping fail otherwise.
    pub large_bar: bool,
    /// True if queries report lengths rounded up to whole pages. The fake does so for release 5.2,
    /// since no header promises the requested length.
    pub rounds_lengths: bool,
    /// True if the runtime attaches memory of other processes as dma-bufs, so that the memory has
    /// the type GRAPHICS instead of IPC. `HSA_ENABLE_IPC_MODE_LEGACY` changes the default.
    pub attaches_dma_bufs: bool,
    /// Functions that the library of this release lacks.
    pub absent: Vec<&'static str>,
    /// True if a copy ends only at the second query for it, so that tests see it in flight.
    pub slow_copies: bool,
    /// True if every copy ends with an error.
    pub copies_fail: bool,
}

/// Functions that AMD added after release 5.2: exports and reserved addresses.
const LATER: [&str; 10] = [
    "hsa_amd_portable_export_dmabuf",
    "hsa_amd_portable_close_dmabuf",
    "hsa_amd_vmem_address_reserve",
    "hsa_amd_vmem_address_free",
    "hsa_amd_vmem_handle_create",
    "hsa_amd_vmem_handle_release",
    "hsa_amd_vmem_map",
    "hsa_amd_vmem_unmap",
    "hsa_amd_vmem_set_access",
    "hsa_amd_vmem_export_shareable_handle",
];

impl Profile {
    /// Returns the profiles of the supported releases, oldest first. The lists of absent functions
    /// come from the symbols of the real libraries (`tests/rocr/fetch`).
    #[must_use]
    pub fn all() -> Vec<Self> {
        const V2: &str = "hsa_amd_portable_export_dmabuf_v2";
        let release = |name, absent: Vec<&'static str>| Self {
            name,
            devices: 2,
            memory: 64 << 30,
            dma_buf: !absent.contains(&LATER[0]),
            large_bar: true,
            rounds_lengths: name == "5.2",
            attaches_dma_bufs: name == "7.2",
            absent,
            slow_copies: false,
            copies_fail: false,
        };
        vec![
            release("5.2", LATER.into_iter().chain([V2]).collect()),
            release("6.4", vec![V2]),
            release("7.2", vec![]),
        ]
    }

    /// Sets a field by the name that the environment variable uses. Returns false if no field has
    /// the name.
    pub(crate) fn set(&mut self, name: &str, value: u32) -> bool {
        let known = name == "devices";
        if known {
            self.devices = value;
        }
        known
    }

    /// Returns the profile with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }
}

impl Default for Profile {
    /// Returns the profile of the newest release.
    fn default() -> Self {
        Self::all().remove(2)
    }
}

/// The number of live objects of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Number of `hsa_init` calls without a matching `hsa_shut_down`.
    pub counts: u32,
    /// Number of live allocations from memory pools.
    pub allocations: usize,
    /// Number of attached allocations of other processes.
    pub imported: usize,
    /// Number of page-locked host ranges.
    pub locked: usize,
    /// Number of live signals.
    pub signals: usize,
    /// Number of reserved address ranges plus number of memory handles.
    pub virtual_memory: usize,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    /// Requested length in bytes.
    pub(crate) len: u64,
    pub(crate) owner: Agent,
    pub(crate) imported: bool,
    pub(crate) callbacks: Vec<(usize, DeallocationCallback, usize)>,
    /// True if every device may access the allocation.
    pub(crate) shared: bool,
}

/// An address range reserved by `hsa_amd_vmem_address_reserve`.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) len: u64,
    /// Memory handle that is mapped into the reservation, if any.
    pub(crate) mapped: Option<u64>,
    pub(crate) accessible: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: usize,
}

#[derive(Debug)]
pub(crate) struct SignalState {
    pub(crate) value: i64,
    pub(crate) copy: Option<Copy>,
    pub(crate) looks: u32,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) profile: Profile,
    pub(crate) counts: u32,
    pub(crate) pages: Pages,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) handles: HashMap<u64, (Agent, OwnedFd, u64)>,
    /// Page-locked host ranges by first address, each with its length and its address for devices.
    pub(crate) locked: BTreeMap<u64, (u64, u64)>,
    pub(crate) signals: HashMap<u64, SignalState>,
    /// The HDP flush register of each device.
    pub(crate) registers: Box<[u32]>,
    pub(crate) violations: Vec<String>,
    pub(crate) calls: Calls<HsaStatus>,
    next_handle: u64,
    next_address: u64,
    /// Freed addresses by length, with the most recently freed at the end.
    free: HashMap<u64, Vec<u64>>,
    used: HashMap<u64, usize>,
}

impl State {
    pub(crate) fn new(profile: Profile) -> Self {
        let pages = Pages::default();
        Self {
            counts: 0,
            next_address: pages.first().next_multiple_of(2 << 20),
            pages,
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            handles: HashMap::new(),
            locked: BTreeMap::new(),
            signals: HashMap::new(),
            registers: vec![0; profile.devices as usize].into(),
            violations: Vec::new(),
            calls: Calls::default(),
            next_handle: 0x1000,
            free: HashMap::new(),
            used: HashMap::new(),
            profile,
        }
    }

    pub(crate) fn heal(&mut self) {
        self.calls.heal();
    }

    /// Records a call that breaks a rule of AMD's headers. Returns the error to report.
    pub(crate) fn violation(&mut self, what: &str) -> HsaStatus {
        self.violations.push(what.to_owned());
        HsaStatus::HSA_STATUS_ERROR
    }

    pub(crate) fn live(&self) -> Live {
        Live {
            counts: self.counts,
            allocations: self.allocations.values().filter(|one| !one.imported).count(),
            imported: self.allocations.values().filter(|one| one.imported).count(),
            locked: self.locked.len(),
            signals: self.signals.len(),
            virtual_memory: self.reservations.len() + self.handles.len(),
        }
    }

    pub(crate) fn handle(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }

    /// Reserves a range of addresses: the one of this length that was freed last, or a new one.
    pub(crate) fn take_addresses(&mut self, len: u64) -> u64 {
        if let Some(address) = self.free.get_mut(&len).and_then(Vec::pop) {
            return address;
        }
        let address = self.next_address;
        self.next_address += len;
        address
    }

    /// Makes a freed address range available for reuse.
    pub(crate) fn leave_addresses(&mut self, address: u64, len: u64) {
        self.pages.clear(address, len);
        self.free.entry(len).or_default().push(address);
    }

    pub(crate) fn allocate(
        &mut self,
        owner: Agent,
        len: usize,
        visible: bool,
    ) -> Result<u64, HsaStatus> {
        let out = HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES;
        let used = self.used.entry(owner.handle).or_default();
        if len > self.profile.memory - *used {
            return Err(out);
        }
        *used += len;
        let size = (len as u64).next_multiple_of(page());
        let base = self.take_addresses(size);
        self.pages.back(base, size, visible).map_err(|_| out)?;
        Ok(self.enter(base, owner, len as u64, false))
    }

    /// Creates an allocation backed by the memory file of another process's allocation.
    pub(crate) fn import(
        &mut self,
        owner: Agent,
        len: u64,
        file: OwnedFd,
    ) -> Result<u64, HsaStatus> {
        let size = len.next_multiple_of(page());
        let base = self.take_addresses(size);
        let placed = self.pages.place(base, size, file);
        placed.map_err(|_| HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES)?;
        Ok(self.enter(base, owner, len, true))
    }

    fn enter(&mut self, base: u64, owner: Agent, len: u64, imported: bool) -> u64 {
        let allocation = Allocation { len, owner, imported, callbacks: Vec::new(), shared: false };
        self.allocations.insert(base, allocation);
        base
    }

    /// Returns the address through which the runtime accesses the byte at a device address.
    fn alias(&self, address: u64) -> u64 {
        self.pages.at(address).expose_provenance() as u64
    }

    /// Releases the memory and addresses of an allocation that is no longer in the table.
    pub(crate) fn release(&mut self, base: u64, allocation: &Allocation) {
        self.leave_addresses(base, allocation.len.next_multiple_of(page()));
        if !allocation.imported {
            *self.used.entry(allocation.owner.handle).or_default() -= allocation.len as usize;
        }
    }

    /// Returns the allocation that contains an address, with the allocation's first address. With
    /// `rounds_lengths`, an allocation includes the rest of its last page.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        let page = if self.profile.rounds_lengths { page() } else { 1 };
        (address - base < allocation.len.next_multiple_of(page)).then_some((*base, allocation))
    }

    /// Returns the address through which the runtime accesses memory; `None` if the agent may not
    /// access it.
    pub(crate) fn reach(&self, address: u64, len: usize, agent: Agent) -> Option<u64> {
        let end = address.checked_add(len as u64)?;
        if let Some((base, one)) = self.around(address) {
            let may = one.owner == agent || one.shared;
            return (may && end <= base + one.len).then(|| self.alias(address));
        }
        if let Some((base, one)) = self.reservations.range(..=address).next_back()
            && end <= base + one.len
        {
            return one.accessible.then(|| self.alias(address));
        }
        let locked =
            self.locked.iter().find(|(_, (len, device))| *device <= address && end <= device + len);
        locked.map(|(host, (_, device))| host + (address - device))
    }

    /// Returns the value of a signal, and completes its copy. With `slow_copies` the copy completes
    /// at the second query, or at once if `patient` is set.
    pub(crate) fn look(&mut self, signal: u64, patient: bool) -> i64 {
        let (slow, fails) = (self.profile.slow_copies, self.profile.copies_fail);
        let Some(state) = self.signals.get_mut(&signal) else {
            self.violation("a signal that is not there");
            return 0;
        };
        state.looks += 1;
        let ends = patient || !slow || state.looks > 1;
        if ends && let Some(copy) = state.copy.take() {
            if fails {
                state.value = -1;
            } else {
                let (to, from) = (copy.to as usize, copy.from as usize);
                // SAFETY: `reach` checked the length of both ranges. The caller of the copy keeps
                // host memory valid until it has ended.
                unsafe {
                    std::ptr::copy(
                        std::ptr::with_exposed_provenance::<u8>(from),
                        std::ptr::with_exposed_provenance_mut::<u8>(to),
                        copy.len,
                    );
                }
                state.value -= 1;
            }
        }
        state.value
    }

    /// Describes the memory at an address.
    pub(crate) fn pointer_info(&self, address: u64) -> sys::PointerInfo {
        let describe = |kind, base: u64, len: u64, owner| sys::PointerInfo {
            size: size_of::<sys::PointerInfo>() as u32,
            kind,
            agent_base: base as *mut c_void,
            host_base: base as *mut c_void,
            len: len as usize,
            user_data: std::ptr::null_mut(),
            owner,
            global_flags: 0,
        };
        if let Some((base, one)) = self.around(address) {
            let kind = match (one.imported, self.profile.attaches_dma_bufs) {
                (false, _) => sys::HSA_EXT_POINTER_TYPE_HSA,
                (true, false) => sys::HSA_EXT_POINTER_TYPE_IPC,
                (true, true) => sys::HSA_EXT_POINTER_TYPE_GRAPHICS,
            };
            let page = if self.profile.rounds_lengths { page() } else { 1 };
            return describe(kind, base, one.len.next_multiple_of(page), one.owner);
        }
        let locked =
            self.locked.iter().find(|(host, (len, _))| address.wrapping_sub(**host) < *len);
        if let Some((host, (len, device))) = locked {
            let info = describe(sys::HSA_EXT_POINTER_TYPE_LOCKED, *host, *len, CPU);
            return sys::PointerInfo { agent_base: *device as *mut c_void, ..info };
        }
        if let Some((base, one)) = self.reservations.range(..=address).next_back()
            && address - base < one.len
        {
            let kind = match one.mapped {
                Some(_) => sys::HSA_EXT_POINTER_TYPE_HSA_VMEM,
                None => sys::HSA_EXT_POINTER_TYPE_RESERVED_ADDR,
            };
            // As in release 6.4, the base is the queried address.
            return describe(kind, address, one.len - (address - base), CPU);
        }
        // For an unknown address the real runtime leaves stale values in these fields.
        describe(sys::HSA_EXT_POINTER_TYPE_UNKNOWN, address, u64::MAX, CPU)
    }
}
