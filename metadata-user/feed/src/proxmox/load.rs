//! Reads the files of one VM, and sees which files have changed. Each call may wait for a disk or for the cluster.

use bytes::Bytes;
use metadata_content::record::RecordLimits;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeSet, HashMap};
use std::fs::Metadata;
use std::io;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::config::FILE_BYTES;
use super::drive::{Custom, Dns, PARTS, SNIPPET_BYTES, snippets};
use super::{
    PATIENCE, ProxmoxOptions, ProxmoxProblem, ProxmoxTranslation, TranslationInput, VmConfig, translate,
};
use crate::record_part::{DEFAULTS, PartError, part, read};
use crate::{FeedError, RejectedVm, VM_TEXT_BYTES};

/// Largest number of a VM in Proxmox VE (`pve-vmid` in pve-common's JSONSchema.pm).
pub(super) const VMID_MOST: u32 = 999_999_999;

/// The name of a cluster in the owner of a VM whose node has none.
const NO_CLUSTER: &str = "local";

/// SHA-256 of everything that makes a record.
pub(super) type VmDigest = [u8; 32];

/// A file's time of change, length and inode; `None` if there is none. pmxcfs counts whole seconds.
type FileStamp = Option<(i64, i64, u64, u64)>;

/// The files of a VM's record, as they looked before they were read.
pub(super) type FileStamps = Arc<[(PathBuf, FileStamp)]>;

#[derive(Debug)]
pub(super) struct VmFiles {
    pub(super) outcome: LoadOutcome,
    /// The files that were asked for, including those that do not exist.
    pub(super) seen: FileStamps,
    /// The digest of what was read.
    pub(super) digest: VmDigest,
}

/// What the files of a VM make.
#[derive(Debug)]
pub(super) enum LoadOutcome {
    Record(Box<ProxmoxTranslation>),
    /// A template never runs.
    Template,
    /// The configuration vanished after it was listed.
    Gone,
    Refused(FeedError),
    /// A file cannot be read. It may be readable later without a sign of change.
    Unreadable(FeedError),
}

/// What a look at the directory found.
#[derive(Debug)]
pub(super) struct DirectoryScan {
    /// The VMs that are on this node or arrive here, in the order of their numbers; each with true if its files
    /// changed.
    pub(super) vms: Vec<(u32, bool)>,
    /// The directory cannot be written.
    pub(super) read_only: bool,
}

/// Lists the VMs, and compares their files with `known`.
///
/// # Errors
/// The directory cannot be read whole.
pub(super) fn look(directory: &Path, known: &HashMap<u32, FileStamps>) -> Result<DirectoryScan, FeedError> {
    let unreadable = |error| super::io_error(directory, "a directory that can be read", error);
    let mode = std::fs::metadata(directory).map_err(unreadable)?.mode();
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        numbers.extend(entry.map_err(unreadable)?.file_name().to_str().and_then(vmid));
    }
    numbers.sort_unstable();
    // A VM that arrives would be lost if an error counted as its absence.
    for vmid in with_taps().map_err(unreadable)? {
        if let Err(at) = numbers.binary_search(&vmid)
            && elsewhere(directory, vmid).map_err(unreadable)?.is_some()
        {
            numbers.insert(at, vmid);
        }
    }
    // Many VMs share a file.
    let mut prints = HashMap::new();
    let mut differs = |(path, before): &(PathBuf, FileStamp)| {
        *prints.entry(path.clone()).or_insert_with(|| print(path)) != *before
    };
    let changed = |vmid: u32| known.get(&vmid).is_none_or(|seen| seen.iter().any(&mut differs));
    let vms = numbers.iter().copied().zip(numbers.iter().copied().map(changed)).collect();
    // Without quorum pmxcfs takes the bits away from all files (`tree_entry_stat` in cfs-plug-memdb.c).
    Ok(DirectoryScan { vms, read_only: mode & 0o200 == 0 })
}

/// Checks that the directory can be listed.
///
/// # Errors
/// It cannot, as while the cluster's file system is not mounted; or there is no answer for [`PATIENCE`].
pub fn reachable(options: &ProxmoxOptions) -> Result<(), FeedError> {
    let directory = options.directory.clone();
    within(PATIENCE, move || look(&directory, &HashMap::new()).map(drop)).unwrap_or_else(|| {
        Err(super::io_error(&options.directory, "a directory that can be read", ErrorKind::TimedOut.into()))
    })
}

