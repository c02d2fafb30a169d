//! The network documents of the dialects, and what each can say.

use metadata_content::dialect;
use metadata_content::http::StatusCode;
use metadata_content::record::Record;
use metadata_content::store::{Host, Interner, Responses, VmState};
use serde_json::Value;
use support::question::Question;

use super::{Device, Machine, Meaning, Part, Route};

/// Asks for a path below the document's.
type Ask<'a> = &'a dyn Fn(&str) -> String;

/// One network document.
pub(super) struct Document {
    pub(super) name: &'static str,
    path: &'static str,
    /// The function in `clients.py` that makes a network configuration of it.
    pub(super) client: &'static str,
    /// First release of cloud-init with such a client.
    pub(super) since: (u32, u32),
    /// Whether the document can describe the machine.
    pub(super) takes: fn(&Machine) -> bool,
    /// What the document can say of the machine's network.
    pub(super) says: fn(&Meaning) -> Meaning,
    /// Changes to the record.
    prepare: fn(&mut Value),
    host: Host,
    has_user_agent: bool,
    /// Header fields of the request.
    fields: &'static [(&'static str, &'static str)],
    /// Makes the document of the answers.
    get: fn(Ask<'_>) -> String,
}

const PLAIN: Document = Document {
    name: "",
    path: "",
    client: "as-it-is",
    since: (0, 0),
    takes: |_| true,
    says: Meaning::clone,
    prepare: |_| {},
    host: Host::Metadata,
    has_user_agent: true,
    fields: &[],
    get: |question| question(""),
};

pub(super) const DOCUMENTS: [Document; 15] = [
    // Before 24.3 cloud-init does not ask for it over HTTP.
    Document { name: "NoCloud", path: "/v1/network-config", since: (24, 3), ..PLAIN },
    // `export` asks without a User-Agent.
    Document { name: "NoCloud's ISO image", path: "/v1/network-config", has_user_agent: false, ..PLAIN },
    Document { name: "CloudCIX", path: "/v1/metadata", client: "cloudcix", since: (24, 4), ..PLAIN },
    Document {
        name: "NoCloud, `legacy_eni`",
        path: "/v1/meta-data",
        client: "interfaces",
        takes: |machine| !machine.is_layered,
        says: legacy,
        ..PLAIN
    },
    Document {
        name: "OpenStack",
        path: "/openstack/latest/network_data.json",
        client: "openstack",
        says: openstack,
        ..PLAIN
    },
    Document {
        name: "Hetzner",
        path: "/hetzner/v1/metadata/network-config",
        // The client configures private NICs by DHCP.
        prepare: all_public,
        ..PLAIN
    },
    Document { name: "Vultr", path: "/v1.json", client: "vultr", since: (23, 1), ..PLAIN },
    Document {
        name: "NWCS",
        path: "/api/v1/metadata",
        client: "nwcs",
        since: (23, 1),
        takes: |machine| !machine.is_layered,
        ..PLAIN
    },
    Document {
        name: "DigitalOcean",
        path: "/metadata/v1.json",
        client: "digitalocean",
        takes: |machine| !machine.is_layered && machine.is_static && machine.macs.len() < 3,
        says: digitalocean,
        ..PLAIN
    },
    Document {
        name: "UpCloud",
        path: "/metadata/v1.json",
        client: "upcloud",
        since: (21, 1),
        takes: |machine| !machine.is_layered,
        says: upcloud,
        ..PLAIN
    },
    Document {
        name: "EC2",
        path: "/latest/meta-data/network/",
        client: "ec2",
        takes: |machine| !machine.is_layered,
        says: ec2,
        get: tree,
        ..PLAIN
    },
    Document {
        name: "AliYun",
        path: "/latest/meta-data/all",
        client: "aliyun",
        since: (25, 1),
        takes: |machine| !machine.is_layered,
        says: aliyun,
        host: Host::AliYun,
        ..PLAIN
    },
    Document {
        name: "Azure",
        path: "/metadata/instance?api-version=2021-08-01",
        client: "azure",
        takes: |machine| !machine.is_layered,
        says: azure,
        fields: &[("Metadata", "true")],
        ..PLAIN
    },
    Document {
        name: "Oracle",
        path: "/opc/v2/vnics/",
        client: "oracle",
        takes: |machine| !machine.is_layered,
        says: oracle,
        fields: &[("Authorization", "Bearer Oracle")],
        ..PLAIN
    },
    Document {
        name: "Scaleway",
        path: "/conf?format=json",
        client: "scaleway",
        since: (23, 4),
        takes: |machine| !machine.is_layered && machine.macs.len() == 1,
        says: scaleway,
        host: Host::Scaleway,
        ..PLAIN
    },
];

/// Returns the files below the document's path, as an object from path to text.
fn tree(ask: Ask<'_>) -> String {
    let mut files = serde_json::Map::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        let listing = ask(&directory);
        for name in listing.lines() {
            let path = format!("{directory}{name}");
            if name.ends_with('/') {
                directories.push(path);
            } else {
                let text = ask(&path);
                files.insert(path, text.into());
            }
        }
        files.insert(directory, listing.into());
    }
    Value::Object(files).to_string()
}

