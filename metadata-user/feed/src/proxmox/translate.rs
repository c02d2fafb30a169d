//! Makes the record of a VM from its configuration. This module reads only through its arguments.

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use metadata_common::mac::Mac;
use metadata_common::printable::hex;
use metadata_content::record::event::EVENTS_PER_VM;
use metadata_content::record::identity::Subject;
use metadata_content::record::values::{FQDN_BYTES, Line, Secret, is_uuid};
use metadata_content::record::{Owner, Record, RecordLimits, USER_DATA_MAX, is_network_config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::net::{Ipv4Addr, Ipv6Addr};

use super::config::{boolean, list, words};
use super::drive::{Custom, Dns, DriveFormat};
use super::{ProxmoxOptions, ProxmoxProblem, VmConfig, drive};
use crate::record_part::{DEFAULTS, SmbiosFields, label, merge, name_nics, parse_composed, stamp};

/// Longest domain behind any first label, in bytes (RFC 1035 §2.3.4, §3.1).
const DOMAIN_BYTES: usize = FQDN_BYTES - 64;

/// Base64 as Perl's `decode_base64` reads it: qemu-server takes values with and without padding.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// What a record needs besides the configuration.
#[derive(Clone, Debug, Default)]
pub struct TranslationInput {
    /// The node's resolvers.
    pub host: Dns,
    /// The files that `cicustom` names.
    pub custom: Custom,
    /// The part of a record for all VMs.
    pub defaults: Option<Value>,
    /// The part of a record for this VM.
    pub own: Option<Value>,
    /// The name of the cluster.
    pub cluster: String,
    /// The record's generation.
    pub generation: u64,
}

/// A record, and the settings that are left out of it.
#[derive(Clone, Debug)]
pub struct ProxmoxTranslation {
    /// The record.
    pub record: Record,
    /// Why settings are left out.
    pub problems: Vec<ProxmoxProblem>,
}

/// Makes the record of a VM. The parts override each other in this order: `defaults.yaml`, the configuration, the block
/// in its description, the VM's own file.
///
/// # Errors
/// A part is malformed, or the record of all of them is invalid.
pub fn translate(
    vmid: u32,
    config: &VmConfig,
    given: &TranslationInput,
    options: &ProxmoxOptions,
    limits: &RecordLimits,
) -> Result<ProxmoxTranslation, ProxmoxProblem> {
    let mut problems = Vec::new();
    let file = |name: &str| options.files.join(name).display().to_string();
    let own = file(&format!("{vmid}.yaml"));
    let parts = [
        given.defaults.clone(),
        Some(described(vmid, config, given, &mut problems)),
        given.custom.meta.as_deref().map(drive::meta).transpose()?,
        drive::part(&config.description, &own)?,
        given.own.clone(),
    ];
    let names = [
        Some(file(DEFAULTS)),
        None,
        Some("`cicustom`, meta".to_owned()),
        Some("the block ```imds of the description".to_owned()),
        Some(own),
    ];
    // A part that is absent is not a cause, and is not tried.
    let names: Vec<_> =
        names.into_iter().zip(&parts).map(|(name, part)| name.filter(|_| part.is_some())).collect();
    // The configuration decides the VM's identity.
    let identity = json!({
        "schema": "vmrecord/1",
        "generation": given.generation,
        "vm": {"uuid": uuid(vmid, config, &mut problems), "owner": null},
    });
    let compose = |without: Option<usize>| {
        let mut record = skeleton(options);
        let parts = parts.iter().enumerate().filter(|(part, _)| Some(*part) != without);
        parts.filter_map(|(_, part)| part.clone()).for_each(|part| merge(&mut record, part));
        merge(&mut record, identity.clone());
        announce(&mut record, config);
        name_nics(&mut record);
        record
    };
    let (mut record, _) = parse_composed(limits, ("the record", &names), compose)?;
    // Nothing would serve it, and nobody would see why.
    if record.network.nics.is_empty()
        && let Some(of_nic) = problems.iter().position(ProxmoxProblem::is_of_nic)
    {
        return Err(problems.swap_remove(of_nic));
    }
    record.vm.owner = Some(owner(vmid, config, &given.cluster));
    let subject = record.identity.as_ref().and_then(|identity| identity.subject.as_ref());
    if let Some(value) = subject.and_then(Subject::chosen_by_tenants) {
        // The last part that has one overrides the others.
        let has_subject = |part: &&Option<Value>| {
            part.as_ref()
                .and_then(|part| part.pointer("/identity/subject"))
                .is_some_and(|value| !value.is_null())
        };
        let part = parts.iter().rposition(|part| has_subject(&part)).and_then(|part| names[part].clone());
        return Err(ProxmoxProblem::Subject { part: part.unwrap_or_else(|| "the record".into()), value });
    }
    Ok(ProxmoxTranslation { record, problems })
}

/// The id of the event of a migration. A later migration is another event, because this one is gone with its lock.
const MIGRATION: &str = "migration";

/// Adds what Proxmox VE is about to do to the VM: qemu-server locks the configuration before a migration begins, and
/// unlocks it after its end (`phase1` and `phase3_cleanup` in QemuMigrate.pm). A VM that is off migrates in the same way,
/// and nobody reads its events.
fn announce(record: &mut Value, config: &VmConfig) {
    if config.get("lock") != Some("migrate") {
        return;
    }
    let event =
        json!({"id": MIGRATION, "kind": "freeze", "state": "started", "description": "live migration"});
    match record["events"].as_array_mut() {
        None => record["events"] = json!([event]),
        // Parts in files may have events of their own.
        Some(events) if events.len() < EVENTS_PER_VM && events.iter().all(|e| e["id"] != MIGRATION) => {
            events.push(event);
        }
        Some(_) => {}
    }
}

/// What all VMs have in common.
fn skeleton(options: &ProxmoxOptions) -> Value {
    json!({
        "vm": {"project": {"id": "proxmox", "number": 0, "account": "000000000000"}},
        "placement": {"region": options.region, "zone": options.zone},
        // Proxmox VE takes files as large as this limit.
        "serve": {"limits": {"user_data": USER_DATA_MAX}},
    })
}

/// What the configuration says of a VM.
fn described(
    vmid: u32,
    config: &VmConfig,
    given: &TranslationInput,
    problems: &mut Vec<ProxmoxProblem>,
) -> Value {
    let nics = nics(config, problems);
    let dns = Dns::of_vm(config, &given.host);
    let user_data = given.custom.user.clone().unwrap_or_else(|| drive::user_data(config, vmid).into());
    let network = DriveFormat::of(config).network(&nics, &dns);
    let drives_network = given.custom.network.as_deref().unwrap_or(network.as_bytes());
    let mut part = json!({
        "vm": {
            "name": config.get("name").map_or_else(|| format!("VM{vmid}"), str::to_owned),
            "instance_id": drive::instance_id(&user_data, drives_network),
        },
        "hostname": hostname(vmid, config),
        "admin": admin(config, problems),
        "ssh_keys": keys(config, problems),
        "user_data": payload(&user_data),
        "network": described_network(vmid, &nics, &dns, given.custom.network.as_deref(), problems),
        "labels": config.get("tags").map_or_else(Vec::new, |tags| words(tags).collect()),
    });
    // An empty file is Proxmox VE's way to say none.
    if let Some(vendor) = given.custom.vendor.as_deref().filter(|vendor| !vendor.is_empty()) {
        part["vendor_data"] = payload(vendor);
    }
    if let Some(arch) = fitting::<Line>(config, "arch", problems) {
        part["arch"] = arch;
    }
    if let Some(stamp) = stamp_of(config) {
        part["serve"] = json!({"smbios": stamp});
    }
    part
}

/// The network of a VM: NoCloud's document as the drive has it, and the NICs for all other dialects.
///
/// The drive of a VM without any `ipconfigN` configures no NIC. A guest that reads the same over the network would have
/// none at its next boot, so it gets no document, and uses its own defaults.
fn described_network(
    vmid: u32,
    nics: &[ProxmoxNic<'_>],
    dns: &Dns,
    custom: Option<&[u8]>,
    problems: &mut Vec<ProxmoxProblem>,
) -> Value {
    let is_told = nics.iter().any(|nic| nic.addresses.is_some());
    let raw = match custom {
        None => is_told.then(|| drive::nocloud_network(nics, dns)),
        Some(bytes) => {
            let text = std::str::from_utf8(bytes).ok().map(str::to_owned);
            let text = text.filter(|text| is_network_config(&text.as_str().into()));
            if text.is_none() {
                let expected =
                    "cloud-init's network-config, version 1 or 2, which a guest can get over the network";
                problems.push(ProxmoxProblem::custom("network", expected, "something else"));
            }
            text
        }
    };
    let mut sorted: Vec<_> = nics.iter().collect();
    sorted.sort_unstable_by_key(|nic| nic.number);
    let servers = dns.servers.iter().flat_map(|server| words(server));
    let servers: Vec<_> = servers.filter(|server| server.parse::<std::net::IpAddr>().is_ok()).collect();
    json!({
        "mode": match (&raw, is_told) {
            (Some(_), _) => "raw",
            (None, true) => "auto",
            (None, false) => "none",
        },
        "raw": raw,
        "dns": servers,
        "search": dns.search.iter().flat_map(|name| words(name)).filter(|name| is_domain(name)).collect::<Vec<_>>(),
        "nics": sorted.into_iter().map(|nic| nic.entry(vmid)).collect::<Vec<_>>(),
    })
}

/// The host name as far as it is one; the user-data has it as it is.
fn hostname(vmid: u32, config: &VmConfig) -> Value {
    let (short, fqdn) = drive::names(config, vmid);
    let mut name = json!({"short": if is_domain(&short) { short } else { label(&short) }});
    // Several search domains are no domain.
    if let Some((_, domain)) = fqdn.split_once('.').filter(|(_, domain)| is_domain(domain)) {
        name["domain"] = domain.into();
    }
    name
}

/// Labels of a host name, joined by dots (RFC 1123 §2.1).
fn is_domain(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= DOMAIN_BYTES && text.split('.').all(is_label)
}

/// The account. Only for Windows does the configuration have the password itself, which the config drive hands to
/// cloudbase-init as `admin_pass`; Linux guests get its hash with the user-data.
fn admin(config: &VmConfig, problems: &mut Vec<ProxmoxProblem>) -> Value {
    let mut admin = json!({});
    if let Some(user) = fitting::<Line>(config, "ciuser", problems) {
        admin["user"] = user;
    }
    if DriveFormat::of(config) == DriveFormat::Cloudbase
        && let Some(password) = fitting::<Secret>(config, "cipassword", problems)
    {
        admin["password"] = password;
    }
    admin
}

/// The value of a setting if a field of a record can have it. A VM is not refused for one that cannot: the drive's
/// documents have it as it is.
fn fitting<T: DeserializeOwned>(
    config: &VmConfig,
    key: &str,
    problems: &mut Vec<ProxmoxProblem>,
) -> Option<Value> {
    let value = Value::from(config.get(key)?);
    match T::deserialize(&value) {
        Ok(_) => Some(value),
        Err(_) => {
            problems.push(ProxmoxProblem::setting(key, "a line of text", "something else"));
            None
        }
    }
}

/// The public keys, named as on cloudbase-init's drive.
fn keys(config: &VmConfig, problems: &mut Vec<ProxmoxProblem>) -> Vec<Value> {
    let mut keys = Vec::new();
    for (n, line) in drive::keys(config).into_iter().enumerate() {
        match String::from_utf8(line) {
            Ok(key) if !key.trim().chars().any(char::is_control) => {
                keys.push(json!({"name": format!("key-{n}"), "key": key.trim()}));
            }
            _ => problems.push(ProxmoxProblem::setting("sshkeys", "a key on each line", "other bytes")),
        }
    }
    keys
}

/// Text as text, other bytes as base64. Base64 also keeps clients from guessing at text that looks like it.
fn payload(bytes: &[u8]) -> Value {
    json!({"base64": STANDARD.encode(bytes)})
}

/// The owner of what the agent keeps for a VM. Anyone who may change a VM's options sets its UUID and its description,
/// but neither its VMID nor `meta`, which is read-only in Proxmox VE's API (`json_config_properties` in QemuServer.pm):
/// qemu-server writes it when it makes or clones a VM, and restores it from a backup. VMs made before Proxmox VE 7.1
/// have none; each later VM of their VMID has one.
fn owner(vmid: u32, config: &VmConfig, cluster: &str) -> Owner {
    let made = made(config).filter(|made| made.bytes().all(|byte| byte.is_ascii_digit()));
    Owner::proxmox(cluster, vmid, made.unwrap_or_default())
}

/// The time when the VM was made.
fn made(config: &VmConfig) -> Option<&str> {
    config.get("meta").and_then(|meta| list(meta, None).ok()?.get("ctime").copied())
}

/// The UUID that the guest sees in its firmware. A VM without one gets a number of its own: `vmid` and the time when
/// the VM was made, because a later VM may have the same `vmid`.
fn uuid(vmid: u32, config: &VmConfig, problems: &mut Vec<ProxmoxProblem>) -> String {
    if let Some(text) = config.get("smbios1") {
        match list(text, None).map(|fields| fields.get("uuid").copied()) {
            Ok(Some(uuid)) if is_uuid(uuid) => return uuid.to_ascii_lowercase(),
            Ok(None) => {}
            Ok(Some(_)) => {
                problems.push(ProxmoxProblem::setting("smbios1", "a UUID in `uuid`", "something else"))
            }
            Err(expected) => problems.push(ProxmoxProblem::setting("smbios1", expected, "something else")),
        }
    }
    let digest = Sha256::digest(format!("proxmox:{vmid}:{}", made(config).unwrap_or_default()));
    let digits = hex(&digest[..16]);
    let ends = [8, 12, 16, 20, 32];
    let parts: Vec<_> =
        ends.iter().zip([0, 8, 12, 16, 20]).map(|(end, start)| &digits[start..*end]).collect();
    parts.join("-")
}

/// The cloud that the firmware names, by `smbios1`.
fn stamp_of(config: &VmConfig) -> Option<&'static str> {
    let fields = list(config.get("smbios1")?, None).ok()?;
    let is_base64 = fields.get("base64").and_then(|flag| boolean(flag)) == Some(true);
    let field = |name: &str| {
        let text = fields.get(name).copied().unwrap_or_default();
        match is_base64 {
            true => LENIENT
                .decode(text)
                .map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into()),
            false => text.to_owned(),
        }
    };
    stamp(&SmbiosFields {
        serial: &field("serial"),
        manufacturer: &field("manufacturer"),
        product: &field("product"),
        asset: "",
    })
}

