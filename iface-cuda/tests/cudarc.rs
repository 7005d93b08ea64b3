//! Tests of the real `cudarc` crate over the fake driver library. They register slices of `cudarc`
//! and access them through the software NIC.
//!
//! `CUDARC_CUDA_VERSION=12080 cargo test -p hmem-iface-cuda --features cudarc --test cudarc`
#![cfg(feature = "cudarc")]

#[path = "../../tests/child/mod.rs"]
mod child;

use std::{os::unix::fs::symlink, path::PathBuf, sync::Arc};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use hmem_core::{
    Access, Domain, DomainAttr, Endpoint, ErrorKind, Iface, Iova, Path, Registry, RemoteKey,
    path::PathSelector,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
};
use hmem_iface_cuda::{Cuda, cudarc::CudarcBuffer};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::Loopback;

/// Runs the test `name` in a child process in which both `cudarc` and this crate load the fake
/// driver library.
fn with_the_fake_driver(name: &str, show: impl FnOnce()) {
    if std::env::var_os("HMEM_CUDA_CHILD").is_some() {
        return show();
    }
    // Cargo builds the fake driver library because this line uses its crate.
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let test = std::env::current_exe().expect("this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_cuda.so");
    let folder = std::env::temp_dir().join(format!("hmem-cudarc-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let link: PathBuf = folder.join("libcuda.so");
    symlink(&library, &link).expect("a link");
    child::passes(
        child::command(name)
            .env("HMEM_CUDA_CHILD", "1")
            .env("LD_LIBRARY_PATH", &folder)
            .env("HMEM_CUDA_LIBRARY", &link),
    );
    std::fs::remove_dir_all(&folder).expect("clean up");
}

struct Link {
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    peer: PeerId,
    domain: Domain,
    iface: Arc<dyn Iface>,
}

impl Link {
    fn open() -> Self {
        let iface: Arc<dyn Iface> = Arc::new(Cuda::open().expect("the driver"));
        let mut registry = Registry::new();
        registry.add(Arc::clone(&iface)).expect("add");
        let nic = Loopback::builder().build().expect("the software NIC");
        let selector: Arc<dyn PathSelector> = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(&nic, Arc::new(registry), selector, DomainAttr::default())
            .expect("a domain");
        let queue = domain.open_cq(16).expect("a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let peer = endpoint.resolve(&endpoint.name()).expect("itself");
        Self { queue, endpoint, peer, domain, iface }
    }

    fn put(&self, key: &RemoteKey, bytes: &[u8]) {
        let source = self.domain.register(bytes.to_vec(), Access::WRITE).expect("register");
        let len = bytes.len() as u64;
        let remote = [RemoteSegment { address: Iova(key.base().0), len, key }];
        self.endpoint
            .write(&[source.slice(0, len).expect("a slice")], &remote, self.peer, 1)
            .expect("post");
        let mut done = Vec::new();
        while done.is_empty() {
            self.queue.read(&mut done, 1).expect("poll");
        }
        done.remove(0).result.expect("write");
    }
}

fn slice(values: &[u32]) -> (Arc<CudaStream>, CudaSlice<u32>) {
    let stream =
        CudaContext::new(0).expect("cudarc finds the driver").new_stream().expect("a stream");
    // SAFETY: the test writes the whole slice before it reads the slice.
    let mut slice = unsafe { stream.alloc::<u32>(values.len()) }.expect("allocate");
    stream.memcpy_htod(values, &mut slice).expect("copy");
    (stream, slice)
}

#[test]
fn slice_is_owned_by_its_region_until_close_returns_it() {
    with_the_fake_driver("slice_is_owned_by_its_region_until_close_returns_it", || {
        let link = Link::open();
        let (stream, slice) = slice(&[7; 1000]);
        let buffer = CudarcBuffer::new(&link.iface, slice).expect("a buffer");
        let region = link.domain.register(buffer, Access::REMOTE_WRITE).expect("register");
        let mut before = [0; 4];
        region.read(8, &mut before).expect("read");
        assert_eq!(u32::from_le_bytes(before), 7);
        // The slice is stream-ordered memory, which the driver does not export to NICs. The
        // decision gives that reason.
        assert_eq!(region.decision().expect("decision").path, Path::Staged);
        link.put(&region.key().expect("key"), &[1; 4000]);
        let slice = region.close().expect("close").into_slice();
        let mut values = vec![0u32; 1000];
        stream.memcpy_dtoh(&slice, &mut values).expect("copy");
        stream.synchronize().expect("wait");
        assert_eq!(values, [0x0101_0101; 1000]);
    });
}

#[test]
fn slice_is_borrowed_for_a_closure() {
    with_the_fake_driver("slice_is_borrowed_for_a_closure", || {
        let link = Link::open();
        let (stream, mut slice) = slice(&[7; 16]);
        let lent = hmem_iface_cuda::cudarc::scope(
            &link.domain,
            &link.iface,
            &mut slice,
            Access::REMOTE_WRITE,
            |region| {
                link.put(&region.key().expect("key"), &[2; 8]);
                let error =
                    region.read(0, &mut [0; 4]).expect_err("device memory has no host address");
                assert!(error.is_unsupported(), "{error}");
                region.key().expect("key")
            },
        );
        let key = lent.expect("lend");
        let mut values = vec![0u32; 16];
        stream.memcpy_dtoh(&slice, &mut values).expect("copy");
        stream.synchronize().expect("wait");
        assert_eq!(values[..3], [0x0202_0202, 0x0202_0202, 7]);
        drop(key);
    });
}

#[test]
fn other_iface_is_refused_and_the_slice_is_returned() {
    with_the_fake_driver("other_iface_is_refused_and_the_slice_is_returned", || {
        let system: Arc<dyn Iface> = Arc::new(hmem_iface_system::System::new());
        let (_stream, slice) = slice(&[1]);
        let refused = CudarcBuffer::new(&system, slice).expect_err("not CUDA's");
        assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(refused.value.len(), 1);
    });
}
