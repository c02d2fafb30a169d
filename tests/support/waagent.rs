//! The unmodified Azure agent for Linux of any Debian release. It runs as a daemon in a guest, in a root of its
//! release.

use crate::guest::Guest;
use crate::packages::{ESSENTIAL, Packages, With};
use anyhow::{Context as _, Result};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};

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
pub struct Waagent {
    packages: Packages,
}

impl Waagent {
    /// Returns the agent of a Debian release. Skips the test like [`Packages::or_skip`].
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn or_skip(release: &str) -> Option<Self> {
        let packages = Packages::or_skip(release, &PACKAGES, With::Dependencies)?;
        Some(Self { packages })
    }

    /// The version of its package.
    #[must_use]
    pub fn version(&self) -> &str {
        self.packages.version("waagent").unwrap_or("unknown")
    }

    /// Starts the daemon inside a guest. It uses the guest's network, and its own processes, mounts and host name. No
    /// other program may use `directory`.
    ///
    /// # Errors
    /// When a file cannot be written or `unshare` cannot be started.
    pub fn start(&self, guest: &Guest, directory: &Path) -> Result<Daemon> {
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
pub struct Daemon {
    child: Child,
    log: std::path::PathBuf,
}

impl Daemon {
    /// Its output so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The warnings and errors so far, without timestamps and without those that a namespace causes.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
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
