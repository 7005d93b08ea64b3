//! Cancels receives: those that a peer's write consumes, and those of a region that is closed.

use std::{
    thread,
    time::{Duration, Instant},
};

use hmem_core::{Error, ErrorKind, Result};
use hmem_p2p::staging::FailedStep;

use super::{
    super::{
        endpoint_state::{EndpointState, Waiting},
        hub::Hub,
        part::Part,
        sys,
    },
    Engine, InFlight, canceled,
};

/// Time for which the close of a region waits for the transfers that use the region.
const CLOSE: Duration = Duration::from_secs(1);

impl InFlight {
    /// Lets each write with immediate data that has arrived consume the oldest receive. Cancels
    /// this receive, so that no message uses it. Later writes wait until this receive has ended,
    /// because a message may still take it: `ofi_rxm` reports no failure of a cancel.
    pub(super) fn consume_receives(&mut self, hub: &Hub, endpoint: &mut EndpointState) {
        loop {
            let requests = &mut self.requests;
            let usable =
                |number: &&u64| requests.get(*number).is_some_and(|request| !request.arriving);
            let Some(number) = endpoint.receives.iter().find(usable).copied() else { return };
            if requests.get(&number).is_some_and(|request| request.written.is_some()) {
                return;
            }
            let Some(written) = endpoint.written.pop_front() else { return };
            let Some(request) = requests.get_mut(&number) else { return };
            request.written = Some(written);
            if !self.cancel_receive(hub, endpoint, number) {
                endpoint.written.push_front(written);
                if let Some(request) = self.requests.get_mut(&number) {
                    (request.written, request.arriving) = (None, true);
                }
            }
        }
    }

    /// Cancels a receive. Returns false if a message is arriving.
    pub(super) fn cancel_receive(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        number: u64,
    ) -> bool {
        let chunk = self
            .requests
            .iter()
            .find(|(_, request)| request.chunk_of.is_some_and(|(receive, _)| receive == number));
        let chunk = chunk.map(|(chunk, _)| *chunk);
        let Some(request) = self.requests.get_mut(&number) else { return false };
        let mut posted = number;
        if let Some(transfer) = &mut request.staged {
            match chunk {
                Some(chunk) => posted = chunk,
                None if transfer.pipeline().has_begun() => return false,
                None => {
                    let error = canceled(hub, "the receive was canceled");
                    transfer.pipeline_mut().fail(FailedStep::NicTransfer, error);
                    return true;
                }
            }
        }
        let of_request =
            |part: &Option<Part>| part.as_ref().is_some_and(|part| part.request == posted);
        let Some(index) = self.parts.iter().position(of_request) else { return false };
        if endpoint.waiting.contains(&Waiting::Part(index)) {
            endpoint.waiting.retain(|waiting| *waiting != Waiting::Part(index));
            self.part_failed(hub, endpoint, index, -sys::FI_ECANCELED, 0);
            return true;
        }
        self.cancel(hub, endpoint, index)
    }

    /// Returns the number of requests that use a region.
    fn users(&self, token: u64) -> usize {
        self.requests.values().filter(|request| request.tokens.contains(&token)).count()
    }
}

impl Engine {
    /// Waits until no request uses a region: cancels the receives that use the region, and makes
    /// progress. Staged requests that use the region fail at once, because the region is closed.
    ///
    /// # Errors
    /// Busy: transfers of the region have not ended in time.
    pub(in super::super) fn release(&mut self, hub: &Hub, token: u64) -> Result<()> {
        let deadline = Instant::now() + CLOSE;
        if hub.regions.has_staged() {
            self.abandon_staged(hub, token);
        }
        loop {
            let users = self.in_flight.users(token);
            if users == 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                let why = "wait for the completions of transfers that use the region, or close \
                           their endpoint, and close the region then";
                return Err(Error::new(ErrorKind::Busy, "deregister")
                    .provider(hub.attr().nic.to_string())
                    .context("transfers", users)
                    .remedy(why));
            }
            let receives = self.in_flight.requests.iter().filter(|(_, request)| {
                let own = request.chunk_of.is_none();
                own && request.receives() && request.tokens.contains(&token)
            });
            let mut receives: Vec<_> =
                receives.map(|(number, request)| (*number, request.endpoint)).collect();
            receives.sort_unstable();
            for (number, id) in receives {
                if let Some(endpoint) = self.endpoints.get_mut(&id) {
                    self.in_flight.cancel_receive(hub, endpoint, number);
                }
            }
            self.in_flight.ended += self.progress(hub);
            thread::yield_now();
        }
    }
}
