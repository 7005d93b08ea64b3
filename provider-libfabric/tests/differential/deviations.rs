//! The intended differences between hmem and libfabric. `docs/fi_mr-deviations.md` lists them.

use hmem_core::{MrFlags, MrMode, os_page_sizes};
use hmem_provider_libfabric::sys;

use super::{
    Case,
    compare::{OTHER_KEY, Open, REFUSED, Way},
    memory::{HOLE, LEN},
    program::{ACCESS, Detail, Request, SLOTS, Step, Transfer},
};

/// A step with everything that its result depends on.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) step: &'a Step,
    pub(crate) open: &'a Open,
    /// The last request in each slot that succeeded.
    pub(crate) last: &'a [Option<Request>; SLOTS],
    pub(crate) case: Case,
}

impl Place<'_> {
    /// Returns true if the step does nothing.
    pub(crate) fn is_idle(&self) -> bool {
        match self.step {
            Step::Register { slot, .. } => self.open[*slot].is_some(),
            Step::Close { slot }
            | Step::Enable { slot }
            | Step::Refresh { slot }
            | Step::RawKey { slot }
            | Step::BindCounter { slot } => self.open[*slot].is_none(),
            Step::Transfer { slot, transfer } => !self.is_safe(*slot, *transfer),
            Step::CloseEndpoints => false,
            Step::CloseDomain => self.open.iter().all(Option::is_none),
        }
    }

    /// Returns true for a transfer with these properties:
    ///
    /// - It accesses only mapped memory, even if nothing checks its bounds.
    /// - Its source and its destination do not overlap.
    /// - If its region is closed, no other region has the key.
    fn is_safe(&self, slot: usize, transfer: Transfer) -> bool {
        let Some(target) = &self.last[slot] else { return false };
        let Some((start, _)) = target.ranges.get(transfer.range) else { return false };
        let Some(start) = start.checked_add_signed(transfer.offset) else { return false };
        let end = start + transfer.len;
        let local = transfer.local.map(|local| self.open[local].as_ref().map(|open| open.first()));
        let apart = match local {
            None => true,
            Some(None) => false,
            Some(Some((local, _))) => {
                let local_end = local + transfer.len;
                local_end <= LEN && (local_end <= start || end <= local)
            }
        };
        let mut open = self.open.iter().flatten();
        let reused = self.open[slot].is_none() && open.any(|open| open.request.key == target.key);
        end <= LEN && apart && !reused
    }

    /// Returns true if a transfer through the C API is one that the target's region permits.
    pub(crate) fn peers_may(&self, slot: usize, transfer: Transfer) -> bool {
        let Some(Access { target, first, .. }) = self.access(slot, transfer) else { return false };
        let granted = match transfer.write {
            true => target.access & sys::FI_REMOTE_WRITE != 0,
            false => target.access & sys::FI_REMOTE_READ != 0 || self.send_reads(target),
        };
        let bytes = transfer.len > 0;
        self.open[slot].is_some() && granted && first && bytes && !transfer.wrong_key
    }

    /// Returns true if peers may read a region only because it has the right SEND.
    fn send_reads(&self, target: &Request) -> bool {
        let rights = target.access & (sys::FI_SEND | sys::FI_REMOTE_READ);
        self.case.rxm && rights == sys::FI_SEND
    }

    /// Returns what a transfer accesses. `None` if the slot never had a region with this range.
    fn access(&self, slot: usize, transfer: Transfer) -> Option<Access<'_>> {
        let target = self.last[slot].as_ref()?;
        let own = target.ranges.get(transfer.range)?;
        let start = own.0.checked_add_signed(transfer.offset)?;
        let inside =
            |range: &(u64, u64)| range.0 <= start && start + transfer.len <= range.0 + range.1;
        Some(Access { target, own: inside(own), first: inside(&target.ranges[0]) })
    }

    fn mode(&self, bits: MrMode) -> bool {
        self.case.mode.mode.contains(bits)
    }
}

/// The target of a transfer.
struct Access<'a> {
    target: &'a Request,
    /// True if the transfer is inside the range that it names.
    own: bool,
    /// True if the transfer is inside the region's first range.
    first: bool,
}

