//! Tests of libfabric behaviours that the benchmarks rely on.

use crate::libfabric::error::FabricErrno;
use crate::libfabric::{
    FabricError, KeyOrder, Libfabric, RegistrationPeer, RegistrationProvider, ShmWritePath,
    ShmWritePeer,
};
use crate::trials::{Outcome, Skipped};

/// Loads libfabric. Skips the test if the library is not installed.
fn libfabric() -> Result<Libfabric, Skipped> {
    Libfabric::load().map_err(|reason| Skipped(reason.to_string()))
}

pub(crate) fn only_a_vacant_key_can_be_registered() -> Outcome {
    let libfabric = libfabric()?;
    for provider in
        [RegistrationProvider::Tcp, RegistrationProvider::TcpRxm, RegistrationProvider::Shm]
    {
        let mut peer = RegistrationPeer::open(libfabric, provider).unwrap();
        let buffer = vec![0_u8; 4096];
        let access = RegistrationPeer::REMOTE_ACCESS;
        for order in [KeyOrder::Shuffled, KeyOrder::Ascending] {
            peer.populate(1000, order).unwrap();
            assert_eq!(peer.populated(), 1000);
            for _ in 0..2 {
                for pick in 0..=1000 {
                    let key = peer.vacant_key(pick);
                    peer.reg_close(buffer.as_ptr(), buffer.len(), access, key).unwrap();
                }
            }
            for taken in [2, 1000, 2000] {
                let refused = peer.reg_close(buffer.as_ptr(), buffer.len(), access, taken);
                assert!(
                    matches!(refused, Err(FabricError::Call { code: FabricErrno::NOKEY, .. })),
                    "{provider:?}: {refused:?}"
                );
            }
        }
        peer.populate(0, KeyOrder::Shuffled).unwrap();
        peer.reg_close(buffer.as_ptr(), buffer.len(), access, 2).unwrap();
        peer.close().unwrap();
    }
    Ok(())
}

pub(crate) fn threads_register_at_once_under_different_keys() -> Outcome {
    let libfabric = libfabric()?;
    let mut peer = RegistrationPeer::open(libfabric, RegistrationProvider::Tcp).unwrap();
    peer.populate(2, KeyOrder::Ascending).unwrap();
    let buffer = vec![0_u8; 4096];
    std::thread::scope(|scope| {
        for pick in 0..3 {
            let (peer, buffer) = (&peer, &buffer);
            scope.spawn(move || {
                for _ in 0..1000 {
                    peer.reg_close(
                        buffer.as_ptr(),
                        buffer.len(),
                        RegistrationPeer::REMOTE_ACCESS,
                        peer.vacant_key(pick),
                    )
                    .unwrap();
                }
            });
        }
    });
    peer.close().unwrap();
    Ok(())
}

pub(crate) fn a_write_has_arrived_when_it_returns() -> Outcome {
    let libfabric = libfabric()?;
    for path in [ShmWritePath::CommandQueue, ShmWritePath::CrossMemoryAttach, ShmWritePath::Bounce]
    {
        let mut peer = ShmWritePeer::open(libfabric, path).unwrap();
        // Opening the peer performed the first write.
        let mut writes = 1;
        for len in [8, 64, 192, 200, 4096, 4104, 65_536, ShmWritePeer::LARGEST] {
            for _ in 0..50 {
                peer.write(len).unwrap();
                writes += 1;
                assert_eq!(peer.last_mark(len), writes, "{path:?}, {len} bytes");
            }
        }
        peer.close().unwrap();
    }
    Ok(())
}

pub(crate) fn a_write_of_an_unsupported_length_is_refused() -> Outcome {
    let libfabric = libfabric()?;
    let mut peer = ShmWritePeer::open(libfabric, ShmWritePath::CommandQueue).unwrap();
    for len in [0, 4, 12, ShmWritePeer::LARGEST + 8] {
        let refused = peer.write(len);
        assert!(matches!(refused, Err(FabricError::Length { given, .. }) if given == len));
    }
    Ok(())
}
