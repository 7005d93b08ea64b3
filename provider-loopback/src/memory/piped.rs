//! Copies to and from staged memory, chunk by chunk through the domain's staging buffers, so that
//! the copy engine works while the NIC copies.

use std::sync::Arc;

use hmem_core::{Error, Result, provider::StagedMemory};
use hmem_p2p::staging::{Claim, Cut, Part, Pipeline, Pool, Posted, Run, Use, View};

use super::{Span, copy};

/// Why a transfer failed, and where.
#[derive(Debug)]
pub(in super::super) struct Failed {
    pub(in super::super) part: Part,
    pub(in super::super) error: Error,
}

impl Failed {
    /// Neither side's own failure.
    pub(in super::super) fn on_the_wire(error: Error) -> Self {
        Self { part: Part::Wire, error }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// Copies one run of bytes to another of the same length, of which some is staged.
///
/// `canceled` and `enter` are asked before each chunk: the first whether to go on, the second
/// whether it fails.
pub(in super::super) fn pipe(
    from: &[Span<'_>],
    to: &[Span<'_>],
    pool: &Arc<Pool>,
    canceled: impl Fn() -> Option<Error>,
    enter: impl Fn() -> Result<()>,
) -> Result<u64, Failed> {
    let len = to.iter().map(Span::len).sum();
    if len == 0 {
        return Ok(0);
    }
    let cut = Cut::chunks(len, pool.slot_len());
    let (sources, targets) = (staged_runs(from), staged_runs(to));
    let pipeline = Pipeline::new(Claim::new(pool), Use::Rma, cut, sources, targets);
    let carry = |view: View<'_>| {
        enter()?;
        let (near, far) = (near(from, &view), near(to, &view));
        // What only passes from one staged memory to another is in its buffer already.
        if near.iter().zip(&far).any(|(near, far)| !same(near, far)) || near.len() != far.len() {
            copy(&near, &far)?;
        }
        Ok(Posted::Done)
    };
    pipeline.run(canceled, carry).map_err(|(part, error)| Failed { part, error })
}

fn staged_runs<'a>(spans: &[Span<'a>]) -> Vec<Run<&'a dyn StagedMemory>> {
    let mut at = 0;
    let mut runs = Vec::new();
    for span in spans {
        if let Some((memory, offset)) = span.staged() {
            runs.push(Run { at, len: span.len(), memory, offset });
        }
        at += span.len();
    }
    runs
}

/// The bytes of a chunk, those of staged memory where its buffer has them.
fn near<'a>(spans: &[Span<'a>], view: &View<'_>) -> Vec<Span<'a>> {
    let end = view.at + view.len;
    let mut at = 0;
    let mut near = Vec::new();
    for span in spans {
        let (start, stop) = (at.max(view.at), (at + span.len()).min(end));
        if start < stop {
            if span.staged().is_some() {
                let parts = view.parts(start, stop - start);
                near.extend(parts.map(|(address, _, len)| Span::Direct {
                    at: address.0,
                    len,
                    mapping: None,
                }));
            } else {
                near.push(span.part(start - at, stop - start));
            }
        }
        at += span.len();
        if at >= end {
            break;
        }
    }
    near
}

fn same(near: &Span<'_>, far: &Span<'_>) -> bool {
    match (near, far) {
        (
            Span::Direct { at: a, len: m, mapping: None },
            Span::Direct { at: b, len: n, mapping: None },
        ) => (a, m) == (b, n),
        _ => false,
    }
}