macro_rules! deviations {
    ($($(#[doc = $doc:literal])* $name:ident = $heading:literal,)+) => {
        /// An intended difference.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Deviation { $($(#[doc = $doc])* $name,)+ }

        impl Deviation {
            pub(crate) const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns the heading of the entry in `docs/fi_mr-deviations.md`.
            pub(crate) const fn heading(self) -> &'static str {
                match self { $(Self::$name => $heading,)+ }
            }
        }
    };
}

deviations! {
    EmptyRange = "libfabric registers ranges without bytes",
    ReservedAttribute = "libfabric ignores reserved attributes and unknown bits",
    UnknownAccess = "libfabric ignores reserved attributes and unknown bits",
    UnsupportedFlag = "libfabric ignores flags that a provider does not support",
    DmaBuf = "libfabric ignores flags that a provider does not support",
    HmemClaim = "Device memory is detected (wider), and claims about it are checked (stricter)",
    PageSize = "`page_size` is checked (stricter)",
    KeyNotAvailable = "A key may be left to the provider (wider)",
    KeyOfSeveralRanges = "A region may have several keys (extension)",
    AuthorizationKey = "libfabric ignores authorization keys",
    SubRegion = "libfabric ignores `base_mr`",
    /// ALLOCATED mode.
    AbsentPages = "libfabric accepts absent pages in ALLOCATED mode",
    IfaceWithoutHmem = "libfabric checks the iface without FI_HMEM",
    LocalRegionHasKey = "A region without rights for peers has a key",
    EnabledRegion = "Enabling, refreshing and raw keys where libfabric has no such call",
    Refresh = "Enabling, refreshing and raw keys where libfabric has no such call",
    RawKey = "Enabling, refreshing and raw keys where libfabric has no such call",
    Counter = "A borrowed domain binds no counters (different)",
    LocalRights = "Rights are enforced one by one (stricter)",
    SendReads = "SEND lets peers read over ofi_rxm (wider)",
    LocalBounds = "libfabric does not check the local buffer",
    SingleUse = "libfabric ignores flags that a provider does not support",
    /// shm
    UncheckedAccess = "libfabric's shm does not check keys",
    EmptyTransfer = "A transfer of no bytes needs a valid key with the right (stricter)",
    SeveralRanges = "libfabric's providers reach the first range only",
}

const EACCES: i32 = 13;
const EFAULT: i32 = 14;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;
const EKEYREJECTED: i32 = 129;
const ENOKEY: i32 = sys::FI_ENOKEY;
const EBADFLAGS: i32 = sys::FI_EBADFLAGS;
const EOPBADSTATE: i32 = sys::FI_EOPBADSTATE;

/// Returns the reasons for which `way` refuses a registration that libfabric accepts, with the
/// error numbers.
pub(crate) fn refusals(place: Place<'_>, request: &Request, way: Way) -> Vec<(Deviation, i32)> {
    use Deviation as D;

    let Request { ranges, access, key, flags, detail } = request;
    let (flags, borrowed) = (MrFlags::from_bits_retain(*flags), way == Way::Borrowed);
    let hmem_flags = MrFlags::HMEM_DEVICE_ONLY | MrFlags::HMEM_HOST_ALLOC;
    let mut supported = MrFlags::all();
    if borrowed {
        let caps = place.case.caps;
        supported = MrFlags::empty();
        supported.set(hmem_flags, caps & sys::FI_HMEM != 0);
        supported.set(MrFlags::RMA_PMEM, caps & sys::FI_RMA_PMEM != 0);
        supported.set(MrFlags::RMA_EVENT, caps & sys::FI_RMA_EVENT != 0);
    }
    let page_sizes = if borrowed { &os_page_sizes()[..1] } else { os_page_sizes() };
    let base = match detail {
        Detail::Base(base) => place.open[*base].as_ref().map(|open| &open.request),
        _ => None,
    };
    let outside = |base: &Request| {
        let holds = |(start, len): &(u64, u64)| {
            let (first, own) = (ranges[0].0, ranges[0].1);
            *start <= first && first + own <= start + len
        };
        !base.ranges.iter().any(holds)
    };
    let writes = |access: u64| hmem_core::Access::from_bits_truncate(access).nic_writes();
    let dma_buf = flags.contains(MrFlags::MR_DMABUF);
    let own_key = !place.mode(MrMode::PROV_KEY);
    let in_hole = ranges.iter().any(|(start, _)| *start >= HOLE);
    let found = [
        (ranges.iter().any(|(_, len)| *len == 0), D::EmptyRange, EINVAL),
        (matches!(detail, Detail::Offset | Detail::HmemData), D::ReservedAttribute, EINVAL),
        (access & !ACCESS.iter().sum::<u64>() != 0, D::UnknownAccess, EINVAL),
        (!supported.contains(flags), D::UnsupportedFlag, EBADFLAGS),
        (flags.contains(hmem_flags), D::HmemClaim, EBADFLAGS),
        (flags.intersects(hmem_flags), D::HmemClaim, EINVAL),
        (
            matches!(detail, Detail::PageSize(bytes) if !page_sizes.contains(bytes)),
            D::PageSize,
            EINVAL,
        ),
        (own_key && *key == sys::FI_KEY_NOTAVAIL, D::KeyNotAvailable, EKEYREJECTED),
        (own_key && borrowed && ranges.len() > 1, D::KeyOfSeveralRanges, EOPNOTSUPP),
        (borrowed && *detail == Detail::AuthKey, D::AuthorizationKey, EOPNOTSUPP),
        (borrowed && base.is_some(), D::SubRegion, EOPNOTSUPP),
        (base.is_some_and(outside), D::SubRegion, EINVAL),
        (base.is_some_and(|base| writes(*access) && !writes(base.access)), D::SubRegion, EACCES),
        (dma_buf && (ranges.len() != 1 || base.is_some()), D::DmaBuf, EINVAL),
        (!borrowed && in_hole && !dma_buf && place.mode(MrMode::ALLOCATED), D::AbsentPages, EFAULT),
    ];
    found.into_iter().filter(|(applies, ..)| *applies).map(|(_, why, code)| (why, code)).collect()
}

fn is_local(access: u64) -> bool {
    access & (sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE) == 0
}

/// Returns the deviation that explains why `way` has the result `other` instead of `direct`.
pub(crate) fn explain(place: Place<'_>, way: Way, direct: i32, other: i32) -> Option<Deviation> {
    use Deviation as D;

    match place.step {
        Step::Register { request, .. } => {
            let listed = refusals(place, request, way).into_iter();
            if let Some((why, _)) = listed.into_iter().find(|(_, code)| *code == other) {
                return Some(why);
            }
            let mut open = place.open.iter().flatten().map(|open| &open.request);
            let key_taken = open.any(|open| {
                open.key == request.key && (is_local(open.access) || is_local(request.access))
            });
            let device = matches!(request.detail, Detail::Iface(number) if number != 0);
            match (direct, other) {
                (0, OTHER_KEY) if is_local(request.access) && way == Way::Software => {
                    Some(D::LocalRegionHasKey)
                }
                (0, ENOKEY) if key_taken && way == Way::Software => Some(D::LocalRegionHasKey),
                (ENOSYS, 0 | ENOKEY) if device && !place.case.mode.hmem => {
                    Some(D::IfaceWithoutHmem)
                }
                (ENOSYS, EINVAL) if device && place.case.mode.hmem => Some(D::HmemClaim),
                _ => None,
            }
        }
        Step::Enable { .. } => {
            ((direct, other) == (ENOSYS, EOPBADSTATE)).then_some(D::EnabledRegion)
        }
        // The software NIC fails if pages are absent.
        Step::Refresh { .. } => match (way, direct, other) {
            (Way::Software, ENOSYS, 0 | EFAULT) => Some(D::Refresh),
            _ => None,
        },
        Step::RawKey { .. } => match (way, direct, other) {
            (Way::Borrowed, ENOSYS, EOPNOTSUPP) | (Way::Software, ENOSYS, 0) => Some(D::RawKey),
            _ => None,
        },
        Step::BindCounter { .. } => match (way, direct, other) {
            (Way::Borrowed, 0, ENOSYS) | (Way::Software, ENOSYS, 0) => Some(D::Counter),
            _ => None,
        },
        Step::Transfer { slot, transfer } => {
            transfer_deviation(place, way, (*slot, *transfer), direct, other)
        }
        _ => None,
    }
}

/// Like [`explain`], for a transfer.
fn transfer_deviation(
    place: Place<'_>,
    way: Way,
    (slot, transfer): (usize, Transfer),
    direct: i32,
    other: i32,
) -> Option<Deviation> {
    use Deviation as D;

    let Access { target, own, first } = place.access(slot, transfer)?;
    let several = target.ranges.len() > 1;
    if place.case.wanted.provider == "shm" && !(own && place.peers_may(slot, transfer)) {
        let empty = transfer.len == 0;
        return Some(if empty { D::EmptyTransfer } else { D::UncheckedAccess });
    }
    match (way, direct, other) {
        (_, 0, REFUSED) | (_, REFUSED, 0) if transfer.len == 0 => Some(D::EmptyTransfer),
        (_, REFUSED, 0) if several && !first => Some(D::SeveralRanges),
        (Way::Borrowed, 0, REFUSED) if several && !own => Some(D::SeveralRanges),
        (Way::Software, 0, REFUSED) => {
            let local = transfer.local.and_then(|local| place.open[local].as_ref());
            let right = if transfer.write { sys::FI_WRITE } else { sys::FI_READ };
            match local {
                Some(local) if local.request.access & right == 0 => Some(D::LocalRights),
                Some(local) if transfer.len > local.first().1 => Some(D::LocalBounds),
                _ if target.flags & MrFlags::MR_SINGLE_USE.bits() != 0 => Some(D::SingleUse),
                _ if target.detail == Detail::AuthKey => Some(D::AuthorizationKey),
                _ => (!transfer.write && place.send_reads(target)).then_some(D::SendReads),
            }
        }
        _ => None,
    }
}
