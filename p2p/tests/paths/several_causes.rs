//! Errors with more than one cause: the kernel answers a registration with one number for several
//! limits. Files of a machine in each state, and the order of the causes that follows from them.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use hmem_core::{
    Access, Address, AddressRange, Domain, DomainAttr, Errno, Error, ErrorKind, IfaceKind, Promise,
    Raw, Registry, path::P2pPolicy,
};
use hmem_iface_system::System;
use hmem_p2p::path::{DefaultPathSelector, ExplainRequest, LocalMachine};
use hmem_provider_loopback::{Faults, Loopback, NicCall};

/// The path and the text of a file.
type File = (&'static str, &'static str);

/// A machine as files below a folder, which is removed on drop.
struct Machine(PathBuf);

impl Machine {
    fn new(files: &[File]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("hmem-several-causes-{}-{number}", std::process::id());
        let machine = Self(std::env::temp_dir().join(name));
        for (path, text) in files {
            let path = machine.0.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("create");
            fs::write(path, text).expect("write");
        }
        machine
    }

    /// Returns the error of a registration of two pages of host memory that the NIC refuses with
    /// `errno`.
    fn refusal(&self, errno: i32) -> Error {
        let memory = vec![0_u8; 8192];
        let (registry, nic) = host_and_nic(errno);
        let paths = Arc::new(self.paths());
        let domain = Domain::open(&nic, registry, paths, DomainAttr::default()).expect("open");
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let error = domain.register(memory, access).expect_err("refused").error;
        assert_eq!(domain.live().regions, 0);
        error
    }

    fn paths(&self) -> DefaultPathSelector {
        DefaultPathSelector::new().facts(Arc::new(LocalMachine::below(&self.0)))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns host memory, and a NIC that refuses its first registration.
fn host_and_nic(errno: i32) -> (Arc<Registry>, Loopback) {
    let faults = Faults::new();
    faults.fail_nth(NicCall::Register, 1, Errno(errno));
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new())).expect("the first");
    (Arc::new(registry), Loopback::builder().faults(&faults).build().expect("a fabric"))
}

fn names(error: &Error) -> Vec<&'static str> {
    error.causes().iter().map(|cause| cause.name).collect()
}

const LIMIT: File = (
    "proc/self/limits",
    "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n",
);
const NO_LIMIT: File = (
    "proc/self/limits",
    "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  unlimited  unlimited  bytes\n",
);
const INITIAL_NAMESPACE: File = ("proc/self/uid_map", "  0  0 4294967295\n");
const OWN_NAMESPACE: File = ("proc/self/uid_map", "  0  231072 65536\n");
/// The process of a container, with IPC_LOCK in the effective set.
const WITH_IPC_LOCK: File = (
    "proc/self/status",
    "VmPin:\t      60 kB\nCapEff:\t00000000a80465fb\nCapBnd:\t00000000a80465fb\n",
);
/// The process of a container that was given IPC_LOCK, and that runs as another user than root.
const GIVEN_TO_A_USER: File = (
    "proc/self/status",
    "VmPin:\t      60 kB\nCapEff:\t0000000000000000\nCapBnd:\t00000000a80465fb\n",
);
/// A user's process outside of containers, with 60 KiB pinned.
const USER: File = (
    "proc/self/status",
    "VmPin:\t      60 kB\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n",
);
/// A user's process outside of containers, with nothing pinned.
const IDLE_USER: File = (
    "proc/self/status",
    "VmPin:\t       0 kB\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n",
);
const MEMORY_NODE: [File; 3] = [
    ("sys/devices/system/node/has_memory", "0-1\n"),
    ("sys/devices/system/node/node0/cpulist", "0-15\n"),
    ("sys/devices/system/node/node1/cpulist", "\n"),
];
const GROUPS: [File; 3] = [
    ("proc/self/cgroup", "0::/pods/a\n"),
    ("sys/fs/cgroup/cgroup.controllers", "cpu rdma\n"),
    ("sys/fs/cgroup/pods/rdma.max", "mlx5_0 hca_handle=max hca_object=20\n"),
];
const FULL: File = ("sys/fs/cgroup/pods/rdma.current", "mlx5_0 hca_object=20\n");
const FREE: File = ("sys/fs/cgroup/pods/rdma.current", "mlx5_0 hca_object=19\n");