fn all_public(record: &mut Value) {
    for nic in record["network"]["nics"].as_array_mut().expect("NICs") {
        nic["role"] = "public".into();
    }
}

fn without_search(meaning: &Meaning) -> Meaning {
    Meaning { search: [].into(), ..meaning.clone() }
}

/// No MTU, no further routes, no DHCPv6 and no SLAAC, which cloud-init does not read in this form.
fn legacy(meaning: &Meaning) -> Meaning {
    let mut says = meaning.clone();
    for device in says.devices.values_mut() {
        (device.mtu, device.dhcp6, device.slaac) = (None, false, None);
        device.routes.retain(|route| route.to.ends_with("/0"));
    }
    says
}

/// The client names VLANs itself.
fn openstack(meaning: &Meaning) -> Meaning {
    let mut says = without_search(meaning);
    let named = |(name, device): (String, Device)| match &device.vlan {
        Some(vlan) => (format!("{}.{}", vlan.link, vlan.id), device),
        None => (name, device),
    };
    says.devices = says.devices.into_iter().map(named).collect();
    says
}

/// The first address of each family, and gateways; no MTU and no further routes.
fn digitalocean(meaning: &Meaning) -> Meaning {
    let mut says = upcloud(meaning);
    for device in says.devices.values_mut() {
        let firsts = [false, true].map(|v6| {
            // The record's first IPv4 address is `10.…5` or `203.…`, the second one `10.…6` and the third `172.…`.
            device.addresses.iter().find(|address| address.contains(':') == v6).cloned()
        });
        device.addresses = firsts.into_iter().flatten().collect();
    }
    says
}

/// Addresses, gateways and resolvers. Its DHCPv6 is stateless.
fn upcloud(meaning: &Meaning) -> Meaning {
    let mut says = without_search(meaning);
    for device in says.devices.values_mut().filter(|device| device.dhcp6) {
        (device.dhcp6, device.slaac) = (false, Some(true));
    }
    for device in says.devices.values_mut() {
        device.mtu = None;
        device.routes.retain(|route| route.to.ends_with("/0"));
    }
    says
}

/// What DHCP gives: an address of each family, and everything else. A document of such a cloud says which NICs there
/// are and which addresses there are in addition. `first` counts the addresses that are left to DHCP, of each family.
fn leased(meaning: &Meaning, first: usize) -> Meaning {
    let mut says = Meaning { dns: [].into(), search: [].into(), ..meaning.clone() };
    for device in says.devices.values_mut() {
        let more = [false, true].into_iter().flat_map(|v6| of_family(device, v6).into_iter().skip(first));
        device.addresses = more.collect();
        (device.mtu, device.dhcp4, device.routes) = (None, true, Vec::new());
    }
    says
}

/// The device's addresses of one family, in the order of the record: `….5`, `….6` and those that begin with 172.
fn of_family(device: &Device, v6: bool) -> Vec<String> {
    device.addresses.iter().filter(|address| address.contains(':') == v6).cloned().collect()
}

/// Replaces the prefix length.
fn with_prefix(address: &str, prefix: &str) -> String {
    format!("{}/{prefix}", address.split('/').next().unwrap_or(address))
}

fn prefix(address: &str) -> &str {
    address.rsplit('/').next().unwrap_or(address)
}

