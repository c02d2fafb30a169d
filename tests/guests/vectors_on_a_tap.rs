//! Every dialect answers its vectors to a Linux guest behind a real tap, through XDP, AF_XDP, TCP and HTTP as in
//! production. Each variant of the record has its own node and agent.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use metadata_common::mac::Mac;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};
use serde_json::Value;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, Spec};
use support::host::Host;
use support::privileged;
use support::record::{Identity, replace};
use support::vectors::{self, Ask, Asked, GUEST};

const ALL: &str = include_str!("../vectors/vectors.jsonl");
/// The guest's first NIC in the record.
const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
/// Number of records in the file: the original and its patched variants.
const RECORDS: usize = 13;
/// Time limit for an answer; long, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before another attempt to use a port that the kernel still holds.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A node with one guest, and the agent that serves it.
struct Vm<'a> {
    guest: Guest,
    _agent: Agent<'a>,
    _records: tempfile::TempDir,
}

fn vm<'a>(host: &'a Host, record: &Value) -> Result<Vm<'a>> {
    let records = tempfile::tempdir()?;
    replace(&records.path().join("vm.json"), &record.to_string())?;
    let spec = Spec { mac: MAC, address: GUEST, ..Spec::of(&Identity::of(0)) };
    let guest = Guest::boot(host, &spec)?;
    let agent = Agent::start(host.ns(), records.path(), &[PortArgument::new(guest.host_tap().name(), MAC)])?;
    Ok(Vm { guest, _agent: agent, _records: records })
}

impl Ask for Vm<'_> {
    fn ask(&mut self, asked: &Asked) -> Result<Vec<u8>> {
        self.guest.ns().run_in(|| exchange(asked))
    }
}

/// Opens a connection from the vector's source port. The service closes first, so the port is free again after the
/// service has acknowledged the guest's FIN of the previous connection.
fn connection(asked: &Asked) -> Result<TcpStream> {
    let start = Instant::now();
    loop {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, asked.source_port)))
            .with_context(|| format!("binding to port {}", asked.source_port))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
        match connect(&socket, &SocketAddr::from(asked.to)) {
            Ok(()) => return Ok(socket.into()),
            Err(Errno::ADDRNOTAVAIL) if start.elapsed() < PATIENCE => std::thread::sleep(RETRY_PAUSE),
            Err(error) => return Err(error).with_context(|| format!("connecting to {:?}", asked.to)),
        }
    }
}

/// Sends one request and returns everything received until the service closes the connection.
fn exchange(asked: &Asked) -> Result<Vec<u8>> {
    let mut stream = connection(asked)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&asked.bytes)?;
    let (mut received, start) = (Vec::new(), Instant::now());
    while start.elapsed() < PATIENCE {
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(received),
            Ok(bytes) => received.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("reading the answer"),
        }
    }
    anyhow::bail!("the service has not closed the connection after {PATIENCE:?}")
}

#[privileged::test]
fn every_dialect_answers_its_vectors_in_order_through_a_tap() {
    let hosts: Vec<Host> = (0..RECORDS).map(|_| Host::new().expect("a node")).collect();
    let mut free = hosts.iter();
    let outcome = vectors::run(ALL, |record| vm(free.next().context("a node for each record")?, record));
    outcome.expect("vectors").assert(185);
}
