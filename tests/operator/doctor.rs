//! Tests that `xdp-imds doctor` reports a fault of a node with its remedy, and leaves nothing behind.

use anyhow::{Context as _, Result, ensure};
use aya::programs::{Xdp, XdpMode};
use metadata_signer::Algorithm;
use metadata_user::agent::preflight::REFUSALS;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use support::agent::{self, Agent, PortArgument};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::Identity;
use support::tap::{Shape, Tap};

/// A command that mounts a bpffs in a private mount namespace, and then runs a program there. Its first argument is the
/// mount point, and the other arguments are the program with its own arguments.
const ON_BPFFS: [&str; 7] = [
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "sh",
    "-ec",
    "mount -t bpf bpf \"$1\" && shift && exec \"$@\"",
];

/// A node for `doctor` to check, with a tap and the directories of an agent.
struct Patient {
    host: Host,
    tap: Tap,
    room: tempfile::TempDir,
    run: String,
}

impl Patient {
    fn new() -> Self {
        let host = Host::new().expect("a node");
        let tap = Tap::create(host.ns(), "tap0", Shape::virtio()).expect("a tap");
        host.ns().ip("link set tap0 master br0 up").expect("it comes up");
        let room = tempfile::tempdir().expect("a directory");
        for directory in ["records", "state", "run", "pins"] {
            let path = room.path().join(directory);
            fs::create_dir(&path).expect("a directory");
            fs::set_permissions(&path, Permissions::from_mode(0o700)).expect("its mode");
        }
        Identity::of(0).write(&room.path().join("records"), 1).expect("a record");
        let run = room.path().join("run").display().to_string();
        Self { host, tap, room, run }
    }

    fn path(&self, name: &str) -> String {
        self.room.path().join(name).display().to_string()
    }

    /// Runs `doctor` for one port on this node. `by` is a command, with arguments, that executes `doctor`; if it is
    /// empty, `doctor` runs directly.
    fn run_doctor(&self, by: &[&str], port: &str) -> Report {
        self.run_doctor_with(by, port, &["--pins", &self.path("pins")])
    }

    fn run_doctor_with(&self, by: &[&str], port: &str, more: &[&str]) -> Report {
        let output = self.doctor_output(by, port, more, &self.run);
        Report::read(&output).unwrap_or_else(|error| panic!("{by:?} {more:?}: {error:#}"))
    }

    fn doctor_output(&self, by: &[&str], port: &str, more: &[&str], run: &str) -> Output {
        let mut words: Vec<String> = by.iter().map(|&word| word.to_owned()).collect();
        words.push(agent::binary().expect("the agent").display().to_string());
        words.extend(["doctor", "--json", "--port", port].map(str::to_owned));
        for (option, directory) in
            [("--records", self.path("records")), ("--state", self.path("state")), ("--run", run.to_owned())]
        {
            words.extend([option.to_owned(), directory]);
        }
        words.extend(more.iter().map(|&word| word.to_owned()));
        self.host.ns().output(Command::new(&words[0]).args(&words[1..])).expect("it runs")
    }

    /// Runs `doctor` like [`Patient::run_doctor`], with a bpffs mounted at the directory of pins.
    fn run_doctor_with_bpffs(&self, by: &[&str], port: &str) -> Report {
        let pins = self.path("pins");
        let before: Vec<&str> = ON_BPFFS.into_iter().chain(["sh", &pins]).chain(by.iter().copied()).collect();
        self.run_doctor(&before, port)
    }
}

/// The exit code of `doctor`, and its checks.
#[derive(Debug)]
struct Report {
    code: Option<i32>,
    checks: Vec<Finding>,
}

#[derive(Debug, serde::Deserialize)]
struct Finding {
    name: String,
    subject: Option<String>,
    status: String,
    found: String,
    #[serde(default)]
    expected: String,
    #[serde(default)]
    remedy: String,
}

impl Report {
    fn read(output: &Output) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Document {
            schema: String,
            checks: Vec<Finding>,
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let document: Document =
            serde_json::from_slice(&output.stdout).with_context(|| format!("no report: {stderr}"))?;
        ensure!(document.schema == "doctor/1", "a report of schema {}", document.schema);
        Ok(Self { code: output.status.code(), checks: document.checks })
    }

