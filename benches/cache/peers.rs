//! The UCX installations of this machine, each measured in a child process.

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

/// Argument of a child process, with the place of its UCX behind it.
pub(super) const ARGUMENT: &str = "--ucx=";
/// Folders with UCX libraries, separated as in `PATH`.
pub(super) const FOLDERS: &str = "HMEM_UCX_LIBRARIES";
const SYSTEM: &str = "system";
/// Beginning of what [`Report::skipped`] calls a place.
pub(super) const UCX_OF: &str = "UCX of ";
const PYTHON: &str = "UCX of the Python package libucx";

/// The setting that keeps UCX from hooking the C library when UCX is loaded. Our monitor hooks the
/// same functions, and refuses to start if another library's hooks are in place.
const HOOKS: (&str, &str) = ("UCX_MEM_MMAP_HOOK_MODE", "none");
/// The setting that makes UCX log to stderr. By default it logs to stdout, which carries the
/// child's report.
const LOG: (&str, &str) = ("UCX_LOG_FILE", "stderr");

/// A place to load UCX from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The library is loaded from the folders that the system's loader searches.
    System,
    /// The library is loaded from this folder.
    Folder(PathBuf),
}

/// Finds the places where UCX may be. Notes the Python package as skipped if it is missing.
pub(super) fn find(report: &mut Report) -> Vec<Place> {
    let named = env::var_os(FOLDERS).unwrap_or_default();
    let mut folders: Vec<_> =
        env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty()).collect();
    match of_python() {
        Ok(folder) if folders.contains(&folder) => {}
        Ok(folder) => folders.push(folder),
        Err(why) => report.skip(PYTHON, why),
    }
    iter::once(Place::System).chain(folders.into_iter().map(Place::Folder)).collect()
}

/// Asks Python for the folder of the libraries that the package `libucx-cu12` carries.
fn of_python() -> std::result::Result<PathBuf, String> {
    const FIND: &str = "import importlib.util as u; s = u.find_spec('libucx'); \
                        print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new("python3").args(["-c", FIND]).stderr(Stdio::null()).output();
    let output = output.map_err(|error| format!("python3 does not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim() {
        "" => Err("it is not installed (`pip install libucx-cu12`)".to_owned()),
        package => Ok(PathBuf::from(package).join("lib")),
    }
}

/// Loads UCX from one place and measures hmem and UCX in this process.
///
/// # Errors
/// The errors of [`Bench::beside_ucx`].
pub(super) fn beside(place: &Place, effort: Effort) -> Result<Report> {
    let folder = match place {
        Place::System => None,
        Place::Folder(folder) => Some(folder.as_path()),
    };
    match Ucx::load(folder) {
        Ok(ucx) => {
            let mut bench = Bench::new(effort, Some(ucx))?;
            bench.beside_ucx()?;
            Ok(bench.report)
        }
        Err(why) => {
            let mut report = Report::default();
            report.skip(&place.name(), why);
            Ok(report)
        }
    }
}

impl Place {
    /// Parses the place of the UCX libraries from the value of [`ARGUMENT`].
    pub(super) fn parse(text: &str) -> Self {
        if text == SYSTEM { Self::System } else { Self::Folder(text.into()) }
    }

    fn name(&self) -> String {
        match self {
            Self::System => format!("{UCX_OF}the system"),
            Self::Folder(folder) => format!("{UCX_OF}{}", folder.display()),
        }
    }

    /// Compares hmem with the UCX at this place, in a child process, and returns the report.
    ///
    /// # Errors
    /// Unavailable where the child cannot start, fails, or prints no report.
    pub(super) fn spawn(&self, quick: bool) -> Result<Report> {
        let failed = |why: &dyn Display| {
            Error::new(ErrorKind::Unavailable, "bench cache")
                .context("peer", self.name())
                .context("why", why)
        };
        let mut place = OsString::from(ARGUMENT);
        match self {
            Self::System => place.push(SYSTEM),
            Self::Folder(folder) => place.push(folder),
        }
        let program = env::current_exe().map_err(|error| failed(&error))?;
        let mut command = Command::new(program);
        command.arg(place).args(quick.then_some("--quick")).stderr(Stdio::inherit());
        for (name, value) in [HOOKS, LOG] {
            if env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        let output = command.output().map_err(|error| failed(&error))?;
        if !output.status.success() {
            return Err(failed(&format!("its process ended with {}", output.status)));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(&error))
    }
}
