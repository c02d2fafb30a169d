//! A hypervisor: a namespace with a bridge, the guests' taps enslaved to it, and an ordinary server behind
//! the bridge's address, to show that guests' other traffic is left alone.

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
/// A bridge without an address of its own borrows one of its ports', and changes it when that port goes:
/// guests would lose their gateway for as long as their neighbour entry lives.
pub const BRIDGE_MAC: Mac = Mac([0x02, 0x00, 0x0a, 0x00, 0x02, 0x02]);
/// The link group of taps made together. Deleting a group is one step for the kernel; closing descriptors
/// one by one waits out a grace period for each, a minute for 256 taps.
const RACK_GROUP: u32 = 254;
/// Longest an ordinary connection may stand still before either end gives up.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A namespace laid out as a node with a bridge.
#[derive(Debug)]
pub struct Host {
    /// Kept so that no descriptor closes before the devices are gone; see [`RACK_GROUP`].
    rack: Vec<Arc<Tap>>,
    ns: Namespace,
}

impl Host {
    /// Makes a node of its own for this process.
    ///
    /// # Errors
    /// When a namespace or a bridge cannot be made.
    pub fn new() -> Result<Self> {
        Self::inside(Namespace::new("host")?)
    }

    /// Lays out an empty namespace as a node.
    ///
    /// # Errors
    /// When the bridge cannot be made.
    pub fn inside(ns: Namespace) -> Result<Self> {
        // No IPv6 chatter of the host's own, so that frame counts mean what they say.
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

    /// The tap's name of a guest.
    #[must_use]
    pub fn tap_name(guest: &Identity) -> String {
        format!("tap{}", guest.number)
    }

    /// Makes one guest's tap, enslaved and up. It goes when the caller drops it.
    ///
    /// # Errors
    /// When the name is taken or the kernel refuses the shape.
    pub fn tap(&self, guest: &Identity, shape: Shape) -> Result<Arc<Tap>> {
        let tap = Tap::create(&self.ns, &Self::tap_name(guest), shape)?;
        self.ns.ip(&format!("link set {} master {BRIDGE} up", tap.name()))?;
        Ok(Arc::new(tap))
    }

    /// Makes the taps of many guests at once, enslaved and up. They stay until the host goes.
    ///
    /// # Errors
    /// As for [`Host::tap`].
    pub fn rack(&mut self, guests: &[Identity], shape: Shape) -> Result<Vec<Arc<Tap>>> {
        let mut taps = Vec::with_capacity(guests.len());
        let mut lines = String::new();
        for guest in guests {
            let tap = Tap::create(&self.ns, &Self::tap_name(guest), shape)?;
            writeln!(lines, "link set {} group {RACK_GROUP} master {BRIDGE} up", tap.name())?;
            taps.push(Arc::new(tap));
        }
        self.ns.ip_batch(&lines)?;
        self.rack.extend(taps.iter().cloned());
        Ok(taps)
    }

    /// The tap of a guest of the rack.
    #[must_use]
    pub fn tap_of(&self, guest: &Identity) -> Option<Arc<Tap>> {
        let name = Self::tap_name(guest);
        self.rack.iter().find(|tap| tap.name() == name).cloned()
    }

    /// Starts an ordinary TCP server on the bridge's address.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn server(&self, port: u16) -> Result<EchoServer> {
        EchoServer::start(&self.ns, SocketAddr::from((ADDRESS, port)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !self.rack.is_empty()
            && let Err(error) = self.ns.ip(&format!("link del group {RACK_GROUP}"))
        {
            eprintln!("the taps of {} go one by one: {error:#}", self.ns.name());
        }
    }
}

/// A TCP server that sends back what it is sent, one connection after another.
#[derive(Debug)]
pub struct EchoServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoServer {
    /// Starts it inside a namespace.
    ///
    /// # Errors
    /// When the address is taken or not of that namespace.
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
                    // A guest that went away in mid-stream is the guest's affair; it will say so.
                    Ok((stream, _)) => drop(echo(stream)),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Where it listens.
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
