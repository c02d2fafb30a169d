//! `identity`: what tokens that others verify say about the VM; ids derived from the record; the owner of a VM's state.

use metadata_common::printable::hex;
use metadata_common::share::Tenant;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::sync::Arc;

use super::values::{TextForm, is_uuid, readable, writable};
use super::vm::Iam;
use super::{Nic, Record};
use crate::source::RecordSource;

/// Maximum length of an audience, in bytes.
pub const AUDIENCE_BYTES: usize = 255;
/// Maximum number of audiences that a record lists.
pub const AUDIENCES: usize = 32;
/// Maximum length of a subject's template, in bytes.
pub const TEMPLATE_BYTES: usize = 255;
/// Maximum length of a subject without its trust domain, in bytes.
pub const SUBJECT_BYTES: usize = 1_024;

/// `identity`: what tokens that others verify say about the VM.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct IdentitySettings {
    /// Subject of the VM's tokens, with `{owner}`, `{uuid}`, `{name}`, `{namespace}` and `{project}` for values of the
    /// record. With a trust domain it is the path of the SPIFFE ID. Default: `vm/{owner}`, or `vm:{owner}` without a
    /// trust domain; for VMs of KubeVirt `kubevirt/NAMESPACE/NAME` or `kubevirt:NAMESPACE/NAME`, of Proxmox VE
    /// `proxmox/CLUSTER/VMID` or `proxmox:CLUSTER/VMID`, of OpenStack `openstack/PROJECT/INSTANCE` or
    /// `openstack:PROJECT/INSTANCE`.
    pub subject: Option<Subject>,
    /// Audiences for which the guest may get a token; any by default, none with an empty list.
    pub audiences: Option<Vec<Audience>>,
}

/// The party for which a token is meant: visible ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Audience(String);

impl Audience {
    /// The form of an audience.
    pub const FORM: &str = "1 to 255 visible ASCII characters";

