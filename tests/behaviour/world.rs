//! Worlds over which behaviours run. The software NIC combines memory, mr_mode, key size, progress,
//! pages and path. An RDMA device that `HMEM_VERBS_DEVICE` names combines memory and path.
//!
//! A behaviour is a function over a [`World`]. It declares a [`Need`], with its reason, for each
//! property that a world may lack; `tests/skipped.txt` and `tests/skipped-verbs.txt` list the
//! result. A behaviour that no world can show fails.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use hmem::{
    ErrorKind, MrMode,
    loopback::{Memory as Pages, Progress},
    path::P2pPolicy,
    system::FreeDetection,
};

/// Source of the memory under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    System,
    Device(FreeDetection),
}

/// NIC that moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nic {
    /// The software NIC of this library.
    Loopback,
    /// The device that `HMEM_VERBS_DEVICE` names, through libibverbs.
    Verbs {
        /// The driver registers dma-bufs.
        dma_buf: bool,
    },
}

/// One combination of memory, NIC, mode and path to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) nic: Nic,
    pub(crate) memory: Memory,
    /// The mr_mode bits that the application supports and those that the provider requires.
    pub(crate) mode: Mode,
    pub(crate) key_size: usize,
    pub(crate) progress: Progress,
    pub(crate) pages: Pages,
    pub(crate) policy: P2pPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) name: &'static str,
    pub(crate) offered: MrMode,
    pub(crate) needed: MrMode,
}

/// All bits except the two that stand alone.
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
/// Mode bits that RDMA devices need.
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
const PAGES: [Pages; 2] = [Pages::Follow, Pages::Pinned];

impl World {
    /// The default mode over host memory with manual progress, for behaviours that no dimension
    /// changes.
    pub(crate) const PLAIN: Self = Self {
        nic: Nic::Loopback,
        memory: Memory::System,
        mode: DEFAULT,
        key_size: 8,
        progress: Progress::ByHand,
        pages: Pages::Follow,
        policy: P2pPolicy::Enabled,
    };

    pub(crate) const fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// The mode in force, BASIC and SCALABLE resolved.
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

    /// Returns true if windows bind to the NIC's regions. The VM's driver binds them to host memory
    /// only.
    pub(crate) fn binds_windows(&self) -> bool {
        self.is_loopback() || self.is_system()
    }

    /// The initiator's view of a refusal by the target. The software NIC reports the reason. RDMA
    /// devices report a dead key, a range outside and a missing right alike, as a remote access
    /// error.
    pub(crate) fn seen(&self, refusal: ErrorKind) -> ErrorKind {
        let at_the_target = matches!(
            refusal,
            ErrorKind::InvalidKey | ErrorKind::OutOfBounds | ErrorKind::BadAddress
        );
        if at_the_target && !self.is_loopback() { ErrorKind::AccessDenied } else { refusal }
    }
}

impl fmt::Display for World {
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

/// Selection of worlds for a behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worlds {
    /// Every combination.
    Every,
    /// Every mode with every memory and path. The other dimensions rotate so that every pair of
    /// values of any two dimensions occurs.
    Pairs,
    /// Every mode, over host memory.
    Modes,
    /// Every combination of memory, path, progress mode and page handling, in the default mode.
    Places,
    /// One world, for behaviours that no dimension changes.
    Plain,
    /// One world, in the mode of hardware.
    Hardware,
}

impl Worlds {
    pub(crate) fn list(self) -> Vec<World> {
        match self {
            Self::Every => product(&MODES, &PLACES, &KEY_SIZES),
            Self::Pairs => pairs(),
            Self::Modes => MODES.iter().map(|mode| World::PLAIN.with_mode(*mode)).collect(),
            Self::Places => product(&[DEFAULT], &PLACES, &[8]),
            Self::Plain => vec![World::PLAIN],
            Self::Hardware => vec![World::PLAIN.with_mode(HARDWARE)],
        }
    }
}

/// Worlds of an RDMA device, present or not. Every behaviour runs over each world that can show it.
pub(crate) fn verbs_worlds() -> Vec<World> {
    let world = |dma_buf, memory, policy| World {
        nic: Nic::Verbs { dma_buf },
        memory,
        mode: VERBS,
        key_size: 4,
        progress: Progress::Thread,
        pages: Pages::Pinned,
        policy,
    };
    let mut worlds = Vec::new();
    for dma_buf in [false, true] {
        worlds.extend(PLACES.iter().map(|(memory, policy)| world(dma_buf, *memory, *policy)));
    }
    worlds
}

