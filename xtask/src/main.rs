//! Task runner of this repository.
//!
//! `cargo xtask` lists the tasks, and `cargo xtask TASK [ARGUMENT...]` runs one. A task is a list
//! of commands with environment variables. If there is a script for a task, the task only starts
//! the script.

#![forbid(unsafe_code)]

use std::{
    env,
    path::Path,
    process::{Command, ExitCode},
};

/// A command of a task, with its environment variables. The last command of a task also gets the
/// arguments from the command line. `{root}` stands for the root of the repository and `{target}`
/// for Cargo's target folder.
struct Step {
    environment: &'static [(&'static str, &'static str)],
    command: &'static [&'static str],
}

struct Task {
    name: &'static str,
    about: &'static str,
    steps: &'static [Step],
}

const fn step(command: &'static [&'static str]) -> Step {
    Step { environment: &[], command }
}

/// Environment of the check for aarch64, which denies warnings. A check links nothing, so it needs
/// no linker for aarch64.
const CHECK_AARCH64: &[(&str, &str)] =
    &[("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-D warnings")];

/// The tests of patched functions with the processors emulated in turns: QEMU never translates an
/// instruction for one processor while the other processor stores it.
const AARCH64_HOOKS_IN_TURNS: Step = step(&[
    "tests/vm/run",
    "--target",
    "aarch64",
    "--workspace",
    "--pages",
    "16",
    "--in-turns",
    "--no-devices",
    "--package",
    "hmem-iface-system",
    "--only",
    ".*-memhooks",
]);

