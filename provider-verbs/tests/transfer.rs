//! Transfers over a real driver: moved bytes, refused keys, and reconnections.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use hmem_core::{
    Access, Address, ErrorKind, LocalKey, Parallel, Promise, Raw, RemoteKey, Request,
    transfer::{AtomicOp, CompletionKind, LocalSegment, Operation},
};
use hmem_provider_verbs::{Verbs, VerbsDomain};
use support::{LOCAL, Pages, Pair, REMOTE, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    inline_sends_of_owned_buffers_arrive,
    messages_arrive_in_order_and_long_ones_fail,
    lists_on_both_sides_move_as_one_run_of_bytes,
    transfer_to_a_dead_peer_is_unreachable,
    /// MR-16
    region_of_parallel_registrations_works_as_one,
    /// VRB-07
    region_over_the_device_limit_works_as_one,
    invalid_keys_are_refused_by_the_peer,
    invalid_local_segments_keep_the_connection,
    supported_atomics_work_and_others_are_refused,
    /// MR-05
    reconnect_recovers_both_sides_after_a_refused_access,
    /// MR-05
    closing_a_local_region_ends_reads_into_it,
    /// VRB-04
    keys_work_on_an_application_protection_domain,
}

fn inline_sends_of_owned_buffers_arrive() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let to = Pages::new(4096);
    let far = pair.far.register(to.range(), REMOTE).expect("register the target");
    let near = pair
        .near
        .domain
        .register(vec![0x5a_u8; 100], LOCAL)
        .map_err(|r| r.error)
        .expect("register");
    let key = far.key().expect("key");
    let slice = near.slice(0, 100).expect("slice");
    pair.near.endpoint.write(&[slice], &[remote(&key, 8, 100)], pair.near.peer(), 3).expect("post");
    let done = pair.near.wait();
    assert_eq!(
        (done.context, done.kind, done.result.expect("write")),
        (3, CompletionKind::Write, 100)
    );
    assert_eq!(to.get(0, 120), [vec![0; 8], vec![0x5a; 100], vec![0; 12]].concat());
    Ok(())
}

fn messages_arrive_in_order_and_long_ones_fail() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(8192), Pages::new(8192));
    let bytes = from.fill(3);
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let far = pair.far.register(to.range(), LOCAL).expect("register");
    let (near_desc, far_desc) = (near.desc().expect("desc"), far.desc().expect("desc"));
    let receive = || Operation::Receive { tag: None, from: None };
    let send = || Operation::Send { tag: None, invalidate: None };
    for index in 0..3 {
        pair.far
            .post(receive(), &[segment(to.part(index * 100, 100), far_desc)], index)
            .expect("receive");
    }
    for index in 0..3_u64 {
        let part = segment(from.part(index * 50, 40 + index), near_desc);
        assert_eq!(pair.near.transfer(send(), &[part]).expect("send"), 40 + index);
    }
    for index in 0..3_u64 {
        let done = pair.far.wait();
        assert_eq!((done.context, done.result.expect("receive")), (index, 40 + index));
        let (at, len) = (index as usize, 40 + index as usize);
        assert_eq!(to.get(at * 100, len), bytes[at * 50..at * 50 + len]);
    }

    pair.far.post(receive(), &[segment(to.part(0, 16), far_desc)], 9).expect("receive");
    let error =
        pair.near.transfer(send(), &[segment(from.part(0, 64), near_desc)]).expect_err("too long");
    // The target's NIC may report "invalid request (9)", which has a specific cause, or "operation
    // error (11)" (rxe).
    let status = error.driver().map(|code| code.code);
    assert!(error.kind() == ErrorKind::Truncated || status == Some(11), "{error}");
    let error = pair.far.wait().result.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
    Ok(())
}

fn lists_on_both_sides_move_as_one_run_of_bytes() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(16384), Pages::new(16384));
    let bytes = from.fill(9);
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let desc = near.desc().expect("desc");
    let ranges = [to.part(8192, 1000), to.part(100, 3000)];
    // SAFETY: the pages outlive the region.
    let memory = unsafe { Raw::new(Box::from(ranges), Promise::ReadWrite) };
    let far = pair.far.domain.register(memory, REMOTE).expect("register two ranges");
    let key = far.key().expect("key");
    assert_eq!(key.pieces().count(), 2);
    assert_eq!(key.as_u64().expect_err("two keys").kind(), ErrorKind::Unsupported);
    let local: Vec<_> = (0..40).map(|index| segment(from.part(index * 300, 100), desc)).collect();
    let at = |address: u64, len| hmem_core::transfer::RemoteSegment {
        address: hmem_core::Iova(address),
        len,
        key: &key,
    };
    let far_list = [at(ranges[0].start().0, 1000), at(ranges[1].start().0, 3000)];
    assert_eq!(
        pair.near.transfer(Operation::Write { remote: &far_list }, &local).expect("write"),
        4000
    );
    let sent: Vec<u8> =
        (0..40).flat_map(|index| bytes[index * 300..index * 300 + 100].to_vec()).collect();
    assert_eq!(to.get(8192, 1000), sent[..1000]);
    assert_eq!(to.get(100, 3000), sent[1000..]);
    assert_eq!(to.get(3100, 64), [0; 64]);
    Ok(())
}

