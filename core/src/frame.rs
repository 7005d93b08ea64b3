//! The binary form of values that are sent to peers.
//!
//! The form is a magic number, a version, the payload, and the CRC-32 of these bytes in
//! little-endian order.

use serde::{Serialize, de::DeserializeOwned};

use crate::{Error, ErrorKind, Result};

/// A format of serialised values: its magic number, its version, and the texts of its errors.
pub(crate) struct Frame {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u8,
    /// The name of the operation in errors.
    pub(crate) operation: &'static str,
    /// The remedy in errors.
    pub(crate) remedy: &'static str,
}

impl Frame {
    /// Returns the bytes of a value in this format.
    pub(crate) fn write<T: Serialize>(&self, value: &T) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(48);
        bytes.extend_from_slice(&self.magic);
        bytes.push(self.version);
        let mut bytes = postcard::to_extend(value, bytes)
            .expect("integers, strings and lists always serialise into a Vec");
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Parses the bytes that [`Frame::write`] returned for a value.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the bytes are not one whole value of this format and version.
    pub(crate) fn read<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        let refuse = |why| self.refuse(bytes, why);
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or_else(|| refuse("too short"))?;
        let rest = body.strip_prefix(&self.magic).ok_or_else(|| refuse("magic"))?;
        let (version, payload) = rest.split_first().ok_or_else(|| refuse("too short"))?;
        if *version != self.version {
            return Err(refuse("version").context("version", version));
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(refuse("checksum"));
        }
        match postcard::take_from_bytes::<T>(payload) {
            Ok((value, [])) => Ok(value),
            Ok(_) => Err(refuse("bytes left over")),
            Err(error) => Err(refuse("payload").caused_by(error)),
        }
    }

    /// Returns the error for bytes that are not a value of this format.
    pub(crate) fn refuse(&self, bytes: &[u8], why: &'static str) -> Error {
        Error::new(ErrorKind::Malformed, self.operation)
            .context("why", why)
            .context("bytes", bytes.len())
            .remedy(self.remedy)
    }
}
