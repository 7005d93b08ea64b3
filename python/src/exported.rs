//! The memory of a Python object, found by one of three protocols: the buffer protocol, DLPack and
//! the CUDA array interface.

use std::any::Any;

use hmem::{Access, Address, AddressRange, DeviceId, Error, ErrorKind, IfaceKind};
use pyo3::{buffer::PyUntypedBuffer, intern, prelude::*, types::PyDict};

use crate::{
    dlpack::{self, Tensor},
    error::{self, Raise},
};

/// The memory of a Python object.
pub(crate) struct Exported {
    pub(crate) range: AddressRange,
    /// False if the object allows no write.
    pub(crate) writable: bool,
    /// The iface and the device that the object names as the owner of the memory. `None` for host
    /// memory.
    pub(crate) owner: Option<(IfaceKind, Option<DeviceId>)>,
    /// The export, which keeps the memory allocated.
    pub(crate) holder: Holder,
}

/// A buffer, a tensor, or a reference to the object.
pub(crate) type Holder = Box<dyn Any + Send + Sync>;

/// All rights that need no write by the NIC.
const READING: Access = Access::WRITE.union(Access::SEND).union(Access::REMOTE_READ);
/// The default rights for writable memory: those of transfers in both directions.
const WRITING: Access = READING.union(Access::READ).union(Access::RECV).union(Access::REMOTE_WRITE);

fn refusal(why: impl std::fmt::Display, remedy: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "register").context("why", why).remedy(remedy)
}

impl Exported {
    /// Returns the memory of an object.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        // Some types have a buffer protocol that does not know all their elements, and DLPack too.
        let unreadable = match buffer_of(object) {
            None => None,
            Some(Ok(buffer)) => return Self::of_buffer(buffer).or_raise(py),
            Some(Err(error)) => Some(error),
        };
        if let Some(tensor) = Tensor::of(object).map_err(|error| refused_by(object, error))? {
            return Self::of_tensor(tensor).or_raise(py);
        }
        let interface = object
            .getattr_opt(intern!(py, "__cuda_array_interface__"))
            .map_err(|error| refused_by(object, error))?;
        match (interface, unreadable) {
            (Some(interface), _) => Self::of_cuda(object, &interface),
            (None, Some(error)) => Err(refused_by(object, error)),
            (None, None) => Err(error::of(
                py,
                &refusal(
                    format_args!("{} has no memory that can be found", type_name(object)),
                    "pass an object with the buffer protocol, __dlpack__ or \
                     __cuda_array_interface__",
                ),
            )),
        }
    }

    fn of_buffer(buffer: PyUntypedBuffer) -> hmem::Result<Self> {
        // Peers would write the addresses of objects.
        if buffer.format().to_bytes().contains(&b'O') {
            return Err(refusal(
                "the elements are references to Python objects",
                "copy the values",
            ));
        }
        if !buffer.is_c_contiguous() {
            let strides = format_args!("strides {:?} bytes", buffer.strides()).to_string();
            return Err(not_contiguous(buffer.shape(), strides));
        }
        let address = buffer.buf_ptr().expose_provenance() as u64;
        Ok(Self {
            range: range(address, buffer.len_bytes() as u64)?,
            writable: !buffer.readonly(),
            owner: None,
            holder: Box::new(buffer),
        })
    }

    fn of_tensor(tensor: Tensor) -> hmem::Result<Self> {
        let (shape, strides) = tensor.layout();
        if let Some(strides) = strides.filter(|strides| !is_contiguous(shape, strides)) {
            return Err(not_contiguous(shape, format!("strides {strides:?} elements")));
        }
        if tensor.is_copied() {
            return Err(refusal(
                "the tensor exports a copy of its memory",
                "pass a tensor whose library exports the memory itself",
            ));
        }
        let (sort, device) = tensor.device();
        let owner = match sort {
            dlpack::CPU | dlpack::CUDA_HOST | dlpack::ROCM_HOST => None,
            dlpack::CUDA => Some((IfaceKind::CUDA, u32::try_from(device).ok().map(DeviceId))),
            dlpack::CUDA_MANAGED => Some((IfaceKind::CUDA, None)),
            // HIP and SYCL number the devices in another order than the driver.
            dlpack::ROCM => Some((IfaceKind::ROCR, None)),
            dlpack::ONE_API => Some((IfaceKind::ZE, None)),
            other => {
                return Err(refusal(
                    format_args!("hmem knows no memory of DLPack's device type {other}"),
                    "copy the tensor to memory of the host, CUDA, ROCm or oneAPI",
                ));
            }
        };
        let len = bytes(shape, tensor.element_bits())?;
        Ok(Self {
            range: range(tensor.address(), len)?,
            writable: !tensor.is_read_only(),
            owner,
            holder: Box::new(tensor),
        })
    }

    /// Reads the CUDA array interface, versions 0 to 3.
    fn of_cuda(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let interface = interface.cast::<PyDict>()?;
        let item = |name: &str| interface.get_item(name);
        let required = |name: &'static str| {
            item(name)?.ok_or_else(|| {
                let why = format_args!("__cuda_array_interface__ has no {name}").to_string();
                error::of(py, &refusal(why, "report this to the authors of the object's library"))
            })
        };
        let (address, read_only): (u64, bool) = required("data")?.extract()?;
        let shape: Vec<i64> = required("shape")?.extract()?;
        let element: String = required("typestr")?.extract()?;
        // A missing item means the same as None.
        let strides = item("strides")?.filter(|strides| !strides.is_none());
        let has_mask = item("mask")?.is_some_and(|mask| !mask.is_none());
        let strides: Option<Vec<i64>> = strides.map(|strides| strides.extract()).transpose()?;
        let read = || {
            let unknown = || {
                refusal(
                    format_args!("the type {element} of the elements is unknown"),
                    "pass an array of numbers",
                )
            };
            // The byte order, the sort of number, and the size in bytes.
            let size: i64 =
                element.get(2..).and_then(|size| size.parse().ok()).ok_or_else(unknown)?;
            let size = u8::try_from(size).map_err(|_| unknown())?;
            let in_elements: Option<Vec<i64>> = strides.as_ref().map(|strides| {
                let of = |stride: &i64| stride.checked_div(size.into()).unwrap_or(0);
                strides.iter().map(of).collect()
            });
            if let Some(bytes) = strides.as_ref()
                && in_elements.is_some_and(|elements| !is_contiguous(&shape, &elements))
            {
                return Err(not_contiguous(&shape, format!("strides {bytes:?} bytes")));
            }
            if has_mask {
                return Err(refusal("the array has a mask", "pass the array without its mask"));
            }
            Ok(Self {
                range: range(address, bytes(&shape, u64::from(size) * 8)?)?,
                writable: !read_only,
                owner: Some((IfaceKind::CUDA, None)),
                holder: Box::new(object.clone().unbind()),
            })
        };
        read().or_raise(py)
    }

    /// Returns the rights of the registration: those of the caller, or all that the memory allows.
    pub(crate) fn access(&self, access: Option<u64>) -> hmem::Result<Access> {
        let Some(bits) = access else {
            return Ok(if self.writable { WRITING } else { READING });
        };
        let access = Access::from_bits(bits).ok_or_else(|| {
            refusal(
                format_args!("{bits:#x} has bits of no right"),
                "combine hmem.REMOTE_READ and so on",
            )
        })?;
        if access.nic_writes() && !self.writable {
            return Err(Error::new(ErrorKind::AccessDenied, "register")
                .context(
                    "why",
                    format_args!("the object is read-only, and {access} lets NICs write"),
                )
                .remedy("register with the rights WRITE, SEND and REMOTE_READ only"));
        }
        Ok(access)
    }
}

