//! Search for installed UCX libraries, and measurement of each UCX in a child process.

use std::{
    env,
    ffi::OsString,
    fmt::Display,
    iter,
    path::PathBuf,
    process::{Command, Stdio},
};

use hmem::{Error, ErrorKind, Result};

use super::{figures::Bench, measure::Effort, report::Report, ucx::Ucx};

/// Command-line argument of a child process. The location of UCX follows the equals sign.
pub(super) const ARGUMENT: &str = "--ucx=";
/// Environment variable that lists more folders with UCX libraries, separated by colons.
pub(super) const FOLDERS: &str = "HMEM_UCX_LIBRARIES";
const SYSTEM: &str = "system";
/// Prefix of the names of UCX locations in [`Report::skipped`].
pub(super) const UCX_OF: &str = "UCX of ";
const PYTHON: &str = "UCX of the Python package libucx";

/// Environment setting that keeps UCX from hooking the C library when UCX is loaded. hmem's memory
/// hooks patch the same functions, and refuse to start if another library has patched them.
const HOOKS: (&str, &str) = ("UCX_MEM_MMAP_HOOK_MODE", "none");
/// Environment setting that makes UCX log to stderr. By default UCX logs to stdout, where the child
/// prints its report.
const LOG: (&str, &str) = ("UCX_LOG_FILE", "stderr");

/// A location to load UCX from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UcxLocation {
    /// The folders that the system's loader searches.
    System,
    /// A folder that contains the UCX libraries.
    Folder(PathBuf),
}

/// Returns the locations to try to load UCX from. If the Python package is missing, adds it to the
/// report's skipped measurements.
pub(super) fn find(report: &mut Report) -> Vec<UcxLocation> {
    let named = env::var_os(FOLDERS).unwrap_or_default();
    let mut folders: Vec<_> =
        env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty()).collect();
    match of_python() {
        Ok(folder) if folders.contains(&folder) => {}
        Ok(folder) => folders.push(folder),
        Err(why) => report.skip(PYTHON, why),
    }
    iter::once(UcxLocation::System).chain(folders.into_iter().map(UcxLocation::Folder)).collect()
}

/// Asks Python for the library folder of the package `libucx-cu12`.
fn of_python() -> std::result::Result<PathBuf, String> {
    const FIND: &str = "import importlib.util as u; s = u.find_spec('libucx'); \
                        print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new("python3").args(["-c", FIND]).stderr(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot start python3: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim() {
        "" => Err("the package is not installed; run `pip install libucx-cu12`".to_owned()),
        package => Ok(PathBuf::from(package).join("lib")),
    }
}

/// Loads UCX from a location, and measures hmem and UCX in this process. If UCX cannot be loaded,
/// returns a report that says why.
///
/// # Errors
/// The errors of [`Bench::new`] and [`Bench::beside_ucx`].
pub(super) fn beside(location: &UcxLocation, effort: Effort) -> Result<Report> {
    let folder = match location {
        UcxLocation::System => None,
        UcxLocation::Folder(folder) => Some(folder.as_path()),
    };
    match Ucx::load(folder) {
        Ok(ucx) => {
            let mut bench = Bench::new(effort, Some(ucx))?;
            bench.beside_ucx()?;
            Ok(bench.report)
        }
        Err(why) => {
            let mut report = Report::default();
            report.skip(&location.name(), why);
            Ok(report)
        }
    }
}

impl UcxLocation {
    /// Parses a location from the text after [`ARGUMENT`].
    pub(super) fn parse(text: &str) -> Self {
        if text == SYSTEM { Self::System } else { Self::Folder(text.into()) }
    }

    fn name(&self) -> String {
        match self {
            Self::System => format!("{UCX_OF}the system"),
            Self::Folder(folder) => format!("{UCX_OF}{}", folder.display()),
        }
    }

    /// Starts a child process that compares hmem with the UCX at this location, and returns the
    /// child's report.
    ///
    /// # Errors
    /// `Unavailable` if the child cannot start, fails, or prints no report.
    pub(super) fn spawn(&self, quick: bool) -> Result<Report> {
        let failed = |why: &dyn Display| {
            Error::new(ErrorKind::Unavailable, "bench cache")
                .context("peer", self.name())
                .context("why", why)
        };
        let mut argument = OsString::from(ARGUMENT);
        match self {
            Self::System => argument.push(SYSTEM),
            Self::Folder(folder) => argument.push(folder),
        }
        let program = env::current_exe().map_err(|error| failed(&error))?;
        let mut command = Command::new(program);
        command.arg(argument).args(quick.then_some("--quick")).stderr(Stdio::inherit());
        for (name, value) in [HOOKS, LOG] {
            if env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        let output = command.output().map_err(|error| failed(&error))?;
        if !output.status.success() {
            return Err(failed(&format!("the child process ended with {}", output.status)));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(&error))
    }
}
