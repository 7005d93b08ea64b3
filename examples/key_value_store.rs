//! A key-value store over RDMA whose clients read and write values themselves.
//!
//! The server registers its memory once. A client asks for a value by a message and gets a grant: a
//! key that reaches the bytes of this value and no others, through the client's connection only. It
//! moves the bytes without the server, and gives the grant back by a message that invalidates the
//! key. `docs/memory-windows.md` explains the windows behind it.
//!
//! ```text
//! cargo run --example key_value_store            # over the software NIC
//! cargo run --example key_value_store -- verbs   # over the first RDMA device
//! ```

use std::{collections::HashMap, sync::Arc, thread};

use hmem::{
    Access, Domain, DomainAttr, Endpoint, Error, ErrorKind, Grant, GrantKind, Hmem, MrMode,
    OwnedRegion, RemoteKey, Result,
    loopback::{Loopback, Progress},
    provider::{CompletionQueue, EndpointAttr, WindowType},
    transfer::{EndpointName, PeerId, RemoteSegment},
};

const SLOT: u64 = 4096;
const SLOTS: u64 = 64;
const MESSAGE: u64 = 256;
/// The right that the store's memory is registered for: peers get theirs by grants only.
const STORE: Access = Access::RECV.union(Access::MW_BIND);
const BUFFER: Access = Access::SEND.union(Access::RECV).union(Access::READ).union(Access::WRITE);

/// A connection that moves messages of up to [`MESSAGE`] bytes, one at a time.
struct Connection {
    endpoint: Endpoint,
    /// The ends of sends and RMA requests.
    sent: Arc<dyn CompletionQueue>,
    received: Arc<dyn CompletionQueue>,
    peer: PeerId,
    outbox: OwnedRegion<Vec<u8>>,
    inbox: OwnedRegion<Vec<u8>>,
}

impl Connection {
    fn open(domain: &Domain, exchange: impl FnOnce(EndpointName) -> EndpointName) -> Result<Self> {
        let buffer = || domain.register(vec![0; MESSAGE as usize], BUFFER).map_err(Error::from);
        let (outbox, inbox) = (buffer()?, buffer()?);
        let (sent, received) = (domain.open_cq(64)?, domain.open_cq(64)?);
        let queues = EndpointAttr { rx_cq: Arc::clone(&received), ..EndpointAttr::new(&sent) };
        let endpoint = domain.open_endpoint(&queues)?;
        endpoint.receive(&[inbox.slice(0, MESSAGE)?], None, 0)?;
        let peer = endpoint.resolve(&exchange(endpoint.name()))?;
        Ok(Self { endpoint, sent, received, peer, outbox, inbox })
    }

    /// Sends bytes, and invalidates a key of the peer's if one is given.
    fn send(&self, bytes: &[u8], invalidate: Option<&RemoteKey>) -> Result<()> {
        self.outbox.write(0, bytes)?;
        let slices = [self.outbox.slice(0, bytes.len() as u64)?];
        match invalidate {
            Some(key) => self.endpoint.send_invalidate(&slices, key, self.peer, 0)?,
            None => self.endpoint.send(&slices, None, self.peer, 0)?,
        }
        wait(&self.sent).map(|_| ())
    }

    /// Waits for a message.
    fn receive(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; wait(&self.received)? as usize];
        self.inbox.read(0, &mut bytes)?;
        self.endpoint.receive(&[self.inbox.slice(0, MESSAGE)?], None, 0)?;
        Ok(bytes)
    }
}

/// Waits for the next completion of a queue, and returns the bytes that its request moved.
fn wait(queue: &Arc<dyn CompletionQueue>) -> Result<u64> {
    let mut out = Vec::new();
    while queue.read(&mut out, 1)? == 0 {
        thread::yield_now();
    }
    out.remove(0).result
}

/// The memory of the store, and where each value lies in it.
struct Store {
    memory: OwnedRegion<Vec<u8>>,
    slots: HashMap<String, (u64, u64)>,
}

impl Store {
    /// Answers a request with a grant: `r` and a name asks for a value, `w`, a length and a name
    /// for room.
    fn answer(&mut self, client: &Connection, request: &[u8]) -> Result<Grant> {
        let malformed = || Error::new(ErrorKind::Malformed, "request");
        let (operation, rest) = request.split_first().ok_or_else(malformed)?;
        let (slot, len, access) = match operation {
            b'r' => {
                let name = String::from_utf8_lossy(rest);
                let found = self.slots.get(&*name).copied();
                let (slot, len) =
                    found.ok_or_else(|| malformed().remedy("no value has this name"))?;
                (slot, len, Access::REMOTE_READ)
            }
            b'w' => {
                let (len, name) = rest.split_first_chunk().ok_or_else(malformed)?;
                let len = u64::from_le_bytes(*len).min(SLOT);
                let next = self.slots.len() as u64;
                let name = String::from_utf8_lossy(name).into_owned();
                if next == SLOTS && !self.slots.contains_key(&name) {
                    return Err(malformed().remedy("the store is full"));
                }
                let slot = self.slots.entry(name).or_insert((next, len));
                slot.1 = len;
                (slot.0, len, Access::REMOTE_WRITE)
            }
            _ => return Err(malformed()),
        };
        let start = slot * SLOT;
        self.memory.grant(&client.endpoint, start..start + len, access)
    }