    /// Parses an audience; `None` if it does not have its form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_good = (1..=AUDIENCE_BYTES).contains(&text.len());
        (is_good && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TextForm for Audience {
    const EXPECTED: &'static str = Self::FORM;

    fn read(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

impl fmt::Display for Audience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

readable!(Audience, Owner, Subject);
writable!(Audience, Owner, Subject);

/// A value of the record that a template names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Owner,
    Uuid,
    Name,
    Namespace,
    Project,
}

impl Value {
    const ALL: [(&'static str, Self); 5] = [
        ("{owner}", Self::Owner),
        ("{uuid}", Self::Uuid),
        ("{name}", Self::Name),
        ("{namespace}", Self::Namespace),
        ("{project}", Self::Project),
    ];

    fn of(self, record: &Record) -> &str {
        match self {
            Self::Owner => record.owner_text(),
            Self::Uuid => record.vm.uuid.as_str(),
            Self::Name => record.vm.name.as_str(),
            Self::Namespace => record.namespace(),
            Self::Project => record.vm.project.id.as_str(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Value(Value),
}

/// Template of a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject(Vec<Part>);

impl Subject {
    /// Fills the template in with values of a record. In values, bytes other than letters, digits, `.`, `_`, `~` and
    /// `-` are percent-encoded, so that no value can add a `/` or become `..`. The owner keeps its own `/`: the
    /// platform or the operator has put them there.
    ///
    /// # Errors
    /// The name of a value that the record does not have.
    pub fn fill(&self, record: &Record) -> Result<String, &'static str> {
        let mut subject = String::new();
        for part in &self.0 {
            match part {
                Part::Literal(literal) => subject.push_str(literal),
                Part::Value(value) => match value.of(record) {
                    "" => return Err(name(*value)),
                    text if *value == Value::Owner => escape_parts(text, &mut subject),
                    text => escape(text, &mut subject),
                },
            }
        }
        Ok(subject)
    }

    /// Returns a value in the template that tenants choose, if the template does not name the owner as well. Such a
    /// subject may be that of another VM.
    #[must_use]
    pub fn chosen_by_tenants(&self) -> Option<&'static str> {
        let has = |value| self.0.contains(&Part::Value(value));
        let chosen = [Value::Uuid, Value::Name].into_iter().find(|value| has(*value));
        chosen.filter(|_| !has(Value::Owner)).map(name)
    }
}

fn name(value: Value) -> &'static str {
    Value::ALL.into_iter().find(|(_, known)| *known == value).map_or("", |(name, _)| name)
}

/// Escapes each part between `/`.
pub(crate) fn escape_parts(text: &str, out: &mut String) {
    for (at, part) in text.split('/').enumerate() {
        if at > 0 {
            out.push('/');
        }
        escape(part, out);
    }
}

fn escape(text: &str, out: &mut String) {
    use fmt::Write as _;
    let is_dots = text.bytes().all(|byte| byte == b'.');
    for byte in text.bytes() {
        let is_plain = byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'~' | b'-');
        if is_plain || (byte == b'.' && !is_dots) {
            out.push(char::from(byte));
        } else {
            write!(out, "%{byte:02X}").expect("writing to a String cannot fail");
        }
    }
}

impl TextForm for Subject {
    const EXPECTED: &'static str = "1 to 255 letters, digits and `._~:/-` with `{owner}`, `{uuid}`, `{name}`, \
        `{namespace}` or `{project}`, and no segment that is empty, `.` or `..`";

    fn read(text: &str) -> Option<Self> {
        let is_segment = |segment: &str| !matches!(segment, "" | "." | "..");
        if text.len() > TEMPLATE_BYTES || !text.split('/').all(is_segment) {
            return None;
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            if rest.starts_with('{') {
                let (name, value) = Value::ALL.into_iter().find(|(name, _)| rest.starts_with(name))?;
                parts.push(Part::Value(value));
                rest = &rest[name.len()..];
                continue;
            }
            let (literal, after) = rest.split_at(rest.find('{').unwrap_or(rest.len()));
            let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._~:/-".contains(&byte);
            if !literal.bytes().all(is_good) {
                return None;
            }
            parts.push(Part::Literal(literal.to_owned()));
            rest = after;
        }
        Some(Self(parts))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Literal(literal) => f.write_str(literal),
            Part::Value(value) => f.write_str(name(*value)),
        })
    }
}

// Values derived from the record, for dialects that prescribe the form of their ids.
//
// Each is a pure function of the record, so a VM keeps its ids when it moves to another node.

/// Bytes of the hash in an OCID, whose unique part has 60 characters.
const OCID_BYTES: usize = 30;

/// Returns the first 17 hex digits of SHA-256 over `prefix` and `value`.
fn h17(prefix: &str, value: &str) -> String {
    let mut hex = hex(&digest(prefix, value)[..9]);
    hex.truncate(17);
    hex
}

fn digest(prefix: &str, value: &str) -> [u8; 32] {
    Sha256::new().chain_update(prefix).chain_update(value).finalize().into()
}

impl Record {
    /// Returns `vm.instance_id`; the UUID if it is not set.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        self.vm.instance_id.as_ref().map_or(self.vm.uuid.as_str(), |id| id.as_str())
    }

    /// Returns `vm.ec2_id`; `i-` and a hash of the owner if it is not set.
    #[must_use]
    pub fn ec2_id(&self) -> String {
        let derived = || format!("i-{}", h17("ec2:", self.owner_text()));
        self.vm.ec2_id.as_ref().map_or_else(derived, ToString::to_string)
    }

    /// Returns `vm.numeric_id`; the top 52 bits of a hash of the owner, never 0, if it is not set.
    #[must_use]
    pub fn numeric_id(&self) -> u64 {
        let derived = || {
            let [a, b, c, d, e, f, g, h, ..] = digest("num:", self.owner_text());
            (u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 12).max(1)
        };
        self.vm.numeric_id.map_or_else(derived, |id| id.get())
    }

    /// Returns the EC2 reservation id: the digits of the instance id after `r-`.
    #[must_use]
    pub fn reservation_id(&self) -> String {
        format!("r-{}", self.ec2_id().trim_start_matches("i-"))
    }

