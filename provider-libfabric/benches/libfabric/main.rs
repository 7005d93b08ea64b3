//! Overhead of this crate over libfabric's C API:
//!
//! - registering and closing a region of 4 KiB by `fi_mr_regattr` and `fi_close`, by this provider,
//!   and by a [`Domain`] over it;
//! - a write of 8 bytes, from its post to its completion, by `fi_writemsg` and `fi_cq_read`, and by
//!   an endpoint of this provider. Each endpoint writes to itself.
//!
//! The calls alternate in one run, over a library that does nothing and over providers of the
//! installed libfabric.
//!
//! The following commands count the instructions. Divide each count by the number of rounds that
//! the bench prints. The difference between a count and that of `direct` is what hmem adds.
//!
//! ```text
//! for way in Ways*direct Ways*by_provider Ways*by_domain Writes*direct Writes*by_provider; do
//!     valgrind --tool=callgrind --toggle-collect="*$way*" \
//!         TARGET/release/deps/libfabric-HASH count
//! done
//! ```

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "../../../examples/own_fabric_domain/application.rs"]
#[allow(dead_code, reason = "the bench uses few of the transfers")]
mod application;
mod nothing;
#[path = "../../../benches/report/mod.rs"]
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{hint, ptr, sync::Arc};

use application::{CallError, Fabric, Wanted};
use hmem_core::{
    Access, AddressRange, AuthKey, Domain, DomainAttr, Promise, Raw, Region, Registry, RemoteKey,
    provider::{
        Backing, CompletionQueue, EndpointAttr, KeyRequest, Piece, Provider, ProviderDomain,
        ProviderEndpoint, Registration,
    },
    transfer::{Completion, LocalSegment, Operation, PeerId, WorkRequest},
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{Libfabric, sys};
use report::Target;

const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const KEY: u64 = 77;
const LEN: usize = 4096;

/// The three ways to register and close.
struct Ways {
    fid: *mut sys::fid_domain,
    domain: Domain,
    range: AddressRange,
    key: AuthKey,
    _pages: Vec<u8>,
}

impl Ways {
    /// # Safety
    /// Both pointers are those of one open domain with `FI_THREAD_SAFE`, which outlives the value.
    unsafe fn open(
        functions: sys::Functions,
        fid: *mut sys::fid_domain,
        info: *const sys::fi_info,
    ) -> Self {
        let builder = Libfabric::builder().functions(functions);
        // SAFETY: the caller promises an open domain. No transfer uses a region.
        let provider =
            unsafe { builder.with_domain(fid.cast(), info.cast(), sys::API_VERSION, ()) };
        let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
        let provider = provider.expect("borrow the domain");
        let domain = Domain::open(&provider, registry, paths, DomainAttr::default());
        let pages = vec![1_u8; LEN];
        Self {
            fid,
            domain: domain.expect("open a domain"),
            range: AddressRange::of(&pages[..]),
            key: AuthKey::default(),
            _pages: pages,
        }
    }

    #[inline(never)]
    fn direct(&self) {
        let iov_base = ptr::with_exposed_provenance(self.range.start().0 as usize);
        let iov = sys::iovec { iov_base, iov_len: LEN };
        let mut attr = sys::fi_mr_attr::EMPTY;
        (attr.mr_iov, attr.iov_count) = (&raw const iov, 1);
        (attr.access, attr.requested_key) = (RIGHTS.bits(), KEY);
        let mut mr = ptr::null_mut();
        // SAFETY: the domain is open, and the attributes outlive the call. The region is closed
        // once.
        let codes = unsafe {
            let regattr = (*(*self.fid).mr).regattr.expect("every domain");
            let registered = regattr(self.fid.cast(), &raw const attr, 0, &raw mut mr);
            let close = (*(*mr).fid.ops).close.expect("every region");
            (registered, close(mr.cast()))
        };
        assert_eq!(codes, (0, 0));
    }

    #[inline(never)]
    fn by_provider(&self) {
        let pieces = [Piece { range: self.range, backing: Backing::Host { owned: false } }];
        let ranges = [self.range];
        let request = Registration {
            key: KeyRequest::Application(KEY),
            ..Registration::new(&ranges, RIGHTS, &self.key)
        };
        let domain: &dyn ProviderDomain = self.domain.provider_domain();
        // SAFETY: the pages outlive the region, and nothing transfers.
        let region = unsafe { domain.register(&request, &pieces) }.expect("register");
        domain.deregister(region).expect("close");
    }

    #[inline(never)]
    fn by_domain(&self) {
        // SAFETY: the pages outlive the region, and nothing transfers.
        let memory = unsafe { Raw::new(self.range, Promise::ReadWrite) };
        let request = hmem_core::Request::new(memory, RIGHTS).key(KEY);
        let region = self.domain.submit(request).expect("register");
        region.close().map_err(|rejected| rejected.error).expect("close");
    }
}

/// Returns a provider of `functions` for the NICs of one of libfabric's providers.
fn listed(functions: sys::Functions, name: &str) -> hmem_core::Result<Libfabric> {
    // SAFETY: the bench has one thread. A transfer ends before its region.
    unsafe { Libfabric::builder().functions(functions).provider(name).build() }
}

/// The two ways to write 8 bytes.
struct Writes {
    raw: application::Endpoint,
    flags: u64,
    peer: sys::fi_addr_t,
    region: *mut sys::fid_mr,
    bytes: Box<[u8; 8]>,
    endpoint: Arc<dyn ProviderEndpoint>,
    queue: Arc<dyn CompletionQueue>,
    own_peer: PeerId,
    key: RemoteKey,
    own: Region<Vec<u8>>,
    _domain: Domain,
}

impl Writes {
    fn open(functions: &sys::Functions, name: &'static str) -> Result<Self, CallError> {
        let wanted = Wanted { mr_mode: 0, ..Wanted::rma(name) };
        let fabric = Fabric::open(functions, wanted)?;
        let raw = application::Endpoint::open(&fabric)?;
        let peer = raw.insert(&raw.name()?)?;
        let (mut region, mut bytes) = (ptr::null_mut(), Box::new([1; 8]));
        let iov = sys::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut attr = sys::fi_mr_attr::EMPTY;
        (attr.mr_iov, attr.iov_count) = (&raw const iov, 1);
        (attr.access, attr.requested_key) = (RIGHTS.bits(), KEY);
        // SAFETY: the domain is open, and the attributes outlive the call.
        let (registered, inject) = unsafe {
            let regattr = (*(*fabric.domain).mr).regattr.expect("every domain");
            let registered = regattr(fabric.domain.cast(), &raw const attr, 0, &raw mut region);
            (registered, (*(*fabric.info).tx_attr).inject_size >= 8)
        };
        assert_eq!(registered, 0, "fi_mr_regattr");
        let flags = sys::FI_COMPLETION | sys::FI_DELIVERY_COMPLETE;
        let flags = if inject { flags | sys::FI_INJECT } else { flags };

        let provider = listed(functions.clone(), name).expect("list");
        let mr_mode = provider.nics().expect("list")[0].required_mr_mode;
        let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        let domain = Domain::open(&provider, registry, paths, attr).expect("open a domain");
        let transport = domain.provider_domain().transport().expect("endpoints");
        let queue = transport.open_cq(64).expect("open a queue");
        let endpoint = transport.open_endpoint(&EndpointAttr::new(&queue)).expect("open");
        let own_peer = endpoint.resolve(&endpoint.name()).expect("resolve");
        let own = domain.register(vec![1; 8], RIGHTS | Access::WRITE).expect("register");
        let key = own.key().expect("a key");
        let _domain = domain;
        Ok(Self { raw, flags, peer, region, bytes, endpoint, queue, own_peer, key, own, _domain })
    }

    #[inline(never)]
    fn direct(&self) {
        let iov = sys::iovec { iov_base: self.bytes.as_ptr().cast(), iov_len: 8 };
        let mut entry = [0_u64; 6];
        // SAFETY: the endpoint, its queue and the region are open. The bytes outlive the write,
        // which completes here. The entry has room for any format.
        unsafe {
            let mut desc = (*self.region).mem_desc;
            let remote = sys::fi_rma_iov { addr: 0, len: 8, key: (*self.region).key };
            let message = sys::fi_msg_rma {
                msg_iov: &raw const iov,
                desc: &raw mut desc,
                iov_count: 1,
                addr: self.peer,
                rma_iov: &raw const remote,
                rma_iov_count: 1,
                context: ptr::from_ref(self).cast_mut().cast(),
                data: 0,
            };
            let write = (*(*self.raw.endpoint).rma).writemsg.expect("RMA");
            let read = (*(*self.raw.queue).ops).read.expect("every queue");
            while write(self.raw.endpoint, &raw const message, self.flags) != 0 {
                read(self.raw.queue, entry.as_mut_ptr().cast(), 0);
            }
            while read(self.raw.queue, entry.as_mut_ptr().cast(), 1) != 1 {
                hint::spin_loop();
            }
        }
    }

    /// Posts a request, and reads its completion.
    #[inline(never)]
    fn by_provider(&self, request: &WorkRequest<'_>, out: &mut Vec<Completion>) {
        // SAFETY: the region outlives the write, which completes here.
        unsafe { self.endpoint.post(request) }.expect("post");
        while self.queue.read(out, 1).expect("read") == 0 {
            hint::spin_loop();
        }
        out.pop().expect("a completion").result.expect("a write");
    }

    /// Calls `run` with both ways.
    fn run(&self, run: impl FnOnce(&mut dyn FnMut(), &mut dyn FnMut())) {
        let (address, desc) = (self.own.range().start(), self.own.desc().ok());
        let local = [LocalSegment { address, len: 8, desc }];
        let remote = [self.key.slice(0, 8).expect("inside")];
        let operation = Operation::Write { remote: &remote };
        let request = WorkRequest { operation, local: &local, peer: self.own_peer, context: 7 };
        let mut out = Vec::new();
        run(&mut || self.direct(), &mut || self.by_provider(&request, &mut out));
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        // SAFETY: the region is open, and closed only here.
        let closed =
            unsafe { (*(*self.region).fid.ops).close.expect("every region")(self.region.cast()) };
        assert_eq!(closed, 0, "fi_close");
    }
}

/// Compares the C API, the provider and a domain over `name`, a provider of libfabric.
fn over(functions: &sys::Functions, name: &'static str) -> Result<(), CallError> {
    let fabric = Fabric::open(functions, Wanted { mr_mode: 0, ..Wanted::rma(name) })?;
    // SAFETY: the domain outlives the value.
    let ways = unsafe { Ways::open(functions.clone(), fabric.domain, fabric.info) };
    let goal = || Target::Ratio(1.05);
    let register =
        |what, way: fn(&Ways)| report::compare(what, goal(), || way(&ways), || ways.direct());
    let mut lines = vec![
        register("register and close 4 KiB, by the provider", Ways::by_provider),
        register("register and close 4 KiB, by a domain", Ways::by_domain),
    ];
    Writes::open(functions, name)?.run(|direct, by_provider| {
        lines.push(report::compare("write 8 B, by the provider", goal(), by_provider, direct));
    });
    println!("\nover {name}, {}, against the C API", functions.library());
    report::print(lines);
    Ok(())
}

/// Does each way over the library that does nothing, for a count of the instructions.
fn count() -> Result<(), CallError> {
    let (functions, rounds) = (nothing::functions(), 1000);
    let fabric = Fabric::open(&functions, Wanted::rma(nothing::NAME))?;
    // SAFETY: the domain outlives the value.
    let ways = unsafe { Ways::open(functions.clone(), fabric.domain, fabric.info) };
    let writes = Writes::open(&functions, nothing::NAME)?;
    writes.run(|direct, by_provider| {
        for _ in 0..rounds {
            ways.direct();
            ways.by_provider();
            ways.by_domain();
            direct();
            by_provider();
        }
    });
    println!("{rounds} rounds of each");
    Ok(())
}

fn main() {
    if std::env::args().any(|argument| argument == "count") {
        return count().expect("the library that does nothing");
    }
    over(&nothing::functions(), nothing::NAME).expect("the library that does nothing");
    let functions = match sys::Functions::find() {
        Ok(functions) => functions,
        Err(error) => return println!("\nnot measured: {error}"),
    };
    for provider in ["tcp;ofi_rxm", "shm"] {
        if let Err(CallError(call, code)) = over(&functions, provider) {
            println!("\nnot measured: {provider}: {call}: {code}");
        }
    }
}
