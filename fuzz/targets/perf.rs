//! The protocol of `hmem perf`: a server that reads the input from its client, and a client that
//! reads the input from its server. Both are those of the command, over TCP.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, LazyLock},
    thread,
};

use clap::Parser;
use hmem::{
    Access, Domain, DomainAttr, Endpoint, Hmem, Region, Request,
    loopback::Loopback,
    provider::{EndpointAttr, Provider},
};
use hmem_cli::{
    args::{Cli, Command},
    machine::Machine,
    perf,
    table::Style,
};

use super::Verdict;

/// The software NIC of both sides, and the side that the target imitates.
struct Nic {
    provider: Arc<Loopback>,
    domain: Domain,
    endpoint: Endpoint,
    /// The region that an imitated server offers, with the requested key 1.
    _region: Region<Vec<u8>>,
}

static NIC: LazyLock<Nic> = LazyLock::new(|| {
    let provider = Arc::new(Loopback::builder().nic("fuzz").build().expect("the software NIC"));
    let domain = hmem().domain_on(&*provider, DomainAttr::default()).expect("a domain");
    let queue = domain.open_cq(256).expect("a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let _region = domain.submit(Request::new(vec![0; 4096], access).key(1)).expect("a region");
    Nic { provider, domain, endpoint, _region }
});

/// The address of the command's server, which serves one client after another.
static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
    let address = free.expect("a free port");
    let port = address.port().to_string();
    thread::spawn(move || {
        run(&["--server", "--persistent", "--bind", "127.0.0.1", "--port", &port])
    });
    while TcpStream::connect(address).is_err() {
        thread::yield_now();
    }
    address
});

/// The address on which the target imitates a server.
static LISTENER: LazyLock<TcpListener> =
    LazyLock::new(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));

fn hmem() -> Hmem {
    Hmem::builder().without_environment().without_vendor_ifaces().build().expect("host memory")
}

/// Runs `hmem perf` with these arguments, over the NIC of the target.
fn run(arguments: &[&str]) -> Verdict {
    let provider: Arc<dyn Provider> = Arc::<Loopback>::clone(&NIC.provider);
    let mut machine = Machine::new(hmem());
    machine.add(provider, true, "").expect("the software NIC");
    let words = ["hmem", "perf", "--nic", "loopback/fuzz"].iter().chain(arguments);
    let Command::Perf(arguments) = Cli::try_parse_from(words).expect("a command line").command
    else {
        unreachable!("the subcommand is perf");
    };
    let ran = perf::run(&machine, &arguments, Style::plain(), &mut Vec::new());
    ran.map_err(|failure| failure.to_string())
}

/// The largest transfer that the target lets the server serve. The server offers memory for
/// transfers of up to a GiB, which would take seconds.
const LARGEST: u64 = 1 << 16;

/// Returns true if the input may ask the server for large memory or for many receives.
fn asks_for_much(data: &[u8]) -> bool {
    let numbers = data.split(|byte| !byte.is_ascii_digit());
    let numbers = numbers.filter_map(|digits| str::from_utf8(digits).ok()?.parse().ok());
    numbers.into_iter().any(|number: u64| (LARGEST + 1..=1 << 30).contains(&number))
}

/// Returns what the imitated side sends. An even number in front of the input sends the rest as it
/// is. An odd number sends a greeting, and each line of the rest as a message. The name of the
/// imitated side's endpoint takes the place of an empty one, which no side accepts.
fn sent(sort: u8, rest: &[u8]) -> Vec<u8> {
    if sort.is_multiple_of(2) {
        return rest.to_vec();
    }
    let mut bytes = b"hmemperf\0\0\0\x02".to_vec();
    let name = format!("\"endpoint\":{:?}", NIC.endpoint.name().0);
    for line in rest.split(|byte| *byte == b'\n') {
        let text = String::from_utf8(line.to_vec());
        let line = match text {
            Ok(text) => text.replace("\"endpoint\":[]", &name).into_bytes(),
            Err(_) => line.to_vec(),
        };
        bytes.extend((line.len() as u32).to_be_bytes());
        bytes.extend(line);
    }
    bytes
}

/// Sends the bytes, and returns what the other side sends until it hangs up.
fn converse(mut stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    // The other side may hang up at any byte.
    let _sent = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    let _hung_up = stream.read_to_end(&mut answer);
    answer
}

/// The first byte selects the side that reads the rest: below 2 the server, else the client; and
/// the form of the rest ([`sent`]).
pub(super) fn target(data: &[u8]) -> Verdict {
    let Some((sort, rest)) = data.split_first() else { return Err("too short".to_owned()) };
    if asks_for_much(rest) {
        return Err("left out".to_owned());
    }
    let bytes = sent(*sort, rest);
    if sort % 4 < 2 {
        let stream = TcpStream::connect(*SERVER).expect("a connection");
        let answer = String::from_utf8_lossy(&converse(stream, &bytes)).into_owned();
        return match (answer.contains("{\"failed\":"), answer.contains("{\"ready\":")) {
            (false, true) => Ok(()),
            _ => Err(answer),
        };
    }
    let port = LISTENER.local_addr().expect("an address").port().to_string();
    let op = ["write", "read", "send", "atomic"][usize::from(sort / 4) % 4];
    let mut arguments = vec!["127.0.0.1", "--port", &port, "--op", op, "--measure", "latency"];
    arguments.extend(["--iterations", "1", "--ordering", "strict"]);
    arguments.extend(["--size", "8"].iter().filter(|_| op != "atomic"));
    let verdict = thread::scope(|scope| {
        scope.spawn(|| converse(LISTENER.accept().expect("a connection").0, &bytes));
        run(&arguments)
    });
    NIC.domain.progress().expect("progress");
    verdict
}
