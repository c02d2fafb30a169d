//! The agent serves with a few capabilities, as root or as any other user, and needs each of them.
//!
//! While it serves it keeps only those needed to attach and detach ports; its workers keep only `CAP_BPF`.

use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;
use support::agent::{Agent, PortArgument, arguments};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privilege::{Jail, QEMU, User, effective, status};
use support::privileged;
use support::record::Identity;
use support::tap::{Shape, Tap};

/// Capabilities that every node needs. `sys_admin` includes `bpf`; the unit file lists both, for workers on kernels
/// before 5.19.
const NEEDED: [&str; 4] = ["net_admin", "net_raw", "sys_admin", "ipc_lock"];
/// Needed for a namespace that is named by a process of another user.
const OF_PROCESSES: &str = "sys_ptrace";

const REQUEST: Duration = Duration::from_secs(2);
const NOTICE: Duration = Duration::from_secs(15);
const PATH: &str = "/v1/user-data";
const CAP_BPF: u64 = 1 << 39;

/// A pod: a namespace with a tap in it and a process of another user.
struct Pod {
    ns: Namespace,
    process: Child,
    guest: Guest,
}

impl Pod {
    fn new(identity: &Identity) -> Self {
        let ns = Namespace::new("pod").expect("a namespace");
        let tap = Tap::create(&ns, "tap", Shape::virtio()).expect("a tap");
        ns.ip("link set tap up").expect("the tap goes up");
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(identity) };
        let inside = Namespace::new("guest").expect("a namespace");
        let guest = Guest::boot_on(Arc::new(tap), inside, &spec).expect("a guest");
        let id = QEMU.to_string();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sleep", "120"]);
        let process = ns.spawn(&mut command).expect("a process");
        Self { ns, process, guest }
    }

    fn by_process(&self, identity: &Identity) -> PortArgument {
        let netns = Some(format!("/proc/{}/ns/net", self.process.id()));
        PortArgument { ifname: "tap".into(), netns, mac: Some(identity.mac) }
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let ended = self.process.kill().and_then(|()| self.process.wait());
        if let Err(error) = ended {
            eprintln!("process {} is still running: {error}", self.process.id());
        }
    }
}

/// Records that `user` owns, in a directory where it may create its state.
fn records(user: User, identities: &[&Identity]) -> tempfile::TempDir {
    let records = tempfile::tempdir().expect("a directory");
    for identity in identities {
        identity.write(records.path(), 1).expect("a record");
        set_owner(user, &identity.path(records.path()));
    }
    set_owner(user, records.path());
    records
}

fn set_owner(user: User, path: &Path) {
    chown(path, Some(user.uid()), Some(user.uid())).expect("another owner");
}

fn port_of(identity: &Identity) -> PortArgument {
    PortArgument::new(Host::tap_name(identity), identity.mac)
}

