//! Memory windows over a real driver: type 1 by a call, type 2B by posted requests.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use hmem_core::{
    Access, Addressing, ErrorKind, RemoteKey, Result,
    provider::WindowType,
    transfer::{CompletionKind, Operation},
};
use hmem_provider_verbs::{Verbs, VerbsOptions};
use support::{LOCAL, Pages, Pair, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    a_type_1_window_turns_its_key_at_each_bind_and_unbinds,
    nothing_is_reached_past_the_end_of_a_window,
    a_type_2_window_is_bound_invalidated_and_bound_again_by_posted_requests,
    a_peer_invalidates_a_type_2_window_with_a_send,
    /// MW-10
    a_peer_does_not_invalidate_a_type_1_window,
    binds_that_drivers_answer_badly_are_refused_before,
    an_endpoint_closes_at_once_with_a_type_2b_window_bound_through_it,
}

fn pair(name: &str, window: WindowType) -> Result<Pair, Skipped> {
    let pair = Pair::with(name, Verbs::builder().options(VerbsOptions::MW_BIND));
    let windows = pair.far.domain.provider_domain().windows();
    if !windows.is_some_and(|windows| windows.window_types().contains(&window)) {
        return Err(Skipped(format!("{name} has no windows of type {window:?}")));
    }
    Ok(pair)
}

/// A near buffer, and what a write of its first 64 bytes to `key` comes to; the connection is made
/// anew after a failure.
struct Prober<'a> {
    pair: &'a Pair,
    from: Pages,
    region: hmem_core::MemoryRegion,
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

    fn refused(&self, key: &RemoteKey, offset: u64, what: &str) {
        let error = self.write(key, offset).expect_err(what);
        assert_eq!(error.driver().map(|code| code.code), Some(10), "{what}: {error}");
    }
}

fn a_type_1_window_turns_its_key_at_each_bind_and_unbinds() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::One)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(8192);
    // Local write, no remote right: the window's rights are its own (IBA 10.6.7.2.2).
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::One).expect("allocate");
    let first = window.bind(&region, 1024, 2048, Access::REMOTE_WRITE).expect("bind");
    prober.write(&first, 0).expect("write through the window");
    assert_eq!(to.get(1024, 64), prober.from.get(0, 64));
    prober.refused(&first, 8192 - 1024 - 63, "past the region's end");
    prober.refused(&region.key().expect("key"), 0, "the region's own key grants nothing");

    let second = window.bind(&region, 0, 1024, Access::REMOTE_WRITE).expect("bind again");
    assert_ne!(first.as_u64().expect("key"), second.as_u64().expect("key"));
    prober.refused(&first, 0, "the old key is dead");
    prober.write(&second, 0).expect("the new key works");
    let error = region.close().expect_err("a window is bound");
    assert!(error.error.is_busy(), "{}", error.error);
    window.unbind().expect("unbind");
    prober.refused(&second, 0, "an unbound window's key is dead");
    error.value.close().map_err(|rejected| rejected.error).expect("close");
    drop(window);
    assert_eq!(pair.far.domain.live().windows, 0);
    Ok(())
}

/// MW-07
fn nothing_is_reached_past_the_end_of_a_window() -> Outcome {
    let name = device()?;
    if name.starts_with("rxe") {
        // check_rkey in rxe_resp.c.
        return Err(Skipped(format!(
            "{name} enforces the bounds of a window's region, not those of the window"
        )));
    }
    let pair = pair(&name, WindowType::One)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(8192);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::One).expect("allocate");
    let key = window.bind(&region, 1024, 2048, Access::REMOTE_WRITE).expect("bind");
    prober.refused(&key, 2048 - 63, "past the window's end");
    Ok(())
}

fn a_type_2_window_is_bound_invalidated_and_bound_again_by_posted_requests() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(8192);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::TwoB).expect("allocate");
    let far = &pair.far;
    let bind = |range, tag, addressing| {
        let key = window
            .post_bind(&far.endpoint, &region, range, Access::REMOTE_WRITE, addressing, tag, 1)
            .expect("post the bind");
        let done = far.wait();
        assert_eq!(done.kind, CompletionKind::BindWindow);
        done.result.expect("bind");
        key
    };
    let key = bind((512, 1024), 0x42, Addressing::Virtual);
    assert_eq!(key.as_u64().expect("key") & 0xff, 0x42, "the caller's tag");
    prober.write(&key, 0).expect("write through the window");
    assert_eq!(to.get(512, 64), prober.from.get(0, 64));
    window.post_invalidate(&far.endpoint, 2).expect("post the invalidation");
    far.wait().result.expect("invalidate");
    let again = bind((0, 256), 0x43, Addressing::ZeroBased);
    assert_eq!(again.base().0, 0);
    prober.write(&again, 64).expect("write by offset");
    assert_eq!(to.get(64, 64), prober.from.get(0, 64));
    window.post_invalidate(&far.endpoint, 3).expect("post the invalidation");
    far.wait().result.expect("invalidate");
    prober.refused(&again, 0, "an invalidated key is dead");
    Ok(())
}

