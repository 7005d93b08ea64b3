//! Runs tests over the Neuron and the Gaudi iface with fake runtimes.

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Iface, IfaceExt, Result,
    iface::AllocRequest, provider::Nic,
};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_accelerators::neuron::{self as neuron, Neuron};
use hmem_iface_accelerators::synapseai::{self as synapseai, SynapseAi};
use hmem_iface_kit::announced::{Announced, Driver};

/// Returns the size of the machine's pages in bytes.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// A test that runs over one iface.
pub(crate) trait Over {
    fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, world: &World<D>);
}

/// Function that allocates memory with the vendor's call, as an application does.
type AllocateAsApplication<D> =
    fn(&Announced<D>, &Fake, u64) -> (AddressRange, <D as Driver>::Handle);

/// Values and functions that differ between the tests of Neuron and of Gaudi.
pub(crate) struct World<D: Driver> {
    pub(crate) allocate: AllocateAsApplication<D>,
    /// Names of the functions that the vendor's library must have.
    pub(crate) symbols: &'static [&'static str],
}

/// Runs a test over the Neuron iface and over the Gaudi iface.
pub(crate) fn over_both(test: &impl Over) {
    over_neuron(Profile::running(), test);
    // This is an older library, which lacks the second version of the export call.
    over_neuron(Profile::running().without(&["nrt_get_dmabuf_fd_v2"]), test);
    let fake = Fake::start(Profile::running());
    let iface = gaudi(&fake).expect("a Gaudi device");
    let world = World {
        allocate: |_, fake, len| {
            let mut base = 0;
            // SAFETY: the symbol is the fake's function of this signature, and the last argument is
            // writable.
            let code = unsafe {
                let malloc = fake.symbol("synDeviceMalloc").expect("in the library");
                let malloc: unsafe extern "C" fn(u32, u64, u64, u32, *mut u64) -> i32 =
                    std::mem::transmute(malloc);
                malloc(0, len, 0, 0, &mut base)
            };
            assert_eq!(code, 0);
            (range(base, len), ())
        },
        symbols: synapseai::sys::synapse::Functions::SYMBOLS,
    };
    test.run(&fake, &iface, &world);
}

fn over_neuron(profile: Profile, test: &impl Over) {
    let fake = Fake::start(profile);
    let iface = neuron(&fake).expect("NeuronCores");
    let world = World {
        allocate: |iface: &Neuron, fake, len| {
            let mut tensor = std::ptr::null_mut();
            // SAFETY: the symbol is the fake's function of this signature, and the last argument is
            // writable.
            let code = unsafe {
                let allocate = fake.symbol("nrt_tensor_allocate").expect("in the library");
                let allocate: unsafe extern "C" fn(
                    i32,
                    i32,
                    usize,
                    *const std::ffi::c_char,
                    *mut *mut std::ffi::c_void,
                ) -> i32 = std::mem::transmute(allocate);
                allocate(0, 0, len as usize, c"application".as_ptr(), &mut tensor)
            };
            assert_eq!(code, 0);
            // SAFETY: the call above returned the tensor.
            let (tensor, range) = unsafe { iface.driver().tensor(tensor) }.expect("a tensor");
            (range, tensor)
        },
        symbols: neuron::sys::Functions::SYMBOLS,
    };
    test.run(&fake, &iface, &world);
}

pub(crate) fn neuron(fake: &Fake) -> Result<Neuron> {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let functions = unsafe { neuron::sys::Functions::from_lookup(|name| fake.symbol(name)) }?;
    Neuron::builder().functions(functions).open()
}

pub(crate) fn gaudi(fake: &Fake) -> Result<SynapseAi> {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let (synapse, hlthunk) = unsafe {
        (
            synapseai::sys::synapse::Functions::from_lookup(|name| fake.symbol(name))?,
            synapseai::sys::hlthunk::Functions::from_lookup(|name| fake.symbol(name))?,
        )
    };
    SynapseAi::builder().functions(synapse).hlthunk_functions(hlthunk).open()
}

pub(crate) fn range(start: u64, len: u64) -> AddressRange {
    AddressRange::new(Address(start), len).expect("a range")
}

pub(crate) fn request(len: u64) -> AllocRequest {
    AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device }
}

pub(crate) fn allocate(iface: &dyn Iface, len: u64) -> Allocation {
    iface.allocate(&request(len)).expect("allocate")
}

/// Frees memory that the calling test no longer uses.
pub(crate) fn free(iface: &dyn Iface, allocation: &Allocation) -> Result<()> {
    // SAFETY: the calling test no longer uses the memory.
    unsafe { iface.free(allocation) }
}

pub(crate) fn nic() -> Nic {
    Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None }
}

/// Returns a pattern of bytes that repeats after 251 bytes, so that shifted bytes differ.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Writes a pattern into memory and reads it back. Returns the error of a failed copy, and panics
/// if the bytes differ.
pub(crate) fn check_round_trip(iface: &dyn Iface, at: Address, len: usize) -> Result<()> {
    let bytes = pattern(len);
    let mut back = vec![0; len];
    // SAFETY: the calling test keeps the memory allocated during the call.
    unsafe {
        iface.write(at, &bytes)?;
        iface.read(at, &mut back)?;
    }
    assert!(back == bytes, "other bytes came back");
    Ok(())
}
