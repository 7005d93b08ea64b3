//! Tests of the loopback NIC's memory windows.

use std::{collections::HashSet, os::unix::process::ExitStatusExt};

use crate::support::*;
use hmem_core::{
    Access, Address, AddressRange, Addressing, ErrorKind, Iova, MrMode, RemoteKey, Result,
    provider::{ProviderRegion, ProviderWindow, WindowBind, WindowType},
    transfer::{Operation, PeerId},
};
use hmem_provider_loopback::{Faults, Loopback, NicCall};

const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;

struct Scene {
    pair: Pair,
    target: Buffer,
    region: ProviderRegion,
}

/// Returns a [`Scene`] for each combination of key size and mode. The NIC may write the scene's
/// region of 256 bytes, and peers have no rights to the region.
fn scenes() -> impl Iterator<Item = Scene> {
    [(8, MrMode::empty()), (8, MrMode::PROV_KEY), (4, MrMode::PROV_KEY), (4, MrMode::empty())]
        .into_iter()
        .map(|(size, mode)| {
            Scene::new(Pair::new(Loopback::builder().key_size(size).build().unwrap(), mode))
        })
}

impl Scene {
    fn new(pair: Pair) -> Self {
        let target = Buffer::new(256);
        let region = RegAttr::key(1)
            .access(Access::RECV | Access::MW_BIND)
            .register(&*pair.there.domain, &[host(target.range(), true)])
            .unwrap();
        Self { pair, target, region }
    }

    /// Returns a scene whose NIC's calls the faults count and hold.
    fn with_faults() -> (Self, Faults) {
        let faults = Faults::new();
        let provider = Loopback::builder().faults(&faults).build().unwrap();
        (Self::new(Pair::new(provider, MrMode::empty())), faults)
    }

