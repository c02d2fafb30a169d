//! Lists the devices of a namespace from outside it: a netlink socket belongs to the namespace it was opened in.

use metadata_common::mac::Mac;
use rtnetlink::sys::{Socket, protocols::NETLINK_ROUTE};
use std::io;

use crate::error::LinkError;
use crate::netns::Netns;
use crate::processes::Meant;
use crate::watch::LinkWatch;
use crate::watch::{attribute, text};

/// Limit on devices listed in one namespace; further ones are omitted.
pub const DEVICES_MAX: usize = 1_024;
/// Limit on octets of answers that the kernel returns at once (linux: `NLMSG_GOODSIZE`, `netlink_recvmsg`).
const ANSWER: usize = 32 << 10;
/// Limit on answers read for one request; a device takes one to two kilobytes of them.
const ANSWERS: usize = 1_024;

/// `struct nlmsghdr` and `struct ifinfomsg` (netlink(7), rtnetlink(7)).
const HEAD: usize = 16;
const IFINFO: usize = 16;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST`, `NLM_F_ROOT` and `NLM_F_MATCH`: requests all devices.
const DUMP: u16 = 0x301;
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
pub struct Seen {
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
pub struct LinkList {
    socket: Socket,
    asked: u32,
}

impl LinkList {
    /// Opens a list of a process's namespace, and a watch on it. The watch reports changes made after a listing.
    ///
    /// # Errors
    /// Like [`LinkWatch::open`], and if it is the caller's own namespace, which belongs to no VM.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(process: &Meant) -> Result<(Self, LinkWatch), LinkError> {
        let netns = Netns::of_process(process)?;
        if netns.is_here() {
            let source = io::Error::other("expected a separate namespace, found the agent's own");
            return Err(LinkError::Namespace { name: process.name().into(), source });
        }
        let watch = LinkWatch::opener();
        netns.run(|| {
            let socket = Socket::new(NETLINK_ROUTE).and_then(|socket| {
                // The kernel answers before the system call of the request returns.
                socket.set_non_blocking(true)?;
                Ok(socket)
            });
            let socket = socket.map_err(|source| LinkError::device("list devices", source))?;
            Ok((Self { socket, asked: 0 }, watch()?))
        })
    }

    /// The current Ethernet devices, the first [`DEVICES_MAX`] of them. Blocks while other processes change devices.
    ///
    /// # Errors
    /// If the kernel does not answer; open another list then.
    pub fn look(&mut self) -> Result<Vec<Seen>, LinkError> {
        self.ask().map_err(|source| LinkError::device("list devices", source))
    }

    fn ask(&mut self) -> io::Result<Vec<Seen>> {
        self.asked = self.asked.wrapping_add(1);
        self.socket.send(&question(self.asked), 0)?;
        let mut seen = Vec::new();
        let mut answer = Vec::with_capacity(ANSWER);
        for _ in 0..ANSWERS {
            answer.clear();
            self.socket.recv(&mut answer, 0)?;
            if take(&answer, self.asked, &mut seen)? {
                return Ok(seen);
            }
        }
        Err(io::Error::other("more devices than the limit of one request"))
    }
}

/// Requests all devices.
fn question(number: u32) -> [u8; HEAD + IFINFO] {
    let mut question = [0; HEAD + IFINFO];
    let length = (HEAD + IFINFO) as u32;
    question[..4].copy_from_slice(&length.to_ne_bytes());
    question[4..6].copy_from_slice(&RTM_GETLINK.to_ne_bytes());
    question[6..8].copy_from_slice(&DUMP.to_ne_bytes());
    question[8..12].copy_from_slice(&number.to_ne_bytes());
    question
}

/// Reads the devices from an answer to a request; true after the last one.
fn take(mut answer: &[u8], number: u32, seen: &mut Vec<Seen>) -> io::Result<bool> {
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    while let Some(head) = answer.get(..HEAD) {
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let kind = u16::from_ne_bytes([head[4], head[5]]);
        let about = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
        let body = answer.get(HEAD..length).ok_or_else(short)?;
        match kind {
            // The rest of the answer to a failed request.
            _ if about != number => {}
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let errno =
                    body.get(..4).and_then(|errno| errno.try_into().ok()).map_or(0, i32::from_ne_bytes);
                return Err(io::Error::from_raw_os_error(errno.wrapping_neg()));
            }
            RTM_NEWLINK if seen.len() < DEVICES_MAX => seen.extend(device(body)),
            _ => {}
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// The Ethernet device that a message describes.
fn device(body: &[u8]) -> Option<Seen> {
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
    Some(Seen { name, kind, mac, queues })
}

#[cfg(test)]
mod tests {
    use super::{DEVICES_MAX, HEAD, Seen, take};
    use metadata_common::mac::Mac;
    use std::io;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).expect("short");
        let mut all = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        all.extend(value);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEAD + body.len()).expect("short");
        let mut all = length.to_ne_bytes().to_vec();
        all.extend([kind.to_ne_bytes(), [0; 2]].concat());
        all.extend([number.to_ne_bytes(), [0; 4]].concat());
        all.extend(body);
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
            let answer = [message(16, 7, &tap(&attributes)), message(3, 7, &[0; 4])].concat();
            let mut seen = Vec::new();
            assert!(take(&answer, 7, &mut seen).expect("an answer"));
            let mac = Mac([2, 0, 0, 0, 0, 1]);
            assert_eq!(seen, [Seen { name: "tap0".into(), kind: "tap".into(), mac, queues }]);
        }
    }

    #[test]
    fn other_devices_and_answers_to_other_requests_are_omitted() {
        let loopback = device(772, &[attribute(3, b"lo\0"), attribute(1, &[0; 6])]);
        let nameless = device(1, &[attribute(1, &[0; 6])]);
        let other = message(3, 6, &[0; 4]);
        let answer = [other, message(16, 6, &tap(&[])), message(16, 7, &loopback), message(16, 7, &nameless)];
        let mut seen = Vec::new();
        assert!(!take(&answer.concat(), 7, &mut seen).expect("no end yet"));
        assert_eq!(seen, []);
    }

    #[test]
    fn a_refusal_and_a_truncated_answer_are_errors() {
        let refusal = message(2, 7, &(-libc::EBUSY).to_ne_bytes());
        let error = take(&refusal, 7, &mut Vec::new()).expect_err("refused");
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        for length in [0_u32, 15, 4_000] {
            let mut cut = message(16, 7, &tap(&[]));
            cut[..4].copy_from_slice(&length.to_ne_bytes());
            let error = take(&cut, 7, &mut Vec::new()).expect_err("cut");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
    }

    #[test]
    fn devices_beyond_the_limit_are_omitted() {
        let one = message(16, 7, &tap(&[]));
        let mut seen = Vec::new();
        take(&one.repeat(DEVICES_MAX + 1), 7, &mut seen).expect("an answer");
        assert_eq!(seen.len(), DEVICES_MAX);
    }
}