    fn failed(&self) -> Vec<&str> {
        self.checks.iter().filter(|check| check.status == "fail").map(|check| check.name.as_str()).collect()
    }

    /// Asserts that the check with this name fails, and that it contains these words.
    fn assert_failure(&self, name: &str, words: &[&str]) {
        self.assert_failure_with(1, name, words);
    }

    fn assert_failure_with(&self, code: i32, name: &str, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        let check = self.checks.iter().find(|check| check.name == name && check.status == "fail");
        let Some(Finding { subject, found, expected, remedy, .. }) = check else {
            panic!("`{name}` does not fail, but {:?}", self.failed());
        };
        let text = format!("{} {found} {expected} {remedy}", subject.as_deref().unwrap_or_default());
        for word in words {
            assert!(text.contains(word), "{name}: no `{word}` in: {text}");
        }
    }
}

#[privileged::test]
fn no_check_fails_on_a_healthy_node_and_doctor_leaves_nothing_behind() {
    let patient = Patient::new();
    let links = || patient.host.ns().links().expect("the list of links");
    let files = || all_paths(patient.room.path());
    let before = (links(), files());
    let report = patient.run_doctor_with_bpffs(&[], "tap0");
    assert_eq!((report.code, report.failed()), (Some(0), Vec::new()), "{report:#?}");
    assert!(
        report.checks.iter().any(|check| check.name == "rehearsal" && check.status == "ok"),
        "{report:#?}"
    );
    let port = report.checks.iter().find(|check| check.subject.as_deref() == Some("tap0"));
    assert!(port.is_some_and(|port| port.found.contains("on bridge br0")), "{report:#?}");
    assert_eq!((links(), files()), before);
    assert_eq!(patient.tap.name(), "tap0");
}

/// Returns the paths of all files and directories below a directory.
fn all_paths(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).expect("it can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(all_paths(&path));
        }
        found.insert(path.display().to_string());
    }
    found
}

#[privileged::test]
fn a_missing_capability_is_reported_with_its_purpose() {
    let patient = Patient::new();
    let cases = [
        ("net_raw", "capability.net_raw", "AF_XDP"),
        ("net_admin", "capability.net_admin", "XDP programs"),
        ("sys_admin", "capability.sys_admin", "namespaces"),
    ];
    for (capability, check, what_for) in cases {
        let without = [format!("--bounding-set=-{capability}"), format!("--inh-caps=-{capability}")];
        let report = patient.run_doctor(&["setpriv", &without[0], &without[1]], "tap0");
        let name = format!("CAP_{}", capability.to_uppercase());
        report
            .assert_failure(check, &[&name, "the bounding set lacks it", what_for, "CapabilityBoundingSet="]);
        // Without the capability, `doctor` cannot test some kernel features. It must not report them as missing.
        let kernel = report.failed().iter().filter(|name| name.starts_with("kernel.")).count();
        assert_eq!(kernel, 0, "{capability}: {report:#?}");
    }
}

#[privileged::test]
fn an_unmounted_or_read_only_bpffs_is_reported() {
    let patient = Patient::new();
    patient
        .run_doctor(&[], "tap0")
        .assert_failure("pins.bpffs", &[&patient.path("pins"), "mount -t bpf", "--no-pins"]);
    let read_only = "mount -t bpf bpf \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
    let pins = patient.path("pins");
    let by: Vec<&str> = ON_BPFFS[..6].iter().copied().chain([read_only, "sh", &pins]).collect();
    patient.run_doctor(&by, "tap0").assert_failure("pins.bpffs", &["read-only", "remount,rw"]);
    let without = patient.run_doctor_with(&[], "tap0", &["--no-pins"]);
    assert_eq!(without.code, Some(0), "{without:#?}");
}

#[privileged::test]
fn an_xdp_program_on_the_tap_is_reported_with_its_name_and_id() {
    let patient = Patient::new();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
    let mut object = aya::Ebpf::load_file(file).expect("the object");
    // No agent attaches the program `hub` to a port: it stands on a device of a hub, and must stay there.
    let program: &mut Xdp = object.program_mut("hub").expect("a program").try_into().expect("an XDP program");
    program.load().expect("loaded");
    let number = program.info().expect("its number").id();
    patient.host.ns().run_in(|| program.attach("tap0", XdpMode::Driver)).expect("attached");
    let report = patient.run_doctor(&[], "tap0");
    report.assert_failure("port.xdp", &["tap0", "`hub`", &number.to_string(), "has to stay"]);
}

