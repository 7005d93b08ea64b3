//! A test of the public API of pegaflow-transfer over an RDMA device, for `ports/run`. The test
//! belongs to hmem, because the program's own test of transfers needs a GPU and a hardware NIC.

use pegaflow_transfer::{MooncakeTransferEngine, TransferError};

const BYTES: usize = 1 << 20;
const BLOCK: usize = 4096;

fn engine(port: u16, memory: &mut [u8]) -> MooncakeTransferEngine {
    let nic = std::env::var("HMEM_VERBS_DEVICE").expect("the name of an RDMA device");
    let mut engine = MooncakeTransferEngine::new();
    engine.initialize(nic, port).expect("initialize");
    engine.register_memory(memory.as_mut_ptr() as u64, memory.len()).expect("register");
    engine
}

#[test]
fn writes_and_reads_move_the_bytes_of_registered_memory() {
    let mut ours: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let mut theirs = vec![0_u8; BYTES];
    let (sender, receiver) = (engine(56050, &mut ours), engine(56060, &mut theirs));
    let peer = receiver.get_session_id();
    let blocks = |memory: &[u8], parity: usize| -> Vec<u64> {
        let starts = (0..BYTES).step_by(BLOCK).skip(parity).step_by(2);
        starts.map(|at| memory.as_ptr() as u64 + at as u64).collect()
    };

    // The even blocks are written to the peer, and its odd blocks are read.
    let lens = vec![BLOCK; BYTES / BLOCK / 2];
    let (from, to) = (blocks(&ours, 0), blocks(&theirs, 0));
    let moved = sender.batch_transfer_sync_write(&peer, &from, &to, &lens).expect("write");
    assert_eq!(moved, BYTES / 2);
    let (from, to) = (blocks(&theirs, 1), blocks(&ours, 1));
    let moved = sender.batch_transfer_sync_read(&peer, &to, &from, &lens).expect("read");
    assert_eq!(moved, BYTES / 2);
    let (ours, theirs) = (std::hint::black_box(&ours), std::hint::black_box(&theirs));
    for (number, (our, their)) in ours.chunks(BLOCK).zip(theirs.chunks(BLOCK)).enumerate() {
        assert_eq!(our, their, "block {number}");
        assert_eq!(number % 2 == 0, our.iter().any(|byte| *byte != 0), "block {number}");
    }

    let unknown = ours.as_ptr() as u64 + BYTES as u64;
    let refused = sender.transfer_sync_write(&peer, unknown, theirs.as_ptr() as u64, BLOCK);
    assert_eq!(refused, Err(TransferError::MemoryNotRegistered { ptr: unknown }));
    sender.unregister_memory(ours.as_ptr() as u64).expect("unregister");
    receiver.unregister_memory(theirs.as_ptr() as u64).expect("unregister");
}
