//! Functions for initialisation and devices.

use std::ffi::{c_char, c_int, c_uint};

use hmem_iface_cuda::sys::{CuDevice, CuDeviceAttribute, CuResult};

use super::{Answer, INVALID_VALUE, device, put, text};
use crate::{answers::attribute_of_device, state::State};

driver! {
    fn cuInit(state, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // A recorded run shows: without a device, the real library returns 100.
        if state.profile.devices == 0 {
            return Err(CuResult::CUDA_ERROR_NO_DEVICE);
        }
        state.started = true;
        Ok(())
    }

    fn cuDriverGetVersion(state, version: *mut c_int) { put(version, state.profile.version) }

    fn cuDeviceGetCount(state, count: *mut c_int) { put(count, state.profile.devices as c_int) }

    fn cuDeviceGet(state, place: *mut CuDevice, ordinal: c_int) {
        device(state, ordinal)?;
        put(place, ordinal)
    }

    fn cuDeviceGetName(state, name: *mut c_char, len: c_int, dev: CuDevice) {
        let number = device(state, dev)?;
        text(name, len, &format!("NVIDIA Fake {} {number}", state.profile.name))
    }

    fn cuDeviceTotalMem_v2(state, bytes: *mut usize, dev: CuDevice) {
        device(state, dev)?;
        put(bytes, state.profile.memory as usize)
    }

    fn cuDeviceGetPCIBusId(state, id: *mut c_char, len: c_int, dev: CuDevice) {
        // The PCI address is in capitals, as in the example of `cuDeviceGetByPCIBusId`.
        text(id, len, &format!("0000:{:02X}:00.0", 0x3A + device(state, dev)?))
    }

    fn cuDeviceGetAttribute(state, value: *mut c_int, attribute: CuDeviceAttribute, dev: CuDevice) {
        device(state, dev)?;
        put(value, attribute_of_device(&state.profile, attribute)?)
    }
}
