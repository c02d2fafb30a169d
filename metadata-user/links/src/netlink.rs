//! rtnetlink requests: create, change, list and delete devices in the calling thread's namespace.
//!
//! Each call uses its own small runtime and socket on a new thread, because the caller may already be in a tokio
//! runtime. A new thread starts in the namespace of its creator.

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo,
    LinkMessage, LinkXdp,
};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth};
use std::io;

use crate::error::LinkError;

/// Runs one netlink exchange in the namespace of the calling thread, with its own thread, runtime and socket. It may
/// be called from anywhere, and blocks. `action` completes "cannot".
///
/// # Errors
/// [`LinkError::Device`] with the error of the kernel.
pub fn talk<T: Send>(
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
    talk(
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
    talk(
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
        talk(|| format!("delete {name}"), async |netlink| netlink.link().del(ifindex).execute().await);
    match outcome {
        Err(LinkError::Device { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other,
    }
}

/// The MTU of a device in bytes.
pub fn mtu(name: &str, ifindex: u32) -> Result<u32, LinkError> {
    look(name, ifindex).map(|message| mtu_of(&message))
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
    let message = look(name, ifindex)?;
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
    let message = look(name, ifindex)?;
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
    talk(|| "list devices".into(), async |netlink| netlink.link().get().execute().try_collect().await)
}

/// The message that describes the device of this name and index.
///
/// # Errors
/// [`LinkError::Device`] if there is no such device, or the kernel refuses.
pub fn look(name: &str, ifindex: u32) -> Result<LinkMessage, LinkError> {
    talk(
        || format!("query {name}"),
        async |netlink| {
            let mut answer = std::pin::pin!(netlink.link().get().match_index(ifindex).execute());
            answer.try_next().await?.ok_or(rtnetlink::Error::RequestFailed)
        },
    )
}
