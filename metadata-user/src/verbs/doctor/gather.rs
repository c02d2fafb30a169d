//! Collects the facts about the node, the configuration and this process.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf, absolute};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metadata_common::port::PortName;
use metadata_content::source::RecordSource;
use metadata_control::order::natural;
use metadata_control::status::{self, AgentStatus, ClientError, PortState, PortStatus};
use metadata_feed::libvirt::{self, HOOK, HOOKS};
use metadata_feed::record_part::open_mode;
use metadata_feed::registry::RecordId;
use metadata_feed::state::token_file;
use metadata_feed::{FeedError, directory};
use metadata_signer::documents::OwnCertificate;
use metadata_signer::{KeyDirectory, Rotation};
use metadata_steer::probe::{self, ProbeError, device, pinned_links, search};
use metadata_steer::{ClosedTaps, PINS_VERSION, SteerConfig};
use rustix::fs::{StatVfsMountFlags, statfs, statvfs};
use rustix::process::{Resource, geteuid, getrlimit};

use super::facts::{
    AgentSilence, Capabilities, ConfigFacts, Directory, ExposedFile, Facts, FileSystem, IdentityKeyFacts,
    IssuerFacts, Kernel, NodeFacts, OtherRecords, PathFacts, PinFacts, PortFacts, ProcessFacts, RecordFacts,
    Resources,
};
use crate::agent::locked_memory;
use crate::agent::preflight::RecordConflicts;
use crate::config::{Config, IdentityConfig};

/// Collects all facts for a configuration and its file.
/// `process` was collected first, because the rehearsal raises the soft limit on open files.
pub(super) fn facts(config: &Config, file: Option<&Path>, process: ProcessFacts) -> Facts {
    let (records, mut ports) = named_ports(config);
    let (node, served) = node(config);
    ports.extend(served);
    Facts {
        wanted: wanted(config),
        process,
        pins: config.pins.as_deref().map(|path| pins(path, node.agent.is_some())),
        directories: directories(config),
        config_file: file.map(directory),
        records,
        node,
        ports: look_at(ports),
        sources: config.sources().iter().flat_map(|source| source.preflight()).collect(),
        exposed: exposed(config),
        identity: config.identity.as_ref().map(identity),
        kernel: kernel(config),
    }
}

fn wanted(config: &Config) -> ConfigFacts {
    ConfigFacts {
        steer: config.steer,
        hub: config.hub.clone(),
        workers: config.workers,
        locked_memory: locked_memory(config.workers),
        feeds: config.platforms(),
        guards_all: config.guard == ClosedTaps::All,
        missing_token_key: config
            .token_key
            .clone()
            .filter(|path| matches!(token_file::given(path), Ok(None))),
    }
}

fn kernel(config: &Config) -> Kernel {
    let text = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let tun = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun");
    Kernel {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        features: probe::features(),
        missing_helpers: probe::missing_helpers(),
        rehearsal: probe::rehearse(&SteerConfig {
            hub: config.hub.clone(),
            served: config.addresses.clone(),
            arp_only: config.next_hops(),
            mode: config.steer,
            ..SteerConfig::default()
        }),
        lockdown: text("/sys/kernel/security/lockdown"),
        unprivileged_bpf: text("/proc/sys/kernel/unprivileged_bpf_disabled"),
        tun: tun.map(drop).map_err(Into::into),
    }
}

/// The facts about the node, and the ports of the running agent's records, whatever their source.
fn node(config: &Config) -> (NodeFacts, Vec<PortName>) {
    let (agent, stale_socket) = agent(&config.run);
    let (status, silence) = match agent.map(|_| status(&config.run)) {
        Some(Ok(status)) => (Some(status), None),
        Some(Err(silence)) => (None, Some(silence)),
        None => (None, None),
    };
    let other_records = status.as_ref().and_then(|status| other_records(config, status));
    let of_records = status.as_ref().filter(|_| other_records.is_none());
    let served = of_records.map(served_ports).unwrap_or_default();
    let filter = fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables");
    let facts = NodeFacts {
        hub_down: probe::hub_devices_down(&config.hub, config.workers).unwrap_or_default(),
        silence,
        datasources: of_records.map(|status| status.datasources.clone()),
        libvirt: libvirt_too_old(),
        attachments: status.as_ref().map(|status| status.attachments.clone()),
        port_errors: of_records.map(port_errors).unwrap_or_default(),
        refused: of_records.map_or_else(Vec::new, |status| status.refused.clone()),
        conflicts: of_records.map_or_else(Vec::new, |status| status.conflicts.clone()),
        missing_token_key: status.as_ref().and_then(|status| status.missing_token_key.clone()),
        problems: status.iter().flat_map(AgentStatus::other_problems).cloned().collect(),
        mac_mismatches: of_records.map_or_else(Vec::new, |status| status.mac_mismatches.clone()),
        other_records,
        hub: probe::hub_devices(&config.hub, config.workers),
        veth_full: probe::veth_full(&config.hub, config.workers).unwrap_or_default(),
        ring_full: config.pins.as_deref().map_or(0, probe::ring_full),
        agent: agent.map(|agent| agent.pid),
        agent_user: agent.and_then(|agent| agent.user),
        stale_socket,
        addresses: probe::address_uses(&config.addresses),
        bridge_filter: filter.ok().map(|text| text.trim().to_owned()),
    };
    (facts, served)
}

