//! Test configurations in which behaviours run. Configurations of the software NIC combine memory,
//! mr_mode, key size, progress, pages and path. Those of an RDMA device, which `HMEM_VERBS_DEVICE`
//! names, combine memory and path.
//!
//! A behaviour is a function over a [`TestConfig`]. It declares a [`Need`], with its reason, for
//! each property that a configuration may lack. `tests/skipped.txt` and `tests/skipped-verbs.txt`
//! list the resulting skips. A behaviour that no configuration can show fails.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use hmem::{
    ErrorKind, MrMode,
    loopback::{Progress, RemapPolicy},
    path::P2pPolicy,
    system::FreeDetection,
};

/// Memory under test: host memory, or memory of a simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    System,
    Device(FreeDetection),
}

/// The NIC that moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nic {
    /// The software NIC of this library.
    Loopback,
    /// The RDMA device named by the variable `HMEM_VERBS_DEVICE`, used through libibverbs.
    Verbs {
        /// True if the driver registers dma-bufs.
        dma_buf: bool,
    },
}

/// A test configuration: one combination of NIC, memory, mr_mode, key size, progress, pages and
/// path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TestConfig {
    pub(crate) nic: Nic,
    pub(crate) memory: Memory,
    /// The mr_mode bits that the application offers and those that the provider requires.
    pub(crate) mode: Mode,
    pub(crate) key_size: usize,
    pub(crate) progress: Progress,
    pub(crate) pages: RemapPolicy,
    pub(crate) policy: P2pPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) name: &'static str,
    pub(crate) offered: MrMode,
    pub(crate) needed: MrMode,
}

/// All mr_mode bits but BASIC and SCALABLE, which cannot be combined with others.
pub(crate) const EVERY_BIT: MrMode =
    MrMode::all().difference(MrMode::BASIC.union(MrMode::SCALABLE));

const fn single(name: &'static str, needed: MrMode) -> Mode {
    Mode { name, offered: EVERY_BIT, needed }
}

pub(crate) const DEFAULT: Mode = single("default", MrMode::empty());
pub(crate) const HARDWARE: Mode = single(
    "hardware",
    MrMode::LOCAL
        .union(MrMode::VIRT_ADDR)
        .union(MrMode::ALLOCATED)
        .union(MrMode::PROV_KEY)
        .union(MrMode::HMEM),
);
/// The mr_mode bits that RDMA devices require.
const VERBS: Mode = single(
    "verbs",
    MrMode::LOCAL.union(MrMode::VIRT_ADDR).union(MrMode::ALLOCATED).union(MrMode::PROV_KEY),
);
pub(crate) const MODES: [Mode; 14] = [
    DEFAULT,
    Mode { name: "SCALABLE", offered: MrMode::SCALABLE, needed: MrMode::empty() },
    Mode { name: "BASIC", offered: MrMode::BASIC, needed: MrMode::BASIC_MEANS },
    single("LOCAL", MrMode::LOCAL),
    single("RAW", MrMode::RAW),
    single("VIRT_ADDR", MrMode::VIRT_ADDR),
    single("ALLOCATED", MrMode::ALLOCATED),
    single("PROV_KEY", MrMode::PROV_KEY),
    single("MMU_NOTIFY", MrMode::MMU_NOTIFY),
    single("RMA_EVENT", MrMode::RMA_EVENT),
    single("ENDPOINT", MrMode::ENDPOINT),
    single("HMEM", MrMode::HMEM),
    single("COLLECTIVE", MrMode::COLLECTIVE),
    HARDWARE,
];

const PLACES: [(Memory, P2pPolicy); 5] = [
    (Memory::System, P2pPolicy::Enabled),
    (Memory::Device(FreeDetection::Identity), P2pPolicy::Enabled),
    (Memory::Device(FreeDetection::Identity), P2pPolicy::Disabled),
    (Memory::Device(FreeDetection::Callback), P2pPolicy::Required),
    (Memory::Device(FreeDetection::Callback), P2pPolicy::Disabled),
];
const KEY_SIZES: [usize; 2] = [8, 4];
const PROGRESSES: [Progress; 2] = [Progress::ByHand, Progress::Thread];
const PAGES: [RemapPolicy; 2] = [RemapPolicy::Follow, RemapPolicy::Pinned];

impl TestConfig {
    /// The default mode over host memory with manual progress, for behaviours that are equal in
    /// every configuration.
    pub(crate) const PLAIN: Self = Self {
        nic: Nic::Loopback,
        memory: Memory::System,
        mode: DEFAULT,
        key_size: 8,
        progress: Progress::ByHand,
        pages: RemapPolicy::Follow,
        policy: P2pPolicy::Enabled,
    };

