//! Shows error handling: the kinds of errors, the values that errors return, and the reasons for a
//! path.
//!
//! ```text
//! cargo run --example error_handling
//! ```

use std::sync::Arc;

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Error, ErrorKind,
    Hmem, Iface, Path, Region, Result,
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    path::P2pPolicy,
    provider::EndpointAttr,
    system::{P2pMatrix, Simulated},
};

/// Registers a buffer. If the NIC is out of resources, frees some resources and retries once.
///
/// The error of a registration contains the buffer, so that nothing is copied or lost.
fn register_with_retry(
    domain: &Domain,
    buffer: Vec<u8>,
    free_something: impl FnOnce(),
) -> Result<Region<Vec<u8>>> {
    match domain.register(buffer, Access::REMOTE_READ) {
        Ok(region) => Ok(region),
        Err(rejected) if rejected.error.kind() == ErrorKind::OutOfResources => {
            println!("first try: {}", rejected.error);
            free_something();
            Ok(domain.register(rejected.value, Access::REMOTE_READ)?)
        }
        Err(rejected) => Err(rejected.error),
    }
}

/// Shows a retry: the first registration fails as if the locked-memory limit were reached.
fn retry() -> Result<()> {
    let faults = Faults::new();
    let nic = Loopback::builder().faults(&faults).build()?;
    let hmem = Hmem::builder().without_vendor_ifaces().provider(nic).build()?;
    let domain = hmem.domain("loopback", DomainAttr::default())?;
    faults.fail_nth(NicCall::Register, 1, Errno(12));
    let region = register_with_retry(&domain, vec![7; 4096], || println!("freed a region"))?;
    println!("second try: {} bytes registered", region.len());
    Ok(())
}

/// Shows a transfer that the target refuses: `write` succeeds, and the completion has the error.
fn refused_transfer() -> Result<()> {
    let hmem =
        Hmem::builder().without_vendor_ifaces().provider(Loopback::builder().build()?).build()?;
    let domain = hmem.domain("loopback", DomainAttr::default())?;
    let queue = domain.open_cq(256)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
    let peer = endpoint.resolve(&endpoint.name())?;
    let source = domain.register(vec![1; 64], Access::WRITE)?;
    let target = domain.register(vec![0; 64], Access::REMOTE_READ)?;
    let key = target.key()?;
    endpoint.write(&[source.slice(0, 64)?], &[key.slice(0, 64)?], peer, 1)?;
    let mut done = Vec::new();
    queue.wait(&mut done, 1, std::time::Duration::MAX)?;
    let error = done.remove(0).result.expect_err("the region grants no writes");
    println!("completion: {error}");
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    Ok(())
}

/// Shows a device that the NIC cannot reach directly: the attempts, their errors and the remedies.
fn refused_path() -> Result<()> {
    let matrix = P2pMatrix::default().block(DeviceId(0), "loop0");
    let device: Arc<dyn Iface> = Arc::new(Simulated::builder().p2p(matrix).build()?);
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(&device))
        .provider(Loopback::builder().build()?)
        .build()?;
    let request = AllocRequest { len: 1 << 20, device: DeviceId(0), kind: AllocationKind::Device };

    // The default policy falls back to staged copies. The decision has the reason.
    let domain = hmem.domain("loopback", DomainAttr::default())?;
    let buffer = DeviceBuffer::allocate(&device, &request)?;
    let region = domain.register(buffer, Access::REMOTE_READ)?;
    let decision = region.decision()?;
    assert_eq!(decision.path, Path::Staged);
    println!("chosen: {} ({})", decision.path, decision.reason);
    for attempt in &decision.attempts {
        println!("  {attempt}");
    }

    // The policy `Required` makes the registration fail, with the same attempts in the error.
    let attr = DomainAttr { p2p: P2pPolicy::Required, ..DomainAttr::default() };
    let strict = hmem.domain("loopback", attr)?;
    let buffer = region.close().map_err(Error::from)?;
    let rejected = strict.register(buffer, Access::REMOTE_READ).expect_err("no direct path");
    // `Debug` has the attempts and the remedy on lines of their own; `Display` has one line.
    println!("required: {:?}", rejected.error);
    Ok(())
}

pub(crate) fn run() -> Result<()> {
    retry()?;
    refused_transfer()?;
    refused_path()
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<()> {
    run()
}
