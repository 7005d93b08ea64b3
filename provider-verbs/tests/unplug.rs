//! A real device that loses its link, is deleted, and comes back. The tests delete and add the
//! devices that `HMEM_VERBS_DEVICE` and `HMEM_VERBS_SECOND_DEVICE` name, so they run only if
//! `HMEM_VERBS_UNPLUG` is set, as in the VM tier. The devices must be of rdma_rxe.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Domain, Error, ErrorKind, RailEndpoint, RailState, RailTransfer, RoamingRegion, Stripe,
    key_feed::{KeySubscription, PeerKeys},
    provider::{NicEvent, NicState, Provider},
    transfer::{Completion, Operation},
};
use hmem_provider_verbs::Verbs;
use support::{LOCAL, Pages, REMOTE, Side, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    /// LIFE-08
    port_that_goes_down_is_a_state_and_comes_up_again,
    /// LIFE-08
    deleted_link_ends_a_load_and_leaks_nothing,
    /// LIFE-09
    memory_moves_to_another_device_and_back,
    /// LIFE-10
    striped_load_survives_a_deleted_link_and_takes_it_back,
    /// LIFE-08 and LIFE-09
    removed_module_is_a_typed_error_until_it_is_back,
}

/// Longer than any step takes: rdma_rxe resends for seconds before it reports that a peer is gone.
const BOUND: Duration = Duration::from_secs(60);

/// The two devices, and the use of the process's resources before a test.
struct Bench {
    names: [String; 2],
    before: Usage,
    _alone: MutexGuard<'static, ()>,
}

/// Numbers of file descriptors of the process, and of kilobytes that it has pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    fds: usize,
    pinned: u64,
}

