//! Chooses the host memory monitor, and explains the choice.

use std::{fmt, str::FromStr, sync::Arc};

use hmem_core::{Error, ErrorKind, IfaceKind, Result, monitor::Monitor};
use serde::{Serialize, Serializer};

use super::{Layered, MemHooks, UserFaultFd};

/// A kind of host memory monitor, by its name in libfabric's `FI_MR_CACHE_MONITOR`.
///
/// ```
/// use hmem_iface_system::monitor::HostMonitorKind;
///
/// assert_eq!("uffd".parse::<HostMonitorKind>()?, HostMonitorKind::UserFaultFd);
/// assert_eq!("default".parse::<HostMonitorKind>()?, HostMonitorKind::Auto);
/// assert!("memhook".parse::<HostMonitorKind>().unwrap_err().to_string().contains("memhooks"));
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum HostMonitorKind {
    /// The best choice that works on this machine: [`MemHooks`] and [`UserFaultFd`] together, or
    /// one of them, or no monitor.
    #[default]
    Auto,
    /// Hooks in the functions of the C library: [`MemHooks`].
    MemHooks,
    /// Events that the kernel sends through a userfaultfd: [`UserFaultFd`].
    UserFaultFd,
    /// The application's own monitor: [`super::ImportMonitor`].
    Import,
    /// No monitor: registrations of host memory are not cached. The crate `hmem` turns the caches
    /// of all domains off, for device memory too, as libfabric does with this value.
    Disabled,
}

impl HostMonitorKind {
    /// Every kind with its names, in the order of the enum. The parser accepts each name of a kind,
    /// and output uses the first name.
    const NAMES: [(Self, &'static [&'static str]); 5] = [
        (Self::Auto, &["auto", "default"]),
        (Self::MemHooks, &["memhooks"]),
        (Self::UserFaultFd, &["userfaultfd", "uffd"]),
        (Self::Import, &["import"]),
        (Self::Disabled, &["disabled"]),
    ];

    /// Returns the kind's name, as `FI_MR_CACHE_MONITOR` and the output of `hmem info` have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize].1[0]
    }
}

impl fmt::Display for HostMonitorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HostMonitorKind {
    type Err = Error;

    /// Parses one of the names in `FI_MR_CACHE_MONITOR`. Ignores case, and white space around the
    /// name.
    ///
    /// # Errors
    /// InvalidArgument: the name is unknown. The error lists the known names.
    fn from_str(name: &str) -> Result<Self> {
        let given = name.trim().to_ascii_lowercase();
        let found = Self::NAMES.iter().find(|(_, names)| names.contains(&given.as_str()));
        found.map(|(kind, _)| *kind).ok_or_else(|| {
            let known: Vec<_> =
                Self::NAMES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
            Error::new(ErrorKind::InvalidArgument, "cache monitor")
                .iface(IfaceKind::SYSTEM)
                .context("why", format_args!("no monitor is named {name}"))
                .context("name", name)
                .remedy(format!("use one of {}", known.join(", ")))
        })
    }
}

/// A monitor that was considered, and the result of its start.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct MonitorCandidate {
    /// Name of the monitor.
    pub name: &'static str,
    /// The error of the monitor's start, or `None` if the monitor has started.
    #[serde(serialize_with = "display_option")]
    pub refused: Option<Error>,
}

/// The monitor that was chosen for host memory, and the reason.
///
/// `Display` prints one line. The serialised form is
/// `{"requested","name","why","limits","candidates":[{"name","refused"}]}`.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct MonitorChoice {
    /// The kind that the caller requested.
    pub requested: HostMonitorKind,
    /// The monitor in use: its name, `disabled` if that was requested, or `none` if no monitor
    /// works here.
    pub name: &'static str,
    /// The reason why this monitor was chosen, for people to read.
    pub why: String,
    /// The changes of memory that the monitor misses, and the number of ranges that it can watch.
    pub limits: String,
    /// The monitors that were considered, in order. Empty if `disabled` was requested.
    pub candidates: Vec<MonitorCandidate>,
}

impl fmt::Display for MonitorChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.why)?;
        for MonitorCandidate { name, refused } in &self.candidates {
            if let Some(refused) = refused {
                write!(f, "; {name} refused: {refused:#}")?;
            }
        }
        if !self.limits.is_empty() {
            write!(f, "; {}", self.limits)?;
        }
        Ok(())
    }
}

