//! The devices of a namespace, listed and watched from outside it: a netlink socket belongs to the namespace it was
//! opened in.
//!
//! A [`LinkWatch`] reports when devices appear, disappear or change: deleting a tap raises no event on its sockets.

use metadata_common::mac::Mac;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket as _, SocketAddr, TokioSocket};
use std::future::poll_fn;
use std::io;
use tokio::runtime::Handle;

use crate::error::LinkError;
use crate::netlink::NetlinkSocket;
use crate::netns;
use crate::netns::{Cookie, NamespaceReservation, Netns};

/// Limit on devices listed in one namespace; further ones are omitted.
pub const DEVICES_MAX: usize = 1_024;
/// `struct ifinfomsg` (rtnetlink(7)).
const IFINFO: usize = 16;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const ARPHRD_ETHER: u16 = 1;

/// Attributes of devices (linux/if_link.h).
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// Number of queues of a multi-queue tap that are open and enabled (Linux 4.19).
const IFLA_TUN_NUM_QUEUES: u16 = 8;

/// Current state of an Ethernet device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EthernetDevice {
    /// Name of the interface.
    pub name: String,
    /// `tap`, `macvtap`, `veth`, `dummy`, `bridge`, …; `physical device` if the kernel reports no kind.
    pub kind: String,
    /// MAC address of the device.
    pub mac: Mac,
    /// Number of queues in use, at least 1; known for taps only.
    pub queues: u32,
}

/// Lists the Ethernet devices of one namespace.
///
/// Holding it keeps the namespace alive, as a [`LinkWatch`] does.
pub struct LinkList(NetlinkSocket);

impl LinkList {
    /// Opens a list of a process's namespace, and a watch on it. The watch reports changes made after a listing.
    ///
    /// # Errors
    /// Like [`LinkWatch::open`], and if it is the caller's own namespace, which belongs to no VM.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(process: &NamespaceReservation) -> Result<(Self, LinkWatch), LinkError> {
        let netns = Netns::of_process(process)?;
        if netns.is_here() {
            let source = io::Error::other("expected a separate namespace, found the agent's own");
            return Err(LinkError::Namespace { name: process.name().into(), source });
        }
        let watch = LinkWatch::opener();
        netns.run(|| {
            let netlink = NetlinkSocket::open(NETLINK_ROUTE);
            let netlink = netlink.map_err(|source| LinkError::device("list devices", source))?;
            Ok((Self(netlink), watch()?))
        })
    }

    /// The current Ethernet devices, the first [`DEVICES_MAX`] of them. Blocks while other processes change devices.
    ///
    /// # Errors
    /// If the kernel does not answer; open another list then.
    pub fn look(&mut self) -> Result<Vec<EthernetDevice>, LinkError> {
        let mut seen = Vec::new();
        let answered = self.0.dump(RTM_GETLINK, &[0; IFINFO], |kind, body| take(kind, body, &mut seen));
        answered.map_err(|source| LinkError::device("list devices", source))?;
        Ok(seen)
    }
}

/// Adds the device of a message, up to the limit.
fn take(kind: u16, body: &[u8], seen: &mut Vec<EthernetDevice>) {
    if kind == RTM_NEWLINK && seen.len() < DEVICES_MAX {
        seen.extend(device(body));
    }
}

/// The Ethernet device that a message describes.
fn device(body: &[u8]) -> Option<EthernetDevice> {
    let link_type = u16::from_ne_bytes(body.get(2..4)?.try_into().ok()?);
    if link_type != ARPHRD_ETHER {
        return None;
    }
    let attributes = body.get(IFINFO..)?;
    let name = attribute(attributes, IFLA_IFNAME).and_then(text)?;
    let mac = Mac(attribute(attributes, IFLA_ADDRESS)?.try_into().ok()?);
    let info = attribute(attributes, IFLA_LINKINFO).unwrap_or_default();
    let kind = attribute(info, IFLA_INFO_KIND).and_then(text);
    let data = attribute(info, IFLA_INFO_DATA).unwrap_or_default();
    let queues = attribute(data, IFLA_TUN_NUM_QUEUES).and_then(|queues| queues.try_into().ok());
    let kind = match kind {
        // A device in tun mode is not an Ethernet device.
        Some(kind) if kind == "tun" => "tap".into(),
        Some(kind) => kind,
        None => "physical device".into(),
    };
    let queues = if kind == "tap" { queues.map_or(1, u32::from_ne_bytes).max(1) } else { 1 };
    Some(EthernetDevice { name, kind, mac, queues })
}

/// `RTMGRP_LINK`: the multicast group of device changes (rtnetlink(7)).
const LINKS: u32 = 1;
/// Limit on messages combined into one reported change. Further messages are reported as the next change.
const MESSAGES_AT_ONCE: usize = 256;
/// Mask without the two bits that describe the encoding of a value (linux/netlink.h).
const NLA_TYPE_MASK: u16 = 0x3fff;
/// Bytes read of a message: enough for its headers, the name (the first attribute) and the MTU (soon after).
const MESSAGE: usize = 256;
/// `struct nlmsghdr` (netlink(7)), behind which is `struct ifinfomsg`.
const NLMSGHDR: usize = 16;
/// Offset of the attributes: behind `struct ifinfomsg`.
const ATTRIBUTES: usize = NLMSGHDR + IFINFO;

