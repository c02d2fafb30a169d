//! Directories of pins, records, state and sockets.

use super::super::{Check, Directory, Facts, FileSystem, Pins, Records};
use super::count;

/// Free space, in octets, below which the check fails.
const LITTLE: u64 = 1 << 20;
/// Free space, in octets, below which the check warns.
const SOME: u64 = 64 << 20;
/// Permissions that give others access to a directory of secrets.
const TO_OTHERS: u32 = 0o007;
/// Permissions that let every user add a record.
const OTHERS_WRITE: u32 = 0o002;
/// This agent's version of the layout of pins.
const LAYOUT: &str = "v1";
/// Maximum number of names printed of a list.
const TOLD: usize = 3;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = match &facts.pins {
        None => vec![Check::ok("pins", "nothing is pinned; taps pass all frames when the agent ends")],
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
            let found = format!("no directory of records; the feeds are {}", feeds.join(" and "));
            checks.push(Check::ok("records", found));
        }
        None => checks.push(Check::warn(
            "records",
            "no directory of records",
            "a directory, for the ports that records name",
            "Give --records DIR, or set `records:` in the configuration",
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
            Check::warn(name, format!("{shown}: {failure}"), "a bpffs", "Give the agent's user access")
        }
        Ok(FileSystem { at, bpf: false, .. }) => {
            let at = at.display();
            return vec![Check::fail(
                name,
                format!("{shown} would not be on a bpffs ({at} has another file system)"),
                "a bpffs",
                "Run `mount -t bpf bpf /sys/fs/bpf`; in a container mount the node's /sys/fs/bpf (HostToContainer); or pin nothing, \
                 with --no-pins or `pins: null`",
            )];
        }
        Ok(FileSystem { read_only: true, .. }) => Check::fail(
            name,
            format!("the bpffs of {shown} is mounted read-only"),
            "a writable bpffs",
            "Run `mount -o remount,rw` on it; in a container remove readOnly from its mount",
        ),
        Ok(FileSystem { at, .. }) => Check::ok(name, format!("{shown} is on the bpffs at {}", at.display())),
    };
    let mut checks = vec![mount];
    checks.extend(links(pins));
    let others: Vec<_> = pins.versions.iter().filter(|version| *version != LAYOUT).cloned().collect();
    if !others.is_empty() {
        checks.push(Check::warn(
            "pins.versions",
            format!("{shown} has {} of another version of the agent", others.join(", ")),
            format!("only {LAYOUT}"),
            "Run `xdp-imds release` of that version; this version does not use those pins",
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
            let found = format!("cannot read the pinned links: {failure}");
            return Some(Check::warn(
                name,
                found,
                "links that can be read",
                "Run doctor as the agent's user",
            ));
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
        "each link on a device",
        "The next start removes links without a device; `xdp-imds release` removes all links",
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
            "Give the agent's user access, or CAP_DAC_READ_SEARCH",
        ),
        Ok(None) => Check::fail(
            name,
            format!("{shown} does not exist"),
            "a directory of records",
            "Create the directory, or name another one by --records DIR or `records:`",
        ),
        Ok(Some(found)) if found.mode & OTHERS_WRITE != 0 => Check::warn(
            name,
            format!("{shown} has mode {:04o}: every user can add a VM's record", found.mode),
            "0750 or less",
            format!("`chmod 0750 {shown}`"),
        ),
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
    }
}

/// Checks a directory that the agent creates and writes to.
fn written(directory: &Directory, uid: u32) -> Check {
    let (name, shown) = ("directory", directory.path.display());
    let system = match &directory.file_system {
        Ok(system) => system,
        Err(failure) => {
            return Check::warn(
                name,
                format!("{shown}: {failure}"),
                "a directory that can be read",
                "Give the agent's user access",
            );
        }
    };
    let at = system.at.display();
    match &directory.found {
        Err(failure) => Check::fail(
            name,
            format!("{shown}: {failure}"),
            "a directory to write to",
            "Give the agent's user access",
        ),
        _ if system.read_only => Check::fail(
            name,
            format!("{shown} is on a file system mounted read-only ({at})"),
            "a directory to write to",
            "Mount a writable file system (Kubernetes hostPath or emptyDir, systemd StateDirectory=)",
        ),
        Ok(Some(found)) if !found.directory => Check::fail(
            name,
            format!("{shown} is not a directory"),
            "a directory",
            "Move the file away, or name another directory",
        ),
        Ok(Some(found)) if found.owner != uid && uid != 0 => Check::fail(
            name,
            format!("{shown} belongs to user {}", found.owner),
            format!("this user, {uid}"),
            format!("`chown {uid} {shown}`"),
        ),
        _ if system.free < LITTLE => Check::fail(
            name,
            format!("{} KiB are free on {at}", system.free >> 10),
            "64 MiB",
            "Free space, because data that guests write would be lost",
        ),
        Ok(Some(found)) if found.mode & TO_OTHERS != 0 => Check::warn(
            name,
            format!(
                "{shown} has mode {:04o}: it holds secrets, or sockets that control the agent",
                found.mode
            ),
            "0700",
            format!("`chmod 0700 {shown}`"),
        ),
        Ok(Some(found)) if found.owner != uid => Check::warn(
            name,
            format!("{shown} belongs to user {}, who can change its content", found.owner),
            format!("user {uid}"),
            format!("`chown {uid} {shown}`"),
        ),
        _ if system.free < SOME => {
            let found = format!("{} MiB are free on {at}", system.free >> 20);
            Check::warn(name, found, "64 MiB", "Free space before the agent needs it")
        }
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
        Ok(None) => Check::ok(name, format!("{shown} will be created in {at}")),
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
        "only valid records",
        "Run `xdp-imds check DIR` for a list",
    )
}
