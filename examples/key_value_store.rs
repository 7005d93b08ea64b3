//! A key-value store over RDMA. Its clients read and write the values themselves.
//!
//! The server registers its memory once. A client sends a request for a value and receives a grant:
//! a key for the bytes of this value only. The client moves the bytes without the server. Then the
//! client sends a message, and the server revokes the grant.
//!
//! If the NIC has memory windows of type 2, the key works through the client's connection only, and
//! the client's message itself invalidates the key. `docs/memory-windows.md` explains these
//! windows.
//!
//! Two clients run at once. At the end the second client tries a revoked key of the first, and is
//! refused.
//!
//! ```text
//! cargo run --example key_value_store            # over the software NIC
//! cargo run --example key_value_store -- verbs   # over the first RDMA device
//! ```

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use hmem::{
    Access, Domain, DomainAttr, Endpoint, Error, ErrorKind, Grant, GrantKind, Hmem, MrMode, Region,
    RemoteKey, Result,
    loopback::{Loopback, Progress},
    provider::{CompletionQueue, EndpointAttr, WindowType},
    transfer::{EndpointName, PeerId, RemoteSegment},
};

const SLOT: u64 = 4096;
const SLOTS: u64 = 64;
const MESSAGE: u64 = 256;
/// The rights of the store's memory. None of these rights lets peers access the memory: clients get
/// rights by grants.
const STORE: Access = Access::RECV.union(Access::MW_BIND);
const BUFFER: Access = Access::SEND.union(Access::RECV).union(Access::READ).union(Access::WRITE);

/// A connection to a peer, for messages of up to [`MESSAGE`] bytes, one at a time.
struct Connection {
    endpoint: Endpoint,
    /// The queue for completions of sends and RMA requests.
    sent: Arc<dyn CompletionQueue>,
    received: Arc<dyn CompletionQueue>,
    peer: PeerId,
    outbox: Region<Vec<u8>>,
    inbox: Region<Vec<u8>>,
}

impl Connection {
    fn open(domain: &Domain, exchange: impl FnOnce(EndpointName) -> EndpointName) -> Result<Self> {
        let buffer = || domain.register(vec![0; MESSAGE as usize], BUFFER).map_err(Error::from);
        let (outbox, inbox) = (buffer()?, buffer()?);
        let (sent, received) = (domain.open_cq(128)?, domain.open_cq(128)?);
        let queues = EndpointAttr { rx_cq: Arc::clone(&received), ..EndpointAttr::new(&sent) };
        let endpoint = domain.open_endpoint(&queues)?;
        endpoint.receive(&[inbox.slice(0, MESSAGE)?], None, 0)?;
        let peer = endpoint.resolve(&exchange(endpoint.name()))?;
        Ok(Self { endpoint, sent, received, peer, outbox, inbox })
    }

    /// Sends bytes in a message. If `invalidate` is given, the message also invalidates this key of
    /// the peer.
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

/// A store: its memory, which is divided into slots, and the slot number and length of each value.
struct Store {
    memory: Region<Vec<u8>>,
    slots: Mutex<HashMap<String, (u64, u64)>>,
}

impl Store {
    /// Grants the access that a request asks for.
    ///
    /// A request to read a value is `r` and a name. A request to write a value is `w`, a length and
    /// a name.
    fn answer(&self, client: &Connection, request: &[u8]) -> Result<Grant> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let malformed = || Error::new(ErrorKind::Malformed, "request");
        let (operation, rest) = request.split_first().ok_or_else(malformed)?;
        let (slot, len, access) = match operation {
            b'r' => {
                let name = String::from_utf8_lossy(rest);
                let found = slots.get(&*name).copied();
                let (slot, len) =
                    found.ok_or_else(|| malformed().remedy("no value has this name"))?;
                (slot, len, Access::REMOTE_READ)
            }
            b'w' => {
                let (len, name) = rest.split_first_chunk().ok_or_else(malformed)?;
                let len = u64::from_le_bytes(*len).min(SLOT);
                let next = slots.len() as u64;
                let name = String::from_utf8_lossy(name).into_owned();
                if next == SLOTS && !slots.contains_key(&name) {
                    return Err(malformed().remedy("the store is full"));
                }
                let slot = slots.entry(name).or_insert((next, len));
                slot.1 = len;
                (slot.0, len, Access::REMOTE_WRITE)
            }
            _ => return Err(malformed()),
        };
        let start = slot * SLOT;
        self.memory.grant(&client.endpoint, start..start + len, access)
    }

    /// Serves a client until it sends `bye`. Returns the number of grants.
    fn serve(&self, client: &Connection) -> Result<usize> {
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
            // A peer can invalidate type 2 windows only.
            let by_peer =
                !matches!(grant.kind(), GrantKind::SubRegion | GrantKind::Window(WindowType::One));
            client.send(&[&[u8::from(by_peer)], &*grant.key()?.to_bytes()].concat(), None)?;
            // A real server would revoke the grant after a timeout.
            assert_eq!(client.receive()?, b"done");
            println!("server: the client is done, the window is {:?}", grant.state());
            grant.revoke().map_err(Error::from)?;
            grants += 1;
        }
    }
}

struct Client {
    connection: Connection,
    memory: Region<Vec<u8>>,
}

