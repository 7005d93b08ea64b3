//! Tests of the registration cache over a backend that records its calls.

mod forks;
mod invalidation;
mod limits;
mod lookups;
mod merging;
mod oracle;
mod statistics;
mod support;
mod waiting;
