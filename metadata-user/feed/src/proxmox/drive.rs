//! The documents of Proxmox VE's own cloud-init drive, byte by byte (qemu-server's Cloudinit.pm).
//!
//! cloud-init takes a guest for a new instance when its instance id changes. The id is a digest of user-data and
//! network configuration, so a guest that moves from the drive to this service keeps it only if both texts are equal.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use metadata_common::printable::hex;
use metadata_content::parser;
use metadata_content::record::values::excerpt;
use serde_json::{Map, Value, json};
use sha1::{Digest as _, Sha1};

use super::config::{is_space, list, unescaped};
use super::translate::{NicMethod, ProxmoxNic};
use super::{ProxmoxProblem, VmConfig};
use crate::record_part::merge;

/// The resolvers that a VM gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Search domains.
    pub search: Vec<String>,
    /// Addresses of resolvers.
    pub servers: Vec<String>,
}

/// The form of the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveFormat {
    /// NoCloud, for Linux.
    NoCloud,
    /// OpenStack's config drive with Debian's `interfaces`.
    ConfigDrive2,
    /// The config drive of cloudbase-init, for Windows.
    Cloudbase,
}

impl DriveFormat {
    /// The form that a configuration asks for (`get_cloudinit_format`, `generate_configdrive2`). OpenNebula's has no
    /// instance id; it counts as NoCloud here.
    #[must_use]
    pub fn of(config: &VmConfig) -> Self {
        match (config.get("citype"), config.is_windows()) {
            (Some("configdrive2"), false) => Self::ConfigDrive2,
            (Some("configdrive2") | None, true) => Self::Cloudbase,
            _ => Self::NoCloud,
        }
    }

    /// The drive's network document.
    pub(super) fn network(self, nics: &[ProxmoxNic<'_>], dns: &Dns) -> String {
        match self {
            Self::NoCloud => nocloud_network(nics, dns),
            Self::ConfigDrive2 => configdrive2_network(nics, dns),
            Self::Cloudbase => cloudbase_network(nics, dns),
        }
    }
}

impl Dns {
    /// Reads a node's `/etc/resolv.conf` (`read_etc_resolv_conf` in pve-common's INotify.pm): the last `search` or
    /// `domain`, of it the first word, and three resolvers.
    #[must_use]
    pub fn of_host(text: &str) -> Self {
        let mut dns = Self::default();
        for line in text.lines() {
            let mut words = line.split(is_space).filter(|word| !word.is_empty());
            let starts = !line.starts_with(is_space);
            match (words.next(), words.next()) {
                (Some("search" | "domain"), Some(name)) if starts => dns.search = vec![name.to_owned()],
                (Some("nameserver"), Some(server)) if server.parse::<std::net::IpAddr>().is_ok() => {
                    dns.servers.push(server.to_owned());
                }
                _ => {}
            }
        }
        dns.servers.truncate(3);
        dns
    }

    /// The resolvers of a VM: its own settings, or else the node's (`get_dns_conf`).
    #[must_use]
    pub fn of_vm(config: &VmConfig, host: &Self) -> Self {
        let words = |key: &str| {
            let words = config.get(key)?.split(is_space).filter(|word| !word.is_empty());
            Some(words.map(str::to_owned).collect())
        };
        Self {
            search: words("searchdomain").unwrap_or_else(|| host.search.clone()),
            servers: words("nameserver").unwrap_or_else(|| host.servers.clone()),
        }
    }
}

/// Host name and full name (`get_hostname_fqdn`).
pub(super) fn names(config: &VmConfig, vmid: u32) -> (String, String) {
    let name = config.get("name").map_or_else(|| format!("VM{vmid}"), str::to_owned);
    // Perl takes `0` and an empty text for false.
    let search = config.get("searchdomain").filter(|search| !matches!(*search, "" | "0"));
    match (name.split_once('.'), search) {
        (Some((short, _)), _) => (short.to_owned(), name.clone()),
        (None, Some(search)) => (name.clone(), format!("{name}.{search}")),
        (None, None) => (name.clone(), name),
    }
}

/// The public keys, each with the bytes of its line.
pub(super) fn keys(config: &VmConfig) -> Vec<Vec<u8>> {
    let text = config.get("sshkeys").map(unescaped).unwrap_or_default();
    let is_blank = |line: &[u8]| line.iter().all(|byte| is_space(char::from(*byte)));
    text.split(|byte| *byte == b'\n').filter(|line| !is_blank(line)).map(<[u8]>::to_vec).collect()
}

/// The user-data (`cloudinit_userdata`).
pub(super) fn user_data(config: &VmConfig, vmid: u32) -> Vec<u8> {
    let (hostname, fqdn) = names(config, vmid);
    let user = config.get("ciuser");
    let mut text =
        format!("#cloud-config\nhostname: {hostname}\nmanage_etc_hosts: true\nfqdn: {fqdn}\n").into_bytes();
    let mut add = |parts: &[&[u8]]| parts.iter().for_each(|part| text.extend_from_slice(part));
    if let Some(user) = user {
        add(&[b"user: ", user.as_bytes(), b"\n"]);
    }
    if user == Some("root") {
        add(&[b"disable_root: False\n"]);
    }
    if let Some(password) = config.get("cipassword") {
        add(&[b"password: ", password.as_bytes(), b"\n"]);
    }
    if config.get("sshkeys").is_some() {
        add(&[b"ssh_authorized_keys:\n"]);
        keys(config).iter().for_each(|key| add(&[b"  - ", key, b"\n"]));
    }
    add(&[b"chpasswd:\n  expire: False\n"]);
    if user != Some("root") {
        add(&[b"users:\n  - default\n"]);
    }
    if config.flag("ciupgrade") != Some(false) {
        add(&[b"package_upgrade: true\n"]);
    }
    text
}

/// The instance id of all forms (`nocloud_gen_metadata`, `configdrive2_gen_metadata`, `cloudbase_gen_instance_id`).
pub(super) fn instance_id(user_data: &[u8], network: &[u8]) -> String {
    hex(&Sha1::new().chain_update(user_data).chain_update(network).finalize())
}

fn mask(prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0))
}

