//! DIAG-04 and P2P-03: the library logs through `tracing` and prints nothing.

use std::{
    fmt::Write,
    sync::{Arc, Mutex, PoisonError},
};

use hmem::{ErrorKind, MrFlags, fabric::MrAttr};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::{
    child,
    config::{TestConfig, over_configs},
    net::{Net, REMOTE, Setup, mr_attr},
};

over_configs! {
    /// DIAG-04
    each_registration_is_a_span_with_its_range_and_outcome: Pairwise;
}

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

fn each_registration_is_a_span_with_its_range_and_outcome(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(4096);
    let notes = Notes::default();
    // With a single subscriber in the process, tracing decides which events are enabled in the
    // thread that reaches them first. That may be the thread of another test. A second subscriber
    // prevents this.
    let _second = tracing::Dispatch::new(Notes::default());
    tracing::subscriber::with_default(notes.clone(), || {
        for offset in [0, 100] {
            let range = memory.part(offset, 1000);
            let region = net.expose(range, REMOTE);
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
        let error = net.try_expose(&attr, MrFlags::empty()).unwrap_err();
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
    use hmem::system::FreeDetection;

    use crate::config::Memory;
    let config =
        TestConfig { memory: Memory::Device(FreeDetection::Identity), ..TestConfig::PLAIN };
    let net = Net::open(&config);
    let memory = net.bytes(4096);
    net.device.as_ref().unwrap().set_exportable(memory.range().start(), false).unwrap();
    let notes = Notes::default();
    let _second = tracing::Dispatch::new(Notes::default());
    let region =
        tracing::subscriber::with_default(notes.clone(), || net.expose(memory.range(), REMOTE));
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
    use hmem::{Errno, loopback::NicCall, path::P2pPolicy, system::FreeDetection};

    use crate::config::Memory;
    let config = TestConfig {
        memory: Memory::Device(FreeDetection::Callback),
        policy: P2pPolicy::Preferred,
        ..TestConfig::PLAIN
    };
    let net = Setup::of(&config).open();
    let memory = net.bytes(4096);
    net.device.as_ref().unwrap().set_exportable(memory.range().start(), false).unwrap();
    let staged = net.expose(memory.range(), REMOTE);
    net.assert_works(&net.key(&staged));
    net.push(&net.key(&staged), 5000, &[1]).unwrap_err();
    net.faults.fail_nth(NicCall::Register, 1, Errno(12));
    let ranges = [memory.range()];
    let refused = net.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfResources);
    net.faults.fail_nth(NicCall::Deregister, 1, Errno(5));
    drop(staged);
    drop(hmem::Hmem::builder().build());
}

/// DIAG-04
#[test]
fn nothing_is_printed() {
    const NAME: &str = "diag::nothing_is_printed";
    if child::is_alone(NAME) {
        return provoke();
    }
    let output = child::output(NAME, &[("RUST_LOG", "trace")]);
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