/// A change that a [`LinkWatch`] reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These devices appeared, disappeared or changed; a device may occur twice.
    Devices(Vec<DeviceEvent>),
    /// More changes than could be read: list all devices.
    Unknown,
}

/// A device that appeared, disappeared or changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// The namespace of the device.
    pub cookie: Cookie,
    /// Interface index in the namespace.
    pub ifindex: u32,
    /// Name of the device; the new name after a rename.
    pub name: String,
    /// The device was deleted or left the namespace.
    pub gone: bool,
    /// MTU in bytes: the longest IP packet; `None` if the message has none.
    pub mtu: Option<u32>,
}

/// A watch on the devices of one namespace.
///
/// Holding it keeps the namespace alive: drop it when its VM goes.
pub struct LinkWatch {
    socket: TokioSocket,
    cookie: Cookie,
}

impl LinkWatch {
    /// Watches a namespace, named as in [`PortName`](metadata_common::port::PortName); `None` is the calling thread's.
    ///
    /// Call it inside a tokio runtime with I/O enabled. List the devices after this returns: earlier changes are not
    /// reported.
    ///
    /// # Errors
    /// If the namespace cannot be opened or entered (`CAP_SYS_ADMIN`), or no descriptor is available.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(netns: Option<&str>) -> Result<Self, LinkError> {
        let netns = netns.map_or_else(Netns::own, Netns::open)?;
        let open = Self::opener();
        netns.run(open)
    }

    /// Returns a function that opens a watch on the namespace of its calling thread. Call this inside a tokio
    /// runtime.
    pub fn opener() -> impl FnOnce() -> Result<Self, LinkError> + Send {
        let runtime = Handle::current();
        let open = move || -> io::Result<TokioSocket> {
            let _inside = runtime.enter();
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            socket.socket_mut().bind(&SocketAddr::new(0, LINKS))?;
            Ok(socket)
        };
        move || {
            let socket = open().map_err(|source| LinkError::device("watch devices", source))?;
            Ok(Self { socket, cookie: netns::cookie()? })
        }
    }

    /// Waits until devices appear, disappear or change, and returns them. Attaching a port also counts as a change.
    /// Cancel safe.
    ///
    /// # Errors
    /// If the kernel refuses to read on; drop the watch then.
    pub async fn changed(&mut self) -> io::Result<Changed> {
        let mut message = [0; MESSAGE];
        let first = poll_fn(|context| {
            let mut space = message.as_mut_slice();
            self.socket.poll_recv(context, &mut space)
        });
        let first = first.await.map(drop);
        let mut devices = Vec::new();
        let mut known = self.take(first, &message, &mut devices)?;
        for _ in 1..MESSAGES_AT_ONCE {
            message.fill(0);
            match self.socket.socket_ref().recv(&mut message.as_mut_slice(), 0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                more => known &= self.take(more.map(drop), &message, &mut devices)?,
            }
        }
        Ok(if known { Changed::Devices(devices) } else { Changed::Unknown })
    }

    /// Records the device that a message describes; false if it names none, or if messages were lost.
    fn take(&self, read: io::Result<()>, message: &[u8], devices: &mut Vec<DeviceEvent>) -> io::Result<bool> {
        match read {
            // More messages arrived than the socket buffer holds.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(false),
            Err(error) => Err(error),
            Ok(()) => {
                let device = about(message).map(|(ifindex, name)| {
                    let gone = is_farewell(message);
                    DeviceEvent { cookie: self.cookie, ifindex, name, gone, mtu: mtu(message) }
                });
                let found = device.is_some();
                devices.extend(device);
                Ok(found)
            }
        }
    }
}

/// The MTU in a message. A bridge's message about its port has the bridge's family but the port's MTU.
fn mtu(message: &[u8]) -> Option<u32> {
    let mtu = attribute(message.get(ATTRIBUTES..)?, libc::IFLA_MTU)?;
    Some(u32::from_ne_bytes(mtu.try_into().ok()?))
}

/// Index and name of the device that a message describes: `struct nlmsghdr`, `struct ifinfomsg`, attributes
/// (netlink(7), rtnetlink(7)).
fn about(message: &[u8]) -> Option<(u32, String)> {
    let index = message.get(NLMSGHDR + 4..NLMSGHDR + 8)?;
    let index = u32::from_ne_bytes(index.try_into().ok()?);
    let name = attribute(message.get(ATTRIBUTES..)?, libc::IFLA_IFNAME)?;
    text(name).map(|name| (index, name))
}

/// True if a message reports a deleted device. A bridge sends the same message, with a family of its own, for a
/// device that leaves it.
fn is_farewell(message: &[u8]) -> bool {
    message.get(4..6) == Some(libc::RTM_DELLINK.to_ne_bytes().as_slice())
        && message.get(NLMSGHDR) == Some(&(libc::AF_UNSPEC as u8))
}

