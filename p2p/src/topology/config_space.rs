//! PCI configuration space: the type of a function, and Access Control Services (ACS).
//!
//! Offsets and bits are those of `linux/pci_regs.h` and of the PCI Express base specification
//! (7.5.3 for the port type, 7.7.11 for ACS). Both capabilities lie past the first 64 bytes. Linux
//! shows only these 64 bytes to a process without `CAP_SYS_ADMIN`.

use std::fmt;

/// Type of a PCI function by its place in the PCI tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Port {
    /// A device without other devices below it.
    Endpoint,
    /// A port of the root complex. Devices or switches are below it.
    RootPort,
    /// The port of a switch on the side of the root complex.
    Upstream,
    /// A port of a switch on the side of the devices.
    Downstream,
    /// Any other bridge: a bridge to conventional PCI, or a bridge of unknown type.
    Bridge,
}

impl Port {
    /// Returns the name of the type for output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Endpoint => "endpoint",
            Self::RootPort => "root-port",
            Self::Upstream => "switch-upstream",
            Self::Downstream => "switch-downstream",
            Self::Bridge => "bridge",
        }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Access Control Services (ACS) of a port. They can redirect traffic between devices below the
/// port to the root complex.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Acs {
    /// The state is unknown. In most cases the process can read only the first 64 bytes of
    /// configuration space, because more needs `CAP_SYS_ADMIN`. In other cases the kernel shows no
    /// extended space (`pci=nommconf`), the device does not respond, or its configuration space is
    /// missing or malformed.
    Unreadable,
    /// The function has no ACS capability.
    Absent,
    /// The function has an ACS capability. The value is the control register of the capability.
    Control(AcsControl),
}

/// The ACS control register (`PCI_ACS_CTRL`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AcsControl(pub u16);

impl AcsControl {
    const NAMES: [(u16, &'static str); 7] = [
        (0x01, "SrcValid"),
        (0x02, "TransBlk"),
        (0x04, "ReqRedir"),
        (0x08, "CmpltRedir"),
        (0x10, "UpstreamFwd"),
        (0x20, "EgressCtrl"),
        (0x40, "DirectTrans"),
    ];

    /// Returns whether the port sends requests or completions between two devices below it to the
    /// root complex, or may do so by its egress control vector. Linux tests the bits of the same
    /// three controls (`pci_bridge_has_acs_redir`).
    #[must_use]
    pub const fn redirects(self) -> bool {
        self.0 & 0x2c != 0
    }

    /// Returns the names of the set bits, in the spelling of `lspci`.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(bit, _)| self.0 & bit != 0).map(|(_, name)| name)
    }
}

impl fmt::Debug for AcsControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Acs {
    /// Returns whether the port redirects traffic; `None` if the capability could not be read.
    #[must_use]
    pub const fn redirects(self) -> Option<bool> {
        match self {
            Self::Unreadable => None,
            Self::Absent => Some(false),
            Self::Control(control) => Some(control.redirects()),
        }
    }
}

/// The parsed part of a function's configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConfigSpace {
    /// The type of the function; `None` if no PCI Express capability was read.
    pub(super) port: Option<Port>,
    pub(super) acs: Acs,
}

/// Number of bytes of configuration space that an unprivileged process can read.
pub(super) const HEADER: usize = 64;
const CONVENTIONAL: usize = 256;
const EXTENDED: usize = 4096;

const STATUS: usize = 0x06;
const STATUS_HAS_CAPABILITIES: u32 = 0x10;
const HEADER_TYPE: usize = 0x0e;
const CAPABILITY_POINTER: usize = 0x34;
const PCI_EXPRESS: u32 = 0x10;
const ACS: u16 = 0x0d;
const ACS_CONTROL: usize = 6;

