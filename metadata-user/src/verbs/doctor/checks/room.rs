//! Checks the directories of pins, records, state and sockets.

use super::super::{Check, CheckStatus, Directory, ExposedFile, Facts, FileSystem, PinFacts, RecordFacts};
use super::count;
use crate::agent::preflight::RecordConflicts;
use crate::config::Config;
use metadata_common::run::{UNIT_HIDES, UNIT_WRITES, is_home};
use metadata_feed::state::token_file;
use metadata_steer::{PINS_VERSION, is_pins_version};

/// Free space, in bytes, below which the check fails.
const LITTLE: u64 = 1 << 20;
/// Free space, in bytes, below which the check warns.
const SOME: u64 = 64 << 20;
/// The mode bits that let anybody but the owner add and remove files.
const FOR_OTHERS: u32 = 0o022;
/// The mode bit that lets every user add a file to a directory.
const OTHERS_WRITE: u32 = 0o002;
/// Maximum number of names that one check lists.
const TOLD: usize = 3;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = match &facts.pins {
        None => {
            vec![Check::ok("pins", "the agent pins nothing, so taps pass all frames after the agent ends")]
        }
        Some(pins) => pinned(pins, facts),
    };
    let uid = facts.user();
    checks.extend(facts.directories.iter().map(|(what, directory)| match *what {
        "records" => records_directory(directory, uid).of("records"),
        "state" if facts.node.agent.is_some() && directory.found == Ok(None) => {
            removed(directory).of("state")
        }
        what => written(what, directory, uid).of(what),
    }));
    let feeds = &facts.wanted.feeds;
    checks.extend(token_key(facts));
    checks.extend(conflicts(facts));
    checks.extend(facts.records.iter().flat_map(same_vm));
    checks.extend(facts.records.iter().flat_map(files));
    match &facts.records {
        None if !feeds.is_empty() => {
            let found =
                format!("no directory of records is configured; records come from {}", feeds.join(" and "));
            checks.push(Check::ok("records", found));
        }
        None => checks.push(Check::warn(
            "records",
            "no directory of records is configured",
            "a directory of records (descriptions of VMs and their ports)",
            "Use --records DIR, or set `records:` in the configuration",
        )),
        Some(records) => checks.push(self::records(records)),
    }
    checks.extend(facts.exposed.iter().map(exposed));
    checks.extend(facts.config_file.as_ref().and_then(|file| config_file(file, uid)));
    checks
}

/// What the configuration names in a place that the packages' unit hides from the agent.
pub(in super::super) fn hidden(config: &Config) -> Vec<Check> {
    let named = [
        ("records", config.records.as_deref()),
        ("state", config.state.as_deref()),
        ("run", Some(&*config.run)),
        ("audit", config.audit.to.as_deref()),
        ("token_key", config.token_key.as_deref()),
        ("identity", config.identity.as_ref().map(|identity| &*identity.keys)),
    ];
    let hidden =
        named.into_iter().filter_map(|(what, path)| Some((what, path.filter(|path| is_home(path))?)));
    hidden
        .map(|(what, path)| {
            Check::warn(
                "unit.home",
                format!("{} is in a place that the package's unit hides from the agent", path.display()),
                "a path outside /root, /home and /run/user",
                UNIT_HIDES,
            )
            .of(what)
        })
        .collect()
}

/// Checks who can change the configuration. It holds no secret: those are in files that it names.
fn config_file(file: &Directory, uid: u32) -> Option<Check> {
    let (name, shown) = ("configuration.mode", file.path.display());
    // The first check says why a file cannot be read.
    let found = file.found.as_ref().ok()?.as_ref()?;
    Some(if found.mode & FOR_OTHERS != 0 {
        Check::warn(
            name,
            format!("{shown} has mode {:04o}, which lets others change what the agent does", found.mode),
            "mode 0644 or stricter",
            format!("Run `chmod go-w {shown}`"),
        )
    } else if found.owner != 0 && found.owner != uid {
        Check::warn(
            name,
            format!("{shown} belongs to user {}, who can change what the agent does", found.owner),
            format!("root or the agent's user, {uid}"),
            format!("Run `chown {uid} {shown}`"),
        )
    } else {
        Check::ok(name, format!("{shown}, mode {:04o}", found.mode))
    })
}

