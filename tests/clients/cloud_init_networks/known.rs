//! Faults of cloud-init that no document avoids. `reference/guest-networks.md` describes each.
//!
//! The list is exact: every cell in it must fail. Besides the releases of the test it was made with 23.1, 23.4, 24.1,
//! 24.4 and 25.3, so the end of `releases` may be later than the release that has the fix.

use super::meaning::Part;

/// A fault of cloud-init.
pub(super) struct Known {
    documents: &'static [&'static str],
    renderers: &'static [&'static str],
    /// First release with the fault, and first release without it.
    releases: ((u32, u32), (u32, u32)),
    parts: &'static [Part],
    /// Number of the issue or pull request in canonical/cloud-init; `None` if nobody has reported it.
    pub(super) issue: Option<u32>,
}

impl Known {
    /// Whether it explains a difference in this part of the meaning.
    pub(super) fn covers(&self, document: &str, renderer: &str, release: (u32, u32), part: Part) -> bool {
        let (first, fixed) = self.releases;
        self.documents.contains(&document)
            && self.renderers.contains(&renderer)
            && (first..fixed).contains(&release)
            && self.parts.contains(&part)
    }
}

/// The release of a fault that is not fixed.
const NEVER: (u32, u32) = (u32::MAX, 0);
/// The release of a fault that is as old as the renderer.
const ALWAYS: (u32, u32) = (0, 0);

