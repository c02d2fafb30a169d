//! Azure's Linux agent (waagent) as shipped in Debian 11, 12 and 13 starts, reports its guest ready, and logs no error.

use anyhow::{Context as _, Result, ensure};
use metadata_common::addresses;
use metadata_content::dialect;
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::store::{Interner, Store, VmState};
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_user::service::MetadataService;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use support::agent::Agent;
use support::eventually;
use support::guest::{Guest, NIC};
use support::packages::{ESSENTIAL, Packages, With};
use support::privileged;
use support::raw::{Raw, SYN_ACK, Segment};
use support::record::Identity;
use support::scene::OneGuest;

/// waagent reports its first status within seconds; a loaded machine takes longer.
const PATIENCE: Duration = Duration::from_secs(240);
/// A VM name that is not a valid header value.
const NAME: &str = "Wéb \u{1f680}";
const WIRESERVER: &str = "168.63.129.16";

/// A guest with an on-link route to the wireserver.
fn scene(change: impl FnOnce(&mut Value)) -> OneGuest {
    let scene = OneGuest::boot(&Identity::of(0), |spec| spec);
    scene.write(1, |record| {
        record["sinks"] = json!({ "ready": format!("file:{}", scene.file("ready.jsonl").display()) });
        change(record);
    });
    scene.guest.ns().ip(&format!("route add {WIRESERVER} dev {NIC} scope link")).expect("a route");
    scene
}

fn agent(scene: &OneGuest) -> Agent<'_> {
    scene.agent_with(&["--audit", &scene.file("audit.log").to_string_lossy()])
}

/// The JSON documents of a file, one per line.
fn lines(scene: &OneGuest, name: &str) -> Result<Vec<Value>> {
    let text = fs::read_to_string(scene.file(name)).with_context(|| format!("no {name} yet"))?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// `METHOD /path status` of each request in the audit log.
fn requests(scene: &OneGuest) -> Result<Vec<String>> {
    let line = |line: &Value| {
        let [method, path] = ["method", "path"].map(|field| line[field].as_str().unwrap_or_default());
        format!("{method} {path} {}", line["status"])
    };
    Ok(lines(scene, "audit.log")?.iter().map(line).collect())
}

/// Runs a release's daemon until it has reported its status twice, then checks its requests and its log.
fn reports_ready(release: &str, version: &str, name: &str) {
    let Some(waagent) = Waagent::or_skip(release) else { return };
    assert!(waagent.version().starts_with(version), "{} is not {version}", waagent.version());
    let scene = scene(|record| {
        record["serve"] = json!({ "dialects": ["azure"] });
        record["vm"]["name"] = name.into();
        record["vm"]["project"]["id"] = name.into();
    });
    let _agent = agent(&scene);
    let directory = tempfile::tempdir().expect("a directory");
    let daemon = waagent.start(&scene.guest, directory.path()).expect("a daemon");
    let asked = eventually(PATIENCE, || {
        let asked = requests(&scene)?;
        let reports = asked.iter().filter(|line| *line == "PUT /status 201").count();
        ensure!(reports >= 2, "only {reports} reports of its status: {asked:#?}");
        Ok(asked)
    });
    let asked = asked.unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.log()));
    // The agent reads this 404 as "not supported".
    let refused: Vec<_> = asked.iter().filter(|line| !line.contains(" 20")).collect();
    assert!(refused.iter().all(|line| *line == "GET /vmSettings 404"), "{refused:#?}");
    let ready = lines(&scene, "ready.jsonl").expect("the ready report");
    let identity = scene.guest.identity();
    for part in [
        "<State>Ready</State>".to_owned(),
        format!("<ContainerId>{}</ContainerId>", identity.instance_id),
        format!("<InstanceId>{name}</InstanceId>"),
    ] {
        assert!(
            ready.iter().any(|message| message["body"].to_string().contains(&part)),
            "{part}: {ready:#?}"
        );
    }
    let complaints = daemon.complaints();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn debian_11s_agent_gets_ready_and_reports_its_status() {
    // This version sends telemetry in Latin-1 and logs an error for names with other letters.
    reports_ready("bullseye", "2.2.47", "web 1");
}