/// Files with parts of records that others may read.
fn exposed(exposed: &ExposedFile) -> Check {
    let ExposedFile { directory, files, count } = exposed;
    let named: Vec<_> = files.iter().map(|(name, mode)| format!("{name} (mode {mode:04o})")).collect();
    let more = if *count > files.len() { ", …" } else { "" };
    let check = Check::warn(
        "records.parts",
        format!(
            "{} that others may read or change: {}{more}",
            super::count(*count, "file"),
            named.join(", ")
        ),
        "mode 0640 or stricter, because parts of records hold passwords and keys",
        format!("Run `find {} -maxdepth 1 -type f -perm /027 -exec chmod 0640 {{}} +`", directory.display()),
    );
    check.of(directory.display())
}

/// Checks the file of token keys that the nodes share. Only the running agent knows whether it uses keys of a file that
/// has gone.
fn token_key(facts: &Facts) -> Option<Check> {
    let path = facts.wanted.missing_token_key.as_ref()?;
    let is_gone = facts.node.missing_token_key.as_ref() == Some(path);
    Some(Check::warn(
        "token_key",
        token_file::missing(path, is_gone),
        "the file of token keys that all nodes have",
        "Correct `token_key`, or put the file there (`xdp-imds token-key` makes one for all nodes); the agent takes it within a minute",
    ))
}

/// Checks that no two records are for one MAC on one port: those of the directory, and those of all sources that the
/// running agent reports. Each NIC is reported once. If both know it, the agent says who has it, perhaps a record of
/// another source.
fn conflicts(facts: &Facts) -> Vec<Check> {
    fn is_same(one: &str, other: &str) -> bool {
        RecordConflicts::subject(one) == RecordConflicts::subject(other)
    }
    let of_agent = &facts.node.conflicts;
    let of_directory: Vec<&String> = facts.records.iter().flat_map(|records| &records.conflicts).collect();
    let listed =
        of_directory.iter().copied().map(|own| of_agent.iter().find(|one| is_same(one, own)).unwrap_or(own));
    let others = of_agent.iter().filter(|one| !of_directory.iter().any(|own| is_same(one, own)));
    listed.chain(others.take(TOLD)).map(|conflict| contested(conflict)).collect()
}

fn contested(conflict: &str) -> Check {
    Check::fail(
        "records.mac",
        conflict,
        "each MAC in one record on a port",
        "Correct one of the records; until then its VM gets no metadata",
    )
}

fn pinned(pins: &PinFacts, facts: &Facts) -> Vec<Check> {
    let shown = pins.path.display();
    let name = "pins.bpffs";
    let mount = match &pins.file_system {
        Err(failure) => Check::warn(
            name,
            format!("{shown}: {failure}"),
            "a bpffs",
            "Let the agent's user access this directory",
        ),
        Ok(FileSystem { at, bpf: false, .. }) => {
            let at = at.display();
            return vec![Check::fail(
                name,
                format!("{shown} is not on a bpffs: {at} has another file system"),
                "a bpffs",
                "Run `mount -t bpf bpf /sys/fs/bpf`. In a container, mount the node's /sys/fs/bpf (mountPropagation: \
                 HostToContainer). If the agent should pin nothing, use --no-pins or `pins: null`",
            )];
        }
        Ok(FileSystem { read_only: true, .. }) => Check::fail(
            name,
            format!("{shown} is on a bpffs that is mounted read-only"),
            "a writable bpffs",
            "Remount this bpffs with `mount -o remount,rw`. In a container, remove readOnly from the volume mount",
        ),
        Ok(FileSystem { at, .. }) if *at == pins.path => Check::ok(name, format!("{shown} is on a bpffs")),
        Ok(FileSystem { at, .. }) => {
            Check::ok(name, format!("the agent will create {shown} on the bpffs at {}", at.display()))
        }
    };
    let mut checks = vec![mount];
    checks.extend(owner(pins, facts));
    checks.extend(of_another(pins));
    checks.extend(links(pins));
    // Other names, such as the mark of a forced release, hold no pins.
    let is_other = |version: &&String| *version != PINS_VERSION && is_pins_version(version);
    let others: Vec<_> = pins.versions.iter().filter(is_other).cloned().collect();
    if !others.is_empty() {
        checks.push(Check::warn(
            "pins.versions",
            format!("{shown} contains pins of other versions of the agent: {}", others.join(", ")),
            format!("only pins of version {PINS_VERSION}"),
            "Run `xdp-imds release` with the version that made these pins, because this version does not use them",
        ));
    }
    checks
}