fn assert_served(guest: &Guest, agent: &Agent<'_>) {
    eventually(NOTICE, || guest.fetch_own(PATH, REQUEST).map(drop))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

#[privileged::test]
fn five_capabilities_suffice_to_serve_guests_here_and_in_pods_for_any_user() {
    let jail = Jail::new().expect("a copy of the agent");
    let mut few = NEEDED.to_vec();
    few.push(OF_PROCESSES);
    for user in [User::Root, User::PlainRoot, User::Nobody] {
        let host = Host::new().expect("a node");
        let [here, named_pod, of_process] = [0, 1, 2].map(Identity::of);
        let records = records(user, &[&here, &named_pod, &of_process]);
        let pods = [Pod::new(&named_pod), Pod::new(&of_process)];
        let ports = [
            port_of(&here),
            PortArgument::new("tap", named_pod.mac).within(&pods[0].ns),
            pods[1].by_process(&of_process),
        ];
        let start = || {
            let agent = jail.start(host.ns(), user, &few, arguments(records.path(), &ports));
            agent.unwrap_or_else(|error| panic!("{user:?}: {error:#}"))
        };
        let agent = start();
        for pod in &pods {
            assert_served(&pod.guest, &agent);
        }
        // The tap is created, deleted and created again.
        for _ in 0..2 {
            let guest = Guest::boot(&host, &Spec::of(&here)).expect("a guest");
            assert_served(&guest, &agent);
        }
        let uid = status(agent.pid(), "Uid").expect("a status");
        assert_eq!(uid.split_whitespace().next(), Some(&*user.uid().to_string()), "{user:?}");
        agent.kill().expect("it was running");
        let agent = start();
        for pod in &pods {
            assert_served(&pod.guest, &agent);
        }
        assert!(agent.stop().expect("it stops").success(), "{user:?}");
    }
}

#[privileged::test]
fn an_agent_that_lacks_a_needed_capability_names_it_and_ends() {
    let jail = Jail::new().expect("a copy of the agent");
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    for user in [User::Root, User::Nobody] {
        for missing in NEEDED {
            let records = records(user, &[&identity]);
            let rest: Vec<_> = NEEDED.into_iter().filter(|one| *one != missing).collect();
            let started =
                jail.start(host.ns(), user, &rest, arguments(records.path(), &[port_of(&identity)]));
            let error = started.map(drop).expect_err(missing);
            let expected = format!("CAP_{}", missing.to_uppercase());
            assert!(format!("{error:#}").contains(&expected), "{user:?} without {missing}: {error:#}");
        }
    }
    drop(guest);
}

#[privileged::test]
fn the_namespace_of_another_users_process_needs_cap_sys_ptrace() {
    let jail = Jail::new().expect("a copy of the agent");
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    let pod = Pod::new(&identity);
    for user in [User::Root, User::Nobody] {
        let records = records(user, &[&identity]);
        let words = arguments(records.path(), &[pod.by_process(&identity)]);
        let agent = jail.start(host.ns(), user, &NEEDED, words).expect("an agent");
        eventually(NOTICE, || {
            let said = agent.log();
            anyhow::ensure!(said.contains("CAP_SYS_PTRACE"), "{said}");
            Ok(())
        })
        .expect("the name of the missing capability");
        pod.guest.fetch(PATH, REQUEST).expect_err("no answer");
    }
}

#[privileged::test]
fn four_capabilities_suffice_to_pin_and_inherit_links_and_maps_for_any_user() {
    let jail = Jail::new().expect("a copy of the agent");
    for user in [User::Root, User::PlainRoot, User::Nobody] {
        let host = Host::new().expect("a node");
        let bpffs = Bpffs::mount().expect("a bpffs");
        // An operator prepares the directory like this for a service that does not run as root.
        fs::set_permissions(bpffs.path(), Permissions::from_mode(0o755)).expect("a mode");
        fs::create_dir(bpffs.pins()).expect("a directory");
        fs::set_permissions(bpffs.pins(), Permissions::from_mode(0o700)).expect("a mode");
        set_owner(user, &bpffs.pins());
        let [identity, in_pod] = [0, 1].map(Identity::of);
        let records = records(user, &[&identity, &in_pod]);
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        let pod = Pod::new(&in_pod);
        let ports = [port_of(&identity), PortArgument::new("tap", in_pod.mac).within(&pod.ns)];
        let mut words = arguments(records.path(), &ports);
        words.retain(|word| word != "--no-pins");
        words.extend(["--pins".into(), bpffs.pins().into()]);
        for life in 0..3 {
            let agent = jail.start(host.ns(), user, &NEEDED, words.clone());
            let agent = agent.unwrap_or_else(|error| panic!("{user:?}, life {life}: {error:#}"));
            for guest in [&guest, &pod.guest] {
                assert_served(guest, &agent);
            }
            // A guest is answered a moment before its program is pinned.
            let pinned = eventually(NOTICE, || {
                anyhow::ensure!(bpffs.port_links().len() == 2, "{:?}", bpffs.port_links());
                Ok(())
            });
            pinned.unwrap_or_else(|error| panic!("{user:?}, life {life}: {error}\n{}", agent.log()));
            agent.kill().expect("it was running");
        }
        guest.fetch(PATH, REQUEST).expect_err("the port stays closed without an agent");
    }
}

#[privileged::test]
fn private_records_of_another_user_need_cap_dac_read_search() {
    let jail = Jail::new().expect("a copy of the agent");
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let records = records(User::Nobody, &[&identity]);
    let record = identity.path(records.path());
    set_owner(User::Root, &record);
    fs::set_permissions(&record, Permissions::from_mode(0o600)).expect("private");
    let words = || arguments(records.path(), &[port_of(&identity)]);
    let agent = jail.start(host.ns(), User::Nobody, &NEEDED, words()).expect("an agent");
    assert!(agent.eventually_logs("Permission denied"), "{}", agent.log());
    drop(agent);
    let mut more = NEEDED.to_vec();
    more.push("dac_read_search");
    let agent = jail.start(host.ns(), User::Nobody, &more, words()).expect("an agent");
    assert_served(&guest, &agent);
}

#[privileged::test]
fn a_serving_agent_drops_the_capabilities_it_no_longer_needs() {
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let records = records(User::Root, &[&identity]);
    let agent = Agent::start(host.ns(), records.path(), &[port_of(&identity)]).expect("an agent");
    assert_served(&guest, &agent);
    let threads = effective(agent.pid()).expect("threads");
    let workers: Vec<_> = threads.iter().filter(|(name, _)| name.starts_with("imds-hub")).collect();
    assert_eq!(workers.len(), 1, "{threads:?}");
    for (name, capabilities) in &threads {
        let is_worker = name.starts_with("imds-hub");
        // CAP_NET_RAW (13) and CAP_IPC_LOCK (14) are needed only to create sockets and their memory.
        let dropped: u64 = if is_worker { !CAP_BPF } else { 1 << 13 | 1 << 14 | 1 << 16 };
        assert_eq!(capabilities & dropped, 0, "{name}: {capabilities:x}");
    }
    for (field, value) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
        assert_eq!(status(agent.pid(), field).expect("a status"), value, "{field}");
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.pid())).expect("limits");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a limit");
    let words: Vec<_> = core.split_whitespace().collect();
    assert_eq!(words[4..6], ["0", "0"], "{core}");
}

