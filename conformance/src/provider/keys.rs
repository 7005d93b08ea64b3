//! Behaviours of memory keys and of endpoint names.

use std::{collections::HashSet, sync::Arc};

use hmem_core::{
    AuthKey, ErrorKind, MrMode, Request,
    provider::{EndpointAttr, Provider},
    transfer::EndpointName,
};

use super::link::{LOCAL, Link, REMOTE, assert_refused, contents, remote};
use crate::{
    bytes::{assert_bytes, pattern},
    trial::{Outcome, assert_kind, skip},
};

pub(super) fn live_regions_have_keys_of_their_own(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let mut seen = HashSet::new();
    let regions: Vec<_> =
        (0..32).map(|seed| link.target.register(pattern(seed, 256), REMOTE)).collect();
    for region in &regions {
        let key = region.provider_region().expect("registered").key;
        assert!(seen.insert(key), "two live regions have the key {key:#x}");
    }
    for region in regions.iter().step_by(11) {
        link.assert_works(&link.key(region));
    }
    Ok(())
}

pub(super) fn requested_key_in_use_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.has(MrMode::PROV_KEY) {
        return skip("the provider picks the keys");
    }
    let register = || link.target.domain.submit(Request::new(vec![0u8; 64], REMOTE).key(77));
    let first = register().expect("register");
    assert_eq!(first.provider_region().expect("registered").key, 77, "not the requested key");
    let error = register().expect_err("the key is in use").error;
    assert_kind(&error, ErrorKind::NoKey, "a requested key that is in use");
    drop(first);
    register().expect("register once the key is free");
    Ok(())
}

pub(super) fn peer_with_another_auth_key_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let before = pattern(1, 64);
    let region = link.target.register(before.clone(), REMOTE);
    let key = link.key(&region);
    let side = &link.initiator;
    let auth_key = Some(AuthKey(b"another".to_vec()));
    let attr = EndpointAttr { auth_key, ..EndpointAttr::new(&side.cq) };
    let stranger = match side.domain.open_endpoint(&attr) {
        Ok(endpoint) => endpoint,
        Err(why) if why.is_unsupported() => return skip(why.to_string()),
        Err(why) => panic!("open an endpoint with a key: {why}"),
    };
    let peer = stranger.resolve(&link.target.endpoint.name()).expect("find the target");
    let source = side.register(vec![0xFF; 64], LOCAL);
    let slice = source.slice(0, 64).expect("inside");
    stranger.write(&[slice], &[remote(&key, 0, 64)], peer, 1).expect("post");
    assert_refused(link.ended(), "a write with another authorization key");
    assert_bytes(&contents(&region), &before, "the region");
    link.assert_works(&key);
    Ok(())
}

pub(super) fn raw_key_is_mapped_used_and_unmapped(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_domain().raw_keys().is_none() {
        return skip("the provider has no raw keys");
    }
    let region = link.target.register(pattern(1, 4096), REMOTE);
    let error = region.raw_attr(&mut []).expect_err("the buffer is too small for the key");
    assert_kind(&error, ErrorKind::TooSmall, "a buffer of 0 bytes for a raw key");
    let mut room = vec![0; link.target.domain.provider_attr().raw_key_size];
    let (base, len) = region.raw_attr(&mut room).expect("raw key");
    assert_eq!((base, len <= room.len()), (region.base_addr(), true));
    let raw = region.raw_key().expect("raw key");
    let domain = &link.initiator.domain;
    let key = domain.map_raw(base, region.len(), &raw).expect("map the raw key");
    link.assert_works(&key);
    assert_eq!(domain.live().mapped_keys, 1);
    domain.unmap_key(&key).expect("unmap");
    assert_eq!(domain.live().mapped_keys, 0);
    let error = domain.unmap_key(&key).expect_err("the key is not mapped");
    assert_kind(&error, ErrorKind::InvalidKey, "unmapping a key twice");
    Ok(())
}

pub(super) fn malformed_endpoint_name_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
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