/// All NICs by DHCP. The client gives further IPv4 addresses the first one's prefix length, and IPv6 addresses 128.
fn ec2(meaning: &Meaning) -> Meaning {
    let mut says = leased(meaning, 1);
    for (name, device) in &mut says.devices {
        let (v4, v6) = (of_family(&meaning.devices[name], false), of_family(&meaning.devices[name], true));
        let more4 = v4.iter().skip(1).map(|address| with_prefix(address, prefix(&v4[0])));
        let more6 = v6.iter().skip(1).map(|address| with_prefix(address, "128"));
        device.addresses = more4.chain(more6).collect();
        (device.dhcp6, device.slaac) = (!v6.is_empty(), None);
    }
    says
}

/// All NICs by DHCP.
fn aliyun(meaning: &Meaning) -> Meaning {
    let mut says = ec2(meaning);
    says.devices.values_mut().for_each(|device| device.addresses.clear());
    says
}

/// NICs with addresses, by DHCP. The client gives further addresses the prefix length of the family's first subnet.
fn azure(meaning: &Meaning) -> Meaning {
    let mut says = leased(meaning, 1);
    let has_any = |device: &Device| {
        device.dhcp4 || device.dhcp6 || device.slaac == Some(true) || !device.addresses.is_empty()
    };
    says.devices.retain(|name, _| has_any(&meaning.devices[name]));
    for (name, device) in &mut says.devices {
        let own = &meaning.devices[name];
        let (v4, v6) = (of_family(own, false), of_family(own, true));
        let more = |all: &[String]| -> Vec<String> {
            all.iter().skip(1).map(|address| with_prefix(address, prefix(&all[0]))).collect()
        };
        device.addresses = more(&v4).into_iter().chain(more(&v6)).collect();
        (device.dhcp6, device.slaac) = (own.dhcp6 || !v6.is_empty(), None);
    }
    says
}

/// The first NIC by DHCP; of each other NIC the first address of each family, without routes.
fn oracle(meaning: &Meaning) -> Meaning {
    let mut says = Meaning { dns: [].into(), search: [].into(), ..meaning.clone() };
    says.devices.retain(|name, device| name == "eth0" || !device.addresses.is_empty());
    for (name, device) in &mut says.devices {
        let (v4, v6) = (of_family(device, false), of_family(device, true));
        device.routes.clear();
        (device.dhcp4, device.dhcp6, device.slaac) = (false, false, None);
        if name == "eth0" {
            (device.dhcp4, device.dhcp6) = (v6.is_empty() || !v4.is_empty() || own4(meaning), false);
            device.dhcp6 = !device.dhcp4;
            device.addresses.clear();
        } else {
            device.addresses = [v4, v6].into_iter().filter_map(|all| all.into_iter().next()).collect();
        }
    }
    says
}

fn own4(meaning: &Meaning) -> bool {
    meaning.devices.get("eth0").is_some_and(|device| device.dhcp4)
}

/// The first IPv4 address is leased: cloud-init compares it with its lease. Of IPv6, the address with the gateway. The
/// client adds a route to the service.
fn scaleway(meaning: &Meaning) -> Meaning {
    let mut says = Meaning { dns: [].into(), search: [].into(), ..meaning.clone() };
    for device in says.devices.values_mut() {
        let (v4, v6) = (of_family(device, false), of_family(device, true));
        device.routes.retain(|route| route.to == "::/0");
        device.addresses = v4.iter().skip(1).chain(v6.first()).cloned().collect();
        if device.dhcp4 || !v4.is_empty() {
            device.dhcp4 = true;
            let (to, via) = ("169.254.42.42/32".to_owned(), "62.210.0.1".parse().expect("an address"));
            device.routes.push(Route { to, via, metric: None, on_link: true });
        }
        (device.dhcp6, device.slaac, device.mtu) = (false, None, None);
    }
    says
}

impl Document {
    /// The document for this machine, as this release of cloud-init gets it.
    pub(super) fn of(&self, machine: &Machine, (year, number): (u32, u32)) -> String {
        let mut record = machine.record.clone();
        (self.prepare)(&mut record);
        let responses = responses(&record);
        let ask = |below: &str| {
            let mut question = Question::get(format!("{}{below}", self.path)).at(self.host);
            if self.has_user_agent {
                question = question.with("User-Agent", format!("Cloud-Init/{year}.{number}"));
            }
            for (name, value) in self.fields {
                question = question.with(name, *value);
            }
            let response = question.ask(&responses);
            assert_eq!(response.status(), StatusCode(200), "{}{below} of {record}", self.path);
            String::from_utf8(response.body().to_bytes().to_vec()).expect("the document is text")
        };
        (self.get)(&ask)
    }
}

