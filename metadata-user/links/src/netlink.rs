//! netlink requests in the calling thread's namespace: create, change, list and delete devices.
//!
//! Each call uses its own small runtime and socket on a new thread, because the caller may already be in a tokio
//! runtime. A new thread starts in the namespace of its creator.
//!
//! A [`NetlinkSocket`] sends one request (netlink(7)) and reads its answer without a runtime or a thread. It is for
//! frequent requests, and for answers that no library parses.

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo,
    LinkMessage, LinkXdp,
};
use rtnetlink::sys::Socket;
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth};
use std::io;

use crate::error::LinkError;

/// Runs one netlink exchange in the namespace of the calling thread, with its own thread, runtime and socket. It may
/// be called from anywhere, and blocks. `action` completes "cannot".
///
/// # Errors
/// [`LinkError::Device`] with the error of the kernel.
pub fn request<T: Send>(
    action: impl FnOnce() -> String,
    exchange: impl AsyncFnOnce(Handle) -> Result<T, rtnetlink::Error> + Send,
) -> Result<T, LinkError> {
    let attempt = || -> io::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection()?;
            let connection = tokio::spawn(connection);
            let answer = exchange(handle).await.map_err(io_error);
            connection.abort();
            answer
        })
    };
    let answer = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netlink".into()).spawn_scoped(scope, attempt)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    answer.map_err(|source| LinkError::device(action(), source))
}

/// The errno of a netlink error; other failures keep their text.
fn io_error(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}

/// Creates a veth pair with both ends down. The inner end has this many receive queues.
pub fn create_veth(outer: &str, inner: &str, queues: u32) -> Result<(), LinkError> {
    // The kernel takes the queue count from both ends' requests and the number in use from the outer end's.
    let several = LinkAttribute::NumRxQueues(queues);
    let mut veth = LinkVeth::new(outer, inner).append_extra_attribute(several.clone()).build();
    let infos = veth.attributes.iter_mut().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    for info in infos.flatten() {
        if let LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))) = info {
            peer.attributes.push(several.clone());
        }
    }
    request(
        || format!("create the veth pair {outer} and {inner} with {queues} receive queues"),
        async |netlink| netlink.link().add(veth).execute().await,
    )
}

/// Silences a device (no ARP, no multicast, no IPv6 address and hence no ND and MLD), sets its MTU in bytes, and
/// brings it up.
pub fn quiet_and_up(name: &str, ifindex: u32, mtu: u32) -> Result<(), LinkError> {
    // Use both ways: the sysctl disables IPv6 on the device altogether, but is read-only in many containers.
    let sysctl = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    if let Err(error) = std::fs::write(&sysctl, "1") {
        tracing::debug!(device = name, %error, "IPv6 stays enabled on a hub device, without an address");
    }
    let no_address = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let quiet = link(ifindex).arp(false).multicast(false).mtu(mtu).build();
    let silent = link(ifindex).append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![no_address])).build();
    request(
        || format!("configure {name} with an MTU of {mtu} bytes and bring it up"),
        async |netlink| {
            netlink.link().set(quiet).execute().await?;
            // A kernel without IPv6 lacks this attribute and generates no addresses.
            if let Err(error) = netlink.link().set(silent).execute().await {
                tracing::debug!(device = name, %error, "cannot disable IPv6 address generation");
            }
            netlink.link().set(link(ifindex).up().build()).execute().await
        },
    )
}

/// A message about the device of this index.
#[must_use]
pub fn link(ifindex: u32) -> LinkMessageBuilder<LinkUnspec> {
    LinkUnspec::new_with_index(ifindex)
}

