//! The name of a monitor in errors.

use hmem_core::{Error, ErrorKind, IfaceKind};

/// The name of a monitor, its iface and its alternative, for error messages.
///
/// # Examples
/// ```
/// use hmem_core::IfaceKind;
/// use hmem_hook::MonitorName;
///
/// let name = MonitorName {
///     name: "memhooks",
///     iface: IfaceKind::SYSTEM,
///     fallback_hint: "use another monitor",
/// };
/// assert!(name.forked("subscribe").is_unsupported());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MonitorName {
    /// The name of the monitor.
    pub name: &'static str,
    /// The iface of the watched memory.
    pub iface: IfaceKind,
    /// The advice to choose an alternative to this monitor, in the imperative: `use the userfaultfd
    /// monitor`. The remedies of failed patches end with this text.
    pub fallback_hint: &'static str,
}

impl MonitorName {
    /// Creates an error of the given kind that names the monitor.
    #[must_use]
    pub fn error(&self, kind: ErrorKind) -> Error {
        Error::new(kind, self.name).iface(self.iface)
    }

    /// Adds the monitor and its iface to an error.
    #[must_use]
    pub fn add_to(&self, error: Error) -> Error {
        error.iface(self.iface).context("monitor", self.name)
    }

    /// Creates the error (Unsupported) of a call in a forked child: a monitor watches only the
    /// process that started it.
    #[cold]
    #[must_use]
    pub fn forked(&self, operation: &'static str) -> Error {
        self.add_to(Error::new(ErrorKind::Unsupported, operation))
            .context("why", "this process was forked from the one that the monitor watches")
            .remedy("start a new monitor in the child, or call exec")
    }
}