/// cloud-init's network-config version 1 (`nocloud_network`).
pub(super) fn nocloud_network(nics: &[ProxmoxNic<'_>], dns: &Dns) -> String {
    let mut text = "version: 1\nconfig:\n".to_owned();
    for nic in nics {
        let Some(addresses) = nic.addresses else { continue };
        let (number, mac) = (nic.number, nic.mac);
        put(
            &mut text,
            format_args!(
                "    - type: physical\n      name: eth{number}\n      mac_address: '{mac}'\n      subnets:\n"
            ),
        );
        match addresses.ip {
            Some(NicMethod::Static { address, prefix, gateway, .. }) => {
                let mask = mask(prefix);
                put(
                    &mut text,
                    format_args!(
                        "      - type: static\n        address: '{address}'\n        netmask: '{mask}'\n"
                    ),
                );
                gateway.iter().for_each(|gw| put(&mut text, format_args!("        gateway: '{gw}'\n")));
            }
            Some(NicMethod::Dhcp | NicMethod::Auto) => text.push_str("      - type: dhcp4\n"),
            None => {}
        }
        match addresses.ip6 {
            Some(NicMethod::Static { address, digits, gateway, .. }) => {
                put(
                    &mut text,
                    format_args!("      - type: static6\n        address: '{address}/{digits}'\n"),
                );
                gateway.iter().for_each(|gw| put(&mut text, format_args!("        gateway: '{gw}'\n")));
            }
            Some(NicMethod::Dhcp) => text.push_str("      - type: dhcp6\n"),
            Some(NicMethod::Auto) => text.push_str("      - type: ipv6_slaac\n"),
            None => {}
        }
    }
    text.push_str("    - type: nameserver\n");
    for (key, words) in [("address", &dns.servers), ("search", &dns.search)] {
        if !words.is_empty() {
            put(&mut text, format_args!("      {key}:\n"));
        }
        words.iter().for_each(|word| put(&mut text, format_args!("      - '{word}'\n")));
    }
    text
}

/// Debian's `interfaces` for Linux (`configdrive2_network`).
fn configdrive2_network(nics: &[ProxmoxNic<'_>], dns: &Dns) -> String {
    let mut text = "auto lo\niface lo inet loopback\n\n".to_owned();
    for (key, words) in [("dns_nameservers", &dns.servers), ("dns_search", &dns.search)] {
        if !words.is_empty() {
            put(&mut text, format_args!("        {key} {}\n", words.join(" ")));
        }
    }
    interfaces(&mut text, nics, None);
    text
}

/// Debian's `interfaces` for cloudbase-init (`cloudbase_network_eni`).
fn cloudbase_network(nics: &[ProxmoxNic<'_>], dns: &Dns) -> String {
    let mut text = String::new();
    let servers = dns.servers.join(" ");
    interfaces(&mut text, nics, Some(&*servers).filter(|servers| !servers.is_empty()));
    text
}

/// The stanzas of the NICs, with resolvers in those of static addresses.
fn interfaces(text: &mut String, nics: &[ProxmoxNic<'_>], servers: Option<&str>) {
    for nic in nics {
        let Some(addresses) = nic.addresses else { continue };
        let number = nic.number;
        put(text, format_args!("auto eth{number}\n"));
        for (method, family) in [(addresses.ip, "inet"), (addresses.ip6, "inet6")] {
            match method {
                Some(NicMethod::Dhcp) => put(text, format_args!("iface eth{number} {family} dhcp\n")),
                Some(NicMethod::Auto) => put(text, format_args!("iface eth{number} {family} auto\n")),
                Some(NicMethod::Static { address, prefix, digits, gateway }) => {
                    let mask = match family {
                        "inet" => mask(prefix).to_string(),
                        _ => digits.to_owned(),
                    };
                    put(
                        text,
                        format_args!(
                            "iface eth{number} {family} static\n        address {address}\n        netmask {mask}\n"
                        ),
                    );
                    gateway.iter().for_each(|gw| put(text, format_args!("        gateway {gw}\n")));
                    servers.iter().for_each(|dns| put(text, format_args!("        dns-nameservers {dns}\n")));
                }
                None => {}
            }
        }
    }
}

fn put(text: &mut String, line: std::fmt::Arguments<'_>) {
    text.write_fmt(line).expect("writing to a String cannot fail");
}

// The block that a VM's description may have:
//
// ````text
// The shop's front end.
//
// ```imds
// metadata: {role: web}
// labels: [shop]
// ```
// ````
//
// Who may edit a VM's options (`VM.Config.Options`) may edit its description, without other permissions on the node. So
// the block may say what the guest is told about itself, and nothing that decides which guest is asked, where secrets
// come from, or how much of the node it may use.

/// First line of the block.
const OPEN: &str = "```imds";
/// Last line of the block.
const CLOSE: &str = "```";

/// The fields of a record that the block may have.
pub const FIELDS: [&str; 4] = ["image", "instance_type", "labels", "metadata"];

/// The part of a record in a description; `None` without a block. `file` may have all other fields.
pub(super) fn part(description: &str, file: &str) -> Result<Option<Value>, ProxmoxProblem> {
    let wrong =
        |expected: &str, found: String| Err(ProxmoxProblem::Block { expected: expected.to_owned(), found });
    let mut lines = description.lines();
    if !lines.any(|line| line.trim_end() == OPEN) {
        return Ok(None);
    }
    let mut text = String::new();
    loop {
        match lines.next() {
            Some(line) if line.trim_end() == CLOSE => break,
            Some(line) => {
                text.push_str(line);
                text.push('\n');
            }
            None => return wrong("a line ``` at its end", "none".into()),
        }
    }
    let fields = match parser::yaml(&text) {
        Ok(Value::Object(fields)) => fields,
        Ok(Value::Null) => return Ok(Some(json!({}))),
        Ok(_) => return wrong("a mapping in YAML", "something else".into()),
        Err(error) => return wrong("a mapping in YAML", parser::fault_of_yaml(&text, &error)),
    };
    match fields.keys().find(|key| !FIELDS.contains(&key.as_str())) {
        Some(other) => {
            let found = format!("`{}`", excerpt(other));
            let expected =
                format!("only `image`, `instance_type`, `labels` and `metadata`; others belong in {file}");
            wrong(&expected, found)
        }
        None => Ok(Some(fields.into())),
    }
}

// `cicustom`: files on a storage that replace documents of the drive.

/// Most bytes of a file that `cicustom` names (`read_cloudinit_snippets_file` in Cloudinit.pm).
pub const SNIPPET_BYTES: usize = 1 << 20;

/// The documents that a file may replace, in the order of [`Custom`]'s fields.
pub const PARTS: [&str; 4] = ["user", "network", "meta", "vendor"];

/// The content of the files; `None` where the drive's own document applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Custom {
    /// User-data.
    pub user: Option<Bytes>,
    /// Network configuration.
    pub network: Option<Bytes>,
    /// Meta-data.
    pub meta: Option<Bytes>,
    /// Vendor-data.
    pub vendor: Option<Bytes>,
}

/// The format of `cicustom`.
pub(super) fn is_custom(text: &str) -> bool {
    list(text, None).is_ok_and(|named| named.keys().all(|key| PARTS.contains(key)))
}

/// The files that a configuration names, in the order of [`PARTS`], by their paths on this node.
///
/// # Errors
/// A file is not a snippet of a storage with a directory.
pub fn snippets(config: &VmConfig, storages: &str) -> Result<[Option<PathBuf>; 4], ProxmoxProblem> {
    let Some(text) = config.get("cicustom") else { return Ok(Default::default()) };
    let named = list(text, None).map_err(|expected| ProxmoxProblem::value("cicustom", expected, text))?;
    let mut paths: [Option<PathBuf>; 4] = Default::default();
    for (path, part) in paths.iter_mut().zip(PARTS) {
        *path = named.get(part).map(|volume| snippet(part, volume, storages)).transpose()?;
    }
    Ok(paths)
}

/// The path of a volume such as `local:snippets/user.yaml`. A name with a slash would lead out of the directory.
fn snippet(part: &'static str, volume: &str, storages: &str) -> Result<PathBuf, ProxmoxProblem> {
    let (storage, name) = volume.split_once(':').unwrap_or(("", volume));
    let name =
        name.strip_prefix("snippets/").filter(|name| !name.contains('/') && !matches!(*name, "." | ".."));
    let (false, Some(name)) = (storage.is_empty(), name) else {
        let expected = "a file `STORAGE:snippets/NAME`";
        return Err(ProxmoxProblem::custom(part, expected, format_args!("`{}`", excerpt(volume))));
    };
    let directory = directory(storage, storages).ok_or_else(|| {
        let found = format!("none of storage `{}`", excerpt(storage));
        ProxmoxProblem::custom(part, "a directory of snippets in storage.cfg", found)
    })?;
    Ok(directory.join(name))
}

/// The directory of a storage's snippets, by `/etc/pve/storage.cfg`. Storages without `path` are mounted by Proxmox VE
/// below `/mnt/pve` (NFS, CIFS, CephFS), and `local` exists even in an empty file.
fn directory(storage: &str, storages: &str) -> Option<PathBuf> {
    let mut sections = storages.lines().scan(false, |ours, line| {
        if let Some((kind, name)) = line.split_once(':').filter(|_| !line.starts_with(is_space)) {
            *ours = name.trim() == storage && !kind.starts_with('#');
            return Some(ours.then_some((kind, "")));
        }
        Some(line.trim().split_once(is_space).filter(|_| *ours).map(|(key, value)| (key, value.trim())))
    });
    let (kind, _) = match sections.by_ref().flatten().next() {
        Some(head) => head,
        None if storage == "local" => return Some(PathBuf::from("/var/lib/vz/snippets")),
        None => return None,
    };
    let (mut path, mut below) = (None, "snippets");
    for (key, value) in sections.flatten() {
        match key {
            "path" => path = Some(PathBuf::from(value)),
            "content-dirs" => {
                below = value.split(',').find_map(|dir| dir.strip_prefix("snippets=")).unwrap_or(below)
            }
            _ => {}
        }
    }
    let mounted = matches!(kind, "nfs" | "cifs" | "cephfs");
    let path = path.or_else(|| mounted.then(|| Path::new("/mnt/pve").join(storage)))?;
    Some(path.join(below.trim_start_matches('/')))
}

/// Record fields from a file of meta-data: NoCloud's YAML, or the JSON of a config drive. Instance id and host name
/// have fields; other words become custom metadata.
pub(super) fn meta(bytes: &[u8]) -> Result<Value, ProxmoxProblem> {
    let wrong = |found: &str| ProxmoxProblem::custom("meta", "a mapping in YAML or JSON", found);
    // The parser's message could repeat the content.
    let document = parser::yaml::<Map<String, Value>>(bytes).map_err(|_| wrong("something else"))?;
    let mut part = json!({});
    let mut words = Map::new();
    for (key, value) in document {
        match (&*key, word(&value)) {
            ("instance-id" | "instance_id" | "uuid", Some(id)) => part["vm"] = json!({"instance_id": id}),
            ("local-hostname" | "hostname", Some(name)) => part["hostname"] = hostname(&name),
            ("meta", _) => {
                let inner = value.as_object().into_iter().flatten();
                words.extend(inner.filter_map(|(key, value)| Some((key.clone(), word(value)?.into()))));
            }
            (_, Some(value)) => drop(words.insert(key, value.into())),
            (_, None) => {}
        }
    }
    merge(&mut part, json!({"metadata": words}));
    Ok(part)
}

fn word(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// A host name with or without its domain.
pub(super) fn hostname(name: &str) -> Value {
    match name.split_once('.') {
        Some((short, domain)) => json!({"short": short, "domain": domain}),
        // `null` removes the domain of the configuration.
        None => json!({"short": name, "domain": null}),
    }
}