#[test]
fn debian_12s_agent_gets_ready_and_reports_its_status() {
    reports_ready("bookworm", "2.7.3", NAME);
}

#[test]
fn debian_13s_agent_gets_ready_and_reports_its_status() {
    reports_ready("trixie", "2.12", NAME);
}

/// Flags of a reset segment: SYN, ACK, FIN, RST.
const RST_ACK: (bool, bool, bool, bool) = (false, true, false, true);

#[test]
fn the_agents_port_opens_and_closes_with_the_record() {
    let responses = |dialects: Value| {
        let mut record: Value = serde_json::from_str(&Identity::of(0).record(1)).expect("a record");
        record["serve"] = json!({ "dialects": dialects });
        let record = Record::parse("test.json", &record.to_string()).expect("a record").0;
        Arc::new(dialect::render(&record, &mut Interner::new(), VmState::alone(record.vm.uuid.as_str())))
    };
    let content = Arc::new(OnDemand::new(Store::new(8)));
    let served = addresses::ALL.to_vec();
    let serve = MetadataService::new(Arc::clone(&content));
    let mut raw = Raw::new(Stack::new(StackConfig { served, ..StackConfig::default() }, serve));
    let mut expect_open = |step: &str, open: bool| {
        for (address, port) in addresses::ALL.into_iter().flat_map(|a| [(a, 32_526), (a, 32_525)]) {
            let guest: IpAddr = if address.is_ipv4() {
                [10, 0, 2, 15].into()
            } else {
                "fe80::10".parse().expect("an address")
            };
            let syn = Segment {
                source: (guest, 40_000),
                destination: (address, port),
                ..Segment::syn(40_000, 1000)
            };
            let opened = raw.send(&syn);
            let open = open && (address, port) == (addresses::AZURE_WIRESERVER.into(), 32_526);
            let expected = if open { SYN_ACK } else { RST_ACK };
            assert_eq!((opened.len(), opened[0].flags), (1, expected), "{step}: {address} port {port}");
        }
    };
    expect_open("the VM is unknown", false);
    content.store().expect(7).expect("a slot");
    expect_open("its record has not arrived", true);
    content.store().publish(7, responses(json!(["nocloud", "ec2"]))).expect("a slot");
    expect_open("azure is not one of its dialects", false);
    content.store().publish(7, responses(json!(["nocloud", "azure"]))).expect("a slot");
    expect_open("azure is one of its dialects", true);
}

#[privileged::test]
fn the_agents_port_is_closed_to_guests_without_the_azure_dialect() {
    for (dialects, open) in [(json!(["azure"]), true), (json!(["nocloud", "ec2"]), false)] {
        let scene = scene(|record| record["serve"] = json!({ "dialects": dialects }));
        let _agent = agent(&scene);
        let url = format!("http://{WIRESERVER}:32526/versions");
        let answer = scene.guest.curl(&[&url], Duration::from_secs(20));
        match answer {
            Ok(answer) => assert_eq!((open, answer.status), (true, 200), "{dialects}"),
            // An immediate reset, not a time-out.
            Err(error) => {
                assert!(!open && format!("{error:#}").contains("curl: (7)"), "{dialects}: {error:#}")
            }
        }
        let other = scene.guest.curl(&[&format!("http://{WIRESERVER}:32527/")], Duration::from_secs(20));
        assert!(format!("{:#}", other.expect_err("a port that is not served")).contains("curl: (7)"));
    }
}

// The unmodified Azure agent for Linux of any Debian release. It runs as a daemon in a guest, in a root of its
// release.