/// The directories of records, if the agent reads another one than the configuration names.
fn other_records(config: &Config, status: &AgentStatus) -> Option<OtherRecords> {
    // Without a directory to check, nothing but the agent's own records is judged.
    let checked = config.records.as_deref()?;
    let whole = |path: &Path| path.canonicalize().or_else(|_| absolute(path)).unwrap_or_else(|_| path.into());
    let is_same = status.records.as_deref().is_some_and(|read| whole(read) == whole(checked));
    (!is_same).then(|| OtherRecords { checked: checked.into(), read: status.records.clone() })
}

/// Seconds of a day.
const DAY: u64 = 86_400;

fn identity(config: &IdentityConfig) -> IssuerFacts {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let certificate = config.certificate.clone().map(|files| {
        let own = OwnCertificate::read(files).map_err(|error| error.to_string())?;
        Ok(own.loaded().until().checked_sub(now).map(|left| left / DAY))
    });
    IssuerFacts {
        directory: config.keys.clone(),
        algorithm: config.algorithm,
        keys: keys(config),
        certificate,
    }
}

fn keys(config: &IdentityConfig) -> Result<IdentityKeyFacts, String> {
    let made_here = config.rotate_days > 0;
    if made_here && !config.keys.exists() {
        return Ok(IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here });
    }
    // The ages of keys decide nothing here.
    let rotation = Rotation { publish_for: 0, after: None };
    let mut directory = KeyDirectory::new(config.keys.clone(), config.algorithm, rotation);
    let skipped = directory.look().map_err(|error| error.to_string())?;
    let skipped = skipped.iter().map(ToString::to_string).collect();
    Ok(IdentityKeyFacts { count: directory.keys().len(), skipped, made_here })
}

/// The fields of `/proc/self/uid_map` in the initial user namespace: the first user ID inside, the first user ID
/// outside, and the number of user IDs.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

pub(crate) fn process() -> ProcessFacts {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ProcessFacts {
        uid: geteuid().as_raw(),
        capabilities: capabilities(&status),
        seccomp: field(&status, "Seccomp").and_then(|value| value.parse().ok()),
        initial_user_namespace: fs::read_to_string("/proc/self/uid_map")
            .map_or(true, |map| map.split_whitespace().eq(ALL_USERS)),
        resources: Resources {
            open_files: getrlimit(Resource::Nofile).maximum,
            locked_memory: getrlimit(Resource::Memlock).current,
        },
        cpus: std::thread::available_parallelism().map_or(1, Into::into),
        unix_time: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    }
}

fn capabilities(status: &str) -> Option<Capabilities> {
    let set = |name| u64::from_str_radix(field(status, name)?, 16).ok();
    Some(Capabilities { effective: set("CapEff")?, permitted: set("CapPrm")?, bounding: set("CapBnd")? })
}

/// Returns the value of a line `NAME: VALUE` in `/proc/self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

// Finds a daemon of libvirt that does not run the hook, because it looks for hooks only when it starts.

/// The daemons that run hooks of QEMU, one of which a host has.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// Most processes that are looked at.
const PROCESSES: usize = 1 << 16;
/// Ticks of the kernel's clock in a second, as `/proc` has them on every architecture (`USER_HZ`).
const TICKS: u64 = 100;
/// The package's directory, which is as old as its first installation.
const PACKAGE: &str = "/etc/xdp-imds";