#[privileged::test]
fn a_tap_in_another_namespace_is_found_and_the_remedy_names_it() {
    let patient = Patient::new();
    let pod = Namespace::new("pod").expect("a namespace");
    // Tests run at the same time, so each needs a tap name of its own.
    let name = format!("far{}", std::process::id());
    let _tap = Tap::create(&pod, &name, Shape::virtio()).expect("a tap");
    let port = format!("port: {{ifname: {name}, netns: {}}}", pod.name());
    patient
        .run_doctor(&[], &name)
        .assert_failure("port.device", &[&format!("in namespace {}", pod.name()), &port]);
    let there = patient.run_doctor_with_bpffs(&[], &format!("{name}@{}", pod.name()));
    assert_eq!(there.code, Some(0), "{there:#?}");
    let back = format!("tap0@{}", pod.name());
    patient
        .run_doctor(&[], &back)
        .assert_failure("port.device", &["agent's own namespace", "port: {ifname: tap0}"]);
}

/// A process in a network namespace of its own, which has no name and contains a tap.
struct Nameless(Child);

impl Nameless {
    fn new(tap: &str) -> Result<Self> {
        let script = format!("ip tuntap add {tap} mode tap && exec sleep 120");
        let mut child = Command::new("unshare")
            .args(["--net", "sh", "-ec", &script])
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start a process")?;
        let process = format!("/proc/{}", child.id());
        let there = || {
            let text = fs::read_to_string(format!("{process}/net/dev"))?;
            ensure!(text.contains(tap), "no {tap} in {text}");
            let name = fs::read_to_string(format!("{process}/comm"))?;
            ensure!(name.trim_end() == "sleep", "the process is still {name}");
            Ok(())
        };
        if let Err(error) = support::eventually(std::time::Duration::from_secs(10), there) {
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        Ok(Self(child))
    }
}

impl Drop for Nameless {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("cannot end process {}: {error}", self.0.id());
        }
    }
}

#[privileged::test]
fn a_tap_in_an_unnamed_namespace_is_found_through_a_process_in_it() {
    let patient = Patient::new();
    let name = format!("lost{}", std::process::id());
    let pod = Nameless::new(&name).expect("a namespace");
    let (pid, path) =
        (format!("process {}, sleep", pod.0.id()), format!("netns: /proc/{}/ns/net}}", pod.0.id()));
    patient.run_doctor(&[], &name).assert_failure("port.device", &[&name, &pid, &path]);
}

#[privileged::test]
fn the_features_of_a_kernel_count_and_its_version_does_not() {
    let patient = Patient::new();
    let features = |report: Report| -> Vec<(String, String)> {
        assert_eq!((report.code, report.failed()), (Some(0), Vec::new()), "{report:#?}");
        let of_kernel = |name: &str| name.starts_with("kernel.") && name != "kernel.version";
        let checks = report.checks.into_iter().filter(|check| of_kernel(&check.name));
        checks.map(|check| (check.name, check.status)).collect()
    };
    let pretended = patient.run_doctor_with_bpffs(&["setarch", "--uname-2.6"], "tap0");
    let version = pretended.checks.iter().find(|check| check.name == "kernel.version").expect("a check");
    assert!(version.status == "ok" && version.found.contains("Linux 2.6."), "{version:?}");
    assert_eq!(features(pretended), features(patient.run_doctor_with_bpffs(&[], "tap0")));
}

#[privileged::test]
fn a_low_limit_on_open_files_is_reported_with_the_number_needed() {
    let patient = Patient::new();
    for limit in [24, 64] {
        let limits = format!("--nofile={limit}:{limit}");
        let report = patient.run_doctor(&["prlimit", &limits], "tap0");
        report.assert_failure(
            "limit.open_files",
            &[&format!("RLIMIT_NOFILE is {limit}"), "82 for one port", "LimitNOFILE="],
        );
    }
}

