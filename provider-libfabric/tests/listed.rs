//! NICs that an installed libfabric lists (`HMEM_LIBFABRIC_LIBRARY`), and registration in domains
//! that the provider opens on them.

#[path = "../../tests/trials/mod.rs"]
mod trials;
mod watchdog;

use std::{
    collections::BTreeSet,
    env, fs,
    path::PathBuf,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hmem_core::{
    Access, Domain, DomainAttr, ErrorKind, MrMode, Registry, Request, Result,
    path::PathSelector,
    provider::{DomainRequest, MsgOrder, Provider},
};
use hmem_iface_system::System;
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_libfabric::{FabricDomain, FabricMr, Libfabric, sys};
use trials::{Outcome, Skipped, trials};

/// Providers with RDM endpoints on a machine without a NIC, in every release.
const PROVIDERS: [&str; 2] = ["tcp;ofi_rxm", "shm"];

/// Limit for all tests together. A call of libfabric that never returns ends the process.
const LIMIT: Duration = Duration::from_secs(300);

/// Waits until no other test runs: `Builder::build` changes the environment. Skips the test if
/// libfabric cannot be loaded.
fn turn() -> Result<MutexGuard<'static, ()>, Skipped> {
    static TURN: Mutex<()> = Mutex::new(());
    watchdog::start(LIMIT);
    let guard = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    sys::Functions::find().map_err(|error| Skipped(error.to_string()))?;
    Ok(guard)
}

fn build(name: Option<&str>) -> Result<Libfabric> {
    let builder = Libfabric::builder();
    let builder = name.into_iter().fold(builder, |builder, name| builder.provider(name));
    // SAFETY: the caller has its turn, so that no other thread uses the environment. The tests
    // close regions without transfers in flight.
    unsafe { builder.build() }
}

fn open(provider: &Libfabric, nic: Option<&str>) -> Result<Domain> {
    let mut registry = Registry::new();
    registry.add(Arc::new(System::default())).expect("host memory");
    let paths: Arc<dyn PathSelector> = Arc::new(DefaultPathSelector::new());
    let attr =
        DomainAttr { nic: nic.map(str::to_owned), mr_mode: MrMode::all(), ..Default::default() };
    let needed = provider.nics()?[0].required_mr_mode;
    Domain::open(provider, Arc::new(registry), paths, DomainAttr { mr_mode: needed, ..attr })
}

fn nics_are_listed_by_provider_and_domain_with_their_abilities() -> Outcome {
    let _turn = turn()?;
    let nics = build(None).expect("build").nics().expect("list");
    let names: BTreeSet<_> = nics.iter().map(|nic| nic.nic.name.clone()).collect();
    assert_eq!(names.len(), nics.len(), "a NIC is listed twice: {names:?}");
    for provider in PROVIDERS {
        let of = |name: &String| name.starts_with(&format!("{provider}:"));
        assert!(names.iter().any(of), "{provider}: {names:?}");
        let nic = nics.iter().find(|nic| of(&nic.nic.name)).expect("listed");
        assert_eq!(nic.nic.provider, "libfabric");
        assert_eq!(nic.required_mr_mode, MrMode::empty(), "software needs no bits");
        assert_eq!((nic.key_size, nic.raw_key_size), (8, 8));
        assert!(nic.order.contains(MsgOrder::SAS), "{provider}: {:?}", nic.order);
        assert!(!nic.imports.dma_buf && nic.imports.staged, "{:?}", nic.imports);
        assert_eq!((&nic.driver_cache, &nic.nic.pci_bus_id), (&None, &None));
    }
    // The order of libfabric, with the fastest NIC first.
    let first = open(&build(None).expect("build"), None).expect("open");
    assert_eq!(first.provider_attr().nic, nics[0].nic);
    Ok(())
}

fn filter_lists_one_provider_and_unknown_names_list_those_that_exist() -> Outcome {
    let _turn = turn()?;
    for provider in PROVIDERS {
        let filtered = build(Some(provider)).expect("build");
        let nics = filtered.nics().expect("list");
        let prefix = format!("{provider}:");
        assert!(nics.iter().all(|nic| nic.nic.name.starts_with(&prefix)), "{nics:?}");
        let again = filtered.nics().expect("list again");
        assert_eq!(again.len(), nics.len());
        let error = open(&filtered, Some("nonesuch:eth0")).expect_err("no such NIC");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    for name in ["nonesuch", "tcp;nonesuch", "", "ofi_rxm"] {
        let error = build(Some(name)).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        for known in PROVIDERS {
            assert!(error.remedy_text().is_some_and(|text| text.contains(known)), "{error}");
        }
    }
    assert_eq!(build(Some("a\0b")).expect_err("a zero").kind(), ErrorKind::InvalidArgument);
    Ok(())
}

fn absent_and_unrelated_libraries_are_refused() -> Outcome {
    let _turn = turn()?;
    for (library, part) in
        [("/nonexistent/libfabric.so", "nonexistent"), ("libc.so.6", "fi_version")]
    {
        // SAFETY: there is no such file, or it is the C library, which has no side effects.
        let refused = unsafe { Libfabric::builder().library(library).build() };
        let error = refused.expect_err("no libfabric");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(format!("{}", error.full()).contains(part), "{}", error.full());
        assert!(error.remedy_text().is_some(), "{error}");
    }
    Ok(())
}

/// Returns the path of the loaded libfabric.
fn library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let found = maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        path.contains("libfabric.so").then(|| PathBuf::from(path))
    });
    found.expect("libfabric is loaded")
}

