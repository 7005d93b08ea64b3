//! The means by which a test controls a back end: the test makes a call of the back end wait or
//! fail, and counts calls.

use std::fmt::Debug;

use hmem_core::{
    Address, Errno,
    provider::{NicState, Provider},
    testing::Gate,
};
use hmem_iface_system::Simulated;
use hmem_provider_loopback::{Faults, Loopback, NicCall};

/// A kind of call that a test makes wait or fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// The registration of memory, before its key is valid.
    Register,
    /// The registration of a part of a region.
    RegisterSub,
    /// The deregistration of a region, before it changes anything.
    Deregister,
    /// The refresh of a region's pages. Transfers through the region fail meanwhile.
    Refresh,
    /// The execution of a write, read, atomic or send, after its checks and before it changes any
    /// memory.
    Transfer,
    /// The allocation of a memory window.
    AllocWindow,
    /// The bind of a memory window, before it changes anything.
    BindWindow,
}

/// Control of tests over a provider, which a back end may offer to [`Suite`](crate::Suite). Without
/// this control, the suite ignores the behaviours that need it. If
/// [`tells_reasons`](Self::tells_reasons) is false, or there is no control, the suite accepts a
/// refused access with any kind of access error.
pub trait TestControl: Debug + Send + Sync {
    /// Makes the next call of this kind wait until the gate is released or dropped. Returns `None`
    /// if the back end cannot hold such calls.
    fn hold(&self, call: Call) -> Option<Gate>;

    /// Makes the `nth` call of this kind from now on fail with `errno`, where 1 is the next.
    /// Returns false if the back end cannot do so.
    fn fail_nth(&self, call: Call, nth: u64, errno: Errno) -> bool;

    /// Returns the number of calls of this kind, counted from the first time that this method was
    /// called. Returns `None` if the back end does not count them.
    fn calls(&self, call: Call) -> Option<u64>;

    /// Sets the state of the provider's first NIC, as the failure or repair of a device or cable
    /// does. Returns false if the back end cannot do so.
    fn set_nic_state(&self, state: NicState) -> bool {
        let _unused = state;
        false
    }

    /// Revokes the dma-bufs that were exported from the allocation of `device` at `address`. When
    /// the call returns, the NIC does not access them. Returns false if the back end does not
    /// honour revocations.
    fn revoke(&self, device: &Simulated, address: Address) -> bool {
        let _unused = (device, address);
        false
    }

    /// Returns true if the kind of error of a refused access tells the reason. RDMA devices report
    /// the same error for an invalid key, a range out of bounds, an absent page and a missing
    /// right.
    fn tells_reasons(&self) -> bool;
}

/// Controls the software NIC. The fault injector holds, fails and counts calls. The provider sets
/// the state of the NIC.
impl TestControl for (Loopback, Faults) {
    fn hold(&self, call: Call) -> Option<Gate> {
        Some(self.1.hold(nic_call(call)))
    }

    fn fail_nth(&self, call: Call, nth: u64, errno: Errno) -> bool {
        self.1.fail_nth(nic_call(call), nth, errno);
        true
    }

    fn calls(&self, call: Call) -> Option<u64> {
        self.1.start_counting();
        Some(self.1.calls(nic_call(call)))
    }

    fn set_nic_state(&self, state: NicState) -> bool {
        let nics = self.0.nics().expect("list the NICs");
        self.0.set_nic_state(&nics[0].nic.name, state).expect("a NIC of the fabric");
        true
    }

    fn revoke(&self, device: &Simulated, address: Address) -> bool {
        device.revoke_exports(address).expect("memory of the device")
    }

    fn tells_reasons(&self) -> bool {
        true
    }
}

fn nic_call(call: Call) -> NicCall {
    match call {
        Call::Register => NicCall::Register,
        Call::RegisterSub => NicCall::RegisterSub,
        Call::Deregister => NicCall::Deregister,
        Call::Refresh => NicCall::Refresh,
        Call::Transfer => NicCall::Transfer,
        Call::AllocWindow => NicCall::AllocWindow,
        Call::BindWindow => NicCall::BindWindow,
    }
}
