//! KEY-01 to KEY-06: requesting, closing, sending and mapping keys.

use std::collections::{BTreeMap, BTreeSet};

use hmem::{
    Addressing, AuthKey, ErrorKind, Iova, MrFlags, MrMode, RawKey, RemoteKey, fabric::MrAttr,
};

use crate::{
    child,
    config::{TestConfig, need, needs, over_configs},
    net::{Net, REMOTE, Setup, mr_attr},
};

over_configs! {
    /// KEY-01
    a_requested_key_in_use_is_refused_and_free_again_after_close: Pairwise, needs::OWN_KEYS;
    /// KEY-01
    request_without_a_key_gets_a_free_key: Pairwise;
    /// KEY-01
    requested_key_that_the_nic_cannot_use_is_rejected: Pairwise, needs::OWN_KEYS;
    /// KEY-02
    keys_of_closed_regions_are_not_reused_soon: Pairwise, needs::KEYS_AT_HAND,
        need("modes without PROV_KEY", "the application picks the keys",
            |config| config.has(MrMode::PROV_KEY)),
        need("verbs", "the device chooses its keys", TestConfig::is_loopback);
    /// KEY-03
    raw_attr_returns_the_needed_size_and_works_on_every_region: Pairwise;
    /// KEY-04
    raw_keys_are_mapped_and_unmapped: Pairwise;
    /// KEY-04
    a_domain_with_mapped_keys_is_busy_at_close: Single;
    /// KEY-05
    only_peers_with_the_same_key_reach_the_region: Pairwise,
        need("verbs", "verbs has no authorization keys", TestConfig::is_loopback);
    /// KEY-06
    a_key_crosses_processes_unchanged: HardwareMode;
}

fn a_requested_key_in_use_is_refused_and_free_again_after_close(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(0xABCD);
    let first = net.target.register(&attr, MrFlags::empty()).expect("register");
    let before = net.live();
    let error = net.target.register(&attr, MrFlags::empty()).unwrap_err();
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::NoKey, 266), "{error}");
    assert_eq!(net.live(), before);
    net.assert_works(&net.key(&first));
    let sub = first.sub(memory.part(0, 8), REMOTE, 0xABCD).unwrap_err();
    assert_eq!(sub.kind(), ErrorKind::NoKey, "a sub-region took its base's key");
    // Each domain has its own keys.
    let elsewhere =
        net.initiator.register(&attr, MrFlags::empty()).expect("the same key in another domain");
    elsewhere.close().expect("close");
    first.close().expect("close");
    let again = net.target.register(&attr, MrFlags::empty()).expect("the key is free again");
    net.assert_works(&net.key(&again));
}

fn request_without_a_key_gets_a_free_key(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let register =
        || net.target.register(&mr_attr(&ranges, REMOTE), MrFlags::empty()).expect("register");
    let regions: Vec<_> = (0..20).map(|_| register()).collect();
    let keys: BTreeSet<_> =
        regions.iter().map(|region| net.key(region).as_u64().unwrap()).collect();
    assert_eq!(keys.len(), 20, "a key was given twice");
    net.assert_works(&net.key(&regions[7]));
    if config.is_loopback() {
        let sub = regions[0].sub(memory.part(0, 32), REMOTE, None).expect("sub-region");
        net.target.make_usable(&sub).expect("bind and enable");
        net.assert_works(&net.key(&sub));
    }
}

fn requested_key_that_the_nic_cannot_use_is_rejected(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let ranges = [memory.range()];
    let before = net.live();
    let register =
        |key: u64| net.target.register(&mr_attr(&ranges, REMOTE).key(key), MrFlags::empty());
    let error = register(u64::MAX).expect_err("FI_KEY_NOTAVAIL was given as a key");
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::KeyRejected, 129));
    if config.key_size == 4 {
        for key in [1 << 32, u64::MAX - 1] {
            assert_eq!(
                register(key).unwrap_err().kind(),
                ErrorKind::KeyRejected,
                "{key:#x} in 32 bits"
            );
        }
        assert_eq!(net.live(), before);
        net.assert_works(&net.key(&register(0xFFFF_FFFE).expect("the widest key")));
    } else {
        assert_eq!(net.live(), before);
        net.assert_works(&net.key(&register(u64::MAX - 1).expect("the widest key")));
    }
}

fn keys_of_closed_regions_are_not_reused_soon(config: &TestConfig) {
    const ROUNDS: usize = 1000;
    let net = Net::open(config);
    let memory = net.bytes(64);
    let mut seen = BTreeMap::new();
    let mut tags: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..ROUNDS {
        let region = net.expose(memory.range(), REMOTE);
        let key = region.key().expect("key").as_u64().unwrap();
        if let Some(before) = seen.insert(key, round) {
            assert!(
                config.key_size == 4 && round - before >= 255,
                "a key came back after {} others",
                round - before
            );
        }
        if config.key_size == 4 {
            assert!(u32::try_from(key).is_ok(), "{key:#x} has more than 32 bits");
            let (index, tag) = (key >> 8, key & 0xff);
            if let Some(last) = tags.insert(index, tag) {
                assert_eq!(tag, (last + 1) & 0xff, "the tag of index {index} does not count up");
            }
        }
        region.close().expect("close");
    }
    let distinct: BTreeSet<_> = seen.keys().map(|key| key >> 32).collect();
    assert!(
        config.key_size == 4 || distinct.len() > ROUNDS / 2,
        "64-bit keys leave their upper half alone"
    );
}

