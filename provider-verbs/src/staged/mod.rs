//! Staged regions: device memory that the NIC cannot reach, copied through the domain's staging
//! buffers.
//!
//! [`Transfer`](hmem_p2p::staging::Transfer) divides the requests. Only the staging buffers are
//! registered with the NIC. The provider registers them together with
//! the domain's first staged region. A request that names a staged region goes into a [`lane`] of
//! its endpoint. The lane divides the request into work requests over staging buffers. The request
//! completes once, after its last work request and its last copy have ended.
//!
//! One-sided access runs no code on the target, so peers cannot access staged regions: a staged
//! region has no remote right and no remote key.

mod buffers;
mod lane;
mod task;

pub(super) use self::{
    buffers::Staging,
    lane::{ActiveLanes, Lanes},
};
