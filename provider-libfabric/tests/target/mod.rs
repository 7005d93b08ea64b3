//! Tests with a child process over an installed libfabric (`HMEM_LIBFABRIC_LIBRARY`). The child
//! runs the test binary again: it exposes memory, posts receives, and prints what happens. The
//! parent sends it one command per line.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use hmem_core::{Addressing, Domain, ErrorKind, Iova, RemoteKey, Result, transfer::EndpointName};
use hmem_provider_libfabric::{Libfabric, sys};

use crate::{trials::Skipped, watchdog};

/// The environment variable that tells a child process its provider. The value ends with `+thread`
/// if the provider has a progress thread.
pub(crate) const CHILD: &str = "HMEM_FABRIC_CHILD";

/// Limit for all tests of a binary together. A call of libfabric that never returns ends the
/// process.
const LIMIT: Duration = Duration::from_secs(900);

/// Limit for one transfer.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(seed * 2 + 7) >> 3) as u8 ^ seed as u8).collect()
}

pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(17, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).expect("digits"), 16);
    digits.map(|pair| byte(pair).expect("digits")).collect()
}

/// Waits until no other test runs: `Builder::build` changes the environment.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    watchdog::start(LIMIT);
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn build(provider: &str, thread: bool) -> Result<Libfabric> {
    let builder = Libfabric::builder().provider(provider).progress_thread(thread);
    // SAFETY: the caller has its turn, so that no other thread uses the environment. The tests
    // close regions without transfers in flight.
    unsafe { builder.build() }
}

/// Returns the providers with RDM endpoints of this release. `tcp` alone has them since 2.0. Returns
/// those over RDMA devices instead if the environment names a device.
pub(crate) fn providers() -> Result<Vec<&'static str>, Skipped> {
    sys::Functions::find().map_err(|error| Skipped(error.to_string()))?;
    if env::var_os("HMEM_VERBS_DEVICE").is_some() {
        return Ok(vec!["verbs;ofi_rxm"]);
    }
    let mut found = vec!["tcp;ofi_rxm", "shm"];
    match build("tcp", false) {
        Ok(_) => found.push("tcp"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}"),
    }
    Ok(found)
}

/// Returns the lines of the input, which a thread reads.
pub(crate) fn commands() -> mpsc::Receiver<String> {
    let (commands, input) = mpsc::channel();
    thread::spawn(move || {
        for line in stdin().lock().lines() {
            let Ok(line) = line else { return };
            if commands.send(line).is_err() {
                return;
            }
        }
    });
    input
}

/// A child process with its memory.
pub(crate) struct Target {
    pub(crate) process: Child,
    input: Option<ChildStdin>,
    output: mpsc::Receiver<String>,
    pub(crate) name: EndpointName,
    pub(crate) key: RemoteKey,
}

impl Target {
    pub(crate) fn start(provider: &str) -> Self {
        let mut process = Command::new(env::current_exe().expect("this test"))
            .env(CHILD, provider)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a child");
        let (input, output) = (process.stdin.take(), process.stdout.take().expect("a pipe"));
        let (lines, output_lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 0, 0);
        let name = EndpointName(Vec::new());
        let mut this = Self { process, input, output: output_lines, name, key };
        this.name = EndpointName(unhex(&this.line("name ")));
        this.key = RemoteKey::from_bytes(&unhex(&this.line("key "))).expect("a key");
        this
    }

    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.input.as_mut().expect("open"), "{command}").expect("the child reads");
    }

    /// Returns the rest of the next line, which begins with `start`.
    pub(crate) fn line(&self, start: &str) -> String {
        let line = self.output.recv_timeout(SOON).expect("a line of the child");
        line.strip_prefix(start).unwrap_or_else(|| panic!("{start}: {line}")).to_owned()
    }

    /// Returns the next line, and makes the initiator's progress while the child prepares it.
    pub(crate) fn line_while(&self, domain: &Domain, start: &str) -> String {
        let end = Instant::now() + SOON;
        loop {
            match self.output.try_recv() {
                Ok(line) => return line.strip_prefix(start).expect(&line).to_owned(),
                Err(_) => drop(domain.progress()),
            }
            assert!(Instant::now() < end, "the child printed no {start}");
            thread::yield_now();
        }
    }

    pub(crate) fn end(mut self) {
        self.input = None;
        assert!(self.process.wait().expect("wait").success());
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // A failed test leaves no child behind. A child that has ended cannot be killed.
        let _ended = self.process.kill().is_err();
        self.process.wait().expect("wait for the child");
    }
}
