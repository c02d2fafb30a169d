//! Connects guests' taps and a peer's listener by kernel bridges.
//!
//! The bridges are set up as a careful operator would do it, so that the peer is measured and not a mistake. A guest's
//! broadcasts are not flooded to a thousand others. Neighbour entries are permanent, as an SDN controller sets them.
//! They are therefore exempt from the kernel's limits of the neighbour table, which hold for the whole machine.

use super::Tenant;
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use support::guest::METADATA;
use support::netns::Namespace;

/// The most ports of one bridge. The kernel numbers ports with 10 bits (net/bridge/br_private.h, BR_PORT_BITS).
const MAX_PORTS: usize = 1_000;
/// The most connections that may wait for a server to accept them; more than there are guests.
const BACKLOG: &str = "65535";
/// A network's end of the veth pair, inside its namespace.
const UPLINK: &str = "eth0";

/// Bridges with guests' taps on them. [`Networks::remove`] or a drop deletes them; the taps stay.
pub(super) struct Networks<'a> {
    node: &'a Namespace,
    /// Bridges, and veth pairs to namespaces.
    links: Vec<String>,
    /// One namespace per bridge, if each network has its own listener.
    namespaces: Vec<Namespace>,
}

/// Distributes the guests over networks in equal shares, in order.
pub(super) fn shares(guests: usize, networks: usize) -> Result<Vec<std::ops::Range<usize>>> {
    ensure!(networks >= 1, "expected at least one network");
    let networks = networks.min(guests.max(1));
    let most = guests.div_ceil(networks);
    ensure!(
        most <= MAX_PORTS,
        "{networks} networks have {most} guests each, but a bridge has at most {MAX_PORTS} ports; use at least {} \
         networks",
        guests.div_ceil(MAX_PORTS)
    );
    Ok((0..networks).map(|n| n * guests / networks..(n + 1) * guests / networks).collect())
}

impl<'a> Networks<'a> {
    /// Makes as few bridges as can hold all guests, each with the metadata address itself, for one server on the node.
    pub(super) fn on_node(node: &'a Namespace, tenants: &[Tenant]) -> Result<Self> {
        allow_backlog(node)?;
        let mut made = Self { node, links: Vec::new(), namespaces: Vec::new() };
        for (number, share) in
            shares(tenants.len(), tenants.len().div_ceil(MAX_PORTS).max(1))?.into_iter().enumerate()
        {
            let bridge = bridge_name(number);
            node.ip_batch(
                &(bridge_lines(&bridge, number) + &address_lines(&bridge, &tenants[share.clone()])),
            )?;
            made.links.push(bridge.clone());
            node.ip_batch(&enslave_lines(&bridge, &tenants[share]))?;
        }
        Ok(made)
    }

    /// Makes one bridge per network, each connected to a namespace that has the metadata address, for one server each.
    pub(super) fn apart(node: &'a Namespace, tenants: &[Tenant], networks: usize) -> Result<Self> {
        let mut made = Self { node, links: Vec::new(), namespaces: Vec::new() };
        for (number, share) in shares(tenants.len(), networks)?.into_iter().enumerate() {
            let (bridge, cable) = (bridge_name(number), format!("stormup{number}"));
            let inside = Namespace::new("storm-net")?;
            allow_backlog(&inside)?;
            let mut lines = bridge_lines(&bridge, number);
            writeln!(lines, "link add {cable} type veth peer name {UPLINK} netns {}", inside.name())?;
            writeln!(lines, "link set {cable} master {bridge} up")?;
            node.ip_batch(&lines)?;
            made.links.extend([cable, bridge.clone()]);
            let tenants = &tenants[share];
            inside.ip_batch(&format!("link set {UPLINK} up\n{}", address_lines(UPLINK, tenants)))?;
            made.namespaces.push(inside);
            node.ip_batch(&enslave_lines(&bridge, tenants))?;
        }
        Ok(made)
    }

    /// Returns the networks' namespaces, if each network has one.
    pub(super) fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// Deletes the bridges; the kernel frees the taps on them. The servers must have ended.
    pub(super) fn remove(mut self) -> Result<()> {
        self.take_away()
    }

    fn take_away(&mut self) -> Result<()> {
        // The veth pairs are deleted too, because a removed namespace deletes its end only some time later.
        let lines: String = self.links.drain(..).map(|link| format!("link del {link}\n")).collect();
        if lines.is_empty() {
            return Ok(());
        }
        self.node.ip_batch(&lines).context("cannot delete a peer's bridges")
    }
}

impl Drop for Networks<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.take_away() {
            eprintln!("{error:#}");
        }
    }
}

/// Raises the limits of connections that wait for a listener.
fn allow_backlog(ns: &Namespace) -> Result<()> {
    ns.sysctl("core/somaxconn", BACKLOG)?;
    ns.sysctl("ipv4/tcp_max_syn_backlog", BACKLOG)
}

fn bridge_name(number: usize) -> String {
    format!("stormbr{number}")
}

fn bridge_lines(bridge: &str, number: usize) -> String {
    // A bridge without a MAC of its own uses a port's. That MAC would change when the port is removed, and guests would
    // keep using the old one.
    let [high, low] = u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
    format!(
        "link add {bridge} address 02:00:a9:fe:{high:02x}:{low:02x} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
         link set {bridge} up\n"
    )
}

fn address_lines(device: &str, tenants: &[Tenant]) -> String {
    let mut lines = format!("addr add {METADATA}/32 dev {device}\n");
    for Tenant { address, mac, .. } in tenants {
        let _ = writeln!(lines, "neigh replace {address} lladdr {mac} dev {device} nud permanent");
        let _ = writeln!(lines, "route add {address}/32 dev {device}");
    }
    lines
}

fn enslave_lines(bridge: &str, tenants: &[Tenant]) -> String {
    let mut lines = String::new();
    for Tenant { tap, .. } in tenants {
        let _ = writeln!(lines, "link set {tap} master {bridge} up");
        let _ = writeln!(
            lines,
            "link set {tap} type bridge_slave isolated on flood off mcast_flood off bcast_flood off"
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::shares;

    #[test]
    fn every_guest_is_on_one_network_and_shares_are_equal_within_one() {
        for (guests, networks) in [(1, 1), (7, 3), (1_000, 8), (4_000, 8), (3, 8), (0, 1)] {
            let shares = shares(guests, networks).expect("shares");
            let all: Vec<usize> = shares.iter().cloned().flatten().collect();
            assert_eq!(all, (0..guests).collect::<Vec<_>>(), "{guests} on {networks}");
            let sizes = || shares.iter().map(ExactSizeIterator::len);
            assert!(sizes().max().unwrap_or(0) - sizes().min().unwrap_or(0) <= 1, "{shares:?}");
        }
    }

    #[test]
    fn too_many_guests_for_the_bridges_are_refused_with_a_remedy() {
        assert!(shares(1_000, 1).is_ok());
        let error = shares(4_000, 3).expect_err("a refusal").to_string();
        assert!(error.contains("4 networks"), "{error}");
        assert!(shares(10, 0).is_err());
    }
}
