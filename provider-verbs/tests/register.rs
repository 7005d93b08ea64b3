//! Registrations over a real driver: rights, errors compared with the direct verbs call, limits,
//! options, fork.

#[path = "../../tests/child/mod.rs"]
mod child;
mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, ErrorKind, Iova, RemoteKey,
    provider::{Backing, Piece, ProviderDomain, ProviderRegion, Registration},
};
use hmem_provider_verbs::{
    ForkSupport, OptionResult, Settings, Verbs, VerbsDomain, VerbsOptions, sys::AccessFlags,
};
use support::{LOCAL, Pages, Pair, REMOTE, Side, device, open, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    /// VRB-01
    refused_rights_match_those_of_the_driver,
    /// VRB-01
    region_without_rights_is_still_readable_locally,
    unmapped_or_read_only_memory_is_a_bad_address,
    /// VRB-02
    options_reach_the_driver_or_are_unsupported,
    /// VRB-02
    on_demand_pages_follow_their_mapping,
    /// VRB-01
    failed_change_of_rights_keeps_the_region,
    /// VRB-05
    locked_memory_limit_is_named_with_value_and_remedy,
    registered_pages_survive_a_fork,
}

/// Functions of libibverbs that the test calls directly, to compare them with the provider.
struct Raw {
    reg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> *mut c_void,
    dereg_mr: unsafe extern "C" fn(*mut c_void) -> c_int,
}

impl Raw {
    fn load() -> Self {
        // SAFETY: loading libibverbs has no precondition. The library stays loaded, since the
        // provider also loads it.
        let find = |name: &std::ffi::CStr| unsafe {
            let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null(), "libibverbs loads");
            let symbol = libc::dlvsym(library, name.as_ptr(), c"IBVERBS_1.1".as_ptr());
            assert!(!symbol.is_null(), "{name:?}");
            symbol
        };
        // SAFETY: the signatures are those of the header.
        unsafe {
            Self {
                reg_mr: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> *mut c_void,
                >(find(c"ibv_reg_mr")),
                dereg_mr: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void) -> c_int,
                >(find(c"ibv_dereg_mr")),
            }
        }
    }

    /// Returns the errno of a direct registration call, or 0 if it succeeded.
    fn register(&self, domain: &VerbsDomain, address: u64, len: usize, flags: AccessFlags) -> i32 {
        let address = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the protection domain is alive; the driver checks the range.
        let mr = unsafe { (self.reg_mr)(domain.pd(), address, len, flags.bits() as c_int) };
        if mr.is_null() {
            return std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        }
        // SAFETY: the call above registered the region.
        assert_eq!(unsafe { (self.dereg_mr)(mr) }, 0);
        0
    }
}

fn side(name: &str) -> Side {
    Side::new(open(&Verbs::open().expect("load libibverbs"), name))
}

fn with_options(
    side: &Side,
    range: AddressRange,
    options: VerbsOptions,
) -> hmem_core::Result<ProviderRegion> {
    let auth_key = AuthKey::default();
    let ranges = [range];
    let settings = Settings { options, iova: None };
    let request = Registration::new(&ranges, LOCAL | REMOTE, &auth_key);
    let request = Registration { extension: Some(&settings), ..request };
    let pieces = [Piece { range, backing: Backing::Host { owned: false } }];
    // SAFETY: the tests' pages outlive their regions, except where a test removes the pages on
    // purpose.
    unsafe { side.verbs().register(&request, &pieces) }
}

fn refused_rights_match_those_of_the_driver() -> Outcome {
    let name = device()?;
    let (side, raw) = (side(&name), Raw::load());
    let pages = Pages::new(8192);
    let verbs = side.verbs();
    for flags in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC] {
        let error = Access::try_from(flags).expect_err("no LOCAL_WRITE");
        assert_eq!(error.kind(), ErrorKind::BadAccess, "{error}");
        let errno = error.os_errno().expect("the raw call's number").0;
        assert_eq!(errno, raw.register(verbs, pages.address, pages.len, flags), "{flags:?}");
    }
    let empty = AddressRange::new(Address(pages.address), 0).expect("range");
    let error = side.register(empty, Access::SEND).expect_err("empty");
    assert_eq!(error.kind(), ErrorKind::ZeroLength);
    assert_eq!(raw.register(verbs, pages.address, 0, AccessFlags::empty()), 22);
    assert!(
        AddressRange::new(Address(u64::MAX - 4095), 8192).is_err(),
        "a range that wraps cannot be named"
    );
    assert_eq!(raw.register(verbs, u64::MAX - 4095, 8192, AccessFlags::empty()), 22);
    assert_eq!(
        raw.register(
            verbs,
            pages.address,
            pages.len,
            AccessFlags::all() & AccessFlags::LOCAL_WRITE
        ),
        0
    );
    assert_eq!(side.domain.live().regions, 0);
    Ok(())
}

