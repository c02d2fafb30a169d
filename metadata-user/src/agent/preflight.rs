//! What the agent refuses of a configuration, found before anything on the node changes. `serve`, `doctor` and a reload
//! ask the same functions, so that `doctor` reports each such refusal, and the status what a restart would refuse.
//!
//! What only the kernel can refuse (privileges, features, pins, devices) is not here: `doctor` tries it.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use std::{fmt, fs, io};

use metadata_common::run::{SOCKET, UNIT_HIDES, is_home};
use metadata_feed::registry::RecordId;
use metadata_feed::state::token_file;
use rustix::fs::{Access, access};

use super::endpoint::gid_of;
use super::plan::{Conflict, Plan};
use super::state::KEY_FILE;
use crate::config::{Config, PortSpec};
use metadata_content::record::Record;
use metadata_content::source::RecordSource;

/// The name of the refusal of a configuration without a source of records.
pub const NO_SOURCES: &str = "configuration.sources";
/// The names of all refusals here, as `doctor` shows them.
pub const REFUSALS: [&str; 6] =
    [NO_SOURCES, "configuration.page", "api.group", "metrics", "token_key", "audit"];

/// Attempts to listen on the metrics address while it is in use, and the pause between them: the last agent may be
/// about to end.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);
/// Most descriptors of the running agent that are searched for the metrics address.
const MAX_DESCRIPTORS: usize = 1 << 17;

/// Why the agent does not start with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigRefusal {
    /// Its name, one of [`REFUSALS`].
    pub name: &'static str,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: &'static str,
    /// What to do.
    pub remedy: String,
    /// Whether a permission is missing.
    pub is_denied: bool,
}

impl fmt::Display for ConfigRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name: _, found, expected, remedy, is_denied: _ } = self;
        write!(f, "{found}; expected {expected}. {remedy}")
    }
}

impl std::error::Error for ConfigRefusal {}

/// All that is refused of a configuration, a line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigRefusals(pub Vec<ConfigRefusal>);

impl ConfigRefusals {
    /// True if a permission is missing.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        self.0.iter().any(|refusal| refusal.is_denied)
    }
}

impl fmt::Display for ConfigRefusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&reasons.join("\n"))
    }
}

impl std::error::Error for ConfigRefusals {}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// What is refused of the values alone. A reload refuses it too.
#[must_use]
pub fn values(config: &Config) -> Vec<ConfigRefusal> {
    let mut refusals = Vec::new();
    if !config.has_records() {
        refusals.push(ConfigRefusal {
            name: NO_SOURCES,
            found: "no records to serve".into(),
            expected: "a source of records",
            remedy: format!("Give --records DIR, or set {} in the configuration file", settings()),
            is_denied: false,
        });
    }
    if config.page && config.metrics.is_none() {
        refusals.push(ConfigRefusal {
            name: "configuration.page",
            found: "`page` is on, and there is no address to serve it at".into(),
            expected: "an address",
            remedy: "Set `metrics: ADDR:PORT`, or remove `page`".into(),
            is_denied: false,
        });
    }
    refusals
}

/// What turns a source on, of each source.
fn settings() -> String {
    let mut settings: Vec<_> = RecordSource::ALL.into_iter().filter_map(RecordSource::setting).collect();
    // The API comes last: a VM manager registers VMs by it.
    settings.rotate_left(1);
    match settings.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => settings.concat(),
    }
}

/// What is refused of a configuration on this node, with the values.
#[must_use]
pub fn refusals(config: &Config) -> Vec<ConfigRefusal> {
    on_node(config, config.metrics, ATTEMPTS)
}

/// What a restart would refuse of a configuration that a running agent read, which has `running` now. It has its own
/// address for metrics already, and does not wait for another.
#[must_use]
pub fn refusals_of_restart(config: &Config, running: &Config) -> Vec<ConfigRefusal> {
    on_node(config, config.metrics.filter(|address| Some(*address) != running.metrics), 0)
}

fn on_node(config: &Config, address: Option<SocketAddr>, attempts: u32) -> Vec<ConfigRefusal> {
    let mut refusals = values(config);
    refusals.extend(group(config));
    refusals.extend(address.and_then(|address| metrics(address, &config.run, attempts)));
    refusals.extend(token_keys(config));
    refusals.extend(config.audit.to.as_deref().and_then(audit));
    refusals
}

fn group(config: &Config) -> Option<ConfigRefusal> {
    let group = config.api().group?;
    gid_of(&group).is_none().then(|| ConfigRefusal {
        name: "api.group",
        found: format!("there is no group `{group}`"),
        expected: "a group of this node, by its name or number",
        remedy: format!("Run `groupadd --system {group}`, or correct `api.group`"),
        is_denied: false,
    })
}

/// The agent that listens in the run directory may have the address: the next one takes it over, or waits for its end.
fn metrics(address: SocketAddr, run: &Path, mut attempts: u32) -> Option<ConfigRefusal> {
    let error = loop {
        match TcpListener::bind(address) {
            Ok(_) => return None,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if agent(run).is_some_and(|pid| listens(pid, address)) {
                    return None;
                }
                if attempts == 0 {
                    break error;
                }
                attempts -= 1;
                sleep(PAUSE);
            }
            Err(error) => break error,
        }
    };
    let in_use = error.kind() == io::ErrorKind::AddrInUse;
    Some(ConfigRefusal {
        name: "metrics",
        found: format!("cannot listen for metrics on {address}: {error}"),
        expected: "an address of this node and a free port",
        remedy: if in_use {
            format!(
                "Stop the program that listens there (`ss -ltnp 'sport = :{}'`), or set another `metrics`",
                address.port()
            )
        } else {
            "Set `metrics` to an address of this node, or to 0.0.0.0 or [::] with a port".into()
        },
        is_denied: is_denied(&error),
    })
}

