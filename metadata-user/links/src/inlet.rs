//! An inlet: the path to the service for a pod whose guest has no tap because it uses passt.
//!
//! For each guest connection, passt opens a socket in the pod's namespace to the same destination. An inlet is a veth
//! pair in that namespace, with routes for the metadata addresses to it. Anything that a socket of the pod sends to
//! these addresses arrives at the other end of the pair, which is attached like a tap: with the same stack, limits
//! and counters. The namespace is the identity.
//!
//! ```text
//!  guest ── passt ── connect() ── rule, routes ── imds0 ══ imds0-port ── `port` ── hub
//! ```
//!
//! A listening socket on the addresses is not an alternative. passt forwards every port by default and so holds port 80
//! of every address (`--tcp-ports all`, from KubeVirt's generatePasstPortForward). A later listener gets EADDRINUSE,
//! and an earlier one takes port 80 from the guest.
//!
//! - The routes are in a separate table, behind a rule for packets that the namespace itself sends (`iif lo`).
//!   Packets from the pod's network are never routed to the inlet, even if the pod forwards.
//! - passt binds connections to IPv6 link-local addresses to the pod's NIC (`tcp_conn_from_tap`), so the inlet does
//!   not serve these.
//! - Neither end has ARP, ND or an address: the pod's sockets use the pod's addresses.
//! - The pod's end has GRO. Without it the other end accepts no redirected frames.

use futures_util::TryStreamExt as _;
use metadata_common::mac::Mac;
use rtnetlink::packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope};
use rtnetlink::packet_route::rule::{RuleAction, RuleMessage};
use rtnetlink::{Handle, RouteMessageBuilder};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::LinkError;
use crate::ioctl::turn_gro_on;
use crate::netlink;
use crate::netns::{NamespaceReservation, Netns, index_of};
use metadata_common::port::PortName;

/// Name of the pod's end.
pub const POD_END: &str = "imds0";
/// Name of the attached end.
pub const PORT: &str = "imds0-port";
/// Number of the inlet's routing table: `imds` in ASCII, which is unlikely to collide.
const TABLE: u32 = 0x696d_6473;
/// Priority of the rule: after the local table's (0), before the main table's (32,766).
const PRIORITY: u32 = 169;
/// Longest IP packet in bytes, as on Ethernet.
const MTU: u32 = 1_500;
/// Packets from the namespace itself have its loopback as their input interface.
const LOOPBACK: &str = "lo";

/// Makes the inlet in a process's namespace, or repairs an existing one. Frames from the inlet have this source MAC.
/// Blocks meanwhile.
///
/// # Errors
/// If the namespace is gone, devices of other kinds have the inlet's names, or the kernel refuses a step. A new inlet
/// is then removed; an existing one stays, so that it stays closed. IPv6 is skipped in a namespace without it.
pub fn open(process: &NamespaceReservation, mac: Mac, addresses: &[IpAddr]) -> Result<(), LinkError> {
    inside(process, || {
        let is_new = index_of(POD_END)?.or(index_of(PORT)?).is_none();
        if is_new {
            netlink::create_veth(POD_END, PORT, 1)?;
        }
        let (pod_end, port) = find()?;
        make(pod_end, port, mac, addresses).inspect_err(|_| {
            if is_new {
                // Report the first error: it is the cause.
                _ = remove();
            }
        })
    })
}

/// Removes the inlet in a process's namespace, if there is one.
///
/// # Errors
/// If the namespace is gone or the kernel refuses.
pub fn close(process: &NamespaceReservation) -> Result<(), LinkError> {
    inside(process, remove)
}

/// True for the attached end of an inlet.
#[must_use]
pub fn is_inlet(port: &PortName) -> bool {
    port.netns.is_some() && port.ifname == PORT
}

/// The subset of the metadata addresses that an inlet serves.
pub fn served(addresses: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
    let is_on_link = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    addresses.iter().copied().filter(move |address| !is_on_link(address))
}

fn inside(
    process: &NamespaceReservation,
    visit: impl FnOnce() -> Result<(), LinkError> + Send,
) -> Result<(), LinkError> {
    let netns = Netns::of_process(process)?;
    if netns.is_here() {
        let source = io::Error::other("expected a separate namespace, found the agent's own");
        return Err(LinkError::Namespace { name: process.name().into(), source });
    }
    netns.run(visit)
}

/// The indexes of both ends; an error if an end is missing.
fn find() -> Result<(u32, u32), LinkError> {
    let of = |name: &str| match index_of(name)? {
        None => Err(not_ours(&format!("no {name}"))),
        Some(ifindex) => match netlink::kind(name, ifindex)? {
            kind if kind == netlink::VETH => Ok(ifindex),
            kind => Err(not_ours(&format!("a {kind} named {name}"))),
        },
    };
    Ok((of(POD_END)?, of(PORT)?))
}

fn not_ours(found: &str) -> LinkError {
    let expected = format!("expected a veth pair of these names, or neither of them, found {found}");
    LinkError::device(format!("make {POD_END} and {PORT}"), io::Error::other(expected))
}