fn region_without_rights_is_still_readable_locally() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let bytes = from.fill(8);
    let source = pair.near.register(from.range(), Access::WRITE).expect("register");
    let flags = pair.near.verbs().flags(source.provider_region().expect("handle"));
    assert_eq!(flags.expect("flags"), AccessFlags::empty());
    let target = pair.far.register(to.range(), REMOTE).expect("register");
    let key = target.key().expect("key");
    pair.near
        .write(segment(from.range(), source.desc().expect("desc")), remote(&key, 0, 4096))
        .expect("write");
    assert_eq!(to.get(0, 4096), bytes);
    source.close().map_err(|rejected| rejected.error).expect("close");
    Ok(())
}

fn unmapped_or_read_only_memory_is_a_bad_address() -> Outcome {
    let name = device()?;
    let side = side(&name);
    let gone = {
        let pages = Pages::new(8192);
        pages.range()
    };
    let read_only = Pages::with_protection(8192, libc::PROT_READ);
    let none = Pages::with_protection(8192, libc::PROT_NONE);
    for (what, range, access) in [
        ("unmapped", gone, LOCAL),
        ("read-only, to be written", read_only.range(), LOCAL),
        ("PROT_NONE", none.range(), Access::SEND),
    ] {
        let error = side.register(range, access).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::BadAddress, "{what}: {error}");
        assert_eq!(error.os_errno().map(|errno| errno.0), Some(14), "{what}: {error}");
        assert!(
            error.remedy_text().is_some_and(|text| text.contains("map the whole range")),
            "{error}"
        );
    }
    let region = side
        .register(read_only.range(), Access::SEND | Access::REMOTE_READ)
        .expect("read-only pages");
    drop(region);
    assert_eq!(side.domain.live().page_registrations, 0);
    Ok(())
}

fn options_reach_the_driver_or_are_unsupported() -> Outcome {
    let name = device()?;
    let side = side(&name);
    let pages = Pages::new(8192);
    let mut answers = Vec::new();
    for (word, option) in VerbsOptions::all().iter_names() {
        match with_options(&side, pages.range(), option) {
            Ok(region) => {
                let results = side.verbs().options(region).expect("options");
                let unsure = option == VerbsOptions::RELAXED_ORDERING;
                let expected = if unsure {
                    OptionResult::RequestedNotConfirmable
                } else {
                    OptionResult::Accepted
                };
                assert_eq!(results, [(option, expected)]);
                assert!(side.verbs().flags(region).expect("flags").bits() & option.bits() != 0);
                side.verbs().deregister(region).expect("deregister");
                answers.push(format!("{word} granted"));
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{word}: {error}");
                assert!(
                    error.provider_name().is_some_and(|provider| provider.contains(&name)),
                    "{error}"
                );
                answers.push(format!("{word} unsupported"));
            }
        }
    }
    println!("{name}: {}", answers.join(", "));
    if name.starts_with("rxe") {
        for expected in [
            "MW_BIND granted",
            "ZERO_BASED unsupported",
            "HUGETLB unsupported",
            "RELAXED_ORDERING granted",
        ] {
            assert!(answers.iter().any(|answer| answer == expected), "{expected}: {answers:?}");
        }
    }
    Ok(())
}

/// After the mapping of an on-demand region is replaced, peers access the new pages: ON_DEMAND does
/// not pin pages.
fn on_demand_pages_follow_their_mapping() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let page_size = rustix::param::page_size();
    let (from, to) = (Pages::new(2 * page_size), Pages::new(2 * page_size));
    let granted = with_options(&pair.far, to.range(), VerbsOptions::ON_DEMAND);
    let newer = std::env::var("HMEM_VM_KERNEL").is_ok_and(|release| !release.starts_with("6."));
    let region = match granted {
        Ok(region) => region,
        Err(error) if !newer => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            return Err(Skipped(error.to_string()));
        }
        Err(error) => panic!("rxe of this kernel pages on demand: {error}"),
    };
    let bytes = from.fill(61);
    let source = pair.near.register(from.range(), LOCAL).expect("register");
    let base = Iova(to.range().start().0);
    let key = RemoteKey::new(Addressing::Virtual, base, to.len as u64, region.key);
    // Each page holds one packet: rxe of Linux 7.3 puts every packet at the start of a page.
    const LEN: usize = 512;
    let desc = source.desc().expect("desc");
    let write = |page: usize| {
        let remote = remote(&key, page as u64, LEN as u64);
        pair.near.write(segment(from.part(page as u64, LEN as u64), desc), remote).expect("write");
    };
    for page in [0, page_size] {
        write(page);
        assert!(to.get(page, LEN) == bytes[page..page + LEN], "page at {page}");
    }
    to.map_anew();
    for page in [0, page_size] {
        assert!(to.get(page, LEN) == [0; LEN], "new page at {page}");
        write(page);
        assert!(
            to.get(page, LEN) == bytes[page..page + LEN],
            "the NIC reads the new page at {page}"
        );
    }
    pair.far.verbs().deregister(region).expect("deregister");
    Ok(())
}

