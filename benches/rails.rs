//! Bandwidth of striped writes over two software NICs, against the same writes over one of them.
//!
//! Both NICs have a limited bandwidth, and each executes its requests on a thread of its own. The
//! measurements of one and of two NICs alternate. Their medians are printed with the ratio.

#![allow(missing_docs, reason = "a bench is a program")]

use std::time::{Duration, Instant};

use hmem::{
    Access, Domain, DomainAttr, Hmem, MrMode, RailEndpoint, RailTransfer, RoamingRegion, Stripe,
    key_feed::PeerKeys,
    loopback::{Loopback, Progress},
};

/// Bytes per second of each NIC.
const BANDWIDTH: u64 = 100_000_000;
const LEN: u64 = 64 << 20;
const CHUNK: u64 = 1 << 20;
const ROUNDS: usize = 7;
/// The least ratio that is good enough.
const GOAL: f64 = 1.9;

/// The NICs of the initiator and of the target, one of each for a rail.
const RAILS: [[&str; 2]; 2] = [["near0", "far0"], ["near1", "far1"]];

/// Striped writes over the first NICs of [`RAILS`].
struct Striped {
    /// Dropped before the domains, as are the regions.
    rails: RailEndpoint,
    _targets: RailEndpoint,
    local: RoamingRegion<Vec<u8>>,
    remote: RoamingRegion<Vec<u8>>,
    peer: PeerKeys,
    _domains: Vec<Domain>,
}

impl Striped {
    fn new(hmem: &Hmem, rails: usize) -> Self {
        let names = RAILS.into_iter().take(rails).flatten();
        let domains: Vec<_> = names.map(|nic| open(hmem, nic)).collect();
        let memory = |domain: &Domain, byte| {
            let region = domain.register(vec![byte; LEN as usize], Access::all());
            RoamingRegion::new(region.expect("register")).map_err(|it| it.error).expect("publish")
        };
        let (mut local, mut remote) = (memory(&domains[0], 1), memory(&domains[1], 0));
        let stripe = Stripe::chunks(CHUNK);
        let (mut near, mut far) = (RailEndpoint::new(stripe.clone()), RailEndpoint::new(stripe));
        for (pair, [near_nic, far_nic]) in domains.chunks(2).zip(RAILS) {
            local.add(&pair[0]).expect("register");
            remote.add(&pair[1]).expect("register");
            near.open(&pair[0]).expect("open");
            let name = far.open(&pair[1]).expect("open");
            near.connect(near_nic, far_nic, &name).expect("connect");
        }
        let mut peer = PeerKeys::default();
        let keys = remote.feed().subscribe().next().expect("keys");
        peer.apply(&keys).expect("apply");
        Self { rails: near, _targets: far, local, remote, peer, _domains: domains }
    }

    /// Writes the whole memory, and returns the bandwidth in bytes per second.
    fn write(&mut self) -> f64 {
        let transfer = RailTransfer {
            local: &self.local,
            local_offset: 0,
            remote: &self.peer,
            remote_offsets: 0..LEN,
            generation: self.peer.generation(),
        };
        let start = Instant::now();
        self.rails.write(&transfer, 0).expect("start");
        let mut done = Vec::new();
        self.rails.wait(&mut done, Duration::MAX);
        assert_eq!(done.remove(0).result.expect("the write"), LEN);
        LEN as f64 / start.elapsed().as_secs_f64()
    }
}

fn open(hmem: &Hmem, nic: &str) -> Domain {
    let (nic, mr_mode) = (Some(nic.into()), MrMode::empty());
    hmem.domain("loopback", DomainAttr { nic, mr_mode, ..DomainAttr::default() }).expect("a domain")
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() {
    let mut nics = Loopback::builder().progress(Progress::Thread).bandwidth(BANDWIDTH);
    for nic in RAILS.into_iter().flatten() {
        nics = nics.nic(nic);
    }
    let nics = nics.build().expect("software NICs");
    let hmem = Hmem::builder().without_vendor_ifaces().provider(nics).build().expect("build");
    let mut striped = [1, 2].map(|rails| Striped::new(&hmem, rails));
    let mut figures = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (striped, figures) in striped.iter_mut().zip(&mut figures) {
            figures.push(striped.write());
        }
    }
    for striped in &striped {
        let mut bytes = vec![0; LEN as usize];
        striped.remote.region().expect("a region").read(0, &mut bytes).expect("read");
        assert!(bytes.iter().all(|byte| *byte == 1), "all bytes were written");
    }
    let [one, two] = figures.map(median);
    let ratio = two / one;
    println!(
        "striped write of {} MiB, chunks of {} KiB, NICs of {} MB/s: one {:.0} MB/s, two {:.0} \
         MB/s, ratio {ratio:.2} (goal {GOAL} at least){}",
        LEN >> 20,
        CHUNK >> 10,
        BANDWIDTH / 1_000_000,
        one / 1e6,
        two / 1e6,
        if ratio < GOAL { "  under" } else { "" }
    );
}
