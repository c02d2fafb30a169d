//! Configurations in, records out; and the feed over a directory.

mod documents;
mod records;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_content::record::{Record, RecordLimits};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::watch::{ProxmoxHealth, watch_every};
use super::{
    ProxmoxOptions, ProxmoxProblem, ProxmoxTranslation, TranslationInput, VmConfig, check, translate,
};
use crate::FeedEvent;
use crate::check::CheckStatus::{Fail, Ok as Good, Warn};
use crate::publisher::Publisher;

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

// The feed over a directory that stands for `/etc/pve`.

const LONG: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// A node and the feed on it.
struct Node {
    room: TempDir,
    options: ProxmoxOptions,
    events: mpsc::Receiver<FeedEvent>,
    outlook: Arc<ProxmoxHealth>,
}

impl Node {
    /// A node with these configurations; without its mount if there are none.
    fn start(configurations: &[(u32, &str)]) -> Self {
        let room = tempfile::tempdir().expect("a directory");
        let at = |name: &str| room.path().join(name);
        let options = ProxmoxOptions {
            directory: at("qemu-server"),
            files: at("parts"),
            storages: at("storage.cfg"),
            resolv_conf: at("resolv.conf"),
            ..ProxmoxOptions::default()
        };
        fs::create_dir(&options.files).expect("made");
        if !configurations.is_empty() {
            fs::create_dir(&options.directory).expect("made");
        }
        for (vmid, text) in configurations {
            fs::write(options.directory.join(format!("{vmid}.conf")), text).expect("written");
        }
        let (tx, events) = mpsc::channel(64);
        let outlook = Arc::new(ProxmoxHealth::new(Instant::now()));
        let feed = watch_every(
            PAUSE,
            options.clone(),
            RecordLimits::DEFAULT,
            Arc::clone(&outlook),
            Publisher::from(tx),
        );
        tokio::spawn(feed);
        Self { room, options, events, outlook }
    }

    fn path(&self, vmid: u32) -> PathBuf {
        self.options.directory.join(format!("{vmid}.conf"))
    }

    fn put(&self, path: &Path, text: &str) {
        // As Proxmox VE writes files: aside, then renamed.
        let aside = self.room.path().join("aside");
        fs::write(&aside, text).expect("written");
        fs::rename(aside, path).expect("renamed");
    }

    async fn next(&mut self) -> FeedEvent {
        timeout(LONG, self.events.recv()).await.expect("an event in time").expect("an event")
    }

    async fn record(&mut self) -> (String, Arc<Record>) {
        match self.next().await {
            FeedEvent::Upsert { key, record } => (key, record),
            other => panic!("expected a record, found {other:?}"),
        }
    }

    async fn synced(&mut self) {
        let event = self.next().await;
        assert!(matches!(event, FeedEvent::Synced), "{event:?}");
    }

    /// Waits until the state of the looks is as wanted.
    async fn until(&self, is: impl Fn(&super::watch::ProxmoxReport) -> bool) {
        let waited = timeout(LONG, async {
            while !is(&self.outlook.report(Instant::now())) {
                tokio::time::sleep(PAUSE).await;
            }
        });
        waited.await.unwrap_or_else(|_| panic!("{:?}", self.outlook.report(Instant::now())));
    }
}

#[tokio::test]
async fn vms_come_change_and_go_with_their_files() {
    let mut node = Node::start(&[(123, GUIDE), (100, "name: first\n"), (9000, "template: 1\n")]);
    assert_eq!(node.record().await.0, "100");
    let (key, first) = node.record().await;
    assert_eq!(key, "123");
    node.synced().await;

    node.put(&node.path(123), &GUIDE.replace("ubuntu2", "ubuntu3"));
    let (_, second) = node.record().await;
    assert_eq!(second.hostname.fqdn(), "ubuntu3");
    assert_ne!(first.generation, second.generation);

    // A live migration moves the file.
    fs::rename(node.path(123), node.room.path().join("moved")).expect("moved");
    assert!(matches!(node.next().await, FeedEvent::Remove { key } if key == "123"));
    fs::rename(node.room.path().join("moved"), node.path(123)).expect("back");
    assert_eq!(node.record().await.1.generation, second.generation);

    node.put(&node.path(100), "template: 1\n");
    assert!(matches!(node.next().await, FeedEvent::Remove { key } if key == "100"));
    node.put(&node.path(9000), "name: last\n");
    assert_eq!(node.record().await.0, "9000");
}

#[tokio::test]
async fn a_migration_is_announced_with_its_lock_and_withdrawn_with_it() {
    let mut node = Node::start(&[(123, GUIDE)]);
    let (_, before) = node.record().await;
    node.synced().await;
    node.put(&node.path(123), &format!("lock: migrate\n{GUIDE}"));
    let (_, migrating) = node.record().await;
    assert_eq!((before.events.len(), migrating.events.len()), (0, 1));
    assert_eq!(before.instance_id(), migrating.instance_id(), "the guest stays the same instance");
    // It failed: the file stays here, and its lock goes.
    node.put(&node.path(123), GUIDE);
    assert_eq!(node.record().await.1.events, []);
}

