//! Memory that goes and comes back at the same address: what a stale registration is caught by.

#![allow(
    unsafe_code,
    reason = "pages are taken away by the C library's calls, as applications take them"
)]

use std::{
    io,
    ptr::{self, with_exposed_provenance_mut},
    sync::Arc,
};

use hmem::{
    Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Error, ErrorKind, Iface, Result,
    iface::AllocRequest, system::monitor::ImportMonitor,
};

/// Bytes of a place: a page of the smallest size that there is.
const LEN: u64 = 4096;

/// Memory that can be freed and had again.
pub(super) trait Place {
    /// Where it is now.
    fn range(&self) -> Result<AddressRange>;

    /// Frees it and takes other memory; `round` varies how.
    fn renew(&mut self, round: u64) -> Result<()>;

    /// Copies into its first bytes.
    fn write(&self, from: &[u8]) -> Result<()>;

    /// Copies its first bytes out.
    fn read(&self, into: &mut [u8]) -> Result<()>;
}

/// Pages of the operating system.
#[derive(Debug)]
pub(super) struct Pages {
    /// Null where there are none, after a refusal.
    at: *mut libc::c_void,
    /// Told of what goes, where that is the application's task.
    told: Option<Arc<ImportMonitor>>,
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const OWN: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

impl Pages {
    pub(super) fn map(told: Option<Arc<ImportMonitor>>) -> Result<Self> {
        Ok(Self { at: map(ptr::null_mut(), OWN)?, told })
    }

    fn change(&mut self, round: u64) -> Result<()> {
        match round % 4 {
            0 => {
                // SAFETY: the pages are this value's own, and nobody refers into them.
                done("munmap", unsafe { libc::munmap(self.at, LEN as usize) })?;
                self.map_again()?;
            }
            1 => self.at = map(self.at, OWN | libc::MAP_FIXED)?,
            // SAFETY: as above.
            2 => done("madvise", unsafe {
                libc::madvise(self.at, LEN as usize, libc::MADV_DONTNEED)
            })?,
            _ => {
                let elsewhere = map(ptr::null_mut(), OWN)?;
                // SAFETY: as above, for both; the pages at `elsewhere` are replaced and then given
                // back.
                let moved = unsafe {
                    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    libc::mremap(self.at, LEN as usize, LEN as usize, how, elsewhere)
                };
                let last = io::Error::last_os_error();
                // SAFETY: as above; after a refusal too, these are pages of its own.
                done("munmap", unsafe { libc::munmap(elsewhere, LEN as usize) })?;
                if moved == libc::MAP_FAILED {
                    return Err(refused("mremap", &last));
                }
                self.map_again()?;
            }
        }
        Ok(())
    }

    /// Maps where the pages just were, unless another thread has taken the addresses meanwhile.
    fn map_again(&mut self) -> Result<()> {
        let at = std::mem::replace(&mut self.at, ptr::null_mut());
        self.at =
            map(at, OWN | libc::MAP_FIXED_NOREPLACE).or_else(|_| map(ptr::null_mut(), OWN))?;
        Ok(())
    }
}

/// Maps pages. With MAP_FIXED, the caller owns what is there.
fn map(at: *mut libc::c_void, flags: i32) -> Result<*mut libc::c_void> {
    // SAFETY: new pages, where the kernel likes or where the caller says that nothing of others is
    // replaced.
    let mapped = unsafe { libc::mmap(at, LEN as usize, RW, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(refused("mmap", &io::Error::last_os_error()));
    }
    Ok(with_exposed_provenance_mut(mapped.expose_provenance()))
}

fn done(call: &'static str, status: i32) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(refused(call, &io::Error::last_os_error())) }
}

fn refused(call: &'static str, why: &io::Error) -> Error {
    Error::new(ErrorKind::OutOfResources, call).context("why", why)
}

impl Place for Pages {
    fn range(&self) -> Result<AddressRange> {
        AddressRange::new(Address::of_ptr(self.at), LEN)
    }

    fn renew(&mut self, round: u64) -> Result<()> {
        match self.told.clone() {
            Some(import) => {
                let range = self.range()?;
                import.while_changing(range, || self.change(round))
            }
            None => self.change(round),
        }
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        assert!(from.len() as u64 <= LEN);
        // SAFETY: the pages are mapped, and written by nobody else now: transfers have ended.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.at.cast(), from.len()) };
        Ok(())
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        assert!(into.len() as u64 <= LEN);
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(self.at.cast(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.at.is_null() {
            return;
        }
        // SAFETY: the pages are this value's own.
        if let Err(error) = done("munmap", unsafe { libc::munmap(self.at, LEN as usize) }) {
            tracing::error!(%error, "pages of a check were not given back");
        }
    }
}

/// Memory of a device.
#[derive(Debug)]
pub(super) struct OnDevice {
    iface: Arc<dyn Iface>,
    /// `None` between two allocations.
    buffer: Option<DeviceBuffer>,
}

impl OnDevice {
    pub(super) fn allocate(iface: &Arc<dyn Iface>) -> Result<Self> {
        let mut place = Self { iface: Arc::clone(iface), buffer: None };
        place.renew(0)?;
        Ok(place)
    }

    fn buffer(&self) -> Result<&DeviceBuffer> {
        self.buffer.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::BadState, "memory of a check").iface(self.iface.kind())
        })
    }
}

impl Place for OnDevice {
    fn range(&self) -> Result<AddressRange> {
        Ok(self.buffer()?.allocation().range)
    }

    fn renew(&mut self, _round: u64) -> Result<()> {
        self.buffer = None;
        let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
        self.buffer = Some(DeviceBuffer::allocate(&self.iface, &request)?);
        Ok(())
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        self.buffer()?.write(0, from)
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        self.buffer()?.read(0, into)
    }
}
