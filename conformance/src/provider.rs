//! The behaviours of a provider.

use hmem_core::provider::Provider;

use crate::trial::behaviours;

behaviours! {
    dyn Provider:
}