// A VM's NICs: `netN` and `ipconfigN` (`parse_net` and `parse_ipconfig` in qemu-server's Network.pm).

/// Most NICs of a VM (`MAX_NETS` in QemuServer.pm).
pub const NICS: u8 = 32;

/// Longest name of a device (IFNAMSIZ without its NUL).
const IFNAME_BYTES: usize = 15;

/// Models of NICs (`$nic_model_list`): `virtio=MAC` is short for `model=virtio,macaddr=MAC`.
const MODELS: [&str; 14] = [
    "e1000",
    "e1000-82540em",
    "e1000-82544gc",
    "e1000-82545em",
    "e1000e",
    "i82551",
    "i82557b",
    "i82559er",
    "ne2k_isa",
    "ne2k_pci",
    "pcnet",
    "rtl8139",
    "virtio",
    "vmxnet3",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProxmoxNic<'a> {
    /// `N` of `netN`.
    pub(super) number: u8,
    pub(super) mac: Mac,
    /// The bridge. Without one QEMU itself is the network, and there is no tap.
    pub(super) bridge: Option<&'a str>,
    /// MTU in bytes, unless it is the bridge's.
    pub(super) mtu: Option<u16>,
    /// The addresses; `None` without `ipconfigN`, when the drive leaves the NIC out.
    pub(super) addresses: Option<Addresses<'a>>,
}