fn responses(record: &Value) -> Responses {
    let text = record.to_string();
    let record = match Record::parse("random.json", &text) {
        Ok((record, _)) => record,
        Err(error) => panic!("{error} in {text}"),
    };
    dialect::render(&record, &mut Interner::new(), VmState::alone(record.vm.uuid.as_str()))
}

// Faults of cloud-init that no document avoids. `reference/guest-networks.md` describes each.
//
// The list is exact: every cell in it must fail. Besides the releases of the test it was made with 23.1, 23.4, 24.1,
// 24.4 and 25.3, so the end of `releases` may be later than the release that has the fix.

/// First release with a fault, and first release without it.
type Releases = ((u32, u32), (u32, u32));

/// A fault of cloud-init.
pub(super) struct Known {
    /// Names of documents, and of renderers, with `; ` between them.
    documents: &'static str,
    renderers: &'static str,
    releases: Releases,
    parts: &'static [Part],
    /// Number of the issue or pull request in canonical/cloud-init; `None` if nobody has reported it.
    pub(super) issue: Option<u32>,
}

impl Known {
    /// Whether it explains a difference in this part of the meaning.
    pub(super) fn covers(&self, document: &str, renderer: &str, release: (u32, u32), part: Part) -> bool {
        let (first, fixed) = self.releases;
        let has = |names: &str, name: &str| names.split("; ").any(|one| one == name);
        has(self.documents, document)
            && has(self.renderers, renderer)
            && (first..fixed).contains(&release)
            && self.parts.contains(&part)
    }
}

const fn known(
    documents: &'static str,
    renderers: &'static str,
    releases: Releases,
    parts: &'static [Part],
    issue: Option<u32>,
) -> Known {
    Known { documents, renderers, releases, parts, issue }
}

/// The release of a fault that is not fixed.
const NEVER: (u32, u32) = (u32::MAX, 0);
/// The release of a fault that is as old as the renderer.
const ALWAYS: (u32, u32) = (0, 0);

