//! Which way a NIC gets at memory: plain host, dma-buf, peer memory, or staged copies.
//!
//! Ways are tried, not guessed: each attempt registers, and a refusal is recorded with its error and remedy before the
//! next way is tried. The decision is made anew for every registration, so that one failure demotes nobody else.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use hmem_core::{
    AddressRange, AllocationKind, Decision, DmaBufOffset, Error, ErrorKind, Iface, IfaceKind, Path, Registry,
    Result, Segment,
    iface::{DmaBufExport, DmaBufMapping},
    path::{Attempt, P2pPolicy, PathDecider, PathOutcome, PathRequest},
    provider::{Backing, Nic, Piece, ProviderDomain, ProviderRegion},
};

use crate::staging::StagedRange;

/// The path decision of this library.
#[derive(Clone, Copy, Debug, Default)]
pub struct Paths {
    disable_p2p: bool,
}

impl Paths {
    /// Decides by the policy of each domain.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps device memory from every NIC, whatever the domains' policies (`FI_HMEM_DISABLE_P2P=1`).
    #[must_use]
    pub fn disable_p2p(mut self, disable: bool) -> Self {
        self.disable_p2p = disable;
        self
    }

    fn policy(self, asked: P2pPolicy) -> P2pPolicy {
        if self.disable_p2p { P2pPolicy::Disabled } else { asked }
    }
}

impl PathDecider for Paths {
    fn plain_host(&self, nic: &Nic) -> Decision {
        Decision {
            path: Path::PlainHost,
            reason: "host memory needs no export".into(),
            iface: IfaceKind::SYSTEM,
            device: None,
            nic: nic.to_string(),
            mapping: DmaBufMapping::Default,
            attempts: vec![Attempt::success(Path::PlainHost, "register(host pages)")],
        }
    }

    unsafe fn register(
        &self,
        request: &PathRequest<'_>,
        registry: &Registry,
        provider: &dyn ProviderDomain,
    ) -> Result<PathOutcome> {
        if request.dma_buf.is_none() && request.owner.iface == IfaceKind::SYSTEM {
            // SAFETY: passed on to the caller.
            let region = unsafe { register_host(request, provider) }?;
            return Ok(PathOutcome { region, decision: None });
        }
        let policy = self.policy(request.policy);
        let trial = Trial { request, provider, policy, attempts: Vec::new() };
        // SAFETY: passed on to the caller.
        unsafe { trial.run(registry) }
    }
}

/// # Safety
/// As [`ProviderDomain::register`], for the ranges of the request.
unsafe fn register_host(request: &PathRequest<'_>, provider: &dyn ProviderDomain) -> Result<ProviderRegion> {
    let piece =
        |range: &AddressRange| Piece { range: *range, backing: Backing::Host { owned: request.owned } };
    let pieces: Vec<_> = request.ranges.iter().map(piece).collect();
    // SAFETY: passed on to the caller.
    unsafe { provider.register(&request.registration, &pieces) }
}

/// Exports of one attempt, given back in the iface's own way when it ends.
struct Exports<'a> {
    iface: &'a dyn Iface,
    made: Vec<(AddressRange, DmaBufExport)>,
}

impl Exports<'_> {
    fn pieces(&self) -> Vec<Piece<'_>> {
        self.made
            .iter()
            .map(|(range, export)| Piece {
                range: *range,
                backing: Backing::DmaBuf { fd: export.as_fd(), offset: export.offset },
            })
            .collect()
    }
}

impl Drop for Exports<'_> {
    fn drop(&mut self) {
        for (range, export) in self.made.drain(..) {
            if let Err(error) = self.iface.release_dma_buf(export) {
                tracing::warn!(%range, %error, "a dma-buf export could not be given back");
            }
        }
    }
}

/// One decision under way.
struct Trial<'a> {
    request: &'a PathRequest<'a>,
    provider: &'a dyn ProviderDomain,
    policy: P2pPolicy,
    attempts: Vec<Attempt>,
}

