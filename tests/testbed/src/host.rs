//! A hypervisor node: a namespace with a bridge and the guests' taps. A server on the bridge's address shows that the
//! agent does not affect the guests' other traffic.

use crate::netns::Namespace;
use crate::record::Identity;
use crate::tap::{Shape, Tap};
use anyhow::{Context as _, Result};
use metadata_common::mac::Mac;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The bridge's address: every guest's gateway.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The bridge's name.
pub const BRIDGE: &str = "br0";
/// A fixed MAC for the bridge. Otherwise the bridge uses a port's MAC and changes it when that port is removed; guests
/// would then lose their gateway until their neighbour entries expire.
pub const BRIDGE_MAC: Mac = Mac([0x02, 0x00, 0x0a, 0x00, 0x02, 0x02]);
/// The link group of taps created together. The kernel deletes a group in one step. Closing the descriptors one by one
/// takes a minute for 256 taps, because the kernel waits for a grace period after each.
const RACK_GROUP: u32 = 254;
/// How long an ordinary connection may stall before either end fails.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A namespace set up as a node with a bridge.
#[derive(Debug)]
pub struct Host {
    /// Kept so that no descriptor closes before the devices are deleted; see [`RACK_GROUP`].
    rack: Vec<Arc<Tap>>,
    ns: Namespace,
}

impl Host {
    /// Creates a node in a new namespace.
    ///
    /// # Errors
    /// Fails if the namespace or the bridge cannot be created.
    pub fn new() -> Result<Self> {
        Self::inside(Namespace::new("host")?)
    }

    /// Sets up an empty namespace as a node.
    ///
    /// # Errors
    /// Fails if the bridge cannot be created.
    pub fn inside(ns: Namespace) -> Result<Self> {
        // Keep the host's own IPv6 frames out of the frame counts.
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        ns.ip_batch(&format!(
            "link add {BRIDGE} address {BRIDGE_MAC} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
             link set {BRIDGE} up\n\
             addr add {ADDRESS}/16 dev {BRIDGE}\n"
        ))?;
        Ok(Self { rack: Vec::new(), ns })
    }

    /// The node's namespace.
    #[must_use]
    pub fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// The name of a guest's tap.
    #[must_use]
    pub fn tap_name(guest: &Identity) -> String {
        format!("tap{}", guest.number)
    }

    /// Creates one guest's tap, up and on the bridge. It is deleted when the caller drops it.
    ///
    /// # Errors
    /// Fails if the name is taken or the kernel refuses the shape.
    pub fn tap(&self, guest: &Identity, shape: Shape) -> Result<Arc<Tap>> {
        let tap = Tap::create(&self.ns, &Self::tap_name(guest), shape)?;
        self.ns.ip(&format!("link set {} master {BRIDGE} up", tap.name()))?;
        Ok(Arc::new(tap))
    }

    /// Creates the taps of many guests together, up and on the bridge. They stay until the host is dropped.
    ///
    /// # Errors
    /// Like [`Host::tap`].
    pub fn rack(&mut self, guests: &[Identity], shape: Shape) -> Result<Vec<Arc<Tap>>> {
        let names: Vec<_> = guests.iter().map(Self::tap_name).collect();
        self.rack_of(&names, shape)
    }

    /// Like [`Host::rack`], with names that another hypervisor would give.
    ///
    /// # Errors
    /// Like [`Host::tap`].
    pub fn rack_of(&mut self, names: &[String], shape: Shape) -> Result<Vec<Arc<Tap>>> {
        let mut taps = Vec::with_capacity(names.len());
        let mut lines = String::new();
        for name in names {
            let tap = Tap::create(&self.ns, name, shape)?;
            writeln!(lines, "link set {name} group {RACK_GROUP} master {BRIDGE} up")?;
            taps.push(Arc::new(tap));
        }
        self.ns.ip_batch(&lines)?;
        self.rack.extend(taps.iter().cloned());
        Ok(taps)
    }

    /// The tap of a guest created by [`Host::rack`].
    #[must_use]
    pub fn tap_of(&self, guest: &Identity) -> Option<Arc<Tap>> {
        let name = Self::tap_name(guest);
        self.rack.iter().find(|tap| tap.name() == name).cloned()
    }

    /// Starts an echo server on the bridge's address.
    ///
    /// # Errors
    /// Fails if the port is taken.
    pub fn server(&self, port: u16) -> Result<EchoServer> {
        EchoServer::start(&self.ns, SocketAddr::from((ADDRESS, port)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !self.rack.is_empty()
            && let Err(error) = self.ns.ip(&format!("link del group {RACK_GROUP}"))
        {
            eprintln!("cannot delete the taps of {} together: {error:#}", self.ns.name());
        }
    }
}

/// A TCP server that echoes what it receives, one connection after another.
#[derive(Debug)]
pub struct EchoServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoServer {
    /// Starts the server inside a namespace.
    ///
    /// # Errors
    /// Fails if the address is taken or does not belong to the namespace.
    pub fn start(ns: &Namespace, address: SocketAddr) -> Result<Self> {
        let listener = ns
            .run_in(|| TcpListener::bind(address))
            .with_context(|| format!("cannot listen on {address} in {}", ns.name()))?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("echo".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    // If a guest disconnects in mid-stream, the guest's side reports the error.
                    Ok((stream, _)) => drop(echo(stream)),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Its listening address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the echo server panicked");
        }
    }
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut buffer = vec![0; 65_536];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            len => stream.write_all(&buffer[..len])?,
        }
    }
}