    fn bind(
        &self,
        window: ProviderWindow,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<ProviderWindow> {
        let addressing = Addressing::Virtual;
        let bind = WindowBind { region: self.region, offset, len, access, addressing };
        self.pair.there.domain.windows().unwrap().bind_window(window, &bind)
    }

    fn post_bind(
        &self,
        through: &End,
        window: ProviderWindow,
        len: u64,
        addressing: Addressing,
        tag: u8,
    ) -> Result<u64> {
        let (region, offset, access) = (self.region, 64, READ | WRITE);
        let bind = WindowBind { region, offset, len, access, addressing };
        let operation = Operation::BindWindow { window, bind, tag };
        through.run(operation, &[], PeerId(0)).map(|_| window.key & !0xff | u64::from(tag))
    }

    fn virtual_key(&self, key: u64, offset: u64, len: u64) -> RemoteKey {
        RemoteKey::new(Addressing::Virtual, Iova(self.target.address().0 + offset), len, key)
    }

    fn write(&self, key: &RemoteKey, at: u64, len: usize) -> Result<u64> {
        let source = Buffer::filled(len, 3);
        self.pair.here.write(self.pair.to, &[source.whole()], key, at)
    }

    fn read(&self, key: &RemoteKey, at: u64, len: usize) -> Result<u64> {
        let sink = Buffer::new(len);
        self.pair.here.read(self.pair.to, &[sink.whole()], key, at)
    }
}

/// MW-01
#[test]
fn type_1_bind_changes_the_tag_and_ends_the_old_key() {
    for scene in scenes() {
        let window =
            scene.pair.there.domain.windows().unwrap().alloc_window(WindowType::One).unwrap();
        let base = scene.target.address().0;
        let mut window = scene.bind(window, 64, 64, READ | WRITE).unwrap();
        // Keys of 4 bytes repeat after 256 binds.
        let is_narrow = window.key <= u64::from(u32::MAX);
        let mut seen = HashSet::from([window.key]);
        for _ in 0..600 {
            let old = scene.virtual_key(window.key, 64, 64);
            scene.write(&old, base + 64, 8).unwrap();
            let turned = scene.bind(window, 64, 64, READ | WRITE).unwrap();
            assert_ne!(turned.key, window.key);
            assert!(seen.insert(turned.key) || is_narrow);
            refused(scene.write(&old, base + 64, 8), ErrorKind::InvalidKey);
            window = turned;
        }
        let unbound = scene.bind(window, 0, 0, Access::empty()).unwrap();
        for key in [window.key, unbound.key] {
            refused(
                scene.read(&scene.virtual_key(key, 64, 64), base + 64, 1),
                ErrorKind::InvalidKey,
            );
        }
        let zero = WindowBind {
            region: scene.region,
            offset: 0,
            len: 8,
            access: READ,
            addressing: Addressing::ZeroBased,
        };
        refused(
            scene.pair.there.domain.windows().unwrap().bind_window(unbound, &zero),
            ErrorKind::InvalidArgument,
        );
        let there = &scene.pair.there;
        let invalidate = Operation::InvalidateWindow { window: unbound };
        refused(there.run(invalidate, &[], PeerId(0)), ErrorKind::BadState);
        refused(scene.post_bind(there, unbound, 8, Addressing::Virtual, 1), ErrorKind::BadState);
        there.domain.windows().unwrap().free_window(unbound).unwrap();
        refused(there.domain.windows().unwrap().free_window(unbound), ErrorKind::InvalidArgument);
        let foreign = scene.pair.here.domain.windows().unwrap();
        let two = there.domain.windows().unwrap().alloc_window(WindowType::TwoA).unwrap();
        refused(scene.bind(two, 0, 8, READ), ErrorKind::BadState);
        refused(foreign.free_window(two), ErrorKind::InvalidArgument);
        there.domain.windows().unwrap().free_window(two).unwrap();
        there.domain.deregister(scene.region).unwrap();
        assert_eq!(there.domain.live().windows, 0);
    }
}

/// MW-04
///
/// A window that is invalidated and bound again keeps its new key, although a message that
/// invalidates the old key is in flight.
#[test]
fn window_bound_again_during_a_message_keeps_its_new_key() {
    let (scene, faults) = Scene::with_faults();
    let (here, there) = (&scene.pair.here, &scene.pair.there);
    let window = there.domain.windows().unwrap().alloc_window(WindowType::TwoB).unwrap();
    let bind = |tag| scene.post_bind(there, window, 64, Addressing::ZeroBased, tag).unwrap();
    let key = |number| RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, number);
    let old = key(bind(1));
    let message = Buffer::filled(4, 1);
    let new = std::thread::scope(|scope| {
        let gate = faults.hold(NicCall::Transfer);
        let sending = scope.spawn(|| {
            let send = Operation::Send { tag: None, invalidate: Some(&old) };
            here.run(send, &[message.whole()], scene.pair.to)
        });
        gate.wait_held();
        there.run(Operation::InvalidateWindow { window }, &[], PeerId(0)).unwrap();
        let new = key(bind(2));
        gate.release();
        assert_eq!(sending.join().unwrap().unwrap(), 4);
        new
    });
    refused(scene.write(&old, 0, 8), ErrorKind::InvalidKey);
    scene.write(&new, 0, 8).unwrap();
}

/// MW-03
#[test]
fn window_is_invalidated_through_its_own_endpoint_only() {
    for kind in [WindowType::TwoA, WindowType::TwoB] {
        let scene = Scene::new(Pair::new(Loopback::builder().build().unwrap(), MrMode::empty()));
        let there = &scene.pair.there;
        let other = End::open(&there.domain);
        let window = there.domain.windows().unwrap().alloc_window(kind).unwrap();
        let key = scene.post_bind(there, window, 64, Addressing::ZeroBased, 1).unwrap();
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, key);
        let invalidate =
            |end: &End| end.run(Operation::InvalidateWindow { window }, &[], PeerId(0));
        refused(invalidate(&other), ErrorKind::AccessDenied);
        scene.write(&key, 0, 8).unwrap();
        invalidate(there).unwrap();
        refused(scene.write(&key, 0, 8), ErrorKind::InvalidKey);
    }
}