impl Client {
    /// Sends a request, calls `move_bytes` with the key of the grant, and then tells the server. If
    /// the server's answer says that a peer can invalidate the key, this message also invalidates
    /// the key.
    ///
    /// Returns the result of `move_bytes` and the key.
    fn under_grant(
        &self,
        request: &[u8],
        move_bytes: impl FnOnce(&RemoteKey) -> Result<u64>,
    ) -> Result<(u64, RemoteKey)> {
        self.connection.send(request, None)?;
        let answer = self.connection.receive()?;
        let (by_peer, key) =
            answer.split_first().ok_or_else(|| Error::new(ErrorKind::Malformed, "answer"))?;
        let key = RemoteKey::from_bytes(key)?;
        let moved = move_bytes(&key)?;
        self.connection.send(b"done", (*by_peer == 1).then_some(&key))?;
        Ok((moved, key))
    }

    fn put(&self, name: &str, value: &[u8]) -> Result<(u64, RemoteKey)> {
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
        let (len, _) = self.under_grant(&request, |key| self.read(key))?;
        let mut value = vec![0; len as usize];
        self.memory.read(0, &mut value)?;
        Ok(value)
    }

    /// Reads the bytes that a key gives access to, and returns the number of bytes.
    fn read(&self, key: &RemoteKey) -> Result<u64> {
        let len = key.first_len();
        let remote = [RemoteSegment { address: key.base(), len, key }];
        let local = [self.memory.slice(0, len)?];
        self.connection.endpoint.read(&local, &remote, self.connection.peer, 0)?;
        wait(&self.connection.sent)
    }
}

/// The outcome of a run.
pub(crate) struct Served {
    /// The number of grants to each of the two clients.
    pub(crate) grants: [usize; 2],
    /// The error of a client that used the revoked key of the other client.
    pub(crate) refusal: Error,
}

/// Connects a server and a client. Returns the server's end first.
///
/// Each endpoint needs the name of the other. Here the names are sent through channels.
fn connect(server: &Domain, client: &Domain) -> Result<(Connection, Connection)> {
    let ((to_server, at_server), (to_client, at_client)) = (mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        let serving = scope.spawn(move || {
            Connection::open(server, |own| {
                to_client.send(own).expect("the client receives");
                at_server.recv().expect("the client sends its name")
            })
        });
        let client = Connection::open(client, |own| {
            to_server.send(own).expect("the server receives");
            at_client.recv().expect("the server sends its name")
        })?;
        Ok((serving.join().expect("the server does not panic")?, client))
    })
}

/// Writes and reads values. Returns a used key, which the server has already revoked.
fn use_store(client: &Client, who: &str) -> Result<RemoteKey> {
    let (one, two) = (format!("{who}/one"), format!("{who}/two"));
    let mut keys = Vec::new();
    for (name, value) in [(&one, &b"first value"[..]), (&two, b"second"), (&one, b"again")] {
        let (moved, key) = client.put(name, value)?;
        println!("{who}: put {name}, {moved} bytes");
        keys.push(key);
    }
    for (name, expected) in [(&one, &b"again"[..]), (&two, b"second")] {
        let value = client.get(name)?;
        println!("{who}: get {name}: {}", String::from_utf8_lossy(&value));
        assert_eq!(value, expected);
    }
    client.connection.send(b"bye", None)?;
    // The server has revoked this key: it revokes each grant before it answers the next request.
    Ok(keys.remove(0))
}

/// Runs a server and two clients over the provider with this name.
pub(crate) fn run(provider: &str) -> Result<Served> {
    let loopback = Loopback::builder().progress(Progress::Thread).build()?;
    let builder = Hmem::builder().without_vendor_ifaces().provider(loopback);
    #[cfg(feature = "verbs")]
    let builder = builder.verbs();
    let hmem = builder.build()?;
    let attr = || DomainAttr {
        mr_mode: MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::ALLOCATED | MrMode::PROV_KEY,
        ..DomainAttr::default()
    };
    let server = hmem.domain(provider, attr())?;
    let memory = server.register(vec![0; (SLOT * SLOTS) as usize], STORE).map_err(Error::from)?;
    let store = Store { memory, slots: Mutex::default() };
    let connect_client = || {
        let domain = hmem.domain(provider, attr())?;
        let (serving, connection) = connect(&server, &domain)?;
        let memory = domain.register(vec![0; SLOT as usize], BUFFER).map_err(Error::from)?;
        Ok::<_, Error>((serving, Client { connection, memory }))
    };
    let ((serving_ann, ann), (serving_bob, bob)) = (connect_client()?, connect_client()?);
    thread::scope(|scope| {
        let serving_ann = scope.spawn(|| store.serve(&serving_ann));
        let serving_bob = scope.spawn(|| store.serve(&serving_bob));
        let using = scope.spawn(|| use_store(&ann, "ann"));
        use_store(&bob, "bob")?;
        let key = using.join().expect("the client does not panic")?;
        let grants =
            [serving_ann, serving_bob].map(|server| server.join().expect("the server runs on"));
        let refusal = bob.read(&key).expect_err("the key of the other client was revoked");
        let [ann, bob] = grants;
        Ok(Served { grants: [ann?, bob?], refusal })
    })
}

#[allow(dead_code, reason = "a test includes this file and calls `run`")]
fn main() -> Result<()> {
    let provider = std::env::args().nth(1).unwrap_or_else(|| "loopback".to_owned());
    let served = run(&provider)?;
    let values: usize = served.grants.iter().sum();
    println!("{values} values were moved, and the server copied none");
    println!("bob could not use ann's key: {}", served.refusal);
    Ok(())
}
