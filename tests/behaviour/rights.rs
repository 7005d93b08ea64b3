//! MR-08 and MR-09: every access is checked against the rights and bounds of its key, on both
//! sides.

use hmem::{
    Access, Error, ErrorKind, MrMode, RemoteKey,
    transfer::{AtomicOp, AtomicType, Operation},
};

use crate::{
    config::{Need, TestConfig, need, needs, over_configs},
    memory::{Bytes, pattern},
    net::{LOCAL, Net, REMOTE, remote, segment},
};

over_configs! {
    /// MR-08
    overlapping_regions_grant_each_its_own_rights: Every;
    /// MR-09
    peers_get_the_rights_of_the_key_and_no_others: Every;
    /// MR-09
    a_region_without_rights_grants_nothing: Every;
    /// MR-09
    a_sub_region_of_a_region_without_rights_may_read: Pairwise, needs::SUB_REGIONS;
    /// MR-09
    atomics_need_the_right_to_write: Pairwise, needs::ATOMICS;
    /// MR-09
    writes_and_atomics_can_be_granted_separately: Pairwise, needs::ATOMICS;
    /// MR-09
    sub_regions_grant_writes_and_atomics_separately: Pairwise, needs::ATOMICS, needs::SUB_REGIONS;
    /// MR-09, MW-05
    windows_grant_writes_and_atomics_separately: Pairwise, needs::ATOMICS, needs::KEYS_AT_HAND,
        needs::WINDOWS;
    /// MR-09
    one_byte_past_either_end_fails_and_moves_nothing: Every;
    /// MR-09
    local_buffers_need_the_right_of_their_operation: Pairwise, LOCAL_MODE;
    /// MR-09
    receives_need_the_right_recv_and_stay_in_bounds: Pairwise, LOCAL_MODE;
}

const LOCAL_MODE: Need =
    need("modes without LOCAL", "local buffers need no registration there", |config| {
        config.has(MrMode::LOCAL)
    });

fn overlapping_regions_grant_each_its_own_rights(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 4096));
    let reads = net.expose(memory.part(0, 3000), Access::REMOTE_READ);
    let writes = net.expose(memory.part(1000, 3096), Access::REMOTE_WRITE);
    let neither = net.expose(memory.part(500, 3000), LOCAL);
    let (reader, writer, locked) = (net.key(&reads), net.key(&writes), net.key(&neither));
    let denied = |result: Result<u64, Error>| {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::AccessDenied)
    };
    denied(net.push(&reader, 1500, &[0]));
    denied(net.pull(&writer, 500, 1).map(|_| 0));
    denied(net.push(&locked, 1000, &[0]));
    denied(net.pull(&locked, 1000, 1).map(|_| 0));
    assert_eq!(memory.all(), pattern(1, 4096), "a refused access moved bytes");
    net.push(&writer, 500, b"through the writer").expect("write");
    assert_eq!(net.pull(&reader, 1500, 18).expect("read"), b"through the writer");
    // Closing one region does not affect the others.
    writes.close().expect("close");
    denied(net.push(&reader, 1500, &[0]));
    assert_eq!(net.push(&writer, 500, &[0]).unwrap_err().kind(), net.seen(ErrorKind::InvalidKey));
    net.pull(&reader, 0, 3000).expect("read");
}

fn peers_get_the_rights_of_the_key_and_no_others(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(2, 256));
    for access in
        [Access::empty(), Access::REMOTE_READ, Access::REMOTE_WRITE, REMOTE, LOCAL, LOCAL | REMOTE]
    {
        let region = net.expose(memory.range(), access);
        let key = net.key(&region);
        let read = net.pull(&key, 10, 20).map(|_| ()).map_err(|error| error.kind());
        assert_eq!(
            read.is_ok(),
            access.contains(Access::REMOTE_READ),
            "read with {access}: {read:?}"
        );
        let write = net.push(&key, 10, &[1; 20]).map(|_| ()).map_err(|error| error.kind());
        assert_eq!(
            write.is_ok(),
            access.contains(Access::REMOTE_WRITE),
            "write with {access}: {write:?}"
        );
        for refused in [read, write].into_iter().filter_map(Result::err) {
            assert_eq!(refused, ErrorKind::AccessDenied, "with {access}");
        }
        let changed = memory.get(10, 20) == [1; 20];
        assert_eq!(changed, access.contains(Access::REMOTE_WRITE), "with {access}");
        memory.put(0, &pattern(2, 256));
        region.close().expect("close");
    }
}

