//! Waits for completions in an asynchronous program: a task sleeps on the queue's file descriptor.
//!
//! Only `next_batch` is needed in a program. The rest of the example sends messages between two
//! endpoints of the software NIC. Every provider with a completion channel works in the same way.
//!
//! ```text
//! cargo run --example async_completions
//! ```

use std::{os::fd::BorrowedFd, sync::Arc};

use hmem::{
    Access, Domain, DomainAttr, Hmem,
    loopback::{Loopback, Progress},
    provider::{CompletionQueue, EndpointAttr},
    transfer::Completion,
};
use tokio::io::{Interest, unix::AsyncFd};

type Failure = Box<dyn std::error::Error>;

/// Waits for completions, and returns up to 16 of them. `fd` is the file descriptor of the queue's
/// channel, which the runtime watches.
///
/// This order loses no wakeup: read until the queue is empty, arm the channel, sleep. The runtime's
/// readiness flag is cleared before the queue is read again.
async fn next_batch(
    queue: &dyn CompletionQueue,
    fd: &AsyncFd<BorrowedFd<'_>>,
) -> Result<Vec<Completion>, Failure> {
    let channel = queue.channel().ok_or("this provider has no completion channel")?;
    let mut done = Vec::new();
    loop {
        if queue.read(&mut done, 16)? > 0 {
            return Ok(done);
        }
        if channel.arm()? {
            fd.readable().await?.clear_ready();
        } else {
            // Completions arrived since the read, or a staged transfer needs another call.
            tokio::task::yield_now().await;
        }
    }
}

/// Registers the channel of a queue with the runtime.
fn watch(queue: &dyn CompletionQueue) -> Result<AsyncFd<BorrowedFd<'_>>, Failure> {
    let fd = queue.channel().ok_or("this provider has no completion channel")?.fd()?;
    // SAFETY: the fd stays open and unchanged while the queue lives. The result borrows the queue.
    let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    Ok(watched.map_err(std::io::Error::from)?)
}

async fn run() -> Result<u64, Failure> {
    const MESSAGES: u64 = 100;
    let nic = Loopback::builder().progress(Progress::Thread).build()?;
    let hmem = Hmem::builder().provider(nic).build()?;
    let open = || -> hmem::Result<(Domain, Arc<dyn CompletionQueue>)> {
        let domain = hmem.domain("loopback", DomainAttr::default())?;
        let queue = domain.open_cq(256)?;
        Ok((domain, queue))
    };
    let ((sender, sent), (receiver, received)) = (open()?, open()?);
    let from = sender.open_endpoint(&EndpointAttr::new(&sent))?;
    let to = receiver.open_endpoint(&EndpointAttr::new(&received))?;
    let peer = from.resolve(&to.name())?;
    let source = sender.register(vec![7; 64], Access::SEND).map_err(|rejected| rejected.error)?;
    let sink = receiver.register(vec![0; 64], Access::RECV).map_err(|rejected| rejected.error)?;

    let send = async {
        let fd = watch(&*sent)?;
        for context in 0..MESSAGES {
            from.send(&[source.slice(0, 64)?], None, peer, context)?;
            for ended in next_batch(&*sent, &fd).await? {
                ended.result?;
            }
        }
        Ok::<_, Failure>(())
    };
    let receive = async {
        let fd = watch(&*received)?;
        let mut bytes = 0;
        to.receive(&[sink.slice(0, 64)?], None, 0)?;
        for next in 1..=MESSAGES {
            for ended in next_batch(&*received, &fd).await? {
                bytes += ended.result?;
            }
            to.receive(&[sink.slice(0, 64)?], None, next)?;
        }
        Ok::<_, Failure>(bytes)
    };
    let ((), bytes) = tokio::try_join!(send, receive)?;
    Ok(bytes)
}

pub(crate) fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let bytes = runtime.block_on(run())?;
    println!("received {bytes} bytes in an asynchronous task");
    if bytes == 6400 { Ok(()) } else { Err("bytes are missing".into()) }
}
