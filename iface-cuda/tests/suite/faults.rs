//! Faults at every driver call (REL-01): the caller gets an error, nothing is leaked, and the same
//! call works after the fault.

use std::{collections::BTreeSet, thread};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt,
    Result,
    iface::{AllocRequest, DmaBufMapping, IpcHandle},
};
use hmem_fake_cuda::{FakeDriver, Live, Profile};
use hmem_iface_cuda::{
    Cuda,
    sys::{CuContext, CuResult, Functions},
};

use crate::{
    child, ipc,
    world::{HeldCopies, World, check, nic, open_fds, over, pattern},
};

/// An injected fault: the driver call returns this code and does nothing.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The call fails once with this code.
    Once(CuResult),
    /// The device is lost: all later calls return the same code.
    Lost(CuResult),
}

const ONCE: [Fault; 5] = [
    Fault::Once(CuResult::CUDA_ERROR_UNKNOWN),
    Fault::Once(CuResult::CUDA_ERROR_OUT_OF_MEMORY),
    Fault::Once(CuResult::CUDA_ERROR_INVALID_VALUE),
    Fault::Once(CuResult::CUDA_ERROR_NOT_SUPPORTED),
    Fault::Once(CuResult::CUDA_ERROR_ILLEGAL_ADDRESS),
];
const LOST: [Fault; 1] = [Fault::Lost(CuResult::CUDA_ERROR_ILLEGAL_ADDRESS)];

impl Fault {
    fn code(self) -> CuResult {
        let (Self::Once(code) | Self::Lost(code)) = self;
        code
    }

    /// Returns true if `cuda.h` documents the code as a regular result of the call. The iface then
    /// need not return an error with this code.
    fn is_an_answer(self, symbol: &str) -> bool {
        let Self::Once(code) = self else { return false };
        let invalid = code == CuResult::CUDA_ERROR_INVALID_VALUE;
        match symbol {
            // An unknown attribute, a foreign address, or memory that the application page-locked.
            "cuDeviceGetAttribute" | "cuPointerGetAttributes" | "cuMemHostGetFlags" => invalid,
            // Memory without a flag or a handle of its own.
            "cuPointerSetAttribute" | "cuMemRetainAllocationHandle" => {
                invalid || code == CuResult::CUDA_ERROR_NOT_SUPPORTED
            }
            _ => false,
        }
    }
}

/// The operation that made a driver call, if the test treats it differently from others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Query of an event for the end of its copy.
    IsDone,
    /// Free of stream-ordered memory.
    StreamOrderedFree,
    Elsewhere,
}

/// Returns true if the round may succeed although this call fails.
fn may_be_silent(symbol: &str, place: Place) -> bool {
    match symbol {
        // A failed query of the event; the wait reports the error.
        "cuEventQuery" | "cuCtxPushCurrent_v2" | "cuCtxPopCurrent_v2" => place == Place::IsDone,
        // The wait for a free that the driver has accepted.
        "cuStreamSynchronize" => place == Place::StreamOrderedFree,
        _ => false,
    }
}

/// Functions in the table that the iface never calls.
const NEVER_CALLED: [&str; 1] = ["cuDriverGetVersion"];

/// Profiles of the fake that together cover every function of the table. The flag is true if the
/// application has a current context.
fn profiles() -> [(Profile, bool); 4] {
    let old = Profile { writes_ordering: 0, ..Profile::default() };
    [
        (old.clone(), false),
        // IS_GPU_DIRECT_RDMA_CAPABLE is attribute 15. Without it the handle is queried.
        (Profile { last_pointer_attribute: 14, ..old.clone() }, false),
        (Profile { queries_need_context: true, ..old.clone() }, false),
        (old, true),
    ]
}

/// An object of the round that must be released.
#[derive(Clone, Copy, Debug)]
enum Taken {
    Allocated(Allocation),
    Opened(Allocation),
    PageLocked(AddressRange),
}

impl Taken {
    fn end(self, cuda: &Cuda) -> Result<()> {
        match self {
            // SAFETY: no code uses the memory any longer.
            Self::Allocated(memory) => unsafe { cuda.free(&memory) },
            // SAFETY: no code uses the memory any longer.
            Self::Opened(memory) => unsafe { cuda.ipc_close(&memory) },
            Self::PageLocked(range) => cuda.host_unregister(range),
        }
    }
}