/// MW-03
///
/// The region is closed after the bind was posted, and before it is executed.
#[test]
fn failed_bind_of_type_2a_does_not_keep_its_endpoint_open() {
    let (scene, faults) = Scene::with_faults();
    let there = &scene.pair.there;
    let window = there.domain.windows().unwrap().alloc_window(WindowType::TwoA).unwrap();
    let here =
        RegAttr::key(2).register(&*scene.pair.here.domain, &[host(scene.target.range(), true)]);
    let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 256, here.unwrap().key);
    let peer = there.peer(&scene.pair.here);
    let source = Buffer::filled(8, 3);
    std::thread::scope(|scope| {
        let gate = faults.hold(NicCall::Transfer);
        let writing = scope.spawn(|| there.write(peer, &[source.whole()], &key, 0));
        gate.wait_held();
        let bind = WindowBind {
            region: scene.region,
            offset: 0,
            len: 8,
            access: READ,
            addressing: Addressing::ZeroBased,
        };
        there.post(Operation::BindWindow { window, bind, tag: 1 }, &[], PeerId(0), 2).unwrap();
        there.domain.deregister(scene.region).unwrap();
        gate.release();
        writing.join().unwrap().unwrap();
    });
    let bound = there.next();
    assert_eq!(bound.context, 2);
    refused(bound.result, ErrorKind::NoRegion);
    there.endpoint.close().expect("no window is bound through it");
}

/// MW-04
///
/// Closing the endpoint ends a binding that no transfer uses, so that the close of the region has
/// nothing left to end.
#[test]
fn close_of_an_endpoint_ends_its_unused_bindings() {
    let (scene, faults) = Scene::with_faults();
    let there = &scene.pair.there;
    let window = there.domain.windows().unwrap().alloc_window(WindowType::TwoB).unwrap();
    scene.post_bind(there, window, 64, Addressing::Virtual, 3).unwrap();
    faults.start_counting();
    there.endpoint.close().unwrap();
    there.domain.deregister(scene.region).unwrap();
    assert_eq!(faults.calls(NicCall::EndBinding), 0);
}

/// MW-04
///
/// Closing the endpoint invalidates the key of a type 2B window without a wait. Freeing the window
/// then waits for the transfers.
#[test]
fn freeing_a_window_waits_for_transfers_after_endpoint_close() {
    let (scene, faults) = Scene::with_faults();
    let windows = scene.pair.there.domain.windows().unwrap();
    let window = windows.alloc_window(WindowType::TwoB).unwrap();
    let number = scene.post_bind(&scene.pair.there, window, 64, Addressing::Virtual, 3).unwrap();
    let key = scene.virtual_key(number, 64, 64);
    let at = scene.target.address().0 + 64;
    std::thread::scope(|scope| {
        let gate = faults.hold(NicCall::Transfer);
        let writing = scope.spawn(|| scene.write(&key, at, 64));
        gate.wait_held();
        scene.pair.there.endpoint.close().unwrap();
        let freeing = scope.spawn(|| {
            scene.pair.there.domain.windows().unwrap().free_window(window).unwrap();
            scene.target.bytes()[64..128].to_vec()
        });
        // A call that does not wait would return during this loop.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        assert!(!freeing.is_finished(), "freed in the middle of a transfer");
        gate.release();
        let at_free = freeing.join().unwrap();
        let _ = writing.join().unwrap();
        assert_eq!(scene.target.bytes()[64..128], at_free, "written after the window was freed");
    });
}

/// MW-04
///
/// Each call that binds, unbinds, invalidates or frees a window returns after the transfers through
/// its earlier key have ended.
#[test]
fn end_of_a_binding_waits_for_transfers_through_the_window() {
    type Ending = fn(&Scene, ProviderWindow);
    let ends: [(WindowType, Ending); 5] = [
        (WindowType::One, |scene, window| scene.bind(window, 0, 8, READ).map(|_| ()).unwrap()),
        (WindowType::One, |scene, window| scene.bind(window, 0, 0, READ).map(|_| ()).unwrap()),
        (WindowType::One, |scene, window| {
            scene.pair.there.domain.windows().unwrap().free_window(window).unwrap()
        }),
        (WindowType::TwoB, |scene, window| {
            scene.pair.there.domain.windows().unwrap().free_window(window).unwrap()
        }),
        (WindowType::TwoB, |scene, window| {
            let invalidate = Operation::InvalidateWindow { window };
            scene.pair.there.run(invalidate, &[], PeerId(0)).map(|_| ()).unwrap();
        }),
    ];
    for (kind, end) in ends {
        let (scene, faults) = Scene::with_faults();
        let window = scene.pair.there.domain.windows().unwrap().alloc_window(kind).unwrap();
        let number = if kind == WindowType::One {
            scene.bind(window, 64, 64, READ | WRITE).unwrap().key
        } else {
            scene.post_bind(&scene.pair.there, window, 64, Addressing::Virtual, 3).unwrap()
        };
        let key = scene.virtual_key(number, 64, 64);
        let at = scene.target.address().0 + 64;
        std::thread::scope(|scope| {
            let gate = faults.hold(NicCall::Transfer);
            let writing = scope.spawn(|| scene.write(&key, at, 64));
            gate.wait_held();
            let ending = scope.spawn(|| {
                end(&scene, window);
                scene.target.bytes()[64..128].to_vec()
            });
            // The window's key is invalid before the call that ends the binding returns.
            let late = End::open(&scene.pair.here.domain);
            let to = late.peer(&scene.pair.there);
            let source = Buffer::filled(1, 9);
            while late.write(to, &[source.segment(0, 0, None)], &key, at).is_ok() {
                std::thread::yield_now();
            }
            // A call that does not wait would return during this loop.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            assert!(!ending.is_finished(), "{kind:?} ended in the middle of a transfer");
            gate.release();
            assert_eq!(writing.join().unwrap().unwrap(), 64);
            assert_eq!(ending.join().unwrap(), [3; 64], "{kind:?} ended before the transfer");
        });
    }
}

