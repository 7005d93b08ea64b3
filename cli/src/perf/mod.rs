//! `hmem perf`: measures transfers between two hosts and verifies their content.
//!
//! `client` and `server` are the two sides. `end` is the memory and the endpoint of a side, `wire`
//! the protocol over TCP, `layout` the expected bytes, `metrics` the counts of registrations, and
//! `report` the output. `compare` measures the paths to a device's memory.

mod client;
mod compare;
mod end;
mod figures;
mod layout;
mod metrics;
mod report;
mod server;
mod wire;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use hmem::{DeviceId, Errno, Error, ErrorKind, IfaceKind, Result, cause::Step};

use self::{
    client::{Amount, Observer, Plan},
    end::{EndConfig, MOST_KEPT},
    layout::{Layout, WORD},
    server::Client,
    wire::Request,
};
pub use self::{
    compare::{Comparison, Measured},
    figures::{Bandwidth, EndDescription, Gain, Latency, Order, Role, Row},
    metrics::{LatencyRange, Metrics, PathCount, Refusals},
    report::Report,
};
use crate::{
    Failure,
    args::{Measure, PerfArgs, PerfOp, PerfOrdering},
    json,
    machine::{Machine, ProviderNic},
    problem::{Problem, line_on_stderr, unknown, unknown_device, unknown_nic},
    progress::Progress,
    table::{Style, exact_bytes},
};

/// The timeout of a connection attempt.
const CONNECT: Duration = Duration::from_secs(10);

/// The default of `--size`, in bytes.
const DEFAULT_SIZES: [u64; 4] = [8, 4 << 10, 64 << 10, 1 << 20];

/// The number of clients from which a persistent server reads requests at the same time.
const ACCEPTORS: usize = 64;

impl Request {
    /// Returns the largest transfer size.
    fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(1)
    }

    /// Returns the length of the memory with which transfers of every size are possible.
    fn room(&self) -> u64 {
        self.sizes.iter().map(|size| self.layout(*size).room()).max().unwrap_or_default()
    }

    /// Returns the layout of the memory for transfers of `size` bytes.
    fn layout(&self, size: u64) -> Layout {
        Layout::new(self.op, size, self.largest(), self.depth)
    }
}

