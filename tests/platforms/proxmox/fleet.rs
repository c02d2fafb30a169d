//! Many VMs of a Proxmox VE node, made by seed from tables of settings; and what each guest must end with.

use anyhow::Result;
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;
use support::cloudinit::{CloudInit, Crawl, Crawler, Machine};
use support::guest::{METADATA, NIC};
use support::host;
use support::netns::Namespace;
use support::pump::{Pump, Wire};
use support::record::Identity;
use support::tap::{Shape, Tap};

/// The first VM's number.
const FIRST: u32 = 100;
/// The storage of snippets.
pub(super) const STORAGE: &str = "own";

/// The forms of `ipconfig0`, and the network that each means. `ADDRESS` is the VM's own, `NUMBER` its number.
const ADDRESSES: [(&str, &[&str]); 6] = [
    ("", &[]),
    ("ip=dhcp", &["dhcp4"]),
    ("ip=ADDRESS/16,gw=10.0.2.2", &["ADDRESS/16 via 10.0.2.2"]),
    ("ip=ADDRESS/16", &["ADDRESS/16 via -"]),
    (
        "ip=ADDRESS/24,gw=10.0.2.2,ip6=2001:db8::NUMBER/64,gw6=2001:db8::1",
        &["ADDRESS/24 via 10.0.2.2", "2001:db8::NUMBER/64 via 2001:db8::1"],
    ),
    ("ip=dhcp,ip6=dhcp", &["dhcp4", "dhcp6"]),
];
const NAMES: [Option<&str>; 4] = [Some("web-NUMBER"), Some("db-NUMBER.shop.example"), Some("X-NUMBER"), None];
const DOMAINS: [Option<&str>; 3] = [None, Some("example"), Some("shop.example")];
const USERS: [Option<&str>; 3] = [None, Some("alice"), Some("root")];
const PASSWORDS: [Option<&str>; 2] = [None, Some("$5$NUMBER$PkvFQvAyfZmuDKq8gF8uzfdGXcmo4pRnYbxbGkYyRd7")];
const UPGRADES: [Option<bool>; 3] = [None, Some(false), Some(true)];
const TAGS: [&str; 3] = ["", "shop", "shop;front"];
const SNIPPET: &str = "#cloud-config\nruncmd:\n- [touch, /run/NUMBER]\n";
/// Sections that say nothing of the VM as it runs.
const SECTIONS: &str = "\n[PENDING]\nname: pending\nciuser: mallory\nipconfig0: ip=192.0.2.1/24\n\n\
                        [before-upgrade]\nname: old\nsshkeys: ssh-rsa%20AAAA%20old\nsnaptime: 1725975013\n";

/// A VM by its settings.
pub(super) struct Vm {
    pub(super) vmid: u32,
    pub(super) identity: Identity,
    name: Option<String>,
    domain: Option<&'static str>,
    user: Option<&'static str>,
    password: Option<String>,
    keys: Vec<String>,
    upgrade: Option<bool>,
    tags: &'static str,
    /// The forms of `ipconfig0` and of a second NIC's, as indices of [`ADDRESSES`].
    addresses: [Option<usize>; 2],
    has_snippet: bool,
    has_role: bool,
    has_sections: bool,
}

/// Makes VMs.
pub(super) fn fleet(count: u16, seed: u64) -> Vec<Vm> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..count).map(|number| Vm::of(number, &mut rng)).collect()
}

fn one<T: Copy>(rng: &mut fastrand::Rng, of: &[T]) -> T {
    of[rng.usize(..of.len())]
}

