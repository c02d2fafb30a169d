//! The addresses at which guests look for metadata, by name.
//!
//! Each is served by default, because an image asks the one its datasource knows and no other. They are
//! taken from the guest's network as a whole: what it sends there reaches this service and nothing else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Where nearly every client asks first (RFC 3927 link-local; EC2's, and everybody's since).
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The same service by IPv6 link-local: OpenStack (nova's `metadata_link_local` address, also asked by
/// Ignition) and Hetzner. Always on-link, on whichever NIC the guest names as zone.
pub const METADATA_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
/// EC2 by IPv6 (cloud-init `DataSourceEc2.py`, AWS SDKs with `AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE=IPv6`).
pub const EC2: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
/// Oracle by IPv6 (cloud-init `DataSourceOracle.py`).
pub const ORACLE: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe);
/// Akamai by IPv6, asked before IPv4 (cloud-init `DataSourceAkamai.py`).
pub const AKAMAI: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1);
/// Azure's wireserver (WALinuxAgent, cloud-init `DataSourceAzure.py`). A public address of Microsoft's:
/// leave it out where guests are to reach the real one.
pub const AZURE_WIRESERVER: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);
/// Scaleway (cloud-init `DataSourceScaleway.py`).
pub const SCALEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 42, 42);
/// Scaleway by IPv6.
pub const SCALEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42);
/// Alibaba Cloud (cloud-init `DataSourceAliYun.py`). In the shared space of RFC 6598: leave it out where
/// guests have neighbours there.
pub const ALIYUN: Ipv4Addr = Ipv4Addr::new(100, 100, 100, 200);

/// All of them: what is served unless the configuration says otherwise.
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

/// The next hop by which cloud-init routes to [`SCALEWAY`] (`DataSourceScaleway.py` adds 169.254.42.42/32
/// via 62.210.0.1 on-link). The address itself is somebody's on the Internet: ARP for it is answered, what
/// is sent to it passes.
pub const SCALEWAY_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(62, 210, 0, 1);