fn a_peer_invalidates_a_type_2_window_with_a_send() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(4096);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::TwoB).expect("allocate");
    let key = window
        .post_bind(
            &pair.far.endpoint,
            &region,
            (0, 4096),
            Access::REMOTE_WRITE,
            Addressing::Virtual,
            9,
            1,
        )
        .expect("post the bind");
    pair.far.wait().result.expect("bind");
    prober.write(&key, 0).expect("write");
    let into = segment(to.part(0, 64), region.desc().expect("desc"));
    pair.far.post(Operation::Receive { tag: None, from: None }, &[into], 4).expect("receive");
    let message = segment(prober.from.part(0, 8), prober.region.desc().expect("desc"));
    let send = Operation::Send { tag: None, invalidate: Some(&key) };
    pair.near.transfer(send, &[message]).expect("send with invalidate");
    assert_eq!(pair.far.wait().result.expect("receive"), 8);
    window.invalidated_by_peer();
    prober.refused(&key, 0, "the invalidated key is dead");
    region.close().map_err(|rejected| rejected.error).expect("nothing is bound any more");
    Ok(())
}

/// MW-10
fn a_peer_does_not_invalidate_a_type_1_window() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::One)?;
    let prober = Prober::new(&pair);
    let to = Pages::new(4096);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::One).expect("allocate");
    let key = window.bind(&region, 1024, 2048, Access::REMOTE_WRITE).expect("bind");
    let into = segment(to.part(0, 64), region.desc().expect("desc"));
    pair.far.post(Operation::Receive { tag: None, from: None }, &[into], 4).expect("receive");
    let message = segment(prober.from.part(0, 8), prober.region.desc().expect("desc"));
    let send = Operation::Send { tag: None, invalidate: Some(&key) };
    let sent = pair.near.transfer(send, &[message]);
    let received = pair.far.wait().result;
    assert!(sent.is_err() || received.is_err(), "invalidated: {sent:?}, {received:?}");
    pair.connect();
    prober.write(&key, 0).expect("the key lives on");
    assert_eq!(to.get(1024, 64), prober.from.get(0, 64));
    Ok(())
}

fn binds_that_drivers_answer_badly_are_refused_before() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::One)?;
    let to = Pages::new(4096);
    let narrow =
        pair.far.register(to.range(), Access::SEND | Access::REMOTE_READ).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::One).expect("allocate");
    let kind = |result: Result<RemoteKey>| result.expect_err("refused").kind();
    assert_eq!(kind(window.bind(&narrow, 0, 64, Access::REMOTE_WRITE)), ErrorKind::AccessDenied);
    assert_eq!(kind(window.bind(&narrow, 4000, 100, Access::REMOTE_READ)), ErrorKind::OutOfBounds);
    window.bind(&narrow, 0, 64, Access::REMOTE_READ).expect("what the region allows works");
    window.unbind().expect("unbind");
    drop(window);

    let plain = Pair::new(&name);
    let region = plain.far.register(to.range(), LOCAL).expect("register");
    let window = plain.far.domain.alloc_window(WindowType::One).expect("allocate");
    let error = window.bind(&region, 0, 64, Access::REMOTE_WRITE).expect_err("no MW_BIND");
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert!(error.to_string().contains("MW_BIND"), "{error}");
    if let Err(error) = plain.far.domain.alloc_window(WindowType::TwoA) {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(&name), "{error}");
    }
    Ok(())
}

fn an_endpoint_closes_at_once_with_a_type_2b_window_bound_through_it() -> Outcome {
    let name = device()?;
    let pair = pair(&name, WindowType::TwoB)?;
    let to = Pages::new(4096);
    let region = pair.far.register(to.range(), LOCAL).expect("register");
    let window = pair.far.domain.alloc_window(WindowType::TwoB).expect("allocate");
    let bind = |endpoint| {
        window.post_bind(
            endpoint,
            &region,
            (0, 64),
            Access::REMOTE_WRITE,
            Addressing::Virtual,
            1,
            1,
        )
    };
    bind(&pair.far.endpoint).expect("post the bind");
    pair.far.wait().result.expect("bind");
    let started = std::time::Instant::now();
    let support::Side { endpoint, cq, domain } = pair.far;
    endpoint.close().map_err(|rejected| rejected.error).expect("close");
    println!("closed after {:?}", started.elapsed());
    drop(window);
    region.close().map_err(|rejected| rejected.error).expect("close the region");
    drop(cq);
    domain.close().map_err(|rejected| rejected.error).expect("nothing is left");
    Ok(())
}
