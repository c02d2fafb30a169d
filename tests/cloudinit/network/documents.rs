//! The network documents of the dialects, and what each can say.

use super::machine::Machine;
use super::meaning::{Device, Meaning};
use metadata_content::dialect;
use metadata_content::http::Status;
use metadata_content::record::Record;
use metadata_content::store::{Interner, Responses, Vm};
use serde_json::Value;
use support::question::Question;

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
}

const PLAIN: Document = Document {
    name: "",
    path: "",
    client: "as-it-is",
    since: (0, 0),
    takes: |_| true,
    says: Meaning::clone,
    prepare: |_| {},
};

pub(super) const DOCUMENTS: [Document; 9] = [
    Document { name: "NoCloud and its ISO image", path: "/v1/network-config", ..PLAIN },
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
];

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

impl Document {
    /// The document for this machine.
    pub(super) fn of(&self, machine: &Machine) -> String {
        let mut record = machine.record.clone();
        (self.prepare)(&mut record);
        let responses = responses(&record);
        let response = Question::get(self.path).with("User-Agent", "Cloud-Init/26.2").ask(&responses);
        assert_eq!(response.status(), Status(200), "{} of {record}", self.path);
        String::from_utf8(response.body().to_bytes().to_vec()).expect("the document is text")
    }
}

fn responses(record: &Value) -> Responses {
    let text = record.to_string();
    let record = match Record::parse("random.json", &text) {
        Ok((record, _)) => record,
        Err(error) => panic!("{error} in {text}"),
    };
    dialect::render(&record, &mut Interner::new(), Vm::alone(record.vm.uuid.as_str()))
}
