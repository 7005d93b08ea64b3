//! A relay between the two sides of `hmem perf`, with which a test reads and changes their
//! messages.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::Child,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
};

use serde_json::{Value, json};

use crate::hmem_process::hmem;

/// The sender of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Client,
    Server,
}

/// A relay that forwards the messages of one connection.
pub(crate) struct Relay {
    pub(crate) port: u16,
    thread: JoinHandle<()>,
}

type Look = Box<dyn FnMut(From, &mut Value) + Send>;

impl Relay {
    /// Starts a relay between a client and the server at `port`. The relay passes each message to
    /// `look`, which may change it, and then forwards it.
    pub(crate) fn to(port: u16, look: impl FnMut(From, &mut Value) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = listener.local_addr().expect("an address").port();
        let look: Arc<Mutex<Look>> = Arc::new(Mutex::new(Box::new(look)));
        let thread = thread::spawn(move || {
            let (client, _) = listener.accept().expect("the client connects");
            let server = TcpStream::connect(("127.0.0.1", port)).expect("the server listens");
            let clone = |stream: &TcpStream| stream.try_clone().expect("another handle");
            let (from, to, seen) = (clone(&client), clone(&server), Arc::clone(&look));
            let there = thread::spawn(move || pass_on(From::Client, from, to, &seen));
            pass_on(From::Server, server, client, &look);
            there.join().expect("no panic");
        });
        Self { port: own, thread }
    }

    /// Starts a client of the server at `port` that transfers for minutes, and waits until
    /// transfers run.
    pub(crate) fn transferring(port: u16, nic: &str, op: &str) -> (Child, Self) {
        let (running, told) = mpsc::channel();
        let relay = Self::to(port, move |from, message| {
            if from == From::Client && *message == json!("running") {
                // The client repeats this message. The receiver may be gone after the first one.
                let _ = running.send(());
            }
        });
        let port = relay.port.to_string();
        let to = ["127.0.0.1", "--port", &port, "--nic", nic];
        let long = ["--op", op, "--size", "4096", "--duration", "600"];
        let client = hmem("perf", &[&to[..], &long].concat()).spawn().expect("the command starts");
        told.recv().expect("the client says that it transfers");
        (client, relay)
    }

    /// Waits until both sides have closed the connection.
    pub(crate) fn join(self) {
        self.thread.join().expect("no panic");
    }
}

fn pass_on(who: From, mut from: TcpStream, mut to: TcpStream, look: &Mutex<Look>) {
    let mut all = || -> io::Result<()> {
        let mut greeting = [0; 12];
        from.read_exact(&mut greeting)?;
        to.write_all(&greeting)?;
        loop {
            let mut len = [0; 4];
            from.read_exact(&mut len)?;
            let mut json = vec![0; u32::from_be_bytes(len) as usize];
            from.read_exact(&mut json)?;
            let mut message: Value = serde_json::from_slice(&json)?;
            look.lock().expect("no panic")(who, &mut message);
            let json = serde_json::to_vec(&message)?;
            to.write_all(&[&(json.len() as u32).to_be_bytes()[..], &json].concat())?;
        }
    };
    // The loop ends with an error when the sender closes its connection.
    let _ = all();
    let _ = to.shutdown(Shutdown::Write);
}