fn raw_attr_returns_the_needed_size_and_works_on_every_region(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(4096);
    let whole = net.expose(memory.part(100, 1000), REMOTE);
    let several = net.expose_all(&[memory.part(3000, 10), memory.part(0, 10)], REMOTE);
    // Verbs has no sub-regions.
    let sub = || whole.sub(memory.part(200, 50), REMOTE, net.fresh_key()).expect("sub-region");
    let sub = config.is_loopback().then(sub);
    let regions: Vec<_> = [&whole, &several].into_iter().chain(&sub).collect();
    for region in &regions {
        // A region of several registrations may have a longer raw key, with one piece for each.
        let size = region.raw_key().expect("raw key").0.len();
        assert!(
            size == net.target.domain.provider_attr().raw_key_size || region.ranges().len() > 1
        );
        for given in [0, 1, size - 1] {
            let mut buffer = vec![0xEE; given];
            let error = region.raw_attr(&mut buffer).unwrap_err();
            assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::TooSmall, 257));
            assert_eq!(error.context_value("needed"), Some(size.to_string().as_str()));
            assert_eq!(buffer, vec![0xEE; given], "a buffer that is too small was written");
        }
        let mut buffer = vec![0xEE; size + 5];
        let (base, used) = region.raw_attr(&mut buffer).expect("raw_attr");
        assert_eq!((used, &buffer[size..]), (size, &[0xEE; 5][..]));
        assert_eq!(RawKey(buffer[..size].to_vec()), region.raw_key().expect("raw key"));
        let expected = if config.virtual_addresses() { region.range().start().0 } else { 0 };
        assert_eq!(base, Iova(expected));
    }
    let raws: BTreeSet<_> = regions.iter().map(|region| region.raw_key().unwrap().0).collect();
    assert_eq!(raws.len(), regions.len(), "two regions have one raw key");
}

fn raw_keys_are_mapped_and_unmapped(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    let raw = region.raw_key().expect("raw key");
    let map = |raw: &RawKey| net.initiator.domain.map_raw(region.base_addr(), region.len(), raw);
    let before = net.initiator.domain.live().mapped_keys;
    let keys = [map(&raw).expect("map"), map(&raw).expect("map the same again")];
    assert_eq!(net.initiator.domain.live().mapped_keys, before + 2);
    for key in &keys {
        key.as_u64().expect("a 64-bit key");
        net.assert_works(key);
    }
    let refused = RemoteKey::from_bytes(&keys[0].to_bytes()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Malformed, "a mapped key means nothing elsewhere");
    // A domain does not unmap the keys that another domain mapped.
    let theirs = [(); 2]
        .map(|()| net.target.domain.map_raw(region.base_addr(), region.len(), &raw).expect("map"));
    for key in &keys {
        assert_eq!(net.target.domain.unmap_key(key).unwrap_err().kind(), ErrorKind::InvalidKey);
    }
    for key in &theirs {
        net.target.domain.unmap_key(key).expect("it is still there");
    }
    net.initiator.domain.unmap_key(&keys[0]).expect("unmap");
    assert_eq!(net.push(&keys[0], 0, &[1]).unwrap_err().kind(), ErrorKind::InvalidKey);
    assert_eq!(
        net.initiator.domain.unmap_key(&keys[0]).unwrap_err().kind(),
        ErrorKind::InvalidKey,
        "unmapped twice"
    );
    net.assert_works(&keys[1]);
    region.close().expect("a mapping at the peer does not hold the region");
    assert_eq!(
        net.push(&keys[1], 0, &[1]).unwrap_err().kind(),
        net.seen(ErrorKind::InvalidKey),
        "the region is closed"
    );
    for wrong in [
        vec![],
        raw.0[..raw.0.len() - 1].to_vec(),
        [&raw.0[..], &[0]].concat(),
        vec![0; raw.0.len()],
    ] {
        assert_eq!(map_of(&net, &wrong), Err(ErrorKind::Malformed), "{} bytes", wrong.len());
    }
    assert_eq!(net.initiator.domain.live().mapped_keys, before + 1);
}

fn map_of(net: &Net, raw: &[u8]) -> Result<(), ErrorKind> {
    let mapped = net.initiator.domain.map_raw(Iova(0), 64, &RawKey(raw.to_vec()));
    mapped.map(|_| ()).map_err(|error| error.kind())
}

