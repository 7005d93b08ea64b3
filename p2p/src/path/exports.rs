//! Dma-buf exports for one registration. The driver exports each range as one dma-buf if it can,
//! and otherwise each physical segment, or the whole allocation. All NICs of the registration share
//! the exports. Registrations with the same [`SharedExports`] share them too.

use std::{os::fd::AsFd, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, DmaBufOffset, Error, ErrorKind, Iface, IfaceExt, Path, Segment,
    SharedExport, SharedExports,
    cause::Step,
    iface::{DmaBufExport, DmaBufMapping, Facet, SegmentMap},
    path::{Attempt, ExportUnit},
    provider::{Backing, Nic, Piece},
};

use super::variant::{DmaBufLayout, ExportShape, PathRefusal, unit_note};

/// Exports of the ranges of one registration. Dropping the value releases the exports.
pub(super) struct ExportSet<'a> {
    pub(super) iface: &'a Arc<dyn Iface>,
    ranges: &'a [AddressRange],
    /// The allocation of each range.
    allocations: &'a [Allocation],
    /// The physical segments of each range; `None` until they were queried.
    segments: Option<Vec<Vec<Segment>>>,
    /// The physical segments of each allocation; `None` until they were queried.
    whole_segments: Option<Vec<Vec<Segment>>>,
    sets: Vec<Set>,
    /// Exports of earlier registrations, to be used again; `None` to export everything anew.
    earlier: Option<&'a SharedExports>,
    /// True if further NICs will register these exports. An export that the current NIC refuses is
    /// then kept for the further NICs.
    pub(super) shared: bool,
}

/// A way to divide the ranges of a registration into exports. A *part* is the bytes of a range in
/// one physical segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Division {
    /// One dma-buf for each range. If the driver refuses to export a range as one dma-buf, one
    /// dma-buf for each part of that range.
    Ranges,
    /// One dma-buf for each part.
    Parts,
    /// One dma-buf of the whole physical segment, for each part.
    Segments,
    /// One dma-buf of the whole allocation, for each range.
    Allocations,
}

impl Division {
    /// Returns all divisions in the order in which they are tried. The first has the unit `first`.
    pub(super) fn order(first: ExportUnit) -> [Self; 4] {
        let mut order = [Self::Ranges, Self::Parts, Self::Segments, Self::Allocations];
        let at = order.iter().position(|division| division.unit() == first);
        order.rotate_left(at.unwrap_or(0));
        order
    }

    pub(super) const fn unit(self) -> ExportUnit {
        match self {
            Self::Ranges | Self::Parts => ExportUnit::Range,
            Self::Segments => ExportUnit::Segment,
            Self::Allocations => ExportUnit::Allocation,
        }
    }
}

/// The exports of all ranges with one dma-buf mapping and one [`Division`]. `mapping` is never
/// [`DmaBufMapping::DataDirect`]: registrations with Data Direct use the exports with the PCIe
/// mapping ([`DmaBufMapping::of_export`]).
struct Set {
    mapping: DmaBufMapping,
    division: Division,
    made: Vec<Made>,
    /// Refusals by the driver to export a range of several physical segments as one dma-buf. The
    /// segments of these ranges were exported separately instead.
    refused: Vec<PathRefusal>,
}

/// An exported dma-buf, and the range in it that a NIC registers.
struct Made {
    /// The range that a NIC registers. It lies in `exported`.
    range: AddressRange,
    exported: AddressRange,
    /// The allocation of the range.
    of: Allocation,
    export: Held,
}

/// An export of this registration, or of a [`SharedExports`].
enum Held {
    Own(DmaBufExport),
    Shared(Arc<SharedExport>),
}

impl Held {
    fn export(&self) -> &DmaBufExport {
        match self {
            Self::Own(export) => export,
            Self::Shared(shared) => shared.export(),
        }
    }
}

/// The dma-bufs for a NIC to register, as one [`Piece`] each.
pub(super) struct Exported<'e> {
    pub(super) pieces: Vec<Piece<'e>>,
    pub(super) shape: ExportShape,
    pub(super) refused: Vec<PathRefusal>,
}

impl<'a> ExportSet<'a> {
    /// Creates a set without exports. `allocations` has the allocation of each range.
    pub(super) fn new(
        iface: &'a Arc<dyn Iface>,
        ranges: &'a [AddressRange],
        allocations: &'a [Allocation],
        earlier: Option<&'a SharedExports>,
    ) -> Self {
        Self {
            iface,
            ranges,
            allocations,
            segments: None,
            whole_segments: None,
            sets: Vec::new(),
            earlier,
            shared: false,
        }
    }

