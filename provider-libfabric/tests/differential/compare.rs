//! Execution of a program on the three sides, with a comparison after every step.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use hmem_core::MrMode;
use hmem_provider_libfabric::sys;

use super::{
    Case,
    application::{CallError, Fabric},
    deviations::{self, Deviation, Place},
    memory::Memory,
    program::{Request, SLOTS, Step},
    sides::{Direct, Done, Hmem, Side},
};

/// Limit for a transfer.
const LIMIT: Duration = Duration::from_secs(20);

/// Limit for a transfer that the target should refuse: some providers never complete it.
const LIMIT_OF_REFUSED: Duration = Duration::from_millis(20);

/// The three sides of a case.
pub(crate) struct Sides {
    case: Case,
    direct: Direct,
    borrowed: Hmem,
    software: Hmem,
    /// The last request in each slot that succeeded.
    last: [Option<Request>; SLOTS],
    /// The bytes of every memory at the start of a program.
    initial: Arc<[u8]>,
    /// The number of times that each deviation was met.
    pub(crate) met: BTreeMap<Deviation, u64>,
}

impl Sides {
    pub(crate) fn open(functions: &sys::Functions, case: Case) -> Result<Self, CallError> {
        let (api_version, mode) = (case.wanted.api_version, case.mode);
        let open = || Fabric::open(functions, case.wanted);
        Ok(Self {
            case,
            direct: Direct::open(open()?, case.wanted, mode.mode),
            borrowed: Hmem::borrow(&open()?, api_version, mode),
            software: Hmem::software(mode),
            last: [const { None }; SLOTS],
            initial: Memory::initial().into(),
            met: BTreeMap::new(),
        })
    }

    fn side(&self, way: Way) -> &dyn Side {
        match way {
            Way::Borrowed => &self.borrowed,
            Way::Software => &self.software,
        }
    }

    fn each(&mut self, mut call: impl FnMut(&mut dyn Side)) {
        let Self { direct, borrowed, software, .. } = self;
        for side in [direct as &mut dyn Side, borrowed, software] {
            call(side);
        }
    }

    /// Executes a program on every side, and compares after every step.
    pub(crate) fn run(&mut self, program: &[Step]) -> Result<(), String> {
        let initial = self.initial.clone();
        self.each(|side| side.memory().set(&initial));
        self.last = [const { None }; SLOTS];
        let mut open = [const { None }; SLOTS];
        let result = program.iter().enumerate().try_for_each(|(number, step)| {
            self.step(number, step, &mut open).map_err(|why| format!("step {number}: {why}"))
        });
        self.each(|side| (0..SLOTS).for_each(|slot| side.forget(slot)));
        let live = [self.borrowed.live(), self.software.live()];
        result.and_then(|()| match live {
            [1, 1] => Ok(()),
            live => Err(format!("regions are left besides the local buffer: {live:?}")),
        })
    }

    fn step(&mut self, number: usize, step: &Step, open: &mut Open) -> Result<(), String> {
        let before = open.clone();
        let (last, case) = (self.last.clone(), self.case);
        let place = Place { step, open: &before, last: &last, case };
        if place.is_idle() {
            return Ok(());
        }
        match step {
            Step::Register { slot, request } => {
                let results = self.results(|side| side.register(*slot, request));
                let keys = results.each_ref().map(|result| result.clone().unwrap_or_default());
                let mut same = self.compare(&place, &results.map(|result| result.map(drop)))?;
                same &= self.compare_keys(&place, request, &keys)?;
                if same && !keys[0].is_empty() {
                    self.last[*slot] = Some(request.clone());
                    open[*slot] = Some(Opened { request: request.clone(), keys });
                } else {
                    self.last[*slot] = None;
                    self.each(|side| side.forget(*slot));
                }
                Ok(())
            }
            Step::Close { slot } => {
                let results = self.results(|side| side.close(*slot));
                let same = self.compare(&place, &results)?;
                if !same || results[0].is_ok() {
                    self.each(|side| side.close_if_open(*slot));
                    open[*slot] = None;
                }
                Ok(())
            }
            Step::BindCounter { slot } => {
                let results = self.results(|side| side.bind_counter(*slot));
                self.compare(&place, &results)?;
                if results.iter().any(Result::is_ok) {
                    self.last[*slot] = None;
                    open[*slot] = None;
                    self.each(|side| side.forget(*slot));
                }
                Ok(())
            }
            Step::Transfer { slot, transfer } => {
                let initial = self.initial.clone();
                self.each(|side| side.memory().fill_scratch(&initial, number));
                let limit =
                    if place.peers_may(*slot, *transfer) { LIMIT } else { LIMIT_OF_REFUSED };
                let results = self.results(|side| side.transfer(*slot, *transfer, limit));
                let same = self.compare(&place, &results)?;
                let bytes = self.direct.memory().bytes();
                for way in [Way::Borrowed, Way::Software] {
                    let found = self.side(way).memory().bytes();
                    if same
                        && found != bytes
                        && let Some(at) = (0..found.len()).find(|at| found[*at] != bytes[*at])
                    {
                        let details = || format!("byte {at} differs: {results:?}");
                        self.explain(&place, way, 0, OTHER_BYTES, details)?;
                    }
                    self.side(way).memory().set(&bytes);
                }
                Ok(())
            }
            Step::CloseEndpoints => {
                self.each(|side| side.close_endpoints());
                Ok(())
            }
            Step::Enable { slot } => {
                let results = self.results(|side| side.enable(*slot));
                self.compare(&place, &results).map(drop)
            }
            Step::Refresh { slot } => {
                let results = self.results(|side| side.refresh(*slot));
                self.compare(&place, &results).map(drop)
            }
            Step::RawKey { slot } => {
                let results = self.results(|side| side.raw_key(*slot).map(drop));
                self.compare(&place, &results).map(drop)
            }
            Step::CloseDomain => {
                let results = self.results(|side| side.close_domain());
                self.compare(&place, &results).map(drop)
            }
        }
    }