/// MW-08
#[test]
fn binding_makes_no_system_call() {
    const NAME: &str = "windows::binding_makes_no_system_call";
    const PART: &str = "HMEM_TEST_WITHOUT_SYSTEM_CALLS";
    const FINISHED: i32 = 42;
    match std::env::var(PART).as_deref() {
        Ok("bind") => bind_without_system_calls(FINISHED),
        Ok("call") => {
            forbid_system_calls();
            // SAFETY: the call has no arguments and changes nothing.
            unsafe { libc::syscall(libc::SYS_getpid) };
            exit(FINISHED)
        }
        _ => {}
    }
    let run = |part: &str| {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args([NAME, "--exact", "--nocapture", "--test-threads=1"]).env(PART, part);
        child.output().expect("start a child")
    };
    let call = run("call");
    assert_eq!(call.status.signal(), Some(libc::SIGSYS), "a system call went unnoticed: {call:?}");
    let bind = run("bind");
    assert_ne!(bind.status.signal(), Some(libc::SIGSYS), "binding made a system call: {bind:?}");
    assert_eq!(bind.status.code(), Some(FINISHED), "{bind:?}");
}

/// Binds windows of each type with each key size. Any system call ends the process.
fn bind_without_system_calls(status: i32) -> ! {
    // Exceeds the 256 tags of a key, so that tags are used again.
    const ROUNDS: u64 = 700;
    let bound: Vec<_> = scenes()
        .map(|scene| {
            let one =
                scene.pair.there.domain.windows().unwrap().alloc_window(WindowType::One).unwrap();
            let two =
                scene.pair.there.domain.windows().unwrap().alloc_window(WindowType::TwoB).unwrap();
            (scene, one, two)
        })
        .collect();
    let bind_all = || {
        for (scene, one, two) in &bound {
            let there = &scene.pair.there;
            for round in 0..ROUNDS {
                scene.bind(*one, round % 64, 64, READ | WRITE).unwrap();
                scene.post_bind(there, *two, 64, Addressing::Virtual, round as u8).unwrap();
                there.run(Operation::InvalidateWindow { window: *two }, &[], PeerId(0)).unwrap();
            }
        }
    };
    // This first run makes the allocator get memory from the system, so that the second run needs
    // no system call.
    bind_all();
    forbid_system_calls();
    bind_all();
    exit(status)
}