#[privileged::test]
fn an_agent_without_a_capability_names_doctor_and_has_the_code_of_a_missing_permission() {
    let patient = Patient::new();
    for capability in ["net_raw", "net_admin", "sys_admin", "ipc_lock"] {
        let words = agent::arguments(&patient.room.path().join("records"), &[]);
        // With less locked memory than frames take, so that `ipc_lock` is needed on any machine.
        let mut command = Command::new("prlimit");
        command.args(["--memlock=65536:65536", "setpriv"]);
        command.arg(format!("--bounding-set=-{capability}")).arg(format!("--inh-caps=-{capability}"));
        command.arg(agent::binary().expect("the agent")).args(words);
        let output = patient.host.ns().output(&mut command).expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("run `xdp-imds doctor`"), "{capability}: {text}");
        assert_eq!(output.status.code(), Some(6), "{capability}: {text}");
    }
}

#[privileged::test]
fn a_served_port_is_no_problem_for_its_agent_but_fails_for_another() {
    let mut patient = Patient::new();
    let records = patient.room.path().join("records");
    let elsewhere = std::mem::replace(&mut patient.run, records.join("run").display().to_string());
    let port = PortArgument::new("tap0", Identity::of(0).mac);
    let agent = Agent::start(patient.host.ns(), &records, &[port]).expect("an agent");
    // As kubelet makes directories.
    for directory in ["state".into(), patient.run.clone()] {
        fs::set_permissions(patient.room.path().join(directory), Permissions::from_mode(0o755))
            .expect("its mode");
    }
    let report = patient.run_doctor_with(&[], "tap0", &["--no-pins"]);
    assert_eq!(report.code, Some(0), "{report:#?}");
    let its =
        |name: &str| report.checks.iter().find(|check| check.name == name).map(|check| check.found.clone());
    let pid = format!("process {}", agent.pid());
    assert!(its("agent").is_some_and(|found| found.contains(&pid)), "{report:#?}");
    assert!(its("port").is_some_and(|found| found.contains("steered by the running agent")), "{report:#?}");
    // The kernel and the limits are this machine's.
    let is_ours = |check: &&Finding| !["kernel.", "limit."].iter().any(|of| check.name.starts_with(of));
    let warned: Vec<_> = report.checks.iter().filter(|check| check.status != "ok").filter(is_ours).collect();
    assert!(warned.is_empty(), "a healthy node is clean: {warned:#?}");
    let stranger =
        Report::read(&patient.doctor_output(&[], "tap0", &["--no-pins"], &elsewhere)).expect("a report");
    stranger.assert_failure("port.xdp", &["another xdp-imds"]);
    stranger.assert_failure("hub", &["another agent"]);
}

#[test]
fn missing_needs_of_the_kubevirt_feed_are_reported() {
    let room = tempfile::tempdir().expect("a directory");
    let [file, token, kubeconfig] = ["config.yaml", "token", "kubeconfig"].map(|name| room.path().join(name));
    let doctor = |options: serde_json::Value| {
        fs::write(&file, serde_json::json!({"kubevirt": options}).to_string()).expect("written");
        let mut command = Command::new(agent::binary().expect("the agent"));
        for variable in ["NODE_NAME", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"] {
            command.env_remove(variable);
        }
        let output = command.args(["doctor", "--json", "--config"]).arg(&file).output().expect("it runs");
        Report::read(&output).expect("a report")
    };
    let report = doctor(serde_json::json!({"kubelet": "/nonexistent", "cgroups": "/nonexistent2"}));
    report.assert_failure("kubevirt.node", &["kubevirt.node", "NODE_NAME"]);
    report.assert_failure("kubevirt.api", &["KUBERNETES_SERVICE_HOST", "kubeconfig"]);
    report.assert_failure("kubevirt.kubelet", &["/nonexistent/pods"]);
    let cgroups = report.checks.iter().find(|check| check.name == "kubevirt.cgroups").expect("a check");
    assert_eq!((&*cgroups.status, cgroups.found.contains("/nonexistent2")), ("warn", true), "{cgroups:?}");

    // A kubeconfig whose token file is missing, then empty, then valid.
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://192.0.2.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"tokenFile": token}}],
    });
    fs::write(&kubeconfig, config.to_string()).expect("written");
    fs::create_dir(room.path().join("pods")).expect("a directory");
    let missing = serde_json::json!({"node": "n1", "kubeconfig": "/nonexistent/config"});
    let said = "kubevirt.kubeconfig: cannot read /nonexistent/config: No such file";
    doctor(missing).assert_failure("kubevirt.api", &[said]);
    let options = serde_json::json!({"node": "n1", "kubelet": room.path(), "cgroups": room.path(), "kubeconfig": kubeconfig});
    let named = token.display().to_string();
    doctor(options.clone()).assert_failure("kubevirt.api", &[&named]);
    fs::write(&token, "\n").expect("written");
    doctor(options.clone()).assert_failure("kubevirt.api", &[&named, "nothing"]);
    fs::write(&token, "abc\n").expect("written");
    let report = doctor(options);
    let well =
        report.checks.iter().filter(|check| check.name.starts_with("kubevirt.") && check.status == "ok");
    assert_eq!(well.count(), 4, "{report:#?}");
}

