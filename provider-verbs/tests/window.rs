//! Memory windows over a real driver: type 1, which a call binds, and type 2B, which posted
//! requests bind.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use hmem_core::{
    Access, Addressing, ErrorKind, GrantKind, Iova, MemoryRegion, Raw, Region, RemoteKey, Result,
    Type1Window, Type2Bind, Type2Kind, Type2Window,
    provider::{WindowEvent, WindowRule, WindowState, WindowType},
    transfer::{AtomicOp, CompletionKind, Operation},
};
use hmem_provider_verbs::{Verbs, VerbsOptions};
use support::{LOCAL, Pages, Pair, REMOTE, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    type_1_bind_changes_the_key_and_unbind_ends_it,
    window_type_that_the_device_lacks_is_refused,
    /// MW-10
    peer_cannot_invalidate_a_type_1_window,
    /// MW-02, MW-04
    window_operation_sequences_follow_the_table,
    /// MW-10
    window_invalidated_by_a_peer_is_not_invalidated_again_on_rxe,
    /// MW-09
    revoking_a_grant_ends_the_accesses_of_its_peer,
    /// MW-05
    window_denies_each_right_that_it_lacks,
    /// MW-06
    overlapping_windows_keep_their_region_open,
    /// MW-03
    type_2b_window_works_through_its_own_queue_pair_only,
    /// KEY-07: after a new bind, the NIC refuses keys of the window with earlier tags.
    stale_tags_of_a_window_are_refused,
    /// MW-07
    window_bounds_are_enforced_if_the_driver_checks_them,
}

fn pair(name: &str, window: WindowType) -> Result<Pair, Skipped> {
    let pair = Pair::with(name, Verbs::builder().options(VerbsOptions::MW_BIND));
    let windows = pair.far.domain.provider_domain().windows();
    if !windows.is_some_and(|windows| windows.window_types().contains(&window)) {
        return Err(Skipped(format!("{name} has no windows of type {window:?}")));
    }
    Ok(pair)
}

/// Returns memory with a region of the far side that grants peers nothing.
fn memory(pair: &Pair, len: usize) -> (Pages, Region<Raw>) {
    let pages = Pages::new(len);
    let region = pair.far.register(pages.range(), LOCAL).expect("register");
    (pages, region)
}

/// Returns a request that binds a type 2 window to a whole region.
fn whole(region: &MemoryRegion, tag: u8) -> Type2Bind<'_> {
    let (len, access, addressing) = (region.len(), Access::REMOTE_WRITE, Addressing::Virtual);
    Type2Bind { region, offset: 0, len, access, addressing, tag }
}

/// Helper that tests keys of the far side by writing to them. Both sides connect again after a
/// failed write.
struct Prober<'a> {
    pair: &'a Pair,
    from: Pages,
    region: Region<Raw>,
}

impl<'a> Prober<'a> {
    fn new(pair: &'a Pair) -> Self {
        let from = Pages::new(4096);
        from.fill(5);
        let region = pair.near.register(from.range(), LOCAL).expect("register");
        Self { pair, from, region }
    }

    fn write(&self, key: &RemoteKey, offset: u64) -> Result<u64> {
        let local = segment(self.from.part(0, 64), self.region.desc().expect("desc"));
        let result = self.pair.near.write(local, remote(key, offset, 64));
        if result.is_err() {
            self.pair.connect();
        }
        result
    }

    /// Posts a receive of the far side, and sends a message that invalidates a key of the far side.
    fn send_invalidate(&self, inbox: &MemoryRegion, key: &RemoteKey) -> Result<u64> {
        let into = inbox.range().slice(0, 64).expect("inside");
        let into = segment(into, inbox.desc().expect("desc"));
        let receive = Operation::Receive { tag: None, from: None };
        self.pair.far.post(receive, &[into], 4).expect("receive");
        let message = segment(self.from.part(0, 8), self.region.desc().expect("desc"));
        let send = Operation::Send { tag: None, invalidate: Some(key) };
        self.pair.near.transfer(send, &[message])
    }

