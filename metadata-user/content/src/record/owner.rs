//! The owner of a VM's state: the key of everything that the agent keeps or derives for one VM.
//!
//! Tenants of a platform choose a VM's firmware UUID, so two VMs may have the same. The owner is what the platform
//! itself assigned, and a feed sets it after it has parsed the record:
//!
//! | source | owner | who assigns it |
//! |---|---|---|
//! | KubeVirt | `kubevirt/NAMESPACE/NAME/UID` | the API server: no two objects have one namespace and name at a time, and a UID is never used twice |
//! | Proxmox VE | `proxmox/CLUSTER/VMID/CTIME` | the cluster: a VMID is unique in it, and only qemu-server writes the time of creation |
//! | a libvirt hook | the domain's UUID | libvirtd, which refuses a second domain of one UUID |
//! | the API, a directory | `vm.owner`, or else `vm.uuid` | the operator who registers the VM |
//!
//! No part contains `/`, so the parts of two owners cannot join to one text. A UUID contains none either, so a tenant
//! cannot name another source's VM.

use metadata_common::share::Tenant;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;

use super::Record;
use super::values::{TextForm, is_uuid, text};
use crate::source::RecordSource;

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

    fn of_platform(source: RecordSource, parts: [&str; 3]) -> Self {
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
            let is_platform = RecordSource::of(kind).is_some_and(RecordSource::is_of_tenants);
            let (place, _) = rest.rsplit_once('/').filter(|(place, _)| place.split('/').count() == 2)?;
            is_platform.then_some((kind, place))
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

impl Serialize for Owner {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Owner {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer)
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
        assert_eq!(
            [&bare, &kubevirt, &proxmox].map(|owner| (owner.is_uuid(), owner.place())),
            [(true, ("vm", uuid)), (false, ("kubevirt", "shop/web")), (false, ("proxmox", "pve/100"))]
        );
        let fits = |owner: &Owner| RecordSource::ALL.map(|source| owner.fits(source));
        assert_eq!(fits(&bare), [true, true, true, false, false]);
        assert_eq!(fits(&kubevirt), [true, true, true, true, false], "an operator may stand in front of it");
        assert_eq!(fits(&proxmox), [true, true, true, false, true]);
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