/// DIAG-03
///
/// ENOMEM may be the locked-memory limit, or full tables of the NIC. Files tell how likely each is.
#[test]
fn causes_of_enomem_are_ranked_by_what_the_machine_shows() {
    let cases: [(&[File], &[&str]); 8] = [
        (&[], &["nic-tables-full"]),
        (&[NO_LIMIT, USER], &["nic-tables-full"]),
        (&[LIMIT, USER], &["memlock", "nic-tables-full"]),
        // The limit has room for two pages.
        (&[LIMIT, IDLE_USER], &["nic-tables-full"]),
        (&[LIMIT, WITH_IPC_LOCK, INITIAL_NAMESPACE], &["nic-tables-full"]),
        (&[LIMIT, WITH_IPC_LOCK, OWN_NAMESPACE], &["ipc-lock-inert", "memlock", "nic-tables-full"]),
        (
            &[LIMIT, GIVEN_TO_A_USER, INITIAL_NAMESPACE],
            &["ipc-lock-inert", "memlock", "nic-tables-full"],
        ),
        (
            &[LIMIT, USER, MEMORY_NODE[0], MEMORY_NODE[1], MEMORY_NODE[2]],
            &["memlock", "memory-only-node", "nic-tables-full"],
        ),
    ];
    for (files, expected) in cases {
        let machine = Machine::new(files);
        let error = machine.refusal(12);
        assert_eq!(names(&error), expected, "{files:?}: {error:#}");
    }
}

/// DIAG-03
///
/// EAGAIN may be the RDMA control group, or used-up keys of the NIC (the reports of users of
/// Mooncake in pull request 1765). EPERM of host memory means a locked-memory limit of 0.
#[test]
fn causes_of_eagain_and_eperm_follow_from_groups_and_limits() {
    let both = ["rdma-cgroup", "nic-keys-used-up"];
    let groups = |usage| [GROUPS[0], GROUPS[1], GROUPS[2], usage];
    let error = Machine::new(&groups(FULL)).refusal(11);
    assert_eq!(names(&error), both);
    let evidence = error.causes()[0].evidence.as_deref();
    assert_eq!(evidence, Some("group /pods: mlx5_0 has 20 of 20 objects"));
    // A group below its limit is no cause.
    assert_eq!(names(&Machine::new(&groups(FREE)).refusal(11)), ["nic-keys-used-up"]);
    // A container hides the groups above its own, which may have reached a limit.
    let [own, mounted, limit, usage] = groups(FREE);
    let hidden = ("sys/fs/cgroup/cgroup.type", "domain\n");
    let error = Machine::new(&[own, mounted, limit, usage, hidden]).refusal(11);
    assert_eq!(names(&error), both);
    assert_eq!(error.causes()[0].evidence, None, "a limit that nobody saw is no evidence");
    // Version 1 of control groups.
    let v1 = [
        ("proc/self/cgroup", "4:rdma:/c\n0::/\n"),
        ("sys/fs/cgroup/cgroup.controllers", ""),
        ("sys/fs/cgroup/rdma/cgroup.procs", ""),
        ("sys/fs/cgroup/rdma/c/rdma.max", "mlx5_1 hca_object=3\n"),
        ("sys/fs/cgroup/rdma/c/rdma.current", "mlx5_1 hca_object=3\n"),
    ];
    let error = Machine::new(&v1).refusal(11);
    let evidence = error.causes()[0].evidence.as_deref();
    assert_eq!(evidence, Some("group /c: mlx5_1 has 3 of 3 objects"));

    let refused = Machine::new(&[LIMIT, USER]).refusal(1);
    assert_eq!(names(&refused)[0], "memlock");
    assert!(
        Machine::new(&[NO_LIMIT, USER])
            .refusal(1)
            .causes()
            .iter()
            .all(|cause| { cause.name == "device-files" })
    );
}