impl Usage {
    fn now() -> Self {
        let fds = fs::read_dir("/proc/self/fd").expect("list the fds").count();
        let status = fs::read_to_string("/proc/self/status").expect("the process's status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("VmPin");
        let pinned = line.trim().trim_end_matches(" kB").parse().expect("a number");
        Self { fds, pinned }
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status();
    assert!(status.expect(program).success(), "{program} {arguments:?}");
}

fn netdev_of(index: usize) -> String {
    format!("dum{index}")
}

/// Takes a netdev down. Dropping the value takes it up, also after a failure of the test.
struct NetdevDown {
    netdev: String,
}

impl NetdevDown {
    fn new(index: usize) -> Self {
        let down = Self { netdev: netdev_of(index) };
        run("ip", &["link", "set", &down.netdev, "down"]);
        down
    }
}

impl Drop for NetdevDown {
    fn drop(&mut self) {
        run("ip", &["link", "set", &self.netdev, "up"]);
    }
}

impl Bench {
    fn new() -> Result<Self, Skipped> {
        let first = device()?;
        if std::env::var_os("HMEM_VERBS_UNPLUG").is_none() {
            return Err(Skipped(format!("HMEM_VERBS_UNPLUG does not allow to delete {first}")));
        }
        let second = std::env::var("HMEM_VERBS_SECOND_DEVICE").expect("a second device");
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Self { names: [first, second], before: Usage::now(), _alone: alone })
    }

    fn add(&self, index: usize) {
        let (name, netdev) = (&self.names[index], netdev_of(index));
        run("rdma", &["link", "add", name, "type", "rxe", "netdev", &netdev]);
    }

    /// Starts to delete a device. The program ends once all users have closed the device.
    fn start_to_delete(&self, index: usize) -> Child {
        Command::new("rdma").args(["link", "delete", &self.names[index]]).spawn().expect("rdma")
    }

    /// Returns connected sides on one device. The guest's two devices do not reach each other.
    fn pair(&self, verbs: &Verbs, index: usize) -> (Side, Side) {
        let (near, far) = (self.side(verbs, index), self.side(verbs, index));
        connect(&near, &far);
        (near, far)
    }

    fn side(&self, verbs: &Verbs, index: usize) -> Side {
        Side::new(self.open(verbs, index))
    }

    fn open(&self, verbs: &Verbs, index: usize) -> Domain {
        support::open(verbs, &self.names[index])
    }

    /// Asserts that the process has as many fds and pinned bytes as before the test.
    fn assert_nothing_is_left(&self) {
        assert_eq!(Usage::now(), self.before, "resources are left");
    }
}

fn connect(near: &Side, far: &Side) {
    let (own, peer) = (near.endpoint.name(), far.endpoint.name());
    near.connect(&peer).expect("connect the near side");
    far.connect(&own).expect("connect the far side");
}

fn within_bound(what: &str, mut ready: impl FnMut() -> bool) {
    let until = Instant::now() + BOUND;
    while !ready() {
        assert!(Instant::now() < until, "{what}: not within {BOUND:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn wait_for_end(mut child: Child) {
    within_bound("the end of the deletion", || {
        let ended = child.try_wait().expect("wait");
        assert!(ended.is_none_or(|status| status.success()), "rdma link delete failed");
        ended.is_some()
    });
}

fn assert_lost(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
    assert!(error.context_value("cause").is_some() && error.remedy_text().is_some(), "{error:#}");
}

fn port_that_goes_down_is_a_state_and_comes_up_again() -> Outcome {
    let bench = Bench::new()?;
    {
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let (near, far) = bench.pair(&verbs, 0);
        let (from, to) = (Pages::new(4096), Pages::new(4096));
        let bytes = from.fill(3);
        let local = near.register(from.range(), LOCAL).expect("register");
        let region = far.register(to.range(), REMOTE).expect("register");
        let key = region.key().expect("key");
        let source = || segment(from.range(), local.desc().expect("desc"));
        near.write(source(), remote(&key, 0, 4096)).expect("write");
        assert_eq!(near.domain.nic_state(), NicState::Working);
        let netdev = NetdevDown::new(0);
        within_bound("the event", || near.domain.nic_state() == NicState::PortDown);
        let started = Instant::now();
        // rdma_rxe delivers requests to its own device without the network, so they may succeed.
        if let Err(error) = near.write(source(), remote(&key, 0, 4096)) {
            let kinds = [ErrorKind::Unreachable, ErrorKind::Canceled];
            assert!(kinds.contains(&error.kind()), "{error:#}");
        }
        assert!(started.elapsed() < BOUND, "{:?}", started.elapsed());
        drop(netdev);
        within_bound("the event", || near.domain.nic_state() == NicState::Working);
        let events = near.domain.nic_events();
        let at = |wanted| events.iter().position(|event| *event == wanted).expect("the event");
        assert!(at(NicEvent::PortDown(1)) < at(NicEvent::PortUp(1)), "{events:?}");
        connect(&near, &far);
        to.put(0, &[0; 4096]);
        near.write(source(), remote(&key, 0, 4096)).expect("write again");
        assert!(to.get(0, 4096) == bytes, "the bytes of the write");
    }
    bench.assert_nothing_is_left();
    Ok(())
}

/// Writes from one side to another until a call or a request fails. Returns the first error.
fn load((near, far): (&Side, &Side), writes: &AtomicU64) -> Error {
    let (from, to) = (Pages::new(64 << 10), Pages::new(64 << 10));
    let bytes = from.fill(9);
    let local = near.register(from.range(), LOCAL).expect("register");
    let region = far.register(to.range(), REMOTE).expect("register");
    let key = region.key().expect("key");
    loop {
        let source = segment(from.range(), local.desc().expect("desc"));
        let write = Operation::Write { remote: &[remote(&key, 0, 64 << 10)] };
        let mut done = Vec::new();
        let posted = near.post(write, &[source], 7);
        let ended = posted.and_then(|()| near.cq.wait(&mut done, 1, BOUND));
        let error = match (ended, done.pop()) {
            (Err(error), _) => error,
            (Ok(_), None) => panic!("a write did not end within {BOUND:?}"),
            (Ok(_), Some(Completion { result: Err(error), .. })) => error,
            (Ok(_), Some(_)) => {
                writes.fetch_add(1, Ordering::Relaxed);
                continue;
            }
        };
        let written = writes.load(Ordering::Relaxed) > 0;
        assert!(!written || to.get(0, 64 << 10) == bytes, "the bytes of the writes that ended");
        return error;
    }
}

fn deleted_link_ends_a_load_and_leaks_nothing() -> Outcome {
    let bench = Bench::new()?;
    let deletion;
    {
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let (near, far) = bench.pair(&verbs, 0);
        // A receive that no message will arrive for.
        let idle = bench.side(&verbs, 0);
        let inbox = idle.domain.register(vec![0; 64], LOCAL).expect("register");
        let pending = [inbox.slice(0, 64).expect("inside")];
        idle.endpoint.receive(&pending, None, 77).expect("post a receive");
        let (writes, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        deletion = thread::scope(|scope| {
            let load = scope.spawn(|| {
                let error = load((&near, &far), &writes);
                ended.store(true, Ordering::Release);
                error
            });
            within_bound("the load", || writes.load(Ordering::Relaxed) > 3);
            let deletion = bench.start_to_delete(0);
            within_bound("the loss", || near.domain.nic_state() == NicState::Lost);
            within_bound("the end of the load", || ended.load(Ordering::Acquire));
            assert_lost(&load.join().expect("no panic"));
            deletion
        });
        let mut done: Vec<Completion> = Vec::new();
        while done.is_empty() {
            idle.cq.wait(&mut done, 8, BOUND).expect("the receive ends");
        }
        assert_eq!(done[0].context, 77);
        assert_lost(done[0].result.as_ref().expect_err("lost"));
        assert_lost(&idle.cq.wait(&mut done, 8, Duration::MAX).expect_err("an empty queue"));
        let refused = near.domain.register(vec![0; 64], LOCAL).expect_err("lost");
        assert_lost(&refused.error);
        let other = bench.open(&verbs, 1);
        assert_eq!(other.nic_state(), NicState::Working, "the other device is not affected");
        inbox.close().expect("close a region");
    }
    // The kernel deletes the device once every object and every fd of it is closed.
    wait_for_end(deletion);
    bench.assert_nothing_is_left();
    bench.add(0);
    Ok(())
}

fn memory_moves_to_another_device_and_back() -> Outcome {
    let bench = Bench::new()?;
    {
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let (near, far) = bench.pair(&verbs, 1);
        let lost = bench.open(&verbs, 0);
        let region = lost.register(vec![1; 4096], Access::all()).expect("register");
        let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
        let (mut subscription, mut peer) = (region.feed().subscribe(), PeerKeys::default());
        peer.apply(&subscription.next().expect("generation 1")).expect("apply");
        let deletion = bench.start_to_delete(0);
        within_bound("the loss", || lost.nic_state() == NicState::Lost);
        assert_lost(&region.reopen(&lost).expect_err("the lost domain"));
        assert_eq!(region.reopen(&far.domain).expect("on the other device"), 2);
        lost.close().expect("close the lost domain");
        drop(verbs.nics().expect("the provider closes its context of the lost device"));
        wait_for_end(deletion);
        let from = Pages::new(64);
        let bytes = from.fill(5);
        let local = near.register(from.range(), LOCAL).expect("register");
        let write = |peer: &PeerKeys, nic: &str, generation| {
            let segments = peer.segments(nic, 0..64, generation).expect("the key");
            let source = segment(from.range(), local.desc().expect("desc"));
            near.write(source, segments[0]).expect("write");
        };
        peer.apply(&subscription.next().expect("generation 2")).expect("apply");
        write(&peer, &bench.names[1], 2);
        bench.add(0);
        let back = bench.open(&verbs, 0);
        assert_eq!(region.reopen(&back).expect("on the first device again"), 3);
        peer.apply(&subscription.next().expect("generation 3")).expect("apply");
        assert!(peer.segments(&bench.names[1], 0..64, 3).is_err(), "the other device has no key");
        assert!(peer.segments(&bench.names[0], 0..64, 3).is_ok());
        let memory = region.close().map_err(|it| it.error).expect("close");
        assert_eq!((&memory[..64], &memory[64..]), (&bytes[..], &[1; 4032][..]));
        back.close().expect("close");
    }
    bench.assert_nothing_is_left();
    Ok(())
}

/// Two memories, on both devices, and transfers between them over one rail for each device.
struct Striped {
    rails: RailEndpoint,
    targets: RailEndpoint,
    local: RoamingRegion<Vec<u8>>,
    remote: RoamingRegion<Vec<u8>>,
    updates: KeySubscription,
    keys: PeerKeys,
}

const STRIPED: usize = 256 << 10;

impl Striped {
    fn new(domains: [&Domain; 2]) -> Self {
        let memory = || {
            let region = domains[0].register(vec![0; STRIPED], Access::all()).expect("register");
            RoamingRegion::new(region).map_err(|it| it.error).expect("publish")
        };
        let (local, remote) = (memory(), memory());
        let stripe = Stripe::chunks(16 << 10).depth(4);
        let (rails, targets) = (RailEndpoint::new(stripe.clone()), RailEndpoint::new(stripe));
        let (updates, keys) = (remote.feed().subscribe(), PeerKeys::default());
        let mut striped = Self { rails, targets, local, remote, updates, keys };
        domains.into_iter().for_each(|domain| striped.open(domain));
        striped
    }

    fn open(&mut self, domain: &Domain) {
        let nic = &domain.provider_attr().nic.name;
        self.local.add(domain).expect("register");
        self.remote.add(domain).expect("register");
        self.keys.apply(&self.updates.next().expect("keys")).expect("apply");
        let (from, to) = (self.rails.open(domain), self.targets.open(domain));
        self.rails.connect(nic, nic, &to.expect("open")).expect("connect");
        self.targets.connect(nic, nic, &from.expect("open")).expect("connect");
    }

    fn remove(&mut self, nic: &str) {
        self.rails.remove(nic).expect("remove");
        self.targets.remove(nic).expect("remove");
        self.local.remove(nic).expect("remove");
        self.remote.remove(nic).expect("remove");
        self.keys.apply(&self.updates.next().expect("keys")).expect("apply");
    }

    /// Writes the whole memory, and checks every byte. Calls `meanwhile` after the start.
    fn write(&mut self, seed: usize, meanwhile: impl FnOnce()) {
        let bytes: Vec<_> = (0..STRIPED).map(|at| (at / 7 + at / 256 + seed) as u8).collect();
        self.local.region().expect("registered").write(0, &bytes).expect("write");
        let transfer = RailTransfer {
            local: &self.local,
            local_offset: 0,
            remote: &self.keys,
            remote_offsets: 0..STRIPED as u64,
            generation: self.keys.generation(),
        };
        self.rails.write(&transfer, 7).expect("start");
        meanwhile();
        let mut done = Vec::new();
        assert_eq!(self.rails.wait(&mut done, BOUND), 1, "the transfer ends");
        assert_eq!(done.remove(0).result.expect("success"), STRIPED as u64);
        let mut seen = vec![0; STRIPED];
        self.remote.region().expect("registered").read(0, &mut seen).expect("read");
        assert!(seen == bytes, "write {seed}");
    }

    /// Returns the state of a rail, and the bytes that it has moved.
    fn rail(&self, nic: &str) -> (RailState, u64) {
        let rail = self.rails.rails().find(|rail| rail.nic.name == nic).expect("a rail");
        (rail.state.clone(), rail.bytes)
    }
}

fn striped_load_survives_a_deleted_link_and_takes_it_back() -> Outcome {
    let bench = Bench::new()?;
    {
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let (lost, other) = (bench.open(&verbs, 0), bench.open(&verbs, 1));
        let mut striped = Striped::new([&lost, &other]);
        let [name, other_name] = &bench.names;
        (0..3).for_each(|seed| striped.write(seed, || {}));
        assert!(striped.rail(name).1 >= STRIPED as u64 && striped.rail(other_name).1 > 0);
        let deletion = bench.start_to_delete(0);
        let mut seed = 3;
        within_bound("the loss", || {
            // rdma_rxe goes on with the device until its users close it. The event says that it is
            // lost.
            striped.write(seed, || {
                let _state = lost.nic_state();
            });
            seed += 1;
            matches!(striped.rail(name).0, RailState::Failed(_))
        });
        let RailState::Failed(error) = striped.rail(name).0 else { panic!("the rail works") };
        assert_lost(&error);
        striped.write(seed, || {});
        striped.remove(name);
        lost.close().expect("close the lost domain");
        drop(verbs.nics().expect("the provider closes its context of the lost device"));
        wait_for_end(deletion);
        striped.write(seed + 1, || {});
        bench.add(0);
        let back = bench.open(&verbs, 0);
        striped.open(&back);
        striped.write(seed + 2, || {});
        let (state, bytes) = striped.rail(name);
        assert!(matches!(state, RailState::Working) && bytes == STRIPED as u64 / 2, "{bytes}");
        drop(striped);
        back.close().expect("close");
        other.close().expect("close");
    }
    bench.assert_nothing_is_left();
    Ok(())
}

/// Returns the file of the module rdma_rxe.
fn module() -> PathBuf {
    let files = fs::read_dir("/modules").expect("the guest's modules");
    let paths = files.map(|entry| entry.expect("a file").path());
    let is_rxe = |path: &PathBuf| path.to_string_lossy().ends_with("rdma_rxe.ko");
    paths.filter(is_rxe).last().expect("the module rdma_rxe")
}

fn removed_module_is_a_typed_error_until_it_is_back() -> Outcome {
    let bench = Bench::new()?;
    {
        let verbs = Verbs::builder().build().expect("load libibverbs");
        let lost = bench.open(&verbs, 0);
        let region = lost.register(vec![1; 4096], Access::all()).expect("register");
        let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
        let (mut subscription, mut peer) = (region.feed().subscribe(), PeerKeys::default());
        peer.apply(&subscription.next().expect("generation 1")).expect("apply");
        // The kernel does not remove a module in use.
        let deletions = [0, 1].map(|index| bench.start_to_delete(index));
        within_bound("the loss", || lost.nic_state() == NicState::Lost);
        assert_eq!(region.withdraw().expect("withdraw"), 2);
        lost.close().expect("close the lost domain");
        // The provider closes its contexts of lost devices, the second one too.
        within_bound("no device", || verbs.nics().is_err());
        deletions.into_iter().for_each(wait_for_end);
        run("rmmod", &["rdma_rxe"]);
        let error = verbs.nics().expect_err("no device");
        assert!(error.is_unavailable() && error.remedy_text().is_some(), "{error:#}");
        run("insmod", &[module().to_str().expect("UTF-8")]);
        [0, 1].into_iter().for_each(|index| bench.add(index));
        let back = bench.open(&verbs, 0);
        assert_eq!(region.reopen(&back).expect("register again"), 3);
        let applied = peer.apply(&subscription.next().expect("generation 3")).expect("apply");
        assert_eq!((applied.generation, applied.missed), (3, 1));
        assert_eq!(region.close().map_err(|it| it.error).expect("close"), vec![1; 4096]);
        back.close().expect("close");
    }
    bench.assert_nothing_is_left();
    Ok(())
}
