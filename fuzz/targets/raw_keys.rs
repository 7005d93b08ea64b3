//! Raw keys, as peers send them: of the software NIC and of verbs.

use std::{sync::LazyLock, time::Duration};

use hmem::{
    Access, Addressing, Domain, DomainAttr, Endpoint, ErrorKind, Hmem, Iova, MrMode, RawKey,
    Region, Request,
    loopback::Loopback,
    provider::{CompletionQueue, EndpointAttr},
    transfer::PeerId,
};
use std::sync::Arc;

use super::{Verdict, refusal, verbs_raw_key};

/// A domain in RAW mode whose endpoint transfers to itself.
struct Raw {
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    itself: PeerId,
    region: Region<Vec<u8>>,
    local: Region<Vec<u8>>,
    key: RawKey,
    domain: Domain,
}

const LEN: u64 = 64;

static RAW: LazyLock<Raw> = LazyLock::new(|| {
    let provider = Loopback::builder().needs(MrMode::RAW).build().expect("the software NIC");
    let hmem = Hmem::builder().without_environment().without_vendor_ifaces().build();
    let attr = DomainAttr { mr_mode: MrMode::RAW, ..DomainAttr::default() };
    let domain = hmem.expect("host memory").domain_on(&provider, attr).expect("a domain");
    let queue = domain.open_cq(256).expect("a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let itself = endpoint.resolve(&endpoint.name()).expect("its own name");
    let register = |access, key| {
        domain.submit(Request::new(vec![7; LEN as usize], access).key(key)).expect("a region")
    };
    let (region, local) = (register(Access::REMOTE_READ, 1), register(Access::READ, 2));
    let key = region.raw_key().expect("a raw key");
    Raw { queue, endpoint, itself, region, local, key, domain }
});

/// The first byte selects: 0 maps the rest as a raw key of the software NIC, 1 maps the rest
/// combined with a live raw key and with a correct checksum, and other numbers decode a raw key of
/// verbs.
pub(super) fn target(data: &[u8]) -> Verdict {
    let (sort, rest) = data.split_first().unwrap_or((&0, &[]));
    match sort {
        0 => use_key(&RawKey(rest.to_vec())),
        1 => {
            let mut key = RAW.key.clone();
            key.0.iter_mut().zip(rest).for_each(|(byte, change)| *byte ^= change);
            // FNV-1a, as the software NIC writes it.
            let sum = key.0[..16].iter().fold(0x811c_9dc5_u32, |sum, byte| {
                (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
            });
            key.0[16..20].copy_from_slice(&sum.to_le_bytes());
            use_key(&key)
        }
        _ => decode_verbs(&RawKey(rest.to_vec())),
    }
}

/// Maps a raw key of the software NIC, reads with it, and unmaps it. Only the key of the region
/// gives access.
fn use_key(raw: &RawKey) -> Verdict {
    let Raw { queue, endpoint, itself, local, domain, region, key } = &*RAW;
    let mapped = domain.map_raw(Iova(0), LEN, raw).map_err(refusal)?;
    let slice = local.slice(0, LEN).expect("the whole region");
    endpoint
        .read(&[slice], &[mapped.slice(0, LEN).expect("the whole key")], *itself, 0)
        .expect("a post");
    let mut done = Vec::new();
    queue.wait(&mut done, 1, Duration::MAX).expect("a completion");
    domain.unmap_key(&mapped).expect("a mapped key");
    match done.remove(0).result {
        Ok(read) => assert_eq!((raw, read), (key, region.len()), "a forged key gave access"),
        Err(error) => {
            assert_ne!(raw, key, "{error:#}");
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error:#}");
        }
    }
    Ok(())
}

fn decode_verbs(raw: &RawKey) -> Verdict {
    let pieces = verbs_raw_key::decode(raw).map_err(refusal)?;
    let addressing = if raw.0[3] == 1 { Addressing::ZeroBased } else { Addressing::Virtual };
    assert_eq!(verbs_raw_key::encode(addressing, pieces.into_iter()), *raw);
    Ok(())
}
