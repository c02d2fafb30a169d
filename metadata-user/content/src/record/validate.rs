//! Checks of a record beyond the form of each value.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

use super::credentials::Credential;
use super::dialects::{DateTree, Dialect, Imdsv2, ServeLimits, USER_DATA_MAX};
use super::event::EVENTS_PER_VM;
use super::identity::{AUDIENCES, SUBJECT_BYTES};
use super::network::{Network, NetworkMode, Nic};
use super::values::{Device, FQDN_BYTES, TextForm as _, excerpt};
use super::vm::{FileSource, Payload};
use super::{PathStep, Record, RecordError, RecordLimits, RecordText, Warning, way};
use crate::parser;

/// Warnings of a record get a line and a column until its text was read again so many times, and
/// [`READ_AGAIN_BYTES`] more. Later ones name their field alone: a text of 4 MiB may earn hundreds of warnings.
const READ_AGAIN_TIMES: usize = 4;
/// Bytes that may be read again for the places of warnings, in a record of any length.
const READ_AGAIN_BYTES: usize = 1 << 20;

/// Checks one record and collects warnings.
pub(super) struct Validator<'a> {
    text: RecordText<'a>,
    /// Bytes that were read again to find the places of warnings.
    read_again: usize,
    pub(super) limits: &'a RecordLimits,
    warnings: Vec<Warning>,
}

pub(super) type ValidationResult = Result<(), RecordError>;

/// Checks that values are consistent with each other and within `limits`. Returns the warnings.
pub(super) fn validate(
    record: &Record,
    text: RecordText<'_>,
    limits: &RecordLimits,
) -> Result<Vec<Warning>, RecordError> {
    let mut validator = Validator { text, read_again: 0, limits, warnings: Vec::new() };
    validator.counts(record)?;
    validator.uuid(record);
    validator.hostname(record)?;
    // Before the payloads, because credentials may have become the user-data.
    validator.systemd(record)?;
    validator.payloads(record)?;
    validator.keys(record);
    validator.metadata(record)?;
    validator.nics(record)?;
    validator.raw_network(record)?;
    validator.credentials(record)?;
    validator.serving(record)?;
    validator.identity(record)?;
    validator.events(record)?;
    Ok(validator.warnings)
}