/// The value of an attribute, `struct nlattr` (netlink(7)); `None` if an earlier attribute has an impossible length.
pub fn attribute(mut all: &[u8], wanted: u16) -> Option<&[u8]> {
    while let [a, b, c, d, ..] = *all {
        let (len, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]));
        let value = all.get(4..len)?;
        if kind & NLA_TYPE_MASK == wanted {
            return Some(value);
        }
        all = all.get(len.next_multiple_of(4)..)?;
    }
    None
}

/// The text in a value, up to its terminator.
pub fn text(value: &[u8]) -> Option<String> {
    let text = value.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;

    use super::{DEVICES_MAX, EthernetDevice, MESSAGE, RTM_NEWLINK, about, is_farewell, mtu, take};

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).expect("short");
        let mut all = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        all.extend(value);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn device(link_type: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![0; 16];
        body[2..4].copy_from_slice(&link_type.to_ne_bytes());
        body.extend(attributes.concat());
        body
    }

    fn tap(queues: &[Vec<u8>]) -> Vec<u8> {
        let info = [attribute(1, b"tun\0"), attribute(2 | 0x8000, &queues.concat())].concat();
        device(1, &[attribute(3, b"tap0\0"), attribute(1, &[2, 0, 0, 0, 0, 1]), attribute(18, &info)])
    }

    #[test]
    fn a_tap_is_listed_with_its_queues_in_use() {
        for (attributes, queues) in
            [(vec![], 1), (vec![attribute(8, &4_u32.to_ne_bytes())], 4), (vec![attribute(8, &[0; 4])], 1)]
        {
            let mut seen = Vec::new();
            take(RTM_NEWLINK, &tap(&attributes), &mut seen);
            let mac = Mac([2, 0, 0, 0, 0, 1]);
            assert_eq!(seen, [EthernetDevice { name: "tap0".into(), kind: "tap".into(), mac, queues }]);
        }
    }

    #[test]
    fn other_devices_and_other_messages_are_omitted() {
        let loopback = device(772, &[attribute(3, b"lo\0"), attribute(1, &[0; 6])]);
        let nameless = device(1, &[attribute(1, &[0; 6])]);
        let mut seen = Vec::new();
        for (kind, body) in [(20, tap(&[])), (RTM_NEWLINK, loopback), (RTM_NEWLINK, nameless)] {
            take(kind, &body, &mut seen);
        }
        assert_eq!(seen, []);
    }

    #[test]
    fn devices_beyond_the_limit_are_omitted() {
        let mut seen = Vec::new();
        (0..=DEVICES_MAX).for_each(|_| take(RTM_NEWLINK, &tap(&[]), &mut seen));
        assert_eq!(seen.len(), DEVICES_MAX);
    }

    fn message(attributes: &[u8]) -> [u8; MESSAGE] {
        let mut message = [0; MESSAGE];
        message[20..24].copy_from_slice(&7_u32.to_ne_bytes());
        message[32..][..attributes.len()].copy_from_slice(attributes);
        message
    }

    #[test]
    fn a_message_names_its_device_at_any_position_of_the_name() {
        let name = attribute(libc::IFLA_IFNAME, b"tap7\0");
        for before in [vec![], attribute(1, b"odd"), attribute(4, &[0; 4])] {
            assert_eq!(about(&message(&[before, name.clone()].concat())), Some((7, "tap7".into())));
        }
    }

    #[test]
    fn the_mtu_is_read_from_a_message_that_has_one() {
        let name = attribute(libc::IFLA_IFNAME, b"tap7\0");
        let size = attribute(libc::IFLA_MTU, &1_450_u32.to_ne_bytes());
        for (attributes, found) in
            [(vec![], None), (name.clone(), None), ([name, size].concat(), Some(1_450))]
        {
            assert_eq!(mtu(&message(&attributes)), found);
        }
        assert_eq!(mtu(&message(&attribute(libc::IFLA_MTU, &[5, 0xaa]))), None, "of the wrong length");
    }

    #[test]
    fn a_device_that_leaves_its_bridge_is_not_deleted() {
        for (kind, family, is_gone) in [
            (libc::RTM_DELLINK, libc::AF_UNSPEC, true),
            (libc::RTM_DELLINK, libc::AF_BRIDGE, false),
            (libc::RTM_NEWLINK, libc::AF_UNSPEC, false),
        ] {
            let mut message = message(&attribute(libc::IFLA_IFNAME, b"tap7\0"));
            message[4..6].copy_from_slice(&kind.to_ne_bytes());
            message[16] = family as u8;
            assert_eq!(is_farewell(&message), is_gone, "message {kind} of family {family}");
        }
    }

    #[test]
    fn a_message_without_name_or_with_invalid_lengths_is_ignored() {
        for attributes in
            [vec![], attribute(1, b"x"), vec![2, 0, 3, 0], vec![255, 255, 3, 0], vec![3, 0, 9, 0]]
        {
            assert_eq!(about(&message(&attributes)), None, "{attributes:?}");
        }
        assert_eq!(about(&[0; 20]), None);
    }
}