fn display_option<S: Serializer>(error: &Option<Error>, serializer: S) -> Result<S::Ok, S::Error> {
    match error {
        Some(error) => serializer.collect_str(&format_args!("{error:#}")),
        None => serializer.serialize_none(),
    }
}

/// The running monitor of host memory, if any, and the reason for its choice.
#[derive(Debug)]
pub struct SystemMonitor {
    monitor: Option<Arc<dyn Monitor>>,
    choice: MonitorChoice,
}

const HOOKS_ALONE: &str = "changes by raw system calls and by the dynamic loader are not detected";
const UFFD_ALONE: &str = "a thread that maps the addresses again while another still unmaps \
    them can hit the old registration; memory that madvise discards is registered uncached until \
    the call has certainly returned; remap_file_pages, shmat(SHM_REMAP) and \
    madvise(MADV_GUARD_INSTALL) are not detected";
const LAYERED: &str = "after a raw system call unmaps memory, another thread can hit the old \
    registration for a moment; memory that a raw madvise discards is registered uncached until the \
    call has certainly returned; raw calls of remap_file_pages, shmat(SHM_REMAP) and \
    madvise(MADV_GUARD_INSTALL) are not detected";
const NOTHING: &str = "host memory is registered again each time";

fn uffd_alone(uffd: &UserFaultFd) -> String {
    format!("{UFFD_ALONE}; {} are cached", uffd.budget())
}

impl SystemMonitor {
    /// Starts a monitor of the given kind, and tests that it works. `Disabled` starts no monitor.
    ///
    /// `Auto` never fails, and logs a warning if a monitor does not work. If none works, host
    /// memory is not cached.
    ///
    /// # Errors
    /// - The error of the requested monitor if it does not work here.
    /// - InvalidArgument: the kind is `Import`. The application creates that monitor itself and
    ///   passes it to [`SystemMonitor::imported`].
    pub fn start(kind: HostMonitorKind) -> Result<Self> {
        match kind {
            HostMonitorKind::Auto => Ok(Self::auto()),
            HostMonitorKind::MemHooks => {
                Ok(Self::requested(kind, Some(MemHooks::start()?), HOOKS_ALONE.into()))
            }
            HostMonitorKind::UserFaultFd => {
                let uffd = UserFaultFd::start()?;
                let limits = uffd_alone(&uffd);
                Ok(Self::requested(kind, Some(uffd), limits))
            }
            HostMonitorKind::Import => Err(Error::new(ErrorKind::InvalidArgument, "cache monitor")
                .iface(IfaceKind::SYSTEM)
                .context("name", kind)
                .remedy(
                    "the application makes an import monitor: create it with ImportMonitor::new \
                     and pass it to SystemMonitor::imported",
                )),
            HostMonitorKind::Disabled => Ok(Self::requested(kind, None, NOTHING.into())),
        }
    }

    /// Creates a value that uses the application's own monitor.
    #[must_use]
    pub fn imported(monitor: Arc<dyn Monitor>) -> Self {
        Self::requested(
            HostMonitorKind::Import,
            Some(monitor),
            "changes that the application does not report are not detected".into(),
        )
    }

    fn requested(
        requested: HostMonitorKind,
        monitor: Option<Arc<dyn Monitor>>,
        limits: String,
    ) -> Self {
        let (name, why) = (requested.name(), "requested".into());
        let candidates = monitor.iter().map(|_| MonitorCandidate { name, refused: None }).collect();
        Self { monitor, choice: MonitorChoice { requested, name, why, limits, candidates } }
    }

    pub(crate) fn auto() -> Self {
        Self::best(MemHooks::start(), UserFaultFd::start())
    }

