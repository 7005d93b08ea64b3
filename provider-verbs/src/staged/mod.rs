//! Staged regions: device memory that the NIC cannot reach, copied through the domain's staging
//! buffers.
//!
//! Only the buffers are registered with the NIC, together with the domain's first staged region. A
//! request that names a staged region goes into a [`lane`] of its endpoint. The lane divides it
//! into requests over buffers. The request completes once, after the last of them and the last copy
//! ended. One-sided access runs no code on the target, so peers cannot access staged regions: a
//! staged region has no remote right and no remote key.

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
