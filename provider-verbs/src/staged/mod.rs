//! Staged regions: device memory that the NIC cannot reach, copied through the domain's staging
//! buffers.
//!
//! The NIC knows the buffers only, registered once when the domain's first staged region is. A
//! request that names a staged region goes into a [`lane`] of its endpoint. The lane cuts the
//! request into requests over buffers. Its one completion comes when the last of them and the last
//! copy ended. One-sided access runs no code on the target, so peers cannot access staged regions:
//! such a region has no remote right and no remote key.

mod buffers;
mod lane;
mod memory;
mod request;
mod task;

pub(super) use self::{
    buffers::Staging,
    lane::{ActiveLanes, Lanes},
    memory::StagedRegion,
};
