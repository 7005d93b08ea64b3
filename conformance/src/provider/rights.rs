//! Behaviours of rights and bounds: every access is checked against the rights and bounds of its
//! key, at the initiator and at the target.

use hmem_core::{
    Access, AddressRange, ErrorKind, RemoteKey, Result,
    transfer::{AtomicOp, AtomicType, Operation},
};

use super::{case::Case, link::CaseLink};
use crate::link::{Bytes, LOCAL, REMOTE, remote, segment};
use crate::{
    bytes::pattern,
    trial::{Outcome, skip},
};

pub(super) fn overlapping_regions_grant_each_their_own_rights(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(1, 4096));
    let reads = link.expose(memory.part(0, 3000), Access::REMOTE_READ);
    let writes = link.expose(memory.part(1000, 3096), Access::REMOTE_WRITE);
    let neither = link.expose(memory.part(500, 3000), LOCAL);
    let (reader, writer, locked) = (link.key(&reads), link.key(&writes), link.key(&neither));
    let denied = |result: Result<()>| {
        case.assert_refused(result, ErrorKind::AccessDenied, "an access without its right");
    };
    denied(link.push(&reader, 1500, &[0]).map(drop));
    denied(link.pull(&writer, 500, 1).map(drop));
    denied(link.push(&locked, 1000, &[0]).map(drop));
    denied(link.pull(&locked, 1000, 1).map(drop));
    assert_eq!(memory.all(), pattern(1, 4096), "a refused access moved bytes");
    link.push(&writer, 500, b"through the writer").expect("write");
    assert_eq!(link.pull(&reader, 1500, 18).expect("read"), b"through the writer");
    // Closing one region does not affect the others.
    writes.close().expect("close");
    denied(link.push(&reader, 1500, &[0]).map(drop));
    link.assert_dead(&writer, 500, ErrorKind::InvalidKey, "an access to a closed region");
    link.pull(&reader, 0, 3000).expect("read");
}

pub(super) fn peers_get_the_rights_of_the_key_and_no_others(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(2, 256));
    for access in
        [Access::empty(), Access::REMOTE_READ, Access::REMOTE_WRITE, REMOTE, LOCAL, LOCAL | REMOTE]
    {
        let region = link.expose(memory.range(), access);
        let key = link.key(&region);
        let check = |result: Result<()>, right| {
            let what = format!("{right} with {access}");
            match result {
                Ok(()) => assert!(access.contains(right), "{what} succeeded"),
                Err(why) if access.contains(right) => panic!("{what}: {why}"),
                refused => case.assert_refused(refused, ErrorKind::AccessDenied, &what),
            }
        };
        check(link.pull(&key, 10, 20).map(drop), Access::REMOTE_READ);
        check(link.push(&key, 10, &[1; 20]).map(drop), Access::REMOTE_WRITE);
        let changed = memory.get(10, 20) == [1; 20];
        assert_eq!(changed, access.contains(Access::REMOTE_WRITE), "with {access}");
        memory.put(0, &pattern(2, 256));
        region.close().expect("close");
    }
}

pub(super) fn sub_region_of_a_region_without_rights_may_read(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(1, 4096));
    let region = link.expose(memory.part(0, 4096), Access::empty());
    let range = memory.part(100, 50);
    let sub = region.sub(range, Access::REMOTE_READ, link.fresh_key()).expect("it only reads");
    link.target.make_usable(&sub);
    let bytes = link.pull(&link.key(&sub), 0, 50).expect("read");
    assert_eq!(bytes, pattern(1, 4096)[100..150]);
    let refused = region.sub(range, Access::REMOTE_WRITE, link.fresh_key()).unwrap_err();
    assert_eq!((refused.kind(), refused.operation()), (ErrorKind::AccessDenied, "sub"));
}

pub(super) fn atomics_need_the_right_to_write(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    link.need_atomics()?;
    let memory = link.filled(&40u64.to_le_bytes());
    let reads = link.expose(memory.range(), Access::REMOTE_READ | LOCAL);
    let refused = link.fetch_add(&link.key(&reads), 0, 2);
    case.assert_refused(refused, ErrorKind::AccessDenied, "an atomic without its right");
    assert_eq!(memory.all(), 40u64.to_le_bytes());
    let writes = link.expose(memory.range(), Access::REMOTE_WRITE);
    assert_eq!(link.fetch_add(&link.key(&writes), 0, 2).expect("atomic"), 40);
    assert_eq!(memory.all(), 42u64.to_le_bytes());
    Ok(())
}

