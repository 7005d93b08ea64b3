//! `hmem bench`: what the library costs on this machine, beside what its peers cost in the same run.

mod cache;
mod measure;
mod memory;
mod noop;
mod report;
#[allow(unsafe_code, reason = "calls UCX's exported functions")]
mod ucx;
#[allow(unsafe_code, reason = "maps and unmaps as applications do")]
mod unmaps;

use hmem::Result;

pub use self::report::{MemoryRow, Report, Row, text};
use self::{cache::Bench, measure::Effort};
use crate::args::BenchCacheArgs;

/// Measures the registration cache.
///
/// # Errors
/// Out of memory or threads; a monitor that cannot start.
pub fn cache(args: &BenchCacheArgs, next: impl FnMut(usize, usize, &str)) -> Result<Report> {
    let mut bench = Bench::new(if args.quick { Effort::QUICK } else { Effort::FULL })?;
    bench.run(next)?;
    Ok(bench.report)
}