    /// Returns the EC2 image id; `None` without an image.
    #[must_use]
    pub fn ami_id(&self) -> Option<String> {
        let id = self.image.as_ref()?.id.as_str();
        Some(if id.starts_with("ami-") { id.to_owned() } else { format!("ami-{}", h17("ami:", id)) })
    }

    /// Returns the EC2 VPC id: `vpc-` and a hash of the project id.
    #[must_use]
    pub fn vpc_id(&self) -> String {
        format!("vpc-{}", h17("vpc:", self.vm.project.id.as_str()))
    }

    /// Returns the EC2 instance profile id: `AIPA` and a hash of project id and role.
    #[must_use]
    pub fn instance_profile_id(&self, iam: &Iam) -> String {
        let owner = format!("iam:{}:", self.vm.project.id);
        format!("AIPA{}", h17(&owner, iam.role.as_str()).to_ascii_uppercase())
    }

    /// Returns the Oracle instance id. It contains the owner if that is a UUID, or else a hash of it.
    #[must_use]
    pub fn ocid(&self) -> String {
        let owner = self.owner_text();
        let is_uuid = is_uuid(owner);
        let unique = if is_uuid { owner.to_owned() } else { hex(&digest("ocid:", owner)[..OCID_BYTES]) };
        format!("ocid1.instance.oc1..{unique}")
    }

    /// Returns a UUID that no other VM has, for documents that others verify: the owner if that is a UUID, or else one
    /// of version 8 (RFC 9562 §5.8) made of a hash of it. The UUID of the firmware may be a tenant's choice.
    #[must_use]
    pub fn unique_uuid(&self) -> String {
        let owner = self.owner_text();
        if is_uuid(owner) {
            return owner.to_owned();
        }
        let mut bytes = digest("uuid:", owner);
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let digits = hex(&bytes[..16]);
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }

    /// Returns the Vultr region code: the first three characters of the region in upper case.
    #[must_use]
    pub fn region_code(&self) -> String {
        self.placement.region.as_str().to_uppercase().chars().take(3).collect()
    }

    /// Returns the zone as a GCE resource path.
    #[must_use]
    pub fn gce_zone(&self) -> String {
        format!("projects/{}/zones/{}", self.vm.project.number, self.placement.zone)
    }

    /// Returns the region as a GCE resource path.
    #[must_use]
    pub fn gce_region(&self) -> String {
        format!("projects/{}/regions/{}", self.vm.project.number, self.placement.region)
    }

    /// Returns the instance type as a GCE resource path.
    #[must_use]
    pub fn gce_machine_type(&self) -> String {
        format!("projects/{}/machineTypes/{}", self.vm.project.number, self.instance_type())
    }
}

impl Nic {
    /// Returns the EC2 interface id: `eni-` and a hash of the MAC; `None` without a MAC.
    #[must_use]
    pub fn eni_id(&self) -> Option<String> {
        self.mac.map(|mac| format!("eni-{}", h17("eni:", &mac.to_string())))
    }

    /// Returns the EC2 subnet id: `subnet-` and a hash of the network id; `None` without one.
    #[must_use]
    pub fn subnet_id(&self) -> Option<String> {
        self.network_id.as_ref().map(|id| format!("subnet-{}", h17("subnet:", id.as_str())))
    }
}

// The owner of a VM's state: the key of everything that the agent keeps or derives for one VM.
//
// Tenants of a platform choose a VM's firmware UUID, so two VMs may have the same. The owner is what the platform
// itself assigned, and a feed sets it after it has parsed the record:
//
// | source | owner | who assigns it |
// |---|---|---|
// | KubeVirt | `kubevirt/NAMESPACE/NAME/UID` | the API server: no two objects have one namespace and name at a time, and a UID is never used twice |
// | Proxmox VE | `proxmox/CLUSTER/VMID/CTIME` | the cluster: a VMID is unique in it, and only qemu-server writes the time of creation |
// | OpenStack | `openstack/PROJECT/INSTANCE` | Nova: an instance's UUID is never used twice, and neither it nor the project can be chosen |
// | a libvirt hook | the domain's UUID | libvirtd, which refuses a second domain of one UUID |
// | the API, a directory | `vm.owner`, or else `vm.uuid` | the operator who registers the VM |
//
// No part contains `/`, so the parts of two owners cannot join to one text. A UUID contains none either, so a tenant
// cannot name another source's VM.

