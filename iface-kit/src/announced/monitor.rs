//! Monitor: detects frees by the iface and withdrawals of announced memory.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, IfaceKind, Result,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

use super::table::Table;

/// A monitor of the memory in a table. The monitor does not keep the iface open.
#[derive(Debug)]
pub(crate) struct TableMonitor<H> {
    pub(crate) iface: IfaceKind,
    pub(crate) table: Weak<Table<H>>,
}

impl<H: Copy + fmt::Debug + Send + Sync> Monitor for TableMonitor<H> {
    fn name(&self) -> &str {
        "allocation-table"
    }

    fn rationale(&self) -> String {
        format!(
            "the {} driver reports no frees: those through the iface and withdrawals of announced \
             memory notify; a free of announced memory that was not withdrawn before is missed",
            self.iface
        )
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Free
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let table = self.table.upgrade().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "monitor")
                .iface(self.iface)
                .remedy("the iface was dropped: its memory is not watched any longer")
        })?;
        table.process.check("subscribe").map_err(|error| error.iface(self.iface))?;
        let subscription = table.subscriptions.add(range, invalidator);
        let unknown = || {
            Error::new(ErrorKind::Unsupported, "subscribe")
                .iface(self.iface)
                .context("range", range)
                .remedy("only allocated or announced memory can be watched")
        };
        let error = match table.query(range.start()) {
            Ok(Some(_)) => return Ok(subscription),
            found => found.err().unwrap_or_else(unknown),
        };
        table.subscriptions.remove(subscription);
        Err(error)
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if let Some(table) = self.table.upgrade()
            && table.process.is_current()
        {
            table.subscriptions.remove(subscription);
        }
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}
