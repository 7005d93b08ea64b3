//! libfabric's NICs, which a command uses only if the user names them.

#![allow(unsafe_code, reason = "builds the provider for libfabric's NICs")]

use std::fs;

use hmem::{Builder, Errno, Error, ErrorKind, Result, libfabric::Libfabric};

use crate::{Failure, problem::Problem};

/// The name of the provider on the command line.
pub(crate) const NAME: &str = "libfabric";

/// A provider of libfabric whose NICs the command does not use. [`why_left_out`] has the reason.
pub(crate) const LEFT_OUT: &str = "ofi_rxd";

/// Returns the reason why the command does not use the NICs of [`LEFT_OUT`].
pub(crate) fn why_left_out() -> Problem {
    Problem::new("transfers over ofi_rxd are lost, and its atomics can end the process (1.17)")
        .remedy("use another provider of libfabric, such as tcp;ofi_rxm")
}

/// Adds libfabric's NICs to `builder` if `name`, the NIC on the command line, is `libfabric`,
/// `libfabric/PROVIDER` or `libfabric/PROVIDER:DOMAIN`. Otherwise libfabric is not loaded.
///
/// If the library is absent, the machine lists the provider with the reason.
///
/// # Errors
/// [`Failure::Usage`] if libfabric has no provider of this name. The error lists the providers of
/// libfabric.
pub(crate) fn add(builder: Builder, name: Option<&str>) -> std::result::Result<Builder, Failure> {
    let filter = match name.map(|name| name.split_once('/').unwrap_or((name, ""))) {
        Some((NAME, "")) => None,
        Some((NAME, nic)) => nic.split(':').next(),
        _ => return Ok(builder),
    };
    match open(filter) {
        Err(error) if error.kind() == ErrorKind::InvalidArgument => {
            Err(Failure::Usage(Box::new(error.into())))
        }
        opened => Ok(builder.provider_or_absent(NAME, opened)),
    }
}

/// Opens the provider `libfabric` with the NICs of the libfabric provider `filter`, or with the
/// NICs of all libfabric providers for `None`.
fn open(filter: Option<&str>) -> Result<Libfabric> {
    check_single_thread()?;
    let builder = Libfabric::builder();
    let builder = filter.into_iter().fold(builder, |builder, filter| builder.provider(filter));
    // SAFETY:
    // - `check_single_thread` found no other thread, which could use the environment.
    // - Peers reach the regions of `check` and `perf` alone. `Link` of `check` waits for each
    //   transfer, and memory of a transfer that does not end is never freed. `End` of `perf` closes
    //   the endpoint before the region, when the other side has said that it is done. Memory of a
    //   measurement that failed is never freed.
    unsafe { builder.build() }
}

/// Checks that this process has no other thread, which could use the environment while libfabric is
/// opened. A program with plug-ins may have started threads.
fn check_single_thread() -> Result<()> {
    let refuse = || Error::new(ErrorKind::Unavailable, "load library").provider(NAME);
    let tasks = fs::read_dir("/proc/self/task").map_err(|error| {
        refuse().errno(Errno::of(&error)).remedy("mount /proc: the threads are counted there")
    })?;
    match tasks.count() {
        1 => Ok(()),
        threads => Err(refuse().context("threads", threads).remedy(
            "run the command `hmem`, or call `hmem_cli::main_with` or Python's `hmem.info` \
                 before the program starts threads",
        )),
    }
}