/// Does work that may wait for the cluster without end. Returns `None` after `limit`; the thread of the work stays
/// until there is an answer.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tx, done) = mpsc::channel();
    std::thread::spawn(move || drop(tx.send(work())));
    done.recv_timeout(limit).ok()
}

/// The number of a VM by the name of its file.
fn vmid(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".conf")?;
    let number = digits.parse().ok().filter(|number: &u32| number.to_string() == digits)?;
    (1..=VMID_MOST).contains(&number).then_some(number)
}

fn print(path: &Path) -> FileStamp {
    let print = |file: Metadata| (file.mtime(), file.mtime_nsec(), file.len(), file.ino());
    std::fs::metadata(path).ok().map(print)
}

/// Reads the files of a VM and makes its record.
pub(super) fn load(vmid: u32, options: &ProxmoxOptions, limits: &RecordLimits) -> VmFiles {
    let mut loading = Loading { seen: Vec::new(), hash: Sha256::new(), name: None };
    let own = options.directory.join(format!("{vmid}.conf"));
    let elsewhere = if own.exists() { Ok(None) } else { elsewhere(&options.directory, vmid) };
    let (path, outcome) = match elsewhere {
        Ok(found) => {
            let path = found.unwrap_or(own);
            let outcome = loading.record(vmid, &path, options, limits);
            (path, outcome)
        }
        Err(error) => {
            let error = super::io_error(&own, "a cluster whose nodes can be read", error);
            (own, Err(Fault::Io(error)))
        }
    };
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(Fault::Io(error)) => {
            loading.hash.update(error.to_string());
            LoadOutcome::Unreadable(error)
        }
        Err(Fault::Problem(problem)) => {
            let reason = format!("{}: {problem}", path.display());
            loading.hash.update(&reason);
            let name = loading.name.filter(|name| name.len() <= VM_TEXT_BYTES);
            let vm = name.map(|name| RejectedVm { name, ..RejectedVm::default() });
            LoadOutcome::Refused(FeedError::Vm { reason }.of(vm))
        }
    };
    VmFiles { outcome, seen: loading.seen.into(), digest: loading.hash.finalize().into() }
}

/// Why there is no record.
enum Fault {
    Io(FeedError),
    Problem(ProxmoxProblem),
}

impl From<ProxmoxProblem> for Fault {
    fn from(problem: ProxmoxProblem) -> Self {
        Self::Problem(problem)
    }
}

struct Loading {
    seen: Vec<(PathBuf, FileStamp)>,
    hash: Sha256,
    /// The VM's name, once its configuration is read.
    name: Option<String>,
}

impl Loading {
    fn record(
        &mut self,
        vmid: u32,
        path: &Path,
        options: &ProxmoxOptions,
        limits: &RecordLimits,
    ) -> Result<LoadOutcome, Fault> {
        let Some(bytes) = self.read(path, FILE_BYTES)? else { return Ok(LoadOutcome::Gone) };
        let (config, dropped) = VmConfig::parse(&bytes)?;
        if config.is_template() {
            return Ok(LoadOutcome::Template);
        }
        self.name = config.get("name").map(str::to_owned);
        let cluster = self.cluster(path, options)?;
        let host = self.read(&options.resolv_conf, FILE_BYTES)?.unwrap_or_default();
        let mut given = TranslationInput {
            host: Dns::of_host(&String::from_utf8_lossy(&host)),
            custom: self.custom(&config, options)?,
            defaults: self.part(&options.files, DEFAULTS)?,
            own: self.part(&options.files, &format!("{vmid}.yaml"))?,
            cluster,
            generation: 0,
        };
        given.generation = generation(self.hash.clone().finalize().into());
        let mut made = translate(vmid, &config, &given, options, limits)?;
        made.problems.splice(..0, dropped);
        Ok(LoadOutcome::Record(Box::new(made)))
    }

    /// The name of the cluster. A file system that goes away must not look like a node without a cluster.
    fn cluster(&mut self, configuration: &Path, options: &ProxmoxOptions) -> Result<String, Fault> {
        if let Some(name) = &options.cluster {
            self.hash.update(name);
            return Ok(name.clone());
        }
        let found = self.read(&options.corosync, FILE_BYTES)?;
        if found.is_none() && !configuration.exists() {
            let error = super::io_error(configuration, "a file that can be read", ErrorKind::NotFound.into());
            return Err(Fault::Io(error));
        }
        Ok(cluster_of(&String::from_utf8_lossy(&found.unwrap_or_default())).unwrap_or(NO_CLUSTER).to_owned())
    }