impl Validator<'_> {
    pub(super) fn refuse(
        &self,
        path: &[PathStep],
        expected: impl Display,
        found: impl Display,
        remedy: &'static str,
    ) -> ValidationResult {
        let (expected, found) = (expected.to_string(), found.to_string());
        Err(RecordError::Refused { place: Box::new(self.text.place(path)), expected, found, remedy })
    }

    pub(super) fn warn(&mut self, path: &[PathStep], message: impl Into<String>) {
        self.read_again += self.text.text.len();
        let reads_again = self.read_again <= READ_AGAIN_TIMES * self.text.text.len() + READ_AGAIN_BYTES;
        let place = if reads_again { self.text.place(path) } else { self.text.name(path) };
        self.warnings.push(Warning { place, message: message.into() });
    }

    pub(super) fn at_most(
        &self,
        path: &[PathStep],
        limit: usize,
        found: usize,
        what: &str,
    ) -> ValidationResult {
        if found <= limit {
            return Ok(());
        }
        self.refuse(path, format_args!("at most {limit} {what}"), found, "remove some")
    }

    fn counts(&self, record: &Record) -> ValidationResult {
        let (limits, network) = (self.limits, &record.network);
        self.at_most(&way!["network", "nics"], limits.nics, network.nics.len(), "NICs")?;
        self.at_most(&way!["network", "dns"], limits.names, network.dns.len(), "resolvers")?;
        self.at_most(&way!["network", "search"], limits.names, network.search.len(), "search domains")?;
        for (n, nic) in network.nics.iter().enumerate() {
            let (addresses, routes) = (nic.addresses.len(), nic.routes.len());
            self.at_most(&way!["network", "nics", n, "addresses"], limits.addresses, addresses, "addresses")?;
            self.at_most(&way!["network", "nics", n, "routes"], limits.routes, routes, "routes")?;
        }
        self.at_most(&way!["ssh_keys"], limits.keys, record.ssh_keys.len(), "keys")?;
        self.at_most(&way!["labels"], limits.labels, record.labels.len(), "labels")?;
        self.at_most(&way!["disks"], limits.disks, record.disks.len(), "disks")?;
        self.at_most(&way!["files"], limits.files, record.files.len(), "files")?;
        let bytes = record.files.iter().map(|file| file.base64.0.len()).sum();
        self.at_most(&way!["files"], limits.files_bytes, bytes, "bytes in all files")
    }

    /// Warns of the UUID of a machine that has none (the nil UUID, RFC 9562 section 5.9).
    fn uuid(&mut self, record: &Record) {
        if record.vm.uuid.as_str().bytes().all(|byte| matches!(byte, b'0' | b'-')) {
            let message = "all zeros, as of every machine without a UUID: such VMs have one instance id and, without \
                           `vm.owner`, share passwords and what their guests write; write the VM's own";
            self.warn(&way!["vm", "uuid"], message);
        }
    }

    fn hostname(&self, record: &Record) -> ValidationResult {
        let length = record.hostname.fqdn().len();
        if length <= FQDN_BYTES {
            return Ok(());
        }
        let expected = format!("host name and domain of at most {FQDN_BYTES} bytes");
        self.refuse(&way!["hostname"], expected, length, "shorten the domain")
    }

    fn events(&self, record: &Record) -> ValidationResult {
        let events = &record.events;
        self.at_most(&way!["events"], EVENTS_PER_VM, events.len(), "events")?;
        let mut ids = HashSet::new();
        for (n, event) in events.iter().enumerate() {
            if !ids.insert(event.id.as_str()) {
                let expected = "an id that no other event has";
                return self.refuse(&way!["events", n, "id"], expected, &event.id, "choose another");
            }
        }
        Ok(())
    }

    fn payloads(&mut self, record: &Record) -> ValidationResult {
        let cap = record.serve.limits.user_data;
        if cap > USER_DATA_MAX {
            return self.refuse(
                &way!["serve", "limits", "user_data"],
                format_args!("at most {USER_DATA_MAX} bytes"),
                cap,
                "lower it",
            );
        }
        let cap = usize::try_from(cap).unwrap_or(usize::MAX);
        for (name, payload) in record.payloads() {
            let Some(payload) = payload else { continue };
            if payload.forms() != 1 {
                let remedy = "keep one of them, or leave the whole field out for none";
                let expected = "exactly one of `text`, `base64` and `source`";
                return self.refuse(&way![name], expected, payload.forms(), remedy);
            }
            if let Some(source) = payload.source() {
                self.source(&way![name, "source", "file"], source)?;
            }
            if payload.len() > cap {
                let remedy = "shrink it (cloud-init accepts gzip) or raise serve.limits.user_data";
                let expected = format!("at most {cap} bytes");
                return self.refuse(&way![name], expected, payload.len(), remedy);
            }
            self.guessable(name, payload);
            self.misspelt(name, payload);
            self.unlike_unix(name, payload);
            self.textual(record, name, payload);
        }
        Ok(())
    }

    /// Warns of a payload that is neither UTF-8 nor gzip: text documents cannot carry it.
    fn textual(&mut self, record: &Record, name: &str, payload: &Payload) {
        let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok() || bytes.starts_with(&[0x1f, 0x8b]);
        let loses = |dialect: &Dialect| match name {
            "user_data" => dialect.user_data().is_text_only(),
            // Only OpenStack has a second vendor-data.
            "vendor_data2" => *dialect == Dialect::OpenStack,
            _ => dialect.vendor_data().is_text_only(),
        };
        let served = Dialect::ALL.iter().filter(|dialect| record.serve.serves(**dialect) && loses(dialect));
        let served: Vec<&str> = served.map(|dialect| dialect.title()).collect();
        if served.is_empty() || payload.bytes().is_none_or(|bytes| is_text(&bytes)) {
            return;
        }
        let message = format!(
            "neither UTF-8 nor gzip: empty in the documents of {}, which carry text only",
            served.join(", ")
        );
        self.warn(&way![name], message);
    }

    /// Warns of user-data that an editor of Windows has saved: cloud-init recognises the kind by the first bytes, and
    /// the kernel an interpreter by the whole first line. Scripts for PowerShell and MIME messages may have such ends
    /// of lines.
    fn unlike_unix(&mut self, name: &str, payload: &Payload) {
        let Some(bytes) = payload.bytes() else { return };
        let Some(text) = bytes.strip_prefix("\u{feff}".as_bytes()) else {
            let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
            if first.starts_with(b"#") && !first.starts_with(b"#ps1") && first.ends_with(b"\r") {
                let message = "the first line ends with CR LF, which a script's interpreter and some clients take as \
                               part of its content; save it with LF";
                self.warn(&way![name], message);
            }
            return;
        };
        let message =
            if text.is_empty() { "is a byte order mark only" } else { "begins with a byte order mark" };
        let message = format!(
            "{message}, so that cloud-init does not recognise its kind and ignores it; save it without"
        );
        self.warn(&way![name], message);
    }

    /// Warns of a first line that is meant to be `#cloud-config`, by which cloud-init recognises its configuration.
    fn misspelt(&mut self, name: &str, payload: &Payload) {
        let Some(bytes) = payload.bytes() else { return };
        let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if let Some(line) = misspelt_cloud_config(first) {
            let message = format!(
                "begins with `{line}`, so that cloud-init does not recognise its kind and ignores it; write \
                 `#cloud-config`"
            );
            self.warn(&way![name], message);
        }
    }

    /// Warns of text that is also valid base64, which some clients decode. A final newline prevents that.
    fn guessable(&mut self, name: &str, payload: &Payload) {
        let guess = |text: &str| !text.is_empty() && !text.ends_with('\n') && STANDARD.decode(text).is_ok();
        if payload.text().is_some_and(guess) {
            self.warn(
                &way![name, "text"],
                "the text is also valid base64, and some clients would decode it; end it with a newline",
            );
        }
    }

    /// Refuses source files outside the record's directory: a record must not expose other files of the node.
    fn source(&self, path: &[PathStep], source: &FileSource) -> ValidationResult {
        use std::path::Component;
        let inside =
            source.file.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        let some = source.file.components().any(|part| matches!(part, Component::Normal(_)));
        if inside && some {
            return Ok(());
        }
        let found = format!("`{}`", excerpt(&source.file.to_string_lossy()));
        let expected = "a path relative to the record's directory and inside it";
        self.refuse(path, expected, found, "put the file beside the record")
    }

    fn keys(&mut self, record: &Record) {
        let mut seen = HashSet::new();
        for (n, key) in record.ssh_keys.iter().enumerate() {
            if !seen.insert(&key.name) {
                let message =
                    format!("a second key named `{}` hides the first in some dialects; rename one", key.name);
                self.warn(&way!["ssh_keys", n, "name"], message);
            }
            if !is_openssh_key(key.key.as_str()) {
                let message = "not a public key of OpenSSH, so that sshd ignores it; write the line of a `.pub` file, such as \
                               `ssh-ed25519 AAAAC3Nz… comment`";
                self.warn(&way!["ssh_keys", n, "key"], message);
            }
        }
    }

    fn nics(&mut self, record: &Record) -> ValidationResult {
        let nics = &record.network.nics;
        let (mut ids, mut labels, mut macs) = (HashMap::new(), HashSet::new(), HashSet::new());
        for (n, nic) in nics.iter().enumerate() {
            if ids.insert(nic.id.as_str(), n).is_some() {
                let found = format!("`{}` twice", nic.id);
                return self.refuse(&way!["network", "nics", n, "id"], "each id once", found, "rename one");
            }
            if !labels.insert(nic.label()) {
                let found = format!("`{}` twice", nic.label());
                return self.refuse(
                    &way!["network", "nics", n, "name"],
                    "each name once",
                    found,
                    "rename one",
                );
            }
            self.nic_kind(n, nic)?;
            // A VLAN or bond normally has the MAC of the NIC below it.
            if let Some(mac) = nic.mac.filter(|mac| nic.is_physical() && !macs.insert(*mac)) {
                let found = format!("{mac} twice");
                let remedy = "give each NIC its own MAC: the agent identifies the VM by it";
                return self.refuse(&way!["network", "nics", n, "mac"], "each MAC once", found, remedy);
            }
        }
        let mut bonds = HashMap::new();
        for (n, nic) in nics.iter().enumerate() {
            self.nic_links(n, nic, &ids)?;
            self.one_bond(n, nic, &mut bonds)?;
            self.nic_addresses(n, nic)?;
        }
        self.loops(nics, &ids)?;
        if nics.is_empty() {
            let message = "no NIC, so that no port has this VM and the agent serves it nowhere (`export` can write it to a \
                           disk); add `nics` with the MAC and the port of each NIC";
            self.warn(&way!["network"], message);
        }
        for (n, nic) in nics.iter().enumerate() {
            if nic.port.as_ref().is_some_and(|port| port.ifname.as_str() == "lo") {
                let message = "the loopback interface, behind which there is no guest; name the VM's tap";
                self.warn(&way!["network", "nics", n, "port", "ifname"], message);
            }
        }
        // In mode `none` the guest gets no network document.
        if record.network.mode != NetworkMode::None {
            self.unaddressed(&record.network);
        }
        self.unnamed(record);
        self.roles(record);
        self.unleased(record);
        self.uncreated(record);
        Ok(())
    }

    fn nic_kind(&self, n: usize, nic: &Nic) -> ValidationResult {
        let nic_path = way!["network", "nics", n];
        if nic.vlan.is_some() && nic.bond.is_some() {
            let remedy = "make the VLAN a separate NIC on the bond";
            return self.refuse(&nic_path, "`vlan` or `bond`", "both", remedy);
        }
        if nic.mac.is_none() && nic.is_physical() {
            return self.refuse(&nic_path, "a `mac`", "none", "add the MAC of the guest's NIC");
        }
        if nic.port.is_some() && !nic.is_physical() {
            let remedy = "move `port` to the NIC below the VLAN or bond";
            let expected = "`port` only on NICs that the hypervisor provides";
            return self.refuse(&way!["network", "nics", n, "port"], expected, "a VLAN or bond", remedy);
        }
        Ok(())
    }

    fn nic_links(&self, n: usize, nic: &Nic, ids: &HashMap<&str, usize>) -> ValidationResult {
        let missing = |link: &str| !ids.contains_key(link) || link == nic.id.as_str();
        let remedy = "use the `id` of another NIC of this record";
        if let Some(vlan) = nic.vlan.as_ref().filter(|vlan| missing(vlan.link.as_str())) {
            let here = way!["network", "nics", n, "vlan", "link"];
            return self.refuse(&here, "the id of another NIC", format_args!("`{}`", vlan.link), remedy);
        }
        let Some(bond) = &nic.bond else { return Ok(()) };
        if bond.links.is_empty() {
            let here = way!["network", "nics", n, "bond", "links"];
            return self.refuse(&here, "the ids of one or more NICs", "none", remedy);
        }
        match bond.links.iter().position(|link| missing(link.as_str())) {
            Some(at) => {
                let here = way!["network", "nics", n, "bond", "links", at];
                self.refuse(&here, "the id of another NIC", format_args!("`{}`", bond.links[at]), remedy)
            }
            None => Ok(()),
        }
    }

    /// Refuses a NIC in two bonds: netplan would refuse the whole file. `bonds` has the bond of each NIC so far.
    fn one_bond<'r>(
        &self,
        n: usize,
        nic: &'r Nic,
        bonds: &mut HashMap<&'r str, &'r str>,
    ) -> ValidationResult {
        for (at, link) in nic.bond.iter().flat_map(|bond| &bond.links).enumerate() {
            let Some(other) = bonds.insert(link.as_str(), nic.id.as_str()) else { continue };
            let here = way!["network", "nics", n, "bond", "links", at];
            let found = if other == nic.id.as_str() {
                format!("`{link}` twice")
            } else {
                format!("`{link}`, which is in `{other}`")
            };
            return self.refuse(&here, "a NIC that is in no other bond", found, "name it once");
        }
        Ok(())
    }

    /// Refuses VLANs and bonds that are on themselves: netplan would refuse the whole file.
    fn loops(&self, nics: &[Nic], ids: &HashMap<&str, usize>) -> ValidationResult {
        for (n, nic) in nics.iter().enumerate() {
            let (mut seen, mut left) = (HashSet::new(), vec![n]);
            while let Some(upper) = left.pop() {
                let below = nics[upper].links().filter_map(|link| ids.get(link.as_str()).copied());
                left.extend(below.filter(|below| seen.insert(*below)));
            }
            if seen.contains(&n) {
                let expected = "a VLAN or bond of NICs below it";
                let found = format!("`{}` on itself, through its links", nic.id);
                let remedy = "link it to NICs that the hypervisor provides";
                return self.refuse(&way!["network", "nics", n], expected, found, remedy);
            }
        }
        Ok(())
    }

    fn nic_addresses(&self, n: usize, nic: &Nic) -> ValidationResult {
        use super::network::AddressMethod;
        for (a, address) in nic.addresses.iter().enumerate() {
            let here = way!["network", "nics", n, "addresses", a];
            let family = match (address.method, address.address.map(|cidr| cidr.address.is_ipv4())) {
                (AddressMethod::Static, None) => {
                    let remedy = "add it, or use another method";
                    return self.refuse(&here, "an `address` with method static", "none", remedy);
                }
                (AddressMethod::Static, Some(v4)) => v4,
                (AddressMethod::Dhcp4, _) => true,
                (AddressMethod::Dhcp6 | AddressMethod::Slaac, _) => false,
            };
            let version = if family { "IPv4" } else { "IPv6" };
            let given = address.address.map(|cidr| cidr.address);
            for (field, value) in [("address", given), ("gateway", address.gateway.map(|ip| ip.0))] {
                if let Some(value) = value.filter(|value| value.is_ipv4() != family) {
                    let here = way!["network", "nics", n, "addresses", a, field];
                    let remedy = "use one entry of `addresses` for each family";
                    return self.refuse(&here, format_args!("an {version} address"), value, remedy);
                }
            }
        }
        for (r, route) in nic.routes.iter().enumerate() {
            if route.to.address.is_ipv4() != route.via.0.is_ipv4() {
                let here = way!["network", "nics", n, "routes", r, "via"];
                let remedy = "name a next hop of the destination's family";
                return self.refuse(&here, format_args!("a next hop for {}", route.to), route.via, remedy);
            }
        }
        Ok(())
    }

    fn unaddressed(&mut self, network: &Network) {
        for (n, nic) in network.nics.iter().enumerate() {
            if nic.addresses.is_empty() && !network.carries_another(nic) {
                let message = "no addresses: the network document leaves this NIC unconfigured; add \
                               `addresses: [{method: dhcp4}]` to use DHCP";
                self.warn(&way!["network", "nics", n], message);
            }
        }
    }

    /// Warns of NICs that a guest does not find by their ids, and of VLANs and bonds that it cannot create under those.
    fn unnamed(&mut self, record: &Record) {
        let nics = record.network.nics.iter().enumerate();
        for (n, nic) in nics.filter(|(_, nic)| nic.name.is_none() && record.network.mode == NetworkMode::Auto)
        {
            let id = nic.id.as_str();
            let message = match (&nic.vlan, &nic.bond) {
                (None, None) => format!(
                    "no `name`: guests without netplan look for an interface called `{id}`; add `name: eth{n}`, or what \
                     the guest calls it"
                ),
                _ if Device::read(id).is_some() => continue,
                (vlan, _) => {
                    let name =
                        vlan.as_ref().map_or(format!("bond{n}"), |vlan| format!("vlan{}", vlan.id.get()));
                    format!(
                        "no `name`: the guest creates the VLAN or bond under its `id`, and `{id}` is not {}; add \
                         `name: {name}`",
                        Device::EXPECTED
                    )
                }
            };
            self.warn(&way!["network", "nics", n], message);
        }
    }

    fn roles(&mut self, record: &Record) {
        let listed = record.serve.dialects.as_deref().unwrap_or_default();
        if !listed.iter().any(|d| matches!(d, Dialect::DigitalOcean | Dialect::UpCloud)) {
            return;
        }
        let mut seen = HashSet::new();
        for n in 0..record.network.nics.len() {
            if !seen.insert(record.role(n)) {
                let message =
                    "a second NIC of one role: DigitalOcean's document has one public and one private NIC";
                self.warn(&way!["network", "nics", n], message);
            }
        }
    }

    /// Warns of NICs whose addresses DigitalOcean's document cannot have. Its clients use no DHCP.
    fn unleased(&mut self, record: &Record) {
        let listed = record.serve.dialects.as_deref().unwrap_or_default();
        if !listed.contains(&Dialect::DigitalOcean) {
            return;
        }
        for (n, nic) in record.network.nics.iter().enumerate() {
            let is_known = nic.addresses.iter().any(|address| address.address.is_some());
            if !nic.addresses.is_empty() && !is_known {
                let message = "no known address: DigitalOcean's clients use no DHCP, so that the NIC stays without an \
                               address; add the `address` of its lease";
                self.warn(&way!["network", "nics", n], message);
            }
        }
    }

    /// Warns of VLANs and bonds that NWCS's document cannot have. Its client takes NICs that exist, by their MAC.
    fn uncreated(&mut self, record: &Record) {
        let listed = record.serve.dialects.as_deref().unwrap_or_default();
        if !listed.contains(&Dialect::Nwcs) {
            return;
        }
        for (n, nic) in record.network.nics.iter().enumerate() {
            if !nic.is_physical() {
                let message = "not in NWCS's document, whose client creates no VLANs or bonds, so that the guest does \
                               not have this NIC; give its addresses to a NIC that the hypervisor provides";
                self.warn(&way!["network", "nics", n], message);
            }
        }
    }

    fn raw_network(&mut self, record: &Record) -> ValidationResult {
        let network = &record.network;
        let (here, data) = (way!["network", "raw"], way!["network", "network_data"]);
        let remedy = "write a cloud-init network-config, version 1 or 2";
        if network.mode != NetworkMode::Raw {
            for (field, given) in [(here, &network.raw), (data, &network.network_data)] {
                if given.is_some() {
                    self.warn(&field, "not used: set `network.mode: raw` to serve it");
                }
            }
            return Ok(());
        }
        if network.raw.is_none() && network.network_data.is_none() {
            return self.refuse(&here, "`raw` with mode raw", "none", remedy);
        }
        if network.raw.is_some() && !network.raw_document().is_some_and(configures_network) {
            let expected = "a mapping with `version: 1`, `version: 2` or `network`";
            return self.refuse(&here, expected, "something else", remedy);
        }
        if network.network_data.as_ref().is_some_and(|given| !is_network_data(given)) {
            let expected = "a JSON object with lists `links` and `networks`, the first not empty";
            let remedy = "write OpenStack's network_data.json";
            return self.refuse(&data, expected, "something else", remedy);
        }
        Ok(())
    }

    fn credentials(&mut self, record: &Record) -> ValidationResult {
        let credentials = &record.credentials;
        for credential in Credential::ALL {
            if let Some(source) = credentials.source(credential) {
                self.source(&credential.field(), source)?;
            }
        }
        if let Some(iam) = &credentials.iam {
            let literal = iam.access_key_id.is_some() && iam.secret_access_key.is_some();
            let partly = iam.access_key_id.is_some() || iam.secret_access_key.is_some();
            if iam.source.is_some() == literal || literal != partly {
                return self.refuse(
                    &way!["credentials", "iam"],
                    "either `source`, or `access_key_id` and `secret_access_key`",
                    "neither or both",
                    "keep one form",
                );
            }
        }
        if let Some(identity) = &credentials.managed_identity {
            let here = way!["credentials", "managed_identity"];
            if identity.source.is_some() && identity.text.is_some() {
                let expected = "at most one of `source` and `text`";
                return self.refuse(&here, expected, "both", "keep one form");
            }
            if identity.text.is_some() && identity.expires.is_none() {
                let remedy = "add when the token expires";
                return self.refuse(&here, "`expires` with `text`", "none", remedy);
            }
            if let Some(source) = &identity.source {
                self.source(&way!["credentials", "managed_identity", "source", "file"], source)?;
            }
        }
        let Some(token) = credentials.service_account.as_ref().and_then(|account| account.token.as_ref())
        else {
            return Ok(());
        };
        let here = way!["credentials", "service_account", "token"];
        if token.source.is_some() == token.text.is_some() {
            let expected = "exactly one of `source` and `text`";
            return self.refuse(&here, expected, "neither or both", "keep one form");
        }
        if token.text.is_some() && token.expires.is_none() {
            return self.refuse(&here, "`expires` with `text`", "none", "add when the token expires");
        }
        Ok(())
    }

    fn identity(&self, record: &Record) -> ValidationResult {
        let Some(identity) = &record.identity else { return Ok(()) };
        let audiences = identity.audiences.as_ref().map_or(0, Vec::len);
        self.at_most(&way!["identity", "audiences"], AUDIENCES, audiences, "audiences")?;
        let here = way!["identity", "subject"];
        match identity.subject.as_ref().map(|subject| subject.fill(record)) {
            Some(Err(value)) => {
                let remedy = "set it, or leave it out of the template";
                self.refuse(&here, format_args!("a value for `{value}`"), "none", remedy)
            }
            Some(Ok(subject)) if subject.len() > SUBJECT_BYTES => {
                let expected = format_args!("a subject of at most {SUBJECT_BYTES} bytes");
                self.refuse(&here, expected, subject.len(), "use a shorter template")
            }
            _ => Ok(()),
        }
    }

    fn serving(&mut self, record: &Record) -> ValidationResult {
        let serve = &record.serve;
        if serve.dialects.as_ref().is_some_and(Vec::is_empty) {
            self.warn(&way!["serve", "dialects"], "an empty list: nothing is served to this VM");
        }
        let ServeLimits { burst, rps, conns, .. } = serve.limits;
        let limits = [
            ("burst", burst, ServeLimits::REQUESTS_MOST),
            ("rps", rps, ServeLimits::REQUESTS_MOST),
            ("conns", conns, ServeLimits::CONNECTIONS_MOST),
        ];
        if let Some((name, value, most)) =
            limits.into_iter().find(|(_, value, most)| !(1..=*most).contains(value))
        {
            let here = way!["serve", "limits", name];
            return self.refuse(&here, format_args!("1 to {most}"), value, "leave it out for the default");
        }
        let most = ServeLimits::default().conns.saturating_mul(record.network.nics.len().max(1) as u32);
        if serve.limits.conns > most {
            let message = "more than the VM's NICs allow: each has at most 128 connections";
            self.warn(&way!["serve", "limits", "conns"], message);
        }
        let of_cloudstack = [Dialect::CloudStack, Dialect::Exoscale];
        let is_listed =
            |dialect: &Dialect| serve.dialects.as_ref().is_some_and(|listed| listed.contains(dialect));
        let (without_tree, remedy): (&[Dialect], _) = match serve.date_tree {
            DateTree::Ec2 => (&of_cloudstack, "set it to cloudstack"),
            DateTree::CloudStack => (&[Dialect::Ec2], "leave it out"),
        };
        if let Some(dialect) = without_tree.iter().find(|dialect| is_listed(dialect)) {
            let message = format!(
                "the tree below /latest is not {}'s, which serve.dialects lists; {remedy}",
                dialect.title()
            );
            self.warn(&way!["serve", "date_tree"], message);
        }
        let signs_maas = record.credentials.maas.is_some();
        let open = Dialect::ALL.iter().filter(|dialect| serve.opens_user_data(**dialect, signs_maas));
        let open: Vec<_> = open.map(|dialect| dialect.title()).collect();
        if serve.imdsv2 == Imdsv2::Required && !open.is_empty() {
            let message = format!(
                "protects nothing while the same user-data is served without a token to guests of {}; list only dialects \
                 that need a header in serve.dialects",
                open.join(", ")
            );
            self.warn(&way!["serve", "imdsv2"], message);
        }
        Ok(())
    }
}