/// Environment variable of the process that the sandbox must end.
const PROBE: &str = "XDP_IMDS_SANDBOX_PROBE";

#[test]
fn running_a_program_ends_the_agent_and_starting_a_process_fails() {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    if std::env::var_os(PROBE).is_some() {
        SandboxMode::On.enter(SandboxStage::Start).expect("a fence");
        let forked = Command::new("true").spawn().expect_err("no process");
        assert_eq!(forked.raw_os_error(), Some(libc::EPERM), "{forked}");
        println!("not forked");
        let error = Command::new("true").exec();
        panic!("execve returned: {error}");
    }
    let own = std::env::current_exe().expect("the running program");
    let mut again = Command::new(own);
    again.args(["running_a_program_ends_the_agent", "--nocapture"]).env(PROBE, "1");
    let output = again.output().expect("it ran");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("not forked"), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{:?}", output.status);
}

#[test]
fn the_unit_file_is_valid_and_grants_exactly_the_needed_capabilities() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/systemd/xdp-imds.service");
    let unit = fs::read_to_string(path).expect("the unit file");
    let granted: Vec<String> = unit
        .lines()
        .filter_map(|line| line.strip_prefix("CapabilityBoundingSet="))
        .flat_map(|list| list.split_whitespace())
        .map(|name| name.trim_start_matches("CAP_").to_lowercase())
        .collect();
    let mut expected = NEEDED.to_vec();
    expected.extend([OF_PROCESSES, "bpf", "dac_read_search", "dac_override"]);
    for name in &expected {
        assert!(granted.iter().any(|one| one == name), "{name} is missing");
    }
    assert_eq!(granted.len(), expected.len(), "{granted:?}");
    for line in ["Type=notify", "NoNewPrivileges=yes", "LimitCORE=0", "ProtectSystem=strict", "UMask=0077"] {
        assert!(unit.lines().any(|other| other == line), "no {line}");
    }
    let room = tempfile::tempdir().expect("a directory");
    let copy = room.path().join("xdp-imds.service");
    fs::write(&copy, unit.replace("/usr/bin/xdp-imds", "/bin/true")).expect("a copy");
    // Without systemd, only the checks above run.
    if let Ok(output) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output() {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{said}");
    }
}
