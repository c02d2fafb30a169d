//! What comes out of the renderers is applied to a real device, and its gateways answer.

use super::meaning::Device;
use anyhow::{Context as _, Result, ensure};
use std::net::IpAddr;
use std::process::Command;
use support::netns::Namespace;

/// Most seconds to wait for an answer to a ping.
const PATIENCE_SECONDS: &str = "10";

/// Gives a guest's NIC this configuration, behind a router that has the gateways' addresses, and pings them.
pub(super) fn reaches_its_gateways(device: &Device) -> Result<()> {
    let (guest, router) = (Namespace::new("guest")?, Namespace::new("router")?);
    guest.ip(&format!("link add eth0 type veth peer name r0 netns {}", router.name()))?;
    let gateways: Vec<IpAddr> =
        device.routes.iter().filter(|route| route.to.ends_with("/0")).map(|route| route.via).collect();
    ensure!(!gateways.is_empty(), "no gateway in {device:?}");
    // Link-local addresses would be useless for a second, too.
    guest.sysctl("ipv6/conf/eth0/accept_dad", "0")?;
    router.sysctl("ipv6/conf/r0/accept_dad", "0")?;
    router.ip("link set r0 up")?;
    guest.ip("link set eth0 up")?;
    for gateway in &gateways {
        router.ip(&format!("addr add {gateway} dev r0{}", without_detection(*gateway)))?;
    }
    for address in &device.addresses {
        let (own, _) = address.split_once('/').context("a prefix length")?;
        let own: IpAddr = own.parse()?;
        guest.ip(&format!("addr add {address} dev eth0{}", without_detection(own)))?;
        router.ip(&format!("route add {own} dev r0"))?;
    }
    for route in &device.routes {
        let on_link = if route.on_link { " onlink" } else { "" };
        guest.ip(&format!("route add {} via {} dev eth0{on_link}", route.to, route.via))?;
    }
    for gateway in gateways {
        let is_link_local = matches!(gateway, IpAddr::V6(address) if address.is_unicast_link_local());
        let scope = if is_link_local { "%eth0" } else { "" };
        let mut ping = Command::new("ping");
        ping.args(["-c", "1", "-W", PATIENCE_SECONDS, &format!("{gateway}{scope}")]);
        let output = guest.output(&mut ping)?;
        ensure!(output.status.success(), "{gateway}: {}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}

/// Duplicate address detection would make an IPv6 address useless for a second.
fn without_detection(address: IpAddr) -> &'static str {
    if address.is_ipv6() { " nodad" } else { "" }
}