#[test]
fn an_unusable_configuration_fails_its_check_and_a_wrong_option_exits_with_2() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join("config.yaml");
    fs::write(&file, "hub: x\nlimit: {}\n").expect("written");
    let doctor = |words: &[&str]| {
        let mut command = Command::new(agent::binary().expect("the agent"));
        command.arg("doctor").args(words).output().expect("it runs")
    };
    let output = doctor(&["--json", "--config", &file.display().to_string()]);
    let report = Report::read(&output).expect("a report");
    report.assert_failure("configuration", &["config.yaml:2:1: limit: "]);
    let named = ["directory", "pins", "port", "records"];
    let unknown: Vec<_> = report
        .checks
        .iter()
        .filter(|check| check.name.split('.').next().is_some_and(|name| named.contains(&name)))
        .collect();
    assert!(unknown.is_empty(), "nothing is known of what it names: {unknown:?}");
    assert_eq!(doctor(&["--no-such-option"]).status.code(), Some(2));
}

/// A reason for which `serve` does not start.
struct Refused {
    /// What is wrong.
    what: &'static str,
    /// The lines of the configuration that differ from a good one; `PATH` stands for the room's directory.
    lines: &'static str,
    /// Spoils the room further.
    spoil: fn(&Path),
    /// The check of `doctor` that fails.
    check: &'static str,
    /// Words that `serve` and this check must have.
    word: &'static str,
    /// Whether the kernel must allow everything up to the refusal. The others are refused before anything changes.
    late: bool,
}

const NOTHING: fn(&Path) = |_| {};

/// Every reason for which `serve` does not start that does not depend on the kernel's version.
const REFUSED: [Refused; 24] = {
    const fn early(
        what: &'static str,
        lines: &'static str,
        check: &'static str,
        word: &'static str,
    ) -> Refused {
        Refused { what, lines, spoil: NOTHING, check, word, late: false }
    }
    const fn spoilt(refused: Refused, spoil: fn(&Path)) -> Refused {
        Refused { spoil, ..refused }
    }
    const fn late(refused: Refused) -> Refused {
        Refused { late: true, ..refused }
    }
    [
        early("a malformed file", "ports: [", "configuration", "config.yaml"),
        early("an unknown field", "limit: {}", "configuration", "limit"),
        early("a value out of range", "hub: ''", "configuration", "hub"),
        early(
            "an unknown log level",
            "log: verbose",
            "configuration",
            "off, error, warn, info, debug, trace",
        ),
        early("no source", "records: null", "configuration.sources", "no records to serve"),
        early("a page without an address", "page: true", "configuration.page", "metrics: ADDR:PORT"),
        early("an unknown group", "api: {group: no-such-group}", "api.group", "no-such-group"),
        early("a metrics address of another node", "metrics: 192.0.2.1:9253", "metrics", "192.0.2.1:9253"),
        early("a metrics port in use", "metrics: 127.0.0.1:PORT", "metrics", "in use"),
        spoilt(early("an open token key", "token_key: PATH/key", "token_key", "0644"), |path| {
            fs::write(path.join("key"), "").expect("written");
            fs::set_permissions(path.join("key"), Permissions::from_mode(0o644)).expect("its mode");
        }),
        spoilt(
            early("a token key that is none", "token_key: PATH/key", "token_key", "something else"),
            |path| {
                fs::write(path.join("key"), "no key").expect("written");
                fs::set_permissions(path.join("key"), Permissions::from_mode(0o600)).expect("its mode");
            },
        ),
        spoilt(early("an open key in the state directory", "", "token_key", "0640"), |path| {
            fs::write(path.join("state/token.key"), "").expect("written");
            fs::set_permissions(path.join("state/token.key"), Permissions::from_mode(0o640))
                .expect("its mode");
        }),
        early("an audit log in a missing directory", "audit: {to: PATH/no/audit.log}", "audit", "PATH/no"),
        early("a directory as audit log", "audit: {to: PATH/state}", "audit", "directory"),
        spoilt(early("a file as state directory", "state: PATH/file", "directory", "PATH/file"), |path| {
            fs::write(path.join("file"), "").expect("written");
        }),
        spoilt(early("a file as run directory", "run: PATH/file", "directory", "PATH/file"), |path| {
            fs::write(path.join("file"), "").expect("written");
        }),
        spoilt(early("an open run directory", "", "directory", "777"), |path| {
            fs::set_permissions(path.join("run"), Permissions::from_mode(0o777)).expect("its mode");
        }),
        early(
            "no keys of the issuer",
            "identity: {issuer: 'https://a.example', keys: PATH/no-keys}",
            "identity.keys",
            "no-keys",
        ),
        spoilt(
            early(
                "no key for the algorithm",
                "identity: {issuer: 'https://a.example', algorithm: RS256, keys: PATH/keys}",
                "identity.keys",
                "openssl genpkey -algorithm RSA",
            ),
            |path| {
                let now = 1_795_428_000;
                metadata_signer::directory::make(&path.join("keys"), Algorithm::Es256, now).expect("a key");
            },
        ),
        late(early("a missing directory of records", "records: PATH/no-records", "directory", "no-records")),
        late(spoilt(
            early("a file as directory of records", "records: PATH/file", "directory", "PATH/file"),
            |path| {
                fs::write(path.join("file"), "").expect("written");
            },
        )),
        late(early("pins outside a bpffs", "pins: PATH/pins", "pins.bpffs", "PATH/pins")),
        late(early("a hub whose device is another's", "hub: other", "hub", "other-")),
        late(early(
            "a missing directory of kubelet",
            "kubevirt: {node: n1, watch: false, kubelet: PATH/no-kubelet}",
            "kubevirt.kubelet",
            "no-kubelet",
        )),
    ]
};