/// Properties of the world that every behaviour needs on an RDMA device.
pub(crate) const VERBS_NEEDS: [Need; 2] = [
    need(
        "staged path",
        "no peer reaches staged memory over a device: `provider-verbs/tests/staging.rs` shows \
         what the owner does with it",
        |world| !world.staged(),
    ),
    need(
        "device memory, a driver without dma-bufs",
        "no path leads there but a staged one",
        |world| world.is_system() || world.staged() || world.imports_dma_bufs(),
    ),
];

/// Worlds of the RDMA device that `HMEM_VERBS_DEVICE` names; none if it names none.
fn verbs_worlds_here() -> Vec<World> {
    if !set("HMEM_VERBS_DEVICE") {
        return Vec::new();
    }
    let dma_buf = set("HMEM_VERBS_DMA_BUF");
    verbs_worlds().into_iter().filter(|world| world.imports_dma_bufs() == dma_buf).collect()
}

fn set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

fn product(modes: &[Mode], places: &[(Memory, P2pPolicy)], key_sizes: &[usize]) -> Vec<World> {
    let mut worlds = Vec::new();
    for mode in modes {
        for (memory, policy) in places {
            for key_size in key_sizes {
                for progress in PROGRESSES {
                    for pages in PAGES {
                        let (memory, policy, mode, key_size) = (*memory, *policy, *mode, *key_size);
                        let nic = Nic::Loopback;
                        worlds.push(World { nic, memory, mode, key_size, progress, pages, policy });
                    }
                }
            }
        }
    }
    worlds
}

fn pairs() -> Vec<World> {
    let mut worlds = Vec::new();
    for (i, mode) in MODES.iter().enumerate() {
        for (j, (memory, policy)) in PLACES.iter().enumerate() {
            worlds.push(World {
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
    worlds
}

/// A property of the world that a behaviour needs.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    /// Class of worlds that lack it.
    pub(crate) class: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) met: fn(&World) -> bool,
}

pub(crate) const fn need(
    class: &'static str,
    reason: &'static str,
    met: fn(&World) -> bool,
) -> Need {
    Need { class, reason, met }
}

/// Properties of the world that many behaviours need.
pub(crate) mod needs {
    use super::*;

    pub(crate) const SYSTEM: Need =
        need("device memory", "the test moves the pages behind an address", World::is_system);
    pub(crate) const DEVICE: Need =
        need("system memory", "it is about device memory", |world| !world.is_system());
    pub(crate) const FOLLOW: Need =
        need("pinned pages", "pages must be there when they are pinned", |world| {
            world.pages == Pages::Follow
        });
    pub(crate) const PINNED: Need =
        need("followed pages", "it is about pages that stay pinned", |world| {
            world.pages == Pages::Pinned
        });
    pub(crate) const BY_HAND: Need =
        need("progress by thread", "the test steps transfers itself", |world| {
            world.progress == Progress::ByHand
        });
    pub(crate) const KEYS_AT_HAND: Need =
        need("mode RAW", "keys are exchanged raw: MODE-04 and KEY-04 show it", |world| {
            !world.has(MrMode::RAW)
        });
    pub(crate) const OWN_KEYS: Need =
        need("mode PROV_KEY", "the provider picks the keys", |world| !world.has(MrMode::PROV_KEY));
    pub(crate) const ATOMICS: Need =
        need("staged path", "atomics on staged memory are refused (BNC-03)", |world| {
            !world.staged()
        });
    pub(crate) const DMA_BUFS: Need =
        need("a driver without dma-bufs", "it is about dma-bufs", World::imports_dma_bufs);
    pub(crate) const HELD_TRANSFERS: Need = need(
        "verbs",
        "the test holds a transfer: `provider-verbs/tests/transfer.rs` closes regions amid a \
         device's",
        World::is_loopback,
    );
    pub(crate) const SUB_REGIONS: Need =
        need("verbs", "verbs has no key for a part of a registration", World::is_loopback);
    pub(crate) const COUNTERS: Need =
        need("verbs", "verbs does not count accesses to a region", World::is_loopback);
    pub(crate) const WINDOWS: Need = need(
        "device memory on verbs",
        "the VM's driver binds windows to host memory only",
        World::binds_windows,
    );
    pub(crate) const NO_ENDPOINT: Need = need(
        "mode ENDPOINT",
        "a region is bound to its endpoint before use: MODE-10 shows it",
        |world| !world.has(MrMode::ENDPOINT),
    );
}

/// A behaviour: its name, its requirement ids, its worlds and needs.
pub(crate) struct Behaviour {
    pub(crate) name: &'static str,
    pub(crate) worlds: Worlds,
    pub(crate) needs: &'static [Need],
    pub(crate) show: fn(&World),
}

impl Behaviour {
    /// Runs the behaviour over every world that supports it, and reports the worlds where it
    /// failed. `HMEM_WORLD` selects the worlds whose names contain its value.
    pub(crate) fn run(&self) {
        let mut shown = 0;
        let mut failures = Vec::new();
        let only = std::env::var("HMEM_WORLD").unwrap_or_default();
        for world in self.worlds.list().into_iter().chain(verbs_worlds_here()) {
            if !world.is_loopback() && !VERBS_NEEDS.iter().all(|need| (need.met)(&world)) {
                continue;
            }
            if self.needs.iter().any(|need| !(need.met)(&world))
                || !world.to_string().contains(&only)
            {
                continue;
            }
            shown += 1;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.show)(&world))) {
                failures.push(format!("{world}:\n    {}", message(&*panic)));
                if failures.len() == ENOUGH {
                    break;
                }
            }
        }
        assert!(shown > 0, "{}: no world can show this, and a skip is not a pass", self.name);
        let (count, list) = (failures.len(), failures.join("\n  "));
        assert!(
            count == 0,
            "{} failed in {count} of the first {shown} worlds:\n  {list}",
            self.name
        );
    }

    /// One line for each class of worlds that cannot show the behaviour.
    pub(crate) fn skipped(&self) -> impl Iterator<Item = String> + '_ {
        let worlds = self.worlds.list();
        self.needs
            .iter()
            .filter(move |need| worlds.iter().any(|world| !(need.met)(world)))
            .map(|need| format!("{} | {}: {}", self.name, need.class, need.reason))
    }

    /// Like [`skipped`](Self::skipped), for the worlds of an RDMA device. The class tells whether
    /// no world can show it, or none without dma-bufs.
    pub(crate) fn skipped_verbs(&self) -> Vec<String> {
        let worlds: Vec<_> = verbs_worlds()
            .into_iter()
            .filter(|world| VERBS_NEEDS.iter().all(|need| (need.met)(world)))
            .collect();
        let unmet = |need: &Need, dma_bufs: bool| {
            worlds
                .iter()
                .filter(|world| dma_bufs || !world.imports_dma_bufs())
                .all(|world| !(need.met)(world))
        };
        let mut lines = Vec::new();
        for need in self.needs {
            let class = if unmet(need, true) {
                "every verbs world"
            } else if unmet(need, false) {
                "every verbs world without dma-bufs"
            } else if worlds.iter().any(|world| !(need.met)(world)) {
                need.class
            } else {
                continue;
            };
            lines.push(format!("{} | {class}: {}", self.name, need.reason));
        }
        lines
    }
}