/// The addresses of a NIC, as the configuration spells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Addresses<'a> {
    pub(super) ip: Option<NicMethod<'a>>,
    pub(super) ip6: Option<NicMethod<'a>>,
}

/// How a NIC gets an address of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NicMethod<'a> {
    Dhcp,
    /// Stateless autoconfiguration (IPv6).
    Auto,
    Static {
        address: &'a str,
        prefix: u8,
        /// The prefix length as it is spelled, such as `064`.
        digits: &'a str,
        gateway: Option<&'a str>,
    },
}

impl ProxmoxNic<'_> {
    /// The NIC's tap on the node (`print_netdev_full` in QemuServer.pm). The firewall's bridge, VLAN tags and SDN do
    /// not change the name.
    pub(super) fn tap(&self, vmid: u32) -> Option<String> {
        self.bridge?;
        let name = format!("tap{vmid}i{}", self.number);
        (name.len() <= IFNAME_BYTES).then_some(name)
    }

    /// The NIC as an entry of a record.
    pub(super) fn entry(&self, vmid: u32) -> Value {
        let addresses = self.addresses.unwrap_or_default();
        let entries = [(addresses.ip, "dhcp4"), (addresses.ip6, "dhcp6")];
        let entries = entries.into_iter().filter_map(|(method, dhcp)| Some(method?.entry(dhcp)));
        let mut nic = json!({
            "id": format!("net{}", self.number),
            "name": format!("eth{}", self.number),
            "mac": self.mac.to_string(),
            "addresses": entries.collect::<Vec<_>>(),
        });
        let fields = [
            ("port", self.tap(vmid).map(|tap| json!({"ifname": tap}))),
            ("mtu", self.mtu.map(Into::into)),
            ("network_id", self.bridge.map(Into::into)),
        ];
        for (field, value) in fields {
            if let Some(value) = value {
                nic[field] = value;
            }
        }
        nic
    }
}