pub(super) const KNOWN: &[Known] = &[
    Known {
        documents: &["NoCloud's ISO image", "OpenStack", "Hetzner"],
        renderers: &["sysconfig"],
        releases: (ALWAYS, (22, 4)),
        parts: &[Part::Anything],
        issue: Some(3940),
    },
    Known {
        documents: &["Oracle"],
        renderers: &["eni", "sysconfig", "networkd", "network-manager", "netplan"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::Anything, Part::Dhcp],
        issue: Some(6123),
    },
    Known {
        documents: &["Azure"],
        renderers: &["eni", "sysconfig", "netplan"],
        releases: (ALWAYS, (22, 4)),
        parts: &[Part::Devices],
        issue: None,
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["sysconfig", "netplan"],
        releases: (ALWAYS, (22, 4)),
        parts: &[Part::Devices],
        issue: Some(3856),
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["sysconfig", "networkd", "network-manager", "netplan"],
        releases: ((23, 1), (24, 4)),
        parts: &[Part::Devices],
        issue: Some(3856),
    },
    Known {
        documents: &["NoCloud's ISO image", "OpenStack", "Hetzner", "Vultr"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::Mtu],
        issue: Some(1224),
    },
    Known {
        documents: &["Oracle"],
        renderers: &["eni", "sysconfig", "networkd", "network-manager", "netplan"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Mtu],
        issue: Some(6844),
    },
    Known {
        documents: &["NoCloud, `legacy_eni`"],
        renderers: &["network-manager"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Dhcp],
        issue: Some(3837),
    },
    Known {
        documents: &["OpenStack", "UpCloud", "Vultr", "NWCS"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (23, 4)),
        parts: &[Part::Dhcp],
        issue: Some(3837),
    },
    Known {
        documents: &["Oracle"],
        renderers: &["eni", "sysconfig", "networkd", "network-manager"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Addresses6],
        issue: Some(6843),
    },
    Known {
        documents: &["Oracle"],
        renderers: &["netplan"],
        releases: ((22, 4), NEVER),
        parts: &[Part::Addresses6],
        issue: Some(6843),
    },
    Known {
        documents: &["NoCloud's ISO image"],
        renderers: &["eni", "network-manager"],
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::DefaultRoutes, Part::Routes],
        issue: Some(1973),
    },
    Known {
        documents: &["NoCloud's ISO image"],
        renderers: &["networkd"],
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::DefaultRoutes, Part::Routes],
        issue: Some(4067),
    },
    Known {
        documents: &["NoCloud's ISO image"],
        renderers: &["sysconfig"],
        releases: ((22, 4), (23, 1)),
        parts: &[Part::DefaultRoutes, Part::Routes],
        issue: Some(1973),
    },
    Known {
        documents: &["OpenStack", "Scaleway"],
        renderers: &["eni"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::DefaultRoutes],
        issue: None,
    },
    Known {
        documents: &["NoCloud's ISO image", "OpenStack", "Hetzner", "Vultr", "NWCS"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::Metrics],
        issue: Some(5877),
    },
    Known {
        documents: &["NoCloud's ISO image"],
        renderers: &["eni", "sysconfig", "networkd"],
        releases: (ALWAYS, (23, 4)),
        parts: &[Part::Metrics],
        issue: Some(4217),
    },
    Known {
        documents: &[
            "NoCloud's ISO image",
            "OpenStack",
            "Hetzner",
            "NoCloud",
            "CloudCIX",
            "Vultr",
            "NWCS",
            "Scaleway",
        ],
        renderers: &["eni"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::OnLink],
        issue: Some(5940),
    },
    Known {
        documents: &[
            "NoCloud's ISO image",
            "OpenStack",
            "Hetzner",
            "NoCloud",
            "CloudCIX",
            "Vultr",
            "NWCS",
            "Scaleway",
        ],
        renderers: &["networkd"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::OnLink],
        issue: Some(4995),
    },
    Known {
        documents: &["NoCloud, `legacy_eni`", "DigitalOcean", "UpCloud"],
        renderers: &["netplan"],
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::OnLink],
        issue: Some(4060),
    },
    Known {
        documents: &["NoCloud, `legacy_eni`", "DigitalOcean", "UpCloud"],
        renderers: &["networkd"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::OnLink],
        issue: Some(4995),
    },
    Known {
        documents: &["OpenStack", "Hetzner", "Vultr", "NWCS", "Scaleway"],
        renderers: &["netplan"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::OnLink],
        issue: Some(5940),
    },
    Known {
        documents: &["DigitalOcean", "UpCloud", "Vultr"],
        renderers: &["eni"],
        releases: ((25, 3), NEVER),
        parts: &[Part::Dns],
        issue: Some(6331),
    },
    Known {
        documents: &["DigitalOcean", "UpCloud", "Vultr"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 1)),
        parts: &[Part::Dns],
        issue: Some(4637),
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (23, 4)),
        parts: &[Part::Dns],
        issue: Some(4637),
    },
    Known {
        documents: &["NoCloud's ISO image", "Hetzner", "NoCloud", "CloudCIX", "Vultr"],
        renderers: &["eni"],
        releases: ((26, 2), NEVER),
        parts: &[Part::Search],
        issue: Some(6331),
    },
    // Only of a NIC with IPv4 addresses alone whose name servers all have IPv6 ones.
    Known {
        documents: &["NoCloud, `legacy_eni`", "NWCS"],
        renderers: &["eni"],
        releases: ((26, 2), NEVER),
        parts: &[Part::Search],
        issue: Some(6331),
    },
    Known {
        documents: &["Vultr"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 1)),
        parts: &[Part::Search],
        issue: Some(4637),
    },
    Known {
        documents: &["NoCloud's ISO image", "NoCloud", "CloudCIX"],
        renderers: &["networkd"],
        releases: (ALWAYS, (25, 3)),
        parts: &[Part::Vlan, Part::Bond],
        issue: Some(6324),
    },
    Known {
        documents: &["OpenStack", "Hetzner", "Vultr"],
        renderers: &["networkd"],
        releases: (ALWAYS, (26, 2)),
        parts: &[Part::Vlan],
        issue: Some(6324),
    },
    Known {
        documents: &["NoCloud's ISO image", "Hetzner", "NoCloud", "CloudCIX", "Vultr"],
        renderers: &["network-manager"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Bond],
        issue: Some(6932),
    },
    Known {
        documents: &["Hetzner", "Vultr"],
        renderers: &["networkd"],
        releases: (ALWAYS, (26, 2)),
        parts: &[Part::Bond],
        issue: Some(6324),
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::Bond],
        issue: Some(6932),
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["networkd"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Bond],
        issue: Some(6576),
    },
    Known {
        documents: &["OpenStack"],
        renderers: &["sysconfig"],
        releases: ((24, 4), NEVER),
        parts: &[Part::Bond],
        issue: Some(6576),
    },
];
