//! The addresses at which guests look for metadata, and the endpoints of their connections.
//!
//! Each address is served by default, because an image asks only the address that its datasource knows. A served address
//! disappears from the guest's network: what the guest sends to it reaches this service and nothing else.

use crate::maps::Slot;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address that nearly every client asks first (IPv4 link-local, RFC 3927; introduced by EC2).
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The same service by IPv6 link-local: OpenStack (nova's `metadata_link_local` address, also used by Ignition) and
/// Hetzner. It is always on-link, on the NIC that the guest names as zone.
pub const METADATA_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
/// EC2 by IPv6 (cloud-init `DataSourceEc2.py`, AWS SDKs with `AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE=IPv6`).
pub const EC2: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
/// Oracle by IPv6 (cloud-init `DataSourceOracle.py`).
pub const ORACLE: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
/// Akamai by IPv6, asked before IPv4 (cloud-init `DataSourceAkamai.py`).
pub const AKAMAI: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1);
/// Azure's wireserver (WALinuxAgent, cloud-init `DataSourceAzure.py`). This is a public address of Microsoft: do not
/// serve it where guests need the real one.
pub const AZURE_WIRESERVER: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);
/// Scaleway (cloud-init `DataSourceScaleway.py`).
pub const SCALEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 42, 42);
/// Scaleway by IPv6.
pub const SCALEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42);
/// Alibaba Cloud (cloud-init `DataSourceAliYun.py`). It lies in the shared address space of RFC 6598: do not serve it
/// where guests have neighbours there.
pub const ALIYUN: Ipv4Addr = Ipv4Addr::new(100, 100, 100, 200);

/// All of the above: the addresses served by default.
pub const ALL: [IpAddr; 9] = [
    IpAddr::V4(METADATA),
    IpAddr::V6(METADATA_LINK_LOCAL),
    IpAddr::V6(EC2),
    IpAddr::V6(ORACLE),
    IpAddr::V6(AKAMAI),
    IpAddr::V4(AZURE_WIRESERVER),
    IpAddr::V4(SCALEWAY),
    IpAddr::V6(SCALEWAY_V6),
    IpAddr::V4(ALIYUN),
];

/// The next hop by which cloud-init routes to [`SCALEWAY`] (`DataSourceScaleway.py` adds 169.254.42.42/32 via
/// 62.210.0.1 on-link). The address belongs to a host on the Internet: ARP for it is answered, but IP sent to it
/// passes.
pub const SCALEWAY_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(62, 210, 0, 1);

/// The slot and the endpoints of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The slot that the kernel found for the frame.
    pub slot: Slot,
    /// The address and port the guest connected to.
    pub local: (IpAddr, u16),
    /// The address and port that the guest claims: for logs and dialect rules, never for identity.
    pub remote: (IpAddr, u16),
}
