//! Errors for failed work completions, by their status.

use hmem_core::{Error, ErrorKind, transfer::CompletionKind};

use super::sys::WcStatus;

/// Remedy in the error for a memory-window bind that the NIC refused.
pub(super) const BIND_REFUSED: &str = "check the bind's range and rights, that the region has \
                                       MW_BIND, and that the window is not bound";

/// Returns the error of a request of `kind` that failed with a work completion status and a vendor
/// code.
pub(super) fn status_error(status: WcStatus, vendor: u32, kind: CompletionKind) -> Error {
    use CompletionKind::{BindWindow, Receive, Send};
    let (error_kind, text, remedy) = match (status, kind) {
        (WcStatus::IBV_WC_LOC_LEN_ERR, Receive) => (
            ErrorKind::Truncated,
            "local length error",
            "post receives as long as the longest message",
        ),
        (WcStatus::IBV_WC_LOC_LEN_ERR, _) => {
            (ErrorKind::MessageTooLong, "local length error", "send less at once")
        }
        // rxe reports this status for a "local length error".
        (WcStatus::IBV_WC_LOC_QP_OP_ERR, Receive) => (
            ErrorKind::Truncated,
            "local queue pair operation error",
            "post receives as long as the longest message: this message did not fit",
        ),
        (WcStatus::IBV_WC_LOC_QP_OP_ERR, BindWindow) => {
            (ErrorKind::AccessDenied, "local queue pair operation error", BIND_REFUSED)
        }
        (WcStatus::IBV_WC_LOC_QP_OP_ERR, _) => (
            ErrorKind::BadState,
            "local queue pair operation error",
            "check the request against the endpoint's limits",
        ),
        (WcStatus::IBV_WC_LOC_PROT_ERR, _) => (
            ErrorKind::AccessDenied,
            "local protection error",
            "use local segments inside open regions that have the right, and call \
             `MemoryRegion::check` for a region of a dma-buf, which may have been revoked",
        ),
        (WcStatus::IBV_WC_WR_FLUSH_ERR, BindWindow) => (
            ErrorKind::Canceled,
            "flushed",
            "call `reconnect` on both sides if the connection went down; if not, check the bind: \
             rxe reports every refused bind so",
        ),
        (WcStatus::IBV_WC_WR_FLUSH_ERR, _) => (
            ErrorKind::Canceled,
            "flushed",
            "call `reconnect` on both sides: an earlier error ended the connection",
        ),
        (WcStatus::IBV_WC_MW_BIND_ERR, _) => {
            (ErrorKind::AccessDenied, "memory window bind error", BIND_REFUSED)
        }
        (WcStatus::IBV_WC_LOC_ACCESS_ERR, _) => (
            ErrorKind::AccessDenied,
            "local access error",
            "check the rights of the region that a remote write targets",
        ),
        (WcStatus::IBV_WC_REM_INV_REQ_ERR, Send) => (
            ErrorKind::Truncated,
            "remote invalid request error",
            "post a longer receive on the peer: the message did not fit",
        ),
        (WcStatus::IBV_WC_REM_INV_REQ_ERR, _) => (
            ErrorKind::InvalidArgument,
            "remote invalid request error",
            "use an operation that the peer's NIC supports",
        ),
        (WcStatus::IBV_WC_REM_ACCESS_ERR, _) => (
            ErrorKind::AccessDenied,
            "remote access error",
            "the key is stale or foreign, the range reaches outside, the right was not granted, or \
             the memory was revoked (the peer's `MemoryRegion::check`): the NIC does not say which",
        ),
        (WcStatus::IBV_WC_RETRY_EXC_ERR, _) => (
            ErrorKind::Unreachable,
            "transport retries exceeded",
            "check that the peer's endpoint is open and has resolved this endpoint: the peer does \
             not answer",
        ),
        (WcStatus::IBV_WC_RNR_RETRY_EXC_ERR, _) => {
            (ErrorKind::Unreachable, "receiver not ready", "post a receive on the peer")
        }
        (WcStatus::IBV_WC_REM_OP_ERR, Send) => (
            ErrorKind::Driver,
            "remote operation error",
            "the peer's NIC could not complete the request: the peer's receive may be shorter than \
             the message, or without rights",
        ),
        (WcStatus::IBV_WC_REM_OP_ERR, _) => {
            (ErrorKind::Driver, "remote operation error", "see the peer's driver log")
        }
        (WcStatus::IBV_WC_REM_ABORT_ERR, _) => (
            ErrorKind::Canceled,
            "remote abort",
            "call `reconnect` on both sides: the peer aborted the request",
        ),
        _ => (ErrorKind::Driver, "failed", "see the driver's log"),
    };
    let operation = match kind {
        CompletionKind::Write => "rdma write",
        CompletionKind::Read => "rdma read",
        CompletionKind::Atomic => "rdma atomic",
        CompletionKind::Send => "send",
        CompletionKind::Receive | CompletionKind::RemoteWrite => "receive",
        CompletionKind::BindWindow => "bind window",
        CompletionKind::InvalidateWindow => "invalidate window",
        _ => "transfer",
    };
    let mut error = Error::new(error_kind, operation)
        .provider("verbs")
        .driver_code(status.name().unwrap_or_default(), i64::from(status.0))
        .context("status", format_args!("{text} ({})", status.0));
    if vendor != 0 {
        error = error.context("vendor", format_args!("{vendor:#x}"));
    }
    error.remedy(remedy)
}

/// Returns the error of a request that the provider canceled because its endpoint was closed or its
/// connection ended.
pub(super) fn canceled(kind: CompletionKind) -> Error {
    status_error(WcStatus::IBV_WC_WR_FLUSH_ERR, 0, kind)
        .context("cause", "the endpoint was closed, or its connection ended")
}
