//! Every network document means to every renderer of cloud-init what the record says.
//!
//! Machines with random networks are rendered by the unmodified renderers of the cloud-init in several Debian releases.
//! What comes out is read again and compared with the record. With `--nocapture` the test prints the table of
//! `reference/guest-networks.md`. `XDP_IMDS_CLOUD_INIT=DIRECTORY` uses a checkout instead of the releases.

mod documents;

use anyhow::{Context as _, Result, ensure};
use documents::{DOCUMENTS, Document, KNOWN};
use fastrand::Rng;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::process::Command;
use support::cloudinit::{CHECKOUT, CloudInit, Rendering};
use support::netns::Namespace;
use support::seed_or;

/// The renderers, by cloud-init's names.
const RENDERERS: [&str; 5] = ["eni", "sysconfig", "networkd", "network-manager", "netplan"];
/// Debian releases whose cloud-init renders: 20.4, 22.4, 25.1 and 26.2 or later.
const SUITES: [&str; 4] = ["bullseye", "bookworm", "trixie", "sid"];
/// The release whose cloud-init changes without a change of ours: a listed fault that it no longer has is printed only.
const MOVING: &str = "sid";
/// Number of machines from the run's own seed, in addition to those that are always the same.
const RANDOM: usize = 25;
/// The seed of those machines unless the run has another: which faults of cloud-init a run finds must not depend on
/// chance.
const RANDOM_SEED: u64 = 3;
/// Most differences of one cell that a failure shows.
const SHOWN: usize = 3;

/// What a renderer made of one document.
#[derive(Debug, Deserialize)]
struct Outcome {
    meaning: Option<Meaning>,
    /// The release has no such renderer.
    #[serde(default)]
    is_absent: bool,
    #[serde(default)]
    trouble: String,
    #[serde(default)]
    files: BTreeMap<String, String>,
}

/// The differences and the numbers of their machines, by document and renderer.
type Cells<'a> = BTreeMap<(&'a str, &'a str), Vec<(Difference, usize)>>;

/// One document of one machine.
struct Case {
    document: &'static Document,
    text: String,
    machine: usize,
}