/// Makes every system call of this thread except `exit_group` end the process by SIGSYS.
fn forbid_system_calls() {
    let instruction =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (exit, kill) = (libc::SYS_exit_group as u32, libc::SECCOMP_RET_KILL_PROCESS);
    let mut filter = [
        // The first word of the seccomp data is the number of the system call.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, exit),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, kill),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the arguments of this option are plain numbers.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(privileges, 0, "{}", std::io::Error::last_os_error());
    let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: the program points to `filter`, which outlives the call. The kernel copies it.
    let filtered = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
    assert_eq!(filtered, 0, "{}", std::io::Error::last_os_error());
}

/// Ends the process by the only system call that is allowed.
fn exit(status: i32) -> ! {
    // SAFETY: the call ends the process, runs no handlers and has no preconditions.
    unsafe { libc::_exit(status) }
}

/// MW-07: a request that breaks a rule is refused when it is posted, also behind requests that have
/// not been executed.
#[test]
fn posted_bind_that_breaks_a_rule_is_refused_at_the_post() {
    for scene in scenes() {
        let there = &scene.pair.there;
        let windows = there.domain.windows().unwrap();
        let window = windows.alloc_window(WindowType::TwoB).unwrap();
        let post = |region, offset, len, access| {
            let addressing = Addressing::Virtual;
            let bind = WindowBind { region, offset, len, access, addressing };
            there.post(Operation::BindWindow { window, bind, tag: 1 }, &[], PeerId(0), 1)
        };
        let rule = |refused: Result<()>| {
            refused.unwrap_err().context_value("rule").map(str::to_owned).unwrap_or_default()
        };
        let plain = RegAttr::key(2).access(Access::WRITE | Access::MW_BIND);
        let plain = plain.register(&*there.domain, &[host(scene.target.range(), true)]).unwrap();
        assert_eq!(rule(post(scene.region, 250, 7, READ)), "inside-region");
        assert_eq!(rule(post(scene.region, 0, 0, READ)), "type-2-has-length");
        assert_eq!(rule(post(plain, 0, 8, WRITE)), "writes-need-local-write");
        post(scene.region, 0, 8, READ).unwrap();
        assert_eq!(rule(post(scene.region, 0, 8, READ)), "binds-when-free");
        there.post(Operation::InvalidateWindow { window }, &[], PeerId(0), 2).unwrap();
        post(scene.region, 8, 8, READ).unwrap();
        for _ in 0..3 {
            there.next().result.unwrap();
        }
        assert!(there.try_next().is_none(), "a refused request has a completion");
        windows.free_window(window).unwrap();
    }
}

/// MW-05: only the core refuses rights of the local side in a bind. Past the core they grant peers
/// nothing.
#[test]
fn local_rights_of_a_window_grant_nothing() {
    for scene in scenes() {
        let windows = scene.pair.there.domain.windows().unwrap();
        let window = windows.alloc_window(WindowType::One).unwrap();
        let access = READ | Access::RECV | Access::WRITE | Access::MW_BIND;
        let window = scene.bind(window, 64, 64, access).unwrap();
        let key = scene.virtual_key(window.key, 64, 64);
        let at = scene.target.address().0 + 64;
        scene.read(&key, at, 8).unwrap();
        refused(scene.write(&key, at, 8), ErrorKind::AccessDenied);
        windows.free_window(window).unwrap();
    }
}

/// The bytes between the ranges of a region belong to no window.
#[test]
fn access_through_a_window_crosses_no_gap_between_ranges() {
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
    let target = Buffer::new(192);
    let start = target.address().0;
    let part = |at| host(AddressRange::new(Address(start + at), 64).unwrap(), true);
    let region = RegAttr::key(1)
        .access(Access::RECV | Access::MW_BIND)
        .register(&*pair.there.domain, &[part(0), part(128)])
        .unwrap();
    let windows = pair.there.domain.windows().unwrap();
    let addressing = Addressing::Virtual;
    let bind = WindowBind { region, offset: 0, len: 128, access: WRITE, addressing };
    let window = windows.bind_window(windows.alloc_window(WindowType::One).unwrap(), &bind);
    let key = RemoteKey::new(addressing, Iova(start), 192, window.unwrap().key);
    let source = Buffer::filled(16, 3);
    let write = |at| pair.here.write(pair.to, &[source.whole()], &key, start + at);
    write(48).unwrap();
    refused(write(56), ErrorKind::OutOfBounds);
    assert_eq!(target.bytes()[64..], [0; 128]);
    write(128).unwrap();
}

/// KEY-01
#[test]
fn region_gets_no_key_that_a_window_has() {
    let scene = Scene::new(Pair::new(Loopback::builder().build().unwrap(), MrMode::empty()));
    let domain = &*scene.pair.there.domain;
    let window = domain.windows().unwrap().alloc_window(WindowType::One).unwrap();
    let other = Buffer::new(64);
    let register = || RegAttr::key(window.key).register(domain, &[host(other.range(), true)]);
    refused(register(), ErrorKind::NoKey);
    domain.windows().unwrap().free_window(window).unwrap();
    register().unwrap();
}
