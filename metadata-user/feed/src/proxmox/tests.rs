//! Configurations in, records out; and the feed over a directory.

mod documents;
mod files;
mod records;

use super::{ProxmoxOptions, ProxmoxProblem, ProxmoxTranslation, TranslationInput, VmConfig, translate};
use metadata_content::record::RecordLimits;

/// The VM of Proxmox VE's administration guide ("Deploying Cloud-Init Templates"): clone 123 of template 9000, with a
/// key and an address.
const GUIDE: &str = "\
boot: order=scsi0
ide2: local-lvm:vm-123-cloudinit,media=cdrom
ipconfig0: ip=10.0.10.123/24,gw=10.0.10.1
memory: 2048
meta: creation-qemu=9.0.2,ctime=1725975013
name: ubuntu2
net0: virtio=BC:24:11:2C:69:EC,bridge=vmbr0
ostype: l26
scsi0: local-lvm:vm-123-disk-0,size=2252M
scsihw: virtio-scsi-pci
serial0: socket
smbios1: uuid=b3247ab1-1fe6-428e-965b-08a1b64a8746
sshkeys: ssh-ed25519%20AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k%20alice%40example%0A
vga: serial0
vmgenid: 7079e97c-50e3-4079-afe7-23e67566b946
";

/// The node's resolvers in these tests.
const RESOLV_CONF: &str = "search example.internal\nnameserver 192.0.2.53\n";

fn given() -> TranslationInput {
    TranslationInput {
        host: super::drive::Dns::of_host(RESOLV_CONF),
        generation: 1,
        ..TranslationInput::default()
    }
}

fn parsed(text: &str) -> VmConfig {
    VmConfig::parse(text.as_bytes()).expect("a configuration").0
}

/// The record of VM 123.
fn made(text: &str, given: &TranslationInput) -> Result<ProxmoxTranslation, ProxmoxProblem> {
    let (config, dropped) = VmConfig::parse(text.as_bytes())?;
    let mut made = translate(123, &config, given, &ProxmoxOptions::default(), &RecordLimits::DEFAULT)?;
    made.problems.splice(..0, dropped);
    Ok(made)
}
