//! P2P-06: the same transfers move the same bytes on every path, and the policy selects the path.

use hmem::{DomainAttr, ErrorKind, MrFlags, Path, fabric, path::P2pPolicy, transfer::Operation};

use crate::{
    config::{TestConfig, over_configs},
    memory::pattern,
    net::{LOCAL, Net, REMOTE, Setup, mr_attr, remote, segment},
};

over_configs! {
    /// P2P-06
    transfers_give_the_same_bytes_on_every_path: Every;
    /// P2P-06
    the_path_follows_the_policy: Pairwise;
}

const LEN: usize = 300 << 10;

fn transfers_give_the_same_bytes_on_every_path(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, LEN));
    let mut model = pattern(1, LEN);
    let region = net.expose(memory.range(), REMOTE | LOCAL);
    let key = net.key(&region);
    let local = net.local(LEN, LOCAL);
    let mut local_model = pattern(2, LEN);
    local.bytes.put(0, &local_model);
    // Sizes around those of pages, copy chunks and words, at unaligned offsets.
    for (at, from, len) in [
        (0, 0, 1),
        (1, 7, 4095),
        (4095, 4096, 8193),
        (70_001, 3, 65_537),
        (262_143, 9, 2),
        (12_345, 40_000, 200_000),
    ] {
        let to = [remote(&key, at as u64, len as u64)];
        let moved = net
            .transfer(Operation::Write { remote: &to }, &[local.segment(from as u64, len as u64)]);
        assert_eq!(moved.expect("write"), len as u64);
        model[at..at + len].copy_from_slice(&local_model[from..from + len]);
    }
    for (at, into, len) in [(5, 1, 1), (0, 100_001, 70_000), (4090, 4097, 12)] {
        let from = [remote(&key, at as u64, len as u64)];
        net.transfer(Operation::Read { remote: &from }, &[local.segment(into as u64, len as u64)])
            .expect("read");
        local_model[into..into + len].copy_from_slice(&model[at..at + len]);
    }
    // Several pieces on both sides, cut at different places.
    let to = [remote(&key, 100, 33), remote(&key, 200_000, 10_000), remote(&key, 7, 1)];
    let from = [local.segment(50, 9_000), local.segment(1, 1), local.segment(30_000, 1_033)];
    net.transfer(Operation::Write { remote: &to }, &from).expect("vectored write");
    let run = [&local_model[50..9_050], &local_model[1..2], &local_model[30_000..31_033]].concat();
    model[100..133].copy_from_slice(&run[..33]);
    model[200_000..210_000].copy_from_slice(&run[33..10_033]);
    model[7..8].copy_from_slice(&run[10_033..]);
    // The message has several pieces too.
    let into = segment(memory.part(250_000, 5_000), Some(region.desc().expect("desc")));
    let (sent, received) = net.send(local.segment(11, 4_999), into);
    assert_eq!((sent.expect("send"), received.expect("receive")), (4_999, 4_999));
    model[250_000..254_999].copy_from_slice(&local_model[11..5_010]);
    assert!(memory.all() == model, "the target's bytes differ from the model's");
    assert!(local.bytes.all() == local_model, "the initiator's bytes differ from the model's");
}

fn the_path_follows_the_policy(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    let decision = region.decision().expect("decision");
    let expected = match (config.is_system(), config.policy) {
        (true, _) => Path::PlainHost,
        (false, P2pPolicy::Disabled) => Path::Staged,
        (false, _) => Path::DmaBuf,
    };
    assert_eq!(decision.path, expected, "{decision}");
    let last = decision.attempts.last().expect("at least the attempt that worked");
    assert!(last.path == expected && last.error.is_none(), "{decision}");
    assert_eq!(decision.iface, region.iface().unwrap().0);
    if let Some(device) = &net.device {
        let exports = device.stats().calls(hmem::system::DeviceCall::ExportDmaBuf);
        assert_eq!(
            exports,
            u64::from(expected == Path::DmaBuf),
            "a device handle went to the NIC, or none did"
        );
    }
}

/// P2P-06
#[test]
fn blocked_path_fails_if_required_and_falls_back_if_enabled() {
    use crate::config::Memory;
    use hmem::system::FreeDetection;
    let config =
        TestConfig { memory: Memory::Device(FreeDetection::Identity), ..TestConfig::PLAIN };
    let setup = Setup::of(&config);
    let attr = |p2p| DomainAttr { p2p, ..setup.target.clone() };
    let policies = [P2pPolicy::Required, P2pPolicy::Enabled, P2pPolicy::Preferred].map(attr);
    let net = setup.open();
    let memory = net.filled(&pattern(3, 64));
    net.device
        .as_ref()
        .unwrap()
        .set_exportable(memory.range().start(), false)
        .expect("the test's own memory");
    let ranges = [memory.range()];
    let [required, enabled, preferred] = policies.map(|attr| {
        let domain = net.hmem.domain(crate::net::LOOPBACK, attr).expect("open");
        let region = fabric::regattr(&domain, &mr_attr(&ranges, REMOTE).key(1), MrFlags::empty());
        assert_eq!(domain.live().regions, u64::from(region.is_ok()));
        region
    });
    let error = required.expect_err("a copy instead of the direct path that was required");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.trace()[0].call.starts_with("segments("), "{error}");
    for region in [enabled, preferred] {
        let region = region.expect("staged instead");
        let decision = region.decision().unwrap();
        assert_eq!(decision.path, Path::Staged);
        assert!(
            decision.attempts[0].path == Path::DmaBuf && decision.attempts[0].error.is_some(),
            "{decision}"
        );
    }
}
