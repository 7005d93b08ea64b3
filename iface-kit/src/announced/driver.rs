//! The driver calls that an iface needs.

#![allow(unsafe_code, reason = "the trait of drivers, which copies and frees by address")]

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use hmem_core::{
    Address, AddressRange, DeviceId, Error, ErrorKind, IfaceKind, Result,
    cause::RefusalCause,
    environment,
    iface::{Device, Facet},
};

use super::exports;

/// One allocation of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Block<H> {
    /// Address range of the allocation.
    pub range: AddressRange,
    /// Device on which the memory was allocated.
    pub device: DeviceId,
    /// Handle with which the driver identifies the allocation, in addition to the address.
    pub handle: H,
}

/// A range of bytes within one allocation.
#[derive(Clone, Copy, Debug)]
pub struct BlockRange<H> {
    /// The allocation that contains the range.
    pub block: Block<H>,
    /// Distance in bytes from the start of the allocation to the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

impl<H> BlockRange<H> {
    /// Returns the first address of the range.
    #[must_use]
    pub fn address(&self) -> Address {
        Address(self.block.range.start().0 + self.offset)
    }
}

/// A dma-buf that a driver exported.
#[derive(Debug)]
pub struct DmaBuf {
    /// Descriptor of the dma-buf, which the caller owns.
    pub fd: OwnedFd,
    /// Distance in bytes from the start of the dma-buf to the exported pages.
    pub offset: u64,
}

/// Driver calls from which [`Announced`](super::Announced) builds an iface.
///
/// # Safety
/// The iface relies on the driver to keep the promises of [`Iface`](hmem_core::Iface). An
/// implementation of this trait promises:
///
/// - [`allocate`](Self::allocate) returns memory of at least the requested length, which nothing
///   else uses until [`free`](Self::free) succeeds.
/// - [`write`](Self::write) and [`read`](Self::read) access only the bytes of the [`BlockRange`]
///   and as many bytes of host memory. Any number of threads may call these methods at once. The
///   copy has ended when the method returns.
/// - [`export`](Self::export) returns a dma-buf in which the bytes of `pages` begin at
///   [`DmaBuf::offset`].
pub unsafe trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Handle with which the driver identifies an allocation, in addition to the address.
    type Handle: Copy + fmt::Debug + Send + Sync + 'static;

    /// Number that identifies the iface.
    const KIND: IfaceKind;

    /// The name of the iface.
    const NAME: &'static str;

    /// Returns the number of devices, which must not change while the iface is open.
    fn device_count(&self) -> u32;

    /// Returns the devices, numbered from 0.
    ///
    /// # Errors
    /// Unavailable if the devices were lost, after a reset for example.
    fn devices(&self) -> Result<Vec<Device>>;

    /// Returns true if this process already uses the device. Does not start the vendor's runtime.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn is_active(&self, device: DeviceId) -> Result<bool>;

    /// Allocates `len` bytes of device memory. `len` is a multiple of the host's page size.
    ///
    /// # Errors
    /// - Unavailable if the vendor's runtime was not started.
    /// - OutOfResources if the device has too little memory.
    /// - Otherwise the error that the driver reported.
    fn allocate(&self, device: DeviceId, len: u64) -> Result<(Address, Self::Handle)>;

    /// Frees memory.
    ///
    /// # Safety
    /// [`allocate`](Self::allocate) must have returned the memory, and nothing may use it any
    /// longer.
    ///
    /// # Errors
    /// The error that the driver reported. The memory is still allocated.
    unsafe fn free(&self, device: DeviceId, address: Address, handle: Self::Handle) -> Result<()>;

    /// Copies from host memory at `from` to device memory.
    ///
    /// # Safety
    /// `to.len` bytes at `from` must be readable. The device memory must not be freed during the
    /// call.
    ///
    /// # Errors
    /// The error that the driver reported.
    unsafe fn write(&self, to: &BlockRange<Self::Handle>, from: Address) -> Result<()>;

