//! Exports of one decision: one dma-buf for each physical segment, whatever the number of NICs that register it.

use std::os::fd::AsFd;

use hmem_core::{
    AddressRange, Error, ErrorKind, Iface, IfaceKind, Segment,
    iface::{DmaBufExport, DmaBufMapping},
    path::Attempt,
    provider::{Backing, Nic, Piece},
};

use super::{
    cause::Step,
    trial::{Refusal, Way},
};

/// Exports of the ranges of one request, given back in the iface's own way when the decision is made.
pub(super) struct Exports<'a> {
    iface: &'a dyn Iface,
    ranges: &'a [AddressRange],
    segments: Option<Vec<Segment>>,
    sets: Vec<Set>,
    /// Whether several NICs register from it, so that what one refuses is kept for the next.
    pub(super) shared: bool,
}

/// All segments under one mapping.
struct Set {
    mapping: DmaBufMapping,
    made: Vec<(AddressRange, DmaBufExport)>,
}

impl<'a> Exports<'a> {
    pub(super) fn new(iface: &'a dyn Iface, ranges: &'a [AddressRange]) -> Self {
        Self { iface, ranges, segments: None, sets: Vec::new(), shared: false }
    }

    /// The mapping under which the ranges are exported already.
    pub(super) fn existing(&self) -> Option<DmaBufMapping> {
        self.sets.first().map(|set| set.mapping)
    }

    /// The pieces that a NIC registers, exported now unless they are already.
    pub(super) fn pieces(&mut self, mapping: DmaBufMapping, nic: &Nic) -> Result<Vec<Piece<'_>>, Refusal> {
        let at = match self.sets.iter().position(|set| set.mapping == mapping) {
            Some(at) => at,
            None => {
                let made = self.export(mapping, nic)?;
                self.sets.push(Set { mapping, made });
                self.sets.len() - 1
            }
        };
        Ok(self.sets[at].made.iter().map(piece).collect())
    }

    /// A NIC refused the exports of a mapping: they are given back, unless others are to try them.
    pub(super) fn refused(&mut self, mapping: DmaBufMapping) -> Vec<Attempt> {
        match self.sets.iter().position(|set| set.mapping == mapping && !self.shared) {
            Some(at) => {
                let set = self.sets.swap_remove(at);
                self.give_back(set.made)
            }
            None => Vec::new(),
        }
    }

    /// Gives everything back; what the driver did not like about it comes out as attempts.
    pub(super) fn close(&mut self) -> Vec<Attempt> {
        let sets = std::mem::take(&mut self.sets);
        sets.into_iter().flat_map(|set| self.give_back(set.made)).collect()
    }

    fn export(
        &mut self,
        mapping: DmaBufMapping,
        nic: &Nic,
    ) -> Result<Vec<(AddressRange, DmaBufExport)>, Refusal> {
        let segments = match self.segments.take() {
            Some(segments) => segments,
            None => self.find_segments()?,
        };
        let segments = self.segments.insert(segments).clone();
        let mut made = Vec::with_capacity(segments.len());
        for segment in segments {
            let refusal = if segment.exportable {
                match self.iface.export_dma_buf(segment.range, nic, mapping) {
                    Ok(export) => {
                        made.push((segment.range, export));
                        continue;
                    }
                    Err(error) => {
                        let call = format!("export_dma_buf({}, {mapping:?})", segment.range);
                        Refusal::new(Step::Export, call, error)
                    }
                }
            } else {
                // Nothing was asked of the driver: the iface named the segment so.
                let call = || format!("segments({})", segment.range);
                let error = Error::new(ErrorKind::Unsupported, "segments")
                    .iface(self.iface.kind())
                    .context("segment", segment.range)
                    .context("attribute", attribute(self.iface.kind()))
                    .remedy("this physical segment cannot be exported: allocate it as RDMA capable");
                Refusal { own: true, ..Refusal::new(Step::Segments, call(), error) }
            };
            let also = self.give_back(made);
            return Err(Refusal { also, ..refusal });
        }
        Ok(made)
    }

    fn find_segments(&self) -> Result<Vec<Segment>, Refusal> {
        let mut all = Vec::with_capacity(self.ranges.len());
        for range in self.ranges {
            let call = || format!("segments({range})");
            let segments =
                self.iface.segments(*range).map_err(|error| Refusal::new(Step::Segments, call(), error))?;
            if !cover(&segments, *range) {
                let error = Error::new(ErrorKind::OutOfBounds, "segments")
                    .iface(self.iface.kind())
                    .context("range", range)
                    .context("segments", segments.len())
                    .remedy("the iface names segments that are not the whole range: nothing is registered in part");
                return Err(Refusal { own: true, ..Refusal::new(Step::Segments, call(), error) });
            }
            all.extend(segments);
        }
        Ok(all)
    }

    fn give_back(&self, made: Vec<(AddressRange, DmaBufExport)>) -> Vec<Attempt> {
        let mut refused = Vec::new();
        for (range, export) in made {
            if let Err(error) = self.iface.release_dma_buf(export) {
                tracing::warn!(%range, %error, "a dma-buf export could not be given back");
                let path = Way::DmaBuf(DmaBufMapping::Default).path();
                refused.push(Attempt::refused(path, format!("release_dma_buf({range})"), error));
            }
        }
        refused
    }
}

/// What says of a segment that it cannot be exported, in the words of the iface's driver where it has some.
fn attribute(kind: IfaceKind) -> &'static str {
    if kind == IfaceKind::CUDA { "IS_GPU_DIRECT_RDMA_CAPABLE is 0" } else { "not exportable" }
}

fn piece((range, export): &(AddressRange, DmaBufExport)) -> Piece<'_> {
    Piece { range: *range, backing: Backing::DmaBuf { fd: export.as_fd(), offset: export.offset } }
}

impl Drop for Exports<'_> {
    fn drop(&mut self) {
        // What was refused is logged where it happens; whoever keeps a trace has called `close`.
        drop(self.close());
    }
}

/// Whether segments follow one another over the whole of a range.
fn cover(segments: &[Segment], range: AddressRange) -> bool {
    let end = segments.iter().try_fold(range.start(), |at, segment| {
        (segment.range.start() == at).then(|| segment.range.end()).flatten()
    });
    end == range.end()
}

#[cfg(test)]
mod tests {
    use hmem_core::Address;

    use super::*;

    #[test]
    fn segments_that_leave_out_part_of_a_range_are_noticed() {
        let range = |start, len| AddressRange::new(Address(start), len).unwrap();
        let segment = |start, len| Segment { range: range(start, len), exportable: true };
        let whole = range(100, 60);
        assert!(cover(&[segment(100, 60)], whole));
        assert!(cover(&[segment(100, 10), segment(110, 50)], whole));
        for short in [
            vec![],
            vec![segment(100, 59)],
            vec![segment(101, 59)],
            vec![segment(100, 10), segment(111, 49)],
            vec![segment(100, 61)],
        ] {
            assert!(!cover(&short, whole), "{short:?}");
        }
    }
}