/// The daemon that has run since before the first hook was installed.
fn libvirt_too_old() -> Option<String> {
    fs::metadata(HOOK).ok()?;
    let hooks = fs::read_dir(HOOKS).ok()?.take(PROCESSES).flatten().map(|entry| entry.path());
    let others = [Path::new("/etc/libvirt/hooks/qemu").to_owned(), PACKAGE.into()];
    // With any hook at its start the daemon looks into the directory at each event.
    let installed = hooks.chain(others).filter_map(|path| made(&path)).min()?;
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let boot = UNIX_EPOCH + Duration::from_secs(boot_time(&stat)?);
    let processes = fs::read_dir("/proc").ok()?.take(PROCESSES).flatten();
    let daemon = |process: fs::DirEntry| {
        let name = fs::read_to_string(process.path().join("comm")).ok()?.trim().to_owned();
        if !DAEMONS.contains(&&*name) {
            return None;
        }
        let stat = fs::read_to_string(process.path().join("stat")).ok()?;
        (boot + started(&stat)? < installed).then_some(name)
    };
    processes.into_iter().find_map(daemon)
}

/// When a file was made; `None` if there is none, or if its file system does not tell.
fn made(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.created().ok()
}

/// The time of the boot, in seconds since 1970, in `/proc/stat`.
fn boot_time(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// The time from the boot to the start of a process, in `/proc/PID/stat`: field 22. Its name may have spaces and
/// parentheses.
fn started(stat: &str) -> Option<Duration> {
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    Some(Duration::from_millis(ticks.saturating_mul(1_000 / TICKS)))
}

// Collects the ports that the configuration and the records name, and their devices.

/// Maximum number of invalid records whose errors are kept, of conflicts and of pairs of records of one VM.
const REFUSED_TOLD: usize = 3;

/// Reads the directory of records. Returns a summary of the records, and the ports that the configuration or a valid
/// record names. The summary is `None` if no directory is configured, and empty if the directory cannot be read.
fn named_ports(config: &Config) -> (Option<RecordFacts>, BTreeSet<PortName>) {
    let mut ports: BTreeSet<PortName> = config.ports.iter().map(|port| port.name.clone()).collect();
    let records = config.records.as_deref().map(|path| {
        let mut records = RecordFacts::default();
        let (mut claimed, mut owners) =
            (RecordConflicts::new(&config.ports), BTreeMap::<String, String>::new());
        let Ok((dir, names)) = directory::files(path) else { return records };
        for name in names.iter().take(directory::MAX_RECORDS) {
            let Some(loaded) = directory::load(&dir, name, &config.record_limits()) else { continue };
            records.count += 1;
            let lacking = loaded.lacking.iter().map(|reason| directory::lacking_credential(name, reason));
            records.lacking.extend(lacking.take(REFUSED_TOLD - records.lacking.len()));
            let open = loaded.open_files.into_iter().take(REFUSED_TOLD - records.open_files.len());
            records.open_files.extend(open);
            match loaded.record {
                Ok((record, _)) => {
                    *records.stamps.entry(record.serve.smbios.as_str()).or_default() += 1;
                    let named = record.network.nics.iter().filter_map(|nic| nic.port.as_ref());
                    ports.extend(named.map(PortName::from));
                    claimed.add(&RecordId::new(RecordSource::File, name), &record);
                    let owner = record.owner_text().to_owned();
                    match owners.entry(owner) {
                        Entry::Vacant(place) => _ = place.insert(name.clone()),
                        Entry::Occupied(first) if records.same_vm.len() < REFUSED_TOLD => {
                            let (owner, first) = (first.key().clone(), first.get().clone());
                            records.same_vm.push((first, name.clone(), owner));
                        }
                        Entry::Occupied(_) => {}
                    }
                }
                Err(error) => refuse(&mut records, name, &error),
            }
        }
        records.conflicts = claimed.iter().take(REFUSED_TOLD).collect();
        records
    });
    (records, ports)
}

/// Most ports of the running agent that are examined, those that are not attached first.
const SERVED_MOST: usize = 1_024;

/// The ports of the running agent's records and configuration. Records of sources other than the directory name theirs
/// only there.
fn served_ports(status: &AgentStatus) -> Vec<PortName> {
    let wanted = status.ports.listed.iter().filter(|port| port.state != PortState::Closed);
    let mut wanted: Vec<_> = wanted.collect();
    wanted.sort_by_key(|port| port.state == PortState::Attached);
    let name = |port: &PortStatus| match port.name.split_once('@') {
        Some((ifname, netns)) => PortName { ifname: ifname.into(), netns: Some(netns.into()) },
        None => PortName { ifname: port.name.clone(), netns: None },
    };
    wanted.into_iter().take(SERVED_MOST).map(name).collect()
}

/// The ports that the running agent cannot serve, and its reasons.
fn port_errors(status: &AgentStatus) -> Vec<(String, String)> {
    let ports = status.ports.listed.iter().filter(|port| port.state == PortState::Error).take(SERVED_MOST);
    ports.map(|port| (port.name.clone(), port.reason.clone().unwrap_or_default())).collect()
}

/// Adds an invalid record to the summary.
fn refuse(records: &mut RecordFacts, name: &str, error: &FeedError) {
    if matches!(error, FeedError::Io { error, .. } if error.kind() == io::ErrorKind::PermissionDenied) {
        records.unreadable.get_or_insert_with(|| name.to_owned());
    }
    records.refused_count += 1;
    if records.refused.len() < REFUSED_TOLD {
        records.refused.push((name.to_owned(), error.to_string()));
    }
}

/// Queries the device of each port, in the order for people. If the query finds no device, searches all namespaces for
/// a device with that name.
fn look_at(names: BTreeSet<PortName>) -> Vec<PortFacts> {
    let mut ports: Vec<PortFacts> =
        names.into_iter().map(|name| PortFacts { device: device(&name), name, elsewhere: None }).collect();
    ports.sort_by(|one, other| natural(&one.name.ifname, &other.name.ifname));
    let absent = |port: &PortFacts| !matches!(port.device, Ok(Some(_)));
    let missing: BTreeSet<String> =
        ports.iter().filter(|port| absent(port)).map(|port| port.name.ifname.clone()).collect();
    if missing.is_empty() {
        return ports;
    }
    let mut found = search(&missing);
    for port in ports.iter_mut().filter(|port| absent(port)) {
        // The search is by device name, so ports with the same device name have the same result.
        port.elsewhere = Some(found.entry(port.name.ifname.clone()).or_default().clone());
    }
    ports
}

// Collects the directories, the pins, and the agent that uses the run directory.

/// `BPF_FS_MAGIC` (`linux/magic.h`).
const BPFFS: u64 = 0xcafe_4a11;
/// Maximum number of versions kept.
const VERSIONS_TOLD: usize = 16;
/// The names of an agent's sockets in its run directory.
const SOCKETS: [&str; 2] = ["control.sock", "takeover.sock"];

/// The directory of pins. `is_own`: the agent of the run directory runs, and has the lock of its pins.
fn pins(path: &Path, is_own: bool) -> PinFacts {
    let versions = fs::read_dir(path).into_iter().flatten().flatten();
    let mut versions: Vec<_> =
        versions.take(VERSIONS_TOLD).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    versions.sort();
    let links = pinned_links(&path.join(PINS_VERSION).join("links"));
    let owner = fs::metadata(path).ok().map(|found| found.uid());
    let are_of_another = !is_own && probe::pins_are_held(path).unwrap_or(false);
    PinFacts { path: path.into(), owner, file_system: file_system(path), versions, links, are_of_another }
}

/// Returns the configured directories with their purposes.
fn directories(config: &Config) -> Vec<(&'static str, Directory)> {
    let records = config.records.as_deref().map(|path| ("records", path));
    let state = config.state.as_deref().map(|path| ("state", path));
    let all = records.into_iter().chain(state).chain([("run", &*config.run)]);
    all.map(|(what, path)| (what, directory(path))).collect()
}

/// Most files of a directory with parts of records that are looked at: two for each record of a full node.
const PARTS_MOST: usize = 1 << 15;
/// The package's explanation of such a directory: no part of a record.
const README: &str = "README";
/// Maximum number of exposed files kept.
const EXPOSED_TOLD: usize = 3;

/// Returns the directories with parts of records that others may read. The hook of libvirt has no configuration here, so
/// that only its default directory is known.
fn exposed(config: &Config) -> Vec<ExposedFile> {
    let sources = config.sources();
    let parts = sources.iter().filter_map(|source| source.parts());
    let directories = [Path::new(libvirt::DEFAULT_FILES)].into_iter().chain(parts);
    directories.filter_map(exposed_in).collect()
}

/// Returns the files of a directory that others may read; `None` if there are none.
fn exposed_in(directory: &Path) -> Option<ExposedFile> {
    let entries = fs::read_dir(directory).ok()?.take(PARTS_MOST).flatten();
    let files = entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        // The package's own file, which everybody may read.
        if name == README { None } else { Some((name, open_mode(&entry.path())?)) }
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    let count = files.len();
    files.truncate(EXPOSED_TOLD);
    (count > 0).then(|| ExposedFile { directory: directory.into(), files, count })
}

fn directory(path: &Path) -> Directory {
    let found = match fs::metadata(path) {
        Ok(found) => {
            Ok(Some(PathFacts { directory: found.is_dir(), mode: found.mode() & 0o7777, owner: found.uid() }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    };
    Directory { path: path.into(), found, file_system: file_system(path) }
}

/// Returns the file system of `path`. If `path` does not exist, returns that of its nearest ancestor that exists.
fn file_system(path: &Path) -> Result<FileSystem, ProbeError> {
    let here = |at: &Path| if at.as_os_str().is_empty() { PathBuf::from(".") } else { at.to_owned() };
    let at = path.ancestors().map(here).find(|at| at.exists()).unwrap_or_else(|| "/".into());
    let failed = |errno: rustix::io::Errno| ProbeError::from(io::Error::from(errno));
    let kind = statfs(&at).map_err(failed)?;
    let room = statvfs(&at).map_err(failed)?;
    Ok(FileSystem {
        bpf: u64::try_from(kind.f_type).is_ok_and(|kind| kind == BPFFS),
        read_only: room.f_flag.contains(StatVfsMountFlags::RDONLY),
        free: room.f_bavail.saturating_mul(room.f_frsize),
        at,
    })
}

/// The process that listens on a socket in the run directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ListeningProcess {
    /// Its ID; 0 if the kernel does not report it.
    pid: u32,
    /// The user ID that it had when it began to listen, if the kernel reports it.
    user: Option<u32>,
}

/// Returns the process that listens on a socket in the run directory. If no process listens, returns the path of a socket
/// that exists there, if there is one.
fn agent(run: &Path) -> (Option<ListeningProcess>, Option<PathBuf>) {
    let mut stale = None;
    for path in SOCKETS.map(|name| run.join(name)) {
        match UnixStream::connect(&path) {
            Ok(stream) => {
                let peer = rustix::net::sockopt::socket_peercred(&stream).ok();
                let process = peer.map(|peer| ListeningProcess {
                    pid: peer.pid.as_raw_nonzero().get().unsigned_abs(),
                    user: Some(peer.uid.as_raw()),
                });
                return (Some(process.unwrap_or_default()), None);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => stale = Some(path),
            Err(_) => {}
        }
    }
    (None, stale)
}

/// Longest wait for the agent's status: an agent that hangs must not hide what else is wrong.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the status of the agent of a run directory with all its ports, or why it gives none.
fn status(run: &Path) -> Result<AgentStatus, AgentSilence> {
    let refused = |reason: String| AgentSilence { hangs: false, reason };
    let status = status::get_within(run, "/v1/status?ports=all", STATUS_TIMEOUT).map_err(|error| {
        AgentSilence { hangs: matches!(error, ClientError::Mute(_)), reason: error.to_string() }
    })?;
    serde_json::from_slice(&status)
        .map_err(|error| refused(format!("its status is of a different version than this command: {error}")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use super::super::facts::ExposedFile;
    use super::{
        AgentStatus, Capabilities, EXPOSED_TOLD, ListeningProcess, agent, boot_time, capabilities, directory,
        exposed_in, file_system, other_records, started,
    };
    use crate::config::Config;

    #[test]
    fn the_capability_sets_are_read_from_the_kernels_text() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapPrm:\t00000000000000ff\n\
          CapEff:\t0000000000001000\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n";
        let sets = Capabilities { effective: 1 << 12, permitted: 0xff, bounding: 0x1ff_ffff_ffff };
        assert_eq!(capabilities(status), Some(sets));
        assert_eq!(capabilities("Name:\tx\n"), None);
    }

    #[test]
    fn the_start_of_a_process_is_read_from_the_kernels_text() {
        let text = "4465 (a b) c) S 1 4465 4465 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 17 0 1234 9 9 9";
        assert_eq!(started(text), Some(Duration::from_millis(12_340)));
        assert_eq!(started("4465 (a) S 1"), None);
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\nprocesses 7\n"), Some(1_700_000_000));
    }

    #[test]
    fn this_process_has_started_before_now_and_after_the_boot() {
        let read = |path: &str| fs::read_to_string(path).expect("the kernel's text");
        let boot = UNIX_EPOCH + Duration::from_secs(boot_time(&read("/proc/stat")).expect("a time"));
        let start = boot + started(&read("/proc/self/stat")).expect("a time");
        assert!(boot < start && start < SystemTime::now() + Duration::from_secs(2), "{boot:?} {start:?}");
    }

    #[test]
    fn the_file_system_of_a_missing_path_is_that_of_its_nearest_ancestor() {
        let room = tempfile::tempdir().expect("a directory");
        let found = file_system(&room.path().join("a/b/c")).expect("a file system");
        assert_eq!((found.at.as_path(), found.bpf), (room.path(), false));
        assert_eq!(file_system(Path::new("no/such/directory")).expect("a file system").at, Path::new("."));
        let seen = directory(&room.path().join("a"));
        assert_eq!(seen.found, Ok(None));
    }

    #[test]
    fn parts_of_records_that_others_may_read_are_found_and_counted() {
        let room = tempfile::tempdir().expect("a directory");
        let write = |name: &str, mode| {
            fs::write(room.path().join(name), "").expect("written");
            fs::set_permissions(room.path().join(name), fs::Permissions::from_mode(mode)).expect("a mode");
        };
        assert_eq!(exposed_in(&room.path().join("nowhere")), None);
        fs::create_dir(room.path().join("directory")).expect("a directory");
        for (name, mode) in [("own.yaml", 0o600), ("group.yaml", 0o640), ("README", 0o644)] {
            write(name, mode);
        }
        assert_eq!(exposed_in(room.path()), None);
        for (name, mode) in [("a", 0o644), ("b.yaml", 0o602), ("c", 0o660), ("d", 0o604)] {
            write(name, mode);
        }
        let found = exposed_in(room.path()).expect("exposed files");
        let files = [("a", 0o644), ("b.yaml", 0o602), ("c", 0o660)].map(|(name, mode)| (name.into(), mode));
        assert_eq!(files.len(), EXPOSED_TOLD);
        assert_eq!(found, ExposedFile { directory: room.path().into(), files: files.into(), count: 4 });
    }

    #[test]
    fn the_records_to_check_are_compared_with_those_that_the_agent_reads() {
        let room = tempfile::tempdir().expect("a directory");
        let (own, link, missing) =
            (room.path().join("own"), room.path().join("link"), room.path().join("no"));
        fs::create_dir(&own).expect("a directory");
        std::os::unix::fs::symlink(&own, &link).expect("a link");
        for (checked, read, is_other) in [
            (None, Some(&own), false),
            (Some(&own), Some(&own), false),
            (Some(&link), Some(&own), false),
            (Some(&missing), Some(&missing), false),
            (Some(&missing), Some(&own), true),
            (Some(&own), None, true),
        ] {
            let config = Config { records: checked.cloned(), ..Config::default() };
            let status = AgentStatus { records: read.cloned(), ..AgentStatus::default() };
            let found = other_records(&config, &status);
            assert_eq!(found.is_some(), is_other, "{checked:?} {read:?}: {found:?}");
        }
    }

    #[test]
    fn an_agent_that_hangs_is_told_from_one_that_refuses() {
        use super::status;
        use std::io::{Read as _, Write as _};
        let room = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(room.path().join("control.sock")).expect("a socket");
        let silence = status(room.path()).expect_err("nobody answers");
        assert!(silence.hangs && silence.reason.contains("is silent"), "{silence:?}");
        let serving = std::thread::spawn(move || {
            // The first is that of the request above.
            for (mut stream, _) in (0..2).map(|_| listener.accept().expect("a client")) {
                _ = stream.read(&mut [0; 512]);
                _ = stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\n\r\n");
            }
        });
        let silence = status(room.path()).expect_err("a refusal");
        assert!(!silence.hangs && silence.reason.contains("cannot answer now"), "{silence:?}");
        serving.join().expect("served");
    }

    #[test]
    fn a_socket_shows_whether_a_process_listens_and_which() {
        let room = tempfile::tempdir().expect("a directory");
        assert_eq!(agent(room.path()), (None, None));
        let path = room.path().join("control.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let user = Some(rustix::process::geteuid().as_raw());
        let this = ListeningProcess { pid: std::process::id(), user };
        assert_eq!(agent(room.path()), (Some(this), None));
        drop(listener);
        assert_eq!(agent(room.path()), (None, Some(path)));
    }
}
