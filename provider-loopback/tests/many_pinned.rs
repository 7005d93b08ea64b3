//! Test of more pinned regions than a user may have who is not allowed to lock much memory.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use hmem_core::MrMode;
use hmem_provider_loopback::{Loopback, RemapPolicy};
use support::*;
use trials::{Outcome, Skipped, skip, trials};

trials! {
    /// MR-05
    more_regions_than_the_buffer_table_of_one_io_uring_are_pinned,
}

fn more_regions_than_the_buffer_table_of_one_io_uring_are_pinned() -> Outcome {
    skip(without_pinned_pages())?;
    let provider = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let buffer = Buffer::new(100);
    let mut regions = Vec::new();
    for key in 0..5000 {
        match RegAttr::key(key).register(&*domain, &[host(buffer.range(), false)]) {
            Ok(region) => regions.push(region),
            Err(error) if error.to_string().contains("RLIMIT_MEMLOCK") => {
                regions.into_iter().for_each(|region| domain.deregister(region).unwrap());
                return Err(Skipped(format!("this user may not lock 5,000 pages: {error}")));
            }
            Err(error) => panic!("{error}"),
        }
    }
    regions.into_iter().for_each(|region| domain.deregister(region).unwrap());
    assert_eq!(domain.live().bytes, 0);
    Ok(())
}