#[test]
fn network_documents_mean_the_same_to_every_renderer() {
    let mut random = Rng::with_seed(seed_or(RANDOM_SEED));
    let mut fixed = Rng::with_seed(1);
    let machines: Vec<Machine> = (0..ALL + RANDOM)
        .map(|number| {
            if number < ALL { machine(number, &mut fixed) } else { machine(random.usize(..ALL), &mut random) }
        })
        .collect();
    let suites: &[&str] = if std::env::var_os(CHECKOUT).is_some() { &["bookworm"] } else { &SUITES };
    let mut wrong = Vec::new();
    for suite in suites {
        let Some(cloud_init) = CloudInit::of_or_skip(suite) else { return };
        let release = release(&cloud_init.version().expect("cloud-init has a version"));
        let documents = DOCUMENTS.iter().filter(|document| document.since <= release);
        let cases: Vec<Case> = documents
            .flat_map(|document| {
                machines.iter().enumerate().map(move |(number, machine)| (document, number, machine))
            })
            .filter(|(document, _, machine)| (document.takes)(machine))
            .map(|(document, machine, of)| Case { document, text: document.of(of, release), machine })
            .collect();
        let asked = cases.iter().map(|case| {
            json!({
                "client": case.document.client,
                "document": case.text,
                "macs": machines[case.machine].macs,
            })
        });
        let asked = json!({ "renderers": RENDERERS, "cases": asked.collect::<Vec<_>>() });
        let Rendering { version, outcomes } = cloud_init.render(&asked).expect("cloud-init renders");
        let mut cells = Cells::new();
        for (case, outcomes) in cases.iter().zip(outcomes) {
            let outcomes: Vec<Outcome> = serde_json::from_value(outcomes).expect("outcomes");
            for (renderer, outcome) in RENDERERS.into_iter().zip(outcomes) {
                if outcome.is_absent {
                    continue;
                }
                let found = cells.entry((case.document.name, renderer)).or_default();
                let differences = differences(case, &machines[case.machine], &outcome);
                found.extend(differences.into_iter().map(|difference| (difference, case.machine)));
            }
        }
        print_table(&version, &cells);
        wrong.extend(unknown(release, &cells, &machines));
        let stale = stale(release, &cells);
        if *suite == MOVING {
            stale.iter().for_each(|cell| println!("{cell}"));
        } else {
            wrong.extend(stale);
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_rendered_network_reaches_its_gateways() {
    let Some(cloud_init) = CloudInit::of_or_skip("trixie") else { return };
    let document = &DOCUMENTS[0];
    let release = release(&cloud_init.version().expect("cloud-init has a version"));
    // One NIC each: IPv4, IPv6, both, both with a link-local gateway, several addresses, and a /32 address.
    let machines: Vec<Machine> = (0..=5).map(|number| machine(number, &mut Rng::with_seed(1))).collect();
    let cases = machines.iter().map(
        |machine| json!({"client": document.client, "document": document.of(machine, release), "macs": machine.macs}),
    );
    let asked = json!({ "renderers": ["netplan", "eni"], "cases": cases.collect::<Vec<_>>() });
    let rendered = cloud_init.render(&asked).expect("cloud-init renders").outcomes;
    for (number, (machine, outcomes)) in machines.iter().zip(rendered).enumerate() {
        let outcomes: Vec<Outcome> = serde_json::from_value(outcomes).expect("outcomes");
        for (renderer, outcome) in ["netplan", "eni"].into_iter().zip(outcomes) {
            if (number, renderer) == (5, "eni") {
                // A fault of cloud-init that `known.rs` lists.
                continue;
            }
            let meaning = outcome.meaning.unwrap_or_else(|| panic!("{renderer}: {}", outcome.trouble));
            if let Err(error) = reaches_its_gateways(&meaning.devices["eth0"]) {
                panic!("{renderer}: {error:#}, with {}", machine.record["network"]);
            }
        }
    }
}

fn differences(case: &Case, machine: &Machine, outcome: &Outcome) -> Vec<Difference> {
    let wanted = (case.document.says)(&machine.meaning);
    match &outcome.meaning {
        Some(got) => {
            let mut found = wanted.differences(got);
            if let Some((_, how)) = found.first_mut() {
                how.push_str(&format!("\n      {}\n      {:?}", case.text, outcome.files));
            }
            found
        }
        None => vec![(
            Part::Anything,
            format!("{}\n      {}\n      {:?}", outcome.trouble, case.text, outcome.files),
        )],
    }
}

/// Year and number of a release.
fn release(version: &str) -> (u32, u32) {
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse().ok());
    let mut next = || numbers.next().unwrap_or_else(|| panic!("`{version}` is no release of cloud-init"));
    (next(), next())
}

/// Describes the differences that are no known fault of cloud-init.
fn unknown(release: (u32, u32), cells: &Cells<'_>, machines: &[Machine]) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((document, renderer), found) in cells {
        let is_known = |part| KNOWN.iter().any(|known| known.covers(document, renderer, release, part));
        let mut new: Vec<_> = found.iter().filter(|((part, _), _)| !is_known(*part)).collect();
        new.sort_by_key(|((part, _), _)| *part);
        new.dedup_by_key(|((part, _), _)| *part);
        for ((part, how), machine) in new.into_iter().take(SHOWN) {
            let (year, number) = release;
            let record = &machines[*machine].record["network"];
            wrong.push(format!("  {document}, {renderer}, {year}.{number}: {part}: {how}\n      {record}"));
        }
    }
    wrong
}

/// Describes the faults of cloud-init that are listed and did not occur. Machines of the run's own seed do not count,
/// because not every one of them has every part.
fn stale(release: (u32, u32), cells: &Cells<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((document, renderer), found) in cells {
        let occurs = |part: Part| found.iter().any(|((other, _), machine)| *other == part && *machine < ALL);
        for part in Part::ALL.into_iter().filter(|part| !occurs(*part)) {
            for known in KNOWN.iter().filter(|known| known.covers(document, renderer, release, part)) {
                let (year, number) = release;
                let issue = known.issue.map_or_else(String::new, |issue| format!(" as cloud-init {issue}"));
                wrong.push(format!(
                    "  {document}, {renderer}, {year}.{number}: {part}: listed{issue}, but right"
                ));
            }
        }
    }
    wrong
}

fn print_table(version: &str, cells: &Cells<'_>) {
    for document in &DOCUMENTS {
        let row: Vec<String> = RENDERERS
            .iter()
            .map(|renderer| {
                let Some(found) = cells.get(&(document.name, *renderer)) else { return "–".to_owned() };
                let parts: BTreeSet<Part> = found.iter().map(|((part, _), _)| *part).collect();
                let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                if parts.is_empty() { "all".to_owned() } else { format!("not {}", parts.join(", ")) }
            })
            .collect();
        if row.iter().any(|cell| cell != "–") {
            println!("| {} | {version} | {} |", document.name, row.join(" | "));
        }
    }
}

// Machines whose networks vary in everything that a record can say.

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
const ALL: usize = SHAPES.len() * KINDS;

/// A machine: its record, and what its guest's network must be.
#[derive(Clone, Debug)]
struct Machine {
    record: Value,
    meaning: Meaning,
    /// The names of the physical NICs, by MAC.
    macs: BTreeMap<String, String>,
    /// Whether there is a VLAN or a bond.
    is_layered: bool,
    /// Whether all addresses are static.
    is_static: bool,
}

/// A NIC while it is made.
struct Nic {
    number: u8,
    record: Value,
    device: Device,
}

/// Returns the machine of this number. Below [`ALL`] every shape occurs in every kind.
fn machine(number: usize, random: &mut Rng) -> Machine {
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

// What a network configuration means, whatever its syntax, and how two meanings differ.

/// What a guest's network is after the configuration is applied.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct Meaning {
    devices: BTreeMap<String, Device>,
    dns: BTreeSet<IpAddr>,
    search: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct Device {
    mac: Option<String>,
    mtu: Option<u32>,
    dhcp4: bool,
    dhcp6: bool,
    /// `None` leaves it to the kernel, which accepts router advertisements.
    slaac: Option<bool>,
    addresses: BTreeSet<String>,
    routes: Vec<Route>,
    vlan: Option<Vlan>,
    bond: Option<Bond>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct Route {
    to: String,
    via: IpAddr,
    metric: Option<u32>,
    /// In a record: no prefix of the device contains the next hop. In a configuration: the kernel takes it anyway.
    on_link: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Vlan {
    link: String,
    id: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Bond {
    links: BTreeSet<String>,
    #[serde(flatten)]
    options: BTreeMap<String, String>,
}

/// A part of a meaning. A known fault of a client is a fault of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// The client raises an exception, or writes what nothing understands.
    Anything,
    Devices,
    Mtu,
    Dhcp,
    Slaac,
    Addresses,
    Addresses6,
    DefaultRoutes,
    Routes,
    Metrics,
    OnLink,
    Dns,
    Search,
    Vlan,
    Bond,
}

impl Part {
    const ALL: [Self; 15] = [
        Self::Anything,
        Self::Devices,
        Self::Mtu,
        Self::Dhcp,
        Self::Slaac,
        Self::Addresses,
        Self::Addresses6,
        Self::DefaultRoutes,
        Self::Routes,
        Self::Metrics,
        Self::OnLink,
        Self::Dns,
        Self::Search,
        Self::Vlan,
        Self::Bond,
    ];
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anything => "everything",
            Self::Devices => "devices",
            Self::Mtu => "MTU",
            Self::Dhcp => "DHCP",
            Self::Slaac => "SLAAC",
            Self::Addresses => "addresses",
            Self::Addresses6 => "IPv6 addresses",
            Self::DefaultRoutes => "default routes",
            Self::Routes => "routes",
            Self::Metrics => "metrics",
            Self::OnLink => "on-link",
            Self::Dns => "DNS",
            Self::Search => "search domains",
            Self::Vlan => "VLAN",
            Self::Bond => "bond",
        })
    }
}

/// A part that differs, and how.
type Difference = (Part, String);

impl Meaning {
    /// The differences between what is wanted and what a client made of it.
    fn differences(&self, got: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        let names = |meaning: &Self| meaning.devices.keys().cloned().collect::<BTreeSet<_>>();
        if names(self) != names(got) {
            found.push((Part::Devices, format!("{:?} instead of {:?}", names(got), names(self))));
        }
        for (name, wanted) in &self.devices {
            let Some(device) = got.devices.get(name) else { continue };
            found.extend(
                wanted.differences(device).into_iter().map(|(part, how)| (part, format!("{name}: {how}"))),
            );
        }
        // A client may leave out resolvers that the guest cannot reach, because it has no address of their family.
        let speaks = |server: &&IpAddr| {
            let statics = self.devices.values().flat_map(|device| &device.addresses);
            statics.into_iter().any(|address| address.contains(':') == server.is_ipv6())
        };
        let missing: Vec<_> =
            self.dns.iter().filter(speaks).filter(|server| !got.dns.contains(server)).collect();
        let strange: Vec<_> = got.dns.difference(&self.dns).collect();
        if !missing.is_empty() || !strange.is_empty() {
            found.push((Part::Dns, format!("misses {missing:?}, invents {strange:?}")));
        }
        let has_statics = self.devices.values().any(|device| !device.addresses.is_empty());
        if (has_statics && self.search != got.search) || !got.search.is_subset(&self.search) {
            found.push((Part::Search, format!("{:?} instead of {:?}", got.search, self.search)));
        }
        found
    }
}

impl Device {
    fn differences(&self, got: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut differ = |part, is_equal: bool, got: &dyn fmt::Debug, wanted: &dyn fmt::Debug| {
            if !is_equal {
                found.push((part, format!("{got:?} instead of {wanted:?}")));
            }
        };
        // A VLAN or a bond without a MAC in the record has that of a NIC below it.
        let is_same_mac = self.mac.is_none() || got.mac.is_none() || self.mac == got.mac;
        differ(Part::Devices, is_same_mac, &got.mac, &self.mac);
        differ(Part::Mtu, self.mtu == got.mtu, &got.mtu, &self.mtu);
        differ(Part::Dhcp, self.dhcp4 == got.dhcp4, &got.dhcp4, &self.dhcp4);
        // Where router advertisements are accepted, they may say that DHCPv6 is to be used.
        let wants_v6 = self.dhcp6 || self.slaac == Some(true);
        differ(Part::Dhcp, if got.dhcp6 { wants_v6 } else { !self.dhcp6 }, &got.dhcp6, &self.dhcp6);
        differ(Part::Slaac, self.slaac != Some(true) || got.slaac != Some(false), &got.slaac, &self.slaac);
        for (part, v6) in [(Part::Addresses, false), (Part::Addresses6, true)] {
            let (own, others) = (self.addresses_of(v6), got.addresses_of(v6));
            differ(part, own == others, &others, &own);
        }
        for (part, default) in [(Part::DefaultRoutes, true), (Part::Routes, false)] {
            let (own, others) = (self.targets(default), got.targets(default));
            differ(part, own == others, &others, &own);
        }
        for route in &self.routes {
            let Some(other) = got.routes.iter().find(|other| other.target() == route.target()) else {
                continue;
            };
            differ(Part::Metrics, route.metric == other.metric, other, route);
            differ(Part::OnLink, !route.on_link || other.on_link, other, route);
        }
        differ(Part::Vlan, self.vlan == got.vlan, &got.vlan, &self.vlan);
        differ(Part::Bond, self.bond == got.bond, &got.bond, &self.bond);
        found
    }

    fn addresses_of(&self, v6: bool) -> Vec<&String> {
        self.addresses.iter().filter(|address| address.contains(':') == v6).collect()
    }

    fn targets(&self, default: bool) -> BTreeSet<(&str, IpAddr)> {
        let routes = self.routes.iter().filter(|route| route.is_default() == default);
        routes.map(Route::target).collect()
    }
}

impl Route {
    fn target(&self) -> (&str, IpAddr) {
        (self.to.as_str(), self.via)
    }

    fn is_default(&self) -> bool {
        self.to.ends_with("/0")
    }
}

// What comes out of the renderers is applied to a real device, and its gateways answer.

/// Most seconds to wait for an answer to a ping.
const PATIENCE_SECONDS: &str = "10";

/// Gives a guest's NIC this configuration, behind a router that has the gateways' addresses, and pings them.
fn reaches_its_gateways(device: &Device) -> Result<()> {
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
