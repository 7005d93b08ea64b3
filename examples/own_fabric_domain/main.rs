//! Regions in a libfabric domain that belongs to the application.
//!
//! A program that already speaks libfabric keeps its domain, endpoints and requests. `hmem`
//! registers the memory in that program's domain, and the program uses the descriptors and keys in
//! its own requests. The module `application` stands for such a program.
//!
//! ```text
//! cargo run --example own_fabric_domain
//! ```
//!
//! The example needs libfabric 1.17 or newer, and fails with a message if there is none. It moves
//! bytes over TCP within this machine, so it needs no hardware.

use std::sync::Arc;

use hmem::{
    Access, DomainAttr, Error, ErrorKind, Hmem, Result,
    libfabric::{FabricMr, Libfabric, sys},
};

mod application;

use application::{CallError, Endpoint, Fabric, Local, Remote, Wanted};

/// Number of bytes to move.
const LEN: usize = 1 << 20;

fn failed(CallError(call, returned): CallError) -> Error {
    Error::new(ErrorKind::Driver, "application").context("call", call).context("returned", returned)
}

/// Returns the local side of a transfer: the address and descriptor of a region.
fn local(mr: &FabricMr<'_>) -> Local {
    let (address, len) = (mr.range.start().0, mr.range.len() as usize);
    Local { address, len, descriptor: mr.descriptor() }
}

/// Writes a buffer to a peer, and reads it back. Returns the number of equal bytes.
pub(crate) fn run() -> Result<usize> {
    // The application opens a domain, and two endpoints that know each other.
    let functions = sys::Functions::find()?;
    let wanted = Wanted::rma("tcp;ofi_rxm");
    let fabric = Fabric::open(&functions, wanted).map_err(failed)?;
    let sides = [Endpoint::open(&fabric), Endpoint::open(&fabric)];
    let [initiator, target] = sides.map(|side| side.map_err(failed));
    let (initiator, target) = (initiator?, target?);
    let peer = target.name().and_then(|name| initiator.insert(&name)).map_err(failed)?;
    initiator.name().and_then(|name| target.insert(&name)).map_err(failed)?;

    // hmem registers in that domain.
    let (domain, info) = (fabric.domain.cast(), fabric.info.cast());
    // SAFETY: everything that is opened from the provider holds the `Arc`, which keeps the domain
    // open. The domain has FI_THREAD_SAFE. Regions are closed after their transfers have ended.
    let provider = unsafe {
        let builder = Libfabric::builder().functions(functions);
        builder.with_domain(domain, info, wanted.api_version, Arc::clone(&fabric))
    }?;
    let hmem = Hmem::builder().without_vendor_ifaces().build()?;
    let domain = hmem.domain_on(&provider, DomainAttr::default())?;
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 % 251) as u8).collect();
    let source = domain.register(bytes.clone(), Access::WRITE)?;
    let remote = domain.register(vec![0_u8; LEN], Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    let copy = domain.register(vec![0_u8; LEN], Access::READ)?;
    println!("registered with {}: {}", domain.provider_attr().nic, source.decision()?);

    // The application moves the bytes with its own requests.
    let (written, target_mr) = (FabricMr::of(&source)?, FabricMr::of(&remote)?);
    let key = target_mr.key().expect("a region with remote rights has a key");
    let place = Remote { peer, address: target_mr.base, key };
    // SAFETY: the regions own the memory, and nothing else accesses it until the calls return.
    unsafe {
        initiator.write(&target, local(&written), place).map_err(failed)?;
        initiator.read(&target, local(&FabricMr::of(&copy)?), place).map_err(failed)?;
    }

    // The regions return their buffers.
    let (sent, arrived, read) = (source.close()?, remote.close()?, copy.close()?);
    let same = |((sent, arrived), read): &((&u8, &u8), &u8)| sent == arrived && arrived == read;
    Ok(sent.iter().zip(&arrived).zip(&read).filter(same).count())
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> std::process::ExitCode {
    match run() {
        Ok(equal) => {
            println!("{equal} of {LEN} bytes arrived");
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