/// Writes to a peer with a closed endpoint. The write must fail with Unreachable, since a peer that
/// does not answer may be down.
fn transfer_to_a_dead_peer_is_unreachable() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let far = pair.far.register(to.range(), REMOTE).expect("register");
    let key = far.key().expect("key");
    pair.far.endpoint.close().expect("close");
    let local = segment(from.range(), near.desc().expect("desc"));
    let error = pair.near.write(local, remote(&key, 0, 4096)).expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert_eq!(error.driver().map(|code| code.code), Some(12), "{error}");
    assert!(
        error.remedy_text().is_some_and(|remedy| remedy.contains("does not answer")),
        "{error}"
    );
    assert_eq!(to.get(0, 4096), [0; 4096]);
    pair.near.endpoint.close().expect("close");
    near.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(
        (pair.near.domain.live().endpoints, pair.near.domain.live().page_registrations),
        (0, 0)
    );
    Ok(())
}

fn region_of_parallel_registrations_works_as_one() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let page = rustix::param::page_size();
    let len = 40 * page + 100;
    let (from, to) = (Pages::new(len), Pages::new(len));
    let bytes = from.fill(41);
    // SAFETY: the pages outlive the region.
    let memory = unsafe { Raw::new(to.part(50, len as u64 - 50), Promise::ReadWrite) };
    let parallel = Parallel { threads: 3, chunk: 8 * page as u64, progress: None };
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let request = Request::new(memory, REMOTE).parallel(parallel);
    let far = pair.far.domain.submit(request).expect("register");
    assert_eq!(pair.far.domain.live().page_registrations, 6);
    let key = RemoteKey::from_bytes(&far.key().expect("key").to_bytes()).expect("on the wire");
    let local = segment(from.part(50, len as u64 - 50), near.desc().expect("desc"));
    pair.near.write(local, remote(&key, 0, len as u64 - 50)).expect("write over every seam");
    assert_eq!(to.get(50, len - 50), bytes[50..]);
    far.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(pair.far.domain.live().page_registrations, 0);
    Ok(())
}

fn region_over_the_device_limit_works_as_one() -> Outcome {
    let name = device()?;
    let page = rustix::param::page_size();
    let pair = Pair::with(&name, Verbs::builder().max_registration(3 * page as u64));
    let len = 10 * page + 100;
    let (from, to) = (Pages::new(len), Pages::new(len));
    let bytes = from.fill(77);
    let near = pair.near.register(from.part(50, len as u64 - 50), LOCAL).expect("register");
    let far = pair.far.register(to.part(50, len as u64 - 50), REMOTE).expect("register");
    assert_eq!(pair.far.domain.live().regions, 1);
    assert_eq!(pair.far.domain.live().page_registrations, 4);
    let key = far.key().expect("key");
    assert_eq!(
        key.pieces().map(|piece| piece.len).sum::<u64>(),
        len as u64 - 50,
        "nothing is clipped"
    );
    let wire = RemoteKey::from_bytes(&key.to_bytes()).expect("a split key survives the wire");
    let whole = segment(from.part(50, len as u64 - 50), near.desc().expect("desc"));
    pair.near.write(whole, remote(&wire, 0, len as u64 - 50)).expect("write across the seams");
    assert_eq!(to.get(50, len - 50), bytes[50..]);
    let raw = far.raw_key().expect("raw key");
    let mapped = pair.near.domain.map_raw(far.base_addr(), far.len(), &raw).expect("map");
    from.put(0, &vec![0; len]);
    pair.near.read(whole, remote(&mapped, 0, len as u64 - 50)).expect("read over the mapped key");
    assert_eq!(from.get(50, len - 50), bytes[50..]);
    pair.near.domain.unmap_key(&mapped).expect("unmap");
    far.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(pair.far.domain.live().page_registrations, 0);
    Ok(())
}

