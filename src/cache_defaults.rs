//! The default cache settings of domains: those of the builder and those of the environment.

use std::sync::OnceLock;

use hmem_core::{CacheAttr, IfaceKind, Result, cache::Limits, environment};
use hmem_iface_system::monitor::{HostMonitorKind, SystemMonitor};

use crate::env;

/// The result of [`CacheDefaults::off_by`] if the builder's settings disable the cache.
const BUILDER_CACHE: &str = "Builder::cache";
/// The result of [`CacheDefaults::off_by`] if the builder's monitor disables the cache.
const BUILDER_MONITOR: &str = "Builder::cache_monitor";

/// The default cache settings of the domains of an [`Hmem`](crate::Hmem).
///
/// They apply to the settings that are `None` in a domain's [`CacheAttr`]. A domain whose
/// [`DomainAttr::cache`](hmem_core::DomainAttr::cache) is `None` has no cache.
#[derive(Debug)]
pub struct CacheDefaults {
    /// The settings of the builder, and of the environment where the builder has none.
    attr: CacheAttr,
    by_builder: CacheAttr,
    /// The monitor of host memory.
    monitor: HostMonitorKind,
    /// The environment variable that names the monitor. `None` if the monitor comes from the
    /// builder or is the default.
    variable: Option<&'static str>,
}

impl CacheDefaults {
    /// Returns the settings of the builder and the environment. A setting is `None` if neither has
    /// it.
    #[must_use]
    pub fn attr(&self) -> &CacheAttr {
        &self.attr
    }

    /// Returns the kind of the monitor of host memory.
    #[must_use]
    pub fn monitor(&self) -> HostMonitorKind {
        self.monitor
    }

    /// Returns the limits of [`CacheDefaults::attr`]. The maximum count is 0 if the monitor is
    /// [`HostMonitorKind::Disabled`].
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.applied_to(CacheAttr::default()).limits()
    }

    /// Returns the setting that disables the registration caches of domains:
    /// `FI_MR_CACHE_MONITOR`, `FI_MR_CACHE_MAX_COUNT`, `FI_MR_CACHE_MAX_SIZE`, `Builder::cache` or
    /// `Builder::cache_monitor`. Returns `None` if none of them does.
    ///
    /// A domain's [`DomainAttr::cache`](hmem_core::DomainAttr::cache) can override a limit that
    /// disables its cache, but not the monitor.
    #[must_use]
    pub fn off_by(&self) -> Option<&'static str> {
        if self.monitor == HostMonitorKind::Disabled {
            return Some(self.variable.unwrap_or(BUILDER_MONITOR));
        }
        let (limits, builder) = (self.limits(), &self.by_builder);
        let settings = [
            (limits.max_count == 0, builder.max_count.is_some(), env::CACHE_MAX_COUNT),
            (limits.max_bytes == 0, builder.max_bytes.is_some(), env::CACHE_MAX_SIZE),
        ];
        let off = settings.into_iter().find(|(off, ..)| *off);
        off.map(|(_, by_builder, variable)| if by_builder { BUILDER_CACHE } else { variable })
    }

    /// Returns the default setting that disables the monitor of an iface: a variable such as
    /// `FI_MR_CUDA_CACHE_MONITOR_ENABLED`, or `Builder::cache`. Without the monitor, the iface's
    /// memory is registered uncached. Returns `None` if no default setting disables the monitor.
    ///
    /// The result covers neither settings that disable the whole cache ([`CacheDefaults::off_by`]),
    /// nor [`CacheAttr::without_monitors`] of a domain, which overrides the default setting for
    /// that domain.
    #[must_use]
    pub fn monitor_left_out_by(&self, iface: IfaceKind) -> Option<&'static str> {
        if !self.attr.without_monitors.as_ref().is_some_and(|without| without.contains(&iface)) {
            return None;
        }
        let variable =
            env::CACHE_MONITORS.into_iter().find(|(_, of)| *of == iface).map(|(name, _)| name);
        variable.filter(|_| self.by_builder.without_monitors.is_none()).or(Some(BUILDER_CACHE))
    }

    /// Returns the settings `cache` of a domain, with these defaults for settings that are `None`.
    /// If the monitor of host memory is disabled, the result turns the cache off.
    pub(crate) fn applied_to(&self, mut cache: CacheAttr) -> CacheAttr {
        cache.max_count = cache.max_count.or(self.attr.max_count);
        cache.max_bytes = cache.max_bytes.or(self.attr.max_bytes);
        cache.merge = cache.merge.or(self.attr.merge);
        cache.growth = cache.growth.or(self.attr.growth);
        cache.without_monitors =
            cache.without_monitors.or_else(|| self.attr.without_monitors.clone());
        if self.monitor == HostMonitorKind::Disabled {
            cache.max_count = Some(0);
        }
        cache
    }

    /// Starts the monitor of host memory.
    ///
    /// # Errors
    /// The errors of [`SystemMonitor::start`], with the variable that names the monitor, if any.
    pub(crate) fn start_monitor(&self) -> Result<SystemMonitor> {
        let kind = self.monitor;
        SystemMonitor::start(kind).map_err(|error| {
            let error = match self.variable {
                Some(variable) => error.context("variable", variable).context("value", kind.name()),
                None => error,
            };
            match kind {
                HostMonitorKind::Import => error.remedy(
                    "set FI_MR_CACHE_MONITOR to another monitor; an imported one is for \
                     applications, which make it with ImportMonitor::new and pass it to \
                     Builder::imported_cache_monitor",
                ),
                _ => error,
            }
        })
    }
}