/// An event of a measurement, which the client passes to the observer.
#[derive(Debug)]
enum Event<'a> {
    /// Both sides are connected. `report` has no results yet. `depth` is the number of transfers in
    /// flight at once; `None` if bandwidth is not measured.
    Connected { report: &'a Report, depth: Option<u32> },
    /// The next measurement starts, with transfers of `size` bytes.
    Next { size: u64, figure: &'static str },
    /// All measurements of a size are complete.
    Row(&'a Row),
}

/// Runs one side, or both, and prints the report. A client prints each row as it completes.
///
/// # Errors
/// [`Failure::Usage`] for an unknown NIC, iface or device, and for a size other than 8 bytes with
/// `--op atomic`; [`Failure::Failed`] for an unavailable NIC or iface, and for a failed connection
/// or measurement; [`Failure::Output`] for a report that cannot be printed.
pub fn run(
    machine: &Machine,
    args: &PerfArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let config = end_config(machine, args)?;
    if args.server {
        let address = SocketAddr::new(args.bind, args.port);
        let listener = listen(address)?;
        return serve(&config, listener, args.persistent, &mut |report| {
            json::write_or_text(out, &report, args.json, style, report::text)?;
            out.flush()
        });
    }
    let plan = plan(args, config.nic.ignores_ordering())?;
    if args.compare_paths {
        if config.iface.kind() == IfaceKind::SYSTEM {
            return Err(compare::host_memory().into());
        }
        let mut progress = Progress::after(Duration::ZERO);
        let compared = compare::compare(&config, plan, &mut progress);
        progress.clear();
        return Ok(json::write_or_text(out, &compared?, args.json, style, compare::text)?);
    }
    let mut live = LiveReport {
        json: args.json,
        style,
        out,
        progress: Progress::after(Duration::ZERO),
        measurements: plan.measurements(),
        started: 0,
        heading: None,
        ordering: None,
        unprintable: None,
    };
    let mut observer = |event: Event<'_>| live.show(event);
    let measured = match &args.host {
        Some(host) => connect(host, args.port).and_then(|(stream, address)| {
            client::measure(&config, &plan, stream, address, &mut observer)
        }),
        None => both((&config, &config), &plan, &mut observer),
    };
    live.progress.clear();
    if let Some(error) = live.unprintable {
        return Err(Failure::Output(error));
    }
    let report = measured?;
    if args.json {
        json::write(live.out, &report)?;
    } else {
        writeln!(live.out)?;
        report::metrics(live.out, &report, style)?;
    }
    Ok(())
}

/// The output of a client while it measures: rows on stdout, and a progress bar on a terminal.
struct LiveReport<'a> {
    json: bool,
    style: Style,
    out: &'a mut dyn Write,
    progress: Progress,
    /// Number of measurements in the plan.
    measurements: usize,
    /// Number of measurements that have started.
    started: usize,
    /// The heading to print before the first row: the report without results, and the depth of the
    /// bandwidth measurement. `None` before the sides are connected, and after the heading is
    /// printed. A measurement that fails before the first row prints no heading.
    heading: Option<(Report, Option<u32>)>,
    /// The write ordering of the last printed row; `None` before the first row.
    ordering: Option<Order>,
    /// The error of writing to `out`, which ended the measurement; `None` if there was none.
    unprintable: Option<io::Error>,
}

impl LiveReport<'_> {
    /// Prints an event or updates the progress bar.
    fn show(&mut self, event: Event<'_>) -> Result<()> {
        let (out, style) = (&mut *self.out, self.style);
        let printed = match event {
            Event::Next { size, figure } => {
                let next = format!("{figure} of {}", exact_bytes(size));
                self.progress.show(self.started, self.measurements, &next);
                self.started += 1;
                return Ok(());
            }
            _ if self.json => return Ok(()),
            Event::Connected { report, depth } => {
                self.heading = Some((report.clone(), depth));
                return Ok(());
            }
            Event::Row(row) => {
                self.progress.clear();
                let heading = match self.heading.take() {
                    Some((report, depth)) => report::heading(out, &report, depth, style),
                    None => Ok(()),
                };
                let before = self.ordering.replace(row.ordering);
                heading.and_then(|()| report::row(out, row, before, style))
            }
        };
        printed.and_then(|()| self.out.flush()).map_err(|error| {
            let ended = Error::os(Errno::of(&error), "print");
            self.unprintable = Some(error);
            ended
        })
    }
}

/// Serves one client, or many one after another if `persistent` is true, and prints each report.
///
/// A persistent server prints the error of a client on stderr and serves the next client. Only an
/// error of `print` ends the server.
fn serve(
    config: &EndConfig<'_>,
    listener: TcpListener,
    persistent: bool,
    print: &mut dyn FnMut(Report) -> io::Result<()>,
) -> Result<(), Failure> {
    if !persistent {
        let client = accept(&listener)?;
        return Ok(print(client.serve(config)?)?);
    }
    for client in accepted(listener)? {
        match client.and_then(|client| client.serve(config)) {
            Ok(report) => print(report)?,
            Err(error) => line_on_stderr(format_args!("error: {error:#}")),
        }
    }
    Ok(())
}

/// Waits for the next connection and its request.
fn accept(listener: &TcpListener) -> Result<Client> {
    let accepted = listener.accept().map_err(|error| Error::os(Errno::of(&error), "accept"));
    accepted.and_then(|(stream, address)| Client::accept(stream, address))
}

/// Returns an endless iterator over clients that have sent a request.
///
/// [`ACCEPTORS`] threads accept clients, so that a silent client does not delay others. After the
/// iterator is dropped, each thread ends at its next connection.
fn accepted(listener: TcpListener) -> Result<mpsc::IntoIter<Result<Client>>> {
    let listener = Arc::new(listener);
    // The channel has no buffer, so a thread accepts its next client only after the server takes
    // its previous one.
    let (sender, clients) = mpsc::sync_channel(0);
    for _ in 0..ACCEPTORS {
        let (listener, sender) = (Arc::clone(&listener), sender.clone());
        thread::Builder::new()
            .name("hmem-perf-accept".into())
            .spawn(move || while sender.send(accept(&listener)).is_ok() {})
            .map_err(|error| no_thread(&error))?;
    }
    Ok(clients.into_iter())
}