/// Number of failing worlds after which a behaviour stops: each failure may cost a full timeout.
const ENOUGH: usize = 4;

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked")
}

/// Defines a test for each behaviour of a module, and the table for the list of skips. The doc
/// comment of an entry, with its requirement ids, becomes the test's.
macro_rules! over_worlds {
    ($($(#[$meta:meta])* $name:ident: $worlds:ident $(, $need:expr)*;)+) => {
        pub(crate) const BEHAVIOURS: &[$crate::world::Behaviour] = &[$(
            $crate::world::Behaviour {
                name: stringify!($name),
                worlds: $crate::world::Worlds::$worlds,
                needs: &[$($need),*],
                show: $name,
            }
        ),+];

        mod over_worlds {
            use super::BEHAVIOURS;

            $($(#[$meta])*
            #[test]
            fn $name() {
                let named = |one: &&$crate::world::Behaviour| one.name == stringify!($name);
                BEHAVIOURS.iter().find(named).expect("in the table").run();
            })+
        }
    };
}
pub(crate) use over_worlds;

#[test]
fn the_paired_worlds_cover_every_two_values() {
    let values = |world: &World| {
        [
            world.mode.name.to_owned(),
            format!("{:?}/{:?}", world.memory, world.policy),
            world.key_size.to_string(),
            format!("{:?}", world.progress),
            format!("{:?}", world.pages),
        ]
    };
    let meet = |worlds: &[World]| {
        let mut pairs = std::collections::BTreeSet::new();
        for world in worlds {
            let values = values(world);
            for a in 0..values.len() {
                for b in a + 1..values.len() {
                    pairs.insert((a, values[a].clone(), b, values[b].clone()));
                }
            }
        }
        pairs
    };
    assert_eq!(meet(&Worlds::Pairs.list()), meet(&Worlds::Every.list()));
}