impl Trial<'_> {
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    unsafe fn run(mut self, registry: &Registry) -> Result<PathOutcome> {
        if let Some((fd, offset)) = self.request.dma_buf {
            return self.given_dma_buf(fd, offset);
        }
        let iface = registry.get(self.request.owner.iface)?;
        let kind = self.request.owner.allocation.map_or(AllocationKind::Device, |allocation| allocation.kind);
        if kind.cpu_accessible() {
            return self.through_host_pages(kind);
        }
        if self.policy == P2pPolicy::Disabled && self.request.policy == P2pPolicy::Required {
            return Err(
                self.exhausted("direct access is required by the domain and switched off for the process")
            );
        }
        if self.policy == P2pPolicy::Disabled {
            return self.staged(iface, "direct access to device memory is disabled");
        }
        let imports = self.provider.attr().imports;
        if imports.dma_buf {
            for &mapping in mappings(imports.pcie_mapping_first, iface.capability().pcie_mapping) {
                match self.dma_buf(iface, mapping) {
                    Ok(region) => {
                        return Ok(self.done(
                            region,
                            Path::DmaBuf,
                            "the device exports it and the NIC imports it",
                            mapping,
                        ));
                    }
                    Err((call, error)) => self.refused(Path::DmaBuf, call, error),
                }
            }
        } else {
            self.refused(Path::DmaBuf, "import".into(), self.lacks("dma-buf"));
        }
        if imports.peer_memory {
            match self.peer_memory(&**iface) {
                Ok(region) => {
                    let why = "a peer-memory client resolves the device address";
                    return Ok(self.done(region, Path::PeerMemory, why, DmaBufMapping::Default));
                }
                Err((call, error)) => self.refused(Path::PeerMemory, call, error),
            }
        }
        if self.policy == P2pPolicy::Required {
            return Err(self.exhausted("direct access is required and every way was refused"));
        }
        if self.policy == P2pPolicy::Preferred {
            tracing::warn!(range = %self.request.ranges[0], "no direct path to device memory: staging copies");
        }
        self.staged(iface, "no direct way worked")
    }

    /// Memory that the application brought as a dma-buf: there is no other way to it.
    fn given_dma_buf(mut self, fd: BorrowedFd<'_>, offset: DmaBufOffset) -> Result<PathOutcome> {
        if self.policy == P2pPolicy::Disabled && self.request.owner.iface != IfaceKind::SYSTEM {
            return Err(
                self.exhausted("direct access is disabled, and a dma-buf can be reached in no other way")
            );
        }
        let piece = Piece { range: self.request.ranges[0], backing: Backing::DmaBuf { fd, offset } };
        // SAFETY: `run` passes the requirement on to the caller.
        match unsafe { self.provider.register(&self.request.registration, &[piece]) } {
            Ok(region) => Ok(self.done(
                region,
                Path::DmaBuf,
                "the application brought the dma-buf",
                DmaBufMapping::Default,
            )),
            Err(error) => {
                self.refused(Path::DmaBuf, format!("register(dma-buf offset {offset})"), error);
                Err(self.exhausted("the dma-buf was refused"))
            }
        }
    }

    fn through_host_pages(mut self, kind: AllocationKind) -> Result<PathOutcome> {
        // SAFETY: `run` passes the requirement on to the caller.
        match unsafe { register_host(self.request, self.provider) } {
            Ok(region) => {
                let why = match kind {
                    AllocationKind::Managed => {
                        "managed memory migrates: its host pages are registered, not device memory"
                    }
                    _ => "the device API's host memory consists of host pages",
                };
                Ok(self.done(region, Path::PlainHost, why, DmaBufMapping::Default))
            }
            Err(error) => {
                self.refused(Path::PlainHost, "register(host pages)".into(), error);
                Err(self.exhausted("its host pages were refused"))
            }
        }
    }

    fn dma_buf(
        &self,
        iface: &Arc<dyn Iface>,
        mapping: DmaBufMapping,
    ) -> Result<ProviderRegion, (String, Error)> {
        let nic = &self.provider.attr().nic;
        let mut exports = Exports { iface: &**iface, made: Vec::new() };
        for range in self.request.ranges {
            let segments = iface.segments(*range).map_err(|error| (format!("segments({range})"), error))?;
            if !cover(&segments, *range) {
                let error = Error::new(ErrorKind::OutOfBounds, "segments")
                    .iface(iface.kind())
                    .context("range", range)
                    .context("segments", segments.len())
                    .remedy("the iface names segments that are not the whole range: nothing is registered in part");
                return Err((format!("segments({range})"), error));
            }
            for segment in segments {
                let call = || format!("export_dma_buf({}, {mapping:?})", segment.range);
                if !segment.exportable {
                    let error = Error::new(ErrorKind::Unsupported, "export dma-buf")
                        .iface(iface.kind())
                        .context("segment", segment.range)
                        .remedy("this physical segment cannot be exported: allocate it as RDMA capable");
                    return Err((call(), error));
                }
                let export =
                    iface.export_dma_buf(segment.range, nic, mapping).map_err(|error| (call(), error))?;
                exports.made.push((segment.range, export));
            }
        }
        // SAFETY: `run` passes the requirement on to the caller.
        unsafe { self.provider.register(&self.request.registration, &exports.pieces()) }
            .map_err(|error| (format!("register(dma-buf, {mapping:?} mapping)"), error))
    }

    fn peer_memory(&self, iface: &dyn Iface) -> Result<ProviderRegion, (String, Error)> {
        let nic = &self.provider.attr().nic;
        let mut pieces = Vec::with_capacity(self.request.ranges.len());
        for range in self.request.ranges {
            let export = iface
                .export_peer_memory(*range, nic)
                .map_err(|error| (format!("export_peer_memory({range})"), error))?;
            pieces.push(Piece { range: *range, backing: Backing::PeerMemory { address: export.address } });
        }
        // SAFETY: `run` passes the requirement on to the caller.
        unsafe { self.provider.register(&self.request.registration, &pieces) }
            .map_err(|error| ("register(peer memory)".to_owned(), error))
    }

    fn staged(mut self, iface: &Arc<dyn Iface>, why: &'static str) -> Result<PathOutcome> {
        if !self.provider.attr().imports.staged {
            self.refused(Path::Staged, "register(staged)".into(), self.lacks("staged copies"));
            return Err(self.exhausted(why));
        }
        let piece = |range: &AddressRange| Piece {
            range: *range,
            backing: Backing::Staged(Arc::new(StagedRange::new(Arc::clone(iface), *range))),
        };
        let pieces: Vec<_> = self.request.ranges.iter().map(piece).collect();
        // SAFETY: `run` passes the requirement on to the caller.
        match unsafe { self.provider.register(&self.request.registration, &pieces) } {
            Ok(region) => Ok(self.done(region, Path::Staged, why, DmaBufMapping::Default)),
            Err(error) => {
                self.refused(Path::Staged, "register(staged)".into(), error);
                Err(self.exhausted(why))
            }
        }
    }

    fn lacks(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, "import")
            .provider(self.provider.attr().nic.to_string())
            .context("what", what)
            .remedy("use a NIC and driver that have it")
    }

    fn refused(&mut self, path: Path, call: String, error: Error) {
        tracing::debug!(%path, call, %error, "path refused");
        self.attempts.push(Attempt::refused(path, call, error));
    }

    fn done(
        mut self,
        region: ProviderRegion,
        path: Path,
        reason: &'static str,
        mapping: DmaBufMapping,
    ) -> PathOutcome {
        self.attempts.push(Attempt::success(path, format!("register({path})")));
        let decision = Decision {
            path,
            reason: reason.into(),
            iface: self.request.owner.iface,
            device: self.request.owner.device,
            nic: self.provider.attr().nic.to_string(),
            mapping,
            attempts: self.attempts,
        };
        tracing::debug!(%decision, "path decided");
        PathOutcome { region, decision: Some(Arc::new(decision)) }
    }

    /// Every way was refused: the last refusal, with the whole trace.
    fn exhausted(self, why: &'static str) -> Error {
        let trace = self.attempts.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let last = self.attempts.into_iter().rev().find_map(|attempt| attempt.error);
        let kind = last.as_ref().map_or(ErrorKind::Unsupported, Error::kind);
        let remedy = last.as_ref().and_then(Error::remedy_text).map(str::to_owned);
        let mut error = Error::new(kind, "path")
            .iface(self.request.owner.iface)
            .provider(self.provider.attr().nic.to_string())
            .context("range", self.request.ranges[0])
            .context("why", why);
        if let Some(device) = self.request.owner.device {
            error = error.device(device);
        }
        if !trace.is_empty() {
            error = error.context("trace", trace);
        }
        match (last, remedy) {
            (Some(last), Some(remedy)) => error.caused_by(last).remedy(remedy),
            (Some(last), None) => error.caused_by(last),
            (None, _) => {
                error.remedy("allow direct access, or bring the memory by address instead of by dma-buf")
            }
        }
    }
}

/// Whether segments follow one another over the whole of a range.
fn cover(segments: &[Segment], range: AddressRange) -> bool {
    let end = segments.iter().try_fold(range.start(), |at, segment| {
        (segment.range.start() == at).then(|| segment.range.end()).flatten()
    });
    end == range.end()
}

/// Mappings in the order to try them (HM-09).
fn mappings(pcie_first: bool, has_pcie: bool) -> &'static [DmaBufMapping] {
    if pcie_first && has_pcie {
        &[DmaBufMapping::Pcie, DmaBufMapping::Default]
    } else {
        &[DmaBufMapping::Default]
    }
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