/// Measures transfers between a client and a server in this process, which are connected over TCP.
/// `config` is the client's side, and `server` the server's.
fn both(
    (config, server): (&EndConfig<'_>, &EndConfig<'_>),
    plan: &Plan,
    observer: &mut Observer<'_>,
) -> Result<Report> {
    let os = |operation| move |error: io::Error| Error::os(Errno::of(&error), operation);
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(os("listen"))?;
    let address = listener.local_addr().map_err(os("listen"))?;
    let near = TcpStream::connect_timeout(&address, CONNECT).map_err(os("connect"))?;
    let near_address = near.local_addr().map_err(os("connect"))?;
    let (far, far_address) = loop {
        let (far, from) = listener.accept().map_err(os("accept"))?;
        // Ignores connections of other processes to the port.
        if from == near_address {
            break (far, from);
        }
    };
    thread::scope(|scope| {
        let serving = thread::Builder::new()
            .name("hmem-perf-server".into())
            .spawn_scoped(scope, || Client::accept(far, far_address)?.serve(server))
            .map_err(|error| no_thread(&error))?;
        let report = client::measure(config, plan, near, address, observer);
        let served =
            serving.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Driver, "server thread")));
        let report = report?;
        served.map(|_| report)
    })
}

fn no_thread(error: &io::Error) -> Error {
    Error::os(Errno::of(error), "start a thread")
        .remedy("raise the number of processes and threads of the user (`ulimit -u`)")
}

fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    let refused = |error: io::Error| {
        Failure::failed(
            Problem::new(format!("cannot listen on {address}"))
                .caused_by(Problem::new(error.to_string()))
                .remedy("use an address of this host and a free port (--bind, --port)"),
        )
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    line_on_stderr(format_args!("listening on {address}"));
    Ok(listener)
}

fn connect(host: &str, port: u16) -> Result<(TcpStream, SocketAddr)> {
    let unreachable = || {
        Error::new(ErrorKind::Unreachable, "connect")
            .context("host", host)
            .context("port", port)
            .remedy(
                "start `hmem perf --server` on that host, and open its port (--port) in the \
                 firewall",
            )
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

/// Returns the measurements that the arguments select. `ignores_ordering` is true for a NIC that
/// ignores the write ordering.
fn plan(args: &PerfArgs, ignores_ordering: bool) -> Result<Plan, Failure> {
    let sizes = match (args.op, &args.size) {
        // Without `--size`, the sizes are the defaults.
        (PerfOp::Atomic, size) if size.0 == DEFAULT_SIZES || size.0 == [WORD] => vec![WORD],
        (PerfOp::Atomic, _) => {
            let problem = Problem::new("--size does not apply to atomics");
            return Err(problem.remedy("leave --size out: an atomic has 8 bytes").into());
        }
        (_, size) => size.0.clone(),
    };
    let measured = if ignores_ordering { PerfOrdering::Strict } else { PerfOrdering::Both };
    let ordering = args.ordering.unwrap_or(measured);
    Ok(Plan {
        op: args.op,
        orders: match ordering {
            PerfOrdering::Strict => &[Order::Strict],
            PerfOrdering::Relaxed => &[Order::Relaxed],
            PerfOrdering::Both => &[Order::Strict, Order::Relaxed],
        },
        sizes,
        depth: if args.measure == Measure::Latency { 1 } else { args.depth },
        measure: args.measure,
        amount: args.duration.map_or(Amount::Transfers(args.iterations), Amount::For),
        // A random seed has 53 bits, which every JSON reader represents exactly.
        seed: args.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 11),
    })
}

fn end_config<'a>(machine: &'a Machine, args: &PerfArgs) -> Result<EndConfig<'a>, Failure> {
    let registry = machine.hmem.registry();
    let name = args.iface.as_str();
    let Some(iface) = machine.ifaces(Some(name)).next() else {
        let absent = registry.absent().find(|(kind, _)| machine.iface_name(*kind) == name);
        return Err(match absent {
            Some((_, why)) => Failure::failed(
                Problem::new(format!("the iface {name} is unavailable"))
                    .caused_by(machine.explained(Step::OpenDevice, why)),
            ),
            None => unknown("iface", name, "--iface", &machine.iface_names()).into(),
        });
    };
    let device = DeviceId(args.device);
    let devices = iface.devices()?;
    let exists = if devices.is_empty() {
        args.device == 0
    } else {
        devices.iter().any(|known| known.id == device)
    };
    if !exists {
        let known: Vec<_> = devices.iter().map(|known| known.id.to_string()).collect();
        return Err(unknown_device(name, device.0, &known).into());
    }
    let (hmem, nic) = (&machine.hmem, nic(machine, args)?);
    let (metrics, most_kept) = (args.metrics, MOST_KEPT);
    Ok(EndConfig { hmem, nic, iface, device, direct_paths: None, metrics, most_kept })
}