    fn results<T>(&mut self, mut call: impl FnMut(&mut dyn Side) -> Done<T>) -> [Done<T>; 3] {
        [call(&mut self.direct), call(&mut self.borrowed), call(&mut self.software)]
    }

    /// Compares the results of a step. Returns true if they are equal, and false if a deviation
    /// explains the difference.
    fn compare(&mut self, place: &Place<'_>, results: &[Done; 3]) -> Result<bool, String> {
        let code = |result: &Done| match (result, place.step) {
            (Ok(()), _) => 0,
            (Err(_), Step::Transfer { .. }) => REFUSED,
            (Err(failure), _) => failure.code,
        };
        let mut same = true;
        for (way, other) in [(Way::Borrowed, &results[1]), (Way::Software, &results[2])] {
            let (direct, other) = (code(&results[0]), code(other));
            if let Step::Register { request, .. } = place.step
                && other == 0
                && let Some((missing, _)) = deviations::refusals(*place, request, way).first()
            {
                return Err(format!("{way:?} accepts what {missing:?} refuses: {request:?}"));
            }
            if direct != other {
                same = false;
                self.explain(place, way, direct, other, || format!("{results:#?}"))?;
            }
        }
        Ok(same)
    }

    fn explain(
        &mut self,
        place: &Place<'_>,
        way: Way,
        direct: i32,
        other: i32,
        details: impl Fn() -> String,
    ) -> Result<(), String> {
        let found = deviations::explain(*place, way, direct, other);
        let found = found.ok_or_else(|| {
            let Place { step, open, .. } = place;
            let open: Vec<_> = open.iter().flatten().map(|open| &open.request).collect();
            let details = details();
            format!("{way:?}: {other} instead of {direct}, in {step:?}, with {open:?}: {details}")
        })?;
        *self.met.entry(found).or_default() += 1;
        Ok(())
    }

    /// Compares the keys of the regions that a step registered.
    fn compare_keys(
        &mut self,
        place: &Place<'_>,
        request: &Request,
        keys: &[Vec<u64>; 3],
    ) -> Result<bool, String> {
        let none = u64::MAX;
        for (side, keys) in keys.iter().enumerate() {
            let mut others = place.open.iter().flatten().flat_map(|open| &open.keys[side]);
            if let Some(twice) = others.find(|other| **other != none && keys.contains(other)) {
                return Err(format!("side {side}: key {twice:#x} of an open region again"));
            }
        }
        if self.case.mode.mode.contains(MrMode::PROV_KEY) {
            return Ok(true);
        }
        let [direct, borrowed, software] = keys;
        if !direct.iter().all(|key| [request.key, none].contains(key)) {
            return Err(format!("the C API has keys {direct:x?} for {request:?}"));
        }
        let mut same = true;
        for (way, keys) in [(Way::Borrowed, borrowed), (Way::Software, software)] {
            if direct != keys && !direct.is_empty() && !keys.is_empty() {
                same = false;
                self.explain(place, way, 0, OTHER_KEY, || format!("{direct:x?}, {keys:x?}"))?;
            }
        }
        Ok(same)
    }
}

impl Opened {
    /// Returns the first range.
    pub(crate) fn first(&self) -> (u64, u64) {
        self.request.ranges.first().copied().unwrap_or_default()
    }
}

/// Result of a transfer that failed. Providers report a refusal by different numbers.
pub(crate) const REFUSED: i32 = -1;

/// Result of a transfer after which the memory differs.
pub(crate) const OTHER_BYTES: i32 = -3;

/// Result of a registration whose key is not that of the C API.
pub(crate) const OTHER_KEY: i32 = -2;

/// The regions of a program, by slot.
pub(crate) type Open = [Option<Opened>; SLOTS];

/// An open region of a program.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub(crate) request: Request,
    /// The keys on each side.
    keys: [Vec<u64>; 3],
}

/// A way that is compared with libfabric's C API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Borrowed,
    Software,
}