/// The process that listens in a run directory.
fn agent(run: &Path) -> Option<u32> {
    let stream = UnixStream::connect(run.join(SOCKET)).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    Some(peer.pid.as_raw_nonzero().get().unsigned_abs())
}

/// True if a process listens on this port of any address, or if that cannot be found out. A wrong answer costs little:
/// `serve` binds the address later.
fn listens(pid: u32, address: SocketAddr) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return true };
    let inodes = listening(address.port());
    descriptors.take(MAX_DESCRIPTORS).flatten().any(|entry| {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        inode.is_some_and(|inode| inodes.iter().any(|other| other == inode))
    })
}

/// The inodes of sockets that listen on a TCP port, in this network namespace (proc_net_tcp(5)).
fn listening(port: u16) -> Vec<String> {
    /// `TCP_LISTEN`.
    const LISTEN: &str = "0A";
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .map(|path| fs::read_to_string(path).unwrap_or_default());
    let end = format!(":{port:04X}");
    let inode = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let is_it = fields.get(1)?.ends_with(&end) && *fields.get(3)? == LISTEN;
        is_it.then(|| fields.get(9).map(|inode| (*inode).to_owned())).flatten()
    };
    tables.iter().flat_map(|table| table.lines()).filter_map(inode).collect()
}

/// The files of token keys, which the agent reads before it serves. A damaged one in the state directory is set aside.
fn token_keys(config: &Config) -> Option<ConfigRefusal> {
    let given = config.token_key.as_deref().and_then(|path| token_file::given(path).err());
    let remedy = if given.is_some() {
        "Correct `token_key`, or the file".into()
    } else {
        "Fix the file as it says, or name another directory with `state`".into()
    };
    let kept = config.state.as_ref().map(|state| state.join(KEY_FILE));
    let kept = kept.and_then(|path| token_file::check_own(&path).err());
    let kept = kept.filter(|error| !matches!(error, token_file::TokenKeyError::Malformed { .. }));
    let error = given.or(kept)?;
    Some(ConfigRefusal {
        name: "token_key",
        found: error.to_string(),
        expected: "token keys that only the agent's user can read",
        remedy,
        is_denied: matches!(&error, token_file::TokenKeyError::Io { source, .. } if is_denied(source)),
    })
}

fn audit(path: &Path) -> Option<ConfigRefusal> {
    if path == Path::new(crate::service::audit::STDERR) {
        return None;
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let of_file = |error: io::Error| (error.to_string(), is_denied(&error));
    let of_directory = |error: io::Error| (format!("{}: {error}", directory.display()), is_denied(&error));
    let reason = match fs::metadata(path) {
        Ok(found) if found.is_dir() => Some(("it is a directory".to_owned(), false)),
        Ok(_) => access(path, Access::WRITE_OK).err().map(|errno| of_file(errno.into())),
        Err(_) => match fs::metadata(directory) {
            Ok(found) if found.is_dir() => access(directory, Access::WRITE_OK | Access::EXEC_OK)
                .err()
                .map(|errno| of_directory(errno.into())),
            Ok(_) => Some((format!("{} is not a directory", directory.display()), false)),
            Err(error) => Some(of_directory(error)),
        },
    };
    let hidden = if is_home(path) { format!(". {UNIT_HIDES}") } else { String::new() };
    reason.map(|(reason, is_denied)| ConfigRefusal {
        name: "audit",
        found: format!("cannot write the audit log {}: {reason}", path.display()),
        expected: "a file that the agent can write",
        remedy: format!(
            "Make its directory and let the agent's user write there, or correct `audit.to`. The package's unit lets it write \
             to /var/log/xdp-imds; for another directory, add `ReadWritePaths=` with `systemctl edit`{hidden}"
        ),
        is_denied,
    })
}

/// Finds records that cannot be served because another record, or the configuration, has the same MAC on the same port.
#[derive(Debug)]
pub struct RecordConflicts(Plan);

impl RecordConflicts {
    /// Starts with the ports of the configuration.
    #[must_use]
    pub fn new(configured: &[PortSpec]) -> Self {
        Self(Plan::new(configured))
    }

    /// Adds a record.
    pub fn add(&mut self, id: &RecordId, record: &Record) {
        self.0.put(id, Some(record));
    }

    /// Returns what such a sentence is about: the record, and its MAC and port. The rest of it depends on the sources
    /// that are known, one of which may have precedence.
    #[must_use]
    pub fn subject(sentence: &str) -> &str {
        Conflict::subject(sentence)
    }

    /// Returns a sentence for each record that cannot be served.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        self.0.conflicts().map(|conflict| conflict.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::token_keys;
    use crate::config::Config;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_refused_file_of_token_keys_is_named_and_the_field_only_if_it_is_set() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token.key");
        fs::write(&path, "").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("a mode");
        let own = Config { state: Some(room.path().to_owned()), ..Config::default() };
        let given = Config { state: None, token_key: Some(path.clone()), ..Config::default() };
        for (config, names_field) in [(own, false), (given, true)] {
            let refusal = token_keys(&config).expect("a refusal");
            assert!(refusal.found.contains(&path.display().to_string()), "{refusal}");
            assert_eq!(refusal.remedy.contains("token_key"), names_field, "{refusal}");
        }
    }
}
