//! The model of memory windows: types, states, events and rules.
//!
//! [`WindowType::after`] is the state machine, with one table for each type. Domains and the
//! software NIC use it. `docs/memory-windows.md` shows the tables.
//!
//! ```
//! use hmem_core::provider::{WindowEvent, WindowRule, WindowState, WindowType};
//!
//! let after = WindowType::TwoB.after(WindowState::Free, WindowEvent::Bind);
//! assert_eq!(after, Ok(WindowState::Valid));
//! let again = WindowType::TwoB.after(WindowState::Valid, WindowEvent::Bind);
//! assert_eq!(again, Err(WindowRule::BindsWhenFree));
//! let rebound = WindowType::One.after(WindowState::Valid, WindowEvent::Bind);
//! assert_eq!(rebound, Ok(WindowState::Valid));
//! ```

use crate::{Access, Addressing, Error, ErrorKind, handle::ProviderRegion, named_enum};

named_enum! {
    /// The types of memory windows (InfiniBand 10.6.7.2).
    pub enum WindowType {
        /// A window that a function call binds. The provider changes the key at each bind.
        One = "1",
        /// A window that a posted request binds. A bound window keeps its queue pair from being
        /// reset or destroyed.
        TwoA = "2A",
        /// A window that a posted request binds. Its queue pair can be reset or destroyed at any
        /// time.
        TwoB = "2B",
    }
}

named_enum! {
    /// The state of a window's key.
    pub enum WindowState {
        /// The window is not allocated, or was freed.
        Invalid = "Invalid",
        /// The window is not bound, and its key gives no access.
        Free = "Free",
        /// The window is bound, and its key gives access to memory.
        Valid = "Valid",
    }
}

named_enum! {
    /// An event that changes the state of a window, or that a [`WindowRule`] refuses.
    pub enum WindowEvent {
        /// The allocation of a window.
        Allocate = "allocate",
        /// A request to bind the window to at least one byte.
        Bind = "bind",
        /// A request to bind the window to zero bytes.
        BindNothing = "bind to no byte",
        /// A request that the window's owner posted to invalidate the key.
        Invalidate = "invalidate",
        /// A message from a peer that invalidates the key (send with invalidate).
        InvalidateByPeer = "a peer invalidates",
        /// A read, write or atomic by a peer with the key.
        Access = "a peer reads or writes",
        /// A reset of the queue pair through which the window was bound.
        ResetQueuePair = "the endpoint connects again",
        /// The destruction of the queue pair through which the window was bound.
        DestroyQueuePair = "the endpoint is closed",
        /// A request to free the window.
        Deallocate = "free",
    }
}

named_enum! {
    /// A rule for memory windows. An operation that breaks a rule is refused, and the error has the
    /// rule's name as its context value `rule`. A number such as C10-72 is that of the rule in the
    /// InfiniBand specification.
    pub enum WindowRule {
        /// A window must be allocated before its use, and only once.
        Allocated = "allocated",
        /// A type 2 window can be bound only while it is free (o10-37.2.30).
        BindsWhenFree = "binds-when-free",
        /// A type 2 window cannot be bound to zero bytes (o10-37.2.40).
        Type2HasLength = "type-2-has-length",
        /// A type 1 window that is not bound cannot be unbound.
        UnbindsWhenBound = "unbinds-when-bound",
        /// A type 1 window cannot be invalidated (o10-37.2.26).
        Type1IsNotInvalidated = "type-1-is-not-invalidated",
        /// A peer cannot use the key of a free window.
        AccessNeedsBinding = "access-needs-binding",
        /// A queue pair with a bound type 2A window can be neither reset nor destroyed.
        Type2AHoldsQueuePair = "type-2a-holds-queue-pair",
        /// A type 1 window must be bound by a call, and a type 2 window by a posted request.
        BoundByItsVerb = "bound-by-its-verb",
        /// A type 1 window must be bound with virtual addressing (o10-36.2.2).
        Type1IsVirtual = "type-1-is-virtual",
        /// A type 2 window can be accessed and invalidated only through the queue pair that bound
        /// it.
        OwnQueuePair = "own-queue-pair",
        /// A window can be bound only to a region of its own protection domain (C10-72).
        SameDomain = "same-domain",
        /// A window can be bound only to a region with the right MW_BIND (C10-73).
        RegionAllowsWindows = "region-allows-windows",
        /// A window that lets peers write needs a region that the NIC may write (C10-74).
        WritesNeedLocalWrite = "writes-need-local-write",
        /// A window's bytes must be inside its region (C10-75).
        InsideRegion = "inside-region",
        /// A window can grant only rights of peers.
        RemoteRightsOnly = "remote-rights-only",
        /// A window can be bound only to a region that peers reach by virtual addresses, not to a
        /// zero-based region.
        RegionIsVirtual = "region-is-virtual",
        /// A domain in RAW mode has no windows, because windows have no raw keys.
        NoRawKeys = "no-raw-keys",
        /// A window can grant a part of a region only if the NIC enforces the window's bounds.
        NicEnforcesBounds = "nic-enforces-bounds",
        /// With some drivers, a window can be invalidated only while it is bound, because the
        /// driver crashes when it invalidates a free window.
        DriverInvalidatesOnce = "driver-invalidates-once",
    }
}

