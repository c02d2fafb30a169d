//! The path from a guest's tap to a neighbour.
//!
//! ```text
//!  none         tap0 ── br0 ── veth ── neighbour
//!  bridge       tap0 ── br0 ── veth │ br0 ── veth ── neighbour
//!  masquerade   tap0 ── br0 (router, NAT) ── veth │ br0 ── veth ── neighbour
//!                             the pod │ the node
//! ```

use anyhow::Result;
use shell::tools;
use std::process::Command;
use support::netns::{self, Namespace};
use support::tap::{Shape, Tap};

/// The binding by which KubeVirt connects a VM's NIC with its pod's
/// (<https://kubevirt.io/user-guide/network/interfaces_and_networks/>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Binding {
    /// A bridge connects the tap and the pod's NIC
    Bridge,
    /// The pod routes, and translates the VM's address to its own
    Masquerade,
}

/// A bridge, and a veth pair on it.
const BRIDGE: &str = "link add br0 type bridge\nlink add sink0 type veth peer name far0\n\
                      link set sink0 up\nlink set br0 up\n";
/// The guest's router, and the route to its neighbour.
const ROUTER: &str = "link set br0 address 52:54:00:00:00:02\naddr add 10.0.2.1/28 dev br0\n\
                      addr add 10.9.0.1/24 dev sink0\nroute add 10.0.2.16/32 dev sink0\n\
                      neigh add 10.0.2.16 lladdr 52:54:00:00:00:03 dev sink0\n";
/// The rules of KubeVirt's masquerade binding, without its counters.
const NAT: &str = "add table ip nat
    add chain ip nat prerouting { type nat hook prerouting priority -100; }
    add chain ip nat postrouting { type nat hook postrouting priority 100; }
    add rule ip nat prerouting iifname sink0 dnat to 10.0.2.15
    add rule ip nat postrouting ip saddr 10.0.2.15 masquerade";

/// The namespaces, tap and bridges of a path. They are deleted when it is dropped.
pub(crate) struct Way {
    binding: Option<Binding>,
    ns: Namespace,
    node: Option<Namespace>,
    tap: Tap,
}

impl Way {
    /// Makes the path for a guest 10.0.2.15. Its neighbour is 10.0.2.16 and is reached at 52:54:00:00:00:02.
    pub(crate) fn lay(binding: Option<Binding>) -> Result<Self> {
        let ns = Namespace::new("traffic")?;
        let tap = Tap::create(&ns, "tap0", Shape::virtio())?;
        ns.ip_batch(&format!("{BRIDGE}link set tap0 master br0\nlink set tap0 up\n"))?;
        if binding == Some(Binding::Masquerade) {
            tools::ensure(&[("nft", "nftables")])?;
            ns.sysctl("ipv4/ip_forward", "1")?;
            ns.ip_batch(ROUTER)?;
            ns.run_in(|| netns::run(Command::new("nft").arg(NAT)))?;
        } else {
            ns.ip("link set sink0 master br0")?;
        }
        let node = binding.map(|_| Namespace::new("node")).transpose()?;
        if let Some(node) = &node {
            ns.ip(&format!("link set far0 netns {} name pod0", node.name()))?;
            node.ip_batch(&format!(
                "{BRIDGE}link set sink0 master br0\nlink set pod0 master br0\nlink set pod0 up\n"
            ))?;
        }
        let way = Self { binding, ns, node, tap };
        way.end().ip("link set far0 up")?;
        Ok(way)
    }

    /// Returns a few words for titles.
    pub(crate) const fn name(&self) -> &'static str {
        match self.binding {
            None => "through a bridge",
            Some(Binding::Bridge) => "out of a pod by a bridge",
            Some(Binding::Masquerade) => "out of a pod by masquerade",
        }
    }

    /// Returns the namespace of the tap.
    pub(crate) const fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// Returns the namespace of the neighbour.
    pub(crate) fn end(&self) -> &Namespace {
        self.node.as_ref().unwrap_or(&self.ns)
    }

    /// Returns the guest's tap.
    pub(crate) const fn tap(&self) -> &Tap {
        &self.tap
    }
}