/// State of one round, which runs every operation that calls the driver.
struct Round<'a> {
    cuda: &'a Cuda,
    /// Handle that opens memory of another process.
    lent: &'a IpcHandle,
    /// Range of host pages of the application.
    pages: AddressRange,
    kinds: &'a [AllocationKind],
    /// The call with the fault: driver, function, and number of the call since the driver started.
    watched: Option<(&'a FakeDriver, &'static str, u64)>,
    /// The operation that made the call with the fault, once it is made.
    place: Option<Place>,
    first: Result<()>,
    left: Vec<Taken>,
}

impl Round<'_> {
    /// Records `place` as the operation that made the call with the fault, if that call was made
    /// since the last operation.
    fn did(&mut self, place: Place) {
        let Some((driver, symbol, end)) = self.watched else { return };
        if driver.calls(symbol) >= end {
            self.place.get_or_insert(place);
        }
    }

    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        self.did(Place::Elsewhere);
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                if self.first.is_ok() {
                    self.first = Err(error);
                }
                None
            }
        }
    }

    /// Releases an object. After an error, tries a second time; if the first attempt released the
    /// object despite the error, the second one finds no live object.
    fn give_back(&mut self, taken: Taken) {
        let ended = taken.end(self.cuda);
        self.did(match taken {
            Taken::Allocated(memory) if memory.kind == AllocationKind::StreamOrdered => {
                Place::StreamOrderedFree
            }
            _ => Place::Elsewhere,
        });
        if ended.is_err() {
            match taken.end(self.cuda) {
                Err(error) if error.kind() != ErrorKind::InvalidArgument => self.left.push(taken),
                _ => {}
            }
        }
        self.note(ended);
    }

    fn copies(&mut self, memory: &Allocation) {
        let bytes = pattern(1, 300);
        let mut back = [0u8; 300];
        let written = self.note(self.cuda.write_bytes(memory.base(), &bytes));
        let read = self.note(self.cuda.read_bytes(memory.base(), &mut back));
        assert!(
            written.and(read).is_none() || back[..] == bytes,
            "a copy that succeeded is not \
                                                                   cancelled"
        );
        let from = Address::of_ptr(bytes.as_ptr());
        // SAFETY: the host side outlives the event, which is waited for.
        let event = unsafe { self.cuda.start_copy(memory.base(), from, 300) };
        if let Some(event) = self.note(event) {
            event.is_done();
            self.did(Place::IsDone);
            self.note(event.wait());
        }
    }

    fn run(mut self) -> (Result<()>, Vec<Taken>, Option<Place>) {
        let cuda = self.cuda;
        self.note(cuda.query(Address(0)));
        for kind in self.kinds {
            let request = AllocRequest { len: 10_000, device: DeviceId(1), kind: *kind };
            let Some(memory) = self.note(cuda.allocate(&request)) else { continue };
            self.copies(&memory);
            self.note(cuda.physical_segments(memory.range));
            if matches!(kind, AllocationKind::Device | AllocationKind::Virtual) {
                for mapping in [DmaBufMapping::Pcie, DmaBufMapping::Default] {
                    if let Some(export) =
                        self.note(cuda.export_dma_buf(memory.range, &nic(), mapping))
                    {
                        self.note(cuda.release_dma_buf(export));
                    }
                }
                self.note(cuda.export_peer_memory(memory.range, &nic()));
            }
            if *kind == AllocationKind::Device {
                self.note(cuda.ipc_export(&memory));
            }
            self.give_back(Taken::Allocated(memory));
        }
        if let Some(memory) = self.note(cuda.ipc_open(self.lent)) {
            self.copies(&memory);
            self.give_back(Taken::Opened(memory));
        }
        // SAFETY: the pages outlive the test.
        if self.note(unsafe { cuda.host_register(self.pages) }).is_some() {
            self.give_back(Taken::PageLocked(self.pages));
        }
        self.note(cuda.flush_inbound(DeviceId(0)));
        (self.first, self.left, self.place)
    }
}