impl NicMethod<'_> {
    fn entry(self, dhcp: &str) -> Value {
        match self {
            Self::Dhcp => json!({"method": dhcp}),
            Self::Auto => json!({"method": "slaac"}),
            Self::Static { address, prefix, gateway, .. } => {
                let mut entry = json!({"method": "static", "address": format!("{address}/{prefix}")});
                if let Some(gateway) = gateway {
                    entry["gateway"] = gateway.into();
                }
                entry
            }
        }
    }
}

/// The NICs of a configuration in the drive's order. Those that cannot be used go to `problems`.
pub(super) fn nics<'a>(config: &'a VmConfig, problems: &mut Vec<ProxmoxProblem>) -> Vec<ProxmoxNic<'a>> {
    let mut found = Vec::new();
    for (number, text) in config.numbered("net", NICS) {
        let key = format!("ipconfig{number}");
        match nic(number, text) {
            Ok(mut nic) => {
                if let Some(text) = config.get(&key) {
                    let (addresses, wrong) = addresses(text);
                    nic.addresses = addresses;
                    problems.extend(wrong.map(|expected| ProxmoxProblem::value(&key, expected, text)));
                }
                found.push(nic);
            }
            Err(expected) => {
                problems.push(ProxmoxProblem::value(format_args!("net{number}"), expected, text))
            }
        }
    }
    found
}