fn plug_in_that_cannot_be_loaded_is_named() -> Outcome {
    let _turn = turn()?;
    drop(build(None).expect("build"));
    let folder = env::temp_dir().join(format!("hmem-libfabric-{}", process::id()));
    fs::create_dir_all(folder.join("libfabric")).expect("a folder");
    let link = folder.join("libfabric.so.1");
    std::os::unix::fs::symlink(library(), &link).expect("a link");
    fs::write(folder.join("libfabric/libbroken-fi.so"), "no library").expect("a file");
    // SAFETY: the link leads to libfabric. This thread has its turn.
    let refused = unsafe { Libfabric::builder().library(&link).provider("broken").build() };
    fs::remove_dir_all(&folder).expect("remove the folder");
    let error = refused.expect_err("a broken plug-in");
    assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "load plug-in"));
    assert!(format!("{}", error.full()).contains("libbroken-fi.so"), "{}", error.full());
    Ok(())
}

fn environment_is_as_before() -> Outcome {
    const VARIABLE: &str = "FI_MR_CACHE_MONITOR";
    let _turn = turn()?;
    for value in [Some("memhooks"), None] {
        // SAFETY: this test has its turn, so no other thread uses the environment.
        unsafe {
            match value {
                Some(value) => env::set_var(VARIABLE, value),
                None => env::remove_var(VARIABLE),
            }
        }
        let provider = build(None).expect("build");
        assert_eq!(env::var(VARIABLE).ok().as_deref(), value);
        assert!(provider.nics().expect("list").iter().all(|nic| nic.driver_cache.is_none()));
    }
    Ok(())
}

fn regions_of_own_domains_have_keys_and_end_with_their_domain() -> Outcome {
    let _turn = turn()?;
    for name in PROVIDERS {
        let provider = build(Some(name)).expect("build");
        let nic = provider.nics().expect("list").remove(0).nic;
        let first = open(&provider, Some(&nic.name)).expect("open");
        let second = open(&provider, None).expect("open");
        let pointer = |domain| FabricDomain::of(domain).expect("libfabric").as_ptr();
        assert_ne!(pointer(&first), pointer(&second), "each domain has a fid_domain of its own");
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        for domain in [&first, &second] {
            let request = Request::new(vec![1_u8; 4096], access);
            let region = domain.submit(request.key(77)).expect("register");
            assert_eq!(FabricMr::of(&region).expect("keys").key(), Some(77));
            assert_eq!(region.key().expect("a key").as_u64().expect("one number"), 77);
            let taken = domain.submit(Request::new(vec![1_u8; 64], access).key(77));
            assert_eq!(taken.expect_err("taken").error.kind(), ErrorKind::NoKey);
            assert_eq!(region.close().expect("close"), vec![1; 4096]);
            assert_eq!(domain.live(), Default::default());
        }
        // A domain outlives the provider, and a region its handle of the domain.
        drop(provider);
        let region = first.register(vec![2_u8; 64], access).expect("register");
        drop(first);
        assert_eq!(region.close().expect("close"), vec![2; 64]);
    }
    Ok(())
}

fn closed_domains_leave_no_files_and_threads() -> Outcome {
    let _turn = turn()?;
    let own = format!("{}:", process::id());
    let count = |folder: &str, start: &str| {
        let files = fs::read_dir(folder).expect("list").map(|file| file.expect("a file"));
        files.filter(|file| file.file_name().to_string_lossy().starts_with(start)).count()
    };
    let counts = || {
        [("/proc/self/fd", ""), ("/proc/self/task", ""), ("/dev/shm", &own)]
            .map(|(folder, start)| count(folder, start))
    };
    for name in PROVIDERS {
        let provider = build(Some(name)).expect("build");
        drop(open(&provider, None).expect("open"));
        let before = counts();
        for _ in 0..4 {
            let domain = open(&provider, None).expect("open");
            drop(domain.register(vec![0_u8; 64], Access::REMOTE_READ).expect("register"));
        }
        assert_eq!(counts(), before, "{name}: files, threads, shared memory");
    }
    Ok(())
}

fn request_for_a_domain_opens_it_without_a_name() -> Outcome {
    let _turn = turn()?;
    let provider = build(Some("shm")).expect("build");
    let request = DomainRequest {
        nic: None,
        mode: MrMode::empty(),
        auth_key: Default::default(),
        hmem: true,
        registry: Arc::default(),
        staging: Default::default(),
    };
    let domain = provider.open_domain(&request).expect("open");
    assert_eq!(domain.attr().nic, provider.nics().expect("list")[0].nic);
    Ok(())
}

trials! {
    /// FAB-01
    nics_are_listed_by_provider_and_domain_with_their_abilities,
    /// FAB-01
    filter_lists_one_provider_and_unknown_names_list_those_that_exist,
    /// FAB-01
    absent_and_unrelated_libraries_are_refused,
    /// FAB-01
    plug_in_that_cannot_be_loaded_is_named,
    /// FAB-01
    environment_is_as_before,
    /// FAB-01
    regions_of_own_domains_have_keys_and_end_with_their_domain,
    /// FAB-01
    closed_domains_leave_no_files_and_threads,
    /// FAB-01
    request_for_a_domain_opens_it_without_a_name,
}
