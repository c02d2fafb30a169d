//! Machines whose networks vary in everything that a record can say.

use super::meaning::{Bond, Device, Meaning, Route, Vlan};
use fastrand::Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// How a NIC gets its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Static4,
    Static6,
    Dual,
    /// The gateway of IPv6 is link-local, as most routers'.
    DualLinkLocal,
    Several,
    /// A /32 address, whose gateway is outside of it.
    Host4,
    /// A /32 and a /128 address. The gateway of IPv6 is a global address.
    HostDual,
    Dhcp4,
    Dhcp4Slaac,
    Dhcp4Dhcp6,
    Dhcp4Static6,
    Nothing,
}

/// Shapes of a first NIC. Each is the first NIC of some machine.
const SHAPES: [Shape; 11] = [
    Shape::Static4,
    Shape::Static6,
    Shape::Dual,
    Shape::DualLinkLocal,
    Shape::Several,
    Shape::Host4,
    Shape::HostDual,
    Shape::Dhcp4,
    Shape::Dhcp4Slaac,
    Shape::Dhcp4Dhcp6,
    Shape::Dhcp4Static6,
];
/// Kinds of machines: one NIC; a second NIC; a VLAN; a bond; a VLAN on a bond.
const KINDS: usize = 5;
/// Number of machines with which every shape meets every kind.
pub(super) const ALL: usize = SHAPES.len() * KINDS;

/// A machine: its record, and what its guest's network must be.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) record: Value,
    pub(super) meaning: Meaning,
    /// The names of the physical NICs, by MAC.
    pub(super) macs: BTreeMap<String, String>,
    /// Whether there is a VLAN or a bond.
    pub(super) is_layered: bool,
    /// Whether all addresses are static.
    pub(super) is_static: bool,
}

/// A NIC while it is made.
struct Nic {
    number: u8,
    record: Value,
    device: Device,
}

/// Returns the machine of this number. Below [`ALL`] every shape occurs in every kind.
pub(super) fn machine(number: usize, random: &mut Rng) -> Machine {
    let (shape, kind) = (SHAPES[number % SHAPES.len()], number / SHAPES.len() % KINDS);
    let mut nics = Vec::new();
    match kind {
        0 => nics.push(physical(0, shape, true, random)),
        1 => {
            nics.push(physical(0, shape, true, random));
            let others = [Shape::Static4, Shape::Static6, Shape::Several, Shape::Dhcp4, Shape::Nothing];
            for more in 1..=random.u8(1..=2) {
                nics.push(physical(more, others[random.usize(..others.len())], false, random));
            }
        }
        2 => {
            nics.push(physical(0, Shape::Static4, true, random));
            nics.push(vlan(5, shape, 0, random));
        }
        _ => {
            nics.push(physical(0, Shape::Nothing, false, random));
            nics.push(physical(1, Shape::Nothing, false, random));
            nics.push(bond(4, if kind == 3 { shape } else { Shape::Nothing }, random));
            if kind == 4 {
                nics.push(vlan(5, shape, 4, random));
            }
        }
    }
    assemble(number, nics, random)
}