/// The agent's package, and packages of programs that it calls but does not depend on.
const PACKAGES: [&str; 5] = [ESSENTIAL, "waagent", "iproute2", "net-tools", "procps"];
/// The configuration of a host without a provisioning disk: cloud-init provisions, and the agent reports ready at once.
const CONFIGURED: &str = "
Provisioning.Agent=disabled
ResourceDisk.Format=n
";
/// Parts of warnings that the agent prints in any namespace, or outside Azure.
const AWAY: [&str; 4] = ["Unknown property: compute.", "Dhcp client is not running", "iptables", "cgroup"];
/// Limit for the daemon's run time, in seconds.
const LIFETIME: u32 = 600;
/// Makes the release's root writable by an overlay that ends with the daemon, and adds files that a kernel would
/// provide. $1 is an empty directory, $2 the root, $3 the lifetime, $4 the configuration, $5 the VM's UUID.
const BOOT: &str = r#"
    mount -t tmpfs tmpfs "$1"
    mkdir "$1/upper" "$1/work" "$1/root"
    mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$1/root"
    cd "$1/root"
    mount -t proc proc proc
    mount --bind proc/sys proc/sys
    mount -o remount,bind,ro proc/sys
    mount -t sysfs -o ro sysfs sys
    for device in null zero full random urandom; do
        : > dev/$device
        mount --bind /dev/$device dev/$device
    done
    mkdir -p run tmp var/lib var/log
    echo "127.0.0.1 localhost" > etc/hosts
    # This machine's firmware is not the guest's.
    printf '#!/bin/sh\necho %s\n' "$5" > usr/sbin/dmidecode
    chmod 755 usr/sbin/dmidecode
    # With this option the agent would write to files of this machine.
    sed -i /^OS.RootDeviceScsiTimeout/d etc/waagent.conf
    printf %s "$4" >> etc/waagent.conf
    # The agent is root in a guest, and must not be root of this machine.
    exec chroot . setpriv --bounding-set=-sys_admin,-sys_boot,-sys_module,-sys_rawio,-sys_time,-mknod \
        timeout "$3" python3 -u /usr/sbin/waagent -daemon
"#;

/// The agent's unpacked files.
#[derive(Clone, Debug)]
pub(crate) struct Waagent {
    packages: Packages,
}

impl Waagent {
    /// Returns the agent of a Debian release. Skips the test like [`Packages::or_skip`].
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub(crate) fn or_skip(release: &str) -> Option<Self> {
        let packages = Packages::or_skip(release, &PACKAGES, With::Dependencies)?;
        Some(Self { packages })
    }

    /// The version of its package.
    #[must_use]
    pub(crate) fn version(&self) -> &str {
        self.packages.version("waagent").unwrap_or("unknown")
    }

    /// Starts the daemon inside a guest. It uses the guest's network, and its own processes, mounts and host name. No
    /// other program may use `directory`.
    ///
    /// # Errors
    /// When a file cannot be written or `unshare` cannot be started.
    pub(crate) fn start(&self, guest: &Guest, directory: &Path) -> Result<Daemon> {
        let (scratch, log) = (directory.join("root"), directory.join("waagent.log"));
        fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
        let output = File::create(&log)?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--uts", "--ipc", "--pid"]);
        // When the namespace's first process ends, the kernel kills all others.
        command.args(["--fork", "--kill-child", "sh", "-ec", BOOT, "sh"]);
        command.arg(&scratch).arg(self.packages.root()).args([
            &LIFETIME.to_string(),
            CONFIGURED,
            &guest.identity().instance_id,
        ]);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = guest.ns().spawn(&mut command)?;
        Ok(Daemon { child, log })
    }
}

/// A running daemon. Dropping it ends the daemon and all its children.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Its output so far.
    #[must_use]
    pub(crate) fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The warnings and errors so far, without timestamps and without those that a namespace causes.
    #[must_use]
    pub(crate) fn complaints(&self) -> Vec<String> {
        let said = self.log();
        let complaint = |line: &str| {
            let at = ["WARNING ", "ERROR "].iter().find_map(|level| line.find(level))?;
            let is_at_home = !AWAY.iter().any(|part| line.contains(part));
            is_at_home.then(|| line[at..].to_owned())
        };
        said.lines().filter_map(complaint).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("cannot stop waagent {}: {error}", self.child.id());
        }
        if std::thread::panicking() {
            eprintln!("--- waagent's output ---\n{}\n---", self.log());
        }
    }
}
