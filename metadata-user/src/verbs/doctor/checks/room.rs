//! Directories: the place for pins, and those of records, state and sockets.

use super::super::{Check, Directory, Facts, FileSystem, Pins, Records};
use super::count;

/// Octets below which a directory that is written to fails.
const LITTLE: u64 = 1 << 20;
/// Octets below which it is warned of.
const SOME: u64 = 64 << 20;
/// Permissions of a directory of secrets that let others in.
const TO_OTHERS: u32 = 0o007;
/// Permissions that let anybody put a record there.
const OTHERS_WRITE: u32 = 0o002;
/// The layout of pins this agent knows.
const LAYOUT: &str = "v1";
/// Names told of a list, at most.
const TOLD: usize = 3;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = match &facts.pins {
        None => vec![Check::ok(
            "pins",
            "nothing is pinned: when the agent ends, taps are as if there never was one",
        )],
        Some(pins) => pinned(pins),
    };
    let uid = facts.process.uid;
    checks.extend(facts.directories.iter().map(|(what, directory)| match *what {
        "records" => records_directory(directory).of("records"),
        what => written(directory, uid).of(what),
    }));
    let feeds = &facts.wanted.feeds;
    match &facts.records {
        None if !feeds.is_empty() => {
            let found = format!("no directory of records: VMs come by {}", feeds.join(" and "));
            checks.push(Check::ok("records", found));
        }
        None => checks.push(Check::warn(
            "records",
            "no directory of records",
            "one, for the ports they name",
            "Give --records DIR or `records:` in the configuration",
        )),
        Some(records) => checks.push(self::records(records)),
    }
    checks
}

fn pinned(pins: &Pins) -> Vec<Check> {
    let shown = pins.path.display();
    let name = "pins.bpffs";
    let mount = match &pins.file_system {
        Err(failure) => {
            Check::warn(name, format!("{shown}: {failure}"), "a bpffs", "Let the agent's user look there")
        }
        Ok(FileSystem { at, bpf: false, .. }) => {
            let at = at.display();
            return vec![Check::fail(
                name,
                format!("no bpffs is mounted where {shown} would be ({at} is something else)"),
                "a bpffs",
                "`mount -t bpf bpf /sys/fs/bpf`; in a container mount the node's /sys/fs/bpf (HostToContainer); or turn \
                 pins off with --no-pins or `pins: null`",
            )];
        }
        Ok(FileSystem { read_only: true, .. }) => Check::fail(
            name,
            format!("the bpffs of {shown} is mounted read-only"),
            "a bpffs that can be written",
            "`mount -o remount,rw` it; in a container take readOnly off its mount",
        ),
        Ok(FileSystem { at, .. }) => Check::ok(name, format!("{shown} is on the bpffs at {}", at.display())),
    };
    let mut checks = vec![mount];
    checks.extend(links(pins));
    let others: Vec<_> = pins.versions.iter().filter(|version| *version != LAYOUT).cloned().collect();
    if !others.is_empty() {
        checks.push(Check::warn(
            "pins.versions",
            format!("{shown} has {}, of another version of the agent", others.join(", ")),
            format!("{LAYOUT} alone"),
            "Let that version's `xdp-imds release` take them off; this one leaves them alone",
        ));
    }
    checks
}

fn links(pins: &Pins) -> Option<Check> {
    let name = "pins.links";
    let links = match &pins.links {
        Ok(links) if links.is_empty() => return None,
        Ok(links) => links,
        Err(failure) => {
            let found = format!("cannot look at pinned links: {failure}");
            return Some(Check::warn(name, found, "to read them", "Run this as the agent's user"));
        }
    };
    let gone: Vec<_> =
        links.iter().filter(|link| link.ifindex == Some(0)).map(|link| link.name.as_str()).collect();
    if gone.is_empty() {
        return Some(Check::ok(name, format!("{} pinned, each on its device", count(links.len(), "link"))));
    }
    Some(Check::warn(
        name,
        format!("{} pinned, {} without a device: {}", count(links.len(), "link"), gone.len(), some(&gone)),
        "links of devices that are there",
        "The next start sweeps them; `xdp-imds release` takes all off",
    ))
}