    /// Creates the value for `Auto` from the results of starting two monitors. Combines the
    /// monitors if both have started. If one has started, uses that monitor. If none has, the value
    /// has no monitor.
    fn best(hooks: Result<Arc<MemHooks>>, uffd: Result<Arc<UserFaultFd>>) -> Self {
        let [memhooks, userfaultfd] =
            [HostMonitorKind::MemHooks.name(), HostMonitorKind::UserFaultFd.name()];
        let monitor: Option<Arc<dyn Monitor>>;
        let (name, why, limits);
        match (&hooks, &uffd) {
            (Ok(hooks), Ok(uffd)) => {
                monitor = Some(Layered::new(Arc::clone(hooks), Arc::clone(uffd)));
                name = "memhooks+userfaultfd";
                why = "hooks detect calls of the C library before memory is unmapped, and the \
                       kernel's events detect raw system calls";
                limits = format!(
                    "{LAYERED}; {} are watched for raw system calls, and further ranges by the \
                     hooks alone",
                    uffd.budget()
                );
            }
            (Ok(hooks), Err(error)) => {
                tracing::warn!(
                    error = %error.full(),
                    limits = HOOKS_ALONE,
                    "userfaultfd does not work here: memhooks alone watch host memory"
                );
                monitor = Some(Arc::clone(hooks) as _);
                name = memhooks;
                why = "hooks detect calls of the C library before memory is unmapped";
                limits = HOOKS_ALONE.into();
            }
            (Err(error), Ok(uffd)) => {
                tracing::warn!(
                    error = %error.full(),
                    limits = UFFD_ALONE,
                    "memhooks do not work here: userfaultfd alone watches host memory"
                );
                monitor = Some(Arc::clone(uffd) as _);
                name = userfaultfd;
                why = "only the kernel's events are available";
                limits = uffd_alone(uffd);
            }
            (Err(hooks), Err(uffd)) => {
                tracing::warn!(
                    memhooks = %hooks,
                    userfaultfd = %uffd,
                    "no monitor of host memory works here: host memory is not cached"
                );
                monitor = None;
                name = "none";
                why = "no monitor of host memory works here";
                limits = NOTHING.into();
            }
        }
        let candidates = vec![
            MonitorCandidate { name: memhooks, refused: hooks.err() },
            MonitorCandidate { name: userfaultfd, refused: uffd.err() },
        ];
        let (requested, why) = (HostMonitorKind::Auto, why.into());
        Self { monitor, choice: MonitorChoice { requested, name, why, limits, candidates } }
    }

    /// Returns the running monitor.
    ///
    /// # Errors
    /// Unsupported: there is no monitor, because it was disabled or none works. The error has the
    /// reasons.
    pub fn monitor(&self) -> Result<Arc<dyn Monitor>> {
        self.monitor.clone().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "monitor")
                .iface(IfaceKind::SYSTEM)
                .context("monitor", self.choice.name)
                .context("why", &self.choice)
                .remedy(
                    "set FI_MR_CACHE_MONITOR to a monitor that works here; without one, host \
                     memory is registered without a cache",
                )
        })
    }

    /// Returns the name of the chosen monitor, with the reason for the choice.
    #[must_use]
    pub fn choice(&self) -> &MonitorChoice {
        &self.choice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no(what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, what).remedy("try another machine")
    }

    /// MON-04: the choice names the monitor in use, or `none`, and contains the error of each
    /// monitor that did not start.
    #[test]
    fn auto_reports_its_choice_and_each_refusal() {
        let none = SystemMonitor::best(Err(no("hooks")), Err(no("uffd")));
        assert_eq!(none.choice().name, "none");
        let text = none.choice().to_string();
        assert!(
            text.contains("hooks: not supported") && text.contains("uffd: not supported"),
            "{text}"
        );
        let error = none.monitor().unwrap_err();
        assert!(
            error.is_unsupported() && error.to_string().contains("no monitor of host memory works"),
            "{error}"
        );

        if let Ok(uffd) = UserFaultFd::start() {
            let uffd = SystemMonitor::best(Err(no("hooks")), Ok(uffd));
            assert_eq!(uffd.choice().name, "userfaultfd");
            assert!(uffd.choice().to_string().contains("hit the old registration"));
            assert_eq!(uffd.monitor().unwrap().name(), "userfaultfd");
        }
    }

    #[test]
    fn unknown_name_is_refused_with_the_known_names() {
        for (kind, names) in HostMonitorKind::NAMES {
            assert_eq!(names[0], kind.name());
            for name in names {
                assert_eq!(name.to_uppercase().parse::<HostMonitorKind>().unwrap(), kind);
            }
        }
        let error = "kdreg2".parse::<HostMonitorKind>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        for known in
            ["auto", "default", "memhooks", "userfaultfd", "uffd", "import", "disabled", "kdreg2"]
        {
            assert!(error.to_string().contains(known), "{error}");
        }
    }

    #[test]
    fn disabled_is_a_choice_and_import_is_refused_by_name() {
        let disabled = SystemMonitor::start(HostMonitorKind::Disabled).unwrap();
        assert_eq!(
            (disabled.choice().name, disabled.choice().why.as_str()),
            ("disabled", "requested")
        );
        assert!(disabled.monitor().unwrap_err().is_unsupported());
        let import = SystemMonitor::start(HostMonitorKind::Import).unwrap_err();
        assert_eq!(import.kind(), ErrorKind::InvalidArgument);
    }
}
