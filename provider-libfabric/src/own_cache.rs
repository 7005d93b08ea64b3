//! Detection of libfabric's own registration cache.
//!
//! Some providers of libfabric cache the registrations of `fi_mr_regattr`. That cache patches the
//! functions of the C library that the monitors of this library patch too. No call of libfabric
//! says if a domain has the cache, so the answer follows from libfabric's rules: the provider, the
//! mode of the domain and the environment variables.

use std::ffi::c_int;

use super::sys::FI_MR_LOCAL;

/// Core providers that create a cache (`ofi_mr_cache_init`) for each domain. The other providers
/// of libfabric register nothing with hardware, or keep no registration.
const CACHING: [&str; 5] = ["cxi", "efa", "lpp", "opx", "verbs"];

/// The variable that disables the cache of every provider.
pub(super) const MONITOR: &str = "FI_MR_CACHE_MONITOR";

/// The variable that disables the caches of all providers but EFA if its value is 0.
const MAX_COUNT: &str = "FI_MR_CACHE_MAX_COUNT";

/// The variable that disables the cache of EFA if its value means false ([`is_false`]).
const EFA_ENABLE: &str = "FI_EFA_MR_CACHE_ENABLE";

/// Returns a description of the registration cache that libfabric has in a domain, or `None` if
/// libfabric caches nothing there.
///
/// `provider` is the full name, such as `verbs;ofi_rxm`. `variable` returns the value of an
/// environment variable. libfabric reads its variables at the first call in the process, so a
/// variable that the program changes later misleads this function.
pub(super) fn in_force(
    provider: &str,
    mr_mode: c_int,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<String> {
    let caching = provider.split(';').find(|layer| CACHING.contains(layer))?;
    let monitor = variable(MONITOR);
    let none = |name| variable(name).is_some_and(|value| value.trim() == "0");
    let disabled = match caching {
        // In LOCAL mode the application registers, so EFA caches nothing. EFA replaces the limits
        // of the variables by its own.
        "efa" => {
            mr_mode & FI_MR_LOCAL != 0 || variable(EFA_ENABLE).as_deref().is_some_and(is_false)
        }
        _ => none(MAX_COUNT),
    };
    if disabled || monitor.as_deref() == Some("disabled") {
        return None;
    }
    let monitor = monitor.unwrap_or_else(|| "libfabric's default".to_owned());
    Some(format!("libfabric's cache of the provider {caching} ({MONITOR}: {monitor})"))
}

/// Returns true for the values that libfabric reads as false.
fn is_false(value: &str) -> bool {
    ["0", "no", "false", "off"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FAB-12: the cache is detected if libfabric would create it, and only then.
    #[test]
    fn cache_of_libfabric_is_detected_by_provider_mode_and_variables() {
        let on = |provider, mode, variables: &[(&str, &str)]| {
            in_force(provider, mode, |name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        for provider in ["tcp", "tcp;ofi_rxm", "shm", "udp;ofi_rxd", "sockets", "psm3"] {
            assert_eq!(on(provider, 0, &[]), None, "{provider}");
        }
        for provider in ["verbs", "verbs;ofi_rxm", "cxi", "opx", "lpp", "efa"] {
            let found = on(provider, 0, &[]).expect(provider);
            let caching = provider.split(';').next().expect("a layer");
            assert!(found.contains(caching) && found.contains(MONITOR), "{found}");
            assert_eq!(on(provider, 0, &[(MONITOR, "disabled")]), None, "{provider}");
            let found = on(provider, 0, &[(MONITOR, "memhooks")]).expect(provider);
            assert!(found.contains("memhooks"), "{found}");
        }
        assert_eq!(on("verbs", 0, &[(MAX_COUNT, "0")]), None);
        assert!(on("verbs", FI_MR_LOCAL, &[(MAX_COUNT, "7")]).is_some());
        assert!(on("efa", 0, &[(MAX_COUNT, "0")]).is_some(), "EFA has limits of its own");
        assert_eq!(on("efa", FI_MR_LOCAL, &[]), None);
        assert_eq!(on("efa", 0, &[(EFA_ENABLE, "False")]), None);
    }
}
