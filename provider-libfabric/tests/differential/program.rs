//! Random programs: sequences of registration calls and transfers.

use proptest::{collection::vec, prelude::*, sample::select};

use super::memory::{HOLE, LEN};

/// Number of regions that a program can have at the same time.
pub(crate) const SLOTS: usize = 4;

/// Key that no step requests: the region of the local buffers has it.
pub(crate) const SCRATCH_KEY: u64 = 999;

/// One step of a program. A step that names a slot without a region does nothing, and a
/// registration does nothing if the slot has a region.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Register {
        slot: usize,
        request: Request,
    },
    Close {
        slot: usize,
    },
    Enable {
        slot: usize,
    },
    Refresh {
        slot: usize,
    },
    RawKey {
        slot: usize,
    },
    BindCounter {
        slot: usize,
    },
    Transfer {
        slot: usize,
        transfer: Transfer,
    },
    /// Closes the endpoints. The next transfer opens new ones.
    CloseEndpoints,
    /// Tries to close the domain while it has regions.
    CloseDomain,
}

/// Arguments of a registration.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The ranges, as offset and length in the memory of a side.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) access: u64,
    pub(crate) key: u64,
    pub(crate) flags: u64,
    pub(crate) detail: Detail,
}

/// A rarely used attribute of a registration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Detail {
    None,
    AuthKey,
    Offset,
    PageSize(usize),
    HmemData,
    Iface(i32),
    /// The base of a sub-region, by its slot. The region then has one range.
    Base(usize),
}

/// A transfer between the local buffer, or a region of the initiator, and a region of the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) write: bool,
    /// Index of the range in the target's region.
    pub(crate) range: usize,
    /// Offset in the range; it may be outside.
    pub(crate) offset: i64,
    pub(crate) len: u64,
    /// True to use a key that no region has.
    pub(crate) wrong_key: bool,
    /// The region whose first range is the local memory. `None` means the local buffer, which has
    /// every right.
    pub(crate) local: Option<usize>,
}

/// Access bits of fi_mr(3).
pub(crate) const ACCESS: [u64; 7] = [1 << 6, 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13];

/// Registration flags of fi_mr(3).
pub(crate) const FLAGS: [u64; 6] = [1 << 40, 1 << 41, 1 << 45, 1 << 46, 1 << 49, 1 << 56];

fn range() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        30 => (0..LEN - 20_000, 1..20_000_u64),
        // The end of the memory, and the whole of it.
        1 => Just((LEN - 4096, 4096)),
        1 => Just((0, LEN)),
        1 => (0..LEN).prop_map(|at| (at, 0)),
        1 => Just((HOLE, 4096)),
    ]
}

fn access() -> impl Strategy<Value = u64> {
    let subset = vec(any::<bool>(), ACCESS.len()).prop_map(|chosen| {
        ACCESS.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(bit, _)| *bit).sum()
    });
    let every: u64 = ACCESS.iter().sum();
    prop_oneof![6 => subset, 8 => Just(every), 1 => Just(every | 1 << 20)]
}

fn key() -> impl Strategy<Value = u64> {
    let wide = [0, 1 << 31, u64::from(u32::MAX), 1 << 32, 1 << 40, u64::MAX - 1, u64::MAX];
    prop_oneof![8 => 1..8_u64, 2 => select(wide.to_vec())]
}

fn flags() -> impl Strategy<Value = u64> {
    prop_oneof![
        40 => Just(0),
        6 => select(FLAGS.as_slice()),
        1 => vec(select(FLAGS.as_slice()), 2).prop_map(|two| two[0] | two[1]),
        1 => (0..64_u32).prop_map(|bit| 1 << bit),
    ]
}

fn detail() -> impl Strategy<Value = Detail> {
    prop_oneof![
        60 => Just(Detail::None),
        1 => Just(Detail::AuthKey),
        1 => Just(Detail::Offset),
        1 => select([4096, 12345, 1 << 21].as_slice()).prop_map(Detail::PageSize),
        1 => Just(Detail::HmemData),
        1 => select([0, 1, 3].as_slice()).prop_map(Detail::Iface),
        4 => (0..SLOTS).prop_map(Detail::Base),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let ranges =
        prop_oneof![16 => vec(range(), 1), 2 => vec(range(), 2..4), 1 => vec(range(), 0..12)];
    (ranges, access(), key(), flags(), detail()).prop_map(
        |(mut ranges, access, key, flags, mut detail)| {
            // A sub-region has one range.
            if let Detail::Base(_) = detail {
                ranges.truncate(1);
                if ranges.is_empty() {
                    detail = Detail::None;
                }
            }
            Request { ranges, access, key, flags, detail }
        },
    )
}

fn transfer() -> impl Strategy<Value = Transfer> {
    let offset = prop_oneof![10 => 0..3000_i64, 1 => -2..0_i64, 1 => 3000..40_000_i64];
    let len = prop_oneof![10 => 1..3000_u64, 1 => Just(0), 1 => 3000..20_000_u64];
    let local = prop_oneof![4 => Just(None), 1 => (0..SLOTS).prop_map(Some)];
    let wrong_key = prop_oneof![9 => Just(false), 1 => Just(true)];
    let range = prop_oneof![6 => Just(0_usize), 1 => 1..3_usize];
    (any::<bool>(), range, offset, len, wrong_key, local).prop_map(
        |(write, range, offset, len, wrong_key, local)| Transfer {
            write,
            range,
            offset,
            len,
            wrong_key,
            local,
        },
    )
}

/// Programs of up to 60 steps.
pub(crate) fn programs() -> impl Strategy<Value = Vec<Step>> {
    let slot = 0..SLOTS;
    let step = prop_oneof![
        12 => (slot.clone(), request())
            .prop_map(|(slot, request)| Step::Register { slot, request }),
        6 => slot.clone().prop_map(|slot| Step::Close { slot }),
        16 => (slot.clone(), transfer())
            .prop_map(|(slot, transfer)| Step::Transfer { slot, transfer }),
        1 => slot.clone().prop_map(|slot| Step::Enable { slot }),
        1 => slot.clone().prop_map(|slot| Step::Refresh { slot }),
        1 => slot.clone().prop_map(|slot| Step::RawKey { slot }),
        1 => slot.prop_map(|slot| Step::BindCounter { slot }),
        1 => Just(Step::CloseEndpoints),
        1 => Just(Step::CloseDomain),
    ];
    vec(step, 1..60)
}