/// Maximum length of an owner, in bytes. KubeVirt's longest has 364: a namespace of 63 and a name of 253.
pub const OWNER_BYTES: usize = 512;

/// The owner of a VM's state. Clones share the text, which has one form for each owner: a UUID is in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(Arc<str>);

impl Owner {
    /// The owner of a VirtualMachineInstance. `uid` is that of the VirtualMachine that controls it, which survives
    /// restarts, or else its own.
    #[must_use]
    pub fn kubevirt(namespace: &str, name: &str, uid: &str) -> Self {
        Self::of_platform(RecordSource::Kubevirt, [namespace, name, uid])
    }

    /// The owner of a VM of Proxmox VE. `created` is the time of its creation, as in its configuration.
    #[must_use]
    pub fn proxmox(cluster: &str, vmid: u32, created: &str) -> Self {
        Self::of_platform(RecordSource::Proxmox, [cluster, &vmid.to_string(), created])
    }

    /// The owner of an instance of OpenStack.
    #[must_use]
    pub fn openstack(project: &str, instance: &str) -> Self {
        Self::of_platform(RecordSource::Openstack, [project, instance])
    }

    fn of_platform<const PARTS: usize>(source: RecordSource, parts: [&str; PARTS]) -> Self {
        let mut text = source.name().to_owned();
        for part in parts {
            text.push('/');
            push_part(part, &mut text);
        }
        Self(text.into())
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether the owner is a UUID: that of a VM whose record names no other owner.
    #[must_use]
    pub fn is_uuid(&self) -> bool {
        is_uuid(&self.0)
    }

    /// Returns whether a record of this source may have this owner. Those of a platform's tenants have the owner that
    /// the platform assigned.
    #[must_use]
    pub fn fits(&self, source: RecordSource) -> bool {
        let prefix = self.0.split_once('/').map(|(prefix, _)| prefix);
        !source.is_of_tenants() || prefix == Some(source.name())
    }

    /// Returns the kind and the place of the VM within the platform: its owner without what tells it from an earlier VM
    /// of the same name or number. `vm` and the whole owner for others.
    pub(crate) fn place(&self) -> (&str, &str) {
        let platform = || {
            let (kind, rest) = self.0.split_once('/')?;
            let source = RecordSource::of(kind).filter(|source| source.is_of_tenants())?;
            // An instance of OpenStack has no earlier one.
            let place = match source {
                RecordSource::Openstack => rest,
                _ => rest.rsplit_once('/')?.0,
            };
            (place.split('/').count() == 2).then_some((kind, place))
        };
        platform().unwrap_or(("vm", &self.0))
    }
}

/// Adds a part of an owner. `%` and what may not stand in an owner are percent-encoded, and an empty part is `-`, so
/// that different parts have different texts.
fn push_part(part: &str, out: &mut String) {
    use fmt::Write as _;
    if matches!(part, "" | "-") {
        out.push_str(if part.is_empty() { "-" } else { "%2D" });
    }
    for byte in part.bytes().filter(|_| part != "-") {
        match byte {
            b'%' | b'/' => write!(out, "%{byte:02X}"),
            _ if byte.is_ascii_graphic() => write!(out, "{}", char::from(byte)),
            _ => write!(out, "%{byte:02X}"),
        }
        .expect("writing to a String cannot fail");
    }
}

impl TextForm for Owner {
    const EXPECTED: &'static str =
        "an owner (1 to 512 visible ASCII characters, with no empty part between `/`)";

    fn read(text: &str) -> Option<Self> {
        let is_good = (1..=OWNER_BYTES).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic())
            && text.split('/').all(|part| !part.is_empty());
        let text = || if is_uuid(text) { text.to_ascii_lowercase().into() } else { text.into() };
        is_good.then(|| Self(text()))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Record {
    /// Returns the owner of the VM's state: `vm.owner`, or else the UUID.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.vm.owner.clone().unwrap_or_else(|| Owner(self.vm.uuid.as_str().into()))
    }

