//! Attacks by the configurations of VMs of Proxmox VE, which who may edit a VM's options writes.

use super::attack::Ground;
use super::guests::Duel;
use super::yaml;
use anyhow::Result;
use std::sync::Arc;
use std::time::Duration;
use support::guest::{Guest, Spec};
use support::host;
use support::netns::Namespace;
use support::record::Identity;
use support::tap::{Shape, Tap};

const VICTIM: u32 = 9_001;
const ATTACKER: u32 = 9_002;
const BOMBER: u32 = 9_003;

/// The configuration of a VM with one NIC.
fn conf(vmid: u32, identity: &Identity, uuid: &str, description: &str) -> String {
    format!(
        "{description}ciuser: alice\nipconfig0: ip={}/16,gw={}\nname: vm-{vmid}\nnet0: virtio={},bridge=vmbr0\n\
         ostype: l26\nsmbios1: uuid={uuid}\n",
        identity.address,
        host::ADDRESS,
        identity.mac.to_string().to_uppercase()
    )
}

/// Boots a guest on the tap that Proxmox VE makes for the first NIC of a VM.
fn guest(ground: &Ground<'_>, vmid: u32, identity: &Identity) -> Result<Guest> {
    let ns = ground.node.host.ns();
    let tap = Tap::create(ns, &format!("tap{vmid}i0"), Shape::virtio())?;
    ns.ip(&format!("link set {} master {} up", tap.name(), host::BRIDGE))?;
    let spec = Spec { shape: Shape::virtio(), ..Spec::of(identity) };
    Guest::boot_on(Arc::new(tap), Namespace::new("guest")?, &spec)
}

pub(super) fn equal_uuid(ground: &Ground<'_>) -> Result<()> {
    let [victim, attacker] = [(); 2].map(|()| ground.node.identity());
    let guests = (guest(ground, VICTIM, &victim)?, guest(ground, ATTACKER, &attacker)?);
    ground.node.write_conf(VICTIM, &conf(VICTIM, &victim, &victim.instance_id, ""))?;
    ground.node.write_conf(ATTACKER, &conf(ATTACKER, &attacker, &victim.instance_id, ""))?;
    let duel = Duel {
        what: "two VMs of Proxmox VE with one smbios1 UUID",
        victim: guests.0.ns(),
        attacker: guests.1.ns(),
    };
    let fought = duel.fight(ground);
    [VICTIM, ATTACKER].into_iter().for_each(|vmid| ground.node.remove_conf(vmid));
    fought
}

pub(super) fn bomb(ground: &Ground<'_>) -> Result<()> {
    let identity = ground.node.identity();
    ground.wait_for_start();
    for turn in 0_u64.. {
        if ground.is_over() {
            break;
        }
        let members = yaml::anchors(yaml::LARGE).join(", ");
        let block = format!("```imds\nmetadata: {{n{turn}: x, {members}}}\n```");
        let description: String =
            block.lines().map(|line| format!("#{}\n", line.replace(':', "%3A"))).collect();
        ground.node.write_conf(BOMBER, &conf(BOMBER, &identity, &identity.instance_id, &description))?;
        ground.act();
        ground.sleep(Duration::from_secs(5));
    }
    ground.node.remove_conf(BOMBER);
    Ok(())
}