    /// Copies from device memory to host memory at `to`.
    ///
    /// # Safety
    /// `from.len` bytes at `to` must be writable. The device memory must not be freed during the
    /// call.
    ///
    /// # Errors
    /// The error that the driver reported.
    unsafe fn read(&self, from: &BlockRange<Self::Handle>, to: Address) -> Result<()>;

    /// Exports `pages`, a range of whole pages that contains part of the allocation. The first and
    /// the last page may also contain bytes outside the allocation.
    ///
    /// # Errors
    /// Unsupported if the driver or the kernel cannot export the pages.
    fn export(&self, block: &Block<Self::Handle>, pages: AddressRange) -> Result<DmaBuf>;

    /// Makes inbound RMA writes visible to work that the device starts after this call.
    ///
    /// # Errors
    /// The default returns Unsupported. Implementations override this method in two cases: the
    /// driver has a call for the flush, or the vendor documents that none is needed.
    fn flush(&self, device: DeviceId) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "flush_inbound")
            .iface(Self::KIND)
            .device(device)
            .context("why", "no call of the driver flushes a NIC's writes")
            .remedy("have the NIC read a byte that it wrote before the device uses the memory"))
    }

    /// Releases the resources that the driver keeps for copies, such as buffers. The iface calls
    /// this method when no memory is allocated or announced, and no copy is in flight.
    ///
    /// # Errors
    /// The error that the driver reported. The iface still works, and may call this method again.
    fn close(&self) -> Result<()> {
        Ok(())
    }

    /// Returns true if the dma-buf has users besides the descriptor `dma_buf`, such as a NIC with a
    /// registration, or if the number of users is unknown. The default reads the number of users
    /// from procfs.
    fn others_use(&self, dma_buf: BorrowedFd<'_>) -> bool {
        exports::others_use(dma_buf)
    }

    /// Returns the reason why the driver cannot export dma-bufs, or `None` if it can.
    fn no_dma_buf(&self) -> Option<Error> {
        None
    }

    /// Returns the error for a facet (an optional trait) that the iface does not implement.
    fn lacks(&self, facet: Facet) -> Error {
        facet.unavailable(Self::KIND).context("why", "the driver has no such call")
    }

    /// Returns the causes of refusals by this driver, in addition to the general causes.
    fn causes(&self) -> &'static [RefusalCause] {
        &[]
    }
}

/// A driver that a builder opens. For such drivers [`Announced`](super::Announced) has the methods
/// `open` and `builder`.
pub trait Open: Driver + Sized {
    /// The builder that opens the iface.
    type Builder: Default;

    /// Environment variable that names the library to load.
    const LIBRARY_VARIABLE: &'static str;

    /// Environment variable that permits the iface to start the vendor's runtime. Its values are
    /// those of libfabric's booleans, such as 1 and 0.
    const START_VARIABLE: &'static str;

    /// Returns true if the iface may start the vendor's runtime. The setting of the builder,
    /// `decided`, takes precedence. If it is `None`, the variable
    /// [`START_VARIABLE`](Self::START_VARIABLE) decides, unless `without_environment` is true.
    /// Returns false if neither decides.
    ///
    /// # Errors
    /// InvalidArgument if the variable decides and is not a boolean.
    fn may_start(decided: Option<bool>, without_environment: bool) -> Result<bool> {
        if decided.is_some() || without_environment {
            return Ok(decided.unwrap_or(false));
        }
        let may_start = environment::boolean(Self::START_VARIABLE);
        Ok(may_start.map_err(|error| error.iface(Self::KIND))?.unwrap_or(false))
    }

    /// Opens the driver.
    ///
    /// # Errors
    /// - InvalidArgument if [`START_VARIABLE`](Self::START_VARIABLE) decides and is not a boolean.
    /// - Unavailable if the library, a required symbol or a device is absent, or the library
    ///   refuses a call.
    fn open(builder: Self::Builder) -> Result<Self>;
}
