//! Eight threads transfer parts of one buffer through the registration cache.
//!
//! The cache owns the buffer. Before each transfer a thread gets a region for the part to send. The
//! first request for a part registers the part. Later requests find the region without a lock.
//!
//! ```text
//! cargo run --example cached_transfers
//! ```

use std::{thread, time::Duration};

use hmem::{
    Access, CacheAttr, CachedBuffer, Domain, DomainAttr, Error, Hmem, Result,
    cache::CacheStatistics, loopback::Loopback, provider::EndpointAttr,
};

const THREADS: u64 = 8;
/// The number of parts of the buffer.
const PARTS: u64 = 16;
/// The length of a part in bytes.
const PART: u64 = 64 << 10;
/// The number of transfers by each thread.
const ROUNDS: u64 = 100;

fn content(part: u64) -> Vec<u8> {
    vec![part as u8 + 1; PART as usize]
}

/// Writes parts of the buffer into a second buffer of this thread, and checks the bytes that
/// arrive.
fn transfer(domain: &Domain, buffer: &CachedBuffer<Vec<u8>>, thread: u64) -> Result<()> {
    let queue = domain.open_cq(256)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
    let peer = endpoint.resolve(&endpoint.name())?;
    let target = domain.register(vec![0; PART as usize], Access::REMOTE_WRITE)?;
    let (key, mut found, mut done) = (target.key()?, vec![0; PART as usize], Vec::new());
    for round in 0..ROUNDS {
        let part = (round * 7 + thread * 3) % PARTS;
        // The region stays registered at least until this lease is dropped.
        let region = buffer.get(part * PART, PART, Access::WRITE)?;
        endpoint.write(&[region.slice(0, PART)?], &[key.slice(0, PART)?], peer, round)?;
        while done.is_empty() {
            queue.wait(&mut done, 1, Duration::MAX)?;
        }
        done.remove(0).result?;
        target.read(0, &mut found)?;
        assert_eq!(found, content(part), "part {part} arrived");
    }
    Ok(())
}

/// Runs all threads, and returns the statistics of the cache.
pub(crate) fn run() -> Result<CacheStatistics> {
    let hmem =
        Hmem::builder().without_vendor_ifaces().provider(Loopback::builder().build()?).build()?;
    let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr)?;
    let cache = domain.cache()?;
    println!("monitor of host memory: {}", hmem.cache_monitor()?.choice().name);

    let buffer = cache.own((0..PARTS).flat_map(content).collect::<Vec<u8>>())?;
    thread::scope(|scope| {
        let (domain, buffer) = (&domain, &buffer);
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| scope.spawn(move || transfer(domain, buffer, thread)))
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })?;

    let statistics = cache.statistics();
    println!(
        "{} transfers: {} hits, {} registrations",
        THREADS * ROUNDS,
        statistics.hits,
        statistics.misses
    );
    // `close` deregisters the regions of the buffer, and returns the buffer.
    let bytes = buffer.close().map_err(Error::from)?;
    assert_eq!(bytes.len() as u64, PARTS * PART);
    Ok(statistics)
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<()> {
    run().map(|_| ())
}
