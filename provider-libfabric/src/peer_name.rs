//! Names of endpoints, which peers exchange.

use std::fs;

use hmem_core::{Error, ErrorKind, Result, transfer::EndpointName};

/// The memory that a domain exposes for liveness checks, as a peer reaches it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Alive {
    pub(super) address: u64,
    pub(super) key: u64,
    /// The random number in this memory. Each domain has another number.
    pub(super) number: u64,
}

/// The parts of an endpoint's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerName {
    /// The name of libfabric's provider. Only endpoints of the same provider reach each other.
    pub(super) provider: String,
    /// The memory by which a peer tells a refused access from the end of this endpoint's process.
    /// `None` if the domain exposes none.
    pub(super) alive: Option<Alive>,
    /// A number that the endpoints of one process share.
    pub(super) family: u64,
    /// A random number of the endpoint.
    pub(super) number: u64,
    pub(super) process: Process,
    /// The address that libfabric gave to the endpoint (`fi_getname`).
    pub(super) address: Vec<u8>,
}

/// A process of this machine: its id, and the time of its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) id: u64,
    pub(super) started: u64,
}

impl Process {
    pub(super) fn own() -> Self {
        let id = u64::from(std::process::id());
        Self { id, started: Self::started(id).unwrap_or(0) }
    }

    /// Reads the start time of a process (`proc_pid_stat(5)`, field 22). Returns `None` if this
    /// machine has no such process, or only a zombie.
    fn started(id: u64) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(started)
    }

    /// Returns true if a process with this id and start time runs on this machine.
    pub(super) fn runs(self) -> bool {
        self.started != 0 && Self::started(self.id) == Some(self.started)
    }
}

const MAGIC: [u8; 4] = *b"hmFE";
const VERSION: u8 = 1;

fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Takes `N` bytes from the front of `bytes`.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*front)
}

/// Takes a list of bytes from the front of `bytes`. The list follows its length, a number of two
/// bytes.
fn take_list(bytes: &mut &[u8]) -> Option<Vec<u8>> {
    let len = u16::from_be_bytes(take(bytes)?);
    let (list, rest) = bytes.split_at_checked(usize::from(len))?;
    *bytes = rest;
    Some(list.to_vec())
}

impl PeerName {
    pub(super) fn encode(&self) -> EndpointName {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&[VERSION, u8::from(self.alive.is_some())]);
        let Alive { address, key, number } = self.alive.unwrap_or_default();
        for number in
            [address, key, number, self.family, self.number, self.process.id, self.process.started]
        {
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        for list in [self.provider.as_bytes(), &self.address] {
            bytes.extend_from_slice(&(list.len() as u16).to_be_bytes());
            bytes.extend_from_slice(list);
        }
        bytes.extend_from_slice(&checksum(&bytes).to_be_bytes());
        EndpointName(bytes)
    }

    /// Decodes the name of an endpoint.
    ///
    /// # Errors
    /// Malformed: the bytes are not a whole name of this version.
    pub(super) fn decode(name: &EndpointName) -> Result<Self> {
        Self::parse(&name.0).ok_or_else(|| {
            Error::new(ErrorKind::Malformed, "resolve")
                .provider("libfabric")
                .context("bytes", name.0.len())
                .remedy("pass the bytes of the endpoint's name unchanged and complete")
        })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk::<4>()?;
        if checksum(body) != u32::from_be_bytes(*sum) {
            return None;
        }
        let mut rest = body.strip_prefix(&MAGIC)?.strip_prefix(&[VERSION])?;
        let exposes = take::<1>(&mut rest)? == [1];
        let mut number = || Some(u64::from_be_bytes(take(&mut rest)?));
        let alive = Alive { address: number()?, key: number()?, number: number()? };
        let (family, own) = (number()?, number()?);
        let process = Process { id: number()?, started: number()? };
        let provider = String::from_utf8(take_list(&mut rest)?).ok()?;
        let address = take_list(&mut rest)?;
        let alive = exposes.then_some(alive);
        rest.is_empty().then_some(Self { provider, alive, family, number: own, process, address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoder_accepts_whole_names_only() {
        let alive = Some(Alive { address: 1, key: u64::MAX, number: 3 });
        for alive in [None, alive] {
            let (provider, address) = ("tcp;ofi_rxm".to_owned(), vec![7; 28]);
            let process = Process::own();
            assert!(process.runs() && !Process { started: 1, ..process }.runs());
            let name = PeerName { provider, alive, family: 8, number: 9, process, address };
            let encoded = name.encode();
            assert_eq!(PeerName::decode(&encoded).expect("a name"), name);
            for len in 0..encoded.0.len() {
                let short = EndpointName(encoded.0[..len].to_vec());
                let error = PeerName::decode(&short).expect_err("truncated");
                assert_eq!(error.kind(), ErrorKind::Malformed, "{len}");
                let mut changed = encoded.clone();
                changed.0[len] ^= 0x10;
                PeerName::decode(&changed).expect_err("a changed byte");
            }
            let longer = EndpointName([&encoded.0[..], &[0]].concat());
            PeerName::decode(&longer).expect_err("a byte too many");
        }
    }
}