/// The first few of a list.
fn some(names: &[&str]) -> String {
    let shown = names.iter().take(TOLD).copied().collect::<Vec<_>>().join(", ");
    if names.len() > TOLD { format!("{shown}, …") } else { shown }
}

fn records_directory(directory: &Directory) -> Check {
    let (name, shown) = ("directory", directory.path.display());
    match &directory.found {
        Err(failure) => Check::fail(
            name,
            format!("{shown}: {failure}"),
            "records that can be read",
            "Let the agent's user in, or give it CAP_DAC_READ_SEARCH",
        ),
        Ok(None) => Check::fail(
            name,
            format!("{shown} is not there"),
            "a directory of records",
            "Make it, or name another with --records DIR or `records:`",
        ),
        Ok(Some(found)) if found.mode & OTHERS_WRITE != 0 => Check::warn(
            name,
            format!("{shown} has mode {:04o}: anybody can put a VM's record there", found.mode),
            "0750 or less",
            format!("`chmod 0750 {shown}`"),
        ),
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
    }
}

/// A directory the agent makes and writes to.
fn written(directory: &Directory, uid: u32) -> Check {
    let (name, shown) = ("directory", directory.path.display());
    let system = match &directory.file_system {
        Ok(system) => system,
        Err(failure) => {
            return Check::warn(
                name,
                format!("{shown}: {failure}"),
                "to look there",
                "Let the agent's user in",
            );
        }
    };
    let at = system.at.display();
    match &directory.found {
        Err(failure) => Check::fail(
            name,
            format!("{shown}: {failure}"),
            "a directory to write to",
            "Let the agent's user in",
        ),
        _ if system.read_only => Check::fail(
            name,
            format!("{shown} is on a file system mounted read-only ({at})"),
            "a directory to write to",
            "Mount something there that can be written (Kubernetes hostPath or emptyDir, systemd StateDirectory=)",
        ),
        Ok(Some(found)) if !found.directory => Check::fail(
            name,
            format!("{shown} is no directory"),
            "a directory of the agent's own",
            "Move it away, or name another directory",
        ),
        Ok(Some(found)) if found.owner != uid && uid != 0 => Check::fail(
            name,
            format!("{shown} belongs to user {}", found.owner),
            format!("user {uid}, who this is"),
            format!("`chown {uid} {shown}`"),
        ),
        _ if system.free < LITTLE => Check::fail(
            name,
            format!("{} KiB are free on {at}", system.free >> 10),
            "64 MiB",
            "Make room: what guests write would be lost",
        ),
        Ok(Some(found)) if found.mode & TO_OTHERS != 0 => Check::warn(
            name,
            format!(
                "{shown} has mode {:04o}: it holds secrets or lets its opener command the agent",
                found.mode
            ),
            "0700",
            format!("`chmod 0700 {shown}`"),
        ),
        Ok(Some(found)) if found.owner != uid => Check::warn(
            name,
            format!("{shown} belongs to user {}, who can do with it as they like", found.owner),
            format!("user {uid}"),
            format!("`chown {uid} {shown}`"),
        ),
        _ if system.free < SOME => {
            let found = format!("{} MiB are free on {at}", system.free >> 20);
            Check::warn(name, found, "64 MiB", "Make room before it is needed")
        }
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
        Ok(None) => Check::ok(name, format!("{shown} will be made in {at}")),
    }
}

fn records(records: &Records) -> Check {
    let name = "records";
    if records.refused_count == 0 {
        return Check::ok(name, format!("{} can be served", count(records.count, "record")));
    }
    let (first, reason) = records.refused.first().map_or(("", ""), |(name, reason)| (name, reason));
    Check::warn(
        name,
        format!(
            "{} of {} cannot be served; {first}: {reason}",
            records.refused_count,
            count(records.count, "record")
        ),
        "all of them",
        "`xdp-imds check DIR` lists every one",
    )
}