    /// Returns the text of [`owner`](Self::owner).
    #[must_use]
    pub fn owner_text(&self) -> &str {
        self.vm.owner.as_ref().map_or(self.vm.uuid.as_str(), Owner::as_str)
    }
}

// Whose share of the node's limits a VM uses.

impl Record {
    /// Whose share of the node's limits the VM's requests use: its namespace's, or else its own.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        match &self.vm.namespace {
            Some(namespace) => Tenant::namespace(namespace.as_str()),
            None => Tenant::Vm(self.owner_text().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{OWNER_BYTES, Owner, TextForm as _};
    use crate::source::RecordSource;

    #[test]
    fn different_parts_never_join_to_one_owner() {
        let parts = ["", "-", "%2D", "a", "a-b", "b", "a/b", "a%2Fb", "ä", " ", "..", "A"];
        let mut seen = HashSet::new();
        for namespace in parts {
            for name in parts {
                for uid in parts {
                    let owner = Owner::kubevirt(namespace, name, uid);
                    assert!(
                        seen.insert(owner.clone()),
                        "{owner} of {namespace:?}, {name:?} and {uid:?} twice"
                    );
                    assert_eq!(owner.as_str().matches('/').count(), 3, "{owner}");
                    assert_eq!(Owner::read(owner.as_str()), Some(owner), "it reads back");
                }
            }
        }
    }

    #[test]
    fn a_platforms_owner_has_its_prefix_and_is_no_uuid() {
        let uuid = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        let bare = Owner::read(uuid).expect("an owner");
        let kubevirt = Owner::kubevirt("shop", "web", uuid);
        let proxmox = Owner::proxmox("pve", 100, "1725975013");
        assert_eq!(kubevirt.as_str(), format!("kubevirt/shop/web/{uuid}"));
        assert_eq!(proxmox.as_str(), "proxmox/pve/100/1725975013");
        let openstack = Owner::openstack("p1", uuid);
        assert_eq!(openstack.as_str(), format!("openstack/p1/{uuid}"));
        assert_eq!(openstack.place(), ("openstack", &*format!("p1/{uuid}")));
        assert_eq!(
            [&bare, &kubevirt, &proxmox].map(|owner| (owner.is_uuid(), owner.place())),
            [(true, ("vm", uuid)), (false, ("kubevirt", "shop/web")), (false, ("proxmox", "pve/100"))]
        );
        let fits = |owner: &Owner| RecordSource::ALL.map(|source| owner.fits(source));
        assert_eq!(fits(&bare), [true, true, true, false, false, false]);
        assert_eq!(
            fits(&kubevirt),
            [true, true, true, true, false, false],
            "an operator may take precedence over it"
        );
        assert_eq!(fits(&proxmox), [true, true, true, false, true, false]);
        assert_eq!(fits(&openstack), [true, true, true, false, false, true]);
    }

    #[test]
    fn an_owner_in_a_record_is_short_and_printable() {
        let longest = "x".repeat(OWNER_BYTES);
        for text in ["a", "kubevirt/a/b/c", "acme:42/web", &longest] {
            assert_eq!(Owner::read(text).expect(text).as_str(), text);
        }
        let upper = Owner::read("7C0F1A52-3B5E-4D1A-9D2C-0F5E8A1B2C3D").expect("an owner");
        assert_eq!(upper.as_str(), "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "one form for each owner");
        let too_long = "x".repeat(OWNER_BYTES + 1);
        for text in ["", "/", "a/", "/a", "a//b", "a b", "a\n", "ä", "a\u{7f}", &too_long] {
            assert_eq!(Owner::read(text), None, "{text:?}");
        }
        for text in ["kubevirt/a/b", "kubevirt/a/b/c/d", "kubevirt", "acme/a/b/c", "file/a/b/c"] {
            assert_eq!(Owner::read(text).expect(text).place(), ("vm", text));
        }
    }
}