/// Returns a line that has the letters of `#cloud-config` and not its hyphen alone. cloud-init ignores the case of
/// letters, and spaces before the `#`.
fn misspelt_cloud_config(line: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(line).ok()?.trim();
    let letters = line.strip_prefix('#')?.chars().filter(|c| !matches!(c, ' ' | '_' | '-'));
    let is_meant = letters.map(|c| c.to_ascii_lowercase()).eq("cloudconfig".chars());
    (is_meant && !line.eq_ignore_ascii_case("#cloud-config")).then_some(line)
}

/// Returns whether sshd takes a line for a public key (sshd(8), AUTHORIZED_KEYS FILE FORMAT): options, the type, and
/// the key in base64, which begins with its type (RFC 4253 section 6.6).
fn is_openssh_key(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.windows(2).any(|pair| {
        let (kind, key) = (pair[0], pair[1].trim_end_matches('='));
        let Ok(key) = STANDARD_NO_PAD.decode(key) else { return false };
        let Some((length, rest)) = key.split_first_chunk::<4>() else { return false };
        rest.get(..u32::from_be_bytes(*length) as usize).is_some_and(|name| name == kind.as_bytes())
    })
}

/// Returns whether cloud-init accepts the value as network-config. Text is parsed as YAML.
#[must_use]
pub fn is_network_config(raw: &serde_json::Value) -> bool {
    match raw {
        serde_json::Value::String(text) => parser::yaml(text).is_ok_and(|value| configures_network(&value)),
        value => configures_network(value),
    }
}