    fn refused(&self, key: &RemoteKey, offset: u64, what: &str) {
        let error = self.write(key, offset).expect_err(what);
        assert_eq!(error.driver().map(|code| code.code), Some(10), "{what}: {error}");
    }
}

fn type_1_bind_changes_the_key_and_unbind_ends_it() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::One)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(8192);
    // The region has local write and no remote right: a window's rights do not come from its region
    // (IBA 10.6.7.2.2).
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_type_1_window().expect("allocate");
    let first = window.bind(&region, 1024, 2048, Access::REMOTE_WRITE).expect("bind");
    prober.write(&first, 0).expect("write through the window");
    assert_eq!(to.get(1024, 64), prober.from.get(0, 64));
    prober.refused(&first, 8192 - 1024 - 63, "past the region's end");
    prober.refused(&region.key().expect("key"), 0, "the region's own key grants nothing");

    let second = window.bind(&region, 0, 1024, Access::REMOTE_WRITE).expect("bind again");
    assert_ne!(first.as_u64().expect("key"), second.as_u64().expect("key"));
    prober.refused(&first, 0, "the old key no longer works");
    prober.write(&second, 0).expect("the new key works");
    let error = region.close().expect_err("a window is bound");
    assert!(error.error.is_busy(), "{}", error.error);
    window.unbind().expect("unbind");
    prober.refused(&second, 0, "the key of an unbound window no longer works");
    error.value.close().map_err(|rejected| rejected.error).expect("close");
    drop(window);
    assert_eq!(pair.far.domain.live().windows, 0);
    Ok(())
}

/// MW-10
fn peer_cannot_invalidate_a_type_1_window() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::One)?;
    let prober = Prober::new(&pair);
    let (to, region) = memory(&pair, 4096);
    let window = pair.far.domain.alloc_type_1_window().expect("allocate");
    let key = window.bind(&region, 1024, 2048, Access::REMOTE_WRITE).expect("bind");
    let sent = prober.send_invalidate(&region, &key);
    let received = pair.far.wait().result;
    assert!(sent.is_err() || received.is_err(), "invalidated: {sent:?}, {received:?}");
    pair.connect();
    prober.write(&key, 0).expect("the key still works");
    assert_eq!(to.get(1024, 64), prober.from.get(0, 64));
    Ok(())
}

fn window_type_that_the_device_lacks_is_refused() -> Outcome {
    let name = device()?;
    let refused = Pair::new(&name).far.domain.alloc_type_2_window(Type2Kind::A).err();
    let error = refused.ok_or_else(|| Skipped(format!("{name} has windows of type 2A")))?;
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(format!("{error:#}").contains(&name), "{error}");
    Ok(())
}

/// A memory window of type 1 or 2 in the far domain of the pair. A type 2 window is stored with the
/// tag of its last bind.
enum Window {
    One(Type1Window),
    Two(Type2Window, u8),
}

impl Window {
    fn alloc(pair: &Pair, kind: WindowType) -> Self {
        let domain = &pair.far.domain;
        match kind {
            WindowType::One => Self::One(domain.alloc_type_1_window().expect("allocate")),
            WindowType::TwoA => {
                Self::Two(domain.alloc_type_2_window(Type2Kind::A).expect("allocate"), 0)
            }
            WindowType::TwoB => {
                Self::Two(domain.alloc_type_2_window(Type2Kind::B).expect("allocate"), 0)
            }
        }
    }

    fn state(&self) -> WindowState {
        match self {
            Self::One(window) => window.state(),
            Self::Two(window, _) => window.state(),
        }
    }