#[privileged::test]
fn doctor_reports_each_refusal_of_serve() {
    let host = Host::new().expect("a node");
    host.ns().ip("link add other-in type bridge").expect("a device of another program");
    // Where the early refusals are: without this capability an agent that refuses nothing still changes nothing.
    let limited = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"];
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("its address").port().to_string();
    for Refused { what, lines, spoil, check, word, late } in REFUSED {
        let room = tempfile::tempdir().expect("a directory");
        for directory in ["records", "state", "run", "pins"] {
            fs::create_dir(room.path().join(directory)).expect("a directory");
            fs::set_permissions(room.path().join(directory), Permissions::from_mode(0o700))
                .expect("its mode");
        }
        spoil(room.path());
        let path = room.path().display().to_string();
        let fill = |text: &str| text.replace("PATH", &path).replace("PORT", &port);
        let good = ["records: PATH/records", "state: PATH/state", "run: PATH/run", "pins: null", "log: warn"];
        let is_replaced = |line: &&&str| lines.split(':').next() == line.split(':').next();
        let good: Vec<_> = good.iter().filter(|line| !is_replaced(line)).copied().collect();
        let file = room.path().join("config.yaml");
        fs::write(&file, fill(&format!("{}\n{lines}\n", good.join("\n")))).expect("written");
        let word = if word == "metrics: ADDR:PORT" { word.to_owned() } else { fill(word) };
        let run = |verb: &[&str]| {
            let mut command = Command::new("timeout");
            command
                .arg("60")
                .args(if late { &[][..] } else { &limited })
                .arg(agent::binary().expect("the agent"));
            command.args(verb).arg("--config").arg(&file).stdin(Stdio::null());
            for variable in ["NODE_NAME", "KUBERNETES_SERVICE_HOST", "XDP_IMDS_LOG"] {
                command.env_remove(variable);
            }
            if late { host.ns().output(&mut command) } else { command.output().context("it runs") }
                .expect("it runs")
        };
        let served = run(&["serve"]);
        let said = String::from_utf8_lossy(&served.stderr);
        assert!(
            served.status.code() == Some(1) && said.contains(&word),
            "serve, {what}: no `{word}` in: {said}"
        );
        let report =
            Report::read(&run(&["doctor", "--json"])).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let of_it = |found: &&Finding| found.name == check && found.status == "fail";
        let texts: Vec<_> = report.checks.iter().filter(of_it).map(|found| format!("{found:?}")).collect();
        assert!(
            texts.iter().any(|text| text.contains(&word)),
            "doctor, {what}: no `{word}` in {texts:?} of {:?}",
            report.failed()
        );
    }
    let named: BTreeSet<_> = REFUSED.iter().map(|refused| refused.check).collect();
    for name in REFUSALS {
        assert!(named.contains(name), "no case has the refusal {name}");
    }
}

