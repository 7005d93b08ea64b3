//! Names of endpoints, which peers exchange to connect.

use hmem_core::{Error, ErrorKind, Result, transfer::EndpointName};

/// Properties of a queue pair that a peer needs to connect. An [`EndpointName`] is their encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerName {
    /// Number of the queue pair.
    pub(super) qpn: u32,
    /// Sequence number of the first packet that the queue pair sends.
    pub(super) psn: u32,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    /// Code of the port's maximum payload of a packet (`enum ibv_mtu`).
    pub(super) mtu: u8,
    /// Maximum number of RMA reads and atomics that the queue pair executes at once.
    pub(super) reads: u8,
    /// Number of connections of the endpoint that have failed, modulo 2^16. If this number in the
    /// endpoint's name has changed, the peer must connect again.
    pub(super) epoch: u16,
}

const MAGIC: [u8; 4] = *b"hmVE";
const VERSION: u8 = 1;
/// Length of an encoded name in bytes.
const NAME: usize = 38;

fn checksum(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0x1d_u16, |sum, byte| sum.rotate_left(3) ^ u16::from(*byte))
}

impl PeerName {
    pub(super) fn encode(&self) -> EndpointName {
        let mut bytes = Vec::with_capacity(NAME);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&[VERSION, self.mtu, self.reads, 0]);
        bytes.extend_from_slice(&self.qpn.to_be_bytes());
        bytes.extend_from_slice(&self.psn.to_be_bytes());
        bytes.extend_from_slice(&self.lid.to_be_bytes());
        bytes.extend_from_slice(&self.epoch.to_be_bytes());
        bytes.extend_from_slice(&self.gid);
        bytes.extend_from_slice(&checksum(&bytes).to_be_bytes());
        EndpointName(bytes)
    }

    pub(super) fn decode(name: &EndpointName) -> Result<Self> {
        let malformed = || {
            Error::new(ErrorKind::Malformed, "resolve")
                .provider("verbs")
                .context("bytes", name.0.len())
                .remedy("pass the bytes of the peer's name unchanged and complete")
        };
        let bytes: &[u8; NAME] = name.0.as_slice().try_into().map_err(|_| malformed())?;
        let number = |from: usize| {
            bytes[from..].first_chunk::<4>().map_or(0, |part| u32::from_be_bytes(*part))
        };
        let short = |from: usize| {
            bytes[from..].first_chunk::<2>().map_or(0, |part| u16::from_be_bytes(*part))
        };
        let sum = checksum(&bytes[..NAME - 2]);
        if bytes[..4] != MAGIC || bytes[4] != VERSION || short(NAME - 2) != sum {
            return Err(malformed());
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[20..36]);
        Ok(Self {
            qpn: number(8),
            psn: number(12),
            gid,
            lid: short(16),
            mtu: bytes[5],
            reads: bytes[6],
            epoch: short(18),
        })
    }

    /// Returns true if both names belong to the same queue pair.
    pub(super) fn same_peer(&self, other: &Self) -> bool {
        Self { epoch: 0, ..*self } == Self { epoch: 0, ..*other }
    }
}