/// Checks the owner of the pins: an agent refuses those of another user.
fn owner(pins: &PinFacts, facts: &Facts) -> Option<Check> {
    let (user, shown) = (facts.user(), pins.path.display());
    let owner = pins.owner.filter(|owner| *owner != user)?;
    let (found, expected) = (format!("{shown} belongs to user {owner}"), format!("the agent's user, {user}"));
    let chown = format!("`chown -R {user}: {shown}`");
    let owned = |(_, directory): &(&str, Directory)| matches!(directory.found, Ok(Some(found)) if found.owner == owner);
    // While none runs, nothing says for certain as whom the agent will run.
    Some(if facts.node.agent.is_none() && facts.directories.iter().any(owned) {
        let remedy = format!(
            "If the agent runs as user {owner} (`User=` of its unit), no action is needed. Otherwise run {chown}"
        );
        Check::warn("pins.owner", found, expected, remedy)
    } else {
        let found = format!("{found}: an agent of user {user} does not start with it");
        Check::fail("pins.owner", found, expected, format!("Run {chown}, and start the agent again"))
    })
}

/// Checks for another agent with these pins, which a start refuses whatever the other's run directory and hub are.
fn of_another(pins: &PinFacts) -> Option<Check> {
    pins.are_of_another.then(|| {
        Check::fail(
            "pins.agent",
            format!(
                "another agent, with another run directory, runs with the pins in {}",
                pins.path.display()
            ),
            "pins that no other agent has",
            "Stop that agent, or give this one another --pins, --run and --hub",
        )
    })
}

fn links(pins: &PinFacts) -> Option<Check> {
    let name = "pins.links";
    let links = match &pins.links {
        Ok(links) if links.is_empty() => return None,
        Ok(links) => links,
        Err(failure) => {
            let found = format!("cannot read the pinned links: {failure}");
            return Some(Check::warn(name, found, "readable links", "Run doctor as the agent's user"));
        }
    };
    let gone: Vec<_> =
        links.iter().filter(|link| link.ifindex == Some(0)).map(|link| link.name.as_str()).collect();
    if gone.is_empty() {
        return Some(Check::ok(
            name,
            format!("{} pinned, each for a device that exists", count(links.len(), "link")),
        ));
    }
    Some(Check::warn(
        name,
        format!("{} pinned, {} without a device: {}", count(links.len(), "link"), gone.len(), some(&gone)),
        "a device for each link",
        "No action is needed, because the next start of the agent removes links without a device. `xdp-imds release` \
         removes all links",
    ))
}

/// Joins the first [`TOLD`] names. An ellipsis stands for the rest.
fn some(names: &[&str]) -> String {
    let shown = names.iter().take(TOLD).copied().collect::<Vec<_>>().join(", ");
    if names.len() > TOLD { format!("{shown}, …") } else { shown }
}

/// Checks the directory of records, which the agent only reads.
fn records_directory(directory: &Directory, uid: u32) -> Check {
    let (name, shown) = ("directory", directory.path.display());
    match &directory.found {
        Err(failure) => Check::fail(
            name,
            format!("{shown}: {failure}"),
            "a readable directory of records",
            "Let the agent's user read this directory, or give the agent CAP_DAC_READ_SEARCH",
        ),
        Ok(None) => Check::fail(
            name,
            format!("{shown} does not exist"),
            "a directory of records",
            "Create the directory, or name another one with --records DIR or `records:`",
        ),
        Ok(Some(found)) if !found.directory => Check::fail(
            name,
            format!("{shown} is not a directory"),
            "a directory of records",
            "Name the directory that the record is in with --records DIR or `records:`",
        ),
        Ok(Some(found)) if found.mode & OTHERS_WRITE != 0 => Check::warn(
            name,
            format!("{shown} has mode {:04o}, which lets every user add records", found.mode),
            "mode 0750 or stricter",
            format!("Run `chmod 0750 {shown}`"),
        ),
        Ok(Some(found)) if found.owner != 0 && found.owner != uid => Check::warn(
            name,
            format!("{shown} belongs to user {}, who can add records", found.owner),
            format!("root or the agent's user, {uid}"),
            format!("Run `chown {uid} {shown}`"),
        ),
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
    }
}

/// The state directory was removed while the agent runs, which creates it only at startup.
fn removed(directory: &Directory) -> Check {
    Check::warn(
        "directory",
        format!(
            "{} does not exist although an agent runs: registrations, \
             token keys and what guests wrote are only in its memory",
            directory.path.display()
        ),
        "the directory that the agent made",
        "Name the agent's directory with --config or --state, or put it back. Without it, register the VMs again \
         before the agent ends: what changes is rewritten",
    )
}