fn a_region_without_rights_grants_nothing(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 4096));
    let region = net.expose(memory.part(0, 4096), Access::empty());
    let key = net.key(&region);
    assert_eq!(net.push(&key, 0, &[0]).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(net.pull(&key, 0, 1).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(memory.all(), pattern(1, 4096), "a refused access moved bytes");
    region.close().expect("close");
}

fn a_sub_region_of_a_region_without_rights_may_read(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 4096));
    let region = net.expose(memory.part(0, 4096), Access::empty());
    let range = memory.part(100, 50);
    let sub = region.sub(range, Access::REMOTE_READ, net.fresh_key()).expect("it only reads");
    net.target.make_usable(&sub).expect("bind and enable");
    let bytes = net.pull(&net.key(&sub), 0, 50).expect("read");
    assert_eq!(bytes, pattern(1, 4096)[100..150]);
    let refused = region.sub(range, Access::REMOTE_WRITE, net.fresh_key()).unwrap_err();
    assert_eq!((refused.kind(), refused.operation()), (ErrorKind::AccessDenied, "sub"));
}

fn atomics_need_the_right_to_write(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&40u64.to_le_bytes());
    let reads = net.expose(memory.range(), Access::REMOTE_READ | LOCAL);
    let refused = net.fetch_add(&net.key(&reads), 0, 2).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AccessDenied);
    assert_eq!(memory.all(), 40u64.to_le_bytes());
    let writes = net.expose(memory.range(), Access::REMOTE_WRITE);
    assert_eq!(net.fetch_add(&net.key(&writes), 0, 2).expect("atomic"), 40);
    assert_eq!(memory.all(), 42u64.to_le_bytes());
}

/// Asserts that `key` allows exactly the writes, atomics and reads that `access` contains, and that
/// a refused access moves no byte.
fn assert_grants(net: &Net, memory: &Bytes, key: &RemoteKey, access: Access, by: &str) {
    memory.put(0, &40u64.to_le_bytes());
    let outcome = |result: Result<u64, Error>| result.map(|_| ()).map_err(|error| error.kind());
    let expected = |granted| if granted { Ok(()) } else { Err(ErrorKind::AccessDenied) };
    let both = access.contains(Access::REMOTE_WRITE);
    let atomics = both || access.contains(Access::REMOTE_ATOMIC);
    let added = outcome(net.fetch_add(key, 0, 2));
    assert_eq!(added, expected(atomics), "an atomic by a {by} with {access}");
    let value = if atomics { 42u64 } else { 40 };
    assert_eq!(memory.get(0, 8), value.to_le_bytes(), "an atomic by a {by} with {access}");
    let writes = both || access.contains(Access::REMOTE_RMA_WRITE);
    let written = outcome(net.push(key, 0, &7u64.to_le_bytes()));
    assert_eq!(written, expected(writes), "a write by a {by} with {access}");
    let value = if writes { 7 } else { value };
    assert_eq!(memory.get(0, 8), value.to_le_bytes(), "a write by a {by} with {access}");
    let read = outcome(net.pull(key, 0, 8).map(|_| 0));
    assert_eq!(read, expected(access.contains(Access::REMOTE_READ)), "a read by a {by}");
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

fn writes_and_atomics_can_be_granted_separately(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8);
    for access in rights_to_change() {
        let region = net.expose(memory.range(), access);
        assert_grants(&net, &memory, &net.key(&region), access, "region");
        region.close().expect("close");
    }
}

fn sub_regions_grant_writes_and_atomics_separately(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8);
    // A sub-region's rights do not depend on those of its base.
    for base in [REMOTE, Access::REMOTE_ATOMIC, Access::REMOTE_RMA_WRITE] {
        let base = net.expose(memory.range(), base);
        for access in rights_to_change() {
            let sub = base.sub(memory.range(), access, net.fresh_key()).expect("sub-region");
            net.target.make_usable(&sub).expect("bind and enable");
            assert_grants(&net, &memory, &net.key(&sub), access, "sub-region");
            sub.close().expect("close");
        }
        base.close().expect("close");
    }
}

fn windows_grant_writes_and_atomics_separately(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8);
    let window = net.target.domain.alloc_type_1_window().expect("window");
    let writable = net.expose(memory.range(), LOCAL | Access::MW_BIND);
    for access in rights_to_change().filter(|access| !access.is_empty()) {
        let key = window.bind(&writable, 0, 8, access).expect("bind");
        assert_grants(&net, &memory, &key, access, "window");
    }
    window.unbind().expect("unbind");
    let read_only = Access::SEND | Access::WRITE | Access::MW_BIND;
    let read_only = net.expose(memory.range(), read_only);
    for access in [Access::REMOTE_ATOMIC, Access::REMOTE_RMA_WRITE] {
        let error = window.bind(&read_only, 0, 8, access).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{access} on a region that is read only");
    }
}