fn nic(number: u8, text: &str) -> Result<ProxmoxNic<'_>, &'static str> {
    let fields = list(text, Some("model"))?;
    // Other fields may come with later versions, and do not change the tap.
    let mut models = fields.iter().filter(|(key, _)| MODELS.contains(key));
    let mac = match (models.next(), models.next(), fields.get("model"), fields.get("macaddr")) {
        (Some((_, mac)), None, None, None) => Some(*mac),
        (None, None, _, mac) => mac.copied(),
        _ => return Err("one model and one MAC"),
    };
    let mac: Option<Mac> = mac.and_then(|mac| mac.parse().ok());
    let mac = mac.filter(|mac| !mac.is_group() && *mac != Mac::default());
    Ok(ProxmoxNic {
        number,
        mac: mac.ok_or("the MAC of one station, as in `virtio=BC:24:11:00:00:01`")?,
        bridge: fields.get("bridge").copied(),
        // 1 stands for the bridge's; a guest's NIC has at least 68 (RFC 791).
        mtu: fields.get("mtu").and_then(|mtu| mtu.parse().ok()).filter(|mtu| *mtu >= 68),
        addresses: None,
    })
}

/// Reads `ipconfigN`. Returns what the drive makes of it, and what is wrong with it.
///
/// qemu-server drops the setting if its format is wrong (`check_type` in QemuServer.pm), and then the drive leaves the
/// NIC out. A gateway beside no address is found only later (`parse_ipconfig`): the NIC stays, without addresses.
fn addresses(text: &str) -> (Option<Addresses<'_>>, Option<&'static str>) {
    let given = match given(text) {
        Ok(given) => given,
        Err(expected) => return (None, Some(expected)),
    };
    let has_way = |(method, gateway): MethodAndGateway<'_>| {
        gateway.is_none() || matches!(method, Some(NicMethod::Static { .. }))
    };
    if !given.into_iter().all(has_way) {
        return (Some(Addresses::default()), Some("a gateway beside an address only"));
    }
    let [(ip, _), (ip6, _)] = given;
    (Some(Addresses { ip, ip6 }), None)
}

