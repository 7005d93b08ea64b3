//! The driver's functions. Names and answers follow `cuda.h` (12.9 and 13.5). Comments name the
//! answers that come from recorded runs of the real library without a device. Text in quotation
//! marks in these files is from `cuda.h`.

use std::ffi::{c_char, c_int};

use hmem_iface_cuda::sys::{CuDevice, CuResult};

use crate::{answers::put, state::State};

/// Defines functions of the driver. Each counts its calls, returns injected faults, and otherwise
/// runs its body.
macro_rules! driver {
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($state:ident $(, $argument:ident: $type:ty)*) $body:block
    )+) => {
        $(
            $(#[doc = $doc])*
            ///
            /// # Safety
            /// The caller must follow the rules that `cuda.h` states for this function.
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CuResult {
                // As in the real library (535.261 and 550.163, disassembled), each function returns
                // CUDA_ERROR_DEINITIALIZED (4) after the driver's teardown, and jumps to its code
                // otherwise.
                core::arch::naked_asm!(
                    "cmp dword ptr [rip + {torn_down}], 0x321cba00",
                    "je 2f",
                    "jmp {answer}",
                    "2:",
                    "mov eax, 4",
                    "ret",
                    // Aligns the function's own section to 16 bytes, as in the real library.
                    ".balign 16, 0xcc",
                    torn_down = sym crate::TORN_DOWN,
                    answer = sym $name::answer,
                )
            }

            $(#[doc = $doc])*
            ///
            /// # Safety
            /// The caller must follow the rules that `cuda.h` states for this function.
            #[cfg(not(target_arch = "x86_64"))]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CuResult {
                // SAFETY: the caller upholds the rules of `cuda.h` for this function.
                unsafe { $name::answer($($argument),*) }
            }

            #[allow(non_snake_case)]
            mod $name {
                use super::*;

                /// # Safety
                /// The caller must follow the rules that `cuda.h` states for this function.
                pub(super) unsafe extern "C" fn answer($($argument: $type),*) -> CuResult {
                    crate::enter(stringify!($name), |$state: &mut State| -> Answer { $body })
                }
            }
        )+

        /// Returns the address of a function that this file defines.
        pub(super) fn symbol(name: &str) -> Option<*const ()> {
            Some(match name {
                $(stringify!($name) => $name as *const (),)+
                _ => return None,
            })
        }

        /// Names of the functions that this file defines.
        pub(super) const SYMBOLS: &[&str] = &[$(stringify!($name)),+];
    };
}

mod addresses;
mod contexts;
mod devices;
mod memory;
mod sharing;
mod streams;
mod vmm;

pub use self::{addresses::*, contexts::*, devices::*, memory::*, sharing::*, streams::*, vmm::*};

type Answer = Result<(), CuResult>;

const INVALID_VALUE: CuResult = CuResult::CUDA_ERROR_INVALID_VALUE;
const NOT_SUPPORTED: CuResult = CuResult::CUDA_ERROR_NOT_SUPPORTED;
const INVALID_HANDLE: CuResult = CuResult::CUDA_ERROR_INVALID_HANDLE;

fn device(state: &State, device: CuDevice) -> Result<u32, CuResult> {
    u32::try_from(device)
        .ok()
        .filter(|device| *device < state.profile.devices)
        .ok_or(CuResult::CUDA_ERROR_INVALID_DEVICE)
}

/// Writes text with a NUL to `place`, which has `len` bytes.
fn text(place: *mut c_char, len: c_int, text: &str) -> Answer {
    if text.len() >= len.max(0) as usize {
        return Err(INVALID_VALUE);
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        put(place.wrapping_add(at), byte as c_char)?;
    }
    Ok(())
}

/// Functions of one source file: the lookup of their addresses, and their names.
type Table = (fn(&str) -> Option<*const ()>, &'static [&'static str]);

const TABLES: &[Table] = &[
    (addresses::symbol, addresses::SYMBOLS),
    (contexts::symbol, contexts::SYMBOLS),
    (devices::symbol, devices::SYMBOLS),
    (memory::symbol, memory::SYMBOLS),
    (sharing::symbol, sharing::SYMBOLS),
    (streams::symbol, streams::SYMBOLS),
    (vmm::symbol, vmm::SYMBOLS),
];

/// Returns the address of a function of the driver by its name.
pub(crate) fn symbol(name: &str) -> Option<*const ()> {
    TABLES.iter().find_map(|(symbol, _)| symbol(name))
}

/// Returns a function's name as a static string; `None` if the driver has no such function.
pub(crate) fn known(name: &str) -> Option<&'static str> {
    TABLES.iter().flat_map(|(_, names)| *names).copied().find(|known| *known == name)
}