/// Returns the buffer of an object, or `None` if its type has no buffer protocol.
#[allow(unsafe_code, reason = "asks whether the type has the buffer protocol")]
fn buffer_of(object: &Bound<'_, PyAny>) -> Option<PyResult<PyUntypedBuffer>> {
    // SAFETY: the function only reads the type of the object, which the reference keeps alive.
    let has_buffer = unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0;
    has_buffer.then(|| PyUntypedBuffer::get(object))
}

/// Returns the exception for an object that does not hand out its memory, such as a tensor that was
/// freed. The object's own exception becomes the cause.
fn refused_by(object: &Bound<'_, PyAny>, cause: PyErr) -> PyErr {
    let py = object.py();
    let why =
        format_args!("{} does not hand out its memory: {cause}", type_name(object)).to_string();
    let exception =
        error::of(py, &refusal(why, "pass an object that is alive and exports its memory"));
    exception.set_cause(py, Some(cause));
    exception
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "the object".into(), |n| n.to_string())
}

fn not_contiguous(shape: &[impl std::fmt::Debug], strides: String) -> Error {
    refusal(
        format_args!("the object is not contiguous: shape {shape:?}, {strides}"),
        "register a contiguous object (tensor.contiguous(), numpy.ascontiguousarray), or the whole \
         object of which this is a view",
    )
}

/// Returns whether elements lie one after another, the last dimension first. A dimension of one
/// element has no stride that counts, and a tensor without elements is contiguous.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = Some(1_i64);
    shape.iter().zip(strides).rev().all(|(&len, &stride)| {
        let fits = len == 1 || expected == Some(stride);
        expected = expected.and_then(|before| before.checked_mul(len));
        fits
    })
}

/// Returns the size in bytes of a contiguous object.
fn bytes(shape: &[i64], element_bits: u64) -> hmem::Result<u64> {
    shape
        .iter()
        .try_fold(element_bits, |bits, &len| bits.checked_mul(u64::try_from(len).ok()?))
        .map(|bits| bits.div_ceil(8))
        .ok_or_else(|| {
            refusal(format_args!("the shape {shape:?} is impossible"), "pass a real array")
        })
}

/// Returns the range of an object of a known size. Memory without an address was freed.
fn range(address: u64, len: u64) -> hmem::Result<AddressRange> {
    if address == 0 && len > 0 {
        return Err(refusal(
            "the object has no memory: it was freed",
            "register an object that is alive",
        ));
    }
    if len == 0 {
        return Err(Error::new(ErrorKind::ZeroLength, "register")
            .context("why", "the object is empty")
            .remedy("register at least one byte"));
    }
    AddressRange::new(Address(address), len)
}