const TASKS: &[Task] = &[
    Task {
        name: "ci",
        about: "everything that continuous integration runs",
        steps: &[step(&[".ci/run"])],
    },
    Task {
        name: "ci-slow",
        about: "what continuous integration leaves out because it takes too long",
        steps: &[step(&[".ci/slow"])],
    },
    Task {
        name: "test",
        about: "the tests that need no special hardware",
        steps: &[step(&["cargo", "test", "--workspace"])],
    },
    Task {
        name: "slow",
        about: "the slow tier: the same properties with more repetitions",
        steps: &[step(&["cargo", "test", "--workspace", "--release", "--", "--ignored"])],
    },
    Task {
        name: "soak",
        about: "an hour of mixed load with checked bytes and resources (arguments: --minutes N)",
        steps: &[step(&["cargo", "test", "-p", "hmem", "--test", "soak", "--", "--soak"])],
    },
    Task {
        name: "vm",
        about: "tests over soft-RoCE devices in a virtual machine (arguments: see --help)",
        steps: &[step(&["tests/vm/run"])],
    },
    Task {
        name: "vm-check",
        about: "shows that the virtual machine tier notices failures",
        steps: &[step(&["tests/vm/check"])],
    },
    Task {
        name: "ports",
        about: "another program's own tests over soft-RoCE, with and without hmem (NAME [FOLDER])",
        steps: &[step(&["ports/run"])],
    },
    Task {
        name: "gpu",
        about: "a report of what an NVIDIA GPU does, as markdown for docs/hardware.md",
        steps: &[step(&["tests/gpu/run"])],
    },
    Task {
        name: "vendors",
        about: "the vendors' headers and libraries, without a device or with a simulated one",
        steps: &[
            Step {
                environment: &[("HMEM_CUDA", "headers,driver")],
                command: &["bash", "-c", "tests/cuda/fetch && cargo test -p hmem-iface-cuda"],
            },
            step(&["tests/rocr/run"]),
            step(&["tests/ze/run"]),
            step(&["tests/accelerators/run"]),
        ],
    },
    Task {
        name: "libfabric",
        about: "the libfabric provider over libfabric 1.17 and 2.5, and the headers",
        steps: &[step(&["tests/libfabric/run"])],
    },
    Task {
        name: "c",
        about: "the C library: C and C++ programs with it, also under sanitizers, and its ABI",
        steps: &[step(&["c/run"])],
    },
    Task {
        name: "c-install",
        about: "installs the C library (arguments: PREFIX [--debug])",
        steps: &[step(&["c/install"])],
    },
    Task {
        name: "python",
        about: "the Python wheel, its size, and its tests in a virtual environment",
        steps: &[step(&["python/run"])],
    },
    Task {
        name: "optional",
        about: "features off by default: cudarc's slices over a fake driver, log, and metrics",
        steps: &[
            step(&[
                "cargo",
                "test",
                "-p",
                "hmem-iface-cuda",
                "--features",
                "cudarc",
                "--test",
                "cudarc",
            ]),
            step(&[
                "cargo",
                "test",
                "-p",
                "hmem",
                "--features",
                "cudarc,log,metrics",
                "--test",
                "cudarc_slices",
                "--test",
                "log",
                "--test",
                "published_metrics",
            ]),
        ],
    },
    Task {
        name: "allocators",
        about: "programs with jemalloc and mimalloc under patched C library functions",
        steps: &[step(&[
            "cargo",
            "test",
            "--manifest-path",
            "tests/allocators/Cargo.toml",
            "--target-dir",
            "{target}/allocators",
        ])],
    },
    Task {
        name: "machines",
        about: "the tests as on other machines: packages, users, containers (root; see --help)",
        steps: &[step(&["tests/machines/run"])],
    },
    Task {
        name: "loom",
        about: "models of the registration cache's races",
        steps: &[Step {
            environment: &[
                ("RUSTFLAGS", "--cfg loom"),
                ("CARGO_PROFILE_RELEASE_LTO", "off"),
                ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
            ],
            command: &[
                "cargo",
                "test",
                "--release",
                "-p",
                "hmem-core",
                "--lib",
                "--target-dir",
                "{target}/loom",
                "cache::models",
            ],
        }],
    },
    Task {
        name: "sanitize",
        about: "the tests under address, leak and thread sanitizers (arguments: see --help)",
        steps: &[step(&["tests/sanitizers/run"])],
    },
    Task {
        name: "mutants",
        about: "the tests against a list of faults, one at a time (arguments: see --help)",
        steps: &[step(&["tests/mutants/run"])],
    },
    Task {
        name: "fuzz",
        about: "fuzzes every parser of outside bytes, 10 minutes each (arguments: see --help)",
        steps: &[step(&["fuzz/run"])],
    },
    Task {
        name: "aarch64",
        about: "all tests in an emulated aarch64 machine, with pages of 4 and then 16 KiB",
        steps: &[
            step(&["tests/vm/run", "--target", "aarch64", "--workspace"]),
            step(&["tests/vm/run", "--target", "aarch64", "--workspace", "--pages", "16"]),
            AARCH64_HOOKS_IN_TURNS,
        ],
    },
    Task {
        name: "aarch64-64k",
        about: "all tests in an emulated aarch64 machine with pages of 64 KiB; builds its kernel",
        steps: &[step(&["tests/vm/run", "--target", "aarch64", "--workspace", "--pages", "64"])],
    },
    Task {
        name: "aarch64-quick",
        about: "the main part of aarch64: hooks, monitors and cache, with pages of 16 KiB",
        steps: &[step(&[
            "tests/vm/run",
            "--target",
            "aarch64",
            "--workspace",
            "--pages",
            "16",
            "--no-devices",
            "--package",
            "hmem-core",
            "--package",
            "hmem-hook",
            "--package",
            "hmem-iface-system",
        ])],
    },
    Task {
        name: "check-aarch64",
        about: "the workspace and its tests compile for aarch64 (no C compiler is needed)",
        steps: &[
            step(&["rustup", "target", "add", "aarch64-unknown-linux-gnu"]),
            Step {
                environment: CHECK_AARCH64,
                command: &[
                    "cargo",
                    "check",
                    "--workspace",
                    "--all-features",
                    "--tests",
                    "--target",
                    "aarch64-unknown-linux-gnu",
                ],
            },
        ],
    },
    Task {
        name: "bench",
        about: "measurements, each with its peer or limit in the same run",
        steps: &[step(&["cargo", "bench"])],
    },
    Task {
        name: "semver",
        about: "the public API against that of the last release",
        steps: &[step(&["tests/semver/run"])],
    },
    Task {
        name: "semver-check",
        about: "shows that the comparison of the API notices a break",
        steps: &[step(&["tests/semver/check"])],
    },
    Task {
        name: "msrv",
        about: "everything but tests with the oldest Rust that is supported",
        steps: &[Step {
            environment: &[("CARGO_TARGET_DIR", "{target}/msrv")],
            command: &[
                "rustup",
                "run",
                "--install",
                env!("CARGO_PKG_RUST_VERSION"),
                "cargo",
                "check",
                "--workspace",
                "--lib",
                "--bins",
            ],
        }],
    },
    Task {
        name: "package",
        about: "the packages as they would be published, without publishing them",
        steps: &[
            // Cargo assumes that a package of one version never changes. Another dry run would
            // compile dependents against the sources that the last one unpacked, in a folder whose
            // name begins with `-`, or use what the last one built.
            step(&[
                "bash",
                "-c",
                "rm -rf {target}/packages \
                 \"${CARGO_HOME:-$HOME/.cargo}\"/registry/src/-*/hmem{,-*}-[0-9]*",
            ]),
            step(&[
                "cargo",
                "publish",
                "--workspace",
                "--dry-run",
                "--allow-dirty",
                "--target-dir",
                "{target}/packages",
            ]),
        ],
    },
    Task {
        name: "docs",
        about: "the documentation, with warnings denied",
        steps: &[Step {
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
            command: &["cargo", "doc", "--workspace", "--no-deps"],
        }],
    },
    Task {
        name: "lint",
        about: "formatting and clippy, with warnings denied",
        steps: &[
            step(&["cargo", "fmt", "--all", "--check"]),
            step(&["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ],
    },
];

fn usage() {
    println!("usage: cargo xtask TASK [ARGUMENT...]\n");
    for Task { name, about, .. } in TASKS {
        println!("  {name:<14} {about}");
    }
}

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let Some(name) = arguments.next().filter(|name| name != "--help" && name != "-h") else {
        usage();
        return ExitCode::SUCCESS;
    };
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        eprintln!("xtask: there is no task `{name}`; `cargo xtask` lists them");
        return ExitCode::from(2);
    };
    run(task, &arguments.collect::<Vec<_>>())
}

/// Exit status of a command that could not run because something it needs is missing.
const MISSING: u8 = 3;

/// Runs the commands of a task in the root of the repository.
///
/// Stops at the first command that fails, and returns its status: 1 if a signal ended the command,
/// and [`MISSING`] if the command cannot be started. The task `vendors` continues after a command
/// that returns [`MISSING`], and returns [`MISSING`] at its end.
fn run(task: &Task, arguments: &[String]) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root");
    let target =
        env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| root.join("target").display().to_string());
    let fill = |text: &str| {
        text.replace("{root}", &root.display().to_string()).replace("{target}", &target)
    };
    let last = task.steps.len() - 1;
    let mut missing = false;
    for (number, Step { environment, command }) in task.steps.iter().enumerate() {
        let mut words = command.iter().map(|word| fill(word));
        let program = words.next().expect("a step names a program");
        let program = if program.contains('/') { root.join(program) } else { program.into() };
        let mut started = Command::new(&program);
        started.current_dir(root).args(words);
        started.envs(environment.iter().map(|(name, value)| (name, fill(value))));
        if number == last {
            started.args(arguments);
        }
        let status = match started.status() {
            Ok(status) => status,
            Err(error) => {
                eprintln!("xtask: cannot start {}: {error}", program.display());
                return ExitCode::from(MISSING);
            }
        };
        if !status.success() {
            let code = status.code().and_then(|code| code.try_into().ok()).unwrap_or(1);
            if code != MISSING || task.name != "vendors" {
                return ExitCode::from(code);
            }
            missing = true;
        }
    }
    if missing { ExitCode::from(MISSING) } else { ExitCode::SUCCESS }
}