impl Vm {
    fn of(number: u16, rng: &mut fastrand::Rng) -> Self {
        let vmid = FIRST + u32::from(number);
        let numbered = |text: &str| text.replace("NUMBER", &vmid.to_string());
        let identity = Identity::of(number);
        let keys = (0..rng.usize(..3)).map(|n| format!("{}+{n}", identity.ssh_key)).collect();
        Self {
            vmid,
            name: one(rng, &NAMES).map(numbered),
            domain: one(rng, &DOMAINS),
            user: one(rng, &USERS),
            password: one(rng, &PASSWORDS).map(numbered),
            keys,
            upgrade: one(rng, &UPGRADES),
            tags: one(rng, &TAGS),
            // Each form of an address occurs, whatever the seed is.
            addresses: [
                Some(usize::from(number) % ADDRESSES.len()),
                rng.bool().then(|| rng.usize(..ADDRESSES.len())),
            ],
            has_snippet: rng.u8(..5) == 0,
            has_role: rng.bool(),
            has_sections: rng.bool(),
            identity,
        }
    }

    pub(super) fn tap(&self) -> String {
        format!("tap{}i0", self.vmid)
    }

    pub(super) fn mac(&self, nic: u8) -> Mac {
        let mut mac = self.identity.mac;
        mac.0[3] += nic;
        mac
    }

    fn filled(&self, text: &str) -> String {
        let address = self.identity.address.to_string();
        text.replace("ADDRESS", &address).replace("NUMBER", &self.vmid.to_string())
    }

    pub(super) fn snippet(&self) -> Option<(String, String)> {
        self.has_snippet.then(|| (format!("{}.yaml", self.vmid), self.filled(SNIPPET)))
    }

    /// The file in `/etc/pve/qemu-server`.
    pub(super) fn configuration(&self) -> String {
        let mut text = String::new();
        let mut set = |key: &str, value: &str| writeln!(text, "{key}: {value}").expect("text has room");
        if self.has_snippet {
            set("cicustom", &format!("user={STORAGE}:snippets/{}.yaml", self.vmid));
        }
        if let Some(password) = &self.password {
            set("cipassword", password);
        }
        if let Some(user) = self.user {
            set("ciuser", user);
        }
        if let Some(upgrade) = self.upgrade {
            set("ciupgrade", if upgrade { "1" } else { "0" });
        }
        for (nic, form) in self.nics() {
            if !form.0.is_empty() {
                set(&format!("ipconfig{nic}"), &self.filled(form.0));
            }
            let mac = self.mac(nic).to_string().to_uppercase();
            set(&format!("net{nic}"), &format!("virtio={mac},bridge=vmbr0,firewall=1"));
        }
        if let Some(name) = &self.name {
            set("name", name);
        }
        if let Some(domain) = self.domain {
            set("searchdomain", domain);
        }
        if !self.keys.is_empty() {
            set("sshkeys", &encoded(&(self.keys.join("\n") + "\n")));
        }
        set("smbios1", &format!("uuid={}", self.identity.instance_id));
        if !self.tags.is_empty() {
            set("tags", self.tags);
        }
        let note =
            if self.has_role { "#The shop.\n#\n#```imds\n#metadata%3A {role%3A web}\n#```\n" } else { "" };
        format!("{note}{text}{}", if self.has_sections { SECTIONS } else { "" })
    }

