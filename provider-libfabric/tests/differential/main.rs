//! Random programs of registration calls and transfers, each executed in three ways: by libfabric's
//! C API, in a domain that hmem borrows, and on the software NIC. Results, error numbers, keys and
//! bytes must be equal, but for the differences in `deviations`.

#[path = "../../../examples/own_fabric_domain/application.rs"]
mod application;
mod compare;
mod deviations;
mod memory;
mod program;
mod sides;
#[path = "../../../tests/trials/mod.rs"]
mod trials;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    env,
    ffi::CStr,
};

use application::{Fabric, Wanted};
use compare::Sides;
use deviations::Deviation;
use hmem_core::MrMode;
use hmem_provider_libfabric::sys;
use program::{ACCESS, Detail, Request, Step, Transfer, programs};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use sides::Mode;
use trials::{Outcome, Skipped, trials};

/// Seed of the programs, unless `HMEM_DIFFERENTIAL_SEED` has another.
const SEED: u64 = 27;

/// Number of programs for each domain, unless `HMEM_DIFFERENTIAL_PROGRAMS` has another.
const PROGRAMS: u32 = 2;

const PROVIDERS: [&str; 5] = ["tcp;ofi_rxm", "shm", "tcp", "sockets", "udp;ofi_rxd"];

/// `FI_DELIVERY_COMPLETE`: a write completes after its bytes are in the target's memory.
const DELIVERY_COMPLETE: u64 = 1 << 28;

/// One domain to compare.
#[derive(Clone, Copy, Debug)]
struct Case {
    wanted: Wanted,
    mode: Mode,
    /// The capabilities that the domain has.
    caps: u64,
    /// True if the provider is layered below `ofi_rxm`. In libfabric 1.17, `tcp` is.
    rxm: bool,
}

fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    match env::var(name) {
        Ok(text) => text.parse().ok().unwrap_or_else(|| panic!("{name}={text}: not a number")),
        Err(_) => default,
    }
}

/// Returns the case of an open domain.
fn case_of(wanted: Wanted, fabric: &Fabric) -> Case {
    // SAFETY: the `fi_info` has its attributes and a name, and is not freed before `fabric`.
    let (bits, caps, name) = unsafe {
        let name = CStr::from_ptr((*(*fabric.info).fabric_attr).prov_name);
        ((*(*fabric.info).domain_attr).mr_mode, (*fabric.info).caps, name.to_string_lossy())
    };
    let bits = MrMode::from_bits_truncate(bits.unsigned_abs());
    let basic = bits.contains(MrMode::BASIC);
    let mode = Mode { mode: bits.effective(), basic, hmem: caps & sys::FI_HMEM != 0 };
    Case { wanted, mode, caps, rxm: name.contains("ofi_rxm") }
}

/// Returns the offers of mode bits: none, BASIC, every bit alone, pairs of the usual ones, and all.
fn offers() -> Vec<i32> {
    let single = (2..12).map(|bit| 1 << bit);
    let usual = [sys::FI_MR_LOCAL, sys::FI_MR_VIRT_ADDR, sys::FI_MR_ALLOCATED, sys::FI_MR_PROV_KEY];
    let subsets = (0..16)
        .map(|chosen: i32| (0..4).filter(|bit| chosen >> bit & 1 == 1).map(|bit| usual[bit]).sum());
    let all = (2..12).map(|bit| 1 << bit).sum();
    let mut offers: Vec<i32> = subsets.chain(single).chain([1, all]).collect();
    offers.sort_unstable();
    offers.dedup();
    offers
}

/// Returns a domain of each provider for each mode that the provider has.
fn cases(functions: &sys::Functions) -> Vec<Case> {
    // SAFETY: the call has no precondition.
    let newest = unsafe { functions.fi_version()() };
    let mut versions = vec![sys::API_VERSION, newest];
    versions.dedup();
    let mut cases: Vec<Case> = Vec::new();
    for provider in PROVIDERS {
        for &api_version in &versions {
            for caps in [sys::FI_RMA, sys::FI_RMA | sys::FI_HMEM, sys::FI_RMA | sys::FI_RMA_EVENT] {
                for mr_mode in offers() {
                    let op_flags = DELIVERY_COMPLETE;
                    let wanted =
                        Wanted { api_version, caps, op_flags, mr_mode, ..Wanted::rma(provider) };
                    let Ok(fabric) = Fabric::open(functions, wanted) else { continue };
                    let case = case_of(wanted, &fabric);
                    let same = |known: &Case| {
                        let id = |case: &Case| {
                            let Wanted { provider, api_version, .. } = case.wanted;
                            (provider, api_version, case.caps, case.mode)
                        };
                        id(known) == id(&case)
                    };
                    if !cases.iter().any(same) {
                        cases.push(case);
                    }
                }
            }
        }
    }
    cases
}

