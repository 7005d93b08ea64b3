//! PCI addresses. Unlike a driver's device numbers, they do not depend on environment variables.

use std::{fmt, str::FromStr};

use hmem_core::{Error, ErrorKind};

/// The address of a PCI function: domain, bus, device, function.
///
/// Ordinals of GPUs change with `CUDA_VISIBLE_DEVICES` and similar variables; this address does
/// not. Parsing accepts the forms of sysfs (`0000:07:00.0`), CUDA (`00000000:07:00.0`, upper or
/// lower case) and `lspci` (`07:00.0`, domain 0). `Display` prints the form of sysfs.
///
/// ```
/// use hmem_p2p::topology::BusId;
///
/// let id: BusId = "0000:07:00.0".parse()?;
/// assert_eq!("00000000:07:00.0".parse::<BusId>()?, id);
/// assert_eq!("07:00.0".parse::<BusId>()?, id);
/// assert_eq!(id.to_string(), "0000:07:00.0");
/// assert!("0000:07:20.0".parse::<BusId>().is_err());
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BusId {
    /// The PCI domain (segment). Hypervisors and VMD use numbers beyond 16 bits.
    pub domain: u32,
    /// The number of the bus in its domain.
    pub bus: u8,
    /// The number of the device on the bus, 0 to 31.
    pub device: u8,
    /// The number of the function of the device, 0 to 7.
    pub function: u8,
}

/// The root bus below a host bridge: `pci0000:00` in sysfs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RootBus {
    /// The number of the PCI domain.
    pub domain: u32,
    /// The number of the bus in its domain.
    pub bus: u8,
}

/// Parses at most `most` hexadecimal digits. Accepts no sign, unlike `from_str_radix`.
fn hex(text: &str, most: usize) -> Option<u32> {
    let digits =
        !text.is_empty() && text.len() <= most && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits { u32::from_str_radix(text, 16).ok() } else { None }
}

impl BusId {
    pub(super) fn read(text: &str) -> Option<Self> {
        let (place, function) = text.rsplit_once('.')?;
        let (place, device) = place.rsplit_once(':')?;
        let (domain, bus) = place.rsplit_once(':').unwrap_or(("0", place));
        let id = Self {
            domain: hex(domain, 8)?,
            bus: u8::try_from(hex(bus, 2)?).ok()?,
            device: u8::try_from(hex(device, 2)?).ok()?,
            function: u8::try_from(hex(function, 1)?).ok()?,
        };
        (id.device < 32 && id.function < 8).then_some(id)
    }
}

impl RootBus {
    /// Parses the name of a folder in `/sys/devices`, such as `pci0000:00`.
    pub(super) fn read(name: &str) -> Option<Self> {
        let (domain, bus) = name.strip_prefix("pci")?.split_once(':')?;
        if domain.len() < 4 || bus.len() != 2 {
            return None;
        }
        Some(Self { domain: hex(domain, 8)?, bus: u8::try_from(hex(bus, 2)?).ok()? })
    }
}

impl FromStr for BusId {
    type Err = Error;

    /// Parses an address in the form of sysfs, CUDA or `lspci`.
    ///
    /// # Errors
    /// Malformed: the text is not an address.
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::read(text.trim()).ok_or_else(|| {
            Error::new(ErrorKind::Malformed, "read PCI address")
                .context("text", format_args!("{:?}", text.chars().take(40).collect::<String>()))
                .remedy("write domain:bus:device.function in hexadecimal, as in 0000:07:00.0")
        })
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl fmt::Debug for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RootBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pci{:04x}:{:02x}", self.domain, self.bus)
    }
}

impl fmt::Debug for RootBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_address_reads_back(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let id = BusId { domain, bus, device, function };
            prop_assert_eq!(id.to_string().parse::<BusId>().unwrap(), id);
            prop_assert_eq!(id.to_string().to_uppercase().parse::<BusId>().unwrap(), id);
            let root = RootBus { domain, bus };
            prop_assert_eq!(RootBus::read(&root.to_string()), Some(root));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in ".*") {
            let _ = text.parse::<BusId>();
            let _ = RootBus::read(&text);
        }
    }

    #[test]
    fn text_that_is_not_an_address_is_refused() {
        for wrong in [
            "",
            ":",
            ".",
            "07:00",
            "07:00.8",
            "+7:00.0",
            "0000:07:00.0.0",
            "000000000:07:00.0",
            "::.",
        ] {
            assert!(wrong.parse::<BusId>().is_err(), "{wrong}");
        }
    }
}