/// Deletes a device. A missing device is not an error.
pub fn delete(name: &str, ifindex: u32) -> Result<(), LinkError> {
    let outcome =
        request(|| format!("delete {name}"), async |netlink| netlink.link().del(ifindex).execute().await);
    match outcome {
        Err(LinkError::Device { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other,
    }
}

/// The MTU of a device in bytes.
pub fn mtu(name: &str, ifindex: u32) -> Result<u32, LinkError> {
    link_of(name, ifindex).map(|message| mtu_of(&message))
}

/// The MTU in a message, 0 if it has none.
pub fn mtu_of(message: &LinkMessage) -> u32 {
    let mtu = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    mtu.unwrap_or(0)
}

/// The kind of a device (`veth`, `tap`, `bridge`…), `physical device` if it has none.
pub fn kind(name: &str, ifindex: u32) -> Result<String, LinkError> {
    kind_and_mtu(name, ifindex).map(|(kind, _)| kind)
}

/// The kind of a device, as from [`kind`], and its MTU in bytes.
pub fn kind_and_mtu(name: &str, ifindex: u32) -> Result<(String, u32), LinkError> {
    let message = link_of(name, ifindex)?;
    let mtu = mtu_of(&message);
    let infos = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let kind = infos.into_iter().flatten().find_map(|info| match info {
        LinkInfo::Kind(kind) => Some(kind),
        _ => None,
    });
    let kind = match kind {
        Some(InfoKind::Veth) => VETH.into(),
        Some(InfoKind::Tun) => TUN.into(),
        Some(kind) => kind.to_string(),
        None => "physical device".into(),
    };
    Ok((kind, mtu))
}

/// The kind of a veth, as from [`kind`].
pub const VETH: &str = "veth";

/// The kind of a tap, as from [`kind`].
pub const TUN: &str = "tap";

/// Numbers of the XDP programs on a device.
pub fn xdp_programs(name: &str, ifindex: u32) -> Result<Vec<u32>, LinkError> {
    let message = link_of(name, ifindex)?;
    let of_link = message.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::Xdp(entries) => Some(entries),
        _ => None,
    });
    let mut ids: Vec<u32> = of_link
        .flatten()
        .filter_map(|entry| match entry {
            LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => {
                Some(*id)
            }
            _ => None,
        })
        .collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// All devices of the calling thread's namespace.
///
/// # Errors
/// [`LinkError::Device`] if the kernel refuses to list them.
pub fn list() -> Result<Vec<LinkMessage>, LinkError> {
    request(|| "list devices".into(), async |netlink| netlink.link().get().execute().try_collect().await)
}

/// The message that describes the device of this name and index.
///
/// # Errors
/// [`LinkError::Device`] if there is no such device, or the kernel refuses.
pub fn link_of(name: &str, ifindex: u32) -> Result<LinkMessage, LinkError> {
    request(
        || format!("query {name}"),
        async |netlink| {
            let mut answer = std::pin::pin!(netlink.link().get().match_index(ifindex).execute());
            answer.try_next().await?.ok_or(rtnetlink::Error::RequestFailed)
        },
    )
}

/// Maximum number of bytes that the kernel returns in one read (Linux: `NLMSG_GOODSIZE`, `netlink_recvmsg`).
const ANSWER: usize = 32 << 10;
/// Limit on reads for one request. The description of a device takes one to two kilobytes.
const ANSWERS: usize = 1_024;

/// `struct nlmsghdr`.
const HEAD: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST`; with `NLM_F_ROOT` and `NLM_F_MATCH` it requests everything there is.
const REQUEST: u16 = 1;
const DUMP: u16 = 0x301;

/// A netlink socket of the namespace in which it was opened.
#[derive(Debug)]
pub struct NetlinkSocket {
    socket: Socket,
    /// The number of the last request.
    asked: u32,
}

impl NetlinkSocket {
    /// Opens a socket of a protocol, such as `NETLINK_ROUTE`.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let socket = Socket::new(protocol)?;
        // The kernel answers before the system call of the request returns.
        socket.set_non_blocking(true)?;
        Ok(Self { socket, asked: 0 })
    }

    /// Sends a request of this kind that lists all objects, and passes kind and body of each message of the answer to
    /// `each`. Blocks while other processes change devices.
    ///
    /// # Errors
    /// If the kernel refuses or does not answer; open another socket then.
    pub fn dump(&mut self, kind: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, DUMP, body, each)
    }

    /// Like [`dump`](Self::dump), for a request that has one message as its answer.
    ///
    /// # Errors
    /// Like [`dump`](Self::dump).
    pub fn request(&mut self, kind: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, REQUEST, body, each)
    }

    fn send(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.asked = self.asked.wrapping_add(1);
        let mut question = Vec::with_capacity(HEAD + body.len());
        // A request has a few dozen bytes.
        question.extend(((HEAD + body.len()) as u32).to_ne_bytes());
        question.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
        question.extend(self.asked.to_ne_bytes());
        question.extend([0; 4]);
        question.extend(body);
        self.socket.send(&question, 0)?;
        let mut answer = Vec::with_capacity(ANSWER);
        for _ in 0..ANSWERS {
            answer.clear();
            self.socket.recv(&mut answer, 0)?;
            match read(&answer, self.asked, &mut each)? {
                Progress::Done => return Ok(()),
                Progress::Some if flags == REQUEST => return Ok(()),
                Progress::Some | Progress::None => {}
            }
        }
        Err(io::Error::other("more devices than the limit of one request"))
    }
}

/// How much of an answer was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// No message.
    None,
    /// At least one message.
    Some,
    /// The last message.
    Done,
}

/// Reads the messages that answer request `number`. Ignores other messages: they belong to the answer of
/// an earlier request that failed.
pub(crate) fn read(
    mut answer: &[u8],
    number: u32,
    each: &mut impl FnMut(u16, &[u8]),
) -> io::Result<Progress> {
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let mut progress = Progress::None;
    while let Some(head) = answer.get(..HEAD) {
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let about = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
        let body = answer.get(HEAD..length).ok_or_else(short)?;
        match u16::from_ne_bytes([head[4], head[5]]) {
            _ if about != number => {}
            NLMSG_DONE => return Ok(Progress::Done),
            NLMSG_ERROR => {
                let errno = body.first_chunk().map_or(0, |errno| i32::from_ne_bytes(*errno));
                return Err(io::Error::from_raw_os_error(errno.wrapping_neg()));
            }
            kind => {
                each(kind, body);
                progress = Progress::Some;
            }
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(progress)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{HEAD, NLMSG_DONE, NLMSG_ERROR, Progress, read};
    use std::io;

    pub(crate) fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEAD + body.len()).expect("short");
        let mut all = length.to_ne_bytes().to_vec();
        all.extend([kind.to_ne_bytes(), [0; 2]].concat());
        all.extend([number.to_ne_bytes(), [0; 4]].concat());
        all.extend(body);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn kinds(answer: &[u8]) -> io::Result<(Vec<u16>, Progress)> {
        let mut kinds = Vec::new();
        let progress = read(answer, 7, &mut |kind, _| kinds.push(kind))?;
        Ok((kinds, progress))
    }

    #[test]
    fn messages_are_read_to_the_end_and_those_of_other_requests_are_ignored() {
        let one = [message(NLMSG_DONE, 6, &[0; 4]), message(16, 6, &[]), message(20, 7, &[0; 5])].concat();
        assert_eq!(kinds(&one).expect("messages"), (vec![20], Progress::Some));
        let all = [one, message(NLMSG_DONE, 7, &[]), message(16, 7, &[])].concat();
        assert_eq!(kinds(&all).expect("messages"), (vec![20], Progress::Done));
        assert_eq!(kinds(&message(16, 6, &[])).expect("a message"), (vec![], Progress::None));
    }

    #[test]
    fn a_refusal_and_a_truncated_answer_are_errors() {
        let refused = kinds(&message(NLMSG_ERROR, 7, &(-libc::EBUSY).to_ne_bytes())).expect_err("refused");
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
        let whole = message(16, 7, &[1; 40]);
        for length in HEAD..whole.len() {
            let error = kinds(&whole[..length]).expect_err("cut");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
        for length in [0_u32, 15, 4_000] {
            let mut wrong = whole.clone();
            wrong[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(kinds(&wrong).is_err(), "{length}");
        }
    }
}
