//! Ends a test process in which a call of libfabric never returns.

use std::{process, sync::Once, thread, time::Duration};

/// Ends the process if it still runs after `limit`. The first call counts.
pub(crate) fn start(limit: Duration) {
    static CLOCK: Once = Once::new();
    CLOCK.call_once(|| {
        thread::spawn(move || {
            thread::sleep(limit);
            eprintln!("the tests did not end within {limit:?}: a call of libfabric hangs");
            process::exit(1);
        });
    });
}
