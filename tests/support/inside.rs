//! The file system for a program inside a guest. The guest's network namespace alone isolates only the network.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A guest's `/etc/hosts`: only GCE's name has an address.
const HOSTS: &str = "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n";
/// A guest's `/etc/nsswitch.conf`. It has no DNS, because waiting for an absent server takes time.
const NAME_SOURCES: &str = "hosts: files\n";
/// Mounts the guest's devices, empty state directories and the files `$1` and `$2`. Then runs the remaining arguments.
/// The mount namespace ends with the program.
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

/// A command to which the caller adds a program and its arguments. The program sees a guest's file system and runs for
/// at most `seconds`. `state` is its private directory and home.
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