#[test]
fn two_records_for_one_mac_or_vm_are_reported() {
    let room = tempfile::tempdir().expect("a directory");
    let (one, other) = (Identity::of(0), Identity::of(1));
    let text = |identity: &Identity| identity.record(1);
    fs::write(room.path().join("a.yaml"), text(&one)).expect("written");
    fs::write(room.path().join("b.yaml"), text(&one)).expect("written");
    fs::write(room.path().join("c.yaml"), text(&other)).expect("written");
    let output = Command::new(agent::binary().expect("the agent"))
        .args(["doctor", "--json", "--port", &format!("no-such-tap={}", one.mac), "--records"])
        .arg(room.path())
        .output()
        .expect("it runs");
    let report = Report::read(&output).expect("a report");
    if report.checks.len() == 1 {
        return; // An ordinary user is told to be root.
    }
    report.assert_failure("records.mac", &["b.yaml", &one.mac.to_string(), "a.yaml"]);
    let vm = report.checks.iter().find(|check| check.name == "records.vm").expect("a check");
    assert!(vm.status == "warn" && vm.found.contains("a.yaml and b.yaml"), "{vm:?}");
}

#[privileged::test]
fn an_ordinary_user_is_told_to_be_root_and_nothing_else() {
    let binary = agent::binary().expect("the agent");
    // The program's own directory may be closed to others.
    let room = tempfile::tempdir().expect("a directory");
    fs::set_permissions(room.path(), Permissions::from_mode(0o755)).expect("its mode");
    let copy = room.path().join("xdp-imds");
    // By a program of its own: a file that this one has open for writing cannot be run meanwhile (ETXTBSY).
    let copied = Command::new("cp").arg(&binary).arg(&copy).status().expect("cp runs");
    assert!(copied.success(), "{copied}");
    let words = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let doctor = |more: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(words).arg(&copy).arg("doctor").args(more).current_dir("/").output().expect("it runs")
    };
    let report = Report::read(&doctor(&["--json"])).expect("a report");
    assert_eq!(report.checks.len(), 1, "{report:#?}");
    let words = ["user 65534", "Run as root", "sudo xdp-imds doctor", "nothing else"];
    report.assert_failure_with(6, "user", &words);
    let output = doctor(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("FAIL  user: ") && output.status.code() == Some(6), "{text}");
}

#[privileged::test]
fn without_a_source_doctor_reads_the_configuration_of_the_service() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join("config.yaml");
    fs::write(&file, "records: /nonexistent/of-the-service\n").expect("written");
    // A mount namespace in which /etc is this directory's.
    let script = "mount -t tmpfs tmpfs /etc && mkdir /etc/xdp-imds && cp \"$1\" /etc/xdp-imds/ && shift && exec \"$@\"";
    let doctor = |more: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", script, "sh"]).arg(&file);
        command.arg(agent::binary().expect("the agent")).args(["doctor", "--json"]).args(more);
        Report::read(&command.output().expect("it runs")).expect("a report")
    };
    let report = doctor(&[]);
    report.assert_failure("directory", &["/nonexistent/of-the-service"]);
    let check = report.checks.iter().find(|check| check.name == "configuration").expect("a check");
    assert!(check.found.contains("/etc/xdp-imds/config.yaml can be used"), "{check:?}");
    // An option that names no source overrides the file.
    let state = room.path().display().to_string();
    let with_state = doctor(&["--state", &state]);
    with_state.assert_failure("directory", &["/nonexistent/of-the-service"]);
    assert!(with_state.checks.iter().any(|check| check.found.contains(&state)), "{with_state:#?}");
    // With a source, it checks what `serve` would do with that option.
    let other = doctor(&["--records", &room.path().display().to_string()]);
    assert!(!other.checks.iter().any(|check| check.found.contains("of-the-service")), "{other:#?}");
}
