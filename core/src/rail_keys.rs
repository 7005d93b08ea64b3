//! The keys of one memory range on several NICs, each with the name of its NIC.

use serde::{Deserialize, Serialize};

use crate::{
    Error, ErrorKind, RemoteKey, Result,
    frame::Frame,
    key::{MAPPED, UncheckedKey},
    nic::Nic,
};

/// The key of a memory range on one NIC.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RailKey {
    /// The NIC that accepts the key.
    pub nic: Nic,
    /// The key for this NIC.
    pub key: RemoteKey,
}

impl RailKey {
    /// Pairs the key of a memory range with the NIC that accepts the key.
    #[must_use]
    pub const fn new(nic: Nic, key: RemoteKey) -> Self {
        Self { nic, key }
    }
}

/// The keys by which peers reach one memory range through several NICs, called rails.
///
/// [`Regions::rail_keys`](crate::Regions::rail_keys) returns this list. The list has at least one
/// rail, at most 256 rails, and no NIC twice. The order of the rails is kept, so two processes can
/// pair their rails by position. Like a [`RemoteKey`], the list is sent to a peer in a versioned
/// form with a checksum.
///
/// # Examples
///
/// ```
/// use hmem_core::{
///     Addressing, ErrorKind, Iova, RailKey, RailKeys, RemoteKey, provider::Nic,
/// };
///
/// let rail = |name: &str, key| {
///     let nic = Nic {
///         provider: "verbs".into(),
///         name: name.into(),
///         pci_bus_id: Some("0000:0c:00.0".into()),
///     };
///     RailKey::new(nic, RemoteKey::new(Addressing::ZeroBased, Iova(0), 4096, key))
/// };
/// let keys = RailKeys::new(vec![rail("mlx5_0", 0x1234), rail("mlx5_1", 0x5678)])?;
/// let mut bytes = keys.to_bytes();
/// let received = RailKeys::from_bytes(&bytes)?;
/// assert_eq!(received, keys);
/// assert_eq!(received.of("mlx5_1").unwrap().as_u64()?, 0x5678);
/// bytes[9] ^= 1;
/// assert_eq!(RailKeys::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::Malformed);
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RailKeys {
    rails: Vec<RailKey>,
}

/// The largest number of rails in a list.
const MAX_RAILS: usize = 256;

const FRAME: Frame = Frame {
    magic: *b"hmRL",
    version: 1,
    operation: "rail keys",
    remedy: "send the bytes of RailKeys::to_bytes unchanged and whole",
};

/// A rail in version 1 of the binary form. This type does not change if [`Nic`] gets more fields.
/// `K` is [`RemoteKey`] for a rail to send, and [`UncheckedKey`] for a received one.
#[derive(Serialize, Deserialize)]
struct WireRail<K> {
    provider: String,
    name: String,
    pci_bus_id: Option<String>,
    key: K,
}

impl RailKeys {
    /// Creates a list from the keys of one memory range.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an empty list, for more than 256 rails, for a NIC
    /// (provider and device name) that is in the list twice, and for a key that
    /// [`Domain::map_raw`](crate::Domain::map_raw) returned, which is valid only in the domain that
    /// mapped it.
    pub fn new(rails: Vec<RailKey>) -> Result<Self> {
        if let Some((what, remedy)) = problem(&rails) {
            return Err(Error::new(ErrorKind::InvalidArgument, FRAME.operation)
                .context("why", what)
                .context("rails", rails.len())
                .remedy(remedy));
        }
        Ok(Self { rails })
    }

    /// Returns the rails in order.
    #[must_use]
    pub fn rails(&self) -> &[RailKey] {
        &self.rails
    }

    /// Returns the key for a NIC, or `None` if the list does not have this NIC. `nic` is a device
    /// name (`mlx5_0`), or a provider and a device name (`verbs/mlx5_0`). If NICs of several
    /// providers have the device name, the call returns the key for the first of them.
    #[must_use]
    pub fn of(&self, nic: &str) -> Option<&RemoteKey> {
        self.rails.iter().find(|rail| rail.nic.is_named(nic)).map(|rail| &rail.key)
    }

    /// Returns the bytes to send to a peer.
    ///
    /// The bytes are the magic number `hmRL`, a version, the payload, and the CRC-32 of all these
    /// bytes in little-endian order. A later version of this crate reads them too.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let wire = |RailKey { nic, key }: &RailKey| WireRail {
            provider: nic.provider.clone(),
            name: nic.name.clone(),
            pci_bus_id: nic.pci_bus_id.clone(),
            key: key.clone(),
        };
        FRAME.write(&self.rails.iter().map(wire).collect::<Vec<_>>())
    }

    /// Reads a list from the bytes that [`RailKeys::to_bytes`] returned.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] with the reason as the context value `why`:
    ///
    /// - the magic number, version, checksum or payload is wrong;
    /// - bytes are missing or left over;
    /// - [`RemoteKey::from_bytes`] would refuse a key;
    /// - [`RailKeys::new`] refuses the rails.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let rails: Vec<WireRail<UncheckedKey>> = FRAME.read(bytes)?;
        let rails: Vec<_> = rails
            .into_iter()
            .map(|WireRail { provider, name, pci_bus_id, key }| {
                let key = key.try_into().map_err(|why| FRAME.refuse(bytes, why))?;
                Ok(RailKey::new(Nic { provider, name, pci_bus_id }, key))
            })
            .collect::<Result<_>>()?;
        match problem(&rails) {
            Some((what, _)) => Err(FRAME.refuse(bytes, what)),
            None => Ok(Self { rails }),
        }
    }
}

/// Returns the reason why [`RailKeys::new`] refuses the rails, with the remedy. Returns `None` if
/// the rails are valid.
fn problem(rails: &[RailKey]) -> Option<(&'static str, &'static str)> {
    let twice = |(at, rail): (usize, &RailKey)| {
        rails[..at].iter().any(|other| other.nic.is_same(&rail.nic))
    };
    if rails.is_empty() {
        return Some(("no rail", "pass the key of at least one NIC"));
    }
    // The limit also bounds the work that a peer's bytes can cause: the next check compares all
    // pairs of NICs.
    if rails.len() > MAX_RAILS {
        return Some(("more than 256 rails", "pass the keys of at most 256 NICs"));
    }
    if rails.iter().enumerate().any(twice) {
        return Some(("a NIC that is in the list twice", "register with one domain of each NIC"));
    }
    let mapped = rails.iter().any(|rail| rail.key.is_mapped());
    mapped.then_some((MAPPED, "pass keys of regions only"))
}
