//! Overhead of this crate over libfabric's C API: registering and closing a region of 4 KiB by
//! `fi_mr_regattr` and `fi_close`, by this provider, and by a [`Domain`] over it. The calls
//! alternate in one run, over a domain that does nothing and over `tcp` of the installed libfabric.
//!
//! The following commands count the instructions. Divide each count by the number of rounds that
//! the bench prints. The difference between a count and the first is what hmem adds.
//!
//! ```text
//! for way in direct by_provider by_domain; do
//!     valgrind --tool=callgrind --toggle-collect="*Ways*$way*" \
//!         TARGET/release/deps/libfabric-HASH count
//! done
//! ```

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "../../examples/own_fabric_domain/application.rs"]
#[allow(dead_code, reason = "the bench transfers nothing")]
mod application;

use std::{
    ffi::{CString, c_int},
    ptr,
    sync::Arc,
    time::Instant,
};

use application::{CallError, Fabric, Wanted};
use hmem_core::{
    Access, AddressRange, AuthKey, Domain, DomainAttr, Promise, Raw, Registry,
    provider::{Backing, KeyRequest, Piece, ProviderDomain, Registration},
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{Libfabric, sys};

const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const KEY: u64 = 77;
const LEN: usize = 4096;

/// A libfabric domain whose calls do nothing.
struct Nothing {
    domain: sys::fid_domain,
    operations: sys::fi_ops_mr,
    info: sys::fi_info,
    attr: sys::fi_domain_attr,
    fabric: sys::fi_fabric_attr,
    _name: CString,
}

static NO_OPERATIONS: sys::fi_ops =
    sys::fi_ops { size: size_of::<sys::fi_ops>(), close: Some(close), bind: None, control: None };

unsafe extern "C" fn close(_: *mut sys::fid) -> c_int {
    0
}

/// The region that every registration returns. Nothing reads or writes it through this pointer but
/// the bench, which has one thread.
struct Region(sys::fid_mr);

// SAFETY: the bench has one thread.
unsafe impl Sync for Region {}

static REGION: Region = Region(sys::fid_mr {
    fid: sys::fid { fclass: 0, context: ptr::null_mut(), ops: &raw const NO_OPERATIONS },
    mem_desc: ptr::null_mut(),
    key: KEY,
});

unsafe extern "C" fn regattr(
    _: *mut sys::fid,
    _: *const sys::fi_mr_attr,
    _: u64,
    out: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: the caller passes a place for the region.
    unsafe { *out = (&raw const REGION.0).cast_mut() };
    0
}

impl Nothing {
    fn new() -> Box<Self> {
        let name = CString::new("nothing").expect("a name without a zero");
        // SAFETY: all zeros are valid in these structs of integers and pointers.
        let mut this = unsafe {
            Box::new(Self {
                domain: std::mem::zeroed(),
                operations: std::mem::zeroed(),
                info: std::mem::zeroed(),
                attr: std::mem::zeroed(),
                fabric: std::mem::zeroed(),
                _name: name,
            })
        };
        this.operations.regattr = Some(regattr);
        (this.domain.fid.fclass, this.domain.fid.ops) =
            (sys::FI_CLASS_DOMAIN, &raw const NO_OPERATIONS);
        this.domain.mr = &raw const this.operations;
        (this.attr.threading, this.attr.name) =
            (sys::FI_THREAD_SAFE, this._name.as_ptr().cast_mut());
        this.fabric.prov_name = this._name.as_ptr().cast_mut();
        (this.info.domain_attr, this.info.fabric_attr) = (&raw mut this.attr, &raw mut this.fabric);
        this
    }
}

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

    fn measure(&self, title: &str) {
        const ROUNDS: usize = 31;
        const TIMES: u32 = 20_000;
        let ways = [Self::direct as fn(&Self), Self::by_provider, Self::by_domain];
        let timed = |way: fn(&Self)| {
            let begun = Instant::now();
            for _ in 0..TIMES {
                way(self);
            }
            begun.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES)
        };
        for way in ways {
            timed(way);
        }
        let rounds: Vec<[f64; 3]> = (0..ROUNDS)
            .map(|round| {
                let mut times = [0.0; 3];
                // A different way is the first in each round.
                for turn in 0..3 {
                    let way = (round + turn) % 3;
                    times[way] = timed(ways[way]);
                }
                times
            })
            .collect();
        println!("\n{title}: register and close 4 KiB\n{:<10} {:>8} {:>8}", "", "ns", "ratio");
        for (at, name) in ["C API", "provider", "domain"].iter().enumerate() {
            let time = median(rounds.iter().map(|times| times[at]));
            let ratio = median(rounds.iter().map(|times| times[at] / times[0]));
            println!("{name:<10} {time:>8.1} {ratio:>8.3}");
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns functions of which only `fi_version` is called.
fn no_functions() -> sys::Functions {
    unsafe extern "C" fn fi_version() -> u32 {
        sys::API_VERSION
    }
    let address = fi_version as *const ();
    // SAFETY: the bench calls `fi_version` alone, which has this type.
    unsafe { sys::Functions::from_lookup(|_| Some(address)) }.expect("every function")
}

fn main() {
    let mut nothing = Nothing::new();
    let (fid, info) = (&raw mut nothing.domain, &raw const nothing.info);
    // SAFETY: the domain outlives the value.
    let over_nothing = unsafe { Ways::open(no_functions(), fid, info) };
    if std::env::args().any(|argument| argument == "count") {
        let rounds = 1000;
        for _ in 0..rounds {
            over_nothing.direct();
            over_nothing.by_provider();
            over_nothing.by_domain();
        }
        println!("{rounds} rounds of each");
        return;
    }
    over_nothing.measure("over a domain that does nothing");
    let functions = match sys::Functions::find() {
        Ok(functions) => functions,
        Err(error) => return println!("\nnot measured: {error}"),
    };
    for provider in ["tcp", "tcp;ofi_rxm"] {
        let wanted = Wanted { mr_mode: 0, ..Wanted::rma(provider) };
        match Fabric::open(&functions, wanted) {
            // SAFETY: the domain outlives the value.
            Ok(fabric) => unsafe { Ways::open(functions.clone(), fabric.domain, fabric.info) }
                .measure(&format!("over {provider}, {}", functions.library())),
            Err(CallError(call, code)) => println!("\nnot measured: {provider}: {call}: {code}"),
        }
    }
}
