//! Lists the devices of a namespace from outside it: a netlink socket belongs to the namespace it was opened in.

use metadata_common::mac::Mac;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use std::io;

use crate::error::LinkError;
use crate::exchange::NetlinkSocket;
use crate::netns::Netns;
use crate::processes::NamespaceReservation;
use crate::watch::LinkWatch;
use crate::watch::{attribute, text};

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

#[cfg(test)]
mod tests {
    use super::{DEVICES_MAX, EthernetDevice, RTM_NEWLINK, take};
    use metadata_common::mac::Mac;

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
}