fn functions() -> Result<sys::Functions, Skipped> {
    sys::Functions::find().map_err(|error| Skipped(error.to_string()))
}

/// Runs programs on the three sides of every case, and returns how often each deviation was met.
fn on_every_case(
    run: impl Fn(Case, &RefCell<Sides>) -> Result<(), String>,
) -> Result<BTreeMap<Deviation, u64>, Skipped> {
    let functions = functions()?;
    let mut met = BTreeMap::new();
    for case in cases(&functions) {
        let sides = Sides::open(&functions, case).expect("open the domains");
        let sides = RefCell::new(sides);
        if let Err(why) = run(case, &sides) {
            panic!("{case:#?}: {why}");
        }
        for (deviation, count) in sides.into_inner().met {
            *met.entry(deviation).or_insert(0) += count;
        }
    }
    Ok(met)
}

fn random_programs_have_equal_results() -> Outcome {
    let seed = setting("HMEM_DIFFERENTIAL_SEED", SEED);
    let count = setting("HMEM_DIFFERENTIAL_PROGRAMS", PROGRAMS);
    let case_number = Cell::new(0_u64);
    let met = on_every_case(|case, sides| {
        let Wanted { provider, api_version, mr_mode, .. } = case.wanted;
        println!("seed {seed}, {count} programs: {provider}, {api_version:#x}, mode {mr_mode:#x}");
        let config = Config { cases: count, failure_persistence: None, ..Config::default() };
        // Each case has programs of its own.
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&case_number.replace(case_number.get() + 1).to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, random);
        let result = runner.run(&programs(), |program| {
            sides.borrow_mut().run(&program).map_err(TestCaseError::fail)
        });
        result.map_err(|error| format!("seed {seed}: {error}"))
    })?;
    println!("differences: {met:#?}");
    Ok(())
}

/// Returns a request for one range, with rights of the local side and of peers.
fn plain(start: u64, key: u64) -> Request {
    let access = ACCESS.iter().sum();
    Request { ranges: vec![(start, 8000)], access, key, flags: 0, detail: Detail::None }
}

/// Registers with each subset of the access bits. With `transfers`, also uses the region on each
/// side of a write and of a read.
fn access_program(access: u64, transfers: bool) -> Vec<Step> {
    let request = Request { access, ..plain(100, 1) };
    let mut program = vec![
        Step::Register { slot: 0, request },
        Step::Register { slot: 1, request: plain(20_000, 2) },
    ];
    let sides = [(0, None), (1, Some(0))];
    program.extend(sides.iter().filter(|_| transfers).flat_map(|&(slot, local)| {
        [true, false].map(|write| {
            let transfer =
                Transfer { write, range: 0, offset: 10, len: 100, wrong_key: false, local };
            Step::Transfer { slot, transfer }
        })
    }));
    program
}

fn subset(chosen: u64) -> u64 {
    (0..ACCESS.len()).filter(|bit| chosen >> bit & 1 == 1).map(|bit| ACCESS[bit]).sum()
}

/// With the default number of programs, regions with more than one right transfer nothing: a
/// refused transfer costs new endpoints.
fn every_access_subset_and_every_flag_has_equal_results() -> Outcome {
    let thorough = setting("HMEM_DIFFERENTIAL_PROGRAMS", PROGRAMS) > PROGRAMS;
    let seen = RefCell::new(Vec::new());
    on_every_case(|case, sides| {
        let mut sides = sides.borrow_mut();
        // The rights depend on the provider alone, so one domain of each provider transfers.
        let first = !seen.borrow().contains(&case.wanted.provider);
        seen.borrow_mut().push(case.wanted.provider);
        for chosen in 0_u64..1 << ACCESS.len() {
            let transfers = first && (thorough || chosen.count_ones() < 2);
            sides.run(&access_program(subset(chosen), transfers))?;
        }
        for bit in 0..64 {
            let request = Request { flags: 1 << bit, ..plain(100, 1) };
            sides.run(&[Step::Register { slot: 0, request }])?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Every intended difference has an entry in `docs/fi_mr-deviations.md`.
fn every_deviation_is_listed() {
    let page = include_str!("../../../docs/fi_mr-deviations.md");
    for deviation in Deviation::ALL {
        let heading = format!("\n### {}\n", deviation.heading());
        assert!(page.contains(&heading), "{deviation:?}: no heading {:?}", deviation.heading());
    }
}

trials! {
    /// FAB-09
    random_programs_have_equal_results,
    /// FAB-09
    every_access_subset_and_every_flag_has_equal_results,
    /// FAB-09
    every_deviation_is_listed,
}
