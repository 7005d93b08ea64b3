//! Slices of the crate `cudarc`, registered without a copy.
//!
//! ```text
//! CUDARC_CUDA_VERSION=12080 cargo run --features cudarc --example cudarc_slices
//! ```
//!
//! `CUDARC_CUDA_VERSION` names the CUDA version that `cudarc` is built for. The example needs a
//! CUDA device.

use std::{sync::Arc, time::Duration};

use cudarc::driver::CudaContext;
use hmem::{
    Access, DomainAttr, Hmem, IfaceKind, cuda::cudarc::CudarcBuffer, loopback::Loopback,
    provider::EndpointAttr,
};

type Failure = Box<dyn std::error::Error>;

const LEN: usize = 1024;

/// Writes floats from host memory into a slice on the device, and returns the slice's content.
pub(crate) fn run() -> Result<Vec<f32>, Failure> {
    let hmem = Hmem::builder().provider(Loopback::builder().build()?).build()?;
    let domain = hmem.domain("loopback", DomainAttr::default())?;
    // Without CUDA this is an error with a remedy. `CudaContext::new` would panic.
    let cuda = hmem.iface(IfaceKind::CUDA)?;
    let stream = CudaContext::new(0)?.new_stream()?;

    // The region owns the slice until it is closed.
    let slice = stream.clone_htod(&[0.0_f32; LEN])?;
    let buffer = CudarcBuffer::new(cuda, slice)?;
    let target = domain.register(buffer, Access::REMOTE_WRITE)?;
    println!("registered: {}", target.decision()?);

    let values: Vec<u8> = (0..LEN).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let len = values.len() as u64;
    let source = domain.register(values, Access::WRITE)?;
    let queue = domain.open_cq(256)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
    let (peer, key) = (endpoint.resolve(&endpoint.name())?, target.key()?);
    endpoint.write(&[source.slice(0, len)?], &[key.slice(0, len)?], peer, 1)?;
    let mut done = Vec::new();
    queue.wait(&mut done, 1, Duration::MAX)?;
    println!("written: {} bytes", done.remove(0).result?);

    // `close` returns the slice, and work on the slice's stream sees the bytes that the NIC wrote.
    let slice = Arc::new(target.close()?.into_slice());
    let mut values = vec![0.0; LEN];
    stream.memcpy_dtoh(&*slice, &mut values)?;
    stream.synchronize()?;
    println!("the last element is {}", values[LEN - 1]);
    Ok(values)
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<(), Failure> {
    run().map(|_| ())
}
