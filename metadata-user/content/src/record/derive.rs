//! Values that follow from others, for dialects whose ids have a shape of their own.
//!
//! All are stable functions of the record, so that a VM keeps its ids when it moves to another node.

use sha2::{Digest as _, Sha256};

use super::vm::Iam;
use super::{Nic, Record};

/// The first 17 hex digits of SHA-256 of `prefix` and `value`.
fn h17(prefix: &str, value: &str) -> String {
    use std::fmt::Write as _;
    let digest = digest(prefix, value);
    let mut hex = String::with_capacity(18);
    for octet in &digest[..9] {
        write!(hex, "{octet:02x}").expect("writing to a String cannot fail");
    }
    hex.truncate(17);
    hex
}

fn digest(prefix: &str, value: &str) -> [u8; 32] {
    Sha256::new().chain_update(prefix).chain_update(value).finalize().into()
}

impl Record {
    /// `vm.instance_id`, or the UUID.
    #[must_use]
    pub fn instance_id(&self) -> &str {
        self.vm.instance_id.as_ref().map_or(self.vm.uuid.as_str(), |id| id.as_str())
    }

    /// `vm.ec2_id`, or one made from the UUID.
    #[must_use]
    pub fn ec2_id(&self) -> String {
        let derived = || format!("i-{}", h17("ec2:", self.vm.uuid.as_str()));
        self.vm.ec2_id.as_ref().map_or_else(derived, ToString::to_string)
    }

    /// `vm.numeric_id`, or the top 52 bits of a hash of the UUID, never 0.
    #[must_use]
    pub fn numeric_id(&self) -> u64 {
        let derived = || {
            let [a, b, c, d, e, f, g, h, ..] = digest("num:", self.vm.uuid.as_str());
            (u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 12).max(1)
        };
        self.vm.numeric_id.map_or_else(derived, |id| id.get())
    }

    /// EC2 reservation id.
    #[must_use]
    pub fn reservation_id(&self) -> String {
        format!("r-{}", self.ec2_id().trim_start_matches("i-"))
    }

    /// EC2 image id; `None` without an image.
    #[must_use]
    pub fn ami_id(&self) -> Option<String> {
        let id = self.image.as_ref()?.id.as_str();
        Some(if id.starts_with("ami-") { id.to_owned() } else { format!("ami-{}", h17("ami:", id)) })
    }

    /// EC2 VPC id, from the project.
    #[must_use]
    pub fn vpc_id(&self) -> String {
        format!("vpc-{}", h17("vpc:", self.vm.project.id.as_str()))
    }

    /// EC2 instance profile id of a role, from the project.
    #[must_use]
    pub fn instance_profile_id(&self, iam: &Iam) -> String {
        let owner = format!("iam:{}:", self.vm.project.id);
        format!("AIPA{}", h17(&owner, iam.role.as_str()).to_ascii_uppercase())
    }

    /// Oracle instance id.
    #[must_use]
    pub fn ocid(&self) -> String {
        format!("ocid1.instance.oc1..{}", self.vm.uuid)
    }

    /// Vultr region code.
    #[must_use]
    pub fn region_code(&self) -> String {
        self.placement.region.as_str().to_uppercase().chars().take(3).collect()
    }

    /// GCE zone.
    #[must_use]
    pub fn gce_zone(&self) -> String {
        format!("projects/{}/zones/{}", self.vm.project.number, self.placement.zone)
    }

    /// GCE region.
    #[must_use]
    pub fn gce_region(&self) -> String {
        format!("projects/{}/regions/{}", self.vm.project.number, self.placement.region)
    }

    /// GCE machine type.
    #[must_use]
    pub fn gce_machine_type(&self) -> String {
        format!("projects/{}/machineTypes/{}", self.vm.project.number, self.instance_type())
    }
}

impl Nic {
    /// EC2 interface id; `None` without a MAC.
    #[must_use]
    pub fn eni_id(&self) -> Option<String> {
        self.mac.map(|mac| format!("eni-{}", h17("eni:", &mac.to_string())))
    }

    /// EC2 subnet id; `None` without a network id.
    #[must_use]
    pub fn subnet_id(&self) -> Option<String> {
        self.network_id.as_ref().map(|id| format!("subnet-{}", h17("subnet:", id.as_str())))
    }
}