fn configures_network(document: &serde_json::Value) -> bool {
    let version = document.get("version").and_then(serde_json::Value::as_u64);
    matches!(version, Some(1 | 2)) || document.get("network").is_some_and(serde_json::Value::is_object)
}

/// Returns whether clients accept the value as OpenStack's `network_data.json`. Text is parsed as JSON. `links` must
/// not be empty: clients would conclude that the guest has no NICs.
#[must_use]
pub fn is_network_data(given: &serde_json::Value) -> bool {
    let object = |value: &serde_json::Value| {
        let list = |name: &str| value.get(name).and_then(serde_json::Value::as_array);
        list("links").is_some_and(|links| !links.is_empty()) && list("networks").is_some()
    };
    match given {
        serde_json::Value::String(text) => parser::json(text).is_ok_and(|value| object(&value)),
        value => object(value),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_openssh_key, misspelt_cloud_config};

    #[test]
    fn the_first_line_of_a_cloud_config_has_one_hyphen_and_nothing_else() {
        for line in [
            "#cloud_config",
            "#cloudconfig",
            "# cloud-config",
            "#Cloud_Config\r",
            "#cloud--config",
            "#cloud config",
        ] {
            assert_eq!(misspelt_cloud_config(line.as_bytes()), Some(line.trim()), "{line}");
        }
        for line in [
            "#cloud-config",
            "#Cloud-Config\r",
            "  #cloud-config",
            "#cloud-config-archive",
            "# cloud config of the web servers",
            "cloud_config",
            "#!/bin/sh",
            "#",
            "",
        ] {
            assert_eq!(misspelt_cloud_config(line.as_bytes()), None, "{line}");
        }
        assert_eq!(misspelt_cloud_config(b"#\xff"), None);
    }

    #[test]
    fn a_public_key_names_its_type_twice() {
        let key = "AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k";
        for line in [
            format!("ssh-ed25519 {key}"),
            format!("ssh-ed25519 {key} alice@example"),
            format!("from=\"10.0.0.0/8\",command=\"a b\" ssh-ed25519 {key} alice"),
        ] {
            assert!(is_openssh_key(&line), "{line}");
        }
        for line in
            ["hello", "ssh-ed25519", "ssh-ed25519 hello", "ssh-rsa AAAA", &format!("ssh-rsa {key}"), key]
        {
            assert!(!is_openssh_key(line), "{line}");
        }
    }
}