/// Asserts that `key` allows exactly the writes, atomics and reads that `access` contains, and that
/// a refused access moves no byte.
fn assert_grants(link: &CaseLink, memory: &Bytes, key: &RemoteKey, access: Access, by: &str) {
    memory.put(0, &40u64.to_le_bytes());
    let check = |granted: bool, result: Result<()>, what: &str| {
        let what = format!("{what} by a {by} with {access}");
        match result {
            Ok(()) => assert!(granted, "{what} succeeded"),
            Err(why) if granted => panic!("{what}: {why}"),
            refused => link.case.assert_refused(refused, ErrorKind::AccessDenied, &what),
        }
    };
    let both = access.contains(Access::REMOTE_WRITE);
    let atomics = both || access.contains(Access::REMOTE_ATOMIC);
    check(atomics, link.fetch_add(key, 0, 2).map(drop), "an atomic");
    let value = if atomics { 42u64 } else { 40 };
    assert_eq!(memory.get(0, 8), value.to_le_bytes(), "an atomic by a {by} with {access}");
    let writes = both || access.contains(Access::REMOTE_RMA_WRITE);
    check(writes, link.push(key, 0, &7u64.to_le_bytes()).map(drop), "a write");
    let value = if writes { 7 } else { value };
    assert_eq!(memory.get(0, 8), value.to_le_bytes(), "a write by a {by} with {access}");
    check(access.contains(Access::REMOTE_READ), link.pull(key, 0, 8).map(drop), "a read");
}

/// Returns every combination of the rights to write memory, without and with the right to read it.
fn rights_to_change() -> impl Iterator<Item = Access> {
    let [both, atomic, write] =
        [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::REMOTE_RMA_WRITE];
    let none = Access::empty();
    let all = both | atomic | write;
    [none, both, atomic, write, atomic | write, both | atomic, both | write, all]
        .into_iter()
        .flat_map(|access| [access, access | Access::REMOTE_READ])
}

pub(super) fn writes_and_atomics_can_be_granted_separately(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    link.need_atomics()?;
    let memory = link.bytes(8);
    for access in rights_to_change() {
        let region = link.expose(memory.range(), access);
        assert_grants(&link, &memory, &link.key(&region), access, "region");
        region.close().expect("close");
    }
    Ok(())
}

pub(super) fn sub_regions_grant_writes_and_atomics_separately(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    link.need_atomics()?;
    let memory = link.bytes(8);
    // A sub-region's rights do not depend on those of its base.
    for base in [REMOTE, Access::REMOTE_ATOMIC, Access::REMOTE_RMA_WRITE] {
        let base = link.expose(memory.range(), base);
        for access in rights_to_change() {
            let sub = base.sub(memory.range(), access, link.fresh_key()).expect("sub-region");
            link.target.make_usable(&sub);
            assert_grants(&link, &memory, &link.key(&sub), access, "sub-region");
            sub.close().expect("close");
        }
        base.close().expect("close");
    }
    Ok(())
}

pub(super) fn windows_grant_writes_and_atomics_separately(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    link.need_atomics()?;
    let memory = link.bytes(8);
    let window = link.target.domain.alloc_type_1_window().expect("window");
    let writable = link.expose(memory.range(), LOCAL | Access::MW_BIND);
    for access in rights_to_change().filter(|access| !access.is_empty()) {
        let key = window.bind(&writable, 0, 8, access).expect("bind");
        assert_grants(&link, &memory, &key, access, "window");
    }
    window.unbind().expect("unbind");
    let read_only = Access::SEND | Access::WRITE | Access::MW_BIND;
    let read_only = link.expose(memory.range(), read_only);
    for access in [Access::REMOTE_ATOMIC, Access::REMOTE_RMA_WRITE] {
        let error = window.bind(&read_only, 0, 8, access).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{access} on a region that is read only");
    }
    Ok(())
}