    /// Reads at most `limit + 1` bytes; `None` if the file does not exist.
    fn read(&mut self, path: &Path, limit: usize) -> Result<Option<Vec<u8>>, Fault> {
        // What is seen first is never newer than what is read.
        self.seen.push((path.to_owned(), print(path)));
        let found = read(path, limit)
            .map_err(|error| Fault::Io(super::io_error(path, "a file that can be read", error)))?;
        let bytes = found.as_deref().unwrap_or_default();
        // The length goes first, so that different sequences of files have different digests.
        self.hash.update([u8::from(found.is_some())]);
        self.hash.update(bytes.len().to_be_bytes());
        self.hash.update(bytes);
        Ok(found)
    }

    fn custom(&mut self, config: &VmConfig, options: &ProxmoxOptions) -> Result<Custom, Fault> {
        if config.get("cicustom").is_none() {
            return Ok(Custom::default());
        }
        let storages = self.read(&options.storages, FILE_BYTES)?.unwrap_or_default();
        let paths = snippets(config, &String::from_utf8_lossy(&storages))?;
        let mut contents: [Option<Bytes>; 4] = Default::default();
        for ((content, path), part) in contents.iter_mut().zip(paths).zip(PARTS) {
            let Some(path) = path else { continue };
            let bytes = self.read(&path, SNIPPET_BYTES)?.ok_or_else(|| {
                Fault::Problem(ProxmoxProblem::custom(
                    part,
                    format_args!("a file {}", path.display()),
                    "none",
                ))
            })?;
            if bytes.len() > SNIPPET_BYTES {
                let expected = format!("at most {SNIPPET_BYTES} bytes");
                return Err(ProxmoxProblem::custom(part, expected, "more").into());
            }
            *content = Some(bytes.into());
        }
        let [user, network, meta, vendor] = contents;
        Ok(Custom { user, network, meta, vendor })
    }

    /// A part of a record in a file beside the configurations, with the files that it names.
    fn part(&mut self, files: &Path, name: &str) -> Result<Option<serde_json::Value>, Fault> {
        let part = part(files, name, |path| self.seen.push((path.to_owned(), print(path))));
        let part = part.map_err(|error| match error {
            PartError::Io { path, expected, error } => Fault::Io(FeedError::Io { path, expected, error }),
            wrong @ PartError::File { .. } => ProxmoxProblem::from(wrong).into(),
        })?;
        self.hash.update(part.as_ref().map_or_else(String::new, ToString::to_string));
        self.hash.update([0]);
        Ok(part)
    }
}

/// The name of the cluster in corosync.conf, within `totem`.
fn cluster_of(text: &str) -> Option<&str> {
    let mut sections = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_suffix('{') {
            sections.push(section.trim());
        } else if line == "}" {
            sections.pop();
        } else if sections == ["totem"]
            && let Some((key, value)) = line.split_once(':')
            && key.trim() == "cluster_name"
        {
            return Some(value.trim()).filter(|name| !name.is_empty());
        }
    }
    None
}

/// A generation that is another one for any other content. JSON numbers are exact up to 2⁵³.
fn generation(digest: VmDigest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 12
}

// VMs that arrive by live migration: QEMU and its taps run on this node while the configuration is still at the node
// that the VM leaves. qemu-server moves the file when the VM runs here.

/// Most nodes of a cluster that are asked for a configuration. Proxmox VE supports fewer.
const NODES: usize = 128;
/// Devices of the network namespace of the thread that reads it (proc_net(5)): two lines of heads, then a line for each
/// device, with its name before a colon.
const DEVICES: &str = "/proc/thread-self/net/dev";

/// Returns the numbers of the VMs whose taps are in the agent's network namespace.
///
/// # Errors
/// The devices cannot be read.
pub(super) fn with_taps() -> io::Result<BTreeSet<u32>> {
    Ok(of_devices(&std::fs::read_to_string(DEVICES)?))
}

fn of_devices(lines: &str) -> BTreeSet<u32> {
    lines
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter_map(|(name, _)| vmid_of_tap(name.trim()))
        .collect()
}

