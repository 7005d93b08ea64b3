//! Behaviours of memory keys and of endpoint names.

use std::collections::HashSet;

use hmem_core::{
    AuthKey, Domain, ErrorKind, Iova, MemoryRegion, MrFlags, MrMode, RawKey, RemoteKey,
    fabric::MrAttr, provider::Features, transfer::EndpointName,
};

use super::{
    case::Case,
    link::{CaseLink, Setup},
};
use crate::link::{REMOTE, mr_attr};
use crate::trial::{Outcome, assert_kind, skip};

pub(super) fn live_regions_have_keys_of_their_own(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(256);
    let ranges = [memory.range()];
    // Half of the requests name a key, and the NIC chooses the others.
    let regions: Vec<_> = (0..32)
        .map(|number| {
            let attr = mr_attr(&ranges, REMOTE);
            let attr = if number % 2 == 0 { attr } else { attr.key(link.fresh_key()) };
            link.target.regattr(&attr, MrFlags::empty()).expect("register")
        })
        .collect();
    let mut seen = HashSet::new();
    for region in &regions {
        let key = region.provider_region().expect("registered").key;
        assert!(seen.insert(key), "two live regions have the key {key:#x}");
    }
    for region in regions.iter().step_by(11) {
        link.assert_works(&link.key(region));
    }
    if case.features.contains(Features::SUB_REGIONS) {
        let sub = regions[0].sub(memory.part(0, 32), REMOTE, None).expect("sub-region");
        link.target.make_usable(&sub);
        link.assert_works(&link.key(&sub));
    }
}

pub(super) fn requested_key_that_the_nic_cannot_use_is_rejected(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let before = link.live();
    let register =
        |key: u64| link.target.regattr(&mr_attr(&ranges, REMOTE).key(key), MrFlags::empty());
    let error = register(u64::MAX).expect_err("FI_KEY_NOTAVAIL was given as a key");
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::KeyRejected, 129));
    let widest = if case.attr.key_size == 4 {
        for key in [1 << 32, u64::MAX - 1] {
            let error = register(key).expect_err("a key of more than 32 bits");
            assert_kind(&error, ErrorKind::KeyRejected, &format!("{key:#x} in 32 bits"));
        }
        u64::from(u32::MAX)
    } else {
        u64::MAX - 1
    };
    assert_eq!(link.live(), before);
    link.assert_works(&link.key(&register(widest).expect("the widest key")));
}

pub(super) fn domain_with_mapped_keys_is_busy_at_close(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let region = link.expose(memory.range(), REMOTE);
    let raw = region.raw_key().expect("raw key");
    let base = region.base_addr();
    let mapped = link.initiator.domain.map_raw(base, region.len(), &raw).expect("map");
    let [initiator, _target] = link.into_sides();
    initiator.endpoint.close().expect("close the endpoint");
    let rejected = initiator.domain.close().expect_err("closed with a mapped key");
    assert_kind(&rejected.error, ErrorKind::Busy, "closing a domain with a mapped key");
    assert_eq!(rejected.error.context_value("mapped_keys"), Some("1"));
    rejected.value.unmap_key(&mapped).expect("unmap");
    rejected.value.close().expect("nothing is left");
}

pub(super) fn requested_key_in_use_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(0xABCD);
    let (target, none) = (&link.target, MrFlags::empty());
    let register = || target.regattr(&attr, none);
    let first = register().expect("register");
    assert_eq!(first.provider_region().expect("handle").key, 0xABCD, "not the requested key");
    let before = link.live();
    let error = register().expect_err("the key is in use");
    assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::NoKey, 266), "{error}");
    assert_eq!(link.live(), before);
    link.assert_works(&link.key(&first));
    if case.features.contains(Features::SUB_REGIONS) {
        let sub = first.sub(memory.part(0, 8), REMOTE, 0xABCD).expect_err("the key of its base");
        assert_kind(&sub, ErrorKind::NoKey, "a sub-region with the key of its base");
    }
    // Each domain has its own keys.
    let elsewhere = link.initiator.regattr(&attr, none).expect("the same key in another domain");
    elsewhere.close().expect("close");
    first.close().expect("close");
    let again = register().expect("the key is free again");
    link.assert_works(&link.key(&again));
}

/// Tests an endpoint of the initiator with the authorization key `ours`, without a key, and with
/// the key `theirs`. Both domains have the key `ours`, and an endpoint without a key has that of
/// its domain.
pub(super) fn peers_need_the_auth_key_of_the_region(case: &Case) -> Outcome {
    // The keys have one length, so that only their bytes differ.
    let (ours, theirs) = (AuthKey(b"our key".to_vec()), AuthKey(b"another".to_vec()));
    for (endpoint, reaches_ours) in
        [(Some(ours.clone()), true), (None, true), (Some(theirs.clone()), false)]
    {
        let mut setup = Setup::of(case);
        (setup.target.auth_key, setup.initiator.auth_key) = (ours.clone(), ours.clone());
        setup.initiator_key = endpoint;
        let link = match setup.try_open() {
            Ok(link) => link,
            Err(why) if why.is_unsupported() => return skip(why.to_string()),
            Err(why) => panic!("open with an authorization key: {why}"),
        };
        let memory = link.filled(&[8; 64]);
        let ranges = [memory.range()];
        let empty = AuthKey::default();
        for (auth_key, reached) in
            [(None, reaches_ours), (Some(&empty), reaches_ours), (Some(&theirs), !reaches_ours)]
        {
            let attr = MrAttr { auth_key, ..mr_attr(&ranges, REMOTE) };
            let region = link.try_expose(&attr, MrFlags::empty()).expect("register");
            let key = link.key(&region);
            if reached {
                link.assert_works(&key);
                memory.put(0, &[8; 64]);
            } else {
                let what = "an access with another authorization key";
                link.assert_dead(&key, 0, ErrorKind::AccessDenied, what);
                assert_eq!(memory.all(), [8; 64]);
            }
        }
    }
    Ok(())
}

