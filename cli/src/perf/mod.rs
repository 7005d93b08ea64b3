//! `hmem perf`: moves verified bytes between two hosts, and measures how fast.
//!
//! `wire` is what the sides say over TCP, `layout` is which bytes belong where, `end` is the memory
//! and endpoint of a side, `client` and `server` are the sides, `report` is what both print.

mod client;
mod end;
mod figures;
mod layout;
mod report;
mod server;
mod wire;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io,
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use hmem::{DeviceId, Errno, Error, ErrorKind, Result, WriteOrdering};

use self::{
    client::{Amount, Wish},
    end::Place,
    layout::{Layout, WORD},
    server::Client,
    wire::Request,
};
pub use self::{
    figures::{Bandwidth, Latency, Row, Side},
    report::{Report, Role, text},
};
use crate::{
    Failure,
    args::{PerfArgs, PerfOp, Sizes},
    machine::{Fabric, Machine},
};

const CONNECT: Duration = Duration::from_secs(10);

/// Number of clients whose requests a persistent server awaits at once.
const ACCEPTORS: usize = 64;

impl Request {
    fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(1)
    }

    fn layout(&self, size: u64) -> Layout {
        Layout::new(self.op, size, self.largest(), self.depth)
    }
}

/// Runs one side, or both, and prints what came of it.
///
/// # Errors
/// [`Failure::Usage`] for a NIC, iface or device that is not here; [`Failure::Measurement`] for
/// what went wrong with the other side; [`Failure::Output`] for a report that cannot be printed.
pub fn run(
    machine: &Machine,
    args: &PerfArgs,
    mut print: impl FnMut(&Report) -> io::Result<()>,
) -> Result<(), Failure> {
    let place = place(machine, args)?;
    if args.server {
        let listener =
            listen(SocketAddr::new(args.bind, args.port)).map_err(Failure::Measurement)?;
        return serve(&place, listener, args.persistent, &mut print);
    }
    let wish = wish(args)?;
    let report = match &args.host {
        Some(host) => connect(host, args.port)
            .and_then(|(stream, address)| client::measure(&place, &wish, stream, address)),
        None => both(&place, &wish),
    };
    Ok(print(&report.map_err(Failure::Measurement)?)?)
}

fn serve(
    place: &Place<'_>,
    listener: TcpListener,
    persistent: bool,
    print: &mut dyn FnMut(&Report) -> io::Result<()>,
) -> Result<(), Failure> {
    if !persistent {
        let client = accept(&listener).map_err(Failure::Measurement)?;
        return Ok(print(&client.serve(place).map_err(Failure::Measurement)?)?);
    }
    for client in accepted(listener).map_err(Failure::Measurement)? {
        match client.and_then(|client| client.serve(place)) {
            Ok(report) => print(&report)?,
            Err(error) => eprintln!("error: {error}"),
        }
    }
    Ok(())
}

/// Waits for the next connection and its request.
fn accept(listener: &TcpListener) -> Result<Client> {
    let accepted = listener.accept().map_err(|error| Error::os(Errno::of(&error), "accept"));
    accepted.and_then(|(stream, address)| Client::accept(stream, address))
}

/// Returns the clients that connect, without end, each once its request has arrived.
///
/// [`ACCEPTORS`] threads accept them, so that a client which says nothing holds up no other. The
/// threads end when the iterator is dropped, each at its next connection.
fn accepted(listener: TcpListener) -> Result<mpsc::IntoIter<Result<Client>>> {
    let listener = Arc::new(listener);
    // Without room: a thread whose client waits for its turn accepts no other meanwhile.
    let (sender, clients) = mpsc::sync_channel(0);
    for _ in 0..ACCEPTORS {
        let (listener, sender) = (Arc::clone(&listener), sender.clone());
        thread::Builder::new()
            .name("hmem-perf-accept".into())
            .spawn(move || while sender.send(accept(&listener)).is_ok() {})
            .map_err(|error| Error::os(Errno::of(&error), "start a thread"))?;
    }
    Ok(clients.into_iter())
}

