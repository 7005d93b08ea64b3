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
    world::{HeldCopies, World, check, nic, open_fds, over, pages, pattern},
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
            // The code is also returned for an unknown attribute, an address that is not CUDA
            // memory, or memory that the application page-locked.
            "cuDeviceGetAttribute" | "cuPointerGetAttributes" | "cuMemHostGetFlags" => invalid,
            // The codes are also returned for memory that has no SYNC_MEMOPS attribute or no
            // handle.
            "cuPointerSetAttribute" | "cuMemRetainAllocationHandle" => {
                invalid || code == CuResult::CUDA_ERROR_NOT_SUPPORTED
            }
            _ => false,
        }
    }
}

/// The operation of the iface that made a driver call. For each operation but
/// [`Self::Elsewhere`], the test allows some calls to fail without an error.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    /// Query of an event by `CopyEvent::is_done`.
    IsDone,
    /// Wait for the end of an asynchronous copy by `CopyEvent::wait`.
    Wait,
    /// Copy that ends before the call returns.
    BlockingCopy,
    /// Free of stream-ordered memory.
    StreamOrderedFree,
    Elsewhere,
}

/// Returns true if an operation may succeed although its call of the driver function `symbol`
/// fails.
fn may_be_silent(symbol: &str, operation: Operation) -> bool {
    match symbol {
        // If the query of an event fails, the wait for the event reports the error.
        "cuEventQuery" | "cuCtxPopCurrent_v2" => operation == Operation::IsDone,
        // A wait for a copy that may still run is repeated.
        "cuCtxPushCurrent_v2" | "cuEventSynchronize" => {
            matches!(operation, Operation::IsDone | Operation::Wait)
        }
        // The driver has already accepted the free for which this call waits.
        "cuStreamSynchronize" => {
            matches!(operation, Operation::BlockingCopy | Operation::StreamOrderedFree)
        }
        // Only calls during a stream capture need the other mode, and its restoration is repeated.
        EXCHANGE => true,
        _ => false,
    }
}

const EXCHANGE: &str = "cuThreadExchangeStreamCaptureMode";

/// Functions in the table that the iface never calls.
const NEVER_CALLED: [&str; 1] = ["cuDriverGetVersion"];

/// Profiles of the fake that together cover every function of the table. The flag is true if the
/// application has a current context.
fn profiles() -> [(Profile, bool); 4] {
    let old = Profile { writes_ordering: 0, ..Profile::default() };
    [
        (old.clone(), false),
        // IS_GPU_DIRECT_RDMA_CAPABLE is attribute 15. A driver without this attribute is queried
        // for the properties of the handle.
        (Profile { last_pointer_attribute: 14, ..old.clone() }, false),
        (Profile { queries_need_context: true, ..old.clone() }, false),
        (old, true),
    ]
}

/// An object that an operation acquired from the iface. The test must release it.
#[derive(Clone, Copy, Debug)]
enum Acquired {
    Allocated(Allocation),
    Opened(Allocation),
    PageLocked(AddressRange),
}

impl Acquired {
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
    /// Handle by which the iface opens memory of another process.
    ipc_handle: &'a IpcHandle,
    /// Range of host pages of the application.
    pages: AddressRange,
    kinds: &'a [AllocationKind],
    /// The call with the fault: driver, function, and number of the call since the driver started.
    watched: Option<(&'a FakeDriver, &'static str, u64)>,
    /// The operation that made the call with the fault, once it is made.
    operation: Option<Operation>,
    first: Result<()>,
    left: Vec<Acquired>,
}

impl Round<'_> {
    /// Records `operation` as the one that made the call with the fault, if that call was made
    /// since the previous operation.
    fn record_operation(&mut self, operation: Operation) {
        let Some((driver, symbol, end)) = self.watched else { return };
        if driver.calls(symbol) >= end {
            self.operation.get_or_insert(operation);
        }
    }

    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        self.record_operation(Operation::Elsewhere);
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

    /// Releases an object, and tries a second time after an error. InvalidArgument from the second
    /// attempt means that the first one released the object despite its error. After any other
    /// error, the object is added to `left`.
    fn release(&mut self, acquired: Acquired) {
        let ended = acquired.end(self.cuda);
        self.record_operation(match acquired {
            Acquired::Allocated(memory) if memory.kind == AllocationKind::StreamOrdered => {
                Operation::StreamOrderedFree
            }
            _ => Operation::Elsewhere,
        });
        if ended.is_err() {
            match acquired.end(self.cuda) {
                Err(error) if error.kind() != ErrorKind::InvalidArgument => {
                    self.left.push(acquired)
                }
                _ => {}
            }
        }
        self.note(ended);
    }

    fn copies(&mut self, memory: &Allocation) {
        let bytes = pattern(1, 300);
        let mut back = [0u8; 300];
        let written = self.cuda.write_bytes(memory.base(), &bytes);
        self.record_operation(Operation::BlockingCopy);
        let written = self.note(written);
        let read = self.cuda.read_bytes(memory.base(), &mut back);
        self.record_operation(Operation::BlockingCopy);
        let read = self.note(read);
        assert!(
            written.and(read).is_none() || back[..] == bytes,
            "a copy that succeeded is undone"
        );
        let from = Address::of_ptr(bytes.as_ptr());
        // SAFETY: the host memory stays valid until the test has waited for the event.
        let event = unsafe { self.cuda.start_copy(memory.base(), from, 300) };
        if let Some(event) = self.note(event) {
            event.is_done();
            self.record_operation(Operation::IsDone);
            let ended = event.wait();
            self.record_operation(Operation::Wait);
            self.note(ended);
        }
    }

    fn run(mut self) -> (Result<()>, Vec<Acquired>, Option<Operation>) {
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
            self.release(Acquired::Allocated(memory));
        }
        if let Some(memory) = self.note(cuda.ipc_open(self.ipc_handle)) {
            self.copies(&memory);
            self.release(Acquired::Opened(memory));
        }
        // SAFETY: the pages outlive the test.
        if self.note(unsafe { cuda.host_register(self.pages) }).is_some() {
            self.release(Acquired::PageLocked(self.pages));
        }
        self.note(cuda.flush_inbound(DeviceId(0)));
        (self.first, self.left, self.operation)
    }
}

