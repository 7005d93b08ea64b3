//! Memory that hmem uses for each of a million live regions. Also checks that the regions register,
//! that random writes to them arrive, and that they close.
//!
//! A counting global allocator counts every byte that the process allocates, with an estimate of
//! the rounding of glibc's `malloc`. So the result includes the region handles, the state of the
//! `core` crate, and the entries and maps of the software NIC.

#![allow(missing_docs, reason = "a bench is a program")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem::{
    Access, Address, AddressRange, DomainAttr, Hmem, Iova, MrFlags, MrMode, Promise, Raw, fabric,
    loopback::{Loopback, Progress},
    provider::EndpointAttr,
    transfer::{LocalSegment, Operation, RemoteSegment, WorkRequest},
};

struct CountingAllocator;

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Returns the bytes that glibc's `malloc` uses for a layout: its size plus 8 bytes of header,
/// rounded up to a multiple of 16, and at least 32.
fn block_size(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(block_size(layout), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(block_size(layout), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`. The block came from the system
        // allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const REGIONS: usize = 1_000_000;
const LEN: u64 = 64;
const BUDGET: usize = 512;

fn run(mode: MrMode, name: &str) {
    let loopback = Loopback::builder()
        .needs(mode)
        .progress(Progress::ByHand)
        .build()
        .expect("a software NIC starts");
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback)
        .build()
        .expect("host memory is always available");
    let domain = hmem
        .domain("loopback", DomainAttr { mr_mode: mode, ..DomainAttr::default() })
        .expect("the NIC offers the mode that it needs");
    let mut memory = vec![0u8; REGIONS * LEN as usize];
    let base = Address::of_ptr(memory.as_mut_ptr()).0;
    let mut regions = Vec::with_capacity(REGIONS);
    let before = LIVE.load(Ordering::Relaxed);
    for index in 0..REGIONS as u64 {
        let range =
            AddressRange::new(Address(base + index * LEN), LEN).expect("the range does not wrap");
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        // SAFETY: `memory` outlives the regions, and is read only after they are closed.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let region = fabric::reg(&domain, memory, access, index + 1, MrFlags::empty());
        regions.push(region.expect("register"));
    }
    let each = (LIVE.load(Ordering::Relaxed) - before) / REGIONS + size_of_val(&regions[0]);
    println!(
        "{name}: {each} B of library memory per region, {REGIONS} live (at most {BUDGET}), the 8 \
         B handle included"
    );
    assert!(each <= BUDGET, "{each} B per region is over the budget of {BUDGET} B");
    assert_eq!(domain.live().regions, REGIONS as u64);

    let cq = domain.open_cq(16).expect("a queue");
    let attr = EndpointAttr::new(&cq);
    let endpoint = domain.open_endpoint(&attr).expect("an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("an endpoint resolves its own name");
    let source = domain
        .register(vec![0x5au8; LEN as usize], Access::WRITE)
        .map(|region| region.desc().map(|desc| (region, desc)));
    let (source, desc) = source.expect("register").expect("registered");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut completions, mut written) = (Vec::new(), Vec::new());
    for _ in 0..100_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let index = (state % REGIONS as u64) as usize;
        let key = regions[index].key().expect("registered");
        let remote = [RemoteSegment { address: Iova(key.base().0 + 8), len: 8, key: &key }];
        let local = [LocalSegment { address: source.range().start(), len: 8, desc: Some(desc) }];
        let request = WorkRequest {
            operation: Operation::Write { remote: &remote },
            local: &local,
            peer,
            context: 0,
        };
        // SAFETY: the source region owns its memory. The target memory outlives its region, and is
        // read only after the region is closed.
        unsafe { endpoint.post(&request) }.expect("the queue has room");
        while completions.is_empty() {
            cq.read(&mut completions, 1).expect("the queue can be read");
        }
        completions
            .pop()
            .expect("the queue returned a completion")
            .result
            .expect("the write succeeds");
        written.push(index);
    }
    for region in regions {
        region.close().expect("the region is not in use");
    }
    assert!(
        written.iter().all(|index| memory[index * LEN as usize + 8..][..8] == [0x5a; 8]),
        "written bytes are missing"
    );
    println!(
        "{name}: 100,000 random writes arrived; every region closed, {} left",
        domain.live().regions - 1
    );
}

fn main() {
    run(MrMode::empty(), "requested keys");
    run(MrMode::PROV_KEY | MrMode::VIRT_ADDR, "provider keys, virtual addresses");
}