fn invalid_keys_are_refused_by_the_peer() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    from.fill(1);
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let local = |len| segment(from.part(0, len), near.desc().expect("desc"));
    let refused = |what: &str, key: &RemoteKey, offset: u64, write: bool| {
        let far = remote(key, offset, 64);
        let result =
            if write { pair.near.write(local(64), far) } else { pair.near.read(local(64), far) };
        let error = result.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{what}: {error}");
        assert_eq!(error.driver().map(|code| code.code), Some(10), "{what}: {error}");
        assert!(format!("{error:#}").contains("remote access error (10)"), "{what}: {error}");
        assert_eq!(to.get(0, 4096), [0; 4096], "{what} moved bytes");
        pair.connect();
    };
    let region = pair.far.register(to.range(), REMOTE).expect("register");
    let stale = region.key().expect("key");
    region.close().map_err(|rejected| rejected.error).expect("close");
    refused("a stale key", &stale, 0, true);

    let read_only = pair.far.register(to.range(), Access::REMOTE_READ).expect("register");
    refused("a write without REMOTE_WRITE", &read_only.key().expect("key"), 0, true);
    let write_only = pair.far.register(to.range(), Access::REMOTE_WRITE).expect("register");
    refused("a read without REMOTE_READ", &write_only.key().expect("key"), 0, false);
    refused("one byte past the end", &write_only.key().expect("key"), 4096 - 63, true);
    // This is the near side's own key. The far side has another protection domain, which does not
    // know the key.
    let foreign = pair.near.register(to.range(), REMOTE).expect("register");
    refused("another domain's key", &foreign.key().expect("key"), 0, true);
    pair.near
        .write(local(64), remote(&write_only.key().expect("key"), 0, 64))
        .expect("the endpoint still works");
    Ok(())
}

fn invalid_local_segments_keep_the_connection() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let far = pair.far.register(to.range(), REMOTE).expect("register");
    let key = far.key().expect("key");
    let sender = pair.near.register(from.range(), Access::SEND).expect("register");
    let desc = sender.desc().expect("desc");
    let target = || remote(&key, 0, 64);
    let kind = |result: hmem_core::Result<u64>| result.expect_err("refused").kind();
    assert_eq!(
        kind(pair.near.read(segment(from.part(0, 64), desc), target())),
        ErrorKind::AccessDenied
    );
    assert_eq!(
        kind(pair.near.write(segment(from.part(0, 64), desc), target())),
        ErrorKind::AccessDenied
    );
    let none = LocalSegment { desc: None, ..segment(from.part(0, 64), desc) };
    assert_eq!(kind(pair.near.write(none, target())), ErrorKind::NoRegion);
    let unknown = LocalSegment { desc: Some(LocalKey::from_provider(0xdead_beef)), ..none };
    assert_eq!(kind(pair.near.write(unknown, target())), ErrorKind::NoRegion);
    let writer = pair.near.register(from.range(), Access::WRITE).expect("register");
    let past = LocalSegment {
        address: Address(from.address + 4090),
        ..segment(from.part(0, 64), writer.desc().expect("desc"))
    };
    assert_eq!(kind(pair.near.write(past, target())), ErrorKind::OutOfBounds);
    let tagged = Operation::Send { tag: Some(1), invalidate: None };
    assert_eq!(kind(pair.near.transfer(tagged, &[])), ErrorKind::Unsupported);
    let fine = segment(from.part(0, 64), writer.desc().expect("desc"));
    pair.near.write(fine, target()).expect("the NIC got none of the invalid requests");
    Ok(())
}

fn supported_atomics_work_and_others_are_refused() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let near = pair.near.register(from.range(), LOCAL).expect("register");
    let far = pair.far.register(to.range(), REMOTE).expect("register");
    let (desc, key) = (near.desc().expect("desc"), far.key().expect("key"));
    let word = |slot: u64| segment(from.part(slot * 8, 8), desc);
    to.put(0, &40_u64.to_ne_bytes());
    from.put(0, &2_u64.to_ne_bytes());
    pair.near
        .atomic(AtomicOp::Sum, remote(&key, 0, 8), word(0), Some(word(1)), None)
        .expect("fetch and add");
    assert_eq!(from.get(8, 8), 40_u64.to_ne_bytes());
    assert_eq!(to.get(0, 8), 42_u64.to_ne_bytes());
    pair.near.atomic(AtomicOp::Sum, remote(&key, 0, 8), word(0), None, None).expect("add");
    assert_eq!(to.get(0, 8), 44_u64.to_ne_bytes());
    from.put(16, &44_u64.to_ne_bytes());
    from.put(0, &7_u64.to_ne_bytes());
    pair.near
        .atomic(AtomicOp::Cswap, remote(&key, 0, 8), word(0), Some(word(1)), Some(word(2)))
        .expect("compare and swap");
    assert_eq!(
        (from.get(8, 8), to.get(0, 8)),
        (44_u64.to_ne_bytes().to_vec(), 7_u64.to_ne_bytes().to_vec())
    );
    let error = pair
        .near
        .atomic(AtomicOp::Max, remote(&key, 0, 8), word(0), None, None)
        .expect_err("no such atomic");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(format!("{error:#}").contains("fetch-and-add"), "{error}");
    let error = pair
        .near
        .atomic(AtomicOp::Sum, remote(&key, 4, 8), word(0), None, None)
        .expect_err("misaligned");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    Ok(())
}