/// The driver and the memory that all rounds share.
struct Setting<'a> {
    driver: &'a FakeDriver,
    functions: Functions,
    ipc_handle: IpcHandle,
    pages: AddressRange,
    kinds: Vec<AllocationKind>,
    /// True if the application has a current context of its own.
    in_context: bool,
    /// Number of open fds of this process, without those of the fake.
    fds: usize,
}

impl<'a> Setting<'a> {
    fn of(world: &'a World, ipc_handle: IpcHandle, pages: AddressRange, in_context: bool) -> Self {
        let kinds = vec![
            AllocationKind::Device,
            AllocationKind::Host,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ];
        let functions = world.app.functions.clone();
        let driver = world.driver();
        let mut setting = Self { driver, functions, ipc_handle, pages, kinds, in_context, fds: 0 };
        setting.count_calls("cuInit");
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
    ) -> (Result<()>, Vec<Acquired>, Option<Operation>) {
        let watched = watched.map(|(symbol, end)| (self.driver, symbol, end));
        let (ipc_handle, pages, kinds) = (&self.ipc_handle, self.pages, &self.kinds[..]);
        let (operation, first, left) = (None, Ok(()), Vec::new());
        Round { cuda, ipc_handle, pages, kinds, watched, operation, first, left }.run()
    }

    /// Runs one round without faults, which must succeed and leave nothing.
    fn check_round(&self, cuda: &Cuda, when: &str) {
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
        // SAFETY: `cuCtxCreate_v2` above made the context.
        check(unsafe { hmem_fake_cuda::cuCtxDestroy_v2(context) });
        result
    }

    /// Opens, uses and closes the iface without faults. Returns the number of calls of a function.
    fn count_calls(&self, symbol: &str) -> u64 {
        let before = self.driver.calls(symbol);
        self.in_context(|| {
            let cuda = self.open().expect("open");
            self.check_round(&cuda, "without faults");
            cuda.close().unwrap_or_else(|refused| panic!("{}", refused.error));
        });
        self.driver.calls(symbol) - before
    }