    fn nics(&self) -> impl Iterator<Item = (u8, (&'static str, &'static [&'static str]))> {
        let forms = self.addresses.into_iter().flatten();
        (0..).zip(forms).map(|(nic, form)| (nic, ADDRESSES[form]))
    }

    /// The short host name and the full one.
    fn names(&self) -> (String, String) {
        let name = self.name.clone().unwrap_or_else(|| format!("VM{}", self.vmid));
        let full = match self.domain {
            Some(domain) if !name.contains('.') => format!("{name}.{domain}"),
            _ => name.clone(),
        };
        (name.split('.').next().unwrap_or_default().to_owned(), full)
    }

    /// The user-data that Proxmox VE's drive would have.
    fn user_data(&self) -> String {
        if self.has_snippet {
            return self.filled(SNIPPET);
        }
        let (short, full) = self.names();
        let mut text = format!("#cloud-config\nhostname: {short}\nmanage_etc_hosts: true\nfqdn: {full}\n");
        if let Some(user) = self.user {
            text += &format!("user: {user}\n");
        }
        if self.user == Some("root") {
            text += "disable_root: False\n";
        }
        if let Some(password) = &self.password {
            text += &format!("password: {password}\n");
        }
        if !self.keys.is_empty() {
            text += &format!("ssh_authorized_keys:\n  - {}\n", self.keys.join("\n  - "));
        }
        text += "chpasswd:\n  expire: False\n";
        if self.user != Some("root") {
            text += "users:\n  - default\n";
        }
        if self.upgrade != Some(false) {
            text += "package_upgrade: true\n";
        }
        text
    }

    /// The network: MAC and one form of an address on each line. Nothing without any `ipconfigN`.
    fn network(&self) -> BTreeSet<String> {
        let line = |(nic, form): (u8, (&str, &'static [&str]))| {
            let mac = self.mac(nic);
            form.1.iter().map(move |address| format!("{mac} {}", self.filled(address)))
        };
        self.nics().flat_map(line).collect()
    }

    /// Every difference between what a guest ended with and the configuration.
    pub(super) fn wrong(&self, crawl: &Crawl) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check = |what: &str, found: &str, expected: &str| {
            if found != expected {
                let (vmid, by) = (self.vmid, &crawl.datasource);
                wrong.push(format!("{vmid} {by} {what}: found {found:?}, expected {expected:?}"));
            }
        };
        check("found", &format!("{} {}", crawl.found, crawl.trouble), "true ");
        check("host name", &crawl.hostname, &self.names().0);
        check("keys", &sorted(&crawl.ssh_keys), &sorted(&self.keys));
        check("user-data", &String::from_utf8_lossy(&crawl.user_data), &self.user_data());
        check("trouble with the network", &crawl.network_trouble, "");
        let is_openstack = crawl.datasource.starts_with("DataSourceOpenStack");
        // cloud-init 22.4 reads no network configuration from a seed on the network.
        let expected = if is_openstack || crawl.is_newer { self.network() } else { BTreeSet::new() };
        check("network", &format!("{:?}", network(crawl)), &format!("{expected:?}"));
        if is_openstack {
            let role = if self.has_role { json!({"role": "web"}) } else { Value::Null };
            check("metadata", &crawl.metadata["meta"].to_string(), &role.to_string());
        }
        wrong
    }

    /// The lease that a guest gets by DHCP, by dhclient's names.
    pub(super) fn lease(&self) -> [(&'static str, String); 4] {
        [
            ("interface", NIC.to_owned()),
            ("fixed-address", self.identity.address.to_string()),
            ("subnet-mask", "255.255.0.0".to_owned()),
            ("routers", host::ADDRESS.to_string()),
        ]
    }
}

/// Percent-encoded as by Perl's `URI::Escape`.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'-' | b'_' | b'.' | b'!' | b'~' | b'*' | b'\'' | b'(' | b')' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

fn sorted(keys: &[String]) -> String {
    keys.iter().map(String::as_str).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join("|")
}

/// The network that cloud-init would configure, in the form of [`Vm::network`]. Both datasources hand it over as
/// version 1 of cloud-init's own format, but write addresses, masks and gateways differently.
fn network(crawl: &Crawl) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let entries = crawl.network.as_ref().and_then(|network| network["config"].as_array());
    for entry in entries.into_iter().flatten().filter(|entry| entry["type"] == "physical") {
        let mac = entry["mac_address"].as_str().unwrap_or_default();
        for subnet in entry["subnets"].as_array().into_iter().flatten() {
            found.insert(format!("{mac} {}", address(subnet)));
        }
    }
    found
}

fn address(subnet: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match subnet["type"].as_str().unwrap_or_default() {
        "static" | "static6" => {}
        "dhcp" | "dhcp4" => return "dhcp4".into(),
        other => return other.into(),
    }
    let address = text(&subnet["address"]);
    let address = match address.split_once('/') {
        Some(_) => address,
        None => format!("{address}/{}", prefix(&text(&subnet["netmask"]))),
    };
    let routes = subnet["routes"].as_array().into_iter().flatten();
    let default =
        routes.map(|route| &route["gateway"]).chain([&subnet["gateway"]]).find(|value| value.is_string());
    format!("{address} via {}", default.map_or_else(|| "-".into(), text))
}

/// The length of a mask in the form `255.255.0.0`, `ffff:ffff::` or `64`.
fn prefix(mask: &str) -> String {
    match mask.parse() {
        Ok(std::net::IpAddr::V4(mask)) => mask.to_bits().leading_ones().to_string(),
        Ok(std::net::IpAddr::V6(mask)) => mask.to_bits().leading_ones().to_string(),
        Err(_) => mask.to_owned(),
    }
}

// Where guests boot, one after the other: a namespace with a NIC that becomes each VM's.

/// The longest time in which a seat's guests boot, in seconds.
const LIMIT: u32 = 900;
/// The second NIC of the VMs. All guests ask on their first one; cloud-init only needs this one to exist.
const SECOND: &str = "eth1";
/// What the firmware shows: the seed of NoCloud, and OpenStack's product.
const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";
const PRODUCT: &str = "OpenStack Nova";

/// A namespace and its NIC. Closing a tap takes a grace period of the kernel, so guests share it.
pub(super) struct Seat<'a> {
    // Dropped before the namespace.
    crawler: Crawler<'a>,
    nic: Arc<Tap>,
    second: Tap,
    ns: Namespace,
}

impl<'a> Seat<'a> {
    pub(super) fn new(cloud_init: &'a CloudInit) -> Result<Self> {
        let ns = Namespace::new("guest")?;
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        // cloud-init looks for every NIC that the network configuration names.
        let second = Tap::create(&ns, SECOND, Shape::default())?;
        let nic = Arc::new(Tap::create(&ns, NIC, Shape::virtio())?);
        Ok(Self { crawler: cloud_init.crawler(&ns, LIMIT)?, nic, second, ns })
    }

