//! Reports what this machine lacks for the tests of this package. A missing property is ignored
//! with the reason, which names what the tests then leave out.

mod machine;
mod trials;

use trials::{Outcome, skip, trials};

trials! {
    /// REL-05
    pages_can_be_pinned,
    /// REL-05
    mib_64_can_be_locked,
    /// REL-05
    userfaultfd_can_be_used,
    /// REL-05
    huge_pages_are_reserved,
    /// REL-05
    dma_bufs_can_be_made,
}

fn needs(missing: Option<String>, left_out: &str) -> Outcome {
    skip(missing.map(|reason| format!("{reason}; left out: {left_out}")))
}

fn pages_can_be_pinned() -> Outcome {
    let reason = machine::without_pinned_pages().map(str::to_owned);
    needs(
        reason,
        "providers of the conformance suite, and other tests, in which the NIC pins pages",
    )
}

fn mib_64_can_be_locked() -> Outcome {
    let lockable = machine::lockable_memory();
    let reason = (lockable < 64 << 20).then(|| format!("this user may lock {lockable} bytes"));
    needs(reason, "pinned registrations of 64 MiB")
}

fn userfaultfd_can_be_used() -> Outcome {
    needs(machine::without_userfaultfd(), "tests of the monitor userfaultfd")
}

fn huge_pages_are_reserved() -> Outcome {
    let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    let none = reserved.trim().parse().unwrap_or(0) == 0;
    needs(none.then(|| "none is reserved".to_owned()), "memory in huge pages")
}

fn dma_bufs_can_be_made() -> Outcome {
    let opened = std::fs::File::options().read(true).write(true).open("/dev/udmabuf");
    let reason = opened.err().map(|error| format!("/dev/udmabuf: {error}"));
    needs(reason, "genuine dma-bufs: memory files take their place")
}