/// MR-09
#[test]
fn an_atomic_read_needs_a_right_to_read_or_to_atomics() {
    let net = Net::open(&TestConfig::PLAIN);
    let memory = net.filled(&40u64.to_le_bytes());
    let result = net.local(8, LOCAL);
    for (access, granted) in [
        (Access::empty(), false),
        (Access::REMOTE_RMA_WRITE, false),
        (Access::REMOTE_READ, true),
        (Access::REMOTE_ATOMIC, true),
        (Access::REMOTE_WRITE, true),
    ] {
        let region = net.expose(memory.range(), access);
        let key = net.key(&region);
        result.bytes.put(0, &[0; 8]);
        let operation = Operation::Atomic {
            op: AtomicOp::AtomicRead,
            datatype: AtomicType::U64,
            remote: remote(&key, 0, 8),
            result: Some(result.segment(0, 8)),
            compare: None,
        };
        let kind = net.transfer(operation, &[]).map_err(|error| error.kind());
        assert_eq!(kind, if granted { Ok(8) } else { Err(ErrorKind::AccessDenied) }, "{access}");
        let expected = if granted { 40u64 } else { 0 };
        assert_eq!(result.bytes.all(), expected.to_le_bytes(), "{access}");
    }
}

fn one_byte_past_either_end_fails_and_moves_nothing(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(4, 1024));
    let region = net.expose(memory.part(100, 500), REMOTE);
    let key = net.key(&region);
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
        let write = net.push(&key, offset, &vec![0xFF; len]).expect_err("wrote outside");
        assert_eq!(
            write.kind(),
            net.seen(ErrorKind::OutOfBounds),
            "write of {len} at {offset:#x}: {write}"
        );
        let read = net.pull(&key, offset, len).expect_err("read outside");
        assert_eq!(
            read.kind(),
            net.seen(ErrorKind::OutOfBounds),
            "read of {len} at {offset:#x}: {read}"
        );
    }
    assert_eq!(memory.all(), pattern(4, 1024), "a refused access moved bytes");
    net.push(&key, 0, &[1; 500]).expect("the whole region");
    assert_eq!(
        (memory.get(99, 1), memory.get(600, 1)),
        (pattern(4, 1024)[99..100].to_vec(), pattern(4, 1024)[600..601].to_vec())
    );
}

fn local_buffers_need_the_right_of_their_operation(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[5; 64]);
    let region = net.expose(memory.range(), REMOTE | LOCAL);
    let key = net.key(&region);
    let remote = [remote(&key, 0, 32)];
    for missing in LOCAL.iter() {
        let local = net.local(64, LOCAL - missing);
        local.bytes.put(0, &[6; 64]);
        let part = [local.segment(0, 32)];
        let refused = |result: Result<u64, Error>, needs: Access| {
            let kind = result.map(|_| ()).map_err(|error| error.kind());
            let expected = if needs == missing { Err(ErrorKind::AccessDenied) } else { Ok(()) };
            assert_eq!(kind, expected, "{needs} without {missing}");
        };
        refused(net.transfer(Operation::Write { remote: &remote }, &part), Access::WRITE);
        memory.put(0, &[5; 64]);
        refused(net.transfer(Operation::Read { remote: &remote }, &part), Access::READ);
        local.bytes.put(0, &[6; 64]);
        let whole = segment(memory.part(32, 32), Some(region.desc().expect("desc")));
        refused(net.send(part[0], whole).0, Access::SEND);
    }
}

fn receives_need_the_right_recv_and_stay_in_bounds(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[5; 64]);
    let deaf = net.expose(memory.range(), REMOTE | (LOCAL - Access::RECV));
    let voice = net.local(32, LOCAL);
    let into = segment(memory.part(0, 32), Some(deaf.desc().expect("desc")));
    let (_, received) = net.send(voice.segment(0, 32), into);
    assert_eq!(received.unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(memory.all(), [5; 64]);
    let open = net.expose(memory.range(), LOCAL);
    let outside = segment(
        hmem::AddressRange::new(memory.range().start(), 65).expect("range"),
        Some(open.desc().expect("desc")),
    );
    let beyond = net.send(voice.segment(0, 32), outside).1.unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::OutOfBounds, "a local buffer past its region");
}