    /// Lets a VM's cloud-init find its metadata: OpenStack's before it has an address, then NoCloud's with one.
    pub(super) fn boot(&mut self, vm: &Vm, tap: Arc<Tap>) -> Result<[Crawl; 2]> {
        self.ns.ip_batch(&format!("link set {NIC} down\naddr flush dev {NIC}\n"))?;
        self.second.set_mac(vm.mac(1))?;
        self.nic.set_mac(vm.identity.mac)?;
        self.ns.ip(&format!("link set {NIC} up"))?;
        let _pump = Pump::start(vec![Wire::new(Arc::clone(&self.nic), tap)])?;
        let openstack = self.crawler.crawl("OpenStackLocal", &machine(vm, "system-product-name", PRODUCT))?;
        self.ns.ip_batch(&format!(
            "link set {NIC} up\naddr replace {}/16 dev {NIC}\nroute replace default via {}\n\
             route replace {METADATA} dev {NIC} scope link\n",
            vm.identity.address,
            host::ADDRESS
        ))?;
        let nocloud = self.crawler.crawl("NoCloudNet", &machine(vm, "system-serial-number", SEED))?;
        Ok([openstack, nocloud])
    }
}

fn machine(vm: &Vm, name: &'static str, value: &str) -> Machine {
    let uuid = ("system-uuid", vm.identity.instance_id.clone());
    let on_link = format!("32,169,254,169,254,0,0,0,0,0,{}", host::ADDRESS.to_string().replace('.', ","));
    let routes = ("rfc3442-classless-static-routes", on_link);
    Machine {
        dmi: [(name, value.to_owned()), uuid].into(),
        // Without a label NoCloud's class does not search disks for a seed.
        config: json!({"datasource": {"NoCloud": {"fs_label": null}}, "datasource_list": []}),
        lease: vm.lease().into_iter().chain([routes]).collect(),
        ..Machine::default()
    }
}
