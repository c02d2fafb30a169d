//! The observers behind a guest's tap: the bridge, which receives every frame that passes the tap's program, and a
//! neighbour, which receives the frames that the bridge floods.
#![expect(unsafe_code, reason = "packet sockets are bound with an address std does not know")]

use crate::host::{BRIDGE, BRIDGE_MAC, Host};
use crate::tap::{Shape, Tap};
use anyhow::{Context as _, Result};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

/// Maximum length of a captured frame, in bytes; longer frames are cut off.
const LONGEST: usize = 65_549;
/// Receive buffer of the capture, in bytes: room for all frames of a flood that reach the bridge.
static ROOM: libc::c_int = 32 << 20;

/// A capture on the bridge, and a tap that the agent does not serve.
#[derive(Debug)]
pub struct Witness {
    bridge: File,
    neighbour: Tap,
    buffer: Vec<u8>,
}

/// Frames that passed the tap, by observer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Frames on the bridge, except the node's own.
    pub bridge: Vec<Vec<u8>>,
    /// Frames that the node itself sent through the bridge.
    pub node: Vec<Vec<u8>>,
    /// Frames on the neighbour's tap for unknown MACs and for groups, except the node's own.
    pub neighbour: Vec<Vec<u8>>,
}

impl Witness {
    /// Starts the capture. A host can have one witness.
    ///
    /// # Errors
    /// When the tap or the capture cannot be created.
    pub fn new(host: &Host) -> Result<Self> {
        let ns = host.ns();
        for family in ["iptables", "ip6tables", "arptables"] {
            let setting = format!("bridge/bridge-nf-call-{family}");
            // These filters (the module `br_netfilter`) drop and trim malformed packets.
            if Path::new("/proc/sys/net").join(&setting).exists() {
                ns.sysctl(&setting, "0")?;
            }
        }
        let neighbour = Tap::create(ns, "neighbour", Shape::default())?;
        ns.ip(&format!("link set {} master {BRIDGE} up", neighbour.name()))?;
        // In promiscuous mode the bridge also receives frames for other MACs.
        ns.ip(&format!("link set {BRIDGE} promisc on"))?;
        let shown: serde_json::Value = serde_json::from_str(&ns.ip(&format!("-j link show dev {BRIDGE}"))?)?;
        let ifindex = shown[0]["ifindex"].as_i64().context("`ip -j link` shows no ifindex")?;
        let bridge = ns.run_in(|| capture(i32::try_from(ifindex)?).context("a packet socket"))?;
        Ok(Self { bridge, neighbour, buffer: vec![0; LONGEST] })
    }

    /// All frames since the last call.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub fn observe(&mut self) -> Result<Seen> {
        let mut seen = Seen::default();
        loop {
            match self.bridge.read(&mut self.buffer) {
                Ok(len) => seen.bridge.push(self.buffer[..len].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The device went down and up again. No frame is lost.
                Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
                Err(error) => return Err(error).context("reading the bridge's capture"),
            }
        }
        while let Some(len) = self.neighbour.receive(0, &mut self.buffer)? {
            seen.neighbour.push(self.buffer[..len].to_vec());
        }
        let is_own = |frame: &Vec<u8>| frame.get(6..12) == Some(&BRIDGE_MAC.0);
        (seen.node, seen.bridge) = seen.bridge.into_iter().partition(is_own);
        seen.neighbour.retain(|frame| !is_own(frame));
        Ok(seen)
    }
}

/// A packet socket (packet(7)) on a device of the calling thread's namespace.
fn capture(ifindex: i32) -> Result<File> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // Protocol 0 receives nothing until the socket is bound, so it captures no frame of another device.
    // SAFETY: socket takes integers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the descriptor was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_ll is plain data, and all zeros are a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = ifindex;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is a whole sockaddr_ll that outlives the call, and its length is given.
    let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    if rc < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let (room, length) = ((&raw const ROOM).cast(), size_of_val(&ROOM) as libc::socklen_t);
    let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
    // SAFETY: the value is a whole int that outlives the call, and its length is given.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, room, length) };
    if rc < 0 { Err(io::Error::last_os_error().into()) } else { Ok(fd.into()) }
}

#[cfg(test)]
mod tests {
    use super::Witness;
    use crate::frames;
    use crate::host::Host;
    use crate::privileged;
    use crate::record::Identity;
    use crate::tap::Shape;
    use metadata_common::wire::ethernet;

    #[test]
    fn a_frame_for_an_unknown_mac_reaches_the_bridge_and_the_neighbour() {
        if !privileged::or_skip() {
            return;
        }
        let host = Host::new().expect("a node");
        let tap = host.tap(&Identity::of(0), Shape::default()).expect("a tap");
        let mut witness = Witness::new(&host).expect("a witness");
        witness.observe().expect("the frames");
        let frame = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
        assert!(tap.send(0, &frame).expect("it is sent"));
        let seen = witness.observe().expect("the frames");
        assert_eq!((seen.bridge, seen.neighbour), (vec![frame.clone()], vec![frame]));
    }
}
