//! The driver calls that an iface needs.

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use hmem_core::{
    Address, AddressRange, DeviceId, Error, ErrorKind, IfaceKind, Result,
    cause::RefusalCause,
    iface::{Device, Facet},
};

use crate::exports;

/// One allocation of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Block<H> {
    /// Addresses of the allocation.
    pub range: AddressRange,
    /// The device that holds it.
    pub device: DeviceId,
    /// The driver's own handle of the allocation.
    pub handle: H,
}

/// Bytes of an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Part<H> {
    /// The allocation.
    pub block: Block<H>,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl<H> Part<H> {
    /// The first address.
    #[must_use]
    pub fn address(&self) -> Address {
        Address(self.block.range.start().0 + self.offset)
    }
}

/// A dma-buf of a driver.
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf.
    pub fd: OwnedFd,
    /// Bytes from its start to the exported range.
    pub offset: u64,
}

/// Driver calls from which [`Announced`](crate::Announced) builds an iface.
///
/// # Safety
/// An iface makes the promises of [`Iface`](hmem_core::Iface) on behalf of its driver. So an
/// implementation promises:
///
/// - [`allocate`](Self::allocate) returns memory of at least the requested length, which nothing
///   else uses until [`free`](Self::free) succeeds.
/// - [`write`](Self::write) and [`read`](Self::read) touch the named bytes and no others, on any
///   number of threads at once, and have ended when they return.
/// - [`export`](Self::export) returns a dma-buf that holds the bytes of the range from `offset` on.
pub unsafe trait Driver: fmt::Debug + Send + Sync + 'static {
    /// The driver's handle of an allocation, besides its address.
    type Handle: Copy + fmt::Debug + Send + Sync + 'static;

    /// The number of the iface.
    const KIND: IfaceKind;

    /// The name of the iface.
    const NAME: &'static str;

    /// Returns the number of devices, which does not change.
    fn device_count(&self) -> u32;

    /// Returns the devices, numbered from 0.
    ///
    /// # Errors
    /// Unavailable if the driver lost them.
    fn devices(&self) -> Result<Vec<Device>>;

    /// Returns true if this process already uses the device. Starts nothing.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn is_active(&self, device: DeviceId) -> Result<bool>;

    /// Allocates device memory.
    ///
    /// # Errors
    /// Unavailable if the driver was not started; OutOfResources.
    fn allocate(&self, device: DeviceId, len: u64) -> Result<(Address, Self::Handle)>;

    /// Frees memory.
    ///
    /// # Safety
    /// [`allocate`](Self::allocate) returned the memory, and nothing uses it any longer.
    ///
    /// # Errors
    /// The error that the driver reported. The memory is still allocated.
    unsafe fn free(&self, device: DeviceId, address: Address, handle: Self::Handle) -> Result<()>;

    /// Copies from host memory at `from` to device memory.
    ///
    /// # Safety
    /// `from` is readable for the length of the part. The part's memory is not freed during the call.
    ///
    /// # Errors
    /// The error that the driver reported.
    unsafe fn write(&self, to: &Part<Self::Handle>, from: Address) -> Result<()>;

    /// Copies from device memory to host memory at `to`.
    ///
    /// # Safety
    /// `to` is writable for the length of the part. The part's memory is not freed during the call.
    ///
    /// # Errors
    /// The error that the driver reported.
    unsafe fn read(&self, from: &Part<Self::Handle>, to: Address) -> Result<()>;

    /// Exports the whole pages that hold a part of the allocation. The first and the last page may
    /// reach beyond an allocation that does not fill its pages.
    ///
    /// # Errors
    /// Unsupported where the driver or the kernel cannot.
    fn export(&self, block: &Block<Self::Handle>, pages: AddressRange) -> Result<DmaBuf>;

    /// Makes inbound RMA writes visible to work that the device starts after this call.
    ///
    /// # Errors
    /// Unsupported by default: the driver has no call for it, and does not say that the device needs
    /// none.
    fn flush(&self, device: DeviceId) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "flush_inbound")
            .iface(Self::KIND)
            .device(device)
            .context("reason", "no call of the driver flushes a NIC's writes")
            .remedy("have the NIC read a byte that it wrote before the device uses the memory"))
    }

    /// Releases what the driver keeps for copies. Called when nothing is allocated or in flight.
    ///
    /// # Errors
    /// The error that the driver reported. The call can be repeated.
    fn close(&self) -> Result<()> {
        Ok(())
    }

    /// Returns true if the dma-buf has, or may have, users besides the descriptor `dma_buf`, such as
    /// a NIC that has it registered. The default asks the kernel.
    fn others_use(&self, dma_buf: BorrowedFd<'_>) -> bool {
        exports::others_use(dma_buf)
    }

    /// Returns the reason why the driver has no dma-bufs, or `None` if it has them.
    fn no_dma_buf(&self) -> Option<Error> {
        None
    }

    /// Returns the reason why the iface lacks a facet.
    fn lacks(&self, facet: Facet) -> Error {
        facet.unavailable(Self::KIND).context("reason", "the driver has no such call")
    }

    /// Returns the causes of refusals that only this driver has.
    fn causes(&self) -> &'static [RefusalCause] {
        &[]
    }
}

/// A driver that a builder opens. [`Announced`](crate::Announced) gets `open` and `builder` from it.
pub trait Open: Driver + Sized {
    /// The builder.
    type Builder: Default;

    /// Environment variable that names the library to load.
    const LIBRARY_VARIABLE: &'static str;

    /// Environment variable that lets the iface start the vendor's runtime if it is 1.
    const START_VARIABLE: &'static str;

    /// Returns whether the iface may start the runtime: as the builder decided, else as the
    /// environment says.
    fn may_start(decided: Option<bool>) -> bool {
        let in_environment =
            || std::env::var_os(Self::START_VARIABLE).is_some_and(|set| set == "1");
        decided.unwrap_or_else(in_environment)
    }

    /// Opens the driver.
    ///
    /// # Errors
    /// Unavailable without the library, a symbol of it, or a device.
    fn open(builder: Self::Builder) -> Result<Self>;
}