fn make(pod_end: u32, port: u32, mac: Mac, addresses: &[IpAddr]) -> Result<(), LinkError> {
    netlink::quiet_and_up(PORT, port, MTU)?;
    bring_up(pod_end, mac)?;
    // The other end notices the change only while this device is up (veth_set_features, drivers/net/veth.c).
    turn_gro_on(POD_END)?;
    route_all(pod_end, &served(addresses).collect())
}

/// Makes the pod's end work without ARP, ND and addresses.
fn bring_up(pod_end: u32, mac: Mac) -> Result<(), LinkError> {
    let no_address = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let silent = netlink::link(pod_end);
    let silent = silent.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![no_address])).build();
    let up = netlink::link(pod_end).arp(false).mtu(MTU).address(mac.0.to_vec()).up().build();
    netlink::request(
        || format!("bring {POD_END} up with the MAC {mac}"),
        async |netlink| {
            // A kernel without IPv6 lacks this attribute and generates no addresses.
            if let Err(error) = netlink.link().set(silent).execute().await {
                tracing::debug!("cannot disable IPv6 address generation: {error}");
            }
            netlink.link().set(up).execute().await
        },
    )
}

/// Routes exactly these addresses to the inlet.
fn route_all(pod_end: u32, wanted: &BTreeSet<IpAddr>) -> Result<(), LinkError> {
    netlink::request(
        || format!("route the metadata addresses to {POD_END}"),
        async |netlink| {
            for address in wanted {
                let added = netlink.route().add(route(*address, pod_end)?).replace().execute().await;
                tolerate(added, *address, "an address is not routed")?;
            }
            for (address, stale) in routes(&netlink).await? {
                if !wanted.contains(&address) {
                    netlink.route().del(stale).execute().await?;
                }
            }
            for family in FAMILIES {
                let mut request = netlink.rule().add();
                *request.message_mut() = rule(family);
                match request.execute().await {
                    Err(error) if is(&error, libc::EEXIST) => {}
                    other => tolerate(other, family, "the rule is not made")?,
                }
            }
            Ok(())
        },
    )
}

/// Deletes one end, which also deletes the other and their routes. Devices of these names that are no inlet stay.
fn remove() -> Result<(), LinkError> {
    let pod_end = find().ok().map(|(pod_end, _)| pod_end);
    netlink::request(
        || "delete the rule of the inlet".into(),
        async |netlink| {
            for family in FAMILIES {
                match netlink.rule().del(rule(family)).execute().await {
                    Err(error) if is(&error, libc::ENOENT) => {}
                    other => tolerate(other, family, "the rule is not deleted")?,
                }
            }
            Ok(())
        },
    )?;
    pod_end.map_or(Ok(()), |ifindex| netlink::delete(POD_END, ifindex))
}

/// The unspecified address of each family.
const FAMILIES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// Ignores IPv6 errors in a namespace without IPv6, where no socket can use it.
fn tolerate(done: Result<(), rtnetlink::Error>, of: IpAddr, what: &str) -> Result<(), rtnetlink::Error> {
    match done {
        Err(error) if of.is_ipv6() => {
            tracing::debug!(%of, "{what}: {error}");
            Ok(())
        }
        other => other,
    }
}

fn is(error: &rtnetlink::Error, errno: i32) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message) if message.to_io().raw_os_error() == Some(errno))
}

/// The rule that sends the namespace's own packets to the inlet's table first.
fn rule(family: IpAddr) -> RuleMessage {
    use rtnetlink::packet_route::AddressFamily;
    use rtnetlink::packet_route::rule::RuleAttribute;
    let mut rule = RuleMessage::default();
    rule.header.family = if family.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    rule.header.action = RuleAction::ToTable;
    rule.attributes = vec![
        RuleAttribute::Iifname(LOOPBACK.into()),
        RuleAttribute::Priority(PRIORITY),
        RuleAttribute::Table(TABLE),
    ];
    rule
}

fn route(address: IpAddr, ifindex: u32) -> Result<RouteMessage, rtnetlink::Error> {
    let (length, scope) =
        if address.is_ipv4() { (32, RouteScope::Link) } else { (128, RouteScope::Universe) };
    let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(address, length);
    let route = route.map_err(|_| rtnetlink::Error::RequestFailed)?;
    Ok(route.output_interface(ifindex).table_id(TABLE).scope(scope).build())
}

/// The routes in the inlet's table, by destination.
async fn routes(netlink: &Handle) -> Result<Vec<(IpAddr, RouteMessage)>, rtnetlink::Error> {
    let mut found = Vec::new();
    for question in
        [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()]
    {
        let mut all = std::pin::pin!(netlink.route().get(question).execute());
        while let Some(route) = all.try_next().await? {
            let is_ours = route.attributes.contains(&RouteAttribute::Table(TABLE));
            let leads = route.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
                RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
                _ => None,
            });
            found.extend(leads.filter(|_| is_ours).map(|address| (address, route)));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::served;
    use metadata_common::addresses;

    #[test]
    fn an_inlet_serves_every_address_but_ipv6_link_local() {
        let left_out: Vec<_> = addresses::ALL
            .into_iter()
            .filter(|address| !served(&addresses::ALL).any(|s| s == *address))
            .collect();
        assert_eq!(left_out, [std::net::IpAddr::V6(addresses::METADATA_LINK_LOCAL)]);
    }
}