/// One family's method, and the gateway beside it.
type MethodAndGateway<'a> = (Option<NicMethod<'a>>, Option<&'a str>);

/// Both families' ways.
fn given(text: &str) -> Result<[MethodAndGateway<'_>; 2], &'static str> {
    let fields = list(text, None)?;
    if fields.keys().any(|key| !["ip", "gw", "ip6", "gw6"].contains(key)) {
        return Err("only `ip`, `gw`, `ip6` and `gw6`");
    }
    let get = |key| fields.get(key).copied();
    let is_v4 = |ip: &str| ip.parse::<Ipv4Addr>().is_ok();
    let is_v6 = |ip: &str| ip.parse::<Ipv6Addr>().is_ok();
    let ip = method(get("ip"), get("gw"), &["dhcp", "manual"], is_v4, 32)?;
    let ip6 = method(get("ip6"), get("gw6"), &["dhcp", "manual", "auto"], is_v6, 128)?;
    if get("ip").is_none() && get("ip6").is_none() {
        return Ok([(Some(NicMethod::Dhcp), None); 2]);
    }
    Ok([(ip, get("gw")), (ip6, get("gw6"))])
}

/// One family's part of `ipconfigN`, by its format (`pve-ipv4-config` and `pve-ipv6-config` in JSONSchema.pm).
fn method<'a>(
    ip: Option<&'a str>,
    gateway: Option<&'a str>,
    words: &[&str],
    is_address: fn(&str) -> bool,
    longest: u8,
) -> Result<Option<NicMethod<'a>>, &'static str> {
    let expected = "`ip=` and `ip6=` with an address and its prefix length, `dhcp` or (`ip6`) `auto`, and a gateway of \
                    the same family";
    if gateway.is_some_and(|gateway| ip.is_none() || !is_address(gateway)) {
        return Err(expected);
    }
    match ip {
        None => Ok(None),
        Some(word) if words.contains(&word) => Ok(match word {
            "dhcp" => Some(NicMethod::Dhcp),
            "auto" => Some(NicMethod::Auto),
            // No drive says this: it has no word for it.
            _ => None,
        }),
        Some(ip) => {
            let (address, digits) = ip.split_once('/').ok_or(expected)?;
            let prefix: u8 = digits.parse().map_err(|_| expected)?;
            let is_good = digits.bytes().all(|digit| digit.is_ascii_digit())
                && (8..=longest).contains(&prefix)
                && is_address(address);
            is_good.then_some(Some(NicMethod::Static { address, prefix, digits, gateway })).ok_or(expected)
        }
    }
}