/// DIAG-03
///
/// The short text has the remedy of the most probable cause only. The long text, the debug text
/// and the summary have all causes with evidence and remedies.
#[test]
fn short_text_has_one_remedy_and_the_other_forms_have_all_causes() {
    let error = Machine::new(&[LIMIT, WITH_IPC_LOCK, OWN_NAMESPACE]).refusal(12);
    let causes = error.causes();
    assert_eq!(causes.len(), 3);
    let short = error.to_string();
    assert!(!short.contains('\n') && short.contains(causes[0].remedy), "{short}");
    assert!(!short.contains(causes[1].remedy) && !short.contains(causes[2].remedy), "{short}");
    assert_eq!(error.remedy_text(), Some(causes[0].remedy));
    for text in [format!("{error:#}"), format!("{error:?}")] {
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} in {text}"));
        let places = causes.iter().map(|cause| (at(&cause.to_string()), at(cause.remedy)));
        assert!(places.clone().all(|(cause, remedy)| cause < remedy), "{text}");
        assert!(places.map(|(cause, _)| cause).is_sorted(), "{text}");
    }
    let evidence = causes[0].evidence.as_deref().expect("evidence");
    assert!(evidence.contains("user namespace"), "{evidence}");
    let pinned =
        "the limit is 65536 bytes, of which the process has pinned 61440; the request needs";
    assert!(evidence.contains(pinned), "{evidence}");

    let summary = error.summary();
    let listed: Vec<_> = summary.causes.iter().map(|cause| &*cause.name).collect();
    assert_eq!(listed, names(&error));
    let first = &summary.causes[0];
    assert_eq!((first.evidence.as_deref(), &*first.remedy), (Some(evidence), causes[0].remedy));
}

/// DIAG-03
#[test]
fn explanation_lists_every_cause_and_remedy() {
    let machine = Machine::new(&[LIMIT, WITH_IPC_LOCK, OWN_NAMESPACE]);
    let (registry, nic) = host_and_nic(12);
    let request = ExplainRequest::new(IfaceKind::SYSTEM).size(8192).policy(P2pPolicy::Enabled);
    let explanation = machine.paths().explain(&registry, &nic, &request).expect("an explanation");
    let [attempt] = &explanation.attempts[..] else { panic!("{explanation}") };
    assert_eq!(attempt.cause_name, Some("ipc-lock-inert"));
    let causes = attempt.error.as_ref().expect("refused").causes();
    assert_eq!(causes.len(), 3, "{explanation}");
    for cause in causes {
        assert!(explanation.remedies.iter().any(|remedy| remedy == cause.remedy), "{explanation}");
        assert!(attempt.to_string().contains(&cause.to_string()), "{attempt}");
    }
}

/// DIAG-03
///
/// All pages of the range are one byte more than 64 bits can count.
#[test]
fn refused_range_up_to_the_last_address_has_its_causes() {
    let machine = Machine::new(&[LIMIT, USER]);
    let (registry, nic) = host_and_nic(12);
    let domain = Domain::open(&nic, registry, Arc::new(machine.paths()), DomainAttr::default());
    let range = AddressRange::new(Address(1), u64::MAX - 1).expect("it does not wrap");
    // SAFETY: the NIC refuses the registration.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let refused = domain.expect("open").register(memory, Access::REMOTE_READ);
    let error = refused.expect_err("refused").error;
    assert_eq!(names(&error), ["memlock", "nic-tables-full"], "{error:#}");
}

/// DIAG-03
#[test]
fn error_with_one_cause_lists_one() {
    let error = Machine::new(&[LIMIT, USER]).refusal(14);
    assert_eq!((error.kind(), names(&error)), (ErrorKind::BadAddress, vec!["bad-host-pages"]));
    // A mistake of the request has no cause on the machine.
    assert!(Machine::new(&[LIMIT, USER]).refusal(266).causes().is_empty());
}