    /// Opens, uses and closes the iface while the `nth` call of a function fails. Returns the first
    /// error and the operation that made the call.
    fn run_with_fault(
        &self,
        symbol: &'static str,
        nth: u64,
        fault: Fault,
    ) -> (Result<()>, Operation) {
        let when = format!("{symbol} {nth}, {fault:?}");
        let before = self.driver.contexts_of_this_thread();
        let end = self.driver.calls(symbol) + nth;
        match fault {
            Fault::Once(code) => self.driver.fail_nth(symbol, nth, code),
            Fault::Lost(code) => self.driver.lose_device_at(symbol, nth, code),
        }
        let mut operation = Operation::Elsewhere;
        let seen = match self.open() {
            Err(error) => Err(error),
            // If no operation of the round made the call with the fault, opening or closing the
            // iface made it.
            Ok(cuda) => {
                let opened = self.driver.calls(symbol) >= end;
                let (seen, left, made_for) = self.round(&cuda, Some((symbol, end)));
                operation = made_for.filter(|_| !opened).unwrap_or(operation);
                if self.driver.calls(symbol) >= end {
                    self.driver.heal();
                    for acquired in left {
                        acquired
                            .end(&cuda)
                            .unwrap_or_else(|error| panic!("{when}: {acquired:?}: {error}"));
                    }
                    if matches!(fault, Fault::Once(_)) && !fault.is_an_answer(symbol) {
                        self.check_round(&cuda, &when);
                    }
                } else {
                    assert!(left.is_empty(), "{when}: {left:?}");
                }
                match cuda.close() {
                    Ok(()) => seen,
                    // The fault made the close fail. The second close succeeds.
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
        (seen, operation)
    }

    /// Injects each of `faults` into each of the `uses` calls of one driver function.
    fn inject(&self, symbol: &'static str, uses: u64, faults: &[Fault]) {
        for fault in faults.iter().copied() {
            let mut silent = Vec::new();
            for nth in 1..=uses {
                // Each fault is injected on a new thread, which has no current context yet.
                let seen = thread::scope(|scope| {
                    scope
                        .spawn(|| self.in_context(|| self.run_with_fault(symbol, nth, fault)))
                        .join()
                });
                let (seen, operation) = seen.expect("no panic");
                // The exchange of the capture mode is the last call of a close.
                let may_be_lost = symbol == EXCHANGE && operation == Operation::Elsewhere;
                let allowed = (matches!(fault, Fault::Once(_)) || may_be_lost)
                    && may_be_silent(symbol, operation);
                match seen {
                    Err(_) if fault.is_an_answer(symbol) => {}
                    Err(error) => {
                        self.check_error(&error, fault, &format!("{symbol} {nth}, {fault:?}"))
                    }
                    Ok(()) if fault.is_an_answer(symbol) || allowed => {}
                    Ok(()) => silent.push((nth, operation)),
                }
            }
            assert!(silent.is_empty(), "{symbol}, {fault:?}: calls {silent:?} failed unnoticed");
        }
        self.count_calls(symbol);
    }

    /// Checks that an error has the driver's code of a fault, and for a lost context the kind
    /// Unavailable.
    fn check_error(&self, error: &Error, fault: Fault, when: &str) {
        let code = fault.code();
        assert!(error.to_string().contains(&format!("({})", code.0)), "{when}: {error}");
        if code == CuResult::CUDA_ERROR_ILLEGAL_ADDRESS {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{when}: {error}");
        }
    }
}

/// REL-01
///
/// A fault at any driver call is returned as an error and leaves nothing allocated. If the device
/// is lost, all later calls return the error. Two child processes inject the faults, each a half of
/// them, and count their own fds. Each opens memory of its parent.
#[test]
fn fault_at_every_driver_call_is_an_error_and_leaves_nothing() {
    const NAME: &str = "faults::fault_at_every_driver_call_is_an_error_and_leaves_nothing";
    let Some(text) = child::passed() else {
        return over(Profile::default(), |world| {
            let memory = world.allocate(3 << 20, AllocationKind::Device);
            let handle = ipc::hex(&world.cuda.ipc_export(&memory).expect("export").bytes);
            thread::scope(|scope| {
                for half in ["first", "second"] {
                    let pass = format!("{half} {handle}");
                    scope.spawn(move || child::run(NAME, &pass));
                }
            });
            world.free(&memory);
        });
    };
    let once = |used: &ProfileCalls, faults: &[Fault]| {
        over(used.profile.clone(), |world| used.inject(world, faults));
    };
    match text.split_once(' ').expect("a half and a handle") {
        ("first", handle) => for_each_profile(handle, |used| once(used, &ONCE[..3])),
        ("second", handle) => for_each_profile(handle, |used| {
            once(used, &ONCE[3..]);
            // Dropping the fake driver frees the memory that the iface could not free on a lost
            // device.
            used.inject(&World::fake(used.profile.clone()), &LOST);
        }),
        (other, _) => panic!("no half of the faults: {other}"),
    }
}

/// The driver calls of a profile that no profile before it makes.
struct ProfileCalls {
    profile: Profile,
    in_context: bool,
    handle: IpcHandle,
    pages: AddressRange,
    /// The name of each function, and the number of its calls in a round.
    calls: Vec<(&'static str, u64)>,
}

impl ProfileCalls {
    /// Injects each fault at each call, in rounds of their own.
    fn inject(&self, world: &World, faults: &[Fault]) {
        let setting = Setting::of(world, self.handle.clone(), self.pages, self.in_context);
        for (symbol, uses) in &self.calls {
            setting.inject(symbol, *uses, faults);
        }
    }
}

/// Calls `visit` with the driver calls of each profile. The rounds open the memory of `handle`.
fn for_each_profile(handle: &str, visit: impl Fn(&ProfileCalls)) {
    let (_host, pages) = pages();
    let table: Vec<_> =
        Functions::SYMBOLS.iter().chain(Functions::OPTIONAL_SYMBOLS).copied().collect();
    let mut counted = BTreeSet::from(NEVER_CALLED);
    for (profile, in_context) in profiles() {
        let (handle, calls) = (ipc::handle(handle), Vec::new());
        let mut used = ProfileCalls { profile, in_context, handle, pages, calls };
        over(used.profile.clone(), |world| {
            let setting = Setting::of(world, used.handle.clone(), pages, in_context);
            for symbol in &table {
                let uses = setting.count_calls(symbol);
                if NEVER_CALLED.contains(symbol) {
                    assert_eq!(uses, 0, "{symbol} is called, and faulted nowhere");
                } else if uses > 0 && counted.insert(*symbol) {
                    used.calls.push((*symbol, uses));
                }
            }
        });
        visit(&used);
    }
    let missed: Vec<_> = table.iter().filter(|symbol| !counted.contains(*symbol)).collect();
    assert!(missed.is_empty(), "called in no round: {missed:?}");
}