    /// Exports the ranges as peer memory. Returns one piece for each range.
    pub(super) fn peer_memory(&self, nic: &Nic) -> Result<Vec<Piece<'a>>, PathRefusal> {
        let iface = self.iface;
        let piece = |(&range, of): (&AddressRange, &Allocation)| {
            let lacking = || iface.unavailable(Facet::PeerMemory).context("range", range);
            let exporter = iface.peer_memory().ok_or_else(lacking);
            let export = exporter.and_then(|exporter| exporter.export(range, of, nic));
            let export = export.map_err(|error| {
                PathRefusal::new(Step::Export, format!("export_peer_memory({range})"), error)
            })?;
            Ok(Piece { range, backing: Backing::PeerMemory { iface, address: export.address } })
        };
        self.ranges.iter().zip(self.allocations).map(piece).collect()
    }

    /// Returns the dma-buf mapping with which the ranges are already exported; `None` if there is
    /// no export. The mapping is never [`DmaBufMapping::DataDirect`].
    pub(super) fn existing(&self) -> Option<DmaBufMapping> {
        self.sets.first().map(|set| set.mapping)
    }

    /// Returns the unit in which the ranges are already exported with this mapping; `None` if there
    /// is no such export.
    pub(super) fn unit_of(&self, mapping: DmaBufMapping) -> Option<ExportUnit> {
        let mapping = mapping.of_export();
        self.sets.iter().find(|set| set.mapping == mapping).map(|set| set.division.unit())
    }

    /// Returns true if `division` exports more memory than the ranges, and the iface can export
    /// that memory. Returns false if the iface does not have the dma-buf mapping, or if a whole
    /// allocation contains bytes that are not mapped or cannot be exported.
    ///
    /// Fails if a query of physical segments fails. If a query for the whole allocations failed,
    /// later calls do not repeat the query and return false.
    pub(super) fn is_larger(
        &mut self,
        mapping: DmaBufMapping,
        division: Division,
    ) -> Result<bool, PathRefusal> {
        let (ranges, allocations) = (self.ranges, self.allocations);
        let memory = ranges.iter().zip(allocations);
        let exporter = self.iface.dma_buf();
        let mapping = mapping.of_export();
        let exports = exporter.is_some_and(|exporter| exporter.mappings().contains(&mapping));
        if !exports || memory.clone().all(|(range, of)| *range == of.range) {
            return Ok(false);
        }
        self.query_segments()?;
        if self.whole_segments.is_none() {
            self.whole_segments = Some(Vec::new());
            let query = |of: &Allocation| {
                self.iface.segments_of(of.range, of).map_err(|error| {
                    PathRefusal::new(Step::Segments, format!("segments({})", of.range), error)
                })
            };
            self.whole_segments =
                Some(self.allocations.iter().map(query).collect::<Result<_, _>>()?);
        }
        let whole = self.whole_segments.as_deref().unwrap_or_default();
        let mut parts = self.segments.iter().flatten().flatten();
        Ok(match division {
            Division::Ranges | Division::Parts => false,
            // The segment of an allocation that has only one is the allocation.
            Division::Segments => {
                let several = whole.iter().any(|whole| whole.len() > 1);
                several && parts.any(|part| self.segment(part) != *part)
            }
            Division::Allocations => {
                !whole.is_empty()
                    && memory.zip(whole).all(|((range, of), whole)| {
                        of.range.contains_range(*range)
                            && cover(whole, of.range)
                            && whole.iter().all(|segment| segment.exportable)
                    })
            }
        })
    }

    /// Returns the whole physical segment around a part of a range.
    fn segment(&self, part: &Segment) -> Segment {
        let mut whole = self.whole_segments.iter().flatten().flatten();
        *whole.find(|segment| segment.range.contains_range(part.range)).unwrap_or(part)
    }

    /// Returns the dma-bufs of all ranges with `mapping` and `division`, for a NIC to register. The
    /// first call exports them. For whole segments or allocations, the caller must have called
    /// [`is_larger`](Self::is_larger) before.
    pub(super) fn pieces(
        &mut self,
        mapping: DmaBufMapping,
        division: Division,
        nic: &Nic,
    ) -> Result<Exported<'_>, PathRefusal> {
        let at = match self.at(mapping, division) {
            Some(at) => at,
            None => {
                self.query_segments()?;
                let set = self.export(mapping.of_export(), division, nic)?;
                self.sets.push(set);
                self.sets.len() - 1
            }
        };
        let set = &self.sets[at];
        let segments = self.segments.iter().flatten().map(Vec::len).sum();
        let layout = DmaBufLayout { segments, dma_bufs: set.made.len() };
        let layout = (segments > self.ranges.len()).then_some(layout);
        Ok(Exported {
            pieces: set.made.iter().map(|made| piece(made, mapping)).collect(),
            shape: ExportShape { unit: division.unit(), layout },
            refused: set.refused.clone(),
        })
    }

    fn at(&self, mapping: DmaBufMapping, division: Division) -> Option<usize> {
        let mapping = mapping.of_export();
        self.sets.iter().position(|set| set.mapping == mapping && set.division == division)
    }

    /// Releases the exports with `mapping` and `division`, which a NIC refused, unless further NICs
    /// may register them. Returns failed releases as attempts.
    pub(super) fn refused(&mut self, mapping: DmaBufMapping, division: Division) -> Vec<Attempt> {
        match self.at(mapping, division) {
            Some(at) if !self.shared => {
                let set = self.sets.swap_remove(at);
                self.give_back(set.made)
            }
            _ => Vec::new(),
        }
    }

    /// Stores the exports with `mapping` and `division`, which a NIC registered, for later
    /// registrations.
    pub(super) fn store(&mut self, mapping: DmaBufMapping, division: Division) {
        let (Some(earlier), Some(at)) = (self.earlier, self.at(mapping, division)) else { return };
        let store = |made: Made| match made.export {
            Held::Own(export) => {
                let export = match earlier.store(self.iface, &made.of, made.exported, export) {
                    Ok(shared) => Held::Shared(shared),
                    Err(export) => Held::Own(export),
                };
                Made { export, ..made }
            }
            Held::Shared(_) => made,
        };
        let made = std::mem::take(&mut self.sets[at].made);
        self.sets[at].made = made.into_iter().map(store).collect();
    }

    /// Releases all exports. Returns the errors of the releases as attempts.
    pub(super) fn close(&mut self) -> Vec<Attempt> {
        let sets = std::mem::take(&mut self.sets);
        sets.into_iter().flat_map(|set| self.give_back(set.made)).collect()
    }

    /// Exports every range. The caller must query the segments first.
    fn export(
        &self,
        mapping: DmaBufMapping,
        division: Division,
        nic: &Nic,
    ) -> Result<Set, PathRefusal> {
        let mut made = Vec::with_capacity(self.ranges.len());
        let mut refused = Vec::new();
        let note = unit_note(division.unit());
        let ask = |step, range: AddressRange, exported: AddressRange, of: &Allocation| {
            let made = |export| Made { range, exported, of: *of, export };
            let earlier = self.earlier.and_then(|all| all.find(self.iface, of, exported, mapping));
            if let Some(shared) = earlier {
                return Ok(made(Held::Shared(shared)));
            }
            let lacking = || self.iface.unavailable(Facet::DmaBuf).context("range", range);
            let exporter = self.iface.dma_buf().ok_or_else(lacking);
            let export = exporter.and_then(|it| it.export(exported, of, nic, mapping));
            export.map(|export| made(Held::Own(export))).map_err(|error| {
                let call = format!("export_dma_buf({exported}, {mapping:?}{note})");
                PathRefusal::new(step, call, error)
            })
        };
        let memory = self.ranges.iter().zip(self.allocations);
        for ((range, of), segments) in memory.zip(self.segments.iter().flatten()) {
            let several = segments.len() > 1 && segments.iter().all(|segment| segment.exportable);
            let asked_whole = several && division == Division::Ranges;
            if asked_whole {
                match ask(Step::ExportWhole, *range, *range, of) {
                    Ok(export) => {
                        made.push(export);
                        continue;
                    }
                    Err(refusal) => refused.push(refusal),
                }
            }
            let whole_range = [Segment { range: *range, exportable: true }];
            let parts =
                if division == Division::Allocations { &whole_range } else { &segments[..] };
            for part in parts {
                let exported = match division {
                    Division::Ranges | Division::Parts => part.range,
                    Division::Segments => self.segment(part).range,
                    Division::Allocations => of.range,
                };
                let export = if part.exportable {
                    ask(Step::Export, part.range, exported, of)
                } else {
                    Err(self.not_exportable(part))
                };
                match export {
                    Ok(export) => made.push(export),
                    Err(refusal) => {
                        if let Some(of_whole) = refused.last_mut().filter(|_| asked_whole)
                            && of_whole.is_like(&refusal)
                        {
                            // A single segment is refused in the same way, so the number of
                            // segments is not the cause.
                            of_whole.step = refusal.step;
                        }
                        let also = self.give_back(made);
                        return Err(PathRefusal { before: refused, also, ..refusal });
                    }
                }
            }
        }
        Ok(Set { mapping, division, made, refused })
    }

    /// Returns the refusal for a segment that the iface marked as not exportable. No driver is
    /// called.
    fn not_exportable(&self, segment: &Segment) -> PathRefusal {
        let attribute = self.iface.segments().map_or("not exportable", SegmentMap::not_exportable);
        let error = Error::new(ErrorKind::Unsupported, "segments")
            .iface(self.iface)
            .context("segment", segment.range)
            .context("attribute", attribute)
            .remedy("allocate it as RDMA capable: this physical segment cannot be exported");
        let call = format!("segments({})", segment.range);
        PathRefusal { only_this_buffer: true, ..PathRefusal::new(Step::Segments, call, error) }
    }

    /// Queries the physical segments of the ranges, unless an earlier call has stored them.
    fn query_segments(&mut self) -> Result<(), PathRefusal> {
        if self.segments.is_some() {
            return Ok(());
        }
        let mut all = Vec::with_capacity(self.ranges.len());
        for (range, of) in self.ranges.iter().zip(self.allocations) {
            let refuse =
                |error| PathRefusal::new(Step::Segments, format!("segments({range})"), error);
            let segments = self.iface.segments_of(*range, of).map_err(refuse)?;
            if !cover(&segments, *range) {
                let error = Error::new(ErrorKind::OutOfBounds, "segments")
                    .iface(self.iface)
                    .context("range", range)
                    .context("segments", segments.len())
                    .remedy(
                        "report this driver: its segments do not cover the range, so nothing is \
                         registered",
                    );
                return Err(PathRefusal { only_this_buffer: true, ..refuse(error) });
            }
            all.push(segments);
        }
        self.segments = Some(all);
        Ok(())
    }

    fn give_back(&self, made: Vec<Made>) -> Vec<Attempt> {
        let mut refused = Vec::new();
        for Made { exported: range, export, .. } in made {
            let Held::Own(export) = export else { continue };
            if let Err(error) = self.iface.release_dma_buf(export) {
                let error = named(self.iface, error);
                tracing::warn!(%range, error = %error.full(), "cannot release a dma-buf export");
                let call = format!("release_dma_buf({range})");
                refused.push(Attempt::refused(Path::DmaBuf, call, error));
            }
        }
        refused
    }
}

