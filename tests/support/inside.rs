//! The file system of a program that runs inside a guest, because a network namespace isolates only its network.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A guest's `/etc/hosts`: only GCE's name has an address.
const HOSTS: &str = "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n";
/// A guest's `/etc/nsswitch.conf`. It has no DNS, because waiting for an absent server takes time.
const NAME_SOURCES: &str = "hosts: files\n";
/// Adapts the file system to the network namespace, in a mount namespace that ends with the program: the guest's
/// devices, empty state directories, the two given files. Then runs the remaining words.
const SEEN_FROM_INSIDE: &str = "
    mount -t sysfs sysfs /sys
    for state in /run /var/lib/hyperv; do
        if [ -d $state ]; then mount -t tmpfs tmpfs $state; fi
    done
    mount --bind \"$1\" /etc/hosts
    mount --bind \"$2\" /etc/nsswitch.conf
    shift 2
    exec \"$@\"
";

/// A command that runs the words appended to it inside a guest's view of the file system, for at most `seconds`.
/// `state` is the program's private directory and home.
///
/// # Errors
/// When nothing can be written to `state`.
pub fn command(state: &Path, seconds: u32) -> Result<Command> {
    let (hosts, sources) = (state.join("hosts"), state.join("nsswitch.conf"));
    fs::write(&hosts, HOSTS)
        .and_then(|()| fs::write(&sources, NAME_SOURCES))
        .with_context(|| format!("cannot write to {}", state.display()))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", SEEN_FROM_INSIDE, "sh"]);
    command.args([&hosts, &sources]).args(["timeout", &seconds.to_string()]);
    // The command does not inherit proxy, credentials or locale.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", state).env("LC_ALL", "C.UTF-8");
    Ok(command)
}