    fn bind(
        &mut self,
        pair: &Pair,
        region: &MemoryRegion,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<RemoteKey> {
        match self {
            Self::One(window) if len == 0 => {
                window.unbind().map(|()| RemoteKey::new(Addressing::Virtual, Iova(0), 0, 0))
            }
            Self::One(window) => window.bind(region, offset, len, access),
            Self::Two(window, tag) => {
                *tag = tag.wrapping_add(1);
                let addressing = Addressing::Virtual;
                let bind = Type2Bind { region, offset, len, access, addressing, tag: *tag };
                let key = window.post_bind(&pair.far.endpoint, &bind, 1)?;
                assert_eq!(key.as_u64()? & 0xff, (*tag).into(), "the caller's tag");
                let done = pair.far.wait();
                assert_eq!(done.kind, CompletionKind::BindWindow);
                done.result.map(|_| key)
            }
        }
    }
}

/// Sends a message from the near side that invalidates a key of the far side. Both sides connect
/// again after a failure.
fn invalidate_by_peer(prober: &Prober<'_>, inbox: &MemoryRegion, key: &RemoteKey) -> Result<()> {
    let pair = prober.pair;
    let sent = prober.send_invalidate(inbox, key);
    let received = pair.far.wait().result;
    let done = sent.and(received).map(|_| ());
    if done.is_err() {
        pair.connect();
    }
    done
}

/// A window under test, and the regions that its operations need.
struct Subject<'a> {
    pair: &'a mut Pair,
    region: &'a MemoryRegion,
    inbox: &'a MemoryRegion,
    /// The window; `None` once it is freed.
    window: Option<Window>,
    /// The key of the last bind, which the peer knows.
    key: Option<RemoteKey>,
}

impl Subject<'_> {
    fn step(&mut self, event: WindowEvent) -> Result<()> {
        let window = self.window.as_mut().expect("the window is allocated");
        let known = || self.key.as_ref().expect("the window was bound");
        let mut bind = |len| window.bind(self.pair, self.region, (64, len), REMOTE);
        match event {
            WindowEvent::Bind => self.key = Some(bind(64)?),
            WindowEvent::BindNothing => drop(bind(0)?),
            WindowEvent::Invalidate => {
                if let Window::Two(window, _) = window {
                    window.post_invalidate(&self.pair.far.endpoint, 2)?;
                    self.pair.far.wait().result?;
                }
            }
            WindowEvent::InvalidateByPeer => {
                invalidate_by_peer(&Prober::new(self.pair), self.inbox, known())?;
            }
            WindowEvent::Access => drop(Prober::new(self.pair).write(known(), 0)?),
            // The prober connects both sides again, which resets their queue pairs.
            WindowEvent::ResetQueuePair => Prober::new(self.pair).refused(
                &self.region.key().expect("key"),
                0,
                "the region grants peers nothing",
            ),
            WindowEvent::DestroyQueuePair => reopen(self.pair),
            _ => self.window = None,
        }
        Ok(())
    }
}

/// Opens and connects new endpoints on both sides, then closes the old ones.
fn reopen(pair: &mut Pair) {
    let replace = |side: &mut support::Side| {
        let cq = side.domain.open_cq(64).expect("open a completion queue");
        let attr = hmem_core::provider::EndpointAttr::new(&cq);
        let endpoint = side.domain.open_endpoint(&attr).expect("open an endpoint");
        let old_cq = std::mem::replace(&mut side.cq, cq);
        let old = std::mem::replace(&mut side.endpoint, endpoint);
        old.close().map_err(|rejected| rejected.error).expect("close the old endpoint");
        drop(old_cq);
    };
    replace(&mut pair.near);
    replace(&mut pair.far);
    pair.connect();
}