/// Parses a configuration space. `word` returns the little-endian 32-bit word at an offset, or
/// `None` past the end. Reads few words, because each word is a request to the device. The error
/// describes the malformed part.
pub(super) fn read(word: impl Fn(usize) -> Option<u32>) -> Result<ConfigSpace, String> {
    if word(HEADER - 4).is_none() {
        return Err(format!("fewer than {HEADER} bytes of configuration space"));
    }
    let header_word = |at: usize| word(at & !3).unwrap_or(0) >> (8 * (at & 3));
    let status = header_word(STATUS);
    if status == u32::from(u16::MAX) {
        // A device that does not respond reads as all ones.
        return Ok(ConfigSpace { port: None, acs: Acs::Unreadable });
    }
    if status & STATUS_HAS_CAPABILITIES == 0 {
        let bridge = header_word(HEADER_TYPE) & 0x7f == 1;
        return Ok(ConfigSpace { port: (!bridge).then_some(Port::Endpoint), acs: Acs::Absent });
    }
    if word(HEADER).is_none() {
        return Ok(ConfigSpace { port: None, acs: Acs::Unreadable });
    }
    let first = header_word(CAPABILITY_POINTER) as usize & 0xfc;
    let port = pci_express(&word, first)?.map(|flags| match (flags >> 4) & 0xf {
        4 => Port::RootPort,
        5 => Port::Upstream,
        6 => Port::Downstream,
        7 | 8 => Port::Bridge,
        _ => Port::Endpoint,
    });
    let acs = match port {
        None => Acs::Absent,
        // A system without access to extended space hides the ACS capabilities of its ports.
        Some(Port::RootPort | Port::Downstream) if word(CONVENTIONAL).is_none() => Acs::Unreadable,
        Some(_) => extended(&word)?,
    };
    Ok(ConfigSpace { port, acs })
}

/// Returns the flags of the PCI Express capability; `None` if there is none. The list of
/// capabilities begins at the offset `at`.
fn pci_express(word: impl Fn(usize) -> Option<u32>, mut at: usize) -> Result<Option<u32>, String> {
    // Each capability has at least four bytes, which limits their number.
    for _ in 0..(CONVENTIONAL - HEADER) / 4 {
        if at == 0 {
            return Ok(None);
        }
        if at < HEADER {
            return Err(format!("a capability at {at:#x}, inside the header"));
        }
        let start = word(at).ok_or_else(|| format!("a capability at {at:#x}, past the end"))?;
        if start & 0xff == PCI_EXPRESS {
            return Ok(Some(start >> 16));
        }
        at = (start >> 8) as usize & 0xfc;
    }
    Err("a loop of capabilities".to_owned())
}

/// Reads the ACS capability from the list of extended capabilities.
fn extended(word: impl Fn(usize) -> Option<u32>) -> Result<Acs, String> {
    let mut at = CONVENTIONAL;
    for _ in 0..(EXTENDED - CONVENTIONAL) / 8 {
        let Some(header) = word(at) else {
            // A virtual machine may emulate only conventional space, which has no extended
            // capability.
            return if at == CONVENTIONAL {
                Ok(Acs::Absent)
            } else {
                Err(format!("a capability at {at:#x}, past the end"))
            };
        };
        if header == 0 || header == u32::MAX {
            return Ok(Acs::Absent);
        }
        if header & 0xffff == u32::from(ACS) {
            let control = word(at + 4).ok_or_else(|| format!("ACS cut off at {at:#x}"))? >> 16;
            return Ok(Acs::Control(AcsControl(control as u16)));
        }
        at = (header >> 20) as usize & 0xffc;
        if at == 0 {
            return Ok(Acs::Absent);
        }
        if at < CONVENTIONAL {
            return Err(format!("an extended capability at {at:#x}, inside conventional space"));
        }
    }
    Err("a loop of extended capabilities".to_owned())
}