impl WindowType {
    /// Returns the state of a window after an event, if its state before was `state`.
    ///
    /// # Errors
    /// The rule that refuses the event. The window then keeps its state.
    pub const fn after(
        self,
        state: WindowState,
        event: WindowEvent,
    ) -> Result<WindowState, WindowRule> {
        let table = match self {
            Self::One => &TYPE_1,
            Self::TwoA => &TYPE_2A,
            Self::TwoB => &TYPE_2B,
        };
        table[event as usize][state as usize]
    }
}

/// The results of all events: a row for each [`WindowEvent`], a column for each [`WindowState`].
type Table = [[Result<WindowState, WindowRule>; 3]; 9];

const INVALID: Result<WindowState, WindowRule> = Ok(WindowState::Invalid);
const FREE: Result<WindowState, WindowRule> = Ok(WindowState::Free);
const VALID: Result<WindowState, WindowRule> = Ok(WindowState::Valid);
const UNALLOCATED: Result<WindowState, WindowRule> = Err(WindowRule::Allocated);
const NO_ACCESS: Result<WindowState, WindowRule> = Err(WindowRule::AccessNeedsBinding);

const TYPE_1: Table = {
    const UNBOUND: Result<WindowState, WindowRule> = Err(WindowRule::UnbindsWhenBound);
    const NEVER: Result<WindowState, WindowRule> = Err(WindowRule::Type1IsNotInvalidated);
    [
        // Columns: the state before the event is Invalid, Free or Valid.
        [FREE, UNALLOCATED, UNALLOCATED], // Allocate
        [UNALLOCATED, VALID, VALID],      // Bind
        [UNALLOCATED, UNBOUND, FREE],     // BindNothing
        [UNALLOCATED, NEVER, NEVER],      // Invalidate
        [UNALLOCATED, NEVER, NEVER],      // InvalidateByPeer
        [UNALLOCATED, NO_ACCESS, VALID],  // Access
        [INVALID, FREE, VALID],           // ResetQueuePair
        [INVALID, FREE, VALID],           // DestroyQueuePair
        [UNALLOCATED, INVALID, INVALID],  // Deallocate
    ]
};

const REBIND: Result<WindowState, WindowRule> = Err(WindowRule::BindsWhenFree);
const EMPTY: Result<WindowState, WindowRule> = Err(WindowRule::Type2HasLength);
const HOLDS: Result<WindowState, WindowRule> = Err(WindowRule::Type2AHoldsQueuePair);

const TYPE_2A: Table = [
    // Columns: the state before the event is Invalid, Free or Valid.
    [FREE, UNALLOCATED, UNALLOCATED], // Allocate
    [UNALLOCATED, VALID, REBIND],     // Bind
    [UNALLOCATED, EMPTY, EMPTY],      // BindNothing
    [UNALLOCATED, FREE, FREE],        // Invalidate
    [UNALLOCATED, FREE, FREE],        // InvalidateByPeer
    [UNALLOCATED, NO_ACCESS, VALID],  // Access
    [INVALID, FREE, HOLDS],           // ResetQueuePair
    [INVALID, FREE, HOLDS],           // DestroyQueuePair
    [UNALLOCATED, INVALID, INVALID],  // Deallocate
];

const TYPE_2B: Table = [
    // Columns: the state before the event is Invalid, Free or Valid.
    [FREE, UNALLOCATED, UNALLOCATED], // Allocate
    [UNALLOCATED, VALID, REBIND],     // Bind
    [UNALLOCATED, EMPTY, EMPTY],      // BindNothing
    [UNALLOCATED, FREE, FREE],        // Invalidate
    [UNALLOCATED, FREE, FREE],        // InvalidateByPeer
    [UNALLOCATED, NO_ACCESS, VALID],  // Access
    [INVALID, FREE, VALID],           // ResetQueuePair
    [INVALID, FREE, FREE],            // DestroyQueuePair
    [UNALLOCATED, INVALID, INVALID],  // Deallocate
];

