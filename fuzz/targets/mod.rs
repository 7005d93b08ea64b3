//! Fuzz targets: one function for every parser of bytes that come from outside the process.
//!
//! A target passes its input to a parser, checks what the parser returned, and reports a
//! [`Verdict`]. The targets run in two programs: the fuzzer (`fuzz/src/main.rs`), and the test
//! `cli/tests/fuzz_corpora.rs`, which replays the committed inputs of `fuzz/corpus`.

mod arguments;
mod environment;
mod ipc_handles;
mod keys;
mod names;
mod peer_requests;
mod perf;
mod raw_keys;
mod recordings;
/// The parser of the verbs provider's endpoint names. The provider needs a NIC to be opened, so
/// that no public function reaches the parser without one.
#[path = "../../provider-verbs/src/peer_name.rs"]
#[allow(dead_code, reason = "the target needs a part of the file")]
mod verbs_peer_name;
/// The parser of the verbs provider's raw keys, for the same reason.
#[path = "../../provider-verbs/src/raw_key.rs"]
#[allow(dead_code, reason = "the target needs a part of the file")]
mod verbs_raw_key;

/// The result of a parser: it accepted the input, or refused it with an error, of which this is the
/// text.
pub(crate) type Verdict = Result<(), String>;

/// Function that gives the bytes of one input to a parser.
pub(crate) type Target = fn(&[u8]) -> Verdict;

/// Every target by its name, which is also the name of its folder in `fuzz/corpus`. The target
/// `environment` comes first: it changes variables, and later targets start threads.
pub(crate) const TARGETS: [(&str, Target); 12] = [
    ("environment", environment::target),
    ("arguments", arguments::target),
    ("remote_keys", keys::remote_keys),
    ("rail_keys", keys::rail_keys),
    ("key_updates", keys::key_updates),
    ("raw_keys", raw_keys::target),
    ("endpoint_names", names::target),
    ("ipc_handles", ipc_handles::target),
    ("recordings", recordings::archives),
    ("config_spaces", recordings::config_spaces),
    ("perf", perf::target),
    ("peer_requests", peer_requests::target),
];

/// Returns the text of a refusal.
///
/// # Panics
/// If the error does not say how to correct it.
#[track_caller]
fn refusal(error: hmem::Error) -> String {
    assert!(error.remedy_text().is_some(), "no remedy: {error:#}");
    format!("{:?}: {error:#}", error.kind())
}

/// Returns the bytes with their last four replaced by the CRC-32 of the others, in little-endian
/// order. A fuzzer does not guess a checksum.
fn with_crc(bytes: &[u8]) -> Vec<u8> {
    let body = &bytes[..bytes.len().saturating_sub(4)];
    [body, &crc32fast::hash(body).to_le_bytes()].concat()
}

/// Reads numbers from an input. Past its end, every number is 0.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let len = self.0.len().min(N);
        bytes[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        bytes
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