/// Returns bytes that [`read`] parses as `space`. `bridge` sets the header type of a bridge.
pub(super) fn write(space: ConfigSpace, bridge: bool) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[HEADER_TYPE] = u8::from(bridge);
    bytes[STATUS] = STATUS_HAS_CAPABILITIES as u8;
    if space.acs == Acs::Unreadable {
        return bytes;
    }
    // The parser treats the end of the bytes as the end of the capability list.
    bytes.resize(CONVENTIONAL, 0);
    let Some(port) = space.port else { return bytes };
    bytes[CAPABILITY_POINTER] = HEADER as u8;
    bytes[HEADER] = PCI_EXPRESS as u8;
    bytes[HEADER + 2] = match port {
        Port::Endpoint => 0x02,
        Port::RootPort => 0x42,
        Port::Upstream => 0x52,
        Port::Downstream => 0x62,
        Port::Bridge => 0x72,
    };
    match space.acs {
        Acs::Control(control) => {
            bytes.extend((u32::from(ACS) | 1 << 16).to_le_bytes());
            bytes.resize(CONVENTIONAL + ACS_CONTROL, 0);
            bytes.extend(control.0.to_le_bytes());
        }
        // An empty list of extended capabilities.
        _ => bytes.extend([0; 4]),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<ConfigSpace, String> {
        super::read(|at| {
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
        })
    }

    /// Returns the configuration space of a root port. A serial number comes before the ACS
    /// capability.
    fn root_port() -> Vec<u8> {
        let mut bytes = vec![0; EXTENDED];
        bytes[STATUS] = 0x10;
        bytes[HEADER_TYPE] = 0x81;
        bytes[CAPABILITY_POINTER] = 0x40;
        bytes[0x40..0x44].copy_from_slice(&[0x01, 0x50, 0, 0]);
        bytes[0x50..0x54].copy_from_slice(&[0x10, 0x00, 0x42, 0]);
        bytes[0x100..0x104].copy_from_slice(&(0x0003_u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        bytes[0x148..0x14c].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
        bytes[0x14e..0x150].copy_from_slice(&0x001d_u16.to_le_bytes());
        bytes
    }

    #[test]
    fn acs_is_found_behind_other_capabilities() {
        let space = read(&root_port()).unwrap();
        assert_eq!(space.port, Some(Port::RootPort));
        let Acs::Control(control) = space.acs else { panic!("{space:?}") };
        assert!(control.redirects());
        assert_eq!(
            control.names().collect::<Vec<_>>(),
            ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]
        );
    }

    #[test]
    fn each_of_three_controls_redirects() {
        let redirecting = (0..16).map(|bit| 1 << bit).filter(|bit| AcsControl(*bit).redirects());
        assert_eq!(redirecting.collect::<Vec<u16>>(), [0x04, 0x08, 0x20]);
    }

    #[test]
    fn acs_is_unreadable_without_privilege() {
        let space = read(&root_port()[..HEADER]).unwrap();
        assert_eq!(space, ConfigSpace { port: None, acs: Acs::Unreadable });
        assert_eq!(space.acs.redirects(), None);
    }

    #[test]
    fn acs_of_a_port_is_unreadable_without_extended_space() {
        let mut bytes = root_port();
        bytes.truncate(CONVENTIONAL);
        assert_eq!(read(&bytes).unwrap().acs, Acs::Unreadable);
        bytes[0x52] = 0x02;
        let endpoint = ConfigSpace { port: Some(Port::Endpoint), acs: Acs::Absent };
        assert_eq!(read(&bytes), Ok(endpoint));
    }

    #[test]
    fn loops_and_pointers_out_of_bounds_are_refused() {
        let changed = |at: usize, new: &[u8]| {
            let mut bytes = root_port();
            bytes[at..at + new.len()].copy_from_slice(new);
            read(&bytes).unwrap_err()
        };
        let mut bytes = root_port();
        bytes[0x50] = 0x05;
        bytes[0x51] = 0x40;
        assert!(read(&bytes).unwrap_err().contains("loop of capabilities"));
        assert!(changed(CAPABILITY_POINTER, &[0x10]).contains("inside the header"));
        let header = |next: u32| (0x0003_u32 | 1 << 16 | next << 20).to_le_bytes();
        assert!(changed(0x100, &header(0x100)).contains("loop of extended"));
        assert!(changed(0x100, &header(0x40)).contains("inside conventional"));
        let mut cut = root_port();
        cut.truncate(0x148);
        assert!(read(&cut).unwrap_err().contains("past the end"));
        assert!(read(&[0; 63]).unwrap_err().contains("fewer than 64"));
    }

    #[test]
    fn written_configuration_space_reads_back() {
        for port in [Port::Endpoint, Port::RootPort, Port::Upstream, Port::Downstream, Port::Bridge]
        {
            for acs in [Acs::Absent, Acs::Control(AcsControl(0x1d)), Acs::Control(AcsControl(0))] {
                let space = ConfigSpace { port: Some(port), acs };
                assert_eq!(read(&write(space, port != Port::Endpoint)), Ok(space));
            }
        }
        for space in [
            ConfigSpace { port: None, acs: Acs::Unreadable },
            ConfigSpace { port: None, acs: Acs::Absent },
        ] {
            assert_eq!(read(&write(space, true)), Ok(space));
        }
    }

    proptest! {
        /// REL-03: the parser of PCI configuration space returns for any bytes and does not panic.
        #[test]
        fn arbitrary_bytes_do_not_panic_or_hang(
            bytes in prop::collection::vec(any::<u8>(), 0..4200),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..16),
        ) {
            let _ = read(&bytes);
            let mut altered = root_port();
            for (at, byte) in changes {
                let at = at.index(altered.len());
                altered[at] = byte;
            }
            let _ = read(&altered);
        }
    }
}
