//! Tensors that other libraries export by DLPack, in both versions of its structs.
//!
//! # References
//! `dlpack/dlpack.h` of DLPack 1.3, and the specification of `__dlpack__` and
//! `__dlpack_c_exchange_api__` in the Python array API standard.

#![allow(unsafe_code, reason = "reads the structs of DLPack, and calls their functions")]

use std::{
    ffi::{CStr, c_int, c_void},
    ptr::{self, NonNull},
    slice,
};

use pyo3::{
    exceptions::PyTypeError,
    ffi, intern,
    prelude::*,
    types::{PyCapsule, PyDict},
};

/// The major version of the structs in this file.
const MAJOR: u32 = 1;

#[derive(Clone, Copy)]
#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLTensor` of `dlpack.h`: the memory, the type and the shape of a tensor.
#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    type_code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor` of `dlpack.h`: an exported tensor, in the struct without a version.
#[repr(C)]
struct Unversioned {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned` of `dlpack.h`: an exported tensor, in the struct with a version.
#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: RawTensor,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY`: the flag of a tensor that must not be written.
const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`: the flag of a tensor that was copied for the export.
const IS_COPIED: u64 = 2;
/// `DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED`: the flag of a tensor whose elements are shorter
/// than a byte, and are padded to whole bytes.
const IS_PADDED: u64 = 4;

/// The start of `DLPackExchangeAPI`, up to the function that exports a tensor.
#[repr(C)]
struct ExchangeApi {
    version: Version,
    previous: *const Self,
    allocate: *const c_void,
    export: Option<unsafe extern "C" fn(*mut c_void, *mut *mut Versioned) -> c_int>,
}

/// A tensor that another library exports. Dropping it ends the export.
pub(crate) struct Tensor(Managed);

enum Managed {
    Unversioned(NonNull<Unversioned>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: the fields are only read, and the deleter is called once, by a thread that is attached to
// the interpreter, as the deleters of Python libraries need.
unsafe impl Send for Tensor {}
// SAFETY: as for `Send`: no method changes the struct.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Exports a tensor. Returns `None` if the object does not speak DLPack.
    ///
    /// The export does not wait for pending work of a device, because a registration reads no
    /// bytes.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if let Some(tensor) = Self::by_exchange(object)? {
            return Ok(Some(tensor));
        }
        let py = object.py();
        let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
            return Ok(None);
        };
        let options = PyDict::new(py);
        // -1 asks for no synchronisation with a stream. Devices without streams accept only None.
        let (device, _): (i32, i32) =
            object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if [CUDA, CUDA_MANAGED, ROCM].contains(&device) {
            options.set_item(intern!(py, "stream"), -1)?;
        }
        options.set_item(intern!(py, "max_version"), (MAJOR, 0))?;
        let capsule = match export.call((), Some(&options)) {
            // Libraries from before DLPack 1.0 do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                options.del_item(intern!(py, "max_version"))?;
                export.call((), Some(&options))?
            }
            exported => exported?,
        };
        Self::of_capsule(&capsule).map(Some)
    }

    /// Takes the tensor out of a capsule. If this fails, the capsule still owns the tensor.
    fn of_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let managed = if let Some(tensor) = take(capsule, VERSIONED)? {
            Managed::Versioned(tensor)
        } else if let Some(tensor) = take(capsule, UNVERSIONED)? {
            Managed::Unversioned(tensor)
        } else {
            return Err(PyTypeError::new_err("__dlpack__ returned no unused capsule of a tensor"));
        };
        let tensor = Self(managed);
        tensor.check_version()?;
        Ok(tensor)
    }

    /// Exports a tensor by the C functions of its type, if it has them. This is faster than the
    /// call of `__dlpack__`.
    fn by_exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = object.py();
        let attribute = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?;
        let Some(capsule) = attribute.filter(|found| found.is_instance_of::<PyCapsule>()) else {
            return Ok(None);
        };
        // SAFETY: the function checks the capsule and its name.
        let api =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
        let mut api: *const ExchangeApi = api.cast_const().cast();
        if api.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: DLPack says that the struct lives as long as the process, and that all versions
        // begin with the version and a pointer to the struct of an older version, or null.
        let export = unsafe {
            while !api.is_null() && (*api).version.major > MAJOR {
                api = (*api).previous;
            }
            if api.is_null() || (*api).version.major != MAJOR { None } else { (*api).export }
        };
        let Some(export) = export else { return Ok(None) };
        let mut exported = ptr::null_mut();
        // SAFETY: the function is that of the object's type, and the thread is attached to the
        // interpreter. On success the caller owns the tensor.
        let status = unsafe { export(object.as_ptr().cast(), &raw mut exported) };
        match NonNull::new(exported) {
            Some(tensor) if status == 0 => {
                let tensor = Self(Managed::Versioned(tensor));
                tensor.check_version()?;
                Ok(Some(tensor))
            }
            _ => Err(PyErr::fetch(py)),
        }
    }

    fn check_version(&self) -> PyResult<()> {
        match &self.0 {
            // SAFETY: the tensor is alive until `self` is dropped. All versions of the struct begin
            // with the version.
            Managed::Versioned(tensor) => match unsafe { tensor.as_ref().version.major } {
                MAJOR => Ok(()),
                other => Err(PyTypeError::new_err(format!("DLPack {other} is not supported"))),
            },
            Managed::Unversioned(_) => Ok(()),
        }
    }

    fn raw(&self) -> &RawTensor {
        match &self.0 {
            // SAFETY: the tensor is alive until `self` is dropped, and nobody changes it.
            Managed::Unversioned(tensor) => unsafe { &tensor.as_ref().tensor },
            // SAFETY: the tensor is alive until `self` is dropped, and nobody changes it.
            Managed::Versioned(tensor) => unsafe { &tensor.as_ref().tensor },
        }
    }

    fn flags(&self) -> u64 {
        match &self.0 {
            Managed::Unversioned(_) => 0,
            // SAFETY: the tensor is alive until `self` is dropped, and nobody changes it.
            Managed::Versioned(tensor) => unsafe { tensor.as_ref().flags },
        }
    }

    /// Returns true if the library that exports the tensor allows no write to it.
    pub(crate) fn is_read_only(&self) -> bool {
        self.flags() & READ_ONLY != 0
    }

    /// Returns true if the tensor was copied for the export. The exporting library does not use the
    /// copy.
    pub(crate) fn is_copied(&self) -> bool {
        self.flags() & IS_COPIED != 0
    }

    /// Returns the number of the device's type in DLPack, such as [`CUDA`], and the number of the
    /// device.
    pub(crate) fn device(&self) -> (i32, i32) {
        (self.raw().device_type, self.raw().device)
    }

    /// Returns the address of the first element. It is 0 for a tensor without memory.
    pub(crate) fn address(&self) -> u64 {
        let raw = self.raw();
        match raw.data.expose_provenance() as u64 {
            0 => 0,
            data => data.wrapping_add(raw.byte_offset),
        }
    }

    /// Returns the size of an element in bits.
    pub(crate) fn element_bits(&self) -> u64 {
        let bits = u64::from(self.raw().bits);
        // Elements of less than a byte are packed without this flag.
        let bits = if self.flags() & IS_PADDED == 0 { bits } else { bits.next_multiple_of(8) };
        bits * u64::from(self.raw().lanes)
    }

    /// Returns the lengths of the dimensions, and the strides in elements. Without strides, the
    /// tensor is contiguous.
    pub(crate) fn layout(&self) -> (&[i64], Option<&[i64]>) {
        let raw = self.raw();
        let count = usize::try_from(raw.dimensions).unwrap_or(0);
        if count == 0 {
            return (&[], None);
        }
        // SAFETY: DLPack says that the list has one element for each dimension, and that it lives
        // as long as the tensor.
        let shape = unsafe { slice::from_raw_parts(raw.shape, count) };
        // SAFETY: DLPack says that a list which is not null has one element for each dimension, and
        // that it lives as long as the tensor.
        let strides =
            (!raw.strides.is_null()).then(|| unsafe { slice::from_raw_parts(raw.strides, count) });
        (shape, strides)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // The deleters of Python libraries need the interpreter. If it has ended, the memory stays
        // allocated until the process ends.
        Python::try_attach(|_py| match self.0 {
            // SAFETY: `self` owns the tensor, and does not use it after this call.
            Managed::Unversioned(tensor) => unsafe {
                if let Some(deleter) = tensor.as_ref().deleter {
                    deleter(tensor.as_ptr());
                }
            },
            // SAFETY: `self` owns the tensor, and does not use it after this call.
            Managed::Versioned(tensor) => unsafe {
                if let Some(deleter) = tensor.as_ref().deleter {
                    deleter(tensor.as_ptr());
                }
            },
        });
    }
}

/// The names of a capsule before and after its tensor was taken.
struct Names {
    unused: &'static CStr,
    used: &'static CStr,
}

const VERSIONED: Names = Names { unused: c"dltensor_versioned", used: c"used_dltensor_versioned" };
const UNVERSIONED: Names = Names { unused: c"dltensor", used: c"used_dltensor" };

/// Takes the tensor out of a capsule with the name `names.unused`, and renames the capsule to
/// `names.used`. The destructor of a renamed capsule does not free the tensor. Returns `None` if
/// the object is not a capsule with the name `names.unused`.
fn take<T>(capsule: &Bound<'_, PyAny>, names: Names) -> PyResult<Option<NonNull<T>>> {
    let (object, unused) = (capsule.as_ptr(), names.unused.as_ptr());
    // SAFETY: the functions accept every object and every name, and the names are static. The
    // capsule's pointer is that of the struct which DLPack assigns to the name.
    unsafe {
        if ffi::PyCapsule_IsValid(object, unused) == 0 {
            return Ok(None);
        }
        let tensor = ffi::PyCapsule_GetPointer(object, unused);
        if ffi::PyCapsule_SetName(object, names.used.as_ptr()) != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(NonNull::new(tensor.cast()))
    }
}

/// `kDLCPU`: the device type of host memory.
pub(crate) const CPU: i32 = 1;
/// `kDLCUDA`: the device type of CUDA device memory.
pub(crate) const CUDA: i32 = 2;
/// `kDLCUDAHost`: the device type of host memory that CUDA has pinned.
pub(crate) const CUDA_HOST: i32 = 3;
/// `kDLROCM`: the device type of ROCm device memory.
pub(crate) const ROCM: i32 = 10;
/// `kDLROCMHost`: the device type of host memory that ROCm has pinned.
pub(crate) const ROCM_HOST: i32 = 11;
/// `kDLCUDAManaged`: the device type of managed memory of CUDA.
pub(crate) const CUDA_MANAGED: i32 = 13;
/// `kDLOneAPI`: the device type of oneAPI memory.
pub(crate) const ONE_API: i32 = 14;
