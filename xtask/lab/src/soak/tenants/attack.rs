//! The attacks, one in each row of [`ATTACKS`]. Each runs in a thread of its own from the first to the last minute, and
//! takes away all that it made.

use super::node::{LOOK, Node};
use super::{bulk, guests, proxmox, webhook};
use crate::soak::shared::Shared;
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// One attack.
pub(super) struct Attack {
    /// Its name, as for `--only`.
    pub(super) name: &'static str,
    /// What it does.
    pub(super) about: &'static str,
    /// Runs it until the ground says that it is over.
    pub(super) run: fn(&Ground<'_>) -> Result<()>,
}

macro_rules! attacks {
    ($($name:literal, $about:literal, $run:path;)+) => {
        &[$(Attack { name: $name, about: $about, run: $run },)+]
    };
}

/// All attacks.
pub(super) const ATTACKS: &[Attack] = attacks! {
    "equal-uuid", "a VM with the firmware UUID of another tenant's reads and overwrites its state", guests::equal_uuid;
    "equal-uuid-slow", "such a VM holds 140 slow connections in the account that it shares", guests::equal_uuid_slow;
    "yaml-bomb", "800 bytes of networkData with five nested anchors", bulk::yaml_bomb;
    "render-bomb", "anchors that pass as a record, and a guest that asks for CloudCIX", guests::render_bomb;
    "ssh-keys", "12 Secrets of 1 MiB of short lines in accessCredentials", bulk::ssh_keys;
    "patch-loop", "a patch every 1.5 s to a VMI with two such Secrets", bulk::patch_slowly;
    "patch-flood", "patches without a pause to a VMI with two such Secrets", bulk::patch_fast;
    "vmi-bytes", "22 VMIs of 1.4 MiB", bulk::vmi_bytes;
    "record-memory", "80 VMs with 1 MiB of user-data each", bulk::record_memory;
    "taps", "1,500 taps in the namespace of one pod", bulk::taps;
    "events", "60 VMIs that fail, each time for another reason", bulk::events;
    "refused", "thousands of VMIs whose records are refused", bulk::refused;
    "webhook", "300 idle TLS connections to the webhook", webhook::idle;
    "slow-connections", "a guest with 140 connections that send a byte now and then", guests::slow_connections;
    "attributes", "two guests that write attributes as fast as they can", guests::attributes;
    "proxmox-uuid", "two VMs of Proxmox VE with one smbios1 UUID", proxmox::equal_uuid;
    "proxmox-bomb", "a description of 823 bytes with the same anchors", proxmox::bomb;
};

/// Returns the attacks of these names, or all.
pub(super) fn chosen(names: &[String]) -> Result<Vec<&'static Attack>, String> {
    let find = |name: &String| {
        let found = ATTACKS.iter().find(|attack| attack.name == *name);
        found.ok_or_else(|| {
            let known: Vec<_> = ATTACKS.iter().map(|attack| attack.name).collect();
            format!("no attack is called `{name}`; choose from {}", known.join(", "))
        })
    };
    match names {
        [] => Ok(ATTACKS.iter().collect()),
        names => names.iter().map(find).collect(),
    }
}

/// The common start of all attacks, so that what the lab prepares slows nobody down while the modest tenant is measured.
#[derive(Debug, Default)]
pub(super) struct Start {
    ready: AtomicUsize,
    begun: AtomicBool,
}

impl Start {
    /// Number of attacks that wait for the start, or have failed.
    pub(super) fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Lets all attacks begin.
    pub(super) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }
}

/// What one attack has to do with.
pub(super) struct Ground<'a> {
    pub(super) node: &'a Node,
    start: &'a Start,
    /// True once this attack has waited for the start.
    waited: AtomicBool,
    /// Over once the attacks must end.
    pub(super) attacks: &'a Shared,
    /// Number of harmful acts so far.
    pub(super) acts: AtomicU64,
    /// Length of the attacks.
    pub(super) length: Duration,
}

impl<'a> Ground<'a> {
    pub(super) fn new(node: &'a Node, start: &'a Start, attacks: &'a Shared, length: Duration) -> Self {
        Self { node, start, waited: AtomicBool::new(false), attacks, acts: AtomicU64::new(0), length }
    }

    /// Runs an attack. One that fails before it is ready delays no other.
    pub(super) fn run(&self, attack: &Attack) -> Result<()> {
        let result = (attack.run)(self);
        if !self.waited.load(Ordering::Relaxed) {
            self.start.ready.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Called by each attack when all is prepared: the first time, waits until the others are ready, too.
    pub(super) fn wait_for_start(&self) {
        if self.waited.swap(true, Ordering::Relaxed) {
            return;
        }
        self.start.ready.fetch_add(1, Ordering::Relaxed);
        while !self.start.begun.load(Ordering::Relaxed) && !self.is_over() {
            std::thread::sleep(LOOK);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.attacks.is_over()
    }

    pub(super) fn sleep(&self, long: Duration) {
        self.attacks.sleep(long);
    }

    pub(super) fn act(&self) {
        self.acts.fetch_add(1, Ordering::Relaxed);
    }

    /// Time that an attack holds what it made before it begins again: several times in each run.
    pub(super) fn hold(&self) -> Duration {
        (self.length / 4).clamp(Duration::from_secs(10), Duration::from_secs(120))
    }
}

/// The count of one attack in the report.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Tally {
    pub(super) attack: &'static str,
    pub(super) about: &'static str,
    pub(super) acts: u64,
}

#[cfg(test)]
mod tests {
    use super::{ATTACKS, chosen};

    #[test]
    fn the_book_lists_every_attack_with_the_same_words() {
        let page = include_str!("../../../../../docs/src/contribute/tenants.md");
        for attack in ATTACKS {
            let row = format!("| `{}` | {} |\n", attack.name, attack.about);
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn attacks_have_different_names_and_unknown_names_are_refused() {
        let mut names: Vec<_> = ATTACKS.iter().map(|attack| attack.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ATTACKS.len());
        assert_eq!(chosen(&[]).map(|all| all.len()), Ok(ATTACKS.len()));
        assert_eq!(chosen(&["taps".to_owned()]).map(|some| some.len()), Ok(1));
        assert!(chosen(&["tap".to_owned()]).is_err_and(|error| error.contains("taps, events")));
    }
}