fn assemble(number: usize, nics: Vec<Nic>, random: &mut Rng) -> Machine {
    let is_static =
        nics.iter().all(|nic| !nic.device.dhcp4 && !nic.device.dhcp6 && nic.device.slaac.is_none());
    let mut meaning = Meaning::default();
    let mut dns = vec!["10.0.2.3", "10.0.2.4", "fd00::53"];
    random.shuffle(&mut dns);
    dns.truncate(random.usize(..=3));
    meaning.dns = dns.iter().map(|server| server.parse().expect(server)).collect();
    let search: &[&str] =
        [&[][..], &["example.internal"], &["example.internal", "example.org"]][random.usize(..3)];
    meaning.search = search.iter().map(|&domain| domain.to_owned()).collect();
    let records: Vec<Value> = nics.iter().map(|nic| nic.record.clone()).collect();
    let macs = nics.iter().filter(|nic| nic.device.vlan.is_none() && nic.device.bond.is_none());
    let macs = macs.filter_map(|nic| Some((nic.device.mac.clone()?, name(nic.number)))).collect();
    let is_layered = nics.iter().any(|nic| nic.device.vlan.is_some() || nic.device.bond.is_some());
    for nic in nics {
        meaning.devices.insert(name(nic.number), nic.device);
    }
    let record = json!({
        "schema": "vmrecord/1",
        "generation": 1,
        "vm": {
            "uuid": format!("7c0f1a52-3b5e-4d1a-9d2c-{number:012x}"),
            "name": format!("vm-{number}"),
            "project": {"id": "p1", "number": 1, "account": "000000000000"},
        },
        "hostname": {"short": format!("vm-{number}")},
        "placement": {"region": "local", "zone": "local-a"},
        "network": {"dns": dns, "search": search, "nics": records},
        "serve": {"legacy_eni": true},
    });
    Machine { record, meaning, macs, is_layered, is_static }
}

/// The name of the NIC of this number.
fn name(number: u8) -> String {
    match number {
        4 => "bond0".to_owned(),
        5 => "vlan7".to_owned(),
        number => format!("eth{number}"),
    }
}

fn physical(number: u8, shape: Shape, is_first: bool, random: &mut Rng) -> Nic {
    let mac = format!("52:54:00:12:34:{number:02x}");
    let role = if number == 0 { "public" } else { "private" };
    let record = json!({"id": format!("n{number}"), "name": name(number), "mac": mac, "role": role});
    let device = Device { mac: Some(mac), ..Device::default() };
    let mut nic = Nic { number, record, device };
    nic.configure(shape, is_first, random);
    nic
}

fn vlan(number: u8, shape: Shape, link: u8, random: &mut Rng) -> Nic {
    let record = json!({
        "id": format!("n{number}"), "name": name(number), "vlan": {"id": 7, "link": format!("n{link}")},
    });
    let vlan = Some(Vlan { link: name(link), id: 7 });
    let mut nic = Nic { number, record, device: Device { vlan, ..Device::default() } };
    // The NIC below may have the machine's gateway.
    nic.configure(shape, link != 0, random);
    nic
}