/// The refused access ends the connection. One call on each side recovers it without an exchange of
/// names, and reports the outstanding requests.
fn reconnect_recovers_both_sides_after_a_refused_access() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (near, far) = (&pair.near, &pair.far);
    let pages = Pages::new(12288);
    let source = near.register(pages.part(0, 4096), LOCAL).expect("register");
    let inbox = far.register(pages.part(8192, 4096), LOCAL).expect("register");
    let (desc, into) = (source.desc().expect("desc"), inbox.desc().expect("desc"));
    let receive = Operation::Receive { tag: None, from: None };
    for round in 0..3 {
        let closed = far.register(pages.part(4096, 4096), REMOTE).expect("register");
        let stale = closed.key().expect("key");
        closed.close().map_err(|rejected| rejected.error).expect("close");
        let far_into = [segment(pages.part(8192, 64), into)];
        far.post(receive, &far_into, 1).expect("post a receive");
        near.post(receive, &[segment(pages.part(64, 64), desc)], 2).expect("post a receive");
        let error = near
            .write(segment(pages.part(0, 64), desc), remote(&stale, 0, 64))
            .expect_err("the region is closed");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "round {round}: {error}");
        near.endpoint.reconnect().expect("connect the near side");
        far.endpoint.reconnect().expect("connect the far side");
        for (side, context) in [(far, 1), (near, 2)] {
            let mut out = Vec::new();
            assert_eq!(side.cq.read(&mut out, 8).expect("read completions"), 1, "{out:?}");
            let ended = out.remove(0);
            assert_eq!(ended.context, context);
            assert_eq!(ended.result.unwrap_err().kind(), ErrorKind::Canceled);
        }
        let target = far.register(pages.part(4096, 4096), REMOTE).expect("register again");
        let key = target.key().expect("key");
        near.write(segment(pages.part(0, 64), desc), remote(&key, 0, 64)).expect("write");
        far.post(receive, &far_into, 3).expect("post a receive");
        let message = Operation::Send { tag: None, invalidate: None };
        near.transfer(message, &[segment(pages.part(0, 64), desc)]).expect("send");
        assert_eq!(far.wait().result.expect("receive"), 64);
    }
    Ok(())
}

fn keys_work_on_an_application_protection_domain() -> Outcome {
    let name = device()?;
    let lender = Pair::new(&name);
    let pd = VerbsDomain::of(&lender.far.domain).expect("verbs").pd();
    // SAFETY: the lender outlives the borrower.
    let borrower = unsafe { Verbs::builder().with_pd(pd, ()) }.expect("use the protection domain");
    let domain = support::open(&borrower, &name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let bytes = from.fill(4);
    // The borrower registers memory, and the lender's queue pair accesses the memory.
    let guest = support::Side::new(domain);
    let region = guest.register(to.range(), REMOTE).expect("register");
    let source = lender.near.register(from.range(), LOCAL).expect("register");
    let key = region.key().expect("key");
    lender
        .near
        .write(segment(from.range(), source.desc().expect("desc")), remote(&key, 0, 4096))
        .expect("the key works on the lender's endpoint");
    assert_eq!(to.get(0, 4096), bytes);
    Ok(())
}

/// Closes a local region while reads into it are in flight, and waits for the reads. The memory
/// must not change after the close. The test repeats this until a read fails, which shows that the
/// read was in flight.
fn closing_a_local_region_ends_reads_into_it() -> Outcome {
    const LEN: usize = 1 << 20;
    const TRANSFERS: u64 = 8;
    let name = device()?;
    for round in 1..=20 {
        let pair = Pair::new(&name);
        let (sink, source) = (Pages::new(LEN), Pages::new(LEN));
        source.fill(round);
        let near = pair.near.register(sink.range(), LOCAL).expect("register");
        let far = pair.far.register(source.range(), REMOTE).expect("register");
        let (key, desc) = (far.key().expect("key"), near.desc().expect("desc"));
        let (from, into) = ([remote(&key, 0, LEN as u64)], [segment(sink.range(), desc)]);
        for context in 0..TRANSFERS {
            pair.near.post(Operation::Read { remote: &from }, &into, context).expect("post");
        }
        near.close().map_err(|rejected| rejected.error).expect("close");
        let at_close = sink.get(0, LEN);
        let ended: Vec<_> = (0..TRANSFERS).map(|_| pair.near.wait().result).collect();
        assert!(sink.get(0, LEN) == at_close, "memory was touched after close returned");
        if ended.iter().any(Result::is_err) {
            return Ok(());
        }
    }
    Err(Skipped(format!("{name} had ended every read when the region was closed")))
}
