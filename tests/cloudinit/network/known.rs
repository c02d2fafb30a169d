//! Faults of cloud-init that no document avoids. Each is a row of `reference/guest-networks.md`.

use super::meaning::Part;

/// A fault of cloud-init.
pub(super) struct Known {
    /// Names of the documents; empty for all.
    documents: &'static [&'static str],
    renderers: &'static [&'static str],
    /// First release with the fault, and first release without it.
    releases: ((u32, u32), (u32, u32)),
    parts: &'static [Part],
}

impl Known {
    /// Whether it explains a difference in this part of the meaning.
    pub(super) fn covers(&self, document: &str, renderer: &str, release: (u32, u32), part: Part) -> bool {
        let (first, fixed) = self.releases;
        (self.documents.is_empty() || self.documents.contains(&document))
            && self.renderers.contains(&renderer)
            && (first..fixed).contains(&release)
            && self.parts.contains(&part)
    }
}

/// The release of a fault that is not fixed.
const NEVER: (u32, u32) = (u32::MAX, 0);
/// The release of a fault that is as old as the renderer.
const ALWAYS: (u32, u32) = (0, 0);

const ALL_BUT_ENI: &[&str] = &["sysconfig", "networkd", "network-manager", "netplan"];
const V1: &[&str] = &["Hetzner", "Vultr", "NWCS"];
const LEGACY: &[&str] = &["NoCloud, `legacy_eni`"];
const OPENSTACK: &[&str] = &["OpenStack"];
/// Documents whose resolvers are one list for all NICs.
const ONE_LIST: &[&str] = &["Vultr", "DigitalOcean", "UpCloud"];

pub(super) const KNOWN: &[Known] = &[
    // Routes have no on-link in version 1 and in network_data, and eni's and networkd's renderers never write one.
    Known {
        documents: &[],
        renderers: &["eni", "networkd"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::OnLink],
    },
    Known { documents: V1, renderers: &["netplan"], releases: (ALWAYS, NEVER), parts: &[Part::OnLink] },
    Known {
        documents: OPENSTACK,
        renderers: &["netplan"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::OnLink],
    },
    // Before 23.1 netplan's renderer does not add on-link to a gateway that needs it.
    Known { documents: &[], renderers: &["netplan"], releases: (ALWAYS, (23, 1)), parts: &[Part::OnLink] },
    // Before 23.1 `::/0` becomes `::/64`, and before 23.4 version 2 loses metrics, in NetworkManager's renderer before
    // 24.4.
    Known {
        documents: &[],
        renderers: &["eni", "sysconfig", "networkd", "network-manager"],
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::DefaultRoutes, Part::Routes],
    },
    Known {
        documents: &[],
        renderers: &["eni", "sysconfig", "networkd"],
        releases: (ALWAYS, (23, 4)),
        parts: &[Part::Metrics],
    },
    Known {
        documents: &[],
        renderers: &["network-manager"],
        releases: (ALWAYS, (24, 4)),
        parts: &[Part::Metrics],
    },
    // The first renderers of sysconfig raise an exception on IPv6 routes without a netmask.
    Known {
        documents: &[],
        renderers: &["sysconfig"],
        releases: (ALWAYS, (22, 4)),
        parts: &[Part::Anything],
    },
    // networkd's renderer knows neither VLANs nor bonds before 25.3, and before 23.1 keeps one gateway for both families.
    Known {
        documents: &[],
        renderers: &["networkd"],
        releases: (ALWAYS, (25, 3)),
        parts: &[Part::Vlan, Part::Bond],
    },
    Known {
        documents: &[],
        renderers: &["networkd"],
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::Anything, Part::Addresses],
    },
    // NetworkManager's renderer writes mode and miimon of a bond only.
    Known {
        documents: &[],
        renderers: &["network-manager"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Bond],
    },
    // Its first releases lose the MTU of bonds, global resolvers, and turn DHCP on for NICs without addresses.
    Known {
        documents: &[],
        renderers: &["network-manager"],
        releases: (ALWAYS, (23, 4)),
        parts: &[Part::Mtu, Part::Dhcp, Part::Dns, Part::Search, Part::Devices],
    },
    Known {
        documents: LEGACY,
        renderers: &["network-manager"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Dhcp],
    },
    // The client names options of two words half with hyphens, half with underscores, which two renderers do not know.
    Known {
        documents: OPENSTACK,
        renderers: &["sysconfig", "networkd"],
        releases: (ALWAYS, NEVER),
        parts: &[Part::Bond],
    },
    // Before 23.1 it gives every NIC of a bond the bond's MAC.
    Known {
        documents: OPENSTACK,
        renderers: ALL_BUT_ENI,
        releases: (ALWAYS, (23, 1)),
        parts: &[Part::Devices],
    },
    // eni's renderer writes resolvers to the stanzas of their family, and to the first one only.
    Known {
        documents: ONE_LIST,
        renderers: &["eni"],
        releases: ((25, 2), NEVER),
        parts: &[Part::Dns, Part::Search],
    },
    Known {
        documents: &["NoCloud and its ISO image", "CloudCIX", "Hetzner", "NWCS"],
        renderers: &["eni"],
        releases: ((25, 2), NEVER),
        parts: &[Part::Search],
    },
];
