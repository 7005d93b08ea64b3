//! The counts of a domain, published through the crate `metrics`, and a recorder that keeps them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use hmem::{
    Access, DomainAttr, Errno, Hmem, MetricsPublisher,
    loopback::{Faults, Loopback, NicCall},
};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

type Values = Arc<Mutex<BTreeMap<String, f64>>>;

/// A recorder that keeps the value of each metric: of a histogram, the number of its values.
#[derive(Default)]
struct Kept(Values);

struct Value(String, Values);

impl Value {
    fn of(key: &Key, kept: &Kept) -> Arc<Self> {
        let labels = key.labels().map(|label| format!(",{}={}", label.key(), label.value()));
        let name = format!("{}{}", key.name(), labels.collect::<String>());
        Arc::new(Self(name, Arc::clone(&kept.0)))
    }

    fn update(&self, change: impl FnOnce(f64) -> f64) {
        let mut values = self.1.lock().expect("no panic");
        let value = values.entry(self.0.clone()).or_default();
        *value = change(*value);
    }
}

impl CounterFn for Value {
    fn increment(&self, value: u64) {
        self.update(|before| before + value as f64);
    }
    fn absolute(&self, value: u64) {
        self.update(|_| value as f64);
    }
}

impl GaugeFn for Value {
    fn increment(&self, value: f64) {
        self.update(|before| before + value);
    }
    fn decrement(&self, value: f64) {
        self.update(|before| before - value);
    }
    fn set(&self, value: f64) {
        self.update(|_| value);
    }
}

impl HistogramFn for Value {
    fn record(&self, value: f64) {
        assert!(value.is_finite());
        self.update(|before| before + 1.0);
    }
}

impl Recorder for Kept {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Value::of(key, self))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Value::of(key, self))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Value::of(key, self))
    }
}

/// LIFE-12
#[test]
fn published_values_are_the_counts_of_the_domain_after_each_publication() {
    let faults = Faults::new();
    let nic = Loopback::builder().nic("loop0").faults(&faults).build().expect("a fabric");
    let hmem = Hmem::builder().without_vendor_ifaces().build().expect("host memory");
    let attr = DomainAttr { registration_latency: true, ..DomainAttr::default() };
    let domain = hmem.domain_on(&nic, attr).expect("a domain");
    let recorder = Kept::default();
    let mut publisher = MetricsPublisher::new("test");
    let mut publish = || {
        metrics::with_local_recorder(&recorder, || publisher.publish(&domain));
        let values = recorder.0.lock().expect("no panic").clone();
        move |name: &str| values.get(name).copied()
    };
    let labelled = |name: &str, more: &str| format!("{name},domain=test,nic=loopback/loop0{more}");
    let register = |len| domain.register(vec![0_u8; len], Access::REMOTE_READ);
    let kept = register(100).expect("registered");
    for publication in 1..=3_u32 {
        drop(register(28).expect("registered"));
        faults.fail_nth(NicCall::Register, 1, Errno(14));
        register(8).expect_err("refused");
        let value = publish();
        let (registered, refused) = (f64::from(publication + 1), f64::from(publication));
        let host = ",path=plain-host";
        let count = |name, more| value(&labelled(name, more));
        assert_eq!(count("hmem_registrations_total", host), Some(registered));
        assert_eq!(count("hmem_registered_bytes_total", host), Some(100.0 + 28.0 * refused));
        assert_eq!(count("hmem_registrations_total", ",path=staged"), Some(0.0));
        let bad_pages = ",kind=address not reachable,cause=bad-host-pages";
        assert_eq!(count("hmem_refusals_total", bad_pages), Some(refused));
        assert_eq!(count("hmem_registration_seconds", ""), Some(registered), "each value once");
        assert_eq!(count("hmem_regions", ""), Some(1.0));
        assert_eq!(count("hmem_cache_hits_total", ""), None, "no cache");
    }
    drop(kept);
    assert_eq!(publish()(&labelled("hmem_regions", "")), Some(0.0));
}