/// Runs every sequence of up to four window operations in which no operation but the last is
/// refused. A refused operation must leave the window unchanged.
fn window_operation_sequences_follow_the_table() -> Outcome {
    const STEPS: [WindowEvent; 8] = [
        WindowEvent::Bind,
        WindowEvent::BindNothing,
        WindowEvent::Invalidate,
        WindowEvent::InvalidateByPeer,
        WindowEvent::Access,
        WindowEvent::ResetQueuePair,
        WindowEvent::DestroyQueuePair,
        WindowEvent::Deallocate,
    ];
    let name = device()?;
    let mut shown = 0;
    for kind in [WindowType::One, WindowType::TwoB] {
        let mut pair = pair(&name, kind)?;
        let (to, inbox) = (Pages::new(4096), Pages::new(4096));
        let region = pair.far.register(to.range(), LOCAL).expect("register");
        let inbox = pair.far.register(inbox.range(), LOCAL).expect("register");
        let mut open: VecDeque<Vec<WindowEvent>> = VecDeque::from([Vec::new()]);
        while let Some(done) = open.pop_front() {
            for next in STEPS {
                let window = Some(Window::alloc(&pair, kind));
                let (pair, region, inbox) = (&mut pair, &region, &inbox);
                let mut subject = Subject { pair, region, inbox, window, key: None };
                let mut state = WindowState::Free;
                for event in &done {
                    subject.step(*event).expect("the operation succeeded before");
                    state = kind.after(state, *event).expect("the table allowed it before");
                }
                let by_peer = matches!(next, WindowEvent::InvalidateByPeer | WindowEvent::Access);
                let without_key = by_peer && subject.key.is_none();
                // A type 1 window has no method to invalidate it.
                let by_type = kind == WindowType::One && next == WindowEvent::Invalidate;
                // rdma_rxe follows a null pointer when a peer invalidates a free window.
                let crashes = next == WindowEvent::InvalidateByPeer
                    && state == WindowState::Free
                    && name.starts_with("rxe");
                if by_type || without_key || crashes {
                    continue;
                }
                let what = format!("type {}: {next:?} after {done:?}", kind.name());
                let expected = match kind.after(state, next) {
                    // The provider refuses an operation that would crash the driver.
                    Ok(_)
                        if next == WindowEvent::Invalidate
                            && state == WindowState::Free
                            && name.starts_with("rxe") =>
                    {
                        Err("driver-invalidates-once")
                    }
                    after => after.map_err(WindowRule::name),
                };
                match (subject.step(next), expected) {
                    (Ok(()), Ok(after)) => state = after,
                    (Err(error), Err(rule)) => {
                        let named = error.context_value("rule") == Some(rule);
                        assert!(named || (by_peer && error.driver().is_some()), "{what}: {error}");
                    }
                    (done, expected) => panic!("{what}: {done:?} and not {expected:?}"),
                }
                shown += 1;
                if let Some(window) = &subject.window {
                    assert_eq!(window.state(), state, "{what}");
                    if done.len() + 1 < 4 && expected.is_ok() {
                        open.push_back(done.iter().copied().chain([next]).collect());
                    }
                }
            }
        }
        region.close().map_err(|rejected| rejected.error).expect("nothing is bound");
        inbox.close().map_err(|rejected| rejected.error).expect("close the inbox");
        let support::Side { endpoint, cq, domain, .. } = pair.far;
        endpoint.close().map_err(|rejected| rejected.error).expect("close the endpoint");
        drop(cq);
        domain.close().map_err(|rejected| rejected.error).expect("nothing is left");
    }
    println!("{shown} sequences");
    Ok(())
}

/// On rdma_rxe, the provider refuses to invalidate a window that a peer has invalidated, even
/// before the application reads the peer's message. The second invalidation would crash the kernel.
fn window_invalidated_by_a_peer_is_not_invalidated_again_on_rxe() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let prober = Prober::new(&pair);
    let (_to, region) = memory(&pair, 4096);
    let window = pair.far.domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    for tag in 1..=3 {
        let bind = whole(&region, tag);
        let key = window.post_bind(&pair.far.endpoint, &bind, 1).expect("post the bind");
        pair.far.wait().result.expect("bind");
        prober.send_invalidate(&region, &key).expect("send with invalidate");
        let invalidated = window.post_invalidate(&pair.far.endpoint, 5);
        if name.starts_with("rxe") {
            let rule = invalidated.map_err(|error| error.context_value("rule").map(str::to_owned));
            assert_eq!(rule, Err(Some("driver-invalidates-once".to_owned())));
        } else {
            invalidated.expect("a free window may be invalidated");
        }
        let received = pair.far.wait();
        assert_eq!((received.context, received.invalidated), (4, key.as_u64().ok()));
        if !name.starts_with("rxe") {
            pair.far.wait().result.expect("invalidate");
        }
        assert_eq!(window.state(), WindowState::Free);
    }
    Ok(())
}