/// Client and server in this process, which talk over TCP all the same.
fn both(place: &Place<'_>, wish: &Wish) -> Result<Report> {
    let os = |operation| move |error: io::Error| Error::os(Errno::of(&error), operation);
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(os("listen"))?;
    let address = listener.local_addr().map_err(os("listen"))?;
    let near = TcpStream::connect_timeout(&address, CONNECT).map_err(os("connect"))?;
    let near_address = near.local_addr().map_err(os("connect"))?;
    let (far, far_address) = loop {
        let (far, from) = listener.accept().map_err(os("accept"))?;
        // Anybody on this machine may have been quicker.
        if from == near_address {
            break (far, from);
        }
    };
    thread::scope(|scope| {
        let server = thread::Builder::new()
            .name("hmem-perf-server".into())
            .spawn_scoped(scope, || Client::accept(far, far_address)?.serve(place))
            .map_err(os("start a thread"))?;
        let report = client::measure(place, wish, near, address);
        let served =
            server.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Driver, "server thread")));
        let report = report?;
        served.map(|_| report)
    })
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let refused = |error: io::Error| {
        Error::os(Errno::of(&error), "listen")
            .context("address", address)
            .remedy("use an address of this host and a free port (--bind, --port)")
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    eprintln!("listening on {}", listener.local_addr().map_err(refused)?);
    Ok(listener)
}

fn connect(host: &str, port: u16) -> Result<(TcpStream, SocketAddr)> {
    let unreachable = || {
        Error::new(ErrorKind::Unreachable, "connect")
            .context("host", host)
            .context("port", port)
            .remedy("start `hmem perf --server` there first, and let the firewall pass its port (--port)")
    };
    let addresses =
        (host, port).to_socket_addrs().map_err(|error| unreachable().caused_by(error))?;
    let mut last = unreachable();
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok((stream, address)),
            Err(error) => last = unreachable().caused_by(error),
        }
    }
    Err(last)
}

fn wish(args: &PerfArgs) -> Result<Wish> {
    let sizes = match (args.op, &args.size) {
        (PerfOp::Atomic, size) if is_default(size) || size.0 == [WORD] => vec![WORD],
        (PerfOp::Atomic, _) => {
            return Err(usage("--size").remedy("an atomic has 8 bytes: leave --size out"));
        }
        (_, size) => size.0.clone(),
    };
    Ok(Wish {
        op: args.op,
        sizes,
        depth: if args.measure == crate::args::Measure::Latency { 1 } else { args.depth },
        measure: args.measure,
        amount: args.duration.map_or(Amount::Transfers(args.iterations), Amount::For),
        // So short that every reader of JSON keeps it.
        seed: args.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 11),
    })
}

fn is_default(size: &Sizes) -> bool {
    size.0 == [8, 4 << 10, 64 << 10, 1 << 20]
}

fn usage(option: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "perf").context("option", option)
}

fn place<'a>(machine: &'a Machine, args: &PerfArgs) -> Result<Place<'a>> {
    let registry = machine.hmem.registry();
    let name = args.iface.as_str();
    let Some(iface) = registry.iter().find(|iface| iface.name() == name) else {
        if let Some((_, why)) =
            registry.absent().find(|(kind, _)| machine.iface_name(*kind) == name)
        {
            return Err(Error::new(why.kind(), "perf --iface")
                .context("name", name)
                .context("why", why));
        }
        return Err(usage("--iface").context("name", name).remedy(one_of(&machine.iface_names())));
    };
    let device = DeviceId(args.device);
    let devices = iface.devices()?;
    let has_it = if devices.is_empty() {
        args.device == 0
    } else {
        devices.iter().any(|known| known.id == device)
    };
    if !has_it {
        return Err(usage("--device")
            .context("iface", name)
            .context("device", device)
            .context("devices", devices.len())
            .remedy("name a device that `hmem info` lists"));
    }
    let ordering =
        if args.strict_ordering { WriteOrdering::Strict } else { WriteOrdering::Relaxed };
    Ok(Place { hmem: &machine.hmem, nic: nic(machine, args)?, iface, device, ordering })
}