pub(super) fn one_byte_past_either_end_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(4, 1024));
    let region = link.expose(memory.part(100, 500), REMOTE);
    let key = link.key(&region);
    let past = u64::MAX;
    for (offset, len) in [
        (500, 1),
        (499, 2),
        (0, 501),
        (past, 1),
        (past, 2),
        (past - 99, 200),
        (501, 1),
        (1 << 40, 1),
    ] {
        let what = format!("an access of {len} bytes at {offset:#x}");
        let write = link.push(&key, offset, &vec![0xFF; len as usize]);
        case.assert_refused(write, ErrorKind::OutOfBounds, &what);
        case.assert_refused(link.pull(&key, offset, len), ErrorKind::OutOfBounds, &what);
    }
    assert_eq!(memory.all(), pattern(4, 1024), "a refused access moved bytes");
    if case.control.is_some() {
        // The NIC checks every segment before it moves the first byte.
        let local = link.local(13, LOCAL);
        let list = [remote(&key, 0, 8), remote(&key, 496, 5)];
        let write = link.transfer(Operation::Write { remote: &list }, &[local.segment(0, 13)]);
        case.assert_refused(write, ErrorKind::OutOfBounds, "a list whose last segment is outside");
    }
    assert_eq!(memory.all(), pattern(4, 1024), "a refused access moved bytes");
    link.push(&key, 0, &[1; 500]).expect("the whole region");
    assert_eq!(
        (memory.get(99, 1), memory.get(600, 1)),
        (pattern(4, 1024)[99..100].to_vec(), pattern(4, 1024)[600..601].to_vec())
    );
}

pub(super) fn local_buffers_need_the_right_of_their_operation(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[5; 64]);
    let region = link.expose(memory.range(), REMOTE | LOCAL);
    let key = link.key(&region);
    let there = [remote(&key, 0, 32)];
    for missing in LOCAL.iter() {
        let local = link.local(64, LOCAL - missing);
        local.bytes.put(0, &[6; 64]);
        let part = [local.segment(0, 32)];
        let refused = |result: Result<u64>, needs: Access| {
            let kind = result.map(drop).map_err(|error| error.kind());
            let expected = if needs == missing { Err(ErrorKind::AccessDenied) } else { Ok(()) };
            assert_eq!(kind, expected, "{needs} without {missing}");
        };
        refused(link.transfer(Operation::Write { remote: &there }, &part), Access::WRITE);
        memory.put(0, &[5; 64]);
        refused(link.transfer(Operation::Read { remote: &there }, &part), Access::READ);
        local.bytes.put(0, &[6; 64]);
        let whole = segment(memory.part(32, 32), Some(region.desc().expect("desc")));
        refused(link.send(part[0], whole).0, Access::SEND);
    }
}

pub(super) fn receives_need_the_right_recv_and_stay_in_bounds(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[5; 64]);
    let deaf = link.expose(memory.range(), REMOTE | (LOCAL - Access::RECV));
    let voice = link.local(32, LOCAL);
    let into = segment(memory.part(0, 32), Some(deaf.desc().expect("desc")));
    let (_, received) = link.send(voice.segment(0, 32), into);
    assert_eq!(received.unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(memory.all(), [5; 64]);
    let open = link.expose(memory.range(), LOCAL);
    let outside = segment(
        AddressRange::new(memory.range().start(), 65).expect("range"),
        Some(open.desc().expect("desc")),
    );
    let beyond = link.send(voice.segment(0, 32), outside).1.unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::OutOfBounds, "a local buffer past its region");
}

pub(super) fn atomic_read_needs_a_right_to_read_or_to_atomics(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    link.need_atomics()?;
    let memory = link.filled(&40u64.to_le_bytes());
    let local = link.local(8, LOCAL);
    for (access, granted) in [
        (Access::empty(), false),
        (Access::REMOTE_RMA_WRITE, false),
        (Access::REMOTE_READ, true),
        (Access::REMOTE_ATOMIC, true),
        (Access::REMOTE_WRITE, true),
    ] {
        let region = link.expose(memory.range(), access);
        let key = link.key(&region);
        local.bytes.put(0, &[0; 8]);
        let operation = Operation::Atomic {
            op: AtomicOp::AtomicRead,
            datatype: AtomicType::U64,
            remote: remote(&key, 0, 8),
            result: Some(local.segment(0, 8)),
            compare: None,
        };
        let read = link.transfer(operation, &[]);
        if let Err(why) = &read
            && why.is_unsupported()
        {
            return skip(why.to_string());
        }
        if granted {
            assert_eq!(read.expect("atomic read"), 8, "{access}");
        } else {
            case.assert_refused(read, ErrorKind::AccessDenied, &format!("a read with {access}"));
        }
        let expected = if granted { 40u64 } else { 0 };
        assert_eq!(local.bytes.all(), expected.to_le_bytes(), "{access}");
    }
    Ok(())
}