/// Revokes a grant while a peer reads continuously. After the revocation, the peer's reads must
/// fail.
fn revoking_a_grant_ends_the_accesses_of_its_peer() -> Outcome {
    const LEN: u64 = 4096;
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let (to, sink) = (Pages::new(2 * LEN as usize), Pages::new(LEN as usize));
    let bytes = to.fill(3);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let near = pair.near.register(sink.range(), LOCAL).expect("register");
    let local = segment(sink.range(), near.desc().expect("desc"));
    for round in 0..20 {
        let part = LEN / 2..LEN / 2 + LEN;
        let grant = region.grant(&pair.far.endpoint, part, Access::REMOTE_READ).expect("grant");
        assert_eq!(grant.kind(), GrantKind::Window(WindowType::TwoB));
        let rules: Vec<_> =
            grant.fallback_reasons().iter().map(|reason| reason.context_value("rule")).collect();
        if name.starts_with("rxe") {
            // The provider has no sub-regions. It recognises the driver, but not its version: the
            // driver of this test may enforce the bounds.
            assert!(!grant.enforces_bounds());
            assert_eq!(rules, [Some("nic-enforces-bounds"), None]);
        } else {
            assert!(grant.enforces_bounds() && rules.is_empty());
        }
        let key = grant.key().expect("key");
        // Returns whether the read succeeded. A read that succeeds must have moved the right bytes.
        let access = || {
            sink.put(0, &vec![0; LEN as usize]);
            match pair.near.read(local, remote(&key, 0, LEN)) {
                Ok(moved) => {
                    assert_eq!(moved, LEN);
                    assert!(
                        sink.get(0, LEN as usize) == bytes[LEN as usize / 2..][..LEN as usize],
                        "wrong bytes in round {round}"
                    );
                    true
                }
                Err(error) => {
                    let code = error.driver().map(|code| code.code);
                    assert_eq!(code, Some(10), "not a remote access error: {error}");
                    pair.connect();
                    false
                }
            }
        };
        let (worked, revoked) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let accessing = scope.spawn(|| {
                loop {
                    let late = revoked.load(Ordering::Acquire);
                    if !access() {
                        break;
                    }
                    assert!(!late, "a revoked key works in round {round}");
                    worked.fetch_add(1, Ordering::Relaxed);
                }
            });
            while worked.load(Ordering::Relaxed) < 5 && !accessing.is_finished() {
                std::thread::yield_now();
            }
            grant.revoke().map_err(|rejected| rejected.error).expect("revoke");
            revoked.store(true, Ordering::Release);
            accessing.join().expect("each access is right or refused");
        });
        assert!(worked.into_inner() >= 5, "an access failed before the revocation");
        for _ in 0..3 {
            assert!(!access(), "a revoked key works in round {round}");
        }
    }
    region.close().map_err(|rejected| rejected.error).expect("nothing is granted");
    Ok(())
}

