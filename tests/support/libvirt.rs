//! A private libvirt daemon from Debian for one test. Its sockets, configuration, hooks, state and processes end with
//! it.
//!
//! The paths of its hook directory (`/etc/libvirt/hooks`) and of other directories are compiled in. It therefore runs
//! in a mount namespace where they are empty. It also has a process namespace, which ends its domains.

use crate::eventually;
use crate::netns::Namespace;
use crate::process::write_script;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Limit until the daemon answers.
pub const START_PATIENCE: Duration = Duration::from_secs(30);
/// Limit for one call of `virsh`, in seconds.
const CALL: &str = "120";
/// The hook as it is installed.
pub const HOOK: &str = include_str!("../../deploy/libvirt/xdp-imds");
/// The XML namespace of xdp-imds in a domain's metadata.
pub const NAMESPACE: &str = metadata_feed::libvirt::NAMESPACE;

/// Programs that the daemon calls, with their Debian packages.
pub const TOOLS: &[(&str, &str)] = &[
    ("libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

/// The QEMU driver, which has its own package.
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";

/// Runs the daemon inside its namespaces, with the directory of [`Libvirt::room`] as `$1`. The daemon writes only to
/// file systems that end with it. `/etc/passwd` gets the user `libvirt-qemu`, which Debian creates only with the
/// package that also starts libvirtd on the host. The script ends when its standard input closes, because
/// [`Libvirt`] is dropped or the test dies. It needs bash, which reaps the orphans of daemons; libvirt waits for that.
const INSIDE: &str = r#"
    for place in /etc/libvirt /run /var/lib /var/log /var/cache; do mount -t tmpfs tmpfs $place; done
    mount -t sysfs sysfs /sys
    for list in passwd group; do mount --bind "$1/$list" /etc/$list; done
    mkdir /etc/libvirt/hooks
    mount --bind "$1/hooks" /etc/libvirt/hooks
    cp "$1/qemu.conf" "$1/libvirtd.conf" /etc/libvirt/
    while :; do
        echo >> "$1/lives"
        libvirtd < /dev/null > /dev/null 2>> "$1/libvirtd.err" || sleep 0.2
    done &
    while read -r order; do kill "$(cat /run/libvirtd.pid)"; done
"#;

/// QEMU runs as root. Control groups, security modules and the log daemon are off, because the namespace lacks them.
const QEMU: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\ndynamic_ownership = 0\n\
                    namespaces = []\ncgroup_controllers = []\nstdio_handler = \"file\"\n";

/// A libvirt daemon. Its domains end with it.
#[derive(Debug)]
pub struct Libvirt {
    room: tempfile::TempDir,
    child: Child,
}

/// The missing Debian packages, as an error text.
#[must_use]
pub fn missing() -> Option<String> {
    let absent = |program: &str| {
        let places = ["/usr/sbin", "/usr/bin"].map(|place| Path::new(place).join(program));
        !places.iter().any(|path| path.is_file())
    };
    let mut packages: Vec<_> =
        TOOLS.iter().filter(|(program, _)| absent(program)).map(|(_, package)| *package).collect();
    if !Path::new(DRIVER).exists() {
        packages.push("libvirt-daemon-driver-qemu");
    }
    (!packages.is_empty()).then(|| format!("it needs Debian's {}", packages.join(", ")))
}

/// The installed hook, with the paths of another program and other directories.
#[must_use]
pub fn hook(agent: &Path, run: &Path, files: &Path) -> String {
    let options = format!("options='--run {} --files {}'\n", run.display(), files.display());
    HOOK.replace("agent=/usr/bin/xdp-imds", &format!("agent={}", agent.display()))
        .replace("options=\n", &options)
}

impl Libvirt {
    /// Starts a daemon inside `ns` with one hook.
    ///
    /// # Errors
    /// When it does not answer within [`START_PATIENCE`]. The error contains its output.
    pub fn start(ns: &Namespace, hook: &str) -> Result<Self> {
        let room = tempfile::tempdir().context("cannot make a directory")?;
        let at = |name: &str| room.path().join(name);
        fs::create_dir_all(at("hooks/qemu.d"))?;
        fs::create_dir(at("sockets"))?;
        fs::write(at("qemu.conf"), QEMU)?;
        let sockets = at("sockets").display().to_string();
        fs::write(
            at("libvirtd.conf"),
            format!("auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nunix_sock_dir = \"{sockets}\"\n"),
        )?;
        for (list, entry) in [("passwd", "64055::/:/usr/sbin/nologin"), ("group", "")] {
            let own = fs::read_to_string(Path::new("/etc").join(list))?;
            fs::write(at(list), format!("{own}libvirt-qemu:x:64055:{entry}\n"))?;
        }
        fs::write(at("lives"), "")?;
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]);
        command.args(["bash", "-ec", INSIDE, "bash"]).arg(room.path());
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let child = ns.spawn(&mut command)?;
        let libvirt = Self { room, child };
        libvirt.set_hook(hook)?;
        libvirt.answers()?;
        Ok(libvirt)
    }

    /// Replaces the hook.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_hook(&self, text: &str) -> Result<()> {
        let path = self.room.path().join("hooks/qemu.d/xdp-imds");
        write_script(&path, text)
    }

    /// The daemon's directory, which domains can read.
    #[must_use]
    pub fn room(&self) -> &Path {
        self.room.path()
    }

    /// The directory of the daemon's running domains, which is in its own mount namespace.
    #[must_use]
    pub fn running(&self) -> PathBuf {
        let root = format!("/proc/{}/root", self.child.id());
        Path::new(&root).join(metadata_feed::libvirt::RUNNING.trim_start_matches('/'))
    }

    /// Runs `virsh` and returns its output.
    ///
    /// # Errors
    /// When it fails. The error contains its output.
    pub fn virsh(&self, words: &[&str]) -> Result<String> {
        let socket = self.room.path().join("sockets/libvirt-sock");
        let mut command = Command::new("timeout");
        command.args([CALL, "virsh", "--quiet"]).args(words).stdin(Stdio::null()).env("LC_ALL", "C.UTF-8");
        command.env("LIBVIRT_DEFAULT_URI", format!("qemu:///system?socket={}", socket.display()));
        let output = command.output().context("cannot run virsh")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "virsh {} ended with {}: {}\nlibvirtd's log:\n{}",
            words.join(" "),
            output.status,
            said.trim(),
            self.log()
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Asks a domain's QEMU for its status.
    ///
    /// The answer shows that libvirtd is connected to QEMU. `destroy` fails while a new libvirtd still connects,
    /// because libvirtd then finds the domain stopped.
    ///
    /// # Errors
    /// When the domain does not run.
    pub fn status_of(&self, name: &str) -> Result<String> {
        self.virsh(&["qemu-monitor-command", name, "--hmp", "info status"])
    }

    /// Defines a domain and starts it.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub fn boot(&self, name: &str, xml: &str) -> Result<()> {
        let path: PathBuf = self.room.path().join(format!("{name}.xml"));
        fs::write(&path, xml)?;
        self.virsh(&["define", &path.display().to_string()])?;
        self.virsh(&["start", name])?;
        Ok(())
    }

    /// Restarts the daemon. Domains keep running.
    ///
    /// # Errors
    /// When the new daemon does not answer within [`START_PATIENCE`].
    pub fn restart(&mut self) -> Result<()> {
        let lives = || -> Result<usize> { Ok(fs::read(self.room.path().join("lives"))?.len()) };
        let before = lives()?;
        let orders = self.child.stdin.as_mut().context("standard input is piped")?;
        writeln!(orders, "restart")?;
        eventually(START_PATIENCE, || {
            ensure!(lives()? > before, "the old daemon is still there");
            Ok(())
        })?;
        self.answers()
    }

    fn answers(&self) -> Result<()> {
        let asked = eventually(START_PATIENCE, || self.virsh(&["list"]));
        asked.map(drop).with_context(|| format!("libvirtd does not answer; its log:\n{}", self.log()))
    }

    /// The errors and warnings that the daemon has logged so far.
    fn log(&self) -> String {
        fs::read_to_string(self.room.path().join("libvirtd.err")).unwrap_or_default()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // The script and its process namespace end with this input.
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait() {
            eprintln!("cannot wait for the end of libvirt {}: {error}", self.child.id());
        }
    }
}