fn nic<'a>(machine: &'a Machine, args: &PerfArgs) -> Result<&'a Fabric> {
    if let Some(name) = args.nic.as_deref() {
        if let Some(nic) = machine.nics.iter().find(|nic| nic.answers_to(name)) {
            return Ok(nic);
        }
        if let Some(absent) =
            machine.absent.iter().find(|absent| absent.sort != "iface" && absent.name == name)
        {
            return Err(Error::new(ErrorKind::Unavailable, "perf --nic")
                .context("name", name)
                .context("why", &absent.why));
        }
        return Err(usage("--nic").context("name", name).remedy(one_of(&machine.provider_names())));
    }
    if args.loopback {
        let software = || machine.nics.iter().filter(|nic| nic.software);
        // The one that is most like hardware.
        let nic =
            software().find(|nic| nic.attr.nic.name == "hardware").or_else(|| software().next());
        return nic.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "perf --loopback")
                .remedy("the software NIC does not start here: see `hmem info`")
        });
    }
    machine.nics.iter().find(|nic| !nic.software).ok_or_else(|| {
        let why = machine
            .absent
            .iter()
            .find(|absent| absent.name == "verbs")
            .map(|absent| absent.why.as_str());
        Error::new(ErrorKind::Unavailable, "perf")
            .context("NIC", "no RDMA NIC on this machine")
            .context("why", why.unwrap_or("no provider has one"))
            .remedy("try the command without one: hmem perf --loopback")
    })
}

fn one_of(names: &[String]) -> String {
    format!("use one of {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::args::Measure;

    fn place(machine: &Machine) -> Place<'_> {
        let hardware = |nic: &&Fabric| nic.software && nic.attr.nic.name == "hardware";
        Place {
            hmem: &machine.hmem,
            nic: machine.nics.iter().find(hardware).expect("the software NIC"),
            iface: machine.hmem.registry().iter().next().expect("an iface"),
            device: DeviceId(0),
            ordering: WriteOrdering::default(),
        }
    }

    /// Several clients say nothing, and the server still waits for each when another was served.
    #[test]
    fn silent_clients_hold_up_no_other() {
        // A failed test leaves the server waiting for clients.
        let machine = Box::leak(Box::new(Machine::find().expect("the software NIC at least")));
        let place = place(machine);
        let wish = Wish {
            op: PerfOp::Write,
            sizes: vec![8],
            depth: 1,
            measure: Measure::Bandwidth,
            amount: Amount::Transfers(10),
            seed: 1,
        };
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let mut silent: Vec<_> =
            (0..8).map(|_| TcpStream::connect(address).expect("it listens")).collect();

        let (sender, reports) = mpsc::channel();
        let server = thread::spawn(move || {
            // The first report cannot be printed, which ends the server.
            serve(&place, listener, true, &mut |report| {
                sender.send(report.role).expect("the test waits for it");
                Err(io::ErrorKind::BrokenPipe.into())
            })
        });
        let stream = TcpStream::connect(address).expect("it listens");
        client::measure(&place, &wish, stream, address).expect("it is served");
        assert_eq!(reports.recv(), Ok(Role::Server));
        let ended = server.join().expect("no panic");
        assert!(matches!(ended, Err(Failure::Output(_))), "{ended:?}");

        for stream in &mut silent {
            // The server has greeted it, and neither refused it nor hung up.
            let mut greeting = [0; 12];
            stream.read_exact(&mut greeting).expect("a greeting");
            assert!(greeting.starts_with(b"hmemperf"));
            stream.set_nonblocking(true).expect("a socket");
            let more = stream.read(&mut [0]);
            let waits = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
            assert!(more.as_ref().is_err_and(waits), "{more:?}");
        }
    }
}