    pub(crate) const fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Returns the mr_mode bits in force. BASIC and SCALABLE are replaced by the bits that they
    /// stand for.
    pub(crate) fn bits(&self) -> MrMode {
        self.mode.needed
    }

    pub(crate) fn has(&self, bits: MrMode) -> bool {
        self.bits().contains(bits)
    }

    pub(crate) fn virtual_addresses(&self) -> bool {
        self.has(MrMode::VIRT_ADDR)
    }

    pub(crate) fn staged(&self) -> bool {
        self.policy == P2pPolicy::Disabled
    }

    pub(crate) fn is_system(&self) -> bool {
        self.memory == Memory::System
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.nic == Nic::Loopback
    }

    /// Returns true if the NIC registers dma-bufs.
    pub(crate) fn imports_dma_bufs(&self) -> bool {
        self.nic != Nic::Verbs { dma_buf: false }
    }

    /// Returns true if this process can run the configuration. `tests/this_machine.rs` reports if
    /// the software NIC cannot pin pages.
    pub(crate) fn runs_here(&self) -> bool {
        let pins = self.is_loopback() && self.pages == RemapPolicy::Pinned;
        !pins || crate::machine::without_pinned_pages().is_none()
    }

    /// Returns true if memory windows can be bound to regions of this memory. The VM's driver binds
    /// windows to host memory only.
    pub(crate) fn binds_windows(&self) -> bool {
        self.is_loopback() || self.is_system()
    }

    /// Returns the error kind that the initiator sees when the target refuses an access with
    /// `refusal`. The software NIC reports the reason. RDMA devices report an invalid key, a range
    /// out of bounds, an absent page and a missing right alike, as a remote access error.
    pub(crate) fn seen(&self, refusal: ErrorKind) -> ErrorKind {
        let at_the_target = matches!(
            refusal,
            ErrorKind::InvalidKey | ErrorKind::OutOfBounds | ErrorKind::BadAddress
        );
        if at_the_target && !self.is_loopback() { ErrorKind::AccessDenied } else { refusal }
    }
}

impl fmt::Display for TestConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = match self.memory {
            Memory::System => "system memory",
            Memory::Device(FreeDetection::Identity) => "identity-style device",
            Memory::Device(FreeDetection::Callback) => "callback-style device",
        };
        if let Nic::Verbs { dma_buf } = self.nic {
            let imports = if dma_buf { "with" } else { "without" };
            return write!(f, "verbs device {imports} dma-bufs, {memory}, {:?} path", self.policy);
        }
        write!(
            f,
            "{memory}, {:?} path, mode {}, {}-bit keys",
            self.policy,
            self.mode.name,
            self.key_size * 8
        )?;
        write!(f, ", {:?} progress, {:?} pages", self.progress, self.pages)
    }
}

/// The test configurations of the software NIC in which a behaviour runs. If `HMEM_VERBS_DEVICE` is
/// set, every behaviour also runs in those of the RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfigSet {
    /// Every combination of memory, path, mr_mode, key size, progress and pages.
    Every,
    /// Every mode with every memory and path. The other dimensions vary so that any two values of
    /// two dimensions occur together.
    Pairwise,
    /// Every combination of memory, path, progress mode and page handling, in the default mode with
    /// 64-bit keys.
    DefaultMode,
    /// One configuration, in the default mode, for behaviours that are equal in every
    /// configuration.
    Single,
    /// One configuration, with the mr_mode bits that hardware NICs require.
    HardwareMode,
}

impl ConfigSet {
    pub(crate) fn list(self) -> Vec<TestConfig> {
        match self {
            Self::Every => product(&MODES, &PLACES, &KEY_SIZES),
            Self::Pairwise => pairs(),
            Self::DefaultMode => product(&[DEFAULT], &PLACES, &[8]),
            Self::Single => vec![TestConfig::PLAIN],
            Self::HardwareMode => vec![TestConfig::PLAIN.with_mode(HARDWARE)],
        }
    }
}

/// Returns the test configurations of RDMA devices, even if no device is present. Every behaviour
/// runs in each configuration that can show it.
pub(crate) fn verbs_configs() -> Vec<TestConfig> {
    let config = |dma_buf, memory, policy| TestConfig {
        nic: Nic::Verbs { dma_buf },
        memory,
        mode: VERBS,
        key_size: 4,
        progress: Progress::Thread,
        pages: RemapPolicy::Pinned,
        policy,
    };
    let mut configs = Vec::new();
    for dma_buf in [false, true] {
        configs.extend(PLACES.iter().map(|(memory, policy)| config(dma_buf, *memory, *policy)));
    }
    configs
}