#[tokio::test]
async fn an_equal_file_is_published_once_and_other_files_never() {
    let mut node = Node::start(&[(100, "name: a\n")]);
    node.record().await;
    node.synced().await;
    for name in ["0100.conf", "0.conf", "100.conf.tmp.7", "x.conf", ".101.conf", "1000000000.conf"] {
        fs::write(node.options.directory.join(name), "name: b\n").expect("written");
    }
    node.put(&node.path(100), "name: a\n");
    node.put(&node.path(101), "name: c\n");
    assert_eq!(node.record().await.0, "101", "nothing else changed");
}

#[tokio::test]
async fn a_mount_that_is_away_removes_nothing() {
    let mut node = Node::start(&[]);
    node.until(|report| report.failing.is_some()).await;
    assert!(node.events.try_recv().is_err(), "nothing is known of the VMs");
    let aside = node.room.path().join("unmounted");
    fs::create_dir(&aside).expect("made");
    fs::write(aside.join("100.conf"), "name: a\n").expect("written");
    fs::rename(&aside, &node.options.directory).expect("mounted");
    node.record().await;
    node.synced().await;

    fs::rename(&node.options.directory, &aside).expect("unmounted");
    node.until(|report| report.failing.is_some()).await;
    fs::write(aside.join("101.conf"), "name: b\n").expect("written");
    fs::rename(&aside, &node.options.directory).expect("mounted");
    assert_eq!(node.record().await.0, "101", "the first VM was neither removed nor published again");
    node.until(|report| report.failing.is_none() && report.looked.is_some()).await;
}

#[tokio::test]
async fn a_cluster_without_quorum_is_reported_and_its_vms_are_served() {
    let mut node = Node::start(&[(100, "name: a\n")]);
    node.record().await;
    node.synced().await;
    let mode = |mode| fs::set_permissions(&node.options.directory, fs::Permissions::from_mode(mode));
    mode(0o555).expect("set");
    node.until(|report| report.read_only).await;
    mode(0o755).expect("set");
    node.until(|report| !report.read_only).await;
    assert!(node.events.try_recv().is_err());
}

#[tokio::test]
async fn files_beside_the_configuration_change_its_record() {
    let mut node = Node::start(&[(100, "name: a\ncicustom: user=own:snippets/u.yaml\n")]);
    let refused = node.next().await;
    let FeedEvent::Rejected { error, .. } = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("100.conf: `cicustom`, user: expected a directory"), "{error}");
    assert!(error.vm().is_some_and(|vm| vm.is_called("a")), "{error:?}");
    node.synced().await;

    let storage = node.room.path().join("own");
    fs::create_dir_all(storage.join("snippets")).expect("made");
    fs::write(storage.join("snippets/u.yaml"), "#cloud-config\n").expect("written");
    node.put(&node.options.storages, &format!("dir: own\n\tpath {}\n", storage.display()));
    let (_, first) = node.record().await;
    assert_eq!(first.user_data.as_ref().map(|payload| payload.len()), Some(14));

    node.put(&storage.join("snippets/u.yaml"), "#cloud-config\nruncmd: [ls]\n");
    let (_, second) = node.record().await;
    assert_ne!(first.instance_id(), second.instance_id());

    node.put(&node.options.files.join("defaults.yaml"), "placement: {region: eu}\n");
    assert_eq!(node.record().await.1.placement.region.as_str(), "eu");
    node.put(&node.options.files.join("100.yaml"), "user_data: {source: {file: own.txt}}\n");
    let refused = node.next().await;
    assert!(matches!(&refused, FeedEvent::Rejected { key, .. } if key == "100"), "{refused:?}");
    for text in ["one\n", "other\n"] {
        node.put(&node.options.files.join("own.txt"), text);
        let (_, record) = node.record().await;
        assert_eq!(record.user_data.as_ref().map(|payload| payload.len()), Some(text.len()));
    }
    node.put(&node.options.files.join("100.yaml"), "- no\n");
    let refused = node.next().await;
    assert!(matches!(&refused, FeedEvent::Rejected { key, .. } if key == "100"), "{refused:?}");
}

#[test]
fn the_directory_of_configurations_is_checked() {
    for (what, found, status, words) in [
        ("mounted", Ok((true, 0o755)), Good, &["/some/directory"][..]),
        (
            "not mounted",
            Err(ErrorKind::NotFound.into()),
            Fail,
            &["/some/directory does not exist", "systemctl status pve-cluster"],
        ),
        ("a file", Ok((false, 0o644)), Fail, &["/some/directory is not a directory"]),
        ("silent", Err(ErrorKind::TimedOut.into()), Fail, &["/some/directory: timed out"]),
        ("no quorum", Ok((true, 0o555)), Warn, &["read-only", "quorum", "pvecm status"]),
    ] {
        let check = check(Path::new("/some/directory"), found);
        assert_eq!((check.name, check.status), ("proxmox.directory", status), "{what}");
        let said = format!("{} {:?} {:?}", check.found, check.expected, check.remedy);
        assert!(words.iter().all(|word| said.contains(word)), "{what}: {said}");
    }
}