fn a_domain_with_mapped_keys_is_busy_at_close(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    let raw = region.raw_key().expect("raw key");
    let mapped = net.initiator.domain.map_raw(region.base_addr(), 64, &raw).expect("map");
    net.initiator.endpoint.close().expect("close the endpoint");
    let rejected = net.initiator.domain.close().expect_err("closed with a mapped key");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    assert_eq!(rejected.error.context_value("mapped_keys"), Some("1"));
    rejected.value.unmap_key(&mapped).expect("unmap");
    rejected.value.close().expect("nothing is left");
}

fn only_peers_with_the_same_key_reach_the_region(config: &TestConfig) {
    let (ours, theirs) = (AuthKey(b"ours".to_vec()), AuthKey(b"theirs".to_vec()));
    // Both domains have the authorization key `ours`. The initiator's endpoint has `ours`, the
    // domain's default, or `theirs`.
    for (endpoint, reaches_ours) in
        [(Some(ours.clone()), true), (None, true), (Some(theirs.clone()), false)]
    {
        let mut setup = Setup::of(config);
        setup.target.auth_key = ours.clone();
        setup.initiator.auth_key = ours.clone();
        setup.initiator_key = endpoint;
        let net = setup.open();
        let memory = net.filled(&[8; 64]);
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let empty = AuthKey::default();
        let by_default = net.expose(memory.range(), REMOTE);
        let with_empty = net
            .try_expose(&MrAttr { auth_key: Some(&empty), ..attr }, MrFlags::empty())
            .expect("register");
        let with_theirs = net
            .try_expose(&MrAttr { auth_key: Some(&theirs), ..attr }, MrFlags::empty())
            .expect("register");
        for (region, reached) in [
            (&by_default, reaches_ours),
            (&with_empty, reaches_ours),
            (&with_theirs, !reaches_ours),
        ] {
            let key = net.key(region);
            if reached {
                net.assert_works(&key);
                memory.put(0, &[8; 64]);
            } else {
                let error =
                    net.push(&key, 0, &[1]).expect_err("reached with the wrong authorization key");
                assert!(
                    matches!(error.kind(), ErrorKind::AccessDenied | ErrorKind::InvalidKey),
                    "{error}"
                );
                net.pull(&key, 0, 1).expect_err("read with the wrong authorization key");
                assert_eq!(memory.all(), [8; 64]);
            }
        }
    }
}

const SENT: &str = "HMEM_TEST_KEY";

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn a_key_crosses_processes_unchanged(config: &TestConfig) {
    const NAME: &str = "key::over_configs::a_key_crosses_processes_unchanged";
    if child::is_alone(NAME) {
        let text = std::env::var(SENT).expect("the key");
        let bytes: Vec<_> = (0..text.len() / 2)
            .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal"))
            .collect();
        let key = RemoteKey::from_bytes(&bytes).expect("the key as it was sent");
        let piece = key.pieces().next().expect("a piece");
        println!(
            "received {} {:?} {:#x} {}",
            key.as_u64().unwrap(),
            key.addressing(),
            piece.base.0,
            piece.len
        );
        return;
    }
    let net = Net::open(config);
    let memory = net.bytes(64);
    let key = net.expose(memory.range(), REMOTE).key().expect("key");
    let output = child::output(NAME, &[(SENT, &hexadecimal(&key.to_bytes()))]);
    let text = String::from_utf8_lossy(&output.stdout);
    let expected =
        format!("received {} Virtual {:#x} 64", key.as_u64().unwrap(), memory.range().start().0);
    assert!(text.contains(&expected), "{expected:?} is not in {text}");
}

/// KEY-06
#[test]
fn truncated_and_altered_keys_are_refused() {
    let piece = |base| hmem::RemotePiece { base: Iova(base), len: 4096, key: base ^ 0x5A5A };
    for key in [
        RemoteKey::new(Addressing::ZeroBased, Iova(0), 1, 0),
        RemoteKey::new(Addressing::Virtual, Iova(u64::MAX), u64::MAX, u64::MAX),
        RemoteKey::split(Addressing::Virtual, piece(1 << 40), vec![piece(2 << 40), piece(3 << 40)]),
    ] {
        let bytes = key.to_bytes();
        assert_eq!(RemoteKey::from_bytes(&bytes).expect("unchanged"), key);
        assert_eq!(&bytes[..5], b"hmRK\x01", "the form says what it is and which version");
        let refused = |bytes: &[u8], what: &str| {
            let error = RemoteKey::from_bytes(bytes)
                .err()
                .unwrap_or_else(|| panic!("{what} was read as a key"));
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.context_value("why").is_some());
        };
        for len in 0..bytes.len() {
            refused(&bytes[..len], "a truncated key");
        }
        refused(&[&bytes[..], &[0]].concat(), "a key with a byte left over");
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            refused(&altered, "an altered key");
        }
    }
    assert_eq!(RemoteKey::from_bytes(b"hmRK\x02").unwrap_err().kind(), ErrorKind::Malformed);
}
