//! Records of simulated guests. They differ in every field, so that a mixed-up answer is noticed.

use anyhow::{Context as _, Result};
use metadata_common::mac::Mac;
use serde_json::json;
use std::fs::Permissions;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Limit of guest numbers. The addresses of all these guests fit into 10.0.0.0/16.
pub const MAX_GUESTS: u16 = 16_000;

/// A simulated guest, derived entirely from its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The guest's number, from 0.
    pub number: u16,
    /// MAC of its NIC.
    pub mac: Mac,
    /// IPv4 address behind the bridge, in 10.0.0.0/16.
    pub address: Ipv4Addr,
    /// `guest-<number>`.
    pub hostname: String,
    /// A UUID that ends in the number.
    pub instance_id: String,
    /// One public key line with the number in its comment.
    pub ssh_key: String,
    /// Cloud-config text that names the guest.
    pub user_data: String,
}

impl Identity {
    /// The guest with this number.
    ///
    /// # Panics
    /// Panics if the number is not below [`MAX_GUESTS`].
    #[must_use]
    pub fn of(number: u16) -> Self {
        assert!(number < MAX_GUESTS, "the lab has room for {MAX_GUESTS} guests, not for number {number}");
        let [high, low] = number.to_be_bytes();
        // From 10.0.16.0 upwards. The last byte is the number's low byte, so that packet dumps are easy to read.
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 16, 0).to_bits() + u32::from(number));
        let hostname = format!("guest-{number}");
        Self {
            number,
            mac: Mac([0x52, 0x54, 0x00, 0x69, high, low]),
            address,
            instance_id: format!("7c0f1a52-3b5e-4d1a-9d2c-{number:012x}"),
            ssh_key: format!("ssh-ed25519 {} {hostname}@lab", fake_key(number)),
            user_data: format!("#cloud-config\nhostname: {hostname}\n"),
            hostname,
        }
    }

    /// The same guest with unique user-data of exactly `len` bytes.
    #[must_use]
    pub fn with_user_data_of(mut self, len: usize) -> Self {
        let mut text = format!("#cloud-config\n# for {}\n", self.hostname);
        let mut rng = fastrand::Rng::with_seed(u64::from(self.number));
        while text.len() < len {
            // Each line has 64 bytes. Random characters reveal a lost or repeated segment.
            text.push(if text.len() % 64 == 63 { '\n' } else { rng.alphanumeric() });
        }
        text.truncate(len);
        self.user_data = text;
        self
    }

    /// The record, as YAML (JSON is YAML).
    #[must_use]
    pub fn record(&self, generation: u64) -> String {
        let record = json!({
            "schema": "vmrecord/1",
            "generation": generation,
            "vm": {
                "uuid": self.instance_id,
                "name": self.hostname,
                "project": {"id": "lab", "number": 1, "account": "000000000000"},
            },
            "hostname": {"short": self.hostname, "domain": crate::answers::DOMAIN},
            "placement": {"region": "local", "zone": "local-a"},
            "ssh_keys": [{"name": "default", "key": self.ssh_key}],
            "user_data": {"text": self.user_data},
            "network": {"nics": [{
                "id": "n0",
                "name": "eth0",
                "mac": self.mac.to_string(),
                "mtu": 1500,
                "network_id": "lab",
                "addresses": [{
                    "method": "static",
                    "address": format!("{}/16", self.address),
                    "gateway": crate::host::ADDRESS.to_string(),
                }],
            }]},
        });
        format!("{record:#}\n")
    }

    /// The path of this guest's record in `directory`.
    #[must_use]
    pub fn path(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}.yaml", self.hostname))
    }

    /// Writes the record into `directory` atomically: writes another file and renames it.
    ///
    /// # Errors
    /// Fails if the directory cannot be written to.
    pub fn write(&self, directory: &Path, generation: u64) -> Result<()> {
        replace(&self.path(directory), &self.record(generation))
    }
}

/// The mode of a record's file. Records contain secrets.
const RECORD_MODE: u32 = 0o640;

/// Replaces a file's content in one step, as an orchestrator should: readers see the old or the new content.
///
/// # Errors
/// Fails if the directory cannot be written to.
pub fn replace(path: &Path, content: &str) -> Result<()> {
    // A directory feed ignores names with a leading dot.
    let name = path.file_name().context("a record file has a name")?;
    let aside = path.with_file_name(format!(".{}.new", name.display()));
    let written = std::fs::write(&aside, content)
        .and_then(|()| std::fs::set_permissions(&aside, Permissions::from_mode(RECORD_MODE)));
    written.with_context(|| format!("cannot write {}", aside.display()))?;
    std::fs::rename(&aside, path).with_context(|| format!("cannot put {} in place", path.display()))
}

/// 68 characters that parse as an ed25519 public key: the fixed head (two lengths and the key type, RFC 8709 §4), then
/// the number repeated.
fn fake_key(number: u16) -> String {
    let digits: String = format!("{number:05}").chars().cycle().take(42).collect();
    format!("AAAAC3NzaC1lZDI1NTE5AAAAIA{digits}")
}

#[cfg(test)]
mod tests {
    use super::{Identity, MAX_GUESTS};
    use std::collections::HashSet;

    #[test]
    fn no_two_guests_share_anything() {
        let all: Vec<_> = (0..MAX_GUESTS).map(Identity::of).collect();
        let distinct = |of: fn(&Identity) -> String| all.iter().map(of).collect::<HashSet<_>>().len();
        let count = usize::from(MAX_GUESTS);
        assert_eq!(distinct(|g| g.mac.to_string()), count);
        assert_eq!(distinct(|g| g.address.to_string()), count);
        assert_eq!(distinct(|g| g.instance_id.clone()), count);
        assert_eq!(distinct(|g| g.ssh_key.clone()), count);
        assert_eq!(distinct(|g| g.user_data.clone()), count);
    }

    #[test]
    fn user_data_has_the_length_asked_for() {
        for len in [64, 1_000, 65_536] {
            assert_eq!(Identity::of(7).with_user_data_of(len).user_data.len(), len);
        }
        assert_ne!(
            Identity::of(7).with_user_data_of(4_096).user_data[64..],
            Identity::of(8).with_user_data_of(4_096).user_data[64..]
        );
    }
}