fn window_denies_each_right_that_it_lacks() -> Outcome {
    let name = device()?;
    for kind in [WindowType::One, WindowType::TwoB] {
        let pair = pair(&name, kind)?;
        let prober = Prober::new(&pair);
        let (to, region) = memory(&pair, 4096);
        let local = segment(prober.from.part(0, 8), prober.region.desc().expect("desc"));
        for access in [Access::REMOTE_READ, Access::REMOTE_RMA_WRITE, Access::REMOTE_ATOMIC] {
            let mut window = Window::alloc(&pair, kind);
            let key = window.bind(&pair, &region, (0, 64), access).expect("bind");
            let tries: [(Access, &dyn Fn() -> Result<u64>); 3] = [
                (Access::REMOTE_READ, &|| pair.near.read(local, remote(&key, 0, 8))),
                (Access::REMOTE_RMA_WRITE, &|| pair.near.write(local, remote(&key, 0, 8))),
                (Access::REMOTE_ATOMIC, &|| {
                    pair.near.atomic(AtomicOp::Sum, remote(&key, 0, 8), local, Some(local), None)
                }),
            ];
            for (needed, access_it) in tries {
                let before = to.get(0, 64);
                let what = format!("type {}, {access}: {needed}", kind.name());
                match access_it() {
                    Ok(moved) => assert_eq!((needed, moved), (access, 8), "{what}"),
                    Err(error) => {
                        assert_ne!(needed, access, "{what}: {error}");
                        assert_eq!(error.driver().map(|code| code.code), Some(10), "{what}");
                        assert_eq!(to.get(0, 64), before, "{what}: moved bytes");
                        pair.connect();
                    }
                }
            }
        }
    }
    Ok(())
}

fn overlapping_windows_keep_their_region_open() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let prober = Prober::new(&pair);
    let (to, region) = memory(&pair, 4096);
    let (mut one, mut two) =
        (Window::alloc(&pair, WindowType::One), Window::alloc(&pair, WindowType::TwoB));
    let first = one.bind(&pair, &region, (0, 256), Access::REMOTE_WRITE).expect("bind");
    let second = two.bind(&pair, &region, (128, 256), Access::REMOTE_READ).expect("bind");
    prober.write(&first, 128).expect("write through the first window");
    let local = segment(prober.from.part(64, 64), prober.region.desc().expect("desc"));
    pair.near.read(local, remote(&second, 0, 64)).expect("read through the second window");
    assert_eq!(prober.from.get(64, 64), to.get(128, 64));
    prober.refused(&second, 0, "the second window grants no write");
    let rejected = region.close().expect_err("two windows are bound");
    drop(one);
    let rejected = rejected.value.close().expect_err("one window is bound");
    assert!(rejected.error.is_busy(), "{}", rejected.error);
    drop(two);
    rejected.value.close().map_err(|rejected| rejected.error).expect("nothing is bound");
    Ok(())
}

fn type_2b_window_works_through_its_own_queue_pair_only() -> Outcome {
    let name = device()?;
    let mut pair = pair(&name, WindowType::TwoB)?;
    let (to, region) = memory(&pair, 4096);
    let mut two = Window::alloc(&pair, WindowType::TwoB);
    let key = two.bind(&pair, &region, (0, 64), Access::REMOTE_WRITE).expect("bind");
    Prober::new(&pair).write(&key, 0).expect("through its own queue pair");
    // Another connection between the same two domains.
    let open = |side: &support::Side| {
        let cq = side.domain.open_cq(64).expect("open a completion queue");
        let attr = hmem_core::provider::EndpointAttr::new(&cq);
        (side.domain.open_endpoint(&attr).expect("open an endpoint"), cq)
    };
    let ((near, near_cq), (far, far_cq)) = (open(&pair.near), open(&pair.far));
    let own_near = std::mem::replace(&mut pair.near.endpoint, near);
    let own_far = std::mem::replace(&mut pair.far.endpoint, far);
    let (near_cq, far_cq) = (
        std::mem::replace(&mut pair.near.cq, near_cq),
        std::mem::replace(&mut pair.far.cq, far_cq),
    );
    pair.connect();
    Prober::new(&pair).refused(&key, 0, "through another queue pair of the domain");
    if let Window::Two(window, _) = &two {
        let error = window.post_invalidate(&pair.far.endpoint, 3).expect_err("another queue pair");
        assert_eq!(error.context_value("rule"), Some("own-queue-pair"), "{error}");
    }
    // A type 1 window serves every queue pair of its domain.
    let mut one = Window::alloc(&pair, WindowType::One);
    let shared = one.bind(&pair, &region, (0, 64), Access::REMOTE_WRITE).expect("bind");
    Prober::new(&pair).write(&shared, 0).expect("through another queue pair");
    let inbox = pair.far.register(to.range(), LOCAL).expect("register");
    let by_a_stranger = invalidate_by_peer(&Prober::new(&pair), &inbox, &key);
    pair.near.endpoint = own_near;
    pair.far.endpoint = own_far;
    (pair.near.cq, pair.far.cq) = (near_cq, far_cq);
    // Not every NIC checks the queue pair: rdma_rxe lets any queue pair invalidate any type 2
    // window.
    assert_eq!(by_a_stranger.is_ok(), name.starts_with("rxe"), "{by_a_stranger:?}");
    let expected = if by_a_stranger.is_ok() { WindowState::Free } else { WindowState::Valid };
    assert_eq!(two.state(), expected);
    Ok(())
}