/// Adds the name under which `iface` is registered to an error of this iface. Other errors stay as
/// they are.
pub(super) fn named(iface: &Arc<dyn Iface>, error: Error) -> Error {
    if error.iface_kind() == Some(iface.kind()) { error.iface(iface) } else { error }
}

fn piece(made: &Made, mapping: DmaBufMapping) -> Piece<'_> {
    let Made { range, exported, .. } = made;
    let export = made.export.export();
    // If the sum overflows, the offset lies beyond the dma-buf and the NIC refuses it.
    let offset = export.offset.0.saturating_add(range.start().0 - exported.start().0);
    let offset = DmaBufOffset(offset);
    let (fd, revocation) = (export.as_fd(), export.revocation.as_ref());
    Piece { range: *range, backing: Backing::DmaBuf { fd, offset, mapping, revocation } }
}

impl Drop for ExportSet<'_> {
    fn drop(&mut self) {
        // Failed releases are logged where they happen. A caller that records them in a trace calls
        // `close` itself.
        drop(self.close());
    }
}

/// Returns true if the segments have bytes, are adjacent and cover the whole range.
fn cover(segments: &[Segment], range: AddressRange) -> bool {
    let end = segments.iter().try_fold(range.start(), |at, segment| {
        let follows = segment.range.start() == at && !segment.range.is_empty();
        follows.then(|| segment.range.end()).flatten()
    });
    end == range.end()
}

#[cfg(test)]
mod tests {
    use hmem_core::Address;

    use super::*;

    #[test]
    fn segments_that_leave_out_part_of_a_range_are_detected() {
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
            vec![segment(100, 0), segment(100, 60)],
        ] {
            assert!(!cover(&short, whole), "{short:?}");
        }
    }
}
