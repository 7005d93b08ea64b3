//! IPC handles, as other processes send them: of host memory, of the simulated device, and of CUDA,
//! ROCr and Level Zero over their fake drivers.

#![allow(unsafe_code, reason = "opens and closes memory of other processes")]

use std::sync::{Arc, LazyLock};

use hmem::{
    Allocation, AllocationKind, DeviceBuffer, DeviceId, Iface, IfaceExt,
    cuda::{self, Cuda},
    iface::{AllocRequest, IpcHandle},
    rocr::{self, Rocr},
    system::{Simulated, System},
    ze::{self, LevelZero},
};

use super::{Verdict, refusal, with_crc};

/// An iface with a handle of live memory.
struct Exporter {
    iface: Arc<dyn Iface>,
    handle: IpcHandle,
    /// The memory of a device. That of the host lives as long as its iface.
    _memory: Option<DeviceBuffer>,
}

const LEN: u64 = 8192;

static EXPORTERS: LazyLock<Vec<Exporter>> = LazyLock::new(|| {
    // SAFETY: the functions of a fake driver have the signatures of their names, and live forever.
    let (cuda, rocr, ze) = unsafe {
        (
            cuda::sys::Functions::from_lookup(hmem_fake_cuda::restart(Default::default())),
            rocr::sys::Functions::from_lookup(hmem_fake_rocr::restart(Default::default())),
            ze::sys::Functions::from_lookup(hmem_fake_ze::restart(Default::default())),
        )
    };
    let cuda = Cuda::builder().functions(cuda.expect("the table")).open().expect("a GPU");
    let rocr = Rocr::builder().functions(rocr.expect("the table")).open().expect("a GPU");
    let ze = LevelZero::builder().functions(ze.expect("the table")).open().expect("a GPU");
    let simulated = Simulated::builder().build().expect("a device");
    let system = System::new();
    let memory = system.memfd(LEN).expect("host memory");
    let devices: [Arc<dyn Iface>; 4] =
        [Arc::new(simulated), Arc::new(cuda), Arc::new(rocr), Arc::new(ze)];
    let host = Exporter::new(Arc::new(system), &memory, None);
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
    let devices = devices.into_iter().map(|iface| {
        let memory = DeviceBuffer::allocate(&iface, &request).expect("memory");
        let allocation = *memory.allocation();
        Exporter::new(iface, &allocation, Some(memory))
    });
    [host].into_iter().chain(devices).collect()
});

impl Exporter {
    fn new(iface: Arc<dyn Iface>, allocation: &Allocation, _memory: Option<DeviceBuffer>) -> Self {
        let ipc = iface.ipc().expect("the iface shares memory");
        let handle = ipc.export(allocation).expect("a handle");
        Self { iface, handle, _memory }
    }

    /// Opens a handle, reads the memory's first and last bytes, and closes it.
    fn open(&self, bytes: Vec<u8>) -> Result<Allocation, hmem::Error> {
        let ipc = self.iface.ipc().expect("the iface shares memory");
        let opened = ipc.open(&IpcHandle { iface: self.iface.kind(), bytes })?;
        let last = hmem::Address(opened.base().0 + opened.range.len() - 1);
        for address in [opened.base(), last] {
            // SAFETY: the allocation is open until `close` below.
            unsafe { self.iface.read(address, &mut [0]) }.expect("opened memory is readable");
        }
        // SAFETY: nothing uses the memory any more.
        unsafe { ipc.close(&opened) }.expect("close");
        Ok(opened)
    }
}

/// The first byte selects the iface. The second selects: an even number opens the rest as a handle,
/// an odd number opens the rest combined with a live handle and with a correct checksum.
pub(super) fn target(data: &[u8]) -> Verdict {
    let [iface, sort, rest @ ..] = data else { return Err("too short".to_owned()) };
    let exporter = &EXPORTERS[usize::from(*iface) % EXPORTERS.len()];
    let opened = if sort % 2 == 0 {
        exporter.open(rest.to_vec()).or_else(|_| exporter.open(with_crc(rest)))
    } else {
        let mut bytes = exporter.handle.bytes.clone();
        bytes.iter_mut().zip(rest).for_each(|(byte, change)| *byte ^= change);
        exporter.open(with_crc(&bytes))
    };
    opened.map(drop).map_err(refusal)
}