/// The driver and the memory that all rounds share.
struct Setting<'a> {
    driver: &'a FakeDriver,
    functions: Functions,
    lent: IpcHandle,
    pages: AddressRange,
    kinds: Vec<AllocationKind>,
    /// True if the application has a current context of its own.
    in_context: bool,
    /// Number of open fds of this process, without those of the fake.
    fds: usize,
}

impl<'a> Setting<'a> {
    fn of(world: &'a World, lent: IpcHandle, pages: AddressRange, in_context: bool) -> Self {
        let kinds = vec![
            AllocationKind::Device,
            AllocationKind::Host,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ];
        let functions = world.app.functions.clone();
        let driver = world.driver();
        let mut setting = Self { driver, functions, lent, pages, kinds, in_context, fds: 0 };
        setting.uses("cuInit");
        setting.fds = setting.fds();
        setting
    }

    fn open(&self) -> Result<Cuda> {
        Cuda::builder().functions(self.functions.clone()).open()
    }

    fn round(
        &self,
        cuda: &Cuda,
        watched: Option<(&'static str, u64)>,
    ) -> (Result<()>, Vec<Taken>, Option<Place>) {
        let watched = watched.map(|(symbol, end)| (self.driver, symbol, end));
        let (lent, pages, kinds) = (&self.lent, self.pages, &self.kinds[..]);
        let (place, first, left) = (None, Ok(()), Vec::new());
        Round { cuda, lent, pages, kinds, watched, place, first, left }.run()
    }

    fn works(&self, cuda: &Cuda, when: &str) {
        let (seen, left, _) = self.round(cuda, None);
        seen.unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(left.is_empty(), "{when}: {left:?}");
    }

    fn fds(&self) -> usize {
        open_fds() - self.driver.files()
    }

    /// Calls `run`, with a current context of the application if the setting has one.
    fn in_context<T>(&self, run: impl FnOnce() -> T) -> T {
        if !self.in_context {
            return run();
        }
        let mut context = CuContext::NULL;
        // SAFETY: the output is writable, and the device exists.
        check(unsafe { hmem_fake_cuda::cuCtxCreate_v2(&mut context, 0, 1) });
        let result = run();
        // SAFETY: `create_context` above made the context.
        check(unsafe { hmem_fake_cuda::cuCtxDestroy_v2(context) });
        result
    }

    /// Opens, uses and closes the iface without faults. Returns the number of calls of a function.
    fn uses(&self, symbol: &str) -> u64 {
        let before = self.driver.calls(symbol);
        self.in_context(|| {
            let cuda = self.open().expect("open");
            self.works(&cuda, "without faults");
            cuda.close().unwrap_or_else(|refused| panic!("{}", refused.error));
        });
        self.driver.calls(symbol) - before
    }

    /// Opens, uses and closes the iface while the `nth` call of a function fails. Returns the first
    /// error and the operation that made the call.
    fn life(&self, symbol: &'static str, nth: u64, fault: Fault) -> (Result<()>, Place) {
        let when = format!("{symbol} {nth}, {fault:?}");
        let before = self.driver.contexts_of_this_thread();
        let end = self.driver.calls(symbol) + nth;
        match fault {
            Fault::Once(code) => self.driver.fail_nth(symbol, nth, code),
            Fault::Lost(code) => self.driver.lose_device_at(symbol, nth, code),
        }
        let mut place = Place::Elsewhere;
        let seen = match self.open() {
            Err(error) => Err(error),
            // A call before or after the round belongs to opening or closing the iface.
            Ok(cuda) => {
                let opened = self.driver.calls(symbol) >= end;
                let (seen, left, made_for) = self.round(&cuda, Some((symbol, end)));
                place = made_for.filter(|_| !opened).unwrap_or(place);
                if self.driver.calls(symbol) >= end {
                    self.driver.heal();
                    for taken in left {
                        taken
                            .end(&cuda)
                            .unwrap_or_else(|error| panic!("{when}: {taken:?}: {error}"));
                    }
                    if matches!(fault, Fault::Once(_)) && !fault.is_an_answer(symbol) {
                        self.works(&cuda, &when);
                    }
                } else {
                    assert!(left.is_empty(), "{when}: {left:?}");
                }
                match cuda.close() {
                    Ok(()) => seen,
                    // The fault hit the close. The second close works.
                    Err(refused) => {
                        self.driver.heal();
                        let again = refused.value.close();
                        again.unwrap_or_else(|refused| panic!("{when}: {}", refused.error));
                        seen.and(Err(refused.error))
                    }
                }
            }
        };
        assert!(self.driver.calls(symbol) >= end, "{when}: no such call was made");
        self.driver.heal();
        // With a lost device a call cannot undo its own steps: the thread's context stays current,
        // and memory that was not returned yet stays allocated. Everything else is released above.
        if matches!(fault, Fault::Once(_)) {
            assert_eq!(self.driver.contexts_of_this_thread(), before, "{when}");
            assert_eq!(self.driver.live(), Live::default(), "{when}: {seen:?}");
        }
        assert_eq!(self.fds(), self.fds, "{when}: fds");
        (seen, place)
    }

    /// Tests each of these faults at every call of one function.
    fn show(&self, symbol: &'static str, uses: u64, faults: &[Fault]) {
        for fault in faults.iter().copied() {
            let mut silent = Vec::new();
            for nth in 1..=uses {
                // Runs on a thread of its own, with contexts of its own.
                let seen = thread::scope(|scope| {
                    scope.spawn(|| self.in_context(|| self.life(symbol, nth, fault))).join()
                });
                let (seen, place) = seen.expect("the life ends");
                let allowed = matches!(fault, Fault::Once(_)) && may_be_silent(symbol, place);
                match seen {
                    Err(_) if fault.is_an_answer(symbol) => {}
                    Err(error) => self.names(&error, fault, &format!("{symbol} {nth}, {fault:?}")),
                    Ok(()) if fault.is_an_answer(symbol) || allowed => {}
                    Ok(()) => silent.push((nth, place)),
                }
            }
            assert!(silent.is_empty(), "{symbol}, {fault:?}: calls {silent:?} failed unnoticed");
        }
        self.uses(symbol);
    }

    fn names(&self, error: &Error, fault: Fault, when: &str) {
        let code = fault.code();
        assert!(error.to_string().contains(&format!("({})", code.0)), "{when}: {error}");
        if code == CuResult::CUDA_ERROR_ILLEGAL_ADDRESS {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{when}: {error}");
        }
    }
}

/// REL-01
///
/// Runs in a child process, so that its fds can be counted. The child opens memory of its parent.
#[test]
fn fault_at_every_driver_call_is_an_error_and_leaves_nothing() {
    const NAME: &str = "faults::fault_at_every_driver_call_is_an_error_and_leaves_nothing";
    let Some(text) = child::passed() else {
        return over(Profile::default(), |world| {
            let memory = world.allocate(3 << 20, AllocationKind::Device);
            let handle = world.cuda.ipc_export(&memory).expect("export");
            child::run(NAME, &ipc::hex(&handle.bytes));
            world.free(&memory);
        });
    };
    let host = vec![0u8; 3 << 12];
    let start = Address(Address::of_ptr(host.as_ptr()).0.next_multiple_of(4096));
    let pages = AddressRange::new(start, 8192).expect("a range");
    let table: Vec<_> =
        Functions::SYMBOLS.iter().chain(Functions::OPTIONAL_SYMBOLS).copied().collect();
    let mut faulted = BTreeSet::from(NEVER_CALLED);
    for (profile, in_context) in profiles() {
        let mut used = Vec::new();
        over(profile.clone(), |world| {
            let setting = Setting::of(world, ipc::handle(&text), pages, in_context);
            for symbol in &table {
                let uses = setting.uses(symbol);
                if NEVER_CALLED.contains(symbol) {
                    assert_eq!(uses, 0, "{symbol} is called, and faulted nowhere");
                } else if uses > 0 && faulted.insert(*symbol) {
                    setting.show(symbol, uses, &ONCE);
                    used.push((*symbol, uses));
                }
            }
        });
        // Dropping the driver frees what a lost device keeps.
        let world = World::fake(profile);
        let setting = Setting::of(&world, ipc::handle(&text), pages, in_context);
        for (symbol, uses) in used {
            setting.show(symbol, uses, &LOST);
        }
    }
    let missed: Vec<_> = table.iter().filter(|symbol| !faulted.contains(*symbol)).collect();
    assert!(missed.is_empty(), "called in no round: {missed:?}");
}