    /// Serves one client until it says goodbye. Returns the number of grants.
    fn serve(&mut self, client: &Connection) -> Result<usize> {
        let mut grants = 0;
        loop {
            let request = client.receive()?;
            if request == b"bye" {
                return Ok(grants);
            }
            let grant = self.answer(client, &request)?;
            if grants == 0 {
                println!("server: grants are of kind {:?}", grant.kind());
            }
            // Peers can invalidate type 2 windows only.
            let by_peer =
                !matches!(grant.kind(), GrantKind::SubRegion | GrantKind::Window(WindowType::One));
            client.send(&[&[u8::from(by_peer)], &*grant.key()?.to_bytes()].concat(), None)?;
            // A server that waits for other clients too would revoke the grant of one that is gone.
            assert_eq!(client.receive()?, b"done");
            println!("server: the client is done, the window is {:?}", grant.state());
            grant.revoke().map_err(Error::from)?;
            grants += 1;
        }
    }
}

struct Client {
    connection: Connection,
    memory: OwnedRegion<Vec<u8>>,
}

impl Client {
    /// Moves bytes under a grant for a request, and gives the grant back.
    fn under_grant(
        &self,
        request: &[u8],
        move_bytes: impl FnOnce(&RemoteKey) -> Result<u64>,
    ) -> Result<u64> {
        self.connection.send(request, None)?;
        let answer = self.connection.receive()?;
        let (by_peer, key) =
            answer.split_first().ok_or_else(|| Error::new(ErrorKind::Malformed, "answer"))?;
        let key = RemoteKey::from_bytes(key)?;
        let moved = move_bytes(&key)?;
        self.connection.send(b"done", (*by_peer == 1).then_some(&key))?;
        Ok(moved)
    }

    fn put(&self, name: &str, value: &[u8]) -> Result<u64> {
        let len = value.len() as u64;
        let request = [&b"w"[..], &len.to_le_bytes(), name.as_bytes()].concat();
        self.under_grant(&request, |key| {
            self.memory.write(0, value)?;
            let remote = [RemoteSegment { address: key.base(), len, key }];
            let local = [self.memory.slice(0, len)?];
            self.connection.endpoint.write(&local, &remote, self.connection.peer, 0)?;
            wait(&self.connection.sent)
        })
    }

    fn get(&self, name: &str) -> Result<Vec<u8>> {
        let request = [b"r", name.as_bytes()].concat();
        let len = self.under_grant(&request, |key| {
            let len = key.first_len();
            let remote = [RemoteSegment { address: key.base(), len, key }];
            let local = [self.memory.slice(0, len)?];
            self.connection.endpoint.read(&local, &remote, self.connection.peer, 0)?;
            wait(&self.connection.sent)
        })?;
        let mut value = vec![0; len as usize];
        self.memory.read(0, &mut value)?;
        Ok(value)
    }
}

/// Runs a server and a client of the provider with this name. Returns the number of grants.
pub(crate) fn run(provider: &str) -> Result<usize> {
    let loopback = Loopback::builder().progress(Progress::Thread).build()?;
    let builder = Hmem::builder().without_vendor_ifaces().provider(loopback);
    #[cfg(feature = "verbs")]
    let builder = builder.verbs();
    let hmem = builder.build()?;
    let attr = || DomainAttr {
        mr_mode: MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY,
        ..DomainAttr::default()
    };
    let (server, client) = (hmem.domain(provider, attr())?, hmem.domain(provider, attr())?);
    // Names travel by any other means; here by channels.
    let ((to_server, at_server), (to_client, at_client)) =
        (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let memory =
                server.register(vec![0; (SLOT * SLOTS) as usize], STORE).map_err(Error::from)?;
            let mut store = Store { memory, slots: HashMap::new() };
            let connection = Connection::open(&server, |own| {
                to_client.send(own).expect("the client is there");
                at_server.recv().expect("the client is there")
            })?;
            store.serve(&connection)
        });
        let connection = Connection::open(&client, |own| {
            to_server.send(own).expect("the server is there");
            at_client.recv().expect("the server is there")
        })?;
        let memory = client.register(vec![0; SLOT as usize], BUFFER).map_err(Error::from)?;
        let client = Client { connection, memory };
        for (name, value) in [("one", &b"first value"[..]), ("two", b"second"), ("one", b"again")] {
            println!("client: put {name}, {} bytes", client.put(name, value)?);
        }
        for (name, expected) in [("one", &b"again"[..]), ("two", b"second")] {
            let value = client.get(name)?;
            println!("client: get {name}: {}", String::from_utf8_lossy(&value));
            assert_eq!(value, expected);
        }
        client.connection.send(b"bye", None)?;
        serving.join().expect("the server does not panic")
    })
}

#[allow(dead_code, reason = "a test includes this file and calls `run`")]
fn main() -> Result<()> {
    let provider = std::env::args().nth(1).unwrap_or_else(|| "loopback".to_owned());
    let grants = run(&provider)?;
    println!("{grants} values were moved, and the server touched none");
    Ok(())
}