fn nic<'a>(machine: &'a Machine, args: &PerfArgs) -> Result<&'a ProviderNic, Failure> {
    if let Some(name) = args.nic.as_deref() {
        if let Some(nic) = machine.nics(Some(name)).next() {
            return Ok(nic);
        }
        let mut absent = machine.absent.iter().filter(|absent| absent.sort != "iface");
        return Err(match absent.find(|absent| absent.answers_to(name)) {
            Some(absent) => Failure::failed(
                Problem::new(format!("the {} {} is unavailable", absent.sort, absent.name))
                    .caused_by(absent.why.clone()),
            ),
            None => unknown_nic(name, &machine.provider_names()).into(),
        });
    }
    if args.loopback {
        let software = || machine.nics.iter().filter(|nic| nic.software);
        // The NIC `hardware` resembles hardware most.
        let nic =
            software().find(|nic| nic.attr.nic.name == "hardware").or_else(|| software().next());
        return nic.ok_or_else(|| {
            let none = Problem::new("the software NIC is unavailable");
            Failure::failed(none.remedy("run `hmem info` for the reason"))
        });
    }
    machine.nics.iter().find(|nic| !nic.software).ok_or_else(|| {
        let none = Problem::new("this machine has no RDMA NIC");
        let software = "run `hmem perf --loopback` to use the software NIC, or name libfabric's \
                        NICs (--nic libfabric) to use TCP";
        let verbs = machine.absent.iter().find(|absent| absent.name == "verbs");
        Failure::failed(match verbs {
            Some(verbs) => {
                let both = match &verbs.why.remedy {
                    Some(remedy) => format!("{remedy}, or {software}"),
                    None => software.to_owned(),
                };
                none.caused_by(verbs.why.clone()).remedy(both)
            }
            None => none.remedy(software),
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use hmem::Hmem;

    use super::{
        end::End,
        wire::{self, Begin, Message, Peer},
        *,
    };

    fn config(machine: &Machine) -> EndConfig<'_> {
        let hardware = |nic: &&ProviderNic| nic.software && nic.attr.nic.name == "hardware";
        EndConfig {
            hmem: &machine.hmem,
            nic: machine.nics.iter().find(hardware).expect("the software NIC"),
            iface: machine.hmem.registry().iter().next().expect("an iface"),
            device: DeviceId(0),
            direct_paths: None,
            metrics: false,
            most_kept: MOST_KEPT,
        }
    }

    /// Returns a plan of ten transfers of a word with each ordering.
    fn plan(op: PerfOp, orders: &'static [Order]) -> Plan {
        Plan {
            op,
            orders,
            sizes: vec![8],
            depth: 1,
            measure: Measure::Bandwidth,
            amount: Amount::Transfers(10),
            seed: 1,
        }
    }

    /// Requirement LIFE-12: each side reports the registrations of its own domains, one domain for
    /// each ordering. For fetch-adds, the client registers its memory and an addend, and the server
    /// registers its memory.
    #[test]
    fn each_side_reports_the_counts_of_its_own_domains() {
        let machine = Machine::find(Hmem::builder()).expect("the software NIC at least");
        let config = EndConfig { metrics: true, ..config(&machine) };
        let plan = plan(PerfOp::Atomic, &[Order::Strict, Order::Relaxed]);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the address of the listener");
        let [near, far] = thread::scope(|scope| {
            let server = scope.spawn(|| accept(&listener)?.serve(&config));
            let stream = TcpStream::connect(address).expect("the server listens");
            let near = client::measure(&config, &plan, stream, address, &mut |_| Ok(()));
            [near, server.join().expect("no panic")].map(|report| report.expect("measured"))
        });
        for (report, registrations) in [(near, 2), (far, 1)] {
            let metrics = report.metrics.expect("the counts");
            let orderings: Vec<_> = metrics.iter().map(|metrics| metrics.ordering).collect();
            assert_eq!(orderings, [Order::Strict, Order::Relaxed]);
            for metrics in metrics {
                let [host] = &metrics.paths[..] else { panic!("{metrics:?}") };
                assert_eq!((host.path, host.registrations), ("plain-host", registrations));
                assert!(host.bytes >= 8 * registrations, "{host:?}");
                let timed: u64 = metrics.latency.iter().map(|range| range.count).sum();
                assert_eq!((timed, metrics.refusals.len()), (registrations, 0));
            }
        }
    }

    /// Serves one client, whose messages `converse` sends.
    fn serve_one(config: &EndConfig<'_>, converse: impl FnOnce(&mut Peer)) -> Result<Report> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the address of the listener");
        thread::scope(|scope| {
            let server = scope.spawn(|| accept(&listener)?.serve(config));
            let stream = TcpStream::connect(address).expect("the server listens");
            converse(&mut Peer::greet(stream, address).expect("a greeting"));
            server.join().expect("no panic")
        })
    }

    /// The server reports only results of transfers that it has verified.
    #[test]
    fn results_of_sizes_that_were_not_measured_are_refused() {
        let machine = Machine::find(Hmem::builder()).expect("the software NIC at least");
        let config = config(&machine);
        let row = Row {
            bytes: 8,
            ordering: Order::Strict,
            verified: true,
            bandwidth: None,
            latency: None,
            gain: None,
        };
        for (runs, row, accepted) in [
            (0, row, false),
            (1, row, true),
            (1, Row { bytes: 16, ..row }, false),
            (1, Row { verified: false, ..row }, false),
        ] {
            let mut request = Request {
                op: PerfOp::Write,
                ordering: Order::Strict,
                sizes: vec![8],
                depth: 1,
                seed: 1,
                endpoint: Vec::new(),
                side: EndDescription::default(),
            };
            let client = End::open(&config, Role::Client, &request, 1).expect("the software NIC");
            (request.endpoint, request.side) = (client.endpoint.name().0, client.side.clone());
            let served = serve_one(&config, |peer| {
                let mut ask = |message: &Message, answers: bool| {
                    peer.send(message).expect("the server listens");
                    answers.then(|| peer.receive("an answer", wire::PATIENCE).expect("an answer"));
                };
                ask(&Message::Request(request), true);
                for _ in 0..runs {
                    ask(&Message::Begin(Begin { size: 8, seed: 1 }), true);
                    ask(&Message::End { transfers: 0 }, true);
                }
                ask(&Message::Results(vec![row]), false);
            });
            match served {
                Ok(report) => assert!(accepted && report.results.len() == 1),
                Err(error) => {
                    let words = "not those of the measurements";
                    assert!(!accepted && error.to_string().contains(words), "{error}");
                }
            }
        }
    }

    #[test]
    fn silent_clients_do_not_delay_others() {
        // The machine is leaked, since the server thread outlives a failed test.
        let machine = Machine::find(Hmem::builder()).expect("the software NIC at least");
        let machine = Box::leak(Box::new(machine));
        let config = config(machine);
        let plan = plan(PerfOp::Write, &[Order::Strict]);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the address of the listener");
        let mut silent: Vec<_> =
            (0..8).map(|_| TcpStream::connect(address).expect("the server listens")).collect();

        let (sender, reports) = mpsc::channel();
        let server = thread::spawn(move || {
            // The error of printing the first report ends the server.
            serve(&config, listener, true, &mut |report| {
                sender.send(report.role).expect("the test waits for it");
                Err(io::ErrorKind::BrokenPipe.into())
            })
        });
        let stream = TcpStream::connect(address).expect("the server listens");
        client::measure(&config, &plan, stream, address, &mut |_| Ok(()))
            .expect("the server serves the client");
        assert_eq!(reports.recv(), Ok(Role::Server));
        let ended = server.join().expect("no panic");
        assert!(matches!(ended, Err(Failure::Output(_))), "{ended:?}");

        for stream in &mut silent {
            // The server has sent a greeting, and has neither sent an error nor closed the
            // connection.
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