fn stale_tags_of_a_window_are_refused() -> Outcome {
    let name = device()?;
    for kind in [WindowType::One, WindowType::TwoB] {
        let pair = pair(&name, kind)?;
        let prober = Prober::new(&pair);
        let (to, region) = memory(&pair, 4096);
        let mut window = Window::alloc(&pair, kind);
        let key = window.bind(&pair, &region, (0, 64), Access::REMOTE_WRITE).expect("bind");
        let number = key.as_u64().expect("one key");
        let before = to.get(0, 64);
        for tag in (1..=255).step_by(16) {
            let other = RemoteKey::new(key.addressing(), key.base(), 64, number ^ tag);
            prober.refused(&other, 0, "a key with another tag");
        }
        assert_eq!(to.get(0, 64), before);
        prober.write(&key, 0).expect("the key itself");
    }
    println!("32-bit keys: a guess hits one of n windows with probability n / 2^32");
    Ok(())
}

fn window_bounds_are_enforced_if_the_driver_checks_them() -> Outcome {
    let name = device()?;
    // check_rkey in rxe_resp.c looks at the bounds of the region behind a window. The driver of
    // `tests/vm/run --dma-buf` also looks at the bounds of the window.
    let enforced = !name.starts_with("rxe")
        || std::env::var_os("HMEM_VERBS_WINDOW_BOUNDS").is_some_and(|value| !value.is_empty());
    for (kind, addressing) in [
        (WindowType::One, Addressing::Virtual),
        (WindowType::TwoB, Addressing::Virtual),
        (WindowType::TwoB, Addressing::ZeroBased),
    ] {
        let pair = pair(&name, kind)?;
        let prober = Prober::new(&pair);
        let (to, region) = memory(&pair, 8192);
        let access = Access::REMOTE_WRITE;
        let (one, two);
        let key = if kind == WindowType::One {
            one = pair.far.domain.alloc_type_1_window().expect("allocate");
            one.bind(&region, 1024, 2048, access).expect("bind")
        } else {
            two = pair.far.domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
            let region = &region;
            let bind = Type2Bind { region, offset: 1024, len: 2048, access, addressing, tag: 1 };
            let key = two.post_bind(&pair.far.endpoint, &bind, 1).expect("post the bind");
            pair.far.wait().result.expect("bind");
            key
        };
        let what = format!("type {}, {addressing:?}", kind.name());
        prober.write(&key, 0).expect("the first bytes");
        assert_eq!(to.get(1024, 64), prober.from.get(0, 64), "{what}");
        prober.write(&key, 2048 - 64).expect("the last bytes");
        for (offset, at) in [(2048 - 63, 1024 + 2048 - 63), (2048, 1024 + 2048)] {
            let before = to.get(at, 64);
            let written = prober.write(&key, offset);
            assert_eq!(written.is_err(), enforced, "{what}, past the end: {written:?}");
            assert_eq!(to.get(at, 64) == before, enforced, "{what}, past the end");
            to.put(at, &before);
        }
        // No driver lets a window reach memory outside its region.
        prober.refused(&key, 8192 - 1024, "past the region's end");
    }
    Ok(())
}
