//! Pretended hypervisors: an sshd in a network namespace with taps, which sees processes and files of its own, with or
//! without systemd. What it writes goes into memory and ends with it.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use testbed::eventually;
use testbed::guest::{Guest, Spec};
use testbed::host::Host;
use testbed::netns::{Namespace, run};
use testbed::record::Identity;
use testbed::{agent, privileged};

/// Guests of each hypervisor.
const GUESTS: u16 = 2;
/// Limit until an sshd accepts connections.
const UP_WITHIN: Duration = Duration::from_secs(20);
/// Limit until the processes of a hypervisor are gone.
const GONE_WITHIN: Duration = Duration::from_secs(10);
/// What a load may leave on a host.
pub(crate) const PLACES: [&str; 9] = [
    "/etc/systemd/system/xdp-imds.service",
    "/etc/xdp-imds",
    "/run/xdp-imds",
    "/run/xdp-imds.pid",
    "/usr/local/bin/xdp-imds",
    "/usr/local/lib/xdp-imds",
    "/var/lib/xdp-imds",
    "/var/log/xdp-imds",
    "/var/log/xdp-imds.log",
];

/// The first process of a hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Init {
    /// sshd alone.
    Sshd,
    /// systemd, which starts sshd.
    Systemd,
}

/// Becomes the hypervisor with the arguments after `$1`. For systemd, this process first enters a new control group
/// `$1`, so that systemd finds one that it may use.
const OUTSIDE: &str = r#"
    group=$1
    shift
    for top in /sys/fs/cgroup /sys/fs/cgroup/unified; do
        [ "$6" = systemd ] && [ -e "$top/cgroup.procs" ] || continue
        mkdir "$top/$group"
        echo $$ > "$top/$group/cgroup.procs"
    done
    exec unshare --pid --fork --kill-child --mount --cgroup --propagation private sh -ec "$@"
"#;

/// Removes the control group `$1` and those below it.
const CLEAN: &str = r#"
    for top in /sys/fs/cgroup /sys/fs/cgroup/unified; do
        if [ -d "$top/$1" ]; then find "$top/$1" -depth -type d -exec rmdir {} +; fi
    done
"#;