pub(super) fn raw_attr_returns_the_needed_size_and_works_on_every_region(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(4096);
    let whole = link.expose(memory.part(100, 1000), REMOTE);
    let ranges = [memory.part(3000, 10), memory.part(0, 10)];
    let several = (case.attr.mr_iov_limit > 1)
        .then(|| link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).expect("register"));
    let sub = case
        .features
        .contains(Features::SUB_REGIONS)
        .then(|| whole.sub(memory.part(200, 50), REMOTE, link.fresh_key()).expect("sub-region"));
    let regions: Vec<&MemoryRegion> = [&*whole].into_iter().chain(&several).chain(&sub).collect();
    for region in &regions {
        // A region of several registrations may have a longer raw key, with one piece for each.
        let size = region.raw_key().expect("raw key").0.len();
        assert!(size == case.attr.raw_key_size || region.ranges().len() > 1);
        for given in [0, 1, size - 1] {
            let mut buffer = vec![0xEE; given];
            let error = region.raw_attr(&mut buffer).expect_err("too small");
            assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::TooSmall, 257));
            assert_eq!(error.context_value("needed"), Some(size.to_string().as_str()));
            assert_eq!(buffer, vec![0xEE; given], "a buffer that is too small was written");
        }
        let mut buffer = vec![0xEE; size + 5];
        let (base, used) = region.raw_attr(&mut buffer).expect("raw_attr");
        assert_eq!((used, &buffer[size..]), (size, &[0xEE; 5][..]));
        assert_eq!(RawKey(buffer[..size].to_vec()), region.raw_key().expect("raw key"));
        let expected = if case.virtual_addresses() { region.range().start().0 } else { 0 };
        assert_eq!((base, base), (Iova(expected), region.base_addr()));
    }
    let raws: HashSet<_> = regions.iter().map(|region| region.raw_key().expect("raw").0).collect();
    assert_eq!(raws.len(), regions.len(), "two regions have one raw key");
}

pub(super) fn raw_key_is_mapped_used_and_unmapped(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let region = link.expose(memory.range(), REMOTE);
    let raw = region.raw_key().expect("raw key");
    let (base, len) = (region.base_addr(), region.len());
    let map = |raw: &RawKey| link.initiator.domain.map_raw(base, len, raw);
    let keys = [map(&raw).expect("map"), map(&raw).expect("map the same again")];
    assert_eq!(link.initiator.domain.live().mapped_keys, 2);
    let dead = |key: &RemoteKey, what: &str| {
        case.assert_refused(link.push(key, 0, &[1]), ErrorKind::InvalidKey, what);
    };
    for key in &keys {
        link.assert_works(key);
        let refused = RemoteKey::from_bytes(&key.to_bytes()).expect_err("a mapped key");
        assert_kind(&refused, ErrorKind::Malformed, "a mapped key elsewhere");
        assert!(key.is_mapped());
        // Neither the mapped number nor the target's own number is a key by itself.
        let own = region.provider_region().expect("handle").key;
        for number in [key.as_u64().expect("one number"), own] {
            if case.has(MrMode::RAW) {
                let unmapped = RemoteKey::new(key.addressing(), base, len, number);
                dead(&unmapped, "a key that was not mapped");
            }
        }
    }
    if case.has(MrMode::RAW) {
        let error = region.key().expect_err("this mode has no plain keys");
        assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::KeyNotAvailable, 126));
    }
    // A domain does not unmap the keys that another domain mapped.
    let unmap = |domain: &Domain, key| domain.unmap_key(key).map_err(|error| error.kind());
    let (ours, other) = (&link.initiator.domain, &link.target.domain);
    let theirs = [(); 2].map(|()| other.map_raw(base, len, &raw).expect("map"));
    for key in &keys {
        assert_eq!(unmap(other, key), Err(ErrorKind::InvalidKey));
    }
    if case.control.is_some() {
        dead(&theirs[0], "a key that another domain mapped");
    }
    for key in &theirs {
        assert_eq!(unmap(other, key), Ok(()), "it is still there");
    }
    assert_eq!(unmap(ours, &keys[0]), Ok(()));
    dead(&keys[0], "an unmapped key");
    assert_eq!(unmap(ours, &keys[0]), Err(ErrorKind::InvalidKey), "unmapped twice");
    link.assert_works(&keys[1]);
    region.close().expect("a mapping at the peer does not hold the region");
    dead(&keys[1], "a mapped key of a closed region");
    for wrong in [
        vec![],
        raw.0[..raw.0.len() - 1].to_vec(),
        [&raw.0[..], &[0]].concat(),
        vec![0; raw.0.len()],
    ] {
        let error = map(&RawKey(wrong.clone())).expect_err("no raw key");
        assert_kind(&error, ErrorKind::Malformed, &format!("{} bytes", wrong.len()));
    }
    assert_eq!(ours.live().mapped_keys, 1);
    assert_eq!(unmap(ours, &keys[1]), Ok(()));
    assert_eq!(ours.live().mapped_keys, 0);
}

pub(super) fn malformed_endpoint_name_is_refused(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    for bytes in [Vec::new(), vec![0xA5; 3]] {
        let error = link
            .initiator
            .endpoint
            .resolve(&EndpointName(bytes))
            .expect_err("the bytes are no name");
        assert_kind(&error, ErrorKind::Malformed, "an endpoint name of random bytes");
    }
    Ok(())
}