fn failed_change_of_rights_keeps_the_region() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let (from, to) = (Pages::new(4096), Pages::new(4096));
    let source = pair.near.register(from.range(), LOCAL).expect("register");
    let target = pair.far.register(to.range(), Access::REMOTE_READ).expect("register");
    let handle = target.provider_region().expect("handle");
    let local = segment(from.part(0, 64), source.desc().expect("desc"));
    // SAFETY: the pages outlive the region, and may be written.
    match unsafe { pair.far.verbs().rereg(handle, REMOTE) } {
        Ok(()) => {
            let key = target.key().expect("key");
            pair.near.write(local, remote(&key, 0, 64)).expect("the new right works");
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.remedy_text().is_some_and(|text| text.contains("unchanged")), "{error}");
            println!("{name}: {error}");
            let key = target.key().expect("key");
            pair.near.read(local, remote(&key, 0, 64)).expect("the old right still works");
        }
    }
    Ok(())
}

/// Lowers the process's locked-memory limit, gives up root, and checks the error of a registration
/// over the limit. The caller must run in a process of its own, since a process cannot restore its
/// limit and user.
fn register_over_the_limit(name: &str, limit: u64, errno: i32) {
    let side = side(name);
    let pages = Pages::new(1 << 20);
    let rlimit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: the test started this process for this call only, so no other code needs its limit
    // and user.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &rlimit), 0);
        assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
    }
    let error = side.register(pages.range(), LOCAL).expect_err("over the limit");
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(errno), "{error}");
    let why = format!("the locked-memory limit (RLIMIT_MEMLOCK) is {limit} bytes");
    assert_eq!(error.context_value("why"), Some(why.as_str()), "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("ulimit -l")), "{error}");
    assert_eq!(side.domain.live().page_registrations, 0);
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let pinned = status.lines().find(|line| line.starts_with("VmPin")).expect("VmPin");
    assert_eq!(pinned.split_whitespace().nth(1), Some("0"), "nothing stays pinned: {pinned}");
}

fn locked_memory_limit_is_named_with_value_and_remedy() -> Outcome {
    const LIMIT: &str = "HMEM_VERBS_TEST_LIMIT";
    let name = device()?;
    if let Ok(limit) = std::env::var(LIMIT) {
        let limit: u64 = limit.parse().expect("a number");
        register_over_the_limit(&name, limit, if limit == 0 { 1 } else { 12 });
        return Ok(());
    }
    // SAFETY: the call has no precondition.
    if unsafe { libc::geteuid() } != 0 {
        return Err(Skipped("becoming a user whom the limit binds needs root".to_owned()));
    }
    for limit in ["65536", "0"] {
        let name = "locked_memory_limit_is_named_with_value_and_remedy";
        child::passes(child::command(name).env(LIMIT, limit));
    }
    Ok(())
}

/// MON-06
fn registered_pages_survive_a_fork() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let len = 2 * rustix::param::page_size();
    let (from, to) = (Pages::new(len), Pages::new(len));
    let source = pair.near.register(from.range(), LOCAL).expect("register");
    let target = pair.far.register(to.range(), REMOTE).expect("register");
    assert!(
        !matches!(pair.verbs.fork_support(), ForkSupport::Off(_)),
        "{:?}",
        pair.verbs.fork_support()
    );
    println!("{name}: {:?}", pair.verbs.fork_support());
    let mut hold = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(hold.as_mut_ptr()) }, 0);
    // SAFETY: the child makes system calls only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the child makes system calls only, and shares the pages until the parent closes
        // the pipe.
        unsafe {
            libc::close(hold[1]);
            libc::read(hold[0], hold.as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    // Without protection, the first write after a fork would move the parent's data to a copy of
    // the page.
    let bytes = from.fill(21);
    to.put(0, &vec![1; len]);
    let key = target.key().expect("key");
    pair.near
        .write(segment(from.range(), source.desc().expect("desc")), remote(&key, 0, len as u64))
        .expect("write");
    assert_eq!(to.get(0, len), bytes, "the NIC and the parent see the same pages");
    // SAFETY: the descriptors and the child are this test's own.
    unsafe {
        libc::close(hold[0]);
        libc::close(hold[1]);
        libc::waitpid(child, ptr::null_mut(), 0);
    }
    Ok(())
}