/// Makes the hypervisor's own view of this system in the directory `$1`, and starts its sshd, which listens on `$3`,
/// with the files of `$2`, by the first process `$4`.
const INSIDE: &str = r#"
    mount -t tmpfs tmpfs "$1"
    mkdir "$1/upper" "$1/work" "$1/system"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/system"
    cd "$1/system"
    mount -t tmpfs -o mode=0755 tmpfs dev
    mkdir dev/net dev/pts dev/shm
    for device in null zero full random urandom tty net/tun; do
        : > "dev/$device"
        mount --bind "/dev/$device" "dev/$device"
    done
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    mount -t bpf -o mode=0700 bpf sys/fs/bpf
    mount -t tmpfs -o mode=0755 tmpfs run
    mkdir -p run/sshd srv/records srv/files etc/pretended
    mount --bind "$2/records" srv/records
    mount --bind "$2/files" srv/files
    cp "$2/host" "$2/user.pub" etc/pretended
    # A locked account may not log in.
    sed -i 's/^root:[^:]*:/root:*:/' etc/shadow
    # Nothing of this system's own agent shows.
    rm -rf etc/xdp-imds usr/local/bin/xdp-imds usr/local/lib/xdp-imds var/lib/xdp-imds var/log/xdp-imds.log
    sshd="/usr/sbin/sshd -D -e -f /dev/null -h /etc/pretended/host -o PidFile=none -o UsePAM=no -o LogLevel=ERROR \
        -o ListenAddress=$3 -o StrictModes=no -o PermitRootLogin=yes \
        -o AuthorizedKeysFile=/etc/pretended/user.pub"
    if [ "$4" = sshd ]; then exec chroot . $sshd; fi
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    # Services of this system would change its kernel's variables, load modules and so on: none of them starts.
    rm -rf etc/systemd/system/*.wants lib/systemd/system/*.wants lib/systemd/system-generators
    printf '[Service]\nExecStart=%s\nRuntimeDirectory=sshd\n' "$sshd" > etc/systemd/system/pretended.service
    printf '[Unit]\nWants=pretended.service systemd-journald.service\n' > etc/systemd/system/pretended.target
    export container=pretended
    exec chroot . /lib/systemd/systemd --system --unit=pretended.target --log-target=null --show-status=no
"#;

/// What this machine lacks for pretended hypervisors; `None` if nothing.
pub(crate) fn missing() -> Option<String> {
    let tools = [("sshd", "openssh-server"), ("ssh-keygen", "openssh-client"), ("strip", "binutils")];
    let lacks = || tools.into_iter().find(|(program, _)| shell::which(program).is_none());
    let tool = || lacks().map(|(program, package)| format!("there is no {program}; install {package}"));
    let systemd = || (!Path::new("/lib/systemd/systemd").exists()).then(|| "there is no systemd".to_owned());
    privileged::missing().map(str::to_owned).or_else(tool).or_else(systemd)
}

/// Hypervisors, and the host of the person who loads them.
pub(crate) struct Site {
    pub(crate) hypervisors: Vec<Hypervisor>,
    admin: Arc<Namespace>,
    room: tempfile::TempDir,
}

impl Site {
    pub(crate) fn new(count: u16, init: Init) -> Self {
        let room = tempfile::tempdir().expect("a directory");
        key(&room.path().join("user"));
        let admin = Arc::new(Namespace::new("admin").expect("a namespace"));
        let mut config =
            format!("IdentityFile {}\nUser root\nLogLevel ERROR\n", room.path().join("user").display());
        let hypervisors = (0..count).map(|number| {
            let (one, entry) = Hypervisor::start((number, init), &admin, &room);
            config.push_str(&entry);
            one
        });
        let hypervisors: Vec<_> = hypervisors.collect();
        let site = Self { hypervisors, admin, room };
        site.file("ssh_config", &config);
        site.hypervisors.iter().for_each(Hypervisor::await_up);
        site
    }

    /// Writes a file; returns its path.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.room.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    }

    /// Returns a configuration that serves every hypervisor's guests.
    pub(crate) fn configuration(&self) -> String {
        let guests = self.hypervisors.iter().flat_map(|one| &one.guests);
        let ports = guests.map(|guest| {
            format!("- {{ifname: {}, mac: \"{}\"}}\n", guest.host_tap().name(), guest.identity().mac)
        });
        format!("records: /srv/records\nports:\n{}", ports.collect::<String>())
    }

    /// Returns the path of that configuration.
    pub(crate) fn config(&self) -> String {
        self.file("config.yaml", &self.configuration())
    }

    /// Returns the path of the agent without symbols, so that it fits several times into a hypervisor's memory. Agents
    /// of different names differ in their bytes.
    pub(crate) fn agent(&self, name: &str) -> String {
        static STRIPPED: OnceLock<Vec<u8>> = OnceLock::new();
        let path = self.room.path().join(name);
        let stripped = STRIPPED.get_or_init(|| {
            let built = agent::binary().expect("the agent is built");
            run(Command::new("strip").arg("-o").arg(&path).arg(built)).expect("a stripped agent");
            fs::read(&path).expect("the agent")
        });
        // Nothing reads what follows the last section.
        let bytes = [stripped, name.as_bytes()].concat();
        fs::write(&path, bytes).expect("another agent");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        path.display().to_string()
    }

    /// Runs a verb on all hypervisors, which succeeds; returns the rows of its results.
    pub(crate) fn succeeds(&self, words: &[&str]) -> Vec<Value> {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{said}");
        assert!(output.status.success(), "{words:?}: {}", output.status);
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Runs a verb on all hypervisors, which fails; returns the rows of its results, and what it said.
    pub(crate) fn fails(&self, words: &[&str]) -> (Vec<Value>, String) {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{words:?}: {said}");
        (serde_json::from_slice(&output.stdout).unwrap_or_default(), said)
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xdp-imds-load"));
        command.args(words).arg("--json").arg("--host");
        command.args(self.hypervisors.iter().map(|one| &one.name));
        let config = self.room.path().join("ssh_config");
        command.arg("--ssh-option=-F").arg(format!("--ssh-option={}", config.display()));
        self.admin.output(&mut command).expect("the verb runs")
    }
}

/// A pretended hypervisor. Its processes and files end with it.
pub(crate) struct Hypervisor {
    pub(crate) name: String,
    // Fields are dropped in this order: the sshd and all that it started, the guests, the taps' namespace.
    sshd: Sshd,
    pub(crate) guests: Vec<Arc<Guest>>,
    pub(crate) host: Host,
    admin: Arc<Namespace>,
    ssh_config: PathBuf,
    room: tempfile::TempDir,
}

/// The first process of a hypervisor, and its control group. All others end with it.
struct Sshd {
    process: Child,
    group: String,
}

impl Sshd {
    fn start(host: &Host, files: &Path, (address, init): (&str, Init)) -> Self {
        let group = host.ns().name().to_owned();
        let mut command = Command::new("sh");
        command.args(["-ec", OUTSIDE, "sh", &group, INSIDE, "sh"]).arg(files.join("root")).arg(files);
        command.arg(address).arg(if init == Init::Sshd { "sshd" } else { "systemd" });
        let process = host.ns().spawn(command.stdin(Stdio::null())).expect("an sshd");
        Self { process, group }
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        if let Err(error) = self.process.kill().and_then(|()| self.process.wait().map(drop)) {
            eprintln!("cannot end a hypervisor: {error}");
        }
        // The kernel empties the groups shortly after it has ended the processes.
        let clean = || run(Command::new("sh").args(["-ec", CLEAN, "sh", &self.group]));
        if let Err(error) = eventually(GONE_WITHIN, clean) {
            eprintln!("cannot remove control groups: {error:#}");
        }
    }
}

impl Hypervisor {
    /// Starts a hypervisor. Also returns its entry in ssh's configuration.
    fn start(
        (number, init): (u16, Init),
        admin: &Arc<Namespace>,
        site: &tempfile::TempDir,
    ) -> (Self, String) {
        let name = format!("hv{}", number + 1);
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path();
        for directory in ["root", "records", "files"] {
            fs::create_dir(path.join(directory)).expect("a directory");
        }
        key(&path.join("host"));
        fs::copy(site.path().join("user.pub"), path.join("user.pub")).expect("the user's key");
        let host = Host::new().expect("a node");
        let (here, there) = (format!("10.77.{number}.1"), format!("10.77.{number}.2"));
        let (inside, outside) = (host.ns().name(), format!("to-{name}"));
        let link = format!("link add {outside} type veth peer name mgmt0 netns {inside}");
        admin.ip(&link).expect("a link");
        for (ns, device, address) in [(&**admin, outside.as_str(), &here), (host.ns(), "mgmt0", &there)] {
            ns.ip(&format!("addr add {address}/24 dev {device}")).expect("an address");
            ns.ip(&format!("link set {device} up")).expect("a device");
        }
        let identities = (0..GUESTS).map(|guest| Identity::of(number * GUESTS + guest));
        let guests = identities.map(|identity| {
            identity.write(&path.join("records"), 1).expect("a record");
            Arc::new(Guest::boot(&host, &Spec::of(&identity)).expect("a guest"))
        });
        let guests = guests.collect();
        let sshd = Sshd::start(&host, path, (&there, init));
        let known = site.path().join(format!("known-{name}"));
        let public = fs::read_to_string(path.join("host.pub")).expect("a key");
        fs::write(&known, format!("{there} {public}")).expect("a file");
        let entry = format!("Host {name}\nHostName {there}\nUserKnownHostsFile {}\n", known.display());
        let ssh_config = site.path().join("ssh_config");
        let one = Self { name, sshd, guests, host, admin: Arc::clone(admin), ssh_config, room };
        (one, entry)
    }

    fn await_up(&self) {
        let up = eventually(UP_WITHIN, || self.ssh("true"));
        up.unwrap_or_else(|error| panic!("{} (process {}): {error:#}", self.name, self.sshd.process.id()));
    }

    fn ssh(&self, line: &str) -> anyhow::Result<String> {
        let mut command = Command::new("ssh");
        command.arg("-F").arg(&self.ssh_config).arg(&self.name).arg(line);
        let output = self.admin.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{line}: {}: {said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a line of shell on the hypervisor; returns what it prints.
    pub(crate) fn on(&self, line: &str) -> String {
        self.ssh(line).unwrap_or_else(|error| panic!("{}: {error:#}", self.name))
    }

    /// Gives the hypervisor a file as `/srv/files/NAME`.
    pub(crate) fn give(&self, file: &str, name: &str) {
        fs::copy(file, self.room.path().join("files").join(name)).expect("a file");
    }

    /// The process that answers for the agent.
    pub(crate) fn pid(&self) -> u64 {
        let status = self.on("/usr/local/bin/xdp-imds status --json");
        serde_json::from_str::<Value>(&status).expect("JSON")["pid"].as_u64().expect("a number")
    }

    /// The digests of the present and the previous binary; only the first if there is one.
    pub(crate) fn digests(&self) -> Vec<String> {
        let listed =
            self.on("sha256sum /usr/local/bin/xdp-imds; sha256sum /usr/local/lib/xdp-imds/previous || true");
        listed.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    }

    /// Those of [`PLACES`] that exist.
    pub(crate) fn present(&self) -> Vec<&'static str> {
        let line = format!("for one in {}; do if [ -e $one ]; then echo $one; fi; done", PLACES.join(" "));
        let found = self.on(&line);
        PLACES.into_iter().filter(|place| found.lines().any(|line| line == *place)).collect()
    }

    /// What is pinned.
    pub(crate) fn pinned(&self) -> String {
        self.on("ls -A /sys/fs/bpf")
    }
}

/// Makes a pair of keys, `path` and `path`.pub.
fn key(path: &Path) {
    run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path)).expect("keys");
}