/// The number of the VM that a tap belongs to: `tap<vmid>i<n>`.
fn vmid_of_tap(name: &str) -> Option<u32> {
    let (digits, nic) = name.strip_prefix("tap")?.split_once('i')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let vmid = digits.parse().ok().filter(|vmid: &u32| (1..=VMID_MOST).contains(vmid))?;
    (is_number(nic) && vmid.to_string() == digits).then_some(vmid)
}

/// Returns the configuration of a VM at another node of the cluster, `nodes/NODE/qemu-server` beside this node's
/// directory, or at this one by now; `None` if no node has one.
///
/// # Errors
/// A node's directory cannot be read, so it is unknown whether it has one.
pub(super) fn elsewhere(directory: &Path, vmid: u32) -> io::Result<Option<PathBuf>> {
    let Some(cluster) = directory.parent() else { return Ok(None) };
    let nodes = match std::fs::read_dir(cluster.join("nodes")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        nodes => nodes?,
    };
    let name = format!("{vmid}.conf");
    // This node comes last: a file that moves here during the search would be found nowhere.
    let nodes = nodes.take(NODES).map(|node| node.map(|node| node.path().join("qemu-server")));
    for place in nodes.chain([Ok(directory.to_owned())]) {
        let path = place?.join(&name);
        if path.try_exists()? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::{cluster_of, elsewhere, of_devices, vmid_of_tap, with_taps, within};

    #[test]
    fn the_clusters_name_is_that_of_its_section() {
        let text = "logging {\n  cluster_name: no\n}\n\ntotem {\n  cluster_name: prod-1\n  interface {\n    \
                    linknumber: 0\n  }\n}\n";
        assert_eq!(cluster_of(text), Some("prod-1"));
        for text in
            ["", "cluster_name: x", "totem {\n}\ncluster_name: x", "totem {\n cluster_name:\n}", "}}{"]
        {
            assert_eq!(cluster_of(text), None, "{text}");
        }
    }

    #[test]
    fn work_that_waits_without_end_is_left_alone() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let (answer, no_answer) = mpsc::channel::<()>();
        assert!(within(Duration::from_millis(1), move || no_answer.recv()).is_none());
        drop(answer);
    }

    #[test]
    fn a_tap_names_its_vm() {
        for (name, vmid) in [
            ("tap100i0", Some(100)),
            ("tap999999999i31", Some(999_999_999)),
            ("tap0100i0", None),
            ("tap0i0", None),
            ("tap1000000000i0", None),
            ("tap100", None),
            ("tap100i", None),
            ("tap100ix", None),
            ("fwpr100p0", None),
            ("tapi0", None),
        ] {
            assert_eq!(vmid_of_tap(name), vmid, "{name}");
        }
    }

    #[test]
    fn vms_are_found_by_the_devices_of_the_namespace() {
        let devices =
            "Inter-|   Receive\n face |bytes\n    lo:       0\ntap101i0: 12\ntap101i1:0\n tap7i0: 1\n";
        assert_eq!(of_devices(devices), [7, 101].into());
        with_taps().expect("the kernel's list can be read");
    }

    #[test]
    fn a_configuration_is_found_at_whichever_node_has_it() {
        let cluster = tempfile::tempdir().expect("a directory");
        let own = cluster.path().join("qemu-server");
        let elsewhere = |vmid| elsewhere(&own, vmid).expect("readable");
        assert_eq!(elsewhere(100), None, "not a cluster");
        let there = cluster.path().join("nodes/b/qemu-server");
        std::fs::create_dir_all(cluster.path().join("nodes/a")).expect("a node");
        std::fs::create_dir_all(&there).expect("a node");
        assert_eq!(elsewhere(100), None);
        std::fs::write(there.join("100.conf"), "").expect("written");
        assert_eq!(elsewhere(100), Some(there.join("100.conf")));
        assert_eq!(elsewhere(10), None);
        std::fs::create_dir(&own).expect("a directory");
        std::fs::write(own.join("10.conf"), "").expect("moved here");
        assert_eq!(elsewhere(10), Some(own.join("10.conf")));
    }

    #[test]
    fn a_node_that_cannot_be_read_is_no_node_without_the_vm() {
        let cluster = tempfile::tempdir().expect("a directory");
        std::fs::write(cluster.path().join("nodes"), "").expect("a file in place of the directory");
        elsewhere(&cluster.path().join("qemu-server"), 100).expect_err("nothing is known");
    }
}