/// Checks a directory that the agent writes to. The agent creates the directory if it does not exist.
fn written(what: &str, directory: &Directory, uid: u32) -> Check {
    let (name, shown) = ("directory", directory.path.display());
    let system = match &directory.file_system {
        Ok(system) => system,
        Err(failure) => {
            return Check::warn(
                name,
                format!("{shown}: {failure}"),
                "an accessible directory",
                "Let the agent's user access this directory",
            );
        }
    };
    let at = system.at.display();
    match &directory.found {
        Err(failure) => Check::fail(
            name,
            format!("{shown}: {failure}"),
            "a writable directory",
            "Let the agent's user access this directory",
        ),
        _ if system.read_only => Check::fail(
            name,
            format!("{shown} is on a read-only file system ({at})"),
            "a writable directory",
            format!(
                "Mount a writable file system (Kubernetes hostPath or emptyDir, systemd StateDirectory=). {UNIT_WRITES}"
            ),
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
            format!("the agent's user, {uid}"),
            format!("Run `chown {uid} {shown}`"),
        ),
        _ if system.free < LITTLE => Check::fail(
            name,
            format!("{} KiB are free on {at}", system.free >> 10),
            "at least 64 MiB of free space",
            "Make space there. Without free space, the agent loses data that guests write",
        ),
        // What is in there has modes of its own, so that others may list it. kubelet makes such directories.
        Ok(Some(found)) if found.mode & FOR_OTHERS != 0 => Check {
            status: if what == "run" { CheckStatus::Fail } else { CheckStatus::Warn },
            ..Check::warn(
                name,
                format!(
                    "{shown} has mode {:04o}, which lets other users replace secrets or the agent's sockets",
                    found.mode
                ),
                "a directory that only its owner can write to",
                format!("Run `chmod 0700 {shown}`"),
            )
        },
        Ok(Some(found)) if found.owner != uid => Check::warn(
            name,
            format!("{shown} belongs to user {}, who can change its content", found.owner),
            format!("the agent's user, {uid}"),
            format!("Run `chown {uid} {shown}`"),
        ),
        _ if system.free < SOME => {
            let found = format!("{} MiB are free on {at}", system.free >> 20);
            Check::warn(
                name,
                found,
                "at least 64 MiB of free space",
                "Make space there before the agent needs it",
            )
        }
        Ok(Some(found)) => Check::ok(name, format!("{shown}, mode {:04o}", found.mode)),
        Ok(None) => Check::ok(name, format!("{shown} does not exist; the agent will create it below {at}")),
    }
}

/// Checks that no two records are for one VM.
fn same_vm(records: &RecordFacts) -> Vec<Check> {
    let owners = records.same_vm.iter().map(|(one, other, owner)| {
        Check::warn(
            "records.vm",
            format!("{one} and {other} are for one VM, {owner}"),
            "one record for each VM",
            "Correct `vm.uuid` or `vm.owner` in one of the records: records for one VM share passwords and what their guests \
             write",
        )
    });
    owners.collect()
}

/// Checks the credentials that records name, and who may read the files.
fn files(records: &RecordFacts) -> Vec<Check> {
    let lacking = records.lacking.iter().map(|reason| {
        Check::warn(
            "records.credentials",
            reason.clone(),
            "a credential that can be read",
            "Write the file again; the agent reads it again when it changes",
        )
    });
    let open = records.open_files.iter().map(|(path, mode)| {
        Check::warn(
            "records.mode",
            format!("{} has mode {mode:04o}, and records hold secrets", path.display()),
            "mode 0640 or stricter",
            format!("Run `chmod 0640 {}`", path.display()),
        )
    });
    lacking.chain(open).collect()
}

fn records(records: &RecordFacts) -> Check {
    let name = "records";
    if records.refused_count == 0 {
        return Check::ok(name, format!("{} can be served", count(records.count, "record")));
    }
    let (first, reason) = records.refused.first().map_or(("", ""), |(name, reason)| (name, reason));
    let found = match (records.refused_count, records.count) {
        (1, 1) => format!("the only record cannot be served: {first}: {reason}"),
        (1, all) => format!("one of {all} records cannot be served: {first}: {reason}"),
        (some, all) => format!("{some} of {all} records cannot be served; the first is {first}: {reason}"),
    };
    Check::warn(name, found, "only valid records", "Run `xdp-imds check DIR` to list all errors")
}