pub(super) const KNOWN: &[Known] = &[
    known(
        "NoCloud's ISO image; OpenStack; Hetzner",
        "sysconfig",
        (ALWAYS, (22, 4)),
        &[Part::Anything],
        Some(3940),
    ),
    known(
        "Oracle",
        "eni; sysconfig; networkd; network-manager; netplan",
        (ALWAYS, (24, 4)),
        &[Part::Anything, Part::Dhcp],
        Some(6123),
    ),
    known("Azure", "eni; sysconfig; netplan", (ALWAYS, (22, 4)), &[Part::Devices], None),
    known("OpenStack", "sysconfig; netplan", (ALWAYS, (22, 4)), &[Part::Devices], Some(3856)),
    known(
        "OpenStack",
        "sysconfig; networkd; network-manager; netplan",
        ((23, 1), (24, 4)),
        &[Part::Devices],
        Some(3856),
    ),
    known(
        "NoCloud's ISO image; OpenStack; Hetzner; Vultr",
        "network-manager",
        (ALWAYS, (24, 4)),
        &[Part::Mtu],
        Some(1224),
    ),
    known(
        "Oracle",
        "eni; sysconfig; networkd; network-manager; netplan",
        (ALWAYS, NEVER),
        &[Part::Mtu],
        Some(6844),
    ),
    known("NoCloud, `legacy_eni`", "network-manager", (ALWAYS, NEVER), &[Part::Dhcp], Some(3837)),
    known("OpenStack; UpCloud; Vultr; NWCS", "network-manager", (ALWAYS, (23, 4)), &[Part::Dhcp], Some(3837)),
    known(
        "Oracle",
        "eni; sysconfig; networkd; network-manager",
        (ALWAYS, NEVER),
        &[Part::Addresses6],
        Some(6843),
    ),
    known("Oracle", "netplan", ((22, 4), NEVER), &[Part::Addresses6], Some(6843)),
    known(
        "NoCloud's ISO image",
        "eni; network-manager",
        (ALWAYS, (23, 1)),
        &[Part::DefaultRoutes, Part::Routes],
        Some(1973),
    ),
    known(
        "NoCloud's ISO image",
        "networkd",
        (ALWAYS, (23, 1)),
        &[Part::DefaultRoutes, Part::Routes],
        Some(4067),
    ),
    known(
        "NoCloud's ISO image",
        "sysconfig",
        ((22, 4), (23, 1)),
        &[Part::DefaultRoutes, Part::Routes],
        Some(1973),
    ),
    known("OpenStack; Scaleway", "eni", (ALWAYS, NEVER), &[Part::DefaultRoutes], None),
    known(
        "NoCloud's ISO image; OpenStack; Hetzner; Vultr; NWCS",
        "network-manager",
        (ALWAYS, (24, 4)),
        &[Part::Metrics],
        Some(5877),
    ),
    known("NoCloud's ISO image", "eni; sysconfig; networkd", (ALWAYS, (23, 4)), &[Part::Metrics], Some(4217)),
    known(
        "NoCloud's ISO image; OpenStack; Hetzner; NoCloud; CloudCIX; Vultr; NWCS; Scaleway",
        "eni",
        (ALWAYS, NEVER),
        &[Part::OnLink],
        Some(5940),
    ),
    known(
        "NoCloud's ISO image; OpenStack; Hetzner; NoCloud; CloudCIX; Vultr; NWCS; Scaleway",
        "networkd",
        (ALWAYS, NEVER),
        &[Part::OnLink],
        Some(4995),
    ),
    known(
        "NoCloud, `legacy_eni`; DigitalOcean; UpCloud",
        "netplan",
        (ALWAYS, (23, 1)),
        &[Part::OnLink],
        Some(4060),
    ),
    known(
        "NoCloud, `legacy_eni`; DigitalOcean; UpCloud",
        "networkd",
        (ALWAYS, (24, 4)),
        &[Part::OnLink],
        Some(4995),
    ),
    known(
        "OpenStack; Hetzner; Vultr; NWCS; Scaleway",
        "netplan",
        (ALWAYS, NEVER),
        &[Part::OnLink],
        Some(5940),
    ),
    known("DigitalOcean; UpCloud; Vultr", "eni", ((25, 3), NEVER), &[Part::Dns], Some(6331)),
    known("DigitalOcean; UpCloud; Vultr", "network-manager", (ALWAYS, (24, 1)), &[Part::Dns], Some(4637)),
    known("OpenStack", "network-manager", (ALWAYS, (23, 4)), &[Part::Dns], Some(4637)),
    known(
        "NoCloud's ISO image; Hetzner; NoCloud; CloudCIX; Vultr",
        "eni",
        ((26, 2), NEVER),
        &[Part::Search],
        Some(6331),
    ),
    // Only of a NIC with IPv4 addresses alone whose name servers all have IPv6 ones.
    known("NoCloud, `legacy_eni`; NWCS", "eni", ((26, 2), NEVER), &[Part::Search], Some(6331)),
    known("Vultr", "network-manager", (ALWAYS, (24, 1)), &[Part::Search], Some(4637)),
    known(
        "NoCloud's ISO image; NoCloud; CloudCIX",
        "networkd",
        (ALWAYS, (25, 3)),
        &[Part::Vlan, Part::Bond],
        Some(6324),
    ),
    known("OpenStack; Hetzner; Vultr", "networkd", (ALWAYS, (26, 2)), &[Part::Vlan], Some(6324)),
    known(
        "NoCloud's ISO image; Hetzner; NoCloud; CloudCIX; Vultr",
        "network-manager",
        (ALWAYS, NEVER),
        &[Part::Bond],
        Some(6932),
    ),
    known("Hetzner; Vultr", "networkd", (ALWAYS, (26, 2)), &[Part::Bond], Some(6324)),
    known("OpenStack", "network-manager", (ALWAYS, (24, 4)), &[Part::Bond], Some(6932)),
    known("OpenStack", "networkd", (ALWAYS, NEVER), &[Part::Bond], Some(6576)),
    known("OpenStack", "sysconfig", ((24, 4), NEVER), &[Part::Bond], Some(6576)),
];
