//! Values derived from the record, for dialects that prescribe the form of their ids.
//!
//! Each is a pure function of the record, so a VM keeps its ids when it moves to another node.

use sha2::{Digest as _, Sha256};

use metadata_base::hex::hex;

use super::values::is_uuid;
use super::vm::Iam;
use super::{Nic, Record};

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

    /// Returns a UUID that no other VM has, for documents that others verify: the owner if that is a UUID, or else one of
    /// version 8 (RFC 9562 §5.8) made of a hash of it. The UUID of the firmware may be a tenant's choice.
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