fn bond(number: u8, shape: Shape, random: &mut Rng) -> Nic {
    let options: &[(&str, Value)] = if random.bool() {
        &[
            ("mode", json!("802.3ad")),
            ("miimon", json!(100)),
            ("xmit_hash_policy", json!("layer3+4")),
            ("lacp_rate", json!("fast")),
        ]
    } else {
        &[("mode", json!("active-backup")), ("miimon", json!(100))]
    };
    let mut bond = json!({"links": ["n0", "n1"]});
    for (key, value) in options {
        bond[key] = value.clone();
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let options = options.iter().map(|(key, value)| ((*key).to_owned(), text(value))).collect();
    let record = json!({"id": format!("n{number}"), "name": name(number), "bond": bond});
    let bond = Some(Bond { links: [name(0), name(1)].into(), options });
    let mut nic = Nic { number, record, device: Device { bond, ..Device::default() } };
    nic.configure(shape, true, random);
    nic
}

impl Nic {
    fn configure(&mut self, shape: Shape, has_gateway: bool, random: &mut Rng) {
        // Never 0, which an IPv6 address would abbreviate.
        let n = self.number + 1;
        let (net4, net6) = (format!("10.{n}.0"), format!("2001:db8:{n}:"));
        if random.bool() && self.device.vlan.is_none() {
            let mtu = [1_400, 9_000][random.usize(..2)];
            self.record["mtu"] = mtu.into();
            self.device.mtu = Some(mtu);
        }
        let one4 = (format!("{net4}.5/24"), format!("{net4}.1"));
        let one6 = (format!("{net6}:5/64"), format!("{net6}:1"));
        let by_ra = (one6.0.clone(), "fe80::1".to_owned());
        match shape {
            Shape::Static4 => self.fixed(&one4, has_gateway, false),
            Shape::Static6 => self.fixed(&one6, has_gateway, false),
            Shape::Dual => {
                self.fixed(&one4, has_gateway, false);
                self.fixed(&one6, has_gateway, false);
            }
            Shape::DualLinkLocal => {
                self.fixed(&by_ra, has_gateway, false);
                self.fixed(&one4, has_gateway, false);
            }
            Shape::Several => {
                self.fixed(&one4, has_gateway, false);
                self.fixed(&(format!("{net4}.6/24"), String::new()), false, false);
                self.fixed(&(format!("172.16.{n}.6/28"), String::new()), false, false);
                self.fixed(&one6, has_gateway, false);
                self.fixed(&(format!("{net6}:6/64"), String::new()), false, false);
            }
            Shape::Host4 => {
                self.fixed(&(format!("203.0.113.{n}/32"), "100.64.0.1".to_owned()), has_gateway, true)
            }
            Shape::HostDual => {
                self.fixed(&(format!("203.0.113.{n}/32"), "100.64.0.1".to_owned()), has_gateway, true);
                self.fixed(&(format!("{net6}:5/128"), "2001:db8:ff::1".to_owned()), has_gateway, true);
            }
            Shape::Dhcp4 => self.leased("dhcp4"),
            Shape::Dhcp4Slaac => {
                self.leased("dhcp4");
                self.leased("slaac");
            }
            Shape::Dhcp4Dhcp6 => {
                self.leased("dhcp4");
                self.leased("dhcp6");
            }
            Shape::Dhcp4Static6 => {
                self.leased("dhcp4");
                self.fixed(&one6, has_gateway, false);
            }
            Shape::Nothing => return,
        }
        let has = |device: &Device, v6| device.addresses.iter().any(|address| address.contains(':') == v6);
        let is_host = matches!(shape, Shape::Host4 | Shape::HostDual);
        for (v6, to, via) in [
            (false, format!("10.100.{n}.0/24"), format!("{net4}.9")),
            (false, format!("10.200.{n}.0/24"), format!("198.51.100.{n}")),
            (true, format!("2001:db8:10{n}::/48"), format!("{net6}:9")),
        ] {
            if has(&self.device, v6) && random.u8(..4) == 0 {
                let is_off_link = is_host || via.starts_with("198.");
                let metric = random.bool().then_some(50);
                self.route(&to, &via, metric, is_off_link);
            }
        }
    }

    fn fixed(&mut self, (address, gateway): &(String, String), has_gateway: bool, is_off_link: bool) {
        self.device.addresses.insert(address.clone());
        let mut entry = json!({"method": "static", "address": address});
        if has_gateway {
            entry["gateway"] = gateway.as_str().into();
            let to = if gateway.contains(':') { "::/0" } else { "0.0.0.0/0" };
            let via = gateway.parse().expect(gateway);
            self.device.routes.push(Route { to: to.to_owned(), via, metric: None, on_link: is_off_link });
        }
        self.list("addresses", entry);
    }

    fn leased(&mut self, method: &str) {
        match method {
            "dhcp4" => self.device.dhcp4 = true,
            "dhcp6" => self.device.dhcp6 = true,
            _ => self.device.slaac = Some(true),
        }
        self.list("addresses", json!({"method": method}));
    }

    fn route(&mut self, to: &str, via: &str, metric: Option<u32>, on_link: bool) {
        let mut entry = json!({"to": to, "via": via});
        if let Some(metric) = metric {
            entry["metric"] = metric.into();
        }
        self.device.routes.push(Route { to: to.to_owned(), via: via.parse().expect(via), metric, on_link });
        self.list("routes", entry);
    }

    fn list(&mut self, key: &str, entry: Value) {
        match &mut self.record[key] {
            Value::Array(list) => list.push(entry),
            other => *other = json!([entry]),
        }
    }
}