/// The settings from which the [`CacheDefaults`] are made.
#[derive(Debug)]
pub(crate) struct CacheSettings {
    by_builder: CacheAttr,
    /// The builder's monitor of host memory, if any.
    monitor: Option<HostMonitorKind>,
    /// False if no environment variable may be read.
    environment: bool,
    /// The result of [`CacheSettings::defaults`]. Unset until its first successful call.
    defaults: OnceLock<CacheDefaults>,
}

impl CacheSettings {
    pub(crate) fn new(
        by_builder: CacheAttr,
        monitor: Option<HostMonitorKind>,
        environment: bool,
    ) -> Self {
        Self { by_builder, monitor, environment, defaults: OnceLock::new() }
    }

    /// Returns the defaults. The first call reads the environment. After an error the next call
    /// reads it again.
    ///
    /// # Errors
    /// InvalidArgument for a malformed variable that the builder does not override. The error names
    /// the variable.
    pub(crate) fn defaults(&self) -> Result<&CacheDefaults> {
        if let Some(defaults) = self.defaults.get() {
            return Ok(defaults);
        }
        let defaults = self.read()?;
        Ok(self.defaults.get_or_init(|| defaults))
    }

    fn read(&self) -> Result<CacheDefaults> {
        let by_builder = self.by_builder.clone();
        let named = match self.monitor {
            None if self.environment => monitor_in_environment()?,
            _ => None,
        };
        let attr = if self.environment { env::cache(&by_builder)? } else { by_builder.clone() };
        let monitor = self.monitor.or(named).unwrap_or_default();
        Ok(CacheDefaults { attr, by_builder, monitor, variable: named.map(|_| env::CACHE_MONITOR) })
    }
}

/// Returns the monitor that `FI_MR_CACHE_MONITOR` names, or `None` if the variable is unset or
/// empty. `kdreg2` counts as `auto`, with a warning: it is a kernel module that this library does
/// not use.
fn monitor_in_environment() -> Result<Option<HostMonitorKind>> {
    const KERNEL_MODULE: &str = "kdreg2";
    let name = environment::text(env::CACHE_MONITOR)?;
    if name.is_some_and(|name| name.trim().eq_ignore_ascii_case(KERNEL_MODULE)) {
        tracing::warn!(
            variable = env::CACHE_MONITOR,
            value = KERNEL_MODULE,
            "the library does not use the kernel module kdreg2: the monitor of host memory is \
             chosen as with auto"
        );
        return Ok(Some(HostMonitorKind::Auto));
    }
    environment::parsed(env::CACHE_MONITOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults(by_builder: CacheAttr, monitor: Option<HostMonitorKind>) -> CacheDefaults {
        CacheSettings::new(by_builder, monitor, false).read().unwrap()
    }

    #[test]
    fn settings_of_the_builder_are_reported_as_its_own() {
        let without = CacheAttr::default().without_monitors(vec![IfaceKind::ZE]);
        for off in [without.clone().max_count(0), without.clone().max_bytes(0)] {
            assert_eq!(defaults(off, None).off_by(), Some("Builder::cache"));
        }
        let on = defaults(without.max_count(3).max_bytes(5).merge(true), None);
        assert_eq!(on.off_by(), None);
        assert_eq!(on.limits(), Limits { max_count: 3, max_bytes: 5, merge: true });
        assert_eq!(on.monitor_left_out_by(IfaceKind::ZE), Some("Builder::cache"));
        assert_eq!(on.monitor_left_out_by(IfaceKind::CUDA), None);
        let off = defaults(CacheAttr::default().max_count(3), Some(HostMonitorKind::Disabled));
        assert_eq!((off.off_by(), off.limits().max_count), (Some("Builder::cache_monitor"), 0));
    }
}
