//! Handles by which processes share allocations, and their binary form.

use serde::{Serialize, de::DeserializeOwned};

use crate::{Error, ErrorKind, IfaceKind, IfaceName, Result, frame::Frame};

/// The binary form of a handle.
const FRAME: Frame = Frame {
    magic: *b"hmIP",
    version: 2,
    operation: "ipc_open",
    remedy: "pass the bytes of ipc_export unchanged",
};

/// A handle by which another process can open an allocation.
///
/// # Examples
/// ```
/// use hmem_core::{ErrorKind, IfaceKind, iface::IpcHandle};
///
/// let handle = IpcHandle::encode(IfaceKind::CUDA, &("0000:3a:00.0", 4096_u64));
/// let (device, len): (String, u64) = handle.decode(IfaceKind::CUDA)?;
/// assert_eq!((device.as_str(), len), ("0000:3a:00.0", 4096));
///
/// let refused = handle.decode::<(String, u64)>(IfaceKind::ROCR).unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::Malformed);
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The iface that exported the allocation.
    pub iface: IfaceKind,
    /// The handle's bytes, which only the iface can interpret.
    pub bytes: Vec<u8>,
}

impl IpcHandle {
    /// Version of the binary form that [`encode`](Self::encode) writes.
    pub const VERSION: u8 = FRAME.version;

    /// Returns a handle with this content. The bytes are a magic number, the version, the iface,
    /// the content as `postcard` writes it, and a checksum.
    pub fn encode(iface: IfaceKind, content: &impl Serialize) -> Self {
        Self { iface, bytes: FRAME.write(&(iface.0, content)) }
    }

    /// Returns the content of a handle that [`encode`](Self::encode) returned.
    ///
    /// # Errors
    /// Malformed if another iface exported the allocation, or if the bytes were altered or
    /// truncated.
    pub fn decode<T: DeserializeOwned>(&self, iface: impl Into<IfaceName>) -> Result<T> {
        let iface = iface.into();
        let mine = iface.kind();
        let other = |kind: IfaceKind| {
            Error::new(ErrorKind::Malformed, FRAME.operation)
                .iface(iface.clone())
                .context("handle of", kind)
                .remedy("open the handle with the iface that exported it")
        };
        if self.iface != mine {
            return Err(other(self.iface));
        }
        match FRAME.read::<(u32, T)>(&self.bytes) {
            Ok((kind, content)) if IfaceKind(kind) == mine => Ok(content),
            Ok((kind, _)) => Err(other(IfaceKind(kind))),
            Err(error) => Err(error.iface(iface)),
        }
    }

    /// Returns the error for a handle whose content the iface never writes. `why` is the reason in
    /// the error.
    pub fn malformed(&self, iface: impl Into<IfaceName>, why: &'static str) -> Error {
        FRAME.refuse(&self.bytes, why).iface(iface)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HM-10: an altered or truncated handle is malformed, and so is the handle of another iface.
    #[test]
    fn altered_or_truncated_handle_and_one_of_another_iface_are_malformed() {
        let handle = IpcHandle::encode(IfaceKind::CUDA, &(7_u64, "device"));
        let read = |bytes: &[u8]| {
            let handle = IpcHandle { iface: IfaceKind::CUDA, bytes: bytes.to_vec() };
            handle.decode::<(u64, String)>(IfaceKind::CUDA)
        };
        assert_eq!(read(&handle.bytes).expect("unchanged"), (7, "device".to_owned()));
        for at in 0..handle.bytes.len() {
            let mut altered = handle.bytes.clone();
            altered[at] ^= 1;
            for bytes in [&altered, &handle.bytes[..at]] {
                let refused = read(bytes).expect_err("not the bytes that were written");
                assert_eq!(refused.kind(), ErrorKind::Malformed, "byte {at}: {refused}");
                assert_eq!(refused.iface_kind(), Some(IfaceKind::CUDA));
            }
        }
        let relabelled = IpcHandle { iface: IfaceKind::ROCR, ..handle.clone() };
        // The iface of the handle and the one in its bytes both count.
        let cases = [
            (&handle, IfaceKind::ROCR, "cuda"),
            (&relabelled, IfaceKind::ROCR, "cuda"),
            (&relabelled, IfaceKind::CUDA, "rocr"),
        ];
        for (handle, iface, other) in cases {
            let refused = handle.decode::<(u64, String)>(iface).expect_err("of another iface");
            assert_eq!(refused.kind(), ErrorKind::Malformed, "{refused}");
            assert_eq!(refused.context_value("handle of"), Some(other));
        }
    }
}
