//! Functions for contexts.

use std::ffi::{c_int, c_uint};

use hmem_iface_cuda::sys::{CuContext, CuDevice, CuResult};

use super::{Answer, device, put};
use crate::state::{Context, State};

driver! {
    fn cuDevicePrimaryCtxRetain(state, context: *mut CuContext, dev: CuDevice) {
        let number = device(state, dev)?;
        let known = state.contexts.iter().find(|(_, one)| one.primary && one.device == number);
        let id = match known {
            Some((id, _)) => *id,
            None => {
                let id = state.handle();
                let context = Context { device: number, primary: true, ..Context::default() };
                state.contexts.insert(id, context);
                id
            }
        };
        put(context, CuContext(id))?;
        state.contexts.entry(id).or_default().references += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(state, dev: CuDevice) {
        let number = device(state, dev)?;
        let known = state.contexts.iter_mut().find(|(_, one)| one.primary && one.device == number);
        let Some((id, context)) = known else { return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT) };
        context.references -= 1;
        if context.references == 0 {
            // `cuda.h`: "The context is automatically reset once the last reference to it is
            // released."
            let id = *id;
            state.destroy_context(id);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(state, dev: CuDevice) {
        let number = device(state, dev)?;
        let known = state.contexts.iter().find(|(_, one)| one.primary && one.device == number);
        let Some((&id, one)) = known else { return Ok(()) };
        // `cuda.h`: "Destroy all allocations and reset all state on the primary context."
        // "Resetting the primary context does not release it".
        let context =
            Context { references: one.references, device: number, primary: true, flags: 0 };
        state.destroy_context(id);
        state.contexts.insert(id, context);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(state, dev: CuDevice, flags: *mut c_uint, active: *mut c_int) {
        let number = device(state, dev)?;
        let known = state.contexts.values().find(|one| one.primary && one.device == number);
        put(flags, known.map_or(0, |one| one.flags))?;
        put(active, known.is_some().into())
    }

    fn cuCtxCreate_v2(state, context: *mut CuContext, flags: c_uint, dev: CuDevice) {
        let number = device(state, dev)?;
        let id = state.handle();
        state.contexts.insert(id, Context { device: number, flags, references: 1, primary: false });
        // `cuda.h`: "Creates a new CUDA context and associates it with the calling thread."
        state.stack(|stack| stack.push(id));
        put(context, CuContext(id))
    }

    fn cuCtxDestroy_v2(state, context: CuContext) {
        if state.contexts.get(&context.0).is_none_or(|one| one.primary) {
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        // `cuda.h`: "If ctx is current to the calling thread then ctx will also be popped."
        state.stack(|stack| {
            stack.pop_if(|top| *top == context.0);
        });
        state.destroy_context(context.0);
        Ok(())
    }

    fn cuCtxGetCurrent(state, context: *mut CuContext) {
        put(context, CuContext(state.stack(|stack| stack.last().copied()).unwrap_or(0)))
    }

    fn cuCtxGetDevice(state, dev: *mut CuDevice) {
        let current = state.current()?;
        put(dev, state.device_of(current).cast_signed())
    }

    fn cuCtxPushCurrent_v2(state, context: CuContext) {
        if !state.contexts.contains_key(&context.0) {
            state.undefined_calls += 1;
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        state.stack(|stack| stack.push(context.0));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(state, context: *mut CuContext) {
        let popped = state.stack(Vec::pop).ok_or(CuResult::CUDA_ERROR_INVALID_CONTEXT)?;
        // Unspecified, so the fake decides: the pointer may be null.
        if context.is_null() { Ok(()) } else { put(context, CuContext(popped)) }
    }

    fn cuCtxSetCurrent(state, context: CuContext) {
        // `cuda.h`: "If ctx is NULL then this will be equivalent to popping the top" of the stack.
        // Otherwise `context` replaces the top.
        if !context.is_null() && !state.contexts.contains_key(&context.0) {
            return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
        }
        state.stack(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(context.0);
            }
        });
        Ok(())
    }

    fn cuCtxSynchronize(state) {
        let current = state.current()?;
        let own = state.streams.iter().filter(|(_, one)| one.context == current);
        let streams: Vec<_> = own.map(|(id, _)| *id).collect();
        for stream in streams {
            state.finish(stream);
        }
        Ok(())
    }

    fn cuCtxGetFlags(state, flags: *mut c_uint) {
        let current = state.current()?;
        put(flags, state.contexts[&current].flags)
    }

    fn cuCtxSetFlags(state, flags: c_uint) {
        let current = state.current()?;
        state.contexts.entry(current).or_default().flags = flags;
        Ok(())
    }
}