/// Properties of a test configuration that every behaviour needs on an RDMA device.
pub(crate) const VERBS_NEEDS: [Need; 2] = [
    need(
        "staged path",
        "no peer reaches staged memory over a device: `provider-verbs/tests/staging.rs` shows \
         what the owner does with it",
        |config| !config.staged(),
    ),
    need(
        "device memory, a driver without dma-bufs",
        "NICs reach this memory by staged copies only",
        |config| config.is_system() || config.staged() || config.imports_dma_bufs(),
    ),
];

/// Returns the test configurations of the RDMA device that `HMEM_VERBS_DEVICE` names; none if the
/// variable is unset.
fn verbs_configs_here() -> Vec<TestConfig> {
    if !set("HMEM_VERBS_DEVICE") {
        return Vec::new();
    }
    let dma_buf = set("HMEM_VERBS_DMA_BUF");
    verbs_configs().into_iter().filter(|config| config.imports_dma_bufs() == dma_buf).collect()
}

fn set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

fn product(modes: &[Mode], places: &[(Memory, P2pPolicy)], key_sizes: &[usize]) -> Vec<TestConfig> {
    let mut configs = Vec::new();
    for mode in modes {
        for (memory, policy) in places {
            for key_size in key_sizes {
                for progress in PROGRESSES {
                    for pages in PAGES {
                        let (memory, policy, mode, key_size) = (*memory, *policy, *mode, *key_size);
                        let nic = Nic::Loopback;
                        configs.push(TestConfig {
                            nic,
                            memory,
                            mode,
                            key_size,
                            progress,
                            pages,
                            policy,
                        });
                    }
                }
            }
        }
    }
    configs
}

fn pairs() -> Vec<TestConfig> {
    let mut configs = Vec::new();
    for (i, mode) in MODES.iter().enumerate() {
        for (j, (memory, policy)) in PLACES.iter().enumerate() {
            configs.push(TestConfig {
                nic: Nic::Loopback,
                memory: *memory,
                mode: *mode,
                key_size: KEY_SIZES[(i + j) % 2],
                progress: PROGRESSES[(i / 2 + j) % 2],
                pages: PAGES[(i / 4 + i + j / 2) % 2],
                policy: *policy,
            });
        }
    }
    configs
}

/// A property that a behaviour needs of a test configuration.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    /// Label, in the list of skips, for the configurations without the property.
    pub(crate) class: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) met: fn(&TestConfig) -> bool,
}

pub(crate) const fn need(
    class: &'static str,
    reason: &'static str,
    met: fn(&TestConfig) -> bool,
) -> Need {
    Need { class, reason, met }
}

/// Properties of a test configuration that many behaviours need.
pub(crate) mod needs {
    use super::*;

    pub(crate) const SYSTEM: Need = need(
        "device memory",
        "the test replaces the pages behind an address",
        TestConfig::is_system,
    );
    pub(crate) const DEVICE: Need =
        need("system memory", "the behaviour concerns device memory", |config| !config.is_system());
    pub(crate) const KEYS_AT_HAND: Need =
        need("mode RAW", "keys are exchanged raw: MODE-04 and KEY-04 show it", |config| {
            !config.has(MrMode::RAW)
        });
    pub(crate) const DMA_BUFS: Need = need(
        "a driver without dma-bufs",
        "the behaviour concerns dma-bufs",
        TestConfig::imports_dma_bufs,
    );
    pub(crate) const HELD_TRANSFERS: Need = need(
        "verbs",
        "the test holds a transfer: `provider-verbs/tests/transfer.rs` closes regions during \
         transfers of a device",
        TestConfig::is_loopback,
    );
    pub(crate) const SUB_REGIONS: Need =
        need("verbs", "verbs has no key for a part of a registration", TestConfig::is_loopback);
    pub(crate) const WINDOWS: Need = need(
        "device memory on verbs",
        "the VM's driver binds windows to host memory only",
        TestConfig::binds_windows,
    );
}

/// A behaviour: its name, the test configurations to run it in, its needs and its function.
pub(crate) struct Behaviour {
    pub(crate) name: &'static str,
    pub(crate) configs: ConfigSet,
    pub(crate) needs: &'static [Need],
    pub(crate) show: fn(&TestConfig),
}

