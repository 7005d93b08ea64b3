//! The guide: one page for each job, with an example that runs without hardware.
//!
//! Read the first four pages in order. The other pages stand alone.
//!
//! 1. [Register host memory](host_memory)
//! 2. [Register device memory](device_memory)
//! 3. [Exchange keys](keys)
//! 4. [Transfers and completions](transfers)
//! 5. [The registration cache](cache)
//! 6. [Your own protection domain](own_protection_domain)
//! 7. [Your own libfabric domain](own_fabric_domain)
//! 8. [libfabric's NICs](libfabric_nics)
//! 9. [Windows and grants](windows_and_grants)
//! 10. [Errors and explain](errors)
//! 11. [Testing without hardware](testing)
//! 12. [Containers](containers)
//! 13. [Porting from libibverbs and libfabric](porting)
//! 14. [Memory that changes](changing_memory)
//! 15. [Several NICs](rails)

// The names to which the pages link.
#[cfg(doc)]
use crate::{
    provider::{CompletionQueue, EndpointAttr, ProgressModel, ProviderAttr},
    transfer::{Completion, PeerId},
    *,
};

#[doc = include_str!("host_memory.md")]
pub mod host_memory {}

#[doc = include_str!("device_memory.md")]
pub mod device_memory {}

#[doc = include_str!("keys.md")]
pub mod keys {}

#[doc = include_str!("transfers.md")]
pub mod transfers {}

#[doc = include_str!("cache.md")]
pub mod cache {}

#[doc = include_str!("own_protection_domain.md")]
pub mod own_protection_domain {}

#[doc = include_str!("own_fabric_domain.md")]
pub mod own_fabric_domain {}

#[doc = include_str!("libfabric_nics.md")]
pub mod libfabric_nics {}

#[doc = include_str!("windows_and_grants.md")]
pub mod windows_and_grants {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("testing.md")]
pub mod testing {}

#[doc = include_str!("containers.md")]
pub mod containers {}

#[doc = include_str!("porting.md")]
pub mod porting {}

#[doc = include_str!("changing_memory.md")]
pub mod changing_memory {}

#[doc = include_str!("rails.md")]
pub mod rails {}