impl WindowRule {
    /// Returns the error for an operation that breaks this rule.
    #[must_use]
    pub fn refuse(self, operation: &'static str) -> Error {
        use ErrorKind as Kind;
        let (kind, remedy) = match self {
            Self::Allocated => (
                Kind::InvalidArgument,
                "allocate a window in this domain: this one was freed or is of another domain",
            ),
            Self::BindsWhenFree => (
                Kind::BadState,
                "invalidate the key of a type 2 window before binding it again \
                 (InfiniBand o10-37.2.30)",
            ),
            Self::Type2HasLength => (
                Kind::ZeroLength,
                "bind at least one byte, or invalidate the key to unbind a type 2 window \
                 (InfiniBand o10-37.2.40)",
            ),
            Self::UnbindsWhenBound => (Kind::BadState, "unbind a window only while it is bound"),
            Self::Type1IsNotInvalidated => (
                Kind::BadState,
                "unbind a type 1 window, or bind it again, to end its key: only type 2 windows are \
                 invalidated (InfiniBand o10-37.2.26)",
            ),
            Self::AccessNeedsBinding => (
                Kind::InvalidKey,
                "ask the peer for a new key: the grant was revoked, or the window is not bound",
            ),
            Self::Type2AHoldsQueuePair => (
                Kind::Busy,
                "invalidate or free the type 2A windows that are bound through the endpoint first",
            ),
            Self::BoundByItsVerb => (
                Kind::BadState,
                "bind a type 1 window by a call, and a type 2 window by a posted request",
            ),
            Self::Type1IsVirtual => (
                Kind::InvalidArgument,
                "bind a type 1 window with virtual addresses (InfiniBand o10-36.2.2)",
            ),
            Self::OwnQueuePair => (
                Kind::AccessDenied,
                "address accesses to the endpoint that bound the type 2 window, and invalidate it \
                 there",
            ),
            Self::SameDomain => (
                Kind::InvalidArgument,
                "use a window, a region and an endpoint of one domain (InfiniBand C10-72)",
            ),
            Self::RegionAllowsWindows => {
                (Kind::AccessDenied, "register the region with Access::MW_BIND (InfiniBand C10-73)")
            }
            Self::WritesNeedLocalWrite => (
                Kind::AccessDenied,
                "register the region with a right by which the NIC writes, such as RECV: the grant \
                 or window lets peers write (InfiniBand C10-74, 10.6.7.2.2)",
            ),
            Self::InsideRegion => {
                (Kind::OutOfBounds, "grant or bind bytes in the region (InfiniBand C10-75)")
            }
            Self::RemoteRightsOnly => (
                Kind::BadAccess,
                "grant or bind remote rights only: REMOTE_READ, REMOTE_WRITE, REMOTE_RMA_WRITE and \
                 REMOTE_ATOMIC",
            ),
            Self::RegionIsVirtual => (Kind::Unsupported, "bind to a region with virtual addresses"),
            Self::NoRawKeys => {
                (Kind::Unsupported, "use a sub-region in RAW mode: windows have no raw keys")
            }
            Self::NicEnforcesBounds => (
                Kind::Unsupported,
                "grant the whole region, or register the part as a region of its own: through a \
                 window of this NIC, a peer reaches the whole region",
            ),
            Self::DriverInvalidatesOnce => (
                Kind::BadState,
                "invalidate a window only while it is bound: this driver crashes on a free one",
            ),
        };
        Error::new(kind, operation).context("rule", self).remedy(remedy)
    }
}

/// The inputs of a window's bind: the part of a region, and the rights to grant.
#[derive(Clone, Copy, Debug)]
pub struct WindowBind {
    /// The region to bind the window to.
    pub region: ProviderRegion,
    /// The offset in the region of the first byte to bind.
    pub offset: u64,
    /// The number of bytes to bind. 0 unbinds a type 1 window.
    pub len: u64,
    /// The rights that the window grants to peers. The domain refuses other rights, and a provider
    /// ignores them.
    pub access: Access,
    /// The kind of addresses by which peers reach the window.
    pub addressing: Addressing,
}

/// The status of a window, as its provider knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowStatus {
    /// The current key of the window.
    pub key: u64,
    /// The state of the window after all requests whose completions the application has read.
    pub state: WindowState,
    /// True while a posted bind or invalidation has not completed.
    pub pending: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MW-04: The rows of each state table stand in the order of the events in
    /// [`WindowEvent::ALL`].
    #[test]
    fn table_rows_are_in_the_order_of_the_events() {
        for kind in WindowType::ALL {
            for (at, event) in WindowEvent::ALL.into_iter().enumerate() {
                assert_eq!(event as usize, at);
            }
            let after = |state, event| kind.after(state, event);
            assert_eq!(after(WindowState::Invalid, WindowEvent::Allocate), FREE);
            assert_eq!(after(WindowState::Free, WindowEvent::Bind), VALID);
            assert_eq!(after(WindowState::Valid, WindowEvent::Access), VALID);
            assert_eq!(after(WindowState::Valid, WindowEvent::Deallocate), INVALID);
        }
    }
}