impl Behaviour {
    /// Runs the behaviour in every test configuration that meets its needs and runs here. The
    /// variable `HMEM_TEST_CONFIG` selects some of them by a part of their name. Panics with the
    /// list of those in which the behaviour failed, or if there is none to run it in.
    pub(crate) fn run(&self) {
        let mut shown = 0;
        let mut failures = Vec::new();
        let only = std::env::var("HMEM_TEST_CONFIG").unwrap_or_default();
        for config in self.configs.list().into_iter().chain(verbs_configs_here()) {
            if !config.is_loopback() && !VERBS_NEEDS.iter().all(|need| (need.met)(&config)) {
                continue;
            }
            if !config.runs_here()
                || self.needs.iter().any(|need| !(need.met)(&config))
                || !config.to_string().contains(&only)
            {
                continue;
            }
            shown += 1;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.show)(&config))) {
                failures.push(format!("{config}:\n    {}", message(&*panic)));
                if failures.len() == ENOUGH {
                    break;
                }
            }
        }
        assert!(
            shown > 0,
            "{}: no configuration can show this, and a skip is not a pass",
            self.name
        );
        let (count, list) = (failures.len(), failures.join("\n  "));
        assert!(
            count == 0,
            "{} failed in {count} of the first {shown} configurations:\n  {list}",
            self.name
        );
    }

    /// Returns the behaviour's lines for `tests/skipped.txt`: one for each need that a
    /// configuration does not meet.
    pub(crate) fn skipped(&self) -> impl Iterator<Item = String> + '_ {
        let configs = self.configs.list();
        self.needs
            .iter()
            .filter(move |need| configs.iter().any(|config| !(need.met)(config)))
            .map(|need| format!("{} | {}: {}", self.name, need.class, need.reason))
    }

    /// Returns the behaviour's lines for `tests/skipped-verbs.txt`. A line says if the behaviour
    /// runs in no configuration, or in none without dma-bufs.
    pub(crate) fn skipped_verbs(&self) -> Vec<String> {
        let configs: Vec<_> = verbs_configs()
            .into_iter()
            .filter(|config| VERBS_NEEDS.iter().all(|need| (need.met)(config)))
            .collect();
        let unmet = |need: &Need, dma_bufs: bool| {
            configs
                .iter()
                .filter(|config| dma_bufs || !config.imports_dma_bufs())
                .all(|config| !(need.met)(config))
        };
        let mut lines = Vec::new();
        for need in self.needs {
            let class = if unmet(need, true) {
                "every verbs configuration"
            } else if unmet(need, false) {
                "every verbs configuration without dma-bufs"
            } else if configs.iter().any(|config| !(need.met)(config)) {
                need.class
            } else {
                continue;
            };
            lines.push(format!("{} | {class}: {}", self.name, need.reason));
        }
        lines
    }
}

/// Number of failures after which a behaviour skips its remaining test configurations, since each
/// may take a full timeout.
const ENOUGH: usize = 4;

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked")
}

/// Defines a test for each listed behaviour, and the table `BEHAVIOURS` for the list of skips. The
/// doc comment of an entry, with its requirement ids, becomes the test's.
macro_rules! over_configs {
    ($($(#[$meta:meta])* $name:ident: $configs:ident $(, $need:expr)*;)+) => {
        pub(crate) const BEHAVIOURS: &[$crate::config::Behaviour] = &[$(
            $crate::config::Behaviour {
                name: stringify!($name),
                configs: $crate::config::ConfigSet::$configs,
                needs: &[$($need),*],
                show: $name,
            }
        ),+];

        mod over_configs {
            use super::BEHAVIOURS;

            $($(#[$meta])*
            #[test]
            fn $name() {
                let named = |one: &&$crate::config::Behaviour| one.name == stringify!($name);
                BEHAVIOURS.iter().find(named).expect("in the table").run();
            })+
        }
    };
}
pub(crate) use over_configs;

#[test]
fn pairs_cover_any_two_values_of_two_dimensions() {
    let values = |config: &TestConfig| {
        [
            config.mode.name.to_owned(),
            format!("{:?}/{:?}", config.memory, config.policy),
            config.key_size.to_string(),
            format!("{:?}", config.progress),
            format!("{:?}", config.pages),
        ]
    };
    let meet = |configs: &[TestConfig]| {
        let mut pairs = std::collections::BTreeSet::new();
        for config in configs {
            let values = values(config);
            for a in 0..values.len() {
                for b in a + 1..values.len() {
                    pairs.insert((a, values[a].clone(), b, values[b].clone()));
                }
            }
        }
        pairs
    };
    assert_eq!(meet(&ConfigSet::Pairwise.list()), meet(&ConfigSet::Every.list()));
}
