//! Tests of events and spans: the library logs through `tracing` and prints nothing (DIAG-04,
//! P2P-03).

use std::{
    env,
    fmt::Write,
    sync::{Arc, Mutex, PoisonError},
};

use hmem::{
    Errno, ErrorKind, Hmem, MrFlags, MrMode,
    fabric::MrAttr,
    loopback::{Faults, Loopback, NicCall},
};
use hmem_conformance::link::{REMOTE, mr_attr};
use link::{Memory, Opened};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

mod child;
mod link;

/// A tracing subscriber that records each span and each event as a line of text.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {field}={value:?}").expect("a String takes everything");
    }
}

impl Notes {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, line: Line) -> usize {
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        notes.push(line.0);
        notes.len()
    }
}

impl Subscriber for Notes {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("hmem")
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut line = Line(format!("span {}", attributes.metadata().name()));
        attributes.record(&mut line);
        span::Id::from_u64(self.add(line) as u64)
    }

    fn record(&self, _: &span::Id, values: &span::Record<'_>) {
        let mut line = Line("record".into());
        values.record(&mut line);
        self.add(line);
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("event {}", event.metadata().level()));
        event.record(&mut line);
        self.add(line);
    }

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// DIAG-04
#[test]
fn each_registration_is_a_span_with_its_range_and_outcome() {
    for memory in Memory::ALL {
        spans_of_registrations(memory);
    }
}

fn spans_of_registrations(memory: Memory) {
    let link = link::open(Loopback::builder(), MrMode::empty(), memory).link;
    let memory = link.bytes(4096);
    let notes = Notes::default();
    // With a single subscriber in the process, tracing decides which events are enabled in the
    // thread that reaches them first. That may be the thread of another test. A second subscriber
    // prevents this.
    let _second = tracing::Dispatch::new(Notes::default());
    tracing::subscriber::with_default(notes.clone(), || {
        for offset in [0, 100] {
            let range = memory.part(offset, 1000);
            let region = link.expose(range, REMOTE);
            let said = notes.take();
            let spans: Vec<_> =
                said.iter().filter(|line| line.starts_with("span register")).collect();
            assert_eq!(spans.len(), 1, "one registration is one span: {said:?}");
            assert!(spans[0].contains(&range.to_string()), "{} names its range", spans[0]);
            let path = region.decision().unwrap().path.name();
            assert!(said.iter().any(|line| line.contains(path)), "{said:?} names the path {path}");
            region.close().expect("close");
            notes.take();
        }
        let ranges = [memory.part(0, 64)];
        let attr = MrAttr { offset: 1, ..mr_attr(&ranges, REMOTE) };
        let error = link.try_expose(&attr, MrFlags::empty()).unwrap_err();
        let said = notes.take();
        assert!(
            said.iter().any(|line| line.contains(error.kind().text())),
            "{said:?} names the refusal"
        );
    });
}

/// P2P-03
#[test]
fn refused_path_is_logged_in_the_registration_span() {
    let opened = link::open(Loopback::builder(), MrMode::empty(), Memory::Device);
    let Opened { link, device } = &opened;
    let memory = link.bytes(4096);
    device.set_exportable(memory.range().start(), false).unwrap();
    let notes = Notes::default();
    let _second = tracing::Dispatch::new(Notes::default());
    let region =
        tracing::subscriber::with_default(notes.clone(), || link.expose(memory.range(), REMOTE));
    let said = notes.take();
    let at = |start: &str, part: &str| {
        let found = said.iter().position(|line| line.starts_with(start) && line.contains(part));
        found.unwrap_or_else(|| panic!("no {start:?} with {part:?} in {said:?}"))
    };
    let refused = at("event DEBUG", "path refused");
    assert!(at("span register", "range=") < at("span path", "policy=enabled"));
    assert!(at("span path", "nic=loopback/") < refused);
    let attempt = &region.decision().unwrap().attempts[0];
    for part in [
        "path=dma-buf",
        &attempt.call,
        &attempt.error.as_ref().unwrap().to_string(),
        attempt.cause.as_ref().unwrap(),
        attempt.remedy.as_ref().unwrap(),
    ] {
        assert!(said[refused].contains(part), "{part:?} in {}", said[refused]);
    }
}

/// Causes events that the library logs: a refused path, a fallback, a failed registration and a
/// leak.
fn provoke() {
    let faults = Faults::new();
    let nic = Loopback::builder().faults(&faults);
    let Opened { link, device } = link::open(nic, MrMode::empty(), Memory::Device);
    let memory = link.bytes(4096);
    device.set_exportable(memory.range().start(), false).unwrap();
    let staged = link.expose(memory.range(), REMOTE);
    link.assert_works(&link.key(&staged));
    link.push(&link.key(&staged), 5000, &[1]).unwrap_err();
    faults.fail_nth(NicCall::Register, 1, Errno(12));
    let ranges = [memory.range()];
    let refused = link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfResources);
    faults.fail_nth(NicCall::Deregister, 1, Errno(5));
    drop(staged);
    drop(Hmem::builder().build());
}

/// DIAG-04
#[test]
fn nothing_is_printed() {
    const NAME: &str = "nothing_is_printed";
    if env::var_os("HMEM_TEST_PROVOKE").is_some() {
        return provoke();
    }
    let mut command = child::command(NAME);
    command.envs([("RUST_LOG", "trace"), ("HMEM_TEST_PROVOKE", "1")]);
    let output = command.output().expect("the test runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "printed to standard error");
    // The harness prints the name before the test and the outcome after it, in one line. Output of
    // the library would come between them.
    let outcome = format!("test {NAME} ... ok");
    for line in printed.lines().filter(|line| !line.is_empty()) {
        let is_of_harness = line == "running 1 test"
            || line == outcome
            || line.starts_with("test result: ok. 1 passed");
        assert!(is_of_harness, "printed {line:?}");
    }
}
