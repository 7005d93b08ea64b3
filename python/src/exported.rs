//! The memory of a Python object, found by one of three protocols: the buffer protocol, DLPack and
//! the CUDA array interface.

use std::{any::Any, ffi::CStr};

use hmem::{Access, Address, AddressRange, DeviceId, Error, ErrorKind, IfaceKind};
use pyo3::{
    buffer::PyUntypedBuffer,
    intern,
    prelude::*,
    types::{PyDict, PyMemoryView},
};

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
    /// The object that keeps the memory allocated.
    pub(crate) holder: Holder,
}

/// The object that keeps the memory allocated: a buffer, a tensor, or a reference to the Python
/// object.
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
            (Some(interface), _) => {
                let array = CudaArray::of(&interface).map_err(|error| refused_by(object, error))?;
                Self::of_cuda(object, &array).or_raise(py)
            }
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
        if has_references(buffer.format()) {
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
        if let Some(strides) = strides.filter(|strides| !is_contiguous(shape, strides, 1)) {
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

    fn of_cuda(object: &Bound<'_, PyAny>, array: &CudaArray) -> hmem::Result<Self> {
        Ok(Self {
            range: array.range()?,
            writable: !array.read_only,
            owner: Some((IfaceKind::CUDA, None)),
            holder: Box::new(object.clone().unbind()),
        })
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

/// The content of `__cuda_array_interface__`, in versions 0 to 3.
struct CudaArray {
    address: u64,
    read_only: bool,
    shape: Vec<i64>,
    /// The strides in bytes. `None` if the array is contiguous.
    strides: Option<Vec<i64>>,
    /// The type of an element: the byte order, the sort of number and the size in bytes. The type
    /// of a date or duration ends with its unit in brackets.
    element: String,
    has_mask: bool,
}

impl CudaArray {
    fn of(interface: &Bound<'_, PyAny>) -> PyResult<Self> {
        let interface = interface.cast::<PyDict>()?;
        let required = |name| interface.as_any().get_item(name);
        // A missing item means the same as None.
        let optional =
            |name| PyResult::Ok(interface.get_item(name)?.filter(|item| !item.is_none()));
        let (address, read_only) = required("data")?.extract()?;
        Ok(Self {
            address,
            read_only,
            shape: required("shape")?.extract()?,
            strides: optional("strides")?.map(|strides| strides.extract()).transpose()?,
            element: required("typestr")?.extract()?,
            has_mask: optional("mask")?.is_some(),
        })
    }

    fn range(&self) -> hmem::Result<AddressRange> {
        let size = self.element.get(2..).and_then(|size| size.split('[').next());
        let size: u32 = size.and_then(|size| size.parse().ok()).ok_or_else(|| {
            let why = format_args!("the type {} of the elements is unknown", self.element);
            refusal(why, "pass an array of numbers")
        })?;
        if let Some(strides) = &self.strides
            && !is_contiguous(&self.shape, strides, size.into())
        {
            return Err(not_contiguous(&self.shape, format!("strides {strides:?} bytes")));
        }
        if self.has_mask {
            return Err(refusal("the array has a mask", "pass the array without its mask"));
        }
        range(self.address, bytes(&self.shape, u64::from(size) * 8)?)
    }
}

/// Returns the buffer of an object, or `None` if its type has no buffer protocol.
#[allow(unsafe_code, reason = "asks whether the type has the buffer protocol")]
fn buffer_of(object: &Bound<'_, PyAny>) -> Option<PyResult<PyUntypedBuffer>> {
    // SAFETY: the function only reads the type of the object, which the reference keeps alive.
    let has_buffer = unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0;
    has_buffer.then(|| {
        // The types of ctypes leave out the strides, which a memoryview adds.
        PyUntypedBuffer::get(object)
            .or_else(|_| PyUntypedBuffer::get(PyMemoryView::from(object)?.as_any()))
    })
}

/// Returns whether a buffer's format has elements that are references to Python objects. The name
/// of a field stands between colons in the format, and is skipped.
fn has_references(format: &CStr) -> bool {
    let mut types = format.to_bytes().split(|byte| *byte == b':').step_by(2);
    types.any(|part| part.contains(&b'O'))
}

/// Returns the exception for an object that does not hand out its memory, such as a tensor that was
/// freed. The object's own exception becomes the cause.
fn refused_by(object: &Bound<'_, PyAny>, cause: PyErr) -> PyErr {
    let py = object.py();
    // torch adds its C++ stack to the message. The cause has all of it.
    let cause_text = cause.to_string();
    let first_line = cause_text.lines().next().unwrap_or_default();
    let why = format!("{} does not hand out its memory: {first_line}", type_name(object));
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

/// Returns whether the elements lie one after another in memory, in row-major order. `element` is
/// the size of an element in the unit of the strides. The stride of a dimension of one element is
/// ignored. A tensor without elements is contiguous.
fn is_contiguous(shape: &[i64], strides: &[i64], element: i64) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = Some(element);
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

/// Returns the range of an object of a known size. Fails for an object without bytes, and for an
/// object without an address, which was freed.
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
